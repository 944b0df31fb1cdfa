"""Outputs that are drafted, committed, discarded and killed in any order: what a reader finds is
always one whole output, the last that was committed or the one that was killed in its commit.

The long run is under the mark trust: ``pytest -m trust tests/io/test_stateful.py``.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckptconv.io.commit import ShardNames
from ckptconv.io.destination import Destination
from ckptconv.io.outputs import file_output, folder_output
from ckptconv.io.places import LocalPlace
from ckptconv.io.source import CHUNK
from ckptconv.support.errors import OutputRefused
from helpers.conformance import FaultyDestination, pattern
from helpers.examples import examples

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked and killed")

Content = Mapping[str, bytes]
"""The files of an output by name, as a reader finds them; empty where there is no output."""

CHANGES = frozenset(
    ("open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod")
)
"""Audit events of calls that change what is on the disk; before one of them a process is killed."""


def kill_at(count: int) -> None:
    """Have this process killed before its change number `count`."""
    left = [count]

    def hook(event: str, _: object) -> None:
        if event in CHANGES:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


class Outputs(RuleBasedStateMachine):
    """One output in a room to which several writers come; `model` is what a reader has to find."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.model: Content = {}
        self.was_killed = False
        self.waiting: list[tuple[Destination, Content, ExitStack]] = []

    def teardown(self) -> None:
        for _, _, stack in self.waiting:
            stack.close()
        shutil.rmtree(self.room)

    # what a kind says

    def content(self, seed: int) -> Content:
        """The files of an output; others for each seed."""
        raise NotImplementedError

    def destination(self, content: Content, *, force: bool) -> Destination:
        """Where that output goes."""
        raise NotImplementedError

    def found(self) -> Content:
        """What a reader finds."""
        raise NotImplementedError

    def is_taken(self) -> bool:
        """Whether anything has a name of the output."""
        raise NotImplementedError

    # what writers do

    def draft(self, output: Destination, content: Content) -> None:
        for name, raw in content.items():
            with output.draft(name, len(raw)) as draft:
                draft.stream.write(raw)
                draft.commit()

    @rule(seed=st.integers(0, 50), force=st.booleans())
    def put(self, seed, force):
        content, refused = self.content(seed), self.is_taken() and not force
        try:
            with self.destination(content, force=force) as output:
                self.draft(output, content)
                output.commit()
        except OutputRefused as error:
            assert refused and "exists" in str(error)
            return
        assert not refused
        self.model, self.was_killed = content, False

    @rule(seed=st.integers(0, 50), how=st.sampled_from(["left", "discarded", "raised", "half"]))
    def give_up(self, seed, how):
        content = self.content(seed)
        try:
            with self.destination(content, force=True) as output:
                self.draft(output, content)
                if how == "discarded":
                    output.discard()
                elif how == "raised":
                    raise KeyError
                elif how == "half":
                    with output.draft("half", 10) as draft:
                        draft.stream.write(b"half")
        except KeyError:
            assert how == "raised"

    @rule(seed=st.integers(0, 50), left=st.integers(0, 3000))
    def disk_is_full(self, seed, left):
        content = self.content(seed)
        full = OSError(errno.ENOSPC, "No space left on device")
        if left >= sum(map(len, content.values())):
            return
        with (
            pytest.raises(OutputRefused, match="the disk is full"),
            FaultyDestination(self.destination(content, force=True), full, left) as output,
        ):
            self.draft(output, content)

    @precondition(lambda self: not self.waiting)
    @rule(seed=st.integers(0, 50), at=st.integers(1, 40))
    def kill(self, seed, at):
        content = self.content(seed)
        if (child := os.fork()) == 0:
            kill_at(at)
            try:
                with self.destination(content, force=True) as output:
                    self.draft(output, content)
                    output.commit()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        found = self.found()
        assert found in (self.model, content)
        self.model, self.was_killed = found, True

    @precondition(lambda self: len(self.waiting) < 3)
    @rule(seed=st.integers(0, 50), force=st.booleans())
    def begin(self, seed, force):
        content, stack = self.content(seed), ExitStack()
        try:
            output = stack.enter_context(self.destination(content, force=force))
        except OutputRefused:
            assert self.is_taken() and not force
            return
        self.draft(output, content)
        self.waiting.append((output, content, stack))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def commit_one(self, data):
        """One of several writers that were at work at once puts its output in place."""
        number = data.draw(st.integers(0, len(self.waiting) - 1))
        output, content, stack = self.waiting.pop(number)
        with stack:
            try:
                output.commit()
            except OutputRefused as error:
                assert "exists" in str(error)
                return
        self.model = content

    @precondition(lambda self: self.waiting)
    @rule()
    def leave_one(self):
        self.waiting.pop()[2].close()

    # what holds at any time

    @invariant()
    def a_reader_finds_the_last_output(self):
        assert self.found() == self.model

    @precondition(lambda self: not self.waiting and not self.was_killed)
    @invariant()
    def nothing_else_is_there(self):
        hidden = [item.name for item in self.room.iterdir() if item.name.endswith("ckptconv-tmp")]
        assert hidden == []


