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

from .checkpoints import open_model
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

ONE_IN_A_MILLION = 1e-6  # samples this unlikely are not the target's: no false alarm in a lifetime of runs
RARE = 1e-4  # how much the exact probabilities may be off in sum: rounding, and ties at the edge of top-k
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
) -> bool:
    """Prints a line per check and a verdict; True when the drafts change nothing.

    Raises:
      UserError: a value cannot be used, or nothing would be drafted.
    """
    if draft == "none" or num_draft_tokens == 0:
        raise UserError("draft none has nothing to verify: give a drafter and num_draft_tokens >= 1")
    if samples < 100:
        raise UserError(f"samples is {samples}: fewer than 100 show nothing")
    max_model_len = min(256, open_model(model).config.max_position)
    plain = LLM(
        model, draft="none", draft_schedule=[], dtype=dtype, max_model_len=max_model_len, max_num_seqs=len(CONTEXTS)
    )
    drafted = plain.with_draft(draft, num_draft_tokens)
    holds = True
    for check in run_checks(plain, drafted, samples, is_exact=dtype == "float32"):
        holds = holds and check.holds
        print(f"{'ok  ' if check.holds else 'FAIL'}  {check.name:<56} {check.details}", flush=True)
    print("lossless: yes" if holds else "lossless: NO")
    return holds


def run_checks(plain: LLM, drafted: LLM, num_samples: int, *, is_exact: bool = True) -> Iterator[Check]:
    """All checks, one after the other. `is_exact` false allows near-ties of the scores to fall either way, and leaves out
    what a near-tie can change beyond that."""
    base = SamplingParams(max_tokens=48, ignore_eos=True, seed=1)
    seeded = replace(base, temperature=0.8)
    # Penalties below 0 make a text repeat itself, so that many drafts are kept, each of which counts.
    repetitive = replace(seeded, presence_penalty=-0.5, frequency_penalty=-0.6)
    yield check_identity("greedy", plain, drafted, base, is_exact)
    yield check_identity("seeded, temperature 0.8", plain, drafted, seeded, is_exact)
    if is_exact:
        yield check_identity("seeded, penalties below 0", plain, drafted, repetitive, is_exact)
    drawn = SamplingParams(temperature=1.0, ignore_eos=True)
    yield check_distribution(plain, drafted, CONTEXTS[0], 1, drawn, num_samples)
    if not is_exact:
        return
    for context, penalty in ((CONTEXTS[1], 0.0), (CONTEXTS[2], -1.0)):
        params = replace(drawn, top_k=4, frequency_penalty=penalty)
        yield check_distribution(plain, drafted, context, 3, params, num_samples)
    for name, params in (
        ("greedy, penalties", replace(base, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.3)),
        ("seeded, top-k, top-p, min-p, typical-p", replace(seeded, top_k=50, top_p=0.9, min_p=0.01, typical_p=0.95)),
        ("seeded, bad words, min_tokens", replace(seeded, bad_words=("b", "2 3"), min_tokens=9, ignore_eos=False)),
    ):
        yield check_identity(name, plain, drafted, params, is_exact)


def check_identity(name: str, plain: LLM, drafted: LLM, params: SamplingParams, is_exact: bool) -> Check:
    """Are the tokens the same with and without drafts?"""
    each = [replace(params, seed=seed) for seed, _ in enumerate(CONTEXTS)]
    expected, found = plain.generate(CONTEXTS, each), drafted.generate(CONTEXTS, each)
    different = [(a, b, p) for a, b, p in zip(expected, found, each, strict=True) if a.token_ids != b.token_ids]
    num_drafted, num_accepted = _count_drafts(found)
    if num_drafted == 0:
        return Check(f"identity, {name}", False, "no draft was made, so nothing is shown")
    num_same = len(found) - len(different)
    details = f"{num_same} of {len(found)} texts identical; drafts: {num_drafted} checked, {num_accepted} kept"
    holds = not different
    if different and not is_exact:
        gap = max(score_gap(plain, a.prompt_token_ids, a.token_ids, b.token_ids, p) for a, b, p in different)
        details += f"; largest gap of the scores where they part: {gap:.3f}"
        holds = gap <= NEAR_TIE
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
    rest = max(0.0, 1 - sum(exact.values()))
    num_rest = sum(count for key, count in seen.items() if key not in exact)
    shares = [(p, seen[key] / num_samples) for key, p in exact.items()] + [(rest, num_rest / num_samples)]
    distance = sum(abs(share - p) for p, share in shares) / 2
    noise = sum(_expected_deviation(p, num_samples) for p, _ in shares) / 2
    what = "next token" if length == 1 else f"{length} tokens, top-k {params.top_k}"
    what += f", frequency penalty {params.frequency_penalty}" if params.frequency_penalty else ""
    num_drafted, num_accepted = _count_drafts(outputs)
    likelihood, how = _likelihood(exact, seen, num_samples)
    details = (
        f"{num_samples} runs: {how}; total variation {distance:.3f}, {noise:.3f} expected from noise; "
        f"drafts: {num_drafted} checked, {num_accepted} kept"
    )
    return Check(f"distribution, {what}", likelihood > ONE_IN_A_MILLION and num_drafted > 0, details)


