"""The prompt pass: chunks of one prompt, each writing its KV.

The prompt's last token is left out: it is the first row of the first decode round. So token 0 is sampled, checked for
stops and sped up by drafts where all others are, and a prefill needs no logits, unless log-probabilities of the prompt are
asked for. What a prefill hands over is its pages.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .cache import PagedCache
from .drafting import follow_target
from .logprobs import TokenLogprobs, token_logprobs
from .models.decoder import Decoder, Rows
from .models.eagle import EagleHead, run_target

Array = jax.Array


class PrefillOutput(NamedTuple):
    """What a chunk gives besides its pages."""

    logprobs: TokenLogprobs | None  # [C]: of the tokens behind each one
    draft_hidden: Array | None  # [D]: a draft head's output at the chunk's last token


def prefill_chunk(
    model: Decoder,
    cache: PagedCache,
    tokens: Array,
    following: Array | None,
    start: Array,
    count: Array,
    block_table: Array,
    *,
    has_logprobs: bool = False,
    head: EagleHead | None = None,
) -> tuple[PagedCache, PrefillOutput]:
    """Writes the KV of `tokens[:count]` [C], which stand at `start ..` of the sequence with `block_table` [N], and that of
    the draft `head` from the features of the same pass.

    `following` [C] is the token behind each of `tokens`: a head takes it, and `has_logprobs` asks for its log-probabilities.
    The chunks of a prompt then cover all of its tokens but the first, which has nothing before it.
    """
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rows = Rows(positions=(start + index)[None], block_tables=block_table[None], keep=(index < count)[None])
    hidden, features, cache = run_target(model, head, tokens[None], rows, cache)
    logprobs, draft_hidden = None, None
    if has_logprobs:
        assert following is not None
        logprobs = token_logprobs(model.logits(hidden)[0], following)
    if head is not None:
        assert following is not None
        outputs, cache = follow_target(model, head, cache, features, following[None], rows)
        draft_hidden = outputs[0, count - 1]
    return cache, PrefillOutput(logprobs, draft_hidden)
