"""Training of draft heads on what a target itself says. Needs `spec-jax[train]`."""

from .draft import train_draft

__all__ = ["train_draft"]
