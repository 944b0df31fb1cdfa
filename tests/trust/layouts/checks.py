"""What ckptconv makes of a layout, held against the rule: each check yields what differs."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from ckptconv import convert_checkpoint, diagnose, diff_checkpoints, load_portable, open_checkpoint
from ckptconv.support.errors import AmbiguousStateDict, CheckpointError
from layouts.compose import Layout
from layouts.rule import (
    Refused,
    Taken,
    averages,
    decide,
    decide_part,
    is_packed,
    is_tensor,
    leaves_of,
    named,
    parts_by_path,
    rewritten,
)


def save(layout: Layout, folder: Path) -> Path:
    """The layout as a file of torch."""
    path = folder / f"{layout.seed}.pt"
    torch.save(layout.tree, path)
    return path


def differences(layout: Layout, folder: Path, *, full: bool = False) -> list[str]:
    """What ckptconv does otherwise than the rule says: the decision, or with `full` outputs, diff
    and doctor too.
    """
    path = save(layout, folder)
    verdict = decide(layout.tree)
    try:
        found = list(decision(path, verdict))
        if full:
            found += choices(path, named(layout.tree))
            found += parts(path, layout.tree)
            found += [
                *safetensors_output(path, verdict),
                *torch_output(path, layout.tree),
                *looks(path),
            ]
    finally:
        path.unlink()
    return found


# ----------------------------------------------------------------------------------------- decision


def decision(path: Path, verdict: Taken | Refused, only: str | None = None) -> Iterator[str]:
    """Hold `load_portable` against the rule; of an error, each choice that it must list, and take
    it.
    """
    try:
        loaded = load_portable(path, only=only)
    except AmbiguousStateDict as error:
        yield from refusal(path, error, verdict, f"{only}." if only else "")
    except CheckpointError as error:
        yield f"refused otherwise: {error}"
    else:
        if isinstance(verdict, Refused):
            yield f"taken without a word: {', '.join(held(loaded)) or 'nothing'}"
        else:
            yield from (f"load_portable: {line}" for line in unequal(loaded, verdict.state_dict))


def refusal(
    path: Path, error: AmbiguousStateDict, verdict: Taken | Refused, prefix: str
) -> Iterator[str]:
    if isinstance(verdict, Taken):
        yield f"refused: {error.what}"
        return
    told = f"{error.what}; {error.hint}"
    expected = {
        prefix + name if name != "." else prefix or ".": value
        for name, value in verdict.choices.items()
    }
    yield from (
        f"the error does not list '{name}': {told}" for name in expected if not lists(told, name)
    )
    if expected and (more := listed(error.hint or "") - {shlex.quote(name) for name in expected}):
        yield f"the error lists too much, '{', '.join(sorted(more))}': {told}"
    yield from choices(path, expected)


def choices(path: Path, expected: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Take each of several state dicts by its name."""
    for name, state_dict in expected.items():
        try:
            loaded = load_portable(path, only=name)
        except CheckpointError as error:
            yield f"only='{name}' is refused: {error}"
        else:
            yield from (f"only='{name}': {line}" for line in unequal(loaded, state_dict))


def parts(path: Path, tree: Any) -> Iterator[str]:
    """Take each part by its path, in which the same rule holds, and the average."""
    for name, part in parts_by_path(tree):
        yield from (
            f"only='{name}': {line}" for line in decision(path, decide_part(part, tree), name)
        )
    found = averages(tree)
    if len(found) == 1:
        (name,) = found
        yield from (
            f"only=ema: {line}" for line in average(path, decide_part(found[name], tree), name)
        )
        return
    try:
        loaded = load_portable(path, only="ema")
    except CheckpointError as error:
        yield from (
            f"only=ema: the error does not list '{name}': {error}"
            for name in found
            if not lists(str(error), name)
        )
    else:
        yield f"only=ema: taken without a word: {', '.join(held(loaded))}"


def average(path: Path, verdict: Taken | Refused, name: str) -> Iterator[str]:
    try:
        loaded = load_portable(path, only="ema")
    except CheckpointError as error:
        if isinstance(verdict, Taken):
            yield f"refused: {error}"
    else:
        if isinstance(verdict, Refused):
            yield f"taken from {name} without a word: {', '.join(held(loaded))}"
        else:
            yield from unequal(loaded, verdict.state_dict)


def lists(message: str, name: str) -> bool:
    """Whether a message has a name by itself, with a dot behind it or not."""
    bare = name.removesuffix(".")
    forms = [re.escape(bare) + r"\.?", re.escape(shlex.quote(name))] if bare else [r"\."]
    return any(re.search(rf"(?<![^\s'\",(]){form}(?=[\s'\",;):]|$)", message) for form in forms)


def listed(hint: str) -> set[str]:
    """The choices in a hint, as a shell takes them."""
    choices = re.search(r"choose one: --only ([^;]*)", hint)
    return (
        set(re.findall(r"(?:'[^']*'|\"[^\"]*\"|[^\s,'\"])+", choices[1])) - {"or", "--only"}
        if choices
        else set()
    )


def held(value: Any) -> list[str]:
    """The keys of a state dict with tensors, and those of extra states."""
    return [
        str(key)
        for key, child in value.items()
        if is_packed(key) or any(True for _ in leaves_of(child))
    ]


