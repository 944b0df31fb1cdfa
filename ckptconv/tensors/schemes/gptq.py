"""GPTQ and AWQ: integers packed in words of 32 bits, of the transposed weight.

Facts: gptqmodel 7.7 (nn_modules/qlinear, utils/model_dequant) and autoawq 0.2.9
(utils/packing_utils). GPTQ packs down the inputs, and stores zeros less one in its first version;
AWQ packs along the outputs, in an order of its own.
"""

from __future__ import annotations

from ckptconv.support.arrays import np
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.computed import Computed, computed_value
from ckptconv.tensors.decoding import Decoding, unpacked
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.schemes.base import (
    CodeGroup,
    Facts,
    Scheme,
    Weight,
    all_integers,
    check_groups,
    decoded,
    power_of,
    told_size,
)
from ckptconv.tensors.stream import read_box
from ckptconv.tensors.views import transposed

# the field of each of eight outputs: field k of a word holds output (0, 2, 4, 6, 1, 3, 5, 7)[k]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _holds(group: CodeGroup) -> bool:
    names = ("qweight", "scales", "qzeros")
    known = {*names, "g_idx"}
    is_there = all(name in group.parts and len(group.parts[name].shape) == 2 for name in names)
    if not is_there or not known.issuperset(group.parts):
        return False
    return all(group.parts[name].dtype.name == "int32" for name in ("qweight", "qzeros"))


def _is_gptq(group: CodeGroup, _: Facts) -> bool:
    """The columns of the words are those of the scales."""
    return _holds(group) and group.codes.shape[1] == group.parts["scales"].shape[1]


def _is_awq(group: CodeGroup, _: Facts) -> bool:
    """A word has eight of the columns that the scales have."""
    return _holds(group) and 8 * group.codes.shape[1] == group.parts["scales"].shape[1]


def _gptq_version(facts: Facts) -> str:
    """``gptq`` (zeros less one), ``gptq_v2``, or the layout of a kernel; empty: not known."""
    if facts.scheme in ("gptq", "gptq-v2"):
        return facts.scheme.replace("-", "_")
    if facts.method not in ("", "gptq") or "bits" not in facts.config:
        return ""  # of others with these names (auto-round) it is not known
    # a config that does not say it is of the first version to gptqmodel too
    named = facts.config.get("checkpoint_format") or facts.config.get("format") or "gptq"
    return named if isinstance(named, str) else ""


