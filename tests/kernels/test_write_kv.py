"""The cache write: where rows land, what float8 keeps of them, and that all implementations write the same bits."""

from contextlib import nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from spec_jax.kernels import SCRATCH_PAGE, Pages, Unsupported, write_kv
from spec_jax.kernels.pages import quantize

from .interpret import interpreted

FLOAT8 = ml_dtypes.float8_e4m3fn
FINITE = np.array([x for x in range(256) if x & 0x7F != 0x7F], np.uint8)  # of e4m3
IMPLEMENTATIONS = ["xla", "mosaic"]
K, PAGE, HEAD_DIM = 2, 4, 128
TABLES = np.array([[5, 2], [1, 3]], np.int32)
POSITIONS = np.array([[3, 4, 7], [0, 1, 2]], np.int32)
ALL = np.ones((2, 3), bool)


def old_pages(is_float8, seed, head_dim=HEAD_DIM):
    """Seven pages, full of other rows."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(7, K, PAGE, head_dim))
    if not is_float8:
        return Pages(rows.astype(ml_dtypes.bfloat16))
    return Pages(rows.astype(FLOAT8).view(np.uint8), rng.uniform(1, 2, (7, K, PAGE)).astype(np.float32))


def new_rows(seed, rows=3):
    """Rows [2, rows, K, hd] that float8 holds exactly: float8 values, 448 among them, times a power of two."""
    rng = np.random.default_rng(seed)
    values = rng.choice(FINITE, (2, rows, K, HEAD_DIM)).view(FLOAT8).astype(np.float32)
    values[..., 7] = -448
    return (values * 2.0 ** rng.integers(-8, 8, (2, rows, K, 1))).astype(ml_dtypes.bfloat16)


@cache
def compiled(implementation):
    return jax.jit(partial(write_kv, implementation=implementation))


def write(implementation, k_pages, v_pages, k, v, tables=TABLES, positions=POSITIONS, keep=ALL, **scales):
    with interpreted() if implementation == "mosaic" else nullcontext():
        arguments, scales = jax.tree.map(jnp.asarray, ((k_pages, v_pages, k, v, tables, positions, keep), scales))
        return jax.tree.map(np.asarray, compiled(implementation)(*arguments, **scales))


def assert_same_bits(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_float8", [False, True], ids=["bfloat16", "float8"])
def test_rows_land_in_their_pages_and_nowhere_else(implementation, is_float8):
    before = old_pages(is_float8, 0), old_pages(is_float8, 1)
    rows = new_rows(2), new_rows(3)
    after = write(implementation, *before, *rows)
    for old, new, row in zip(before, after, rows, strict=True):
        values, scales = jax.tree.map(np.copy, (old.values, old.scales))
        for b in range(2):
            for t in range(3):
                page, at = TABLES[b, POSITIONS[b, t] // PAGE], POSITIONS[b, t] % PAGE
                if not is_float8:
                    values[page, :, at] = row[b, t]
                    continue
                scales[page, :, at] = -row[b, t, :, 7].astype(np.float32) / 448
                exact = row[b, t].astype(np.float32) / scales[page, :, at, None]
                values[page, :, at] = exact.astype(FLOAT8).view(np.uint8)
        assert_same_bits(new, Pages(values, scales))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_float8", [False, True], ids=["bfloat16", "float8"])
def test_rows_not_kept_and_rows_past_the_table_touch_the_scratch_page_only(implementation, is_float8):
    before = old_pages(is_float8, 0), old_pages(is_float8, 1)
    positions = np.array([[2, 8], [1001, 2**31 - 1]], np.int32)  # the tables end at 8
    keep = np.array([[False, True], [True, True]])
    after = write(implementation, *before, new_rows(2, 2), new_rows(3, 2), positions=positions, keep=keep)
    for old, new in zip(before, after, strict=True):
        assert_same_bits(*(jax.tree.map(lambda x: np.delete(x, SCRATCH_PAGE, 0), pages) for pages in (old, new)))
        assert (old.values[SCRATCH_PAGE] != new.values[SCRATCH_PAGE]).any()


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("scales", [{}, {"k_scale": 0.01, "v_scale": 0.002}], ids=["scale-per-row", "static-scales"])
def test_both_implementations_write_the_same_float8_bits(scales, head_dim):
    scales = {name: np.float32(scale) for name, scale in scales.items()}
    before = old_pages(True, 0, head_dim), old_pages(True, 1, head_dim)
    rng = np.random.default_rng(4)
    k, v = (rng.normal(size=(2, 3, K, head_dim)) * 10.0 ** rng.integers(-6, 6, (2, 3, K, 1)) for _ in range(2))
    k, v = k.astype(ml_dtypes.bfloat16), v.astype(ml_dtypes.bfloat16)
    k[0, 0], v[1, 2, 1] = 0, 0
    xla, mosaic = (write(name, *before, k, v, **scales) for name in IMPLEMENTATIONS)
    assert_same_bits(xla, mosaic)
    if scales:  # what is out of range is cut, never NaN
        largest = np.abs(xla[0].values.view(FLOAT8).astype(np.float32)).max()
        assert largest == 448
        np.testing.assert_array_equal(xla[0].scales[TABLES[0, 0], :, 3], scales["k_scale"])


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_one_static_scale_leaves_the_other_side_with_its_own(name):
    before = old_pages(True, 0), old_pages(True, 1)
    xla, mosaic = (write(i, *before, new_rows(2), new_rows(3), **{name: np.float32(0.01)}) for i in IMPLEMENTATIONS)
    assert_same_bits(xla, mosaic)


def test_mosaic_names_a_head_dim_that_its_threads_cannot_share():
    pages = Pages(jax.ShapeDtypeStruct((2, 1, 16, 72), jnp.bfloat16))
    rows, integers = jax.ShapeDtypeStruct((1, 1, 1, 72), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    with pytest.raises(Unsupported, match="head_dim 72 is no multiple of 16"):
        jax.eval_shape(partial(write_kv, implementation="mosaic"), pages, pages, rows, rows, *[integers] * 3)


def test_each_rows_largest_magnitude_becomes_448_and_the_rest_is_within_half_an_ulp():
    rng = np.random.default_rng(5)
    rows = (rng.normal(size=(50, 3, 64)) * 10.0 ** rng.integers(-20, 20, (50, 3, 1))).astype(np.float32)
    bits, scales = (np.asarray(x) for x in quantize(jnp.asarray(rows)))
    values = bits.view(FLOAT8).astype(np.float64)
    np.testing.assert_array_equal(np.abs(values).max(-1), 448)
    exact = rows / scales[..., None].astype(np.float64)
    ulp = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 1e-30))) - 3, -9)  # e4m3: 3 bits, down to 2**-9
    assert (np.abs(values - exact) <= ulp / 2 * (1 + 1e-6)).all()  # the division itself is in float32


def test_a_row_of_zeros_has_scale_1():
    bits, scales = quantize(jnp.zeros((2, 64)).at[1].set(-0.0))
    np.testing.assert_array_equal(scales, [1, 1])
    np.testing.assert_array_equal(np.asarray(bits).view(FLOAT8).astype(np.float32), np.zeros((2, 64)))


def test_a_static_scale_saturates_at_448():
    bits, scales = quantize(jnp.array([[1.0, -896.0, 1e30, -np.inf, 3.1]]), jnp.float32(0.5))
    np.testing.assert_array_equal(scales, [0.5])
    np.testing.assert_array_equal(np.asarray(bits).view(FLOAT8).astype(np.float32), [[2, -448, 448, -448, 6]])
