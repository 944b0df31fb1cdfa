"""A web server in this process that keeps the rules of ranges, tells what it was asked and how much
it sent, and breaks the rules where it is told to, by plain data::

    with HttpServer({"/a.pt": content}) as server:
        server.faults["/a.pt"] = [Fault("reset", at=1000), Fault("status", status=503, times=2)]

Its objects may be larger than the memory (`Sparse`). `scripted_server` is for ways of answering
that are code.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import Literal
from urllib.parse import unquote, urlsplit

from helpers.scripted_server import Asked, Web

STEP = 1 << 18
_BEGINNING = 1_700_000_000  # when the first content of each path was written


@dataclass(frozen=True)
class Sparse:
    """An object of which only some bytes are not zero: the pieces, by where they begin."""

    size: int
    pieces: Mapping[int, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> bytes:
        first, end, _ = span.indices(self.size)
        return self.read(first, end)

    def read(self, first: int, end: int) -> bytes:
        """Its bytes from `first` to before `end`."""
        read = bytearray(end - first)
        for offset, piece in self.pieces.items():
            begin, stop = max(first, offset), min(end, offset + len(piece))
            if begin < stop:
                read[begin - first : stop - first] = piece[begin - offset : stop - offset]
        return bytes(read)


Content = bytes | Sparse

Kind = Literal[
    "status",  # another status, with `headers` and `body`
    "redirect",  # `status` (302) and a Location: `to`, and where that is empty, the path itself
    "reset",  # RST after `at` bytes of the body
    "short",  # closed after `at` bytes of the body
    "closed",  # closed before any answer
    "long",  # `extra` bytes behind the body, which Content-Length counts
    "long unsaid",  # the same without Content-Length, the connection is closed behind them
    "lengthless",  # the right bytes without Content-Length
    "chunked",  # the right bytes in chunks
    "whole",  # 200 and everything instead of a range
    "headers",  # the right bytes with other `headers` (a Content-Range: of ranges); None: without
    "changing tag",  # another ETag each time
    "replaced",  # the object is `content` from now on
    "mixed",  # from `at` bytes of the body on, the bytes of `content`, as if nothing had happened
    "slow",  # `step` bytes of the body every `seconds`
    "silent",  # nothing for `seconds`, then closed
    "gzip",  # compressed, though nobody asked for that
    "endless header",  # headers until the client leaves
]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong for the next `times` requests of a path; None is for ever.

    `methods` are those that it befalls; `skip` requests are answered well before it.
    """

    kind: Kind
    times: int | None = 1
    skip: int = 0
    methods: Sequence[str] = ("GET", "HEAD")
    status: int = 0
    headers: Mapping[str, str | None] = field(default_factory=dict)
    body: bytes = b""
    to: str = ""
    at: int = 0
    extra: int = 10
    step: int = 1
    seconds: float = 0.05
    content: Content = b""


def wrong_range(value: str | None, times: int | None = None) -> Fault:
    """A Content-Range that says something else, or nothing."""
    return Fault("headers", times, headers={"Content-Range": value})


def wrong_tag(value: str | None, times: int | None = None) -> Fault:
    """An ETag that is another, weak, or missing."""
    return Fault("headers", times, headers={"ETag": value})


def wait(seconds: float | str, times: int | None = 1, status: int = 429) -> Fault:
    """A server that wants to be left alone for seconds, or until a date."""
    return Fault("status", times, status=status, headers={"Retry-After": str(seconds)})


def hub_limit(seconds: int, times: int | None = 1) -> Fault:
    """The same as the Hugging Face Hub says it."""
    limit = f'"api";r=0;t={seconds}'
    return Fault("status", times, status=429, headers={"RateLimit": limit})


@dataclass(slots=True)
class Request:
    """A request as it came, and what was answered: the bytes of the body that were sent."""

    method: str
    path: str
    headers: Mapping[str, str]
    range: str | None
    status: int = 0
    sent: int = 0


def path_of(raw: str) -> str:
    """The path that a request asks for, its percent signs read; a slash that was written ``%2F``
    stays apart from others.
    """
    segments = [unquote(segment) for segment in urlsplit(raw).path.split("/")]
    return "/".join(name.replace("%2F", "%252F").replace("/", "%2F") for name in segments)


def span_of(wanted: str | None, size: int) -> tuple[int, int] | None:
    """Where one range of an object begins and ends; None for all of it, an empty one cannot be
    satisfied.
    """
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
    if found is None or found[1] == found[2] == "":
        return None
    if not found[1]:
        return max(size - int(found[2]), 0), size
    first, end = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
    if found[2] and int(found[2]) < first:
        return None
    return first, max(first, end)


@dataclass
class Answer:
    """What is going to be sent: the body is the span of the content."""

    status: int
    headers: dict[str, str]
    content: Content
    span: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """How long the body is."""
        return self.span[1] - self.span[0]

    def body(self, step: int = STEP) -> Iterator[bytes]:
        """The body by pieces."""
        for first in range(*self.span, step):
            end = min(first + step, self.span[1])
            yield self.content[first:end]


