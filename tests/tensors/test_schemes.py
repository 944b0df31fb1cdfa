"""Quantised weights become what the framework that wrote them makes of them, bit for bit.

The samples are of the frameworks themselves (../shared/numbers); what they have to become was
computed by the frameworks' own code. Where that rounds more often, NOTE.txt of a sample says so.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import convert_checkpoint, inspect_checkpoint, load_portable
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint, RefusedObject
from ckptconv.tree.dequantizing import Dequantize
from helpers.http_server import HttpServer
from helpers.paths import NUMBERS

SAMPLES = sorted(
    made
    for path in NUMBERS.glob("*/*.expected.safetensors")
    for ending in (".safetensors", ".pt", ".gguf")
    if (made := path.with_name(path.name.replace(".expected.safetensors", ending))).exists()
)


def name_of(sample: Path) -> str:
    return f"{sample.parent.name}/{sample.name}"


def expected_of(sample: Path) -> dict[str, torch.Tensor]:
    return load_file(sample.with_name(f"{sample.stem}.expected.safetensors"))


def is_same(one: torch.Tensor, other: torch.Tensor, *, of_sign: bool = True) -> bool:
    """Bit for bit; but for the sign of zero where not `of_sign`."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    if not of_sign:
        return torch.equal(one, other)
    return one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))


def check(sample: Path, made: dict[str, torch.Tensor]) -> None:
    expected = expected_of(sample)
    assert list(made) and set(made) == set(expected)
    for key, value in expected.items():
        found = made[key]
        if value.dtype is torch.bfloat16:  # the framework gives no more bits of these
            found = found.to(torch.bfloat16)
        # ModelOpt decodes the code of -0 as 0
        is_right = is_same(found, value.to(found.dtype), of_sign="modelopt" not in str(sample))
        assert is_right, key


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
@pytest.mark.parametrize("to", ["safetensors", "pt"])
def test_a_converted_sample_has_the_values_of_its_framework(tmp_path, sample, to):
    out = tmp_path / f"out.{to}"
    convert_checkpoint(sample, out, dequantize=True, dtype="f32", verify=True)
    check(sample, load_file(out) if to == "safetensors" else torch.load(out))


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_a_loaded_sample_has_the_values_of_its_framework(sample):
    for key, value in load_portable(sample, edits=[Dequantize()]).items():
        wanted = expected_of(sample)[key].to(value.dtype)
        assert is_same(value, wanted, of_sign="modelopt" not in str(sample)), key


@pytest.mark.parametrize("folder", ["fp8_block_deepseek", "gptq4_act_v1", "mxfp4_gptoss"])
def test_shards_and_far_places_give_the_same(tmp_path, folder):
    sample = NUMBERS / folder / "model.safetensors"
    shards = tmp_path / "shards"
    convert_checkpoint(sample, shards, to="safetensors", max_shard_size="4KB", with_files=True)
    assert len(list(shards.glob("*.safetensors"))) > 1
    convert_checkpoint(shards, tmp_path / "a.safetensors", dequantize=True, dtype="f32")
    check(sample, load_file(tmp_path / "a.safetensors"))
    files = {f"/m/{path.name}": path.read_bytes() for path in sample.parent.iterdir()}
    with HttpServer(files) as server:
        far = f"{server.url}/m/model.safetensors"
        convert_checkpoint(far, tmp_path / "b.safetensors", dequantize=True, dtype="f32")
    check(sample, load_file(tmp_path / "b.safetensors"))


# ------------------------------------------------------------------------------- which type, once


def test_values_are_rounded_once_to_whatever_type_is_asked_for(tmp_path):
    sample = NUMBERS / "gptq4_noact_v1" / "model.safetensors"
    exact = expected_of(sample)
    for word, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        out = tmp_path / f"{word}.safetensors"
        convert_checkpoint(sample, out, dequantize=True, dtype=word, verify=True)
        for key, value in load_file(out).items():
            assert is_same(value, exact[key].to(dtype)), (word, key)


def test_without_dtype_values_have_the_type_that_the_config_names(tmp_path):
    sample = NUMBERS / "fp8_block_deepseek" / "model.safetensors"
    convert_checkpoint(sample, tmp_path / "out.safetensors", dequantize=True)
    for key, value in load_file(tmp_path / "out.safetensors").items():
        assert is_same(value, expected_of(sample)[key].to(torch.bfloat16)), key


# ------------------------------------------------------------------------------------ what decides


def copied(folder: str, to: Path, *, but: tuple[str, ...] = ()) -> Path:
    """A sample without some of its files."""
    to.mkdir()
    for path in (NUMBERS / folder).iterdir():
        if path.name not in but and "expected" not in path.name:
            shutil.copy(path, to)
    return to / "model.safetensors"


def test_gptq_without_a_config_asks_which_version_it_is(tmp_path):
    alone = copied("gptq4_noact_v2", tmp_path / "alone", but=("config.json",))
    with pytest.raises(RefusedObject, match="stored less one") as error:
        convert_checkpoint(alone, tmp_path / "out.safetensors", dequantize=True)
    assert "--scheme gptq-v2" in (error.value.hint or "")
    out = tmp_path / "out.safetensors"
    convert_checkpoint(alone, out, dequantize=True, scheme="gptq-v2", dtype="f32")
    check(NUMBERS / "gptq4_noact_v2" / "model.safetensors", load_file(out))


