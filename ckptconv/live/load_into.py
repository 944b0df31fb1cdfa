"""Loads a checkpoint into a model, and fits its keys to those of the model."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field, fields, replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ckptconv.convert.named_models import (
    live_shape,
    live_shapes,
    live_tensors,
    live_ties,
    saved_names,
)
from ckptconv.devices.host import require_torch
from ckptconv.formats.registry import Named, open_certain
from ckptconv.io.places import places_of
from ckptconv.keys.fits import Fit, Shapes, Ties
from ckptconv.keys.fitting import bare_names, fit_keys
from ckptconv.live.load import load_portable
from ckptconv.support.choices import refuse_no_flag, spelling_checked
from ckptconv.support.errors import (
    KeyConflict,
    KeyMismatch,
    OptionRefused,
    RefusedObject,
    printable,
    warn,
)
from ckptconv.support.progress import OnProgress
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.report import html_table, short_repr
from ckptconv.support.text import count_text, first_few
from ckptconv.tensors.scaled_weights import find_scaled
from ckptconv.tree.checkpoint import Edit
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


class LoadCast(NamedTuple):
    """A key whose values took the model's dtype; `overflowed` finite ones are beyond its range."""

    key: str
    checkpoint: torch.dtype
    model: torch.dtype
    overflowed: int


@dataclass(frozen=True, slots=True, repr=False)
class LoadResult:
    """The result of `load_into`, under the model's own keys (unexpected ones: under the
    checkpoint's bare keys).

    `assigned` has the keys of the checkpoint that went to keys of other names (wrappers apart), and
    `casts` those whose dtype is not that of the model.
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched: tuple[ShapeMismatch, ...]
    assigned: Mapping[str, str] = field(default_factory=dict)
    casts: tuple[LoadCast, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every key was met exactly once and in its shape."""
        return not (self.missing_keys or self.unexpected_keys or self.mismatched)

    def __repr__(self) -> str:
        named = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        counts = [f"{count:,} {name}" for name, count in named.items() if count]
        return short_repr("LoadResult", self._verdict, *counts)

    @property
    def _verdict(self) -> str:
        return "fits" if self.fits else "does not fit"

    def _repr_html_(self) -> str:
        rows: list[tuple[Any, ...]] = [("missing", key, "") for key in self.missing_keys]
        rows += [("unexpected", key, "") for key in self.unexpected_keys]
        rows += [(one.key, list(one.checkpoint), list(one.model)) for one in self.mismatched]
        return html_table(self._verdict, rows)


