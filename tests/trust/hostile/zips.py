"""Archives that lie: directories, local headers, sizes, names."""

from __future__ import annotations

import struct
import zlib

from hostile.cases import OUTPUTS, ZEROS, Family, bad, flat, record, with_record

FAMILY = Family("The zip container")
add = FAMILY.add

END = struct.Struct("<4s4H2IH")
END_FIELDS = ("magic", "disk", "start_disk", "here", "count", "size", "start", "comment")


def stream(payload: bytes) -> bytes:
    """A raw deflate stream."""
    return bad.E("x", payload, method=8).raw


def ended(before: bytes = b"", **changes: int) -> bytes:
    """A good file whose end record tells other numbers (each given as what is added to it);
    `before` stands before it.
    """
    good = bad.ckpt(bad.GOOD)
    fields = dict(zip(END_FIELDS, END.unpack(good[-END.size :]), strict=True))
    fields |= {name: fields[name] + change for name, change in changes.items()}
    return good[: -END.size] + before + END.pack(*fields.values())


def with_end64(count: int = 0, locator: int | None = None) -> bytes:
    """A good file with a zip64 end record; its count is wrong by `count`, and `locator` is where
    its locator points.
    """
    good = bad.ckpt(bad.GOOD)
    at = len(good) - END.size
    _, _, _, _, records, size, start, _ = END.unpack(good[at:])
    end64 = struct.pack(
        "<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, records + count, records + count, size, start
    )
    return (
        good[:at]
        + end64
        + struct.pack("<4sIQI", b"PK\6\7", 0, at if locator is None else locator, 1)
        + good[at:]
    )


