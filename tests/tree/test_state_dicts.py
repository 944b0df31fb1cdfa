"""What is the model: each sentence of docs/state-dicts.md, with torch as the oracle of what must
come out.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptconv import (
    CheckpointError,
    convert_checkpoint,
    diagnose,
    diff_checkpoints,
    load_into,
    load_portable,
    open_checkpoint,
)
from ckptconv.tree.labels import names_number, names_training_state
from helpers.oracle import corpus_folder
from helpers.oracle import optimizer_state as optimizer
from helpers.program import run

STATE_LABELS = """
    optimizer optimizers optimizer_states optimizerState lr_scheduler lr_schedulers model_optimizer
    GOptimizer rng_state random_states_0 cuda_rng_state_all rng_state_cuda numpy_rng
    scheduler_state_dict random
""".split()  # noqa: SIM905 (read as words)
NETWORK_LABELS = """
    upscaler optimized_model random_encoder resampler upsampler.weight optimus scheduler_net
    target_random strings model_and_optimizer optimizer.weight opt state rngs_net
""".split()  # noqa: SIM905

PRODUCED = corpus_folder().parent / "produced"


def weights(seed: int = 0, prefix: str = "") -> OrderedDict[str, torch.Tensor]:
    """The state dict of a small network, other values for each seed."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return OrderedDict((prefix + key, value.clone()) for key, value in model.state_dict().items())


COPY = {"w1": torch.ones(2)}


def saved(tree: Any, folder: Path) -> Path:
    torch.save(tree, folder / "in.pt")
    return folder / "in.pt"


def same(ours: Any, theirs: Any) -> bool:
    return list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def assert_taken(source: Path, expected: Any, folder: Path, only: str | None = None) -> None:
    """The state dict is what load_portable and a safetensors file of every command give."""
    assert same(load_portable(source, only=only), expected)
    out = folder / "out.safetensors"
    convert_checkpoint(source, out, only=only, force=True, fsync=False, verify=True)
    assert same(dict(sorted(load_file(out).items())), dict(sorted(expected.items())))


def assert_refused(source: Path, folder: Path, *names: str) -> None:
    """Every way to one state dict is an error that lists the choices, and each choice works."""
    listed = rf"choose one: --only {names[0]}"
    for attempt in (
        lambda: load_portable(source),
        lambda: load_into(torch.nn.Linear(3, 2), source),
        lambda: convert_checkpoint(source, folder / "no.safetensors"),
        lambda: convert_checkpoint(source, folder / "no.bin", max_shard_size=100),
        lambda: diff_checkpoints(source, source),
    ):
        with pytest.raises(CheckpointError) as error:
            attempt()
        assert listed in str(error.value)
        assert all(name in str(error.value) for name in names)
    for name in names:
        assert load_portable(source, only=name)
    for command in ("convert", "strip-module"):
        finished = run(command, source, "no.safetensors", cwd=folder)
        assert finished.exit == 1 and all(name in finished.err for name in names)
    assert not (folder / "no.safetensors").exists()


# ------------------------------------------------------------ tensors beside other dicts of tensors


def test_weights_beside_an_average_are_a_choice_of_two(tmp_path):
    source = saved({**weights(1), "ema": weights(2)}, tmp_path)
    assert_refused(source, tmp_path, ".", "ema")
    assert_taken(source, weights(1), tmp_path, only=".")
    assert_taken(source, weights(2), tmp_path, only="ema")


@pytest.mark.parametrize(
    "beside",
    [
        {"metrics": {"loss": torch.tensor(0.5)}},
        {"optimizer": optimizer(), "epoch": 3},
        {"optimizer_state_dict": {"exp_avg": [torch.ones(9) for _ in range(30)]}},
        {
            "random_states_0": {"torch": torch.get_rng_state()},
            "lr_schedulers": [{"base": torch.ones(1)}],
        },
    ],
    ids=["metrics", "optimizer", "optimizer by its label", "random states"],
)
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_weights_beside_what_is_no_model_are_the_model(beside, wrapper, tmp_path):
    source = saved({**weights(1, wrapper), **beside}, tmp_path)
    assert_taken(source, weights(1), tmp_path)
    finished = run("strip-module", source, "stripped.safetensors", cwd=tmp_path)
    assert finished.exit == 0, finished.err
    assert load_file(tmp_path / "stripped.safetensors").keys() == weights(1).keys()


