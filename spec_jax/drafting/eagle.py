"""Drafts from an EAGLE head: a chain of K tokens, each from the head's own output before it, inside the compiled loop.

The head's cache holds entry t for each committed token t + 1: rows that ran ahead of the target are written anew from its
true features when the target has checked them (`follow_target`), so that after a round the cache is what a prefill of the
committed text would have written.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..cache import LayerCache, PagedCache
from ..config import DraftConfig
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
    config: DraftConfig,
    num_rows: int,
) -> tuple[Array, Array, PagedCache]:
    """Drafts [B, K] int32 for positions `length` and on, and how many of them are meant, [B].

    Args:
      hidden: [B, D], the head's output at entry `length - 2`, which predicts the token at `length`.
      length: [B] int32, committed tokens.
      active: [B] bool: slots whose rows are kept.
      config: K is its `num_tokens`. A slot's chain ends behind a draft up to which the head gives its own best tokens a
        joint probability below `min_confidence`; when all have ended, no further pass runs.
      num_rows: rows per slot in each pass; the first one counts. A CPU wants more than one row in all.

    Drafts are drawn with the noise of the positions that they are for, under the slot's own sampling parameters.
    """
    B, D = hidden.shape
    ids = None if head.target_ids is None else head.target_ids[...]
    keep = active[:, None] & (jnp.arange(num_rows) == 0)
    # Slots that do not draft are greedy here, whatever they are: what no drafting slot uses costs nothing.
    sampling = sampling._replace(temperature=jnp.where(active, sampling.temperature, 0.0))
    is_gated = config.min_confidence > 0

    def extend(step: int, chain: _Chain) -> _Chain:
        wide, layers = jnp.broadcast_to(chain.hidden[:, None], (B, num_rows, D)), chain.layers
        if step > 0:
            embedded = head.embed(target, jnp.broadcast_to(chain.token[:, None], (B, num_rows)))
            entry = jnp.maximum(length + step - 2, 0)
            rows = Rows(jnp.broadcast_to(entry[:, None], (B, num_rows)), block_tables, keep)
            wide, layers = head(wide, embedded, rows, layers)
        scores = head.logits(target, wide)[:, :1]
        token = sample(scores, (length + step)[:, None], sampling, ids, target.config.vocab_size)[:, 0]
        confidence = chain.confidence
        if is_gated:
            confidence = confidence * jnp.max(jax.nn.softmax(scores[:, 0], axis=-1), axis=-1)
        return _Chain(wide[:, 0], token, confidence, layers)

    chain = _Chain(hidden, jnp.zeros_like(length), active.astype(jnp.float32), cache.draft)
    drafts, num_drafts = [], jnp.zeros_like(length)
    for step in range(config.num_tokens):
        goes_on = active & (chain.confidence >= config.min_confidence)
        if is_gated and step > 0:
            chain = jax.lax.cond(jnp.any(goes_on), partial(extend, step), lambda chain: chain, chain)
        else:
            chain = extend(step, chain)
        drafts.append(chain.token)
        num_drafts += goes_on
    return jnp.stack(drafts, axis=1), num_drafts, cache._replace(draft=chain.layers)


class _Chain(NamedTuple):
    """What the next draft begins with."""

    hidden: Array  # [B, D]
    token: Array  # [B] int32: the newest draft
    confidence: Array  # [B] float32
    layers: tuple[LayerCache, ...]


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
