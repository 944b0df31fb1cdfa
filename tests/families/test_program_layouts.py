"""Layouts of programs, as their own code writes and reads them.

transformers writes each model in both layouts (`save_original_format`); torchtune, litgpt,
torchtitan and mlx-lm turn state dicts by functions of their own. What ckptconv makes is the same,
bit for bit. A test of what is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ckptconv import KeyRules, convert_checkpoint, load_portable
from ckptconv.formats.safetensors import CONTAINER
from ckptconv.io.source import MemorySource
from ckptconv.keys.presets import Preset
from ckptconv.keys.transformers_layouts import scopes
from ckptconv.pickles.nodes import ordered_dict
from ckptconv.support.errors import KeyConflict, KeyMismatch
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.refs import Storage, whole_view
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.renaming import apply_rules
from ckptconv.tree.state_dicts import StateDict
from helpers.paths import ROOT

pytestmark = [pytest.mark.families, pytest.mark.filterwarnings("ignore")]

Tensors = dict[str, torch.Tensor]
SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"head_dim": 8}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**MLA, "first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**MLA, "first_k_dense_replace": 1}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "phimoe": ("PhimoeForCausalLM", {}),
    "jamba": (
        "JambaForCausalLM",
        {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "minimax": ("MiniMaxForCausalLM", {"head_dim": 8, "block_size": 8}),
    "glm4_moe": ("Glm4MoeForCausalLM", {"first_k_dense_replace": 1, "head_dim": 8}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {"moe_num_experts": 4, "moe_k": 2}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {"head_dim": 8, "moe_topk": 2}),
    "dots1": (
        "Dots1ForCausalLM",
        {"first_k_dense_replace": 1, "head_dim": 8, "n_shared_experts": 1},
    ),
    "flex_olmo": ("FlexOlmoForCausalLM", {}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "shared_expert_intermediate_size": 24},
    ),
}  # fmt: skip


def same(one: Tensors, other: Tensors) -> bool:
    return set(one) == set(other) and all(
        one[key].dtype is other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


def saved(model: Any, folder: Path) -> dict[str, Path]:
    """The files of a model in both layouts, with its config beside each."""
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point():
                value.normal_()
    model = model.to(torch.bfloat16)
    for name, original in (("original", True), ("v5", False)):
        model.save_pretrained(folder / name, save_original_format=original)
    return {name: folder / name / "model.safetensors" for name in ("original", "v5")}


def check_both_ways(files: dict[str, Path], folder: Path) -> None:
    for before, after in (("original", "v5"), ("v5", "original")):
        out = folder / f"to_{after}.safetensors"
        convert_checkpoint(files[before], out, preset=f"transformers-{after}", verify=True)
        assert same(load_file(out), load_file(files[after])), after


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_experts_becomes_what_transformers_writes(family, tmp_path):
    name, settings = FAMILIES[family]
    config = transformers.CONFIG_MAPPING[family](**{**SMALL, **EXPERTS, **settings})
    files = saved(getattr(transformers, name)(config), tmp_path)
    check_both_ways(files, tmp_path)
    again = getattr(transformers, name).from_pretrained(files["original"].parent)
    made = load_portable(files["original"], keys=KeyRules.of([("preset", "transformers-v5")]))
    loaded = again.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in made.items() if key in loaded)


def test_parts_of_a_model_have_their_own_rules(tmp_path):
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": 4, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=transformers.MixtralConfig(**{**SMALL, **EXPERTS}),
        vision_config=transformers.SiglipVisionConfig(**vision),
    )
    files = saved(transformers.LlavaForConditionalGeneration(config), tmp_path)
    assert any(".experts.3.w1." in key for key in load_file(files["original"]))
    check_both_ways(files, tmp_path)


# ------------------------------------------------------------------- all classes, names and shapes

SOURCE = MemorySource(b"", PurePath("none"))
_LARGER = ("Molmo2", "OlmoHybrid", "Qwen3VLMoe", "ShieldGemma2")
"""Where transformers writes on the way back what was never there (docs/layouts.md)."""


def reshaped(shapes: dict[str, tuple[int, ...]], config: dict[str, Any], preset: str) -> Any:
    """Names and shapes after a preset; nothing is read."""
    f32 = BY_NAME["float32"]
    refs = []
    for key, shape in shapes.items():
        nbytes = 4 * torch.Size(shape).numel()
        refs.append(whole_view(Storage(SOURCE, 0, nbytes, "cpu", key, f32), f32, shape))
    pairs = list(zip(shapes, refs, strict=True))
    root = ordered_dict(pairs)
    item = StateDict("", root, tuple(shapes), tuple(refs))
    rules = KeyRules("keep", rules=(Preset(preset).with_config(config),))
    done = apply_rules(item, rules, Checkpoint(Path("no.safetensors"), CONTAINER, root, 0))
    return {name: ref.shape for name, ref in zip(done.keys.new, done.item.values, strict=True)}


def classes() -> Iterator[tuple[str, str]]:
    """One class of each set of rules, among those that the tool finds."""
    sys.path.insert(0, str(ROOT / "tools"))
    import transformers_mapping as tool

    seen = set()
    for model_type, name in tool.model_classes():
        try:
            found = tuple(scopes({"architectures": [name], "model_type": model_type}))
        except KeyConflict:
            continue
        if found and found not in seen:
            seen.add(found)
            yield model_type, name


def hold_prefixes(model: Any) -> None:
    """Have transformers take off the prefixes again that loading puts before names: of a model that
    was not loaded it does not know whether there were any.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    listed = get_model_conversion_mapping(model, add_legacy=False)
    added = [each for each in listed if not getattr(each, "prefix_to_remove", None)]
    if any(getattr(each, "prefix_to_add", None) for each in added):
        model._weight_conversions = added


