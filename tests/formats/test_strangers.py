"""What is not a checkpoint: the real program says in one line what it is, whatever its name, and
leaves nothing behind.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptconv import UnsupportedCheckpoint, open_checkpoint
from helpers.program import PROGRAM, SAMPLES, assert_one_error, run, run_process

SAMPLE = SAMPLES / "ddp_cuda3.pt"
ZIP = SAMPLE.read_bytes()
SECONDS = 10.0


def archive(**records: bytes) -> bytes:
    """A stored zip archive; ``__`` in a name stands for a slash, ``_`` before the end for a dot."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as written:
        for name, payload in records.items():
            written.writestr(name.replace("__", "/").replace("_", "."), payload)
    return out.getvalue()


def tar(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as written:
        for name, payload in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            written.addfile(info, io.BytesIO(payload))
    return out.getvalue()


def safetensors(length: int | None = None) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(16)


LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid "
    b"sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 12345\n"
)
NPY = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }".ljust(
    128
) + bytes(16)
HDF = b"\x89HDF\r\n\x1a\n" + bytes(504)
ONNX = (
    b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\x90\x01\n\x1d\n\x05input\n"
    b"\x06weight\x12\x06output\x1a\x04Gemm"
)

STRANGERS = {
    "empty.pt": (b"", "is empty"),
    "text.pt": (b"epoch 1: loss 0.5\nepoch 2: loss 0.25\n", "is a text file"),
    "french.pt": ("\u00e9poque 1\u00a0: perte 0,5\n".encode(), "is a text file"),
    "config.json": (b'{"hidden_size": 768}', "is a JSON text"),
    "pointer.safetensors": (LFS, "is a git-LFS pointer"),
    "page.pt": (
        b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>",
        "is a web page",
    ),
    "plain_page.pt": (b"\r\n  <html><body>Please log in</body></html>", "is a web page"),
    "denied.bin": (
        b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
        "is a web page",
    ),
    "model.pt.zst": (b"\x28\xb5\x2f\xfd\x04\x00" + bytes(40), "is zstd-compressed"),
    "model.7z": (b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(40), "is a 7z archive"),
    "model.rar": (b"Rar!\x1a\x07\x01\x00" + bytes(40), "is a rar archive"),
    "model.h5": (b"\x89HDF\r\n\x1a\n" + bytes(504), "is an HDF5 file"),
    "model.onnx": (ONNX, "ONNX"),
    "model.tflite": (b"\x1c\0\0\0TFL3" + bytes(40), "is a TensorFlow Lite model"),
    "saved_model.pb": (b"\x08\x01\x12\xf4\x0f\x0a\x10" + bytes(40), "is a TensorFlow SavedModel"),
    "checkpoint": (b'model_checkpoint_path: "ckpt-3"\n', "is the list of a TensorFlow checkpoint"),
    "ckpt-3.index": (
        bytes(60) + bytes.fromhex("57fb808b247547db"),
        "is the index of a TensorFlow checkpoint",
    ),
    "model.keras": (
        archive(metadata_json=b"{}", config_json=b"{}", model_weights_h5=HDF),
        "is a Keras model",
    ),
    "array.npy": (NPY, "is a numpy array file"),
    "documents.zip": (archive(notes_txt=b"hello"), "without a data.pkl"),
    "no_records.zip": (archive(), "is an empty zip archive"),
    "script.pt": (
        archive(net__data_pkl=b"N.", net__constants_pkl=b"N.", net__version=b"3\n"),
        "is a TorchScript archive",
    ),
    "old_script.pt": (
        archive(net__model_json=b"{}", net__version=b"1\n"),
        "is a TorchScript archive",
    ),
    "pickle.pkl": (
        pickle.dumps({"w": [1.0, 2.0]}, protocol=4),
        "is a bare pickle (a dict) without tensors",
    ),
    "source.tar": (tar(README=b"hello", LICENSE=b"free"), "is a tar file"),
    "noise.pt": (bytes(range(127, 256)) + bytes(400), "is not a checkpoint of a known kind"),
    "zeros.pt": (bytes(4096), "is not a checkpoint of a known kind"),
}
"""File name → (content, what must be said of it)."""

CUTS = {
    "after_magic": 4,
    "in_first_header": 20,
    "in_pickle": 300,
    "half": len(ZIP) // 2,
    "in_directory": len(ZIP) - 400,
    "before_end_record": len(ZIP) - 22,
    "in_end_record": len(ZIP) - 10,
    "last_byte": len(ZIP) - 1,
}


