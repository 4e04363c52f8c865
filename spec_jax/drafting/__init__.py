"""Drafters: each proposes what may come next, from the decode state alone."""

from .eagle import follow_target, propose_eagle
from .ngram import propose_ngram

__all__ = ["follow_target", "propose_eagle", "propose_ngram"]
