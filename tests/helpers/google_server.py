"""The XML API of Google Cloud Storage, by its reference, as far as obstore writes by it: what
fake-gcs-server does not offer. Objects have generations; uploads of parts, conditions and copies.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_MARK = "x-goog-meta-"


@dataclass(frozen=True)
class Object:
    """One version of an object."""

    data: bytes
    generation: int
    meta: Mapping[str, str]
    made: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @property
    def tag(self) -> str:
        return f'"tag-{self.generation}"'


@dataclass
class Parts:
    """An upload that is not complete."""

    key: str
    meta: Mapping[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


class GoogleServer:
    """One bucket, called `bucket`; each request is noted in `asked`."""

    scheme = "gs"
    bucket = "bucket"

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.uploads: dict[str, Parts] = {}
        self.asked: list[tuple[str, str]] = []
        self.numbers = itertools.count(1000)
        self.lock = threading.Lock()
        outer = self

        class Handler(_Handler):
            server_of = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.environment = {"STORAGE_EMULATOR_HOST": self.endpoint}
        self.url = f"gs://{self.bucket}"

    def put(self, key: str, data: bytes, meta: Mapping[str, str] | None = None) -> Object:
        """A new version of an object."""
        made = self.objects[key] = Object(data, next(self.numbers), dict(meta or {}))
        return made

    def __enter__(self) -> GoogleServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: GoogleServer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def _said(self) -> tuple[str, dict[str, str], bytes]:
        """The key, what stands after the question mark, and the body."""
        split = urlsplit(self.path)
        bucket, _, key = unquote(split.path).lstrip("/").partition("/")
        query = {name: each[0] for name, each in parse_qs(split.query, True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server_of.asked.append((self.command, f"{key}?{split.query}"))
        self._is_right = bucket == self.server_of.bucket
        return key, query, body

    def _say(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._say(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _meta(self) -> dict[str, str]:
        return {k.lower(): v for k, v in self.headers.items() if k.lower().startswith(_MARK)}

    def _is_refused(self, key: str) -> bool:
        """Whether a condition forbids a new version of an object."""
        wanted = self.headers.get("x-goog-if-generation-match")
        held = self.server_of.objects.get(key)
        return wanted is not None and int(wanted) != (held.generation if held else 0)

    def _made(self, key: str, data: bytes, meta: Mapping[str, str], body: bytes = b"") -> None:
        made = self.server_of.put(key, data, meta)
        self._say(200, body, ETag=made.tag, x_goog_generation=made.generation)

    def do_PUT(self) -> None:
        key, query, body = self._said()
        server = self.server_of
        with server.lock:
            if not self._is_right:
                return self._refuse(404, "NoSuchBucket")
            if "uploadId" in query:
                if query["uploadId"] not in server.uploads:
                    return self._refuse(404, "NoSuchUpload")
                server.uploads[query["uploadId"]].parts[int(query["partNumber"])] = body
                return self._say(200, ETag=f'"part-{query["partNumber"]}"')
            if self._is_refused(key):
                return self._refuse(412, "PreconditionFailed")
            if (named := self.headers.get("x-goog-copy-source")) is None:
                return self._made(key, body, self._meta())
            held = server.objects.get(unquote(named).lstrip("/").partition("/")[2])
            if held is None:
                return self._refuse(404, "NoSuchKey")
            told = b"<CopyObjectResult></CopyObjectResult>"
            return self._made(key, held.data, held.meta, told)

    def do_POST(self) -> None:
        key, query, _ = self._said()
        server = self.server_of
        with server.lock:
            if not self._is_right:
                return self._refuse(404, "NoSuchBucket")
            if "uploads" in query:
                number = f"upload-{next(server.numbers)}"
                server.uploads[number] = Parts(key, self._meta())
                told = (
                    f"<InitiateMultipartUploadResult><Bucket>{server.bucket}</Bucket>"
                    f"<Key>{escape(key)}</Key><UploadId>{number}</UploadId>"
                    "</InitiateMultipartUploadResult>"
                )
                return self._say(200, told.encode())
            held = server.uploads.pop(query.get("uploadId", ""), None)
            if held is None:
                return self._refuse(404, "NoSuchUpload")
            data = b"".join(part for _, part in sorted(held.parts.items()))
            told = (
                f"<CompleteMultipartUploadResult><Bucket>{server.bucket}</Bucket>"
                f'<Key>{escape(key)}</Key><ETag>"x"</ETag></CompleteMultipartUploadResult>'
            )
            return self._made(key, data, held.meta, told.encode())

    def do_DELETE(self) -> None:
        key, query, _ = self._said()
        server = self.server_of
        with server.lock:
            held = server.uploads if "uploadId" in query else server.objects
            if held.pop(query.get("uploadId", key), None) is None:
                return self._refuse(404, "NoSuchKey")
            return self._say(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        key, query, _ = self._said()
        with self.server_of.lock:
            held = self.server_of.objects.get(key)
            listed = self._listed(query) if not key else b""
        if not self._is_right:
            return self._refuse(404, "NoSuchBucket")
        if not key:
            return self._say(200, listed)
        if held is None or query.get("generation", str(held.generation)) != str(held.generation):
            return self._refuse(404, "NoSuchKey")
        told = {
            "ETag": held.tag,
            "Last_Modified": format_datetime(held.made, usegmt=True),
            "x_goog_generation": held.generation,
            **{name.replace("-", "_"): value for name, value in held.meta.items()},
        }
        size, data = len(held.data), held.data
        if (asked := self.headers.get("Range")) is None:
            return self._say(200, data, **told, Content_Length=size)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        if int(first) >= size:
            return self._refuse(416, "InvalidRange")
        data = data[int(first) : int(last) + 1]
        where = f"bytes {first}-{int(first) + len(data) - 1}/{size}"
        return self._say(206, data, **told, Content_Range=where)

    def _listed(self, query: Mapping[str, str]) -> bytes:
        prefix, divider = query.get("prefix", ""), query.get("delimiter", "")
        items, folders = [], set()
        for key, held in sorted(self.server_of.objects.items()):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if divider and divider in rest:
                folders.add(prefix + rest.partition(divider)[0] + divider)
                continue
            items.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(held.data)}</Size>"
                f"<LastModified>{held.made.isoformat()}</LastModified>"
                f"<ETag>{escape(held.tag)}</ETag></Contents>"
            )
        items += [
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        ]
        return f"<ListBucketResult>{''.join(items)}</ListBucketResult>".encode()
