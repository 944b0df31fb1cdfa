"""Presets that are layouts: the samples that transformers wrote in both, and what is refused.

tests/families holds them against transformers, torchtune and others themselves.
"""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import KeyRules, convert_checkpoint, edit_checkpoint, load_portable
from ckptconv.keys.framework_layouts import LAYOUTS
from ckptconv.keys.presets import Preset, preset_names
from ckptconv.keys.transformers_layouts import scopes
from ckptconv.support.errors import KeyConflict, KeyMismatch
from helpers import gguf_files
from helpers.paths import NUMBERS

FAMILIES = ("deepseek_v3", "gpt_neox", "llama", "mixtral", "phi3", "qwen3_moe")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(
        one[key].dtype is other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


def layout(family: str, which: str) -> Path:
    return NUMBERS / f"rules_{family}_{which}" / "model.safetensors"


# ------------------------------------------------------------------------------------ transformers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("before", "after"), [("original", "v5"), ("v5", "original")])
def test_the_layouts_of_transformers_become_each_other(family, before, after, tmp_path):
    out = tmp_path / "out.safetensors"
    convert_checkpoint(layout(family, before), out, preset=f"transformers-{after}", verify=True)
    assert same(load_file(out), load_file(layout(family, after)))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_in_the_layout_of_version_5_stays_as_it_is(family):
    found = load_portable(layout(family, "v5"), keys=KeyRules.of([("preset", "transformers-v5")]))
    assert same(dict(found), load_file(layout(family, "v5")))


def test_a_second_way_back_is_refused_where_it_would_change_names():
    back = KeyRules.of([("preset", "transformers-original")])
    with pytest.raises(KeyConflict, match="is not a name of transformers 5, which calls it"):
        load_portable(layout("mixtral", "original"), keys=back)


def test_the_model_type_may_stand_behind_the_preset(tmp_path):
    alone = tmp_path / "alone.safetensors"
    shutil.copy(layout("mixtral", "original"), alone)
    with pytest.raises(KeyConflict, match=r"no config\.json says which one .*v5:mixtral"):
        load_portable(alone, keys=KeyRules.of([("preset", "transformers-v5")]))
    with pytest.raises(KeyConflict, match=r"--preset transformers-original:mixtral"):
        load_portable(alone, keys=KeyRules.of([("preset", "transformers-original")]))
    found = load_portable(alone, keys=KeyRules.of([("preset", "transformers-v5:mixtral")]))
    assert same(dict(found), load_file(layout("mixtral", "v5")))


@pytest.mark.parametrize(
    ("preset", "key", "hint"),
    [
        ("meta-llama:4,2", "lm_head.weight", "--preset to-meta-llama$"),
        ("to-meta-llama:4,2", "output.weight", "--preset meta-llama$"),
        ("gguf-gemma", "lm_head.weight", "leave the preset out$"),
    ],
)
def test_the_other_way_round_is_told_and_not_to_leave_weights_out(preset, key, hint, tmp_path):
    save_file({key: torch.ones(4, 4)}, tmp_path / "there.safetensors")
    what = f"--preset {preset.partition(':')[0]} makes such names, and this key has one already"
    with pytest.raises(KeyConflict, match=what) as told:
        load_portable(tmp_path / "there.safetensors", keys=KeyRules.of([("preset", preset)]))
    assert re.search(hint, str(told.value)) and "--exclude" not in str(told.value)


@pytest.mark.parametrize("direction", ["v5", "original"])
def test_a_model_type_of_another_model_is_an_error(direction, tmp_path):
    path = layout("llama", "original")
    with pytest.raises(KeyConflict, match="matches no key"):
        load_portable(path, keys=KeyRules.of([("preset", f"transformers-{direction}:mixtral")]))
    own = KeyRules.of([("preset", f"transformers-{direction}:llama")])
    assert same(dict(load_portable(path, keys=own)), load_file(path))


def test_an_expert_that_is_missing_is_an_error(tmp_path):
    tensors = load_file(layout("mixtral", "original"))
    del tensors["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    save_file(tensors, tmp_path / "holed.safetensors")
    with pytest.raises(Exception, match=r"experts"):
        convert_checkpoint(
            tmp_path / "holed.safetensors",
            tmp_path / "out.safetensors",
            preset="transformers-v5:mixtral",
        )
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("transformers-v5:horovod", {}, "has no model type 'horovod'"),
        ("transformers-v5", {"model_type": "no_such_model"}, "has no model type 'no_such_model'"),
        ("transformers-v5", {"model_type": "vit"}, "depends on the class of the model"),
        ("transformers-v5", {"architectures": [7], "model_type": 5}, "says which one it is"),
        (
            "transformers-v5",
            {"model_type": "llama", "vision_config": {"model_type": "clip_vision_model"}},
            "which parts of 'llama' have the layout of 'clip_vision_model' is not known",
        ),
        (
            "transformers-original",
            {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid"},
            "config.json has no linear_num_key_heads",
        ),
        (
            "transformers-v5:Ernie4_5_VLMoeModel",
            {},
            "the layout of 'ernie4_5_vl_moe' is not supported",
        ),
        ("transformers-v5:dory", {}, "the layout of 'dory' is not supported: LayerPairCollapse"),
        ("transformers-v5:lara_mini", {}, "config.json has no linear_num_key_heads"),
        ("meta-llama", {}, "needs the numbers of heads, and no config.json says them"),
        ("meta-llama:32", {}, "needs the heads of keys and values too"),
        ("meta-llama:many", {}, "'many' are not numbers of heads"),
        (
            "meta-llama",
            {"num_attention_heads": 4, "num_key_value_heads": [2, 4]},
            r"the config says \[2, 4\] for num_key_value_heads",
        ),
        ("megatron-qkv:12,5", {}, "12 heads cannot be in 5 groups"),
        ("to-gguf-gemma2", {}, "no preset 'to-gguf-gemma2': 1 is subtracted from its norms"),
        ("horovod", {}, "there is no preset 'horovod'"),
        ("ddp:3", {}, "there is no preset 'ddp:3'"),
    ],
)
def test_what_is_not_known_is_refused(name, config, message):
    with pytest.raises(KeyConflict, match=message):
        Preset(name).with_config(config)


def test_a_part_of_a_model_has_the_rules_of_its_own_type():
    parts = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {"model_type": "mixtral"},
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    found = [(scope.entry, scope.below) for scope in scopes(parts)]
    assert found == [
        ("llava", ("",)),
        ("LlavaModel", ("model.", "")),
        ("SiglipVisionModel", ("model.vision_tower.", "vision_tower.")),
        ("mixtral", ("model.language_model.", "language_model.")),
    ]


# ---------------------------------------------------------------------------------- other programs

HEADS, GROUPS, DIM, HIDDEN = 6, 2, 4, 10


def qkv(bias: bool = False) -> dict[str, torch.Tensor]:
    shape = (DIM,) if bias else (DIM, HIDDEN)
    return {
        "q": torch.randn(HEADS, *shape),
        "k": torch.randn(GROUPS, *shape),
        "v": torch.randn(GROUPS, *shape),
    }


def by_name(parts: dict[str, torch.Tensor], kind: str, before: str) -> dict[str, torch.Tensor]:
    return {f"{before}{name}_proj.{kind}": part.flatten(0, 1) for name, part in parts.items()}


def convert(tensors: dict[str, torch.Tensor], preset: str, folder: Path, **config: int | str):
    """The tensors as the preset makes them; of those of the way back they are the same again."""
    source, out, again = (folder / f"{name}.safetensors" for name in ("source", "out", "again"))
    for path in (source, out, again):
        path.unlink(missing_ok=True)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, source)
    convert_checkpoint(source, out, preset=preset, verify=True)
    other = preset.removeprefix("to-") if preset.startswith("to-") else f"to-{preset}"
    convert_checkpoint(out, again, preset=other, verify=True)
    assert same(load_file(again), tensors)
    return load_file(out)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_rows_of_q_k_and_v_by_group(kind, tmp_path):
    parts = qkv(kind == "bias")
    groups = [
        torch.cat([parts["q"][3 * at : 3 * at + 3], parts["k"][at : at + 1], parts["v"][at:][:1]])
        for at in range(GROUPS)
    ]
    before = "decoder.layers.0.self_attention."
    tensors = {f"{before}linear_qkv.{kind}": torch.cat(groups).flatten(0, 1)}
    found = convert(tensors, f"megatron-qkv:{HEADS},{GROUPS}", tmp_path)
    assert same(found, by_name(parts, kind, before))


