"""Which checkpoint a path is: that of one file, recognized by its content (`containers`), or of
many files, by what their folder holds; never by an extension.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.formats.containers import (
    NotForetold,
    closed_on_error,
    counted_together,
    first_reads,
    named,
    open_file,
)
from ckptconv.formats.folders.alone import (
    are_parts,
    has_shards,
    part_of,
    part_of_modules,
    refuse_without_index,
)
from ckptconv.formats.folders.steps import chosen, points
from ckptconv.io.files import FilePool
from ckptconv.io.location import Location
from ckptconv.io.places import Named as Named
from ckptconv.io.places import place_of, places_of
from ckptconv.io.source import Source
from ckptconv.objects.threats import danger_note
from ckptconv.pickles.making import names_noted
from ckptconv.pickles.nodes import ABSENT, ORDERED_DICT, Call, Dict, calls_of, mapping_pairs
from ckptconv.support.choices import (
    refuse_no_flag,
    refuse_no_paths,
    refuse_no_text,
    spelling_checked,
)
from ckptconv.support.errors import (
    CheckpointError,
    UnsupportedCheckpoint,
    errors_at,
    not_opened,
    printable,
)
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.report import DANGER
from ckptconv.support.settings import collector_paused
from ckptconv.tree.checkpoint import Checkpoint, Edit, edited, refuse_no_edits


class Gathering(NamedTuple):
    """Many files that are one checkpoint, in a folder: what tells whether a place is one, and what
    opens it, given the place, the folder that was named (links may lead within it) and the tag that
    was chosen. Functions are named as ``module.function`` of the package `folders`, whose module is
    imported where `inside` matches a name in the folder, or `file` that of a file that stands for
    the whole: every such folder has such a name. Without `file`, the place is always a folder.

    `tags` gives the names by which its user may choose among several that one folder holds.
    `foretold_by` opens it by its index alone, or raises `NotForetold`; its second argument opens
    all of it (`Checkpoint.certain`).
    """

    matched_by: str
    opened_by: str
    inside: str
    file: str = ""
    tags: str = ""
    foretold_by: str = ""

    def matches(self, path: Location, names: Iterable[str], *, is_folder: bool) -> bool:
        """Whether a place is one; `names` are those in it, or its own where it is not a folder."""
        if not (is_folder or self.file):
            return False
        pattern = re.compile(self.inside if is_folder else self.file, re.DOTALL)
        has_name = any(map(pattern.fullmatch, names))
        return has_name and bool(_in_folders(self.matched_by)(path))

    def tags_of(self, path: Location) -> Collection[str]:
        """The tags of a place that is one."""
        found: Collection[str] = ()
        if self.tags:
            found = _in_folders(self.tags)(path)
        return found


def _in_folders(path: str) -> Callable[..., Any]:
    found: Callable[..., Any] = named(f"folders.{path}")
    return found


GATHERINGS: tuple[Gathering, ...] = (
    Gathering(
        "dcp.is_dcp",
        "dcp.open_dcp",
        inside=r"(?:__0)?\.metadata",
        file=r"\.metadata|.+\.distcp",
        foretold_by="dcp.foretell_dcp",
    ),
    Gathering("dcp.is_dcp_shards", "dcp.open_dcp_shards", inside=r"shard-.*"),
    # before those of Hugging Face, whose names its weights have: with them come the states
    Gathering(
        "accelerate.is_accelerate",
        "accelerate.open_accelerate",
        inside=r"random_states_.*|CKPT\.yaml",
    ),
    Gathering(
        "sharded.is_hugging_face",
        "sharded.open_sharded",
        inside=r".+\.(?:json|safetensors|bin)",
        file=r".+\.json",
        tags="sharded.variants",
    ),
    Gathering("accelerate.is_fsdp", "accelerate.open_accelerate", inside=r"pytorch_model_fsdp.*"),
    Gathering("deepspeed.is_deepspeed", "deepspeed.open_deepspeed", inside=r".*"),
    Gathering("megatron.is_megatron", "megatron.open_megatron", inside=r"mp_rank_.*"),
    # last, for any two weights that are numbered are some
    Gathering("sharded.is_parts", "sharded.open_parts", inside=r".*"),
)
"""The checkpoints of many files that are read, in the order in which they are tried."""

_WITH_FILE = tuple(kind for kind in GATHERINGS if kind.file)


@spelling_checked
def open_by_index(
    source: Named,
    *,
    tag: str | None = None,
    whole_modules: bool = False,
    edits: Sequence[Edit] = (),
) -> Checkpoint:
    """The checkpoint at `source`, its index read, and nothing yet of what stands before payloads.
    (The public `open_checkpoint`, of `live.opened`, gives a mapping of tensors by it.)
    """
    return _asked(source, tag, whole_modules=whole_modules, edits=edits).opened_quickly()


def open_certain(
    path: Named | Location,
    *,
    tag: str | None = None,
    whole_modules: bool = False,
    edits: Sequence[Edit] = (),
    with_training: bool = False,
    is_delta: bool | None = False,
) -> Checkpoint:
    """`open_by_index(…).certain()` in one go: for who judges a checkpoint or needs all of it.

    `with_training`: with what training left in files beside the weights. `is_delta`: what holds
    changes of tensors is opened, and nothing else (None: it is too).
    """
    told: Any = {"with_training": with_training, "is_delta": is_delta}
    return _asked(path, tag, whole_modules=whole_modules, edits=edits, **told).opened()


def open_as(place: Location, open_source: Callable[[Source], Checkpoint]) -> Checkpoint:
    """As `open_certain` of one file, by another function than the one that its content asks for."""
    source = place.open()
    with closed_on_error(source), errors_at(path=place):  # noqa: SIM117
        with collector_paused(), counted_together(), names_noted() as named:
            return _finished([open_source(source)], named, whole_modules=False)


def open_to_look(
    path: Named,
    *,
    tag: str | None = None,
    whole_modules: bool = False,
    is_delta: bool | None = False,
) -> Checkpoint:
    """For who judges a checkpoint by what it says of itself: as `open_certain`, but over a network,
    where each look costs a request, by its index alone.
    """
    asked = _asked(path, tag, whole_modules=whole_modules, is_delta=is_delta)
    return asked.opened_quickly() if asked.paths[0].is_far() else asked.opened()


def _asked(
    path: Named | Location,
    tag: str | None,
    *,
    whole_modules: bool,
    edits: Sequence[Edit] = (),
    **told: Any,
) -> _Asked:
    if not isinstance(path, Location):
        refuse_no_paths("source", path)
    refuse_no_text(tag=tag)
    refuse_no_flag(whole_modules=whole_modules)
    refuse_no_edits(edits)
    paths = places_of(path)
    if not paths:
        raise UnsupportedCheckpoint("no file was given")
    return _Asked(paths, tag, whole_modules, tuple(edits), **told)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be opened: one place or the files of all ranks, and how."""

    paths: Sequence[Location]
    tag: str | None
    whole_modules: bool
    edits: tuple[Edit, ...] = ()

    is_by_index: bool = False
    """Whether an index is enough where it tells all that must be known."""

    with_training: bool = False
    """Whether what training left in files beside the weights is wanted too."""

    is_delta: bool | None = False
    """Whether what holds changes of tensors is meant: whoever reads weights would take these for
    some. None: it is as good as a checkpoint.
    """

    def opened_quickly(self) -> Checkpoint:
        """The checkpoint, by its index alone where that tells enough."""
        if len(self.paths) == 1:
            with contextlib.suppress(NotForetold):
                return replace(self, is_by_index=True).opened()
        return self.opened()

    def opened(self) -> Checkpoint:
        """The checkpoint that it is. Raises `NotForetold` when it was opened by its index alone and
        something is wrong.
        """
        paths = self.paths
        opened: list[Checkpoint] = []
        named: set[tuple[str, str]] = set()
        try:
            with collector_paused(), counted_together(), names_noted() as named:
                if len(paths) == 1:
                    opened.append(self._open())
                else:
                    paths[0].foresee(paths, first_reads)
                    pool = FilePool()
                    opened += (open_file(item, pool) for item in paths)
                found = _finished(opened, named, whole_modules=self.whole_modules)
                self._refuse_other_kind(found)
                return edited(found, self.edits)
        except BaseException as error:
            for one in opened:
                one.close()
            at = next(iter(paths[len(opened) :]), paths[0])
            if isinstance(error, CheckpointError):
                if opened and opened[0].reread is not None:
                    raise NotForetold from error
                danger = danger_note(named)
                if danger:
                    hints = (danger.removeprefix(DANGER), error.hint)
                    error.hint, error.code = "; ".join(filter(None, hints)), "dangerous"
                raise error.at(path=at) from error.__cause__
            if isinstance(error, OSError):  # a name too long, a folder that is closed to us
                raise not_opened(error, at) from error
            raise

    def _refuse_other_kind(self, found: Checkpoint) -> None:
        """Refuse changes where weights are meant, and the other way round."""
        is_delta = found.container.is_delta
        if self.is_delta is None or is_delta is self.is_delta:
            return
        if is_delta:
            found.refuse_part()
        what = "is not a delta: its index does not say delta_encoding"
        hint = "name the folder that ckptconv delta, slime or miles wrote"
        raise UnsupportedCheckpoint(what, path=found.path, hint=hint)

    def _open(self) -> Checkpoint:
        path, tag = self.paths[0], self.tag
        is_folder, kind = _kind_of(path)
        if kind is not None and (tag is None or tag in kind.tags_of(path)):
            checkpoint = self._open_gathering(kind, path)
        elif is_folder:
            checkpoint = self._open_inside(path, kind)
        elif tag is not None:
            what = "holds no tags to choose from"
            raise UnsupportedCheckpoint(what, path=path, hint="leave --tag out")
        else:
            checkpoint = _open_alone(path)
        if self.with_training:
            checkpoint = _with_training(checkpoint, path)
        if checkpoint.part is not None or not is_folder:
            return checkpoint
        return checkpoint.as_part(part_of_modules(path))

    def _open_gathering(self, kind: Gathering, path: Location) -> Checkpoint:
        if self.with_training and path.is_folder() and points(path):
            # DeepSpeed's step in a folder of the Trainer, beside weights of 16 bits
            return replace(self, tag=None)._open_inside(path, None)
        tag = self.tag if path == self.paths[0] else None
        told: list[Any] = [self.paths[0], tag]
        opened_by = kind.opened_by
        if self.is_by_index and kind.foretold_by:
            opened_by, told = kind.foretold_by, [replace(self, is_by_index=False).opened]
        found: Checkpoint = _in_folders(opened_by)(path, *told)
        return found

    def _open_inside(self, folder: Location, kind: Gathering | None) -> Checkpoint:
        """Open the one checkpoint that is meant in a folder, which is of `kind` itself."""
        refuse_foreign_folder(folder, is_checkpoint=kind is not None)
        is_tagged = self.tag is not None
        if is_tagged and kind is not None and not any(map(is_gathering, folder.list())):
            return self._open_tagged(folder, kind)
        found = chosen(folder, self.tag, is_gathering, is_empty_loss)
        if found is None:
            what = "is a folder without a checkpoint in it"
            below = folder.child("checkpoints")  # where accelerate and Lightning put them
            hint = f"name {below}" if below.is_folder() else "name the file that you mean"
            raise not_opened(errno.EISDIR, folder, what, hint)
        inner = gathering(found.path)
        if inner is None:
            checkpoint = _open_alone(found.path)
        else:
            checkpoint = self._open_gathering(inner, found.path)
        return replace(checkpoint, notes=(*found.notes, *checkpoint.notes))

    def _open_tagged(self, folder: Location, kind: Gathering) -> Checkpoint:
        """Open a folder that is one checkpoint, if the tag names that; else say its tags."""
        if self.tag == folder.name:
            return replace(self, tag=None, is_by_index=False)._open_gathering(kind, folder)
        what = f"is the folder of one step or model, not of '{printable(self.tag)}'"
        hint = "leave --tag out, or name the folder above"
        known = ", ".join(kind.tags_of(folder))
        if known:
            what = f"holds no '{printable(self.tag)}'"
            hint = f"choose one with --tag: {printable(known, 500)}"
        raise UnsupportedCheckpoint(what, path=folder, hint=hint)


