"""Holding signals off while arrays change hands."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals that arrive inside are handled when it ends.

    A program takes its state by donation and gives back another: an exception of a signal's handler (Ctrl-C raises one)
    between the two would leave the caller with neither. Python handles signals in its main thread; others need nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    set_now = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in set_now.items() if callable(handler)}
    arrived: list[tuple[int, FrameType | None]] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: arrived.append((number, frame)))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for which, frame in arrived:
        handlers[signal.Signals(which)](which, frame)
