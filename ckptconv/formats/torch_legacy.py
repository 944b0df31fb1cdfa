"""The container of `torch.save` before torch 1.6: five pickles, then the bytes of the storages.

The pickles: a magic number, the protocol 1001, facts about the writing host, the tree, and the list
of the storages' keys. Then, in the order of that list, each storage: its element count (int64) and
its elements, both little-endian whatever the host, for the writer swaps. Nothing says how long the
pickles are; where a storage lies follows from the sizes of those before it. Source: `_legacy_save`
and `_legacy_load` (torch/serialization.py), torch/csrc/serialization.cpp.
"""

from __future__ import annotations

from bisect import bisect_right

from ckptconv.formats.containers import is_torch_legacy
from ckptconv.io.guarded import GuardedSource, read_leads
from ckptconv.io.source import Source
from ckptconv.objects.torch_read import named_storages, read_torch_pickle
from ckptconv.pickles.nodes import Node
from ckptconv.pickles.opcodes import read_pickles
from ckptconv.pickles.reader import read_pickle
from ckptconv.support.errors import MalformedCheckpoint, errors_at, or_recover, printable
from ckptconv.tensors.dtypes import UINT8, DType
from ckptconv.tensors.refs import Storage
from ckptconv.tree.checkpoint import PICKLE_HEAD, TORCH_LOAD, Checkpoint, Container, TorchFileFacts

CONTAINER = Container(
    "torch legacy",
    TORCH_LOAD,
    weights_only=True,
    is_torch=True,
    is_legacy=True,
    names_storages=True,
)
_HEAD = 32  # bytes that hold the pickled magic number
_PROTOCOL = 1001  # torch.serialization.PROTOCOL_VERSION: torch.load takes no other
_COUNT = 8  # bytes of an element count


def open_torch_legacy(source: Source) -> Checkpoint:
    """Open a legacy checkpoint; reads its pickles, no payload.

    The element count of a storage is held against the tree before the storage is first read. Raises
    `MalformedCheckpoint` when pickles and storages contradict each other, when a storage is missing
    (torch would leave whatever is in memory there), or when the file does not end with the last
    one.
    """
    with errors_at(path=source.path, where="pickles"):
        (_magic, protocol, system, tree, keys), start = read_pickles(source, 0, 5)
        if read_pickle(protocol) != _PROTOCOL:
            raise MalformedCheckpoint("has a protocol other than 1001", where="protocol version")
        read_pickle(system)
        storages = _Storages(source, named_storages(tree), listed(read_pickle(keys)), start)
        root = read_torch_pickle(tree, storages)
    head = TorchFileFacts(source.read(0, PICKLE_HEAD))
    sources = (storages.guarded,)
    return Checkpoint(source.path, CONTAINER, root, source.size, sources=sources, facts=head)


def listed(keys: Node) -> list[str]:
    """The keys of the storages, in the order in which they lie in the file."""
    if type(keys) is not list or any(type(key) is not str for key in keys):
        raise MalformedCheckpoint("is not a list of texts", where="storage keys")
    if len(set(keys)) != len(keys):
        raise MalformedCheckpoint("names a storage twice", where="storage keys")
    return keys


# The bytes and the type of each storage, by its key
_Named = dict[str, tuple[int, "DType | None"]]


class _Storages:
    """The storages of a file: `named` by the tree, in the order of `keys`, from byte `start` on."""

    def __init__(self, source: Source, named: _Named, keys: list[str], start: int) -> None:
        self._source = source
        self._named = named
        self._keys = keys
        self._offsets: dict[str, int] = {}
        at = start
        for key in keys:
            if key not in named:
                what = "is in the file, but the tree does not name it"
                raise MalformedCheckpoint(what, where=storage_name(key))
            nbytes = named[key][0]
            self._offsets[key] = at + _COUNT
            at += _COUNT + nbytes
            if at > source.size:
                beyond = f"lie beyond the end of the file ({source.size})"
                what = f"its {nbytes} bytes at {at - nbytes} {beyond}"
                hint = or_recover("the file is cut off; fetch it again", source.path)
                raise MalformedCheckpoint(what, where=storage_name(key), hint=hint)
        missing = [key for key in named if key not in self._offsets]
        if missing:
            what = "the pickle names a storage that the file does not hold"
            raise MalformedCheckpoint(what, where=storage_name(missing[0]))
        self._refuse_rest(at)
        self.guarded = GuardedSource(source, [*self._offsets.values()], self._check_counts)

    def __call__(self, key: str, location: str, nbytes: int, dtype: DType | None) -> Storage:
        return Storage(self.guarded, self._offsets[key], nbytes, location, storage_name(key), dtype)

    def _check_counts(self, first: int, stop: int) -> dict[int, int]:
        """Hold the element counts of some storages against the tree."""
        keys = self._keys[first:stop]
        places = [self._offsets[key] - _COUNT for key in keys]
        leads = read_leads(self._source, [(at, _COUNT) for at in places])
        starts = [start for start, _ in leads]
        for key, at in zip(keys, places, strict=True):
            start, lead = leads[bisect_right(starts, at) - 1]
            raw = lead[at - start : at - start + _COUNT]
            count = int.from_bytes(raw, "little", signed=True)
            nbytes, dtype = self._named[key]
            expected = nbytes // (dtype or UINT8).itemsize
            if count != expected:
                what = f"has {count} elements where the pickle says {expected}"
                raise MalformedCheckpoint(what, path=self._source.path, where=storage_name(key))
        return {}

    def _refuse_rest(self, end: int) -> None:
        rest = self._source.size - end
        if not rest:
            return
        hint = "something was appended to the file; fetch it again"
        if is_torch_legacy(self._source.read(end, min(rest, _HEAD))):
            hint = f"a second checkpoint was saved into the same file; split it at byte {end}"
        what = f"{rest} bytes follow the last storage"
        raise MalformedCheckpoint(what, where=f"byte {end}", hint=hint)


def storage_name(key: str) -> str:
    """What messages call the storage of a key."""
    return f"storage {printable(key)}"
