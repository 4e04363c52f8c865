"""What the native kernels bring on this CPU: all products of a model of SmolLM2-135M's sizes, and its attention, against
XLA's own, by the number of rows. Both in turn in one process; medians.

    python benchmarks/native_kernels.py
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import tyro

from spec_jax.compilation import use_native_kernels
from spec_jax.kernels import Pages, matmul, paged_attention

LAYERS, HIDDEN, FFN, KV_HEADS, GROUP, HEAD_DIM, PAGE = 30, 576, 1536, 3, 3, 64, 16
WEIGHTS = (((GROUP + 2) * KV_HEADS * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN))


def xla_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("ri,oi->ro", x, w)


def products(product: Callable[..., jax.Array], x: jax.Array, layers: list[list[jax.Array]]) -> jax.Array:
    for qkv, output, up, down in layers:
        x = product(product(x, qkv)[:, :HIDDEN], output)
        x = product(product(x, up)[:, :FFN], down)
    return x


def attentions(attend: Callable[..., jax.Array], q: jax.Array, layers: list[Pages], *where: jax.Array) -> jax.Array:
    for pages in layers:
        q = attend(q, pages, pages, *where, scale=HEAD_DIM**-0.5)
    return q


def compare(repeats: int, xla: Callable[..., jax.Array], native: Callable[..., jax.Array], *inputs: object) -> str:
    """Milliseconds of both, and the ratio."""
    times: dict[Callable[..., jax.Array], list[float]] = {f: [] for f in (jax.jit(xla), jax.jit(native))}
    for function in times:
        jax.block_until_ready(function(*inputs))
    for _ in range(repeats):
        for function, taken in times.items():
            started = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            taken.append((time.perf_counter() - started) * 1e3)
    by_xla, by_native = map(median, times.values())
    return f"XLA {by_xla:6.1f} ms, native {by_native:6.1f} ms, {by_xla / by_native:4.2f} x"


def main(repeats: int = 9) -> None:
    use_native_kernels()
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def random(dtype: str, *shape: int) -> jax.Array:
        return (jax.random.normal(next(keys), shape) / shape[-1] ** 0.5).astype(dtype)

    for dtype in ("bfloat16", "float32"):
        layers = [[random(dtype, *shape) for shape in WEIGHTS] for _ in range(LAYERS)]
        for rows in (2, 4, 6, 12, 24, 32):
            x = random(dtype, rows, HIDDEN)
            print(f"products, {dtype}, {rows} rows:", compare(
                repeats, partial(products, xla_matmul), partial(products, matmul), x, layers), flush=True)  # fmt: skip
        for context, rows in ((256, 2), (256, 6), (2048, 6)):
            count = context // PAGE
            cache = [Pages(random(dtype, count + 1, KV_HEADS, PAGE, HEAD_DIM)) for _ in range(LAYERS)]
            q = random(dtype, 1, rows, KV_HEADS * GROUP, HEAD_DIM)
            where = jnp.arange(1, count + 1)[None], context - rows + jnp.arange(rows)[None]
            versions = (
                partial(attentions, partial(paged_attention, implementation=name)) for name in ("xla", "native")
            )
            print(
                f"attention, {dtype}, {rows} rows of {context}:",
                compare(repeats, *versions, q, cache, *where),
                flush=True,
            )


if __name__ == "__main__":
    tyro.cli(main)
