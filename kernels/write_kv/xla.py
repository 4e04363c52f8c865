"""The definition of the cache write, in plain JAX."""

import jax

from ..pages import Pages, quantize

Array = jax.Array


def scatter(
    k_pages: Pages,
    v_pages: Pages,
    k: Array,
    v: Array,
    index: Array,  # [B, T] int32: page of each row
    offset: Array,  # [B, T] int32: place in the page
    k_scale: Array | None,
    v_scale: Array | None,
) -> tuple[Pages, Pages]:
    return _store(k_pages, k, index, offset, k_scale), _store(v_pages, v, index, offset, v_scale)


def _store(pages: Pages, rows: Array, index: Array, offset: Array, static_scale: Array | None) -> Pages:
    if pages.scales is None:
        return Pages(pages.values.at[index, :, offset].set(rows.astype(pages.values.dtype)))
    values, scales = quantize(rows, static_scale)
    return Pages(pages.values.at[index, :, offset].set(values), pages.scales.at[index, :, offset].set(scales))
