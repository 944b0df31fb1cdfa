"""What a conversion is asked to do: options checked, and translated into the types of planning."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptconv.convert import words as option_words
from ckptconv.convert.casts import Casts, read_casts
from ckptconv.convert.words import RULES, OptionWords, Tied
from ckptconv.devices.mapping import TagMap, tag_map
from ckptconv.devices.tags import check_tag
from ckptconv.formats.target_format import Target, target_named
from ckptconv.keys.key_map import RULE_WORDS, STRIP, KeyRules, Keys, rules_of
from ckptconv.keys.rules import Regex, Rename, Rule
from ckptconv.support.choices import (
    Words,
    listed,
    paired,
    plain_name,
    refuse_no_flag,
    refuse_no_path,
    refuse_no_size,
    refuse_no_tags,
    refuse_no_text,
    refuse_no_words,
    refuse_other,
    size_of,
    spelling_checked,
)
from ckptconv.support.errors import OptionRefused, printable
from ckptconv.support.records import dataclass, given_fields
from ckptconv.support.report import WIDTH
from ckptconv.tensors.dtypes import DType, floating_dtype
from ckptconv.tree.checkpoint import Edit
from ckptconv.tree.settling import Unknown

if TYPE_CHECKING:
    from ckptconv.tree.fitted_keys import KeyTarget
    from ckptconv.tree.optimizer_forms import FormOptimizer

# typing.get_type_hints looks for the types of inherited fields in the module that names them, which
# does without these imports
vars(option_words).update(Keys=Keys, Unknown=Unknown)


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
            if rule.of_adapters:
                return rule.of_adapters
        return ""

    @property
    def casts(self) -> Casts:
        """Which tensors are cast, and to what."""
        return Casts(self.dtype, self.keep_dtype, self.cast)


_PAIRED: dict[str, Callable[[str, str], Rule]] = {"rename": Rename, "regex": Regex}


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

    _init_by = staticmethod(spelling_checked)

    def __post_init__(self) -> None:
        for item in fields(OptionWords):
            name, value = item.name, getattr(self, item.name)
            if value is item.default:  # which needs no look
                continue
            if name in _PLAIN:
                object.__setattr__(self, name, _PLAIN[name](value))
            elif item.metadata["choices"] and name != "keys":
                refuse_other(name, value, item.metadata["choices"])
            elif name not in ("keys", "rules"):
                _REFUSING[item.type](**{name: value})
        self._key_rules(read=False)

    def __repr__(self) -> str:
        listed = ", ".join(f"{name}={value!r}" for name, value in given_fields(self).items())
        told = printable(f"Options({listed})")
        return told if len(told) <= WIDTH else f"{told[: WIDTH - 2]}…)"

    def request(self, fit_to: KeyTarget | None) -> Request:
        """The request that these options stand for.

        `fit_to` is what `like` or `model` name. Files of rules are read.
        """
        words: Any = self  # which are plain ones by now
        return Request(
            to=self.to,
            keys=self._key_rules(read=True),
            tags=tag_map(words.device, (words.map_location or {}).items()),
            dtype=None if words.dtype is None else floating_dtype(words.dtype, "--dtype"),
            only=self.only,
            tied=self.tied,
            unknown=self.unknown,
            max_shard_size=size_of("max_shard_size", self.max_shard_size),
            with_files=self.with_files,
            with_training=self.with_training,
            save_mapping=self.save_mapping,
            manifest=self.manifest,
            fit_to=fit_to,
            edits=self._edits(),
            keep_dtype=listed(self.keep_dtype),
            cast=read_casts(listed(words.cast)),
            metadata=self._metadata(),
        )

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        if not self.metadata and self.metadata_from is None:
            return ()
        from ckptconv.convert.given_metadata import read_metadata  # seldom needed

        return read_metadata(listed_strings(self.metadata), self.metadata_from)

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

    def _key_rules(self, *, read: bool) -> KeyRules:
        """All rules as one list; without `read` those in files are left out."""
        given = rules_of(self.keys)
        made: list[Rule | Mapping[str, Any] | tuple[str, str]] = [*given.rules]
        has_files = False
        for item in self._listed_rules():
            if _is_rule(item):
                made.append(item)
                continue
            refuse_no_path(rules=item)
            has_files = True
            if read:
                from ckptconv.keys.rule_files import read_rules  # seldom needed

                made += read_rules(item, reverse=self.reverse)
        if self.reverse and not has_files:
            raise OptionRefused(
                "--reverse undoes a mapping, but there is none", hint="name it with --rules FILE"
            )
        for name in RULES:
            for word in listed(getattr(self, name)):
                is_text = isinstance(word, str)
                made.append((name.replace("_", "-"), word) if is_text else _PAIRED[name](*word))
        return KeyRules.of(made, given.wrappers) if made else given

    def _listed_rules(self) -> Sequence[Any]:
        """The items of `rules`, which may be one."""
        rules: Any = self.rules
        if isinstance(rules, (str, os.PathLike)) or (
            isinstance(rules, tuple) and rules and rules[0] in RULE_WORDS
        ):
            return (rules,)
        if not isinstance(rules, (list, tuple)):
            raise OptionRefused(
                f"rules={rules!r:.100} is not a list of rules",
                hint="name a file, or give (rule, value) pairs",
            )
        return rules


def _plain_dtype(given: Any) -> str:
    name = plain_name(given)
    refuse_no_text(dtype=name)
    floating_dtype(name, "--dtype")
    return str(name)


def _plain_device(given: Any) -> str:
    name = plain_name(given)
    refuse_no_text(device=name)
    if name not in ("keep", "auto"):
        check_tag(name)
    return str(name)


def _plain_tags(given: Any) -> dict[str, str]:
    refuse_no_tags(given)
    tags = {plain_name(old): plain_name(new) for old, new in given.items()}
    for tag in tags.values():
        if tag != "auto":
            check_tag(tag)
    return tags


def _plain_casts(given: Any) -> Words:
    casts: Words = given
    if isinstance(given, Mapping):
        casts = tuple(f"{glob}={plain_name(dtype)}" for glob, dtype in given.items())
    refuse_no_words(cast=casts)
    read_casts(listed(casts))
    return casts


def _plain_metadata(given: Any) -> tuple[str, ...]:
    from ckptconv.convert.given_metadata import read_metadata  # seldom needed

    strings = listed_strings(given)
    read_metadata(strings, None)
    return strings


# an option in plain words, out of what may be given; for what is not one, `OptionRefused`
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "dtype": _plain_dtype,
    "device": _plain_device,
    "map_location": _plain_tags,
    "cast": _plain_casts,
    "metadata": _plain_metadata,
    "rename": partial(paired, "rename"),
    "regex": partial(paired, "regex"),
}
# what raises `OptionRefused` for an option of a type; each option that is not plain, has no choices
# and is not a rule has its type here
_REFUSING: dict[Any, Callable[..., object]] = {
    "bool": refuse_no_flag,
    "str | None": refuse_no_text,
    "str | os.PathLike[str] | None": refuse_no_path,
    "Words": refuse_no_words,
    "Tied": lambda tied: refuse_no_text(tied=tied or ""),
    "int | str | None": refuse_no_size,
}


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
