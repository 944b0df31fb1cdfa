"""Pipelines and experts of DeepSpeed: the weights and states are those that deepspeed gives of each
parameter (tests/data/make_deepspeed_parallel.py), and what is missing is told.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptconv import CheckpointError, convert_checkpoint, load_portable, open_checkpoint
from ckptconv.formats.folders.deepspeed_tensors import joined_trees
from ckptconv.tensors.stream import iter_chunks
from helpers import oracle, zero
from helpers.paths import DATA

FOLDERS = DATA / "deepspeed_parallel"
STATES = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def pipeline(tmp_path) -> Path:
    """A copy of the pipeline that a test may break."""
    return shutil.copytree(FOLDERS / "pipeline", tmp_path / "pipeline")


def step(folder: Path) -> Path:
    return folder / "global_step2"


def changed(file: Path, **entries: Any) -> None:
    torch.save(torch.load(file, weights_only=False) | entries, file)


def refused(folder: Path, what: str) -> None:
    with pytest.raises(CheckpointError, match=what) as error:
        load_portable(folder)
    assert "\n" not in str(error.value)


def test_the_stages_of_a_pipeline_are_joined_as_deepspeed_gives_them(tmp_path):
    expected = oracle.load(FOLDERS / "pipeline" / "states.pt")
    convert_checkpoint(FOLDERS / "pipeline", tmp_path / "out.pt", fsync=False, verify=True)
    for found in (
        load_portable(FOLDERS / "pipeline", whole=True),
        oracle.load(tmp_path / "out.pt"),
    ):
        assert found["module"].keys() == expected.keys()
        (group,) = found["optimizer"]["param_groups"]
        assert group["params"] == list(found["module"])
        for name, values in expected.items():
            assert found["module"][name].dtype == torch.float32
            assert torch.equal(found["module"][name], values["fp32"])
            state = found["optimizer"]["state"][name]
            assert state["step"] == 2
            assert all(torch.equal(state[key], values[key]) for key in STATES)


def is_as_told(found: Any, expected: Any, steps: int = 2) -> None:
    """The weights and states are those that deepspeed gives, by the names of its module."""
    assert found["module"].keys() == expected.keys() == found["optimizer"]["state"].keys()
    for name, values in expected.items():
        weight, state = found["module"][name], found["optimizer"]["state"][name]
        assert weight.dtype == torch.float32 and torch.equal(weight, values["fp32"])
        assert state["step"] == steps
        assert all(torch.equal(state[key], values[key]) for key in STATES)
    groups = [group["params"] for group in found["optimizer"]["param_groups"]]
    shapes = [{found["module"][name].ndim > 1 for name in group} for group in groups]
    assert shapes == [{True}, {False}] and {*groups[0], *groups[1]} == {*expected}


@pytest.mark.parametrize("name", ["tied", "tied_bf16", "fp16", "fp16_unfused"])
def test_tied_layers_and_stages_without_zero_are_what_deepspeed_has(name, tmp_path):
    """Under ZeRO 1; by the slices of the bf16 optimizer; by the values of fp16 layers, whose
    optimizer makes a step when it is made.
    """
    expected = oracle.load(FOLDERS / name / "states.pt", weights_only=False)
    convert_checkpoint(FOLDERS / name, tmp_path / "out.pt", fsync=False, verify=True)
    steps = 3 if "fp16" in name else 2
    is_as_told(load_portable(FOLDERS / name, whole=True), expected, steps)
    is_as_told(oracle.load(tmp_path / "out.pt"), expected, steps)


def test_layers_that_are_tied_are_told():
    with open_checkpoint(FOLDERS / "tied") as checkpoint:
        told = [note for note in checkpoint.notes if note.startswith("layer ")]
    assert told == [
        "layer 0 is tied_modules.word, which has its values",
        "layer 1 is tied_modules.norm, which has its values",
        "layer 3 is tied_modules.norm, which has its values",
    ]


def test_optimizers_that_number_their_parameters_number_those_of_all_stages(tmp_path):
    """As torch's own does of one model; their names are those of the order, where it is asked."""
    expected = oracle.load(FOLDERS / "fp32" / "states.pt", weights_only=False)
    found = load_portable(FOLDERS / "fp32", whole=True)
    assert {key: value["fp32"].tolist() for key, value in expected.items()} == {
        key: value.tolist() for key, value in found["module"].items()
    }
    decayed, others = [group["params"] for group in found["optimizer"]["param_groups"]]
    assert decayed + others == sorted(found["optimizer"]["state"]) == list(range(6))
    convert_checkpoint(FOLDERS / "fp32", tmp_path / "out.pt", fsync=False)
    convert_checkpoint(tmp_path / "out.pt", tmp_path / "named.pt", fsync=False, optimizer="names")
    is_as_told(oracle.load(tmp_path / "named.pt"), expected)


def test_tied_layers_without_zero_in_fp32_have_no_numbers():
    expected = oracle.load(FOLDERS / "tied_fp32" / "states.pt", weights_only=False)
    found = load_portable(FOLDERS / "tied_fp32", whole=True)
    assert "optimizer" not in found
    assert torch.equal(found["module"]["0.weight"], expected["tied_modules.word.weight"]["fp32"])
    with open_checkpoint(FOLDERS / "tied_fp32") as checkpoint:
        assert any(
            "layers 1 and 3 have the same values, so they" in note for note in checkpoint.notes
        )


