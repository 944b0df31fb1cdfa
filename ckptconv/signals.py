"""Ctrl-C and SIGTERM held back for moments that must not be cut in two."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""The signals by which a user or a service manager ends a program in good order."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Signals that would stop the program are delivered when the block has ended.

    Python runs signal handlers in the main thread only, so in any other thread there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    met: list[int] = []
    before = {number: signal.signal(number, lambda number, _: met.append(number)) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: set by other than Python
        for missed in dict.fromkeys(met):
            signal.raise_signal(missed)
