"""A folder that was dequantised is a plain model: `from_pretrained` finds every key in it and no
other, without a quantiser, and gives the logits of what the framework itself dequantises.

The models are tiny and random. Theirs is loaded from the quantised folder, ours from what
``convert --dequantize --with-files`` made of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import convert_checkpoint

pytestmark = [pytest.mark.families, pytest.mark.filterwarnings("ignore")]

transformers = pytest.importorskip("transformers")

Tensors = dict[str, torch.Tensor]
F8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)
    with torch.compiler.set_stance("force_eager"):  # bitsandbytes would compile for a minute
        yield


SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def saved(folder: Path, config: Any) -> Path:
    """A plain model of random weights in bfloat16."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def requantised(
    folder: Path, replaced: Callable[[str, torch.Tensor], Tensors], told: dict[str, Any]
) -> None:
    """Put codes and scales in the place of weights, and say so in the config."""
    path = folder / "model.safetensors"
    tensors: Tensors = {}
    for key, value in load_file(path).items():
        tensors |= replaced(key, value)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = told
    (folder / "config.json").write_text(json.dumps(config))


def loaded(folder: Path, **options: Any) -> Any:
    """A model, loaded strictly."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(told.values()), told
    return model.eval()


@pytest.fixture
def without_gpu(monkeypatch) -> None:
    """transformers loads fp8 as it is where it finds a GPU; what it loads is looked at here."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(
        FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *_, **__: None
    )


