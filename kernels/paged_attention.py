"""Attention of a few query rows per sequence over a paged KV cache.

The plain XLA version below is the definition of the operation: any other implementation must agree with it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def paged_attention(
    q: Array,  # [B, T, H, hd]
    k_pages: Array,  # [P, K, page, hd]
    v_pages: Array,  # [P, K, page, hd]
    block_tables: Array,  # [B, N] int32
    positions: Array,  # [B, T] int32
    *,
    scale: float,
    sliding_window: int | None = None,
    implementation: str | None = None,
) -> Array:
    """Causal grouped-query attention of `T` rows per sequence against the pages that `block_tables` names.

    Row `t` of sequence `b` stands at `positions[b, t]` and sees the cache positions `s <= positions[b, t]`, and with a
    sliding window only those with `positions[b, t] - s < sliding_window`. Position `s` lies in page
    `block_tables[b, s // page]` at offset `s % page`. Query heads `g * H // K .. (g + 1) * H // K - 1` share KV head `g`.

    Args:
      q: queries, already rotated, [B, T, H, hd].
      k_pages, v_pages: the cache of one layer, [P, K, page, hd]; same dtype as `q`.
      block_tables: [B, N]; positions `>= N * page` cannot be seen.
      positions: [B, T] absolute positions of the rows.
      scale: factor on the scores, usually `hd ** -0.5`.
      sliding_window: number of latest positions that a row sees, itself included; None for all.
      implementation: "xla", or None for the best that this device has.

    Returns:
      [B, T, H, hd] in the dtype of `q`; scores and the sum over positions are accumulated in float32.

    Raises:
      ValueError: `implementation` is unknown, or H is no multiple of K.
    """
    num_heads, num_kv_heads = q.shape[2], k_pages.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads: not a multiple")
    chosen = implementation or "xla"
    if chosen not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is unknown; known: {', '.join(sorted(_IMPLEMENTATIONS))}")
    return _IMPLEMENTATIONS[chosen](q, k_pages, v_pages, block_tables, positions, scale, sliding_window)


def _xla(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    positions: Array,
    scale: float,
    sliding_window: int | None,
) -> Array:
    B, T, H, hd = q.shape
    _, K, page, _ = k_pages.shape
    G = H // K
    S = block_tables.shape[1] * page

    k = _gather(k_pages, block_tables)  # [B, K, S, hd]
    v = _gather(v_pages, block_tables)
    rows = q.reshape(B, T, K, G, hd).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, hd)
    scores = jnp.einsum("bkqd,bksd->bkqs", rows, k, preferred_element_type=jnp.float32) * scale

    seen = jnp.arange(S, dtype=jnp.int32)[None, None, :] <= positions[:, :, None]  # [B, T, S]
    if sliding_window is not None:
        seen &= jnp.arange(S, dtype=jnp.int32)[None, None, :] > positions[:, :, None] - sliding_window
    scores = jnp.where(seen[:, None, None], scores.reshape(B, K, G, T, S), -jnp.inf).reshape(B, K, G * T, S)

    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("bkqs,bksd->bkqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
    return out.astype(q.dtype).reshape(B, K, G, T, hd).transpose(0, 3, 1, 2, 4).reshape(B, T, H, hd)


def _gather(pages: Array, block_tables: Array) -> Array:
    """[P, K, page, hd] and [B, N] -> [B, K, N * page, hd]."""
    B, N = block_tables.shape
    _, K, page, hd = pages.shape
    heads = jnp.arange(K, dtype=jnp.int32)[None, :, None]
    return pages[block_tables[:, None, :], heads].reshape(B, K, N * page, hd)


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"xla": _xla}
