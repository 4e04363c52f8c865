"""The one place that imports Pallas, which changes with every release of JAX."""

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["compiler_params", "pl", "plgpu", "swizzled"]


def swizzled(shape: tuple[int, ...], dtype) -> plgpu.SMEM:  # type: ignore[valid-type]
    """Shared memory for matrices of 16-bit elements, laid out so that neither TMA nor `ldmatrix` meets bank conflicts.
    Rows are multiples of 16 elements."""
    swizzle = next(s for s in (128, 64, 32) if shape[-1] * 2 % s == 0)
    tiling = plgpu.TilingTransform((8, swizzle // 2))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]


def compiler_params() -> plgpu.CompilerParams:
    """Register layouts are chosen by the kernels, not inferred; `exp2` is the hardware's."""
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True, reduction_scratch_bytes=4096
    )