def megatron_layer() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Attention and norms of a layer of Megatron core, and the same on the Hub."""
    parts, norms = qkv(), torch.randn(4, HIDDEN)
    queries = HEADS // GROUPS
    rows = [
        torch.cat(
            [parts["q"][queries * at :][:queries], parts["k"][at, None], parts["v"][at, None]]
        )
        for at in range(GROUPS)
    ]
    ours, hub = "decoder.layers.3.self_attention.", "model.layers.3."
    theirs = {
        f"{ours}linear_qkv.weight": torch.cat(rows).flatten(0, 1),
        f"{ours}linear_qkv.layer_norm_weight": norms[0],
        f"{ours}q_layernorm.weight": norms[1],
        f"{ours}k_layernorm.weight": norms[2],
        "decoder.final_layernorm.weight": norms[3],
    }
    on_hub = by_name(parts, "weight", f"{hub}self_attn.") | {
        f"{hub}input_layernorm.weight": norms[0],
        f"{hub}self_attn.q_norm.weight": norms[1],
        f"{hub}self_attn.k_norm.weight": norms[2],
        "model.norm.weight": norms[3],
    }
    return theirs, on_hub


def test_a_llama_of_megatron(tmp_path):
    theirs, hub = megatron_layer()
    norm, gate, up = torch.randn(HIDDEN), torch.randn(7, HIDDEN), torch.randn(7, HIDDEN)
    mlp = "decoder.layers.3.mlp."
    theirs |= {f"{mlp}linear_fc1.layer_norm_weight": norm,
               f"{mlp}linear_fc1.weight": torch.cat([gate, up])}  # fmt: skip
    hub |= {"model.layers.3.post_attention_layernorm.weight": norm,
            "model.layers.3.mlp.gate_proj.weight": gate,
            "model.layers.3.mlp.up_proj.weight": up}  # fmt: skip
    preset = f"megatron-llama:{HEADS},{GROUPS}"
    assert same(convert(theirs, preset, tmp_path), hub)
    for local, te in (("input", "self_attention.linear_qkv"), ("pre_mlp", "mlp.linear_fc1")):
        layer = "decoder.layers.3."
        norm = theirs.pop(f"{layer}{te}.layer_norm_weight")
        theirs[f"{layer}{local}_layernorm.weight"] = norm
    rest = {"decoder.layers.3.mlp.linear_fc1._extra_state": None}
    torch.save({"model": theirs | rest}, tmp_path / "local.pt")
    found = load_portable(tmp_path / "local.pt", keys=KeyRules.of([("preset", preset)]))
    assert same(dict(found), hub)


@pytest.mark.parametrize(
    ("family", "module", "names"),
    [
        ("qwen3-moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
def test_experts_of_megatron_become_single_ones(family, module, names, tmp_path):
    theirs, hub = megatron_layer()
    mlp, at_hub = "decoder.layers.3.mlp.", f"model.layers.3.{module}."
    theirs[f"{mlp}router.weight"] = hub[f"{at_hub}gate.weight"] = torch.randn(3, HIDDEN)
    single = dict(theirs)
    for expert in range(3):
        gate, up, down = torch.randn(5, HIDDEN), torch.randn(5, HIDDEN), torch.randn(HIDDEN, 5)
        for kind, value in (("fc1", torch.cat([gate, up])), ("fc2", down)):
            theirs[f"{mlp}experts.linear_{kind}.weight{expert}"] = value
            single[f"{mlp}experts.local_experts.{expert}.linear_{kind}.weight"] = value
        for name, value in zip(names, (gate, up, down), strict=True):
            hub[f"{at_hub}experts.{expert}.{name}.weight"] = value
    preset = f"megatron-{family}:{HEADS},{GROUPS}"
    assert same(convert(theirs, preset, tmp_path), hub)
    save_file(single, tmp_path / "single.safetensors")
    rules = KeyRules.of([("preset", preset)])
    assert same(dict(load_portable(tmp_path / "single.safetensors", keys=rules)), hub)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_rows_of_q_k_and_v_by_head(kind, tmp_path):
    shape = (DIM,) if kind == "bias" else (DIM, HIDDEN)
    heads = torch.randn(HEADS, 3, *shape)
    tensors = {f"gpt_neox.layers.1.attention.query_key_value.{kind}": heads.flatten(0, 2)}
    parts = {name: heads[:, at] for at, name in enumerate("qkv")}
    for config in ({"num_attention_heads": HEADS}, {"n_head": HEADS, "model_type": "bloom"}):
        found = convert(tensors, "gpt-neox", tmp_path, **config)
        assert same(found, by_name(parts, kind, "gpt_neox.layers.1.attention."))


@pytest.mark.parametrize("model_type", ["falcon", "chatglm", "phi3small"])
def test_rows_by_group_are_not_taken_for_rows_by_head(model_type, tmp_path):
    """Falcon of 40B: 128 heads in 8 groups, whose rows could be cut in three for each head too."""
    key = "transformer.h.0.self_attention.query_key_value.weight"
    save_file({key: torch.randn(12 * DIM, HIDDEN)}, tmp_path / "model.safetensors")
    config = {"model_type": model_type, "num_attention_heads": 8, "num_kv_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(KeyConflict, match=f"and the model says {model_type}"):
        load_portable(tmp_path / "model.safetensors", keys=KeyRules.of([("preset", "gpt-neox")]))


def test_rows_of_q_k_and_v_one_after_another(tmp_path):
    parts, gate, up = qkv(), torch.randn(7, HIDDEN), torch.randn(7, HIDDEN)
    before = "model.layers.0."
    tensors = {
        f"{before}self_attn.qkv_proj.weight": torch.cat([*parts.values()]).flatten(0, 1),
        f"{before}mlp.gate_up_proj.weight": torch.cat([gate, up]),
        "model.norm.weight": torch.randn(HIDDEN),
    }
    found = convert(
        tensors, "phi3", tmp_path, num_attention_heads=HEADS, num_key_value_heads=GROUPS
    )
    expected = by_name(parts, "weight", f"{before}self_attn.")
    expected |= {f"{before}mlp.gate_proj.weight": gate, f"{before}mlp.up_proj.weight": up}
    assert same(found, expected | {"model.norm.weight": tensors["model.norm.weight"]})


@pytest.mark.parametrize("preset", ["to-phi3:4,2", "to-megatron-llama:4,2"])
@pytest.mark.parametrize("name", ["mlp.up_proj", "self_attn.q_proj"])
def test_rows_of_which_there_are_more_than_the_layout_has_are_not_joined(name, preset, tmp_path):
    """transformers chunks `gate_up_proj` in two, and takes q, k and v by the numbers of heads."""
    rows = {"self_attn.q_proj": 16, "self_attn.k_proj": 8, "self_attn.v_proj": 8,
            "mlp.gate_proj": 12, "mlp.up_proj": 12}  # fmt: skip
    layer, path = "model.layers.0.", tmp_path / "model.safetensors"
    tensors = {f"{layer}{key}.weight": torch.randn(size, 3) for key, size in rows.items()}
    save_file(tensors | {f"{layer}{name}.weight": torch.randn(32, 3)}, path)
    with pytest.raises(KeyMismatch, match=r"equal sizes|cannot be concatenated"):
        load_portable(path, keys=KeyRules.of([("preset", preset)]))


def test_a_llama_of_meta_and_a_key_that_is_none_of_its_own(tmp_path):
    parts, before = qkv(), "layers.0.attention."
    tensors = {
        f"{before}wq.weight": parts["q"].flatten(0, 1),
        f"{before}wk.weight": parts["k"].flatten(0, 1),
        "layers.0.ffn_norm.weight": torch.randn(HIDDEN),
    }
    found = convert(tensors, "meta-llama", tmp_path, n_heads=HEADS, n_kv_heads=GROUPS)
    of_llama_1 = {f"{before}inner_attention.rope.freqs": torch.ones(DIM // 2)}
    save_file(tensors | of_llama_1, tmp_path / "llama1.safetensors")
    rules = KeyRules.of([("preset", "meta-llama")])
    assert same(dict(load_portable(tmp_path / "llama1.safetensors", keys=rules)), found)
    hub = "model.layers.0."
    for name in ("q", "k"):
        pairs = parts[name].unflatten(1, (-1, 2))  # rows in pairs become halves
        expected = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).flatten(0, 1)
        assert torch.equal(found[f"{hub}self_attn.{name}_proj.weight"], expected)
    assert f"{hub}post_attention_layernorm.weight" in found
    save_file(tensors | {"layers.0.adapter": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(KeyConflict, match=r"layers\.0\.adapter.*does not know this key"):
        load_portable(
            tmp_path / "other.safetensors", keys=KeyRules.of([("preset", "meta-llama:6,2")])
        )


def test_the_buffer_of_positions_of_torchtitan_is_left_out(tmp_path):
    """Its earlier releases saved it, by `register_buffer("freqs_cis", ..., persistent=True)`."""
    tensors = {"norm.weight": torch.ones(4), "freqs_cis": torch.ones(8, 2, dtype=torch.complex64)}
    torch.save(tensors, tmp_path / "titan.pt")
    rules = KeyRules.of([("preset", "torchtitan-llama3:4,2")])
    assert {*load_portable(tmp_path / "titan.pt", keys=rules)} == {"model.norm.weight"}


def test_a_number_of_heads_beyond_any_number_is_refused(tmp_path):
    told = {"general.architecture": "llama", "llama.attention.head_count": "7" * 5000}
    save_file({"blk.0.attn_q.weight": torch.ones(4, 4)}, tmp_path / "in.safetensors", told)
    with pytest.raises(KeyConflict, match="num_attention_heads"):
        load_portable(tmp_path / "in.safetensors", keys=KeyRules.of([("preset", "gguf-llama")]))


def test_biases_of_q_and_k_in_gguf_are_in_pairs_too(tmp_path):
    """As LlamaTensorProcessor of transformers 5.24 turns all of ``.attn_q.`` and ``.attn_k.``."""
    sizes = {"attn_q": HEADS, "attn_k": GROUPS, "attn_v": GROUPS, "attn_output": HEADS}
    tensors = {f"blk.0.{name}.bias": torch.randn(DIM * size) for name, size in sizes.items()}
    save_file(tensors, tmp_path / "in.safetensors")
    rules = KeyRules.of([("preset", f"gguf-llama:{HEADS},{GROUPS}")])
    found = load_portable(tmp_path / "in.safetensors", keys=rules)
    for letter, values, heads in zip("qkvo", tensors.values(), sizes.values(), strict=True):
        if letter in "qk":
            values = values.reshape(heads, DIM // 2, 2).swapaxes(2, 1).flatten()
        assert torch.equal(found[f"model.layers.0.self_attn.{letter}_proj.bias"], values)


def test_heads_of_a_gguf_file_are_those_that_it_says(tmp_path):
    rows = numpy.arange(HEADS * DIM * 2, dtype=numpy.float32).reshape(HEADS * DIM, 2)
    told = [
        gguf_files.entry("general.architecture", 8, gguf_files.text("llama")),
        gguf_files.number("llama.attention.head_count", HEADS),
        gguf_files.number("llama.attention.head_count_kv", GROUPS),
    ]
    keys = rows[: GROUPS * DIM]
    tensors = [
        gguf_files.tensor("blk.0.attn_q.weight", rows.shape[::-1]),
        gguf_files.tensor("blk.0.attn_k.weight", keys.shape[::-1], offset=rows.nbytes),
    ]
    path = tmp_path / "model.gguf"
    data = rows.tobytes() + keys.tobytes()
    path.write_bytes(gguf_files.gguf(*tensors, metadata=told, data=data))
    found = load_portable(path, keys=KeyRules.of([("preset", "gguf-llama")]))
    for name, values, heads in (("q", rows, HEADS), ("k", keys, GROUPS)):
        halves = torch.from_numpy(values).unflatten(0, (heads, -1, 2)).transpose(1, 2)
        expected = halves.flatten(0, 2)
        assert torch.equal(found[f"model.layers.0.self_attn.{name}_proj.weight"], expected)


@pytest.mark.parametrize(
    ("architecture", "preset", "helps"),
    [
        ("llama", "gguf-qwen2", "gguf-llama"),
        ("gemma", "gguf-gemma2", "gguf-gemma"),
        ("qwen2", "gguf-llama", "gguf-qwen2"),
        ("phi3", "gguf-llama:4,4", "write the rules in a file"),
    ],
)
def test_the_layout_of_another_architecture_is_refused(architecture, preset, helps, tmp_path):
    told = [gguf_files.entry("general.architecture", 8, gguf_files.text(architecture))]
    path = tmp_path / "model.gguf"
    tensor = gguf_files.tensor("blk.0.ffn_norm.weight", (8,))
    path.write_bytes(gguf_files.gguf(tensor, metadata=told, data=bytes(32)))
    with pytest.raises(KeyConflict, match=f"the model says {architecture}; .*{helps}"):
        load_portable(path, keys=KeyRules.of([("preset", preset)]))


def test_a_llama_is_not_taken_for_a_qwen_whose_q_is_not_in_pairs(tmp_path):
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for preset in ("to-torchtune-qwen", "to-torchtitan-qwen3", "to-gguf-qwen2"):
        with pytest.raises(KeyConflict, match=r"model_type qwen.*, and the model says llama"):
            load_portable(tmp_path / "model.safetensors", keys=KeyRules.of([("preset", preset)]))


@pytest.mark.parametrize("model_type", ["gemma", "cohere", "granite", "olmo"])
@pytest.mark.parametrize("preset", ["meta-llama", "torchtitan-llama3", "megatron-llama"])
def test_a_model_that_has_keys_of_a_llama_is_not_taken_for_one(model_type, preset, tmp_path):
    """Gemma multiplies by its norms + 1, Cohere has q and k in pairs of rows already."""
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    told = {"model_type": model_type, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(KeyConflict, match=f"model_type llama.*, and the model says {model_type}"):
        rules = KeyRules.of([("preset", f"to-{preset}")])
        load_portable(tmp_path / "model.safetensors", keys=rules)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"swiglu": False}, "is for swiglu True, and the model says False"),
        ({"apply_layernorm_1p": True}, "is for apply_layernorm_1p False"),
        ({"rotary_interleaved": True}, "is for rotary_interleaved False"),
        ({"attention_output_gate": True}, "is for attention_output_gate False"),
    ],
)
def test_a_model_of_megatron_that_is_no_llama_is_refused(told, message, tmp_path):
    args = Namespace(num_attention_heads=4, tensor_model_parallel_size=1, **told)
    key = "decoder.layers.0.mlp.linear_fc1.weight"
    torch.save({"args": args, "model": {key: torch.randn(8, 4)}}, tmp_path / "model.pt")
    with pytest.raises(KeyConflict, match=message):
        load_portable(tmp_path / "model.pt", keys=KeyRules.of([("preset", "megatron-llama")]))


def test_gates_among_the_rows_of_q_are_not_taken_for_rows_of_k(tmp_path):
    """Megatron's attention_output_gate: a group has its q, as many gates, its k and its v."""
    args = Namespace(num_attention_heads=4, num_query_groups=2, attention_output_gate=True,
                     tensor_model_parallel_size=1, group_query_attention=True)  # fmt: skip
    key = "decoder.layers.0.self_attention.linear_qkv.weight"
    torch.save({"args": args, "model": {key: torch.randn(2 * 6 * 4, 4)}}, tmp_path / "model.pt")
    with pytest.raises(KeyConflict, match="is for attention_output_gate False"):
        load_portable(tmp_path / "model.pt", keys=KeyRules.of([("preset", "megatron-qkv")]))


