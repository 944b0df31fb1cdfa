"""One tensor of a checkpoint by its name, a part of it by indices, and its values: as text, as
plain numbers, as files of numpy (one as ``.npy``, several as ``.npz``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import product
from math import prod
from operator import index
from pathlib import Path, PurePath
from typing import Any

from ckptconv.formats.npz import NPZ, bad_names, holds, lay_out_arrays
from ckptconv.io.crc import crc32
from ckptconv.io.outputs import file_output, write_file
from ckptconv.io.places import place_of
from ckptconv.support.arrays import Array, np
from ckptconv.support.errors import MissingTensor, OptionRefused, RefusedObject, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import first_few, look_hint, quoted
from ckptconv.tensors.casting import octets
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import BY_NAME, FLOAT64, UINT8, DType
from ckptconv.tensors.packing import packed_nbytes, unpacked
from ckptconv.tensors.refs import Shape, number_at
from ckptconv.values.named import NamedValue, NamedValues, array_of

_INDEX = re.compile(r"-?\d+")
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?")
_SPACES = re.compile(r"\s*(:)\s*")
_MOST_DIGITS = 18


def picked(found: NamedValues, name: str, path: PurePath, *, is_whole: bool = False) -> NamedValue:
    """The tensor of this name, or the only one whose name ends in it, by whole words; not where the
    name `is_whole`. Raises `MissingTensor` where there is none, or a choice.
    """
    same = [item for item in found.values if item.name == name]
    ends = [item for item in found.values if not is_whole and item.name.endswith(f".{name}")]
    meant = same or ends
    if len(meant) == 1:
        return meant[0]
    hint: str | None = "see them with: ckptconv stats"
    if same:
        what = f"{len(same)} tensors have this name"
    elif ends:
        what = f"{len(ends)} tensors have names that end in it"
        hint = f"choose one: {first_few([item.name for item in ends], 5)}"
    elif name in found.unread:
        what, hint = "its numbers cannot be read", None
    else:
        what, hint = "no tensor has this name", _meant(found, name) or look_hint(path, "ls")
    raise MissingTensor(what, path=path, where=name, hint=hint)


def _meant(found: NamedValues, name: str) -> str | None:
    """What was meant by a name that no tensor has: one with indices behind it, or one like it."""
    names = [item.name for item in found.values]
    bare, opening, indices = name.partition("[")
    if opening and bare in names:
        return f"give the indices as a word of their own: {quoted(bare)} {quoted('[' + indices)}"
    near = get_close_matches(name, names, 3, 0.6)
    if not near:
        return None
    return f"did you mean {first_few(near, 3)}"


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: the numbers along each dimension, and which dimensions go."""

    ranges: tuple[range, ...]
    gone: tuple[bool, ...]

    @property
    def shape(self) -> Shape:
        """The shape of the part."""
        return tuple(
            len(numbers) for numbers, gone in zip(self.ranges, self.gone, strict=True) if not gone
        )

    def at(self, wanted: Any, said: str) -> Box:
        """The part of it that numpy's basic indexing gives: integers, slices with steps, one
        ``...``.

        Raises `OptionRefused` for anything else, and for an index that is not there; `said` is what
        its message calls the index.
        """
        parts = [*wanted] if isinstance(wanted, tuple) else [wanted]
        kept = [at for at, gone in enumerate(self.gone) if not gone]
        dots = [at for at, part in enumerate(parts) if part is ...]
        if len(dots) > 1:
            raise _refused(said, "has more than one ...")
        for at in dots:
            parts[at : at + 1] = [slice(None)] * (len(kept) - len(parts) + 1)
        if len(parts) > len(kept):
            raise _refused(said, f"has {len(parts)} indices for {len(kept)} dimensions")
        ranges, gone = [*self.ranges], [*self.gone]
        for at, part in zip(kept, parts, strict=False):
            ranges[at], gone[at] = _numbers_at(ranges[at], part, said)
        return Box(tuple(ranges), tuple(gone))


def whole_box(shape: Shape) -> Box:
    """All of a tensor of this shape."""
    return Box(tuple(map(range, shape)), (False,) * len(shape))


def _numbers_at(numbers: range, part: Any, said: str) -> tuple[range, bool]:
    """The numbers of a dimension that an integer or slice takes, and whether it goes."""
    if isinstance(part, slice) and part.step == 0:
        raise _refused(said, "has a step of 0")
    try:
        if isinstance(part, slice):
            return numbers[part], False
        if isinstance(part, bool):
            raise TypeError
        at, size = index(part), len(numbers)
    except TypeError:
        what = f"has a {type(part).__name__} where an integer or a slice of integers belongs"
        raise _refused(said, what) from None
    if not -size <= at < size:
        raise OptionRefused(
            f"{printable(said)} has the index {at}, but the dimension has {size}",
            hint=f"it goes from {-size} to {size - 1}" if size else "it has none",
        )
    at %= size
    return numbers[at : at + 1], True


