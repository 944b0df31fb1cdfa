"""The configuration of a model beside its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ckptconv.io.location import Location, read_small
from ckptconv.io.places import place_of
from ckptconv.support.errors import CheckpointError
from ckptconv.support.json_text import read_object
from ckptconv.tree.checkpoint import Checkpoint


def config_beside(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The model's ``config.json`` beside a checkpoint, or ``params.json`` of Meta's; empty where
    there is none.
    """
    home = home_of(checkpoint)
    if home is None:
        return {}
    return json_in(home, "config.json") or json_in(home, "params.json")


def home_of(checkpoint: Checkpoint) -> Location | None:
    """The folder in which a checkpoint lies."""
    paths = [checkpoint.path, *(source.path for source in checkpoint.sources[:1])]
    for path in paths:
        with suppress(CheckpointError, OSError):
            place = place_of(path)
            if place.is_folder():
                return place
            if place.is_file():
                return place.absolute.parent
    return None


def json_in(home: Location, name: str) -> dict[str, Any]:
    """A JSON object in a folder; empty where there is none.

    Raises `CheckpointError` for a file that is not one: what it says might decide.
    """
    place = home.child(name)
    if not place.is_file():
        return {}
    return read_object(read_small(place, "index_bytes"), place.path, name, of_python=True)
