"""The cache write as one Mosaic GPU kernel: keys and values, their scales, quantization and scatter in one launch.

Pages are written in place, through references. One warpgroup stores one row of one head.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ..dispatch import Unsupported
from ..pages import FLOAT8, FLOAT8_MAX, Pages
from ..pallas import compiler_params, plgpu

Array = jax.Array


def scatter(
    k_pages: Pages,
    v_pages: Pages,
    k: Array,
    v: Array,
    index: Array,
    offset: Array,
    k_scale: Array | None,
    v_scale: Array | None,
) -> tuple[Pages, Pages]:
    B, T, K, hd = k.shape
    if B * T == 0:
        raise Unsupported("there are no rows")
    if hd % 16:
        raise Unsupported(f"head_dim {hd} is no multiple of 16")
    # A row lies over the warps as one of an MMA's result does: a layout for every such head_dim.
    row = plgpu.Layout.MMA_ACC(jnp.bfloat16, m_warps=1 if hd % 32 == 0 else 2).reduce(0)
    is_float8 = k_pages.scales is not None
    given = [is_float8 and scale is not None for scale in (k_scale, v_scale)]
    static = [jnp.float32(1.0 if scale is None else scale).reshape(1) for scale in (k_scale, v_scale)]

    def write_kv(rows_ref, where_ref, k_scale_ref, v_scale_ref, *pages):
        i, h = lax.axis_index("row"), lax.axis_index("head")
        page, at = where_ref[i, 0], where_ref[i, 1]
        for j in range(2):
            x = plgpu.load(rows_ref.at[i, j, h], layout=row, optimized=False)
            if not is_float8:
                pages[j].at[page, h, at][...] = x.astype(pages[j].dtype)
                continue
            values, scales = pages[2 * j : 2 * j + 2]
            x = x.astype(jnp.float32)
            if given[j]:
                scale = (k_scale_ref, v_scale_ref)[j][0]
            else:
                largest = jnp.max(jnp.abs(x))
                scale = jnp.where(largest > 0, largest / FLOAT8_MAX, 1.0)
            x = jnp.minimum(jnp.maximum(x / scale, -FLOAT8_MAX), FLOAT8_MAX).astype(FLOAT8)
            values.at[page, h, at][...] = lax.bitcast_convert_type(x, jnp.uint8)
            scales[page, h, at] = scale

    rows = jnp.stack([k, v], axis=2).reshape(B * T, 2, K, hd)  # XLA computes both in one launch
    where = jnp.stack([index.reshape(-1), offset.reshape(-1)], axis=1)
    arrays, tree = jax.tree.flatten((k_pages, v_pages))
    refs = [jax.new_ref(array) for array in arrays]
    plgpu.kernel(
        write_kv, grid=(K, B * T), grid_names=("head", "row"), compiler_params=compiler_params(),
    )(rows, where, *static, *refs)  # fmt: skip
    return jax.tree.unflatten(tree, [jax.freeze(ref) for ref in refs])
