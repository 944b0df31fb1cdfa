"""A file that was copied over that of another rank: one rank's part would be there twice, so it is
refused, and both files are named.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptconv import load_portable, open_checkpoint
from ckptconv.formats.folders.ranks import are_equal
from ckptconv.pickles.nodes import mapping_pairs
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.tensors.assembly import assembled
from helpers import zero
from helpers.paths import DATA

Copy = Callable[[Path, Path], object]
PARTITION = "bf16_zero_pp_rank_{}_mp_rank_{}_optim_states.pt"
COPIES = {
    "ZeRO 1": ("deepspeed/stage1", "zero_pp_rank_{}_mp_rank_{}_optim_states.pt", "1 00", "2 00"),
    "ZeRO 2": ("deepspeed/stage2", PARTITION, "0 00", "1 00"),
    "ZeRO 3": ("deepspeed/stage3", PARTITION, "1 00", "0 00"),
    "frozen parameters of ZeRO 3": (
        "deepspeed/stage3_frozen",
        "zero_pp_rank_{}_mp_rank_{}_model_states.pt",
        "0 00",
        "2 00",
    ),
    "stages of a pipeline": ("deepspeed_parallel/pipeline", PARTITION, "0 00", "0 01"),
    "ranks of experts": ("deepspeed_parallel/experts", PARTITION, "1 00", "3 00"),
    "Megatron's ranks": ("megatron_ranks", "mp_rank_{}_{}/model_optim_rng.pt", "00 000", "01 000"),
    "Megatron's stages": ("megatron_ranks", "mp_rank_{}_{}/model_optim_rng.pt", "00 000", "00 001"),
}


def refused(folder: Path, source: Path, target: Path, copy: Copy = shutil.copy) -> None:
    copy(source, target)
    files = sorted((source, target))
    with pytest.raises(MalformedCheckpoint, match="has the same of each tensor as") as error:
        load_portable(folder)
    assert all(str(file) in str(error.value) for file in files)
    assert "\n" not in str(error.value)


def refused_by_name(folder: Path, source: Path, target: Path) -> None:
    """Torch has written the name of the file into it."""
    what = f"{target}: was saved as {source.name}: one was copied over the other, or they were"
    with pytest.raises(MalformedCheckpoint, match=re.escape(what)):
        load_portable(folder)


@pytest.mark.parametrize("kind", COPIES)
def test_a_rank_that_was_copied_over_another_is_refused(kind, tmp_path):
    name, pattern, *ranks = COPIES[kind]
    folder = shutil.copytree(DATA / name, tmp_path / "made")
    step = max((item for item in folder.glob("global_step*")), default=folder)
    source, target = (step / pattern.format(*rank.split()) for rank in ranks)
    assert source.is_file() and target.is_file()
    if source.stem == target.stem:
        refused(folder, source, target)
        return
    refused(folder, source, target, zero.nameless)
    shutil.copy(source, target)
    refused_by_name(folder, source, target)


def test_a_file_of_dcp_that_was_copied_over_another_is_refused(produced, tmp_path):
    folder = tmp_path / "made"
    shutil.copytree(produced / "accelerate_fsdp/pytorch_model_fsdp_0", folder)
    (folder / "__1_0.distcp").unlink()  # it may not be written to
    refused(folder, folder / "__0_0.distcp", folder / "__1_0.distcp")


def test_a_slice_of_a_llama_that_was_copied_over_another_is_refused(tmp_path):
    names = ["layers.0.attention.wq.weight", "output.weight"]
    for rank in range(2):
        part = {name: torch.randn(8, 16) for name in names} | {"norm.weight": torch.ones(16)}
        torch.save(part, tmp_path / f"consolidated.{rank:02}.pth")
    assert load_portable(tmp_path)["output.weight"].shape == (16, 16)
    files = [tmp_path / f"consolidated.{rank:02}.pth" for rank in range(2)]
    exchanged(*files, shutil.copy)
    refused_by_name(tmp_path, files[1], files[0])
    exchanged(*files, shutil.copy)
    refused(tmp_path, *files, zero.nameless)


def test_a_copy_without_checksums_is_told_by_its_values(tmp_path):
    folder = zero.write(tmp_path / "zero", 2, 2, [{"a": torch.rand(64), "b": torch.rand(6, 6)}])
    files = sorted((folder / zero.TAG).glob("*optim_states.pt"))
    for file in files:
        torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    load_portable(folder)
    refused(folder, *files)


def exchanged(one: Path, other: Path, copy: Copy) -> None:
    kept = one.parent / "kept"
    kept.mkdir(exist_ok=True)
    first = one.rename(kept / one.name)
    copy(other, one)
    copy(first, other)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_of_zero_that_were_exchanged_are_refused(stage, tmp_path):
    folder = shutil.copytree(DATA / f"deepspeed/stage{stage}", tmp_path / "made")
    step = folder / (folder / "latest").read_text().strip()
    one, other = sorted(step.glob("*zero_pp_rank_[01]_mp_rank_00_optim_states.pt"))
    exchanged(one, other, shutil.copy)
    refused_by_name(folder, other, one)


def test_ranks_of_zero_say_what_they_have(tmp_path):
    """Those of stages 1 and 2, whatever their files are called. Those of stage 3 do not."""
    folder = shutil.copytree(DATA / "deepspeed/stage2", tmp_path / "made")
    files = (folder / "global_step2" / PARTITION.format(rank, "00") for rank in range(2))
    exchanged(*files, zero.nameless)
    with pytest.raises(MalformedCheckpoint, match="rank 0, group 0: says that it holds other"):
        load_portable(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_may_both_have_the_same_number_all_through(stage, tmp_path):
    group = {"a": torch.full((40,), 0.5), "b": torch.full((4, 6), 0.5)}
    folder = zero.write(tmp_path / "zero", stage, 4, [group])
    found = load_portable(folder)
    assert all(torch.equal(found[name], value) for name, value in group.items())


def test_tied_weights_in_files_of_their_own_are_no_copies(tmp_path):
    """`single_file_per_rank=False` puts each tensor into a file."""
    from torch.distributed import checkpoint as dcp

    shared = torch.randn(6, 4)
    state = {"embed.weight": shared, "head.weight": shared.clone()}
    writer = dcp.FileSystemWriter(tmp_path / "dcp", single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert len([*(tmp_path / "dcp").glob("*.distcp")]) == 2
    with open_checkpoint(tmp_path / "dcp") as checkpoint:
        assert len([*checkpoint.tensors()]) == 2
    assert torch.equal(load_portable(tmp_path / "dcp")["head.weight"], shared)


# --------------------------------------------------------------------------- universal checkpoints


class Apart(torch.nn.Module):
    """What is subtracted has the negated gradients of what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.plus, self.minus = (torch.nn.Parameter(torch.zeros(5, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.plus - self.minus


def universal(folder: Path, steps: int = 3, lr: float = 0.01) -> Path:
    """A model of layers that start as copies of each other, trained and saved as `ds_to_universal`
    saves it; the gradients of an LSTM's two biases are equal, and so are these.
    """
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    model = torch.nn.Sequential(
        torch.nn.LSTM(8, 8),
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        Apart(),
    )
    torch.nn.init.zeros_(model[0].bias_ih_l0)
    torch.nn.init.zeros_(model[0].bias_hh_l0)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        model[1:](model[0](torch.randn(5, 8))[0]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(model.named_parameters())
    step = folder / "global_step3_universal"
    for name, weight in weights.items():
        (step / "zero" / name).mkdir(parents=True)
        state = {"fp32": weight.detach(), **optimizer.state[weight]}
        for key, value in state.items():
            held = value if key == "step" else {"param": value, "cat_dim": 0}
            torch.save(held, step / "zero" / name / f"{key}.pt")
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    torch.save({"param_groups": [{**settings, "params": [0]}]}, step / "zero/optimizer_state.pt")
    shapes = [{name: weight.shape for name, weight in weights.items()}]
    model_states = {"module": model.state_dict(), "param_shapes": shapes, "dp_world_size": 1}
    torch.save(model_states, step / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(step.name)
    return step


@pytest.mark.parametrize("key", ["fp32", "exp_avg", "exp_avg_sq"])
def test_a_file_of_another_parameter_is_refused(key, tmp_path):
    step = universal(tmp_path / "made")
    with open_checkpoint(step) as checkpoint:
        assert len([*checkpoint.tensors()]) == 4 * 30
    names = (f"1.layers.{number}.linear1.weight" for number in range(2))
    source, target = (step / "zero" / name / f"{key}.pt" for name in names)
    shutil.copy(source, target)
    with pytest.raises(MalformedCheckpoint, match="one was copied over the other") as error:
        load_portable(step)
    assert all(str(file) in str(error.value) for file in (source, target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_folder_of_another_parameter_is_refused(dtype, tmp_path):
    """The model states have what each weight was rounded to."""
    step = universal(tmp_path / "made")
    file = step / "mp_rank_00_model_states.pt"
    states = torch.load(file)
    states["module"] = {key: value.to(dtype) for key, value in states["module"].items()}
    torch.save(states, file)
    load_portable(step)
    source, target = (step / f"zero/1.layers.{at}.linear1.weight" for at in range(2))
    shutil.copytree(source, target, dirs_exist_ok=True)
    with pytest.raises(MalformedCheckpoint, match="one was copied over the other") as error:
        load_portable(step)
    assert all(str(folder / "fp32.pt") in str(error.value) for folder in (source, target))


@pytest.mark.parametrize("keeps_name", [True, False])
@pytest.mark.parametrize(
    ("key", "over"),
    [("fp32", "exp_avg"), ("exp_avg", "fp32"), ("exp_avg_sq", "exp_avg"), ("step", "exp_avg"),
     ("exp_avg", "step")],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(key, over, keeps_name, tmp_path):
    step = universal(tmp_path / "made")
    # the name in the archive tells of small tensors too
    end = "norm1.bias" if keeps_name else "linear1.weight"
    source = step / f"zero/1.layers.0.{end}/{key}.pt"
    target = step / f"zero/1.layers.1.{end}/{over}.pt"
    value = torch.load(source)
    if keeps_name:
        shutil.copy(source, target)
    else:  # torch writes "archive" into what it is not told the path of
        for file, held in ((source, value), (target, value)):
            with file.open("wb") as opened:
                torch.save(held, opened)
    with pytest.raises(MalformedCheckpoint) as error:
        load_portable(step)
    assert f"1.layers.1.{end}" in str(error.value)
    assert over in str(error.value)


@pytest.mark.parametrize(("steps", "lr"), [(1, 0.0), (3, 0.0), (3, 0.01)])
def test_parameters_that_are_equal_by_training_are_no_copies(steps, lr, tmp_path):
    """With a rate of 0 (a warm-up begins so) copied layers stay equal, and moments differ."""
    step = universal(tmp_path / "made", steps, lr)
    found = load_portable(step)
    assert torch.equal(found["0.bias_ih_l0"], found["0.bias_hh_l0"])
    assert torch.equal(found["2.plus"], -found["2.minus"])
    layers = (found[f"1.layers.{number}.linear1.weight"] for number in range(2))
    assert torch.equal(*layers) is (lr == 0)


def test_tensors_that_lie_in_other_parts_are_equal(tmp_path):
    """Chunks of a file end elsewhere than those of the parts that a tensor is put together of."""
    whole = torch.arange(600_000, dtype=torch.float32)
    parts = [part.clone() for part in whole.tensor_split([199_999, 200_001])]
    torch.save({"whole": whole, "parts": parts, "other": whole.flip(0)}, tmp_path / "x.pt")
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        found = dict(mapping_pairs(checkpoint.root))
        starts = [(0,), (199_999,), (200_001,)]
        joined = assembled(
            found["whole"].dtype, (600_000,), list(zip(starts, found["parts"], strict=True))
        )
        assert are_equal(found["whole"], joined) and are_equal(joined, found["whole"])
        assert not are_equal(found["other"], joined)
