"""One decoder for the Llama family: Llama, Mistral, Qwen2 and Qwen3 are configurations of it.

Activations are flat, `[R, D]` with R = B slots x T rows: matrix products see one large row axis. Letters in shapes:
B slots, T rows per slot, D hidden, H heads, K KV heads, G query heads per KV head, F feed-forward, V vocabulary, P pages.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..cache import PAGE_AXES, LayerCache, PagedCache
from ..config import ModelConfig
from ..kernels import Pages, matmul, paged_attention, write_kv
from ..sharding import ShardingRules
from .layers import Linear, RMSNorm, WeightSource, apply_rope, declare, rope_tables

Array = jax.Array


class Rows(NamedTuple):
    """Where the rows of one pass stand: what attention and cache writes need to know besides the activations."""

    positions: Array  # [B, T] int32, absolute
    block_tables: Array  # [B, N] int32
    keep: Array  # [B, T] bool: rows whose KV is stored; the others go to the scratch page


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache.

    The fused projection holds, for each KV head, its G query heads, then its key, then its value: a share of KV heads is
    one contiguous share of rows, so that tensor parallelism cuts one axis.
    """

    def __init__(
        self, source: WeightSource, path: str, config: ModelConfig, rules: ShardingRules, size_in: int | None = None
    ):
        """`size_in` channels come in, where they are not those of the residual stream."""
        K, G, hd, D = config.num_kv_heads, config.queries_per_kv, config.head_dim, config.hidden_size
        self.qkv = Linear(source, f"{path}.qkv", size_in or D, K * (G + 2) * hd, ("heads", "embed"), config.qkv_bias)
        self.output = Linear(source, f"{path}.output", K * G * hd, D, ("embed", "heads"), config.attention_output_bias)
        self.q_norm = RMSNorm(source, f"{path}.q_norm", hd, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(source, f"{path}.k_norm", hd, config.rms_norm_eps) if config.qk_norm else None
        # What calibration found for a float8 cache, where the checkpoint says it.
        self.k_scale = declare(source, f"{path}.k_scale", (), ()) if config.has_kv_scales else None
        self.v_scale = declare(source, f"{path}.v_scale", (), ()) if config.has_kv_scales else None
        self.config, self.rules = config, rules

    def __call__(self, x: Array, rope: tuple[Array, Array], rows: Rows, cache: LayerCache) -> tuple[Array, LayerCache]:
        config = self.config
        B, T = rows.positions.shape
        K, G, hd = config.num_kv_heads, config.queries_per_kv, config.head_dim

        q, k, v = self.project(x, rope)
        q, k, v = q.reshape(B, T, K * G, hd), k.reshape(B, T, K, hd), v.reshape(B, T, K, hd)
        scales = {}
        if self.k_scale is not None and self.v_scale is not None:
            scales = {"k_scale": self.k_scale[...], "v_scale": self.v_scale[...]}
        attended, cache = self._by_heads(self._attend)(q, k, v, cache, rows, scales)
        return self.output(attended.reshape(B * T, K * G * hd)), cache

    def project(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Queries [R, K, G, hd], keys and values [R, K, hd] of `x` [R, in], rotated."""
        K, G, hd = self.config.num_kv_heads, self.config.queries_per_kv, self.config.head_dim
        qkv = self.qkv(x).reshape(-1, K, G + 2, hd)
        q, k, v = qkv[:, :, :G], qkv[:, :, G], qkv[:, :, G + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rope(q, *rope), apply_rope(k, *rope), v

    def _attend(
        self, q: Array, k: Array, v: Array, cache: LayerCache, rows: Rows, scales: dict[str, Array]
    ) -> tuple[Array, LayerCache]:
        """The pass writes before it reads: each row then sees itself and the drafts before it.

        What is no number is not kept: a masked key still counts 0 times its value, and 0 times NaN would reach whoever gets
        the page next."""
        k, v = (jnp.where(jnp.isfinite(x), x, 0) for x in (k, v))
        k_pages, v_pages = write_kv(
            cache.k, cache.v, k, v, rows.block_tables, rows.positions, rows.keep,
            k_scale=scales.get("k_scale"), v_scale=scales.get("v_scale"),
        )  # fmt: skip
        attended = paged_attention(
            q, k_pages, v_pages, rows.block_tables, rows.positions,
            scale=self.config.head_dim**-0.5, sliding_window=self.config.sliding_window,
        )  # fmt: skip
        return attended, LayerCache(k_pages, v_pages)

    def _by_heads(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        """On a mesh, every device attends with its own KV heads and pages: the compiler cannot cut a kernel by itself."""
        if jax.sharding.get_abstract_mesh().empty:
            return attend
        heads = self.rules.spec((None, None, "kv_heads", None))
        pages = Pages(*(self.rules.spec(axes) for axes in PAGE_AXES))
        cache = LayerCache(pages, pages)
        whole = PartitionSpec()
        return jax.shard_map(
            attend, in_specs=(heads, heads, heads, cache, whole, whole), out_specs=(heads, cache), check_vma=False
        )


class SwiGLU(nnx.Module):
    """`down(silu(gate x) * up x)` (arXiv 2002.05202); gate and up are one weight [F, 2, D], read as one matrix.

    (A contraction over the three-axis weight would make XLA:CPU transpose it first. F stands first, so that a share of it
    is a share of the matrix's rows: with 2 first, every device would gather the whole weight in every pass.)
    """

    def __init__(self, source: WeightSource, path: str, config: ModelConfig):
        F, D = config.ffn_size, config.hidden_size
        self.gate_up = declare(source, f"{path}.gate_up", (F, 2, D), ("ffn", None, "embed"))
        self.gate_up_bias = declare(source, f"{path}.gate_up.bias", (F, 2), ("ffn", None)) if config.mlp_bias else None
        self.down = Linear(source, f"{path}.down", F, D, ("embed", "ffn"), config.mlp_bias)

    def __call__(self, x: Array) -> Array:  # [R, D] -> [R, D]
        F, _, D = self.gate_up.shape
        y = matmul(x, self.gate_up[...].reshape(2 * F, D)).reshape(-1, F, 2)
        if self.gate_up_bias is not None:
            y = y + self.gate_up_bias[...]
        return self.down(jax.nn.silu(y[:, :, 0]) * y[:, :, 1])


class Block(nnx.Module):
    """One layer: attention and feed-forward, each behind its own norm, both added to the residual stream.

    `mlp` is any map [R, D] -> [R, D]; a mixture of experts takes its place without another change.
    """

    def __init__(
        self, source: WeightSource, path: str, config: ModelConfig, rules: ShardingRules, norms_input: bool = True
    ):
        self.attention_norm = (
            RMSNorm(source, f"{path}.attention_norm", config.hidden_size, config.rms_norm_eps) if norms_input else None
        )
        self.attention = Attention(source, f"{path}.attention", config, rules)
        self.mlp_norm = RMSNorm(source, f"{path}.mlp_norm", config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(source, f"{path}.mlp", config)

    def __call__(self, x: Array, rope: tuple[Array, Array], rows: Rows, cache: LayerCache) -> tuple[Array, LayerCache]:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        attended, cache = self.attention(normed, rope, rows, cache)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


@jax.jit
def _run_block(
    block: Block, x: Array, rope: tuple[Array, Array], rows: Rows, cache: LayerCache
) -> tuple[Array, LayerCache]:
    """All layers have the same shapes: under a jit of its own a block is traced and lowered once, not once per layer.
    The compiler inlines the calls, so that the layers are unrolled all the same."""
    return block(x, rope, rows, cache)


class Decoder(nnx.Module):
    """The target model: token ids in, hidden states and a written cache out; logits on request.

    `rules` are those by which `source` places the weights on a mesh.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, rules: ShardingRules | None = None):
        V, D = config.vocab_size, config.hidden_size
        self.embedding = declare(source, "embedding", (V, D), ("vocab", "embed"))
        self.layers = nnx.List(
            [Block(source, f"layers.{i}", config, rules or ShardingRules()) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(source, "norm", D, config.rms_norm_eps)
        self.head = None if config.tie_word_embeddings else declare(source, "head", (V, D), ("vocab", "embed"))
        self.config = config

    def __call__(self, tokens: Array, rows: Rows, cache: PagedCache) -> tuple[Array, PagedCache]:
        """One pass over `tokens` [B, T]; returns the normed hidden states [B, T, D] and the cache with their KV."""
        hidden, _, cache = self.with_features(tokens, rows, cache, ())
        return hidden, cache

    def with_features(
        self, tokens: Array, rows: Rows, cache: PagedCache, captured: tuple[int, ...]
    ) -> tuple[Array, Array, PagedCache]:
        """The same pass, and between the two the hidden states [B, T, len(captured) x D] that go into the layers `captured`
        (`num_layers`: that come out of the last one, not yet normed)."""
        B, T = tokens.shape
        x = self.embed(tokens).reshape(B * T, -1)
        rope = rope_tables(self.config, rows.positions.reshape(B * T))
        states, layers = [x], []
        for block, layer_cache in zip(self.layers, cache.layers, strict=True):
            x, layer_cache = _run_block(block, x, rope, rows, layer_cache)
            states.append(x)
            layers.append(layer_cache)
        features = jnp.concatenate([x[:, :0], *(states[i] for i in captured)], axis=-1)
        return self.norm(x).reshape(B, T, -1), features.reshape(B, T, -1), cache._replace(layers=tuple(layers))

    def embed(self, tokens: Array) -> Array:
        """Token ids [B, T] -> [B, T, D]."""
        return self.embedding[...][tokens]

    def logits(self, hidden: Array) -> Array:
        """Hidden states [B, T, D] -> float32 scores [B, T, V]."""
        B, T, D = hidden.shape
        head = self.embedding[...] if self.head is None else self.head[...]
        return matmul(hidden.reshape(B * T, D), head, jnp.float32).reshape(B, T, -1)
