"""Google Cloud Storage is read and written: by its XML API, of which a server here has as much as
is needed. Real ones that run here do not have the writing.
"""

from __future__ import annotations

import pytest

from ckptconv import convert_checkpoint, load_portable
from ckptconv.io.location import Location
from ckptconv.io.outputs import file_output
from ckptconv.io.remote.objects import ObjectStoreOf
from ckptconv.io.remote.place import RemotePlace, remote_place
from ckptconv.io.source import CHUNK, Source
from ckptconv.support.errors import MalformedCheckpoint, OutputRefused
from helpers.conformance import (
    BYTES,
    DestinationConformance,
    LocationConformance,
    SourceConformance,
)
from helpers.google_server import GoogleServer
from helpers.paths import SAMPLES

pytest.importorskip("obstore")

MANY = 21 << 20  # bytes of three parts


@pytest.fixture
def google(monkeypatch):
    with GoogleServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


class OnGoogle:
    @pytest.fixture(autouse=True)
    def _served(self, google):
        self.google = google


class TestSource(OnGoogle, SourceConformance):
    def source(self, room, content) -> Source:
        self.google.put(f"{room.name}/a b.bin", content)
        return self.again(room, content)

    def again(self, room, content) -> Source:
        return remote_place(f"gs://bucket/{room.name}/a b.bin").open()

    # the generation pins every request, so nothing is asked after the last one
    def test_a_change_while_it_is_read_is_told(self, tmp_path):
        source = self.source(tmp_path, BYTES * 40)
        source.read(0, 10)
        self.google.put(f"{tmp_path.name}/a b.bin", BYTES[::-1] * 40)
        with pytest.raises(MalformedCheckpoint, match="was changed while it was read"):
            source.read(200_000, 150_000)


class TestLocation(OnGoogle, LocationConformance):
    def home(self, room) -> Location:
        return remote_place("gcs://bucket/")

    def write(self, place, content):
        assert isinstance(place, RemotePlace)
        self.google.put(place.key, content)
        place.site._heads.clear()  # a command would not look twice
        place.site._listings.clear()


class Written(OnGoogle, DestinationConformance):
    READ_BACK = False

    def destination(self, room, *, force=False, size=0):
        place = remote_place("gs://bucket/run/out.bin")
        return file_output(place, force=force, fsync=True, size=size, read_back=self.READ_BACK)

    def found(self, room):
        found = {key.rpartition("/")[2]: held.data for key, held in self.google.objects.items()}
        return {name: data for name, data in found.items() if not name.startswith(".")}

    def everything(self, room):
        begun = [upload.key for upload in self.google.uploads.values()]
        return dict.fromkeys(key.rpartition("/")[2] for key in [*self.google.objects, *begun])

    def test_more_than_there_is_room_for_is_refused_before_any_work(self, tmp_path):
        """A store has room."""

    def test_an_object_of_many_parts(self, tmp_path):
        content = self.content(1, MANY)
        self.put(tmp_path, content)
        assert self.found(tmp_path) == content
        with pytest.raises(KeyError), self.destination(tmp_path, force=True) as output:
            self.write(output, self.content(2, MANY))
            raise KeyError
        assert self.found(tmp_path) == content
        assert set(self.everything(tmp_path)) == set(self.NAMES)

    def test_a_large_one_that_comes_in_between_is_not_replaced(self, tmp_path):
        old = self.content(1)
        with (
            pytest.raises(OutputRefused, match="exists"),
            self.destination(tmp_path) as output,
        ):
            self.write(output, self.content(2, MANY))
            self.put(tmp_path, old)
            output.commit()
        assert self.found(tmp_path) == old
        assert set(self.everything(tmp_path)) == set(self.NAMES)


class TestWritten(Written):
    def test_a_committed_draft_can_be_read_back(self, tmp_path):
        """It was not asked for."""


class TestWrittenReadBack(Written):
    READ_BACK = True


def test_a_checkpoint_is_converted_from_and_to_it(google):
    pytest.importorskip("torch")
    google.put("in.pt", (SAMPLES / "tied.pt").read_bytes())
    convert_checkpoint("gs://bucket/in.pt", "gs://bucket/run/out.safetensors", verify=True)
    made = load_portable("gs://bucket/run/out.safetensors")
    assert sorted(made) == sorted(load_portable(SAMPLES / "tied.pt"))
    assert sorted(google.objects) == ["in.pt", "run/out.safetensors"] and not google.uploads


def test_parts_are_in_flight_a_few_at_a_time_and_nothing_is_whole_before(google):
    store = remote_place("gs://bucket/run/out.bin").site.store
    assert isinstance(store, ObjectStoreOf)
    upload = store.begin("run/out.bin", MANY)
    for _ in range(MANY // CHUNK):
        upload.write(memoryview(bytes(CHUNK)))
    assert google.objects == {}
    upload.end(MANY, fsync=True)
    assert [key for key in google.objects if not key.startswith("run/.out.bin.")] == []
    upload.finish(create=True)
    assert {key: len(held.data) for key, held in google.objects.items()} == {"run/out.bin": MANY}
    parts = [asked for asked in google.asked if "partNumber" in asked[1]]
    assert len(parts) == 3
