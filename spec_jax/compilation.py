"""How programs are compiled: where compiled ones are kept, and what XLA is told about GPUs."""

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .kernels import build_native
from .paths import cache_folder
from .sharding import target_device

_log = logging.getLogger("spec_jax")

# What one CUDA graph may hold. XLA's defaults lack WHILE and COLLECTIVES: the host would drive the loop.
_GRAPH = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE,COLLECTIVES"
_ALWAYS = {"xla_gpu_graph_min_graph_size": 1}
# XLA has collective kernels of its own. Some versions can put them into a graph; where one cannot, NCCL's must be taken, or
# a loop over several devices is no graph. The first set that the installed XLA knows is taken.
_CHOICES: tuple[dict[str, Any], ...] = (
    {"xla_gpu_enable_command_buffer": f"{_GRAPH},COLLECTIVES_KERNEL", **_ALWAYS},
    {"xla_gpu_enable_command_buffer": _GRAPH, "xla_gpu_experimental_use_collective_kernels": "", **_ALWAYS},
    {"xla_gpu_enable_command_buffer": _GRAPH, **_ALWAYS},
)


def quiet_absent_gpu() -> None:
    """The compiler that `compile-check` needs is JAX's plugin for CUDA. Where there is no GPU, JAX would log at length that
    it cannot be started."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
        logging.getLogger("jax._src.xla_bridge").addFilter(_is_not_about_cuda)


def _is_not_about_cuda(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "xla_cuda" not in message and "CUDA-enabled jaxlib is not installed" not in message


def use_compilation_cache() -> None:
    """Keeps compiled programs in `xla/` of the cache folder, unless JAX was already told where."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@cache
def use_native_kernels() -> None:
    """On a CPU, builds the kernels for it into `native/` of the cache folder; says once where they cannot be."""
    if jax.devices()[0].platform != "cpu":
        return
    try:
        build_native(cache_folder() / "native")
    except RuntimeError as reason:  # NotBuilt, or nobody's home folder is known
        _log.warning("decoding on this CPU takes about twice as long as it could: %s", reason)


@cache
def compiler_options(mesh: Mesh | None) -> dict[str, Any] | None:
    """Options of every program: on NVIDIA GPUs, those that make a burst of rounds one CUDA graph."""
    device = target_device(mesh)
    if device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        return None
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    nothing = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding))
    for options in _CHOICES[:-1]:
        try:
            nothing.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "INVALID_ARGUMENT" not in str(error):
                raise
            continue
        return options
    return _CHOICES[-1]


def matmul_precision(dtype: str) -> AbstractContextManager[Any]:
    """float32 means float32: GPUs would multiply in TF32, with 10 bits, where they are not told otherwise."""
    return jax.default_matmul_precision("highest") if jnp.dtype(dtype) == jnp.float32 else nullcontext()
