"""Adapters merged into their base: the samples of peft, the names of every convention, and what is
refused. `make families` holds random adapters against peft itself.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import (
    CheckpointError,
    Dequantize,
    KeyConflict,
    KeyMismatch,
    MalformedCheckpoint,
    MergeLora,
    OptionRefused,
    OutputRefused,
    RefusedObject,
    convert_checkpoint,
    load_portable,
    merge_lora_checkpoint,
    open_checkpoint,
)
from helpers.paths import ROOT
from helpers.program import run

NUMBERS = ROOT.parent / "shared" / "numbers"
PEFT = "base_model.model."


@pytest.mark.skipif(not NUMBERS.is_dir(), reason="needs the samples of adapters")
@pytest.mark.parametrize("name", ["bf16", "fp32", "rslora_fp16", "dora_fp32"])
def test_the_samples_become_what_peft_made_of_them(name, tmp_path):
    folder = NUMBERS / f"lora_{name}"
    out = tmp_path / "out.safetensors"
    merge_lora_checkpoint(folder / "base", folder, out, verify=True)
    found, expected = load_file(out), load_file(folder / "merged.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype is value.dtype
        assert torch.equal(found[key], value), key


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(2)
    tensors = {
        "model.layers.0.q_proj.weight": torch.randn(12, 8),
        "model.layers.0.q_proj.bias": torch.randn(12),
        "model.layers.10.square.weight": torch.randn(8, 8),
        "model.conv.weight": torch.randn(6, 5, 3, 3),
        "lm_head.weight": torch.randn(9, 8),
    }
    save_file(tensors, tmp_path / "base.safetensors")
    return tmp_path, tensors


def factors(start, ends=("lora_A.weight", "lora_B.weight"), sizes=(12, 8), rank=4):
    """Both matrices for a linear layer of (out, in)."""
    down, up = ends
    return {
        f"{start}.{down}": torch.randn(rank, sizes[1]),
        f"{start}.{up}": torch.randn(sizes[0], rank),
    }


def of_peft(folder, tensors, **config):
    path = folder / "adapter"
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (path / "adapter_config.json").write_text(json.dumps(told))
    return path


def of_file(folder, tensors):
    save_file(tensors, folder / "adapter.safetensors")
    return folder / "adapter.safetensors"


def merged(folder, adapter, **options):
    out = folder / "out.safetensors"
    merge_lora_checkpoint(
        folder / "base.safetensors", adapter, out, force=True, verify=True, **options
    )
    return load_file(out)


KOHYA = ("lora_down.weight", "lora_up.weight")
Q = "model.layers.0.q_proj"


def product(tensors, scale=1.0):
    down, up = tensors.values()
    return scale * (up.flatten(1) @ down.flatten(1))


def test_only_what_the_adapter_names_is_changed(base):
    folder, tensors = base
    given = factors(PEFT + Q)
    found = merged(folder, of_peft(folder, given))
    delta = found[f"{Q}.weight"] - tensors[f"{Q}.weight"]
    assert torch.allclose(delta, product(given, 2.0), atol=1e-5)
    assert all(
        torch.equal(found[key], value) for key, value in tensors.items() if key != f"{Q}.weight"
    )


def test_an_adapter_stays_what_its_folder_is(base):
    folder, _ = base
    adapter = of_peft(folder, factors(PEFT + Q))
    with pytest.raises(OutputRefused, match="would be taken for the checkpoint in its folder"):
        merge_lora_checkpoint(folder / "base.safetensors", adapter, f"{adapter}/")
    assert len([*adapter.iterdir()]) == 2


JOINED = "lora_unet_" + Q.replace(".", "_")
CONVENTIONS = {
    "kohya": (JOINED, KOHYA),
    "lycoris": (JOINED.replace("lora_unet", "lycoris"), KOHYA),
    "diffusers": ("unet." + Q, ("lora_A.weight", "lora_B.weight")),
    "diffusers, old": ("unet." + Q, ("lora.down.weight", "lora.up.weight")),
    "ComfyUI": ("diffusion_model." + Q, KOHYA),
    "DiffSynth": (Q, ("lora_A.default.weight", "lora_B.default.weight")),
    "LlamaModel": ("layers.0.q_proj", ("lora_A.weight", "lora_B.weight")),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_names_of_each_convention_are_found(base, name):
    folder, tensors = base
    start, ends = CONVENTIONS[name]
    given = factors(start, ends)
    found = merged(folder, of_file(folder, given))
    delta = found[f"{Q}.weight"] - tensors[f"{Q}.weight"]
    assert torch.allclose(delta, product(given), atol=1e-5)
    if name in ("kohya", "lycoris"):
        with_alpha = given | {f"{start}.alpha": torch.tensor(1.0)}
        found = merged(folder, of_file(folder, with_alpha))
        delta = found[f"{Q}.weight"] - tensors[f"{Q}.weight"]
        assert torch.allclose(delta, product(given, 0.25), atol=1e-5)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("input_blocks.4.1.proj_in", "lora_unet_down_blocks_1_attentions_0_proj_in"),
        ("input_blocks.4.1.proj_in", "lora_unet_input_blocks_4_1_proj_in"),
        ("middle_block.0.in_layers.2", "unet.mid_block.resnets.0.conv1"),
        ("output_blocks.5.1.conv", "unet.up_blocks.1.upsamplers.0.conv"),
        ("double_blocks.7.img_mlp.0", "transformer.transformer_blocks.7.ff.net.0.proj"),
        ("double_blocks.7.img_mlp.0", "lora_unet_double_blocks_7_img_mlp_0"),
        ("blocks.0.cross_attn.k", "lora_unet__blocks_0_cross_attn_k"),
        ("middle_block.1.attn1.to_q", "unet.mid_block.attentions.0.attn1.processor.to_q_lora"),
        ("middle_block.1.attn1.to_out.0", "mid_block.attentions.0.attn1.processor.to_out_lora"),
    ],
)
def test_names_of_diffusers_in_an_original_file(tmp_path, key, name):
    """VideoX-Fun's `lora_unet__`; UNET_TO_DIFFUSERS of diffusers' utils/state_dict_utils.py."""
    weights = {f"model.diffusion_model.{key}.weight": torch.zeros(12, 8)}
    save_file(weights, tmp_path / "base.safetensors")
    ends = ("down.weight", "up.weight") if name.endswith("_lora") else KOHYA
    given = factors(name, ends)
    [found] = merged(tmp_path, of_file(tmp_path, given)).values()
    assert torch.allclose(found, product(given), atol=1e-5)


def test_q_k_and_v_of_diffusers_are_parts_of_one_weight_of_flux(tmp_path):
    weights = {
        "double_blocks.0.txt_attn.qkv.weight": torch.randn(24, 8).bfloat16(),
        "single_blocks.0.linear1.weight": torch.randn(56, 8).bfloat16(),
    }
    save_file(weights, tmp_path / "base.safetensors")
    names = {
        "transformer_blocks.0.attn.add_k_proj": (0, 8, 16),
        "single_transformer_blocks.0.attn.to_q": (1, 0, 8),
        "single_transformer_blocks.0.proj_mlp": (1, 24, 56),
    }
    given = {
        name: factors(f"transformer.{name}", sizes=(stop - start, 8))
        for name, (_, start, stop) in names.items()
    }
    adapter = of_file(tmp_path, {key: ref for each in given.values() for key, ref in each.items()})
    found = [*merged(tmp_path, adapter).items()]
    expected = [value.float() for _, value in sorted(weights.items())]
    for name, (number, start, stop) in names.items():
        expected[number][start:stop] += product(given[name])
    for (_, made), wanted in zip(sorted(found), expected, strict=True):
        assert torch.equal(made, wanted.bfloat16())


@pytest.mark.parametrize("dense", [True, False])
def test_one_weight_of_flux_is_q_k_and_v_of_diffusers(tmp_path, dense):
    start = "single_transformer_blocks.3."
    rows = {"attn.to_q": 8, "attn.to_k": 8, "attn.to_v": 8, "proj_mlp": 32}
    base = {f"{start}{name}.weight": torch.randn(size, 8) for name, size in rows.items()}
    save_file(base, tmp_path / "base.safetensors")
    given = factors("lora_unet_single_blocks_3_linear1", KOHYA, (56, 8), 8)
    if not dense:
        up = given[f"lora_unet_single_blocks_3_linear1.{KOHYA[1]}"]
        up *= torch.block_diag(*(torch.ones(size, 2) for size in rows.values()))
    found = merged(tmp_path, of_file(tmp_path, given))
    delta = product(given).split([*rows.values()])
    for name, own in zip(rows, delta, strict=True):
        key = f"{start}{name}.weight"
        assert torch.allclose(found[key], base[key] + own, atol=1e-5)


def test_one_weight_that_is_none_of_all_modules_of_the_base(tmp_path):
    names = ("attn.to_q", "attn.to_k", "attn.to_v")
    base = {f"transformer_blocks.0.{name}.weight": torch.randn(8, 8) for name in names}
    save_file(base, tmp_path / "base.safetensors")
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    with pytest.raises(KeyMismatch, match=r"has the shape .*and its modules have 24 rows"):
        merged(tmp_path, of_file(tmp_path, factors(name, KOHYA, (25, 8))))
    halves = {f"{name}.hada_{end}": torch.randn(24 if end[-1] == "a" else 2, 2 if end[-1] == "a"
              else 8) for end in ("w1_a", "w1_b", "w2_a", "w2_b")}  # fmt: skip
    with pytest.raises(RefusedObject, match="only matrices of LoRA are taken apart"):
        merged(tmp_path, of_file(tmp_path, halves))
    del base["transformer_blocks.0.attn.to_k.weight"]
    save_file(base, tmp_path / "base.safetensors")
    with pytest.raises(KeyMismatch, match="which the base does not have"):
        merged(tmp_path, of_file(tmp_path, factors(name, KOHYA, (24, 8))))


def test_the_second_text_encoder_is_not_the_first(tmp_path):
    key = "text_model.encoder.layers.0.self_attn.q_proj"
    weights = {f"conditioner.embedders.0.transformer.{key}.weight": torch.zeros(8, 8)}
    save_file(weights, tmp_path / "base.safetensors")
    joined = key.replace(".", "_")
    merged(tmp_path, of_file(tmp_path, factors(f"lora_te1_{joined}", KOHYA, (8, 8))))
    with pytest.raises(KeyMismatch, match=r"lora_te2_.* which the base does not have"):
        merged(tmp_path, of_file(tmp_path, factors(f"lora_te2_{joined}", KOHYA, (8, 8))))


@pytest.mark.parametrize(
    ("before", "adapter"),
    [
        ("conditioner.embedders.0.transformer.text_model.", "text_encoder."),
        ("text_model.", "lora_te1_"),
        ("cond_stage_model.transformer.", "lora_te_text_model_"),
        ("text_encoder.", "text_encoder.text_model."),
    ],
)
def test_paths_of_clip_have_text_model_or_not(tmp_path, before, adapter):
    """huggingface/diffusers#13984; `TEXT_ENCODER_KEY_REPLACEMENTS` of sd-scripts."""
    path = "encoder.layers.0.self_attn.q_proj"
    weights = {f"{before}{path}.weight": torch.zeros(8, 8)}
    save_file(weights, tmp_path / "base.safetensors")
    name = path if "." in adapter else path.replace(".", "_")
    given = factors(adapter + name, KOHYA, (8, 8))
    found = merged(tmp_path, of_file(tmp_path, given))[f"{before}{path}.weight"]
    assert torch.allclose(found, product(given), atol=1e-5)


