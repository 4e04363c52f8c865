"""From what a user types as `--draft` to n-grams, a draft head, both or nothing."""

import logging
from dataclasses import dataclass
from pathlib import Path

from spec_jax.errors import UserError

from .eagle import HeadFiles, open_head
from .load import ModelFiles
from .resolve import BUILTIN_MODELS, resolve

METHODS = ("auto", "ngram", "eagle", "none")
_HEADS = Path(__file__).parent / "heads"  # one folder per built-in model
_log = logging.getLogger("spec_jax")


@dataclass(frozen=True)
class Drafter:
    """Who proposes. With both, n-grams go first where their match is long."""

    uses_ngrams: bool
    head: HeadFiles | None


def open_drafter(draft: str, model: str, target: ModelFiles) -> Drafter:
    """`auto` is n-grams and the head that comes with `model`, where one does; `eagle` that head alone; a folder or hub id is
    n-grams and that head, `eagle:FOLDER` that head alone. What was understood of a head is logged.

    Raises UserError naming what is allowed, or what is wrong with a head.
    """
    if draft in ("ngram", "none"):
        return Drafter(draft == "ngram", None)
    folder = _HEADS / model if model in BUILTIN_MODELS and (_HEADS / model).is_dir() else None
    name = draft.removeprefix("eagle:")
    if draft not in METHODS:
        folder = _find(name, draft)
    elif draft == "eagle" and folder is None:
        raise UserError(f"no draft head comes with {model}: give one as --draft eagle:FOLDER, or use auto or ngram")
    head = None if folder is None else open_head(folder, target.config, target.tokenizer)
    if head is not None:
        _log.info(head.description)
    return Drafter(name == draft and draft != "eagle", head)


def _find(name: str, draft: str) -> Path:
    known = f"allowed are {', '.join(METHODS)}, or a folder with a head"
    if not name.strip() or name in BUILTIN_MODELS:
        raise UserError(f"draft {draft!r} is unknown: {known}")
    try:
        path = resolve(name)
    except UserError as error:
        if "/" in name and not Path(name).expanduser().exists():
            raise  # a hub id that could not be fetched
        raise UserError(f"draft {draft!r} is unknown: {known}") from error
    if not path.is_dir():
        raise UserError(f"draft {draft!r} is no folder: {known}")
    return path
