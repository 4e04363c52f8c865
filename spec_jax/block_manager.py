"""Who owns which page of the cache. Host only: no arrays here."""


class BlockManager:
    """Hands out page numbers `1 .. num_pages - 1`; page 0 is the scratch page and never leaves."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Raises RuntimeError when fewer than `count` pages are free: ask `can_allocate` first."""
        if not self.can_allocate(count):
            raise RuntimeError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Takes pages back. Raises RuntimeError for a page that nobody owns."""
        for page in pages:
            if page not in self._owned:
                raise RuntimeError(f"page {page} is freed, but nobody owns it")
            self._owned.remove(page)
            self._free.append(page)
