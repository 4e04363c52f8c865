"""One request on the host: its tokens, its text with stop strings cut, and what a caller gets to see."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .grammar import Grammar
from .logprobs import TokenLogprobs
from .params import SamplingParams
from .tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class RequestStats:
    """Counters of one request. They count what the device committed: where a stop string ends a text, it can be a few tokens
    more than the text has.

    `acceptance_length` is committed tokens per pass of the target. `accepted_per_position[i]` counts committed drafts that
    stood at place i. `ttft_s` is the time to the first token. `tpot_s` is the time per token after the first burst, which
    can hold several tokens that come at once; 0 where none came later. `tokens_per_s` is that of the whole request.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    acceptance_length: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tokens_after_first_burst: int = 0
    tokens_per_s: float = 0.0


class Counters(NamedTuple):
    """Of one request, as `decode_loop.DecodeState` has them."""

    rounds: int = 0
    drafted: int = 0
    accepted: tuple[int, ...] = ()
    head_drafts: tuple[int, ...] = (0, 0)


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability, its rank (1 is the best), and the token as text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt: what has been generated so far.

    `finish_reason` is None while more is to come, then "stop", "length", "abort", or "error": its grammar has become too
    complex to follow. `stop_reason` is the stop string or the stop token id that ended the text, or what the error was; None
    for the model's own end of text. `logprobs` has, for each token, the token itself and the best ones, by token id.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: str | None
    stop_reason: str | int | None
    stats: RequestStats


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its `n` completions. Those of the only or first one can be read here as well.

    `prompt_logprobs` has an entry per token of the prompt; the first is None, as nothing stands before it.
    """

    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None
    outputs: tuple[CompletionOutput, ...]

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def logprobs(self) -> tuple[dict[int, Logprob], ...] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def stats(self) -> RequestStats:
        return self.outputs[0].stats


@dataclass(eq=False)
class Request:
    """One completion between its arrival and its end."""

    prompt: list[int]
    params: SamplingParams
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    max_length: int  # tokens, prompt included, at which it must end
    seed: int
    index: int = 0
    bad_words: Sequence[tuple[int, ...]] = ()  # those of `params`, as token ids
    grammar: Grammar | None = None
    streams: bool = False

    output: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    num_prefilled: int = 0
    num_committed: int = 0  # tokens that the device committed; a stop string can leave some of them unused
    draft_hidden: Any = None  # of a draft head, between prefill and decode
    proposed: list[int] = field(default_factory=list)  # drafts that the grammar has not seen yet

    arrived: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_first: int = 0  # tokens that came with the first burst
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer, skip_special_tokens=self.params.skip_special_tokens)
        self._text = ""

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether some of them are asked for and not there yet."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        own = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*own, *self.params.stop_token_ids)))

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, tokens: Sequence[int], finish_reason: str | None, logprobs: TokenLogprobs | None = None) -> None:
        """Takes the tokens of one burst; a stop string ends the request at the token that completes it.

        `logprobs` are arrays that begin with those of `tokens`."""
        now = time.perf_counter()
        self.num_committed += len(tokens)
        for i, token in enumerate(tokens):
            self.output.append(token)
            if logprobs is not None and self.params.logprobs is not None:
                self.logprobs.append(self._logprob_entry(token, i, logprobs, self.params.logprobs))
            if self._show(self._decoder.push(token)):
                break
        else:
            if finish_reason is not None and not self._show(self._decoder.finish()):
                self.finish_reason = finish_reason
                if finish_reason == "stop" and self.output[-1] in self.params.stop_token_ids:
                    self.stop_reason = self.output[-1]
        if tokens:
            self.last_token_at = now
            if not self.first_token_at:
                self.first_token_at, self.num_first = now, len(self.output)

    def append_prompt_logprobs(self, tokens: Sequence[int], logprobs: TokenLogprobs) -> None:
        """Takes those of the next `tokens` of the prompt."""
        number = self.params.prompt_logprobs or 0
        self.prompt_logprobs += [self._logprob_entry(token, i, logprobs, number) for i, token in enumerate(tokens)]

    def _logprob_entry(self, token: int, i: int, logprobs: TokenLogprobs, number: int) -> dict[int, Logprob]:
        def entry(token: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, self.tokenizer.decode([token], skip_special_tokens=False))

        best = zip(logprobs.top_ids[i, :number].tolist(), logprobs.top[i, :number].tolist(), strict=True)
        found = {token: entry(token, float(logprobs.token[i]), int(logprobs.rank[i]))}
        return found | {id_: entry(id_, value, rank) for rank, (id_, value) in enumerate(best, 1) if id_ != token}

    def _show(self, piece: str) -> bool:
        """Adds to the text; True when a stop string ended it, cut there."""
        start = len(self._text)
        self._text += piece
        if not piece or len(self.output) <= self.params.min_tokens:
            return False
        # What ends before this piece was looked at already, or belongs to the first `min_tokens`.
        hits = [(at, s) for s in self.params.stop if (at := self._text.find(s, max(0, start - len(s) + 1))) >= 0]
        if not hits:
            return False
        at, self.stop_reason = min(hits)
        kept = at + len(self.stop_reason) if self.params.include_stop_str_in_output else at
        self._text, self.finish_reason = self._text[:kept], "stop"
        return True

    def _visible_text(self) -> str:
        """The text without an end that may yet turn out to be the start of a stop string."""
        if self.is_finished or self.params.include_stop_str_in_output:
            return self._text
        held = max(
            (n for s in self.params.stop for n in range(1, len(s)) if self._text.endswith(s[:n])),
            default=0,
        )
        return self._text[: len(self._text) - held]

    def snapshot(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            token_ids=tuple(self.output),
            text=self._visible_text(),
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            stats=self._stats(),
        )

    def _stats(self) -> RequestStats:
        rounds, drafted, accepted, _ = self.counters
        seconds = self.last_token_at - self.first_token_at
        later = len(self.output) - self.num_first
        total = self.last_token_at - self.arrived
        return RequestStats(
            rounds=rounds,
            drafted=drafted,
            accepted=sum(accepted),
            accepted_per_position=accepted,
            acceptance_length=self.num_committed / rounds if rounds else 0.0,
            ttft_s=self.first_token_at - self.arrived if self.first_token_at else 0.0,
            tpot_s=seconds / later if later else 0.0,
            tokens_after_first_burst=later,
            tokens_per_s=len(self.output) / total if total > 0 else 0.0,
        )
