"""Writing new rows into a paged KV cache, in place when the pages are donated."""

import jax
import jax.numpy as jnp

Array = jax.Array

SCRATCH_PAGE = 0
"""Rows that must not be kept are written to this page, which belongs to no sequence."""


def write_kv(
    k_pages: Array,  # [P, K, page, hd]
    v_pages: Array,  # [P, K, page, hd]
    k: Array,  # [B, T, K, hd]
    v: Array,  # [B, T, K, hd]
    block_tables: Array,  # [B, N] int32
    positions: Array,  # [B, T] int32
    keep: Array,  # [B, T] bool
) -> tuple[Array, Array]:
    """Stores row `t` of sequence `b` at `positions[b, t]`; rows with `keep` false go to the scratch page.

    A position at or past `N * page` is never kept, so that no sequence can write into another's pages.
    Returns the new `(k_pages, v_pages)`; rows are cast to the dtype of the pages.
    """
    page = k_pages.shape[2]
    slot = positions // page
    keep = keep & (slot < block_tables.shape[1])
    slot = jnp.where(keep, slot, 0)
    index = jnp.where(keep, jnp.take_along_axis(block_tables, slot, axis=1), SCRATCH_PAGE)  # [B, T]
    offset = positions % page
    return (
        k_pages.at[index, :, offset].set(k.astype(k_pages.dtype)),
        v_pages.at[index, :, offset].set(v.astype(v_pages.dtype)),
    )
