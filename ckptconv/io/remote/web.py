"""Files on web servers, read by ranges."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ckptconv.io.remote.missing import needed
from ckptconv.io.remote.store import Failing, Part, Seen, Store, StoreError
from ckptconv.support.errors import UnsupportedCheckpoint

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)").fullmatch
_PASSING = frozenset((408, 425, 429, 500, 502, 503, 504))
_UNSAFE = "/~!$&'()*+,;=:@%"  # what may stand in a path as it is


def web_store(address: str) -> tuple[Store, str]:
    """The server of an address, and the path on it without its first slash."""
    found = urlsplit(address)
    if not found.hostname:
        raise UnsupportedCheckpoint("names no host", path=address)
    root = f"{found.scheme.lower()}://{found.netloc.rpartition('@')[2]}/"
    return WebStore(root), quote(found.path.lstrip("/"), safe=_UNSAFE)


class WebStore(Store):
    """The files of one web server. Keys are paths as they are sent, percent signs and all."""

    can_list = False

    def __init__(self, root: str) -> None:
        self.root = root
        urllib3 = needed("urllib3", root)
        self._errors = urllib3.exceptions
        self._pool = urllib3.PoolManager(
            num_pools=8,
            maxsize=16,
            retries=False,
            timeout=urllib3.Timeout(connect=10, read=60),
        )

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> Part:
        headers = {"Range": f"bytes={first}-{first + nbytes - 1}", "Accept-Encoding": "identity"}
        if pinned is not None and pinned.is_pinned:
            headers["If-Match"] = pinned.tag
        try:
            answer = self._pool.request(
                "GET", self.root + key, headers=headers, preload_content=False, redirect=False
            )
            try:
                return self._part(answer, first, nbytes)
            finally:
                answer.release_conn()
        except self._errors.HTTPError as error:
            raise StoreError("passing", f"cannot be reached ({type(error).__name__})") from None

    def _part(self, answer: Any, first: int, nbytes: int) -> Part:
        if answer.status == 206 and (found := _RANGE(answer.headers.get("Content-Range", ""))):
            data = answer.read(nbytes)
            return Part(data, _seen(int(found[3]), answer.headers))
        if answer.status == 416 and first == 0:
            return Part(b"", _seen(0, answer.headers))
        if answer.status in (404, 410):
            raise StoreError("missing", "no such file", hint="check the address")
        if answer.status in (401, 403):
            raise StoreError("denied", f"the server does not allow it (status {answer.status})")
        if answer.status == 412:
            raise StoreError("changed", "was changed while it was read")
        kind: Failing = "passing" if answer.status in _PASSING else "final"
        raise StoreError(kind, f"the server answers with status {answer.status}")

    def written(self, name: str) -> str:
        return quote(name, safe="/")

    def spoken(self, name: str) -> str:
        plain = unquote(name)
        return name if "/" in plain else plain


def _seen(size: int, headers: Any) -> Seen:
    tag = headers.get("ETag", "")
    is_pinned = bool(tag) and not tag.startswith("W/")
    return Seen(size, tag or headers.get("Last-Modified", ""), is_pinned)
