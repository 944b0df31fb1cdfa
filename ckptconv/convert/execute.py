"""Conversions: a plan executed as a stream, checked, and put in its place when it is whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptconv.convert.accounting import refuse_unaccounted
from ckptconv.convert.plan import ConversionPlan, PlannedFile
from ckptconv.convert.verify import verify_file, verify_folder
from ckptconv.convert.write import Tally, by_tensor, count_odd_bools, count_overflow, write_layout
from ckptconv.formats.hf_names import earlier_files, index_path, moved_index
from ckptconv.io.destination import (
    check_folder,
    check_output,
    check_space,
    followed,
    new_file,
    refuse_missing_folder,
)
from ckptconv.io.files import let_go, refuse_changed
from ckptconv.io.staging import (
    ShardSet,
    put_file,
    put_folder,
    put_new_folder,
    put_set,
    remove_leftovers,
    staging_folder,
)
from ckptconv.support import platforms
from ckptconv.support.choices import spelling_checked
from ckptconv.support.errors import CheckpointError, OutputRefused
from ckptconv.support.progress import Meter, OnProgress, Phase, Phases
from ckptconv.support.showing import html_table, short_repr
from ckptconv.support.text import size_text
from ckptconv.tensors.checksums import Checksums


@dataclass(frozen=True, slots=True, repr=False)
class ConversionResult:
    """The result of a conversion: its plan, seconds, and tensors verified (None: not asked for).

    `phases` are the seconds of writing, verifying and waiting for the disk; `seconds` are all of
    them and what lies between.

    `named` counts the storages that the source names, all of which were verified to be in the
    output or listed as left out (None: not asked, or not counted in a source of this format).
    `overflowed` counts finite values that a cast made infinite or NaN; `odd_bools` bools that are
    neither 0 nor 1.
    """

    plan: ConversionPlan
    seconds: float
    verified: int | None
    overflowed: Mapping[str, int] = field(default_factory=dict)
    odd_bools: Mapping[str, int] = field(default_factory=dict)
    named: int | None = None
    phases: Mapping[Phase, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        plan, verified = (
            self.plan,
            None if self.verified is None else f"{self.verified:,} tensors verified",
        )
        told = (plan.to, size_text(plan.nbytes), f"{self.seconds:.2f} s", verified)
        return short_repr("ConversionResult", f"{plan.source.name} → {plan.shown_name}", *told)

    def _repr_html_(self) -> str:
        return f"{html_table(repr(self)[1:-1], self._warnings())}{self.plan._repr_html_()}"

    def _warnings(self) -> Iterator[tuple[str, str]]:
        yield from (
            (key, f"{count:,} values became infinite in the cast")
            for key, count in self.overflowed.items()
        )
        yield from (
            (key, f"{count:,} bools are neither 0 nor 1") for key, count in self.odd_bools.items()
        )


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

    `on_progress` is called with a `Progress` about once a MiB, in the phases write, verify and
    sync. `verify` counts what the source names without the reader, reads the output back before it
    is renamed and compares every tensor with the source, bit for bit or after the cast. Raises
    `MalformedCheckpoint` when the source is damaged, `OutputRefused` when the output cannot be
    written, `VerificationFailed`; nothing is left behind.
    """
    begin = time.perf_counter()
    _run_checks(plan)
    named = refuse_unaccounted(plan) if verify else None
    write = _write_folder if plan.target.is_folder else _write_files
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
    """Execute the plan of one file that is made for `deliver` alone, which is given its path when
    it is whole.

    The mapping, if there is one, is put in its place when `deliver` has returned. `force` and
    `fsync` are about that.
    """
    with _mapping_made(plan, force=force, fsync=fsync) as put_mapping:
        result = execute_plan(
            replace(plan, mapping=None), fsync=False, verify=verify, on_progress=on_progress
        )
        meter = Meter("deliver", plan.nbytes, on_progress)
        deliver(plan.output, meter)
        meter.finish()
        put_mapping()
    return result


def _run_checks(plan: ConversionPlan) -> None:
    """Read the indices of tensors made of parts: what points nowhere is never written, whatever the
    format.
    """
    try:
        for check in plan.checks:
            check()
    except CheckpointError as error:
        raise error.at(path=plan.source) from None


def _result(plan: ConversionPlan, tally: Tally, verified: int | None) -> ConversionResult:
    """What there is to be told of an output, found out before it may take the place of its source."""
    overflowed = by_tensor(plan, tally.overflowed, lambda ref: count_overflow(plan, ref))
    odd_bools = by_tensor(plan, tally.odd_bools, count_odd_bools)
    return ConversionResult(plan, 0.0, verified, overflowed, odd_bools)


