"""spec-jax: lossless speculative decoding on JAX, as one compiled loop."""

from .errors import UserError
from .params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "UserError"]


def __getattr__(name: str):
    # JAX takes a second to import; what needs it is loaded when asked for.
    if name == "LLM":
        from .llm import LLM

        return LLM
    if name in ("CompletionOutput", "Logprob", "RequestOutput"):
        from . import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
