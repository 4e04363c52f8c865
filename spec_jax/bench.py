"""`spec-jax bench`: acceptance length, time per token and time to first token over a file of questions."""

import json
import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .errors import UserError
from .llm import LLM
from .params import SamplingParams
from .request import RequestOutput


@dataclass(frozen=True)
class Question:
    question_id: int | str
    category: str
    text: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


@dataclass(frozen=True)
class Row:
    """Totals of one category under one drafter."""

    category: str
    draft: str
    num_questions: int
    num_tokens: int
    acceptance_length: float  # committed tokens per pass of the target
    tpot_ms: float  # time per token after the first burst, over all tokens
    tokens_per_s: float  # of the whole request, prompt included
    ttft_ms: float  # mean


def read_questions(dataset: Path, per_category: int | None = None) -> list[Question]:
    """Questions of a Spec-Bench style JSONL (`question_id`, `category`, `turns`), optionally the first few of each
    category. Raises UserError naming the line that cannot be read."""
    if per_category is not None and per_category < 1:
        raise UserError(f"per_category is {per_category}: allowed is an integer >= 1")
    try:
        lines = dataset.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"cannot read dataset {dataset}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"dataset {dataset} is no UTF-8 text") from None
    kept: dict[str, list[Question]] = defaultdict(list)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            question = Question(raw["question_id"], raw["category"], raw["turns"][0])
            if not isinstance(raw["turns"], list) or not isinstance(question.category + question.text, str):
                raise TypeError("turns must be a list of strings, category a string")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{dataset} line {number} is no question with question_id, category and turns: {error!r}"
            ) from None
        if per_category is None or len(kept[question.category]) < per_category:
            kept[question.category].append(question)
    questions = [question for group in kept.values() for question in group]
    if not questions:
        raise UserError(f"{dataset} holds no questions")
    return questions


def run_bench(
    *,
    dataset: Path,
    drafts: Sequence[str],
    model_options: dict[str, Any],
    params: SamplingParams,
    per_category: int | None,
    output: Path,
) -> None:
    """Asks every question once with each drafter, in turn, so that a slow minute of the machine hits all of them.

    Programs are compiled and run once before anything is timed. Writes `result.json` and `plot.png` into `output`.
    """
    questions = read_questions(dataset, per_category)
    if len(set(drafts)) < len(drafts):
        raise UserError(f"draft and compare are {', '.join(drafts)}: give different drafters")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write results to {output}: {error.strerror}") from None
    console = Console()
    with Progress(console=console) as progress:
        loading = progress.add_task("loading and compiling", total=len(drafts))
        engines: dict[str, LLM] = {}
        first = LLM(draft=drafts[0], max_num_seqs=1, **model_options)
        for draft in drafts:
            engines[draft] = first if draft == drafts[0] else first.with_draft(draft, model_options["num_draft_tokens"])
            _warm_up(engines[draft], questions, params)
            progress.advance(loading)
        asking = progress.add_task("asking", total=len(questions))
        answers: dict[str, list[RequestOutput]] = {draft: [] for draft in drafts}
        for question in questions:
            progress.update(asking, description=question.category)
            for draft, llm in engines.items():
                answers[draft].append(_ask(llm, question, params))
            progress.advance(asking)
    rows = list(_summarize(questions, answers))
    costs = {draft: llm.engine.draft_cost() for draft, llm in engines.items()}
    same = sum(len({out.token_ids for out in outs}) == 1 for outs in zip(*answers.values(), strict=True))
    console.print(_table(rows, drafts))
    if len(drafts) > 1:
        console.print(f"{same} of {len(questions)} answers have the same tokens under all drafters")
    for draft, cost in costs.items():
        if cost:
            console.print(f"{draft}: drafting costs {cost:.1%} of the target's pass in a round where all of it works")
    result = {
        "draft_cost": costs,
        "settings": {
            **{k: str(v) for k, v in model_options.items()},
            "params": asdict(params),
            "dataset": dataset.name,
        },
        "machine": f"{platform.machine()}, {jax.devices()[0].device_kind}, jax {jax.__version__}",
        "num_questions": len(questions),
        "num_same_tokens": same,
        "rows": [asdict(row) for row in rows],
    }
    (output / "result.json").write_text(json.dumps(result, indent=1))
    console.print(f"wrote {output / 'result.json'}")
    if _plot(rows, drafts, output / "plot.png"):
        console.print(f"wrote {output / 'plot.png'}")
    else:
        console.print("no plot: install spec-jax[bench] for matplotlib")


