"""Fitting keys: what wrapping did to them is found and undone, and nothing is assigned that could
be meant otherwise.

The oracle is the order of a state dict, which no wrapping changes; for small sets of keys, all
assignments there are.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptconv import fit_keys
from ckptconv.keys.fits import Candidates, Fit, Misshapen, Shapes
from ckptconv.support.errors import LimitExceeded
from helpers.examples import crossed, examples
from helpers.paths import DATA

LISTS = json.loads(gzip.decompress((DATA / "key_lists.json.gz").read_bytes()))
"""Key lists of real models and of what training makes of them, written by families.py."""
ADAPTED = [family for family, lists in LISTS.items() if "lora" in lists]
each_family = pytest.mark.parametrize("family", LISTS)
WRAPPINGS = LISTS["gpt2"]["wrapped"]
each_wrapped_family = pytest.mark.parametrize(("family", "wrapping"), crossed(LISTS, WRAPPINGS))
thorough = settings(max_examples=examples(400), deadline=None)


def shapes(family: str, wrapping: str | None = None) -> dict[str, tuple[int, ...]]:
    """The keys and shapes of a family's model, bare or wrapped."""
    bare = {key: tuple(shape) for key, shape in LISTS[family]["shapes"].items()}
    return (
        bare
        if wrapping is None
        else dict(zip(LISTS[family]["wrapped"][wrapping], bare.values(), strict=True))
    )


def in_order(old: Shapes, new: Shapes) -> dict[str, str]:
    return dict(zip(old, new, strict=True))


def lora(family: str) -> dict[str, tuple[int, ...]]:
    return {key: tuple(shape) for key, shape in LISTS[family]["lora"].items()}


# ----------------------------------------------------------------------------- real models, wrapped


def test_there_are_twelve_families_and_more():
    assert len(LISTS) >= 12 and all(len(lists["shapes"]) > 20 for lists in LISTS.values())


@each_wrapped_family
def test_wrapped_keys_are_fitted_to_bare_ones_and_back(family, wrapping):
    bare, wrapped = shapes(family), shapes(family, wrapping)
    assert wrapped.keys() != bare.keys()
    for old, new in ((wrapped, bare), (bare, wrapped)):
        fit = fit_keys(old, new)
        assert fit.fits and fit.renames == in_order(old, new)


@each_family
def test_each_wrapping_is_fitted_to_each_other(family):
    for one, other in itertools.permutations(LISTS[family]["wrapped"], 2):
        old, new = shapes(family, one), shapes(family, other)
        assert fit_keys(old, new).renames == in_order(old, new), (one, other)


@each_wrapped_family
def test_keys_without_shapes_are_fitted_too(family, wrapping):
    bare, wrapped = shapes(family), shapes(family, wrapping)
    fit = fit_keys(wrapped, dict.fromkeys(bare))
    assert fit.fits and fit.renames == in_order(wrapped, bare)


@pytest.mark.parametrize(
    ("family", "prefix", "wrapping"),
    crossed(LISTS, ["net.", "student.backbone.encoder.", "_forward_module.", "0."], WRAPPINGS),
)
def test_a_prefix_more_or_less_or_another_is_found_around_any_wrapping(family, prefix, wrapping):
    bare, wrapped = shapes(family), shapes(family, wrapping)
    led = {prefix + key: shape for key, shape in wrapped.items()}
    for old, new in (
        (led, bare),
        (bare, led),
        (led, {f"teacher.{key}": shape for key, shape in bare.items()}),
    ):
        fit = fit_keys(old, new)
        assert fit.fits and fit.renames == in_order(old, new)


@pytest.mark.parametrize("family", ADAPTED)
@pytest.mark.parametrize(
    "lead", ["", "module.", "module._orig_mod.", "model.", "module.model._orig_mod."]
)
def test_the_model_within_its_adapters_is_found(family, lead):
    base, adapted = shapes(family), {lead + key: shape for key, shape in lora(family).items()}
    fit = fit_keys(adapted, base)
    assert fit.covers and not fit.fits
    assert fit.renames == {
        key: key.removeprefix(f"{lead}base_model.model.").replace(".base_layer.", ".")
        for key in adapted if ".lora_" not in key
    }  # fmt: skip
    assert fit.unexpected == tuple(key for key in adapted if ".lora_" in key)


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_that_the_source_lacks_are_missing(family):
    fit = fit_keys(shapes(family), lora(family))
    assert not fit.covers
    assert {key for key in fit.missing if ".lora_" not in key} == set() and len(fit.renames) == len(
        shapes(family)
    )


