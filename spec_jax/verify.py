"""`spec-jax verify`: the proof, on the user's own model, that drafts change nothing.

Two kinds of checks. Identity: greedy and seeded texts with drafts are those without. Distribution: what many seeded runs
with drafts sample is what the target's exact probabilities say. The first finds what depends on drafts; the second also
finds what is wrong with and without them, such as noise that is used twice.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from .errors import UserError
from .llm import LLM
from .params import SamplingParams
from .request import RequestOutput
from .sampling import gumbel

CONTEXTS = (
    "red blue red blue red blue red",
    "1 2 3 4 1 2 3 4 1 2 3",
    "to be or not to be or not to be or",
    "a b c a b d a b c a b d a b",
)
"""They repeat themselves, so that drafts are made, and are short, so that runs are cheap."""

ONE_IN_A_MILLION = 1e-6  # a distribution this unlikely is called wrong: no false alarm in a lifetime of runs
NEAR_TIE = 0.25  # bfloat16 scores of 16 to 32 are 1/8 apart: two of them may fall either way


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    holds: bool
    details: str


def verify(
    *,
    model: str,
    draft: str = "auto",
    num_draft_tokens: int = 5,
    dtype: str = "float32",
    samples: int = 400,
    max_num_seqs: int = 4,
    console: Console | None = None,
) -> bool:
    """Prints a line per check and a verdict; True when the drafts change nothing.

    Raises:
      UserError: a value cannot be used, or nothing would be drafted.
    """
    if draft == "none" or num_draft_tokens == 0:
        raise UserError("draft none has nothing to verify: give a drafter and num_draft_tokens >= 1")
    if samples < 100:
        raise UserError(f"samples is {samples}: fewer than 100 show nothing")
    console = console or Console(highlight=False)
    plain = LLM(model, draft="none", dtype=dtype, max_model_len=256, max_num_seqs=max_num_seqs)
    drafted = plain.with_draft(draft, num_draft_tokens)
    holds = True
    for check in run_checks(plain, drafted, samples, is_exact=dtype == "float32"):
        holds = holds and check.holds
        console.print(f"{'ok  ' if check.holds else 'FAIL'}  {check.name:<56} {check.details}", soft_wrap=True)
    console.print("lossless: yes" if holds else "lossless: NO")
    return holds


def run_checks(plain: LLM, drafted: LLM, num_samples: int, *, is_exact: bool = True) -> Iterator[Check]:
    """All checks, one after the other. `is_exact` false allows near-ties of the scores to fall either way."""
    base = SamplingParams(max_tokens=48, ignore_eos=True, seed=1)
    seeded = replace(base, temperature=0.8)
    yield check_identity("greedy", plain, drafted, base, is_exact)
    yield check_identity("seeded, temperature 0.8", plain, drafted, seeded, is_exact)
    if is_exact:
        for name, params in (
            (
                "seeded, top-k, top-p, min-p, typical-p",
                replace(seeded, top_k=50, top_p=0.9, min_p=0.01, typical_p=0.95),
            ),
            ("greedy, penalties", replace(base, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.3)),
            # Below 0 they make a text repeat itself, so that many drafts are kept, each of which counts.
            ("seeded, penalties below 0", replace(seeded, presence_penalty=-0.5, frequency_penalty=-0.6)),
            ("seeded, bad words, min_tokens", replace(seeded, bad_words=("b", "2 3"), min_tokens=9, ignore_eos=False)),
        ):
            yield check_identity(name, plain, drafted, params, is_exact)
    drawn = SamplingParams(temperature=1.0, ignore_eos=True)
    for context, length, params in (
        (CONTEXTS[0], 1, drawn),
        (CONTEXTS[1], 3, replace(drawn, top_k=4)),
        (CONTEXTS[2], 3, replace(drawn, top_k=4, frequency_penalty=-1.0)),
    ):
        yield check_distribution(plain, drafted, context, length, params, num_samples)


def check_identity(name: str, plain: LLM, drafted: LLM, params: SamplingParams, is_exact: bool) -> Check:
    """Are the tokens the same with and without drafts?"""
    each = [replace(params, seed=seed) for seed, _ in enumerate(CONTEXTS)]
    expected, found = plain.generate(CONTEXTS, each), drafted.generate(CONTEXTS, each)
    gaps = [
        _score_gap(plain, a.prompt_token_ids, a.token_ids, b.token_ids, p)
        for a, b, p in zip(expected, found, each, strict=True)
        if a.token_ids != b.token_ids
    ]
    num_drafted, num_accepted = _count_drafts(found)
    details = (
        f"{len(found) - len(gaps)} of {len(found)} texts identical; drafts: {num_drafted} checked, {num_accepted} kept"
    )
    if gaps and not is_exact:
        details += f"; largest gap of the scores where they part: {max(gaps):.3f}"
    holds = not gaps or (not is_exact and max(gaps) <= NEAR_TIE)
    if num_drafted == 0:
        return Check(f"identity, {name}", False, "no draft was made, so nothing is shown")
    return Check(f"identity, {name}", holds, details)


def check_distribution(
    plain: LLM, drafted: LLM, context: str, length: int, params: SamplingParams, num_samples: int
) -> Check:
    """Are the first `length` tokens after `context` drawn with the target's exact probabilities?"""
    exact = exact_probabilities(plain, plain.tokenizer.encode(context), length, params)
    # Two tokens more than are looked at: so that the last one, too, may be a draft.
    each = [replace(params, seed=seed, max_tokens=length + 2) for seed in range(num_samples)]
    outputs = drafted.generate([context] * num_samples, each)
    seen = Counter(output.token_ids[:length] for output in outputs)
    statistic, freedom = _chi_square(exact, seen, num_samples)
    p_value = float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2)) if freedom else float(statistic == 0)
    rest = max(0.0, 1 - sum(exact.values()))
    num_rest = sum(count for key, count in seen.items() if key not in exact)
    shares = [(p, seen[key] / num_samples) for key, p in exact.items()] + [(rest, num_rest / num_samples)]
    distance = sum(abs(share - p) for p, share in shares) / 2
    noise = sum(math.sqrt(2 * p * (1 - p) / (math.pi * num_samples)) for p, _ in shares) / 2
    what = "next token" if length == 1 else f"{length} tokens, top-k {params.top_k}"
    what += f", frequency penalty {params.frequency_penalty}" if params.frequency_penalty else ""
    num_drafted, num_accepted = _count_drafts(outputs)
    details = (
        f"{num_samples} runs: chi-square {statistic:.1f}, {freedom} degrees of freedom, p = {p_value:.2g}; total variation "
        f"{distance:.3f}, {noise:.3f} expected from noise; drafts: {num_drafted} checked, {num_accepted} kept"
    )
    return Check(f"distribution, {what}", p_value > ONE_IN_A_MILLION and num_drafted > 0, details)


