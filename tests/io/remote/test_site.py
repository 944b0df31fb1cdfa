"""What was seen in a store is not asked for again: requests are counted."""

from __future__ import annotations

import json
from contextlib import closing

import numpy
import pytest
from safetensors.numpy import save_file

from ckptconv.formats.registry import open_certain
from ckptconv.io.remote.source import HEAD
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint
from helpers.conformance import pattern
from helpers.folder_store import FolderStore, place_in


def test_a_small_file_is_one_request(tmp_path):
    for name, size in (("small", 10), ("large", HEAD)):
        (tmp_path / name).write_bytes(pattern(size))
        place, store = place_in(tmp_path, name)
        with closing(place.open()) as source:
            assert source.read(0, size) == pattern(size)
        assert place.exists() and place.is_file() and not place.is_folder()
        assert place.fingerprint() == source.fingerprint()
        assert [what for what, *_ in store.asked] == ["get"]


def test_neighbours_in_a_listed_folder_cost_nothing(tmp_path):
    for name in ("a/one", "a/two", "a/in/three"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    place, store = place_in(tmp_path, "a")
    assert list(place.names()) == ["in", "one", "two"]
    kinds = [place.child(name).kind() for name in ("one", "two", "in", "nothing")]
    assert kinds == ["file", "file", "folder", "nothing"]
    assert not place.child("nothing").exists() and place.child("nothing").fingerprint() is None
    with pytest.raises(NotADirectoryError):
        place.child("nothing").list()
    assert store.asked == [("list", "a/", 0, 0)]


def test_what_is_not_there_is_asked_for_once(tmp_path):
    place, store = place_in(tmp_path, "nothing")
    for _ in range(3):
        assert not place.exists() and not place.is_folder() and place.fingerprint() is None
    assert [what for what, *_ in store.asked] == ["get", "list"]


def test_a_hundred_shards_cost_two_requests_each_at_most_and_side_by_side(tmp_path):
    weights = {}
    for number in range(100):
        name = f"model-{number:05}-of-00100.safetensors"
        save_file({f"w{number}": numpy.full(9, number, "f4")}, tmp_path / name)
        weights[f"w{number}"] = name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    place, store = place_in(tmp_path, "model.safetensors.index.json", seconds=0.01)
    with open_certain(place) as checkpoint:
        assert len(list(checkpoint.tensors())) == 100
    asked = [key for what, key, *_ in store.asked if what == "get" and "-of-" in key]
    assert max(asked.count(key) for key in asked) <= 2 and len(set(asked)) == 100
    assert len(store.asked) <= 2 * 100 + 3
    assert 8 <= store.most_in_flight <= 16


def test_what_is_foreseen_is_asked_for_side_by_side_and_its_errors_wait(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(pattern(500_000))
    place, store = place_in(tmp_path, "0", seconds=0.02)

    def needs(start: bytes, size: int) -> list[tuple[int, int]]:
        assert start == pattern(HEAD) and size == 500_000
        return [(400_000, 1000)]

    names = [*map(str, range(20)), "nothing"]
    place.foresee([place.beside(name) for name in names], needs)
    assert store.most_in_flight >= 8
    before = len(store.asked)
    assert before == 20 * 2 + 1
    for name in names[:-1]:
        with closing(place.beside(name).open()) as source:
            assert source.read(400_000, 1000) == pattern(500_000)[400_000:401_000]
    assert len(store.asked) == before
    with pytest.raises(CheckpointError):
        place.beside("nothing").open()


def test_a_file_that_changes_between_its_head_and_its_rest_is_told(tmp_path):
    (tmp_path / "a").write_bytes(pattern(500_000))
    place, _ = place_in(tmp_path, "a")
    with closing(place.open()) as source:
        (tmp_path / "new").write_bytes(pattern(500_000)[::-1])
        (tmp_path / "new").replace(tmp_path / "a")
        assert source.read(0, 100) == pattern(100)
        with pytest.raises(MalformedCheckpoint, match="was changed while it was read"):
            source.read(300_000, 100)


def test_two_stores_of_the_same_objects_are_one_site(tmp_path):
    place, store = place_in(tmp_path, "a")
    again, _ = place_in(tmp_path, "a")
    assert place == again and hash(place.site) == hash(again.site)
    assert place.site.anew() == place.site and isinstance(store, FolderStore)
