"""Files on web servers, read by ranges.

Every answer is checked: that its bytes are those that were asked for, all of them and no more, and
of the version that was opened.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

from ckptconv.io.remote.causes import LIES, Headers, is_strong, length_of, range_of, refusal, seen
from ckptconv.io.remote.network import bracketed, needed
from ckptconv.io.remote.store import ObjectBytes, Seen, Store, StoreError, read_on
from ckptconv.io.remote.traffic import count
from ckptconv.support.addresses import how_to_get, shown
from ckptconv.support.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from ckptconv.io.remote.wire import Answer, Credential, Target, Wire

_UNSAFE = "/~!$&'()*+,;=:@%"  # what may stand in a path as it is
_SMALL = 128 << 10  # bytes of a file that is taken as a whole where the server sends no range
# what a signed address answers that was good for a while only, or for one range
_STALE = frozenset((400, 401, 403, 404, 410, 416))

_FRUITLESS = 2  # addresses that were not good for a second request, before none is kept
_AT_ONCE = 256 << 10  # bytes that are taken off a connection at a time: what came before it broke

_HINTS = {
    401: "write it as https://USER:PASSWORD@HOST/…, or use a signed address",
    403: "a signed address may have expired; get a new one",
}


def web_store(address: str) -> tuple[Store, str]:
    """The server of an address, and the path on it without its first slash."""
    try:
        found = urlsplit(address)
        host, port = (found.hostname or "").encode("idna").decode("ascii"), found.port
    except ValueError:
        raise UnsupportedCheckpoint("is not an address of the web", path=shown(address)) from None
    if not host:
        hint = "write it as https://HOST/PATH"
        raise UnsupportedCheckpoint("names no host", path=shown(address), hint=hint)
    named = bracketed(host)
    if port is not None:
        named = f"{named}:{port}"
    root = f"{found.scheme.lower()}://{named}/"
    needed("urllib3", root)
    key = quote(found.path[1:], safe=_UNSAFE)
    store = WebStore(root, userinfo=found.netloc.rpartition("@")[0], queries={key: found.query})
    return store, key


class WebStore(Store):
    """The files of one web server. Keys are paths as they are sent, percent signs and all.

    `userinfo` is the name and the password for that server, `queries` what follows the path in the
    addresses of some files; neither is ever shown.
    """

    can_list = False

    def __init__(
        self, root: str, *, userinfo: str = "", queries: Mapping[str, str] | None = None
    ) -> None:
        self.root = root
        self._userinfo = userinfo
        self._queries = {key: query for key, query in (queries or {}).items() if query}
        self._wire = self._connected(root)
        self._lock = threading.Lock()
        self._fruitless: Counter[str] = Counter()
        # where the server sent us for a file, and the tag that the file has there; None where that
        # address is stale
        self._moved: dict[str, tuple[Target, str] | None] = {}

    def _connected(self, root: str) -> Wire:
        from ckptconv.io.remote.wire import Wire, basic, origin_of

        credential: Credential | None = None
        if self._userinfo:
            user, _, password = self._userinfo.partition(":")
            credential = basic(origin_of(root), unquote(user), unquote(password))
        return Wire(credential)

    # ----------------------------------------------------------------------------------- reading

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        return read_on(partial(self._got, key), first, nbytes, pinned)

    def _got(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        with self._lock:
            is_direct = key not in self._moved
            moved = self._moved.get(key)
        if moved is not None:
            try:
                part = self._part(key, *moved, first, nbytes, pinned, is_moved=True)
                self._fruitless[key] = 0
                return part
            except StaleAddress:
                self._forget(key)
            except StoreError as error:
                if error.kind == "passing":
                    self._forget(key)  # another address may be better
                raise
            count(requests=1)
        from ckptconv.io.remote.wire import Target

        # who only sends us elsewhere does not know the tag that the file has there
        tag = ""
        if pinned is not None and pinned.is_pinned and is_direct:
            tag = pinned.tag
        return self._part(key, Target(self.url(key)), tag, first, nbytes, pinned)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._moved[key] = None
            self._fruitless[key] += 1

    def _part(
        self,
        key: str,
        target: Target,
        tag: str,
        first: int,
        nbytes: int,
        pinned: Seen | None,
        *,
        is_moved: bool = False,
    ) -> ObjectBytes:
        headers = {"Range": f"bytes={first}-{first + nbytes - 1}"}
        if tag:
            headers["If-Match"] = tag
        with self._wire.asked(target, headers, nbytes) as answer:
            if is_moved and answer.status in _STALE:
                raise StaleAddress
            self.noted(key, answer)
            part = self._received(key, answer, first, nbytes, pinned)
            if answer.hops:
                now = answer.headers.get("ETag", "").strip()
                with self._lock:
                    self._moved[key] = None
                    if self._fruitless[key] < _FRUITLESS:
                        self._moved[key] = answer.target, now if is_strong(now) else ""
            return part

    def _received(
        self, key: str, answer: Answer, first: int, nbytes: int, pinned: Seen | None
    ) -> ObjectBytes:
        """The bytes of an answer, if they are the ones that were asked for."""
        status, headers = answer.status, answer.headers
        if status in (200, 206):
            coding = headers.get("Content-Encoding", "identity").strip().lower()
            if coding not in ("", "identity"):
                raise self._no_ranges(key, f"the server sends it compressed ({coding})")
        if status == 206:
            return self._range(key, answer, first, nbytes, pinned)
        if status == 200:
            return self._whole(key, answer, first, nbytes, pinned)
        if status == 416:
            if pinned is not None and pinned.size:
                raise StoreError("changed")
            total = headers.get("Content-Range", "").rpartition("/")[2].strip()
            if first == 0 and total in ("", "0", "*"):
                return ObjectBytes(b"", self.seen(key, 0, headers))
        raise self.refused(key, status, headers)

    def _range(
        self, key: str, answer: Answer, first: int, nbytes: int, pinned: Seen | None
    ) -> ObjectBytes:
        found = range_of(answer.headers)
        if found is None:
            raise _lie("the server does not say which bytes it sends")
        start, end, total = found
        version = self.seen(key, total, answer.headers)
        if pinned is not None and version != pinned:
            raise StoreError("changed")
        if start != first or end > first + nbytes:
            raise _lie("the server sends other bytes than it was asked for")
        length = length_of(answer.headers)
        if length not in (None, end - start):
            raise _lie(f"the server sends {length} bytes, and calls them {end - start}")
        data = _all(answer, end - start)
        if not data:
            raise StoreError("passing", f"the server broke off after 0 of {end - start} bytes")
        if length is None and answer.read(1):
            raise _lie(f"the server sends more than {end - start} bytes")
        return ObjectBytes(data, version)

    def _whole(
        self, key: str, answer: Answer, first: int, nbytes: int, pinned: Seen | None
    ) -> ObjectBytes:
        """All of a small file, of a server that sends nothing less."""
        most = _SMALL
        if first == 0:
            most = max(most, nbytes)
        length = length_of(answer.headers)
        if length is not None and length > most:
            raise self._no_ranges(key, "the server does not send parts of a file")
        data = _all(answer, most + 1 if length is None else length)
        if length is not None and len(data) < length:
            raise StoreError("passing", f"the server broke off after {len(data)} of {length} bytes")
        if len(data) > most:
            raise self._no_ranges(key, "the server does not send parts of a file")
        version = self.seen(key, len(data), answer.headers)
        if pinned is not None and version != pinned:
            raise StoreError("changed")
        return ObjectBytes(memoryview(data)[first : first + nbytes], version)

    def _no_ranges(self, key: str, why: str) -> StoreError:
        hint = how_to_get(self.locate(key))
        return StoreError("final", f"{why}, so that it can only be read as a whole", hint=hint)

    # -------------------------------------------------------------------- what kinds of it change

    def url(self, key: str) -> str:
        """The address to which a request for a file goes."""
        query = self._queries.get(key)
        return f"{self.root}{key}?{query}" if query else self.root + key

    def seen(self, key: str, size: int, headers: Headers) -> Seen:
        """The version of which an answer is."""
        return seen(size, headers)

    def noted(self, key: str, answer: Answer) -> None:
        """Take note of what an answer tells besides."""

    def refused(self, key: str, status: int, headers: Headers) -> StoreError:
        """The error for an answer that holds no bytes."""
        return refusal(status, headers, _HINTS)

    # ------------------------------------------------------------------------------------- names

    def address(self, key: str) -> str:
        scheme, _, rest = self.url(key).partition("://")
        return f"{scheme}://{self._userinfo}@{rest}" if self._userinfo else f"{scheme}://{rest}"

    @property
    def identity(self) -> Hashable:
        return self.root, self._userinfo, tuple(self._queries.items())

    def written(self, name: str) -> str:
        return quote(name, safe="/")

    def spoken(self, name: str) -> str:
        plain = unquote(name)
        return name if "/" in plain else plain


class StaleAddress(Exception):
    """The address to which the server had sent us is not good any more."""


def _lie(what: str) -> StoreError:
    return StoreError("passing", what, tries=LIES, hint="another server of the file may do better")


def _all(answer: Answer, nbytes: int) -> bytes:
    """As many bytes as there are of `nbytes`, and as came before the connection broke."""
    parts: list[bytes] = []
    left = nbytes
    with answer.until_it_breaks(parts):
        while left:
            data = answer.read(min(left, _AT_ONCE))
            if not data:
                break
            parts.append(data)
            left -= len(data)
    return b"".join(parts)
