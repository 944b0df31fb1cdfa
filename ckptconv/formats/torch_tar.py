"""The container of `torch.save` before torch 0.1.11: a tar archive, read in place and never
extracted.

Members: ``sys_info``; ``storages``: pickle(count), then per storage pickle((key, location, class)),
its element count (int64) and its elements, at the end pickle(list of views (key, key of the root,
offset, size)); ``tensors``: pickle(count), then per tensor pickle((key, storage's key, class)),
int32 number of dimensions, 4 bytes of padding, int64 sizes, strides and offset; ``pickle``: the
tree, whose persistent ids are keys of tensors and storages, or (class, file, source text) of a
module. All numbers are little-endian. Source: `legacy_load` in torch/serialization.py; the tar
format of POSIX.1-1988 with pax headers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace

from ckptconv.formats.packed import within_file
from ckptconv.formats.zip_kinds import CONTAINER as MEMBERS
from ckptconv.formats.zip_kinds import open_members
from ckptconv.io.source import MemorySource, RangeSource, Source
from ckptconv.objects.torch_read import (
    REDUCERS,
    Window,
    part_of,
    storage_dtype,
    tensor_of_storage,
    window,
)
from ckptconv.pickles.nodes import Global, Node, mapping_pairs
from ckptconv.pickles.opcodes import read_pickles
from ckptconv.pickles.reader import read_pickle
from ckptconv.support.errors import (
    LimitExceeded,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    errors_at,
    malformed,
)
from ckptconv.support.limits import in_force
from ckptconv.tensors.dtypes import UINT8
from ckptconv.tensors.refs import Storage, TensorRef, refuse_dimensions
from ckptconv.tree.checkpoint import Checkpoint, Container

CONTAINER = Container(
    "torch tar",
    "torch.load(weights_only=False)",
    why_not="torch.load(weights_only=True) does not read tar files",
    torch_says="Cannot use ``weights_only=True`` with files saved in the legacy .tar format",
    is_torch=True,
    names_storages=True,
)
_BLOCK = 512  # bytes, to which ustar pads a header and what follows it
_MEMBERS = ("storages", "tensors", "pickle")
_SMALL = 4096  # the first window for pickles of one tuple
_HINT = "if it is an ordinary archive, unpack it and name a file in it"


def open_torch_tar(source: Source) -> Checkpoint:
    """Open a tar checkpoint; reads its directory, its pickles and the sizes between them, no
    payload. One of another program is opened as the checkpoints in it, NeMo's for example.

    Raises `UnsupportedCheckpoint` where there is none, `MalformedCheckpoint` when its members are
    ambiguous or contradict each other.
    """
    members = members_of(source)
    if members.keys().isdisjoint(_MEMBERS):
        what = "is a tar file without a checkpoint in it"
        found = open_members(source, members, UnsupportedCheckpoint(what, hint=_HINT))
        pairs = mapping_pairs(found.root) or ()
        if found.container is MEMBERS and len(pairs) == 1:
            found = replace(found, root=pairs[0][1])
        return within_file(found, (source,), "tar of checkpoints", CONTAINER.torch_says)
    path = source.path
    for name in _MEMBERS:
        if name not in members:
            what = "is a tar file, but not one of torch (before 0.1.11)"
            raise UnsupportedCheckpoint(f"{what}: it has no member '{name}'", path=path, hint=_HINT)
    with errors_at(path=path, where="storages"):
        storages = _read_storages(members["storages"])
    with errors_at(path=path, where="tensors"):
        tensors = _read_tensors(members["tensors"], storages)
    with errors_at(path=path, where="pickle"):
        (tree,), end = read_pickles(members["pickle"], 0, 1)
        _refuse_rest(members["pickle"], end)
        root = read_pickle(tree, reducers=REDUCERS, persistent=_Ids(storages, tensors))
    return Checkpoint(path, CONTAINER, root, source.size, sources=(source,))


# ---------------------------------------------------------------------------------------- directory


def members_of(source: Source) -> dict[str, Source]:
    """The ordinary files of the archive by name, as far as torch could have written them."""
    found: dict[str, Source] = {}
    extended: dict[str, str] = {}
    at, small = 0, in_force().small_record_bytes
    while at + _BLOCK <= source.size:
        block = source.read(at, _BLOCK)
        if not any(block):
            break
        name, kind, size = _header(source, block, at)
        start = at + _BLOCK
        if kind == b"x" and size <= small:
            extended = _extended(source, start, size)
        elif kind == b"L" and size <= small:  # how GNU tar has a name of more than 100 bytes
            extended = {"path": _text(source.read(start, size))}
        else:
            name = extended.get("path", name)
            size = _size(source, extended.get("size"), size)
            if kind in (b"0", b"\0"):
                _add(source, found, name, start, size)
            elif name in (*_MEMBERS, "sys_info"):
                raise malformed("is a link or a device, not a file", source.path, name)
            extended = {}
        at = start + -(-size // _BLOCK) * _BLOCK
    return found


def _add(source: Source, found: dict[str, Source], name: str, start: int, size: int) -> None:
    if name in found:
        raise malformed("is in the archive twice", source.path, name)
    if start + size > source.size:
        what = f"its {size} bytes at {start} lie beyond the end of the file ({source.size})"
        raise malformed(what, source.path, name)
    allowed = in_force().zip_members
    if len(found) == allowed:
        raise LimitExceeded(
            f"is a tar file of more than {allowed} members",
            limit="zip_members",
            allowed=allowed,
            path=source.path,
            advice="unpack it and name what is meant",
        )
    found[name] = RangeSource(source, start, size)


def _header(source: Source, block: bytes, at: int) -> tuple[str, bytes, int]:
    """The name, the type flag and the size of a member, by the 512 bytes before it; their checksum
    is verified (the sum of the bytes, those of the checksum itself taken as spaces).
    """
    where = f"tar header at {at}"
    try:
        checksum = int(block[148:156].strip(b" \0") or b"0", 8)
        size = int.from_bytes(block[125:136], "big")
        if block[124] != 0x80:  # else it is binary, as GNU tar writes sizes from 8 GiB on
            size = int(block[124:136].strip(b" \0") or b"0", 8)
    except ValueError:
        raise malformed("holds an invalid number", source.path, where) from None
    if sum(block) - sum(block[148:156]) + 8 * 0x20 != checksum or size < 0:
        raise malformed("does not have the checksum that it declares", source.path, where)
    name = _text(block[:100])
    if block[257:263] == b"ustar\0":  # POSIX; GNU tar has other things there
        name = "/".join(filter(None, (_text(block[345:500]), name)))
    return name, block[156:157], size


def _text(raw: bytes) -> str:
    """The text of a field, up to the first NUL."""
    return raw.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _extended(source: Source, start: int, size: int) -> dict[str, str]:
    """A pax header: lines ``length key=value``, which apply to the next member."""
    found, rest = {}, source.read(start, size)
    while rest:
        length, _, _ = rest.partition(b" ")
        if not length.isdigit() or len(length) > 4 or not len(length) < int(length) <= len(rest):
            raise malformed("is not a list of keys and values", source.path, "pax header")
        key, _, value = rest[len(length) + 1 : int(length) - 1].partition(b"=")
        found[key.decode("utf-8", "backslashreplace")] = value.decode("utf-8", "backslashreplace")
        rest = rest[int(length) :]
    return found


def _size(source: Source, extended: str | None, size: int) -> int:
    if extended is None:
        return size
    if not (extended.isascii() and extended.isdigit() and len(extended) < 20):  # of at most 64 bits
        raise malformed("declares a size that is not a number", source.path, "pax header")
    return int(extended)


def _refuse_rest(member: Source, end: int) -> None:
    if end != member.size:
        raise MalformedCheckpoint(f"{member.size - end} bytes follow what it holds")


# ----------------------------------------------------------------------------- storages and tensors

_Storages = dict[int, Window]


def _read_storages(member: Source) -> _Storages:
    """The storages by key, and the views: windows of the same storage, so that they share it."""
    found: _Storages = {}
    count, at = _read_count(member)
    for _ in range(count):
        (raw_key, location, cls), at = _read_entry(member, at)
        key, dtype = _key(raw_key), storage_dtype(cls) or UINT8
        name = f"storage {key}"
        if type(location) is not str:
            raise MalformedCheckpoint("its location tag is not text", where=name)
        numel = int.from_bytes(member.read(at, 8), "little", signed=True)
        nbytes = numel * dtype.itemsize
        if numel < 0 or at + 8 + nbytes > member.size:
            what = f"claims {numel} elements where {member.size - at - 8} bytes are left"
            raise MalformedCheckpoint(what, where=name)
        _refuse_known(key, found)
        found[key] = window(Storage(member, at + 8, nbytes, location, name, dtype))
        at += 8 + nbytes
    (views,), at = read_pickles(member, at, 1, window=_SMALL)
    _refuse_rest(member, at)
    _add_views(read_pickle(views), found)
    return found


def _add_views(views: Node, found: _Storages) -> None:
    if type(views) is not list:
        raise MalformedCheckpoint("its views are not a list")
    for view in views:
        if type(view) is not tuple or len(view) != 4:
            raise MalformedCheckpoint("a view is not a tuple of key, root, offset and size")
        key, root = _key(view[0]), found.get(_key(view[1]))
        if root is None:
            what = "is a view of a storage that does not exist"
            raise MalformedCheckpoint(what, where=f"storage {key}")
        _refuse_known(key, found)
        found[key] = part_of(root, view[2], view[3])


def _read_tensors(member: Source, storages: _Storages) -> dict[int, TensorRef]:
    found: dict[int, TensorRef] = {}
    count, at = _read_count(member)
    for _ in range(count):
        (raw_key, storage_key, cls), at = _read_entry(member, at)
        key = _key(raw_key)
        ndim = int.from_bytes(member.read(at, 4), "little", signed=True)
        if ndim < 0:
            raise MalformedCheckpoint(f"has {ndim} dimensions", where=f"tensor {key}")
        refuse_dimensions(ndim, f"tensor {key}")
        numbers = struct.unpack(f"<{2 * ndim + 1}q", member.read(at + 8, 16 * ndim + 8))
        at += 16 + 16 * ndim
        _refuse_known(key, found)
        storage = _storage_of(storage_key, cls, storages, member)
        shape, stride = numbers[:ndim], numbers[ndim:-1]
        if not shape and storage.start == storage.stop:
            # without dimensions: in torch of that time, a tensor without elements
            shape, stride = (0,), (1,)
        found[key] = tensor_of_storage(storage, numbers[-1], shape, stride)
    _refuse_rest(member, at)
    return found


def _storage_of(key: Node, cls: Node, storages: _Storages, member: Source) -> Window:
    """The storage of a tensor; a tensor that never had elements has none."""
    if key is not None:
        found = storages.get(_key(key))
        if found is None:
            what = "a tensor names a storage that does not exist"
            raise MalformedCheckpoint(what, where=f"storage {_key(key)}")
        return found
    if type(cls) is Global:
        cls = Global(cls.module, cls.name.removesuffix("Tensor") + "Storage")
    dtype = storage_dtype(cls)
    return window(Storage(MemorySource(b"", member.path), 0, 0, "cpu", "no storage", dtype))


def _read_count(member: Source) -> tuple[int, int]:
    """The count that a member begins with, and the byte behind it; every entry takes some bytes."""
    (stream,), at = read_pickles(member, 0, 1, window=_SMALL)
    count = read_pickle(stream)
    if type(count) is not int or not 0 <= count <= member.size // _LEAST:
        raise MalformedCheckpoint(f"claims more entries than its {member.size} bytes can hold")
    return count, at


_LEAST = 16  # bytes of the shortest entry


def _read_entry(member: Source, at: int) -> tuple[tuple[Node, ...], int]:
    """The tuple of three parts that is pickled at byte `at`, and the byte behind it."""
    (stream,), end = read_pickles(member, at, 1, window=_SMALL)
    entry = read_pickle(stream)
    if type(entry) is not tuple or len(entry) != 3:
        raise MalformedCheckpoint(f"an entry is not a tuple of 3 parts (byte {at})")
    return entry, end


def _key(node: Node) -> int:
    """A key: the address that an object had; torch takes its digits too."""
    if type(node) is str and node.isascii() and node.isdigit() and len(node) < 20:
        return int(node)
    if type(node) is not int or not -(1 << 63) <= node < 1 << 64:
        raise MalformedCheckpoint("a key is not an address")
    return node


def _refuse_known(key: int, found: Mapping[int, object]) -> None:
    if key in found:
        raise MalformedCheckpoint("occurs twice", where=str(key))


class _Ids:
    """What the persistent ids of the tree stand for: tensors, storages, and classes of modules."""

    def __init__(self, storages: _Storages, tensors: dict[int, TensorRef]) -> None:
        self._storages = storages
        self._tensors = tensors

    def __call__(self, pid: Node) -> Node:
        if type(pid) is tuple and len(pid) == 3 and type(pid[0]) is Global:
            return pid[0]
        key = _key(pid)
        tensor = self._tensors.get(key)
        if tensor is not None:
            return tensor
        storage = self._storages.get(key)
        if storage is None:
            raise MalformedCheckpoint("names a tensor that does not exist", where=str(key))
        if storage == window(storage.storage):
            return storage.storage
        return storage
