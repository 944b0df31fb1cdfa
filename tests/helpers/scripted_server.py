"""A web server in this process, of which each path can be told how to answer: by the rules, or in
any other way.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

Way = Callable[["Asked"], None]
"""How a path answers."""


def tag_of(content: bytes) -> str:
    """The ETag of a file."""
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'


class Asked(BaseHTTPRequestHandler):
    """One request, and the means to answer it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Scripted

    def do_GET(self) -> None:
        self.server.web.answer(self)

    do_HEAD = do_POST = do_PUT = do_GET

    def body(self) -> bytes:
        """What was sent with the request."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def log_message(self, *_: object) -> None:
        pass

    @property
    def range(self) -> tuple[int, int] | None:
        """Where the bytes begin and end that are asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return None if found is None else (int(found[1]), int(found[2]) + 1)

    def say(self, status: int, body: bytes = b"", **headers: object) -> None:
        """An answer; a header is named with underscores, None leaves it out."""
        said: dict[str, object] = {"Content-Length": len(body)}
        said.update((name.replace("_", "-"), value) for name, value in headers.items())
        self.send_response(status)
        for name, value in said.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def serve(self, content: bytes, **headers: object) -> None:
        """A file, by the rules."""
        told = headers if "ETag" in headers else {"ETag": tag_of(content), **headers}
        if (wanted := self.headers.get("If-Match")) and told["ETag"] != wanted:
            return self.say(412)
        if self.range is None:
            return self.say(200, content, **told)
        first, last = self.range
        if first >= len(content):
            return self.say(416, Content_Range=f"bytes */{len(content)}", **told)
        body = content[first:last]
        placed = f"bytes {first}-{first + len(body) - 1}/{len(content)}"
        return self.say(206, body, **{"Content_Range": placed, **told})

    def move(self, where: str, status: int = 302, **headers: object) -> None:
        """Send the client elsewhere."""
        self.say(status, Location=where, **headers)

    def break_off(self) -> None:
        """Close the connection."""
        self.close_connection = True
        self.connection.close()


class Scripted(ThreadingHTTPServer):
    """The socket of a `Web`."""

    daemon_threads = True
    request_queue_size = 64
    web: Web

    def handle_error(self, *_: Any) -> None:
        """Clients that leave are not told of."""


@dataclass
class Web:
    """The files of a server by path, the paths that answer in ways of their own, and the requests
    that were made: paths with queries, and headers, and the ports that they came from.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    ways: dict[str, Way] = field(default_factory=dict)
    asked: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    latency: float = 0.0
    host: str = "127.0.0.1"
    context: ssl.SSLContext | None = None
    fallback: Way | None = None

    def __enter__(self) -> Web:
        self._server = Scripted((self.host, 0), Asked)
        self._server.web = self
        if self.context is not None:
            self._server.socket = self.context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        """Its port."""
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        """Its address, without a slash at the end."""
        return f"{'http' if self.context is None else 'https'}://{self.host}:{self.port}"

    def at(self, path: str) -> str:
        """The address of a path."""
        return f"{self.url}/{quote(path)}"

    def answer(self, asked: Asked) -> None:
        """Answer by the way of the path."""
        self.asked.append((asked.path, asked.headers))
        self.ports.append(asked.client_address[1])
        time.sleep(self.latency)
        path = asked.path.partition("?")[0][1:]
        if (way := self.ways.get(path)) is not None:
            way(asked)
        elif (content := self.files.get(path)) is not None:
            asked.serve(content)
        elif self.fallback is not None:
            self.fallback(asked)
        else:
            asked.say(404)
