"""Every kind of destination, by the promises that hold for all of them."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from ckptconv.io.commit import ShardNames
from ckptconv.io.outputs import file_output, folder_output
from ckptconv.io.places import LocalPlace
from ckptconv.support.errors import OutputRefused
from helpers.conformance import DestinationConformance


def files_in(folder: Path) -> dict[str, bytes]:
    """All files in a folder and those in it, by their paths; a folder without any stands for
    itself.
    """
    found = {}
    for item in sorted(folder.rglob("*")):
        if item.is_dir() and not any(item.iterdir()):
            found[f"{item.relative_to(folder)}/"] = b""
        elif item.is_file():
            found[item.relative_to(folder).as_posix()] = item.read_bytes()
    return found


class Local(DestinationConformance):
    def everything(self, room):
        return files_in(room)

    def found(self, room):
        return {name: raw for name, raw in files_in(room).items() if not name.startswith(".")}


class TestFile(Local):
    def destination(self, room, *, force=False, size=0):
        return file_output(LocalPlace(room / "out.bin"), force=force, fsync=False, size=size)


class TestFileSynced(TestFile):
    def destination(self, room, *, force=False, size=0):
        return file_output(LocalPlace(room / "out.bin"), force=force, fsync=True, size=size)


INDEX = "m.bin.index.json"


def shard_set(folder: Path, count: int, *, has_index: bool = True) -> ShardNames:
    """What the planner says of a set of `count` shards: they are called ``m-N.bin``."""
    output = folder / "m.bin"
    shards = [f"m-{number}.bin" for number in range(count)] if has_index else [output.name]
    return ShardNames(
        shards=shards,
        index=INDEX if has_index else None,
        earlier=lambda: [
            path.name
            for path in (output, folder / INDEX, *sorted(folder.glob("m-*.bin")))
            if path.is_file()
        ],
        moved_index=lambda moved: json.dumps(moved).encode(),
        claimed=[INDEX],
    )


class TestSet(Local):
    NAMES = ("m-0.bin", "m-1.bin", "m-2.bin", INDEX)

    def destination(self, room, *, force=False, size=0):
        files = shard_set(room, 3)
        place = LocalPlace(room / "m.bin")
        return file_output(place, files, in_folder=False, force=force, fsync=False, size=size)


class TestSetOfOneFile(Local):
    NAMES = ("m.bin",)

    def destination(self, room, *, force=False, size=0):
        files = shard_set(room, 1, has_index=False)
        place = LocalPlace(room / "m.bin")
        return file_output(place, files, in_folder=False, force=force, fsync=False, size=size)


class TestSetInANewFolder(Local):
    NAMES = ("m-0.bin", "m-1.bin", INDEX)

    def destination(self, room, *, force=False, size=0):
        files = shard_set(room / "new", 2)
        place = LocalPlace(room / "new" / "m.bin")
        return file_output(place, files, in_folder=True, force=force, fsync=False, size=size)

    def everything(self, room):
        return {name.removeprefix("new/"): raw for name, raw in files_in(room).items()}

    def found(self, room):
        return files_in(room / "new")


class TestFolder(Local):
    NAMES = (".metadata", "__0_0.distcp")

    def destination(self, room, *, force=False, size=0):
        return folder_output(LocalPlace(room / "dcp"), force=force, fsync=False, size=size)

    def everything(self, room):
        return {name.removeprefix("dcp/"): raw for name, raw in files_in(room).items()}

    def found(self, room):
        return files_in(room / "dcp")


# ------------------------------------------------------------------------------- of one kind alone


def test_what_is_written_beside_a_folder_is_not_put_in_place(tmp_path):
    with folder_output(LocalPlace(tmp_path / "dcp"), force=False, fsync=False, size=0) as output:
        with output.scratch(".plain.pt", 10) as plain:
            plain.stream.write(b"plain")
            plain.commit()
        assert plain.place.path.read_bytes() == b"plain"
        (output.folder() / ".metadata").write_bytes(b"by others")
        output.commit()
    assert files_in(tmp_path) == {"dcp/.metadata": b"by others"}


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "thesis.tex").write_bytes(b"mine")
    with (
        pytest.raises(OutputRefused, match="holds something other than a DCP checkpoint"),
        folder_output(LocalPlace(tmp_path / "dcp"), force=True, fsync=False, size=0),
    ):
        raise AssertionError
    assert files_in(tmp_path) == {"dcp/thesis.tex": b"mine"}


def test_shards_of_an_earlier_set_are_removed(tmp_path):
    with_three, with_two = TestSet(), TestSetInANewFolder()
    with_three.put(tmp_path, with_three.content(1))
    files = shard_set(tmp_path, 2)
    place = LocalPlace(tmp_path / "m.bin")
    with file_output(place, files, in_folder=False, force=True, fsync=False, size=0) as output:
        with_two.write(output, with_two.content(2))
        output.commit()
    assert files_in(tmp_path) == with_two.content(2)


def test_a_draft_is_nobody_else_s_before_it_is_in_place(tmp_path):
    with TestFile().destination(tmp_path) as output, output.draft("out.bin", 0) as draft:
        hidden = draft.place.path.parent
        assert hidden.parent == tmp_path and hidden.name.startswith(".out.bin.")
        assert stat.S_IMODE(hidden.stat().st_mode) & 0o077 == 0
    assert files_in(tmp_path) == {}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked")
@pytest.mark.parametrize("kind", [TestFile, TestSet, TestSetInANewFolder, TestFolder])
@pytest.mark.parametrize("moment", ["drafted", "half drafted"])
def test_what_a_killed_process_drafted_is_not_found_and_removed_by_the_next(kind, moment, tmp_path):
    made = kind()
    if (child := os.fork()) == 0:
        with made.destination(tmp_path) as output:
            if moment == "drafted":
                made.write(output, made.content(1))
            else:
                output.draft(made.NAMES[0], 10).__enter__().stream.write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert made.found(tmp_path) == {} != made.everything(tmp_path)
    made.put(tmp_path, made.content(2))
    assert made.found(tmp_path) == made.content(2)
    assert set(made.everything(tmp_path)) == set(made.NAMES)
