"""Key rules: what each key of a state dict is called in the output, and which keys are left out.

Works on names alone. A rule is decided on all keys of one state dict together, then applied to its keys and to the module
paths of its `_metadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ckptconv.errors import KeyConflict, printable

MODULE = "module"
UNMISTAKABLE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Wrapper segments that torch writes and no user does: torch.compile, FSDP, activation checkpointing."""

Renaming = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class KeyRules:
    """What to do with keys, in the order of the fields.

    `wrappers`: ``strip`` removes the wrapper segments of DataParallel, DDP, torch.compile, FSDP and activation
    checkpointing, in any nesting; ``module`` removes just leading ``module.``, key by key; ``add-module`` puts ``module.``
    before every key, unless all have it; ``keep`` does nothing. Then each of `strip_prefixes` is cut off where a key starts
    with it, each (old, new) of `renames` replaces a literal prefix, and `add_prefix` is put in front. `include` and
    `exclude` are globs over the resulting keys.
    """

    wrappers: Literal["strip", "module", "add-module", "keep"] = "strip"
    strip_prefixes: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    add_prefix: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def keeps(self, key: str) -> bool:
        """Whether the output key `key` passes the `include` and `exclude` globs."""
        wanted = not self.include or any(fnmatchcase(key, glob) for glob in self.include)
        return wanted and not any(fnmatchcase(key, glob) for glob in self.exclude)


STRIP = KeyRules()
"""The default: strip wrappers, nothing else."""
KEEP = KeyRules("keep")
"""Leave all keys as they are."""


@dataclass(frozen=True, slots=True)
class KeyMap:
    """The keys of one state dict before and after: `new[i]` belongs to `old[i]`, None where it was left out."""

    old: tuple[str, ...]
    new: tuple[str | None, ...]
    wrappers: tuple[str, ...]
    renaming: Renaming

    def module_path(self, path: str) -> str:
        """The new name of a module path, as `_metadata` has them (the root is the empty path)."""
        return self.renaming(f"{path}." if path else "").rstrip(".")


def map_keys(keys: Sequence[str], rules: KeyRules) -> KeyMap:
    """Apply `rules` to all keys of a state dict; `KeyConflict` when two become one, or one becomes empty."""
    found, steps = _wrapper_steps(keys, rules)
    steps += [_strip(prefix) for prefix in rules.strip_prefixes if prefix]
    steps += [_replace(old, new) for old, new in rules.renames]
    if rules.add_prefix:
        steps.append(_add(rules.add_prefix))

    def renaming(key: str) -> str:
        for step in steps:
            key = step(key)
        return key

    renamed = list(keys)
    for step in steps:
        renamed = [step(key) for key in renamed]
    _refuse_collisions(keys, renamed)
    globs = bool(rules.include or rules.exclude)
    new = tuple(key if not globs or rules.keeps(key) else None for key in renamed)
    return KeyMap(tuple(keys), new, found, renaming)


def unchanged(keys: Sequence[str]) -> KeyMap:
    """The map that leaves every key as it is."""
    return KeyMap(tuple(keys), tuple(keys), (), lambda key: key)


def _wrapper_steps(keys: Sequence[str], rules: KeyRules) -> tuple[tuple[str, ...], list[Renaming]]:
    """The wrappers that stand in the keys, and the steps that `rules.wrappers` asks for."""
    found = find_wrappers(keys)
    if rules.wrappers == "strip":
        depth = found.count(MODULE)
        return found, [_drop_unmistakable, *[_strip(MODULE + ".", times=depth)] * (depth > 0)] if found else []
    if rules.wrappers == "module":
        return found, [_strip(MODULE + ".", times=None)]
    if rules.wrappers == "add-module" and not _all_start(keys, MODULE + "."):
        return found, [_add(MODULE + ".")]
    return found, []


def find_wrappers(keys: Iterable[str]) -> tuple[str, ...]:
    """The wrappers that `strip` would remove, outermost first.

    ``module`` counts once for each level at which it is the first segment of every key; the unmistakable ones count
    wherever they stand.

    >>> find_wrappers(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
    ('module', '_orig_mod')
    >>> find_wrappers(["module.weight", "weight"])
    ()
    """
    keys = list(keys)
    text = "\n".join(keys)
    inside = [
        name for name in UNMISTAKABLE if name in text and any(name in key and name in key.split(".")[:-1] for key in keys)
    ]
    bare = [_drop_unmistakable(key) for key in keys] if inside else keys
    depth = 0
    while _all_start(bare, (MODULE + ".") * (depth + 1)):
        depth += 1
    return (*[MODULE] * depth, *inside)


def _all_start(keys: Sequence[str], prefix: str) -> bool:
    return bool(keys) and all(key.startswith(prefix) and len(key) > len(prefix) for key in keys)


def _drop_unmistakable(key: str) -> str:
    if not any(name in key for name in UNMISTAKABLE):
        return key
    *modules, last = key.split(".")
    return ".".join([*(segment for segment in modules if segment not in UNMISTAKABLE), last])


def _strip(prefix: str, times: int | None = 1) -> Renaming:
    if times == 1:
        return lambda key: key.removeprefix(prefix)

    def step(key: str) -> str:
        count = 0
        while key.startswith(prefix) and (times is None or count < times):
            key, count = key[len(prefix) :], count + 1
        return key

    return step


def _replace(old: str, new: str) -> Renaming:
    return lambda key: new + key[len(old) :] if key.startswith(old) else key


def _add(prefix: str) -> Renaming:
    return lambda key: prefix + key


def _refuse_collisions(old: Sequence[str], new: Sequence[str]) -> None:
    """Raise `KeyConflict` when two of the `new` keys are one, or one is empty or no text."""
    try:
        "".join(new).encode()
    except UnicodeEncodeError as error:
        bad = next(key for key in new if error.object[error.start] in key)
        raise KeyConflict("a key holds half a character (a lone surrogate)", where=bad) from None
    if len(set(new)) == len(new) and ("" not in new or "" in old):
        return
    owner: dict[str, str] = {}
    for before, after in zip(old, new, strict=True):
        if not after and before:
            raise KeyConflict(f"the rules leave nothing of the key '{printable(before)}'", where=before)
        if after in owner and owner[after] == before:
            raise KeyConflict(f"two keys of different types read as '{printable(before)}'", hint="use --keys keep")
        if after in owner:
            raise KeyConflict(
                f"the keys '{printable(owner[after])}' and '{printable(before)}' both become '{printable(after)}'",
                hint="use --keys keep or other rules; nothing was written",
            )
        owner[after] = before