def test_underscores_are_looked_up_and_not_taken_apart(tmp_path):
    weights = {"a_b.c.weight": torch.zeros(3, 3), "a.b_c.weight": torch.ones(3, 3)}
    save_file(weights, tmp_path / "base.safetensors")
    given = factors("lora_unet_a_b_c", KOHYA, (3, 3))
    with pytest.raises(KeyMismatch, match=r"may mean a\.b_c, a_b\.c"):
        merged(tmp_path, of_file(tmp_path, given))


def test_a_tucker_product_of_a_convolution(base):
    folder, tensors = base
    down, up, mid = torch.randn(4, 5, 1, 1), torch.randn(6, 4, 1, 1), torch.randn(4, 4, 3, 3)
    start = "lora_unet_model_conv"
    given = {
        f"{start}.lora_down.weight": down, f"{start}.lora_up.weight": up,
        f"{start}.lora_mid.weight": mid, f"{start}.alpha": torch.tensor(2.0),
    }  # fmt: skip
    found = merged(folder, of_file(folder, given))
    delta = torch.einsum("pqkl,op,qi->oikl", mid, up[:, :, 0, 0], down[:, :, 0, 0]) / 2
    expected = tensors["model.conv.weight"] + delta
    assert torch.allclose(found["model.conv.weight"], expected, atol=1e-5)


