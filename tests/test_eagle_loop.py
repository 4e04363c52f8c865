"""EAGLE heads in the loop: the same text as without them, whatever they draft, and a draft cache that is always true.

The target's layers add little to its embeddings here, so that heads can be written down that guess it right more often than
not: rounds in which all, some and none of the drafts are accepted all occur.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import LLM, SamplingParams, UserError
from spec_jax.cache import abstract_cache, create_cache
from spec_jax.checkpoints.eagle import LAYER_IDS
from spec_jax.config import DraftConfig, EagleConfig, EngineConfig
from spec_jax.engine import Engine
from spec_jax.grammar import GrammarCompiler
from spec_jax.models.decoder import Decoder
from spec_jax.models.eagle import EagleHead, create_head
from spec_jax.models.layers import random_weights
from spec_jax.prefill import prefill_chunk
from spec_jax.programs import Programs
from spec_jax.request import Request
from tests.checkpoints.test_eagle import write_original
from tests.conftest import TINY
from tests.test_engine import PROMPTS, TOKENIZER, assert_empty, make_request

PAGE, ROOM = 8, 128
SURE = 0.03  # a confidence where some chains end early
LAYER = replace(TINY, num_layers=1, num_kv_heads=4, max_position=16)  # what a head was trained for is no limit
EAGLE1 = EagleConfig(version=1, layer=LAYER, target_hidden_size=32, draft_vocab_size=259)
EAGLE3 = EagleConfig(
    version=3, layer=LAYER, target_hidden_size=32, draft_vocab_size=200, captured=(0, 1, 2), has_target_ids=True
)  # fmt: skip
TWO_LAYERS = replace(EAGLE3, layer=replace(LAYER, num_layers=2), norm_output=True, has_embedding=True)
CONFIGS = {"EAGLE-1": EAGLE1, "EAGLE-3": EAGLE3, "EAGLE-3 of two layers": TWO_LAYERS}
IDS = jnp.arange(3, 203, dtype=jnp.int32)  # of the draft vocabulary


def quiet(source):
    """The same weights, but layers that add little to what goes into them."""

    def get(path, shape, axes):
        loudness = 0.03 if path.endswith(("attention.output", "mlp.down")) else 1
        return source(path, shape, axes) * loudness

    return get


@cache
def target() -> Decoder:
    return Decoder(quiet(random_weights(seed=1, dtype=jnp.float32)), TINY)


def eagle1_weights(path, shape, axes):
    """What comes out is the embedding of the token that comes in, as large as a normed hidden state, and some features."""
    value = quiet(random_weights(seed=2, dtype=jnp.float32))(path, shape, axes)
    if path != "fc":
        return value
    return jnp.concatenate([32**0.5 * jnp.eye(32), 0.05 * value[:, 32:]], axis=1)


def eagle3_weights(path, shape, axes):
    """Attention looks at its own row, takes away what came in and puts the embedding in its place."""
    noise = random_weights(seed=3, dtype=jnp.float32)(path, shape, axes)
    match path:
        case "target_ids":
            return IDS
        case "head":
            return target().head[...][IDS]
        case "embedding":
            return target().embedding[...]
        case "fc":
            return 5 * noise
        case "layers.0.attention.output":
            return jnp.eye(32) + 0.02 * noise
        case "layers.0.attention.qkv":  # [heads, (query, key, value), 8, embedding and features]
            look = 4 * noise.reshape(4, 3, 8, 64)[:, 0]
            take = jnp.concatenate([jnp.eye(32), -jnp.eye(32)], axis=1).reshape(4, 8, 64)
            return jnp.stack([look, look, take], axis=1).reshape(shape)
    return quiet(lambda *_: noise)(path, shape, axes)


@cache
def agreeing_head(name: str) -> EagleHead:
    """One that often drafts what the target says."""
    config = CONFIGS[name]
    return create_head(eagle1_weights if config.version == 1 else eagle3_weights, config)


@cache
def programs(draft: DraftConfig, options: EngineConfig) -> Programs:
    """Compiled once, however many engines have these sizes."""
    return Engine(TINY, draft, options, "float32").programs


def make_engine(head: EagleHead | None, k=3, *, ngram_max=0, min_confidence=0.0, **options) -> Engine:
    config = EngineConfig(
        **{
            "max_model_len": ROOM, "max_num_seqs": 4, "num_kv_tokens": 512, "page_size": PAGE, "prefill_chunks": (16,),
            "min_context_bucket": ROOM, "rounds_per_burst": 4, "rounds_per_burst_streaming": 1,
        } | options
    )  # fmt: skip
    draft = DraftConfig(
        k, ngram_min=2, ngram_max=ngram_max, head=None if head is None else head.config, min_confidence=min_confidence
    )
    engine = Engine(TINY, draft, config, "float32")
    engine.programs = programs(draft, config)
    engine.sizes.num_slots = lambda needed: 1 if needed == 1 else 4  # two programs for all batches
    engine.load(target(), head)
    return engine


def make_requests(engine: Engine, prompts=PROMPTS, **params) -> list[Request]:
    return [make_request(engine, prompt, seed=i, **params) for i, prompt in enumerate(prompts)]


def run(engine: Engine, requests, after_step=lambda: None) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        after_step()
    assert_empty(engine)
    return [request.output for request in requests]


def plain_texts(prompts=PROMPTS, *, kv_cache_dtype="auto", **params) -> list[list[int]]:
    """What the target says without drafts."""
    engine = make_engine(None, 0, kv_cache_dtype=kv_cache_dtype)
    return run(engine, make_requests(engine, prompts, **params))


def accepted(requests) -> int:
    return sum(request.snapshot().stats.accepted for request in requests)


class TrueCache:
    """Compares the draft cache of an engine's slots with that of a fresh prefill over their text."""

    def __init__(self, engine: Engine, head: EagleHead):
        self.engine, self.num_compared = engine, 0
        table = jnp.arange(1, 1 + ROOM // PAGE)

        def prefill(text, count):
            fresh = create_cache(abstract_cache(TINY, 1 + ROOM // PAGE, PAGE, "float32", head=head.config))
            written, output = prefill_chunk(target(), fresh, text[:-1], text[1:], jnp.int32(0), count, table, head=head)
            return [rows_of(pages.values, table) for layer in written.draft for pages in layer], output.draft_hidden

        self._prefill = jax.jit(prefill)

    def __call__(self) -> None:
        state, draft = self.engine._on_device.state, self.engine._on_device.cache.draft
        lengths, active = np.asarray(state.length), np.asarray(state.active)
        for slot in np.flatnonzero(active & (lengths > 1)):
            count = int(lengths[slot]) - 1
            found = [rows_of(pages.values, state.block_tables[slot]) for layer in draft for pages in layer]
            expected, hidden = self._prefill(state.tokens[slot, : ROOM + 1], jnp.int32(count))
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours[:count], theirs[:count], atol=2e-5, rtol=2e-5)
            np.testing.assert_allclose(state.draft_hidden[slot], hidden, atol=2e-5, rtol=2e-5)
            self.num_compared += 1


def rows_of(pages, table):
    """[P, K, page, hd] and [N] -> the rows of one sequence in order, [N * page, K, hd]."""
    return pages[table].transpose(0, 2, 1, 3).reshape(-1, pages.shape[1], pages.shape[3])


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "k", "ngram_max"),
    [
        ("EAGLE-1", 3, 0),
        ("EAGLE-3", 3, 3),
        slow("EAGLE-3 of two layers", 6, 0),
        *(slow("EAGLE-1", k, 0) for k in (1, 2, 4, 5, 6)),
        *(slow("EAGLE-3", k, 0) for k in (1, 2, 3, 4, 5, 6)),
        *(slow("EAGLE-1", k, 3) for k in (1, 5)),
        *(slow("EAGLE-3", k, 3) for k in (1, 6)),
    ],
)
def test_the_text_is_that_of_plain_decoding(name, k, ngram_max):
    engine = make_engine(agreeing_head(name), k, ngram_max=ngram_max)
    for temperature in (0.0, 0.8):
        expected = plain_texts(temperature=temperature)
        together = make_requests(engine, temperature=temperature)
        assert run(engine, together) == expected
        assert 0 < accepted(together) < sum(request.snapshot().stats.drafted for request in together)
        alone = make_requests(engine, temperature=temperature)
        assert [run(engine, [request])[0] for request in alone] == expected


