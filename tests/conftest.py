"""Eight virtual CPU devices for all tests, and tiny models that any test can have at once."""

import os

# Tests compile much and run little: machine code that is not optimized takes half the time to make. `make test-all` says
# otherwise: its proofs are of what users run.
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from spec_jax.config import ModelConfig
from spec_jax.kernels import NotBuilt, build_native
from spec_jax.models.decoder import Decoder
from spec_jax.models.layers import random_weights
from tests.reference import hf_weights

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"  # as an expression: Jinja drops a line end that closes a template
)

TINY = ModelConfig(
    vocab_size=259,  # 256 bytes and three control tokens
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position=256,
    tie_word_embeddings=False,
    eos_token_ids=(2,),
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, after three control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def write_model_folder(folder: Path, decoder: Decoder) -> Path:
    """Saves a decoder as a Hugging Face folder with the byte tokenizer."""
    config = decoder.config
    folder.mkdir(parents=True, exist_ok=True)
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({k: np.ascontiguousarray(v) for k, v in hf_weights(decoder).items()}, folder / "model.safetensors")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return TINY


@pytest.fixture(scope="session")
def tiny_decoder() -> Decoder:
    return Decoder(random_weights(seed=1, dtype=jnp.float32), TINY)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_decoder: Decoder) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny", tiny_decoder)


@pytest.fixture(scope="session", autouse=True)
def _native_kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The kernels for CPUs, from the first test on, as an `LLM` would build them; else the reason why they are not there."""
    try:
        build_native(tmp_path_factory.getbasetemp() / "native")
    except NotBuilt as reason:
        return str(reason)
    return ""


@pytest.fixture
def native_kernels(_native_kernels: str) -> None:
    if _native_kernels:
        pytest.skip(_native_kernels)


@pytest.fixture(scope="session", autouse=True)
def _own_compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor fill the user's cache of compiled programs, but share one; the model cache is the user's."""
    import jax

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
