"""An opened checkpoint: its tree of symbolic nodes, whose leaves are tensors still in the file; the
container that it lies in: its name, who opens it without ckptconv, what it can hold; and edits,
each of which makes another checkpoint of it, and shares what it leaves.

Each module of `formats` defines the containers that it reads, so that no other one has to know
them by their names. Any host means: without the devices and the ranks that wrote it, and without
running what the file names. What stands in the container (device tags, objects, wrappers) is not
looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import PurePath
from typing import Any, TypeAlias

from ckptconv.io.source import Source
from ckptconv.objects.threats import DO_NOT_LOAD
from ckptconv.pickles.nodes import Dict, Node
from ckptconv.support.addresses import UrlPath
from ckptconv.support.errors import CheckpointError, OptionRefused, UnsupportedCheckpoint
from ckptconv.support.limits import Limits, held, in_force, merged
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.report import danger_in, html_table, short_repr
from ckptconv.support.text import count_text, size_text
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.settling import DROP_DANGEROUS
from ckptconv.tree.state_dicts import StateDict, find_state_dicts
from ckptconv.tree.walk import tensors_of

TORCH_LOAD = "torch.load"
SAFETENSORS_LIBRARY = "safetensors"
USUAL = (TORCH_LOAD, SAFETENSORS_LIBRARY)
"""The libraries that every program with torch has, so that they go without saying."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container and what can be said of any checkpoint in it; `name` is what users are shown.

    `by` is the library or call that opens it, `why_not` says why not on any host (empty: on any);
    `torch_says` are the words of ``torch.load(weights_only=True)`` about it (empty: it opens it, or
    says something else each time).

    `suffix` is that of a fixed file of the same kind, as far as that is written.

    `weights_only`: ``torch.load(weights_only=True)`` opens it. `is_torch`: `torch.save` wrote it,
    of whatever version. `is_legacy`: from before torch 1.6, so that its storages have types and it
    cannot be mapped. `has_version`: it says which version of its kind it is, and torch reads only
    some. `is_script`: a program, whose objects are those of its own classes. `is_index`: an index
    of shards. `is_folder`: many files that are opened as one folder. `is_delta`: it holds changes
    of tensors, not weights. `has_checksums`: damage shows.
    `shares`: several tensors in it may share bytes that are there once. `names_storages`: what it
    names can be counted without the reader.
    """

    name: str
    by: str = ""
    why_not: str = ""
    torch_says: str = ""
    suffix: str = ".pt"
    weights_only: bool = False
    is_torch: bool = False
    is_legacy: bool = False
    has_version: bool = False
    is_script: bool = False
    is_index: bool = False
    is_folder: bool = False
    is_delta: bool = False
    has_checksums: bool = False
    shares: bool = True
    names_storages: bool = False

    @property
    def anywhere(self) -> bool:
        """Whether any host opens it that has the library."""
        return not self.why_not

    @property
    def is_usual(self) -> bool:
        """Whether every program with torch opens it, as it is."""
        return self.anywhere and self.by in USUAL

    def called(self, name: str) -> Container:
        """The same under another name."""
        return replace(self, name=name)


UNKNOWN = Container("unknown", why_not="no known library opens it")
MEMORY = Container("memory", why_not=UNKNOWN.why_not)
"""What was never in a file."""


# ----------------------------------------------------------------------------- an open checkpoint


@dataclass(frozen=True, slots=True)
class TorchFileFacts:
    """What a torch file holds besides its tree: `head` are the first 16 bytes of its pickle.

    `dead` are the bytes of a zip file that the pickle does not refer to: records that were added or
    left over, and what lies between records; `strays` are the records outside the pickle's folder;
    `version` is that of a zip file's format (None: it says none); `folder` is the name of the
    folder of a zip file's records, which torch takes of the file that it is told to write.
    """

    head: bytes = b""
    dead: int = 0
    strays: tuple[str, ...] = ()
    version: int | None = None
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Stray:
    """A `node` that a module holds at `path` beside `state_dict`; `is_refused`: may be saved."""

    path: str
    reason: str
    is_refused: bool
    state_dict: Node
    node: Node = field(default=None, repr=False)


PICKLE_HEAD = 16  # bytes of `TorchFileFacts.head`


class PartFile(NamedTuple):
    """What a file is that holds one part of a checkpoint, and what to do. `mark` is the number that
    the name of an output must have to hold it alone (empty: none may). `is_copied`: the other parts
    are among the files beside it that a copy of its folder has. `is_delta`: it holds changes of
    tensors, which look like tensors of bytes.
    """

    what: str
    hint: str
    mark: str = ""
    is_copied: bool = False
    is_delta: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """An open checkpoint: a tree whose tensors (`TensorRef`) are still in the file.

    `container` is what it lies in, and `format` what that is called: ``torch zip``, ``torch
    legacy``, ``safetensors``, ``memory``, …; `metadata` are a safetensors file's own strings;
    `notes` tell what was odd about the file without being wrong; `modules` counts the whole modules
    in whose places their state dicts stand, `module_classes` are their classes, `module_strays` are
    what these do not hold, `module_parts` what they hold in another form; `dropped` are the parts
    that an edit left out; `has_whole_modules`: it
    was opened with its modules as they are, and there are some; `facts` are what a torch
    file holds besides its tree; `limits` are those under which it was opened; `index_metadata` is
    what the index of shards says besides their total size; `files` are the shards of an index, each
    as it was opened; `reread` opens what was opened by an index alone again, with all that stands
    before the payloads (`certain`); `part` is what the file is if it is not the whole checkpoint;
    `stored` is the tree under the names that its writer gave, where `root` has those of torch.
    Use it as a context manager, or `close()` it.
    """

    path: PurePath
    container: Container
    root: Node
    nbytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    modules: int = 0
    facts: TorchFileFacts = TorchFileFacts()
    limits: Limits = field(default_factory=in_force)
    index_metadata: Mapping[str, Any] = field(default_factory=dict)
    module_strays: tuple[Stray, ...] = ()
    module_parts: tuple[Node, ...] = ()
    dropped: tuple[Node, ...] = ()
    module_classes: tuple[str, ...] = ()
    has_whole_modules: bool = False
    files: tuple[Checkpoint, ...] = ()
    reread: Callable[[], Checkpoint] | None = None
    part: PartFile | None = None
    stored: Dict | None = None
    made_beside: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def format(self) -> str:
        """What its container is called."""
        return self.container.name

    @property
    def is_far(self) -> bool:
        """Whether its files are over a network, where each look costs a request."""
        return isinstance(self.path, UrlPath)

    @property
    def opening(self) -> Container:
        """Who opens the container without ckptconv, and where."""
        return self.container

    def __enter__(self) -> Checkpoint:
        return self

    def __repr__(self) -> str:
        size, files = size_text(self.nbytes), count_text(len(self.sources), "file")
        return short_repr(type(self).__name__, self.path.name, self.format, size, files)

    def _repr_html_(self) -> str:
        facts = [("format", self.format), ("size", size_text(self.nbytes)), *self.metadata.items()]
        return html_table(self.path, [*facts, *(("note", note) for note in self.notes)])

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files behind the tensors; they cannot be read afterwards."""
        for source in self.sources:
            source.close()

    def blamed(self, error: CheckpointError) -> CheckpointError:
        """An error about it; of a dangerous checkpoint it says so, and not how to keep objects."""
        if danger_in(self.notes) and error.code != "dangerous":
            # whoever keeps its objects has it run their code
            if error.hint is None or "--unknown keep" in error.hint:
                error.hint = DROP_DANGEROUS
            else:
                error.hint = f"{error.hint}; {DO_NOT_LOAD}"
            error.code = error.code or "dangerous"
        return error.at(path=self.path)

    def certain(self) -> Checkpoint:
        """The same checkpoint, its strides, storages and checksums as the files themselves have
        them, not as an index tells of them. It is closed with this one.

        Raises `CheckpointError` where the files say something else than the index.
        """
        if self.reread is None:
            return self
        with held(self.limits):
            return self.reread()

    def as_part(self, part: PartFile | None) -> Checkpoint:
        """The same, which is only that part of a checkpoint; a note says so."""
        if part is None and self.part is None:
            return self
        if part is None:
            return replace(self, part=None)
        container = self.container
        if part.is_delta:
            why_not = "it holds changes of tensors, to be applied to what they were made from"
            container = replace(
                container, by="", why_not=why_not, names_storages=False, is_delta=True
            )
        notes = (*self.notes, f"{part.what}; {part.hint}")
        return replace(self, part=part, container=container, notes=notes)

    def refuse_part(self, output: str = "") -> None:
        """Raise `UnsupportedCheckpoint` for one part of a checkpoint, which is not to be taken for
        the whole, unless the name `output` says which part it is too.
        """
        if self.part is None:
            return
        mark = self.part.mark
        # no digit beside it: the file of layer 1 is not that of layer 11
        if not (mark and re.search(rf"(?<!\d){re.escape(mark)}(?!\d)", output)):
            raise UnsupportedCheckpoint(self.part.what, path=self.path, hint=self.part.hint)

    def tensors(self) -> Iterator[tuple[str, TensorRef]]:
        """Every tensor of the tree with the path at which it is first met."""
        return tensors_of(self.root, depth=merged(self.limits).depth)

    def state_dicts(self) -> list[StateDict]:
        """The state dicts found in the tree, in its order; see `find_state_dicts`."""
        with held(self.limits):
            return find_state_dicts(self.root)

    def state_dict(self, only: str | None = None) -> StateDict:
        """The one state dict, or that at `only`; `AmbiguousStateDict` for none or a choice."""
        from ckptconv.tree.choosing import choose_state_dict  # a tree that stays one has no choice

        with held(self.limits):
            return choose_state_dict(self.root, only, self.path)


