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
from ckptconv.objects.torch_read import plain_sizes
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
    pairs = state.pairs if type(state) is Dict else ()
    return {name: value for name, value in pairs if type(name) is str}


def _eight_bits(weight: Mapping[str, Node], state: Mapping[str, Node]) -> Saved | None:
    scales = weight.get("SCB") if weight.get("SCB") is not None else state.get("SCB")
    is_plain = state.get("has_fp16_weights")
    if type(is_plain) is not bool or type(scales) not in (TensorRef, type(None)):
        return None
    if is_plain or scales is None:
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
        offset, code = found.get("offset"), inner.get("code")
        tensors.append(("nested_absmax", inner.get("absmax")))
        tensors.append(("nested_quant_map", _cloned(code)))
        plain |= {"nested_blocksize": inner.get("blocksize"), "nested_dtype": _dtype(inner)}
        plain["nested_offset"] = _number(offset)
        used = tuple(ref for ref in (offset, code) if type(ref) is TensorRef)
    is_packed_for_cpu = found.get("packing_format_for_cpu", False) is not False
    if kind not in ("fp4", "nf4") or is_packed_for_cpu:
        return None
    kinds = {type(value) for value in plain.values()}
    if {type(ref) for _, ref in tensors} != {TensorRef} or not kinds <= _JSON:
        return None
    packed = json.dumps(plain).encode()
    tensors.append((f"quant_state.bitsandbytes__{kind}", _bytes_tensor(packed, (len(packed),))))
    return Saved([(f"weight.{name}", ref) for name, ref in tensors], used)


_JSON = {str, int, float, list}
_SMALL = 1 << 12  # bytes of a storage that holds one number


def _dtype(found: Mapping[str, Node]) -> str | None:
    match found.get("dtype"):
        case Global(module="torch", name=name) if name in BY_NAME:
            return name
    return None


def _number(ref: Node) -> float | None:
    """The one value of a float32 tensor; its storage is checked, for no output will hold it."""
    if type(ref) is not TensorRef or ref.dtype.name != "float32" or ref.numel != 1:
        return None
    storages = [piece.storage for piece in ref.pieces]
    if any(storage.nbytes > _SMALL for storage in storages):
        return None
    for storage in storages:
        check_storage(storage)
    number: float = struct.unpack("<f", b"".join(map(bytes, iter_chunks(ref))))[0]
    return number


def _cloned(ref: Node) -> Node:
    """A tensor that shares no memory, as the layer saves the map that all layers have in common."""
    if type(ref) is not TensorRef:
        return ref
    pieces = tuple(piece._replace(storage=piece.storage._replace()) for piece in ref.pieces)
    return ref._replace(pieces=pieces)


def _bytes_tensor(values: bytes, shape: tuple[int, ...]) -> TensorRef:
    source = MemorySource(values, _NOWHERE)
    storage = Storage(source, 0, len(values), "cpu", "a quantization state", UINT8)
    return view_of(storage, UINT8, 0, shape, (1,) * len(shape))