def test_layers_that_are_cut_are_what_ds_to_universal_makes_of_them(tmp_path):
    expected = oracle.load(FOLDERS / "cut" / "states.pt", weights_only=False)
    convert_checkpoint(FOLDERS / "cut", tmp_path / "out.pt", fsync=False, verify=True)
    for found in (load_portable(FOLDERS / "cut", whole=True), oracle.load(tmp_path / "out.pt")):
        assert found["optimizer"]["state"].keys() == expected.keys()
        for key, values in expected.items():
            assert torch.equal(found["module"][key], values["fp32"])
            state = found["optimizer"]["state"][key]
            assert all(torch.equal(state[each], values[each]) for each in STATES)
        assert found["module"]["tied_modules.words.embed.weight"].shape == (10, 4)
        extra = found["module"].keys() - expected.keys()
        assert extra == {f"{at}.{key}" for at in (1, 2) for key in ("frozen_norm.weight", "scale")}


def test_a_pipeline_without_zero_is_its_layers(produced):
    found = load_portable(produced / "ds_pipeline", whole=True)
    for number in (0, 2):
        layer = oracle.load(produced / f"ds_pipeline/global_step0/layer_0{number}-model_states.pt")
        assert layer
        for key, value in layer.items():
            assert torch.equal(found["module"].pop(f"{number}.{key}"), value)
    assert not found["module"] and not found["optimizer"]["state"]  # it was saved at step 0
    assert found["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]


def test_the_number_of_a_layer_may_have_any_length(tmp_path):
    states = {"module": None, "global_steps": 1, "mp_world_size": 1}
    torch.save(states, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "layer_1234567-model_states.pt")
    with open_checkpoint(tmp_path) as opened:
        assert [key for key, _ in opened.tensors()] == ["module.1234567.weight"]


def test_experts_without_zero_are_the_weights_of_their_files(produced):
    folder = produced / "ds_moe" / "global_step0"
    found = load_portable(produced / "ds_moe")
    expected = oracle.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    for number in range(4):
        file = folder / f"layer_0_expert_{number}_mp_rank_00_model_states.pt"
        expected |= oracle.load(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_layer_that_is_missing_is_told(pipeline):
    (step(pipeline) / "layer_02-model_states.pt").unlink()
    refused(pipeline, r"2\.\w+: is a parameter of a stage, and no layer has it in that shape")


def test_without_zero_the_optimizers_tell_that_a_layer_is_missing(produced, tmp_path):
    folder = shutil.copytree(produced / "ds_pipeline", tmp_path / "made")
    (folder / "global_step0" / "layer_02-model_states.pt").unlink()
    refused(folder, "layers have 2 parameters, and the optimizers of its stages 4")


def test_in_fp16_the_optimizers_tell_that_a_layer_is_missing(tmp_path):
    folder = shutil.copytree(FOLDERS / "fp16", tmp_path / "fp16")
    (step(folder) / "layer_01-model_states.pt").unlink()
    refused(folder, "layers have 92 elements, and the optimizers of its stages 108")


LAYER = "layer_0{}-model_states.pt"
COPIED = [
    ("cut", ("layer_01-model_00-model_states.pt", "layer_02-model_00-model_states.pt"),
     "has the same values as layer [12], and others than its fp32 weights"),
    ("fp16", (LAYER.format(0), LAYER.format(1)), "as layer 1, and the optimizer has others"),
    ("fp16_unfused", (LAYER.format(0), LAYER.format(1)), "layer 1, and the optimizer has others"),
    ("tied", (LAYER.format(2), LAYER.format(5)), "and no layer has it in that shape"),
    ("tied_bf16", (LAYER.format(2), LAYER.format(5)), "elements, and no layer has it so"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "files", "what"), COPIED)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_layer_that_was_copied_over_another_is_refused(name, files, what, is_first, tmp_path):
    folder = shutil.copytree(FOLDERS / name, tmp_path / name)
    one, other = (step(folder) / file for file in (files if is_first else files[::-1]))
    zero.nameless(one, other)
    refused(folder, what)
    shutil.copy(one, other)
    refused(folder, f"{other.stem}.*: was saved as {one.name}: one was copied over the other")


def test_layers_of_which_nothing_is_trained_are_told_by_the_names_in_them(tmp_path):
    """A pipeline without any states of an optimizer, whose first two layers have equal shapes."""
    folder = tmp_path / "global_step1"
    folder.mkdir()
    layers = [torch.randn(4, 4) for _ in range(3)]
    for at, weight in enumerate(layers):
        torch.save({"weight": weight}, folder / LAYER.format(at))
    torch.save({"module": None, "mp_world_size": 1}, folder / "mp_rank_00_model_states.pt")
    found = load_portable(folder)
    assert all(torch.equal(found[f"{at}.weight"], value) for at, value in enumerate(layers))
    one, other = (folder / LAYER.format(at) for at in range(2))
    exchanged(one, other)
    refused(folder, f"{one.stem}.*: was saved as {other.name}: one was copied over the other, or")
    exchanged(one, other)
    load_portable(folder)
    shutil.copy(one, other)
    refused(folder, f"{other.stem}.*: was saved as {one.name}")


def exchanged(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def test_in_fp32_layers_of_one_value_are_told(tmp_path):
    """They may be tied, or one file a copy: nothing tells."""
    folder = shutil.copytree(FOLDERS / "fp32", tmp_path / "fp32")
    zero.nameless(step(folder) / LAYER.format(0), step(folder) / LAYER.format(1))
    with open_checkpoint(folder) as checkpoint:
        (told,) = [note for note in checkpoint.notes if "layers 0 and 1" in note]
    assert "so they are tied, or one was copied over the other" in told
    assert "optimizer" not in load_portable(folder, whole=True)


def test_in_fp16_a_state_of_another_size_than_its_weights_is_refused(tmp_path):
    folder = shutil.copytree(FOLDERS / "fp16", tmp_path / "fp16")
    file = step(folder) / "mp_rank_00_model_states.pt"
    root = torch.load(file, weights_only=False)
    state = root["optimizer"]["optimizer_state_dict"]["state"][0]
    state["exp_avg"] = torch.cat([state["exp_avg"].flatten(), torch.zeros(1)])
    torch.save(root, file)
    refused(folder, "exp_avg.* has [0-9]+ elements beside weights of")


def test_in_fp16_values_that_no_layer_has_leave_the_states_out(tmp_path):
    folder = shutil.copytree(FOLDERS / "fp16", tmp_path / "fp16")
    changed(step(folder) / "layer_01-model_states.pt", bias=torch.randn(8).half())
    found = load_portable(folder, whole=True)
    assert "optimizer" not in found and found["module"]["0.weight"].dtype == torch.float16
    with open_checkpoint(folder) as checkpoint:
        assert any("no file says which parameters" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mp_rank_01_model_states.pt", "is of a stage without model states"),
        ("mp_rank_00_model_states.pt", "has the model states of 1 stages, and not of the first"),
        ("bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt", "those of rank 1 are missing"),
    ],
)
def test_a_rank_that_is_missing_is_told(pipeline, name, what):
    (step(pipeline) / name).unlink()
    refused(pipeline, what)


def test_a_stage_without_its_states_is_told(pipeline):
    for file in step(pipeline).glob("*mp_rank_01_optim_states.pt"):
        file.unlink()
    refused(pipeline, "some stages have optimizer states, and others have none")


def test_more_stages_than_there_are_files_of_are_told(pipeline):
    changed(step(pipeline) / "mp_rank_00_model_states.pt", mp_world_size=3)
    refused(pipeline, "has the model states of 2 stages, but 3 wrote it")


def test_stages_of_different_steps_are_told(pipeline):
    changed(step(pipeline) / "mp_rank_01_model_states.pt", global_steps=1)
    refused(pipeline, "global_steps: is 2 in stage 0, and 1 in stage 1")


def test_layers_that_are_cut_into_more_parts_than_there_are_are_refused(pipeline):
    changed(
        step(pipeline) / "mp_rank_00_model_states.pt",
        checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": 2},
    )
    refused(pipeline, "whose layers are cut .tensor parallelism..*ds_to_universal")


def test_layers_that_are_cut_need_all_their_files(tmp_path):
    cut = shutil.copytree(FOLDERS / "cut", tmp_path / "cut")
    model = step(cut) / "mp_rank_00_model_states.pt"
    before = model.read_bytes()
    changed(model, universal_checkpoint_info=None)
    refused(cut, "and its model states have no universal_checkpoint_info")
    model.write_bytes(before)
    changed(model, mp_world_size=8)
    refused(cut, "has the model states of 2 stages x 2, but 8 wrote it")
    model.write_bytes(before)
    (step(cut) / "layer_01-model_01-model_states.pt").unlink()
    refused(cut, "layer 1: does not have the files of all 2 tensor-parallel ranks")


@pytest.fixture
def tied(tmp_path) -> Path:
    """A copy of tied layers under ZeRO 1 that a test may break."""
    return shutil.copytree(FOLDERS / "tied", tmp_path / "tied")


def test_a_tied_layer_whose_file_has_other_values_is_refused(tied):
    changed(step(tied) / "layer_00-model_states.pt", weight=torch.randn(8, 6).bfloat16())
    refused(tied, "layer 0: has the keys and shapes of tied_modules.word, and other values")


def test_what_a_rank_of_another_stage_saved_is_refused_where_layers_are_tied(tied):
    first, other = (f"bf16_zero_pp_rank_1_mp_rank_0{at}_optim_states.pt" for at in (0, 1))
    zero.nameless(step(tied) / first, step(tied) / other)
    refused(tied, "says that it holds other parameters than rank 1 has")


def test_a_tied_layer_that_differs_between_stages_is_refused_unless_it_is_told(tied):
    """What deepspeed takes then is what the first stage has."""
    expected = load_portable(tied)["tied_modules.norm.bias"]
    for file in step(tied).glob("*mp_rank_01_optim_states.pt"):
        root, states = of_rank(file)
        states["single_partition_of_fp32_groups"][1].data += 1
        torch.save(root, file)
    refused(tied, "is of a tied layer, and differs in stage 1; universal_checkpoint_info does not")
    model = step(tied) / "mp_rank_00_model_states.pt"
    same = {"pipeline_replicated_parameter_patterns": [r"tied_modules\.norm\..*"]}
    changed(model, universal_checkpoint_info=same)
    assert torch.equal(load_portable(tied)["tied_modules.norm.bias"], expected)


def test_an_expert_that_is_missing_is_told(produced, tmp_path):
    folder = shutil.copytree(produced / "ds_moe", tmp_path / "made")
    file = folder / "global_step0" / "layer_0_expert_2_mp_rank_00_model_states.pt"
    twice = oracle.load(file)
    file.unlink()
    refused(folder, "layer 0: has 3 experts in files, and the model states say 4")
    torch.save({}, file)
    refused(folder, "layer 0, expert 2: has no values, or some that another file has too")
    torch.save(twice, file.with_name("layer_0_expert_1_mp_rank_00_model_states.pt"))
    torch.save(twice, file)
    refused(folder, "layer 0, expert 2: has no values, or some that another file has too")


# ------------------------------------------------------------------------- tensor-parallel ranks


@pytest.fixture
def tensor(tmp_path) -> Path:
    """A copy of two tensor-parallel ranks under ZeRO 1 that a test may break."""
    return shutil.copytree(FOLDERS / "tensor", tmp_path / "tensor")


@pytest.mark.parametrize("name", ["tensor", "tensor3"])
def test_tensor_parallel_ranks_are_what_ds_to_universal_makes_of_them(name, tmp_path):
    expected = oracle.load(FOLDERS / name / "states.pt", weights_only=False)
    convert_checkpoint(FOLDERS / name, tmp_path / "out.pt", fsync=False, verify=True)
    for found in (load_portable(FOLDERS / name, whole=True), oracle.load(tmp_path / "out.pt")):
        trained = {key for key, values in expected.items() if "exp_avg" in values}
        assert found["optimizer"]["state"].keys() == trained
        assert found["module"].keys() >= {*expected, "frozen_norm.weight", "scale"}
        for key in trained:
            weight, state = found["module"][key], found["optimizer"]["state"][key]
            assert torch.equal(weight, expected[key]["fp32"])
            assert all(torch.equal(state[each], expected[key][each]) for each in STATES)
            assert state["step"] == 2
        assert found["module"]["embed.weight"].shape == (10, 4)
        assert "universal_checkpoint_info" not in found and "mp_world_size" not in found


def test_tensor_parallel_ranks_without_zero_are_weights_alone(tmp_path):
    info = {
        "tp_replicated_parameter_patterns": ["norm"],
        "parameter_with_row_parallelism_patterns": ["dense"],
    }
    whole = {"norm": torch.randn(4), "dense": torch.randn(4, 8), "up": torch.randn(6, 4)}
    (tmp_path / "global_step1").mkdir()
    for rank in range(2):
        cut = {"dense": whole["dense"].chunk(2, 1)[rank], "up": whole["up"].chunk(2)[rank]}
        module = {key: value.clone() for key, value in {**whole, **cut}.items()}
        optimizer = {"state": {0: {"exp_avg": torch.randn(3)}}, "param_groups": [{"params": [0]}]}
        states = {"module": module, "mp_world_size": 2, "universal_checkpoint_info": info}
        file = tmp_path / "global_step1" / f"mp_rank_0{rank}_model_states.pt"
        torch.save({**states, "param_shapes": None, "optimizer": optimizer}, file)
    found = load_portable(tmp_path, whole=True)
    assert found.keys() == {"module"} and found["module"].keys() == whole.keys()
    assert all(torch.equal(found["module"][key], value) for key, value in whole.items())
    with open_checkpoint(tmp_path) as checkpoint:
        assert any("states are left out: each rank numbers" in note for note in checkpoint.notes)


def test_parameters_that_are_to_be_averaged_are_their_mean(tmp_path):
    ranks = [torch.randn(3, 2), torch.randn(3, 2)]
    info = {"parameter_to_average_patterns": ["norm", "same"]}
    (tmp_path / "global_step1").mkdir()

    def save(rank: int, norm: torch.Tensor) -> None:
        module = {"norm": norm, "same": ranks[0].bfloat16()}
        states = {"module": module, "mp_world_size": 2, "universal_checkpoint_info": info}
        file = tmp_path / "global_step1" / f"mp_rank_0{rank}_model_states.pt"
        torch.save({**states, "param_shapes": None, "optimizer": None}, file)

    for rank in range(2):
        save(rank, ranks[rank])
    found = load_portable(tmp_path)
    assert torch.equal(found["norm"], torch.stack(ranks).mean(0))
    assert torch.equal(found["same"], ranks[0].bfloat16())
    for other in (ranks[1][:2].clone(), ranks[1].double()):
        save(1, other)
        refused(tmp_path, "norm: has another shape in another rank")


def told(folder: Path, **entries: Any) -> None:
    """Change what the model states of the first rank say of how parameters were cut."""
    file = step(folder) / "mp_rank_00_model_states.pt"
    said = torch.load(file, weights_only=False)["universal_checkpoint_info"]
    changed(file, universal_checkpoint_info={**said, **entries})


NORMS = r".*norm\.weight"
UNTOLD: list[tuple[dict[str, Any], str]] = [
    ({"tp_replicated_parameter_patterns": [NORMS]}, "dense.bias: is the same in all"),
    ({"tp_replicated_parameter_patterns": [NORMS, "router"]}, "differs between the ranks"),
    (
        {"tp_replicated_parameter_patterns": [NORMS, r"dense\.bias", "none"]},
        "no parameter matches: 'none'",
    ),
    ({"tp_replicated_parameter_patterns": [NORMS, ".*norm"]}, "matches several patterns"),
    ({"tp_replicated_parameter_patterns": ["(a+)+$"]}, "has a pattern that is not read"),
    ({"tp_replicated_parameter_patterns": ["a*a*a*a*b"]}, "has a pattern that is not read"),
    ({"tp_replicated_parameter_patterns": "norm"}, "is not a list of patterns"),
    ({"universal_checkpoint_version": 0.4}, "qkv.weight: .*does not say how wide"),
    (
        {
            "universal_checkpoint_version": 0.4,
            "sub_param_shard_widths": {r"qkv\.weight": [[4, 4], [2, 2], [1, 1]]},
        },
        r"qkv.weight: has 8 rows or columns in rank 0, and is to have \[4, 2, 1\]",
    ),
    ({"original_vocab_size": 13}, "embed.weight: does not have the rows"),
    ({"autotp_unsupported_parameter_patterns": {"qkv": "uneven"}}, "qkv: is cut in a way"),
]


@pytest.mark.parametrize(("entries", "what"), UNTOLD)
def test_what_does_not_say_how_parameters_were_cut_is_refused(entries, what, tensor):
    told(tensor, **entries)
    refused(tensor, what)


def test_widths_of_parts_are_those_that_are_told(tensor):
    """Since version 0.4; here the same as before."""
    widths = {r"qkv\.weight": [[4, 4], [2, 2], [2, 2]]}
    told(tensor, universal_checkpoint_version=0.4, sub_param_shard_widths=widths)
    expected = oracle.load(FOLDERS / "tensor" / "states.pt", weights_only=False)
    assert torch.equal(load_portable(tensor)["qkv.weight"], expected["qkv.weight"]["fp32"])


def test_tensor_parallel_ranks_that_are_missing_are_told(tensor):
    model = step(tensor) / "mp_rank_00_model_states.pt"
    before = model.read_bytes()
    changed(model, universal_checkpoint_info=None)
    refused(tensor, "of 2 ranks .mp_rank_XX. of DeepSpeed, and its model states have no universal")
    model.write_bytes(before)
    changed(model, mp_world_size=4)
    refused(tensor, "has the files of 2 tensor-parallel ranks, but 4 wrote it")
    model.write_bytes(before)
    (step(tensor) / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    refused(tensor, "has the optimizer states of 1 rank, but 2 wrote it")
    for file in step(tensor).glob("*mp_rank_01_*"):
        file.rename(file.with_name(file.name.replace("mp_rank_01", "mp_rank_02")))
    refused(tensor, "has no files of the tensor-parallel rank 1")


@pytest.fixture
def joined(tmp_path) -> Iterator[Callable[..., Any]]:
    """Joins the trees of ranks, of which each says how parameters were cut; its keywords say it."""
    with contextlib.ExitStack() as opened:

        def join(*ranks: dict[str, Any], **said: Any) -> Any:
            roots = []
            for number, rank in enumerate(ranks):
                path = tmp_path / f"{number}.pt"
                tree = {"mp_world_size": len(ranks), "universal_checkpoint_info": said, **rank}
                torch.save(tree, path)
                roots.append(opened.enter_context(open_checkpoint(path)).root)
            return joined_trees(roots)

        yield join


SAME = "tp_replicated_parameter_patterns"
PARTS = "parameter_with_sub_params"
CUT = torch.arange(12.0).reshape(4, 3)


def both(one: Any, other: Any, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two ranks with a value each of the parameter w."""
    return {"module": {"w": one}, **more}, {"module": {"w": other}, **more}


def states(params: Any = "w", **state: Any) -> dict[str, Any]:
    """An optimizer that goes by names."""
    return {"optimizer": {"state": {"w": state}, "param_groups": [{"params": [params]}]}}


ONE, OTHER = both(CUT, CUT + 1)
MISFITS = {
    "more patterns than are tried": (
        (ONE, OTHER), {SAME: [f"x{n}.*" for n in range(101)]}, "has more than .* patterns",
    ),
    "a longer name than patterns are tried on": (
        ({"module": {"w" * 501: CUT}},) * 2, {SAME: ["w.*"]}, "is a longer name than patterns",
    ),
    "columns of a vector": (
        both(CUT[0], CUT[1]), {"parameter_with_row_parallelism_patterns": ["w"]},
        "does not have the dimension that it was cut in",
    ),
    "other dimensions in another rank": (
        both(CUT, CUT[0]), {}, "does not have the dimension that it was cut in",
    ),
    "parts of fewer dimensions": (
        (ONE, OTHER), {PARTS: [{"patterns": ["w"], "shape": [3], "partition_dim": 0}]},
        "w: has other dimensions than",
    ),
    "parts along a dimension that is not there": (
        (ONE, OTHER), {PARTS: [{"patterns": ["w"], "shape": [3, 4], "partition_dim": 2}]},
        "w: has other dimensions than",
    ),
    "more parts than rows": (
        (ONE, OTHER), {PARTS: [{"patterns": ["w"], "shape": [9, 3], "partition_dim": 0}]},
        "w: is several parameters, and",
    ),
    "a parameter of one rank": (
        (ONE, {"module": {"w": CUT, "x": CUT}}), {},
        "module.x: is in one of the tensor-parallel ranks 0 and 1 only",
    ),
    "a buffer that differs": (
        both(CUT, CUT + 1, buffer_names=["w"]), {}, "w: is a buffer that differs between ranks",
    ),
    "an optimizer of one rank": (
        (ONE | states(step=1), OTHER), {}, "optimizer: is in some tensor-parallel ranks only",
    ),
    "other parameters": (
        (ONE | states(step=1), OTHER | states("x", step=1)), {},
        "has other parameters in another tensor-parallel rank",
    ),
    "other states": (
        (ONE | states(step=1), OTHER | states(step=1, x=2)), {},
        "optimizer.state.w.x: is in one of the tensor-parallel ranks",
    ),
    "another step": (
        (ONE | states(step=1), OTHER | states(step=2)), {}, "w.step: differs between the tensor-",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_tensor_parallel_ranks_that_do_not_fit_together_are_refused(case, joined):
    ranks, said, what = MISFITS[case]
    with pytest.raises(CheckpointError, match=what):
        joined(*ranks, **said)


@pytest.mark.parametrize("pattern", ["^w$", "^.$", "^w.*$", r"^\w$"])
def test_a_pattern_from_end_to_end_is_tried_as_python_does(pattern, joined):
    assert re.match(pattern, "w")
    items, _ = joined(*both(CUT, CUT), **{SAME: [pattern]})
    ((_, ref),) = dict(items)["module"].pairs
    assert ref.shape == CUT.shape


def test_a_number_of_parts_is_that_of_equal_ones(joined):
    """q, k and v of six rows each, of which each rank has three."""
    whole = torch.randn(18, 2)
    ranks = [torch.cat([part.chunk(2)[rank] for part in whole.chunk(3)]) for rank in range(2)]
    said = {PARTS: [{"patterns": ["w"], "shape": (3, 2), "partition_dim": 0}]}
    items, _ = joined(*both(*ranks), **said)
    ((_, ref),) = dict(items)["module"].pairs
    assert b"".join(map(bytes, iter_chunks(ref))) == whole.numpy().tobytes()


# ------------------------------------------------------------------------------- experts under ZeRO


@pytest.fixture
def experts(tmp_path) -> Path:
    """A copy of the experts under ZeRO 2 that a test may break."""
    return shutil.copytree(FOLDERS / "experts", tmp_path / "experts")


def trained_with(folder: Path) -> dict[str, torch.Tensor]:
    """What the module and the files of experts hold: the weights in bfloat16."""
    found = dict(
        oracle.load(step(folder) / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    )
    for file in sorted(step(folder).glob("layer_*_expert_*.pt")):
        found |= oracle.load(file)
    return found


def test_experts_of_zero_have_the_numbers_that_they_have_among_all(tmp_path):
    """Each rank has two of the four under the numbers 0 and 1, and half of their elements."""
    convert_checkpoint(FOLDERS / "experts", tmp_path / "out.pt", fsync=False, verify=True)
    found, expected = oracle.load(tmp_path / "out.pt"), trained_with(FOLDERS / "experts")
    assert found["module"].keys() == expected.keys() == found["optimizer"]["state"].keys()
    for name, value in expected.items():
        joined = found["module"][name]
        assert joined.dtype == torch.float32 and torch.equal(joined.bfloat16(), value)
    dense, of_experts = found["optimizer"]["param_groups"]
    assert {name for name in expected if "experts" in name} == set(of_experts["params"])
    assert {name for name in expected if "experts" not in name} == set(dense["params"])


class Stub:
    """Stands in for the classes of deepspeed that a rank's file names."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Stub if module.startswith("deepspeed") else super().find_class(module, name)


def of_rank(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank of ZeRO 2 saved, without objects of deepspeed, and its optimizer's part of it."""
    reader = SimpleNamespace(__name__="reader", Unpickler=Unpickler)
    root = torch.load(file, weights_only=False, pickle_module=reader)
    states = root["optimizer_state_dict"]
    del states["loss_scaler"], states["param_slice_mappings"]
    states["zero_stage"] = 2
    return root, states


def test_the_states_of_experts_lie_as_their_weights(experts):
    """Weights are put where the states are: then what is read of the states is the weights."""
    for file in step(experts).glob("*optim_states.pt"):
        root, states = of_rank(file)
        for number, weights in enumerate(states["single_partition_of_fp32_groups"]):
            states["base_optimizer_state"]["state"][number]["exp_avg"][: len(weights)] = weights
        torch.save(root, file)
    found = load_portable(experts, whole=True)
    assert len(found["optimizer"]["state"]) == len(found["module"])
    for name, state in found["optimizer"]["state"].items():
        assert torch.equal(state["exp_avg"], found["module"][name])


def test_experts_that_do_not_fit_are_refused(experts):
    model = step(experts) / "mp_rank_00_model_states.pt"
    before = model.read_bytes()
    changed(model, num_experts=[8])
    refused(experts, "layer 0: has 4 experts in files, and the model states say 8")
    model.write_bytes(before)
    changed(model, ds_config={"use_data_before_expert_parallelism": True})
    refused(experts, "group 1: its groups are spread over different numbers of ranks")
    model.write_bytes(before)
    dense, local = torch.load(model, weights_only=False)["param_shapes"]
    moved = {name.replace("experts.0.", "experts.5."): shape for name, shape in local.items()}
    changed(model, param_shapes=[dense, moved])
    refused(experts, "deepspeed_experts.: does not have the experts of a rank from 0 on")
    changed(
        model, param_shapes=[dense, {f"x{at}": shape for at, shape in enumerate(local.values())}]
    )
    refused(experts, "group 1.x0: its groups are spread over")


def test_ranks_that_differ_in_their_counts_are_refused(experts):
    file = step(experts) / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    root, states = of_rank(file)
    states["partition_count"] = [4, 1]
    torch.save(root, file)
    refused(experts, "its ranks differ in ZeRO stage, number of groups or number of ranks")
    states["partition_count"] = [4, 2, 2]
    torch.save(root, file)
    refused(experts, "partition_count: does not have one number for each group")


# ------------------------------------------------------------------------ experts without ZeRO


WITHOUT_ZERO = ["experts_plain", "experts_fp16", "experts_flat"]


@pytest.fixture
def sets(request, tmp_path) -> Path:
    """A copy of experts without ZeRO that a test may break."""
    name = getattr(request, "param", "experts_plain")
    return shutil.copytree(FOLDERS / name, tmp_path / name)


def states_of(folder: Path, number: int) -> Path:
    return step(folder) / f"expp_rank_{number}_mp_rank_00_optim_states.pt"


def notes_of(folder: Path) -> str:
    with open_checkpoint(folder) as checkpoint:
        return "\n".join(checkpoint.notes)


@pytest.mark.parametrize("name", WITHOUT_ZERO)
def test_states_of_experts_without_zero_are_those_of_the_optimizers_of_all_ranks(name, tmp_path):
    """Two layers of experts of one shape, in two groups or one; in fp16 the optimizer has the
    weights in float32, in a group end to end where it is one that deepspeed knows (flat).
    """
    expected = oracle.load(FOLDERS / name / "states.pt")
    convert_checkpoint(FOLDERS / name, tmp_path / "out.pt", fsync=False, verify=True)
    for found in (load_portable(FOLDERS / name, whole=True), oracle.load(tmp_path / "out.pt")):
        states = found["optimizer"]["state"]
        assert states.keys() == expected.keys()
        for key, values in expected.items():
            own = dict(states[key])
            weight = found["module"][key]
            master = own.pop("fp32_param", weight)
            assert torch.equal(master, values["fp32"])
            assert torch.equal(weight, master.to(weight.dtype))
            assert own.keys() == {*STATES, "step"}
            assert all(torch.equal(value, values[each]) for each, value in own.items())
        params = [name for group in found["optimizer"]["param_groups"] for name in group["params"]]
        assert sorted(params) == sorted(expected)
        assert [group.get("moe", False) for group in found["optimizer"]["param_groups"]] == (
            [False, True] if name == "experts_flat" else [False, False, True, True]
        )
        assert found.get("cur_scale") == (None if name == "experts_plain" else 16)


def test_the_optimizer_of_a_set_of_experts_that_is_missing_is_told(sets):
    kept = states_of(sets, 1).read_bytes()
    states_of(sets, 1).unlink()
    refused(sets, "says that there are 2 sets of experts, and 1 have states")
    states_of(sets, 0).rename(states_of(sets, 1))
    refused(sets, "has the optimizer states of 1 rank, but 2 wrote it; those of rank 0")
    states_of(sets, 1).write_bytes(kept)
    zero.nameless(states_of(sets, 1), states_of(sets, 0))
    refused(sets, "has the same of each tensor as")
    for number in range(2):
        states_of(sets, number).unlink()
    assert load_portable(sets, whole=True).keys() >= {"module"}
    assert "no optimizer's states are saved with them" in notes_of(sets)


def test_optimizers_of_sets_that_differ_are_refused(sets):
    root = torch.load(states_of(sets, 1))
    for state in root["optimizer"]["state"].values():
        state["step"] += 1
    torch.save(root, states_of(sets, 1))
    refused(sets, "param_groups.0.step: is 2 on rank 0 and 3 on rank 1")
    root = torch.load(states_of(FOLDERS / sets.name, 1))
    root["optimizer"]["param_groups"][1]["params"].append(20)
    torch.save(root, states_of(sets, 1))
    refused(sets, "param_groups.1: does not have as many parameters in all files")
    del root["optimizer"]["param_groups"][3]
    torch.save(root, states_of(sets, 1))
    refused(sets, "param_groups: do not all have as many groups")


def test_states_of_groups_that_do_not_say_that_they_are_of_experts_are_left_out(sets):
    for number in range(2):
        root = torch.load(states_of(sets, number))
        for group in root["optimizer"]["param_groups"]:
            group.pop("moe", None)
        torch.save(root, states_of(sets, number))
    assert load_portable(sets).keys() >= {"a.weight"}
    told = "the optimizer's states are left out: optimizer.param_groups no group says that"
    assert told in notes_of(sets)


def test_states_of_two_groups_either_of_which_may_have_an_expert_are_left_out(sets):
    """As deepspeed makes groups of a size that it was told: the first expert, and the others."""
    for number in range(2):
        root = torch.load(states_of(sets, number))
        groups = root["optimizer"]["param_groups"]
        both = zip(groups[2]["params"], groups[3]["params"], strict=True)
        every = [at for pair in both for at in pair]
        groups[2]["params"], groups[3]["params"] = every[:4], every[4:]
        torch.save(root, states_of(sets, number))
    assert "optimizer" not in load_portable(sets, whole=True)
    assert "do not tell which number n.deepspeed_moe.experts" in notes_of(sets)


@pytest.mark.parametrize("sets", ["experts_flat"], indirect=True)
def test_flat_groups_of_which_no_file_says_the_parameters_are_left_out(sets):
    for number in range(2):
        root = torch.load(states_of(sets, number))
        optimizer = root["optimizer"]
        optimizer["fp32_groups_flat"][0] = optimizer["fp32_groups_flat"][0][:-1].clone()
        torch.save(root, states_of(sets, number))
    assert "group 0.fp32_param has 126 elements, and its parameters have 127" in notes_of(sets)
    for number in range(2):
        root = torch.load(states_of(sets, number))
        inner = root["optimizer"]["optimizer_state_dict"]
        inner["param_groups"].append({**inner["param_groups"][0], "params": [2]})
        root["optimizer"]["fp32_groups_flat"].append(torch.zeros(1))
        torch.save(root, states_of(sets, number))
    assert "no file says which parameters are in each of its flat groups" in notes_of(sets)


@pytest.mark.parametrize("sets", ["experts_flat"], indirect=True)
def test_flat_groups_of_several_tensors_are_refused(sets):
    for number in range(2):
        root = torch.load(states_of(sets, number))
        root["optimizer"]["optimizer_state_dict"]["param_groups"][0]["params"] = [0, 7]
        torch.save(root, states_of(sets, number))
    refused(sets, "fp32_groups_flat: does not have one tensor for each group")


# ------------------------------------------------------------------------- experts under ZeRO 3


def test_experts_under_zero_3_are_refused_by_name(experts, tmp_path):
    """DeepSpeed trains none of its own layers so (`_validate_zero3_moe_compatibility`); what it
    saves of AutoEP says how groups are spread, or how layers were cut.
    """
    model = step(experts) / "mp_rank_00_model_states.pt"
    model.rename(model.with_name("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    refused(experts, "is ZeRO 3 with experts of DeepSpeed, which is not read")
    folder = shutil.copytree(DATA / "deepspeed" / "stage3", tmp_path / "stage3")
    model = step(folder) / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    changed(model, num_experts=[4], ds_autoep_layers=[{"moe_layer_id": 0}])
    refused(folder, "is an expert-parallel checkpoint without its experts .* which is not read")
    for file in step(folder).glob("*optim_states.pt"):
        reader = SimpleNamespace(__name__="reader", Unpickler=Unpickler)
        root = torch.load(file, weights_only=False, pickle_module=reader)
        states = root["optimizer_state_dict"]
        del states["loss_scaler"]
        states["zero_stage"], states["ds_zero_partition_groups"] = 3, [{"sub_group": 0}]
        torch.save(root, file)
    refused(folder, "ds_zero_partition_groups: is ZeRO 3 with experts .AutoEP. of DeepSpeed, which")


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        (("fp32_groups", 0), 5, "optimizer.fp32_groups: does not have a weight for each parameter"),
        (("fp32_groups", 0, 0), 5, "state.a.weight.fp32_param does not have the shape"),
        (
            ("optimizer_state_dict", "state", 0, "exp_avg"),
            torch.zeros(2),
            "state.a.weight.exp_avg does not have the shape",
        ),
        (("optimizer_state_dict", "state", 77), {}, "state.77: is of a parameter in none of the"),
        (("optimizer_state_dict", "param_groups"), 5, "optimizer holds no states of a torch"),
    ],
)
@pytest.mark.parametrize("sets", ["experts_fp16"], indirect=True)
def test_what_is_not_as_the_optimizers_write_it_is_refused_or_left_out(place, value, what, sets):
    for number in range(2):
        root = torch.load(states_of(sets, number))
        node = root["optimizer"]
        for key in place[:-1]:
            node = node[key]
        node[place[-1]] = value
        torch.save(root, states_of(sets, number))
    if ":" in what:
        refused(sets, what)
    else:
        assert what in notes_of(sets) and "optimizer" not in load_portable(sets, whole=True)


def test_without_a_list_of_buffers_shapes_tell_the_parameters_or_states_are_left_out(tmp_path):
    for name in WITHOUT_ZERO:
        folder = shutil.copytree(FOLDERS / name, tmp_path / name)
        changed(step(folder) / "mp_rank_00_model_states.pt", buffer_names=5)
        found = load_portable(folder, whole=True)
        if name == "experts_flat":
            assert "optimizer" not in found
            assert "has 127 elements, and its parameters have 129" in notes_of(folder)
        else:
            expected = oracle.load(folder / "states.pt")
            assert found["optimizer"]["state"].keys() == expected.keys()
