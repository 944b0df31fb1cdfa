"""Weights that are codes beside a scale: which tensors of a state dict are codes, and what scales
them.

Told by names and types alone, names compared word by word: a word that begins or ends with
"scale" names one (``weight_scale``, ``wscales``). The same prefix goes before both. What is known,
by the last segments of the keys:

| written by | codes | scale |
|---|---|---|
| DeepSeek, transformers' fine-grained fp8 | ``weight`` (fp8) | ``weight_scale_inv``, ``scale`` |
| compressed-tensors, FBGEMM, Quark, BitNet | ``weight`` (fp8, int8, uint8) | ``weight_scale`` |
| compressed-tensors int4, NVFP4 | ``weight_packed`` (int32, uint8) | ``weight_scale``, |
| | | ``weight_global_scale`` |
| ModelOpt NVFP4 | ``weight`` (uint8) | ``weight_scale`` (fp8), ``weight_scale_2`` |
| ModelOpt's fused experts | ``X`` (uint8, fp8) | ``X_weight_scale`` |
| gpt-oss MX | ``X_blocks`` (uint8) | ``X_scales`` (uint8) |
| ComfyUI | ``weight`` (fp8), told by the mark ``scaled_fp8`` | ``scale_weight`` |
| Mistral | ``weight`` (fp8) | ``qscale_weight`` |
| GPTQ, AWQ; MLX; AQLM | ``qweight``; ``weight`` (uint32); ``codes`` | ``scales`` |
| bitsandbytes | ``weight`` (uint8; int8) | ``weight.absmax``; ``SCB`` |
| HQQ; quanto | ``W_q``; ``weight._data`` | ``scale``; ``weight._scale`` |
| torchao | ``_weight_qdata`` | ``_weight_scale`` |
| TensorRT-LLM | ``weight`` (fp8, int8) | ``weights_scaling_factor`` |
| nunchaku | ``qweight`` (int8) | ``wscales``, ``wtscale`` |
| EETQ; Marlin | ``weight``; ``B`` | ``weight_scales``; ``s`` |
| ExLlama 2, 3; QuIP# | ``q_weight``, ``trellis``; ``Qidxs`` | ``q_scale``, ``suh``; ``SU`` |

Float8 tensors without any scale beside them are values: plain fp8 checkpoints are made by a cast.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from functools import lru_cache

from ckptconv.support.errors import RefusedObject, printable
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import count_text
from ckptconv.tensors.dtypes import E8M0, FLOAT4_PAIRS, FLOAT8, DType
from ckptconv.tensors.refs import TensorRef, view_identity


class ScaledWeight(NamedTuple):
    """The key of codes, that of what scales them, and those of all that they are read with: this
    scale, others, zero points, the order of groups, a table of values.
    """

    codes: str
    scale: str
    needed: tuple[str, ...]


# Words in the name of a scale that are not part of the name of what it scales
_AROUND = frozenset(("inv", "2", "global", "per", "tensor"))
# Words of what stands beside a scale and is read with the same codes: ``weight_zero_point``
_BESIDE = frozenset(
    (
        *("zero", "zeros", "qzeros", "wzeros", "point", "g", "idx", "shape", "biases"),
        *("codebooks", "format", "nested", "pre", "quant", "map", "comfy"),
    )
)
_PACKED_ENDINGS = ("_packed", "_blocks", "_qdata", "_data")
# Integers under these names are codes where the module has a scale, whatever else it has
_CODE_NAMES = frozenset(("weight", "qweight", "W_q", "codes"))
_PAIRS = {"weight": "SCB", "B": "s", "q_weight": "q_scale", "trellis": "suh", "Qidxs": "SU"}
MARK = "scaled_fp8"
_QUANT_STATE = ".quant_state."


def _is_scale(word: str) -> bool:
    """Whether a word names a scale: it begins or ends with one, as ``qscale``, ``wscales`` do."""
    one = word.lower().removesuffix("s")
    return one.startswith("scale") or one.endswith("scale") or one in ("amax", "absmax")


def _names_scale(name: str) -> bool:
    return any(map(_is_scale, _words(name)))


def _words(name: str) -> list[str]:
    """The words of a name; TensorRT-LLM calls a scale a scaling factor."""
    return name.replace("scaling_factor", "scale").split("_")


def find_scaled(tensors: Mapping[str, TensorRef]) -> list[ScaledWeight]:
    """The weights of a state dict that are codes, each with its scale, in the order of the keys."""
    if not may_hold_codes(tensors.values()):
        return []
    scales = _Scales(tensors)
    found = []
    for key, ref in tensors.items():
        # a scale is one by the codes beside it, never by its name alone: `norm.scale` and
        # `hc_attn_scale` (DeepSeek V4) are weights
        if _may_be_codes(key, ref.dtype) or scales.has_state(key):
            needed = tuple(dict.fromkeys(scales.of(key, ref.dtype)))
            scale = scales.first(needed, ref.dtype)
            if scale is not None:
                found.append(ScaledWeight(key, scale, needed))
    return found


def codes_note(state_dicts: Iterable[Mapping[str, TensorRef]]) -> str | None:
    """What is to be said to who looks at the values of codes as if they were those of weights."""
    count = sum(len(find_scaled(tensors)) for tensors in state_dicts)
    if not count:
        return None
    verb = "is codes" if count == 1 else "are codes"
    return f"{count_text(count, 'weight')} {verb} beside scales; {LOOK_THROUGH}"


LOOK_THROUGH = "--dequantize looks at their values"


def may_hold_codes(refs: Iterable[TensorRef]) -> bool:
    """Whether some of the tensors are of a type that codes have."""
    return any(map(_is_of_codes, {ref.dtype for ref in refs}))


def _may_be_codes(key: str, dtype: DType) -> bool:
    name = key.rpartition(".")[2]
    return _is_of_codes(dtype) and name != MARK and not _names_scale(name)


def _is_of_codes(dtype: DType) -> bool:
    return dtype in FLOAT8 or dtype.kind in ("int", "bits")


class _Scales:
    """The scales of a state dict, and what stands beside them, by the prefix of their keys and the
    name of what they scale (empty: all that is there).
    """

    def __init__(self, tensors: Mapping[str, TensorRef]) -> None:
        self._tensors = tensors
        self._named: dict[str, dict[str, list[str]]] = {}
        self._marks: list[str] = []
        for key in tensors:
            prefix, _, name = key.rpartition(".")
            if name == MARK:
                self._marks.append(key)
            elif _QUANT_STATE in key:
                self._add(key.partition(_QUANT_STATE)[0], "", key)
            elif (scaled := _scaled_by(name)) is not None:
                self._add(prefix, scaled, key)

    def _add(self, prefix: str, scaled: str, key: str) -> None:
        self._named.setdefault(prefix, {}).setdefault(scaled, []).append(key)

    def has_state(self, key: str) -> bool:
        """Whether bitsandbytes says how a tensor is read, whose codes may be stored as any type."""
        return any(_QUANT_STATE in each for each in self._named.get(key, {}).get("", ()))

    def first(self, keys: tuple[str, ...], dtype: DType) -> str | None:
        """The first of these that scales codes of this type. A scale of float8 beside float8 is
        none: both are values, of a checkpoint that was cast as a whole.
        """
        for key in keys:
            name = key.rpartition(".")[2]
            is_scale = _names_scale(name) or name in _PAIRS.values() or name == MARK
            if is_scale and not (
                dtype in FLOAT8 and name != MARK and self._tensors[key].dtype in FLOAT8
            ):
                return key
        return None

    def of(self, key: str, dtype: DType) -> Iterator[str]:
        """The keys of what the tensor `key` is read with, if it is codes."""
        prefix, dot, name = key.rpartition(".")
        there, below = self._named.get(prefix, {}), self._named.get(key, {})
        for scaled in _names_of_codes(name):
            yield from there.get(scaled, ())
        if dtype.kind in ("bits", "float") or name in _CODE_NAMES:
            yield from there.get("", ())
        yield from below.get("", ())  # weight.scale; bitsandbytes: as if the weight were a module
        if dtype in FLOAT8:
            yield from (mark for mark in self._marks if key.startswith(mark.removesuffix(MARK)))
        elif name in _PAIRS:
            pair = f"{prefix}{dot}{_PAIRS[name]}"
            if pair in self._tensors:
                yield pair


@lru_cache(maxsize=4096)  # a model of 100,000 tensors has few last names
def _scaled_by(name: str) -> str | None:
    """What a tensor of this name is read with; None: it names no scale, nor what is beside one."""
    words = _words(name)
    rest = [
        word
        for word in words
        if word not in _AROUND and word not in _BESIDE and not _is_scale(word)
    ]
    return None if len(rest) == len(words) else "_".join(rest)


def _names_of_codes(name: str) -> Iterator[str]:
    """The names under which the scale of a tensor may speak of it."""
    yield name
    if name == "weight":
        yield from ("w", "weights", "dequant", "descale")
    else:
        yield f"{name}_weight"
    for ending in _PACKED_ENDINGS:
        if name.endswith(ending):
            yield name.removesuffix(ending)


def key_of_values(codes: str) -> str:
    """The key that the values of codes have in the model.

    >>> key_of_values("l.0.weight_packed"), key_of_values("l.0.qweight")
    ('l.0.weight', 'l.0.weight')
    """
    prefix, dot, name = codes.rpartition(".")
    for ending in _PACKED_ENDINGS:
        if name.endswith(ending):
            name = name.removesuffix(ending).removeprefix("_")
            return f"{prefix}{dot}{name}".removesuffix(".")
    if name in _CODE_NAMES or name in _PAIRS:
        name = "weight"
    return f"{prefix}{dot}{name}"


class Naming(NamedTuple):
    """How what stands beside codes is named by them: their name without `ending`, and `name`."""

    ending: str
    name: str


def naming(codes: str, key: str) -> Naming | None:
    """How the key of what codes are read with comes of their own; None where it does not.

    >>> naming("l.0.weight", "l.0.weight_scale_inv"), naming("l.0.weight", "l.0.scale")
    (Naming(ending='', name='_scale_inv'), Naming(ending='.weight', name='.scale'))
    """
    name = codes.rpartition(".")[2]
    for ending in ("", *_PACKED_ENDINGS, f".{name}"):
        start = f".{codes}".removesuffix(ending)
        if f".{codes}" == start + ending and f".{key}".startswith(start):
            return Naming(ending, f".{key}".removeprefix(start))
    return None


def named_beside(codes: str, named: Naming) -> str | None:
    """The key of what stands beside codes of another key; None where these have another ending.

    >>> named_beside("experts.up", Naming("", "_scale_inv"))
    'experts.up_scale_inv'
    """
    ending, name = named
    if not f".{codes}".endswith(ending):
        return None
    return (f".{codes}".removesuffix(ending) + name).removeprefix(".")


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


def refuse_apart(before: Mapping[str, TensorRef], after: Mapping[str, TensorRef]) -> None:
    """Raise `RefusedObject` where codes of `before` are in `after` without all that they are read
    with, or under names by which nobody finds it: whoever reads them then takes them for values.
    """
    found = find_scaled(before)
    if not found:
        return
    written: dict[Hashable, list[str]] = {}
    for key, ref in after.items():
        written.setdefault(view_identity(ref), []).append(key)
    still = {item.codes: item.needed for item in find_scaled(after)}
    for item in found:
        for new in written.get(view_identity(before[item.codes]), ()):
            there = {view_identity(after[key]) for key in still.get(new, ())}
            for key in (item.scale, *item.needed):
                view = view_identity(before[key])
                if view not in there:
                    raise _apart(item, before[item.codes].dtype, key, new, written.get(view, []))


def _apart(
    item: ScaledWeight, dtype: DType, needed: str, new: str, names: list[str]
) -> RefusedObject:
    """What is told of codes, now `new`, apart from what they need, which has these names."""
    is_scale = needed == item.scale or _names_scale(needed.rpartition(".")[2])
    told = "scale" if is_scale else "part"
    if not names:
        return RefusedObject(
            f"holds {dtype.name} codes, and would be written without their {told} {needed}",
            where=item.codes,
            hint=f"keep the {told}, or leave out both",
        )
    return RefusedObject(
        f"holds {dtype.name} codes, and by the new names {printable(new)} and "
        f"{printable(names[0])} nobody finds their {told} {needed}",
        where=item.codes,
        hint="give both the same prefix, and keep the last part of their names",
    )


def refuse_mean(tensors: Mapping[str, TensorRef]) -> None:
    """Raise `RefusedObject` for tensors of which some are codes: no mean of them can be made."""
    for codes, scale, _ in find_scaled(tensors):
        raise RefusedObject(
            f"holds {tensors[codes].dtype.name} codes that need their scale {scale}, and a mean "
            "of them is not that of the values",
            where=codes,
            hint="convert each with --dequantize first, and average what that gives",
        )


def refuse_cast(tensors: Mapping[str, TensorRef], kept: Set[str], dtype: DType, path: str) -> None:
    """Raise `RefusedObject` where codes or their scales are among the keys that are `kept`, to be
    cast to `dtype`.

    `path` is that of the state dict. Neither is cast: codes are not values, and a scale loses what
    its block needs.
    """
    base = f"{path}." if path else ""
    scaled = find_scaled(tensors)
    found = [it for it in scaled if it.codes in kept or not kept.isdisjoint(it.needed)]
    hint = "add --dequantize, leave --dtype out, or leave out codes and scales with --exclude"
    if found:
        codes, scale, _ = found[0]
        what = f"holds {tensors[codes].dtype.name} codes that need their scale {base}{scale}"
        if len(found) > 1:
            what += f" (and {len(found) - 1} more like it)"
        what += f"; cast to {dtype.name} they would have other values"
        raise RefusedObject(what, where=f"{base}{codes}", hint=hint)
    for key in quantization_scales(tensors):
        if key in kept and tensors[key].dtype is not dtype:
            what = f"is the scale of quantized values; it is not cast to {dtype.name}"
            raise RefusedObject(what, where=f"{base}{key}", hint="leave --dtype out")
    for key, ref in tensors.items():
        kind = "scales"
        if ref.dtype is FLOAT4_PAIRS or ref.dtype.is_packed:
            kind = "codes"
        if key in kept and (ref.dtype is E8M0 or kind == "codes"):
            what = f"{ref.dtype.name} is a type for {kind}, not for values, so it is not cast to"
            raise RefusedObject(f"{what} {dtype.name}", where=f"{base}{key}", hint=hint)
