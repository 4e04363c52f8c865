"""Mosaic kernels on a CPU: interpreted, memory poisoned, races looked for. The one module with private imports of JAX."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState
from jax._src.pallas.mosaic_gpu.primitives import mma_p
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters import mlir

# The interpreter hands arithmetic to XLA:CPU, and JAX 0.11 gives the MMA no meaning there.
mlir.register_lowering(
    mma_p,
    mlir.lower_fun(lambda acc, a, b: acc + jnp.dot(a, b, preferred_element_type=jnp.float32), multiple_results=False),
    platform="cpu",
)


@contextmanager
def interpreted() -> Iterator[None]:
    """Interprets the Mosaic kernels that run inside; uninitialized memory and outputs are NaN or the largest integer.

    Raises:
      AssertionError: at the end, if accesses of a kernel were not ordered, or if no kernel ran at all.
    """
    kernels: list[GPURaceDetectionState] = []  # every kernel has its own state, and JAX shows the last one only

    def watched(**arguments) -> GPURaceDetectionState:
        kernels.append(GPURaceDetectionState(**arguments))
        return kernels[-1]

    gpu_callbacks.GPURaceDetectionState = watched
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")):
            yield
            jax.effects_barrier()
        assert kernels, "no Mosaic kernel ran"
        assert not any(kernel.races_found for kernel in kernels), "a race: the output says of which accesses"
    finally:
        gpu_callbacks.GPURaceDetectionState = GPURaceDetectionState
        gpu_callbacks.reset_gpu_interpret_mode_state()
