"""The compiled programs of an engine, each compiled ahead of its first call from shapes alone.

A program is found by its static sizes, so that nothing is ever compiled behind one's back: other shapes than the ones
compiled for are an error, and `num_compilations` says how many there are.
"""

from collections.abc import Callable, Hashable
from functools import partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .compilation import compiler_options, matmul_precision
from .decode_loop import BurstShape, Constraint, decode_burst, draft, verify
from .models.decoder import Decoder
from .models.eagle import EagleHead, create_head
from .models.layers import abstract_weights
from .prefill import prefill_chunk
from .sharding import ShardingRules, use_mesh
from .sizes import Sizes

_SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


class Program:
    """One program: lowered when it is made, compiled at its first call, or before by whoever calls `compile`."""

    def __init__(self, lowered: jax.stages.Lowered, options: dict[str, Any] | None):
        self._lowered: jax.stages.Lowered | None = lowered
        self._options = options
        self._compiled: jax.stages.Compiled | None = None
        self._lock = Lock()

    def compile(self, more_options: dict[str, Any] | None = None) -> jax.stages.Compiled:
        """Safe to call from any thread; the compiler itself does not hold Python's lock."""
        with self._lock:
            if self._compiled is None:
                assert self._lowered is not None
                self._compiled = self._lowered.compile(compiler_options=(self._options or {}) | (more_options or {}))
                self._lowered = None
            return self._compiled

    def __call__(self, *args: Any) -> Any:
        return (self._compiled or self.compile())(*args)


