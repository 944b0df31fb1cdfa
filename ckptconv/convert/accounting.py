"""Whether a plan accounts for all that its source names: what `--verify` sees beside the reader.

Two questions, both asked before anything is written. Is all in the tree that the source's pickles
(or safetensors headers) name, counted by `census` and not by the reader? And is all that is in the
tree either in the output or among what the plan lists as left out? The first is asked of single
files and of shards; what joins tensors out of many files (ranks, ZeRO, DCP) and TorchScript leave
out much that their pickles name, by design, and are not counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import field

from ckptconv.convert.plan import ConversionPlan, PlannedFile
from ckptconv.formats import torch_output
from ckptconv.formats.containers import is_safetensors, is_tar, is_torch_legacy, is_zip, open_source
from ckptconv.formats.torch_zip import read_limited
from ckptconv.formats.zip_archive import read_directory, root_folder
from ckptconv.io.guarded import unguarded
from ckptconv.io.location import Location
from ckptconv.io.source import MemorySource, Source
from ckptconv.objects.known_names import COPIES
from ckptconv.objects.torch_read import Window
from ckptconv.pickles.census import Census, held_stream, take_census
from ckptconv.pickles.nodes import ABSENT, Call, Dict, Node, PersistentId, calls_of
from ckptconv.pickles.opcodes import read_pickles
from ckptconv.support.errors import VerificationFailed
from ckptconv.support.limits import held
from ckptconv.support.records import dataclass
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, origins
from ckptconv.tree.modules import complete_tensors
from ckptconv.tree.walk import tensor_of

_HINT = "please report this; without --verify it is still converted"

Key = tuple[str, str, int, int]
"""What a storage is known by: its file's path, its name, where it begins; and the stream within the
file that it is in.
"""


@dataclass(slots=True)
class NamedStorages:
    """What files name: storages, by path and name with how many of it there are, and tensors."""

    storages: Counter[tuple[str, str]] = field(default_factory=Counter)
    tensors: int = 0


@dataclass(slots=True)
class HeldCounts:
    """What nodes hold: storages that are not empty, how many tensors (bare storages counted)."""

    storages: set[Key] = field(default_factory=set)
    tensors: int = 0


def refuse_unaccounted(plan: ConversionPlan) -> int | None:
    """How many storages the source names; None where they are not counted. Raises
    `VerificationFailed` for one that is neither in the output of `plan` nor listed as left out.
    """
    reads = plan.made_of
    with held(reads.limits):
        tree = found_in([reads.checkpoint.root, *reads.checkpoint.dropped])
        named = named_by(plan)
        if named is not None:
            if reads.checkpoint.modules:
                tree = _with_modules(plan, tree)
            _refuse_unread(plan, named, tree)
        _refuse_lost(plan)
    return None if named is None else sum(named.storages.values())


def _refuse_unread(plan: ConversionPlan, named: NamedStorages, tree: HeldCounts) -> None:
    """Refuse what the files name and the tree does not hold."""
    read = Counter(key[:2] for key in tree.storages)
    missing = [name[1] for name, count in named.storages.items() if read[name] < count]
    if missing:
        raise _failure(
            plan, missing, "is named by the pickle, but is not in the tree that was read from it"
        )
    if named.tensors > tree.tensors:
        what = f"its pickles make {named.tensors} tensors, of which {tree.tensors} were read"
        raise VerificationFailed(what, path=plan.source, hint=_HINT)


def _refuse_lost(plan: ConversionPlan) -> None:
    """Refuse what is in the converted part of the tree, and neither in the output nor listed."""
    kept = found_in([ref for _, ref in plan.made_of.tensors()]).storages
    kept |= found_in([item.values for file in plan.files for item in file.layout.items]).storages
    needed = found_in([plan.made_of.part], but=COPIES).storages - kept
    if needed:
        needed -= found_in([item.node for item in plan.skipped]).storages
    if needed:
        raise _failure(
            plan,
            sorted(key[1] for key in needed),
            "was read, but is neither in the output nor listed as left out",
        )


def refuse_unwritten(file: PlannedFile, written: Location) -> None:
    """Refuse a written torch file whose pickle, counted, does not name all that was planned."""
    named = NamedStorages()
    with closing(written.open()) as source:
        _count(source, named)
    records = {
        f"{torch_output.ROOT}/{item.name}"
        for item in file.layout.items
        if item.name.startswith("data/") and item.nbytes
    }
    missing = sorted(records - {name for _, name in named.storages})
    if missing:
        raise VerificationFailed(
            "was written, but the pickle does not name it", path=file.path, where=missing[0]
        )
    planned = len({id(ref) for _, ref in file.tensors()})
    if named.tensors < planned:
        raise VerificationFailed(
            f"its pickle makes {named.tensors} tensors where {planned} were planned", path=file.path
        )


def _failure(plan: ConversionPlan, names: list[str], what: str) -> VerificationFailed:
    more = f" ({len(names)} storages in all)" if len(names) > 1 else ""
    return VerificationFailed(what + more, path=plan.source, where=names[0], hint=_HINT)


def found_in(roots: Iterable[Node], *, but: frozenset[str] = frozenset()) -> HeldCounts:
    """What these nodes and all that is in them hold; calls of `but` are not looked into."""
    found = HeldCounts()
    seen: set[int] = set()
    work: list[Node] = list(roots)
    while work:
        node = work.pop()
        kind = type(node)
        if kind in _PLAIN or id(node) in seen:
            continue
        seen.add(id(node))
        if kind is TensorRef or kind is Storage or kind is Window or kind is TensorObject:
            found.tensors += 1
            found.storages.update(_key(storage) for storage in _storages_of(node) if storage.nbytes)
            if kind is TensorObject:
                work += (node.cls, node.state)
        elif kind is Dict:
            work.extend(part for pair in node.pairs for part in pair)
        elif kind is list or kind is tuple:
            work.extend(node)
        elif kind is Call and node.name not in but:
            work += (
                node.func,
                node.kwargs,
                *node.args,
                *node.items,
                *(part for pair in node.pairs for part in pair),
            )
            if node.state is not ABSENT:
                work.append(node.state)
        elif kind is PersistentId:
            work.append(node.pid)
    return found


_PLAIN = frozenset((str, int, float, bool, bytes, type(None), complex))


def _storages_of(node: Node) -> Iterable[Storage]:
    if type(node) is Storage:
        return (node,)
    if type(node) is Window:
        return (node.storage,)
    return origins(filter(None, [tensor_of(node)]))


def _key(storage: Storage) -> Key:
    whole = storage.whole
    stream = 0
    if whole.source.is_in_memory():  # a stream within the file, where offsets begin anew
        stream = id(whole.source)
    return str(whole.source.path), whole.name, whole.offset, stream


def _with_modules(plan: ConversionPlan, tree: HeldCounts) -> HeldCounts:
    """What the tree held before state dicts took the place of its modules, less what no state dict
    has to hold.

    Raises `VerificationFailed` for what a module would have given its state dict, and did not.
    """
    before = open_source(unguarded(plan.inputs[0]))
    before = complete_tensors(before, list(calls_of(before.root)))
    checkpoint = plan.made_of.checkpoint
    strays = (stray.node for stray in checkpoint.module_strays)
    allowed = found_in([*strays, *checkpoint.module_parts])
    whole = found_in([before.root])
    for source in before.sources[1:]:  # records that were inflated once more
        source.close()
    # without their streams, of which each opening makes its own
    kept = {key[:3] for key in tree.storages | allowed.storages}
    lost = {key[:3] for key in whole.storages} - kept
    if lost:
        raise _failure(
            plan,
            sorted(name for _, name, _ in lost),
            "belongs to a module, but is not in its state dict",
        )
    return whole


# ---------------------------------------------------------------------------------------- the files


def named_by(plan: ConversionPlan) -> NamedStorages | None:
    """What the files of a source name; None for one of a kind that is not counted."""
    checkpoint = plan.made_of.checkpoint
    names_storages = checkpoint.container.names_storages
    if not names_storages or (checkpoint.modules and len(_files(plan)) > 1):
        return None
    named = NamedStorages()
    for source in _files(plan):
        _count(source, named)
    return named


def _files(plan: ConversionPlan) -> list[Source]:
    # a file that is read as two checkpoints is one, as its storages are
    files = {str(source.path): source for source in plan.inputs if source.is_file()}
    return [*map(unguarded, files.values())]


def _count(source: Source, named: NamedStorages) -> None:
    """Add what one file, or one stream within a file, names."""
    head = source.read(0, min(source.size, _HEAD))
    if is_zip(head):
        records = read_directory(source)
        root = root_folder(records, "data.pkl") or ""
        _add(
            take_census(read_limited(source, records[f"{root}data.pkl"])),
            source,
            named,
            lambda key: f"{root}data/{key}",
        )
    elif is_torch_legacy(head):
        from ckptconv.formats.torch_legacy import storage_name

        # the fourth: a magic number, the protocol and the sizes of the system stand before it
        _add(take_census(read_pickles(source, 0, 4)[0][3]), source, named, storage_name)
    elif is_tar(head):
        from ckptconv.formats.torch_tar import members_of

        (stream,), _ = read_pickles(members_of(source)["pickle"], 0, 1)
        named.tensors += len(take_census(stream).references)
    elif is_safetensors(head):
        _add_header(source, named)
    else:
        stream = source.read(0, source.size)
        census = take_census(stream)
        _add(census, source, named, str)
        for inner in census.streams:
            _count(MemorySource(held_stream(stream, inner), source.path), named)


_HEAD = 512


def _add(
    census: Census, source: Source, named: NamedStorages, name_of: Callable[[str], str]
) -> None:
    path = str(source.path)
    named.storages.update((path, name_of(key)) for key, numel in census.storages.items() if numel)
    named.tensors += census.tensors


def _add_header(source: Source, named: NamedStorages) -> None:
    """The tensors that a safetensors header names, and that are not empty."""
    header = json.loads(source.read(8, int.from_bytes(source.read(0, 8), "little")))
    path = str(source.path)
    for key, entry in header.items():
        if key != "__metadata__" and len(set(entry["data_offsets"])) > 1:
            named.storages[path, key] += 1
