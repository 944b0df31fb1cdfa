"""doctor of quantised weights: which programs read them, and what --dequantize makes of them."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import Finding, diagnose, load_portable
from ckptconv.doctor.runtimes import RUNTIMES
from ckptconv.support.text import size_text
from helpers.paths import NUMBERS
from helpers.program import ROOT, assert_one_error, run

EXPECTED = {
    "gptq4_act_v1": "transformers, vLLM, SGLang",
    "awq_gemm": "transformers, vLLM, SGLang",
    "ct_pack_int4_sym": "transformers, vLLM, SGLang",
    "fp8_block_deepseek": "transformers, vLLM, SGLang",
    "mxfp4_gptoss": "transformers, vLLM, SGLang",
    "nvfp4_modelopt": "vLLM, SGLang, TensorRT-LLM",
    "mlx": "mlx-lm",
    "bnb/nf4.safetensors": "transformers, vLLM, SGLang",
    "comfy_quant/new.safetensors": "ComfyUI",
    "comfy_quant/old.safetensors": "ComfyUI",
    "torchao/int8.safetensors": "torchao",
    "gguf/all_types.gguf": "transformers, SGLang, llama.cpp",
}


def copied(sample: str, to: Path) -> Path:
    """A sample without what its framework made of it."""
    place = NUMBERS / sample
    if place.is_file():
        to.mkdir()
        for path in (place, place.with_name("config.json")):
            if path.exists():
                shutil.copy(path, to)
        return to / place.name
    shutil.copytree(place, to, ignore=shutil.ignore_patterns("*.expected.*", "*framework*"))
    return to


def told(path: Path) -> Finding:
    (finding,) = [item for item in diagnose(path).findings if item.code == "scaled-weights"]
    return finding


@pytest.mark.parametrize("sample", EXPECTED)
def test_the_programs_that_read_it_and_the_command_that_makes_values(sample, tmp_path):
    source = copied(sample, tmp_path / "model")
    finding = told(source)
    assert finding.effect.startswith(f"{EXPECTED[sample]} can read them as they are")
    assert finding.severity == "info" and finding.command is not None
    words = shlex.split(finding.command)
    done = run(*words[1:], cwd=tmp_path)
    assert done.exit == 0, done.err
    out = Path(words[3])
    assert "scaled-weights" not in {item.code for item in diagnose(out).findings}
    if source.is_dir():
        config = json.loads((out / "config.json").read_text())
        assert not {"quantization_config", "quantization"} & config.keys()


def test_the_size_after_is_that_of_the_values(tmp_path):
    source = copied("fp8_block_deepseek", tmp_path / "model")
    stored = load_file(source / "model.safetensors")
    codes = {key.removesuffix("_scale_inv") for key in stored if key.endswith("_scale_inv")}
    values = 2 * sum(stored[key].numel() for key in codes)
    before = sum(
        ref.numel() * ref.element_size()
        for key, ref in stored.items()
        if key.removesuffix("_scale_inv") in codes
    )
    words = f"; {size_text(before)}, and {size_text(values)} as values of bfloat16"
    assert told(source).cause.endswith(words)


def test_without_a_config_no_program_is_named(tmp_path):
    tensors = {
        "q.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "q.weight_scale": torch.ones(1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    finding = told(tmp_path / "model.safetensors")
    assert finding.effect.startswith("no config.json says how, so no program reads them")
    assert "--dequantize" in (finding.command or "")


def test_what_cannot_be_told_has_the_reason_and_the_option_for_advice(tmp_path):
    shutil.copy(NUMBERS / "gptq4_noact_v1" / "model.safetensors", tmp_path)
    finding = told(tmp_path / "model.safetensors")
    assert finding.command is None
    assert "--scheme gptq-v2" in (finding.advice or "")


@pytest.mark.parametrize("sample", ["gguf/all_types.gguf", "torchao/int8.pt"])
def test_what_can_be_written_as_values_alone_has_a_command_that_writes_them(sample, tmp_path):
    source = copied(sample, tmp_path / "model")
    (first, *_) = diagnose(source).findings
    assert first.code in ("container", "refused-objects") and first.command is not None
    for output in ("a.safetensors", "a.pt"):
        refused = assert_one_error(run("convert", source, output, cwd=tmp_path))
        assert "--dequantize" in refused
    words = shlex.split(first.command)
    assert run(*words[1:], cwd=tmp_path).exit == 0
    assert load_portable(words[3])


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "quantised.md").read_text()
    for one in RUNTIMES:
        names = ", ".join((*one.methods, *one.schemes))
        assert f"| {one.name} | {names} | {one.source} |" in page
