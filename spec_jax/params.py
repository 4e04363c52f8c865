"""What a user asks for: sampling parameters, checked where they enter."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .config import MAX_LOGPROBS
from .errors import UserError

MAX_COMPLETIONS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and meanings are those of vLLM and the OpenAI API.

    What is done to the target's scores, in this order: grammar and allowed ids, bad words, `min_tokens`, `logit_bias`,
    penalties, temperature, min-p, top-k, top-p, typical-p. All of it holds for greedy requests as well, up to temperature.

    Attributes:
      n: completions per prompt, each with a seed of its own (`seed + index`).
      max_tokens: most tokens to generate.
      min_tokens: no end-of-text id, stop id or stop string ends the text before so many tokens.
      temperature: 0 is greedy.
      top_k: keep the k best tokens; 0 or -1 is off.
      top_p: keep the fewest best tokens whose probabilities reach this sum; 1 is off.
      min_p: keep tokens with at least this share of the best one's probability; 0 is off.
      typical_p: keep the fewest tokens, those of the most typical information first, whose probabilities reach this sum
        (arXiv 2202.00666); 1 is off.
      seed: same seed, same text, whatever the drafts and the batch; None draws one.
      repetition_penalty: scores of tokens of prompt and output are divided by it where positive, else multiplied; 1 is off.
      presence_penalty: taken from the score of every token of the output, once; 0 is off.
      frequency_penalty: taken from the score of a token of the output for each time it stands there; 0 is off.
      logit_bias: added to the scores of these ids, -100 to 100.
      allowed_token_ids: only these ids are ever sampled.
      bad_words: words or token sequences that are never sampled. A word is forbidden as it is tokenized, with and without a
        space before it.
      stop: text at which to end; neither it nor what follows is part of the text.
      stop_token_ids: ids at which to end, besides the model's own end-of-text ids; the id itself is kept.
      ignore_eos: go on after the model's own end-of-text ids.
      include_stop_str_in_output: the stop string that ended the text is part of it.
      skip_special_tokens: leave control tokens out of the text.
      logprobs: report the log-probability of every emitted token and of so many best ones beside it, 0 to 20, from the
        target's scores before any of the above; None is off.
      prompt_logprobs: the same for the tokens of the prompt.
      json_schema: the text is JSON that follows this schema (a dict, or its JSON text).
      regex: the text matches this regular expression (Rust's syntax, no look-around).
    """

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        self._freeze_lists()
        self._check_numbers()
        self._check_tokens()
        self._check_texts()
        self._check_together()

    @property
    def is_constrained(self) -> bool:
        return self.json_schema is not None or self.regex is not None

    @property
    def needs_processors(self) -> bool:
        """Whether anything is asked for that `logits_processors` do, or log-probabilities."""
        has_penalty = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        forbids = (
            self.allowed_token_ids is not None or bool(self.bad_words) or self.min_tokens > 0 or self.is_constrained
        )
        return has_penalty or forbids or bool(self.logit_bias) or self.logprobs is not None

    def _freeze_lists(self) -> None:
        """Copies, so that a caller who changes a list afterwards changes no request on its way."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids), ("bad_words", self.bad_words)):
            self._set(name, _as_tuple(name, value))
        self._set("bad_words", tuple(w if isinstance(w, str) else _as_tuple("bad_words", w) for w in self.bad_words))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            _require(
                isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "a dict from token id to number"
            )
            self._set("logit_bias", dict(self.logit_bias))

    def _check_numbers(self) -> None:
        integer, real = _is_int, _is_real
        logprobs = f"an integer in [0, {MAX_LOGPROBS}], or None"
        for name, kind, holds, allowed in (
            ("n", integer, lambda x: 1 <= x <= MAX_COMPLETIONS, f"an integer in [1, {MAX_COMPLETIONS}]"),
            ("max_tokens", integer, lambda x: 1 <= x < 2**31, "an integer in [1, 2**31)"),
            ("min_tokens", integer, lambda x: 0 <= x < 2**31, "an integer in [0, 2**31)"),
            ("temperature", real, lambda x: x == 0 or x >= 1e-6, "0, or a number >= 1e-6"),
            ("top_k", integer, lambda x: -1 <= x < 2**31, "an integer in [1, 2**31), or 0 or -1 for off"),
            ("top_p", real, lambda x: 0 < x <= 1, "a number in (0, 1]"),
            ("min_p", real, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
            ("typical_p", real, lambda x: 0 < x <= 1, "a number in (0, 1]"),
            ("seed", _or_none(integer), lambda x: x is None or 0 <= x < 2**64, "an integer in [0, 2**64)"),
            ("repetition_penalty", real, lambda x: 0.01 <= x <= 100, "a number in [0.01, 100]"),
            ("presence_penalty", real, lambda x: -2 <= x <= 2, "a number in [-2, 2]"),
            ("frequency_penalty", real, lambda x: -2 <= x <= 2, "a number in [-2, 2]"),
            ("logprobs", _or_none(integer), lambda x: x is None or 0 <= x <= MAX_LOGPROBS, logprobs),
            ("prompt_logprobs", _or_none(integer), lambda x: x is None or 0 <= x <= MAX_LOGPROBS, logprobs),
        ):
            value = getattr(self, name)
            _require(kind(value) and holds(value), name, value, allowed)
            if value is not None:
                self._set(name, int(value) if isinstance(value, Integral) else float(value))  # NumPy's become Python's
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")

    def _check_tokens(self) -> None:
        sequences = [word for word in self.bad_words if not isinstance(word, str)]
        _require(all(sequences), "bad_words", (), "words, or sequences of at least one token id")
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", [token for word in sequences for token in word]),
            ("logit_bias", self.logit_bias or ()),
        ):
            for token in ids:
                _require(_is_int(token) and 0 <= token < 2**31, name, token, "token ids in [0, 2**31)")
        for value in (self.logit_bias or {}).values():
            _require(_is_real(value) and -100 <= value <= 100, "logit_bias", value, "numbers in [-100, 100]")
        _require(self.allowed_token_ids != (), "allowed_token_ids", (), "at least one token id, or None")

    def _check_texts(self) -> None:
        for text in self.stop:
            _require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
            _require(len(text) <= MAX_STOP_LENGTH, "stop", text, f"strings of up to {MAX_STOP_LENGTH} characters")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise UserError(f"stop is a list of {len(self.stop)}: allowed are up to {MAX_STOP_STRINGS} strings")
        for word in self.bad_words:
            _require(not isinstance(word, str) or word.strip() != "", "bad_words", word, "words that are not blank")
        _require(
            self.regex is None or (isinstance(self.regex, str) and self.regex != ""), "regex", self.regex, "a regex"
        )
        if self.json_schema is not None:
            self._set("json_schema", _schema_text(self.json_schema))

    def _check_together(self) -> None:
        def refuse(holds: bool, what: str) -> None:
            if holds:
                raise UserError(what)

        refuse(
            self.min_tokens > self.max_tokens,
            f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}",
        )
        refuse(
            self.n > 1 and self.temperature == 0,
            f"n is {self.n} with temperature 0: greedy completions are all the same, set a temperature or n = 1",
        )
        refuse(self.json_schema is not None and self.regex is not None, "json_schema and regex: give one of the two")
        if self.is_constrained:
            field = "regex" if self.json_schema is None else "json_schema"
            for name, off in (("min_tokens", 0), ("ignore_eos", False), ("allowed_token_ids", None), ("bad_words", ())):
                refuse(
                    getattr(self, name) != off,
                    f"{name} cannot be combined with {field}: together they could forbid every token",
                )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _schema_text(schema: Any) -> str:
    """A JSON schema as JSON text; raises UserError where it is none."""
    allowed = "a JSON schema: a dict, or its JSON text"
    if isinstance(schema, str):
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UserError(f"json_schema is no JSON: {error}") from None
        _require(isinstance(parsed, dict | bool), "json_schema", schema, allowed)
        return schema
    _require(isinstance(schema, Mapping), "json_schema", schema, allowed)
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"json_schema cannot be written as JSON: {error}") from None


def _as_tuple(field: str, value: Any) -> tuple[Any, ...]:
    """A list as a tuple; None is the empty one, and NumPy's integers become Python's."""
    if value is None:
        return ()
    _require(isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping), field, value, "a list")
    return tuple(int(item) if _is_int(item) else item for item in value)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and -1e30 < value < 1e30  # type: ignore[operator]


def _or_none(kind):
    return lambda value: value is None or kind(value)


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{field} is {_shown(value)}: allowed is {allowed}")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not write out numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:80]}…"
