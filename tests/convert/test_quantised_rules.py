"""Tensor rules over quantised weights: the values of what they make are what the rules make of the
values, or they are refused. The oracle is plain torch: values and layouts are worked out apart.
"""

from __future__ import annotations

import json
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ckptconv import (
    CheckpointError,
    KeyRules,
    RefusedObject,
    convert_checkpoint,
    load_portable,
)
from ckptconv.tensors.layouts import MOVES
from ckptconv.tensors.scaled_layouts import MOVED
from helpers.examples import examples
from helpers.paths import NUMBERS
from helpers.program import run

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from helpers.random_rules import Drawn, assert_same, drawn_rules  # noqa: E402

FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"


def dequantised(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Codes times the scale of their block; a scale with fewer dimensions is for the first ones."""
    wide = scale.float()
    if scale.numel() == 1 and codes.numel() != 1:
        return codes.float() * wide.reshape(())
    wide = wide.reshape((*scale.shape, *(1,) * (codes.dim() - scale.dim())))
    for dim, size in enumerate(codes.shape):
        at = dim - codes.dim()
        step = block[at] if at >= -2 and wide.shape[dim] == -(-size // block[at]) else 1
        if wide.shape[dim] == 1:
            step = size
        wide = wide.repeat_interleave(step, dim).narrow(dim, 0, size)
    return codes.float() * wide


def _quantised(
    shape: tuple[int, ...], form: str, block: tuple[int, int], seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    codes = torch.randn(shape, generator=made).to(FP8)
    sizes: tuple[int, ...] = ()
    if form == "blocks":
        grid = [-(-size // each) for size, each in zip(shape[-2:], block, strict=True)]
        sizes = (*shape[:-2], *grid)
    elif form == "rows":
        sizes = (*shape[:-1], 1)
    return codes, torch.rand(sizes, generator=made) + 0.5


def _write(folder: Path, tensors: dict[str, torch.Tensor], block: tuple[int, int] | None) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "model.pt")
    told = {"quant_method": "fp8", "weight_block_size": None if block is None else [*block]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": told}))
    return folder / "model.pt"


def _values(tensors: dict[str, torch.Tensor], block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The values of all that are not scales; each codes have a scale beside them."""
    scales = {key for key in tensors if key.endswith(SCALE)}
    assert {key + SCALE for key, t in tensors.items() if t.dtype is FP8} == scales
    return {
        key: dequantised(t, tensors[key + SCALE], block) if t.dtype is FP8 else t
        for key, t in tensors.items()
        if key not in scales
    }


# --------------------------------------------------------------------------------- random rules

NUMBERED = count()


def _ids(draw: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Elements that are their own numbers: where they are afterwards tells what rules did."""
    first = next(NUMBERED) * 10_000
    return torch.arange(first, first + prod(shape)).reshape(shape)


def _laid_out(drawn: Drawn, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values in the layout that rules make of the numbers of elements."""
    known = {key: t for key, t in drawn.before.items() if t.dtype is torch.int64}
    numbers = torch.cat([t.flatten() for t in known.values()])
    flat = torch.cat([values[key].flatten() for key in known])
    order = numbers.argsort()
    return {
        key: flat[order[torch.searchsorted(numbers[order], t.flatten().contiguous())]].reshape(
            t.shape
        )
        if t.dtype is torch.int64
        else t
        for key, t in drawn.after.items()
    }


@settings(max_examples=examples(160), deadline=None, suppress_health_check=HealthCheck)
@given(
    drawn_rules(most=2, values=_ids),
    st.sampled_from(["blocks", "rows", "one"]),
    st.sampled_from([(2, 2), (4, 4), (1, 2), (2, 3)]),
    st.integers(0, 2**31),
)
def test_the_values_are_those_that_rules_make_of_values_or_it_is_refused(
    tmp_path_factory, drawn, form, block, seed
):
    folder = tmp_path_factory.mktemp("rules")
    tensors: dict[str, torch.Tensor] = {}
    for at, (key, t) in enumerate(drawn.before.items()):
        if t.dtype is not torch.int64:
            tensors[key] = t
            continue
        flat = t.dim() < 2 and form != "one"
        tensors[key], tensors[key + SCALE] = _quantised(
            t.shape, "one" if flat else form, block, seed + at
        )
    if form != "blocks":
        block = (1, 1)
    saved = _write(folder, tensors, block if form == "blocks" else None)
    out, back, mapping = folder / "out.pt", folder / "back.pt", folder / "map.json"
    rules = KeyRules("keep", rules=tuple(drawn.rules))
    options: dict[str, Any] = {"force": True, "fsync": False}
    try:
        convert_checkpoint(saved, out, keys=rules, save_mapping=mapping, **options)
    except RefusedObject as error:
        assert "--dequantize" in (error.hint or "")
        event("refused")
        return
    event("laid out")
    expected = _laid_out(drawn, _values(tensors, block))
    assert_same(_values(load_portable(out), block), expected)
    try:
        convert_checkpoint(out, back, rules=mapping, reverse=True, verify=True, **options)
    except RefusedObject:
        # along a dimension of size 1 a scale is for one as well as for all
        assert any(1 in t.shape for t in (*drawn.before.values(), *drawn.after.values()))
        event("not undone")
        return
    assert_same(torch.load(back), tensors)


STACKED = [{"stack": {"dim": 0}}, {"reshape": {"shape": [1]}}]
SPLIT = [{"split": {"dim": -1, "parts": 2}}]


@pytest.mark.parametrize(
    ("codes", "shape", "operations", "to", "comes_back"),
    [
        ((1,), (), STACKED, "b.w", False),
        ((1,), (1,), STACKED, "b.w", True),
        ((1, 2), (1, 1), SPLIT, ["b.w", "c.w"], False),
        ((1, 4), (1, 1), SPLIT, ["b.w", "c.w"], True),
    ],
)
def test_a_mapping_that_would_give_a_scale_another_shape_is_refused(
    codes, shape, operations, to, comes_back, tmp_path
):
    tensors = {"a.w": torch.ones(codes).to(FP8), "a.w" + SCALE: torch.ones(shape)}
    torch.save(tensors, tmp_path / "in.pt")
    (tmp_path / "rules.json").write_text(
        json.dumps([{"from": "a.w", "to": to, "operations": operations}])
    )
    words = {"rules": tmp_path / "rules.json", "keys": "keep", "fsync": False}
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", **words)
    assert torch.load(tmp_path / "out.pt")["b.w" + SCALE] == 1
    words |= {"save_mapping": tmp_path / "m.json", "force": True}
    if comes_back:
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", **words)
        undone = {"rules": tmp_path / "m.json", "reverse": True, "fsync": False}
        convert_checkpoint(tmp_path / "out.pt", tmp_path / "back.pt", **undone)
        assert_same(torch.load(tmp_path / "back.pt"), tensors)
        return
    with pytest.raises(RefusedObject, match="another shape where a mapping is undone"):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", **words)


# ------------------------------------------------------------------- what has to go, and what not

WIDE = (128, 128)


def _weights(block: tuple[int, int] | None = WIDE, **shapes: tuple[int, ...]) -> dict:
    """Weights of these shapes, by their names; a scale for each block, or one for all."""
    tensors: dict[str, torch.Tensor] = {}
    for at, (name, shape) in enumerate(shapes.items()):
        key = f"{name.replace('__', '.')}.weight"
        form = "one" if block is None else "blocks"
        tensors[key], tensors[key + SCALE] = _quantised(shape, form, block or WIDE, at)
    return tensors


def _experts(rows: int, columns: int) -> dict:
    names = [f"e__{at}__{name}" for at in range(3) for name in ("gate", "up")]
    return _weights(**dict.fromkeys(names, (rows, columns)))


def _rule(sources: Any, targets: Any, *operations: Any) -> list[dict[str, Any]]:
    return [{"from": sources, "to": targets, "operations": [*operations]}]


QKV = ["q.weight", "k.weight", "v.weight"]
GATE_UP = ["e.{e}.gate.weight", "e.{e}.up.weight"]
GOES_ALONG = {
    "a concat of whole blocks, of which the last is cut": (
        _weights(q=(256, 200), k=(128, 200), v=(100, 200)),
        _rule(QKV, "qkv.weight", {"concat": 0}),
        lambda v: {"qkv.weight": torch.cat([v[key] for key in QKV])},
    ),
    "a split between blocks": (
        _weights(qkv=(576, 128)),
        _rule("qkv.weight", ["a.weight", "b.weight"], {"split": {"dim": 0, "sizes": [512, 64]}}),
        lambda v: {"a.weight": v["qkv.weight"][:512], "b.weight": v["qkv.weight"][512:]},
    ),
    "experts stacked and joined": (
        _experts(128, 256),
        _rule(GATE_UP, "e.gate_up", {"stack": {"dim": 0, "over": "e"}}, {"concat": 1}),
        lambda v: {
            "e.gate_up": torch.stack(
                [torch.cat([v[f"e.{e}.{n}.weight"] for n in ("gate", "up")]) for e in range(3)]
            )
        },
    ),
    "a transpose of square blocks": (
        _weights(a=(300, 150)),
        _rule("a.weight", "b.weight", {"transpose": [0, 1]}),
        lambda v: {"b.weight": v["a.weight"].T},
    ),
    "experts unflattened": (
        _weights(a=(512, 130)),
        _rule("a.weight", "e.all", {"unflatten": {"dim": 0, "sizes": [4, 128]}}),
        lambda v: {"e.all": v["a.weight"].unflatten(0, (4, 128))},
    ),
    "one scale for the whole tensor, whatever becomes of it": (
        _weights(None, a=(64, 32)),
        _rule("a.weight", ["b.weight", "c.weight"], "rope 4", {"transpose": [0, 1]}, "split 1"),
        lambda v: dict(
            zip(
                ("b.weight", "c.weight"),
                v["a.weight"].view(4, 8, 2, 32).transpose(1, 2).reshape(64, 32).T.chunk(2, 1),
                strict=True,
            )
        ),
    ),
    "scales of whole tensors that are equal": (
        _weights(None, a=(4, 6)) | {"b.weight": torch.ones(2, 6).to(FP8)}
        | {"b.weight_scale_inv": _weights(None, a=(4, 6))["a.weight_scale_inv"]},
        _rule(["a.weight", "b.weight"], "c.weight", {"concat": 0}),
        lambda v: {"c.weight": torch.cat([v["a.weight"], v["b.weight"]])},
    ),
    "a rule that gives another name alone": (
        _weights(a=(128, 130)),
        _rule("{n}.weight", "{n}.proj.weight"),
        lambda v: {"a.proj.weight": v["a.weight"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GOES_ALONG)
def test_scales_go_where_their_codes_go_and_come_back(case, tmp_path):
    tensors, rules, make = GOES_ALONG[case]
    is_one = any(t.shape == () for t in tensors.values())
    saved = _write(tmp_path / "a", tensors, None if is_one else WIDE)
    out, back, mapping = tmp_path / "a" / "out.safetensors", tmp_path / "b.pt", tmp_path / "m.json"
    convert_checkpoint(saved, out, rules=rules, save_mapping=mapping, verify=True)
    made = load_file(out)
    expected = {key: t.contiguous() for key, t in make(_values(tensors, WIDE)).items()}
    assert_same(_values(made, WIDE), expected)
    assert_same(load_portable(out, dequantize=True), {k: t.bfloat16() for k, t in expected.items()})
    convert_checkpoint(out, back, rules=mapping, reverse=True, verify=True)
    assert_same(torch.load(back), tensors)
    assert list(torch.load(back)) == list(tensors)


FIRST = "--dequantize makes values first"
REFUSED = {
    "a block that is cut": (
        WIDE,
        _weights(q=(256, 128), k=(192, 128), v=(64, 128)),
        _rule(QKV, "qkv.weight", {"concat": 0}),
        "q.weight: the tensor rule q.weight, k.weight, … → qkv.weight: a part of 192 along "
        f"dimension 0 is not whole blocks of 128 codes, which have a scale each; {FIRST}",
    ),
    "rows that change places within blocks": (
        WIDE,
        _weights(q=(256, 128)),
        _rule("q.weight", "q.weight", {"rope": 4}),
        "q.weight: the tensor rule q.weight → q.weight: codes that have a scale in common would "
        f"lie apart; {FIRST}",
    ),
    "scales of whole tensors that differ": (
        None,
        _weights(None, q=(8, 8), k=(8, 8)),
        _rule(["q.weight", "k.weight"], "qk.weight", {"concat": 0}),
        "q.weight: the tensor rule q.weight, k.weight → qk.weight: each has one scale for all "
        f"codes along dimension 0, and these differ; {FIRST}",
    ),
    "a transpose of rows that have a scale each": (
        None,
        {"q.weight": torch.ones(4, 6).to(FP8), "q.weight_scale_inv": torch.rand(4, 1)},
        _rule("q.weight", "t.weight", {"transpose": [0, 1]}),
        "q.weight: the tensor rule q.weight → t.weight: their scales are for blocks of 1 x all, "
        f"which are not square; {FIRST}",
    ),
    "codes with values": (
        WIDE,
        _weights(q=(128, 128)) | {"k.weight": torch.ones(128, 128).to(FP8)},
        _rule(["q.weight", "k.weight"], "qk.weight", {"concat": 0}),
        "q.weight: the tensor rule q.weight, k.weight → qk.weight: some of them are quantised, and "
        f"others are not; {FIRST}",
    ),
    "codes whose scales have other names": (
        WIDE,
        {
            **_weights(q=(128, 128)),
            "k.weight": torch.ones(128, 128).to(FP8),
            "k.weight_scale": torch.ones(1, 1),
        },
        _rule(["q.weight", "k.weight"], "qk.weight", {"concat": 0}),
        "q.weight: the tensor rule q.weight, k.weight → qk.weight: they are quantised in different "
        f"ways; {FIRST}",
    ),
    "a scale that was left out before": (
        WIDE,
        _weights(q=(128, 128)),
        [{"exclude": "q.weight_scale_inv"}, *_rule("q.weight", "t.weight", {"transpose": [0, 1]})],
        "q.weight_scale_inv: was left out by a rule before, and its codes are laid out otherwise; "
        f"{FIRST}",
    ),
    "an order that rules do not know": (
        None,
        {
            "a.qweight": torch.zeros(8, 64, dtype=torch.int32),
            "a.qzeros": torch.zeros(1, 8, dtype=torch.int32),
            "a.scales": torch.ones(1, 64).half(),
            "a.g_idx": torch.zeros(64, dtype=torch.int32),
        },
        _rule("a.qweight", "b.qweight", {"transpose": [0, 1]}),
        "a.qweight: the tensor rule a.qweight → b.qweight: is gptq codes, which are not laid out "
        f"otherwise; {FIRST}",
    ),
    "a scale of activations that stays behind": (
        WIDE,
        _weights(q=(128, 128), k=(128, 128)) | {"q.input_scale": torch.ones(())},
        _rule(["q.weight", "k.weight"], "qk.weight", {"concat": 0}),
        "q.input_scale: is a scale of what goes through a layer whose weight is laid out "
        f"otherwise; leave it out (--exclude), or {FIRST}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_scale_would_be_right_for_is_refused(case, tmp_path):
    block, tensors, rules, message = REFUSED[case]
    _write(tmp_path, tensors, block)
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    done = run("convert", "model.pt", "out.pt", "--rules", "rules.json", cwd=tmp_path)
    assert done.err.strip() == f"error: model.pt: {message}" and done.exit == 1
    assert not (tmp_path / "out.pt").exists()


ROWS = {"q.weight": torch.ones(4, 6).to(FP8), "q.weight_scale_inv": torch.rand(4)}
ONE = {"k.weight": torch.ones(4, 6).to(FP8), "k.weight_scale_inv": torch.rand(())}
TIED = {
    "mapping": 1,
    "state_dicts": [
        {
            "path": "", "keys": {}, "left_out": [], "modules": {},
            "order": ["q.weight", "k.weight"],
            "tensors": [{"from": ["q.weight", "k.weight"], "moves": ["untie 2"],
                         "to": ["qk.weight"]}],
        }
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "rules", "message"),
    [
        (
            ROWS | {"q.weight_scale_inv": torch.rand(4, 1)} | ONE,
            _rule(["q.weight", "k.weight"], "qk.weight", {"concat": 0}),
            "their scales are for blocks of different sizes",
        ),
        (
            ROWS,
            _rule("q.weight", "t.weight", {"transpose": [0, 1]}),
            "their scales do not have the dimensions that change places",
        ),
        (
            ROWS,
            _rule("q.weight", "t.weight", {"flatten": [0, 1]}),
            "their scales do not have all the dimensions that change",
        ),
        (
            ONE | {f"q.{name}": value for name, value in zip(
                ("weight", "weight_scale_inv"),
                (ONE["k.weight"], ONE["k.weight_scale_inv"] + 1), strict=True)},
            TIED,
            "are names of one tensor to the mapping, and their scales differ",
        ),
        (
            {f"e.{n}.{name.partition('.')[2]}": value for n in range(2)
             for name, value in ONE.items()},
            _rule("e.{n}.weight", "e.all", {"stack": {"dim": 1, "over": "n"}}),
            "their scales do not have the dimension along which they are stacked",
        ),
    ],
)  # fmt: skip
def test_scales_of_other_dimensions_than_the_move_are_refused(tensors, rules, message, tmp_path):
    saved = _write(tmp_path, tensors, None)
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    with pytest.raises(CheckpointError, match=message):
        load_portable(saved, rules=tmp_path / "rules.json")


def test_scales_follow_each_move_that_there_is():
    assert MOVED.keys() == MOVES.keys()


def test_nvfp4_is_not_stacked_for_its_second_scale_is_one_number(tmp_path):
    tensors = {}
    for at in range(2):
        key = f"m.{at}.weight"
        tensors[key] = torch.randint(0, 256, (4, 32), dtype=torch.uint8)
        tensors[f"{key}_scale"] = torch.rand(4, 4).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_2"] = torch.rand(())
    torch.save(tensors, tmp_path / "in.pt")
    rule = {"from": "m.{i}.weight", "to": "all.weight", "operations": [{"stack": 0}]}
    what = r"is read with one number in weight_scale_2, which is \[2\]; .* makes values first"
    with pytest.raises(RefusedObject, match=what):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", rules=[rule])


def test_without_a_config_the_size_of_a_block_is_not_guessed(tmp_path):
    """Of 100 and 100 rows, a scale each, nobody knows whether blocks have 128 rows or 100."""
    tensors = _weights(q=(100, 256), k=(100, 256))
    saved = _write(tmp_path, tensors, WIDE)
    (tmp_path / "config.json").unlink()
    rules = _rule(["q.weight", "k.weight"], "qk.weight", {"concat": 0})
    with pytest.raises(RefusedObject, match="one scale for all codes along dimension 0") as raised:
        convert_checkpoint(saved, tmp_path / "out.pt", rules=rules)
    assert "config.json beside it says the sizes of blocks" in str(raised.value)


SAMPLES = {
    "fp8_block_deepseek": "model.layers.0.self_attn.kv_odd.weight",
    "ct_float_block": "model.layers.0.mlp.down_proj.weight",
    "ct_float_channel": "model.layers.0.mlp.down_proj.weight",
    "ct_float_tensor": "model.layers.0.mlp.down_proj.weight",
    "ct_int8_channel": "model.layers.0.mlp.down_proj.weight",
    "ct_mxfp8": "model.layers.0.mlp.down_proj.weight",
    "ct_mxfp4": "model.layers.0.mlp.down_proj.weight_packed",
    "ct_nvfp4": "model.layers.0.mlp.down_proj.weight_packed",
    "nvfp4_modelopt": "model.layers.0.mlp.down_proj.weight",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_values_of_parts_are_those_that_the_framework_has_in_these_rows(name, tmp_path):
    folder = NUMBERS / name
    if not folder.is_dir():
        pytest.skip("the samples are not here")
    codes = SAMPLES[name]
    expected = load_file(folder / "model.expected.safetensors")[codes.removesuffix("_packed")]
    first = 128 if "block" in name else 32
    parts = expected.split([first, len(expected) - first])
    targets = [f"new.{at}.{codes.rpartition('.')[2]}" for at in range(2)]
    split = {"split": {"dim": 0, "sizes": [len(part) for part in parts]}}
    out, back, mapping = tmp_path / "out", tmp_path / "back", tmp_path / "map.json"
    options: dict[str, Any] = {"to": "safetensors", "with_files": True, "verify": True}
    options["exclude"] = ["*.input_scale"] if name == "nvfp4_modelopt" else []
    rules = _rule(codes, targets, split)
    convert_checkpoint(folder, out, rules=rules, save_mapping=mapping, **options)
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    made = load_portable(out, dequantize=True, dtype="f32")
    for at, part in enumerate(parts):
        assert torch.equal(made[f"new.{at}.weight"], part)
    options["exclude"] = []
    convert_checkpoint(out, back, rules=mapping, reverse=True, **options)
    before = load_file(folder / "model.safetensors")
    before.pop("model.layers.0.mlp.down_proj.input_scale", None)
    assert_same(load_file(back / "model.safetensors"), before)


def test_a_preset_stacks_experts_of_block_fp8_as_transformers_does(tmp_path):
    """`experts.gate_up_proj` with `experts.gate_up_proj_scale_inv`: finegrained_fp8 of 5.23."""
    at = "model.layers.0.mlp.experts"
    shapes = {"gate_proj": (256, 384), "up_proj": (256, 384), "down_proj": (384, 256)}
    names = {f"{at}.{e}.{name}": shape for e in range(2) for name, shape in shapes.items()}
    tensors = _weights(**{name.replace(".", "__"): shape for name, shape in names.items()})
    saved = _write(tmp_path, tensors, WIDE)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    v5, back = tmp_path / "v5.pt", tmp_path / "back.pt"
    convert_checkpoint(saved, v5, preset="transformers-v5")

    def stacked(ending: str) -> dict[str, torch.Tensor]:
        def all_of(name: str) -> torch.Tensor:
            return torch.stack([tensors[f"{at}.{e}.{name}.weight{ending}"] for e in range(2)])

        gate_up = torch.cat([all_of("gate_proj"), all_of("up_proj")], 1)
        return {
            f"{at}.gate_up_proj{ending}": gate_up,
            f"{at}.down_proj{ending}": all_of("down_proj"),
        }

    assert_same(torch.load(v5), stacked("") | stacked(SCALE))
    done = convert_checkpoint(v5, back, preset="transformers-original")
    assert_same(torch.load(back), tensors)
    assert not done.plan.skipped


def _gptq(module: str) -> dict[str, torch.Tensor]:
    return {
        f"{module}.qweight": torch.zeros(4, 32, dtype=torch.int32),
        f"{module}.qzeros": torch.zeros(1, 4, dtype=torch.int32),
        f"{module}.scales": torch.ones(1, 32).half(),
    }


@pytest.mark.parametrize(
    ("preset", "module"),
    [
        ("transformers-v5:qwen3_moe", "model.layers.0.mlp.experts.0.up_proj"),
        ("to-mlx-moe", "model.layers.0.mlp.experts.0.up_proj"),
        ("to-phi3:4,4", "model.layers.0.self_attn.q_proj"),
        ("to-meta-llama:4,4", "model.layers.0.self_attn.q_proj"),
    ],
)
def test_a_preset_is_not_half_applied_where_codes_have_names_of_their_own(preset, module, tmp_path):
    """The rules name ``weight``, and codes of GPTQ are called ``qweight``: they stayed."""
    path = _write(tmp_path, _gptq(module) | {"model.norm.weight": torch.ones(4)}, None)
    with pytest.raises(CheckpointError) as error:
        convert_checkpoint(path, tmp_path / "out.pt", preset=preset)
    assert str(error.value).endswith(FIRST)
