"""One table of element types: how torch, a torch storage, safetensors and numpy call each of them.

Knows names and sizes only; nothing here touches bytes. Sources:
`torch.storage._dtype_to_storage_type_map` and `torch.storage._new_dtypes` of torch 2.13, the
`Dtype` enum of safetensors 0.8, and the type list of ml_dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ckptconv.support.errors import OptionRefused, printable
from ckptconv.support.records import dataclass

Kind = Literal["float", "int", "bool", "complex", "quantized", "bits"]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type.

    `name` is torch's (``float32``); `itemsize` is in bytes; `storage_class` is the typed storage
    that torch pickles it under (None: only ``UntypedStorage``); `safetensors` is the header code
    (None: safetensors has no such type); `numpy` names a numpy or ml_dtypes type (None: neither has
    one). `word` is the number of bytes that a change of byte order reverses (half of `itemsize` for
    complex numbers). `bits` are those of one element; where they are not whole bytes, the elements
    of a tensor are packed end to end, and only whole tensors have a size in bytes.

    `elements` are those that one stands for: more than 1 in the quantised types of GGUF, where
    shapes count blocks along the last dimension.
    """

    name: str
    kind: Kind
    itemsize: int
    storage_class: str | None = None
    safetensors: str | None = None
    numpy: str | None = None
    word: int = 0
    bits: int = 0
    elements: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", self.bits or 8 * self.itemsize)
        word = self.itemsize // 2 if self.kind == "complex" else self.itemsize
        object.__setattr__(self, "word", 1 if self.is_block else word)

    def __repr__(self) -> str:
        return f"DType({self.name!r})"

    def __eq__(self, other: object) -> bool:
        """Whether it is the type of this name, or that which numpy, ml_dtypes or torch calls so.

        >>> BY_NAME["float32"] == "float32"
        True
        """
        if isinstance(other, DType):
            return self is other
        name = getattr(other, "__name__", None) or getattr(other, "name", None) or str(other)
        return name.removeprefix("torch.") in (self.name, self.numpy)

    # that of identity, for there is one of each: it is asked for once for each tensor
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        """Element types are told apart by identity, in a copy and behind a pickle too."""
        return _named, (self.name,)

    @property
    def is_floating(self) -> bool:
        """Whether `--dtype` may cast it: real and floating; no integer, bool or quantized."""
        return self.kind == "float"

    @property
    def is_packed(self) -> bool:
        """Whether an element is not whole bytes, as some of safetensors and all in blocks of GGUF
        are; torch does not have such types.
        """
        return self.bits < 8 or self.is_block

    @property
    def is_block(self) -> bool:
        """Whether it is a quantised type of GGUF: codes and scales of several elements."""
        return self.elements > 1

    @property
    def array_type(self) -> str:
        """What numpy calls its numbers, little-endian, of a type that numpy has itself: ``<f4``;
        bools are bytes.
        """
        letter = {"float": "f", "complex": "c", "bool": "u"}.get(self.kind, self.name[0])
        return f"<{letter}{self.itemsize}"

    @property
    def is_differentiable(self) -> bool:
        """Whether a tensor of it may require grad: torch raises where any other does."""
        return self.kind in ("float", "complex") or self.name.startswith("float")


DTYPES: tuple[DType, ...] = (
    DType("float64", "float", 8, "DoubleStorage", "F64", "float64"),
    DType("float32", "float", 4, "FloatStorage", "F32", "float32"),
    DType("float16", "float", 2, "HalfStorage", "F16", "float16"),
    DType("bfloat16", "float", 2, "BFloat16Storage", "BF16", "bfloat16"),
    DType("int64", "int", 8, "LongStorage", "I64", "int64"),
    DType("int32", "int", 4, "IntStorage", "I32", "int32"),
    DType("int16", "int", 2, "ShortStorage", "I16", "int16"),
    DType("int8", "int", 1, "CharStorage", "I8", "int8"),
    DType("uint8", "int", 1, "ByteStorage", "U8", "uint8"),
    DType("bool", "bool", 1, "BoolStorage", "BOOL", "bool"),
    DType("complex64", "complex", 8, "ComplexFloatStorage", "C64", "complex64"),
    DType("complex128", "complex", 16, "ComplexDoubleStorage", None, "complex128"),
    DType("complex32", "complex", 4),
    DType("uint16", "int", 2, None, "U16", "uint16"),
    DType("uint32", "int", 4, None, "U32", "uint32"),
    DType("uint64", "int", 8, None, "U64", "uint64"),
    DType("float8_e4m3fn", "float", 1, None, "F8_E4M3", "float8_e4m3fn"),
    DType("float8_e5m2", "float", 1, None, "F8_E5M2", "float8_e5m2"),
    DType("float8_e4m3fnuz", "float", 1, None, "F8_E4M3FNUZ", "float8_e4m3fnuz"),
    DType("float8_e5m2fnuz", "float", 1, None, "F8_E5M2FNUZ", "float8_e5m2fnuz"),
    DType("float8_e8m0fnu", "float", 1, None, "F8_E8M0", "float8_e8m0fnu"),
    DType("float4_e2m1fn_x2", "bits", 1, None, "F4"),
    DType("quint8", "quantized", 1, "QUInt8Storage"),
    DType("qint8", "quantized", 1, "QInt8Storage"),
    DType("qint32", "quantized", 4, "QInt32Storage"),
    DType("quint4x2", "quantized", 1, "QUInt4x2Storage"),
    DType("quint2x4", "quantized", 1, "QUInt2x4Storage"),
    DType("bits1x8", "bits", 1),
    DType("bits2x4", "bits", 1),
    DType("bits4x2", "bits", 1),
    DType("bits8", "bits", 1),
    DType("bits16", "bits", 2),
    *(DType(f"{sign}int{width}", "bits", 1) for sign in ("", "u") for width in range(1, 8)),
)