def box_of(text: str, shape: Shape) -> Box:
    """The part of a tensor of this shape that an index written as text gives, with or without
    brackets; see `Box.at`.

    Raises `OptionRefused` for anything else, and for an index that is not there.

    >>> box_of("[0:3, -1]", (5, 4)).shape
    (3,)
    """
    inner = text.strip()
    if inner.startswith("[") or inner.endswith("]"):
        if not (inner.startswith("[") and inner.endswith("]") and len(inner) > 1):
            raise _refused(text, "has one bracket without the other")
        inner = inner[1:-1].strip()
    parts = [_SPACES.sub(r"\1", part.strip()) for part in inner.split(",")]
    if not parts[-1]:  # behind the last comma, or of an index of nothing
        parts.pop()
    return whole_box(shape).at(tuple(_index_of(part, text) for part in parts), text)


def _index_of(part: str, text: str) -> Any:
    """An integer, a slice or ``...``, of its text."""
    if part == "...":
        return ...
    met = _SLICE.fullmatch(part)
    is_index = _INDEX.fullmatch(part) is not None
    if not (is_index or met) or max(map(len, part.split(":"))) > _MOST_DIGITS:
        raise _refused(text, f"has {printable(part) or 'nothing'} where an index belongs")
    if met is None:
        return int(part)
    return slice(*(value and int(value) for value in met.groups()))


def _refused(text: str, what: str) -> OptionRefused:
    return OptionRefused(
        f"{printable(text)} {what}", hint="write it as numpy does: '[0:3, :5]', '[-1]', '[..., 0]'"
    )


def values_of(item: NamedValue, box: Box) -> Array:
    """The values of a part as an array; quantized ones as float64, packed ones as float32."""
    for at, numbers in enumerate(box.ranges):
        if 1 < len(numbers) <= _MANY and abs(numbers.step) >= _FAR:
            # few elements that lie far apart are read one by one, not all that lies between them
            before, after = box.ranges[:at], box.ranges[at + 1 :]
            ones = [(*before, range(one, one + 1), *after) for one in numbers]
            parts = [values_of(item, Box(ranges, box.gone)) for ranges in ones]
            return np.concatenate(parts, at - sum(box.gone[:at]))
    starts, shape = _hull(box.ranges)
    if item.bits >= 8 and item.decode is None:
        return _stepped(array_of(item.read, starts, shape), box)
    return _stepped(_decoded(item, starts, shape), box)


_FAR, _MANY = 64, 10_000


def _hull(ranges: Sequence[range]) -> tuple[Shape, Shape]:
    """Where the smallest box begins that holds all of the numbers, and its shape."""
    ends = [sorted((numbers[0], numbers[-1])) if numbers else (0, -1) for numbers in ranges]
    return tuple(low for low, _ in ends), tuple(high - low + 1 for low, high in ends)


def _stepped(whole: Array, box: Box) -> Array:
    """The numbers of a box out of the values of its hull."""
    both = zip(box.ranges, box.gone, strict=True)
    picks = [0 if gone else slice(None, None, numbers.step) for numbers, gone in both]
    made: Array = whole[(*picks, ...)]  # without the dots numpy gives a number where all are gone
    return made


def _decoded(item: NamedValue, starts: Shape, shape: Shape) -> Array:
    """The values that codes stand for, row by row: it may depend on the place of a code, and of
    codes of less than a byte those bytes are read that hold a row.
    """
    out = np.empty(shape, np.float64 if item.decode else np.float32)
    if not out.size:
        return out
    rows = out.reshape(-1, shape[-1]) if shape else out.reshape(1, 1)
    whole = array_of(item.read, starts, shape).reshape(rows.shape) if item.bits >= 8 else None
    for at, (row, place) in enumerate(zip(rows, _rows_of(starts, shape), strict=True)):
        before = number_at(place, item.shape)
        if whole is not None:
            codes = whole[at]
        elif item.decode is None:  # pairs, of which each row has whole ones
            codes = _codes(item, place[:-1], place[-1] if place else 0, len(row))
        else:  # end to end, whatever the shape
            codes = _codes(item, [], before, len(row))
        if item.decode is not None:
            row[:] = item.decode(memoryview(codes.tobytes()), before)
        elif item.numbers is not None:
            row[:] = item.numbers[codes]
    return out


def _rows_of(starts: Shape, shape: Shape) -> Iterator[list[int]]:
    """The place of the first element of each row of a part."""
    outer = (range(start, start + size) for start, size in zip(starts, shape[:-1], strict=False))
    for place in product(*outer):
        yield [*place, *starts[-1:]]


def _codes(item: NamedValue, outer: Sequence[int], first: int, count: int) -> Array:
    """The codes of so many elements from `first` on, in the row of bytes at `outer`."""
    per = 8 // item.bits
    at, skipped = divmod(first, per)
    ref = item.ref._replace(dtype=UINT8)
    nbytes = packed_nbytes(skipped + count, item.bits)
    start, shape = ((*outer, at), (*[1] * len(outer), nbytes)) if ref.shape else ((), ())
    raw = array_of(ref, start, shape)
    return unpacked(memoryview(raw.tobytes()), item.bits)[skipped : skipped + count]


