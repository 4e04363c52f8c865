"""Paged attention against dense attention in float64 NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.kernels import paged_attention, write_kv


def dense(q, k, v, positions, scale, window=None):
    """q [T, H, hd] at `positions`, k and v [S, K, hd]; float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), k) * scale
    place = np.arange(k.shape[0])
    seen = place[None] <= positions[:, None]
    if window:
        seen &= place[None] > positions[:, None] - window
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


def scatter(rng, values, block_tables, page, num_pages):
    """Pages [P, K, page, hd] that hold `values` [B, S, K, hd]; all else is large garbage."""
    _, S, K, hd = values.shape
    pages = rng.normal(0, 50, (num_pages, K, page, hd)).astype(np.float32)
    for b, table in enumerate(block_tables):
        for s in range(S):
            pages[table[s // page], :, s % page] = values[b, s]
    return pages


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("window", [None, 7])
def test_it_agrees_with_dense_attention(page, heads, kv_heads, rows, window):
    rng = np.random.default_rng(0)
    B, S, hd = 3, 32, 8
    lengths = np.array([rows, 17, S])  # from the first tokens to a full table
    keys, values = rng.normal(size=(2, B, S, kv_heads, hd)).astype(np.float32)
    num_pages = 1 + B * S // page
    tables = rng.permutation(np.arange(1, num_pages)).reshape(B, S // page)
    k_pages, v_pages = (scatter(rng, x, tables, page, num_pages) for x in (keys, values))
    q = rng.normal(size=(B, rows, heads, hd)).astype(np.float32)
    positions = lengths[:, None] - rows + np.arange(rows)

    out = paged_attention(
        jnp.array(q), jnp.array(k_pages), jnp.array(v_pages), jnp.array(tables, jnp.int32),
        jnp.array(positions, jnp.int32), scale=hd**-0.5, sliding_window=window,
    )  # fmt: skip

    for b in range(B):
        expected = dense(q[b], keys[b], values[b], positions[b], hd**-0.5, window)
        np.testing.assert_allclose(out[b], expected, atol=2e-5)


def test_bfloat16_pages_stay_within_one_percent():
    rng = np.random.default_rng(1)
    B, S, K, hd, page = 1, 64, 2, 16, 16
    keys, values = (jnp.array(rng.normal(size=(B, S, K, hd)), jnp.bfloat16) for _ in range(2))
    tables = np.arange(1, 1 + S // page)[None]
    pages = [
        jnp.array(scatter(rng, np.asarray(x, np.float32), tables, page, 1 + S // page), jnp.bfloat16)
        for x in (keys, values)
    ]
    q = jnp.array(rng.normal(size=(B, 2, 4, hd)), jnp.bfloat16)
    positions = np.array([[62, 63]])
    out = paged_attention(q, *pages, jnp.array(tables, jnp.int32), jnp.array(positions, jnp.int32), scale=0.25)
    expected = dense(*(np.asarray(x[0], np.float32) for x in (q, keys, values)), positions[0], 0.25)
    assert np.linalg.norm(np.asarray(out[0], np.float64) - expected) < 1e-2 * np.linalg.norm(expected)


def test_an_unknown_implementation_is_named():
    q = jnp.zeros((1, 1, 2, 4))
    pages = jnp.zeros((2, 2, 4, 4))
    table, position = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="'triton' is unknown; known: xla"):
        paged_attention(q, pages, pages, table, position, scale=1.0, implementation="triton")


def test_heads_that_do_not_divide_are_refused():
    q = jnp.zeros((1, 1, 3, 4))
    pages = jnp.zeros((2, 2, 4, 4))
    table, position = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
        paged_attention(q, pages, pages, table, position, scale=1.0)


def test_written_rows_land_in_their_pages_and_nowhere_else():
    rng = np.random.default_rng(2)
    pages = jnp.array(rng.normal(size=(6, 2, 4, 3)), jnp.float32)
    tables = jnp.array([[5, 2], [1, 3]], jnp.int32)
    positions = jnp.array([[3, 4], [0, 1]], jnp.int32)
    rows = jnp.array(rng.normal(size=(2, 2, 2, 3)), jnp.float32)
    k, v = write_kv(pages, pages, rows, 2 * rows, tables, positions, jnp.ones((2, 2), bool))
    expected = np.array(pages)
    expected[5, :, 3], expected[2, :, 0] = rows[0]
    expected[1, :, 0], expected[1, :, 1] = rows[1]
    np.testing.assert_array_equal(k, expected)
    assert float(v[5, 0, 3, 0]) == 2 * float(rows[0, 0, 0, 0])


@pytest.mark.parametrize(("position", "keep"), [(2, False), (8, True), (1000, True)])
def test_rows_not_kept_and_rows_past_the_table_touch_the_scratch_page_only(position, keep):
    pages = jnp.zeros((4, 1, 4, 2))
    rows = jnp.ones((1, 1, 1, 2))
    k, _ = write_kv(pages, pages, rows, rows, jnp.array([[1, 2]]), jnp.array([[position]]), jnp.array([[keep]]))
    assert not np.asarray(k[1:]).any()
    assert np.asarray(k[0]).any()
