"""DeepSpeed goes on from the universal checkpoint that ckptconv made of its folder, at other world
sizes. The oracle is its own resume at that size, from what its `ds_to_universal` makes.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from ckptconv import convert_checkpoint
from helpers.paths import DATA
from helpers.resumed import STEPS, batch, model
from helpers.training_runs import Runs, in_time

pytestmark = [pytest.mark.families, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("deepspeed")

MORE = {"first": STEPS, "steps": 5}
ROUNDING = 1e-6
"""What the order of sums in float32 may change of a loss, of its size."""


@pytest.fixture(scope="module", params=["zero2", "zero3"])
def runs(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Runs]:
    made = ten_steps(tmp_path_factory.mktemp(request.param), request.param)
    swapped(made.folder / "ours", made.folder / "swapped")
    return request.param, made


def ten_steps(folder: Path, way: str) -> Runs:
    """Ten steps at two ranks, what ckptconv makes of them, and what deepspeed does."""
    made = Runs(folder, "helpers.resumed_deepspeed")
    made.add("trained", way=way, world=2, save="ranks")
    made.go()
    convert_checkpoint(folder / "ranks", folder / "ours", to="universal")
    by_deepspeed(folder / "ranks", folder / "own")
    return made


def by_deepspeed(source: Path, out: Path) -> None:
    """What `ds_to_universal` makes; it writes into its source, so that comes after ours."""
    step = (source / "latest").read_text()
    made = out / f"{step}_universal"
    in_time([
        sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
        "--input_folder", str(source / step), "--output_folder", str(made),
        "--num_extract_workers", "1", "--num_merge_workers", "1",
    ])  # fmt: skip
    assert (out / "latest_universal").read_text() == made.name


def swapped(source: Path, out: Path) -> None:
    """A copy in which two parameters have each other's momentum."""
    shutil.copytree(source, out)
    states = out / (out / "latest_universal").read_text() / "zero"
    one, other = (states / name / "exp_avg.pt" for name in ("2.weight", "2.bias"))
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)


def first_loss(ranks: Path) -> float:
    """What one process of plain torch computes from the weights that `zero_to_fp32` joins."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    net = model()
    net.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(ranks)))
    inputs, targets = batch(STEPS, 0, 1)
    return (net(inputs) - targets).square().mean().item()


@pytest.mark.parametrize("world", [1, 4])
def test_deepspeed_goes_on_from_the_universal_folder_of_its_ranks(runs, world):
    way, made = runs
    for source in ("own", "ours", "swapped"):
        made.add(f"{source}{world}", way=way, world=world, load=source, **MORE)
    losses = made.go()
    own = losses[f"own{world}"]
    assert losses[f"ours{world}"] == own
    assert own[0] == pytest.approx(first_loss(made.folder / "ranks"), rel=ROUNDING)
    assert losses[f"swapped{world}"][0] == own[0]
    assert losses[f"swapped{world}"][1:] != own[1:]


@pytest.mark.parametrize("runs", ["zero2"], indirect=True)
def test_fsdp2_goes_on_from_what_deepspeed_saved(runs):
    """Its losses are those of deepspeed's own resume, but for the order of sums."""
    way, made = runs
    convert_checkpoint(made.folder / "ranks", made.folder / "dcp", to="dcp")
    beside = Runs(made.folder)
    beside.add("fsdp", load="dcp", weights="module", **MORE)
    fsdp = beside.go()["fsdp"]
    made.add("beside", way=way, load="own", **MORE)
    assert fsdp[0] == pytest.approx(first_loss(made.folder / "ranks"), rel=ROUNDING)
    assert fsdp == pytest.approx(made.go()["beside"], rel=ROUNDING)


@pytest.mark.parametrize("way", ["zero2-fp16", "zero3-fp16"])
def test_the_scale_of_the_loss_goes_on_from_where_it_was(way, tmp_path):
    """The scale, its hysteresis and the last overflow, also by way of a torch file; without the
    scaler the scale starts anew, and steps overflow.
    """
    made = ten_steps(tmp_path, way)
    convert_checkpoint(tmp_path / "ranks", tmp_path / "run.pt")
    convert_checkpoint(tmp_path / "run.pt", tmp_path / "again", to="universal")
    shutil.copytree(tmp_path / "ours", tmp_path / "without")
    for file in (tmp_path / "without").glob("*/zero/optimizer_state.pt"):
        said = torch.load(file, weights_only=False)
        assert {*said} >= {"loss_scaler", "dynamic_loss_scale", "overflow"}
        del said["loss_scaler"]
        torch.save(said, file)
    for source, world in (("own", 1), ("own", 4), ("ours", 1), ("ours", 4), ("again", 1)):
        made.add(f"{source}{world}", way=way, world=world, load=source, **MORE)
    made.add("without1", way=way, load="without", **MORE)
    losses = made.go()
    assert losses["ours1"] == losses["own1"] == losses["again1"]
    assert losses["ours4"] == losses["own4"]
    (_, scale, _, count, _), *_ = losses["own1"]
    assert count == STEPS + 1 and scale < 1 << 20
    assert losses["without1"] != losses["own1"]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_with_tied_layers_is_loaded_at_other_numbers_of_stages(stages, tmp_path):
    """Of two stages of two ranks each; two ranks load it."""
    source = DATA / "deepspeed_parallel" / "tied"
    expected = torch.load(source / "states.pt", weights_only=False)
    convert_checkpoint(source, tmp_path / "out", to="universal")
    script = str(DATA / "make_deepspeed_parallel.py")
    in_time([sys.executable, script, "loaded", str(tmp_path / "out"), str(stages)])
    found: dict[str, dict[str, torch.Tensor]] = {}
    for rank in range(2):
        found |= torch.load(tmp_path / "out" / f"{stages}_{rank}.pt")
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert all(torch.equal(value, expected[name][key]) for key, value in values.items())
