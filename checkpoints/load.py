"""Loading a model: its config, its weights on the devices, its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from spec_jax.config import ModelConfig
from spec_jax.errors import UserError
from spec_jax.models.decoder import Decoder
from spec_jax.sharding import ShardingRules
from spec_jax.tokenizer import Tokenizer

from .gguf_model import GGUFModel
from .gguf_tokenizer import build_tokenizer
from .huggingface import HuggingFaceModel, read_tokenizer
from .resolve import resolve
from .weights import TensorReader, checkpoint_weights


@dataclass(frozen=True)
class LoadedModel:
    """A target ready to run."""

    path: Path
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer


def load_model(
    model: str, *, dtype: str = "bfloat16", mesh: Mesh | None = None, rules: ShardingRules | None = None
) -> LoadedModel:
    """Loads a built-in name, a Hugging Face folder, a `.gguf` file or a hub id, with weights cast to `dtype`.

    Raises UserError naming what is missing, damaged or not supported.
    """
    path = resolve(model)
    reader: TensorReader
    if path.is_dir():
        reader = HuggingFaceModel(path)
        tokenizer = Tokenizer(*read_tokenizer(path))
    elif path.suffix == ".safetensors":
        raise UserError(f"{path} is a weight file: give the folder that holds it and its config.json")
    else:
        reader = GGUFModel(path)
        tokenizer = _gguf_tokenizer(reader)
    if mesh is not None:
        (rules or ShardingRules()).check(mesh, reader.config)
    decoder = Decoder(checkpoint_weights(reader, dtype, mesh, rules), reader.config)
    return LoadedModel(path, reader.config, decoder, tokenizer)


def _gguf_tokenizer(model: GGUFModel) -> Tokenizer:
    metadata = model.file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return Tokenizer(
        build_tokenizer(metadata, model.file.path),
        metadata.get("tokenizer.chat_template"),
        {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)},
    )
