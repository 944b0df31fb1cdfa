"""LoRA adapters in the names of another convention: an edit.

What a part of an adapter is for is found in its base, and named from there. A convention that has a
weight in parts, or parts as one weight, gets the matrices so; how much a product is scaled goes
along as a number: an ``alpha`` tensor, or an entry of the config.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace

from ckptconv.keys.key_map import STRIP, map_keys
from ckptconv.pickles.nodes import Dict, substituted
from ckptconv.support.errors import (
    CheckpointError,
    KeyConflict,
    KeyMismatch,
    OptionRefused,
    RefusedObject,
    printable,
)
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text, some_text
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.lora_adapters import (
    CONFIG,
    LEAVE_OUT_FIRST,
    OF_DIFFUSERS,
    PEFT_PREFIX,
    Adapter,
    Config,
    Parts,
    config_of_peft,
    number_in,
    read_adapter,
)
from ckptconv.tree.lora_configs import (
    Factors,
    Scaled,
    alpha_for,
    alpha_tensor,
    of_diffusers,
    of_peft,
    put_together,
    taken_apart,
    with_those_around,
)
from ckptconv.tree.lora_deltas import AdapterTarget as AskedScale
from ckptconv.tree.lora_deltas import as_linear, in_rows, matrices, rows_in
from ckptconv.tree.lora_names import (
    ENDS,
    Convention,
    Names,
    NamingContext,
    Place,
    Places,
    Spelling,
    found_modules,
    model_of,
    named_in,
    spelled_in,
    start_of,
)


@dataclass(frozen=True, slots=True)
class RenameLora:
    """An edit: gives the parts of a LoRA adapter the names of `convention`: ``lora-peft``,
    ``lora-kohya``, ``lora-diffusers`` or ``lora-comfyui``.

    `base` has the keys and shapes of the model that the adapter is for; a shape is None where it is
    not known. For peft, the ``adapter_config.json`` is in `Checkpoint.made_beside` of the result;
    for diffusers, its fields are in the metadata. Merged into the base, the result gives the values
    that the adapter gives, bit for bit.

    Raises `KeyMismatch` where a part finds no module in the base, or no name in the convention;
    `RefusedObject` for what the convention has no place for.
    """

    convention: Convention
    base: Mapping[str, Shape | None] | None = None

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        if self.base is None:
            what = f"--preset {self.convention} makes names of those of the base of the adapter"
            raise OptionRefused(what, hint="name it: --like BASE")
        try:
            adapter = read_adapter(checkpoint)
            return _Renaming(self.convention, self.base, adapter).renamed()
        except CheckpointError as error:
            raise error.at(path=checkpoint.path) from None


@dataclass(frozen=True, slots=True)
class _AdapterPart:
    """What an adapter says of some places: tensors and their keys by what they are. Of a product,
    by how much it is scaled, and the alpha that says so, where its rank stays.
    """

    places: Places
    parts: Parts
    keys: Mapping[str, str]
    scale: float | None
    alpha: float | None

    @property
    def key(self) -> str:
        """One of its keys, for messages."""
        # the alpha last: a matrix says better which part is meant
        return next(self.keys[role] for role in sorted(self.keys, key="alpha".__eq__))


@dataclass(slots=True)
class _Target:
    """A module in the new convention: what stands before its name, and what is said of it."""

    start: str
    name: str
    places: Places
    parts: list[_AdapterPart] = field(default_factory=list)


class _Renaming:
    """One adapter on its way to other names."""

    def __init__(
        self, convention: Convention, base: Mapping[str, Shape | None], adapter: Adapter
    ) -> None:
        self._convention, self._adapter = convention, adapter
        # an adapter of a wrapped model is named without the wrapper
        keys = map_keys([*base], STRIP, "", [*base], ())
        pairs = zip(keys.new, base.values(), strict=True)
        self._shapes = {key: shape for key, shape in pairs if key is not None}
        self._names = Names(self._shapes)
        plain = (module.removeprefix(PEFT_PREFIX) for module in adapter.modules)
        self._starts = frozenset(start_of(module)[0] for module in plain)
        self._told: Counter[str] = Counter()

    def renamed(self) -> Checkpoint:
        """The checkpoint with all names."""
        self._refuse_unfit()
        parts, notes = self._parts()
        targets = self._targets(parts)
        pairs: list[tuple[str, TensorRef]] = []
        scaled: list[Scaled] = []
        for target in targets:
            part = self._whole(target)
            told = self._scaled(target, part)
            pairs += self._tensors(target, part, told)
            if told is not None:
                scaled.append(told)
        pairs += self._as_they_are()
        return self._checkpoint(pairs, scaled, [*self._notes(len(targets), scaled), *notes])

    def _refuse_unfit(self) -> None:
        """Refuse what a config says that no other convention has a place for."""
        adapter, convention = self._adapter, self._convention
        for module in adapter.modules:
            if module.endswith(".base_layer"):
                what = "is of the weights of all experts (target_parameters), which peft alone has"
                raise RefusedObject(what, where=adapter.first_key(module))
        if convention == "lora-peft":
            return
        if any(config.is_transposed for config in adapter.configs.values()):
            what = f"its config says fan_in_fan_out, for which {convention} has no place"
            raise RefusedObject(what)
        for name in adapter.whole:
            what = f"is a tensor of the model itself, for which {convention} has no place"
            raise RefusedObject(what, where=name, hint=LEAVE_OUT_FIRST)

    # ------------------------------------------------------------------------ what is there

    def _parts(self) -> tuple[list[_AdapterPart], list[str]]:
        """The modules of the adapter, with the places in the base that they mean."""
        adapter = self._adapter
        keys = {module: adapter.first_key(module) for module in adapter.modules}
        found, notes = found_modules(keys, self._names)
        return [self._part(module, self._names.atoms(found[module])) for module in keys], notes

    def _part(self, module: str, places: Places) -> _AdapterPart:
        adapter = self._adapter
        parts, keys = adapter.modules[module], adapter.keys[module]
        for role in parts:
            if role not in (*ENDS[self._convention], "alpha"):
                what = f"has no name in {self._convention}"
                raise RefusedObject(what, where=keys[role], hint=LEAVE_OUT_FIRST)
        config, name = adapter.config_of(module)
        if not parts.keys() & _OF_PRODUCTS:
            self._refuse_unscaled(config, parts, adapter.first_key(module))
            return _AdapterPart(places, parts, keys, None, None)
        ref = next(iter(parts.values()))
        asked = as_linear(AskedScale(parts, ref, name, config, keys, 1.0))
        _, down = matrices(asked)
        alpha = None
        if "alpha" in parts:
            alpha = number_in(parts["alpha"], keys["alpha"])
        elif not config.is_rank_stabilized:  # else alpha is divided by the root of the rank
            alpha = config.alpha_of(name)
        if "down" in parts and not config.is_transposed:
            self._refuse_misfit(places, parts, keys)
        return _AdapterPart(places, parts, keys, asked.scale(down.shape[0]), alpha)

    def _refuse_unscaled(self, config: Config, parts: Parts, key: str) -> None:
        """Refuse parts without the matrices of LoRA (LoHa, LoKr, deltas that are whole) of which
        nothing would say any more by how much they are scaled.
        """
        if not parts.keys() - _BESIDE:
            raise KeyMismatch("stands without the matrices that it belongs to", where=key)
        if parts.keys() - _WITHOUT_ALPHA and "alpha" not in parts and config.rank:
            what = f"is scaled by a config, for which {self._convention} has no place"
            raise RefusedObject(what, where=key)

    def _refuse_misfit(self, places: Places, parts: Parts, keys: Mapping[str, str]) -> None:
        """Refuse matrices that do not go to the weight of the base, where its shape is known."""
        shapes = [self._shapes.get(place.key) for place in places]
        if any(shape is None for shape in shapes):
            return
        rows = sum(self._rows(place, keys["up"]) for place in places)
        columns = math.prod((shapes[0] or ())[1:])
        up, down = parts["up"], parts["down"]
        fits = math.prod(down.shape[1:]) == columns or "mid" in parts
        if len(up.shape) < 2 or up.shape[0] != rows or not fits:
            what = f"{list(up.shape)} and {list(down.shape)} do not fit {rows} × {columns} values"
            raise KeyMismatch(f"{what} of the base", where=keys["up"])

    def _rows(self, place: Place, key: str) -> int:
        """How many rows of the base a place has."""
        shape = self._shapes.get(place.key)
        if not shape:
            what = f"is for parts of a weight, and the shape of {place.key} is not known"
            raise KeyMismatch(what, where=key, hint="--like names a checkpoint that has it")
        return shape[0] if place.part is None else rows_in(shape, place.part, key)[1]

    # ----------------------------------------------------------------------- what it becomes

    def _targets(self, parts: Sequence[_AdapterPart]) -> list[_Target]:
        """The modules of the new convention, each with what is said of it."""
        model = model_of(self._names)
        spelled = spelled_in(self._convention, self._names, model)
        lost = [part for part in parts if not spelled.keys() >= set(part.places)]
        if lost:
            named = some_text([part.key for part in lost])
            what = f"the base has no name in {self._convention} for {named}"
            hint = "leave them out first: ckptconv convert ADAPTER PART --exclude GLOB"
            if len(lost) == len(parts) and not model.family:
                what = f"{self._convention} has no names for the modules of such a base"
            if not model.family:  # these two may have all names that there are
                others = {"lora-peft", "lora-kohya"} - {self._convention}
                hint = " or ".join(f"--preset {name}" for name in sorted(others, reverse=True))
                hint = f"name them for another program: {hint}"
            raise KeyMismatch(what, hint=hint)
        asked = NamingContext(self._convention, model.family, self._starts, self._shapes)
        components = self._components(parts)
        made: dict[tuple[str, str], _Target] = {}
        for part in parts:
            spellings = [*dict.fromkeys(spelled[place] for place in part.places)]
            for spelling, own in self._apart(part, spellings):
                component = spelling.component or components[part.key]
                try:
                    start, name = named_in(asked, spelling, component)
                except KeyMismatch as error:
                    raise error.at(where=part.key) from None
                self._refuse_unclear(start + name, own)
                target = _Target(start, name, spelling.places)
                made.setdefault((start, name), target).parts.append(own)
        return [*made.values()]

    def _refuse_unclear(self, name: str, part: _AdapterPart) -> None:
        """Refuse a name that several modules of the base have, written with underscores."""
        if self._convention == "lora-kohya" and len(found := self._names.of(name)) > 1:
            listed = some_text([" and ".join(map(str, places)) for places in found])
            what = f"would be {printable(name)}, which may mean {listed}"
            raise KeyConflict(what, where=part.key, hint="lora-peft has dotted names")

    def _components(self, parts: Sequence[_AdapterPart]) -> dict[str, str]:
        """The components that the names of the adapter say, by the key of each part."""
        modules = (module.removeprefix(PEFT_PREFIX) for module in self._adapter.modules)
        named = zip(parts, modules, strict=True)
        return {part.key: start_of(module)[1] for part, module in named}

    def _apart(
        self, part: _AdapterPart, spellings: Sequence[Spelling]
    ) -> Iterator[tuple[Spelling, _AdapterPart]]:
        """What is said of each of several modules; nothing is of one whose block is empty."""
        if len(spellings) == 1:
            yield spellings[0], part
            return
        places = [
            tuple(place for place in part.places if place in spelling.places)
            for spelling in spellings
        ]
        sizes = [sum(self._rows(place, part.key) for place in each) for each in places]
        rows = in_rows(part.parts, sizes, part.keys)
        factors: Sequence[Factors | None] = [None] * len(rows)
        if part.scale is not None:
            whole = Factors(part.parts["up"], part.parts["down"])
            factors = taken_apart(whole, sizes)
            self._told["taken apart"] += 1
        for spelling, own_places, own, both in zip(spellings, places, rows, factors, strict=True):
            if part.scale is None:
                yield spelling, replace(part, places=own_places, parts=own)
            elif both is not None:
                yield spelling, _with_factors(replace(part, places=own_places, parts=own), both)

    def _whole(self, target: _Target) -> _AdapterPart:
        """All that is said of a module, in one."""
        first, *others = target.parts
        if not others and first.places == target.places:
            return first
        by_place: dict[Places, _AdapterPart] = {}
        for part in target.parts:
            self._refuse_not_put_together(part, first)
            for places, other in by_place.items():
                if not {*places}.isdisjoint(part.places):
                    what = f"is for the same module as {other.key}, or a part of it"
                    raise KeyConflict(what, where=part.key)
            by_place[part.places] = part
        done = {place: places for places in by_place for place in places}
        order = dict.fromkeys(done.get(place, (place,)) for place in target.places)
        sizes = [sum(self._rows(place, first.key) for place in places) for places in order]
        given = {
            places: Factors(part.parts["up"], part.parts["down"])
            for places, part in by_place.items()
        }
        factors = [given.get(places) for places in order]
        self._told["put together"] += 1
        return _with_factors(first, put_together(factors, sizes, first.key))

    def _refuse_not_put_together(self, part: _AdapterPart, first: _AdapterPart) -> None:
        for role in part.parts:
            if role not in ("up", "down", "alpha"):
                what = f"is for a part of a weight of {self._convention}, which has no place for it"
                raise RefusedObject(what, where=part.keys[role])
        if part.scale != first.scale:
            what = f"is scaled by {part.scale:.6g}, and {first.key} by {first.scale:.6g}"
            what = f"{what}: in {self._convention} they are one module"
            raise RefusedObject(what, where=part.key)

    def _scaled(self, target: _Target, part: _AdapterPart) -> Scaled | None:
        if part.scale is None:
            return None
        down = part.parts.get("down", part.parts.get("embedding_down"))
        assert down is not None
        rank, alpha = down.shape[0], part.alpha
        if alpha is None:
            alpha = alpha_for(part.scale, rank, part.key)
        has_magnitude, has_bias = "magnitude" in part.parts, "bias" in part.parts
        return Scaled(target.start, target.name, rank, alpha, has_magnitude, has_bias, part.key)

    def _tensors(
        self, target: _Target, part: _AdapterPart, scaled: Scaled | None
    ) -> Iterator[tuple[str, TensorRef]]:
        """The keys and tensors of one module."""
        ends = ENDS[self._convention]
        stem = target.start + target.name
        for role, ref in part.parts.items():
            if role == "alpha":
                continue
            end = ends[role]
            if role in ("diff", "bias_diff"):  # LyCORIS has other words for those of norms
                end = f".{part.keys[role].rpartition('.')[2]}"
            yield stem + end, ref
        if "alpha" not in ends:
            return
        if "alpha" in part.parts:
            yield stem + ends["alpha"], part.parts["alpha"]
        elif scaled and (self._convention == "lora-kohya" or scaled.alpha != scaled.rank):
            yield stem + ends["alpha"], alpha_tensor(scaled.alpha, part.parts["down"])

    def _as_they_are(self) -> Iterator[tuple[str, TensorRef]]:
        """Tensors of the model itself, which only peft has in an adapter."""
        known = {key for keys in self._adapter.keys.values() for key in keys.values()}
        for key, ref in self._adapter.checkpoint.state_dict().tensors():
            if key not in known:
                yield key, ref

    # ---------------------------------------------------------------------------- the result

    def _checkpoint(
        self, pairs: Sequence[tuple[str, TensorRef]], scaled: Sequence[Scaled], notes: list[str]
    ) -> Checkpoint:
        checkpoint = self._adapter.checkpoint
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise KeyConflict("would be made of two parts of the adapter", where=twice[0])
        node = checkpoint.state_dict().node
        metadata = {
            name: text for name, text in checkpoint.metadata.items() if name != OF_DIFFUSERS
        }
        beside: dict[str, bytes] = {}
        if self._convention == "lora-diffusers" and scaled:
            metadata[OF_DIFFUSERS] = of_diffusers(scaled)
        if self._convention == "lora-peft":
            named = {each.name for each in scaled}
            others = with_those_around(self._names.modules) - named
            beside[CONFIG] = of_peft(config_of_peft(checkpoint), scaled, others)
        return replace(
            checkpoint,
            root=substituted(checkpoint.root, {id(node): Dict([*pairs])}),
            metadata=metadata,
            notes=(*checkpoint.notes, *notes),
            dropped=(*checkpoint.dropped, node),
            made_beside=beside,
            reread=None,  # that would be the adapter under its old names
        )

    def _notes(self, count: int, scaled: Sequence[Scaled]) -> Iterator[str]:
        ranks = dict.fromkeys((each.rank, each.alpha / each.rank) for each in scaled)
        told = [f"rank {rank} (scale {scale:.6g})" for rank, scale in ranks]
        shown = f": {some_text(told)}" if told else ""
        yield f"{count_text(count, 'module')} named for {self._convention}{shown}"
        for what, number in self._told.items():
            yield f"{count_text(number, 'weight')} {what}"


_OF_PRODUCTS = {"up", "down", "mid", "bias", "embedding_up", "embedding_down"}
_BESIDE = {"alpha", "magnitude", "magnitude_of_any"}
_WITHOUT_ALPHA = {"diff", "bias_diff", "weight"}


def _with_factors(part: _AdapterPart, factors: Factors) -> _AdapterPart:
    """The same with other matrices; of another rank, no alpha says any more how it is scaled."""
    parts = {**part.parts, "up": factors.up, "down": factors.down}
    if factors.down.shape[0] == part.parts["down"].shape[0]:
        return replace(part, parts=parts)
    parts.pop("alpha", None)
    return replace(part, parts=parts, alpha=None)
