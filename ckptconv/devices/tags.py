"""Location tags: which are valid.

A location tag is the short string that torch writes beside each storage (``cpu``, ``cuda:3``).
"""

from __future__ import annotations

import sys

from ckptconv.support.errors import DeviceUnavailable

# What torch.device() parses (c10/core/Device.cpp, torch 2.13), without `meta` and the names that
# never hold a tensor (mkldnn, opengl, opencl, ideep); torch writes the single ones without an
# index, and loads `cpu` but not `cpu:0`.
_SINGLE = ("cpu", "mps")
_INDEXED = "cuda xpu hpu xla mtia privateuseone ipu hip vulkan ve maia fpga lazy"
INDEXED = tuple(_INDEXED.split())

# backends outside torch; torch.utils.rename_privateuse1_backend
RENAMED = ("npu", "mlu", "musa", "gcu", "sdaa")

COUNTED = ("cuda", "xpu")

# c10::DeviceIndex is an int8: torch takes `cuda:128` for an index of 65408 and `cuda:255` for plain
# `cuda`
_INDICES = frozenset(map(str, range(128)))
_FORMS = (
    "valid are cpu, mps, TYPE and TYPE:N (N from 0 to 127); TYPE is one of "
    f"{', '.join(INDEXED + RENAMED)}"
)


def check_tag(tag: str) -> str:
    """The canonical form of `tag`, which this host need not have: ``cpu``, ``mps``, ``TYPE`` or
    ``TYPE:N``.

    >>> check_tag("cuda:1"), check_tag("npu"), check_tag("cpu:0")
    ('cuda:1', 'npu', 'cpu')

    TYPE is a device type of torch, or a name that a backend outside torch registers (one known
    here, or one loaded in this process). Raises `DeviceUnavailable` for anything else, also for
    ``meta``.
    """
    found = canonical_tag(tag)
    if found:
        return found
    meant = canonical_tag(tag.strip().lower())
    why = ": a meta tensor has no values" if tag.partition(":")[0] == "meta" else ""
    hint = f"write {meant}; {_FORMS}" if meant else _FORMS
    raise DeviceUnavailable(f"{tag!r} is not a device tag{why}", hint=hint)


def canonical_tag(tag: str) -> str | None:
    """The canonical form of a tag; None for what is not one."""
    kind, colon, index = tag.partition(":")
    if colon and index not in _INDICES:
        return None
    if kind in _SINGLE and index in ("", "0"):
        return kind
    torch_c = getattr(sys.modules.get("torch"), "_C", None)
    loaded = getattr(torch_c, "_get_privateuse1_backend_name", lambda: "privateuseone")()
    return tag if kind in (*INDEXED, *RENAMED, loaded) else None