def gemma_file(path: Path, norms: torch.Tensor, matrix: torch.Tensor) -> Path:
    """A GGUF file with all norms of a layer of Gemma 3, in float32, and q in float16."""
    names = ["output_norm", *(f"blk.0.{name}" for name in GEMMA_NORMS)]
    tensors, data = [], b""
    for name, values in zip(names, norms.numpy(), strict=True):
        at = len(data)
        tensors.append(gguf_files.tensor(f"{name}.weight", values.shape, offset=at))
        data += values.tobytes()
    at, q = len(data), matrix.half().numpy()
    tensors.append(gguf_files.tensor("blk.0.attn_q.weight", q.shape[::-1], kind=1, offset=at))
    path.write_bytes(gguf_files.gguf(*tensors, data=data + q.tobytes()))
    return path


GEMMA_NORMS = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip


def test_norms_of_a_gemma_in_gguf_are_less_by_1_and_q_stays_as_it_is(tmp_path):
    norms = torch.randn(7, 32) * 2.0 ** torch.randint(-20, 3, (7, 32))
    matrix = torch.randn(16, 32)
    path = gemma_file(tmp_path / "gemma.gguf", norms, matrix)
    names = ["model.norm", *(f"model.layers.0.{name}" for name in GEMMA_NORMS.values())]
    expected = {f"{name}.weight": values for name, values in zip(names, norms - 1, strict=True)}
    expected["model.layers.0.self_attn.q_proj.weight"] = matrix.half()
    rules = {"preset": "gguf-gemma3", "verify": True}
    convert_checkpoint(path, tmp_path / "out.safetensors", **rules)
    assert same(load_file(tmp_path / "out.safetensors"), expected)
    convert_checkpoint(path, tmp_path / "16.pt", **rules, dtype="bfloat16")
    as_16 = {name: values.bfloat16() for name, values in expected.items()}
    assert same(dict(load_portable(tmp_path / "16.pt")), as_16)


