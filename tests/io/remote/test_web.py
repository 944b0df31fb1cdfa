"""Files on web servers: the right bytes, or one clear line."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import struct
import time
from contextlib import closing
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from urllib.parse import unquote

import numpy as np
import pytest
from safetensors.numpy import load, save

from ckptconv.io.remote.causes import wait_of
from ckptconv.io.remote.place import remote_place, store_of
from ckptconv.io.remote.source import HEAD
from ckptconv.io.remote.store import Seen, StoreError
from ckptconv.io.remote.traffic import traffic
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint, RemoteFailure
from ckptconv.support.limits import limits
from helpers.conformance import pattern
from helpers.examples import some
from helpers.program import run
from helpers.scripted_server import Asked, Web, tag_of

SIZE = 600_000
CONTENT = pattern(SIZE)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Failing requests are tried again for a short while."""
    monkeypatch.setattr("ckptconv.io.remote.patience.FIRST", 0.005)
    with limits(remote_seconds=20):
        yield


@pytest.fixture
def web():
    with Web(files={"a.bin": CONTENT}) as served:
        yield served


def read(address: str, first: int = 200_000, nbytes: int = 150_000) -> bytes:
    """Bytes of a file, the first request being for others."""
    with closing(remote_place(address).open()) as source:
        return source.read(first, nbytes)


def refused(
    address: str, kind: type[CheckpointError] = RemoteFailure, *, seconds: float = 0.1
) -> str:
    """The line by which reading ends."""
    with limits(remote_seconds=seconds), pytest.raises(kind) as raised:
        read(address)
    line = str(raised.value)
    assert "\n" not in line
    return line.removeprefix(f"{raised.value.path}: ")


def first_times(times: int, bad, good=None):
    """A way that is `bad` for some times, and then good."""
    left = [times]

    def way(asked: Asked) -> None:
        left[0] -= 1
        if left[0] >= 0:
            bad(asked)
        else:
            (good or (lambda asked: asked.serve(CONTENT)))(asked)

    return way


def only_later(bad):
    """A way that answers the first request well and all others badly."""
    return first_times(1, lambda asked: asked.serve(CONTENT), bad)


def test_bytes_come_by_ranges_that_name_the_version(web):
    assert read(web.at("a.bin")) == CONTENT[200_000:350_000]
    first, second = web.asked
    assert first[1]["Range"] == f"bytes=0-{HEAD - 1}" and "If-Match" not in first[1]
    assert second[1]["Range"] == "bytes=200000-349999"
    assert second[1]["If-Match"] == tag_of(CONTENT)
    assert re.fullmatch(r"ckptconv/[\d.]+", second[1]["User-Agent"])
    assert second[1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("a b.bin", "a%20b.bin"),
        ("a%2Fb.bin", "a%2Fb.bin"),
        ("ä/ö.bin", "%C3%A4/%C3%B6.bin"),
        ("a%23b%3F.bin", "a%23b%3F.bin"),
        ("a+b&c.bin", "a+b&c.bin"),
    ],
)
def test_names_are_sent_as_they_are_written(written, sent, web):
    web.fallback = lambda asked: asked.serve(CONTENT) if asked.path == f"/{sent}" else None
    assert read(f"{web.url}/{written}") == CONTENT[200_000:350_000]


@pytest.mark.parametrize("name", ["a b.bin", "ä", "a#b?.bin", "a%2Fb", "a%.bin"])
def test_names_of_files_are_quoted_in_addresses(name, web):
    web.files = {}
    web.fallback = lambda asked: asked.serve(CONTENT) if unquote(asked.path[1:]) == name else None
    place = remote_place(f"{web.url}/").child(name)
    assert place.name == name
    with closing(place.open()) as source:
        assert source.read(0, 10) == CONTENT[:10]


# ---------------------------------------------------------------------- servers that fail at times


def span(asked: Asked) -> int:
    """How many bytes are asked for."""
    return asked.range[1] - asked.range[0]


def part(asked: Asked, body: bytes, **headers: object) -> None:
    """An answer that says it holds what was asked for."""
    placed = f"bytes {asked.range[0]}-{asked.range[1] - 1}/{SIZE}"
    asked.say(206, body, **{"Content_Range": placed, "ETag": tag_of(CONTENT), **headers})


