"""ckptconv: PyTorch checkpoints saved anywhere, opened anywhere, without running their code.

`convert_checkpoint` converts files without importing torch; `load_portable`, `load_into` and `save_portable` work with live
tensors; `open_checkpoint` gives the index of a file. Every error is a `CheckpointError`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptconv.bounds import Limits as Limits
    from ckptconv.bounds import limits as limits
    from ckptconv.checkpoint import Checkpoint as Checkpoint
    from ckptconv.comparison import Tolerance as Tolerance
    from ckptconv.convert import ConversionResult as ConversionResult
    from ckptconv.convert import convert_checkpoint as convert_checkpoint
    from ckptconv.convert import execute_plan as execute_plan
    from ckptconv.devices import best_device as best_device
    from ckptconv.diagnosis import diagnose as diagnose
    from ckptconv.diffing import Difference as Difference
    from ckptconv.diffing import diff_checkpoints as diff_checkpoints
    from ckptconv.errors import CheckpointError as CheckpointError
    from ckptconv.findings import Diagnosis as Diagnosis
    from ckptconv.findings import Finding as Finding
    from ckptconv.fitting import LoadResult as LoadResult
    from ckptconv.fitting import load_into as load_into
    from ckptconv.formats.detect import open_checkpoint as open_checkpoint
    from ckptconv.key_fitting import Fit as Fit
    from ckptconv.key_fitting import fit_keys as fit_keys
    from ckptconv.keys import KeyRules as KeyRules
    from ckptconv.loading import load_portable as load_portable
    from ckptconv.planning import plan_conversion as plan_conversion
    from ckptconv.plans import ConversionPlan as ConversionPlan
    from ckptconv.plans import Options as Options
    from ckptconv.progress import Progress as Progress
    from ckptconv.rule_files import read_key_rules as read_key_rules
    from ckptconv.saving import save_portable as save_portable
    from ckptconv.scanning import Scan as Scan
    from ckptconv.scanning import scan_checkpoint as scan_checkpoint
    from ckptconv.state_dicts import StateDict as StateDict
    from ckptconv.tensors import TensorRef as TensorRef

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "ConversionPlan": "plans",
    "ConversionResult": "convert",
    "Diagnosis": "findings",
    "Difference": "diffing",
    "Finding": "findings",
    "Fit": "key_fitting",
    "KeyRules": "keys",
    "Limits": "bounds",
    "LoadResult": "fitting",
    "Options": "plans",
    "Progress": "progress",
    "Scan": "scanning",
    "StateDict": "state_dicts",
    "TensorRef": "tensors",
    "Tolerance": "comparison",
    "best_device": "devices",
    "convert_checkpoint": "convert",
    "diagnose": "diagnosis",
    "diff_checkpoints": "diffing",
    "execute_plan": "convert",
    "fit_keys": "key_fitting",
    "limits": "bounds",
    "load_into": "fitting",
    "load_portable": "loading",
    "open_checkpoint": "formats.detect",
    "plan_conversion": "planning",
    "read_key_rules": "rule_files",
    "save_portable": "saving",
    "scan_checkpoint": "scanning",
}
"""Public name → the module that defines it; imported on first use, so that `import ckptconv` costs nothing."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
