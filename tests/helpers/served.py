"""The conformance suites over a real server of objects: a kind names the server, and what is there
is looked at by another client (`raw_objects`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ckptconv.io.destination import Destination
from ckptconv.io.location import Location
from ckptconv.io.remote.output import remote_output
from ckptconv.io.remote.place import RemotePlace, remote_place
from ckptconv.io.remote.uploads import key_of_hidden
from ckptconv.io.source import Source
from ckptconv.io.staging import ShardNames
from helpers import raw_objects
from helpers.conformance import (
    BYTES,
    DestinationConformance,
    LocationConformance,
    SourceConformance,
)
from helpers.servers import Server

_numbers = itertools.count()
INDEX = "m.bin.index.json"


class Served:
    """A server of this name, in whose bucket each test has a folder of its own."""

    SERVER = ""
    server: Server
    home_key: str

    @pytest.fixture(autouse=True)
    def _served(self, servers: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = servers(self.SERVER)
        for variable, value in self.server.environment.items():
            monkeypatch.setenv(variable, value)
        self.home_key = f"conformance {next(_numbers)}"

    def key(self, room: Path, name: str) -> str:
        """The key of what is called `name`, for a test that has the folder `room`."""
        return f"{self.home_key}/{room.name}/{name}"

    def place(self, room: Path, name: str) -> RemotePlace:
        """That, as the user names it."""
        return remote_place(f"{self.server.url}/{self.key(room, name)}")


class ServedSource(Served, SourceConformance):
    """Objects as sources."""

    def source(self, room: Path, content: bytes) -> Source:
        self.name = f"a {next(_numbers)}.bin"
        raw_objects.put_object(self.server, self.key(room, self.name), content)
        return self.again(room, content)

    def again(self, room: Path, content: bytes) -> Source:
        return self.place(room, self.name).open()

    def change(self, room: Path) -> None:
        raw_objects.put_object(self.server, self.key(room, self.name), BYTES[::-1])

    # where a tag pins every request, nothing is asked after the last one
    def test_a_change_while_it_is_read_is_told(self, tmp_path: Path) -> None:
        source = self.source(tmp_path, BYTES * 40)
        source.read(0, 10)
        self.change(tmp_path)
        with pytest.raises(Exception, match="was changed while it was read"):
            source.read(200_000, 100_000)
        source.close()


class KeptPlaces(LocationConformance):
    """Places of which what was seen is kept: who looks again names them again."""

    def again(self, place: Location) -> Location:
        """The same place, of which nothing was seen."""
        return remote_place(str(place))

    def test_a_folder_is_listed_by_name(self, there: Location) -> None:
        for name in ("b", "a.pt", "c/d"):  # empty folders are for file systems
            self.write(there.child(name), b"")
        there = self.again(there)
        assert list(there.names()) == ["a.pt", "b", "c"]
        assert list(there.list()) == [there.child(name) for name in ("a.pt", "b", "c")]
        with pytest.raises(OSError):
            there.child("nothing").list()

    def test_another_file_has_another_fingerprint(self, there: Location) -> None:
        self.write(there.child("a"), b"one")
        before = there.child("a").fingerprint()
        assert before is not None and there.child("a").fingerprint() == before
        self.write(there.child("a"), b"other")
        assert there.child("a").fingerprint() == before
        assert self.again(there.child("a")).fingerprint() != before


class ServedPlaces(Served, KeptPlaces):
    """Folders of a bucket; an object that ends in a slash makes an empty one."""

    def home(self, room: Path) -> Location:
        raw_objects.put_object(self.server, self.key(room, ""), b"")
        return remote_place(f"{self.server.url}/{self.home_key}/{room.name}")

    def write(self, place: Location, content: bytes) -> None:
        assert isinstance(place, RemotePlace)
        raw_objects.put_object(self.server, place.key, content)


class ServedOutput(Served, DestinationConformance):
    """One object as an output."""

    NAMES: tuple[str, ...] = ("out.bin",)
    READ_BACK = True

    def destination(self, room: Path, *, force: bool = False, size: int = 0) -> Destination:
        return remote_output(self.place(room, "out.bin"), force=force, read_back=self.READ_BACK)

    def everything(self, room: Path) -> Mapping[str, bytes]:
        prefix = self.key(room, "")
        objects = {
            key.removeprefix(prefix): raw_objects.get_object(self.server, key)
            for key in raw_objects.object_keys(self.server, prefix)
        }
        uploads = raw_objects.open_uploads(self.server, prefix)
        return objects | {f"{key} (unfinished)": b"" for key, _ in uploads}

    def found(self, room: Path) -> Mapping[str, bytes]:
        return {
            name: raw
            for name, raw in self.everything(room).items()
            if key_of_hidden(name) is None and not name.endswith(" (unfinished)")
        }

    def test_a_committed_draft_can_be_read_back(self, tmp_path: Path) -> None:
        if not self.READ_BACK:
            pytest.skip("it is not read before it is committed")
        super().test_a_committed_draft_can_be_read_back(tmp_path)

    def test_more_than_there_is_room_for_is_refused_before_any_work(self, tmp_path: Path) -> None:
        """A store does not tell how much room it has."""

    @pytest.mark.parametrize("size", [8 << 20, (8 << 20) + 1, (24 << 20) + 5])
    def test_objects_of_several_parts(self, size: int, tmp_path: Path) -> None:
        content = self.content(1, size)
        self.put(tmp_path, content)
        assert self.found(tmp_path) == content == self.everything(tmp_path)

    def test_several_parts_that_are_left_leave_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(KeyError), self.destination(tmp_path) as output:
            self.write(output, self.content(1, 20 << 20))
            raise KeyError
        assert self.everything(tmp_path) == {}

    def test_several_parts_that_come_second_leave_nothing(self, tmp_path: Path) -> None:
        self.test_what_comes_in_between_is_not_replaced_without_force(tmp_path)
        assert self.everything(tmp_path) == self.found(tmp_path)


class ServedSet(ServedOutput):
    """Shards and their index in a folder."""

    NAMES = ("m-0.bin", "m-1.bin", INDEX)

    def destination(self, room: Path, *, force: bool = False, size: int = 0) -> Destination:
        place = self.place(room, "m.bin")

        def earlier() -> list[str]:
            try:
                names = remote_place(str(place)).parent.names()
            except NotADirectoryError:
                return []
            return [name for name in names if name.startswith("m") and name.endswith("n")]

        files = ShardNames(
            shards=list(self.NAMES[:-1]),
            index=INDEX,
            earlier=earlier,
            moved_index=lambda moved: json.dumps(moved).encode(),
            claimed=[INDEX],
        )
        return remote_output(place, force=force, read_back=self.READ_BACK, files=files)
