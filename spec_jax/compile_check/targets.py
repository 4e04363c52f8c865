"""GPU machines to compile for: what XLA's compiler must know of them, and what a roofline needs."""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from ..errors import UserError

MAX_DEVICES = 8


@dataclass(frozen=True)
class Target:
    """One GPU of a node. Peaks are the makers' figures for dense bfloat16."""

    name: str
    memory_bytes: float
    bytes_per_second: float
    flops_per_second: float

    @property
    def description(self) -> str:
        """GpuTargetConfigProto as text. On a real GPU the same comes from `get_topology_for_devices(devices)`."""
        return (Path(__file__).parent / "targets" / f"{self.name}.txtpb").read_text(encoding="utf-8")


TARGETS = {
    "h200": Target("h200", 141e9, 4.8e12, 989e12),
    "b200": Target("b200", 180e9, 7.7e12, 2250e12),
}


def find_target(name: str) -> Target:
    if name not in TARGETS:
        raise UserError(f"target {name!r} is unknown: allowed are {', '.join(TARGETS)}")
    return TARGETS[name]


def mesh_of(target: Target, num_devices: int) -> Mesh:
    """A mesh of `num_devices` such GPUs, on axis "tp", that can be compiled for but not run on."""
    if not 1 <= num_devices <= MAX_DEVICES:
        raise UserError(f"devices is {num_devices}: allowed are 1 to {MAX_DEVICES}, the GPUs of a node")
    _check_plugin()
    topology = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{num_devices}", target_config=target.description
    )
    return Mesh(np.array(topology.devices), ("tp",))


def _check_plugin() -> None:
    needed = f'pip install "jax-cuda13-plugin=={jax.__version__}"'
    try:
        found = metadata.version("jax-cuda13-plugin")
    except metadata.PackageNotFoundError:
        raise UserError(f"XLA's compiler for CUDA is not installed: {needed} (no GPU, no CUDA needed)") from None
    if found != jax.__version__:
        raise UserError(f"jax-cuda13-plugin {found} does not fit jax {jax.__version__}: {needed}")
