"""Files of ranks: together they are what torch gathers; missing, doubled or foreign ones are
refused, and one alone always.
"""

from __future__ import annotations

import copyreg
import importlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptconv import convert_checkpoint, load_portable, open_checkpoint
from ckptconv.formats.folders.dtensors import Mesh, Placement, _runs
from ckptconv.support.errors import (
    CheckpointError,
    LimitExceeded,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
)
from ckptconv.support.limits import Limits
from helpers import oracle
from helpers.examples import crossed
from helpers.program import assert_one_error, run

NAMES = (
    "rows2",
    "columns2",
    "training2",
    "fsdp1_2",
    "rows4",
    "columns4",
    "grid4",
    "strided4",
    "hybrid4",
    "parallel4",
)
QUICK: dict[str, Any] = {"fsync": False, "verify": True}


def files(folder: Path, name: str) -> list[Path]:
    """The files of all ranks."""
    return [folder / f"{name}.{rank}.pt" for rank in range(int(name[-1]))]


def gathered(folder: Path, name: str) -> Any:
    return torch.load(folder / f"{name}.whole.pt", weights_only=False)


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_together_are_what_torch_gathers(name, worlds, tmp_path):
    convert_checkpoint(files(worlds, name), tmp_path / "out.pt", keys="keep", **QUICK)
    assert oracle.value_rows(oracle.load(tmp_path / "out.pt")) == oracle.value_rows(
        gathered(worlds, name)
    )


def test_strided_shards_lie_in_their_own_order(worlds):
    found = load_portable(files(worlds, "strided4"))
    for key, tensor in found.items():
        assert torch.equal(tensor.flatten(), torch.arange(1.0, tensor.numel() + 1)), key


def test_the_order_of_the_files_does_not_matter(worlds, tmp_path):
    expected = None
    for order in itertools.permutations(files(worlds, "rows4")):
        output = tmp_path / "out.safetensors"
        convert_checkpoint(order, output, force=True, fsync=False)
        expected = expected or output.read_bytes()
        assert output.read_bytes() == expected


def test_the_program_joins_them(produced, tmp_path):
    done = run(
        "convert",
        produced / "rank0_dtensor.pt",
        produced / "rank1_dtensor.pt",
        "out.safetensors",
        cwd=tmp_path,
    )
    assert done.exit == 0, done.err
    found, expected = (
        load_file(tmp_path / "out.safetensors"),
        oracle.load(produced / "full_from_fsdp.pt"),
    )
    assert oracle.value_rows(dict(sorted(found.items()))) == oracle.value_rows(
        dict(sorted(expected.items()))
    )


def test_the_program_inspects_them_together(produced, tmp_path):
    done = run(
        "inspect",
        produced / "rank0_dtensor.pt",
        produced / "rank1_dtensor.pt",
        "--json",
        cwd=tmp_path,
    )
    assert done.exit == 0, done.err
    assert done.json()["tensors"] == 4
    remedy = done.json()["verdict"].partition("Fix: ckptconv ")[2].split()
    assert run(*remedy, cwd=tmp_path).exit == 0
    assert list(torch.load(tmp_path / remedy[-1])) == list(
        torch.load(produced / "full_from_fsdp.pt")
    )


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "command",
    [("inspect",), ("convert", "out.pt"), ("convert", "out.safetensors", "--unknown", "drop")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_alone_is_refused_with_how_many_there_should_be(command, rank, produced, tmp_path):
    name, *others = command
    error = assert_one_error(run(name, produced / f"rank{rank}_dtensor.pt", *others, cwd=tmp_path))
    assert "2 ranks" in error and f"missing: rank {1 - rank}" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [load_portable, open_checkpoint])
def test_one_alone_is_never_loaded(call, worlds):
    with pytest.raises(UnsupportedCheckpoint, match="4 ranks; missing: rank 0, 1, 3"):
        call(worlds / "grid4.2.pt")


@pytest.mark.parametrize("unknown", ["refuse", "drop", "keep"])
def test_one_alone_of_fsdp1_is_refused_too(unknown, worlds, tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match="2 ranks; missing: rank 0"):
        convert_checkpoint(worlds / "fsdp1_2.1.pt", tmp_path / "out.pt", unknown=unknown)


def test_missing_ranks_are_named(worlds):
    with pytest.raises(UnsupportedCheckpoint, match="split over 4 ranks; missing: rank 1, 3;"):
        open_checkpoint([worlds / "rows4.0.pt", worlds / "rows4.2.pt"])