def _ask(llm: LLM, question: Question, params: SamplingParams) -> RequestOutput:
    *_, last = llm.stream(question.prompt, params)
    return last


def _warm_up(llm: LLM, questions: Sequence[Question], params: SamplingParams) -> None:
    """Runs, untimed, one question for every new set of programs."""
    for question in questions:
        length = len(llm.tokenizer.encode_chat(question.prompt))
        before = llm.engine.programs.num_compilations
        longest = min(length + params.max_tokens, llm.engine.config.max_model_len)
        for program in llm.engine.prepare(length, params, longest, streams=True):
            program.compile()
        if llm.engine.programs.num_compilations > before:
            _ask(llm, question, params)


def _summarize(questions: Sequence[Question], answers: dict[str, list[RequestOutput]]) -> Iterator[Row]:
    categories = list(dict.fromkeys(question.category for question in questions))
    for category in [*categories, "all"]:
        for draft, outputs in answers.items():
            chosen = [o for q, o in zip(questions, outputs, strict=True) if category in (q.category, "all")]
            yield _row(category, draft, chosen)


def _row(category: str, draft: str, outputs: Sequence[RequestOutput]) -> Row:
    stats = [output.stats for output in outputs]
    num_tokens = sum(len(output.token_ids) for output in outputs)
    rounds = sum(s.rounds for s in stats)
    later = sum(s.tokens_after_first_burst for s in stats)
    seconds = sum(s.tpot_s * s.tokens_after_first_burst for s in stats)
    total = sum(len(o.token_ids) / o.stats.tokens_per_s for o in outputs if o.stats.tokens_per_s)
    return Row(
        category=category,
        draft=draft,
        num_questions=len(outputs),
        num_tokens=num_tokens,
        acceptance_length=sum(s.acceptance_length * s.rounds for s in stats) / rounds,
        tpot_ms=1000 * seconds / later if later else 0.0,
        tokens_per_s=num_tokens / total if total else 0.0,
        ttft_ms=1000 * sum(s.ttft_s for s in stats) / len(stats),
    )


def _table(rows: Sequence[Row], drafts: Sequence[str]) -> Table:
    """One line per category; where drafters are compared, their figures stand in one cell, in order."""
    table = Table(
        title=f"draft: {' / '.join(drafts)}",
        caption="AL: tokens per pass of the target; TPOT: time per token",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("category", no_wrap=True)
    for name in ("AL", "TPOT ms", "tok/s", "TTFT ms"):
        table.add_column(name, justify="right", no_wrap=True)
    if len(drafts) > 1:
        table.add_column("faster", justify="right", no_wrap=True)
    for i in range(0, len(rows), len(drafts)):
        group = rows[i : i + len(drafts)]
        cells = [
            group[0].category,
            " / ".join(f"{row.acceptance_length:.2f}" for row in group),
            " / ".join(f"{row.tpot_ms:.1f}" for row in group),
            " / ".join(f"{row.tokens_per_s:.1f}" for row in group),
            " / ".join(f"{row.ttft_ms:.0f}" for row in group),
        ]
        if len(drafts) > 1:
            cells.append(f"{group[-1].tpot_ms / group[0].tpot_ms:.2f}x" if group[0].tpot_ms else "")
        table.add_row(*cells, end_section=i + 2 * len(drafts) == len(rows))
    return table


def _plot(rows: Sequence[Row], drafts: Sequence[str], path: Path) -> bool:
    """Bars of time per token by category. False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    categories = list(dict.fromkeys(row.category for row in rows))
    figure = Figure(figsize=(10, 0.45 * len(categories) + 1.5), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(drafts)
    for place, draft in enumerate(drafts):
        chosen = [row for row in rows if row.draft == draft]
        at = [i + place * height for i in range(len(chosen))]
        bars = axes.barh(at, [row.tpot_ms for row in chosen], height=height, label=draft)
        axes.bar_label(bars, [f" {row.acceptance_length:.2f} per pass" for row in chosen], fontsize=8)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(categories))], categories)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per token")
    axes.set_title("Time per token by category (labels: tokens per pass of the target)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.legend(title="draft", frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=120)
    return True
