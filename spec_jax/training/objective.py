"""The training-time test of EAGLE-3 (arXiv 2503.01840): the head is unrolled over its own outputs, as it will run.

Letters in shapes: B texts side by side, S positions, R = B x S rows, J steps, Vd draft vocabulary; the rest as in
`models/eagle.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..models.eagle import Eagle3
from ..models.layers import rope_tables

Array = jax.Array


class Batch(NamedTuple):
    """Texts packed into rows of S tokens; `segments` tells them apart, 0 is padding. Arrays of NumPy or JAX."""

    tokens: Any  # [B, S] int32
    positions: Any  # [B, S] int32, from 0 in each text
    segments: Any  # [B, S] int32
    is_answer: Any  # [B, S] bool: written by the target
    features: Any  # [B, S, W]
    hidden: Any  # [B, S, D]: the target's normed last hidden states


class SharedWeights(NamedTuple):
    """What the head shares with its target and does not train."""

    embedding: Array  # [V, D]
    output: Array  # [Vd, D]: the target's own rows for the draft vocabulary
    places: Array  # [V] int32: place in the draft vocabulary, -1 outside


def unrolled_loss(
    head: Eagle3, shared: SharedWeights, batch: Batch, num_steps: int, decay: float
) -> tuple[Array, tuple[Array, Array]]:
    """Soft cross-entropy against the target's distribution over the draft vocabulary, summed over `num_steps` steps with
    weights `decay**j`.

    Row t of step j takes the head's own output of row t - 1, step j - 1 (the features at step 0), and the embedding of the
    true token t + 1; it attends to the true rows up to t - j and to the j rows on its own path. It counts where token t + 2
    is in the draft vocabulary: over sampled texts, that weights a position by what the draft vocabulary holds of it.

    Returns the loss; and for each step [J] how often the head's best token is the target's best one, over the answers'
    tokens, those outside the draft vocabulary included, and its loss.
    """
    B, S = batch.tokens.shape
    following = _shift(batch.tokens, -1)
    after = _shift(batch.tokens, -2)
    same = (batch.segments > 0) & (_shift(batch.segments, -1) == batch.segments)
    counts = same & (_shift(batch.segments, -2) == batch.segments)
    is_known = counts & (shared.places[after] >= 0)
    target_scores = jnp.einsum(
        "bsd,vd->bsv", _shift(batch.hidden, -1), shared.output, preferred_element_type=jnp.float32
    )  # fmt: skip
    soft = jax.nn.softmax(target_scores, axis=-1)
    best = jnp.argmax(target_scores, axis=-1)

    embedded = shared.embedding[following].reshape(B * S, -1)
    rope = rope_tables(head.config.layer, batch.positions.reshape(B * S))
    hidden = head.fuse(batch.features)
    paths: list[tuple[Array, Array]] = []
    total = jnp.float32(0)
    losses, agreements = [], []
    for step in range(num_steps):
        out, keys_values = _pass(head, hidden.reshape(B * S, -1), embedded, rope, batch, paths, step)
        paths.append(keys_values)
        log_q = jax.nn.log_softmax(head.logits(None, out.reshape(B, S, -1)), axis=-1)  # type: ignore[arg-type]
        on_path = batch.positions >= step  # earlier rows have no output to go on from
        weight = is_known & on_path
        loss = -jnp.sum(jnp.sum(soft * log_q, axis=-1) * weight) / jnp.maximum(jnp.sum(weight), 1)
        measured = counts & on_path & _shift(batch.is_answer, -2)
        agrees = jnp.sum((jnp.argmax(log_q, axis=-1) == best) & weight & measured) / jnp.maximum(jnp.sum(measured), 1)
        total += decay**step * loss
        losses.append(loss)
        agreements.append(agrees)
        hidden = _shift(out.reshape(B, S, -1), 1)
    return total, (jnp.stack(agreements), jnp.stack(losses))


def _pass(
    head: Eagle3,
    hidden: Array,
    embedded: Array,
    rope: tuple[Array, Array],
    batch: Batch,
    paths: list[tuple[Array, Array]],
    step: int,
) -> tuple[Array, tuple[Array, Array]]:
    """[R, D] each -> [R, D], and this step's keys and values."""
    residual, x = head.layer.enter(hidden, embedded)
    q, k, v = head.layer.attention.project(x, rope)
    attended = _attend(q, [*paths, (k, v)], batch, step)
    out = head.layer.leave(residual, head.layer.attention.output(attended))
    return head.finish(out), (k, v)


def _attend(q: Array, paths: list[tuple[Array, Array]], batch: Batch, step: int) -> Array:
    """Queries [R, K, G, hd] of one step over the true rows and its own path -> [R, K x G x hd]."""
    B, S = batch.tokens.shape
    K, G, hd = q.shape[1:]
    q = q.reshape(B, S, K, G, hd) * hd**-0.5
    (true_k, true_v), *own = [(k.reshape(B, S, K, hd), v.reshape(B, S, K, hd)) for k, v in paths]
    at = jnp.arange(S)
    sees = (at[None, :] <= at[:, None] - step) & (batch.segments[:, :, None] == batch.segments[:, None, :])
    scores = jnp.einsum("bskgh,btkh->bkgst", q, true_k, preferred_element_type=jnp.float32)
    scores = jnp.where(sees[:, None, None], scores, -1e30)
    # Step i's row on the path of row t stands step - i before it.
    own = [(_shift(k, step - i), _shift(v, step - i)) for i, (k, v) in enumerate(own, 1)]
    path_scores = [jnp.einsum("bskgh,bskh->bkgs", q, k, preferred_element_type=jnp.float32) for k, _ in own]
    scores = jnp.concatenate([scores, *(x[..., None] for x in path_scores)], axis=-1)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    attended = jnp.einsum("bkgst,btkh->bskgh", probabilities[..., :S], true_v)
    for i, (_, v) in enumerate(own):
        attended += jnp.einsum("bkgs,bskh->bskgh", probabilities[..., S + i], v)
    return attended.reshape(B * S, K * G * hd)


def _shift(x: Array, by: int) -> Array:
    """`x` [B, S, ...] moved `by` positions to the right, zeros coming in."""
    if by == 0:
        return x
    S = x.shape[1]
    pad = [(0, 0), (max(by, 0), max(-by, 0)), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, pad)[:, max(-by, 0) : max(-by, 0) + S]