@pytest.mark.parametrize("is_of_peft", [True, False])
def test_a_kronecker_product_of_a_conv1d_is_as_the_program_has_it(tmp_path, is_of_peft):
    """`make_kron` of peft 0.21, whose torch.kron adds dimensions in front, and of LyCORIS 4.1."""
    outer, inner, weight = torch.randn(2, 3), torch.randn(4, 5, 7), torch.randn(8, 15, 7)
    save_file({"conv.weight": weight}, tmp_path / "base.safetensors")
    start = f"{PEFT}conv." if is_of_peft else "lycoris_conv."
    given = {f"{start}lokr_w1": outer, f"{start}lokr_w2": inner}
    adapter, expected = of_file(tmp_path, given), torch.kron(outer[..., None], inner)
    if is_of_peft:
        adapter = of_peft(tmp_path, given, peft_type="LOKR", alpha=4)
        expected = torch.kron(outer, inner).reshape(weight.shape)
    found = merged(tmp_path, adapter)["conv.weight"]
    assert torch.allclose(found, weight + expected, atol=1e-5)


@pytest.mark.parametrize("name", ["LoHa", "LoKr"])
@pytest.mark.parametrize("is_tucker", [False, True])
def test_products_of_lycoris(base, name, is_tucker):
    """`make_weight` of LyCORIS 3.1: of LoHa the product of two halves element by element, of LoKr
    the Kronecker product; a half is ``a @ b``, or with a core einsum("ij..., ip, jr -> pr...").
    """
    folder, tensors = base
    rank, (out, columns, *kernel) = 2, tensors["model.conv.weight"].shape

    def half(start, rows, columns):
        if not is_tucker:
            first, second = torch.randn(rows, rank), torch.randn(rank, columns * 9)
            made = (first @ second).reshape(rows, columns, *kernel)
            return {f"{start}_a": first, f"{start}_b": second}, made
        core, first, second = (
            torch.randn(rank, rank, *kernel), torch.randn(rank, rows), torch.randn(rank, columns)
        )  # fmt: skip
        made = torch.einsum("ijkl,ip,jr->prkl", core, first, second)
        names = f"{start}_a", f"{start}_b", start.replace("_w", "_t")
        return dict(zip(names, (first, second, core), strict=True)), made

    if name == "LoHa":
        (own, first), (more, second) = (half(f"hada_w{n}", out, columns) for n in (1, 2))
        delta = first * second
    else:
        own, second = half("lokr_w2", out // 2, columns)
        more = {"lokr_w1": torch.randn(2, 1)}
        if not is_tucker:
            own["lokr_w2_b"] = own["lokr_w2_b"].reshape(rank, columns, *kernel)
        delta = torch.kron(more["lokr_w1"][..., None, None], second)
    given = {f"lycoris_model_conv.{role}": value for role, value in {**own, **more}.items()}
    given["lycoris_model_conv.alpha"] = torch.tensor(6.0)
    found = merged(folder, of_file(folder, given))["model.conv.weight"]
    expected = tensors["model.conv.weight"] + 6 / rank * delta
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("is_turned", [False, True])
def test_parameters_of_experts_are_changed_as_peft_does(tmp_path, is_turned):
    """`ParamWrapper.get_delta_weight` of peft 0.17, for (experts, in, out) and turned."""
    weight = torch.randn(3, 12, 8) if is_turned else torch.randn(3, 8, 12)
    save_file({"experts.proj": weight}, tmp_path / "base.safetensors")
    given = factors(f"{PEFT}experts", sizes=(12, 8), rank=3 * 4)
    down, up = given.values()
    adapter = of_peft(tmp_path, given, target_parameters=["experts.proj"])
    delta = torch.einsum(
        "ore,eri->eoi" if is_turned else "ore,eri->eio", up.reshape(12, 4, 3), down.reshape(3, 4, 8)
    )
    found = merged(tmp_path, adapter)["experts.proj"]
    assert torch.allclose(found, weight + 2 * delta, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"proj": (3, 8, 9)}, r"does not fit the parameters of the base: proj \[3, 8, 9\]"),
        ({"proj": (5, 8, 12)}, r"does not fit the parameters of the base: proj \[5, 8, 12\]"),
        ({"proj": (12,)}, r"does not fit the parameters of the base: proj \[12\]"),
        ({"proj": (3, 8, 12), "other": (3, 8, 12)}, "may be for other or proj, whose shapes"),
    ],
)
def test_experts_of_other_shapes_are_refused(tmp_path, shapes, words):
    base = {f"experts.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(base, tmp_path / "base.safetensors")
    given = factors(f"{PEFT}experts", sizes=(12, 8), rank=12)
    told = [f"experts.{name}" for name in shapes]
    with pytest.raises(KeyMismatch, match=words):
        merged(tmp_path, of_peft(tmp_path, given, target_parameters=told))


def test_square_parameters_of_experts_are_refused(tmp_path):
    save_file({"experts.proj": torch.randn(3, 8, 8)}, tmp_path / "base.safetensors")
    given = factors(f"{PEFT}experts", sizes=(8, 8), rank=12)
    with pytest.raises(KeyMismatch, match=r"may be for proj as \(in, out\) or \(out, in\)"):
        merged(tmp_path, of_peft(tmp_path, given, target_parameters=["experts.proj"]))


def test_a_bias_of_a_product_is_scaled_as_the_product_is(base):
    """`lora_bias` of peft: ``base.bias += lora_B.bias * scaling``."""
    folder, tensors = base
    bias = torch.randn(12)
    given = {**factors(PEFT + Q), f"{PEFT}{Q}.lora_B.bias": bias}
    found = merged(folder, of_peft(folder, given, lora_bias=True, lora_alpha=12))
    assert torch.allclose(found[f"{Q}.bias"], tensors[f"{Q}.bias"] + 3 * bias, atol=1e-5)


def test_whole_deltas(base):
    folder, tensors = base
    given = {
        f"diffusion_model.{Q}.diff": torch.randn(12, 8),
        f"diffusion_model.{Q}.diff_b": torch.randn(12),
    }
    found = merged(folder, of_file(folder, given), scale=0.5)
    for key, delta in zip((f"{Q}.weight", f"{Q}.bias"), given.values(), strict=True):
        assert torch.equal(found[key], tensors[key] + 0.5 * delta)


def test_a_weight_that_is_set_takes_the_place_of_that_of_the_base(base):
    folder, tensors = base
    given = {f"diffusion_model.{Q}.set_weight": torch.randn(12, 8)}
    adapter = of_file(folder, given)
    found = merged(folder, adapter)
    [wanted] = given.values()
    assert torch.equal(found[f"{Q}.weight"], wanted)
    assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"])
    with pytest.raises(RefusedObject, match="leave --scale out"):
        merged(folder, adapter, scale=0.5)
    both = of_peft(folder, factors(PEFT + Q))
    with pytest.raises(KeyConflict, match="which another adapter changes"):
        merged(folder, [both, adapter])
    with pytest.raises(RefusedObject, match="of which other parts of the adapter"):
        merged(folder, of_file(folder, given | factors(f"diffusion_model.{Q}", KOHYA)))


def test_a_magnitude_of_lycoris_is_for_outputs_or_inputs_as_its_shape_says(base):
    folder, tensors = base
    weight = tensors[f"{Q}.weight"]
    given = factors(JOINED, KOHYA)
    whole = weight + product(given)
    for dim, shape in ((1, (12, 1)), (0, (1, 8))):
        scale = torch.rand(shape) + 0.5
        found = merged(folder, of_file(folder, given | {f"{JOINED}.dora_scale": scale}))
        norm = whole.norm(dim=dim, keepdim=True) + torch.finfo(torch.float32).eps
        assert torch.allclose(found[f"{Q}.weight"], whole * scale / norm, atol=1e-5)
    half = {key: value.bfloat16() for key, value in tensors.items()}
    save_file(half, folder / "base.safetensors")
    merged(folder, of_file(folder, given | {f"{JOINED}.dora_scale": scale}), dtype="f32")


def test_the_magnitude_of_a_convolution_is_for_outputs_whatever_linear_layers_are(base):
    folder, tensors = base
    weight = torch.randn(6, 6, 1, 1)
    save_file(tensors | {"model.conv.weight": weight}, folder / "base.safetensors")
    start = f"{PEFT}model.conv"
    given = factors(start, sizes=(6, 6))
    magnitude = torch.rand(1, 6, 1, 1) + 0.5
    four = {key: value[..., None, None] for key, value in given.items()}
    adapter = of_peft(
        folder, four | {f"{start}.lora_magnitude_vector.weight": magnitude}, fan_in_fan_out=True
    )
    whole = weight.reshape(6, 6) + product(given, 2.0)
    expected = whole * magnitude.reshape(6, 1) / whole.norm(dim=1, keepdim=True)
    found = merged(folder, adapter)["model.conv.weight"]
    assert torch.allclose(found.reshape(6, 6), expected, atol=1e-5)


@pytest.mark.parametrize(("columns", "told"), [((8, 20), False), ((20, 8), True)])
def test_a_square_weight_is_refused_where_biases_of_the_base_say_that_it_is_the_other_way(
    columns, told, tmp_path
):
    """As of Conv1D and Linear in one model: peft writes what the last layer is."""
    tensors = {
        "h.0.square.weight": torch.randn(8, 8),
        "h.0.square.bias": torch.randn(8),
        "h.0.wide.weight": torch.randn(columns),
        "h.0.wide.bias": torch.randn(20),
        "other.weight": torch.randn(columns[::-1]),
        "other.bias": torch.randn(20),
    }
    save_file(tensors, tmp_path / "base.safetensors")
    given = factors(f"{PEFT}h.0.square", sizes=(8, 8))
    with pytest.raises(KeyMismatch, match="is not so of layers beside it"):
        merged(tmp_path, of_peft(tmp_path, given, fan_in_fan_out=told))
    found = merged(tmp_path, of_peft(tmp_path, given, fan_in_fan_out=not told))
    delta = product(given, 2.0)
    expected = tensors["h.0.square.weight"] + (delta if told else delta.T)
    assert torch.allclose(found["h.0.square.weight"], expected, atol=1e-5)


def test_a_head_that_the_adapter_holds_too_is_replaced_and_then_changed(base):
    """As peft saves it for target_modules=["lm_head"] (save_embedding_layers="auto")."""
    folder, _ = base
    given = factors(f"{PEFT}lm_head", sizes=(9, 8))
    head = torch.randn(9, 8)
    adapter = of_peft(folder, given | {f"{PEFT}lm_head.base_layer.weight": head})
    found = merged(folder, adapter)["lm_head.weight"]
    assert torch.allclose(found, head + product(given, 2.0), atol=1e-5)


def test_several_adapters_are_added_up(base):
    folder, tensors = base
    one, other = factors(PEFT + Q), factors(JOINED, KOHYA)
    found = merged(folder, [of_peft(folder, one), of_file(folder, other)], scale=[0.5, 3])
    delta = found[f"{Q}.weight"] - tensors[f"{Q}.weight"]
    assert torch.allclose(delta, product(one, 1.0) + product(other, 3.0), atol=1e-4)


def test_a_wrapped_base_and_tied_weights(tmp_path):
    weight = torch.randn(12, 8)
    # a tensor for each name, of one storage, as in the state dict of a module
    names = ("embed", "lm_head", "first", "last")
    tensors = {f"module.{name}.weight": weight.detach() for name in names}
    torch.save(tensors, tmp_path / "base.pt")
    given = factors(PEFT + "lm_head")
    adapter = of_peft(tmp_path, given)
    merge_lora_checkpoint(tmp_path / "base.pt", adapter, tmp_path / "out.pt", verify=True)
    found = torch.load(tmp_path / "out.pt")
    assert torch.allclose(found["lm_head.weight"], weight + product(given, 2.0), atol=1e-5)
    assert len(found) == 4 and len({value.data_ptr() for value in found.values()}) == 1


@pytest.mark.parametrize("names", [["lm_head"], ["embed"], ["lm_head", "embed"]])
def test_modules_to_save_are_copies_that_tied_weights_do_not_follow(tmp_path, names):
    """As merge_and_unload of peft 0.21 has it."""
    weight = torch.randn(9, 8)
    tied = {"embed.weight": weight, "lm_head.weight": weight.detach()}
    torch.save(tied | {f"{Q}.weight": torch.randn(12, 8)}, tmp_path / "base.pt")
    whole = {f"{name}.weight": torch.randn(9, 8) for name in names}
    given = factors(PEFT + Q) | {PEFT + key: value for key, value in whole.items()}
    adapter = of_peft(tmp_path, given, modules_to_save=names)
    merge_lora_checkpoint(tmp_path / "base.pt", adapter, tmp_path / "out.pt", verify=True)
    found = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(found[key], value) for key, value in (tied | whole).items())


