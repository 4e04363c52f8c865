"""The paged KV cache on the device: one array of keys and one of values per layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .config import ModelConfig
from .sharding import ShardingRules

CACHE_AXES = (None, "kv_heads", None, None)


class LayerCache(NamedTuple):
    """Pages of one layer, [P, K, page, hd] each. Page 0 is scratch: rows that must not be kept are written there."""

    k: jax.Array
    v: jax.Array


class PagedCache(NamedTuple):
    """The cache of all layers. It is donated to every program that writes it, and updated in place."""

    layers: tuple[LayerCache, ...]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves(self))


def create_cache(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype | str,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
) -> PagedCache:
    """An empty cache of `num_pages` pages, the scratch page included."""
    shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
    device = None if mesh is None else (rules or ShardingRules()).sharding(mesh, CACHE_AXES)

    def pages() -> jax.Array:
        return jnp.zeros(shape, dtype, device=device)

    return PagedCache(tuple(LayerCache(pages(), pages()) for _ in range(config.num_layers)))
