"""What XLA makes of the real programs on a GPU machine, compiled on a machine that has no GPU."""

from .check import compile_check
from .report import Report

__all__ = ["Report", "compile_check"]