def _with_training(checkpoint: Checkpoint, named: Location) -> Checkpoint:
    """The checkpoint with the training states in its folder; `named` is what was opened, or the
    folder that it is in. An open file has no folder.
    """
    with closed_on_error(checkpoint):
        place = place_of(checkpoint.path) if named.is_folder() else named
        home = place if place.is_folder() else place.parent
        if not home.is_folder():
            what = "is in no folder that can be listed, so nothing is found beside it"
            hint = "fetch the folder, and name that; or leave --with-training out"
            raise UnsupportedCheckpoint(what, path=place, hint=hint)
        made: Checkpoint = _in_folders("trained.with_training")(checkpoint, home)
    return made


def _finished(
    opened: Sequence[Checkpoint], named: Collection[tuple[str, str]], *, whole_modules: bool
) -> Checkpoint:
    """The one checkpoint that opened files are: shards joined, old tensors completed, modules as
    their state dicts. One walk through the tree tells which of that there is to do, and whether it
    or one of the globals that the files have `named` is dangerous.
    """
    checkpoint = opened[0]
    calls = list(calls_of(checkpoint.root))
    if len(opened) > 1 or has_shards(calls):
        checkpoint = _in_folders("sharded.join_files")(opened)
        calls = list(calls_of(checkpoint.root))
    danger = danger_note(named, calls)
    if danger:
        checkpoint = replace(checkpoint, notes=(danger, *checkpoint.notes))
    # a state dict, or what a file without pickles has: nothing in it is a module, or a tensor of
    # before torch 0.4
    if all(call.func is ORDERED_DICT and _has_versions_only(call) for call in calls):
        return checkpoint
    from ckptconv.tree.modules import complete_tensors, flatten_modules, holds_modules

    completed = complete_tensors(checkpoint, calls)
    if completed is not checkpoint:
        calls = list(calls_of(completed.root))
    if whole_modules:
        return replace(completed, has_whole_modules=holds_modules(calls))
    return flatten_modules(completed, calls)


