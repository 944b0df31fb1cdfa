"""The containers of older torch, bare pickles, and what is wrong in them."""

from __future__ import annotations

import struct

from hostile.cases import DIGITS, DOUBLED, MKDIR, OUTPUTS, Family, bad, d, g, n, t, tensor, u

FAMILY = Family("Old containers")
add = FAMILY.add


LEGACY_KEYS = bad.P2 + MKDIR + bad.PAYLOAD_ARG + b"\x85R" + bad.STOP


def old(value: bytes, key: bytes = u("x"), **given) -> bytes:
    """A legacy file whose tree holds `value` under `key` beside a good tensor."""
    return bad.legacy(
        bad.P2 + d((u("w"), tensor(bad.lstorage())), (key, value)) + bad.STOP, **given
    )


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
add(
    "exec_legacy_tree.pt",
    "reject",
    "a payload in the tree of a legacy file",
    lambda: old(MKDIR + bad.PAYLOAD_ARG + b"\x85R"),
)
add("exec_raw.pt", "reject", "a payload in a bare pickle", lambda: bad.P2 + bad.PWN + bad.STOP)
add(
    "dos_legacy_deep.pt",
    "reject",
    "a legacy tree of a million lists",
    lambda: old(b"]" * 1_000_000 + b"a" * 999_999),
)
add(
    "dos_legacy_doubled.pt",
    "reject",
    "a legacy tree with a key that doubles",
    lambda: old(n(1), DOUBLED),
)
add(
    "dos_legacy_digits.pt",
    "reject",
    "a storage of more elements than can be printed",
    lambda: old(
        tensor(
            t(u("storage"), g("torch", "FloatStorage"), u("9"), u("cpu"), DIGITS, bad.NONE)
            + bad.PID
        )
    ),
)
add(
    "dos_legacy_binbytes8.pt",
    "reject",
    "BINBYTES8 of 1 TiB in a legacy tree",
    lambda: old(b"\x8e" + struct.pack("<Q", 1 << 40)),
)
add(
    "dos_legacy_marks.pt",
    "reject",
    "a hundred million MARKs",
    lambda: bad.legacy(bad.P2 + b"(" * 100_000_000),
)
add(
    "dos_legacy_line.pt",
    "reject",
    "a global's name of 50 MB",
    lambda: bad.legacy(bad.P2 + b"c" + b"x" * 50_000_000),
)
add(
    "dos_legacy_keys.pt",
    "reject",
    "half a million storage keys that no tensor has",
    lambda: bad.legacy(bad.LGOOD, keys=[str(index) for index in range(500_000)]),
)
add("legacy_cut.pt", "reject", "nothing but the magic number", lambda: bad.MAGIC)
add(
    "legacy_view.pt",
    "reject",
    "a view of 2**62 elements",
    lambda: old(tensor(bad.lstorage(view=t(u("1"), n(0), n(1 << 62))))),
)
add(
    "tar_many.pt",
    "reject",
    "ten thousand members",
    lambda: bad.tarball([(str(index), b"", {}) for index in range(10_000)]),
)
add(
    "tar_views.pt",
    "reject",
    "a hundred thousand views, each of the one before, none in it",
    lambda: bad.tarball(
        [
            (
                "storages",
                bad.tar_parts()[0][:-2]
                + b"]("
                + b"".join(t(n(index + 1), n(index), n(0), n(5)) for index in range(11, 100_011))
                + b"e"
                + bad.STOP,
                {},
            ),
            ("tensors", bad.tar_parts()[1], {}),
            ("pickle", bad.tar_parts()[2], {}),
        ]
    ),
)


def tarred(
    storages: bytes | None = None, tensors: bytes | None = None, pickle: bytes | None = None
) -> bytes:
    """A tar file of torch before 0.1.11, some of whose members are others."""
    parts = zip(
        ("storages", "tensors", "pickle"), (storages, tensors, pickle), bad.tar_parts(), strict=True
    )
    return bad.tarball(
        [(name, usual if given is None else given, {}) for name, given, usual in parts]
    )


def sized_header(field: bytes) -> bytes:
    """The tar file whose first header gives its size as `field` (12 bytes), with the right
    checksum.
    """
    block = bytearray(tarred())
    block[124:136] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block)


def streamed(payload: bytes) -> bytes:
    """A bare pickle with a torch stream inside."""
    given = b"B" + struct.pack("<I", len(payload)) + payload
    return (
        b"\x80\x03"
        + d((u("w"), g("torch.storage", "_load_from_bytes") + given + b"\x85R"))
        + bad.STOP
    )


