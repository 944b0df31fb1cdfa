"""Compressed bytes: deflated runs as plain ones, by one temporary file, and zstd frames as streams,
by Python's own library (from 3.14 on), else by the package `zstandard`. Bombs are refused.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Literal

from ckptconv.io.crc import crc32
from ckptconv.io.files import FileSource
from ckptconv.io.source import CHUNK, Fingerprint, Range, RangeSource, Source, SourceFile
from ckptconv.support import platforms
from ckptconv.support.errors import LimitExceeded, MissingDependency, OutputRefused, malformed
from ckptconv.support.limits import in_force


class Spool:
    """One unnamed temporary file for all that is inflated out of an archive."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def append(self, pieces: Iterator[bytes]) -> tuple[FileSource, int]:
        """Append the pieces; returns where they can be read."""
        try:
            if self._file is None:
                self._file, reading = platforms.unnamed_file()
                self._source = FileSource(self._file.name, reading)
            start = self._file.seek(0, os.SEEK_END)
            for piece in pieces:
                self._file.write(piece)
            self._source.size = self._file.tell()
            self._file.flush()
        except OSError as error:
            place, why = platforms.temporary_folder(), os.strerror(error.errno or 0)
            what = f"cannot inflate into {place}: {why}"
            raise OutputRefused(what, hint="set TMPDIR to a folder with enough room") from error
        return self._source, start

    def close(self) -> None:
        """Give the temporary file back."""
        if self._file is not None:
            self._source.close()
            self._file.close()


IS_BOMB = "it looks like a decompression bomb"
Kind = Literal["inflated", "pickle"]
"""Two kinds of what is inflated, each with a limit for what is free and one for the ratio."""


def is_bomb(deflated: int, size: int, kind: Kind = "inflated") -> bool:
    """Whether `deflated` bytes that claim to be `size` bytes are more than the limits allow."""
    free, ratio = (getattr(in_force(), f"{kind}_{what}") for what in ("free", "ratio"))
    return bool(size > max(free, deflated * ratio))


