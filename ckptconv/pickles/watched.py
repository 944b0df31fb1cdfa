"""The functions in checkpoints whose arguments matter for what a pickle does."""

from __future__ import annotations

from typing import Any

from ckptconv.pickles.traces import Named


def rebuilds(func: Any) -> bool:
    """Whether a global rebuilds a tensor itself, as those of torch._utils do.

    They are not given anything else to call.
    """
    if type(func) is not Named or f"{func.module}.{func.name}" in CHANGERS:
        return False
    return func.name.rpartition(".")[2].startswith("_rebuild")


NESTED_LOADERS = frozenset(("torch.storage._load_from_bytes",))
"""Functions of checkpoints that load a stream within the stream."""
ATTRIBUTES = frozenset(Named(module, "getattr") for module in ("builtins", "__builtin__"))
"""What protocols up to 3 name methods by: a call with a global and a text is another name."""
CHANGERS = frozenset(
    f"{module}.{name}"
    for module in ("torch._tensor", "torch.tensor")
    for name in ("_rebuild_from_type", "_rebuild_from_type_v2")
)
"""Functions of checkpoints that call their first argument and set attributes of what it gives."""
CALLERS = CHANGERS | frozenset(
    f"{module}.{name}"
    for module in ("copyreg", "copy_reg")
    for name in ("_reconstructor", "__newobj__", "__newobj_ex__")
)
"""Functions of checkpoints whose first argument is called, or is the class of what they make."""
BYTES_CLASSES = frozenset(
    f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("bytes", "bytearray")
)
ENCODE = "_codecs.encode"
WATCHED = CALLERS | BYTES_CLASSES | NESTED_LOADERS | {ENCODE}
"""Functions of which it matters what they are given."""
