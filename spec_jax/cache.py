"""The paged KV cache on the device: pages of keys and pages of values per layer, each an array of its own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .config import EagleConfig, ModelConfig
from .kernels import Pages
from .sharding import Axes, ShardingRules

PAGE_AXES = Pages((None, "kv_heads", None, None), (None, "kv_heads", None))
"""Logical axes of values and scales."""


class LayerCache(NamedTuple):
    """Pages of one layer. Page 0 is scratch: rows that must not be kept are written there."""

    k: Pages
    v: Pages


class PagedCache(NamedTuple):
    """The cache of all layers. It is donated to every program that writes it, and updated in place.

    A draft head has pages of its own, under the same numbers: one block table serves both."""

    layers: tuple[LayerCache, ...]
    draft: tuple[LayerCache, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(self))


def abstract_cache(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype | str,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
    head: EagleConfig | None = None,
) -> PagedCache:
    """Shapes of a cache of `num_pages` pages, the scratch page included, for a model and its draft head, where there
    is one. `dtype` "fp8" is float8 e4m3 with a scale per token and head; any other is that of the rows."""

    def array(shape: tuple[int, ...], dtype: jnp.dtype | str, axes: Axes) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else (rules or ShardingRules()).sharding(mesh, axes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def layers(config: ModelConfig) -> tuple[LayerCache, ...]:
        shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
        if dtype == "fp8":
            pages = Pages(array(shape, jnp.uint8, PAGE_AXES.values), array(shape[:-1], jnp.float32, PAGE_AXES.scales))
        else:
            pages = Pages(array(shape, jnp.dtype(dtype), PAGE_AXES.values))
        return (LayerCache(pages, pages),) * config.num_layers

    return PagedCache(layers(config), () if head is None else layers(head.layer))


def create_cache(shapes: PagedCache) -> PagedCache:
    """An empty cache, as `abstract_cache` describes it."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


def bytes_per_token(config: ModelConfig, dtype: jnp.dtype | str) -> int:
    """Of keys and values over all layers and heads, before sharding."""
    row = config.head_dim + 4 if dtype == "fp8" else config.head_dim * np.dtype(jnp.dtype(dtype)).itemsize
    return 2 * config.num_layers * config.num_kv_heads * row
