"""Sampling against float64 NumPy with a full sort, and its distribution against the exact probabilities."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.sampling import SamplingState, gumbel, process, sample


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
