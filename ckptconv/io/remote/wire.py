"""One request over HTTP, with its redirects: where it may lead, what it may tell whom, how long it
may take. What an answer says is the business of `causes`.

Every failure is a `StoreError`, with no word of an address in it but its host.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from functools import partial
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

import urllib3
from urllib3 import exceptions as errors
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from ckptconv import __version__
from ckptconv.io.remote.causes import Headers, length_of, not_connected
from ckptconv.io.remote.hosts import Reach, hosts_given, is_allowed, reach_of, reach_of_host
from ckptconv.io.remote.network import certificates, proxy_for, tls_of
from ckptconv.io.remote.store import StoreError
from ckptconv.io.remote.traffic import count
from ckptconv.support.errors import CheckpointError
from ckptconv.support.limits import in_force
from ckptconv.support.records import dataclass

CONNECT = 10.0
"""Seconds in which a host has to take a connection."""

LEAST = 30.0
"""Seconds that any request may take, redirects and all."""

SLOWEST = 50_000
"""Bytes of a body that have to come in each further second."""

# Only GET is sent, so it is the same whether a status keeps the method
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_MOST_HOPS = 6
_DRAINED = 64 << 10  # bytes of a body that are read only so that its connection can be used again
_PORTS = {"http": 80, "https": 443}
_SAFE = "/~!$&'()*+,;=:@%?[]"

Origin = tuple[str, str, int]
"""Scheme, host and port."""


@dataclass(frozen=True, slots=True)
class Credential:
    """What a request says to one origin, and to no other."""

    origin: Origin
    value: str = field(repr=False)

    def is_for(self, origin: Origin) -> bool:
        """Whether it may be told to an origin: its own, or the same host with encryption."""
        scheme, host, port = self.origin
        return origin == self.origin or (
            (scheme, port) == ("http", 80) and origin == ("https", host, 443)
        )


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes; `reach`: a server named it that reaches so near; None: the user."""

    url: str = field(repr=False)
    reach: Reach | None = None


@dataclass(slots=True)
class Answer:
    """The status and headers of an answer, and the body that comes. `hops` are the URLs and headers
    of the redirects that led to it, `target` where it came from.
    """

    status: int
    headers: Headers = field(repr=False)
    target: Target
    hops: Sequence[tuple[str, Headers]] = field(repr=False)
    _raw: urllib3.BaseHTTPResponse = field(repr=False)

    def read(self, nbytes: int) -> bytes:
        """As many bytes of the body; fewer only at its end."""
        return self._raw.read(nbytes, decode_content=False)

    @contextlib.contextmanager
    def until_it_breaks(self, came: Sequence[bytes]) -> Iterator[None]:
        """Within the block, a connection that breaks ends the body, if any of it `came`."""
        try:
            yield
        except (errors.HTTPError, OSError):
            if not came:
                raise
            self._raw.close()

    def leave(self) -> None:
        """Let the connection be used again, or close it where too much is still to come."""
        with contextlib.suppress(errors.HTTPError, OSError):
            length = length_of(self.headers)
            if length is not None and length <= _DRAINED:
                self._raw.drain_conn()
            elif not self._raw.closed:
                self._raw.close()
        self._raw.release_conn()