def test_a_mapping_does_not_promise_to_undo_what_was_computed(tmp_path):
    path = gemma_file(tmp_path / "gemma.gguf", torch.rand(7, 32), torch.randn(16, 32))
    with pytest.raises(KeyConflict, match=r"output_norm.* computes values, which a mapping"):
        convert_checkpoint(
            path,
            tmp_path / "out.safetensors",
            preset="gguf-gemma3",
            save_mapping=tmp_path / "map.json",
        )
    assert not (tmp_path / "map.json").exists()
    assert not (tmp_path / "out.safetensors").exists()


def test_a_number_is_added_by_a_rule_of_a_file_too(tmp_path):
    codes = {"w.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
             "w.weight_scale_inv": torch.ones(1, 1)}  # fmt: skip
    tensors = {"norm.weight": torch.rand(5), "ids": torch.arange(3), **codes}
    save_file(tensors, tmp_path / "a.safetensors")
    rule = {"from": "norm.weight", "to": "n.weight", "operations": [{"add": 2}]}
    found = load_portable(tmp_path / "a.safetensors", keys=KeyRules.of([rule]))
    assert torch.equal(found["n.weight"], load_file(tmp_path / "a.safetensors")["norm.weight"] + 2)
    for of, value, message in (
        ("ids", 2, "nothing is added to values of int64"),
        ("w.weight", 2, "nothing is added to values of float8_e4m3fn; .* makes values first"),
        ("norm.weight", 0, "a whole number other than 0"),
        ("norm.weight", 0.5, "a whole number other than 0"),
    ):
        with pytest.raises((KeyConflict, KeyMismatch), match=message):
            rule = {"from": of, "to": "n", "operations": [{"add": value}]}
            load_portable(tmp_path / "a.safetensors", keys=KeyRules.of([rule]))