def test_a_torch_output_keeps_what_stands_beside_the_weights_and_renames_only_them(tmp_path):
    tree = {
        "epoch": 3,
        **weights(1, "module."),
        "optimizer": optimizer(),
        "ema": weights(2, "module."),
    }
    convert_checkpoint(saved(tree, tmp_path), tmp_path / "out.pt", fsync=False, verify=True)
    out = torch.load(tmp_path / "out.pt")
    assert list(out) == ["epoch", *weights(1), "optimizer", "ema"]
    assert same({key: out[key] for key in weights(1)}, weights(1)) and same(out["ema"], weights(2))
    assert torch.equal(
        out["optimizer"]["state"][0]["exp_avg"], tree["optimizer"]["state"][0]["exp_avg"]
    )


def test_a_key_that_would_get_the_name_of_what_stands_beside_it_is_refused(tmp_path):
    source = saved({"module.optimizer": torch.ones(2), "optimizer": optimizer()}, tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer: a key would get this name"):
        convert_checkpoint(source, tmp_path / "out.pt")


def test_the_dot_means_the_tensors_that_stand_in_a_dict_at_any_depth(tmp_path):
    source = saved({"run": {"model": {**weights(1), "ema": weights(2)}}}, tmp_path)
    assert_refused(source, tmp_path, "run.model.", "run.model.ema")
    assert_taken(source, weights(1), tmp_path, only="run.model.")
    convert_checkpoint(source, tmp_path / "out.pt", only="run.model.", fsync=False)
    assert same(torch.load(tmp_path / "out.pt"), weights(1))


@pytest.mark.parametrize(
    "beside",
    [
        {"epoch": 3},
        {"best_acc1": torch.tensor(0.5)},
        {"arch": "x", "rng_state": torch.get_rng_state()},
    ],
)
def test_numbers_and_texts_beside_the_weights_do_not_hide_a_wrapper(beside, tmp_path):
    source = saved({**weights(1, "module."), **beside}, tmp_path)
    assert list(weights(1)) == [key for key in load_portable(source) if key not in beside]
    convert_checkpoint(source, tmp_path / "out.pt", fsync=False)
    assert list(torch.load(tmp_path / "out.pt")) == [*weights(1), *beside]
    convert_checkpoint(source, tmp_path / "kept.safetensors", keys="keep", fsync=False)
    assert not diff_checkpoints(source, tmp_path / "out.pt").same


def test_numbers_and_texts_beside_the_weights_are_not_unexpected_keys_of_a_model(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    assert load_into(
        model, saved({**weights(1, "module."), "epoch": 3, "arch": "x"}, tmp_path)
    ).fits
    assert same(model.state_dict(), weights(1))


def test_a_tensor_without_the_wrapper_is_a_key_of_the_model_and_nothing_is_stripped(tmp_path):
    source = saved({**weights(1, "module."), "scale": torch.ones(1)}, tmp_path)
    assert list(load_portable(source)) == [*weights(1, "module."), "scale"]


def test_skipped_lists_what_stands_beside_the_weights(tmp_path):
    source = saved({**weights(1), "optimizer": optimizer(), "epoch": 3}, tmp_path)
    result = convert_checkpoint(source, tmp_path / "out.safetensors", fsync=False)
    assert [item.path for item in result.plan.skipped] == ["optimizer", "epoch"]


# ----------------------------------------------------------------------------------- the safety net


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"model": weights(1), "mean": torch.ones(3), "std": torch.ones(3)}, (".", "model")),
        ({"model": weights(1), "samples_kept": [torch.ones(3) for _ in range(20)]}, ("model",)),
        ({"model": weights(1), "mean_std": [torch.ones(3)] * 2}, ("model",)),
        ({"model": weights(1), "upscaler": weights(2)}, ("model", "upscaler")),
        (
            {"model": weights(1), "ema": {"shadow_params": [torch.ones(2)], "decay": 0.9}},
            ("model",),
        ),
        (
            {
                "params": {"w1": torch.ones(2), "b1": torch.ones(2)},
                "target_params": {"w1": torch.ones(2)},
            },
            ("params", "target_params"),
        ),
        (
            {"model": {"a": torch.ones(1)}, "table": {"x": torch.ones(2), "y": torch.ones(2)}},
            ("model", "table"),
        ),
        ({"model": weights(1), "best": {"model": weights(2)}}, ("model", "best.model")),
        (
            {
                "params": {
                    "encoder": {"kernel": torch.ones(2), "scale": torch.ones(2)},
                    "embed": {"table": torch.ones(2)},
                }
            },
            ("params.encoder", "params.embed"),
        ),
    ],
    ids=[
        "above",
        "more",
        "a list above",
        "a module",
        "an average as a list",
        "a copy",
        "more in a dict",
        "the best",
        "parts of one model",
    ],
)
def test_what_somebody_may_want_is_not_left_out(tree, names, tmp_path):
    source = saved(tree, tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_portable(source)
    assert all(name in str(error.value) for name in names)
    for name in names:
        part = tree
        for label in name.split(".") if name != "." else ():
            part = part[label]
        assert same(
            load_portable(source, only=name),
            {k: v for k, v in part.items() if isinstance(v, torch.Tensor)},
        )
    with pytest.raises(CheckpointError, match="--only"):
        convert_checkpoint(source, tmp_path / "no.safetensors")


@pytest.mark.parametrize(
    "beside",
    [
        {"best_acc1": torch.tensor(71.0), "epoch": torch.tensor(3), "arch": "resnet18"},
        {"history": {"loss": [torch.tensor(0.5) for _ in range(50)]}},
        {"rng_state": torch.get_rng_state(), "cuda_rng_state_all": [torch.get_rng_state()] * 8},
        {"optimizer_G": optimizer(), "optim": {"m": torch.ones(3)}},
        {"centers": {"points": torch.ones(4)}},
    ],
    ids=["numbers", "numbers in a list", "random states", "optimizers", "less, and like no module"],
)
def test_what_nobody_misses_is_left_out_and_listed(beside, tmp_path):
    source = saved({"state_dict": weights(1), **beside}, tmp_path)
    assert_taken(source, weights(1), tmp_path)
    result = convert_checkpoint(source, tmp_path / "x.safetensors", fsync=False)
    assert [item.path for item in result.plan.skipped] == list(beside)


def test_doctor_tells_of_the_choice_with_a_command_for_it(tmp_path):
    source = saved({**weights(1, "module."), "ema": weights(2, "module.")}, tmp_path)
    found = diagnose(source)
    told = next(item for item in found.findings if item.code == "several-models")
    assert told.cause == "holds 2 state dicts: the root, ema"
    assert "--only ." in told.command


def test_load_into_does_not_fill_a_model_with_the_average(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.load_state_dict(weights(5))
    source = saved({**weights(1), "ema": weights(2)}, tmp_path)
    with pytest.raises(CheckpointError, match="--only"):
        load_into(model, source)
    assert same(model.state_dict(), weights(5))
    assert load_into(model, source, only=".").fits and same(model.state_dict(), weights(1))


# ------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    "label",
    ["upscaler", "optimized_model", "random_encoder", "resampler", "optimus", "scheduler_net"],
)
def test_a_network_is_one_whatever_its_name_reminds_of(label, tmp_path):
    source = saved({label: weights(1), "optimizer": optimizer(), "epoch": 3}, tmp_path)
    assert_taken(source, weights(1), tmp_path)


def test_a_network_whose_name_reminds_of_a_state_is_not_left_out_of_a_choice(tmp_path):
    assert_refused(
        saved({"model": weights(1), "random_encoder": weights(2)}, tmp_path),
        tmp_path,
        "model",
        "random_encoder",
    )


@pytest.mark.parametrize(
    "label",
    STATE_LABELS,
)
def test_labels_of_training_states(label):
    assert names_training_state(label)


@pytest.mark.parametrize(
    "label",
    NETWORK_LABELS,
)
def test_labels_of_networks(label):
    assert not names_training_state(label)


@pytest.mark.parametrize(
    "label",
    ["best_acc1", "train/loss", "globalStep", "val_mIoU", "F1", "mAP", "metrics", "epoch", "lr"],
)
def test_labels_of_numbers(label):
    assert names_number(label)


@pytest.mark.parametrize(
    "label", ["mean", "temperature", "glossary", "stepwise", "class_weights", "logit_scale"]
)
def test_labels_of_what_is_no_number_of_the_training(label):
    assert not names_number(label)


# --------------------------------------------------------------------------------------- frameworks


def test_timm_has_its_model_in_state_dict_and_a_note_names_the_average(tmp_path):
    tree = {
        "epoch": 1,
        "arch": "vit",
        "state_dict": weights(1),
        "optimizer": optimizer(),
        "version": 2,
        "metric": 7.0,
    }
    source = saved({**tree, "state_dict_ema": weights(2)}, tmp_path)
    assert_taken(source, weights(1), tmp_path)
    assert_taken(source, weights(2), tmp_path, only="ema")
    result = convert_checkpoint(source, tmp_path / "x.safetensors", fsync=False)
    assert any("timm" in note and "state_dict_ema" in note for note in result.plan.notes)


def test_mmengine_saves_the_average_as_state_dict(tmp_path):
    """mmengine/hooks/ema_hook.py swaps the two before it saves."""
    source = PRODUCED / "mmengine.pth"
    expected = torch.load(source, weights_only=False, map_location="cpu", pickle_module=_Pickles)[
        "state_dict"
    ]
    assert same(load_portable(source), expected)
    assert same(load_portable(source, only="ema"), expected)


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        return len


class _Stand(metaclass=_AnyAttribute):
    def __init__(self, *_: Any) -> None: ...
    def __setstate__(self, _: Any) -> None: ...


class _Pickles:
    """What torch.load takes for a pickle module, with stand-ins for the classes of mmengine."""

    load = staticmethod(pickle.load)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return _Stand if module.startswith("mmengine") else super().find_class(module, name)


LIGHTNING = {
    "pytorch-lightning_version": "2.6.0",
    "epoch": 1,
    "global_step": 2,
    "loops": {},
    "lr_schedulers": [],
}


def test_lightning_has_its_model_in_state_dict_whatever_callbacks_and_hyper_parameters_hold(
    tmp_path,
):
    callbacks = {
        "EMACallback": {"ema_weights": weights(2)},
        "ModelCheckpoint{'monitor': 'x'}": {"best": torch.ones(3)},
    }
    tree = {
        **LIGHTNING,
        "state_dict": weights(1),
        "callbacks": callbacks,
        "hyper_parameters": {"class_weights": torch.ones(9)},
    }
    source = saved({**tree, "optimizer_states": [optimizer()]}, tmp_path)
    assert_taken(source, weights(1), tmp_path)
    assert_taken(source, weights(2), tmp_path, only="ema")


def test_the_average_of_lightnings_weight_averaging_is_its_state_dict(tmp_path):
    """lightning/pytorch/callbacks/weight_averaging.py saves the average as state_dict, the model's
    own beside it.
    """
    averaging = {"n_averaged": torch.tensor(3)}
    tree = {
        **LIGHTNING,
        "state_dict": weights(1),
        "current_model_state": weights(2),
        "averaging_state": averaging,
    }
    source = saved(tree, tmp_path)
    assert_taken(source, weights(1), tmp_path)
    assert_taken(source, weights(1), tmp_path, only="ema")
    assert_taken(source, weights(2), tmp_path, only="current_model_state")


def test_two_averages_are_a_choice(tmp_path):
    source = saved({"model": weights(1), "ema_fast": weights(2), "ema_slow": weights(3)}, tmp_path)
    with pytest.raises(
        CheckpointError,
        match=(
            "holds 2 averages: ema_fast, ema_slow; choose one: --only ema_fast or --only ema_slow"
        ),
    ):
        load_portable(source, only="ema")


def test_a_framework_does_not_hide_weights_that_stand_above_its_own(tmp_path):
    source = saved({**LIGHTNING, "state_dict": weights(1), **weights(2)}, tmp_path)
    assert_refused(source, tmp_path, ".", "state_dict")


def test_two_models_of_accelerate_are_a_choice(tmp_path):
    tree = {
        "model": weights(1),
        "model_1": weights(2),
        "random_states_0": {"torch": torch.get_rng_state()},
    }
    assert_refused(saved(tree, tmp_path), tmp_path, "model", "model_1")


# --------------------------------------------------------------------------------------- torchtitan


@pytest.mark.parametrize("version", ["new", "old"])
def test_a_checkpoint_of_torchtitan_becomes_the_keys_of_its_model(version, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = PRODUCED / "torchtitan" / version
    dcp_to_torch_save(folder, tmp_path / "torch.pt")
    whole = torch.load(tmp_path / "torch.pt", weights_only=False)
    parts = {"optimizer", "lr_scheduler", "dataloader", "train_state"}
    expected = OrderedDict((key, value) for key, value in whole.items() if key not in parts)
    assert len(expected) > 1 and all(isinstance(value, torch.Tensor) for value in expected.values())
    found = load_portable(folder)
    assert found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in found
    )
    convert_checkpoint(folder, tmp_path / "out.pt", fsync=False, unknown="drop")
    out = torch.load(tmp_path / "out.pt")
    assert out.keys() >= expected.keys() | {"optimizer", "train_state"}
    assert all(torch.equal(out[key], expected[key]) for key in expected)


def test_ranks_do_not_take_a_slice_of_a_network_called_resampler_for_a_state_of_their_own():
    from ckptconv.formats.folders.ranks import _is_of_a_rank

    assert not _is_of_a_rank(("resampler.weight",)) and not _is_of_a_rank(
        ("model", "resampler", "weight")
    )
    assert not _is_of_a_rank(("sampler.weight",))
    assert _is_of_a_rank(("rng_state", "cpu")) and _is_of_a_rank(("dataloader", "dp_rank_0"))
    assert _is_of_a_rank(("model", "bn.running_mean")) and not _is_of_a_rank(
        ("model", "bn.not_running_mean")
    )


def test_inspect_shows_the_weights_at_the_root_as_a_part_of_their_own(tmp_path):
    saved({**weights(1), "optimizer": optimizer()}, tmp_path)
    finished = run("inspect", "in.pt", cwd=tmp_path)
    assert finished.exit == 0
    assert "state dict, 7 tensors" in finished.out and "optimizer" in finished.out
    with open_checkpoint(tmp_path / "in.pt") as checkpoint:
        assert [found.path for found in checkpoint.state_dicts()] == ["."]


def test_a_dict_that_stands_in_a_training_state_too_is_found_where_it_stands_outside(tmp_path):
    shared = weights(1)
    assert_taken(
        saved({"optimizer": {"params": shared}, "weights": shared}, tmp_path), weights(1), tmp_path
    )
    source = saved(
        {"optimizer": {"params": shared}, "trained": shared, "model": weights(2)}, tmp_path
    )
    assert_refused(source, tmp_path, "model", "trained")
    assert same(load_portable(source, only="trained"), weights(1))


def test_an_average_is_a_part_and_not_a_buffer_of_that_name_or_a_number(tmp_path):
    tree = {
        "model": {**weights(1), "vq.ema_w": torch.ones(2)},
        "x": {"ema": weights(2)},
        "ema_decay": torch.tensor(0.9),
    }
    assert_taken(saved(tree, tmp_path), weights(2), tmp_path, only="ema")


def test_an_extra_state_without_tensors_keeps_its_place_among_the_keys(tmp_path):
    tree = {
        "module.a.weight": torch.ones(2),
        "module.a._extra_state": None,
        "optimizer": optimizer(),
    }
    source = saved(tree, tmp_path)
    assert list(load_portable(source)) == ["a.weight", "a._extra_state"]
    convert_checkpoint(source, tmp_path / "out.pt", fsync=False)
    assert list(torch.load(tmp_path / "out.pt")) == ["a.weight", "a._extra_state", "optimizer"]


def test_attributes_that_were_set_on_a_dict_are_not_the_model(tmp_path):
    odd = OrderedDict()
    odd.kept = torch.ones(2)
    with pytest.raises(CheckpointError, match="no state dict"):
        load_portable(saved({"state_dict": odd}, tmp_path))
