"""Reading a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) by memory map.

The header is parsed here because `gguf.GGUFReader` takes seconds for the token lists of a real model (3.6 s against
0.1 s for 49k tokens); what the tensor types are and how they dequantize comes from the `gguf` package.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from spec_jax.errors import UserError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_SLICE = 8192  # blocks
_PLAIN_TYPES = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies; `shape` is outermost first, the reverse of the file's order."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


class GGUFFile:
    """The metadata and the tensors of one file.

    Raises UserError when the file is missing, is no GGUF file, is shorter than its header says, or holds a tensor type
    that the `gguf` package does not know.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < 24 or file.read(4) != b"GGUF":
                    raise UserError(f"{path} is not a GGUF file: it does not begin with the bytes 'GGUF'")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        self._at = 4
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError, RecursionError):
            raise UserError(f"{path} is truncated or damaged: its header ends early; fetch the file again") from None

    def _read_header(self) -> None:
        (version,) = self._unpack("I")
        if version not in (2, 3):
            raise UserError(f"{self.path} is GGUF version {version}: versions 2 and 3 in little-endian order are read")
        num_tensors, num_fields = self._unpack("QQ")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            (kind,) = self._unpack("I")
            self.metadata[key] = self._value(kind)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise UserError(f"{self.path} is damaged: general.alignment is {alignment!r}")
        first = -(-self._at // alignment) * alignment
        self._tensors = {}
        for name, shape, kind, offset in entries:
            self._tensors[name] = self._place(name, shape, kind, first + offset)

    def _place(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> _Entry:
        try:
            tensor_type = GGMLQuantizationType(kind)
        except ValueError:
            known = ", ".join(t.name for t in GGMLQuantizationType)
            raise UserError(f"{self.path}: tensor {name} has the unknown type {kind}; known types: {known}") from None
        block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        count = int(np.prod(shape, dtype=object)) if shape else 1
        if shape and shape[-1] % block:
            raise UserError(
                f"{self.path} is damaged: rows of {shape[-1]} in {name} are no whole {tensor_type.name} blocks"
            )
        num_bytes = count // block * block_bytes
        if start + num_bytes > len(self._data):
            raise UserError(
                f"{self.path} is truncated: tensor {name} ends at byte {start + num_bytes:,} of a file of "
                f"{len(self._data):,} bytes; fetch the file again"
            )
        return _Entry(shape, tensor_type, start, num_bytes)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def tensor(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The values of one tensor in `dtype`, dequantized if need be."""
        entry = self._tensors[name]
        raw = np.frombuffer(self._data, np.uint8, entry.num_bytes, entry.start)
        if entry.type in _PLAIN_TYPES:
            return raw.view(_PLAIN_TYPES[entry.type]).reshape(entry.shape).astype(dtype, copy=False)
        # In slices, so that the float32 values stay in the CPU's cache: three times faster than all at once.
        block, block_bytes = GGML_QUANT_SIZES[entry.type]
        blocks = raw.reshape(-1, block_bytes)
        out = np.empty((len(blocks), block), dtype)
        try:
            for at in range(0, len(blocks), _SLICE):
                piece = blocks[at : at + _SLICE]
                out[at : at + _SLICE] = dequantize(piece.reshape(1, -1), entry.type).reshape(len(piece), block)
        except NotImplementedError:
            raise UserError(
                f"{self.path}: tensor {name} has type {entry.type.name}, which cannot be dequantized; "
                f"convert the file to BF16, Q8_0, Q4_1 or Q4_0"
            ) from None
        return out.reshape(entry.shape)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """In one loop without a call per string: there are two for every token of the vocabulary."""
        data, at, end, texts = self._data, self._at, len(self._data), []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if start > end or at > end:
                raise IndexError
            texts.append(data[start:at].decode())
        self._at = at
        return texts

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, length = self._unpack("IQ")
            if item in _SCALARS:
                return list(self._unpack(f"{length}{_SCALARS[item]}"))
            if item == _STRING:
                return self._strings(length)
            return [self._value(item) for _ in range(length)]
        if kind not in _SCALARS:
            raise IndexError
        return self._unpack(_SCALARS[kind])[0]

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._unpack("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise IndexError
        shape = self._unpack(f"{num_dimensions}Q")[::-1]
        kind, offset = self._unpack("IQ")
        return name, shape, kind, offset
