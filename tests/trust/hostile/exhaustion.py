"""Small files that cost much: time, memory, depth, digits; and streams that contradict their own
structure.
"""

from __future__ import annotations

import random
import struct

from hostile.cases import (
    DEEP,
    DIGITS,
    DOUBLED,
    MKDIR,
    OUTPUTS,
    Family,
    bad,
    beside,
    call,
    deflated,
    g,
    n,
    one,
    raw,
    rebuilt,
    storage,
    t,
    tensor,
    u,
)

FAMILY = Family("Exhaustion")
add = FAMILY.add


def framed(length: int, body: bytes) -> bytes:
    return bad.ckpt(bad.P4 + b"\x95" + struct.pack("<Q", length) + body)


def long_places() -> bytes:
    """2,000 objects under one key of 200,000 characters: 400 MB if each is told its place."""
    return one(b"](" + (g("m", "X") + b")R") * 2000 + b"e", "k" * 200_000)


def many_dimensions() -> bytes:
    """20,000 dimensions of 255-byte sizes, fetched from the memo: a product of 40 million bits."""
    size = bad.MARK + b"\x8a\xff" + b"\x7f" * 255 + b"q\x05" + b"h\x05" * 20_000 + b"t"
    return one(rebuilt(size, b"(" + b"K\0" * 20_001 + b"t"))


def below_the_ratio() -> bytes:
    """120 MB of text in a pickle that is deflated less than a hundredfold, for random bytes stand
    beside it.
    """
    noise = random.Random(1).randbytes(3 << 19)
    return deflated(
        b"\x80\x03B"
        + struct.pack("<I", len(noise))
        + noise
        + b"0"
        + u(b"a" * 120_000_000)
        + bad.STOP
    )


add(
    "dos_long_binput.pt",
    "reject|accept",
    "LONG_BINPUT 0xffffffff: an array for a memo takes 32 GB",
    lambda: one(tensor(), u("w") + b"r\xff\xff\xff\xff"),
)
add(
    "dos_text_put.pt",
    "reject",
    "PUT 99999999999999999999",
    lambda: raw(b"]p99999999999999999999\n"),
)
add("dos_negative_put.pt", "reject", "PUT -1", lambda: raw(b"]p-1\n"))
add(
    "dos_get_unknown.pt",
    "reject",
    "LONG_BINGET of what was never put",
    lambda: raw(b"j\xff\xff\xff\xff"),
)
add("dos_nested_marks.pt", "reject", "a million MARKs", lambda: raw(b"(" * 1_000_000))
add("dos_deep_tuples.pt", "reject", "200,000 nested tuples", lambda: raw(b")" + b"\x85" * DEEP))
add(
    "dos_deep_values.pt",
    "reject",
    "200,000 dicts, each a value of the next",
    lambda: raw(b"}K\0" * DEEP, b"N", b"s" * DEEP),
)
add(
    "dos_deep_keys.pt",
    "reject",
    "200,000 dicts, each a key of the next",
    lambda: raw(b"}" * DEEP, b"Ns" * (DEEP - 1)),
)
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
add(
    "dos_deep_functions.pt",
    "reject",
    "200,000 calls of calls",
    lambda: raw(g("m", "X"), b")R" * DEEP),
)
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
add(
    "dos_doubled_set.pt",
    "reject",
    "a set of one 60-fold doubled tuple",
    lambda: beside(b"\x8f(" + DOUBLED + b"\x90"),
)
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
add(
    "dos_doubled_value.pt",
    "accept",
    "it as a plain value, which nobody hashes",
    lambda: beside(DOUBLED),
    OUTPUTS,
)
add(
    "dos_long_places.pt", "reject", "2,000 objects under one key of 200,000 characters", long_places
)
add("dos_many_dimensions.pt", "reject", "20,000 dimensions of 255-byte sizes", many_dimensions)
add(
    "dos_digits_key.pt",
    "reject|accept",
    "a key of 24,000 digits",
    lambda: one(tensor(), DIGITS),
    OUTPUTS,
)
add(
    "dos_digits_numel.pt",
    "reject",
    "a storage of 24,000 digits",
    lambda: one(tensor(storage(numel_op=DIGITS))),
)
add(
    "dos_digits_stride.pt",
    "reject",
    "a stride of 24,000 digits",
    lambda: one(rebuilt(t(n(4)), t(DIGITS))),
)
add(
    "dos_digits_text.pt",
    "reject",
    "LONG in text form, a million digits",
    lambda: raw(b"L" + b"9" * 1_000_000 + b"L\n"),
)
add(
    "dos_binunicode8.pt",
    "reject",
    "BINUNICODE8 announcing 2**63 bytes",
    lambda: raw(b"\x8d" + struct.pack("<Q", 1 << 63)),
)
add(
    "dos_bytearray8.pt",
    "reject",
    "BYTEARRAY8 announcing 2**64-1 bytes",
    lambda: raw(b"\x96" + b"\xff" * 8),
)
add("dos_long4_negative.pt", "reject", "LONG4 of -1 bytes", lambda: raw(b"\x8b\xff\xff\xff\xff"))
add("frame_past_end.pt", "reject", "a FRAME longer than the stream", lambda: framed(1 << 20, b"N."))
add("frame_huge.pt", "reject", "a FRAME of 2**64-1 bytes", lambda: framed((1 << 64) - 1, b"N."))
add(
    "frame_in_frame.pt",
    "reject",
    "a FRAME within a FRAME",
    lambda: framed(11, b"\x95" + struct.pack("<Q", 2) + b"N."),
)
add(
    "frame_cuts_int.pt",
    "reject",
    "a FRAME that ends within a BININT",
    lambda: framed(3, b"J\1\0" + b"\0\0."),
)
add(
    "frame_cuts_name.pt",
    "reject",
    "a FRAME that ends within a GLOBAL",
    lambda: framed(6, b"cposix\nmkdir\n."),
)
add(
    "pop_below_mark.pt",
    "reject",
    "REDUCE that reaches below its MARK",
    lambda: raw(MKDIR, bad.PAYLOAD_ARG, b"\x85(R1"),
)
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
