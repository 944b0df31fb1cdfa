"""numpy arrays and numbers in checkpoints: tensors of the same values, type and shape, as
`torch.from_numpy` makes them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckptconv import CheckpointError, convert_checkpoint, load_portable, open_checkpoint
from ckptconv.support.errors import AmbiguousStateDict, RefusedObject
from helpers import oracle
from helpers.examples import examples

KINDS = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def saved(tree: Any, folder: Path, protocol: int = 2) -> Path:
    torch.save(tree, folder / "source.pt", pickle_protocol=protocol)
    return folder / "source.pt"


def native(array: np.ndarray) -> torch.Tensor:
    """What torch makes of an array: it takes the byte order of this machine only."""
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="K"))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of all types, orders and byte orders: C, Fortran, transposed, strided, reversed."""
    shape, kind = draw(SHAPES), draw(st.sampled_from(KINDS))
    raw = draw(st.binary(min_size=16, max_size=16))
    dtype = np.dtype(draw(st.sampled_from("<>")) + kind)
    values = np.frombuffer(raw * (1 + int(np.prod(shape)) * dtype.itemsize // 16), np.uint8)
    values = values & 1 if kind == "b1" else values
    made = values[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
    orders = [
        np.ascontiguousarray,
        np.asfortranarray,
        np.transpose,
        lambda array: array[::-1] if array.ndim else array,
    ]
    return draw(st.sampled_from(orders))(made)


@given(st.lists(arrays(), min_size=1, max_size=3), st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=examples(150))
def test_arrays_become_the_tensors_that_torch_makes_of_them(made, protocol):
    tree = {"w": torch.ones(2), **{f"array{number}": array for number, array in enumerate(made)}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = saved(tree, folder, protocol)
        convert_checkpoint(source, folder / "out.pt", fsync=False, verify=True)
        convert_checkpoint(source, folder / "out.safetensors", fsync=False, verify=True)
        loaded = [
            oracle.load(folder / "out.pt"),
            load_portable(source),
            load_portable(folder / "out.safetensors"),
        ]
    for found in loaded:
        assert set(found) == set(tree)
        for number, array in enumerate(made):
            expected = native(array)
            assert (
                found[f"array{number}"].dtype == expected.dtype
                and found[f"array{number}"].shape == expected.shape
            )
            assert oracle.value_bytes(found[f"array{number}"]) == oracle.value_bytes(expected)


class Forged:
    """Pickled as an array of numpy whose bytes are more or fewer than its shape needs."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __reduce__(self) -> Any:
        made = np.zeros(6, np.float32).__reduce__()
        return *made[:2], (1, (2, 3), np.dtype("f4"), False, bytes(self.nbytes))


@pytest.mark.parametrize(("nbytes", "is_whole"), [(24, True), (20, False), (28, False), (0, False)])
def test_an_array_whose_bytes_are_not_those_of_its_shape_is_no_tensor(nbytes, is_whole, tmp_path):
    source = saved({"w": torch.ones(1), "a": Forged(nbytes)}, tmp_path)
    if is_whole:
        assert torch.equal(load_portable(source)["a"], torch.zeros(2, 3))
        return
    with pytest.raises(ValueError, match=r"size|buffer|number"):
        torch.load(source, weights_only=False)
    with pytest.raises(RefusedObject, match="a: numpy array of float32"):
        load_portable(source)


def test_the_summary_tells_which_arrays_and_numbers_were_rewritten(tmp_path):
    source = saved({"w": torch.ones(1), "a": np.ones(2), "n": np.float32(3), "note": "x"}, tmp_path)
    for output in ("out.pt", "out.safetensors"):
        plan = convert_checkpoint(source, tmp_path / output, fsync=False).plan
        assert {item.path: item.name for item in plan.rewritten} == {
            "a": "numpy array of float64", "n": "numpy._core.multiarray.scalar"}  # fmt: skip
    assert [item.path for item in plan.skipped] == ["note"]


NUMBERS = [
    np.float64(0.1),
    np.float16(2.5),
    np.int8(-3),
    np.bool_(True),
    np.uint64(2**63),
    np.complex64(1j),
]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_a_number_stays_one_in_a_torch_file_and_is_a_tensor_in_safetensors(number, tmp_path):
    source = saved({"w": torch.ones(1), "n": number}, tmp_path)
    convert_checkpoint(source, tmp_path / "out.safetensors", fsync=False, verify=True)
    expected = torch.from_numpy(np.asarray(number))
    for found in (load_file(tmp_path / "out.safetensors")["n"], load_portable(source)["n"]):
        assert found.dtype == expected.dtype and found.shape == () and torch.equal(found, expected)
    convert_checkpoint(source, tmp_path / "out.pt", fsync=False)
    found = oracle.load(tmp_path / "out.pt")["n"]
    assert found == number.item() and type(found) is type(number.item())


def test_one_array_under_two_names_is_one_tensor(tmp_path):
    array = np.arange(1000.0)
    source = saved({"w": torch.ones(1), "a": array, "b": array}, tmp_path)
    plan = convert_checkpoint(source, tmp_path / "out.safetensors", fsync=False, verify=True).plan
    assert plan.tied == {"b": "a"}
    convert_checkpoint(source, tmp_path / "out.pt", fsync=False, verify=True)
    found = oracle.load(tmp_path / "out.pt")
    assert found["a"] is found["b"]


def test_arrays_of_a_state_dict_are_cast_like_its_tensors(tmp_path):
    tree = {
        "w": torch.ones(2),
        "a": np.asfortranarray(np.random.default_rng(0).normal(size=(3, 4))),
    }
    source = saved({"state_dict": tree, "mean": np.ones(3)}, tmp_path)
    convert_checkpoint(source, tmp_path / "out.pt", dtype="bf16", fsync=False, verify=True)
    found = oracle.load(tmp_path / "out.pt")
    assert torch.equal(found["state_dict"]["a"], torch.from_numpy(tree["a"]).to(torch.bfloat16))
    assert found["mean"].dtype is torch.float64
    with pytest.raises(CheckpointError, match="would leave out 1 other tensor: mean"):
        convert_checkpoint(source, tmp_path / "out.safetensors")
    convert_checkpoint(
        source,
        tmp_path / "out.safetensors",
        dtype="bf16",
        only="state_dict",
        fsync=False,
        verify=True,
    )
    assert torch.equal(
        load_file(tmp_path / "out.safetensors")["a"], torch.from_numpy(tree["a"]).to(torch.bfloat16)
    )


def test_a_dict_of_arrays_is_a_state_dict(tmp_path):
    tree = {"fc.weight": np.eye(2, dtype="f4"), "fc.bias": np.zeros(2, dtype="f4")}
    source = saved(tree, tmp_path)
    assert {key: value.tolist() for key, value in load_portable(source).items()} == {
        k: v.tolist() for k, v in tree.items()
    }
    convert_checkpoint(source, tmp_path / "out.safetensors", fsync=False, verify=True)
    assert set(load_file(tmp_path / "out.safetensors")) == set(tree)


def test_arrays_elsewhere_do_not_hide_the_state_dict(tmp_path):
    weights = {"fc.weight": torch.ones(2, 2)}
    for tree in (
        {"net": weights, "metrics": {"mean": np.ones(1)}},
        {**weights, "metrics": {"mean": np.ones(1)}},
    ):
        with open_checkpoint(saved(tree, tmp_path)) as checkpoint:
            assert dict(checkpoint.state_dict().tensors()).keys() == weights.keys()


def test_an_array_that_scales_what_the_model_sees_asks(tmp_path):
    tree = {"net": {"fc.weight": torch.ones(2, 2)}, "scaler": {"mean": np.ones(1)}}
    with (
        open_checkpoint(saved(tree, tmp_path)) as checkpoint,
        pytest.raises(AmbiguousStateDict, match=r"leave out 1 other tensor: scaler\.mean"),
    ):
        checkpoint.state_dict()


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.array(["a", None], dtype=object), "numpy array of O8"),
        (np.array(["text"]), "numpy array of U4"),
        (np.array(["2020-01-01"], dtype="M8[D]"), "numpy array of M8"),
        (np.zeros(2, dtype=[("x", "f4"), ("y", "i8")]), "numpy array of V12"),
        (np.zeros(2, dtype=np.longdouble), "numpy array of f16"),
    ],
    ids=["object", "text", "date", "structure", "long double"],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_an_array_that_no_tensor_can_hold_is_refused_with_its_place(
    array, told, protocol, tmp_path
):
    source = saved({"w": torch.ones(1), "stats": {"odd": array}}, tmp_path, protocol)
    with pytest.raises(RefusedObject, match=rf"stats\.odd: {told}"):
        convert_checkpoint(source, tmp_path / "out.pt")
    convert_checkpoint(source, tmp_path / "out.pt", unknown="drop", fsync=False)
    assert oracle.load(tmp_path / "out.pt")["stats"]["odd"] is None


class Called:
    """Pickles as a call of a function, and perhaps the state of what it makes."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


F4, EMPTY = np.dtype("f4"), (np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"))
BUFFER = np._core.numeric._frombuffer


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Called(*EMPTY), "numpy array"),
        (Called(*EMPTY, (1, (1,), F4, False)), "numpy array of float32"),
        (Called(*EMPTY, (1, (-1, -1), F4, False, bytes(4))), "numpy array of float32"),
        (Called(*EMPTY, (1, [1], F4, False, bytes(4))), "numpy array of float32"),
        (Called(*EMPTY, (1, (1,), "f4", False, bytes(4))), "numpy array"),
        (Called(BUFFER, (bytes(4), F4, (1,))), "numpy array of float32"),
        (Called(BUFFER, (bytes(4), F4, (1,), "A")), "numpy array of float32"),
        (Called(BUFFER, (bytes(4), F4, (1,), "C"), {"x": 1}), "numpy array of float32"),
        (Called(EMPTY[0], (np.matrix, (0,), b"b"), (1, (1,), F4, False, bytes(4))), "numpy array"),
    ],
)
def test_what_does_not_say_all_of_an_array_is_refused(value, told, tmp_path):
    source = saved({"w": torch.ones(1), "odd": value}, tmp_path)
    with pytest.raises(RefusedObject, match=f"odd: {told}"):
        load_portable(source)


def test_unknown_keep_keeps_the_array(tmp_path):
    array = np.asfortranarray(np.arange(6, dtype="i4").reshape(2, 3))
    source = saved({"w": torch.ones(1), "a": array}, tmp_path)
    convert_checkpoint(source, tmp_path / "out.pt", unknown="keep", fsync=False, verify=True)
    found = oracle.load(tmp_path / "out.pt", weights_only=False)["a"]
    assert (
        type(found) is np.ndarray
        and found.dtype == array.dtype
        and found.flags.f_contiguous
        and (found == array).all()
    )


class Elsewhere:
    """Pickles as a tensor of a device that torch copies from numpy or from the CPU."""

    def __init__(self, function: str, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr(torch._utils, self.function), self.args


@pytest.mark.parametrize(
    ("function", "values", "dtype"),
    [
        (
            "_rebuild_device_tensor_from_numpy",
            np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            torch.float64,
        ),
        ("_rebuild_device_tensor_from_numpy", np.arange(3, dtype="f4") / 3, torch.bfloat16),
        ("_rebuild_device_tensor_from_cpu_tensor", torch.arange(6).reshape(2, 3).t(), torch.int64),
    ],
)
def test_a_tensor_of_a_device_that_pickles_a_copy_is_that_tensor(function, values, dtype, tmp_path):
    source = saved({"w": Elsewhere(function, values, dtype, "cpu", False)}, tmp_path)
    expected = oracle.load(source, weights_only=False)["w"]
    assert expected.dtype is dtype
    saved({"w": Elsewhere(function, values, dtype, "xla:0", dtype.is_floating_point)}, tmp_path)
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.state_dict().keys == ("w",)
    plan = convert_checkpoint(source, tmp_path / "out.pt", fsync=False, verify=True).plan
    assert dict(plan.locations) == {("xla:0", "cpu"): 1}
    convert_checkpoint(source, tmp_path / "out.safetensors", fsync=False, verify=True)
    found = oracle.load(tmp_path / "out.pt")["w"]
    assert found.requires_grad is dtype.is_floating_point
    for tensor in (
        found.detach(),
        load_file(tmp_path / "out.safetensors")["w"],
        load_portable(source)["w"].detach(),
    ):
        assert tensor.dtype is dtype and torch.equal(tensor, expected)


@pytest.mark.parametrize(
    "args",
    [
        (torch.arange(3.0), torch.float64, "cpu", False),  # of a file: it is not read for a cast
        (torch.arange(3), torch.float32, "cpu", False),
        (np.arange(3), torch.float32, "cpu", False),
        ([1.0], torch.float32, "cpu", False),
        (torch.arange(3.0), int, "cpu", False),
        (torch.arange(3.0), torch.float32, 5, False),
    ],
    ids=["widened", "integers", "integers of numpy", "a list", "int", "a device that is a number"],
)
def test_a_copy_of_other_values_than_are_there_is_refused(args, tmp_path):
    name = "_rebuild_device_tensor_from_cpu_tensor"
    source = saved({"w": torch.ones(1), "odd": Elsewhere(name, *args)}, tmp_path)
    with pytest.raises(RefusedObject, match=f"odd: .*{name}"):
        load_portable(source)
