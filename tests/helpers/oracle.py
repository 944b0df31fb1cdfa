"""What torch itself sees in a file, and what the promises make of it: plain Python and torch,
nothing of ckptconv.

`flatten` turns a loaded tree into comparable rows; `compacted` and `bare_keys` say in a few lines
what a conversion may change.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers.paths import ROOT

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By itemsize, a dtype whose copies are bit for bit."""


class Tensor(NamedTuple):
    """A strided tensor: `sha256` of the stored values in C order (conj and neg bits not applied),
    its storage's number.

    `storage` is None for a tensor without elements: torch forgets which storage an empty one had.
    `span` counts elements from the first to the last one used.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    sha256: str
    requires_grad: bool
    conj: bool
    neg: bool
    storage: int | None
    span: int


class Row(NamedTuple):
    """A value of a tree: where, of which type, the number of the object (equal: one and the same),
    and what it is.
    """

    path: tuple[str, ...]
    kind: str
    same: int | None
    value: Any


# -------------------------------------------------------------------------------------------- trees


def load(path: Path, *, weights_only: bool = True, **options: Any) -> Any:
    """What torch sees in a file, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=weights_only, **options)


def flatten(root: Any) -> list[Row]:
    """Every value of a tree, parents first, in order."""
    return _Flat().rows_of(root)


