"""Files that would run code in any unpickler: the payload is a call of posix.mkdir."""

from __future__ import annotations

from hostile.cases import (
    MKDIR,
    ST,
    Family,
    bad,
    beside,
    call,
    d,
    g,
    ints,
    n,
    one,
    raw,
    rebuilt,
    storage,
    stored,
    t,
    tensor,
    u,
)

FAMILY = Family("Code execution")
add = FAMILY.add


add("exec_newobj.pt", "reject", "NEWOBJ", lambda: beside(MKDIR + bad.PAYLOAD_ARG + b"\x85\x81"))
add(
    "exec_newobj_ex.pt",
    "reject",
    "NEWOBJ_EX with keyword arguments",
    lambda: beside(MKDIR + bad.PAYLOAD_ARG + b"\x85}\x92"),
)
add("exec_inst.pt", "reject", "INST", lambda: beside(b"(" + bad.PAYLOAD_ARG + b"iposix\nmkdir\n"))
add("exec_obj.pt", "reject", "OBJ", lambda: beside(b"(" + MKDIR + bad.PAYLOAD_ARG + b"o"))
add(
    "exec_getattr.pt",
    "reject",
    "a call of what another call returns",
    lambda: beside(
        call("builtins", "getattr", g("posix", "path"), u("os")) + t(bad.PAYLOAD_ARG) + b"R"
    ),
)
add("exec_beside_tensor.pt", "reject", "a call beside a tensor", lambda: beside(bad.PWN))
add(
    "exec_left_out.pt",
    "warn",
    "a call beside a tensor: safetensors leaves it out and says so",
    lambda: beside(bad.PWN),
    (ST,),
)
add(
    "exec_set_state_of_tensor.pt",
    "reject",
    "BUILD on a tensor",
    lambda: beside(tensor() + t(storage(), n(0), ints((4,)), ints((1,))) + b"b"),
)
add(
    "exec_append_to_tensor.pt",
    "reject",
    "APPEND to a tensor",
    lambda: beside(tensor() + n(1) + b"a"),
)
add(
    "exec_persistent_call.pt",
    "reject",
    "a persistent id that is the result of a call",
    lambda: beside(bad.PWN + b"Q"),
)
add(
    "exec_location_call.pt",
    "reject",
    "a location that is the result of a call",
    lambda: beside(stored(g("torch", "FloatStorage"), bad.PWN)),
)
add(
    "exec_class_call.pt",
    "reject",
    "a storage class that is the result of a call",
    lambda: beside(stored(bad.PWN, u("cpu"))),
)
add(
    "exec_storage_class.pt",
    "reject",
    "a storage class that torch does not have",
    lambda: one(tensor(storage("EvilStorage"))),
)
add(
    "exec_two_pickles.pt",
    "reject",
    "a payload behind the STOP",
    lambda: bad.ckpt(bad.GOOD + bad.P2 + bad.PWN + bad.STOP),
)
add("exec_next_buffer.pt", "reject", "NEXT_BUFFER", lambda: raw(b"\x97", protocol=b"\x80\x05"))

add("exec_function_call.pt", "reject", "a call of a call", lambda: beside(bad.PWN + b")R"))
add(
    "exec_size_call.pt",
    "reject",
    "a tensor whose size is the result of a call",
    lambda: one(rebuilt(bad.PWN, ints((1,)))),
)
add(
    "exec_offset_call.pt",
    "reject",
    "a tensor whose storage_offset is",
    lambda: one(tensor(extra=b"").replace(b"K\0", bad.PWN, 1)),
)
add(
    "exec_hooks_call.pt",
    "accept",
    "tensor hooks that are, which are read and not looked at",
    lambda: one(tensor().replace(bad.ODICT, bad.PWN, 1)),
)
add("exec_metadata_call.pt", "reject", "tensor metadata that is", lambda: one(tensor(meta=bad.PWN)))
add("exec_key_call.pt", "reject", "a key that is", lambda: one(tensor(), bad.PWN))
add(
    "exec_numel_call.pt",
    "reject",
    "a storage's size that is",
    lambda: one(tensor(storage(numel_op=bad.PWN))),
)
add(
    "exec_dtype_call.pt",
    "reject",
    "a dtype that is",
    lambda: one(
        tensor(storage("UntypedStorage", numel=16), fn="_rebuild_tensor_v3", extra=bad.PWN)
    ),
)
add(
    "exec_parameter.pt",
    "reject",
    "a Parameter over a call",
    lambda: one(call("torch._utils", "_rebuild_parameter", bad.PWN, bad.FALSE, bad.ODICT)),
)
add(
    "exec_subclass.pt",
    "reject",
    "_rebuild_from_type_v2 of posix.mkdir, as if it were a class",
    lambda: one(
        call("torch._tensor", "_rebuild_from_type_v2", MKDIR, MKDIR, t(bad.PAYLOAD_ARG), d())
    ),
)
add(
    "exec_ordered_dict_state.pt",
    "reject",
    "an OrderedDict with a payload among its attributes",
    lambda: bad.ckpt(
        bad.P2
        + bad.ODICT
        + u("w")
        + tensor()
        + b"s"
        + d((u("_metadata"), bad.PWN))
        + b"b"
        + bad.STOP
    ),
)
add(
    "exec_functools.pt",
    "reject",
    "functools.partial over posix.mkdir",
    lambda: beside(call("functools", "partial", MKDIR, bad.PAYLOAD_ARG) + b")R"),
)
add(
    "exec_numpy_load.pt",
    "reject",
    "numpy.load of a file",
    lambda: beside(call("numpy", "load", u("/etc/passwd"))),
)
add(
    "exec_torch_load.pt",
    "reject",
    "torch.load of a file",
    lambda: beside(call("torch", "load", u("/etc/passwd"))),
)
add(
    "exec_open.pt",
    "reject",
    "builtins.open, which only opens",
    lambda: beside(call("builtins", "open", u("CKPTCONV_PWNED"), u("w"))),
)
add(
    "exec_python2.pt",
    "reject",
    "the same under its Python 2 name",
    lambda: beside(call("__builtin__", "open", u("CKPTCONV_PWNED"), u("w"))),
)
add(
    "exec_dunder.pt",
    "reject",
    "a class reached through __subclasses__",
    lambda: beside(bad.P4[:0] + u("builtins") + u("object.__subclasses__") + b"\x93)R"),
)
add("exec_ext2.pt", "reject", "EXT2", lambda: raw(b"\x83\1\0"))
add("exec_ext4.pt", "reject", "EXT4", lambda: raw(b"\x84\1\0\0\0"))
