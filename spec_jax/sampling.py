"""From scores to tokens: temperature, the cuts, and noise that depends on nothing but seed and position.

A token is `argmax(process(logits) + gumbel(seed, position))`, which is an exact draw from softmax(process(logits))
(the Gumbel-max trick). The noise is a pure function of the request's seed and the token's absolute position, so a draft,
a batch or a burst boundary cannot change what is drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

NUM_CANDIDATES = 64
"""Rows whose kept tokens all lie among this many best ones need no search over the vocabulary."""


class SamplingState(NamedTuple):
    """Per-slot parameters, as arrays, so that one batch mixes all of them."""

    temperature: Array  # [B] float32; 0 is greedy
    top_k: Array  # [B] int32; 0 is off
    top_p: Array  # [B] float32; 1 is off
    min_p: Array  # [B] float32; 0 is off
    typical_p: Array  # [B] float32; 1 is off
    seed: Array  # [B, 2] uint32, the two words of a 64-bit seed


def sample(
    logits: Array, positions: Array, params: SamplingState, ids: Array | None = None, vocab_size: int | None = None
) -> Array:
    """One token per row: `logits` [B, T, V] float32, `positions` [B, T] of the tokens drawn; int32 [B, T].

    A slot of temperature 0 takes the best score, ties to the lower id. When every slot does, nothing else is computed.
    Where the scores are those of some tokens only, `ids` [V] int32 says which of `vocab_size`: each keeps its own noise.
    """

    def best(scores: Array) -> Array:
        place = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        return place if ids is None else ids[place]

    def drawn() -> Array:
        noise = gumbel(params.seed, positions, vocab_size or logits.shape[-1])
        noisy = process(logits, params) + (noise if ids is None else noise[..., ids])
        is_greedy = (params.temperature == 0)[:, None, None]
        # Behind a barrier: fused into the argmax, the noise's logarithms are computed one by one on a CPU, 3 x slower.
        return best(jax.lax.optimization_barrier(jnp.where(is_greedy, logits, noisy)))

    return jax.lax.cond(jnp.any(params.temperature > 0), drawn, lambda: best(logits))


def gumbel(seed: Array, positions: Array, vocab_size: int) -> Array:
    """Standard Gumbel noise, float32 [B, T, V], from `seed` [B, 2] and `positions` [B, T] alone (threefry2x32)."""

    def one(words: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(seed, positions)


def process(logits: Array, params: SamplingState) -> Array:
    """Scores relative to the best one after temperature, min-p, top-k, top-p and typical-p, in this order; what is cut is
    -inf. [B, T, V] -> [B, T, V]."""
    is_drawn = params.temperature > 0  # a greedy slot takes no part: its scores are not drawn from
    temperature = jnp.where(is_drawn, params.temperature, 1.0)
    # Relative first: at the smallest temperatures the quotient is -inf for all but the best, never NaN.
    scores = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None, None]
    scores = jnp.where(scores >= jnp.log(params.min_p)[:, None, None], scores, -jnp.inf)
    top_k = jnp.where(is_drawn, params.top_k, 0)
    top_p = jnp.where(is_drawn, params.top_p, 1.0)
    typical_p = jnp.where(is_drawn, params.typical_p, 1.0)
    scores = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)), lambda s: _cut(s, top_k, top_p), lambda s: s, scores
    )  # fmt: skip
    return jax.lax.cond(jnp.any(typical_p < 1), lambda s: _cut_untypical(s, typical_p), lambda s: s, scores)


def _cut(scores: Array, top_k: Array, top_p: Array) -> Array:
    """Top-k, then top-p of what is left, [B] each. Equal scores at the edge are all kept.

    Both cuts are a threshold on the score. It is read off the best `NUM_CANDIDATES` scores where they suffice, which
    depends on the row alone; otherwise it is found by bisection over the bits of a float, without sorting.
    """
    B, T, V = scores.shape
    rows = scores.reshape(B * T, V)
    k = jnp.repeat(jnp.where(top_k > 0, jnp.minimum(top_k, V), V), T)
    p = jnp.repeat(top_p, T)
    num_candidates = min(NUM_CANDIDATES, V)
    # Behind a barrier: XLA merges slices of the result into its top-k, no longer knows it for one, and sorts the vocabulary.
    candidates = jax.lax.optimization_barrier(jax.lax.top_k(rows, num_candidates)[0])  # descending

    k_inside = k <= num_candidates
    kth = jnp.take_along_axis(candidates, jnp.minimum(k, num_candidates)[:, None] - 1, axis=1)[:, 0]
    kth = _search_where(~k_inside & (k < V), rows, kth, lambda kept: jnp.sum(kept, axis=-1) >= k)
    kth = jnp.where(k < V, kth, -jnp.inf)

    mass = jnp.exp(rows - candidates[:, :1])  # relative to the best; -inf becomes 0
    needed = p * jnp.sum(jnp.where(rows >= kth[:, None], mass, 0.0), axis=-1)
    cumulative = jnp.cumsum(jnp.exp(candidates - candidates[:, :1]), axis=-1)
    enough = cumulative >= needed[:, None]
    pth = jnp.take_along_axis(candidates, jnp.argmax(enough, axis=-1)[:, None], axis=1)[:, 0]
    p_inside = jnp.any(enough, axis=-1)
    pth = _search_where(
        ~p_inside & (p < 1), rows, pth, lambda kept: jnp.sum(jnp.where(kept, mass, 0.0), axis=-1) >= needed
    )
    threshold = jnp.where(p < 1, jnp.maximum(kth, pth), kth)
    return jnp.where(rows >= threshold[:, None], rows, -jnp.inf).reshape(B, T, V)


def _cut_untypical(scores: Array, typical_p: Array) -> Array:
    """Keeps the tokens whose information is nearest to the entropy, until their probabilities reach `typical_p` [B]."""
    B, T, V = scores.shape
    rows = scores.reshape(B * T, V)
    p = jnp.repeat(typical_p, T)
    log_probability = jax.nn.log_softmax(rows, axis=-1)
    probability = jnp.exp(log_probability)
    entropy = -jnp.sum(jnp.where(probability > 0, probability * log_probability, 0.0), axis=-1, keepdims=True)
    closeness = jnp.where(probability > 0, -jnp.abs(log_probability + entropy), -jnp.inf)
    needed = jnp.maximum(p, 1e-6) * jnp.sum(probability, axis=-1)  # never 0: the most typical token always stays
    threshold = _search_where(
        p < 1, closeness, jnp.full_like(p, -jnp.inf),
        lambda kept: jnp.sum(jnp.where(kept, probability, 0.0), axis=-1) >= needed,
    )  # fmt: skip
    return jnp.where(closeness >= threshold[:, None], rows, -jnp.inf).reshape(B, T, V)


def _search_where(wanted: Array, rows: Array, otherwise: Array, is_enough) -> Array:
    """For the rows that are `wanted`, the largest float t with `is_enough(rows >= t)`; `otherwise` for the rest."""

    def search() -> Array:
        keys = _ordered_bits(rows)

        def try_bit(i: Array, found: Array) -> Array:
            trial = found | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
            return jnp.where(is_enough(keys >= trial[:, None]), trial, found)

        found = jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(rows.shape[0], jnp.uint32))
        return jnp.where(wanted, _from_ordered_bits(found), otherwise)

    return jax.lax.cond(jnp.any(wanted), search, lambda: otherwise)


def _ordered_bits(x: Array) -> Array:
    """float32 -> uint32 with the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered_bits(keys: Array) -> Array:
    bits = jnp.where(keys >> 31 == 1, keys & jnp.uint32((1 << 31) - 1), ~keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
