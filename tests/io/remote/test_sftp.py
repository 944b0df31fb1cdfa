"""sftp:// by fsspec and paramiko, against a server of paramiko."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest

from ckptconv.io.outputs import file_output
from ckptconv.io.remote.place import remote_place
from ckptconv.io.source import Source
from ckptconv.support.errors import UnsupportedCheckpoint
from helpers.conformance import DestinationConformance, SourceConformance
from helpers.paths import SAMPLES
from helpers.program import run_process

pytest.importorskip("fsspec")
pytest.importorskip("paramiko")
from helpers.sftp_server import PASSWORD, SftpServer

_numbers = itertools.count()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of the folder of the test, which the user's ssh knows."""
    home = tmp_path / "of the user"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with SftpServer(tmp_path) as server:
        (home / ".ssh" / "known_hosts").write_text(server.known)
        yield server


class TestSource(SourceConformance):
    @pytest.fixture(autouse=True)
    def _served(self, server):
        self.server = server

    def source(self, room: Path, content: bytes) -> Source:
        self.path = room / f"a b {next(_numbers)}.bin"
        self.path.write_bytes(content)
        return self.again(room, content)

    def again(self, room: Path, content: bytes) -> Source:
        named = self.path.relative_to(self.server._root)
        return remote_place(f"{self.server.url}/{named}").open()

    def change(self, room: Path) -> None:
        self.path.write_bytes(b"other")


class TestFile(DestinationConformance):
    @pytest.fixture(autouse=True)
    def _served(self, server):
        self.server = server

    def destination(self, room, *, force=False, size=0):
        place = remote_place(f"{self.server.url}/new/folder/out.bin")
        return file_output(place, force=force, fsync=True, size=size, read_back=True)

    def everything(self, room):
        return {path.name: path.read_bytes() for path in room.glob("new/folder/*")}

    def found(self, room):
        found = self.everything(room)
        return {name: raw for name, raw in found.items() if not name.startswith(".")}

    def test_more_than_there_is_room_for_is_refused_before_any_work(self, tmp_path):
        """Nobody knows how much room there is."""


def test_a_checkpoint_is_converted_from_and_to_a_server(server, tmp_path):
    (tmp_path / "in.pt").write_bytes((SAMPLES / "tied.pt").read_bytes())
    arguments = ("convert", f"{server.url}/in.pt", f"{server.url}/out/a[1].safetensors")
    env = {"HOME": str(tmp_path / "of the user"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_process(*arguments, "--verify", cwd=tmp_path, env=env)
    assert done.exit == 0, done.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a[1].safetensors"]
    again = run_process(*arguments, cwd=tmp_path, env=env)
    assert again.exit == 1 and "a[1].safetensors: exists; add --force" in again.err
    forced = run_process(*arguments, "--force", cwd=tmp_path, env=env)
    assert forced.exit == 0, forced.err
    assert run_process("diff", *arguments[1:], cwd=tmp_path, env=env).exit == 0
    assert PASSWORD not in f"{done.out}{done.err}{again.out}{again.err}{forced.out}{forced.err}"


def test_a_host_that_ssh_does_not_know_gets_no_password(server, tmp_path):
    (tmp_path / "of the user" / ".ssh" / "known_hosts").write_text("")
    with pytest.raises(UnsupportedCheckpoint, match="ssh does not know yet") as raised:
        remote_place(f"{server.url}/a.pt")
    assert PASSWORD not in str(raised.value)


def test_a_host_with_another_key_gets_no_password(server, tmp_path):
    with SftpServer(tmp_path) as other:
        known = other.known.replace(str(other.port), str(server.port))
        (tmp_path / "of the user" / ".ssh" / "known_hosts").write_text(known)
        with pytest.raises(UnsupportedCheckpoint, match="is another host than before"):
            remote_place(f"{server.url}/a.pt")


def test_a_wrong_password_is_told_without_it(server):
    url = server.url.replace(PASSWORD, "MARKED-wrong")
    with pytest.raises(UnsupportedCheckpoint, match="does not accept this user") as raised:
        remote_place(f"{url}/a.pt")
    assert "MARKED" not in str(raised.value)
