"""A part of a checkpoint is not taken for the whole by any command; all parts are, where an index
is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import (
    CheckpointError,
    Job,
    Options,
    average,
    convert_checkpoint,
    diagnose,
    diff_checkpoints,
    inspect_checkpoint,
    load_into,
    load_portable,
    merge,
    open_checkpoint,
)
from ckptconv.batch.finding import jobs_below
from ckptconv.convert.planner import plan_conversion
from ckptconv.formats.registry import open_certain
from ckptconv.io.places import place_of
from helpers.memory_places import stored

Weights = dict[str, torch.Tensor]
ONE, OTHER = {"a.weight": torch.ones(3)}, {"b.weight": torch.zeros(2)}


def shard(folder: Path, number: int = 1, of: int = 2, weights: Weights = ONE) -> Path:
    path = folder / f"model-{number:05}-of-{of:05}.safetensors"
    save_file(weights, path)
    return path


def saved(folder: Path, name: str, value: object) -> Path:
    torch.save(value, folder / name)
    return folder / name


def moe(folder: Path) -> Path:
    states = {"module": ONE, "mp_world_size": 1, "num_experts": [4], "ds_version": "0.19.8"}
    return saved(folder, "mp_rank_00_model_states.pt", states)


def meta(folder: Path) -> Path:
    saved(folder, "consolidated.01.pth", ONE)
    return saved(folder, "consolidated.00.pth", ONE)


PARTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a shard": (shard, r"only one part .* the others: model-00002-of-00002.safetensors"),
    "a shard of an epoch": (
        lambda at: saved(at, "ft-model-00002-of-00003_0.pt", ONE),
        "ft-model-00001-of-00003_0.pt, ft-model-00003-of-00003_0.pt",
    ),
    "torchtune's": (lambda at: saved(at, "hf_model_0002_0.pt", ONE), r"hf_model_0001_0\.pt"),
    "Meta's first": (meta, r"consolidated\.01\.pth"),
    "Meta's second": (lambda at: saved(at, "consolidated.01.pth", ONE), r"consolidated\.00\.pth"),
    "Meta's first alone": (
        lambda at: saved(
            at,
            "consolidated.00.pth",
            {"tok_embeddings.weight": torch.ones(9, 4), "norm.weight": torch.ones(8)},
        ),
        "one of the parallel parts of a model",
    ),
    "vLLM's": (
        lambda at: shard(at).rename(at / "model-rank-1-part-0.safetensors"),
        r"model-rank-0-part-0\.safetensors",
    ),
    "a gate without experts": (moe, r"without its experts \(\*expert_\*_model_states\.pt\)"),
    "renamed": (lambda at: moe(at).rename(at / "best.pt"), "without its experts"),
    "a tensor-parallel part": (
        lambda at: saved(at, "mp_rank_00_model_states.pt", {"module": ONE, "mp_world_size": 2}),
        r"one of 2 tensor- or pipeline-parallel parts",
    ),
    "an expert": (
        lambda at: saved(at, "layer_0_expert_3_mp_rank_00_model_states.pt", ONE),
        "one of the experts",
    ),
    "a layer": (lambda at: saved(at, "layer_00-model_states.pt", ONE), "is one layer of"),
    "a flat parameter": (
        lambda at: saved(at, "x.pt", {"_fsdp_wrapped_module._flat_param": torch.ones(9)}),
        "_flat_param is a flat parameter of FSDP",
    ),
    "one in a dict": (
        lambda at: saved(at, "x.pt", {"model": {"a._flat_param": torch.ones(9)}}),
        "_flat_param is a flat parameter of FSDP",
    ),
}


def loaded_into(part: Path) -> None:
    model = torch.nn.Sequential()
    model.a = torch.nn.Linear(3, 1)
    load_into(model, part, strict=False)


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_is_not_taken_for_the_whole(kind, tmp_path):
    make, told = PARTS[kind]
    part = make(tmp_path)
    whole = saved(tmp_path, "whole.pt", ONE)
    for take in (
        lambda: convert_checkpoint(part, tmp_path / "out.safetensors"),
        lambda: convert_checkpoint(part, tmp_path / "out.pt"),
        lambda: load_portable(part),
        lambda: load_portable(part, whole=True),
        lambda: loaded_into(part),
        lambda: average([whole, part], tmp_path / "out.pt"),
        lambda: merge([whole, part], tmp_path / "out.pt"),
    ):
        with pytest.raises(CheckpointError, match=told) as raised:
            take()
        assert raised.value.hint
    assert not list(tmp_path.glob("out.*"))
    finding = next(one for one in diagnose(part).findings if one.code == "lone-shard")
    assert finding.severity == "error" and (finding.command or finding.advice)
    assert any(finding.cause in note for note in inspect_checkpoint(part).notes)


def test_one_shard_alone_is_converted_under_the_same_number(tmp_path):
    part = shard(tmp_path)
    convert_checkpoint(part, tmp_path / "half-00001-of-00002.pt", dtype="bf16")
    assert torch.load(tmp_path / "half-00001-of-00002.pt")["a.weight"].dtype is torch.bfloat16
    for name in ("half-00002-of-00002.pt", "half-100001-of-00002.pt", "half-00001-of-000021.pt"):
        with pytest.raises(CheckpointError, match="00001-of-00002 in its name"):
            convert_checkpoint(part, tmp_path / name)


@pytest.mark.parametrize(
    "name", ["model-00001-of-00001.safetensors", "hf_model_0001_0.safetensors", "100-of-200.st"]
)
def test_the_only_part_is_the_whole(name, tmp_path):
    save_file(ONE, tmp_path / name)
    assert load_portable(tmp_path / name).keys() == ONE.keys()
    llama = {"tok_embeddings.weight": torch.ones(9, 4), "norm.weight": torch.ones(4)}
    assert load_portable(saved(tmp_path, "consolidated.00.pth", llama)).keys() == llama.keys()


@pytest.mark.parametrize("first", ["model-00001-of-00002_1.pt", "hf_model_0001_0.pt"])
def test_all_parts_together_are_the_whole_without_an_index(first, tmp_path):
    (tmp_path / "in").mkdir()
    second = first.replace("0001", "0002", 1)
    files = [saved(tmp_path / "in", first, ONE), saved(tmp_path / "in", second, OTHER)]
    saved(tmp_path / "in", "recipe_state.pt", {"step": 1})
    for number, source in enumerate((tmp_path / "in", files)):
        out = tmp_path / f"{number}.safetensors"
        convert_checkpoint(source, out, verify=True)
        assert {key: value.tolist() for key, value in load_file(out).items()} == {
            key: value.tolist() for key, value in (ONE | OTHER).items()
        }
    notes = inspect_checkpoint(tmp_path / "in").notes
    assert any("how many parts" in note for note in notes) == first.startswith("hf_")


def test_below_a_folder_all_parts_are_one_checkpoint_and_one_keeps_its_number(tmp_path):
    for folder, numbers in (("all", (1, 2)), ("one", (1,))):
        (tmp_path / "in" / folder).mkdir(parents=True)
        for number in numbers:
            shard(tmp_path / "in" / folder, number, weights=(ONE, OTHER)[number - 1])
    saved(tmp_path / "in" / "one", "best.pt", ONE)
    common = Job("in", "out", Options(to="torch"))
    jobs = jobs_below([place_of(tmp_path / "in")], place_of(tmp_path / "out"), common, [])
    outputs = {Path(job.output).name for job in jobs}
    assert outputs == {"all.pt", "best.pt", "model-00001-of-00002.pt"}
    (tmp_path / "out" / "one").mkdir(parents=True)
    for job in jobs:
        job.run()
    assert torch.load(tmp_path / "out" / "all.pt").keys() == {"a.weight", "b.weight"}


def test_the_difference_to_a_part_says_that_it_is_one(tmp_path):
    notes = diff_checkpoints(shard(tmp_path), saved(tmp_path, "whole.pt", ONE | OTHER)).notes
    assert any("only one part of a checkpoint" in note for note in notes)


def test_parallel_parts_and_missing_ones_are_refused_by_name(tmp_path):
    meta(tmp_path)
    with pytest.raises(CheckpointError, match=r"are parallel parts .* not those of a Llama"):
        load_portable(tmp_path)
    (tmp_path / "few").mkdir()
    shard(tmp_path / "few", 1, 3)
    shard(tmp_path / "few", 3, 3, OTHER)
    with pytest.raises(CheckpointError, match="lacks model-00002-of-00003"):
        load_portable(tmp_path / "few")


def test_far_parts_are_parts_too(tmp_path):
    (tmp_path / "in").mkdir()
    shard(tmp_path / "in")
    shard(tmp_path / "in", 2, weights=OTHER)
    place = stored(tmp_path / "in", "parts")
    with (
        open_certain(place.child("model-00001-of-00002.safetensors")) as part,
        pytest.raises(CheckpointError, match="only one part"),
    ):
        plan_conversion(part, tmp_path / "out.pt")
    with open_certain(place) as whole:
        assert whole.state_dict().keys == ("a.weight", "b.weight")
    with open_checkpoint(tmp_path / "in") as whole:
        assert whole.format == "safetensors, 2 parts"


def test_float8_of_one_part_is_not_cast_since_its_scale_may_be_in_another(tmp_path):
    weights = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    part = shard(tmp_path, weights=weights)
    shard(tmp_path, 2, weights={"a.weight_scale_inv": torch.ones(1)})
    out = tmp_path / "out" / "one-00001-of-00002.safetensors"
    out.parent.mkdir()
    with pytest.raises(CheckpointError, match="a scale may be in another part"):
        convert_checkpoint(part, out, dtype="bf16")
    assert not any(out.parent.iterdir())
    convert_checkpoint(part, out)
    assert load_file(out)["a.weight"].dtype == torch.float8_e4m3fn
