"""ckptconv: PyTorch checkpoints saved anywhere, opened anywhere, without running their code.

`convert_checkpoint` converts files without importing torch; `load_portable`, `load_into` and `save_portable` work with live
tensors; `inspect_checkpoint` tells the facts about a file and `open_checkpoint` gives its index. Every error is a
`CheckpointError`. docs/api.md has an example of each name.
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
    from ckptconv.convert import execute_plan as execute_plan
    from ckptconv.convert_checkpoint_ import convert_checkpoint as convert_checkpoint
    from ckptconv.devices import best_device as best_device
    from ckptconv.diagnosis import diagnose as diagnose
    from ckptconv.diffing import Difference as Difference
    from ckptconv.diffing import diff_checkpoints as diff_checkpoints
    from ckptconv.errors import AmbiguousStateDict as AmbiguousStateDict
    from ckptconv.errors import CheckpointError as CheckpointError
    from ckptconv.errors import DeviceUnavailable as DeviceUnavailable
    from ckptconv.errors import IncompleteCheckpoint as IncompleteCheckpoint
    from ckptconv.errors import IsFolder as IsFolder
    from ckptconv.errors import KeyConflict as KeyConflict
    from ckptconv.errors import KeyMismatch as KeyMismatch
    from ckptconv.errors import LimitExceeded as LimitExceeded
    from ckptconv.errors import MalformedCheckpoint as MalformedCheckpoint
    from ckptconv.errors import MissingDependency as MissingDependency
    from ckptconv.errors import MissingFile as MissingFile
    from ckptconv.errors import OptionRefused as OptionRefused
    from ckptconv.errors import OutputRefused as OutputRefused
    from ckptconv.errors import RefusedObject as RefusedObject
    from ckptconv.errors import UnknownOption as UnknownOption
    from ckptconv.errors import UnreadableFile as UnreadableFile
    from ckptconv.errors import UnsupportedCheckpoint as UnsupportedCheckpoint
    from ckptconv.errors import VerificationFailed as VerificationFailed
    from ckptconv.findings import Diagnosis as Diagnosis
    from ckptconv.findings import Finding as Finding
    from ckptconv.fitting import LoadResult as LoadResult
    from ckptconv.fitting import load_into as load_into
    from ckptconv.formats.detect import open_checkpoint as open_checkpoint
    from ckptconv.inspection import Inspection as Inspection
    from ckptconv.inspection import TensorFacts as TensorFacts
    from ckptconv.inspection import inspect_checkpoint as inspect_checkpoint
    from ckptconv.key_fitting import Fit as Fit
    from ckptconv.key_fitting import fit_keys as fit_keys
    from ckptconv.keys import KeyRules as KeyRules
    from ckptconv.loading import load_portable as load_portable
    from ckptconv.options_ import Options as Options
    from ckptconv.planning import plan_conversion as plan_conversion
    from ckptconv.plans import ConversionPlan as ConversionPlan
    from ckptconv.progress import Progress as Progress
    from ckptconv.rule_files import read_key_rules as read_key_rules
    from ckptconv.saving import save_portable as save_portable
    from ckptconv.scanning import Scan as Scan
    from ckptconv.scanning import scan_checkpoint as scan_checkpoint
    from ckptconv.state_dicts import StateDict as StateDict
    from ckptconv.tensors import TensorRef as TensorRef

__version__ = "0.1.0"

_HOMES = {
    "AmbiguousStateDict": "errors",
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "ConversionPlan": "plans",
    "ConversionResult": "convert",
    "DeviceUnavailable": "errors",
    "Diagnosis": "findings",
    "Difference": "diffing",
    "Finding": "findings",
    "Fit": "key_fitting",
    "IncompleteCheckpoint": "errors",
    "Inspection": "inspection",
    "IsFolder": "errors",
    "KeyConflict": "errors",
    "KeyMismatch": "errors",
    "KeyRules": "keys",
    "LimitExceeded": "errors",
    "Limits": "bounds",
    "LoadResult": "fitting",
    "MalformedCheckpoint": "errors",
    "MissingDependency": "errors",
    "MissingFile": "errors",
    "OptionRefused": "errors",
    "Options": "plans",
    "OutputRefused": "errors",
    "Progress": "progress",
    "RefusedObject": "errors",
    "Scan": "scanning",
    "StateDict": "state_dicts",
    "TensorFacts": "inspection",
    "TensorRef": "tensors",
    "Tolerance": "comparison",
    "UnknownOption": "errors",
    "UnreadableFile": "errors",
    "UnsupportedCheckpoint": "errors",
    "VerificationFailed": "errors",
    "best_device": "devices",
    "convert_checkpoint": "convert",
    "diagnose": "diagnosis",
    "diff_checkpoints": "diffing",
    "execute_plan": "convert",
    "fit_keys": "key_fitting",
    "inspect_checkpoint": "inspection",
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

__all__ = [
    "AmbiguousStateDict",
    "Checkpoint",
    "CheckpointError",
    "ConversionPlan",
    "ConversionResult",
    "DeviceUnavailable",
    "Diagnosis",
    "Difference",
    "Finding",
    "Fit",
    "IncompleteCheckpoint",
    "Inspection",
    "IsFolder",
    "KeyConflict",
    "KeyMismatch",
    "KeyRules",
    "LimitExceeded",
    "Limits",
    "LoadResult",
    "MalformedCheckpoint",
    "MissingDependency",
    "MissingFile",
    "OptionRefused",
    "Options",
    "OutputRefused",
    "Progress",
    "RefusedObject",
    "Scan",
    "StateDict",
    "TensorFacts",
    "TensorRef",
    "Tolerance",
    "UnknownOption",
    "UnreadableFile",
    "UnsupportedCheckpoint",
    "VerificationFailed",
    "__version__",
    "best_device",
    "convert_checkpoint",
    "diagnose",
    "diff_checkpoints",
    "execute_plan",
    "fit_keys",
    "inspect_checkpoint",
    "limits",
    "load_into",
    "load_portable",
    "open_checkpoint",
    "plan_conversion",
    "read_key_rules",
    "save_portable",
    "scan_checkpoint",
]
"""Written out, for type checkers and editors read it without running it; a test holds it against `_HOMES`."""


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