def _has_versions_only(call: Call) -> bool:
    """Whether nothing was set on a dict but the `_metadata` of a state dict, if that."""
    if type(call.state) is Dict:
        return all(key == "_metadata" for key, _ in call.state.pairs)
    return call.state is ABSENT


def checkpoints_of(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[Location, ...]]:
    """The checkpoints that paths name: one, where each path is a rank's file with shards of
    tensors, or a part of it by its name; else each by itself.
    """
    refuse_no_paths("path", paths)
    named = [place_of(path) for path in paths]
    are_ranks = len(named) > 1 and (
        are_parts([place.name for place in named]) or all(map(_holds_shards, named))
    )
    return [tuple(named)] if are_ranks else [(path,) for path in named]


def _holds_shards(place: Location) -> bool:
    """Whether a place is a file that holds a rank's shards; what cannot be opened does not."""
    if not place.is_file():
        return False
    try:
        with collector_paused(), counted_together(), open_file(place) as opened:
            return has_shards(calls_of(opened.root))
    except (CheckpointError, OSError, ValueError):
        return False


def gathering(path: Location) -> Gathering | None:
    """The kind of gathering that a place is, if it is any."""
    return _kind_of(path)[1]


def _kind_of(path: Location) -> tuple[bool, Gathering | None]:
    """Whether a place is a folder, and its kind of gathering: over a network one request tells."""
    there = path.kind()
    is_folder = there == "folder"
    if there == "nothing":
        return is_folder, None
    names = path.names() if is_folder else [path.name]
    kinds = GATHERINGS if is_folder else _WITH_FILE
    found = (kind for kind in kinds if kind.matches(path, names, is_folder=is_folder))
    return is_folder, next(found, None)


