"""The optimizer's states of ZeRO folders: what deepspeed's own ds_to_universal gives of them is
what ckptconv gives; and what the ranks contradict each other in is told.

The folders of tests/data/deepspeed were made by deepspeed 0.19.8 (make_deepspeed.py beside them);
`zero` writes the same layout with torch alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptconv import CheckpointError, convert_checkpoint, load_portable, open_checkpoint
from helpers import oracle, zero
from helpers.examples import examples
from helpers.paths import DATA
from helpers.program import run

FOLDERS = DATA / "deepspeed"
CASES = sorted(file.parent.name for file in FOLDERS.glob("*/states.pt"))
BY_GRADIENT = ["stage1_momentum", "stage2_muon"]
ADAM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp_avg": lambda value: value * 2 + 1,
    "exp_avg_sq": lambda value: value.double() + 0.5,
}


def wanted(name: str) -> dict[str, dict[str, Any]]:
    """What deepspeed gives of the optimizer of a folder, by parameter."""
    found: dict[str, dict[str, Any]] = oracle.load(FOLDERS / name / "states.pt")
    return found


def same(found: Any, expected: Any) -> None:
    """The same parameters, names, types and bits."""
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert found[name].keys() >= state.keys(), name
        for key, value in state.items():
            assert (found[name][key].dtype, found[name][key].shape) == (value.dtype, value.shape)
            assert oracle.value_bytes(found[name][key]) == oracle.value_bytes(value), (name, key)


# ----------------------------------------------------------------------------- what deepspeed gives


@pytest.mark.parametrize("name", [name for name in CASES if name not in BY_GRADIENT])
def test_the_states_are_those_that_deepspeed_gives(name, tmp_path):
    found = load_portable(FOLDERS / name, whole=True)
    same(found["optimizer"]["state"], wanted(name))
    names = [name for group in found["optimizer"]["param_groups"] for name in group["params"]]
    assert len(names) == len(set(names)) and set(names) == wanted(name).keys() <= set(
        found["module"]
    )
    convert_checkpoint(FOLDERS / name, tmp_path / "out.pt", fsync=False, verify=True)
    same(oracle.load(tmp_path / "out.pt")["optimizer"]["state"], wanted(name))


@pytest.mark.parametrize("gone", [("param_shapes", "shared_params"), ("shared_params",)])
def test_what_the_model_states_of_older_releases_do_not_say(gone, tmp_path):
    """The bf16 optimizer says which parameters a rank has, and tied ones are one storage."""
    folder = shutil.copytree(FOLDERS / "stage1_bf16", tmp_path / "made")
    file = folder / "global_step1" / "mp_rank_00_model_states.pt"
    states = torch.load(file, weights_only=False)
    torch.save({key: value for key, value in states.items() if key not in gone}, file)
    found = load_portable(folder, whole=True)
    same(found["optimizer"]["state"], wanted("stage1_bf16"))
    expected = oracle.load(FOLDERS / "stage1_bf16" / "fp32.pt")
    assert found["module"].keys() == expected.keys()
    assert all(torch.equal(found["module"][name], value) for name, value in expected.items())
    module = found["module"]
    assert module["head.weight"].data_ptr() == module["embed.weight"].data_ptr()


def test_shapes_of_older_releases_that_contradict_the_ranks_are_refused(tmp_path):
    folder = shutil.copytree(FOLDERS / "stage1_bf16", tmp_path / "made")
    file = folder / "global_step1" / "mp_rank_00_model_states.pt"
    states = torch.load(file, weights_only=False)
    states["module"]["embed.weight"] = torch.zeros(6, 5)
    torch.save({**states, "param_shapes": None}, file)
    with pytest.raises(
        CheckpointError, match=r"embed\.weight: has 35 elements, and the model states"
    ):
        load_portable(folder)


def notes_of(folder: Path) -> str:
    with open_checkpoint(folder) as checkpoint:
        return "\n".join(checkpoint.notes)


@pytest.mark.parametrize("folder", [*FOLDERS.iterdir(), *(DATA / "deepspeed_parallel").iterdir()])
def test_what_deepspeed_saved_is_of_one_step(folder):
    """Its fp16 optimizers without ZeRO count one more."""
    assert "of different steps" not in notes_of(folder)


@pytest.mark.parametrize("name", ["stage1", "stage2", "stage3"])
@pytest.mark.parametrize("steps", [0, 1000])
def test_model_states_of_another_step_are_told(name, steps, tmp_path):
    folder = shutil.copytree(FOLDERS / name, tmp_path / "made")
    step = folder / (folder / "latest").read_text().strip()
    for file in step.glob("*model_states.pt"):
        states = torch.load(file, weights_only=False)
        done = states["global_steps"]
        torch.save({**states, "global_steps": 5 + steps, "skipped_steps": 5 - done}, file)
    told = f"has done {done} steps, and the model states say that it was {steps + done}: their"
    assert (told in notes_of(folder)) is (steps > 0)


@pytest.mark.parametrize("name", BY_GRADIENT)
def test_what_other_optimizers_keep_is_what_they_must_keep_of_the_gradient(name):
    """Muon's partitions of stages 1 and 2 hold whole parameters. (bfloat16 sums in another
    order.)
    """
    found = load_portable(FOLDERS / name, whole=True)["optimizer"]["state"]
    assert found.keys() == wanted(name).keys()
    for parameter, state in wanted(name).items():
        for key, value in state.items():
            kept = found[parameter][key]
            assert kept.shape == value.shape
            torch.testing.assert_close(kept.float(), value.float(), rtol=0.05, atol=1e-6)


def test_groups_keep_their_hyperparameters_and_what_is_beside_is_kept(tmp_path):
    convert_checkpoint(FOLDERS / "stage2", tmp_path / "out.pt", fsync=False)
    found = oracle.load(tmp_path / "out.pt")
    decayed, others = found["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (decayed["params"], others["params"]) == (
        ["embed.weight", "conv.weight"],
        ["scale", "conv.bias"],
    )
    assert list(decayed)[-1] == "params"
    assert (found["loss_scaler"], found["overflow"]) == (
        {"cur_scale": 1.0, "dynamic": False},
        False,
    )


def test_no_two_parameters_share_a_step(tmp_path):
    """torch counts on in it, once for each parameter."""
    convert_checkpoint(FOLDERS / "stage2", tmp_path / "out.pt", fsync=False)
    for found in (load_portable(FOLDERS / "stage2", whole=True), oracle.load(tmp_path / "out.pt")):
        steps = [state["step"] for state in found["optimizer"]["state"].values()]
        assert len({step.data_ptr() for step in steps}) == len(steps) > 1


def test_a_torch_optimizer_takes_the_states():
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    found = load_portable(FOLDERS / "stage3", whole=True)
    model = torch.nn.Module()
    for name, value in found["module"].items():
        holder = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, torch.nn.Module())
            holder = holder.get_submodule(part)
        if name in wanted("stage3"):
            holder.register_parameter(last, torch.nn.Parameter(value.clone()))
    optimizer = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, optimizer, found["optimizer"])
    for name, parameter in model.named_parameters():
        same({name: optimizer.state[parameter]}, {name: wanted("stage3")[name]})


def test_safetensors_has_the_weights_alone_and_a_torch_output_can_have_them(tmp_path):
    convert_checkpoint(FOLDERS / "stage3", tmp_path / "out.safetensors", tied="duplicate")
    written = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert written.keys() == load_portable(FOLDERS / "stage3").keys()
    done = run("convert", FOLDERS / "stage3", "out.pt", "--only", "module", cwd=tmp_path)
    assert done.exit == 0 and oracle.load(tmp_path / "out.pt").keys() == written.keys()
    done = run("convert", FOLDERS / "stage3", "all.pt", cwd=tmp_path)
    assert "the fp32 weights and the optimizer's states are joined from 2 ranks\n" in done.err


# ------------------------------------------------------------------- any sizes, any ranks, by torch

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(
    deadline=None,
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    stage=st.sampled_from([1, 2, 3]),
    ranks=st.integers(1, 5),
    shapes=st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=3),
    lean=st.booleans(),
)
def test_states_of_any_size_come_back_from_any_number_of_ranks(
    tmp_path, stage, ranks, shapes, lean
):
    groups = [
        {f"{number}.{at}": torch.rand(shape) for at, shape in enumerate(group)}
        for number, group in enumerate(shapes)
    ]
    folder = zero.write(tmp_path / "zero", stage, ranks, groups, lean=lean, kept=ADAM)
    found = load_portable(folder, whole=True)["optimizer"]
    for group, told in zip(groups, found["param_groups"], strict=True):
        assert told["params"] == list(group)
        for name, value in group.items():
            state = found["state"][name]
            assert state["step"] == 3.0
            same({name: state}, {name: {key: make(value) for key, make in ADAM.items()}})
    assert [group["lr"] for group in found["param_groups"]] == [
        number + 1.0 for number in range(len(groups))
    ]


# -------------------------------------------------------------------------- what cannot be believed


@pytest.fixture(params=[2, 3])
def made(request, tmp_path) -> Path:
    groups = [{"a": torch.rand(3, 4), "b": torch.rand(5)}, {"c": torch.rand(2, 2)}]
    return zero.write(tmp_path / "zero", request.param, 3, groups, kept=ADAM)


def changed(folder: Path, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Write what a rank says anew, with a change of its optimizer."""
    file = folder / zero.TAG / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    root = torch.load(file)
    states = root["optimizer_state_dict"]
    base = states.get("base_optimizer_state", states.get("optimizer_state_dict"))
    change({"states": states, **base})
    torch.save(root, file)


