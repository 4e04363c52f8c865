"""EAGLE draft heads: a layer or few that go on from the target's own hidden states (arXiv 2401.15077, 2503.01840).

Position t of the head takes the target's features g_t and the embedding of the NEXT token x_{t+1}; what comes out predicts
x_{t+2}. Further drafts take the head's own output in the place of features. Letters as in `decoder.py`; W is the width of
the target's features, Vd the draft vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ..cache import LayerCache, PagedCache
from ..config import EagleConfig
from ..kernels import matmul
from ..sharding import ShardingRules
from .decoder import Attention, Block, Decoder, Rows, SwiGLU
from .layers import Linear, RMSNorm, WeightSource, declare, rope_tables

Array = jax.Array


class EagleLayer(nnx.Module):
    """The first layer of an EAGLE-3 head: it attends with the embedding and the features side by side, normed apart, and
    adds to the features alone."""

    def __init__(self, source: WeightSource, path: str, config: EagleConfig, rules: ShardingRules):
        layer, D = config.layer, config.layer.hidden_size
        self.embedding_norm = RMSNorm(source, f"{path}.embedding_norm", D, layer.rms_norm_eps)
        self.hidden_norm = RMSNorm(source, f"{path}.hidden_norm", D, layer.rms_norm_eps)
        self.attention = Attention(source, f"{path}.attention", layer, rules, size_in=2 * D)
        self.mlp_norm = RMSNorm(source, f"{path}.mlp_norm", D, layer.rms_norm_eps)
        self.mlp = SwiGLU(source, f"{path}.mlp", layer)
        self.norm_before_residual = config.norm_before_residual

    def enter(self, hidden: Array, embedded: Array) -> tuple[Array, Array]:
        """[R, D] each -> the residual [R, D], and what attention takes [R, 2 D]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return residual, jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)

    def leave(self, residual: Array, attended: Array) -> Array:
        """[R, D] each -> [R, D]."""
        x = residual + attended
        return x + self.mlp(self.mlp_norm(x))


