"""Texts of any length packed into rows of one length, in an order that follows from a seed alone."""

from collections.abc import Iterator, Sequence

import numpy as np

from .features import FeatureFile, Text
from .objective import Batch

_OPEN_ROWS = 32


def batches(
    texts: Sequence[Text], chosen: Sequence[int], rows: int, row_tokens: int, order: int
) -> Iterator[list[list[int]]]:
    """The indices `chosen` among `texts`, shuffled by `order` and packed, each into the first of the newest rows with room:
    a batch is `rows` rows of text indices. A last batch that is not full is left out, unless it is the only one."""
    shuffled = np.random.default_rng(order).permutation(chosen).tolist()
    packed: list[list[int]] = []
    room: list[int] = []
    for index in shuffled:
        size = len(texts[index].tokens)
        newest = range(max(len(packed) - _OPEN_ROWS, 0), len(packed))
        row = next((row for row in newest if room[row] >= size), len(packed))
        if row == len(packed):
            packed.append([])
            room.append(row_tokens)
        packed[row].append(index)
        room[row] -= size
    for start in range(0, max(len(packed) - rows, 0) + 1, rows):
        yield packed[start : start + rows]


def load(
    file: FeatureFile, texts: Sequence[Text], packed: Sequence[Sequence[int]], rows: int, row_tokens: int
) -> Batch:
    """Reads what a batch needs. Features stay bfloat16."""
    stored = file.read()
    split = stored.shape[1] - file.hidden_size

    def zeros(*shape: int, dtype: type = np.int32) -> np.ndarray:
        return np.zeros((rows, row_tokens, *shape), dtype)

    batch = Batch(
        tokens=zeros(), positions=zeros(), segments=zeros(), is_answer=zeros(dtype=np.bool_),
        features=zeros(split, dtype=stored.dtype), hidden=zeros(file.hidden_size, dtype=stored.dtype),
    )  # fmt: skip
    for row, indices in enumerate(packed):
        at = 0
        for number, index in enumerate(indices, 1):
            text, start = texts[index], int(file.starts[index])
            size = len(text.tokens)
            here = (row, slice(at, at + size))
            batch.tokens[here] = text.tokens
            batch.positions[here] = np.arange(size)
            batch.segments[here] = number
            batch.is_answer[here] = text.is_answer
            values = stored[start : start + size]
            batch.features[here], batch.hidden[here] = values[:, :split], values[:, split:]
            at += size
    return batch
