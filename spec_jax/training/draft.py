"""`spec-jax train-draft`: from a target to a draft head that other engines load as well."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from ..checkpoints import export_head
from ..checkpoints.tensor_folder import read_json
from ..config import EagleConfig, ModelConfig
from ..errors import UserError
from ..llm import LLM
from ..sharding import use_mesh
from .conversations import Conversation, read_conversations, read_prompts, write_conversations
from .features import FeatureFile, Text, make_texts
from .objective import Weights
from .train import Progress, TrainConfig, new_head, train

_EVERY_HELD_OUT = 50  # one of so many texts is kept for measuring


def train_draft(
    *,
    model: str,
    output: Path,
    prompts: Path | None = None,
    num_conversations: int = 20_000,
    num_steps: int = 20_000,
    draft_vocab_size: int = 8192,
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
        "model": model, "prompts": None if prompts is None else str(prompts), "num_conversations": num_conversations,
        "draft_vocab_size": draft_vocab_size, "max_user_tokens": max_user_tokens, "max_answer_tokens": max_answer_tokens,
        "max_num_seqs": max_num_seqs, "batch_rows": batch_rows, "row_tokens": row_tokens, "num_unrolled": num_unrolled,
        "learning_rate": learning_rate, "dtype": dtype, "seed": seed,
    }  # fmt: skip
    config = TrainConfig(
        num_steps=num_steps, num_unrolled=num_unrolled, rows=batch_rows, row_tokens=row_tokens,
        learning_rate=learning_rate, seed=seed,
    )  # fmt: skip
    console = Console(stderr=True)
    given = None if prompts is None else read_prompts(prompts)
    if given is not None:
        num_conversations = min(num_conversations, len(given))
    work = output / "work"
    try:
        work.mkdir(parents=True, exist_ok=True)
        _check_settings(work / "settings.json", settings)
    except OSError as error:
        raise UserError(f"cannot write to {output}: {error.strerror}") from None
    max_len = max_user_tokens + max_answer_tokens + 128
    llm = LLM(
        model, draft="none", dtype=dtype, max_num_seqs=max_num_seqs, max_model_len=max_len,
        num_kv_tokens=max_num_seqs * max_len, tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip
    told = work / "conversations.jsonl"
    for asked in write_conversations(
        llm,
        told,
        num_conversations,
        given,
        max_user_tokens=max_user_tokens,
        max_answer_tokens=max_answer_tokens,
        seed=seed,
    ):
        console.print(f"asked {asked} of {num_conversations} user turns")
    conversations = read_conversations(told)
    if len(conversations) < _EVERY_HELD_OUT:
        raise UserError(
            f"{len(conversations)} conversations are too few to train on: at least {_EVERY_HELD_OUT} are needed"
        )

    with use_mesh(llm.mesh):
        _train_on(llm, conversations, draft_vocab_size, config, output, console)
    return output


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """What was made on the way fits no other settings: only more steps can be asked for, or another number of devices."""
    before = read_json(path) if path.exists() else settings
    for name, value in settings.items():
        if before.get(name) != value:
            raise UserError(
                f"{path.parent} was begun with {name} {before.get(name)!r}, not {value!r}: give that, or another folder"
            )
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _train_on(
    llm: LLM,
    conversations: Sequence[Conversation],
    draft_vocab_size: int,
    config: TrainConfig,
    output: Path,
    console: Console,
) -> None:
    work = output / "work"
    head_config = EagleConfig.for_target(llm.config, draft_vocab_size)
    draft_ids = draft_vocabulary(conversations, llm.config, draft_vocab_size)
    texts = make_texts(conversations, config.row_tokens)
    file = FeatureFile(work / "features.bin", texts, head_config)
    for done in file.fill(llm.decoder, head_config):
        console.print(f"hidden states of {done} of {len(texts)} texts")
    head = new_head(llm.decoder, head_config, draft_ids, config.seed, llm.mesh)
    places = np.full(llm.config.vocab_size, -1, np.int32)
    places[draft_ids] = np.arange(len(draft_ids))
    embedding = llm.decoder.embedding[...].astype(jnp.float32)
    output_rows = (llm.decoder.embedding if llm.decoder.head is None else llm.decoder.head)[...][draft_ids]
    shared = Weights(embedding, output_rows.astype(jnp.float32), jnp.asarray(places))
    held_out = held_out_texts(texts)
    history = work / "progress.jsonl"
    for progress in train(head, shared, file, texts, held_out, config, work / "checkpoints"):
        console.print(describe(progress, config))
        with history.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(progress._asdict()) + "\n")
        export_head(head, llm.config, llm.tokenizer, output)


def draft_vocabulary(conversations: Sequence[Conversation], target: ModelConfig, size: int) -> np.ndarray:
    """The `size` most frequent tokens of the answers, [size] ascending ids; the lowest ids, which byte-pair encoding gives
    to what is frequent anyway, where there are not so many."""
    counts = Counter(token for conversation in conversations for token in conversation.answer)
    frequent = dict.fromkeys([*target.eos_token_ids, *(token for token, _ in counts.most_common(size))])
    rest = (token for token in range(target.vocab_size) if token not in frequent)
    kept = list(frequent)[:size]
    kept += [token for token, _ in zip(rest, range(size - len(kept)), strict=False)]
    return np.sort(np.array(kept, np.int64))


def held_out_texts(texts: Sequence[Text]) -> list[int]:
    return list(range(0, len(texts), _EVERY_HELD_OUT))


def describe(progress: Progress, config: TrainConfig) -> str:
    steps = " ".join(f"{share:.1%}" for share in progress.agreement)
    return (
        f"step {progress.step} of {config.num_steps}, {progress.num_tokens:,} tokens, loss {progress.loss:.3f}, "
        f"agreement per draft {steps}: acceptance length {progress.acceptance_length:.2f} ({progress.seconds:.0f} s)"
    )
