"""Quantised weights become what the framework that wrote them makes of them, bit for bit.

The samples are of the frameworks themselves (../shared/numbers); what they have to become was
computed by the frameworks' own code. Where that rounds more often, NOTE.txt of a sample says so.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import (
    average_checkpoints,
    convert_checkpoint,
    inspect_checkpoint,
    load_portable,
    open_checkpoint,
)
from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    OptionRefused,
    RefusedObject,
)
from ckptconv.tree.dequantizing import Dequantize
from helpers.examples import crossed
from helpers.paths import NUMBERS
from helpers.program import run

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


@pytest.mark.parametrize(
    ("sample", "to"),
    crossed(SAMPLES, ["safetensors", "pt"]),
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_a_converted_sample_has_the_values_of_its_framework(tmp_path, sample, to):
    out = tmp_path / f"out.{to}"
    convert_checkpoint(sample, out, dequantize=True, dtype="f32", verify=True)
    check(sample, load_file(out) if to == "safetensors" else torch.load(out))


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_a_loaded_sample_has_the_values_of_its_framework(sample):
    for key, value in load_portable(sample, edits=[Dequantize()]).items():
        wanted = expected_of(sample)[key].to(value.dtype)
        assert is_same(value, wanted, of_sign="modelopt" not in str(sample)), key


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


def test_a_quantisation_that_the_config_names_and_nothing_shows_is_told_by_its_name(tmp_path):
    """To say "leave --dequantize out" would call codes of an unknown order values."""
    save_file({"a.indices": torch.ones(2, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "vptq"}}')
    with pytest.raises(CheckpointError, match="its config names the quantisation vptq"):
        convert_checkpoint(tmp_path, tmp_path / "o.pt", dequantize=True)


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


def seen_as(ending: str, change):
    """A part in another shape or type."""

    def changed(tensors):
        key = part(tensors, ending)
        tensors[key] = change(tensors[key]).clone().contiguous()

    return changed


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        ("gptq4_noact_v1", seen_as("g_idx", lambda t: t[None])),
        ("gptq4_noact_v1", seen_as("g_idx", lambda t: t[0])),
        ("gptq4_act_v1", without("g_idx")),  # the config says desc_act
        ("gptq4_noact_v1", seen_as("scales", lambda t: t.long())),
        ("ct_pack_int4_asym", seen_as("weight_scale", lambda t: t.long())),
        ("ct_pack_int4_asym", seen_as("weight_packed", lambda t: t[None])),
        ("ct_pack_int4_asym", seen_as("weight_zero_point", lambda t: torch.stack([t, t]))),
        ("ct_mxfp4", seen_as("weight_scale", lambda t: t.double())),
        ("ct_int8_channel", seen_as("weight_scale", lambda t: t.to(torch.complex64))),
        ("ct_int8_channel", seen_as("weight_scale", lambda t: t.T)),
    ],
)
def test_parts_of_other_shapes_and_types_are_refused_before_anything_is_computed(
    tmp_path, folder, change
):
    test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path, folder, change)


def dequantized(tmp_path: Path, tensors: dict[str, torch.Tensor], **options) -> dict:
    """What becomes of tensors in a torch file."""
    torch.save(tensors, tmp_path / "in.pt")
    out = tmp_path / "out.pt"
    convert_checkpoint(tmp_path / "in.pt", out, dequantize=True, dtype="f32", **options)
    return torch.load(out)


def fp8(*shape: int) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel()) % 17
    return (numbers - 8.0).reshape(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("shape", "of_scale"),
    [
        ((8, 8), (8, 1)),
        ((8, 8), (1, 8)),
        ((2, 8, 8), (2, 1, 8)),
        ((2, 8, 8), (2, 8, 1)),
        ((8, 8, 3), (8, 1, 1)),
        ((3, 4, 8), ()),
        ((8, 8, 3, 3), (8, 1, 1, 1)),
    ],
)
def test_scales_of_as_many_dimensions_as_the_weight_stand_where_broadcasting_takes_them(
    tmp_path, shape, of_scale
):
    codes, scale = fp8(*shape), torch.rand(of_scale) + 0.5
    made = dequantized(tmp_path, {"a.weight": codes, "a.weight_scale": scale}, verify=True)
    assert torch.equal(made["a.weight"], codes.float() * scale)


def test_a_scale_for_each_input_of_a_convolution_is_refused(tmp_path):
    tensors = {"a.weight": fp8(8, 8, 1, 1), "a.weight_scale": torch.rand(1, 8, 1, 1)}
    with pytest.raises(MalformedCheckpoint, match=r"weight_scale of \[1, 8, 1, 1\]"):
        dequantized(tmp_path, tensors)


# ---------------------------------------------------------------------------- one tensor, two names


def test_codes_under_two_names_are_read_each_with_its_own_scale(tmp_path):
    codes, one, other = fp8(4, 4), torch.rand(4, 1), torch.rand(4, 1)
    tensors = {"a.weight": codes, "a.weight_scale": one}
    tensors |= {"b.weight": codes, "b.weight_scale": other}
    made = dequantized(tmp_path, tensors)
    assert torch.equal(made["a.weight"], codes.float() * one)
    assert torch.equal(made["b.weight"], codes.float() * other)


def test_where_their_names_do_not_tell_them_apart_they_are_refused(tmp_path):
    codes = fp8(4, 4)
    tensors = {name: {"weight": codes, "weight_scale": torch.rand(4, 1)} for name in "ab"}
    with pytest.raises(RefusedObject, match="with different scales"):
        dequantized(tmp_path, tensors)


def test_tied_codes_become_tied_values(tmp_path):
    codes, scale = fp8(4, 4), torch.rand(4, 1)
    tensors = {f"{name}.weight": codes for name in "ab"}
    made = dequantized(tmp_path, tensors | {f"{name}.weight_scale": scale for name in "ab"})
    assert torch.equal(made["b.weight"], codes.float() * scale)
    assert made["a.weight"].data_ptr() == made["b.weight"].data_ptr()


def test_a_scale_that_is_a_value_too_stays_one(tmp_path):
    codes, scale = fp8(4, 4), torch.rand(4)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "norm.weight": scale}
    made = dequantized(tmp_path, tensors)
    assert set(made) == {"a.weight", "norm.weight"} and torch.equal(made["norm.weight"], scale)


@pytest.mark.parametrize(
    "lone",
    [
        {"b.weight": torch.ones(4, 4, dtype=torch.int8)},
        {"b.weight": torch.ones(4, 4, dtype=torch.uint8)},
        {"b.w_blocks": torch.ones(1, 4, 1, 16, dtype=torch.uint8)},
        {"b.w_scales": torch.ones(1, 4, 1, dtype=torch.uint8)},
    ],
)
def test_integer_codes_or_scales_alone_beside_what_is_decoded_are_refused(tmp_path, lone):
    tensors = {"a.weight": fp8(4, 4), "a.weight_scale": torch.rand(4, 1), **lone}
    with pytest.raises(RefusedObject, match="without what it is read with"):
        dequantized(tmp_path, tensors)


def test_an_index_of_groups_that_nothing_was_put_into_is_none(tmp_path):
    """compressed-tensors fills it with -1 before it calibrates."""
    sample = NUMBERS / "ct_pack_int4_asym" / "model.safetensors"
    [columns] = {value.shape[1] for value in expected_of(sample).values() if value.dim() == 2}

    def change(tensors):
        key = part(tensors, "weight_packed").replace("packed", "g_idx")
        tensors[key] = torch.full((columns,), -1, dtype=torch.int32)

    path = damaged(tmp_path, "ct_pack_int4_asym", change)
    convert_checkpoint(path, tmp_path / "out.safetensors", dequantize=True, dtype="f32")
    check(sample, load_file(tmp_path / "out.safetensors"))


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
        state(shape="96 x 256"),
        state(quant_type="nf9"),
        state(nested_blocksize="many"),
        state(nested_offset=10**400),
        filled("bitsandbytes__nf4", 123),
    ],
)
def test_a_quant_state_that_lies_is_refused(tmp_path, change):
    with pytest.raises((MalformedCheckpoint, RefusedObject)):
        convert_checkpoint(bnb(tmp_path, change), tmp_path / "out.safetensors", dequantize=True)
    assert not (tmp_path / "out.safetensors").exists()


def test_codes_of_bitsandbytes_may_be_stored_as_another_type(tmp_path):
    """As ``bnb_4bit_quant_storage`` does, for FSDP."""

    def change(tensors):
        key = next(key for key in tensors if f"{key}.absmax" in tensors)
        tensors[key] = tensors[key].reshape(-1).view(torch.bfloat16).reshape(-1, 1)

    out = tmp_path / "out.safetensors"
    convert_checkpoint(bnb(tmp_path, change), out, dequantize=True, dtype="f32")
    check(NUMBERS / "bnb" / "nf4_nested.safetensors", load_file(out))


# ---------------------------------------------------------------------------------------- torchao


INT8 = {
    "qdata": torch.full((4, 8), 3, dtype=torch.int8),
    "scale": torch.ones(4, 1),
    "block_size": [1, 8],
}


def of_torchao(monkeypatch, tmp_path: Path, shape=(4, 8), kind="Int8Tensor", **changes) -> dict:
    """What becomes of an object that is pickled as one of torchao's class of this name is."""
    state = {name: part for name, part in (INT8 | changes).items() if part is not None}

    def reduced(self: object, protocol: object):
        sizes = (torch.bfloat16, shape, (1,) * len(shape), 0)
        arguments = (cls, *sizes, torch.strided, torch.device("cpu"), False)
        rebuild = torch._utils._rebuild_wrapper_subclass
        return torch._tensor._rebuild_from_type_v2, (rebuild, cls, arguments, state)

    cls = type(kind, (), {"__module__": "torchao.quantization", "__reduce_ex__": reduced})
    module = types.ModuleType("torchao.quantization")
    setattr(module, kind, cls)
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", module)
    return dequantized(tmp_path, {"a.weight": cls()})


