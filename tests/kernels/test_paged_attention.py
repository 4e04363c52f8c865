"""Paged attention, every implementation, against dense attention in float64 NumPy."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from spec_jax.kernels import Pages, Unsupported, paged_attention

from .interpret import interpreted

FLOAT8 = ml_dtypes.float8_e4m3fn
EMPTY = 0  # length of a slot without a sequence: its block table is zeros


@dataclass(frozen=True)
class Case:
    is_float8: bool
    head_dim: int
    page: int
    kv_heads: int
    group: int  # query heads per KV head
    rows: int  # the last ones of each sequence
    lengths: tuple[int, ...]  # of the sequences, `rows` included
    capacity: int  # positions that a block table can name
    window: int | None = None
    processors: int = 132  # the fewer, the longer are the shares of the context, which blocks walk through in a loop

    def __str__(self) -> str:
        names = f"{self.head_dim}x{self.page}-{self.kv_heads}x{self.group}-{self.rows}of{max(self.lengths)}"
        return f"{'float8' if self.is_float8 else 'bfloat16'}-{names}" + (f"-w{self.window}" if self.window else "")


BFLOAT16, IN_FLOAT8 = partial(Case, False), partial(Case, True)
CASES = [
    #        head_dim, page, KV heads, group, rows, lengths, capacity
    BFLOAT16(64, 16, 2, 3, 6, (6, 193, 384), 384, processors=1),  # 18 rows: no multiple of 16
    BFLOAT16(80, 32, 1, 1, 5, (5, EMPTY, 129, 224), 224),  # the last tile is half a tile
    BFLOAT16(96, 64, 1, 8, 1, (1, 64, 65, 320), 320),
    BFLOAT16(128, 128, 1, 1, 80, (80, 384), 384, 100),  # a chunk of a prompt: two tiles of rows
    BFLOAT16(256, 64, 1, 8, 9, (9, 256), 256, processors=1),  # three tiles of rows
    IN_FLOAT8(64, 64, 1, 2, 40, (40, EMPTY, 256), 256, 70),
    IN_FLOAT8(96, 128, 1, 3, 3, (3, 130, 384), 384, processors=1),
    IN_FLOAT8(128, 32, 2, 4, 6, (6, EMPTY, 190, 352), 352, processors=2),
    IN_FLOAT8(256, 32, 1, 1, 2, (2, 95, 256), 256, 30),
    IN_FLOAT8(64, 128, 1, 4, 2, (8000,), 8192, processors=8),  # 16 shares
    BFLOAT16(64, 64, 1, 1, 2, (2, 258), 256, 30),  # rows past the table see what of their window is in it
    pytest.param(BFLOAT16(64, 128, 1, 4, 2, (131_072,), 131_072), marks=pytest.mark.slow),
    pytest.param(IN_FLOAT8(64, 128, 1, 4, 2, (131_000,), 131_072), marks=pytest.mark.slow),
]


@cache
def compiled(implementation, scale, window, processors):
    """Every number of processors is a program of its own, though JAX cannot know."""
    return jax.jit(partial(paged_attention, scale=scale, sliding_window=window, implementation=implementation))


def attention(implementation, q, k, v, tables, positions, scale, window=None, processors=132):
    """The implementation under test, on arrays of NumPy; float64."""
    with (
        mock.patch("spec_jax.kernels.paged_attention.mosaic.num_cores", return_value=processors),
        interpreted() if implementation == "mosaic" else nullcontext(),
    ):
        k, v = jax.tree.map(jnp.asarray, (k, v))
        tables, positions = (jnp.asarray(x, jnp.int32) for x in (tables, positions))
        out = compiled(implementation, scale, window, processors)(jnp.asarray(q), k, v, tables, positions)
        return np.asarray(out).astype(np.float64)


def dense(q, k, v, positions, scale, window=None):
    """q [T, H, hd] at `positions`, k and v [S, K, hd]; float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), k, optimize=True) * scale
    place = np.arange(k.shape[0])
    seen = place[None] <= positions[:, None]
    if window:
        seen &= place[None] > positions[:, None] - window
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v, optimize=True)


