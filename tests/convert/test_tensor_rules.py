"""Tensor rules in conversions: real pairs of layouts both ways, random rules against what torch
makes, and every kind of misfit with its message.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from ckptconv import (
    KeyMismatch,
    KeyRules,
    RefusedObject,
    RenameKeys,
    convert_checkpoint,
    diff_checkpoints,
    load_portable,
    merge_checkpoints,
    open_checkpoint,
)
from ckptconv.convert.report import plan_lines
from helpers.examples import examples
from helpers.paths import NUMBERS
from helpers.program import run

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from helpers.random_rules import assert_same, drawn_rules, forth_and_back  # noqa: E402

LAYOUTS = "original", "v5"


@settings(max_examples=examples(60), deadline=None, suppress_health_check=HealthCheck)
@given(drawn_rules())
def test_random_rules_make_what_torch_makes_and_are_undone(tmp_path_factory, drawn):
    forth_and_back(drawn, tmp_path_factory.mktemp("rules"))


# ------------------------------------------------------------------------------- real pairs

EXPERTS = "model.layers.{l}.mlp.experts"
QWEN_MOE = [
    {
        "from": [f"{EXPERTS}.{{e}}.gate_proj.weight", f"{EXPERTS}.{{e}}.up_proj.weight"],
        "to": f"{EXPERTS}.gate_up_proj",
        "operations": [{"stack": 0}, {"concat": 1}],
    },
    {
        "from": f"{EXPERTS}.{{e}}.down_proj.weight",
        "to": f"{EXPERTS}.down_proj",
        "operations": ["stack 0"],
    },
]
OLD_MIXTRAL = "model.layers.{l}.block_sparse_moe"
PAIRS = {
    "mixtral": [
        {
            "from": [f"{OLD_MIXTRAL}.experts.{{e}}.{name}.weight" for name in ("w1", "w3")],
            "to": f"{EXPERTS}.gate_up_proj",
            "operations": [{"stack": {"dim": 0, "over": "e"}}, {"concat": 1}],
        },
        {
            "from": f"{OLD_MIXTRAL}.experts.{{e}}.w2.weight",
            "to": f"{EXPERTS}.down_proj",
            "operations": [{"stack": 0}],
        },
        {"from": f"{OLD_MIXTRAL}.gate.weight", "to": "model.layers.{l}.mlp.gate.weight"},
    ],
    "qwen3_moe": QWEN_MOE,
    "deepseek_v3": QWEN_MOE,
    "gpt_neox": [{"from": "embed_out.weight", "to": "lm_head.weight"}],
}
BACK = {
    "mixtral": [
        {
            "from": f"{EXPERTS}.gate_up_proj",
            "to": [f"{OLD_MIXTRAL}.experts.{{e}}.{name}.weight" for name in ("w1", "w3")],
            "operations": [{"split": 1}, {"unstack": 0}],
        },
        {
            "from": f"{EXPERTS}.down_proj",
            "to": f"{OLD_MIXTRAL}.experts.{{e}}.w2.weight",
            "operations": ["unstack 0"],
        },
        {"from": "model.layers.{l}.mlp.gate.weight", "to": f"{OLD_MIXTRAL}.gate.weight"},
    ],
    "qwen3_moe": [
        {
            "from": f"{EXPERTS}.gate_up_proj",
            "to": [f"{EXPERTS}.{{e}}.{name}_proj.weight" for name in ("gate", "up")],
            "operations": [{"unstack": 0}, {"split": {"dim": 0, "parts": 2}}],
        },
        {
            "from": f"{EXPERTS}.down_proj",
            "to": f"{EXPERTS}.{{e}}.down_proj.weight",
            "operations": ["unstack 0"],
        },
    ],
    "gpt_neox": [{"from": "lm_head.weight", "to": "embed_out.weight"}],
}
BACK["deepseek_v3"] = BACK["qwen3_moe"]


def _folder(name: str, layout: str) -> Path:
    folder = NUMBERS / f"rules_{name}_{layout}"
    if not folder.is_dir():
        pytest.skip("the samples are not here")
    return folder


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_real_model_has_the_other_layout_and_comes_back(name, to, tmp_path):
    original, v5 = (load_file(_folder(name, each) / "model.safetensors") for each in LAYOUTS)
    out, back, mapping = (tmp_path / each for each in ("out", "back", "map.json"))
    convert_checkpoint(
        _folder(name, "original"), out, to=to, rules=PAIRS[name], save_mapping=mapping, verify=True
    )
    assert_same(load_portable(out), v5)
    convert_checkpoint(out, back, to=to, rules=mapping, reverse=True, verify=True)
    assert_same(load_portable(back), original)
    assert_same(load_portable(_folder(name, "v5"), rules=BACK[name]), original)


def test_other_functions_take_tensor_rules(tmp_path):
    source, expected = _folder("mixtral", "original"), _folder("mixtral", "v5")
    rules = KeyRules.of(PAIRS["mixtral"])
    assert diff_checkpoints(source, expected, keys=rules).same
    with open_checkpoint(source, edits=[RenameKeys(rules)]) as opened:
        assert set(opened) == set(load_file(expected / "model.safetensors"))
        fused = opened["model.layers.0.mlp.experts.gate_up_proj"]
        assert list(fused.shape) == [4, 96, 32]
    other = tmp_path / "other.pt"
    torch.save({"extra": torch.ones(2)}, other)
    merge_checkpoints(
        [source / "model.safetensors", other],
        tmp_path / "both.pt",
        edits=[RenameKeys(KeyRules.of([{**rule, "optional": True} for rule in PAIRS["mixtral"]]))],
    )
    merged = load_portable(tmp_path / "both.pt")
    assert torch.equal(merged.pop("extra"), torch.ones(2))
    assert_same(merged, load_file(expected / "model.safetensors"))


# ------------------------------------------------------------------------------------ misfits


def _w(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape).to(dtype)


def _mapping(sources: list[str], move: str, targets: list[str]) -> dict[str, object]:
    """The document of a mapping of one state dict at the root, with one step."""
    step = {"from": sources, "moves": [move], "to": targets}
    return {
        "mapping": 1,
        "state_dicts": [
            {
                "path": "",
                "keys": {},
                "left_out": [],
                "modules": {},
                "order": sources,
                "tensors": [step],
            }
        ],
    }


def _with_attribute(t: torch.Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(t)
    made.partition_dim = 0  # type: ignore[attr-defined]
    return made


STACK = {"from": "e.{n}.w", "to": "all", "operations": ["stack 0"]}
QKV = {"from": ["q", "k"], "to": "qk", "operations": ["concat 0"]}
MISFITS = {
    "a rule that meets nothing": (
        {"x": _w(2)},
        [STACK],
        "the tensor rule e.{n}.w → all matches no key; before the rules the keys start with x",
    ),
    "a hole in a stack": (
        {"e.0.w": _w(2), "e.2.w": _w(2)},
        [STACK],
        "e.0.w: the tensor rule e.{n}.w → all joins over {n} from 0 on, and there is a hole: 0, 2 "
        "where 1 should be; all parts of a set are needed; the numbers have no gap",
    ),
    "a stack that begins later": (
        {"e.1.w": _w(2), "e.2.w": _w(2)},
        [STACK],
        "e.1.w: the tensor rule e.{n}.w → all joins over {n} from 0 on, and there is a hole: 1 "
        "where 0 should be; all parts of a set are needed; the numbers have no gap",
    ),
    "one number spelled twice": (
        {"e.0.w": _w(2), "e.00.w": _w(2)},
        [STACK],
        "e.0.w: the tensor rule e.{n}.w → all joins over {n} from 0 on, and there is two spellings "
        "of one number: 0, 00 where 1 should be; all parts of a set are needed; the numbers have "
        "no gap",
    ),
    "what is joined is no number": (
        {"e.a.w": _w(2)},
        [STACK],
        "e.a.w: the tensor rule e.{n}.w → all joins over {n}, which is 'a', not a number",
    ),
    "what is joined is a digit of another script": (
        {"e.\u0663.w": _w(2)},
        [STACK],
        "e.\u0663.w: the tensor rule e.{n}.w → all joins over {n}, which is '\u0663', not a number",
    ),
    "what is joined has more digits than int() takes": (
        {f"e.{'7' * 5000}.w": _w(2)},
        [STACK],
        f"e.{'7' * 198}…: the tensor rule e.{{n}}.w → all joins over {{n}}, which is "
        f"'{'7' * 200}…', not a number",
    ),
    "a mapping that stacks other numbers": (
        {"a": _w(2), "b": _w(2), "c": _w(2)},
        _mapping(["a", "b", "c"], "stack 0 2", ["d"]),
        "a: the mapping does not fit: 3 tensors are not in sets of 2 to stack",
    ),
    **{
        f"a mapping of too many tensors: {move}": (
            {"a": torch.empty(10**12, 0)},
            _mapping(["a"], move, ["b", "c"]),
            "a: the mapping does not fit: 1000000000000 tensors would be made in one step, of "
            "1,000,000 at most",
        )
        for move in ("tie 1000000000000", "unstack 0 1000000000000")
    },
    "a tensor without values of very many rows": (
        {"a": torch.empty(10**12, 0)},
        [{"from": "a", "to": "e.{n}", "operations": ["unstack 0"]}],
        "a: the tensor rule a → e.{n}: 1000000000000 tensors would be made in one step, of "
        "1,000,000 at most",
    ),
    "a tensor without values in very many parts": (
        {"a": torch.empty(0, 3)},
        [
            {
                "from": "a",
                "to": "e.{n}",
                "operations": [{"split": {"dim": 0, "parts": 10**12, "over": "n"}}],
            }
        ],
        "a: the tensor rule a → e.{n}: 1000000000000 tensors would be made in one step, of "
        "1,000,000 at most",
    ),
    "one of two sources is missing": (
        {"q": _w(2), "x": _w(2)},
        [QKV],
        "q: the tensor rule q, k → qk needs 'k', which is not there (1 key of 2 missing)",
    ),
    "a layer has fewer experts": (
        {"0.e.0.w": _w(2), "0.e.1.w": _w(2), "1.e.0.w": _w(2)},
        [{"from": "{l}.e.{n}.w", "to": "{l}.w", "operations": ["stack 0"]}],
        "1.e.0.w: the tensor rule {l}.e.{n}.w → {l}.w joins 1 of {n} here, and 2 of them at "
        "'0.e.0.w'; some are missing, or each of the two needs a rule of its own",
    ),
    "shapes that cannot be stacked": (
        {"e.0.w": _w(2), "e.1.w": _w(3)},
        [STACK],
        "e.0.w: the tensor rule e.{n}.w → all: tensors of shapes [2] and [3] cannot be stacked",
    ),
    "shapes that cannot be concatenated": (
        {"q": _w(2, 3), "k": _w(2, 4)},
        [QKV],
        "q: the tensor rule q, k → qk: tensors of shapes [2, 3] and [2, 4] cannot be concatenated "
        "along dimension 0",
    ),
    "two dtypes": (
        {"q": _w(2), "k": _w(2, dtype=torch.float16)},
        [QKV],
        "q: the tensor rule q, k → qk: float32 and float16 cannot be put into one tensor; give "
        "them one dtype in a conversion before",
    ),
    "a dimension that is not there": (
        {"q": _w(2), "k": _w(2)},
        [{**QKV, "operations": ["concat 1"]}],
        "q: the tensor rule q, k → qk: there is no dimension 1 of 1",
    ),
    "sizes that do not add up": (
        {"qk": _w(6)},
        [{"from": "qk", "to": ["q", "k"], "operations": [{"split": {"dim": 0, "sizes": [4, 1]}}]}],
        "qk: the tensor rule qk → q, k: the sizes [4, 1] add up to 5, and dimension 0 of [6] is 6",
    ),
    "parts that are not equal": (
        {"qk": _w(5)},
        [{"from": "qk", "to": ["q", "k"], "operations": [{"split": 0}]}],
        "qk: the tensor rule qk → q, k: dimension 0 of [5] cannot be split into 2 equal parts; say "
        'their sizes: {"split": {"dim": 0, "sizes": [...]}}',
    ),
    "another shape of other size": (
        {"a": _w(6)},
        [{"from": "a", "to": "b", "operations": [{"reshape": [4, 2]}]}],
        "a: the tensor rule a → b: [6] cannot have the shape [4, 2]",
    ),
    "heads that do not fit": (
        {"a": _w(6, 2)},
        [{"from": "a", "to": "b", "operations": [{"rope": 2}]}],
        "a: the tensor rule a → b: dimension 0 of [6, 2] is not of 2 heads of an even size",
    ),
    "two rules for one tensor": (
        {"e.0.w": _w(2), "e.1.w": _w(2)},
        [STACK, {"from": "e.{n}.w", "to": "f.{n}", "operations": [{"reshape": [2, 1]}]}],
        "e.0.w: is taken by the tensor rule e.{n}.w → all, and the tensor rule e.{n}.w → f.{n} is "
        "for it too; make one of the patterns narrower",
    ),
    "two sources for one tensor": (
        {"q": _w(2), "k": _w(2)},
        [{"from": ["{a}", "{a}"], "to": "{a}.x", "operations": ["concat 0"]}],
        "q: the tensor rule {a}, {a} → {a}.x: it is both {a} and {a}; make one of the patterns "
        "narrower",
    ),
    "a target that is there": (
        {"q": _w(2), "k": _w(2), "qk": _w(2)},
        [QKV],
        "qk: is there already, and the tensor rule q, k → qk would make it",
    ),
    "a list of rules a second time": (
        {"all": _w(2, 2)},
        [STACK],
        "the tensor rule e.{n}.w → all matches no key; before the rules the keys start with all",
    ),
    "codes and scales": (
        {
            "a.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn),
            "a.weight_scale_inv": torch.ones(1, 1),
        },
        [{"from": "a.weight_scale_inv", "to": "b", "operations": [{"transpose": [0, 1]}]}],
        "a.weight_scale_inv: the tensor rule a.weight_scale_inv → b: is what codes are read with, "
        "and goes where these go; write the rule for the codes alone, or --dequantize makes values "
        "first",
    ),
    "two keys that read as one": (
        {1: _w(2), "1": _w(2), "e.0.w": _w(2)},
        [STACK],
        "two keys read as '1'",
    ),
    "two targets of one name": (
        {"qk": _w(2)},
        [{"from": "qk", "to": ["q", "q"], "operations": ["split 0"]}],
        "q: the tensor rule qk → q, q would make it twice",
    ),
    "a parameter with attributes": (
        {"e.0.w": _with_attribute(_w(2)), "e.1.w": _w(2)},
        [STACK],
        "e.0.w: the tensor rule e.{n}.w → all: is not a plain tensor",
    ),
    "a mapping that makes more than it names": (
        {"a": _w(4)},
        _mapping(["a"], "split 0 2,2", ["b"]),
        "a: the mapping does not fit: 2 tensors made, for 1 name",
    ),
    "a mapping of a checkpoint with more keys": (
        {"a": _w(4)},
        _mapping(["a", "b"], "concat 0 4,4", ["c"]),
        "b: is not there, and the mapping needs it; --reverse undoes a mapping; it fits the "
        "checkpoints that it came from",
    ),
    "a number of a config that is not there": (
        {"a": _w(4, 2)},
        [{"from": "a", "to": "b", "operations": [{"rope": "num_attention_heads"}]}],
        "the tensor rule a → b: config.json has no num_attention_heads; put config.json beside the "
        "checkpoint, or write the number itself",
    ),
    "a number of a checkpoint to be like": (
        {"qk": _w(6)},
        [
            {
                "from": "qk",
                "to": ["q", "k"],
                "operations": [{"split": {"dim": 0, "sizes": "like"}}],
            }
        ],
        "qk: the tensor rule qk → q, k: the size of 'q' is not known; --like names a checkpoint "
        "that has it",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_misfit_is_an_error_that_names_the_keys(case, tmp_path):
    tensors, rules, message = MISFITS[case]
    torch.save(tensors, tmp_path / "a.pt")
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    done = run("convert", "a.pt", "b.pt", "--rules", "rules.json", cwd=tmp_path)
    assert done.err.strip() == f"error: a.pt: {message}" and done.exit == 1
    assert not (tmp_path / "b.pt").exists()


_TALL = _w(2, 3)
TORCH_REFUSES_TOO = {
    "an order of fewer dimensions": (
        {"a": _TALL},
        [{"from": "a", "to": "b", "operations": [{"permute": [0]}]}],
        lambda: _TALL.permute(0),
        r"\[0\] is not an order of the dimensions of \[2, 3\]",
    ),
    "two unknown sizes": (
        {"a": _TALL},
        [{"from": "a", "to": "b", "operations": [{"reshape": [-1, -1]}]}],
        lambda: _TALL.reshape(-1, -1),
        r"\[-1, -1\] is not a shape; one of its sizes may be -1",
    ),
    "an unknown size that is not whole": (
        {"a": _TALL},
        [{"from": "a", "to": "b", "operations": [{"reshape": [4, -1]}]}],
        lambda: _TALL.reshape(4, -1),
        r"\[2, 3\] cannot have the shape \[4, -1\]",
    ),
    "an unknown size beside none": (
        {"a": _w(0, 3)},
        [{"from": "a", "to": "b", "operations": [{"reshape": [0, -1]}]}],
        lambda: _w(0, 3).reshape(0, -1),
        r"\[0, 3\] cannot have the shape \[0, -1\]",
    ),
    "dimensions flattened backwards": (
        {"a": _TALL},
        [{"from": "a", "to": "b", "operations": [{"flatten": [1, 0]}]}],
        lambda: _TALL.flatten(1, 0),
        "flatten goes from a dimension to a later one, not 1 to 0",
    ),
    "heads of a number": (
        {"a": _w()},
        [{"from": "a", "to": "b", "operations": [{"rope": 1}]}],
        lambda: _w().view(1, 2, -1).transpose(1, 2),
        "a number has no heads",
    ),
    "fewer rows than targets": (
        {"a": _TALL},
        [{"from": "a", "to": ["b", "c", "d"], "operations": ["unstack 0"]}],
        lambda: dict(zip("bcd", _TALL.unbind(0), strict=True)),
        r"dimension 0 of \[2, 3\] is 2, for 3 targets",
    ),
    "nine sizes that do not add up": (
        {"a": _w(5)},
        _mapping(["a"], "split 0 1,1,1,1,1,1,1,1,1", [*"bcdefghij"]),
        lambda: _w(5).split([1] * 9),
        r"the sizes 9 × 1 add up to 9, and dimension 0 of \[5\] is 5",
    ),
    "a mapping of another order of dimensions": (
        {"a": _w(2, 3, 4)},
        _mapping(["a"], "permute 1,0 -", ["b"]),
        lambda: _w(2, 3, 4).permute(1, 0),
        r"\[1, 0\] is not an order of the dimensions of \[2, 3, 4\]",
    ),
    "a mapping that reshapes to another size": (
        {"a": _TALL},
        _mapping(["a"], "reshape 7 2,3 -", ["b"]),
        lambda: _TALL.reshape(7),
        r"\[2, 3\] cannot have the shape \[7\]",
    ),
}


@pytest.mark.parametrize("case", TORCH_REFUSES_TOO)
def test_what_torch_refuses_is_a_misfit(case, tmp_path):
    tensors, rules, of_torch, message = TORCH_REFUSES_TOO[case]
    with pytest.raises((RuntimeError, ValueError)):
        of_torch()
    torch.save(tensors, tmp_path / "a.pt")
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    with pytest.raises(KeyMismatch, match=message):
        load_portable(tmp_path / "a.pt", rules=tmp_path / "rules.json")


@pytest.mark.parametrize(
    ("move", "message"),
    [
        ("permute 1,0 0,7", "there is no tensor 7 in a list of 2"),
        ("reshape 6 3,2 -", r"has the shape \[2, 3\], not \[3, 2\]"),
        ("concat 0 2,3", r"the sizes along dimension 0 are \[2, 2\], not \[2, 3\]"),
        ("order 1", r"2 tensors do not have the order \(1,\)"),
        ("order 1,1", r"2 tensors do not have the order \(1, 1\)"),
    ],
)
def test_a_mapping_of_other_tensors_does_not_fit(move, message, tmp_path):
    torch.save({"a": _w(2, 3), "b": _w(2, 3)}, tmp_path / "a.pt")
    count = 1 if move.startswith("concat") else move.count("1,1") or 2
    mapping = _mapping(["a", "b"], move, [f"new.{at}" for at in range(count)])
    (tmp_path / "map.json").write_text(json.dumps(mapping))
    with pytest.raises(KeyMismatch, match=message):
        load_portable(tmp_path / "a.pt", rules=tmp_path / "map.json")


def test_tensors_with_other_bits_are_not_put_into_one(tmp_path):
    z = torch.tensor([1 + 2j])
    torch.save({"q": z, "k": z.conj()}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["k"].is_conj()
    with pytest.raises(RefusedObject, match="differ in byte order or in their conj and neg bits"):
        load_portable(tmp_path / "a.pt", rules=[QKV])


def test_a_tensor_without_values_has_its_new_shape(tmp_path):
    torch.save({"a": torch.empty(0, 6)}, tmp_path / "a.pt")
    rules = [{"from": "a", "to": "b", "operations": [{"reshape": [3, 0, 2]}]}]
    made = load_portable(tmp_path / "a.pt", rules=rules)["b"]
    assert made.shape == torch.empty(0, 6).reshape(3, 0, 2).shape


# ------------------------------------------------------------------------- numbers, files, undoing


def test_numbers_are_those_of_the_config_beside(tmp_path):
    """GPT-NeoX has q, k and v of each head one after another."""
    folder = _folder("gpt_neox", "original")
    old = "gpt_neox.layers.{l}.attention.query_key_value.{kind}"
    rules = {
        "from": old,
        "to": [f"layers.{{l}}.{name}.{{kind}}" for name in "qkv"],
        "operations": [
            {"unflatten": {"dim": 0, "sizes": ["num_attention_heads", 3, -1]}},
            {"unstack": 1},
            {"flatten": [0, 1]},
        ],
    }
    made = load_portable(folder, rules=[rules])
    before = load_file(folder / "model.safetensors")
    for kind in ("weight", "bias"):
        fused = before[old.format(l=0, kind=kind)]
        apart = fused.view(4, 3, 8, *fused.shape[1:])
        for at, name in enumerate("qkv"):
            assert torch.equal(made[f"layers.0.{name}.{kind}"], apart[:, at].flatten(0, 1))


FILES = {
    "rules.json": """{"rules": [
        {"rename": {"old.": "new."}},
        {"from": "new.{n}.w", "to": "new.w", "operations": [{"stack": {"dim": -1, "over": "n"}}]},
        {"from": "new.w", "to": ["a", "b"], "operations": [{"split": {"dim": 0, "sizes": [1, 2]}}]},
        {"add-prefix": "net."}]}""",
    "rules.toml": """