class _Flat:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.objects: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.homes: dict[int | None, int] = {}
        self.alive: list[Any] = []

    def is_alone(self, row: Row) -> bool:
        """Whether no other tensor lies in the storage of this one."""
        return sum(home == self.homes[row.same] for home in self.homes.values()) == 1

    def rows_of(self, root: Any) -> list[Row]:
        self.visit((), root)
        return self.rows

    def add(self, path: tuple[str, ...], node: Any, value: Any) -> bool:
        """Note a value that has an identity; False when it was met before."""
        new = id(node) not in self.objects
        number = self.objects.setdefault(id(node), len(self.objects))
        self.rows.append(Row(path, type(node).__name__, number, value))
        return new

    def visit(self, path: tuple[str, ...], node: Any) -> None:
        if isinstance(node, torch.Tensor):
            self.tensor(path, node)
        elif isinstance(node, dict):
            if self.add(path, node, len(node)):
                for key, value in node.items():
                    self.visit((*path, repr(key)), value)
                if hasattr(node, "_metadata"):
                    self.visit((*path, "<_metadata>"), node._metadata)
        elif isinstance(node, (list, tuple)):
            if self.add(path, node, len(node)) if len(node) else self.plain(path, node):
                for index, value in enumerate(node):
                    self.visit((*path, str(index)), value)
        elif isinstance(node, (set, frozenset)):
            self.rows.append(Row(path, type(node).__name__, None, sorted(map(repr, node))))
        elif isinstance(node, torch.storage.TypedStorage):
            untyped = node._untyped_storage
            self.rows.append(
                Row(path, str(node.dtype), None, (self.group(untyped), _sha(bytes(untyped))))
            )
        else:
            self.plain(path, node)

    def plain(self, path: tuple[str, ...], node: Any) -> bool:
        self.rows.append(Row(path, type(node).__name__, None, repr(node)))
        return False

    def tensor(self, path: tuple[str, ...], tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
            new = self.add(path, tensor, self.strided(tensor))
            self.homes[self.objects[id(tensor)]] = tensor.untyped_storage()._cdata
        else:
            new = self.add(
                path,
                tensor,
                (str(tensor.layout), str(tensor.dtype), tensor.requires_grad, tensor.is_nested),
            )
            parts = list(_inside(tensor.detach()))
            self.alive.append(parts)  # they are made here, and told apart by their addresses
            for name, inner in parts:
                self.visit((*path, name), inner)
        if new and tensor.__dict__:
            self.visit((*path, "<attributes>"), tensor.__dict__)

    def strided(self, tensor: torch.Tensor) -> Tensor:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return Tensor(
            str(tensor.dtype).removeprefix("torch."),
            shape,
            stride,
            _sha(stored_bytes(tensor)),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
            self.group(tensor.untyped_storage()) if tensor.numel() else None,
            reach + 1 if tensor.numel() else 0,
        )

    def group(self, storage: torch.UntypedStorage) -> int:
        return self.storages.setdefault(storage._cdata, len(self.storages))


def _inside(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """The parts of a tensor that is not a plain view: sparse, quantized or nested."""
    if tensor.is_nested:
        yield "<parts>", [part.clone() for part in tensor.unbind()]
    elif tensor.is_quantized:
        yield "<integers>", tensor.int_repr()
        yield "<scheme>", str(tensor.qscheme())
        per_channel = "per_channel" in str(tensor.qscheme())
        yield "<scale>", tensor.q_per_channel_scales() if per_channel else tensor.q_scale()
        yield "<zero>", tensor.q_per_channel_zero_points() if per_channel else tensor.q_zero_point()
    elif tensor.layout is torch.sparse_coo:
        yield (
            "<sparse>",
            [tensor._indices(), tensor._values(), tuple(tensor.shape), tensor.is_coalesced()],
        )
    else:
        rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        outer = tensor.crow_indices() if rows else tensor.ccol_indices()
        inner = tensor.col_indices() if rows else tensor.row_indices()
        yield "<sparse>", [outer, inner, tensor.values(), tuple(tensor.shape)]


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stored_bytes(tensor: torch.Tensor) -> bytes:
    """The values as stored, in C order, whatever the dtype: copied as words of its size."""
    word = torch.empty(0, dtype=WORDS[tensor.element_size()])
    place = tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())
    return word.set_(tensor.untyped_storage(), *place).numpy().tobytes()


def value_bytes(tensor: torch.Tensor) -> bytes:
    """The values in C order, conj and neg bits applied."""
    with torch.no_grad():
        return stored_bytes(resolved(tensor))


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with all signs turned: torch gives a few bf16 NaNs, but not many, a payload of its
    own.
    """
    if tensor.dtype is not torch.bfloat16:
        return -tensor
    return (tensor.contiguous().view(torch.int16) ^ -0x8000).view(tensor.dtype)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its conj and neg bits applied, each to its parts: where torch negates several
    complex numbers at once, it makes -x as 0 - x, and so zeros without their sign.
    """
    plain = torch._neg_view(tensor) if tensor.is_neg() else tensor
    if not tensor.is_complex():
        return _negated(plain) if tensor.is_neg() else plain
    if not (tensor.is_neg() or tensor.is_conj()):
        return plain
    parts = torch.view_as_real(plain.conj() if tensor.is_conj() else plain)
    real, imaginary = (part.contiguous() for part in parts.unbind(-1))
    real = -real if tensor.is_neg() else real
    imaginary = imaginary if tensor.is_neg() == tensor.is_conj() else -imaginary
    return torch.view_as_complex(torch.stack((real, imaginary), -1))


def value_rows(root: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Every value of a tree by its path, tensors by dtype, shape and values: not how they lie, or
    what they share.
    """
    return [
        (
            row.path,
            (row.value.dtype, row.value.shape, row.value.sha256)
            if isinstance(row.value, Tensor)
            else row.value,
        )
        for row in flatten(root)
    ]


def tensor_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows of strided tensors."""
    return [row for row in rows if isinstance(row.value, Tensor)]


def compacted(root: Any) -> list[Row]:
    """The rows of a tree as a torch output has them: a tensor with holes that is alone on its
    storage lies contiguously.
    """
    flat = _Flat()
    return [
        _contiguous(row) if isinstance(row.value, Tensor) and flat.is_alone(row) else row
        for row in flat.rows_of(root)
    ]


def _contiguous(row: Row) -> Row:
    numel = prod(row.value.shape)
    if row.value.span <= numel:
        return row
    stride = torch.empty(row.value.shape, device="meta").stride()
    return row._replace(value=row.value._replace(stride=stride, span=numel))


def overlaps(root: Any) -> list[tuple[int, int, int]]:
    """(first, second, bytes between their starts) for the tensors of a tree whose spans overlap in
    one storage.
    """
    spans = []
    for tensor in tensors(root):
        first = tensor.storage_offset() * tensor.element_size()
        reach = sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        spans.append(
            (
                tensor.untyped_storage()._cdata,
                first,
                first + (reach + 1) * tensor.element_size(),
                tensor.numel(),
            )
        )
    return [
        (i, j, b[1] - a[1])
        for i, a in enumerate(spans)
        for j, b in enumerate(spans[:i])
        if a[0] == b[0] and a[3] and b[3] and a[1] < b[2] and b[1] < a[2]
    ]


def tensors(root: Any) -> list[torch.Tensor]:
    """The strided tensors of a tree, each object once, in order."""
    return list(_tensors(root, set()))


def _tensors(node: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, torch.Tensor):
        if node.layout is torch.strided and not node.is_quantized and not node.is_nested:
            yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _tensors(value, seen)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _tensors(value, seen)


# --------------------------------------------------------------------------------------------- keys

INNER_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def optimizer_state() -> dict[str, Any]:
    """What an optimizer of a small network saves after one step."""
    model = torch.nn.Linear(3, 2)
    made = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    return made.state_dict()


def bare_keys(keys: Sequence[str]) -> list[str]:
    """The keys without wrappers: inner ones go wherever they stand, a leading ``module`` as often
    as all keys have it.
    """
    names, _ = _bare(keys)
    return [".".join(name) for name in names]


def _bare(keys: Sequence[str], beside: Sequence[str] = ()) -> tuple[list[list[str]], int]:
    """The segments of the bare keys, and how often `module` was taken off; keys that stand `beside`
    the model do not count.
    """
    split = [key.split(".") for key in keys]
    names = [
        [segment for segment in name[:-1] if segment not in INNER_WRAPPERS] + name[-1:]
        for name in split
    ]
    if len(beside) == len(keys):
        beside = ()
    depth = 0
    while names and all(
        key in beside or (len(name) > 1 and name[0] == "module" and name[1:] != [""])
        for key, name in zip(keys, names, strict=True)
    ):
        names = [name if key in beside else name[1:] for key, name in zip(keys, names, strict=True)]
        depth += 1
    return names, depth


def bare_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict under its bare keys, its `_metadata` under the bare module paths (an inner
    module's entry wins).
    """
    keys = list(state_dict)
    beside = [
        key
        for key, value in state_dict.items()
        if "." not in key and not isinstance(value, torch.Tensor)
    ]
    names, depth = _bare(keys, beside)
    made = type(state_dict)(zip(map(".".join, names), state_dict.values(), strict=True))
    if hasattr(state_dict, "_metadata"):
        made._metadata = OrderedDict()
        for path, entry in state_dict._metadata.items():
            segments = [segment for segment in path.split(".") if segment not in INNER_WRAPPERS]
            for _ in range(depth):
                segments = segments[1:] if segments[:1] == ["module"] else segments
            made._metadata[".".join(segments)] = entry
    return made


# -------------------------------------------------------------------------------------------- files


@contextmanager
def tagged(tag_of: Callable[[Any], str]) -> Iterator[None]:
    """Within the block `torch.save` writes the tag that `tag_of(storage)` gives, whether this host
    has that device or not.
    """
    registry = torch.serialization._package_registry
    torch.serialization._package_registry = [(0, tag_of, lambda storage, location: None)]
    try:
        yield
    finally:
        torch.serialization._package_registry = registry


def corpus_folder() -> Path:
    """Where the checkpoints that other people wrote lie, if they are here."""
    return Path(os.environ.get("CKPTCONV_CORPUS", ROOT.parent / "shared" / "corpus"))


def tags(path: Path) -> list[str]:
    """The location tag of each storage of a file, in the order in which torch meets them."""
    met: list[str] = []

    def note(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        met.append(tag)
        return storage

    torch.load(path, map_location=note, weights_only=True)
    return met


def rezipped(
    source: Path,
    output: Path,
    *,
    name: Callable[[str], str | None] = lambda name: name,
    payload: Callable[[str, bytes], bytes] = lambda name, data: data,
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """A copy of a zip checkpoint made by `zipfile`: records renamed (None: left out), changed,
    deflated.
    """
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(output, "w", compression) as after:
        for record in before.infolist():
            if (new := name(record.filename)) is not None:
                after.writestr(new, payload(record.filename, before.read(record)))
    return output


def payload_offsets(path: Path) -> dict[str, int]:
    """Where the payload of each record of an archive begins, by its local header."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for record in archive.infolist():
            file.seek(record.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
            found[record.filename] = record.header_offset + 30 + name + extra
    return found


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the byte at which the tensors begin."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), end
