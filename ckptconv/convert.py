"""Conversions: a plan executed as a stream, checked, and put in its place when it is whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckptconv import platforms
from ckptconv.accounting import refuse_unaccounted, refuse_unwritten
from ckptconv.bounds import held
from ckptconv.casting import cast
from ckptconv.checksums import Checksums
from ckptconv.choices import refuse_no_flag, refuse_no_output, spelling_checked
from ckptconv.dcp_output import write_dcp
from ckptconv.dtypes import DType
from ckptconv.encodings import flat
from ckptconv.errors import CheckpointError, OutputRefused, VerificationFailed
from ckptconv.formats.detect import Named, open_checkpoint
from ckptconv.keys import KeyRules
from ckptconv.layout import Layout, WriteItem
from ckptconv.outputs import (
    OutputStream,
    check_folder,
    check_output,
    check_space,
    followed,
    new_file,
    refuse_missing_folder,
)
from ckptconv.planning import plan_conversion, request_of
from ckptconv.plans import ConversionPlan, Options, PlannedFile, Target, Tied, Words, keeps_modules
from ckptconv.progress import Meter, OnProgress, Phase, Phases
from ckptconv.settling import Unknown
from ckptconv.sharding import earlier_files, index_path, moved_index
from ckptconv.showing import html_table, short_repr
from ckptconv.sources import SMALL, combined_crc, crc32, let_go, refuse_changed
from ckptconv.staging import ShardSet, put_file, put_folder, put_new_folder, put_set, remove_leftovers, staging_folder
from ckptconv.state_dicts import StateDict
from ckptconv.tensors import Storage, TensorRef, iter_cast_chunks, iter_chunks, refuse_crc, verbatim_range, verbatim_runs
from ckptconv.wording import size_text


@dataclass(frozen=True, slots=True, repr=False)
class ConversionResult:
    """The result of a conversion: its plan, seconds, and tensors verified (None: not asked for).

    `phases` are the seconds of writing, verifying and waiting for the disk; `seconds` are all of them and what lies between.

    `named` counts the storages that the source names, all of which were verified to be in the output or listed as left out
    (None: not asked, or not counted in a source of this format).
    `overflowed` counts finite values that a cast made infinite or NaN; `odd_bools` bools that are neither 0 nor 1.
    """

    plan: ConversionPlan
    seconds: float
    verified: int | None
    overflowed: Mapping[str, int] = field(default_factory=dict)
    odd_bools: Mapping[str, int] = field(default_factory=dict)
    named: int | None = None
    phases: Mapping[Phase, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        plan, verified = self.plan, None if self.verified is None else f"{self.verified:,} tensors verified"
        told = (plan.to, size_text(plan.nbytes), f"{self.seconds:.2f} s", verified)
        return short_repr("ConversionResult", f"{plan.source.name} → {plan.shown_name}", *told)

    def _repr_html_(self) -> str:
        return f"{html_table(repr(self)[1:-1], self._warnings())}{self.plan._repr_html_()}"

    def _warnings(self) -> Iterator[tuple[str, str]]:
        yield from ((key, f"{count:,} values became infinite in the cast") for key, count in self.overflowed.items())
        yield from ((key, f"{count:,} bools are neither 0 nor 1") for key, count in self.odd_bools.items())


@spelling_checked
def convert_checkpoint(
    source: Named,
    output: str | os.PathLike[str],
    *,
    to: Target | None = None,
    keys: Literal["strip", "keep"] | KeyRules = "strip",
    rules: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | tuple[str, str]] = (),
    reverse: bool = False,
    preset: Words = (),
    strip_prefix: Words = (),
    rename: Words = (),
    regex: Words = (),
    add_prefix: Words = (),
    include: Words = (),
    exclude: Words = (),
    like: str | os.PathLike[str] | None = None,
    model: str | None = None,
    drop_unexpected: bool = False,
    device: str | None = None,
    map_location: Mapping[str, str] | None = None,
    dtype: str | None = None,
    only: str | None = None,
    tied: Tied = "alias",
    unknown: Unknown = "refuse",
    max_shard_size: int | str | None = None,
    save_mapping: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
) -> ConversionResult:
    """Convert the checkpoint `source` into the file `output`, without importing torch (except for `to="dcp"`, a folder).

    `source` is a file, the folder of a checkpoint of many files, or a sequence of the files of all ranks; `tag` picks a step
    where it is a folder of several. `Options` says what all the others mean, from `to` to `save_mapping`; a
    sharded output is named after `output` or, in a folder, as Hugging Face libraries do. The output is written to a
    temporary sibling and renamed; an existing one is replaced only with `force`, and without `fsync` the disk is not
    waited for. `verify` counts what the source names, reads the output back and compares every tensor first.
    `on_progress` is called with a `Progress` (bytes), about once a MiB. Raises `CheckpointError`.

    >>> convert_checkpoint("in.pt", "out.safetensors", device="cuda:1")  # doctest: +SKIP
    """
    given = locals()
    refuse_no_output(output=output)
    refuse_no_flag(force=force, fsync=fsync, verify=verify)
    request = request_of(Options(**{name: given[name] for name in Options.__dataclass_fields__}))
    if request.max_shard_size is None:
        (check_folder if to == "dcp" else check_output)(Path(output), force=force)
    with open_checkpoint(source, tag=tag, whole_modules=keeps_modules(output, request)) as checkpoint:
        plan = plan_conversion(checkpoint, output, request)
        return execute_plan(plan, force=force, fsync=fsync, verify=verify, on_progress=on_progress)


@spelling_checked
def execute_plan(
    plan: ConversionPlan,
    *,
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
) -> ConversionResult:
    """Write the output of a plan as a stream, and put it in place when it is complete.

    `on_progress` is called with a `Progress` about once a MiB, in the phases write, verify and sync. `verify` counts what
    the source names without the reader, reads the output back before it is renamed and compares every tensor with the
    source, bit for bit or after the cast. Raises `MalformedCheckpoint` when the source is damaged, `OutputRefused` when the
    output cannot be written, `VerificationFailed`; nothing is left behind.
    """
    begin = time.perf_counter()
    _run_checks(plan)
    named = refuse_unaccounted(plan) if verify else None
    write = _write_folder if plan.to == "dcp" else _write_files
    phases = Phases(on_progress)
    result = write(plan, force, fsync, verify, phases)
    return replace(result, seconds=time.perf_counter() - begin, named=named, phases=phases.seconds)


def hand_over_plan(
    plan: ConversionPlan,
    deliver: Callable[[Path, Meter], None],
    *,
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
) -> ConversionResult:
    """Execute the plan of one file that is made for `deliver` alone, which is given its path when it is whole.

    The mapping, if there is one, is put in its place when `deliver` has returned. `force` and `fsync` are about that.
    """
    with _mapping_made(plan, force=force, fsync=fsync) as put_mapping:
        result = execute_plan(replace(plan, mapping=None), fsync=False, verify=verify, on_progress=on_progress)
        meter = Meter("deliver", plan.nbytes, on_progress)
        deliver(plan.output, meter)
        meter.finish()
        put_mapping()
    return result


def _run_checks(plan: ConversionPlan) -> None:
    """Read the indices of tensors made of parts: what points nowhere is never written, whatever the format."""
    try:
        for check in plan.checks:
            check()
    except CheckpointError as error:
        raise error.at(path=plan.source) from None


def _result(plan: ConversionPlan, tally: _Tally, verified: int | None) -> ConversionResult:
    """What there is to be told of an output, found out before it may take the place of its source."""
    overflowed = _by_tensor(plan, tally.overflowed, lambda ref: _count_overflow(plan, ref))
    odd_bools = _by_tensor(plan, tally.odd_bools, _count_odd_bools)
    return ConversionResult(plan, 0.0, verified, overflowed, odd_bools)


@dataclass(frozen=True, slots=True)
class _Tally:
    """The tensors with values that the user should know of: made infinite by the cast; bools that are neither 0 nor 1."""

    overflowed: list[TensorRef] = field(default_factory=list)
    odd_bools: list[TensorRef] = field(default_factory=list)


def _write_files(plan: ConversionPlan, force: bool, fsync: bool, verify: bool, phases: Phases) -> ConversionResult:
    """Write the one file of an output, or its shards and their index."""
    with ExitStack() as stack:
        put_mapping = stack.enter_context(_mapping_made(plan, force=force, fsync=fsync))
        folder = plan.output.parent
        if is_new := plan.in_folder and not folder.exists():
            refuse_missing_folder(folder, folder.parent)
        else:
            _refuse_taken(plan, force)
        if plan.in_folder:
            remove_leftovers(followed(folder))  # of a process that was killed just when the folder was there
        made = stack.enter_context(staging_folder(_place(plan, is_new), plan.output))
        if is_new:
            made = made / folder.name
            made.mkdir()
        check_space(made / plan.output.name, plan.nbytes, plan.output)
        tally, verified = _make_files(plan, made, fsync=fsync, verify=verify, phases=phases)
        result = _result(plan, tally, verified if verify else None)
        if not is_new or not put_new_folder(made, folder, fsync=fsync):
            _put_files(plan, made, force=force, fsync=fsync)
        put_mapping()
    return result


def _put_files(plan: ConversionPlan, made: Path, *, force: bool, fsync: bool) -> None:
    if platforms.ON_WINDOWS:  # which replaces no file that is open
        let_go(plan.inputs, [plan.output, *(earlier_files(plan.output) if plan.is_sharded else [])])
    if plan.is_sharded:
        put_set(made, _shard_set(plan), plan.output, force=force, fsync=fsync)
    else:
        put_file(made / plan.output.name, plan.output, force=force, fsync=fsync)


def _place(plan: ConversionPlan, is_new: bool) -> Path:
    """What an output is made beside: its new folder, the file that it will be, or its name in a folder of shards.

    A link that has the name of a shard is replaced, not followed: the blobs of a cache are not for writing.
    """
    if is_new or plan.index is None:
        return followed(plan.output.parent if is_new else plan.output)
    return followed(plan.output.parent) / plan.output.name


def _make_files(plan: ConversionPlan, made: Path, *, fsync: bool, verify: bool, phases: Phases) -> tuple[_Tally, int]:
    """Write all files of an output into the folder `made`, each whole and checked; returns how many tensors were verified."""
    tally, checksums, verified = _Tally(), Checksums(), 0
    written, compared = Meter("write", plan.nbytes, phases.tell), Meter("verify", plan.nbytes, phases.tell)
    for file in (*plan.files, *([plan.index] if plan.index else [])):
        temporary = made / file.path.name
        _make_file(file, temporary, tally, checksums, fsync=fsync, phases=phases, written=written)
        if file is plan.index:
            continue
        if plan.to == "safetensors":
            _open_with_library(temporary, file)
        if verify:
            with phases.timed("verify"):
                verified += _verify(plan, file, temporary, compared)
    if verify:
        compared.finish()
    checksums.finish()
    refuse_changed(plan.inputs)
    return tally, verified


def _make_file(
    file: PlannedFile,
    temporary: Path,
    tally: _Tally,
    checksums: Checksums,
    *,
    fsync: bool,
    phases: Phases,
    written: Meter,
) -> None:
    """Write one file of an output, and wait for the disk where that is wanted."""
    before = written.done
    with new_file(
        temporary, file.path, size=file.layout.nbytes, on_progress=lambda position: written.at(before + position)
    ) as stream:
        with phases.timed("write"):
            _write(file.layout, stream, tally, checksums)
            stream.finish()
        written.at(before + stream.position)
        with phases.waiting(stream.position, wanted=fsync):
            stream.settle(fsync=fsync)


def _shard_set(plan: ConversionPlan) -> ShardSet:
    index, raw = plan.index, plan.index.layout.items[0].values if plan.index else b""
    assert isinstance(raw, bytes)
    return ShardSet(
        shards=[file.path for file in plan.files],
        index=index.path if index else None,
        earlier=lambda: earlier_files(plan.output),
        moved_index=lambda folder: moved_index(raw, folder),
    )


@contextmanager
def _mapping_made(plan: ConversionPlan, *, force: bool, fsync: bool) -> Iterator[Callable[[], None]]:
    """The mapping, if one was asked for, made before the block; what is yielded puts it in place, when the output is."""
    if plan.mapping is None:
        yield lambda: None
        return
    path, layout = plan.mapping.path, plan.mapping.layout
    check_output(path, force=force)
    with staging_folder(followed(path), path) as folder:
        made = folder / path.name
        with new_file(made, path, size=layout.nbytes) as stream:
            _write(layout, stream, _Tally(), Checksums())
            stream.settle(fsync=fsync)

        def put() -> None:
            try:
                put_file(made, path, force=force, fsync=fsync)
            except OutputRefused as error:
                error.hint = f"the output {plan.output} is in place"
                raise

        yield put


def _refuse_taken(plan: ConversionPlan, force: bool) -> None:
    """Refuse an output of which a file, or another one of its name, is there already, or must not be replaced."""
    files = [*plan.files, *([plan.index] if plan.index else [])]
    if plan.is_sharded:
        check_output(index_path(plan.output), force=force)
        for path in earlier_files(plan.output):
            check_output(path, force=force)
    for file in files:
        check_output(file.path, force=force)


def _write_folder(plan: ConversionPlan, force: bool, fsync: bool, verify: bool, phases: Phases) -> ConversionResult:
    """Write a plain torch file beside the output, and have torch make a DCP folder of it."""
    tally, checksums = _Tally(), Checksums()
    file, name = plan.files[0], followed(plan.output).name
    check_folder(plan.output, force=force)
    with (
        _mapping_made(plan, force=force, fsync=fsync) as put_mapping,
        staging_folder(followed(plan.output), plan.output) as staging,
    ):
        plain, made = staging / ".plain.pt", staging / name
        check_space(plain, 2 * plan.nbytes, plan.output)
        planned, written = replace(file, path=plan.output), Meter("write", 2 * plan.nbytes, phases.tell)
        _make_file(planned, plain, tally, checksums, fsync=False, phases=phases, written=written)
        checksums.finish()
        refuse_changed(plan.inputs)
        made.mkdir()
        with phases.timed("write"):
            write_dcp(plain, made, plan.output)
        written.finish()
        plain.unlink()
        result = _result(plan, tally, _verify_folder(plan, made, phases) if verify else None)
        if platforms.ON_WINDOWS:
            let_go(plan.inputs, [plan.output])
        with phases.waiting(plan.nbytes, wanted=fsync):
            put_folder(made, plan.output, force=force, fsync=fsync)
        put_mapping()
        return result


def _verify_folder(plan: ConversionPlan, made: Path, phases: Phases) -> int:
    meter = Meter("verify", plan.nbytes, phases.tell)
    with phases.timed("verify"):
        count = _verify(plan, plan.files[0], made, meter)
    meter.finish()
    return count


def _write(layout: Layout, stream: OutputStream, tally: _Tally, checksums: Checksums) -> None:
    crcs: list[int] = []
    between = b""
    for index, item in enumerate(layout.items):
        stream.write(between + item.lead)
        lost = [0]
        crc = _write_values(item, stream, checksums, lost)
        if lost[0] and isinstance(item.values, TensorRef):
            tally.overflowed.append(item.values)
        if item.dtype.kind == "bool" and isinstance(item.values, TensorRef) and _count_odd_bools(item.values):
            tally.odd_bools.append(item.values)
        crcs.append(crc)
        between = layout.trail(index, crc)
    stream.write(between)
    stream.write(layout.ending(crcs))


def _write_values(item: WriteItem, stream: OutputStream, checksums: Checksums, overflowed: list[int]) -> int:
    """Write one payload and return its CRC-32; the source's own CRCs are checked on the way."""
    values = item.values
    if isinstance(values, bytes):
        stream.write(values)
        return crc32(values)
    if len(values.pieces) == 1 and (verbatim := verbatim_range(values)) is not None:
        storage, _ = verbatim
        if values.nbytes == storage.nbytes and storage.part_of is None:
            return _write_whole(item, values, storage, stream, overflowed)
    if item.dtype is values.dtype and (runs := verbatim_runs(values)) is not None:
        return _write_runs(runs, stream, checksums)
    for piece in values.pieces:
        checksums.read(piece.storage)
    crc = 0
    for chunk in iter_cast_chunks(values, item.dtype, overflowed):
        stream.write(chunk)
        crc = crc32(chunk, crc)
    return crc


