"""What sampling parameters cost: time per pass of the target, each set of parameters in turn, as a ratio to greedy.

    python benchmarks/sampling_cost.py

Greedy runs use the program that knows no penalties and no log-probabilities; the others are compiled when asked for. Every
figure is the median over `repeats` runs of the same prompt. Plain decoding and K drafts are measured apart, the latter only
with parameters that leave the greedy text as it is, so that all passes have the same rows.
"""

import statistics
import time

import tyro

from spec_jax import LLM, SamplingParams

SETS = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "temperature, top-p": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "logprobs 5": {"logprobs": 5},
    "temperature, top-p, penalties, logprobs 5": {
        "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "logprobs": 5,
    },
}  # fmt: skip
NEARLY_GREEDY = {
    "greedy": {},
    "all of it, nearly off": {
        "temperature": 1e-4, "top_p": 0.95, "repetition_penalty": 1.00001, "frequency_penalty": 1e-6, "logprobs": 5,
    },
}  # fmt: skip
PROMPT = [{"role": "user", "content": "Tell me a long story about a fox, a dog and a very old oak."}]


def main(
    model: str = "smollm2-135m", dtype: str = "bfloat16", max_tokens: int = 64, repeats: int = 7,
    num_draft_tokens: int = 5,
) -> None:  # fmt: skip
    plain = LLM(model, draft="none", dtype=dtype, max_num_seqs=1, max_model_len=512)
    report("plain decoding", plain, SETS, max_tokens, repeats)
    drafted = plain.with_draft("ngram", num_draft_tokens)
    report(f"{num_draft_tokens} drafts", drafted, NEARLY_GREEDY, max_tokens, repeats)


def report(title: str, llm: LLM, sets: dict[str, dict], max_tokens: int, repeats: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in sets}
    rounds = {}
    for repeat in range(repeats + 1):
        for name, options in sets.items():
            start = time.perf_counter()
            [output] = llm.generate(PROMPT, SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True, **options))
            rounds[name] = output.stats.rounds
            if repeat:  # the first one compiles
                times[name].append((time.perf_counter() - start) / output.stats.rounds)
    greedy = times["greedy"]
    print(title)
    for name, measured in times.items():
        ratio = statistics.median(a / b for a, b in zip(measured, greedy, strict=True))
        print(
            f"  {name:<44} {1000 * statistics.median(measured):6.1f} ms per pass, {ratio:.3f} x, {rounds[name]} passes"
        )


if __name__ == "__main__":
    tyro.cli(main)