class Programs:
    """Prefill, burst, insert and the like for one model, cache and state.

    Weights go in as flat leaves; cache and state are donated and come back. All of it is made from shapes alone: programs
    can be prepared while weights are still being read, and compiled for machines that are not there. `weights`, `cache`,
    `state` and `token_bias` are those shapes.
    """

    def __init__(self, sizes: Sizes, mesh: Mesh | None = None, rules: ShardingRules | None = None):
        self._mesh, self._dtype = mesh, sizes.dtype
        self._options = compiler_options(mesh)
        self._replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        source = abstract_weights(sizes.dtype, mesh, rules)
        head = sizes.draft.head
        modules = [Decoder(source, sizes.model, rules)] + ([] if head is None else [create_head(source, head, rules)])
        graphs, states = zip(*(nnx.split(module) for module in modules), strict=True)
        self.weights, tree = jax.tree.flatten(states)
        self._merge = partial(_merge, graphs, tree)
        self.cache = sizes.cache(mesh, rules)
        self.state = jax.tree.map(self._whole, jax.eval_shape(sizes.create_state))
        self.token_bias = self._whole(
            jax.ShapeDtypeStruct((sizes.config.max_num_seqs, sizes.model.vocab_size), jnp.float32)
        )
        self._known: dict[Hashable, Program] = {}

    @property
    def num_compilations(self) -> int:
        return len(self._known)

    def prefill(self, chunk: int, num_pages: int, has_logprobs: bool) -> "Program":
        """`(weights, cache, tokens [chunk], following [chunk], start, count, block_table [num_pages]) -> (cache,
        PrefillOutput)`."""

        def run(weights, cache, *arguments):
            model, head = self._merge(weights)
            return prefill_chunk(model, cache, *arguments, has_logprobs=has_logprobs, head=head)

        row = self._row(chunk)
        return self._get(
            ("prefill", chunk, num_pages, has_logprobs), run, (1,), (self._at(self.cache), self._replicated),
            self.weights, self.cache, row, row, _SCALAR, _SCALAR, self._row(num_pages),
        )  # fmt: skip

    def take_pages(self, num_pages: int) -> "Program":
        """`(cache, pages [num_pages]) -> PagedCache` of those pages alone."""

        def run(cache, pages):
            return jax.tree.map(lambda x: x[pages], cache)

        return self._get(
            ("take_pages", num_pages), run, (), self._at(self.cache), self.cache, self._row(num_pages)
        )  # fmt: skip

    def put_pages(self, num_pages: int) -> "Program":
        """`(cache, PagedCache of num_pages pages, pages [num_pages]) -> cache` with those pages written."""

        def run(cache, moved, pages):
            return jax.tree.map(lambda x, new: x.at[pages].set(new), cache, moved)

        moved = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_pages, *x.shape[1:]), x.dtype, sharding=x.sharding), self.cache
        )
        return self._get(
            ("put_pages", num_pages), run, (0,), self._at(self.cache), self.cache, moved, self._row(num_pages)
        )  # fmt: skip

    def burst(self, shape: BurstShape) -> "Program":
        """`(weights, cache, state, token_bias, max_rounds, Constraint or None) -> (cache, state, BurstOutput)`."""

        def run(weights, cache, state, bias, max_rounds, constraint):
            model, head = self._merge(weights)
            return decode_burst(model, cache, state, bias, max_rounds, shape, constraint, head)

        def array(dtype: Any, *sizes: int) -> Any:
            return jax.ShapeDtypeStruct((shape.num_slots, *sizes), dtype)

        K = shape.draft.num_tokens
        constraint = Constraint(
            is_constrained=array(jnp.bool_), is_ready=array(jnp.bool_), drafts=array(jnp.int32, K),
            num_drafts=array(jnp.int32), allowed=array(jnp.uint32, K + 1, -(-self.token_bias.shape[1] // 32)),
        )  # fmt: skip
        return self._get(
            ("burst", shape), run, (1, 2), (self._at(self.cache), self._at(self.state), self._replicated),
            self.weights, self.cache, self.state, self.token_bias, _SCALAR, constraint if shape.is_constrained else None,
        )  # fmt: skip

    def round_part(self, shape: BurstShape, part: str) -> "Program":
        """`(weights, cache, state, times) -> (cache, Any)`: a piece of a round, `times` over, to be timed on empty slots.

        "draft" proposes where no n-gram is found; "target" is the target's pass alone; "verify" the same with a head's
        entries behind it. In a loop, as a burst has it: elsewhere XLA may copy the cache around a branch."""

        def run(weights, cache, state, times):
            model, head = self._merge(weights)
            slots = jax.tree.map(lambda x: x[: shape.num_slots], state)
            full = jnp.full_like(slots.length, shape.draft.num_tokens)
            slots = slots._replace(
                tokens=jnp.broadcast_to(jnp.arange(slots.tokens.shape[1], dtype=jnp.int32), slots.tokens.shape),
                active=full >= 0, max_length=full + slots.tokens.shape[1],
                block_tables=slots.block_tables[:, : shape.num_pages],
            )  # fmt: skip

            def once(number, cache):
                # Each time from elsewhere, so that nothing is worked out once for all.
                here = slots._replace(
                    length=full + 2 + number % 2,
                    draft_hidden=slots.draft_hidden + number.astype(slots.draft_hidden.dtype),
                )
                if part == "draft":
                    proposed, cache = draft(model, cache, here, shape, None, head)
                    return cache, proposed
                drafts = here.tokens[:, : shape.draft.num_tokens]
                bias = jnp.zeros((shape.num_slots, 0), jnp.float32)
                return verify(model, cache, here, drafts, full, bias, shape, None, head if part == "verify" else None)

            _, result = jax.eval_shape(once, jnp.int32(0), cache)
            result = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
            return jax.lax.fori_loop(0, times, lambda number, carry: once(number, carry[0]), (cache, result))

        return self._get(
            ("round_part", shape, part), run, (1,), (self._at(self.cache), self._replicated),
            self.weights, self.cache, self.state, _SCALAR,
        )  # fmt: skip

    def insert(self) -> "Program":
        """`(state, slot, row) -> state`: one slot replaced by `row`, a DecodeState without the slot axis."""

        def run(state, slot, row):
            return jax.tree.map(lambda whole, one: whole.at[slot].set(one), state, row)

        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.state)
        return self._get("insert", run, (0,), self._at(self.state), self.state, _SCALAR, row)

    def set_bias(self) -> "Program":
        """`(token_bias, slot, row [V]) -> token_bias`."""

        def run(bias, slot, row):
            return bias.at[slot].set(row)

        row = jax.ShapeDtypeStruct(self.token_bias.shape[1:], self.token_bias.dtype)
        return self._get("set_bias", run, (0,), self._replicated, self.token_bias, _SCALAR, row)

    def deactivate(self) -> "Program":
        """`(state, slot) -> state`: the slot takes no part in further rounds."""

        def run(state, slot):
            return state._replace(active=state.active.at[slot].set(False))

        return self._get("deactivate", run, (0,), self._at(self.state), self.state, _SCALAR)

    def _get(self, key: Hashable, run: Callable, donated: tuple[int, ...], out_shardings: Any, *args: Any) -> "Program":
        if key not in self._known:
            with use_mesh(self._mesh), matmul_precision(self._dtype):
                lowered = jax.jit(run, donate_argnums=donated, out_shardings=out_shardings).lower(*args)
            self._known[key] = Program(lowered, self._options)
        return self._known[key]

    def _at(self, arrays: Any) -> Any:
        """On a mesh, results come back as they went in."""
        return None if self._replicated is None else jax.tree.map(lambda x: x.sharding, arrays)

    def _whole(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated)

    def _row(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32)


def _merge(graphs, tree, leaves) -> tuple[Decoder, EagleHead | None]:
    model, *head = map(nnx.merge, graphs, jax.tree.unflatten(tree, leaves))
    return model, head[0] if head else None
