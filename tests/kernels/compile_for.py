"""`python -m tests.kernels.compile_for h200 write`: compiles these shapes for a GPU that need not be there; ptxas reports.

A process can do this for one target only: XLA remembers the first.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spec_jax.compile_check.targets import find_target, mesh_of
from spec_jax.kernels import Pages, paged_attention, write_kv

SHAPES = {
    #             float8, B, T, K, G, head_dim, page, window
    "decode": (False, 8, 6, 8, 4, 128, 64, None),
    "decode-float8": (True, 8, 6, 8, 4, 128, 64, 4096),
    "one-kv-head-float8": (True, 32, 6, 1, 8, 128, 64, None),  # 48 rows
    "prefill": (False, 1, 256, 8, 4, 128, 64, None),
    "prefill-float8": (True, 1, 256, 8, 4, 128, 64, None),
    "head-dim-64": (False, 4, 6, 3, 3, 64, 16, None),
    "head-dim-80": (False, 1, 64, 8, 4, 80, 64, None),
    "head-dim-96-float8": (True, 4, 6, 8, 4, 96, 128, None),
    "head-dim-256-float8": (True, 1, 64, 4, 4, 256, 32, None),
}
WRITES = {  # float8, head_dim
    "write": (False, 128),
    "write-float8": (True, 128),
    "write-head-dim-64-float8": (True, 64),
    "write-head-dim-80": (False, 80),
}


def main(target: str, *names: str) -> None:
    mesh = mesh_of(find_target(target), 1)

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def cache(is_float8, K, head_dim, page):
        values = array(1000, K, page, head_dim, dtype=jnp.uint8 if is_float8 else jnp.bfloat16)
        return Pages(values, array(1000, K, page, dtype=jnp.float32) if is_float8 else None)

    def compile_one(name, call, *arguments):
        print(f"== {name}", flush=True)
        jax.jit(partial(call, implementation="mosaic")).lower(*arguments).compile()

    with jax.set_mesh(mesh):
        for name in names:
            if name in WRITES:
                is_float8, head_dim = WRITES[name]
                pages, rows = cache(is_float8, 8, head_dim, 64), array(8, 6, 8, head_dim, dtype=jnp.bfloat16)
                keep = array(8, 6, dtype=jnp.bool_)
                compile_one(name, write_kv, pages, pages, rows, rows, array(8, 512), array(8, 6), keep)
                continue
            is_float8, B, T, K, G, head_dim, page, window = SHAPES[name]
            pages = cache(is_float8, K, head_dim, page)
            attend = partial(paged_attention, scale=head_dim**-0.5, sliding_window=window)
            q = array(B, T, K * G, head_dim, dtype=jnp.bfloat16)
            compile_one(name, attend, q, pages, pages, array(B, 512), array(B, T))


if __name__ == "__main__":
    main(*sys.argv[1:])