@pytest.mark.parametrize(("model_type", "name"), list(classes()))
def test_names_and_shapes_of_a_class_go_back_and_there(model_type, name):
    """Of transformers' own functions, on the meta device; what is not known is refused."""
    from transformers.core_model_loading import revert_weight_conversion

    import transformers_mapping as tool

    try:
        model = tool.built(model_type, name)
    except Exception as error:
        pytest.skip(f"is not built by its default config: {error}"[:100])
    held = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [name]}
    try:
        original = reshaped(held, config, "transformers-original")
    except KeyConflict as error:
        assert "is not supported" in str(error) or "original name is not known" in str(error)
        return
    if not name.startswith(_LARGER):
        hold_prefixes(model)
        theirs = revert_weight_conversion(model, dict(model.state_dict()))
        assert original == {key: tuple(value.shape) for key, value in theirs.items()}
    assert reshaped(original, config, "transformers-v5") == held
    for shapes, preset in ((held, "transformers-v5"), (original, "transformers-original")):
        try:  # a second time: refused, or nothing
            assert reshaped(shapes, config, preset) == shapes
        except (KeyConflict, KeyMismatch):
            continue


def test_the_data_are_what_the_tool_takes_from_this_release():
    import transformers_mapping as tool

    release = json.loads((ROOT / "ckptconv/keys/transformers_mapping.json").read_text("utf-8"))
    if release["version"] != transformers.__version__:
        pytest.skip(f"the data are those of transformers {release['version']}")
    rules, aliases = tool.entries()
    assert json.loads(json.dumps([rules, aliases])) == [release["entries"], release["aliases"]]
    assert release["bases"] == tool.bases(rules, aliases)


# ---------------------------------------------------------------------------------- other programs


