"""Files that are compressed as a whole (``model.pt.gz``, ``.bz2``, ``.xz``, ``.zst``): unpacked
once, into a temporary file, and opened as what they are then.

zstd is in Python's library from 3.14 on; where it is not, `containers` says how to unpack the file.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ckptconv.formats.containers import closed_on_error, open_source, packer_of
from ckptconv.io.inflate import IS_BOMB, UnpackedSource, is_bomb
from ckptconv.io.source import CHUNK, Source, SourceFile
from ckptconv.support.errors import CheckpointError, LimitExceeded, UnsupportedCheckpoint, malformed
from ckptconv.support.limits import in_force
from ckptconv.tree.checkpoint import Checkpoint


def open_packed(source: Source) -> Checkpoint:
    """Unpack a file and open what is in it; `LimitExceeded` where it unpacks to too much. What was
    inflated already is not unpacked again, for the ratios of bombs multiply.
    """
    if source.comes_from(0)[0].is_inflated:
        hint = "unpack it first"
        raise UnsupportedCheckpoint("is compressed twice", path=source.path, hint=hint)
    packer = packer_of(source.read(0, min(8, source.size)))
    with contextlib.closing(packer.open(io.BufferedReader(SourceFile(source), CHUNK))) as opened:
        own = (getattr(packer, name, EOFError) for name in ("LZMAError", "ZstdError"))
        inner = UnpackedSource(source, _pieces(source, opened, (*own, *_BROKEN)))
    with closed_on_error(inner):
        found = open_source(inner)
    return within_file(found, (source, inner), f"packed {found.format}", "Weights only load failed")


def within_file(
    found: Checkpoint, around: tuple[Source, ...], name: str, torch_says: str
) -> Checkpoint:
    """A checkpoint that was found in another file, which only what unpacks it opens."""
    container = replace(
        found.container,
        name=name,
        by="",
        why_not="it has to be unpacked first",
        torch_says=torch_says,
        weights_only=False,
        names_storages=False,
    )
    sources = (*around, *(item for item in found.sources if item not in around))
    return replace(found, path=around[0].path, container=container, sources=sources)


_BROKEN = (OSError, EOFError, ValueError, zlib.error)


def _pieces(source: Source, opened: Any, broken: tuple[type[Exception], ...]) -> Iterator[bytes]:
    total = 0
    try:
        while piece := opened.read(CHUNK):
            total += len(piece)
            if is_bomb(source.size, total):
                what = f"unpacks from {source.size} bytes to more than {total}"
                most = in_force().inflated_ratio
                raise LimitExceeded(
                    what, limit="inflated_ratio", allowed=most, path=source.path, advice=IS_BOMB
                )
            yield piece
    except CheckpointError:
        raise
    except broken as error:
        raise malformed(f"does not unpack ({error})", path=source.path) from error