def whole_of(
    parts: Sequence[Checkpoint],
    container: Container,
    root: Node,
    path: PurePath,
    notes: Iterable[str] = (),
) -> Checkpoint:
    """The checkpoint that several open ones are together: their sizes, notes and files."""
    told = dict.fromkeys((*notes, *(note for part in parts for note in part.notes)))
    sources = tuple(source for part in parts for source in part.sources)
    nbytes = sum(part.nbytes for part in parts)
    return Checkpoint(path, container, root, nbytes, notes=tuple(told), sources=sources)


# ------------------------------------------------------------------------------------------ edits


Edit: TypeAlias = Callable[[Checkpoint], Checkpoint]
"""From a checkpoint to what is to be made of it. The tree that it is given stays as it is."""


def edited(checkpoint: Checkpoint, edits: Iterable[Edit]) -> Checkpoint:
    """The checkpoint after all edits, one after another.

    Metadata that name tensors follow these, where an edit does not see to that itself. Raises
    `RefusedObject` where an edit, whoever wrote it, parts codes from their scales.
    """
    for edit in edits:
        made: object = edit(checkpoint)
        if not isinstance(made, Checkpoint):
            what = f"the edit {edit!r:.100} gave {made!r:.100}, and no checkpoint"
            raise OptionRefused(what, hint="it returns the checkpoint that it makes")
        checkpoint = _checked(checkpoint, made)
    return checkpoint


def _checked(before: Checkpoint, after: Checkpoint) -> Checkpoint:
    if after.root is before.root:
        return after
    from ckptconv.keys.naming_metadata import followed, naming_entries  # seldom needed
    from ckptconv.tensors.refs import view_identity
    from ckptconv.tensors.scaled_weights import refuse_apart

    left = dict(after.tensors())
    # whoever reads codes without their scale takes them for values: that holds for every reader
    for found in before.state_dicts():
        refuse_apart({found.prefix + key: ref for key, ref in found.tensors()}, left)
    if after.metadata is not before.metadata or not naming_entries(before.metadata):
        return after
    now = {view_identity(ref): key for key, ref in left.items()}
    names = {
        key: key if key in left else now.get(view_identity(ref)) for key, ref in before.tensors()
    }
    return replace(after, metadata=followed(before.metadata, names))


def refuse_no_edits(edits: object, name: str = "edits") -> None:
    """Raise `OptionRefused` unless `edits` are a list of edits; `name` is that of the argument."""
    if not isinstance(edits, (list, tuple)) or not all(map(callable, edits)):
        what = f"{name}={edits!r:.100} is not a list of edits"
        raise OptionRefused(what, hint=f"write it as {name}=[Drop('optimizer')]")
