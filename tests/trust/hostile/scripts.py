"""TorchScript archives of both kinds, and zip archives of checkpoints, that lie."""

from __future__ import annotations

import json

from hostile.cases import DEEP, OUTPUTS, Family, bad, call, d, g, ints, n, tensor, u

FAMILY = Family("TorchScript and nested archives")
add = FAMILY.add

CLASS = """class Net(Module):
  __parameters__ = ["w", ]
  __buffers__ = []
  w : Tensor
  training : bool
"""
SOURCE = "archive/code/__torch__.py"
ROOT = g("__torch__", "Net") + b")\x81" + d((u("w"), tensor()), (u("training"), bad.TRUE)) + b"b"


def script(
    code: str | bytes | None = CLASS, root: bytes = ROOT, *more: object, method: int = 0
) -> bytes:
    """A TorchScript archive: the text of its classes, the object that its pickle makes."""
    records = [bad.E("archive/constants.pkl", bad.P2 + b")" + bad.STOP), *more]
    if code is not None:
        records.append(
            bad.E(SOURCE, code if isinstance(code, bytes) else code.encode(), method=method)
        )
    return bad.ckpt(bad.P2 + root + bad.STOP, more=records)


def child(name: str, value: bytes) -> bytes:
    """A module with another one inside."""
    return g("__torch__", "Net") + b")\x81" + d((u(name), value)) + b"b"


def nested(depth: int) -> bytes:
    return (g("__torch__", "Net") + b")\x81}" + u("m")) * depth + ROOT + b"sb" * depth


def shared(levels: int) -> bytes:
    """A module that holds another one twice, and so on: 2**levels names."""
    made = ROOT + b"q\x07"
    for _ in range(levels):
        made += (
            b"0"
            + g("__torch__", "Net")
            + b")\x81"
            + d((u("a"), b"h\x07"), (u("b"), b"h\x07"))
            + b"bq\x07"
        )
    return made


add("script_good.pt", "warn", "a good TorchScript archive", script, OUTPUTS)
add(
    "script_runs.pt",
    "reject",
    "a root that is the result of posix.mkdir",
    lambda: script(root=bad.PWN),
)
add(
    "script_runs_in_state.pt",
    "reject",
    "a parameter that is the result of posix.mkdir",
    lambda: script(root=g("__torch__", "Net") + b")\x81" + d((u("w"), bad.PWN)) + b"b"),
)
add(
    "script_code_python.pt",
    "warn",
    "code that is Python with a payload: it is text and stays text",
    lambda: script(CLASS + "\n__import__('os').mkdir('CKPTCONV_PWNED')\n"),
    OUTPUTS,
)
add(
    "script_no_code.pt",
    "reject",
    "no text of its class",
    lambda: script(None),
    field="code/__torch__.py",
)
add(
    "script_other_class.pt",
    "reject",
    "a text of another class",
    lambda: script("class Other(Module):\n  pass\n"),
    field="code/__torch__.py",
)
add(
    "script_class_climbs.pt",
    "reject",
    "a class in the module ..",
    lambda: script(root=g("__torch__....etc", "Net") + b")\x81}b"),
)
add(
    "script_not_utf8.pt",
    "reject",
    "a text of bytes that are not UTF-8",
    lambda: script(b"\xff" * 1000),
    field="code/__torch__.py",
)
add(
    "script_quotes.pt",
    "warn",
    "a list of a million quotes that never end",
    lambda: script(
        "class Net(Module):\n  __parameters__ = [" + '\\"' * 1_000_000 + "]\n  w : Tensor\n"
    ),
)
add(
    "script_brackets.pt",
    "warn",
    "a list of a million brackets",
    lambda: script(
        "class Net(Module):\n  __parameters__ = [" + "] " * 1_000_000 + "x\n  w : Tensor\n"
    ),
)
add(
    "script_spaces.pt",
    "warn",
    "a million spaces behind an attribute",
    lambda: script(CLASS + "  v : Tensor" + " " * 1_000_000 + "x\n"),
)
add(
    "script_many_classes.pt",
    "reject",
    "40 MB of deflated classes, all of one name",
    lambda: script("class A:\n" * 4_500_000, method=8),
    field="code/__torch__.py",
)
add(
    "script_many_attributes.pt",
    "reject",
    "20 MB of attributes of one name, deflated",
    lambda: script(CLASS + "  v : Tensor\n" * 1_500_000, method=8),
)
add(
    "script_names.pt",
    "warn",
    "a list of a million names",
    lambda: script(CLASS.replace('"w", ', '"w", ' * 1_000_000)),
)
add("script_deep.pt", "reject", "modules nested 100,000 deep", lambda: script(root=nested(100_000)))
add("script_shared.pt", "reject", "2**60 names for one module", lambda: script(CLASS, shared(60)))
add(
    "script_itself.pt",
    "reject",
    "a module that holds itself",
    lambda: script(root=g("__torch__", "Net") + b")\x81q\x07}" + u("m") + b"h\x07sb"),
)
add(
    "script_sparse.pt",
    "reject",
    "a sparse tensor of a layout that is none",
    lambda: script(
        root=g("__torch__", "Net")
        + b")\x81"
        + d(
            (
                u("w"),
                call(
                    "torch._utils",
                    "_rebuild_sparse_tensor",
                    n(9),
                    ints((4,)),
                    bad.FALSE,
                    tensor(),
                    tensor(),
                    bad.ODICT,
                ),
            )
        )
        + b"b"
    ),
)
add(
    "script_octal.pt",
    "warn",
    "a name with octal escapes of control characters",
    lambda: script(CLASS.replace('["w", ]', '["w", "\\033[2J\\012", ]')),
    OUTPUTS,
)


