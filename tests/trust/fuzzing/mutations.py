"""Damage done to good files: at any byte, and behind the checks that any byte would meet first.

A file is either changed as it lies, or taken apart (archive → record → pickle → opcode, header →
JSON value), changed inside, and put together again with right checksums, sizes and places.
Everything is drawn from one `random.Random`.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fuzzing.inputs import GOOD, Seed, Trial

EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF,
    (1 << 53) + 1, (1 << 61) - 1,
         (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -(1 << 31),
         -(1 << 63))  # fmt: skip
"""Integers at which sizes, counts and places go wrong."""

TEXTS = (
    "", ".", "..", "/", "../x", "a/b", "a" * 300, "module.", "weight", "é", "\ud800", "\0", "\n",
    "\x1b[31m", "\u202e", "cpu",
    "cuda:0", "cuda:99999999999999999999", "meta", "storage", "torch", "torch._utils",
    "_rebuild_tensor_v2",
    "_rebuild_parameter", "_rebuild_sparse_tensor", "_rebuild_qtensor", "FloatStorage",
    "QInt8Storage", "UntypedStorage",
    "collections", "OrderedDict", "defaultdict", "builtins", "set", "bytearray", "complex",
    "getattr", "numpy", "ndarray",
    "dtype", "_reconstruct", "scalar", "fuzzing.payload", "run", "__main__", "_metadata",
    "state_dict", "__metadata__",
    "ckptconv.encodings", "torch.storage", "_load_from_bytes", "torch.nn.modules.container",
    "Sequential", "0", "1", "-1",
    "1e999", "NaN",
)  # fmt: skip
"""Texts that mean something somewhere, or nothing anywhere."""


def mutate(seed: Seed, others: Sequence[Seed], chance: random.Random) -> Trial:
    """The files of `seed` with something wrong in one or two of them; `others` lend their bytes."""
    kept = {name: content for name, content in seed.trial.files.items() if name == GOOD}
    files = {name: content for name, content in seed.trial.files.items() if name != GOOD}
    if len(files) > 1 and chance.random() < 0.15:
        return replace(seed.trial, files=kept | _shuffled(files, chance))
    for _ in range(chance.choice((1, 1, 1, 2))):
        name = chance.choice(list(files))
        files[name] = damaged(files[name], _lender(others, chance), chance)
    return replace(seed.trial, files=kept | files)


def _shuffled(files: dict[str, bytes], chance: random.Random) -> dict[str, bytes]:
    """A set of files in which one is missing, doubled, under another's name, or empty."""
    name, other = chance.choice(list(files)), chance.choice(list(files))
    match chance.randrange(4):
        case 0:
            del files[name]
        case 1:
            files[name], files[other] = files[other], files[name]
        case 2:
            files[name] = files[other]
        case _:
            files[name] = b""
    return files


def _lender(others: Sequence[Seed], chance: random.Random) -> bytes:
    """The bytes of another file, to splice from."""
    return chance.choice(list(chance.choice(others).trial.files.values()))


def damaged(content: bytes, lender: bytes, chance: random.Random) -> bytes:
    """`content` changed at its bytes, or inside its parts."""
    inside = _inside(content)
    if inside is not None and chance.random() < 0.7:
        return inside(content, lender, chance)
    for _ in range(chance.choice((1, 1, 2, 4))):
        content = chance.choice(BYTES)(content, lender, chance)
    return content


# -------------------------------------------------------------------------------------------- bytes