PASSING = {
    "429": lambda asked: asked.say(429),
    "500": lambda asked: asked.say(500, b"x" * 100_000),
    "503": lambda asked: asked.say(503, Retry_After=0),
    "503 until a date": lambda asked: asked.say(
        503, Retry_After=format_datetime(datetime.now(timezone.utc), usegmt=True)
    ),
    "408": lambda asked: asked.say(408),
    "a connection that is closed at once": Asked.break_off,
    "a body that breaks off": lambda asked: (
        part(asked, CONTENT[asked.range[0] :][:5], Content_Length=span(asked)), asked.break_off()
    ),
    "no HTTP": lambda asked: (asked.wfile.write(b"garbage\r\n\r\n"), asked.break_off()),
    "a body that is too short for its range": lambda asked: part(asked, CONTENT[:5]),
    "a body that is too long for its range": lambda asked: part(asked, CONTENT[:200_000]),
    "a body without a length that is too short": lambda asked: (
        part(asked, CONTENT[asked.range[0] :][:5], Content_Length=None), asked.break_off()
    ),
    "a body without a length that is too long": lambda asked: (
        part(asked, CONTENT[:200_000], Content_Length=None), asked.break_off()
    ),
    "chunks that are none": lambda asked: (
        part(asked, b"zz\r\nabc", Content_Length=None, Transfer_Encoding="chunked"),
        asked.break_off(),
    ),
    "other bytes": lambda asked: part(asked, CONTENT[:100], Content_Range=f"bytes 7-106/{SIZE}"),
    "bytes that begin later": lambda asked: part(
        asked, CONTENT[: span(asked) - 1],
        Content_Range=f"bytes {asked.range[0] + 1}-{asked.range[1] - 1}/{SIZE}",
    ),
    "bytes that end later": lambda asked: part(
        asked, CONTENT[: span(asked) + 1],
        Content_Range=f"bytes {asked.range[0]}-{asked.range[1]}/{SIZE}",
    ),
    "bytes that come in crumbs": lambda asked: part(
        asked, CONTENT[asked.range[0] :][:9],
        Content_Range=f"bytes {asked.range[0]}-{asked.range[0] + 8}/{SIZE}",
    ),
    "a range in words": lambda asked: part(asked, CONTENT[:100], Content_Range="bytes all"),
    "a range that ends before it begins": lambda asked: part(
        asked, CONTENT[:100], Content_Range=f"bytes 100-7/{SIZE}"
    ),
    "no range": lambda asked: part(asked, CONTENT[:100], Content_Range=None),
}  # fmt: skip


@pytest.mark.parametrize("name", some(7, PASSING))
def test_what_passes_is_tried_again(name, web):
    before = traffic()
    web.ways["a.bin"] = first_times(1, PASSING[name])
    assert read(web.at("a.bin")) == CONTENT[200_000:350_000]
    assert traffic().since(before).requests == 3


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_in_the_middle_is_tried_again(name, web):
    web.ways["a.bin"] = first_times(
        1,
        lambda asked: asked.serve(CONTENT),
        first_times(1, PASSING[name]),
    )
    assert read(web.at("a.bin")) == CONTENT[200_000:350_000]


BROKEN = r"127.0.0.1 closed the connection \(tried for 0 s\)"
BETTER = "; another server of the file may do better"
CRUMBS = f"the server sends 150000 bytes in more than 32 pieces{BETTER}"
LASTING = {
    "429": r"the server answers with status 429 \(tried for 0 s\); try again later",
    "500": r"the server answers with status 500 \(tried for 0 s\); try again later",
    "503": r"the server answers with status 503 \(tried for 0 s\); try again later",
    "503 until a date": r"the server answers with status 503 \(tried for 0 s\); try again later",
    "408": r"the server answers with status 408 \(tried for 0 s\); try again later",
    "a connection that is closed at once": BROKEN,
    "a body that breaks off": CRUMBS,
    "no HTTP": BROKEN,
    "a body that is too short for its range": (
        f"the server sends 5 bytes, and calls them 150000{BETTER}"
    ),
    "a body that is too long for its range": (
        f"the server sends 200000 bytes, and calls them 150000{BETTER}"
    ),
    "a body without a length that is too short": CRUMBS,
    "a body without a length that is too long": f"the server sends more than 150000 bytes{BETTER}",
    "chunks that are none": BROKEN,
    "other bytes": f"the server sends other bytes than it was asked for{BETTER}",
    "bytes that begin later": f"the server sends other bytes than it was asked for{BETTER}",
    "bytes that end later": f"the server sends other bytes than it was asked for{BETTER}",
    "bytes that come in crumbs": CRUMBS,
    "a range in words": f"the server does not say which bytes it sends{BETTER}",
    "a range that ends before it begins": f"the server does not say which bytes it sends{BETTER}",
    "no range": f"the server does not say which bytes it sends{BETTER}",
}


