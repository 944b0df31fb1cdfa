"""Adapters in the names of another convention: names written out here by hand, values that do not
change, and what is refused. `make families` holds the names against diffusers and peft.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from ckptconv import (
    CheckpointError,
    KeyConflict,
    KeyMismatch,
    OptionRefused,
    OutputRefused,
    RefusedObject,
    convert_checkpoint,
    merge_lora_checkpoint,
)
from helpers.program import run, run_bytes

H, MLP = 8, 32
PRESETS = ("lora-peft", "lora-kohya", "lora-diffusers", "lora-comfyui")


def weights(names, prefix=""):
    """The weights of a base: names with their shapes."""
    return {f"{prefix}{name}.weight": torch.randn(shape) for name, shape in names.items()}


FLUX = {
    **{f"transformer_blocks.0.attn.{name}": (H, H) for name in (
        "to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out",
    )},
    "transformer_blocks.0.ff.net.0.proj": (MLP, H),
    **{f"single_transformer_blocks.0.attn.{name}": (H, H) for name in ("to_q", "to_k", "to_v")},
    "single_transformer_blocks.0.proj_mlp": (MLP, H),
    "single_transformer_blocks.0.proj_out": (H, H + MLP),
    "x_embedder": (H, 4),
}  # fmt: skip
BFL = {
    "double_blocks.0.img_attn.qkv": (3 * H, H),
    "double_blocks.0.txt_attn.qkv": (3 * H, H),
    "double_blocks.0.img_attn.proj": (H, H),
    "double_blocks.0.txt_attn.proj": (H, H),
    "double_blocks.0.img_mlp.0": (MLP, H),
    "single_blocks.0.linear1": (3 * H + MLP, H),
    "single_blocks.0.linear2": (H, H + MLP),
    "img_in": (H, 4),
}
SD = {
    "conv_in": (H, 4, 3, 3),
    "time_embedding.linear_1": (H, H),
    "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q": (H, H),
    "down_blocks.0.resnets.1.conv1": (H, H, 3, 3),
    "down_blocks.0.downsamplers.0.conv": (H, H, 3, 3),
    "mid_block.attentions.0.proj_in": (H, H),
    "up_blocks.1.attentions.2.transformer_blocks.0.ff.net.0.proj": (MLP, H),
    "up_blocks.1.upsamplers.0.conv": (H, H, 3, 3),
}
LDM = {
    "input_blocks.0.0": (H, 4, 3, 3),
    "time_embed.0": (H, H),
    "input_blocks.4.1.transformer_blocks.0.attn1.to_q": (H, H),
    "input_blocks.2.0.in_layers.2": (H, H, 3, 3),
    "input_blocks.3.0.op": (H, H, 3, 3),
    "middle_block.1.proj_in": (H, H),
    "output_blocks.5.1.transformer_blocks.0.ff.net.0.proj": (MLP, H),
    "output_blocks.5.2.conv": (H, H, 3, 3),
}
CLIP = {f"text_model.encoder.layers.0.self_attn.{c}_proj": (H, H) for c in ("q", "k", "v", "out")}
CLIP |= {"text_model.encoder.layers.0.mlp.fc1": (MLP, H)}
T5 = {"encoder.block.0.layer.0.SelfAttention.q": (H, H)}
LLAMA = {"model.layers.0.self_attn.q_proj": (12, H), "model.layers.11.mlp.down_proj": (H, MLP)}
LLAMA |= {"lm_head": (20, H)}


def sdxl(names, label):
    return {**names, label: (H, H)}


BASES = {
    "sd": weights(LDM, "model.diffusion_model.")
    | weights(CLIP, "cond_stage_model.transformer."),
    "sd of diffusers": weights(SD, "unet.") | weights(CLIP, "text_encoder."),
    "sdxl": weights(sdxl(LDM, "label_emb.0.0"), "model.diffusion_model.")
    | weights(CLIP, "conditioner.embedders.0.transformer."),
    "sdxl of diffusers": weights(sdxl(SD, "add_embedding.linear_1"), "unet.")
    | weights(CLIP, "text_encoder.") | weights(CLIP, "text_encoder_2."),
    "flux": weights(BFL, "model.diffusion_model.")
    | weights(T5, "text_encoders.t5xxl.transformer."),
    "flux of diffusers": weights(FLUX),
    "llama": weights(LLAMA),
}  # fmt: skip

NAMES = {
    ("sd", "lora-kohya"): {
        "input_blocks.4.1.transformer_blocks.0.attn1.to_q":
            "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q",
        "input_blocks.3.0.op": "lora_unet_down_blocks_0_downsamplers_0_conv",
        "output_blocks.5.2.conv": "lora_unet_up_blocks_1_upsamplers_0_conv",
        "self_attn.q_proj": "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
    },
    ("sdxl of diffusers", "lora-kohya"): {
        "down_blocks.0.resnets.1.conv1": "lora_unet_input_blocks_2_0_in_layers_2",
        "down_blocks.0.downsamplers.0.conv": "lora_unet_input_blocks_3_0_op",
        "up_blocks.1.upsamplers.0.conv": "lora_unet_output_blocks_5_2_conv",
        "text_encoder.text_model.encoder.layers.0.mlp.fc1":
            "lora_te1_text_model_encoder_layers_0_mlp_fc1",
        "text_encoder_2.text_model.encoder.layers.0.mlp.fc1":
            "lora_te2_text_model_encoder_layers_0_mlp_fc1",
    },
    ("sd", "lora-diffusers"): {
        "middle_block.1.proj_in": "unet.mid_block.attentions.0.proj_in",
        "self_attn.out_proj": "text_encoder.text_model.encoder.layers.0.self_attn.out_proj",
    },
    ("sdxl of diffusers", "lora-comfyui"): {
        "mid_block.attentions.0.proj_in": "diffusion_model.middle_block.1.proj_in",
        "text_encoder_2.text_model.encoder.layers.0.self_attn.k_proj":
            "text_encoders.clip_g.transformer.text_model.encoder.layers.0.self_attn.k_proj",
        "text_encoder.text_model.encoder.layers.0.self_attn.k_proj":
            "text_encoders.clip_l.transformer.text_model.encoder.layers.0.self_attn.k_proj",
    },
    ("flux of diffusers", "lora-kohya"): {
        "transformer_blocks.0.attn.to_add_out": "lora_unet_double_blocks_0_txt_attn_proj",
    },
    ("flux", "lora-kohya"): {  # LORA_PREFIX_TEXT_ENCODER_T5 of sd-scripts' networks/lora_flux.py
        "SelfAttention.q": "lora_te3_encoder_block_0_layer_0_SelfAttention_q",
    },
    ("flux", "lora-diffusers"): {
        "SelfAttention.q": "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q",
        "single_blocks.0.linear2": "transformer.single_transformer_blocks.0.proj_out",
    },
    ("llama", "lora-peft"): {"model.layers.11.mlp.down_proj":
        "base_model.model.model.layers.11.mlp.down_proj"},
    ("llama", "lora-kohya"): {"model.layers.11.mlp.down_proj":
        "lycoris_model_layers_11_mlp_down_proj"},
}  # fmt: skip


def product(name, weight, rank, ends=("lora_A.weight", "lora_B.weight")):
    """Matrices for a weight, of random values."""
    shape = weight.shape
    down = torch.randn(rank, *shape[1:])
    up = torch.randn(shape[0], rank, *(1,) * (len(shape) - 2))
    return {f"{name}.{ends[0]}": down, f"{name}.{ends[1]}": up}


def of_peft(folder, base, ranks, alphas, dtype=torch.float32):
    """An adapter of peft for all linear and convolutional layers of a base, as peft writes it."""
    tensors, config = {}, {"peft_type": "LORA", "r": 4, "lora_alpha": 6}
    config |= {"rank_pattern": {}, "alpha_pattern": {}}
    for at, (key, weight) in enumerate(base.items()):
        module = key.removesuffix(".weight")
        rank, alpha = ranks[at % len(ranks)], alphas[at % len(alphas)]
        if rank != 4:
            config["rank_pattern"][module] = rank
        if alpha != 6:
            config["alpha_pattern"][module] = alpha
        tensors |= product(f"base_model.model.{module}", weight, rank)
    path = folder / "given"
    path.mkdir()
    tensors = {key: value.to(dtype) for key, value in tensors.items()}
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def renamed(given, out, preset, base):
    """The adapter in another convention; for peft `out` becomes a folder."""
    if preset != "lora-peft":
        out = out.with_name(f"{out.name}.safetensors")
    convert_checkpoint(
        given, f"{out}/" if preset == "lora-peft" else out, preset=preset, like=base, verify=True
    )
    return out


def merged(base, adapter, out):
    merge_lora_checkpoint(base, adapter, out)
    return load_file(out)


def same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.dtype is other[key].dtype and torch.equal(value, other[key]), key


@pytest.fixture
def base_of(tmp_path):
    def of(name):
        path = tmp_path / f"{name}.safetensors"
        save_file({key: value.bfloat16() for key, value in BASES[name].items()}, path)
        return path

    return of


def presets_for(name):
    return [p for p in PRESETS if name != "llama" or p in ("lora-peft", "lora-kohya")]


@pytest.mark.parametrize("name", BASES)
def test_an_adapter_of_other_names_has_the_same_values(name, base_of, tmp_path):
    base = base_of(name)
    is_flux = name.startswith("flux")  # in which parts of one weight have one rank and alpha
    ranks, alphas = ((4,), (6,)) if is_flux else ((4, 4, 3), (6, 6, 2.5))
    given = of_peft(tmp_path, BASES[name], ranks, alphas)
    expected = merged(base, given, tmp_path / "expected.safetensors")
    for preset in presets_for(name):
        there = renamed(given, tmp_path / preset, preset, base)
        same(merged(base, there, tmp_path / f"by {preset}.safetensors"), expected)
        back = renamed(there, tmp_path / f"back from {preset}", "lora-peft", base)
        same(merged(base, back, tmp_path / f"again {preset}.safetensors"), expected)
        if not is_flux:  # the matrices of one weight have one rank, put together and apart
            same(*(load_file(each / "adapter_model.safetensors") for each in (back, given)))


@pytest.mark.parametrize(("name", "preset"), NAMES)
def test_names_are_those_of_the_convention(name, preset, base_of, tmp_path):
    given = of_peft(tmp_path, BASES[name], (4,), (4,))
    out = renamed(given, tmp_path / "out", preset, base_of(name))
    file = out / "adapter_model.safetensors" if preset == "lora-peft" else out
    ends = {"lora-peft": "lora_A", "lora-diffusers": "lora_A"}.get(preset, "lora_down")
    tensors, made = load_file(given / "adapter_model.safetensors"), load_file(file)
    for end, wanted in NAMES[name, preset].items():
        [key] = [key for key in tensors if key.endswith(f"{end}.lora_A.weight")]
        assert torch.equal(made[f"{wanted}.{ends}.weight"], tensors[key])


def test_flux_between_every_two_conventions_comes_back(base_of, tmp_path):
    for name in ("flux", "flux of diffusers"):
        base = base_of(name)
        given = of_peft(tmp_path, BASES[name], (4,), (3,), torch.float16)
        for one in PRESETS:
            first = renamed(given, tmp_path / f"{name} {one}", one, base)
            for other in PRESETS:
                there = renamed(first, tmp_path / f"{name} {one} {other}", other, base)
                back = renamed(there, tmp_path / f"{name} {one} {other} back", one, base)
                files = [each / "adapter_model.safetensors" if each.is_dir() else each
                         for each in (first, back)]  # fmt: skip
                same(*map(load_file, files))
        for file in given.iterdir():
            file.unlink()
        given.rmdir()


KOHYA = ("lora_down.weight", "lora_up.weight")


def of_flux(dense):
    """An adapter of kohya for q, k and v in one: dense, or with a block for each."""
    start = "lora_unet_double_blocks_0_img_attn_qkv"
    down, up = torch.randn(6, H), torch.randn(3 * H, 6)
    if not dense:
        for at in range(3):
            keep = up[at * H : at * H + H, 2 * at : 2 * at + 2].clone()
            up[at * H : at * H + H] = 0
            up[at * H : at * H + H, 2 * at : 2 * at + 2] = keep
    return {f"{start}.{KOHYA[0]}": down, f"{start}.{KOHYA[1]}": up,
            f"{start}.alpha": torch.tensor(3.0)}  # fmt: skip


@pytest.mark.parametrize("dense", [True, False])
def test_q_k_and_v_of_one_weight_get_its_matrix_or_a_block_each(dense, base_of, tmp_path):
    tensors = of_flux(dense)
    save_file(tensors, tmp_path / "kohya.safetensors")
    out = renamed(
        tmp_path / "kohya.safetensors", tmp_path / "out", "lora-diffusers", base_of("flux")
    )
    made = load_file(out)
    down, up = (tensors[f"lora_unet_double_blocks_0_img_attn_qkv.{end}"] for end in KOHYA)
    for at, letter in enumerate("qkv"):
        name = f"transformer.transformer_blocks.0.attn.to_{letter}"
        columns = slice(None) if dense else slice(2 * at, 2 * at + 2)
        assert torch.equal(made[f"{name}.lora_A.weight"], down[columns])
        assert torch.equal(made[f"{name}.lora_B.weight"], up[at * H : at * H + H, columns])
    with safe_open(out, "pt") as opened:
        told = json.loads(opened.metadata()["lora_adapter_metadata"])
    rank = 6 if dense else 2
    assert told["transformer.r"] == rank and told["transformer.lora_alpha"] == rank / 2


@pytest.mark.parametrize("letters", ["qkv", "v", "kv"])
def test_parts_become_blocks_of_one_weight_with_zeros_elsewhere(letters, base_of, tmp_path):
    start = "transformer.transformer_blocks.0.attn.to_"
    given = {}
    for letter in letters:
        given |= product(start + letter, torch.empty(H, H), 2)
    save_file(given, tmp_path / "given.safetensors")
    base = base_of("flux of diffusers")
    out = renamed(tmp_path / "given.safetensors", tmp_path / "out", "lora-kohya", base)
    made = load_file(out)
    down, up = (made[f"lora_unet_double_blocks_0_img_attn_qkv.{end}"] for end in KOHYA)
    assert torch.equal(down, torch.cat([given[f"{start}{each}.lora_A.weight"] for each in letters]))
    expected = torch.zeros(3 * H, 2 * len(letters))
    for at, each in enumerate(letters):
        row = "qkv".index(each) * H
        expected[row : row + H, 2 * at : 2 * at + 2] = given[f"{start}{each}.lora_B.weight"]
    assert torch.equal(up, expected)
    back = renamed(out, tmp_path / "back", "lora-diffusers", base)
    same(load_file(back), given)


def test_alphas_stay_what_they_are_in_every_type(base_of, tmp_path):
    base = base_of("sd")
    name = "lora_unet_mid_block_attentions_0_proj_in"
    for dtype, alpha in ((torch.float16, 3.5), (torch.bfloat16, 16), (torch.float32, 0.1)):
        tensors = {
            **product(name, torch.empty(H, H), 4, KOHYA),
            f"{name}.alpha": torch.tensor(alpha),
        }
        tensors = {key: value.to(dtype) for key, value in tensors.items()}
        given = tmp_path / f"{dtype}.safetensors"
        save_file(tensors, given)
        for preset in PRESETS:
            there = renamed(given, tmp_path / f"{dtype} {preset}", preset, base)
            back = renamed(there, tmp_path / f"{dtype} {preset} back", "lora-kohya", base)
            same(load_file(back), tensors)


def test_rank_stabilized_scales_are_alphas_elsewhere(base_of, tmp_path):
    base = base_of("llama")
    given = of_peft(tmp_path, BASES["llama"], (4, 3), (6,))
    config = json.loads((given / "adapter_config.json").read_text())
    (given / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True}))
    out = renamed(given, tmp_path / "kohya", "lora-kohya", base)
    alphas = [float(value) for key, value in load_file(out).items() if key.endswith(".alpha")]
    assert sorted(alphas) == pytest.approx([6 * 3**0.5, 12, 12])
    expected = merged(base, given, tmp_path / "one.safetensors")
    same(merged(base, out, tmp_path / "two.safetensors"), expected)


def test_a_scale_that_no_alpha_gives_is_refused(base_of, tmp_path):
    scale = 13 / math.sqrt(3)
    near = scale * 3
    around = math.nextafter(near, -math.inf), near, math.nextafter(near, math.inf)
    below, _, above = (alpha / 3 - scale for alpha in around)
    assert below < 0 < above and near / 3 != scale  # and so does none that is farther
    given = of_peft(tmp_path, {"lm_head.weight": torch.empty(20, H)}, (3,), (13,))
    config = json.loads((given / "adapter_config.json").read_text())
    (given / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True}))
    with pytest.raises(
        RefusedObject, match=r"is scaled by 7\.50555\d+, which no alpha gives at ra"
    ):
        renamed(given, tmp_path / "out", "lora-kohya", base_of("llama"))


def test_the_config_names_just_the_modules_that_are_adapted(base_of, tmp_path):
    base = base_of("llama")
    part = {key: value for key, value in BASES["llama"].items() if "lm_head" not in key}
    given = of_peft(tmp_path, part, (4,), (6,))
    kohya = renamed(given, tmp_path / "kohya", "lora-kohya", base)
    out = renamed(kohya, tmp_path / "out", "lora-peft", base)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 6, "LORA")
    again = renamed(given, tmp_path / "again", "lora-peft", base)
    same(*(load_file(each / "adapter_model.safetensors") for each in (again, given)))


def test_the_second_text_encoder_in_the_names_of_open_clip(tmp_path):
    start = "conditioner.embedders.1.model.transformer.resblocks.0."
    weights = {
        f"{start}attn.in_proj_weight": torch.randn(3 * H, H),
        f"{start}attn.in_proj_bias": torch.randn(3 * H),
        f"{start}attn.out_proj.weight": torch.randn(H, H),
        f"{start}mlp.c_fc.weight": torch.randn(MLP, H),
    }
    weights |= BASES["sdxl"]
    save_file(weights, tmp_path / "base.safetensors")
    path = "lora_te2_text_model_encoder_layers_0_"
    given = {}
    for name, rows in (("self_attn_k_proj", H), ("self_attn_out_proj", H), ("mlp_fc1", MLP)):
        given |= product(path + name, torch.empty(rows, H), 4, KOHYA)
    save_file(given, tmp_path / "kohya.safetensors")
    found = merged(
        tmp_path / "base.safetensors", tmp_path / "kohya.safetensors", tmp_path / "m.safetensors"
    )
    delta = {
        name: given[f"{path}{name}.{KOHYA[1]}"] @ given[f"{path}{name}.{KOHYA[0]}"]
        for name in ("self_attn_k_proj", "self_attn_out_proj", "mlp_fc1")
    }
    expected = {key: value.clone() for key, value in weights.items()}
    expected[f"{start}attn.in_proj_weight"][H : 2 * H] += delta["self_attn_k_proj"]
    expected[f"{start}attn.out_proj.weight"] += delta["self_attn_out_proj"]
    expected[f"{start}mlp.c_fc.weight"] += delta["mlp_fc1"]
    for key, value in expected.items():
        assert torch.allclose(found[key], value, atol=1e-5), key
    out = renamed(
        tmp_path / "kohya.safetensors", tmp_path / "out", "lora-diffusers",
        tmp_path / "base.safetensors",
    )  # fmt: skip
    name = "text_encoder_2.text_model.encoder.layers.0.self_attn.k_proj.lora_A.weight"
    assert torch.equal(load_file(out)[name], given[f"{path}self_attn_k_proj.{KOHYA[0]}"])
    with pytest.raises(KeyMismatch, match="one weight for q, k and v"):
        renamed(tmp_path / "kohya.safetensors", tmp_path / "p", "lora-peft",
                tmp_path / "base.safetensors")  # fmt: skip


def test_parts_that_only_some_conventions_have(base_of, tmp_path):
    base = base_of("sd")
    name = "lora_unet_mid_block_attentions_0_proj_in"
    given = {
        f"{name}.diff": torch.randn(H, H),
        "lora_unet_time_embedding_linear_1.hada_w1_a": torch.randn(H, 2),
        "lora_unet_time_embedding_linear_1.hada_w1_b": torch.randn(2, H),
        "lora_unet_time_embedding_linear_1.hada_w2_a": torch.randn(H, 2),
        "lora_unet_time_embedding_linear_1.hada_w2_b": torch.randn(2, H),
        "lora_unet_time_embedding_linear_1.alpha": torch.tensor(1.0),
    }
    save_file(given, tmp_path / "kohya.safetensors")
    there = renamed(tmp_path / "kohya.safetensors", tmp_path / "comfy", "lora-comfyui", base)
    assert "diffusion_model.time_embed.0.hada_w1_a" in load_file(there)
    same(load_file(renamed(there, tmp_path / "back", "lora-kohya", base)), given)
    with pytest.raises(RefusedObject, match="has no name in lora-diffusers"):
        renamed(tmp_path / "kohya.safetensors", tmp_path / "d", "lora-diffusers", base)


LM_HEAD = "base_model.model.lm_head"
OF_PEFT_ALONE = {
    "experts": (
        product(f"{LM_HEAD}.base_layer", torch.empty(20, H), 4), {}, "is of the weights of all exp",
    ),
    "transposed": (
        product(LM_HEAD, torch.empty(H, 20), 4), {"fan_in_fan_out": True}, "says fan_in_fan_out",
    ),
    "a saved module": (
        {**product(LM_HEAD, torch.empty(20, H), 4), "base_model.model.norm.weight": torch.ones(H)},
        {"modules_to_save": ["norm"]}, "is a tensor of the model itself",
    ),
    "LoHa without alphas": (
        {f"{LM_HEAD}.hada_{name}": torch.ones(*shape) for name, shape in (
            ("w1_a", (20, 4)), ("w1_b", (4, H)), ("w2_a", (20, 4)), ("w2_b", (4, H)))},
        {"peft_type": "LOHA", "alpha": 4}, "is scaled by a config",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_PEFT_ALONE)
def test_what_peft_alone_has_is_refused(name, base_of, tmp_path):
    tensors, config, words = OF_PEFT_ALONE[name]
    folder = tmp_path / "given"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedObject, match=words):
        renamed(folder, tmp_path / "out", "lora-kohya", base_of("llama"))
    assert not (tmp_path / "out.safetensors").exists()


def test_magnitudes_of_some_modules_have_no_place(base_of, tmp_path):
    """A config says `use_dora` for all or none; q, k and v that become one have one scale each."""
    blocks = "transformer.transformer_blocks.0.attn."
    given = product(f"{blocks}to_q", torch.empty(H, H), 4)
    given |= product(f"{blocks}to_k", torch.empty(H, H), 4)
    given[f"{blocks}to_q.lora_magnitude_vector"] = torch.ones(H)
    save_file(given, tmp_path / "given.safetensors")
    base = base_of("flux of diffusers")
    with pytest.raises(RefusedObject, match=r"has no magnitude \(DoRA\), which others have"):
        renamed(tmp_path / "given.safetensors", tmp_path / "out", "lora-diffusers", base)
    given[f"{blocks}to_q.dora_scale"] = given.pop(f"{blocks}to_q.lora_magnitude_vector")
    save_file(given, tmp_path / "given.safetensors")
    with pytest.raises(RefusedObject, match="is for a part of a weight of lora-kohya"):
        renamed(tmp_path / "given.safetensors", tmp_path / "out", "lora-kohya", base)


def test_a_saved_module_stays_as_it_is_in_an_adapter_of_peft(base_of, tmp_path):
    given = of_peft(tmp_path, {"lm_head.weight": torch.empty(20, H)}, (4,), (6,))
    whole = load_file(given / "adapter_model.safetensors")
    whole["base_model.model.norm.weight"] = torch.randn(H)
    save_file(whole, given / "adapter_model.safetensors")
    out = renamed(given, tmp_path / "out", "lora-peft", base_of("llama"))
    same(load_file(out / "adapter_model.safetensors"), whole)


def test_one_shape_of_the_base_is_enough_to_know_a_wrong_one(base_of, tmp_path):
    given = of_peft(
        tmp_path, {"model.layers.0.self_attn.q_proj.weight": torch.empty(13, H)}, (4,), (4,)
    )
    with pytest.raises(KeyMismatch, match=r"do not fit 12 × 8 values of the base"):
        renamed(given, tmp_path / "out", "lora-kohya", base_of("llama"))


def test_scales_that_differ_are_not_put_into_one_weight(base_of, tmp_path):
    base = base_of("flux of diffusers")
    given = of_peft(tmp_path, BASES["flux of diffusers"], (4,), (4, 2))
    with pytest.raises(RefusedObject, match=r"is scaled by .* in lora-kohya they are one module"):
        renamed(given, tmp_path / "out", "lora-kohya", base)
    assert renamed(given, tmp_path / "out", "lora-diffusers", base).exists()


def test_two_modules_with_one_name_in_underscores_are_refused(tmp_path):
    base = {f"{name}.weight": torch.randn(H, H) for name in ("a.b_c", "a_b.c")}
    save_file(base, tmp_path / "base.safetensors")
    given = of_peft(tmp_path, base, (4,), (6,))
    with pytest.raises(KeyConflict, match=r"would be lycoris_a_b_c, which may mean a\.b_c, a_b\.c"):
        renamed(given, tmp_path / "out", "lora-kohya", tmp_path / "base.safetensors")


@pytest.mark.parametrize("preset", ["lora-kohya", "lora-diffusers"])
def test_a_weight_and_a_part_of_it_in_one_file_are_refused(preset, base_of, tmp_path):
    whole = torch.empty(3 * H, H)
    given = product("lora_unet_double_blocks_0_img_attn_qkv", whole, 4, KOHYA)
    given |= product("transformer.transformer_blocks.0.attn.to_q", torch.empty(H, H), 4)
    save_file(given, tmp_path / "given.safetensors")
    with pytest.raises(KeyConflict, match=r"is for the same module as lora_unet_.*, or a part"):
        renamed(tmp_path / "given.safetensors", tmp_path / "out", preset, base_of("flux"))


def test_what_finds_no_name_is_listed_and_nothing_is_written(base_of, tmp_path):
    base = base_of("sd")
    given = product("lora_unet_mid_block_attentions_0_proj_in", torch.empty(H, H), 4, KOHYA)
    for name in ("lora_unet_mid_block_resnets_7_conv1", "lora_te_text_model_other"):
        given |= product(name, torch.empty(H, H), 4, KOHYA)
    save_file(given, tmp_path / "given.safetensors")
    words = "lora_te_text_model_other, which the base does not have; nor lora_unet_mid_block_resnet"
    with pytest.raises(KeyMismatch, match=words):
        renamed(tmp_path / "given.safetensors", tmp_path / "out", "lora-diffusers", base)
    assert not (tmp_path / "out.safetensors").exists()
    out = run(
        "convert", "given.safetensors", "out.safetensors", "--exclude", "*_7_*", "--exclude",
        "lora_te_*", "--preset", "lora-diffusers", "--like", base, cwd=tmp_path,
    )  # fmt: skip
    assert out.exit == 0 and len(load_file(tmp_path / "out.safetensors")) == 2
    assert "2 of 2 keys renamed, e.g. lora_unet_mid_block_attentions_0_proj_in.lora_down" in out.err


def test_a_language_model_has_no_names_of_diffusers(base_of, tmp_path):
    given = of_peft(tmp_path, BASES["llama"], (4,), (4,))
    for preset in ("lora-diffusers", "lora-comfyui"):
        with pytest.raises(KeyMismatch, match=f"{preset} has no names for .* --preset lora-peft"):
            renamed(given, tmp_path / "out", preset, base_of("llama"))


def test_another_preset_is_named_where_the_base_is_no_model_that_is_known(tmp_path):
    """Qwen-Image has names of Flux among others; of an adapter nothing is to be left out."""
    modules = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.img_mlp.net.0.proj")
    base = weights(dict.fromkeys(modules, (H, H)))
    save_file(base, tmp_path / "base.safetensors")
    given = of_peft(tmp_path, base, (4,), (4,))
    with pytest.raises(KeyMismatch, match=r"no name in lora-kohya for .* --preset lora-peft$"):
        renamed(given, tmp_path / "out", "lora-kohya", tmp_path / "base.safetensors")


def test_a_text_encoder_alone_does_not_say_which_it_is(tmp_path):
    save_file(weights(CLIP), tmp_path / "base.safetensors")
    given = of_peft(tmp_path, weights(CLIP), (4,), (4,))
    for preset, words in (("lora-diffusers", "neither the base nor the adapter"),
                          ("lora-kohya", "neither the base nor the adapter")):  # fmt: skip
        with pytest.raises(KeyMismatch, match=words):
            renamed(given, tmp_path / "out", preset, tmp_path / "base.safetensors")
    save_file(weights(CLIP, "text_encoder."), tmp_path / "named.safetensors")
    own = weights(CLIP, "text_encoder.")
    for file in given.iterdir():
        file.unlink()
    given.rmdir()
    given = of_peft(tmp_path, own, (4,), (4,))
    with pytest.raises(KeyMismatch, match="lora_te_ in Stable Diffusion 1 and 2, and lora_te1_"):
        renamed(given, tmp_path / "out", "lora-kohya", tmp_path / "named.safetensors")


REFUSED = {
    "no base": ({}, OptionRefused, "--like BASE"),
    "two": ({"preset": ["lora-kohya", "lora-comfyui"]}, OptionRefused, "name the same parts"),
    "mapping": ({"save_mapping": "map.json"}, OptionRefused, "--save-mapping"),
    "unexpected": ({"drop_unexpected": True}, OptionRefused, "--drop-unexpected says nothing"),
    "tied": ({"tied": "duplicate"}, OptionRefused, "--tied says nothing"),
    "shards": ({"max_shard_size": "1MB"}, OptionRefused, "is one file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_say_nothing_for_an_adapter(name, base_of, tmp_path):
    options, error, words = REFUSED[name]
    given = of_peft(tmp_path, BASES["llama"], (4,), (4,))
    if name != "no base":
        options = {"like": base_of("llama"), **options}
    options = {"preset": "lora-kohya", **options}
    if "save_mapping" in options:
        options["save_mapping"] = tmp_path / options["save_mapping"]
    with pytest.raises(error, match=words):
        convert_checkpoint(given, tmp_path / "out.safetensors", **options)
    assert not (tmp_path / "out.safetensors").exists()


def test_where_the_files_of_libraries_go(base_of, tmp_path):
    given = of_peft(tmp_path, BASES["sd of diffusers"], (4,), (4,))
    like = base_of("sd of diffusers")
    with pytest.raises(OutputRefused, match="peft reads a folder"):
        convert_checkpoint(given, tmp_path / "lora.safetensors", preset="lora-peft", like=like)
    with pytest.raises(OutputRefused, match="lora-kohya makes one file"):
        convert_checkpoint(given, f"{tmp_path}/out/", preset="lora-kohya", like=like)
    convert_checkpoint(given, f"{tmp_path}/d/", preset="lora-diffusers", like=like)
    assert [each.name for each in (tmp_path / "d").iterdir()] == [
        "pytorch_lora_weights.safetensors"
    ]
    with pytest.raises(CheckpointError, match="write safetensors"):
        convert_checkpoint(given, tmp_path / "out.pt", preset="lora-diffusers", like=like)
    convert_checkpoint(given, f"{tmp_path}/p/", preset="lora-peft", like=like, with_files=True)
    names = {each.name for each in (tmp_path / "p").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json"}
    with pytest.raises(CheckpointError, match="exists"):
        convert_checkpoint(given, f"{tmp_path}/p/", preset="lora-peft", like=like)


def test_a_pipeline_of_diffusers_is_a_base_of_several_components(base_of, tmp_path):
    given = of_peft(tmp_path, BASES["sdxl of diffusers"], (4, 3), (4,))
    folder = tmp_path / "pipeline"
    for name in ("unet", "text_encoder", "text_encoder_2"):
        (folder / name).mkdir(parents=True)
        own = {
            key.removeprefix(f"{name}."): value
            for key, value in BASES["sdxl of diffusers"].items()
            if key.startswith(f"{name}.")
        }
        end = "model" if "text" in name else "diffusion_pytorch_model"
        save_file(own, folder / name / f"{end}.safetensors")
    (folder / "model_index.json").write_text("{}")
    made = renamed(given, tmp_path / "out", "lora-kohya", folder)
    expected = renamed(given, tmp_path / "other", "lora-kohya", base_of("sdxl of diffusers"))
    same(load_file(made), load_file(expected))
    with pytest.raises(OptionRefused, match=r"is for one model, and .* has several"):
        renamed(given, tmp_path / "p", "lora-peft", folder)


def test_names_alone_are_a_base_until_a_weight_is_taken_apart(tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("\n".join(BASES["flux"]))
    proj = product("lora_unet_double_blocks_0_img_attn_proj", torch.empty(H, H), 4, KOHYA)
    save_file(proj, tmp_path / "proj.safetensors")
    out = renamed(tmp_path / "proj.safetensors", tmp_path / "out", "lora-diffusers", keys)
    assert "transformer.transformer_blocks.0.attn.to_out.0.lora_A.weight" in load_file(out)
    save_file(of_flux(True), tmp_path / "qkv.safetensors")
    with pytest.raises(KeyMismatch, match=r"the shape of .* is not known"):
        renamed(tmp_path / "qkv.safetensors", tmp_path / "no", "lora-diffusers", keys)


DOWN, UP = "lora_down.weight", "lora_up.weight"
ODD = {
    "a lone matrix": ({DOWN: (4, H)}, "has no up beside it"),
    "scalars": ({DOWN: (), UP: ()}, "not a matrix"),
    "vectors": ({DOWN: (4,), UP: (4,)}, "not a matrix"),
    "nothing": ({DOWN: (0, H), UP: (20, 0)}, "not a matrix"),
    "ranks": ({DOWN: (4, H), UP: (20, 3)}, "cannot be multiplied"),
    "alpha": ({DOWN: (4, H), UP: (20, 4), "alpha": (2,)}, "where one number is expected"),
    "alone": ({"alpha": ()}, "without the matrices"),
    "not of an adapter": ({DOWN: (4, H), "weight": (3,)}, "is not a key of an adapter"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_adapter_is_refused_in_one_line(name, base_of, tmp_path):
    shapes, words = ODD[name]
    tensors = {f"lm_head.{key}": torch.ones(shape) for key, shape in shapes.items()}
    save_file(tensors, tmp_path / "odd.safetensors")
    base = base_of("llama")
    for preset, name in (("lora-peft", "out/"), ("lora-kohya", "out.safetensors")):
        out = run(
            "convert", "odd.safetensors", name, "--preset", preset, "--like", base, cwd=tmp_path
        )
        assert out.exit == 1 and out.err.startswith("error: ") and out.err.count("\n") == 1
        assert words in out.err
    assert {each.name for each in tmp_path.iterdir()} == {"llama.safetensors", "odd.safetensors"}


def test_standard_output_has_no_place_for_the_config_of_peft(base_of, tmp_path):
    base = base_of("llama")
    of_peft(tmp_path, BASES["llama"], (4,), (4,))
    words = ("convert", "given", "-", "--to", "safetensors", "--like", base)
    out = run(*words, "--preset", "lora-peft", cwd=tmp_path)
    assert (out.exit, out.out) == (1, "")
    assert "beside which adapter_config.json could not be" in out.err
    code, raw, _ = run_bytes(*words, "--preset", "lora-kohya", cwd=tmp_path)
    assert code == 0 and len(load(raw)) == 9
