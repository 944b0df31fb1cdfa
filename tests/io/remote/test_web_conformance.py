"""Web servers and the Hub keep the promises of every source and place."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import pytest

from ckptconv.io.location import Location
from ckptconv.io.remote.place import RemotePlace, remote_place
from ckptconv.io.source import Source
from ckptconv.support.errors import CheckpointError
from helpers.conformance import BYTES, LocationConformance, SourceConformance, named_with_slash
from helpers.scripted_hub import Hub
from helpers.scripted_server import Web

_numbers = itertools.count()


class TestWebSource(SourceConformance):
    @pytest.fixture(autouse=True)
    def _served(self):
        with Web() as self.web:
            yield

    def source(self, room: Path, content: bytes) -> Source:
        self.name = f"{room.name}/a {next(_numbers)}.bin"
        return self.again(room, content)

    def again(self, room: Path, content: bytes) -> Source:
        self.web.files[self.name.replace(" ", "%20")] = content
        return remote_place(self.web.at(self.name)).open()

    def change(self, room: Path) -> None:
        self.web.files[self.name.replace(" ", "%20")] = BYTES[::-1]

    # where a tag pins every request, nothing is asked after the last one
    def test_a_change_while_it_is_read_is_told(self, tmp_path):
        with closing(self.source(tmp_path, BYTES * 40)) as source:
            source.read(0, 10)
            self.change(tmp_path)
            with pytest.raises(Exception, match="was changed while it was read"):
                source.read(200_000, 100_000)


class TestWebSourceWithoutTags(TestWebSource):
    """Of a server that tells of versions by dates only."""

    def again(self, room: Path, content: bytes) -> Source:
        path = self.name.replace(" ", "%20")
        self.date = {"ETag": "", "Last_Modified": f"Mon, 23 Nov 2026 07:00:{len(content) % 60}"}
        self.web.ways[path] = lambda asked: asked.serve(self.web.files[path], **self.date)
        return super().again(room, content)

    def change(self, room: Path) -> None:
        super().change(room)
        self.date = {**self.date, "Last_Modified": "Mon, 23 Nov 2026 08:00:00"}

    test_a_change_while_it_is_read_is_told = (
        SourceConformance.test_a_change_while_it_is_read_is_told
    )


class TestHubSource(SourceConformance):
    CHANGES = False  # a commit never changes

    @pytest.fixture(autouse=True)
    def _served(self, monkeypatch):
        with Hub() as self.hub:
            monkeypatch.setenv("HF_ENDPOINT", self.hub.web.url)
            yield

    def source(self, room: Path, content: bytes) -> Source:
        self.name = f"org/name{next(_numbers)}"
        self.hub.commit(f"models/{self.name}", {"in/a b.bin": content})
        return self.again(room, content)

    def again(self, room: Path, content: bytes) -> Source:
        return remote_place(f"hf://{self.name}/in/a b.bin").open()


class KeptPlaces(LocationConformance):
    """Places of which what was seen is kept: who looks again names them again."""

    def again(self, place: Location) -> Location:
        """The same place, of which nothing was seen."""
        return remote_place(str(place))

    def test_a_folder_is_listed_by_name(self, there):
        assert list(there.list()) == []
        for name in ("b", "a.pt", "c/d"):
            self.write(there.child(name), b"")
        there = self.again(there)
        assert list(there.names()) == ["a.pt", "b", "c"]
        assert list(there.list()) == [there.child(name) for name in ("a.pt", "b", "c")]
        with pytest.raises(OSError):
            there.child("nothing").list()

    def test_another_file_has_another_fingerprint(self, there):
        self.write(there.child("a"), b"one")
        before = there.child("a").fingerprint()
        assert before is not None and there.child("a").fingerprint() == before
        self.write(there.child("a"), b"other")
        assert there.child("a").fingerprint() == before
        assert self.again(there.child("a")).fingerprint() != before


class TestHubPlace(KeptPlaces):
    @pytest.fixture(autouse=True)
    def _served(self, monkeypatch):
        with Hub() as self.hub:
            monkeypatch.setenv("HF_ENDPOINT", self.hub.web.url)
            yield

    def home(self, room: Path) -> Location:
        self.hub.commit("models/org/name", {})
        return remote_place("hf://org/name")

    def write(self, place: Location, content: bytes) -> None:
        assert isinstance(place, RemotePlace)
        commit = self.hub.revisions["models/org/name"]["main"]
        self.hub.commit("models/org/name", {**self.hub.commits[commit], place.key: content})


class TestWebPlace(KeptPlaces):
    """Files of a server, which does not tell what folders it has."""

    @pytest.fixture(autouse=True)
    def _served(self):
        with Web() as self.web:
            yield

    def home(self, room: Path) -> Location:
        return remote_place(f"{self.web.url}/{room.name}")

    def write(self, place: Location, content: bytes) -> None:
        assert isinstance(place, RemotePlace)
        self.web.files[place.key] = content

    def test_what_is_where(self, there):
        self.write(there.child("a.pt"), b"one")
        self.write(there.child("inner").child("b.safetensors"), b"two")
        kinds = [there.child(name).kind() for name in ("a.pt", "inner", "c")]
        assert kinds == ["file", "nothing", "nothing"]
        with pytest.raises(CheckpointError, match="its server cannot list it"):
            there.child("inner/").kind()
        assert there.child("inner/b.safetensors").is_file()
        assert there.child("a.pt").child("of a file").kind() == "nothing"
        assert there.child("a" * 300).kind() == "nothing"

    def test_a_folder_may_end_in_a_slash(self, there):
        self.write(there.child("inner/a.pt"), b"one")
        for place in (there.child("inner/"), named_with_slash(there.child("inner"))):
            for _ in range(2):
                with pytest.raises(CheckpointError, match="list it; name a file, or an index"):
                    place.kind()
            assert (place.name, place.parent) == ("inner", there)
            with closing(place.child("a.pt").open()) as source:
                assert source.read(0, source.size) == b"one"

    def test_a_folder_is_listed_by_name(self, there):
        self.write(there.child("a.pt"), b"one")
        with pytest.raises(OSError):
            there.list()
