"""Comparing two checkpoints: what a plain torch loop finds, in any formats, in bounded memory."""

from __future__ import annotations

import math
import struct
import tempfile
import zipfile
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptconv import (
    CheckpointError,
    CheckpointWarning,
    KeyRules,
    MalformedCheckpoint,
    OptionRefused,
    Tolerance,
    convert_checkpoint,
    diff_checkpoints,
)
from ckptconv.support.errors import AmbiguousStateDict
from helpers import oracle
from helpers.examples import crossed, examples, some
from helpers.program import SAMPLES, assert_one_error, idle_rss, run, run_process

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

DDP, TRAIN = SAMPLES / "ddp_cuda3.pt", SAMPLES / "ddp_cuda3_train.pt"
NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [
    *FLOATS,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1.001, 1e-4, 3.0, 100.0, NAN, INF, -INF])


def saved(folder: Path, name: str, tree: Any) -> Path:
    torch.save(tree, folder / name)
    return folder / name


# ------------------------------------------------------------------------------- a plain torch loop


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """A tensor of any dtype, some of them strided: transposed, sliced, expanded, conjugated."""
    dtype = draw(st.sampled_from(DTYPES))
    rows, columns = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    values = draw(st.lists(VALUES, min_size=rows * columns, max_size=rows * columns))
    if not (dtype.is_floating_point or dtype.is_complex):
        values = [int(value) if math.isfinite(value) else 7 for value in values]
    tensor = torch.tensor(values, dtype=dtype).reshape(rows, columns)
    return strided(
        tensor, draw(st.sampled_from(["as it is", "transposed", "with gaps", "conjugated"]))
    )


def strided(tensor: Any, how: str) -> Any:
    """The same values, lying otherwise."""
    if how == "transposed":
        return tensor.t().contiguous().t()
    if how == "with gaps":
        wide = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], dtype=tensor.dtype)
        wide[:, ::2] = tensor
        return wide[:, ::2]
    if how == "conjugated" and tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    return tensor


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two state dicts that have much in common."""
    first = {f"k{number}": draw(tensors()) for number in range(draw(st.integers(1, 5)))}
    second = {}
    for key, tensor in first.items():
        change = draw(
            st.sampled_from(
                [
                    "none",
                    "none",
                    "lies otherwise",
                    "an element",
                    "a sign",
                    "dtype",
                    "shape",
                    "left out",
                ]
            )
        )
        if change != "left out":
            second[key] = changed(tensor, change, draw)
    if draw(st.booleans()):
        second["new"] = draw(tensors())
    return first, second or {"new": torch.ones(1)}


def changed(tensor: Any, change: str, draw: st.DrawFn) -> Any:
    plain = tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
    if change == "lies otherwise":
        return strided(plain, draw(st.sampled_from(["transposed", "with gaps", "conjugated"])))
    if change == "an element" and plain.numel():
        place = draw(st.integers(0, plain.numel() - 1))
        value = draw(VALUES)
        plain.view(-1)[place] = (
            value if plain.is_floating_point() or plain.is_complex() else int(math.isfinite(value))
        )
    if change == "a sign" and (plain.is_floating_point() or plain.is_complex()):
        return -plain
    if change == "dtype" and not plain.is_complex():
        return plain.to(draw(st.sampled_from([dtype for dtype in FLOATS if dtype != plain.dtype])))
    return plain.reshape(-1) if change == "shape" else plain


def same_bits(first: Any, second: Any) -> bool:
    return oracle.value_bytes(first) == oracle.value_bytes(second)


def in_common(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The keys whose values can be compared."""
    return [
        key
        for key in first
        if key in second
        and first[key].dtype == second[key].dtype
        and first[key].shape == second[key].shape
    ]


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(pairs())
def test_it_finds_what_a_loop_with_torch_finds(pair):
    first, second = pair
    with tempfile.TemporaryDirectory() as folder:
        found = diff_checkpoints(
            saved(Path(folder), "a.pt", first), saved(Path(folder), "b.pt", second)
        )
    assert list(found.only_a) == [key for key in first if key not in second]
    assert list(found.only_b) == [key for key in second if key not in first]
    both = [key for key in first if key in second]
    assert [item.key for item in found.dtypes] == [
        key for key in both if first[key].dtype != second[key].dtype
    ]
    assert [item.key for item in found.shapes] == [
        key for key in both if first[key].shape != second[key].shape
    ]
    alike = in_common(first, second)
    assert {item.key for item in found.values} == {
        key for key in alike if not same_bits(first[key], second[key])
    }
    assert len({item.key for item in found.values}) == len(found.values)
    for item in found.values:
        assert_described(item.deviation, first[item.key], second[item.key])
        assert_measured(item.deviation, first[item.key], second[item.key])
    deviations = [item.deviation for item in found.values]
    worse = [
        (bool(item.nans) or item.max_abs == INF, item.rel_l2, item.max_abs or 0.0)
        for item in deviations
    ]
    assert worse == sorted(worse, reverse=True)
    assert found.same == (both == list(first) == list(second) == alike and not found.values)


