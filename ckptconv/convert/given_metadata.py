"""The strings that the user puts beside the tensors of an output."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from ckptconv.io.location import Location, read_small
from ckptconv.io.places import place_of
from ckptconv.support.errors import CheckpointError, OptionRefused, printable
from ckptconv.support.json_text import read_object

# what readers take a meaning from, and ckptconv writes itself
_OURS = ("format", "device", "ckptconv.encodings")


def read_metadata(
    words: Iterable[str],
    file: str | os.PathLike[str] | None,
    may_set: Collection[str] = (),
) -> tuple[tuple[str, str], ...]:
    """The entries of `file`, a JSON object of texts, and then those of `words`, ``NAME=VALUE``.

    Raises `OptionRefused` for what is not one, a name that stands twice in `words`, text that UTF-8
    does not have, or a name that ckptconv writes itself, but for those of `may_set`;
    `CheckpointError` where the file cannot be read.
    """
    found: dict[str, str] = {} if file is None else _from_file(place_of(file))
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise OptionRefused(
                f"--metadata {printable(word)} is not NAME=VALUE", hint="such as license=mit"
            )
        if name in given:
            raise OptionRefused(f"--metadata {printable(name)} is given twice")
        given[name] = value
    found |= given
    ours = next((name for name in found if name in _OURS and name not in may_set), None)
    if ours:
        raise OptionRefused(f"the metadata entry {ours} is ckptconv's own, and cannot be set")
    for name, value in found.items():
        try:
            # an argument of bytes that are not UTF-8 has halves of surrogate pairs in their place
            f"{name}{value}".encode()
        except UnicodeEncodeError:
            raise OptionRefused(
                f"the metadata entry {printable(name)} is not UTF-8 text",
                hint="write it as UTF-8",
            ) from None
    return tuple(found.items())


def _from_file(place: Location) -> dict[str, str]:
    path = place.path
    found = read_object(read_small(place, "rules_bytes"), path, "metadata")
    for name, value in found.items():
        if not isinstance(value, str):
            what = "is not a string, and metadata holds only strings"
            raise CheckpointError(what, path=path, where=name, hint="put it in quotes")
    return found
