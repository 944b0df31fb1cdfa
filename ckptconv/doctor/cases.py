"""What `doctor` examines, and what it finds before it has a command: a case and its symptoms; how
its state dicts fit a named model, and what `load_state_dict` would say of the file as it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from pathlib import PurePath

from ckptconv.convert.fixes import Fix, Prescription, workable
from ckptconv.convert.key_targets import key_target
from ckptconv.devices.host import Host, survey_host
from ckptconv.devices.mapping import tag_map
from ckptconv.doctor import torch_words as words
from ckptconv.doctor.report import SEVERITIES, Finding, Severity
from ckptconv.inspect.inspection import Inspection
from ckptconv.io.location import Location
from ckptconv.keys.fits import Fit, Shapes
from ckptconv.keys.fitting import fit_keys
from ckptconv.support.choices import refuse_no_flag, refuse_no_path, refuse_no_text
from ckptconv.support.errors import CheckpointError, DeviceUnavailable, printable
from ckptconv.support.progress import OnProgress
from ckptconv.support.records import dataclass
from ckptconv.tensors.scaled_weights import ScaledWeight, find_scaled
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.fitted_keys import KeyTarget, shapes_of
from ckptconv.tree.labels import averages_weights, names_average
from ckptconv.tree.state_dicts import StateDict

_NAMED = 3  # keys, places or tags that a text names before it counts


@dataclass(frozen=True, slots=True)
class Symptom:
    """A finding before its command: `fix` clears it; `chosen`: only if the user wants that."""

    finding: Finding
    fix: Fix | None = None
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The options of `diagnose`; `target` is what `like` or `model` name, which is built once.
    Raises `CheckpointError` for options that are none.
    """

    like: str | os.PathLike[str] | None = None
    model: str | None = None
    device: str | None = None
    values: bool = False
    size: bool = False
    tag: str | None = None
    on_progress: OnProgress | None = None
    target: KeyTarget | None = field(init=False)

    def __post_init__(self) -> None:
        if self.like is not None:
            refuse_no_path(like=self.like)
        refuse_no_text(device=self.device, model=self.model, tag=self.tag)
        refuse_no_flag(values=self.values, size=self.size)
        if self.device == "keep":  # a conversion that keeps the tags fixes nothing
            raise DeviceUnavailable(
                "'keep' is not a device to load to", hint="ask for cpu, or auto"
            )
        tag_map(self.device)
        object.__setattr__(self, "target", key_target(self.like, self.model))


