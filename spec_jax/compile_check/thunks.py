"""What a compiled GPU program does at run time, read from XLA's dump of its thunks.

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
    """What the decode loop does in every round, and what only in some branch of it: a head that need not draft,
    sampling that no slot may ask for."""
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
