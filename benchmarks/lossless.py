"""Is the text the same with and without drafts? Every pair of (K, batch size, temperature) against plain decoding.

    python benchmarks/lossless.py --dataset spec_bench_dev.jsonl --dtype float32

float32 must be identical, token for token. bfloat16 rounds differently when a pass has other numbers of rows, so near-ties
may fall the other way; there the gap of the target's two best scores (noise included) at the first difference is reported.
Finished answers are kept in `--output`, so that a run can be stopped and started again: a new folder for a new version.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tyro

from spec_jax import LLM, SamplingParams
from spec_jax.bench import Question, read_questions
from spec_jax.verify import score_gap


@dataclass(frozen=True)
class Arguments:
    dataset: Path
    model: str = "smollm2-135m"
    draft: str = "auto"
    dtype: str = "float32"
    num_questions: int = 40
    max_tokens: int = 128
    draft_tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    batch_sizes: tuple[int, ...] = (1, 4)
    temperatures: tuple[float, ...] = (0.0, 0.8)
    output: Path = Path("bench-results/lossless")


def main(args: Arguments) -> None:
    questions = spread(read_questions(args.dataset), args.num_questions)
    args.output.mkdir(parents=True, exist_ok=True)
    widest = max(args.batch_sizes)
    plain = {t: answers(args, questions, 0, widest, t) for t in args.temperatures}
    num_different = 0
    gaps: list[float] = []
    for batch in args.batch_sizes:
        for k in args.draft_tokens:
            for temperature in args.temperatures:
                drafted = answers(args, questions, k, batch, temperature)
                pairs = list(zip(questions, drafted, plain[temperature], strict=True))
                different = [(q, a, b) for q, a, b in pairs if a != b]
                num_different += len(different)
                found = [gap(args, question, a, b, temperature) for question, a, b in different]
                gaps += found
                print(
                    f"K={k} B={batch} T={temperature}: {len(different)} of {len(pairs)} differ from plain decoding"
                    + (f", largest gap of the top two scores there {max(found):.3f}" if found else ""),
                    flush=True,
                )
    print(f"{num_different} differences in all" + (f", largest gap {max(gaps):.3f}" if gaps else ""))
    if args.dtype == "float32" and num_different:
        raise SystemExit(1)


def spread(questions: list[Question], count: int) -> list[Question]:
    """`count` questions, evenly over the file, which is ordered by category."""
    return [questions[i * len(questions) // count] for i in range(count)]


def answers(args: Arguments, questions: list[Question], k: int, batch: int, temperature: float) -> list[list[int]]:
    """Token ids of every answer, computed once and kept."""
    asked = hashlib.sha256(json.dumps([q.text for q in questions]).encode()).hexdigest()[:8]
    drafter = args.draft.replace("/", "_") if k else "none"
    name = (
        f"{Path(args.model).name}-{asked}-{args.dtype}-{drafter}-k{k}-b{batch}-t{temperature}-m{args.max_tokens}.json"
    )
    path = args.output / name
    if path.exists():
        return json.loads(path.read_text())
    llm = LLM(
        args.model, draft=args.draft if k else "none", num_draft_tokens=k, draft_schedule=[],
        dtype=args.dtype, max_num_seqs=batch, max_model_len=4096, num_kv_tokens=8192,
    )  # fmt: skip
    outputs = llm.generate([q.prompt for q in questions], [params(args, q, temperature) for q in questions])
    ids = [list(output.token_ids) for output in outputs]
    path.with_suffix(".partial").write_text(json.dumps(ids))
    path.with_suffix(".partial").rename(path)
    return ids


def params(args: Arguments, question: Question, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=int(question.question_id))


@cache
def scorer(model: str, dtype: str) -> LLM:
    return LLM(model, draft="none", dtype=dtype, max_num_seqs=1, max_model_len=4096)


def gap(args: Arguments, question: Question, left: list[int], right: list[int], temperature: float) -> float:
    """How far apart the two scores are where two answers part, by a pass of their own."""
    llm = scorer(args.model, args.dtype)
    prompt = llm.tokenizer.encode_chat(question.prompt)
    return score_gap(llm, prompt, left, right, params(args, question, temperature))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