def test_a_head_that_adapters_copied_is_not_chosen_between():
    """peft keeps the original of a module that is trained whole (`modules_to_save`) beside its
    copy.
    """
    adapted = {
        "base_model.model.bert.fc.weight": (3, 3),
        "base_model.model.score.original_module.weight": (2, 3),
        "base_model.model.score.modules_to_save.default.weight": (2, 3),
    }
    fit = fit_keys(adapted, {"bert.fc.weight": (3, 3), "score.weight": (2, 3)})
    assert fit.missing == ("score.weight",)
    assert fit.ambiguous == (Candidates("score.weight", tuple(adapted)[1:]),)


# ------------------------------------------------------------------------------------------ refused


def a_key(family: str, wrapping: str) -> int:
    return random.Random(f"{family} {wrapping}").randrange(len(LISTS[family]["shapes"]))


@each_wrapped_family
def test_a_removed_tensor_is_missing_and_nothing_else(family, wrapping):
    bare, wrapped = shapes(family), shapes(family, wrapping)
    gone = a_key(family, wrapping)
    del wrapped[[*wrapped][gone]]
    fit = fit_keys(wrapped, bare)
    assert not fit.covers
    assert (
        fit.missing == ([*bare][gone],) and fit.unexpected == fit.mismatched == fit.ambiguous == ()
    )
    assert fit.renames == in_order(wrapped, {key: None for key in bare if key != [*bare][gone]})
    back = fit_keys(bare, wrapped)
    assert back.covers and not back.fits and back.unexpected == ([*bare][gone],)


@each_wrapped_family
def test_a_reshaped_tensor_is_named_with_both_shapes(family, wrapping):
    bare, wrapped = shapes(family), shapes(family, wrapping)
    at = a_key(family, wrapping)
    key, old = [*bare][at], [*wrapped][at]
    wrapped[old] = (*wrapped[old], 7)
    fit = fit_keys(wrapped, bare)
    assert not fit.covers and fit.missing == fit.unexpected == ()
    assert fit.mismatched == (Misshapen(key, old, wrapped[old], bare[key]),)


# its keys are single words
@pytest.mark.parametrize(
    ("family", "wrapping"),
    crossed([family for family in LISTS if family != "recurrent"], WRAPPINGS),
)
def test_two_keys_that_could_be_swapped_are_ambiguous(family, wrapping):
    bare, wrapped = shapes(family), shapes(family, wrapping)
    first, second = next(
        (one, other)
        for one, other in itertools.combinations(bare, 2)
        if bare[one] == bare[other] and one.split(".")[-1] == other.split(".")[-1]
    )
    names = {first: "alpha", second: "beta"}
    renamed = {
        f"{names[key]}.{key.split('.')[-1]}" if key in names else old: shape
        for key, (old, shape) in zip(bare, wrapped.items(), strict=True)
    }
    strangers = tuple(old for old in renamed if old.startswith(("alpha.", "beta.")))
    fit = fit_keys(renamed, bare)
    assert not fit.covers
    assert fit.missing == (first, second) and fit.unexpected == strangers
    assert fit.ambiguous == (Candidates(first, strangers), Candidates(second, strangers))


@each_family
def test_a_second_copy_under_another_prefix_is_not_chosen_between(family):
    bare = shapes(family)
    both = {f"{prefix}.{key}": shape for prefix in ("model", "ema") for key, shape in bare.items()}
    fit = fit_keys(both, bare)
    assert fit.renames == {} and fit.missing == tuple(bare)
    assert fit.ambiguous[0].source_keys == (f"model.{next(iter(bare))}", f"ema.{next(iter(bare))}")
    del both[f"ema.{next(iter(bare))}"]
    partly = fit_keys(both, bare)
    assert partly.renames == {f"model.{next(iter(bare))}": next(iter(bare))} and not partly.covers


@each_family
def test_keys_of_the_target_itself_are_preferred_to_a_copy(family):
    bare = shapes(family)
    fit = fit_keys({**{f"ema.{key}": shape for key, shape in bare.items()}, **bare}, bare)
    assert fit.covers and fit.renames == {key: key for key in bare}


@each_family
def test_what_else_a_training_module_holds_is_unexpected(family):
    bare = shapes(family)
    training = {
        **{f"model.{key}": shape for key, shape in bare.items()},
        "criterion.class_weights": (7,),
        "n_averaged": (),
    }
    fit = fit_keys(training, bare)
    assert fit.covers and fit.unexpected == ("criterion.class_weights", "n_averaged")