def test_one_object_under_two_names_of_which_one_is_replaced_is_refused(tmp_path):
    weight = torch.randn(9, 8)
    tied = {"embed.weight": weight, "lm_head.weight": weight}
    torch.save(tied | {f"{Q}.weight": torch.randn(12, 8)}, tmp_path / "base.pt")
    given = factors(PEFT + Q) | {f"{PEFT}lm_head.weight": torch.randn(9, 8)}
    adapter = of_peft(tmp_path, given, modules_to_save=["lm_head"])
    with pytest.raises(KeyConflict, match="one object with another tensor"):
        merge_lora_checkpoint(tmp_path / "base.pt", adapter, tmp_path / "out.pt")


def test_modules_to_save_take_the_place_of_those_of_the_base(base):
    folder, _ = base
    head = torch.randn(9, 8)
    given = factors(PEFT + Q) | {f"{PEFT}lm_head.weight": head}
    found = merged(folder, of_peft(folder, given, modules_to_save=["lm_head"]))
    assert torch.equal(found["lm_head.weight"], head)


def test_a_bias_that_is_written_three_times_is_the_plain_one(base):
    """As peft 0.21 writes bias="all" beside modules_to_save of the same module."""
    folder, _ = base
    start = f"{PEFT}model.layers.0.q_proj"
    weight, bias = torch.randn(12, 8), torch.randn(12)
    saved = {f"{start}.weight": weight, f"{start}.bias": bias}
    saved |= {f"{start}.modules_to_save.bias": bias.clone()}
    saved |= {f"{start}.original_module.bias": torch.zeros(12)}
    given = factors(f"{PEFT}lm_head", sizes=(9, 8)) | saved
    adapter = of_peft(folder, given, modules_to_save=["q_proj"], bias="all")
    found = merged(folder, adapter)
    assert torch.equal(found[f"{Q}.weight"], weight) and torch.equal(found[f"{Q}.bias"], bias)