PACKED: tuple[DType, ...] = (
    DType("float6_e2m3fn", "bits", 1, None, "F6_E2M3", bits=6),
    DType("float6_e3m2fn", "bits", 1, None, "F6_E3M2", bits=6),
)
"""Types of safetensors of which torch knows nothing: kept as they are, never as numbers."""

FLOAT4 = DType("float4_e2m1fn", "bits", 1, None, "F4", bits=4)
"""F4 whose last dimension is odd: no pairs, as torch's ``float4_e2m1fn_x2`` wants them."""

BLOCKS: tuple[DType, ...] = tuple(
    DType(name, "bits", nbytes, elements=elements)
    for elements, sizes in (
        (32, {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18,
              "MXFP4": 17}),
        (64, {"NVFP4": 36}),
        (128, {"Q1_0": 18}),
        (256, {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ2_XXS": 66,
               "IQ2_XS": 74, "IQ3_XXS": 98, "IQ1_S": 50, "IQ3_S": 110, "IQ2_S": 82,
               "IQ4_XS": 136, "IQ1_M": 56, "TQ1_0": 54, "TQ2_0": 66}),
    )
    for name, nbytes in sizes.items()
)  # fmt: skip
"""The quantised types of GGUF: blocks of so many elements and bytes. Source: ggml-common.h."""

BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_STORAGE_CLASS = {dtype.storage_class: dtype for dtype in DTYPES if dtype.storage_class}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in (*DTYPES, *PACKED) if dtype.safetensors}
_ALL = {dtype.name: dtype for dtype in (*DTYPES, *PACKED, FLOAT4, *BLOCKS)}


def _named(name: str) -> DType:
    return _ALL[name]


FLOAT4_PAIRS = BY_NAME["float4_e2m1fn_x2"]
FLOAT32, FLOAT64 = BY_NAME["float32"], BY_NAME["float64"]
UINT8, BFLOAT16 = BY_NAME["uint8"], BY_NAME["bfloat16"]
E8M0, E4M3 = BY_NAME["float8_e8m0fnu"], BY_NAME["float8_e4m3fn"]
# but E8M0, which has powers of two alone: scales, never values
FLOAT8 = tuple(BY_NAME[f"float8_{form}"] for form in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"))

_SHORT_NAMES = {
    "f64": "float64", "double": "float64", "fp64": "float64",
    "f32": "float32", "float": "float32", "fp32": "float32",
    "f16": "float16", "half": "float16", "fp16": "float16",
    "bf16": "bfloat16",
    # fp8 alone is the form that weights have; e5m2 is one for gradients
    "f8_e4m3": "float8_e4m3fn", "f8_e4m3fn": "float8_e4m3fn", "fp8": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "f8_e4m3fnuz": "float8_e4m3fnuz",
    "f8_e5m2fnuz": "float8_e5m2fnuz",
    "f8_e8m0": "float8_e8m0fnu", "f8_e8m0fnu": "float8_e8m0fnu",
}  # fmt: skip

CHOICES = ("f32", "f16", "bf16", "f64", "f8_e4m3", "f8_e5m2")
"""The floating types by their short names, those that are wanted most first."""


def floating_dtype(name: str, option: str = "") -> DType:
    """The floating type that a user means by `name`: torch's name, safetensors' code or the usual
    short form. `option` is what an error calls it.

    >>> [floating_dtype(name).name for name in ("bf16", "torch.float16", "F8_E4M3")]
    ['bfloat16', 'float16', 'float8_e4m3fn']

    Raises `OptionRefused` when it is not the name of a floating type.
    """
    plain = name.strip().lower().removeprefix("torch.")
    dtype = BY_NAME.get(_SHORT_NAMES.get(plain, plain))
    if dtype is None or not dtype.is_floating:
        long = ", ".join(item.name for item in DTYPES if item.is_floating)
        hint = f"choose {', '.join(CHOICES[:-1])} or {CHOICES[-1]}; torch's names work too ({long})"
        what = f"{option} {printable(name, 60)!r} is not a floating dtype".lstrip()
        raise OptionRefused(what, hint=hint)
    return dtype
