"""Weights that are quantised, or could be smaller: what is said of them, and which programs read
them as they are, a table of what each says of itself.

A program goes by the ``quant_method`` of ``config.json``; what tells of itself without one (GGUF,
ComfyUI, torchao's own objects) has the word of its scheme here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.convert.fixes import Fix
from ckptconv.doctor.cases import Case, Symptom, info, some
from ckptconv.support.errors import printable
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import count_text, of_part, size_text
from ckptconv.tensors.scaled_weights import quantization_scales
from ckptconv.tree.model_config import facts_beside


class Runtime(NamedTuple):
    """A program: the values of ``quant_method`` that it reads, the words of schemes that it reads
    without a config, and where it says so.
    """

    name: str
    methods: tuple[str, ...]
    schemes: tuple[str, ...]
    source: str


RUNTIMES = (
    Runtime(
        "transformers",
        (
            *("fp8", "mxfp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "bitsandbytes"),
            *("torchao", "mxfp4", "quark"),
        ),
        ("gguf",),
        "AUTO_QUANTIZER_MAPPING in quantizers/auto.py of transformers 5.24",
    ),
    Runtime(
        "vLLM",
        (
            *("fp8", "compressed-tensors", "modelopt", "gptq", "awq", "bitsandbytes", "torchao"),
            *("mxfp4", "quark"),
        ),
        (),
        "model_executor/layers/quantization and docs/features/quantization of vLLM 0.29",
    ),
    Runtime(
        "SGLang",
        (
            *("fp8", "mxfp8", "compressed-tensors", "modelopt", "gptq", "awq", "bitsandbytes"),
            *("mxfp4", "quark"),
        ),
        ("gguf",),
        "srt/layers/quantization/__init__.py of sglang 0.5.23",
    ),
    Runtime("TensorRT-LLM", ("modelopt",), (), "docs/features/quantization of TensorRT-LLM 1.3"),
    Runtime("mlx-lm", ("mlx",), (), "load_model in utils.py of mlx-lm 0.32"),
    Runtime(
        "ComfyUI",
        (),
        ("comfy", "comfy-scaled", "comfy-nvfp4"),
        "the layouts of comfy-kitchen 0.2.40",
    ),
    Runtime("llama.cpp", (), ("gguf",), "the types of gguf-py 0.19, which are those of ggml"),
    Runtime("torchao", (), ("torchao",), "prototype/safetensors of torchao 0.18"),
)


def scaled_weights(case: Case) -> Iterator[Symptom]:
    """Weights that are codes beside a scale, which a model without them takes for values."""
    known = [item for item in case.facts.quantized if item.scheme is not None]
    if known:
        told = some([f"{item.scheme} ({count_text(item.weights, 'weight')})" for item in known])
        sizes = size_text(sum(item.stored for item in known))
        values = size_text(sum(item.values for item in known))
        types = ", ".join(dict.fromkeys(item.dtype for item in known))
        cause = f"weights are quantised: {told}; {sizes}, and {values} as values of {types}"
        effect = _readers_text(case)
        if case.scaled:  # the blocks of GGUF and the objects of torchao nobody takes for values
            effect = f"{effect}; {_NONSENSE}"
        yield info("scaled-weights", cause, effect, case.values_of_codes, chosen=True)
        return
    fix = case.values_of_codes
    for path, scaled in case.scaled.items():
        names = some([f"{item.codes} with {item.scale}" for item in scaled])
        advice = (
            "load it with the library that wrote it, or make values of it with --dequantize "
            "(ckptconv copies codes and scales as they are, and refuses --dtype alone)"
        )
        cause = f"weights{of_part(path)} are codes beside scales: {names}"
        yield info("scaled-weights", cause, _NONSENSE, fix, advice=advice, chosen=True)


_NONSENSE = (
    "a model that does not know of the scales uses the codes as values, and silently computes "
    "nonsense"
)


def _readers_text(case: Case) -> str:
    """Which programs read quantised weights as they are."""
    method = facts_beside(case.checkpoint).method
    schemes = {item.word for item in case.facts.quantized}
    # empty: no config says one
    able = [one.name for one in RUNTIMES if method in one.methods or schemes <= {*one.schemes}]
    if able:
        return f"{', '.join(able)} can read them as they are"
    if method:
        return f"no program is known here that reads {printable(method, 40)} as it is"
    return "no config.json says how, so no program reads them as they are"


def precision(case: Case) -> Iterator[Symptom]:
    """Weights whose floating values all take four bytes each, where two might do."""
    if not case.asked.size or case.scaled:
        return
    if any(quantization_scales(dict(item.tensors())) for item in case.state_dicts):
        return
    weights = {id(ref): ref.dtype for item in case.state_dicts for _, ref in item.tensors()}
    floats = [dtype.name for dtype in weights.values() if dtype.is_floating]
    if set(floats) == {"float32"}:
        cause = f"all floating tensors of its weights ({len(floats)}) are float32"
        effect = "bfloat16 would take half the bytes"
        yield info("all-fp32", cause, effect, Fix(dtype="bf16"), chosen=True)
