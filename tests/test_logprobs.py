"""Log-probabilities against float64: of rows alone, and of prompts and outputs of a tiny model, with and without drafts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import LLM, SamplingParams
from spec_jax.config import MAX_LOGPROBS
from spec_jax.logprobs import empty_logprobs, token_logprobs
from spec_jax.models.decoder import Decoder
from spec_jax.models.layers import random_weights
from tests.conftest import TINY, write_model_folder
from tests.reference import ReferenceModel

EOS = TINY.eos_token_ids[0]


def log_softmax(scores: np.ndarray) -> np.ndarray:
    scores = scores.astype(np.float64)
    relative = scores - scores.max(-1, keepdims=True)
    return relative - np.log(np.exp(relative).sum(-1, keepdims=True))


# --- rows alone -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
@pytest.mark.parametrize("V", [1, 7, 20, 300])
def test_rows_of_any_shape_and_vocabulary_agree_with_a_full_sort(shape, V):
    rng = np.random.default_rng(V)
    logits = (rng.normal(size=(*shape, V)) * 3).astype(np.float32)
    tokens = rng.integers(0, V, shape)
    found = jax.tree.map(np.asarray, jax.jit(token_logprobs)(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32)))
    N = min(MAX_LOGPROBS, V)
    assert jax.tree.map(jnp.shape, found) == (shape, shape, (*shape, N), (*shape, N))
    for at in np.ndindex(shape):
        exact, order = log_softmax(logits[at]), np.argsort(-logits[at], kind="stable")
        np.testing.assert_allclose(found.token[at], exact[tokens[at]], rtol=1e-5, atol=1e-5)
        assert found.rank[at] == 1 + order.tolist().index(tokens[at])
        assert found.top_ids[at].tolist() == order[:N].tolist()
        np.testing.assert_allclose(found.top[at], exact[order[:N]], rtol=1e-5, atol=1e-5)


def test_equal_scores_share_a_rank_and_the_lower_id_comes_first():
    found = token_logprobs(jnp.array([[1.0, 3.0, 1.0, 3.0, 0.0]] * 5), jnp.arange(5))
    assert found.rank.tolist() == [3, 1, 3, 1, 5]
    assert found.top_ids[0].tolist() == [1, 3, 0, 2, 4]


def test_scores_that_are_huge_or_minus_infinity_give_no_nan():
    found = token_logprobs(jnp.array([[1e38, -1e38, -jnp.inf, 0.0]] * 4), jnp.arange(4))
    np.testing.assert_allclose(found.token, [0.0, -2e38, -np.inf, -1e38], rtol=1e-6)
    assert found.rank.tolist() == [1, 3, 4, 2]
    assert not np.isnan(found.top).any()


@pytest.mark.parametrize("V", [5, 300])
def test_empty_tables_have_the_shapes_of_full_ones(V):
    full = token_logprobs(jnp.zeros((2, 3, V)), jnp.zeros((2, 3), jnp.int32))
    empty = empty_logprobs((2, 3), V)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), empty) == jax.tree.map(lambda x: (x.shape, x.dtype), full)


# --- the public API ---------------------------------------------------------------------------------------------------

# Like `TINY`, with room for prompts of several chunks.
LONG = replace(TINY, max_position=512)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(random_weights(seed=1, dtype=jnp.float32), LONG)


@pytest.fixture(scope="module")
def reference(decoder) -> ReferenceModel:
    return ReferenceModel(decoder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, decoder) -> str:
    return str(write_model_folder(tmp_path_factory.mktemp("models") / "long", decoder))


@pytest.fixture(scope="module")
def drafted(folder) -> LLM:
    return LLM(folder, dtype="float32", max_num_seqs=1, num_draft_tokens=3, rounds_per_burst=4)


@pytest.fixture(scope="module")
def plain(folder) -> LLM:
    return LLM(folder, dtype="float32", draft="none", max_num_seqs=2)


def check_entry(entry, token: int, number: int, exact: np.ndarray, tokenizer) -> None:
    """`entry` is what float64 says of `token`, and of the `number` best ones, where `exact` [V] are log-probabilities.

    Two tokens may change places where float32 cannot tell them apart.
    """
    close, best = 1e-4, np.sort(exact)[::-1]
    others = [id_ for id_ in entry if id_ != token]
    assert next(iter(entry)) == token
    assert others == sorted(others, key=lambda id_: entry[id_].rank)
    assert len(others) == number - (entry[token].rank <= number)
    for id_, found in entry.items():
        assert found.logprob == pytest.approx(exact[id_], abs=close)
        assert 1 + (exact > exact[id_] + close).sum() <= found.rank <= (exact > exact[id_] - close).sum()
        assert found.logprob == pytest.approx(best[found.rank - 1], abs=close)
        assert found.decoded_token == tokenizer.decode([id_], skip_special_tokens=False)


@pytest.mark.parametrize("number", [0, 5, MAX_LOGPROBS])
@pytest.mark.parametrize("length", [2, 65, 66, 300])
def test_prompt_logprobs_are_those_of_a_float64_reference_whatever_the_chunks(plain, reference, length, number):
    """Chunks are of 16, 64 and 256 tokens, the last token of the prompt is in none: 1, 64, 65 in 256, 256 + 43 in 64."""
    prompt = np.random.default_rng(length).integers(3, 259, length).tolist()
    [output] = plain.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=number))
    exact = log_softmax(reference.logits(prompt))
    first, *entries = output.prompt_logprobs
    assert first is None
    for before, (entry, token) in enumerate(zip(entries, prompt[1:], strict=True)):
        check_entry(entry, token, number, exact[before], plain.tokenizer)


def test_a_prompt_of_one_token_has_nothing_to_report(plain):
    [output] = plain.generate([7], SamplingParams(max_tokens=3, prompt_logprobs=3))
    assert output.prompt_logprobs == (None,)


REPEATS = [40, 41, 42, 43] * 8
SETTINGS = [
    {},
    {"temperature": 1.2, "seed": 4},
    {"temperature": 0.8, "seed": 5, "top_k": 3, "typical_p": 0.9, "logit_bias": {42: 5.0, 43: -3.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": -0.5, "bad_words": [[41, 42]]},
    {"temperature": 1.0, "seed": 6, "allowed_token_ids": [40, 41, 42], "min_tokens": 5},
]


@pytest.mark.parametrize("options", SETTINGS)
def test_logprobs_are_those_of_the_targets_scores_before_anything_is_done_to_them(drafted, reference, options):
    [output] = drafted.generate(REPEATS, SamplingParams(max_tokens=30, ignore_eos=True, logprobs=4, **options))
    exact = log_softmax(reference.logits([*REPEATS, *output.token_ids]))[len(REPEATS) - 1 :]
    assert len(output.logprobs) == len(output.token_ids) == 30
    for entry, token, row in zip(output.logprobs, output.token_ids, exact, strict=False):
        check_entry(entry, token, 4, row, drafted.tokenizer)


@pytest.mark.parametrize("options", SETTINGS)
def test_drafts_change_no_logprob(drafted, plain, options):
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=3, **options)
    [with_drafts], [without] = drafted.generate(REPEATS, params), plain.generate(REPEATS, params)
    assert with_drafts.token_ids == without.token_ids
    assert without.stats.rounds == 40
    for found, expected in zip(with_drafts.logprobs, without.logprobs, strict=True):
        assert list(found) == list(expected)
        for token, entry in found.items():
            assert entry.logprob == pytest.approx(expected[token].logprob, abs=1e-3)
            assert entry.rank == expected[token].rank


def test_accepted_drafts_bring_their_own_logprobs(drafted, reference):
    """A bias lets the model repeat one token, so that whole drafts are accepted."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0, logit_bias={40: 100})
    [output] = drafted.generate([40] * 8, params)
    assert output.stats.accepted > 20
    exact = log_softmax(reference.logits([40] * 48))[7:47, 40]
    np.testing.assert_allclose([entry[40].logprob for entry in output.logprobs], exact, atol=1e-4)


