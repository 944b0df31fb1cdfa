"""What a conversion is asked to do, and what it is then decided to be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from ckptconv.bounds import Limits, in_force
from ckptconv.choices import (
    TARGETS,
    TIED,
    UNKNOWN,
    plain_name,
    refuse_no_flag,
    refuse_no_output,
    refuse_no_path,
    refuse_no_tags,
    refuse_no_text,
    refuse_no_words,
    refuse_other,
    spelling_checked,
)
from ckptconv.composites import Check
from ckptconv.devices import TagMap, check_tag, tag_map
from ckptconv.dtypes import DType, floating_dtype
from ckptconv.errors import CheckpointError, OptionRefused, printable
from ckptconv.fitted_keys import KeyTarget
from ckptconv.key_rules import MappedKeys, Rule
from ckptconv.keys import RULE_WORDS, STRIP, KeyRules, rules_of
from ckptconv.layout import Layout
from ckptconv.nodes import Node
from ckptconv.rule_files import read_rules
from ckptconv.settling import Rewritten, Skipped, Unknown
from ckptconv.sharding import shard_limit
from ckptconv.showing import WIDTH, html_table, short_repr
from ckptconv.sources import Source
from ckptconv.tensors import TensorRef
from ckptconv.wording import count_text, size_text

Target = Literal["torch", "safetensors", "dcp"]
Tied = Literal["alias", "duplicate"]


_FOLDER_NAMES: dict[Target, str] = {"torch": "pytorch_model.bin", "safetensors": "model.safetensors"}


_SUFFIXES: dict[str, Target] = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".tar", ".th", ".pkl", ".model"), "torch"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """What `Options` stand for, in the types that planning works with: rules that were read, tags, bytes.

    `fit_to`: what the keys of every state dict are fitted to, after the rules.
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
        _refuse_no_choice(self)

    def cast(self, ref: TensorRef) -> DType:
        """The type in which a tensor of a state dict is written: only floating ones are cast."""
        return self.dtype if self.dtype is not None and ref.dtype.is_floating else ref.dtype


Words = str | Sequence[str]
"""One text or several."""