def test_a_whole_object_of_torchao_is_read(monkeypatch, tmp_path):
    made = of_torchao(monkeypatch, tmp_path)
    assert torch.equal(made["a.weight"], torch.full((4, 8), 3.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": None},
        {"shape": (8, 4)},
        {"qdata": torch.ones(4, 8)},
        {"qdata": torch.ones(4, 8, dtype=torch.bool)},
        {"act_pre_scale": torch.ones(8)},
        {"kind": "MXTensor", "qdata": torch.ones(8, dtype=torch.int8), "shape": (8,)},
        {"kind": "MXTensor", "qdata": torch.ones((), dtype=torch.int8), "shape": ()},
    ],
)
def test_an_object_of_torchao_that_does_not_fit_is_refused(monkeypatch, tmp_path, changes):
    with pytest.raises((MalformedCheckpoint, RefusedObject), match=r"a\.weight"):
        of_torchao(monkeypatch, tmp_path, **changes)


def test_torchao_with_a_scale_of_inputs_is_refused_in_safetensors_too(tmp_path):
    data = {"_type": "Int8Tensor", "_data": {"block_size": [1, 8]}}
    data["_tensor_data_names"] = ["qdata", "scale", "act_pre_scale"]
    tensors = {f"_w_{name}": INT8[name] for name in ("qdata", "scale")}
    path = tmp_path / "in.safetensors"
    save_file(tensors | {"_w_act_pre_scale": torch.ones(8)}, path, {"w": json.dumps(data)})
    with pytest.raises(RefusedObject, match="act_pre_scale"):
        convert_checkpoint(path, tmp_path / "out.safetensors", dequantize=True)


@pytest.mark.parametrize("name", ["dtype", "orig_dtype"])
def test_values_of_torchao_have_the_type_that_it_says(name, tmp_path):
    told = {"block_size": [1, 8], name: {"_type": "torch.dtype", "_data": "float16"}}
    said = {"w": json.dumps({"_type": "Int8Tensor", "_data": told})}
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({f"_w_{part}": INT8[part] for part in ("qdata", "scale")}, path, said)
    convert_checkpoint(path, out, dequantize=True)
    assert torch.equal(load_file(out)["w"], torch.full((4, 8), 3.0).half())
    assert load_file(out)["w"].dtype is torch.half


