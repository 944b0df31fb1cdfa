"""Names that are known: those that ordinary checkpoints hold, and the packages that are wherever a
checkpoint is loaded: Python's library, numpy, safetensors, torch and what torch installs.

The names themselves stand in known_names.txt, with their sources.
"""

from __future__ import annotations

from ckptconv.support.name_lists import names_beside
from ckptconv.tensors.dtypes import BY_STORAGE_CLASS, DTYPES

UTILS = "torch._utils"
VALUELESS = frozenset(
    {f"{UTILS}._rebuild_meta_tensor_no_storage", f"{UTILS}._rebuild_wrapper_subclass"}
)
"""Rebuild functions of tensors without storage: there are no values, and none may be invented."""
COPIES = frozenset(
    f"{UTILS}._rebuild_{name}"
    for name in ("device_tensor_from_numpy", "xla_tensor", "device_tensor_from_cpu_tensor")
)
"""Rebuild functions that copy an array or tensor to a device: a tensor there stands for them."""

_NAMES = names_beside(__file__)
ALWAYS_THERE = frozenset(_NAMES["standard library"] + _NAMES["installed with torch"])
"""The top modules of what every victim has: Python's own library, old and new, torch and what comes
with it, numpy, safetensors and this program."""
WEIGHTS_ONLY = frozenset(
    [
        *_NAMES["weights only"],
        *(f"torch.{dtype.name}" for dtype in DTYPES),
        *(f"torch.{name}" for name in BY_STORAGE_CLASS),
        *(f"torch.cuda.{name}" for name in BY_STORAGE_CLASS if not name.startswith("Q")),
    ]
)
"""The globals that `torch.load(weights_only=True)` accepts without being told to."""
SINGLE = frozenset(_NAMES["enums"])
"""Classes that have a few objects, which a call finds."""
MAKERS = WEIGHTS_ONLY.union(_NAMES["makers"], _NAMES["classes of torch"]) - SINGLE.union(
    ("_codecs.encode", "torch.serialization._get_layout")
)
"""Classes, and functions that make an object: what they give is there for the first time."""
# where the functions stand that modules keep as their activation, as `pickle` names them
_HOLDERS = ("nn.functional", "_C._nn", "_C._VariableFunctions", "_C._VariableFunctionsClass")
PLAIN = MAKERS.union(
    SINGLE,
    WEIGHTS_ONLY,
    _NAMES["finders"],
    (f"torch.{holder}.{name}" for holder in _HOLDERS for name in _NAMES["activations"]),
)
"""The names of ordinary checkpoints, in the words of Python 3 (or of python 2, if only there)."""