_RULES = ("preset", "strip_prefix", "rename", "regex", "add_prefix", "include", "exclude")
"""The options that are key rules, in the order in which they apply."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Options:
    """What a conversion is asked to do, in the words of the command line; the defaults are those of `ckptconv convert`.

    - `to`: the output format, ``torch``, ``safetensors`` or ``dcp`` (None: by the output's name).
    - `keys`: ``strip`` or ``keep`` the wrappers of DDP, torch.compile and FSDP, or ready `KeyRules`. After them apply,
      in this order: `rules` (a file of rules or a mapping, several of them, or pairs like ``("rename", "a.=b.")`` where
      another order is wanted; `reverse` undoes a mapping), `preset`, `strip_prefix`, `rename` (``OLD=NEW``), `regex`
      (``PATTERN=>REPLACEMENT``), `add_prefix`, `include`, `exclude` (globs): each one text or a list of them.
    - `like` (another checkpoint, an index, a list of keys) or `model` (``PACKAGE.MODULE:CALLABLE``, imported and
      called): what the keys are fitted to after that; `drop_unexpected` leaves out what it does not have.
    - `device`: the location tag to write (``cpu``, ``cuda:1``, ``keep``, ``auto``; None: ``cpu``, or ``keep`` beside
      `map_location`, which maps single tags). `dtype`: what floating tensors are cast to (``bf16``).
    - `only`: the path of the part to convert. `tied`: whether one of several names of a tensor stands for the others in
      safetensors (``alias``), or each gets its own copy (``duplicate``). `unknown`: what happens in a torch output to
      objects that ``weights_only=True`` refuses and that have no plain form: ``refuse``, ``drop``, ``keep``.
    - `max_shard_size`: the bytes of tensors that one file may hold (a number, or ``5GB``); a sharded output holds one
      state dict.
    - `save_mapping`: the file that will tell which key became which; ``rules=FILE, reverse=True`` undoes it.

    Files that are named are read when the conversion is planned. Raises `OptionRefused` for a value that is none of its
    choices, `UnknownOption` (a `TypeError` too) for a name that is not an option, `KeyConflict` for what is not a rule.

    >>> Options(dtype="bf16", device="cuda:1", exclude="*.num_batches_tracked", max_shard_size="5GB").device
    'cuda:1'
    """

    to: Target | None = None
    keys: Literal["strip", "keep"] | KeyRules = "strip"
    rules: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | tuple[str, str]] = ()
    reverse: bool = False
    preset: Words = ()
    strip_prefix: Words = ()
    rename: Words = ()
    regex: Words = ()
    add_prefix: Words = ()
    include: Words = ()
    exclude: Words = ()
    like: str | os.PathLike[str] | None = None
    model: str | None = None
    drop_unexpected: bool = False
    device: str | None = None
    map_location: Mapping[str, str] | None = None
    dtype: str | None = None
    only: str | None = None
    tied: Tied = "alias"
    unknown: Unknown = "refuse"
    max_shard_size: int | str | None = None
    save_mapping: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("dtype", "device"):
            object.__setattr__(self, name, plain_name(getattr(self, name)))
        _refuse_no_choice(self)
        refuse_no_words(**{name: getattr(self, name) for name in _RULES})
        refuse_no_tags(self.map_location)
        refuse_no_text(device=self.device, dtype=self.dtype, model=self.model)
        refuse_no_path(**({} if self.like is None else {"like": self.like}))
        refuse_no_output(**({} if self.save_mapping is None else {"save_mapping": self.save_mapping}))
        refuse_no_flag(reverse=self.reverse, drop_unexpected=self.drop_unexpected)
        self._key_rules(read=False)
        self._dtype()
        for tag in [self.device] * (self.device not in (None, "keep")) + [*(self.map_location or {}).values()]:
            if tag is not None and tag != "auto":
                check_tag(tag)

    def __repr__(self) -> str:
        given = ((item.name, getattr(self, item.name), item.default) for item in fields(self))
        told = printable(f"Options({', '.join(f'{name}={value!r}' for name, value, default in given if value != default)})")
        return told if len(told) <= WIDTH else f"{told[: WIDTH - 2]}…)"

    def request(self, fit_to: KeyTarget | None) -> Request:
        """The request that these options stand for; `fit_to` is what `like` or `model` name. Files of rules are read."""
        return Request(
            to=self.to,
            keys=self._key_rules(read=True),
            tags=tag_map(self.device, [f"{old}={new}" for old, new in (self.map_location or {}).items()]),
            dtype=self._dtype(),
            only=self.only,
            tied=self.tied,
            unknown=self.unknown,
            max_shard_size=shard_limit(self.max_shard_size),
            save_mapping=None if self.save_mapping is None else Path(self.save_mapping),
            fit_to=fit_to,
        )

    def _dtype(self) -> DType | None:
        return None if self.dtype is None else floating_dtype(self.dtype)

    def _key_rules(self, *, read: bool) -> KeyRules:
        """All rules as one list; without `read` those in files are left out."""
        given = rules_of(self.keys)
        one = isinstance(self.rules, (str, os.PathLike)) or (isinstance(self.rules, tuple) and self.rules[:1] in _ONE_WORD)
        listed: Any = (self.rules,) if one else self.rules
        if not isinstance(listed, (list, tuple)):
            raise OptionRefused(
                f"rules={listed!r:.100} is not a list of rules", hint="name a file, or give (rule, value) pairs"
            )
        files = [item for item in listed if not _is_rule(item)]
        for item in files:
            refuse_no_path(rules=item)
        if self.reverse and not files:
            raise OptionRefused("reverse=True undoes a mapping, but there is none", hint="name it with rules=FILE")
        made: list[Rule | tuple[str, str]] = [*given.rules]
        for item in listed:
            if _is_rule(item):
                made.append(item)
            elif read:
                made += read_rules(item, reverse=self.reverse)
        for name in _RULES:
            words = getattr(self, name)
            made += [(name.replace("_", "-"), word) for word in ((words,) if isinstance(words, str) else words)]
        return KeyRules.of(made, given.wrappers)


Options.__init__ = spelling_checked(Options.__init__)  # type: ignore[method-assign]


_ONE_WORD = {(word,) for word in RULE_WORDS}


def _is_rule(item: object) -> bool:
    """Whether an item of `rules` is a rule in words, as (rule, value), and so no file."""
    return isinstance(item, (tuple, list)) and len(item) == 2 and all(type(word) is str for word in item)


def _refuse_no_choice(asked: Options | Request) -> None:
    """Raise `OptionRefused` for a value that is none of the choices."""
    if asked.to is not None:
        refuse_other("to", asked.to, TARGETS)
    refuse_other("tied", asked.tied, TIED)
    refuse_other("unknown", asked.unknown, UNKNOWN)
    refuse_no_text(only=asked.only)
    rules_of(asked.keys)
    shard_limit(asked.max_shard_size)


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


def _gone(*_: object) -> Any:
    """What stands in a plan that came out of a pickle for what only a plan with its files open can do."""
    hint = "make it again with plan_conversion in the program that executes it"
    raise CheckpointError("the plan was pickled, so its files are not open", hint=hint)


def _told_file(file: PlannedFile | None) -> tuple[Path, int] | None:
    return None if file is None else (file.path, file.layout.nbytes)


def _file_again(told: tuple[Path, int] | None) -> PlannedFile | None:
    return None if told is None else PlannedFile(told[0], Layout((), told[1], _gone, _gone), _gone)


def _plan_again(facts: dict[str, Any]) -> ConversionPlan:
    """The plan that a pickle tells of; it cannot be executed."""
    files = tuple(map(_file_again, facts.pop("files")))
    single = {name: _file_again(facts.pop(name)) for name in ("index", "mapping")}
    return ConversionPlan(files=files, tensors=_gone, cast=_gone, checks=(_gone,), **single, **facts)  # type: ignore[arg-type]


_OF_OPEN_FILES = {"files", "index", "mapping", "tensors", "cast", "checks", "inputs", "root", "part", "accounted"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        return short_repr("ConversionPlan", f"{self.source.name} → {self.shown_name}", *self._facts())

    @property
    def shown_name(self) -> str:
        """The name of what will be there: of shards that of their index, or of the folder."""
        if self.index is None:
            return self.output.name
        return f"{self.output.parent.name}/" if self.in_folder else self.index.path.name

    def _facts(self) -> list[str]:
        keys = sum(item.count for item in self.state_dicts)
        changed = sum(len(item.changed) for item in self.state_dicts)
        shards = count_text(len(self.files), "shard") if self.index is not None else ""
        return [self.to, size_text(self.nbytes), f"{changed:,} of {count_text(keys, 'key')} renamed", shards]

    def _repr_html_(self) -> str:
        renamed = ((old, "→", new) for item in self.state_dicts for old, new in item.changed)
        left_out = ((item.path, "skipped:", item.reason) for item in self.skipped)
        return html_table(f"{self.source} → {self.output}: {', '.join(filter(None, self._facts()))}", chain(left_out, renamed))

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], ConversionPlan], tuple[dict[str, Any]]]:
        """A plan in a pickle tells all that it told; it cannot be executed, for its files are open here only."""
        facts = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _OF_OPEN_FILES}
        facts["state_dicts"] = tuple(replace(item, mapped=None) for item in self.state_dicts)
        facts["skipped"] = tuple(replace(item, node=None) for item in self.skipped)
        facts["files"] = tuple(map(_told_file, self.files))
        facts.update(index=_told_file(self.index), mapping=_told_file(self.mapping))
        for name in ("locations", "casts", "tied"):
            facts[name] = dict(facts[name])
        return _plan_again, (facts,)

    def __copy__(self) -> ConversionPlan:
        return self

    def __deepcopy__(self, _: object) -> ConversionPlan:
        return self


def target(output: Path, options: Request) -> tuple[Path, Target]:
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
        _refuse_misnamed(output, to)
        return to
    if (found := _SUFFIXES.get(output.suffix.lower())) is not None:
        return found
    hint = "add --to torch or --to safetensors (or dcp); to= in code"
    raise CheckpointError("its name does not say which format to write", path=output, hint=hint)


_OF_ONE_FORMAT: dict[str, Target] = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")}
"""Endings of names that every reader takes for one format."""


def _refuse_misnamed(output: Path, to: Target) -> None:
    """Refuse a file whose name says another format than the one that was asked for."""
    said = _OF_ONE_FORMAT.get(output.suffix.lower(), to)
    if to == "dcp" or said == to:
        return
    better = printable(output.with_suffix(".pt" if to == "torch" else ".safetensors").name)
    what = f"its name says {said}, but --to says {to} (to= in code)"
    raise CheckpointError(what, path=output, hint=f"write {better}, or leave --to out")


def keeps_modules(output: str | os.PathLike[str], options: Options | Request) -> bool:
    """Whether an output keeps whole modules as they are, and so the checkpoint must be opened with `whole_modules`."""
    return options.unknown == "keep" and options.max_shard_size is None and _target_format(Path(output), options.to) == "torch"
