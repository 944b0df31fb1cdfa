"""Loads a checkpoint into a model, and fits its keys to those of the model."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckptconv.convert.named_models import live_shape, live_shapes, live_ties
from ckptconv.devices.host import require_torch
from ckptconv.formats.registry import open_certain
from ckptconv.keys.fits import Fit, Shapes
from ckptconv.keys.fitting import fit_keys
from ckptconv.live.load import load_portable
from ckptconv.support.choices import refuse_no_flag, spelling_checked
from ckptconv.support.errors import KeyMismatch, OptionRefused, RefusedObject, printable
from ckptconv.support.progress import OnProgress
from ckptconv.support.showing import html_table, short_repr
from ckptconv.support.text import first_few
from ckptconv.tensors.scaled_weights import find_scaled
from ckptconv.tree.fitted_keys import module_paths
from ckptconv.tree.settling import Unknown

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ShapeMismatch:
    """A key that model and checkpoint have in different shapes."""

    key: str
    model: tuple[int, ...]
    checkpoint: tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
class LoadResult:
    """The result of `load_into`, under the model's own keys (unexpected ones: under the
    checkpoint's bare keys).
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched: tuple[ShapeMismatch, ...]

    @property
    def fits(self) -> bool:
        """Whether every key was met exactly once and in its shape."""
        return not (self.missing_keys or self.unexpected_keys or self.mismatched)

    def __repr__(self) -> str:
        named = ("missing_keys", "unexpected_keys", "mismatched")
        counts = [f"{len(getattr(self, name)):,} {name}" for name in named if getattr(self, name)]
        return short_repr("LoadResult", "fits" if self.fits else "does not fit", *counts)

    def _repr_html_(self) -> str:
        lists = (
            (("missing", key, "") for key in self.missing_keys),
            (("unexpected", key, "") for key in self.unexpected_keys),
        )
        wrong = ((item.key, list(item.checkpoint), list(item.model)) for item in self.mismatched)
        return html_table("fits" if self.fits else "does not fit", chain(*lists, wrong))


@spelling_checked
def load_into(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    only: str | None = None,
    tag: str | None = None,
    assign: bool = False,
    unknown: Unknown = "refuse",
    on_progress: OnProgress | None = None,
) -> LoadResult:
    """Load the state dict of a checkpoint into `model`, wrapped or not, on any device.

    The keys are fitted to the model's by `fit_keys`: whatever wrappers, prefixes or inserted
    segments either side has, as long as names and shapes leave one possibility; of tied weights one
    name is enough. With `strict`, anything missing, unexpected or of another shape raises
    `KeyMismatch` and the model stays as it was; without, what fits is loaded. `assign` as in
    `load_state_dict`; `only`, `tag`, `unknown` and `on_progress` (bytes that are read) as in
    `load_portable`.

    >>> load_into(model, "ddp_cuda3.pt").missing_keys  # doctest: +SKIP
    ()
    """
    if isinstance(model, (str, os.PathLike)):
        raise OptionRefused(
            "the model is a path", hint="the model comes first: load_into(model, path)"
        )
    refuse_no_flag(strict=strict, assign=assign)
    require_torch("loading into a model")
    target = live_shapes(model)
    state_dict = load_portable(path, only=only, tag=tag, unknown=unknown, on_progress=on_progress)
    for key in [
        key for key, value in state_dict.items() if _is_beside(key, value) and key not in target
    ]:
        del state_dict[key]
    fit = fit_keys(
        {key: live_shape(value) for key, value in state_dict.items()}, target, live_ties(model)
    )
    usable = _usable(state_dict, fit, target)
    _carry_metadata(state_dict, usable, fit, model)
    missing, unexpected = _unmet(model, usable, target, fit)
    mismatched = tuple(
        ShapeMismatch(item.key, item.target or (), item.source or ()) for item in fit.mismatched
    )
    result = LoadResult(missing, unexpected, mismatched)
    if strict and not result.fits:
        raise _mismatch(result, fit, path)
    if not assign and (cast := _to_be_cast(model, usable)):
        _refuse_codes(path, only, tag, {old for old, new in fit.renames.items() if new in cast})
    model.load_state_dict(usable, strict=False, assign=assign)
    return result