def unequal(loaded: Any, expected: dict[str, Any]) -> Iterator[str]:
    """How the tensors of a state dict differ from those expected; values that hold no tensor are
    free.
    """
    keys = held(loaded)
    if set(keys) != set(expected):
        yield (
            f"keys {sorted(set(keys) - set(expected))} too many, "
            f"{sorted(set(expected) - set(keys))} missing"
        )
        return
    if keys != list(expected):
        yield f"order {keys}, not {list(expected)}"
    for key, value in expected.items():
        if not same(loaded[key], value):
            yield f"values of {key}"


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, arrays taken for tensors, and numpy's numbers for Python's."""
    if is_tensor(one) and is_tensor(other):
        first, second = (
            torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for value in (one, other)
        )
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__") or hasattr(other, "__dict__"):  # a namespace becomes a dict
        return same(getattr(one, "__dict__", one), getattr(other, "__dict__", other))
    return bool(one == other)


# ------------------------------------------------------------------------------------------ outputs


def safetensors_output(path: Path, verdict: Taken | Refused) -> Iterator[str]:
    """Convert to safetensors, and read it with the official library."""
    output = path.with_suffix(".safetensors")
    try:
        skipped = {item.path for item in convert_checkpoint(path, output, fsync=False).plan.skipped}
    except CheckpointError as error:
        if isinstance(verdict, Taken) and fits_safetensors(verdict.state_dict):
            yield f"safetensors: refused: {error}"
        return
    if isinstance(verdict, Refused):
        yield "safetensors: written without a word"
        output.unlink()
        return
    if not fits_safetensors(verdict.state_dict):
        yield "safetensors: written without some of its tensors"
        output.unlink()
        return
    with safetensors.safe_open(output, "pt") as opened:
        keys, metadata = set(opened.keys()), opened.metadata() or {}
    names = {dropped: kept for dropped, kept in metadata.items() if kept in keys}
    tensors = safetensors.torch.load_file(output)
    tensors.update(
        {dropped: tensors[kept] for dropped, kept in names.items() if dropped in verdict.state_dict}
    )
    output.unlink()
    expected = {key: value for key, value in verdict.state_dict.items() if is_tensor(value)}
    if tensors.keys() != expected.keys():
        yield f"safetensors: keys {sorted(tensors)}, not {sorted(expected)}"
    elif wrong := [key for key, value in expected.items() if not same(tensors[key], value)]:
        yield f"safetensors: values of {', '.join(wrong)}"
    elif untold := [name for name in verdict.left_out if not is_told(name, skipped)]:
        yield f"safetensors: left out and not listed: {', '.join(untold)}"


def fits_safetensors(state_dict: dict[str, Any]) -> bool:
    """Whether there are tensors, and none in what is not a tensor; extra states may be left out."""
    others = [
        key
        for key, value in state_dict.items()
        if not is_tensor(value) and not key.endswith("_extra_state")
    ]
    return not others and any(map(is_tensor, state_dict.values()))


def is_told(name: str, skipped: set[str]) -> bool:
    """Whether a part, or one that it is in, is listed as skipped."""
    return any(name == path or name.startswith(f"{path}.") for path in skipped)


def torch_output(path: Path, tree: Any) -> Iterator[str]:
    """Convert to torch: the whole tree must be in it, with bare keys in what is the state of a
    module.
    """
    output = path.with_suffix(".out.pt")
    try:
        convert_checkpoint(path, output, fsync=False)
    except CheckpointError as error:
        if any(True for _ in leaves_of(tree)):
            yield f"torch: refused: {error}"
        return
    written = torch.load(output, weights_only=True)
    output.unlink()
    # names in an optimizer follow the keys of the model, as tests of their own say
    expected, written = bare_optimizers(rewritten(tree)), bare_optimizers(written)
    before, after = list(leaves_of(expected)), list(leaves_of(written))
    names, written_names = [name for name, _ in before], [name for name, _ in after]
    if lost := [
        name for name, value in leaves_of(tree) if not any(same(value, other) for _, other in after)
    ]:
        yield f"torch: {', '.join(lost)} lost"
    elif names != written_names:
        yield f"torch: keys {written_names}, not {names}"
    elif wrong := [
        name
        for (name, value), (_, other) in zip(before, after, strict=True)
        if not same(value, other)
    ]:
        yield f"torch: values of {', '.join(wrong)}"
    elif not same(written, expected):
        yield "torch: what is not a tensor differs"


_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def bare_optimizers(tree: Any) -> Any:
    """The tree, with names without wrappers in the optimizers at its root."""
    if not isinstance(tree, dict):
        return tree
    held = {key: _bare(tree[key]) for key in tree if str(key).startswith("optim")}
    if not held:
        return tree
    made = copy.copy(tree)
    made.update(held)
    return made


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {_bare(key): _bare(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_bare(inner) for inner in value]
    if isinstance(value, str):
        return ".".join(part for part in value.split(".") if part not in _WRAPPERS)
    return value


def looks(path: Path) -> Iterator[str]:
    """Commands that only look must not fall over."""
    diagnose(path)
    try:
        if not diff_checkpoints(path, path).same:
            yield "diff: it differs from itself"
    except CheckpointError as error:
        with open_checkpoint(path) as opened:
            try:
                opened.state_dict()
            except AmbiguousStateDict:
                return
        yield f"diff: refused: {error}"
