"""What becomes of location tags: tag to tag, and tag to a device of torch."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from ckptconv.support.errors import DeviceUnavailable
from ckptconv.support.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
from ckptconv.devices.tags import check_tag


@dataclass(frozen=True, slots=True)
class TagMap:
    """The tag that a storage gets: by the pair of its exact tag (a dict in `torch.load`), else
    `device`, else its own.

    >>> maps = TagMap(None, (("cuda:3", "cuda:0"),)), TagMap(None), TagMap("cpu")
    >>> tuple(tags("cuda:3") for tags in maps)
    ('cuda:0', 'cuda:3', 'cpu')
    """

    device: str | None
    pairs: tuple[tuple[str, str], ...] = ()

    def __call__(self, tag: str) -> str:
        for old, new in self.pairs:
            if old == tag:
                return new
        return self.device or tag


def tag_map(device: str | None, pairs: Iterable[tuple[str, str]] = ()) -> TagMap:
    """The map that the options `device` and `map_location`, of (old, new) pairs, ask for.

    `device` is a tag, ``keep``, ``auto`` (`best_device`), or None: ``keep`` if there are pairs,
    else ``cpu``. A new one is a tag or ``auto``; an old one is any string, since a file may carry
    any. Raises `DeviceUnavailable` for what is not a tag.
    """
    targets = tuple((old, _asked_tag(new)) for old, new in pairs)
    if device is None and not targets:
        return TagMap("cpu")
    if device in (None, "keep"):
        return TagMap(None, targets)
    return TagMap(_asked_tag(device), targets)


def read_tag_pairs(words: Iterable[str]) -> dict[str, str]:
    """The pairs that ``--map-location OLD=NEW`` says; `DeviceUnavailable` for what is not a pair,
    and for an OLD that is sent to two places.
    """
    targets: dict[str, str] = {}
    for word in words:
        old, _, new = word.partition("=")
        if not (old and new):
            what = f"--map-location {word!r} is not OLD=NEW"
            raise DeviceUnavailable(what, hint="write for example cuda:3=cuda:0")
        new = _asked_tag(new)
        if targets.setdefault(old, new) != new:
            what = f"--map-location sends {old} to both {targets[old]} and {new}"
            raise DeviceUnavailable(what, hint="keep one")
    return targets


def _asked_tag(device: str) -> str:
    if device != "auto":
        return check_tag(device)
    from ckptconv.devices.host import best_device  # few ask what this host has

    return best_device()


def resolve_map_location(
    map_location: str | torch.device | dict[str, Any] | None,
) -> Callable[[str], torch.device]:
    """What gives each tag its device under `map_location`, worked out once per load and remembered
    by tag.

    As in `torch.load`: None follows the tag, a str or `torch.device` takes all, a dict maps exact
    tags and leaves the others. Beyond it, ``"auto"`` is `best_device`, asked once. Raises
    `DeviceUnavailable` for anything else (also an int, as `torch.load` does; a callable is the
    loader's), and later for a tag that leads to a device not here.
    """
    settled = functools.cache(_asked_tag)
    if map_location is None:
        chosen = TagMap(None)
    elif isinstance(map_location, dict):
        chosen = TagMap(None, tuple((old, settled(str(new))) for old, new in map_location.items()))
    elif isinstance(map_location, (str, getattr(sys.modules.get("torch"), "device", str))):
        chosen = TagMap(settled(str(map_location)))
    else:
        what = f"map_location={map_location!r} is not a location"
        raise DeviceUnavailable(what, hint="give a tag, or a dict of tags")
    from ckptconv.devices.host import require_device

    # a checkpoint has many storages and few tags
    return functools.cache(lambda tag: require_device(chosen(tag)))
