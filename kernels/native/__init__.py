"""Kernels for CPUs: C, compiled by the machine's own compiler, called by XLA through its FFI.

XLA:CPU gathers pages before it attends to them, and converts or packs the whole weight in every product of few rows.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from .. import dispatch

DTYPES = (jnp.float32, jnp.bfloat16)
MULTIPLE = 32
"""What the innermost axis of operands must be a multiple of: PAIR in `ffi.h`, for the widest vectors."""

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")
_FUNCTIONS = ("spec_jax_matmul", "spec_jax_paged_attention")

_library: ctypes.CDLL | None = None


class NotBuilt(RuntimeError):
    """The kernels cannot be had on this machine; the message says why."""


def build(folder: Path) -> None:
    """Compiles the kernels into `folder`, unless they are there; programs traced from now on use them.

    Raises:
      NotBuilt: no compiler was found, or it failed; what is made of XLA alone goes on working.
    """
    global _library
    if _library is not None:
        return
    name, *options = shlex.split(os.environ.get("CC") or "cc")
    compiler = shutil.which(name)
    if compiler is None:
        raise NotBuilt(f"no C compiler was found as {name!r}: install GCC (9 or newer) or Clang, or name one in CC")
    made = folder / f"kernels-{_digest(compiler, *options)}.so"
    try:
        if not made.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:  # two processes may build at once
                whole = Path(scratch) / made.name
                sources = [str(path) for path in _SOURCES if path.suffix == ".c"]
                command = [compiler, *options, *_FLAGS, "-I", jax.ffi.include_dir(), *sources, "-o", str(whole)]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
                whole.replace(made)
        library = _opened(made)
        for function in _FUNCTIONS:
            jax.ffi.register_ffi_target(function, jax.ffi.pycapsule(library[function]), platform="cpu")
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no message"]
        raise NotBuilt(f"{compiler} failed: {next((line for line in said if 'error' in line), said[0])}") from None
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{made} cannot be built or loaded: {error}; SPEC_JAX_CACHE names another folder") from None
    _library = library


def is_usable() -> bool:
    """Whether the kernels are built, and the program is for one CPU: for a mesh XLA cuts its own operations, not these."""
    return _library is not None and dispatch.runs_on_one_cpu()


def call(name: str, result: jax.ShapeDtypeStruct, *operands: Any) -> jax.Array:
    return jax.ffi.ffi_call(f"spec_jax_{name}", result)(*operands)


def _opened(path: Path) -> ctypes.CDLL:
    """A file that is damaged is removed, so that the next start makes it anew."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _digest(*compiler: str) -> str:
    """Names what a build depends on: a cache folder may be shared by machines of different kinds."""
    parts = [path.read_bytes() for path in _SOURCES]
    parts += [value.encode() for value in (*_FLAGS, jaxlib.__version__, *compiler, platform.machine())]
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        parts += [line for line in cpu.read_bytes().splitlines() if line.startswith((b"flags", b"Features"))][:1]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]
