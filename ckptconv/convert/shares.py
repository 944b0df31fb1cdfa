"""One file of an output as a share of the work, which another process can do: all that it needs,
as data.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from ckptconv.convert.plan import PlannedFile
from ckptconv.convert.write import Tally, write_layout
from ckptconv.devices.mapping import TagMap
from ckptconv.formats.target_format import Target, target_named
from ckptconv.io.destination import new_file
from ckptconv.io.files import FilePool
from ckptconv.io.places import place_of
from ckptconv.io.source import Reopening, Source
from ckptconv.support.errors import CheckpointError
from ckptconv.support.limits import Limits, held, in_force
from ckptconv.support.records import dataclass
from ckptconv.support.text import size_text
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.packed import NotPacked, PackedTensors, check_same, packed

if TYPE_CHECKING:
    from ckptconv.io.digests import Digests


@dataclass(frozen=True, slots=True)
class MadeShare:
    """A file that was made: the number of its share, seconds, and the numbers of its tensors with
    odd values (as `Tally`); its `digests`, where they are wanted.
    """

    number: int
    seconds: float
    overflowed: tuple[int, ...] = ()
    odd_bools: tuple[int, ...] = ()
    digests: Digests | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """A file of an output: made at `path`, of `nbytes` bytes, known to the user as `shown`. It
    holds the tensors `packed`, under `keys`, cast to `dtypes`.
    """

    number: int
    path: str
    shown: str
    nbytes: int
    to: Target
    keys: tuple[str, ...]
    dtypes: tuple[DType, ...]
    packed: PackedTensors
    metadata: Mapping[str, str]
    tags: TagMap
    fsync: bool = True
    is_proved: bool = False
    limits: Limits = field(default_factory=in_force)

    def make(self) -> MadeShare:
        """Make the file; raises what `execute_plan` raises, and leaves nothing then."""
        begin = time.perf_counter()
        made = Path(self.path)
        made.unlink(missing_ok=True)  # of a worker that was lost
        tally, checksums, opened = Tally(), Checksums(), list[Source]()
        with held(self.limits), contextlib.ExitStack() as leaving:
            pool = FilePool()

            def open_place(place: Reopening) -> Source:
                source = check_same(place_of(place.name).open(pool), place)
                leaving.callback(source.close)
                opened.append(source)
                return source

            refs = self.packed.opened(open_place)
            layout = target_named(self.to).lay_out(
                list(zip(self.keys, refs, self.dtypes, strict=True)), self.metadata, self.tags
            )
            if layout.nbytes != self.nbytes:
                raise CheckpointError("is laid out in another way here", path=self.shown)
            try:
                shown, nbytes = Path(self.shown), layout.nbytes
                with new_file(made, shown, size=nbytes, fsync=self.fsync) as stream:
                    passing = None
                    if self.is_proved:
                        from ckptconv.convert.proving import watched  # OpenSSL is large

                        passing = watched(stream, layout)
                    write_layout(layout, stream, tally, checksums, threads=1)  # of many workers
                    checksums.finish()
                    stream.settle(fsync=self.fsync)
                for source in opened:
                    source.check_unchanged()
            except BaseException:
                made.unlink(missing_ok=True)
                raise
        numbers = {id(ref): number for number, ref in enumerate(refs)}
        overflowed, odd = (
            tuple(numbers[id(ref)] for ref in noted)
            for noted in (tally.overflowed, tally.odd_bools)
        )
        digests = None if passing is None else passing.result()
        return MadeShare(self.number, time.perf_counter() - begin, overflowed, odd, digests)

    def memory(self) -> int:
        """The bytes of memory that making it takes, about."""
        return _BASE + _FOR_EACH * len(self.keys)

    def __repr__(self) -> str:
        return f"<Share {self.shown}, {size_text(self.nbytes)}>"


_BASE, _FOR_EACH = 200 << 20, 4 << 10
"""Bytes of memory of an interpreter with buffers, and for each tensor."""

ShareOut = Callable[[Sequence[Share]], Iterator[MadeShare]]
"""Has shares made somewhere else, and tells of each as it is made; raises for the first that
fails."""


def share_of(
    number: int, file: PlannedFile, path: Path, to: Target, *, fsync: bool, is_proved: bool = False
) -> Share | None:
    """The share that makes a file at `path`; None where only this process can."""
    part = file.part
    if part is None:
        return None
    try:
        tensors = packed([ref for _, ref, _ in part.tensors])
    except NotPacked:
        return None
    return Share(
        number,
        str(path.absolute()),
        str(file.path),
        file.layout.nbytes,
        to,
        tuple(key for key, _, _ in part.tensors),
        tuple(dtype for _, _, dtype in part.tensors),
        tensors,
        dict(part.metadata),
        part.tags,
        fsync,
        is_proved,
    )