LSTREAM = bad.legacy(bad.P2 + bad.lstorage() + bad.STOP)

add(
    "exec_raw_text.pkl",
    "reject",
    "a payload in protocol 0",
    lambda: b"cposix\nmkdir\n(S'CKPTCONV_PWNED'\ntR.",
)
add(
    "exec_raw_beside.pkl",
    "reject",
    "a payload beside a tensor in a bare pickle",
    lambda: (
        b"\x80\x03"
        + d(
            (
                u("w"),
                g("torch.storage", "_load_from_bytes")
                + b"B"
                + struct.pack("<I", len(LSTREAM))
                + LSTREAM
                + b"\x85R",
            ),
            (u("x"), bad.PWN),
        )
        + bad.STOP
    ),
)
add(
    "exec_raw_nested.pkl",
    "reject",
    "a stream within a bare pickle, with a payload as its tree",
    lambda: streamed(bad.legacy(bad.P2 + bad.PWN + bad.STOP, keys=(), blobs=())),
)
add(
    "exec_tar_pickle.pt",
    "reject",
    "a payload in the tree of a tar file",
    lambda: tarred(pickle=bad.P2 + d((u("w"), bad.PWN)) + bad.STOP),
)
add(
    "exec_tar_storages.pt",
    "reject",
    "a payload in its storages",
    lambda: tarred(bad.P2 + bad.PWN + bad.STOP),
    field="storages",
)
add(
    "exec_tar_tensors.pt",
    "reject",
    "a payload in its tensors",
    lambda: tarred(tensors=bad.P2 + bad.PWN + bad.STOP),
    field="tensors",
)
add(
    "dos_raw_deep.pkl",
    "reject",
    "a bare pickle of a million lists",
    lambda: bad.P2 + b"]" * 1_000_000 + b"a" * 999_999 + bad.STOP,
)
add(
    "dos_raw_doubled.pkl",
    "reject",
    "a bare pickle with a key that doubles 60 times",
    lambda: bad.P2 + b"}" + DOUBLED + b"Ns" + bad.STOP,
)
add(
    "dos_raw_binbytes8.pkl",
    "reject",
    "a bare pickle that announces 1 TiB",
    lambda: bad.P4 + b"\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
)
add(
    "dos_raw_nested.pkl",
    "reject",
    "streams ten deep in each other",
    lambda: _streams(10),
    field="pickle",
)
add(
    "dos_raw_many.pkl",
    "reject",
    "3 MB of small ints",
    lambda: bad.P2 + b"](" + b"K\1" * 1_500_000 + b"e" + bad.STOP,
)
add(
    "dos_raw_tuples.pkl",
    "reject",
    "2 MB of tuples of one",
    lambda: bad.P2 + b"](" + b"N\x85" * 1_000_000 + b"e" + bad.STOP,
)
add(
    "dos_raw_pairs.pkl",
    "reject",
    "3 MB of pairs",
    lambda: bad.P2 + b"}(" + b"K\1N" * 1_000_000 + b"u" + bad.STOP,
)
add(
    "dos_raw_calls.pkl",
    "reject",
    "2 MB of calls of one name",
    lambda: bad.P2 + g("m", "X") + b"q\0](" + b"h\0)R" * 500_000 + b"e0" + bad.STOP,
)
add(
    "dos_raw_texts.pkl",
    "reject",
    "3 MB of texts of two letters",
    lambda: (
        bad.P4
        + b"]("
        + b"".join(b"\x8c\2%c%c" % (65 + at % 26, 65 + at // 26 % 26) for at in range(750_000))
        + b"e"
        + bad.STOP
    ),
)
add(
    "dos_raw_memo.pkl",
    "reject",
    "a million MEMOIZE",
    lambda: bad.P4 + b"N" + b"\x94" * 1_000_000 + bad.STOP,
)
add(
    "dos_raw_lines.pkl",
    "reject",
    "a number of ten million digits",
    lambda: b"(lp0\nI" + b"9" * 10_000_000 + b"\na.",
)


def _streams(levels: int) -> bytes:
    made = LSTREAM
    for _ in range(levels):
        made = streamed(made)
    return made


add(
    "legacy_count_big_endian.pt",
    "reject",
    "an element count in the other byte order",
    lambda: bad.legacy(bad.LGOOD, blobs=()) + struct.pack(">q", 4) + bad.F4,
)
add(
    "legacy_key_twice.pt",
    "reject",
    "one storage key twice",
    lambda: bad.legacy(bad.LGOOD, keys=("0", "0")),
    field="storage keys",
)
add(
    "legacy_key_missing.pt",
    "reject",
    "no storage keys",
    lambda: bad.legacy(bad.LGOOD, keys=(), blobs=()),
    field="storage 0",
)
add(
    "legacy_blob_missing.pt",
    "reject",
    "the bytes of the storage are missing",
    lambda: bad.legacy(bad.LGOOD, blobs=()),
    field="storage 0",
)
add(
    "legacy_blob_short.pt",
    "reject",
    "one byte of the storage is missing",
    lambda: bad.legacy(bad.LGOOD)[:-1],
    field="storage 0",
)
add(
    "legacy_view_negative.pt",
    "reject",
    "a view from element -1",
    lambda: old(tensor(bad.lstorage(view=t(u("1"), n(-1), n(4))))),
)
add(
    "legacy_view_of_view.pt",
    "reject",
    "a view of a view beyond it",
    lambda: old(tensor(bad.lstorage(view=t(u("1"), n(4), n(1))))),
)
add(
    "legacy_protocol.pt",
    "reject",
    "protocol 1002",
    lambda: bad.legacy(bad.LGOOD).replace(bad.n(1001), bad.n(1002), 1),
    field="protocol",
)
add(
    "legacy_big_endian.pt",
    "reject|accept",
    "a host that says it was big-endian",
    lambda: bad.legacy(
        bad.LGOOD,
        sysinfo=bad.P2
        + d((u("protocol_version"), n(1001)), (u("little_endian"), bad.FALSE))
        + bad.STOP,
    ),
)
add("legacy_twice.pt", "reject", "two checkpoints in one file", lambda: bad.legacy(bad.LGOOD) * 2)
add(
    "tar_size_negative.pt",
    "reject",
    "a member of -1 bytes, in base 256",
    lambda: sized_header(b"\xff" * 12),
)
add(
    "tar_size_huge.pt",
    "reject",
    "a member of 2**80 bytes, in base 256",
    lambda: sized_header(b"\x80\0" + b"\xff" * 10),
)
add(
    "tar_size_text.pt",
    "reject",
    "a member whose size is not a number",
    lambda: sized_header(b"zzzzzzzzzzz\0"),
)
add("tar_checksum.pt", "reject", "a header whose checksum is wrong", lambda: b"x" + tarred()[1:])
add("tar_cut.pt", "reject", "a tar file that is cut off", lambda: tarred()[:700])
add(
    "tar_pax_size.pt",
    "reject",
    "an extended header that gives another size",
    lambda: bad.tarball(
        [
            ("storages", bad.tar_parts()[0], {"pax_headers": {"size": "99999999999999999999"}}),
            ("tensors", bad.tar_parts()[1], {}),
            ("pickle", bad.tar_parts()[2], {}),
        ],
        fmt=2,
    ),
)
add(
    "tar_hard_link.pt",
    "reject",
    "a member that is a hard link",
    lambda: bad.tarball(
        [
            ("storages", b"", {"type": b"1", "linkname": "pickle"}),
            ("tensors", bad.tar_parts()[1], {}),
            ("pickle", bad.tar_parts()[2], {}),
        ]
    ),
)
add(
    "tar_stride_huge.pt",
    "reject",
    "a stride of 2**62",
    lambda: tarred(tensors=bad.tar_parts(strides=(1 << 62,))[1]),
    field="storage 11",
)
add(
    "tar_offset_negative.pt",
    "reject",
    "an offset of -1",
    lambda: tarred(tensors=bad.tar_parts(off=-1)[1]),
    field="storage_offset",
)
add(
    "tar_numel_negative.pt",
    "reject",
    "a storage of -4 elements",
    lambda: tarred(bad.tar_parts(numel=-4)[0]),
    field="storage 11",
)
add(
    "tar_count_negative.pt",
    "reject",
    "a count of -1 storages",
    lambda: tarred(bad.tar_parts(nstor=-1)[0]),
    field="storages",
)
add(
    "tar_behind_pickle.pt",
    "reject",
    "a second pickle with a payload behind the tree",
    lambda: tarred(pickle=bad.tar_parts()[2] + bad.P2 + bad.PWN + bad.STOP),
    field="pickle",
)
