"""What a draft head learns from: the target's hidden states over texts, computed once and kept on disk.

A row per token: the features that the head takes [W], then the target's normed last hidden state [D], whose scores are the
soft labels; bfloat16.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from ..cache import abstract_cache, create_cache
from ..config import EagleConfig
from ..models.decoder import Decoder, Rows
from .conversations import Conversation

_PAGE_SIZE = 16
_PASS_ROWS = 2048  # of one pass: enough to keep a machine busy
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Text(NamedTuple):
    tokens: list[int]
    is_answer: list[bool]


def make_texts(conversations: Sequence[Conversation], max_tokens: int) -> list[Text]:
    """Texts of at most `max_tokens` tokens. Of every eight conversations four stand alone, and the others follow each other
    in one text: a head must also have seen long contexts. Short texts come first, so that neighbours pad little."""
    texts = []
    for start in range(0, len(conversations), 8):
        group = [
            Text(c.prompt + c.answer, [False] * len(c.prompt) + [True] * len(c.answer))
            for c in conversations[start : start + 8]
        ]
        texts += group[:4]
        joined = Text([], [])
        for text in group[4:]:
            if len(joined.tokens) + len(text.tokens) > max_tokens:
                texts.append(joined)
                joined = Text([], [])
            joined = Text(joined.tokens + text.tokens, joined.is_answer + text.is_answer)
        texts.append(joined)
    cut = [Text(text.tokens[:max_tokens], text.is_answer[:max_tokens]) for text in texts if len(text.tokens) > 2]
    return sorted(cut, key=lambda text: len(text.tokens))


class FeatureFile:
    """Rows of all texts, one behind the other."""

    def __init__(self, path: Path, texts: Sequence[Text], config: EagleConfig):
        self.path = path
        self.texts = [text.tokens for text in texts]
        self.hidden_size = config.target_hidden_size
        self.width = config.feature_size + self.hidden_size
        self.starts = np.concatenate([[0], np.cumsum([len(text) for text in self.texts], dtype=np.int64)])

    def fill(self, target: Decoder, config: EagleConfig) -> Iterator[int]:
        """Computes what is missing, and yields the number of texts that are there. Goes on after a kill."""
        row_bytes = self.width * _BFLOAT16.itemsize
        there = self.path.stat().st_size // row_bytes if self.path.exists() else 0
        done = int(np.searchsorted(self.starts, there, side="right")) - 1
        with self.path.open("ab") as file:
            file.truncate(int(self.starts[done]) * row_bytes)
            while done < len(self.texts):
                width = _width(len(self.texts[done]))
                batch = self.texts[done : done + max(_PASS_ROWS // width, 1)]
                width = _width(max(map(len, batch)))
                batch = batch[: max(_PASS_ROWS // width, 1)]
                rows = _target_pass(target, config, *_padded(batch, width))
                for text, row in zip(batch, np.asarray(rows), strict=False):
                    file.write(row[: len(text)].tobytes())
                file.flush()
                done += len(batch)
                yield done

    def read(self) -> Any:
        """[tokens, W + D] bfloat16, mapped from the file."""
        return np.memmap(self.path, _BFLOAT16, "r", shape=(int(self.starts[-1]), self.width))


def _width(size: int) -> int:
    """Rounded up to one of a few widths: each is a program."""
    return max(128, 1 << (size - 1).bit_length())


def _padded(texts: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """[B, T] tokens, and which of them are meant."""
    rows = max(_PASS_ROWS // width, 1)
    tokens, keep = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.bool_)
    for i, text in enumerate(texts):
        tokens[i, : len(text)] = text
        keep[i, : len(text)] = True
    return tokens, keep


def _target_pass(target: Decoder, config: EagleConfig, tokens: np.ndarray, keep: np.ndarray) -> jax.Array:
    """[B, T] -> [B, T, W + D]."""
    graph, state = nnx.split(target)
    return _run(graph, state, config, tokens, keep)


@partial(jax.jit, static_argnums=(0, 2))
def _run(graph: Any, state: Any, config: EagleConfig, tokens: jax.Array, keep: jax.Array) -> jax.Array:
    target = nnx.merge(graph, state)
    B, T = tokens.shape
    pages = -(-T // _PAGE_SIZE)
    cache = create_cache(abstract_cache(target.config, B * pages + 1, _PAGE_SIZE, target.embedding.dtype))
    tables = 1 + jnp.arange(B * pages, dtype=jnp.int32).reshape(B, pages)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    hidden, features, _ = target.with_features(tokens, Rows(positions, tables, keep), cache, config.captured)
    return jnp.concatenate([features, hidden], axis=-1).astype(jnp.bfloat16)
