"""Journals of writes over the first bytes of a file, which tell a torn file from a whole one.

A journal lies beside its file, ``.NAME.XXXXXXXX.ckptconv-edit``, and holds the old bytes and the
new ones until the disk has the new ones (`in_place` writes both).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from shlex import quote
from struct import Struct
from typing import IO, Literal
from zlib import crc32

from ckptconv.support import platforms
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.support.records import NamedTuple

_MAGIC = b"ckptconv edit 1\n"
_NUMBERS = Struct("<2Q")  # the size of the file, and the bytes of each of its beginnings
_HEAD = Struct("<16s16sQ")  # magic, numbers, a CRC-32 of the numbers and what follows
_SECTOR = 512  # bytes that a disk writes as a whole; a system writes whole pages of them
_LONGEST_PREFIX = 100  # bytes of a name that the names of hidden files repeat

State = Literal["old", "new", "torn", "other"]


class Journal(NamedTuple):
    """The first bytes of a file of `size` bytes before a change and after it, equally many. Both
    begin with the length of the rest (8 bytes, little-endian), so data are never taken for them.
    """

    size: int
    old: bytes
    new: bytes

    def packed(self) -> bytes:
        """The bytes of its file: the sizes, a CRC-32 of the rest, old, new."""
        numbers = _NUMBERS.pack(self.size, len(self.old))
        checksum = crc32(self.new, crc32(self.old, crc32(numbers)))
        return _HEAD.pack(_MAGIC, numbers, checksum) + self.old + self.new

    @classmethod
    def read(cls, raw: bytes) -> Journal | None:
        """A journal out of its file; None where that is not a whole one."""
        if len(raw) < _HEAD.size:
            return None
        magic, numbers, checksum = _HEAD.unpack_from(raw)
        size, nbytes = _NUMBERS.unpack(numbers)
        both = raw[_HEAD.size :]
        if magic != _MAGIC or len(both) != 2 * nbytes or crc32(both, crc32(numbers)) != checksum:
            return None
        made = cls(size, both[:nbytes], both[nbytes:])
        return made if made.is_sound else None

    @property
    def is_sound(self) -> bool:
        """Whether both are as long as they say."""
        return all(
            len(start) >= 8 and int.from_bytes(start[:8], "little") == len(start) - 8
            for start in (self.old, self.new)
        )

    def state(self, file: IO[bytes]) -> State:
        """What the file has of it: torn when each of its sectors is an old or a new one."""
        if os.fstat(file.fileno()).st_size != self.size:
            return "other"
        found = first_bytes(file, len(self.old))
        if found in (self.old, self.new):
            return "old" if found == self.old else "new"
        for at in range(0, len(self.old), _SECTOR):
            sector = slice(at, at + _SECTOR)
            if found[sector] not in (self.old[sector], self.new[sector]):
                return "other"
        return "torn"


def first_bytes(file: IO[bytes], nbytes: int) -> bytes:
    """The first bytes of an open file without a buffer, as many as there are."""
    file.seek(0)
    found = bytearray()
    while more := file.read(nbytes - len(found)):
        found += more
    return bytes(found)


def visible_prefix(target: Path) -> str:
    """The name of `target`, as much of it as the names of hidden files repeat."""
    prefix = target.name
    # half a character is not a name on macOS and Windows
    while len(os.fsencode(prefix)) > _LONGEST_PREFIX:
        prefix = prefix[:-1]
    return prefix


def journal_path(path: Path) -> Path:
    """Where the journal of a file is, whether it has one or not; `path` is not a link."""
    return path.with_name(_journal_name(path))


def _journal_name(path: Path) -> str:
    mark = crc32(os.fsencode(path.name))
    return f".{visible_prefix(path)}.{mark:08x}.ckptconv-edit"


def journal_of(path: Path) -> Journal | None:
    """The journal of a file; None where there is none, or what is there is not one."""
    found = journal_path(path)
    try:
        state = found.lstat()
    except FileNotFoundError:
        return None
    file = path.stat()
    # what is larger is not a journal of this file: that holds a part of it twice; and what another
    # user put there is not one that this user, the owner of the file, or root wrote
    if (
        not stat.S_ISREG(state.st_mode)
        or state.st_size > _HEAD.size + 2 * file.st_size
        or not (state.st_uid in (file.st_uid, 0) or platforms.is_own(found))
    ):
        return None
    return Journal.read(found.read_bytes())


def refuse_torn(path: Path) -> None:
    """Raise `MalformedCheckpoint` for a file whose first bytes are partly old and partly new."""
    # what cannot be looked at cannot be opened; python < 3.13: RuntimeError for links in a circle
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if path.is_symlink():
            path = path.resolve()
        name, text = path.name, str(path)
        # as `journal_path` has it, which parses a path for each file that is opened
        if not name or not os.path.lexists(text[: -len(name)] + _journal_name(path)):
            return
        journal = journal_of(path)
        if journal is None:
            return
        with path.open("rb", buffering=0) as file:
            if journal.state(file) == "torn":
                raise MalformedCheckpoint(
                    "an edit of it was interrupted in the middle of a write",
                    path=path,
                    where="header",
                    hint=f"undo it with: ckptconv edit {quote(str(path))}",
                )
