"""What a conversion is asked to do: options checked, and translated into the types of planning."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args

from ckptconv.convert.casts import Casts, read_casts
from ckptconv.convert.given_metadata import read_metadata
from ckptconv.convert.words import RULES, OptionWords, Tied
from ckptconv.devices.mapping import TagMap, tag_map
from ckptconv.devices.tags import check_tag
from ckptconv.formats.hf_names import shard_limit
from ckptconv.formats.target_format import Target, target_named
from ckptconv.keys.key_map import RULE_WORDS, STRIP, KeyRules, rules_of
from ckptconv.keys.presets import Preset
from ckptconv.keys.rule_files import read_rules
from ckptconv.keys.rules import Regex, Rename, Rule
from ckptconv.support.choices import (
    OPTIMIZER_FORMS,
    UNKNOWN,
    Words,
    listed,
    paired,
    plain_name,
    refuse_no_flag,
    refuse_no_path,
    refuse_no_tags,
    refuse_no_text,
    refuse_no_words,
    refuse_other,
    spelling_checked,
)
from ckptconv.support.errors import OptionRefused, printable
from ckptconv.support.records import dataclass, given_fields
from ckptconv.support.report import WIDTH
from ckptconv.tensors.dtypes import DType, floating_dtype
from ckptconv.tree.checkpoint import Edit
from ckptconv.tree.fitted_keys import KeyTarget
from ckptconv.tree.settling import Unknown

if TYPE_CHECKING:
    from ckptconv.tree.optimizer_forms import FormOptimizer


@dataclass(frozen=True, slots=True)
class Request:
    """What `Options` stand for, in the types that planning works with: rules that were read, tags,
    bytes.

    `fit_to`: what the keys of every state dict are fitted to, after the rules. `edits` are made to
    the checkpoint first.
    """

    to: Target | None = None
    keys: KeyRules = STRIP
    tags: TagMap = TagMap("cpu")
    dtype: DType | None = None
    only: str | None = None
    tied: Tied = "alias"
    unknown: Unknown = "refuse"
    max_shard_size: int | None = None
    save_mapping: str | os.PathLike[str] | None = None
    manifest: str | os.PathLike[str] | None = None
    fit_to: KeyTarget | None = None
    edits: tuple[Edit, ...] = ()
    keep_dtype: tuple[str, ...] = ()
    cast: tuple[tuple[str, DType], ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    with_files: bool = False
    with_training: bool = False

    def __post_init__(self) -> None:
        _refuse_no_choice(self)
        if self.keep_dtype and self.dtype is None and not self.cast:
            raise OptionRefused(
                "--keep-dtype changes nothing without --dtype",
                hint="say what the others become: --dtype bf16",
            )

    @property
    def shard_bytes(self) -> int | None:
        """The bytes that one file may hold; None for an output that is one file.

        With the files beside a model, and the config of an adapter of peft, the output is a folder,
        of one file where no size is given.
        """
        if self.max_shard_size is not None:
            return self.max_shard_size
        if not self.with_files and self.of_adapters != "lora-peft":
            return None
        if self.to is not None and target_named(self.to).is_folder:
            return None
        return sys.maxsize

    @property
    def of_adapters(self) -> str:
        """The preset by which the parts of a LoRA adapter get their names; empty for none."""
        for rule in self.keys.rules:
            if isinstance(rule, Preset) and rule.is_of_adapters:
                return rule.name
        return ""

    @property
    def casts(self) -> Casts:
        """Which tensors are cast, and to what."""
        return Casts(self.dtype, self.keep_dtype, self.cast)


_PAIRED: dict[str, Callable[[str, str], Rule]] = {"rename": Rename, "regex": Regex}
_PATH = "str | os.PathLike[str] | None"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Options(OptionWords):
    """What a conversion is asked to do, in the words of the command line; the defaults are those of
    `ckptconv convert`.

    - `to`: the output format, ``torch``, ``safetensors``, ``dcp``, ``universal`` or
      ``npz`` (None: by the output's name).
    - `keys`: ``strip`` or ``keep`` the wrappers of DDP, torch.compile and FSDP, ready `KeyRules`,
      or a function that gives each key its new name (None leaves it out). After them apply, in this
      order: `rules` (a file of rules or a mapping, several of them, or pairs like
      ``("rename", "a.=b.")`` where another order is wanted, or tensor rules as in a file,
      ``{"from": ..., "to": ..., "operations": [...]}``; `reverse` undoes a mapping), `preset`,
      `strip_prefix`, `rename` (``OLD=NEW``), `regex` (``PATTERN=>REPLACEMENT``), `add_prefix`,
      `include`, `exclude` (globs): each one text or a list of them, `rename` and `regex` also a
      dict or pairs of old and new.
    - `like` (another checkpoint, an index, a list of keys) or `model` (``PACKAGE.MODULE:CALLABLE``,
      imported and called): what the keys are fitted to after that; `drop_unexpected` leaves out
      what it does not have.
    - `device`: the location tag to write (``cpu``, ``cuda:1``, ``keep``, ``auto``; None: ``cpu``,
      or ``keep`` beside `map_location`, which maps single tags). `dtype`: what floating tensors are
      cast to (``bf16``).
      `keep_dtype` are globs over the keys of the output whose tensors stay as they are, `cast` are
      ``GLOB=DTYPE``, or a dict. Types and devices of torch and numpy are as good as their names.
    - `drop`: globs over the paths of the checkpoint, such as ``optimizer``: what is left out.
    - `optimizer`: the form of optimizer states, by ``names`` of parameters, by ``numbers`` as
      torch.optim has them, ``flat``, ``torchtitan`` (flat, the weights at the root), or
      ``megatron`` (a `torch_dist` folder of Megatron, as such a folder again);
      `order_from` (a torch file, or a text with one key per line) or `model`: the order of
      ``model.parameters()``, by which numbers and names are one another's.
    - `metadata`: ``NAME=VALUE``, or a dict, to put into a safetensors output; `metadata_from`: a
      file with a JSON object of more.
    - `only`: the path of the part to convert. `tied`: whether one of several names of a tensor
      stands for the others in safetensors (``alias``: the first in sorted order; a pattern such as
      ``model.*``: the one that it matches), or each gets its own copy (``duplicate``).
      `unknown`: what happens in a torch output to objects that ``weights_only=True`` refuses and
      that have no plain form: ``refuse``, ``drop``, ``keep``.
    - `max_shard_size`: the bytes of tensors that one file may hold (a number, or ``5GB``); a
      sharded output holds one state dict.
    - `with_files`: copy the files beside the source that belong to a model (config, tokenizer,
      licence), chosen by name, into the output, which is a folder then.
    - `with_training`: of a folder in which training saved ``optimizer.pt``, ``scheduler.pt``,
      ``rng_state.pth`` beside the weights, take these too: the weights are under ``model`` then.
    - `save_mapping`: the file that will tell which key became which; ``rules=FILE, reverse=True``
      undoes it.
    - `manifest`: the file that will tell the SHA-256 of each file and each tensor of the output, as
      `manifest_checkpoint` would, made while they are written; `verify_checkpoint` reads it.

    Files that are named are read when the conversion is planned. Raises `OptionRefused` for a value
    that is none of its choices, `UnknownOption` (a `TypeError` too) for a name that is not an
    option, `KeyConflict` for what is not a rule.

    >>> Options(dtype="bf16", device="cuda:1", max_shard_size="5GB").device
    'cuda:1'
    """

    def __post_init__(self) -> None:
        for name in ("dtype", "device"):
            self._become(name, plain_name(getattr(self, name)))
        for name in ("rename", "regex"):
            self._become(name, paired(name, getattr(self, name)))
        if isinstance(self.cast, Mapping):
            casts = self.cast.items()
            self._become("cast", tuple(f"{glob}={plain_name(dtype)}" for glob, dtype in casts))
        refuse_no_words(cast=self.cast)
        refuse_no_tags(self.map_location)
        if self.map_location is not None:
            self._become("map_location", dict(self._tags()))
        _refuse_no_choice(self)
        refuse_no_words(**{name: getattr(self, name) for name in self._of_type("Words")})
        self._casts()
        self._become("metadata", listed_strings(self.metadata))
        read_metadata(self.metadata, None)
        texts = [*self._of_type("str | None"), "dtype", "device"]
        refuse_no_text(**{name: getattr(self, name) for name in texts})
        paths = ((name, getattr(self, name)) for name in self._of_type(_PATH))
        refuse_no_path(**{name: path for name, path in paths if path is not None})
        refuse_no_flag(**{name: getattr(self, name) for name in self._of_type("bool")})
        self._key_rules(read=False)
        self._dtype()
        named = () if self.device in (None, "keep") else (plain_name(self.device),)
        for tag in (*named, *(new for _, new in self._tags())):
            if tag != "auto":
                check_tag(tag)

    def _become(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _of_type(self, written: str) -> list[str]:
        """The names of the options whose type is written so."""
        return [item.name for item in fields(self) if item.type == written]

    def __repr__(self) -> str:
        listed = ", ".join(f"{name}={value!r}" for name, value in given_fields(self).items())
        told = printable(f"Options({listed})")
        return told if len(told) <= WIDTH else f"{told[: WIDTH - 2]}…)"

    def request(self, fit_to: KeyTarget | None) -> Request:
        """The request that these options stand for.

        `fit_to` is what `like` or `model` name. Files of rules are read.
        """
        return Request(
            to=self.to,
            keys=self._key_rules(read=True),
            tags=tag_map(plain_name(self.device), self._tags()),
            dtype=self._dtype(),
            only=self.only,
            tied=self.tied,
            unknown=self.unknown,
            max_shard_size=shard_limit(self.max_shard_size),
            with_files=self.with_files,
            with_training=self.with_training,
            save_mapping=self.save_mapping,
            manifest=self.manifest,
            fit_to=fit_to,
            edits=self._edits(),
            keep_dtype=listed(self.keep_dtype),
            cast=self._casts(),
            metadata=read_metadata(listed_strings(self.metadata), self.metadata_from),
        )

    def _edits(self) -> tuple[Edit, ...]:
        own = edits_of(listed(self.drop), dequantize=self.dequantize, scheme=self.scheme)
        form = self._optimizer_edits()
        if self.optimizer == "megatron":  # takes the tree as it is stored
            return (*form, *own)
        return (*own, *form)

    def _optimizer_edits(self) -> tuple[FormOptimizer, ...]:
        """The edit of optimizer states: what is asked for, or what the output takes."""
        needs_names = self.to is not None and target_named(self.to).names_parameters
        if self.optimizer is None and not needs_names:
            if self.order_from is not None:
                hint = "add --optimizer names or --optimizer numbers, or leave --order-from out"
                raise OptionRefused("--order-from is the order of an optimizer's", hint=hint)
            return ()
        if needs_names and self.optimizer not in (None, "names"):
            what = f"--to {self.to} has optimizer states by names, not {self.optimizer}"
            raise OptionRefused(what, hint="leave --optimizer out")
        if self.optimizer == "megatron":
            is_dcp = self.to is not None and target_named(self.to).is_made_by_torch
            if not is_dcp or self.only is not None:
                hint = "add --to dcp, and leave --only out"
                raise OptionRefused("--optimizer megatron is for a whole DCP folder", hint=hint)
        from ckptconv.convert.key_targets import parameter_order  # seldom needed, as the next one
        from ckptconv.tree.optimizer_forms import FormOptimizer

        order = parameter_order(self.order_from, self.model)
        return (FormOptimizer(self.optimizer or "names", order, if_there=self.optimizer is None),)

    def _dtype(self) -> DType | None:
        return None if self.dtype is None else floating_dtype(plain_name(self.dtype), "--dtype")

    def _casts(self) -> tuple[tuple[str, DType], ...]:
        return read_casts(listed(self.cast if not isinstance(self.cast, Mapping) else ()))

    def _tags(self) -> list[tuple[str, str]]:
        """The pairs of `map_location`."""
        pairs = {} if self.map_location is None else self.map_location
        return [(plain_name(old), plain_name(new)) for old, new in pairs.items()]

    def _key_rules(self, *, read: bool) -> KeyRules:
        """All rules as one list; without `read` those in files are left out."""
        given = rules_of(self.keys)
        one = isinstance(self.rules, (str, os.PathLike)) or (
            isinstance(self.rules, tuple) and self.rules[:1] in _ONE_WORD
        )
        listed: Any = (self.rules,) if one else self.rules
        if not isinstance(listed, (list, tuple)):
            raise OptionRefused(
                f"rules={listed!r:.100} is not a list of rules",
                hint="name a file, or give (rule, value) pairs",
            )
        files = [item for item in listed if not _is_rule(item)]
        for item in files:
            refuse_no_path(rules=item)
        if self.reverse and not files:
            raise OptionRefused(
                "--reverse undoes a mapping, but there is none", hint="name it with --rules FILE"
            )
        made: list[Rule | Mapping[str, Any] | tuple[str, str]] = [*given.rules]
        for item in listed:
            if _is_rule(item):
                made.append(item)
            elif read:
                made += read_rules(item, reverse=self.reverse)
        for name in RULES:
            words = getattr(self, name)
            made += [
                (name.replace("_", "-"), word) if isinstance(word, str) else _PAIRED[name](*word)
                for word in ((words,) if isinstance(words, str) else words)
            ]
        return KeyRules.of(made, given.wrappers) if made else given


Options.__init__ = spelling_checked(Options.__init__)  # type: ignore[method-assign]


_ONE_WORD = {(word,) for word in RULE_WORDS}


def listed_strings(given: Words | Mapping[str, str]) -> tuple[str, ...]:
    """Strings as ``NAME=VALUE``, out of these or a dict."""
    if not isinstance(given, Mapping):
        refuse_no_words(metadata=given)
        return listed(given)
    for name, value in given.items():
        if type(name) is not str or type(value) is not str or "=" in name:
            raise OptionRefused(f"metadata={given!r:.100} is not a dict of texts without =")
    return tuple(f"{name}={value}" for name, value in given.items())


def edits_of(
    drop: Sequence[str], *, dequantize: bool = False, scheme: str | None = None
) -> tuple[Edit, ...]:
    """The edits that options ask for."""
    edits: list[Edit] = []
    if drop:
        from ckptconv.tree.dropping import Drop  # seldom needed, as the next one is

        edits.append(Drop(tuple(drop)))
    if dequantize:
        from ckptconv.tree.dequantizing import Dequantize

        edits.append(Dequantize(scheme))
    elif scheme is not None:
        hint = "add --dequantize, or leave --scheme out"
        raise OptionRefused("--scheme says how weights are to be dequantised", hint=hint)
    return tuple(edits)


def _is_rule(item: object) -> bool:
    """Whether an item of `rules` is a rule, maybe in words, as (rule, value), and so no file."""
    return isinstance(item, (Rule, Mapping)) or (
        isinstance(item, (tuple, list))
        and len(item) == 2
        and all(type(word) is str for word in item)
    )


def _refuse_no_choice(asked: Options | Request) -> None:
    """Raise `OptionRefused` for a value that is none of the choices."""
    if asked.to is not None:
        refuse_other("to", asked.to, get_args(Target))
    refuse_no_text(tied=asked.tied or "")
    refuse_other("unknown", asked.unknown, UNKNOWN)
    if isinstance(asked, Options) and asked.optimizer is not None:
        refuse_other("optimizer", asked.optimizer, OPTIMIZER_FORMS)
    refuse_no_text(only=asked.only)
    rules_of(asked.keys)
    shard_limit(asked.max_shard_size)
