"""Weights that are codes beside a scale: never cast, told by doctor, copied as they are.

The tensors have the keys, types and shapes of each producer's layout; none of the producers is
installed for that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import (
    CheckpointError,
    KeyRules,
    average,
    convert_checkpoint,
    diagnose,
    edit,
    load_into,
    load_portable,
    merge,
    open_checkpoint,
    save_portable,
)
from ckptconv.support.errors import RefusedObject
from ckptconv.tensors.scaled_weights import find_scaled
from helpers import oracle
from helpers.program import assert_one_error, run

FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
Tree = dict[str, torch.Tensor]


def codes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = (
        torch.arange(1, 1 + torch.Size(shape).numel() * dtype.itemsize, dtype=torch.int64).to(
            torch.uint8
        )
        % 100
    )
    return raw.view(dtype).reshape(shape)


def scale(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 0.375).to(dtype)


BYTES, INT32 = torch.uint8, torch.int32
FORMS: dict[str, tuple[Tree, str, str]] = {
    "DeepSeek": ({"q.weight": codes(FP8, 4, 8), "q.weight_scale_inv": scale(1, 1)}, "q.weight",
        "q.weight_scale_inv"),
    "DeepSeek's own": ({"q.scale": scale(1, 1, dtype=E8M0), "q.weight": codes(FP8, 4, 8)},
        "q.weight", "q.scale"),
    "fused experts": ({"e.up": codes(FP8, 2, 4, 8), "e.up_scale_inv": scale(2, 1, 1)}, "e.up",
        "e.up_scale_inv"),
    "compressed-tensors fp8": (
        {"q.input_scale": scale(1), "q.weight": codes(FP8, 4, 8), "q.weight_scale": scale(4, 1,
            dtype=torch.bfloat16)},
        "q.weight", "q.weight_scale"),
    "compressed-tensors int8": ({"q.weight": codes(torch.int8, 4, 8), "q.weight_scale": scale(4,
        1)},
        "q.weight", "q.weight_scale"),
    "compressed-tensors int4": (
        {"q.weight_packed": codes(INT32, 4, 2), "q.weight_scale": scale(4, 1, dtype=torch.bfloat16),
         "q.weight_shape": torch.tensor([4, 16])}, "q.weight_packed", "q.weight_scale"),
    "compressed-tensors NVFP4": (
        {"q.weight_global_scale": scale(1), "q.weight_packed": codes(BYTES, 4, 16),
            "q.weight_scale": codes(FP8, 4, 2)},
        "q.weight_packed", "q.weight_global_scale"),
    "ModelOpt NVFP4": (
        {"q.weight": codes(BYTES, 4, 16), "q.weight_scale": codes(FP8, 4, 2),
            "q.weight_scale_2": scale()},
        "q.weight", "q.weight_scale"),
    "gpt-oss MX": (
        {"e.up_proj_blocks": codes(BYTES, 2, 4, 16), "e.up_proj_scales": codes(BYTES, 2, 4)},
        "e.up_proj_blocks", "e.up_proj_scales"),
    "MX in its own types": (
        {"q.weight": codes(torch.float4_e2m1fn_x2, 4, 16), "q.weight_scale": scale(4, 1,
            dtype=E8M0)},
        "q.weight", "q.weight_scale"),
    "ComfyUI": (
        {"scaled_fp8": torch.empty(2, dtype=FP8), "q.weight": codes(FP8, 4, 8),
            "q.scale_weight": scale()},
        "q.weight", "q.scale_weight"),
    "ComfyUI, the mark alone": (
        {"model.scaled_fp8": torch.empty(0, dtype=FP8), "model.q.weight": codes(FP8, 4, 8)},
        "model.q.weight", "model.scaled_fp8"),
    "Mistral": ({"q.qscale_weight": scale(), "q.weight": codes(FP8, 4, 8)}, "q.weight",
        "q.qscale_weight"),
    "GPTQ": (
        {"q.g_idx": codes(INT32, 8), "q.qweight": codes(INT32, 1, 4), "q.qzeros": codes(INT32, 1,
            1),
         "q.scales": scale(1, 4, dtype=torch.half)}, "q.qweight", "q.scales"),
    "MLX": ({"q.biases": scale(4, 1), "q.scales": scale(4, 1), "q.weight": codes(torch.uint32, 4,
        2)}, "q.weight", "q.scales"),
    "bitsandbytes, 4 bits": (
        {"q.weight": codes(BYTES, 16, 1), "q.weight.absmax": scale(1),
            "q.weight.quant_map": scale(16),
         "q.weight.quant_state.bitsandbytes__nf4": codes(BYTES,
             90)}, "q.weight", "q.weight.absmax"),
    "bitsandbytes, stored as bfloat16": (
        {"q.weight": codes(torch.bfloat16, 8, 1), "q.weight.absmax": scale(1),
         "q.weight.quant_state.bitsandbytes__nf4": codes(BYTES,
             90)}, "q.weight", "q.weight.absmax"),
    "bitsandbytes, 8 bits": ({"q.SCB": scale(4), "q.weight": codes(torch.int8, 4, 8)}, "q.weight",
        "q.SCB"),
    "HQQ": ({"q.W_q": codes(BYTES, 4, 8), "q.scale": scale(4, 1), "q.zero": scale(4, 1)}, "q.W_q",
        "q.scale"),
    "quanto": ({"q.weight._data": codes(torch.int8, 4, 8), "q.weight._scale": scale(4, 1)},
        "q.weight._data", "q.weight._scale"),
    "torchao": ({"q._weight_qdata": codes(FP8, 4, 8), "q._weight_scale": scale(4, 1)},
        "q._weight_qdata", "q._weight_scale"),
    "ExLlama 3": ({"q.suh": scale(8, dtype=torch.half), "q.trellis": codes(torch.int16, 1, 1, 4)},
        "q.trellis", "q.suh"),
    "TensorRT-LLM": ({"q.weight": codes(FP8, 4, 8), "q.weights_scaling_factor": scale(1),
        "q.activation_scaling_factor": scale(1)}, "q.weight", "q.weights_scaling_factor"),
    "TensorRT-LLM int8": ({"q.weight": codes(torch.int8, 4, 8), "q.bias": scale(4),
        "q.weights_scaling_factor": scale(4)}, "q.weight", "q.weights_scaling_factor"),
    "nunchaku": ({"q.qweight": codes(torch.int8, 4, 8), "q.wscales": scale(1, 4),
        "q.wtscale": scale(1)}, "q.qweight", "q.wscales"),
    "a word that begins so": ({"q.weight": codes(FP8, 4, 8), "q.weight_scaler": scale(1)},
        "q.weight", "q.weight_scaler"),
}  # fmt: skip
VALUES: dict[str, Tree] = {
    "plain fp8": {"q.weight": codes(FP8, 4, 8), "q.bias": codes(torch.float8_e5m2, 4)},
    "fp8 all over": {"n.weight": codes(FP8, 4), "n.scale": codes(FP8, 4)},
    "a scale beside floats": {"q.weight": torch.ones(4), "q.weight_scale": scale(1),
        "q.scale": scale(1)},
    "another word": {
        "q.weight": codes(FP8, 4, 8), "q.my_weight_scale": scale(1), "q.escalator": scale(1)},
    "another module": {"q.weight": codes(FP8, 4, 8), "k.weight_scale": scale(1),
        "weight_scale": scale(1)},
    "a scale of inputs": {"q.weight": codes(FP8, 4, 8), "q.input_scale": scale(1)},
    "counters beside a scale": {
        "f.fake_quant_enabled": codes(BYTES, 1), "f.scale": scale(1),
        "f.zero_point": codes(INT32, 1),
        "n.num_batches_tracked": torch.tensor(3), "n.weight": torch.ones(2), "n.scale": scale(2)},
    "a mark elsewhere": {"unet.scaled_fp8": torch.empty(2, dtype=torch.float32),
        "clip.weight": codes(FP8, 4, 8)},
}  # fmt: skip


def numbers(name: str) -> Path:
    """A folder of quantised weights or deltas that their own programs wrote."""
    path = oracle.corpus_folder().parent / "numbers" / name
    if not path.exists():
        pytest.skip("the folder of quantised checkpoints is not here (CKPTCONV_CORPUS)")
    return path


def saved(folder: Path, tree: Any, name: str = "in.safetensors") -> Path:
    path = folder / name
    if path.suffix == ".safetensors":
        save_file(tree, path)
    else:
        torch.save(tree, path)
    return path


def same_bytes(found: torch.Tensor, expected: torch.Tensor) -> bool:
    raw = [
        tensor.contiguous().reshape(-1).view(torch.uint8).tolist() for tensor in (found, expected)
    ]
    return (found.dtype, found.shape, raw[0]) == (expected.dtype, expected.shape, raw[1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["in.safetensors", "in.pt"])
def test_a_cast_of_codes_is_an_error_that_names_the_scale_and_what_can_be_done(
    form, name, tmp_path
):
    tree, key, its_scale = FORMS[form]
    source = saved(tmp_path, {**tree, "norm.weight": torch.ones(4)}, name)
    sharded = {"max_shard_size": 100, "to": "safetensors"}
    for output, options in (
        ("out.pt", {}),
        ("out.safetensors", {}),
        ("out", sharded),
        ("out.safetensors", sharded),
    ):
        with pytest.raises(RefusedObject) as caught:
            convert_checkpoint(source, tmp_path / output, dtype="bf16", **options)
        assert caught.value.where == key and its_scale in caught.value.what
        assert "leave --dtype out" in str(caught.value) and "--exclude" in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize("form", FORMS)
def test_codes_and_scales_are_copied_as_they_are_where_no_cast_is_asked_for(form, tmp_path):
    tree = FORMS[form][0]
    convert_checkpoint(
        saved(tmp_path, tree), tmp_path / "out.safetensors", fsync=False, verify=True
    )
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == tree.keys() and all(same_bytes(found[key], tree[key]) for key in tree)


@pytest.mark.parametrize("values", VALUES)
def test_values_are_cast_as_before(values, tmp_path):
    tree = VALUES[values]
    source = saved(tmp_path, tree)
    with open_checkpoint(source) as checkpoint:
        assert find_scaled(dict(checkpoint.state_dict().tensors())) == []
    convert_checkpoint(source, tmp_path / "out.safetensors", dtype="bf16", fsync=False, verify=True)
    found = load_file(tmp_path / "out.safetensors")
    assert all(
        same_bytes(found[key], value.bfloat16() if value.is_floating_point() else value)
        for key, value in tree.items()
    )


def test_the_rest_is_cast_where_codes_and_scales_are_left_out(tmp_path):
    source = saved(tmp_path, {**FORMS["DeepSeek"][0], "norm.weight": torch.ones(4)})
    rules = KeyRules(exclude=("q.*",))
    convert_checkpoint(source, tmp_path / "out.safetensors", dtype="bf16", keys=rules, fsync=False)
    assert load_file(tmp_path / "out.safetensors")["norm.weight"].dtype is torch.bfloat16
    # a scale is not cast alone either
    with pytest.raises(RefusedObject, match=r"q\.weight: .*q\.weight_scale_inv"):
        convert_checkpoint(
            source, tmp_path / "no.safetensors", dtype="bf16", keys=KeyRules(exclude=("q.weight",))
        )


def test_the_scale_that_torch_saves_beside_a_zero_point_is_not_cast(tmp_path):
    quantize = torch.ao.nn.quantized.Quantize(0.3, 7, torch.quint8).state_dict()
    tensors = {"w": torch.ones(3).half(), **{f"q.{key}": value for key, value in quantize.items()}}
    torch.save(tensors, tmp_path / "in.pt")
    out = tmp_path / "out.safetensors"
    with pytest.raises(RefusedObject, match=r"q\.scale: is the scale .* not cast to bfloat16"):
        convert_checkpoint(tmp_path / "in.pt", out, dtype="bf16")
    convert_checkpoint(tmp_path / "in.pt", out, dtype="f32", fsync=False)  # which it is
    assert torch.equal(load_file(out)["q.scale"], quantize["scale"])
    convert_checkpoint(tmp_path / "in.pt", out, dtype="bf16", exclude="q.*", force=True)


@pytest.mark.parametrize("dtype", [E8M0, torch.float4_e2m1fn_x2])
def test_types_that_only_scales_and_codes_have_are_not_cast(dtype, tmp_path):
    source = saved(tmp_path, {"odd": codes(dtype, 8), "w": torch.ones(2)})
    for output in ("out.pt", "out.safetensors"):
        with pytest.raises(
            RefusedObject,
            match=r"odd: float[48].* not for values, so it is not cast to .*leave --dtype",
        ):
            convert_checkpoint(source, tmp_path / output, dtype="bf16")
    convert_checkpoint(source, tmp_path / "out.pt", fsync=False)


def test_codes_deep_in_a_training_checkpoint_and_in_one_without_a_state_dict_are_found(tmp_path):
    tree = FORMS["DeepSeek"][0]
    source = saved(tmp_path, {"epoch": 3, "model": tree}, "in.pt")
    with pytest.raises(RefusedObject, match=r"model\.q\.weight: .*model\.q\.weight_scale_inv"):
        convert_checkpoint(source, tmp_path / "out.pt", dtype="fp16")
    with pytest.raises(RefusedObject, match=r"model\.q\.weight: "):
        convert_checkpoint(source, tmp_path / "out.safetensors", dtype="fp16")
    with pytest.raises(RefusedObject, match=r"q\.weight: .*q\.weight_scale_inv"):
        save_portable(tree, tmp_path / "out.pt", dtype="bf16")


def test_the_command_line_says_so_in_one_line(tmp_path):
    tree = {
        f"{at}.{key}": value.clone()
        for at in range(3)
        for key, value in FORMS["DeepSeek"][0].items()
    }
    saved(tmp_path, tree)
    line = assert_one_error(
        run("convert", "in.safetensors", "out.safetensors", "--dtype", "bf16", cwd=tmp_path)
    )
    assert (
        "0.q.weight: holds float8_e4m3fn codes that need their scale 0.q.weight_scale_inv (and 2 "
        "more like it)" in line
    )


@pytest.mark.parametrize("form", FORMS)
def test_doctor_tells_of_scaled_weights_and_offers_no_cast(form, tmp_path):
    tree, key, its_scale = FORMS[form]
    found = diagnose(saved(tmp_path, tree))
    (told,) = [item for item in found.findings if item.code == "scaled-weights"]
    assert told.severity == "info"
    if told.command is None:  # it cannot be told how: no config, or an order that is not known
        assert f"{key} with {its_scale}" in told.cause and told.advice
    else:
        assert "--dequantize" in told.command and "weights are quantised: " in told.cause
    assert "all-fp32" not in {item.code for item in found.findings}
    assert not any("--dtype" in (item.command or "") for item in found.findings)


@pytest.mark.parametrize("values", VALUES)
def test_doctor_tells_of_no_scaled_weights_where_there_are_none(values, tmp_path):
    assert "scaled-weights" not in {
        item.code for item in diagnose(saved(tmp_path, VALUES[values])).findings
    }


def test_load_into_does_not_copy_codes_into_a_model_of_values(tmp_path):
    codes = torch.ones(4, 3).to(torch.float8_e4m3fn)
    tree = {"weight": codes, "weight_scale_inv": torch.tensor([[0.5]]), "bias": torch.ones(4)}
    torch.save(tree, tmp_path / "in.pt")
    model = torch.nn.Linear(3, 4)
    before = model.weight.detach().clone()
    with pytest.raises(
        CheckpointError,
        match=r"weight: holds codes that mean nothing without their scale weight_scale_inv",
    ):
        load_into(model, tmp_path / "in.pt", strict=False)
    assert torch.equal(model.weight, before)
    torch.save({"weight": codes, "bias": torch.ones(4)}, tmp_path / "values.pt")
    assert load_into(model, tmp_path / "values.pt").fits
    assert torch.equal(model.weight, codes.float())


@pytest.mark.parametrize("name", ["weight.scale", "weight_amax", "w_scale", "dequant_scale"])
def test_other_spellings_of_a_scale_beside_float8_are_known(name, tmp_path):
    save_file({"q.weight": codes(FP8, 4, 8), f"q.{name}": scale(1)}, tmp_path / "in.safetensors")
    with pytest.raises(
        RefusedObject, match=rf"q\.weight: holds .* codes that need their scale q\.{name}"
    ):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dtype="bf16")


# --------------------------------------------------------------------------- codes without a scale


NEEDED = {
    "compressed-tensors int4": ["q.weight_scale", "q.weight_shape"],
    "compressed-tensors NVFP4": ["q.weight_global_scale", "q.weight_scale"],
    "ModelOpt NVFP4": ["q.weight_scale", "q.weight_scale_2"],
    "ComfyUI": ["scaled_fp8", "q.scale_weight"],
    "GPTQ": ["q.g_idx", "q.qzeros", "q.scales"],
    "MLX": ["q.biases", "q.scales"],
    "bitsandbytes, 4 bits": [
        "q.weight.absmax", "q.weight.quant_map", "q.weight.quant_state.bitsandbytes__nf4"],
    "HQQ": ["q.scale", "q.zero"],
    "nunchaku": ["q.wscales", "q.wtscale"],
}  # fmt: skip
"""All that the codes of these forms are read with, as the libraries that write them do."""


@pytest.mark.parametrize("form", NEEDED)
def test_codes_keep_all_that_they_are_read_with_under_names_by_which_it_is_found(form, tmp_path):
    tree = FORMS[form][0]
    source = saved(tmp_path, {**tree, "norm.weight": torch.ones(4)})
    for needed in NEEDED[form]:
        for output in ("out.pt", "out.safetensors"):
            for options in ({"exclude": needed}, {"drop": needed}):
                with pytest.raises(RefusedObject, match=f"without their .* {re.escape(needed)}"):
                    convert_checkpoint(source, tmp_path / output, **options)
            with pytest.raises(RefusedObject, match="nobody finds their"):
                convert_checkpoint(source, tmp_path / output, rename=f"{needed}=apart.from")
        with pytest.raises(RefusedObject, match=f"without their .* {re.escape(needed)}"):
            load_portable(source, keys=KeyRules(exclude=(needed,)))
        with pytest.raises(RefusedObject, match="nobody finds their"):
            edit(source, rename=f"{needed}=apart.from")
        if tree[needed].is_floating_point():
            with pytest.raises(RefusedObject):
                convert_checkpoint(source, tmp_path / "out.pt", cast=f"{needed}=f64")
    assert [item.name for item in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize("form", FORMS)
def test_codes_and_what_they_are_read_with_get_another_prefix_together(form, tmp_path):
    tree = FORMS[form][0]
    source = saved(tmp_path, tree)
    for output in ("out.pt", "out.safetensors"):
        convert_checkpoint(source, tmp_path / output, add_prefix="m.", fsync=False)
    edit(source, add_prefix="m.", fsync=False)
    found = [load_file(source), load_file(tmp_path / "out.safetensors")]
    for state_dict in (*found, torch.load(tmp_path / "out.pt")):
        assert state_dict.keys() == {f"m.{name}" for name in tree}


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_not_left_without_their_scale_by_any_command(form, tmp_path):
    tree, key, _ = FORMS[form]
    tree = {**tree, "norm.weight": torch.ones(4)}
    source = saved(tmp_path, tree)
    bare = {key: value for key, value in tree.items() if key in (FORMS[form][1], "norm.weight")}
    like = saved(tmp_path, {name: torch.ones(item.shape) for name, item in bare.items()}, "like.pt")
    others = [name for name in tree if name not in bare]
    rules = KeyRules(exclude=tuple(others))
    for output in ("out.pt", "out.safetensors"):
        for options in (
            {"drop": others},
            {"drop": others, "dtype": "bf16"},
            {"exclude": others},
            {"include": [key, "norm.*"]},
            {"like": like, "drop_unexpected": True},
        ):
            with pytest.raises(RefusedObject, match=r"their scale|is a type for codes"):
                convert_checkpoint(source, tmp_path / output, **options)
            assert not (tmp_path / output).exists()
    with pytest.raises(RefusedObject, match="without their scale"):
        load_portable(source, keys=rules)
    convert_checkpoint(source, tmp_path / "out.pt", drop=[*others, key])
    assert list(load_portable(tmp_path / "out.pt")) == ["norm.weight"]


@pytest.mark.parametrize("integers", ["same", "first", "last"])
@pytest.mark.parametrize("form", FORMS)
def test_codes_are_not_averaged(form, integers, tmp_path):
    source = saved(tmp_path, FORMS[form][0])
    other = saved(tmp_path, {name: item.clone() for name, item in FORMS[form][0].items()}, "b.pt")
    with pytest.raises(RefusedObject, match="codes that need their scale") as caught:
        average([source, other], tmp_path / "out.safetensors", integers=integers)
    assert "--integers" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_delta_is_not_weights(encoding, tmp_path):
    """Folders that the format's own program wrote."""
    folder = numbers("delta") / f"weight_v000001_{encoding}"
    told = (
        rf"holds changes of tensors from version 000000 to 000001 .* \(delta_encoding {encoding}\)"
    )
    for attempt in (
        lambda: convert_checkpoint(folder, tmp_path / "out.safetensors"),
        lambda: convert_checkpoint(folder, tmp_path / "out.pt"),
        lambda: load_portable(folder),
        lambda: load_into(torch.nn.Linear(2, 2), folder),
        lambda: average([folder, folder], tmp_path / "out.pt"),
        lambda: merge([folder, folder], tmp_path / "out.pt", prefix={folder: "a."}),
    ):
        with pytest.raises(CheckpointError, match=told):
            attempt()
    assert list(tmp_path.iterdir()) == []
    assert re.search(told, run("inspect", folder, cwd=tmp_path).out)
    assert re.search(told, run("doctor", folder, cwd=tmp_path).out)
