"""A checkpoint into a model: its keys fitted to the wrappers that the model has or has not."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptconv.errors import KeyMismatch, printable
from ckptconv.keys import KeyRules, map_keys
from ckptconv.loading import load_portable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ShapeMismatch:
    """A key that model and checkpoint have in different shapes."""

    key: str
    model: tuple[int, ...]
    checkpoint: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What `load_into` found, under the model's own keys (unexpected ones under the checkpoint's bare keys)."""

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched: tuple[ShapeMismatch, ...]

    @property
    def fits(self) -> bool:
        """Whether every key was met exactly once and in its shape."""
        return not (self.missing_keys or self.unexpected_keys or self.mismatched)


def load_into(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    only: str | None = None,
    tag: str | None = None,
    assign: bool = False,
) -> LoadResult:
    """Load the state dict of a checkpoint into `model`, wrapped or not, on whatever device it lives.

    Wrapper segments (`module.`, `_orig_mod.`, FSDP's, checkpointing's) are fitted to those that the model has; a single
    other prefix, such as Lightning's ``model.``, is fitted when it makes all keys match. With `strict`, anything missing,
    unexpected or of another shape raises `KeyMismatch` and the model stays as it was; without, what fits is loaded.
    `assign` as in `load_state_dict`; `only` and `tag` as in `load_portable`.

    >>> load_into(model, "ddp_cuda3.pt").missing_keys  # doctest: +SKIP
    ()
    """
    state_dict = load_portable(path, only=only, tag=tag)
    target = model.state_dict()
    names = _fitted_names(list(state_dict), list(target))
    fitted: OrderedDict[str, Any] = OrderedDict()
    for key, value in state_dict.items():
        fitted[names.get(key, key)] = value
    mismatched = _mismatched(fitted, target)
    usable = OrderedDict((key, value) for key, value in fitted.items() if key not in {wrong.key for wrong in mismatched})
    _carry_metadata(state_dict, usable, model)
    result = LoadResult(*_unmet(model, usable, target, mismatched), mismatched)
    if strict and not result.fits:
        raise _mismatch(result, path)
    model.load_state_dict(usable, strict=False, assign=assign)
    return result


def _fitted_names(keys: list[str], target: list[str]) -> dict[str, str]:
    """Bare checkpoint key → model key, through the model's bare keys; one common prefix more or less is allowed for."""
    bare_keys = {str(bare): key for bare, key in zip(map_keys(target, KeyRules()).new, target, strict=True)}
    prefix_in, prefix_out = _common_prefix(keys, list(bare_keys))
    names = {}
    for key in keys:
        wanted = prefix_out + key[len(prefix_in) :] if key.startswith(prefix_in) else key
        if wanted in bare_keys:
            names[key] = bare_keys[wanted]
    return names


def _common_prefix(keys: list[str], target: list[str]) -> tuple[str, str]:
    """(prefix to strip from `keys`, prefix to add) that makes both sets equal; two empty ones when there is none."""
    wanted, have = set(target), set(keys)
    if not keys or wanted & have or len(wanted) != len(have):
        return "", ""
    shortest = min(keys, key=len)
    for name in target:
        if shortest.endswith("." + name) and {key.removeprefix(shortest[: -len(name)]) for key in keys} == wanted:
            return shortest[: -len(name)], ""
        if name.endswith("." + shortest) and {name[: -len(shortest)] + key for key in keys} == wanted:
            return "", name[: -len(shortest)]
    return "", ""


def _mismatched(fitted: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[ShapeMismatch, ...]:
    """The keys that both have in different shapes; parameters of lazy modules take any."""
    return tuple(
        ShapeMismatch(key, tuple(target[key].shape), tuple(fitted[key].shape))
        for key in target
        if hasattr(fitted.get(key), "shape") and _has_shape(target[key]) and target[key].shape != fitted[key].shape
    )


def _has_shape(value: Any) -> bool:
    from torch.nn.parameter import is_lazy

    return hasattr(type(value), "shape") and not is_lazy(value)


def _unmet(
    model: torch.nn.Module, usable: Mapping[str, Any], target: Mapping[str, Any], mismatched: tuple[ShapeMismatch, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The missing and the unexpected keys, as the model's own modules see them: some fill in or rename old ones."""
    wrong = {item.key for item in mismatched}
    missing = tuple(key for key in target if key not in usable and key not in wrong)
    unexpected = tuple(key for key in usable if key not in target)
    if not missing and not unexpected:
        return missing, unexpected
    try:
        seen = _skeleton(model).load_state_dict(usable, strict=False)
    except Exception:  # a module that cannot be copied, or a hook of the user's: the plain comparison stands
        return missing, unexpected
    return tuple(key for key in seen.missing_keys if key not in wrong), tuple(seen.unexpected_keys)


def _skeleton(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model on the meta device, to try a state dict on without touching any value."""
    import copy

    import torch

    memo: dict[int, Any] = {id(p): torch.nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    memo.update((id(b), b.to("meta")) for b in model.buffers())
    return copy.deepcopy(model, memo)


def _mismatch(result: LoadResult, path: str | os.PathLike[str]) -> KeyMismatch:
    parts = [
        f"{len(names)} {word} ({', '.join(map(printable, names[:3]))}{', …' if len(names) > 3 else ''})"
        for word, names in (("missing", result.missing_keys), ("unexpected", result.unexpected_keys))
        if names
    ]
    parts += [
        f"{printable(wrong.key)} is {list(wrong.checkpoint)}, the model has {list(wrong.model)}"
        for wrong in result.mismatched[:3]
    ]
    return KeyMismatch(
        f"its keys are not the model's: {'; '.join(parts)}",
        path=path,
        hint="strict=False loads what fits and returns the rest",
    )


def _carry_metadata(state_dict: Any, usable: Any, model: torch.nn.Module) -> None:
    """Give the state dict the module versions of the checkpoint, under the model's own module paths."""
    versions = getattr(state_dict, "_metadata", None)
    if versions is None:
        return
    paths = [path for path, _ in model.named_modules()]
    keys = map_keys(list(model.state_dict()), KeyRules())
    usable._metadata = OrderedDict(
        (path, versions[keys.module_path(path)]) for path in paths if keys.module_path(path) in versions
    )
