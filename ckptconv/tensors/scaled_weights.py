"""Weights that are codes beside a scale: which tensors of a state dict are codes, and what scales
them.

Told by names and types alone, names compared word by word (``weight_scale`` is a scale of
``weight``, ``weight_scaler`` is not). The same prefix goes before both. What is known, by the last
segments of the keys:

| written by | codes | scale |
|---|---|---|
| DeepSeek, transformers' fine-grained fp8 | ``weight`` (fp8) | ``weight_scale_inv``, ``scale`` |
| compressed-tensors, FBGEMM, Quark, BitNet | ``weight`` (fp8, int8, uint8) | ``weight_scale`` |
| compressed-tensors int4, NVFP4 | ``weight_packed`` (int32, uint8) | ``weight_scale``, |
| | | ``weight_global_scale`` |
| ModelOpt NVFP4 | ``weight`` (uint8) | ``weight_scale`` (fp8), ``weight_scale_2`` |
| gpt-oss MX | ``X_blocks`` (uint8) | ``X_scales`` (uint8) |
| ComfyUI | ``weight`` (fp8), told by the mark ``scaled_fp8`` | ``scale_weight`` |
| Mistral | ``weight`` (fp8) | ``qscale_weight`` |
| GPTQ, AWQ; MLX; AQLM | ``qweight``; ``weight`` (uint32); ``codes`` | ``scales`` |
| bitsandbytes | ``weight`` (uint8; int8) | ``weight.absmax``; ``SCB`` |
| HQQ; quanto | ``W_q``; ``weight._data`` | ``scale``; ``weight._scale`` |
| torchao | ``_weight_qdata`` | ``_weight_scale`` |
| EETQ; Marlin | ``weight``; ``B`` | ``weight_scales``; ``s`` |
| ExLlama 2, 3; QuIP# | ``q_weight``, ``trellis``; ``Qidxs`` | ``q_scale``, ``suh``; ``SU`` |

Float8 tensors without any scale beside them are values: plain fp8 checkpoints are made by a cast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from ckptconv.support.errors import RefusedObject
from ckptconv.tensors.dtypes import BY_NAME, FLOAT4_PAIRS, DType
from ckptconv.tensors.refs import TensorRef


class ScaledWeight(NamedTuple):
    """The key of codes, and that of what scales them."""

    codes: str
    scale: str


_SCALES = frozenset(("scale", "scales", "qscale", "amax"))
_AROUND = _SCALES | {"inv", "2", "global"}
"""Words in the name of a scale that are not part of the name of what it scales."""
_PACKED_ENDINGS = ("_packed", "_blocks", "_qdata", "_data")
_CODE_NAMES = frozenset(("weight", "qweight", "W_q", "codes"))
"""Integers under these names are codes where the module has a scale, whatever else it has."""
_PAIRS = {"weight": "SCB", "B": "s", "q_weight": "q_scale", "trellis": "suh", "Qidxs": "SU"}
_MARK = "scaled_fp8"
_ONLY_SCALES = BY_NAME["float8_e8m0fnu"]


def find_scaled(tensors: Mapping[str, TensorRef]) -> list[ScaledWeight]:
    """The weights of a state dict that are codes, each with its scale, in the order of the keys."""
    scales = _Scales(tensors)
    found = []
    for key, ref in tensors.items():
        if _may_be_codes(key, ref.dtype) and (scale := scales.of(key, ref.dtype)) is not None:
            found.append(ScaledWeight(key, scale))
    return found


def _may_be_codes(key: str, dtype: DType) -> bool:
    name = key.rpartition(".")[2]
    return (
        (_is_float8(dtype) or dtype.kind in ("int", "bits"))
        and name != _MARK
        and _SCALES.isdisjoint(name.split("_"))
    )


def _is_float8(dtype: DType) -> bool:
    return dtype.name.startswith("float8") and dtype is not _ONLY_SCALES


class _Scales:
    """The scales of a state dict, by the prefix of their keys and the name of what they scale
    (empty: all that is there).
    """

    def __init__(self, tensors: Mapping[str, TensorRef]) -> None:
        self._tensors = tensors
        self._named: dict[str, dict[str, str]] = {}
        self._marks: list[str] = []
        for key in tensors:
            prefix, _, name = key.rpartition(".")
            if name == _MARK:
                self._marks.append(key)
            elif name == "absmax" or not _SCALES.isdisjoint(words := name.split("_")):
                scaled = (
                    ""
                    if name == "absmax"
                    else "_".join(word for word in words if word not in _AROUND)
                )
                self._named.setdefault(prefix, {}).setdefault(scaled, key)

    def of(self, key: str, dtype: DType) -> str | None:
        """The key of what scales the tensor `key`, if it is codes.

        A scale of float8 beside float8 is none: both are values, of a checkpoint that was cast as a
        whole.
        """
        if not _is_float8(dtype):
            return next(self._of_integers(key, dtype), None)
        # or below it: weight.scale
        named = chain(self._named_of(key, always=True), self._named.get(key, {}).values())
        found = (scale for scale in named if not _is_float8(self._tensors[scale].dtype))
        return next(
            chain(
                found, (mark for mark in self._marks if key.startswith(mark.removesuffix(_MARK)))
            ),
            None,
        )

    def _of_integers(self, key: str, dtype: DType) -> Iterator[str]:
        prefix, dot, name = key.rpartition(".")
        yield from self._named_of(key, always=dtype.kind == "bits" or name in _CODE_NAMES)
        # bitsandbytes: as if the weight were a module
        if below := self._named.get(key, {}).get(""):
            yield below
        if name in _PAIRS and (pair := f"{prefix}{dot}{_PAIRS[name]}") in self._tensors:
            yield pair

    def _named_of(self, key: str, *, always: bool) -> Iterator[str]:
        """The scales that speak of a tensor by its name; or, `always`, that stand beside it and
        speak of nothing else.
        """
        prefix, _, name = key.rpartition(".")
        there = self._named.get(prefix, {})
        yield from (there[scaled] for scaled in _names_of_codes(name) if scaled in there)
        if always and "" in there:
            yield there[""]


def _names_of_codes(name: str) -> Iterator[str]:
    """The names under which the scale of a tensor may speak of it."""
    yield name
    if name == "weight":
        yield from ("w", "dequant", "descale")
    for ending in _PACKED_ENDINGS:
        if name.endswith(ending):
            yield name.removesuffix(ending)


def quantization_scales(tensors: Mapping[str, TensorRef]) -> list[str]:
    """The keys of the scales that torch's quantized modules save beside a zero point, an int64.

    Those of quantization-aware training, whose zero points are int32, are parameters like others.
    Sources: torch/ao/nn/quantized/modules, torch/ao/quantization/fake_quantize.py.
    """
    scales = (key for key in tensors if key.rpartition(".")[2] == "scale")
    zero_points = {key: tensors.get(f"{key.removesuffix('scale')}zero_point") for key in scales}
    return [
        key for key, ref in zero_points.items() if ref is not None and ref.dtype.name == "int64"
    ]


def refuse_cast(
    tensors: Mapping[str, TensorRef], kept: Collection[str], dtype: DType, path: str
) -> None:
    """Raise `RefusedObject` where codes or their scales are among the keys that are `kept`, to be
    cast to `dtype`.

    `path` is that of the state dict. Neither is cast: codes are not values, and a scale loses what
    its block needs.
    """
    base = f"{path}." if path else ""
    found = [item for item in find_scaled(tensors) if item.codes in kept or item.scale in kept]
    hint = "leave --dtype out (dtype= in code), or leave them out with --exclude, the scale too"
    if found:
        codes, scale = found[0]
        more = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
        what = f"holds {tensors[codes].dtype.name} codes that need their scale {base}{scale}{more}"
        raise RefusedObject(
            f"{what}; cast to {dtype.name} they would have other values",
            where=f"{base}{codes}",
            hint=hint,
        )
    quantized = [
        key
        for key in quantization_scales(tensors)
        if key in kept and tensors[key].dtype is not dtype
    ]
    if quantized:
        what = f"is the scale of quantized values; it is not cast to {dtype.name}"
        raise RefusedObject(
            what, where=f"{base}{quantized[0]}", hint="leave --dtype out (dtype= in code)"
        )
    for key, ref in tensors.items():
        if key in kept and (
            ref.dtype is _ONLY_SCALES or ref.dtype is FLOAT4_PAIRS or ref.dtype.is_packed
        ):
            what = "is a type for scales" if ref.dtype is _ONLY_SCALES else "is a type for codes"
            what = f"{ref.dtype.name} {what}, not for values, so it is not cast to {dtype.name}"
            raise RefusedObject(what, where=f"{base}{key}", hint=hint)
