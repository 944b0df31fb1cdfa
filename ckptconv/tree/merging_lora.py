"""LoRA adapters merged into the weights of their base: an edit."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.keys.key_map import STRIP, map_keys
from ckptconv.pickles.nodes import Node, substituted
from ckptconv.support.choices import refuse_no_text
from ckptconv.support.errors import (
    CheckpointError,
    KeyConflict,
    KeyMismatch,
    OptionRefused,
    RefusedObject,
    printable,
)
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text, first_few, starred
from ckptconv.tensors.dtypes import FLOAT8
from ckptconv.tensors.refs import TensorObject, TensorRef, view_identity
from ckptconv.tensors.scaled_weights import find_scaled, may_hold_codes
from ckptconv.tensors.views import in_order, reshaped
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.lora_adapters import PEFT_PREFIX, Adapter, Config, Parts, read_adapter
from ckptconv.tree.lora_configs import with_those_around
from ckptconv.tree.lora_deltas import (
    MERGED_TYPES,
    AdapterTarget,
    WeightChange,
    as_linear,
    changed,
    expert_changes,
    hadamard_change,
    in_rows,
    kept_type,
    kronecker_change,
    linear_change,
    misfit,
    orientations,
    rows,
    rows_in,
    whole_change,
    with_changed_rows,
    with_replaced_rows,
)
from ckptconv.tree.lora_names import Names, Place, Places, found_modules
from ckptconv.tree.walk import tensor_of


@dataclass(frozen=True, slots=True)
class MergeLora:
    """An edit: adds what LoRA `adapters` say to the weights of their base, and puts the tensors
    that they hold whole in the places of the base's.

    `adapters` is an open checkpoint, or several; they stay open as long as the result is read.
    `scale` multiplies what is added, one number for all of them or one for each (default 1). `only`
    is the path of the state dict in the base, where it has several.

    Values are those of `merge_and_unload` of peft for an adapter that was loaded by
    ``from_pretrained``: sums in float32, rounded once to the type of the weight; for embeddings and
    parameters of experts the delta is rounded before it is added (docs/lora.md). Of several
    adapters, all deltas are added before that one rounding.

    Raises `KeyMismatch` where a part of an adapter finds no tensor in the base, or one of another
    shape; `RefusedObject` for kinds of adapters that are not known, and for quantised weights of
    the base; `MalformedCheckpoint` for an adapter that contradicts itself.
    """

    adapters: Checkpoint | Sequence[Checkpoint]
    scale: float | Sequence[float] = 1.0
    only: str | None = None

    def __post_init__(self) -> None:
        refuse_no_text(only=self.only)
        listed = self.adapters
        if isinstance(listed, Checkpoint):
            listed = (listed,)
        is_list = isinstance(listed, (list, tuple)) and listed
        if not is_list or not all(isinstance(each, Checkpoint) for each in listed):
            what = f"adapters={self.adapters!r:.100} are not open checkpoints"
            raise OptionRefused(what, hint="give what open_checkpoint gives")
        object.__setattr__(self, "adapters", tuple(listed))
        object.__setattr__(self, "scale", _strengths(self.scale, len(listed)))

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        checkpoint.refuse_part()
        assert isinstance(self.adapters, tuple) and isinstance(self.scale, tuple)
        base = _Base(checkpoint, self.only)
        for opened, strength in zip(self.adapters, self.scale, strict=True):
            try:
                _Merging(base, read_adapter(opened), strength).run()
            except CheckpointError as error:
                raise error.at(path=opened.path) from None
        return base.merged(self.adapters)


def _strengths(given: Any, count: int) -> tuple[float, ...]:
    """One number for each adapter."""
    listed = given if isinstance(given, (list, tuple)) else (given,) * count
    if not all(type(one) in (int, float) and math.isfinite(one) for one in listed):
        raise OptionRefused(f"scale={given!r:.100} is not a finite number, or a list of such")
    if len(listed) != count:
        what = f"there are {count_text(len(listed), 'scale')} for {count_text(count, 'adapter')}"
        raise OptionRefused(what)
    return tuple(float(one) for one in listed)


class _Base:
    """The state dict that adapters are merged into: its tensors by their names without wrappers,
    what becomes of them, and what is to be said of it.
    """

    def __init__(self, checkpoint: Checkpoint, only: str | None) -> None:
        self._checkpoint = checkpoint
        found = checkpoint.state_dict(only)
        keys = map_keys(found.keys, STRIP, found.path, found.telling_keys, found.keys_beside)
        self._nodes: dict[str, Node] = {}
        self.tensors: dict[str, TensorRef] = {}
        for name, node in zip(keys.new, found.values, strict=True):
            if name is not None and (ref := tensor_of(node)) is not None:
                self._nodes[name], self.tensors[name] = node, ref
        self.codes = may_hold_codes(self.tensors.values())
        self.changes: dict[str, dict[int | None, list[WeightChange]]] = {}
        self.whole: dict[str, TensorRef] = {}
        self.untied: set[str] = set()
        self.notes: list[str] = []

    def weight(self, key: str, role_key: str, part: int | None = None) -> TensorRef:
        """A weight of the base that something is added to, or a part of its rows."""
        ref = self.whole.get(key, self.tensors[key])
        if ref.dtype.name not in MERGED_TYPES:
            what = f"goes to {printable(key)}, which is {ref.dtype.name}"
            hint = "add --dequantize" if ref.dtype.kind in ("int", "bits", "float") else None
            scaled = (each.codes for each in find_scaled(self.tensors))
            if ref.dtype in FLOAT8 and key not in scaled:
                hint = "its values were cast: convert the base with --dtype bf16 first"
            raise RefusedObject(what, where=role_key, hint=hint)
        if part is None:
            return ref
        start, count = rows_in(ref.shape, part, role_key)
        return rows(ref, start, count)

    def merged(self, adapters: Sequence[Checkpoint]) -> Checkpoint:
        """The checkpoint with all that was noted."""
        made = dict(self.whole)
        for key, by_part in self.changes.items():
            ref = self.whole.get(key, self.tensors[key])
            if None in by_part:
                ref = changed(ref, by_part[None], key)
            parts = {part: changes for part, changes in by_part.items() if part is not None}
            if parts:
                ref = with_changed_rows(ref, parts, key)
            made[key] = ref
        checkpoint = self._checkpoint
        root = substituted(checkpoint.root, self._stand_ins(made))
        gone = [self._nodes[key] for key in self.whole]
        whole = (checkpoint, *adapters)
        counted = all(one.container.names_storages for one in whole)
        return replace(
            checkpoint,
            root=root,
            container=replace(checkpoint.container, names_storages=counted),
            nbytes=sum(one.nbytes for one in whole),
            sources=tuple(source for one in whole for source in one.sources),
            notes=(*checkpoint.notes, *self.notes),
            dropped=(*checkpoint.dropped, *gone, *(one.root for one in adapters)),
            reread=None,  # that would be the base alone
        )

    def _view(self, key: str) -> object:
        view = view_identity(self.tensors[key])
        return (key, view) if key in self.untied else view

    def _stand_ins(self, made: Mapping[str, TensorRef]) -> dict[int, Node]:
        """What takes the places of nodes: tensors that have several names stay one, but for copies
        that the adapter has of one of them (`untied`).
        """
        by_view: dict[object, tuple[str, TensorRef]] = {}
        views = {key: self._view(key) for key in self._nodes}
        for key, ref in made.items():
            view = views[key]
            if view in by_view:
                what = f"is the same tensor as {by_view[view][0]}, and something is added to both"
                raise KeyConflict(what, where=key, hint="merge into a base without tied tensors")
            by_view[view] = key, ref
        stand_ins: dict[int, Node] = {}
        tied = []
        objects = Counter(map(id, self._nodes.values()))
        for key, node in self._nodes.items():
            if key in self.untied and objects[id(node)] > 1:
                what = "is one object with another tensor, and the adapter replaces it alone"
                raise KeyConflict(what, where=key, hint="merge into a base without tied tensors")
            found = by_view.get(views[key])
            if found is None:
                continue
            name, ref = found
            if name != key:
                tied.append(key)
            # a tensor of its own: --verify counts those that share a storage, too
            ref = ref._replace()
            stand_ins[id(node)] = ref
            if isinstance(node, TensorObject):
                stand_ins[id(node)] = replace(node, tensor=ref)
        if tied:
            listed = first_few(tied, 4)
            self.notes.append(f"tied to what is merged, and merged with it: {listed}")
        return stand_ins


class _Merging:
    """One adapter on its way into a base."""

    def __init__(self, base: _Base, adapter: Adapter, strength: float) -> None:
        self._base, self._adapter, self._strength = base, adapter, strength
        self._told: Counter[str] = Counter()
        self._owners: dict[str, str] = {}
        self._across: dict[str, str] = {}
        self._square: dict[str, AdapterTarget] = {}

    def run(self) -> None:
        """Note all changes of the base, or raise `CheckpointError`."""
        adapter = self._adapter
        self._refuse_attention()
        # peft wraps a module once for each of its parameters
        plain = {module: _LEVELS.sub("", module) for module in adapter.modules}
        first_keys: dict[str, str] = {}
        for module, name in plain.items():
            first_keys.setdefault(name, adapter.first_key(module))
        modules, notes = found_modules(first_keys, Names(self._base.tensors))
        self._replace_whole()
        experts: dict[str, list[str]] = {}
        for module, parts in adapter.modules.items():
            places = modules[plain[module]]
            if self._is_of_parameters(places[0].module, parts):
                experts.setdefault(places[0].module, []).append(module)
            else:
                self._merge_all(module, places, parts)
        for target, levels in experts.items():
            self._merge_parameters(target, levels)
        self._refuse_unclear()
        self._base.notes += [*self._notes(), *notes]

    def _refuse_attention(self) -> None:
        """Refuse what peft makes of `nn.MultiheadAttention`: up to 0.21 it adds the delta of
        `out_proj` twice, in training too (huggingface/peft#3774), and no file says whether it did.
        """
        for module in self._adapter.modules:
            if module.endswith(".base_layer.out_proj"):
                what = "is of nn.MultiheadAttention, to whose out_proj peft 0.21 adds it twice"
                hint = "merge it with the release of peft that trained it"
                raise RefusedObject(what, where=self._adapter.first_key(module), hint=hint)

    # ------------------------------------------------------------------ tensors as they are

    def _replace_whole(self) -> None:
        base, adapter = self._base, self._adapter
        listed = next((config.whole_modules for config in adapter.configs.values()), ())
        for name, ref in adapter.whole.items():
            key = PEFT_PREFIX + name
            is_copy = any(f"{one}." in name for one in listed)  # by its end, as peft compares
            if name not in base.tensors:
                what = f"takes the place of {printable(name)}, which the base does not have"
                hint = "the base needs it before: convert it with the model's own head"
                raise KeyMismatch(what, where=key, hint=hint if is_copy else None)
            if is_copy:  # a module that peft copies is not that of the other name any more
                base.untied.add(name)
            # something may be added to it: peft saves a head that it adapts too (`base_layer`)
            self._replace(name, ref, key)

    def _replace(self, name: str, ref: TensorRef, key: str, what: str = "replaced") -> None:
        """Put a tensor that the adapter holds as `key` in the place of one of the base."""
        base = self._base
        if name in base.changes or name in base.whole:
            problem = f"takes the place of {printable(name)}, which another adapter changes"
            raise KeyConflict(problem, where=key, hint=_IN_TWO_STEPS)
        before = base.tensors[name]
        if before.shape != ref.shape:
            problem = f"is {list(ref.shape)}, and {list(before.shape)} in the base"
            raise KeyMismatch(problem, where=key)
        if not (before.dtype.is_floating and ref.dtype.is_floating):
            problem = f"is {ref.dtype.name}, and {before.dtype.name} in the base"
            raise KeyMismatch(problem, where=key, hint="add --dequantize")
        base.whole[name] = kept_type(ref, before.dtype)
        self._told[f"{what}: {starred(name)}"] += 1

    def _refuse_twice(self, name: str, key: str) -> None:
        if name in self._owners:
            what = f"goes to {printable(name)}, and so does {printable(self._owners[name])}"
            hint = (
                "take the parts of one component first: "
                "ckptconv convert ADAPTER PART --include GLOB"
            )
            raise KeyConflict(what, where=key, hint=hint)
        self._owners[name] = key

    # ---------------------------------------------------------------------------- products

    def _is_of_parameters(self, target: str, parts: Parts) -> bool:
        """Whether the parts of a module are for parameters that have names of their own."""
        wanted = self._named_parameters()
        if set(parts) - {"up", "down"} or not wanted:
            return False
        weight = f"{target}.weight"
        if weight in self._base.tensors and not _is_named(weight, wanted):
            return False
        return bool(self._parameters(target))

    def _named_parameters(self) -> set[str]:
        return {name for one in self._adapter.configs.values() for name in one.parameters}

    def _parameters(self, target: str) -> dict[str, TensorRef]:
        """The parameters of a module that the config names."""
        wanted = self._named_parameters()
        found = {}
        for key in self._base.tensors:
            module, _, name = key.rpartition(".")
            if module == target and _is_named(key, wanted):
                found[name] = key
        return {name: self._base.weight(key, key) for name, key in found.items()}

    def _asked(self, module: str, weight: TensorRef, parts: Parts | None = None) -> AdapterTarget:
        adapter = self._adapter
        config, name = adapter.config_of(module)
        keys = adapter.keys[module]
        return AdapterTarget(
            parts or adapter.modules[module], weight, name, config, keys, self._strength
        )

    def _merge_parameters(self, target: str, modules: Sequence[str]) -> None:
        weights = self._parameters(target)
        asked = [
            replace(self._asked(module, next(iter(weights.values()))), name=target)
            for module in modules
        ]
        for name, change in expert_changes(asked, weights).items():
            key = f"{target}.{name}"
            self._refuse_twice(key, self._adapter.keys[modules[0]]["up"])
            self._note(key, change, f"rank {change.term.rank}")

    def _merge_all(self, module: str, places: Places, parts: Parts) -> None:
        """Merge a module of the adapter, whose rows may be those of several of the base."""
        first = self._adapter.first_key(module)
        if not parts.keys() - {"alpha", "magnitude", "magnitude_of_any", "mid"}:
            raise KeyMismatch("stands without the matrices that it belongs to", where=first)
        if len(places) == 1:
            self._merge(module, places[0], parts)
            return
        sizes = [sum(self._weight(place, first).shape[:1]) for place in places]  # 0 of a scalar
        parted = in_rows(parts, sizes, self._adapter.keys[module])
        for place, own in zip(places, parted, strict=True):
            self._merge(module, place, own)

    def _weight(self, place: Place, first: str) -> TensorRef:
        """What an adapter changes, for which its key `first` stands."""
        if place.key not in self._base.tensors:
            raise self._missing(place.key, place.module, first)
        return self._base.weight(place.key, first, place.part)

    def _merge(self, module: str, place: Place, parts: Parts) -> None:
        target, part, first = place.module, place.part, self._adapter.first_key(module)
        own = {role: parts[role] for role in parts if role not in ("bias", "bias_diff", "weight")}
        if "tokens" in parts:
            self._merge_rows(module, place, parts)
        elif "weight" in parts:
            self._merge_whole(module, place, own)
        elif own.keys() - {"alpha"}:
            weight = self._weight(place, first)
            named = place.key
            if part is not None:
                named = f"{named} (part {part + 1})"
            self._refuse_twice(named, first)
            asked = self._asked(module, weight, parts)
            change, what = self._change(asked)
            self._note(place.key, self._with_magnitude(asked, change), what, part)
        for role in ("bias", "bias_diff"):
            if role in parts and part is not None:
                what = f"goes to a part of {printable(target)}, whose bias is not merged here"
                raise RefusedObject(what, where=self._adapter.keys[module][role])
            if role in parts:
                self._merge_bias(module, target, role, parts)

    def _merge_whole(self, module: str, place: Place, own: Parts) -> None:
        """A weight that replaces that of the base (set_weight); ComfyUI does so at any strength."""
        key = self._adapter.keys[module]["weight"]
        if own.keys() - {"alpha"} or place.part is not None:
            what = "replaces a weight, of which other parts of the adapter change something"
            raise RefusedObject(what, where=key)
        if self._strength != 1:
            what = "replaces a weight (set_weight), of which --scale cannot take a part"
            raise RefusedObject(what, where=key, hint="leave --scale out")
        self._weight(place, key)
        self._refuse_twice(place.key, key)
        self._replace(place.key, self._adapter.modules[module]["weight"], key)

    def _merge_rows(self, module: str, place: Place, parts: Parts) -> None:
        """Rows of an embedding that the adapter has trained, in the places of those of the base."""
        ref, key = parts["tokens"], self._adapter.keys[module]["tokens"]
        config, name = self._adapter.config_of(module)
        numbers = config.rows_of(name)
        if numbers is None or len(set(numbers)) < len(numbers):
            what = "is for rows that trainable_token_indices of the config does not tell"
            raise RefusedObject(what, where=key, hint="merge it with peft")
        weight = self._weight(place, key)
        count, *columns = weight.shape or (0,)
        if len(parts) > 1 or place.part is not None:
            what = "replaces rows of a weight, of which other parts change something"
            raise RefusedObject(what, where=key, hint="merge it with peft")
        if ref.shape != (len(numbers), *columns) or max(numbers, default=0) >= count:
            what = f"is {list(ref.shape)}, which does not fit {len(numbers)} rows of "
            raise KeyMismatch(f"{what}{list(weight.shape)} in the base", where=key)
        self._refuse_twice(place.key, key)
        made = with_replaced_rows(weight, kept_type(ref, weight.dtype), numbers)
        self._replace(place.key, made, key, f"{count_text(len(numbers), 'row')} replaced")

    def _missing(self, key: str, target: str, first: str) -> CheckpointError:
        """Why a module of the base has no weight that something could be added to."""
        beside = [name for name in self._base.tensors if name.startswith(f"{target}.")]
        if self._base.codes or any(name.endswith(_OF_CODES) for name in beside):
            what = f"goes to {printable(target)}, whose weight is quantised in the base"
            return RefusedObject(what, where=first, hint="add --dequantize")
        what = f"goes to {printable(key)}, which the base does not have; it has "
        return KeyMismatch(what + first_few(beside, 4), where=first)

    def _change(self, asked: AdapterTarget) -> tuple[WeightChange, str]:
        parts = asked.parts
        if "hada_w1_a" in parts:
            return hadamard_change(asked), "LoHa"
        if any(role.startswith("lokr_") for role in parts):
            return kronecker_change(asked), "LoKr"
        if "diff" in parts:
            return whole_change(asked, parts["diff"], None, "diff"), "whole deltas"
        if "embedding_down" in parts or "embedding_up" in parts:
            return self._embedding(asked)
        if not {"up", "down"} & parts.keys():
            raise asked.refuse("stands without the matrices that it belongs to")
        ways = orientations(asked)
        if not ways:
            raise misfit(asked)
        is_across = ways[0]
        key = next(iter(asked.keys.values()))
        if len(ways) == 2:
            is_across = asked.config.is_transposed
            self._square[key] = asked
        elif is_across and not self._adapter.configs:
            raise misfit(asked)
        elif is_across != asked.config.is_transposed and len(asked.weight.shape) == 2:
            self._across[key] = asked.name
        change = linear_change(asked, across=is_across)
        change = replace(change, is_rounded=asked.config.is_rounded)
        return change, f"rank {parts['down'].shape[0]}"

    def _embedding(self, asked: AdapterTarget) -> tuple[WeightChange, str]:
        """The change of an embedding, whose matrices are those of the transposed weight."""
        turned = as_linear(asked)
        if True not in orientations(turned):
            raise misfit(asked)
        change = linear_change(turned, across=True)
        is_rounded = "magnitude" not in asked.parts
        return replace(change, is_rounded=is_rounded), f"rank {change.term.rank}"

    def _with_magnitude(self, asked: AdapterTarget, change: WeightChange) -> WeightChange:
        """The change of a weight whose rows have a length of their own (DoRA)."""
        role = next((name for name in ("magnitude", "magnitude_of_any") if name in asked.parts), "")
        if not role:
            return change
        ref, shape = asked.parts[role], asked.weight.shape
        if sum(size != 1 for size in ref.shape) > 1 or not ref.dtype.is_floating:
            raise misfit(asked)
        along, epsilon = change.along, 0.0
        if role == "magnitude_of_any":  # of LyCORIS: the place of its one long dimension says it
            along = next((at for at, each in enumerate(ref.shape) if each != 1), 0)
            epsilon = _EPSILON[asked.weight.dtype.name]
            if self._strength != 1:
                what = "has a dora_scale, of which programs take a part in different ways"
                raise RefusedObject(what, where=asked.keys[role], hint="leave --scale out")
        if along >= len(shape) or ref.numel != shape[along]:
            raise misfit(asked)
        flat = reshaped(in_order(ref), (ref.numel,), asked.keys[role])
        return replace(change, magnitude=flat, along=along, epsilon=epsilon, is_rounded=False)

    def _merge_bias(self, module: str, target: str, role: str, parts: Parts) -> None:
        adapter, base = self._adapter, self._base
        first, key = adapter.keys[module][role], f"{target}.bias"
        if key not in base.tensors:
            what = f"goes to {printable(key)}, which the base does not have"
            raise KeyMismatch(what, where=first)
        self._refuse_twice(key, first)
        asked = self._asked(module, base.weight(key, first), parts)
        delta = asked.parts[role]
        if role == "bias" and "down" in asked.parts:
            strength = asked.scale(asked.parts["down"].shape[0])
            asked = replace(asked, strength=strength)
        asked = replace(asked, parts={"diff": delta}, keys={"diff": first})
        self._note(key, whole_change(asked, delta, None, "diff"), "bias")

    def _note(self, key: str, change: WeightChange, what: str, part: int | None = None) -> None:
        self._base.changes.setdefault(key, {}).setdefault(part, []).append(change)
        dora = ", DoRA" if change.magnitude is not None else ""
        self._told[f"{what}{dora}, scale {change.term.scale:.6g}: {starred(key)}"] += 1

    def _refuse_unclear(self) -> None:
        """Refuse square weights that the config says are one way round where others, that are not
        square, are the other way.
        """
        if self._square and self._across:
            name = next(iter(self._across.values()))
            config = next(iter(self._adapter.configs.values()), Config())
            said = str(config.is_transposed).lower()
            what = f"is square, and fan_in_fan_out {said} is not so of {printable(name)}"
            raise KeyMismatch(
                what, where=next(iter(self._square)), hint="correct adapter_config.json"
            )
        # where layers are of both kinds (GPT-2 below a ViT), peft writes what the last one is
        ways = self._ways_of_biases() if self._square else {}
        for key, asked in self._square.items():
            module = asked.name
            while module and module not in ways:
                module = module.rpartition(".")[0]
            if ways.get(module) == {not asked.config.is_transposed}:
                said = str(asked.config.is_transposed).lower()
                what = f"is square, and fan_in_fan_out {said} is not so of layers beside it"
                raise KeyMismatch(what, where=key, hint="merge it with peft")

    def _ways_of_biases(self) -> dict[str, set[bool]]:
        """Whether layers of the base are (in, out), by the sizes of their biases: of those within
        each module, and under "" of all.
        """
        ways: dict[str, set[bool]] = {}
        for key, ref in self._base.tensors.items():
            module = key.removesuffix(".weight")
            bias = self._base.tensors.get(f"{module}.bias")
            if bias is None or len(ref.shape) != 2 or ref.shape[0] == ref.shape[1]:
                continue
            if bias.shape in (ref.shape[:1], ref.shape[1:]):
                for name in ("", *with_those_around([module])):
                    ways.setdefault(name, set()).add(bias.shape == ref.shape[1:])
        return ways

    def _notes(self) -> Iterator[str]:
        name = self._adapter.checkpoint.path.name
        for told, count in self._told.items():
            yield f"{name}: {count_text(count, 'tensor')} merged, {told}"
        unscaled = sum(map(self._is_unscaled, self._adapter.modules))
        if unscaled:
            modules = count_text(unscaled, "module")
            yield f"{name}: says no scale for {modules} (no alpha, no config); 1 is taken"

    def _is_unscaled(self, module: str) -> bool:
        parts = self._adapter.modules[module]
        config, name = self._adapter.config_of(module)
        is_told = "alpha" in parts or config.alpha_of(name) is not None
        return bool(_INNER & parts.keys()) and not is_told


def _is_named(key: str, names: Iterable[str]) -> bool:
    """Whether the end of a key is among these names, as peft compares."""
    return any(f".{key}".endswith(f".{name}") for name in names)


# What LyCORIS adds to norms: the machine epsilon of the type of the weight
_EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}

# The factors of products, which have a rank, so that an alpha scales them
_INNER = frozenset(("down", "hada_w1_b", "lokr_w1_b", "lokr_w2_b"))

_OF_CODES = (".qweight", ".weight_packed", ".qdata", ".quant_state", ".weight_scale", ".SCB")

_IN_TWO_STEPS = "merge the first one alone, and this one into what that gives"

_LEVELS = re.compile(r"(?:\.base_layer)+$")