def parts_of(tensor: Any) -> list[list[float]]:
    """The elements of a tensor, each as one real number or as two, exactly."""
    plain = tensor.resolve_conj().reshape(-1)
    if plain.is_complex():
        return torch.view_as_real(plain.to(torch.complex128)).tolist()
    return [[value] for value in (plain.double() if plain.is_floating_point() else plain).tolist()]


def assert_measured(found: Any, first: Any, second: Any) -> None:
    """Relative L2 and cosine by exact arithmetic, over the elements that are finite in both."""
    elements = list(zip(parts_of(first), parts_of(second), strict=True))
    finite = [
        pair for pair in elements if all(math.isfinite(value) for side in pair for value in side)
    ]
    assert found.nonfinite == len(elements) - len(finite)
    ours, theirs = ([Fraction(value) for pair in finite for value in pair[side]] for side in (0, 1))
    apart = sum((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))
    lengths = sum(a * a for a in ours), sum(b * b for b in theirs)
    expected = math.sqrt(apart / lengths[1]) if lengths[1] else INF if apart else 0.0
    assert found.rel_l2 == pytest.approx(expected, rel=1e-12, abs=0)
    if not all(lengths):
        assert found.cosine is None
        return
    inner = sum(a * b for a, b in zip(ours, theirs, strict=True))
    cosine = math.copysign(math.sqrt(inner * inner / (lengths[0] * lengths[1])), inner)
    assert found.cosine == pytest.approx(cosine, rel=1e-12, abs=1e-15)


def assert_described(found: Any, first: Any, second: Any) -> None:
    """Count, largest differences and their place, by torch in float64."""
    wide = (
        torch.complex128
        if first.is_complex()
        else torch.float64
        if first.is_floating_point()
        else torch.int64
    )
    ours, theirs = first.resolve_conj().to(wide), second.resolve_conj().to(wide)
    bits = [
        torch.frombuffer(bytearray(oracle.value_bytes(tensor)), dtype=torch.uint8)
        for tensor in (first, second)
    ]
    differ = (bits[0] != bits[1]).reshape(-1, first.element_size()).any(1)
    assert (found.count, found.numel) == (int(differ.sum()), first.numel())
    apart = torch.where(
        ours == theirs, torch.zeros(()).double(), (ours - theirs).abs().double()
    ).reshape(-1)[differ]
    numbers = apart[~apart.isnan()]
    assert found.nans == len(apart) - len(numbers)
    assert found.max_abs == (
        pytest.approx(numbers.max().item(), rel=1e-15) if len(numbers) else None
    )
    assert differ.reshape(first.shape)[found.where]
    if len(numbers):
        size = theirs.abs().double().reshape(-1)[differ][~apart.isnan()]
        relative = torch.where((numbers == 0) | numbers.isinf(), numbers, numbers / size)
        assert found.max_rel == pytest.approx(relative.max().item(), rel=1e-15)
        there = torch.where(ours == theirs, 0.0, (ours - theirs).abs().double())[found.where].item()
        assert there == pytest.approx(found.max_abs, rel=1e-15)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(pairs(), st.sampled_from([(0.0, 0.0), (1e-3, 0.0), (0.0, 1e-2), (1.0, 0.5)]), st.booleans())
def test_within_a_tolerance_it_finds_what_isclose_finds(pair, bounds, equal_nan):
    first, second = pair
    tolerance = Tolerance(*bounds, equal_nan)
    with tempfile.TemporaryDirectory() as folder:
        paths = saved(Path(folder), "a.pt", first), saved(Path(folder), "b.pt", second)
        found = diff_checkpoints(*paths, tolerance=tolerance)
    far = {}
    for key in in_common(first, second):
        ours, theirs = first[key].resolve_conj(), second[key].resolve_conj()
        wide = torch.complex128 if ours.is_complex() else torch.float64
        close = torch.isclose(
            ours.to(wide), theirs.to(wide), atol=bounds[0], rtol=bounds[1], equal_nan=equal_nan
        )
        if not close.all():
            far[key] = int((~close).sum())
    assert {item.key: item.deviation.count for item in found.values} == far


def test_a_bound_that_is_a_whole_number_is_not_of_the_type_of_the_values(tmp_path):
    first, second = torch.tensor([0, 201], dtype=torch.uint8), torch.tensor([200, 0]).byte()
    paths = saved(tmp_path, "a.pt", {"n": first}), saved(tmp_path, "b.pt", {"n": second})
    [found] = diff_checkpoints(*paths, tolerance=Tolerance(rtol=2)).values
    close = torch.isclose(first.double(), second.double(), rtol=2, atol=0)
    assert found.deviation.count == int((~close).sum()) == 1


# -------------------------------------------------------------------------------------- the formats


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors", "folder"])
def test_a_conversion_is_the_same_in_every_format(name, tmp_path):
    options = {"max_shard_size": "2kB"} if name == "folder" else {}
    convert_checkpoint(TRAIN, tmp_path / name, fsync=False, **options)
    found = diff_checkpoints(TRAIN, tmp_path / name, keys=KeyRules("strip"))
    model = len(torch.load(DDP, map_location="cpu", weights_only=True))
    trained = 2 * model  # two moments of each parameter
    assert found.same and found.tensors == model + (trained if name == "out.pt" else 0)
    told = f"A has {trained} tensors beside its state dict that B does not have, which were not "
    beside = [note for note in found.notes if note.startswith(told)]
    assert beside == ([] if name == "out.pt" else [f"{told}compared: optimizer ({trained})"])


