"""What a conversion was decided to be: every byte of its output but the payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from itertools import chain
from pathlib import PurePath
from typing import Any

from ckptconv.convert.beside import FilesBeside
from ckptconv.devices.mapping import TagMap
from ckptconv.formats.hf_names import earlier_files
from ckptconv.formats.target_format import Layout, NamedTensor, Target, TargetFormat, target_named
from ckptconv.io.places import resolved
from ckptconv.io.source import Source
from ckptconv.objects.composites import Check
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import CheckpointError
from ckptconv.support.limits import Limits, in_force
from ckptconv.support.records import dataclass
from ckptconv.support.report import html_table, short_repr
from ckptconv.support.text import count_text, size_text
from ckptconv.tensors.compaction import CastRule
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.renaming import RenamedKeys
from ckptconv.tree.settling import Rewritten, Skipped


@dataclass(frozen=True, slots=True, eq=False)
class FilePart:
    """What a file of named tensors is laid out of."""

    tensors: Sequence[NamedTensor]
    metadata: Mapping[str, str]
    tags: TagMap


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFile:
    """One file of an output: its path, its bytes, its tensors by the paths that they will have.
    `part` is what it is laid out of, where that is named tensors.
    """

    path: PurePath
    layout: Layout
    tensors: Callable[[], Iterator[tuple[str, TensorRef]]]
    part: FilePart | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFrom:
    """What a plan reads, while its files are open: the checkpoint as it is after the edits, and the
    `part` of its tree that is converted.

    `tensors` gives the tensors by the paths that they will have, `cast` their dtypes in the output;
    `checks` read the indices of tensors made of parts, before anything is written. `limits` are
    those under which the plan was made; the output is read back under them.
    """

    checkpoint: Checkpoint
    part: Node
    tensors: Callable[[], Iterator[tuple[str, TensorRef]]]
    cast: CastRule
    checks: Sequence[Check]
    limits: Limits = field(default_factory=in_force)


def _gone(*_: object) -> Any:
    """Stands in a pickled plan for what only a plan with its files open can do."""
    hint = "make it again with plan_conversion in the program that executes it"
    raise CheckpointError("the plan was pickled, so its files are not open", hint=hint)


def _told_file(file: PlannedFile | None) -> tuple[PurePath, int] | None:
    return None if file is None else (file.path, file.layout.nbytes)


def _file_again(told: tuple[PurePath, int] | None) -> PlannedFile | None:
    return None if told is None else PlannedFile(told[0], Layout((), told[1], _gone, _gone), _gone)


def _plan_again(facts: dict[str, Any]) -> ConversionPlan:
    """The plan that a pickle tells of; it cannot be executed."""
    facts["files"] = tuple(map(_file_again, facts["files"]))
    facts |= {name: _file_again(facts[name]) for name in ("index", "mapping")}
    return ConversionPlan(**facts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ConversionPlan:
    """Everything about an output but its payload: where each byte will come from, and what will
    differ from the source.

    `files` are one, or the shards, and then `index` is the file that says which of them holds a
    key. `in_folder`: a folder was asked for, which is made if it is missing. `is_sharded`: shards
    were asked for, though all may fit one file.

    `mapping` is the file that will tell which key became which, if one was asked for, and
    `manifest` the path of the one that will tell the digests of the output. `beside` are
    the files beside the source: those that are copied, and those that are not. `reads` is what it
    is made of, and None in a plan that was pickled.

    `locations` counts storages by (tag before, tag after); `casts` counts tensors by (dtype before,
    after), and says of values made of codes what these were; `tied` maps dropped names to the kept
    one (safetensors).
    """

    source: PurePath
    source_format: str
    source_nbytes: int
    output: PurePath
    to: Target
    files: tuple[PlannedFile, ...]
    index: PlannedFile | None
    in_folder: bool
    state_dicts: tuple[RenamedKeys, ...]
    locations: Mapping[tuple[str, str], int]
    casts: Mapping[tuple[str, str], int]
    tied: Mapping[str, str]
    skipped: tuple[Skipped, ...]
    rewritten: tuple[Rewritten, ...]
    notes: tuple[str, ...]
    mapping: PlannedFile | None = None
    manifest: PurePath | None = None
    is_sharded: bool = False
    beside: FilesBeside = FilesBeside()
    reads: PlannedFrom | None = None

    @property
    def made_of(self) -> PlannedFrom:
        """What it reads; raises `CheckpointError` for a plan that was pickled."""
        return self.reads or _gone()

    @property
    def inputs(self) -> Sequence[Source]:
        """The files that are read."""
        return self.made_of.checkpoint.sources

    @property
    def folder(self) -> PurePath:
        """The folder that the output is, or lies in."""
        return self.output if self.target.is_folder else self.output.parent

    @property
    def target(self) -> TargetFormat:
        """The output format that `to` names."""
        return target_named(self.to)

    def earlier(self) -> list[PurePath]:
        """The files of a sharded output that are there by now, and would be taken for it."""
        if not self.is_sharded:
            return []
        # safetensors may stand beside what they were made of, for every library takes them first
        is_beside = self.output.suffix == ".safetensors" and resolved(self.folder) in {
            resolved(source.path.parent) for source in self.inputs
        }
        return earlier_files(self.output, others=self.in_folder and not is_beside)

    @property
    def nbytes(self) -> int:
        """The size of the output in bytes, all its files together; of a folder that torch makes,
        that of the plain torch file of which it is made.
        """
        nbytes = sum([file.layout.nbytes for file in self.files])
        if self.index is not None:
            nbytes += self.index.layout.nbytes
        if self.beside.copied:
            nbytes += sum(item.nbytes for item in self.beside.copied)
        return nbytes

    def __repr__(self) -> str:
        return short_repr(
            "ConversionPlan", f"{self.source.name} → {self.shown_name}", *self._facts()
        )

    @property
    def shown_name(self) -> str:
        """The name of what will be there: of shards that of their index, or of the folder."""
        if self.index is None:
            return f"{self.output.name}{'/' * self.target.is_folder}"
        return f"{self.output.parent.name}/" if self.in_folder else self.index.path.name

    def _facts(self) -> list[str]:
        keys = sum(item.written for item in self.state_dicts)
        changed = sum(len(item.changed) for item in self.state_dicts)
        shards = count_text(len(self.files), "shard") if self.index is not None else ""
        return [
            self.to,
            "" if self.target.is_made_by_torch else size_text(self.nbytes),
            f"{changed:,} of {count_text(keys, 'key')} renamed",
            shards,
        ]

    def _repr_html_(self) -> str:
        title = f"{self.source} → {self.output}: {', '.join(filter(None, self._facts()))}"
        return html_table(title, self.told())

    def told(self) -> Iterator[tuple[str, str, str]]:
        """What is left out and what is renamed, for a notebook."""
        renamed = ((old, "→", new) for item in self.state_dicts for old, new in item.changed)
        left_out = ((item.path, "skipped:", item.reason) for item in self.skipped)
        return chain(left_out, renamed)

    def __reduce__(
        self,
    ) -> tuple[Callable[[dict[str, Any]], ConversionPlan], tuple[dict[str, Any]]]:
        """A plan in a pickle tells all, but cannot be executed: its files are open here only."""
        facts = {item.name: getattr(self, item.name) for item in fields(self)}
        facts["reads"] = None
        # with their nodes, the whole tree would go along
        facts["state_dicts"] = tuple(replace(item, mapped=None) for item in self.state_dicts)
        facts["skipped"] = tuple(replace(item, node=None) for item in self.skipped)
        facts["files"] = tuple(map(_told_file, self.files))
        facts.update(index=_told_file(self.index), mapping=_told_file(self.mapping))
        for name in ("locations", "casts", "tied"):
            facts[name] = dict(facts[name])
        return _plan_again, (facts,)

    def __copy__(self) -> ConversionPlan:
        return self

    # a copy by way of `__reduce__` would be one that cannot be executed
    def __deepcopy__(self, _: object) -> ConversionPlan:
        return self