@pytest.mark.parametrize(
    ("name", "ngram_max"), [("EAGLE-1", 0), ("EAGLE-3", 3), slow("EAGLE-3", 0), slow("EAGLE-3 of two layers", 3)]
)
def test_after_each_round_the_draft_cache_is_that_of_a_fresh_prefill(name, ngram_max):
    """Whatever a round drafted, accepted and rejected. More requests than slots: pages and slots are used again."""
    head = agreeing_head(name)
    engine = make_engine(head, ngram_max=ngram_max)
    compare = TrueCache(engine, head)
    requests = [
        make_request(engine, prompt, seed=i, temperature=0.8 * (i % 2), max_tokens=16 + i)
        for i, prompt in enumerate([*PROMPTS, [7, 9], [33]])
    ]
    for request in requests:
        request.streams = True  # one round a burst
    seen, before = set(), np.zeros((2, 4), np.int32)

    def after_step() -> None:
        nonlocal before
        compare()
        state = engine._on_device.state
        now = np.stack([state.rounds, np.sum(state.accepted, axis=1)])
        rounds, agreed = now - before
        seen.update(agreed[rounds == 1].tolist())
        before = now

    run(engine, requests, after_step)
    assert {0, 1, 2, 3} <= seen
    assert compare.num_compared > 40


