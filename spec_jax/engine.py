"""Continuous batching on the host: schedule, dispatch a burst, collect the one before.

The host stays one burst ahead of what it has read: burst n + 1 is on its way before burst n is looked at, so that the
device never waits for Python. A slot that ended in burst n is inactive in burst n + 1 and costs nothing there.
"""

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .cache import PagedCache, create_cache
from .config import DraftConfig, EngineConfig, ModelConfig
from .decode_loop import LENGTH, RUNNING, STOPPED, BurstOutput, BurstShape, DecodeState, create_state
from .errors import UserError
from .models.decoder import Decoder
from .models.layers import abstract_weights
from .programs import Program, Programs
from .request import Request
from .sampling import SamplingState
from .scheduler import Scheduler
from .sharding import ShardingRules

_FINISH_REASONS = {STOPPED: "stop", LENGTH: "length"}


@dataclass
class _OnDevice:
    """The newest cache and state; each program takes them and gives them back."""

    cache: PagedCache
    state: DecodeState
    is_closing: bool = False


@dataclass
class _Burst:
    """A burst on its way: what it will tell, and whom it is about."""

    output: BurstOutput
    requests: dict[int, Request]
    max_growth: int  # most tokens that a slot can gain


class Engine:
    """Runs requests on one model. Not thread-safe: one thread adds, steps and aborts.

    `load()` the weights, then `step()` until `has_work` is false; each step returns the requests that grew or ended.
    `dtype` is that of weights and cache.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        draft: DraftConfig,
        config: EngineConfig,
        dtype: str,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
    ):
        if mesh is not None:
            (rules or ShardingRules()).check(mesh, model_config)
        self.config, self.draft = config, draft
        self._vocab_size = model_config.vocab_size
        self._max_pages = -(-config.max_model_len // config.page_size)
        num_tokens = config.num_kv_tokens or _default_kv_tokens(config)
        num_pages = 1 + -(-num_tokens // config.page_size)
        self.scheduler = Scheduler(config.max_num_seqs, num_pages, config.page_size)
        cache = create_cache(model_config, num_pages, config.page_size, dtype, mesh, rules)
        state = create_state(
            config.max_num_seqs, config.max_model_len + draft.num_tokens, self._max_pages, config.max_stop_ids,
            draft.num_tokens,
        )  # fmt: skip
        if mesh is not None:
            state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
        abstract = Decoder(abstract_weights(dtype, mesh, rules), model_config)
        self.programs = Programs(abstract, cache, state, mesh)
        self._on_device = _OnDevice(cache, state)
        self._weights: list[jax.Array] = []
        self._prefilling: Request | None = None
        self._in_flight: _Burst | None = None
        # A device that still computes while Python is torn down would end in a crash: wait for it before.
        weakref.finalize(self, _wait, self._on_device)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def load(self, decoder: Decoder) -> None:
        """Gives the engine its weights; they must be as its model config and dtype say."""
        self._weights = jax.tree.leaves(nnx.state(decoder))

    def prepare(self, prompt_length: int, max_length: int | None = None, *, streams: bool) -> Iterator[Program]:
        """The programs that a single request needs on its way from `prompt_length` to `max_length` tokens, in order.

        Without `max_length`, as far as its first two bursts can go: both are on their way before the first is read.
        The programs are not compiled yet: do that on other threads while the weights are being read.
        """
        for start, count, size in self._chunks(0, prompt_length - 1):
            yield self.programs.prefill(size, self._page_bucket(start + count))
        growth = self._rounds(streams) * (self.draft.num_tokens + 1)
        longest = prompt_length
        max_length = min(max_length or prompt_length + 2 * growth, self.config.max_model_len)
        while longest < max_length:
            longest = min(longest + growth, max_length)
            yield self.programs.burst(self._burst_shape(1, longest))
        yield self.programs.insert()

    def add(self, request: Request) -> None:
        """Queues a request. Raises UserError, as `check` does, for what could never run."""
        self.check(request)
        request.arrived = time.perf_counter()
        self.scheduler.add(request)

    def check(self, request: Request) -> None:
        """Raises UserError for a request that could never run."""
        if not 0 < len(request.prompt) < request.max_length <= self.config.max_model_len:
            raise UserError(
                f"a prompt of {len(request.prompt)} tokens that may grow to {request.max_length}: a prompt needs at least "
                f"one token, and must leave room for one more within max_model_len {self.config.max_model_len}"
            )
        limit, count = self.config.max_stop_ids, len(request.stop_ids)
        if count > limit:
            raise UserError(f"{count} stop token ids (the model's own included): at most {limit} are possible")
        for name, ids in (("prompt", request.prompt), ("stop_token_ids", request.params.stop_token_ids)):
            for token in ids:
                if not 0 <= token < self._vocab_size:
                    raise UserError(f"{name} has token id {token}: the vocabulary has ids 0 to {self._vocab_size - 1}")
        self.scheduler.check(request)

    def abort(self, request: Request) -> None:
        """Ends a request early; its slot and pages are free at once. Nothing happens if it has ended."""
        if not request.is_finished and not self._on_device.is_closing:
            request.finish_reason = "abort"
            self._retire(request, on_device=True)

    def step(self) -> list[Request]:
        """Schedule, dispatch, collect. Returns the requests with news."""
        self._prefill()
        previous, self._in_flight = self._in_flight, self._dispatch()
        return self._collect(previous) if previous else []

    # --- schedule -----------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Admits and prefills. While someone streams, one chunk at a time, so that their tokens keep coming."""
        while True:
            if self._prefilling is None:
                self._prefilling = self.scheduler.admit()
                if self._prefilling is None:
                    return
            request = self._prefilling
            someone_waits = self._in_flight is not None and any(
                other.streams for other in self.scheduler.running.values() if other is not request
            )
            while request.num_prefilled < len(request.prompt) - 1:
                self._prefill_chunk(request)
                if someone_waits:
                    break
            if request.num_prefilled >= len(request.prompt) - 1:
                self._insert(request)
                self._prefilling = None
            if someone_waits:
                return

    def _prefill_chunk(self, request: Request) -> None:
        start, count, size = next(self._chunks(request.num_prefilled, len(request.prompt) - 1))
        tokens = np.zeros(size, np.int32)
        tokens[:count] = request.prompt[start : start + count]
        num_pages = self._page_bucket(start + count)
        self._on_device.cache = self.programs.prefill(size, num_pages)(
            self._weights,
            self._on_device.cache,
            tokens,
            np.int32(start),
            np.int32(count),
            self._block_table(request)[:num_pages],
        )
        request.num_prefilled += count

    def _chunks(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """How positions `start .. end - 1` are cut: first position, number of tokens, size of the program."""
        sizes = self.config.prefill_chunks
        while start < end:
            size = next((s for s in sizes if s >= end - start), sizes[-1])
            count = min(size, end - start)
            yield start, count, size
            start += count

    def _insert(self, request: Request) -> None:
        params, state = request.params, self._on_device.state

        def array(value: Any, dtype: type = np.int32, size: int | None = None, fill: int = 0) -> Any:
            if size is None:
                return np.asarray(value, dtype)
            return np.asarray([*value, *[fill] * (size - len(value))], dtype)

        row = DecodeState(
            tokens=array(request.prompt, size=state.tokens.shape[1]),
            length=array(len(request.prompt)),
            max_length=array(request.max_length),
            block_tables=self._block_table(request),
            active=array(True, np.bool_),
            finish=array(RUNNING),
            stop_ids=array(request.stop_ids, size=self.config.max_stop_ids, fill=-1),
            sampling=SamplingState(
                temperature=array(params.temperature, np.float32),
                top_k=array(min(max(params.top_k, 0), self._vocab_size)),
                top_p=array(params.top_p, np.float32),
                min_p=array(params.min_p, np.float32),
                seed=array([request.seed >> 32, request.seed & 0xFFFFFFFF], np.uint32),
            ),
            rounds=array(0),
            drafted=array(0),
            accepted=array([0] * self.draft.num_tokens),
        )
        self._on_device.state = self.programs.insert()(state, np.int32(request.slot), row)

    def _block_table(self, request: Request) -> Any:
        table = np.zeros(self._max_pages, np.int32)
        table[: len(request.pages)] = request.pages
        return table

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> _Burst | None:
        live = {slot: r for slot, r in self.scheduler.running.items() if r is not self._prefilling}
        if not live:
            return None
        rounds = self._rounds(any(request.streams for request in live.values()))
        growth = rounds * (self.draft.num_tokens + 1)
        longest = max(self._longest(slot, request, growth) for slot, request in live.items())
        self._on_device.cache, self._on_device.state, output = self.programs.burst(
            self._burst_shape(max(live) + 1, longest)
        )(self._weights, self._on_device.cache, self._on_device.state, np.int32(rounds))
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        return _Burst(output, live, growth)

    def _rounds(self, streams: bool) -> int:
        return self.config.rounds_per_burst_streaming if streams else self.config.rounds_per_burst

    def _burst_shape(self, num_slots: int, longest: int) -> BurstShape:
        num_slots = min(_power_of_two(num_slots), self.config.max_num_seqs)
        widths = _row_widths(self.draft.num_tokens, num_slots, jax.default_backend())
        return BurstShape(
            draft=self.draft,
            num_slots=num_slots,
            num_pages=self._page_bucket(longest),
            rounds_capacity=max(self._rounds(True), self._rounds(False)),
            row_widths=widths,
            num_weak_drafts=min(widths[0] - 1, self.draft.num_tokens),
        )

    def _longest(self, slot: int, request: Request, growth: int) -> int:
        """The most tokens that a slot can hold after this burst."""
        in_flight = self._in_flight
        unread = in_flight.max_growth if in_flight and in_flight.requests.get(slot) is request else 0
        known = len(request.prompt) + request.num_committed
        return min(known + unread + growth, request.max_length)

    def _page_bucket(self, num_tokens: int) -> int:
        """Pages for a context of `num_tokens`, rounded up to one of a few sizes: each size is a program."""
        bucket = max(self.config.min_context_bucket, _power_of_two(num_tokens))
        return min(-(-bucket // self.config.page_size), self._max_pages)

    # --- collect ------------------------------------------------------------------------------------------------------

    def _collect(self, burst: _Burst) -> list[Request]:
        try:
            out = _to_host(burst.output)
        except BaseException:  # interrupted while waiting: what these requests have got is lost, so they end
            for request in burst.requests.values():
                self.abort(request)
            raise
        changed = []
        for slot, request in burst.requests.items():
            if request.is_finished:
                continue
            request.counters = (int(out.rounds[slot]), int(out.drafted[slot]), tuple(map(int, out.accepted[slot])))
            reason = _FINISH_REASONS.get(int(out.finish[slot]))
            request.append(out.tokens[slot, : out.num_tokens[slot]].tolist(), reason)
            if request.is_finished:
                self._retire(request, on_device=reason is None)
            changed.append(request)
        return changed

    def _retire(self, request: Request, *, on_device: bool) -> None:
        """Gives back slot and pages. `on_device`: the device does not know yet that the request has ended."""
        if self._prefilling is request:
            self._prefilling = None
        elif on_device and request.slot >= 0:
            self._on_device.state = self.programs.deactivate()(self._on_device.state, np.int32(request.slot))
        self.scheduler.release(request)


def _to_host(output: BurstOutput) -> Any:
    """Waits for a burst, and its output as NumPy arrays."""
    return jax.tree.map(np.asarray, output)


def _wait(on_device: _OnDevice) -> None:
    on_device.is_closing = True
    jax.block_until_ready((on_device.cache, on_device.state))


def _row_widths(num_draft_tokens: int, num_slots: int, platform: str) -> tuple[int, ...]:
    """On a CPU rows cost time, so rounds without drafts run narrow; one lone bfloat16 row is pathological there
    (7 x slower than two: XLA:CPU takes another path for a matrix times a vector), so two are the least."""
    full = num_draft_tokens + 1
    if platform != "cpu":
        return (full,)
    narrow = 2 if num_slots == 1 else 1
    return (narrow, full) if full > narrow else (narrow,)


def _default_kv_tokens(config: EngineConfig) -> int:
    """Room for the longest text, and for several usual ones."""
    return max(config.max_model_len, min(config.max_num_seqs * config.max_model_len, 16_384))


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
