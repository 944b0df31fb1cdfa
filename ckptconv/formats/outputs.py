"""The output formats, by the names that users give them and by the names of files."""

from __future__ import annotations

from ckptconv.formats.dcp_output import DCP
from ckptconv.formats.npz_output import NPZ
from ckptconv.formats.safetensors_output import SAFETENSORS
from ckptconv.formats.target_format import TargetFormat
from ckptconv.formats.torch_output import TORCH

TARGETS: tuple[TargetFormat, ...] = (TORCH, SAFETENSORS, DCP, NPZ)
"""All output formats, in the order in which they are listed."""

FOR_FOLDERS: TargetFormat = SAFETENSORS
"""What a folder of shards is written in where nobody says."""

_BY_NAME = {target.name: target for target in TARGETS}
_BY_SUFFIX = {suffix: target for target in TARGETS for suffix in target.suffixes}
_CLAIMED = {suffix: target for target in TARGETS for suffix in target.claimed}


def target_named(name: str) -> TargetFormat:
    """The output format that users call so."""
    return _BY_NAME[name]  # type: ignore[index]


def target_of_suffix(suffix: str) -> TargetFormat | None:
    """The output format of files whose names end so; None where that does not tell."""
    return _BY_SUFFIX.get(suffix.lower())


def claimant(suffix: str) -> TargetFormat | None:
    """The output format that every reader takes files whose names end so for."""
    return _CLAIMED.get(suffix.lower())
