"""The web server that other tests rely on keeps the rules, and breaks each as it is told to, seen
on the wire.
"""

from __future__ import annotations

import gzip
import http.client
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from helpers.certificates import certificate, serving
from helpers.conformance import pattern
from helpers.http_server import (
    Fault,
    HttpServer,
    Sparse,
    hub_limit,
    path_of,
    span_of,
    wait,
    wrong_range,
    wrong_tag,
)

CONTENT = pattern(300_000)
OTHER = bytes(300_000)


@pytest.fixture
def server():
    with HttpServer({"/a.pt": CONTENT}) as served:
        yield served


def ask(server, path="/a.pt", span="bytes=1000-1999", method="GET", **headers):
    """Status, headers and body of one request; the body may end too soon."""
    with closing(http.client.HTTPConnection(server.host, server.port, timeout=5)) as connection:
        said = {"Range": span} if span else {}
        connection.request(method, path, headers={**said, **headers})
        answer = connection.getresponse()
        try:
            body = answer.read()
        except http.client.IncompleteRead as error:
            body = error.partial
        return answer.status, answer.headers, body


def on_the_wire(server, path="/a.pt", span="bytes=1000-1999") -> bytes:
    """All that comes for one request, up to the end of the connection."""
    with socket.create_connection((server.host, server.port), timeout=5) as wire:
        asked = f"GET {path} HTTP/1.1\r\nHost: a\r\nRange: {span}\r\nConnection: close\r\n\r\n"
        wire.sendall(asked.encode())
        read = b""
        while more := wire.recv(1 << 16):
            read += more
    return read


@pytest.mark.parametrize(
    ("span", "status", "first", "end"),
    [
        (None, 200, 0, 300_000),
        ("bytes=0-0", 206, 0, 1),
        ("bytes=5-14", 206, 5, 15),
        ("bytes=299999-", 206, 299_999, 300_000),
        ("bytes=299990-400000", 206, 299_990, 300_000),
        ("bytes=-7", 206, 299_993, 300_000),
        ("bytes=-900000", 206, 0, 300_000),
        ("bytes=9-5", 200, 0, 300_000),
        ("bytes=0-1,5-6", 200, 0, 300_000),
        ("bytes=300000-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
    ],
)
def test_ranges(server, span, status, first, end):
    told, headers, body = ask(server, span=span)
    assert (told, body) == (status, CONTENT[first:end])
    placed = {206: f"bytes {first}-{end - 1}/300000", 416: "bytes */300000"}
    assert headers["Content-Range"] == placed.get(status)
    assert server.sent == len(body)


def test_no_range_of_an_empty_object_can_be_satisfied(server):
    server.objects["/a.pt"] = b""
    assert ask(server, span=None)[0] == 200
    assert ask(server, span="bytes=-5")[0] == ask(server, span="bytes=0-")[0] == 416


def test_a_head_has_no_body_and_knows_the_size(server):
    status, headers, body = ask(server, method="HEAD", span=None)
    assert (status, headers["Content-Length"], body) == (200, "300000", b"")
    assert headers["Accept-Ranges"] == "bytes" and "GMT" in headers["Last-Modified"]
    assert server.sent == 0


def test_a_condition_is_heeded(server):
    tag = ask(server)[1]["ETag"]
    assert tag == server.tag("/a.pt") and tag[0] == tag[-1] == '"'
    assert [ask(server, **{"If-Match": said})[0] for said in (tag, "*", f'"0", {tag}')] == [206] * 3
    assert ask(server, **{"If-Match": f"W/{tag}"})[0] == 412
    before = ask(server)[1]["Last-Modified"]
    server.objects["/a.pt"] = OTHER
    assert ask(server, **{"If-Match": tag})[0] == 412
    assert ask(server)[1]["Last-Modified"] > before


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("/a%20b/%C3%A9.pt?x=1", "/a b/é.pt"),
        ("/a%2Fb.pt", "/a%2Fb.pt"),
        ("/a/b.pt", "/a/b.pt"),
        ("/a%252Fb.pt", "/a%252Fb.pt"),
        ("/100%25.pt", "/100%.pt"),
    ],
)
def test_names(raw, path, server):
    server.objects[path] = b"this one"
    assert path_of(raw) == path
    assert ask(server, raw, span=None)[2] == b"this one"


def test_a_sparse_object_needs_no_room(server):
    size = 40 << 30
    server.objects["/big"] = Sparse(size, {size - 4: b"tail", 10: b"head"})
    assert ask(server, "/big", "bytes=-6")[2] == b"\0\0tail"
    assert ask(server, "/big", "bytes=8-15")[2] == b"\0\0head\0\0"
    status, headers, body = ask(server, "/big", f"bytes={size // 2}-{size // 2 + 3_000_000}")
    assert (status, body) == (206, bytes(3_000_001))
    assert headers["Content-Range"].endswith(f"/{size}")
    assert int(ask(server, "/big", None, "HEAD")[1]["Content-Length"]) == size


