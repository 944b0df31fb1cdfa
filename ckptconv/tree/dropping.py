"""Parts of a checkpoint left out, the rest as it was: by their paths, or because bytes are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ckptconv.objects.torch_read import Window
from ckptconv.pickles.nodes import Node, children, mapping_pairs, substituted, with_pairs
from ckptconv.support.addresses import UrlPath
from ckptconv.support.choices import Words, listed, refuse_no_words
from ckptconv.support.errors import KeyConflict, MalformedCheckpoint, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text, first_few, look_hint, size_text
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, origins, view_identity
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.walk import (
    Place,
    chain_of,
    inner,
    label_text,
    place_text,
    tensor_of,
    tensors_of,
    walk,
)

Found = tuple[Node, dict[int, str], bool]
"""A dict, the items that it is to lose, each a number and its path, and whether it, or one around
it, stands at several places.
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
            stand_ins: dict[int, Node] = {}
            for holder, gone, shared in found.values():
                pairs = mapping_pairs(holder) or ()
                kept = [pair for at, pair in enumerate(pairs) if at not in gone]
                stand_ins[id(holder)] = with_pairs(holder, kept)
                notes += [_note(path, pairs[at][1], shared) for at, path in gone.items()]
                dropped += [pairs[at][1] for at in gone]
            root = substituted(root, stand_ins)
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
        """The dicts with items to leave out, by id; no dict that is in another of them."""
        found: dict[int, Found] = {}
        places = Counter(id(child) for _, node in walk(root) for _, child in inner(node))
        for place, node in walk(root):
            if any(id(step[2]) in found for step in chain_of(place)):
                continue
            self._refuse_items(place, node)
            base = f"{place_text(place)}." if place is not None else ""
            gone: dict[int, str] = {}
            for at, (key, _) in enumerate(mapping_pairs(node) or ()):
                path = base + label_text(key)  # whole: `place_text` cuts long labels
                for glob in self.globs:
                    if fnmatchcase(path, glob) or fnmatchcase(path, f"{glob}.*"):
                        met.add(glob)
                        gone[at] = path
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


def _note(path: str, value: Node, shared: bool) -> str:
    refs = {view_identity(ref): ref for _, ref in tensors_of(value)}
    size = size_text(sum(ref.nbytes for ref in refs.values()))
    what = f" ({count_text(len(refs), 'tensor')}, {size})" if refs else ""
    where = ", and wherever else the same dict stands" if shared else ""
    return f"{printable(path)} is dropped{what}{where}"


# ----------------------------------------------------------------------------------- what is lost


IsWhole = Callable[[Storage], bool]
"""Whether the bytes of a storage are there, all of them, as they were written."""


def without_lost(checkpoint: Checkpoint, is_whole: IsWhole) -> Checkpoint:
    """The checkpoint without what is not whole: the items of dicts that are lost tensors, or hold
    one in a list or an object, whose other items would get other numbers without it.

    Raises `MalformedCheckpoint` where a lost tensor is in no dict.
    """
    root = checkpoint.root
    if _holds_lost(root, is_whole):
        what = "what is lost is not in a dict, and cannot be left out of anything else"
        raise MalformedCheckpoint(what, path=checkpoint.path)
    while found := _outermost(root, is_whole):  # from the outside inwards, as `Drop` does
        root = substituted(root, found)
    return replace(checkpoint, root=root)


def _outermost(root: Node, is_whole: IsWhole) -> dict[int, Node]:
    """What stands in for dicts with lost items, by id; no dict that is in another of them."""
    found: dict[int, Node] = {}
    for place, node in walk(root):
        if found and any(id(step[2]) in found for step in chain_of(place)):
            continue
        pairs = mapping_pairs(node) or ()
        kept = [pair for pair in pairs if not _holds_lost(pair[1], is_whole)]
        if len(kept) < len(pairs):
            found[id(node)] = with_pairs(node, kept)
    return found


def _holds_lost(value: Node, is_whole: IsWhole) -> bool:
    """Whether a value is lost, or holds something lost that no dict in it can leave out."""
    seen: set[int] = set()
    work = [value]
    while work:
        node = work.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        # the dicts within a tensor belong to it: nothing can be left out of them
        inside = walk(node.state) if type(node) is TensorObject else ()
        if any(_is_lost(each, is_whole) for each in (node, *(part for _, part in inside))):
            return True
        if mapping_pairs(node) is None:
            work += [child for _, child in children(node)]
    return False


def _is_lost(node: Node, is_whole: IsWhole) -> bool:
    if type(node) is Window:
        return not is_whole(node.storage)
    ref = tensor_of(node) or node
    return type(ref) in (TensorRef, Storage) and not all(map(is_whole, origins([ref])))
