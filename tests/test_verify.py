"""`spec-jax verify` passes on the engine as it is, and fails on every way we could think of to break the verifier."""

from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_jax import LLM, SamplingParams, UserError, decode_loop
from spec_jax.cli import main
from spec_jax.verify import (
    CONTEXTS,
    Check,
    _likelihood,
    check_distribution,
    check_identity,
    exact_probabilities,
    run_checks,
    verify,
)
from tests.reference import ReferenceModel

SAMPLES = 300


@pytest.fixture(scope="module")
def plain(tiny_folder):
    return LLM(str(tiny_folder), draft="none", dtype="float32", max_model_len=256, max_num_seqs=4)


def accept_always(right):
    return lambda targets, drafts, num_drafts: num_drafts


def keep_the_drafts_own_sample(right):
    """Where the first draft is rejected, it is emitted all the same."""

    def verify(model, cache, state, drafts, num_drafts, *rest):
        cache, checked = right(model, cache, state, drafts, num_drafts, *rest)
        if drafts.shape[1] == 0:
            return cache, checked
        first = jnp.where(num_drafts > 0, drafts[:, 0], checked.targets[:, 0])
        return cache, checked._replace(targets=checked.targets.at[:, 0].set(first))

    return verify


def read_the_row_before(right):
    def verify(*arguments):
        cache, checked = right(*arguments)
        shifted = jnp.concatenate([checked.targets[:, :1], checked.targets[:, :-1]], axis=1)
        return cache, checked._replace(targets=shifted)

    return verify


def ignore_drafts_in_penalties(right):
    def process_logits(logits, text, *rest):
        return right(logits, text._replace(rows=jnp.full_like(text.rows, -1)), *rest)

    return process_logits


def reuse_noise_between_positions(right):
    return lambda logits, positions, params: right(logits, jnp.zeros_like(positions), params)


FAULTS = {
    "accept_always": ("accept", accept_always),
    "keep_the_drafts_own_sample": ("verify", keep_the_drafts_own_sample),
    "read_the_row_before": ("verify", read_the_row_before),
    "ignore_drafts_in_penalties": ("process_logits", ignore_drafts_in_penalties),
    "reuse_noise_between_positions": ("sample", reuse_noise_between_positions),
}


SLOW = ("ignore_drafts_in_penalties", "reuse_noise_between_positions")


@pytest.mark.parametrize("fault", [pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in FAULTS])
def test_a_broken_verifier_is_found(plain, monkeypatch, fault):
    name, breaks = FAULTS[fault]
    monkeypatch.setattr(decode_loop, name, breaks(getattr(decode_loop, name)))
    both = plain.with_draft("none"), plain.with_draft("ngram", 4)  # the fault is in both of them, as it would be
    assert not all(check.holds for check in run_checks(*both, SAMPLES))


def test_the_engine_as_it_is_passes(tiny_folder, capsys):
    assert verify(model=str(tiny_folder), draft="ngram", samples=SAMPLES)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "lossless: yes"
    assert all(line.startswith("ok") for line in lines[:-1])


def test_the_command_ends_with_1_where_text_is_lost(tiny_folder, monkeypatch, capsys):
    checks = iter([Check("greedy", True, "fine"), Check("seeded", False, "not fine"), Check("last", True, "fine")])
    monkeypatch.setattr("spec_jax.verify.run_checks", lambda *_, **__: checks)
    with pytest.raises(SystemExit) as error:
        main(["verify", "--model", str(tiny_folder), "--draft", "ngram", "--samples", "100"])
    assert error.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1] == "lossless: NO"


def test_exact_probabilities_are_those_of_a_float64_model(plain, tiny_decoder):
    """All runs of two tokens with top-k 3 and a penalty, from the logits of the float64 reference."""
    reference, context = ReferenceModel(tiny_decoder), plain.tokenizer.encode(CONTEXTS[0])

    def best(text, output):
        scores = reference.logits(text)[-1].copy()
        for token in output:
            scores[token] -= 0.7
        order = np.argsort(-scores)[:3]
        return dict(zip(order.tolist(), np.exp(scores[order]) / np.exp(scores[order]).sum(), strict=True))

    expected = {(a, b): p * q for a, p in best(context, []).items() for b, q in best([*context, a], [a]).items()}
    found = exact_probabilities(plain, context, 2, SamplingParams(top_k=3, frequency_penalty=0.7))
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "none"}, "has nothing to verify"),
        ({"num_draft_tokens": 0}, "has nothing to verify"),
        ({"samples": 10}, "samples is 10"),
        ({"draft": "magic"}, "draft 'magic' is unknown"),
    ],
)
def test_what_would_prove_nothing_is_refused(tiny_folder, options, message):
    with pytest.raises(UserError, match=message):
        verify(**({"model": str(tiny_folder)} | options))


def test_a_check_without_drafts_does_not_hold(plain):
    params = SamplingParams(max_tokens=1)
    assert not check_identity("short", plain, plain, params, True).holds
    assert not check_distribution(plain, plain, CONTEXTS[0], 1, replace(params, temperature=1.0), 100).holds


@pytest.mark.parametrize(
    ("exact", "seen"),
    [
        ([0.5, 0.3, 0.2], [210, 110, 80]),
        ([0.5, 0.3, 0.2], [260, 80, 60]),
        ([0.9, 0.05, 0.02], [360, 22, 10, 8]),
        ([0.9995], [400]),
        ([0.99999994], [400]),
        ([0.995], [396, 4]),
        ([0.6, 0.39], [0, 0, 400]),
    ],
)
def test_the_likelihood_is_that_of_scipys_tests(exact, seen):
    """The last of `seen` is what none of the exact runs is, where there are more of them."""
    total, often = sum(seen), sum(seen[: len(exact)])
    rest = max(1 - sum(exact), 1e-4)
    tails = stats.binom.sf(total - often - 1, total, rest), stats.binom.cdf(total - often, total, rest)
    binomial = min(1, 2 * min(tails)) if 1 - sum(exact) > 1e-4 else tails[0]
    chi_square = 1.0
    if len(exact) > 1 and often:
        chi_square = stats.chisquare(seen[: len(exact)], np.array(exact) / sum(exact) * often).pvalue
    counts = Counter({(i,): n for i, n in enumerate(seen)})
    likelihood, _ = _likelihood({(i,): p for i, p in enumerate(exact)}, counts, total)
    assert likelihood == pytest.approx(min(binomial, chi_square), rel=1e-3, abs=1e-12)


def test_too_few_samples_for_any_run_show_nothing():
    assert _likelihood({(i,): 1 / 64 for i in range(64)}, Counter({(1,): 100}), 100)[0] == 0


def test_a_repeated_token_lifted_by_a_penalty_below_zero_is_among_the_exact_runs(plain, tiny_decoder):
    """A token that was sampled may come back though the model puts it behind twenty others."""
    context = plain.tokenizer.encode(CONTEXTS[1])
    runs = exact_probabilities(plain, context, 2, SamplingParams(top_k=3, frequency_penalty=-2.0))
    reference = ReferenceModel(tiny_decoder)
    for first in {run[0] for run in runs}:
        scores = reference.logits([*context, first])[-1].copy()
        scores[first] += 2.0
        assert {run[1] for run in runs if run[0] == first} == set(np.argsort(-scores)[:3].tolist())