def test_a_weight_that_is_named_as_a_parameter_has_the_scale_and_the_rounding_of_parameters(
    tmp_path,
):
    """`target_parameters` of peft 0.21: patterns compare the name with ``.weight``."""
    weight = torch.randn(12, 8).bfloat16()
    save_file({"layers.0.router.weight": weight}, tmp_path / "base.safetensors")
    given = factors(f"{PEFT}layers.0.router")
    config = {"target_parameters": ["router.weight"], "alpha_pattern": {"router.weight": 4}}
    found = merged(tmp_path, of_peft(tmp_path, given, **config))
    assert torch.equal(found["layers.0.router.weight"], weight + product(given).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_with_another_type_nothing_is_rounded_to_that_of_the_base(tmp_path, dtype):
    """As peft has it for a base that is loaded in that type."""
    weight, head = torch.randn(9, 8).bfloat16(), torch.randn(5, 8)
    tensors = {"embed.weight": weight, "head.weight": torch.zeros(5, 8).bfloat16()}
    save_file(tensors, tmp_path / "base.safetensors")
    given = factors(f"{PEFT}embed", ("lora_embedding_A", "lora_embedding_B"), (8, 9))
    delta = product({key: value.double() for key, value in given.items()}, 2.0).T
    adapter = of_peft(tmp_path, given | {f"{PEFT}head.weight": head}, modules_to_save=["head"])
    found = merged(tmp_path, adapter, dtype=dtype)
    expected = (weight.double() + delta).to(dtype)
    atol = 2e-6 if dtype is torch.float32 else 0
    assert torch.allclose(found["embed.weight"], expected, rtol=0, atol=atol)
    assert torch.equal(found["head.weight"], head.to(dtype))


@pytest.mark.parametrize("told", [[8, 0, 4], {"embed": [8, 0, 4]}, [3, 0, 4]])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_rows_that_were_trained_take_the_places_of_those_of_the_base(tmp_path, told, dtype):
    """`trainable_token_indices` of peft 0.21: an index_copy in the type of the base."""
    weight, values = torch.randn(9, 8).bfloat16(), torch.randn(3, 8)
    tensors = {"model.embed.weight": weight, f"{Q}.weight": torch.zeros(12, 8)}
    save_file(tensors, tmp_path / "base.safetensors")
    rows = {f"{PEFT}model.embed.token_adapter.trainable_tokens_delta": values}
    adapter = of_peft(tmp_path, factors(PEFT + Q) | rows, trainable_token_indices=told)
    found = merged(tmp_path, adapter, dtype=dtype)["model.embed.weight"]
    wide = weight.to(dtype or torch.bfloat16)
    numbers = told["embed"] if isinstance(told, dict) else told
    assert torch.equal(found, wide.index_copy(0, torch.tensor(numbers), values.to(wide.dtype)))


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        ([8, 0], KeyMismatch, r"is \[3, 8\], which does not fit 2 rows of \[9, 8\]"),
        ([1, 2, 9], KeyMismatch, "does not fit 3 rows"),
        ([1, 2, 2], RefusedObject, "does not tell"),
        ({"other": [1, 2, 3]}, RefusedObject, "does not tell"),
        (None, RefusedObject, "does not tell"),
        ([1, 2, -1], MalformedCheckpoint, "not numbers of rows"),
        ({"lm_head": 3}, MalformedCheckpoint, "not numbers of rows"),
        ("all", MalformedCheckpoint, "not numbers of rows"),
    ],
)
def test_rows_of_which_the_config_does_not_tell_are_refused(base, told, error, words):
    folder, _ = base
    given = {f"{PEFT}lm_head.token_adapter.trainable_tokens_delta": torch.randn(3, 8)}
    with pytest.raises(error, match=words):
        merged(folder, of_peft(folder, given, trainable_token_indices=told))


def test_it_is_an_edit_for_every_reader(base):
    folder, _ = base
    adapter = of_peft(folder, factors(PEFT + Q))
    expected = merged(folder, adapter)
    with open_checkpoint(adapter) as opened:
        edits = [MergeLora(opened)]
        loaded = load_portable(folder / "base.safetensors", edits=edits)
        assert all(torch.equal(loaded[key], value) for key, value in expected.items())


def test_an_adapter_that_says_no_scale_is_told_of(base):
    folder, _ = base
    given = factors(*CONVENTIONS["kohya"])
    for alpha, told in (({}, True), ({f"{CONVENTIONS['kohya'][0]}.alpha": torch.ones(())}, False)):
        of_file(folder, given | alpha)
        done = run("merge-lora", "base.safetensors", "adapter.safetensors", "out.pt", "--force",
                   cwd=folder)  # fmt: skip
        assert done.exit == 0
        assert ("says no scale for 1 module (no alpha, no config); 1 is taken" in done.err) is told


def test_the_command_lists_what_was_merged(base):
    folder, _ = base
    of_peft(folder, factors(PEFT + Q) | factors(f"{PEFT}lm_head", sizes=(9, 8)))
    done = run("merge-lora", "base.safetensors", "adapter", "out.safetensors", cwd=folder)
    assert done.exit == 0
    assert "1 tensor merged, rank 4, scale 2: model.layers.*.q_proj.weight" in done.err
    assert "1 tensor merged, rank 4, scale 2: lm_head.weight" in done.err
    assert "says no scale" not in done.err
    done = run("merge-lora", "base.safetensors", "out.safetensors", cwd=folder)
    assert done.exit == 2 and "there is no adapter" in done.err


# ------------------------------------------------------------------------------- what is refused


