"""How many drafts at which load: fewer where more sequences run, with the same text and a draft cache that stays true."""

import logging

import jax
import jax.numpy as jnp
import pytest

from spec_jax import LLM, SamplingParams, UserError
from spec_jax.config import DraftConfig, EngineConfig, default_schedule
from spec_jax.engine import Engine
from spec_jax.models.eagle import create_head
from spec_jax.models.layers import random_weights
from tests.conftest import TINY
from tests.test_eagle_loop import EAGLE3, PROMPTS, agreeing_head, make_requests, plain_texts, run, target

SCHEDULE = ((1, 4), (2, 2))


def make_engine(schedule, head=None, ngram_max=0) -> Engine:
    draft = DraftConfig(4, ngram_min=1, ngram_max=ngram_max, head=head and head.config, schedule=schedule)
    sizes = {"max_model_len": 128, "max_num_seqs": 4, "num_kv_tokens": 512, "page_size": 8, "prefill_chunks": (16,)}
    engine = Engine(TINY, draft, EngineConfig(min_context_bucket=128, rounds_per_burst=4, **sizes), "float32")
    engine.load(target(), head)
    return engine


@pytest.mark.parametrize(
    ("num_seqs", "tokens"), [(1, 4), (2, 2), (3, 0), (64, 0)]
)  # fmt: skip
def test_the_first_pair_that_holds_the_batch_counts_and_beyond_the_last_there_are_no_drafts(num_seqs, tokens):
    assert DraftConfig(4, schedule=SCHEDULE).at_load(num_seqs).num_tokens == tokens
    assert DraftConfig(4).at_load(num_seqs).num_tokens == 4


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("k", [1, 5])
def test_the_default_never_drafts_more_than_asked_nor_more_under_more_load(platform, k):
    schedule = default_schedule(platform, k)
    drafts = [DraftConfig(k, schedule=schedule).at_load(n).num_tokens for n in range(1, 200)]
    assert drafts[0] == k
    assert drafts == sorted(drafts, reverse=True)
    assert drafts[-1] == 0


@pytest.mark.parametrize(
    "schedule", [((2, 3), (1, 1)), ((1, 5),), ((0, 1),), ((1, -1),), ((1, 2), (1, 1))]
)  # fmt: skip
def test_a_schedule_that_cannot_be_followed_is_refused_with_what_can(schedule):
    with pytest.raises(UserError, match="0 to 4 drafts"):
        DraftConfig(4, schedule=schedule)


@pytest.mark.parametrize("schedule", [5, ["ab"], [(1,)], [1, 2]])
def test_what_is_no_schedule_is_refused_in_one_line(tiny_folder, schedule):
    with pytest.raises(UserError, match="give pairs"):
        LLM(str(tiny_folder), draft_schedule=schedule)


@pytest.mark.parametrize("ngram_max", [0, 3])
def test_load_that_comes_and_goes_changes_drafts_but_no_text(ngram_max):
    """Three sequences run without drafts, then two with 2, then one with 4: the head's cache is true all the while."""
    engine = make_engine(SCHEDULE, agreeing_head("EAGLE-3"), ngram_max)
    prompts = PROMPTS[1:4]
    requests = make_requests(engine, prompts)
    for request, tokens in zip(requests, (60, 24, 12), strict=True):
        request.max_length = len(request.prompt) + tokens
    texts = run(engine, requests)
    expected = plain_texts(prompts, max_tokens=60)
    assert texts == [text[: len(found)] for text, found in zip(expected, texts, strict=True)]
    assert [len(text) for text in texts] == [60, 24, 12]
    long = requests[0].snapshot().stats
    assert long.accepted > 0
    assert long.rounds < 60
    widths = {shape.draft.num_tokens for shape in bursts(engine)}
    assert widths == {0, 2, 4}


def bursts(engine):
    return [key[1] for key in engine.programs._known if key[0] == "burst"]


def test_a_batch_too_large_for_drafts_runs_as_plain_decoding(tiny_folder):
    llm = LLM(str(tiny_folder), draft="ngram", draft_schedule=[(1, 5)], dtype="float32", max_num_seqs=4)
    outputs = llm.generate(["abab"] * 4, SamplingParams(max_tokens=12, ignore_eos=True))
    assert all(output.stats.drafted == 0 for output in outputs)
    [alone] = llm.generate("abab", SamplingParams(max_tokens=12, ignore_eos=True))
    assert alone.token_ids == outputs[0].token_ids


@pytest.mark.parametrize("ngram_max", [0, 3])
def test_a_head_of_no_use_is_named_once_and_the_text_is_right(ngram_max, caplog):
    """Also where n-grams, whose drafts are good, stand before it."""
    head = create_head(random_weights(seed=9, dtype=jnp.float32), EAGLE3)
    for leaf in jax.tree.leaves(head.layer.mlp.down.weight):
        head.layer.mlp.down.weight[...] = jnp.full_like(leaf, jnp.nan)
    engine = make_engine((), head, ngram_max)
    with caplog.at_level(logging.WARNING, "spec_jax"):
        for _ in range(5):
            requests = make_requests(engine, PROMPTS[1:4], max_tokens=60)
            assert run(engine, requests) == plain_texts(PROMPTS[1:4], max_tokens=60)
    [warning] = [record.getMessage() for record in caplog.records]
    drafted = int(warning.split(" of its ")[1].split()[0])
    assert 1000 <= drafted < 1400
