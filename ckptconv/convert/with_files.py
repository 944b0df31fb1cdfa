"""The files beside an output and beside its source: those that go along with a model, and what a
plan says of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath

from ckptconv.convert.beside import FilesBeside
from ckptconv.convert.notes import beside_notes
from ckptconv.convert.options import Request
from ckptconv.convert.plan import ConversionPlan
from ckptconv.formats.folders.steps import points, training_files
from ckptconv.io.location import Location
from ckptconv.io.places import place_of, resolved
from ckptconv.support.errors import AmbiguousStateDict, CheckpointError
from ckptconv.support.text import some_text
from ckptconv.tree.checkpoint import Checkpoint


def with_files(plan: ConversionPlan, request: Request) -> ConversionPlan:
    """The plan with what is to be said of the files beside its output, and beside its source those
    that go with a model, where they were asked for.
    """
    notes = [*beside_notes(plan)]
    if _dequantizes(request):
        notes += _config_notes(plan, request)
    notes += _training_left(plan, request)
    if not request.with_files:
        notes += _files_left(plan) if plan.in_folder else ()
        return replace(plan, notes=(*plan.notes, *notes)) if notes else plan
    beside, told = _companions(plan, request)
    return replace(plan, beside=beside, notes=(*plan.notes, *notes, *told))


def _dequantizes(request: Request) -> bool:
    if not request.edits:
        return False
    from ckptconv.tree.dequantizing import Dequantize  # seldom needed

    return any(isinstance(edit, Dequantize) for edit in request.edits)


def _config_notes(plan: ConversionPlan, request: Request) -> Iterator[str]:
    """Tell of a config beside the output that calls its values codes: transformers would read them
    so. One that is copied does not.
    """
    folder = place_of(plan.folder)
    if folder.is_far() or not folder.child("config.json").is_file():
        return
    from ckptconv.tree.model_config import method_in

    read = {resolved(source.path.parent) for source in plan.inputs}
    is_replaced = request.with_files and resolved(plan.folder) not in read
    method = "" if is_replaced else method_in(folder)
    if method:
        yield (
            f"config.json beside the output says that its weights are quantised ({method}); take "
            "that out of it, or write into another folder with --with-files"
        )


def _companions(plan: ConversionPlan, request: Request) -> tuple[FilesBeside, list[str]]:
    """The files that go with a model, whose weights become another type where that is asked for,
    and what is to be said of them.
    """
    from ckptconv.convert.companions import (
        companions,
        dtype_notes,
        home_of,
        name_notes,
        saying_dtype,
        unquantized,
    )

    dtype = request.dtype
    read = [source.path for source in plan.inputs]
    home = home_of(plan.source, read)
    found = companions(home, read)
    is_in_place = resolved(plan.folder) == resolved(home.path)
    if _dequantizes(request) and not is_in_place:
        found = unquantized(found)
    if dtype is not None and plan.casts and not is_in_place:
        found = saying_dtype(found, dtype)
    casts = sorted({after for _, after in plan.casts}) if request.casts else []
    notes = [
        *dtype_notes(found.copied, casts),
        *name_notes(read[0], plan.output),
    ]
    if is_in_place:
        notes.append(
            "the output is in the folder of the source, whose other files stay as they are"
        )
        found = FilesBeside()
    elif not found.copied:
        notes.append(f"{home.name} has no config, tokenizer or the like to copy")
    return found, notes


def _files_left(plan: ConversionPlan) -> Iterator[str]:
    """Tell of the files of a model beside the source, which were not asked for."""
    from ckptconv.convert.companions import companion_places, home_of

    read = [source.path for source in plan.inputs]
    if not read:
        return
    home = home_of(plan.source, read)
    made = plan.made_of.checkpoint.made_beside
    places = (place for place in companion_places(home) if place.name not in made)
    names = [place.name for place in places if place.is_file()]
    if names and resolved(plan.folder) != resolved(home.path):
        yield f"{some_text(names)} of {home.name} not copied; --with-files copies such files"


def _training_left(plan: ConversionPlan, request: Request) -> Iterator[str]:
    """Tell of training states beside the weights of a folder, where the output could hold them."""
    if not plan.target.holds_trees or request.shard_bytes is not None or request.with_training:
        return
    read = [source.path for source in plan.inputs]
    if request.only is not None or not read:
        return
    home, names, has_step = _training_beside(place_of(plan.source), read[0])
    if names and not any(path.name in names for path in read):
        yield f"{some_text(names)} of {home.name} not taken; --with-training takes such files"
    elif has_step:
        yield f"the step of a training in {home.name} not taken; --with-training takes it"


def _training_beside(source: Location, read: PurePath) -> tuple[Location, list[str], bool]:
    """The folder of a checkpoint, the training states in it, and whether they are in a step of
    DeepSpeed's there; `read` is a file of the checkpoint.
    """
    if source.is_far():
        return source, [], False
    home = source if source.is_folder() else source.absolute.parent
    if not home.is_folder():  # an open file has nothing beside it
        return home, [], False
    names = training_files(home)
    has_step = not names and points(home) and resolved(read.parent) == resolved(home.path)
    return home, names, has_step


def with_training_named(error: CheckpointError, whole: Checkpoint, request: Request) -> None:
    """Have an error about a part that is not there name the option, where training left such a part
    beside the weights.
    """
    is_absent = isinstance(error, AmbiguousStateDict) and request.only is not None
    if not is_absent or request.with_training or not whole.sources:
        return
    part = str(request.only).partition(".")[0]
    _, names, has_step = _training_beside(place_of(whole.path), whole.sources[0].path)
    if part in {PurePath(name).stem for name in names} or (has_step and part == "optimizer"):
        error.hint = f"{error.hint}; --with-training takes what training left beside the weights"
