"""File systems of fsspec, by one that is in memory."""

from __future__ import annotations

import itertools
import pickle
import sys
from pathlib import Path

import pytest

from ckptconv import load_portable
from ckptconv.io.location import Location
from ckptconv.io.outputs import file_output
from ckptconv.io.places import place_of
from ckptconv.io.remote import uploads
from ckptconv.io.remote.filesystems import FileSystemStore
from ckptconv.io.remote.place import RemotePlace, remote_place
from ckptconv.io.remote.store import StoreError
from ckptconv.io.source import Source
from ckptconv.support.errors import CheckpointError, OutputRefused, UnsupportedCheckpoint
from helpers.conformance import (
    BYTES,
    DestinationConformance,
    LocationConformance,
    SourceConformance,
)
from helpers.paths import SAMPLES
from helpers.program import run

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("fsspec.implementations.memory")
_numbers = itertools.count()
MIB = 1 << 20


def files() -> dict[str, bytes]:
    """What lies in the memory of fsspec, by its paths."""
    return {path: held.getvalue() for path, held in fsspec.filesystem("memory").store.items()}


def put(path: str, content: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(path, content)


class TestSource(SourceConformance):
    def source(self, room: Path, content: bytes) -> Source:
        self.path = f"/{room.name}-{next(_numbers)}/a b.bin"
        put(self.path, content)
        return self.again(room, content)

    def again(self, room: Path, content: bytes) -> Source:
        return remote_place(f"memory:/{self.path}").open()

    def change(self, room: Path) -> None:
        put(self.path, BYTES[::-1])


class TestLocation(LocationConformance):
    def home(self, room: Path) -> Location:
        path = f"{room.name}-{next(_numbers)}"
        fsspec.filesystem("memory").mkdir(f"/{path}")
        return remote_place(f"memory://{path}")

    def write(self, place: Location, content: bytes) -> None:
        assert isinstance(place, RemotePlace)
        put(f"/{place.key}", content)
        place.site._heads.clear()  # a command would not look twice
        place.site._listings.clear()

    # a folder without anything in it is one that is not there
    def test_a_folder_is_listed_by_name(self, there):
        for name in ("b", "a.pt", "c/d"):
            self.write(there.child(name), b"")
        assert list(there.names()) == ["a.pt", "b", "c"]
        with pytest.raises(OSError):
            there.child("nothing").list()


class Written(DestinationConformance):
    READ_BACK = False

    def destination(self, room, *, force=False, size=0):
        place = remote_place(f"memory://{self.home(room)}out.bin")
        return file_output(place, force=force, fsync=True, size=size, read_back=self.READ_BACK)

    def home(self, room):
        return f"{room.name}-{type(self).__name__}/"

    def everything(self, room):
        home = f"/{self.home(room)}"
        return {path[len(home) :]: raw for path, raw in files().items() if path.startswith(home)}

    def found(self, room):
        found = self.everything(room)
        return {name: raw for name, raw in found.items() if not name.startswith(".")}

    def test_more_than_there_is_room_for_is_refused_before_any_work(self, tmp_path):
        """Nobody knows how much room there is."""


class TestFile(Written):
    def test_a_committed_draft_can_be_read_back(self, tmp_path):
        """It was not asked for."""


class TestFileReadBack(Written):
    READ_BACK = True


# --------------------------------------------------------------------------------- of this kind


def test_a_checkpoint_is_converted_from_and_to_a_file_system(tmp_path, capsys):
    from ckptconv import convert_checkpoint

    pytest.importorskip("torch")
    put("/whole/in.pt", (SAMPLES / "tied.pt").read_bytes())
    convert_checkpoint("memory://whole/in.pt", "memory://whole/out.safetensors", verify=True)
    made = load_portable("memory://whole/out.safetensors")
    assert sorted(made) == sorted(load_portable(SAMPLES / "tied.pt"))
    assert [path for path in files() if path.startswith("/whole/.")] == []


def test_without_fsspec_it_is_said_what_to_install(tmp_path):
    block = "import sys; sys.modules['fsspec'] = None"
    done = run("inspect", "sftp://host/a.pt", cwd=tmp_path, before=block)
    assert done.exit == 1
    assert "sftp://host/a.pt: is not on this machine" in done.err
    assert "pip install fsspec" in done.err


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("nosuch://host/a.pt", r"a kind that is not known \(nosuch://\)"),
        ("simplecache://a.pt", "is not the address of a file in one place"),
        ("zip://a.pt::memory://b.zip", "is not the address of a file in one place"),
        ("local:///etc/passwd", "is not the address of a file in one place"),
    ],
)
def test_what_is_not_a_place_is_refused_in_one_line(address, what):
    with pytest.raises(UnsupportedCheckpoint, match=what) as raised:
        place_of(address)
    assert "\n" not in str(raised.value)


