"""How many drafts pay at which load: tokens per second of a batch that is always full, by batch size and drafts per round.

    python benchmarks/draft_schedule.py --dataset spec_bench_dev.jsonl

Batch sizes and drafts are tried in turn on the same questions, and every batch size is compared with plain decoding in the
same run. What comes out is what `LLM` takes as `draft_schedule`.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from spec_jax import LLM, SamplingParams
from spec_jax.bench import read_questions


@dataclass(frozen=True)
class Arguments:
    dataset: Path
    model: str = "smollm2-135m"
    draft: str = "auto"
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    draft_tokens: tuple[int, ...] = (2, 3, 5)
    max_tokens: int = 64
    rounds: int = 2
    """How often each batch is answered; the faster answer counts."""


def main(args: Arguments) -> None:
    questions = read_questions(args.dataset, 2)
    schedule = []
    for size in args.batch_sizes:
        chosen = [questions[i * len(questions) // size].prompt for i in range(size)]
        speeds = {k: speed(args, chosen, k) for k in (0, *args.draft_tokens)}
        best = max(speeds, key=lambda k: speeds[k])
        schedule.append((size, best))
        figures = ", ".join(f"K={k} {value / speeds[0]:.2f} x" for k, value in speeds.items())
        print(f"{size} sequences: {speeds[0]:.0f} tokens/s without drafts; {figures}", flush=True)
    print("fastest:", schedule)


def speed(args: Arguments, prompts: list, k: int) -> float:
    """Tokens per second of all sequences together, prompts included."""
    llm = LLM(
        args.model, draft=args.draft if k else "none", num_draft_tokens=k, draft_schedule=[], max_num_seqs=len(prompts),
        max_model_len=2048, num_kv_tokens=2048 * len(prompts),
    )  # fmt: skip
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    llm.generate(prompts, params)
    fastest = float("inf")
    for _ in range(args.rounds):
        started = time.perf_counter()
        llm.generate(prompts, params)
        fastest = min(fastest, time.perf_counter() - started)
    return len(prompts) * args.max_tokens / fastest


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
