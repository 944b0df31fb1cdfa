"""An output, read back and compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from ckptconv.convert.accounting import refuse_unwritten
from ckptconv.convert.plan import ConversionPlan, PlannedFile
from ckptconv.formats.registry import open_certain
from ckptconv.formats.target_format import ready_bytes
from ckptconv.io.location import Location
from ckptconv.objects.encodings import flat
from ckptconv.support.errors import VerificationFailed
from ckptconv.support.limits import held
from ckptconv.support.progress import Counting, Meter, Phases
from ckptconv.tensors.ahead import read_soon
from ckptconv.tensors.computed import iter_cast_chunks
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.plain_check import is_made, other_element, sample_size
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.stream import iter_chunks
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.state_dicts import StateDict
from ckptconv.tree.walk import tensors_of


def verify_folder(plan: ConversionPlan, made: Location, phases: Phases) -> int:
    """Compare every tensor of a written folder with its source; returns how many there are."""
    meter = Meter("verify", plan.nbytes, phases.tell)
    with phases.timed("verify"):
        count = verify_file(plan, plan.files[0], made, meter)
    meter.finish()
    return count


def refuse_unread(plan: ConversionPlan) -> None:
    """Raise `VerificationFailed` where whoever opens the folder of an output reads other files."""
    with held(plan.made_of.limits), open_certain(plan.folder) as opened:
        read = {source.path.name for source in opened.sources}
    other = read - {file.path.name for file in plan.files}
    if other:
        what = f"is in place, but who opens its folder reads {', '.join(sorted(other)[:3])}"
        raise VerificationFailed(what, path=plan.folder, hint="remove those, or name a new folder")


def verify_file(plan: ConversionPlan, file: PlannedFile, written: Location, meter: Counting) -> int:
    """Compare every tensor of a written file with its source; returns how many there are."""
    count = 0
    target = plan.target
    raw = ready_bytes(file.layout)
    # known when it was planned: there is no source to compare it with
    if raw is not None:
        _refuse_other_bytes(file, raw, written)
        return 0
    if target.is_counted:
        refuse_unwritten(file, written)
    with (
        held(plan.made_of.limits),
        open_certain(written, whole_modules=target.keeps_modules) as output,
    ):
        cast, beside = plan.made_of.cast, list(_beside(plan, file, output))
        most = sample_size([(ref, cast(ref)) for _, ref, _ in beside])
        with read_soon([ref for _, ref, _ in beside], [other for _, _, other in beside if other]):
            for path, ref, other in beside:
                if other is None or not _equal(ref, other, cast(ref), meter):
                    raise VerificationFailed(
                        "the output differs from the source", path=file.path, where=path
                    )
                _refuse_other_element(ref, cast(ref), other, most, file, path)
                count += 1
    return count


def _refuse_other_bytes(file: PlannedFile, raw: bytes, written: Location) -> None:
    with closing(written.open()) as source:
        if source.size != len(raw) or source.read(0, source.size) != raw:
            raise VerificationFailed("the output differs from the plan", path=file.path)


def _refuse_other_element(
    ref: TensorRef, dtype: DType, written: TensorRef, most: int, file: PlannedFile, path: str
) -> None:
    """Hold computed or cast values against a plain statement of how, which shares no code."""
    if not is_made(ref, dtype):
        return
    place = other_element(ref, dtype, written, most)
    if place is not None:
        what = f"the element {list(place)} is not what the source gives, worked out once more"
        raise VerificationFailed(what, path=file.path, where=path)


def _beside(
    plan: ConversionPlan, file: PlannedFile, output: Checkpoint
) -> Iterator[tuple[str, TensorRef, TensorRef | None]]:
    """Each planned tensor by its path, and what was written under that path in its place."""
    if plan.target.keeps_order and not plan.is_sharded:
        there = output.tensors()
        for path, ref in file.tensors():
            name, other = next(there, (path, None))
            yield path, ref, other if name == path else None
        return
    by_key = plan.is_sharded or not plan.target.holds_trees
    actual = _flat_tensors(output.state_dict(), plan) if by_key else dict(output.tensors())
    if output.stored is not None:
        actual |= tensors_of(output.stored)
    yield from ((path, ref, actual.get(path)) for path, ref in file.tensors())


def _flat_tensors(found: StateDict, plan: ConversionPlan) -> dict[str, TensorRef]:
    """The tensors of a written state dict by key; in safetensors, encoded ones by component."""
    encode = plan.target.encodes
    made = (
        flat(key, value, encode=encode) for key, value in zip(found.keys, found.values, strict=True)
    )
    return {name: ref for item in made if item is not None for name, ref in item.tensors}


def _equal(ref: TensorRef, other: TensorRef, dtype: DType, meter: Counting) -> bool:
    if other.dtype is not dtype or other.shape != ref.shape:
        return False
    expected, found = b"", b""
    theirs = iter_chunks(other)
    for chunk in iter_cast_chunks(ref, dtype, [0]):
        expected += chunk
        meter.add(len(chunk))
        while len(found) < len(expected):
            # zeros for what ends early, and one too many: where zeros are expected, that is left
            found += next(theirs, b"\0" * (len(expected) + 1))
        if not found.startswith(expected):
            return False
        expected, found = b"", found[len(expected) :]
    return not found and next(theirs, None) is None
