"""EAGLE heads against float64 NumPy: in one pass and in many, with each variant, and where they draft by themselves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.cache import abstract_cache, create_cache
from spec_jax.checkpoints.weights import checkpoint_weights
from spec_jax.config import DraftConfig, EagleConfig
from spec_jax.drafting import propose_eagle
from spec_jax.models.decoder import Decoder, Rows
from spec_jax.models.eagle import EagleHead, create_head, run_target
from spec_jax.prefill import prefill_chunk
from spec_jax.sampling import SamplingState, gumbel
from tests.conftest import TINY
from tests.eagle_reference import ReferenceHead, random_tensors, run_head
from tests.reference import ReferenceModel

LAYER = replace(TINY, num_layers=1, ffn_size=40, rope_theta=500.0)
EAGLE3 = EagleConfig(version=3, layer=LAYER, target_hidden_size=32, draft_vocab_size=259, captured=(0, 1, 2))
EAGLE1 = EagleConfig(version=1, layer=LAYER, target_hidden_size=32, draft_vocab_size=259)
NARROW = replace(LAYER, hidden_size=24, num_heads=6, num_kv_heads=3, head_dim=4)
VARIANTS = {
    "EAGLE-3": EAGLE3,
    "norm before residual": replace(EAGLE3, norm_before_residual=True),
    "norm before fc": replace(EAGLE3, norm_before_fc=True),
    "norm of each layer": replace(EAGLE3, fc_norm=True),
    "norm of the output": replace(EAGLE3, norm_output=True),
    "bias": replace(EAGLE3, fc_bias=True),
    "own embedding": replace(EAGLE3, has_embedding=True),
    "two layers": replace(EAGLE3, layer=replace(LAYER, num_layers=2)),
    "another width": replace(EAGLE3, layer=NARROW, has_embedding=True),
    "draft vocabulary": replace(EAGLE3, draft_vocab_size=100, has_target_ids=True),
    "other layers": replace(EAGLE3, captured=(2, 0)),
    "all at once": EagleConfig(
        version=3, layer=replace(NARROW, num_layers=3), target_hidden_size=32, draft_vocab_size=100, captured=(1, 2),
        has_embedding=True, has_target_ids=True, fc_bias=True, fc_norm=True, norm_before_fc=True,
        norm_before_residual=True, norm_output=True,
    ),
    "EAGLE-1": EAGLE1,
    "EAGLE-1 with bias": replace(EAGLE1, fc_bias=True),
    "EAGLE-1 of two layers": replace(EAGLE1, layer=replace(LAYER, num_layers=2), has_embedding=True),
}  # fmt: skip
TEXT = [5, 40, 41, 42, 7, 7, 40, 41, 200, 3, 258, 17, 40, 41, 42, 9, 9, 9, 130, 131, 0, 250, 61]
LENGTHS = (23, 2, 9)  # of the texts that drafts go on from, all of them beginnings of TEXT
QUICK = ("EAGLE-3", "norm of the output", "draft vocabulary", "all at once", "EAGLE-1", "EAGLE-1 of two layers")
all_variants = pytest.mark.parametrize("name", VARIANTS)


class InMemory:
    """Tensors of a head as a checkpoint reader."""

    def __init__(self, config: EagleConfig, tensors: dict[str, np.ndarray]):
        self.config, self._tensors = config.layer, tensors

    def tensor(self, name: str, dtype: np.dtype) -> np.ndarray:
        return self._tensors[name.removeprefix("model.")].astype(dtype)

    def kv_scale(self, layer: int, kind: str) -> None:
        return None


def create_both(name: str, target: Decoder) -> tuple[EagleHead, ReferenceHead]:
    config = VARIANTS[name]
    tensors = random_tensors(config)
    reference = ReferenceHead(config, tensors, np.asarray(target.embedding[...]), np.asarray(target.head[...]))
    weights = checkpoint_weights(InMemory(config, tensors), "float32")

    def source(path, shape, axes):
        if path == "target_ids":
            return jnp.asarray(reference.target_ids, jnp.int32)
        return weights(path, shape, axes)

    return create_head(source, config), reference


def true_features(reference: ReferenceHead, target: Decoder, text: list[int]) -> np.ndarray:
    """What the target gives a head over `text`."""
    model, config = ReferenceModel(target), reference.config
    if config.version == 1:
        return model.normed(text)
    states = model.states(text)
    return np.concatenate([states[i] for i in config.captured], axis=-1)


@all_variants
def test_outputs_and_scores_are_those_of_the_formulas_however_the_text_is_cut(name, tiny_decoder):
    head, reference = create_both(name, tiny_decoder)
    features = np.random.default_rng(4).normal(size=(len(TEXT), reference.config.feature_size))
    outputs = reference.run(reference.fuse(features), TEXT)
    scores = reference.scores(outputs)
    found = run_head(head, tiny_decoder, features, TEXT, [], [7], [1] * 22, [4, 8, 5])
    for i, (ours, expected) in enumerate(zip(found, [outputs, scores] * 4, strict=True)):
        np.testing.assert_allclose(ours, expected, atol=1e-4, err_msg=f"{i}")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("norm before residual", {"norm_before_residual": False}),
        ("norm of the output", {"norm_output": False}),
        ("EAGLE-3", {"norm_before_residual": True}),
        ("EAGLE-3", {"norm_output": True}),
        ("EAGLE-3", {"layer": replace(LAYER, rope_theta=10_000.0)}),
    ],
)
def test_the_reference_tells_when_a_part_is_another(name, change, tiny_decoder):
    head, reference = create_both(name, tiny_decoder)
    features = np.random.default_rng(4).normal(size=(len(TEXT), reference.config.feature_size))
    reference.config = replace(reference.config, **change)
    outputs, _ = run_head(head, tiny_decoder, features, TEXT)
    assert np.abs(outputs - reference.run(reference.fuse(features), TEXT)).max() > 0.01


@pytest.mark.parametrize("name", ["EAGLE-3", "other layers", "EAGLE-1"])
def test_features_are_the_inputs_of_the_captured_layers(name, tiny_decoder):
    head, reference = create_both(name, tiny_decoder)
    cache = create_cache(abstract_cache(TINY, 9, 4, "float32"))
    rows = Rows(jnp.arange(len(TEXT))[None], jnp.arange(1, 9)[None], jnp.ones((1, len(TEXT)), bool))
    hidden, features, _ = run_target(tiny_decoder, head, jnp.asarray([TEXT]), rows, cache)
    np.testing.assert_allclose(features[0], true_features(reference, tiny_decoder, TEXT), atol=1e-4)
    np.testing.assert_allclose(hidden[0], ReferenceModel(tiny_decoder).normed(TEXT), atol=1e-4)


def greedy(count: int, temperature: float = 0.0) -> SamplingState:
    return SamplingState(
        temperature=jnp.full(count, temperature), top_k=jnp.zeros(count, jnp.int32), top_p=jnp.ones(count),
        min_p=jnp.zeros(count), typical_p=jnp.ones(count),
        seed=jnp.stack([jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype=jnp.uint32)], axis=1),
    )  # fmt: skip


def prefilled(head: EagleHead, target: Decoder, padding: int = 32):
    """The beginnings of TEXT in slots of their own: the cache, their block tables, and the head's last outputs."""
    cache = create_cache(abstract_cache(TINY, 1 + 8 * len(LENGTHS), 4, "float32", head=head.config))
    tables = np.arange(1, 1 + 8 * len(LENGTHS)).reshape(len(LENGTHS), 8)[:, ::-1].astype(np.int32)
    text = np.array([*TEXT, *[0] * (padding + 1 - len(TEXT))], np.int32)
    prefill = jax.jit(lambda cache, n, table: prefill_chunk(target, cache, text[:-1], text[1:], 0, n, table, head=head))
    hidden = []
    for length, table in zip(LENGTHS, tables, strict=True):
        cache, output = prefill(cache, length - 1, table)
        hidden.append(output.draft_hidden)
    return cache, jnp.asarray(tables), jnp.stack(hidden)