def test_the_preset_is_named_that_leaves_out_what_stands_in_the_way():
    """torch's average of a model counts in a key of its own."""
    model = torch.nn.Linear(2, 3)
    averaged = torch.optim.swa_utils.AveragedModel(model).state_dict()
    target = dict.fromkeys(model.state_dict())
    fit = fit_keys(dict.fromkeys(averaged), target)
    assert fit.unexpected == ("n_averaged",) and fit.preset == "swa"
    assert fit_keys(dict.fromkeys([*averaged, "other"]), target).preset == ""


@each_family
def test_two_families_do_not_fit(family):
    for other in LISTS:
        if other != family:
            assert not fit_keys(shapes(family), shapes(other)).fits, other


# -------------------------------------------------------------------------------------- small cases


def fit(source: str, target: str) -> Fit:
    """Keys of one shape, or ``key:SHAPE`` for a shape of that many dimensions."""

    def shapes(text: str) -> Shapes:
        return {
            key: (2,) * int(dims or 1)
            for key, _, dims in (word.partition(":") for word in text.split())
        }

    return fit_keys(shapes(source), shapes(target))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("a.w b.w", "c.w d.w"),
        ("0.w 1.w 2.w", "1.w 2.w 3.w"),
        ("l.0.w l.1.w", "l.1.w l.2.w"),
        ("enc.0.w dec.0.w", "enc.0.w foo.0.w"),
        ("x.w", "a.w b.w"),
        ("x.w y.w", "a.w"),
        ("a.w:2 b.w", "a.w b.w:2"),
        ("", "a.w"),
        ("a", "b.a c.a"),
    ],
)
def test_is_not_guessed(source, target):
    assert not fit(source, target).covers


@pytest.mark.parametrize(
    ("source", "target", "how"),
    [
        ("a.w", "b.w", "prefix 'a.' → 'b.'"),
        ("m.a.w b.w", "a.w b.w", "prefix 'm.' → ''"),
        ("m.a.w b.a.w", "a.w b.a.w", "prefixes, key by key"),
        ("net.a.w head.b.w", "a.w b.w", "prefixes, key by key"),
        ("m.w n.w", "w n.m.w", "prefixes, key by key"),  # n.m.w is m.w, so that w is n.w
        ("layers.0.w layers.1.w", "layers.0.block.w layers.1.block.w", "segments within the keys"),
        ("layers.0.w layers.1.w", "layers.0.0.w layers.1.0.w", None),
        ("0.w:2 2.w:3 3.w", "0.w:2 3.w:3 5.w", "suffix and shape"),
        ("enc.0.w enc.1.w head.v", "encoder.0.w encoder.1.w head.v", "suffix and shape"),
    ],
)
def test_is_found(source, target, how):
    found = fit(source, target)
    if how is None:
        assert not found.covers  # numbers are layers: none of them is left out
        return
    assert found.fits and found.how == how
    assert list(found.renames.items()) and set(found.renames.values()) == {
        word.partition(":")[0] for word in target.split()
    }


def test_keys_too_long_to_be_fitted_are_refused():
    endless = {f"{'a.' * 30_000}{number}": (1,) for number in range(3)}
    with pytest.raises(LimitExceeded, match="too long to be fitted"):
        fit_keys(endless, {"b": (2,), "c": (2,)})


# --------------------------------------------------------------------------------- every assignment

names = st.lists(st.sampled_from(["a", "b", "c", "w", "0", "1"]), min_size=1, max_size=3).map(
    ".".join
)
dims = st.sampled_from([(2,), (3,)])
changes = st.sampled_from([
    lambda key: key,
    lambda key: f"x.{key}",
    lambda key: f"x.{key.partition('.')[2] or key}",
    lambda key: f"y.{key.partition('.')[2] or key}",
    lambda key: f"y.x.{key.rpartition('.')[2]}",
    lambda key: ".z.".join(key.rsplit(".", 1)),
])  # fmt: skip


@st.composite
def sides(draw: st.DrawFn) -> tuple[Shapes, Shapes]:
    """A source and a target, unrelated or of the same keys, each changed in one of a few ways."""
    source = draw(st.dictionaries(names, dims, max_size=5))
    if draw(st.integers(0, 3)) == 0:
        return source, draw(st.dictionaries(names, dims, min_size=1, max_size=4))
    how = draw(st.lists(changes, min_size=1, max_size=3))
    return source, {
        how[at % len(how)](key): shape for at, (key, shape) in enumerate(source.items())
    }