def test_a_library_that_is_missing_is_named():
    if "paramiko" in sys.modules:
        pytest.skip("paramiko is here")
    with pytest.raises(UnsupportedCheckpoint, match="paramiko") as raised:
        place_of("sftp://me:MARKED-secret@host/a.pt")
    assert "MARKED" not in str(raised.value)


class _Rude(fsspec.AbstractFileSystem):
    """A file system that fails with its password in the error."""

    protocol = "rude"
    cachable = False
    error: Exception = OSError("MARKED-secret")

    @classmethod
    def _get_kwargs_from_urls(cls, path):
        return {}

    def info(self, path, **options):
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("MARKED-secret"), "passing"),
        (PermissionError("MARKED-secret"), "denied"),
        (FileNotFoundError("MARKED-secret"), "missing"),
        (RuntimeError("MARKED-secret"), "final"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_a_password_is_never_shown(error, kind, monkeypatch):
    fsspec.register_implementation("rude", _Rude, clobber=True)
    monkeypatch.setattr(_Rude, "error", error)
    place = remote_place("rude://me:MARKED-secret@host/run/a.pt")
    assert str(place) == "rude://me@host/run/a.pt"
    assert "MARKED" not in repr(place)
    assert pickle.loads(pickle.dumps(place)) == place
    store = place.site.store
    assert isinstance(store, FileSystemStore)
    with pytest.raises(StoreError) as raised:
        store.get("run/a.pt", 0, 10, None)
    assert raised.value.kind == kind
    monkeypatch.setattr("ckptconv.io.remote.patience.FIRST", 0.001)
    with pytest.raises(CheckpointError) as told:
        place.open()
    assert "MARKED" not in f"{raised.value} {told.value}"


def test_names_that_look_like_patterns_are_names():
    place = remote_place("memory://patterns/a[1]*.pt")
    with file_output(place, force=False, fsync=True, size=3) as output:
        with output.draft(place.name, 3) as draft:
            draft.stream.write(b"abc")
            draft.commit()
        output.commit()
    assert files()["/patterns/a[1]*.pt"] == b"abc"


def test_what_is_half_written_is_not_written_again(monkeypatch):
    monkeypatch.setattr(uploads, "PART", MIB)
    memory_file = fsspec.implementations.memory.MemoryFile
    written, write = [], memory_file.write

    def breaking(file, data):
        written.append(len(data))
        if len(written) == 2:
            write(file, data[:500])
            raise OSError("the connection is lost")
        return write(file, data)

    monkeypatch.setattr(memory_file, "write", breaking)
    place = remote_place("memory://half/a.pt")
    with (
        pytest.raises(OutputRefused, match="cannot be written"),
        file_output(place, force=False, fsync=True, size=3 * MIB) as output,
        output.draft(place.name, 3 * MIB) as draft,
    ):
        draft.stream.write(bytes(3 * MIB))
        draft.commit()
    assert written == [MIB, MIB]
    assert [path for path in files() if path.startswith("/half/")] == []


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("read_back", [False, True])
def test_a_new_name_whose_answer_is_lost_is_not_given_again(is_there, read_back, monkeypatch):
    """Another try would take the new file for the old one, and remove it."""
    if is_there:
        put("/lost/a.pt", b"old")
    memory = fsspec.implementations.memory.MemoryFileSystem

    lost = [ConnectionError("the answer is lost")]

    def moved(self, source, target):
        if source not in self.store:
            raise FileNotFoundError(source)
        self.store[target] = self.store.pop(source)
        if lost:
            raise lost.pop()

    monkeypatch.setattr(memory, "mv", moved)
    place = remote_place("memory://lost/a.pt")
    with (
        pytest.raises(OutputRefused, match="cannot be written"),
        file_output(place, force=True, fsync=True, size=3, read_back=read_back) as output,
    ):
        with output.draft(place.name, 3) as draft:
            draft.stream.write(b"new")
            draft.commit()
        output.commit()
    assert files()["/lost/a.pt"] == b"new"


def test_what_a_killed_process_left_is_found_and_removed():
    put("/left/.a.pt.0badcafe.ckptconv-part", b"half")
    put("/left/in/.b.pt.0badcafe.ckptconv-part", b"half")
    put("/left/a.pt", b"whole")
    store = remote_place("memory://left/").site.store
    found = store.unfinished("left/")
    assert [(item.key, item.nbytes) for item in found] == [
        ("left/.a.pt.0badcafe.ckptconv-part", 4),
        ("left/in/.b.pt.0badcafe.ckptconv-part", 4),
    ]
    assert all(item.begun for item in found)
    assert [item.key for item in store.unfinished("left/in/b")] == [found[1].key]
    for item in found:
        store.abort(item)
    assert store.unfinished("left/") == [] and "/left/a.pt" in files()
