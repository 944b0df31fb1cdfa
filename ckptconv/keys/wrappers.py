"""The wrappers that torch puts around the keys of a model: which there are, keys without them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ckptconv.keys.rules import Step, without_segments

MODULE = "module"
UNMISTAKABLE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Wrapper segments that torch writes and no user does: compile, FSDP, activation checkpointing."""


def find_wrappers(keys: Iterable[str]) -> tuple[str, ...]:
    """The wrappers that `strip` would remove, outermost first.

    ``module`` counts once for each level at which it is the first segment of every key; the
    unmistakable ones count wherever they stand.

    >>> find_wrappers(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
    ('module', '_orig_mod')
    >>> find_wrappers(["module.weight", "weight"])
    ()
    """
    keys = list(keys)
    text = "\n".join(keys)
    known = [name for name in UNMISTAKABLE if name in text]
    inside = [
        name for name in known if any(name in key and name in key.split(".")[:-1] for key in keys)
    ]
    bare = [drop_unmistakable(key) for key in keys] if inside else keys
    depth = _depth(bare[0]) if bare else 0
    if depth and not all_start(bare, LEAD * depth):
        depth = min(map(_depth, bare))
    return (*[MODULE] * depth, *inside)


LEAD = MODULE + "."


def _depth(key: str) -> int:
    """How often a key starts with ``module.`` before something else, its last segment at least."""
    at = _end_of_lead(key, len(key))
    return at // len(LEAD) - (at == len(key))


def _end_of_lead(key: str, most: int) -> int:
    """Where the leading ``module.`` of a key end, `most` of them counted."""
    at = 0
    while most and key.startswith(LEAD, at):
        at, most = at + len(LEAD), most - 1
    return at


def bare_key(key: str) -> str:
    """A key without the ``module.`` that it starts with."""
    if key.startswith(LEAD) and not key.startswith(LEAD, len(LEAD)):
        return key[len(LEAD) :]
    return key[_end_of_lead(key, len(key)) :]


def all_start(keys: Sequence[str], prefix: str) -> bool:
    """Whether all keys start with `prefix` and go on behind it; not where there are none."""
    if not keys:
        return False
    # in order, what starts alike stands together
    first, last = min(keys), max(keys)
    return first.startswith(prefix) and last.startswith(prefix) and first != prefix


def drop_unmistakable(key: str) -> str:
    """A key without the segments of torch.compile, FSDP and activation checkpointing."""
    for name in UNMISTAKABLE:  # a plain loop: nearly no key has one
        if name in key:
            return without_segments(key, UNMISTAKABLE)
    return key


def stripping(times: int) -> Step:
    """Takes ``module.`` off the start of a key, so many times at most."""
    lead = LEAD * times
    return lambda key: key[len(lead) :] if key.startswith(lead) else key[_end_of_lead(key, times) :]


def wrapper_steps(
    word: str, telling: Sequence[str], beside: Collection[str]
) -> tuple[tuple[str, ...], list[Step]]:
    """The wrappers that stand in the keys `telling`, and the steps that `word` asks for; see
    `KeyRules`.
    """
    found = find_wrappers(telling)
    if word == "strip":
        depth = found.count(MODULE)
        steps: list[Step] = [drop_unmistakable] if found else []
        return found, [*steps, stripping(depth)] if depth else steps
    if word == "module":
        return found, [bare_key]
    if word == "add-module" and not all_start(telling, LEAD):
        return found, [lambda key: key if key in beside else LEAD + key]
    return found, []
