"""Which logical axis of a weight or a cache lies on which axis of the device mesh: one table for the whole project."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .config import ModelConfig
from .errors import UserError

Axes = tuple[str | None, ...]
"""Logical axis names of one array, outermost first; None is never sharded."""


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axis. None keeps the axis whole on every device.

    `heads` is the output axis of the fused QKV projection and the input axis of the output projection; both are grouped
    by KV head, so that a share of it holds whole groups.
    """

    vocab: str | None = "tp"
    embed: str | None = None
    heads: str | None = "tp"
    kv_heads: str | None = "tp"
    ffn: str | None = "tp"
    experts: str | None = None

    def spec(self, axes: Axes) -> PartitionSpec:
        return PartitionSpec(*(None if axis is None else getattr(self, axis) for axis in axes))

    def sharding(self, mesh: Mesh, axes: Axes) -> NamedSharding:
        return NamedSharding(mesh, self.spec(axes))

    def usable(self, mesh: Mesh | None, config: ModelConfig) -> Mesh | None:
        """The mesh as programs take it: sharding is found by the compiler, whatever its axes said. Raises as `check`."""
        if mesh is None:
            return None
        if not isinstance(mesh, Mesh):
            raise UserError(f"a mesh of {type(mesh).__name__} was given: make one of devices, as with jax.make_mesh")
        self.check(mesh, config)
        return Mesh(mesh.devices, mesh.axis_names)

    def check(self, mesh: Mesh, config: ModelConfig) -> None:
        """Raises UserError when the mesh does not divide the model, naming the sizes that do."""
        sizes = {
            "kv_heads": config.num_kv_heads,
            "ffn": config.ffn_size,
            "vocab": config.vocab_size,
        }
        for axis, size in sizes.items():
            mesh_axis = getattr(self, axis)
            if mesh_axis is None:
                continue
            if mesh_axis not in mesh.shape:
                raise UserError(f"the mesh has axes {tuple(mesh.shape)}, but {axis} is sharded over {mesh_axis!r}")
            if size % mesh.shape[mesh_axis]:
                possible = [n for n in range(1, min(sizes.values()) + 1) if all(s % n == 0 for s in sizes.values())]
                raise UserError(
                    f"{axis} {size} does not divide over {mesh.shape[mesh_axis]} devices of mesh axis {mesh_axis!r}; "
                    f"this model can be sharded over {_listed(possible)}"
                )


def use_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Programs traced inside are for this mesh: kernels then see its devices, and split their heads over them."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def tensor_parallel_mesh(size: int) -> Mesh:
    """The first `size` devices of this machine, on axis "tp". Raises UserError."""
    devices = jax.devices()
    if type(size) is not int or not 1 <= size <= len(devices):
        raise UserError(
            f"tensor_parallel_size is {size!r}: allowed are 1 to {len(devices)}, the {devices[0].platform.upper()} devices "
            f"of this machine"
        )
    return Mesh(np.array(devices[:size]), ("tp",))


def target_device(mesh: Mesh | None) -> jax.Device:
    """One of those that programs for this mesh run on, which may be of another machine than this."""
    return (jax.devices() if mesh is None else mesh.devices.flat)[0]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def place(value: np.ndarray, axes: Axes, mesh: Mesh | None, rules: ShardingRules) -> jax.Array:
    """Puts one array where the rules want it."""
    return jax.device_put(value, None if mesh is None else rules.sharding(mesh, axes))