def refused(folder: Path, what: str) -> None:
    with pytest.raises(CheckpointError, match=what) as error:
        load_portable(folder)
    assert "\n" not in str(error.value)


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(root: Any) -> None:
        *before, last = path
        for key in before:
            root = root[key]
        root[last] = value

    return change


CONTRADICTIONS = {
    "a state that only one rank has": (
        put("state", 0, "extra", value=torch.rand(3)),
        r"group 0.extra: rank 0 and rank 1 do not both have it",
    ),
    "another step": (put("state", 0, "step", value=4), "group 0.step: its ranks do not hold"),
    "another step in a tensor": (
        put("state", 0, "step", value=torch.tensor(4.0)),
        "group 0.step: is 3 on rank 0 and 4 on rank 1",
    ),
    "another rate of its schedule": (
        put("param_groups", 1, "lr", value=0.5),
        r"param_groups.1.lr: is 2 on rank 0 and 0\.5 on rank 1",
    ),
    "text for a tensor": (put("state", 1, "exp_avg", value="x"), "group 1.exp_avg: its ranks"),
    "another type": (
        put("state", 1, "exp_avg", value=torch.zeros(2, dtype=torch.int64)),
        "int64|its parameters take",
    ),
    "a state of no partition": (
        put("state", 7, value={}),
        "state: has a state for a partition that is none of its 2",
    ),
    "a negative partition": (put("state", -1, value={}), "none of its 2"),
    "a group of no partition": (
        put("param_groups", 0, "params", value=[5]),
        "param_groups: a group names parameters other than the 2 partitions",
    ),
    "a group of text": (put("param_groups", 0, "params", value=["a"]), "a group names parameters"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_ranks_that_contradict_each_other_are_refused(made, kind):
    change, what = CONTRADICTIONS[kind]
    changed(made, 1, change)
    refused(made, what)


@pytest.mark.parametrize("made", [2], indirect=True)
def test_elastic_states_of_fewer_groups_than_the_weights_are_refused(made):
    for rank in range(3):
        changed(made, rank, put("states", "base_optimizer_state", value=[{}]))
    refused(made, "has states of 1 groups, and weights of 2")


def test_paddings_that_are_no_sizes_are_refused(tmp_path):
    groups = [{"a": torch.rand(3, 4)}]
    for value in (7, [-1], [0, 0], ["x"], [1 << 70]):
        folder = zero.write(tmp_path / "zero", 2, 2, groups, kept=ADAM)
        changed(folder, 1, put("states", "group_paddings", value=value))
        refused(folder, "group_paddings: does not have one size for each group")


def test_one_rank_without_states_is_refused(made):
    def without(root: dict[str, Any]) -> None:
        root["states"].pop("base_optimizer_state", None)
        root["states"].pop("optimizer_state_dict", None)

    changed(made, 2, without)
    refused(made, "rank 2 has no optimizer states, and others have some")


def test_states_that_do_not_lie_as_the_weights_are_left_out_with_a_note(made):
    for rank in range(3):
        changed(made, rank, put("state", 0, "absmax", value=torch.rand(77)))
    with open_checkpoint(made) as checkpoint:
        assert any("states are left out: group 0.absmax has 77" in x for x in checkpoint.notes)
        assert "optimizer" not in {key.partition(".")[0] for key, _ in checkpoint.tensors()}
    assert load_portable(made).keys() == {"a", "b", "c"}


def test_an_optimizer_that_has_not_stepped_has_groups_and_no_states(made):
    for rank in range(3):
        changed(made, rank, lambda root: root["state"].clear())
    found = load_portable(made, whole=True)["optimizer"]
    assert found["state"] == {}
    assert [group["params"] for group in found["param_groups"]] == [["a", "b"], ["c"]]


def test_elastic_states_of_older_releases(tmp_path):
    groups = [{"a": torch.rand(3, 4), "b": torch.rand(5)}, {"c": torch.rand(2, 2)}]
    folder = zero.write(tmp_path / "zero", 2, 3, groups, kept=ADAM)
    for rank in range(3):

        def elastic(root: dict[str, Any]) -> None:
            states = root["states"]
            for state in root["state"].values():
                del state["step"]
            states["base_optimizer_state"] = list(root["state"].values())
            states["base_optimizer_state_step"] = 3

        changed(folder, rank, elastic)
    found = load_portable(folder, whole=True)["optimizer"]
    for group in groups:
        for name, value in group.items():
            assert found["state"][name].pop("step") == 3
            same(
                {name: found["state"][name]},
                {name: {key: make(value) for key, make in ADAM.items()}},
            )
    assert [group["params"] for group in found["param_groups"]] == [["a", "b"], ["c"]]


@pytest.mark.trust
@settings(
    deadline=None,
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(["stage2", "stage3"]), at=st.integers(0, 1 << 20), by=st.integers(1, 255)
)
def test_a_damaged_rank_is_an_error_or_the_states_are_right(tmp_path, name, at, by):
    folder = tmp_path / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FOLDERS / name, folder)
    file = sorted(folder.glob("global_step2/*optim_states.pt"))[1]
    raw = bytearray(file.read_bytes())
    raw[at % len(raw)] ^= by
    file.write_bytes(raw)
    try:
        convert_checkpoint(folder, tmp_path / "out.pt", fsync=False, force=True, unknown="drop")
    except CheckpointError:
        return
    found = oracle.load(tmp_path / "out.pt")
    if "optimizer" in found:
        same(found["optimizer"]["state"], wanted(name))
