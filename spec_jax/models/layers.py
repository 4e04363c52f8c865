"""The small pieces of a decoder: weights declared once, RMS norm, linear maps, rotary embeddings."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ..config import LinearRopeScaling, ModelConfig, RopeFactors
from ..kernels import matmul
from ..sharding import Axes, ShardingRules

Array = jax.Array

WeightSource = Callable[[str, tuple[int, ...], Axes], Array | jax.ShapeDtypeStruct]
"""Gives the value of the weight at a path such as `layers.3.attention.qkv`, from its shape and logical axes."""


def abstract_weights(
    dtype: jnp.dtype | str, mesh: Mesh | None = None, rules: ShardingRules | None = None
) -> WeightSource:
    """Shapes without values: for ahead-of-time compilation and for learning what a model needs."""

    def source(path: str, shape: tuple[int, ...], axes: Axes) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else (rules or ShardingRules()).sharding(mesh, axes)
        return jax.ShapeDtypeStruct(shape, weight_dtype(path, dtype), sharding=sharding)

    return source


def random_weights(seed: int, dtype: jnp.dtype | str) -> WeightSource:
    """Independent normal values of variance 1 / fan-in (norms around 1): for tests and for measuring speed."""
    numbers = itertools.count(1)

    def source(path: str, shape: tuple[int, ...], axes: Axes) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), next(numbers))
        if path == "target_ids":
            return jnp.arange(shape[0], dtype=jnp.int32)
        noise = jax.random.normal(key, shape, jnp.float32)
        if not shape:  # a scale of the cache
            return jnp.full(shape, 0.02, weight_dtype(path, dtype))
        value = 1 + 0.1 * noise if len(shape) == 1 and "norm" in path else noise * shape[-1] ** -0.5
        return value.astype(weight_dtype(path, dtype))

    return source


def weight_dtype(path: str, dtype: jnp.dtype | str) -> jnp.dtype:
    """Scales of a quantized cache are float32, token ids int32, everything else is of the model's dtype."""
    if path == "target_ids":
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.float32 if path.endswith("_scale") else dtype)


def declare(source: WeightSource, path: str, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    """The one declaration of a weight: its shape and logical axes stand where the layer is built."""
    return nnx.Param(source(path, shape, axes), logical_axes=axes)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv 1910.07467) over the last axis, computed in float32."""

    def __init__(self, source: WeightSource, path: str, size: int, eps: float):
        self.weight = declare(source, path, (size,), (None,))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * self.weight[...]


class Linear(nnx.Module):
    """`y = W x + b` with W stored [out, in], as checkpoints store it."""

    def __init__(self, source: WeightSource, path: str, size_in: int, size_out: int, axes: Axes, bias: bool = False):
        self.weight = declare(source, path, (size_out, size_in), axes)
        self.bias = declare(source, f"{path}.bias", (size_out,), axes[:1]) if bias else None

    def __call__(self, x: Array) -> Array:  # [R, in] -> [R, out]
        y = matmul(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


def rope_frequencies(config: ModelConfig) -> Array:
    """Angle per position of each pair of channels, float32 [hd / 2] (arXiv 2104.09864, Llama 3.1's smoothing)."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequency = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if isinstance(scaling, LinearRopeScaling):
        return frequency / scaling.factor
    if isinstance(scaling, RopeFactors):
        return frequency / jnp.asarray(scaling.factors, jnp.float32)
    # Wavelengths longer than the trained context are stretched, short ones kept, those between are blended.
    turns = scaling.original_max_position * frequency / (2 * jnp.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)
    return frequency * (blend + (1 - blend) / scaling.factor)


def rope_tables(config: ModelConfig, positions: Array) -> tuple[Array, Array]:
    """cos and sin for `positions` [R], float32 [R, hd / 2]."""
    angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(config)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates `x` [R, ..., hd]; channel i is paired with channel i + hd / 2 (the Hugging Face order)."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[-1],)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
