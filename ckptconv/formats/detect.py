"""Which container a file is, by its first bytes and never by its name; and what a file is that is no checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from ckptconv.checkpoint import Checkpoint
from ckptconv.collector import collector_paused
from ckptconv.errors import CheckpointError, UnsupportedCheckpoint
from ckptconv.files import FileSource, Source
from ckptconv.formats.safetensors import is_safetensors, open_safetensors
from ckptconv.formats.torch_zip import is_torch_zip, open_torch_zip

_HEAD = 512


class Format(NamedTuple):
    """A container: whether a file's first bytes are its, and how it is opened."""

    matches: Callable[[bytes], bool]
    open: Callable[[Source], Checkpoint]


FORMATS: tuple[Format, ...] = (
    Format(is_torch_zip, open_torch_zip),
    Format(is_safetensors, open_safetensors),
)
"""The containers that are read, in the order in which they are tried."""


class Stranger(NamedTuple):
    """What a file is that starts with `magic` at byte `at`, and what its owner can do."""

    at: int
    magic: bytes
    what: str
    hint: str | None = None


_RESAVE = "torch.save(torch.load(PATH, map_location='cpu'), OUT) with a current torch makes a file that is read"
STRANGERS: tuple[Stranger, ...] = (
    Stranger(0, b"version https://git-lfs", "is a git-LFS pointer, not the file itself", "run: git lfs pull"),
    Stranger(0, b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e",
             "is a legacy torch file (before torch 1.6), which is not yet read", _RESAVE),
    Stranger(257, b"ustar", "is a tar file (torch before 0.1.11, or any archive), which is not yet read",
             "if it is an ordinary archive, unpack it and name the file inside"),
    Stranger(0, b"\x80", "is a bare pickle, which is not yet read", _RESAVE),
    Stranger(0, b"\x1f\x8b", "is gzip-compressed", "unpack it first: gunzip"),
    Stranger(0, b"BZh", "is bzip2-compressed", "unpack it first: bunzip2"),
    Stranger(0, b"\xfd7zXZ\0", "is xz-compressed", "unpack it first: unxz"),
    Stranger(0, b"\x28\xb5\x2f\xfd", "is zstd-compressed", "unpack it first: unzstd"),
    Stranger(0, b"7z\xbc\xaf\x27\x1c", "is a 7z archive", "unpack it first"),
    Stranger(0, b"Rar!", "is a rar archive", "unpack it first"),
    Stranger(0, b"PK\5\6", "is an empty zip archive"),
    Stranger(0, b"GGUF", "is a GGUF model (llama.cpp), not a PyTorch checkpoint"),
    Stranger(0, b"\x89HDF\r\n\x1a\n", "is an HDF5 file (Keras), not a PyTorch checkpoint"),
    Stranger(0, b"\x93NUMPY", "is a numpy array file, not a PyTorch checkpoint"),
    Stranger(0, b"\x08", "looks like an ONNX or other protobuf model, not a PyTorch checkpoint"),
)  # fmt: skip
"""What people meet under a checkpoint's name; the first that matches is named in the error."""


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: read its index, and none of its tensors' bytes.

    Use the result as a context manager, or close it. Raises `UnsupportedCheckpoint` when the file is something else (and
    says what), `MalformedCheckpoint` or `LimitExceeded` when it contradicts itself.
    """
    source = FileSource(path)
    try:
        head = source.read(0, min(_HEAD, source.size))
        for candidate in FORMATS:
            if candidate.matches(head):
                with collector_paused():
                    return candidate.open(source)
        raise _stranger(source, head)
    except CheckpointError as error:
        source.close()
        raise error.at(path=path) from error.__cause__
    except BaseException:
        source.close()
        raise


def _stranger(source: Source, head: bytes) -> UnsupportedCheckpoint:
    if not head:
        return UnsupportedCheckpoint("is empty (0 bytes)", path=source.path, hint="fetch or save it again")
    for stranger in STRANGERS:
        if head[stranger.at :].startswith(stranger.magic):
            return UnsupportedCheckpoint(stranger.what, path=source.path, hint=stranger.hint)
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return UnsupportedCheckpoint(
            "is a web page, not a checkpoint",
            path=source.path,
            hint="the download failed or needs a login; fetch it again",
        )
    if all(byte >= 32 or byte in b"\t\n\r" for byte in head):
        return UnsupportedCheckpoint("is a text file, not a checkpoint", path=source.path)
    return UnsupportedCheckpoint("is no checkpoint that is known here", path=source.path)
