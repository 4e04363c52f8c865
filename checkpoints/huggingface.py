"""Reading a Hugging Face model folder: config.json, safetensors (one file or sharded), tokenizer, chat template."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from spec_jax.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from spec_jax.errors import UserError

from .fields import check_config, damaged_fields
from .tensor_folder import TensorFolder, read_json

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class HuggingFaceModel:
    """Tensors and config of a model folder."""

    def __init__(self, folder: Path):
        self._tensors = TensorFolder(folder)
        has_kv_scales = any(name.endswith((".k_scale", ".v_scale", ".kv_scale")) for name in self._tensors.names)
        self.config = replace(read_config(folder), has_kv_scales=has_kv_scales)

    def kv_scale(self, layer: int, kind: str) -> np.ndarray | None:
        """The calibrated scale of "k" or "v" for a float8 cache, under any of the names in use; None where there is none."""
        prefix = f"model.layers.{layer}.self_attn."
        for name in (f"{kind}_scale", f"attn.{kind}_scale", f"{kind}_proj.{kind}_scale", "kv_scale"):
            if prefix + name in self._tensors.names:
                return self.tensor(prefix + name, np.dtype(np.float32))
        return None

    def tensor(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The tensor `name`, in `dtype`. Raises UserError when no file of the folder has it."""
        return self._tensors.read(name, dtype)


def read_config(folder: Path) -> ModelConfig:
    """config.json in the terms of this project; both the old `rope_scaling` and the new `rope_parameters` are read."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: a Hugging Face model folder or a .gguf file is needed")
    raw = read_json(path)
    with damaged_fields(path):
        architecture = (raw.get("architectures") or [None])[0]
        if architecture not in ARCHITECTURES:
            raise UserError(
                f"{path}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        return check_config(_convert(raw, architecture, folder), path)


def rope_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Of rotary embeddings, in the new spelling (`rope_parameters`) or the old."""
    return raw.get("rope_parameters") or {**(raw.get("rope_scaling") or {}), "rope_theta": raw.get("rope_theta", 1e4)}


def layer_fields(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Those fields of `ModelConfig` that a model and a draft head spell alike. Raises UserError for what is unsupported."""
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{folder}: activation {raw['hidden_act']!r} is not supported; supported: silu")
    rope = rope_fields(raw)
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "num_heads": raw["num_attention_heads"],
        "num_kv_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "ffn_size": raw["intermediate_size"],
        "rms_norm_eps": raw["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta", 1e4),
        "rope_scaling": _rope_scaling(rope, folder),
    }


def _convert(raw: dict[str, Any], architecture: str, folder: Path) -> ModelConfig:
    if _has_quantized_weights(raw.get("quantization_config") or {}):
        raise UserError(f"{folder} holds quantized weights, which are read from .gguf files only")
    if rope_fields(raw).get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"{folder}: partial rotary embeddings are not supported")
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        **layer_fields(raw, folder),
        num_layers=raw["num_hidden_layers"],
        max_position=raw["max_position_embeddings"],
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        attention_output_bias=bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        sliding_window=_sliding_window(raw, architecture, folder),
        eos_token_ids=_eos_ids(raw, folder),
    )


def _has_quantized_weights(quantization: dict[str, Any]) -> bool:
    """Some checkpoints are quantized in nothing but their KV cache: compressed-tensors without groups, ModelOpt without an
    algorithm for weights."""
    if not quantization:
        return False
    if quantization.get("quant_method") == "compressed-tensors":
        return bool(quantization.get("config_groups"))
    inner = quantization.get("quantization", quantization)
    return not ("kv_cache_quant_algo" in inner and inner.get("quant_algo") is None)


def _rope_scaling(rope: dict[str, Any], folder: Path) -> Llama3RopeScaling | LinearRopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(rope["factor"])
    if kind == "llama3":
        return Llama3RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position=rope["original_max_position_embeddings"],
        )
    raise UserError(f"{folder}: rope type {kind!r} is not supported; supported: default, linear, llama3")


def _sliding_window(raw: dict[str, Any], architecture: str, folder: Path) -> int | None:
    window = raw.get("sliding_window")
    if window is None or architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        return window
    if not raw.get("use_sliding_window", False):
        return None
    first = raw.get("max_window_layers", 28)
    kinds = set(raw.get("layer_types") or ())
    if not kinds:  # the first layers see everything, the others a window
        kinds |= {"full_attention"} if first > 0 else set()
        kinds |= {"sliding_attention"} if first < raw["num_hidden_layers"] else set()
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise UserError(f"{folder}: a mix of sliding and full attention layers is not supported")
    return window


def _eos_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    ids = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if ids is None:
        ids = raw.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def read_tokenizer(folder: Path) -> tuple[Backend, str | None, dict[str, str]]:
    """The tokenizer, its chat template if it has one, and the special tokens that templates name (`bos_token`, ...)."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json: save the tokenizer in its fast format")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} cannot be read: {error}") from None
    backend.no_truncation()  # a file may keep what its training asked for
    backend.no_padding()
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    jinja = folder / "chat_template.jinja"
    template = jinja.read_text(encoding="utf-8") if jinja.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    named = {key: settings.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    tokens = {key: t["content"] if isinstance(t, dict) else t for key, t in named.items() if t is not None}
    return backend, template, tokens