def _gptq(group: CodeGroup, facts: Facts) -> Weight:
    version = _gptq_version(facts)
    if not version:
        group.refuse(
            "is quantised by GPTQ, and no config.json says whether its zeros are stored less one",
            hint="put the config.json beside it, or say --scheme gptq (the first version, which "
            "most files are) or --scheme gptq-v2",
        )
    if version not in ("gptq", "gptq_v2"):
        group.refuse(f"is packed for the kernel {version}, in an order that is not known here")
    codes, scales, zeros = (group.need(name) for name in ("qweight", "scales", "qzeros"))
    groups, outputs = scales.shape
    index = group.first("g_idx")
    bits = _bits(group, facts, zeros.shape[1], outputs)
    count = codes.shape[0] * 32 // bits
    if index is not None and len(index.shape) == 1:
        count = index.shape[0]
    if -(-count * bits // 32) != codes.shape[0]:
        group.fail(f"has {codes.shape[0]} words for {count} inputs of {bits} bits")
    size = _group_size(group, facts, count, groups)
    if zeros.shape[0] != groups:
        group.fail(f"has zeros for {zeros.shape[0]} groups, and scales for {groups}")
    inputs = {"codes": transposed(codes), "scale": transposed(scales), "zero": transposed(zeros)}
    is_ordered = index is not None and _is_act_order(group, size, count)
    if index is None and facts.config.get("desc_act") and groups > 1:
        group.fail("is quantised in act order (desc_act), and has no g_idx")
    if index is not None and is_ordered:
        check_groups(group, "g_idx", count, groups)
        inputs["groups"] = index
    how = Decoding(
        tuple(inputs),
        "uint",
        (1, size),
        bits=bits,
        word=4,
        packed_zero=True,
        zero_step=int(version == "gptq"),
        groups=groups,
    )
    values = decoded(group, facts, how, inputs, (outputs, count), default=scales.dtype)
    words = f"GPTQ {bits} bit, groups of {size}"
    if is_ordered:
        words += ", act order"
    return Weight("weight", values, words)


class Zeros(NamedTuple):
    """Packed zeros, one added to each: as words and groups, of so many rows."""

    words: TensorRef
    how: Decoding
    rows: int


def stepped_zeros(values: TensorRef) -> Zeros | None:
    """The zeros of a weight of the first version of GPTQ; None for any other."""
    match computed_value(values):
        case Computed(parameters=Decoding(zero_step=step) as how) as value if step:
            return Zeros(value.inputs[how.roles.index("zero")], how, value.shape[-2])
    return None


def has_all_ones(zeros: Zeros) -> bool:
    """Whether a stored zero is all ones: it stands for 0, and gptqmodel's own reader carries the
    one that it adds into the next zero. What only fills up the last word does not count.
    """
    words, how, rows = zeros
    ones = (1 << how.bits) - 1
    for group in range(words.shape[1]):
        for row in range(0, rows, _ROWS):
            count = min(_ROWS, rows - row)
            first, size = row * how.bits // 32, -(-count * how.bits // 32)
            stored = np.frombuffer(read_box(words, (first, group), (size, 1)), "<u4")
            fields = unpacked(stored.reshape(size, 1), how._replace(axis=-2), 0, count)
            if (fields == ones).any():
                return True
    return False


# Zeros that are looked at in one go: they begin with a word, so it is a multiple of 32.
_ROWS = 1 << 18


def _bits(group: CodeGroup, facts: Facts, words: int, outputs: int) -> int:
    """The bits of a code: by the zeros, which are one for each output; ``dynamic`` rules give
    modules their own, so the configuration is asked last.
    """
    fitting = [bits for bits in (2, 3, 4, 8) if -(-outputs * bits // 32) == words]
    if len(fitting) == 1:
        return fitting[0]
    told = facts.config.get("bits")
    if told not in fitting:
        group.refuse(f"has zeros in {words} words for {outputs} outputs: how many bits is not told")
    return int(told)


def _group_size(group: CodeGroup, facts: Facts, count: int, groups: int) -> int:
    """The inputs of a group; of the last one, fewer may be there."""
    size = told_size(group, facts.config, "group_size")
    # one group of all
    if size == -1:
        size = count
    # gptqmodel's `dynamic` gives modules sizes of their own; g_idx is held against what is derived
    is_own = size is not None and size > 0 and -(-count // size) != groups
    if size is None or (is_own and facts.config.get("dynamic")):
        size = power_of(group, count, groups)
    if size <= 0 or -(-count // size) != groups:
        group.fail(f"has {groups} groups of {size} for {count} inputs")
    return min(size, count)


def _is_act_order(group: CodeGroup, size: int, count: int) -> bool:
    """Whether the inputs are not in the order of their groups."""
    numbers = all_integers(group, "g_idx", count)
    return any(at // size != number for at, number in enumerate(numbers))


def _awq(group: CodeGroup, facts: Facts) -> Weight:
    version = facts.config.get("version", "gemm")
    if isinstance(version, str) and version.lower() != "gemm":
        group.refuse(f"is AWQ packed for the kernel {version!r:.40}, in an order not known here")
    if told_size(group, facts.config, "bits") not in (None, 4):
        group.refuse("is AWQ of other than 4 bits, in an order that is not known here")
    codes, scales, zeros = (group.need(name) for name in ("qweight", "scales", "qzeros"))
    groups, outputs = scales.shape
    count = codes.shape[0]
    if zeros.shape != (groups, codes.shape[1]):
        group.fail(f"has zeros of {list(zeros.shape)}, which have to be {[groups, codes.shape[1]]}")
    size = _group_size(group, facts, count, groups)
    how = Decoding(
        ("codes", "scale", "zero"),
        "uint",
        (1, size),
        bits=4,
        axis=-2,
        order=_AWQ_ORDER,
        word=4,
        packed_zero=True,
    )
    inputs = {"codes": transposed(codes), "scale": transposed(scales), "zero": transposed(zeros)}
    values = decoded(group, facts, how, inputs, (outputs, count), default=scales.dtype)
    return Weight("weight", values, f"AWQ 4 bit, groups of {size}")


SCHEMES = (Scheme("gptq", ("gptq",), _is_gptq, _gptq), Scheme("awq", ("awq",), _is_awq, _awq))
