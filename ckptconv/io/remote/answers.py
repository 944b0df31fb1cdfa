"""What an answer of a web server says: which bytes it holds, of what version, or why none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from ckptconv.io.remote.causes import unreached
from ckptconv.io.remote.store import Seen, StoreError

Headers = Mapping[str, str]

_PASSING = frozenset((408, 425, 429, 500, 502, 503, 504))
_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-(\d{1,19})/(\d{1,19})\s*", re.IGNORECASE).fullmatch
_SECONDS = re.compile(r"\s*(\d{1,9})(?:\.\d*)?\s*").fullmatch
_LEFT = re.compile(r"[;\s]r\s*=\s*(\d{1,9})").search
_RESET = re.compile(r"[;\s]t\s*=\s*(\d{1,9})").search

LIES = 3
"""How often a server may answer against the rules before it is believed to do so always."""


def range_of(headers: Headers) -> tuple[int, int, int] | None:
    """Where the bytes of an answer begin and end, and how many there are in all; None where that
    is not told.

    >>> range_of({"Content-Range": "bytes 5-9/100"})
    (5, 10, 100)
    """
    found = _RANGE(headers.get("Content-Range", ""))
    if found is None:
        return None
    first, last, total = (int(number) for number in found.groups())
    return (first, last + 1, total) if first <= last < total else None


def length_of(headers: Headers) -> int | None:
    """The length of the body as it is told."""
    text = headers.get("Content-Length", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def seen(size: int, headers: Headers) -> Seen:
    """The version of a file that is `size` bytes long."""
    tag = headers.get("ETag", "").strip()
    is_pinned = is_strong(tag)
    return Seen(size, tag or headers.get("Last-Modified", "").strip(), is_pinned)


def is_strong(tag: str) -> bool:
    """Whether two versions with this tag are the same, byte for byte."""
    return len(tag) > 2 and tag[0] == tag[-1] == '"'


def wait_of(headers: Headers, status: int) -> float | None:
    """The seconds for which a server asks to wait; None where it does not.

    Retry-After tells seconds or a date; RateLimit (of the Hub) the seconds until there may be
    requests again.

    >>> wait_of({"RateLimit": '"api";r=0;t=55'}, 429), wait_of({"Retry-After": "7"}, 503)
    (55.0, 7.0)
    """
    limit = headers.get("RateLimit", "")
    if status == 429 and (reset := _RESET(limit)):
        left = _LEFT(limit)
        if left is None or not int(left[1]):
            return float(reset[1])
    text = headers.get("Retry-After", "")
    if found := _SECONDS(text):
        return float(found[1])
    try:
        until = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=timezone.utc)
    return max(0.0, (until - datetime.now(timezone.utc)).total_seconds())


def refusal(status: int, headers: Headers, hints: Mapping[int, str] | None = None) -> StoreError:
    """The error for an answer that holds no bytes."""
    hint = (hints or {}).get(status)
    if status in (404, 410):
        return StoreError("missing", "no such file", hint=hint or "check the address")
    if status in (401, 403):
        return StoreError("denied", f"the server does not allow it (status {status})", hint=hint)
    if status == 407:
        return unreached("password", "the server")
    if status == 412:
        return StoreError("changed", "was changed while it was read")
    if status not in _PASSING:
        return StoreError("final", f"the server answers with status {status}", hint=hint)
    wait = wait_of(headers, status)
    what = f"the server answers with status {status}"
    if wait is not None and wait >= 1:
        what = f"{what}, and asks to wait {wait:.0f} s"
    return StoreError("passing", what, hint=hint or "try again later", wait=wait)
