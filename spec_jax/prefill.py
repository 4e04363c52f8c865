"""The prompt pass: chunks of one prompt, each writing its KV.

The prompt's last token is left out: it is the first row of the first decode round. So token 0 is sampled, checked for
stops and sped up by drafts where all others are, and a prefill needs no logits, unless log-probabilities of the prompt are
asked for. What a prefill hands over is its pages.
"""

import jax
import jax.numpy as jnp

from .cache import PagedCache
from .logprobs import TokenLogprobs, token_logprobs
from .models.decoder import Decoder, Rows

Array = jax.Array


def prefill_chunk(
    model: Decoder,
    cache: PagedCache,
    tokens: Array,
    following: Array | None,
    start: Array,
    count: Array,
    block_table: Array,
) -> tuple[PagedCache, TokenLogprobs | None]:
    """Writes the KV of `tokens[:count]` [C], which stand at `start ..` of the sequence with `block_table` [N].

    `following` [C] is the token behind each of `tokens`, or None. Where given, its log-probabilities are returned: the
    chunks of a prompt then cover all of its tokens but the first, which has nothing before it.
    """
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rows = Rows(positions=(start + index)[None], block_tables=block_table[None], keep=(index < count)[None])
    hidden, cache = model(tokens[None], rows, cache)
    return cache, None if following is None else token_logprobs(model.logits(hidden)[0], following)
