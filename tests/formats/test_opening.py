"""Opening reads the directory of a file, and little of it; what stands before a payload is read
when the payload is.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckptconv import (
    CheckpointError,
    MalformedCheckpoint,
    convert_checkpoint,
    diagnose,
    diff_checkpoints,
    execute_plan,
    inspect_checkpoint,
    load_portable,
    open_checkpoint,
    plan_conversion,
)
from ckptconv.formats import registry
from ckptconv.formats.containers import closed_on_error
from ckptconv.io.files import FileSource
from ckptconv.support import platforms
from ckptconv.tensors.stream import iter_chunks
from helpers.reads import counted_reads

TENSORS, BYTES = 300, 40_000
KINDS = ("zip", "legacy", "safetensors")
FOLDER = "dcp"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_what_is_open_is_closed_where_that_fails_and_only_then():
    class Opened:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    opened = Opened()
    with closed_on_error(opened):
        pass
    assert opened.closed == 0
    with pytest.raises(KeyboardInterrupt), closed_on_error(opened):
        raise KeyboardInterrupt
    assert opened.closed == 1


def saved(kind: str, folder: Path, count: int = TENSORS) -> Path:
    """A checkpoint of `count` tensors of `BYTES` bytes."""
    tree = {
        f"layers.{number}.weight": torch.full((BYTES // 4,), float(number))
        for number in range(count)
    }
    path = folder / f"{kind}.pt"
    if kind == FOLDER:
        dcp.save(tree, checkpoint_id=path, no_dist=True)
    elif kind == "safetensors":
        save_file(tree, path)
    else:
        torch.save(tree, path, _use_new_zipfile_serialization=kind == "zip")
    return path


@pytest.mark.parametrize("kind", [*KINDS, FOLDER])
def test_opening_reads_little_of_a_file(kind, tmp_path):
    path = saved(kind, tmp_path)
    with counted_reads() as reads, open_checkpoint(path) as checkpoint:
        assert len(dict(checkpoint.tensors())) == TENSORS
    files = path.iterdir() if path.is_dir() else [path]
    assert len(reads) <= 20
    assert reads.nbytes <= 0.03 * sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("kind", KINDS)
def test_planning_reads_what_stands_before_the_payloads_and_no_payload(kind, tmp_path):
    path = saved(kind, tmp_path)
    with open_checkpoint(path) as checkpoint, counted_reads() as reads:
        plan_conversion(checkpoint, tmp_path / "out.pt")
    assert reads.nbytes <= TENSORS * 100


@pytest.mark.parametrize("kind", KINDS)
def test_one_tensor_is_read_without_looking_at_the_others(kind, tmp_path):
    path = saved(kind, tmp_path)
    with open_checkpoint(path) as checkpoint:
        ref = dict(checkpoint.tensors())["layers.200.weight"]
        with counted_reads() as reads:
            assert b"".join(map(bytes, iter_chunks(ref))) == struct.pack("<f", 200.0) * (BYTES // 4)
    assert len(reads) <= 3 and reads.nbytes <= BYTES + 200


def test_one_chunk_of_a_folder_is_read_without_looking_at_the_others(tmp_path):
    path = saved(FOLDER, tmp_path)
    with open_checkpoint(path) as checkpoint:
        ref = dict(checkpoint.tensors())["layers.200.weight"]
        with counted_reads() as reads:
            assert b"".join(map(bytes, iter_chunks(ref))) == struct.pack("<f", 200.0) * (BYTES // 4)
    assert len(reads) <= 3 and reads.nbytes <= 2 * (BYTES + 2000)


def test_all_items_of_a_folder_are_opened_in_few_reads(tmp_path):
    """Each was read a dozen times, most of it in vain."""
    path = saved(FOLDER, tmp_path)
    with counted_reads() as reads:
        inspect_checkpoint(path)
    assert len(reads) <= 20
    assert reads.nbytes <= 1.01 * sum(file.stat().st_size for file in path.iterdir())


NOT_IMPORTED = (
    "pickles.reader", "pickles.writer", "objects.pickled_modules", "tree.modules",
    "tensors.decoding", "tensors.gguf_blocks", "io.inflate", "io.staging", "io.destination",
    "io.stream", "formats.zip_archive", "formats.torch_zip",
)  # fmt: skip
"""What a safetensors file has no need of. Importing is nearly all of what a small file costs."""


def test_a_file_without_pickles_is_opened_without_what_reads_them(tmp_path):
    path = saved("safetensors", tmp_path, 2)
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from ckptconv.inspect import inspection, report; "
            "from ckptconv.formats.registry import open_certain; "
            f"open_certain({str(path)!r}).close(); print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {name.removeprefix("ckptconv.") for name in told.stdout.split()}
    assert "formats.safetensors" in imported
    assert imported.isdisjoint(NOT_IMPORTED)


def test_one_walk_tells_what_there_is_to_do(tmp_path):
    """The rest of an opening goes by what that walk found: ranks, old tensors, whole modules."""
    path = saved("zip", tmp_path, 3)
    with patch.object(registry, "calls_of", Mock(side_effect=registry.calls_of)) as walked:
        open_checkpoint(path).close()
    assert walked.call_count == 1


# -------------------------------------------------------------------------------- what is held back


def forged(folder: Path, kind: str) -> Path:
    """A file whose second storage has another name, or another size, where it lies than where it is
    told of.
    """
    path = saved(kind, folder, 3)
    if kind == FOLDER:
        return forged_item(path)
    raw = bytearray(path.read_bytes())
    with open_checkpoint(path) as checkpoint:
        at = dict(checkpoint.tensors())["layers.1.weight"].storage.offset
    if kind == "zip":
        at = raw.rindex(b"data/1", 0, at)
        raw[at : at + 6] = b"data/7"
    else:
        raw[at - 8 : at] = (5).to_bytes(8, "little")
    path.write_bytes(raw)
    return path


def forged_item(folder: Path) -> Path:
    """The folder, the second item of it with a payload under another name."""
    [file] = folder.glob("*.distcp")
    first, second, third = file.read_bytes().split(b"PK\5\6", 2)
    file.write_bytes(b"PK\5\6".join([first, second.replace(b"data/0", b"data/7", 1), third]))
    return folder


SAID = {
    "zip": "another name than the directory",
    FOLDER: r"layers\.1\.weight \(archive/data/0\): its local header has another name",
    "legacy": "has 5 elements where the pickle says",
}


def read_values(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        for _, ref in checkpoint.tensors():
            for _ in iter_chunks(ref):
                pass


def reread(path: Path) -> None:
    convert_checkpoint(path, path.with_name("out.safetensors"))


USES: dict[str, Callable[[Path], object]] = {
    "converts": reread,
    "loads": lambda path: load_portable(path, mmap=False),
    "maps": lambda path: load_portable(path, mmap=True),
    "compares": lambda path: diff_checkpoints(path, path),
    "inspects": inspect_checkpoint,
    "reads values": read_values,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", SAID)
def test_a_payload_under_another_name_is_used_by_nobody(kind, use, tmp_path):
    path = forged(tmp_path, kind)
    with pytest.raises(MalformedCheckpoint, match=SAID[kind]) as caught:
        USES[use](path)
    assert caught.value.path is not None and caught.value.where
    assert caught.value.path.startswith(str(path))
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("kind", SAID)
def test_doctor_tells_of_it(kind, tmp_path):
    found = diagnose(forged(tmp_path, kind))
    assert any(re.search(SAID[kind], str(finding)) for finding in found.findings)


# ---------------------------------------------------------- archives that torch did not lay out


def repacked(path: Path, *, padding: int = 0, gap: bytes = b"") -> Path:
    """The records of an archive under local headers of python's own, with bytes in their extra
    field, and others behind each payload.
    """
    out = path.with_name("repacked.pt")
    directory, at, count = b"", 0, 0
    with zipfile.ZipFile(path) as archive, out.open("wb") as file:
        for info in archive.infolist():
            name, payload = info.filename.encode(), archive.read(info)
            extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding if padding else b""
            numbers = (info.CRC, len(payload), len(payload), len(name))
            file.write(struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, *numbers, len(extra)))
            file.write(name + extra + payload + gap)
            directory += struct.pack(
                "<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, *numbers, 0, 0, 0, 0, 0, at
            )
            directory += name
            at, count = file.tell(), count + 1
        end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), at, 0)
        file.write(directory + end)
    return out


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(
    "layout", [{}, {"padding": 7}, {"gap": b"between"}, {"padding": 3, "gap": b"x"}]
)
def test_payloads_are_found_wherever_an_archive_has_them(layout, mmap, tmp_path):
    path = repacked(saved("zip", tmp_path, 5), **layout)
    found = load_portable(path, mmap=mmap)
    assert {key: value.unique().tolist() for key, value in found.items()} == {
        f"layers.{number}.weight": [float(number)] for number in range(5)
    }
    assert convert_checkpoint(path, tmp_path / "out.pt", verify=True).verified == 5
    assert diff_checkpoints(path, tmp_path / "out.pt").same


def test_a_local_header_that_reaches_into_the_next_record_is_an_overlap(tmp_path):
    path = saved("zip", tmp_path, 3)
    raw = bytearray(path.read_bytes())
    header = raw.rindex(b"PK\3\4", 0, raw.rindex(b"data/1", 0, raw.index(b"PK\1\2")))
    raw[header + 28 : header + 30] = struct.pack("<H", 900)
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="data/2: overlaps the record before it"):
        convert_checkpoint(path, tmp_path / "out.pt")


@pytest.mark.parametrize("kind", [*KINDS, FOLDER])
def test_what_is_read_after_the_checkpoint_was_closed_says_so(kind, tmp_path):
    path = saved(kind, tmp_path, 3)
    with open_checkpoint(path) as checkpoint:
        ref = dict(checkpoint.tensors())["layers.1.weight"]
        ref.storage.source.read(ref.storage.offset, 10)
        plan = plan_conversion(checkpoint, tmp_path / "out.safetensors")
    source = ref.storage.source
    for read in (
        lambda: execute_plan(plan),
        lambda: source.read(ref.storage.offset, 10),
        lambda: source.read_into(ref.storage.offset, memoryview(bytearray(10))),
        lambda: [*iter_chunks(ref)],
    ):
        with pytest.raises(CheckpointError, match="was closed before it was read"):
            read()
    assert not (tmp_path / "out.safetensors").exists()


def test_a_foretold_file_tells_nothing_of_holes(tmp_path):
    zeros = torch.zeros(1 << 20)
    zeros[-1] = 1
    dcp.save({"w": zeros}, checkpoint_id=tmp_path / "in", no_dist=True)
    with open_checkpoint(tmp_path / "in") as checkpoint:
        source = dict(checkpoint.tensors())["w"].storage.source
        with patch.object(FileSource, "data_from", lambda self, offset: self.size):
            assert source.data_from(100) == 100


def test_what_is_foreseen_of_a_file_is_asked_of_the_disk_at_once(tmp_path):
    """Only asked: what is read is the same, whatever the places."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 256)
    asked: list[tuple[int, int]] = []
    with patch.object(platforms._os, "posix_fadvise", lambda _, *run: asked.append(run[:2])):
        source = FileSource(path)
        source.foresee([(256, 4)])
        source.foresee([(256, 4), (512, 4)])
    assert asked == [(256, 4), (512, 4)]
    source.foresee([(1 << 70, 4), (-5, 4), (512, 4)])
    assert source.read_many([(256, 2), (513, 2)]) == [b"\0\1", b"\1\2"]
    source.close()
    source.foresee([(256, 4), (512, 4)])
