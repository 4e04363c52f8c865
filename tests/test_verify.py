"""`spec-jax verify` passes on the engine as it is, and fails on every way we could think of to break the verifier."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import LLM, SamplingParams, UserError, decode_loop
from spec_jax.cli import main
from spec_jax.verify import CONTEXTS, Check, check_distribution, check_identity, exact_probabilities, run_checks, verify
from tests.reference import ReferenceModel

SAMPLES = 400


@pytest.fixture(scope="module")
def plain(tiny_folder):
    return LLM(str(tiny_folder), draft="none", dtype="float32", max_model_len=256, max_num_seqs=4)


def accept_always(right):
    return lambda targets, drafts, num_drafts: num_drafts


def keep_the_drafts_own_sample(right):
    """Where the first draft is rejected, it is emitted all the same."""

    def verify(model, cache, state, drafts, num_drafts, *rest):
        cache, targets, logprobs = right(model, cache, state, drafts, num_drafts, *rest)
        if drafts.shape[1] == 0:
            return cache, targets, logprobs
        first = jnp.where(num_drafts > 0, drafts[:, 0], targets[:, 0])
        return cache, targets.at[:, 0].set(first), logprobs

    return verify


def read_the_row_before(right):
    def verify(*arguments):
        cache, targets, logprobs = right(*arguments)
        return cache, jnp.concatenate([targets[:, :1], targets[:, :-1]], axis=1), logprobs

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


@pytest.mark.parametrize("fault", FAULTS)
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