def test_one_half_of_replicated_shards_is_not_enough(worlds):
    with pytest.raises(UnsupportedCheckpoint, match="missing: rank 2, 3"):
        open_checkpoint([worlds / "hybrid4.0.pt", worlds / "hybrid4.1.pt"])


def copied(path: Path, folder: Path) -> Path:
    return Path(shutil.copy(path, folder / "copy.pt"))


def other_world(worlds: Path, folder: Path) -> list[Path]:
    return [
        worlds / "rows4.0.pt",
        worlds / "rows2.1.pt",
        worlds / "rows4.2.pt",
        worlds / "rows4.3.pt",
    ]


def other_keys(worlds: Path, folder: Path) -> list[Path]:
    return [worlds / "rows2.0.pt", worlds / "columns2.1.pt"]


def same_twice(worlds: Path, folder: Path) -> list[Path]:
    return [*files(worlds, "rows2"), copied(worlds / "rows2.1.pt", folder)]


def plain_beside(worlds: Path, folder: Path) -> list[Path]:
    return [*files(worlds, "rows2"), worlds / "rows2.whole.pt"]


def own_tensors(worlds: Path, folder: Path) -> list[Path]:
    return files(worlds, "own2")


def partial_sums(worlds: Path, folder: Path) -> list[Path]:
    return files(worlds, "partial2")


def not_there(worlds: Path, folder: Path) -> list[Path]:
    return [worlds / "rows2.0.pt", folder / "rows2.1.pt"]


def a_folder_among_them(worlds: Path, folder: Path) -> list[Path]:
    return [worlds / "rows2.0.pt", worlds / "rows2"]


BAD: dict[Callable[[Path, Path], list[Path]], tuple[type[CheckpointError], str]] = {
    other_world: (MalformedCheckpoint, "different meshes"),
    other_keys: (MalformedCheckpoint, "only one of the ranks 0 and 1"),
    same_twice: (MalformedCheckpoint, "a file of rank 1, and so is"),
    plain_beside: (UnsupportedCheckpoint, "holds no shards"),
    own_tensors: (MalformedCheckpoint, "differs between the ranks 0 and 1"),
    partial_sums: (UnsupportedCheckpoint, "placed as Partial"),
    not_there: (UnsupportedCheckpoint, "no such file"),
    a_folder_among_them: (UnsupportedCheckpoint, "is a folder"),
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.__name__)
def test_files_that_are_not_those_of_one_checkpoint_are_refused(case, worlds, tmp_path):
    kind, words = BAD[case]
    with pytest.raises(kind) as raised:
        convert_checkpoint(case(worlds, tmp_path), tmp_path / "out.pt", **QUICK)
    assert words in str(raised.value)
    assert not (tmp_path / "out.pt").exists()


def test_no_files_at_all_are_refused():
    with pytest.raises(UnsupportedCheckpoint):
        open_checkpoint([])


def test_damage_in_a_shard_is_noticed(worlds, tmp_path):
    source = copied(worlds / "rows2.1.pt", tmp_path)
    raw = source.read_bytes()
    with_damage = raw.replace(
        torch.arange(13.0, 16.0).numpy().tobytes(), torch.arange(12.0, 15.0).numpy().tobytes(), 1
    )
    assert with_damage != raw
    source.write_bytes(with_damage)
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        convert_checkpoint([worlds / "rows2.0.pt", source], tmp_path / "out.pt", fsync=False)


# --------------------------------------------------------------------------- what older torch wrote


class Mesh8:
    """The mesh of torch before 2.9, as it was pickled: a tensor of ranks and the place of the one
    that saves.
    """

    __qualname__ = "DeviceMesh"
    __module__ = "torch.distributed.device_mesh"

    def __init__(self, ranks: list[Any], at: list[int]) -> None:
        self.device_type = "cuda"
        self.mesh = torch.tensor(ranks, dtype=torch.int)
        self.mesh_dim_names = None
        self._flatten_mesh_list = tuple(self.mesh.flatten().tolist())
        self._coordinate_on_dim = at


class Spec8:
    __qualname__ = "DTensorSpec"
    __module__ = "torch.distributed.tensor._dtensor_spec"

    def __init__(self, mesh: Mesh8, placements: tuple[Any, ...]) -> None:
        self.mesh, self.placements, self.tensor_meta = mesh, placements, None


