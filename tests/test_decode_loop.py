"""The loop on a model whose every token is scripted, so that drafts, stops and limits can be forced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.cache import PagedCache
from spec_jax.config import DraftConfig
from spec_jax.decode_loop import LENGTH, RUNNING, STOPPED, BurstShape, create_state, decode_burst

V, ROOM, EOS = 50, 64, 2


class ScriptedModel:
    """After the token at position p it always wants `script[p + 1]`, whatever the drafts say."""

    def __init__(self, *scripts: list[int]):
        self.scripts = jnp.array([s + [0] * (ROOM - len(s)) for s in scripts], jnp.int32)

    def __call__(self, tokens, rows, cache):
        positions = jnp.clip(rows.positions + 1, 0, ROOM - 1)
        return jnp.take_along_axis(self.scripts, positions, axis=1)[..., None], cache

    def logits(self, wanted):
        return jax.nn.one_hot(wanted[..., 0], V)


def run(scripts, prompts, *, k=3, max_tokens=20, stop_ids=(EOS,), rounds=40, widths=None, ngram_min=1, weak=None):
    """Bursts until all slots have ended; per slot its output, its state at the end, and the output of all bursts."""
    state = create_state(len(prompts), ROOM, 4, 4, k)
    tokens = np.zeros((len(prompts), ROOM), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    stops = np.full((len(prompts), 4), -1, np.int32)
    stops[:, : len(stop_ids)] = stop_ids
    state = state._replace(
        tokens=jnp.array(tokens), prompt_length=jnp.array(lengths), length=jnp.array(lengths),
        max_length=jnp.array(lengths + max_tokens),
        active=jnp.ones(len(prompts), bool), stop_ids=jnp.array(stops),
    )  # fmt: skip
    draft = DraftConfig(num_tokens=k, ngram_min=ngram_min)
    shape = BurstShape(draft, len(prompts), 4, rounds, widths or (k + 1,), k if weak is None else weak, 1, False, False)
    no_bias = jnp.zeros((len(prompts), V), jnp.float32)
    _, state, out = decode_burst(ScriptedModel(*scripts), PagedCache(()), state, no_bias, jnp.int32(rounds), shape)
    outputs = [np.asarray(out.tokens[b, : out.num_tokens[b]]).tolist() for b in range(len(prompts))]
    return outputs, jax.tree.map(np.asarray, state)


A, B_, C = 10, 11, 12


def forced_drafts(script_after: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """The prompt makes the drafter propose [A, B_, EOS, C]; the model then says `script_after`."""
    prompt = [5, 6, A, B_, EOS, C, 9, 5, 6]
    return [prompt + script_after], [prompt]


def test_nothing_after_an_accepted_eos_is_kept():
    outputs, state = run(*forced_drafts([A, B_, EOS, C, 9]), k=4)
    assert outputs == [[A, B_, EOS]]
    assert state.finish[0] == STOPPED
    assert state.rounds[0] == 1
    assert state.accepted[0].tolist() == [1, 1, 1, 0]  # C agreed, but was not committed


def test_ignored_eos_goes_on_through_the_accepted_run():
    outputs, state = run(*forced_drafts([A, B_, EOS, C, 9, 20, 21]), k=4, stop_ids=(), max_tokens=7)
    assert outputs == [[A, B_, EOS, C, 9, 20, 21]]
    assert state.finish[0] == LENGTH
    assert state.accepted[0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("k", [0, 2, 4])
def test_max_tokens_is_met_exactly(max_tokens, k):
    outputs, state = run(*forced_drafts([A, B_, EOS, C, 9, 20, 21]), k=k, stop_ids=(), max_tokens=max_tokens)
    assert outputs == [[A, B_, EOS, C, 9][:max_tokens]]
    assert state.finish[0] == LENGTH


@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_eos_exactly_at_max_tokens_is_a_stop(k):
    outputs, state = run(*forced_drafts([A, B_, EOS, C]), k=k, max_tokens=3)
    assert outputs == [[A, B_, EOS]]
    assert state.finish[0] == STOPPED


def test_a_rejected_draft_is_replaced_by_the_targets_token():
    outputs, state = run(*forced_drafts([A, 30, 31, EOS]), k=4)
    assert outputs == [[A, 30, 31, EOS]]
    assert state.accepted[0].tolist() == [1, 0, 0, 0]


def test_slots_end_one_by_one_and_others_go_on():
    scripts = [[4, 4, EOS], [5, 5, 5, 5, 5, 5, 5], [6, 7, 8, 9, 10, 11, EOS]]
    outputs, state = run(scripts, [[4], [5], [6]], k=3, max_tokens=6)
    assert outputs == [[4, EOS], [5] * 6, [7, 8, 9, 10, 11, EOS]]
    assert state.finish.tolist() == [STOPPED, LENGTH, STOPPED]
    assert not state.active.any()


def test_a_burst_ends_after_its_rounds_and_the_next_goes_on():
    outputs, state = run([list(range(3, 40))], [[3]], k=2, rounds=4)
    assert outputs == [[4, 5, 6, 7]]
    assert state.finish[0] == RUNNING
    assert state.active[0]


def test_a_weak_match_drafts_fewer_tokens():
    prompt = [5, 9, 8, 7, 5]  # only the single token 5 has occurred before
    script = [*prompt, 9, 8, 7, 20]
    _, narrow = run([script], [prompt], k=3, max_tokens=4, widths=(2, 4), weak=1)
    _, wide = run([script], [prompt], k=3, max_tokens=4)
    assert narrow.drafted[0] == 1 + 1  # 9; then, after 5 9 8, a sure match, of which one token is still of use
    assert wide.drafted[0] == 3


@pytest.mark.parametrize("widths", [(4,), (2, 4), (1, 2, 4), (1, 3, 4)])
def test_the_width_of_a_pass_does_not_change_the_text(widths):
    rng = np.random.default_rng(0)
    script = rng.integers(3, 6, 40).tolist()
    outputs, _ = run([script], [script[:6]], k=3, max_tokens=25, widths=widths)
    assert outputs == [script[6:31]]


def reference(script, prompt, k, max_tokens, stop_ids):
    """The whole speculative loop in plain Python: tokens, passes, accepted drafts."""
    from tests.reference import ngram_draft

    text, limit, rounds, accepted = list(prompt), len(prompt) + max_tokens, 0, 0
    while len(text) < limit and not (len(text) > len(prompt) and text[-1] in stop_ids):
        drafts = ngram_draft(text, k)[0][: limit - len(text) - 1]
        rounds += 1
        for draft in [*drafts, None]:
            text.append(script[len(text)])
            accepted += text[-1] == draft
            if text[-1] != draft or text[-1] in stop_ids or len(text) == limit:
                break
    return text[len(prompt) :], rounds, accepted


@pytest.mark.parametrize("k", [0, 1, 3, 6])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_passes_and_acceptance_agree_with_a_loop_in_plain_python(k, seed):
    rng = np.random.default_rng(seed)
    script = rng.integers(1, 6, ROOM - 8).tolist()  # few tokens: many matches, now and then a stop
    prompt = script[: int(rng.integers(1, 9))]
    outputs, state = run([script], [prompt], k=k, max_tokens=30, stop_ids=(EOS,) if seed % 2 else ())
    tokens, rounds, accepted = reference(script, prompt, k, 30, (EOS,) if seed % 2 else ())
    assert outputs == [tokens]
    assert (state.rounds[0], state.accepted.sum()) == (rounds, accepted)
