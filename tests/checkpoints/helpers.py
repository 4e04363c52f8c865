"""The fixture checkpoints with their reference logits, and a plain way to run a decoder over a text."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from spec_jax.cache import abstract_cache, create_cache
from spec_jax.checkpoints.weights import TensorReader, checkpoint_weights
from spec_jax.models.decoder import Decoder, Rows

FIXTURES = Path(__file__).parent.parent / "fixtures"
PAGE_SIZE = 4
TABLE = [5, 2, 7, 1, 8, 3, 6, 4]  # pages out of order, and two more than the texts need
TOLERANCE = 2e-4


def reference(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [T] and the float32 logits [T, V] that `transformers` computes for them."""
    with np.load(FIXTURES / name / "logits.npz") as saved:
        return saved["tokens"], saved["logits"]


def saved_tensors(name: str) -> dict[str, np.ndarray]:
    """All tensors of a fixture in float32, by Hugging Face name."""
    files = sorted((FIXTURES / name).glob("*.safetensors"))
    return {key: value.astype(np.float32) for file in files for key, value in load_file(file).items()}


def copy_of(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, folder / name))


def load(reader: TensorReader) -> Decoder:
    return Decoder(checkpoint_weights(reader, dtype="float32"), reader.config)


def logits_of(decoder: Decoder, tokens: np.ndarray, chunks: Iterable[int] = ()) -> np.ndarray:
    """Logits [T, V] of one sequence through the paged cache: one pass for each of `chunks`, then one for the rest."""
    cache = create_cache(abstract_cache(decoder.config, len(TABLE) + 1, PAGE_SIZE, "float32"))
    logits = []
    for chunk in np.split(np.arange(len(tokens)), np.cumsum([*chunks])):
        rows = Rows(jnp.asarray(chunk[None]), jnp.asarray([TABLE]), jnp.ones((1, len(chunk)), bool))
        hidden, cache = decoder(jnp.asarray(tokens[chunk][None]), rows, cache)
        logits.append(np.asarray(decoder.logits(hidden))[0])
    return np.concatenate(logits)


def edit_config(folder: Path, **changes: Any) -> Path:
    """Sets fields of config.json; a field set to `...` is taken out."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)
    return folder
