"""What is the model: each sentence of docs/state-dicts.md, with torch as the oracle of what must
come out.
"""

from __future__ import annotations

import argparse
import pickle
import re
import shutil
import sys
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ckptconv import (
    CheckpointError,
    average,
    convert_checkpoint,
    diagnose,
    diff_checkpoints,
    limits,
    load_into,
    load_portable,
    merge,
    open_checkpoint,
)
from ckptconv.support.errors import AmbiguousStateDict, CheckpointWarning
from ckptconv.tree.labels import names_number, names_training_state
from helpers.oracle import optimizer_state as optimizer
from helpers.program import run, run_process

STATE_LABELS = """
    optimizer optimizers optimizer_states optimizerState lr_scheduler lr_schedulers model_optimizer
    GOptimizer rng_state random_states_0 cuda_rng_state_all rng_state_cuda numpy_rng
    scheduler_state_dict random
""".split()  # noqa: SIM905 (read as words)
NETWORK_LABELS = """
    upscaler optimized_model random_encoder resampler upsampler.weight optimus scheduler_net
    target_random strings model_and_optimizer optimizer.weight opt state rngs_net
""".split()  # noqa: SIM905


def weights(seed: int = 0, prefix: str = "") -> OrderedDict[str, torch.Tensor]:
    """The state dict of a small network, other values for each seed."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return OrderedDict((prefix + key, value.clone()) for key, value in model.state_dict().items())


GENERATOR = torch.arange(16, dtype=torch.uint8)
"""A state of CUDA's generator, by its form."""
LIGHTNING = {
    "pytorch-lightning_version": "2.6.0",
    "epoch": 1,
    "global_step": 2,
    "loops": {},
    "lr_schedulers": [],
}
COPY = {"w1": torch.ones(2)}


def saved(tree: Any, folder: Path) -> Path:
    torch.save(tree, folder / "in.pt")
    return folder / "in.pt"


def saved_as(tree: Any, folder: Path) -> Path:
    torch.save(tree, folder / "other.pt")
    return folder / "other.pt"


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
        lambda: diff_checkpoints(source, source, keys="strip"),
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
    ("module", "other"),
    [
        ({"fc.weight": COPY["w1"], "x": COPY["w1"]}, {"first": COPY["w1"]}),
        ({"bias": COPY["w1"]}, {0: COPY["w1"]}),
        ({"first": COPY["w1"], "fc.parts": [COPY["w1"]]}, {"first": COPY["w1"]}),
        ({"first": COPY["w1"]}, {"first": np.ones(2), "second": np.zeros(3)}),
        ({"first": COPY["w1"].to_sparse()}, {"first": np.ones(2)}),
        ({"fc.parts": [COPY["w1"]]}, {"fc.weight": np.ones(2)}),
    ],
    ids=["dot", "word", "list", "arrays", "sparse", "list-alone"],
)
def test_what_looks_like_a_module_comes_first(module, other, tmp_path):
    """In any order; of two alike, tensors come before arrays."""
    arrays = [key for key, value in other.items() if type(value) is np.ndarray]
    for tree in ({"one": module, "two": other}, {"one": other, "two": module}):
        source = saved(tree, tmp_path)
        path, rest = ("one", "two") if tree["one"] is module else ("two", "one")
        if arrays:
            what = f"at {path} would leave out .*: {rest}.{arrays[0]}"
            with pytest.raises(CheckpointError, match=what):
                load_portable(source)
        else:
            assert load_portable(source).keys() == module.keys()


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


