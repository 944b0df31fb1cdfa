"""Which tensors of two checkpoints are the same ones, for what changed in them (`deltas`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptconv.keys.key_map import STRIP, map_keys, refuse_half_characters
from ckptconv.objects.encodings import holds_tensors
from ckptconv.objects.plain import tensor_form
from ckptconv.support.errors import (
    KeyConflict,
    KeyMismatch,
    RefusedObject,
    errors_at,
    printable,
)
from ckptconv.support.progress import Meter
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import first_few
from ckptconv.tensors.comparison import compare_bytes
from ckptconv.tensors.refs import TensorRef, view_identity
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.state_dicts import StateDict
from ckptconv.tree.walk import tensor_of


class Pair(NamedTuple):
    """A tensor of both checkpoints, and its other names."""

    key: str
    old: TensorRef
    new: TensorRef
    others: tuple[str, ...] = ()


def matched(
    base: Checkpoint, new: Checkpoint, only: str | None, only_new: str | None
) -> tuple[list[Pair], tuple[str, ...]]:
    """The tensors of both, those of several names under one of them, and what is to be said of the
    choice. `KeyMismatch` where they do not fit.
    """
    ours, theirs = base.state_dict(only), new.state_dict(only_new)
    old, beside = _tensors(ours, ours.keys, base)
    found, _ = _tensors(theirs, theirs.keys, new)
    notes = [f"BASE: {note}" for note in ours.notes] + [f"NEW: {note}" for note in theirs.notes]
    # only where it helps: keys that fit may belong to a submodule that is called module
    if found.keys() != old.keys():
        renamed = map_keys(
            theirs.keys, STRIP, theirs.path, theirs.telling_keys, theirs.keys_beside
        ).new
        stripped, _ = _tensors(theirs, renamed, new)
        if stripped.keys() == old.keys():
            found = stripped
            notes.append("the wrappers before the keys of NEW are stripped")
    if beside:
        notes.append(f"values that are not tensors are not compared: {first_few(beside, 3)}")
    with errors_at(path=base.path):
        refuse_half_characters(old)
    pairs = [Pair(key, ref, _fitting(key, ref, found, new)) for key, ref in old.items()]
    extra = [key for key in found if key not in old]
    if extra:
        what = "is in NEW, but not in BASE, and a delta adds no tensors"
        raise KeyMismatch(what, path=new.path, where=extra[0], hint="publish NEW as a whole")
    with errors_at(path=new.path):
        return list(_each_once(pairs, base)), tuple(notes)


def _tensors(
    found: StateDict, keys: Iterable[str | None], checkpoint: Checkpoint
) -> tuple[dict[str, TensorRef], list[str]]:
    """The tensors of a state dict under other keys, and the keys of what is not a tensor."""
    tensors: dict[str, TensorRef] = {}
    beside = []
    for key, node in zip(keys, found.values, strict=True):
        if key is None:
            continue
        ref = tensor_of(node)
        if ref is not None:
            tensors[key] = ref
        elif holds_tensors(node):
            what = "is not a plain tensor, which is all that a delta knows"
            hint = "publish NEW as a whole"
            if tensor_form(node) is not None:  # an array of numpy, which is one in safetensors
                hint = "convert both to safetensors first"
            raise RefusedObject(what, path=checkpoint.path, where=key, hint=hint)
        else:
            beside.append(key)
    return tensors, beside


def _fitting(
    key: str, old: TensorRef, found: Mapping[str, TensorRef], new: Checkpoint
) -> TensorRef:
    """The tensor of NEW of that name, which is like the one in BASE."""
    ref = found.get(key)
    if ref is None:
        what = "is in BASE, but not in NEW, and a delta removes no tensors"
        raise KeyMismatch(what, path=new.path, where=key, hint="publish NEW as a whole")
    for name, ours, theirs in (
        ("dtype", old.dtype.name, ref.dtype.name),
        ("shape", list(old.shown_shape), list(ref.shown_shape)),
    ):
        if ours != theirs:
            what = f"has the {name} {theirs}, but {ours} in BASE, and a delta changes bytes alone"
            is_cast = name == "dtype" and old.dtype.kind == ref.dtype.kind == "float"
            hint = f"convert NEW with --dtype {ours} first" if is_cast else "publish NEW as a whole"
            raise KeyMismatch(what, path=new.path, where=key, hint=hint)
    return ref


def _each_once(pairs: list[Pair], base: Checkpoint) -> Iterator[Pair]:
    """The pairs, of several names of one tensor of the base only the one that it is stored under,
    or that safetensors would store it under: engines look for that one.
    """
    views: dict[object, list[Pair]] = {}
    for pair in pairs:
        views.setdefault(view_identity(pair.old), []).append(pair)
    for named in views.values():
        stored = [pair for pair in named if pair.key not in base.metadata] or named
        kept = min(stored, key=lambda pair: pair.key)
        for other in named:
            if (
                # two views, yet perhaps equal bytes: NEW may hold what BASE ties as two tensors
                view_identity(other.new) != view_identity(kept.new)
                and compare_bytes([(kept.new, other.new)], Meter("read", 0, None)).differing
            ):
                what = f"is the same tensor as {printable(kept.key)} in BASE, but not in NEW"
                hint = "write BASE as safetensors with --tied duplicate first"
                raise KeyConflict(what, where=other.key, hint=hint)
        yield kept._replace(others=tuple(pair.key for pair in named if pair is not kept))
