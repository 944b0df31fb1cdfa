"""Places, by the promises that hold for every kind, and what links make of local ones."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from ckptconv.io.files import FilePool
from ckptconv.io.location import is_plain_name, is_plain_path, require, within
from ckptconv.io.open_files import OpenFile
from ckptconv.io.places import LocalPlace, place_of
from ckptconv.support.addresses import UrlPath
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint, OptionRefused
from helpers.conformance import LocationConformance
from helpers.memory_places import STORES, MemoryPlace


class TestLocal(LocationConformance):
    def home(self, room):
        return LocalPlace(room)

    def write(self, place, content):
        place.path.parent.mkdir(parents=True, exist_ok=True)
        place.path.write_bytes(content)


def test_an_address_is_written_as_it_was_typed():
    path = UrlPath("s3://bucket/a:/b/model.pt")
    assert (str(path), str(path.parent)) == ("s3://bucket/a:/b/model.pt", "s3://bucket/a:/b")


def test_what_the_user_names_becomes_a_place(tmp_path):
    assert place_of("a/b.pt") == place_of(Path("a/b.pt")) == LocalPlace(Path("a/b.pt"))
    assert place_of(place_of(tmp_path)) == LocalPlace(tmp_path)
    assert place_of("").kind() == "folder"  # as pathlib has it


def test_an_open_file_is_a_place_and_what_is_neither_that_nor_a_path_is_refused(tmp_path):
    with (tmp_path / "a").open("wb+") as file:
        assert isinstance(place_of(file), OpenFile)
    for value in (5, None, b"a"):
        with pytest.raises(OptionRefused, match=f"^{value!r} is not a path; name a file or a fol"):
            place_of(value)


def test_a_name_that_no_file_has_is_nothing():
    assert LocalPlace(Path("a\0b")).kind() == "nothing"


def test_a_pipe_is_something_other(tmp_path):
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    os.mkfifo(tmp_path / "pipe")
    place = LocalPlace(tmp_path / "pipe")
    assert place.kind() == "other" and place.exists() and not place.is_file()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        place.open()


def test_in_a_pool_files_rest(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    with closing(LocalPlace(tmp_path / "a").open(FilePool())) as source:
        assert source.mappable_path() is None and not source.is_for_threads()
        assert source.read(1, 2) == b"bc"


def test_where_nothing_is_the_reason_is_told(tmp_path):
    require(LocalPlace(tmp_path))
    with pytest.raises(FileNotFoundError, match="no such file"):
        require(LocalPlace(tmp_path / "nothing"))


def linked(path: Path, target: str) -> LocalPlace:
    path.symlink_to(target)
    return LocalPlace(path)


def test_a_link_to_what_lies_beside_it_is_an_alias(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "a").write_bytes(b"")
    assert linked(tmp_path / "latest", "step-1").alias_of() == "step-1"
    assert linked(tmp_path / "again", "latest").alias_of() == "step-1"
    assert linked(tmp_path / "inner", "step-1/a").alias_of() is None
    assert LocalPlace(tmp_path / "step-1").alias_of() is None


@pytest.mark.parametrize(
    ("target", "stays"), [("a", True), ("inner/a", True), ("../out", False), ("/", False)]
)
def test_a_link_out_of_the_folder_is_told(target, stays, tmp_path):
    (tmp_path / "home" / "inner").mkdir(parents=True)
    place, home = linked(tmp_path / "home" / "link", target), LocalPlace(tmp_path / "home")
    assert place.stays_within(home) is stays
    if not stays:
        with pytest.raises(MalformedCheckpoint, match="leads out of the folder") as raised:
            within(place, home)
        assert raised.value.path == str(place.path)


def test_the_blobs_of_a_hub_cache_are_not_out_of_its_snapshots(tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    place = linked(snapshot / "model.bin", "../../blobs/abc")
    assert place.stays_within(LocalPlace(snapshot))
    other = linked(snapshot / "other.bin", "../../refs/main")
    assert not other.stays_within(LocalPlace(snapshot))


@pytest.mark.parametrize("name", ["a", "step-1.pt", "ä", "x" * 255])
def test_plain_names(name):
    assert is_plain_name(name)


@pytest.mark.parametrize("name", ["", "..", "../a", "/a", "a\n", "C:a", "NUL", "a.", "x" * 256])
def test_names_that_are_not_plain(name):
    assert not is_plain_name(name)


def test_a_plain_path_may_go_down_but_not_up():
    assert is_plain_path("a/b/c.distcp")
    assert not is_plain_path("a/../../c") and not is_plain_path("a//b")


class TestMemory(LocationConformance):
    """A kind that is not a file system, by which formats are tested too."""

    def home(self, room):
        STORES[room.name] = {}
        return MemoryPlace(room.name)

    def write(self, place, content):
        STORES[place.store][place.at] = content
