"""Well-formed pickles whose tensors and storages say what cannot be."""

from __future__ import annotations

from hostile.cases import (
    OUTPUTS,
    Family,
    bad,
    d,
    flat,
    ints,
    one,
    rebuilt,
    storage,
    t,
    tensor,
    two,
    u,
)

FAMILY = Family("What torch means")
add = FAMILY.add


add(
    "torch_dup_key.pt",
    "reject",
    "the key w twice, with different tensors",
    lambda: bad.ckpt(bad.sd(("w", tensor()), ("w", flat("1"))), {"0": bad.F4, "1": bytes(16)}),
    OUTPUTS,
)
add(
    "torch_negative_stride.pt",
    "reject",
    "stride -1 from the last element",
    lambda: one(tensor(off=3, stride=(-1,))),
)
add("torch_negative_size.pt", "reject", "size -4", lambda: one(tensor(size=(-4,))))
add("torch_negative_offset.pt", "reject", "storage_offset -1", lambda: one(tensor(off=-1)))
add(
    "torch_negative_numel.pt",
    "reject",
    "a storage of -4 elements",
    lambda: one(tensor(storage(numel=-4))),
)
add("torch_bool_size.pt", "reject", "size (True,)", lambda: one(rebuilt(t(bad.TRUE), ints((1,)))))
add(
    "torch_list_size.pt",
    "reject",
    "a size that is a list",
    lambda: one(rebuilt(b"](K\4e", ints((1,)))),
)
add("torch_ranks_differ.pt", "reject", "two sizes, one stride", lambda: one(tensor(size=(2, 2))))
add(
    "torch_empty_huge.pt",
    "reject|warn",
    "shape (2**62, 2**62, 0): torch overflows before the 0 helps",
    lambda: one(tensor(size=(1 << 62, 1 << 62, 0), stride=(0, 0, 1))),
    OUTPUTS,
)
add(
    "torch_129_dimensions.pt",
    "reject",
    "129 dimensions",
    lambda: one(tensor(size=(1,) * 129, stride=(1,) * 129)),
)
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
add(
    "torch_missing_storage.pt",
    "reject",
    "a storage that the archive does not hold",
    lambda: one(tensor(), records={}),
)
add(
    "torch_key_traversal.pt",
    "reject",
    "a storage key that climbs out of the archive",
    lambda: one(flat("../../../../etc/passwd")),
)
add(
    "torch_key_of_pickle.pt",
    "reject",
    "a storage key that climbs to the pickle",
    lambda: one(flat("../data.pkl")),
)
add(
    "torch_key_empty.pt",
    "reject",
    "an empty storage key, and a record data/",
    lambda: one(flat(""), records={"": bad.F4}),
)
add(
    "torch_two_types.pt",
    "reject",
    "one storage as float and as int",
    lambda: two(tensor(), tensor(storage("IntStorage"))),
)
add(
    "torch_two_sizes.pt",
    "reject",
    "one storage with two sizes",
    lambda: two(tensor(), flat(numel=2)),
)
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
