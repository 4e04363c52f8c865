"""Continuous batching on a tiny model: the same text for any drafts, batch and moment of arrival; nothing leaks."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_jax.config import DraftConfig, EngineConfig
from spec_jax.engine import Engine
from spec_jax.errors import UserError
from spec_jax.models.decoder import Decoder
from spec_jax.models.layers import random_weights
from spec_jax.params import SamplingParams
from spec_jax.request import Request
from spec_jax.tokenizer import Tokenizer
from tests.conftest import TINY, byte_tokenizer
from tests.reference import ReferenceModel

TOKENIZER = Tokenizer(byte_tokenizer())
PROMPTS = [[5], [7, 7, 7, 7], [40, 41, 42, 43, 40, 41], list(range(60, 100)), [9, 8, 9, 8, 9, 8, 9]]


def make_engine(decoder, k=3, slots=3, **options) -> Engine:
    sizes = {
        "max_model_len": 128,
        "max_num_seqs": slots,
        "num_kv_tokens": 512,
        "page_size": 8,
        "prefill_chunks": (8, 16),
        "min_context_bucket": 64,
        "rounds_per_burst": 4,
    }
    engine = Engine(decoder.config, DraftConfig(num_tokens=k), EngineConfig(**(sizes | options)), "float32")
    engine.load(decoder)
    return engine


def make_request(engine, prompt, *, seed=0, **params) -> Request:
    sampling = SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | params))
    limit = engine.config.max_model_len
    return Request(
        prompt=list(prompt), params=sampling, tokenizer=TOKENIZER, eos_token_ids=(2,),
        max_length=min(len(prompt) + sampling.max_tokens, limit), seed=seed,
    )  # fmt: skip


def finish(engine, requests):
    for request in requests:
        engine.add(request)
    for _ in range(2000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work
    return [request.output for request in requests]


def assert_empty(engine) -> None:
    """No request, and every page is free."""
    assert not engine.scheduler.has_work
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_pages - 1


@pytest.fixture(scope="module")
def engines(tiny_decoder):
    """One engine per number of drafts, shared by the tests of this file; every test must leave it empty."""
    made = {}

    def get(k=3, slots=3) -> Engine:
        if (k, slots) not in made:
            made[k, slots] = make_engine(tiny_decoder, k, slots)
        return made[k, slots]

    yield get
    for engine in made.values():
        assert_empty(engine)


@pytest.mark.parametrize(("k", "slots"), [(0, 1), (3, 1), (3, 3)])
def test_greedy_text_is_that_of_a_float64_reference(engines, tiny_decoder, k, slots):
    engine = engines(k, slots)
    outputs = finish(engine, [make_request(engine, prompt) for prompt in PROMPTS])
    reference = ReferenceModel(tiny_decoder)
    assert outputs == [reference.greedy(prompt, 24) for prompt in PROMPTS]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drafts_batches_and_arrivals_do_not_change_a_text(engines, data):
    settings_of = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02},
    ]
    chosen = data.draw(
        st.lists(st.tuples(st.sampled_from(PROMPTS), st.sampled_from(settings_of)), min_size=1, max_size=6)
    )
    waits = data.draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))
    alone, together = engines(0, 1), engines(3, 3)
    expected = [
        finish(alone, [make_request(alone, prompt, seed=i, **params)])[0] for i, (prompt, params) in enumerate(chosen)
    ]
    requests = [make_request(together, prompt, seed=i, **params) for i, (prompt, params) in enumerate(chosen)]
    for request, wait in zip(requests, waits, strict=True):
        together.add(request)
        for _ in range(wait):
            together.step()
    assert finish(together, []) == []
    assert [request.output for request in requests] == expected


def test_stop_ids_end_a_text_with_themselves(engines):
    engine = engines()
    free = finish(engine, [make_request(engine, PROMPTS[2])])[0]
    stop = free[6]
    request = make_request(engine, PROMPTS[2], stop_token_ids=(stop,))
    assert finish(engine, [request])[0] == free[: free.index(stop) + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)


def test_a_text_may_fill_the_model_length_exactly(engines):
    engine = engines()
    request = make_request(engine, range(60, 100), max_tokens=1000)
    [output] = finish(engine, [request])
    assert len(output) == 128 - 40
    assert request.finish_reason == "length"


def test_more_requests_than_slots_and_pages_all_end(tiny_decoder):
    engine = make_engine(tiny_decoder, slots=2, num_kv_tokens=64)
    outputs = finish(engine, [make_request(engine, prompt) for prompt in PROMPTS[:3] * 3])
    assert outputs[:3] == outputs[3:6] == outputs[6:]
    assert engine.scheduler.blocks.num_free == 8


def test_a_request_that_can_never_fit_is_refused_with_both_numbers(tiny_decoder):
    engine = make_engine(tiny_decoder, num_kv_tokens=32)
    with pytest.raises(UserError, match="may grow to 64 tokens, the cache holds 32"):
        engine.add(make_request(engine, range(60, 100)))


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_aborted_request_frees_everything_and_disturbs_nobody(engines, steps):
    engine = engines()
    [expected] = finish(engine, [make_request(engine, PROMPTS[3])])
    kept, dropped = make_request(engine, PROMPTS[3]), make_request(engine, PROMPTS[4], max_tokens=100)
    engine.add(dropped)
    engine.add(kept)
    for _ in range(steps):
        engine.step()
    engine.abort(dropped)
    engine.abort(dropped)
    late = make_request(engine, PROMPTS[2])
    outputs = finish(engine, [late])
    assert kept.output == expected
    assert outputs == finish(engine, [make_request(engine, PROMPTS[2])])


def test_nothing_is_compiled_once_a_workload_has_been_seen(engines):
    engine = engines()
    work = [(p, t) for p, t in itertools.product(PROMPTS, (0.0, 0.9))]

    def go():
        requests = [make_request(engine, p, temperature=t, stop_token_ids=(9,), seed=3) for p, t in work]
        dropped = make_request(engine, PROMPTS[0])
        engine.add(dropped)
        engine.step()
        engine.abort(dropped)
        return finish(engine, requests)

    first = go()
    before = engine.programs.num_compilations
    counts = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: counts.append(name) if name.endswith("backend_compile_duration") else None
    )
    try:
        assert go() == first
    finally:
        jax.monitoring.clear_event_listeners()
    assert engine.programs.num_compilations == before
    assert not counts


def test_counters_agree_with_the_tokens(engines):
    engine = engines()
    request = make_request(engine, PROMPTS[1])
    finish(engine, [request])
    stats = request.snapshot().stats
    assert stats.rounds + stats.accepted == 24 == len(request.output)
    assert sum(stats.accepted_per_position) == stats.accepted <= stats.drafted
    assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
    assert stats.acceptance_length == pytest.approx(24 / stats.rounds)


@pytest.mark.parametrize("token", [-1, 259, 10_000])
def test_ids_outside_the_vocabulary_are_refused(engines, token):
    engine = engines()
    with pytest.raises(UserError, match=f"token id {token}: the vocabulary has ids 0 to 258"):
        engine.add(make_request(engine, [5, token]))
    if token > 0:
        with pytest.raises(UserError, match=f"stop_token_ids has token id {token}"):
            engine.add(make_request(engine, [5], stop_token_ids=(token,)))


def test_too_many_stop_ids_are_refused_with_the_limit(engines):
    engine = engines()
    with pytest.raises(UserError, match="at most 16"):
        engine.add(make_request(engine, [5], stop_token_ids=tuple(range(3, 30))))


def test_a_wrong_weight_shape_never_reaches_a_program(tiny_decoder):
    engine = make_engine(tiny_decoder)
    program = engine.programs.prefill(8, 8, False)
    with pytest.raises(TypeError, match=r"compiled for|incompatible|differ"):
        program(
            engine._weights,
            engine._on_device.cache,
            np.zeros(9, np.int32),
            None,
            np.int32(0),
            np.int32(1),
            np.zeros(8, np.int32),
        )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(engines, prompt):
    engine = engines()
    options = {"prompt_logprobs": 2, "logprobs": 1, "frequency_penalty": 0.5, "temperature": 0.9}
    whole, interrupted = make_request(engine, prompt, **options), make_request(engine, prompt, **options)
    finish(engine, [whole])
    engine.add(interrupted)
    for _ in range(3):
        engine.step()
        engine.preempt(interrupted)
    finish(engine, [])
    assert interrupted.output == whole.output
    assert len(interrupted.prompt_logprobs) == len(prompt)
    assert len(interrupted.logprobs) == len(interrupted.output)
    assert interrupted.counters[0] + sum(interrupted.counters[2]) == len(interrupted.output)


def test_min_tokens_beyond_the_model_length_never_overflows(engines):
    engine = engines()
    request = make_request(engine, [5], max_tokens=2**31 - 1, min_tokens=2**31 - 1)
    finish(engine, [request])
    assert (len(request.output), request.finish_reason) == (127, "length")


@pytest.mark.parametrize("place", ["append", "_insert"])
def test_an_interrupt_ends_all_who_lost_tokens_and_nobody_else(engines, monkeypatch, place):
    """Ctrl-C at any moment: a text is whole, or says that it was aborted."""
    engine = engines()
    [expected] = finish(engine, [make_request(engine, PROMPTS[2])])
    requests = [make_request(engine, PROMPTS[2]) for _ in range(5)]
    owner = Request if place == "append" else Engine
    right, calls = getattr(owner, place), itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return right(*arguments)

    monkeypatch.setattr(owner, place, interrupted)
    for request in requests:
        engine.add(request)
    with pytest.raises(KeyboardInterrupt):
        finish(engine, [])
    finish(engine, [])
    assert all(r.output == expected or r.finish_reason == "abort" for r in requests)
    assert sum(r.output == expected for r in requests) >= 2
    assert_empty(engine)


def test_with_a_window_a_long_text_that_ended_leaves_a_short_one_beside_it_alone():
    """Behind the ended text's window there is nothing in the tables of the short one's bursts."""
    decoder = Decoder(random_weights(seed=1, dtype=jnp.float32), replace(TINY, sliding_window=16))
    texts = []
    for company in ([], [list(range(3, 103))]):
        engine = make_engine(decoder, slots=2)
        others = [make_request(engine, prompt, max_tokens=2) for prompt in company]
        short = make_request(engine, PROMPTS[2], max_tokens=40)
        texts.append(finish(engine, [*others, short])[-1])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 40
