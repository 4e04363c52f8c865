"""The prompt pass: chunks of one prompt, each writing its KV.

The prompt's last token is left out: it is the first row of the first decode round. So token 0 is sampled, checked for
stops and sped up by drafts where all others are, and a prefill needs no logits. What a prefill hands over is its pages.
"""

import jax
import jax.numpy as jnp

from .cache import PagedCache
from .models.decoder import Decoder, Rows

Array = jax.Array


def prefill_chunk(
    model: Decoder, cache: PagedCache, tokens: Array, start: Array, count: Array, block_table: Array
) -> PagedCache:
    """Writes the KV of `tokens[:count]` [C], which stand at `start ..` of the sequence with `block_table` [N]."""
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rows = Rows(positions=(start + index)[None], block_tables=block_table[None], keep=(index < count)[None])
    _, cache = model(tokens[None], rows, cache)
    return cache
