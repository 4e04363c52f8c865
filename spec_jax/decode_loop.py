"""The heart: draft, verify, accept, stop, commit, for many rounds, as ONE `lax.while_loop` that the host only starts.

Letters in shapes: B slots, K drafts per round, T rows per slot and pass (the last token and its drafts), L tokens of room
per slot, N pages per slot, S stop ids, V vocabulary, D hidden size of the draft head, C most tokens that a burst can commit
per slot.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .cache import PagedCache
from .config import DraftConfig
from .drafting import follow_target, propose_eagle, propose_ngram
from .logits_processors import ProcessorState, RowText, process_logits
from .logprobs import TokenLogprobs, empty_logprobs, token_logprobs
from .models.decoder import Decoder, Rows
from .models.eagle import EagleHead, run_target
from .sampling import SamplingState, sample

Array = jax.Array

RUNNING, STOPPED, LENGTH = 0, 1, 2
"""Why a slot is as it is: still running; ended by EOS or a stop id; ended by its token limit."""


_NO_HEAD = jax.ShapeDtypeStruct((0,), jnp.float32)


class DecodeState(NamedTuple):
    """Everything the device knows about its slots.

    The KV of the last committed token is not in the cache yet: it is the first row of the next pass.
    """

    tokens: Array  # [B, L] int32: prompt and output, also the n-gram table
    prompt_length: Array  # [B] int32
    length: Array  # [B] int32: committed tokens
    max_length: Array  # [B] int32: where the slot must end
    block_tables: Array  # [B, N] int32: pages of the slot; 0 where it has none
    active: Array  # [B] bool
    finish: Array  # [B] int32: RUNNING, STOPPED or LENGTH
    stop_ids: Array  # [B, S] int32, -1 where unused
    processors: ProcessorState
    sampling: SamplingState
    wants_logprobs: Array  # [B] bool
    draft_hidden: Array  # [B, D]: the draft head's output behind the last committed token; D is 0 without a head
    rounds: Array  # [B] int32: passes of the target for this slot
    drafted: Array  # [B] int32: drafts verified
    accepted: Array  # [B, K] int32: drafts committed, by their place in the draft
    head_drafts: Array  # [B, 2] int32: of the drafts, those of a head: verified, committed


class Constraint(NamedTuple):
    """What a burst needs for slots whose text follows a grammar, which only the host knows.

    Such a slot runs the first round of the burst alone, and only where the host has seen all of its text (`is_ready`): with
    drafts that the host has checked, and with what the grammar allows after each of them.
    """

    is_constrained: Array  # [B] bool
    is_ready: Array  # [B] bool
    drafts: Array  # [B, K] int32
    num_drafts: Array  # [B] int32
    allowed: Array  # [B, K + 1, ceil(V / 32)] uint32, a bit per token


class BurstOutput(NamedTuple):
    """What the host reads after a burst: small, and copied while the next burst already runs."""

    tokens: Array  # [B, C] int32: committed in this burst, first `num_tokens` of each row
    logprobs: TokenLogprobs | None  # [B, C]: theirs, from programs that know processors, where a slot wants them
    proposed: Array | None  # [B, K] int32: under a constraint, drafts for the next round
    num_proposed: Array | None  # [B] int32
    num_tokens: Array  # [B] int32
    finish: Array  # [B] int32
    rounds: Array  # [B] int32, since the slot began; so are the two below
    drafted: Array  # [B] int32
    accepted: Array  # [B, K] int32
    head_drafts: Array  # [B, 2] int32


@dataclass(frozen=True)
class BurstShape:
    """The static sizes of one burst program; each distinct value is compiled once.

    `row_widths` are the T that a pass may have, ascending, the last one at least K + 1. A round takes the narrowest that
    holds its drafts: on a CPU a row costs time, so a round without drafts runs narrow. On a GPU one width is best.
    `num_weak_drafts` is how many of the K tokens a weak match, of a single token, may propose. `head_rows` is the rows per
    slot in the passes of a draft head, of which one counts. `has_processors`: the program
    knows `logits_processors` and log-probabilities; what no slot asks for is not even compiled. `is_constrained`: it takes a
    `Constraint`, and has processors as well.
    """

    draft: DraftConfig
    num_slots: int
    num_pages: int
    rounds_capacity: int
    row_widths: tuple[int, ...]
    num_weak_drafts: int
    head_rows: int
    has_processors: bool
    is_constrained: bool


def create_state(
    num_slots: int,
    max_length: int,
    max_pages: int,
    max_stop_ids: int,
    num_draft_tokens: int,
    bad_words_shape: tuple[int, int] = (1, 2),
    draft_hidden: jax.ShapeDtypeStruct = _NO_HEAD,
) -> DecodeState:
    """All slots empty. `max_length` is L: the longest text, with room for the drafts behind it. `bad_words_shape` is how
    many bad words of how many tokens a slot can have; `draft_hidden` what a draft head keeps for a slot, [D]."""

    def full(*shape: int, dtype: type = np.int32, value: float = 0) -> Any:
        return np.full((num_slots, *shape), value, dtype)

    state = DecodeState(
        tokens=full(max_length),
        prompt_length=full(),
        length=full(),
        max_length=full(),
        block_tables=full(max_pages),
        active=full(dtype=np.bool_),
        finish=full(),
        stop_ids=full(max_stop_ids, value=-1),
        processors=ProcessorState(
            repetition_penalty=full(dtype=np.float32, value=1),
            presence_penalty=full(dtype=np.float32),
            frequency_penalty=full(dtype=np.float32),
            min_length=full(),
            bad_words=full(*bad_words_shape, value=-1),
            has_bias=full(dtype=np.bool_),
        ),
        sampling=SamplingState(
            temperature=full(dtype=np.float32),
            top_k=full(),
            top_p=full(dtype=np.float32, value=1),
            min_p=full(dtype=np.float32),
            typical_p=full(dtype=np.float32, value=1),
            seed=full(2, dtype=np.uint32),
        ),
        wants_logprobs=full(dtype=np.bool_),
        draft_hidden=full(*draft_hidden.shape, dtype=draft_hidden.dtype),
        rounds=full(),
        drafted=full(),
        accepted=full(num_draft_tokens),
        head_drafts=full(2),
    )
    return jax.device_put(state)


def decode_burst(
    model: Decoder,
    cache: PagedCache,
    state: DecodeState,
    token_bias: Array,
    max_rounds: Array,
    shape: BurstShape,
    constraint: Constraint | None = None,
    head: EagleHead | None = None,
) -> tuple[PagedCache, DecodeState, BurstOutput]:
    """Up to `max_rounds` rounds for the first `num_slots` slots; ends early when none of them can go on.

    Contexts must fit `num_pages` pages for all of these rounds. `cache` and `state` are meant to be donated. `token_bias`
    [slots, V] float32 is read for slots with `has_bias`. A `constraint` comes with a shape that is constrained.
    """
    slots = jax.tree.map(lambda x: x[: shape.num_slots], state)
    token_bias = token_bias[: shape.num_slots]
    start = slots.length
    full_tables = slots.block_tables
    slots = slots._replace(block_tables=full_tables[:, : shape.num_pages])

    def running(number: Array, slots: DecodeState) -> Array:
        if constraint is None:
            return slots.active
        return slots.active & (~constraint.is_constrained | (constraint.is_ready & (number == 0)))

    def goes_on(carry: tuple[Array, PagedCache, DecodeState, TokenLogprobs | None]) -> Array:
        number, _, slots, _ = carry
        return (number < max_rounds) & jnp.any(running(number, slots))

    def one(carry: tuple[Array, PagedCache, DecodeState, TokenLogprobs | None]):
        number, cache, slots, table = carry
        runs = running(number, slots)
        cache, after, logprobs = decode_round(
            model, cache, slots._replace(active=runs), token_bias, shape, constraint, head
        )  # fmt: skip
        after = after._replace(active=jnp.where(runs, after.active, slots.active))
        place = (slots.length - start, after.length - slots.length)
        table = jax.tree.map(lambda whole, rows: append(whole, rows, *place), table, logprobs)
        return number + 1, cache, after, table

    capacity = shape.rounds_capacity * (shape.draft.num_tokens + 1)
    table = empty_logprobs((shape.num_slots, capacity), token_bias.shape[1]) if shape.has_processors else None
    _, cache, slots, table = jax.lax.while_loop(goes_on, one, (jnp.int32(0), cache, slots, table))

    where = jnp.minimum(start[:, None] + jnp.arange(capacity, dtype=jnp.int32), slots.tokens.shape[1] - 1)
    proposed, num_proposed = None, None
    if constraint is not None:
        followed = slots._replace(active=slots.active & constraint.is_constrained)
        (proposed, num_proposed, _), cache = draft(model, cache, followed, shape, None, head)
    output = BurstOutput(
        tokens=jnp.take_along_axis(slots.tokens, where, axis=1),
        logprobs=table,
        proposed=proposed,
        num_proposed=num_proposed,
        num_tokens=slots.length - start,
        finish=slots.finish,
        rounds=slots.rounds,
        drafted=slots.drafted,
        accepted=slots.accepted,
        head_drafts=slots.head_drafts,
    )
    slots = slots._replace(block_tables=full_tables)
    state = jax.tree.map(lambda whole, part: whole.at[: shape.num_slots].set(part), state, slots)
    return cache, state, output


def decode_round(
    model: Decoder,
    cache: PagedCache,
    state: DecodeState,
    token_bias: Array,
    shape: BurstShape,
    constraint: Constraint | None = None,
    head: EagleHead | None = None,
) -> tuple[PagedCache, DecodeState, TokenLogprobs | None]:
    """One round: draft, verify, accept, stop, commit."""
    proposal, cache = draft(model, cache, state, shape, constraint, head)
    drafts, num_drafts, _ = proposal
    allowed = None if constraint is None else constraint.allowed
    cache, checked = verify(model, cache, state, drafts, num_drafts, token_bias, shape, allowed, head)
    num_agreeing = accept(checked.targets, drafts, num_drafts)
    num_emitted, finish = stop(checked.targets, num_agreeing + 1, state)
    return cache, commit(state, checked, proposal, num_agreeing, num_emitted, finish), checked.logprobs


class Proposal(NamedTuple):
    """What is to be verified."""

    drafts: Array  # [B, K] int32
    num_drafts: Array  # [B] int32: how many of them are meant
    is_from_head: Array  # [B] bool


def draft(
    model: Decoder,
    cache: PagedCache,
    state: DecodeState,
    shape: BurstShape,
    constraint: Constraint | None = None,
    head: EagleHead | None = None,
) -> tuple[Proposal, PagedCache]:
    """Proposed tokens, never more than the slot may still take, and the cache with what a head wrote on its way.

    A head works in the rounds where some slot has no n-gram to go by; elsewhere its work is skipped.
    """
    config, K = shape.draft, shape.draft.num_tokens
    drafts = jnp.zeros((state.length.shape[0], K), jnp.int32)
    meant = jnp.zeros_like(state.length)
    wanted = jnp.zeros_like(state.active)
    if K == 0:
        return Proposal(drafts, meant, wanted), cache
    if config.ngram_max > 0:
        drafts, match_length = propose_ngram(state.tokens, state.length, config)
        meant = jnp.where(match_length > 1, K, shape.num_weak_drafts)
        meant = jnp.where(match_length > 0, meant, 0)
    if head is not None:
        wanted = state.active & (meant == 0)
        if constraint is not None:
            wanted &= ~constraint.is_constrained

        def propose(cache: PagedCache) -> tuple[Array, Array, PagedCache]:
            return propose_eagle(
                model, head, cache, state.draft_hidden, state.length, state.block_tables, wanted, state.sampling,
                config, shape.head_rows,
            )  # fmt: skip

        own, num_own, cache = jax.lax.cond(jnp.any(wanted), propose, lambda cache: (drafts, meant, cache), cache)
        drafts = jnp.where(wanted[:, None], own, drafts)
        meant = jnp.where(wanted & (state.length > 1), num_own, meant)
    if constraint is not None:
        drafts = jnp.where(constraint.is_constrained[:, None], constraint.drafts, drafts)
        meant = jnp.where(constraint.is_constrained, constraint.num_drafts, meant)
    room = jnp.maximum(state.max_length - state.length - 1, 0)  # the pass itself gives one token more
    return Proposal(drafts, jnp.where(state.active, jnp.minimum(meant, room), 0), wanted), cache


class Checked(NamedTuple):
    """What the target says about the last token and its drafts."""

    targets: Array  # [B, K + 1] int32: its sample after each of them
    logprobs: TokenLogprobs | None  # [B, K + 1]: theirs, where a slot wants them
    draft_hidden: Array  # [B, K + 1, D]: a head's outputs behind each of the targets


def verify(
    model: Decoder,
    cache: PagedCache,
    state: DecodeState,
    drafts: Array,
    num_drafts: Array,
    token_bias: Array,
    shape: BurstShape,
    allowed: Array | None = None,
    head: EagleHead | None = None,
) -> tuple[PagedCache, Checked]:
    """One pass of the target over the last token and its drafts. A head follows at once, over the same rows.

    Row i sees the drafts before it. Rows past the agreeing prefix leave KV that the next round overwrites.
    """
    K = drafts.shape[1]
    last = jnp.take_along_axis(state.tokens, jnp.maximum(state.length - 1, 0)[:, None], axis=1)
    row_tokens = jnp.concatenate([last, drafts], axis=1)  # [B, K + 1]

    def run(width: int, cache: PagedCache) -> tuple[PagedCache, Checked]:
        tokens = _fit(row_tokens, width)
        # A slot that has ended stands at the start: its rows cost nothing, and see something.
        first = jnp.where(state.active, jnp.maximum(state.length - 1, 0), 0)
        positions = first[:, None] + jnp.arange(width, dtype=jnp.int32)
        keep = jnp.broadcast_to(state.active[:, None], positions.shape)
        rows = Rows(positions, state.block_tables, keep)
        hidden, features, cache = run_target(model, head, tokens, rows, cache)
        logits = model.logits(hidden)
        scores = logits
        if shape.has_processors:
            text = RowText(state.tokens, state.prompt_length, state.length, tokens)
            bits = None if allowed is None else _fit(allowed, width)
            scores = process_logits(logits, text, state.processors, token_bias, state.stop_ids, bits)
        # A slot that has ended is greedy, whatever it was: what no active slot uses costs nothing.
        sampling = state.sampling._replace(temperature=jnp.where(state.active, state.sampling.temperature, 0.0))
        targets = sample(scores, positions + 1, sampling)
        logprobs = None
        if shape.has_processors:
            logprobs = jax.lax.cond(
                jnp.any(state.wants_logprobs & state.active),
                lambda: token_logprobs(logits, targets),
                lambda: empty_logprobs(targets.shape, logits.shape[-1]),
            )
        draft_hidden = jnp.zeros((*targets.shape, 0), state.draft_hidden.dtype)
        if head is not None:
            draft_hidden, cache = follow_target(model, head, cache, features, targets, rows)
        return cache, jax.tree.map(lambda x: _fit(x, K + 1), Checked(targets, logprobs, draft_hidden))

    widths = shape.row_widths
    if len(widths) == 1:
        return run(widths[0], cache)
    rows_needed = jnp.max(num_drafts) + 1
    narrowest = jnp.sum(jnp.array(widths[:-1], jnp.int32) < rows_needed)
    branches = [lambda cache, width=width: run(width, cache) for width in widths]
    return jax.lax.switch(narrowest, branches, cache)


def _fit(rows: Array, width: int) -> Array:
    """[B, T, ...] -> [B, width, ...]: cut, or filled up with zeros that nobody reads."""
    rows = rows[:, :width]
    return jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])) + ((0, 0),) * (rows.ndim - 2))


def accept(targets: Array, drafts: Array, num_drafts: Array) -> Array:
    """Length [B] of the prefix where the drafts are what the target itself sampled."""
    meant = jnp.arange(drafts.shape[1], dtype=jnp.int32) < num_drafts[:, None]
    agree = (targets[:, :-1] == drafts) & meant
    return jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1)


def stop(targets: Array, num_tokens: Array, state: DecodeState) -> tuple[Array, Array]:
    """How many of the first `num_tokens` targets are kept, [B], and why the slot ends there, [B].

    A stop id ends the text with itself; what comes after it is dropped. The token limit comes second: EOS exactly at the
    limit is a stop.
    """
    index = jnp.arange(targets.shape[1], dtype=jnp.int32)
    is_stop = jnp.any(targets[:, :, None] == state.stop_ids[:, None, :], axis=-1)  # [B, K + 1]
    room = state.max_length - state.length
    kept = jnp.minimum(num_tokens, room)
    first_stop = jnp.min(jnp.where(is_stop, index, targets.shape[1]), axis=1)
    stopped = first_stop < kept
    kept = jnp.where(stopped, first_stop + 1, kept)
    finish = jnp.where(stopped, STOPPED, jnp.where(kept == room, LENGTH, RUNNING))
    return jnp.where(state.active, kept, 0), jnp.where(state.active, finish, state.finish)


def commit(
    state: DecodeState, checked: Checked, proposal: Proposal, num_agreeing: Array, num_emitted: Array, finish: Array
) -> DecodeState:
    """Appends the emitted tokens and counts. Accepted drafts count only where they were committed."""
    index = jnp.arange(state.accepted.shape[1], dtype=jnp.int32)
    num_committed = jnp.minimum(num_agreeing, num_emitted)
    of_head = jnp.stack([proposal.num_drafts, num_committed], axis=1)
    last = jnp.maximum(num_emitted - 1, 0)[:, None, None]
    draft_hidden = jnp.take_along_axis(checked.draft_hidden, last, axis=1)[:, 0]
    return state._replace(
        tokens=append(state.tokens, checked.targets, state.length, num_emitted),
        length=state.length + num_emitted,
        draft_hidden=jnp.where(state.active[:, None], draft_hidden, state.draft_hidden),
        finish=finish,
        active=state.active & (finish == RUNNING),
        rounds=state.rounds + state.active,
        drafted=state.drafted + proposal.num_drafts,
        accepted=state.accepted + (index < num_committed[:, None]),
        head_drafts=state.head_drafts + jnp.where(proposal.is_from_head[:, None], of_head, 0),
    )


def append(table: Array, rows: Array, offset: Array, num_emitted: Array) -> Array:
    """Writes the first `num_emitted` [B] of a round's `rows` [B, K + 1, ...] into `table` [B, L, ...] at `offset` [B]."""
    index = jnp.arange(rows.shape[1], dtype=jnp.int32)
    where = jnp.where(index < num_emitted[:, None], offset[:, None] + index, table.shape[1])
    return table.at[jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None], where].set(rows, mode="drop")
