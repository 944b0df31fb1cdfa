"""All tensors of a checkpoint under all their names, quantized ones decoded, as arrays of numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from ckptconv.objects.encodings import Recipe, flat, holds_tensors, packed_codes
from ckptconv.objects.plain import tensor_form
from ckptconv.objects.torch_read import is_tensor_call
from ckptconv.pickles.nodes import Call, Node, children
from ckptconv.support.arrays import Array, np
from ckptconv.support.errors import KeyConflict, OptionRefused, UnsupportedCheckpoint, printable
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.text import quoted
from ckptconv.tensors.decoding import FLOAT4
from ckptconv.tensors.dtypes import BY_NAME, FLOAT4_PAIRS, DType
from ckptconv.tensors.gguf_blocks import DECODERS
from ckptconv.tensors.packing import BITS
from ckptconv.tensors.refs import Shape, TensorObject, TensorRef, view_identity
from ckptconv.tensors.schemes.base import Facts, unblocked
from ckptconv.tensors.stream import read_box
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.state_dicts import find
from ckptconv.tree.walk import CONTAINERS, chain_of, place_text, tensor_of, tensors_of, walk

Decode = Callable[[memoryview, int], "Array"]
"""From codes, and the number of elements before them, to the float64 numbers that they are."""


@dataclass(frozen=True, slots=True)
class NamedValue:
    """A tensor under one of its names.

    `ref` are the bytes, `shape` is that of the values. Where the bytes are codes, `dtype` is the
    quantized or packed type, `bits` are those of a code, `numbers` are what each code stands for,
    and `decode` makes the numbers where that depends on the place; `unblocked` are the values of
    blocks of GGUF.
    """

    name: str
    ref: TensorRef
    dtype: DType
    shape: Shape
    decode: Decode | None = None
    bits: int = 8
    numbers: Array | None = None
    unblocked: TensorRef | None = None

    @property
    def read(self) -> TensorRef:
        """The tensor that its values are read from."""
        return self.unblocked or self.ref

    @property
    def numel(self) -> int:
        """How many values it has."""
        return prod(self.shape)

    @property
    def has_numbers(self) -> bool:
        """Whether ckptconv knows what its bytes stand for."""
        return self.numbers is not None or self.read.dtype.kind != "bits"


@dataclass(frozen=True, slots=True)
class NamedValues:
    """The tensors of a checkpoint, in order, and the names of those that cannot be read."""

    values: tuple[NamedValue, ...]
    unread: tuple[str, ...]

    def matching(self, globs: Sequence[str]) -> NamedValues:
        """Those whose names match one of `globs`; `OptionRefused` where a glob meets none."""
        if not globs:
            return self
        names = [*(item.name for item in self.values), *self.unread]
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in names):
                hint = f"the first are: {', '.join(map(printable, names[:3])) or 'none'}"
                if any(name.startswith(f"{glob}.") for name in names):
                    hint = f"what is in it matches {quoted(f'{glob}.*')}"
                what = f"{printable(glob)} matches no tensor"
                if Path(glob).exists():
                    what = f"{what}, and is a file or folder here"
                    hint = "one checkpoint is named at a time"
                raise OptionRefused(what, hint=hint)

        def is_met(name: str) -> bool:
            return any(fnmatchcase(name, glob) for glob in globs)

        return NamedValues(
            tuple(item for item in self.values if is_met(item.name)),
            tuple(filter(is_met, self.unread)),
        )


def named_values(checkpoint: Checkpoint, only: str | None = None) -> NamedValues:
    """Every tensor, or those of the part `only`; one at several places has several names."""
    root = checkpoint.root
    if only is not None:
        root = find(root, only, checkpoint.path)
    return values_in(root)


def values_in(root: Node) -> NamedValues:
    """Every tensor in a tree, under each of its names."""
    values, unread = _under_names(root, _plain, _values)
    return NamedValues(tuple(values), tuple(name for name, _ in unread))


class Component(NamedTuple):
    """Bytes of a tensor under one of its names, or of a part of one that consists of several.
    `recipe` is on the first of these: what puts them together, beside the bytes.
    """

    name: str
    ref: TensorRef
    recipe: Recipe | None = None


def components_in(root: Node) -> list[Component]:
    """The bytes of every tensor in a tree, under each of its names: of codes the codes, as they
    are, and what they are read with. Two containers of the same tree give the same ones.
    """
    found, unread = _under_names(root, Component, _components)
    for name, value in unread:
        found += (Component(f"{name}.{path}", ref) for path, ref in tensors_of(value))
    return found


def told_apart(components: list[Component]) -> list[Component]:
    """The same. Raises `KeyConflict` where two tensors have one name, as ``{"a.b": x, "a": {"b":
    y}}`` gives them: whoever goes by names would not see that they were exchanged.
    """
    known: dict[str, TensorRef] = {}
    for name, ref, _ in components:
        first = known.setdefault(name, ref)
        if first is not ref and view_identity(first) != view_identity(ref):
            what = "two tensors have this name, by which they are not told apart"
            raise KeyConflict(what, where=name, hint="--only PATH takes one part")
    return components


T = TypeVar("T")


def _under_names(
    root: Node,
    plain: Callable[[str, TensorRef], T],
    composed: Callable[[dict[str, TensorRef], dict[str, Recipe]], list[T]],
) -> tuple[list[T], list[tuple[str, Node]]]:
    """What is made of each tensor in a tree, under each of its names: `plain` of one that is stored
    as it is, `composed` of the parts of others and their recipes. And the names and values of those
    that cannot be taken apart.
    """

    def made_of(name: str, value: Node) -> list[T] | None:
        # an array of complex128 is one tensor, though safetensors takes it apart
        ref = value if type(value) is TensorRef else tensor_of(value) or tensor_form(value)
        if ref is not None:
            return [plain(name, ref)]
        apart = _taken_apart(name, value)
        return None if apart is None else composed(*apart)

    made = made_of("tensor", root)
    if made is not None:
        return made, []
    values: list[T] = []
    unread: list[tuple[str, Node]] = []
    whole: set[int] = set()  # calls that are one tensor, whatever is in them
    for place, node in walk(root):
        if whole and any(id(step[2]) in whole for step in chain_of(place)):
            continue
        if type(node) not in CONTAINERS or type(node) is TensorObject or id(node) in whole:
            continue
        for label, child in children(node):
            if type(child) not in (TensorRef, TensorObject, Call):
                continue
            name = place_text((place, label, node))
            made = made_of(name, child)
            if made is not None:
                values += made
                whole.add(id(child))
            elif is_tensor_call(child) and holds_tensors(child):
                unread.append((name, child))
                whole.add(id(child))
    return values, unread


def _taken_apart(name: str, value: Node) -> tuple[dict[str, TensorRef], dict[str, Recipe]] | None:
    """The tensors that a value consists of, and the recipes that put them together, with the shape
    of one whose codes are packed; None where it is not a tensor, or cannot be taken apart.
    """
    if type(value) is not Call:
        return None
    packed = packed_codes(value, BITS)
    if packed is not None:
        parts, recipe, shape = packed
        named = {f"{name}.{part}": ref for part, ref in parts}
        return named, {name: {**recipe, "shape": list(shape)}}
    made = flat(name, value)
    return None if made is None else (dict(made.tensors), dict(made.recipes))


def _components(parts: dict[str, TensorRef], recipes: dict[str, Recipe]) -> list[Component]:
    found = []
    for key, ref in parts.items():
        owner = next((one for one in recipes if key.startswith(f"{one}.")), "")
        found.append(Component(key, ref, recipes.pop(owner, None)))
    return found


def _values(parts: dict[str, TensorRef], recipes: dict[str, Recipe]) -> list[NamedValue]:
    quantized = [at for at, recipe in recipes.items() if recipe["encoding"] == "quantized"]
    found = [_dequantized(at, recipes[at], parts) for at in quantized]
    return [*found, *(_plain(at, ref) for at, ref in parts.items())]


def _plain(name: str, ref: TensorRef) -> NamedValue:
    """A tensor that stands for itself; of pairs of 4-bit floats each is a value, and so is each
    element of a block of GGUF.
    """
    if ref.dtype in DECODERS:
        made = unblocked(name, ref, Facts())
        return NamedValue(name, ref, ref.dtype, ref.shown_shape, unblocked=made)
    if ref.dtype is not FLOAT4_PAIRS:
        return NamedValue(name, ref, ref.dtype, ref.shown_shape)
    shape = (*ref.shape[:-1], 2 * ref.shape[-1]) if ref.shape else (2,)
    return NamedValue(name, ref, ref.dtype, shape, bits=4, numbers=np.array(FLOAT4))


def _dequantized(name: str, recipe: Recipe, parts: dict[str, TensorRef]) -> NamedValue:
    """The numbers of a quantized tensor: (q - zero point) * scale in float32, as torch's
    `dequantize`. Its codes are packed where the recipe has its shape.
    """
    integers, dtype = parts.pop(f"{name}.integers"), BY_NAME[recipe["dtype"]]
    bits, shape = 8 * integers.dtype.itemsize, integers.shape
    if "shape" in recipe:
        bits, shape = BITS[dtype.name], tuple(recipe["shape"])
    is_whole = recipe["scheme"] == "per_tensor_affine"
    inner, channels = 1, 1
    if not is_whole:
        scale_ref, zero_ref = parts.pop(f"{name}.scales"), parts.pop(f"{name}.zero_points")
        axis = recipe["axis"]
        channels, inner = shape[axis], prod(shape[axis + 1 :])

    @cache
    def scales_and_zeros() -> tuple[Array, Array]:
        if is_whole:
            scale, zero = [recipe["scale"]], [recipe["zero_point"]]
            return np.array(scale, np.float32), np.array(zero, np.float32)
        return array_of(scale_ref).astype(np.float32), array_of(zero_ref).astype(np.float32)

    def decode(chunk: memoryview, before: int) -> Array:
        scales, zeros = scales_and_zeros()
        codes = np.frombuffer(chunk, integers.dtype.array_type).astype(np.float32)
        at = (np.arange(before, before + len(codes)) // inner) % channels if channels > 1 else 0
        made: Array = ((codes - zeros[at]) * scales[at]).astype(np.float64)
        return made

    numbers = None
    # one number for each code: values are counted by their codes then, and not decoded
    if is_whole and bits <= 8:
        numbers = decode(memoryview(bytes(range(1 << bits))), 0)
    return NamedValue(name, integers, dtype, shape, decode, bits, numbers)


# -------------------------------------------------------------------------------- as an array


def numpy_type(dtype: DType) -> Any:
    """The numpy type of a type's elements, of ml_dtypes if numpy has none; None: neither has."""
    import ml_dtypes

    if dtype.numpy is None:
        return None
    return np.dtype(getattr(ml_dtypes, dtype.numpy, dtype.numpy)).newbyteorder("<")


def array_of(ref: TensorRef, start: Shape | None = None, shape: Shape | None = None) -> Array:
    """The box of a tensor at `start` of this shape (by default all of it), in C order.

    complex32, which numpy does not have, becomes complex64. `UnsupportedCheckpoint` for a type
    whose elements numpy and ml_dtypes have no numbers for.
    """
    if start is None or shape is None:
        start, shape = (0,) * len(ref.shape), ref.shape
    kind = numpy_type(ref.dtype)
    if kind is None and ref.dtype.name != "complex32":
        raise UnsupportedCheckpoint(f"numpy has no type for elements of {ref.dtype.name}")
    values: Array = np.zeros(0, np.uint8)
    if 0 not in shape:
        values = read_box(ref, start, shape).view(np.uint8)
    if kind is None:
        kind, values = np.complex64, values.view("<f2").astype(np.float32)
    made: Array = values.view(kind).reshape(shape)
    return made
