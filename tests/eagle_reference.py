"""An independent oracle for EAGLE heads: float64 NumPy over a whole text, by the names and formulas they are published with.

EAGLE-3 (arXiv 2503.01840, SafeAILab's cnets.py): `r = h`, `x = [norm(e), norm(h)]`, `h = r + attention(x)`,
`h = h + mlp(norm(h))`, scores `lm_head norm(h)`. EAGLE-1 (arXiv 2401.15077): `x = fc [e, h]`, a layer without its first
norm, and the target's scores. e are the embeddings of the NEXT tokens.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.cache import abstract_cache, create_cache
from spec_jax.config import EagleConfig
from spec_jax.models.decoder import Decoder, Rows
from spec_jax.models.eagle import EagleHead

PAGE_SIZE = 4
TABLE = [5, 2, 7, 1, 8, 3, 6, 4]  # pages out of order


def random_tensors(config: EagleConfig, seed: int = 0, layer0: str = "layers.0.") -> dict[str, np.ndarray]:
    """Float32 tensors of a head with published names and shapes; the first layer's begin with `layer0`."""
    layer, random = config.layer, np.random.default_rng(seed)
    D, F, q, kv = (
        layer.hidden_size,
        layer.ffn_size,
        layer.num_heads * layer.head_dim,
        layer.num_kv_heads * layer.head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {}
    if config.version == 3:
        shapes |= {
            "fc.weight": (D, config.feature_size),
            "norm.weight": (D,),
            "lm_head.weight": (config.draft_vocab_size, D),
        }
        if config.norm_before_fc:
            shapes["input_norm.weight"] = (config.feature_size,)
        if config.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(len(config.captured))}
    else:
        shapes["fc.weight"] = (D, 2 * D)
    if config.fc_bias:
        shapes["fc.bias"] = (D,)
    if config.has_embedding:
        shapes["embed_tokens.weight"] = (layer.vocab_size, D)
    for i in range(layer.num_layers):
        at, width = (layer0, 2 * D if config.version == 3 else D) if i == 0 else (f"layers.{i}.", D)
        shapes |= {
            at + "self_attn.q_proj.weight": (q, width), at + "self_attn.k_proj.weight": (kv, width),
            at + "self_attn.v_proj.weight": (kv, width), at + "self_attn.o_proj.weight": (D, q),
            at + "post_attention_layernorm.weight": (D,), at + "mlp.gate_proj.weight": (F, D),
            at + "mlp.up_proj.weight": (F, D), at + "mlp.down_proj.weight": (D, F),
        }  # fmt: skip
        if i > 0 or config.version == 3:
            shapes[at + "input_layernorm.weight"] = (D,)
        if i == 0 and config.version == 3:
            shapes[at + "hidden_norm.weight"] = (D,)
    tensors = {}
    for name, shape in shapes.items():
        noise = random.normal(size=shape)
        is_norm = "norm" in name.split(".")[-2] or name.startswith("fc_norm")
        tensors[name] = (1 + 0.1 * noise if is_norm else noise * shape[-1] ** -0.5).astype(np.float32)
    if config.has_target_ids:
        ids = np.sort(random.permutation(layer.vocab_size)[: config.draft_vocab_size])
        tensors["d2t"] = ids - np.arange(len(ids))
    return tensors


