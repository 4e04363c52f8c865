"""Array-in, array-out operations: on the paged KV cache, and the product with a weight. No Flax, nothing else of this
project, and no I/O but in `build_native`."""

from .dispatch import Unsupported, has_mosaic, runs
from .matmul import matmul
from .native import NotBuilt
from .native import build as build_native
from .paged_attention import paged_attention
from .pages import SCRATCH_PAGE, Pages
from .write_kv import write_kv

__all__ = [
    "SCRATCH_PAGE",
    "NotBuilt",
    "Pages",
    "Unsupported",
    "build_native",
    "has_mosaic",
    "matmul",
    "paged_attention",
    "runs",
    "write_kv",
]
