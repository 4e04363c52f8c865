"""What every peer prints: milliseconds per token after the first."""

import json
import time
from collections.abc import Iterable

NUM_TOKENS = 128


def read(path: str) -> list[dict]:
    with open(path) as file:
        return json.load(file)


def timed(tokens: Iterable[object]) -> tuple[int, float]:
    """How many tokens came after the first, and how long they took. `tokens` yields one item per token."""
    first = last = 0.0
    count = 0
    for _ in tokens:
        last = time.perf_counter()
        first = first or last
        count += 1
    return max(count - 1, 0), last - first


def show(name: str, rows: list[dict], results: list[tuple[int, float]]) -> None:
    for label, chosen in (("all", None), ("summarization + rag", ("summarization", "rag"))):
        kept = [r for row, r in zip(rows, results, strict=True) if chosen is None or row["category"] in chosen]
        count, seconds = sum(n for n, _ in kept), sum(s for _, s in kept)
        if count:
            print(f"{name}, {label}: {1000 * seconds / count:.1f} ms per token over {count} tokens")