@pytest.mark.parametrize("name", some(10, PASSING))
def test_what_does_not_pass_ends_in_one_line(name, web):
    web.ways["a.bin"] = only_later(PASSING[name])
    line = refused(web.at("a.bin"), seconds=10 if LASTING[name].endswith(BETTER) else 0.05)
    assert re.fullmatch(LASTING[name], line), line


def test_a_range_may_come_in_pieces(web):
    def pieces(asked: Asked) -> None:
        first, last = asked.range
        last = min(last, first + 20_000)
        placed = f"bytes {first}-{last - 1}/{SIZE}"
        part(asked, CONTENT[first:last], Content_Range=placed)

    web.ways["a.bin"] = pieces
    assert read(web.at("a.bin")) == CONTENT[200_000:350_000]


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_a_server_that_breaks_off_in_each_answer_is_read_on_from_there(is_reset, web, tmp_path):
    content = save({"a": np.arange(3_000_000, dtype="f4")})
    wanted = []

    def half(asked: Asked) -> None:
        first, last = asked.range
        last = min(last, len(content))
        wanted.append((first, last))
        asked.say(206, content[first : (first + last + 1) // 2], Content_Length=last - first,
                  Content_Range=f"bytes {first}-{last - 1}/{len(content)}", ETag='"a"')  # fmt: skip
        asked.wfile.flush()
        if is_reset and last - first > 1 << 20:  # what arrived may be lost with the connection
            time.sleep(0.05)
            asked.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        asked.break_off()

    web.ways["a.safetensors"] = half
    begin = time.monotonic()
    done = run("convert", web.at("a.safetensors"), "out.safetensors", cwd=tmp_path)
    assert done.exit == 0, done.err
    assert (load((tmp_path / "out.safetensors").read_bytes())["a"] == np.arange(3e6)).all()
    assert time.monotonic() - begin < 20 and len(wanted) < 100
    again = [last - first for first, last in wanted if first]
    assert sum(again) < 3 * len(content), "what had come is asked for again"


def test_a_store_gives_no_other_version_than_the_pinned_one(web):
    store, key = store_of(web.at("a.bin"))
    seen = store.get(key, 0, 10, None).seen
    assert seen == Seen(SIZE, tag_of(CONTENT), is_pinned=True)
    for other in (Seen(SIZE + 1, seen.tag), Seen(SIZE, '"other"'), Seen(SIZE, "")):
        with pytest.raises(StoreError) as raised:
            store.get(key, 0, 10, other)
        assert raised.value.kind == "changed"


def test_a_server_that_lies_is_asked_three_times(web):
    web.ways["a.bin"] = only_later(PASSING["other bytes"])
    refused(web.at("a.bin"), seconds=60)
    assert len(web.asked) == 1 + 3


# ------------------------------------------------------------------- servers that ask for patience


def test_a_server_that_asks_to_wait_is_waited_for(web):
    web.ways["a.bin"] = first_times(1, lambda asked: asked.say(429, Retry_After=1))
    begin = time.monotonic()
    with limits(remote_seconds=30):
        assert read(web.at("a.bin")) == CONTENT[200_000:350_000]
    assert 1 <= time.monotonic() - begin < 15


def date_in_an_hour() -> str:
    """An HTTP date, of when the request comes: minutes may pass between import and test."""
    return format_datetime(datetime.now(timezone.utc) + timedelta(seconds=3601), usegmt=True)


LONG = {
    "seconds": lambda asked: asked.say(429, Retry_After=3600),
    "a date": lambda asked: asked.say(429, Retry_After=date_in_an_hour()),
    "RateLimit": lambda asked: asked.say(429, RateLimit='"resolvers";r=0;t=3600', Retry_After=0),
}


@pytest.mark.parametrize("way", LONG.values(), ids=LONG)
def test_a_server_that_asks_for_too_much_patience_is_not_waited_for(way, web):
    web.ways["a.bin"] = way
    begin = time.monotonic()
    line = refused(web.at("a.bin"), seconds=60)
    assert re.fullmatch(
        r"the server answers with status 429, and asks to wait 3[56]\d\d s \(tried for \d s\); "
        "try again later",
        line,
    )
    assert time.monotonic() - begin < 30 and len(web.asked) == 1


def test_other_headers_of_patience_are_not_believed():
    assert wait_of({"RateLimit": '"api";r=17;t=55', "Retry-After": "2"}, 429) == 2
    assert wait_of({"RateLimit": '"api";r=0;t=55', "Retry-After": "2"}, 503) == 2
    for zone in ("GMT", "-0000"):  # which is UTC too, as RFC 2822 says
        until = wait_of({"Retry-After": f"Wed, 21 Oct 2065 07:28:00 {zone}"}, 503)
        assert until is not None and abs(until + time.time() - 3023335680) < 60, zone
    for text in ("", "soon", "-1", "nan", "9" * 5000, "Thu, 99 Foo 9999999 00:00:00"):
        assert wait_of({"Retry-After": text}, 503) is None, text


# ------------------------------------------------------------------ what ends at once, in one line

MISSING = "no such file; check the path"
ENDS = {
    "400": (lambda asked: asked.say(400), "the server answers with status 400"),
    "401": (
        lambda asked: asked.say(401, WWW_Authenticate="Basic"),
        "the server does not allow it (status 401); "
        "write it as https://USER:PASSWORD@HOST/…, or use a signed address",
    ),
    "403": (
        lambda asked: asked.say(403, b"<html>" * 100_000),
        "the server does not allow it (status 403); "
        "a signed address may have expired; get a new one",
    ),
    "404": (lambda asked: asked.say(404), MISSING),
    "410": (lambda asked: asked.say(410), MISSING),
    "412": (lambda asked: asked.say(412), "was changed while it was read; start again"),
    "204": (lambda asked: asked.say(204), "the server answers with status 204"),
    "418": (lambda asked: asked.say(418), "the server answers with status 418"),
    "416": (
        lambda asked: asked.say(416, Content_Range="bytes */7"),
        "the server answers with status 416",
    ),
    "gzip": (
        lambda asked: part(asked, CONTENT[: span(asked)], Content_Encoding="gzip"),
        "the server sends it compressed (gzip), so that it can only be read as a whole; "
        "get it first: curl -LO URL",
    ),
    "200 instead of 206": (
        lambda asked: asked.say(200, CONTENT),
        "the server does not send parts of a file, so that it can only be read as a whole; "
        "get it first: curl -LO URL",
    ),
    "200 without a length": (
        lambda asked: (asked.say(200, CONTENT, Content_Length=None), asked.break_off()),
        "the server does not send parts of a file, so that it can only be read as a whole; "
        "get it first: curl -LO URL",
    ),
    "a redirect to nowhere": (
        lambda asked: asked.say(302),
        "the server redirects to nowhere (status 302)",
    ),
    "a redirect to a file": (
        lambda asked: asked.move("file:///etc/passwd"),
        "the server redirects to file://, which is not followed",
    ),
    "a redirect to itself": (
        lambda asked: asked.move(asked.path),
        "the server redirects in a circle",
    ),
    "a redirect to what is not an address": (
        lambda asked: asked.move("http://[::1"),
        "the server redirects to what is not an address",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_cannot_be_helped_ends_at_once(name, web):
    bad, line = ENDS[name]
    web.ways["a.bin"] = bad
    told = refused(web.at("a.bin"), CheckpointError, seconds=60)
    assert told == line.replace("URL", web.at("a.bin"))
    assert len(web.asked) == 1


def test_a_huge_body_is_not_read_for_nothing(web):
    sent = []

    def endless(asked: Asked) -> None:
        asked.say(200, Content_Length=1 << 40)
        try:
            while len(sent) < 10_000:
                sent.append(asked.wfile.write(bytes(1 << 20)))
        except OSError:
            asked.break_off()

    web.ways["a.bin"] = endless
    assert "does not send parts" in refused(web.at("a.bin"))
    assert len(sent) < 100


def test_small_files_of_a_server_without_ranges_are_read(web):
    web.ways["a.json"] = lambda asked: asked.say(200, CONTENT[:50_000])
    web.ways["b.json"] = lambda asked: asked.say(200, b"")
    with closing(remote_place(web.at("a.json")).open()) as source:
        assert source.read(0, source.size) == CONTENT[:50_000]
        source.check_unchanged()
    with closing(remote_place(web.at("b.json")).open()) as source:
        assert source.size == 0


# ------------------------------------------------------------------------------- files that change

CHANGED = "was changed while it was read; start again"


def test_a_tag_that_changes_is_told(web):
    web.ways["a.bin"] = only_later(lambda asked: part(asked, CONTENT[:150_000], ETag='"other"'))
    assert refused(web.at("a.bin"), MalformedCheckpoint) == CHANGED


def test_another_file_with_the_old_tag_is_told_by_its_size(web):
    web.ways["a.bin"] = only_later(
        lambda asked: asked.serve(CONTENT + b"more", ETag=tag_of(CONTENT))
    )
    assert refused(web.at("a.bin"), MalformedCheckpoint) == CHANGED


def test_a_file_that_is_cut_is_told(web):
    web.ways["a.bin"] = only_later(lambda asked: asked.serve(CONTENT[:10]))
    assert refused(web.at("a.bin"), MalformedCheckpoint) == CHANGED
    web.ways["a.bin"] = only_later(lambda asked: asked.say(416, Content_Range="bytes */10"))
    assert refused(web.at("a.bin"), MalformedCheckpoint) == CHANGED


@pytest.mark.parametrize(
    ("tag", "later"),
    [('W/"a"', 'W/"b"'), ("", ""), ("unquoted", 'W/"b"'), ('W/"a"', 'W/"a"'), ("odd", "odd")],
)
def test_without_a_strong_tag_each_answer_is_compared(tag, later, web):
    old = {"ETag": tag, "Last_Modified": "Mon, 23 Nov 2026 07:00:00 GMT"}
    new = {"ETag": later, "Last_Modified": "Mon, 23 Nov 2026 08:00:00 GMT"}
    web.ways["a.bin"] = lambda asked: asked.serve(CONTENT, **old)
    assert read(web.at("a.bin")) == CONTENT[200_000:350_000]
    assert not any("If-Match" in headers for _, headers in web.asked)
    with closing(remote_place(web.at("a.bin")).open()) as source:
        source.check_unchanged()
        web.ways["a.bin"] = lambda asked: asked.serve(CONTENT, **new)
        with pytest.raises(MalformedCheckpoint, match="was changed while it was read"):
            source.check_unchanged()
        with pytest.raises(MalformedCheckpoint, match="was changed while it was read"):
            source.read(200_000, 150_000)


def two_versions(form: str) -> list[bytes]:
    """Two files of 300 kB that differ in their values only."""
    found = []
    for value in (1.0, 2.0):
        held = io.BytesIO()
        arrays = {"a": np.full(40_000, value, "f4"), "b": np.full(35_000, value, "f4")}
        if form == "npz":
            np.savez(held, **arrays)
        found.append(held.getvalue() if form == "npz" else save(arrays))
    return found


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_what_nothing_pins_is_not_read_in_several_requests(form, web, tmp_path):
    """A web server with neither ETag nor date, whose file is replaced after the first answer."""
    old, new = two_versions(form)
    nothing = {"ETag": None, "Last_Modified": None}
    web.ways[f"m.{form}"] = first_times(
        1, lambda asked: asked.serve(old, **nothing), lambda asked: asked.serve(new, **nothing)
    )
    asked = ("convert", web.at(f"m.{form}"), "out.safetensors")
    done = run(*asked, cwd=tmp_path)
    assert done.exit == 1 and list(tmp_path.iterdir()) == []
    assert "sends neither an ETag nor a date" in done.err and "--unpinned" in done.err
    assert run(*asked, "--unpinned", cwd=tmp_path).exit == 0  # and stays as it is
    assert set(load((tmp_path / "out.safetensors").read_bytes())) == {"a", "b"}
    with limits(unpinned=True):
        assert read(web.at(f"m.{form}"), 100_000) == new[100_000:250_000]


def test_what_one_request_holds_needs_no_pin(web):
    web.ways["a.bin"] = lambda asked: asked.serve(CONTENT[:HEAD], ETag=None)
    assert read(web.at("a.bin"), 100_000, 20_000) == CONTENT[100_000:120_000]


# ---------------------------------------------------------------------------------------- slowness


@pytest.mark.parametrize("part_of_it", ["status", "headers", "body"])
def test_a_server_that_sends_a_byte_now_and_then_is_left(part_of_it, web, monkeypatch):
    monkeypatch.setattr("ckptconv.io.remote.wire.SLOWEST", 10_000_000)
    before = {
        "status": b"HTTP/1.1 206 ",
        "headers": b"HTTP/1.1 206 OK\r\nX-A: b\r\nX-B: ",
        "body": (
            f"HTTP/1.1 206 OK\r\nContent-Length: {HEAD}\r\n"
            f"Content-Range: bytes 0-{HEAD - 1}/{SIZE}\r\n\r\n"
        ).encode(),
    }[part_of_it]

    def slow(asked: Asked) -> None:
        asked.wfile.write(before)
        try:
            for _ in range(1000):
                asked.wfile.write(b"x")
                time.sleep(0.01)
        except OSError:
            asked.break_off()

    web.ways["a.bin"] = slow
    begin = time.monotonic()
    line = refused(web.at("a.bin"))
    assert re.match(r"the server is too slow \(\d s for one answer\) \(tried for \d s\)", line), (
        line
    )
    assert time.monotonic() - begin < 8
    web.ways["a.bin"] = first_times(1, slow)
    monkeypatch.setattr("ckptconv.io.remote.wire.LEAST", 0.2)
    assert read(web.at("a.bin")) == CONTENT[200_000:350_000]


def test_a_server_that_says_nothing_is_left(web, monkeypatch):
    monkeypatch.setattr("ckptconv.io.remote.wire.SLOWEST", 10_000_000)
    web.ways["a.bin"] = lambda asked: time.sleep(10)
    begin = time.monotonic()
    assert "too slow" in refused(web.at("a.bin"))
    assert time.monotonic() - begin < 8


def test_headers_without_end_are_left(web):
    def endless(asked: Asked) -> None:
        asked.wfile.write(b"HTTP/1.1 206 OK\r\n" + b"X-A: b\r\n" * 1000 + b"\r\n")
        asked.break_off()

    web.ways["a.bin"] = endless
    told = "127.0.0.1 closed the connection; if it speaks TLS, write https://"
    assert refused(web.at("a.bin"), seconds=60) == told
    web.ways["a.bin"] = lambda asked: asked.wfile.write(b"HTTP/1.1 206 " + b"x" * 200_000)
    assert refused(web.at("a.bin"), seconds=60) == told


def test_who_is_not_there_is_told_of_soon():
    with Web() as gone:
        address = gone.at("a.bin")
    says = "does not answer; check the address and the network"
    assert refused(address, seconds=60) == f"127.0.0.1 {says}"
    assert refused("http://nowhere.invalid/a.bin", seconds=60) == (
        "nowhere.invalid has no address, or there is no network; check the address"
    )


@pytest.mark.parametrize(
    "address", ["http://", "http://[::1/a", "http://host:99999/a", "http:///a"]
)
def test_what_is_not_an_address_is_told(address):
    with pytest.raises(CheckpointError, match=r"is not an address of the web|names no host"):
        remote_place(address)


# ---------------------------------------------------------------------------------- whole commands


def test_an_index_of_a_web_server_is_read_with_its_shards(web, tmp_path):
    shards = {
        f"model-{number:05}-of-00003.safetensors": save({f"w{number}": np.ones(3, np.float32)})
        for number in (1, 2, 3)
    }
    weights = {f"w{number}": name for number, name in enumerate(shards, 1)}
    index = json.dumps({"metadata": {}, "weight_map": weights}).encode()
    web.files = {f"in%20here/{name}": content for name, content in shards.items()}
    web.files["in%20here/model.safetensors.index.json"] = index
    address = web.at("in here/model.safetensors.index.json")
    out = tmp_path / "out.safetensors"
    ran = run("convert", address, out, cwd=tmp_path)
    assert ran.exit == 0, ran.err
    assert sorted(load(out.read_bytes())) == ["w1", "w2", "w3"]
    missing = web.at("in here/none.pt")
    ran = run("inspect", missing, cwd=tmp_path)
    assert ran.exit == 1
    assert ran.lines[0] == f"error: {missing}: no such file; check the path"


def test_a_forked_process_has_connections_of_its_own(web):
    with closing(remote_place(web.at("a.bin")).open()) as source:
        source.read(200_000, 70_000)
        child = os.fork()
        if not child:
            right = source.read(300_000, 70_000) == CONTENT[300_000:370_000]
            os._exit(0 if right else 1)
        assert source.read(400_000, 70_000) == CONTENT[400_000:470_000]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(set(web.ports)) == 2
