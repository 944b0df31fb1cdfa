"""What holds within a block: a setting, in this thread or task alone; a pause of the collector.

Both are classes: one small conversion enters twenty such blocks, and a block of `contextlib` made
of a generator takes three times as long.
"""

from __future__ import annotations

import gc
from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class set_within(Generic[T]):
    """Within the block, the variable has the value."""

    __slots__ = ("_token", "_value", "_variable")
    _token: Token[Any]

    def __init__(self, variable: ContextVar[T] | ContextVar[T | None], value: T) -> None:
        self._variable: ContextVar[Any] = variable
        self._value = value

    def __enter__(self) -> T:
        self._token = self._variable.set(self._value)
        return self._value

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


class collector_paused:
    """Pause cyclic collection for the block (half the time for 100,000 tensors); off stays off."""

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            gc.enable()
