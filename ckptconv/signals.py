"""The signals that ask a program to stop: what they do, and how they wait while a step must not be interrupted."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from ckptconv.platforms import STOPPING


def stop_in_good_order() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, SIGTERM and SIGHUP end with 143 and 129; what is ignored stays ignored.

    The first signal is heard, those after it are not: what cleans up behind it must come to its end.
    """
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, _: object) -> None:
    for other in STOPPING:
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


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
        for number, handler in reversed(before.items()):  # SIGINT last: its handler raises, and would leave the others unset
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one that Python did not set
        for missed in dict.fromkeys(met):
            signal.raise_signal(missed)
