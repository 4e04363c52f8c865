"""Pages are never lost, never shared, and page 0 never leaves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.block_manager import BlockManager


@given(num_pages=st.integers(1, 20), actions=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_pages_belong_to_one_owner_and_come_back(num_pages, actions):
    blocks = BlockManager(num_pages)
    owned: list[list[int]] = []
    for takes, n in actions:
        if takes:
            if blocks.can_allocate(n):
                owned.append(blocks.allocate(n))
            else:
                with pytest.raises(RuntimeError, match="are free"):
                    blocks.allocate(n)
        elif owned:
            blocks.free(owned.pop(n % len(owned)))
        held = [page for pages in owned for page in pages]
        assert len(held) == len(set(held))
        assert all(0 < page < num_pages for page in held)
        assert blocks.num_free == num_pages - 1 - len(held)
    for pages in owned:
        blocks.free(pages)
    assert blocks.num_free == num_pages - 1


def test_a_page_cannot_be_freed_twice():
    blocks = BlockManager(4)
    pages = blocks.allocate(2)
    blocks.free(pages)
    with pytest.raises(RuntimeError, match="nobody owns it"):
        blocks.free(pages[:1])