def shown_text(item: NamedValue, box: Box) -> str:
    """The values of a part as numpy prints them; of many only those at the edges are read. Types of
    8 bits and bfloat16 are shown as float32, which holds them exactly.
    """
    most = prod(box.shape)
    if most <= _MOST:
        values = values_of(item, box)
    else:
        values, most = _edge_values(item, box), 0
    if values.dtype.name not in _PRINTED:
        values = values.astype(np.float32)
    with np.printoptions(threshold=most, edgeitems=_EDGE, linewidth=_LINE):
        return np.array2string(values, separator=" ")


def plain_values(item: NamedValue, box: Box) -> Any:
    """The values of a part as numbers in lists, or one number; complex ones are pairs."""
    values = values_of(item, box)
    if values.dtype.name not in _PRINTED:
        values = values.astype(np.float32)
    if values.dtype.kind == "c":
        values = np.stack((values.real, values.imag), -1)
    return values.tolist()


_MOST = 1000  # elements that are all printed, as numpy does
_EDGE = 3  # elements at each end of a dimension, of more
_LINE = 100  # columns
_PRINTED = frozenset((
    "float64", "float32", "float16", "complex64", "complex128", "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
))  # fmt: skip


def _edge_values(item: NamedValue, box: Box) -> Array:
    """The values at the edges of a part, in an array that numpy prints as it prints the part: what
    it leaves out is one element in the middle of each long dimension.
    """
    pieces: list[list[tuple[range, slice]]] = []
    shape: list[int] = []
    for numbers, gone in zip(box.ranges, box.gone, strict=True):
        if len(numbers) <= 2 * _EDGE:
            pieces.append([(numbers, slice(None))])
        else:
            first, last = slice(0, _EDGE), slice(_EDGE + 1, 2 * _EDGE + 1)
            pieces.append([(numbers[:_EDGE], first), (numbers[-_EDGE:], last)])
        if not gone:
            shape.append(min(len(numbers), 2 * _EDGE + 1))
    made: Array | None = None
    for chosen in product(*pieces):
        values = values_of(item, Box(tuple(numbers for numbers, _ in chosen), box.gone))
        if made is None:
            made = np.zeros(shape, values.dtype)
        kept = zip(chosen, box.gone, strict=True)
        made[tuple(place for (_, place), gone in kept if not gone)] = values
    assert made is not None
    return made


# ---------------------------------------------------------------------------- files of numpy


def _written_type(item: NamedValue) -> DType:
    """The type that numpy gets; `OptionRefused` if it has none itself (bfloat16, 8-bit floats)."""
    dtype = item.read.dtype
    if item.decode is not None:
        dtype = FLOAT64
    elif dtype.name == "complex32":
        dtype = BY_NAME["complex64"]
    if not holds(dtype):
        raise OptionRefused(
            f"numpy has no dtype {item.dtype.name} by itself",
            hint="write it as float32 with: ckptconv convert IN OUT.npz --include NAME --dtype f32",
        )
    return dtype


def check_whole(item: NamedValue, box: Box) -> None:
    """Hold a tensor that is wanted whole against its checksums, or raise `MalformedCheckpoint`."""
    if all(len(numbers) == size for numbers, size in zip(box.ranges, item.shape, strict=True)):
        checksums = Checksums()
        for piece in item.ref.pieces:
            checksums.read(piece.storage)


def write_npy(item: NamedValue, box: Box, output: Path, *, force: bool) -> None:
    """Write a part of a tensor, whole or not at all; its values are in memory meanwhile.

    Raises `OptionRefused` for types that numpy does not have by itself, `OutputRefused` where the
    file may not be written.
    """
    import io

    _written_type(item)
    values = np.asarray(values_of(item, box), order="C")
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(values))
    write_file(place_of(output), head.getvalue(), octets(values), force=force)


def write_npz(chosen: Sequence[tuple[NamedValue, Box]], output: Path, *, force: bool) -> None:
    """Write parts of several tensors as one archive, whole or not at all, under their names.

    The values of one of them are in memory at a time. Raises `OptionRefused` as `write_npy` does,
    `RefusedObject` for names that an archive cannot hold, `OutputRefused`.
    """
    named = [(item.name, _written_type(item), box.shape, b"") for item, box in chosen]
    names = [name for name, _, _, _ in named]
    for name, what in bad_names(names).items():
        raise RefusedObject(what, where=name, hint="write it by itself, with --npy")
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice:
        raise OptionRefused(f"{twice} is named twice", hint="name each tensor once")
    layout = lay_out_arrays(named)
    place = place_of(output)
    with file_output(place, force=force, fsync=True, size=layout.nbytes) as destination:
        with destination.draft(output.name, layout.nbytes) as draft:
            crcs: list[int] = []
            for at, (item, box) in enumerate(chosen):
                raw = octets(values_of(item, box))
                draft.stream.write(layout.items[at].lead)
                draft.stream.write(raw)
                crcs.append(crc32(raw))
                draft.stream.write(layout.trail(at, crcs[-1]))
            draft.stream.write(layout.ending(crcs))
            draft.commit()
        made = draft.place.local()
        if made is not None and place.local() is not None:
            NPZ.check_written(made, output, len(chosen))
        destination.commit()
