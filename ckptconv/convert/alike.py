"""Files of one model, one after the other: what a plan decides of one holds of the next.

The files of a batch are often of one model: their pickles are the same bytes, and their records
have the same sizes. All that a plan decides follows from these, from the request and from names.
What is left are the bytes of the storages, their checksums, and where they lie. `Alike` keeps the
plan of a file, and makes that of the next one out of it, after every check that opening and
planning make of a file by itself. Where anything is another it makes none; then the file is opened
and planned as any other, which says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace

from ckptconv.convert.flat_planner import planned_file
from ckptconv.convert.job import PLANS, Plans
from ckptconv.convert.options import Request
from ckptconv.convert.plan import ConversionPlan, PlannedFrom
from ckptconv.convert.targets import for_folder, target
from ckptconv.convert.with_files import with_files
from ckptconv.formats import torch_zip
from ckptconv.formats.containers import HEAD, closed_on_error, counted_together, is_zip
from ckptconv.formats.registry import is_alone
from ckptconv.formats.zip_archive import checksum_notes, open_archive
from ckptconv.io.guarded import GuardedSource, unguarded
from ckptconv.io.places import LocalPlace
from ckptconv.io.source import Source
from ckptconv.support.errors import CheckpointError
from ckptconv.support.limits import in_force
from ckptconv.support.records import NamedTuple, made
from ckptconv.support.settings import collector_paused, set_within
from ckptconv.tensors.refs import Piece, Storage, TensorRef

_MOST = 10_000
"""Tensors of a plan that is kept: it takes 1 kB for each, and is a file of a tenth of a second."""
_MISSES = 16
"""Files of other models in a row after which nothing is kept any more: to look costs a tenth of a
small conversion.
"""


class _Model(NamedTuple):
    """A plan, and what it follows from: the request, the `pickle`, the `storages` under their names
    in the archive's folder. `named` are its tensors by the paths that they will have.
    """

    plan: ConversionPlan
    request: Request
    pickle: bytes
    storages: dict[int, tuple[str, Storage]]
    named: list[tuple[str, TensorRef]]


class Alike:
    """Keeps the plan of the last file that was converted; for one thread."""

    def __init__(self) -> None:
        self._model: _Model | None = None
        self._misses = 0

    def used(self) -> AbstractContextManager[Plans]:
        """Conversions within the block, in this thread, share what their files have in common."""
        return set_within(PLANS, self)

    def forget(self) -> None:
        """Give the memory of the plan back."""
        self._model = None

    def keep(self, plan: ConversionPlan, request: Request) -> None:
        """Keep a plan for the files that follow, where it can be true of others."""
        if self._misses < _MISSES:
            self._model = _model_of(plan, request)

    @contextmanager
    def planned(
        self, source: object, output: object, request: Request
    ) -> Iterator[ConversionPlan | None]:
        """The plan of a conversion, if its source is of the model that was converted last; the
        source is open within the block. None where it is of another one, or something is wrong.
        """
        model, plan = self._model, None
        # options that read files stand for a new request each time
        is_same = model is not None and model.request is request
        if is_same and isinstance(source, LocalPlace) and isinstance(output, LocalPlace):
            assert model is not None
            # whoever opens it as any other file hears of what is wrong
            with suppress(CheckpointError, OSError):
                plan = _planned(model, source, output)
        if plan is None:
            self._misses += model is not None
            self.forget()
            yield None
            return
        self._misses = 0
        with plan.made_of.checkpoint:
            yield plan


def _model_of(plan: ConversionPlan, request: Request) -> _Model | None:
    """What can be kept of a plan: one file of whole views of an archive, of which nothing is said
    that is not true of each of its model.
    """
    reads, checkpoint = plan.made_of, plan.made_of.checkpoint
    of_this_file = (
        *(plan.index, plan.mapping, plan.manifest, plan.in_folder, plan.is_sharded),
        *(plan.skipped, plan.rewritten, reads.checks, plan.beside.copied),
        *(checkpoint.notes, checkpoint.part, checkpoint.modules, checkpoint.has_whole_modules),
        *(request.edits, request.of_adapters, request.fit_to, request.keep_dtype, request.cast),
        *(request.with_files, request.with_training),
        any(rule.needs_config for rule in request.keys.rules),
        any(item.made or item.consumed for item in plan.state_dicts),  # scales may have a config
    )
    if any(of_this_file) or checkpoint.container is not torch_zip.CONTAINER:
        return None
    if len(checkpoint.sources) != 1 or len(plan.files) != 1 or plan.files[0].part is None:
        return None
    source, named = checkpoint.sources[0], list(reads.tensors())
    if len(named) > _MOST or any(not ref.is_view for _, ref in named):
        return None
    if not {id(ref) for _, ref, _ in plan.files[0].part.tensors} <= {id(ref) for _, ref in named}:
        return None
    storages = {id(ref.storage): ref.storage for _, ref in named}
    if any(one.source is not source or one.part_of for one in storages.values()):
        return None
    if plan.nbytes > in_force().view_free or with_files(plan, request) is not plan:
        return None
    found = _looked_into(unguarded(source))
    if found is None:
        return None
    _, root, _, pickle = found
    under = {key: (one.name.removeprefix(root), one) for key, one in storages.items()}
    return _Model(plan, request, pickle, under, named)


def _looked_into(
    source: Source,
) -> tuple[GuardedSource, str, torch_zip.ArchiveStorages, bytes] | None:
    """An archive of torch, where its records are as they are nearly always: guarded, the folder of
    its records, its storages, its pickle. Checked as `torch_zip.open_torch_zip` does.
    """
    if not is_zip(source.read(0, min(HEAD, source.size))):
        return None
    guarded, records = open_archive(source)
    if any(record.deflated for record in records.values()) or any(checksum_notes(records)):
        return None
    root = torch_zip.root_of(guarded, records)
    storages = torch_zip.ArchiveStorages(guarded, records, root)
    return guarded, root, storages, torch_zip.read_limited(guarded, records[f"{root}data.pkl"])


def _planned(model: _Model, place: LocalPlace, output: LocalPlace) -> ConversionPlan | None:
    """The plan of one more file of a model; None where it is not one, or goes to another format."""
    plan, request, like = model.plan, model.request, model.plan.made_of.checkpoint
    if for_folder(request, output) is not request or not is_alone(place, like):
        return None
    if plan.made_of.limits != in_force():
        return None
    if target(output, request, place.name) != (output.path, plan.target):
        return None
    source = place.open()
    with closed_on_error(source), collector_paused(), counted_together():
        found = _looked_into(source)
        again = None if found is None else _stored(model, *found)
        if found is None or again is None:
            source.close()
            return None
        guarded = found[0]
        guarded.check_all()
        refs = {id(ref): _moved(ref, again) for _, ref in model.named}
        file = plan.files[0]
        assert file.part is not None
        tensors = [(key, refs[id(ref)], dtype) for key, ref, dtype in file.part.tensors]
        named = [(key, refs[id(ref)]) for key, ref in model.named]
        path = output.path
        # the tree is that of the last file: only --verify looks into it, which plans anew
        opened = replace(like, path=source.path, root=None, nbytes=source.size, sources=(guarded,))
        made_again = replace(
            plan,
            source=source.path,
            source_nbytes=source.size,
            output=path,
            files=(planned_file(plan.target, file.part.metadata, {}, request.tags, path, tensors),),
            reads=PlannedFrom(opened, None, lambda: iter(named), plan.made_of.cast, ()),
        )
        return with_files(made_again, request)


def _stored(
    model: _Model,
    _: GuardedSource,
    root: str,
    storages: torch_zip.ArchiveStorages,
    pickle: bytes,
) -> dict[int, Storage] | None:
    """The storages of another file of a model in the places of those of the one that was planned;
    None where it is of another model.
    """
    if pickle != model.pickle:
        return None
    again = {}
    for key, (name, one) in model.storages.items():
        again[key] = found = storages.at(root + name, one.location, one.dtype, one.nbytes)
        if found.big_endian is not one.big_endian:
            return None
    return None if storages.left_over() else again


def _moved(ref: TensorRef, again: dict[int, Storage]) -> TensorRef:
    """The tensor over the other storage."""
    dtype, shape, stride, (piece,), *bits = ref
    storage, *box = piece
    return made(
        TensorRef, (dtype, shape, stride, (made(Piece, (again[id(storage)], *box)),), *bits)
    )
