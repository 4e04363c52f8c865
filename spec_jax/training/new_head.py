"""The head that training starts from: an untrained one, or a trained one with a larger draft vocabulary."""

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ..config import EagleConfig
from ..models.decoder import Decoder
from ..models.eagle import Eagle3
from ..sharding import Axes, ShardingRules, place


def new_head(
    target: Decoder, config: EagleConfig, draft_ids: np.ndarray, seed: int, mesh: Mesh | None = None
) -> Eagle3:
    """An untrained head in float32 that starts from its target: feed-forward, attention and scores are those of the target's
    last layer, and the features of the highest captured layer pass through."""
    last: Any = target.layers[-1]
    D, rules = config.layer.hidden_size, ShardingRules()
    noise = np.random.default_rng(seed)

    def value(path: str, shape: tuple[int, ...]) -> jax.Array:
        def near_zero() -> jax.Array:
            return jnp.asarray(noise.normal(0, 0.02, shape), jnp.float32)

        match path:
            case "target_ids":
                return jnp.asarray(draft_ids, jnp.int32)
            case "head":
                return _scores(target, draft_ids)
            case "norm":
                return target.norm.weight[...].astype(jnp.float32)
            case "fc":
                high = jnp.eye(D, shape[1], shape[1] - D)
                return near_zero() * 0.1 + high
            case "layers.0.attention.qkv":
                own = last.attention.qkv.weight[...].astype(jnp.float32)
                return jnp.concatenate([near_zero()[:, :D], own], axis=1)
            case "layers.0.attention.output":
                return last.attention.output.weight[...].astype(jnp.float32)
            case "layers.0.mlp.gate_up":
                return last.mlp.gate_up[...].astype(jnp.float32)
            case "layers.0.mlp.down":
                return last.mlp.down.weight[...].astype(jnp.float32)
            case "layers.0.hidden_norm":
                return last.attention_norm.weight[...].astype(jnp.float32)
            case "layers.0.mlp_norm":
                return last.mlp_norm.weight[...].astype(jnp.float32)
            case "layers.0.embedding_norm":
                return jnp.ones(shape)
        raise ValueError(path)

    def source(path: str, shape: tuple[int, ...], axes: Axes) -> jax.Array:
        return place(np.asarray(value(path, shape)), axes, mesh, rules)

    return Eagle3(source, config, rules)


def grow_vocabulary(head: Eagle3, target: Decoder, draft_ids: np.ndarray, mesh: Mesh | None = None) -> None:
    """Gives `head`, in place, the draft vocabulary `draft_ids` [Vd], which holds its own: rows of scores that are new are
    those of the target."""
    axes, rules = ("vocab", "embed"), ShardingRules()
    known = np.asarray(cast(nnx.Variable, head.target_ids)[...])
    rows = np.asarray(_scores(target, draft_ids)).copy()
    rows[np.searchsorted(draft_ids, known)] = np.asarray(head.head[...])
    head.head = nnx.Param(place(rows, axes, mesh, rules), logical_axes=axes)
    head.target_ids = nnx.Variable(place(draft_ids.astype(np.int32), (None,), mesh, rules))
    head.config = replace(head.config, draft_vocab_size=len(draft_ids))


def _scores(target: Decoder, draft_ids: np.ndarray) -> jax.Array:
    """[Vd, D] float32: the target's rows of scores."""
    scores = target.embedding if target.head is None else target.head
    return scores[...][draft_ids].astype(jnp.float32)