def _flip(content: bytes, _: bytes, chance: random.Random) -> bytes:
    if not content:
        return b"\0"
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def _set(content: bytes, _: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.randbytes(chance.choice((1, 1, 2, 4))) + content[at + 1 :]


def _edge(content: bytes, _: bytes, chance: random.Random) -> bytes:
    """An integer of 1 to 8 bytes in either order at some place, or one that is there made a little
    larger or smaller.
    """
    size = chance.choice((1, 2, 4, 8))
    order: Any = chance.choice(("little", "little", "big"))
    at = chance.randrange(max(1, len(content) - size))
    value = chance.choice(EDGES)
    if chance.random() < 0.5:
        value = int.from_bytes(content[at : at + size], order) + chance.choice((-1, 1, -16, 16, 64))
    return content[:at] + (value % (1 << 8 * size)).to_bytes(size, order) + content[at + size :]


def _truncate(content: bytes, _: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _cut(content: bytes, _: bytes, chance: random.Random) -> bytes:
    start, stop = _range(content, chance)
    return content[:start] + content[stop:]


def _double(content: bytes, _: bytes, chance: random.Random) -> bytes:
    start, stop = _range(content, chance)
    return content[:stop] + content[start:stop] * chance.choice((1, 1, 2, 8)) + content[stop:]


def _amplify(content: bytes, _: bytes, chance: random.Random) -> bytes:
    """A piece very many times, for what takes time that grows with more than its number."""
    start, stop = _range(content, chance)
    return (
        content[:stop] + content[start:stop] * (_AMPLIFIED // (stop - start + 1)) + content[stop:]
    )


_AMPLIFIED = 60_000  # bytes, at most about so many of one piece


def _move(content: bytes, _: bytes, chance: random.Random) -> bytes:
    start, stop = _range(content, chance)
    rest = content[:start] + content[stop:]
    at = chance.randrange(len(rest) + 1)
    return rest[:at] + content[start:stop] + rest[at:]


def _splice(content: bytes, lender: bytes, chance: random.Random) -> bytes:
    start, stop = _range(lender, chance)
    first, last = _range(content, chance)
    return content[:first] + lender[start:stop] + content[chance.choice((first, last)) :]


def _text(content: bytes, _: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    word = chance.choice(TEXTS).encode("utf-8", "surrogatepass")
    return content[:at] + word + content[at + chance.choice((0, len(word))) :]


def _range(content: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(content) + 1)
    return start, min(len(content), start + chance.choice((1, 2, 4, 8, 16, 64, 512, 4096)))


BYTES: tuple[Callable[[bytes, bytes, random.Random], bytes], ...] = (
    _flip, _flip, _set, _edge, _edge, _truncate, _cut, _double, _move, _splice, _text, _amplify,
)  # fmt: skip

Inside = Callable[[bytes, bytes, random.Random], bytes]


def _inside(content: bytes) -> Inside | None:
    """How the parts of a file are changed; None for one that has none."""
    if content[:2] == b"PK":
        return zip_changed
    if content[257:262] == b"ustar":
        return tar_changed
    if content[8:9] == b"{" and int.from_bytes(content[:8], "little") <= len(content):
        return header_changed
    if content[:1] in b"{[" and content[:1]:
        return json_changed
    return pickle_changed if _pickle_ends(content[:200_000]) else None


# --------------------------------------------------------------------------------------------- zips


def zip_changed(content: bytes, lender: bytes, chance: random.Random) -> bytes:
    """An archive whose records are right in themselves, but one is another; or bytes changed under
    right checksums.
    """
    if chance.random() < 0.25:
        return zip_repaired(
            _edge(content, lender, chance)
            if chance.random() < 0.5
            else _flip(content, lender, chance)
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            items = archive.infolist()
            if sum(item.file_size for item in items) > LARGEST_INFLATED:
                return chance.choice(BYTES)(content, lender, chance)
            records = [(item.filename, archive.read(item), item.compress_type) for item in items]
    except Exception:  # zipfile and zlib refuse in many ways
        return _flip(content, lender, chance)
    if not records:
        return content
    return rezipped(_changed_records(records, lender, chance))


LARGEST_INFLATED = 4 << 20
"""Bytes that the records of an archive may claim for it to be taken apart."""

_Record = tuple[str, bytes, int]


def _changed_records(records: list[_Record], lender: bytes, chance: random.Random) -> list[_Record]:
    at = chance.randrange(len(records))
    if chance.random() < 0.5:  # the pickle steers everything
        at = next(
            (
                index
                for index, record in enumerate(records)
                if record[0].endswith((".pkl", ".json"))
            ),
            at,
        )
    name, payload, method = records[at]
    other = records[chance.randrange(len(records))]
    match chance.randrange(12):
        case 0:
            return records[:at] + records[at + 1 :]
        case 1:
            return [*records, (name, other[1], method)]
        case 2:
            return [*records[:at], (other[0], payload, method), *records[at + 1 :]]
        case 3:
            word = chance.choice(TEXTS).encode("utf-8", "replace").decode()
            renamed = name.rpartition("/")[0] + "/" + word if chance.random() < 0.5 else word + name
            return [*records[:at], (renamed, payload, method), *records[at + 1 :]]
        case 4:
            return [(name, payload,
                zipfile.ZIP_DEFLATED if method == zipfile.ZIP_STORED else zipfile.ZIP_STORED)
                    if index == at else record for index, record in enumerate(records)]  # fmt: skip
        case 5:
            chance.shuffle(records)
            return records
        case _:
            return [
                *records[:at],
                (name, damaged(payload, lender, chance), method),
                *records[at + 1 :],
            ]


def rezipped(records: Sequence[tuple[str, bytes, int]]) -> bytes:
    """An archive of records with payloads at multiples of 64, as torch aligns them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, payload, method in records:
            item = zipfile.ZipInfo(name)
            item.compress_type = (
                method
                if method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
                else zipfile.ZIP_STORED
            )
            padding = -(out.tell() + 30 + len(item.filename.encode()) + 4) % 64
            item.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
            archive.writestr(item, payload)
    return out.getvalue()


_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")


def zip_repaired(content: bytes) -> bytes:
    """The archive with the CRC-32 that each stored or deflated payload has, in directory, local
    header and descriptor.
    """
    fixed = bytearray(content)
    end = content.rfind(b"PK\5\6")
    if end < 0 or end + _END.size > len(content):
        return content
    at = _END.unpack_from(content, end)[6]
    while content[at : at + 4] == b"PK\1\2" and at + _CENTRAL.size <= len(content):
        fields = _CENTRAL.unpack_from(content, at)
        _repair_record(fixed, content, at, fields[4], fields[8], fields[16])
        at += _CENTRAL.size + fields[10] + fields[11] + fields[12]
    return bytes(fixed)


def _repair_record(
    fixed: bytearray, content: bytes, central: int, method: int, stored: int, header: int
) -> None:
    if content[header : header + 4] != b"PK\3\4" or header + 30 > len(content):
        return
    name, extra = struct.unpack_from("<HH", content, header + 26)
    start = header + 30 + name + extra
    payload = content[start : start + stored]
    if method == zipfile.ZIP_DEFLATED:
        try:
            payload = zlib.decompressobj(-15).decompress(payload, 1 << 24)
        except zlib.error:
            return
    crc = struct.pack("<I", zlib.crc32(payload))
    fixed[central + 16 : central + 20] = crc
    if any(content[header + 14 : header + 18]):
        fixed[header + 14 : header + 18] = crc
    if content[start + stored : start + stored + 4] == b"PK\7\x08":
        fixed[start + stored + 4 : start + stored + 8] = crc


# --------------------------------------------------------------------------------------------- tars


def tar_changed(content: bytes, lender: bytes, chance: random.Random) -> bytes:
    """A tar archive with another member in it, or with a changed header of which the checksum is
    right.
    """
    if chance.random() < 0.4:
        return tar_repaired(chance.choice((_flip, _set, _edge, _text))(content, lender, chance))
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            members = [(item, archive.extractfile(item)) for item in archive]
            found = [(item.name, file.read()) for item, file in members if file is not None]
    except Exception:  # tarfile refuses in many ways
        return _flip(content, lender, chance)
    if not found:
        return content
    at = chance.randrange(len(found))
    name, payload = found[at]
    match chance.randrange(8):
        case 0:
            del found[at]
        case 1:
            found.append((name, chance.choice(found)[1]))
        case _:
            found[at] = (name, damaged(payload, lender, chance))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for name, payload in found:
            item = tarfile.TarInfo(name)
            item.size = len(payload)
            archive.addfile(item, io.BytesIO(payload))
    return out.getvalue()


def tar_repaired(content: bytes) -> bytes:
    """The archive with the checksum that each of its headers has."""
    fixed = bytearray(content)
    for at in range(0, len(content) - 511, 512):
        if content[at + 257 : at + 262] == b"ustar":
            fixed[at + 148 : at + 156] = b" " * 8
            fixed[at + 148 : at + 156] = b"%06o\0 " % sum(fixed[at : at + 512])
    return bytes(fixed)


# ------------------------------------------------------------------------------------ JSON, headers


def header_changed(content: bytes, lender: bytes, chance: random.Random) -> bytes:
    """A safetensors file with another header of the length that it says."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json_changed(content[8:end], lender, chance)
    payload = content[end:] if chance.random() < 0.9 else _cut(content[end:], lender, chance)
    return len(header).to_bytes(8, "little") + header + payload


def json_changed(content: bytes, lender: bytes, chance: random.Random) -> bytes:
    """A document in which a value, a key or a number is another; or its text changed."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return chance.choice(BYTES)(content, lender, chance)
    if chance.random() < 0.2:
        return chance.choice((*BYTES, _doubled_key))(content, lender, chance)
    for _ in range(chance.choice((1, 1, 2))):
        document = value_changed(document, chance)
    return json.dumps(document, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")


def _doubled_key(content: bytes, _: bytes, chance: random.Random) -> bytes:
    keys = [match.span(1) for match in re.finditer(rb'("[^"]*")\s*:', content)]
    if len(keys) < 2:
        return content
    (start, stop), (first, last) = chance.sample(keys, 2)
    return content[:start] + content[first:last] + content[stop:]


def value_changed(value: Any, chance: random.Random) -> Any:
    """A JSON value with one thing in it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        match chance.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {**value, chance.choice(TEXTS): value[key]}
            case 2 if chance.random() < 0.2:
                return {**value, **{f"{key}{index}": value[key] for index in range(500)}}
            case 2:
                return {
                    chance.choice(TEXTS) if name == key else name: item
                    for name, item in value.items()
                }
            case _:
                return {**value, key: value_changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        match chance.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1 if chance.random() < 0.2:
                return [*value, *[value[at]] * 1000]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], value_changed(value[at], chance), *value[at + 1 :]]
    if isinstance(value, str) and chance.random() < 0.6 and value:
        return damaged_text(value, chance)
    if isinstance(value, int) and chance.random() < 0.4:
        return value + chance.choice((-1, 1, 4, -4, 8))
    return odd_value(chance)


def damaged_text(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    return text[:at] + chance.choice(TEXTS) + text[at + chance.choice((0, 1, 3)) :]


def odd_value(chance: random.Random) -> Any:
    """A value that may not be expected where it comes."""
    return chance.choice((
        None, True, False, [], {}, 0.5, 1e308, float("inf"), float("nan"), -0.0, [[]], [[[1]]],
        {"a": {"b": 1}}, 10**400,
        chance.choice(EDGES), chance.choice(TEXTS), [chance.choice(EDGES)] * 3,
        [chance.choice(TEXTS)] * 2,
    ))  # fmt: skip


# ------------------------------------------------------------------------------------------ pickles


def _pickle_ends(content: bytes) -> list[int]:
    """The ends of the pickles at the beginning of a file, one behind the other."""
    ends: list[int] = []
    stream = io.BytesIO(content)
    if content[:1] not in (b"\x80", b"(", b"}", b"]", b"c"):
        return ends
    try:
        while len(ends) < 64 and (not ends or content[ends[-1] : ends[-1] + 1] == b"\x80"):
            for _ in pickletools.genops(stream):
                pass
            ends.append(stream.tell())
    except Exception:
        pass
    return ends


def pickle_changed(content: bytes, lender: bytes, chance: random.Random) -> bytes:
    """One of the pickles at the beginning of a file, with opcodes taken away, put in, or given
    other arguments.
    """
    ends = _pickle_ends(content)
    if not ends:
        return chance.choice(BYTES)(content, lender, chance)
    at = chance.randrange(len(ends))
    start, stop = ([0, *ends])[at], ends[at]
    ops = opcodes(content[start:stop])
    foreign = opcodes(lender) if chance.random() < 0.3 and _pickle_ends(lender) else ops
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        ops = _ops_changed(ops, foreign, chance)
    return content[:start] + b"".join(ops) + content[stop:]


def opcodes(stream: bytes) -> list[bytes]:
    """The opcodes of a pickle with their arguments, as they lie."""
    places = [place for _, _, place in pickletools.genops(stream) if place is not None]
    return [
        stream[start:stop]
        for start, stop in zip(places, [*places[1:], places[-1] + 1], strict=True)
    ]


DOUBLED = b")" + b"q\x0eh\x0e\x86" * 60
"""A tuple of twice a tuple of twice …: 2**60 steps for anyone who writes it out, hashes or compares
it.
"""
DIGITS = b"\x8b" + struct.pack("<I", 10_001) + b"\xff" * 10_000 + b"\0"
"""An int of more digits than python prints."""
DEEP = b"]" * 600 + b"a" * 599
MONSTERS = (
    DOUBLED,
    DIGITS,
    DEEP,
    b"}(" + DOUBLED + b"K\1u",
    b"]q\x0eh\x0ea",
    b"}q\x0eX\1\0\0\0wh\x0es",
)
"""Values that take long, or have no end, for those who follow them without a thought."""
LONE = [
    bytes([code])
    for code in b"(012NRabde]}l)tsuQ.o\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98"
]
"""Opcodes without arguments."""


def _ops_changed(ops: list[bytes], foreign: list[bytes], chance: random.Random) -> list[bytes]:
    if not ops:
        return ops
    at = chance.randrange(len(ops))
    match chance.randrange(9):
        case 0:
            return ops[:at] + ops[at + chance.choice((1, 1, 2, 5)) :]
        case 1:
            return ops[: at + 1] + ops[max(0, at - chance.choice((0, 1, 5))) :]
        case 2:
            return [*ops[:at], chance.choice(LONE), *ops[at:]]
        case 3:
            return [*ops[:at], chance.choice(LONE), *ops[at + 1 :]]
        case 4:
            first = chance.randrange(len(foreign))
            return (
                ops[:at]
                + foreign[first : first + chance.choice((1, 3, 10, 30))]
                + ops[at + chance.choice((0, 1, 5)) :]
            )
        case 5 if chance.random() < 0.1:
            piece = ops[at : at + chance.choice((1, 2, 4, 8, 16, 32))]
            return [*ops[:at], *piece * (_AMPLIFIED // 3 // sum(map(len, piece))), *ops[at:]]
        case 5 if chance.random() < 0.3:
            return [*ops[:at], chance.choice(MONSTERS), *ops[at + chance.choice((0, 1)) :]]
        case 5:
            return [*ops[:at], _fetch(chance), *ops[at + chance.choice((0, 1)) :]]
        case 6:
            other = chance.randrange(len(ops))
            ops[at], ops[other] = ops[other], ops[at]
            return ops
        case _:
            with_arguments = [index for index, op in enumerate(ops) if len(op) > 1]
            at = chance.choice(with_arguments) if with_arguments else at
            return [*ops[:at], op_changed(ops[at], chance), *ops[at + 1 :]]


def _fetch(chance: random.Random) -> bytes:
    """A value from the memo, which may be the container that it is put into."""
    return b"h" + bytes([chance.choice((0, 1, 2, 3, chance.randrange(256)))])


def op_changed(op: bytes, chance: random.Random) -> bytes:
    """An opcode with another argument, of its kind or of a neighbouring one."""
    code = op[:1]
    if code in b"KMJ\x8a\x8bIL":
        return integer(
            chance.choice(EDGES) if chance.random() < 0.6 else chance.randrange(-3, 40), chance
        )
    if code in b"XUTV\x8c\x8dCB\x8e\x96":
        text = chance.choice(TEXTS)
        if chance.random() < 0.3:
            text = damaged_text(op[5:].decode("latin-1"), chance)
        return _with_text(code, text.encode("utf-8", "surrogatepass"), chance)
    if code == b"c":
        return f"c{chance.choice(TEXTS)}\n{chance.choice(TEXTS)}\n".encode("utf-8", "surrogatepass")
    if code == b"G":
        return b"G" + struct.pack(">d", chance.choice((float("nan"), float("inf"), 1e308, -0.0)))
    return _flip(op, b"", chance)


def integer(value: int, chance: random.Random) -> bytes:
    """An int by one of the opcodes that can hold it."""
    if 0 <= value < 256 and chance.random() < 0.5:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31 and chance.random() < 0.8:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return chance.choice((b"\x8a" + bytes([len(raw)]), b"\x8b" + struct.pack("<I", len(raw)))) + raw


def _with_text(code: bytes, raw: bytes, chance: random.Random) -> bytes:
    if code in (b"V",):
        return b"V" + raw.replace(b"\n", b"") + b"\n"
    if code in (b"U", b"\x8c", b"C"):
        return code + bytes([len(raw[:255])]) + raw[:255]
    if code in (b"\x8d", b"\x8e", b"\x96"):
        return code + struct.pack("<Q", len(raw)) + raw
    claim = len(raw) if chance.random() < 0.9 else chance.choice(EDGES) % (1 << 32)
    return code + struct.pack("<I", claim) + raw
