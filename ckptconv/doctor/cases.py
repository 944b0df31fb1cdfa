"""What `doctor` examines, and what it finds before it has a command: a case and its symptoms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath

from ckptconv.convert.prescriptions import Fix, Prescription, workable
from ckptconv.devices.host import Host, survey_host
from ckptconv.doctor.findings import Finding, Severity
from ckptconv.doctor.model_fits import ModelFit, best_fit
from ckptconv.inspect.inspection import Inspection
from ckptconv.io.location import Location
from ckptconv.support.errors import CheckpointError, printable
from ckptconv.tensors.scaled_weights import ScaledWeight, find_scaled
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.fitted_keys import KeyTarget
from ckptconv.tree.labels import names_average
from ckptconv.tree.producers import averages_weights
from ckptconv.tree.state_dicts import StateDict

_NAMED = 3  # keys, places or tags that a text names before it counts


@dataclass(frozen=True, slots=True)
class Symptom:
    """A finding before its command: `fix` clears it; `chosen`: only if the user wants that."""

    finding: Finding
    fix: Fix | None = None
    chosen: bool = False


@dataclass(frozen=True)
class Case:
    """What is examined: a checkpoint, its modules as state dicts, the facts, the user's options."""

    places: tuple[Location, ...]
    whole: Checkpoint
    checkpoint: Checkpoint
    facts: Inspection
    device: str | None
    like: str | None = None
    model: str | None = None
    target: KeyTarget | None = None
    tag: str | None = None
    size: bool = False

    @property
    def paths(self) -> tuple[PurePath, ...]:
        """How the files are called."""
        return tuple(place.path for place in self.places)

    @cached_property
    def host(self) -> Host:
        """The devices that are here; asked for only when a tag needs it, for that imports torch."""
        return survey_host(ask_torch=True)

    @cached_property
    def _tried(self) -> dict[Fix, Prescription | CheckpointError]:
        return {}

    def workable(self, fix: Fix) -> Prescription | CheckpointError:
        """As `prescriptions.workable` on the checkpoint; each conversion is planned once."""
        if fix not in self._tried:
            self._tried[fix] = workable(fix, self.checkpoint, self.target)
        return self._tried[fix]

    @cached_property
    def fit(self) -> ModelFit | None:
        """The state dict for the model that was named."""
        return None if self.target is None else best_fit(self.state_dicts, self.target)

    @property
    def must(self) -> Fix:
        """What every conversion here must do: the kind of file, the device, the keys asked for."""
        fix = Fix(suffix=suffix(self), device=self.device, tag=self.tag)
        if self.fit is None or not self.fit.fixes:
            return fix
        only = self.fit.found.path if len(self.state_dicts) > 1 else None
        surplus = None if self.fit.fit.fits else True
        return replace(fix, only=only, like=self.like, model=self.model, drop_unexpected=surplus)

    @cached_property
    def state_dicts(self) -> list[StateDict]:
        """The state dicts, the one that is the model first, the ones of averaged weights last."""
        found = self.checkpoint.state_dicts()
        # then they are the model's, whatever the labels say
        if averages_weights(self.checkpoint.root):
            return sorted(found, key=lambda item: item.path != "state_dict")
        return sorted(found, key=lambda item: is_average(item.path))

    @cached_property
    def scaled(self) -> dict[str, list[ScaledWeight]]:
        """The weights that are codes beside a scale, by the path of their state dict."""
        found = {item.path: find_scaled(dict(item.tensors())) for item in self.state_dicts}
        return {path: scaled for path, scaled in found.items() if scaled}


def suffix(case: Case) -> str:
    """That of a fixed file: of the same kind, as far as that is written."""
    return case.facts.opening.suffix


def is_average(path: str) -> bool:
    return any(map(names_average, path.split(".")))


def symptom(
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


def some(names: Sequence[str]) -> str:
    """The first few of some names, and how many more there are."""
    shown = ", ".join(map(printable, names[:_NAMED]))
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