@spelling_checked
def load_into(
    model: torch.nn.Module,
    source: Named,
    *,
    strict: bool = True,
    only: str | None = None,
    tag: str | None = None,
    assign: bool = False,
    unknown: Unknown = "refuse",
    edits: Sequence[Edit] = (),
    on_progress: OnProgress | None = None,
) -> LoadResult:
    """Load the state dict of a checkpoint into `model`, wrapped or not, on any device.

    The keys are fitted to the model's by `fit_keys`: whatever wrappers, prefixes or inserted
    segments either side has, as long as names and shapes leave one possibility; of tied weights one
    name is enough. With `strict`, anything missing, unexpected or of another shape raises
    `KeyMismatch` and the model stays as it was; without, what fits is loaded. Values take the dtype
    of the model: `casts` of the result says which. A `CheckpointWarning` tells of values beyond its
    range, and of tensors that differ and are one in the model, which gets the last. What would lose
    its imaginary part is a `RefusedObject`. A buffer that the model does not save (TorchScript
    does) may be there with the model's own values. `assign` as in `load_state_dict`; `only`, `tag`,
    `unknown`, `edits` and `on_progress` (bytes that are read) as in `load_portable`.

    >>> load_into(model, "ddp_cuda3.pt").missing_keys  # doctest: +SKIP
    ()
    """
    _check_asked(model, strict=strict, assign=assign)
    target = live_shapes(model)
    load = partial(
        load_portable,
        source,
        only=only,
        tag=tag,
        unknown=unknown,
        edits=edits,
        on_progress=on_progress,
    )
    try:
        state_dict = load()
    except KeyConflict:  # without wrappers two keys are one; the model may have both
        state_dict = load(keys="keep")
    path = places_of(source)[0].path
    _leave_out_beside(state_dict, model, target)
    own = {key: live_shape(value) for key, value in state_dict.items()}
    ties = live_ties(model, target)
    fit = fit_keys(own, target, ties)
    usable, beside = _usable(state_dict, fit, target)
    _carry_metadata(state_dict, usable, fit, model)
    reshaped = {item.key: state_dict[item.source_key] for item in fit.mismatched}
    if reshaped and _takes(model, usable, reshaped):
        usable.update(reshaped)
        fit = replace(fit, mismatched=())
    # torch raises for what it does not take when it has copied the others
    _refuse_untaken(model, usable, target, path, assign)
    casts = () if assign else tuple(_casts(model, usable, path))
    result = _result(fit, casts, *_unmet(model, usable, target, fit, beside))
    if strict and not result.fits:
        raise _mismatch(result, fit, path, model)
    cast = {item.key for item in casts}
    if cast:
        _refuse_codes(source, only, tag, {old for old, new in fit.renames.items() if new in cast})
    # before the model is changed: a program may have warnings raised as errors
    warn(_beyond_range(casts))
    if not assign:
        warn(_untied(model, usable, ties))
    _distribute(model, usable, target, path)
    # a module's own load_state_dict may be older than `assign` (torch 2.1)
    words = {"assign": True} if assign else {}
    model.load_state_dict(usable, strict=False, **words)
    return result


def _check_asked(model: object, *, strict: bool, assign: bool) -> None:
    """Raise `OptionRefused` for what is not a model, or is one that cannot be loaded so."""
    if isinstance(model, (str, os.PathLike)):
        hint = "the model comes first: load_into(model, source)"
        raise OptionRefused("the model is a path", hint=hint)
    refuse_no_flag(strict=strict, assign=assign)
    torch = require_torch("loading into a model")
    if not isinstance(model, torch.nn.Module):
        hint = "give the module itself, such as MyModel()"
        raise OptionRefused(f"model={model!r:.100} is not a torch.nn.Module", hint=hint)
    names = (name for name, _ in model.named_parameters())
    if assign and any(name.endswith("_flat_param") for name in names):
        hint = "load without it, or build the model with use_orig_params=True"
        raise OptionRefused("assign=True does not reach the flat parameters of FSDP", hint=hint)


def _beyond_range(casts: Iterable[LoadCast]) -> Iterator[str]:
    for item in casts:
        if item.overflowed:
            count = count_text(item.overflowed, "value")
            told = f"{count} of {item.checkpoint} are beyond the range of the model's {item.model}"
            yield f"{printable(item.key)}: {told}"


def _result(
    fit: Fit, casts: tuple[LoadCast, ...], missing: tuple[str, ...], unexpected: tuple[str, ...]
) -> LoadResult:
    mismatched = tuple(
        ShapeMismatch(item.key, item.target or (), item.source or ()) for item in fit.mismatched
    )
    return LoadResult(missing, unexpected, mismatched, fit.assigned, casts)


def _leave_out_beside(state_dict: dict[str, Any], model: torch.nn.Module, target: Shapes) -> None:
    """Take out what the model does not know and need not: numbers and texts of the training, and
    buffers that are the model's own.
    """
    buffers = saved_names(model.named_buffers(), target)
    found = {key: value for key, value in buffers if key not in target}
    # all keys are needed to see which wrappers the model has
    names = bare_names([*target, *found])
    unsaved = {name: found[key] for name, key in names.items() if key in found}
    for key, value in [*state_dict.items()]:
        # a number or text of the training has no module in its key
        is_beside = "." not in key and isinstance(value, (bool, int, float, str, type(None)))
        if key not in target and (is_beside or _is_same(value, unsaved.get(key))):
            del state_dict[key]


