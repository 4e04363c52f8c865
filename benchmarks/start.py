"""How long `spec-jax generate` takes to its first character, and how much memory it takes at its peak.

    python benchmarks/start.py

The first run may compile; the later ones start from the caches, as every start after the first does.
"""

import resource
import subprocess
import sys
import time

import tyro


def main(model: str = "smollm2-135m", repeats: int = 4) -> None:
    command = [
        sys.executable, "-m", "spec_jax", "generate", "--model", model, "--chat",
        "--prompt", "What is the capital of France?", "--max-tokens", "40",
    ]  # fmt: skip
    for number in range(1, repeats + 1):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            first = time.perf_counter() - start
            process.stdout.read()
        total = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
        print(
            f"start {number}: first character after {first:.1f} s, all after {total:.1f} s, peak memory {peak:.2f} GB"
        )


if __name__ == "__main__":
    tyro.cli(main)
