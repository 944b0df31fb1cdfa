"""Tensors with the change of a delta in them, made as a stream.

A change is one zstd frame, which can only be inflated from its beginning: so the bytes are made in
order, from the first to the last, and held against the checksum that the delta has of them before
the last are given. Whoever begins elsewhere has all of them made and checked first.

A frame holds, as slime and miles write it (sglang's ``local_checkpoint.py`` reads it), either the
new bytes XOR the old ones, as many as the tensor has, or what is overwritten: how many bytes (u32),
the place of each in the tensor (u32, rising), the new ones. All of it is little-endian, and knows
nothing of dtypes.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any, Literal, Protocol, get_args

from ckptconv.io.inflate import Inflating
from ckptconv.io.source import CHUNK, Fingerprint, RangeSource
from ckptconv.support.arrays import Array, np
from ckptconv.support.errors import MalformedCheckpoint, MissingDependency
from ckptconv.support.records import dataclass
from ckptconv.tensors.refs import DerivedSource, Storage, TensorRef, whole_view
from ckptconv.tensors.stream import iter_chunks

Encoding = Literal["xor", "overwrite"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

MOST_PLACES = (1 << 32) - 1
"""The most bytes of a tensor whose bytes can be overwritten: their number is a u32."""

_PLACES = 1 << 17  # that are held at a time
# An iterator that is not run to its end keeps a frame's window, an empty view its whole buffer.
_NOTHING: tuple[Iterator[memoryview], memoryview] = iter(()), memoryview(b"")


Algorithm = Literal["xxh3-128", "blake3", "adler32"]
"""The checksums of slime and miles, under their names; the first is their default."""
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
DIGITS = {"xxh3-128": 32, "blake3": 64, "adler32": 8}
"""How many hexadecimal digits, in lower case, each has."""


class Digest(Protocol):
    """The checksum of the bytes so far."""

    def update(self, data: Any, /) -> object:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """It, in hexadecimal digits."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def digest(algorithm: Algorithm) -> Digest:
    """A checksum of no bytes yet; `MissingDependency` where its package is not there."""
    if algorithm == "adler32":
        return _Adler32()
    package = {"blake3": "blake3", "xxh3-128": "xxhash"}[algorithm]
    try:
        if algorithm == "blake3":
            import blake3

            return blake3.blake3()
        import xxhash

        return xxhash.xxh3_128()
    except ImportError:
        what = f"the checksum {algorithm} needs the package {package}"
        hint = f"pip install {package}; adler32 needs none"
        raise MissingDependency(what, hint=hint) from None


@dataclass(frozen=True, slots=True)
class Change:
    """What a delta says of one tensor: the `frame` that changes it, None where it only has a
    checksum to be held against; the checksums of all its bytes `before` and `after`, where they are
    known. `path` is how messages call the delta.
    """

    path: PurePath
    encoding: Encoding
    algorithm: Algorithm
    frame: TensorRef | None
    before: str | None
    after: str | None


def patched(base: TensorRef, change: Change, key: str) -> TensorRef:
    """`base` with a change in it; `key` is what messages call it."""
    source = PatchedSource(base, change, key)
    storage = Storage(source, 0, source.size, base.location, key, base.dtype)
    return whole_view(storage, base.dtype, base.shape)._replace(requires_grad=base.requires_grad)