def _is_same(value: Any, other: torch.Tensor | None) -> bool:
    """Whether a value is that of a buffer, bit for bit."""
    return (
        hasattr(value, "dtype")
        and not (other is None or other.is_meta)
        and (value.shape, value.dtype) == (other.shape, other.dtype)
        and (value.cpu() == other.cpu()).all().item()
    )


def _casts(model: torch.nn.Module, usable: Mapping[str, Any], path: PurePath) -> Iterator[LoadCast]:
    """The keys whose values `load_state_dict` would copy into another dtype; `RefusedObject` where
    that takes their imaginary part.
    """
    own = model.state_dict()
    for key, value in usable.items():
        before, after = (getattr(item, "dtype", None) for item in (value, own.get(key)))
        if before is None or after is None or before == after:
            continue
        if before.is_complex and not after.is_complex:
            what = f"is of {before}, the model's of {after}: its imaginary part would be lost"
            hint = "build the model with the dtype of the checkpoint, or load with assign=True"
            raise RefusedObject(what, path=path, where=key, hint=hint)
        yield LoadCast(key, before, after, _beyond(value, after))


def _untied(model: torch.nn.Module, usable: Mapping[str, Any], ties: Ties) -> Iterator[str]:
    """What differs in the checkpoint and is one tensor of the model: torch copies all into it, in
    the order of the modules.
    """
    own = model.state_dict() if ties else {}
    for names in ties:
        met = [key for key in names if key in usable and key in own]
        for key in met[:-1]:
            if not _agree(usable[key], usable[met[-1]], own[key]):
                what = f"{printable(key)} and {printable(met[-1])} differ"
                yield f"{what}, and are one tensor of the model: it has the values of the latter"


def _agree(one: torch.Tensor, other: torch.Tensor, there: torch.Tensor) -> bool:
    """Whether two tensors are the same bits in the dtype of the model's tensor."""
    import torch

    if there.is_quantized or there.layout != torch.strided:
        return True
    # torch views no bytes of what a bit of the tensor conjugates or negates
    plain = (value.detach().resolve_conj().resolve_neg() for value in (one, other))
    bits = (value.to(there.dtype).contiguous().reshape(-1) for value in plain)
    return torch.equal(*(value.view(torch.uint8) for value in bits))  # NaN is like NaN


def _refuse_untaken(
    model: torch.nn.Module,
    usable: Mapping[str, Any],
    target: Shapes,
    path: PurePath,
    assign: bool,
) -> None:
    """Raise `RefusedObject` for what `load_state_dict` does not take for a tensor of the model."""
    for key, there in live_tensors(model, target):
        if key in usable:
            what, hint = _untaken(usable[key], there, assign)
            if what:
                raise RefusedObject(what, path=path, where=key, hint=hint)


def _untaken(value: Any, there: torch.Tensor, assign: bool) -> tuple[str, str]:
    """Why `load_state_dict` does not take a value for a tensor of the model, and what helps."""
    import torch

    if not isinstance(value, torch.Tensor):
        what = f"is of Python's type {type(value).__name__}, and the model has a tensor there"
        return what, "save a tensor under this key"
    if torch.nn.parameter.is_lazy(there):  # it becomes what the value is
        return "", ""
    if assign:
        is_trained = there.requires_grad and isinstance(there, torch.nn.Parameter)
        if is_trained and not (value.is_floating_point() or value.is_complex()):
            what = f"is of {value.dtype}, and the model's parameter requires grad"
            return what, "freeze it: requires_grad_(False)"
        return "", ""
    what, hint = "", "assign=True puts it there"
    if there.is_meta:  # torch copies nothing, and only warns of it
        what = "has no memory in the model, which is on the meta device"
    elif value.layout != there.layout or value.is_quantized > there.is_quantized:
        what = f"is {_kind(value)}, the model's is {_kind(there)}"
    elif there.is_inference() and not torch.is_inference_mode_enabled():
        what = "cannot be copied into the model's tensor, which was made in inference mode"
    elif _is_expanded(there):
        what = "cannot be copied into the model's tensor, which has one value for several elements"
    return what, hint


_SET_WHOLE = (
    "torch.distributed.checkpoint.state_dict.set_model_state_dict takes what load_portable gives, "
    "with full_state_dict=True"
)