def _write_runs(runs: Sequence[tuple[Storage, int, int]], stream: OutputStream, checksums: Checksums) -> int:
    """Copy runs of bytes one after the other."""
    crc = 0
    for storage, first, nbytes in runs:
        found = stream.copy(storage.source, storage.offset + first, nbytes)
        checksums.copied(storage, first, nbytes, found)
        crc = combined_crc(crc, found, nbytes) if len(runs) > 1 else found
    return crc


def _write_whole(item: WriteItem, values: TensorRef, storage: Storage, stream: OutputStream, overflowed: list[int]) -> int:
    """Write a whole storage, copied or cast, checking its CRC-32 in the same pass."""
    if item.dtype is values.dtype:
        if item.nbytes <= SMALL:
            data = storage.source.read(storage.offset, item.nbytes)
            stream.write(data)
            crc = crc32(data)
        else:
            crc = stream.copy(storage.source, storage.offset, item.nbytes)
        if crc != storage.crc32:
            refuse_crc(storage, crc)
        return crc
    crc, source_crc = 0, 0
    for chunk in iter_chunks(values):
        source_crc = crc32(chunk, source_crc)
        result = cast(chunk, values.dtype, item.dtype)
        overflowed[0] += result.overflowed
        stream.write(result.data)
        crc = crc32(result.data, crc)
    refuse_crc(storage, source_crc)
    return crc


