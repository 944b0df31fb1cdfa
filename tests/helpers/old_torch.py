"""Writers of what old torch wrote, byte by byte: legacy files with views and python 2 pickles, tar
files, protocol 0 pickles.

Today's torch reads most of it, and is then the oracle; it writes none of it any more.
"""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = 0x1950A86A20F9469CFC6C


@dataclass(frozen=True)
class Name:
    """A class or function by its name, whether it is here or not."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """What calling `func` with `args` gives (`new`: its `__new__`), and, if there is one, the state
    that is set on it.
    """

    func: Any
    args: tuple[Any, ...] = ()
    state: Any = None
    new: bool = False


@dataclass(eq=False)
class Persistent:
    """A reference out of the stream."""

    pid: Any


@dataclass(frozen=True)
class Bytestring:
    """A `str` of python 2."""

    raw: bytes


class OldPickler(pickle._Pickler):
    """Writes the opcodes of python 2 for the classes above."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, (Made, Persistent)) and (known := self.memo.get(id(obj))):
            self.write(self.get(known[0]))
        elif isinstance(obj, Name):
            self.write(f"c{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Bytestring):
            size = len(obj.raw)
            self.write((b"U%c" % size if size < 256 else b"T" + struct.pack("<I", size)) + obj.raw)
        elif isinstance(obj, Persistent):
            self.save(obj.pid)
            self.write(b"Q")
            self.memoize(obj)
        elif isinstance(obj, Made):
            self.save(obj.func)
            self.save(obj.args)
            self.write(b"\x81" if obj.new else b"R")
            self.memoize(obj)
            if obj.state is not None:
                self.save(obj.state)
                self.write(b"b")
        else:
            super().save(obj, save_persistent_id)


def pickled(value: Any, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    OldPickler(out, protocol).dump(value)
    return out.getvalue()


def storage(cls: str, key: Any, location: Any, numel: int, view: Any = None) -> Persistent:
    """The persistent id of a storage in a legacy file; `view`: (key, offset, size) in elements."""
    module, _, name = f"torch.{cls}".rpartition(".")
    return Persistent(("storage", Name(module, name), key, location, numel, view))


def blob(count: int, values: bytes) -> bytes:
    """A storage behind the pickles: its element count, its bytes."""
    return struct.pack("<q", count) + values


def legacy(tree: Any, keys: Any = (), blobs: bytes = b"", **changes: Any) -> bytes:
    """A legacy file; `changes` replace its `magic`, `protocol` or `system` (facts of the host)."""
    system = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    head = changes.get("magic", MAGIC), changes.get("protocol", 1001), changes.get("system", system)
    return (
        b"".join(map(pickled, (*head, tree, list(keys) if isinstance(keys, tuple) else keys)))
        + blobs
    )


# ---------------------------------------------------------------------------------------------- tar


def tar_storages(
    entries: Sequence[tuple[Any, str, str, bytes, int]],
    views: Any = (),
    *,
    count: int | None = None,
    tail: bytes = b"",
) -> bytes:
    """The member ``storages``: entries are (key, location, class, bytes, element count), views
    (key, root, offset, size).
    """
    out = pickled(len(entries) if count is None else count)
    for key, location, cls, values, numel in entries:
        module, _, name = f"torch.{cls}".rpartition(".")
        out += pickled((key, location, Name(module, name))) + blob(numel, values)
    return out + pickled(list(views) if isinstance(views, tuple) else views) + tail


def tar_tensors(
    entries: Sequence[tuple[Any, Any, str, Any, Any, int]], *, count: int | None = None
) -> bytes:
    """The member ``tensors``: entries are (key, storage's key, class, shape, stride, offset)."""
    out = pickled(len(entries) if count is None else count)
    for key, home, cls, shape, stride, offset in entries:
        module, _, name = f"torch.{cls}".rpartition(".")
        out += pickled((key, home, Name(module, name))) + struct.pack("<i4x", len(shape))
        out += struct.pack(f"<{2 * len(shape) + 1}q", *shape, *stride, offset)
    return out


def tar(members: Sequence[tuple[str, bytes]], *, mtime: float = 1480000000.25) -> bytes:
    """A tar file as python's `tarfile` made it for torch: a time with a fraction puts a pax header
    before each member.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), mtime
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def tar_checkpoint(storages: bytes, tensors: bytes, tree: Any) -> bytes:
    """A tar checkpoint with all its members."""
    system = pickled({"protocol_version": 1000, "little_endian": True})
    return tar(
        [
            ("sys_info", system),
            ("pickle", pickled(tree)),
            ("tensors", tensors),
            ("storages", storages),
        ]
    )


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