[[rules]]
rename = {"old." = "new."}
[[rules]]
from = "new.{n}.w"
to = "new.w"
operations = [{stack = {dim = -1, over = "n"}}]
[[rules]]
from = "new.w"
to = ["a", "b"]
operations = [{split = {dim = 0, sizes = [1, 2]}}]
[[rules]]
add-prefix = "net."
""",
    "rules.yaml": """
rules:
- rename: {old.: new.}
- from: new.{n}.w
  to: new.w
  operations:
  - stack: {dim: -1, over: n}
- from: new.w
  to: [a, b]
  operations:
  - split:
      dim: 0
      sizes: [1, 2]
- add-prefix: net.
""",
}


@pytest.mark.parametrize("name", FILES)
def test_key_rules_and_tensor_rules_are_one_ordered_list(name, tmp_path):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(FILES[name])
    tensors = {"old.0.w": _w(3), "old.1.w": _w(3) + 10, "other": _w(1)}
    torch.save(tensors, tmp_path / "a.pt")
    paths = tmp_path / "a.pt", tmp_path / "b.pt"
    convert_checkpoint(*paths, rules=tmp_path / name, save_mapping=tmp_path / "map.json")
    stacked = torch.stack([tensors["old.0.w"], tensors["old.1.w"]], -1)
    expected = {"net.a": stacked[:1], "net.b": stacked[1:], "net.other": tensors["other"]}
    assert_same(load_portable(paths[1]), expected)
    assert_same(load_portable(paths[1], rules=tmp_path / "map.json", reverse=True), tensors)
    again = tmp_path / "again.pt"
    torch.save({key: t * 2 for key, t in tensors.items()}, again)
    assert_same(
        load_portable(again, rules=tmp_path / "map.json"), {k: t * 2 for k, t in expected.items()}
    )


def test_parameters_are_stacked_as_their_values_are(tmp_path):
    parts = {f"e.{n}.w": torch.nn.Parameter(_w(3) + n) for n in range(2)}
    torch.save(parts, tmp_path / "a.pt")
    made = load_portable(tmp_path / "a.pt", rules=[STACK])
    assert torch.equal(made["all"], torch.stack([*parts.values()])) and [*made] == ["all"]


def test_sizes_are_those_of_the_checkpoint_to_be_like(tmp_path):
    rule = {"from": "qk", "to": ["q", "k"], "operations": [{"split": {"dim": 0, "sizes": "like"}}]}
    (tmp_path / "rules.json").write_text(json.dumps([rule]))
    torch.save({"q": _w(1, 2), "k": _w(3, 2)}, tmp_path / "like.pt")
    torch.save({"qk": _w(4, 2)}, tmp_path / "a.pt")
    paths = tmp_path / "a.pt", tmp_path / "b.pt"
    convert_checkpoint(*paths, rules=tmp_path / "rules.json", like=tmp_path / "like.pt")
    q, k = _w(4, 2).split([1, 3])
    assert_same(torch.load(paths[1]), {"q": q, "k": k})


def test_a_mapping_with_steps_fills_in_the_second_name_of_a_tensor(tmp_path):
    mapping = _mapping(["a"], "split 0 1,3", ["b", "c"])
    mapping["state_dicts"][0] |= {
        "keys": {"x": "y"},
        "filled": {"z": "y"},
        "order": ["a", "x"],
    }
    (tmp_path / "map.json").write_text(json.dumps(mapping))
    torch.save({"a": _w(4), "x": _w(2)}, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.pt", rules=tmp_path / "map.json")
    made = torch.load(tmp_path / "b.pt")
    assert_same(made, {"b": _w(4)[:1], "c": _w(4)[1:], "y": _w(2), "z": _w(2)})
    assert made["y"].data_ptr() == made["z"].data_ptr()


def test_tied_names_become_one_again_where_their_values_are_theassert_same(tmp_path):
    rules = {"from": "emb", "to": ["emb", "head"], "operations": ["tie"]}
    torch.save({"emb": _w(4)}, tmp_path / "a.pt")
    mapping = tmp_path / "map.json"
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.pt", rules=[rules], save_mapping=mapping)
    tied = torch.load(tmp_path / "b.pt")
    assert tied["emb"].data_ptr() == tied["head"].data_ptr()
    assert_same(load_portable(tmp_path / "b.pt", rules=mapping, reverse=True), {"emb": _w(4)})
    torch.save({"emb": _w(4), "head": _w(4)}, tmp_path / "c.pt")
    assert_same(load_portable(tmp_path / "c.pt", rules=mapping, reverse=True), {"emb": _w(4)})
    torch.save({"emb": _w(4), "head": _w(4) + 1}, tmp_path / "d.pt")
    with pytest.raises(KeyMismatch, match="names of one tensor to the mapping, and their values"):
        load_portable(tmp_path / "d.pt", rules=mapping, reverse=True)


def test_what_was_left_out_does_not_come_back_and_the_rest_does(tmp_path):
    rules = [
        {"from": "qkv", "to": ["q", "k"], "operations": [{"split": 0}]},
        {"from": "k", "operations": ["drop"]},
        {"from": "x.{n}", "to": "x", "operations": ["stack 0"]},
    ]
    torch.save({"qkv": _w(4), "x.0": _w(1), "x.1": _w(1) + 1, "y": _w(2)}, tmp_path / "a.pt")
    mapping = tmp_path / "map.json"
    done = convert_checkpoint(
        tmp_path / "a.pt", tmp_path / "b", to="torch", rules=rules, save_mapping=mapping
    )
    assert_same(load_portable(tmp_path / "b"), {"q": _w(2), "x": _w(2, 1), "y": _w(2)})
    assert any("qkv" in note and "does not come back" in note for note in done.plan.notes)
    back = load_portable(tmp_path / "b", rules=mapping, reverse=True)
    assert_same(back, {"x.0": _w(1), "x.1": _w(1) + 1, "y": _w(2)})


def test_parts_of_a_tensor_share_no_memory(tmp_path):
    rules = {"from": "w", "to": ["a", "b"], "operations": [{"split": 0}]}
    torch.save({"w": _w(8, 3), "y": _w(2)}, tmp_path / "a.pt")
    result = convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.pt", rules=[rules])
    assert [row.text for row in plan_lines(result.plan) if row.label == "keys"] == [
        "3 keys, 1 as before"  # and two are made, which the next row says
    ]
    parts = torch.load(tmp_path / "b.pt")
    assert parts["a"].untyped_storage().data_ptr() != parts["b"].untyped_storage().data_ptr()
    assert parts["a"].untyped_storage().nbytes() == 4 * 3 * 4


def test_rules_come_before_other_weights_are_made_values(tmp_path):
    """With --dequantize, rules meet numbers."""
    folder = NUMBERS / "fp8_block_deepseek"
    if not folder.is_dir():
        pytest.skip("the samples are not here")
    values = load_portable(folder, dequantize=True)
    key, t = next((key, t) for key, t in values.items() if t.dim() == 2)
    rules = {"from": key, "to": "turned", "operations": [{"transpose": [0, 1]}]}
    made = load_portable(folder, dequantize=True, rules=[rules])
    assert torch.equal(made["turned"], t.T) and key not in made
