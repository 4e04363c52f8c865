"""The kernels for CPUs: how they are built, and the product of few rows against float64 NumPy."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from spec_jax.kernels import matmul

SHAPES = [  # rows, outputs, inputs: all tiles of rows, outputs that fill no tile, one output for many threads
    (1, 7, 32), (2, 1, 64), (3, 33, 96), (4, 576, 1536), (5, 3, 32), (6, 1537, 576), (7, 16, 32), (13, 130, 160),
    (32, 96, 64),
]  # fmt: skip


def random(seed, *shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def program(x, w, dtype=None):
    return str(jax.make_jaxpr(lambda x, w: matmul(x, w, dtype))(x, w))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_that_of_float64(shape, dtype, native_kernels):
    rows, outputs, size = shape
    x, w = random(0, rows, size, dtype=dtype), random(1, outputs, size, dtype=dtype)
    assert "spec_jax_matmul" in program(x, w, jnp.float32)
    y = jax.jit(lambda x, w: matmul(x, w, jnp.float32))(x, w)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(y, expected, atol=3e-6 * size**0.5 * 4, rtol=0)


def test_a_narrow_result_is_the_nearest_to_even(native_kernels):
    x, w = random(0, 6, 64, dtype="bfloat16"), random(1, 200, 64, dtype="bfloat16")
    wide = jax.jit(lambda x, w: matmul(x, w, jnp.float32))(x, w)
    np.testing.assert_array_equal(jax.jit(matmul)(x, w), wide.astype(jnp.bfloat16))  # XLA rounds


def test_a_row_does_not_depend_on_those_beside_it(native_kernels):
    """So that a token has the same scores in rounds of any width."""
    x, w = random(0, 32, 576, dtype="bfloat16"), random(1, 333, 576, dtype="bfloat16")
    every = np.asarray(jax.jit(matmul)(x, w))
    for rows in range(1, 32):
        np.testing.assert_array_equal(jax.jit(matmul)(x[:rows], w), every[:rows])


def test_what_is_no_number_stays_in_its_row(native_kernels):
    x, w = random(0, 3, 64, dtype="bfloat16"), random(1, 10, 64, dtype="bfloat16")
    bad = jnp.stack([x[0], x[1].at[5].set(jnp.nan), x[2].at[7].set(jnp.inf)])
    out, clean = (np.asarray(jax.jit(matmul)(rows, w), np.float32) for rows in (bad, x))
    np.testing.assert_array_equal(out[0], clean[0])
    assert np.isnan(out[1]).all()
    assert np.isinf(out[2]).all()


def test_many_calls_at_once_from_many_threads_are_right(native_kernels):
    """Calls share XLA's threads; none may wait for a thread that another call holds."""
    x, w = random(0, 6, 96, dtype="float32"), random(1, 500, 96, dtype="float32")
    step = jax.jit(lambda x, w: jax.lax.fori_loop(0, 50, lambda i, s: s + matmul(x, w).sum(), jnp.float32(0)))
    expected = step(x, w)
    with ThreadPoolExecutor(8) as pool:
        assert all(total == expected for total in pool.map(lambda _: step(x, w), range(64)))


@pytest.mark.parametrize(
    ("rows", "size", "dtypes"),
    [(33, 64, ("float32", "float32")), (0, 64, ("float32", "float32")), (2, 48, ("float32", "float32")),
     (2, 64, ("float32", "bfloat16")), (2, 64, ("float16", "float16"))],
)  # fmt: skip
def test_other_shapes_are_left_to_xla(rows, size, dtypes, native_kernels):
    x, w = random(0, rows, size, dtype=dtypes[0]), random(1, 5, size, dtype=dtypes[1])
    assert "spec_jax_matmul" not in program(x, w, jnp.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(matmul(x, w, jnp.float32), expected, atol=0.05)


def test_a_program_for_a_mesh_is_left_to_xla(native_kernels):
    x, w = random(0, 2, 64, dtype="float32"), random(1, 8, 64, dtype="float32")
    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("tp",))):
        assert "spec_jax_matmul" not in program(x, w)


def test_gradients_are_those_of_the_product(native_kernels):
    x, w = random(0, 4, 32, dtype="float32"), random(1, 6, 32, dtype="float32")
    by_x, by_w = jax.grad(lambda x, w: (matmul(x, w) ** 2).sum(), argnums=(0, 1))(x, w)
    X, W = (np.asarray(a, np.float64) for a in (x, w))
    np.testing.assert_allclose(by_x, 2 * X @ W.T @ W, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(by_w, 2 * (X @ W.T).T @ X, rtol=1e-4, atol=1e-4)


BUILD = """
    import sys
    from pathlib import Path
    from spec_jax.kernels import NotBuilt, build_native
    try:
        build_native(Path(sys.argv[1]))
        print("built")
    except NotBuilt as reason:
        print("not built:", reason)
"""


def build(folder, **environment):
    command = [sys.executable, "-c", textwrap.dedent(BUILD), str(folder)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_a_compiler_the_reason_is_told(tmp_path):
    assert build(tmp_path, CC="no-such-compiler") == (
        "not built: no C compiler was found as 'no-such-compiler': install GCC (9 or newer) or Clang, or name one in CC"
    )
    assert build(tmp_path, CC="false").startswith("not built: ")


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    assert build(tmp_path / "file" / "native").startswith("not built: ")


def test_a_build_is_made_once_and_found_again_without_a_compiler_run(tmp_path):
    assert build(tmp_path) == "built"
    (made,) = tmp_path.iterdir()
    before = made.stat().st_mtime_ns
    assert build(tmp_path) == "built"
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [before]


def test_a_damaged_build_is_made_anew_at_the_next_start(tmp_path):
    assert build(tmp_path) == "built"
    (made,) = tmp_path.iterdir()
    made.write_bytes(b"not a library")
    assert build(tmp_path).startswith("not built: ")
    assert build(tmp_path) == "built"


def test_a_compiler_may_come_with_options(tmp_path):
    assert build(tmp_path, CC="cc -g0") == "built"


def test_of_what_a_compiler_says_the_error_is_told(tmp_path):
    assert "error" in build(tmp_path, CC="cc -include no-such-header.h")


def test_builds_at_once_do_not_disturb_each_other(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: build(tmp_path), range(3))) == ["built"] * 3
    assert len(list(tmp_path.iterdir())) == 1
