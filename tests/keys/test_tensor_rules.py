"""Tensor rules as they are written: what is a pattern, what is an operation, what fits together."""

from __future__ import annotations

import re

import pytest

from ckptconv.keys.config_numbers import number_in
from ckptconv.keys.tensor_rules import RuleOperation, TensorRule, matched, tensor_rule
from ckptconv.support.errors import KeyConflict


@pytest.mark.parametrize(
    ("pattern", "key", "values"),
    [
        ("a.{n}.w", "a.x-1.w", {"n": "x-1"}),
        ("{n}.w", "x.w", {"n": "x"}),
        ("a.{n}", "a.x", {"n": "x"}),
        ("a.w{n}", "a.w12", {"n": "12"}),
        ("a.w{n}", "a.wx", None),
        ("{n}w.a", "12w.a", {"n": "12"}),
        ("{n}w.a", "xw.a", None),
        ("a.{n}_{m}.w", "a.1_2.w", {"n": "1", "m": "2"}),
        ("a.{n}_{m}.w", "a.x_2.w", None),
        ("a.{n}_{m}.w", "a.1_x.w", None),
        ("**.{n}.w", "b.c.x.w", {"**": "b.c.", "n": "x"}),
        ("a.{n}.b{n}", "a.1.b1", {"n": "1"}),
        ("a.{n}.b{n}", "a.1.b2", None),
        ("**.{__head}.w", "b.x.w", {"**": "b.", "__head": "x"}),
    ],
)
def test_a_variable_is_a_segment_or_digits_beside_other_characters(pattern, key, values):
    assert matched(pattern, key) == values


@pytest.mark.parametrize("pattern", ["a.{n²}", "a.{n", "a.{2}", "a.{}", "a.**.b"])
def test_what_is_not_a_pattern_is_refused(pattern):
    with pytest.raises(KeyConflict, match="is not a pattern of keys"):
        TensorRule.of(pattern, pattern)


@pytest.mark.parametrize(
    ("name", "value", "arguments"),
    [
        ("stack", (0, 1), {}),
        ("stack", (0,), {"dim": 1}),
        ("tie", (2,), {}),
        ("drop", (0,), {}),
    ],
)
def test_one_argument_without_its_name_is_the_first(name, value, arguments):
    with pytest.raises(KeyConflict, match=f"{name} takes one argument without its name at most"):
        RuleOperation.of(name, *value, **arguments)
    assert RuleOperation.of("stack", 0) == RuleOperation.of("stack", dim=0)


@pytest.mark.parametrize("dims", [[], 3, "01", [0, "1"], [0.0, 1]])
def test_dimensions_are_a_list_of_whole_numbers(dims):
    with pytest.raises(KeyConflict, match="permute: dims is ") as caught:
        RuleOperation.of("permute", dims=dims)
    assert caught.value.hint == "write dimensions as a list: [0, 1]"


