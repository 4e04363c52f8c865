"""The persistent compilation cache: programs compiled once are read back at the next start."""

import os

import jax

from .paths import cache_folder


def use_compilation_cache() -> None:
    """Keeps compiled programs in `xla/` of the cache folder, unless JAX was already told where."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
