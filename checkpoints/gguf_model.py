"""From a GGUF file to this project's terms: config, tensors under Hugging Face names, tokenizer, chat template."""

from pathlib import Path

import numpy as np

from spec_jax.config import LinearRopeScaling, ModelConfig, RopeFactors
from spec_jax.errors import UserError

from .fields import check_config, damaged_fields
from .gguf_file import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`general.architecture` values that the decoder covers; Mistral files say `llama`."""

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GGUFModel:
    """Tensors and config of a GGUF file, as if it were a Hugging Face checkpoint."""

    def __init__(self, path: Path):
        self.file = GGUFFile(path)
        with damaged_fields(path):
            self.config = check_config(_read_config(self.file), path)

    def kv_scale(self, layer: int, kind: str) -> np.ndarray | None:
        """GGUF has no scales for a cache."""
        return None

    def tensor(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The tensor that Hugging Face calls `name`, in `dtype`. Raises UserError when the file does not have it."""
        stored = _stored_name(name)
        if stored not in self.file.names():
            raise UserError(f"{self.file.path} has no tensor {stored} (for {name}): the file is incomplete")
        values = self.file.tensor(stored, dtype)
        if self.file.metadata["general.architecture"] != "llama":
            return values
        # llama.cpp stores the rotary pairs of Llama models interleaved: channel 2i + j was channel j * hd / 2 + i.
        if ".attn_q." in stored:
            return _uninterleave(values, self.config.num_heads)
        if ".attn_k." in stored:
            return _uninterleave(values, self.config.num_kv_heads)
        return values


def _stored_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _uninterleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    rest = values.shape[1:]
    return values.reshape(num_heads, -1, 2, *rest).swapaxes(1, 2).reshape(values.shape)


def _read_config(file: GGUFFile) -> ModelConfig:
    metadata, names = file.metadata, set(file.names())
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )

    def get(key: str, default=None):
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise UserError(f"{file.path} lacks the field {architecture}.{key}: the file is incomplete")
        return value

    if get("expert_count", 0):
        raise UserError(f"{file.path}: mixtures of experts ({get('expert_count')} experts) are not supported")
    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UserError(f"{file.path}: partial rotary embeddings are not supported")
    for required in ("token_embd.weight", "output_norm.weight"):
        if required not in names:
            raise UserError(f"{file.path} has no tensor {required}: the file is incomplete")
    window = get("attention.sliding_window", 0)
    return ModelConfig(
        vocab_size=file.shape("token_embd.weight")[0],
        hidden_size=hidden_size,
        num_layers=get("block_count"),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_size=get("feed_forward_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0)),
        max_position=get("context_length"),
        qkv_bias="blk.0.attn_q.bias" in names,
        attention_output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        tie_word_embeddings="output.weight" not in names,
        sliding_window=window or None,
        eos_token_ids=_eos_ids(metadata),
    )


def _rope_scaling(file: GGUFFile, kind: str, factor: float) -> LinearRopeScaling | RopeFactors | None:
    if "rope_freqs.weight" in file.names():  # Llama 3.1's smoothing, precomputed by llama.cpp
        return RopeFactors(tuple(file.tensor("rope_freqs.weight", np.dtype(np.float32)).tolist()))
    if kind == "linear":
        return LinearRopeScaling(factor)
    if kind != "none":
        raise UserError(f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, llama3")
    return None


def _eos_ids(metadata: dict) -> tuple[int, ...]:
    ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))