def _distribute(
    model: torch.nn.Module, usable: dict[str, Any], target: Shapes, path: PurePath
) -> None:
    """Cut values as those of the model are, which FSDP2 and tensor parallelism keep as DTensors:
    every process of the mesh is here, with all values.
    """
    for key, there in live_tensors(model, target):
        if key in usable and hasattr(there, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor  # seldom needed

            whole = usable[key].detach()
            try:
                usable[key] = distribute_tensor(whole, there.device_mesh, there.placements)
            except Exception as error:  # torch 2.13 only asserts that it can
                what = f"cannot be cut as the model's is: {there.placements}"
                raise RefusedObject(what, path=path, where=key, hint=_SET_WHOLE) from error


def _is_expanded(there: torch.Tensor) -> bool:
    """Whether several elements are one in memory, which torch does not write to."""
    if str(there.layout) != "torch.strided" or not there.numel():
        return False
    return any(
        size > 1 and not step for size, step in zip(there.shape, there.stride(), strict=True)
    )


def _kind(value: torch.Tensor) -> str:
    return "quantized" if value.is_quantized else str(value.layout)


def _beyond(values: torch.Tensor, dtype: torch.dtype) -> int:
    """How many finite values are beyond the range of a dtype, counted where they are."""
    import torch

    if dtype == torch.bool or values.is_quantized:
        return 0
    parts = values
    if parts.layout != torch.strided:
        parts = parts.to_dense()
    if parts.is_complex():
        parts = torch.view_as_real(parts)
    if not (dtype.is_floating_point or dtype.is_complex):
        span, numbers = torch.iinfo(dtype), parts.double()
        return int(((numbers < span.min) | (numbers > span.max)).sum())
    if parts.is_floating_point() and torch.finfo(parts.dtype).max <= torch.finfo(dtype).max:
        return 0
    # float32 has all numbers of the narrow types, and takes half the memory
    numbers = parts.double() if parts.dtype.itemsize > 4 else parts.float()
    made = numbers.to(dtype.to_real()).to(numbers.dtype)  # rounded: what rounds into it is within
    return int((numbers.isfinite() & ~made.isfinite()).sum())


def _refuse_codes(source: Named, only: str | None, tag: str | None, cast: Set[str]) -> None:
    """Raise `RefusedObject` where codes or their scales would be copied as if they were values."""
    with open_certain(source, tag=tag) as checkpoint:
        found = find_scaled(dict(checkpoint.state_dict(only).tensors()))
    for item in found:
        if {item.codes, *item.needed} & cast:
            what = f"holds codes that mean nothing without their scale {printable(item.scale)}"
            what = f"{what}; the model has another dtype there"
            ways = "build the model with the layers that take such weights"
            hint = f"{ways}; assign=True gives it the codes as they are"
            raise RefusedObject(what, path=checkpoint.path, where=item.codes, hint=hint)


def _usable(
    state_dict: Mapping[str, Any], fit: Fit, target: Shapes
) -> tuple[OrderedDict[str, Any], Mapping[str, str]]:
    """The values under the model's keys, and unexpected ones where they would be in the model, for
    a module may know them from older days; with the latter names, each with its own.

    What was not assigned to a key of the model is not loaded there because it happens to have its
    name.
    """
    wrong = {item.source_key for item in fit.mismatched}
    follow = module_paths(fit.renames)
    names = {key: _moved(key, follow) for key in fit.unexpected}
    names = {old: new for old, new in names.items() if not {old, new} & target.keys()}
    names.update(fit.renames)
    kept = [key for key in state_dict if key in names and key not in wrong]
    usable = OrderedDict((names[key], state_dict[key]) for key in kept)
    usable.update((key, state_dict[old]) for key, old in fit.filled.items())
    return usable, {new: old for old, new in names.items() if old not in fit.renames}


def _moved(key: str, follow: Callable[[str], str]) -> str:
    """A key in the module that has the path that its own module's became."""
    path, _, name = key.rpartition(".")
    return ".".join(filter(None, (follow(path), name)))


def _takes(model: torch.nn.Module, usable: Mapping[str, Any], reshaped: Mapping[str, Any]) -> bool:
    """Whether the model's modules take values of other shapes than theirs, as observers of
    quantisation do (torch 2.13, `FakeQuantize._load_from_state_dict`).
    """
    own = model.state_dict()
    # of several values for a number torch 2.1 takes the first and says nothing
    if any(own[key].dim() == 0 and value.numel() != 1 for key, value in reshaped.items()):
        return False
    tried = OrderedDict({**usable, **reshaped})
    return _tried(model, tried) is not None


def _tried(model: torch.nn.Module, state_dict: OrderedDict[str, Any]) -> Any:
    """What `load_state_dict` says of a state dict; None where it raises, or cannot be tried: a
    module that cannot be copied, or a hook of the user's.
    """
    try:
        with warnings.catch_warnings():  # that nothing is copied is the point
            warnings.simplefilter("ignore")
            return _skeleton(model).load_state_dict(state_dict, strict=False)
    except Exception:
        return None


def _unmet(
    model: torch.nn.Module,
    usable: OrderedDict[str, Any],
    target: Shapes,
    fit: Fit,
    beside: Mapping[str, str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The missing and unexpected keys as the model's modules see them: some fill in or rename."""
    missing, unexpected = fit.missing, fit.unexpected
    if not missing and not unexpected:
        return missing, unexpected
    seen = _tried(model, usable)
    if seen is None:  # the plain comparison stands
        return missing, unexpected
    wrong = {item.key for item in fit.mismatched}
    missing = tuple(key for key in seen.missing_keys if key not in wrong)
    unmet = (beside.get(key, key) for key in seen.unexpected_keys)
    return missing, (*unmet, *(key for key in unexpected if key in target))


def _skeleton(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model on the meta device, to try a state dict on without touching any value."""
    import copy

    import torch

    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()
    }
    memo.update((id(b), b.to("meta")) for b in model.buffers())
    return copy.deepcopy(model, memo)


def _mismatch(result: LoadResult, fit: Fit, path: PurePath, model: torch.nn.Module) -> KeyMismatch:
    met = {"missing": result.missing_keys, "unexpected": result.unexpected_keys}
    parts = [f"{len(keys)} {word} ({first_few(keys, 3)})" for word, keys in met.items() if keys]
    parts += [
        f"{printable(wrong.key)} is {list(wrong.checkpoint)}, the model has {list(wrong.model)}"
        for wrong in result.mismatched[:3]
    ]
    what = f"its keys are not the model's: {'; '.join(parts)}"
    return KeyMismatch(what, path=path, hint=_hint(fit, model), fit=fit)


def _hint(fit: Fit, model: torch.nn.Module) -> str:
    if fit.preset:
        rules = f"keys=KeyRules.of([('preset', '{fit.preset}')]) of load_portable"
        return f"{rules} leaves out what that framework adds, and load_state_dict takes the rest"
    loose = "strict=False loads what fits and returns the rest"
    if hasattr(model, "from_pretrained"):
        own = f"{type(model).__name__}.from_pretrained(folder)"
        return f"{own} knows the names under which its library saves; {loose}"
    return loose


def _carry_metadata(state_dict: Any, usable: Any, fit: Fit, model: torch.nn.Module) -> None:
    """Give the state dict the checkpoint's module versions, under the model's own module paths."""
    versions = getattr(state_dict, "_metadata", None)
    if versions is None:
        return
    follow = module_paths(fit.renames)
    # of a wrapper and what is in it the inner one comes later, and its version counts
    moved = {_unwrapped(follow(path)): version for path, version in versions.items()}
    found = ((path, _unwrapped(path)) for path, _ in model.named_modules())
    usable._metadata = OrderedDict((path, moved[bare]) for path, bare in found if bare in moved)


def _unwrapped(path: str) -> str:
    """The path of a module without `checkpoint_wrapper`, which no key of a state dict has."""
    return ".".join(name for name in path.split(".") if name != "_checkpoint_wrapped_module")
