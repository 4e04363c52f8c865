"""For a CPU: pages are read where they lie, and only as many as a row sees. See `native/paged_attention.c`."""

import jax
import jax.numpy as jnp
import numpy as np

from .. import native
from ..dispatch import Unsupported
from ..pages import Pages

Array = jax.Array

_PAGE_MULTIPLE = 16  # LANES in `ffi.h`, for the widest vectors


def attend(
    q: Array, k: Pages, v: Pages, block_tables: Array, positions: Array, scale: float, sliding_window: int | None
) -> Array:
    if not native.is_usable():
        raise Unsupported("paged_attention: the native kernels are not built, or this is not a program for one CPU")
    if k.scales is not None or q.dtype != k.values.dtype or q.dtype not in native.DTYPES:
        raise Unsupported(
            f"paged_attention: {q.dtype} queries and {k.values.dtype} keys; native kernels take float32 or bfloat16"
        )
    if v.values.shape != k.values.shape or v.values.dtype != k.values.dtype:
        raise Unsupported("paged_attention: keys and values differ in shape or dtype; native kernels take them alike")
    if q.shape[-1] % native.MULTIPLE or k.page_size % _PAGE_MULTIPLE:
        raise Unsupported(
            f"paged_attention: heads of {q.shape[-1]} and pages of {k.page_size}; native kernels take multiples of "
            f"{native.MULTIPLE} and {_PAGE_MULTIPLE}"
        )
    window = np.iinfo(np.int32).max if sliding_window is None else sliding_window
    return native.call(
        "paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype), q, k.values, v.values,
        block_tables.astype(jnp.int32), positions.astype(jnp.int32),
        jnp.float32(scale), jnp.int32(window),
    )  # fmt: skip
