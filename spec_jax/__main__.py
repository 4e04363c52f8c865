"""`python -m spec_jax` is `spec-jax`."""

from .cli import main

main()
