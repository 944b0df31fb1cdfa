"""The code in TorchScript archives, judged by the operators that it calls; it is text, and never
run.

`torch.jit.load` compiles the texts under ``code/`` and runs the `__setstate__` of modules; all else
runs when the module is called. In them, ``torch.NAME`` is the operator ``aten::NAME`` and
``ops.NAMESPACE.NAME`` any other; archives for mobiles name operators in ``bytecode.pkl`` too.
Operators are judged by namespace and name: those of `aten` that compute stand in script_code.txt.
Sources: torch/csrc/jit/frontend/lexer.h, torch/csrc/jit/serialization.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

from ckptconv.objects.threats import Verdict, judge_script_class
from ckptconv.support.json_text import read_object
from ckptconv.support.name_lists import names_beside
from ckptconv.support.records import NamedTuple

Kind: TypeAlias = Literal["text", "bytecode", "model"]


class Called(NamedTuple):
    """What code uses that is not plain: its name there, how it is judged, the byte where first."""

    name: str
    verdict: Verdict
    at: int


# ---------------------------------------------------------------------------- where the code stands

_TEXT = re.compile(r"(.*/)?code/.+\.py", re.DOTALL)
_MARKS = ("constants.pkl", "bytecode.pkl", "model.json")
_KINDS: dict[str, Kind] = {"bytecode.pkl": "bytecode", "model.json": "model"}
FLATBUFFER = b"PTMF"
"""What a module for mobiles that is a flatbuffer has at byte 4; `torch.jit.load` takes it too."""


def script_records(names: Iterable[str]) -> dict[str, Kind]:
    """The records of an archive that torch compiles or runs; upper and lower case are the same."""
    lower = {name.lower(): name for name in names}
    found: dict[str, Kind] = {}
    for low, name in lower.items():
        base = low.rpartition("/")[2]
        # the end first: most records of a large archive are not code
        match = low.endswith(".py") and _TEXT.fullmatch(low)
        if base in _KINDS:
            found[name] = _KINDS[base]
        elif match:
            root = match[1] or ""
            if root.endswith(".data/ts_code/") or any(root + mark in lower for mark in _MARKS):
                found[name] = "text"
    return found


def old_code_records(model: bytes, name: str, names: Iterable[str], path: PurePath) -> list[str]:
    """The records of code that the ``model.json`` of before torch 1.4, the record `name`, speaks
    of. Raises `MalformedCheckpoint` where it is none.
    """
    root = name[: -len("model.json")].lower()
    found: set[str] = set()
    work: list[Any] = [read_object(model, path, name)]
    while work:
        value = work.pop()
        if isinstance(value, dict):
            for arena in (value.get("torchscriptArena"), value.get("torchscript_arena")):
                if isinstance(arena, dict):
                    found.add(root + str(arena.get("key", "")).lower())
            work += value.values()
        elif isinstance(value, list):
            work += value
    return [other for other in names if other.lower() in found]


# ----------------------------------------------------------------------------------------- bytecode

# A text of a pickle that may name an operator: BINUNICODE, and one byte of its length
_OPERATOR = re.compile(rb"X(.)\0\0\0(?=[A-Za-z_]\w*::)", re.DOTALL)


def judged_bytecode(raw: bytes) -> list[Called]:
    """The operators that bytecode for mobiles names and that are not plain."""
    return _first(_named(raw, match.end(), match[1][0]) for match in _OPERATOR.finditer(raw))


_IN_FLATBUFFER = re.compile(
    rb"(?<=.\0\0\0)(?=[A-Za-z_]\w*::)|\b(?:torch|ops)\s*\.\s*\w+(?:\s*\.\s*\w+)?", re.DOTALL
)


def judged_flatbuffer(raw: bytes) -> list[Called]:
    """The dangerous operators in a flatbuffer: of bytecode, or of texts that torch compiles."""
    found = []
    for match in _IN_FLATBUFFER.finditer(raw):
        at = match.start()
        if match[0]:
            found.append(_called(match[0].decode().replace(" ", "").split("."), at))
        else:  # a name of bytecode, behind its length
            found.append(_named(raw, at, raw[at - 4]))
    return [called for called in _first(found) if called.verdict.level == "dangerous"]


def _named(raw: bytes, at: int, count: int) -> Called:
    name = raw[at : at + count].decode("latin-1")
    return Called(name, judge_operator(*name.partition("::")[::2]), at)


# --------------------------------------------------------------------------------------------- text

_TOKEN = re.compile(
    rb"""(?P<blank>\#[^\n]*|\\\n)|(?P<line>\n)|(?P<name>[A-Za-z_]\w*)|(?P<dot>\.)
    |(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?j?)|(?P<string>\"{3}|'{3}|["'])
    |(?P<other>\S)""",
    re.VERBOSE,
)
# what a line holds that reaches an operator, or that its end depends on
_OF_USE = re.compile(rb"[.'\"\\#]|torch|ops|rpc_")
_ENDS = {
    quote: re.compile(rb"\\|" + quote + (rb"" if len(quote) == 3 else rb"|\n"))
    for quote in (b'"""', b"'''", b'"', b"'")
}
_HANDED_ON = Verdict("dangerous", "all operators are passed on, so it is unknown which are called")
# the names by which code reaches operators
_ROOTS = frozenset((b"torch", b"ops", b"rpc_async", b"rpc_sync", b"rpc_remote"))


def judged_code(text: bytes) -> list[Called]:
    """What the text of classes and functions calls that is not plain."""
    return _first(_called([part.decode() for part in chain], at) for chain, at in _chains(text))


def _first(found: Iterable[Called]) -> list[Called]:
    """The first of each name that is not plain."""
    kept: dict[str, Called] = {}
    for called in found:
        if called.verdict.level != "plain":
            kept.setdefault(called.name, called)
    return list(kept.values())


def _called(chain: list[str], at: int) -> Called:
    """How a dotted name that begins with one of the roots, or with that of classes, is judged."""
    name, (root, *names) = ".".join(chain), chain
    if root == "__torch__":
        return Called(name, judge_script_class(name), at)
    if root.startswith("rpc_"):
        return Called(name, judge_operator("prim", root), at)
    if root == "torch":
        names.insert(0, "aten")
    if len(names) < 2:
        return Called(name, _HANDED_ON, at)
    return Called(name, judge_operator(*names[:2]), at)


def _chains(text: bytes) -> Iterator[tuple[list[bytes], int]]:
    """The dotted names in a text by which operators or classes are reached, and the byte of each.

    A name that is annotated or defined is none. One behind a dot and a newline is taken for an
    attribute and for a root: a number may end in the dot.
    """
    chain: list[bytes] = []
    start, before, opened = 0, "line", "line"
    for kind, word, at in _tokens(text):
        if kind == "dot" or (kind == "line" and before.startswith("dot")):
            before = "dot" if kind == "dot" else "dot and line"
            continue
        if (
            kind == "name"
            and before.startswith("dot")
            and not (before == "dot and line" and word in _ROOTS)
        ):
            if chain:
                chain.append(word)
            before = kind
            continue
        if chain and not (
            opened == "defined" or (opened == "line" and word == b":" and len(chain) == 1)
        ):
            yield chain, start
        is_root = kind == "name" and (word in _ROOTS or word == b"__torch__")
        chain, start, opened, before = [word] if is_root else [], at, before, kind
        if word in (b"def", b"class"):
            before = "defined"
    if chain:
        yield chain, start


def _tokens(text: bytes) -> Iterator[tuple[str, bytes, int]]:
    """The tokens of a text as torch's lexer has them: kind, word (of a string only how it begins)
    and byte. Of lines that hold nothing of use, behind one that does not end in a dot, there are
    none.
    """
    at, behind_dot = 0, False
    while (match := _TOKEN.search(text, at)) is not None:
        kind, at = str(match.lastgroup), match.end()
        if kind == "string":
            at = _string_end(text, at, _ENDS[match[0]])
        if kind == "line" and not behind_dot:
            of_use = _OF_USE.search(text, at)
            at = text.rfind(b"\n", at, of_use.start() if of_use else None) + 1 or at
        if kind != "blank":
            yield kind, match[0], match.start()
            behind_dot = kind == "dot" or (behind_dot and kind == "line")


def _string_end(text: bytes, at: int, end: re.Pattern[bytes]) -> int:
    """The byte behind a string whose first character is at `at`; before a newline that ends it."""
    while (match := end.search(text, at)) is not None:
        if match[0] != b"\\":
            return match.start() if match[0] == b"\n" else match.end()
        at = match.end() + 1
    return len(text)


# ---------------------------------------------------------------------------------------- operators

_NAMES = names_beside(__file__)
_ATEN = frozenset(_NAMES["aten"])
_COMPUTING = frozenset(_NAMES["namespaces"])
_FILES = "reads or writes the file that it is given"
_MACHINES = "calls other machines"
_DANGEROUS = {
    "aten::save": _FILES,
    "aten::from_file": _FILES,
    "debugprims::load_tensor": _FILES,
    "prim::rpc_async": _MACHINES,
    "prim::rpc_sync": _MACHINES,
    "prim::rpc_remote": _MACHINES,
    "prim::PythonOp": "runs a function of Python",
    "prim::IgnoredPythonOp": "runs a function of Python",
}


def judge_operator(namespace: str, name: str) -> Verdict:
    """How a call of `namespace::name` in the code of a TorchScript archive is judged."""
    reason = _DANGEROUS.get(f"{namespace}::{name}")
    if reason:
        return Verdict("dangerous", reason)
    if namespace in _COMPUTING or (namespace == "aten" and _base(name) in _ATEN):
        return Verdict("plain", "computes")
    return Verdict("unknown", "an unknown operator; its code would run where it is installed")


def _base(name: str) -> str:
    """The name of an operator without its variant: `_foo_backward_` and `foo_out` are `foo`."""
    while True:
        short = name.strip("_") or name
        for end in _NAMES["variants"]:
            short = short.removesuffix(end)
        if short in ("", name):
            return name
        name = short
