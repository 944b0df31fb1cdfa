"""What a hostile case is, and the pieces that its bytes are made of; most come from the generator's
own functions.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.hostile_generator import GENERATOR, load_generator

if not GENERATOR.is_file():
    pytest.skip(
        "the generator of hostile files is not here (CKPTCONV_BADCASES)", allow_module_level=True
    )

OUTPUTS = PT, ST = (".pt", ".safetensors")
GOOD = "good.pt"
"""The file that is converted where the hostile one is given to an option."""


bad = load_generator()
u, n, g, t, d, ints, call, storage, tensor = (
    bad.u,
    bad.n,
    bad.g,
    bad.t,
    bad.d,
    bad.ints,
    bad.call,
    bad.storage,
    bad.tensor,
)


@dataclass(frozen=True)
class Link:
    """A symbolic link in a folder."""

    to: str


class Fifo:
    """A named pipe in a folder: opening it would wait for ever."""


@dataclass(frozen=True)
class Sparse:
    """A file of `size` bytes without any on the disk, but for `head`."""

    size: int
    head: bytes = b""


Entry = bytes | Link | Fifo | Sparse
Tree = Mapping[str, Entry]
"""A folder: what lies at which path in it."""


@dataclass(frozen=True)
class Case:
    """A file or a folder, the answers that are right, and what is wrong with it.

    `expected` is reject, warn (convert and tell), accept, or several of them. `build` makes the
    bytes or the folder; None where the generator's script does. `outputs` are the formats to try:
    one is enough where the answer is given on opening. `field` must stand in the error, beside the
    name of the file. `named` are the paths within the folder that are given to the program; none:
    the folder itself. `option` is the option that takes the file; none: it is what is converted.
    """

    file: str
    expected: str
    what: str
    category: str
    build: Callable[[], bytes | Tree] | None = None
    outputs: tuple[str, ...] = OUTPUTS
    field: str = ""
    named: tuple[str, ...] = ()
    option: str = ""

    def write(self, folder: Path) -> list[Path]:
        """Make the file or the folder in `folder`; returns what is given to the program."""
        assert self.build is not None
        made, place = self.build(), folder / self.file
        if isinstance(made, bytes):
            place.write_bytes(made)
            return [place]
        place.mkdir()
        for name, content in made.items():
            _put(place / name, content)
        return [place / name for name in self.named] or [place]

    def arguments(self, given: list[Path], output: str) -> list[object]:
        """The command line that converts the case, or a good file with it."""
        if self.option:
            return ["convert", GOOD, output, self.option, *given, "--no-fsync"]
        return ["convert", *given, output, "--no-fsync"]


def _put(path: Path, content: Entry) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, Sparse):
        path.write_bytes(content.head)
        os.truncate(path, content.size)
    elif isinstance(content, Link):
        path.symlink_to(content.to)
    else:
        os.mkfifo(path)


class Family:
    """The cases of one family, in the order in which they are added."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def add(
        self,
        file: str,
        expected: str,
        what: str,
        build: Callable[[], bytes | Tree],
        outputs: tuple[str, ...] = (PT,),
        *,
        field: str = "",
        named: tuple[str, ...] = (),
        option: str = "",
    ) -> None:
        """One more case."""
        self.cases.append(
            Case(file, expected, what, self.name, build, outputs, field, named, option)
        )


GENERATED = [
    *(Case(file, expected, what, category) for file, category, what, expected, _ in bad.CASES),
    *(Case(f"{name}/{bad.IDX}", expected, what, "index") for name, what, expected, *_ in bad.INDEX),
    Case(
        "sparse_10TB.pt",
        "reject",
        "10 TiB sparse file that starts like a zip: do not scan or read it whole",
        "zip",
    ),
]


# ------------------------------------------------------------------------------------------- pieces

ENTRY = b'"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
DEEP = 200_000
DOUBLED = b")" + b"q\x00h\x00\x86" * 60  # 60 x (x, x): 2**60 steps for anyone who hashes it
ZEROS = bytes((1 << 20) + 100)
MKDIR = g("posix", "mkdir")


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
    return call(
        "torch._utils", "_rebuild_tensor_v2", storage(), n(0), size, stride, bad.FALSE, bad.ODICT
    )


def stored(cls: bytes, location: bytes) -> bytes:
    """The persistent id of a storage whose class and location are given as opcodes."""
    return t(u("storage"), cls, u("0"), location, n(4)) + bad.PID


def flat(key: str = "0", numel: int = 4, **more) -> bytes:
    """A one-dimensional tensor over a whole storage."""
    return tensor(storage(key=key, numel=numel), size=(numel,), **more)


def deflated(pickle: bytes) -> bytes:
    """A checkpoint of a deflated pickle and no storages."""
    return bad.mkzip(
        [bad.E("archive/data.pkl", pickle, method=8), bad.E("archive/version", b"3\n")]
    )


def record(
    payload: bytes = bad.F4, pickle: bytes = bad.GOOD, more: dict | None = None, **over
) -> bytes:
    """A checkpoint whose one storage has the record that `over` describes; `more` goes to the
    archive.
    """
    return bad.ckpt(pickle, {"0": bad.E("archive/data/0", payload, **over)}, **(more or {}))


def with_record(name: str | bytes, content: bytes = b"x", **over) -> bytes:
    """A good checkpoint with one more record."""
    return bad.ckpt(bad.GOOD, more=[bad.E(name, content, **over)])


def header(text: bytes) -> bytes:
    """A safetensors file of this header and four floats."""
    return bad.st(text, bad.F4)


def entry(**fields: object) -> bytes:
    """A safetensors file of one tensor, some of whose fields are other ones."""
    return header(
        json.dumps(
            {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **fields}}
        ).encode()
    )


def metadata(text: str) -> bytes:
    """A good safetensors file with this text as its metadata."""
    return header(b'{"__metadata__":' + text.encode() + b"," + ENTRY + b"}")