def many_bombs(count: int, payload: bytes) -> bytes:
    """Storages of zeros, each deflated, and none beyond what is never questioned."""
    raw = stream(payload)
    records = {
        str(key): bad.E(f"archive/data/{key}", payload, method=8, raw=raw) for key in range(count)
    }
    return bad.ckpt(
        bad.sd(*((f"w{key}", flat(key, numel=len(payload) // 4)) for key in records)), records
    )


def wide(extra: bytes) -> bytes:
    """A storage whose sizes stand in the extra field `extra`."""
    return record(usize=1 << 32, csize=1 << 32, c_extra=extra)


def nested_record() -> bytes:
    """Two storages; the second lies within the payload of the first, local header and all."""
    name = b"archive/data/1"
    inner = (
        struct.pack(
            "<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0x21, zlib.crc32(bad.F4), 16, 16, len(name), 0
        )
        + name
        + bad.F4
    )
    payload = inner + b"\0" * (-len(inner) % 16)
    pickle = bad.sd(("a", flat(numel=len(payload) // 4)), ("b", flat("1")))
    at = record(payload, pickle).index(inner)
    return record(
        payload, pickle, {"cd_extra": [(0, (name, 0, 0, zlib.crc32(bad.F4), 16, 16, at, b""))]}
    )


def described(*descriptor: int) -> bytes:
    """A storage whose CRC and sizes stand behind its payload, in a data descriptor with these
    numbers.
    """
    trail = struct.pack(f"<4s{len(descriptor)}I", b"PK\7\x08", *descriptor) if descriptor else b""
    return record(raw=bad.F4 + trail, csize=16, flags=8, l_crc=0, l_csize=0, l_usize=0)


add(
    "zip_count_low.pt",
    "reject",
    "the end record counts one record less",
    lambda: ended(here=-1, count=-1),
)
add(
    "zip_count_high.pt",
    "reject",
    "the end record counts one record more",
    lambda: ended(here=1, count=1),
)
add(
    "zip_count_65534.pt",
    "reject",
    "the end record counts 65,534 records",
    lambda: ended(here=65_530, count=65_530),
)
add("zip_counts_differ.pt", "reject", "its two counts differ", lambda: ended(count=1))
add("zip_disk.pt", "reject", "the second of several volumes", lambda: ended(disk=1, start_disk=1))
add("zip_directory_size.pt", "reject", "the directory is one byte larger", lambda: ended(size=1))
add(
    "zip_directory_start.pt",
    "reject",
    "the directory starts one byte later",
    lambda: ended(start=1),
)
add(
    "zip_directory_far.pt",
    "reject",
    "the directory starts at 4 GB",
    lambda: ended(start=(1 << 32) - 70_000),
)
add(
    "zip_comment_length.pt",
    "reject",
    "a comment of 65,000 bytes that is not there",
    lambda: ended(comment=65_000),
)
add(
    "zip_gap_before_end.pt",
    "reject",
    "hidden bytes between directory and end record",
    lambda: ended(before=b"hidden"),
)
add("zip64_end.pt", "accept", "a zip64 end record that agrees", with_end64)
add(
    "zip64_end_count.pt",
    "reject",
    "a zip64 end record that counts otherwise",
    lambda: with_end64(count=1),
)
add(
    "zip64_locator.pt",
    "reject",
    "a zip64 locator that points to 2**63",
    lambda: with_end64(locator=1 << 63),
)
add(
    "zip64_locator_zero.pt",
    "reject",
    "a zip64 locator that points to the start",
    lambda: with_end64(locator=0),
)
add(
    "zip64_field_missing.pt",
    "reject",
    "sizes of 0xffffffff without a zip64 field",
    lambda: wide(b""),
)
add(
    "zip64_field_short.pt",
    "reject",
    "a zip64 field with one of two sizes",
    lambda: wide(struct.pack("<HHQ", 1, 8, 16)),
)
add(
    "zip64_field_cut.pt",
    "reject",
    "a zip64 field longer than the extra field",
    lambda: wide(struct.pack("<HHQ", 1, 60_000, 16)),
)
add(
    "zip_descriptor.pt",
    "accept",
    "a true data descriptor",
    lambda: described(zlib.crc32(bad.F4), 16, 16),
)
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
add(
    "zip_local_method.pt",
    "reject",
    "a local header with another method",
    lambda: record(l_method=8),
)
add(
    "zip_local_encrypted.pt",
    "reject",
    "encrypted by the local header alone",
    lambda: record(l_flags=1),
)
add("zip_strong_encryption.pt", "reject", "strongly encrypted", lambda: record(flags=0x41))
add(
    "zip_extra_into_next.pt",
    "reject",
    "a local extra field that reaches into the next record",
    lambda: record(l_extra_len=100),
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
    lambda: bad.mkzip(
        [bad.E("archive/data.pkl", bad.GOOD, crc=1), bad.E("archive/data/0", bad.F4)]
    ),
)
add(
    "zip_stowaway.pt",
    "warn",
    "a record that belongs to nothing",
    lambda: with_record("archive/evil.py"),
    OUTPUTS,
)
add(
    "zip_backslash.pt",
    "reject",
    "a record name with backslashes",
    lambda: with_record("archive\\..\\evil"),
)
add(
    "zip_not_utf8.pt",
    "reject",
    "a record name that is not UTF-8",
    lambda: with_record(b"archive/\xff"),
)
add(
    "zip_escape_name.pt",
    "reject|warn",
    "a record name with an escape sequence",
    lambda: with_record("archive/\x1b[2J\n"),
)
add(
    "zip_no_folder.pt",
    "reject",
    "data.pkl without a folder around it",
    lambda: bad.mkzip(
        [bad.E("data.pkl", bad.GOOD), bad.E("data/0", bad.F4), bad.E("version", b"3\n")]
    ),
)
add(
    "zip_torchscript.pt",
    "reject",
    "a TorchScript archive",
    lambda: with_record("archive/constants.pkl"),
)
add(
    "zip_deflated.pt",
    "accept",
    "a deflated storage, as zip tools write it",
    lambda: record(method=8),
    OUTPUTS,
)
add(
    "zip_deflated_long_match.pt",
    "accept",
    "a deflated storage of zeros, a little longer than the copy buffer",
    lambda: record(ZEROS, bad.sd(("w", flat(numel=len(ZEROS) // 4))), method=8),
    OUTPUTS,
)
add(
    "zip_bomb_many.pt",
    "reject",
    "60 records that inflate to 16 MB each, in 1 MB",
    lambda: many_bombs(60, bytes(1 << 24)),
)
add(
    "zip_deflated_more.pt",
    "reject",
    "inflates to more than it declares",
    lambda: record(method=8, raw=stream(bytes(1 << 20))),
)
add(
    "zip_deflated_less.pt",
    "reject",
    "inflates to less than it declares",
    lambda: record(method=8, raw=stream(bytes(4))),
)
add(
    "zip_deflated_garbage.pt",
    "reject",
    "is not deflated at all",
    lambda: record(method=8, raw=b"\xff" * 30),
)
add(
    "zip_deflated_tail.pt",
    "reject|warn",
    "hidden bytes behind the deflated stream",
    lambda: record(method=8, raw=stream(bad.F4) + b"hidden"),
)
