"""The static sizes of an engine's programs: what is rounded up to what, so that few programs serve every request."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .cache import PagedCache, abstract_cache
from .config import DraftConfig, EngineConfig, ModelConfig
from .decode_loop import BurstShape, DecodeState, create_state
from .kernels import paged_attention, runs
from .sharding import ShardingRules, target_device, use_mesh

_PAGE_SIZE = 16
_GPU_PAGE_SIZE = 64  # one tile of the Mosaic kernel, one copy each of keys and values


class Sizes:
    """Sizes for one model, drafter and mesh. `dtype` is that of weights and activations.

    Programs whose attention gathers pages come for several lengths of the context; Mosaic and native kernels read only the
    pages that are in use, so there one program serves all.
    """

    def __init__(
        self, model: ModelConfig, draft: DraftConfig, config: EngineConfig, dtype: str, mesh: Mesh | None = None
    ):
        self.model, self.draft, self.config, self.dtype = model, draft, config, dtype
        self.cache_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        self.platform = target_device(mesh).platform
        self.page_size = config.page_size or (_PAGE_SIZE if self.platform == "cpu" else _GPU_PAGE_SIZE)
        self.max_pages = -(-config.max_model_len // self.page_size)
        self.num_pages = 1 + -(-(config.num_kv_tokens or _default_kv_tokens(config)) // self.page_size)
        with use_mesh(mesh):
            self.attention_is_mosaic = self._attention_runs("mosaic")
            self._attention_reads_pages = self.attention_is_mosaic or self._attention_runs("native")

    def for_one_prompt(self, mesh: Mesh) -> "Sizes":
        """The same on another mesh, with room for one sequence and the same pages."""
        config = replace(self.config, num_kv_tokens=self.max_pages * self.page_size, page_size=self.page_size)
        return Sizes(self.model, self.draft, config, self.dtype, mesh)

    def cache(self, mesh: Mesh | None, rules: ShardingRules | None) -> PagedCache:
        """Shapes of the cache."""
        return abstract_cache(
            self.model, self.num_pages, self.page_size, self.cache_dtype, mesh, rules, self.draft.head
        )  # fmt: skip

    def create_state(self) -> DecodeState:
        """All slots empty."""
        config = self.config
        return create_state(
            config.max_num_seqs, config.max_model_len + self.draft.num_tokens, self.max_pages, config.max_stop_ids,
            self.draft.num_tokens, (config.max_bad_words, config.max_bad_word_tokens), self.draft_hidden,
        )  # fmt: skip

    @property
    def draft_hidden(self) -> jax.ShapeDtypeStruct:
        """What a draft head keeps for a slot, [D]; D is 0 without a head."""
        head = self.draft.head
        return jax.ShapeDtypeStruct((0 if head is None else head.layer.hidden_size,), jnp.dtype(self.dtype))

    def rounds(self, streams: bool) -> int:
        return self.config.rounds_per_burst_streaming if streams else self.config.rounds_per_burst

    def growth(self, rounds: int) -> int:
        """Most tokens that a slot can gain in so many rounds."""
        return rounds * (self.draft.num_tokens + 1)

    def chunks(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """How positions `start .. end - 1` of a prompt are cut: first position, number of tokens, size of the program."""
        sizes = self.config.prefill_chunks
        while start < end:
            size = next((s for s in sizes if s >= end - start), sizes[-1])
            count = min(size, end - start)
            yield start, count, size
            start += count

    def num_slots(self, needed: int) -> int:
        """Rounded up to one of a few sizes: each size is a program."""
        return min(_power_of_two(needed), self.config.max_num_seqs)

    def page_bucket(self, num_tokens: int) -> int:
        """Pages for a context of `num_tokens`, rounded up to one of a few sizes: each size is a program."""
        if self._attention_reads_pages:
            return self.max_pages
        bucket = max(self.config.min_context_bucket, _power_of_two(num_tokens))
        return min(-(-bucket // self.page_size), self.max_pages)

    def burst(
        self, num_slots: int, num_running: int, longest: int, has_processors: bool, is_constrained: bool
    ) -> BurstShape:
        """The burst for the first `num_slots` slots, of which `num_running` run and none holds more than `longest` tokens
        after it."""
        num_slots = self.num_slots(num_slots)
        draft = self.draft.at_load(num_running)
        widths = self._row_widths(num_slots, draft.num_tokens)
        return BurstShape(
            draft=draft,
            num_slots=num_slots,
            num_pages=self.page_bucket(longest),
            rounds_capacity=max(self.rounds(True), self.rounds(False)),
            row_widths=widths,
            num_weak_drafts=min(widths[0] - 1, draft.num_tokens),
            head_rows=self._least_rows(num_slots),
            has_processors=has_processors,
            is_constrained=is_constrained,
        )

    def _row_widths(self, num_slots: int, num_draft_tokens: int) -> tuple[int, ...]:
        """On a CPU rows cost time, so rounds without drafts run narrow, and those with few of them in between; but each
        width is compiled, which is too much where there are programs for several lengths of the context as well."""
        full = num_draft_tokens + 1
        if self.platform != "cpu":
            return (full,)
        narrow = self._least_rows(num_slots)
        if full <= narrow:
            return (narrow,)
        middle = max(narrow, full // 2) if self._attention_reads_pages else full
        return tuple(sorted({narrow, middle, full}))

    def _least_rows(self, num_slots: int) -> int:
        """One lone bfloat16 row is pathological on a CPU where XLA multiplies: 7 x slower than two, as it takes another path
        for a matrix times a vector. Native kernels take as long for two rows as for one."""
        return 2 if self.platform == "cpu" and num_slots == 1 else 1

    def _attention_runs(self, implementation: str) -> bool:
        """That of the model, and of its draft head where there is one: both read the same block tables."""
        cache = self.cache(None, None)
        layers = [(self.model, cache.layers[0])]
        if self.draft.head is not None:
            layers.append((self.draft.head.layer, cache.draft[0]))
        rows = (self.config.max_num_seqs, self.draft.num_tokens + 1)
        return all(
            runs(
                implementation, partial(paged_attention, scale=1.0),
                jax.ShapeDtypeStruct((*rows, layer.num_heads, layer.head_dim), jnp.dtype(self.dtype)), pages.k, pages.k,
                jax.ShapeDtypeStruct((rows[0], self.max_pages), jnp.int32), jax.ShapeDtypeStruct(rows, jnp.int32),
            )
            for layer, pages in layers
        )  # fmt: skip


def _default_kv_tokens(config: EngineConfig) -> int:
    """Room for the longest text, and for several usual ones."""
    return max(config.max_model_len, min(config.max_num_seqs * config.max_model_len, 16_384))


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
