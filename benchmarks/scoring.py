"""The target's scores over a whole text in one pass, for benchmarks that look at single tokens."""

import jax
import jax.numpy as jnp

from spec_jax.cache import create_cache
from spec_jax.models.decoder import Decoder, Rows


def text_logits(decoder: Decoder, text: list[int], start: int) -> jax.Array:
    """float32 [len(text) - start, V]: what follows each token of `text` from place `start` on."""
    page = 16
    num_pages = -(-len(text) // page)
    cache = create_cache(decoder.config, num_pages + 1, page, decoder.embedding.dtype)
    positions = jnp.arange(len(text))[None]
    rows = Rows(positions, jnp.arange(1, num_pages + 1)[None], jnp.ones_like(positions, bool))
    hidden, _ = decoder(jnp.array([text]), rows, cache)
    return decoder.logits(hidden[:, start:])[0]