def propose_counted(head, target, config, sampling, active=(True, True, True), num_rows=1):
    cache, tables, hidden = prefilled(head, target)
    run = jax.jit(
        lambda cache: propose_eagle(
            target,
            head,
            cache,
            hidden,
            jnp.asarray(LENGTHS),
            tables,
            jnp.asarray(active),
            sampling,
            config,
            num_rows,
        )
    )
    drafts, num_drafts, after = run(cache)
    return np.asarray(drafts), np.asarray(num_drafts), cache, after, tables


def propose(head, target, num_tokens, *args, **options):
    drafts, num_drafts, *rest = propose_counted(head, target, DraftConfig(num_tokens), *args, **options)
    assert set(num_drafts.tolist()) <= {0, num_tokens}
    return drafts, *rest


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        *((name, 1) for name in QUICK),
        ("EAGLE-3", 2),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in VARIANTS if name not in QUICK),
    ],
)
def test_greedy_drafts_are_those_of_the_reference_that_feeds_itself(name, num_rows, tiny_decoder):
    head, reference = create_both(name, tiny_decoder)
    drafts, *_ = propose(head, tiny_decoder, 4, greedy(3), num_rows=num_rows)
    features = true_features(reference, tiny_decoder, TEXT)
    for row, length in zip(drafts.tolist(), LENGTHS, strict=True):
        assert row == reference.draft(features[: length - 1], TEXT[:length], 4)


