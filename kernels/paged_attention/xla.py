"""The definition of paged attention, in plain JAX: any other implementation must agree with it."""

import jax
import jax.numpy as jnp

from ..pages import Pages, float8_values

Array = jax.Array

MASKED = -1e30


def attend(
    q: Array, k: Pages, v: Pages, block_tables: Array, positions: Array, scale: float, sliding_window: int | None
) -> Array:
    B, T, H, hd = q.shape
    _, K, page, _ = k.values.shape
    G = H // K
    S = block_tables.shape[1] * page

    k_values, k_scales = _gather(k, block_tables, q.dtype)  # [B, K, S, hd], [B, K, S]
    v_values, v_scales = _gather(v, block_tables, q.dtype)
    rows = q.reshape(B, T, K, G, hd).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, hd)
    scores = jnp.einsum("bkqd,bksd->bkqs", rows, k_values, preferred_element_type=jnp.float32) * scale
    if k_scales is not None:
        scores *= k_scales[:, :, None]

    seen = jnp.arange(S, dtype=jnp.int32)[None, None, :] <= positions[:, :, None]  # [B, T, S]
    if sliding_window is not None:
        seen &= jnp.arange(S, dtype=jnp.int32)[None, None, :] > positions[:, :, None] - sliding_window
    # A finite number: a row that sees nothing, as behind a prompt's end with a window, must not become NaN.
    scores = jnp.where(seen[:, None, None], scores.reshape(B, K, G, T, S), MASKED).reshape(B, K, G * T, S)

    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if v_scales is not None:
        weights *= v_scales[:, :, None]
    out = jnp.einsum("bkqs,bksd->bkqd", weights.astype(q.dtype), v_values, preferred_element_type=jnp.float32) / total
    return out.astype(q.dtype).reshape(B, K, G, T, hd).transpose(0, 3, 1, 2, 4).reshape(B, T, H, hd)


def _gather(pages: Pages, block_tables: Array, dtype: jnp.dtype) -> tuple[Array, Array | None]:
    """The rows that `block_tables` [B, N] names: values [B, K, N * page, hd], and scales [B, K, N * page] of float8 ones."""
    B, N = block_tables.shape
    _, K, page, hd = pages.values.shape
    heads = jnp.arange(K, dtype=jnp.int32)[None, :, None]
    values = pages.values[block_tables[:, None, :], heads].reshape(B, K, N * page, hd)
    if pages.scales is None:
        return values, None
    scales = pages.scales[block_tables[:, None, :], heads].reshape(B, K, N * page)
    return float8_values(values, dtype), scales
