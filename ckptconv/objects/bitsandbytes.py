"""What bitsandbytes' quantized layers save beside their parameters, from their pickled state.

A layer keeps its scales in attributes of its weight, and writes them into the state dict itself: of
8 bits ``SCB`` and ``weight_format``; of 4 bits ``weight.absmax``, ``weight.quant_map``, their
nested twins, and the rest as JSON text in a uint8 tensor. Source: `_save_to_state_dict` in
bitsandbytes/nn/modules.py and `QuantState.as_dict` in bitsandbytes/functional.py, 0.41 to 0.50.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ckptconv.io.source import MemorySource
from ckptconv.objects.torch_write import plain_sizes
from ckptconv.pickles.nodes import Call, Dict, Global, Node
from ckptconv.tensors.checksums import check_storage
from ckptconv.tensors.dtypes import BY_NAME, UINT8
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, view_of
from ckptconv.tensors.stream import iter_chunks

_MODULES = "bitsandbytes.nn.modules."
_FOUR_BITS = tuple(f"{_MODULES}{name}" for name in ("Linear4bit", "LinearFP4", "LinearNF4"))
_EIGHT_BITS = f"{_MODULES}Linear8bitLt"
_NOWHERE = Path("the quantization state of a layer")


class Saved(NamedTuple):
    """What a layer saves beside its parameters; `used` are tensors that stand in it as numbers."""

    tensors: list[tuple[str, Node]]
    used: tuple[TensorRef, ...] = ()


def saved_beside(
    layer: str, state: Mapping[str, Node], parameters: Mapping[str, Node]
) -> Saved | None:
    """What the layer of this class saves beside its parameters.

    None where it is another class, or is not known exactly.
    """
    weight = parameters.get("weight")
    held = fields(weight.state) if type(weight) is TensorObject else {}
    if layer == _EIGHT_BITS:
        return _eight_bits(held, fields(state.get("state")))
    if layer in _FOUR_BITS:
        return _four_bits(held.get("quant_state"))
    return None


def fields(state: Node) -> dict[str, Node]:
    """The attributes in the state of an object, or of the call that makes one; none where there are
    no such.
    """
    if type(state) is Call:
        state = state.state
    if type(state) is tuple and state:
        state = state[0]
    return (
        {name: value for name, value in state.pairs if type(name) is str}
        if type(state) is Dict
        else {}
    )


def _eight_bits(weight: Mapping[str, Node], state: Mapping[str, Node]) -> Saved | None:
    scales = weight.get("SCB") if weight.get("SCB") is not None else state.get("SCB")
    if type(state.get("has_fp16_weights")) is not bool or not (
        scales is None or type(scales) is TensorRef
    ):
        return None
    if state["has_fp16_weights"] or scales is None:
        return Saved([])
    return Saved([("SCB", scales), ("weight_format", _bytes_tensor(b"\0", ()))])


def _four_bits(node: Node) -> Saved | None:
    if node is None:
        return Saved([])
    found = fields(node)
    shape = plain_sizes(found.get("shape"))
    kind, inner = found.get("quant_type"), fields(found.get("state2"))
    tensors = [("absmax", found.get("absmax")), ("quant_map", found.get("code"))]
    plain = {
        "quant_type": kind,
        "blocksize": found.get("blocksize"),
        "dtype": _dtype(found),
        "shape": None if shape is None else list(shape),
    }
    used: tuple[TensorRef, ...] = ()
    if found.get("nested") is True:
        tensors += [
            ("nested_absmax", inner.get("absmax")),
            ("nested_quant_map", _cloned(inner.get("code"))),
        ]
        plain |= {"nested_blocksize": inner.get("blocksize"), "nested_dtype": _dtype(inner)}
        plain["nested_offset"] = _number(found.get("offset"))
        used = tuple(
            ref for ref in (found.get("offset"), inner.get("code")) if type(ref) is TensorRef
        )
    is_known = all(type(ref) is TensorRef for _, ref in tensors) and all(
        type(value) in _JSON for value in plain.values()
    )
    if (
        kind not in ("fp4", "nf4")
        or not is_known
        or found.get("packing_format_for_cpu", False) is not False
    ):
        return None
    packed = json.dumps(plain).encode()
    tensors.append((f"quant_state.bitsandbytes__{kind}", _bytes_tensor(packed, (len(packed),))))
    return Saved([(f"weight.{name}", ref) for name, ref in tensors], used)


_JSON = (str, int, float, list)
_SMALL = 1 << 12  # bytes of a storage that holds one number


def _dtype(found: Mapping[str, Node]) -> str | None:
    dtype = found.get("dtype")
    return (
        dtype.name
        if type(dtype) is Global and dtype.module == "torch" and dtype.name in BY_NAME
        else None
    )


def _number(ref: Node) -> float | None:
    """The one value of a float32 tensor; its storage is checked, for no output will hold it."""
    if type(ref) is not TensorRef or ref.dtype.name != "float32" or ref.numel != 1:
        return None
    if any(piece.storage.nbytes > _SMALL for piece in ref.pieces):
        return None
    for piece in ref.pieces:
        check_storage(piece.storage)
    number: float = struct.unpack("<f", b"".join(map(bytes, iter_chunks(ref))))[0]
    return number


def _cloned(ref: Node) -> Node:
    """A tensor that shares no memory, as the layer saves the map that all layers have in common."""
    if type(ref) is not TensorRef:
        return ref
    return ref._replace(
        pieces=tuple(piece._replace(storage=piece.storage._replace()) for piece in ref.pieces)
    )


def _bytes_tensor(values: bytes, shape: tuple[int, ...]) -> TensorRef:
    storage = Storage(
        MemorySource(values, _NOWHERE), 0, len(values), "cpu", "a quantization state", UINT8
    )
    return view_of(storage, UINT8, 0, shape, (1,) * len(shape))
