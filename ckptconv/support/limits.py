"""The most that a file may claim before it is refused, in one place, and how a caller raises or
lowers it.

A limit is not a taste: each is far beyond what training writes, and small enough that a file which
lies about its sizes is answered in a second and in little memory. `docs/limits.md` lists them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from math import isfinite
from typing import Any

from ckptconv.support.errors import LimitExceeded, OptionRefused, UnknownOption
from ckptconv.support.records import dataclass
from ckptconv.support.settings import set_within


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that every reader holds a file against, bytes or counts; defaults are below."""

    pickle_bytes: int = 1 << 30
    """Size of one pickle (100,000 tensors take 15 MB)."""
    opcode_bytes: int = 1 << 28
    """Size of one pickle without the bytes and the long texts in it: no more opcodes than this."""
    nodes: int = 10_000_000
    """Containers, calls and memo entries of one pickle (100,000 tensors make 200,000; of older
    torch 1,600,000).
    """
    depth: int = 1000
    """Containers within containers (Python's own pickler stops at about 500)."""
    stack: int = 500_000
    """Containers side by side on a pickle's stack."""
    archive_records: int = 4_000_000
    """Records in one zip archive."""
    zip_members: int = 1000
    """Members of a zip or tar archive of another program that is looked into for checkpoints, with
    those of zip archives in it.
    """
    small_record_bytes: int = 4096
    """Size of a record that holds one word, as ``version`` or ``byteorder`` do."""
    inflated_ratio: int = 100
    """Inflated bytes of a record per deflated byte, and of all of a checkpoint per byte of its
    files, above `inflated_free`.
    """
    inflated_free: int = 16 << 20
    """Inflated size of a record, and of all of a checkpoint together, that is never questioned."""
    pickle_ratio: int = 50
    """The same of pickles and texts, above `pickle_free`: nodes take ten times the bytes they come
    from.
    """
    pickle_free: int = 1 << 20
    """Inflated size of a pickle, and of all of a checkpoint together, that is never questioned."""
    view_ratio: int = 64
    """Bytes that a tensor, or an output, claims per byte of its storages (expanded views), above
    `view_free`.
    """
    view_free: int = 1 << 30
    """Size of a tensor, or of an output, that is never questioned."""
    dimensions: int = 128
    """Dimensions of one tensor (torch opens any number, and computes with 64)."""
    sharded_dimensions: int = 8
    """Dimensions along which one tensor is split into chunks (real meshes split two)."""
    mesh_ranks: int = 100_000
    """Ranks of the mesh of a DTensor, and parts into which a rank's share of one is cut."""
    list_gaps: int = 100_000
    """Places in the lists of a DCP checkpoint under which nothing was saved."""
    modules: int = 500_000
    """Modules of one state dict, a shared one counted wherever it stands (nested sharing doubles
    them at each level).
    """
    names: int = 1 << 26
    """Characters of all names of one state dict that is walked out of modules, or whose keys are
    fitted.
    """
    text_bytes: int = 100_000_000
    """Size of a text that is parsed: the code of a TorchScript class, a ``model.json``, a list of
    keys.
    """
    safetensors_header_bytes: int = 100_000_000
    """Size of a safetensors header, the same as in the safetensors library."""
    gguf_header_bytes: int = 1 << 26
    """Size of a GGUF header, which has the words of a tokenizer (20 million for the largest)."""
    index_bytes: int = 100_000_000
    """Size of the JSON index of a sharded checkpoint."""
    shards: int = 100_000
    """Files, or ranks, of one checkpoint."""
    open_files: int = 128
    """Files of one checkpoint that are open at a time (a process may often open 1,024); more are
    never refused.
    """
    files_in_files: int = 3
    """Checkpoints in checkpoints: an archive of archives of pickles with torch streams inside."""
    large_int_keys: int = 1000
    """Ints beyond 61 bits among the keys of one dict: all may have the same hash."""
    key_tuple: int = 64
    """Parts of a tuple that is a dict key."""
    companion_bytes: int = 100_000_000
    """Size of a file beside a model that `--with-files` copies (a large ``tokenizer.json`` has 35
    million).
    """
    remote_seconds: float = 120.0
    """Seconds for which a failing request to another machine is tried again."""
    unpinned: bool = False
    """Whether files are read whose server sends neither an ETag nor a date, so that it is unknown
    whether all of its answers are of one version.
    """
    rules_bytes: int = 100_000_000
    """Size of a file of key rules, or of a mapping."""
    regex_seconds: float = 10.0
    """Seconds that one pattern may take with all keys of a state dict."""
    compared_pairs: int = 10_000_000
    """Pairs of containers that ``diff --whole`` compares."""
    scanned_values: int = 5_000_000
    """Values side by side in a pickle that is scanned; `scan` says where it stopped looking."""
    scanned_pickles: int = 100_000
    """Pickles one behind another in a scanned file; `scan` says where it stopped looking."""
    scanned_depth: int = 8
    """Streams within streams that `scan` looks into; it says where it stopped looking."""
    scanned_in_vain: int = 1 << 20
    """Bytes that `scan` follows in a file where no pickle is, a 64th of a larger file; it says
    where it stopped looking.
    """

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Defaults are sent by their name: each of 10,000 jobs would bring 40 numbers, and have
        them compared with those that hold where it runs.
        """
        if self is DEFAULTS:
            return "DEFAULTS"
        return Limits, tuple(getattr(self, name) for name in NAMES)


DEFAULTS = Limits()
NAMES = Limits.__match_args__

_IN_FORCE: ContextVar[Limits] = ContextVar("ckptconv.limits", default=DEFAULTS)

in_force = _IN_FORCE.get
"""The limits that hold here: those of the innermost `limits` block of this thread or task, else the
defaults.
"""


def refuse_beyond(limit: str, needed: int, what: str, **told: Any) -> None:
    """Raise `LimitExceeded` where `needed` is beyond that limit; `told`: what else is said."""
    allowed = getattr(in_force(), limit)
    if needed > allowed:
        raise LimitExceeded(what, limit=limit, allowed=allowed, needed=needed, **told)


@contextlib.contextmanager
def limits(**changes: float) -> Iterator[Limits]:
    """Change limits within a `with` block; limits that are not given keep their values.

    Blocks may stand within each other. Other threads, and async tasks that run already, keep their
    own. A checkpoint that was opened within a block keeps its limits for what is done with it
    later, but for those that are set where it is done. Raises `UnknownOption` for a name that is
    not a limit, `OptionRefused` for a value that is not a positive number.

    >>> with limits(view_ratio=1000, pickle_bytes=4 << 30) as inside:
    ...     inside.view_ratio, inside.depth
    (1000, 1000)
    """
    checked: dict[str, Any] = {name: _checked(name, value) for name, value in changes.items()}
    with set_within(_IN_FORCE, replace(in_force(), **checked)) as inside:
        yield inside


def merged(opened: Limits) -> Limits:
    """The limits for what was opened under `opened`: what is set here, else what was set there."""
    here = in_force()
    if here is opened or opened is DEFAULTS:
        return here
    return replace(
        opened,
        **{
            name: value
            for name in NAMES
            if (value := getattr(here, name)) != getattr(DEFAULTS, name)
        },
    )


def held(opened: Limits) -> AbstractContextManager[object]:
    """Within the block, `merged(opened)` are in force."""
    return set_within(_IN_FORCE, merged(opened))


def _checked(name: str, value: float) -> float:
    if name not in NAMES:
        from difflib import get_close_matches

        near = get_close_matches(str(name), NAMES, 1)
        hint = f"they are {', '.join(NAMES)}"
        if near:
            hint = f"did you mean {near[0]}?"
        raise UnknownOption(f"there is no limit {name!r}", hint=hint)
    kind = type(getattr(DEFAULTS, name))
    if kind is bool:
        if type(value) is bool:
            return value
        raise OptionRefused(f"the limit {name} is True or False, not {value!r:.100}")
    noun, kinds = _NUMBERS[kind]
    if type(value) not in kinds:
        raise OptionRefused(f"the limit {name} is {noun}, not {value!r:.100}")
    if not value > 0 or not isfinite(value):
        raise OptionRefused(f"the limit {name} must be greater than 0, not {value!r:.100}")
    return value


_NUMBERS: dict[type, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
}