def refuse_bomb(deflated: int, size: int, what: str, kind: Kind, **told: Any) -> None:
    """Raise `LimitExceeded`, which says `what` and what is `told`, for such bytes."""
    if is_bomb(deflated, size, kind):
        limit, needed = f"{kind}_ratio", -(-size // max(1, deflated))
        allowed = getattr(in_force(), limit)
        raise LimitExceeded(what, limit=limit, allowed=allowed, needed=needed, **told)


class InflatedSource(Source):
    """A deflated run of another source, inflated once, on first use, into a spool.

    Memory stays bounded and every later layer sees plain bytes at plain offsets. The length and the
    CRC-32 are checked while inflating; `MalformedCheckpoint` when they do not hold. What is in the
    spool does not change any more.
    """

    is_inflated = True

    def __init__(
        self,
        parent: Source,
        offset: int,
        deflated: int,
        size: int,
        crc: int | None,
        name: str,
        spool: Spool,
    ) -> None:
        what = f"claims to inflate {deflated} bytes to {size}"
        told = {"path": parent.path, "where": name, "advice": IS_BOMB}
        refuse_bomb(deflated, size, what, "inflated", **told)
        self.path, self.size = parent.path, size
        self._parent, self._offset, self._deflated = parent, offset, deflated
        self._crc, self._name, self._spool = crc, name, spool
        self._plain: RangeSource | None = None

    def read_into(self, offset: int, view: memoryview) -> None:
        self._inflated().read_into(offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._inflated().read(offset, nbytes)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        return self._inflated().read_many(ranges)

    def stream(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        return self._inflated().stream(ranges)

    def fingerprint(self) -> Fingerprint:
        return (self._parent.fingerprint(), self._offset, self._deflated, self.size)

    def close(self) -> None:
        self._spool.close()

    def _inflated(self) -> RangeSource:
        if self._plain is None:
            spooled, start = self._spool.append(self._pieces())
            self._plain = RangeSource(spooled, start, self.size)
            self._plain.path = self.path
        return self._plain

    def _pieces(self) -> Iterator[bytes]:
        # -15: without the header and the checksum of zlib, for which an archive has its own
        inflater, crc, total = zlib.decompressobj(-15), 0, 0
        for start in range(0, self._deflated, CHUNK):
            pending = self._parent.read(self._offset + start, min(CHUNK, self._deflated - start))
            piece = b""
            while pending or len(piece) == CHUNK:  # a full piece may leave more inside the inflater
                piece = self._decompress(inflater, pending)
                pending, crc = inflater.unconsumed_tail, crc32(piece, crc)
                total += len(piece)
                if total > self.size or inflater.unused_data:
                    raise self.wrong("inflates to more than it declares", where=self._name)
                yield piece
        if not inflater.eof or total != self.size or (self._crc is not None and crc != self._crc):
            raise self.wrong("does not inflate to what the archive says", where=self._name)

    def _decompress(self, inflater: zlib._Decompress, pending: bytes) -> bytes:
        try:
            return inflater.decompress(pending, CHUNK)
        except zlib.error as error:
            what = f"is not deflated as declared ({error})"
            raise self.wrong(what, where=self._name) from error


class UnpackedSource(InflatedSource):
    """A whole file that was compressed, from the `pieces` of its plain bytes: nothing else tells
    how many they are, so all are made at once.
    """

    def __init__(self, parent: Source, pieces: Iterator[bytes]) -> None:
        self._parent, self._offset, self._deflated = parent, 0, parent.size
        self._spool = Spool()
        try:
            spooled, start = self._spool.append(pieces)
        except BaseException:
            self._spool.close()
            raise
        self.path, self.size = parent.path, spooled.size
        self._plain = RangeSource(spooled, start, self.size)
        self._plain.path = self.path


# --------------------------------------------------------------------------------------------- zstd

LEVEL = 1
"""That of slime and miles, which found that higher ones do not pay for changes of weights."""

# Threads are used even where there is one core: so the bytes of a frame are the same everywhere.
_THREADS = 4
_WORTH_THREADS = 1 << 20  # bytes; to start them takes as long as to deflate 100 kB
# The logarithm of the window, in bytes, that a frame may need: RFC 8878 recommends that decoders
# support 8 MiB. Levels up to 19 need no more; a window is memory, and a forged frame asks for much.
_WINDOW = 23


class Deflating:
    """Makes one frame of `size` bytes, which says so, as readers need that take it in one go."""

    def __init__(self, size: int) -> None:
        zstd, is_own = _library()
        self._errors = zstd.ZstdError
        threads = 0
        if size >= _WORTH_THREADS:
            threads = max(1, min(_THREADS, platforms.cores()))
        with _memory_told(self._errors):
            if not is_own:
                packer = zstd.ZstdCompressor(level=LEVEL, threads=threads)
                self._frame: Any = packer.compressobj(size)
                return
            name = zstd.CompressionParameter
            options = {name.compression_level: LEVEL, name.nb_workers: threads}
            self._frame = zstd.ZstdCompressor(options=options)
            self._frame.set_pledged_input_size(size)

    def compress(self, data: Any) -> bytes:
        """Take bytes; returns what of the frame is ready."""
        with _memory_told(self._errors):
            made: bytes = self._frame.compress(data)
            return made

    def flush(self) -> bytes:
        """The end of the frame."""
        with _memory_told(self._errors):
            made: bytes = self._frame.flush()
            return made


class Inflating:
    """The bytes of one frame, which is all of a source; they are read from its beginning to its
    end. Memory is bounded, whatever the frame claims.
    """

    def __init__(self, source: Source) -> None:
        zstd, is_own = _library()
        self._errors = zstd.ZstdError
        self._path = source.path
        packed = SourceFile(source)
        if is_own:
            most = {zstd.DecompressionParameter.window_log_max: _WINDOW}
            self._plain: Any = zstd.ZstdFile(packed, options=most)
            return
        reader = zstd.ZstdDecompressor(max_window_size=1 << _WINDOW)
        # what follows the frame is read too: it is refused as too much, or as no frame
        self._plain = reader.stream_reader(packed, read_size=CHUNK, read_across_frames=True)

    def read(self, nbytes: int) -> bytes:
        """The next so many bytes; fewer where the frame ends. `MalformedCheckpoint` where it is
        none, or needs more memory than is allowed.
        """
        try:
            with _memory_told(self._errors):
                made: bytes = self._plain.read(nbytes)
        except (self._errors, EOFError) as error:
            raise malformed(f"its zstd frame does not inflate ({error})", self._path) from error
        return made


@contextlib.contextmanager
def _memory_told(errors: type[Exception]) -> Iterator[None]:
    """Within the block, a want of memory that the library tells is Python's own error."""
    try:
        yield
    except errors as error:
        if "Allocation error" in str(error):
            raise MemoryError from error
        raise


@functools.cache  # Python looks for a missing module anew each time, which takes 0.1 ms
def _library() -> tuple[Any, bool]:
    """The library, and whether it is Python's own. `MissingDependency` where there is none."""
    with contextlib.suppress(ImportError):
        from compression import zstd  # type: ignore[import-not-found]

        return zstd, True
    try:
        import zstandard
    except ImportError:
        what = "deltas are compressed with zstd, which needs Python 3.14 or the package zstandard"
        raise MissingDependency(what, hint="pip install 'zstandard>=0.22'") from None
    return zstandard, False


def require_zstd() -> None:
    """Raise `MissingDependency` where zstd is missing, before any work is done."""
    _library()