def _is_beside(key: str, value: Any) -> bool:
    """Whether a value is a number or text that training put beside the weights: not a module's."""
    return "." not in key and isinstance(value, (bool, int, float, str, type(None)))


def _to_be_cast(model: torch.nn.Module, usable: Mapping[str, Any]) -> set[str]:
    """The keys whose values `load_state_dict` would copy into another dtype."""
    own = model.state_dict()
    dtypes = {key: getattr(own.get(key), "dtype", None) for key in usable}
    return {
        key
        for key, value in usable.items()
        if dtypes[key] not in (None, getattr(value, "dtype", None))
    }


def _refuse_codes(
    path: str | os.PathLike[str], only: str | None, tag: str | None, cast: Collection[str]
) -> None:
    """Raise `RefusedObject` where codes or their scales would be copied as if they were values."""
    with open_certain(path, tag=tag) as checkpoint:
        found = find_scaled(dict(checkpoint.state_dict(only).tensors()))
    if item := next((item for item in found if item.codes in cast or item.scale in cast), None):
        what = (
            f"holds codes that mean nothing without their scale {printable(item.scale)}; the "
            "model has another dtype there"
        )
        hint = (
            "build the model with the layers that take such weights; assign=True gives it the "
            "codes as they are"
        )
        raise RefusedObject(what, path=path, where=item.codes, hint=hint)


def _usable(state_dict: Mapping[str, Any], fit: Fit, target: Shapes) -> OrderedDict[str, Any]:
    """The values under the model's keys; unexpected ones under their own, for a module may know
    them from older days.

    What was not assigned to a key of the model is not loaded there because it happens to have its
    name.
    """
    wrong = {item.source_key for item in fit.mismatched}
    names = {**{key: key for key in fit.unexpected if key not in target}, **fit.renames}
    usable = OrderedDict(
        (names[key], value)
        for key, value in state_dict.items()
        if key in names and key not in wrong
    )
    usable.update((key, state_dict[old]) for key, old in fit.filled.items())
    return usable


def _unmet(
    model: torch.nn.Module, usable: Mapping[str, Any], target: Shapes, fit: Fit
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The missing and the unexpected keys, as the model's own modules see them: some fill in or
    rename old ones.
    """
    missing, unexpected = fit.missing, fit.unexpected
    if not missing and not unexpected:
        return missing, unexpected
    try:
        seen = _skeleton(model).load_state_dict(usable, strict=False)
    except (
        Exception
    ):  # a module that cannot be copied, or a hook of the user's: the plain comparison stands
        return missing, unexpected
    wrong = {item.key for item in fit.mismatched}
    unassigned = tuple(key for key in unexpected if key in target)
    return tuple(key for key in seen.missing_keys if key not in wrong), (
        *seen.unexpected_keys,
        *unassigned,
    )


def _skeleton(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model on the meta device, to try a state dict on without touching any value."""
    import copy

    import torch

    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()
    }
    memo.update((id(b), b.to("meta")) for b in model.buffers())
    return copy.deepcopy(model, memo)


def _mismatch(result: LoadResult, fit: Fit, path: str | os.PathLike[str]) -> KeyMismatch:
    parts = [
        f"{len(names)} {word} ({first_few(names, 3)})"
        for word, names in (
            ("missing", result.missing_keys),
            ("unexpected", result.unexpected_keys),
        )
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
        fit=fit,
    )


def _carry_metadata(state_dict: Any, usable: Any, fit: Fit, model: torch.nn.Module) -> None:
    """Give the state dict the checkpoint's module versions, under the model's own module paths."""
    versions = getattr(state_dict, "_metadata", None)
    if versions is None:
        return
    follow = module_paths(fit.renames)
    moved = {follow(path): version for path, version in versions.items()}
    usable._metadata = OrderedDict(
        (path, moved[path]) for path, _ in model.named_modules() if path in moved
    )
