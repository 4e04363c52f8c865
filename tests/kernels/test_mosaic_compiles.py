"""The kernels compile for Hopper and Blackwell, on a machine without a GPU, and ptxas keeps everything in registers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .compile_for import SHAPES, WRITES

pytest.importorskip("jax_plugins.xla_cuda13")

ARCHITECTURES = {"h200": "sm_90a", "b200": "sm_100a"}
NO_SPILLS = "0 bytes spill stores, 0 bytes spill loads"
QUICK = ("decode-float8", "prefill-float8", "write-float8")


def start(target: str, names: tuple[str, ...], report: Path) -> subprocess.Popen:
    """A process of its own: one process compiles for one target."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-m", "tests.kernels.compile_for", target, *names]
    with report.open("w") as file:
        root = Path(__file__).parents[2]
        return subprocess.Popen(command, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="the-largest"),
        pytest.param(
            tuple(name for name in (*SHAPES, *WRITES) if name not in QUICK), id="the-others", marks=pytest.mark.slow
        ),
    ],
)
def test_every_kernel_compiles_for_both_targets_and_spills_no_register(names, tmp_path):
    reports = {target: tmp_path / f"{target}.txt" for target in ARCHITECTURES}
    processes = {target: start(target, names, report) for target, report in reports.items()}
    try:
        statuses = {target: process.wait(timeout=300) for target, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    for target, architecture in ARCHITECTURES.items():
        report = reports[target].read_text()
        assert statuses[target] == 0, report[-3000:]
        kernels = dict(part.split("\n", 1) for part in re.split(r"^== ", report, flags=re.MULTILINE)[1:])
        assert list(kernels) == list(names)
        assert all(f"for '{architecture}'" in lines for lines in kernels.values())
        spills = {name: re.findall(r"\d+ bytes spill stores, \d+ bytes spill loads", x) for name, x in kernels.items()}
        assert spills == {name: [NO_SPILLS] for name in names}
