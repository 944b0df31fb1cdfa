"""TorchScript archives from before torch 1.4, as the state dicts that they loaded with.

``model.json`` is a protobuf message as JSON: a tree of modules, each with ``submodules``,
``parameters`` (``isBuffer`` and ``tensorId``) and ``attributes`` (a ``type`` and an ``id`` in
``attributes.pkl``), and a table of ``tensors`` (``dims``, ``strides``, ``offset``, ``dataType``,
``device`` and the record in ``data``). 64-bit numbers are texts, and zeros are left out. A tensor
that is an attribute was a buffer then. Source: torch/csrc/jit/serialization/import_legacy.cpp and
caffe2/proto/torch.proto of torch 1.4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from ckptconv.formats import torchscript
from ckptconv.formats.torch_zip import ArchiveStorages, read_limited
from ckptconv.formats.zip_archive import Records, checksum_notes, root_folder
from ckptconv.io.source import Source
from ckptconv.objects.torch_read import read_torch_pickle
from ckptconv.pickles.nodes import Call, Node, listed, ordered_dict
from ckptconv.support.errors import (
    LimitExceeded,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    errors_at,
    printable,
)
from ckptconv.support.json_text import read_object
from ckptconv.support.limits import in_force
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.refs import Storage, TensorRef, contiguous_stride, view_of
from ckptconv.tree.checkpoint import Checkpoint

T = TypeVar("T")

CONTAINER = replace(
    torchscript.CONTAINER,
    name="TorchScript (before torch 1.4)",
    torch_says="PytorchStreamReader failed locating file constants.pkl",
)
_MODEL = "model.json"
_DTYPES = {
    "FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16", "BFLOAT16": "bfloat16",
    "BOOL": "bool", "BYTE": "uint8",
    "UINT8": "uint8", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
}  # fmt: skip
_OF_A_TENSOR = "torch.jit._pickle.build_tensor_from_id"


def open_old_torchscript(source: Source, records: Records) -> Checkpoint:
    """Open a TorchScript archive of before torch 1.4 as its state dict; reads its JSON and its
    attributes, no payload.

    Raises `MalformedCheckpoint` when the JSON is not what torch wrote, or contradicts the records.
    """
    root = root_folder(records, _MODEL) or ""
    storages = ArchiveStorages(source, records, root)
    what, path, where = "a TorchScript archive from before torch 1.4", source.path, root + _MODEL
    with errors_at(path=path, where=where):
        model = read_object(read_limited(source, records[where], "text_bytes"), path, where)
        if "mainModule" not in model:
            raise MalformedCheckpoint(f"is {what} without a main module")
        found: dict[str, Storage] = {}
        tensors = [_tensor(one, storages, root, found) for one in _messages(model, "tensors")]
        attributes = _attributes(source, records, root)
        made = ordered_dict([*_state_dict(_message(model, "mainModule"), tensors, attributes)])
    notes = (f"{what}, read as its state dict; its code is left out", *checksum_notes(records))
    sources = (source, *storages.inflated)
    return Checkpoint(path, CONTAINER, made, source.size, notes=notes, sources=sources)


def _checked(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        what = f"holds a {type(value).__name__} where a {kind.__name__} should be"
        raise MalformedCheckpoint(what)
    return value


def _message(holder: Any, name: str) -> Any:
    return _checked(holder.get(name, {}), dict)


def _messages(holder: Any, name: str) -> list[Any]:
    return [_checked(item, dict) for item in _checked(holder.get(name, []), list)]


def _text(holder: Any, name: str) -> str:
    return _checked(holder.get(name, ""), str)


def _number(value: Any) -> int:
    """A number as protobuf writes it into JSON: 64-bit ones are texts."""
    if type(value) is str and re.fullmatch("(?=.{1,19}$)-?[0-9]+", value):
        return int(value)
    return _checked(value, int)


# ------------------------------------------------------------------------------------------ tensors


def _tensor(
    given: Any, storages: ArchiveStorages, root: str, found: dict[str, Storage]
) -> TensorRef:
    record = _text(_message(given, "data"), "key")
    if given.get("isQuantized"):
        what = "a quantized tensor from before torch 1.4 is not read"
        raise UnsupportedCheckpoint(what, where=record)
    name = _text(given, "dataType")
    if name not in _DTYPES:
        what = f"has the unknown dtype '{printable(name)}'"
        raise UnsupportedCheckpoint(what, where=record or None)
    dtype = BY_NAME[_DTYPES[name]]
    if record not in found:
        found[record] = storages.at(root + record, _text(given, "device") or "cpu", dtype)
    shape, stride = (
        tuple(map(_number, _checked(given.get(field, []), list))) for field in ("dims", "strides")
    )
    offset = _number(given.get("offset", 0))
    return view_of(found[record], dtype, offset, shape, stride or contiguous_stride(shape))


def _attributes(source: Source, records: Records, root: str) -> list[int | None]:
    """Which tensor each attribute of ``attributes.pkl`` is, by index; None for other values."""
    record = records.get(f"{root}attributes.pkl")
    if record is None:
        return []
    tree = read_torch_pickle(read_limited(source, record), _no_storages)
    return [_tensor_index(value) for value in listed(tree)]


def _no_storages(key: str, *_: object) -> Storage:
    what = f"its attributes name the storage {printable(key)}; they should have none"
    raise MalformedCheckpoint(what)


def _tensor_index(value: Node) -> int | None:
    if type(value) is not Call or value.name != _OF_A_TENSOR or len(value.args) != 1:
        return None
    return value.args[0] if type(value.args[0]) is int else None


# ------------------------------------------------------------------------------------------ modules


def _state_dict(
    main: Any, tensors: list[TensorRef], attributes: list[int | None]
) -> Iterator[tuple[str, TensorRef]]:
    """Names and tensors: a module's parameters, its buffers, then those of its submodules."""
    seen: set[str] = set()
    work: list[tuple[str, Any, int]] = [("", main, 0)]
    written, most = 0, in_force()
    while work:
        prefix, module, depth = work.pop()
        children = [
            (f"{prefix}{_text(child, 'name')}.", child, depth + 1)
            for child in _messages(module, "submodules")
        ]
        written += sum(len(name) for name, _, _ in children)
        for limit, reached, what in (
            ("depth", depth, "its modules nest too deeply"),
            ("names", written, "its names are too long"),
        ):
            if reached > (allowed := getattr(most, limit)):
                where = prefix[:60] + "…"
                raise LimitExceeded(what, limit=limit, allowed=allowed, where=where)
        for name, index in _own(module, attributes):
            if not 0 <= index < len(tensors):
                what = f"names tensor {index} of {len(tensors)}"
                raise MalformedCheckpoint(what, where=prefix + name)
            if prefix + name in seen:
                raise MalformedCheckpoint("is named twice", where=prefix + name)
            seen.add(prefix + name)
            yield prefix + name, tensors[index]
        work += reversed(children)


def _own(module: Any, attributes: list[int | None]) -> Iterator[tuple[str, int]]:
    """The names and tensor numbers of a module's parameters, then of its buffers."""
    given = _messages(module, "parameters")
    for wanted in (False, True):
        for item in given:
            if (item.get("isBuffer") is True) is wanted:
                yield _text(item, "name"), _number(item.get("tensorId", 0))
    known = {_text(item, "name") for item in given}
    for item in _messages(module, "attributes"):
        at = _number(item.get("id", 0))
        index = attributes[at] if 0 <= at < len(attributes) else None
        if index is not None and _text(item, "name") not in known:
            yield _text(item, "name"), index
