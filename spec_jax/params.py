"""What a user asks for: sampling parameters, checked where they enter."""

import math
from dataclasses import dataclass

from .errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Attributes:
      max_tokens: most tokens to generate.
      temperature: 0 is greedy.
      top_k: keep the k best tokens; 0 or -1 is off.
      top_p: keep the fewest best tokens whose probabilities reach this sum; 1 is off.
      min_p: keep tokens with at least this share of the best one's probability; 0 is off.
      seed: same seed, same text, whatever the drafts and the batch; None draws one.
      stop: text at which to end; neither it nor what follows is part of the text.
      stop_token_ids: ids at which to end, besides the model's own end-of-text ids; the id itself is kept.
      ignore_eos: go on after the model's own end-of-text ids.
      skip_special_tokens: leave control tokens out of the text.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field in ("stop", "stop_token_ids"):
            value = getattr(self, field)
            _require(isinstance(value, str | list | tuple), field, value, "a list")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        _require(_is_real(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a number >= 0")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer >= 1, or 0 or -1 for off")
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**64),
            "seed",
            self.seed,
            "an integer in [0, 2**64)",
        )
        for text in stop:
            _require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        for token in self.stop_token_ids:
            _require(_is_int(token) and token >= 0, "stop_token_ids", token, "token ids >= 0")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{field} is {value!r}: allowed is {allowed}")