# --------------------------------------------------------------------------------- time and memory


def test_an_expanded_index_is_not_read_number_by_number(tmp_path):
    """67 million groups of a file of 2 kB took half a minute."""
    columns = 1 << 26
    word = torch.zeros(1, dtype=torch.int32)
    tensors = {
        "a.weight_packed": word.expand(2, columns // 8),
        "a.weight_scale": torch.ones(2, 1),
        "a.weight_shape": torch.tensor([2, columns]),
        "a.weight_g_idx": word.expand(columns),
    }
    with pytest.raises(RefusedObject, match="g_idx is read for"):
        dequantized(tmp_path, tensors)


def for_modules(pattern: str, folder: Path) -> Path:
    """A checkpoint whose config says of which modules its codes are by this pattern."""
    path = copied("ct_pack_int4_asym", folder / "in")
    config = json.loads(path.with_name("config.json").read_text())
    for item in config["quantization_config"]["config_groups"].values():
        item["targets"] = [f"re:{pattern}"]
    path.with_name("config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", r"(a*)\1\1$", ".*a.*a.*a.*a.*a.*a.*b", "(a|a)" * 40, "a?" * 40,
        f"a{{1,{'9' * 5000}}}",
    ],
)  # fmt: skip
def test_a_pattern_of_a_config_that_may_take_for_ever_is_refused(tmp_path, pattern):
    path = for_modules(pattern, tmp_path)
    with pytest.raises(RefusedObject, match="for ever"):
        convert_checkpoint(path, tmp_path / "out.safetensors", dequantize=True)


@pytest.mark.parametrize("pattern", ["(" * 1900 + ")" * 1900, "a{99999999999999999999}"])
def test_a_pattern_of_a_config_that_is_none_names_no_module(tmp_path, pattern):
    path = for_modules(pattern, tmp_path)
    assert convert_checkpoint(path, tmp_path / "out.safetensors", dequantize=True)


def test_the_metadata_of_comfyui_are_not_parsed_layer_by_layer(tmp_path, monkeypatch):
    layers = {f"b.{number}": {"format": "float8_e4m3fn"} for number in range(20)}
    tensors = {f"{name}.weight": fp8(2, 2) for name in layers}
    tensors |= {f"{name}.weight_scale": torch.ones(()) for name in layers}
    path, seen, loads = tmp_path / "in.safetensors", [], json.loads
    save_file(tensors, path, {"_quantization_metadata": json.dumps({"layers": layers})})
    monkeypatch.setattr(
        json, "loads", lambda text, **rest: seen.append(text) or loads(text, **rest)
    )
    convert_checkpoint(path, tmp_path / "out.safetensors", dequantize=True)
    assert len([text for text in seen if "layers" in str(text)[:10]]) < 5


# ------------------------------------------------------------------------------- the config beside