def _write_files(
    plan: ConversionPlan, force: bool, fsync: bool, verify: bool, phases: Phases
) -> ConversionResult:
    """Write the one file of an output, or its shards and their index."""
    with ExitStack() as stack:
        put_mapping = stack.enter_context(_mapping_made(plan, force=force, fsync=fsync))
        folder = plan.output.parent
        if is_new := plan.in_folder and not folder.exists():
            refuse_missing_folder(folder, folder.parent)
        else:
            _refuse_taken(plan, force)
        if plan.in_folder:
            # of a process that was killed just when the folder was there
            remove_leftovers(followed(folder))
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
    """What an output is made beside: its new folder, the file that it will be, or its name in a
    folder of shards.

    A link that has the name of a shard is replaced, not followed: the blobs of a cache are not for
    writing.
    """
    if is_new or plan.index is None:
        return followed(plan.output.parent if is_new else plan.output)
    return followed(plan.output.parent) / plan.output.name


def _make_files(
    plan: ConversionPlan, made: Path, *, fsync: bool, verify: bool, phases: Phases
) -> tuple[Tally, int]:
    """Write all files of an output into the folder `made`, each whole and checked; returns how many
    tensors were verified.
    """
    tally, checksums, verified = Tally(), Checksums(), 0
    written, compared = (
        Meter("write", plan.nbytes, phases.tell),
        Meter("verify", plan.nbytes, phases.tell),
    )
    for file in (*plan.files, *([plan.index] if plan.index else [])):
        temporary = made / file.path.name
        _make_file(file, temporary, tally, checksums, fsync=fsync, phases=phases, written=written)
        if file is plan.index:
            continue
        plan.target.check_written(temporary, file.path, len(file.layout.items))
        if verify:
            with phases.timed("verify"):
                verified += verify_file(plan, file, temporary, compared)
    if verify:
        compared.finish()
    checksums.finish()
    refuse_changed(plan.inputs)
    return tally, verified


def _make_file(
    file: PlannedFile,
    temporary: Path,
    tally: Tally,
    checksums: Checksums,
    *,
    fsync: bool,
    phases: Phases,
    written: Meter,
) -> None:
    """Write one file of an output, and wait for the disk where that is wanted."""
    before = written.done
    with new_file(
        temporary,
        file.path,
        size=file.layout.nbytes,
        on_progress=lambda position: written.at(before + position),
    ) as stream:
        with phases.timed("write"):
            write_layout(file.layout, stream, tally, checksums)
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
def _mapping_made(
    plan: ConversionPlan, *, force: bool, fsync: bool
) -> Iterator[Callable[[], None]]:
    """The mapping, if one was asked for, made before the block; what is yielded puts it in place,
    when the output is.
    """
    if plan.mapping is None:
        yield lambda: None
        return
    path, layout = plan.mapping.path, plan.mapping.layout
    check_output(path, force=force)
    with staging_folder(followed(path), path) as folder:
        made = folder / path.name
        with new_file(made, path, size=layout.nbytes) as stream:
            write_layout(layout, stream, Tally(), Checksums())
            stream.settle(fsync=fsync)

        def put() -> None:
            try:
                put_file(made, path, force=force, fsync=fsync)
            except OutputRefused as error:
                error.hint = f"the output {plan.output} is in place"
                raise

        yield put


def _refuse_taken(plan: ConversionPlan, force: bool) -> None:
    """Refuse an output of which a file, or another one of its name, is there already, or must not
    be replaced.
    """
    files = [*plan.files, *([plan.index] if plan.index else [])]
    if plan.is_sharded:
        check_output(index_path(plan.output), force=force)
        for path in earlier_files(plan.output):
            check_output(path, force=force)
    for file in files:
        check_output(file.path, force=force)


def _write_folder(
    plan: ConversionPlan, force: bool, fsync: bool, verify: bool, phases: Phases
) -> ConversionResult:
    """Write a plain torch file beside the output, and have torch make a DCP folder of it."""
    tally, checksums = Tally(), Checksums()
    file, name = plan.files[0], followed(plan.output).name
    check_folder(plan.output, force=force)
    with (
        _mapping_made(plan, force=force, fsync=fsync) as put_mapping,
        staging_folder(followed(plan.output), plan.output) as staging,
    ):
        plain, made = staging / ".plain.pt", staging / name
        check_space(plain, 2 * plan.nbytes, plan.output)
        planned, written = (
            replace(file, path=plan.output),
            Meter("write", 2 * plan.nbytes, phases.tell),
        )
        _make_file(planned, plain, tally, checksums, fsync=False, phases=phases, written=written)
        checksums.finish()
        refuse_changed(plan.inputs)
        made.mkdir()
        with phases.timed("write"):
            plan.target.make_folder(plain, made, plan.output)
        written.finish()
        plain.unlink()
        result = _result(plan, tally, verify_folder(plan, made, phases) if verify else None)
        if platforms.ON_WINDOWS:
            let_go(plan.inputs, [plan.output])
        with phases.waiting(plan.nbytes, wanted=fsync):
            put_folder(made, plan.output, force=force, fsync=fsync)
        put_mapping()
        return result
