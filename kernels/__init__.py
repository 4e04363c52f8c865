"""Array-in, array-out operations on the paged KV cache. No Flax, no I/O, nothing else of this project."""

from .paged_attention import paged_attention
from .write_kv import write_kv

__all__ = ["paged_attention", "write_kv"]
