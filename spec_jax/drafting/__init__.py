"""Drafters: each proposes what may come next, from the decode state alone."""

from .ngram import propose_ngram

__all__ = ["propose_ngram"]
