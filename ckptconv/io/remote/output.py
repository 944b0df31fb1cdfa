"""Outputs in stores: uploads that become objects together, or not at all."""

from __future__ import annotations

from ckptconv.io.destination import Destination
from ckptconv.io.location import Location
from ckptconv.io.staging import ShardNames
from ckptconv.support.errors import OutputRefused


def check_remote(place: Location, *, is_folder: bool, force: bool) -> None:
    """Raise `OutputRefused` where an output may not be made at `place`."""
    raise OutputRefused("cannot be written yet", path=place.path)


def remote_output(place: Location, *, force: bool, files: ShardNames | None = None) -> Destination:
    """One object, or shards and their index; `files` are the names of a set in a folder."""
    raise OutputRefused("cannot be written yet", path=place.path)
