"""Files that the caller has opened, `io.BytesIO` among them, wherever a path may stand: beside
`torch.load` and `torch.save`, from the same places on, and left open.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import os
import pickle
import tempfile
import threading
import time
import zipfile

import pytest
import torch
from safetensors.torch import load as load_bytes

import ckptconv
from ckptconv import (
    CheckpointError,
    Job,
    MalformedCheckpoint,
    OptionRefused,
    OutputRefused,
    average_checkpoints,
    convert_checkpoint,
    convert_many,
    diagnose_checkpoint,
    diff_checkpoints,
    inspect_checkpoint,
    load_into,
    load_portable,
    merge_checkpoints,
    open_checkpoint,
    save_portable,
    scan_checkpoint,
    stats_checkpoint,
)
from ckptconv.io.open_files import StandardInput

AT = 13
"""Where a checkpoint begins in its file, as others may stand before it."""


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"net.weight": torch.randn(40, 5), "net.bias": torch.randn(5).half()}


def raw(*, is_zip: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensors(), buffer, _use_new_zipfile_serialization=is_zip)
    return buffer.getvalue()


def in_memory(content, at, folder):
    return io.BytesIO(content)


def on_disk(content, at, folder):
    (folder / "m.pt").write_bytes(content)
    return (folder / "m.pt").open("rb")


def being_written(content, at, folder):
    file = (folder / "m.pt").open("w+b")
    file.write(content)  # some of it is still in Python's buffer
    return file


def unbuffered(content, at, folder):
    (folder / "m.pt").write_bytes(content)
    return (folder / "m.pt").open("rb", buffering=0)


def spooled(content, at, folder):
    file = tempfile.SpooledTemporaryFile()  # noqa: SIM115
    file.write(content)
    return file


def in_gzip(content, at, folder):
    (folder / "m.gz").write_bytes(gzip.compress(content))
    return gzip.open(folder / "m.gz")


def in_bzip2(content, at, folder):
    (folder / "m.bz2").write_bytes(bz2.compress(content))
    return bz2.open(folder / "m.bz2")


def in_zip(content, at, folder):
    with zipfile.ZipFile(folder / "m.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner", content)
    return zipfile.ZipFile(folder / "m.zip").open("inner")


KINDS = [in_memory, on_disk, being_written, unbuffered, spooled, in_gzip, in_bzip2, in_zip]


@pytest.mark.parametrize("at", [0, AT])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_is_read_from_where_it_is_as_torch_reads_it(kind, is_zip, at, tmp_path):
    content = bytes(at) + raw(is_zip=is_zip)
    theirs = io.BytesIO(content)  # of bz2 torch reads the compressed bytes
    theirs.seek(at)
    expected = torch.load(theirs)
    with kind(content, at, tmp_path) as file:
        file.seek(at)
        for _ in ("once", "and once more, for it is left where it was"):
            loaded = load_portable(file)
            assert file.tell() == at and not file.closed
            assert loaded.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(loaded[key], value) and loaded[key].dtype is value.dtype
        with open_checkpoint(file) as checkpoint:
            file.seek(1)  # what is open keeps its own place
            assert torch.equal(checkpoint["net.weight"][3:5].torch(), expected["net.weight"][3:5])
            assert file.tell() == 1
        assert not file.closed


def test_all_that_read_take_one(tmp_path):
    (tmp_path / "m.pt").write_bytes(raw())
    with (tmp_path / "m.pt").open("rb") as file:
        buffer = io.BytesIO(raw())
        assert inspect_checkpoint(buffer).tensors == inspect_checkpoint(file).tensors == 2
        assert scan_checkpoint(buffer).level == scan_checkpoint(file).level == "plain"
        assert diff_checkpoints(buffer, file).same and diff_checkpoints(file, buffer).same
        assert diagnose_checkpoint(buffer).loads and diagnose_checkpoint(file).loads
        for source in (buffer, file):
            means = [item.statistics.mean for item in stats_checkpoint(source).tensors]
            assert means == pytest.approx(
                [float(one.double().mean()) for one in tensors().values()]
            )
            model = torch.nn.ModuleDict({"net": torch.nn.Linear(40, 5)})
            model["net"].weight = torch.nn.Parameter(torch.zeros(40, 5))
            assert load_into(model, source).fits
            assert torch.equal(model["net"].weight, tensors()["net.weight"])


@pytest.mark.parametrize("verify", [False, True])
def test_it_is_written_where_it_is_as_torch_writes_it(verify, tmp_path):
    ours, theirs = io.BytesIO(b"head"), io.BytesIO(b"head")
    for file in (ours, theirs):
        file.seek(4)
    convert_checkpoint(io.BytesIO(raw()), ours, verify=verify)
    torch.save(tensors(), theirs)
    for file in (ours, theirs):
        assert file.getvalue()[:4] == b"head" and file.tell() == len(file.getvalue())
        file.seek(4)
        for key, value in torch.load(file).items():
            assert torch.equal(value, tensors()[key])


@pytest.mark.parametrize("size", [0, 3_000_000])
def test_the_bytes_are_those_of_a_file_at_a_path(size, tmp_path):
    found = {**tensors(), "large": torch.randn(size)}
    save_portable(found, tmp_path / "m.safetensors")
    buffer = io.BytesIO()
    save_portable(found, buffer, to="safetensors")
    assert buffer.getvalue() == (tmp_path / "m.safetensors").read_bytes()
    assert torch.equal(load_bytes(buffer.getvalue())["large"], found["large"])
    with (tmp_path / "n.safetensors").open("wb") as file:  # its name says the format
        save_portable(found, file)
    assert (tmp_path / "n.safetensors").read_bytes() == buffer.getvalue()


def test_several_are_merged_and_averaged_also_from_a_generator():
    mean, both = io.BytesIO(), io.BytesIO()
    average_checkpoints((io.BytesIO(raw()) for _ in range(3)), mean, weights=iter([1, 1, 2]))
    assert torch.equal(load_portable(mean_of(mean))["net.weight"], tensors()["net.weight"])
    first, second = io.BytesIO(raw()), io.BytesIO(raw())
    merge_checkpoints([first, second], both, prefix={second: "b."})
    assert {*load_portable(mean_of(both))} == {*tensors(), *(f"b.{key}" for key in tensors())}


def mean_of(buffer: io.BytesIO) -> io.BytesIO:
    buffer.seek(0)
    return buffer


def test_a_file_may_be_read_and_written_at_once(tmp_path):
    (tmp_path / "m.pt").write_bytes(raw())
    with (tmp_path / "m.pt").open("r+b") as file:
        convert_checkpoint(file, file, dtype="f64")
        file.truncate()
    assert torch.load(tmp_path / "m.pt")["net.weight"].dtype is torch.float64


def test_two_checkpoints_in_one_file_are_not_taken_for_one():
    """torch reads legacy files one after the other: the second is lost to whoever reads one."""
    for is_zip in (True, False):
        with pytest.raises(MalformedCheckpoint):
            load_portable(io.BytesIO(raw(is_zip=is_zip) * 2))


def test_a_change_while_it_is_open_does_not_mix_old_and_new(tmp_path):
    buffer = io.BytesIO(raw())
    with open_checkpoint(buffer) as checkpoint:
        buffer.write(bytes(len(raw())))
        assert torch.equal(checkpoint["net.weight"].torch(), tensors()["net.weight"])
    with being_written(raw(), 0, tmp_path) as file:
        file.seek(0)
        with open_checkpoint(file) as checkpoint:
            file.seek(0, 2)
            file.write(b"more")
            file.flush()
            with pytest.raises(MalformedCheckpoint, match="changed"):
                checkpoint["net.weight"].torch()


class Pipe(io.BytesIO):
    def seekable(self):
        return False


def closed() -> io.BytesIO:
    file = io.BytesIO(raw())
    file.close()
    return file


def at_its_end() -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensors(), file)
    return file


UNREADABLE = {
    "text": (lambda folder: io.StringIO("x"), r"is opened as text; open it with open\(path, 'rb'"),
    "write-only": (lambda folder: (folder / "a").open("wb"), "is not open for reading"),
    "pipe": (lambda folder: Pipe(raw()), r"to and fro; give io.BytesIO\(file.read"),
    "closed": (lambda folder: closed(), "closed file"),
    "at its end": (lambda folder: at_its_end(), r"at its end.*; seek\(0\)"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_says_what_to_do(name, tmp_path):
    make, match = UNREADABLE[name]
    for call in (load_portable, open_checkpoint, stats_checkpoint, inspect_checkpoint):
        file = make(tmp_path)
        with pytest.raises(CheckpointError, match=match):
            call(file)
        file.close()


UNWRITABLE = {
    "text": (lambda folder: io.StringIO("x"), "is opened as text"),
    "read-only": (lambda folder: on_disk(raw(), 0, folder), "is not open for writing"),
    "closed": (lambda folder: closed(), "is closed"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_cannot_be_written_says_what_to_do(name, tmp_path):
    make, match = UNWRITABLE[name]
    file = make(tmp_path)
    for call in (
        lambda: save_portable(tensors(), file),
        lambda: convert_checkpoint(io.BytesIO(raw()), file),
    ):
        with pytest.raises(OutputRefused, match=match):
            call()
    file.close()


@pytest.mark.parametrize(
    "options", [{"to": "dcp"}, {"max_shard_size": "1KB"}, {"with_files": True}]
)
def test_several_files_do_not_go_into_one(options):
    file = io.BytesIO()
    with pytest.raises(OutputRefused, match="several files are to be written; name a folder"):
        convert_checkpoint(io.BytesIO(raw()), file, **options)
    assert file.getvalue() == b""


def test_of_an_output_that_fails_nothing_is_written():
    file = io.BytesIO(b"old")
    damaged = bytearray(raw())
    at = damaged.index(tensors()["net.weight"].numpy().tobytes())
    damaged[at] ^= 1
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        convert_checkpoint(io.BytesIO(damaged), file)
    assert file.getvalue() == b"old"


class Full(io.BytesIO):
    def write(self, data):
        raise OSError(28, "No space left on device")


def test_a_file_that_takes_no_bytes_is_named():
    with pytest.raises(OutputRefused, match=r"^Full at 0x\w+: cannot be written: .*No space"):
        save_portable(tensors(), Full())


@pytest.mark.skipif(not hasattr(os, "set_blocking"), reason="no pipe that does not wait")
def test_a_pipe_that_does_not_wait_is_not_left_with_a_part_that_looks_whole():
    content = io.BytesIO()
    torch.save({"w": torch.zeros(1 << 17)}, content)
    content.seek(0)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # a raw file that would have to wait takes nothing, and says so by None
    refused = pytest.raises(OutputRefused, match=r"cannot be written: .* it may hold a part")
    with open(reading, "rb"), open(writing, "wb", buffering=0) as file, refused:
        convert_checkpoint(content, file)


@pytest.mark.skipif(not hasattr(os, "set_blocking"), reason="no pipe that does not wait")
def test_a_standard_input_that_does_not_wait_is_waited_for(monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setattr("ckptconv.io.open_files._STDIN", reading)

    def write_late() -> None:
        with open(writing, "wb") as file:
            time.sleep(0.1)
            file.write(b"late")

    thread = threading.Thread(target=write_late)
    thread.start()
    with open(reading, "rb"), contextlib.closing(StandardInput().open()) as source:
        assert source.read(0, source.size) == b"late"
    thread.join()


def test_plans_and_results_are_pickled_without_the_file():
    result = convert_checkpoint(io.BytesIO(raw()), io.BytesIO())
    again = pickle.loads(pickle.dumps(result))
    assert str(again.plan.output) == str(result.plan.output)
    assert str(again.plan.source).startswith("BytesIO at 0x")


def test_a_batch_knows_files_by_their_names(tmp_path):
    (tmp_path / "m.pt").write_bytes(raw())
    with pytest.raises(OptionRefused, match="is an open file, and a batch knows its files by"):
        list(convert_many([Job(io.BytesIO(raw()), tmp_path / "o.pt")]))
    with pytest.raises(OptionRefused, match="is an open file, and a batch knows its files by"):
        list(convert_many([Job(tmp_path / "m.pt", io.BytesIO())]))
    assert Job(io.BytesIO(raw()), tmp_path / "o.pt").run().plan.to == "torch"


def test_ranks_and_pages_take_one_too(tmp_path):
    page = ckptconv.report_checkpoint(io.BytesIO(raw()), tmp_path / "p.html", values=True)
    assert page.tensors == 2
    page = ckptconv.report_checkpoint(io.BytesIO(raw()), out := io.BytesIO())
    assert out.getvalue().startswith(b"<!") and len(out.getvalue()) == page.nbytes