def refused(source: Path | str, cwd: Path, *, limit: int = 20) -> str:
    """The error line, which converting and inspecting have in common."""
    before = sorted(cwd.iterdir())
    commands = (("convert", source, "out.pt"), ("inspect", source))
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda arguments: run(*arguments, cwd=cwd, limit=limit), commands))
    lines = {assert_one_error(done) for done in runs}
    assert len(lines) == 1, lines
    assert max(done.seconds for done in runs) < SECONDS
    assert sorted(cwd.iterdir()) == before
    return lines.pop()


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_named(name, tmp_path):
    content, said = STRANGERS[name]
    (tmp_path / name).write_bytes(content)
    line = refused(name, tmp_path)
    assert line.startswith(f"error: {name}: ")
    assert said in line


@pytest.mark.parametrize("cut", CUTS)
def test_a_truncated_torch_file_is_said_to_be_cut_off(cut, tmp_path):
    (tmp_path / "cut.pt").write_bytes(ZIP[: CUTS[cut]])
    line = refused("cut.pt", tmp_path)
    assert line.startswith("error: cut.pt: ")
    assert "cut off" in line


def test_a_torch_file_with_something_behind_it_is_refused(tmp_path):
    (tmp_path / "longer.pt").write_bytes(ZIP + b"\n")
    assert "appended" in refused("longer.pt", tmp_path)