@pytest.mark.parametrize(
    "tree, path",
    [
        ({"a.b": weights(1), "a": {"b": weights(2)}}, "a.b"),
        ({"m": {1: weights(1), "1": weights(2)}}, "m.1"),
        ({b"ema": weights(1), "ema": weights(2)}, "ema"),
    ],
)
def test_a_path_that_two_parts_have_is_refused(tree, path, tmp_path):
    source = saved(tree, tmp_path)
    for whole in (False, True):
        with pytest.raises(AmbiguousStateDict, match=rf"2 parts of it have the path '{path}'"):
            load_portable(source, only=path, whole=whole)


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
        {"scaler": {"scale": torch.tensor(65536.0), "growth_tracker": torch.tensor(0)}},
        {"generator_state": torch.Generator().get_state()},
        {"opt": {"state": [{"mom": torch.ones(3)}], "hypers": [{"lr": 0.1}]}},
        {"cuda": [GENERATOR], "np": np.random.get_state(legacy=False)},
        {"train_hist": [torch.tensor(0.5)] * 9, "grad_norm": torch.tensor(0.5)},
    ],
    ids=[
        "numbers",
        "numbers in a list",
        "random states",
        "optimizers",
        "a gradient scaler",
        "a generator",
        "an optimizer of fastai",
        "generators in other forms",
        "a history",
    ],
)
def test_what_nobody_misses_is_left_out_and_listed(beside, tmp_path):
    source = saved({"state_dict": weights(1), **beside}, tmp_path)
    assert_taken(source, weights(1), tmp_path)
    result = convert_checkpoint(source, tmp_path / "x.safetensors", fsync=False)
    assert [item.path for item in result.plan.skipped] == list(beside)


