"""`spec-jax train-draft`: from a target to a draft head that other engines load as well."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from ..checkpoints import HeadFiles, check_exportable, export_head, open_head
from ..checkpoints.tensor_folder import read_json, write_json
from ..config import EagleConfig, ModelConfig
from ..errors import UserError
from ..llm import LLM
from ..models.eagle import Eagle3
from ..sharding import ShardingRules, use_mesh
from .conversations import Conversation, read_conversations, read_prompts, write_conversations
from .features import FeatureFile, Text, make_texts
from .new_head import grow_vocabulary, new_head
from .objective import SharedWeights
from .train import Progress, TrainConfig, train

_EVERY_HELD_OUT = 50  # one of so many texts is kept for measuring,
_MOST_HELD_OUT = 32  # and no more than these: measuring costs time as well
_TEMPLATE_TOKENS = 128  # room for what a chat template puts around a turn


def train_draft(
    *,
    model: str,
    output: Path,
    prompts: Path | None = None,
    initial_head: Path | None = None,
    num_conversations: int = 20_000,
    num_steps: int = 20_000,
    draft_vocab_size: int | None = None,
    max_user_tokens: int = 96,
    max_answer_tokens: int = 192,
    max_num_seqs: int = 64,
    batch_rows: int = 1,
    row_tokens: int = 1024,
    num_unrolled: int = 3,
    learning_rate: float = 1e-3,
    dtype: str = "bfloat16",
    tensor_parallel_size: int = 1,
    seed: int = 0,
) -> Path:
    """Trains an EAGLE-3 head for `model` on its own answers and writes it to `output`, as `export_head` does.

    What was made on the way is in `output/work`. Run again with the same arguments, it goes on where it stopped, with the
    same result.

    Args:
      prompts: a file of user turns (`read_prompts`); by default the model writes `num_conversations` of them.
      initial_head: folder of a head that training goes on from; it is unrolled `num_unrolled` times from the first step,
        and the learning rate falls from then on. By default the head starts from its target.
      draft_vocab_size: 8192 by default. That of `initial_head`, where there is one; a larger one adds to its tokens.
      num_steps: of `batch_rows` rows of `row_tokens` tokens each.
      num_unrolled: steps of the training-time test.

    Raises:
      UserError: a value cannot be used; the message says what can.
    """
    for name, value in (
        ("num_conversations", num_conversations), ("num_steps", num_steps), ("max_user_tokens", max_user_tokens),
        ("max_answer_tokens", max_answer_tokens), ("batch_rows", batch_rows), ("num_unrolled", num_unrolled),
    ):  # fmt: skip
        if value < 1:
            raise UserError(f"{name} is {value}: allowed is an integer >= 1")
    if row_tokens < 16:
        raise UserError(f"row_tokens is {row_tokens}: allowed is an integer >= 16")
    if not 0 < learning_rate < math.inf:
        raise UserError(f"learning_rate is {learning_rate}: allowed is a number above 0")
    settings = {
        "model": model, "num_conversations": num_conversations,
        "max_user_tokens": max_user_tokens, "max_answer_tokens": max_answer_tokens,
        "max_num_seqs": max_num_seqs, "batch_rows": batch_rows, "row_tokens": row_tokens, "num_unrolled": num_unrolled,
        "learning_rate": learning_rate, "dtype": dtype, "seed": seed,
    }  # fmt: skip
    # A checkpoint measures as well, which takes as long as some 30 steps.
    config = TrainConfig(
        num_steps=num_steps, num_unrolled=num_unrolled, rows=batch_rows, row_tokens=row_tokens,
        learning_rate=learning_rate, dtype=dtype, seed=seed, steps_per_checkpoint=min(max(num_steps // 4, 50), 200),
    )  # fmt: skip
    if initial_head is not None:
        config = replace(config, first_unrolled=num_unrolled, final_share=1.0)
    if not 0 <= seed < 2**20:
        raise UserError(f"seed is {seed}: allowed is an integer from 0 to {2**20 - 1}")
    given = None if prompts is None else read_prompts(prompts)
    if given is not None:
        num_conversations = min(num_conversations, len(given))
    if num_conversations < _EVERY_HELD_OUT:
        raise UserError(
            f"{num_conversations} conversations are too few to train on: at least {_EVERY_HELD_OUT} are needed"
        )
    max_len = max_user_tokens + max_answer_tokens + _TEMPLATE_TOKENS
    llm = LLM(
        model, draft="none", dtype=dtype, max_num_seqs=max_num_seqs, max_model_len=max_len,
        num_kv_tokens=max_num_seqs * max_len, tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip
    if initial_head is None:
        initial, head_config = None, EagleConfig.for_target(llm.config, draft_vocab_size or 8192)
    else:
        initial = open_head(initial_head, llm.config, llm.tokenizer)
        check_exportable(initial.config)
        head_config = _grown(initial.config, draft_vocab_size, llm.config, initial_head)
    settings |= {"initial_head": initial_head and str(initial_head), "draft_vocab_size": head_config.draft_vocab_size}
    ShardingRules().usable(llm.mesh, replace(head_config.layer, vocab_size=head_config.draft_vocab_size))
    console = Console(stderr=True)
    work = output / "work"
    with _disk_errors(output):
        work.mkdir(parents=True, exist_ok=True)
        _check_unchanged(work / "settings.json", settings | {"prompts": _digest(given)})
        told = work / "conversations.jsonl"
        lengths = {"max_user_tokens": max_user_tokens, "max_answer_tokens": max_answer_tokens}
        for asked in write_conversations(llm, told, num_conversations, given, seed=seed, **lengths):
            console.print(f"asked {asked} of {num_conversations} user turns")
        with use_mesh(llm.mesh):
            _train_on(llm, read_conversations(told), head_config, initial, config, output, console)
    return output


def _grown(config: EagleConfig, draft_vocab_size: int | None, target: ModelConfig, folder: Path) -> EagleConfig:
    has, most = config.draft_vocab_size, target.vocab_size
    size = has if draft_vocab_size is None else draft_vocab_size
    if not has <= size <= most:
        raise UserError(f"draft_vocab_size is {size}, and {folder} has {has}: allowed are {has} to {most}")
    return replace(config, draft_vocab_size=size)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from None


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _check_unchanged(path: Path, settings: dict[str, Any]) -> None:
    """What was made on the way fits no other settings: only more steps can be asked for, or another number of devices."""
    before = read_json(path) if path.exists() else settings
    for name, value in settings.items():
        if before.get(name) != value:
            raise UserError(
                f"{path.parent} was begun with {name} {before.get(name)!r}, not {value!r}: give that, or another folder"
            )
    write_json(path, settings)


def _train_on(
    llm: LLM,
    conversations: Sequence[Conversation],
    head_config: EagleConfig,
    initial: HeadFiles | None,
    config: TrainConfig,
    output: Path,
    console: Console,
) -> None:
    work = output / "work"
    texts = make_texts(conversations, config.row_tokens)
    _check_unchanged(work / "texts.json", {"texts": _digest(texts)})  # hidden states and checkpoints are of these alone
    file = FeatureFile(work / "features.bin", texts, head_config)
    for done in file.fill(llm.decoder, head_config):
        console.print(f"hidden states of {done} of {len(texts)} texts")
    if initial is None:
        draft_ids = draft_vocabulary(conversations, llm.config, head_config.draft_vocab_size)
        head = new_head(llm.decoder, head_config, draft_ids, config.seed, llm.mesh)
    else:
        head = cast(Eagle3, initial.load(dtype="float32", mesh=llm.mesh))
        known = np.asarray(cast(nnx.Variable, head.target_ids)[...]).tolist()
        draft_ids = draft_vocabulary(conversations, llm.config, head_config.draft_vocab_size, known)
        grow_vocabulary(head, llm.decoder, draft_ids, llm.mesh)
    places = np.full(llm.config.vocab_size, -1, np.int32)
    places[draft_ids] = np.arange(len(draft_ids))
    scores = llm.decoder.embedding if llm.decoder.head is None else llm.decoder.head
    shared = SharedWeights(llm.decoder.embedding[...], scores[...][draft_ids], jnp.asarray(places))
    held_out = held_out_texts(texts)
    history = work / "progress.jsonl"
    for progress in train(head, shared, file, texts, held_out, config, work / "checkpoints"):
        console.print(describe(progress, config))
        with history.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(progress._asdict()) + "\n")
        export_head(head, llm.config, llm.tokenizer, output)
    export_head(head, llm.config, llm.tokenizer, output)  # where the last step was done, but not its file


def draft_vocabulary(
    conversations: Sequence[Conversation], target: ModelConfig, size: int, known: Sequence[int] = ()
) -> np.ndarray:
    """`known` and the most frequent tokens of the answers, [size] ascending ids; the lowest ids, which byte-pair encoding
    gives to what is frequent anyway, where there are not so many."""
    counts = Counter(token for conversation in conversations for token in conversation.answer)
    frequent = dict.fromkeys([*known, *target.eos_token_ids, *(token for token, _ in counts.most_common(size))])
    rest = (token for token in range(target.vocab_size) if token not in frequent)
    kept = list(frequent)[:size]
    kept += [token for token, _ in zip(rest, range(size - len(kept)), strict=False)]
    return np.sort(np.array(kept, np.int64))


def held_out_texts(texts: Sequence[Text]) -> list[int]:
    return list(range(0, len(texts), max(_EVERY_HELD_OUT, -(-len(texts) // _MOST_HELD_OUT))))


def describe(progress: Progress, config: TrainConfig) -> str:
    steps = " ".join(f"{share:.1%}" for share in progress.agreement)
    return (
        f"step {progress.step} of {config.num_steps}, {progress.num_tokens:,} tokens, loss {progress.loss:.3f}, "
        f"agreement per draft {steps}: acceptance length {progress.acceptance_length:.2f} ({progress.seconds:.0f} s)"
    )
