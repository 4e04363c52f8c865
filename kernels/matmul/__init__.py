"""The product of a few rows with a weight, on which decoding spends its time: bound by reading the weight."""

from functools import partial

import jax
import jax.numpy as jnp

from . import native

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Array, w: Array, dtype: jnp.dtype | None = None) -> Array:
    """`x w^T`: rows [R, I] times a weight [O, I] -> [R, O], summed in float32, in `dtype` or that of `x`.

    XLA's own product, but on a CPU, where `native` takes the shapes.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    if native.takes(x, w, dtype):
        return native.matmul(x, w, dtype)
    return jnp.einsum("ri,oi->ro", x, w, preferred_element_type=dtype)


def _forward(x: Array, w: Array, dtype: jnp.dtype | None) -> tuple[Array, tuple[Array, Array]]:
    return matmul(x, w, dtype), (x, w)


def _backward(dtype: jnp.dtype | None, inputs: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, w = inputs
    gradient = gradient.astype(x.dtype)
    return jnp.einsum("ro,oi->ri", gradient, w), jnp.einsum("ro,ri->oi", gradient, x)


matmul.defvjp(_forward, _backward)
