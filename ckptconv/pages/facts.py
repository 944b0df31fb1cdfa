"""What a page says of a checkpoint, or of two: plain facts, gathered while they are open."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from ckptconv.diff.difference import Difference
from ckptconv.inspect.inspection import Inspection
from ckptconv.objects.threats import Level
from ckptconv.support.rows import Row
from ckptconv.tensors.deviation import Deviation
from ckptconv.tensors.refs import Shape, TensorRef, view_identity
from ckptconv.tensors.statistics import Statistics
from ckptconv.values.named import NamedValue


@dataclass(frozen=True, slots=True)
class PageTensor:
    """A tensor under one of its names. `same_as` is the place of the one before it that is the very
    same view, so its bytes are counted there (None: there is none).
    """

    name: str
    dtype: str
    shape: Shape
    numel: int
    nbytes: int
    device: str
    same_as: int | None = None
    statistics: Statistics | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """A storage that several tensors lie in, or that has bytes that no tensor uses: the places of
    its tensors, its size, and the bytes of it that they span.
    """

    tensors: tuple[int, ...]
    nbytes: int
    used: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the scan says: how bad it is, in a line, and each thing that it found."""

    level: Level | None  # None: it could not be scanned
    text: str
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a page says of one checkpoint: the facts of its inspection, the verdict of the scan, the
    `command` that makes it portable (None: it is, or none does) and why none does, its tensors.

    `parameters` are the numbers in its state dict `parameters_of` (None: in all of its tensors).
    """

    name: str
    inspection: Inspection
    scan: Verdict
    command: str | None
    no_fix: str | None
    lost: tuple[str, ...]
    parameters: int
    parameters_of: str | None
    tensors: tuple[PageTensor, ...]
    shared: tuple[Shared, ...]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """A key of two checkpoints: the places of its tensors in both (None: one lacks it), how they
    compare, and how far apart their values are.
    """

    a: int | None
    b: int | None
    state: str
    deviation: Deviation | None = None


@dataclass(frozen=True, slots=True)
class PageFacts:
    """All that a page says; of a comparison, of both checkpoints and their keys."""

    files: tuple[FileFacts, ...]
    difference: Difference | None = None
    pairs: tuple[Pair, ...] = ()

    @property
    def has_values(self) -> bool:
        """Whether statistics are told."""
        return any(item.statistics for file in self.files for item in file.tensors)


STATES = (
    "same", "values differ", "dtype differs", "shape differs", "only in A", "only in B", "no tensor"
)  # fmt: skip
"""How the tensors of a key compare; ``no tensor``: one side has something else there."""


def page_tensors(
    values: Sequence[NamedValue], statistics: Iterable[Statistics] | None = None
) -> tuple[PageTensor, ...]:
    """The tensors as the page has them, each with its statistics where there are some."""
    known = [None] * len(values) if statistics is None else list(statistics)
    firsts: dict[Hashable, int] = {}
    made = []
    for at, (item, counted) in enumerate(zip(values, known, strict=True)):
        first = firsts.setdefault(view_identity(item.ref), at)
        made.append(
            PageTensor(
                item.name,
                item.dtype.name,
                item.shape,
                item.numel,
                item.ref.nbytes,
                item.ref.location,
                None if first == at else first,
                counted,
            )
        )
    return tuple(made)


def shared_storages(refs: Sequence[TensorRef]) -> tuple[Shared, ...]:
    """The storages with several tensors, or with bytes that none uses, the largest first."""
    members: dict[int, list[int]] = {}
    for at, ref in enumerate(refs):
        if ref.is_view:
            members.setdefault(id(ref.storage), []).append(at)
    found = []
    for places in members.values():
        nbytes = refs[places[0]].storage.nbytes
        used = _covered([refs[at].byte_span() for at in places])
        if len(places) > 1 or used < nbytes:
            found.append(Shared(tuple(places), nbytes, used))
    return tuple(sorted(found, key=lambda item: (-item.nbytes, item.tensors)))


def _covered(spans: list[tuple[int, int]]) -> int:
    """How many bytes lie in at least one of some spans."""
    covered = reached = 0
    for start, stop in sorted(spans):
        covered += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered


def pairs_of(
    difference: Difference, ours: Sequence[PageTensor], theirs: Sequence[PageTensor]
) -> tuple[Pair, ...]:
    """The tensors of both sides by their keys, in the order of the first, then of the second."""
    others: dict[str, list[int]] = {}
    for at, item in enumerate(theirs):
        others.setdefault(item.name, []).append(at)
    states, deviations = _states(difference)
    pairs = []
    for at, item in enumerate(ours):
        places = others.get(item.name)
        if not places:
            pairs.append(Pair(at, None, states.get(item.name, "only in A")))
            continue
        state = states.get(item.name, "same")
        pairs.append(Pair(at, places.pop(0), state, deviations.get(item.name)))
    left = sorted(at for places in others.values() for at in places)
    pairs += [Pair(None, at, states.get(theirs[at].name, "only in B")) for at in left]
    return tuple(pairs)


_LONGEST_KEY = 500  # characters of a key in the name of a tensor


def _states(found: Difference) -> tuple[Mapping[str, str], Mapping[str, Deviation]]:
    """The state of each key that is not the same in both, and how far apart its values are."""
    states: dict[str, str] = {}
    states |= dict.fromkeys((item.key[:_LONGEST_KEY] for item in found.others), "no tensor")
    states |= dict.fromkeys((item.key[:_LONGEST_KEY] for item in found.values), "values differ")
    if not found.ignore_dtype:
        states |= dict.fromkeys((item.key[:_LONGEST_KEY] for item in found.dtypes), "dtype differs")
    states |= dict.fromkeys((item.key[:_LONGEST_KEY] for item in found.shapes), "shape differs")
    states |= dict.fromkeys((key[:_LONGEST_KEY] for key in found.only_a), "only in A")
    states |= dict.fromkeys((key[:_LONGEST_KEY] for key in found.only_b), "only in B")
    return states, {item.key[:_LONGEST_KEY]: item.deviation for item in found.values}


def free_name(path: PurePath, suffix: str) -> PurePath:
    """The output in the command that fixes `path`: the same for the same file, whatever lies beside
    it.
    """
    stem = path.name.removesuffix(".index.json")
    return path.parent / f"{Path(stem).stem or 'model'}-portable{suffix}"
