"""TorchScript archives as the state dicts that `torch.jit.load(PATH).state_dict()` gives; their
code is text, and never run.

``constants.pkl`` stands beside ``data.pkl``, whose root is an object of a class
``__torch__.a.b.C``; the class stands in ``code/__torch__/a/b.py`` and lists its ``__parameters__``
and ``__buffers__`` (since torch 1.6; before, a module's tensors that are not parameters were its
buffers). Source: torch/csrc/jit/serialization/python_print.cpp and import_source.cpp. Archives of
before torch 1.4 are another format, `old_torchscript`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ckptconv.formats.torch_zip import ArchiveStorages, read_limited, read_tree
from ckptconv.formats.zip_archive import Records, checksum_notes, root_folder
from ckptconv.io.source import Source
from ckptconv.objects.encodings import holds_tensors
from ckptconv.objects.pickled_modules import Parts, state_dict_of
from ckptconv.objects.torch_read import is_tensor_call
from ckptconv.pickles.nodes import Call, Dict, Global, Node
from ckptconv.support.errors import MalformedCheckpoint, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import first_few_in_short
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.checkpoint import Checkpoint, Container, Stray
from ckptconv.tree.walk import place_text, walk

CONTAINER = Container(
    "TorchScript",
    "torch.jit.load",
    why_not="only torch.jit.load opens it, which runs its code",
    torch_says=(
        "Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``"
    ),
    is_script=True,
    has_checksums=True,
)


def open_torchscript(source: Source, records: Records) -> Checkpoint:
    """Open a TorchScript archive as its state dict; reads its pickle and the texts of its classes,
    no payload.

    Raises `MalformedCheckpoint` when its pickle, code and storages contradict each other.
    """
    root = root_folder(records, "data.pkl") or ""
    storages = ArchiveStorages(source, records, root)
    tree, _pickle = read_tree(source, records[f"{root}data.pkl"], storages)
    if type(tree) is not Call or type(tree.func) is not Global:
        what = "is a TorchScript archive whose root is not a module"
        raise MalformedCheckpoint(what, path=source.path, where=f"{root}data.pkl")
    code = _Code(source, records, root)
    made = state_dict_of(tree, code.parts)
    notes = (*_notes(tree, code, made), *checksum_notes(records))
    sources, size = (source, *storages.inflated), source.size
    found = Checkpoint(source.path, CONTAINER, made, size, notes=notes, sources=sources)
    return replace(found, module_strays=tuple(_strays(tree, code, made)))


def _notes(root: Call, code: _Code, made: Call) -> Iterator[str]:
    told = f"a TorchScript archive, read as the state dict of {printable(root.name)}"
    yield f"{told}; its code is left out"
    if code.opaque:
        told = "classes save their state in a way of their own, so their tensors are left out"
        yield f"{len(code.opaque)} {told}: {first_few_in_short(sorted(code.opaque), 3)}"
    if code.untold:
        told = "its classes do not list their buffers (before torch 1.6)"
        yield f"{told}: all tensors except the parameters are read as buffers"
    if not made.pairs:
        told = "it does not have parameters or buffers: those of a frozen module"
        yield f"{told} are constants in its code"


def _strays(root: Call, code: _Code, made: Call) -> Iterator[Stray]:
    """The objects that keep tensors by themselves, as packed weights: state dicts lack them."""
    if not code.opaque:
        return
    for place, node in walk(root):
        if type(node) is Call and node.name in code.opaque and holds_tensors(node):
            path = place_text(place).replace("<state>.", "")
            what = f"an object with tensors of its own ({node.name})"
            yield Stray(path, f"{what}, which a state dict cannot hold", True, made)


# ---------------------------------------------------------------------------------- classes as text


@dataclass(frozen=True, slots=True)
class _Class:
    """What a class's text tells: whether it is a module, which attributes are saved."""

    is_module: bool
    parameters: frozenset[str]
    buffers: frozenset[str] | None
    tensors: frozenset[str]


# The text of a class: `class NAME(Module):`, its lists of names, its attributes, its methods
_HEAD = re.compile(r"^class ([^\s(:]+)(?:\((\w*)\))?:", re.MULTILINE)
_LIST = re.compile(r"^  (__parameters__|__buffers__) = \[(.*)\] *$", re.MULTILINE)
_TENSOR = re.compile(r"^  (\w+) : (?:Tensor|Optional\[Tensor\]) *$", re.MULTILINE)
_METHOD = re.compile(r"^  def ", re.MULTILINE)
# every character is looked at once: no quote begins a second search
_STRING = re.compile(r'\\.|"((?:[^"\\]|\\.)*)("|\\?\Z)')


