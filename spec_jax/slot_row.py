"""What a request looks like on the device: its row of the decode state and of the token biases. Arrays of NumPy only."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .config import EngineConfig
from .decode_loop import RUNNING, DecodeState
from .errors import UserError
from .logits_processors import ProcessorState
from .request import Request
from .sampling import SamplingState
from .sizes import Sizes


def slot_row(request: Request, sizes: Sizes) -> DecodeState:
    """The request as a DecodeState without the slot axis. Its text so far, output included, stands in the cache but for the
    last token."""
    params, text, config = request.params, request.tokens, sizes.config
    num_draft_tokens, vocab_size = sizes.draft.num_tokens, sizes.model.vocab_size
    draft_hidden: Any = request.draft_hidden
    if draft_hidden is None:  # no head; or a prompt of one token, which has had no prefill and gets no first draft
        draft_hidden = np.zeros(sizes.draft_hidden.shape, sizes.draft_hidden.dtype)
    rounds, drafted, accepted, head_drafts = request.counters

    def array(value: Any, dtype: type = np.int32) -> Any:
        return np.asarray(value, dtype)

    return DecodeState(
        tokens=filled(text, config.max_model_len + num_draft_tokens),
        prompt_length=array(len(request.prompt)),
        length=array(len(text)),
        max_length=array(request.max_length),
        block_tables=filled(request.pages, sizes.max_pages),
        active=array(True, np.bool_),
        finish=array(RUNNING),
        stop_ids=filled(request.stop_ids, config.max_stop_ids, -1),
        processors=ProcessorState(
            repetition_penalty=array(params.repetition_penalty, np.float32),
            presence_penalty=array(params.presence_penalty, np.float32),
            frequency_penalty=array(params.frequency_penalty, np.float32),
            min_length=array(min(len(request.prompt) + params.min_tokens, request.max_length)),
            bad_words=_bad_word_table(request.bad_words, config),
            has_bias=array(needs_bias(request), np.bool_),
        ),
        sampling=SamplingState(
            temperature=array(params.temperature, np.float32),
            top_k=array(min(max(params.top_k, 0), vocab_size)),
            top_p=array(params.top_p, np.float32),
            min_p=array(params.min_p, np.float32),
            typical_p=array(params.typical_p, np.float32),
            seed=array([request.seed >> 32, request.seed & 0xFFFFFFFF], np.uint32),
        ),
        wants_logprobs=array(params.logprobs is not None, np.bool_),
        draft_hidden=draft_hidden,
        rounds=array(rounds),
        drafted=array(drafted),
        accepted=filled(accepted, num_draft_tokens),
        head_drafts=array(head_drafts),
    )


def needs_bias(request: Request) -> bool:
    """Whether anything is added to single tokens' scores."""
    params = request.params
    return bool(params.logit_bias or params.allowed_token_ids or any(len(word) == 1 for word in request.bad_words))


def token_bias(request: Request, vocab_size: int) -> Any:
    """What is added to each token's score, float32 [V]; -inf forbids."""
    params = request.params
    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0
    bias[[word[0] for word in request.bad_words if len(word) == 1]] = -np.inf
    for token, value in (params.logit_bias or {}).items():
        bias[token] += value
    return bias


def check_tokens(request: Request, config: EngineConfig, vocab_size: int) -> None:
    """Raises UserError for token ids outside the vocabulary, for more than the state has room for, and for parameters that
    together could forbid every token."""
    params = request.params
    for name, ids in (
        ("prompt", request.prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words", [token for word in request.bad_words for token in word]),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise UserError(f"{name} has token id {token}: the vocabulary has ids 0 to {vocab_size - 1}")
    limit, count = config.max_stop_ids, len(request.stop_ids)
    if count > limit:
        raise UserError(f"{count} stop token ids (the model's own included): at most {limit} are possible")
    sequences = [word for word in request.bad_words if len(word) > 1]
    limit = config.max_bad_words
    if len(sequences) > limit:
        raise UserError(f"bad_words are {len(sequences)} sequences of several tokens: at most {limit} are possible")
    longest, limit = max((len(word) for word in sequences), default=0), config.max_bad_word_tokens
    if longest > limit:
        raise UserError(f"bad_words has a word of {longest} tokens: at most {limit} are possible")
    if request.bad_words or params.min_tokens:
        _check_something_is_left(request, vocab_size)


def _check_something_is_left(request: Request, vocab_size: int) -> None:
    """If everything is forbidden at once that can be, it must not be everything."""
    params = request.params
    left = set(params.allowed_token_ids or range(vocab_size)) - {word[-1] for word in request.bad_words}
    if not left:
        raise UserError("bad_words can forbid every token that allowed_token_ids allows: nothing could be sampled")
    if params.min_tokens and not left - set(request.stop_ids):
        raise UserError(
            "min_tokens forbids the stop ids at first, and allowed_token_ids allows no others: nothing could be sampled"
        )


def filled(values: Sequence[int], size: int, fill: int = 0) -> Any:
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