def _by_tensor(plan: ConversionPlan, written: Sequence[TensorRef], count: Callable[[TensorRef], int]) -> dict[str, int]:
    """Counts by the path of each tensor over the storages of `written`: tensors may share one, and not all are touched."""
    touched = {id(piece.storage) for ref in written for piece in ref.pieces}
    found = {}
    for path, ref in plan.tensors() if touched else ():
        if any(id(piece.storage) in touched for piece in ref.pieces) and (number := count(ref)):
            found[path] = number
    return found


def _count_overflow(plan: ConversionPlan, ref: TensorRef) -> int:
    lost = [0]
    for _ in iter_cast_chunks(ref, plan.cast(ref), lost):
        pass
    return lost[0]


def _count_odd_bools(ref: TensorRef) -> int:
    """Bytes of a bool tensor that are neither 0 nor 1: what they mean depends on who reads them."""
    if ref.dtype.kind != "bool":
        return 0
    return sum(len(bytes(chunk).translate(None, b"\0\1")) for chunk in iter_chunks(ref))


def _open_with_library(path: Path, file: PlannedFile) -> None:
    """Let the safetensors library read the header that was written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            count = len(opened.keys())
    except SafetensorError as error:
        raise VerificationFailed(f"the safetensors library does not open it: {error}", path=file.path) from error
    if count != len(file.layout.items):
        raise VerificationFailed(f"the safetensors library sees {count} tensors in it", path=file.path)


def _verify(plan: ConversionPlan, file: PlannedFile, written: Path, meter: Meter) -> int:
    """Compare every tensor of a written file with its source; returns how many there are."""
    count = 0
    if plan.to == "torch":
        refuse_unwritten(file, written)
    by_key = plan.to == "safetensors" or plan.index is not None
    with held(plan.limits), open_checkpoint(written, whole_modules=plan.to == "torch") as output:
        actual = _flat_tensors(output.state_dict(), plan) if by_key else dict(output.tensors()) if plan.to == "dcp" else None
        there = iter(()) if actual is not None else output.tensors()
        for path, ref in file.tensors():
            name, other = (path, actual.get(path)) if actual is not None else next(there, (path, None))
            if other is None or name != path or not _equal(ref, other, plan.cast(ref), meter):
                raise VerificationFailed("the output differs from the source", path=file.path, where=path)
            count += 1
    return count


def _flat_tensors(found: StateDict, plan: ConversionPlan) -> dict[str, TensorRef]:
    """The tensors of a written state dict by key; in safetensors, those that are encoded by their components."""
    encode = plan.to == "safetensors"
    made = (flat(key, value, encode=encode) for key, value in zip(found.keys, found.values, strict=True))
    return {name: ref for item in made if item is not None for name, ref in item.tensors}


def _equal(ref: TensorRef, other: TensorRef, dtype: DType, meter: Meter) -> bool:
    if other.dtype is not dtype or other.shape != ref.shape:
        return False
    expected, found = b"", b""
    theirs = iter_chunks(other)
    for chunk in iter_cast_chunks(ref, dtype, [0]):
        expected += chunk
        meter.add(len(chunk))
        while len(found) < len(expected):
            found += next(theirs, b"\0" * (len(expected) + 1))
        if not found.startswith(expected):
            return False
        expected, found = b"", found[len(expected) :]
    return not found and next(theirs, None) is None