def _classes(text: str) -> dict[str, _Class]:
    """The classes in a text of code by name; their methods are not looked at."""
    heads = list(_HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    bounds = zip(heads, ends, strict=False)  # without a class there is an end alone
    return {head[1]: _class(head[2], text[head.end() : end]) for head, end in bounds}


def _class(base: str | None, body: str) -> _Class:
    attributes = _METHOD.split(body, maxsplit=1)[0]
    lists = {}
    for name, listed in _LIST.findall(attributes):
        names = (_unquoted(one) for one, end in _STRING.findall(listed) if end == '"')
        lists[name] = frozenset(names)
    parameters, buffers = lists.get("__parameters__", frozenset()), lists.get("__buffers__")
    return _Class(base == "Module", parameters, buffers, frozenset(_TENSOR.findall(attributes)))


_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = dict(zip(b"ntrfvab", b"\n\t\r\f\v\a\b", strict=True))


def _unquoted(quoted: str) -> str:
    """The name between quotes: torch writes bytes that are not printable ASCII as octal numbers."""

    def meant(match: re.Match[bytes]) -> bytes:
        found = match[1]
        number = int(found, 8) & 255 if len(found) == 3 else _LETTERS.get(found[0], found[0])
        return bytes([number])

    return _ESCAPE.sub(meant, quoted.encode()).decode("utf-8", "replace")


# Where classes in C++ stand, which have no text and pickle what they like (packed weights)
_NATIVE = "__torch__.torch.classes."


_SPARSE = "torch._utils._rebuild_sparse_tensor"
_COO = 1  # c10::Layout::Sparse


def _as_saved(value: Node) -> Node:
    """A sparse tensor in the form of `torch.save`: TorchScript gives (layout, size, requires_grad,
    indices, values, hooks).

    Layouts are numbers, and only COO tensors can be saved. Source:
    torch/csrc/jit/serialization/pickler.cpp, c10/core/Layout.h.
    """
    if type(value) is not Call or value.name != _SPARSE or len(value.args) != 6:
        return value
    number, size, _, indices, values, _ = value.args
    if number != _COO:
        what = "a sparse tensor has a layout that TorchScript does not save"
        raise MalformedCheckpoint(what, where="data.pkl")
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.sparse_coo",))
    shape = Call(Global("torch", "Size"), (size,))
    return Call(value.func, (layout, (indices, values, shape, False)))


class _Code:
    """Finds the classes of an archive's modules in the texts of its code, each text read once.

    `opaque` are the classes whose objects are not pickled as their attributes; `untold` those that
    do not list their buffers.
    """

    def __init__(self, source: Source, records: Records, root: str) -> None:
        self._source = source
        self._records = records
        self._root = root
        self._texts: dict[str, dict[str, _Class]] = {}
        self.opaque: set[str] = set()
        self.untold: set[str] = set()

    def parts(self, module: Call) -> Parts:
        """The parameters, buffers and children of a module, in the order of its attributes."""
        cls = self._class_of(module.func)
        if type(module.state) is not Dict:
            self.opaque.add(module.name)
            return Parts([], [])
        pairs = [(key, value) for key, value in module.state.pairs if type(key) is str]
        buffers = cls.buffers
        if buffers is None:
            buffers = cls.tensors - cls.parameters
            if buffers:
                self.untold.add(module.name)
        tensors = [
            (key, _as_saved(value))
            for names in (cls.parameters, buffers)
            for key, value in pairs
            if key in names and (type(value) is TensorRef or is_tensor_call(value))
        ]
        return Parts(tensors, [(key, value) for key, value in pairs if self._is_module(value)])

    def _is_module(self, value: Node) -> bool:
        is_object = type(value) is Call and type(value.func) is Global
        if not is_object or not value.func.module.startswith("__torch__"):
            return False
        if value.func.module.startswith(_NATIVE):
            self.opaque.add(value.name)
            return False
        return self._class_of(value.func).is_module

    def _class_of(self, name: Global) -> _Class:
        record = f"{self._root}code/{name.module.replace('.', '/')}.py"
        found = self._text(record).get(name.name)
        if found is None:
            what = f"does not hold the class {name.name} that the pickle names"
            raise MalformedCheckpoint(what, where=record)
        return found

    def _text(self, name: str) -> dict[str, _Class]:
        if name not in self._texts:
            record = self._records.get(name)
            text = b"" if record is None else read_limited(self._source, record, "text_bytes")
            self._texts[name] = _classes(text.decode("utf-8", "replace"))
        return self._texts[name]
