"""Quantised weights made values again: an edit, under the names that the model has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from os.path import commonprefix

from ckptconv.keys.key_map import KeyRules
from ckptconv.keys.naming_metadata import naming_entries
from ckptconv.objects.torch_read import plain_sizes
from ckptconv.pickles.nodes import (
    Call,
    Dict,
    Global,
    Node,
    containers,
    entries,
    mapping_pairs,
    spoken,
    substituted,
    with_pairs,
)
from ckptconv.support.choices import refuse_no_flag, refuse_no_text
from ckptconv.support.errors import (
    CheckpointError,
    KeyConflict,
    OptionRefused,
    RefusedObject,
    printable,
)
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text, first_few
from ckptconv.tensors.dtypes import FLOAT8
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.scaled_weights import may_hold_codes
from ckptconv.tensors.schemes.base import CodeGroup, Facts
from ckptconv.tensors.schemes.gptq import has_all_ones, stepped_zeros
from ckptconv.tensors.schemes.table import (
    Decoded,
    OnError,
    decode_all,
    left_out_with,
    names_activations,
)
from ckptconv.tensors.schemes.torchao import torchao_weight
from ckptconv.tree.checkpoint import Checkpoint, Edit
from ckptconv.tree.model_config import facts_beside
from ckptconv.tree.renaming import map_state_dict
from ckptconv.tree.reshaping import with_config
from ckptconv.tree.state_dicts import StateDict

_LISTED, _SCHEMES = 4, 6
# names that nothing but a quantised weight has: of GPTQ and AWQ, compressed-tensors, ModelOpt,
# ComfyUI and bitsandbytes
_PARTS_OF_WEIGHTS = frozenset((
    "qweight", "qzeros", "g_idx", "weight_packed", "weight_scale", "weight_scale_2",
    "weight_global_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "comfy_quant",
    "SCB", "absmax", "quant_map", "nested_absmax", "nested_quant_map",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dequantize:
    """An edit: makes values of weights that are codes beside scales, under the model's own names;
    scales, zero points and scales of activations are left out, all else stays.

    How a weight is quantised is read from ``config.json`` beside the checkpoint (or
    ``hf_quant_config.json``, ``quantize_config.json``), from the metadata of safetensors, then from
    names and shapes; `scheme` says it where these leave a choice (`ckptconv.tensors.schemes.table`
    has the words). Values are those of float32, rounded once, in the type of the weights that
    ``config.json`` names, else in that of the scheme (docs/quantised.md).

    Raises `RefusedObject` where the scheme of a weight cannot be told or is not known,
    `MalformedCheckpoint` where codes and scales do not fit, `OptionRefused` where nothing is
    quantised, unless `if_quantized`: then such a checkpoint stays as it is. `keys` are the rules
    that come after it (a conversion has its own): what they leave out need not be known.
    """

    scheme: str | None = None
    if_quantized: bool = False
    keys: KeyRules | None = None

    def __post_init__(self) -> None:
        if self.keys is not None and not isinstance(self.keys, KeyRules):
            what = f"keys={self.keys!r:.100} is not KeyRules"
            raise OptionRefused(what, hint="write it as keys=KeyRules(exclude=['lm_head.*'])")
        refuse_no_text(scheme=self.scheme)
        refuse_no_flag(if_quantized=self.if_quantized)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        checkpoint.refuse_part()
        facts = facts_beside(checkpoint, self.scheme)
        found: list[Decoded] = []
        stand_ins: dict[int, list[_Renamed]] = {}
        gone: dict[int, list[str]] = {}
        plain: list[str] = []
        kept: list[tuple[str, str]] = []
        failed: dict[str, Failed] = {}
        for state_dict in checkpoint.state_dicts():
            unread = failed.setdefault(state_dict.path, {})
            done = _decoded(state_dict, facts, gone, unread)
            tensors = dict(state_dict.tensors())
            if not done:
                codes = [key for key, ref in tensors.items() if ref.dtype in FLOAT8]
                plain += [state_dict.prefix + key for key in codes]
                continue
            beside = left_out_with(done, tensors)
            kept += _left(state_dict, tensors, done, beside, unread)
            found += done
            _note_stand_ins(state_dict, done, beside, stand_ins, gone)
        root = _edited(checkpoint.root, stand_ins, gone) if found else checkpoint.root
        kept = self._wanted(replace(checkpoint, root=root), failed, kept)
        if not found and self.if_quantized:
            return checkpoint
        if not found:
            refs = [ref for _, ref in checkpoint.tensors()]
            raise _nothing_found(facts, has_codes=may_hold_codes(refs))
        self._refuse_idle(found)
        named = naming_entries(checkpoint.metadata)
        metadata = {key: text for key, text in checkpoint.metadata.items() if key not in named}
        lost = gone.keys() - set(map(id, _values(root)))
        dropped = [node for node in _values(checkpoint.root) if id(node) in lost]
        return replace(
            checkpoint,
            root=root,
            metadata=metadata,
            notes=(
                *checkpoint.notes,
                *_notes(found, [*chain(*gone.values())], facts),
                *_zero_notes(found, facts),
                *_notes_of_others(plain, [path for _, path in kept]),
            ),
            dropped=(*checkpoint.dropped, *dropped),
        )

    def _refuse_idle(self, found: Sequence[Decoded]) -> None:
        """Refuse a scheme that no weight has; of several checkpoints one may have it."""
        words = {item.word for item in found}
        if self.scheme is None or self.if_quantized or self.scheme.removesuffix("-v2") in words:
            return
        schemes = first_few(list(dict.fromkeys(item.scheme for item in found)), _LISTED)
        raise OptionRefused(
            f"--scheme {self.scheme} is not that of a weight in it",
            hint=f"leave --scheme out: its weights are {schemes}",
        )

    def _wanted(
        self, after: Checkpoint, failed: Mapping[str, Failed], kept: list[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """Those that are `kept` (the paths of their state dicts, their own) and that the rules do
        not leave out, which apply to the values that were made.

        Raises the error about a weight that `failed` to become values, and is not left out.
        """
        waiting = {path: unread for path, unread in failed.items() if unread}
        if not waiting and not kept:
            return kept
        left: set[str] = set()
        for state_dict in after.state_dicts():
            unread = waiting.pop(state_dict.path, {})
            left_out = self._left_out(state_dict, after, unread)
            left |= {state_dict.prefix + key for key in left_out}
            for key, error in unread.items():
                if key not in left_out:
                    raise self._hinting(error)
        for error in chain.from_iterable(unread.values() for unread in waiting.values()):
            raise self._hinting(error)
        return [item for item in kept if item[1] not in left]

    def _left_out(self, state_dict: StateDict, after: Checkpoint, unread: Failed) -> frozenset[str]:
        """The keys that nobody wants after the rules."""
        if self.keys is None:
            return frozenset()
        try:
            rules = with_config(self.keys, after)
            return map_state_dict(state_dict, rules, after, None).left_out()
        except CheckpointError as error:
            if error.where in unread:  # a rule takes what is not known
                raise self._hinting(unread[error.where]) from error
            return frozenset()  # others are told of by whoever applies them

    def _hinting(self, error: CheckpointError) -> CheckpointError:
        """An error about a weight, which says how to leave it out where that is possible."""
        if self.keys is not None and error.where is not None:
            error.hint = f"{error.hint}; or {_LEAVE}" if error.hint else _LEAVE
        return error


Failed = dict[str, CheckpointError]
"""What is wrong with weights of a state dict that did not become values, by their keys."""

_LEAVE = "leave it out (--exclude)"


def with_rules(edits: Iterable[Edit], rules: KeyRules) -> Iterator[Edit]:
    """The same edits, before the rules of a conversion."""
    for edit in edits:
        if isinstance(edit, Dequantize) and edit.keys is None:
            yield replace(edit, keys=rules)
        else:
            yield edit


def _nothing_found(facts: Facts, *, has_codes: bool) -> OptionRefused:
    if facts.method and not has_codes:
        return OptionRefused(
            f"its config names the quantisation {printable(facts.method)}, and all its tensors are "
            "values already",
            hint="leave --dequantize out, and take that out of the config",
        )
    if facts.method:
        return OptionRefused(
            f"its config names the quantisation {printable(facts.method)}, and no weight in it is "
            "quantised in a way that is known here",
            hint="dequantise it with what wrote it",
        )
    what = "nothing in it is quantised in a way that is known"
    return OptionRefused(what, hint="leave --dequantize out")


def _decoded(
    state_dict: StateDict, facts: Facts, gone: dict[int, list[str]], failed: Failed | None = None
) -> list[Decoded]:
    """The weights that are codes, decoded; errors about them are raised, or put into `failed`."""

    def note(key: str, error: CheckpointError) -> None:
        if failed is None:
            raise error
        failed[key] = error

    tensors = decode_all(dict(state_dict.tensors()), facts, note)
    return [*tensors, *_of_subclasses(state_dict, facts, gone, note)]


def quantized_in(checkpoint: Checkpoint) -> dict[str, list[Decoded]]:
    """The quantised weights of the state dicts of a checkpoint, by their paths, without a change.
    Raises what `Dequantize` raises.
    """
    facts = facts_beside(checkpoint)
    return {item.path: _decoded(item, facts, {}) for item in checkpoint.state_dicts()}


def _left(
    state_dict: StateDict,
    tensors: Mapping[str, TensorRef],
    done: list[Decoded],
    beside: set[str],
    failed: Failed,
) -> Iterator[tuple[str, str]]:
    """What stays as it is, and may be a part of a quantised weight: the path of the state dict, and
    its own. What surely is one has `failed`, beside weights that were decoded: the rest of it is
    missing.
    """
    read = {key for item in done for key in (item.codes, *item.used)}
    for key, ref in tensors.items():
        if key in read or key in beside or key in failed:
            continue
        if _is_part(key, ref):
            failed[key] = RefusedObject(
                f"is {ref.dtype.name} without what it is read with, beside "
                f"{count_text(len(done), 'weight')} that can be dequantised",
                where=key,
                hint="its scale or its codes are in another file of the set, or missing",
            )
        elif _may_be_part(key, ref):
            yield state_dict.path, state_dict.prefix + key


def _is_part(key: str, ref: TensorRef) -> bool:
    """Whether a tensor is codes, or read with codes, by its type and its name."""
    name = key.rpartition(".")[2]
    is_mx = ref.dtype.name == "uint8" and name.endswith(("_blocks", "_scales"))
    is_codes = name == "weight" and ref.dtype.kind in ("int", "bits")
    is_named = name in _PARTS_OF_WEIGHTS or name.endswith(("_scale_inv", "_qdata"))
    return ref.dtype in FLOAT8 or is_named or is_codes or is_mx or ".quant_state." in key


def _may_be_part(key: str, ref: TensorRef) -> bool:
    """Whether a tensor that stays is worth a word: by its name, or as a matrix of bytes."""
    is_matrix = len(ref.shape) > 1 and ref.dtype.kind in ("int", "bits") and ref.dtype.itemsize == 1
    return is_matrix or names_activations(key) or key.rpartition(".")[2] in ("scales", "biases")


_REBUILD = "torch._tensor._rebuild_from_type_v2"
_TORCHAO = "torchao."


def _of_subclasses(
    state_dict: StateDict, facts: Facts, gone: dict[int, list[str]], note: OnError
) -> Iterator[Decoded]:
    """The weights that are pickled objects of torchao's classes, none of which is imported; their
    tensors but for the codes are noted as `gone`.
    """
    for key, node in zip(state_dict.keys, state_dict.values, strict=True):
        if not isinstance(node, Call) or node.name != _REBUILD or len(node.args) != 4:
            continue
        _, cls, arguments, state = node.args
        if not (isinstance(cls, Global) and spoken(cls).startswith(_TORCHAO)):
            continue
        if not (isinstance(arguments, tuple) and len(arguments) > 1 and isinstance(state, Dict)):
            continue
        fields = entries(state)
        try:
            yield _of_subclass(key, spoken(cls), arguments, fields, facts)
        except CheckpointError as error:
            note(key, error)
            continue
        for name, ref in fields.items():
            if isinstance(ref, TensorRef) and name != "qdata":
                gone.setdefault(id(ref), []).append(f"{state_dict.prefix}{key}.{name}")


def _of_subclass(
    key: str, cls: str, arguments: tuple[Node, ...], fields: Mapping[str, Node], facts: Facts
) -> Decoded:
    tensors = {name: ref for name, ref in fields.items() if isinstance(ref, TensorRef)}
    if "qdata" not in tensors:
        what = f"is {cls}, whose codes cannot be read here"
        raise RefusedObject(what, where=key, hint="dequantise it with torchao")
    told = {name: _told(value) for name, value in fields.items()}
    told["dtype"] = _told(arguments[1])
    parts = {name: name for name in tensors if name != "qdata"}
    group = CodeGroup(key, "", {**tensors, key: tensors["qdata"]})
    made = torchao_weight(group, facts, key, cls.rpartition(".")[2], told, parts)
    if len(arguments) < 3 or plain_sizes(arguments[2]) != made.values.shape:
        group.refuse(f"has values of {list(made.values.shape)}, and says another shape")
    return Decoded(key, (), key, made.values, made.scheme, "torchao")


def _told(value: Node) -> object:
    """An attribute as its JSON has it: a dtype by its name, a tuple as a list."""
    match value:
        case Global():
            return spoken(value)
        case tuple():
            return [*value]
    return value


def _note_stand_ins(
    state_dict: StateDict,
    done: list[Decoded],
    beside: set[str],
    stand_ins: dict[int, list[_Renamed]],
    gone: dict[int, list[str]],
) -> None:
    """Note what stands in for the codes, by the identity of their values, and what goes. A tensor
    may be there under several keys; codes that are read with the same give the same.
    """
    values = dict(zip(state_dict.keys, state_dict.values, strict=True))
    used = {key for item in done for key in item.used}
    others = values.keys() - {item.codes for item in done} - used
    for item in done:
        if item.key in others:
            what = "stands beside the codes of which it would be made"
            raise KeyConflict(what, where=item.key)
        node = values[item.codes]
        known = stand_ins.setdefault(id(node), [])
        like = (each.values for each in known if _is_same(each.values, item.values))
        known.append(_Renamed(item.codes, item.key, next(like, item.values)))
    for key in values:
        if key in used or key in beside:
            gone.setdefault(id(values[key]), []).append(state_dict.prefix + key)


def _is_same(one: TensorRef, other: TensorRef) -> bool:
    """Whether two tensors are computed in the same way of the same."""
    # by what makes them, without making a value
    return one.shape == other.shape and (
        one.storage.source.fingerprint() == other.storage.source.fingerprint()
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Renamed:
    """The values of codes, whose key becomes another one."""

    before: str
    after: str
    values: TensorRef

    def label(self, label: Node) -> Node:
        """The label in a dict, whose end is the end of the key."""
        if type(label) is not str:
            return label
        at = len(commonprefix((self.before, self.after)))  # noqa: RUF071 (of characters)
        removed, added = self.before[at:], self.after[at:]
        return label.removesuffix(removed) + added if label.endswith(removed) else label


def _values(root: Node) -> Iterator[Node]:
    for holder in containers(root):
        for _, value in mapping_pairs(holder) or ():
            yield value


def _chosen(known: list[_Renamed], label: Node) -> _Renamed | None:
    """What stands in for codes under this label; `RefusedObject` where there is a choice."""
    if not known:
        return None
    named = [each for each in known if type(label) is str and each.before.endswith(label)]
    fitting = named or known
    if any(each.values is not fitting[0].values for each in fitting):
        names = " and ".join(each.before for each in fitting[:2])
        what = f"is one tensor of codes, which {names} read with different scales"
        raise RefusedObject(what, where=fitting[0].before)
    return fitting[0]


def _edited(
    root: Node, stand_ins: Mapping[int, list[_Renamed]], gone: Mapping[int, list[str]]
) -> Node:
    """The tree with values in the places of codes, and without what these were read with."""
    made: dict[int, Node] = {}
    for holder in containers(root):
        pairs = mapping_pairs(holder) or []
        if not any(id(value) in stand_ins or id(value) in gone for _, value in pairs):
            continue
        kept = []
        for label, value in pairs:
            new = _chosen(stand_ins.get(id(value), []), label)
            if new is not None:
                kept.append((new.label(label), new.values))
            elif not any(key.endswith(str(label)) for key in gone.get(id(value), ())):
                kept.append((label, value))  # a scale may be a value too, under another name
        made[id(holder)] = with_pairs(holder, kept)
    return substituted(root, made)


def _notes(found: list[Decoded], gone: list[str], facts: Facts) -> Iterator[str]:
    counted = Counter(item.scheme for item in found).most_common()
    schemes = [scheme if len(counted) == 1 else f"{scheme} ({count})" for scheme, count in counted]
    yield f"{count_text(len(found), 'weight')} dequantised: {first_few(schemes, _SCHEMES)}"
    if gone:
        names = Counter(key.rpartition(".")[2] for key in gone).most_common()
        listed = [name if count == 1 else f"{name} ({count})" for name, count in names]
        yield (
            f"left out with them, as they mean nothing without codes: {first_few(listed, _SCHEMES)}"
        )
    plain = _listed_as_plain(facts)
    listed_as_plain = [item.codes for item in found if _is_listed(item.key, plain)]
    if listed_as_plain:
        yield (
            "the config names these among the modules that are not quantised, and they are: "
            f"{first_few(listed_as_plain, _LISTED)}"
        )
    if facts.config.get("transform_config"):
        yield (
            "its weights were rotated before they were quantised (transform_config): the values "
            "belong to the rotated model"
        )


def _zero_notes(found: list[Decoded], facts: Facts) -> Iterator[str]:
    """Tell of zeros of GPTQ that other readers take for something else."""
    if facts.config.get("sym") is True:
        return  # then each zero is the middle, and to read them all tells nothing
    left = _MOST_ZEROS
    wrapped: list[str] = []
    for item in found:
        zeros = stepped_zeros(item.values)
        if zeros is None:
            continue
        left -= zeros.words.nbytes
        if left < 0:
            yield "not all zeros are looked at: some may stand for 0, which gptqmodel misreads"
            break
        if has_all_ones(zeros):
            wrapped.append(item.codes)
    if wrapped:
        yield (
            "some stored zeros are all ones, which stand for 0; gptqmodel adds one to the whole "
            f"word, and reads the next zero wrong too: {first_few(wrapped, _LISTED)}"
        )


# The most bytes of zeros that are read while a conversion is planned: a model of 60 billion weights
# in groups of 128 has them, and a tensor that is expanded claims any number
_MOST_ZEROS = 1 << 28


def _notes_of_others(plain: list[str], kept: list[str]) -> Iterator[str]:
    """Tell of tensors that stay, and may be meant to be values."""
    if plain:
        yield (
            "float8 tensors without scales stay as they are, in a state dict where nothing is "
            f"quantised: {first_few(plain, _LISTED)}"
        )
    if kept:
        yield (
            "stay as they are, though they are named or stored as parts of quantised weights are: "
            f"{first_few(kept, _LISTED)}"
        )


_PLAIN_LISTS = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")


def _listed_as_plain(facts: Facts) -> set[str]:
    listed = [facts.config.get(name) for name in _PLAIN_LISTS]
    names = [name for item in listed if isinstance(item, list) for name in item]
    return {name for name in names if isinstance(name, str) and name}


def _is_listed(key: str, listed: set[str]) -> bool:
    """Whether the module of a weight is among these, by its path or the end of it. Its ends are
    looked up: models have tens of thousands of weights, and lists hundreds of names.
    """
    end = key.rpartition(".")[0]
    while end:
        if end in listed:
            return True
        end = end.partition(".")[2]
    return False