def _count_drafts(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    return sum(output.stats.drafted for output in outputs), sum(output.stats.accepted for output in outputs)


def exact_probabilities(
    plain: LLM, context: Sequence[int], length: int, params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Probability of every run of `length` tokens among the best ones, from the prompt pass, which knows no drafts.

    With `top_k` these are all runs there are. Knows temperature 1, top_k and frequency_penalty, no other parameters.
    """
    runs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        scores = _best_logprobs(plain, [[*context, *run] for run in runs])
        longer: dict[tuple[int, ...], float] = {}
        for (run, before), after in zip(runs.items(), scores, strict=True):
            penalized = {t: score - params.frequency_penalty * run.count(t) for t, score in after.items()}
            if params.top_k > 0:
                edge = sorted(penalized.values())[-min(params.top_k, len(penalized))]
                kept = {t: math.exp(score) for t, score in penalized.items() if score >= edge}
                total = sum(kept.values())
            else:
                kept, total = {t: math.exp(score) for t, score in penalized.items()}, 1.0
            longer |= {(*run, t): before * p / total for t, p in kept.items()}
        runs = longer
    return runs


def _best_logprobs(plain: LLM, prompts: list[list[int]]) -> list[dict[int, float]]:
    """Of the 20 best tokens after each prompt. Any token behind the prompt makes its last place part of the prompt pass."""
    outputs = plain.generate([[*prompt, 0] for prompt in prompts], SamplingParams(max_tokens=1, prompt_logprobs=20))
    found = []
    for output in outputs:
        last = (output.prompt_logprobs or (None,))[-1] or {}
        found.append({token: entry.logprob for token, entry in last.items() if entry.rank <= 20})
    return found


def _chi_square(exact: dict[tuple[int, ...], float], seen: Counter, num_samples: int) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; runs expected fewer than 5 times count together."""
    often = {key: p for key, p in exact.items() if p * num_samples >= 5}
    expected = [p * num_samples for p in often.values()]
    observed = [seen[key] for key in often]
    rest, num_rest = num_samples - sum(expected), num_samples - sum(observed)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    if rest > 0.5:
        return statistic + (num_rest - rest) ** 2 / rest, len(often)
    # What hardly ever happens: once may be chance, often is not.
    return statistic + (num_rest - rest) ** 2 / 0.5 if num_rest > 3 else statistic, max(len(often) - 1, 0)


def _score_gap(
    plain: LLM, prompt: Sequence[int], left: Sequence[int], right: Sequence[int], params: SamplingParams
) -> float:
    """How far apart the scores of the two tokens are where two texts part, noise included."""
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if at is None:
        return math.inf
    text, pair = [*prompt, *left[:at]], (left[at], right[at])
    outputs = plain.generate([[*text, token] for token in pair], SamplingParams(max_tokens=1, prompt_logprobs=0))
    scores = [((out.prompt_logprobs or ())[-1] or {})[t].logprob for out, t in zip(outputs, pair, strict=True)]
    if params.temperature:
        assert params.seed is not None
        words = jnp.array([[params.seed >> 32, params.seed & 0xFFFFFFFF]], jnp.uint32)
        noise = np.asarray(gumbel(words, jnp.array([[len(text)]]), plain.config.vocab_size))[0, 0]
        scores = [s / params.temperature + noise[t] for s, t in zip(scores, pair, strict=True)]
    return abs(float(scores[0] - scores[1]))