def test_requests_are_counted_and_connections_kept(server):
    with closing(http.client.HTTPConnection(server.host, server.port)) as connection:
        for first in range(5):
            connection.request("GET", "/a.pt?q", headers={"Range": f"bytes={first}-{first + 9}"})
            assert connection.getresponse().read() == CONTENT[first : first + 10]
    assert [(r.method, r.path, r.status, r.sent) for r in server.requests] == [
        ("GET", "/a.pt?q", 206, 10)
    ] * 5
    assert server.requests[2].range == server.requests[2].headers["range"] == "bytes=2-11"
    assert len(set(server.ports)) == 1
    server.forget()
    assert server.sent == 0
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: ask(server), range(40)))
    assert len(server.requests) == 40 and server.sent == 40_000


def test_latency_is_added(server):
    server.latency = 0.1
    begin = time.monotonic()
    ask(server)
    assert time.monotonic() - begin > 0.1


@pytest.mark.parametrize("status", [401, 403, 404, 410, 429, 500, 503])
def test_a_status(server, status):
    server.faults["/a.pt"] = [Fault("status", status=status, times=2, body=b"no")]
    assert [ask(server)[0] for _ in range(3)] == [status, status, 206]


def test_asking_to_wait(server):
    date = "Fri, 31 Dec 1999 23:59:59 GMT"
    server.faults["/a.pt"] = [wait(2), wait(date, status=503), hub_limit(3)]
    first, second, third = (ask(server) for _ in range(3))
    assert (first[0], first[1]["Retry-After"]) == (429, "2")
    assert (second[0], second[1]["Retry-After"]) == (503, date)
    assert (third[0], third[1]["RateLimit"]) == (429, '"api";r=0;t=3')


def test_faults_are_met_in_order_by_the_methods_and_paths_they_are_for(server):
    server.objects["/b"] = b"b"
    server.faults["*"] = [Fault("status", None, status=500, methods=("HEAD",), skip=1)]
    server.faults["/a.pt"] = [Fault("status", status=503, methods=("GET",))]
    assert [ask(server, "/b", None, "HEAD")[0] for _ in range(3)] == [200, 500, 500]
    assert [ask(server)[0], ask(server)[0], ask(server, "/b", None)[0]] == [503, 206, 200]


def test_a_connection_is_reset_in_the_middle_of_a_body(server):
    server.faults["/a.pt"] = [Fault("reset", at=100)]
    with pytest.raises(ConnectionResetError):
        on_the_wire(server)
    assert server.sent == 100 and server.requests[0].status == 206
    assert ask(server)[2] == CONTENT[1000:2000]


def test_a_body_that_is_too_short(server):
    server.faults["/a.pt"] = [Fault("short", at=100)]
    head, _, body = on_the_wire(server).partition(b"\r\n\r\n")
    assert b"Content-Length: 1000" in head and body == CONTENT[1000:1100]


@pytest.mark.parametrize(("kind", "length"), [("long", "1010"), ("long unsaid", None)])
def test_a_body_that_is_too_long(server, kind, length):
    server.faults["/a.pt"] = [Fault(kind)]
    _, headers, body = ask(server)
    assert headers["Content-Length"] == length
    assert headers["Content-Range"] == "bytes 1000-1999/300000"
    assert body == CONTENT[1000:2000] + b"\xee" * 10


def test_bodies_without_a_length(server):
    server.faults["/a.pt"] = [Fault("lengthless"), Fault("chunked")]
    for said in (None, "chunked"):
        status, headers, body = ask(server)
        assert (status, body) == (206, CONTENT[1000:2000])
        assert (headers["Content-Length"], headers["Transfer-Encoding"]) == (None, said)


def test_everything_instead_of_a_range(server):
    server.faults["/a.pt"] = [Fault("whole")]
    status, headers, body = ask(server)
    assert (status, headers["Content-Range"], body) == (200, None, CONTENT)


@pytest.mark.parametrize("value", ["bytes 0-999/300000", "bytes 1000-1999/7", "garbage", None])
def test_a_wrong_range_is_told(server, value):
    server.faults["/a.pt"] = [wrong_range(value)]
    status, headers, body = ask(server)
    assert (status, headers["Content-Range"], body) == (206, value, CONTENT[1000:2000])
    assert "Content-Range" not in ask(server, span=None)[1]


@pytest.mark.parametrize("value", ['"other"', 'W/"weak"', None])
def test_a_wrong_tag_is_told(server, value):
    server.faults["/a.pt"] = [wrong_tag(value)]
    assert ask(server)[1]["ETag"] == value


