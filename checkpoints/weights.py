"""From checkpoint tensors, under their Hugging Face names, to the decoder's fused weights, one at a time."""

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from spec_jax.config import ModelConfig
from spec_jax.errors import UserError
from spec_jax.models.layers import WeightSource
from spec_jax.sharding import Axes, ShardingRules, place


class TensorReader(Protocol):
    """Any checkpoint: its config, and its tensors by Hugging Face name. `kv_scale` is asked where `config.has_kv_scales`."""

    config: ModelConfig

    def tensor(self, name: str, dtype: np.dtype) -> np.ndarray: ...

    def kv_scale(self, layer: int, kind: str) -> np.ndarray | None: ...


_PLAIN = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "fc": "fc.weight",  # from here on a draft head's
    "fc.bias": "fc.bias",
    "input_norm": "input_norm.weight",
}
_PLAIN_IN_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "attention.output": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.down.bias": "mlp.down_proj.bias",
    "embedding_norm": "input_layernorm.weight",  # these two are those of an EAGLE-3 layer
    "hidden_norm": "hidden_norm.weight",
}


def checkpoint_weights(
    reader: TensorReader, dtype: str, mesh: Mesh | None = None, rules: ShardingRules | None = None
) -> WeightSource:
    """A weight source that reads each weight when the model declares it: never a second copy of the whole model."""
    rules = rules or ShardingRules()
    target = np.dtype(jnp.dtype(dtype))

    def source(path: str, shape: tuple[int, ...], axes: Axes) -> jax.Array:
        try:
            values = _assemble(reader, path, target)
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"the tensors for {path} do not fit the model's config: {error}") from None
        if values.shape != shape:
            raise UserError(f"the tensors for {path} have shape {values.shape}, the model's config asks for {shape}")
        return place(values, axes, mesh, rules)

    return source


def _assemble(reader: TensorReader, path: str, dtype: np.dtype) -> np.ndarray:
    def read(name: str) -> np.ndarray:
        return reader.tensor(name, dtype)

    if path in _PLAIN:
        return read(_PLAIN[path])
    if path.startswith("fc_norm."):
        return read(f"{path}.weight")
    _, layer, part = path.split(".", 2)
    prefix = f"model.layers.{layer}."
    if part in _PLAIN_IN_LAYER:
        return read(prefix + _PLAIN_IN_LAYER[part])
    fused = part.removesuffix(".bias")
    kind = "weight" if fused == part else "bias"
    if fused == "mlp.gate_up":
        return np.stack([read(f"{prefix}mlp.{name}_proj.{kind}") for name in ("gate", "up")], axis=1)
    if fused in ("attention.k_scale", "attention.v_scale"):
        return _kv_scale(reader, int(layer), fused[-len("k_scale")])
    assert fused == "attention.qkv", path
    return _fuse_qkv([read(f"{prefix}self_attn.{name}_proj.{kind}") for name in "qkv"], reader.config)


def _kv_scale(reader: TensorReader, layer: int, kind: str) -> np.ndarray:
    value = reader.kv_scale(layer, kind)
    name = f"{kind}_scale of layer {layer}"
    if value is None or value.size != 1:
        given = "missing" if value is None else f"of shape {value.shape}"
        raise UserError(
            f"{name} for a float8 cache is {given}: every layer needs one number, or none has any; use kv_cache_dtype auto"
        )
    if not (np.isfinite(value).all() and (value > 0).all()):
        raise UserError(
            f"{name} for a float8 cache is {value.item()}: it must be a number above 0; the checkpoint's calibration is "
            f"damaged, use kv_cache_dtype auto"
        )
    return value.reshape(())


def _fuse_qkv(parts: list[np.ndarray], config: ModelConfig) -> np.ndarray:
    """Rows grouped by KV head: its G query heads, its key, its value (see `Attention`)."""
    K, G, hd = config.num_kv_heads, config.queries_per_kv, config.head_dim
    rest = parts[0].shape[1:]
    groups = [part.reshape(K, size, hd, *rest) for part, size in zip(parts, (G, 1, 1), strict=True)]
    return np.concatenate(groups, axis=1).reshape(K * (G + 2) * hd, *rest)
