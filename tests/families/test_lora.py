"""Adapters merged by ckptconv become what peft's own `merge_and_unload` makes of them: bit for bit
in 16 bits, but for the norms of DoRA, and within the rounding of sums in float32.

Models have odd sizes, and adapters random values in all of their matrices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckptconv import merge_lora_checkpoint
from helpers.unets import UNETS, unet

pytestmark = [pytest.mark.families, pytest.mark.filterwarnings("ignore")]

peft = pytest.importorskip("peft")

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Net(nn.Module):
    """A layer of each kind that LoRA is for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, 40)
        self.block = nn.ModuleDict(
            {
                "wide": nn.Linear(40, 333),
                "narrow": nn.Linear(333, 7, bias=False),
                "square": nn.Linear(129, 129),
            }
        )
        self.conv = nn.Conv2d(9, 12, (3, 5))
        self.point = nn.Conv2d(12, 10, 1)
        self.line = nn.Conv1d(8, 6, 3)
        self.head = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)


class Experts(nn.Module):
    """Weights of all experts in one parameter, as (experts, out, in)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 46, 21) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(4, 21, 23) * 0.1)


class Turned(nn.Module):
    """The same as (experts, in, out), as gpt-oss has them; the second one is square."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 22, 46) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(3, 22, 22) * 0.1)


class Mixture(nn.Module):
    def __init__(self, experts: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": experts()}) for _ in range(2)])
        self.proj = nn.Linear(21, 33)


def saved(folder: Path, made: Any, config: Any, dtype: torch.dtype) -> Tensors:
    """Write a base and an adapter of random values; returns what peft makes of them."""
    torch.manual_seed(3)
    base = made().to(dtype)
    state = {key: value.clone() for key, value in base.state_dict().items()}
    save_file(state, folder / "base.safetensors")
    model = peft.get_peft_model(base, config)
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(word in name for word in ("lora_", "hada_", "lokr_")):
                parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.2)
            if "magnitude" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=chance) + 0.5)
            if "modules_to_save" in name or "trainable_tokens" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=chance))
    model.to(dtype)
    model.save_pretrained(folder / "adapter")
    again = made().to(dtype)
    again.load_state_dict(state)
    merged = peft.PeftModel.from_pretrained(again, folder / "adapter").merge_and_unload()
    found: Tensors = merged.state_dict()
    return found


