"""The stand-in of the Hub that other tests rely on answers as the Hub does: seen on the wire."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from helpers.conformance import pattern
from helpers.http_server import Fault, HttpServer, Sparse
from helpers.scripted_hub import Hub, sha_of

NAME = "models/org/name"
LARGE, SMALL = pattern(50_000), b"{}"
BEARER = {"Authorization": "Bearer hf_geheim"}


@pytest.fixture
def hub():
    with Hub(web=HttpServer(), far=HttpServer(host="localhost")) as served:
        served.commit(NAME, {"a b/model.bin": LARGE, "config.json": SMALL})
        yield served


def ask(url, method="GET", **headers):
    parts = urlsplit(url)
    where = parts.path + (f"?{parts.query}" if parts.query else "")
    with closing(http.client.HTTPConnection(parts.netloc, timeout=5)) as connection:
        connection.request(method, where, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def resolved(hub, path, method="GET", **headers):
    return ask(f"{hub.web.url}/org/name/resolve/main/{path}", method, **headers)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_large_file_lies_on_another_host_by_a_signed_address(hub, method):
    status, headers, body = resolved(hub, "a%20b/model.bin", method)
    assert (status, headers["X-Linked-Size"], body) == (302, "50000", b"")
    assert headers["X-Linked-ETag"] == f'"{sha_of(LARGE)}"'
    assert headers["X-Repo-Commit"] == hub.revisions[NAME]["main"]
    where = urlsplit(headers["Location"])
    assert where.port == hub.far.port and "Signature=" in where.query
    assert ask(headers["Location"], Range="bytes=5-9")[::2] == (206, LARGE[5:10])


def test_a_large_file_without_a_signature_is_not_given():
    with Hub() as hub:
        hub.commit(NAME, {"model.bin": LARGE})
        location = resolved(hub, "model.bin")[1]["Location"]
        assert ask(location)[0] == 200
        assert ask(location.partition("?")[0])[0] == 403


def test_a_small_file_is_given_or_moved_on_the_same_host(hub):
    status, headers, body = resolved(hub, "config.json")
    assert (status, body) == (200, SMALL) and headers["X-Repo-Commit"]
    hub.small_elsewhere = True
    status, headers, _ = resolved(hub, "config.json", "HEAD")
    assert status == 307 and headers["Location"].startswith("/api/resolve-cache/models/org/name/")
    assert ask(hub.web.url + headers["Location"])[::2] == (200, SMALL)


def test_trees_come_by_pages(hub):
    hub.commit("datasets/org/data", {f"{number:03}": SMALL for number in range(120)})
    url = f"{hub.web.url}/api/datasets/org/data/tree/main?recursive=true"
    assert len(json.loads(ask(url)[2])) == 120
    pages, link = [], f"<{url}&expand=true>"
    while link is not None:
        _, headers, body = ask(link[1 : link.index(">")])
        pages.append(json.loads(body))
        link = headers["Link"]
        assert link is None or link.endswith('>; rel="next"')
    assert [len(page) for page in pages] == [50, 50, 20]
    assert pages[2][-1]["path"] == "119" and "lastCommit" in pages[2][-1]


def test_a_tree_tells_of_large_files(hub):
    entries = json.loads(ask(f"{hub.web.url}/api/models/org/name/tree/main?recursive=true")[2])
    found = {entry["path"]: entry for entry in entries}
    assert found["a b"]["type"] == "directory"
    assert found["a b/model.bin"]["lfs"]["oid"] == sha_of(LARGE)
    assert "lfs" not in found["config.json"] and found["config.json"]["size"] == 2


def test_a_revision_is_a_commit(hub):
    status, _, body = ask(f"{hub.web.url}/api/models/org/name/revision/main")
    assert (status, json.loads(body)["sha"]) == (200, hub.revisions[NAME]["main"])


@pytest.mark.parametrize(
    ("path", "token", "status", "code"),
    [
        ("org/gated/resolve/main/x", False, 401, "GatedRepo"),
        ("org/gated/resolve/main/x", True, 403, "GatedRepo"),
        ("org/private/resolve/main/x", False, 401, "RepoNotFound"),
        ("org/private/resolve/main/x", True, 200, None),
        ("org/none/resolve/main/x", False, 401, "RepoNotFound"),
        ("org/none/resolve/main/x", True, 404, "RepoNotFound"),
        ("org/name/resolve/other/x", False, 404, "RevisionNotFound"),
        ("org/name/resolve/main/none", False, 404, "EntryNotFound"),
    ],
)
def test_refusals(hub, path, token, status, code):
    for name in ("gated", "private"):
        hub.commit(f"models/org/{name}", {"x": SMALL})
    hub.gated.add("models/org/gated")
    hub.private.add("models/org/private")
    told, headers, _ = ask(f"{hub.web.url}/{path}", **(BEARER if token else {}))
    assert (told, headers["X-Error-Code"]) == (status, code)


def test_a_wrong_token_is_refused(hub):
    assert resolved(hub, "config.json", Authorization="Bearer other")[0] == 401


def test_faults_befall_both_hosts(hub):
    location = resolved(hub, "a%20b/model.bin")[1]["Location"]
    hub.web.faults["/org/name/resolve/main/a b/model.bin"] = [Fault("status", status=503)]
    hub.far.faults[f"/{sha_of(LARGE)}"] = [Fault("whole")]
    assert [resolved(hub, "a%20b/model.bin")[0] for _ in range(2)] == [503, 302]
    assert [ask(location, Range="bytes=0-4")[0] for _ in range(2)] == [200, 206]
    assert hub.far.sent == 50_005


def test_a_file_larger_than_the_memory(hub):
    size = 40 << 30
    hub.commit(NAME, {"big.bin": Sparse(size, {size - 4: b"tail"})})
    _, headers, _ = resolved(hub, "big.bin")
    assert headers["X-Linked-Size"] == str(size)
    assert ask(headers["Location"], Range=f"bytes={size - 6}-")[2] == b"\0\0tail"
