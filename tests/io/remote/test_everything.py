"""Every checkpoint that others wrote is the same in a store as on the disk: its tensors, what is
noted of it, and its errors.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest

from ckptconv.formats.registry import open_certain
from ckptconv.io.location import Location
from ckptconv.io.places import LocalPlace
from ckptconv.support.errors import CheckpointError
from ckptconv.tensors.stream import iter_chunks
from helpers.examples import some
from helpers.folder_store import place_in
from helpers.paths import CORPUS, PRODUCED

MOST = 64 << 20  # bytes of a checkpoint whose tensors are read, twice


def found(place: Location, *, is_read: bool) -> Any:
    """What is found at a place, in words that tell it from anything else."""
    try:
        with open_certain(place) as checkpoint:
            tensors = [
                (path, tensor.dtype.name, tensor.shape, checksum(tensor) if is_read else None)
                for path, tensor in checkpoint.tensors()
            ]
            return checkpoint.format, checkpoint.nbytes, tensors, checkpoint.notes
    except CheckpointError as error:
        return type(error).__name__, error.what, str(error.where)


def checksum(tensor: Any) -> int | str:
    """The CRC-32 of the bytes of a tensor, or the error that reading it gives."""
    crc = 0
    try:
        for chunk in iter_chunks(tensor):
            crc = zlib.crc32(chunk, crc)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error.what}"
    return crc


def nbytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())


def everything(home: Path) -> list[Path]:
    """The files and folders of a folder, however deep."""
    return sorted(home.rglob("*")) if home.is_dir() else []


GROUPS = sorted(
    path for home in (PRODUCED, CORPUS / "files") if home.is_dir() for path in home.iterdir()
)


@pytest.mark.skipif(not GROUPS, reason="the real checkpoints are not here (CKPTCONV_CORPUS)")
@pytest.mark.parametrize(
    "group", some(18, GROUPS), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_what_others_wrote_is_the_same_in_a_store(group):
    home = group.parent
    for path in (group, *everything(group)):
        is_read = nbytes(path) <= MOST
        here = found(LocalPlace(path), is_read=is_read)
        place, store = place_in(home, path.relative_to(home).as_posix())
        there = found(place, is_read=is_read)
        # an error may name other files by their addresses
        assert repr(there).replace(f"test://{home.name}", str(home)) == repr(here), path
        if path.is_file():
            assert store.nbytes <= 2 * path.stat().st_size + (1 << 20), (path, store.asked)