# Archives of before torch 1.4.


def old_script(**fields: object) -> bytes:
    """An archive of before torch 1.4 with one parameter; fields of its tensor can be others."""
    given = {
        "dims": ["4"],
        "strides": ["1"],
        "dataType": "FLOAT",
        "data": {"key": "tensors/0"},
        "device": "cpu",
        **fields,
    }
    model = {
        "mainModule": {"name": "Net", "parameters": [{"name": "w", "tensorId": "0"}]},
        "tensors": [given],
    }
    return old_archive(json.dumps(model).encode())


def old_archive(model: bytes, method: int = 0) -> bytes:
    records = [
        bad.E("net/version", b"1\n"),
        bad.E("net/model.json", model, method=method),
        bad.E("net/tensors/0", bad.F4),
    ]
    return bad.mkzip(records)


def old_module(**fields: object) -> bytes:
    tensors = [{"dims": ["4"], "strides": ["1"], "dataType": "FLOAT", "data": {"key": "tensors/0"}}]
    return old_archive(json.dumps({"mainModule": fields, "tensors": tensors}).encode())


add("oldscript_good.pt", "warn", "a good archive of before torch 1.4", old_script, OUTPUTS)
add(
    "oldscript_negative.pt",
    "reject",
    "dims ['-4']",
    lambda: old_script(dims=["-4"]),
    field="tensors/0",
)
add(
    "oldscript_huge.pt",
    "reject",
    "dims of 2**62",
    lambda: old_script(dims=[str(1 << 62)]),
    field="tensors/0",
)
add(
    "oldscript_digits.pt",
    "reject",
    "an offset of 10,000 digits",
    lambda: old_script(offset="9" * 10_000),
    field="model.json",
)
add(
    "oldscript_offset.pt",
    "reject",
    "an offset beyond its record",
    lambda: old_script(offset="1"),
    field="tensors/0",
)
add(
    "oldscript_bool.pt",
    "reject",
    "dims [true]",
    lambda: old_script(dims=[True]),
    field="model.json",
)
add(
    "oldscript_dtype.pt",
    "reject",
    "a dtype with escapes",
    lambda: old_script(dataType="\x1b[2J"),
    field="tensors/0",
)
add(
    "oldscript_record.pt",
    "reject",
    "a record that climbs out of the archive",
    lambda: old_script(data={"key": "../../etc/passwd"}),
)
add(
    "oldscript_device.pt",
    "reject|warn",
    "a device with escapes",
    lambda: old_script(device="\x1b[2J\ncuda"),
    OUTPUTS,
)
add(
    "oldscript_index.pt",
    "reject",
    "a parameter that is tensor 2**31",
    lambda: old_module(parameters=[{"name": "w", "tensorId": str(1 << 31)}]),
    field="w",
)
add(
    "oldscript_twice.pt",
    "reject",
    "one name twice",
    lambda: old_module(parameters=[{"name": "w"}] * 2),
    field="w",
)
add(
    "oldscript_deep.pt",
    "reject",
    "200,000 nested objects",
    lambda: old_archive(b'{"a":' * DEEP),
    field="model.json",
)
add(
    "oldscript_modules.pt",
    "reject",
    "modules nested 1,500 deep",
    lambda: old_archive(
        b'{"tensors":[],"mainModule":' + b'{"submodules":[' * 400 + b"{}" + b"]}" * 400 + b"}"
    ),
)
add(
    "oldscript_lists.pt",
    "reject",
    "45 MB of empty lists, deflated",
    lambda: old_archive(b"[" + b"[]," * 15_000_000 + b"[]]", 8),
    field="model.json",
)
add(
    "oldscript_nan.pt",
    "reject",
    "NaN where a number should be",
    lambda: old_archive(b'{"mainModule":{},"tensors":[{"dims":[NaN]}]}'),
    field="model.json",
)
add(
    "oldscript_twins.pt",
    "reject",
    "JSON with two main modules",
    lambda: old_archive(b'{"mainModule":{"a":1},"mainModule":{}}'),
    field="model.json",
)