def random(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    return {key: torch.randn(shape) for key, shape in shapes.items()}


def llama(layers: int = 2, heads: int = 4, groups: int = 2, head: int = 8) -> Tensors:
    """The tensors of a llama as it is on the Hub."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (40, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (40, 32),
    }
    for at in range(layers):
        layer = f"model.layers.{at}."
        shapes |= {
            f"{layer}input_layernorm.weight": (32,),
            f"{layer}post_attention_layernorm.weight": (32,),
            f"{layer}self_attn.q_proj.weight": (heads * head, 32),
            f"{layer}self_attn.k_proj.weight": (groups * head, 32),
            f"{layer}self_attn.v_proj.weight": (groups * head, 32),
            f"{layer}self_attn.o_proj.weight": (32, heads * head),
            f"{layer}mlp.gate_proj.weight": (48, 32),
            f"{layer}mlp.up_proj.weight": (48, 32),
            f"{layer}mlp.down_proj.weight": (32, 48),
        }
    return random(shapes)


def check_against(hub: Tensors, theirs: Tensors, preset: str, folder: Path, heads: str) -> None:
    """Both ways between the Hub and what a program's own function made of it."""
    for name, tensors in (("hub", hub), ("theirs", theirs)):
        kept = {key: value.contiguous().clone() for key, value in tensors.items()}
        save_file(kept, folder / f"{name}.safetensors")
    for before, after, wanted, preset_of in (
        ("hub", "to", theirs, f"to-{preset}{heads}"),
        ("theirs", "from", hub, f"{preset}{heads}"),
    ):
        out = folder / f"{after}.safetensors"
        convert_checkpoint(folder / f"{before}.safetensors", out, preset=preset_of, verify=True)
        assert same(load_file(out), wanted), preset_of


def module_of(package: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One module of a package; the rest of it, and what that needs, is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    file = Path(found.submodule_search_locations[0], *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"{package}.{name}", file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, made)
    spec.loader.exec_module(made)
    return made


def stand_in(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, MagicMock(__path__=[]))


@pytest.fixture
def torchtune(monkeypatch):
    """What torchtune does to state dicts, without what it imports for training."""
    made = module_of("torchtune", "models.convert_weights", monkeypatch)
    stand_in(monkeypatch, "torchtune", "torchtune.models")
    return made


def test_a_llama_of_torchtune(torchtune, tmp_path):
    hub = llama()
    theirs = torchtune.hf_to_tune(hub, num_heads=4, num_kv_heads=2, dim=32, head_dim=8)
    check_against(hub, theirs, "torchtune-llama", tmp_path, ":4,2")


def test_a_llama_of_meta_by_way_of_torchtune(torchtune, tmp_path):
    hub = llama()
    tune = torchtune.hf_to_tune(hub, num_heads=4, num_kv_heads=2, dim=32, head_dim=8)
    check_against(hub, torchtune.tune_to_meta(tune), "meta-llama", tmp_path, ":4,2")


def test_a_qwen_of_torchtune(monkeypatch, tmp_path):
    module_of("torchtune", "models.convert_weights", monkeypatch)
    theirs = module_of("torchtune", "models.qwen2._convert_weights", monkeypatch)
    hub = llama()
    for at in range(2):
        for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
            hub[f"model.layers.{at}.self_attn.{name}.bias"] = torch.randn(rows)
    check_against(hub, theirs.qwen2_hf_to_tune(hub), "torchtune-qwen", tmp_path, "")


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3-moe"])
def test_a_model_of_litgpt(family, monkeypatch, tmp_path):
    name = "scripts.convert_hf_checkpoint"
    stand_in(monkeypatch, *_AROUND_LITGPT)
    litgpt = module_of("litgpt", name, monkeypatch)
    hub = llama()
    if family != "llama":
        hub = {key: value for key, value in hub.items() if ".mlp." not in key}
        names = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
                 "qwen3-moe": ("mlp", "gate_proj", "up_proj", "down_proj")}[family]  # fmt: skip
        for at in range(2):
            layer = f"model.layers.{at}.{names[0]}."
            hub[f"{layer}gate.weight"] = torch.randn(3, 32)
            for expert in range(3):
                for name, shape in zip(names[1:], ((48, 32), (48, 32), (32, 48)), strict=True):
                    hub[f"{layer}experts.{expert}.{name}.weight"] = torch.randn(shape)
            if family == "qwen3-moe":
                for name in ("q_norm", "k_norm"):
                    hub[f"model.layers.{at}.self_attn.{name}.weight"] = torch.randn(8)
    of_experts = "LLaMAMLP" if family == "llama" else "LLaMAMoE"
    theirs: Tensors = {}
    by_name = {"qwen3-moe": litgpt.copy_weights_qwen_3}
    copy = by_name.get(family, litgpt.copy_weights_hf_llama)
    copy(SimpleNamespace(mlp_class_name=of_experts), {}, theirs, dict(hub))
    check_against(hub, theirs, f"litgpt-{family}", tmp_path, ":4,2")


_AROUND_LITGPT = (
    "lightning", "lightning.fabric", "lightning.fabric.utilities",
    "lightning.fabric.utilities.load", "litgpt.config", "litgpt.utils",
)  # fmt: skip


@pytest.fixture
def torchtitan(monkeypatch):
    """The adapter of a model of torchtitan, without the model."""

    def adapter(family: str, name: str, **settings: Any) -> Any:
        found = importlib.util.find_spec("torchtitan")
        parents = ("torchtitan", "torchtitan.models", f"torchtitan.models.{family}")
        around = ("models.common.rope", "models.common.decoder", "tools", "tools.logging",
                  "protocols", "protocols.model", f"models.{family}.model")  # fmt: skip
        stand_in(monkeypatch, *(f"torchtitan.{each}" for each in around))
        for each in ("protocols.state_dict_adapter", "models.utils"):
            module_of("torchtitan", each, monkeypatch)
        made = module_of("torchtitan", f"models.{family}.state_dict_adapter", monkeypatch)
        assert found is not None
        stand_in(monkeypatch, *parents)
        attention = SimpleNamespace(n_heads=4, n_kv_heads=2, head_dim=8, q_lora_rank=8)
        layer = SimpleNamespace(attention=attention, moe=SimpleNamespace(num_experts=3))
        told = SimpleNamespace(layers=[layer], dim=32, enable_weight_tying=False, **settings)
        monkeypatch.setattr(getattr(made, name), "_validate_hf_rope_config", lambda *_: None)
        return getattr(made, name)(told, None)

    return adapter


def test_a_llama_of_torchtitan(torchtitan, tmp_path):
    hub = llama()
    theirs = torchtitan("llama3", "Llama3StateDictAdapter").from_hf(dict(hub))
    check_against(hub, theirs, "torchtitan-llama3", tmp_path, ":4,2")


def with_experts(hub: Tensors, shared: bool) -> Tensors:
    made = {key: value for key, value in hub.items() if ".mlp." not in key}
    for at in range(2):
        mlp = f"model.layers.{at}.mlp."
        made[f"{mlp}gate.weight"] = torch.randn(3, 32)
        places = [f"experts.{expert}" for expert in range(3)] + ["shared_experts"] * shared
        for place in places:
            for name, shape in (("gate", (48, 32)), ("up", (48, 32)), ("down", (32, 48))):
                made[f"{mlp}{place}.{name}_proj.weight"] = torch.randn(shape)
    return made


def test_a_qwen3_of_torchtitan(torchtitan, tmp_path):
    hub = with_experts(llama(), shared=False)
    for at in range(2):
        for name in ("q_norm", "k_norm"):
            hub[f"model.layers.{at}.self_attn.{name}.weight"] = torch.randn(8)
    theirs = torchtitan("qwen3", "Qwen3StateDictAdapter").from_hf(dict(hub))
    check_against(hub, theirs, "torchtitan-qwen3", tmp_path, "")


def test_a_deepseek_of_torchtitan(torchtitan, tmp_path):
    hub = with_experts(llama(), shared=True)
    for key in [key for key in hub if ".self_attn." in key and "o_proj" not in key]:
        del hub[key]
    for at in range(2):
        attention = f"model.layers.{at}.self_attn."
        for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa",
                     "kv_a_layernorm", "kv_b_proj"):  # fmt: skip
            hub[f"{attention}{name}.weight"] = torch.randn(8, 8)
        hub[f"model.layers.{at}.mlp.gate.e_score_correction_bias"] = torch.randn(3)
    adapter = torchtitan("deepseek_v3", "DeepSeekV3StateDictAdapter", mtp_layers=[])
    theirs = adapter.from_hf(dict(hub))
    check_against(hub, theirs, "torchtitan-deepseek-v3", tmp_path, "")


