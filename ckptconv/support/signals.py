"""The signals that ask a program to stop: what they do, and how they wait while a step must not be
interrupted.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

from ckptconv.support.platforms import STOPPING, signal_main_thread
from ckptconv.support.records import dataclass


class _Interrupt(KeyboardInterrupt):
    """Ctrl-C, of a class whose instances can be watched."""


class _End(SystemExit):
    """SIGTERM and the like, the same."""


@dataclass(slots=True)
class _LastSignal:
    """The last signal that asked for a stop, and the exception on its way for it, if any.

    `is_heard`: by `_stop`, in this process. `held` are those that came while they were held back.
    """

    number: int = 0
    stopping: Callable[[], object] = lambda: None
    is_heard: bool = False
    held: list[int] | None = None


_ASKED = _LastSignal()
_AGAIN = 0.01  # seconds after which a stop that was swallowed is tried again


def stop_in_good_order() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, SIGTERM and SIGHUP end with 143 and 129; what is
    ignored stays ignored.

    The first signal is heard, those after it are not: what cleans up behind it must come to its
    end. Python drops what is raised within a `__del__` or the callback of a weak reference; such a
    stop is raised again, a moment later.
    """
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    _ASKED.is_heard = True
    sys.unraisablehook = _unraisable


def missed_stop() -> int | None:
    """The exit code of a stop that a program at its end never heard of; None without one."""
    return 128 + _ASKED.number if _ASKED.number else None


def _stop(number: int, _: object) -> None:
    if _ASKED.held is not None:
        _ASKED.held.append(number)
        return
    if _ASKED.stopping() is not None:
        return
    raise _watched(number)


def _watched(number: int) -> BaseException:
    """Made here: a variable of who raises it would keep it alive, in its own traceback."""
    stopping = _Interrupt() if number == signal.SIGINT else _End(128 + number)
    _ASKED.number, _ASKED.stopping = number, weakref.ref(stopping)
    return stopping


def _unraisable(dropped: sys.UnraisableHookArgs) -> None:
    """What nobody can catch is printed; a stop is tried again, when this one is gone."""
    if not issubclass(dropped.exc_type, (_Interrupt, _End)):
        sys.__unraisablehook__(dropped)
        return
    again = threading.Timer(_AGAIN, signal_main_thread, (_ASKED.number,))
    again.daemon = True
    with contextlib.suppress(RuntimeError):  # the interpreter is ending
        again.start()


def held_back() -> AbstractContextManager[None]:
    """Signals that would stop the program are delivered when the block has ended. Python runs
    signal handlers in the main thread only, so in any other thread there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread() or _ASKED.held is not None:
        return contextlib.nullcontext()
    return _heard_later() if _ASKED.is_heard else _handlers_put_off()


@contextlib.contextmanager
def _heard_later() -> Iterator[None]:
    """In a program whose handler is ours, that notes them: to put others in its place, and it back,
    costs a twentieth of a small conversion.
    """
    met = _ASKED.held = []
    try:
        yield
    finally:
        _ASKED.held = None
        _deliver(met)


@contextlib.contextmanager
def _handlers_put_off() -> Iterator[None]:
    met: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: met.append(number)) for number in STOPPING
    }
    try:
        yield
    finally:
        # SIGINT last: its handler raises, and would leave the others unset
        for number, handler in reversed(before.items()):
            # None, of one that Python did not set, cannot be set; SIG_DFL is 0, and stays so
            signal.signal(number, handler or signal.SIG_DFL)
        _deliver(met)


def _deliver(met: Iterable[int]) -> None:
    for missed in dict.fromkeys(met):
        signal.raise_signal(missed)
