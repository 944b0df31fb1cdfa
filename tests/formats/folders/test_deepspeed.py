"""DeepSpeed folders: what its own zero_to_fp32 gives is what ckptconv gives, without deepspeed; and
what is missing is told.

The folders of tests/data/deepspeed were made by deepspeed 0.19.8 (make_deepspeed.py beside them);
`zero` writes the same layout with torch alone, for sizes and ranks that hypothesis draws.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptconv import CheckpointError, convert_checkpoint, load_into, load_portable, open_checkpoint
from ckptconv.support.errors import (
    AmbiguousStateDict,
    LimitExceeded,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
)
from ckptconv.support.limits import DEFAULTS
from helpers import oracle, zero
from helpers.examples import examples
from helpers.paths import DATA
from helpers.program import assert_one_error, idle_rss, run, run_process

FOLDERS = DATA / "deepspeed"
CASES = sorted(folder.name for folder in FOLDERS.iterdir())
JOINED = [name for name in CASES if name != "stage0"]
PRODUCED = oracle.corpus_folder().parent / "produced"
QUICK = {"fsync": False, "verify": True}


BY_NAME = ["stage1_momentum", "stage2_muon"]
"""Cases of which deepspeed was asked for each parameter, in an order of its own."""


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names in the same order, dtypes, shapes and bits."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert oracle.value_bytes(found[name]) == oracle.value_bytes(tensor), name


def consolidated(folder: Path, tag: str | None = None) -> dict[str, torch.Tensor]:
    """What zero_to_fp32 made of a case."""
    return oracle.load(folder / ("fp32.pt" if tag is None else f"fp32_{tag}.pt"))


@pytest.fixture
def case(request, tmp_path) -> Path:
    """A copy of a folder of tests/data/deepspeed that a test may break."""
    return shutil.copytree(FOLDERS / request.param, tmp_path / request.param)


breaking = pytest.mark.parametrize("case", ["stage2", "stage3"], indirect=True)


# ----------------------------------------------------------------------------- what deepspeed gives


@pytest.mark.parametrize("name", [name for name in JOINED if name != "stage1"])
def test_the_weights_are_those_that_zero_to_fp32_gives(name, tmp_path):
    expected = consolidated(FOLDERS / name)
    if name in BY_NAME:
        expected = {key: expected[key] for key in load_portable(FOLDERS / name)}
        assert len(expected) == len(consolidated(FOLDERS / name))
    same(load_portable(FOLDERS / name), expected)
    same(load_portable(FOLDERS / name, mmap=False), expected)
    convert_checkpoint(FOLDERS / name, tmp_path / "out.pt", **QUICK)
    same(oracle.load(tmp_path / "out.pt")["module"], expected)
    convert_checkpoint(FOLDERS / name, tmp_path / "out.safetensors", tied="duplicate", **QUICK)
    written = safetensors.torch.load_file(tmp_path / "out.safetensors")
    same({key: written[key] for key in expected}, expected)
    assert written.keys() == expected.keys()


def test_frozen_parameters_of_stage_1_which_zero_to_fp32_leaves_out_come_from_the_model_states():
    expected, found = consolidated(FOLDERS / "stage1"), load_portable(FOLDERS / "stage1")
    model = oracle.load(
        FOLDERS / "stage1" / "global_step1" / "mp_rank_00_model_states.pt", weights_only=False
    )["module"]
    assert found.keys() - expected.keys() == {"conv.weight"}
    same({key: found[key] for key in expected}, expected)
    assert torch.equal(found["conv.weight"], model["conv.weight"].float())
    with open_checkpoint(FOLDERS / "stage1") as checkpoint:
        assert any("conv.weight" in note for note in checkpoint.notes)


def test_stage_0_is_what_its_model_states_are(tmp_path):
    model = oracle.load(
        FOLDERS / "stage0" / "global_step1" / "mp_rank_00_model_states.pt", weights_only=False
    )["module"]
    same(load_portable(FOLDERS / "stage0"), model)


@pytest.mark.parametrize("name", JOINED)
def test_tied_parameters_stay_tied(name, tmp_path):
    convert_checkpoint(FOLDERS / name, tmp_path / "out.pt", **QUICK)
    for found in (load_portable(FOLDERS / name), oracle.load(tmp_path / "out.pt")["module"]):
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    convert_checkpoint(FOLDERS / name, tmp_path / "out.safetensors", **QUICK)
    header, _ = oracle.safetensors_header(tmp_path / "out.safetensors")
    assert header["__metadata__"]["head.weight"] == "embed.weight"


@pytest.mark.parametrize("name", JOINED)
def test_other_parameters_share_no_storage(name, tmp_path):
    """A partition is one storage, but a file of views of it would drag all along with each."""
    convert_checkpoint(FOLDERS / name, tmp_path / "out.pt", **QUICK)
    found = oracle.load(tmp_path / "out.pt")["module"]
    del found["head.weight"]
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(found)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())


@pytest.mark.parametrize("name", ["stage2", "stage3"])
def test_a_torch_output_keeps_the_rest_of_the_training_state(name, tmp_path):
    convert_checkpoint(FOLDERS / name, tmp_path / "out.pt", **QUICK)
    found = oracle.load(tmp_path / "out.pt")
    model = next((FOLDERS / name / "global_step2").glob("*mp_rank_00_model_states.pt"))
    before = oracle.load(model, weights_only=False)
    gone = {
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "buffer_names",
    }
    beside = {"loss_scaler", "dynamic_loss_scale", "overflow"}
    beside |= {"clip_grad"} if name == "stage2" else set()
    assert found.keys() == before.keys() - gone | beside
    assert (found["epoch"], found["global_steps"], found["ds_config"]) == (
        3,
        2,
        before["ds_config"],
    )
    assert found["module"]._metadata == before["module"]._metadata


@pytest.mark.parametrize("name", ["stage2", "stage3"])
def test_the_joined_weights_can_be_sharded_and_cast(name, tmp_path):
    expected = consolidated(FOLDERS / name)
    convert_checkpoint(
        FOLDERS / name, tmp_path / "shards", max_shard_size=150, tied="duplicate", **QUICK
    )
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    found = load_portable(tmp_path / "shards")
    same({key: found[key] for key in expected}, expected)
    convert_checkpoint(
        FOLDERS / name, tmp_path / "out.safetensors", dtype="bf16", tied="duplicate", **QUICK
    )
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    same({key: found[key] for key in expected}, {
        key: value.bfloat16() if value.is_floating_point() else value for key,
        value in expected.items()
    })  # fmt: skip


def test_a_damaged_partition_is_noticed(tmp_path):
    folder = shutil.copytree(FOLDERS / "stage2", tmp_path / "stage2")
    files = (folder / "global_step2").glob("*optim_states.pt")
    values = oracle.value_bytes(consolidated(folder)["conv.weight"])[:16]
    file, raw = next(
        (file, bytearray(raw)) for file in files if values in (raw := file.read_bytes())
    )
    raw[raw.find(values) + 5] ^= 1
    file.write_bytes(raw)
    with pytest.raises(MalformedCheckpoint, match="CRC-32") as caught:
        convert_checkpoint(folder, tmp_path / "out.safetensors")
    assert caught.value.path == str(file)
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        load_portable(folder, mmap=False)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["ds_z2", "ds_z3"])
def test_folders_of_another_maker(name, tmp_path):
    if not (PRODUCED / name).is_dir():
        pytest.skip("the folder of produced checkpoints is not here")
    expected = safetensors.torch.load_file(PRODUCED / f"{name}_out" / "model.safetensors")
    convert_checkpoint(PRODUCED / name, tmp_path / "out.safetensors", **QUICK)
    written = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert written.keys() == expected.keys()
    same({key: written[key] for key in expected}, expected)


# -------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("name", ["stage2", "stage3"])
def test_a_tag_picks_another_step(name, tmp_path):
    expected = consolidated(FOLDERS / name, "global_step1")
    assert not torch.equal(expected["conv.bias"], consolidated(FOLDERS / name)["conv.bias"])
    same(load_portable(FOLDERS / name, tag="global_step1"), expected)
    convert_checkpoint(FOLDERS / name, tmp_path / "out.pt", tag="global_step1", **QUICK)
    same(oracle.load(tmp_path / "out.pt")["module"], expected)
    same(load_portable(FOLDERS / name / "global_step1"), expected)


def test_a_model_is_filled_from_a_step():
    model = torch.nn.Module()
    model.conv = torch.nn.Conv1d(5, 3, 3)
    result = load_into(model, FOLDERS / "stage3", tag="global_step1", strict=False)
    assert result.missing_keys == ()
    assert torch.equal(
        model.conv.weight, consolidated(FOLDERS / "stage3", "global_step1")["conv.weight"]
    )


def test_the_other_steps_are_named():
    with open_checkpoint(FOLDERS / "stage3") as checkpoint:
        assert any("global_step1" in note and "--tag" in note for note in checkpoint.notes)


@breaking
def test_without_latest_one_step_is_read_and_several_are_a_choice(case):
    expected, first = consolidated(case), consolidated(case, "global_step1")
    for file in ("latest", "fp32.pt", "fp32_global_step1.pt", "states.pt"):
        (case / file).unlink()
    with pytest.raises(
        AmbiguousStateDict, match="holds 2 checkpoints but no file says which one to read"
    ) as caught:
        open_checkpoint(case)
    assert "--tag: global_step1, global_step2" in str(caught.value)
    same(load_portable(case, tag="global_step1"), first)
    shutil.rmtree(case / "global_step1")
    same(load_portable(case), expected)
    torch.save(expected, case / "another.pt")
    with pytest.raises(
        AmbiguousStateDict, match=r"holds 2 checkpoints .* --tag: global_step2, another\.pt"
    ):
        open_checkpoint(case)


@breaking
@pytest.mark.parametrize(
    "name",
    ["../stage", "/etc", "global_step1/..", "", ".", "a\\b", "c:x", "global_step1\0", "x" * 256],
)
@pytest.mark.parametrize("given_by", ["latest", "tag"])
def test_a_tag_that_leads_elsewhere_is_refused(case, name, given_by):
    if given_by == "latest":
        (case / "latest").write_text(name)
    with pytest.raises(CheckpointError, match=r"is not a plain folder name|tag='' is not a name"):
        open_checkpoint(case, tag=name if given_by == "tag" else None)


@breaking
def test_a_step_that_is_not_here_is_told_with_those_that_are(case):
    (case / "latest").write_text("global_step9\n")
    with pytest.raises(
        MalformedCheckpoint, match="latest: names the step 'global_step9', which is not here"
    ) as caught:
        open_checkpoint(case)
    assert "--tag: global_step1, global_step2" in str(caught.value)
    with pytest.raises(MalformedCheckpoint, match="--tag: there is no step 'x'"):
        open_checkpoint(case, tag="x")
    with pytest.raises(UnsupportedCheckpoint, match="is the folder of one step"):
        open_checkpoint(case / "global_step1", tag="global_step2")


@breaking
def test_beside_weights_of_hugging_face_a_tag_asks_for_the_step(case):
    """As the Trainer leaves it: its own weights, the step, latest."""
    safetensors.torch.save_file({"w": torch.rand(2)}, case / "model.safetensors")
    assert load_portable(case).keys() == {"w"}
    same(load_portable(case, tag="global_step2"), consolidated(case))


@breaking
def test_links_may_lead_within_the_folder_and_to_the_blobs_of_a_cache_but_not_elsewhere(
    case, tmp_path
):
    step = case / "global_step2"
    for file in step.iterdir():
        file.rename(case / file.name)
        file.symlink_to(f"../{file.name}")
    same(load_portable(case), consolidated(case))
    snapshot = tmp_path / "snapshots" / "1234"
    (snapshot / step.name).mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for file in step.iterdir():
        (case / file.name).rename(tmp_path / "blobs" / file.name)
        (snapshot / step.name / file.name).symlink_to(f"../../../blobs/{file.name}")
        file.unlink()
        file.symlink_to(tmp_path / "blobs" / file.name)
    same(load_portable(snapshot), consolidated(case))
    refused(case, "is a link that leads out of the folder")
    refused(step, "is a link that leads out of the folder")


# ---------------------------------------------------------------------------------- what is missing


def refused(folder: Path, what: str, error: type[CheckpointError] = MalformedCheckpoint) -> None:
    """Both the folder and that of its last step are refused, and nothing is written."""
    out = folder.parent / "out.pt"
    with pytest.raises(error, match=what):
        convert_checkpoint(folder, out)
    assert not out.exists()


@breaking
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank(case, rank):
    (case / "global_step2" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    refused(
        case,
        rf"has the optimizer states of 1 rank, but 2 wrote it; those of rank {rank} are missing",
    )


@breaking
def test_a_rank_too_many(case):
    step = case / "global_step2"
    zero.nameless(
        step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        step / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt",
    )
    refused(case, "of 3 ranks, but 2 wrote it")


@breaking
def test_two_files_of_one_rank(case):
    step = case / "global_step2"
    shutil.copy(
        step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        step / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    )
    refused(case, "two files are of rank 1")


@breaking
def test_missing_model_states(case):
    for file in (case / "global_step2").glob("*mp_rank_00_model_states.pt"):
        file.unlink()
    refused(case, "the model states of ZeRO stage [23] are missing")


@breaking
def test_missing_optimizer_states(case):
    for file in (case / "global_step2").glob("*optim_states.pt"):
        file.unlink()
    refused(case, "the optimizer states, which hold the .*, are missing")


def test_model_states_of_the_other_ranks_are_asked_for_only_where_they_hold_frozen_parameters(
    tmp_path,
):
    for name in ("stage3", "stage3_frozen"):
        folder = shutil.copytree(FOLDERS / name, tmp_path / name)
        step = folder / (folder / "latest").read_text()
        (step / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    same(load_portable(tmp_path / "stage3"), consolidated(FOLDERS / "stage3"))
    refused(
        tmp_path / "stage3_frozen",
        "has the model states of 2 ranks, but 3 wrote it; those of rank 1 are missing",
    )


@pytest.mark.parametrize("case", ["stage2"], indirect=True)
def test_layouts_that_are_not_read_are_named(case):
    (case / "global_step2" / "layer_0_expert_1_mp_rank_01_model_states.pt").write_bytes(b"")
    refused(case, "is a.* expert-parallel.*which is not read", UnsupportedCheckpoint)


def changed(file: Path, change: Any) -> None:
    """Load a file of a case with torch, let `change` change the tree, and save it again."""
    root = oracle.load(file, weights_only=False)
    change(root)
    torch.save(root, file)


def optim(case: Path, rank: int = 0) -> Path:
    return case / "global_step1" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.fixture(params=[2, 3])
def made(request, tmp_path) -> Path:
    """A folder of stage 2 or 3, of 2 ranks, of plain values only, that a test may change with
    torch.
    """
    groups = [{"a": torch.rand(3, 5), "b": torch.rand(7)}, {"c": torch.rand(2)}]
    return zero.write(tmp_path / "zero", request.param, 2, groups)


def model(made: Path) -> Path:
    return min((made / "global_step1").glob("*mp_rank_00_model_states.pt"))


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ([{"a": torch.Size([3, 5]), "b": torch.Size([70])}, {"c": torch.Size([2])}], "b: needs"),
        (
            [{"a": torch.Size([3, 5])}, {"c": torch.Size([2])}],
            "parameters take .* elements, but its partitions have",
        ),
        ([{"a": torch.Size([3, 5]), "b": torch.Size([7])}], "parameters"),
        (
            [{"a": torch.Size([3, 5]), "b": "seven"}, {"c": torch.Size([2])}],
            "param_shapes.b: is not a shape",
        ),
        (
            [{"a": (3, -5), "b": torch.Size([7])}, {"c": torch.Size([2])}],
            "param_shapes.a: is not a shape",
        ),
        (
            [{"a": (3, True), "b": torch.Size([7])}, {"c": torch.Size([2])}],
            "param_shapes.a: is not a shape",
        ),
        (
            [{"a": (0, 1 << 40, 1 << 40), "b": torch.Size([7])}, {}],
            "is not a possible shape of a tensor",
        ),
        ([{7: torch.Size([3, 5])}, {"c": torch.Size([2])}], "by something other than text"),
        (
            [{"a": (3, 10**5000), "b": torch.Size([7])}, {"c": torch.Size([2])}],
            "param_shapes.a: is not a shape",
        ),
        ([{"a": torch.Size([3, 5]), "b": torch.Size([7, 1 << 60])}, {"c": torch.Size([2])}], "b: "),
        ([], "parameters"),
        ("a", "param_shapes: is not a dict of shapes"),
        ([[1, 2], {}], "param_shapes: is not a dict of shapes"),
    ],
)
def test_shapes_that_do_not_fit_the_partitions(made, shapes, what):
    changed(model(made), lambda root: root.update(param_shapes=shapes))
    refused(made, what)


def test_a_shape_of_too_many_dimensions_is_beyond_a_limit(made):
    changed(
        model(made),
        lambda root: root.update(param_shapes=[{"a": (1,) * 129, "b": torch.Size([7])}, {}]),
    )
    refused(
        made, "param_shapes.a: has 129 dimensions, beyond the limit dimensions=128", LimitExceeded
    )


@pytest.mark.parametrize(
    ("states", "what"),
    [
        ({"partition_count": 0}, "is not a number of ranks"),
        ({"partition_count": "two"}, "is not a number of ranks"),
        ({"partition_count": []}, "is not a number of ranks"),
        ({"partition_count": 10**5000}, "is not a number of ranks"),
        ({"partition_count": [2, 1]}, "expert parallelism"),
        ({"zero_stage": 4}, "no fp32 partitions of a known ZeRO stage"),
        ({"zero_stage": "x"}, "no fp32 partitions of a known ZeRO stage"),
        (
            {"fp32_flat_groups": [1], "single_partition_of_fp32_groups": [1]},
            "a partition is not a flat tensor",
        ),
        (
            {"fp32_flat_groups": [], "single_partition_of_fp32_groups": []},
            "differ in ZeRO stage, number of groups",
        ),
        ({"fp32_flat_groups": 1, "single_partition_of_fp32_groups": 1}, "no fp32 partitions"),
    ],
)
def test_optimizer_states_that_are_none(made, states, what):
    changed(optim(made), lambda root: root["optimizer_state_dict"].update(states))
    refused(made, what, CheckpointError)


@pytest.mark.parametrize(
    "partition", [torch.rand(2, 10), torch.rand(20)[::2], torch.rand(20).double(), torch.rand(99)]
)
def test_partitions_of_another_kind(made, partition):
    def change(root: Any) -> None:
        states = root["optimizer_state_dict"]
        key = (
            "fp32_flat_groups"
            if "fp32_flat_groups" in states
            else "single_partition_of_fp32_groups"
        )
        states[key] = [partition, *states[key][1:]]

    changed(optim(made, 1), change)
    refused(made, "is not a flat tensor|is not one contiguous|its partitions are|elements")


@pytest.mark.parametrize("made", [2], indirect=True)
@pytest.mark.parametrize(
    "paddings", [[[0]], [[0, 0]], [[0, -1], [0]], 3, [[0, "x"], [0]], [0, 0], [[10**5000, 0], [0]]]
)
def test_alignment_paddings_that_do_not_fit(made, paddings):
    changed(
        optim(made),
        lambda root: root["optimizer_state_dict"].update(param_alignment_paddings=paddings),
    )
    refused(made, "param_alignment_paddings")


@pytest.mark.parametrize(
    "entry",
    [{"mp_world_size": 2}, {"ds_autoep_layers": [{"checkpoint_format": "zero3_partitioned"}]}],
)
def test_parts_of_a_tensor_are_never_taken_for_the_whole(made, entry):
    changed(model(made), lambda root: root.update(entry))
    refused(made, "parallel", UnsupportedCheckpoint)


@pytest.mark.parametrize("made", [2, 3], indirect=True)
def test_without_the_names_of_the_parameters_only_model_states_that_are_whole_are_taken(made):
    changed(model(made), lambda root: root.update(param_shapes=None))
    if "zero_pp_rank" in model(made).name:
        refused(made, "param_shapes: names no parameters of its partitions")
    else:
        assert {value.dtype for value in load_portable(made).values()} == {torch.bfloat16}
        with open_checkpoint(made) as checkpoint:
            told = "the optimizer's states are left out: no param_shapes name"
            assert any(told in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (
            {"frozen_param_shapes": {"f": torch.Size([3])}},
            "f: a frozen parameter has a shape, but no values",
        ),
        (
            {
                "frozen_param_shapes": {"f": torch.Size([3])},
                "frozen_param_fragments": {"f": torch.ones(4)},
            },
            "f: ",
        ),
        (
            {"frozen_param_shapes": {"f": torch.Size([3])}, "frozen_param_fragments": {"f": 3}},
            "f: ",
        ),
    ],
)
def test_frozen_parameters_that_do_not_fit(made, entry, what):
    for file in (made / "global_step1").glob("*model_states.pt"):
        changed(file, lambda root: root.update(entry))
    refused(made, what)


def test_odd_entries_of_the_model_states_do_no_harm(made):
    odd = {
        "shared_params": {"x": "nowhere", 3: 4},
        "buffer_names": 7,
        "frozen_param_shapes": [],
        (1, 2): 3,
        None: torch.rand(2),
    }
    changed(model(made), lambda root: root.update(odd))
    found = load_portable(made, only="module")
    assert found.keys() == {"a", "b", "c"}


@pytest.mark.parametrize("root", [7, {}, {"module": {}}, {"module": 3}, [torch.rand(2)]])
def test_files_of_something_else_under_the_right_names(made, root):
    for file in (model(made), optim(made, 1)):
        before = file.read_bytes()
        torch.save(root, file)
        refused(made, "holds no|is not a checkpoint|is a text file", CheckpointError)
        file.write_bytes(b"no checkpoint")
        refused(made, "holds no|is not a checkpoint|is a text file", CheckpointError)
        file.write_bytes(before)
    assert load_portable(made).keys() == {"a", "b", "c"}


def test_a_folder_of_something_else_is_none(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedCheckpoint, match="is a folder without a checkpoint in it"):
        open_checkpoint(tmp_path)


def test_the_model_states_of_one_rank_of_stage_3_are_not_taken_for_weights(tmp_path):
    step = FOLDERS / "stage3" / "global_step2"
    with pytest.raises(UnsupportedCheckpoint, match=r"one rank of ZeRO stage 3.*name its folder"):
        convert_checkpoint(step / "zero_pp_rank_1_mp_rank_00_model_states.pt", tmp_path / "out.pt")
    shutil.copy(
        FOLDERS / "stage3" / "fp32.pt", tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    )
    same(
        load_portable(tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        consolidated(FOLDERS / "stage3"),
    )


@pytest.mark.trust
@settings(
    deadline=None,
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(["stage2", "stage3_frozen"]),
    at=st.integers(0, 1 << 20),
    by=st.integers(0, 255),
    index=st.integers(0, 20),
)
def test_a_damaged_file_is_an_error_or_the_weights_are_right(tmp_path, name, at, by, index):
    folder = tmp_path / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FOLDERS / name, folder)
    files = sorted((folder / (folder / "latest").read_text()).iterdir())
    file = files[index % len(files)]
    raw = bytearray(file.read_bytes())
    raw[at % len(raw)] ^= by
    file.write_bytes(raw if by else raw[: at % len(raw)])
    try:
        convert_checkpoint(folder, tmp_path / "out.pt", fsync=False, force=True, unknown="drop")
    except CheckpointError:
        return
    same(oracle.load(tmp_path / "out.pt")["module"], consolidated(FOLDERS / name))


# -------------------------------------------------------------------------------------- the program


def test_the_program_reads_the_step_that_tag_names(tmp_path):
    done = run(
        "convert",
        FOLDERS / "stage3",
        "out.safetensors",
        "--tag",
        "global_step1",
        "--tied",
        "duplicate",
        cwd=tmp_path,
    )
    assert done.exit == 0, done.err
    written = safetensors.torch.load_file(tmp_path / "out.safetensors")
    same(
        written, {name: consolidated(FOLDERS / "stage3", "global_step1")[name] for name in written}
    )
    assert (
        run("inspect", FOLDERS / "stage3", "--tag", "global_step1", "--json", cwd=tmp_path).json()[
            "format"
        ]
        == "DeepSpeed ZeRO-3"
    )
    line = assert_one_error(run("inspect", FOLDERS / "stage3", "--tag", "../x", cwd=tmp_path))
    assert "--tag: '../x' is not a plain folder name" in line


@pytest.mark.trust
@pytest.mark.parametrize("stage", [2, 3])
def test_memory_does_not_grow_with_the_folder(tmp_path, stage):
    groups = [{f"{index}.weight": torch.rand(1001, 1001) for index in range(16)}]
    folder = zero.write(
        tmp_path / "zero", stage, 3, groups, frozen={"frozen": torch.rand(4000, 4000).bfloat16()}
    )
    done = run_process("convert", folder, "out.safetensors", "--no-fsync", cwd=tmp_path)
    assert done.exit == 0, done.err
    assert (tmp_path / "out.safetensors").stat().st_size > 90_000_000
    assert done.rss < idle_rss() + 40_000_000


# ------------------------------------------------------------------- any sizes, any ranks, by torch

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
GROUPS = st.lists(st.lists(SHAPES, max_size=5), min_size=1, max_size=3)


def drawn(groups: list[list[tuple[int, ...]]]) -> list[dict[str, torch.Tensor]]:
    """Parameters of these shapes, with values that are all different."""
    made, count = [], 0
    for number, shapes in enumerate(groups):
        made.append({})
        for index, shape in enumerate(shapes):
            numel = torch.Size(shape).numel()
            made[-1][f"group{number}.{index}.weight"] = torch.arange(
                count, count + numel, dtype=torch.float32
            ).view(shape)
            count += numel
    return made


@settings(
    deadline=None,
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    stage=st.sampled_from([1, 2, 3]),
    ranks=st.integers(1, 7),
    shapes=GROUPS,
    lean=st.booleans(),
    old=st.booleans(),
)
def test_parameters_of_any_size_come_back_from_any_number_of_ranks(
    tmp_path, stage, ranks, shapes, lean, old
):
    groups = drawn(shapes)
    expected = OrderedDict((name, value) for group in groups for name, value in group.items())
    folder = zero.write(
        tmp_path / "zero",
        stage,
        ranks,
        groups,
        lean=lean,
        one_dict=old and (stage == 3 or len(groups) == 1),
    )
    if not expected:
        return
    same(load_portable(folder, only="module"), expected)
    if any(value.numel() for value in expected.values()):
        convert_checkpoint(folder, tmp_path / "out.safetensors", force=True, **QUICK)
        written = safetensors.torch.load_file(tmp_path / "out.safetensors")
        same({name: written[name] for name in expected}, expected)
    convert_checkpoint(folder, tmp_path / "out.pt", force=True, **QUICK)
    same(oracle.load(tmp_path / "out.pt")["module"], expected)


@settings(
    deadline=None,
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    stage=st.sampled_from([2, 3]), ranks=st.integers(1, 5),
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]),
)  # fmt: skip
def test_buffers_become_float32_and_frozen_parameters_keep_their_dtype(
    tmp_path, stage, ranks, shapes, dtype
):
    frozen = {f"frozen.{index}": torch.rand(shape).to(dtype) for index, shape in enumerate(shapes)}
    values = [torch.rand(shape).to(dtype) for shape in shapes]
    turned = [value.mT if value.ndim > 1 else value for value in values]
    buffers = {f"buffer.{index}": value for index, value in enumerate(turned)}
    buffers["count"] = torch.tensor(1 << 40)
    folder = zero.write(
        tmp_path / "zero", stage, ranks, [{"weight": torch.rand(3)}], frozen=frozen, buffers=buffers
    )
    found = load_portable(folder)
    expected = {
        name: value.float() if value.is_floating_point() else value
        for name, value in buffers.items()
    } | frozen
    assert found.pop("weight").shape == (3,)
    same(found, expected)


def test_a_parameter_is_in_at_most_three_boxes_of_each_rank(tmp_path):
    folder = zero.write(tmp_path / "zero", 3, 64, [{"weight": torch.rand(1000, 333)}])
    with open_checkpoint(folder) as checkpoint:
        (_, ref), *_ = checkpoint.state_dict().tensors()
        assert 64 <= len(ref.pieces) <= 64 * 3


@pytest.mark.trust
@pytest.mark.parametrize("ranks", [30, 200])
def test_files_are_few_at_a_time_and_all_closed_in_the_end(tmp_path, ranks):
    value = torch.rand(101, 33)
    folder = zero.write(
        tmp_path / "zero", 3, ranks, [{"weight": value}], frozen={"bias": torch.rand(7)}
    )
    before = descriptors()
    with open_checkpoint(folder) as checkpoint:
        assert len(descriptors()) <= len(before) + 2 + min(2 * ranks, DEFAULTS.open_files)
        assert len(list(checkpoint.tensors())) == 2
    assert torch.equal(load_portable(folder)["weight"], value)
    (folder / "global_step1" / f"zero_pp_rank_{ranks - 1}_mp_rank_00_optim_states.pt").write_bytes(
        b""
    )
    refused(folder, "is empty", UnsupportedCheckpoint)
    assert descriptors() <= before


def descriptors() -> set[str]:
    """What this process has open, by number."""
    return {item.name for item in Path("/proc/self/fd").iterdir()}
