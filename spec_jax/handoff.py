"""Prompts on a mesh of their own: what is written there is carried over to the pages of the decode mesh.

Decoding does not wait for a prompt: a chunk's pages travel as soon as they are computed, and are put into the decode mesh's
cache only once they have arrived. The host waits for nothing.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from .cache import PagedCache, create_cache
from .prefill import PrefillOutput
from .programs import Program, Programs
from .sharding import ShardingRules
from .signals import signals_held
from .sizes import Sizes
from .slot_row import filled


class PrefillMesh:
    """Room for one prompt at a time on `mesh`, and the way to `decode`'s pages. `sizes` are those of the decode mesh."""

    def __init__(self, sizes: Sizes, decode: Programs, mesh: Mesh, rules: ShardingRules):
        self.sizes = sizes.for_one_prompt(mesh)
        self.programs = Programs(self.sizes, mesh, rules)
        self._decode = decode
        self._cache = create_cache(self.programs.cache)
        self._weights: list[jax.Array] = []
        self._travelling: list[tuple[PagedCache, np.ndarray]] = []  # pages, and where they belong
        self._draft_hidden: jax.Array | None = None  # of the newest chunk

    @property
    def has_arrived(self) -> bool:
        """Whether `deliver` would wait for nothing."""
        travelling = [moved for moved, _ in self._travelling], self._draft_hidden
        return all(x.is_ready() for x in jax.tree.leaves(travelling))

    def load(self, weights: Sequence[jax.Array]) -> None:
        """A copy of the weights, as this mesh wants them."""
        self._weights = [
            jax.device_put(value, shape.sharding) for value, shape in zip(weights, self.programs.weights, strict=True)
        ]

    def prepare(self, start: int, count: int, size: int, has_logprobs: bool) -> Iterator[Program]:
        """The programs that one chunk needs."""
        yield self.programs.prefill(size, self.sizes.page_bucket(start + count), has_logprobs)
        yield self.programs.take_pages(self._num_moved(size))
        yield self._decode.put_pages(self._num_moved(size))

    def run(
        self,
        pages: Sequence[int],
        tokens: np.ndarray,
        following: np.ndarray,
        start: int,
        count: int,
        has_logprobs: bool,
    ) -> PrefillOutput:
        """Prefills `tokens[:count]` at `start ..` of a sequence whose pages on the decode mesh are `pages`, and sends them.

        What a draft head needs of it is sent as well.
        """
        size, page = len(tokens), self.sizes.page_size
        num_pages = self.sizes.page_bucket(start + count)
        local = list(range(1, 1 + self.sizes.max_pages))
        program = self.programs.prefill(size, num_pages, has_logprobs)
        with signals_held():
            self._cache, output = program(
                self._weights, self._cache, tokens, following, np.int32(start), np.int32(count),
                np.asarray(local[:num_pages], np.int32),
            )  # fmt: skip
        touched = slice(start // page, (start + count - 1) // page + 1)
        n = self._num_moved(size)
        moved = self.programs.take_pages(n)(self._cache, filled(local[touched], n))
        to = self._decode.cache
        moved = jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding or jax.devices()[0]), moved, to)
        self._travelling.append((moved, filled(pages[touched], n)))
        if output.draft_hidden is not None:
            place = self._decode.state.draft_hidden.sharding or jax.devices()[0]
            output = output._replace(draft_hidden=jax.device_put(output.draft_hidden, place))
        self._draft_hidden = output.draft_hidden
        return output

    def deliver(self, cache: PagedCache) -> PagedCache:
        """Takes the decode mesh's cache and gives it back with all that was sent."""
        travelling, self._travelling = self._travelling, []
        for moved, pages in travelling:
            cache = self._decode.put_pages(len(pages))(cache, moved, pages)
        return cache

    def drop(self) -> None:
        """Forgets what was sent: its pages belong to another by now."""
        self._travelling = []

    def _num_moved(self, size: int) -> int:
        """Pages that a chunk of `size` tokens can touch, wherever it begins."""
        return min(-(-size // self.sizes.page_size) + 1, self.sizes.max_pages)