@pytest.mark.parametrize("name", ["EAGLE-3", "EAGLE-1"])
def test_a_chain_ends_behind_the_draft_up_to_which_the_head_is_not_sure_enough(name, tiny_decoder):
    head, reference = create_both(name, tiny_decoder)
    features = true_features(reference, tiny_decoder, TEXT)
    expected = [reference.draft_with_confidence(features[: n - 1], TEXT[:n], 4) for n in LENGTHS]
    sure = np.cumprod([best for _, best in expected], axis=1)
    for least, several in [(sure[:, 0].min() * 1.01, True), (sure[:, 1].min() * 1.01, True), (1.0, False)]:
        config = DraftConfig(4, min_confidence=float(least))
        drafts, num_drafts, before, after, tables = propose_counted(head, tiny_decoder, config, greedy(3))
        counts = [1 + int((row[:3] >= least).sum()) for row in sure]
        assert num_drafts.tolist() == counts
        assert (len(set(counts)) > 1) == several
        for row, (tokens, _), count in zip(drafts.tolist(), expected, counts, strict=True):
            assert row[:count] == tokens[:count]
        # Where all have ended, no pass ran: the cache has no entries of it.
        changed = {
            int(page)
            for old, new in zip(jax.tree.leaves(before.draft), jax.tree.leaves(after.draft), strict=True)
            for page in np.unique(np.nonzero(np.asarray(old != new))[0])
        }
        last = [n + max(counts) - 3 for n in LENGTHS]
        pages = [int(t[e // 4]) for t, n, end in zip(tables, LENGTHS, last, strict=True) for e in range(n - 1, end + 1)]
        assert changed <= {0, *pages}  # page 0 takes what nobody keeps


@pytest.mark.parametrize("name", ["draft vocabulary", "EAGLE-1"])
def test_drafts_are_drawn_with_the_noise_of_their_positions(name, tiny_decoder):
    """Of the whole vocabulary's noise, as the target's own samples are."""
    head, reference = create_both(name, tiny_decoder)
    sampling = greedy(3, temperature=1.0)
    drafts, *_ = propose(head, tiny_decoder, 4, sampling)
    features = true_features(reference, tiny_decoder, TEXT)
    for slot, length in enumerate(LENGTHS):

        def noise(position, slot=slot):
            return np.asarray(gumbel(sampling.seed[slot : slot + 1], jnp.asarray([[position]]), 259))[0, 0]

        assert drafts[slot].tolist() == reference.draft(features[: length - 1], TEXT[:length], 4, noise)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_drafting_leaves_the_entries_of_the_text_and_of_other_slots_alone(num_rows, tiny_decoder):
    head, _ = create_both("two layers", tiny_decoder)
    _, before, after, tables = propose(head, tiny_decoder, 4, greedy(3), (True, False, True), num_rows)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        for table, length, is_active in zip(tables, LENGTHS, (True, False, True), strict=True):
            old_rows, new_rows = (
                np.asarray(x[table]).transpose(0, 2, 1, 3).reshape(32, *x.shape[1:2], -1) for x in (old, new)
            )
            kept = length - 1 if is_active else 32
            np.testing.assert_array_equal(old_rows[:kept], new_rows[:kept])
    for layer in after.draft:  # three entries are new: the first draft comes from what was there
        rows = np.asarray(layer.k.values[tables[0]]).transpose(0, 2, 1, 3).reshape(32, -1)
        assert [bool(row.any()) for row in rows[20:27]] == [True] * 5 + [False] * 2
