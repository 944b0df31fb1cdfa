"""One new file, written as a stream with checksums by a thread of its own.

Where it is written to is the business of a sink.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from ckptconv.io.crc import CrcOf, no_crc
from ckptconv.io.source import CHUNK, Source
from ckptconv.support import platforms

_BUFFERS = 4  # of CHUNK bytes, beside those that the sink holds

# The bytes of one write(2). Where it gets more, Linux caches the file in pages of up to 2 MiB, and
# memory in runs of that size is what a virtual machine has given back to its host: 2 GB took 0.9 s
# instead of 0.3 s when nothing else had used that memory lately.
_AT_ONCE = 1 << 18

# A buffer with less room than that goes out as it is: a read more for what fits costs more.
_A_READ = 1 << 16

RESERVE_FROM = 16 << 20

# The bytes after which the disk is told to begin with a file that is synced in the end. Linux
# leaves that to the sync where they are less than a tenth of memory: of 768 MB, the disk had all to
# do when the last byte was written, and the program waited 0.7 s for it.
_BEGUN_EVERY = 8 << 20


class Sink(ABC):
    """What takes the bytes of one new file, in order. Its calls come from one thread at a time, but
    for those of `write_at`.
    """

    holds = 0
    """How many of the views given last are still looked at when `write` returns."""

    @abstractmethod
    def write(self, view: memoryview) -> None:
        """Take all of `view`, which is used again when so many more were taken as it `holds`."""

    def is_for_threads(self) -> bool:
        """Whether bytes may be left out, and written to their places by several threads at once."""
        return False

    def write_at(self, view: memoryview, position: int) -> None:
        """Take all of `view` for the bytes from `position` on; any thread may call it."""
        raise NotImplementedError

    def leave_out(self, nbytes: int) -> None:
        """The next `write` takes what follows so many bytes, which are written by `write_at`."""
        raise NotImplementedError

    @abstractmethod
    def end(self, size: int, *, fsync: bool) -> None:
        """The file is whole, with `size` bytes; with `fsync` it lasts when this returns."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held, once; of a file that is not whole nothing has to remain."""


