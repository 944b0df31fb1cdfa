"""Real servers of objects keep the promises of every source, place and destination."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ckptconv.io.commit import ShardNames
from ckptconv.io.location import Location
from ckptconv.io.outputs import file_output
from ckptconv.io.remote.place import RemotePlace, remote_place
from ckptconv.io.source import Source
from ckptconv.support.errors import MalformedCheckpoint
from helpers.conformance import (
    BYTES,
    DestinationConformance,
    LocationConformance,
    SourceConformance,
)
from helpers.raw_objects import get_object, make_bucket, object_keys, open_uploads, put_object
from helpers.servers import servers as servers

pytestmark = pytest.mark.servers

READ = ("seaweedfs", "moto", "fake-gcs-server", "azurite")
WRITTEN = ("seaweedfs", "moto", "azurite")


class OnServer:
    """A part of a bucket for each test."""

    @pytest.fixture(autouse=True)
    def _server(self, request, servers, monkeypatch):
        self.server = servers(request.param)
        for name, value in self.server.environment.items():
            monkeypatch.setenv(name, value)

    def prefix(self, room: Path) -> str:
        return f"{hashlib.sha256(str(room).encode()).hexdigest()[:16]}/"

    def url(self, room: Path, name: str) -> str:
        return f"{self.server.url}/{self.prefix(room)}{name}"


reading = pytest.mark.parametrize("_server", READ, indirect=True)
writing = pytest.mark.parametrize("_server", WRITTEN, indirect=True)


@reading
class TestStoreSource(OnServer, SourceConformance):
    def source(self, room: Path, content: bytes) -> Source:
        put_object(self.server, f"{self.prefix(room)}a b.bin", content)
        return self.again(room, content)

    def again(self, room: Path, content: bytes) -> Source:
        return remote_place(self.url(room, "a b.bin")).open()

    def change(self, room: Path) -> None:
        put_object(self.server, f"{self.prefix(room)}a b.bin", BYTES[::-1])

    # the tag pins every request, so nothing is asked after the last one
    def test_a_change_while_it_is_read_is_told(self, tmp_path):
        source = self.source(tmp_path, BYTES * 40)
        source.read(0, 10)
        put_object(self.server, f"{self.prefix(tmp_path)}a b.bin", BYTES[::-1] * 40)
        with pytest.raises(MalformedCheckpoint, match="was changed while it was read"):
            source.read(200_000, 150_000)


@reading
class TestStoreLocation(OnServer, LocationConformance):
    """In a bucket of its own, which is the only folder that can be empty."""

    def home(self, room: Path) -> Location:
        self.bucket = f"home-{self.prefix(room)[:-1]}"
        make_bucket(self.server, self.bucket)
        return remote_place(f"{self.server.scheme}://{self.bucket}/")

    def write(self, place: Location, content: bytes) -> None:
        assert isinstance(place, RemotePlace)
        put_object(self.server, place.key, content, self.bucket)
        place.site._heads.clear()  # a command would not look twice
        place.site._listings.clear()


class Written(OnServer, DestinationConformance):
    READ_BACK = False

    def found(self, room):
        prefix = self.prefix(room)
        names = [key.removeprefix(prefix) for key in object_keys(self.server, prefix)]
        shown = [name for name in names if not name.startswith(".")]
        return {name: get_object(self.server, prefix + name) for name in shown}

    def everything(self, room):
        prefix = self.prefix(room)
        open_ones = [key for key, _ in open_uploads(self.server, prefix)]
        found = [*object_keys(self.server, prefix), *open_ones]
        return {key.removeprefix(prefix): None for key in found}

    def test_a_committed_draft_can_be_read_back(self, tmp_path):
        if self.READ_BACK:
            super().test_a_committed_draft_can_be_read_back(tmp_path)

    def test_more_than_there_is_room_for_is_refused_before_any_work(self, tmp_path):
        """A store has room."""

    def test_an_object_of_many_parts(self, tmp_path):
        content = self.content(1, 21 << 20)
        self.put(tmp_path, content)
        assert self.found(tmp_path) == content
        with pytest.raises(KeyError), self.destination(tmp_path, force=True) as output:
            self.write(output, self.content(2, 21 << 20))
            raise KeyError
        assert self.found(tmp_path) == content
        assert set(self.everything(tmp_path)) == set(self.NAMES)


class _Object(Written):
    def destination(self, room, *, force=False, size=0):
        place = remote_place(self.url(room, "out.bin"))
        return file_output(place, force=force, fsync=True, size=size, read_back=self.READ_BACK)


@writing
class TestStoreObject(_Object):
    """One that appears when its upload is finished."""


@writing
class TestStoreObjectReadBack(_Object):
    READ_BACK = True


INDEX = "m.bin.index.json"


class _Set(Written):
    NAMES = ("m-0.bin", "m-1.bin", INDEX)

    def destination(self, room, *, force=False, size=0):
        prefix = self.prefix(room)
        files = ShardNames(
            shards=list(self.NAMES[:-1]),
            index=INDEX,
            earlier=lambda: [
                name
                for key in object_keys(self.server, prefix)
                if not (name := key.removeprefix(prefix)).startswith(".")
            ],
            moved_index=lambda moved: moved.encode(),
            claimed=[INDEX],
        )
        return file_output(
            remote_place(self.url(room, "m.bin")), files, in_folder=False, force=force,
            fsync=True, size=size, read_back=self.READ_BACK,
        )  # fmt: skip


@writing
class TestStoreSet(_Set):
    """Shards that appear when their uploads are finished."""


@writing
class TestStoreSetReadBack(_Set):
    READ_BACK = True
