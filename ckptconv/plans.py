"""What a conversion is asked to do, and what it is then decided to be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ckptconv.bounds import Limits, in_force
from ckptconv.choices import TARGETS, TIED, UNKNOWN, refuse_no_text, refuse_other
from ckptconv.composites import Check
from ckptconv.devices import TagMap
from ckptconv.dtypes import DType
from ckptconv.errors import CheckpointError
from ckptconv.fitted_keys import KeyTarget
from ckptconv.key_rules import MappedKeys
from ckptconv.keys import STRIP, KeyRules, rules_of
from ckptconv.layout import Layout
from ckptconv.nodes import Node
from ckptconv.settling import Rewritten, Skipped, Unknown
from ckptconv.sharding import shard_limit
from ckptconv.sources import Source
from ckptconv.tensors import TensorRef

Target = Literal["torch", "safetensors", "dcp"]
Tied = Literal["alias", "duplicate"]


_FOLDER_NAMES: dict[Target, str] = {"torch": "pytorch_model.bin", "safetensors": "model.safetensors"}


_SUFFIXES: dict[str, Target] = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".tar", ".th", ".pkl", ".model"), "torch"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What a conversion is asked to do; the defaults are those of `ckptconv convert`.

    `to`: the output format (None: by the output's name). `only`: the path of the part to convert. `tied`: whether one of
    several names of a tensor stands for the others in safetensors, or each gets its own copy. `unknown`: what happens in a
    torch output to objects that `weights_only=True` refuses and that have no plain form. `max_shard_size`: the bytes of
    tensors that one file may hold; a sharded output holds one state dict. `save_mapping`: the file that will tell which key
    became which; `rule_files` reads it. `fit_to`: what the keys of every state dict are fitted to, after the rules.
    """

    to: Target | None = None
    keys: KeyRules = STRIP
    tags: TagMap = TagMap("cpu")  # noqa: RUF009 (frozen)
    dtype: DType | None = None
    only: str | None = None
    tied: Tied = "alias"
    unknown: Unknown = "refuse"
    max_shard_size: int | None = None
    save_mapping: Path | None = None
    fit_to: KeyTarget | None = None

    def __post_init__(self) -> None:
        if self.to is not None:
            refuse_other("to", self.to, TARGETS)
        refuse_other("tied", self.tied, TIED)
        refuse_other("unknown", self.unknown, UNKNOWN)
        refuse_no_text(only=self.only)
        rules_of(self.keys)
        shard_limit(self.max_shard_size)

    def cast(self, ref: TensorRef) -> DType:
        """The type in which a tensor of a state dict is written: only floating ones are cast."""
        return self.dtype if self.dtype is not None and ref.dtype.is_floating else ref.dtype


@dataclass(frozen=True, slots=True)
class RenamedKeys:
    """What became of the keys of one state dict: `path` of it, the wrappers found, and (old, new) pairs that differ.

    `left_out` are the keys that the rules left out; `mapped` works out all of it, keys that the output does not hold left out.
    `odd` are the keys with characters that cannot be printed; `shared` counts the tensors whose storage another key has too.
    `filled` are keys that were absent, each with the new key whose tensor it has.
    """

    path: str
    wrappers: tuple[str, ...]
    count: int
    changed: tuple[tuple[str, str], ...]
    odd: tuple[str, ...] = ()
    shared: int = 0
    left_out: tuple[str, ...] = ()
    mapped: Callable[[], MappedKeys] | None = None
    filled: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFile:
    """One file of an output: its path, its bytes, and the tensors in it by the paths that they will have."""

    path: Path
    layout: Layout
    tensors: Callable[[], Iterator[tuple[str, TensorRef]]]


@dataclass(frozen=True, slots=True, eq=False)
class ConversionPlan:
    """Everything about an output but its payload: where each byte will come from, and what will differ from the source.

    `files` are one, or the shards, and then `index` is the file that says which of them holds a key. `in_folder`: a folder
    was asked for, which is made if it is missing. `is_sharded`: shards were asked for, though all may fit one file.

    `mapping` is the file that will tell which key became which, if one was asked for. `inputs` are the files that are read.
    `checks` read the indices of tensors made of parts, before anything is written.

    `root` is the source's tree, `part` what of it is converted, `modules` how many state dicts in it stand for whole modules;
    `accounted` is what these modules hold that their state dicts need not.

    `limits` are those under which it was made; the output is read back under them.

    `locations` counts storages by (tag before, tag after); `casts` counts tensors by (dtype before, after); `tied` maps
    dropped names to the kept one (safetensors).
    """

    source: Path
    source_format: str
    source_nbytes: int
    output: Path
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
    tensors: Callable[[], Iterator[tuple[str, TensorRef]]]
    cast: Callable[[TensorRef], DType]
    mapping: PlannedFile | None = None
    is_sharded: bool = False
    limits: Limits = field(default_factory=in_force)
    inputs: tuple[Source, ...] = ()
    checks: tuple[Check, ...] = ()
    root: Node = None
    part: Node = None
    modules: int = 0
    accounted: tuple[Node, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of the output in bytes, all its files together."""
        return sum(file.layout.nbytes for file in (*self.files, *([self.index] if self.index else [])))


def target(output: Path, options: Options) -> tuple[Path, Target]:
    """The file to write (of a sharded output the one that its shards and index are named after), and its format.

    The format is the one asked for, or the one that the name says; `CheckpointError` when it says nothing. A folder for
    shards gets the Hugging Face libraries' names.
    """
    if options.max_shard_size is not None and options.to == "dcp":
        raise CheckpointError("a DCP folder is not split by size", path=output, hint="leave --max-shard-size out")
    if options.max_shard_size is not None and (output.is_dir() or not output.suffix):
        to = options.to or "safetensors"
        return output / _FOLDER_NAMES[to], to
    return output, _target_format(output, options.to)


def _target_format(output: Path, to: Target | None) -> Target:
    if to is not None:
        return to
    if (found := _SUFFIXES.get(output.suffix.lower())) is not None:
        return found
    hint = "add --to torch or --to safetensors (or dcp)"
    raise CheckpointError("its name does not say which format to write", path=output, hint=hint)


def keeps_modules(output: str | os.PathLike[str], options: Options) -> bool:
    """Whether an output keeps whole modules as they are, and so the checkpoint must be opened with `whole_modules`."""
    return options.unknown == "keep" and options.max_shard_size is None and _target_format(Path(output), options.to) == "torch"