class FileSink(Sink):
    """An open file; with `fsync` it is to be synced, and its bytes go to the disk meanwhile."""

    def __init__(self, fd: int, *, fsync: bool = False) -> None:
        self._fd = fd
        self._begins = fsync
        self._since = 0

    def write(self, view: memoryview) -> None:
        self._since += len(view)
        while view:
            view = view[os.write(self._fd, view[:_AT_ONCE]) :]
        self._begin()

    def is_for_threads(self) -> bool:
        return platforms.CAN_WRITE_AT

    def write_at(self, view: memoryview, position: int) -> None:
        self._since += len(view)
        while view:
            count = platforms.write_at(self._fd, view[:_AT_ONCE], position)
            view, position = view[count:], position + count
        self._begin()

    def leave_out(self, nbytes: int) -> None:
        os.lseek(self._fd, nbytes, os.SEEK_CUR)

    def _begin(self) -> None:
        """Have the disk begin, when there is enough; threads that count at once do no harm."""
        if self._begins and self._since >= _BEGUN_EVERY:
            self._since = 0
            platforms.begin_sync(self._fd)

    def end(self, size: int, *, fsync: bool) -> None:
        os.ftruncate(self._fd, size)
        if fsync:
            platforms.sync(self._fd)
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class OutputStream:
    """Sequential output through a ring of `CHUNK`-sized buffers that a second thread writes out.

    Reading, checksumming and casting fill one buffer while the kernel takes another, which is what
    makes a conversion as quick as a copy. A small file never starts the thread. Errors of the
    writing thread are raised by the next call.
    """

    def __init__(
        self, sink: Sink, on_progress: Callable[[int], None] | None = None, size: int = CHUNK
    ) -> None:
        self.position = 0
        self.is_closed = False
        self._sink = sink
        self._on_progress = on_progress
        # as long as the file, if that is short: to clear 1 MiB takes longer than to write 2 kB
        self._buffer = memoryview(bytearray(min(CHUNK, size + 1)))
        self._filled = 0
        self._full: SimpleQueue[memoryview | int | None] = SimpleQueue()
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def lead_through(self, sink_of: Callable[[Sink], Sink]) -> None:
        """Before anything is written: what is written goes through another sink to its own."""
        self._sink = sink_of(self._sink)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`; the caller may reuse its memory at once."""
        size = len(data)
        end = self._filled + size
        if end < len(self._buffer):
            self._buffer[self._filled : end] = data
            self._filled = end
            self.position += size
            return
        view = memoryview(data)
        while view:
            room = min(len(self._buffer) - self._filled, len(view))
            self._buffer[self._filled : self._filled + room] = view[:room]
            self._advance(room)
            view = view[room:]

    def copy(self, source: Source, offset: int, nbytes: int, crc_of: CrcOf = no_crc) -> int:
        """Append `nbytes` of `source` from `offset` on, read into the buffers; what `crc_of` gives
        for them.
        """
        crc = 0
        while nbytes:
            if len(self._buffer) - self._filled < min(nbytes, _A_READ):
                self._hand_over()
            room = min(len(self._buffer) - self._filled, nbytes)
            view = self._buffer[self._filled : self._filled + room]
            source.read_into(offset, view)
            crc = crc_of(view, crc)
            self._advance(room)
            offset, nbytes = offset + room, nbytes - room
        return crc

    def is_for_threads(self) -> bool:
        """Whether there are `write_at` and `leave_out`."""
        return self._sink.is_for_threads()

    def write_at(self, view: memoryview, position: int) -> None:
        """Write bytes that are left out, from any thread."""
        self._sink.write_at(view, position)

    def leave_out(self, nbytes: int) -> None:
        """The next so many bytes are, or will be, written by `write_at`."""
        self._sink.write_at(self._buffer[: self._filled], self.position - self._filled)
        passed, self._filled = self._filled + nbytes, 0
        if self._thread is None:
            self._sink.leave_out(passed)
        else:
            self._full.put(passed)
            self._raise_failure()
        self.position += nbytes
        if self._on_progress:
            self._on_progress(self.position)

    def finish(self) -> None:
        """Write out what is left and wait for it."""
        if self._thread is None:
            self._sink.write(self._buffer[: self._filled])
        else:
            self._full.put(self._buffer[: self._filled])
            self._stop()
            self._raise_failure()
        self._filled = 0
        # many outputs may wait until they are put in place together
        self._buffer, self._free = memoryview(b""), SimpleQueue()

    def settle(self, *, fsync: bool) -> None:
        """Finish, cut off what was reserved for nothing, close: it is to be put in place."""
        if self._buffer:
            self.finish()
        self._sink.end(self.position, fsync=fsync)
        self.is_closed = True

    def close(self) -> None:
        """Close the file, once."""
        self._sink.close()

    def abandon(self) -> None:
        """Stop the writing thread; what it has not written yet does not matter any more."""
        if self._thread is not None:
            self._failure = self._failure or OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            self._stop()

    def _advance(self, count: int) -> None:
        self._filled += count
        self.position += count
        if self._filled == len(self._buffer):
            self._hand_over()
            if self._on_progress:
                self._on_progress(self.position)

    def _hand_over(self) -> None:
        if len(self._buffer) < CHUNK:  # it is longer than was said
            self._sink.write(self._buffer[: self._filled])
            self._buffer, self._filled = memoryview(bytearray(CHUNK)), 0
            return
        if self._thread is None:
            for _ in range(_BUFFERS - 1 + self._sink.holds):
                self._free.put(memoryview(bytearray(CHUNK)))
            thread = threading.Thread(target=self._drain, name="ckptconv-writer", daemon=True)
            thread.start()  # there may be no memory for it, and then there is nobody to wait for
            self._thread = thread
        self._full.put(self._buffer[: self._filled])
        self._buffer, self._filled = self._free.get(), 0
        self._raise_failure()

    def _drain(self) -> None:
        held: deque[memoryview] = deque()
        while (given := self._full.get()) is not None:
            if self._failure is None:
                try:
                    if isinstance(given, int):
                        self._sink.leave_out(given)
                    else:
                        self._sink.write(given)
                except Exception as error:  # raised again by the thread that writes
                    self._failure = error
            if not isinstance(given, int):
                held.append(memoryview(given.obj))  # all of a buffer that was not full
            if len(held) > self._sink.holds:
                self._free.put(held.popleft())

    def _stop(self) -> None:
        assert self._thread is not None
        self._full.put(None)
        with contextlib.suppress(RuntimeError):  # a signal came while it was about to start
            self._thread.join()
        self._thread = None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