class Files(Outputs):
    """A single file."""

    def content(self, seed):
        return {"out.bin": pattern(seed * 61)}

    def destination(self, content, *, force):
        place = LocalPlace(self.room / "out.bin")
        return file_output(place, force=force, fsync=False, size=0)

    def found(self):
        path = self.room / "out.bin"
        return {path.name: path.read_bytes()} if path.exists() else {}

    def is_taken(self):
        return (self.room / "out.bin").exists()


class Sets(Outputs):
    """Shards with an index, or one file; the number of shards changes from output to output."""

    def content(self, seed):
        if seed % 5 == 0:
            return {"m.bin": pattern(100 + seed)}
        count = 1 + seed % 4
        shards = {f"m-{number}.bin": pattern(100 + seed + number) for number in range(count)}
        index = json.dumps({name: name for name in shards}).encode()
        return {**shards, "m.bin.index.json": index}

    def destination(self, content, *, force):
        folder, names = self.room / "set", list(content)
        index = folder / "m.bin.index.json"
        has_index = index.name in names
        raw = content.get(index.name, b"{}")

        def moved(inside: str) -> bytes:
            return json.dumps({name: f"{inside}/{name}" for name in json.loads(raw)}).encode()

        files = ShardNames(
            [name for name in names if name != index.name],
            index.name if has_index else None,
            lambda: [path.name for path in self._there()],
            moved,
            [index.name],
        )
        place = LocalPlace(folder / "m.bin")
        return file_output(place, files, in_folder=True, force=force, fsync=False, size=0)

    def _there(self):
        folder = self.room / "set"
        named = [folder / "m.bin", folder / "m.bin.index.json", *sorted(folder.glob("m-*.bin"))]
        return [path for path in named if path.is_file()]

    def found(self):
        folder = self.room / "set"
        index = folder / "m.bin.index.json"
        if index.exists():
            places = json.loads(index.read_bytes())
            shards = {name: (folder / place).read_bytes() for name, place in places.items()}
            own = json.dumps({name: name for name in shards}).encode()
            return {**shards, index.name: own}
        alone = folder / "m.bin"
        return {alone.name: alone.read_bytes()} if alone.exists() else {}

    def is_taken(self):
        return bool(self._there())


class Folders(Outputs):
    """A DCP folder."""

    def content(self, seed):
        return {".metadata": pattern(seed), f"__{seed % 3}_0.distcp": pattern(CHUNK + seed)}

    def destination(self, content, *, force):
        place = LocalPlace(self.room / "dcp")
        return folder_output(place, force=force, fsync=False, size=0)

    def found(self):
        folder = self.room / "dcp"
        return (
            {item.name: item.read_bytes() for item in sorted(folder.iterdir())}
            if (folder.exists())
            else {}
        )

    def is_taken(self):
        return (self.room / "dcp").exists()


SHORT = settings(
    max_examples=6,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(SHORT, max_examples=examples(400), stateful_step_count=40)


def case(machine: type[Outputs], how: settings, name: str) -> type:
    """The test of a machine, which pytest collects."""
    made = type(name, (machine,), {}).TestCase
    made.settings = how
    return made


TestFiles = case(Files, SHORT, "Files")
TestSets = case(Sets, SHORT, "Sets")
TestFolders = case(Folders, SHORT, "Folders")
TestManyFiles = pytest.mark.trust(case(Files, LONG, "Files"))
TestManySets = pytest.mark.trust(case(Sets, LONG, "Sets"))
TestManyFolders = pytest.mark.trust(case(Folders, LONG, "Folders"))
