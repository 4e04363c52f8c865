"""Reading weights and tokenizers: Hugging Face folders, GGUF files, draft heads, and finding or fetching a model by name."""

from .drafts import Drafter, open_drafter
from .eagle import HeadFiles, open_head
from .eagle_export import check_exportable, export_head
from .load import ModelFiles, open_model
from .resolve import BUILTIN_MODELS, fetch

__all__ = [
    "BUILTIN_MODELS",
    "Drafter",
    "HeadFiles",
    "ModelFiles",
    "check_exportable",
    "export_head",
    "fetch",
    "open_drafter",
    "open_head",
    "open_model",
]