@pytest.mark.parametrize("min_confidence", [0.0, SURE])
def test_after_bursts_of_several_rounds_the_draft_cache_is_true_as_well(min_confidence):
    """Also where chains end early, at different drafts beside each other."""
    head = agreeing_head("EAGLE-3")
    engine = make_engine(head, ngram_max=3, min_confidence=min_confidence)
    compare = TrueCache(engine, head)
    requests = make_requests(engine, temperature=0.8)
    assert run(engine, requests, compare) == plain_texts(temperature=0.8)
    assert compare.num_compared > 5
    drafted = sum(request.counters.head_drafts[0] for request in requests)
    rounds = sum(request.counters.rounds for request in requests)
    assert rounds < drafted < (2.2 if min_confidence else 3.0) * rounds


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prompt", [[5], [258], [7, 7], [7, 9]])
def test_a_prompt_may_have_one_token_or_two(prompt, temperature):
    head = agreeing_head("EAGLE-3")
    engine = make_engine(head, ngram_max=3)
    expected = plain_texts([prompt], temperature=temperature)
    assert run(engine, make_requests(engine, [prompt], temperature=temperature), TrueCache(engine, head)) == expected


def test_the_first_round_of_a_lone_token_has_no_draft():
    engine = make_engine(agreeing_head("EAGLE-1"))
    request = make_request(engine, [5], max_tokens=2)
    run(engine, [request])
    assert request.counters == (2, 0, (0, 0, 0), (0, 0))  # the second has no room for one


@pytest.mark.parametrize(("name", "ngram_max"), [("EAGLE-1", 0), ("EAGLE-3", 3)])
def test_a_text_goes_on_past_what_the_head_was_trained_for(name, ngram_max):
    assert CONFIGS[name].layer.max_position == 16
    head = agreeing_head(name)
    engine = make_engine(head, ngram_max=ngram_max)
    prompt = list(range(60, 160))
    [expected] = plain_texts([prompt], temperature=0.8)
    request = make_request(engine, prompt, temperature=0.8)
    assert run(engine, [request], TrueCache(engine, head)) == [expected]
    assert accepted([request]) > 0


