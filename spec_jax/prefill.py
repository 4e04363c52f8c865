"""The prompt pass: chunks of one prompt, each writing its KV.

The prompt's last token is left out: it is the first row of the first decode round. So token 0 is sampled, checked for
stops and sped up by drafts where all others are, and a prefill needs no logits. What a prefill hands over is its pages.
"""

import jax
import jax.numpy as jnp

from .cache import PagedCache
from .logprobs import TokenLogprobs, token_logprobs
from .models.decoder import Decoder, Rows

Array = jax.Array


def prefill_chunk(
    model: Decoder, cache: PagedCache, tokens: Array, start: Array, count: Array, block_table: Array
) -> PagedCache:
    """Writes the KV of `tokens[:count]` [C], which stand at `start ..` of the sequence with `block_table` [N]."""
    return _pass(model, cache, tokens, start, count, block_table)[1]


def prefill_chunk_with_logprobs(
    model: Decoder,
    cache: PagedCache,
    tokens: Array,
    following: Array,
    start: Array,
    count: Array,
    block_table: Array,
) -> tuple[PagedCache, TokenLogprobs]:
    """The same, with the log-probabilities of `following` [C], the token behind each of `tokens`.

    As the last token is not prefilled, a prompt's chunks cover all of its tokens but the first, which has nothing before it.
    """
    hidden, cache = _pass(model, cache, tokens, start, count, block_table)
    return cache, token_logprobs(model.logits(hidden)[0], following)


def _pass(
    model: Decoder, cache: PagedCache, tokens: Array, start: Array, count: Array, block_table: Array
) -> tuple[Array, PagedCache]:
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rows = Rows(positions=(start + index)[None], block_tables=block_table[None], keep=(index < count)[None])
    return model(tokens[None], rows, cache)
