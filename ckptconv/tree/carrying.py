"""Scales that go along with their codes, where tensor rules lay these out otherwise.

A rule names the codes alone (``experts.{e}.w1.weight``). What they are read with (their
``weight_scale_inv``) is laid out as they are (`tensors.scaled_layouts`), and is named by what the
codes become. At the end all of it has to be what the scheme of the weights reads in the same way:
so the values of the output are those that the rules would make of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TypeAlias

from ckptconv.support.errors import CheckpointError, RefusedObject
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.computed import computed_value
from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.layouts import Move
from ckptconv.tensors.refs import Shape, TensorRef, contiguous_stride
from ckptconv.tensors.scaled_layouts import Beside, are_for_the_same, beside, moved
from ckptconv.tensors.scaled_weights import (
    Naming,
    ScaledWeight,
    find_scaled,
    key_of_values,
    named_beside,
    naming,
)
from ckptconv.tensors.schemes.base import CodeGroup, Facts
from ckptconv.tensors.schemes.scaled import given_block
from ckptconv.tensors.schemes.table import group_of, names_activations, scheme_of
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.model_config import facts_beside
from ckptconv.tree.state_dicts import StateDict

Origin: TypeAlias = "str | int"

# The schemes whose codes stand in the order of the weight, each beside its own scales
_LAID_OUT = frozenset(
    ("fp8", "int8", "mxfp4", "modelopt-nvfp4", "modelopt-experts", "float-pack-quantized")
)

_FIRST = "--dequantize makes values first"
_NO_CONFIG = "a config.json beside it says the sizes of blocks"


class CarriedPart(NamedTuple):
    """What codes are read with: its origin, how its name comes of theirs, how it is laid out."""

    origin: Origin
    naming: Naming
    beside: Beside


class Codes(NamedTuple):
    """How codes are read: the word of their scheme, the `Decoding` but for its block, with what."""

    scheme: str
    form: Decoding
    parts: tuple[CarriedPart, ...]


class Went(NamedTuple):
    """What went along with codes: its origins before, the first tensor of these; after, and all.
    `comes_back`: where the codes are laid out as before again, it has the shapes that it had.
    """

    sources: tuple[Origin, ...]
    first: TensorRef
    numbers: tuple[int, ...]
    made: tuple[TensorRef, ...]
    comes_back: bool


class Scales:
    """The quantised weights of a state dict, with what they are read with, while rules lay them
    out: by the origins of the codes.
    """

    def __init__(
        self, item: StateDict, found: Sequence[ScaledWeight], checkpoint: Checkpoint
    ) -> None:
        self._tensors = dict(item.tensors())
        self._found = {weight.codes: weight for weight in found}
        self._beside = {key: weight.codes for weight in found for key in weight.needed}
        self._checkpoint = checkpoint
        self._known: dict[Origin, Codes] = {}
        self._made: set[int] = set()

    @cached_property
    def _facts(self) -> Facts:
        return facts_beside(self._checkpoint)

    def is_codes(self, origin: Origin) -> bool:
        """Whether a tensor is codes of a quantised weight."""
        return origin in self._known or origin in self._found

    @cached_property
    def packed(self) -> frozenset[str]:
        """The codes that do not have the name of their values."""
        return frozenset(key for key in self._found if key_of_values(key) != key)

    def is_part(self, origin: Origin) -> bool:
        """Whether a tensor is codes, or what they are read with."""
        return origin in self._beside or self.is_codes(origin)

    def is_beside(self, origin: Origin) -> bool:
        """Whether codes are read with a tensor, which goes where they go."""
        return origin in self._beside and not self.is_codes(origin)

    def names(self, origin: Origin, named: Mapping[Origin, str]) -> Iterator[str]:
        """The names of now of what codes are read with, which they have by `named`."""
        if origin in named and self.is_codes(origin):
            for part in self._of(origin).parts:
                if part.origin not in named:
                    what = "was left out by a rule before, and its codes are laid out otherwise"
                    raise RefusedObject(what, where=str(part.origin), hint=_FIRST)
                yield named[part.origin]

    def _of(self, origin: Origin) -> Codes:
        if origin not in self._known:
            assert isinstance(origin, str)
            self._known[origin] = self._read(self._found[origin], self._tensors)
        return self._known[origin]

    def _read(self, item: ScaledWeight, tensors: Mapping[str, TensorRef]) -> Codes:
        """How a weight is read; `RefusedObject` where it is in an order that rules do not know."""
        group = group_of(item, {key: _in_order(tensors[key]) for key in (item.codes, *item.needed)})
        scheme = scheme_of(group, self._facts)
        if scheme.name not in _LAID_OUT:
            group.refuse(f"is {scheme.name} codes, which are not laid out otherwise", _FIRST)
        try:
            value = computed_value(scheme.decode(group, self._facts).values)
        except CheckpointError as error:
            raise error.at(where=item.codes) from None
        assert value is not None and isinstance(value.parameters, Decoding)
        how = value.parameters
        blocks = _blocks(group, self._facts, how, scheme.name, value.shape)
        parts = []
        for key in item.needed:
            named, found = naming(item.codes, key), beside(tensors[key], group.codes.shape, blocks)
            if named is None or found is None:
                what = f"is codes whose {key.removeprefix(group.prefix)} is not laid out otherwise"
                group.refuse(what, _FIRST)
            parts.append(CarriedPart(key, named, found))
        parts.sort(key=attrgetter("naming"))  # files have them in any order
        # but for the blocks, which moves change: `Beside` has them
        return Codes(scheme.name, how._replace(roles=(), block=(1, 1)), tuple(parts))

    def follow(
        self,
        taken: Sequence[Origin],
        moves: Sequence[Move],
        made: Sequence[int],
        number: Callable[[], int],
    ) -> Iterator[Went]:
        """What goes along with the codes `taken`, of which `moves` make those `made`; `number`
        gives the next origin. Nothing where none of them is codes.

        Raises `RefusedObject` where no scale would be right.
        """
        if not any(map(self.is_codes, taken)):
            return
        if not all(map(self.is_codes, taken)):
            raise RefusedObject("some of them are quantised, and others are not", hint=_FIRST)
        codes = [self._of(origin) for origin in taken]
        ways = {(each.scheme, each.form, *(part.naming for part in each.parts)) for each in codes}
        if len(ways) > 1:
            raise RefusedObject("they are quantised in different ways", hint=_FIRST)
        parts: list[list[CarriedPart]] = [[] for _ in made]
        for kind in zip(*(each.parts for each in codes), strict=True):
            before = [part.beside for part in kind]
            items = self._moved(before, moves)
            numbers = [number() for _ in made]
            for of_one, at, item in zip(parts, numbers, items, strict=True):
                of_one.append(CarriedPart(at, kind[0].naming, item))
            origins = tuple(part.origin for part in kind)
            stored = tuple(item.stored for item in items)
            comes_back = _comes_back(before, items, moves)
            yield Went(origins, before[0].stored, tuple(numbers), stored, comes_back)
        for origin, of_one in zip(made, parts, strict=True):
            self._known[origin] = codes[0]._replace(parts=tuple(of_one))
            self._made.add(origin)

    def _moved(self, items: list[Beside], moves: Sequence[Move]) -> list[Beside]:
        try:
            for move in moves:
                items = moved(move, items)
        except RefusedObject as error:
            error.hint = _FIRST if self._facts.config else f"{_NO_CONFIG}; or {_FIRST}"
            raise
        return items

    def named(self, origin: Origin, name: str) -> Iterator[tuple[Origin, str, TensorRef]]:
        """What codes of this name are read with: origins, names, tensors."""
        if origin in self._made:
            for part in self._known[origin].parts:
                yield part.origin, self._name(name, part), part.beside.stored

    def _name(self, codes: str, part: CarriedPart) -> str:
        found = named_beside(codes, part.naming)
        if found is None:
            what = f"would be codes under a name beside which '{part.naming.name}' has none"
            raise RefusedObject(what, where=codes, hint=_FIRST)
        return found

    def check(self, names: Mapping[Origin, str], tensors: Mapping[str, TensorRef]) -> None:
        """Raise `RefusedObject` unless the codes that were made, under the `names` of all, are read
        in the way in which those were that they are made of; `tensors` are all that there are.
        """
        made = [origin for origin in self._made if origin in names]
        if not made:
            return
        found = {weight.codes: weight for weight in find_scaled(tensors)}
        for origin in made:
            self._check(names[origin], self._known[origin], names, tensors, found)
        self._refuse_left_behind(found, names)

    def _check(
        self,
        name: str,
        codes: Codes,
        names: Mapping[Origin, str],
        tensors: Mapping[str, TensorRef],
        found: Mapping[str, ScaledWeight],
    ) -> None:
        beside_it = {names.get(part.origin) for part in codes.parts}
        if name not in found or {*found[name].needed} != beside_it:
            what = "is codes, and under the new names nobody finds what they are read with"
            raise RefusedObject(what, where=name, hint=_FIRST)
        try:
            now = self._read(found[name], tensors)  # as whoever opens the output will
        except CheckpointError as error:
            what = f"could not be read as it would be laid out: {error.what}"
            raise RefusedObject(what, where=name, hint=_FIRST) from error
        by_name = {str(part.origin): part.beside for part in now.parts}
        if (now.scheme, now.form) != (codes.scheme, codes.form) or not all(
            are_for_the_same(part.beside, by_name[names[part.origin]]) for part in codes.parts
        ):
            what = "would be read with its scales in another way than before"
            raise RefusedObject(what, where=name, hint=_FIRST)

    def _refuse_left_behind(
        self, found: Mapping[str, ScaledWeight], names: Mapping[Origin, str]
    ) -> None:
        """Refuse scales of activations in a module whose codes are elsewhere now."""
        before, after = ({key.rpartition(".")[0] for key in each} for each in (self._found, found))
        for key in filter(names_activations, self._tensors):
            module = key.rpartition(".")[0]
            if module in before and names.get(key, "").rpartition(".")[0] not in after | {""}:
                what = "is a scale of what goes through a layer whose weight is laid out otherwise"
                raise RefusedObject(what, where=key, hint=f"leave it out (--exclude), or {_FIRST}")


def _comes_back(before: Sequence[Beside], after: Sequence[Beside], moves: Sequence[Move]) -> bool:
    """Whether scales have the shapes that they had where moves are undone; True where that will be
    refused. Nothing tells whether a scale had a dimension of size 1 that a reshape took away, nor
    whether the scales of codes of size 1 were one for all of them.
    """
    items = list(after)
    try:
        for move in reversed(moves):
            items = moved(move.reversed(), items)
    except RefusedObject:
        return True
    return [item.stored.shape for item in items] == [item.stored.shape for item in before]


def _in_order(ref: TensorRef) -> TensorRef:
    """A tensor as it will be written: no scheme has to know of what it is put together."""
    whole = ref.pieces[0]._replace(
        offset=0, shape=ref.shape, stride=contiguous_stride(ref.shape), start=(0,) * len(ref.shape)
    )
    return ref._replace(stride=whole.stride, pieces=(whole,))


def _blocks(
    group: CodeGroup, facts: Facts, how: Decoding, scheme: str, shape: Shape
) -> tuple[int | None, ...]:
    """The block of a scale along the last two dimensions of codes whose values have this `shape`;
    none of it is told where they have another number of dimensions.

    That of the configuration counts where the tensors have fewer rows: a block at the edge is cut.
    """
    if len(shape) != len(group.codes.shape):
        return ()
    given = given_block(facts, group) if scheme in ("fp8", "int8") else None
    if given is not None:
        return given
    sizes = zip(how.block, shape[-2:], strict=True)
    rows, columns = (None if block >= size else block for block, size in sizes)
    # several codes stand in one byte, along one of the dimensions
    if how.bits < 8 and how.axis == -1 and columns:
        columns = columns * how.bits // 8
    elif how.bits < 8 and how.axis != -1 and rows:
        rows = rows * how.bits // 8
    return rows, columns
