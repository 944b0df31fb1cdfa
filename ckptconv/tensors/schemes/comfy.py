"""ComfyUI: fp8 with the mark ``scaled_fp8``, and the layers that ``_quantization_metadata`` or
``comfy_quant`` tensors name.

Fact: the layouts of comfy-kitchen 0.2.40. NVFP4 and MXFP8 are padded (to 16 and to 32), and the
shape before is not in the file: the values have the padded one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ckptconv.support.records import NamedTuple
from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.dtypes import FLOAT8, UINT8
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tensors.scaled_weights import MARK
from ckptconv.tensors.schemes.base import (
    CodeGroup,
    Facts,
    Scheme,
    Weight,
    as_scale,
    decoded,
    json_object,
    one_number,
    read_small,
)
from ckptconv.tensors.schemes.modelopt import is_nvfp4
from ckptconv.tensors.schemes.scaled import scaled
from ckptconv.tensors.views import cut, unswizzled, whole_tiles

_METADATA, _INLINE = "_quantization_metadata", "comfy_quant"
_BASE = "model.diffusion_model."  # third parties leave it out in the metadata
PLAIN = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "int8_tensorwise": "int8"}
"""The formats of a plain scale, and the type of their codes."""


class _Tiled(NamedTuple):
    bits: int
    size: int
    order: tuple[int, ...]


# The formats of scales in tiles: the bits of a code, the codes of a scale, which nibble is first
_TILED = {"nvfp4": _Tiled(4, 16, (1, 0)), "mxfp8": _Tiled(8, 32, ())}


def _layer(group: CodeGroup, facts: Facts) -> Mapping[str, Any] | None:
    inline = group.parts.get(_INLINE)
    if inline is not None:
        return _object(group, read_small(inline, group.prefix + _INLINE))
    text = facts.metadata.get(_METADATA)
    if text is None:
        return None
    layers = _object(group, text).get("layers")
    if not isinstance(layers, dict):
        return None
    found = layers.get(group.module, layers.get(group.module.removeprefix(_BASE)))
    return found if isinstance(found, dict) else None


def _object(group: CodeGroup, raw: bytes | str) -> Mapping[str, Any]:
    found = _parsed(raw)
    if found is None:
        group.fail("is described by ComfyUI's metadata, which are not a JSON object")
    return found


_parsed = lru_cache(maxsize=1)(json_object)  # one text of the whole file is asked layer by layer


def _is_comfy(group: CodeGroup, facts: Facts) -> bool:
    return _layer(group, facts) is not None


def _comfy(group: CodeGroup, facts: Facts) -> Weight:
    layer = _layer(group, facts)
    assert layer is not None
    kind = layer.get("format")
    if "pre_quant_scale" in group.parts:
        group.refuse("has a pre_quant_scale, which belongs to the inputs of its layer")
    if layer.get("convrot") or kind not in [*PLAIN, *_TILED]:
        group.refuse(f"is quantised as {kind!r:.60} of ComfyUI, which is not known here")
    group = group.without(_INLINE)
    if kind in PLAIN:
        if group.codes.dtype.name != PLAIN[kind]:
            group.fail(f"is {group.codes.dtype.name}, and ComfyUI's metadata say {kind}")
        return scaled(group, facts, f"ComfyUI {kind}")
    return _tiled(group, facts, kind)


def _tiled(group: CodeGroup, facts: Facts, kind: str) -> Weight:
    """Scales in tiles of 128 x 4, of nibbles (the high one first) or of fp8."""
    codes, scale = group.codes, group.need("weight_scale")
    bits, size, order = _TILED[kind]
    types, numbers = FLOAT8, codes.dtype.name
    if bits == 4:
        types, numbers = (UINT8,), "e2m1"
    if codes.dtype not in types or len(codes.shape) != 2:
        group.fail(f"is {list(codes.shape)} of {codes.dtype.name}, which is not {kind}")
    shape = (codes.shape[0], codes.shape[1] * 8 // bits)
    inputs = {"codes": codes, "scale": _tiles(group, scale, shape, size)}
    if bits == 4:
        inputs["second"] = one_number(group, "weight_scale_2")
    how = Decoding(
        tuple(inputs), numbers, (1, size), bits=bits, order=order, scale_as=as_scale(scale)
    )
    values = decoded(group, facts, how, inputs, shape)
    return Weight("weight", values, f"ComfyUI {kind}, groups of {size}")


def _tiles(group: CodeGroup, scale: TensorRef, shape: Shape, size: int) -> TensorRef:
    rows, columns = shape[0], -(-shape[1] // size)
    wanted = whole_tiles(rows, columns)
    if scale.shape != wanted:
        group.fail(f"has scales of {list(scale.shape)}, which have to be {list(wanted)}")
    return cut(unswizzled(scale, f"{group.prefix}weight_scale"), (rows, columns))


def _is_tiled_nvfp4(group: CodeGroup, _: Facts) -> bool:
    """NVFP4 of which nothing tells, its scales as many as in whole tiles; ModelOpt's may be too."""
    if not is_nvfp4(group) or len(group.codes.shape) != 2:
        return False
    rows, octets = group.codes.shape
    return group.parts["weight_scale"].shape == whole_tiles(rows, -(-2 * octets // 16))


def _tiled_nvfp4(group: CodeGroup, facts: Facts) -> Weight:
    return _tiled(group, facts, "nvfp4")


def _is_marked(group: CodeGroup, _: Facts) -> bool:
    """fp8 of a checkpoint that has the mark; a layer without a scale has one of 1."""
    return group.codes.dtype in FLOAT8 and any(name.endswith(MARK) for name in group.parts)


def _marked(group: CodeGroup, facts: Facts) -> Weight:
    group = group.without(MARK)
    if len(group.parts) == 1:
        group.refuse(
            "is fp8 in a checkpoint of scaled fp8, and has no scale",
            hint="convert without --dequantize",
        )
    return scaled(group, facts, "ComfyUI scaled fp8")


SCHEMES = (
    Scheme("comfy", (), _is_comfy, _comfy, is_certain=True),
    Scheme("comfy-nvfp4", (), _is_tiled_nvfp4, _tiled_nvfp4),
    Scheme("comfy-scaled", (), _is_marked, _marked, is_certain=True),
)
