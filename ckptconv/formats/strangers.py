"""What a file or a folder is that is not a checkpoint."""

from __future__ import annotations

import fnmatch
import re
from pathlib import PurePath
from typing import NamedTuple

from ckptconv.io.location import Location
from ckptconv.io.source import Source
from ckptconv.support.errors import ErrorCode, UnsupportedCheckpoint


class Stranger(NamedTuple):
    """What a file is that starts with `magic` at byte `at`, and what its owner can do.

    `unpacker` is the program whose ``-c`` prints what is packed in it.
    """

    at: int
    magic: bytes
    what: str
    hint: str | None = None
    is_packed: bool = False
    unpacker: str = ""


STRANGERS: tuple[Stranger, ...] = (
    Stranger(0, b"version https://git-lfs", "is a git-LFS pointer, not the file itself",
        "run: git lfs pull"),
    Stranger(0, b"\x1f\x8b\x08", "is gzip-compressed", "unpack it first: gunzip", True, "gunzip"),
    Stranger(0, b"BZh", "is bzip2-compressed", "unpack it first: bunzip2", True,
        "bunzip2"),
    Stranger(0, b"\xfd7zXZ\0", "is xz-compressed", "unpack it first: unxz", True, "unxz"),
    Stranger(0, b"\x04\x22\x4d\x18", "is lz4-compressed", "unpack it first: unlz4", True),
    Stranger(0, b"\x28\xb5\x2f\xfd", "is zstd-compressed", "unpack it first: unzstd", True,
        "unzstd"),
    Stranger(0, b"7z\xbc\xaf\x27\x1c", "is a 7z archive", "unpack it first", True),
    Stranger(0, b"Rar!", "is a rar archive", "unpack it first", True),
    Stranger(0, b"PK\5\6", "is an empty zip archive"),
    Stranger(0, b"GGUF", "is a GGUF model (llama.cpp), not a PyTorch checkpoint"),
    Stranger(0, b"\x89HDF\r\n\x1a\n", "is an HDF5 file (Keras), not a PyTorch checkpoint"),
    Stranger(0, b"\x93NUMPY", "is a numpy array file, not a PyTorch checkpoint",
        "numpy.savez makes an archive of it, which is read: np.savez('a.npz', a=np.load('a.npy'))"),
    Stranger(4, b"TFL3", "is a TensorFlow Lite model, not a PyTorch checkpoint"),
    Stranger(0, b"model_checkpoint_path:", "is the list of a TensorFlow checkpoint, not a PyTorch "
                                           "checkpoint"),
    Stranger(0, b"\x08\x01\x12", "is a TensorFlow SavedModel, not a PyTorch checkpoint"),
    Stranger(0, b"\x08", "looks like an ONNX or other protobuf model, not a PyTorch checkpoint"),
)  # fmt: skip
"""What people meet under a checkpoint's name; the first that matches is named in the error."""


_FOREIGN_FOLDERS = (
    ("saved_model.pb", "is a TensorFlow SavedModel"),
    ("*.data-?????-of-?????", "holds TensorFlow checkpoints"),
)
"""Files of which a folder is told to be another program's, and what it is."""


def refuse_foreign_folder(folder: Location, *, is_checkpoint: bool) -> None:
    """Raise `UnsupportedCheckpoint` for a folder of another program, or one that lacks what says
    what is in it.
    """
    names = folder.names()
    for pattern, what in _FOREIGN_FOLDERS:
        if fnmatch.filter(names, pattern):
            raise UnsupportedCheckpoint(f"{what}, not a PyTorch checkpoint", path=folder)
    if any(PurePath(name).suffix == ".distcp" for name in names) and not is_checkpoint:
        what = (
            "holds the files of a DCP checkpoint, but not the .metadata that says what is in them"
        )
        raise UnsupportedCheckpoint(
            what, path=folder, hint="copy the whole folder, hidden files too"
        )


_TENSORFLOW_SHARD = re.compile(r".+\.data-\d{5}-of-\d{5}").fullmatch
"""The names of the files that hold a TensorFlow checkpoint's values, one behind another and without
any mark.
"""


# tensorflow/core/lib/io/format.h: kTableMagicNumber
_TABLE_END = (0xDB4775248B80FB57).to_bytes(8, "little")


def stranger_of(head: bytes) -> Stranger | None:
    """What a file is known to be that starts with `head`, if it is any."""
    return next((item for item in STRANGERS if head[item.at :].startswith(item.magic)), None)


def stranger(source: Source, head: bytes) -> UnsupportedCheckpoint:
    """The error that says what a file is that begins with `head`, and what to do."""
    if not head:
        return UnsupportedCheckpoint(
            "is empty (0 bytes)", path=source.path, hint="fetch or save it again"
        )
    has_its_name = _TENSORFLOW_SHARD(source.path.name) is not None
    known = stranger_of(head)
    if known is not None and not (has_its_name and len(known.magic) == 1):
        packed: ErrorCode = "compressed" if known.unpacker else ""
        return UnsupportedCheckpoint(known.what, path=source.path, hint=known.hint, code=packed)
    if source.read(max(0, source.size - 8), min(8, source.size)) == _TABLE_END:
        return UnsupportedCheckpoint(
            "is the index of a TensorFlow checkpoint, not a PyTorch checkpoint", path=source.path
        )
    if has_its_name:
        return UnsupportedCheckpoint(
            "is a part of a TensorFlow checkpoint, not a PyTorch checkpoint", path=source.path
        )
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return UnsupportedCheckpoint(
            "is a web page, not a checkpoint",
            path=source.path,
            hint="the download failed or needs a login; fetch it again",
        )
    if all(byte >= 32 or byte in b"\t\n\r" for byte in head):
        kind = "a JSON text" if text.startswith((b"{", b"[")) else "a text file"
        return UnsupportedCheckpoint(
            f"is {kind}, not a checkpoint ({_beginning(head)})", path=source.path, hint=_TEXT_HINT
        )
    return UnsupportedCheckpoint(
        "is not a checkpoint of a known kind", path=source.path, hint=_UNKNOWN_HINT
    )


def _beginning(head: bytes) -> str:
    """The first words of a text, which often say what went wrong where it was fetched."""
    line = " ".join(head.decode("latin-1").split())
    return f"it begins: {line[:_SHOWN_OF_TEXT]}" + "…" * (len(line) > _SHOWN_OF_TEXT)


_SHOWN_OF_TEXT = 40


_TEXT_HINT = (
    "if it was downloaded, an error was saved in its place: fetch it again; otherwise name the "
    "file with the weights"
)


_UNKNOWN_HINT = (
    "check that it is complete and unpacked, and which program wrote it; docs/containers.md "
    "lists what is read"
)
