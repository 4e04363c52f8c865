"""Text to token ids and back: chat templates, control tokens inside user text, streaming that never cuts a character."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from .errors import UserError

ChatMessage = dict[str, Any]
"""`{"role": "system" | "user" | "assistant", "content": text}`, as chat templates take it."""

_PRIVATE_USE = 0xF0000  # Unicode plane 15: no text and no template contains these characters


class Tokenizer:
    """A `tokenizers` backend with the model's chat template."""

    def __init__(self, backend: Backend, chat_template: str | None = None, named_tokens: dict[str, str] | None = None):
        self._backend = backend
        self._template = chat_template
        self._named_tokens = named_tokens or {}
        self._special = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}

    def encode(self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        With `parse_special` false, `<|im_end|>` and the like inside `text` are ordinary characters: user text cannot
        forge control tokens. `add_special_tokens` puts the model's own start token first, where it has one.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the text holds bytes that are no UTF-8: give it as UTF-8") from None
        self._backend.encode_special_tokens = not parse_special
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Sequence[ChatMessage], *, parse_special: bool = False) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's answer.

        Control tokens written inside a message are ordinary text unless `parse_special`: the ones of the template are
        told apart by hiding those in the messages behind private characters while the template is rendered.
        """
        if parse_special:
            return self.encode(self._render(messages), parse_special=True, add_special_tokens=False)
        hidden = {token: chr(_PRIVATE_USE + i) for i, token in enumerate(self._special)}
        text = self._render([_map_text(message, lambda t: _replace_all(t, hidden)) for message in messages])
        shown = {private: token for token, private in hidden.items()}
        ids: list[int] = []
        for piece, is_control in _split(text, self._special):
            if is_control:
                ids.append(self._special[piece])
            else:
                ids += self.encode(_replace_all(piece, shown), add_special_tokens=False)
        return ids

    def user_prefix(self) -> list[int]:
        """Token ids of the chat template up to where the user's text begins: what a model continues with a user turn."""
        mark = chr(_PRIVATE_USE)
        return self.encode(
            self._render([{"role": "user", "content": mark}]).split(mark)[0],
            parse_special=True,
            add_special_tokens=False,
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def tokens(self) -> list[str]:
        """All tokens, in the order of their ids."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return sorted(vocabulary, key=vocabulary.__getitem__)

    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json` (Hugging Face's format)."""
        return self._backend.to_str()

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        if self._template is None:
            raise UserError("this model has no chat template: give a plain prompt instead of chat messages")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            template = environment.from_string(self._template)
        except TemplateError as error:
            raise UserError(f"this model's chat template cannot be read: {error}") from None
        try:
            return template.render(messages=messages, add_generation_prompt=True, **self._named_tokens)
        except Exception as error:  # a template is a program: it may fail in any way
            raise UserError(f"the model's chat template refuses these messages: {error}") from None


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed, at any depth: contents may be lists of parts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_text(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(part, change) for part in value]
    return value


def _replace_all(text: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        text = text.replace(old, new)
    return text


def _split(text: str, tokens: Iterable[str]) -> Iterable[tuple[str, bool]]:
    """Cuts `text` at each of `tokens`: pieces, and whether the piece is such a token."""
    start = 0
    while start < len(text):
        found = [(at, token) for token in tokens if (at := text.find(token, start)) >= 0]
        if not found:
            break
        at, token = min(found, key=lambda hit: (hit[0], -len(hit[1])))
        if at > start:
            yield text[start:at], False
        yield token, True
        start = at + len(token)
    if start < len(text):
        yield text[start:], False


class StreamDecoder:
    """Turns tokens into text as they come. A token that ends inside a character waits for the rest of it.

    Each piece is decoded together with the tokens just before it, so that what a tokenizer does at the start of a text
    (dropping a space, for example) happens once.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._shown = 0  # ids before this index are text already given out
        self._context = 0  # ids from here to `_shown` are decoded along
        self._before = ""  # their text

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._ids.append(token)
        before, text = self._before, self._decode(self._context)
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        self._before = self._decode(self._context)
        return text[len(before) :]

    def finish(self) -> str:
        """What is left at the end, broken characters included."""
        return self._decode(self._context)[len(self._before) :]

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip)
