"""Names in files that must stay inside a folder."""

from __future__ import annotations

import os
from pathlib import Path

from ckptconv.support.errors import MalformedCheckpoint


def stays_within(path: Path, folder: Path) -> bool:
    """Whether no link leads from `path` out of `folder`.

    The ``blobs`` of a repository in the Hugging Face cache are not out of its snapshots, which
    consist of links to them.
    """
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    snapshots = next((parent for parent in home.parents if parent.name == "snapshots"), None)
    return real.is_relative_to(home) or (
        snapshots is not None and real.is_relative_to(snapshots.parent / "blobs")
    )


def within(path: Path, folder: Path) -> Path:
    """`path`, a file of a checkpoint of many files; `MalformedCheckpoint` when a link leads from it
    out of `folder`.
    """
    if not stays_within(path, folder):
        hint = "name the folder that it leads to, or copy the file"
        raise MalformedCheckpoint("is a link that leads out of the folder", path=path, hint=hint)
    return path