@pytest.mark.parametrize("label", ["optimizer", "state_dict"])
def test_tensors_beside_the_state_dict_are_compared_too(label, tmp_path):
    """timm's state dict beside its average, and an optimizer beside the weights."""

    def tree(value: float) -> Any:
        beside = {"fc.weight": torch.full((3,), value)}
        if label == "optimizer":
            beside = {"state": {0: {"exp_avg": torch.full((3,), value)}}, "param_groups": []}
        timm = {"epoch": 3, "arch": "resnet18", "version": 2, "args": None}
        return {**timm, "state_dict_ema": {"fc.weight": torch.ones(3)}, label: beside}

    a, b = saved(tmp_path, "a.pt", tree(1.0)), saved(tmp_path, "b.pt", tree(2.0))
    found = diff_checkpoints(a, b)
    assert not found.same and found.tensors == 2
    (value,) = found.values
    assert value.key.startswith(f"{label}.")
    assert diff_checkpoints(a, a).same
    assert diff_checkpoints(a, b, only="state_dict_ema").same
    notes = diff_checkpoints(a, saved(tmp_path, "c.pt", {"fc.weight": torch.ones(3)})).notes
    assert any(f"were not compared: {label} (1)" in note for note in notes)


def test_a_difference_is_neither_true_nor_false():
    found = diff_checkpoints(SAMPLES / "ddp_cuda3.pt", SAMPLES / "ddp_cuda3.pt")
    for ask in (bool, lambda found: not found, lambda found: 1 if found else 2):
        with pytest.raises(TypeError, match=r"write \.same or not \.same"):
            ask(found)


def test_files_without_one_state_dict_are_compared_as_a_whole(tmp_path):
    """A codebook beside the model asks elsewhere; here a difference in it is one."""

    def tree(value: float) -> Any:
        return {"model": {"w": torch.ones(3)}, "quantizer": {"codebook": torch.full((3,), value)}}

    a, b = saved(tmp_path, "a.pt", tree(1.0)), saved(tmp_path, "b.pt", tree(2.0))
    found = diff_checkpoints(a, b)
    assert [item.key for item in found.values] == ["quantizer.codebook"] and found.tensors == 2
    assert any("everything in them was compared" in note for note in found.notes)
    assert diff_checkpoints(a, a).same and diff_checkpoints(a, b, only="model").same
    model = saved(tmp_path, "model.pt", {"w": torch.ones(3)})
    for pair in ((a, model), (model, a)):
        with pytest.raises(AmbiguousStateDict, match=r"quantizer\.codebook") as caught:
            diff_checkpoints(*pair)
        assert "--only-b" not in str(caught.value)
    assert diff_checkpoints(a, model, only="model", only_b="").same
    with pytest.raises(OptionRefused, match="only_b=3 is not a name"):
        diff_checkpoints(a, model, only="model", only_b=3)
    with pytest.raises(AmbiguousStateDict):
        diff_checkpoints(a, b, keys="strip")


def test_what_a_framework_chooses_is_told(tmp_path):
    timm = {"epoch": 3, "arch": "resnet18", "version": 2, "args": None}
    tree = {**timm, "state_dict": {"w": torch.ones(3)}, "state_dict_ema": {"w": torch.zeros(3)}}
    a, b = saved(tmp_path, "a.pt", tree), saved(tmp_path, "b.pt", {"w": torch.zeros(3)})
    with pytest.warns(CheckpointWarning, match="A: state_dict_ema is taken"):
        found = diff_checkpoints(a, b)
    assert found.same and any(note.startswith("A: state_dict_ema is taken") for note in found.notes)


def test_tensors_that_are_shared_in_one_file_only_are_compared(tmp_path):
    """An average that is still the model itself, and one that is not any more."""
    timm = {"epoch": 3, "arch": "resnet18", "version": 2, "args": None}
    weight = torch.ones(3)
    shared = {**timm, "state_dict": {"w": weight}, "state_dict_ema": {"w": weight}}
    apart = {**shared, "state_dict": {"w": torch.zeros(3)}}
    a, b = saved(tmp_path, "a.pt", shared), saved(tmp_path, "b.pt", apart)
    for pair in ((a, b), (b, a)):
        with pytest.warns(CheckpointWarning):
            assert [item.key for item in diff_checkpoints(*pair).values] == ["state_dict.w"]


