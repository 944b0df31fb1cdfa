"""What the parts of a module of an adapter add to a weight: computed tensors, and how they are put
together. Facts: peft 0.21 (`get_delta_weight` of tuners/lora/layer.py, tuners/loha, tuners/lokr),
lycoris-lora 4.1 (functional).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from math import perm, prod
from typing import Any

from ckptconv.support.errors import KeyMismatch, MalformedCheckpoint, RefusedObject
from ckptconv.support.records import dataclass
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.computed import Computed, computed, computed_value, elementwise, unrounded
from ckptconv.tensors.dtypes import FLOAT32, DType
from ckptconv.tensors.low_rank import Kron, LowRank, Product, Term
from ckptconv.tensors.refs import Piece, Shape, TensorRef, box_of, contiguous_stride, permuted
from ckptconv.tensors.views import in_order, repeated, reshaped, transposed
from ckptconv.tree.lora_adapters import Config, Parts, number_in

MERGED_TYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class WeightChange:
    """What becomes of one weight: `term` of `inputs` is added, and rows get their `magnitude`.

    `outer` counts the dimensions before rows; `is_rounded`: the delta is rounded to the type of the
    weight before it is added. `along` is the dimension of the outputs, which have a magnitude each.
    """

    term: Term
    inputs: tuple[TensorRef, ...]
    outer: int = 0
    is_rounded: bool = False
    magnitude: TensorRef | None = None
    along: int = 0
    epsilon: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """Which weight a module of an adapter means, and how its parts are to be read. `name` is that
    of the module in `config`, `keys` the key of each part; `strength` multiplies all that is added.
    """

    parts: Parts
    weight: TensorRef
    name: str
    config: Config
    keys: Mapping[str, str]
    strength: float

    def refuse(self, what: str, hint: str | None = None) -> KeyMismatch:
        """An error that names the first key of the module."""
        return KeyMismatch(what, where=next(iter(self.keys.values())), hint=hint)

    def scale(self, rank: int | None, parameter: str = "") -> float:
        """What a product is multiplied by, from its alpha, or from the config."""
        name = f"{self.name}.{parameter}".removesuffix(".")
        told = self.config.rank_of(name)
        if rank is None:
            rank = told
        elif told not in (None, rank):
            raise self.refuse(f"has the rank {rank}, and the config of the adapter says {told}")
        if rank is None:
            return self.strength  # of matrices that are whole, LyCORIS does not take the alpha
        if "alpha" in self.parts:
            alpha = number_in(self.parts["alpha"], self.keys["alpha"])
            other = self.config.alpha_of(name)
            if other is not None and other != alpha:  # nobody says which of them counts
                what = f"is {alpha:.6g}, and the config of the adapter says {other:.6g}"
                raise KeyMismatch(what, where=self.keys["alpha"])
            return self.strength * alpha / rank
        return self.strength * self.config.scale_of(name, rank)


# ---------------------------------------------------------------------------------- products


def as_linear(asked: AdapterTarget) -> AdapterTarget:
    """What is asked of an embedding, whose matrices have other names, as of a linear layer."""
    parts = {role.removeprefix("embedding_"): ref for role, ref in asked.parts.items()}
    keys = {role.removeprefix("embedding_"): key for role, key in asked.keys.items()}
    return replace(asked, parts=parts, keys=keys)


def linear_change(asked: AdapterTarget, *, across: bool | None) -> WeightChange:
    """The change by ``up`` and ``down``, oriented as `across` says (None: as it fits)."""
    up, down = matrices(asked)
    if "mid" in asked.parts:
        down, rank = _core(asked, asked.parts["mid"], down), up.shape[1]
        scale = asked.scale(asked.parts["down"].shape[0])
    else:
        rank = down.shape[0]
        scale = asked.scale(rank)
    shape = asked.weight.shape
    if across:
        pair = transposed(_flat(down)), transposed(up)
    else:
        pair = up, reshaped(in_order(down), (rank, *shape[1:]), asked.keys["down"])
    return WeightChange(Term(rank, scale), pair, along=int(bool(across)))


def orientations(asked: AdapterTarget) -> list[bool]:
    """Whether a product fits the weight as it is (False) and transposed (True); empty for none."""
    up, down = matrices(asked)
    shape = asked.weight.shape
    columns = down.shape[1:]
    if "mid" in asked.parts:
        columns = (*columns[:1], *asked.parts["mid"].shape[2:])
    fitting = []
    if len(shape) >= 2 and up.shape[0] == shape[0] and _is_like(columns, shape[1:]):
        fitting.append(False)
    if len(shape) == 2 and (prod(columns), up.shape[0]) == shape:
        fitting.append(True)
    return fitting


def _is_like(columns: Shape, wanted: Shape) -> bool:
    """Whether columns are of a shape, but for ones at the end, or flat."""
    if len(columns) == 1:
        return columns[0] == prod(wanted)
    return _without_ones(columns) == _without_ones(wanted)


def _without_ones(shape: Shape) -> Shape:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def misfit(asked: AdapterTarget) -> KeyMismatch:
    """The refusal of parts whose shapes do not go to the weight."""
    shapes = " and ".join(
        f"{list(ref.shape)}" for role, ref in asked.parts.items() if role != "alpha"
    )
    return asked.refuse(f"{shapes} do not fit the weight of the base, {list(asked.weight.shape)}")


def matrices(asked: AdapterTarget) -> tuple[TensorRef, TensorRef]:
    """Both matrices of a product, up and down, the first of two dimensions. Raises
    `MalformedCheckpoint` where they are not, or one is missing.
    """
    for role, other in (("up", "down"), ("down", "up")):
        if role not in asked.parts:
            what = f"has no {role} beside it, without which it says nothing"
            raise MalformedCheckpoint(what, where=asked.keys[other])
    up, down = asked.parts["up"], asked.parts["down"]
    for role in ("up", "down", "mid"):
        if role in asked.parts:
            _refuse_no_values(asked.parts[role], asked.keys[role])
    rank = asked.parts.get("mid", down).shape[0]
    wanted = (rank, *(1,) * len(up.shape[2:]))
    if up.shape[1:] != wanted:
        what = f"is {list(up.shape)}, which cannot be multiplied with {list(down.shape)}"
        raise MalformedCheckpoint(what, where=asked.keys["up"])
    return reshaped(in_order(up), up.shape[:2], asked.keys["up"]), down


def _refuse_no_values(ref: TensorRef, key: str, dimensions: int = 2) -> None:
    """Refuse what cannot be a matrix, or a tensor of at least so many dimensions."""
    if not ref.dtype.is_floating or 0 in ref.shape or len(ref.shape) < dimensions:
        raise MalformedCheckpoint(f"is {ref.dtype.name} {list(ref.shape)}, not a matrix", where=key)


def _flat(ref: TensorRef) -> TensorRef:
    return reshaped(in_order(ref), (ref.shape[0], prod(ref.shape[1:])), ref.storage.name)


def _made(operation: str, inputs: Sequence[TensorRef], parameters: Any, shape: Shape) -> TensorRef:
    value = Computed(operation, tuple(inputs), parameters, FLOAT32, shape)
    return computed(value, inputs[0].storage.name)


def _product(up: TensorRef, down: TensorRef) -> TensorRef:
    """The product of a matrix with one whose columns are of any shape."""
    shape = (up.shape[0], *down.shape[1:])
    return _made("matmul", (up, down), Product(up.shape[1]), shape)


def _core(asked: AdapterTarget, middle: TensorRef, down: TensorRef) -> TensorRef:
    """The second half of a Tucker product: (p, q, ...) and (q, i) make (p, i, ...)."""
    down = _flat(down)
    if len(middle.shape) < 3 or middle.shape[1] != down.shape[0]:
        what = f"{list(middle.shape)} cannot be multiplied with {list(down.shape)}"
        raise asked.refuse(what)
    count = len(middle.shape)
    sizes = middle.shape[2:]
    first = permuted(middle, (*range(2, count), 0, 1))
    shape = (*sizes, middle.shape[0], down.shape[1])
    parameters = Product(middle.shape[1], len(sizes))
    made = _made("matmul", (first, repeated(down, sizes)), parameters, shape)
    return permuted(made, (count - 2, count - 1, *range(count - 2)))


# ------------------------------------------------------------------------- LoHa, LoKr, whole ones


def whole_change(
    asked: AdapterTarget, delta: TensorRef, rank: int | None, role: str
) -> WeightChange:
    """The change by a delta that is one tensor, of as many values as the weight has."""
    if delta.numel != asked.weight.numel or _without_ones(delta.shape[:1]) != _without_ones(
        asked.weight.shape[:1]
    ):
        raise misfit(asked)
    _refuse_no_values(delta, asked.keys[role], 0)
    shaped = reshaped(in_order(delta), asked.weight.shape, asked.keys[role])
    scale = asked.strength
    if role != "diff":
        scale = asked.scale(rank)
    return WeightChange(Term(0, scale), (shaped,))


def hadamard_change(asked: AdapterTarget) -> WeightChange:
    """LoHa (arXiv:2108.06098): two products, multiplied element by element."""
    parts = asked.parts
    halves = [_half(asked, f"hada_w{one}", f"hada_t{one}") for one in "12"]
    if halves[0].shape != halves[1].shape:
        raise misfit(asked)
    delta = elementwise("multiply", halves, (), FLOAT32, parts["hada_w1_a"].storage.name)
    return whole_change(asked, delta, parts["hada_w1_b"].shape[0], "hada_w1_a")


def _half(asked: AdapterTarget, name: str, middle: str) -> TensorRef:
    """The product of the matrices ``a`` and ``b`` of a name, and of the one between (Tucker)."""
    first, second = f"{name}_a", f"{name}_b"
    for role in (first, second):
        if role not in asked.parts:
            raise asked.refuse(f"has no {role} beside it, without which it says nothing")
        _refuse_no_values(asked.parts[role], asked.keys[role])
    up, down = asked.parts[first], asked.parts[second]
    if middle in asked.parts:
        up, down = transposed(up), _core(asked, asked.parts[middle], down)
    if len(up.shape) != 2 or len(down.shape) < 2 or up.shape[1] != down.shape[0]:
        what = f"{list(up.shape)} cannot be multiplied with {list(down.shape)}"
        raise asked.refuse(what)
    return _product(up, down)


def kronecker_change(asked: AdapterTarget) -> WeightChange:
    """LoKr (arXiv:2309.14859): a Kronecker product, either half whole or a product itself."""
    parts = asked.parts
    rank = None
    halves = []
    for one in "12":
        whole = f"lokr_w{one}"
        if whole in parts:
            _refuse_no_values(parts[whole], asked.keys[whole])
            halves.append(parts[whole])
        else:
            halves.append(_half(asked, whole, f"lokr_t{one}"))
            rank = parts[f"{whole}_b"].shape[0]
    outer, inner = halves
    if len(outer.shape) != 2 or len(inner.shape) < 2:
        raise misfit(asked)
    rows, columns, *rest = inner.shape
    shape = (outer.shape[0] * rows, outer.shape[1] * columns, *rest)
    delta = _made("kron", halves, Kron(rows, columns), shape)
    if len(shape) == 3 and asked.config.rank and delta.numel == asked.weight.numel:
        # peft has the product over the last two dimensions of a Conv1d; LyCORIS, over the first two
        halves = [outer, permuted(inner, (1, 2, 0))]
        shape = (outer.shape[0] * columns, outer.shape[1] * rest[0], rows)
        delta = permuted(_made("kron", halves, Kron(columns, rest[0]), shape), (2, 0, 1))
        delta = reshaped(in_order(delta), asked.weight.shape, asked.keys[next(iter(parts))])
    return whole_change(asked, delta, rank, next(iter(parts)))


# ------------------------------------------------------------------------------------- experts


_MOST_ORDERS = 1000  # layers of experts have two to four parameters; a file may name any number


def expert_changes(
    asked: Sequence[AdapterTarget], weights: dict[str, TensorRef]
) -> dict[str, WeightChange]:
    """The changes of parameters of one module (`target_parameters` of peft) by their names: peft
    does not write which of its matrices are for which, so shapes must tell it.
    """
    fitting = []
    first = asked[0]
    if perm(len(weights), len(asked)) > _MOST_ORDERS:
        what = f"is for {len(asked)} of {len(weights)} parameters, which are too many to be tried"
        raise first.refuse(what, hint="merge it with peft")
    for names in permutations(weights, len(asked)):
        ways = [_expert_ways(one, weights[name]) for one, name in zip(asked, names, strict=True)]
        if all(ways):
            fitting.append((names, ways))
    if not fitting:
        told = ", ".join(f"{name} {list(ref.shape)}" for name, ref in weights.items())
        raise first.refuse(f"does not fit the parameters of the base: {told}")
    if len(fitting) > 1:
        (some, _), (others, _) = fitting[:2]
        pairs = zip(some, others, strict=True)
        told = next(f"{one} or {other}" for one, other in pairs if one != other)
        raise first.refuse(f"may be for {told}, whose shapes are alike", hint="merge it with peft")
    [(names, ways)] = fitting
    sure = {way[0] for way in ways if len(way) == 1}
    changes = {}
    for one, name, way in zip(asked, names, ways, strict=True):
        if len(way) > 1 and len(sure) != 1:
            what = f"may be for {name} as (in, out) or (out, in), which its shape does not tell"
            raise one.refuse(what, hint="merge it with peft")
        swapped = way[0] if len(way) == 1 else next(iter(sure))
        changes[name] = _expert_change(one, name, weights[name], swapped=swapped)
    return changes


def _expert_ways(asked: AdapterTarget, weight: TensorRef) -> list[bool]:
    """Whether matrices fit a parameter as (experts, out, in), True, and as (experts, in, out)."""
    up, down = matrices(asked)
    if len(weight.shape) == 2:
        return [True] if (up.shape[0], *down.shape[1:]) == weight.shape else []
    if len(weight.shape) != 3 or len(down.shape) != 2 or down.shape[0] % weight.shape[0]:
        return []
    sizes = up.shape[0], down.shape[1]
    both = ((True, sizes), (False, sizes[::-1]))
    return [way for way, wanted in both if weight.shape[1:] == wanted]


def _expert_change(
    asked: AdapterTarget, name: str, weight: TensorRef, *, swapped: bool
) -> WeightChange:
    up, down = matrices(asked)
    if len(weight.shape) == 2:
        rank = down.shape[0]
        return WeightChange(Term(rank, asked.scale(rank, name)), (up, down), is_rounded=True)
    experts = weight.shape[0]
    rank = down.shape[0] // experts
    first = reshaped(in_order(down), (experts, rank, down.shape[1]), asked.keys["down"])
    second = reshaped(in_order(up), (up.shape[0], rank, experts), asked.keys["up"])
    if swapped:
        pair = permuted(second, (2, 0, 1)), first
    else:
        pair = permuted(first, (0, 2, 1)), permuted(second, (2, 1, 0))
    return WeightChange(Term(rank, asked.scale(rank, name)), pair, outer=1, is_rounded=True)


# ------------------------------------------------------------------------------------ together


def changed(weight: TensorRef, changes: Sequence[WeightChange], key: str) -> TensorRef:
    """A weight after changes, in turn: sums are rounded once, if nothing comes between."""
    if weight.dtype.name not in MERGED_TYPES:
        what = f"is {weight.dtype.name}, to which nothing can be added"
        raise RefusedObject(what, where=key, hint="add --dequantize")
    waiting: list[WeightChange] = []
    checked = Checksums()
    for change in changes:
        if waiting and _apart(waiting[-1], change):
            weight, waiting = _summed(weight, waiting, checked), []
        waiting.append(change)
    return _summed(weight, waiting, checked)


def rows(ref: TensorRef, start: int, count: int) -> TensorRef:
    """Some rows of a tensor."""
    columns = ref.shape[1:]
    return box_of(ref, (start, *(0,) * len(columns)), (count, *columns))


def rows_in(shape: Shape, part: int, key: str) -> tuple[int, int]:
    """The first row of a part of a weight of a shape, and how many it has; `key` for messages. The
    weight is that of several modules: square q, k and v, and what comes after.
    """
    count, *columns = shape
    size = prod(columns)
    if len(columns) != 1 or not size or count < 3 * size or (part > 2 and count == 3 * size):
        what = f"goes to a part of {list(shape)}, which is not q, k and v one below the other"
        raise KeyMismatch(what, where=key)
    if part < 3:
        return part * size, size
    return 3 * size, count - 3 * size


def with_changed_rows(
    weight: TensorRef, parts: Mapping[int, Sequence[WeightChange]], key: str
) -> TensorRef:
    """A weight, of which each part becomes what its changes make of it."""
    pieces: list[Piece] = []
    start = part = 0
    while start < weight.shape[0]:
        first, count = rows_in(weight.shape, part, key)
        ref = rows(weight, first, count)
        if part in parts:
            ref = changed(ref, parts[part], key)
        pieces += _below(ref, first)
        start, part = first + count, part + 1
    return weight._replace(stride=contiguous_stride(weight.shape), pieces=tuple(pieces))


def _below(ref: TensorRef, first: int) -> list[Piece]:
    """The pieces of rows that begin with this row of a whole."""
    return [
        piece._replace(start=(piece.start[0] + first, *piece.start[1:])) for piece in ref.pieces
    ]


def with_replaced_rows(weight: TensorRef, values: TensorRef, numbers: Sequence[int]) -> TensorRef:
    """A weight with the rows `values` in the places of those of these numbers, of its type."""
    pieces: list[Piece] = []
    at = 0
    for row, place in sorted(zip(numbers, range(len(numbers)), strict=True)):
        if row > at:
            pieces += _below(rows(weight, at, row - at), at)
        pieces += _below(rows(values, place, 1), row)
        at = row + 1
    if at < weight.shape[0]:
        pieces += _below(rows(weight, at, weight.shape[0] - at), at)
    return weight._replace(stride=contiguous_stride(weight.shape), pieces=tuple(pieces))


_BY_ROWS = ("up", "diff", "bias", "bias_diff")
_SHARED = ("down", "alpha")


def in_rows(parts: Parts, sizes: Sequence[int], keys: Mapping[str, str]) -> list[Parts]:
    """The parts of a module taken apart by its rows: ``down`` is that of all. What cannot be taken
    apart is refused by its key.
    """
    for role, ref in parts.items():
        if role not in (*_BY_ROWS, *_SHARED):
            what = "is for several modules there, and only matrices of LoRA are taken apart"
            raise RefusedObject(what, where=keys[role])
        if role in _BY_ROWS and (not ref.shape or ref.shape[0] != sum(sizes)):
            what = f"has the shape {list(ref.shape)}, and its modules have {sum(sizes)} rows"
            raise KeyMismatch(what, where=keys[role])
    made = []
    for at, size in enumerate(sizes):
        own = {role: rows(parts[role], sum(sizes[:at]), size) for role in parts if role in _BY_ROWS}
        made.append({**parts, **own})
    return made


def _apart(one: WeightChange, other: WeightChange) -> bool:
    return (
        one.magnitude is not None
        or other.magnitude is not None
        or (one.outer, one.is_rounded) != (other.outer, other.is_rounded)
    )


def _summed(weight: TensorRef, changes: Sequence[WeightChange], checked: Checksums) -> TensorRef:
    first = changes[0]
    terms = tuple(change.term for change in changes)
    inputs = [ref for change in changes for ref in change.inputs]
    dtype, name = weight.dtype, weight.storage.name
    if not _is_cast(weight):  # peft loads what the adapter holds in the type of the model
        weight = unrounded(weight)  # of a quantised base: what is rounded is the sum alone
    is_rounded = first.is_rounded and weight.dtype is dtype
    rounded_as = dtype.name if is_rounded or dtype.name == "float64" else ""
    if first.magnitude is None:
        how = LowRank(terms, first.outer, rounded_as)
        value = Computed("low-rank", (weight, *inputs), how, dtype, weight.shape)
        made = computed(value, name, checked)
        return made._replace(requires_grad=weight.requires_grad)
    order = [first.along, *(axis for axis in range(len(weight.shape)) if axis != first.along)]
    seen = permuted(weight, order)
    if first.along:  # seen the other way, the product is not one of the same matrices
        delta = _product(*inputs) if first.term.rank else inputs[0]
        inputs, terms = [permuted(delta, order)], (Term(0, first.term.scale),)
    how = LowRank(terms, 0, rounded_as, seen.shape[1:], first.epsilon)
    value = Computed("low-rank", (seen, *inputs, first.magnitude), how, dtype, seen.shape)
    made = computed(value, name, checked)
    back = [order.index(axis) for axis in range(len(order))]
    # gathered: who casts what lies in another order would round it twice, and --verify would not
    turned = in_order(permuted(made, back))
    return turned._replace(requires_grad=weight.requires_grad)


def _is_cast(ref: TensorRef) -> bool:
    """Whether a tensor is one of another type, as `kept_type` makes them."""
    value = computed_value(ref)
    return value is not None and value.operation == "cast" and value.dtype != value.inputs[0].dtype


def kept_type(ref: TensorRef, dtype: DType) -> TensorRef:
    """A tensor that takes the place of one of another floating type."""
    if ref.dtype is dtype:
        return ref
    return elementwise("cast", [ref], (), dtype, ref.storage.name)
