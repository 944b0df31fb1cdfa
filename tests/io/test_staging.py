"""Where outputs may stand, who else may write there, and what is left: links, devices, rights,
names, locks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptconv import (
    CheckpointError,
    OutputRefused,
    convert_checkpoint,
    load_portable,
    open_checkpoint,
)
from ckptconv.convert.execute import execute_plan
from ckptconv.convert.options import Options
from ckptconv.convert.planner import plan_conversion
from ckptconv.io.hidden_folders import staging_folder
from ckptconv.io.staging import put_folder
from ckptconv.live import load as loading
from ckptconv.support import platforms
from ckptconv.support.signals import held_back
from helpers.crash_scenes import (
    EACH,
    NEW,
    OLD,
    PAIR,
    Tensors,
    contents,
    file_at,
    hidden,
    same,
    set_at,
    with_set,
)
from helpers.examples import ALL, crossed
from helpers.program import PROGRAM, assert_one_error, environment, run

QUICKLY: dict[str, Any] = {"fsync": False}
IS_ROOT = os.geteuid() == 0


@pytest.fixture
def room(tmp_path) -> Path:
    torch.save(dict(NEW), tmp_path / "in.pt")
    torch.save(dict(OLD), tmp_path / "old.pt")
    return tmp_path


# ---------------------------------------------------------------------------------- kinds of output


def test_a_socket_and_a_device_are_no_outputs(room):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(room / "socket.pt"))
        for force in (False, True):
            with pytest.raises(CheckpointError, match="is a pipe, socket or device"):
                convert_checkpoint(room / "in.pt", room / "socket.pt", force=force)
    assert stat.S_ISSOCK((room / "socket.pt").stat().st_mode)
    if IS_ROOT:
        os.mknod(room / "disk.pt", stat.S_IFBLK | 0o600, os.makedev(7, 200))
        with pytest.raises(CheckpointError, match="is a pipe, socket or device"):
            convert_checkpoint(room / "in.pt", room / "disk.pt", force=True)


def test_a_hard_link_to_the_input_is_replaced_and_the_input_is_not(room):
    os.link(room / "in.pt", room / "again.pt")
    before = (room / "in.pt").read_bytes()
    with pytest.raises(CheckpointError, match="exists"):
        convert_checkpoint(room / "in.pt", room / "again.pt")
    convert_checkpoint(room / "in.pt", room / "again.pt", dtype="bf16", force=True)
    assert (room / "in.pt").read_bytes() == before
    assert torch.load(room / "again.pt")["layer0.weight"].dtype is torch.bfloat16


def test_a_link_to_the_input_is_the_input(room):
    (room / "link.pt").symlink_to("in.pt")
    convert_checkpoint(room / "in.pt", room / "link.pt", dtype="bf16", force=True)
    assert (room / "link.pt").is_symlink()
    assert torch.load(room / "in.pt")["layer0.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("output", ["out/model-00002-of-00003.safetensors", "link.safetensors"])
def test_one_of_the_input_s_shards_is_not_replaced(output, tmp_path):
    with_set(EACH)(tmp_path)
    (tmp_path / "link.safetensors").symlink_to("out/model-00002-of-00003.safetensors")
    before = contents(tmp_path)
    with pytest.raises(
        CheckpointError, match="is one of the input files, and the others need it; name another"
    ):
        convert_checkpoint(tmp_path / "out", tmp_path / output, force=True)
    with pytest.raises(
        CheckpointError, match="is the source or the output, so it cannot also be the mapping"
    ):
        convert_checkpoint(
            tmp_path / "out", tmp_path / "x.pt", save_mapping=tmp_path / output, force=True
        )
    assert contents(tmp_path) == before


def test_a_set_beside_its_source_takes_none_of_its_shards(tmp_path):
    """An index of another name over shards that have the names of the new ones."""
    with_set(EACH)(tmp_path)
    (tmp_path / "out" / "model.safetensors.index.json").rename(
        tmp_path / "out" / "other.safetensors.index.json"
    )
    save_file({"extra": torch.ones(2)}, tmp_path / "out" / "extra.safetensors")
    index = json.loads((tmp_path / "out" / "other.safetensors.index.json").read_text())
    index["weight_map"]["extra"] = "extra.safetensors"
    (tmp_path / "out" / "other.safetensors.index.json").write_text(json.dumps(index))
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="is one of the input files"):
        convert_checkpoint(tmp_path / "out", tmp_path / "out", max_shard_size=900, force=True)
    assert contents(tmp_path) == before


def test_shards_that_are_links_are_replaced_and_not_followed(tmp_path):
    """A snapshot of the Hugging Face cache: what its blobs hold is known by their names."""
    with_set(EACH)(tmp_path)
    (tmp_path / "blobs").mkdir()
    for path in list((tmp_path / "out").iterdir()):
        shutil.move(path, tmp_path / "blobs" / f"b-{path.name}")
        path.symlink_to(f"../blobs/b-{path.name}")
    before = contents(tmp_path / "blobs")
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out", max_shard_size=900, force=True)
    assert contents(tmp_path / "blobs") == before
    assert same(set_at("out/model.safetensors.index.json")(tmp_path) or {}, NEW)


def test_a_name_that_is_no_text_can_be_written(room):
    output = Path(os.fsdecode(os.fsencode(room) + b"/out-\xff\xfe.pt"))
    try:
        convert_checkpoint(room / "in.pt", output)
    except CheckpointError as error:
        assert "Invalid or incomplete multibyte" in str(error)  # a file system of text only
        return
    assert same(torch.load(output), NEW)
    done = run("convert", room / "in.pt", output, cwd=room)
    assert r"out-\udcff\udcfe.pt" in assert_one_error(done)


def test_an_index_beside_an_output_is_told_of(tmp_path):
    with_set(PAIR)(tmp_path)
    result = convert_checkpoint(tmp_path / "in.pt", tmp_path / "out" / "model.safetensors")
    assert [
        note
        for note in result.plan.notes
        if note.startswith("model.safetensors.index.json is beside it")
    ]
    result = convert_checkpoint(tmp_path / "in.pt", tmp_path / "out" / "other.safetensors")
    assert not [note for note in result.plan.notes if "stands beside" in note]


def test_a_mapping_that_cannot_be_put_beside_its_output_is_told_of(room):
    torch.save({f"w{index}": torch.zeros(1 << 18) for index in range(4)}, room / "in.pt")
    with open_checkpoint(room / "in.pt") as checkpoint:
        plan = plan_conversion(checkpoint, room / "out.pt", Options(save_mapping=room / "map.json"))
        with pytest.raises(
            CheckpointError, match=r"map\.json: exists now; the output .*out\.pt is in place"
        ):
            execute_plan(plan, on_progress=lambda _: (room / "map.json").touch())
    assert len(torch.load(room / "out.pt")) == 4
    assert (room / "map.json").read_bytes() == b"" and hidden(room) == []


# ------------------------------------------------------------------------------------------- rights


def test_a_replaced_output_keeps_its_permissions_but_not_the_dangerous_ones(room):
    (room / "out.pt").write_bytes(b"old")
    (room / "out.pt").chmod(0o6751)
    convert_checkpoint(room / "in.pt", room / "out.pt", force=True, **QUICKLY)
    assert stat.S_IMODE((room / "out.pt").stat().st_mode) == 0o751


@pytest.mark.skipif(not IS_ROOT, reason="only root may give files away")
def test_a_replaced_output_keeps_its_owner(room):
    (room / "out.pt").write_bytes(b"old")
    os.chown(room / "out.pt", 65534, 65533)
    convert_checkpoint(room / "in.pt", room / "out.pt", force=True, **QUICKLY)
    found = (room / "out.pt").stat()
    assert (found.st_uid, found.st_gid) == (65534, 65533)


def test_nobody_else_can_read_an_output_before_it_has_its_permissions(room):
    (room / "out.pt").write_bytes(b"old")
    (room / "out.pt").chmod(0o600)
    with staging_folder(room / "out.pt", room / "out.pt") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0


@pytest.fixture
def somebody() -> Iterator[Path]:
    """A folder in which the process has no rights of root."""
    folder = Path(tempfile.mkdtemp(prefix="ckptconv-test-"))
    folder.chmod(0o755)
    torch.save(dict(NEW), folder / "in.pt")
    (folder / "in.pt").chmod(0o644)
    if IS_ROOT:
        os.chown(folder, 65534, 65534)
        os.setegid(65534)
        os.seteuid(65534)
    yield folder
    if IS_ROOT:
        os.seteuid(0)
        os.setegid(0)
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 900}, {"to": "dcp"}])
def test_a_folder_that_is_read_only_is_a_refusal(options, somebody):
    (somebody / "out").mkdir()
    (somebody / "out").chmod(0o555)
    with pytest.raises(
        CheckpointError,
        match=r"cannot be written: this user may not write there \(Permission denied\); nothing "
        r"was left behind",
    ):
        convert_checkpoint(somebody / "in.pt", somebody / "out" / "x.safetensors", **options)
    assert list((somebody / "out").iterdir()) == []


def test_a_folder_that_cannot_be_listed_takes_outputs(somebody):
    (somebody / "drop").mkdir()
    (somebody / "drop").chmod(0o333)
    convert_checkpoint(somebody / "in.pt", somebody / "drop" / "out.pt")
    assert same(torch.load(somebody / "drop" / "out.pt"), NEW)


def test_permissions_of_another_s_file_are_kept_without_its_owner(somebody):
    if not IS_ROOT:
        pytest.skip("only root may give files away")
    (somebody / "out.pt").write_bytes(b"old")
    os.seteuid(0)
    os.chown(somebody / "out.pt", 0, 0)
    (somebody / "out.pt").chmod(0o644)
    os.seteuid(65534)
    convert_checkpoint(somebody / "in.pt", somebody / "out.pt", force=True)
    found = (somebody / "out.pt").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (65534, 0o644)


# --------------------------------------------------------------------------- disks and mount points


def mounted(script: str, room: Path) -> subprocess.CompletedProcess[bytes]:
    """A shell script in a mount namespace of its own, where it may mount; skips where that is not
    allowed.
    """
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount (unshare -m)")
    program = " ".join((sys.executable, *PROGRAM[1:]))
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", script.replace("ckptconv", program)],
        cwd=room,
        env=environment(),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done


def test_a_file_that_is_mounted_by_itself_is_left_alone(room):
    (room / "out.pt").write_bytes(b"precious")
    (room / "behind.pt").write_bytes(b"mounted")
    done = mounted(
        "mount --bind behind.pt out.pt; ckptconv convert in.pt out.pt --force || test $? = 1", room
    )
    assert (
        b"out.pt: cannot be written: it is a mount point, so it cannot be replaced; nothing was "
        b"left" in done.stderr
    )
    assert (room / "out.pt").read_bytes() == b"precious" and (
        room / "behind.pt"
    ).read_bytes() == b"mounted"
    assert hidden(room) == []


@pytest.mark.parametrize(
    ("where", "room_left"),
    crossed(
        [
            ("disk/out.pt", ""),
            ("disk/out.pt", "--no-fsync --save-mapping disk/map.json"),
            ("disk/set", "--max-shard-size 900KB"),
            ("disk/dcp", "--to dcp"),
        ],
        [2500, 4000],
    ),
    ids=str,
)
def test_a_disk_that_is_too_small_is_told_of_before_anything_is_written(where, room_left, room):
    output, options = where
    torch.save({f"w{index}": torch.zeros(200, 1000) for index in range(8)}, room / "big.pt")
    (room / "disk").mkdir()
    script = (
        f"mount -t tmpfs -o size={room_left}k none disk; ckptconv convert big.pt {output} "
        f"{options} || test $? = 1; ls -A disk"
    )
    done = mounted(script, room)
    assert b"the disk has" in done.stderr and done.stderr.count(b"\n") == 1
    assert done.stdout == b""


def test_a_folder_of_something_else_that_came_meanwhile_is_not_replaced(tmp_path):
    made, there = tmp_path / "made", tmp_path / "there"
    for folder in (made, there):
        folder.mkdir()
        (folder / "notes.txt").write_text(folder.name)
    with pytest.raises(OutputRefused, match="holds something other than a DCP checkpoint"):
        put_folder(made, there, force=True, fsync=False)
    for folder in (made, there):
        assert (folder / "notes.txt").read_text() == folder.name


def test_a_disk_that_fills_up_meanwhile_leaves_the_old_output(room):
    torch.save({f"w{index}": torch.zeros(200, 1000) for index in range(8)}, room / "big.pt")
    (room / "disk").mkdir()
    quota = (
        "import os, sys; found = os.statvfs; os.statvfs = lambda path: found('/'); "
        "sys.argv[0] = 'x'; "
    )
    program = quota + "from ckptconv.cli.main import main; main()"
    (room / "program.py").write_text(program)
    script = (
        "mount -t tmpfs -o size=3000k none disk; cp in.pt disk/out.pt; "
        f"{sys.executable} program.py convert big.pt disk/out.pt --force || test $? = 1; cmp "
        "in.pt disk/out.pt; ls -A disk"
    )
    done = mounted(script, room)
    assert (
        b"disk/out.pt: cannot be written: the disk is full; nothing was left behind" in done.stderr
    )
    assert done.stdout == b"out.pt\n"


# -------------------------------------------------------------------------- inputs that are changed


@pytest.mark.parametrize("name", ["in.pt", "in.safetensors"])
def test_an_input_that_shrinks_is_named(name, room):
    tensors = {f"w{index}": torch.full((100_000,), float(index)) for index in range(4)}
    save_file(tensors, room / name) if name.endswith("s") else torch.save(tensors, room / name)
    for size, said in (
        (1_000_000, r"ends at byte 1000000, more was expected"),
        (1_000, "ends at byte|lie beyond its end"),
    ):
        with open_checkpoint(room / name) as checkpoint:
            plan = plan_conversion(checkpoint, room / "out.pt", Options())
            os.truncate(room / name, size)
            with pytest.raises(CheckpointError, match=rf"{name}: .*({said})"):
                execute_plan(plan)
            os.truncate(room / name, 0)
            save_file(tensors, room / name) if name.endswith("s") else torch.save(
                tensors, room / name
            )
    assert not (room / "out.pt").exists() and hidden(room) == []


def test_an_input_that_is_written_to_while_it_is_read_is_refused(room):
    save_file(dict(NEW), room / "in.safetensors")
    with open_checkpoint(room / "in.safetensors") as checkpoint:
        plan = plan_conversion(checkpoint, room / "out.safetensors", Options())
        with (room / "in.safetensors").open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\1\2\3\4")
        os.utime(room / "in.safetensors", ns=(0, 0))
        with pytest.raises(
            CheckpointError,
            match=r"in\.safetensors: was changed while it was read; convert it again",
        ):
            execute_plan(plan)
    assert not (room / "out.safetensors").exists() and hidden(room) == []


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_is_overwritten_while_it_is_loaded_is_refused(mmap, room, monkeypatch):
    """Without a checksum nothing else would tell old values from new ones."""
    save_file(dict(NEW), room / "in.safetensors")
    opened = loading.open_certain

    def overwritten(*named: Any, **options: Any) -> Any:
        checkpoint = opened(*named, **options)
        (room / "in.safetensors").write_bytes(b"short")
        return checkpoint

    monkeypatch.setattr(loading, "open_certain", overwritten)
    with pytest.raises(
        CheckpointError,
        match=r"in\.safetensors: (was changed while it was read|.*lie beyond its end|ends at)",
    ):
        load_portable(room / "in.safetensors", mmap=mmap)


def test_an_input_that_is_replaced_by_another_file_is_read_to_its_end(room):
    with open_checkpoint(room / "in.pt") as checkpoint:
        plan = plan_conversion(checkpoint, room / "out.pt", Options())
        (room / "old.pt").replace(room / "in.pt")
        execute_plan(plan)
    assert same(torch.load(room / "out.pt"), NEW)


# --------------------------------------------------------------------------------------- left-overs


def names_in(room: Path) -> list[str]:
    return [path.name for path in room.iterdir()]


NARROW = {
    "file": ("out.safetensors",),
    "replaced": ("old.pt", "--force"),
    "verified": ("out.pt", "--verify"),
    "set": ("out.safetensors", "--max-shard-size", "40"),
    "mapping": ("out.pt", "--save-mapping", "map.json", "--add-prefix", "x."),
    "folder": ("out", "--to", "dcp"),
}


@pytest.mark.parametrize(
    ("kind", "count"),
    [(kind, count) for kind in NARROW for count in range(3, 8 if kind == "folder" else 11)],
)
def test_a_process_that_may_open_few_files_leaves_nothing_behind(kind, count, room):
    # The hidden folder could not be listed, or not even be locked, and stayed.
    before, old = set(names_in(room)), (room / "old.pt").read_bytes()
    rlimits = {"RLIMIT_NOFILE": count}
    done = run("convert", "in.pt", *NARROW[kind], cwd=room, rlimits=rlimits)
    assert [name for name in names_in(room) if name.startswith(".")] == []
    if done.err.startswith("error: "):
        assert "Too many open files" in assert_one_error(done)
    if done.exit:
        assert set(names_in(room)) == before
        assert (room / "old.pt").read_bytes() == old
    else:
        written = sorted(name for name in names_in(room) if name not in before) or ["old.pt"]
        whole = [
            load_portable(room / name)
            for name in written
            if name.endswith((".pt", "index.json", "out")) or len(written) == 1
        ]
        assert len(whole) == 1
        assert [*whole[0].values()][-1].equal([*NEW.values()][-1])


@pytest.mark.parametrize("fault", range(1, 40))
def test_no_descriptor_is_left_from_some_moment_on_until_one_is_given_back(
    fault, room, monkeypatch
):
    """As at the limit of a process: once it is reached, each `open` fails until something was
    closed.
    """
    calls, spare, really_open, really_close = 0, 0, os.open, os.close

    def refuse(*given, **more):
        nonlocal calls, spare
        calls += 1
        if calls >= fault and not spare:
            raise OSError(24, "Too many open files")
        spare -= calls > fault
        return really_open(*given, **more)

    def close(fd):
        nonlocal spare
        spare += calls >= fault
        really_close(fd)

    before = set(names_in(room))
    with monkeypatch.context() as patch, contextlib.suppress(CheckpointError):
        patch.setattr(os, "open", refuse)
        patch.setattr(os, "close", close)
        convert_checkpoint(room / "in.pt", room / "out.safetensors", max_shard_size=40)
    left = set(names_in(room)) - before
    assert not any(name.startswith(".") for name in left)
    assert not left or "out.safetensors.index.json" in left


def test_what_a_living_process_writes_is_left_alone_and_what_a_dead_one_left_is_removed(room):
    target = room / "out.pt"
    dead = room / ".out.pt.0123abcd.ckptconv-tmp"
    foreign = [
        room / ".out.pt.0123abcd.tmp",
        room / ".other.pt.0123abcd.ckptconv-tmp",
        room / ".out.pt.xyz.ckptconv-tmp",
    ]
    with staging_folder(target, target) as living:
        (living / "out.pt").write_bytes(b"half")
        for folder in (dead, *foreign):
            folder.mkdir()
            (folder / "out.pt").write_bytes(b"half")
        convert_checkpoint(room / "in.pt", target)
        assert living.exists() and not dead.exists() and all(folder.exists() for folder in foreign)
    assert not living.exists()


def test_a_link_that_looks_like_a_left_over_is_not_followed(room):
    (room / "precious").mkdir()
    (room / "precious" / "file").write_bytes(b"x")
    (room / ".out.pt.0123abcd.ckptconv-tmp").symlink_to("precious")
    convert_checkpoint(room / "in.pt", room / "out.pt")
    assert (room / "precious" / "file").read_bytes() == b"x"


def test_without_hard_links_nothing_is_mixed_either(tmp_path, monkeypatch):
    def no_links(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    with_set(EACH)(tmp_path)
    replaced: list[str] = []
    replace = Path.replace

    def watched(path: Path, target: Path) -> Path:
        replaced.append(target.name)
        assert (
            target.name.endswith(".json")
            or not (tmp_path / "out" / "model.safetensors.index.json").exists()
        )
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out", max_shard_size=900, force=True)
    assert replaced[-1] == "model.safetensors.index.json" and len(replaced) == 4
    assert same(set_at("out/model.safetensors.index.json")(tmp_path) or {}, NEW)
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt")
    assert same(torch.load(tmp_path / "out.pt"), NEW)


def failing(monkeypatch, name: str, fails: Any) -> None:
    """Each rename, replacement or link of that name fails where `fails` says so of its target."""
    real = getattr(platforms, name)

    def call(made: Path, target: Path) -> None:
        if fails(made, target):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(made, target)

    monkeypatch.setattr(platforms, name, call)


def test_shards_that_can_be_neither_named_nor_taken_back_are_told_of(tmp_path, monkeypatch):
    torch.save(dict(NEW), tmp_path / "in.pt")
    index = "out.safetensors.index.json"
    failing(monkeypatch, "link", lambda made, target: target.name == index)
    failing(monkeypatch, "rename", lambda made, target: target.name == index)
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("out-") and path.parent == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OutputRefused) as caught:
        convert_checkpoint(
            tmp_path / "in.pt", tmp_path / "out.safetensors", max_shard_size=900, fsync=False
        )
    left = sorted(path.name for path in tmp_path.glob("out-*"))
    assert len(left) > 1 and all(name in caught.value.hint for name in left)
    assert "nothing was left behind" not in str(caught.value)


def test_a_passing_folder_that_cannot_go_back_is_told_of(tmp_path, monkeypatch):
    torch.save(dict(NEW), tmp_path / "in.pt")
    options: Any = {"max_shard_size": 900, "fsync": False}
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors", **options)
    failing(monkeypatch, "replace", lambda made, target: True)
    failing(monkeypatch, "rename", lambda made, target: ".ckptconv-shards" in made.name)
    with pytest.raises(OutputRefused, match="cannot be written: Input/output error") as caught:
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors", force=True, **options)
    (left,) = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert caught.value.hint == f"the folder {left} is left behind; remove it"


def test_without_hard_links_a_set_that_was_half_replaced_says_so(tmp_path, monkeypatch):
    torch.save(dict(NEW), tmp_path / "in.pt")
    options: Any = {"max_shard_size": 900, "fsync": False}
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors", **options)
    failing(monkeypatch, "link", lambda made, target: True)
    failing(monkeypatch, "replace", lambda made, target: target.name.endswith("index.json"))
    with pytest.raises(OutputRefused, match="cannot be written: Input/output error") as caught:
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors", force=True, **options)
    assert "replaced by now; run the command again" in caught.value.hint
    assert not (tmp_path / "out.safetensors.index.json").exists() and not hidden(tmp_path)


def test_an_earlier_folder_that_cannot_come_back_is_told_of(room, monkeypatch):
    convert_checkpoint(room / "old.pt", room / "out", to="dcp", fsync=False)
    monkeypatch.setattr(platforms, "exchange", lambda one, other: False)
    failing(
        monkeypatch,
        "rename",
        lambda made, target: target == room / "out" and not target.exists(),
    )
    with pytest.raises(OutputRefused, match="cannot be written") as caught:
        convert_checkpoint(room / "in.pt", room / "out", to="dcp", force=True, fsync=False)
    (left,) = [path.name for path in room.iterdir() if path.name.startswith(".")]
    assert caught.value.hint == f"the earlier folder is {left} now; rename it"
    assert same(load_portable(room / left), dict(OLD))


def test_where_folders_cannot_change_places_the_old_one_comes_back(room, monkeypatch):
    monkeypatch.setattr(platforms, "exchange", lambda one, other: False)
    convert_checkpoint(room / "old.pt", room / "out", to="dcp")
    before = contents(room)
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if (
            path.parent.name.endswith("ckptconv-tmp")
            and not target.exists()
            and target.name == "out"
        ):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", failing)
        with pytest.raises(CheckpointError, match="cannot be written: Input/output error"):
            convert_checkpoint(room / "in.pt", room / "out", to="dcp", force=True)
    assert contents(room) == before and hidden(room) == []
    convert_checkpoint(room / "in.pt", room / "out", to="dcp", force=True)
    assert same(load_portable(room / "out"), NEW) and hidden(room) == []


# -------------------------------------------------------------------------------------- concurrency


def _writer(source: Path, output: Path, options: dict[str, Any], start: Any, said: Any) -> None:
    start.wait()
    try:
        convert_checkpoint(source, output, **options)
        said.put("done")
    except CheckpointError as error:
        said.put(str(error))


def together(jobs: list[tuple[Path, Path, dict[str, Any]]]) -> list[str]:
    """What several processes said that began their conversions at the same moment."""
    context = multiprocessing.get_context("fork")
    start, said = context.Barrier(len(jobs)), context.SimpleQueue()
    processes = [context.Process(target=_writer, args=(*job, start, said)) for job in jobs]
    for process in processes:
        process.start()
    answers = [said.get() for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return answers


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "file": ("out.pt", {}),
    "new set": ("new", {"max_shard_size": 900}),
    "set": ("there/net.safetensors", {"max_shard_size": 900}),
}


def read(kind: str, room: Path) -> Tensors | None:
    names = {
        "file": "out.pt",
        "new set": "new/model.safetensors.index.json",
        "set": "there/net.safetensors.index.json",
    }
    return (file_at if kind == "file" else set_at)(names[kind])(room)


ROUNDS = 8 if ALL else 1
"""Processes are forked in each, which costs a second where torch is loaded."""


@pytest.mark.property
@pytest.mark.parametrize("kind", KINDS)
def test_of_two_conversions_to_one_output_one_wins_and_the_other_says_so(kind, room):
    name, options = KINDS[kind]
    for _ in range(ROUNDS):
        shutil.rmtree(room / "there", ignore_errors=True)
        shutil.rmtree(room / "new", ignore_errors=True)
        (room / "out.pt").unlink(missing_ok=True)
        (room / "there").mkdir()
        said = together(
            [
                (room / source, room / name, {**options, **QUICKLY})
                for source in ("in.pt", "old.pt", "in.pt")
            ]
        )
        assert said.count("done") == 1
        assert all("exists" in line for line in said if line != "done"), said
        found = read(kind, room) or {}
        assert same(found, NEW) or same(found, OLD)
        assert hidden(room) == []


@pytest.mark.property
@pytest.mark.parametrize("kind", KINDS)
def test_with_force_the_last_one_wins_whole(kind, room):
    name, options = KINDS[kind]
    (room / "there").mkdir()
    for _ in range(ROUNDS):
        jobs = [
            (room / source, room / name, {**options, **QUICKLY, "force": True})
            for source in ("in.pt", "old.pt") * 2
        ]
        assert together(jobs) == ["done"] * 4
        found = read(kind, room) or {}
        assert same(found, NEW) or same(found, OLD)
        assert hidden(room) == []


def _replacing(room: Path, output: Path, options: dict[str, Any], rounds: int) -> None:
    for number in range(rounds):
        source = room / ("in.pt" if number % 2 else "old.pt")
        convert_checkpoint(source, output, force=True, fsync=False, **options)


@pytest.mark.parametrize("kind", ["file", "set", "recut set"])
def test_a_reader_never_sees_a_mixture(kind, room):
    """A file by torch itself; shards by ckptconv, which looks whether the index is still the same
    when all are open.
    """
    (room / "there").mkdir()
    output, options = (
        (room / "out.pt", {})
        if kind == "file"
        else (room / "there" / "net.safetensors", {"max_shard_size": 900})
    )
    index = room / "there" / "net.safetensors.index.json"
    convert_checkpoint(room / "old.pt", output, **options, **QUICKLY)
    context = multiprocessing.get_context("fork")
    ways = [options, {"max_shard_size": 1700}] if kind == "recut set" else [options]
    writers = [context.Process(target=_replacing, args=(room, output, way, 60)) for way in ways]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        found = torch.load(output) if kind == "file" else load_portable(index, mmap=False)
        assert same(found, OLD) or same(found, NEW)
        seen += 1
    assert [writer.exitcode for writer in writers] == [0] * len(writers)
    assert seen > 10


def test_two_dcp_folders_of_one_name(room):
    jobs = [(room / source, room / "out", {"to": "dcp"}) for source in ("in.pt", "old.pt")]
    said = together(jobs)
    assert said.count("done") == 1 and sum("exists" in line for line in said) == 1, said
    assert (
        together([(source, output, {**options, "force": True}) for source, output, options in jobs])
        == ["done"] * 2
    )
    found = load_portable(room / "out")
    assert same(found, NEW) or same(found, OLD)
    assert hidden(room) == []


def test_a_signal_while_handlers_are_given_back_leaves_none_of_ours(monkeypatch):
    given, set_handler = [], signal.signal
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }

    def interrupted(number, handler):
        given.append(set_handler(number, handler))
        if len(given) > len(before) and number == signal.SIGINT:
            raise KeyboardInterrupt
        return given[-1]

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt), held_back():
        assert {signal.getsignal(number) for number in before}.isdisjoint(before.values())
    assert {number: signal.getsignal(number) for number in before} == before