@pytest.mark.parametrize("other", [[torch.ones(3)], torch.ones(3), 3, None], ids=str)
def test_parts_of_two_kinds_are_told_not_passed_over(other, tmp_path):
    tree = {"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(3), "v": torch.ones(3)}}
    a, b = saved(tmp_path, "a.pt", tree), saved(tmp_path, "b.pt", {**tree, "optimizer": other})
    found = diff_checkpoints(a, b)
    assert [note.partition(" beside")[0] for note in found.notes][:1] == ["A has 2 tensors"]
    assert len(found.notes) == (2 if isinstance(other, (list, torch.Tensor)) else 1)


def test_a_ddp_file_is_compared_with_its_bare_one(tmp_path):
    state_dict = {"fc.weight": torch.rand(3, 3), "fc.bias": torch.rand(3)}
    bare = saved(tmp_path, "bare.pt", state_dict)
    wrapped = saved(
        tmp_path, "ddp.pt", {f"module.{key}": value for key, value in state_dict.items()}
    )
    plain = diff_checkpoints(wrapped, bare)
    assert plain.only_a == ("module.fc.weight", "module.fc.bias") and plain.only_b == (
        "fc.weight",
        "fc.bias",
    )
    assert any("--keys strip" in note for note in plain.notes)
    assert diff_checkpoints(bare, wrapped, keys="strip").same
    assert diff_checkpoints(bare, wrapped, keys=KeyRules("strip", add_prefix="module.")).same
    for rules in (
        KeyRules("strip"),
        KeyRules("keep", ("module.",)),
        KeyRules("keep", renames=(("module.", ""),)),
    ):
        assert diff_checkpoints(wrapped, bare, keys=rules).same
    assert diff_checkpoints(bare, wrapped, keys=KeyRules("keep", add_prefix="module.")).same
    only_bias = KeyRules("strip", include=("*.bias",))
    state_dict["fc.weight"] += 1
    saved(tmp_path, "bare.pt", state_dict)
    assert (
        diff_checkpoints(wrapped, bare, keys=only_bias).same
        and not diff_checkpoints(wrapped, bare, keys=KeyRules("strip")).same
    )


def test_a_rule_that_meets_no_key_does_not_make_files_the_same(tmp_path):
    one = saved(tmp_path, "a.pt", {"fc.weight": torch.zeros(3), "extra": torch.ones(1)})
    other = saved(tmp_path, "b.pt", {"fc.weight": torch.ones(3), "more": torch.ones(1)})
    for options in (
        ("--include", "fc_*"), ("--include", "fc*", "--include", "cf*"), ("--exclude", "x*"),
        ("--strip-prefix", "net."),
        ("--rename", "fc.bias=b"), ("--preset", "peft"),
    ):  # fmt: skip
        assert "matches no key" in assert_one_error(
            run("diff", one, other, *options, cwd=tmp_path), code=2
        ), options
    for options in (("--exclude", "*"), ("--include", "extra", "--exclude", "extra")):
        assert "no key is left" in assert_one_error(
            run("diff", one, other, *options, cwd=tmp_path), code=2
        ), options
    # a glob may meet keys of one side only
    for glob, only in (("extra", ("extra",)), ("more", ())):
        assert diff_checkpoints(one, other, keys=KeyRules("keep", include=(glob,))).only_a == only
    assert run("diff", one, other, "--keys", "strip", cwd=tmp_path).exit == 1, (
        "no wrapper is not an error"
    )


@pytest.mark.parametrize("bounds", [(NAN, 0.0), (0.0, NAN), (-1.0, 0.0)])
def test_a_tolerance_that_is_none_is_refused(bounds, tmp_path):
    with pytest.raises(ValueError, match="a tolerance is 0 or more"):
        Tolerance(*bounds)
    assert_one_error(
        run("diff", DDP, DDP, "--atol", str(bounds[0]), "--rtol", str(bounds[1]), cwd=tmp_path),
        code=2,
    )


def test_corpus_files_are_the_same_as_their_conversions(corpus, tmp_path):
    count = 0
    for path in sorted((corpus / "files").glob("*.p*t*")):
        output = tmp_path / f"{path.name}.safetensors"
        try:
            convert_checkpoint(path, output, keys="keep", fsync=False)
            found = diff_checkpoints(path, output)
        except CheckpointError:
            # several state dicts, or objects that are refused: not the business of this test
            continue
        assert not (found.values or found.dtypes or found.shapes or found.only_b), path.name
        count += found.tensors > 0
    assert count >= 8


def test_devices_are_told_and_counted_only_when_asked(tmp_path):
    convert_checkpoint(DDP, tmp_path / "cpu.pt", keys="keep", fsync=False)
    found = diff_checkpoints(DDP, tmp_path / "cpu.pt")
    assert found.same and {(item.a, item.b) for item in found.locations} == {("cuda:3", "cpu")}
    assert not diff_checkpoints(DDP, tmp_path / "cpu.pt", strict_device=True).same


def test_dtypes_may_be_ignored(tmp_path):
    values = torch.tensor([1.0, 1.001, -2.5])
    first = saved(tmp_path, "a.pt", {"w": values, "n": torch.tensor([NAN])})
    second = saved(tmp_path, "b.pt", {"w": values.bfloat16(), "n": torch.tensor([NAN]).bfloat16()})
    found = diff_checkpoints(first, second)
    assert [item.key for item in found.dtypes] == ["w", "n"] and found.nbytes == 0
    (change,) = diff_checkpoints(first, second, ignore_dtype=True).values
    assert change.key == "w" and change.deviation.where == (1,)
    assert (
        change.deviation.max_abs
        == (values[1].double() - values[1].bfloat16().double()).abs().item()
    )
    assert diff_checkpoints(
        first, second, ignore_dtype=True, tolerance=Tolerance(rtol=0.01, equal_nan=True)
    ).same


def test_the_whole_of_two_files_is_compared_by_path(tmp_path):
    tree = {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}},
        "epoch": 3,
        "lr": [0.1, NAN],
    }
    first = saved(tmp_path, "a.pt", tree)
    assert diff_checkpoints(first, first, whole=True).same
    tree["optimizer"]["state"][0]["exp_avg"] = torch.tensor([1.0, 2.0])
    second = saved(tmp_path, "b.pt", {**tree, "epoch": 4, "lr": [0.1, -0.0], "more": None})
    assert diff_checkpoints(first, second, only="model").same
    found = diff_checkpoints(first, second, whole=True)
    assert [item.key for item in found.values] == ["optimizer.state.0.exp_avg"]
    assert [(item.key, item.a, item.b) for item in found.others] == [
        ("epoch", "3", "4"),
        ("lr.1", "nan", "-0.0"),
    ]
    assert (found.only_a, found.only_b) == ((), ("more",))


