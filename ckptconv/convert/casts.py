"""Which tensors of a state dict are cast, and to what: by their keys in the output."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter

from ckptconv.formats.target_format import Tree
from ckptconv.pickles.nodes import Call, mapping_pairs
from ckptconv.support.errors import KeyConflict, OptionRefused, printable
from ckptconv.support.records import dataclass
from ckptconv.tensors.compaction import CastRule
from ckptconv.tensors.dtypes import DType, floating_dtype
from ckptconv.tensors.refs import TensorRef, view_identity
from ckptconv.tensors.scaled_weights import refuse_cast
from ckptconv.tree.reshaping import Applied
from ckptconv.tree.walk import tensor_of, tensors_of, walk


@dataclass(frozen=True, slots=True)
class Casts:
    """What floating tensors are cast to: those whose keys match a glob of `named` to its type,
    those that match one of `kept` stay, and all others become `default` (None: stay too).

    Globs meet the keys that the output has.
    """

    default: DType | None = None
    kept: tuple[str, ...] = ()
    named: tuple[tuple[str, DType], ...] = ()

    def __bool__(self) -> bool:
        return self.default is not None or bool(self.named)

    @property
    def has_globs(self) -> bool:
        return bool(self.kept or self.named)

    def asked(self, key: str) -> DType | None:
        """What the tensor under this key is to be (None: what it is). Raises `KeyConflict` where
        two globs ask for different types.
        """
        found: dict[str, DType | None] = {
            f"--cast {glob}={dtype.name}": dtype
            for glob, dtype in self.named
            if fnmatchcase(key, glob)
        }
        found |= {f"--keep-dtype {glob}": None for glob in self.kept if fnmatchcase(key, glob)}
        if len(set(found.values())) > 1:
            first, *_, second = found
            both = f"{printable(first)} and {printable(second)}"
            what = f"{both} both match it and ask for different dtypes"
            raise KeyConflict(what, where=key, hint="make one of the globs narrower")
        return next(iter(found.values()), self.default)

    def target(self, key: str, ref: TensorRef) -> DType:
        """The type in which the tensor under this key is written: only floating ones are cast."""
        if not ref.dtype.is_floating:
            return ref.dtype
        return self.asked(key) or ref.dtype

    def everywhere(self, ref: TensorRef) -> DType:
        """The type of a tensor where there are no globs."""
        if not ref.dtype.is_floating:
            return ref.dtype
        return self.default or ref.dtype

    def refuse_scaled(
        self, tensors: Mapping[str, TensorRef], new: Mapping[str, str], path: str
    ) -> None:
        """Raise `RefusedObject` where codes or their scales would be cast.

        `tensors` are those of the state dict at `path`, `new` the keys that those which stay will
        have, both by their keys before.
        """
        groups: dict[DType, set[str]] = {}
        for key, later in new.items():
            asked = self.asked(later)
            if asked is not None:
                groups.setdefault(asked, set()).add(key)
        for dtype, keys in groups.items():
            refuse_cast(tensors, keys, dtype, path)

    def rule(self, named: Sequence[tuple[str, TensorRef]]) -> CastRule:
        """The types of these tensors, which stand under their keys in the output, as a rule.

        Raises `KeyConflict` where a glob meets no floating tensor, or where several keys of one
        tensor ask for different types.
        """
        self._refuse_idle([key for key, ref in named if ref.dtype.is_floating])
        targets: dict[int, DType] = {}
        views: dict[Hashable, tuple[str, DType]] = {}
        for key, ref in named:
            target = self.target(key, ref)
            # by its view: cast to two types, tied weights would not be tied any more
            other, known = views.setdefault(view_identity(ref), (key, target))
            if known is not target:
                same = f"is one tensor with {printable(other)}, which is to be {known.name}"
                what = f"{same}, so it cannot be {target.name}"
                raise KeyConflict(what, where=key, hint="match both of them")
            targets[id(ref)] = target
        return lambda ref: targets.get(id(ref), ref.dtype)

    def _refuse_idle(self, keys: Sequence[str]) -> None:
        for words, glob in self._globs():
            if not any(fnmatchcase(key, glob) for key in keys):
                raise KeyConflict(
                    f"{printable(words)} matches no floating tensor",
                    hint=f"the keys begin with: {', '.join(map(printable, keys[:3])) or 'none'}",
                )

    def _globs(self) -> Iterator[tuple[str, str]]:
        yield from ((f"--keep-dtype {glob}", glob) for glob in self.kept)
        yield from ((f"--cast {glob}={dtype.name}", glob) for glob, dtype in self.named)


def read_casts(words: Iterable[str]) -> tuple[tuple[str, DType], ...]:
    """The casts ``GLOB=DTYPE``; `OptionRefused` for what is not one.

    >>> [(glob, dtype.name) for glob, dtype in read_casts(["lm_head.*=f32"])]
    [('lm_head.*', 'float32')]
    """
    found = []
    for word in words:
        # the last one: a key may have an equals sign in it
        glob, equals, dtype = word.rpartition("=")
        if not equals or not glob:
            raise OptionRefused(
                f"--cast {printable(word)} is not GLOB=DTYPE", hint="such as lm_head.*=f32"
            )
        found.append((glob, floating_dtype(dtype, f"--cast {printable(glob)}=")))
    return tuple(found)


def cast_rule(applied: Sequence[Applied], tree: Tree, casts: Casts) -> CastRule:
    """The types of the tensors of a tree: those of its state dicts are cast. An optimizer's, or the
    scales inside a quantized tensor, are not weights.

    Where there is no state dict, all tensors that are not part of a call, nor of an optimizer's
    state, are cast. Raises `RefusedObject` where codes or their scales would be cast, and
    `OptionRefused` where all there is to cast is an optimizer's state: a step of 257 is none of
    bfloat16's numbers, and small squares of gradients are 0 in float16.
    """
    # --keep-dtype alone casts nothing, but a glob of it that meets no tensor is an error
    if not casts and not casts.has_globs:
        return attrgetter("dtype")
    found, kept = [each.item for each in applied], [each.kept() for each in applied]
    for item, names in zip(found, kept, strict=True):
        casts.refuse_scaled(dict(item.tensors()), names, item.path)
    if not found and casts:
        tensors = dict(tensors_of(tree.root, tree.overlay))
        casts.refuse_scaled(tensors, {key: key for key in tensors}, "")
    values = (tree.overlay.get(id(value), value) for item in found for value in item.values)
    weights = {id(tensor_of(value)) for value in values}
    if not found:
        weights = _not_states(tree)
    # they stay as they are, and so do the tensors over them
    bare = {id(storage) for storage in tree.storages}
    weights -= {
        id(ref) for ref in tree.tensors if any(id(piece.storage) in bare for piece in ref.pieces)
    }
    if not casts.has_globs:
        return lambda ref: casts.everywhere(ref) if id(ref) in weights else ref.dtype
    named: list[tuple[str, TensorRef]] = []
    if not found:
        named += tensors_of(tree.root, tree.overlay)
    for item, names in zip(found, kept, strict=True):
        for key, value in zip(item.keys, item.values, strict=True):
            tensor = tensor_of(tree.overlay.get(id(value), value))
            if tensor is not None and key in names:
                named.append((names[key], tensor))
    return casts.rule([(key, ref) for key, ref in named if id(ref) in weights])


def _not_states(tree: Tree) -> set[int]:
    """The tensors that are not part of a call, nor of an optimizer's state."""
    from ckptconv.tree.optimizer_states import optimizer_states  # seldom needed

    free = _free_tensors(tree)
    states = [state.node for state in optimizer_states(tree.root, tree.overlay)]
    held = {id(ref) for node in states for _, ref in tensors_of(node, tree.overlay)}
    if held and not free - held:
        what = "only weights are cast, and this is an optimizer's state alone"
        hint = "leave --dtype out: training goes on from the values that were saved"
        raise OptionRefused(what, hint=hint)
    return free - held


def _free_tensors(tree: Tree) -> set[int]:
    inside: set[int] = set()
    free: set[int] = set()
    for place, node in walk(tree.root, tree.overlay):
        holder = None if place is None else place[2]
        if id(holder) in inside or (type(holder) is Call and mapping_pairs(holder) is None):
            inside.add(id(node))
        elif tensor_of(node) is not None:
            free.add(id(tensor_of(node)))
    return free
