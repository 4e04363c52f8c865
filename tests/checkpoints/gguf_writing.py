"""Writes GGUF files with the public `gguf` package, the way llama.cpp's converter does."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants

from tests.checkpoints.helpers import FIXTURES, saved_tensors

F32 = GGMLQuantizationType.F32
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def converted_tensors(name: str) -> dict[str, np.ndarray]:
    """The tensors of a fixture under their GGUF names; query and key rows of Llama models interleaved."""
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    kind = "llama" if raw["model_type"] == "mistral" else raw["model_type"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], raw["num_hidden_layers"])
    heads = {".attn_q.": raw["num_attention_heads"], ".attn_k.": raw["num_key_value_heads"]}
    tensors = {}
    for hf_name, values in saved_tensors(name).items():
        stored = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, hf_name
        for part, num_heads in heads.items():
            if kind == "llama" and part in stored:
                values = interleave(values, num_heads)
        tensors[stored] = values
    if raw["rope_parameters"]["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(raw["rope_parameters"], raw["head_dim"])
    return tensors


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    rest = values.shape[1:]
    size = values.shape[0] // num_heads
    return values.reshape(num_heads, 2, size // 2, *rest).swapaxes(1, 2).reshape(values.shape)


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """What llama.cpp stores for Llama 3.1 and later: a divisor for each frequency."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        if turns > rope["high_freq_factor"]:
            factors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def write_gguf(
    path: Path,
    name: str = "llama",
    kind: GGMLQuantizationType = F32,
    *,
    architecture: str | None = None,
    extra: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Writes the fixture `name` with its matrices in `kind`; returns the tensors as the file holds them.

    `extra` adds metadata, or replaces it; `without` leaves out tensors and metadata.
    """
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    model = "llama" if raw["model_type"] == "mistral" else raw["model_type"]
    rope = raw["rope_parameters"]
    fields: dict[str, Any] = {
        f"{model}.context_length": raw["max_position_embeddings"],
        f"{model}.embedding_length": raw["hidden_size"],
        f"{model}.block_count": raw["num_hidden_layers"],
        f"{model}.feed_forward_length": raw["intermediate_size"],
        f"{model}.attention.head_count": raw["num_attention_heads"],
        f"{model}.attention.head_count_kv": raw["num_key_value_heads"],
        f"{model}.attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        f"{model}.rope.freq_base": rope["rope_theta"],
    }
    if raw.get("head_dim"):
        fields |= {f"{model}.attention.{part}_length": raw["head_dim"] for part in ("key", "value")}
    if rope["rope_type"] == "linear":
        fields |= {f"{model}.rope.scaling.type": "linear", f"{model}.rope.scaling.factor": rope["factor"]}
    if raw.get("sliding_window"):
        fields[f"{model}.attention.sliding_window"] = raw["sliding_window"]
    fields |= extra or {}

    writer = gguf.GGUFWriter(path, architecture or model)
    for key, value in fields.items():
        if key not in without:
            _add_field(writer, key, value)
    stored = {key: values for key, values in converted_tensors(name).items() if key not in without}
    for key, values in stored.items():
        if values.ndim == 1:
            writer.add_tensor(key, values)
        else:
            stored[key] = quants.quantize(values, kind)
            writer.add_tensor(key, stored[key], raw_dtype=kind)
    finish(writer)
    return stored


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
