"""What a compiled GPU program does, read from XLA's own dumps: its thunks, its optimized HLO, its kernels' resources.

A thunk is one thing that the runtime does: a kernel, a copy, a collective, a loop. A command buffer is a CUDA graph; a loop
inside it runs on the device alone, a loop outside it is driven by the host, which then waits for its condition every round.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_THUNK = re.compile(r"^( *)\d+: (k\w+)")
_ROLE = re.compile(r"^ *(condition|body|\w*branch\w*|branch \d+):")
_HOST = re.compile(r"kHost|kInfeed|kOutfeed|kSendDone|kRecvDone|kSend$|kRecv$")
_COLLECTIVES = ("kAllReduce", "kAllGather", "kReduceScatter", "kAllToAll", "kCollective", "kRaggedAllToAll")


@dataclass
class Thunk:
    kind: str
    role: str = ""  # of a loop's or conditional's part: "condition", "body", a branch
    children: list["Thunk"] = field(default_factory=list)

    def walk(self) -> Iterator["Thunk"]:
        yield self
        for child in self.children:
            yield from child.walk()


def parse_thunks(text: str) -> Thunk:
    """The tree of `*thunk_sequence_after_thunk_passes.txt`; the root is the whole program."""
    root = Thunk("program")
    stack: list[tuple[int, Thunk]] = [(-1, root)]
    role = ""
    for line in text.splitlines():
        if match := _THUNK.match(line):
            indent = len(match[1])
            while stack[-1][0] >= indent:
                stack.pop()
            parent = stack[-1][1]
            thunk = Thunk(match[2], role or (parent.children[-1].role if parent.children else ""))
            role = ""
            parent.children.append(thunk)
            stack.append((indent, thunk))
        elif match := _ROLE.match(line):
            role = match[1]
    return root


def command_buffers(program: Thunk) -> list[Thunk]:
    """Those at top level."""
    return [thunk for thunk in program.children if thunk.kind == "kCommandBuffer"]


def outside(program: Thunk) -> Counter[str]:
    """Kinds of what is at top level and in no command buffer."""
    return Counter(thunk.kind for thunk in program.children if thunk.kind != "kCommandBuffer")


def holds_loop(program: Thunk) -> bool:
    """Whether the decode loop is inside a command buffer: a loop that stands in one, not in another loop."""
    return any(child.kind == "kWhile" for buffer in command_buffers(program) for child in buffer.children)


def host_transfers(program: Thunk) -> int:
    """Things that need the host while the program runs, loops and conditionals that it drives among them."""

    def count(thunk: Thunk, on_device: bool) -> int:
        on_device = on_device or thunk.kind == "kCommandBuffer"
        driven = thunk.kind in ("kWhile", "kConditional") and not on_device
        here = int(driven or bool(_HOST.match(thunk.kind)))
        return here + sum(count(child, on_device) for child in thunk.children)

    return count(program, False)


def round_thunks(program: Thunk) -> tuple[list[Thunk], list[Thunk]]:
    """What the decode loop does in every round, and what only in some branch of it (sampling that no slot may ask for)."""
    loops = [thunk for thunk in program.walk() if thunk.kind == "kWhile"]
    if not loops:
        return [], []
    always: list[Thunk] = []
    sometimes: list[Thunk] = []

    def visit(thunk: Thunk, in_branch: bool) -> None:
        (sometimes if in_branch else always).append(thunk)
        in_branch = in_branch or thunk.kind in ("kConditional", "kWhile")
        for child in thunk.children:
            visit(child, in_branch)

    for child in loops[0].children:
        if child.role != "condition":
            visit(child, False)
    return always, sometimes


def collectives(thunks: list[Thunk]) -> Counter[str]:
    return Counter(thunk.kind for thunk in thunks if thunk.kind.startswith(_COLLECTIVES))


def num_launches(thunks: list[Thunk]) -> int:
    """Nodes of a graph that do something on the device."""
    structure = ("kCommandBuffer", "kSequential", "kAsyncStart", "kAsyncDone", "kConditional", "kPartitionId")
    return sum(thunk.kind not in structure for thunk in thunks)


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")
_FUSION = re.compile(r"calls=%?([\w.-]+)")
_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "u16": 2, "s16": 2}


def large_copies(hlo: str, protected_shapes: set[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Instructions of the optimized HLO, outside the entry computation, whose result is a plain copy of an array of a
    protected dtype and shape (up to the order of its axes): of a weight, or of cache pages."""
    found = []
    protected = {(dtype, tuple(sorted(shape))) for dtype, shape in protected_shapes}
    for name, body in _computations(hlo):
        if name.startswith("ENTRY"):
            continue
        for line in body:
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            what, dtype, dims, opcode = match.groups()
            is_copy = opcode in ("copy", "copy-start", "transpose", "all-gather") or (
                opcode == "fusion" and re.match(r"(wrapped_)?(copy|transpose)", what)
            )
            shape = tuple(sorted(int(n) for n in dims.split(",") if n))
            if is_copy and (dtype, shape) in protected and "fused" not in name:
                found.append(f"{what}: {dtype}[{dims}] {opcode} in {name}")
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
            body.append(line[:400])


@dataclass(frozen=True)
class Kernel:
    """What the assembler says of one Mosaic kernel."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


_LOWERED_FIRST = ("write_kv", "paged_attention")  # a layer writes before it reads


def parse_kernels(lowering: str, assembler: str) -> list[Kernel]:
    """From what MOSAIC_GPU_DUMP_RESOURCES prints while a program is lowered, without names but in the program's order, and
    MOSAIC_GPU_DUMP_PTXAS while it is compiled, in any order."""
    found = re.findall(
        r"entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        assembler, re.DOTALL,
    )  # fmt: skip
    found = sorted(set(found), key=lambda kernel: _LOWERED_FIRST.index(kernel[0]))
    shared = re.findall(r"smem_scratch_bytes=(\d+)", lowering)
    return [
        Kernel(name, int(registers), int(stores) + int(loads), int(num_bytes))
        for (name, stores, loads, registers), num_bytes in zip(found, shared, strict=True)
    ]
