"""What `torch.save` writes since torch 1.6, laid out for writing: records under the folder
``archive``, the pickle first. Source: torch/serialization.py and
caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

from ckptconv.formats.target_format import Layout, NamedTensor, Retag, TargetFormat, Tree
from ckptconv.formats.zip_layout import ALIGNMENT, NewRecord, lay_out_records
from ckptconv.io.crc import crc32
from ckptconv.objects.torch_write import StoredAs, TorchLeaves
from ckptconv.pickles.nodes import ORDERED_DICT, Call
from ckptconv.pickles.writer import write_pickle
from ckptconv.support.records import made
from ckptconv.tensors.compaction import CastRule, NewStorage, compact
from ckptconv.tensors.dtypes import UINT8
from ckptconv.tensors.refs import Storage, TensorRef, refuse_packed

ROOT = "archive"
"""The folder of the records in what is written."""


def lay_out_torch_zip(tree: Tree, cast: CastRule, retag: Retag) -> Layout:
    """The output file for a tree: its pickle, and a record for each storage that its tensors need.

    `cast` gives the element type in which a type is written; `retag` the location tag of a storage.
    Records are numbered in the order in which the pickle names them, which torch's reader relies
    on.
    """
    placements = compact(tree.tensors, tree.storages, cast)
    numbers: dict[int, int] = {}
    ordered: list[NewStorage] = []

    tags: dict[str, str] = {}

    def stored_as(node: TensorRef | Storage) -> tuple[str, StoredAs]:
        new, dtype, offset, stride, resolved = placements[id(node)]
        _, _, storage_dtype, location, nbytes = new
        following = len(ordered)
        number = numbers.setdefault(id(new), following)
        if number == following:
            ordered.append(new)
        tag = tags.get(location)
        if tag is None:
            tag = tags[location] = retag(location)
        return str(number), made(
            StoredAs, (tag, storage_dtype, nbytes, dtype, offset, stride, resolved)
        )

    pickle = write_pickle(tree.root, TorchLeaves(stored_as), tree.overlay)
    placements.clear()  # a million take 300 MB
    return lay_out_records(_records(pickle, ordered))


def _records(pickle: bytes, storages: Iterable[NewStorage]) -> Iterator[NewRecord]:
    """The records of a file, in torch's order."""
    yield _record("data.pkl", pickle)
    yield _record(".format_version", b"1")
    yield _record(".storage_alignment", b"%d" % ALIGNMENT)
    yield _record("byteorder", b"little")
    yield from map(_storage_record, count(), storages)
    yield _record("version", b"3\n")
    # forty digits, the same for the same tree, as torch's are (for logs; not a checksum)
    yield _record(".data/serialization_id", b"%030d%010d" % (len(pickle), crc32(pickle)))


def _record(name: str, content: bytes) -> NewRecord:
    return NewRecord(name, f"{ROOT}/{name}".encode(), b"", len(content), content, UINT8)


def _storage_record(number: int, new: NewStorage) -> NewRecord:
    values, dtype, _, _, nbytes = new
    name = f"data/{number}"
    return made(NewRecord, (name, f"{ROOT}/{name}".encode(), b"", nbytes, values, dtype))


# What can be done about a tensor that safetensors holds and torch does not
_NOT_IN_TORCH = "write safetensors (--to safetensors), or leave it out (--exclude)"


class TorchFile(TargetFormat):
    """What `torch.save` writes since torch 1.6: whole checkpoints, or one state dict's tensors."""

    name = "torch"
    noun = "a sharded torch output"
    suffix = ".pt"
    shards_named = "pytorch_model.bin"
    holds_trees = True
    keeps_modules = True
    keeps_order = True
    is_counted = True
    shares_storages = True

    def refuse(self, named: Iterable[NamedTensor]) -> None:
        refuse_packed(((key, ref) for key, ref, _ in named), _NOT_IN_TORCH)

    def lay_out(
        self, tensors: Sequence[NamedTensor], metadata: Mapping[str, str], retag: Retag
    ) -> Layout:
        root = Call(ORDERED_DICT, ())
        root.pairs = [(key, ref) for key, ref, _ in tensors]
        refs = {id(ref): (ref, dtype) for _, ref, dtype in tensors}
        tree = Tree(root, {}, [ref for ref, _ in refs.values()], [])
        return lay_out_torch_zip(tree, lambda ref: refs[id(ref)][1], retag)

    def lay_out_tree(self, tree: Tree, cast: CastRule, retag: Retag) -> Layout:
        return lay_out_torch_zip(tree, cast, retag)


TORCH = TorchFile()
