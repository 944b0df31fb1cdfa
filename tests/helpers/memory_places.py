"""Places in no file system: a second kind of `Location`, as a store of objects would be."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckptconv.io.files import FilePool
from ckptconv.io.location import Kind, Location
from ckptconv.io.source import Fingerprint, MemorySource, Source
from ckptconv.support.errors import not_opened

ROOT = PurePosixPath()
STORES: dict[str, dict[PurePosixPath, bytes]] = {}
"""The objects of each store by their names; a folder is what the names begin with."""


@dataclass(frozen=True)
class MemoryPlace(Location):
    """What is called `at` in the store `store`."""

    store: str
    at: PurePosixPath = ROOT

    @property
    def path(self) -> Path:
        return Path(f"memory:{self.store}", self.at)

    @property
    def parent(self) -> MemoryPlace:
        return MemoryPlace(self.store, self.at.parent)

    @property
    def absolute(self) -> MemoryPlace:
        return self

    def child(self, name: str) -> MemoryPlace:
        return MemoryPlace(self.store, self.at / name)

    def kind(self) -> Kind:
        if self.at in STORES[self.store]:
            return "file"
        is_root = self.at == ROOT
        is_prefix = any(self.at in name.parents for name in STORES[self.store])
        return "folder" if is_root or is_prefix else "nothing"

    def names(self) -> Sequence[str]:
        if self.kind() != "folder":
            raise NotADirectoryError(errno.ENOTDIR, "no folder", str(self.path))
        depth = len(self.at.parts)
        inside = [name for name in STORES[self.store] if self.at in name.parents]
        return sorted({name.parts[depth] for name in inside})

    def open(self, pool: FilePool | None = None) -> Source:
        if (kind := self.kind()) != "file":
            raise not_opened(errno.ENOENT if kind == "nothing" else errno.EISDIR, self.path)
        return MemorySource(STORES[self.store][self.at], self.path)

    def fingerprint(self) -> Fingerprint | None:
        return self.open().fingerprint() if self.kind() == "file" else None


def stored(folder: Path, name: str) -> MemoryPlace:
    """A store of the files in a folder."""
    files = [item for item in folder.rglob("*") if item.is_file()]
    STORES[name] = {PurePosixPath(item.relative_to(folder)): item.read_bytes() for item in files}
    return MemoryPlace(name)
