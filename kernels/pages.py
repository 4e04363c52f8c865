"""What a page of the cache holds: rows as they are, or as float8 with one scale per token and head."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

SCRATCH_PAGE = 0
"""Rows that must not be kept are written to this page, which belongs to no sequence."""

FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0
"""Largest finite e4m3 value (arXiv 2209.05433)."""


class Pages(NamedTuple):
    """Keys or values of one layer. Position `offset` of page `p` and KV head `h` is `values[p, h, offset]`.

    float8 values are kept as their bits, uint8: XLA:CPU would compute with whole arrays of float8 in a wider type. They come
    with `scales`: the row stands for `float8(values) * scales[..., None]`. In place of arrays there may be their shapes, or
    how they lie on a mesh.
    """

    values: Any  # [P, K, page, hd]: the dtype of the rows, or uint8
    scales: Any = None  # [P, K, page] float32, where values are uint8

    @property
    def page_size(self) -> int:
        return self.values.shape[2]


def quantize(rows: Array, static_scale: Array | None = None) -> tuple[Array, Array]:
    """Rows [..., hd] as float8 bits [..., hd] uint8, and their scales [...] float32.

    Each row's largest magnitude becomes 448; a row of zeros has scale 1. With a `static_scale`, a float32 scalar from
    calibration, every row has that one, and what is out of its range is cut to +-448.
    """
    rows = rows.astype(jnp.float32)
    if static_scale is None:
        largest = jnp.max(jnp.abs(rows), axis=-1)
        scales = jnp.where(largest > 0, largest / FLOAT8_MAX, 1.0)
    else:
        scales = jnp.broadcast_to(static_scale.astype(jnp.float32), rows.shape[:-1])
    values = jnp.clip(rows / scales[..., None], -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)
    return jax.lax.bitcast_convert_type(values, jnp.uint8), scales


def float8_values(bits: Array, dtype: jnp.dtype) -> Array:
    """uint8 bits as the float8 values that they are, without their scales. Exact in float16, bfloat16 and wider."""
    return jax.lax.bitcast_convert_type(bits, FLOAT8).astype(dtype)
