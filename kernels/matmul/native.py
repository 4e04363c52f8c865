"""For few rows on a CPU: see `native/matmul.c`, and `benchmarks/native_kernels.py` for what it brings."""

from functools import partial

import jax
import jax.numpy as jnp

from .. import native

Array = jax.Array

_MAX_ROWS = 32  # beyond, what XLA spends on packing the weight is little beside the product


def takes(x: Array, w: Array, dtype: jnp.dtype) -> bool:
    rows, size = x.shape
    return (
        native.is_usable()
        and 1 <= rows <= _MAX_ROWS
        and size > 0
        and size % native.MULTIPLE == 0
        and w.shape[0] > 0
        and x.dtype == w.dtype
        and x.dtype in native.DTYPES
        and dtype in native.DTYPES
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Array, w: Array, dtype: jnp.dtype) -> Array:
    return native.call("matmul", jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), dtype), x, w)


def _forward(x: Array, w: Array, dtype: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return matmul(x, w, dtype), (x, w)


def _backward(dtype: jnp.dtype, inputs: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, w = inputs
    by_x, by_w = jnp.einsum("ro,oi->ri", gradient, w), jnp.einsum("ro,ri->oi", gradient, x)
    return by_x.astype(x.dtype), by_w.astype(w.dtype)


matmul.defvjp(_forward, _backward)