def test_a_tag_that_changes(server):
    server.faults["/a.pt"] = [Fault("changing tag", None)]
    tags = [ask(server, **{"If-Match": '"1"'})[1]["ETag"] for _ in range(3)]
    assert len(set(tags)) == 3


def test_content_that_is_replaced(server):
    server.faults["/a.pt"] = [Fault("replaced", skip=1, content=OTHER)]
    tag = server.tag("/a.pt")
    said = {"If-Match": tag}
    assert [ask(server, **said)[0] for _ in range(3)] == [206, 412, 412]
    assert ask(server)[2] == OTHER[1000:2000]


def test_content_that_is_replaced_in_the_middle_of_a_body(server):
    server.faults["/a.pt"] = [Fault("mixed", at=400, content=OTHER)]
    tag = server.tag("/a.pt")
    status, headers, body = ask(server, **{"If-Match": tag})
    assert (status, headers["ETag"]) == (206, tag)
    assert body == CONTENT[1000:1400] + OTHER[1400:2000]
    assert ask(server, **{"If-Match": tag})[0] == 412


@pytest.mark.parametrize(
    "to",
    ["/b", "http://169.254.169.254/latest", "file:///etc/passwd", "ftp://a/b", "http://other:1/x"],
)
def test_a_redirect(server, to):
    server.faults["/a.pt"] = [Fault("redirect", to=to), Fault("redirect", status=308, to=to)]
    assert [(told[0], told[1]["Location"]) for told in (ask(server), ask(server))] == [
        (302, to),
        (308, to),
    ]


def test_redirects_to_itself(server):
    server.faults["/a.pt"] = [Fault("redirect", times=30)]
    assert [(told[0], told[1]["Location"]) for told in (ask(server) for _ in range(30))] == [
        (302, "/a.pt")
    ] * 30
    assert ask(server)[0] == 206


def test_a_body_that_comes_byte_by_byte(server):
    server.faults["/a.pt"] = [Fault("slow", step=250, seconds=0.05)]
    begin = time.monotonic()
    assert ask(server)[2] == CONTENT[1000:2000]
    assert time.monotonic() - begin > 0.2


def test_headers_that_never_come_and_a_server_that_stops_soon(server):
    server.faults["/a.pt"] = [Fault("silent", None, seconds=60), Fault("slow", seconds=60)]
    with (
        pytest.raises(TimeoutError),
        socket.create_connection((server.host, server.port), timeout=0.2) as wire,
    ):
        wire.sendall(b"GET /a.pt HTTP/1.1\r\nHost: a\r\n\r\n")
        wire.recv(1)
    server.faults["/a.pt"] = [Fault("silent", seconds=0.1), Fault("closed")]
    assert on_the_wire(server) == on_the_wire(server) == b""


def test_what_is_compressed_though_nobody_asked(server):
    server.faults["/a.pt"] = [Fault("gzip")]
    status, headers, body = ask(server)
    assert (status, headers["Content-Encoding"]) == (206, "gzip")
    assert len(body) == int(headers["Content-Length"])
    assert gzip.decompress(body) == CONTENT[1000:2000]


def test_headers_without_end(server):
    server.faults["/a.pt"] = [Fault("endless header")]
    with socket.create_connection((server.host, server.port), timeout=5) as wire:
        wire.sendall(b"GET /a.pt HTTP/1.1\r\nHost: a\r\n\r\n")
        read = 0
        while read < 1 << 20:
            more = wire.recv(1 << 16)
            assert b"\r\n\r\n" not in more
            read += len(more)


def test_a_certificate_that_fits_and_one_that_does_not(tmp_path):
    for name, fits in (("127.0.0.1", True), ("other.example", False)):
        file = certificate(tmp_path, name)
        trusting = ssl.create_default_context(cafile=f"{file}.crt")
        with HttpServer({"/a.pt": CONTENT}, context=serving(file)) as server:
            connection = http.client.HTTPSConnection(
                server.host, server.port, context=trusting, timeout=5
            )
            with closing(connection):
                if not fits:
                    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
                        connection.request("GET", "/a.pt")
                    continue
                server.faults["/a.pt"] = [Fault("reset", at=5, skip=1)]
                connection.request("GET", "/a.pt", headers={"Range": "bytes=0-9"})
                assert connection.getresponse().read() == CONTENT[:10]
                connection.request("GET", "/a.pt", headers={"Range": "bytes=0-9"})
                with pytest.raises((OSError, http.client.IncompleteRead)):
                    connection.getresponse().read()


def test_spans():
    assert span_of("bytes=-", 5) is None
    assert span_of("lines=1-2", 5) is None
    assert span_of("bytes=7-9", 5) == (7, 7)
