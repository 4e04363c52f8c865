"""Masks, bad words, early stops, biases and penalties against float64 NumPy that takes one row at a time."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.logits_processors import ProcessorState, RowText, process_logits

ROOM, NUM_STOPS, NUM_WORDS, WORD_LENGTH = 24, 3, 6, 4
run = jax.jit(process_logits)


@dataclass
class Slot:
    """One request at one moment, in plain Python."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_tokens: int = 0
    bad_words: list[list[int]] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    bias: np.ndarray | None = None  # [V]
    allowed: np.ndarray | None = None  # [T, V] bool


def ends_with(text: list[int], end: list[int]) -> bool:
    return len(text) >= len(end) and text[len(text) - len(end) :] == end


def expected_row(logits: np.ndarray, slot: Slot, row: int) -> np.ndarray:
    """The scores [V] of the place after the first `row` drafts."""
    output = slot.output + slot.drafts[:row]
    scores = logits.astype(np.float64)
    if slot.allowed is not None:
        scores[~slot.allowed[row]] = -np.inf
    for *head, last in slot.bad_words:
        if ends_with(output, head):
            scores[last] = -np.inf
    if len(output) < slot.min_tokens:
        scores[slot.stops] = -np.inf
    if slot.bias is not None:
        scores = scores + slot.bias
    for token in set(slot.prompt + output):
        scores[token] = scores[token] / slot.repetition if scores[token] > 0 else scores[token] * slot.repetition
    for token in set(output):
        scores[token] -= slot.frequency * output.count(token) + slot.presence
    return scores


