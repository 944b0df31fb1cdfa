"""Which programs read quantised weights as they are: a table of what each says of itself.

A program goes by the ``quant_method`` of ``config.json``; what tells of itself without one (GGUF,
ComfyUI, torchao's own objects) has the word of its scheme here.
"""

from __future__ import annotations

from ckptconv.support.records import NamedTuple


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


def runtimes_for(method: str, scheme: str) -> list[str]:
    """The names of the programs that read weights of this ``quant_method`` (empty: no config says
    one) and this word of a scheme.
    """
    return [one.name for one in RUNTIMES if method in one.methods or scheme in one.schemes]
