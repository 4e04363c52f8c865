"""Neither drafts, batch, moment of arrival nor preemption change a token or a log-probability, whatever is asked for."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_jax import LLM, SamplingParams
from tests.test_engine import assert_empty

PROMPTS = ["a", "abab abab abab", "one two one two one two one", "zzzzzzzzzz", "The cat sat. The cat sat. The"]
SCHEMA = {
    "type": "object", "properties": {"k": {"type": "integer"}, "v": {"enum": ["x", "yy"]}}, "required": ["k", "v"],
    "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tiny_folder):
    return LLM(str(tiny_folder), draft="none", dtype="float32", max_num_seqs=1, max_model_len=128)


@pytest.fixture(scope="module")
def engines(tiny_folder):
    made = {}

    def get(k: int, slots: int) -> LLM:
        if (k, slots) not in made:
            made.clear()  # one at a time: the programs of many take much memory
            made[k, slots] = LLM(
                str(tiny_folder), draft="ngram", num_draft_tokens=k, dtype="float32", max_num_seqs=slots,
                max_model_len=128, rounds_per_burst=3,
            )  # fmt: skip
        return made[k, slots]

    return get


temperatures = st.sampled_from([0.0, 0.5, 1.0, 2.0])
cuts = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([1, 3, 20, 200]),
        "top_p": st.sampled_from([0.3, 0.8, 0.99]),
        "min_p": st.sampled_from([0.01, 0.2]),
        "typical_p": st.sampled_from([0.2, 0.7, 0.95]),
    },
)
processors = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 0.9, 1.3]),  # below 1 a text repeats itself: more drafts are kept
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.8, 0.4]),
        "logit_bias": st.sampled_from([{2: 8.0}, {70: 5.0, 71: 5.0, 72: -100.0}]),
        "allowed_token_ids": st.sampled_from([(70, 71, 72, 2, 5), tuple(range(2, 100))]),
        "bad_words": st.sampled_from([((70, 71),), ((71, 71), (72, 70, 70)), ("ab", (72,))]),
        "min_tokens": st.integers(1, 12),
        "logprobs": st.integers(0, 4),
        "stop_token_ids": st.sampled_from([(70,), (71, 200)]),
        "stop": st.sampled_from([("a",), ("cd", "X")]),
        "include_stop_str_in_output": st.booleans(),
    },
)
grammars = st.sampled_from([{"regex": r"(ab|ba)+c?[0-9]{2,4}"}, {"json_schema": SCHEMA}])
lengths = st.fixed_dictionaries({"max_tokens": st.integers(12, 30), "ignore_eos": st.booleans()})


@st.composite
def parameters(draw) -> SamplingParams:
    chosen = draw(lengths) | draw(cuts) | {"temperature": draw(temperatures), "seed": draw(st.integers(0, 2**64 - 1))}
    if draw(st.integers(0, 4)) == 0:
        return SamplingParams(**(chosen | draw(grammars) | {"ignore_eos": False, "logprobs": draw(st.integers(0, 2))}))
    return SamplingParams(**(chosen | draw(processors)))


def drive(llm: LLM, jobs, waits, preemptions):
    """Adds the requests one by one with `waits` steps between them; at step i the request `preemptions[i]` is preempted."""
    requests = [request for prompt, params in jobs for request in llm._requests(prompt, params, False)]
    pending, step = list(zip(requests, waits, strict=True)), 0
    wait = 0
    while pending or llm.engine.has_work:
        while pending and wait <= 0:
            request, wait = pending.pop(0)
            llm.engine.add(request)
        llm.engine.step()
        wait -= 1
        if step in preemptions:
            llm.engine.preempt(requests[preemptions[step] % len(requests)])
        step += 1
        assert step < 3000
    return requests


def same(found, expected) -> bool:
    """Tokens, text and end are equal; log-probabilities too, up to rounding."""
    a, b = found.snapshot(), expected.snapshot()
    if (a.token_ids, a.text, a.finish_reason, a.stop_reason) != (b.token_ids, b.text, b.finish_reason, b.stop_reason):
        return False
    if a.logprobs is None or b.logprobs is None:
        return a.logprobs is b.logprobs
    pairs = list(zip(a.logprobs, b.logprobs, strict=True))
    near = all(x[t].logprob == pytest.approx(y[t].logprob, abs=1e-3) for x, y in pairs for t in x if t in y)
    return near and len(pairs) == len(a.token_ids)


FAST = [(5, 3)]
ALL = [(k, slots) for k in range(7) for slots in (1, 3, 8)]


@pytest.mark.parametrize(
    ("k", "slots"), [*FAST, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ALL if pair not in FAST)]
)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_text_is_the_same_in_any_company(plain, engines, k, slots, data):
    llm = engines(k, slots)
    jobs = data.draw(st.lists(st.tuples(st.sampled_from(PROMPTS), parameters()), min_size=1, max_size=slots + 2))
    waits = data.draw(st.lists(st.integers(0, 3), min_size=len(jobs), max_size=len(jobs)))
    preemptions = data.draw(st.dictionaries(st.integers(0, 12), st.integers(0, 8), max_size=3))
    expected = [drive(plain, [job], [0], {})[0] for job in jobs]
    found = drive(llm, jobs, waits, preemptions)
    for (prompt, params), a, b in zip(jobs, found, expected, strict=True):
        assert same(a, b), f"{prompt=} {params=}\n{a.output}\n{b.output}"
    assert_empty(llm.engine)