def is_gathering(path: Location) -> bool:
    """Whether a place is a folder that is a checkpoint of many files, and open to us."""
    try:
        return path.is_folder() and gathering(path) is not None
    except (OSError, CheckpointError):
        return False


def _open_alone(path: Location) -> Checkpoint:
    """Open a file that is a checkpoint by itself, and not one rank's share of one."""
    if is_of_dcp(path.name):
        hint = f"name the folder of all ranks: {path.parent}"
        raise UnsupportedCheckpoint("is one file of a DCP checkpoint", path=path, hint=hint)
    checkpoint = open_file(path)
    with closed_on_error(checkpoint):
        # by names and metadata, so that neither module is imported for any other file
        if path.name in ("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt"):
            _in_folders("megatron.refuse_one_rank")(checkpoint, path)
        if "DCP_SHARDING_INFO" in checkpoint.metadata:
            _in_folders("dcp.refuse_one_rank")(checkpoint, path)
        return checkpoint.as_part(part_of(path, checkpoint))


def is_empty_loss(file: Location) -> bool:
    """Whether a file is the state of a loss without tensors, as skorch saves it beside the weights
    (`NeuralNet.save_params` in skorch/net.py); by that name alone a file is opened to see.
    """
    if file.name != "criterion.pt":
        return False
    with _open_alone(file) as checkpoint:
        pairs = mapping_pairs(checkpoint.root)
        return pairs is not None and not pairs


# Files of which a folder is told to be another program's, and what it is
_FOREIGN_FOLDERS = (
    ("saved_model.pb", "is a TensorFlow SavedModel"),
    ("*.data-?????-of-?????", "holds TensorFlow checkpoints"),
)


def refuse_foreign_folder(folder: Location, *, is_checkpoint: bool) -> None:
    """Raise `UnsupportedCheckpoint` for a folder of another program, or one without its index."""
    names = folder.names()
    for pattern, what in _FOREIGN_FOLDERS:
        if fnmatch.filter(names, pattern):
            raise UnsupportedCheckpoint(f"{what}, not a PyTorch checkpoint", path=folder)
    if is_checkpoint:
        return
    refuse_without_index(names, folder.path)
    if lacks_metadata(folder):
        what = (
            "holds the files of a DCP checkpoint, but not the .metadata that says what is in them"
        )
        hint = "copy the whole folder, hidden files too"
        raise UnsupportedCheckpoint(what, path=folder, hint=hint)


def lacks_metadata(folder: Location) -> bool:
    """Whether a folder holds files of DCP, but not the index without which nobody knows what is in
    them: a copy without hidden files, or what a training left that ended while it saved.
    """
    names = folder.names()
    return ".metadata" not in names and any(map(is_of_dcp, names))


def is_of_dcp(name: str) -> bool:
    """Whether a file is called as those in which the ranks of DCP save."""
    return name.endswith(".distcp") and name != ".distcp"  # which is a hidden file without an end