def test_the_class_of_a_mapping_and_the_sharing_of_storages_do_not_count(tmp_path):
    tied = torch.rand(4, 4)
    first = saved(tmp_path, "a.pt", OrderedDict(a=tied, b=tied, c=tied.t()))
    second = saved(
        tmp_path,
        "b.pt",
        {"c": tied.t().clone(), "b": tied.clone(), "a": torch.nn.Parameter(tied.clone())},
    )
    assert diff_checkpoints(first, second, whole=True).same and diff_checkpoints(first, second).same


def test_a_cyclic_tree_is_compared(tmp_path):
    tree: dict[str, Any] = {"w": torch.ones(1)}
    tree["self"] = tree
    path = saved(tmp_path, "a.pt", tree)
    assert diff_checkpoints(path, path, whole=True).same


def test_encoded_tensors_are_compared_by_their_components(tmp_path):
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    first = saved(
        tmp_path,
        "a.pt",
        {"s": dense.to_sparse(), "c": torch.tensor([1 + 2j], dtype=torch.complex128)},
    )
    convert_checkpoint(first, tmp_path / "a.safetensors", fsync=False)
    assert diff_checkpoints(first, tmp_path / "a.safetensors").same
    second = saved(
        tmp_path,
        "b.pt",
        {"s": (2 * dense).to_sparse(), "c": torch.tensor([1 + 2j], dtype=torch.complex128)},
    )
    assert [item.key for item in diff_checkpoints(first, second).values] == ["s.values"]


def test_arrays_and_numbers_of_numpy_are_tensors_beside_tensors(tmp_path):
    first = saved(tmp_path, "a.pt", {"w": torch.ones(2), "a": np.arange(3.0), "n": np.float32(0.5)})
    second = saved(
        tmp_path,
        "b.pt",
        {"w": torch.ones(2), "a": torch.arange(3.0).double(), "n": torch.tensor(0.5)},
    )
    assert diff_checkpoints(first, second).same
    third = saved(
        tmp_path, "c.pt", {"w": torch.ones(2), "a": np.arange(3.0) + 1, "n": np.float32(0.25)}
    )
    found = diff_checkpoints(first, third)
    assert [item.key for item in found.values] == ["a"]
    assert [item.key for item in found.others] == ["n"]


@pytest.mark.parametrize("numel", [1, 1023, 1 << 18, (1 << 18) + 1, 9_000_001])
@pytest.mark.parametrize("at", ["first", "last"])
def test_one_bit_is_found_wherever_it_is(numel, at, tmp_path):
    tensor = torch.arange(numel, dtype=torch.float32)
    first = saved(tmp_path, "a.pt", {"pad": torch.zeros(3), "w": tensor})
    place = 0 if at == "first" else numel - 1
    tensor.view(torch.int32)[place] ^= 1
    second = tmp_path / "b.safetensors"
    save_file({"pad": torch.zeros(3), "w": tensor}, second)
    (change,) = diff_checkpoints(first, second).values
    assert change.key == "w" and change.deviation.count == 1 and change.deviation.where == (place,)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_types_without_numbers_are_compared_by_bits(tmp_path):
    values = {"a": torch.tensor([0.1, 0.9]), "b": torch.tensor([1.1, 1.9])}
    made = {
        key: torch.quantize_per_tensor(value, 0.1, 0, torch.quint8) for key, value in values.items()
    }
    first, second = (
        saved(tmp_path, f"{key}.pt", {"q": value, "w": torch.ones(1)})
        for key, value in made.items()
    )
    assert diff_checkpoints(first, first).same
    assert [item.key for item in diff_checkpoints(first, second).values] == ["q.integers"]


# ------------------------------------------------------------------------------------------- damage


