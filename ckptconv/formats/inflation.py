"""The total size to which the archives of one checkpoint inflate, compared with the size of its
files.

A record by itself is held against its own deflated bytes (`io.inflate.InflatedSource`). Many small
ones, in one archive or in archives within archives, are a bomb too.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import field
from typing import TYPE_CHECKING

from ckptconv.io.files import noting_files
from ckptconv.io.source import Source
from ckptconv.support.records import dataclass
from ckptconv.support.settings import set_within

if TYPE_CHECKING:
    from ckptconv.formats.zip_archive import Record
    from ckptconv.io.inflate import Kind


@dataclass(slots=True)
class _Opening:
    """What is being opened: the size of its files, each counted once, and what was claimed."""

    size: int = 0
    claimed: Counter[Kind] = field(default_factory=Counter)
    files: set[tuple[int, int]] = field(default_factory=set)

    def note(self, found: os.stat_result) -> None:
        """Count a file that is opened."""
        identity = (found.st_dev, found.st_ino)
        if identity not in self.files:
            self.files.add(identity)
            self.size += found.st_size


_OPENING: ContextVar[_Opening | None] = ContextVar("checkpoint being opened", default=None)


@contextlib.contextmanager
def counted_together() -> Iterator[None]:
    """Within the block, all that is opened is one checkpoint; a block in it counts with it."""
    if _OPENING.get() is not None:
        yield
        return
    opening = _Opening()
    with set_within(_OPENING, opening), noting_files(opening.note):
        yield


def claim_records(source: Source, records: Iterable[Record]) -> None:
    """Count the deflated records of an archive; `LimitExceeded` when they and those before inflate
    to too much.

    One that is a bomb by itself is not counted, for it is refused where it is used, by its name.
    """
    from ckptconv.io.inflate import is_bomb  # most checkpoints are not deflated

    claimed = sum(
        item.size for item in records if item.deflated and not is_bomb(item.stored, item.size)
    )
    if claimed:
        _claim(source, claimed, "records", "inflated")


def claim_pickle(source: Source, size: int) -> None:
    """Count a deflated text or pickle that is read; `LimitExceeded` if all so far are too much."""
    _claim(source, size, "pickles and texts", "pickle")


def _claim(source: Source, size: int, called: str, kind: Kind) -> None:
    from ckptconv.io.inflate import IS_BOMB, refuse_bomb

    opening = _OPENING.get() or _Opening(source.size)
    opening.claimed[kind] += size
    whole, claimed = opening.size, opening.claimed[kind]
    what = f"its deflated {called} claim to inflate from {whole} to {claimed} bytes in total"
    refuse_bomb(whole, claimed, what, kind, path=source.path, advice=IS_BOMB)
