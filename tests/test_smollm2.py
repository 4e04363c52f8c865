"""The real model, end to end, against transformers on the same weights and against itself without drafts."""

import json
from pathlib import Path

import pytest

from spec_jax import LLM, SamplingParams

pytestmark = pytest.mark.model

REFERENCE = json.loads((Path(__file__).parent / "fixtures" / "smollm2_greedy.json").read_text())
SUMMARIZE = [
    {"role": "user", "content": "Repeat this sentence three times: The cat sat on the mat, and the dog barked."}
]


@pytest.fixture(scope="module")
def drafted() -> LLM:
    return LLM("smollm2-135m", dtype="float32", max_num_seqs=1, max_model_len=512)


def test_greedy_tokens_are_those_of_transformers(drafted):
    """transformers 5 in float32 on the same GGUF file; the text includes all layers, the cache, drafts and stops."""
    params = SamplingParams(max_tokens=40)
    for name, case in REFERENCE.items():
        [output] = drafted.generate([case["prompt"]], params)
        assert list(output.token_ids) == case["tokens"], name


def test_drafts_pay_and_change_nothing(drafted):
    plain = LLM("smollm2-135m", dtype="float32", draft="none", max_num_seqs=1, max_model_len=512)
    for params in (SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.8, top_p=0.9, seed=3)):
        [expected], [found] = plain.generate(SUMMARIZE, params), drafted.generate(SUMMARIZE, params)
        assert found.token_ids == expected.token_ids
        assert found.text == expected.text
        assert expected.stats.rounds == len(expected.token_ids)
    assert drafted.engine.draft.head is not None
    [greedy] = drafted.generate(SUMMARIZE, SamplingParams(max_tokens=60))
    assert greedy.stats.acceptance_length > 1.5