class Pickled:
    """A DTensor as torch pickles it."""

    def __init__(self, shape: tuple[int, ...], local: torch.Tensor, spec: Spec8) -> None:
        self.shape, self.local, self.spec = shape, local, spec

    def __reduce__(self) -> Any:
        wrapper = (
            DTensor,
            self.local.dtype,
            self.shape,
            (1,) * len(self.shape),
            0,
            torch.strided,
            torch.device("cpu"),
            False,
        )
        state = (None, {"_local_tensor": self.local, "_spec": self.spec})
        return torch._tensor._rebuild_from_type_v2, (
            torch._utils._rebuild_wrapper_subclass,
            DTensor,
            wrapper,
            state,
        )


@pytest.fixture
def older(monkeypatch, tmp_path):
    """For each of four ranks on a 2 × 2 mesh, save its part of a tensor as torch before 2.9 did."""
    monkeypatch.setattr("torch.distributed.device_mesh.DeviceMesh", Mesh8)
    monkeypatch.setattr("torch.distributed.tensor._dtensor_spec.DTensorSpec", Spec8)

    def save(
        placements: tuple[Any, ...],
        local: Callable[[int, int], torch.Tensor],
        shape: tuple[int, ...],
    ) -> list[Path]:
        paths = []
        for rank in range(4):
            mesh = Mesh8([[3, 2], [1, 0]], at := [1 - rank // 2, 1 - rank % 2])
            paths.append(tmp_path / f"{rank}.pt")
            torch.save({"w": Pickled(shape, local(*at), Spec8(mesh, placements))}, paths[-1])
        return paths

    return save


W = torch.arange(30.0).reshape(6, 5)


def test_the_meshes_of_older_torch_are_read(older):
    paths = older(
        (TorchShard(0), TorchShard(1)),
        lambda i, j: W.chunk(2)[i].chunk(2, 1)[j].contiguous(),
        (6, 5),
    )
    assert torch.equal(load_portable(paths)["w"], W)
    with pytest.raises(UnsupportedCheckpoint, match="4 ranks; missing: rank 0, 1, 2"):
        load_portable(paths[3])


def test_a_dimension_split_twice_by_older_torch_is_refused(older):
    paths = older(
        (TorchShard(0), TorchShard(0)), lambda i, j: W[:4].chunk(2)[i].chunk(2)[j], (4, 5)
    )
    with pytest.raises(UnsupportedCheckpoint, match="split twice"):
        load_portable(paths)


def test_shards_that_are_cut_into_too_many_parts_are_refused(older):
    factor = Limits().mesh_ranks + 1
    strided = _StridedShard(0, split_factor=factor)
    paths = older((strided, TorchShard(1)), lambda i, j: W, (6, 5))
    with pytest.raises(LimitExceeded, match=f"are cut into {factor} parts"):
        load_portable(paths)


class Part:
    """An object of the torch module and class given, as pickle writes one: its attributes alone."""

    def __init__(self, cls: str, **state: Any) -> None:
        module, _, name = cls.rpartition(".")
        self.made_as, self.state = getattr(importlib.import_module(module), name), state

    @property
    def __class__(self) -> Any:
        return self.made_as  # pickle looks whether it is what is made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj__, (self.made_as,), self.state


def mesh9(at: list[int], **changed: Any) -> Part:
    """A 2 × 2 mesh as torch 2.9 pickled it: a layout of shape and stride, and the ranks flat."""
    layout = Part("torch.distributed._mesh_layout._MeshLayout", shape=(2, 2), stride=(2, 1))
    state = {"_layout": layout, "_flatten_rank_map": (3, 2, 1, 0), "_coordinate_on_dim": at}
    return Part("torch.distributed.device_mesh.DeviceMesh", **{**state, **changed})


def saved9(folder: Path, **changed: Any) -> list[Path]:
    """The files of four ranks of W, whose DTensors or meshes are `changed` in one way."""
    paths = []
    for rank in range(4):
        i, j = 1 - rank // 2, 1 - rank % 2
        of_mesh = {name: value for name, value in changed.items() if name not in _OF_TENSOR}
        found = {
            "placements": (TorchShard(0), TorchShard(1)),
            "_local_tensor": W.chunk(2)[i].chunk(2, 1)[j].contiguous(),
            **changed,
        }
        placements, mesh = found["placements"], mesh9([i, j], **of_mesh)
        spec = Part(f"{Spec8.__module__}.DTensorSpec", mesh=mesh, placements=placements)
        pickled = Pickled((6, 5), found["_local_tensor"], found.get("_spec", spec))
        paths.append(folder / f"{rank}.pt")
        torch.save({"w": pickled}, paths[-1])
    return paths


_OF_TENSOR = "placements", "_local_tensor", "_spec"


def layout(shape: Any, stride: Any) -> Part:
    return Part("torch.distributed._mesh_layout._MeshLayout", shape=shape, stride=stride)


@pytest.mark.parametrize("changed", [{}, {"_layout": layout(((1, 2), 2), ((4, 2), 1))}])
def test_the_meshes_of_torch_2_9_are_read(changed, tmp_path):
    assert torch.equal(load_portable(saved9(tmp_path, **changed))["w"], W)


class NoTensor:
    """What is in the place of local values, and pickled as None; it has a dtype as these have."""

    dtype = torch.float32

    def __reduce__(self) -> Any:
        return type(None), ()


STRANGE = {
    "its mesh is of axes that differ in length": (
        {"_layout": layout(((2, 1), 2), (2, 1))},
        "whose mesh is not a grid",
    ),
    "its mesh has a stride too few": ({"_layout": layout((2, 2), (2,))}, "mesh is not a grid"),
    "its mesh has 2**63 ranks": (
        {"_layout": layout((1, (1 << 59, 16)), (0, (0, 0)))},
        "of more ranks or parts than are possible",
    ),
    "its mesh is not an object": ({"_layout": (2, 2)}, "of an unknown layout"),
    "its mesh has no shape": ({"_layout": layout(None, (2, 1))}, "of an unknown layout"),
    "its mesh reaches beyond its ranks": (
        {"_rank": 3},
        "whose mesh reaches beyond its ranks",
    ),
    "a rank below zero": ({"_flatten_rank_map": (3, 2, 1, -1)}, "something other than ranks"),
    "a rank that is true": ({"_flatten_rank_map": (3, 2, True, 0)}, "something other than ranks"),
    "a rank beyond 31 bits": (
        {"_flatten_rank_map": (3, 2, 1, 1 << 31)},
        "something other than ranks",
    ),
    "ranks that are floats": (
        {"_flatten_rank_map": None, "_rank_map": torch.arange(3.0, -1.0, -1.0)},
        "of an unknown mesh",
    ),
    "it was saved outside of its mesh": ({"_coordinate_on_dim": None}, "not in its mesh"),
    "a place of one dimension": ({"_coordinate_on_dim": [1]}, "not in its mesh"),
    "a placement too few": (
        {"placements": (TorchShard(0),)},
        "has 1 placements on a mesh of 2 dimensions",
    ),
    "no local values": ({"_local_tensor": NoTensor()}, "is a DTensor of an unknown kind"),
    "no spec": ({"_spec": None}, "of an unknown layout"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_dtensor_that_does_not_say_what_is_where_is_refused(case, tmp_path):
    changed, message = STRANGE[case]
    with pytest.raises((MalformedCheckpoint, UnsupportedCheckpoint), match=message):
        load_portable(saved9(tmp_path, **changed))


# --------------------------------------------------------------------------------- where shards lie


def torch_offset(
    shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], placements: Any
) -> Any:
    """Local shape and first global offset, by torch itself."""
    return _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)


@pytest.mark.parametrize(
    ("size", "mesh"),
    crossed(range(14), [(1,), (3,), (4,), (2, 2), (2, 3), (3, 2)]),
)
def test_the_shares_are_those_that_torch_computes(size, mesh):
    choices = [
        (Placement(None), TorchReplicate()),
        (Placement(0), TorchShard(0)),
        (Placement(1), TorchShard(1)),
    ]
    choices += [(Placement(0, factor), _StridedShard(0, split_factor=factor)) for factor in (2, 3)]
    shape = (size, 5)
    for placed in itertools.product(choices, repeat=len(mesh)):
        for at in itertools.product(*map(range, mesh)):
            runs = _runs(shape, Mesh(mesh, (), 0, at), [ours for ours, _ in placed])
            held = tuple(sum(stop - start for start, stop in axis) for axis in runs)
            local, offset = torch_offset(shape, mesh, at, [theirs for _, theirs in placed])
            assert held == local
            if 0 not in held:
                assert tuple(axis[0][0] for axis in runs) == offset
