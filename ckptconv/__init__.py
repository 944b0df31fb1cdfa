"""ckptconv: PyTorch checkpoints saved anywhere, opened anywhere, without running their code.

`convert_checkpoint` converts files without importing torch; `load_portable`, `load_into` and
`save_portable` work with live tensors; `inspect_checkpoint` tells the facts about a file and
`open_checkpoint` gives its index. Every error is a `CheckpointError`. docs/api.md has an example of
each name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptconv.batch.drive import convert_many as convert_many
    from ckptconv.batch.receipts import Receipt as Receipt
    from ckptconv.convert.applying import apply_deltas as apply_deltas
    from ckptconv.convert.applying import merge_lora_checkpoint as merge_lora_checkpoint
    from ckptconv.convert.averaging import average as average
    from ckptconv.convert.averaging import average_checkpoints as average_checkpoints
    from ckptconv.convert.combining import merge as merge
    from ckptconv.convert.combining import merge_checkpoints as merge_checkpoints
    from ckptconv.convert.convert_checkpoint import convert_checkpoint as convert_checkpoint
    from ckptconv.convert.deltas import DeltaResult as DeltaResult
    from ckptconv.convert.deltas import delta_checkpoints as delta_checkpoints
    from ckptconv.convert.edit import edit as edit
    from ckptconv.convert.edit import edit_checkpoint as edit_checkpoint
    from ckptconv.convert.execute import ConversionResult as ConversionResult
    from ckptconv.convert.execute import execute_plan as execute_plan
    from ckptconv.convert.header_edits import EditResult as EditResult
    from ckptconv.convert.job import Job as Job
    from ckptconv.convert.options import Options as Options
    from ckptconv.convert.plan import ConversionPlan as ConversionPlan
    from ckptconv.convert.planner import plan_conversion as plan_conversion
    from ckptconv.convert.recover import Recovery as Recovery
    from ckptconv.convert.recover import recover_checkpoint as recover_checkpoint
    from ckptconv.devices.host import best_device as best_device
    from ckptconv.diff.checkpoints import diff_checkpoints as diff_checkpoints
    from ckptconv.diff.report import Difference as Difference
    from ckptconv.doctor.diagnose import diagnose as diagnose
    from ckptconv.doctor.diagnose import diagnose_checkpoint as diagnose_checkpoint
    from ckptconv.doctor.report import Diagnosis as Diagnosis
    from ckptconv.doctor.report import Finding as Finding
    from ckptconv.inspect.facts import inspect_checkpoint as inspect_checkpoint
    from ckptconv.inspect.inspection import Inspection as Inspection
    from ckptconv.inspect.inspection import TensorFacts as TensorFacts
    from ckptconv.keys.fits import Fit as Fit
    from ckptconv.keys.fitting import fit_keys as fit_keys
    from ckptconv.keys.key_map import KeyRules as KeyRules
    from ckptconv.keys.rule_files import read_key_rules as read_key_rules
    from ckptconv.live.load import load_portable as load_portable
    from ckptconv.live.load_into import LoadResult as LoadResult
    from ckptconv.live.load_into import load_into as load_into
    from ckptconv.live.opened import LazyTensor as LazyTensor
    from ckptconv.live.opened import OpenCheckpoint as OpenCheckpoint
    from ckptconv.live.opened import open_checkpoint as open_checkpoint
    from ckptconv.live.save import save_portable as save_portable
    from ckptconv.pages.make import Page as Page
    from ckptconv.pages.make import report as report
    from ckptconv.pages.make import report_checkpoint as report_checkpoint
    from ckptconv.proof.making import manifest_checkpoint as manifest_checkpoint
    from ckptconv.proof.manifest import Manifest as Manifest
    from ckptconv.proof.report import Verification as Verification
    from ckptconv.proof.verify import verify_checkpoint as verify_checkpoint
    from ckptconv.scan.files import Scan as Scan
    from ckptconv.scan.files import scan_checkpoint as scan_checkpoint
    from ckptconv.support.errors import AmbiguousStateDict as AmbiguousStateDict
    from ckptconv.support.errors import BatchRefused as BatchRefused
    from ckptconv.support.errors import CheckpointError as CheckpointError
    from ckptconv.support.errors import CheckpointWarning as CheckpointWarning
    from ckptconv.support.errors import DeviceUnavailable as DeviceUnavailable
    from ckptconv.support.errors import IncompleteCheckpoint as IncompleteCheckpoint
    from ckptconv.support.errors import IsFolder as IsFolder
    from ckptconv.support.errors import KeyConflict as KeyConflict
    from ckptconv.support.errors import KeyMismatch as KeyMismatch
    from ckptconv.support.errors import LimitExceeded as LimitExceeded
    from ckptconv.support.errors import MalformedCheckpoint as MalformedCheckpoint
    from ckptconv.support.errors import MissingDependency as MissingDependency
    from ckptconv.support.errors import MissingFile as MissingFile
    from ckptconv.support.errors import MissingTensor as MissingTensor
    from ckptconv.support.errors import OptionRefused as OptionRefused
    from ckptconv.support.errors import OutputRefused as OutputRefused
    from ckptconv.support.errors import RefusedObject as RefusedObject
    from ckptconv.support.errors import RemoteFailure as RemoteFailure
    from ckptconv.support.errors import UnknownOption as UnknownOption
    from ckptconv.support.errors import UnreadableFile as UnreadableFile
    from ckptconv.support.errors import UnsupportedCheckpoint as UnsupportedCheckpoint
    from ckptconv.support.errors import VerificationFailed as VerificationFailed
    from ckptconv.support.limits import Limits as Limits
    from ckptconv.support.limits import limits as limits
    from ckptconv.support.progress import Progress as Progress
    from ckptconv.tensors.element_pairs import Tolerance as Tolerance
    from ckptconv.tensors.refs import TensorRef as TensorRef
    from ckptconv.tensors.statistics import Statistics as Statistics
    from ckptconv.tree.checkpoint import Checkpoint as Checkpoint
    from ckptconv.tree.dequantizing import Dequantize as Dequantize
    from ckptconv.tree.dropping import Drop as Drop
    from ckptconv.tree.merging_lora import MergeLora as MergeLora
    from ckptconv.tree.optimizer_forms import FormOptimizer as FormOptimizer
    from ckptconv.tree.optimizer_names import RenameKeys as RenameKeys
    from ckptconv.tree.state_dicts import StateDict as StateDict
    from ckptconv.values.collect import CheckpointStatistics as CheckpointStatistics
    from ckptconv.values.collect import TensorStatistics as TensorStatistics
    from ckptconv.values.collect import stats as stats
    from ckptconv.values.collect import stats_checkpoint as stats_checkpoint

__version__ = "0.1.0"

_HOMES = {
    "AmbiguousStateDict": "support.errors",
    "BatchRefused": "support.errors",
    "Checkpoint": "tree.checkpoint",
    "CheckpointError": "support.errors",
    "CheckpointStatistics": "values.collect",
    "CheckpointWarning": "support.errors",
    "ConversionPlan": "convert.plan",
    "ConversionResult": "convert.execute",
    "DeltaResult": "convert.deltas",
    "DeviceUnavailable": "support.errors",
    "Diagnosis": "doctor.report",
    "Dequantize": "tree.dequantizing",
    "Difference": "diff.report",
    "Drop": "tree.dropping",
    "FormOptimizer": "tree.optimizer_forms",
    "Finding": "doctor.report",
    "EditResult": "convert.header_edits",
    "Fit": "keys.fits",
    "IncompleteCheckpoint": "support.errors",
    "Inspection": "inspect.inspection",
    "IsFolder": "support.errors",
    "Job": "convert.job",
    "KeyConflict": "support.errors",
    "KeyMismatch": "support.errors",
    "KeyRules": "keys.key_map",
    "LazyTensor": "live.opened",
    "LimitExceeded": "support.errors",
    "Limits": "support.limits",
    "LoadResult": "live.load_into",
    "MalformedCheckpoint": "support.errors",
    "Manifest": "proof.manifest",
    "MergeLora": "tree.merging_lora",
    "MissingDependency": "support.errors",
    "MissingFile": "support.errors",
    "MissingTensor": "support.errors",
    "OpenCheckpoint": "live.opened",
    "OptionRefused": "support.errors",
    "Options": "convert.options",
    "OutputRefused": "support.errors",
    "Page": "pages.make",
    "Progress": "support.progress",
    "Receipt": "batch.receipts",
    "Recovery": "convert.recover",
    "RefusedObject": "support.errors",
    "RemoteFailure": "support.errors",
    "RenameKeys": "tree.optimizer_names",
    "Scan": "scan.files",
    "StateDict": "tree.state_dicts",
    "Statistics": "tensors.statistics",
    "TensorFacts": "inspect.inspection",
    "TensorRef": "tensors.refs",
    "TensorStatistics": "values.collect",
    "Tolerance": "tensors.element_pairs",
    "UnknownOption": "support.errors",
    "UnreadableFile": "support.errors",
    "UnsupportedCheckpoint": "support.errors",
    "Verification": "proof.report",
    "VerificationFailed": "support.errors",
    "apply_deltas": "convert.applying",
    "average_checkpoints": "convert.averaging",
    "best_device": "devices.host",
    "convert_checkpoint": "convert.convert_checkpoint",
    "convert_many": "batch.drive",
    "delta_checkpoints": "convert.deltas",
    "diagnose_checkpoint": "doctor.diagnose",
    "diff_checkpoints": "diff.checkpoints",
    "edit_checkpoint": "convert.edit",
    "execute_plan": "convert.execute",
    "fit_keys": "keys.fitting",
    "inspect_checkpoint": "inspect.facts",
    "limits": "support.limits",
    "load_into": "live.load_into",
    "load_portable": "live.load",
    "manifest_checkpoint": "proof.making",
    "merge_checkpoints": "convert.combining",
    "merge_lora_checkpoint": "convert.applying",
    "open_checkpoint": "live.opened",
    "plan_conversion": "convert.planner",
    "read_key_rules": "keys.rule_files",
    "recover_checkpoint": "convert.recover",
    "report_checkpoint": "pages.make",
    "save_portable": "live.save",
    "scan_checkpoint": "scan.files",
    "stats_checkpoint": "values.collect",
    "verify_checkpoint": "proof.verify",
}
"""Public name → its module, imported on first use, so that `import ckptconv` costs nothing."""

_EARLIER = {
    "average": "convert.averaging",
    "diagnose": "doctor.diagnose",
    "edit": "convert.edit",
    "merge": "convert.combining",
    "report": "pages.make",
    "stats": "values.collect",
}
"""The names that functions had first, which go on working."""

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name) or _EARLIER.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return list(__all__)