def _count_drafts(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    return sum(output.stats.drafted for output in outputs), sum(output.stats.accepted for output in outputs)


def exact_probabilities(
    plain: LLM, context: Sequence[int], length: int, params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Probability of every run of `length` tokens among the best ones, from the prompt pass, which knows no drafts.

    With `top_k` these are all runs there are. Knows temperature 1, and for more than one token `top_k` (up to 16 of the 20
    best that the prompt pass reports) with or without `frequency_penalty`.
    """
    assert length == 1 or 0 < params.top_k <= 16
    runs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for (run, before), after in zip(runs.items(), _logprobs_after(plain, context, list(runs)), strict=True):
            penalized = {t: score - params.frequency_penalty * run.count(t) for t, score in after.items()}
            kept, total = {t: math.exp(score) for t, score in penalized.items()}, 1.0
            if params.top_k > 0:
                edge = sorted(penalized.values())[-min(params.top_k, len(penalized))]
                kept = {t: p for t, p in kept.items() if penalized[t] >= edge}
                total = sum(kept.values())
            longer |= {(*run, t): before * p / total for t, p in kept.items()}
        runs = longer
    return runs


def _logprobs_after(plain: LLM, context: Sequence[int], runs: Sequence[tuple[int, ...]]) -> list[dict[int, float]]:
    """Of the 20 best tokens after context and run, and of the run's own tokens, which a penalty below 0 can lift among them.

    Any token behind a text makes the text's last place part of the prompt pass, and its own log-probability is reported.
    """
    asked = [(run, token) for run in runs for token in (set(run) or {0})]
    outputs = plain.generate(
        [[*context, *run, token] for run, token in asked], SamplingParams(max_tokens=1, prompt_logprobs=20)
    )
    found: dict[tuple[int, ...], dict[int, float]] = {run: {} for run in runs}
    for (run, token), output in zip(asked, outputs, strict=True):
        entries = (output.prompt_logprobs or (None,))[-1] or {}
        found[run] |= {t: entry.logprob for t, entry in entries.items() if entry.rank <= 20 or (run and t == token)}
    return [found[run] for run in runs]


def _likelihood(exact: dict[tuple[int, ...], float], seen: Counter, num_samples: int) -> tuple[float, str]:
    """How likely it is that samples of the exact distribution are at least as far from it as these; and how that was found.

    Two tests. Runs expected at least 5 times, among themselves: Pearson's chi-square. All others together: the exact
    binomial distribution of their number, because they are too few for the former.
    """
    often = {key: p for key, p in exact.items() if p * num_samples >= 5}
    if not often:
        return 0.0, "too few to show anything"
    total, num_often = sum(often.values()), sum(seen[key] for key in often)
    rest, num_rest = min(max(1 - total, RARE), 1 - 1e-7), num_samples - num_often
    upper = float(jax.scipy.special.betainc(num_rest, num_often + 1.0, rest)) if num_rest else 1.0
    lower = float(jax.scipy.special.betainc(num_often, num_rest + 1.0, 1 - rest)) if num_often else 1.0
    likely_rest = min(1.0, 2 * min(upper, lower)) if 1 - total > RARE else min(1.0, upper)
    expected = [num_often * p / total for p in often.values()]
    statistic = sum((seen[key] - e) ** 2 / e for key, e in zip(often, expected, strict=True)) if num_often else 0.0
    freedom = len(often) - 1
    likely_often = float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2)) if freedom else 1.0
    how = f"chi-square {statistic:.1f}, {freedom} degrees of freedom, p = {likely_often:.2g}"
    return min(likely_often, likely_rest), f"{how}; {num_rest} others, p = {likely_rest:.2g}"


def _expected_deviation(p: float, num_samples: int) -> float:
    """Mean distance of a share from its probability: normal where it is frequent, Poisson where it is rare."""
    return min(math.sqrt(2 * p * (1 - p) / (math.pi * num_samples)), 2 * p)


def score_gap(
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