def test_zero_logprobs_report_the_token_alone(drafted):
    [output] = drafted.generate("hello", SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0))
    assert [list(entry) for entry in output.logprobs] == [[token] for token in output.token_ids]


def test_requests_in_one_batch_get_what_each_of_them_asked_for_and_nobody_else(plain):
    prompts = [[5, 6, 7], [9] * 70, [8, 9]]
    asks = [SamplingParams(max_tokens=9, ignore_eos=True, logprobs=n, prompt_logprobs=n) for n in (2, None, 0)]
    together = plain.generate(prompts, asks)
    assert together[1].logprobs is together[1].prompt_logprobs is None
    for output, prompt, ask in zip(together, prompts, asks, strict=True):
        [alone] = plain.generate(prompt, ask)
        assert output.token_ids == alone.token_ids
        for found, expected in ((output.logprobs, alone.logprobs), (output.prompt_logprobs, alone.prompt_logprobs)):
            assert numbers(found) == pytest.approx(numbers(expected), abs=1e-4)
    silent = SamplingParams(max_tokens=9, ignore_eos=True)  # another program, which knows no log-probabilities
    assert plain.generate(prompts[0], silent)[0].token_ids == together[0].token_ids


def numbers(entries) -> list[float]:
    """All that `entries` say, in one list."""
    return [x for entry in entries or () if entry for token, e in entry.items() for x in (token, e.logprob, e.rank)]


def test_every_completion_has_its_own_logprobs(drafted):
    [output] = drafted.generate("hello", SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=12, logprobs=1))
    assert len({completion.token_ids for completion in output.outputs}) == 3
    for completion in output.outputs:
        assert [next(iter(entry)) for entry in completion.logprobs] == list(completion.token_ids)


def test_a_stream_has_as_many_entries_as_tokens_at_every_moment(drafted):
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    outputs = list(drafted.stream("hello", params))
    assert len(outputs) > 2
    for output in outputs:
        assert len(output.logprobs) == len(output.token_ids)
        assert len(output.prompt_logprobs) == len("hello")
        assert output.logprobs == outputs[-1].logprobs[: len(output.logprobs)]


@pytest.mark.parametrize("at", [1, 2, 6])
def test_entries_end_with_the_text_at_an_end_of_text_id(drafted, at):
    """The id is wanted from the start, and forbidden before `at` tokens; drafts beyond it are dropped."""
    params = SamplingParams(max_tokens=30, logprobs=2, min_tokens=at - 1, logit_bias={EOS: 100})
    [output] = drafted.generate(REPEATS, params)
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == EOS
    assert [next(iter(entry)) for entry in output.logprobs] == list(output.token_ids)
    assert len(output.token_ids) == at


def test_entries_end_with_the_text_at_a_stop_string(drafted):
    """The text is nothing but a's, and drafts of more of them reach beyond the stop string within one burst."""
    [a] = drafted.tokenizer.encode("a")
    params = SamplingParams(max_tokens=30, min_tokens=6, logprobs=1, stop="aa", logit_bias={a: 100})
    [output] = drafted.generate("aaaaaaaa", params)
    assert (output.text, output.finish_reason, output.stop_reason) == ("aaaaa", "stop", "aa")
    assert output.stats.accepted > 0
    assert output.token_ids == (a,) * 7
    assert [next(iter(entry)) for entry in output.logprobs] == list(output.token_ids)
