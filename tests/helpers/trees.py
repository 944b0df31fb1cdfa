"""Trees as training might leave them, drawn by hypothesis: tensors of every dtype and stride,
shared or not, in any nesting.
"""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from helpers import oracle

with warnings.catch_warnings():  # torch tells once that complex32 is experimental
    warnings.simplefilter("ignore")
    torch.empty(0, dtype=torch.complex32)


class Drawn:
    """A drawn tree, shown as the rows of the oracle (torch cannot print every dtype)."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __repr__(self) -> str:
        lines = [
            f"{'.'.join(row.path)}: {row.kind} {row.value}" for row in oracle.flatten(self.tree)
        ]
        return "\n".join(["", *lines])


def _savable(dtype: torch.dtype) -> bool:
    try:
        torch.save(
            make(dtype, torch.zeros(dtype.itemsize, dtype=torch.uint8), 0, (1,), (1,)), io.BytesIO()
        )
    except Exception:
        return False
    return True


def make(
    dtype: torch.dtype, values: torch.Tensor, offset: int, shape: Any, stride: Any
) -> torch.Tensor:
    """The strided view of the storage of `values`."""
    return torch.empty(0, dtype=dtype).set_(values.untyped_storage(), offset, shape, stride)


_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_ALL = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - _QUANTIZED
DTYPES = sorted((dtype for dtype in _ALL if _savable(dtype)), key=str)
"""Every dtype that this torch can save as a strided tensor."""
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]


def random_bytes(seed: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of any pattern, NaNs included; only 0 and 1 for bool."""
    high = 2 if dtype is torch.bool else 256
    return torch.randint(
        0, high, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@st.composite
def views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """(offset, shape, stride) of anything from a scalar to an overlapping, expanded, transposed
    slice with steps.
    """
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    contiguous = list(torch.empty(shape, device="meta").stride())
    form = draw(
        st.sampled_from(["contiguous", "contiguous", "transposed", "steps", "expanded", "any"])
    )
    stride = {
        "contiguous": lambda: contiguous,
        "transposed": lambda: list(reversed(torch.empty(shape[::-1], device="meta").stride())),
        "steps": lambda: [2 * step for step in contiguous],
        "expanded": lambda: [step * draw(st.integers(0, 1)) for step in contiguous],
        "any": lambda: [draw(st.integers(0, 5)) for _ in shape],
    }[form]()
    return draw(st.integers(0, 5)), tuple(shape), tuple(stride)


@st.composite
def families(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> list[torch.Tensor]:
    """One to three tensors over one storage, which is larger than they need or not; some with grad,
    conj, neg.
    """
    dtype = draw(st.sampled_from(dtypes))
    boxes = draw(st.lists(views(), min_size=1, max_size=3))
    needed = max(
        offset + sum(max(n - 1, 0) * step for n, step in zip(shape, stride, strict=True)) + 1
        for offset, shape, stride in boxes
    )
    numel = needed + draw(st.sampled_from([0, 0, 1, 30]))
    values = random_bytes(draw(st.integers(0, 99)), numel * dtype.itemsize, dtype)
    return [_dressed(draw, make(dtype, values, *box)) for box in boxes]


def _dressed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    dress = draw(st.sampled_from(["", "", "grad", "parameter", "frozen", "conj", "neg"]))
    if tensor.dtype in COMPLEX and dress == "conj":
        return tensor.conj()
    if tensor.dtype in (*COMPLEX, *FLOATS):
        if dress == "neg":
            return torch._neg_view(_quieted(tensor))
        if dress == "grad" and tensor.dtype is not torch.complex32:  # torch itself cannot load that
            return tensor.requires_grad_()
        if dress in ("parameter", "frozen"):
            return nn.Parameter(tensor, dress == "parameter")
    return tensor


def _quieted(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage, signalling NaNs of 16 bits made quiet: torch negates them with and without
    that, at the end of a run and inside it.
    """
    quiet = {torch.float16: 0x0200, torch.bfloat16: 0x0040}.get(tensor.dtype)
    if quiet is not None:
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        whole.view(torch.int16)[whole.isnan()] |= quiet
    return tensor


_TEXT = st.text(max_size=6) | st.sampled_from(
    ["", "a.b", "module.w", "café ✓", "\0\n", "<key>", "0", "_metadata"]
)
_NUMBERS = st.integers(-3, 3) | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False)
KEYS = _TEXT | _NUMBERS | st.binary(min_size=1, max_size=3) | st.booleans() | st.none()
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.sampled_from(
        [2**31, -(2**31), 2**63, -(2**63) - 1, 255, 256, 65535, 65536, 1 << 2030, -(1 << 2030)]
    ),
    st.floats(),
    st.text(max_size=8),
    st.binary(min_size=1, max_size=8),
    st.binary(max_size=4).map(bytearray),
    st.complex_numbers(allow_nan=False),
    st.sets(st.integers(0, 9), max_size=3),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.uint16, torch.device("cpu"), torch.device("cuda:1")]
    ),
)
"""Everything else that `weights_only=True` accepts (not so empty bytes)."""


@st.composite
def trees(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> Drawn:
    """A tree of containers with tensors and plain values at its leaves; parts of it may stand in it
    twice.
    """
    pool = [
        tensor
        for family in draw(st.lists(families(dtypes), min_size=1, max_size=3))
        for tensor in family
    ]
    leaves = st.sampled_from(range(len(pool))).map(lambda index: pool[index]) | PLAIN
    parts = st.recursive(leaves, _containers, max_leaves=8)
    root = draw(_containers(parts))
    if draw(st.booleans()):
        root = {"first": root, "again": root, "rest": pool}
    elif not oracle.tensors(root):
        root = [root, pool[0]]  # a file without tensors is not a checkpoint
    return Drawn(root)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(KEYS, children, max_size=4),
        st.dictionaries(_TEXT, children, max_size=4).map(OrderedDict),
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
    )


# -------------------------------------------------------------------------------------- state dicts

_SEGMENTS = st.sampled_from(
    ["module", "fc", "0", "11", "_orig_mod", "attn", "größe", "_fsdp_wrapped_module", "modules"]
)
_NAMES = st.sampled_from(["weight", "bias", "running_mean", "A", "module", "w0"])
_WRAPPERS = st.sampled_from(
    ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."]
)


@st.composite
def wrapped_keys(draw: st.DrawFn, count: int) -> list[str]:
    """Keys, `count` of them, that differ without their wrappers too; all wrapped, or some."""
    keys = [
        ".".join([*draw(st.lists(_SEGMENTS, max_size=3)), f"{draw(_NAMES)}{number}"])
        for number in range(count)
    ]
    for wrapper in draw(st.lists(_WRAPPERS, max_size=3)):
        everywhere = draw(st.sampled_from([True, True, True, False]))
        keys = [wrapper + key if everywhere or draw(st.booleans()) else key for key in keys]
    return keys


@st.composite
def state_dicts(
    draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES, *, plain: bool = False
) -> Drawn:
    """A state dict with wrapped keys, shared tensors and sometimes the `_metadata` of a module."""
    pool = [
        tensor
        for family in draw(st.lists(families(dtypes), min_size=1, max_size=3))
        for tensor in family
    ]
    count = draw(st.integers(1, 6))
    keys = draw(wrapped_keys(count))
    values = [pool[draw(st.integers(0, len(pool) - 1))] for _ in keys]
    if plain:
        values = [
            draw(PLAIN) if number and draw(st.integers(0, 5)) == 0 else value
            for number, value in enumerate(values)
        ]
    made = OrderedDict(zip(keys, values, strict=True))
    if draw(st.booleans()):
        paths = dict.fromkeys(
            ".".join(key.split(".")[:depth]) for key in keys for depth in range(key.count(".") + 1)
        )
        made._metadata = OrderedDict((path, {"version": draw(st.integers(1, 3))}) for path in paths)
    return Drawn(made)
