"""Which scheme a weight is quantised by: the configuration says it, then names and shapes; where
these leave a choice, an error lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from ckptconv.support.errors import CheckpointError, OptionRefused, RefusedObject, printable
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.scaled_weights import MARK, ScaledWeight, find_scaled
from ckptconv.tensors.schemes.base import CodeGroup, Facts, Scheme, unblocked
from ckptconv.tensors.schemes.bitsandbytes import SCHEMES as BITSANDBYTES
from ckptconv.tensors.schemes.comfy import SCHEMES as COMFY
from ckptconv.tensors.schemes.compressed import SCHEMES as COMPRESSED
from ckptconv.tensors.schemes.gptq import SCHEMES as GPTQ
from ckptconv.tensors.schemes.mlx import SCHEMES as MLX
from ckptconv.tensors.schemes.modelopt import SCHEMES as MODELOPT
from ckptconv.tensors.schemes.scaled import GPT_OSS
from ckptconv.tensors.schemes.scaled import SCHEMES as SCALED
from ckptconv.tensors.schemes.torchao import SCHEMES as TORCHAO

SCHEMES: tuple[Scheme, ...] = (
    *COMFY,
    *TORCHAO,
    *BITSANDBYTES,
    GPT_OSS,
    *COMPRESSED,
    *MLX,
    *MODELOPT,
    *GPTQ,
    *SCALED,
)

_BY_WORD = {scheme.name: scheme for scheme in SCHEMES} | {
    "gptq-v2": next(scheme for scheme in SCHEMES if scheme.name == "gptq")
}
WORDS = (*_BY_WORD,)
"""The words of ``--scheme``."""

# Names of scales of what goes through a layer (vLLM, ModelOpt, ComfyUI, FBGEMM, Mistral).
_OF_LAYERS = frozenset((
    "input_scale", "input_global_scale", "input_zero_point", "input_scale_ub", "activation_scale",
    "scale_input", "qscale_act", "output_scale",
))  # fmt: skip
# The same of an attention, whose projections are quantised (vLLM, ModelOpt).
_OF_ATTENTION = frozenset(("q_scale", "k_scale", "v_scale", "prob_scale"))


class Decoded(NamedTuple):
    """A weight that was decoded: its key before, and what it was decoded from, by their keys; its
    key and its values; the scheme in words, and its word in ``--scheme`` (GGUF: ``gguf``).
    """

    codes: str
    used: tuple[str, ...]
    key: str
    values: TensorRef
    scheme: str
    word: str


OnError = Callable[[str, CheckpointError], None]
"""Is told of the key of codes that cannot be read, and why; it may raise that."""


def decode_all(
    tensors: Mapping[str, TensorRef], facts: Facts, on_error: OnError
) -> Iterator[Decoded]:
    """The weights of a state dict that are codes, decoded, in the order of the keys.

    `on_error` is told `RefusedObject` of those whose scheme is not known or cannot be told, and
    `MalformedCheckpoint` where what belongs together does not fit.
    """
    if facts.scheme is not None and facts.scheme not in _BY_WORD:
        raise OptionRefused(
            f"--scheme {printable(facts.scheme, 60)} is not a scheme",
            hint=f"choose one of {', '.join(WORDS)}",
        )
    for key, ref in tensors.items():
        if ref.dtype.is_block:
            try:
                values = unblocked(key, ref, facts)
            except CheckpointError as error:
                on_error(key, error)
                continue
            yield Decoded(key, (), key, values, f"GGUF {ref.dtype.name}", "gguf")
    for item in find_scaled(tensors):
        try:
            yield _decoded(item, tensors, facts)
        except CheckpointError as error:
            on_error(item.codes, error)


def _decoded(item: ScaledWeight, tensors: Mapping[str, TensorRef], facts: Facts) -> Decoded:
    group = group_of(item, tensors)
    scheme = scheme_of(group, facts)
    try:
        made = scheme.decode(group, facts)
    except CheckpointError as error:
        raise error.at(where=item.codes) from None
    used = tuple(key for key in item.needed if not _is_mark(key))
    key = group.prefix + made.name
    return Decoded(item.codes, used, key, made.values, made.scheme, scheme.name)


def group_of(item: ScaledWeight, tensors: Mapping[str, TensorRef]) -> CodeGroup:
    """The tensors of one weight."""
    prefix = item.codes[: item.codes.rfind(".") + 1]
    parts = {key.removeprefix(prefix): tensors[key] for key in (item.codes, *item.needed)}
    return CodeGroup(item.codes, prefix, parts)


def left_out_with(found: Sequence[Decoded], tensors: Mapping[str, TensorRef]) -> set[str]:
    """The keys of what means nothing without the codes that were found in a state dict: scales of
    activations of their layers, marks.

    Such a scale is one number (of fused experts, one for each), and stands where these layers are.
    What has its name and is something else is a parameter, as a learned ``q_scale`` is.
    """
    most = {item.key.rpartition(".")[0]: prod(item.values.shape[:-2]) for item in found}
    around = {module.rpartition(".")[0] for module in most}
    fused = {f"{item.key}_input_scale": prod(item.values.shape[:-2]) for item in found}
    left = set()
    for key, ref in tensors.items():
        module, _, name = key.rpartition(".")
        count = fused.get(key, most.get(module, 0) if name in _OF_LAYERS else 0)
        if name in _OF_ATTENTION:
            is_there = module in most or not around.isdisjoint((module, module.rpartition(".")[0]))
            count = int(is_there)
        if (count and ref.numel <= count) or _is_mark(key):  # an empty parameter is not one
            left.add(key)
    return left


def names_activations(key: str) -> bool:
    """Whether the last part of a key is a name of scales of activations."""
    return key.rpartition(".")[2] in _OF_LAYERS | _OF_ATTENTION


def _is_mark(key: str) -> bool:
    return key.rpartition(".")[2] == MARK


def scheme_of(group: CodeGroup, facts: Facts) -> Scheme:
    """The scheme of a weight; `RefusedObject` where it is not known, or cannot be told."""
    fitting = [scheme for scheme in SCHEMES if scheme.fits(group, facts)]
    if facts.scheme is not None:
        chosen = _BY_WORD[facts.scheme]
        if chosen in fitting:
            return chosen
        if not any(scheme.is_certain for scheme in fitting):
            group.refuse(
                f"is not {facts.scheme}: its tensors are {_listed(group)}",
                hint=_choices(fitting) or None,
            )
    certain = [scheme for scheme in fitting if scheme.is_certain]
    if certain:
        return certain[0]
    named = [scheme for scheme in fitting if facts.method in scheme.methods]
    if len(named) == 1:
        return named[0]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise _unknown(group)
    raise RefusedObject(
        f"is quantised, and its tensors ({_listed(group)}) do not say how",
        where=group.key,
        hint=_choices(fitting),
    )


def _choices(fitting: list[Scheme]) -> str:
    return " or ".join(f"--scheme {scheme.name}" for scheme in fitting)


def _listed(group: CodeGroup) -> str:
    return ", ".join(
        f"{printable(name, 40)} {ref.dtype.name} {list(ref.shape)}"
        for name, ref in group.parts.items()
    )


# Who writes codes under these names, in an order that is not known here
_WRITERS = {
    "W_q": "HQQ",
    "q_weight": "ExLlama 2",
    "trellis": "ExLlama 3",
    "Qidxs": "QuIP#",
    "B": "Marlin",
    "codes": "AQLM",
    "wscales": "nunchaku",
    "weight_scales": "EETQ",
    "bitmask": "the sparse formats of compressed-tensors",
}


def _unknown(group: CodeGroup) -> RefusedObject:
    by = next((f" by {told}" for name, told in _WRITERS.items() if name in group.parts), "")
    return RefusedObject(
        f"is quantised{by} in a way that cannot be dequantised here: {_listed(group)}",
        where=group.key,
        hint="dequantise it with what wrote it",
    )
