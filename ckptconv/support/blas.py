"""numpy in a process of our own: for casts and checks, not for linear algebra."""

from __future__ import annotations

import mmap
import os
import sys

from ckptconv.support.platforms import keep_freed_memory

_NEEDED = 86_000_000
"""The address space that numpy 2 takes when it is imported, with OpenBLAS for one thread."""


def tame_blas() -> None:
    """Have numpy's OpenBLAS take little memory, numpy not imported where that is not there, and its
    arrays use again what was freed.

    OpenBLAS takes memory for a thread per core when it is imported. Where it gets none, it tries
    for seconds and ends the process from within, past every handler.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.meta_path.insert(0, _Room())


class _Room:
    """Finds nothing; raises `MemoryError` where numpy is to be imported and would not fit."""

    def find_spec(self, fullname: str, path: object, target: object = None, /) -> None:
        if fullname == "numpy":
            try:
                mmap.mmap(-1, _NEEDED).close()
            except OSError as error:
                raise MemoryError("numpy") from error
            keep_freed_memory()
