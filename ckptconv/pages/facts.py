"""What a page says of a checkpoint, or of two: plain facts, gathered while they are open, once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath

from ckptconv.convert.fixes import Fix, command, workable
from ckptconv.diff.report import Changed, Difference, Reshaped, ValueChange
from ckptconv.formats.registry import Named
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.inspect.inspection import Inspection
from ckptconv.io.guarded import check_places
from ckptconv.io.places import places_of
from ckptconv.objects.threats import Level
from ckptconv.scan.files import scan_checkpoint, scan_headline, scan_lines
from ckptconv.support.errors import CheckpointError
from ckptconv.support.progress import OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.report import Row
from ckptconv.tensors.deviation import Deviation
from ckptconv.tensors.refs import Shape, TensorRef, view_identity
from ckptconv.tensors.statistics import Statistics
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.values.collect import statistics_of
from ckptconv.values.named import NamedValue, NamedValues


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
class ScanVerdict:
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
    scan: ScanVerdict
    command: str | None
    no_fix: str | None
    lost: tuple[str, ...]
    parameters: int
    parameters_of: str | None
    tensors: tuple[PageTensor, ...]
    shared: tuple[Shared, ...]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyPair:
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
    pairs: tuple[KeyPair, ...] = ()

    @property
    def sides(self) -> tuple[str, ...]:
        """What each of two checkpoints is called; nothing where there is one."""
        return ("",) if self.difference is None else ("A", "B")

    @property
    def has_values(self) -> bool:
        """Whether statistics are told."""
        return any(item.statistics for file in self.files for item in file.tensors)


STATES = (
    "same", "values differ", "dtype differs", "shape differs", "only in A", "only in B", "no tensor"
)  # fmt: skip
"""How the tensors of a key compare; ``no tensor``: one side has something else there."""


def page_tensors(
    values: Sequence[NamedValue], statistics: Iterable[Statistics | None]
) -> tuple[PageTensor, ...]:
    """The tensors as the page has them, each with its statistics where there are some."""
    firsts: dict[Hashable, int] = {}
    made = []
    for at, (item, counted) in enumerate(zip(values, statistics, strict=True)):
        ref = item.ref
        told = (item.name, item.dtype.name, item.shape, item.numel, ref.nbytes, ref.location)
        first: int | None = firsts.setdefault(view_identity(ref), at)
        if first == at:
            first = None
        made.append(PageTensor(*told, first, counted))
    return tuple(made)


def shared_storages(refs: Sequence[TensorRef]) -> tuple[Shared, ...]:
    """The storages with several tensors, or with bytes that none uses, the largest first."""
    members: dict[int, list[int]] = {}
    for at, ref in enumerate(refs):
        if ref.is_view:
            members.setdefault(id(ref.storage), []).append(at)
    found = []
    for places in members.values():
        used = reached = 0
        for start, stop in sorted(refs[at].byte_span() for at in places):
            used += max(0, stop - max(start, reached))
            reached = max(reached, stop)
        nbytes = refs[places[0]].storage.nbytes
        if len(places) > 1 or used < nbytes:
            found.append(Shared(tuple(places), nbytes, used))
    return tuple(sorted(found, key=lambda item: (-item.nbytes, item.tensors)))


def pairs_of(
    difference: Difference, ours: Sequence[PageTensor], theirs: Sequence[PageTensor]
) -> tuple[KeyPair, ...]:
    """The tensors of both sides by their keys, in the order of the first, then of the second."""
    others: dict[str, list[int]] = {}
    for at, item in enumerate(theirs):
        others.setdefault(item.name, []).append(at)
    states, deviations = _states(difference)
    pairs = []
    for at, item in enumerate(ours):
        places = others.get(item.name)
        if not places:
            pairs.append(KeyPair(at, None, states.get(item.name, "only in A")))
            continue
        state = states.get(item.name, "same")
        pairs.append(KeyPair(at, places.pop(0), state, deviations.get(item.name)))
    left = sorted(at for places in others.values() for at in places)
    pairs += [KeyPair(None, at, states.get(theirs[at].name, "only in B")) for at in left]
    return tuple(pairs)


_LONGEST_KEY = 500  # characters of a key in the name of a tensor


def _states(found: Difference) -> tuple[Mapping[str, str], Mapping[str, Deviation]]:
    """The state of each key that is not the same in both, and how far apart its values are."""
    changed: dict[str, Sequence[Changed | Reshaped | ValueChange]] = {
        "no tensor": found.others,
        "values differ": found.values,
        "dtype differs": () if found.ignore_dtype else found.dtypes,
        "shape differs": found.shapes,
    }
    keys = {state: [item.key for item in items] for state, items in changed.items()}
    keys |= {"only in A": [*found.only_a], "only in B": [*found.only_b]}
    states = {key[:_LONGEST_KEY]: state for state, named in keys.items() for key in named}
    return states, {item.key[:_LONGEST_KEY]: item.deviation for item in found.values}


def free_name(path: PurePath, suffix: str) -> PurePath:
    """The output in the command that fixes `path`: the same for one file, whatever is beside it."""
    stem = path.name.removesuffix(".index.json")
    return path.parent / f"{Path(stem).stem or 'model'}-portable{suffix}"


# ---------------------------------------------------------------------------------- gathered


def file_facts(
    source: Named,
    checkpoint: Checkpoint,
    found: NamedValues,
    tag: str | None,
    values: bool,
    on_progress: OnProgress | None,
) -> FileFacts:
    """What a page says of an open checkpoint and the tensors `found` in it; with `values`, these
    are read. `tag` is the step that it is.
    """
    check_places(checkpoint.sources)
    paths = [place.path for place in places_of(source)]
    inspection = inspect_checkpoint(checkpoint)
    fix = _fix(checkpoint, inspection, paths, tag)
    statistics: list[Statistics | None] = [None] * len(found.values)
    if values:
        statistics = [item.statistics for item in statistics_of(found.values, on_progress)]
    tensors = page_tensors(found.values, statistics)
    of, count = _parameters(checkpoint, inspection, tensors)
    shared = shared_storages([item.ref for item in found.values])
    name, scan = ", ".join(map(str, paths)), _scanned(paths)
    return FileFacts(name, inspection, scan, *fix, count, of, tensors, shared, found.unread)


def _parameters(
    checkpoint: Checkpoint, found: Inspection, tensors: Sequence[PageTensor]
) -> tuple[str | None, int]:
    """The path of the state dict that is the model, and the numbers in it; where there is not one,
    None and the numbers of all tensors.
    """
    try:
        model = checkpoint.state_dict()
    except CheckpointError:
        return None, _numel(tensors)
    return model.path, found.parameters.get(model.path, _numel(tensors))


def _numel(tensors: Sequence[PageTensor]) -> int:
    return sum(item.numel for item in tensors if item.same_as is None)


def _fix(
    checkpoint: Checkpoint, found: Inspection, paths: Sequence[PurePath], tag: str | None
) -> tuple[str | None, str | None, tuple[str, ...]]:
    """The command that makes it portable, why none does, and what that leaves out."""
    if found.portable:
        return None, None, ()
    fix = workable(Fix(tag=tag), checkpoint)
    if isinstance(fix, CheckpointError):
        return None, str(fix), ()
    output = free_name(paths[0], fix.fix.suffix or ".pt")
    return command(fix.fix, paths, output), None, fix.lost


def _scanned(paths: Sequence[PurePath]) -> ScanVerdict:
    """The worst verdict on the files."""
    verdicts = []
    for path in paths:
        try:
            scan = scan_checkpoint(path)
        except CheckpointError as error:
            verdicts.append(ScanVerdict(None, str(error)))
            continue
        verdicts.append(ScanVerdict(scan.level, scan_headline(scan), tuple(scan_lines(scan))))
    # what could not be scanned may be worse than what is unknown
    order = ("plain", "unknown", None, "dangerous")
    return max(verdicts, key=lambda item: order.index(item.level))
