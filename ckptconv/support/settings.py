"""What is set for a block, and for what is called in it, in this thread or task alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def set_within(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Within the block, the variable has the value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
