"""Which implementation of an operation runs: the one asked for, or the best that the device and the shapes allow.

An operation is a plain XLA version, which defines it, and a Mosaic GPU version (Pallas) of the same signature, which raises
`Unsupported` for shapes that it does not take; some have a native version in C as well, for CPUs.
"""

import logging
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax

IMPLEMENTATIONS = ("mosaic", "native", "xla")

_log = logging.getLogger("spec_jax")
_NEEDED = "Mosaic GPU kernels need a Hopper or Blackwell GPU"
_MOSAIC_DEVICES = re.compile(r"\b(H100|H200|H20|H800|GH200|B100|B200|B300|GB200|GB300)\b")


class Unsupported(NotImplementedError):
    """This implementation does not take these shapes, or not on this device; the message says why."""


def run(
    name: str,
    implementation: str | None,
    mosaic: Callable[[], Callable[..., Any]],
    xla: Callable[..., Any],
    *args: Any,
    native: Callable[..., Any] | None = None,
) -> Any:
    """Runs one operation; `mosaic()` imports and returns the Mosaic version.

    With `implementation` None, falls back to XLA, and says once why where the device itself could run Mosaic. On a CPU,
    "mosaic" is for Pallas's interpret mode.

    Raises:
      ValueError: `implementation` is unknown.
      Unsupported: "mosaic" or "native" was asked for and cannot run.
    """
    known = [version for version in IMPLEMENTATIONS if version != "native" or native is not None]
    if implementation not in (None, *known):
        raise ValueError(f"implementation {implementation!r} is unknown; known: {', '.join(known)}")
    if native is not None and implementation in (None, "native"):
        try:
            return native(*args)
        except Unsupported:
            if implementation is not None:
                raise
    if implementation == "xla" or (implementation is None and not has_mosaic()):
        return xla(*args)
    if implementation == "mosaic":
        # Never even compiled for other GPUs: there a Mosaic kernel kills the process.
        if _platform() != "cpu" and not has_mosaic():
            raise Unsupported(f"{name}: {_NEEDED}, this is {device_kind()}")
        try:
            return mosaic()(*args)
        except ValueError as error:
            if "interpret mode" not in str(error):
                raise
            raise Unsupported(f"{name}: {_NEEDED}, this is a CPU, and interpret mode is off") from None
    try:
        return mosaic()(*args)
    except Unsupported as reason:
        _say_once(f"{name}: {reason}; the slower XLA version runs instead")
        return xla(*args)


def runs(implementation: str, call: Callable[..., Any], *shapes: Any) -> bool:
    """Whether `call`, an operation with this `implementation`, can run with arrays of these shapes on this device."""
    if implementation == "mosaic" and not has_mosaic():  # a CPU could interpret it
        return False
    try:
        jax.eval_shape(partial(call, implementation=implementation), *shapes)
    except Unsupported:
        return False
    return True


def has_mosaic() -> bool:
    """Whether Mosaic GPU kernels run on the device that is being compiled for."""
    return _platform() == "gpu" and bool(_MOSAIC_DEVICES.search(device_kind()))


def runs_on_one_cpu() -> bool:
    """Whether the program is for one CPU, and not for a mesh."""
    return jax.sharding.get_abstract_mesh().empty and _platform() == "cpu"


def device_kind() -> str:
    """The device that is being compiled for: of the mesh in `jax.set_mesh`, else JAX's default device."""
    return _device().device_kind


def num_cores() -> int:
    """Streaming multiprocessors of that device; 132 where it does not say, as on a CPU that interprets a kernel."""
    device = _device()
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or 132


def _platform() -> str:
    return _device().platform


def _device() -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    abstract = None if mesh.empty else mesh.abstract_device
    return jax.devices()[0] if abstract is None else abstract


@cache
def _say_once(message: str) -> None:
    _log.warning(message)
