"""What helps where the names of a checkpoint are those of a manifest but for what stands before."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.keys.rules import MODULE
from ckptconv.support.errors import CheckpointError
from ckptconv.support.text import quoted
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.state_dicts import find


def prefix_notes(
    checkpoint: Checkpoint, only: str | None, asked: set[str], there: set[str]
) -> Iterator[str]:
    """What helps where names differ by what is before them: a part, or a prefix of keys."""
    if not asked or not there or not asked.isdisjoint(there):
        return
    prefix = _before(asked, there)
    if prefix is not None:
        part, keys = _parted(checkpoint, only, prefix)
        if not keys:
            yield f"the names of the manifest are those in {part}: add --only {quoted(part)}"
            return
        chosen = f" --only {quoted(part)}" if part else ""
        yield (f"the keys here have {keys}. before the names of the manifest: verify{chosen} what "
               f"{_renaming('strip', keys)} writes")  # fmt: skip
    elif (prefix := _before(there, asked)) is not None:
        yield (f"the names of the manifest have {prefix}. before those here: verify what "
               f"{_renaming('add', prefix)} writes")  # fmt: skip


def _renaming(what: str, prefix: str) -> str:
    """The command that strips a prefix from all keys, or adds it."""
    if prefix == MODULE:
        return f"ckptconv {what}-module IN OUT"
    return f"ckptconv convert IN OUT --keys keep --{what}-prefix {quoted(f'{prefix}.')}"


def _parted(checkpoint: Checkpoint, only: str | None, prefix: str) -> tuple[str, str]:
    """What stands before names, as the path of the part that they are in, and what is left of it:
    that is in the keys there, where --only finds nothing.
    """
    segments = prefix.split(".")
    for count in range(len(segments), 0, -1):
        part = ".".join([*([] if only is None else [only]), *segments[:count]])
        try:
            find(checkpoint.root, part, checkpoint.path)
        except CheckpointError:
            continue
        return part, ".".join(segments[count:])
    return only or "", prefix


def _before(names: set[str], longer: set[str]) -> str | None:
    """What stands before all names, with a dot behind it, in the longer ones."""
    # one name tells the few prefixes there may be; with all names this took their square
    rarest = max(names, key=len)
    found = (name.removesuffix(f".{rarest}") for name in longer if name.endswith(f".{rarest}"))
    for prefix in sorted(found)[:8]:
        if all(f"{prefix}.{name}" in longer for name in names):
            return prefix
    return None
