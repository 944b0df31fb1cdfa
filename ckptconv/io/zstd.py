"""One zstd frame, made or inflated as a stream: by Python's own library (from 3.14 on), else by the
package `zstandard`.

A frame says how many bytes it inflates to, as readers need that take it in one go. Deflating much
has threads of its own, even where there is one core: the bytes of a frame are the same everywhere
then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ckptconv.io.source import CHUNK, Source, SourceFile
from ckptconv.support.errors import MissingDependency, malformed
from ckptconv.support.platforms import cores

LEVEL = 1
"""That of slime and miles, which found that higher ones do not pay for changes of weights."""

_THREADS = 4
_WORTH_THREADS = 1 << 20
"""Bytes from which they are started: to start them takes as long as to deflate 100 kB."""

_WINDOW = 23
"""The logarithm of the window, in bytes, that a frame may need: RFC 8878 recommends that decoders
support 8 MiB. Levels up to 19 need no more; a window is memory, and a forged frame asks for much.
"""


class Deflating:
    """Makes one frame of `size` bytes."""

    def __init__(self, size: int) -> None:
        zstd, is_own = _library()
        self._errors = zstd.ZstdError
        threads = 0 if size < _WORTH_THREADS else max(1, min(_THREADS, cores()))
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