def ulps(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many numbers of their type two tensors of 16 bits are apart at most."""
    integers = [each.contiguous().view(torch.int16).int() for each in (one, other)]
    steps = [torch.where(each < 0, -32768 - each, each) for each in integers]
    return int((steps[0] - steps[1]).abs().max())


def check(folder: Path, expected: Tensors, most: int = 0, **options: Any) -> None:
    """Merge, and compare: `most` is how far 16 bits may be apart. Sums of float32 may be in another
    order: they are within a few units in the last place of the largest value.
    """
    out = folder / "merged.safetensors"
    merge_lora_checkpoint(
        folder / "base.safetensors", folder / "adapter", out, verify=True, **options
    )
    found = load_file(out)
    assert set(found) == set(expected)
    for key, value in expected.items():
        made = found[key]
        assert made.dtype is value.dtype and made.shape == value.shape
        if value.dtype is torch.float32:
            largest = value.abs().max() * torch.finfo(torch.float32).eps
            assert (made - value).abs().max() <= 4 * largest, key
        else:
            assert ulps(made, value) <= most, key


LINEAR = ("wide", "narrow", "square", "head")
CASES = {
    "linear": {"target_modules": [*LINEAR], "r": 16, "lora_alpha": 32},
    "ranks": {
        "target_modules": [*LINEAR],
        "r": 4,
        "lora_alpha": 5,
        "use_rslora": True,
        "rank_pattern": {"wide": 6, "^block.square": 9},
        "alpha_pattern": {"block.*narrow": 3},
    },
    "convolutions": {"target_modules": ["conv", "point", "line", "wide"], "r": 5},
    "embedding": {"target_modules": ["embed", "narrow"], "r": 7, "lora_alpha": 3},
    "bias": {"target_modules": ["wide"], "r": 3, "bias": "lora_only"},
    "all biases": {"target_modules": ["wide"], "r": 3, "bias": "all"},
    "bias of the adapter": {"target_modules": ["wide", "head"], "r": 3, "lora_bias": True},
    "modules to save": {"target_modules": ["wide"], "r": 3, "modules_to_save": ["head", "norm"]},
    "both": {
        "target_modules": ["wide"],
        "r": 3,
        "bias": "all",
        "modules_to_save": ["head", "norm"],
    },
    "rows": {"target_modules": ["wide"], "r": 3, "trainable_token_indices": {"embed": [7, 2, 3]}},
    "mica": {"target_modules": ["wide", "embed"], "r": 3, "init_lora_weights": "mica"},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_lora(tmp_path, case, dtype):
    check(tmp_path, saved(tmp_path, Net, peft.LoraConfig(**CASES[case]), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("targets", [["wide", "narrow"], ["conv", "line"], ["embed"]])
def test_dora(tmp_path, targets, dtype):
    config = peft.LoraConfig(target_modules=targets, r=4, use_dora=True)
    expected = saved(tmp_path, Net, config, dtype)
    check(tmp_path, expected, most=1)  # norms may be summed in another order


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [Experts, Turned])
def test_experts(tmp_path, experts, dtype):
    config = peft.LoraConfig(
        target_modules=["proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        r=3,
        lora_alpha=4,
    )
    check(tmp_path, saved(tmp_path, lambda: Mixture(experts), config, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_of_a_layer_as_a_parameter(tmp_path, dtype):
    config = peft.LoraConfig(
        target_modules=[],
        target_parameters=["proj.weight", "experts.down_proj"],
        r=3,
        lora_alpha=4,
        alpha_pattern={"proj.weight": 7},
    )
    check(tmp_path, saved(tmp_path, lambda: Mixture(Experts), config, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_flat", [False, True])
def test_loha(tmp_path, is_flat, dtype):
    config = peft.LoHaConfig(
        target_modules=["wide", "conv", "point"], r=4, alpha=3, use_effective_conv2d=not is_flat,
        init_weights=False,
    )  # fmt: skip
    check(tmp_path, saved(tmp_path, Net, config, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("both", [False, True])
def test_lokr(tmp_path, both, dtype):
    config = peft.LoKrConfig(
        target_modules=["wide", "square", "conv", "point"], r=2, alpha=3, decompose_both=both,
        use_effective_conv2d=both,
    )  # fmt: skip
    check(tmp_path, saved(tmp_path, Net, config, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gpt2_whose_layers_are_transposed(tmp_path, dtype):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(n_layer=2, n_embd=24, n_head=2, vocab_size=50, n_positions=8)
    config = peft.LoraConfig(target_modules=["c_attn", "c_proj", "c_fc"], r=4, fan_in_fan_out=True)

    def made() -> nn.Module:
        return GPT2LMHeadModel(sizes).transformer

    check(tmp_path, saved(tmp_path, made, config, dtype))


@pytest.mark.parametrize("name", UNETS)
def test_names_of_unets_are_those_of_diffusers(name):
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    from ckptconv.tree.diffusion_names import as_in_diffusers, as_in_original

    model = unet(name)
    state = model.state_dict()
    modules = dict.fromkeys(key.rpartition(".")[0] for key in state)
    original = {module: as_in_original(module, modules) for module in modules}
    assert None not in original.values() and len(set(original.values())) == len(modules)
    assert all(as_in_diffusers(old) == new for new, old in original.items())
    numbered = {}
    for key in state:
        module, _, end = key.rpartition(".")
        numbered[f"model.diffusion_model.{original[module]}.{end}"] = key
    found = convert_ldm_unet_checkpoint(dict(numbered), dict(model.config))
    assert found == {key: key for key in state}


def test_names_of_flux_are_those_of_diffusers():
    from diffusers import FluxTransformer2DModel
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    from ckptconv.tree.diffusion_names import flux_in_diffusers

    torch.manual_seed(0)
    with torch.device("meta"):  # of the true size, which that function has in it
        model = FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True)
    state = {key: torch.randn(value.shape[0]) for key, value in model.state_dict().items()}
    blocks = [f"double_blocks.{n}.{one}" for n in range(2) for one in DOUBLE.split()]
    blocks += [f"single_blocks.{n}.{one}" for n in range(2) for one in SINGLE.split()]
    original = {}
    for module in (*blocks, *AROUND.split()):
        parts = flux_in_diffusers(module)
        for end in ("weight", "bias"):
            original[f"{module}.{end}"] = torch.cat([state[f"{name}.{end}"] for name in parts])
    swapped = [state[f"norm_out.linear.{end}"].chunk(2) for end in ("weight", "bias")]
    for end, (scale, shift) in zip(("weight", "bias"), swapped, strict=True):
        original[f"final_layer.adaLN_modulation.1.{end}"] = torch.cat([shift, scale])
    for n in range(2):
        for side, norms in (
            ("img", ("norm_q", "norm_k")),
            ("txt", ("norm_added_q", "norm_added_k")),
        ):
            for name, norm in zip(("query", "key"), norms, strict=True):
                key = f"double_blocks.{n}.{side}_attn.norm.{name}_norm.scale"
                original[key] = state[f"transformer_blocks.{n}.attn.{norm}.weight"]
        for name, norm in (("query", "norm_q"), ("key", "norm_k")):
            key = f"single_blocks.{n}.norm.{name}_norm.scale"
            original[key] = state[f"single_transformer_blocks.{n}.attn.{norm}.weight"]
    found = convert_flux_transformer_checkpoint_to_diffusers(dict(original))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], value) for key, value in state.items())


DOUBLE = (
    "img_attn.qkv txt_attn.qkv img_attn.proj txt_attn.proj img_mlp.0 img_mlp.2 txt_mlp.0 txt_mlp.2 "
    "img_mod.lin txt_mod.lin"
)
SINGLE = "linear1 linear2 modulation.lin"
AROUND = (
    "img_in txt_in time_in.in_layer time_in.out_layer vector_in.in_layer vector_in.out_layer "
    "guidance_in.in_layer guidance_in.out_layer final_layer.linear"
)
