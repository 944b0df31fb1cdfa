"""What stands beside weights that are dequantised: what goes with them, and what stays."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptconv import (
    ConversionResult,
    Dequantize,
    KeyConflict,
    KeyRules,
    average_checkpoints,
    convert_checkpoint,
    inspect_checkpoint,
    open_checkpoint,
)
from ckptconv.support.errors import RefusedObject

Tensors = dict[str, torch.Tensor]


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def layer(name: str) -> Tensors:
    return {f"{name}.weight": fp8(4, 4), f"{name}.weight_scale": torch.rand(())}


def converted(
    folder: Path, tensors: Tensors, **options: object
) -> tuple[Tensors, ConversionResult]:
    torch.save(tensors, folder / "in.pt")
    done = convert_checkpoint(folder / "in.pt", folder / "out.pt", dequantize=True, **options)
    return torch.load(folder / "out.pt"), done


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn.k_proj.input_scale", torch.tensor(1.0)),
        ("attn.k_proj.input_scale_ub", ONE),  # FBGEMM
        ("attn.k_proj.qscale_act", torch.tensor(1.0)),  # Mistral
        ("attn.k_proj.k_scale", ONE),  # ModelOpt
        ("attn.k_scale", ONE),  # vLLM
        ("attn.attn.k_scale", ONE),
        ("attn.k_proj.output_scale", ONE),
        ("experts.up_proj_input_scale", ONE),
        ("experts.up_proj_input_scale", torch.ones(3)),
    ],
)
def test_scales_of_activations_go_with_the_layers_that_have_them(tmp_path, key, value):
    experts = {"experts.up_proj": fp8(3, 4, 4), "experts.up_proj_scale": torch.rand(3)}
    tensors = {**layer("attn.k_proj"), **experts, key: value}
    made, _ = converted(tmp_path, tensors)
    assert set(made) == {"attn.k_proj.weight", "experts.up_proj"}
    assert inspect_checkpoint(tmp_path / "in.pt").parameters[""] == 16 + 48


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn.q_scale", torch.ones(4)),  # learned, one for each head
        ("attn.k_scale", torch.ones(4, 1, 1)),
        ("q_scale", ONE),
        ("model.q_scale", ONE),
        ("head.output_scale", ONE),
        ("head.input_scale", torch.ones(4)),
        ("attn.k_proj.input_scale", torch.ones(4)),  # of each input: the values need it
        ("ffn.act.scales", torch.ones(4)),  # AutoAWQ's ScaledActivation
        ("experts.up_proj", torch.ones(2, 4, 2, dtype=torch.uint8)),
    ],
)
def test_what_may_be_a_parameter_stays_and_is_told_of(tmp_path, key, value):
    made, done = converted(tmp_path, {**layer("attn.k_proj"), key: value})
    assert torch.equal(made[key], value)
    [note] = [note for note in done.plan.notes if note.startswith("stay as they are")]
    assert key in note


def test_what_goes_with_codes_is_counted_by_its_name(tmp_path):
    tensors = {**layer("a"), **layer("b"), "a.input_scale": torch.tensor(1.0)}
    _, done = converted(tmp_path, tensors)
    [note] = [note for note in done.plan.notes if note.startswith("left out with them")]
    assert note.endswith(": weight_scale (2), input_scale")


def test_a_weight_beside_its_own_codes_is_refused(tmp_path):
    """The blocks of MXFP4, as gpt-oss has them, of which `up` would be made."""
    blocks = torch.zeros(2, 4, 2, 16, dtype=torch.uint8)
    tensors = {"up_blocks": blocks, "up_scales": torch.full((2, 4, 2), 127, dtype=torch.uint8)}
    made, _ = converted(tmp_path, tensors)
    assert set(made) == {"up"} and not made["up"].any()
    (tmp_path / "out.pt").unlink()
    with pytest.raises(KeyConflict, match="up: stands beside the codes of which it would be made"):
        converted(tmp_path, {**tensors, "up": torch.ones(2, 64, 4)})
    assert not (tmp_path / "out.pt").exists()


def test_a_parameter_without_elements_stays(tmp_path):
    made, done = converted(tmp_path, {**layer("fc"), "empty": torch.zeros(0, 3)})
    assert made["empty"].shape == (0, 3)
    assert "empty" not in " ".join(done.plan.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None])
def test_what_is_made_of_values_is_rounded_once(dtype, tmp_path):
    """To the type that was asked for, and not to bfloat16 before, which is that of the values."""
    codes, scales = fp8(16, 16), torch.rand(2, 16, 1)
    for name, scale in zip(("in.pt", "other.pt"), scales, strict=True):
        torch.save({"fc.weight": codes, "fc.weight_scale": scale.clone()}, tmp_path / name)
    options = {"dequantize": True, "dtype": dtype, "verify": True, "force": True, "fsync": False}
    out, values = tmp_path / "out.pt", codes.float() * scales[0]
    average_checkpoints([tmp_path / "in.pt", tmp_path / "other.pt"], out, **options)
    mean = (values.double() + (codes.float() * scales[1]).double()) / 2
    dtype = dtype or torch.bfloat16
    assert torch.equal(torch.load(out)["fc.weight"], mean.to(dtype))
    rules = KeyRules.of([{"from": "fc.weight", "to": "fc.weight", "operations": [{"add": 1}]}])
    convert_checkpoint(tmp_path / "in.pt", out, keys=rules, **options)
    assert torch.equal(torch.load(out)["fc.weight"], (values + 1).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_that_are_gathered_in_another_order_are_rounded_once(dtype, tmp_path):
    """What is larger than a chunk is gathered where a rule turns it."""
    codes, scale = fp8(1024, 600), torch.rand(1024, 1)
    torch.save({"fc.weight": codes, "fc.weight_scale": scale}, tmp_path / "in.pt")
    steps = [{"transpose": [0, 1]}]
    rules = KeyRules.of([{"from": "fc.weight", "to": "fc.weight", "operations": steps}])
    options = {"dequantize": True, "dtype": dtype, "verify": True, "fsync": False, "keys": rules}
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", **options)
    found = torch.load(tmp_path / "out.pt")["fc.weight"]
    assert torch.equal(found, (codes.float() * scale).T.to(dtype))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("b.SCB", torch.ones(4)),
        ("b.weight.absmax", torch.ones(4)),
        ("b.weight.quant_map", torch.ones(16)),
        ("b.weight.quant_state.bitsandbytes__nf4", torch.ones(4, dtype=torch.uint8)),
        ("b.g_idx", torch.ones(4, dtype=torch.int32)),
        ("b.weight_shape", torch.tensor([4, 4])),
        ("b.weight_zero_point", torch.ones(4, 4, dtype=torch.int32)),
        ("b.weight_global_scale", ONE),
        ("b.weight_scale_2", ONE),
        ("b.comfy_quant", torch.ones(4, dtype=torch.uint8)),
        ("b._weight_qdata", torch.ones(4, 4, dtype=torch.int8)),
        ("experts.up_proj_scale_inv", torch.ones(2, 4, 4)),
    ],
)
def test_parts_of_a_weight_whose_other_parts_are_missing_are_refused(tmp_path, key, value):
    with pytest.raises(RefusedObject, match="without what it is read with"):
        converted(tmp_path, {**layer("a"), key: value})


@pytest.mark.parametrize("shape", [(4, 4), (128, 64)], ids=["multiplied", "by table"])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, torch.float16), ({"dtype": "f16"}, torch.float16), ({"dtype": "f8_e4m3"}, None)],
)
def test_values_beyond_the_range_of_their_type_are_counted(tmp_path, shape, options, dtype):
    """Also where nothing is cast: a config may say float16, whose largest number is 65,504."""
    (tmp_path / "config.json").write_text('{"torch_dtype": "float16"}')
    codes = fp8(*shape)
    tensors = {"a.weight": codes, "a.weight_scale": torch.tensor(1e5)}
    made, done = converted(tmp_path, tensors, **options)
    exact = codes.float() * 1e5
    if dtype is None:
        beyond = exact.abs() >= 464
    else:
        beyond = exact.to(dtype).isinf()
        assert torch.equal(made["a.weight"].isinf(), beyond)
    assert done.overflowed == {"a.weight": int(beyond.sum())} and beyond.any()
    [(path, what)] = done.odd_values()
    assert path == "a.weight" and f"{int(beyond.sum()):,} value" in what


@pytest.mark.trust
def test_the_time_to_plan_grows_with_the_weights_and_not_with_their_square(tmp_path):
    """4,000 took 5 s of a processor: sets were made anew for each weight. Now it is half a second;
    the largest models have 60,000.
    """
    codes, scale = torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1, 1)
    tensors = {}
    for number in range(4000):
        key = f"layers.{number % 60}.experts.{number // 60}.up.weight"
        tensors |= {key: codes.clone(), f"{key}_scale": scale.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    told = {"quant_method": "fp8", "ignore": [f"layers.{number}.norm" for number in range(400)]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": told}))
    begin = time.process_time()
    with open_checkpoint(tmp_path / "model.safetensors", edits=[Dequantize()]) as checkpoint:
        assert len(checkpoint.state_dict().keys) == 4000
    assert time.process_time() - begin < 2.5


MOE = [
    {"from": "e.{e}.weight", "to": "e.all", "operations": ["stack 0"]},
    {"from": "a.qkv.weight", "to": ["a.q.weight", "a.k.weight"], "operations": ["split 0"]},
]


def unknown(name: str) -> Tensors:
    """Codes that nobody here can read."""
    return {f"{name}.W_q": torch.zeros(4, 4, dtype=torch.uint8), f"{name}.scale": torch.ones(4, 1)}


def test_what_is_left_out_need_not_be_known_where_tensor_rules_are(tmp_path):
    layers = [layer("e.0"), layer("e.1"), layer("a.qkv"), unknown("odd")]
    tensors = {key: t for each in layers for key, t in each.items()}
    made, _ = converted(tmp_path, tensors, rules=MOE, exclude="odd.*")

    def values(name: str) -> torch.Tensor:
        codes, scale = tensors[f"{name}.weight"].float(), tensors[f"{name}.weight_scale"]
        return (codes * scale).bfloat16()

    q, k = values("a.qkv").split(2)
    expected = {"e.all": torch.stack([values("e.0"), values("e.1")]), "a.q.weight": q}
    expected["a.k.weight"] = k
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[key], t) for key, t in expected.items())


@pytest.mark.parametrize("options", [{"rules": MOE}, {"rules": MOE, "exclude": "other.*"}])
def test_a_weight_that_is_not_known_is_refused_beside_tensor_rules(tmp_path, options):
    layers = [layer("e.0"), layer("e.1"), layer("a.qkv"), unknown("odd"), unknown("other")]
    tensors = {key: t for each in layers for key, t in each.items()}
    with pytest.raises(RefusedObject, match=r"odd\.W_q: is quantised by HQQ") as error:
        converted(tmp_path, tensors, **options)
    assert "leave it out (--exclude)" in (error.value.hint or "")


def test_a_rule_that_takes_a_weight_that_is_not_known_is_refused_with_that_weight(tmp_path):
    tensors = {**layer("a"), **unknown("b"), **unknown("c")}
    rules = [{"from": "{n}.W_q", "to": "{n}.other", "operations": [{"transpose": [0, 1]}]}]
    with pytest.raises(RefusedObject, match=r"b\.W_q: is quantised by HQQ"):
        converted(tmp_path, tensors, rules=rules, exclude="c.*")
