"""The n-gram drafter on vectors of vLLM's test suite (tests/v1/spec_decode/test_ngram.py) and against plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.config import DraftConfig
from spec_jax.drafting import propose_ngram
from tests.reference import ngram_draft


def propose(text: list[int], k: int, shortest: int, longest: int, room: int = 40) -> tuple[list[int], int]:
    tokens = np.full((1, room), 7, np.int32)  # what lies behind the text must not count
    tokens[0, : len(text)] = text
    config = DraftConfig(num_tokens=k, ngram_min=shortest, ngram_max=longest)
    drafts, matched = propose_ngram(jnp.array(tokens), jnp.array([len(text)]), config)
    return (drafts[0].tolist() if matched[0] else []), int(matched[0])


@pytest.mark.parametrize(
    ("text", "shortest", "longest", "k", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 2, 2, []),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 2, [4, 1]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, 2, [1, 2]),
        ([3, 4, 5, 2, 3, 4, 1, 2, 3, 4], 2, 4, 2, [1, 2]),
        # Where vLLM takes the earliest match, this project takes the latest: 300, not 100.
        ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 3, 2, [300, 1]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 1, 1, 2, [4, 1]),
    ],
)
def test_published_vectors(text, shortest, longest, k, expected):
    assert propose(text, k, shortest, longest)[0] == expected


@pytest.mark.parametrize("text", [[5], [5, 6], [1, 2, 3, 4, 5]])
def test_a_text_without_repeats_gives_no_draft(text):
    assert propose(text, 3, 1, 3) == ([], 0)


def test_a_text_shorter_than_the_shortest_suffix_gives_no_draft():
    assert propose([4, 4], 3, 3, 3) == ([], 0)


def test_an_endless_repeat_is_drafted_at_full_length():
    assert propose([9, 9], 4, 1, 3) == ([9, 9, 9, 9], 1)
    assert propose([8, 1, 2, 3, 1, 2, 3, 1], 5, 1, 3) == ([2, 3, 1, 2, 3], 3)


def test_what_lies_behind_the_text_is_never_matched_or_proposed():
    assert propose([7, 1, 2, 3], 3, 1, 3, room=12) == ([], 0)


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=24),
    k=st.integers(1, 6),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
)
def test_it_agrees_with_a_search_in_plain_python(text, k, lengths):
    assert propose(text, k, *lengths) == ngram_draft(text, k, *lengths)


def test_each_slot_is_searched_by_itself():
    tokens = np.zeros((3, 16), np.int32)
    texts = [[1, 2, 3, 1, 2], [4, 5, 6], [9, 9, 9]]
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    lengths = jnp.array([len(text) for text in texts])
    drafts, matched = propose_ngram(jnp.array(tokens), lengths, DraftConfig(num_tokens=2))
    assert matched.tolist() == [2, 0, 2]
    assert drafts[0].tolist() == [3, 1]
    assert drafts[2].tolist() == [9, 9]
