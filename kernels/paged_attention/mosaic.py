"""Paged attention as a Mosaic GPU kernel (Pallas) for Hopper and Blackwell: flash-decoding over pages.

A thread block of one warpgroup takes one KV head of one sequence, up to 64 query rows of it (query heads that share the KV
head stand together as rows of one MMA tile) and one split of the context. It streams tiles of `TILE` positions through
`stages` buffers that TMA fills from the pages that the block table names, and keeps a running softmax (arXiv 2205.14135).
The splits are joined afterwards, in XLA (flash-decoding, arXiv 2311.01282).

The four warps split the positions of a tile for the scores and the channels for the output, so every key and value is read
from shared memory, and converted, by one warp only. That matters for float8: a 16-bit word of shared memory holds two
neighbouring channels, and `ldmatrix` puts words where an MMA wants its operand. A few bit operations make a wider number of
the lower byte, a few of the upper one, exactly and without leaving the register: float16 has one exponent bit more, so that
the numbers are 2**-8 of the float8 ones. Even and odd channels are then two products, and nothing is staged through memory.
Weights are float16 there as well. They include the scales of the values, measured against one of the split's own, so that
small values keep their precision; a scale of more than 2,000 times that one is cut. Queries must be below 65,504.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ..dispatch import Unsupported, num_cores
from ..pages import Pages
from ..pallas import compiler_params, pl, plgpu, swizzled
from .xla import MASKED

Array = jax.Array

TILE = 64  # positions
MAX_ROWS = 64  # more would not fit the registers
_SHARED_BYTES = 226 * 1024  # of a multiprocessor, Hopper and Blackwell alike; two blocks shall fit
_SCRATCH_BYTES = 5 * 1024  # barriers, and what reductions over warps need
_UNIT = 2.0**8  # float8 read as float16 is this much too small
_WEIGHT_UNIT = 2.0**5  # of weights: small ones stay normal numbers, and scales may grow
_FLOAT16_MAX = 65_504.0


@dataclass(frozen=True)
class _Plan:
    """How the work of one call is cut; all of it is static."""

    rows: int  # per tile of queries
    num_row_tiles: int
    num_splits: int  # of the context
    width: int  # elements per row of keys: channels, or words of two float8 ones
    parts: int  # 2 where a word holds two channels
    m_warps: int  # how many warps split the rows of the MMA; the others split its columns
    stages: int

    @property
    def keeps_queries(self) -> bool:
        """Whether the queries stay in registers for the whole kernel."""
        return self.rows <= 32 and self.rows * self.parts * self.width <= 32 * 128


def _plan(B: int, T: int, K: int, G: int, hd: int, page: int, max_context: int, is_float8: bool) -> _Plan:
    if B * T == 0:
        raise Unsupported("there are no rows")
    if page not in (16, 32, 64, 128):
        raise Unsupported(f"page size {page} is not among 16, 32, 64, 128")
    if hd not in (64, 80, 96, 128, 256) or (is_float8 and hd == 80):
        raise Unsupported(f"head_dim {hd} is not among 64, 80 (not with float8), 96, 128, 256")
    if is_float8 and page == 16:
        raise Unsupported("the float8 scales of a page of 16 are too short to be copied; 32, 64 and 128 are not")
    parts = 2 if is_float8 else 1
    width = hd // parts
    m_warps = 1 if width % 32 == 0 else 2  # each of the other warps needs a multiple of 8 columns
    max_rows = MAX_ROWS if hd <= 128 else 32
    num_row_tiles = -(-T * G // max_rows)
    unit = 16 * m_warps
    rows = -(-T * G // num_row_tiles // unit) * unit
    # Two blocks fit a multiprocessor: so many splits that all of them are busy, each of two tiles at least.
    wanted = round(2 * num_cores() / (B * K * num_row_tiles))
    num_splits = max(1, min(wanted, max_context // (2 * TILE)))
    fixed = 2 * rows * (parts * width + TILE) + _SCRATCH_BYTES
    stage = 2 * 2 * TILE * width + (2 * 4 * TILE if is_float8 else 0)
    stages = max(2, min(4, (_SHARED_BYTES // 2 - fixed) // stage))
    return _Plan(rows, num_row_tiles, num_splits, width, parts, m_warps, stages)


def attend(
    q: Array, k: Pages, v: Pages, block_tables: Array, positions: Array, scale: float, sliding_window: int | None
) -> Array:
    B, T, H, hd = q.shape
    _, K, page, _ = k.values.shape
    N = block_tables.shape[1]
    G = H // K
    is_float8 = k.scales is not None
    if q.dtype != jnp.bfloat16 or (not is_float8 and k.values.dtype != jnp.bfloat16):
        raise Unsupported(
            f"queries are {q.dtype}, the cache is {k.values.dtype}: bfloat16 is needed, or a float8 cache"
        )
    plan = _plan(B, T, K, G, hd, page, N * page, is_float8)
    R, Q = plan.rows, plan.num_row_tiles

    to_base_2 = scale * math.log2(math.e)
    rows = q.reshape(B, T, K, G, hd).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, hd)
    rows = rows.astype(jnp.float16) if is_float8 else rows
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, Q * R - T * G), (0, 0)))
    rows = rows.reshape(B, K, Q, R, plan.width, plan.parts).transpose(0, 1, 2, 5, 3, 4)

    # Where each row stands, and which tiles of the context some row of a tile of queries can see.
    padding = ((0, 0), (0, Q * R - T * G))
    row_positions = jnp.pad(jnp.repeat(positions, G, axis=1), padding, mode="edge").reshape(B, Q, R)
    end = jnp.minimum(jnp.max(row_positions, axis=2) // TILE + 1, -(-N * page // TILE))
    begin = jnp.zeros_like(end)
    if sliding_window is not None:
        begin = jnp.clip((jnp.min(row_positions, axis=2) - sliding_window + 1) // TILE, 0, end)
    bounds = jnp.stack([begin, end], axis=2)

    arguments = [rows, row_positions, bounds, block_tables]
    for pages in (k, v):
        arguments += [pages.values] if pages.scales is None else [_as_words(pages.values), pages.scales]
    out, running_max, total = _kernel(plan, B, K, N, page, is_float8, to_base_2, sliding_window)(*arguments)

    # [B, K, Q, splits, parts, R, width] -> [B, T, H, hd]
    weight = jnp.exp2(running_max - jnp.max(running_max, axis=3, keepdims=True))  # [B, K, Q, splits, R]
    weight = weight / jnp.maximum(jnp.sum(total * weight, axis=3, keepdims=True), 1e-30)  # 0 where nothing is seen
    out = jnp.sum(out * weight[:, :, :, :, None, :, None], axis=3)
    out = out.transpose(0, 1, 2, 4, 5, 3).reshape(B, K, Q * R, hd)[:, :, : T * G]
    return out.astype(q.dtype).reshape(B, K, T, G, hd).transpose(0, 2, 1, 3, 4).reshape(B, T, H, hd)


def _as_words(bits: Array) -> Array:
    """uint8 [..., hd] as uint16 [..., hd / 2], the same memory: XLA makes no copy of it."""
    return lax.bitcast_convert_type(bits.reshape(*bits.shape[:-1], -1, 2), jnp.uint16)


def _kernel(plan: _Plan, B: int, K: int, N: int, page: int, is_float8: bool, to_base_2: float, window: int | None):
    """`(rows [B, K, Q, parts, R, width], row_positions [B, Q, R], bounds [B, Q, 2], block tables [B, N], k, v) -> (sums of
    values [B, K, Q, splits, parts, R, width], largest scores [B, K, Q, splits, R], sums of weights [B, K, Q, splits, R])`.
    k and v are pages [P, K, page, hd], or words [P, K, page, hd / 2] followed by their scales."""
    R, S, W, parts, stages = plan.rows, plan.num_splits, plan.width, plan.parts, plan.stages
    mma_dtype = jnp.float16 if is_float8 else jnp.bfloat16
    stored = jnp.uint16 if is_float8 else jnp.bfloat16
    acc = plgpu.Layout.MMA_ACC(stored, m_warps=plan.m_warps)
    lhs = plgpu.Layout.MMA_LHS(stored, m_warps=plan.m_warps)
    rhs = plgpu.Layout.MMA_RHS(stored, m_warps=plan.m_warps)
    chunk = min(page, TILE)  # positions of one copy
    copies, tiles_per_page = TILE // chunk, page // chunk

    def zeros(*shape: int, value: float = 0.0) -> Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), acc)

    def spread(x: Array, axis: int, width: int) -> Array:
        """One value per row (axis 0) or per column (axis 1), over the whole tile."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (R, width), (axis,)), acc)

    def operands(words: Array) -> list[Array]:
        """What an MMA takes, from a tile as it is stored: even and odd channels of a float8 one."""
        if not is_float8:
            return [words]
        low = ((words & 0x0080) << 8) | ((words & 0x007F) << 7)
        high = (words & 0x8000) | ((words & 0x7F00) >> 1)
        return [lax.bitcast_convert_type(x, jnp.float16) for x in (low, high)]

    def paged_attention(
        q_ref, positions_ref, bounds_ref, tables_ref, *refs, q_smem, k_smem, v_smem, p_smem, q_ready, ready, scales=None
    ):
        (k_ref, v_ref), (out_ref, max_ref, total_ref) = refs[: 2 * parts : parts], refs[2 * parts :]
        loads = [(k_ref, k_smem), (v_ref, v_smem)]
        if is_float8:
            loads += [(refs[1], scales[0]), (refs[3], scales[1])]
        b, h, y = lax.axis_index("sequence"), lax.axis_index("head"), lax.axis_index("split")
        tile_of_rows, split = y // S, y % S
        begin, end = bounds_ref[b, tile_of_rows, 0], bounds_ref[b, tile_of_rows, 1]
        size = (end - begin + S - 1) // S
        first = begin + split * size
        last = jnp.minimum(first + size, end)

        def pages_of(tile):
            return tuple(tables_ref[b, jnp.minimum(tile * copies // tiles_per_page + i, N - 1)] for i in range(copies))

        def fetch(tile, pages):
            slot = lax.rem(tile - first, stages)
            source = pl.ds(lax.rem(tile, tiles_per_page) * chunk, chunk)
            for ref, smem in loads:
                for i, p in enumerate(pages):
                    target = smem.at[slot, pl.ds(i * chunk, chunk)]
                    plgpu.copy_gmem_to_smem(ref.at[p, h, source], target, ready.at[slot])

        for p in range(parts):
            plgpu.copy_gmem_to_smem(q_ref.at[b, h, tile_of_rows, p], q_smem.at[p], q_ready)
        for i in range(stages - 1):

            @pl.when(first + i < last)
            def _(i=i):
                fetch(first + i, pages_of(first + i))

        row_positions = plgpu.load(positions_ref.at[b, tile_of_rows], layout=acc.reduce(1), optimized=False)
        if is_float8:  # some scale of this split's values: those of the others are measured against it
            usual = plgpu.load(refs[3].at[pages_of(first)[0], h], layout=acc.reduce(0), optimized=False)
            usual_scale = jnp.maximum(jnp.max(usual), 1e-30)
        plgpu.barrier_wait(q_ready)

        def load_queries():
            return [plgpu.load(q_smem.at[p], layout=lhs) for p in range(parts)]

        kept = load_queries() if plan.keeps_queries else None

        def step(tile, carry):
            sums, running_max, total, pages = carry
            slot = lax.rem(tile - first, stages)
            plgpu.barrier_wait(ready.at[slot])

            keys = operands(plgpu.load(k_smem.at[slot].T, layout=rhs))
            scores = zeros(R, TILE)
            for a, key in zip(kept or load_queries(), keys, strict=True):
                scores = plgpu.mma(scores, a, key)
            if is_float8:
                k_scale = plgpu.load(scales[0].at[slot], layout=acc.reduce(0), optimized=False)
                scores = scores * spread(k_scale * (_UNIT * to_base_2), 1, TILE)
            else:
                scores = scores * to_base_2
            at = tile * TILE + plgpu.broadcasted_iota(jnp.int32, (R, TILE), 1, layout=acc)
            seen = at <= spread(row_positions, 0, TILE)
            if window is not None:
                seen = seen & (at > spread(row_positions, 0, TILE) - window)
            if N * page % TILE:
                seen = seen & (at < N * page)
            scores = jnp.where(seen, scores, MASKED)

            new_max = jnp.maximum(running_max, jnp.max(scores, axis=1))
            rescale = jnp.exp2(running_max - new_max)
            weights = jnp.exp2(scores - spread(new_max, 0, TILE))
            total = total * spread(rescale, 0, TILE) + weights  # summed over the columns at the end: no barrier here
            if is_float8:
                v_scale = plgpu.load(scales[1].at[slot], layout=acc.reduce(0), optimized=False)
                weights = jnp.minimum(weights * spread(v_scale * (_WEIGHT_UNIT / usual_scale), 1, TILE), _FLOAT16_MAX)
            p_smem[...] = weights.astype(mma_dtype)
            plgpu.commit_smem()  # behind it, no warp reads the tile before this one any more: its buffers are free

            @pl.when(tile + stages - 1 < last)
            def _():
                fetch(tile + stages - 1, pages)

            pages = pages_of(tile + stages)  # one tile ahead: reading the block table takes its time
            left = plgpu.load(p_smem, layout=lhs)
            values = operands(plgpu.load(v_smem.at[slot], layout=rhs))
            sums = tuple(
                plgpu.mma(x * spread(rescale, 0, W), left, value) for x, value in zip(sums, values, strict=True)
            )
            return sums, new_max, total, pages

        running_max = plgpu.layout_cast(jnp.full((R,), MASKED, jnp.float32), acc.reduce(1))
        start = (tuple(zeros(R, W) for _ in range(parts)), running_max, zeros(R, TILE), pages_of(first + stages - 1))
        sums, running_max, total, _ = lax.fori_loop(first, last, step, start)
        place = (b, h, tile_of_rows, split)
        for p in range(parts):
            out_ref.at[(*place, p)][...] = sums[p] * (usual_scale * (_UNIT / _WEIGHT_UNIT)) if is_float8 else sums[p]
        max_ref.at[place][...] = running_max
        total_ref.at[place][...] = jnp.sum(total, axis=1)

    scratch = {
        "q_smem": swizzled((parts, R, W), mma_dtype),
        "k_smem": swizzled((stages, TILE, W), stored),
        "v_smem": swizzled((stages, TILE, W), stored),
        "p_smem": swizzled((R, TILE), mma_dtype),
        "q_ready": plgpu.Barrier(num_arrivals=parts),
        "ready": plgpu.Barrier(num_arrivals=2 * parts * copies, num_barriers=stages),
    }
    if is_float8:
        scratch["scales"] = [plgpu.SMEM((stages, TILE), jnp.float32)] * 2
    shape = (B, K, plan.num_row_tiles, S)
    return plgpu.kernel(
        paged_attention,
        out_type=(
            jax.ShapeDtypeStruct((*shape, parts, R, W), jnp.float32),
            jax.ShapeDtypeStruct((*shape, R), jnp.float32),
            jax.ShapeDtypeStruct((*shape, R), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(B, K, plan.num_row_tiles * S),
        grid_names=("sequence", "head", "split"),
        compiler_params=compiler_params(),
    )