class ReferenceHead:
    """A head from its published tensors. `embedding` and `scores` [V, D] are the target's."""

    def __init__(
        self,
        config: EagleConfig,
        tensors: dict[str, np.ndarray],
        embedding: np.ndarray,
        scores: np.ndarray | None = None,
    ):
        self.config = config
        self.w = {name.replace("midlayer.", "layers.0."): value.astype(np.float64) for name, value in tensors.items()}
        self.embedding = self.w.get("embed_tokens.weight", np.asarray(embedding, np.float64))
        self._target_scores = scores
        size = config.draft_vocab_size
        self.target_ids = np.arange(size) + tensors["d2t"] if "d2t" in tensors else np.arange(size)

    def fuse(self, features: np.ndarray) -> np.ndarray:
        """Captured hidden states side by side, [n, W], as what a pass takes, [n, D]."""
        if self.config.version == 1:
            return features
        if "fc_norm.0.weight" in self.w:
            parts = np.split(features, len(self.config.captured), axis=-1)
            parts = [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
            features = np.concatenate(parts, axis=-1)
        if "input_norm.weight" in self.w:
            features = self._norm(features, "input_norm.weight")
        return self._linear(features, "fc")

    def run(self, hidden: np.ndarray, following: list[int]) -> np.ndarray:
        """All positions at once: `hidden` [n, D] and the token after each of them -> outputs [n, D]."""
        embedded = self.embedding[np.asarray(following)]
        if self.config.version == 1:
            x = self._linear(np.concatenate([embedded, hidden], axis=-1), "fc")
            x = x + self._attention(x, "layers.0.")
        else:
            normed = self._norm(hidden, "layers.0.hidden_norm.weight")
            x = np.concatenate([self._norm(embedded, "layers.0.input_layernorm.weight"), normed], axis=-1)
            x = (normed if self.config.norm_before_residual else hidden) + self._attention(x, "layers.0.")
        x = x + self._mlp(self._norm(x, "layers.0.post_attention_layernorm.weight"), "layers.0.")
        for i in range(1, self.config.layer.num_layers):
            at = f"layers.{i}."
            x = x + self._attention(self._norm(x, at + "input_layernorm.weight"), at)
            x = x + self._mlp(self._norm(x, at + "post_attention_layernorm.weight"), at)
        return self._norm(x, "norm.weight") if self.config.norm_output else x

    def scores(self, output: np.ndarray) -> np.ndarray:
        """Outputs [n, D] -> scores [n, Vd]."""
        if self.config.version == 1:
            assert self._target_scores is not None
            return output @ np.asarray(self._target_scores, np.float64).T
        normed = output if self.config.norm_output else self._norm(output, "norm.weight")
        return normed @ self.w["lm_head.weight"].T

    def draft(self, features: np.ndarray, text: list[int], num_tokens: int, noise=None) -> list[int]:
        """Tokens after `text`, from the target's features of all its tokens but the last. Each step takes the output before
        it, as it is. `noise(position)` [V], where given, is added to the scores."""
        return self.draft_with_confidence(features, text, num_tokens, noise)[0]

    def draft_with_confidence(self, features: np.ndarray, text: list[int], num_tokens: int, noise=None):
        """`draft`, and the probability that the head gives its best token at each step."""
        hidden, following = self.fuse(features), list(text[1:])
        drafts: list[int] = []
        best: list[float] = []
        for _ in range(num_tokens):
            output = self.run(hidden, following)[-1:]
            scores = self.scores(output)[0]
            best.append(float(1 / np.exp(scores - scores.max()).sum()))
            if noise is not None:
                scores = scores + noise(len(text) + len(drafts))[self.target_ids]
            drafts.append(int(self.target_ids[scores.argmax()]))
            hidden, following = np.concatenate([hidden, output]), [*following, drafts[-1]]
        return drafts, best

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.config.layer.rms_norm_eps) * self.w[name]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def _mlp(self, x: np.ndarray, at: str) -> np.ndarray:
        gate, up = self._linear(x, at + "mlp.gate_proj"), self._linear(x, at + "mlp.up_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * up, at + "mlp.down_proj")

    def _attention(self, x: np.ndarray, at: str) -> np.ndarray:
        layer, n = self.config.layer, len(x)
        q, k, v = (self._linear(x, f"{at}self_attn.{t}_proj").reshape(n, -1, layer.head_dim) for t in "qkv")
        angles = np.arange(n)[:, None] * layer.rope_theta ** (-np.arange(0, layer.head_dim, 2) / layer.head_dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

        def rotate(x):
            a, b = np.split(x, 2, -1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        k, v = (np.repeat(t, layer.num_heads // layer.num_kv_heads, axis=1) for t in (rotate(k), v))
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) / np.sqrt(layer.head_dim)
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self._linear(np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1), at + "self_attn.o_proj")


def run_head(head: EagleHead, target: Decoder, features, following, *cuts: Iterable[int]) -> list[np.ndarray]:
    """Ours over one text through a paged cache: `[outputs [n, D], scores [n, Vd]]`, for each of `cuts` one after the other.

    A cut is the sizes of all passes but the last. Passes are padded to one width with rows that are not kept.
    """
    n, dtype = len(following), head.fc.weight[...].dtype

    @jax.jit
    def one_pass(features, following, start, count, cache):
        index = jnp.arange(n)
        rows = Rows((start + index)[None], jnp.asarray([TABLE]), (index < count)[None])
        output, cache = head(head.fuse(features), head.embed(target, following), rows, cache)
        return output[0].astype(jnp.float32), head.logits(target, output)[0], cache

    found = []
    for cut in cuts or [[]]:
        cache = create_cache(abstract_cache(head.config.layer, len(TABLE) + 1, PAGE_SIZE, dtype)).layers
        outputs, scores = [], []
        for chunk in np.split(np.arange(n), np.cumsum([*cut])):
            padded = np.resize(chunk, n)
            taken = jnp.asarray(features[padded], dtype)[None], jnp.asarray(np.asarray(following)[padded])[None]
            output, score, cache = one_pass(*taken, chunk[0], len(chunk), cache)
            outputs.append(np.asarray(output)[: len(chunk)])
            scores.append(np.asarray(score)[: len(chunk)])
        found += [np.concatenate(outputs), np.concatenate(scores)]
    return found
