"""Array-in, array-out operations on the paged KV cache. No Flax, no I/O, nothing else of this project."""

from .dispatch import Unsupported, has_mosaic, runs_mosaic
from .paged_attention import paged_attention
from .pages import SCRATCH_PAGE, Pages
from .write_kv import write_kv

__all__ = ["SCRATCH_PAGE", "Pages", "Unsupported", "has_mosaic", "paged_attention", "runs_mosaic", "write_kv"]
