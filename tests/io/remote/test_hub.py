"""Repositories of the Hub, as a stand-in of its endpoints serves them."""

from __future__ import annotations

import json
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from safetensors.numpy import save

from ckptconv.io.remote.hub import hub_address, hub_token, parsed
from ckptconv.io.remote.place import remote_place, store_of
from ckptconv.support.errors import CheckpointError, RemoteFailure, UnsupportedCheckpoint
from ckptconv.support.limits import limits
from helpers.conformance import pattern
from helpers.program import run
from helpers.scripted_hub import Hub

CONTENT = pattern(600_000)
NAME = "models/org/name"
VARIABLES = (
    "HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN", "HTTP_PROXY", "http_proxy", "CKPTCONV_ALLOW_HOSTS",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """Nobody has logged in, and failing requests are tried again for a short while."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nobody"))
    monkeypatch.setattr("ckptconv.io.remote.patience.FIRST", 0.005)
    with limits(remote_seconds=20):
        yield


@pytest.fixture
def hub(monkeypatch):
    with Hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", f"{served.web.url}/")
        served.commit(NAME, {"a.bin": CONTENT, "config.json": b"{}", "in/ä #%2F?.bin": CONTENT})
        yield served


def read(address: str, first: int = 200_000, nbytes: int = 150_000) -> bytes:
    """Bytes of a file, the first request being for others."""
    with closing(remote_place(address).open()) as source:
        return source.read(first, nbytes)


def refused(address: str, kind: type[CheckpointError] = UnsupportedCheckpoint) -> str:
    """The line by which reading ends."""
    with limits(remote_seconds=0.1), pytest.raises(kind) as raised:
        read(address)
    line = str(raised.value)
    assert "\n" not in line and "geheim" not in line
    return line.removeprefix(f"{raised.value.path}: ")


# --------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("address", "kind", "name", "revision", "key"),
    [
        ("hf://org/name", "models", "org/name", "main", ""),
        ("hf://org/name/", "models", "org/name", "main", ""),
        ("hf://models/org/name/a", "models", "org/name", "main", "a"),
        ("hf://datasets/org/name@v1/a/b", "datasets", "org/name", "v1", "a/b"),
        ("hf://spaces/org/na.me-x@v1", "spaces", "org/na.me-x", "v1", ""),
        ("hf://org/name@refs/pr/3/a", "models", "org/name", "refs/pr/3", "a"),
        ("hf://org/name@refs/convert/parquet", "models", "org/name", "refs/convert/parquet", ""),
        ("hf://org/name@refs/pr/3x/a", "models", "org/name", "refs", "pr/3x/a"),
        ("hf://org/name@feature%2Fx/a", "models", "org/name", "feature/x", "a"),
        ("hf://org/name/a@1/b%20c", "models", "org/name", "main", "a@1/b%20c"),
    ],
)
def test_addresses_mean_what_they_mean_for_the_hubs_own_library(address, kind, name, revision, key):
    repository, found = parsed(address)
    assert (repository.kind, repository.name, repository.revision, found) == (
        kind, name, revision, key,
    )  # fmt: skip
    assert (repository.root + found).rstrip("/") == address.rstrip("/")


@pytest.mark.parametrize(
    "address",
    ["hf://", "hf://gpt2", "hf://gpt2@main/a", "hf://datasets/x", "hf://org/name@", "hf://o/../x",
     "hf://buckets/org/name/a", "hf://org//a", "hf://o r g/name"],
)  # fmt: skip
def test_what_names_no_repository_is_told(address):
    with pytest.raises(UnsupportedCheckpoint, match=r"names no repository|is a bucket"):
        parsed(address)


@pytest.mark.parametrize(
    ("page", "address"),
    [
        ("https://huggingface.co/org/name/blob/main/a.pt", "hf://org/name@main/a.pt"),
        ("https://hf.co/org/name/resolve/v1/in/a.pt?download=true", "hf://org/name@v1/in/a.pt"),
        ("https://huggingface.co/org/name/tree/main", "hf://org/name@main/"),
        ("https://huggingface.co/datasets/o/n/raw/refs%2Fpr%2F1/a%20%25#L3",
         "hf://datasets/o/n@refs%2Fpr%2F1/a %"),
        ("https://huggingface.co/org/name", None),
        ("https://huggingface.co/api/models/org/name", None),
        ("https://huggingface.co.evil.example/org/name/blob/main/a.pt", None),
        ("https://evil.example/org/name/blob/main/a.pt", None),
        ("https://huggingface.co@evil.example/org/name/blob/main/a.pt", None),
        ("https://me:pw@huggingface.co/org/name/blob/main/a.pt", None),
    ],
)  # fmt: skip
def test_pages_of_the_hub_are_addresses_of_files(page, address, monkeypatch):
    assert hub_address(page) == address
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub")
    assert hub_address(page) is None


def test_a_page_of_the_hub_is_read_as_its_file(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_geheim")
    hub.private.add(NAME)
    assert (
        read(f"{hub.web.url}/org/name/blob/main/in/%C3%A4%20%23%252F%3F.bin?x#y", 0, 9)
        == (CONTENT[:9])
    )
    assert str(remote_place(f"{hub.web.url}/org/name/blob/main/a.bin")) == (
        "hf://org/name@main/a.bin"
    )


# ----------------------------------------------------------------------------------------- reading


def test_files_here_and_on_the_other_host_are_read(hub):
    assert read("hf://org/name/config.json", 0, 2) == b"{}"
    assert read("hf://org/name/a.bin") == CONTENT[200_000:350_000]
    assert read("hf://org/name/in/ä #%2F?.bin") == CONTENT[200_000:350_000]
    place = remote_place("hf://org/name@main/a.bin")
    assert str(place) == str(place.path) == "hf://org/name@main/a.bin" and place.name == "a.bin"
    assert pickle.loads(pickle.dumps(place)) == place


def test_a_file_costs_one_request_to_the_hub(hub):
    with closing(remote_place("hf://org/name/a.bin").open()) as source:
        for first in range(200_000, 500_000, 100_000):
            source.read(first, 70_000)
        assert len(hub.web.asked) == 1
        assert len(hub.far.asked) == 4
        source.check_unchanged()
    assert "If-Match" in hub.far.asked[-1][1]


def test_other_kinds_and_revisions(hub):
    for kind in ("datasets", "spaces"):
        hub.commit(f"{kind}/org/name", {"a.bin": CONTENT[::-1]}, "feature/x")
        address = f"hf://{kind}/org/name@feature%2Fx"
        assert read(f"{address}/a.bin") == CONTENT[::-1][200_000:350_000]
        assert remote_place(address).names() == ["a.bin"]


def test_a_folder_is_listed_by_one_request(hub):
    hub.commit(NAME, {"a": b"1", "in/b": b"2", "in/deep/c": b"3", "in/d": b"4"})
    there = remote_place("hf://org/name")
    assert there.is_folder() and there.names() == ["a", "in"]
    assert there.child("in").names() == ["b", "d", "deep"]
    assert there.child("in/deep").names() == ["c"]
    assert [path.partition("?")[0] for path, _ in hub.web.asked] == [
        "/api/models/org/name/revision/main",
        f"/api/models/org/name/tree/{hub.revisions[NAME]['main']}",
    ]
    assert not there.child("none").exists()


def test_a_folder_of_many_pages(hub):
    files = {f"in/{number:03}": b"x" for number in range(50)}
    hub.commit(NAME, {**files, "top": b""})
    hub.page = 7
    there = remote_place("hf://org/name")
    assert there.names() == ["in", "top"]
    assert there.child("in").names() == [name.removeprefix("in/") for name in files]
    assert not there.child("none").exists()


def test_the_rest_of_a_list_comes_from_the_hub_only(hub):
    hub.page = 1
    answer = hub._tree

    def elsewhere(asked, *rest):
        said = asked.say
        asked.say = lambda *a, **headers: said(
            *a, **{**headers, "Link": f'<{hub.far.url}/more>; rel="next"'}
        )
        answer(asked, *rest)

    hub._tree = elsewhere
    with pytest.raises(RemoteFailure, match="names another host for the rest of its list"):
        remote_place("hf://org/name").names()
    assert hub.far.asked == []


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[" * 100_000, b"null", b'{"a": 1}'], ids=["0", "1", "2", "3", "4"]
)
def test_a_list_that_is_none_is_told(text, hub):
    commit = hub.revisions[NAME]["main"]
    hub.web.ways[f"api/models/org/name/tree/{commit}"] = lambda asked: asked.say(200, text)
    with pytest.raises(RemoteFailure, match=r"the Hub sends no (JSON|list of files)"):
        remote_place(f"hf://org/name@{commit}").names()


def test_names_in_a_list_that_lead_out_of_it_are_left_out(hub):
    commit = hub.revisions[NAME]["main"]
    body = (
        b'[{"type": "file", "path": "../a"}, {"type": "file", "path": "/etc"}, 3, {"path": 4},'
        b'{"type": "file", "path": "a/./b", "size": 1}, {"type": "file", "path": "c", "size": -1},'
        b'{"type": "file", "path": "d/e", "size": 7, "oid": "x"}]'
    )
    hub.web.ways[f"api/models/org/name/tree/{commit}"] = lambda asked: asked.say(200, body)
    there = remote_place(f"hf://org/name@{commit}")
    assert there.names() == ["c", "d"] and there.child("d").names() == ["e"]


# ----------------------------------------------------------------------------------------- commits


def test_all_files_are_of_the_commit_of_the_first(hub):
    there = remote_place("hf://org/name")
    with closing(there.child("config.json").open()) as source:
        assert source.read(0, 2) == b"{}"
    hub.commit(NAME, {"a.bin": CONTENT[::-1], "config.json": b"[]", "new": b""})
    assert there.names() == ["a.bin", "config.json", "in"]
    with closing(there.child("a.bin").open()) as source:
        assert source.read(200_000, 10) == CONTENT[200_000:200_010]
    assert not there.child("new").exists()
    assert remote_place("hf://org/name").child("new").exists()


def test_requests_at_the_same_time_are_for_one_commit(hub):
    files = {f"{number}": b"old" for number in range(40)}
    hub.commit(NAME, files)
    resolve = hub._resolve

    def moving(asked, commit, path):
        hub.commit(NAME, {**files, "round": b"%d" % len(hub.commits)})
        resolve(asked, commit, path)

    hub._resolve = moving
    hub.web.latency = 0.01
    store, _ = store_of("hf://org/name")
    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(lambda name: store.get(name, 0, 10, None), files))
    assert {bytes(part.data) for part in parts} == {b"old"}
    commits = [path.split("/")[4] for path, _ in hub.web.asked]
    assert commits.count("main") == 1 and len(set(commits)) == 2


def test_a_commit_is_not_asked_for(hub):
    commit = hub.revisions[NAME]["main"]
    assert remote_place(f"hf://org/name@{commit}").names() == ["a.bin", "config.json", "in"]
    assert len(hub.web.asked) == 1


def test_a_size_that_is_another_on_the_other_host_is_told(hub):
    hub.far.fallback = lambda asked: asked.serve(CONTENT[:-1])
    line = refused("hf://org/name/a.bin", RemoteFailure)
    assert line.startswith("has 599999 bytes where it lies, and 600000 for the Hub")


def test_an_address_that_expired_is_asked_for_again(hub):
    with closing(remote_place("hf://org/name/a.bin").open()) as source:
        serve, left = hub.far.fallback, [1]

        def expired(asked):
            left[0] -= 1
            asked.say(403) if left[0] >= 0 else serve(asked)

        hub.far.fallback = expired
        assert source.read(200_000, 150_000) == CONTENT[200_000:350_000]
    assert len(hub.web.asked) == 2


# ------------------------------------------------------------------------------------------ errors


def test_errors_say_what_to_do(hub, monkeypatch):
    hub.private.add("models/org/private")
    hub.commit("models/org/private", {"a.bin": CONTENT})
    hub.commit("models/org/gated", {"a.bin": CONTENT})
    hub.gated.add("models/org/gated")
    assert refused("hf://org/name/none") == "no such file; check the path"
    assert refused("hf://org/name@v9/a.bin") == "org/name has no revision v9; check the address"
    nobody = (
        "the Hub shows no repository org/{}; check its name; for a private one set HF_TOKEN, or "
        "log in: hf auth login"
    )
    assert refused("hf://org/none/a.bin") == nobody.format("none")
    assert refused("hf://org/private/a.bin") == nobody.format("private")
    gated = (
        "org/gated is open only to users who accept its conditions; accept them at "
        f"{hub.web.url}/org/gated, then set HF_TOKEN"
    )
    assert refused("hf://org/gated/a.bin") == gated
    monkeypatch.setenv("HF_TOKEN", "hf_geheim")
    assert read("hf://org/private/a.bin") == CONTENT[200_000:350_000]
    assert refused("hf://org/gated/a.bin") == gated.replace(
        "then set HF_TOKEN", "as the user of the token"
    )
    assert refused("hf://org/none/a.bin") == (
        "the Hub shows no repository org/none; check its name, and whether the token may read it"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_geheim_old")
    assert refused("hf://org/name/a.bin") == (
        "the Hub does not accept the token; check HF_TOKEN, or log in again: hf auth login"
    )
    with pytest.raises(CheckpointError, match="the Hub does not accept the token"):
        remote_place("hf://org/name").names()


def test_the_hub_may_be_left_alone(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused("hf://org/name/a.bin") == "is on the Hub, and HF_HUB_OFFLINE is set; unset it"
    assert hub.asked == 0


@pytest.mark.parametrize("endpoint", ["nonsense", "file:///etc", "http://", "http://[::1"])
def test_an_endpoint_that_is_none_is_told(endpoint, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UnsupportedCheckpoint, match="needs HF_ENDPOINT to be an http address"):
        remote_place("hf://org/name")


def test_the_hub_says_how_long_to_wait(hub):
    path = "org/name/resolve/main/a.bin"
    hub.web.ways[path] = lambda asked: asked.say(429, RateLimit='"resolvers";r=0;t=240')
    assert re.fullmatch(
        r"the server answers with status 429, and asks to wait 240 s \(tried for \d s\); try again "
        "later",
        refused("hf://org/name/a.bin"),
    )


# ------------------------------------------------------------------------------------------- token


def test_the_token_is_told_to_the_hub_and_to_no_other_host(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_geheim")
    hub.private.add(NAME)
    there = remote_place("hf://org/name")
    assert there.names() == ["a.bin", "config.json", "in"]
    with closing(there.child("a.bin").open()) as source:
        source.read(200_000, 150_000)
        texts = [repr(source), repr(there), repr(there.site), repr(there.site.store.__dict__)]
    assert {headers["Authorization"] for _, headers in hub.web.asked} == {"Bearer hf_geheim"}
    assert hub.far.asked and not any("Authorization" in headers for _, headers in hub.far.asked)
    assert not [text for text in texts if "geheim" in text]


def test_another_port_is_another_host(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_geheim")
    hub.far.host = "127.0.0.1"
    hub.web.ways["org/name/resolve/main/a.bin"] = lambda asked: asked.move(
        f"http://127.0.0.1:{hub.far.port}/a"
    )
    hub.far.fallback = lambda asked: asked.serve(CONTENT)
    assert read("hf://org/name/a.bin") == CONTENT[200_000:350_000]
    assert not any("Authorization" in headers for _, headers in hub.far.asked)


def test_where_the_token_is_found(monkeypatch, tmp_path):
    assert hub_token() is None
    home = tmp_path / "home"
    caches = tmp_path / "caches" / "huggingface"
    for folder in (home, caches):
        folder.mkdir(parents=True)
        (folder / "token").write_text(f" of {folder.name}\n")
    (tmp_path / "named").write_text("of the file\r\n")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert hub_token() == "of huggingface"
    monkeypatch.setenv("HF_HOME", "$SOMEWHERE/home")
    monkeypatch.setenv("SOMEWHERE", str(tmp_path))
    assert hub_token() == "of home"
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "named"))
    assert hub_token() == "of the file"
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "old")
    assert hub_token() == "old"
    monkeypatch.setenv("HF_TOKEN", " new\n")
    assert hub_token() == "new"
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert hub_token() is None


@pytest.mark.parametrize("token", ["a\nb", "ä", "", "   ", "a\x00b"])
def test_what_cannot_stand_in_a_header_is_not_a_token(token, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_bytes(token.encode())
    assert hub_token() is None
    (tmp_path / "token").write_bytes(b"\xff" * 10)
    assert hub_token() is None
    (tmp_path / "token").write_bytes(b"x" * 10_000)
    assert hub_token() is None
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path))
    assert hub_token() is None


# ---------------------------------------------------------------------------------- whole commands


def test_a_hundred_shards_cost_two_requests_each_and_few_more(hub, tmp_path):
    shards = {
        f"model-{number:05}-of-00100.safetensors": save(
            {f"w{number}": np.full(5000, number, np.float32)}
        )
        for number in range(1, 101)
    }
    weights = {f"w{number}": name for number, name in enumerate(shards, 1)}
    index = json.dumps({"metadata": {}, "weight_map": weights}).encode()
    hub.commit(NAME, {**shards, "model.safetensors.index.json": index, "config.json": b"{}"})
    ran = run(
        "inspect", "hf://org/name", "--json", cwd=tmp_path,
        env={"HF_ENDPOINT": hub.web.url, "HF_TOKEN": "hf_geheim", "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    assert ran.exit == 0, ran.err
    assert "geheim" not in ran.out + ran.err
    assert hub.asked <= 2 * len(shards) + 5
    assert "hf://org/name" in ran.out and "w100" in ran.out
    assert not any("Authorization" in headers for _, headers in hub.far.asked)