GEMMA2_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
GGUF_NORMS = {
    "llama": ("attn_norm", "ffn_norm"),
    "qwen2": ("attn_norm", "ffn_norm"),
    "gemma2": GEMMA2_NORMS,
    "gemma3": (*GEMMA2_NORMS, "attn_q_norm", "attn_k_norm"),
}


@pytest.mark.parametrize("architecture", GGUF_NORMS)
def test_a_gguf_file_as_transformers_reads_it(architecture, tmp_path):
    gguf = pytest.importorskip("gguf")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(40)
    layer = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
             "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}  # fmt: skip
    heads = ("attn_q_norm", "attn_k_norm")
    layer |= {name: (8,) if name in heads else (32,) for name in GGUF_NORMS[architecture]}
    shapes = {"token_embd.weight": (40, 32), "output_norm.weight": (32,)}
    is_tied = architecture.startswith("gemma")
    if not is_tied:
        shapes["output.weight"] = (40, 32)
    for at in range(2):
        shapes |= {f"blk.{at}.{name}.weight": shape for name, shape in layer.items()}
        if architecture == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                shapes[f"blk.{at}.{name}.bias"] = layer[name][:1]
    for name, shape in shapes.items():
        writer.add_tensor(name, torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM,
            "gemma2": transformers.Gemma2ForCausalLM,
            "gemma3": transformers.Gemma3ForCausalLM}  # fmt: skip
    settings = {**SMALL, "num_hidden_layers": 2, "vocab_size": 40, "head_dim": 8}
    config = made[architecture].config_class(**settings, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        model = made[architecture](config)
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    rules = KeyRules.of([("preset", f"gguf-{architecture}")])
    assert same(dict(load_portable(path, keys=rules)), dict(theirs))
