"""Quantised weights decoded: the operation ``decode``, which makes values of codes and scales.

One statement serves every scheme that multiplies small codes by scales of blocks. What a scheme
adds are the parameters, a `Decoding`, and views of its tensors in the order that is read here: the
last two dimensions of the output are rows and columns; codes are packed along one of them; a scale
belongs to a block of so many rows and columns.

    value = (code - zero) x scale + bias

in float32, each step rounded once, and once more to the type of the output: what the frameworks
compute where they work in float32 (docs/values.md names those that round more often). Facts of the
formats: the code of each framework, by the names in `ckptconv.tensors.schemes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, partial
from math import gcd, prod
from typing import Any

from ckptconv.support.arrays import Array, np
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.casting import Cast, Raw, as_floats, beyond, cast, every_value, octets
from ckptconv.tensors.dtypes import BY_NAME, FLOAT32, DType
from ckptconv.tensors.plain_numbers import Number, number_of, quotient, real, single
from ckptconv.tensors.refs import Box, Shape, blocks_of

_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# transformers, compressed-tensors, MLX and torchao have -0 for code 8 too, ModelOpt and ggml 0
FLOAT4 = (*_HALF, *(-value for value in _HALF))
"""The values of E2M1 by code (OCP Microscaling Formats 1.0, section 5.3.3); code 8 is -0."""


class Decoding(NamedTuple):
    """How codes and what stands beside them become values: parameters of ``decode``.

    `roles` name the inputs in their order: ``codes``, ``scale``, then any of ``zero``, ``second``
    (a second scale, of the whole tensor), ``bias``, ``groups`` (of each column, the number of its
    block: act order) and ``table`` (the value of each code).

    `numbers` says what a code is: the name of a dtype of 8 bits, ``uint`` (less `offset`), or
    ``e2m1`` and ``e2m3``. Codes of `bits` bits are packed in words along the `axis` (-1 or -2):
    end to end from the lowest bit on, or, of fields that fill a word, in this `order`: the n-th
    element is in the field ``order[n]``.

    A scale is that of `block` = (rows, columns); `scale_as` is the dtype that its bytes are of
    where they are stored as uint8. Zeros are one for each scale: plain numbers, or
    packed as the codes are along the rows (`packed_zero`), where `zero_step` is added to each
    field, modulo 2**bits. The `second` scale divides the first where `divides`, else multiplies it.
    `plus` is added to the value, and `last` multiplies it, at the end. `groups` is how many blocks
    a row has that are read as a whole, `table` how many values the table has, `word` the bytes of a
    word.
    """

    roles: tuple[str, ...]
    numbers: str
    block: tuple[int, int]
    bits: int = 8
    axis: int = -1
    order: tuple[int, ...] = ()
    offset: int = 0
    scale_as: str = ""
    packed_zero: bool = False
    zero_step: int = 0
    divides: bool = False
    plus: float = 0.0
    last: float = 1.0
    groups: int = 0
    table: int = 0
    word: int = 1

    @property
    def per_word(self) -> int:
        """The elements of a word, of a type whose codes fill words."""
        return 8 * self.word // self.bits


# ------------------------------------------------------------------------------- what is read


def decode_needs(how: Decoding, box: Box, count: int) -> Sequence[Box]:
    """The boxes of the inputs for a box of the output."""
    (*outer, row, column), (*counts, rows, columns) = box
    blocks = [blocks_of(row, rows, how.block[0]), blocks_of(column, columns, how.block[1])]
    if "groups" in how.roles:
        blocks[1] = (0, how.groups)
    found: dict[str, Box] = {}
    for role in how.roles:
        if role == "codes":
            inner = [(row, rows), (column, columns)]
            inner[how.axis] = _words(how, *inner[how.axis])
        elif role == "zero" and how.packed_zero:
            inner = [_words(how, *blocks[0]), blocks[1]]
        elif role in ("scale", "zero", "bias"):
            inner = blocks
        elif role == "groups":
            found[role] = (column,), (columns,)
            continue
        else:
            found[role] = (0,), ({"table": how.table}.get(role, 1),)
            continue
        starts, sizes = zip(*inner, strict=True)
        found[role] = (*outer, *starts), (*counts, *sizes)
    return [found[role] for role in how.roles]


def _words(how: Decoding, start: int, count: int) -> tuple[int, int]:
    """The first of the words that some elements lie in, and how many these are."""
    return blocks_of(start * how.bits, count * how.bits, 8 * how.word)


# ------------------------------------------------------------------------------------- values


def decode_values(how: Decoding, box: Box, inputs: Sequence[Raw], target: DType) -> Cast:
    """The bytes of a box of the output, from those of the boxes that it needs."""
    needs = decode_needs(how, box, len(inputs))
    given = {
        role: (*raw, shape) for role, raw, (_, shape) in zip(how.roles, inputs, needs, strict=True)
    }
    with np.errstate(all="ignore"):
        items = _small_scales(how, box, given, target)
        if items is not None:
            return _by_small_scales(how, box, given, items, target)
        (*_, row, column), (*_, rows, columns) = box
        scale = _scales(how, given)
        if _is_for_tables(how, rows, columns):
            return _by_tables(how, box, given["codes"], scale, target)
        made = _codes(how, given, row, rows, column, columns)
        spread = partial(_spread, how, box, given.get("groups"))
        if "zero" in given:
            made -= spread(_zeros(how, given, row, rows))
        made *= spread(scale)
        if "bias" in given:
            made += spread(_floats(*given["bias"]))
        if how.plus:
            made += np.float32(how.plus)
        if how.last != 1.0:
            made *= np.float32(how.last)
    return cast(octets(made), FLOAT32, target)


def _scales(how: Decoding, given: dict[str, Any]) -> Array:
    part, dtype, shape = given["scale"]
    scale = _floats(part, BY_NAME.get(how.scale_as, dtype), shape)
    if "second" in given:
        scale = _with_second(scale, _floats(*given["second"]), how.divides)
    return scale


def _with_second(scale: Array, second: Array, divides: bool) -> Array:
    combine = np.divide if divides else np.multiply
    return combine(scale, second)


def _floats(part: memoryview, dtype: DType, shape: Shape) -> Array:
    """Numbers of any real type as float32; integers of at most 24 bits are exact."""
    if dtype.is_floating:
        return as_floats(part, dtype, FLOAT32).reshape(shape)
    return np.frombuffer(part, dtype.array_type).astype("<f4").reshape(shape)


def _codes(
    how: Decoding, given: dict[str, Any], row: int, rows: int, column: int, columns: int
) -> Array:
    """The numbers that codes stand for, as float32, in a new array of the shape of the box."""
    part, _, shape = given["codes"]
    table = _table(how, given)
    stored = np.frombuffer(part, f"<u{how.word}").reshape(shape)
    if _is_by_bytes(how):
        each = stored.view(np.uint8).reshape(*shape[:-1], shape[-1] * how.word)
        by_bytes = _by_bytes(table, how.bits, how.order)
        made = np.take(by_bytes, each, mode="clip").view(np.float32)
        skipped = column % how.per_word
        return np.ascontiguousarray(made[..., skipped : skipped + columns])
    first, count = (row, rows) if how.axis == -2 else (column, columns)
    fields = unpacked(stored, how, first, count)
    if how.numbers == "uint" and "table" not in given:  # quicker than to look them up
        made = fields.astype(np.float32)
        made -= np.float32(how.offset)
        return made
    return np.take(table, fields, mode="clip")


def _is_by_bytes(how: Decoding) -> bool:
    """Whether the elements of a byte follow each other in a row: one look-up finds all of them."""
    return how.axis == -1 and 8 % how.bits == 0 and len(how.order) <= 8 // how.bits


def _table(how: Decoding, given: dict[str, Any]) -> Array:
    if "table" in given:
        return _floats(*given["table"])
    return _numbers(how.numbers, how.bits, how.offset)


@cache
def _numbers(numbers: str, bits: int, offset: int) -> Array:
    if numbers == "uint":
        return np.arange(1 << bits, dtype=np.float32) - np.float32(offset)
    if numbers == "int8":
        return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
    if numbers == "e2m1":
        return np.array(FLOAT4, np.float32)
    if numbers == "e2m3":
        return np.array([_e2m3(code) for code in range(64)], np.float32)
    return every_value(BY_NAME[numbers]).astype(np.float32)


def _e2m3(code: int) -> float:
    """A float of six bits: sign, exponent of two, mantissa of three. OCP Microscaling 1.0: bias 1,
    no infinity, no NaN.
    """
    sign = -1.0 if code >> 5 else 1.0
    exponent, fraction = code >> 3 & 3, code & 7
    if exponent:
        fraction += 8
    return sign * fraction * 2.0 ** (max(exponent, 1) - 4)


def _by_bytes(numbers: Array, bits: int, order: tuple[int, ...]) -> Array:
    """What the fields of a byte stand for, by its value: of `numbers` (..., codes), of each."""
    every = np.arange(256)
    fields = [every >> bits * field & (1 << bits) - 1 for field in order or range(8 // bits)]
    made = np.stack([numbers[..., field] for field in fields], axis=-1)
    return made.view(_ITEMS[made.itemsize * len(fields)])[..., 0]


# A type of so many bytes, whose items numpy moves at once where it has one.
_ITEMS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16", 32: "V32"}


def unpacked(stored: Array, how: Decoding, first: int, count: int) -> Array:
    """The `count` fields from the element `first` on of words along the axis, as small integers."""
    axis = stored.ndim + how.axis
    width = 8 * how.word
    begin = first * how.bits // width * width  # the bit that the first word begins with
    if width % how.bits == 0:
        shifts = [how.bits * field for field in how.order or range(how.per_word)]
        mask = stored.dtype.type((1 << how.bits) - 1)
        fields = np.stack([stored >> stored.dtype.type(by) & mask for by in shifts], axis=axis + 1)
        shape = list(stored.shape)
        shape[axis] *= len(shifts)
        whole = fields.reshape(shape)
    else:
        whole = _straddling(stored, how.bits, axis, first * how.bits - begin)
        begin = first * how.bits
    skipped = (first * how.bits - begin) // how.bits
    taken: list[Any] = [slice(None)] * stored.ndim
    taken[axis] = slice(skipped, skipped + count)
    found: Array = whole[tuple(taken)]
    return found


def _straddling(stored: Array, bits: int, axis: int, shift: int) -> Array:
    """Fields that words do not hold whole, end to end from the bit `shift` on."""
    whole = np.ascontiguousarray(np.moveaxis(stored, axis, -1)).view(np.uint8)
    available = (8 * whole.shape[-1] - shift) // bits
    padded = np.concatenate([whole, np.zeros((*whole.shape[:-1], 2), np.uint8)], axis=-1)
    pairs = padded[..., :-1].astype(np.uint16)
    pairs |= padded[..., 1:].astype(np.uint16) << np.uint16(8)
    period = 8 // gcd(bits, 8)  # elements after which the places within bytes come again
    made = np.empty((*whole.shape[:-1], available), np.uint8)
    mask = np.uint16((1 << bits) - 1)
    for at in range(min(period, available)):
        bit = shift + at * bits
        step = bits * period // 8
        part = pairs[..., bit // 8 :: step][..., : len(range(at, available, period))]
        made[..., at::period] = part >> np.uint16(bit % 8) & mask
    return np.moveaxis(made, -1, axis)


def _zeros(how: Decoding, given: dict[str, Any], row: int, rows: int) -> Array:
    part, dtype, shape = given["zero"]
    if not how.packed_zero:
        return _floats(part, dtype, shape)
    stored = np.frombuffer(part, f"<u{how.word}").reshape(shape)
    first, count = blocks_of(row, rows, how.block[0])
    fields = unpacked(stored, how._replace(axis=-2), first, count).astype(np.int32)
    if how.zero_step:
        # field by field: added to a word, a carry would spoil the zero beside it
        fields = fields + how.zero_step & (1 << how.bits) - 1
    return (fields - how.offset).astype(np.float32)


def _spread(how: Decoding, box: Box, groups: Any, each: Array) -> Array:
    """What is one for each block, for the elements of a box, or what broadcasts to them."""
    (*_, row, column), (*_, rows, columns) = box
    each = spread_out(each, -2, how.block[0], row, rows)
    if groups is None:
        return spread_out(each, -1, how.block[1], column, columns)
    part, dtype, _ = groups
    found: Array = np.take(each, np.frombuffer(part, dtype.array_type).astype(np.intp), axis=-1)
    return found


def spread_out(each: Array, axis: int, size: int, first: int, count: int) -> Array:
    """What is one for each block of `size`, for `count` elements from `first` on; one stays one."""
    if each.shape[axis] == 1 or size == 1:
        return each
    # to repeat and then to multiply takes 0.2 ns an element, to broadcast over blocks 0.3
    spread: Array = np.repeat(each, size, axis=axis)
    taken: list[Any] = [slice(None)] * spread.ndim
    taken[axis] = slice(first % size, first % size + count)
    cut: Array = spread[tuple(taken)]
    return cut


# ----------------------------------------------------------------------------- scales of a byte


def _small_scales(how: Decoding, box: Box, given: dict[str, Any], target: DType) -> Array | None:
    """What the codes of a byte become with each scale, where a scale is a byte too, and one for all
    of them: 65,536 items. None where that is not so, or where values are lost.
    """
    per_byte = 8 // how.bits
    is_plain = how.roles in _SCALED and not how.plus and how.last == 1.0
    is_packed = _is_by_bytes(how) or (how.axis == -2 and how.bits == 4 and how.word == 1)
    has_one = how.block[how.axis] % (per_byte * how.word) == 0
    _, dtype, _ = given["scale"]
    if not (is_plain and is_packed and has_one and dtype.itemsize == 1 and per_byte <= 2):
        return None
    second = b""
    if "second" in given:
        if prod(box[1]) < _WORTH_ITEMS:
            return None
        second = _floats(*given["second"]).tobytes()
    codes = (how.numbers, how.bits, how.order, how.offset)
    return _scaled_items(codes, how.scale_as or dtype.name, second, how.divides, target)


# Elements from which it is worth it where a tensor has a second scale, and so items of its own.
_WORTH_ITEMS = 1 << 18


@lru_cache(maxsize=8)
def _scaled_items(
    codes: tuple[str, int, tuple[int, ...], int],
    scale: str,
    second: bytes,
    divides: bool,
    target: DType,
) -> Array | None:
    numbers, bits, order, offset = codes
    scales = _floats(memoryview(bytes(range(256))), BY_NAME[scale], (256,))
    if second:
        scales = _with_second(scales, np.frombuffer(second, np.float32), divides)
    wanted = np.multiply(_numbers(numbers, bits, offset), scales[:, None])
    result = cast(octets(wanted), FLOAT32, target)
    if result.overflowed:
        return None
    values = np.frombuffer(result.data, f"<u{target.itemsize}").reshape(wanted.shape)
    return _by_bytes(values, bits, order).reshape(-1)


def _by_small_scales(
    how: Decoding, box: Box, given: dict[str, Any], items: Array, target: DType
) -> Cast:
    """The values of a box by the scale and the codes of each byte."""
    (*_, row, column), (*counts, rows, columns) = box
    codes, _, shape = given["codes"]
    scales, _, grid = given["scale"]
    stored = np.frombuffer(codes, np.uint8).reshape(*shape[:-1], shape[-1] * how.word)
    each = np.frombuffer(scales, np.uint8).reshape(grid).astype(np.uint16) << np.uint16(8)
    per_byte = 8 // how.bits
    sizes, firsts = list(how.block), [row, column]
    skipped = firsts[how.axis] % (per_byte * how.word)
    sizes[how.axis] //= per_byte
    firsts[how.axis] = (firsts[how.axis] - skipped) // per_byte
    for axis in (-2, -1):
        each = spread_out(each, axis, sizes[axis], firsts[axis], stored.shape[axis])
    found = np.take(items, np.add(stored, each, dtype=np.uint16), mode="clip")
    fields = found.reshape(-1).view(f"<u{target.itemsize}").reshape(*stored.shape, per_byte)
    if how.axis == -2:
        fields = np.ascontiguousarray(np.moveaxis(fields, -1, -2))
        made = fields.reshape(*counts, -1, columns)[..., skipped : skipped + rows, :]
    else:
        made = fields.reshape(*counts, rows, -1)[..., skipped : skipped + columns]
    return Cast(octets(made), 0)


# ------------------------------------------------------------------------------- large blocks

# Elements of a block from which a table of its values is quicker than to multiply each: 1.1 ns
# where looking up and multiplying take 1.9. A table of 256 values is made for each block and box.
_LARGE = 1024


def _is_for_tables(how: Decoding, rows: int, columns: int) -> bool:
    in_block = min(how.block[0], rows) * min(how.block[1], columns)
    is_plain = how.roles in _SCALED and not how.plus and how.last == 1.0
    return is_plain and how.bits == 8 and how.word == 1 and in_block >= _LARGE


_SCALED = (("codes", "scale"), ("codes", "scale", "second"))


def _by_tables(
    how: Decoding, box: Box, codes: tuple[memoryview, DType, Shape], scale: Array, target: DType
) -> Cast:
    (*_, row, column), (*_, rows, columns) = box
    high, wide = how.block
    numbers = _numbers(how.numbers, 8, how.offset)
    stored = np.frombuffer(codes[0], np.uint8).reshape(-1, rows, columns)
    grid = scale.reshape(-1, *scale.shape[-2:])
    wanted = np.multiply(numbers, grid[..., None])
    result = cast(octets(wanted), FLOAT32, target)
    tables = np.frombuffer(result.data, f"<u{target.itemsize}").reshape(len(grid), -1)
    lost = np.zeros(0, bool)
    if result.overflowed:
        lost = beyond(wanted, target).reshape(tables.shape)
    made, count = np.empty(stored.shape, tables.dtype), 0
    blocks = grid.shape[2]
    kind: Any = np.uint16
    if blocks * 256 > _COUNTED:
        kind = np.uint32
    down = (row + np.arange(rows)) // high - row // high
    across = ((column + np.arange(columns)) // wide - column // wide).astype(kind) * kind(256)
    for first, stop in _bands(down, columns, max(1, _COUNTED // (256 * blocks))):
        begin = int(down[first])
        own = slice(begin * blocks * 256, (int(down[stop - 1]) + 1) * blocks * 256)
        offsets = across
        if down[stop - 1] > begin:
            offsets = (down[first:stop, None] - begin).astype(kind) * kind(blocks * 256) + across
        for outer in range(len(grid)):
            index = np.add(stored[outer, first:stop], offsets, dtype=kind)
            np.take(tables[outer, own], index, out=made[outer, first:stop], mode="clip")
            if result.overflowed:
                count += int(np.count_nonzero(lost[outer, own][index]))
    return Cast(octets(made), count)


# Entries of tables that a number of 16 bits counts.
_COUNTED = 1 << 16

# Elements that are looked up at a time: numpy makes indices of 8 bytes of theirs.
_BAND = 1 << 16


def _bands(down: Array, columns: int, most: int) -> Iterator[tuple[int, int]]:
    """The rows looked up together, of at most so many rows of blocks; `down` is of each row."""
    count = max(1, _BAND // max(1, columns))
    first = 0
    while first < len(down):
        stop = min(first + count, int(np.searchsorted(down, down[first] + most)))
        yield first, stop
        first = stop


# ------------------------------------------------------------------------------- one element


def decode_plain(how: Decoding, box: Box, numbers: Sequence[Sequence[Number]]) -> Number:
    """One element, from the numbers that it needs: by the definition, in nothing but Python."""
    given = dict(zip(how.roles, numbers, strict=True))
    (*_, row, column), _ = box
    along = column if how.axis == -1 else row
    code = _plain_code(how, given["codes"], along)
    if "table" in given:
        number = real(given["table"][int(real(code))])
    else:
        number = _plain_number(how, code)
    group = int(real(given["groups"][0])) if "groups" in given else 0
    scale = _plain_scale(how, given["scale"][group])
    if "second" in given:
        second = real(given["second"][0])
        scale = single(quotient(scale, second) if how.divides else scale * second)
    if "zero" in given:
        number = single(number - _plain_zero(how, given["zero"], group, row))
    value = single(number * scale)
    if "bias" in given:
        value = single(value + real(given["bias"][0]))
    if how.plus:
        value = single(value + how.plus)
    return single(value * how.last)


def _plain_code(how: Decoding, words: Sequence[Number], along: int) -> Number:
    """The field of the element; a code of 8 bits of a type of its own is its number already."""
    if how.bits == 8 and how.word == 1:
        return words[0]
    return _field(how, [int(real(word)) for word in words], along)


def _field(how: Decoding, words: Sequence[int], along: int) -> int:
    width = 8 * how.word
    stream = sum(word % (1 << width) << width * at for at, word in enumerate(words))
    if how.order:
        bit = how.bits * how.order[along % len(how.order)]
    else:
        bit = along * how.bits - along * how.bits // width * width
    return stream >> bit & (1 << how.bits) - 1


def _plain_number(how: Decoding, code: Number) -> float:
    if how.numbers == "uint":
        return real(code) - how.offset
    if how.numbers == "e2m1":
        return FLOAT4[int(real(code))]
    if how.numbers == "e2m3":
        return _e2m3(int(real(code)))
    return _of_byte(code, how.numbers) if type(code) is int else real(code)


def _of_byte(byte: int, name: str) -> float:
    return real(number_of(bytes((byte % 256,)), BY_NAME[name]))


def _plain_scale(how: Decoding, scale: Number) -> float:
    if how.scale_as:
        return _of_byte(int(real(scale)), how.scale_as)
    return single(real(scale))


def _plain_zero(how: Decoding, zeros: Sequence[Number], group: int, row: int) -> float:
    if not how.packed_zero:
        return real(zeros[group])
    _, count = _words(how, *blocks_of(row, 1, how.block[0]))
    per_row = len(zeros) // count
    words = [int(real(zeros[at * per_row + group])) for at in range(count)]
    field = _field(how, words, row // how.block[0])
    return float((field + how.zero_step) % (1 << how.bits) - how.offset)
