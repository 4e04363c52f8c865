"""What a check found, as a table for people and as one JSON object."""

from dataclasses import asdict, dataclass
from typing import Any

from .kernels import Kernel

_OWN_TEMPORARIES = 1e9  # scores of all rows over the vocabulary, some times over


@dataclass(frozen=True)
class ProgramReport:
    """One compiled program. Bytes are per device; thunks are counted as `thunks.py` defines them."""

    name: str
    compile_s: float
    command_buffers: int
    loop_in_command_buffer: bool | None  # None: the program has no loop
    thunks_outside: dict[str, int]
    host_transfers: int
    launches_per_round: int
    launches_when_needed: int  # besides: a head's drafts, sampling above temperature 0
    collectives_per_round: dict[str, int]
    collectives_when_needed: dict[str, int]
    copies_of_weights_or_cache: list[str]
    aliased_bytes: int
    temporary_bytes: int
    kernels: list[Kernel]

    def faults(self, cache_bytes: int) -> list[str]:
        found = []
        if self.loop_in_command_buffer is False:
            found.append("the loop is not inside a command buffer: the host drives it")
        if self.command_buffers != 1:
            found.append(f"{self.command_buffers} command buffers instead of one")
        if strangers := {kind: n for kind, n in self.thunks_outside.items() if kind != "kCopy"}:
            found.append(f"outside the command buffer: {_counts(strangers)}")
        if self.host_transfers:
            found.append(f"{self.host_transfers} transfers to or from the host")
        if self.copies_of_weights_or_cache:
            found.append(f"copies of weights or cache: {'; '.join(self.copies_of_weights_or_cache[:3])}")
        if self.temporary_bytes > cache_bytes / 2 + _OWN_TEMPORARIES:
            found.append(f"{self.temporary_bytes} bytes of temporaries for {cache_bytes} bytes of cache: is it copied?")
        if self.aliased_bytes < cache_bytes:
            found.append(f"only {self.aliased_bytes} of {cache_bytes} bytes of cache are updated in place")
        found += [f"{k.name} spills {k.spilled_bytes} bytes" for k in self.kernels if k.spilled_bytes]
        return [f"{self.name}: {fault}" for fault in found]


@dataclass(frozen=True)
class Roofline:
    """One decode round at full batch: what the target's pass must read and compute per device, and the least time that
    takes; and the same for what drafts besides, in a round where it must."""

    context: int
    bytes: float
    flops: float
    seconds: float
    draft_bytes: float
    draft_seconds: float


@dataclass(frozen=True)
class Report:
    """Everything about one model on one machine. Bytes are per device."""

    model: str
    target: str
    devices: int
    kv_cache_dtype: str
    num_draft_tokens: int
    max_num_seqs: int
    max_model_len: int
    attention: str
    memory_bytes: float
    usable_bytes: float
    weight_bytes: int
    cache_bytes: int
    state_bytes: int
    num_kv_tokens: int
    kv_tokens_that_fit: int
    programs: list[ProgramReport]
    rounds: list[Roofline]

    @property
    def temporary_bytes(self) -> int:
        """Of the program that needs most: one runs at a time."""
        return max(program.temporary_bytes for program in self.programs)

    @property
    def used_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.state_bytes + self.temporary_bytes

    @property
    def faults(self) -> list[str]:
        found = [fault for program in self.programs for fault in program.faults(self.cache_bytes)]
        if self.used_bytes > self.usable_bytes:
            found.append(
                f"{self.used_bytes / 1e9:.1f} GB per device are needed, of {self.memory_bytes / 1e9:.0f} GB "
                f"{self.usable_bytes / 1e9:.1f} GB can be used"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "used_bytes": self.used_bytes, "faults": self.faults, "ok": not self.faults}

    def lines(self) -> list[str]:
        """For people."""
        head = (
            f"{self.model} on {self.devices} x {self.target}: K = {self.num_draft_tokens}, {self.max_num_seqs} sequences of "
            f"up to {self.max_model_len} tokens, {self.kv_cache_dtype} cache, {self.attention} attention"
        )
        memory = (
            f"per device: weights {_gb(self.weight_bytes)}, cache {_gb(self.cache_bytes)} ({self.num_kv_tokens} tokens), "
            f"state {_gb(self.state_bytes)}, temporaries {_gb(self.temporary_bytes)}; "
            f"{_gb(self.used_bytes)} of {_gb(self.memory_bytes)}"
        )
        found = [head, memory, f"KV tokens that fit: {self.kv_tokens_that_fit}"]
        for p in self.programs:
            loop = {None: "no loop", True: "while inside", False: "while NOT inside"}[p.loop_in_command_buffer]
            found.append(
                f"{p.name}: {p.command_buffers} command buffer{'s' * (p.command_buffers != 1)}, {loop}, outside: "
                f"{_counts(p.thunks_outside)}, host transfers: {p.host_transfers}, aliased {_gb(p.aliased_bytes)}, "
                f"temporaries {_gb(p.temporary_bytes)} (compiled in {p.compile_s:.0f} s)"
            )
            if p.loop_in_command_buffer is not None:
                found.append(
                    f"  a round: {p.launches_per_round} launches, collectives: {_counts(p.collectives_per_round)}"
                    f"; when a head drafts or a slot samples, at most {p.launches_when_needed} launches more, collectives: "
                    f"{_counts(p.collectives_when_needed)}; "
                    f"copies of weights or cache: {len(p.copies_of_weights_or_cache)}"
                )
            found += [
                f"  {k.name}: {k.registers} registers, {k.spilled_bytes} bytes spilled"
                + ("" if k.shared_bytes is None else f", {k.shared_bytes} bytes shared memory")
                for k in p.kernels
            ]
        found += [
            f"a round at context {r.context}: {_gb(r.bytes)} and {r.flops / 1e12:.2f} TFLOP per device, "
            f"at least {r.seconds * 1e3:.2f} ms; drafts {_gb(r.draft_bytes)}, {r.draft_seconds / r.seconds:.1%} of that time"
            for r in self.rounds
        ]
        return [*found, *(f"FAULT {fault}" for fault in self.faults), f"ok: {'no' if self.faults else 'yes'}"]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "nothing"
