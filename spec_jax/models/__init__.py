"""Flax NNX model definitions. They know nothing of files, requests or hosts."""
