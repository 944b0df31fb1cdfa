"""safetensors files whose header lies or is not a header."""

from __future__ import annotations

import json

from hostile.cases import DEEP, ENTRY, OUTPUTS, Family, bad, entry, header, metadata

FAMILY = Family("safetensors headers")
add = FAMILY.add


def padded(length: int) -> bytes:
    """A good safetensors file whose header has `length` bytes."""
    text = b"{" + ENTRY + b"}"
    return header(text + b" " * (length - len(text)))


add(
    "st_reversed.safetensors", "reject", "data_offsets [16, 0]", lambda: entry(data_offsets=[16, 0])
)
add(
    "st_negative.safetensors",
    "reject",
    "data_offsets [-16, 0]",
    lambda: entry(data_offsets=[-16, 0]),
)
add(
    "st_float_offsets.safetensors",
    "reject",
    "data_offsets [0.0, 16.0]",
    lambda: entry(data_offsets=[0.0, 16.0]),
)
add(
    "st_three_offsets.safetensors",
    "reject",
    "three data_offsets",
    lambda: entry(data_offsets=[0, 8, 16]),
)
add("st_bool_shape.safetensors", "reject", "shape [true, 4]", lambda: entry(shape=[True, 4]))
add("st_string_shape.safetensors", "reject", "shape ['4']", lambda: entry(shape=["4"]))
add(
    "st_shape_object.safetensors",
    "reject",
    "a shape that is an object",
    lambda: entry(shape={"4": 4}),
)
add("st_shape_wrong.safetensors", "reject", "shape [5] in 16 bytes", lambda: entry(shape=[5]))
add(
    "st_129_dimensions.safetensors",
    "reject",
    "129 dimensions",
    lambda: entry(shape=[1] * 128 + [4]),
)
add(
    "st_300_dimensions.safetensors",
    "reject",
    "300 dimensions of 2**62: 5,600 digits",
    lambda: entry(shape=[1 << 62] * 300),
)
add(
    "st_100000_dimensions.safetensors",
    "reject",
    "100,000 dimensions of 2**62",
    lambda: entry(shape=[1 << 62] * 100_000),
)
add(
    "st_digits.safetensors",
    "reject",
    "an offset of 10,000 digits",
    lambda: header(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,' + b"9" * 10_000 + b"]}}"),
)
add("st_dtype_unknown.safetensors", "reject", "dtype F128", lambda: entry(dtype="F128"))
add(
    "st_dtype_escape.safetensors",
    "reject",
    "a dtype with escape sequences",
    lambda: entry(dtype="\x1b[2J\nF32"),
)
add("st_dtype_list.safetensors", "reject", "a dtype that is a list", lambda: entry(dtype=["F32"]))
add("st_entry_list.safetensors", "reject", "an entry that is a list", lambda: header(b'{"w":[4]}'))
add(
    "st_dup_field.safetensors",
    "reject",
    "one entry with two shapes",
    lambda: header(b'{"w":{"dtype":"F32","shape":[2],"shape":[4],"data_offsets":[0,16]}}'),
)
add(
    "st_dup_metadata.safetensors",
    "reject",
    "metadata with one name twice",
    lambda: metadata('{"a":"1","a":"2"}'),
)
add(
    "st_metadata_number.safetensors",
    "reject",
    "metadata with a number",
    lambda: metadata('{"a":1}'),
)
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
add(
    "st_metadata_cycle.safetensors",
    "accept",
    "aliases that name each other",
    lambda: metadata('{"a":"b","b":"a"}'),
    OUTPUTS,
)
add("st_header_list.safetensors", "reject", "a header that is a list", lambda: header(b"[1,2]"))
add(
    "st_header_number.safetensors",
    "reject",
    "a header that is a number",
    lambda: header(b"12345678"),
)
add(
    "st_header_text_behind.safetensors",
    "reject",
    "something behind the header's object",
    lambda: header(b"{" + ENTRY + b"} {}"),
)
add(
    "st_header_nul.safetensors",
    "reject",
    "a header padded with NULs",
    lambda: header(b"{" + ENTRY + b"}\0\0\0"),
)
add(
    "st_header_bom.safetensors",
    "reject",
    "a header with a byte order mark",
    lambda: header(b"\xef\xbb\xbf{" + ENTRY + b"}"),
)
add(
    "st_header_utf16.safetensors",
    "reject",
    "a header in UTF-16",
    lambda: header((b"{" + ENTRY + b"}").decode().encode("utf-16-le")),
)
add(
    "st_header_deep.safetensors",
    "reject",
    "200,000 nested lists in a header",
    lambda: header(b'{"a":' + b"[" * DEEP),
)
add(
    "st_header_lists.safetensors",
    "reject",
    "2 MB of empty lists in a header",
    lambda: header(b'{"a":[' + b"[]," * 700_000 + b"[]]}"),
)
add("st_header_zero.safetensors", "reject", "a header of no bytes", lambda: header(b""))
add(
    "st_header_exact.safetensors",
    "reject",
    "a header that ends with the file, and no data",
    lambda: bad.st(bad.OK16),
)
add(
    "st_header_one_off.safetensors",
    "reject",
    "a header length that is one too large",
    lambda: bad.st(b"{" + ENTRY + b"}", bad.F4, length=len(ENTRY) + 3),
)
# Lengths whose bytes look like the start of something else: '{' and '<', a space before them.
add(
    "st_length_123.safetensors",
    "accept",
    "a header of 123 bytes: the byte '{'",
    lambda: padded(123),
    OUTPUTS,
)
add(
    "st_length_15392.safetensors",
    "accept",
    "a header of 15,392 bytes: the bytes ' <'",
    lambda: padded(15_392),
    OUTPUTS,
)
add(
    "st_length_31520.safetensors",
    "accept",
    "a header of 31,520 bytes: the bytes ' {'",
    lambda: padded(31_520),
    OUTPUTS,
)
add(
    "st_length_32896.safetensors",
    "accept",
    "a header of 32,896 bytes: 0x80, as a pickle starts",
    lambda: padded(32_896),
    OUTPUTS,
)

add(
    "st_lists_30MB.safetensors",
    "reject",
    "30 MB of empty lists in a header",
    lambda: header(b'{"a":[' + b"[]," * 10_000_000 + b"[]]}"),
)
add("st_shape_10MB.safetensors", "reject", "10 MB of shape", lambda: entry(shape=[1] * 3_000_000))
add(
    "st_metadata_many.safetensors",
    "reject|accept",
    "300,000 empty texts as metadata",
    lambda: metadata("{" + ",".join(f'"{at}":""' for at in range(300_000)) + "}"),
)
add(
    "st_many_tensors_no_data.safetensors",
    "reject",
    "100,000 tensors of one byte each, all of the same one",
    lambda: bad.st(
        b"{"
        + b",".join(
            b'"%d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}' % at for at in range(100_000)
        )
        + b"}",
        b"\0",
    ),
)
add(
    "st_sparse.safetensors",
    "reject",
    "a header length of zero in a file of a gigabyte",
    lambda: bytes(8) + b"{}" + bytes(1 << 20),
)
add(
    "st_offsets_huge.safetensors",
    "reject",
    "data_offsets of 2**64",
    lambda: entry(data_offsets=[0, 1 << 64]),
)
add("st_null_entry.safetensors", "reject", "an entry that is null", lambda: header(b'{"w":null}'))
add(
    "st_no_dtype.safetensors",
    "reject",
    "an entry without a dtype",
    lambda: header(b'{"w":{"shape":[4],"data_offsets":[0,16]}}'),
    field="w",
)
add(
    "st_misaligned.safetensors",
    "reject|accept",
    "a float at an odd byte",
    lambda: bad.st({"a": bad.ti([1], 0, 1, "U8"), "w": bad.ti([4], 1, 17)}, b"\0" + bad.F4),
)
add(
    "st_alias_itself.safetensors",
    "accept",
    "an alias of itself",
    lambda: metadata('{"w":"w"}'),
    OUTPUTS,
)
add(
    "st_encodings_deep.safetensors",
    "reject",
    "100,000 nested lists where components are told",
    lambda: metadata(json.dumps({"ckptconv.encodings": "[" * 100_000})),
)
add(
    "st_encodings_lies.safetensors",
    "reject",
    "components that are not there",
    lambda: metadata(json.dumps({"ckptconv.encodings": json.dumps({"x": ["sparse_coo", {}]})})),
)
