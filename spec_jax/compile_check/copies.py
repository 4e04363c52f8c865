"""Copies of weights or cache pages in optimized HLO: there should be none, in a loop or out of it."""

import re
from collections.abc import Iterator

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = \(?(.*?)\)? ([\w-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_COPIES = ("copy", "copy-start", "transpose", "all-gather", "all-gather-start", "convert")


def large_copies(hlo: str, protected_shapes: set[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Instructions whose result is a plain copy of an array of a protected dtype and shape, up to the order of its axes;
    those inside a fusion stand for the fusion itself, which is looked at instead."""
    found = []
    protected = {(dtype, tuple(sorted(shape))) for dtype, shape in protected_shapes}
    for name, body in _computations(hlo):
        if "fused" in name or "wrapped" in name:
            continue
        for line in body:
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            what, result, opcode = match.groups()
            if opcode == "fusion":
                is_copy = bool(re.match(r"(wrapped_)?(copy|transpose|convert)", what))
            else:
                is_copy = opcode in _COPIES
            for dtype, dims in _ARRAY.findall(result) if is_copy else ():
                if (dtype, tuple(sorted(int(n) for n in dims.split(",") if n))) in protected:
                    found.append(f"{what}: {dtype}[{dims}] {opcode} in {name}")
                    break
    return found


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    name = ""
    body: list[str] = []
    for line in hlo.splitlines():
        if line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
            name, body = line.split(" (")[0], []
        elif line.startswith("}"):
            yield name, body
        else:
            body.append(line[:2000])
