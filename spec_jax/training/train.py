"""The training loop of an EAGLE-3 head: batches, steps, checkpoints, held-out agreement."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from ..models.eagle import Eagle3
from .features import FeatureFile, Text
from .objective import Batch, SharedWeights, unrolled_loss
from .packing import batches, load

_EVALUATED_STEPS = 5


@dataclass(frozen=True)
class TrainConfig:
    """`num_unrolled` steps of the training-time test, weighted by powers of `decay`; a batch is `rows` rows of `row_tokens`
    tokens. The test is unrolled `first_unrolled` times in the first part of the training, once more in the second, and so on
    in equal parts: a step costs what it unrolls, and the first draft must be good before others follow it.

    The learning rate is constant, but for the warm-up and the last `final_share` of the steps, over which it falls to zero.
    Weights are trained in float32; passes over them compute in `dtype`, which `shared` has.
    """

    num_steps: int
    num_unrolled: int = 3
    first_unrolled: int = 1
    decay: float = 0.8
    rows: int = 1
    row_tokens: int = 1024
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    final_share: float = 0.2
    clip: float = 0.5
    dtype: str = "float32"
    seed: int = 0
    steps_per_checkpoint: int = 50


class Progress(NamedTuple):
    """At a checkpoint. `acceptance_length` is what per-step agreement on held-out answers gives for a chain of 5 drafts."""

    step: int
    num_tokens: int  # seen so far, repetitions included
    loss: float
    agreement: tuple[float, ...]
    acceptance_length: float
    seconds: float


def train(
    head: Eagle3,
    shared: SharedWeights,
    file: FeatureFile,
    texts: Sequence[Text],
    held_out: Sequence[int],
    config: TrainConfig,
    folder: Path,
) -> Iterator[Progress]:
    """Trains `head` in place. Goes on from the newest checkpoint in `folder`, exactly as if it had never stopped."""
    graph, params, rest = nnx.split(head, nnx.Param, ...)  # type: ignore[misc]
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip), optax.adam(partial(_learning_rate, config), b2=0.95)
    )  # fmt: skip
    state = {"params": params, "optimizer": optimizer.init(params), "num_tokens": jnp.zeros((), jnp.int32)}
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        step = manager.latest_step() or 0
        if step:
            state = manager.restore(
                step, args=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
            )
            nnx.update(head, state["params"])

        def cast(params: Any, rest: Any, batch: Batch) -> tuple[Eagle3, Batch]:
            head, features, hidden = jax.tree.map(
                lambda x: x.astype(config.dtype), (params, batch.features, batch.hidden)
            )
            return nnx.merge(graph, head, rest), batch._replace(features=features, hidden=hidden)

        @partial(jax.jit, donate_argnums=0, static_argnums=4)
        def update(state: Any, rest: Any, shared: SharedWeights, batch: Batch, num_unrolled: int) -> tuple[Any, Any]:
            def loss(params: Any) -> Any:
                head, cast_batch = cast(params, rest, batch)
                return unrolled_loss(head, shared, cast_batch, num_unrolled, config.decay)

            (_, seen), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
            changes, optimizer_state = optimizer.update(gradients, state["optimizer"], state["params"])
            num_tokens = state["num_tokens"] + jnp.sum(batch.segments > 0, dtype=jnp.int32)
            params = optax.apply_updates(state["params"], changes)
            return {"params": params, "optimizer": optimizer_state, "num_tokens": num_tokens}, seen

        @jax.jit
        def evaluate(params: Any, rest: Any, shared: SharedWeights, batch: Batch) -> Any:
            head, cast_batch = cast(params, rest, batch)
            return unrolled_loss(head, shared, cast_batch, _EVALUATED_STEPS, 1.0)[1][0]

        kept = set(held_out)
        chosen = [i for i in range(len(texts)) if i not in kept]
        order = _endless(texts, chosen, config)
        for _ in range(step):
            next(order)
        more = 1 + config.num_unrolled - config.first_unrolled
        losses: list[jax.Array] = []
        started = time.perf_counter()
        while step < config.num_steps:
            batch = load(file, texts, next(order), config.rows, config.row_tokens)
            num_unrolled = config.first_unrolled + step * more // config.num_steps
            state, (_, loss) = update(state, rest, shared, batch, num_unrolled)
            losses.append(loss[0])
            step += 1
            if step % config.steps_per_checkpoint == 0 or step == config.num_steps:
                manager.save(step, args=ocp.args.StandardSave(state))
                nnx.update(head, state["params"])
                agreement = _mean([
                    evaluate(state["params"], rest, shared, load(file, texts, packed, config.rows, config.row_tokens))
                    for packed in batches(texts, held_out, config.rows, config.row_tokens, 0)
                ])  # fmt: skip
                yield Progress(
                    step, int(state["num_tokens"]), float(np.mean(losses)), tuple(agreement),
                    1 + float(np.sum(np.cumprod(agreement))), time.perf_counter() - started,
                )  # fmt: skip
                losses = []


def _mean(values: Sequence[jax.Array]) -> list[float]:
    return np.mean(np.asarray(values), axis=0).tolist()


def _learning_rate(config: TrainConfig, step: jax.Array) -> jax.Array:
    up = (step + 1) / config.warmup_steps
    down = (config.num_steps - step) / math.ceil(config.num_steps * config.final_share)
    return config.learning_rate * jnp.minimum(1.0, jnp.minimum(up, down))


def _endless(texts: Sequence[Text], chosen: Sequence[int], config: TrainConfig) -> Iterator[list[list[int]]]:
    for epoch in range(10**9):
        yield from batches(texts, chosen, config.rows, config.row_tokens, config.seed * 10**9 + epoch)
