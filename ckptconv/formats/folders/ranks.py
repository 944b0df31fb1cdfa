"""Files of ranks (`torch.save` of a sharded state dict, one per rank) joined into the checkpoint
that they are together.

The DTensors (or FSDP1's ShardedTensors) at one place in all files become one tensor. The rest is
that of the lowest rank and must be the same in all of them. No rank's shard ever passes for the
whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import PurePath

from ckptconv.formats.folders.alone import is_shard, refuse_flat
from ckptconv.formats.folders.dtensors import Shard, read_shard
from ckptconv.io.location import is_plain_name
from ckptconv.pickles.nodes import Node, substituted
from ckptconv.support.errors import (
    IncompleteCheckpoint,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    errors_at,
    printable,
)
from ckptconv.support.records import dataclass
from ckptconv.support.text import agreeing, count_text, first_few, first_few_in_short
from ckptconv.tensors.assembly import assembled
from ckptconv.tensors.element_pairs import aligned, words_of
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tensors.stream import iter_chunks
from ckptconv.tree.checkpoint import TORCH_LOAD, Checkpoint, Container, whole_of
from ckptconv.tree.labels import names_rank_state
from ckptconv.tree.walk import labels_of, place_text, tensor_of, walk

Labels = tuple[Node, ...]

# Buffers that data-parallel training leaves to each rank; torch's consolidation takes rank 0's
_OF_A_RANK = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True, eq=False)
class _Rank:
    """One open file: its shards and its other tensors by place, and the containers of its tree."""

    checkpoint: Checkpoint
    shards: Mapping[Labels, tuple[Node, Shard]]
    others: Mapping[Labels, TensorRef]
    holders: Sequence[Node]

    @property
    def number(self) -> int:
        """The global rank that saved it."""
        return next(iter(self.shards.values()))[1].mesh.rank


def join_ranks(opened: Sequence[Checkpoint]) -> Checkpoint:
    """The checkpoint that files of ranks are together; each must hold shards.

    Raises `UnsupportedCheckpoint` when ranks are missing (and says which), `MalformedCheckpoint`
    when the files are not those of one checkpoint.
    """
    ranks = [_read(checkpoint) for checkpoint in opened]
    for rank in ranks:
        if not rank.shards:
            what = "holds no shards of tensors, so it is not the file of one rank"
            hint = (
                "name one file, or the files of all ranks; ckptconv merge, average and batch take "
                "several checkpoints"
            )
            raise UnsupportedCheckpoint(what, path=rank.checkpoint.path, hint=hint)
    refuse_flat((str(labels[-1]) for labels in ranks[0].shards), ranks[0].checkpoint.path)
    ranks.sort(key=lambda rank: rank.number)
    _refuse_duplicates(ranks)
    _refuse_missing(ranks)
    for rank in ranks[1:]:
        _refuse_other_keys(ranks[0], rank)
    stand_ins = {}
    for labels, (node, _) in ranks[0].shards.items():
        with errors_at(path=ranks[0].checkpoint.path, where=_text(labels)):
            stand_ins[id(node)] = _joined([rank.shards[labels][1] for rank in ranks])
    return _as_one(ranks, stand_ins)


def _as_one(ranks: Sequence[_Rank], stand_ins: dict[int, Node]) -> Checkpoint:
    first = ranks[0].checkpoint
    whole = whole_of([rank.checkpoint for rank in ranks], first.container, None, first.path)
    return replace(
        first,
        container=_of_ranks(first.container, len(ranks)),
        root=substituted(first.root, stand_ins, ranks[0].holders),
        nbytes=whole.nbytes,
        notes=(*first.notes, *_disagreements(ranks)),
        sources=whole.sources,
    )


def _of_ranks(one: Container, count: int) -> Container:
    """The container of a checkpoint of `count` files, each in the container `one`."""
    why_not = "each file opens only in a process group with the ranks that wrote them"
    found = replace(one, by=TORCH_LOAD, why_not=why_not, weights_only=False)
    if count == 1:
        return found
    name = f"{one.name}, {count} ranks"
    return replace(found, name=name, suffix=".pt", is_legacy=False, names_storages=False)


def _read(checkpoint: Checkpoint) -> _Rank:
    shards: dict[Labels, tuple[Node, Shard]] = {}
    others: dict[Labels, TensorRef] = {}
    holders: list[Node] = []
    overlay: dict[int, Node] = {}
    for place, node in walk(checkpoint.root, overlay):
        if is_shard(node):
            overlay[id(node)] = None  # what is inside is not looked at
            with errors_at(path=checkpoint.path, where=place_text(place)):
                shards[tuple(labels_of(place))] = node, read_shard(node)
        elif (tensor := tensor_of(node)) is not None:
            others[tuple(labels_of(place))] = tensor
        else:
            holders.append(node)
    if len({shard.mesh.rank for _, shard in shards.values()}) > 1:
        raise MalformedCheckpoint("holds the shards of several ranks", path=checkpoint.path)
    return _Rank(checkpoint, shards, others, holders)


def _text(labels: Labels) -> str:
    return ".".join(str(label) for label in labels) or "the whole file"


def _refuse_duplicates(ranks: Sequence[_Rank]) -> None:
    for one, other in pairwise(ranks):
        if one.number == other.number:
            what = f"is a file of rank {one.number}, and so is {printable(one.checkpoint.path)}"
            hint = "name the file of each rank once"
            raise MalformedCheckpoint(what, path=other.checkpoint.path, hint=hint)


def _refuse_missing(ranks: Sequence[_Rank]) -> None:
    given = {rank.number for rank in ranks}
    shards = (shard for rank in ranks for _, shard in rank.shards.values())
    needed = set[int]().union(*{shard.mesh.ranks for shard in shards if shard.is_split})
    missing = sorted(needed - given)
    if not missing:
        return
    there = f"{len(ranks)} files were named"
    if len(ranks) == 1:
        there = f"holds rank {ranks[0].number}'s shards only"
    what = f"but its tensors are split over {len(needed)} ranks; missing: rank"
    every = "both ranks" if len(needed) == 2 else f"all {len(needed)} ranks"
    raise IncompleteCheckpoint(
        f"{there}, {what} {first_few([*map(str, missing)], 8)}",
        path=ranks[0].checkpoint.path,
        hint=f"name the files of {every}: ckptconv convert RANK0 RANK1 ... OUT",
    )


def _refuse_other_keys(first: _Rank, other: _Rank) -> None:
    """The two files must hold shards and tensors at the same places."""
    for ours, theirs in (
        (first.shards.keys(), other.shards.keys()),
        (first.others.keys(), other.others.keys()),
    ):
        if ours != theirs:
            what = f"is in the file of only one of the ranks {first.number} and {other.number}"
            raise _strange(what, other, next(iter(ours ^ theirs)))


def _strange(what: str, rank: _Rank, labels: Labels) -> MalformedCheckpoint:
    return MalformedCheckpoint(
        what,
        path=rank.checkpoint.path,
        where=_text(labels),
        hint="the files do not belong to one checkpoint",
    )


def _joined(shards: Sequence[Shard]) -> TensorRef:
    first = shards[0]
    by_rank = {shard.mesh.rank: shard for shard in shards}
    grids: set[tuple[Shape, Shape]] = set()
    parts: dict[tuple[Shape, Shape], TensorRef] = {}
    for shard in shards:
        rank = shard.mesh.rank
        ours, its = ((one.dtype, one.shape, one.placements) for one in (first, shard))
        if ours != its:
            what = "have it in different types, shapes or placements"
            raise MalformedCheckpoint(f"the ranks {first.mesh.rank} and {rank} {what}")
        grid = shard.mesh[:2]
        if shard.is_split and grid not in grids:  # once for all of its ranks: there may be hundreds
            grids.add(grid)
            odd = next((other for other in grid[1] if by_rank[other].mesh[:2] != grid), None)
            if odd is not None:
                what = "split it over different meshes"
                raise MalformedCheckpoint(f"the ranks {odd} and {rank} {what}")
        for start, ref in shard.parts():
            # of replicas that of the lowest rank, which comes first
            parts.setdefault((start, ref.shape), ref)
    whole = assembled(first.dtype, first.shape, [(start, ref) for (start, _), ref in parts.items()])
    return whole._replace(requires_grad=first.requires_grad)


def _disagreements(ranks: Sequence[_Rank]) -> list[str]:
    """Notes on tensors that each rank may have; `MalformedCheckpoint` where another one differs."""
    own, first = [], ranks[0].number
    for labels, tensor in ranks[0].others.items():
        others = (rank for rank in ranks[1:] if not are_equal(tensor, rank.others[labels]))
        odd = next(others, None)
        if odd is None:
            continue
        if not _is_of_a_rank(labels):
            what = f"is not a shard, but differs between the ranks {first} and {odd.number}"
            raise _strange(what, odd, labels)
        own.append(_text(labels))
    if not own:
        return []
    named = f"those of rank {first} are taken: {first_few_in_short(own, 3)}"
    tensors = f"{count_text(len(own), 'tensor')} {agreeing(len(own), 'differ')}"
    return [f"{tensors} on each rank; {named}"]


def _is_of_a_rank(labels: Labels) -> bool:
    texts = [label for label in labels if type(label) is str]
    is_buffer = any(text.rpartition(".")[2] in _OF_A_RANK for text in texts[-1:])
    return is_buffer or any("." not in text and names_rank_state(text) for text in texts)


def end_to_end(refs: Sequence[TensorRef], axis: int) -> TensorRef:
    """Tensors that lie one behind the other along a dimension."""
    *starts, length = accumulate((ref.shape[axis] for ref in refs), initial=0)
    before, behind = refs[0].shape[:axis], refs[0].shape[axis + 1 :]
    zeros, more = (0,) * len(before), (0,) * len(behind)
    parts = [((*zeros, at, *more), ref) for at, ref in zip(starts, refs, strict=True)]
    return assembled(refs[0].dtype, (*before, length, *behind), parts)


def are_equal(one: TensorRef, other: TensorRef) -> bool:
    """Whether two tensors hold the same values: by checksums of their storages, if any."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if _checksum(one) is not None and _checksum(one) == _checksum(other):
        return True
    return all((ours == its).all() for ours, its in aligned(words_of(one), words_of(other)))


