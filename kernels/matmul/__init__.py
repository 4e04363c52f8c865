"""The product of a few rows with a weight, on which decoding spends its time: bound by reading the weight."""

import jax
import jax.numpy as jnp

from . import native

Array = jax.Array


def matmul(x: Array, w: Array, dtype: jnp.dtype | None = None) -> Array:
    """`x w^T`: rows [R, I] times a weight [O, I] -> [R, O], summed in float32, in `dtype` or that of `x`.

    XLA's own product, but on a CPU, where `native` takes the shapes.
    """
    result = jnp.dtype(dtype or x.dtype)
    if native.takes(x, w, result):
        return native.matmul(x, w, result)
    return jnp.einsum("ri,oi->ro", x, w, preferred_element_type=dtype)
