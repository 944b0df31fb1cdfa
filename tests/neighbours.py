"""Members of the families of hostile files that the generator does not write, built with the generator's own functions.

Each is a file, what must be answered, what is wrong with it, and how its bytes are made.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from program import ROOT

GENERATOR = Path(os.environ.get("CKPTCONV_BADCASES", ROOT.parent / "shared" / "badcases")) / "badcases.py"
if not GENERATOR.is_file():
    pytest.skip("the generator of hostile files is not here (CKPTCONV_BADCASES)", allow_module_level=True)

OUTPUTS = (".pt", ".safetensors")


def _load_generator() -> ModuleType:
    """The generator as a module; nothing is written beside it."""
    spec = importlib.util.spec_from_file_location("badcases", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


bad = _load_generator()
u, n, g, t, d, ints, call, storage, tensor = bad.u, bad.n, bad.g, bad.t, bad.d, bad.ints, bad.call, bad.storage, bad.tensor


@dataclass(frozen=True)
class Case:
    """A file, the answers that are right, and what is wrong with it.

    `expected` is reject, warn (convert and tell), accept, or several of them. `build` makes the bytes; None where the
    generator's script does. `outputs` are the formats to try: one is enough where the answer is given on opening.
    """

    file: str
    expected: str
    what: str
    category: str
    build: Callable[[], bytes] | None = None
    outputs: tuple[str, ...] = OUTPUTS


# ------------------------------------------------------------------------------------------------------------- pieces

ENTRY = b'"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
DEEP = 200_000
DOUBLED = b")" + b"q\x00h\x00\x86" * 60  # 60 x (x, x): 2**60 steps for anyone who hashes it
ZEROS = bytes((1 << 20) + 100)
END = struct.Struct("<4s4H2IH")
END_FIELDS = ("magic", "disk", "start_disk", "here", "count", "size", "start", "comment")


def int4(value: int) -> bytes:
    """An int of any size by LONG4."""
    size = value.bit_length() // 8 + 1
    return b"\x8b" + struct.pack("<I", size) + value.to_bytes(size, "little", signed=True)


DIGITS = int4((1 << 80_000) - 1)  # more digits than Python turns into text


def raw(*opcodes: bytes, protocol: bytes = bad.P2) -> bytes:
    """A checkpoint whose pickle is just these opcodes."""
    return bad.ckpt(protocol + b"".join(opcodes) + bad.STOP)


def one(value: bytes, key: str | bytes = "w", records: dict | None = None) -> bytes:
    """A checkpoint whose state dict holds one value."""
    return bad.ckpt(bad.sd((key, value)), records)


def two(a: bytes, b: bytes, records: dict | None = None) -> bytes:
    return bad.ckpt(bad.sd(("a", a), ("b", b)), records)


def beside(value: bytes) -> bytes:
    """A checkpoint whose state dict holds `value` beside a good tensor."""
    return bad.ckpt(bad.sd(("w", tensor()), ("x", value)))


def rebuilt(size: bytes, stride: bytes) -> bytes:
    """A tensor whose size and stride are given as opcodes."""
    return call("torch._utils", "_rebuild_tensor_v2", storage(), n(0), size, stride, bad.FALSE, bad.ODICT)


def stored(cls: bytes, location: bytes) -> bytes:
    """The persistent id of a storage whose class and location are given as opcodes."""
    return t(u("storage"), cls, u("0"), location, n(4)) + bad.PID


def flat(key: str = "0", numel: int = 4, **more) -> bytes:
    """A one-dimensional tensor over a whole storage."""
    return tensor(storage(key=key, numel=numel), size=(numel,), **more)


def framed(length: int, body: bytes) -> bytes:
    return bad.ckpt(bad.P4 + b"\x95" + struct.pack("<Q", length) + body)


def deflated(pickle: bytes) -> bytes:
    return bad.mkzip([bad.E("archive/data.pkl", pickle, method=8), bad.E("archive/version", b"3\n")])


def stream(payload: bytes) -> bytes:
    """A raw deflate stream."""
    return bad.E("x", payload, method=8).raw


def record(payload: bytes = bad.F4, pickle: bytes = bad.GOOD, more: dict | None = None, **over) -> bytes:
    """A checkpoint whose one storage has the record that `over` describes; `more` goes to the archive."""
    return bad.ckpt(pickle, {"0": bad.E("archive/data/0", payload, **over)}, **(more or {}))


def with_record(name: str | bytes, **over) -> bytes:
    """A good checkpoint with one more record."""
    return bad.ckpt(bad.GOOD, more=[bad.E(name, b"x", **over)])


def ended(before: bytes = b"", **changes: int) -> bytes:
    """A good file whose end record tells other numbers (each given as what is added to it); `before` stands before it."""
    good = bad.ckpt(bad.GOOD)
    fields = dict(zip(END_FIELDS, END.unpack(good[-END.size :]), strict=True))
    fields |= {name: fields[name] + change for name, change in changes.items()}
    return good[: -END.size] + before + END.pack(*fields.values())


def with_end64(count: int = 0, locator: int | None = None) -> bytes:
    """A good file with a zip64 end record; its count is wrong by `count`, and `locator` is where its locator points."""
    good = bad.ckpt(bad.GOOD)
    at = len(good) - END.size
    _, _, _, _, records, size, start, _ = END.unpack(good[at:])
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, records + count, records + count, size, start)
    return good[:at] + end64 + struct.pack("<4sIQI", b"PK\6\7", 0, at if locator is None else locator, 1) + good[at:]


def wide(extra: bytes) -> bytes:
    """A storage whose sizes stand in the extra field `extra`."""
    return record(usize=1 << 32, csize=1 << 32, c_extra=extra)


def nested_record() -> bytes:
    """Two storages, the second of which lies within the payload of the first, local header and all."""
    name = b"archive/data/1"
    inner = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0x21, zlib.crc32(bad.F4), 16, 16, len(name), 0) + name + bad.F4
    payload = inner + b"\0" * (-len(inner) % 16)
    pickle = bad.sd(("a", flat(numel=len(payload) // 4)), ("b", flat("1")))
    at = record(payload, pickle).index(inner)
    return record(payload, pickle, {"cd_extra": [(0, (name, 0, 0, zlib.crc32(bad.F4), 16, 16, at, b""))]})


def described(*descriptor: int) -> bytes:
    """A storage whose CRC and sizes stand behind its payload, in a data descriptor with these numbers."""
    trail = struct.pack(f"<4s{len(descriptor)}I", b"PK\7\x08", *descriptor) if descriptor else b""
    return record(raw=bad.F4 + trail, csize=16, flags=8, l_crc=0, l_csize=0, l_usize=0)


def header(text: bytes) -> bytes:
    return bad.st(text, bad.F4)


def entry(**fields: object) -> bytes:
    return header(json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **fields}}).encode())


def padded(length: int) -> bytes:
    """A good safetensors file whose header has `length` bytes."""
    text = b"{" + ENTRY + b"}"
    return header(text + b" " * (length - len(text)))


def metadata(text: str) -> bytes:
    return header(b'{"__metadata__":' + text.encode() + b"," + ENTRY + b"}")


def long_places() -> bytes:
    """2,000 objects under one key of 200,000 characters: 400 MB if each is told its place."""
    return one(b"](" + (g("m", "X") + b")R") * 2000 + b"e", "k" * 200_000)


def many_dimensions() -> bytes:
    """20,000 dimensions of 255-byte sizes, fetched from the memo: a product of 40 million bits."""
    size = bad.MARK + b"\x8a\xff" + b"\x7f" * 255 + b"q\x05" + b"h\x05" * 20_000 + b"t"
    return one(rebuilt(size, b"(" + b"K\0" * 20_001 + b"t"))


def below_the_ratio() -> bytes:
    """120 MB of text in a pickle that is deflated less than a hundredfold, for random bytes stand beside it."""
    noise = random.Random(1).randbytes(3 << 19)
    return deflated(b"\x80\x03B" + struct.pack("<I", len(noise)) + noise + b"0" + u(b"a" * 120_000_000) + bad.STOP)


# --------------------------------------------------------------------------------------------------------- neighbours

NEIGHBOURS: list[Case] = []
PT, ST = OUTPUTS[:1], OUTPUTS[1:]


def add(file: str, expected: str, what: str, build: Callable[[], bytes], outputs: tuple[str, ...] = PT) -> None:
    NEIGHBOURS.append(Case(file, expected, what, "neighbour", build, outputs))


# Code execution.
MKDIR = g("posix", "mkdir")
add("exec_newobj.pt", "reject", "NEWOBJ", lambda: beside(MKDIR + bad.PAYLOAD_ARG + b"\x85\x81"))
add("exec_newobj_ex.pt", "reject", "NEWOBJ_EX with keyword arguments", lambda: beside(MKDIR + bad.PAYLOAD_ARG + b"\x85}\x92"))
add("exec_inst.pt", "reject", "INST", lambda: beside(b"(" + bad.PAYLOAD_ARG + b"iposix\nmkdir\n"))
add("exec_obj.pt", "reject", "OBJ", lambda: beside(b"(" + MKDIR + bad.PAYLOAD_ARG + b"o"))
add(
    "exec_getattr.pt",
    "reject",
    "a call of what another call returns",
    lambda: beside(call("builtins", "getattr", g("posix", "path"), u("os")) + t(bad.PAYLOAD_ARG) + b"R"),
)
add("exec_beside_tensor.pt", "reject", "a call beside a tensor", lambda: beside(bad.PWN))
add("exec_left_out.pt", "warn", "a call beside a tensor: safetensors leaves it out and says so", lambda: beside(bad.PWN), ST)
add(
    "exec_set_state_of_tensor.pt",
    "reject",
    "BUILD on a tensor",
    lambda: beside(tensor() + t(storage(), n(0), ints((4,)), ints((1,))) + b"b"),
)
add("exec_append_to_tensor.pt", "reject", "APPEND to a tensor", lambda: beside(tensor() + n(1) + b"a"))
add("exec_persistent_call.pt", "reject", "a persistent id that is the result of a call", lambda: beside(bad.PWN + b"Q"))
add(
    "exec_location_call.pt",
    "reject",
    "a location that is the result of a call",
    lambda: beside(stored(g("torch", "FloatStorage"), bad.PWN)),
)
add("exec_class_call.pt", "reject", "a storage class that is the result of a call", lambda: beside(stored(bad.PWN, u("cpu"))))
add("exec_storage_class.pt", "reject", "a storage class that torch does not have", lambda: one(tensor(storage("EvilStorage"))))
add("exec_two_pickles.pt", "reject", "a payload behind the STOP", lambda: bad.ckpt(bad.GOOD + bad.P2 + bad.PWN + bad.STOP))
add("exec_next_buffer.pt", "reject", "NEXT_BUFFER", lambda: raw(b"\x97", protocol=b"\x80\x05"))

# Denial of service.
add(
    "dos_long_binput.pt",
    "reject|accept",
    "LONG_BINPUT 0xffffffff: an array for a memo takes 32 GB",
    lambda: one(tensor(), u("w") + b"r\xff\xff\xff\xff"),
)
add("dos_text_put.pt", "reject", "PUT 99999999999999999999", lambda: raw(b"]p99999999999999999999\n"))
add("dos_negative_put.pt", "reject", "PUT -1", lambda: raw(b"]p-1\n"))
add("dos_get_unknown.pt", "reject", "LONG_BINGET of what was never put", lambda: raw(b"j\xff\xff\xff\xff"))
add("dos_nested_marks.pt", "reject", "a million MARKs", lambda: raw(b"(" * 1_000_000))
add("dos_deep_tuples.pt", "reject", "200,000 nested tuples", lambda: raw(b")" + b"\x85" * DEEP))
add("dos_deep_values.pt", "reject", "200,000 dicts, each a value of the next", lambda: raw(b"}K\0" * DEEP, b"N", b"s" * DEEP))
add("dos_deep_keys.pt", "reject", "200,000 dicts, each a key of the next", lambda: raw(b"}" * DEEP, b"Ns" * (DEEP - 1)))
add(
    "dos_deep_calls.pt",
    "reject",
    "200,000 nested calls",
    lambda: raw(g("m", "X"), b"q\x00", b"h\x00" * DEEP, b")R", b"\x85R" * DEEP),
)
add(
    "dos_deep_states.pt",
    "reject",
    "200,000 nested states",
    lambda: raw(g("m", "X"), b"q\x000", b"h\x00)R" * DEEP, b"N", b"b" * DEEP),
)
add("dos_deep_functions.pt", "reject", "200,000 calls of calls", lambda: raw(g("m", "X"), b")R" * DEEP))
add(
    "dos_many_sets.pt",
    "reject",
    "2 KB of deflated EMPTY_SETs: 2 million objects",
    lambda: deflated(bad.P4 + b"(" + b"\x8f" * 2_000_000 + b"l" + bad.STOP),
)
add(
    "dos_many_dicts.pt",
    "reject",
    "2 KB of deflated EMPTY_DICTs: 2 million objects",
    lambda: deflated(bad.P2 + b"(" + b"}" * 2_000_000 + b"l" + bad.STOP),
)
add("dos_below_the_ratio.pt", "reject", "120 MB of text in a file of 1.7 MB", below_the_ratio)
add("dos_doubled_set.pt", "reject", "a set of one 60-fold doubled tuple", lambda: beside(b"\x8f(" + DOUBLED + b"\x90"))
add(
    "dos_doubled_frozenset.pt",
    "reject",
    "a frozenset of it, whose plain form is a set",
    lambda: beside(b"(" + DOUBLED + b"\x91"),
)
add(
    "dos_doubled_pairs.pt",
    "reject",
    "an OrderedDict made of pairs, with it as key",
    lambda: beside(call("collections", "OrderedDict", b"](](" + DOUBLED + b"Nee")),
)
add(
    "dos_doubled_counter.pt",
    "reject",
    "a Counter with it as key",
    lambda: beside(g("collections", "Counter") + b"}" + DOUBLED + b"Ns\x85R"),
)
add("dos_doubled_value.pt", "accept", "it as a plain value, which nobody hashes", lambda: beside(DOUBLED), OUTPUTS)
add("dos_long_places.pt", "reject", "2,000 objects under one key of 200,000 characters", long_places)
add("dos_many_dimensions.pt", "reject", "20,000 dimensions of 255-byte sizes", many_dimensions)
add("dos_digits_key.pt", "reject|accept", "a key of 24,000 digits", lambda: one(tensor(), DIGITS), OUTPUTS)
add("dos_digits_numel.pt", "reject", "a storage of 24,000 digits", lambda: one(tensor(storage(numel_op=DIGITS))))
add("dos_digits_stride.pt", "reject", "a stride of 24,000 digits", lambda: one(rebuilt(t(n(4)), t(DIGITS))))
add("dos_digits_text.pt", "reject", "LONG in text form, a million digits", lambda: raw(b"L" + b"9" * 1_000_000 + b"L\n"))
add("dos_binunicode8.pt", "reject", "BINUNICODE8 announcing 2**63 bytes", lambda: raw(b"\x8d" + struct.pack("<Q", 1 << 63)))
add("dos_bytearray8.pt", "reject", "BYTEARRAY8 announcing 2**64-1 bytes", lambda: raw(b"\x96" + b"\xff" * 8))
add("dos_long4_negative.pt", "reject", "LONG4 of -1 bytes", lambda: raw(b"\x8b\xff\xff\xff\xff"))
add("frame_past_end.pt", "reject", "a FRAME longer than the stream", lambda: framed(1 << 20, b"N."))
add("frame_huge.pt", "reject", "a FRAME of 2**64-1 bytes", lambda: framed((1 << 64) - 1, b"N."))
add("frame_in_frame.pt", "reject", "a FRAME within a FRAME", lambda: framed(11, b"\x95" + struct.pack("<Q", 2) + b"N."))
add("frame_cuts_int.pt", "reject", "a FRAME that ends within a BININT", lambda: framed(3, b"J\1\0" + b"\0\0."))
add("frame_cuts_name.pt", "reject", "a FRAME that ends within a GLOBAL", lambda: framed(6, b"cposix\nmkdir\n."))
add("pop_below_mark.pt", "reject", "REDUCE that reaches below its MARK", lambda: raw(MKDIR, bad.PAYLOAD_ARG, b"\x85(R1"))
add("pop_empty.pt", "reject", "POP of an empty stack", lambda: raw(b"0N"))
add("mark_missing.pt", "reject", "TUPLE without a MARK", lambda: raw(b"t"))
add("odd_items.pt", "reject", "SETITEMS with a key and no value", lambda: raw(b"}(K\1u"))
add("bad_utf8.pt", "reject", "BINUNICODE that is not UTF-8", lambda: raw(b"X\1\0\0\0\xff"))
add("global_not_text.pt", "reject", "STACK_GLOBAL of two ints", lambda: raw(b"K\1K\2\x93"))
add(
    "global_surrogate.pt",
    "reject",
    "a global whose name is half a character",
    lambda: beside(u("m") + u(b"\xed\xa0\x80") + b"\x93"),
)
add(
    "global_newline.pt",
    "reject",
    "a global with line breaks and escapes in its name",
    lambda: beside(u("m\x1b[2J\nX") + u("\u202ey") + b"\x93"),
)
add("no_stop.pt", "reject", "a pickle without STOP", lambda: bad.ckpt(bad.GOOD[:-1]))
add("empty_pickle.pt", "reject", "an empty pickle", lambda: bad.ckpt(b""))

# What torch means.
add(
    "torch_dup_key.pt",
    "reject",
    "the key w twice, with different tensors",
    lambda: bad.ckpt(bad.sd(("w", tensor()), ("w", flat("1"))), {"0": bad.F4, "1": bytes(16)}),
    OUTPUTS,
)
add("torch_negative_stride.pt", "reject", "stride -1 from the last element", lambda: one(tensor(off=3, stride=(-1,))))
add("torch_negative_size.pt", "reject", "size -4", lambda: one(tensor(size=(-4,))))
add("torch_negative_offset.pt", "reject", "storage_offset -1", lambda: one(tensor(off=-1)))
add("torch_negative_numel.pt", "reject", "a storage of -4 elements", lambda: one(tensor(storage(numel=-4))))
add("torch_bool_size.pt", "reject", "size (True,)", lambda: one(rebuilt(t(bad.TRUE), ints((1,)))))
add("torch_list_size.pt", "reject", "a size that is a list", lambda: one(rebuilt(b"](K\4e", ints((1,)))))
add("torch_ranks_differ.pt", "reject", "two sizes, one stride", lambda: one(tensor(size=(2, 2))))
add(
    "torch_empty_huge.pt",
    "reject|warn",
    "shape (2**62, 2**62, 0): torch overflows before the 0 helps",
    lambda: one(tensor(size=(1 << 62, 1 << 62, 0), stride=(0, 0, 1))),
    OUTPUTS,
)
add("torch_65_dimensions.pt", "reject", "65 dimensions", lambda: one(tensor(size=(1,) * 65, stride=(1,) * 65)))
add(
    "torch_conj_float.pt",
    "reject",
    "a float tensor with the conj bit, which torch does not load",
    lambda: one(tensor(meta=d((u("conj"), bad.TRUE)))),
    OUTPUTS,
)
add(
    "torch_unknown_bit.pt",
    "reject",
    "tensor metadata that torch does not know",
    lambda: one(tensor(meta=d((u("evil"), bad.TRUE)))),
)
add("torch_missing_storage.pt", "reject", "a storage that the archive does not hold", lambda: one(tensor(), records={}))
add(
    "torch_key_traversal.pt",
    "reject",
    "a storage key that climbs out of the archive",
    lambda: one(flat("../../../../etc/passwd")),
)
add("torch_key_of_pickle.pt", "reject", "a storage key that climbs to the pickle", lambda: one(flat("../data.pkl")))
add("torch_key_empty.pt", "reject", "an empty storage key, and a record data/", lambda: one(flat(""), records={"": bad.F4}))
add("torch_two_types.pt", "reject", "one storage as float and as int", lambda: two(tensor(), tensor(storage("IntStorage"))))
add("torch_two_sizes.pt", "reject", "one storage with two sizes", lambda: two(tensor(), flat(numel=2)))
add(
    "torch_byteorder_line.pt",
    "reject",
    "byteorder record 'little' and a line break",
    lambda: bad.ckpt(bad.GOOD, byteorder=b"little\n"),
)
add(
    "torch_location_escape.pt",
    "accept",
    "a location with an escape sequence and a line break",
    lambda: one(tensor(storage(loc="cuda\x1b[2J\n:1"))),
    OUTPUTS,
)
add(
    "torch_location_surrogate.pt",
    "accept",
    "a location that is half a character",
    lambda: one(tensor(storage(loc=b"\xed\xa0\x80"))),
    OUTPUTS,
)

# The zip container.
add("zip_count_low.pt", "reject", "the end record counts one record less", lambda: ended(here=-1, count=-1))
add("zip_count_high.pt", "reject", "the end record counts one record more", lambda: ended(here=1, count=1))
add("zip_count_65534.pt", "reject", "the end record counts 65,534 records", lambda: ended(here=65_530, count=65_530))
add("zip_counts_differ.pt", "reject", "its two counts differ", lambda: ended(count=1))
add("zip_disk.pt", "reject", "the second of several volumes", lambda: ended(disk=1, start_disk=1))
add("zip_directory_size.pt", "reject", "the directory is one byte larger", lambda: ended(size=1))
add("zip_directory_start.pt", "reject", "the directory starts one byte later", lambda: ended(start=1))
add("zip_directory_far.pt", "reject", "the directory starts at 4 GB", lambda: ended(start=(1 << 32) - 70_000))
add("zip_comment_length.pt", "reject", "a comment of 65,000 bytes that is not there", lambda: ended(comment=65_000))
add("zip_gap_before_end.pt", "reject", "hidden bytes between directory and end record", lambda: ended(before=b"hidden"))
add("zip64_end.pt", "accept", "a zip64 end record that agrees", with_end64)
add("zip64_end_count.pt", "reject", "a zip64 end record that counts otherwise", lambda: with_end64(count=1))
add("zip64_locator.pt", "reject", "a zip64 locator that points to 2**63", lambda: with_end64(locator=1 << 63))
add("zip64_locator_zero.pt", "reject", "a zip64 locator that points to the start", lambda: with_end64(locator=0))
add("zip64_field_missing.pt", "reject", "sizes of 0xffffffff without a zip64 field", lambda: wide(b""))
add("zip64_field_short.pt", "reject", "a zip64 field with one of two sizes", lambda: wide(struct.pack("<HHQ", 1, 8, 16)))
add(
    "zip64_field_cut.pt",
    "reject",
    "a zip64 field longer than the extra field",
    lambda: wide(struct.pack("<HHQ", 1, 60_000, 16)),
)
add("zip_descriptor.pt", "accept", "a true data descriptor", lambda: described(zlib.crc32(bad.F4), 16, 16))
add(
    "zip_descriptor_lies.pt",
    "reject|accept",
    "a data descriptor with other sizes and CRC",
    lambda: described(0, 1 << 30, 1 << 30),
)
add("zip_descriptor_missing.pt", "reject|accept", "a data descriptor that is not there", described)
add("zip_nested_record.pt", "reject", "a record within the payload of another", nested_record)
add(
    "zip_twin_entry.pt",
    "reject",
    "the directory names one record twice",
    lambda: bad.ckpt(bad.GOOD, cd_extra=[(0, (None,) * 8)]),
)
add(
    "zip_borrowed_offset.pt",
    "reject",
    "two names, one local header",
    lambda: bad.ckpt(bad.GOOD, cd_extra=[(2, (b"archive/data/1", *(None,) * 7))]),
)
add("zip_far_offset.pt", "reject", "a record at 4 GB", lambda: record(c_off=0xFFFFFFF0))
add("zip_sizes_differ.pt", "reject", "stored, but with two sizes", lambda: record(usize=32))
add("zip_local_size.pt", "reject", "a local header with another size", lambda: record(l_usize=12))
add("zip_local_crc.pt", "reject", "a local header with another CRC", lambda: record(l_crc=1))
add("zip_local_method.pt", "reject", "a local header with another method", lambda: record(l_method=8))
add("zip_local_encrypted.pt", "reject", "encrypted by the local header alone", lambda: record(l_flags=1))
add("zip_strong_encryption.pt", "reject", "strongly encrypted", lambda: record(flags=0x41))
add(
    "zip_extra_into_next.pt", "reject", "a local extra field that reaches into the next record", lambda: record(l_extra_len=100)
)
add(
    "zip_prefix.pt",
    "reject",
    "bytes before the first record that begin like one",
    lambda: bad.ckpt(bad.GOOD, prefix=b"PK\3\4" + bytes(60)),
)
add("zip_magic_alone.pt", "reject", "four bytes", lambda: b"PK\3\4")
add("zip_lzma.pt", "reject", "compressed by LZMA", lambda: record(method=14))
add("zip_crc_zero_one.pt", "warn", "one record without a CRC", lambda: record(crc=0), OUTPUTS)
add(
    "zip_crc_of_pickle.pt",
    "reject",
    "the pickle's CRC is wrong",
    lambda: bad.mkzip([bad.E("archive/data.pkl", bad.GOOD, crc=1), bad.E("archive/data/0", bad.F4)]),
)
add("zip_stowaway.pt", "warn", "a record that belongs to nothing", lambda: with_record("archive/evil.py"), OUTPUTS)
add("zip_backslash.pt", "reject", "a record name with backslashes", lambda: with_record("archive\\..\\evil"))
add("zip_not_utf8.pt", "reject", "a record name that is not UTF-8", lambda: with_record(b"archive/\xff"))
add("zip_escape_name.pt", "reject|warn", "a record name with an escape sequence", lambda: with_record("archive/\x1b[2J\n"))
add(
    "zip_no_folder.pt",
    "reject",
    "data.pkl without a folder around it",
    lambda: bad.mkzip([bad.E("data.pkl", bad.GOOD), bad.E("data/0", bad.F4), bad.E("version", b"3\n")]),
)
add("zip_torchscript.pt", "reject", "a TorchScript archive", lambda: with_record("archive/constants.pkl"))
add("zip_deflated.pt", "accept", "a deflated storage, as zip tools write it", lambda: record(method=8), OUTPUTS)
add(
    "zip_deflated_long_match.pt",
    "accept",
    "a deflated storage of zeros, a little longer than the copy buffer",
    lambda: record(ZEROS, bad.sd(("w", flat(numel=len(ZEROS) // 4))), method=8),
    OUTPUTS,
)
add("zip_deflated_more.pt", "reject", "inflates to more than it declares", lambda: record(method=8, raw=stream(bytes(1 << 20))))
add("zip_deflated_less.pt", "reject", "inflates to less than it declares", lambda: record(method=8, raw=stream(bytes(4))))
add("zip_deflated_garbage.pt", "reject", "is not deflated at all", lambda: record(method=8, raw=b"\xff" * 30))
add(
    "zip_deflated_tail.pt",
    "reject|warn",
    "hidden bytes behind the deflated stream",
    lambda: record(method=8, raw=stream(bad.F4) + b"hidden"),
)

# safetensors.
add("st_reversed.safetensors", "reject", "data_offsets [16, 0]", lambda: entry(data_offsets=[16, 0]))
add("st_negative.safetensors", "reject", "data_offsets [-16, 0]", lambda: entry(data_offsets=[-16, 0]))
add("st_float_offsets.safetensors", "reject", "data_offsets [0.0, 16.0]", lambda: entry(data_offsets=[0.0, 16.0]))
add("st_three_offsets.safetensors", "reject", "three data_offsets", lambda: entry(data_offsets=[0, 8, 16]))
add("st_bool_shape.safetensors", "reject", "shape [true, 4]", lambda: entry(shape=[True, 4]))
add("st_string_shape.safetensors", "reject", "shape ['4']", lambda: entry(shape=["4"]))
add("st_shape_object.safetensors", "reject", "a shape that is an object", lambda: entry(shape={"4": 4}))
add("st_shape_wrong.safetensors", "reject", "shape [5] in 16 bytes", lambda: entry(shape=[5]))
add("st_65_dimensions.safetensors", "reject", "65 dimensions", lambda: entry(shape=[1] * 64 + [4]))
add("st_300_dimensions.safetensors", "reject", "300 dimensions of 2**62: 5,600 digits", lambda: entry(shape=[1 << 62] * 300))
add("st_100000_dimensions.safetensors", "reject", "100,000 dimensions of 2**62", lambda: entry(shape=[1 << 62] * 100_000))
add(
    "st_digits.safetensors",
    "reject",
    "an offset of 10,000 digits",
    lambda: header(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,' + b"9" * 10_000 + b"]}}"),
)
add("st_dtype_unknown.safetensors", "reject", "dtype F128", lambda: entry(dtype="F128"))
add("st_dtype_escape.safetensors", "reject", "a dtype with escape sequences", lambda: entry(dtype="\x1b[2J\nF32"))
add("st_dtype_list.safetensors", "reject", "a dtype that is a list", lambda: entry(dtype=["F32"]))
add("st_entry_list.safetensors", "reject", "an entry that is a list", lambda: header(b'{"w":[4]}'))
add(
    "st_dup_field.safetensors",
    "reject",
    "one entry with two shapes",
    lambda: header(b'{"w":{"dtype":"F32","shape":[2],"shape":[4],"data_offsets":[0,16]}}'),
)
add("st_dup_metadata.safetensors", "reject", "metadata with one name twice", lambda: metadata('{"a":"1","a":"2"}'))
add("st_metadata_number.safetensors", "reject", "metadata with a number", lambda: metadata('{"a":1}'))
add(
    "st_metadata_surrogate.safetensors",
    "reject",
    "a metadata value that is half a character",
    lambda: metadata('{"a":"\\ud800"}'),
    OUTPUTS,
)
add(
    "st_metadata_name_surrogate.safetensors",
    "reject",
    "a metadata name that is half a character",
    lambda: metadata('{"\\ud800":"a"}'),
    OUTPUTS,
)
add(
    "st_metadata_device.safetensors",
    "reject",
    "a metadata device that is half a character",
    lambda: metadata('{"device":"\\ud800"}'),
    OUTPUTS,
)
add("st_metadata_cycle.safetensors", "accept", "aliases that name each other", lambda: metadata('{"a":"b","b":"a"}'), OUTPUTS)
add("st_header_list.safetensors", "reject", "a header that is a list", lambda: header(b"[1,2]"))
add("st_header_number.safetensors", "reject", "a header that is a number", lambda: header(b"12345678"))
add(
    "st_header_text_behind.safetensors",
    "reject",
    "something behind the header's object",
    lambda: header(b"{" + ENTRY + b"} {}"),
)
add("st_header_nul.safetensors", "reject", "a header padded with NULs", lambda: header(b"{" + ENTRY + b"}\0\0\0"))
add("st_header_bom.safetensors", "reject", "a header with a byte order mark", lambda: header(b"\xef\xbb\xbf{" + ENTRY + b"}"))
add(
    "st_header_utf16.safetensors",
    "reject",
    "a header in UTF-16",
    lambda: header((b"{" + ENTRY + b"}").decode().encode("utf-16-le")),
)
add("st_header_deep.safetensors", "reject", "200,000 nested lists in a header", lambda: header(b'{"a":' + b"[" * DEEP))
add(
    "st_header_lists.safetensors",
    "reject",
    "2 MB of empty lists in a header",
    lambda: header(b'{"a":[' + b"[]," * 700_000 + b"[]]}"),
)
add("st_header_zero.safetensors", "reject", "a header of no bytes", lambda: header(b""))
add("st_header_exact.safetensors", "reject", "a header that ends with the file, and no data", lambda: bad.st(bad.OK16))
add(
    "st_header_one_off.safetensors",
    "reject",
    "a header length that is one too large",
    lambda: bad.st(b"{" + ENTRY + b"}", bad.F4, length=len(ENTRY) + 3),
)
# Lengths whose bytes look like the start of something else: '{' and '<', a space before them.
add("st_length_123.safetensors", "accept", "a header of 123 bytes: the byte '{'", lambda: padded(123), OUTPUTS)
add("st_length_15392.safetensors", "accept", "a header of 15,392 bytes: the bytes ' <'", lambda: padded(15_392), OUTPUTS)
add("st_length_31520.safetensors", "accept", "a header of 31,520 bytes: the bytes ' {'", lambda: padded(31_520), OUTPUTS)
add(
    "st_length_32896.safetensors",
    "accept",
    "a header of 32,896 bytes: 0x80, as a pickle starts",
    lambda: padded(32_896),
    OUTPUTS,
)

# Old containers.
LEGACY_KEYS = bad.P2 + MKDIR + bad.PAYLOAD_ARG + b"\x85R" + bad.STOP


def old(value: bytes, key: bytes = u("x"), **given) -> bytes:
    """A legacy file whose tree holds `value` under `key` beside a good tensor."""
    return bad.legacy(bad.P2 + d((u("w"), tensor(bad.lstorage())), (key, value)) + bad.STOP, **given)


add("legacy_good.pt", "accept", "a good legacy file", lambda: bad.legacy(bad.LGOOD), OUTPUTS)
add(
    "exec_legacy_sysinfo.pt",
    "accept",
    "a payload among the facts about the host, which are read and not looked at",
    lambda: bad.legacy(bad.LGOOD, sysinfo=bad.P2 + bad.PWN + bad.STOP),
    OUTPUTS,
)
add(
    "exec_legacy_keys.pt",
    "reject",
    "a payload in the place of the storage keys",
    lambda: bad.legacy(bad.LGOOD, keys_op=LEGACY_KEYS),
)
add("exec_legacy_tree.pt", "reject", "a payload in the tree of a legacy file", lambda: old(MKDIR + bad.PAYLOAD_ARG + b"\x85R"))
add("exec_raw.pt", "reject", "a payload in a bare pickle", lambda: bad.P2 + bad.PWN + bad.STOP)
add("dos_legacy_deep.pt", "reject", "a legacy tree of a million lists", lambda: old(b"]" * 1_000_000 + b"a" * 999_999))
add("dos_legacy_doubled.pt", "reject", "a legacy tree with a key that doubles", lambda: old(n(1), DOUBLED))
add("dos_legacy_digits.pt", "reject", "a storage of more elements than can be printed", lambda: old(tensor(
    t(u("storage"), g("torch", "FloatStorage"), u("9"), u("cpu"), DIGITS, bad.NONE) + bad.PID)))  # fmt: skip
add(
    "dos_legacy_binbytes8.pt",
    "reject",
    "BINBYTES8 of 1 TiB in a legacy tree",
    lambda: old(b"\x8e" + struct.pack("<Q", 1 << 40)),
)
add("dos_legacy_marks.pt", "reject", "a hundred million MARKs", lambda: bad.legacy(bad.P2 + b"(" * 100_000_000))
add("dos_legacy_line.pt", "reject", "a global's name of 50 MB", lambda: bad.legacy(bad.P2 + b"c" + b"x" * 50_000_000))
add(
    "dos_legacy_keys.pt",
    "reject",
    "half a million storage keys that no tensor has",
    lambda: bad.legacy(bad.LGOOD, keys=[str(index) for index in range(500_000)]),
)
add("legacy_cut.pt", "reject", "nothing but the magic number", lambda: bad.MAGIC)
add("legacy_view.pt", "reject", "a view of 2**62 elements", lambda: old(tensor(bad.lstorage(view=t(u("1"), n(0), n(1 << 62))))))
add(
    "tar_many.pt",
    "reject",
    "ten thousand members",
    lambda: bad.tarball([(str(index), b"", {}) for index in range(10_000)]),
)
add("tar_views.pt", "reject", "a hundred thousand views, each of the one before, none in it", lambda: bad.tarball([
    ("storages", bad.tar_parts()[0][:-2] + b"](" + b"".join(
        t(n(index + 1), n(index), n(0), n(5)) for index in range(11, 100_011)) + b"e" + bad.STOP, {}),
    ("tensors", bad.tar_parts()[1], {}),
    ("pickle", bad.tar_parts()[2], {}),
]))  # fmt: skip

# Names.
add("key_tuple.pt", "reject|accept", "a key that is a tuple", lambda: one(tensor(), ints((1, 2))))
add("key_tuple_named.pt", "reject", "a key that is a tuple, where keys must be names", lambda: one(tensor(), ints((1, 2))), ST)
add("key_reserved.pt", "reject", "a tensor called __metadata__", lambda: one(tensor(), "__metadata__"), ST)
add(
    "key_long.pt",
    "reject",
    "a key of a million characters, twice",
    lambda: bad.ckpt(bad.sd(("k" * 1_000_000, tensor()), ("k" * 1_000_000, tensor()))),
    OUTPUTS,
)
add(
    "key_bidi.pt",
    "accept",
    "a key with escapes, a NUL and a right-to-left override",
    lambda: one(tensor(), "a\x1b[31m\0\r\u202e\u2028b"),
    OUTPUTS,
)
