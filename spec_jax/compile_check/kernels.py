"""What the assembler says of the Mosaic kernels in a program."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """What the assembler says of one Mosaic kernel."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int | None  # None: it did not say


_ORDER = ("write_kv", "paged_attention")  # a layer writes before it reads


def parse_kernels(lowering: str, assembler: str) -> list[Kernel]:
    """From what MOSAIC_GPU_DUMP_RESOURCES prints while a program is lowered, without names but in the program's order, and
    MOSAIC_GPU_DUMP_PTXAS while it is compiled, in any order."""
    found = re.findall(
        r"entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        assembler, re.DOTALL,
    )  # fmt: skip
    found = sorted(set(found), key=lambda kernel: (kernel[0] not in _ORDER, kernel[0] != _ORDER[0]))
    shared: list[str | None] = [*re.findall(r"smem_scratch_bytes=(\d+)", lowering)]
    if len(shared) != len(found):
        shared = [None] * len(found)
    return [
        Kernel(name, int(registers), int(stores) + int(loads), None if num_bytes is None else int(num_bytes))
        for (name, stores, loads, registers), num_bytes in zip(found, shared, strict=True)
    ]
