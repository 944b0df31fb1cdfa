"""What torch 2.13 and the safetensors library say of a checkpoint that they do not load, quoted to
be recognised.

Each was provoked; the tests provoke them again. Sources: torch/serialization.py,
torch/_weights_only_unpickler.py, torch/nn/modules/module.py, caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptconv.devices.host import Host
from ckptconv.support.errors import printable

REFUSED = "Weights only load failed"
MODULE_NAMES = ("cuda", "xpu", "hpu", "mtia", "privateuseone")
_UNKNOWN_TAG = (
    "don't know how to restore data location of torch.storage.UntypedStorage (tagged with {tag})"
)


def quoted(*words: str, by: str = "torch.load(weights_only=True)") -> str:
    """Words of an error and who says them."""
    return f"{by} says: {' … '.join(words)}"


def on_tag(tag: str, host: Host) -> str:
    """The error about a storage with a tag that `host` does not serve."""
    kind, _, index = tag.partition(":")
    name, count = kind.upper(), {"cuda": host.cuda, "xpu": host.xpu}.get(kind, 0)
    if kind == "mps":
        return "torch.UntypedStorage(): Storage device not recognized: mps"
    if kind not in MODULE_NAMES:
        return _UNKNOWN_TAG.format(tag=printable(tag))
    if count:
        return (
            f"Attempting to deserialize object on {name} device {index} but "
            f"torch.{kind}.device_count() is {count}"
        )
    if kind in ("cuda", "xpu", "mtia"):
        return (
            f"Attempting to deserialize object on a {name} device but "
            f"torch.{kind}.is_available() is False"
        )
    return f"The {name} device module is not registered"


def on_global(name: str) -> str:
    """The error about a class or function that a pickle names and that is not allowed."""
    return f"Unsupported global: GLOBAL {printable(name)} was not an allowed global by default"


STRAY = "file in archive is not in a subdirectory"
FOLDER = "[Errno 21] Is a directory"
OPCODE = "Unsupported operand"
UNTYPED = "type object 'torch.storage.UntypedStorage' has no attribute 'dtype'"
MMAP = (
    "mmap can only be used with files saved with `torch.save(_use_new_zipfile_serialization=True)"
)
HEADER = "Error while deserializing header: header too large"
CUT_OFF = "PytorchStreamReader failed reading zip archive: failed finding central directory"
UNEXPECTED = "Unexpected key(s) in state_dict"
NO_KEYS = "Missing key(s) in state_dict"
SHARED = "Some tensors share memory, this will lead to duplicate memory on disk"


def on_missing(key: str, unexpected: Sequence[str] = ()) -> str:
    """The error about keys that a state dict lacks, and about the first that only it has."""
    return " … ".join(
        [f'{NO_KEYS}: "{printable(key)}"', *(on_unexpected(other) for other in unexpected)]
    )


def on_unexpected(key: str) -> str:
    """The error about keys that only the state dict has."""
    return f'{UNEXPECTED} … "{printable(key)}"'


def on_shape(key: str, have: Sequence[int], wanted: Sequence[int]) -> str:
    """The error about a tensor that has another shape in the model."""
    return (
        f"size mismatch for {printable(key)}: copying a param with shape torch.Size({list(have)}) "
        "from checkpoint, "
        f"the shape in current model is torch.Size({list(wanted)})"
    )


# first bytes at which the weights-only unpickler gives up at once
_NO_OPCODES = b"v<7G\x89\x08\x93B\xfd\x28\x1f"


def on_start(head: bytes) -> str | None:
    """The error about a file that starts so and is not a checkpoint; None: the wording varies."""
    if head.startswith(b"PK"):
        return None
    return REFUSED if head[:1] and head[:1] in _NO_OPCODES else None
