"""Tensor rules as they are written: what is a pattern, what is an operation, what fits together."""

from __future__ import annotations

import pytest

from ckptconv.keys.config_numbers import number_in
from ckptconv.keys.tensor_rules import RuleOperation, TensorRule, matched
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


@pytest.mark.parametrize("text", ["heads ** 2", "f(1)", "1.5", "heads[0]", "", "1 +", "9" * 501])
def test_what_is_not_made_of_numbers_and_names_is_refused(text):
    with pytest.raises(KeyConflict, match="not a number, nor made of numbers and names") as caught:
        number_in(text, {"heads": 8})
    assert caught.value.hint == "such as 'num_attention_heads * head_dim'"


def test_a_number_of_a_config_is_whole():
    for config in ({"heads": 8.0}, {"heads": True}, {"heads": "8"}, {}):
        with pytest.raises(KeyConflict, match="heads"):
            number_in("heads", config)
    with pytest.raises(KeyConflict, match=r"config\.json has no text_config\.heads"):
        number_in("text_config.heads", {"text_config": 3})