def test_a_part_that_finds_no_tensor(base):
    folder, _ = base
    given = factors(PEFT + Q) | factors(f"{PEFT}model.layers.7.q_proj")
    with pytest.raises(KeyMismatch, match=r"layers\.7\.q_proj, which the base does not have"):
        merged(folder, of_peft(folder, given))
    assert not (folder / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("key", "module", "presets"),
    [
        ("blk.0.attn_k", "model.layers.0.self_attn.k_proj", "gguf-llama or gguf-qwen2 or .*"),
        ("output", "lm_head", "meta-llama or .*"),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.k_proj", "phi3"),
    ],
)
def test_a_base_in_the_names_of_another_program_is_to_be_converted_first(
    tmp_path, key, module, presets
):
    path = tmp_path / "base.safetensors"
    save_file({f"{key}.weight": torch.randn(24, 8)}, path)
    adapter = of_peft(tmp_path, factors(PEFT + module, sizes=(8, 8)))
    with pytest.raises(KeyMismatch, match=f"convert it first, .* --preset {presets}$"):
        merged(tmp_path, adapter)
    if presets == "phi3":
        convert_checkpoint(path, path, preset="phi3:2,2", force=True)
        assert len(merged(tmp_path, adapter)) == 3


NEEDED = {
    "misfit": (factors(PEFT + Q, sizes=(12, 9)), {}, KeyMismatch, "do not fit the weight"),
    "other rank": (factors(PEFT + Q), {"r": 3}, KeyMismatch, "rank 4, and the config .* says 3"),
    "a lone A": (
        {f"{PEFT}{Q}.lora_A.weight": torch.ones(4, 8)}, {}, MalformedCheckpoint, "has no up beside",
    ),
    "other halves": (
        {**factors(PEFT + Q), f"{PEFT}{Q}.lora_B.weight": torch.ones(12, 5)}, {},
        MalformedCheckpoint, "cannot be multiplied",
    ),
    "NaN": (
        {**factors(Q, KOHYA), f"{Q}.alpha": torch.tensor(torch.nan)},
        {}, MalformedCheckpoint, "is nan, and not a finite number",
    ),
    "infinite alpha": (factors(PEFT + Q), {"lora_alpha": 1e300}, MalformedCheckpoint, "lora_alpha"),
    "no rank": (factors(PEFT + Q), {"r": True}, MalformedCheckpoint, "which is not a rank"),
    "huge rank": (factors(PEFT + Q), {"r": 1 << 40}, MalformedCheckpoint, "which is not a rank"),
    "vera": (factors(PEFT + Q), {"peft_type": "VERA"}, RefusedObject, "peft_type VERA"),
    "pissa": (factors(PEFT + Q), {"init_lora_weights": "pissa"}, RefusedObject, "changes the base"),
    "qalora": (factors(PEFT + Q), {"use_qalora": True}, RefusedObject, "not merged here"),
    "ia3": (
        {f"{PEFT}{Q}.ia3_l": torch.ones(12, 1)}, {"peft_type": "IA3"},
        RefusedObject, "peft_type IA3",
    ),
    "attention": (
        factors(PEFT + Q) | factors(f"{PEFT}attn.base_layer.out_proj"), {},
        RefusedObject, "is of nn.MultiheadAttention",
    ),
    "pattern": (
        factors(PEFT + Q), {"rank_pattern": {"(a+)+$": 4}}, RefusedObject, "is not matched here",
    ),
    "repeated": (
        factors(PEFT + Q), {"rank_pattern": {"(?:a+)+": 4}}, RefusedObject, "is not matched here",
    ),
    "many ways": (
        factors(PEFT + Q), {"rank_pattern": {"(a|a)" * 40: 4}}, RefusedObject, "is not matched",
    ),
    "optional": (
        factors(PEFT + Q), {"rank_pattern": {"a?" * 40: 4}}, RefusedObject, "is not matched",
    ),
    "counted": (
        factors(PEFT + Q), {"rank_pattern": {"a{0,90}" * 9: 4}}, RefusedObject, "is not matched",
    ),
    "flags": (factors(PEFT + Q), {"rank_pattern": {"(?i)q": 4}}, RefusedObject, "not matched"),
    "no pattern": (factors(PEFT + Q), {"rank_pattern": {"(": 4}}, RefusedObject, "not matched"),
    "other keys": (
        {**factors("unet." + Q), "unet.some.other": torch.ones(1)}, {},
        RefusedObject, "is not a key of an adapter",
    ),
    "no adapter": ({"weight": torch.ones(1)}, {}, RefusedObject, "has no key of an adapter"),
    "two adapters": (
        factors(Q, ("lora_A.one.weight", "lora_B.one.weight"))
        | factors("lm_head", ("lora_A.two.weight", "lora_B.two.weight"), (9, 8)),
        {}, RefusedObject, "holds several adapters: one, two",
    ),
    "twice": (
        factors("unet." + Q) | factors("transformer." + Q), {}, KeyConflict, "and so does",
    ),
    "bias": (
        factors(PEFT + "lm_head", sizes=(9, 8)) | {f"{PEFT}lm_head.lora_B.bias": torch.ones(9)}, {},
        KeyMismatch, r"lm_head\.bias, which the base does not have",
    ),
    "saved module": (
        factors(PEFT + Q) | {f"{PEFT}score.weight": torch.ones(2, 8)}, {},
        KeyMismatch, "takes the place of score.weight",
    ),
    "said twice": (
        {**factors(Q, KOHYA), f"{Q}.lora_A.weight": torch.ones(4, 8)}, {},
        RefusedObject, r"says again what .*lora_(down|A)\.weight says",
    ),
    "alpha alone": (
        {**factors(PEFT + Q), "lm_head.alpha": torch.tensor(4.0)}, {},
        KeyMismatch, "stands without the matrices",
    ),
    "a bias and a magnitude": (
        {f"{PEFT}{Q}.{role}": torch.ones(12) for role in ("lora_magnitude_vector", "lora_B.bias")},
        {}, KeyMismatch, "stands without the matrices",
    ),
    "rows and a product": (
        {
            **factors(f"{PEFT}lm_head", sizes=(9, 8)),
            f"{PEFT}lm_head.token_adapter.trainable_tokens_delta": torch.ones(1, 8),
        },
        {"trainable_token_indices": [3]}, RefusedObject, "of which other parts change something",
    ),
    "an embedding of other sizes": (
        factors(f"{PEFT}lm_head", ("lora_embedding_A", "lora_embedding_B"), (9, 8)), {},
        KeyMismatch, "do not fit the weight",
    ),
    "a long magnitude": (
        {**factors(PEFT + Q), f"{PEFT}{Q}.lora_magnitude_vector": torch.ones(11)},
        {"use_dora": True}, KeyMismatch, "do not fit the weight",
    ),
    "a matrix as magnitude": (
        {**factors(PEFT + Q), f"{PEFT}{Q}.lora_magnitude_vector": torch.ones(2, 6)},
        {"use_dora": True}, KeyMismatch, "do not fit the weight",
    ),
    "a saved module of another shape": (
        {**factors(PEFT + Q), f"{PEFT}lm_head.weight": torch.ones(10, 8)},
        {"modules_to_save": ["lm_head"]}, KeyMismatch, r"is \[10, 8\], and \[9, 8\] in the base",
    ),
    "a saved module of integers": (
        {**factors(PEFT + Q), f"{PEFT}lm_head.weight": torch.ones(9, 8, dtype=torch.int8)},
        {"modules_to_save": ["lm_head"]}, KeyMismatch, "is int8, and float32 in the base",
    ),
    "a flag of text": (factors(PEFT + Q), {"use_rslora": "no"}, MalformedCheckpoint, "not true or"),
    "names of a number": (
        factors(PEFT + Q), {"target_parameters": 3}, MalformedCheckpoint, "not a list of names",
    ),
    "patterns in a list": (
        factors(PEFT + Q), {"alpha_pattern": ["q"]}, MalformedCheckpoint, "is not an object",
    ),
    "half a LoHa": (
        {f"{PEFT}{Q}.hada_{name}": torch.ones(*shape) for name, shape in (
            ("w1_a", (12, 4)), ("w1_b", (4, 8)), ("w2_a", (12, 4)))},
        {"peft_type": "LOHA", "alpha": 4}, KeyMismatch, "has no hada_w2_b beside it",
    ),
    "halves of LoHa that do not multiply": (
        {f"{PEFT}{Q}.hada_{name}": torch.ones(*shape) for name, shape in (
            ("w1_a", (12, 4)), ("w1_b", (4, 8)), ("w2_a", (12, 4)), ("w2_b", (5, 8)))},
        {"peft_type": "LOHA", "alpha": 4}, KeyMismatch, r"cannot be multiplied with \[5, 8\]",
    ),
    "halves of LoHa that differ": (
        {f"{PEFT}{Q}.hada_{name}": torch.ones(*shape) for name, shape in (
            ("w1_a", (12, 4)), ("w1_b", (4, 8)), ("w2_a", (8, 4)), ("w2_b", (4, 12)))},
        {"peft_type": "LOHA", "alpha": 4}, KeyMismatch, "do not fit the weight",
    ),
    "LoKr of vectors": (
        {f"{PEFT}{Q}.lokr_w1": torch.ones(3, 2, 1), f"{PEFT}{Q}.lokr_w2": torch.ones(4, 4)},
        {"peft_type": "LOKR", "alpha": 4}, KeyMismatch, "do not fit the weight",
    ),
    "LoKr of other sizes": (
        {f"{PEFT}{Q}.lokr_w1": torch.ones(3, 2), f"{PEFT}{Q}.lokr_w2": torch.ones(4, 5)},
        {"peft_type": "LOKR", "alpha": 4}, KeyMismatch, "do not fit the weight",
    ),
    "scalars": (
        {key: torch.tensor(1.0) for key in factors(PEFT + Q)}, {},
        MalformedCheckpoint, "not a matrix",
    ),
    "integers": (
        {key: value.to(torch.int32) for key, value in factors(PEFT + Q).items()}, {},
        MalformedCheckpoint, "not a matrix",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_what_cannot_be_merged_is_refused_in_one_line(base, name):
    folder, _ = base
    given, config, error, words = NEEDED[name]
    adapter = of_peft(folder, given, **config)
    with pytest.raises(error, match=words):
        merged(folder, adapter)
    out = run("merge-lora", "base.safetensors", "adapter", "out.safetensors", cwd=folder)
    assert out.exit == 1 and out.err.startswith("error: ") and out.err.count("\n") == 1


@pytest.mark.parametrize(
    "pattern",
    [
        ".*layers.(" + "|".join(map(str, range(32))) + ").(q|k|v|o)_proj",
        "model.layers.(?:0|1).q_proj",
        "(?!lm).*q_proj",
        "(?=model)model.*q_proj",
    ],
)
def test_a_pattern_with_a_group_that_is_not_repeated_is_matched(base, pattern):
    folder, tensors = base
    given = factors(PEFT + Q)
    found = merged(folder, of_peft(folder, given, alpha_pattern={pattern: 4}))
    expected = tensors[f"{Q}.weight"] + product(given)
    assert torch.allclose(found[f"{Q}.weight"], expected, atol=1e-5)


def test_a_config_is_needed_and_has_to_be_one(base):
    folder, _ = base
    given = factors(PEFT + Q)
    with pytest.raises(RefusedObject, match=r"needs adapter_config\.json"):
        merged(folder, of_file(folder, given))
    adapter = of_peft(folder, given)
    (adapter / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="adapter_config"):
        merged(folder, adapter)


def test_a_config_of_peft_says_nothing_of_a_file_of_kohya_beside_it(base):
    folder, tensors = base
    path = of_peft(folder, factors(f"base_model.model.{Q}"), lora_alpha=200)
    given = factors("lora_unet_model_layers_0_q_proj", KOHYA)
    save_file(given, path / "kohya.safetensors")
    found = merged(folder, path / "kohya.safetensors")
    weight = f"{Q}.weight"
    assert torch.allclose(found[weight], tensors[weight] + product(given), atol=1e-5)


def test_an_alpha_that_the_metadata_contradicts(base):
    folder, _ = base
    given = factors(f"transformer.{Q}") | {f"transformer.{Q}.alpha": torch.tensor(7.0)}
    told = json.dumps({"transformer.r": 4, "transformer.lora_alpha": 4})
    path = folder / "adapter.safetensors"
    save_file(given, path, metadata={"lora_adapter_metadata": told})
    with pytest.raises(KeyMismatch, match=r"alpha: is 7, and the config of the adapter says 4"):
        merged(folder, path)


@pytest.mark.parametrize(
    ("text", "words"),
    [("[]", "is not a JSON object"), ('{"transformer.r": true}', "which is not a rank")],
)
def test_metadata_of_diffusers_that_are_odd(base, text, words):
    folder, _ = base
    path = folder / "adapter.safetensors"
    metadata = {"lora_adapter_metadata": text}
    save_file(factors(f"transformer.{Q}"), path, metadata=metadata)
    with pytest.raises(MalformedCheckpoint, match=f"lora_adapter_metadata: .*{words}"):
        merged(folder, path)


def test_what_a_file_without_a_config_does_not_say(base):
    """A matrix may be that of a transposed weight only where a config says so."""
    folder, _ = base
    with pytest.raises(KeyMismatch, match="do not fit the weight"):
        merged(folder, of_file(folder, factors("lora_unet_" + Q.replace(".", "_"), KOHYA, (8, 12))))
    given = factors(Q, KOHYA) | {f"{Q}.dora_scale": torch.ones(12, 1)}
    with pytest.raises(RefusedObject, match=r"has a dora_scale, .*; leave --scale out"):
        merged(folder, of_file(folder, given), scale=0.5)
    torch.save({**factors(Q, KOHYA), "step": 3}, folder / "adapter.pt")
    with pytest.raises(RefusedObject, match="step: is not a tensor"):
        merged(folder, folder / "adapter.pt")
    with pytest.raises(OptionRefused, match="there is no adapter"):
        merged(folder, [])


def test_a_square_weight_whose_orientation_the_config_denies(base):
    folder, _ = base
    given = factors(PEFT + Q, sizes=(8, 12)) | factors(
        f"{PEFT}model.layers.10.square", sizes=(8, 8)
    )
    with pytest.raises(KeyMismatch, match="is square, and fan_in_fan_out false"):
        merged(folder, of_peft(folder, given))


def test_a_quantised_base_needs_dequantize(tmp_path):
    codes = torch.randn(12, 8).to(torch.float8_e4m3fn)
    tensors = {f"{Q}.weight": codes, f"{Q}.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors, tmp_path / "base.safetensors")
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    given = factors(PEFT + Q)
    adapter = of_peft(tmp_path, given)
    with pytest.raises(RefusedObject, match=r"float8_e4m3fn.*add --dequantize"):
        merged(tmp_path, adapter)
    found = merged(tmp_path, adapter, dequantize=True, dtype="f32")
    expected = codes.float() + product(given, 2.0)
    assert torch.allclose(found[f"{Q}.weight"], expected, atol=1e-5)


def test_a_base_that_was_cast_to_float8_is_cast_back_first(tmp_path):
    """Without scales, as the files of Flux for ComfyUI, it has nothing that --dequantize takes."""
    given, path = factors("diffusion_model." + Q, KOHYA), tmp_path / "base.safetensors"
    values = torch.randn(12, 8).to(torch.float8_e4m3fn)
    save_file({f"{Q}.weight": values}, path)
    with pytest.raises(RefusedObject, match="its values were cast: convert the base"):
        merged(tmp_path, of_file(tmp_path, given))
    convert_checkpoint(path, path, dtype="bf16", force=True)
    found = merged(tmp_path, of_file(tmp_path, given))[f"{Q}.weight"]
    assert torch.equal(found, (values.float() + product(given)).bfloat16())


@pytest.mark.parametrize("told", [None, "bf16", "f16", "f32"])
@pytest.mark.parametrize("across", [None, False, True])
def test_the_sum_on_a_quantised_base_is_rounded_once_by_every_reader(tmp_path, across, told):
    """Its values are not rounded to the type of the model before. DoRA, across and not, too."""
    torch.manual_seed(5)
    codes, scale = torch.randn(12, 8).to(torch.float8_e4m3fn), torch.rand(12, 1)
    tensors = {f"{Q}.weight": codes, f"{Q}.weight_scale": scale}
    save_file(tensors, tmp_path / "base.safetensors")
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config = {"dtype": "bfloat16", "quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = (8, 12) if across else (12, 8)
    given = factors(PEFT + Q, sizes=sizes)
    delta = given[f"{PEFT}{Q}.lora_B.weight"].double() @ given[f"{PEFT}{Q}.lora_A.weight"].double()
    whole = codes.double() * scale.double() + 2 * (delta.T if across else delta)
    if across is not None:
        magnitude = torch.rand(sizes[0]) + 0.5
        given |= {f"{PEFT}{Q}.lora_magnitude_vector.weight": magnitude}
        norm = whole.norm(dim=0 if across else 1, keepdim=True)
        whole = whole / norm * (magnitude if across else magnitude[:, None])
    adapter = of_peft(tmp_path, given, fan_in_fan_out=bool(across))
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[told or "bf16"]
    found = merged(tmp_path, adapter, dequantize=True, dtype=told)[f"{Q}.weight"]
    assert found.dtype is dtype
    near = {"rtol": 0, "atol": 2e-6} if told == "f32" else {"rtol": 0, "atol": 0}
    assert torch.allclose(found, whole.to(dtype), **near)
    with open_checkpoint(adapter) as opened:
        edits = [Dequantize(), MergeLora(opened)]
        loaded = load_portable(tmp_path / "base.safetensors", edits=edits, dtype=told)
        assert torch.equal(loaded[f"{Q}.weight"], found)


@pytest.mark.parametrize("scale", ["x", float("nan"), [1, 2], None, True, [1, float("inf")]])
def test_a_scale_that_is_none(base, scale):
    folder, _ = base
    with pytest.raises(OptionRefused, match="scale"):
        merged(folder, of_peft(folder, factors(PEFT + Q)), scale=scale)


def test_adapters_have_to_be_open_and_edits_are_a_list(base):
    folder, _ = base
    with pytest.raises(OptionRefused, match="edits=3 is not a list of edits"):
        merge_lora_checkpoint(folder, folder, folder / "out.pt", edits=3)
    with pytest.raises(OptionRefused, match="are not open checkpoints"):
        MergeLora("adapter")


def test_parameters_that_are_too_many_to_be_tried_in_all_orders_are_refused(base):
    folder, _ = base
    names = [f"p{number}" for number in range(8)]
    save_file(
        {f"model.experts.{name}": torch.randn(8, 8) for name in names}, folder / "base.safetensors"
    )
    given = {}
    for level in range(len(names)):
        given |= factors(f"{PEFT}model.experts{level * '.base_layer'}", sizes=(8, 8))
    adapter = of_peft(folder, given, target_parameters=[f"experts.{name}" for name in names])
    with pytest.raises(KeyMismatch, match="is for 8 of 8 parameters, which are too many"):
        merged(folder, adapter)


def test_several_adapters_by_name_are_refused_beside_parts_without_a_name(base):
    folder, _ = base
    given = factors(PEFT + Q, ("lora_A.one.weight", "lora_B.one.weight"))
    given |= factors(f"{PEFT}lm_head", ("lora_A.two.weight", "lora_B.two.weight"), (9, 8))
    given[f"{PEFT}{Q}.alpha"] = torch.tensor(8.0)
    with pytest.raises(RefusedObject, match="holds several adapters: one, two"):
        merged(folder, of_peft(folder, given))


def test_two_tensors_for_one_of_the_model_are_refused(base):
    folder, _ = base
    given = factors(PEFT + Q)
    given[f"{PEFT}lm_head.weight"] = torch.zeros(9, 8)
    given[f"{PEFT}lm_head.modules_to_save.weight"] = torch.ones(9, 8)
    with pytest.raises(RefusedObject, match="of the model, as another key is"):
        merged(folder, of_peft(folder, given, modules_to_save=["lm_head"]))
