"""Places in the file systems of this host."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from ckptconv.io.files import FilePool, FileSource, PooledSource, stamp
from ckptconv.io.journals import refuse_torn
from ckptconv.io.location import Kind, Location
from ckptconv.io.source import Fingerprint, Source
from ckptconv.support.records import dataclass

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBADF, errno.ENAMETOOLONG}
"""What the system says of a name that nothing has, or can have."""


@dataclass(frozen=True, slots=True)
class LocalPlace(Location):
    """A path of this host."""

    at: Path
    ends_in_slash: bool = field(default=False, compare=False)

    @property
    def says_folder(self) -> bool:
        return self.ends_in_slash

    @property
    def path(self) -> Path:
        return self.at

    @property
    def parent(self) -> LocalPlace:
        return LocalPlace(self.at.parent)

    @property
    def absolute(self) -> LocalPlace:
        return LocalPlace(self.at.absolute())

    @property
    def absolute_name(self) -> str:
        # as `Path.absolute` has it, which parses the working folder and the path once more
        if self.at.anchor or not self.at.parts:
            return str(self.at.absolute())
        return os.path.join(os.getcwd(), self.at)  # noqa: PTH109, PTH118

    def child(self, name: str) -> LocalPlace:
        return LocalPlace(self.at / name)

    def kind(self) -> Kind:
        return self.look()[0]

    def look(self) -> tuple[Kind, Fingerprint | None]:
        try:
            found = os.stat(self.at)  # noqa: PTH116 (of each of 10,000 files, several times)
        except ValueError:  # a character that no name has
            return "nothing", None
        except OSError as error:
            if error.errno in _ABSENT:
                return "nothing", None
            raise
        kind: Kind = "other"
        if stat.S_ISREG(found.st_mode):
            kind = "file"
        elif stat.S_ISDIR(found.st_mode):
            kind = "folder"
        return kind, stamp(found)

    def local(self) -> Path | None:
        return self.at

    def names(self) -> Sequence[str]:
        return sorted(item.name for item in self.at.iterdir())

    def open(self, pool: FilePool | None = None) -> Source:
        refuse_torn(self.at)
        return FileSource(self.at) if pool is None else PooledSource(self.at, pool)

    def fingerprint(self) -> Fingerprint | None:
        try:
            return stamp(self.at.stat())
        except OSError:
            return None

    def alias_of(self) -> str | None:
        if not self.at.is_symlink():
            return None
        folder, name = os.path.split(os.path.realpath(self.at))
        return name if folder == os.path.realpath(self.at.parent) else None

    def stays_within(self, home: Location) -> bool:
        """The ``blobs`` of a repository in the Hugging Face cache are not out of its snapshots,
        which consist of links to them.
        """
        real, folder = Path(os.path.realpath(self.at)), Path(os.path.realpath(home.path))
        snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
        return real.is_relative_to(folder) or (
            snapshots is not None and real.is_relative_to(snapshots.parent / "blobs")
        )
