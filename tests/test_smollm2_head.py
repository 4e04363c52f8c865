"""The head that comes with the built-in model: worth its cost, small, and lossless on long prompts."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import spec_jax.checkpoints
from spec_jax import LLM, SamplingParams

pytestmark = pytest.mark.model

HEAD = Path(spec_jax.checkpoints.__file__).parent / "heads" / "smollm2-135m"
QUESTIONS = [
    "How do I keep houseplants alive while I am away for two weeks?",
    "Give me three tips for learning a new language.",
]
CHATS = [[{"role": "user", "content": text}] for text in QUESTIONS]
LEAST_ACCEPTANCE_LENGTH = 1.5


def acceptance_length(llm: LLM) -> float:
    stats = [output.stats for output in llm.generate(CHATS, SamplingParams(max_tokens=40))]
    return sum(s.acceptance_length * s.rounds for s in stats) / sum(s.rounds for s in stats)


def test_the_head_drafts_and_layer_ids_shifted_by_one_draft_worse(tmp_path):
    """The file names layers in both conventions; read in the wrong one, features are not those that it was trained on."""
    llm = LLM("smollm2-135m", draft="eagle", max_num_seqs=1, max_model_len=256)
    right = acceptance_length(llm)
    assert right > LEAST_ACCEPTANCE_LENGTH
    raw = json.loads((HEAD / "config.json").read_text())
    ids = "eagle_aux_hidden_state_layer_ids"
    assert [i + 1 for i in raw["eagle_config"][ids]] == raw[ids]
    shutil.copytree(HEAD, tmp_path / "head")
    raw[ids] = [i + 1 for i in raw[ids]]
    (tmp_path / "head" / "config.json").write_text(json.dumps(raw))
    assert acceptance_length(llm.with_draft(f"eagle:{tmp_path / 'head'}")) < right - 0.05


def test_it_is_small_and_says_what_it_is():
    assert sum(path.stat().st_size for path in HEAD.iterdir()) <= 20_000_000
    assert "acceptance" in (HEAD / "README.md").read_text().lower()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_long_prompts_are_lossless_with_any_number_of_drafts(k, batch):
    rng = np.random.default_rng(0)
    words = ["the", "river", "old", "bridge", "seven", "quietly", "walks", "and", "blue", "stone", "over", "market"]
    prompts = [" ".join(rng.choice(words, 2100 + 50 * i)) for i in range(2)]
    llm = LLM(
        "smollm2-135m", dtype="float32", num_draft_tokens=k, draft_schedule=[], max_num_seqs=batch, max_model_len=4096
    )
    plain = llm.with_draft("none")
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=32, temperature=temperature, seed=1, ignore_eos=True)
        drafted = llm.generate(prompts, params)
        assert len(drafted[0].prompt_token_ids) > 2048
        assert [o.token_ids for o in drafted] == [o.token_ids for o in plain.generate(prompts, params)]