class Copies:
    """Files of ranks, each of which has a part of its own of some tensors: where two have the same
    of all, one was copied over the other.
    """

    def __init__(self) -> None:
        self._known: dict[object, list[tuple[PurePath, list[TensorRef]]]] = {}

    def refuse(self, path: PurePath, parts: Iterable[tuple[str, TensorRef]]) -> None:
        """Raise `MalformedCheckpoint` where a file met before has the same `parts`, which go by
        name. What is one number all through (zeros, ones) tells nothing: ranks may both have it.
        """
        named = [(name, ref) for name, ref in parts if ref.numel > 1]
        refs = [ref for _, ref in named]
        mark = len(named), *((name, mark_of(ref)) for name, ref in named[:_MARKED])
        alike = self._known.setdefault(mark, [])
        if alike and not any(map(varies, refs)):
            return
        for other, theirs in alike:
            pairs = zip(refs, theirs, strict=True)
            if all(mark_of(one) == mark_of(its) and are_equal(one, its) for one, its in pairs):
                what = f"has the same of each tensor as {printable(other)}"
                hint = "one was copied over the other: fetch both again"
                raise MalformedCheckpoint(what, path=path, hint=hint)
        alike.append((path, refs))


def refuse_other_name(checkpoint: Checkpoint, is_there: Callable[[str], bool]) -> None:
    """Raise `MalformedCheckpoint` for a file that `torch.save` wrote under the name of another one
    that `is_there` beside it: nothing else may tell what is whose.
    """
    path, saved_as = checkpoint.path, checkpoint.facts.folder
    if saved_as in ("", _NAMELESS, path.stem) or not is_plain_name(saved_as):
        return
    if is_there(f"{saved_as}{path.suffix}"):
        what = f"was saved as {printable(saved_as)}{path.suffix}: "
        what += "one was copied over the other, or they were exchanged"
        raise MalformedCheckpoint(what, path=path, hint="fetch both again")


_NAMELESS = "archive"  # what torch calls it where it is given an open file, and no name
_MARKED = 64  # tensors that nearly always tell two files apart: no time goes into more of them


def mark_of(ref: TensorRef) -> object:
    """What is equal for equal tensors that lie alike in their files, and differs for nearly all
    others; where a file has no checksums, its first bytes.
    """
    known = _checksum(ref)
    first = b"" if known is not None else bytes(next(iter_chunks(ref))[:_FIRST])
    return ref.dtype, ref.shape, known, first


_FIRST = 1 << 12


def varies(ref: TensorRef) -> bool:
    """Whether a tensor has two different values."""
    first = b""
    for chunk in iter_chunks(ref):
        first = first or bytes(chunk[: ref.dtype.itemsize])
        if chunk != first * (len(chunk) // len(first)):
            return True
    return False


def _checksum(ref: TensorRef) -> object:
    """What two tensors have in common only if they are equal: how they lie in storages of one
    checksum. None: unknown.
    """
    if not ref.is_view or ref.storage.crc32 is None:
        return None
    held = ref.storage
    lies = (ref.storage_offset, ref.stride, ref.conj, ref.neg)
    return held.crc32, held.nbytes, held.big_endian, lies
