"""What stands beside a checkpoint about quantisation: the first that says something, where all of
it agrees.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ckptconv import convert_checkpoint, inspect_checkpoint
from ckptconv.support.errors import MalformedCheckpoint
from helpers.paths import NUMBERS

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def beside(sample: str, to: Path, **files: dict[str, Any]) -> Path:
    """A sample with these files beside it, instead of its own."""
    to.mkdir()
    shutil.copy(NUMBERS / sample / "model.safetensors", to)
    for name, content in files.items():
        (to / f"{name}.json").write_text(json.dumps(content))
    return to / "model.safetensors"


CONTRADICTIONS: dict[str, tuple[str, dict[str, dict[str, Any]], str]] = {
    "a part": (
        "gptq4_act_v1",
        {"config": {"quantization_config": GPTQ,
                    "text_config": {"quantization_config": {**GPTQ, "bits": 8}}}},
        r"quantization_config of config.json says bits 4, and "
        r"text_config.quantization_config of config.json says 8"),
    "the older file": (
        "gptq4_act_v1",
        {"config": {"quantization_config": GPTQ},
         "quantize_config": {"bits": 4, "checkpoint_format": "gptq_v2"}},
        "checkpoint_format 'gptq', and quantize_config.json says 'gptq_v2'"),
    "ModelOpt's file": (
        "nvfp4_modelopt",
        {"config": {"quantization_config": FP8},
         "hf_quant_config": {"quantization": {"quant_algo": "NVFP4"}}},
        "quant_method 'fp8', and hf_quant_config.json says 'modelopt'"),
    "a size of blocks": (
        "fp8_block_deepseek",
        {"config": {"quantization_config": FP8, "compression_config": {
            **FP8, "weight_block_size": [64, 64]}}},
        r"weight_block_size \[128, 128\], and compression_config of config.json says"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictions_are_named_with_both_places(what, tmp_path):
    sample, files, message = CONTRADICTIONS[what]
    source = beside(sample, tmp_path / "model", **files)
    with pytest.raises(MalformedCheckpoint, match=message) as error:
        convert_checkpoint(source, tmp_path / "out.pt", dequantize=True)
    assert "take it away" in (error.value.hint or "")
    assert not (tmp_path / "out.pt").exists()
    (told,) = inspect_checkpoint(source).quantized
    assert told.scheme is None and "says" in told.problem


AGREEING: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "a part that says the same": (
        "gptq4_act_v1",
        {"config": {"quantization_config": GPTQ, "text_config": {
            "quantization_config": {**GPTQ, "quant_method": "GPTQ", "damp_percent": 0.1}}}}),
    "the older file, in full": (
        "gptq4_act_v1",
        {"config": {"quantization_config": GPTQ},
         "quantize_config": {"bits": 4, "group_size": 32, "desc_act": True, "format": "gptq"}}),
    "the older file beside AWQ": (
        "awq_gemm",
        {"config": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32,
                                            "version": "gemm"}},
         "quantize_config": {"bits": 4, "version": "GEMM"}}),
    "ModelOpt's file": (
        "nvfp4_modelopt",
        {"config": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
         "hf_quant_config": {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}}),
    "MLX, which says it twice": (
        "mlx",
        {"config": {"quantization": {"bits": 4, "group_size": 64},
                    "quantization_config": {"bits": 4, "group_size": 64}}}),
}  # fmt: skip


@pytest.mark.parametrize("what", AGREEING)
def test_what_agrees_in_what_is_read_is_read(what, tmp_path):
    sample, files = AGREEING[what]
    source = beside(sample, tmp_path / "model", **files)
    out = tmp_path / "out.safetensors"
    convert_checkpoint(source, out, dequantize=True, dtype="f32")
    expected = load_file(NUMBERS / sample / "model.expected.safetensors")
    for key, value in load_file(out).items():
        assert value.equal(expected[key].to(value.dtype)), key
