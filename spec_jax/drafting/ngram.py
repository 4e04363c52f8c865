"""Drafts from the text's own n-grams (prompt lookup), computed on the device."""

import jax
import jax.numpy as jnp

from ..config import DraftConfig

Array = jax.Array


def propose_ngram(tokens: Array, length: Array, config: DraftConfig) -> tuple[Array, Array]:
    """What followed the last place where the text's current suffix stood before.

    The longest suffix with `ngram_min` to `ngram_max` tokens that occurs earlier counts, at its LATEST earlier place.
    Where fewer than K tokens follow that place, the text has a period there, and the draft goes on with it.

    Args:
      tokens: [B, L] int32, the text of each slot; only the first `length` count.
      length: [B] int32.

    Returns:
      drafts [B, K] int32, and the length of the suffix that matched, [B] int32; 0 where none did and the drafts mean
      nothing.
    """
    B, L = tokens.shape
    K = config.num_tokens
    place = jnp.arange(L, dtype=jnp.int32)[None, :]  # where a match would end
    last = length[:, None] - 1

    # matched[b, j]: how many tokens up to and including j agree with the end of the text, at most ngram_max.
    matched = jnp.zeros((B, L), jnp.int32)
    unbroken = place < last
    for back in range(config.ngram_max):
        suffix = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)  # [B, 1]
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :L]
        unbroken = unbroken & (shifted == suffix) & (place >= back) & (last >= back)
        matched = matched + unbroken

    matched = jnp.where(matched >= config.ngram_min, matched, 0)
    best = jnp.argmax(matched * L + place, axis=1).astype(jnp.int32)[:, None]  # [B, 1], longest first, then latest
    match_length = jnp.take_along_axis(matched, best, axis=1)[:, 0]

    period = jnp.maximum(last - best, 1)
    following = best + 1 + jnp.arange(K, dtype=jnp.int32)[None, :] % period
    drafts = jnp.take_along_axis(tokens, jnp.clip(following, 0, L - 1), axis=1)
    return drafts, match_length
