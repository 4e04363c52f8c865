"""Attention of a few query rows per sequence, or of a chunk of a prompt, over a paged KV cache."""

import jax

from .. import dispatch
from ..pages import Pages
from . import native
from .xla import attend

Array = jax.Array


def paged_attention(
    q: Array,  # [B, T, H, hd]
    k: Pages,  # [P, K, page, hd]
    v: Pages,  # [P, K, page, hd]
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

    What a row does not see has weight 0, so pages must hold finite numbers everywhere, as fresh ones do. A row that sees
    nothing at all gives some finite numbers.

    Args:
      q: queries, already rotated, [B, T, H, hd].
      k, v: the cache of one layer, in the dtype of `q` or as float8.
      block_tables: [B, N]; positions `>= N * page` cannot be seen.
      positions: [B, T] absolute positions of the rows.
      scale: factor on the scores, usually `hd ** -0.5`.
      sliding_window: number of latest positions that a row sees, itself included; None for all.
      implementation: "xla", "mosaic" (Hopper and Blackwell GPUs), "native" (CPUs), or None for the best that the device has.

    Returns:
      [B, T, H, hd] in the dtype of `q`; scores and the sum over positions are accumulated in float32.

    Raises:
      ValueError: `implementation` is unknown, or H is no multiple of K.
      Unsupported: "mosaic" or "native" was asked for, and the device or the shapes are not for it.
    """
    num_heads, num_kv_heads = q.shape[2], k.values.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads: not a multiple")
    return dispatch.run(
        "paged_attention", implementation, _mosaic, attend, q, k, v, block_tables, positions, scale, sliding_window,
        native=native.attend,
    )  # fmt: skip


def _mosaic():  # Pallas takes a second to import: only where it is used
    from .mosaic import attend

    return attend
