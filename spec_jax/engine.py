"""Continuous batching on the host: schedule, dispatch a burst, collect the one before.

The host stays one burst ahead of what it has read: burst n + 1 is on its way before burst n is looked at, so that the
device never waits for Python. A slot that ended in burst n is inactive in burst n + 1 and costs nothing there.
"""

import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .cache import PagedCache, create_cache
from .config import DraftConfig, EngineConfig, ModelConfig
from .decode_loop import LENGTH, RUNNING, STOPPED, BurstOutput, BurstShape, Constraint, DecodeState, create_state
from .errors import UserError
from .logits_processors import ProcessorState
from .models.decoder import Decoder
from .models.layers import abstract_weights
from .params import SamplingParams
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
    token_bias: jax.Array  # [slots, V] float32
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
            draft.num_tokens, (config.max_bad_words, config.max_bad_word_tokens),
        )  # fmt: skip
        token_bias = jax.numpy.zeros((config.max_num_seqs, model_config.vocab_size), np.float32)
        if mesh is not None:
            state, token_bias = jax.device_put((state, token_bias), NamedSharding(mesh, PartitionSpec()))
        abstract = Decoder(abstract_weights(dtype, mesh, rules), model_config)
        self.programs = Programs(abstract, cache, state, mesh)
        self._on_device = _OnDevice(cache, state, token_bias)
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

    def prepare(
        self, prompt_length: int, params: SamplingParams, max_length: int | None = None, *, streams: bool
    ) -> Iterator[Program]:
        """The programs that a single request needs on its way from `prompt_length` to `max_length` tokens, in order.

        Without `max_length`, as far as its first two bursts can go: both are on their way before the first is read.
        The programs are not compiled yet: do that on other threads while the weights are being read.
        """
        for start, count, size in self._chunks(0, prompt_length - 1):
            prefill = self.programs.prefill if params.prompt_logprobs is None else self.programs.prefill_with_logprobs
            yield prefill(size, self._page_bucket(start + count))
        growth = self._rounds(streams) * (self.draft.num_tokens + 1)
        longest = prompt_length
        max_length = min(max_length or prompt_length + 2 * growth, self.config.max_model_len)
        while longest < max_length:
            longest = min(longest + growth, max_length)
            burst = self.programs.constrained_burst if params.is_constrained else self.programs.burst
            yield burst(self._burst_shape(1, longest, params.needs_processors))
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
        self._check_ids(request)
        self.scheduler.check(request)

    def _check_ids(self, request: Request) -> None:
        params = request.params
        for name, ids in (
            ("prompt", request.prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words", [token for word in request.bad_words for token in word]),
        ):
            for token in ids:
                if not 0 <= token < self._vocab_size:
                    raise UserError(f"{name} has token id {token}: the vocabulary has ids 0 to {self._vocab_size - 1}")
        sequences = [word for word in request.bad_words if len(word) > 1]
        limit = self.config.max_bad_words
        if len(sequences) > limit:
            raise UserError(f"bad_words are {len(sequences)} sequences of several tokens: at most {limit} are possible")
        longest, limit = max((len(word) for word in sequences), default=0), self.config.max_bad_word_tokens
        if longest > limit:
            raise UserError(f"bad_words has a word of {longest} tokens: at most {limit} are possible")
        # What is left if everything is forbidden at once that can be: it must not be nothing.
        left = set(
            params.allowed_token_ids or range(self._vocab_size) if request.bad_words or params.min_tokens else []
        )
        without_bad = left - {word[-1] for word in request.bad_words}
        if left and not without_bad:
            raise UserError("bad_words can forbid every token that allowed_token_ids allows: nothing could be sampled")
        if without_bad and params.min_tokens and not without_bad - set(request.stop_ids):
            raise UserError(
                "min_tokens forbids the stop ids at first, and allowed_token_ids allows no others: nothing could be sampled"
            )

    def abort(self, request: Request) -> None:
        """Ends a request early; its slot and pages are free at once. Nothing happens if it has ended."""
        if not request.is_finished and not self._on_device.is_closing:
            request.finish_reason = "abort"
            self._retire(request, on_device=True)

    def preempt(self, request: Request) -> None:
        """Takes a running request's slot and pages and puts it first in the queue.

        Its text so far is prefilled anew and goes on as if nothing had happened; tokens on their way are made again.
        """
        if request.slot < 0:
            return
        if self._in_flight is not None:
            self._in_flight.requests.pop(request.slot, None)
        self._retire(request, on_device=True)
        request.num_prefilled = 0
        if len(request.prompt_logprobs) < len(request.prompt):
            del request.prompt_logprobs[1:]
        self.scheduler.waiting.appendleft(request)

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
            num_tokens = len(request.tokens) - 1
            while request.num_prefilled < num_tokens:
                self._prefill_chunk(request)
                if someone_waits:
                    break
            if request.num_prefilled >= num_tokens:
                self._insert(request)
                self._prefilling = None
            if someone_waits:
                return

    def _prefill_chunk(self, request: Request) -> None:
        text = request.tokens
        start, count, size = next(self._chunks(request.num_prefilled, len(text) - 1))
        num_pages = self._page_bucket(start + count)

        def chunk(first: int) -> Any:
            return _filled(text[first : first + count], size)

        here, table = self._on_device, self._block_table(request)[:num_pages]
        place = (np.int32(start), np.int32(count), table)
        if request.params.prompt_logprobs is None or len(request.prompt_logprobs) >= len(request.prompt):
            here.cache = self.programs.prefill(size, num_pages)(self._weights, here.cache, chunk(start), *place)
        else:
            here.cache, logprobs = self.programs.prefill_with_logprobs(size, num_pages)(
                self._weights, here.cache, chunk(start), chunk(start + 1), *place
            )
            request.append_prompt_logprobs(text[start + 1 : start + 1 + count], jax.tree.map(np.asarray, logprobs))
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
        params, here, config = request.params, self._on_device, self.config
        text = request.tokens
        rounds, drafted, accepted = request.counters
        has_bias = self._set_bias(request)

        def array(value: Any, dtype: type = np.int32) -> Any:
            return np.asarray(value, dtype)

        row = DecodeState(
            tokens=_filled(text, here.state.tokens.shape[1]),
            prompt_length=array(len(request.prompt)),
            length=array(len(text)),
            max_length=array(request.max_length),
            block_tables=self._block_table(request),
            active=array(True, np.bool_),
            finish=array(RUNNING),
            stop_ids=_filled(request.stop_ids, config.max_stop_ids, -1),
            processors=ProcessorState(
                repetition_penalty=array(params.repetition_penalty, np.float32),
                presence_penalty=array(params.presence_penalty, np.float32),
                frequency_penalty=array(params.frequency_penalty, np.float32),
                min_length=array(min(len(request.prompt) + params.min_tokens, request.max_length)),
                bad_words=_bad_word_table(request.bad_words, config),
                has_bias=array(has_bias, np.bool_),
            ),
            sampling=SamplingState(
                temperature=array(params.temperature, np.float32),
                top_k=array(min(max(params.top_k, 0), self._vocab_size)),
                top_p=array(params.top_p, np.float32),
                min_p=array(params.min_p, np.float32),
                typical_p=array(params.typical_p, np.float32),
                seed=array([request.seed >> 32, request.seed & 0xFFFFFFFF], np.uint32),
            ),
            wants_logprobs=array(params.logprobs is not None, np.bool_),
            rounds=array(rounds),
            drafted=array(drafted),
            accepted=_filled(accepted, self.draft.num_tokens),
        )
        here.state = self.programs.insert()(here.state, np.int32(request.slot), row)

    def _set_bias(self, request: Request) -> bool:
        """Writes what is added to each token's score, where the request wants any of it; says whether it does."""
        params = request.params
        banned = [word[0] for word in request.bad_words if len(word) == 1]
        if not (params.logit_bias or params.allowed_token_ids or banned):
            return False
        bias = np.zeros(self._vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[list(params.allowed_token_ids)] = 0
        bias[banned] = -np.inf
        for token, value in (params.logit_bias or {}).items():
            bias[token] += value
        here = self._on_device
        here.token_bias = self.programs.set_bias()(here.token_bias, np.int32(request.slot), bias)
        return True

    def _block_table(self, request: Request) -> Any:
        return _filled(request.pages, self._max_pages)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> _Burst | None:
        live = {slot: r for slot, r in self.scheduler.running.items() if r is not self._prefilling}
        constrained = {slot: r for slot, r in live.items() if r.grammar is not None}
        # A slot with a grammar sits out while its last burst is unread: only then is known what it may say next.
        waiting = {slot for slot, r in constrained.items() if self._is_in_flight(slot, r)}
        taking_part = {slot: r for slot, r in live.items() if slot not in waiting}
        constraint = None
        if constrained:
            constraint = self._constraint(max(live) + 1, constrained, waiting)
            taking_part = {slot: r for slot, r in taking_part.items() if not r.is_finished}
        if not taking_part:
            return None
        rounds = self._rounds(any(request.streams for request in taking_part.values()))
        growth = rounds * (self.draft.num_tokens + 1)
        longest = max(self._longest(slot, request, growth) for slot, request in live.items())
        has_processors = any(r.params.needs_processors for r in live.values())
        shape = self._burst_shape(max(live) + 1, longest, has_processors)
        here = self._on_device
        arguments = (self._weights, here.cache, here.state, here.token_bias, np.int32(rounds))
        if constraint is None:
            here.cache, here.state, output = self.programs.burst(shape)(*arguments)
        else:
            here.cache, here.state, output = self.programs.constrained_burst(shape)(*arguments, constraint)
        if all(request.params.logprobs is None for request in taking_part.values()):
            output = output._replace(logprobs=None)  # nobody reads them: they need not be copied
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        return _Burst(output, taking_part, growth)

    def _constraint(self, num_slots: int, constrained: dict[int, Request], waiting: set[int]) -> Constraint:
        """Checked drafts and masks for the slots with a grammar. One whose grammar cannot be followed any more ends."""
        K = self.draft.num_tokens

        def full(*shape: int, dtype: type = np.int32, value: int = 0) -> Any:
            return np.full((self._num_slots(num_slots), *shape), value, dtype)

        constraint = Constraint(
            is_constrained=full(dtype=np.bool_),
            is_ready=full(dtype=np.bool_),
            drafts=full(K),
            num_drafts=full(),
            allowed=full(K + 1, -(-self._vocab_size // 32), dtype=np.uint32, value=0xFFFFFFFF),
        )
        for slot, request in constrained.items():
            constraint.is_constrained[slot] = True
            if slot in waiting:
                continue
            assert request.grammar is not None
            drafts, masks = request.grammar.plan(request.proposed, min(K, request.max_length - len(request.tokens) - 1))
            if request.grammar.error is not None:
                request.finish_reason, request.stop_reason = "error", request.grammar.error
                self._retire(request, on_device=True)
                continue
            constraint.is_ready[slot] = True
            constraint.drafts[slot, : len(drafts)] = drafts
            constraint.num_drafts[slot] = len(drafts)
            constraint.allowed[slot, : len(masks)] = masks
        return constraint

    def _is_in_flight(self, slot: int, request: Request) -> bool:
        return self._in_flight is not None and self._in_flight.requests.get(slot) is request

    def _rounds(self, streams: bool) -> int:
        return self.config.rounds_per_burst_streaming if streams else self.config.rounds_per_burst

    def _burst_shape(self, num_slots: int, longest: int, has_processors: bool = False) -> BurstShape:
        num_slots = self._num_slots(num_slots)
        widths = _row_widths(self.draft.num_tokens, num_slots, jax.default_backend())
        return BurstShape(
            draft=self.draft,
            num_slots=num_slots,
            num_pages=self._page_bucket(longest),
            rounds_capacity=max(self._rounds(True), self._rounds(False)),
            row_widths=widths,
            num_weak_drafts=min(widths[0] - 1, self.draft.num_tokens),
            has_processors=has_processors,
        )

    def _num_slots(self, needed: int) -> int:
        """Rounded up to one of a few sizes: each size is a program."""
        return min(_power_of_two(needed), self.config.max_num_seqs)

    def _longest(self, slot: int, request: Request, growth: int) -> int:
        """The most tokens that a slot can hold after this burst."""
        unread = self._in_flight.max_growth if self._in_flight and self._is_in_flight(slot, request) else 0
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
            tokens = out.tokens[slot, : out.num_tokens[slot]].tolist()
            logprobs = None if out.logprobs is None else jax.tree.map(lambda x, slot=slot: x[slot], out.logprobs)
            request.append(tokens, reason, logprobs)
            if request.grammar is not None:
                request.grammar.accept(tokens)
                request.proposed = out.proposed[slot, : out.num_proposed[slot]].tolist()
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


def _filled(values: Any, size: int, fill: int = 0) -> Any:
    """int32 [size]: `values`, and `fill` behind them."""
    row = np.full(size, fill, np.int32)
    row[: len(values)] = values
    return row


def _bad_word_table(words: Sequence[tuple[int, ...]], config: EngineConfig) -> Any:
    """Sequences of several tokens as int32 [W, M], right-aligned, -1 elsewhere."""
    table = np.full((config.max_bad_words, config.max_bad_word_tokens), -1, np.int32)
    for row, word in zip(table, (word for word in words if len(word) > 1), strict=False):
        row[-len(word) :] = word
    return table


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
