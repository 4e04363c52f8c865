"""Opening a model: its config and tokenizer at once, its weights when asked for."""

from dataclasses import dataclass, replace
from pathlib import Path

from jax.sharding import Mesh

from spec_jax.config import ModelConfig
from spec_jax.errors import UserError
from spec_jax.models.decoder import Decoder
from spec_jax.sharding import ShardingRules
from spec_jax.tokenizer import Tokenizer

from .fields import damaged_fields
from .gguf_model import GGUFModel
from .gguf_tokenizer import build_tokenizer
from .huggingface import HuggingFaceModel, read_tokenizer
from .resolve import resolve
from .weights import TensorReader, checkpoint_weights


@dataclass(frozen=True)
class ModelFiles:
    """A model whose files are open: config and tokenizer are known, weights not read yet."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    reader: TensorReader

    def without_kv_scales(self) -> "ModelFiles":
        """For a cache that is not float8: scales that a checkpoint has for it are not loaded."""
        return replace(self, config=replace(self.config, has_kv_scales=False))

    def load(self, *, dtype: str = "bfloat16", mesh: Mesh | None = None, rules: ShardingRules | None = None) -> Decoder:
        """Reads the weights, cast to `dtype`, onto the devices. Raises UserError for missing or unfit tensors."""
        return Decoder(checkpoint_weights(self.reader, dtype, mesh, rules), self.config, rules)


def open_model(model: str) -> ModelFiles:
    """Opens a built-in name, a Hugging Face folder, a `.gguf` file or a hub id; fetches it if need be.

    Raises UserError naming what is missing, damaged or not supported.
    """
    path = resolve(model)
    if path.is_dir():
        folder = HuggingFaceModel(path)
        return ModelFiles(path, folder.config, Tokenizer(*read_tokenizer(path)), folder)
    if path.suffix == ".safetensors":
        raise UserError(f"{path} is a weight file: give the folder that holds it and its config.json")
    file = GGUFModel(path)
    return ModelFiles(path, file.config, _gguf_tokenizer(file), file)


def _gguf_tokenizer(model: GGUFModel) -> Tokenizer:
    metadata, path = model.file.metadata, model.file.path
    backend = build_tokenizer(metadata, path)
    tokens, template = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise UserError(f"{path}: tokenizer.chat_template is no text")
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    with damaged_fields(path):
        named = {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    return Tokenizer(backend, template, named)
