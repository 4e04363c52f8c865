"""A folder of safetensors files and JSON: what every Hugging Face checkpoint is, a model or a draft head."""

import json
from collections.abc import KeysView
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from spec_jax.errors import UserError

from .fields import damaged_fields


class TensorFolder:
    """Tensors by name, from one file or several. Files are memory-mapped; a tensor is read when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, Any] = {}
        for path in _weight_files(folder):
            try:
                file = safe_open(path, framework="np")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or is no safetensors file ({error}); fetch it again") from None
            for name in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                self._files[name] = file

    @property
    def names(self) -> KeysView[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises UserError when no file of the folder has the tensor."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The tensor `name`, in `dtype`. Raises UserError when no file of the folder has it."""
        return self._file(name).get_tensor(name).astype(dtype, copy=False)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise UserError(f"{self.folder} has no tensor {name}: the checkpoint is incomplete")
        return self._files[name]


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        with damaged_fields(index):
            names = sorted(set(read_json(index)["weight_map"].values()))
            missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder} lacks {', '.join(missing)}, which model.safetensors.index.json names")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no .safetensors file; PyTorch .bin weights are not read")
    return files


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises UserError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} cannot be read: it holds no JSON object")
    return value
