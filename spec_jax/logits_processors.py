"""What is done to the target's scores before they are sampled from, whatever the temperature.

Grammar masks, allowed ids, bad words, `min_tokens`, biases and penalties, in this order (vLLM's). Every row of a pass is
treated as what it is: the place after its drafts. A penalty therefore counts the drafts before the row, and a bad word may
be completed by them.

Letters in shapes: B slots, T rows per slot, L tokens of room, V vocabulary, S stop ids, W bad words of up to M tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class ProcessorState(NamedTuple):
    """Per-slot parameters. `token_bias` [B, V] belongs to them, but is kept apart: no round changes it."""

    repetition_penalty: Array  # [B] float32; 1 is off
    presence_penalty: Array  # [B] float32; 0 is off
    frequency_penalty: Array  # [B] float32; 0 is off
    min_length: Array  # [B] int32: no stop id before the text has so many tokens, prompt included
    bad_words: Array  # [B, W, M] int32, right-aligned, -1 where unused
    has_bias: Array  # [B] bool: where not, the slot's row of `token_bias` is somebody else's


class RowText(NamedTuple):
    """The text before each row: what is committed, then the drafts of the rows up to it."""

    tokens: Array  # [B, L] int32
    prompt_length: Array  # [B] int32
    length: Array  # [B] int32
    rows: Array  # [B, T] int32: the last token, then the drafts


def process_logits(
    logits: Array,
    text: RowText,
    params: ProcessorState,
    token_bias: Array,
    stop_ids: Array,
    allowed: Array | None = None,
) -> Array:
    """Scores [B, T, V] float32 as they are to be sampled from; what is forbidden is -inf.

    Args:
      token_bias: [B, V] float32, added; -inf forbids.
      stop_ids: [B, S] int32, -1 where unused; forbidden before `min_length`.
      allowed: [B, T, ceil(V / 32)] uint32 or None: bit v % 32 of word v // 32 says whether the grammar allows token v.
    """
    if allowed is not None:
        logits = jnp.where(_unpack_bits(allowed, logits.shape[-1]), logits, -jnp.inf)
    logits = _forbid(logits, _completed_words(text, params.bad_words))
    logits = _forbid(logits, _early_stops(text, params.min_length, stop_ids))
    logits = logits + jnp.where(params.has_bias[:, None], token_bias, 0.0)[:, None, :]
    return _penalize(logits, text, params)


def _unpack_bits(words: Array, size: int) -> Array:
    """[..., W] uint32 -> [..., size] bool, lowest bit first."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :size] == 1


def _forbid(logits: Array, ids: Array) -> Array:
    """-inf at `ids` [B, T, N]; negative ids are none."""
    B, T, V = logits.shape
    slot = jnp.arange(B)[:, None, None]
    row = jnp.arange(T)[None, :, None]
    return logits.at[slot, row, jnp.where(ids >= 0, ids, V)].set(-jnp.inf, mode="drop")


def _completed_words(text: RowText, words: Array) -> Array:
    """Last tokens of the bad words whose other tokens stand right before each row, [B, T, W]; -1 for the others."""
    B, T = text.rows.shape
    M = words.shape[2]
    before = jnp.arange(M - 1, 0, -1, dtype=jnp.int32)  # how far before the row's place; 1 is the row's own token
    row = jnp.arange(T, dtype=jnp.int32)
    place = text.length[:, None, None] + row[None, :, None] - before  # [B, T, M - 1], in the text
    committed = jnp.take_along_axis(
        text.tokens, jnp.clip(place, 0, text.tokens.shape[1] - 1).reshape(B, -1), axis=1
    ).reshape(place.shape)
    drafted = text.rows[:, jnp.maximum(row[:, None] + 1 - before, 0)]  # [B, T, M - 1]
    window = jnp.where(place < text.length[:, None, None], committed, drafted)
    window = jnp.where(place >= text.prompt_length[:, None, None], window, -2)  # only the output counts, as in vLLM
    head = words[:, None, :, :-1]
    stands = jnp.all((head < 0) | (head == window[:, :, None, :]), axis=-1)  # [B, T, W]
    return jnp.where(stands, words[:, None, :, -1], -1)


def _early_stops(text: RowText, min_length: Array, stop_ids: Array) -> Array:
    """The stop ids where a row is too early for them, [B, T, S]; -1 elsewhere."""
    row = jnp.arange(text.rows.shape[1], dtype=jnp.int32)
    is_early = text.length[:, None] + row < min_length[:, None]
    return jnp.where(is_early[:, :, None], stop_ids[:, None, :], -1)


def _penalize(logits: Array, text: RowText, params: ProcessorState) -> Array:
    B, T, V = logits.shape
    place = jnp.arange(text.tokens.shape[1], dtype=jnp.int32)[None]
    is_text = place < text.length[:, None]
    is_output = is_text & (place >= text.prompt_length[:, None])
    slot = jnp.arange(B)[:, None]
    in_text = jnp.zeros((B, V), jnp.bool_).at[slot, text.tokens].max(is_text)
    in_output = jnp.zeros((B, V), jnp.int32).at[slot, text.tokens].add(is_output.astype(jnp.int32))

    drafts = jnp.where(jnp.arange(T) > 0, text.rows, -1)  # row 0 holds a committed token
    is_draft = drafts[:, :, None] == jnp.arange(V, dtype=jnp.int32)
    num_drafted = jnp.cumsum(is_draft, axis=1, dtype=jnp.int32)  # [B, T, V], up to and including the row's own token
    count = in_output[:, None, :] + num_drafted

    def per_slot(x: Array) -> Array:
        return x[:, None, None]

    repetition = per_slot(params.repetition_penalty)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_text[:, None, :] | (num_drafted > 0), repeated, logits)
    logits = logits - per_slot(params.frequency_penalty) * count
    return logits - per_slot(params.presence_penalty) * (count > 0)
