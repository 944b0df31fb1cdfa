"""What the schemes of quantised weights share: a weight with what is read with it, and its values.

A scheme is told by the configuration that stands beside the checkpoint, then by names and shapes.
It gives a `Decoding` and the tensors in the order in which `ckptconv.tensors.decoding` reads them;
all that is stored is checked against each other here, before anything is computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NoReturn, TypeGuard

from ckptconv.support.arrays import np
from ckptconv.support.errors import MalformedCheckpoint, RefusedObject
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.text import MOST_WAYS, most_ways
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.computed import Computed, computed
from ckptconv.tensors.decoding import Decoding, decode_needs
from ckptconv.tensors.dtypes import BFLOAT16, BY_NAME, E8M0, FLOAT8, FLOAT32, DType
from ckptconv.tensors.gguf_blocks import DECODERS
from ckptconv.tensors.refs import Shape, TensorRef, box_of
from ckptconv.tensors.stream import iter_chunks
from ckptconv.tensors.views import reshaped

QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
"""Under which a model's ``config.json`` says how its weights are quantised; the last is MLX's."""

# The most bytes of a tensor that is read while a conversion is planned: a shape, a JSON text.
_MOST = 1 << 16


# The most repeats in a pattern that a checkpoint brings: more may take too long.
_MOST_REPEATS = 6

# The most characters of one: Python takes no number of more digits.
_LONGEST = 4000

# The most integers that are read one by one: no model has so many inputs, but an expanded view.
_MOST_COLUMNS = 1 << 20


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known beside the tensors of a state dict.

    `config` is the ``quantization_config`` of ``config.json`` (or what stands for it), `metadata`
    the strings of a safetensors file, `scheme` the one that the user names, `dtype` the type of the
    weights that ``config.json`` names, `checked` remembers which tensors were held against their
    checksums.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    scheme: str | None = None
    dtype: DType | None = None
    checked: Checksums = field(default_factory=Checksums)

    @property
    def method(self) -> str:
        """The ``quant_method`` of the configuration; empty where there is none."""
        method = self.config.get("quant_method")
        if not isinstance(method, str):
            return ""
        return method.lower()


@dataclass(frozen=True, slots=True)
class CodeGroup:
    """Codes with all that they are read with: the tensors of one weight.

    `key` is that of the codes, `prefix` what stands before their name and that of the others,
    `parts` are all of them by what stands behind it.
    """

    key: str
    prefix: str
    parts: Mapping[str, TensorRef]

    @property
    def name(self) -> str:
        """The name of the codes in their module."""
        return self.key[len(self.prefix) :]

    @property
    def module(self) -> str:
        """The path of the module."""
        return self.prefix.removesuffix(".")

    @property
    def codes(self) -> TensorRef:
        return self.parts[self.name]

    def first(self, *names: str) -> TensorRef | None:
        """The first of these that is there."""
        return next((self.parts[name] for name in names if name in self.parts), None)

    def need(self, name: str) -> TensorRef:
        """The tensor of this name; `MalformedCheckpoint` where there is none."""
        if name not in self.parts:
            self.fail(f"is quantised, and has no {name}")
        return self.parts[name]

    def fail(self, what: str, hint: str | None = None) -> NoReturn:
        """Raise `MalformedCheckpoint` about this weight."""
        raise MalformedCheckpoint(what, where=self.key, hint=hint)

    def misfit(self, scale: TensorRef) -> NoReturn:
        """Raise `MalformedCheckpoint` about scales of another shape."""
        self.fail(f"is {list(self.codes.shape)}, which scales of {list(scale.shape)} do not fit")

    def refuse(self, what: str, hint: str | None = None) -> NoReturn:
        """Raise `RefusedObject` about this weight."""
        raise RefusedObject(what, where=self.key, hint=hint)

    def without(self, ending: str) -> CodeGroup:
        """The same without what has a name of this ending."""
        others = {name: ref for name, ref in self.parts.items() if not name.endswith(ending)}
        return replace(self, parts=others)


class Weight(NamedTuple):
    """The values of a quantised weight: under the name `name` in its module, `scheme` in words."""

    name: str
    values: TensorRef
    scheme: str


class Scheme(NamedTuple):
    """A way in which weights are quantised.

    `name` is the word of ``--scheme``; `methods` are the values of ``quant_method`` that mean it;
    `fits` says whether names and types of a group are those of the scheme, `decode` gives its
    values. `is_certain`: names and types alone tell it, whatever the configuration says.
    """

    name: str
    methods: tuple[str, ...]
    fits: Callable[[CodeGroup, Facts], bool]
    decode: Callable[[CodeGroup, Facts], Weight]
    is_certain: bool = False


def json_object(raw: bytes | str) -> Mapping[str, Any] | None:
    """What a JSON text says; None where it is not an object."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_small(ref: TensorRef, where: str) -> bytes:
    """All bytes of a small tensor, in C order, held against their checksum."""
    if ref.nbytes > _MOST:
        raise MalformedCheckpoint(f"has {ref.nbytes} bytes, too many for what it is", where=where)
    for piece in ref.pieces:
        Checksums().read(piece.storage)
    return b"".join(map(bytes, iter_chunks(ref)))


