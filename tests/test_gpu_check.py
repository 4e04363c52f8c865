"""The script for GPUs runs here too, in toy shapes: what it compares must agree on any machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"


@pytest.mark.slow
def test_the_gpu_check_runs_and_its_comparisons_hold(tmp_path):
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--small", "--output", str(output)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["loop"]["identical"] is True
    assert len(result["kernel_errors"]) == 10
    for name, error in result["kernel_errors"].items():
        assert error < (4e-2 if "fp8" in name else 1e-2), name
    assert len(result["rounds"]) == 10
    assert all(r["ms"] > 0 for r in result["rounds"])
    assert result["skipped"] == []
    table = done.stdout[done.stdout.index("Mosaic attention: no") :]
    assert "driven by the host" in table


def test_without_time_every_check_is_said_to_be_skipped(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--small", "--seconds", "0", "--output", str(tmp_path / "r.json")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped: ") > 14