def processed(logits: np.ndarray, slots: list[Slot], stale_bias: float = 0.0, stale_token: int = 0) -> np.ndarray:
    """`process_logits` on `logits` [B, T, V]; what no slot should read is `stale_bias` and `stale_token`."""
    B, T, V = logits.shape
    tokens = np.full((B, ROOM), stale_token, np.int32)
    words = np.full((B, NUM_WORDS, WORD_LENGTH), -1, np.int32)
    stops = np.full((B, NUM_STOPS), -1, np.int32)
    bias = np.full((B, V), stale_bias, np.float32)
    allowed = np.ones((B, T, -(-V // 32) * 32), bool)
    for b, slot in enumerate(slots):
        text = slot.prompt + slot.output
        tokens[b, : len(text)] = text
        stops[b, : len(slot.stops)] = slot.stops
        for row, word in zip(words[b], slot.bad_words, strict=False):
            row[-len(word) :] = word
        if slot.bias is not None:
            bias[b] = slot.bias
        if slot.allowed is not None:
            allowed[b, :, :V] = slot.allowed
    bits = np.packbits(allowed, axis=-1, bitorder="little").view("<u4")

    def array(values, dtype=jnp.int32):
        return jnp.asarray(list(values), dtype)

    out = run(
        jnp.asarray(logits),
        RowText(
            tokens=jnp.asarray(tokens),
            prompt_length=array(len(slot.prompt) for slot in slots),
            length=array(len(slot.prompt + slot.output) for slot in slots),
            rows=array([(slot.prompt + slot.output)[-1], *slot.drafts] for slot in slots),
        ),
        ProcessorState(
            repetition_penalty=array((slot.repetition for slot in slots), jnp.float32),
            presence_penalty=array((slot.presence for slot in slots), jnp.float32),
            frequency_penalty=array((slot.frequency for slot in slots), jnp.float32),
            min_length=array(len(slot.prompt) + slot.min_tokens for slot in slots),
            bad_words=jnp.asarray(words),
            has_bias=array((slot.bias is not None for slot in slots), jnp.bool_),
        ),
        jnp.asarray(bias),
        jnp.asarray(stops),
        jnp.asarray(bits) if any(slot.allowed is not None for slot in slots) else None,
    )
    return np.asarray(out)


def random_slot(rng: np.random.Generator, T: int, V: int, constrained: bool) -> Slot:
    """Few distinct tokens, so that they repeat, and bad words cut out of the text, across all its borders."""

    def some(count):
        return rng.integers(0, min(V, 6), count).tolist()

    slot = Slot(prompt=some(rng.integers(1, 8)), output=some(rng.integers(0, 10)), drafts=some(T - 1))
    text = slot.prompt + slot.output + slot.drafts
    for _ in range(rng.integers(0, NUM_WORDS + 1)):
        start, size = rng.integers(0, len(text)), rng.integers(2, WORD_LENGTH + 1)
        head = text[start : start + size - 1]
        slot.bad_words.append([*head, int(rng.integers(0, V))])
    slot.stops = rng.choice(V, rng.integers(0, NUM_STOPS + 1), replace=False).tolist()
    slot.min_tokens = int(rng.integers(0, len(slot.output) + T + 2))
    slot.repetition = float(rng.choice([1.0, 0.5, 1.3, 100.0]))
    slot.presence = float(rng.choice([0.0, -2.0, 0.7, 2.0]))
    slot.frequency = float(rng.choice([0.0, -1.5, 0.3, 2.0]))
    if rng.random() < 0.5:
        slot.bias = rng.choice([0.0, 0.0, 3.5, -100.0, 100.0, -np.inf], V).astype(np.float32)
    if constrained and rng.random() < 0.7:
        slot.allowed = rng.random((T, V)) < 0.6
    return slot


@pytest.mark.parametrize(
    ("T", "V", "constrained"),
    [(1, 11, False), (2, 40, True), (3, 11, True), (4, 64, True), (5, 9, False), (6, 40, True)],
)
def test_rows_of_mixed_slots_agree_with_one_row_at_a_time(T, V, constrained):
    rng = np.random.default_rng(T)
    across = 0
    for _ in range(25):
        slots = [random_slot(rng, T, V, constrained) for _ in range(5)]
        logits = (rng.normal(size=(5, T, V)) * 4).astype(np.float32)
        found = processed(logits, slots, stale_bias=-np.inf, stale_token=int(rng.integers(0, 6)))
        for b, slot in enumerate(slots):
            for row in range(T):
                np.testing.assert_allclose(
                    found[b, row], expected_row(logits[b, row], slot, row), rtol=1e-5, atol=1e-5,
                    err_msg=f"{row=} {slot}",
                )  # fmt: skip
                before = slot.output + slot.drafts[:row]
                across += any(0 < row < len(head) and ends_with(before, head) for *head, _ in slot.bad_words)
    assert T == 1 or across > 10  # heads that begin in committed text and end in drafts are among the cases


LOGITS = np.array([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0], np.float32)


def rows_of(slot: Slot, stale_token: int = 0) -> np.ndarray:
    """Scores [drafts + 1, 6] of one slot whose every row has the same LOGITS; the pass is as wide as any here."""
    padded = replace(slot, drafts=[*slot.drafts, 0, 0, 0][:3])
    return processed(np.tile(LOGITS, (1, 4, 1)), [padded], stale_token=stale_token)[0, : len(slot.drafts) + 1]


def forbidden(slot: Slot) -> list[list[int]]:
    """Per row, the tokens that cannot be sampled."""
    return [np.flatnonzero(np.isneginf(row)).tolist() for row in rows_of(slot)]


def test_nothing_asked_for_is_nothing_changed():
    np.testing.assert_array_equal(rows_of(Slot([1, 2], [3, 3], drafts=[4, 4, 5])), np.tile(LOGITS, (4, 1)))


def test_a_penalty_counts_the_drafts_before_the_row_and_not_those_after_it():
    change = LOGITS - rows_of(Slot([0], [1], drafts=[5, 5, 4], frequency=0.5))
    assert change[:, 5].tolist() == [0.0, 0.5, 1.0, 1.0]
    assert change[:, 4].tolist() == [0.0, 0.0, 0.0, 0.5]
    assert change[:, 1].tolist() == [0.5, 0.5, 0.5, 0.5]


def test_frequency_counts_every_time_and_presence_once():
    change = LOGITS - rows_of(Slot([0, 4], [5, 3, 5], drafts=[5], frequency=0.25, presence=1.0))
    assert change.tolist() == [[0.0, 0.0, 0.0, 1.25, 0.0, 1.5], [0.0, 0.0, 0.0, 1.25, 0.0, 1.75]]


def test_a_repetition_penalty_divides_positive_scores_and_multiplies_the_others_of_prompt_output_and_drafts():
    rows = rows_of(Slot([0, 0], [3, 2], drafts=[5, 5], repetition=2.0))
    assert rows.tolist() == [[-4, -1, 0, 0.5, 2, 3], [-4, -1, 0, 0.5, 2, 1.5], [-4, -1, 0, 0.5, 2, 1.5]]


def test_a_bias_is_added_before_the_penalties():
    bias = np.array([0, 5, 0, 0, 0, 0], np.float32)
    assert rows_of(Slot([1], bias=bias, repetition=2.0))[0, 1] == (LOGITS[1] + 5) / 2


def test_what_is_forbidden_stays_so_under_any_penalty_and_bias():
    gifts = {"repetition": 0.01, "presence": -2.0, "frequency": -2.0, "bias": np.full(6, 100, np.float32)}
    mask = np.array([[True, False, True, True, True, True]] * 4)
    slot = Slot([0, 1, 2], [1, 3], [1], stops=[2], min_tokens=9, bad_words=[[3, 1]], allowed=mask, **gifts)
    assert forbidden(slot) == [[1, 2], [1, 2]]


def test_a_bad_word_is_completed_across_the_border_of_committed_text_and_drafts():
    slot = Slot([0], [1, 2], drafts=[3, 4, 5], bad_words=[[2, 3, 5], [1, 2, 3, 4], [3, 4, 5]])
    assert forbidden(slot) == [[], [4, 5], [5], []]


def test_a_bad_word_is_completed_by_drafts_alone_and_by_committed_text_alone():
    slot = Slot([0], [1, 2], drafts=[3, 4], bad_words=[[3, 4, 5], [1, 2, 0]])
    assert forbidden(slot) == [[0], [], [5]]


def test_a_bad_word_whose_tokens_are_apart_or_in_another_order_is_not_completed():
    assert forbidden(Slot([0], [1, 3, 2, 1], drafts=[4], bad_words=[[1, 2, 5], [1, 3, 2, 5]])) == [[], []]


def test_a_prompt_does_not_begin_a_bad_word():
    words = [[1, 2, 5], [2, 4]]
    assert forbidden(Slot([1, 2], [], drafts=[2], bad_words=words)) == [[], [4]]
    assert forbidden(Slot([1], [2], drafts=[2], bad_words=words)) == [[4], [4]]
    assert forbidden(Slot([0], [1, 2], drafts=[2], bad_words=words)) == [[4, 5], [4]]


def test_words_of_different_lengths_share_a_table():
    assert forbidden(Slot([0], [4, 3, 2], bad_words=[[2, 0], [3, 2, 1], [4, 3, 2, 5], [5, 3, 2, 4]])) == [[0, 1, 5]]


@pytest.mark.parametrize("min_tokens", range(8))
def test_stop_ids_are_forbidden_in_the_rows_that_are_too_early_for_them(min_tokens):
    slot = Slot([0, 1, 2], [3, 4], drafts=[5, 5, 5], stops=[2, 5], min_tokens=min_tokens)
    assert forbidden(slot) == [[2, 5] if 2 + row < min_tokens else [] for row in range(4)]


@pytest.mark.parametrize("stale", [np.nan, -np.inf, 50.0])
def test_slots_without_a_bias_ignore_the_stale_row_of_token_bias(stale):
    own = Slot([0], bias=np.arange(6, dtype=np.float32))
    found = processed(np.tile(LOGITS, (3, 1, 1)), [Slot([1]), own, Slot([2])], stale_bias=stale)
    np.testing.assert_array_equal(found[:, 0], [LOGITS, LOGITS + own.bias, LOGITS])


def test_what_an_earlier_request_left_behind_the_text_counts_for_nothing():
    slot = Slot([0, 1], [2], drafts=[3], repetition=2.0, presence=1.0, frequency=1.0, bad_words=[[5, 4], [5, 5, 4]])
    np.testing.assert_array_equal(rows_of(slot, stale_token=0), rows_of(slot, stale_token=5))


def test_a_slot_is_treated_as_if_it_were_alone():
    rng = np.random.default_rng(7)
    slots = [replace(random_slot(rng, 3, 11, False), allowed=rng.random((3, 11)) < 0.6) for _ in range(5)]
    logits = rng.normal(size=(5, 3, 11)).astype(np.float32)
    together = processed(logits, slots)
    for b, slot in enumerate(slots):
        np.testing.assert_array_equal(together[b], processed(logits[b : b + 1], [slot])[0])