def test_a_block_size_is_that_of_the_config_and_not_the_rows_of_a_block(tmp_path):
    """192 rows in a grid of two are blocks of 128, the second of them cut: transformers 5.23 takes
    96.
    """
    sample = NUMBERS / "fp8_block_deepseek" / "model.safetensors"
    alone = copied("fp8_block_deepseek", tmp_path / "alone", but=("config.json",))
    convert_checkpoint(alone, tmp_path / "out.safetensors", dequantize=True, dtype="f32")
    check(sample, load_file(tmp_path / "out.safetensors"))


def test_what_is_not_quantised_is_not_dequantised(tmp_path):
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match="nothing in it is quantised"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "o.pt", dequantize=True)
    with pytest.raises(CheckpointError, match="--scheme says how"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "o.pt", scheme="gptq")


# ------------------------------------------------------------------------------ what does not fit


def damaged(tmp_path: Path, folder: str, change) -> Path:
    path = copied(folder, tmp_path / "damaged")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


def part(tensors: dict[str, torch.Tensor], ending: str) -> str:
    return next(key for key in tensors if key.endswith(ending))


def cut(ending: str):
    def change(tensors):
        key = part(tensors, ending)
        tensors[key] = tensors[key][:-1].contiguous()

    return change


def without(ending: str):
    def change(tensors):
        del tensors[part(tensors, ending)]

    return change


def filled(ending: str, value: int):
    def change(tensors):
        tensors[part(tensors, ending)].fill_(value)

    return change


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        ("fp8_block_deepseek", cut("o_proj.weight_scale_inv")),
        ("fp8_block_deepseek", without("o_proj.weight_scale_inv")),
        ("ct_float_channel", cut("weight_scale")),
        ("ct_pack_int4_asym", cut("weight_zero_point")),
        ("ct_pack_int4_asym", cut("weight_packed")),
        ("ct_pack_int4_asym", without("weight_shape")),
        ("ct_pack_int4_asym", filled("weight_shape", 65)),
        ("ct_pack_int4_asym", filled("weight_shape", -1)),
        ("ct_nvfp4", cut("weight_scale")),
        ("ct_mxfp4", cut("weight_scale")),
        ("gptq4_act_v1", cut("qzeros")),
        ("gptq4_act_v1", cut("qweight")),
        ("gptq4_act_v1", filled("g_idx", 4)),
        ("gptq4_act_v1", filled("g_idx", -1)),
        ("gptq4_act_v1", without("qzeros")),
        ("awq_gemm", cut("qzeros")),
        ("nvfp4_modelopt", cut("weight_scale")),
        ("mxfp4_gptoss", cut("down_proj_scales")),
        ("mlx", cut("scales")),
        ("mlx", cut("biases")),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path, folder, change):
    path = damaged(tmp_path, folder, change)
    with pytest.raises(CheckpointError) as error:
        convert_checkpoint(path, tmp_path / "out.safetensors", dequantize=True)
    assert isinstance(error.value, (MalformedCheckpoint, RefusedObject)), error.value
    assert not (tmp_path / "out.safetensors").exists()


def bnb(tmp_path: Path, change) -> Path:
    tensors = load_file(NUMBERS / "bnb" / "nf4_nested.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "bnb.safetensors")
    return tmp_path / "bnb.safetensors"


def state(**changes):
    def change(tensors):
        key = part(tensors, "bitsandbytes__nf4")
        told = {**json.loads(bytes(tensors[key].tolist())), **changes}
        tensors[key] = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    "change",
    [
        cut("quant_map"),
        cut("weight.absmax"),
        cut("nested_absmax"),
        cut("nested_quant_map"),
        state(blocksize=0),
        state(blocksize=128),
        state(shape=[96, 255]),
        state(shape=[1 << 40, 1 << 40]),
        state(quant_type="nf9"),
        state(nested_blocksize="many"),
        filled("bitsandbytes__nf4", 123),
    ],
)
def test_a_quant_state_that_lies_is_refused(tmp_path, change):
    with pytest.raises((MalformedCheckpoint, RefusedObject)):
        convert_checkpoint(bnb(tmp_path, change), tmp_path / "out.safetensors", dequantize=True)
    assert not (tmp_path / "out.safetensors").exists()


# ------------------------------------------------------------------------------- the config beside


def test_the_config_of_the_copy_does_not_say_that_it_is_quantised(tmp_path):
    source = tmp_path / "in"
    copied("nvfp4_modelopt", source)
    config = json.loads((source / "config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "text_config": {"quantization_config": {"a": 1}}}
    (source / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    convert_checkpoint(source, out, to="safetensors", dequantize=True, dtype="f32", with_files=True)
    told = json.loads((out / "config.json").read_text())
    del config["quantization_config"], config["text_config"]["quantization_config"]
    assert told == {**config, "torch_dtype": "float32"}
    assert not (out / "hf_quant_config.json").exists()
    plain = tmp_path / "plain"
    convert_checkpoint(source, plain, to="safetensors", with_files=True)
    for name in ("config.json", "hf_quant_config.json"):
        assert (plain / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_inspect_tells_of_all_weights_and_counts_what_they_stand_for(sample):
    expected = expected_of(sample)
    found = inspect_checkpoint(sample)
    assert all(item.scheme is not None for item in found.quantized)
    assert sum(item.weights for item in found.quantized) > 0
    assert found.parameters[""] == sum(value.numel() for value in expected.values())
