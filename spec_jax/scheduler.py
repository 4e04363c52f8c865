"""Which request runs in which slot, first come, first served. Host only: no arrays here."""

import heapq
from collections import deque

from .block_manager import BlockManager
from .errors import UserError
from .request import Request


class Scheduler:
    """A queue in front of `max_num_seqs` slots and a pool of pages.

    A request gets the pages for its longest possible text when it is admitted, so that it can run to its end; until they
    are free it waits, and those behind it wait too.
    """

    def __init__(self, max_num_seqs: int, num_pages: int, page_size: int):
        self.blocks = BlockManager(num_pages)
        self._page_size = page_size
        self._free_slots = list(range(max_num_seqs))  # a heap: low slots first keeps the batch small
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, request: Request) -> None:
        """Raises UserError when the request could never fit the cache."""
        needed, room = self._pages_for(request), self.blocks.num_pages - 1
        if needed > room:
            raise UserError(
                f"the request may grow to {request.max_length} tokens, the cache holds {room * self._page_size}: "
                f"lower max_tokens or raise num_kv_tokens"
            )

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> Request | None:
        """Gives the first waiting request its slot and pages, if both are there."""
        if not self.waiting or not self._free_slots:
            return None
        count = self._pages_for(self.waiting[0])
        if not self.blocks.can_allocate(count):
            return None
        request = self.waiting.popleft()
        request.slot = heapq.heappop(self._free_slots)
        request.pages = self.blocks.allocate(count)
        self.running[request.slot] = request
        return request

    def release(self, request: Request) -> None:
        """Takes back what a running request held, or takes it out of the queue."""
        if request.slot < 0:
            self.waiting.remove(request)
            return
        del self.running[request.slot]
        heapq.heappush(self._free_slots, request.slot)
        self.blocks.free(request.pages)
        request.slot, request.pages = -1, []

    def put_back(self, request: Request) -> None:
        """First in the queue, after it was released."""
        self.waiting.appendleft(request)

    def _pages_for(self, request: Request) -> int:
        return -(-request.max_length // self._page_size)