class EagleHead(nnx.Module):
    """What both kinds share: tokens are embedded by weights of the head's own, or by the target's."""

    target_ids: nnx.Variable | None
    """[Vd] int32: the target's ids of the draft vocabulary, where that is another."""

    def __init__(self, source: WeightSource, config: EagleConfig):
        shape = (config.layer.vocab_size, config.layer.hidden_size)
        self.embedding = declare(source, "embedding", shape, ("vocab", "embed")) if config.has_embedding else None
        self.config = config

    def embed(self, target: Decoder, tokens: Array) -> Array:
        """Token ids [B, T] -> [B, T, D]."""
        return target.embed(tokens) if self.embedding is None else self.embedding[...][tokens]

    def fuse(self, features: Array) -> Array:
        """The target's features [..., W] as the hidden states [..., D] that a pass takes."""
        raise NotImplementedError

    def __call__(
        self, hidden: Array, embedded: Array, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[Array, tuple[LayerCache, ...]]:
        """One pass over B slots of T rows, `hidden` and `embedded` [B, T, D]: fused features, or outputs of an earlier pass,
        and the tokens after them. Returns [B, T, D], which `logits` and the next pass take."""
        raise NotImplementedError

    def logits(self, target: Decoder, hidden: Array) -> Array:
        """Outputs [B, T, D] of a pass -> float32 scores [B, T, Vd] over the draft vocabulary."""
        raise NotImplementedError


class Eagle3(EagleHead):
    """An EAGLE-3 head: features of several target layers, its own scores over a draft vocabulary, and 3.1's variants.

    `fc_norm`: each captured layer is normed by itself. `norm_before_fc`: all of them as one. `norm_output`: what the next
    draft takes is normed.
    """

    def __init__(self, source: WeightSource, config: EagleConfig, rules: ShardingRules | None = None):
        super().__init__(source, config)
        layer, rules = config.layer, rules or ShardingRules()
        D, W, eps = layer.hidden_size, config.feature_size, layer.rms_norm_eps
        count = len(config.captured)
        self.fc_norms = (
            nnx.List([RMSNorm(source, f"fc_norm.{i}", W // count, eps) for i in range(count)])
            if config.fc_norm else None
        )  # fmt: skip
        self.input_norm = RMSNorm(source, "input_norm", W, eps) if config.norm_before_fc else None
        self.fc = Linear(source, "fc", W, D, ("embed", None), config.fc_bias)
        self.layer = EagleLayer(source, "layers.0", config, rules)
        self.more_layers = nnx.List([Block(source, f"layers.{i}", layer, rules) for i in range(1, layer.num_layers)])
        self.norm = RMSNorm(source, "norm", D, eps)
        self.head = declare(source, "head", (config.draft_vocab_size, D), ("vocab", "embed"))
        self.target_ids = (
            nnx.Variable(source("target_ids", (config.draft_vocab_size,), (None,)))
            if config.has_target_ids else None
        )  # fmt: skip

    def fuse(self, features: Array) -> Array:
        if self.fc_norms is not None:
            parts = jnp.split(features, len(self.fc_norms), axis=-1)
            features = jnp.concatenate([norm(x) for norm, x in zip(self.fc_norms, parts, strict=True)], axis=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        return self.fc(features.reshape(-1, features.shape[-1])).reshape(*features.shape[:-1], -1)

    def __call__(
        self, hidden: Array, embedded: Array, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[Array, tuple[LayerCache, ...]]:
        B, T, D = hidden.shape
        rope = rope_tables(self.config.layer, rows.positions.reshape(B * T))
        residual, x = self.layer.enter(hidden.reshape(B * T, D), embedded.reshape(B * T, D))
        attended, first = self.layer.attention(x, rope, rows, cache[0])
        x, written = self.layer.leave(residual, attended), [first]
        for block, layer_cache in zip(self.more_layers, cache[1:], strict=True):
            x, layer_cache = block(x, rope, rows, layer_cache)
            written.append(layer_cache)
        return self.finish(x).reshape(B, T, D), tuple(written)

    def finish(self, x: Array) -> Array:
        return self.norm(x) if self.config.norm_output else x

    def logits(self, target: Decoder, hidden: Array) -> Array:
        B, T, D = hidden.shape
        normed = hidden if self.config.norm_output else self.norm(hidden)
        return matmul(normed.reshape(B * T, D), self.head[...], jnp.float32).reshape(B, T, -1)


class Eagle1(EagleHead):
    """An EAGLE-1 head: it predicts the target's own last hidden states, and the target scores them."""

    def __init__(self, source: WeightSource, config: EagleConfig, rules: ShardingRules | None = None):
        super().__init__(source, config)
        layer, rules = config.layer, rules or ShardingRules()
        D = layer.hidden_size
        self.fc = Linear(source, "fc", 2 * D, D, ("embed", None), config.fc_bias)
        self.layers = nnx.List(
            [Block(source, f"layers.{i}", layer, rules, norms_input=i > 0) for i in range(layer.num_layers)]
        )
        self.target_ids = None

    def fuse(self, features: Array) -> Array:
        return features

    def __call__(
        self, hidden: Array, embedded: Array, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[Array, tuple[LayerCache, ...]]:
        """What comes out stands for the target's normed hidden states."""
        B, T, D = hidden.shape
        rope = rope_tables(self.config.layer, rows.positions.reshape(B * T))
        x = self.fc(jnp.concatenate([embedded, hidden], axis=-1).reshape(B * T, 2 * D))
        written = []
        for block, layer_cache in zip(self.layers, cache, strict=True):
            x, layer_cache = block(x, rope, rows, layer_cache)
            written.append(layer_cache)
        return x.reshape(B, T, D), tuple(written)

    def logits(self, target: Decoder, hidden: Array) -> Array:
        return target.logits(hidden)


def create_head(source: WeightSource, config: EagleConfig, rules: ShardingRules | None = None) -> EagleHead:
    return (Eagle1 if config.version == 1 else Eagle3)(source, config, rules)


def run_target(
    target: Decoder, head: EagleHead | None, tokens: Array, rows: Rows, cache: PagedCache
) -> tuple[Array, Array, PagedCache]:
    """A pass of the target that gives what `head` takes: `(hidden [B, T, D], features [B, T, W], cache)`.

    EAGLE-1 takes the normed hidden states themselves; without a head nobody reads the features."""
    if head is None or head.config.version == 1:
        hidden, cache = target(tokens, rows, cache)
        return hidden, hidden, cache
    return target.with_features(tokens, rows, cache, head.config.captured)
