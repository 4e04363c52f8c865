"""Drafts from an EAGLE head: a chain of K tokens, each from the head's own output before it, inside the compiled loop.

The head's cache holds entry t for each committed token t + 1: rows that ran ahead of the target are written anew from its
true features when the target has checked them (`follow_target`), so that after a round the cache is what a prefill of the
committed text would have written.
"""

import jax
import jax.numpy as jnp

from ..cache import PagedCache
from ..models.decoder import Decoder, Rows
from ..models.eagle import EagleHead
from ..sampling import SamplingState, sample

Array = jax.Array


def propose_eagle(
    target: Decoder,
    head: EagleHead,
    cache: PagedCache,
    hidden: Array,
    length: Array,
    block_tables: Array,
    active: Array,
    sampling: SamplingState,
    num_tokens: int,
    num_rows: int,
) -> tuple[Array, PagedCache]:
    """Drafts [B, num_tokens] int32 for positions `length` and on.

    Args:
      hidden: [B, D], the head's output at entry `length - 2`, which predicts the token at `length`.
      length: [B] int32, committed tokens.
      active: [B] bool: slots whose rows are kept.
      num_rows: rows per slot in each pass; the first one counts. A CPU wants more than one row in all.

    Drafts are drawn with the noise of the positions that they are for, under the slot's own sampling parameters.
    """
    B, D = hidden.shape
    ids = None if head.target_ids is None else head.target_ids[...]
    keep = active[:, None] & (jnp.arange(num_rows) == 0)
    # Slots that do not draft are greedy here, whatever they are: what no drafting slot uses costs nothing.
    sampling = sampling._replace(temperature=jnp.where(active, sampling.temperature, 0.0))
    drafts: list[Array] = []
    for step in range(num_tokens):
        wide = jnp.broadcast_to(hidden[:, None], (B, num_rows, D))
        if step > 0:
            embedded = head.embed(target, jnp.broadcast_to(drafts[-1][:, None], (B, num_rows)))
            entry = jnp.maximum(length + step - 2, 0)
            rows = Rows(jnp.broadcast_to(entry[:, None], (B, num_rows)), block_tables, keep)
            wide, layers = head(wide, embedded, rows, cache.draft)
            hidden, cache = wide[:, 0], cache._replace(draft=layers)
        scores = head.logits(target, wide)[:, :1]
        drafts.append(sample(scores, (length + step)[:, None], sampling, ids, target.config.vocab_size)[:, 0])
    return jnp.stack(drafts, axis=1), cache


def follow_target(
    target: Decoder, head: EagleHead, cache: PagedCache, features: Array, following: Array, rows: Rows
) -> tuple[Array, PagedCache]:
    """Writes the head's entries for rows that the target has passed over.

    Args:
      features: [B, T, W], the target's at these rows.
      following: [B, T] int32, the token after each row.
      rows: where they stand; the same as in the target's pass.

    Returns the head's outputs [B, T, D]: that of the last row whose token is committed is what drafts begin with.
    """
    hidden, layers = head(head.fuse(features), head.embed(target, following), rows, cache.draft)
    return hidden, cache._replace(draft=layers)