def common(one: str, other: str) -> int:
    """The segments that two keys share at their ends."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def assignments(source: Shapes, target: Shapes) -> list[dict[str, str]]:
    """Every way to give each target key a source key of its shape and its last segment."""
    return [
        found
        for olds in itertools.permutations(source, len(target))
        if all(
            source[old] == target[key] and common(old, key)
            for key, old in zip(target, olds, strict=True)
        )
        for found in [dict(zip(target, olds, strict=True))]
    ]


@given(sides())
@thorough
def test_what_is_assigned_is_a_possible_assignment(both):
    source, target = both
    fit = fit_keys(source, target)
    assert len(set(fit.renames.values())) == len(fit.renames)
    assert all(source[old] == target[key] for old, key in fit.renames.items())
    assert {*fit.renames.values(), *fit.missing, *(item.key for item in fit.mismatched)} == set(
        target
    )
    assert {*fit.renames, *fit.unexpected, *(item.source_key for item in fit.mismatched)} == set(
        source
    )


@given(sides(), st.randoms())
@thorough
def test_the_order_of_keys_decides_nothing(both, chance):
    source, target = both
    shuffled = [dict(chance.sample(list(side.items()), len(side))) for side in both]
    found, again = fit_keys(source, target), fit_keys(*shuffled)
    assert found.renames == again.renames and set(found.missing) == set(again.missing)
    assert {item.key for item in found.ambiguous} == {item.key for item in again.ambiguous}


@given(sides())
@thorough
def test_an_assignment_by_suffix_has_no_rival(both):
    """Of all assignments no other one has as much in common with the target, key by key."""
    source, target = both
    fit = fit_keys(source, target)
    if not fit.covers or fit.how != "suffix and shape":
        return
    chosen = {key: old for old, key in fit.renames.items()}
    rivals = [
        other for other in assignments(source, target)
        if other != chosen and all(common(old, key) >= common(chosen[key], key) for key,
            old in other.items())
    ]  # fmt: skip
    assert rivals == []


@given(sides())
@thorough
def test_an_assignment_by_prefixes_is_the_only_one(both):
    source, target = both
    fit = fit_keys(source, target)
    if not fit.covers or fit.how != "prefixes, key by key":
        return
    led = [
        other for other in assignments(source, target)
        if all(common(old, key) == min(len(old.split(".")), len(key.split("."))) for key,
            old in other.items())
    ]  # fmt: skip
    assert [{key: old for old, key in fit.renames.items()}] == led


# ------------------------------------------------------------------------------------- tied weights


@each_wrapped_family
def test_a_tied_name_is_filled_under_any_wrapping(family, wrapping):
    """Of each family two keys of one shape are taken as tied, and one of them is not saved."""
    bare, wrapped = shapes(family), shapes(family, wrapping)
    by_shape = [
        [key for key in bare if bare[key] == shape and shape]
        for shape in dict.fromkeys(bare.values())
    ]
    tied = next((group[0], group[-1]) for group in by_shape if len(group) > 1)
    names = in_order(bare, wrapped)
    for kept, absent in (tied, tied[::-1]):
        source = {names[key]: shape for key, shape in bare.items() if key != absent}
        fit = fit_keys(source, bare, [tied])
        assert fit.fits and fit.filled == {absent: names[kept]}
        assert fit.renames == {names[key]: key for key in bare if key != absent}
        assert fit_keys(source, bare).missing == (absent,)


def test_ties_that_fill_nothing_take_nothing_away():
    source, target = {"a": (2,), "b.c.b": (2,)}, {"a.b": (2,), "a.b.b": (2,)}
    plain = fit_keys(source, target)
    assert fit_keys(source, target, [["a.b", "a.b.b"]]).missing == plain.missing == ("a.b",)


@given(sides(), st.randoms())
@thorough
def test_what_is_filled_is_a_missing_name_of_a_tensor_that_is_met(both, chance):
    source, target = both
    keys = chance.sample(list(target), len(target))
    ties = [
        group
        for group in (keys[:2], keys[2:5])
        if len(group) > 1 and len({target[key] for key in group}) == 1
    ]
    plain, fit = fit_keys(source, target), fit_keys(source, target, ties)
    assert {
        *fit.renames.values(),
        *fit.missing,
        *(item.key for item in fit.mismatched),
        *fit.filled,
    } == set(target)
    assert set(fit.filled) <= set(plain.missing)
    for key, old in fit.filled.items():
        assert any(key in group and fit.renames[old] in group for group in ties)
        assert source[old] == target[key]
    if not fit.filled:
        assert fit.missing == plain.missing


def test_a_preset_under_which_two_keys_become_one_is_no_help():
    averaged = {"n_averaged": (), "module.a.w": (2,)}
    assert fit_keys(averaged, {"a.w": (2,)}).preset == "swa"
    assert fit_keys({**averaged, "a.w": (2,)}, {"a.w": (2,)}).preset == ""
    assert fit_keys({"module.a.w": (2,), "a.w": (2,)}, {"a.w": (2,)}).preset == ""
