"""A state dict whose keys are fitted to a target: their map, or the refusal that tells why not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptconv.keys.key_map import KeyMap
from ckptconv.objects.plain import tensor_form
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import KeyMismatch, printable
from ckptconv.support.records import dataclass
from ckptconv.tensors.refs import view_identity
from ckptconv.tree.state_dicts import StateDict
from ckptconv.tree.walk import tensor_of

if TYPE_CHECKING:
    from ckptconv.keys.fits import Fit, Misshapen, Shape, Shapes, Ties

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class KeyTarget:
    """What state dicts are fitted to: its `name` (for messages), its keys and shapes, and what
    happens to unexpected keys. `ties` are those of its keys that are names of one tensor.
    """

    name: str
    shapes: Shapes
    drop_unexpected: bool = False
    ties: Ties = ()


def shapes_of(found: StateDict) -> dict[str, Shape]:
    """The keys of a state dict with shapes of tensors and arrays; None: not a plain tensor."""
    return {key: _shape(value) for key, value in zip(found.keys, found.values, strict=True)}


def ties_of(found: StateDict) -> list[list[str]]:
    """The groups of keys of a state dict that are names of one and the same view of a storage."""
    names: dict[Hashable, list[str]] = defaultdict(list)
    for key, ref in found.tensors():
        if ref.numel:
            names[view_identity(ref)].append(key)
    return [group for group in names.values() if len(group) > 1]


def _shape(value: Node) -> Shape:
    ref = tensor_of(value) or tensor_form(value)
    return None if ref is None else ref.shown_shape


def fitted(found: StateDict, keys: KeyMap, target: KeyTarget) -> KeyMap:
    """The map that takes on from `keys`, the rules' result, to the keys of the target.

    Unexpected keys are left out where the target says so; names of tied tensors that are absent are
    filled. Raises `KeyMismatch`, with the whole `Fit`, when the target is not met exactly.
    """
    pairs = zip(keys.new, found.values, strict=True)
    shapes = {new: _shape(value) for new, value in pairs if new is not None}
    from ckptconv.keys.fitting import fit_keys  # seldom needed

    fit = fit_keys(shapes, target.shapes, target.ties)
    if not (fit.fits or (fit.covers and fit.renames and target.drop_unexpected)):
        raise refusal(fit, target.name, len(target.shapes))
    follow = module_paths(fit.renames)
    return replace(
        keys,
        new=tuple(None if new is None else fit.renames.get(new) for new in keys.new),
        path_steps=(*keys.path_steps, lambda path: (follow(path),)),
        filled=tuple((key, fit.renames[old]) for key, old in fit.filled.items()),
    )


def module_paths(renames: Mapping[str, str]) -> Callable[[str], str]:
    """The new path of a module: as the keys in it went; without keys, as the module around it."""
    followed = cache(lambda: _followed(renames))  # made when it is first asked
    return lambda path: followed()(path)


def _followed(renames: Mapping[str, str]) -> Callable[[str], str]:
    """What gives a module its new path: as the first of the keys in it went.

    The modules are a tree of their names. A module is a number, found by that of the module around
    it and its own name: a path may be of a million names, and is never put together.
    """
    numbers: dict[tuple[int, str], int] = {}
    # a key's new name, and how much of it is the module's path
    known: dict[int, tuple[str, int]] = {}
    for old, new in renames.items():
        names, way = old.split("."), [0]
        for name in names:
            way.append(numbers.setdefault((way[-1], name), len(numbers) + 1))
        for count, length in _modules(names, new):  # of a module, its first key decides
            known.setdefault(way[count], (new, length))

    def renamed(path: str) -> str:
        """The innermost known module around it, and what is inside that."""
        names = path.split(".") if path else []  # the path of the root module is empty
        number = 0
        found, inside = (None if names else known.get(0)), 0
        for count, name in enumerate(names, 1):
            number = numbers.get((number, name), -1)
            if number < 0:
                break
            if number in known:
                found, inside = known[number], count
        if found is None:
            return path
        new, length = found
        return ".".join([*filter(None, [new[:length]]), *names[inside:]])

    return renamed


def _modules(before: list[str], new: str) -> Iterator[tuple[int, int]]:
    """The modules that a key is in before and after, the innermost first; segments of one side are
    passed over.

    Given are the segments of the old key and the new key. Each module is the number of segments of
    its path in the old key, and of characters of its path in the new one.

    >>> list(_modules(["model", "a", "wrapped", "w"], "a.w"))
    [(3, 1), (2, 1), (1, 0)]
    """
    after = new.split(".")
    count, rest, length = len(before), len(after), len(new)
    while count and rest:
        same = before[count - 1] == after[rest - 1]
        if not same and count == rest:
            return
        shorter_old, shorter_new = same or count > rest, same or rest > count
        count -= shorter_old
        if shorter_new:
            rest -= 1
            length -= len(after[rest]) + 1
        yield count, max(length, 0)


def refusal(fit: Fit, name: str, count: int) -> KeyMismatch:
    """The error for keys that do not fit the target called `name`, which has `count` keys."""
    of = f" of {count:,}" if count else ""
    counted = [
        *_counted(fit.missing, f"{of} missing", lambda key: _missing(key, fit)),
        *_counted(fit.unexpected, " unexpected", printable),
        *_counted(fit.mismatched, " of another shape", _misshapen),
    ]
    what = f"its keys do not fit {printable(name)}: {'; '.join(counted)}"
    return KeyMismatch(what, hint=_hint(fit), fit=fit)


def _counted(found: Sequence[Any], word: str, text: Callable[[Any], str]) -> Iterator[str]:
    """How many there are of something, and the first of them; nothing where there are none."""
    if found:
        more = ", …" if len(found) > _SHOWN else ""
        yield f"{len(found):,}{word} ({', '.join(map(text, found[:_SHOWN]))}{more})"


def _missing(key: str, fit: Fit) -> str:
    """A missing key with what may have been meant for it."""
    several = next((item.source_keys for item in fit.ambiguous if item.key == key), ())
    near = next((item.source_keys for item in fit.nearest if item.key == key), ())
    if several:
        return f"{printable(key)}: could be {' or '.join(map(printable, several[:_SHOWN]))}"
    return f"{printable(key)}: nearest is {printable(near[0])}" if near else printable(key)


def _misshapen(item: Misshapen) -> str:
    return f"{printable(item.source_key)} is {_text(item.source)}, not {_text(item.target)}"


def _text(shape: Shape) -> str:
    return "of unknown shape" if shape is None else str(list(shape))


def _hint(fit: Fit) -> str:
    if fit.preset:
        return f"--preset {fit.preset} leaves out what that framework adds, and they fit"
    if fit.covers:
        return "--drop-unexpected leaves out what the target does not have"
    if fit.ambiguous:
        return "say which one you mean with --rename OLD=NEW or --exclude; --json lists all keys"
    return "--json lists all keys"
