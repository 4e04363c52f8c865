"""Constrained output: what a JSON schema or a regular expression allows next, from `llguidance` on the host."""

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import UserError
from .params import SamplingParams
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_LENGTH = {"json_schema": 65_536, "regex": 16_384}  # in characters; twice as long takes up to four times as long


class Grammar:
    """Follows one text, token by token, through its grammar; `vocab_size` is V below."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int):
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)

    @property
    def error(self) -> str | None:
        """What went wrong, once the grammar can no longer be followed."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def accept(self, tokens: Sequence[int]) -> None:
        """Goes on by the tokens that were committed."""
        self._matcher.consume_tokens(list(tokens))

    def plan(self, proposed: Sequence[int], max_drafts: int) -> tuple[list[int], list[np.ndarray]]:
        """Drafts for the next round, and what is allowed before, between and after them.

        What the grammar forces comes first, it is nearly always right; otherwise `proposed`, as far as it holds.

        Returns:
          at most `max_drafts` drafts, and one mask more than that: uint32 [ceil(V / 32)], a bit per token.
        """
        drafts: list[int] = []
        masks = []
        for place in range(max_drafts + 1):
            forced = self._matcher.compute_ff_tokens()
            masks.append(self._mask())
            following = list(proposed[place:]) if drafts == list(proposed[:place]) else []
            draft = (forced or following)[:1]
            if place == max_drafts or not draft or not self._matcher.try_consume_tokens(draft):
                break
            drafts += draft
        self._matcher.rollback(len(drafts))
        return drafts, masks

    def _mask(self) -> np.ndarray:
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words]  # it can be one word more


class GrammarCompiler:
    """Makes grammars for one tokenizer.

    Args:
      vocab_size: of the model's scores; it can be more than the tokenizer's own.
      eos_token_ids: allowed where the grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        if not eos_token_ids:
            raise UserError("json_schema and regex need a model with an end-of-text token: this one names none")
        from llguidance import LLParserLimits, LLTokenizer  # not before it is needed: few requests have a grammar

        self._vocab_size = vocab_size
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise UserError(f"json_schema and regex do not work with this model's tokenizer: {error}") from None
        # A mask is computed between two passes: a grammar that takes seconds for one is refused instead. What a grammar
        # forces at its very start is followed without any limit, unless large lexemes are computed beforehand.
        self._limits = LLParserLimits(
            initial_lexer_fuel=400_000, step_lexer_fuel=200_000, max_lexer_states=50_000,
            precompute_large_lexemes=True, verbose_errors=False,
        )  # fmt: skip

    def compile(self, params: SamplingParams) -> Grammar:
        """Raises UserError for what is no schema or regex, what is not supported, and what is too complex."""
        from llguidance import LLMatcher

        is_regex = params.regex is not None
        field, text = ("regex", params.regex) if is_regex else ("json_schema", params.json_schema)
        assert isinstance(text, str)  # a schema is its JSON text since it was checked
        if len(text) > MAX_LENGTH[field]:
            raise UserError(f"{field} has {len(text)} characters: at most {MAX_LENGTH[field]} are possible")
        if is_regex and (len(text) - len(text.rstrip("\\"))) % 2:
            raise UserError("regex cannot be used: it ends with a backslash that escapes nothing")
        if not is_regex:
            _check_complexity(json.loads(text))
        make = LLMatcher.grammar_from_regex if is_regex else LLMatcher.grammar_from_json_schema
        try:
            source = make(text)
        except ValueError as error:  # half a surrogate pair is no character
            raise UserError(f"{field} cannot be used: {error}") from None
        matcher = _on_deep_stack(lambda: LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits))
        grammar = Grammar(matcher, self._vocab_size)
        if grammar.error is None:
            grammar.plan((), 1)
        if grammar.error is not None:
            raise UserError(f"{field} cannot be used: {grammar.error}")
        return grammar


def _on_deep_stack(call: Callable[[], "LLMatcher"]) -> "LLMatcher":
    """`llguidance` follows `$ref`s by recursion: a long chain would overflow the usual stack, which ends the process."""
    usual = threading.stack_size(64 * 2**20)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call).result()
    finally:
        threading.stack_size(usual)


def _check_complexity(schema: Any) -> None:
    """Refuses what `llguidance` would spend minutes and gigabytes on before it looks at any of its limits."""
    objects = list(_objects(schema))
    values = [keys.get("multipleOf") for keys in objects]
    multiples = [_digits(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    named = [keys["patternProperties"] for keys in objects if isinstance(keys.get("patternProperties"), dict)]
    can_meet = any(
        "allOf" in keys or ("pattern" in keys and keys.keys() & {"$ref", "anyOf", "oneOf"}) for keys in objects
    )
    for what, count, limit in (
        (
            "number of multipleOf, times the common multiple of their digits",
            len(multiples) * math.lcm(*multiples),
            50_000,
        ),
        ("number of patternProperties", sum(map(len, named)), 100),
        ("number of patterns that may meet in one string", can_meet * sum("pattern" in keys for keys in objects), 12),
    ):
        if count > limit:
            raise UserError(f"json_schema is too complex: the {what} is {count}, at most {limit} is possible")


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """All JSON objects in `schema`, at any depth."""
    rest = [schema]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            yield value
            rest += value.values()
        elif isinstance(value, list):
            rest += value


def _digits(value: float) -> int:
    """1250 and 0.125 -> 125."""
    return int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits)))


def _first_line(message: str) -> str:
    """Without the details that `llguidance` puts behind it."""
    if message.startswith("NoExtension"):
        return "no text matches it"
    return " ".join(message.split("\n<")[0].split("\n\n")[0].split())[:300]
