"""One request on the host: its tokens, its text with stop strings cut, and what a caller gets to see."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .params import SamplingParams
from .tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class RequestStats:
    """Counters of one request.

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


@dataclass(frozen=True)
class RequestOutput:
    """What has been generated so far. `finish_reason` is None while more is to come, then "stop", "length" or "abort".

    `stop_reason` is the stop string or the stop token id that ended the text; None for the model's own end of text.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    stats: RequestStats


@dataclass(eq=False)
class Request:
    """A request between its arrival and its end."""

    prompt: list[int]
    params: SamplingParams
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    max_length: int  # tokens, prompt included, at which it must end
    seed: int
    streams: bool = False

    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    num_prefilled: int = 0
    num_committed: int = 0  # tokens that the device committed; a stop string can leave some of them unused

    arrived: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_first: int = 0  # tokens that came with the first burst
    counters: tuple[int, int, tuple[int, ...]] = (0, 0, ())

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer, skip_special_tokens=self.params.skip_special_tokens)
        self._text = ""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        own = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*own, *self.params.stop_token_ids)))

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, tokens: Sequence[int], finish_reason: str | None) -> None:
        """Takes the tokens of one burst; a stop string ends the request at the token that completes it."""
        now = time.perf_counter()
        self.num_committed += len(tokens)
        for token in tokens:
            self.output.append(token)
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

    def _show(self, piece: str) -> bool:
        """Adds to the text; True when a stop string ended it, cut before the string."""
        start = len(self._text)
        self._text += piece
        if not piece:
            return False
        longest = max((len(s) for s in self.params.stop), default=0)
        hits = [(at, s) for s in self.params.stop if (at := self._text.find(s, max(0, start - longest + 1))) >= 0]
        if not hits:
            return False
        at, self.stop_reason = min(hits)
        self._text, self.finish_reason = self._text[:at], "stop"
        return True

    def _visible_text(self) -> str:
        """The text without an end that may yet turn out to be the start of a stop string."""
        if self.is_finished:
            return self._text
        held = max(
            (n for s in self.params.stop for n in range(1, len(s)) if self._text.endswith(s[:n])),
            default=0,
        )
        return self._text[: len(self._text) - held]

    def snapshot(self) -> RequestOutput:
        return RequestOutput(
            prompt_token_ids=tuple(self.prompt),
            token_ids=tuple(self.output),
            text=self._visible_text(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            stats=self._stats(),
        )

    def _stats(self) -> RequestStats:
        rounds, drafted, accepted = self.counters
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