def read_integers(ref: TensorRef, where: str) -> tuple[int, ...]:
    """The values of a small tensor of integers."""
    if ref.dtype.kind != "int":
        raise MalformedCheckpoint(f"is {ref.dtype.name}, not integers", where=where)
    return tuple(np.frombuffer(read_small(ref, where), ref.dtype.array_type).tolist())


def group_size(group: CodeGroup, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block of a group of columns that a configuration says; None where it says none."""
    size = told_size(group, config, "group_size")
    return None if size is None or size <= 0 else (1, size)


def check_groups(group: CodeGroup, name: str, columns: int, groups: int) -> None:
    """Refuse an index of groups that is not one number below `groups` for each column."""
    numbers = all_integers(group, name, columns)
    if numbers and not (min(numbers) >= 0 and max(numbers) < groups):
        group.fail(f"{name} names a group beyond the {groups} that are there")


def all_integers(group: CodeGroup, name: str, count: int) -> tuple[int, ...]:
    """The values of a tensor of so many integers in one dimension."""
    index = group.need(name)
    if index.shape != (count,) or index.dtype.name not in ("int32", "int64"):
        group.fail(f"{name} has to be {count} integers")
    if count > _MOST_COLUMNS:
        group.refuse(f"has {count} columns; {name} is read for {_MOST_COLUMNS} at most")
    found: list[int] = []
    for at in range(0, index.shape[0], 8192):  # of a bounded size each
        part = box_of(index, (at,), (min(8192, index.shape[0] - at),))
        found += read_integers(part, group.prefix + name)
    return tuple(found)


def one_number(group: CodeGroup, name: str) -> TensorRef:
    """A tensor of one element, in one dimension."""
    ref = group.need(name)
    if ref.numel != 1:
        group.refuse(f"is read with one number in {name}, which is {list(ref.shape)}")
    return reshaped(ref, (1,), group.prefix + name)


def told_size(group: CodeGroup, config: Mapping[str, Any], name: str) -> int | None:
    """The whole number that a configuration says under a name; None where it says nothing. Raises
    `MalformedCheckpoint` for anything else: a size that is derived instead may be another.
    """
    told = config.get(name)
    if not (told is None or type(told) is int):
        group.fail(f"is described by a config whose {name} is not a whole number", _CORRECT)
    return told


_CORRECT = "correct the config.json beside it"


def told_block(group: CodeGroup, told: object) -> tuple[int, int] | None:
    """The rows and columns of a block that a configuration says: two numbers, or a text as
    ``128x128``; None where it says nothing. Raises as `told_size` does.
    """
    if told is None:
        return None
    if isinstance(told, str):
        found = re.fullmatch(r"(\d{1,9})x(\d{1,9})", told)
        told = found and [*map(int, found.groups())]
    if not (isinstance(told, list) and len(told) == 2 and all(map(is_size, told))):
        group.fail("is described by a config whose block is not two whole numbers", _CORRECT)
    return told[0], told[1]


def is_size(value: object) -> TypeGuard[int]:
    """Whether a value out of JSON is a whole number above 0."""
    return type(value) is int and value > 0


def weights_config(facts: Facts, group: CodeGroup) -> Mapping[str, Any]:
    """What the configuration says of the weights of a module: of the group whose targets name it by
    its path, by a regex (``re:``), or the only one there is; empty where it says nothing.
    """
    groups = facts.config.get("config_groups")
    if not isinstance(groups, dict):
        return {}
    found = [item for item in groups.values() if isinstance(item, dict)]
    chosen = [item for item in found if _targets(item, group)] or found
    weights = chosen[0].get("weights") if len(chosen) == 1 else None
    return weights if isinstance(weights, dict) else {}


def _targets(item: Mapping[str, Any], group: CodeGroup) -> bool:
    """Whether a group names a module: by its class it cannot be told here."""
    targets = item.get("targets")
    if not isinstance(targets, list):
        return False
    texts = [target for target in targets if isinstance(target, str)]
    return any(
        text == group.module or (text.startswith("re:") and _matches(text[3:], group))
        for text in texts
    )


# a repeated group, or a reference back: their time may double with each character
_SLOW = re.compile(r"\)[*+{]|\\[1-9]")


def _matches(pattern: str, group: CodeGroup) -> bool:
    is_long = len(pattern) > _LONGEST or sum(map(pattern.count, "*+{")) > _MOST_REPEATS
    if is_long or _SLOW.search(pattern) or most_ways(pattern) > MOST_WAYS:
        group.refuse(f"is described by the pattern {pattern!r:.60}, which may take for ever")
    module = group.module
    try:
        return re.match(pattern, module) is not None
    except (re.error, OverflowError, RecursionError):
        return False


# --------------------------------------------------------------------------------------- the grid


def grid_of(group: CodeGroup, name: str, shape: Shape, block: tuple[int, int]) -> TensorRef:
    """What is one for each block of a weight of this shape, in so many dimensions; a tensor with
    one element is for all blocks, and any beside a weight that has no elements.
    """
    ref = group.need(name)
    *outer, rows, columns = shape
    wanted = (*outer, -(-rows // block[0]), -(-columns // block[1]))
    if ref.shape == wanted:
        return ref
    if 0 in shape or (ref.numel == 1 and wanted[-2:] == (1, 1)):
        return _for_all(ref, wanted)
    # with as many dimensions, each stands for itself: [1, n] is not one for each of n rows
    if len(ref.shape) == len(wanted) or _large(ref.shape) != _large(wanted):
        group.fail(
            f"is {list(shape)}, in blocks of {block[0]} x {block[1]}, so {name} has to be "
            f"{list(wanted)}, and is {list(ref.shape)}"
        )
    return reshaped(ref, wanted, group.prefix + name)


def _for_all(ref: TensorRef, shape: Shape) -> TensorRef:
    """One element as all those of a shape."""
    stride = (0,) * len(shape)
    piece = ref.pieces[0]._replace(shape=shape, stride=stride, start=stride)
    return ref._replace(shape=shape, stride=stride, pieces=(piece,))


def block_of(
    group: CodeGroup, scale: TensorRef, shape: Shape, given: tuple[int, int] | None = None
) -> tuple[int, int]:
    """The rows and columns of a block: as a configuration says (`given`), else by the shape of the
    scales: one for all, one for each row, or a grid whose blocks have a power of two of rows and of
    columns. Scales of as many dimensions as the weight are a grid.

    The block is never the size divided by that of the grid: blocks at the edges are cut.
    """
    *outer, rows, columns = shape
    grid = _grid(scale.shape)
    sizes = _large(grid)
    is_grid = len(grid) == len(shape) and list(grid[:-2]) == outer
    is_for_all = not is_grid and sizes == _large(outer)
    if 0 in shape or not sizes or is_for_all or (is_grid and grid[-2:] == (1, 1)):
        return max(rows, 1), max(columns, 1)
    if given is not None:
        return given
    if not is_grid and len(grid) != len(shape) and sizes == _large((*outer, rows)):
        return 1, max(columns, 1)
    if not is_grid or (grid[-2:] == (1, rows) and rows not in (1, columns)):
        group.fail(f"is {list(shape)}, which scales of {list(scale.shape)} do not fit")
    return (power_of(group, rows, grid[-2]), power_of(group, columns, grid[-1]))


def _grid(shape: Shape) -> Shape:
    """The shape of scales; that of ModelOpt's FP8_PB_WO has a 1 behind each size (as it exports
    them, and vLLM reads them).
    """
    if len(shape) == 4 and shape[1] == shape[3] == 1:
        return shape[::2]
    return shape


def _large(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def power_of(group: CodeGroup, size: int, blocks: int) -> int:
    """The power of two of elements in a block, where so many blocks take so many elements."""
    if blocks <= 1:
        return max(size, 1)
    block = 1
    while -(-size // block) > blocks:
        block *= 2
    if -(-size // block) != blocks:
        group.fail(
            f"has {size} rows or columns for {blocks} scales: no block of a power of two fits",
            hint="the config.json that belongs to it says the size of a block",
        )
    return block


def as_scale(ref: TensorRef) -> str:
    """How scales are to be read: powers of two are stored as bytes too."""
    # taken for numbers, the bytes of E8M0 would give wrong values without a word; 255 is NaN, as
    # OCP has it, where frameworks that read it from uint8 make infinity of it
    return E8M0.name if ref.dtype.name == "uint8" else ""


# --------------------------------------------------------------------------------------- decoding


def decoded(
    group: CodeGroup,
    facts: Facts,
    how: Decoding,
    inputs: Mapping[str, TensorRef],
    shape: Shape,
    *,
    dtype: DType | None = None,
    default: DType = BFLOAT16,  # of fp8 and fp4; schemes of integers name that of their scales
) -> TensorRef:
    """The values of a weight, of this shape. Their type is `dtype`, else that which the
    configuration names, else the `default`.
    """
    check_inputs(group, how, inputs, shape)
    refs = tuple(inputs[role] for role in how.roles)
    value = Computed("decode", refs, how, dtype or facts.dtype or default, shape)
    return computed(value, group.key, facts.checked)


def unblocked(key: str, ref: TensorRef, facts: Facts) -> TensorRef:
    """The values of a tensor of blocks of GGUF, whose type says all: float32 where nothing asks
    for another type, for a block has more bits than those of 16 have. `RefusedObject` for a type
    whose tables are not here.
    """
    if ref.dtype not in DECODERS:
        raise RefusedObject(
            f"is {ref.dtype.name} of GGUF, whose values cannot be read here",
            where=key,
            hint="dequantise the file with llama.cpp",
        )
    made_as = (facts.dtype or FLOAT32, ref.shown_shape)
    return computed(Computed("unblock", (ref,), (ref.dtype.name,), *made_as), key, facts.checked)


# What codes may be
_NUMBERS = ("uint", "e2m1", "e2m3", "int8", *(dtype.name for dtype in FLOAT8))


def check_inputs(
    group: CodeGroup, how: Decoding, inputs: Mapping[str, TensorRef], shape: Shape
) -> None:
    """Refuse inputs that are not of the shapes and the kinds of types that the values need."""
    needed = decode_needs(how, ((0,) * len(shape), shape), len(how.roles))
    for role, (_, wanted) in zip(how.roles, needed, strict=True):
        ref = inputs[role]
        if ref.shape != wanted and 0 not in shape:
            group.fail(f"needs a {role} of {list(wanted)}, and has one of {list(ref.shape)}")
        is_number = ref.dtype.is_floating or ref.dtype.kind == "int"
        if role == "scale" and how.scale_as:
            is_number = ref.dtype.itemsize == 1
        elif role in ("scale", "second", "bias"):
            is_number = ref.dtype.is_floating
        if role == "codes":
            is_number = ref.dtype.itemsize == how.word and how.numbers in _NUMBERS
        elif ref.dtype.numpy is None:
            is_number = False
        if not is_number:
            group.fail(f"has a {role} of {ref.dtype.name}, a type in which none is stored")


def check_words(group: CodeGroup, codes: TensorRef, bits: int, columns: int) -> None:
    """Refuse codes packed along their rows that are not just the words for the columns."""
    words = -(-columns * bits // (8 * codes.dtype.itemsize))
    if codes.shape[-1] != words:
        group.fail(
            f"holds {columns} codes of {bits} bits in a row, which take {words} words, and has "
            f"{codes.shape[-1]}"
        )


def known_dtype(name: object) -> DType | None:
    """The floating type of 16 bits or more that a text names; None for anything else."""
    found = BY_NAME.get(str(name).removeprefix("torch."))
    if found is None or not found.is_floating or found.itemsize == 1:
        return None
    return found