@pytest.mark.parametrize(
    ("name", "ngram_max", "max_model_len"),
    [("EAGLE-1", 0, ROOM), ("EAGLE-3", 3, ROOM), slow("EAGLE-1", 0, 125), slow("EAGLE-3", 0, 121)],
)
def test_a_text_ends_exactly_at_the_model_length(name, ngram_max, max_model_len):
    """From every distance, so that the last rounds have room for all, some and none of the drafts."""
    engine = make_engine(agreeing_head(name), ngram_max=ngram_max, max_model_len=max_model_len)
    for temperature in (0.0, 0.8):
        prompts = [[40 + i] * (max_model_len - 2 * i) for i in range(1, 9)] + [[9] * (max_model_len - 1)]
        expected = plain_texts(prompts, temperature=temperature, max_tokens=1000)
        requests = make_requests(engine, prompts, temperature=temperature, max_tokens=1000)
        outputs = run(engine, requests)
        assert outputs == [text[: max_model_len - len(p)] for text, p in zip(expected, prompts, strict=True)]
        assert {request.num_tokens for request in requests} == {max_model_len}
        assert {request.finish_reason for request in requests} == {"length"}


def test_a_stop_token_inside_accepted_drafts_ends_the_text():
    engine = make_engine(agreeing_head("EAGLE-1"))
    [free] = plain_texts(PROMPTS[3:4])
    for place in range(1, 12):
        request = make_request(engine, PROMPTS[3], stop_token_ids=(free[place],))
        assert run(engine, [request])[0] == free[: free.index(free[place]) + 1]
        assert request.finish_reason == "stop"


@pytest.mark.parametrize(("name", "ngram_max"), [("EAGLE-1", 0), ("EAGLE-3", 3)])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(name, ngram_max):
    head = agreeing_head(name)
    engine = make_engine(head, ngram_max=ngram_max)
    for temperature, prompt in ((0.0, PROMPTS[3]), (0.8, PROMPTS[0])):
        [expected] = plain_texts([prompt], temperature=temperature)
        request = make_request(engine, prompt, temperature=temperature)
        compare = TrueCache(engine, head)
        engine.add(request)
        for _ in range(3):
            engine.step()
            compare()
            engine.preempt(request)
        assert run(engine, [], compare) == []
        assert request.output == expected
        assert accepted([request]) > 0


def test_a_preempted_request_disturbs_nobody_and_nobody_it():
    head = agreeing_head("EAGLE-3")
    engine = make_engine(head, ngram_max=3)
    expected = plain_texts(temperature=0.8)
    requests = make_requests(engine, temperature=0.8)
    steps, compare = iter(range(1000)), TrueCache(engine, head)

    def after_step() -> None:
        compare()
        step = next(steps)
        if 1 <= step <= 3:
            engine.preempt(requests[step])

    assert run(engine, requests, after_step) == expected


@pytest.mark.slow
def test_with_a_float8_cache_the_text_is_that_of_plain_decoding_on_one():
    engine = make_engine(agreeing_head("EAGLE-3"), kv_cache_dtype="fp8")
    requests = make_requests(engine, PROMPTS[3:4], temperature=0.8)
    assert run(engine, requests) == plain_texts(PROMPTS[3:4], temperature=0.8, kv_cache_dtype="fp8")
    assert accepted(requests) > 0
    assert engine._on_device.cache.draft[0].k.values.dtype == jnp.uint8


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
@pytest.mark.parametrize(("name", "ngram_max"), [("EAGLE-1", 0), ("EAGLE-3", 3)])
def test_a_head_with_ruined_weights_leaves_the_text_right(name, ngram_max, value):
    def ruined(path, shape, axes):
        return IDS if path == "target_ids" else jnp.full(shape, value, jnp.float32)

    engine = make_engine(create_head(ruined, CONFIGS[name]), ngram_max=ngram_max)
    for temperature in (0.0, 0.8):
        expected = plain_texts(temperature=temperature)
        assert run(engine, make_requests(engine, temperature=temperature)) == expected


GRAMMARS = [
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}}}},
    {"regex": "[a-e]{9,30}"},
]


def make_constrained(engine: Engine, seed: int, **params) -> Request:
    request = make_request(engine, PROMPTS[2], seed=seed, ignore_eos=False, **params)
    request.grammar = GrammarCompiler(TOKENIZER, TINY.vocab_size, (2,)).compile(request.params)
    return request


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_with_a_grammar_is_the_same_and_so_are_those_beside_it(temperature):
    head = agreeing_head("EAGLE-3")
    texts = []
    for engine in (make_engine(None, 0), make_engine(head, ngram_max=3)):
        requests = [make_constrained(engine, i, temperature=temperature, **g) for i, g in enumerate(GRAMMARS)]
        requests += make_requests(engine, PROMPTS[:2], temperature=temperature, max_tokens=80)
        compare = TrueCache(engine, head) if engine.draft.head else lambda: None
        texts.append(run(engine, requests, compare))
    assert texts[0] == texts[1]
    assert accepted(requests[:2]) > 0


