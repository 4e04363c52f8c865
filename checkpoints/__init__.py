"""Reading weights and tokenizers: Hugging Face folders, GGUF files, and finding or fetching a model by name."""

from .load import ModelFiles, open_model
from .resolve import BUILTIN_MODELS, fetch

__all__ = ["BUILTIN_MODELS", "ModelFiles", "fetch", "open_model"]