@dataclass(frozen=True)
class Case:
    """What is examined: a checkpoint, its modules as state dicts, the facts, the user's options."""

    places: tuple[Location, ...]
    whole: Checkpoint
    checkpoint: Checkpoint
    facts: Inspection
    asked: DoctorOptions

    @property
    def paths(self) -> tuple[PurePath, ...]:
        """How the files are called."""
        return tuple(place.path for place in self.places)

    @cached_property
    def host(self) -> Host:
        """The devices that are here; asked for only when a tag needs it, for that imports torch."""
        return survey_host(ask_torch=True)

    @cached_property  # a frozen class has no other place where it could remember them
    def _tried(self) -> dict[Fix, Prescription | CheckpointError]:
        return {}

    def workable(self, fix: Fix) -> Prescription | CheckpointError:
        """As `fixes.workable` on the checkpoint; each conversion is planned once."""
        if fix not in self._tried:
            self._tried[fix] = workable(fix, self.checkpoint, self.asked.target)
        return self._tried[fix]

    @cached_property
    def fit(self) -> ModelFit | None:
        """The state dict for the model that was named."""
        return None if self.asked.target is None else best_fit(self.state_dicts, self.asked.target)

    @property
    def must(self) -> Fix:
        """What every conversion here must do: the kind of file, the device, the keys asked for."""
        fix = Fix(suffix=self.facts.opening.suffix, device=self.asked.device, tag=self.asked.tag)
        if self.fit is None or not self.fit.fixes:
            return fix
        if len(self.state_dicts) > 1:
            fix = replace(fix, only=self.fit.found.path)
        if self.fit.fit.preset:
            fix = replace(fix, preset=self.fit.fit.preset)
        elif not self.fit.fit.fits:
            fix = replace(fix, drop_unexpected=True)
        if self.asked.like is not None:
            fix = replace(fix, like=os.fspath(self.asked.like))
        return replace(fix, model=self.asked.model)

    @cached_property
    def state_dicts(self) -> list[StateDict]:
        """The state dicts, the one that is the model first, the ones of averaged weights last."""
        found = self.checkpoint.state_dicts()
        # then they are the model's, whatever the labels say
        if averages_weights(self.checkpoint.root):
            return sorted(found, key=lambda item: item.path != "state_dict")
        return sorted(found, key=lambda item: is_average(item.path))

    @cached_property
    def values_of_codes(self) -> Fix | None:
        """What makes values of the quantised weights: a folder like this one where a config stands
        beside them, which has to change with them; None where nothing is quantised.
        """
        if not self.facts.quantized:
            return None
        if self.places[0].is_folder() and self.places[0].child("config.json").is_file():
            return Fix(suffix="", to="safetensors", dequantize=True, with_files=True)
        return Fix(dequantize=True)

    @cached_property
    def scaled(self) -> dict[str, list[ScaledWeight]]:
        """The weights that are codes beside a scale, by the path of their state dict."""
        found = {item.path: find_scaled(dict(item.tensors())) for item in self.state_dicts}
        return {path: scaled for path, scaled in found.items() if scaled}


def is_average(path: str) -> bool:
    """Whether a part is an average of weights (EMA, SWA), by the words of its path."""
    return any(map(names_average, path.split(".")))


def _symptom(
    severity: Severity,
    code: str,
    cause: str,
    effect: str,
    fix: Fix | None = None,
    *,
    advice: str | None = None,
    chosen: bool = False,
) -> Symptom:
    """A symptom and its finding in one."""
    return Symptom(Finding(severity, code, cause, effect, advice=advice), fix, chosen)


error, warning, info = (partial(_symptom, severity) for severity in SEVERITIES)


def some(names: Sequence[str]) -> str:
    """The first few of some names, and how many more there are."""
    shown = ", ".join(map(printable, names[:_NAMED]))
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


# ------------------------------------------------------------------------------- a named model


@dataclass(frozen=True, slots=True)
class ModelFit:
    """The state dict that fits best, how, and what `load_state_dict` says (None: it loads)."""

    found: StateDict
    fit: Fit
    error: str | None

    @property
    def fixes(self) -> bool:
        """Whether other keys, and fewer, would do."""
        fit = self.fit
        return fit.fits or bool(fit.preset) or (fit.covers and bool(fit.renames))


def best_fit(state_dicts: Sequence[StateDict], target: KeyTarget) -> ModelFit | None:
    """The state dict that loads as it is, else can be made to fit, else comes nearest, if any."""
    fits = [_fit(found, target) for found in state_dicts]
    return max(
        fits,
        key=lambda fit: (fit.error is None, fit.fit.fits, fit.fixes, len(fit.fit.renames)),
        default=None,
    )


def _fit(found: StateDict, target: KeyTarget) -> ModelFit:
    shapes = shapes_of(found)
    return ModelFit(
        found, fit_keys(shapes, target.shapes, target.ties), _error(shapes, target.shapes)
    )


def _error(shapes: Shapes, target: Shapes) -> str | None:
    missing = [key for key in target if key not in shapes]
    unexpected = [key for key in shapes if key not in target]
    if missing:
        return words.on_missing(missing[0], unexpected[:1])
    if unexpected:
        return words.on_unexpected(unexpected[0])
    for key, wanted in target.items():
        have = shapes[key]
        if have is not None and wanted is not None and have != wanted:
            return words.on_shape(key, have, wanted)
    return None