def test_an_optimizer_of_fastai_whose_lists_are_those_of_fastcore_is_none_that_asks(
    tmp_path, monkeypatch
):
    made = type("L", (), {"__module__": "fastcore.foundation"})
    for name in ("fastcore", "fastcore.foundation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["fastcore.foundation"], "L", made, raising=False)
    hypers = made()
    hypers.items = [{"lr": 0.1}]
    opt = {"state": [{"mom": torch.ones(3)}], "hypers": hypers}
    assert_taken(saved({"model": weights(1), "opt": opt}, tmp_path), weights(1), tmp_path)


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


def timms(**further: Any) -> dict[str, Any]:
    tree = {
        "epoch": 1,
        "arch": "vit",
        "state_dict": weights(1),
        "optimizer": optimizer(),
        "version": 2,
        "amp_scaler": {"scale": torch.tensor(65536.0)},
        "metric": 7.0,
    }
    return {**tree, **further}


def test_of_timms_models_the_average_is_taken_as_its_load_checkpoint_does(tmp_path):
    """`load_state_dict(checkpoint_path, use_ema=True)` of timm/models/_helpers.py."""
    source = saved(timms(state_dict_ema=weights(2)), tmp_path)
    told = "state_dict_ema is taken, where timm has the averaged weights, not state_dict"
    with pytest.warns(CheckpointWarning, match=told) as warned:
        assert same(load_portable(source), weights(2))
    assert [item.filename for item in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        with pytest.raises(CheckpointWarning, match=told):
            load_portable(source)
        assert same(load_portable(source, only="state_dict"), weights(1))
        assert same(load_portable(source, only="ema"), weights(2))
        assert same(load_portable(saved(timms(), tmp_path)), weights(1))
    source = saved(timms(state_dict_ema=weights(2)), tmp_path)
    output, copy = tmp_path / "x.safetensors", shutil.copy(source, tmp_path / "copy.pt")
    for call in (
        lambda: convert_checkpoint(source, output),
        lambda: average([source, copy], output),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error", CheckpointWarning)
            with pytest.raises(CheckpointWarning, match=told):
                call()
        assert not output.exists()
        with pytest.warns(CheckpointWarning, match=told) as warned:
            result = call()
        assert [item.filename for item in warned] == [__file__]
        assert any(told in note for note in result.plan.notes)
        assert torch.equal(load_file(output)["0.weight"], weights(2)["0.weight"])
        output.unlink()


@pytest.mark.parametrize("words", ["convert in.pt o.safetensors", "diff in.pt in.pt",
                                   "batch in.pt --out-dir o --to safetensors"])  # fmt: skip
def test_commands_warn_in_their_notes_only(words, tmp_path):
    torch.save(timms(state_dict_ema=weights(2)), tmp_path / "in.pt")
    done = run_process(*words.split(), cwd=tmp_path)
    assert done.exit == 0 and "Warning" not in done.err, done.err


@pytest.mark.parametrize(
    "tree", [timms(), {**LIGHTNING, "state_dict": weights(1)}], ids=["timm", "Lightning"]
)
def test_a_part_that_a_framework_does_not_write_asks(tree, tmp_path):
    source = saved({**tree, "quantizer": {"codebook": torch.ones(512, 64)}}, tmp_path)
    assert_refused(source, tmp_path, "state_dict", "quantizer")


BESIDE: dict[str, Any] = {
    "a codebook": {"quantizer": {"codebook": torch.ones(512, 64)}},
    "latents": {"latents": {"z": torch.ones(2, 2)}},
    "features": {"memory": {"feats": torch.ones(3)}},
    "vectors": {"vocab": {"vectors": torch.ones(3, 2)}},
    "running statistics": {
        "obs_rms": {"mean": torch.zeros(3), "var": torch.ones(3), "count": torch.tensor(7.0)}
    },
    "a normalizer": {"normalizer": {"mean": torch.zeros(3), "std": torch.ones(3)}},
    "a normalizer of numpy": {"normalizer": {"mean": np.zeros(3), "std": np.ones(3)}},
    "a normalizer of one number": {"normalizer": {"mean": torch.zeros(1), "std": torch.ones(1)}},
    "a scaler of the data": {"scaler": {"mean": torch.tensor(0.5), "std": torch.tensor(2.0)}},
    "a scale": {"target_scaler": torch.tensor(2.0)},
    "an average of numbers": {"averaged": {"shadow_params": [torch.ones(1), torch.ones(1)]}},
    "anchors": {"anchors": torch.ones(9, 2)},
    "a list": {"latents": [torch.ones(2), torch.ones(2)]},
    "an average": {"averaged": {"decay": 0.9, "shadow_params": [torch.ones(2)]}},
    "a network": {"value_net": {"v1": torch.ones(2)}},
    "one tensor in an object": {"state": argparse.Namespace(ema=[torch.ones(2)])},
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_whatever_else_holds_tensors_asks(beside, tmp_path):
    """However few or small they are, and whatever their keys look like."""
    big = {f"layers.{number}.weight": torch.ones(64, 64) for number in range(8)}
    for model in (big, {"w1": torch.ones(2), "b1": torch.ones(2)}):
        source = saved({"model": model, **beside, "epoch": 3}, tmp_path)
        for attempt in (
            lambda source=source: load_portable(source),
            lambda source=source: convert_checkpoint(source, tmp_path / "no.safetensors"),
            lambda source=source: convert_checkpoint(source, tmp_path / "no.npz", to="npz"),
            lambda source=source: merge([source, source], tmp_path / "no.safetensors"),
        ):
            with pytest.raises(CheckpointError, match="--only model"):
                attempt()
        assert same(load_portable(source, only="model"), model)


def test_what_stays_under_another_name_is_not_lost(tmp_path):
    model = weights(1)
    beside = {"scale": model["1.weight"], "shift": model["1.bias"]}
    source = saved({"state_dict": model, "hyper_parameters": {"transform": beside}}, tmp_path)
    assert_taken(source, model, tmp_path)


@pytest.mark.parametrize(
    "states",
    [
        {"random_state": (3, (1, 2), None), "numpy_random_seed": np.random.get_state(),
         "torch_manual_seed": torch.get_rng_state(), "torch_cuda_manual_seed": [GENERATOR]},
        {"python": (3, (1, 2), None), "numpy": np.random.get_state(),
         "cpu": torch.get_rng_state(), "cuda": GENERATOR},
        {"cpu": torch.get_rng_state(), "cuda": [GENERATOR, GENERATOR]},
        {"generator_state": torch.get_rng_state()},
        torch.get_rng_state(),
        [torch.get_rng_state(), torch.get_rng_state()],
    ],
    ids=["random_states_0.pkl", "rng_state.pth", "of two devices", "a generator", "bare", "a list"],
)  # fmt: skip
def test_a_file_of_random_states_is_no_model(states, tmp_path):
    source = saved(states, tmp_path)
    with pytest.raises(AmbiguousStateDict, match="holds only a training's state: no weights"):
        load_portable(source)


def test_mmengine_saves_the_average_as_state_dict(produced, tmp_path):
    """mmengine/hooks/ema_hook.py swaps the two before it saves."""
    source = produced / "mmengine.pth"
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
    assert_refused(source, tmp_path, "state_dict", ".")


def test_two_models_of_accelerate_are_a_choice(tmp_path):
    tree = {
        "model": weights(1),
        "model_1": weights(2),
        "random_states_0": {"torch": torch.get_rng_state()},
    }
    assert_refused(saved(tree, tmp_path), tmp_path, "model", "model_1")


# --------------------------------------------------------------------------------------- torchtitan


@pytest.mark.parametrize("version", ["new", "old"])
def test_a_checkpoint_of_torchtitan_becomes_the_keys_of_its_model(version, produced, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = produced / "torchtitan" / version
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


# ----------------------------------------------------------------------------------- dicts of dicts


MEGATRON = {
    "language_model": {
        "embedding": {"word_embeddings": {"weight": torch.ones(3)}},
        "encoder": {"layers.0.weight": torch.ones(2), "final_layernorm.weight": torch.zeros(2)},
    }
}
FLAX = {"Dense_0": {"kernel": torch.ones(2, 2), "bias": torch.ones(2)}}


@pytest.mark.parametrize(
    ("tree", "only", "keys"),
    [
        (
            {"model": MEGATRON, "optimizer": optimizer(), "iteration": 3},
            "model",
            ["language_model.embedding.word_embeddings.weight",
             "language_model.encoder.layers.0.weight",
             "language_model.encoder.final_layernorm.weight"],
        ),
        ({"params": FLAX}, "params", ["Dense_0.kernel", "Dense_0.bias"]),
        (
            {"params": {**FLAX, "Dense_1": {"kernel": torch.ones(2)}}, "step": 3},
            "params",
            ["Dense_0.kernel", "Dense_0.bias", "Dense_1.kernel"],
        ),
        (
            {"actor": {"w1": torch.ones(2)}, "value_net": {"v1": torch.ones(2)}},
            ".",
            ["actor.w1", "value_net.v1"],
        ),
    ],
    ids=["Megatron", "flax", "flax, two layers", "the root"],
)  # fmt: skip
def test_a_dict_of_dicts_of_tensors_is_a_choice_with_keys_joined_by_dots(
    tree, only, keys, tmp_path
):
    source = saved(tree, tmp_path)
    if len(keys) > 2 or only == ".":
        with pytest.raises(AmbiguousStateDict, match=rf"--only {re.escape(only)}"):
            load_portable(source)
    with pytest.warns(CheckpointWarning, match="its keys are joined by dots"):
        loaded = load_portable(source, only=only)
    assert list(loaded) == keys
    convert_checkpoint(source, tmp_path / "out.safetensors", only=only, verify=True)
    written = load_file(tmp_path / "out.safetensors")
    assert same(dict(sorted(written.items())), dict(sorted(loaded.items())))
    for key in keys:
        value = tree if only == "." else tree[only]
        for label in key.split(".", 3) if "embedding" in key else key.split(".", 2):
            value = value[label]
        assert torch.equal(loaded[key], value)


def test_a_label_of_a_state_dict_is_not_part_of_its_keys(tmp_path):
    source = saved({"run": {"model": {"state_dict": weights(1)}}}, tmp_path)
    assert_taken(source, weights(1), tmp_path, only="run")


def test_a_list_of_names_and_tensors_is_a_state_dict(tmp_path):
    source = saved(list(weights(1).items()), tmp_path)
    with pytest.warns(CheckpointWarning, match="a list of names and tensors"):
        assert same(load_portable(source), weights(1))
    convert_checkpoint(source, tmp_path / "out.safetensors", verify=True)
    assert load_file(tmp_path / "out.safetensors").keys() == weights(1).keys()


def test_a_tuple_of_tensors_without_names_is_told_with_a_way_out(tmp_path):
    """As 3D Gaussian Splatting saves them: (capture(), iteration)."""
    source = saved(((3, torch.ones(2), torch.ones(3), optimizer(), 0.5), 7000), tmp_path)
    with pytest.raises(AmbiguousStateDict, match=r"have no names.*--only 0\.1 or --only 0\.2"):
        load_portable(source)
    assert torch.equal(load_portable(source, only="0.2")["tensor"], torch.ones(3))


def test_lightnings_own_module_is_an_attribute(tmp_path):
    """Lightning takes DDP's wrapper off itself; `self.module = net` is the user's."""
    model = weights(1, "module.")
    source = saved({**LIGHTNING, "state_dict": model}, tmp_path)
    assert_taken(source, model, tmp_path)
    assert_taken(source, model, tmp_path, only="state_dict")
    convert_checkpoint(source, tmp_path / "out.pt")
    assert same(torch.load(tmp_path / "out.pt")["state_dict"], model)
    convert_checkpoint(source, tmp_path / "part.pt", only="state_dict")
    assert same(torch.load(tmp_path / "part.pt"), model)
    merge([source, saved_as({"x.w": torch.ones(1)}, tmp_path)], tmp_path / "both.pt")
    assert "module.0.weight" in torch.load(tmp_path / "both.pt")
    assert run("strip-module", source, "bare.pt", cwd=tmp_path).exit == 0
    assert same(torch.load(tmp_path / "bare.pt")["state_dict"], weights(1))
    compiled = weights(1, "_orig_mod.module.")
    assert same(load_portable(saved({**LIGHTNING, "state_dict": compiled}, tmp_path)), model)


class ReplayBuffer:
    """As Stable Baselines 3 pickles one: arrays, and spaces with arrays of their own."""

    def __init__(self) -> None:
        self.observation_space = argparse.Namespace(low=np.zeros(3), high=np.ones(3))
        self.observations, self.actions = np.ones((5, 3)), np.ones(5)


def test_a_replay_buffer_is_no_model(tmp_path):
    path = tmp_path / "replay_buffer.pkl"
    path.write_bytes(pickle.dumps(ReplayBuffer()))
    for attempt in (load_portable, lambda path: convert_checkpoint(path, tmp_path / "x.npz")):
        with pytest.raises(AmbiguousStateDict, match="holds only a replay buffer's state"):
            attempt(path)
    source = saved({"model": weights(1), "replay_buffer": ReplayBuffer()}, tmp_path)
    assert_refused(source, tmp_path, "model")


def test_keys_beside_an_optimizer_without_groups_are_renamed(tmp_path):
    """fastai's has `hypers`, and numpy's generator looks like one too."""
    tree = {
        "model": {"fc.weight": torch.ones(3)},
        "opt": {"state": [{"mom": torch.ones(3)}], "hypers": [{"lr": 0.1}]},
        "np": np.random.get_state(legacy=False),
    }
    source = saved(tree, tmp_path)
    done = run("convert", source, "x.pt", "--rename", "fc.=head.", cwd=tmp_path)
    assert done.exit == 0
    made = torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(made["model"]) == ["head.weight"] and made["opt"]["hypers"] == [{"lr": 0.1}]


@pytest.mark.parametrize("way", ["a circle", "doubled at each level"])
def test_dicts_within_dicts_end(way, tmp_path):
    """To offer a choice, nested dicts are looked into: one that holds itself has no end."""
    inner: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(40 if way == "doubled at each level" else 0):
        inner = {"a": inner, "b": inner}
    if way == "a circle":
        inner["again"] = inner
    two = {name: {f"{name}.weight": torch.ones(2)} for name in ("one", "two")}
    torch.save({**two, "config": inner}, tmp_path / "in.pt")
    begin = time.process_time()
    with limits(modules=10_000), pytest.raises(AmbiguousStateDict, match="one, two"):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert time.process_time() - begin < 20