class Wire:
    """The connections of one store."""

    def __init__(self, credential: Credential | None = None) -> None:
        self._credential = credential
        self._allowed = hosts_given()
        self._seconds = min(LEAST, in_force().remote_seconds)
        self._lock = threading.Lock()
        # of each process: one that is forked cannot share the connections of its parent
        self._managers: dict[tuple[int, str | None, Reach | None], urllib3.PoolManager] = {}
        self._reached: dict[tuple[str, int], Reach] = {}
        self._tls: ssl.SSLContext | None = None
        self._has_answered = False

    @contextlib.contextmanager
    def asked(self, target: Target, headers: Headers, nbytes: int) -> Iterator[Answer]:
        """The answer to a GET, of which about `nbytes` are going to be read within the block."""
        watch = _Watch(self._seconds + nbytes / SLOWEST)
        host = urlsplit(target.url).hostname or ""
        try:
            with watch:
                answer = self._followed(target, headers)
                host = urlsplit(answer.target.url).hostname or host
                try:
                    yield answer
                    if watch.is_late:
                        raise self._too_slow(watch)
                    answer.leave()
                except BaseException:
                    answer.leave()
                    raise
        except CheckpointError:  # of the settings by which it is asked
            raise
        except (errors.HTTPError, OSError, ValueError, StoreError) as error:
            if watch.is_late:
                raise self._too_slow(watch) from None
            if isinstance(error, StoreError):
                raise
            raise self._failure(error, host, target.url.startswith("http:")) from None

    def _too_slow(self, watch: _Watch) -> StoreError:
        return StoreError(
            "passing", f"the server is too slow ({watch.seconds:.0f} s for one answer)"
        )

    # ------------------------------------------------------------------------------ redirects

    def _followed(self, target: Target, headers: Headers) -> Answer:
        hops: list[tuple[str, Headers]] = []
        while True:
            raw = self._one(target, headers)
            answer = Answer(raw.status, raw.headers, target, hops, raw)
            if raw.status not in _REDIRECTS:
                return answer
            try:
                following = self._redirected(answer)
                if following.url in (target.url, *(url for url, _ in hops)):
                    raise StoreError("final", "the server redirects in a circle")
                if len(hops) + 1 >= _MOST_HOPS:
                    raise StoreError("final", f"the server redirects more than {len(hops)} times")
            finally:
                answer.leave()
            hops.append((target.url, raw.headers))
            target = following
            count(requests=1)

    def _redirected(self, answer: Answer) -> Target:
        """Where an answer sends us, if it may."""
        text = answer.headers.get("Location", "")
        with contextlib.suppress(UnicodeError):  # headers are read as Latin-1, and are mostly UTF-8
            text = text.encode("latin-1").decode("utf-8")
        if not text:
            raise StoreError("final", f"the server redirects to nowhere (status {answer.status})")
        here = urlsplit(answer.target.url)
        try:
            there = urlsplit(urljoin(answer.target.url, quote(text.strip(), safe=_SAFE + "#")))
            scheme, host, port = _origin(there)
        except ValueError:
            raise StoreError("final", "the server redirects to what is not an address") from None
        if scheme not in _PORTS:
            what = f"the server redirects to {scheme}://, which is not followed"
            raise StoreError("final", what)
        if not host:
            raise StoreError("final", "the server redirects to nowhere")
        if here.scheme == "https" and scheme == "http":
            what = f"the server redirects to {host} without encryption, which is not followed"
            raise StoreError("final", what)
        netloc = there.netloc.rpartition("@")[2]  # a server gives us no password for another
        url = there._replace(scheme=scheme, netloc=netloc, fragment="").geturl()
        if (scheme, host, port) == _origin(here):
            return Target(url, answer.target.reach)
        return Target(url, self._reach(answer.target))

    def _reach(self, target: Target) -> Reach:
        """How near the address may be to which a target sends us."""
        _scheme, host, port = _origin(urlsplit(target.url))
        if proxy_for(target.url) is None:
            own = self._reached.get((host, port), Reach.EVERYWHERE)
        else:
            own = reach_of_host(host)
        nearest = Reach.MACHINE if target.reach is None else target.reach
        return min(own, nearest)

    # ----------------------------------------------------------------------------- one request

    def _one(self, target: Target, headers: Headers) -> urllib3.BaseHTTPResponse:
        origin = _origin(urlsplit(target.url))
        _scheme, host, port = origin
        said = {"User-Agent": f"ckptconv/{__version__}", "Accept-Encoding": "identity", **headers}
        if self._credential is not None and self._credential.is_for(origin):
            said["Authorization"] = self._credential.value
        reach = None if is_allowed(host, port, self._allowed) else target.reach
        if reach is not None:
            _check(reach_of_host(host), reach, host)
        manager = self._manager(proxy_for(target.url), reach)
        raw = manager.urlopen(
            "GET",
            target.url,
            headers=said,
            redirect=False,
            retries=False,
            preload_content=False,
            decode_content=False,
            timeout=urllib3.Timeout(connect=min(CONNECT, self._seconds), read=_watched().seconds),
        )
        self._has_answered = True
        return raw

    def _manager(self, proxy: str | None, reach: Reach | None) -> urllib3.PoolManager:
        with self._lock:
            key = os.getpid(), proxy, reach
            if key not in self._managers:
                self._managers[key] = self._opened(proxy, reach)
            return self._managers[key]

    def _opened(self, proxy: str | None, reach: Reach | None) -> urllib3.PoolManager:
        # as many connections to a host as requests are in flight
        options: dict[str, Any] = {"num_pools": 8, "maxsize": 16, "ssl_context": self._context()}
        if proxy is None:
            manager = urllib3.PoolManager(**options)
            manager.pool_classes_by_scheme = self._pools(reach)
            return manager
        found = urlsplit(proxy)
        if found.username is not None:
            pair = f"{unquote(found.username)}:{unquote(found.password or '')}"
            options["proxy_headers"] = urllib3.make_headers(proxy_basic_auth=pair)
        plain = found._replace(netloc=found.netloc.rpartition("@")[2]).geturl()
        manager = urllib3.ProxyManager(plain, **options)
        manager.pool_classes_by_scheme = self._pools(None)
        return manager

    def _pools(self, reach: Reach | None) -> dict[str, Any]:
        """Pools of connections that are checked before a word is said."""
        check = partial(self._checked, reach=reach)
        return {
            "http": partial(_pool, HTTPConnectionPool, partial(_Plain, check=check)),
            "https": partial(_pool, HTTPSConnectionPool, partial(_Encrypted, check=check)),
        }

    def _checked(
        self, connection: HTTPConnection, made: socket.socket, reach: Reach | None
    ) -> socket.socket:
        """A connection, if it leads no nearer than `reach`: whatever its name was said to be."""
        found = reach_of_peer(made)
        self._reached[connection.host.strip("[]").lower(), connection.port] = found
        if reach is not None:
            try:
                _check(found, reach, connection.host)
            except StoreError:
                made.close()
                raise
        return made

    def _context(self) -> ssl.SSLContext:
        """What certificates are trusted: those of the host, or of the file that is named."""
        if self._tls is None:
            found = certificates()
            self._tls = ssl.create_default_context() if found is None else tls_of(found.pem)
        return self._tls

    # -------------------------------------------------------------------------------- failures

    def _failure(self, error: Exception, host: str, is_plain: bool) -> StoreError:
        """What went wrong, in words without an address but the host's name."""
        told = not_connected(error, host, is_plain=not self._has_answered and is_plain)
        if self._has_answered:
            told.tries = None  # who never answered is likely to be misspelled
        return told


