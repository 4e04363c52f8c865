"""Writing new rows into a paged KV cache, in place where the pages are donated."""

import jax
import jax.numpy as jnp

from .. import dispatch
from ..pages import SCRATCH_PAGE, Pages
from .xla import scatter

Array = jax.Array


def write_kv(
    k_pages: Pages,  # [P, K, page, hd]
    v_pages: Pages,  # [P, K, page, hd]
    k: Array,  # [B, T, K, hd]
    v: Array,  # [B, T, K, hd]
    block_tables: Array,  # [B, N] int32
    positions: Array,  # [B, T] int32
    keep: Array,  # [B, T] bool
    *,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    implementation: str | None = None,
) -> tuple[Pages, Pages]:
    """Stores row `t` of sequence `b` at `positions[b, t]`; rows with `keep` false go to the scratch page.

    A position below 0, or at or past `N * page`, is never kept, so that no sequence can write into another's pages. Rows are
    cast to the dtype of the pages. For float8 pages each row of each head gets its own scale (see `pages.quantize`), or a
    checkpoint's static one, a float32 scalar, where given.

    Args, errors: as for `paged_attention`. Returns the new `(k_pages, v_pages)`.
    """
    page = k_pages.page_size
    slot = positions // page
    keep = keep & (slot >= 0) & (slot < block_tables.shape[1])
    slot = jnp.where(keep, slot, 0)
    index = jnp.where(keep, jnp.take_along_axis(block_tables, slot, axis=1), SCRATCH_PAGE)  # [B, T]
    return dispatch.run(
        "write_kv", implementation, _mosaic, scatter, k_pages, v_pages, k, v, index, positions % page, k_scale, v_scale
    )


def _mosaic():
    from .mosaic import scatter

    return scatter