def test_a_config_may_hold_what_python_writes(tmp_path):
    """Mamba 2 has a limit of ``Infinity``, which strict readers of JSON refuse."""
    source = tmp_path / "in"
    copied("fp8_block_deepseek", source)
    config = json.loads((source / "config.json").read_text())
    config["time_step_limit"] = [0.0, float("inf")]
    (source / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    convert_checkpoint(source, out, to="safetensors", dequantize=True, dtype="f32", with_files=True)
    told = json.loads((out / "config.json").read_text())
    assert told["time_step_limit"] == config["time_step_limit"]
    assert "quantization_config" not in told and told["torch_dtype"] == "float32"


def test_a_config_may_hold_half_of_a_surrogate_pair(tmp_path):
    """JSON can say one by an escape, which UTF-8 cannot; other letters stay as they are."""
    source = tmp_path / "in"
    copied("fp8_block_deepseek", source)
    config = json.loads((source / "config.json").read_text())
    for text in ("\ud800", "é"):
        (source / "config.json").write_text(json.dumps(config | {"about": text}))
        out = tmp_path / f"out{len(text.encode('utf-8', 'replace'))}"
        convert_checkpoint(source, out, to="safetensors", dequantize=True, with_files=True)
        raw = (out / "config.json").read_bytes()
        assert json.loads(raw)["about"] == text
    assert "é".encode() in raw


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


# ---------------------------------------------------------------------------- looked at through it


def test_who_looks_at_values_takes_those_of_quantised_weights(tmp_path):
    sample = NUMBERS / "gptq4_act_v1" / "model.safetensors"
    key = "model.layers.0.mlp.down_proj.weight"
    plain = tmp_path / "plain.safetensors"
    convert_checkpoint(sample, plain, dequantize=True)
    exact = load_file(plain)[key]
    assert run("diff", sample, plain, cwd=tmp_path).exit == 1
    assert run("diff", sample, plain, "--dequantize", cwd=tmp_path).exit == 0
    assert run("diff", sample, plain, "--dequantize", "--html", "p.html", cwd=tmp_path).exit == 0
    told = json.loads(run("stats", sample, "--dequantize", "--json", cwd=tmp_path).out)
    [largest] = [item["max"] for item in told["tensors"] if item["name"] == key]
    assert largest == exact.max().item()
    shown = json.loads(run("show", sample, key, "[3]", "--dequantize", "--json", cwd=tmp_path).out)
    assert shown["tensors"][0]["values"] == exact[3].tolist()
    done = run("stats", plain, "--dequantize", cwd=tmp_path)
    assert done.exit == 1 and "nothing in it is quantised" in done.err


def test_a_mean_with_quantised_weights_is_that_of_their_values(tmp_path):
    sample = NUMBERS / "gptq4_act_v1" / "model.safetensors"
    other = {key: value.half() + 1 for key, value in expected_of(sample).items()}
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(RefusedObject, match="need their scale"):
        average_checkpoints([sample, sample], tmp_path / "no.safetensors")
    sources, out = [sample, tmp_path / "other.safetensors"], tmp_path / "out.safetensors"
    average_checkpoints(sources, out, dequantize=True, verify=True)
    for key, value in load_file(out).items():
        one = expected_of(sample)[key].double()  # it is rounded in the mean alone
        assert is_same(value, ((one + other[key].double()) / 2).half()), key


def nvfp4(rows: int, columns: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    scale = torch.rand(rows, columns // 16).to(torch.float8_e4m3fn)
    return {
        "x.weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        "x.weight_scale": scale,
        "x.weight_scale_2": torch.tensor(0.5),
    }


def test_two_layouts_of_nvfp4_under_the_same_names_are_asked_for(tmp_path):
    """Of 128 rows and 64 columns the scales in tiles have the shape of those in rows."""
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = nvfp4(128, 64)
    save_file(tensors, path)
    with pytest.raises(RefusedObject) as error:
        convert_checkpoint(path, out, dequantize=True)
    for word in ("modelopt-nvfp4", "comfy-nvfp4"):
        assert f"--scheme {word}" in (error.value.hint or "")
    octets = tensors["x.weight"]
    low = torch.stack([octets & 15, octets >> 4], -1).reshape(128, 64)
    high = torch.stack([octets >> 4, octets & 15], -1).reshape(128, 64)
    grid = tensors["x.weight_scale"].float()
    tiles = grid.reshape(1, 1, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(128, 4)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    for word, codes, scale in (("modelopt-nvfp4", low, grid), ("comfy-nvfp4", high, tiles)):
        convert_checkpoint(path, out, dequantize=True, scheme=word, dtype="f32", force=True)
        spread = (scale * 0.5).repeat_interleave(16, 1)
        assert is_same(load_file(out)["x.weight"], values[codes.long()] * spread), word


def test_a_layout_of_nvfp4_that_only_one_has_is_not_asked_for(tmp_path):
    save_file(nvfp4(96, 64), tmp_path / "in.safetensors")
    convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize=True)


def test_a_config_that_lists_a_quantised_module_as_plain_is_told_of(tmp_path):
    path = copied("fp8_block_deepseek", tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "self_attn.o_proj"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    done = convert_checkpoint(path, tmp_path / "out.safetensors", dequantize=True)
    [note] = [note for note in done.plan.notes if "not quantised, and they are" in note]
    assert "o_proj" in note and "q_a_proj" not in note


def test_scales_in_tiles_that_are_cut_in_both_directions(tmp_path):
    """Their tiles are gathered of what is gathered itself."""
    rows, columns = 112, 80
    tensors = nvfp4(rows, columns)
    grid = torch.rand(128, 8).to(torch.float8_e4m3fn)
    tiles = grid.float().reshape(1, 4, 32, 2, 4).permute(0, 3, 2, 1, 4).contiguous()
    tensors["x.weight_scale"] = tiles.reshape(128, 8).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    convert_checkpoint(tmp_path / "in.safetensors", out, dequantize=True, dtype="f32", verify=True)
    octets = tensors["x.weight"]
    codes = torch.stack([octets >> 4, octets & 15], -1).reshape(rows, columns)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    spread = (grid.float()[:rows, :5] * 0.5).repeat_interleave(16, 1)
    assert is_same(load_file(out)["x.weight"], torch.cat([values, -values])[codes.long()] * spread)


def test_float8_without_scales_in_another_state_dict_is_told_of(tmp_path):
    codes = torch.ones(2, 2).to(torch.float8_e4m3fn)
    model = {"a.weight": codes, "a.weight_scale": torch.ones(1)}
    torch.save({"state_dict": model, "ema": {"a.weight": codes.clone()}}, tmp_path / "in.pt")
    done = convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", dequantize=True)
    assert any("stay as they are" in note and "ema.a.weight" in note for note in done.plan.notes)
    made = torch.load(tmp_path / "out.pt")
    assert made["state_dict"]["a.weight"].dtype is torch.bfloat16
    assert made["ema"]["a.weight"].dtype is torch.float8_e4m3fn


def test_the_zeros_of_auto_round_are_asked_for(tmp_path):
    path = copied("gptq4_noact_v1", tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "auto-round"
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedObject, match="stored less one"):
        convert_checkpoint(path, tmp_path / "out.safetensors", dequantize=True)


# --------------------------------------------------------------- what a framework would not read


def comfy(kind: str = "float8_e4m3fn", **parts: torch.Tensor) -> tuple:
    """Tensors of a layer that ComfyUI's metadata name."""
    said = {"_quantization_metadata": json.dumps({"layers": {"a": {"format": kind}}})}
    beside = {"weight": fp8(4, 4), "weight_scale": torch.ones(()), **parts}
    return {f"a.{name}": value for name, value in beside.items()}, said, {}


def torchao(kind: str = "Int8Tensor", told: dict | None = None, **parts: torch.Tensor) -> tuple:
    """Tensors of an object of torchao, as `flatten_tensor_state_dict` names them."""
    data = {"_type": kind, "_data": {"block_size": [1, 8]} if told is None else told}
    beside = {"qdata": INT8["qdata"], "scale": INT8["scale"], **parts}
    return {f"_w_{name}": value for name, value in beside.items()}, {"w": json.dumps(data)}, {}


def of_config(method: str, tensors: dict[str, torch.Tensor], **config) -> tuple:
    """Tensors beside a config that names their quantisation."""
    named = {f"a.{name}": value for name, value in tensors.items()}
    return named, {}, {"quantization_config": {"quant_method": method, **config}}


def of_gptq(words: int = 1, outputs: int = 8, **config) -> tuple:
    return of_config(
        "gptq",
        {
            "qweight": torch.zeros(1, outputs, dtype=torch.int32),
            "qzeros": torch.zeros(1, words, dtype=torch.int32),
            "scales": torch.ones(1, outputs, dtype=torch.float16),
        },
        **{"bits": 4, "group_size": 8, **config},
    )


def packed(bits: int = 4, **parts: torch.Tensor) -> tuple:
    """Eight columns of compressed-tensors, in a word of each row."""
    beside = {
        "weight_packed": torch.zeros(2, 1, dtype=torch.int32),
        "weight_scale": torch.ones(2, 1),
        "weight_shape": torch.tensor([2, 8]),
        **parts,
    }
    groups = {"config_groups": {"g": {"weights": {"num_bits": bits}}}}
    return of_config("compressed-tensors", beside, **groups)


BYTES = torch.zeros(4, 8, dtype=torch.uint8)
EXPERTS = {
    "a.up": torch.zeros(2, 32, 16, dtype=torch.uint8),
    "a.up_weight_scale": torch.ones(2, 32, 2).to(torch.float8_e4m3fn),
}
NOT_READ = {
    "ComfyUI: not an object": (
        comfy()[0] | {"a.comfy_quant": torch.tensor([*b"[1]"], dtype=torch.uint8)}, {}, {},
        "metadata, which are not a JSON object",
    ),
    "ComfyUI: a scale of inputs": (
        *comfy(pre_quant_scale=torch.ones(4)), "has a pre_quant_scale, which belongs to the inputs",
    ),
    "ComfyUI: codes of another type": (
        *comfy("mxfp8", weight=BYTES), r"is \[4, 8\] of uint8, which is not mxfp8",
    ),
    "ComfyUI: scales that are not in tiles": (
        *comfy("mxfp8", weight=fp8(32, 32), weight_scale=BYTES.view(32, 1)),
        r"has scales of \[32, 1\], which have to be \[128, 4\]",
    ),
    "torchao: no size of blocks": (*torchao(told={}), "has no block_size that fits it"),
    "torchao: blocks of another number of dimensions": (
        *torchao(told={"block_size": [8]}), "has no block_size that fits it",
    ),
    "torchao: blocks of nothing": (
        *torchao(told={"block_size": [0, 8]}), r"has blocks of \[0, 8\], which are not",
    ),
    "torchao: a class that is not known": (
        *torchao("Int4TilePackedTo4dTensor"), "is Int4TilePackedTo4dTensor of torchao, whose order",
    ),
    "torchao: too few scales for whole tiles": (
        *torchao("MXTensor", {"is_swizzled_scales": True, "block_size": 32},
                 qdata=fp8(4, 32), scale=BYTES.view(32, 1)),
        r"has swizzled scales of \[32, 1\], not \[128, 4\]",
    ),
    "bitsandbytes: too few scales of rows": (
        *of_config("bitsandbytes", {"weight": INT8["qdata"], "SCB": torch.ones(3)}),
        r"is \[4, 8\], which scales of \[3\] do not fit",
    ),
    "bitsandbytes: the order of a kernel": (
        *of_config("bitsandbytes", {"weight": INT8["qdata"], "SCB": torch.ones(4),
                                    "weight_format": torch.tensor(2, dtype=torch.uint8)}),
        "int8 of bitsandbytes in the order of a kernel",
    ),
    "bitsandbytes: an order that is not a number": (
        *of_config("bitsandbytes", {"weight": INT8["qdata"], "SCB": torch.ones(4),
                                    "weight_format": torch.tensor(0.0)}),
        "is float32, not integers",
    ),
    "compressed-tensors: a word too many": (
        *packed(weight_packed=torch.zeros(2, 2, dtype=torch.int32)),
        "holds 8 codes of 4 bits in a row, which take 1 words, and has 2",
    ),
    "compressed-tensors: a group that is not there": (
        *packed(weight_g_idx=torch.ones(8, dtype=torch.int32)), "weight_g_idx",
    ),
    "compressed-tensors: scales of fewer dimensions": (
        *of_config("compressed-tensors",
                   {"weight_packed": BYTES, "weight_scale": torch.ones(4).to(torch.float8_e4m3fn)}),
        r"is \[4, 8\], which scales of \[4\] do not fit",
    ),
    "GPTQ: the order of a kernel": (
        *of_gptq(checkpoint_format="marlin"), "is packed for the kernel marlin",
    ),
    "GPTQ: bits that its zeros do not have": (
        *of_gptq(words=3), "has zeros in 3 words for 8 outputs: how many bits is not told",
    ),
    "AWQ: the order of a kernel": (
        *of_config("awq", {
            "qweight": torch.zeros(8, 1, dtype=torch.int32),
            "qzeros": torch.zeros(1, 1, dtype=torch.int32),
            "scales": torch.ones(1, 8, dtype=torch.float16)}, version="gemv", bits=4),
        "is AWQ packed for the kernel 'gemv'",
    ),
    "MLX: scales for no mode": (
        *of_config("", {"weight": torch.zeros(2, 3, dtype=torch.uint32),
                        "scales": torch.zeros(2, 1, dtype=torch.uint8)}, mode="mxfp4"),
        "has 3 words and 1 scales of uint8 in a row, which is not a mode of MLX",
    ),
    "ModelOpt: scales for neither order of experts": (
        EXPERTS | {"a.up_weight_scale": torch.ones(2, 3, 3).to(torch.float8_e4m3fn),
                   "a.up_weight_scale_2": torch.ones(())}, {}, {},
        r"is \[2, 32, 16\], which scales of \[2, 3, 3\] do not fit",
    ),
    "ModelOpt: a second scale for each expert": (
        EXPERTS | {"a.up_weight_scale_2": torch.ones(2)}, {}, {},
        "has a second scale for each expert, in an order that is not known",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_READ)
def test_codes_whose_values_nothing_tells_are_refused(case, tmp_path):
    tensors, said, config, message = NOT_READ[case]
    save_file(tensors, tmp_path / "in.safetensors", said or None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((MalformedCheckpoint, RefusedObject), match=message):
        load_portable(tmp_path / "in.safetensors", dequantize=True)


def values_of(tmp_path: Path, tensors: dict, said: dict, config: dict) -> torch.Tensor:
    """The only weight that these tensors are."""
    save_file(tensors, tmp_path / "in.safetensors", said or None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (values,) = load_portable(tmp_path / "in.safetensors", dequantize=True, dtype="f32").values()
    return values


def test_scales_of_torchao_in_tiles(tmp_path):
    """Its `to_blocked`: tiles of 128 x 4, whose rows stand 32 apart."""
    codes, powers = fp8(112, 160), torch.randint(120, 134, (128, 8), dtype=torch.uint8)
    tiles = powers.reshape(1, 4, 32, 2, 4).permute(0, 3, 2, 1, 4).flatten()
    told = {"is_swizzled_scales": True, "block_size": 32}
    found = values_of(tmp_path, *torchao("MXTensor", told, qdata=codes, scale=tiles))
    spread = powers[:112, :5].repeat_interleave(32, 1).double() - 127
    assert torch.equal(found, (codes.double() * 2.0**spread).float())


def test_columns_in_act_order_have_the_scale_of_their_group(tmp_path):
    """As `dequantize` of compressed-tensors takes it by ``g_idx``."""
    codes, scale = torch.randint(0, 16, (2, 8)), torch.tensor([[0.5, 2.0], [4.0, 1.0]])
    words = (codes << 4 * torch.arange(8)).sum(1, keepdim=True)
    order = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1], dtype=torch.int32)
    parts = {"weight_packed": words.to(torch.int32), "weight_scale": scale, "weight_g_idx": order}
    found = values_of(tmp_path, *packed(**parts))
    assert torch.equal(found, (codes - 8) * scale[:, order.long()])
    (item,) = inspect_checkpoint(tmp_path / "in.safetensors").quantized
    assert item.scheme.endswith(", act order")


def test_codes_of_a_byte_have_zeros_too(tmp_path):
    zeros = torch.tensor([[-3], [0], [1], [100]], dtype=torch.int8)
    parts = {"weight": INT8["qdata"], "weight_zero_point": zeros, "weight_scale": torch.rand(4, 1)}
    found = values_of(tmp_path, *of_config("compressed-tensors", parts))
    assert torch.equal(found, (INT8["qdata"].float() - zeros) * parts["weight_scale"])


# ------------------------------------------------------------------------------- zeros of GPTQ v1


def zeros_told(sample: Path) -> str:
    with open_checkpoint(sample, edits=[Dequantize()]) as checkpoint:
        return " ".join(checkpoint.notes)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("at", [0, 10, 31, 63])
def test_a_zero_that_wraps_is_told_of(tmp_path, bits, at):
    sample = copied(f"gptq{bits}_act_v1", tmp_path / "sample")
    tensors = load_file(sample)
    key = part(tensors, "qzeros")
    tensors[key].zero_()
    save_file(tensors, sample)
    assert "all ones" not in zeros_told(sample)
    stream = (1 << bits) - 1 << bits * at  # end to end from the lowest bit on
    raw = bytearray(stream.to_bytes(4 * tensors[key].shape[1], "little"))
    tensors[key][-1] = torch.frombuffer(raw, dtype=torch.int32)
    save_file(tensors, sample)
    codes = key.replace("qzeros", "qweight")
    assert f"reads the next zero wrong too: {codes}" in zeros_told(sample)


@pytest.mark.parametrize("folder", ["gptq4_act_v2", "gptq3_act_v2", "awq_gemm"])
def test_zeros_that_are_stored_as_they_are_do_not_wrap(tmp_path, folder):
    sample = copied(folder, tmp_path / "sample")
    tensors = load_file(sample)
    tensors[part(tensors, "qzeros")].fill_(-1)
    save_file(tensors, sample)
    assert "all ones" not in zeros_told(sample)


def test_what_fills_up_the_last_word_of_zeros_is_none(tmp_path):
    """Of 4 bits, 12 outputs take a word and a half."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensors = {
        "q.qweight": torch.zeros(1, 12, dtype=torch.int32),
        "q.qzeros": torch.tensor([[0, -65536]], dtype=torch.int32),
        "q.scales": torch.ones(1, 12, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert "all ones" not in zeros_told(tmp_path / "model.safetensors")
    tensors["q.qzeros"][0, 1] = 15
    save_file(tensors, tmp_path / "model.safetensors")
    assert "all ones" in zeros_told(tmp_path / "model.safetensors")


# ------------------------------------------------------------------- what the rules leave out


def unknown_beside_known() -> dict[str, torch.Tensor]:
    """An order of codes that is not known (ExLlama 3), beside fp8."""
    return {
        "a.trellis": torch.ones(1, 1, 4, dtype=torch.int16),
        "a.suh": torch.ones(8, dtype=torch.float16),
        "b.weight": fp8(4, 8),
        "b.weight_scale": torch.full((1,), 0.5),
    }


@pytest.mark.parametrize(
    "rules", [{"exclude": "a.*"}, {"include": "b.*"}, {"exclude": "x.a.*", "add_prefix": "x."}]
)
def test_what_is_left_out_need_not_be_known(tmp_path, rules):
    save_file(unknown_beside_known(), tmp_path / "in.safetensors")
    with pytest.raises(RefusedObject, match="leave it out") as error:
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "no.pt", dequantize=True)
    assert "(--exclude)" in (error.value.hint or "")
    made = tmp_path / "out.safetensors"
    convert_checkpoint(tmp_path / "in.safetensors", made, dequantize=True, verify=True, **rules)
    (values,) = load_file(made).values()
    wanted = (unknown_beside_known()["b.weight"].float() * 0.5).to(torch.bfloat16)
    assert is_same(values, wanted)
    loaded = load_portable(tmp_path / "in.safetensors", edits=[Dequantize()], **rules)
    assert is_same(next(iter(loaded.values())), wanted) and len(loaded) == 1


def test_a_part_of_what_is_left_out_is_not_written_alone(tmp_path):
    tensors = unknown_beside_known() | {
        "c.qweight": torch.ones(1, 8, dtype=torch.int32),
        "c.qzeros": torch.ones(1, 1, dtype=torch.int32),
        "c.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    with pytest.raises(RefusedObject, match=r"c\.qzeros: is int32 without what it is read with"):
        load_portable(
            tmp_path / "in.safetensors", edits=[Dequantize()], exclude=["a.*", "c.qweight"]
        )
    load_portable(tmp_path / "in.safetensors", edits=[Dequantize()], exclude=["a.*", "c.*"])


def test_a_type_of_gguf_that_is_not_known_can_be_left_out(tmp_path):
    raw = bytearray((NUMBERS / "gguf" / "all_types.gguf").read_bytes())
    expected = load_file(NUMBERS / "gguf" / "all_types.expected.safetensors")
    name = b"t.Q3_K"
    kind = raw.index(name) + len(name) + 4 + 8 * len(expected[name.decode()].shape)
    assert raw[kind] == 11
    raw[kind] = 21  # IQ3_S, whose blocks are as large
    (tmp_path / "other.gguf").write_bytes(raw)
    out = tmp_path / "out.safetensors"
    with pytest.raises(RefusedObject, match="is IQ3_S of GGUF, whose values cannot be read here"):
        convert_checkpoint(tmp_path / "other.gguf", out, dequantize=True)
    convert_checkpoint(tmp_path / "other.gguf", out, dequantize=True, exclude="t.Q3*")
    made = load_file(out)
    assert set(made) == set(expected) - {"t.Q3_K"}
    assert all(is_same(value, expected[key]) for key, value in made.items())


def test_the_summary_says_what_codes_became(tmp_path):
    sample = copied("gptq4_act_v1", tmp_path / "sample")
    done = run(
        "convert", sample, tmp_path / "a.safetensors", "--dequantize", "--verify", cwd=tmp_path
    )
    lines = [" ".join(line.split()) for line in done.err.splitlines()]
    assert "dtype int32 codes → float16 (1 tensor)" in lines
    assert any("2 tensors read back, equal to the source, dequantised; " in line for line in lines)
    done = run(
        "convert",
        sample,
        tmp_path / "b.pt",
        "--dequantize",
        "--dtype",
        "f32",
        "--verify",
        cwd=tmp_path,
    )
    lines = [" ".join(line.split()) for line in done.err.splitlines()]
    assert "dtype int32 codes → float32 (1 tensor)" in lines
    assert "dtype float16 → float32 (1 tensor)" in lines  # of the norm
    assert any("equal to the source, dequantised and cast to float32" in line for line in lines)
    plan = convert_checkpoint(sample, tmp_path / "c.pt", dequantize=True).plan
    assert plan.casts == {("int32 codes", "float16"): 1}


def test_several_schemes_are_one_note(tmp_path):
    sample = NUMBERS / "comfy_quant" / "new.safetensors"
    plan = convert_checkpoint(sample, tmp_path / "out.pt", dequantize=True).plan
    (note,) = [note for note in plan.notes if "dequantised" in note]
    assert note.startswith("4 weights dequantised: ") and note.count("(1)") == 4


@pytest.mark.parametrize("shape", [(4, 0), (0, 8), (0, 0)], ids=str)
@pytest.mark.parametrize("like", ["rows", "columns", "one", "none", "grid"])
def test_a_weight_without_elements_is_decoded_to_one(tmp_path, shape, like):
    """Whatever its scales: w * s, broadcast as torch does it, is empty too."""
    scales = {
        "rows": (shape[0],),
        "columns": (shape[0], 1),
        "one": (1,),
        "none": (),
        "grid": tuple(-(-size // 128) for size in shape),
    }
    tensors = {"q.weight": fp8(*shape), "q.weight_scale": torch.ones(scales[like])}
    made = dequantized(tmp_path, tensors | {"k.bias": torch.ones(1)}, verify=True)
    assert made["q.weight"].shape == shape and made["q.weight"].dtype is torch.float32
    assert set(made) == {"k.bias", "q.weight"}


@pytest.mark.parametrize("rows, columns", [(4, 0), (0, 8)])
def test_packed_weights_without_elements_are_decoded(tmp_path, rows, columns):
    int32 = torch.int32
    tensors = {
        "a.weight_packed": torch.zeros(rows, -(-columns // 8), dtype=int32),
        "a.weight_scale": torch.ones(rows, 1),
        "a.weight_shape": torch.tensor([rows, columns]),
        "b.weight": torch.zeros(rows, columns, dtype=torch.int8),
        "b.SCB": torch.ones(rows),
        "c.bias": torch.ones(1),
    }
    quantised = {"config_groups": {"g": {"weights": {"num_bits": 4}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    made = dequantized(tmp_path, tensors)
    assert made["a.weight"].shape == made["b.weight"].shape == (rows, columns)


# ------------------------------------------------------------------- rows of other writers


def mxfp4_sample() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Codes and scales of compressed-tensors, and what they become."""
    sample = NUMBERS / "ct_mxfp4" / "model.safetensors"
    tensors, expected = load_file(sample), expected_of(sample)
    codes, scale = (tensors[part(tensors, ending)] for ending in ("weight_packed", "weight_scale"))
    return {"q.weight": codes, "q.weight_scale": scale}, expected[part(expected, "proj.weight")]


@pytest.mark.parametrize("types", ["uint8", "their own"])
def test_mxfp4_of_quark_is_what_compressed_tensors_makes_of_it(tmp_path, types):
    """Quark 0.13 packs as compressed-tensors does (`Pack_fp4`, `to_e8m0_uint8`), as weight."""
    tensors, expected = mxfp4_sample()
    if types != "uint8":
        tensors["q.weight"] = tensors["q.weight"].view(torch.float4_e2m1fn_x2)
        tensors["q.weight_scale"] = tensors["q.weight_scale"].view(torch.float8_e8m0fnu)
    config = {"quantization_config": {"quant_method": "quark"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_same(dequantized(tmp_path, tensors, verify=True)["q.weight"], expected)


def nvfp4_sample() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and second scale of ModelOpt, and what they become."""
    sample = NUMBERS / "nvfp4_modelopt" / "model.safetensors"
    tensors, expected = load_file(sample), expected_of(sample)
    key = part(tensors, "weight_scale_2").removesuffix("_scale_2")
    parts = (tensors[key], tensors[f"{key}_scale"], tensors[f"{key}_scale_2"])
    return (*parts, expected[key])


@pytest.mark.parametrize("is_turned", [False, True])
def test_fused_experts_of_modelopt_in_nvfp4(tmp_path, is_turned):
    """Those of Llama 4 and gpt-oss are turned after they were packed; scales tell it."""
    codes, scale, second, expected = nvfp4_sample()
    flipped = (codes.flip(0), scale.view(torch.uint8).flip(0).view(scale.dtype), expected.flip(0))
    pairs = zip((codes, scale, expected), flipped, strict=True)
    fused = [torch.stack([part.view(torch.uint8) for part in pair]) for pair in pairs]
    fused = [fused[0], fused[1].view(scale.dtype), torch.stack([expected, expected.flip(0)])]
    if is_turned:
        fused = [part.transpose(-2, -1).contiguous() for part in fused]
    tensors = {
        "e.gate_up_proj": fused[0],
        "e.gate_up_proj_weight_scale": fused[1],
        "e.gate_up_proj_weight_scale_2": second,
        "e.gate_up_proj_input_scale": torch.tensor(0.5),
        "e.gate_up_proj_bias": torch.ones(2, 4),
    }
    made = dequantized(tmp_path, tensors, verify=True)
    assert set(made) == {"e.gate_up_proj", "e.gate_up_proj_bias"}
    assert is_same(made["e.gate_up_proj"], fused[2], of_sign=False)


@pytest.mark.parametrize(
    ("of_scale", "seen"),
    [((), ()), ((1,), (1,)), ((3,), (3, 1, 1)), ((3, 4), (3, 4, 1)), ((3, 8), (3, 1, 8))],
    ids=str,
)
def test_fused_experts_of_modelopt_in_fp8(tmp_path, of_scale, seen):
    scale = (torch.arange(torch.Size(of_scale).numel()) + 1.0).reshape(of_scale) / 8
    tensors = {"e.down_proj": fp8(3, 4, 8), "e.down_proj_weight_scale": scale}
    made = dequantized(tmp_path, tensors, verify=True)
    assert list(made) == ["e.down_proj"]
    assert is_same(made["e.down_proj"], fp8(3, 4, 8).float() * scale.reshape(seen))


def test_square_experts_with_a_scale_for_rows_or_columns_are_refused(tmp_path):
    tensors = {"e.down_proj": fp8(3, 4, 4), "e.down_proj_weight_scale": torch.ones(3, 4)}
    with pytest.raises(RefusedObject, match="is square, and down_proj_weight_scale does not say"):
        dequantized(tmp_path, tensors)


def test_codes_of_fused_experts_are_not_cast(tmp_path):
    save_file(
        {"e.up": fp8(2, 4, 4), "e.up_weight_scale": torch.ones(())}, tmp_path / "in.safetensors"
    )
    with pytest.raises(RefusedObject, match=r"codes that need their scale e\.up_weight_scale"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.pt", dtype="bf16")


def test_what_is_true_of_all_sources_is_said_once(tmp_path):
    sample = NUMBERS / "gptq4_act_v1" / "model.safetensors"
    done = average_checkpoints([sample, sample], tmp_path / "out.safetensors", dequantize=True)
    assert len(set(done.plan.notes)) == len(done.plan.notes)
    assert sum("1 weight dequantised" in note for note in done.plan.notes) == 1


def test_what_goes_with_the_codes_is_counted_by_its_names(tmp_path):
    weights = {f"{at}.weight": fp8(4, 8) for at in range(9)}
    scales = {f"{at}.weight_scale": torch.ones(1) for at in range(9)}
    save_file(weights | scales | {"0.input_scale": torch.ones(1)}, tmp_path / "in.safetensors")
    plan = convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "o.pt", dequantize=True).plan
    (note,) = [note for note in plan.notes if note.startswith("left out")]
    assert note.endswith(" without codes: weight_scale (9), input_scale")


def test_a_scheme_that_no_weight_has_is_refused(tmp_path):
    sample = NUMBERS / "mxfp4_gptoss" / "model.safetensors"
    with pytest.raises(OptionRefused, match=r"gptq-v2.* is not that of a weight in it") as error:
        convert_checkpoint(sample, tmp_path / "o.pt", dequantize=True, scheme="gptq-v2")
    assert "its weights are mxfp4 experts, groups of 32" in (error.value.hint or "")


def test_who_looks_at_codes_is_told_how_to_look_at_values(tmp_path):
    sample = copied("gptq4_act_v1", tmp_path / "sample")
    note = "1 weight is codes beside scales; --dequantize looks at their values"
    assert note in run("stats", sample, cwd=tmp_path).err
    assert "beside scales" not in run("stats", sample, "--dequantize", cwd=tmp_path).err
    convert_checkpoint(sample, tmp_path / "plain.safetensors", dequantize=True)
    done = run("diff", sample, "plain.safetensors", cwd=tmp_path)
    assert f"A: {note}" in done.out and "B: 1 weight" not in done.out
    assert "--ignore-dtype" not in done.out
    same = run("diff", sample, "plain.safetensors", "--dequantize", cwd=tmp_path)
    assert same.exit == 0 and "beside scales" not in same.out


@pytest.mark.trust
def test_many_weights_take_no_more_time_each_than_few(tmp_path):
    """Sets made anew for each tensor took an hour for the 90,000 of DeepSeek-V3."""

    def seconds(count: int) -> float:
        weights = {f"{at}.weight": fp8(2, 2) for at in range(count)}
        scales = {f"{at}.weight_scale": torch.ones(1) for at in range(count)}
        save_file(weights | scales, tmp_path / "in.safetensors")
        with open_checkpoint(tmp_path / "in.safetensors") as checkpoint:
            begin = time.thread_time()
            Dequantize()(checkpoint)
            return time.thread_time() - begin

    # the least of three, for the machine may be busy
    few, many = (min(seconds(count) for _ in range(3)) for count in (400, 3200))
    assert many < 24 * few  # eight times as many; in squares 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_in_another_order_are_rounded_once_too(dtype, tmp_path):
    """A transpose behind the decoding: the type asked for is made of float32, not of the bfloat16
    that stands between.
    """
    sample = NUMBERS / "fp8_block_deepseek"
    expected = expected_of(sample / "model.safetensors")
    key = "model.layers.0.self_attn.o_proj.weight"
    rules = [{"from": key, "to": "turned", "operations": [{"transpose": [0, 1]}]}]
    options = {"dequantize": True, "dtype": dtype, "rules": rules}
    convert_checkpoint(sample, tmp_path / "out.safetensors", verify=True, **options)
    turned = expected[key].T.to(dtype)
    assert not torch.equal(turned, expected[key].T.bfloat16().to(dtype))
    assert torch.equal(load_file(tmp_path / "out.safetensors")["turned"], turned)
    assert torch.equal(load_portable(sample, **options)["turned"], turned)