@pytest.mark.parametrize("length", [9, 20, 60, len(safetensors()) - 16, len(safetensors()) - 1])
def test_a_truncated_safetensors_file_is_said_to_be_cut_off(length, tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(safetensors()[:length])
    line = refused("cut.safetensors", tmp_path)
    assert line.startswith("error: cut.safetensors: ")
    assert "cut off" in line


@pytest.mark.parametrize("length", [1, 7, 8])
def test_the_first_bytes_of_a_safetensors_file_are_no_checkpoint(length, tmp_path):
    (tmp_path / "start.safetensors").write_bytes(safetensors()[:length])
    assert refused("start.safetensors", tmp_path).startswith("error: start.safetensors: ")


def test_what_a_file_is_does_not_depend_on_its_name(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(ZIP)
    (tmp_path / "model.pt").write_bytes(safetensors())
    for name in ("model.safetensors", "model.pt"):
        assert run("convert", name, f"out-{name}", "--quiet", cwd=tmp_path).exit == 0


def test_a_missing_file_is_named(tmp_path):
    assert refused("missing.pt", tmp_path).startswith("error: missing.pt: no such file")


def test_a_dangling_link_is_a_missing_file(tmp_path):
    (tmp_path / "link.pt").symlink_to("nowhere.pt")
    assert refused("link.pt", tmp_path).startswith("error: link.pt: no such file")


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "a.pt").symlink_to("b.pt")
    (tmp_path / "b.pt").symlink_to("a.pt")
    assert refused("a.pt", tmp_path).startswith("error: a.pt: ")


def test_a_folder_is_named(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    assert refused("checkpoint", tmp_path).startswith("error: checkpoint: is a folder")


@pytest.mark.parametrize("name", ["saved_model.pb", "ckpt-3.data-00000-of-00001"])
def test_a_folder_of_tensorflow_is_named(name, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_bytes(bytes(10))
    assert "TensorFlow" in refused("model", tmp_path)


def test_a_program_of_torch_export_is_named(tmp_path):
    torch = pytest.importorskip("torch")
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, tmp_path / "model.pt2")
    assert "is a pt2 archive (torch.export)" in refused("model.pt2", tmp_path)


def test_an_archive_of_torch_package_is_named(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.package import PackageExporter, PackageImporter

    for name in ("model.pkl", "data.pkl"):
        with PackageExporter(str(tmp_path / "model.pt")) as exporter:
            exporter.extern("torch.**")
            exporter.save_pickle("models", name, torch.nn.Linear(2, 2))
        said = refused("model.pt", tmp_path)
        assert "is a torch.package archive" in said and "PackageImporter" in said
    loaded = (
        PackageImporter(str(tmp_path / "model.pt")).load_pickle("models", "data.pkl").state_dict()
    )
    torch.save(loaded, tmp_path / "out.pt")  # as the hint says
    assert torch.load(tmp_path / "out.pt").keys() == {"weight", "bias"}


def test_a_path_through_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(ZIP)
    assert refused("file/model.pt", tmp_path).startswith("error: file/model.pt: ")


def test_a_name_that_is_too_long_is_refused(tmp_path):
    name = "n" * 300 + ".pt"
    assert refused(name, tmp_path).startswith(f"error: {name[:200]}")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    assert "is not a regular file but a pipe, socket or device" in refused("pipe.pt", tmp_path)


def test_a_device_is_refused(tmp_path):
    assert "is not a regular file but a pipe, socket or device" in refused("/dev/zero", tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    (tmp_path / "secret.pt").write_bytes(ZIP)
    (tmp_path / "secret.pt").chmod(0)
    assert "Permission denied" in refused("secret.pt", tmp_path)


@pytest.mark.parametrize("name", ["new\nline.pt", "esc\x1b[31m.pt", "\u202egnp.pt"])
def test_a_name_with_control_characters_is_escaped(name, tmp_path):
    (tmp_path / name).write_bytes(b"hello")
    line = refused(name, tmp_path)  # one printable line
    assert name.encode("unicode_escape").decode() in line


def test_a_name_that_is_no_text_is_escaped(tmp_path):
    name = os.fsdecode(b"caf\xe9.pt")
    (tmp_path / name).write_bytes(b"hello")
    assert "caf\\udce9.pt: is a text file" in refused(name, tmp_path)
    (tmp_path / name).write_bytes(ZIP)
    done = run("convert", name, "out.pt", "--json", cwd=tmp_path)
    assert done.exit == 0, done.err
    assert done.json()["source"]["path"] == "caf\\udce9.pt", (
        "half of a surrogate pair is not a character of JSON"
    )


def test_an_error_is_a_document_too_where_one_is_asked_for(tmp_path):
    (tmp_path / "page.pt").write_bytes(b"<html></html>")
    for arguments in (("convert", "page.pt", "out.pt"), ("inspect", "page.pt")):
        done = run(*arguments, "--json", cwd=tmp_path)
        assert done.exit == 1
        error = done.json()["error"]
        assert error["kind"] == "UnsupportedCheckpoint"
        assert error["path"] == "page.pt"
        assert error["what"] == "is a web page, not a checkpoint"
        assert done.err == f"error: {error['message']}\n"


USAGE = {
    "an unknown command": ("frobnicate",),
    "an unknown option": ("convert", "in.pt", "out.pt", "--frobnicate"),
    "no arguments": ("convert",),
    "one argument": ("strip-module", "in.pt"),
    "too many arguments": ("devices", "in.pt"),
    "an option without its value": ("convert", "in.pt", "out.pt", "--device"),
    "a format that is none": ("convert", "in.pt", "out.pt", "--to", "onnx"),
    "a device that is none": ("convert", "in.pt", "out.pt", "--device", "gpu"),
    "a device without values": ("add-module", "in.pt", "out.pt", "--device", "meta"),
    "a map that is none": ("convert", "in.pt", "out.pt", "--map-location", "cuda:3"),
    "a renaming that is none": ("convert", "in.pt", "out.pt", "--rename", "backbone."),
    "an integer dtype": ("convert", "in.pt", "out.pt", "--dtype", "int8"),
    "a depth that is not a number": ("inspect", "in.pt", "--depth", "deep"),
    "a key rule of another command": ("strip-module", "in.pt", "out.pt", "--keys", "keep"),
    "control characters": ("convert", "in.pt", "out.pt", "--frob\x1b[31m\nnicate"),
}


@pytest.mark.parametrize("what", USAGE)
def test_a_usage_error_is_one_line_and_exit_code_2(what, tmp_path):
    (tmp_path / "in.pt").write_bytes(ZIP)
    line = assert_one_error(run(*USAGE[what], cwd=tmp_path), code=2)
    assert "--help" in line
    assert len(line) < 400
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_without_a_command_the_help_is_shown(tmp_path):
    done = run(cwd=tmp_path)
    assert done.exit == 2
    assert "Traceback" not in done.err
    assert "\\n" not in done.out + done.err  # line breaks, not their escapes
    assert any(line.strip() == "Convert:" for line in (done.out + done.err).splitlines())


def test_the_program_runs_as_a_module_and_as_a_function(tmp_path):
    function = (
        *PROGRAM[:1],
        "-c",
        "import sys; sys.argv[0] = 'ckptconv'; from ckptconv.cli.main import main; main()",
    )
    outputs = {
        run_process("--version", cwd=tmp_path, command=command).out
        for command in (PROGRAM, function)
    }
    assert len(outputs) == 1
    assert outputs.pop().startswith("ckptconv ")


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"\x04\x22\x4d\x18", "compressed"),
        (b"\x28\xb5\x2f\xfd", "compressed"),
        (b"7z\xbc\xaf\x27\x1c", "compressed"),
        (b"\x89HDF\r\n\x1a\n", ""),
        (b"%PDF-1.7", ""),
    ],
)
def test_a_program_may_ask_whether_a_file_has_to_be_unpacked(head, code, tmp_path):
    (tmp_path / "in.pt").write_bytes(head + bytes(100))
    with pytest.raises(UnsupportedCheckpoint) as caught:
        open_checkpoint(tmp_path / "in.pt")
    assert caught.value.code == code