def test_experts_of_block_fp8_have_the_scales_that_transformers_stacks(tmp_path, without_gpu):
    """Codes and scales of experts, stacked by the preset and by transformers; and both ways."""
    config = transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2
    )
    folder = saved(tmp_path / "fp8", config)

    def replaced(key: str, value: torch.Tensor) -> Tensors:
        if not key.endswith("_proj.weight"):
            return {key: value}
        rows, columns = value.shape
        scales = torch.rand(-(-rows // 128), -(-columns // 128)) / 1000
        return {key: (value.float() * 1000).to(F8), f"{key}_scale_inv": scales}

    told = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    requantised(folder, replaced, told | {"activation_scheme": "dynamic"})
    v5, back = tmp_path / "v5", tmp_path / "back"
    options: dict[str, Any] = {"to": "safetensors", "with_files": True}
    convert_checkpoint(folder, v5, preset="transformers-v5", **options)
    theirs = loaded(folder).state_dict()
    ours = load_file(v5 / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj_scale_inv" in ours
    assert_same_bytes(ours, theirs)
    assert_same_bytes(loaded(v5).state_dict(), theirs)
    convert_checkpoint(v5, back, preset="transformers-original", **options)
    assert_same_bytes(
        load_file(back / "model.safetensors"), load_file(folder / "model.safetensors")
    )


def assert_same_bytes(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for key, t in one.items():
        assert (t.dtype, t.shape) == (other[key].dtype, other[key].shape), key
        both = (each.contiguous().reshape(-1).view(torch.uint8) for each in (t, other[key]))
        assert torch.equal(*both), key


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(48)[None]).logits


def check(source: Path, theirs: Any, **options: Any) -> None:
    """Convert, load without a quantiser, and compare."""
    out = source.parent / "out"
    convert_checkpoint(
        source, out, to="safetensors", dequantize=True, with_files=True, verify=True, **options
    )
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    ours = loaded(out)
    assert ours.dtype is torch.bfloat16
    assert getattr(ours.config, "quantization_config", None) is None
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
    found = logits(ours)
    assert found.isfinite().all() and torch.equal(found, logits(theirs))


# --------------------------------------------------------------------------------------------- fp8


def in_blocks(key: str, value: torch.Tensor) -> Tensors:
    """A weight as DeepSeek stores it: fp8, a scale for each block of 128 x 128."""
    if "_proj" not in key or value.dim() != 2:
        return {key: value}
    rows, columns = value.shape
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) * 1e-3 + 1e-4
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (value.float() / spread).clamp(-448, 448).to(F8)
    return {key: codes, f"{key}_scale_inv": scale}


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_fp8_in_blocks(tmp_path, is_tied):
    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=is_tied)
    source = saved(tmp_path / "in", config)
    requantised(source, in_blocks, FP8)
    how = transformers.FineGrainedFP8Config(dequantize=True)
    check(source, loaded(source, quantization_config=how))


@pytest.mark.parametrize("size", [None, "300KB"], ids=["one file", "shards"])
def test_fp8_experts(tmp_path, size):
    """One by one in the file, fused in the model."""
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    source = saved(tmp_path / "in", config)
    requantised(source, in_blocks, FP8)
    assert any(".experts.0." in key for key in load_file(source / "model.safetensors"))
    how = transformers.FineGrainedFP8Config(dequantize=True)
    check(source, loaded(source, quantization_config=how), max_shard_size=size)


def test_fp8_of_deepseek(tmp_path):
    """Latent attention: sides that no block of 128 divides, which transformers itself misreads."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=128,
        q_lora_rank=192,
        qk_rope_head_dim=64,
        v_head_dim=64,
        qk_nope_head_dim=64,
    )
    source = saved(tmp_path / "in", config)
    requantised(source, in_blocks, FP8)
    tensors = load_file(source / "model.safetensors")
    sides = {size % 128 for value in tensors.values() if value.dtype is F8 for size in value.shape}
    assert len(sides) > 1
    plain = saved(tmp_path / "plain", config)
    oracle = FP8BlockDequantizer(dtype=torch.bfloat16)
    exact = {key: value for key, value in tensors.items() if not key.endswith("_scale_inv")}
    for key in [key for key, value in exact.items() if value.dtype is F8]:
        scale = tensors[f"{key}_scale_inv"]
        exact[key] = oracle._create_dequantized_weight(tensors[key], scale).contiguous()
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    check(source, loaded(plain))


# ------------------------------------------------------------------------- mxfp4, packed integers


def test_experts_of_gpt_oss(tmp_path):
    def replaced(key: str, value: torch.Tensor) -> Tensors:
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {key: value}
        experts, inputs, outputs = value.shape
        grid = (experts, outputs, inputs // 32)
        return {
            f"{key}_blocks": torch.randint(0, 256, (*grid, 16), dtype=torch.uint8),
            f"{key}_scales": torch.randint(118, 124, grid, dtype=torch.uint8),
        }

    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96}
    config = transformers.GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    source = saved(tmp_path / "in", config)
    told = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    requantised(source, replaced, told)
    how = transformers.Mxfp4Config(dequantize=True)
    check(source, loaded(source, quantization_config=how))


@pytest.mark.parametrize("is_symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_packed_integers_of_compressed_tensors(tmp_path, is_symmetric):
    def replaced(key: str, value: torch.Tensor) -> Tensors:
        if not key.endswith("_proj.weight"):
            return {key: value}
        rows, columns = value.shape
        base = key.removesuffix("weight")
        made = {
            "weight_packed": words(rows, columns // 8),
            "weight_scale": (torch.rand(rows, columns // 32) * 0.01).bfloat16(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not is_symmetric:
            made["weight_zero_point"] = words(rows // 8, columns // 32)
        return {f"{base}{name}": part for name, part in made.items()}

    source = saved(tmp_path / "in", transformers.LlamaConfig(**SIZES))
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": "group",
        "group_size": 32,
    }
    group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
    told = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    requantised(source, replaced, told)
    how = transformers.CompressedTensorsConfig(dequantize=True)
    check(source, loaded(source, quantization_config=how))


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


# ----------------------------------------------------------------- what the frameworks save of it


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_bitsandbytes(tmp_path, kind):
    """Quantised and saved by transformers, dequantised by it in memory."""
    plain = saved(tmp_path / "plain", transformers.LlamaConfig(**SIZES))
    if kind == "int8":
        how = transformers.BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_use_double_quant=kind == "nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    theirs = loaded(plain, quantization_config=how, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "in")
    check(tmp_path / "in", theirs.dequantize(dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["int8", "float8", "int4 in int8"])
def test_torchao(tmp_path, kind):
    from torchao import quantization as ao

    plain = saved(tmp_path / "plain", transformers.LlamaConfig(**SIZES))
    how = {
        "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
        "float8": ao.Float8WeightOnlyConfig,
        "int4 in int8": lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=ao.PerGroup(32)
        ),
    }[kind]()
    told = transformers.TorchAoConfig(how)
    theirs = loaded(plain, quantization_config=told, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "in")
    values = theirs.state_dict()
    count = sum(type(value).__module__.startswith("torchao") for value in values.values())
    assert count > 10
    made = {
        key: value.dequantize() if type(value).__module__.startswith("torchao") else value
        for key, value in values.items()
    }
    model = loaded(plain)
    model.load_state_dict(made)
    check(tmp_path / "in", model)


# -------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K"])
def test_values_of_gguf(tmp_path, kind):
    """transformers reads the file itself; names are llama.cpp's, so the values are compared."""
    from gguf import GGMLQuantizationType, GGUFWriter, TensorNameMap, get_tensor_name_map
    from gguf.constants import MODEL_ARCH
    from gguf.quants import quantize

    config = transformers.Qwen2Config(**{**SIZES, "intermediate_size": 512})
    model = transformers.AutoModelForCausalLM.from_config(config)
    names: TensorNameMap = get_tensor_name_map(MODEL_ARCH.QWEN2, config.num_hidden_layers)
    number = GGMLQuantizationType[kind]
    writer = GGUFWriter(tmp_path / "model.gguf", "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    named = {}
    for key, value in model.state_dict().items():
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        named[key] = name
        array = value.numpy()
        if value.dim() == 2:
            codes = quantised(array, number, quantize)
            writer.add_tensor(name, codes, raw_dtype=number)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=config, dtype=torch.float32
    ).state_dict()
    out = tmp_path / "out.safetensors"
    convert_checkpoint(tmp_path / "model.gguf", out, dequantize=True, verify=True)
    ours = load_file(out)
    assert set(ours) == set(named.values())
    for key, name in named.items():
        assert torch.equal(ours[name], theirs[key]), key


def quantised(array: Any, number: Any, quantize: Callable[..., Any]) -> Any:
    """Codes of a type; of one that gguf-py cannot make, codes by chance with sane scales."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES

    try:
        return quantize(array, number)
    except NotImplementedError:
        elements, size = GGML_QUANT_SIZES[number]
        blocks = np.random.default_rng(3).integers(
            0, 256, (*array.shape[:-1], array.shape[-1] // elements, size), dtype=np.uint8
        )
        blocks[..., -2:] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)  # d of Q6_K
        return blocks.reshape(*array.shape[:-1], -1)
