"""Where this project keeps files between runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`SPEC_JAX_CACHE`, else `spec-jax` in the user's cache folder. It holds `models/`, `xla/` and `native/`."""
    if chosen := os.environ.get("SPEC_JAX_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spec-jax"
