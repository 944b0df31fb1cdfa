"""numpy archives as outputs: `numpy.load` reads what was written, without unpickling anything."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch

from ckptconv import (
    CheckpointError,
    RefusedObject,
    VerificationFailed,
    convert_checkpoint,
    open_checkpoint,
    plan_conversion,
    save_portable,
)
from ckptconv.convert.report import plan_lines
from ckptconv.formats.npz import NPZ
from helpers.program import run

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
    torch.complex128,
]  # fmt: skip


def saved(tmp_path, state, name="in.pt"):
    torch.save(state, tmp_path / name)
    return tmp_path / name


def test_numpy_reads_every_type_and_shape_back(tmp_path):
    state = {
        str(dtype).partition(".")[2]: (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
        for dtype in TYPES
    }
    state |= {
        "transposed/x": torch.eye(3, 4).t(),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(2),
    }
    result = convert_checkpoint(saved(tmp_path, state), tmp_path / "out.npz", verify=True)
    assert result.verified == len(state) and result.plan.to == "npz"
    with np.load(tmp_path / "out.npz", allow_pickle=False) as read:
        assert read.files == list(state)
        for key, tensor in state.items():
            assert read[key].dtype == tensor.numpy().dtype, key
            assert read[key].shape == tensor.shape and np.array_equal(read[key], tensor), key
    assert zipfile.ZipFile(tmp_path / "out.npz").testzip() is None


def test_the_values_lie_aligned_as_numpy_wants_them(tmp_path):
    convert_checkpoint(
        saved(tmp_path, {"w": torch.rand(7), "v": torch.rand(9)}), tmp_path / "out.npz"
    )
    with open_checkpoint(tmp_path / "out.npz") as opened:
        assert [ref.storage.offset % 64 for _, ref in opened.tensors()] == [0, 0]


def test_casts_wrappers_and_what_is_not_a_tensor_are_as_in_any_flat_output(tmp_path):
    state = {"module.w": torch.rand(3).bfloat16(), "module.n": torch.tensor(1)}
    source = saved(tmp_path, {"model": state, "epoch": 3})
    with pytest.raises(RefusedObject) as caught:
        convert_checkpoint(source, tmp_path / "out.npz")
    assert caught.value.what == "numpy has no dtype bfloat16" and "--dtype f32" in caught.value.hint
    result = convert_checkpoint(source, tmp_path / "out.npz", dtype="f32", verify=True)
    assert [item.reason for item in result.plan.skipped] == [
        "not part of the state dict; a numpy archive holds named tensors only"
    ]
    with np.load(tmp_path / "out.npz") as read:
        assert np.array_equal(read["w"], state["module.w"].float())


@pytest.mark.parametrize("key", ["../w", "/w", "a\\b", "a\nb", "a/../../b"])
def test_keys_that_are_no_names_in_an_archive_are_refused(key, tmp_path):
    with pytest.raises(RefusedObject, match="cannot be the name of a member"):
        convert_checkpoint(saved(tmp_path, {key: torch.ones(1)}), tmp_path / "out.npz")


def test_keys_that_differ_only_in_case_are_refused(tmp_path):
    with pytest.raises(RefusedObject, match="differs only in case from w"):
        convert_checkpoint(
            saved(tmp_path, {"w": torch.ones(1), "W": torch.ones(1)}), tmp_path / "out.npz"
        )


@pytest.mark.parametrize("keys", [("a", "a.npy"), ("a.npy", "a"), ("b", "a.npy.npy", "a.npy")])
def test_a_key_under_which_numpy_would_read_another_array_is_refused(keys, tmp_path):
    np.savez(tmp_path / "np.npz", **{key: np.array([n]) for n, key in enumerate(keys)})
    with np.load(tmp_path / "np.npz") as read:  # one value is lost to numpy's own reader
        assert len({int(read[key][0]) for key in keys}) < len(keys)
    source = saved(tmp_path, {key: torch.tensor([n]) for n, key in enumerate(keys)})
    with pytest.raises(RefusedObject, match=r"numpy would read a(\.npy)? under its key"):
        convert_checkpoint(source, tmp_path / "out.npz")
    with pytest.raises(VerificationFailed, match=f"sees {len(keys) - 1} arrays"):
        NPZ.check_written(tmp_path / "np.npz", tmp_path / "np.npz", len(keys))


def test_a_key_that_ends_as_members_do_is_one_where_it_is_alone(tmp_path):
    convert_checkpoint(saved(tmp_path, {"a.npy": torch.ones(2)}), tmp_path / "out.npz", verify=True)
    with np.load(tmp_path / "out.npz") as read:
        assert read.files == ["a.npy"] and read["a.npy"].tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(1,) * 64, (2**28, 0), (0,) * 9, ()])
def test_numpy_reads_odd_shapes_back(shape, tmp_path):
    source = saved(tmp_path, {"a": torch.zeros(shape)})
    convert_checkpoint(source, tmp_path / "out.npz", verify=True)
    with np.load(tmp_path / "out.npz") as read:
        assert read["a"].shape == shape


@pytest.mark.parametrize("shape", [(1,) * 65, (2**62, 0), (2**31, 0, 2**30)])
def test_shapes_that_numpy_cannot_have_are_refused(shape, tmp_path):
    with pytest.raises(ValueError):
        np.empty(shape, "f4")
    source = saved(tmp_path, {"a": torch.zeros(shape)})
    with pytest.raises(RefusedObject, match=r"numpy (has at most 64|cannot have)"):
        convert_checkpoint(source, tmp_path / "out.npz", verify=True)


def test_tied_names_get_copies_and_tags_are_told_to_be_lost(tmp_path):
    weight = torch.rand(4)
    source = saved(tmp_path, {"a": weight, "b": weight})
    with open_checkpoint(source) as opened:
        plan = plan_conversion(opened, tmp_path / "out.npz")
        lines = {row.label: row.text for row in plan_lines(plan)}
    assert lines["shared"] == "1 key shares the storage of another; each has its own copy now"
    assert plan.tied == {} and plan.locations == {} and "note" not in lines
    result = convert_checkpoint(source, tmp_path / "out.npz", device="cuda:1", verify=True)
    assert result.plan.notes == ("a numpy archive has no device tags: its arrays are on no device",)


def test_it_is_never_split_and_its_name_is_its_own(tmp_path):
    source = saved(tmp_path, {"w": torch.ones(3)})
    with pytest.raises(CheckpointError, match="a numpy archive is not split by size"):
        convert_checkpoint(source, tmp_path / "out.npz", max_shard_size=4)
    with pytest.raises(CheckpointError, match="its name says npz, but --to says torch"):
        convert_checkpoint(source, tmp_path / "out.npz", to="torch")
    with pytest.raises(CheckpointError, match=r"write out\.npz"):
        convert_checkpoint(source, tmp_path / "out.pt", to="npz")


def test_live_tensors_are_saved_in_it(tmp_path):
    save_portable({"w": torch.arange(3)}, tmp_path / "out.npz")
    assert np.load(tmp_path / "out.npz")["w"].tolist() == [0, 1, 2]


def test_a_hint_says_what_to_do_in_code_too(tmp_path):
    with pytest.raises(RefusedObject) as caught:
        save_portable({"w": torch.ones(3).bfloat16()}, tmp_path / "out.npz")
    hint = (
        "cast it (--dtype f32), write safetensors (--to safetensors), or leave it out (--exclude)"
    )
    assert caught.value.hint == hint


def test_what_is_not_checked_twice_is_said(tmp_path):
    np.savez(tmp_path / "in.npz", w=np.ones(3))
    done = run("convert", "in.npz", "out.pt", "--verify", cwd=tmp_path)
    assert (
        "equal to the source; whether the reader saw everything in the source is not checked a "
        "second way (npz)"
    ) in done.err


def test_one_archive_becomes_another(tmp_path):
    np.savez_compressed(tmp_path / "in.npz", w=np.arange(6, dtype=">i2").reshape(2, 3, order="F"))
    convert_checkpoint(tmp_path / "in.npz", tmp_path / "out.npz", verify=True)
    assert np.load(tmp_path / "out.npz")["w"].dtype == np.dtype("<i2")
    assert np.load(tmp_path / "out.npz")["w"].tolist() == np.load(tmp_path / "in.npz")["w"].tolist()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x.gguf", "GGUF"), ("x.ONNX", "ONNX"), ("x.h5", "HDF5"), ("x.npy", "a numpy array"),
        ("x.pb", "TensorFlow"), ("x.json", "a text"), ("x.pt.gz", "a compressed file"),
        ("x.parquet", "a table"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to", ["torch", "safetensors", "npz"])
def test_a_name_of_another_program_s_files_is_refused(name, says, to, tmp_path):
    source = saved(tmp_path, {"w": torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"its name says {says}, but --to says {to}"):
        convert_checkpoint(source, tmp_path / name, to=to)
    assert not (tmp_path / name).exists()


def test_a_compressed_name_is_told_its_own_name_without_the_end(tmp_path):
    source = saved(tmp_path, {"w": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"write x\.v1\.safetensors$"):
        convert_checkpoint(source, tmp_path / "x.v1.safetensors.gz", to="safetensors")
