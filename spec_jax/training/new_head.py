"""An untrained EAGLE-3 head that starts from its target."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    scores = target.embedding if target.head is None else target.head

    def value(path: str, shape: tuple[int, ...]) -> jax.Array:
        def near_zero() -> jax.Array:
            return jnp.asarray(noise.normal(0, 0.02, shape), jnp.float32)

        match path:
            case "target_ids":
                return jnp.asarray(draft_ids, jnp.int32)
            case "head":
                return scores[...][draft_ids].astype(jnp.float32)
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
