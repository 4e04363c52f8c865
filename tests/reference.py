"""Independent oracles: a decoder and a speculative loop in plain float64 NumPy, without a cache and without batches."""

from collections.abc import Callable

import numpy as np

from spec_jax.models.decoder import Decoder


def hf_weights(decoder: Decoder) -> dict[str, np.ndarray]:
    """The decoder's weights under their Hugging Face names, split as checkpoints have them."""
    c = decoder.config
    weights = {
        "model.embed_tokens.weight": np.asarray(decoder.embedding[...]),
        "model.norm.weight": np.asarray(decoder.norm.weight[...]),
    }
    if decoder.head is not None:
        weights["lm_head.weight"] = np.asarray(decoder.head[...])
    for i, block in enumerate(decoder.layers):
        at = f"model.layers.{i}."
        grouped = np.asarray(block.attention.qkv.weight[...]).reshape(
            c.num_kv_heads, c.queries_per_kv + 2, c.head_dim, c.hidden_size
        )
        weights |= {
            at + "input_layernorm.weight": np.asarray(block.attention_norm.weight[...]),
            at + "self_attn.q_proj.weight": grouped[:, :-2].reshape(-1, c.hidden_size),
            at + "self_attn.k_proj.weight": grouped[:, -2].reshape(-1, c.hidden_size),
            at + "self_attn.v_proj.weight": grouped[:, -1].reshape(-1, c.hidden_size),
            at + "self_attn.o_proj.weight": np.asarray(block.attention.output.weight[...]),
            at + "post_attention_layernorm.weight": np.asarray(block.mlp_norm.weight[...]),
            at + "mlp.gate_proj.weight": np.asarray(block.mlp.gate_up[...])[:, 0],
            at + "mlp.up_proj.weight": np.asarray(block.mlp.gate_up[...])[:, 1],
            at + "mlp.down_proj.weight": np.asarray(block.mlp.down.weight[...]),
        }
    return weights


class ReferenceModel:
    """A Llama forward pass over a whole text, in float64 (arXiv 2302.13971).

    `store(kind, layer, rows)` is what a cache makes of the rotated keys ("k") or the values ("v") [n, K, hd].
    """

    def __init__(
        self, decoder: Decoder, store: Callable[[str, int, np.ndarray], np.ndarray] = lambda _k, _l, rows: rows
    ):
        self.config, self.store = decoder.config, store
        self.w = {name: value.astype(np.float64) for name, value in hf_weights(decoder).items()}

    def logits(self, tokens: list[int]) -> np.ndarray:  # [len(tokens), V]
        w = self.w
        return self.normed(tokens) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T

    def normed(self, tokens: list[int]) -> np.ndarray:
        """The hidden states [len(tokens), D] that are scored."""
        return self._norm(self.states(tokens)[-1], self.w["model.norm.weight"])

    def states(self, tokens: list[int]) -> list[np.ndarray]:
        """The hidden states [len(tokens), D] that go into each layer, and those that come out of the last one."""
        c, w, n, norm = self.config, self.w, len(tokens), self._norm
        x = w["model.embed_tokens.weight"][tokens]
        states = [x]
        angles = np.arange(n)[:, None] * c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

        def rope(x):
            a, b = np.split(x, 2, -1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        for i in range(c.num_layers):
            p = {key.split(f"layers.{i}.")[1]: value for key, value in w.items() if f"layers.{i}." in key}
            h = norm(x, p["input_layernorm.weight"])
            q, k, v = ((h @ p[f"self_attn.{t}_proj.weight"].T).reshape(n, -1, c.head_dim) for t in "qkv")
            k, v = self.store("k", i, rope(k)), self.store("v", i, v)
            k, v = (np.repeat(t, c.queries_per_kv, axis=1) for t in (k, v))
            scores = np.einsum("qhd,khd->hqk", rope(q), k) / np.sqrt(c.head_dim)
            scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1) @ p["self_attn.o_proj.weight"].T
            h = norm(x, p["post_attention_layernorm.weight"])
            gate, up = h @ p["mlp.gate_proj.weight"].T, h @ p["mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ p["mlp.down_proj.weight"].T
            states.append(x)
        return states

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.config.rms_norm_eps) * weight

    def greedy(self, prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
        text = list(prompt)
        while len(text) < len(prompt) + max_tokens:
            text.append(int(self.logits(text)[-1].argmax()))
            if text[-1] in stop_ids:
                break
        return text[len(prompt) :]


def ngram_draft(text: list[int], k: int, shortest: int = 1, longest: int = 3) -> tuple[list[int], int]:
    """What followed the latest earlier occurrence of the longest suffix, and the length of that suffix."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return [text[end + i % (len(text) - end)] for i in range(k)], n
    return [], 0