def test_a_grammar_survives_preemption_beside_a_head():
    engine = make_engine(agreeing_head("EAGLE-3"), ngram_max=3)
    whole, interrupted = (make_constrained(engine, 1, temperature=0.8, **GRAMMARS[1]) for _ in range(2))
    run(engine, [whole, *make_requests(engine, PROMPTS[:3], max_tokens=80)])
    steps = iter(range(1000))
    run(
        engine,
        [interrupted, *make_requests(engine, PROMPTS[:3], max_tokens=80)],
        lambda: engine.preempt(interrupted) if next(steps) in (1, 3) else None,
    )
    assert interrupted.output == whole.output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-3"])
def test_a_prompt_from_another_device_brings_the_draft_cache_with_it(name):
    head, config = agreeing_head(name), make_engine(None, 0).config
    draft = DraftConfig(3, ngram_max=0, head=head.config)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[1:2]), ("tp",))
    engine = Engine(TINY, draft, config, "float32", prefill_mesh=mesh)
    engine.load(target(), head)
    compare = TrueCache(engine, head)
    assert run(engine, make_requests(engine), compare) == plain_texts()
    assert compare.num_compared > 0


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"draft_vocab_size": 201}, "201"),
        ({"layer": replace(LAYER, vocab_size=260, num_heads=3, num_kv_heads=3)}, "3"),
        ({"layer": replace(LAYER, vocab_size=260, ffn_size=41)}, "41"),
    ],
)
def test_a_head_that_does_not_divide_over_the_devices_is_refused(change, number):
    whole, mesh = replace(TINY, vocab_size=260), jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
    head = replace(EAGLE3, **({"layer": replace(LAYER, vocab_size=260)} | change))
    with pytest.raises(UserError, match=f"{number} does not divide over 2 devices"):
        Engine(whole, DraftConfig(3, head=head), make_engine(None, 0).config, "float32", mesh=mesh)


@pytest.mark.slow
def test_a_head_from_a_folder_leaves_the_texts_of_llm_as_they_are(tiny_folder, tmp_path):
    config = replace(EAGLE3, captured=(1, 2, 0), has_embedding=True)
    folder = write_original(tmp_path / "head", config, eagle_config={LAYER_IDS: [0, 1, -1]})
    llm = LLM(str(tiny_folder), draft=f"eagle:{folder}", num_draft_tokens=3, dtype="float32", max_num_seqs=2)
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=4, logprobs=2)
    prompts = ["a", "abc abc abc", "naïve 🙂"]
    drafted, plain = llm.generate(prompts, params), llm.with_draft("none").generate(prompts, params)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert sum(output.stats.drafted for output in drafted) > 0
    assert sum(output.stats.drafted for output in plain) == 0
    for ours, theirs in zip(drafted, plain, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert list(a) == list(b)
            np.testing.assert_allclose([x.logprob for x in a.values()], [x.logprob for x in b.values()], atol=1e-4)


@pytest.mark.slow
def test_a_text_that_a_head_cannot_follow_does_not_spoil_the_drafts_of_later_ones():
    """What is no number stays in pages that others get; behind a mask it must count for nothing."""

    def weights(path, shape, axes):
        value = eagle3_weights(path, shape, axes)
        return value.at[200].set(jnp.nan) if path == "embedding" else value

    engine = make_engine(create_head(weights, replace(EAGLE3, has_embedding=True)))
    counters = []
    for _ in range(2):
        request = make_request(engine, PROMPTS[2], temperature=0.8, logit_bias={200: -100.0})
        run(engine, [request])
        counters.append(request.counters)
        run(engine, make_requests(engine, [[200] * 90] * 4))
    assert counters[0] == counters[1]
