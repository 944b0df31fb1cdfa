"""torch's names, and which of them `weights_only` accepts."""

from __future__ import annotations

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


_REBUILD_FUNCTIONS = """
    parameter parameter_with_state qtensor tensor tensor_v2 tensor_v3 sparse_tensor
    meta_tensor_no_storage nested_tensor wrapper_subclass device_tensor_from_numpy
    device_tensor_from_cpu_tensor
"""


_KINDS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")


_TENSOR_CLASSES = [
    f"{module}.{kind}Tensor" for module in ("torch", "torch.cuda") for kind in _KINDS
]


_TENSOR_CLASSES += [
    f"{module}.{kind}Tensor"
    for module in ("torch.sparse", "torch.cuda.sparse")
    for kind in _KINDS[:-1]
]


WEIGHTS_ONLY = frozenset([
    "collections.OrderedDict", "collections.Counter", "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
    "torch.Size", "torch.Tensor", "torch.device", "_codecs.encode", "builtins.bytearray",
    "builtins.set",
    "builtins.complex", "torch._tensor._rebuild_from_type_v2", "torch.storage.UntypedStorage",
    "torch.storage.TypedStorage",
    *(f"torch.{dtype.name}" for dtype in DTYPES),
    *(f"{UTILS}._rebuild_{name}" for name in _REBUILD_FUNCTIONS.split()),
    *(f"torch.{name}" for name in BY_STORAGE_CLASS),
    *(f"torch.cuda.{name}" for name in BY_STORAGE_CLASS if not name.startswith("Q")),
    *(f"torch.per_{name}" for name in ("tensor_affine", "tensor_symmetric", "channel_affine",
        "channel_symmetric",
                                       "channel_affine_float_qparams")),
    *_TENSOR_CLASSES,
])  # fmt: skip
"""The globals that `torch.load(weights_only=True)` accepts without being told to."""