def damaged(path: Path, record: str, at: int = -1) -> Path:
    """A copy of a torch file with one bit of a record turned, beside it."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(record))
        content = archive.read(name)
    raw = bytearray(path.read_bytes())
    raw[raw.index(content) + at % len(content)] ^= 1
    other = path.with_name(f"damaged_{path.name}")
    other.write_bytes(raw)
    with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"), zipfile.ZipFile(other) as archive:
        archive.read(name)
    return other


def shapes_of_storages() -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    whole = torch.randn(300_000)
    return {
        "small": {"a": torch.randn(5), "w": torch.randn(7)},
        "large": {"a": torch.randn(5), "w": torch.randn(3_000_000)},
        "cut into views": {"a": torch.randn(5), "w": whole[:100_000], "x": whole[100_000:200_000]},
        "gathered": {"a": torch.randn(5), "w": torch.randn(500, 400).t()},
        "tied": {"a": torch.randn(5), "w": whole, "x": whole},
    }


@pytest.mark.parametrize(
    ("kind", "tolerance"), crossed(shapes_of_storages(), [None, Tolerance(atol=100.0)]), ids=str
)
def test_a_record_with_a_wrong_checksum_is_told_once_on_either_side(kind, tolerance, tmp_path):
    tree = shapes_of_storages()[kind]
    good = saved(tmp_path, "good.pt", tree)
    bad = damaged(good, "data/1")
    save_file(
        {key: value.contiguous().clone() for key, value in torch.load(bad).items()},
        tmp_path / "same.safetensors",
    )
    for a, b in (
        (good, bad),
        (bad, good),
        (bad, bad),
        (bad, tmp_path / "same.safetensors"),
        (tmp_path / "same.safetensors", bad),
    ):
        found = diff_checkpoints(a, b, tolerance=tolerance)
        (told,) = found.damaged
        assert told.startswith(f"{bad}: ") and "data/1: its bytes have the CRC-32" in told
        assert not found.same
    assert diff_checkpoints(good, good, tolerance=tolerance).same


def test_what_is_not_compared_is_not_held_against_its_checksum(tmp_path):
    good = saved(
        tmp_path,
        "good.pt",
        {"model": {"w": torch.randn(9)}, "optimizer": {"state": {0: torch.randn(9)}}},
    )
    bad = damaged(good, "data/1")
    assert diff_checkpoints(good, bad, only="model").same
    assert diff_checkpoints(good, bad, whole=True).damaged


def test_a_record_that_the_index_names_otherwise_is_an_error_though_it_is_not_compared(tmp_path):
    good = saved(tmp_path, "good.pt", {"w": torch.ones(3)})
    bad = saved(tmp_path, "bad.pt", {f"{at}": torch.ones(at) for at in range(20)})
    with zipfile.ZipFile(bad) as archive:
        [record] = (item for item in archive.infolist() if item.filename.endswith("data/19"))
    raw = bytearray(bad.read_bytes())
    raw[record.header_offset + 30] ^= 1  # of the name in its local header
    bad.write_bytes(raw)
    for pair in ((good, bad), (bad, good)):
        with pytest.raises(MalformedCheckpoint, match="data/19"):
            diff_checkpoints(*pair)


# -------------------------------------------------------------------------------------- the program


def test_the_program_answers_by_its_exit_code(tmp_path):
    one = saved(tmp_path, "one.pt", {"w": torch.ones(3)})
    two = saved(tmp_path, "two.pt", {"w": torch.tensor([1.0, 1.5, 1.0])})
    assert run("diff", one, one, cwd=tmp_path).exit == 0
    done = run("diff", one, two, cwd=tmp_path)
    assert done.exit == 1
    head, line = (text.split("  ") for text in done.out.splitlines()[1:])
    shown = dict(zip(filter(None, map(str.strip, head)), filter(None, line), strict=True))
    assert {name: text.strip() for name, text in shown.items()} == {
        "key": "w", "differs": "1 of 3", "rel L2": "0.2425", "cosine": "0.9802",
        "max abs": "0.5", "max rel": "0.3333", "at": "[1]", "A": "1.0", "B": "1.5",
    }  # fmt: skip
    assert run("diff", one, two, "--atol", "0.5", cwd=tmp_path).exit == 0
    assert run("diff", one, two, "--quiet", cwd=tmp_path).out == ""
    assert_one_error(run("diff", one, "none.pt", cwd=tmp_path), code=2)
    assert_one_error(run("diff", one, two, "--equal-nan", cwd=tmp_path), code=2)
    assert_one_error(run("diff", one, two, "--whole", "--keys", "strip", cwd=tmp_path), code=2)
    assert_one_error(run("diff", one, cwd=tmp_path), code=2)
    done = run("diff", one, damaged(one, "data/0"), "--json", cwd=tmp_path)
    assert done.exit == 2
    assert "CRC-32" in done.json()["damaged"][0] and done.json()["same"] is False


@pytest.mark.parametrize(("away", "told"), [(1e-5, "0.99999999995"), (2e-8, "0.9999999999999998")])
def test_a_cosine_has_the_digits_that_tell_it_from_1(away, told, tmp_path):
    """That of (1, 0) and (1, x) is 1 - x²/2, for a small x."""
    sides = [torch.tensor([1.0, x], dtype=torch.float64) for x in (0.0, away)]
    paths = [saved(tmp_path, f"{at}.pt", {"w": side}) for at, side in enumerate(sides)]
    assert f"  {told}  " in run("diff", *paths, cwd=tmp_path).out


@pytest.mark.parametrize("swapped", [False, True])
def test_a_step_of_a_folder_is_compared_with_what_was_made_of_it(swapped, produced, tmp_path):
    tags = sorted(path.name for path in (produced / "ds_z2").iterdir() if path.is_dir())
    assert (
        run("convert", produced / "ds_z2", "out.safetensors", "--tag", tags[0], cwd=tmp_path).exit
        == 0
    )
    sides = (
        ("out.safetensors", produced / "ds_z2", "--tag-b")
        if swapped
        else (produced / "ds_z2", "out.safetensors", "--tag")
    )
    assert run("diff", *sides, tags[0], cwd=tmp_path).exit == 0
    assert "there is no step 'global_step999' here" in assert_one_error(
        run("diff", *sides, "global_step999", cwd=tmp_path), code=2
    )


def test_the_document_says_what_differs(tmp_path):
    one = saved(tmp_path, "one.pt", {"w": torch.tensor([1.0, INF]), "a": torch.ones(1)})
    two = saved(tmp_path, "two.pt", {"w": torch.tensor([1.0, -INF]), "b": torch.ones(1)})
    document = run_process("diff", one, two, "--json", cwd=tmp_path).json()
    assert document["same"] is False
    assert (document["only_a"], document["only_b"]) == (["a"], ["b"])
    values = {
        "differing": 1,
        "of": 2,
        "with_nan": 0,
        "max_abs": "inf",
        "max_rel": "inf",
        "where": [1],
        "a": "inf",
        "b": "-inf",
    }
    finite = {"rel_l2": 0.0, "cosine": 1.0, "nonfinite": 1}
    assert document["values"] == [{"key": "w", **values, **finite}]


def test_whole_numbers_are_exact_in_the_document(tmp_path):
    """2**53 + 1 is not a double, and so it would be another number as one."""
    most = 2**53
    one = saved(tmp_path, "one.pt", {"w": torch.tensor([1, most + 1])})
    two = saved(tmp_path, "two.pt", {"w": torch.tensor([1, -most - 1])})
    [found] = run("diff", one, two, "--json", cwd=tmp_path).json()["values"]
    assert (found["a"], found["b"]) == (most + 1, -most - 1)


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
WIDE = [*FLOATS, *FLOAT8, torch.complex64, torch.complex128]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", some(8, [*WIDE, *WHOLE]), ids=str)
def test_every_dtype_is_measured_as_torch_measures_it(dtype, tmp_path):
    """Longer than the runs in which values are read, with a few that are NaN and infinite where
    there are such.
    """
    torch.manual_seed(3)
    count = (1 << 17) + 1001
    if dtype in WHOLE:
        first, second = (
            torch.randint(0, 2 if dtype is torch.bool else 100, (count,)).to(dtype)
            for _ in range(2)
        )
    else:
        source = torch.complex128 if dtype.is_complex else torch.float64
        first, second = (torch.randn(count, dtype=source).to(dtype) for _ in range(2))
    if dtype in FLOATS:
        first[7], second[8], first[9], second[9] = NAN, INF, -INF, -INF
    (item,) = diff_checkpoints(
        saved(tmp_path, "a.pt", {"w": first}), saved(tmp_path, "b.pt", {"w": second})
    ).values
    wide = torch.complex128 if dtype.is_complex else torch.float64
    ours, theirs = first.to(wide), second.to(wide)
    finite = torch.isfinite(
        torch.view_as_real(ours).sum(1) if dtype.is_complex else ours
    ) & torch.isfinite(theirs.abs())
    ours, theirs = ours[finite], theirs[finite]
    found = item.deviation
    assert found.nonfinite == (3 if dtype in FLOATS else 0)
    assert found.rel_l2 == pytest.approx(((ours - theirs).norm() / theirs.norm()).item(), rel=1e-12)
    inner = torch.vdot(ours, theirs).real if dtype.is_complex else torch.dot(ours, theirs)
    assert found.cosine == pytest.approx((inner / (ours.norm() * theirs.norm())).item(), rel=1e-10)


@pytest.mark.parametrize(
    "values",
    [
        ([1e300, -1e300], [1e300, 1e300]),
        ([1.7e308, 1.0], [-1.7e308, 1.0]),
        ([1e-300, 2e-300], [1e-300, 3e-300]),
        ([5e-324, 1e308], [1e-323, 1e308]),
        ([1e-320, 0.0], [2e-320, 0.0]),
        ([1.0, 1.0], [1.0, 1.0 + 2**-52]),
    ],
)
def test_squares_of_huge_and_tiny_values_are_neither_infinite_nor_nothing(values, tmp_path):
    first, second = (torch.tensor(side, dtype=torch.float64) for side in values)
    (item,) = diff_checkpoints(
        saved(tmp_path, "a.pt", {"w": first}), saved(tmp_path, "b.pt", {"w": second})
    ).values
    ours, theirs = ([Fraction(value) for value in side] for side in values)
    apart = sum((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))
    assert item.deviation.rel_l2 == pytest.approx(
        root_of(Fraction(apart, 1) / sum(b * b for b in theirs)), rel=1e-12, abs=0
    )
    inner = sum(a * b for a, b in zip(ours, theirs, strict=True))
    square = Fraction(inner * inner) / (sum(a * a for a in ours) * sum(b * b for b in theirs))
    assert item.deviation.cosine == pytest.approx(
        math.copysign(root_of(square), 1 if inner > 0 else -1), rel=1e-12
    )


def root_of(square: Fraction) -> float:
    """The square root of a number that may be beyond any float."""
    shift = (square.denominator.bit_length() - square.numerator.bit_length()) // 2
    return math.ldexp(math.sqrt(square * Fraction(4) ** shift), -shift)


def test_what_is_the_same_in_both_is_measured_too(tmp_path):
    """Most runs of a long tensor hold no difference, and some of those are not finite or of tiny
    values.
    """
    torch.manual_seed(4)
    first = torch.randn(1_000_003, dtype=torch.float64)
    first[300_000], first[400_000:600_000] = NAN, 1e-250
    second = first.clone()
    second[-1] += 0.5
    (item,) = diff_checkpoints(
        saved(tmp_path, "a.pt", {"w": first}), saved(tmp_path, "b.pt", {"w": second})
    ).values
    finite = torch.isfinite(first)
    ours, theirs = first[finite], second[finite]
    assert item.deviation.nonfinite == 1
    assert item.deviation.rel_l2 == pytest.approx(
        ((ours - theirs).norm() / theirs.norm()).item(), rel=1e-12
    )
    assert item.deviation.cosine == pytest.approx(
        (torch.dot(ours, theirs) / (ours.norm() * theirs.norm())).item(), rel=1e-12
    )


def test_large_integers_are_subtracted_before_they_are_rounded(tmp_path):
    first, second = torch.tensor([1 << 62, -(1 << 62)]), torch.tensor([(1 << 62) + 1, 1 << 62])
    (item,) = diff_checkpoints(
        saved(tmp_path, "a.pt", {"w": first[:1]}), saved(tmp_path, "b.pt", {"w": second[:1]})
    ).values
    assert item.deviation.rel_l2 == pytest.approx(2.0**-62, rel=1e-12)
    (item,) = diff_checkpoints(
        saved(tmp_path, "a.pt", {"w": first[1:]}), saved(tmp_path, "b.pt", {"w": second[1:]})
    ).values
    assert (item.deviation.rel_l2, item.deviation.cosine) == (2.0, -1.0)


def test_the_worst_comes_first_in_text_and_json(tmp_path):
    ones = torch.ones(100)
    first = {"slight": ones, "same": ones, "far": ones, "broken": ones, "zeros": torch.zeros(2)}
    second = {
        "slight": ones + 1e-6,
        "same": ones,
        "far": -ones,
        "broken": torch.cat([ones[2:], torch.tensor([2.0, NAN])]),
        "zeros": torch.tensor([0.0, -0.0]),
    }
    saved(tmp_path, "a.pt", first), saved(tmp_path, "b.pt", second)
    shown = run("diff", "a.pt", "b.pt", cwd=tmp_path).out
    lines = [line.split() for line in shown.splitlines() if " of " in line][1:]
    named = [key for key, *_ in lines]
    assert named == ["broken", "far", "slight", "zeros"]
    assert lines[1][4:6] == ["2", "-1.0000"] and ", by bits only " in shown
    assert "note  rel L2 and cosine leave out NaN and infinity (1 value)" in shown
    values = run("diff", "a.pt", "b.pt", "--json", cwd=tmp_path).json()["values"]
    assert [item["key"] for item in values] == named
    assert values[1]["rel_l2"] == 2.0 and values[1]["cosine"] == -1.0
    assert values[0]["nonfinite"] == 1 and values[3]["cosine"] is None


@pytest.mark.trust
def test_memory_does_not_grow_with_the_values_that_differ(tmp_path):
    size = 80 << 20
    saved(tmp_path, "a.pt", {"w": torch.zeros(size // 2, dtype=torch.bfloat16)})
    saved(tmp_path, "b.pt", {"w": torch.ones(size // 2, dtype=torch.bfloat16)})
    done = run_process("diff", "a.pt", "b.pt", cwd=tmp_path)
    assert done.exit == 1 and "41,943,040 of 41,943,040       1 " in done.out  # its relative L2
    assert done.rss < idle_rss() + (60 << 20) < idle_rss() + size


@pytest.mark.trust
def test_memory_does_not_grow_with_the_files(tmp_path):
    tensor = torch.zeros(30_000_000)
    one = saved(tmp_path, "one.pt", {"w": tensor, "t": tensor[:9_000_000].reshape(3000, 3000).t()})
    tensor[-1] = 1
    two = saved(
        tmp_path,
        "two.pt",
        {"w": tensor, "t": tensor[:9_000_000].reshape(3000, 3000).t().contiguous()},
    )
    done = run_process("diff", one, two, "--json", cwd=tmp_path)
    assert done.exit == 1 and [item["key"] for item in done.json()["values"]] == ["w"]
    assert done.rss - idle_rss() < 70_000_000


def test_a_big_endian_storage_in_an_object_is_compared_by_its_values(tmp_path):
    hostile = pytest.importorskip("hostile.cases").bad
    pickled = hostile.GOOD.replace(b"torch._utils\n", b"torch._other\n")
    (tmp_path / "in.pt").write_bytes(
        hostile.ckpt(pickled, {"0": struct.pack(">4f", 1, 2, 3, 4)}, byteorder=b"big")
    )
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", unknown="keep")
    found = diff_checkpoints(tmp_path / "in.pt", tmp_path / "out.pt", whole=True)
    assert found.same and found.tensors == 1