def pages_of(rows, is_float8, scales=None):
    """Pages that hold `rows` [P, K, page, hd], and what they stand for in float64."""
    if not is_float8:
        return Pages(rows.astype(ml_dtypes.bfloat16)), rows.astype(ml_dtypes.bfloat16).astype(np.float64)
    if scales is None:
        scales = np.abs(rows).max(-1) / 448
    scales = scales.astype(np.float32)
    values = np.clip(rows / scales[..., None].astype(np.float64), -448, 448).astype(FLOAT8)
    return Pages(values.view(np.uint8), scales), values.astype(np.float64) * scales[..., None]


def rows_at(pages, table):
    """Pages [P, K, page, hd] of one sequence as [S, K, hd]."""
    return np.concatenate([pages[page].swapaxes(0, 1) for page in table])


def error(out, expected):
    return np.linalg.norm(out - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("implementation", ["xla", "mosaic", "native"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_dense_attention_whatever_lies_in_unused_rows(case, implementation, request):
    if implementation == "native":
        request.getfixturevalue("native_kernels")
        if case.is_float8 or case.head_dim % 32:
            pytest.skip("not for native kernels")
    rng = np.random.default_rng(0)
    B, N, scale = len(case.lengths), case.capacity // case.page, case.head_dim**-0.5
    num_pages = 1 + B * N
    tables = rng.permutation(np.arange(1, num_pages)).reshape(B, N)
    tables[np.array(case.lengths) == EMPTY] = 0
    positions = np.maximum(np.array(case.lengths), case.rows)[:, None] - case.rows + np.arange(case.rows)

    shape = num_pages, case.kv_heads, case.page, case.head_dim
    keys, values = (rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype(np.float64) for _ in range(2))
    unused = np.ones((num_pages, 1, case.page, 1), bool)
    for table, length in zip(tables, case.lengths, strict=True):
        for i, page in enumerate(table):
            unused[page, 0, : max(0, length - i * case.page)] = False
    unused[0] = True  # the scratch page
    stored_keys, stored_values = (np.where(unused, 1e4 * x, x) for x in (keys, values))
    k, read_keys = pages_of(stored_keys, case.is_float8)
    v, read_values = pages_of(stored_values, case.is_float8)
    q = rng.normal(size=(B, case.rows, case.kv_heads * case.group, case.head_dim)).astype(ml_dtypes.bfloat16)

    out = attention(implementation, q, k, v, tables, positions, scale, case.window, case.processors)

    assert np.isfinite(out).all()
    differences, norms = [], []
    for b in np.flatnonzero(case.lengths):
        read = (rows_at(x, tables[b]) for x in (read_keys, read_values))
        assert error(out[b], dense(q[b], *read, positions[b], scale, case.window)) < 1e-2
        written = (rows_at(x, tables[b]) for x in (keys, values))
        expected = dense(q[b], *written, positions[b], scale, case.window)
        differences.append(out[b] - expected)
        norms.append(expected)
    lost = np.linalg.norm(np.concatenate(differences)) / np.linalg.norm(np.concatenate(norms))
    assert lost < (4e-2 if case.is_float8 else 1e-2)


def test_float8_values_keep_a_long_tail_however_small_they_are():
    """One position has nearly all of the weight, thousands of others a little each: their sum must not vanish."""
    rng = np.random.default_rng(3)
    page, N, hd = 64, 64, 64
    shape = 1 + N, 1, page, hd
    q = np.zeros((1, 1, 1, hd), ml_dtypes.bfloat16)
    q[..., 0] = 8
    keys, values = np.zeros(shape), 0.003 * (1 + 0.1 * rng.normal(size=shape))
    keys[1, 0, 0, 0] = 12.0  # scores of 12 against 0: a tail of e-12 each
    values[1, 0, 0] = 0.003 * rng.normal(size=hd)
    k, read_keys = pages_of(keys, True, np.where(np.abs(keys).max(-1) > 0, np.abs(keys).max(-1) / 448, 1.0))
    v, read_values = pages_of(values, True)
    tables, positions = np.arange(1, 1 + N)[None], np.array([[N * page - 1]])
    out = attention("mosaic", q, k, v, tables, positions, 1 / 8, processors=4)
    expected = dense(q[0], rows_at(read_keys, tables[0]), rows_at(read_values, tables[0]), positions[0], 1 / 8)
    assert error(out[0], expected) < 1e-2


@pytest.mark.parametrize("implementation", ["xla", "mosaic", "native"])
def test_a_row_that_sees_nothing_is_finite(implementation, request):
    """As behind the end of a prompt, where a window is shorter than a chunk; its neighbours are what they are alone."""
    if implementation == "native":
        request.getfixturevalue("native_kernels")
    rng = np.random.default_rng(4)
    pages, _ = pages_of(rng.normal(size=(3, 1, 16, 64)), False)
    q = rng.normal(size=(1, 2, 1, 64)).astype(ml_dtypes.bfloat16)
    out = attention(implementation, q, pages, pages, np.array([[1, 2]]), np.array([[5, 500]]), 0.125, 4)
    alone = attention(implementation, q[:, :1], pages, pages, np.array([[1, 2]]), np.array([[5]]), 0.125, 4)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[0, 0], alone[0, 0], atol=1e-2)


FINITE = np.array([x for x in range(256) if x & 0x7F != 0x7F], np.uint8)  # e4m3 has two NaN and no infinity


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_every_float8_value_is_read_as_itself(implementation):
    every = np.resize(FINITE, 256).reshape(4, 1, 64)  # four sequences of one position: its value is the output
    bits = np.zeros((5, 1, 32, 64), np.uint8)
    bits[1:, :, 0] = every
    pages = Pages(bits, np.ones((5, 1, 32), np.float32))
    tables = np.array([[1, 0, 0, 0], [2, 0, 0, 0], [3, 0, 0, 0], [4, 0, 0, 0]])
    q = np.ones((4, 1, 2, 64), ml_dtypes.bfloat16)
    out = attention(implementation, q, pages, pages, tables, np.zeros((4, 1)), 1.0)
    expected = every.view(FLOAT8).astype(np.float64)
    np.testing.assert_array_equal(out[:, 0], np.broadcast_to(expected, (4, 2, 64)))


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("is_static", [False, True], ids=["scale-per-row", "static-scale"])
def test_extreme_float8_rows_weigh_what_they_stand_for(implementation, is_static):
    """Rows of zeros, of -0, of denormals (below 2**-6) and of +-448 only, among rows of any value."""
    rng = np.random.default_rng(3)
    kinds = [
        lambda n: np.zeros((n, 64), np.uint8),
        lambda n: np.full((n, 64), 0x80, np.uint8),
        lambda n: rng.integers(0, 8, (n, 64), np.uint8) | rng.choice(np.array([0, 0x80], np.uint8), (n, 64)),
        lambda n: rng.choice(np.array([0x7E, 0xFE], np.uint8), (n, 64)),
        lambda n: rng.choice(FINITE, (n, 64)),
    ]

    def page(largest):
        bits = rng.permutation(np.concatenate([kind(32) for kind in kinds])[:160]).reshape(5, 1, 32, 64)
        most = np.abs(bits.view(FLOAT8).astype(np.float64)).max(-1)
        scales = np.where(most > 0, largest / np.maximum(most, 1e-9), 1.0)  # denormal rows get a large scale, and count
        pages = Pages(bits, np.full_like(scales, largest / 448, np.float32) if is_static else scales.astype(np.float32))
        return pages, bits.view(FLOAT8).astype(np.float64) * pages.scales[..., None]

    (k, keys), (v, values) = page(3.0), page(2.0)
    q = rng.normal(size=(4, 1, 2, 64)).astype(ml_dtypes.bfloat16)
    tables = np.array([rng.permutation(np.arange(1, 5)) for _ in range(4)])
    positions = np.array([[127], [126], [65], [30]])
    out = attention(implementation, q, k, v, tables, positions, 0.125)
    for b in range(4):
        expected = dense(q[b], rows_at(keys, tables[b]), rows_at(values, tables[b]), positions[b], 0.125)
        assert error(out[b], expected) < 1e-2


@pytest.mark.parametrize(("implementation", "hd", "page"), [("xla", 8, 4), ("xla", 8, 16), ("native", 32, 16)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(("rows", "window"), [(1, None), (3, None), (3, 7), (31, 7), (31, None)])
def test_it_is_exact_in_float32(implementation, hd, page, heads, kv_heads, rows, window, request):
    if implementation == "native":
        request.getfixturevalue("native_kernels")
    rng = np.random.default_rng(0)
    B, S = 3, 64
    num_pages = 1 + B * S // page
    tables = rng.permutation(np.arange(1, num_pages)).reshape(B, S // page)
    keys, values = rng.normal(size=(2, num_pages, kv_heads, page, hd)).astype(np.float32)
    q = rng.normal(size=(B, rows, heads, hd)).astype(np.float32)
    positions = np.array([[rows], [rows + 14], [S]]) - rows + np.arange(rows)  # from the first tokens to a full table
    out = attention(implementation, q, Pages(keys), Pages(values), tables, positions, hd**-0.5, window)
    for b in range(B):
        read = rows_at(keys, tables[b]), rows_at(values, tables[b])
        np.testing.assert_allclose(out[b], dense(q[b], *read, positions[b], hd**-0.5, window), atol=2e-5)


def call(
    heads=2, kv_heads=2, head_dim=64, page=32, dtype=jnp.bfloat16, is_float8=False, implementation=None,
    trace=jax.eval_shape,
):  # fmt: skip
    """Shapes only: nothing runs."""
    shape = 2, kv_heads, page, head_dim
    pages = Pages(jax.ShapeDtypeStruct(shape, jnp.uint8 if is_float8 else dtype))
    if is_float8:
        pages = pages._replace(scales=jax.ShapeDtypeStruct(shape[:3], jnp.float32))
    q = jax.ShapeDtypeStruct((1, 1, heads, head_dim), dtype)
    integers = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    attend = partial(paged_attention, scale=1.0, implementation=implementation)
    return trace(lambda *arguments: attend(*arguments), q, pages, pages, integers, integers)


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="'triton' is unknown; known: mosaic, native, xla"):
        call(implementation="triton")


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
        call(heads=3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"head_dim": 72}, "head_dim 72 is not among"),
        ({"head_dim": 80, "is_float8": True}, "head_dim 80 is not among"),
        ({"page": 8}, "page size 8 is not among"),
        ({"page": 16, "is_float8": True}, "scales of a page of 16 are too short"),
        ({"dtype": jnp.float32}, "queries are float32, the cache is float32"),
    ],
)
def test_what_mosaic_does_not_take_it_names(arguments, reason):
    with pytest.raises(Unsupported, match=reason):
        call(**arguments, implementation="mosaic")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"head_dim": 80}, "heads of 80 and pages of 32"),
        ({"page": 8}, "heads of 64 and pages of 8"),
        ({"is_float8": True}, "bfloat16 queries and uint8 keys"),
        ({"dtype": jnp.float16}, "float16 queries and float16 keys"),
    ],
)
def test_what_native_kernels_do_not_take_they_name(arguments, reason, native_kernels):
    with pytest.raises(Unsupported, match=reason):
        call(**arguments, implementation="native")