class PatchedSource(DerivedSource):
    """The bytes of a patched tensor, little-endian, in C order.

    Raises `MalformedCheckpoint` where the tensor is not the one that was changed, and where the
    frame or the result is not what the delta says.
    """

    is_in_order = True

    def __init__(self, base: TensorRef, change: Change, key: str) -> None:
        self.inputs = (base,) if change.frame is None else (change.frame, base)
        self.path, self.size = change.path, base.nbytes
        self._base, self._change, self._key = base, change, key
        self._lock = threading.Lock()
        self._made, self._left = _NOTHING
        self._at = -1
        self._is_checked = False

    def read_into(self, offset: int, view: memoryview) -> None:
        self._require(offset, len(view))
        with self._lock:
            begun, self._at = self._at, -1  # where something fails, whoever asks again begins anew
            if offset != begun:
                self._begin()
                self._pass_over(offset)
            self._fill(view)
            if offset + len(view) < self.size:
                self._at = offset + len(view)
            else:  # what made the bytes holds some MB, and there may be 100,000 tensors
                self._made, self._left = _NOTHING

    def fingerprint(self) -> Fingerprint:
        return ("patched", self._change.encoding, self._change.after, self._of_inputs())

    def _begin(self) -> None:
        self._made, self._left = self._checked(), _NOTHING[1]

    def _pass_over(self, nbytes: int) -> None:
        """Make the first bytes, for nobody: none are given that were not checked to the last."""
        if nbytes and not self._is_checked:
            for _ in self._made:
                pass
            self._begin()
        room = memoryview(bytearray(min(CHUNK, nbytes)))
        for at in range(0, nbytes, CHUNK):
            self._fill(room[: nbytes - at])

    def _fill(self, view: memoryview) -> None:
        while view:
            self._left = self._left or next(self._made)
            count = min(len(view), len(self._left))
            view[:count], self._left = self._left[:count], self._left[count:]
            view = view[count:]

    def _checked(self) -> Iterator[memoryview]:
        """The new bytes; the last of them only where all are what they should be."""
        change, done = self._change, 0
        before, after = (
            None if told is None else digest(change.algorithm)
            for told in (change.before, change.after)
        )
        for old, new in self._pairs():
            if before is not None:
                before.update(old)
            if after is not None:
                after.update(new)
            done += len(new)
            if done == self.size:
                found = [None if one is None else one.hexdigest() for one in (before, after)]
                self._refuse_other(*found)
                self._is_checked = True
            yield new.data

    def _pairs(self) -> Iterator[tuple[Array, Array]]:
        olds = (np.frombuffer(chunk, np.uint8) for chunk in iter_chunks(self._base))
        if self._change.frame is None:
            return ((old, old) for old in olds)
        return self._xored(olds) if self._change.encoding == "xor" else self._overwritten(olds)

    def _xored(self, olds: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
        frame, done = self._frame(), 0
        for old in olds:
            new = np.bitwise_xor(old, np.frombuffer(frame.take(len(old)), np.uint8))
            done += len(old)
            if done == self.size:
                frame.end()
            yield old, new

    def _overwritten(self, olds: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
        places = self._frame()
        count = int.from_bytes(places.take(4), "little")
        if count > self.size:
            raise self._damaged(f"overwrites {count} bytes of a tensor of {self.size}")
        # the same frame once more: places and values are wanted side by side, each in its order
        values = self._frame()
        values.pass_over(4 + 4 * count)
        held, left, last, at = np.empty(0, np.int64), count, -1, 0
        for old in olds:
            new, end = old.copy(), at + len(old)
            while left or len(held):
                if not len(held):
                    number = min(left, _PLACES)
                    held = np.frombuffer(places.take(4 * number), "<u4").astype(np.int64)
                    self._refuse_places(held, last)
                    left, last = left - number, int(held[-1])
                number = int(np.searchsorted(held, end))
                new[held[:number] - at] = np.frombuffer(values.take(number), np.uint8)
                held = held[number:]
                if len(held):
                    break
            at = end
            if at == self.size:
                values.end()
            yield old, new

    def _refuse_places(self, places: Array, last: int) -> None:
        """Refuse places that do not rise, so that one is there twice, or that lie outside."""
        if int(places[0]) <= last or not (places[1:] > places[:-1]).all():
            raise self._damaged("the places that it overwrites do not rise")
        if int(places[-1]) >= self.size:
            what = f"overwrites byte {int(places[-1])} of a tensor of {self.size} bytes"
            raise self._damaged(what)

    def _frame(self) -> _Frame:
        assert self._change.frame is not None
        storage = self._change.frame.storage
        packed = RangeSource(storage.source, storage.offset, storage.nbytes)
        return _Frame(Inflating(packed), self._damaged)

    def _damaged(self, what: str) -> MalformedCheckpoint:
        hint = "the delta is damaged; fetch it again"
        return MalformedCheckpoint(what, path=self.path, where=self._key, hint=hint)

    def _refuse_other(self, before: str | None, after: str | None) -> None:
        """Refuse a tensor that is not what was changed, or a result that is not what it became."""
        wanted = self._change
        if before != wanted.before:
            hint = "name the BASE that the delta was made from"
            raise self._of_another("in BASE", before, wanted.before, hint)
        if after != wanted.after:
            hint = "BASE is not what the delta was made from, or the delta is damaged"
            if wanted.before is not None:
                hint = "the delta is damaged; fetch it again"
            raise self._of_another("with the change", after, wanted.after, hint)

    def _of_another(
        self, when: str, found: str | None, told: str | None, hint: str
    ) -> MalformedCheckpoint:
        what = f"its bytes {when} have the {self._change.algorithm} {found}, not {told}"
        return MalformedCheckpoint(
            what, code="checksum", path=self.path, where=self._key, hint=hint
        )


class _Frame:
    """The inflated bytes of a frame, which are to be just so many; `damaged` makes the errors."""

    def __init__(self, plain: Inflating, damaged: Callable[[str], MalformedCheckpoint]) -> None:
        self._plain, self._damaged = plain, damaged

    def take(self, nbytes: int) -> bytes:
        """The next so many bytes."""
        try:
            found = self._plain.read(nbytes) if nbytes else b""
        except MalformedCheckpoint as error:
            raise self._damaged(error.what) from error
        if len(found) < nbytes:
            raise self._damaged("its zstd frame inflates to fewer bytes than it has to")
        return found

    def pass_over(self, nbytes: int) -> None:
        """Leave the next so many bytes out."""
        while nbytes:
            nbytes -= len(self.take(min(nbytes, CHUNK)))

    def end(self) -> None:
        """There are no more."""
        try:
            is_over = not self._plain.read(1)
        except MalformedCheckpoint as error:
            raise self._damaged(error.what) from error
        if not is_over:
            raise self._damaged("its zstd frame inflates to more bytes than it has to")
