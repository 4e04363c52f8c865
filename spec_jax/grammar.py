"""Constrained output: what a JSON schema or a regular expression allows next, from `llguidance` on the host."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .errors import UserError
from .params import SamplingParams
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar:
    """Follows one text, token by token, through its grammar."""

    def __init__(self, matcher: "LLMatcher"):
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        """What went wrong, once the grammar can no longer be followed."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def accept(self, tokens: Sequence[int]) -> None:
        """Goes on by the tokens that were committed."""
        self._matcher.consume_tokens(list(tokens))

    def plan(self, proposed: Sequence[int], max_drafts: int) -> tuple[list[int], list[np.ndarray]]:
        """Drafts for the next round, and what is allowed before, between and after them.

        What the grammar forces comes first, it is nearly always right; otherwise `proposed`, up to where the grammar breaks.

        Returns:
          at most `max_drafts` drafts, and one mask more than that: uint32 [ceil(V / 32)], a bit per token.
        """
        forced = self._matcher.compute_ff_tokens() if max_drafts else []
        drafts = list(forced or proposed)[:max_drafts]
        drafts = drafts[: self._matcher.validate_tokens(drafts)]
        masks = [self._mask()]
        for draft in drafts:
            self._matcher.consume_token(draft)
            masks.append(self._mask())
        self._matcher.rollback(len(drafts))
        return drafts, masks

    def _mask(self) -> np.ndarray:
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)


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

        self._tokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        # A mask is computed between two passes: a grammar that takes seconds for one is refused instead.
        self._limits = LLParserLimits(
            initial_lexer_fuel=200_000, step_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False,
            precompute_large_lexemes=True,
        )  # fmt: skip

    def compile(self, params: SamplingParams) -> Grammar:
        """Raises UserError for what is no schema or regex, what is not supported, and what is too complex."""
        from llguidance import LLMatcher

        if params.regex is not None:
            field, source = "regex", LLMatcher.grammar_from_regex(params.regex)
        else:
            assert isinstance(params.json_schema, str)  # it is its JSON text since it was checked
            field, source = "json_schema", LLMatcher.grammar_from_json_schema(params.json_schema)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise UserError(f"{field} cannot be used: {_first_line(matcher.get_error())}")
        return Grammar(matcher)


def _first_line(message: str) -> str:
    return " ".join(message.split("\n\n")[0].split())[:300]