class HttpServer(Web):
    """Objects by path (which begins with a slash), the faults of paths (``*`` is every path), and
    the requests that were made. It has the ways of a `Web` too, which are not counted in bytes.
    """

    def __init__(self, objects: Mapping[str, Content] | None = None, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.objects: dict[str, Content] = dict(objects or {})
        self.faults: dict[str, list[Fault]] = {}
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._versions: dict[str, list[tuple[Content, str]]] = {}

    def __exit__(self, *error: object) -> None:
        self._left.set()  # who is slow or silent stops
        super().__exit__(*error)

    @property
    def sent(self) -> int:
        """The bytes of all bodies that were sent."""
        with self._lock:
            return sum(request.sent for request in self.requests)

    def forget(self) -> None:
        """Begin to count anew."""
        with self._lock:
            self.requests.clear()

    def tag(self, path: str) -> str:
        """The ETag of what a path has now."""
        return self._version(path)[0]

    def _version(self, path: str) -> tuple[str, str]:
        """ETag and Last-Modified."""
        content = self.objects[path]
        with self._lock:
            known = self._versions.setdefault(path, [])
            if not known or known[-1][0] is not content:
                known.append((content, content_tag(content)))
            return known[-1][1], formatdate(_BEGINNING + len(known), usegmt=True)

    def answer(self, asked: Asked) -> None:
        """Answer one request, well or badly."""
        headers = {name.lower(): value for name, value in asked.headers.items()}
        request = Request(asked.command, asked.path, headers, headers.get("range"))
        with self._lock:
            self.requests.append(request)
            self.ports.append(asked.client_address[1])
            self.asked.append((asked.path, asked.headers))
        self._left.wait(self.latency)
        path = path_of(asked.path)
        way = self.ways.get(asked.path.partition("?")[0][1:])
        if (fault := self._fault(path, asked.command)) is not None:
            _FAULTS[fault.kind](self, asked, request, path, fault)
        elif way is not None or (path not in self.objects and self.fallback is not None):
            (way or self.fallback)(asked)
        else:
            self._send(asked, request, self._right(path, request))

    def _fault(self, path: str, method: str) -> Fault | None:
        """The fault that this request meets, which is then met once less."""
        with self._lock:
            waiting = self.faults.get(path) or self.faults.get("*") or []
            for place, fault in enumerate(waiting):
                if method not in fault.methods:
                    continue
                if fault.skip:
                    waiting[place] = replace(fault, skip=fault.skip - 1)
                    return None
                if fault.times is not None:
                    waiting[place] = replace(fault, times=fault.times - 1)
                    if fault.times <= 1:
                        del waiting[place]
                return fault
        return None

    def _right(self, path: str, request: Request) -> Answer:
        """The answer by the rules."""
        if path not in self.objects:
            return Answer(404, {}, b"", (0, 0))
        content = self.objects[path]
        tag, date = self._version(path)
        headers = {"ETag": tag, "Last-Modified": date, "Accept-Ranges": "bytes"}
        headers["Content-Type"] = "application/octet-stream"
        wanted = request.headers.get("if-match", "*")
        if wanted != "*" and tag not in re.split(r"\s*,\s*", wanted):
            return Answer(412, headers, b"", (0, 0))
        span = span_of(request.range, len(content)) if request.method == "GET" else None
        if span is None:
            return Answer(200, headers, content, (0, len(content)))
        if span[0] >= span[1]:
            return Answer(416, {"Content-Range": f"bytes */{len(content)}"}, b"", (0, 0))
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{len(content)}"
        return Answer(206, headers, content, span)

    def _head(self, asked: Asked, request: Request, answer: Answer, **other: str | None) -> None:
        """Status and headers; of `other`, None takes one away."""
        request.status = answer.status
        headers: dict[str, str | None] = {"Content-Length": str(answer.nbytes), **answer.headers}
        headers |= {name.replace("_", "-"): value for name, value in other.items()}
        asked.send_response(answer.status)
        for name, value in headers.items():
            if value is not None:
                asked.send_header(name, value)
        asked.end_headers()

    def _body(self, asked: Asked, request: Request, pieces: Iterator[bytes]) -> None:
        if asked.command == "HEAD":
            return
        for piece in pieces:
            with self._lock:  # before it is sent: who has read all may count at once
                request.sent += len(piece)
            asked.wfile.write(piece)

    def _send(self, asked: Asked, request: Request, answer: Answer, **other: str | None) -> None:
        self._head(asked, request, answer, **other)
        self._body(asked, request, answer.body())

    def _status(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        said = {name: value for name, value in fault.headers.items() if value is not None}
        self._send(asked, request, Answer(fault.status, said, fault.body, (0, len(fault.body))))

    def _redirect(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        headers = {"Location": fault.to or asked.path}
        self._send(asked, request, Answer(fault.status or 302, headers, b"", (0, 0)))

    def _cut(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        answer = self._right(path, request)
        self._head(asked, request, answer)
        first, end = answer.span
        part = replace(answer, span=(first, min(first + fault.at, end)))
        self._body(asked, request, part.body())
        _break_off(asked, reset=fault.kind == "reset")

    def _closed(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        _break_off(asked, reset=False)

    def _long(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        answer = self._right(path, request)
        unsaid = fault.kind == "long unsaid"
        length = None if unsaid else str(answer.nbytes + fault.extra)
        self._head(asked, request, answer, Content_Length=length)
        self._body(asked, request, answer.body())
        self._body(asked, request, iter([b"\xee" * fault.extra]))
        asked.close_connection |= unsaid

    def _lengthless(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        self._send(asked, request, self._right(path, request), Content_Length=None)
        asked.close_connection = True

    def _chunked(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        answer = self._right(path, request)
        self._head(asked, request, answer, Content_Length=None, Transfer_Encoding="chunked")
        for piece in answer.body(1 << 16):
            asked.wfile.write(f"{len(piece):x}\r\n".encode())
            self._body(asked, request, iter([piece]))
            asked.wfile.write(b"\r\n")
        asked.wfile.write(b"0\r\n\r\n")

    def _whole(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        self._send(asked, request, self._right(path, replace(request, range=None)))

    def _headers(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        answer, said = self._right(path, request), dict(fault.headers)
        if "Content-Range" not in answer.headers:
            said.pop("Content-Range", None)
        self._send(asked, request, answer, **said)

    def _changing(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        unasked = replace(request, headers={})  # whoever says If-Match
        self._send(asked, request, self._right(path, unasked), ETag=f'"{len(self.requests)}"')

    def _replaced(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        self.objects[path] = fault.content
        self._send(asked, request, self._right(path, request))

    def _mixed(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        answer = self._right(path, request)
        self._head(asked, request, answer)
        turn = min(answer.span[0] + fault.at, answer.span[1])
        self._body(asked, request, replace(answer, span=(answer.span[0], turn)).body())
        late = replace(answer, content=fault.content, span=(turn, answer.span[1]))
        self.objects[path] = fault.content  # before the client has all of it, and asks again
        self._body(asked, request, late.body())

    def _slow(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        answer = self._right(path, request)
        self._head(asked, request, answer)
        for piece in answer.body(fault.step):
            if self._left.wait(fault.seconds):
                return _break_off(asked, reset=True)
            self._body(asked, request, iter([piece]))
        return None

    def _silent(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        self._left.wait(fault.seconds)
        _break_off(asked, reset=False)

    def _gzip(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        answer = self._right(path, request)
        packed = gzip.compress(b"".join(answer.body()), mtime=0)
        packed_answer = replace(answer, content=packed, span=(0, len(packed)))
        self._send(asked, request, packed_answer, Content_Encoding="gzip")

    def _endless(self, asked: Asked, request: Request, path: str, fault: Fault) -> None:
        asked.wfile.write(b"HTTP/1.1 206 Partial Content\r\n")
        line = b"X-Header: " + b"a" * 1000 + b"\r\n"
        while not self._left.is_set():
            asked.wfile.write(line * 16)
        _break_off(asked, reset=True)


_FAULTS: Mapping[Kind, Callable[[HttpServer, Asked, Request, str, Fault], None]] = {
    "status": HttpServer._status,
    "redirect": HttpServer._redirect,
    "reset": HttpServer._cut,
    "short": HttpServer._cut,
    "closed": HttpServer._closed,
    "long": HttpServer._long,
    "long unsaid": HttpServer._long,
    "lengthless": HttpServer._lengthless,
    "chunked": HttpServer._chunked,
    "whole": HttpServer._whole,
    "headers": HttpServer._headers,
    "changing tag": HttpServer._changing,
    "replaced": HttpServer._replaced,
    "mixed": HttpServer._mixed,
    "slow": HttpServer._slow,
    "silent": HttpServer._silent,
    "gzip": HttpServer._gzip,
    "endless header": HttpServer._endless,
}


def content_tag(content: Content) -> str:
    """The ETag of a content."""
    if isinstance(content, bytes):
        return f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    said = hashlib.sha256(str(content.size).encode())
    for offset in sorted(content.pieces):
        said.update(f",{offset},".encode() + content.pieces[offset])
    return f'"{said.hexdigest()[:16]}"'


def _break_off(asked: Asked, *, reset: bool) -> None:
    """End the connection, with RST or with FIN."""
    asked.close_connection = True
    if reset:
        asked.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asked.wfile.close()
        asked.rfile.close()  # the last that holds the socket
        asked.connection.close()
    else:
        asked.connection.shutdown(socket.SHUT_RDWR)
