"""Trying again: how often, after how long, and for how long in all."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from ckptconv.io.remote.store import StoreError
from ckptconv.io.remote.traffic import count

T = TypeVar("T")

FIRST, LONGEST = 0.2, 15.0
"""Seconds before the second try, and at most before any other; each is drawn at random between half
of it and all of it.
"""


def patiently(request: Callable[[], T], seconds: float) -> T:
    """What `request` gives, tried again for `seconds` while its errors are passing ones.

    A server that asks for a longer wait than is left is answered by its error at once. No error has
    what was caught before it as its context: answers of servers hold secrets.
    """
    begin, delay, tries = time.monotonic(), FIRST, 0
    while True:
        tries += 1
        count(requests=1)
        try:
            return request()
        except StoreError as error:
            error.__context__ = None
            if error.kind != "passing" or (error.tries is not None and tries >= error.tries):
                raise
            wait = delay * random.uniform(0.5, 1.0)
            if error.wait is not None:
                wait = max(error.wait, 0.0) + random.uniform(0.0, FIRST)
            spent = time.monotonic() - begin
            if spent + wait > seconds:
                error.what = f"{error.what} (tried for {spent:.0f} s)"
                raise
        time.sleep(wait)
        count(retries=1)
        delay = min(2 * delay, LONGEST)
