"""Conversions: a plan executed as a stream, checked, and put in its place when it is whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ckptconv.convert.plan import ConversionPlan, PlannedFile
from ckptconv.convert.write import Tally, by_tensor, count_odd_bools, count_overflow, write_layout
from ckptconv.formats.hf_names import index_path, moved_index
from ckptconv.io.commit import ShardNames
from ckptconv.io.destination import Destination, Draft
from ckptconv.io.files import refuse_changed
from ckptconv.io.guarded import check_places
from ckptconv.io.outputs import file_output, folder_nbytes, folder_output
from ckptconv.io.places import LocalPlace, local_path, place_of
from ckptconv.support.addresses import UrlPath
from ckptconv.support.choices import spelling_checked
from ckptconv.support.errors import CheckpointError, OptionRefused, OutputRefused
from ckptconv.support.progress import Counting, Meter, OnProgress, Phase, Phases
from ckptconv.support.records import dataclass
from ckptconv.support.report import html_table, short_repr
from ckptconv.support.text import count_text, size_text, some_text
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.compute_ahead import THREADS
from ckptconv.tensors.refs import TensorRef, origins

if TYPE_CHECKING:
    from ckptconv.convert.lanes import Say
    from ckptconv.convert.proving import Proof
    from ckptconv.convert.shares import MadeShare, Share, ShareOut

_WORTH_LANES = 32 << 20
"""Bytes of an output of several files from which they are written side by side."""


@dataclass(frozen=True, slots=True, repr=False)
class ConversionResult:
    """The result of a conversion: its plan, seconds, and tensors verified (None: not asked for).

    `phases` are the seconds of opening and planning, writing, verifying and waiting for the disk;
    `seconds` are all of them and what lies between.

    `named` counts the storages that the source names, all of which were verified to be in the
    output or listed as left out (None: not asked, or not counted in a source of this format).
    `overflowed` counts values beyond the range of the type that they were rounded to: they became
    infinite, NaN, or the 448 of f8_e4m3. `odd_bools` counts bools that are neither 0 nor 1.
    `nbytes` is the size of what was written, all its files together.
    """

    plan: ConversionPlan
    seconds: float
    verified: int | None
    overflowed: Mapping[str, int] = field(default_factory=dict)
    odd_bools: Mapping[str, int] = field(default_factory=dict)
    named: int | None = None
    phases: Mapping[Phase, float] = field(default_factory=dict)
    nbytes: int = 0

    def since(self, begin: float) -> ConversionResult:
        """The result of a piece of work that began at `begin` (`time.perf_counter`): what came
        before the plan was carried out, and after, counts too.
        """
        seconds = time.perf_counter() - begin
        return replace(
            self, seconds=seconds, phases={"open": seconds - self.seconds, **self.phases}
        )

    def __repr__(self) -> str:
        plan, verified = (
            self.plan,
            None if self.verified is None else f"{self.verified:,} tensors verified",
        )
        told = (plan.to, size_text(self.nbytes), f"{self.seconds:.2f} s", verified)
        return short_repr("ConversionResult", f"{plan.source.name} → {plan.shown_name}", *told)

    def _repr_html_(self) -> str:
        odd = ((path, "values:", what) for path, what in self.odd_values())
        return html_table(repr(self)[1:-1], chain(odd, self.plan.told()))

    def odd_values(self) -> Iterator[tuple[str, str]]:
        """The tensors with values that a cast could not hold, or bools that are none, and what
        became of these.
        """
        if not self.overflowed and not self.odd_bools:
            return
        from ckptconv.tensors.casting import overflow_text

        to = sorted({after for _, after in self.plan.casts})
        # dequantised weights may have a type that nothing was cast to
        of = ", ".join(to) or "its type"
        became = f"beyond the range of {of} became {overflow_text(to)}"
        for path, count in self.overflowed.items():
            yield path, f"{count_text(count, 'value')} {became}"
        for path, count in self.odd_bools.items():
            yield path, f"{count_text(count, 'bool')} neither 0 nor 1, kept as stored"


@spelling_checked
def execute_plan(
    plan: ConversionPlan,
    *,
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
    share_out: ShareOut | None = None,
) -> ConversionResult:
    """Write the output of a plan as a stream, and put it in place when it is complete.

    `on_progress` is called with a `Progress` about once a MiB, in the phases write, verify and
    sync. `verify` counts what the source names without the reader, reads the output back before it
    is renamed and compares every tensor with the source, bit for bit or after the cast. `share_out`
    has the files of an output made somewhere else, as far as they can be. Raises
    `MalformedCheckpoint` when the source is damaged, `OutputRefused` when the output cannot be
    written, `VerificationFailed`; nothing is left behind.
    """
    if not isinstance(plan, ConversionPlan):
        what = f"plan={plan!r:.100} is not a ConversionPlan"
        raise OptionRefused(what, hint="give what plan_conversion returns")
    begin = time.perf_counter()
    plan.target.load_checker(plan.nbytes)
    _run_checks(plan)
    named = None
    if verify:
        from ckptconv.convert.accounting import refuse_unaccounted  # with a reader of its own

        named = refuse_unaccounted(plan)
    phases = Phases(on_progress)
    if plan.target.is_made_by_torch:
        result = _write_folder(plan, force, fsync, verify, phases)
    elif plan.target.is_folder:
        result = _write_files_of_folder(plan, force, fsync, verify, phases)
    else:
        result = _write_files(plan, force, fsync, verify, phases, share_out)
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
    if plan.beside.copied:
        names = some_text([item.name for item in plan.beside.copied])
        what = f"standard output is one file, beside which {names} could not be"
        raise OptionRefused(what, hint="name a folder")
    with _mapping_made(plan, force=force, fsync=fsync):
        alone = replace(plan, mapping=None, manifest=None)
        result = execute_plan(alone, fsync=False, verify=verify, on_progress=on_progress)
        meter = Meter("deliver", plan.nbytes, on_progress)
        deliver(local_path(place_of(plan.output), ""), meter)
        meter.finish()
    return result


def _run_checks(plan: ConversionPlan) -> None:
    """Read the indices of tensors made of parts: what points nowhere is in no format written."""
    try:
        for check in plan.made_of.checks:
            check()
    except CheckpointError as error:
        raise error.at(path=plan.source) from None


def _result(
    plan: ConversionPlan, tally: Tally, verified: int | None, nbytes: int
) -> ConversionResult:
    """What is to be told of an output, found out before it may take the place of its source."""
    overflowed = by_tensor(plan, tally.overflowed, lambda ref: count_overflow(plan, ref))
    odd_bools = by_tensor(plan, tally.odd_bools, count_odd_bools)
    return ConversionResult(plan, 0.0, verified, overflowed, odd_bools, nbytes=nbytes)


def _write_files(
    plan: ConversionPlan,
    force: bool,
    fsync: bool,
    verify: bool,
    phases: Phases,
    share_out: ShareOut | None,
) -> ConversionResult:
    """Write the one file of an output, or its shards and their index."""
    with (
        _proof(plan, force=force, fsync=fsync) as proof,
        _mapping_made(plan, force=force, fsync=fsync),
        _destination(plan, force=force, fsync=fsync, verify=verify) as output,
    ):
        tally, verified = _make_files(plan, output, fsync, verify, phases, share_out, proof)
        result = _result(plan, tally, verified if verify else None, plan.nbytes)
        output.commit(plan.inputs)
    if verify and plan.in_folder:
        from ckptconv.convert.verify import refuse_unread

        refuse_unread(plan)
    return result


def _proof(
    plan: ConversionPlan, *, force: bool, fsync: bool
) -> AbstractContextManager[Proof | None]:
    """What collects the digests of an output, if its manifest was asked for, which is put in its
    place after the block.
    """
    if plan.manifest is None:
        return nullcontext()
    # OpenSSL, which hashes, takes 5 MB and some milliseconds
    from ckptconv.convert.proving import proof_of

    return proof_of(plan, plan.manifest, force=force, fsync=fsync)


def _write_files_of_folder(
    plan: ConversionPlan, force: bool, fsync: bool, verify: bool, phases: Phases
) -> ConversionResult:
    """Write the files of an output that is a folder, which is put in its place as one."""
    place, nbytes = place_of(plan.output), plan.nbytes
    with (
        _proof(plan, force=force, fsync=fsync) as proof,
        _mapping_made(plan, force=force, fsync=fsync),
        folder_output(place, force=force, fsync=fsync, size=nbytes, replaces=plan.inputs) as output,
    ):
        tally, verified = _make_files(plan, output, fsync, verify, phases, None, None)
        result = _result(plan, tally, verified if verify else None, nbytes)
        if proof is not None:
            proof.add_folder(LocalPlace(output.folder()))
        output.commit(plan.inputs)
    return result


def _destination(plan: ConversionPlan, *, force: bool, fsync: bool, verify: bool) -> Destination:
    place = place_of(plan.output)
    return file_output(
        place,
        _shard_names(plan) if plan.is_sharded else None,
        in_folder=plan.in_folder,
        force=force,
        fsync=fsync,
        size=plan.nbytes,
        read_back=verify or plan.manifest is not None,
        replaces=plan.inputs,
    )


@dataclass(frozen=True, slots=True)
class _Lane:
    """What one thread notes and tells while it makes files.

    `told` gets the place in the file, `compared` counts the bytes that were verified. So many
    `threads` cast for it. `proof` is told of the digests of its files, where they are wanted.
    """

    told: Callable[[int], None]
    compared: Counting
    phases: Phases
    tally: Tally = field(default_factory=Tally)
    checksums: Checksums = field(default_factory=Checksums)
    threads: int = 1
    proof: Proof | None = None


def _make_files(
    plan: ConversionPlan,
    output: Destination,
    fsync: bool,
    verify: bool,
    phases: Phases,
    share_out: ShareOut | None,
    proof: Proof | None,
) -> tuple[Tally, int]:
    """Draft all files of an output, each whole and checked; how many tensors were verified."""
    nbytes = plan.nbytes
    written, compared = Meter("write", nbytes, phases.tell), Meter("verify", nbytes, phases.tell)
    if plan.beside.copied:
        _copy_companions(plan, output, written, phases, proof, verify=verify)
    lane = _Lane(_telling(written), compared, phases, threads=THREADS, proof=proof)
    make = partial(_make_shard, plan, output, fsync=fsync, verify=verify)
    files, verified = plan.files, 0
    if share_out is not None:
        elsewhere = _Elsewhere(plan, output, lane, written, fsync=fsync)
        files = elsewhere.make(share_out)
        if verify:
            with phases.timed("verify"):
                verified += elsewhere.verify(compared)
    if _may_be_side_by_side(files, output):
        verified += _make_side_by_side(files, make, replace(lane, told=_telling(written)))
    else:
        for file in files:
            verified += make(file, replace(lane, told=_telling(written)))
    index = plan.index
    if index is not None:
        lane = replace(lane, told=_telling(written))
        draft = output.draft(index.path.name, index.layout.nbytes, lane.told)
        _make_file(index, draft, lane, fsync=fsync)
    if verify:
        compared.finish()
    lane.checksums.finish()
    refuse_changed(plan.inputs)
    return lane.tally, verified


class _Elsewhere:
    """The files of an output that others make, each as a share."""

    def __init__(
        self,
        plan: ConversionPlan,
        output: Destination,
        lane: _Lane,
        written: Meter,
        *,
        fsync: bool,
    ) -> None:
        self._plan, self._output, self._lane, self._fsync = plan, output, lane, fsync
        self._written = written
        self._made: list[tuple[PlannedFile, Draft]] = []

    def make(self, share_out: ShareOut) -> tuple[PlannedFile, ...]:
        """Have the files made; returns those that only this process can make."""
        from ckptconv.convert.shares import share_of

        shares: list[Share] = []
        left: list[PlannedFile] = []
        for file in self._plan.files:
            draft = self._output.draft(_name_in(self._plan, file), file.layout.nbytes)
            path = draft.hand_out()
            if path is None:
                what = "is not on a disk of this machine, so workers cannot make its files"
                hint = "leave --jobs and --engine out, or write to a disk that all share"
                raise OutputRefused(what, path=self._plan.output, hint=hint)
            is_proved = self._lane.proof is not None
            told = {"fsync": self._fsync, "is_proved": is_proved}
            share = share_of(len(shares), file, path, self._plan.to, **told)
            if share is None:
                draft.discard()
                self._output.forget(draft)
                left.append(file)
            else:
                shares.append(share)
                self._made.append((file, draft))
        with self._lane.phases.timed("write"):
            for made in share_out(shares):
                self._take(made)
        return tuple(left)

    def _take(self, made: MadeShare) -> None:
        file, draft = self._made[made.number]
        assert file.part is not None
        draft.take_back(file.layout.nbytes)
        refs = [ref for _, ref, _ in file.part.tensors]
        self._lane.tally.overflowed.extend(refs[number] for number in made.overflowed)
        self._lane.tally.odd_bools.extend(refs[number] for number in made.odd_bools)
        path = local_path(draft.place, "")
        self._plan.target.check_written(path, file.path, len(file.layout.items))
        if self._lane.proof is not None and made.digests is not None:
            self._lane.proof.add(file.path.name, draft.place, made.digests)
        self._written.add(file.layout.nbytes)

    def verify(self, compared: Meter) -> int:
        """Read all of them back and compare them; returns how many tensors there are."""
        from ckptconv.convert.verify import verify_file

        return sum(
            verify_file(self._plan, file, draft.place, compared) for file, draft in self._made
        )


def _make_shard(
    plan: ConversionPlan,
    output: Destination,
    file: PlannedFile,
    lane: _Lane,
    *,
    fsync: bool,
    verify: bool,
) -> int:
    """Draft one file of tensors, whole and checked; returns how many of them were verified."""
    draft = output.draft(_name_in(plan, file), file.layout.nbytes, lane.told)
    _make_file(file, draft, lane, fsync=fsync)
    # an upload has a place to look at before its end only where it was made to be read back
    if not verify and isinstance(plan.output, UrlPath):
        return 0
    made = draft.place
    path = made.local()
    if path is not None:
        plan.target.check_written(path, file.path, len(file.layout.items))
    if not verify:
        return 0
    from ckptconv.convert.verify import verify_file

    with lane.phases.timed("verify"):
        return verify_file(plan, file, made, lane.compared)


def _name_in(plan: ConversionPlan, file: PlannedFile) -> str:
    """The name of a file in the folder of an output."""
    if not plan.target.is_folder:
        return file.path.name
    return file.path.relative_to(plan.output).as_posix()


def _may_be_side_by_side(files: Sequence[PlannedFile], output: Destination) -> bool:
    """Whether several files of an output may be written at once, and it is worth it."""
    if min(THREADS, len(files)) < 2 or not output.is_for_threads():
        return False
    if sum(file.layout.nbytes for file in files) < _WORTH_LANES:
        return False
    values = (item.values for file in files for item in file.layout.items)
    storages = origins(ref for ref in values if isinstance(ref, TensorRef))
    sources = {id(storage.source): storage.source for storage in storages}.values()
    # a far source has its requests side by side already
    if not all(source.is_for_threads() and source.fetched_from(0) is None for source in sources):
        return False
    check_places(sources)
    return True


def _make_side_by_side(
    files: Sequence[PlannedFile], make: Callable[[PlannedFile, _Lane], int], lane: _Lane
) -> int:
    """Draft files at the same time; `lane` notes and tells as if they were drafted in turn."""
    from ckptconv.convert.lanes import SaidCount, said, side_by_side

    lanes = min(lane.threads, len(files))
    places = [0] * len(files)

    def written_to(number: int, place: int) -> None:
        places[number] = place
        lane.told(sum(places))

    def work(number: int, say: Say) -> tuple[int, _Lane]:
        tell = lane.phases.tell
        own = _Lane(
            said(say, partial(written_to, number)),
            SaidCount(say, lane.compared.add),
            Phases(None if tell is None else said(say, tell)),
            checksums=Checksums(SaidCount(say)),
            # all lanes share the cores
            threads=max(1, lane.threads // lanes),
            proof=lane.proof,
        )
        return make(files[number], own), own

    begin = time.perf_counter()
    done = side_by_side([partial(work, number) for number in range(len(files))], lanes)
    for _, own in done:
        lane.tally.join(own.tally)
        lane.checksums.join(own.checksums)
    lane.phases.share(time.perf_counter() - begin, [own.phases for _, own in done])
    return sum(count for count, _ in done)


def _copy_companions(
    plan: ConversionPlan,
    output: Destination,
    written: Meter,
    phases: Phases,
    proof: Proof | None = None,
    *,
    verify: bool,
) -> None:
    """Draft the files that go with the model; with `verify` each is read back and compared."""
    from ckptconv.convert.companions import copy_companion

    for item in plan.beside.copied:
        before = written.done
        with phases.timed("write"):
            if proof is None:
                copy_companion(item, output, _telling(written), verify=verify)
            else:
                watch = partial(proof.watch_file, item.name)
                copy_companion(item, output, _telling(written), verify=verify, watch=watch)
        written.at(before + item.nbytes)


def _telling(written: Meter) -> Callable[[int], None]:
    """What is told of the place in a file, to the meter of all files."""
    before = written.done
    return lambda position: written.at(before + position)


def _make_file(file: PlannedFile, draft: Draft, lane: _Lane, *, fsync: bool) -> None:
    """Write one file of an output, and wait for the disk where that is wanted."""
    with draft:
        stream = draft.stream
        passing = None if lane.proof is None else lane.proof.watch(stream, file.layout)
        with lane.phases.timed("write"):
            write_layout(file.layout, stream, lane.tally, lane.checksums, lane.threads)
            stream.finish()
        lane.told(stream.position)
        with lane.phases.waiting(stream.position, wanted=fsync):
            draft.commit()
    if lane.proof is not None and passing is not None:
        lane.proof.add(file.path.name, draft.place, passing.result())


def _shard_names(plan: ConversionPlan) -> ShardNames:
    index, raw = plan.index, plan.index.layout.items[0].values if plan.index else b""
    assert isinstance(raw, bytes)
    return ShardNames(
        shards=[file.path.name for file in plan.files],
        index=index.path.name if index else None,
        earlier=lambda: [path.name for path in plan.earlier()],
        moved_index=lambda folder: moved_index(raw, folder),
        claimed=[index_path(plan.output).name],
        companions=[item.name for item in plan.beside.copied],
    )


@contextmanager
def _mapping_made(plan: ConversionPlan, *, force: bool, fsync: bool) -> Iterator[None]:
    """The mapping, if asked for, made before the block and put in its place after it."""
    if plan.mapping is None:
        yield
        return
    path, layout = plan.mapping.path, plan.mapping.layout
    with file_output(place_of(path), force=force, fsync=fsync, size=layout.nbytes) as output:
        with output.draft(path.name, layout.nbytes) as draft:
            write_layout(layout, draft.stream, Tally(), Checksums())
            draft.commit()
        yield
        try:
            output.commit()
        except OutputRefused as error:
            error.hint = f"the output {plan.output} is in place"
            raise


def _write_folder(
    plan: ConversionPlan, force: bool, fsync: bool, verify: bool, phases: Phases
) -> ConversionResult:
    """Write a plain torch file beside the output, and have torch make a DCP folder of it."""
    # the plain file and the folder that torch makes of it are on the disk at the same time
    place, nbytes = place_of(plan.output), 2 * plan.nbytes
    with (
        _proof(plan, force=force, fsync=fsync) as proof,
        _mapping_made(plan, force=force, fsync=fsync),
        folder_output(place, force=force, fsync=fsync, size=nbytes, replaces=plan.inputs) as output,
    ):
        written = Meter("write", nbytes, phases.tell)
        lane = _Lane(_telling(written), written, phases, threads=THREADS)
        plain = output.scratch(".plain.pt", plan.nbytes, lane.told)
        # only the folder that is made of it has to last
        _make_file(plan.files[0], plain, lane, fsync=False)
        lane.checksums.finish()
        refuse_changed(plan.inputs)
        made = output.folder()
        with phases.timed("write"):
            plan.target.make_folder(local_path(plain.place, ""), made, plan.output)
        if plan.beside.copied:
            _copy_companions(plan, output, written, phases, verify=verify)
        written.finish()
        plain.discard()
        verified = None
        if verify:
            from ckptconv.convert.verify import verify_folder

            verified = verify_folder(plan, LocalPlace(made), phases)
        result = _result(plan, lane.tally, verified, folder_nbytes(made))
        if proof is not None:
            proof.add_folder(LocalPlace(made))
        with phases.waiting(plan.nbytes, wanted=fsync):
            output.commit(plan.inputs)
        return result
