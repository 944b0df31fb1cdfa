"""Keys that are not names, or not fit for a terminal."""

from __future__ import annotations

from hostile.cases import OUTPUTS, ST, Family, bad, ints, one, tensor

FAMILY = Family("Names")
add = FAMILY.add


add("key_tuple.pt", "reject|accept", "a key that is a tuple", lambda: one(tensor(), ints((1, 2))))
add(
    "key_tuple_named.pt",
    "reject",
    "a key that is a tuple, where keys must be names",
    lambda: one(tensor(), ints((1, 2))),
    (ST,),
)
add(
    "key_reserved.pt",
    "reject",
    "a tensor called __metadata__",
    lambda: one(tensor(), "__metadata__"),
    (ST,),
)
add(
    "key_long.pt",
    "reject",
    "a key of a million characters, twice",
    lambda: bad.ckpt(bad.sd(("k" * 1_000_000, tensor()), ("k" * 1_000_000, tensor()))),
    OUTPUTS,
)
add(
    "key_wrappers.pt",
    "accept",
    "a key of 200,000 wrappers",
    lambda: one(tensor(), "module." * 200_000 + "w"),
    OUTPUTS,
)
add("key_dots.pt", "accept", "a key of 200,000 dots", lambda: one(tensor(), "." * 200_000), OUTPUTS)
add(
    "key_bidi.pt",
    "accept",
    "a key with escapes, a NUL and a right-to-left override",
    lambda: one(tensor(), "a\x1b[31m\0\r\u202e\u2028b"),
    OUTPUTS,
)
