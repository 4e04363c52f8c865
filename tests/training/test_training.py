"""Training a draft head: what it is shown, what its loss means, and that an interruption changes nothing."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from spec_jax import LLM, SamplingParams
from spec_jax.cache import abstract_cache, create_cache
from spec_jax.checkpoints import open_model
from spec_jax.config import EagleConfig
from spec_jax.errors import UserError
from spec_jax.models.decoder import Decoder, Rows
from spec_jax.models.eagle import create_head
from spec_jax.models.layers import random_weights
from spec_jax.training import train_draft
from spec_jax.training.conversations import Conversation, read_conversations, read_prompts, write_conversations
from spec_jax.training.draft import draft_vocabulary
from spec_jax.training.features import FeatureFile, Text, make_texts
from spec_jax.training.new_head import new_head
from spec_jax.training.objective import Batch, SharedWeights, unrolled_loss
from spec_jax.training.packing import batches, load
from spec_jax.training.train import TrainConfig, train
from tests.conftest import TINY, write_model_folder

DEEP = replace(TINY, num_layers=6)
IDS = np.array([0, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47])
RNG = np.random.default_rng(0)
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def target() -> Decoder:
    return Decoder(random_weights(seed=1, dtype=jnp.float32), DEEP)


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory, target):
    return write_model_folder(tmp_path_factory.mktemp("models") / "deep", target)


def shared_weights(target) -> SharedWeights:
    places = np.full(TINY.vocab_size, -1, np.int32)
    places[IDS] = np.arange(len(IDS))
    return SharedWeights(target.embedding[...], target.head[...][IDS], jnp.asarray(places))


def rows_of(count, start=0):
    positions = start + jnp.arange(count)[None]
    return Rows(positions, jnp.arange(1, 5)[None], jnp.ones_like(positions, bool))


def features_of(target, tokens, captured):
    cache = create_cache(abstract_cache(DEEP, 5, 16, jnp.float32))
    hidden, features, _ = target.with_features(jnp.asarray([tokens]), rows_of(len(tokens)), cache, captured)
    return np.asarray(hidden[0]), np.asarray(features[0])


def batch_of(target, texts, captured, room=32) -> Batch:
    """All texts side by side in one row."""
    tokens, positions, segments = (np.zeros((1, room), np.int32) for _ in range(3))
    hidden, features = np.zeros((1, room, 32), np.float32), np.zeros((1, room, 32 * len(captured)), np.float32)
    at = 0
    for number, text in enumerate(texts, 1):
        here = slice(at, at + len(text))
        tokens[0, here], positions[0, here], segments[0, here] = text, np.arange(len(text)), number
        hidden[0, here], features[0, here] = features_of(target, text, captured)
        at += len(text)
    return Batch(tokens, positions, segments, segments > 0, features, hidden)


def scores_as_it_runs(target, head, text, features, row, step):
    """What the head scores at `row` when it runs: its cache holds the true rows up to `row - step`, and from there on it
    goes on from its own outputs, the drafts being the true tokens."""
    cache = create_cache(abstract_cache(DEEP, 5, 16, jnp.float32, head=head.config)).draft
    text = jnp.asarray([text])
    true = row - step + 1
    hidden, cache = head(
        head.fuse(features[None, :true]), head.embed(target, text[:, 1 : true + 1]), rows_of(true), cache
    )  # fmt: skip
    hidden = hidden[:, -1:]
    for at in range(true, row + 1):
        hidden, cache = head(hidden, head.embed(target, text[:, at + 1 : at + 2]), rows_of(1, at), cache)
    return np.asarray(head.logits(target, hidden)[0, 0], np.float64)


@pytest.mark.parametrize("variant", [{}, {"norm_output": True, "norm_before_residual": True}])
def test_the_loss_is_that_of_the_head_as_it_runs(target, variant):
    config = replace(EagleConfig.for_target(DEEP, len(IDS)), **variant)
    head = create_head(random_weights(seed=3, dtype=jnp.float32), config)
    head.target_ids[...] = jnp.asarray(IDS, jnp.int32)
    texts = [RNG.choice(IDS, 5).tolist(), RNG.integers(3, 60, 7).tolist()]
    steps, decay = 3, 0.8
    found, (agreements, losses) = unrolled_loss(
        head, shared_weights(target), batch_of(target, texts, config.captured), steps, decay
    )
    total = 0.0
    for step in range(steps):
        terms, agree, measured = [], 0, 0
        for text in texts:
            hidden, features = features_of(target, text, config.captured)
            wanted = hidden.astype(np.float64) @ np.asarray(target.head[...][IDS], np.float64).T
            for row in range(step, len(text) - 2):
                measured += 1
                if text[row + 2] not in IDS:
                    continue
                q = scores_as_it_runs(target, head, text, features, row, step)
                p = np.exp(wanted[row + 1] - wanted[row + 1].max())
                terms.append(-np.sum(p / p.sum() * (q - q.max() - np.log(np.exp(q - q.max()).sum()))))
                agree += np.argmax(q) == np.argmax(wanted[row + 1])
        assert losses[step] == pytest.approx(np.mean(terms), rel=1e-4)
        assert agreements[step] == pytest.approx(agree / measured, abs=1e-6)
        total += decay**step * np.mean(terms)
    assert found == pytest.approx(total, rel=1e-4)


def test_texts_hold_every_conversation_once_and_some_stand_alone():
    said = [Conversation(i, [i] * 3, [100 + i] * 2) for i in range(16)]
    texts = make_texts(said, 12)
    tokens = sorted(token for text in texts for token in text.tokens)
    assert tokens == sorted(token for c in said for token in c.prompt + c.answer)
    assert sum(len(text.tokens) == 5 for text in texts) >= 8
    assert any(len(text.tokens) == 10 for text in texts)
    for text in texts:
        assert text.is_answer == [token >= 100 for token in text.tokens]


def test_an_epoch_holds_every_text_once_in_an_order_of_its_own():
    texts = [Text([1] * size, [True] * size) for size in RNG.integers(3, 20, 40)]
    epochs = [list(batches(texts, range(40), 1, 20, order)) for order in (0, 0, 1)]
    for epoch in epochs:
        assert sorted(i for batch in epoch for row in batch for i in row) == list(range(40))
        assert all(sum(len(texts[i].tokens) for i in row) <= 20 for batch in epoch for row in batch)
    assert epochs[0] == epochs[1] != epochs[2]


def test_the_draft_vocabulary_is_what_answers_say_most_and_the_end():
    said = [Conversation(0, [200] * 9, [7, 7, 7, 9, 9, 50])]
    assert draft_vocabulary(said, TINY, 4).tolist() == [2, 7, 9, 50]
    assert draft_vocabulary(said, TINY, 6).tolist() == [0, 1, 2, 7, 9, 50]


def test_stored_hidden_states_are_the_targets_and_go_on_after_a_kill(target, tmp_path):
    config = EagleConfig.for_target(DEEP, len(IDS))
    texts = [Text(tokens := RNG.integers(3, 200, size).tolist(), [True] * len(tokens)) for size in (5, 9, 30)]
    file = FeatureFile(tmp_path / "features.bin", texts, config)
    list(file.fill(target, config))
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-1000])  # killed while the last text was written
    list(file.fill(target, config))
    assert file.path.read_bytes() == whole
    batch = load(file, texts, [[2], [0, 1]], 2, 32)
    for row, place, text in ((0, slice(0, 30), texts[2]), (1, slice(5, 14), texts[1])):
        hidden, features = features_of(target, text.tokens, config.captured)
        assert np.abs(batch.features[row, place].astype(np.float32) - features).max() < 0.02
        assert np.abs(batch.hidden[row, place].astype(np.float32) - hidden).max() < 0.02
        assert batch.tokens[row, place].tolist() == text.tokens


def trained(target, folder, num_steps, stop_after=None, dtype="float32"):
    """Weights after training; with `stop_after`, of a run that ended there and of one that went on from it."""
    config = EagleConfig.for_target(DEEP, len(IDS))
    rng = np.random.default_rng(7)
    texts = [Text(tokens := rng.choice(IDS, size).tolist(), [True] * len(tokens)) for size in rng.integers(5, 30, 30)]
    file = FeatureFile(folder / "features.bin", texts, config)
    list(file.fill(target, config))
    settings = TrainConfig(
        num_steps=num_steps, num_unrolled=2, row_tokens=32, warmup_steps=2, steps_per_checkpoint=2, dtype=dtype
    )  # fmt: skip
    shared = shared_weights(target)
    shared = SharedWeights(shared.embedding.astype(dtype), shared.output.astype(dtype), shared.places)
    for limit in [stop_after, None] if stop_after else [None]:
        head = new_head(target, config, IDS, seed=0)
        seen = []
        for progress in train(head, shared, file, texts, [0, 1], settings, folder / "checkpoints"):
            seen.append(progress)
            if progress.step == limit:
                break
    return jax.tree.leaves(nnx.state(head)), seen


def test_a_run_that_was_killed_goes_on_exactly(target, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    straight, seen = trained(target, tmp_path / "a", 8)
    resumed, seen_again = trained(target, tmp_path / "b", 8, stop_after=4)
    for a, b in zip(straight, resumed, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [p[:5] for p in seen[2:]] == [p[:5] for p in seen_again]
    assert seen[-1].num_tokens > seen[0].num_tokens


def test_passes_in_bfloat16_train_weights_in_float32(target, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (exact, seen), (rounded, seen_rounded) = (
        trained(target, tmp_path / name, 8, dtype=dtype) for name, dtype in (("a", "float32"), ("b", "bfloat16"))
    )
    assert [x.dtype for x in rounded] == [x.dtype for x in exact]
    assert any(np.any(a != b) for a, b in zip(exact, rounded, strict=True))
    assert [p.loss for p in seen_rounded] == pytest.approx([p.loss for p in seen], rel=0.02)


@pytest.fixture(scope="module")
def asked_llm(deep_folder):
    return LLM(str(deep_folder), draft="none", dtype="float32", max_num_seqs=2, max_model_len=128)


@pytest.mark.parametrize("prompts", [None, [f"say {i}" for i in range(20)]])
def test_conversations_go_on_after_a_kill_with_the_same_result(asked_llm, tmp_path, prompts):
    def write(path, number):
        return list(write_conversations(asked_llm, path, number, prompts, max_user_tokens=6, max_answer_tokens=8))

    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert write(whole, 18) == [8, 16, 18]
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:11]) + lines[11][:20])  # in the middle of the second batch
    write(cut, 18)
    assert cut.read_text() == whole.read_text()
    assert write(cut, 18) == []
    said = read_conversations(whole)
    assert len({c.index for c in said}) == len(said) > 12
    for c in said[::5]:
        temperature = (0.0, 0.7, 0.0, 1.0)[c.index % 4]
        if temperature == 0.0:
            [out] = asked_llm.generate([c.prompt], SamplingParams(max_tokens=8))
            assert list(out.token_ids) == c.answer


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.txt", "one\n\ntwo\n", ["one", "two"]),
        ("p.jsonl", '{"prompt": "one"}\n{"turns": ["two", "three"]}\n', ["one", "two"]),
    ],
)
def test_prompts_are_read_from_text_and_jsonl(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == expected


@pytest.mark.parametrize("line", ['{"text": "x"}', "[]", "{", '{"prompt": 3}', '{"turns": []}'])
def test_a_line_without_a_prompt_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(UserError, match="line 2"):
        read_prompts(path)


def test_a_head_trained_from_nothing_speeds_up_its_target_and_changes_no_text(deep_folder, tmp_path):
    options = {"num_conversations": 60, "max_user_tokens": 8, "max_answer_tokens": 24, "row_tokens": 64}
    output = train_draft(
        model=str(deep_folder), output=tmp_path / "head", num_steps=120, draft_vocab_size=128, num_unrolled=2,
        max_num_seqs=8, dtype="float32", learning_rate=3e-3, **options,
    )  # fmt: skip
    history = [json.loads(line) for line in (output / "work" / "progress.jsonl").read_text().splitlines()]
    assert history[-1]["acceptance_length"] > history[0]["acceptance_length"]
    llm = LLM(str(deep_folder), draft=f"eagle:{output}", dtype="float32", max_num_seqs=1)
    plain = llm.with_draft("none")
    params = [SamplingParams(max_tokens=40, seed=i, temperature=0.7 * (i % 2), ignore_eos=True) for i in range(4)]
    prompts = ["tell me", "a", "why is it", "count to ten"]
    drafted, without = llm.generate(prompts, params), plain.generate(prompts, params)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in without]
    assert sum(out.stats.accepted for out in drafted) > 0


@pytest.mark.slow
def test_training_on_a_mesh_gives_the_same_head(tmp_path):
    even = replace(DEEP, vocab_size=260)
    target_folder = write_model_folder(tmp_path / "model", Decoder(random_weights(seed=1, dtype=jnp.float32), even))
    options = {
        "num_conversations": 50, "num_steps": 4, "max_user_tokens": 6, "max_answer_tokens": 8, "row_tokens": 32,
        "draft_vocab_size": 32, "dtype": "float32", "max_num_seqs": 4,
    }  # fmt: skip
    heads = []
    for size in (1, 2):
        folder = train_draft(
            model=str(target_folder), output=tmp_path / str(size), tensor_parallel_size=size, **options
        )
        heads.append((folder / "work" / "progress.jsonl").read_text())
    one, two = (json.loads(text.splitlines()[-1]) for text in heads)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_steps": 0}, {"batch_rows": 0}, {"num_unrolled": -1}, {"row_tokens": 3}, {"learning_rate": float("nan")},
        {"learning_rate": 0}, {"num_conversations": 0},
    ],
)  # fmt: skip
def test_values_that_cannot_be_used_are_refused_by_name(deep_folder, tmp_path, wrong):
    [name] = wrong
    with pytest.raises(UserError, match=name):
        train_draft(model=str(deep_folder), output=tmp_path / "head", **wrong)


def test_a_target_with_too_few_layers_and_a_vocabulary_too_large_are_refused():
    with pytest.raises(UserError, match="has 2 layers"):
        EagleConfig.for_target(TINY, 32)
    with pytest.raises(UserError, match="allowed are 1 to 259"):
        EagleConfig.for_target(DEEP, 260)


def test_the_models_own_chat_prefix_ends_where_a_user_would_write(deep_folder):
    tokenizer = open_model(str(deep_folder)).tokenizer
    assert tokenizer.decode(tokenizer.user_prefix(), skip_special_tokens=False) == "<|im_start|>user\n"


def test_a_folder_that_was_begun_otherwise_is_refused_with_both_values(deep_folder, tmp_path):
    options = {
        "model": str(deep_folder), "output": tmp_path, "num_conversations": 50, "max_answer_tokens": 4,
        "max_user_tokens": 4, "num_steps": 1, "draft_vocab_size": 16, "max_num_seqs": 8,
    }  # fmt: skip
    train_draft(**options)
    with pytest.raises(UserError, match="begun with row_tokens 1024, not 512"):
        train_draft(**options, row_tokens=512)
    (tmp_path / "model.safetensors").unlink()
    train_draft(**options)  # nothing is left to be done but the file
    assert (tmp_path / "model.safetensors").exists()


def test_training_goes_on_from_a_head_where_that_one_stood(deep_folder, tmp_path):
    options = {
        "model": str(deep_folder), "num_conversations": 50, "max_answer_tokens": 12, "max_user_tokens": 6,
        "max_num_seqs": 8, "dtype": "float32", "row_tokens": 64, "num_unrolled": 2, "learning_rate": 3e-3,
    }  # fmt: skip
    first = train_draft(output=tmp_path / "first", num_steps=100, draft_vocab_size=64, **options)
    again = train_draft(output=tmp_path / "again", num_steps=1, initial_head=first, **options)
    before, after = (
        json.loads((folder / "work" / "progress.jsonl").read_text().splitlines()[-1]) for folder in (first, again)
    )
    assert after["agreement"] == pytest.approx(before["agreement"], abs=0.03)  # the file is bfloat16
    heads = [load_file(folder / FILE) for folder in (first, again)]
    np.testing.assert_array_equal(heads[0]["d2t"], heads[1]["d2t"])
    assert len(heads[1]["d2t"]) == 64
    with pytest.raises(UserError, match=r"draft_vocab_size is 32, and .*first has 64: allowed are 64 to 259"):
        train_draft(output=tmp_path / "other", num_steps=1, initial_head=first, draft_vocab_size=32, **options)
    still = options | {"learning_rate": 1e-12, "num_steps": 1}
    larger = load_file(train_draft(output=tmp_path / "l", initial_head=first, draft_vocab_size=96, **still) / FILE)
    ids, known = (file["d2t"] + np.arange(len(file["d2t"])) for file in (larger, heads[0]))
    assert len(ids) == 96
    assert set(known) < set(ids)
    own = load_file(deep_folder / FILE)["lm_head.weight"].astype(larger["lm_head.weight"].dtype)
    own[known] = heads[0]["lm_head.weight"]  # what the head learned stays, the target gives the rest
    np.testing.assert_array_equal(larger["lm_head.weight"], own[ids])
    for name in set(larger) - {"lm_head.weight", "d2t", "t2d"}:
        np.testing.assert_array_equal(larger[name], heads[0][name])
    with pytest.raises(UserError, match=r"begun with initial_head .*first"):
        train_draft(output=tmp_path / "again", num_steps=1, draft_vocab_size=64, **options)