def test_experts_of_mlx_become_single_ones(tmp_path):
    tensors = {f"model.layers.0.mlp.switch_mlp.{name}.weight": torch.randn(3, 4, 5)
               for name in ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
    found = convert(tensors, "mlx-moe", tmp_path)
    assert torch.equal(
        found["model.layers.0.mlp.experts.2.up_proj.weight"],
        tensors["model.layers.0.mlp.switch_mlp.up_proj.weight"][2],
    )


def test_a_layout_that_meets_no_key_is_an_error(tmp_path):
    save_file({"a.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(KeyConflict, match="--preset mlx-moe matches no key"):
        convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", preset="mlx-moe")


def test_edits_in_place_refuse_a_layout(tmp_path):
    path = shutil.copy(layout("mixtral", "original"), tmp_path / "model.safetensors")
    with pytest.raises(KeyConflict, match="lays tensors out anew, and here only keys can change"):
        edit_checkpoint(path, preset="transformers-v5:mixtral")
    assert same(load_file(path), load_file(layout("mixtral", "original")))


def test_a_mapping_undoes_a_layout(tmp_path):
    out, back, mapping = (tmp_path / name for name in ("v5.safetensors", "b.safetensors", "m.json"))
    before = layout("mixtral", "original")
    convert_checkpoint(before, out, preset="transformers-v5", save_mapping=mapping)
    convert_checkpoint(out, back, rules=mapping, reverse=True)
    assert same(load_file(back), load_file(before))


def test_each_layout_says_where_its_facts_are_from():
    assert all("(" in layout.source for layout in LAYOUTS.values())
    both_ways = {f"to-{name}" for name, layout in LAYOUTS.items() if not layout.one_way}
    assert both_ways == {name for name in preset_names() if name.startswith("to-")}
    assert LAYOUTS.keys() < set(preset_names())
