"""Continuous batching on the host: schedule, dispatch a burst, collect the one before.

The host stays one burst ahead of what it has read: burst n + 1 is on its way before burst n is looked at, so that the
device never waits for Python. A slot that ended in burst n is inactive in burst n + 1 and costs nothing there.
"""

import logging
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .cache import PagedCache, create_cache
from .config import DraftConfig, EngineConfig, ModelConfig
from .decode_loop import LENGTH, STOPPED, BurstOutput, Constraint, DecodeState
from .errors import UserError
from .handoff import PrefillMesh
from .models.decoder import Decoder
from .models.eagle import EagleHead
from .params import SamplingParams
from .programs import Program, Programs
from .request import Counters, Request
from .scheduler import Scheduler
from .sharding import ShardingRules
from .signals import signals_held
from .sizes import Sizes
from .slot_row import check_tokens, filled, needs_bias, slot_row, token_bias

_log = logging.getLogger("spec_jax")
_DRAFTS_WATCHED = 1000
# What JAX calls when an asynchronous copy has arrived needs the interpreter: where it is gone by then, the process aborts.
_COPY_SECONDS = 0.02
_LEAST_ACCEPTED = 0.02  # far below any head that fits, and about what unrelated tokens agree
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
    `dtype` is that of weights and activations. `mesh` is what decodes, and what prefills unless there is a `prefill_mesh`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        draft: DraftConfig,
        config: EngineConfig,
        dtype: str,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
        prefill_mesh: Mesh | None = None,
    ):
        rules = rules or ShardingRules()
        mesh, prefill_mesh = (rules.usable(each, model_config) for each in (mesh, prefill_mesh))
        if draft.head is not None:
            head_shape = replace(draft.head.layer, vocab_size=draft.head.draft_vocab_size)
            for each in (mesh, prefill_mesh):
                rules.usable(each, head_shape)
        self.config, self.draft = config, draft
        self._vocab_size = model_config.vocab_size
        self.sizes = Sizes(model_config, draft, config, dtype, mesh)
        self.scheduler = Scheduler(config.max_num_seqs, self.sizes.num_pages, self.sizes.page_size)
        self.programs = Programs(self.sizes, mesh, rules)
        self._prefill_mesh = None
        if prefill_mesh is not None:
            self._prefill_mesh = PrefillMesh(self.sizes, self.programs, prefill_mesh, rules)
        cache = create_cache(self.programs.cache)
        state = self.sizes.create_state()
        bias = jax.numpy.zeros((config.max_num_seqs, model_config.vocab_size), np.float32)
        if mesh is not None:
            state, bias = jax.device_put((state, bias), NamedSharding(mesh, PartitionSpec()))
        self._on_device = _OnDevice(cache, state, bias)
        self._weights: list[jax.Array] = []
        self._prefilling: Request | None = None
        self._in_flight: _Burst | None = None
        self._drafted, self._accepted, self._has_warned = 0, 0, False
        self._failed: list[Request] = []  # ended since the last step, by their grammars
        # A device that still computes while Python is torn down would end in a crash: wait for it before.
        weakref.finalize(self, _wait, self._on_device)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def load(self, decoder: Decoder, head: EagleHead | None = None) -> None:
        """Gives the engine its weights; they must be as its configs and dtype say."""
        self._weights = [
            x for module in (decoder, head) if module is not None for x in jax.tree.leaves(nnx.state(module))
        ]
        if self._prefill_mesh is not None:
            self._prefill_mesh.load(self._weights)

    def prepare(
        self, prompt_length: int, params: SamplingParams, max_length: int | None = None, *, streams: bool
    ) -> Iterator[Program]:
        """The programs that a single request needs on its way from `prompt_length` to `max_length` tokens, in order.

        Without `max_length`, as far as its first two bursts can go: both are on their way before the first is read.
        The programs are not compiled yet: do that on other threads while the weights are being read.
        """
        has_logprobs = params.prompt_logprobs is not None
        for start, count, size in self.sizes.chunks(0, prompt_length - 1):
            if self._prefill_mesh is not None:
                yield from self._prefill_mesh.prepare(start, count, size, has_logprobs)
            else:
                yield self.programs.prefill(size, self.sizes.page_bucket(start + count), has_logprobs)
        growth = self.sizes.growth(self.sizes.rounds(streams))
        longest = prompt_length
        max_length = min(max_length or prompt_length + 2 * growth, self.config.max_model_len)
        while longest < max_length:
            longest = min(longest + growth, max_length)
            yield self.programs.burst(self.sizes.burst(1, 1, longest, params.needs_processors, params.is_constrained))
        yield self.programs.insert()
        if params.needs_processors:
            yield self.programs.set_bias()
        if params.stop or params.is_constrained:
            yield self.programs.deactivate()

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
        check_tokens(request, self.config, self._vocab_size)
        self.scheduler.check(request)

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
        if request.lacks_prompt_logprobs:
            del request.prompt_logprobs[1:]
        self.scheduler.put_back(request)

    def step(self) -> list[Request]:
        """Schedule, dispatch, collect. Returns the requests with news."""
        self._prefill()
        previous, self._in_flight = self._in_flight, self._dispatch()
        failed, self._failed = self._failed, []
        return failed + (self._collect(previous) if previous else [])

    def draft_cost(self, num_slots: int = 1, repetitions: int = 7, rounds: int = 8) -> float:
        """What drafting costs in a round where a head proposes all it may, as a share of the target's own pass over the same
        rows.

        Medians of `repetitions` runs of `rounds` rounds each on empty slots; 0 without drafts. Requests must have ended."""
        assert not self.scheduler.has_work
        self.step()  # the burst that was on its way when the last one ended
        shape = self.sizes.burst(num_slots, num_slots, self.config.min_context_bucket, False, False)
        shape = replace(shape, draft=replace(shape.draft, min_confidence=0.0))
        if shape.draft.num_tokens == 0:
            return 0.0
        here = self._on_device
        seconds: dict[str, list[float]] = {"draft": [], "verify": [], "target": []}
        for number in range(1 + repetitions):
            for part, found in seconds.items():
                program = self.programs.round_part(shape, part)
                program.compile()
                started = time.perf_counter()
                with signals_held():
                    here.cache, result = program(self._weights, here.cache, here.state, np.int32(rounds))
                jax.block_until_ready(result)
                if number > 0:  # the first run sets things up
                    found.append(time.perf_counter() - started)
        draft, verify, target = (float(np.median(found)) for found in seconds.values())
        return (draft + (0.0 if self.draft.head is None else verify - target)) / target

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
            num_tokens = request.num_tokens - 1
            while request.num_prefilled < num_tokens:
                self._prefill_chunk(request)
                if someone_waits:
                    break
            if request.num_prefilled >= num_tokens:
                if not self._deliver():
                    return
                self._prefilling = None  # first: from here on, whoever ends the request must tell the device
                with self._all_or_none([request]):
                    self._insert(request)
            if someone_waits:
                return

    def _deliver(self) -> bool:
        """Puts a prompt from other devices into the cache. Where someone decodes meanwhile, not before it is here."""
        if self._prefill_mesh is not None:
            if self._in_flight is not None and not self._prefill_mesh.has_arrived:
                return False
            with signals_held():
                self._on_device.cache = self._prefill_mesh.deliver(self._on_device.cache)
        return True

    def _prefill_chunk(self, request: Request) -> None:
        text = request.tokens
        start, count, size = next(self.sizes.chunks(request.num_prefilled, len(text) - 1))
        wants_logprobs = request.lacks_prompt_logprobs
        tokens = filled(text[start : start + count], size)
        following = filled(text[start + 1 : start + 1 + count], size)
        here = self._on_device
        if self._prefill_mesh is not None:
            output = self._prefill_mesh.run(request.pages, tokens, following, start, count, wants_logprobs)
        else:
            num_pages = self.sizes.page_bucket(start + count)
            program = self.programs.prefill(size, num_pages, wants_logprobs)
            with signals_held():
                here.cache, output = program(
                    self._weights, here.cache, tokens, following, np.int32(start), np.int32(count),
                    filled(request.pages, self.sizes.max_pages)[:num_pages],
                )  # fmt: skip
        request.draft_hidden = output.draft_hidden
        if wants_logprobs:
            request.append_prompt_logprobs(
                text[start + 1 : start + 1 + count], jax.tree.map(np.asarray, output.logprobs)
            )
        request.num_prefilled += count

    def _insert(self, request: Request) -> None:
        here, slot = self._on_device, np.int32(request.slot)
        if needs_bias(request):
            bias = token_bias(request, self._vocab_size)
            with signals_held():
                here.token_bias = self.programs.set_bias()(here.token_bias, slot, bias)
        row = slot_row(request, self.sizes)
        request.draft_hidden = None
        with signals_held():
            here.state = self.programs.insert()(here.state, slot, row)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> _Burst | None:
        live = {slot: r for slot, r in self.scheduler.running.items() if r is not self._prefilling}
        constrained = {slot: r for slot, r in live.items() if r.grammar is not None}
        # A slot with a grammar sits out while its last burst is unread: only then is known what it may say next.
        waiting = {slot for slot, r in constrained.items() if self._is_in_flight(slot, r)}
        taking_part = {slot: r for slot, r in live.items() if slot not in waiting}
        constraint = None
        if constrained:
            constraint = self._constraint(max(live) + 1, len(live), constrained, waiting)
            taking_part = {slot: r for slot, r in taking_part.items() if not r.is_finished}
        if not taking_part:
            return None
        # Bursts are short where a slot waits for the host: for what it streams, or for what its grammar allows next.
        rounds = self.sizes.rounds(bool(constrained) or any(request.streams for request in live.values()))
        growth = self.sizes.growth(rounds)
        longest = max(self._longest(slot, request, growth) for slot, request in live.items())
        has_processors = any(r.params.needs_processors for r in live.values())
        shape = self.sizes.burst(max(live) + 1, len(live), longest, has_processors, constraint is not None)
        here = self._on_device
        program = self.programs.burst(shape)
        with self._all_or_none(taking_part.values()):
            with signals_held():
                here.cache, here.state, output = program(
                    self._weights, here.cache, here.state, here.token_bias, np.int32(rounds), constraint
                )
            if all(request.params.logprobs is None for request in taking_part.values()):
                output = output._replace(logprobs=None)  # nobody reads them: they need not be copied
            if self.sizes.platform != "cpu":  # whose memory is the host's
                for array in jax.tree.leaves(output):
                    array.copy_to_host_async()
            return _Burst(output, taking_part, growth)

    def _constraint(
        self, num_slots: int, num_running: int, constrained: dict[int, Request], waiting: set[int]
    ) -> Constraint:
        """Checked drafts and masks for the slots with a grammar. One whose grammar cannot be followed any more ends."""
        K = self.draft.at_load(num_running).num_tokens

        def full(*shape: int, dtype: type = np.int32, value: int = 0) -> Any:
            return np.full((self.sizes.num_slots(num_slots), *shape), value, dtype)

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
            drafts, masks = request.grammar.plan(request.proposed, min(K, request.max_length - request.num_tokens - 1))
            if request.grammar.error is not None:
                request.finish_reason, request.stop_reason = "error", request.grammar.error
                self._retire(request, on_device=True)
                self._failed.append(request)
                continue
            constraint.is_ready[slot] = True
            constraint.drafts[slot, : len(drafts)] = drafts
            constraint.num_drafts[slot] = len(drafts)
            constraint.allowed[slot, : len(masks)] = masks
        return constraint

    def _is_in_flight(self, slot: int, request: Request) -> bool:
        return self._in_flight is not None and self._in_flight.requests.get(slot) is request

    def _longest(self, slot: int, request: Request, growth: int) -> int:
        """The most tokens that a slot can hold after this burst."""
        unread = self._in_flight.max_growth if self._in_flight and self._is_in_flight(slot, request) else 0
        known = len(request.prompt) + request.num_committed
        return min(known + unread + growth, request.max_length)

    # --- collect ------------------------------------------------------------------------------------------------------

    def _collect(self, burst: _Burst) -> list[Request]:
        changed = []
        with self._all_or_none(burst.requests.values()):
            out = _to_host(burst.output)
            for slot, request in burst.requests.items():
                if request.is_finished:
                    continue
                before = request.counters.head_drafts
                request.counters = Counters(
                    rounds=int(out.rounds[slot]), drafted=int(out.drafted[slot]),
                    accepted=tuple(map(int, out.accepted[slot])), head_drafts=tuple(map(int, out.head_drafts[slot])),
                )  # fmt: skip
                self._watch_head(*(now - then for now, then in zip(request.counters.head_drafts, before, strict=True)))
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

    def _watch_head(self, drafted: int, accepted: int) -> None:
        """Says once when next to nothing of what a head drafts is what the target says."""
        self._drafted, self._accepted = self._drafted + drafted, self._accepted + accepted
        if self._has_warned or self._drafted < _DRAFTS_WATCHED:
            return
        if self._accepted < _LEAST_ACCEPTED * self._drafted:
            self._has_warned = True
            _log.warning(
                "the draft head is of no use: %d of its %d drafts were accepted; the text is right all the same. Is it the "
                "head of this model?", self._accepted, self._drafted,
            )  # fmt: skip

    @contextmanager
    def _all_or_none(self, requests: Iterable[Request]) -> Iterator[None]:
        """What is interrupted inside has lost tokens of these requests, or their places: none of them may go on."""
        try:
            yield
        except BaseException:
            for request in list(requests):
                self.abort(request)
            raise

    def _retire(self, request: Request, *, on_device: bool) -> None:
        """Gives back slot and pages. `on_device`: the device does not know yet that the request has ended."""
        if self._prefilling is request:
            self._prefilling = None
            if self._prefill_mesh is not None:
                self._prefill_mesh.drop()
        elif on_device and request.slot >= 0:
            here = self._on_device
            with signals_held():
                here.state = self.programs.deactivate()(here.state, np.int32(request.slot))
        self.scheduler.release(request)


def _to_host(output: BurstOutput) -> Any:
    """Waits for a burst, and its output as NumPy arrays."""
    return jax.tree.map(np.asarray, output)


def _wait(on_device: _OnDevice) -> None:
    on_device.is_closing = True
    jax.block_until_ready((on_device.cache, on_device.state))
    time.sleep(_COPY_SECONDS)