def reach_of_peer(made: socket.socket) -> Reach:
    """How near the other end of a connection is."""
    return reach_of(made.getpeername()[0])


def _check(found: Reach, reach: Reach, host: str) -> None:
    """Raise `StoreError` for an address that is nearer than a server may send us to."""
    if found > reach:
        raise StoreError(
            "final",
            f"the server redirects to {host}, which lies in a network of its own",
            hint=f"if that is right: --allow-hosts {host}",
        )


def basic(origin: Origin, user: str, password: str) -> Credential:
    """A name and a password, for one origin."""
    pair = base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
    return Credential(origin, f"Basic {pair}")


def origin_of(url: str) -> Origin:
    """The origin of a URL; `ValueError` where it is not one."""
    return _origin(urlsplit(url))


def _origin(url: Any) -> Origin:
    scheme = url.scheme.lower()
    return scheme, (url.hostname or "").lower(), url.port or _PORTS.get(scheme, 0)


# ----------------------------------------------------------------------------------- time limits

_LOCAL = threading.local()


class _Discreet(logging.Filter):
    """Keeps our requests out of urllib3's log, for their addresses may be signed."""

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(_LOCAL, "watch", None) is None


for _name in ("urllib3.connectionpool", "urllib3.connection", "urllib3.poolmanager"):
    logging.getLogger(_name).addFilter(_Discreet())


class _Watch:
    """Ends what its thread does on connections when the time is over: a server that sends a byte
    now and then keeps every timeout of a socket from coming.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_late = False
        self._is_over = False
        self._lock = threading.Lock()
        self._held: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        _LOCAL.watch = self
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        _LOCAL.watch = None
        with self._lock:
            self._is_over = True
        self._timer.cancel()

    def hold(self, held: socket.socket | None) -> None:
        """The connection that is used from now on."""
        with self._lock:
            self._held = held
            if self.is_late:
                self._shut()

    def _end(self) -> None:
        with self._lock:
            if not self._is_over:
                self.is_late = True
                self._shut()

    def _shut(self) -> None:
        if self._held is not None:
            with contextlib.suppress(OSError):  # it is closed already
                self._held.shutdown(socket.SHUT_RDWR)


def _watched() -> _Watch:
    found: _Watch = _LOCAL.watch
    return found


_Check = Callable[[Any, socket.socket], socket.socket]


class _Held:
    """A connection that is checked, and that the watch can end, whatever is made of its socket."""

    def __init__(self, *given: Any, check: _Check, **options: Any) -> None:
        super().__init__(*given, **options)
        self._check = check
        self._held: socket.socket | None = None

    def _new_conn(self) -> socket.socket:
        made = self._check(self, super()._new_conn())  # type: ignore[misc]
        self._held = made.dup()
        _watched().hold(self._held)
        return made

    def putrequest(self, *request: Any, **options: Any) -> None:
        _watched().hold(self._held)
        super().putrequest(*request, **options)  # type: ignore[misc]

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        if self._held is not None:
            self._held.close()
            self._held = None


class _Plain(_Held, HTTPConnection): ...


class _Encrypted(_Held, HTTPSConnection): ...


def _pool(kind: Any, connection: Any, *given: Any, **options: Any) -> Any:
    made = kind(*given, **options)
    made.ConnectionCls = connection
    return made
