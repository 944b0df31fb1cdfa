"""Parts of a checkpoint left out by their paths, the rest as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ckptconv.pickles.nodes import (
    Node,
    children,
    containers,
    mapping_pairs,
    substituted,
    with_pairs,
)
from ckptconv.support.addresses import UrlPath
from ckptconv.support.choices import Words, listed, refuse_no_words
from ckptconv.support.errors import KeyConflict, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text, first_few, look_hint, size_text
from ckptconv.tensors.refs import view_identity
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.walk import Place, chain_of, inner, label_text, place_text, tensors_of, walk

Found = tuple[Node, list[tuple[int, str]], bool]
"""A dict, the numbers and paths of the items that it is to lose, and whether it, or one around it,
stands at several places.
"""


@dataclass(frozen=True, slots=True)
class Drop:
    """An edit: leaves out what stands at a path that one of `globs` matches, such as ``optimizer``
    or ``callbacks.*``.

    The paths are those of the items of dicts, as `inspect` shows them; of keys with dots, the words
    before a dot are a path too, which all keys behind it have. A part that stands at
    several places has the path of the first of them. Raises `KeyConflict` where a glob matches
    nothing, where it matches an item of a list (the others would get other numbers), and where
    nothing is left.
    """

    globs: Words

    def __post_init__(self) -> None:
        refuse_no_words(globs=self.globs)
        object.__setattr__(self, "globs", listed(self.globs))

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        root, met = checkpoint.root, set[str]()
        notes: list[str] = []
        dropped: list[Node] = []
        # a dict inside one that is made anew is another dict then: so from the outside inwards
        while found := self._outermost(root, met):
            stand_ins = {id(holder): _without(holder, gone) for holder, gone, _ in found.values()}
            for holder, gone, shared in found.values():
                values = [(mapping_pairs(holder) or ())[at][1] for at, _ in gone]
                for (_, path), value in zip(gone, values, strict=True):
                    notes.append(_note(path, value, shared))
                dropped += values
            root = substituted(root, containers(root), stand_ins)
        idle = [glob for glob in self.globs if glob not in met]
        if idle:
            what = f"--drop {printable(idle[0])} matches nothing in it"
            raise KeyConflict(what, path=checkpoint.path, hint=_look(checkpoint))
        return replace(
            checkpoint,
            root=root,
            notes=(*checkpoint.notes, *notes),
            dropped=(*checkpoint.dropped, *dropped),
        )

    def _outermost(self, root: Node, met: set[str]) -> dict[int, Found]:
        """The dicts with items to leave out, by id, each with the numbers and paths of these; no
        dict that is in another of them.
        """
        found: dict[int, Found] = {}
        places = Counter(id(child) for _, node in walk(root) for _, child in inner(node))
        for place, node in walk(root):
            if any(id(step[2]) in found for step in chain_of(place)):
                continue
            self._refuse_items(place, node)
            pairs = mapping_pairs(node)
            if pairs is None:
                continue
            base = f"{place_text(place)}." if place is not None else ""
            gone = []
            for at, (key, _) in enumerate(pairs):
                path = base + label_text(key)
                for glob in self.globs:
                    if fnmatchcase(path, glob) or fnmatchcase(path, f"{glob}.*"):
                        met.add(glob)
                        gone.append((at, path))
                        break
            if gone:
                around = (id(node), *(id(step[2]) for step in chain_of(place)))
                found[id(node)] = node, gone, any(places[one] > 1 for one in around)
        return found

    def _refuse_items(self, place: Place, node: Node) -> None:
        if type(node) not in (list, tuple) or place is None:
            return
        base = place_text(place)
        for at in range(len(node)):
            if any(fnmatchcase(f"{base}.{at}", glob) for glob in self.globs):
                what = "is an item of a list, and the others would get other numbers without it"
                hint = f"drop all of it: --drop {printable(base)}"
                raise KeyConflict(what, where=f"{base}.{at}", hint=hint)


def _look(checkpoint: Checkpoint) -> str:
    """How to see the paths; those of a checkpoint that several make together stand in no file."""
    if isinstance(checkpoint.path, UrlPath) or Path(checkpoint.path).exists():
        return look_hint(checkpoint.path)
    labels = [label_text(label) for label, _ in children(checkpoint.root)]
    return f"it has {count_text(len(labels), 'part')}: {first_few(labels, 5)}"


def _without(holder: Node, gone: Sequence[tuple[int, str]]) -> Node:
    """A dict of the same class without some of its items."""
    numbers = {at for at, _ in gone}
    pairs = [pair for at, pair in enumerate(mapping_pairs(holder) or ()) if at not in numbers]
    return with_pairs(holder, pairs)


def _note(path: str, value: Node, shared: bool) -> str:
    refs = {view_identity(ref): ref for _, ref in tensors_of(value)}
    size = size_text(sum(ref.nbytes for ref in refs.values()))
    what = f" ({count_text(len(refs), 'tensor')}, {size})" if refs else ""
    where = ", and wherever else the same dict stands" if shared else ""
    return f"{printable(path)} is dropped{what}{where}"