def test_operations_make_as_many_tensors_as_there_are_targets():
    with pytest.raises(KeyConflict, match=r"make 2 tensors of 2 sources, for 1 target$"):
        TensorRule.of(["a.w", "b.w"], "c.w", [{"transpose": [0, 1]}])
    with pytest.raises(KeyConflict, match=r"make 1 tensor of 2 sources, for 2 targets$"):
        TensorRule.of(["a.w", "b.w"], ["c.w", "d.w"], ["concat 0"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sum 0", "there is no operation 'sum'"),
        ({"stack": {"axis": 0}}, "stack has no 'axis'"),
        ({"tie": {"dim": 0}}, "tie has no 'dim'"),
        ("transpose", "transpose needs dims"),
        ({"concat": {"over": "e"}}, "concat needs dim"),
        (
            {"split": {"dim": 0, "parts": 2, "sizes": [1, 1]}},
            "split takes parts or sizes, not both",
        ),
        ({"transpose": [0, 1, 2]}, r"transpose takes two dimensions, as \[0, 1\]"),
        ({"flatten": [0]}, r"flatten takes two dimensions, as \[0, 1\]"),
        ({"stack": 0, "concat": 0}, r"\{'stack': 0, 'concat': 0\} is not an operation"),
        (0, "0 is not an operation"),
    ],
)
def test_an_operation_that_torch_would_refuse_or_read_otherwise_is_refused(given, message):
    with pytest.raises(KeyConflict, match=f"^{message}"):
        TensorRule.of("a.w", "b.w", [given])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"from": "a", "to": "b", "operation": []}, "a tensor rule has no 'operation'"),
        ({"from": "a", "to": "b", "optional": 1}, "optional is true or false, not 1"),
        ({"from": 3, "to": "b"}, "'from' is not a pattern of keys, nor a list of them"),
        ({"from": "a", "to": ["b", 3]}, "'to' is not a pattern of keys, nor a list of them"),
        ({"to": "b"}, "a tensor rule has no source"),
        ({"from": "a"}, "a tensor rule has no target"),
        ({"from": ["a", re.compile("b")], "to": "c"}, "sources are all patterns, or all regular"),
        ({"from": "a", "to": "b", "operations": "drop"}, "drop stands alone, and has no target"),
        (
            {"from": ["a.{n}", "b.{m}"], "to": "c"},
            "the sources of one rule have the same variables",
        ),
        (
            {"from": "a.{n}", "to": ["b.{n}", "c"]},
            "the targets of one rule have the same variables",
        ),
        ({"from": "a.{e}", "to": "b"}, r"\{e\} is in the sources alone, and no operation joins"),
        ({"from": "a", "to": "b.{e}"}, r"\{e\} is in the targets alone, and no operation makes"),
        (
            {"from": "a.{e}", "to": "b.{e}", "operations": {"stack": {"dim": 0, "over": "e"}}},
            r"stack 0 over e, but \{e\} is not in the sources alone",
        ),
        (
            {"from": "a.{d}.{e}", "to": "b", "operations": ["stack 0", "stack 0"]},
            "stack could be over d or over e",
        ),
        (
            {"from": "a", "to": "b.{e}", "operations": "split 0"},
            "split 0 does not say into how many parts",
        ),
        (
            {"from": ["a", "b"], "to": ["c", "d", "e"], "operations": "split 0"},
            "split 0 of 2 tensors does not make 3 targets",
        ),
    ],
)
def test_what_is_not_a_rule_is_refused_before_any_tensor_is_read(rule, message):
    with pytest.raises(KeyConflict, match=message):
        tensor_rule(rule)


def test_two_keys_that_are_one_part_of_a_group_are_refused():
    rule = TensorRule.of(re.compile(r"(?:x\.)?layer(?P<n>\d)"), "made.{n}")
    assert [group.keys for group in rule.groups(["layer0", "x.layer1"])] == [
        ("layer0",),
        ("x.layer1",),
    ]
    with pytest.raises(KeyConflict, match=r"^x\.layer0: and 'layer0' are one to the tensor rule"):
        rule.groups(["layer0", "x.layer0"])


@pytest.mark.parametrize("text", ["heads ** 2", "f(1)", "1.5", "heads[0]", "", "1 +", "9" * 501])
def test_what_is_not_made_of_numbers_and_names_is_refused(text):
    with pytest.raises(KeyConflict, match="not a number, nor made of numbers and names") as caught:
        number_in(text, {"heads": 8})
    assert caught.value.hint == "such as 'num_attention_heads * head_dim'"


def test_a_number_of_a_config_is_whole():
    assert number_in("heads // 3", {"heads": 8}) == 2
    with pytest.raises(KeyConflict, match=r"^'8 // heads' divides by 0 for this config$"):
        number_in("8 // heads", {"heads": 0})
    for config in ({"heads": 8.0}, {"heads": True}, {"heads": "8"}, {}):
        with pytest.raises(KeyConflict, match="heads"):
            number_in("heads", config)
    with pytest.raises(KeyConflict, match=r"config\.json has no text_config\.heads"):
        number_in("text_config.heads", {"text_config": 3})