# Zip archives of checkpoints.


def packed(*members: tuple[str, bytes], method: int = 8) -> bytes:
    return bad.mkzip([bad.E(name, content, method=method) for name, content in members])


def in_itself(levels: int, content: bytes) -> bytes:
    for _ in range(levels):
        content = packed(("a.zip", content), method=0)
    return content


add(
    "members_good.zip",
    "accept",
    "a zip of one good checkpoint",
    lambda: packed(("policy.pth", bad.ckpt(bad.GOOD))),
    OUTPUTS,
)
add(
    "members_runs.zip",
    "reject",
    "a member that calls posix.mkdir",
    lambda: packed(("policy.pth", bad.ckpt(bad.P2 + bad.PWN + bad.STOP))),
)
add(
    "members_runs_bare.zip",
    "warn",
    "a member that is a bare pickle of a payload, which is left out",
    lambda: packed(("a.pth", bad.ckpt(bad.GOOD)), ("b.pkl", bad.P2 + bad.PWN + bad.STOP)),
)
add(
    "members_climb.zip",
    "reject",
    "a member called ../../evil.pth",
    lambda: packed(("../../evil.pth", bad.ckpt(bad.GOOD))),
)
add(
    "members_deep.zip",
    "reject",
    "40 archives within archives",
    lambda: in_itself(40, bad.ckpt(bad.GOOD)),
)
add(
    "members_deep_few.zip",
    "reject",
    "five archives within archives",
    lambda: in_itself(5, bad.ckpt(bad.GOOD)),
)
add(
    "members_bomb.zip",
    "reject",
    "members that inflate to 2 GB",
    lambda: packed(*((f"{number}.pt", bytes(1 << 24)) for number in range(128))),
)
add(
    "members_cut.zip",
    "reject",
    "a member that is a cut checkpoint",
    lambda: packed(("a.pth", bad.ckpt(bad.GOOD)), ("b.pth", bad.ckpt(bad.GOOD)[:-40])),
    field="b.pth",
)
add(
    "members_many.zip",
    "reject",
    "2,000 empty members",
    lambda: packed(*((f"{number}.pt", b"") for number in range(2000)), method=0),
)
add(
    "members_escape.zip",
    "reject|accept",
    "a member's name with escapes",
    lambda: packed(("\x1b[2J\n.pth", bad.ckpt(bad.GOOD))),
)
