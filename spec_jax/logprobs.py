"""Log-probabilities of tokens and of the best ones beside them, from the target's scores as they are."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .config import MAX_LOGPROBS

Array = jax.Array


class TokenLogprobs(NamedTuple):
    """Of each token: its own, its rank (1 is the best), and the N best ones, best first. `...` is any leading shape."""

    token: Array  # [...] float32
    rank: Array  # [...] int32
    top: Array  # [..., N] float32
    top_ids: Array  # [..., N] int32


def empty_logprobs(shape: tuple[int, ...], vocab_size: int) -> TokenLogprobs:
    wide = (*shape, min(MAX_LOGPROBS, vocab_size))
    return TokenLogprobs(
        jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(wide, jnp.float32),
        jnp.zeros(wide, jnp.int32),
    )  # fmt: skip


def token_logprobs(logits: Array, tokens: Array) -> TokenLogprobs:
    """`logits` [..., V] float32, `tokens` [...] int32. N is `MAX_LOGPROBS`, or all of a smaller vocabulary."""
    V = logits.shape[-1]
    scores = logits.reshape(-1, V)  # XLA:CPU has a fast top-k for two axes only
    scores = scores - jnp.max(scores, axis=-1, keepdims=True)
    top, top_ids = jax.lax.top_k(scores, min(MAX_LOGPROBS, V))
    score = jnp.take_along_axis(scores, tokens.reshape(-1, 1), axis=-1)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    rank = 1 + jnp.sum(scores > score, axis=-1, dtype=jnp.int32)
    shape = tokens.shape
    return TokenLogprobs(
        (score - total).reshape(shape), rank.reshape(shape), (top - total).reshape(*shape, -1),
        top_ids.reshape(*shape, -1),
    )  # fmt: skip
