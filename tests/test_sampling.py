"""Sampling against float64 NumPy with a full sort, and its distribution against the exact probabilities."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import sampling
from spec_jax.sampling import SamplingState, gumbel

process, sample = jax.jit(sampling.process), jax.jit(sampling.sample)


def params(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, seed=0, slots=1) -> SamplingState:
    def full(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (slots,))

    seeds = np.broadcast_to(np.asarray(seed, np.uint64), (slots,))
    return SamplingState(
        temperature=full(temperature, jnp.float32),
        top_k=full(top_k, jnp.int32),
        top_p=full(top_p, jnp.float32),
        min_p=full(min_p, jnp.float32),
        typical_p=full(typical_p, jnp.float32),
        seed=jnp.array(np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], -1).astype(np.uint32)),
    )


def kept_by_sorting(logits, temperature, top_k, top_p, min_p):
    """Which tokens survive, in float64, with the whole vocabulary sorted."""
    scores = logits.astype(np.float64) / temperature
    kept = np.exp(scores - scores.max()) >= min_p
    if top_k:
        ranked = np.sort(scores[kept])[::-1]
        kept &= scores >= ranked[min(top_k, len(ranked)) - 1]
    probabilities = np.where(kept, np.exp(scores - scores.max()), 0)
    probabilities /= probabilities.sum()
    if top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        last = order[np.flatnonzero(before < top_p)[-1]]
        kept &= probabilities >= probabilities[last]
    return kept


@pytest.mark.parametrize("vocab", [40, 500])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_same_tokens_are_cut_as_by_sorting(vocab, spread):
    """Every combination has a slot of its own, so that each is also tested beside all the others."""
    combinations = list(
        itertools.product([0, 1, 5, 64, 65, 200, 10_000], [1.0, 0.9, 0.5, 1e-6], [0.0, 0.05], [0.7, 1.3])
    )
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(len(combinations), 2, vocab)) * spread).astype(np.float32)
    top_k, top_p, min_p, temperature = (np.array(column) for column in zip(*combinations, strict=True))
    out = np.asarray(process(jnp.array(logits), params(temperature, top_k, top_p, min_p, slots=len(combinations))))
    for slot, (k, p, m, t) in enumerate(combinations):
        for row in range(2):
            expected = kept_by_sorting(logits[slot, row], t, k, p, m)
            np.testing.assert_array_equal(np.isfinite(out[slot, row]), expected, err_msg=f"{k=} {p=} {m=} {t=}")
            relative = (logits[slot, row] - logits[slot, row].max()).astype(np.float64) / t
            np.testing.assert_allclose(out[slot, row][expected], relative[expected], rtol=1e-6)


def kept_by_typicality(logits, temperature, top_k, top_p, min_p, typical_p):
    """The locally typical set (arXiv 2202.00666) of what the other cuts leave: tokens in the order of how far their
    information is from the entropy, as few of them as it takes for their probabilities to reach `typical_p`."""
    kept = kept_by_sorting(logits, temperature, top_k, top_p, min_p)
    if typical_p == 1:
        return kept
    left = np.flatnonzero(kept)
    scores = logits[left].astype(np.float64) / temperature
    information = np.log(np.exp(scores - scores.max()).sum()) - (scores - scores.max())
    probabilities = np.exp(-information)
    distance = np.abs(information - (probabilities * information).sum())
    order = np.argsort(distance, kind="stable")
    count = 1 + np.argmax(np.cumsum(probabilities[order]) >= typical_p)
    typical = np.zeros_like(kept)
    typical[left[order[:count]]] = True
    return typical


@pytest.mark.parametrize("vocab", [40, 500])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_same_tokens_are_untypical_as_by_sorting(vocab, spread):
    """Alone and behind every other cut, at several temperatures, beside slots that want none of it."""
    combinations = list(
        itertools.product([0.02, 0.5, 0.95, 1.0], [0, 7, 100], [1.0, 0.9], [0.0, 0.05], [0.2, 0.7, 1.3])
    )
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(len(combinations), 2, vocab)) * spread).astype(np.float32)
    typical_p, top_k, top_p, min_p, temperature = (np.array(column) for column in zip(*combinations, strict=True))
    mixed = params(temperature, top_k, top_p, min_p, typical_p, slots=len(combinations))
    out = np.asarray(process(jnp.array(logits), mixed))
    for slot, (typical, k, p, m, t) in enumerate(combinations):
        for row in range(2):
            expected = kept_by_typicality(logits[slot, row], t, k, p, m, typical)
            np.testing.assert_array_equal(
                np.isfinite(out[slot, row]), expected, err_msg=f"{typical=} {k=} {p=} {m=} {t=}"
            )
            relative = (logits[slot, row] - logits[slot, row].max()).astype(np.float64) / t
            np.testing.assert_allclose(out[slot, row][expected], relative[expected], rtol=1e-6)


TYPICAL = json.loads((Path(__file__).parent / "fixtures" / "typical.json").read_text())


@pytest.mark.parametrize("case", TYPICAL, ids=[f"{len(case['logits'])}-{case['top_k']}" for case in TYPICAL])
def test_typical_tokens_are_those_of_transformers(case):
    masses = [float(mass) for mass in case["kept"]]
    logits = jnp.tile(jnp.array(case["logits"], jnp.float32), (len(masses), 1, 1))
    out = process(logits, params(top_k=case["top_k"], typical_p=masses, slots=len(masses)))
    assert [np.flatnonzero(np.isfinite(row[0])).tolist() for row in out] == list(case["kept"].values())


def test_the_best_token_can_be_untypical():
    """The entropy is 1.61, and the information of the tokens 0.92, 1.61 and four times 2.30."""
    logits = jnp.log(jnp.array([[[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]]]))
    assert np.isfinite(process(logits, params(typical_p=0.15))[0, 0]).tolist() == [False, True, *[False] * 4]


def test_equally_typical_tokens_are_all_kept():
    assert np.isfinite(process(jnp.zeros((1, 1, 50)), params(typical_p=0.1))).all()


@pytest.mark.parametrize("typical_p", [1e-320, 1e-40, 1e-30, 1e-6, 0.5, 1 - 2**-24])
def test_some_token_is_always_typical(typical_p):
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(12, 1, 400)) * np.logspace(-3, 3, 12)[:, None, None]
    logits[::3, :, :399] = -np.inf
    logits[1::3] = np.round(logits[1::3])
    out = np.asarray(process(jnp.array(logits, jnp.float32), params(typical_p=typical_p, slots=12)))
    assert np.isfinite(out).any(-1).all()
    assert not np.isnan(out).any()


@pytest.mark.parametrize("cuts", [{}, {"typical_p": 0.2}, {"top_k": 5, "top_p": 0.3, "min_p": 0.1, "typical_p": 0.9}])
@pytest.mark.parametrize("spread", [0.1, 10.0, 1e4, 1e30])
def test_the_smallest_temperature_gives_the_best_token_and_never_nan(cuts, spread):
    rng = np.random.default_rng(9)
    logits = (rng.normal(size=(8, 3, 300)) * spread).astype(np.float32)
    logits[::2, :, 1::2] = -np.inf  # forbidden tokens
    smallest = params(1e-6, **cuts, seed=np.arange(8), slots=8)
    assert not np.isnan(process(jnp.array(logits), smallest)).any()
    drawn = sample(jnp.array(logits), jnp.arange(24).reshape(8, 3), smallest)
    np.testing.assert_array_equal(drawn, logits.argmax(-1))


def test_equal_scores_at_the_edge_are_all_kept():
    logits = jnp.array([[[3.0, 2.0, 2.0, 2.0, 1.0]]])
    assert np.isfinite(process(logits, params(top_k=2))[0, 0]).tolist() == [True, True, True, True, False]


def test_min_p_of_one_keeps_the_best_and_its_equals():
    logits = jnp.array([[[3.0, 3.0, 2.9]]])
    assert np.isfinite(process(logits, params(min_p=1.0))[0, 0]).tolist() == [True, True, False]


def test_slots_with_different_parameters_do_not_disturb_each_other():
    rng = np.random.default_rng(3)
    logits = jnp.array(rng.normal(size=(4, 2, 300)) * 2, jnp.float32)
    mixed = SamplingState(
        temperature=jnp.array([0.0, 0.5, 1.0, 1.5]),
        top_k=jnp.array([0, 3, 100, 0]),
        top_p=jnp.array([1.0, 1.0, 0.8, 0.99]),
        min_p=jnp.array([0.0, 0.0, 0.0, 0.01]),
        typical_p=jnp.array([1.0, 1.0, 1.0, 0.9]),
        seed=jnp.arange(8, dtype=jnp.uint32).reshape(4, 2),
    )
    positions = jnp.array([[3, 4], [5, 6], [7, 8], [9, 10]])
    together = sample(logits, positions, mixed)
    for b in range(4):
        one = jax.tree.map(lambda x, b=b: x[b : b + 1], mixed)
        np.testing.assert_array_equal(together[b : b + 1], sample(logits[b : b + 1], positions[b : b + 1], one))
    np.testing.assert_array_equal(together[0], jnp.argmax(logits[0], -1))


def test_noise_depends_on_seed_and_position_alone():
    seeds = params(seed=[1, 1, 2**40 + 1], slots=3).seed
    noise = np.asarray(gumbel(seeds, jnp.array([[5, 6], [6, 7], [5, 6]]), 50))
    np.testing.assert_array_equal(noise[0, 1], noise[1, 0])
    assert not np.array_equal(noise[0, 0], noise[0, 1])
    assert not np.array_equal(noise[0], noise[2])  # both words of the seed count


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2)])
def test_tokens_are_drawn_with_the_exact_probabilities(top_k, top_p, min_p):
    """Chi-square over 20,000 seeds; with 7 or fewer degrees of freedom, 35 is passed by chance once in 90,000 runs."""
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=8) * 1.5).astype(np.float32)
    kept = kept_by_sorting(logits, 0.8, top_k, top_p, min_p)
    probabilities = np.where(kept, np.exp(logits.astype(np.float64) / 0.8), 0)
    probabilities /= probabilities.sum()

    n = 20_000
    draws = sample(
        jnp.broadcast_to(jnp.array(logits), (n, 1, 8)),
        jnp.full((n, 1), 17),
        params(0.8, top_k, top_p, min_p, seed=np.arange(n), slots=n),
    )
    counts = np.bincount(np.asarray(draws)[:, 0], minlength=8)
    assert not counts[~kept].any()
    expected = n * probabilities[kept]
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 35


def test_no_program_sorts_the_vocabulary():
    """XLA turns a top-k that it does not recognize into a sort of everything, 15 x slower than all the rest."""
    vocab = 4096
    rows = jax.ShapeDtypeStruct((2, 3, vocab), jnp.float32)
    arguments = params(0.8, 5, 0.9, 0.1, 0.9, slots=2)
    compiled = jax.jit(sample).lower(rows, jax.ShapeDtypeStruct((2, 3), jnp.int32), arguments).compile()
    assert " sort(" not in compiled.as_text()
    with_sort = jax.jit(lambda x: jnp.sort(x, axis=-1)).lower(rows).compile()
    assert " sort(" in with_sort.as_text()  # this is how one would look