def equations(jaxpr):
    """Of a program and of all that it calls, in order; loops as lists."""
    for equation in jaxpr.eqns:
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr"))
        calls = [x for part in inner if hasattr(part, "eqns") for x in equations(getattr(part, "jaxpr", part))]
        if equation.primitive.name == "while":
            yield calls
        else:
            yield equation.primitive.name
            yield from calls


@pytest.mark.parametrize("is_float8", [False, True], ids=["bfloat16", "float8"])
def test_all_warps_meet_before_a_buffer_is_filled_again_and_before_weights_are_read(is_float8):
    """The interpreter takes a warpgroup for one thread, so what its four warps must wait for is seen in the program only."""
    program = call(is_float8=is_float8, implementation="mosaic", trace=lambda f, *x: jax.make_jaxpr(f)(*x).jaxpr)
    (loop,) = [x for x in equations(program) if isinstance(x, list)]
    assert loop.count("swap") == loop.count("commit_smem") == 1  # weights are stored, then all warps meet
    stored, met = loop.index("swap"), loop.index("commit_smem")
    assert stored < met
    assert not {"load", "copy_gmem_to_smem"} & set(loop[stored:met])
    assert "copy_gmem_to_smem" not in loop[:met]
    assert {"load", "copy_gmem_to_smem"} <= set(loop[met:])
