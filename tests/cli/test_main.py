"""The command line, run as the program that a user runs: every command and option, what it prints,
leaves and returns.
"""

from __future__ import annotations

import gzip
import json
import os
import pickletools
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections import ChainMap
from pathlib import Path

import click
import pytest

from ckptconv.cli.main import cli
from helpers.examples import crossed, some
from helpers.program import (
    PROGRAM,
    ROOT,
    SAMPLES,
    Finished,
    assert_one_error,
    environment,
    idle_rss,
    run,
    run_bytes,
    run_on_terminal,
    run_process,
)

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402

DDP = SAMPLES / "ddp_cuda3.pt"
DP = SAMPLES / "dp_cuda0.pt"
TRAIN = SAMPLES / "ddp_cuda3_train.pt"
NAMESPACE = SAMPLES / "namespace_train.pt"
TIED = SAMPLES / "tied.pt"
ALL = sorted(path.name for path in SAMPLES.glob("*.pt"))

TAG = re.compile(r"(cpu|mps|(cuda|npu|xpu|hpu)(:\d+)?)")


# ------------------------------------------------------------------------------------------ oracles


def load(path: Path, **options):
    """What torch sees, by its safe reader; the tags of devices that are not here become cpu."""
    return torch.load(path, map_location="cpu", weights_only=True, **options)


def load_here(path: Path):
    """What plain torch.load sees on this host: an error if a tag names a device not here."""
    return torch.load(path, weights_only=True)


def tags(path: Path) -> set[str]:
    """The location tags in the pickle of a torch file, as pickletools reads it."""
    with zipfile.ZipFile(path) as archive:
        stream = archive.read(
            next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        )
    texts = {argument for _, argument, _ in pickletools.genops(stream) if isinstance(argument, str)}
    return {text for text in texts if TAG.fullmatch(text)}


def metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, "pt") as opened:
        return opened.metadata() or {}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def assert_same(found: dict, expected: dict) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert same(found[key], value), key


def bare(state_dict: dict, *wrappers: str) -> dict:
    """The state dict without the wrappers in front of its keys."""
    prefix = "".join(f"{wrapper}." for wrapper in wrappers)
    assert all(key.startswith(prefix) for key in state_dict)
    return {key.removeprefix(prefix): value for key, value in state_dict.items()}


# --------------------------------------------------------------------------------------------- runs


def ckptconv(*arguments: object, cwd: Path, **options) -> Finished:
    """A run that must succeed."""
    done = run(*arguments, cwd=cwd, **options)
    assert done.exit == 0, done.err
    return done


def started(*arguments: object, cwd: Path, **options) -> Finished:
    """A run of a process of its own that must succeed."""
    done = run_process(*arguments, cwd=cwd, **options)
    assert done.exit == 0, done.err
    return done


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def line(done: Finished, label: str) -> str:
    """The text behind a label of the summary."""
    found = [text.split(maxsplit=1)[1] for text in done.lines[1:] if text.split()[0] == label]
    assert len(found) == 1, done.err
    return found[0]


@pytest.fixture
def saved(tmp_path):
    """Saves a tree with torch as ``in.pt``."""

    def save(tree: object, name: str = "in.pt") -> Path:
        torch.save(tree, tmp_path / name)
        return tmp_path / name

    return save


W = torch.arange(6.0).reshape(2, 3)


# ------------------------------------------------------------------------------------- strip-module


@pytest.mark.parametrize("name", ["dp_cuda0.pt", "ddp_cuda3.pt", "ddp_compiled.pt"])
def test_strip_module_gives_the_keys_without_module_tagged_for_the_cpu(name, tmp_path):
    done = ckptconv("strip-module", SAMPLES / name, "out.pt", cwd=tmp_path)
    source = load(SAMPLES / name)
    found = load_here(tmp_path / "out.pt")
    assert_same(found, bare(source, "module"))
    assert list(found._metadata) == [
        path.removeprefix("module").removeprefix(".") for path in source._metadata if path
    ]
    assert tags(tmp_path / "out.pt") == {"cpu"}
    assert done.out == ""
    assert "renamed, e.g. module." in line(done, "keys")


def test_strip_module_leaves_other_wrappers(tmp_path):
    ckptconv("strip-module", SAMPLES / "ddp_compiled.pt", "out.pt", cwd=tmp_path)
    assert all(key.startswith("_orig_mod.") for key in load_here(tmp_path / "out.pt"))


def test_strip_module_strips_wherever_a_key_starts_with_it(saved, tmp_path):
    saved({"module.module.a": W, "module.b": W + 1, "c.module.d": W + 2})
    ckptconv("strip-module", "in.pt", "out.pt", cwd=tmp_path)
    assert_same(load_here(tmp_path / "out.pt"), {"a": W, "b": W + 1, "c.module.d": W + 2})


def test_strip_module_leaves_a_submodule_of_that_name(tmp_path):
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)})
    torch.save(torch.nn.DataParallel(model).state_dict(), tmp_path / "ddp.pt")
    ckptconv("strip-module", "ddp.pt", "out.pt", cwd=tmp_path)
    assert_same(load_here(tmp_path / "out.pt"), model.state_dict())
    ckptconv("add-module", "out.pt", "again.pt", cwd=tmp_path)
    assert_same(load_here(tmp_path / "again.pt"), load_here(tmp_path / "ddp.pt"))


def test_strip_module_keeps_a_training_checkpoint_whole(tmp_path):
    ckptconv("strip-module", TRAIN, "out.pt", cwd=tmp_path)
    source, found = load(TRAIN), load_here(tmp_path / "out.pt")
    assert list(found) == list(source)
    assert_same(found["state_dict"], bare(source["state_dict"], "module"))
    assert found["optimizer"]["param_groups"] == source["optimizer"]["param_groups"]
    for index, state in source["optimizer"]["state"].items():
        assert_same(found["optimizer"]["state"][index], state)
    assert {key: found[key] for key in ("epoch", "step", "loss")} == {
        key: source[key] for key in ("epoch", "step", "loss")
    }


def test_strip_module_writes_safetensors_too(tmp_path):
    ckptconv("strip-module", DDP, "out.safetensors", cwd=tmp_path)
    found = load_file(tmp_path / "out.safetensors")
    expected = bare(load(DDP), "module")
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))


# --------------------------------------------------------------------------------------- add-module


@pytest.mark.parametrize("name", ["rnn_classifier.pt", "tied.pt"])
def test_add_module_puts_it_before_every_key(name, tmp_path):
    ckptconv("add-module", SAMPLES / name, "out.pt", cwd=tmp_path)
    assert_same(bare(load_here(tmp_path / "out.pt"), "module"), load(SAMPLES / name))


def test_add_module_leaves_keys_that_all_have_it(tmp_path):
    ckptconv("add-module", DDP, "out.pt", cwd=tmp_path)
    assert_same(load_here(tmp_path / "out.pt"), load(DDP))


def test_add_module_is_undone_by_strip_module(tmp_path):
    ckptconv("add-module", SAMPLES / "rnn_classifier.pt", "wrapped.pt", cwd=tmp_path)
    ckptconv("strip-module", "wrapped.pt", "out.pt", cwd=tmp_path)
    assert_same(load_here(tmp_path / "out.pt"), load(SAMPLES / "rnn_classifier.pt"))


def test_add_module_gives_what_a_wrapped_model_loads(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    torch.save(model.state_dict(), tmp_path / "in.pt")
    ckptconv("add-module", "in.pt", "out.pt", "--device", "cuda:0", cwd=tmp_path)
    wrapped = torch.nn.DataParallel(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    )
    wrapped.load_state_dict(load(tmp_path / "out.pt"))
    assert tags(tmp_path / "out.pt") == {"cuda:0"}


# ------------------------------------------------------------------------------------ convert: keys


@pytest.mark.parametrize(
    ("name", "wrappers"),
    [
        ("dp_cuda0.pt", ("module",)),
        ("ddp_cuda3.pt", ("module",)),
        ("compiled.pt", ("_orig_mod",)),
        ("ddp_compiled.pt", ("module", "_orig_mod")),
        ("rnn_classifier.pt", ()),
        ("fp16.pt", ()),
        ("criterion.pt", ()),
    ],
)
def test_convert_strips_the_wrappers(name, wrappers, tmp_path):
    ckptconv("convert", SAMPLES / name, "out.pt", cwd=tmp_path)
    ckptconv("convert", SAMPLES / name, "out.safetensors", cwd=tmp_path)
    expected = bare(load(SAMPLES / name), *wrappers)
    assert_same(load_here(tmp_path / "out.pt"), expected)
    assert_same(
        dict(sorted(load_file(tmp_path / "out.safetensors").items())),
        dict(sorted(expected.items())),
    )


def test_convert_keeps_keys_when_told_to(tmp_path):
    ckptconv("convert", SAMPLES / "ddp_compiled.pt", "out.pt", "--keys", "keep", cwd=tmp_path)
    assert_same(load_here(tmp_path / "out.pt"), load(SAMPLES / "ddp_compiled.pt"))


def test_convert_leaves_module_where_not_every_key_has_it(saved, tmp_path):
    saved({"module.a": W, "head.b": W + 1})
    ckptconv("convert", "in.pt", "out.pt", cwd=tmp_path)
    assert list(load_here(tmp_path / "out.pt")) == ["module.a", "head.b"]


def test_key_rules_apply_one_after_another(saved, tmp_path):
    saved(
        {
            "module.backbone.conv.weight": W,
            "module.backbone.bn.bias": W + 1,
            "module.head.fc.weight": W + 2,
        }
    )
    rules = (
        "--strip-prefix",
        "backbone.",
        "--rename",
        "head.=classifier.",
        "--add-prefix",
        "model.",
    )
    done = ckptconv("convert", "in.pt", "out.pt", *rules, cwd=tmp_path)
    expected = {"model.conv.weight": W, "model.bn.bias": W + 1, "model.classifier.fc.weight": W + 2}
    assert_same(load_here(tmp_path / "out.pt"), expected)
    assert line(done, "keys").startswith("3 of 3 keys renamed")


def test_rules_may_be_given_several_times(saved, tmp_path):
    saved({"a.x": W, "b.y": W + 1, "c.z": W + 2})
    rules = (
        "--strip-prefix",
        "a.",
        "--strip-prefix",
        "b.",
        "--rename",
        "c.=d.",
        "--rename",
        "d.=e.",
    )
    ckptconv("convert", "in.pt", "out.pt", *rules, cwd=tmp_path)
    assert list(load_here(tmp_path / "out.pt")) == ["x", "y", "e.z"]


def test_include_and_exclude_choose_among_the_resulting_keys(tmp_path):
    globs = (
        "--include",
        "features.*",
        "--include",
        "classifier.*",
        "--exclude",
        "*.num_batches_tracked",
    )
    done = ckptconv("convert", DDP, "out.safetensors", *globs, "--json", cwd=tmp_path)
    expected = {key for key in bare(load(DDP), "module") if not key.endswith("num_batches_tracked")}
    assert set(load_file(tmp_path / "out.safetensors")) == expected
    assert [item["path"] for item in done.json()["skipped"]] == [
        "module.features.1.num_batches_tracked"
    ]
    assert "--exclude" in done.json()["skipped"][0]["reason"]


def test_globs_that_leave_nothing_are_an_error(tmp_path):
    for name in ("out.pt", "out.safetensors"):
        assert "no key is left" in assert_one_error(
            run("convert", DDP, name, "--include", "x*", cwd=tmp_path)
        )
    assert names(tmp_path) == []


@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
@pytest.mark.parametrize(
    ("command", "rules"),
    [
        ("strip-module", ()),
        ("convert", ("--strip-prefix", "module.")),
        ("convert", ("--rename", "module.a=a")),
        ("convert", ("--rename", "module.=")),
    ],
)
def test_two_keys_that_become_one_are_both_named_and_nothing_is_written(
    command, rules, output, saved, tmp_path
):
    saved({"module.a.weight": W, "b": W, "a.weight": W + 1})
    error = assert_one_error(run(command, "in.pt", output, *rules, cwd=tmp_path))
    assert "'module.a.weight'" in error
    assert "'a.weight'" in error
    assert error.startswith("error: in.pt: ")
    assert names(tmp_path) == ["in.pt"]


def test_a_collision_within_a_training_checkpoint_names_its_place(saved, tmp_path):
    saved({"epoch": 1, "state_dict": {"module.a.weight": W, "a.weight": W + 1}})
    error = assert_one_error(run("strip-module", "in.pt", "out.pt", cwd=tmp_path))
    assert error.startswith("error: in.pt: state_dict: ")


def test_a_rule_that_leaves_nothing_of_a_key_is_an_error(saved, tmp_path):
    saved({"weight": W, "bias": W})
    assert "'bias'" in assert_one_error(
        run("convert", "in.pt", "out.pt", "--strip-prefix", "bias", cwd=tmp_path)
    )


# ---------------------------------------------------------------------- convert: parts, ties, dtype


def test_only_takes_one_part(tmp_path):
    expected = bare(load(TRAIN)["state_dict"], "module")
    ckptconv("convert", TRAIN, "out.pt", "--only", "state_dict", cwd=tmp_path)
    assert_same(load_here(tmp_path / "out.pt"), expected)
    ckptconv("convert", TRAIN, "out.safetensors", "--only", "state_dict", cwd=tmp_path)
    assert set(load_file(tmp_path / "out.safetensors")) == set(expected)


def test_safetensors_takes_the_state_dict_and_tells_what_it_leaves_out(tmp_path):
    done = ckptconv("convert", TRAIN, "out.safetensors", cwd=tmp_path)
    expected = bare(load(TRAIN)["state_dict"], "module")
    assert_same(
        dict(sorted(load_file(tmp_path / "out.safetensors").items())),
        dict(sorted(expected.items())),
    )
    assert all(part in line(done, "skipped") for part in ("epoch", "optimizer", "scheduler"))


def test_several_state_dicts_are_listed_and_only_chooses(saved, tmp_path):
    saved({"model": {"fc.weight": W}, "ema": {"fc.weight": W + 1}, "epoch": 3})
    error = assert_one_error(run("convert", "in.pt", "out.safetensors", cwd=tmp_path))
    assert "model" in error and "ema" in error and "--only" in error
    assert names(tmp_path) == ["in.pt"]
    ckptconv("convert", "in.pt", "out.safetensors", "--only", "ema", cwd=tmp_path)
    assert_same(load_file(tmp_path / "out.safetensors"), {"fc.weight": W + 1})


def test_a_part_that_is_not_there_is_an_error_that_lists_the_parts(tmp_path):
    error = assert_one_error(run("convert", TRAIN, "out.pt", "--only", "emma", cwd=tmp_path))
    assert "'emma'" in error and "state_dict" in error and "optimizer" in error


def test_a_file_without_a_state_dict_is_an_error(saved, tmp_path):
    saved({"epoch": 1, "losses": [0.5, 0.25]})
    assert "no state dict" in assert_one_error(
        run("convert", "in.pt", "out.safetensors", cwd=tmp_path)
    )
    assert "does not hold a state dict" in assert_one_error(
        run("strip-module", "in.pt", "out.pt", cwd=tmp_path)
    )
    assert names(tmp_path) == ["in.pt"]


def test_tied_tensors_stay_tied_in_a_torch_file(tmp_path):
    ckptconv("convert", TIED, "out.pt", cwd=tmp_path)
    found = load_here(tmp_path / "out.pt")
    assert found["embed.weight"].data_ptr() == found["lm_head.weight"].data_ptr()


def test_tied_tensors_become_aliases_in_safetensors_and_tensors_again(tmp_path):
    done = ckptconv("convert", TIED, "out.safetensors", cwd=tmp_path)
    assert set(load_file(tmp_path / "out.safetensors")) == {
        "embed.weight",
        "norm.weight",
        "norm.bias",
    }
    assert metadata(tmp_path / "out.safetensors")["lm_head.weight"] == "embed.weight"
    assert "lm_head.weight = embed.weight" in line(done, "tied")
    ckptconv("convert", "out.safetensors", "back.pt", cwd=tmp_path)
    assert_same(
        dict(sorted(load_here(tmp_path / "back.pt").items())), dict(sorted(load(TIED).items()))
    )


def test_tied_tensors_can_be_written_each(tmp_path):
    ckptconv("convert", TIED, "out.safetensors", "--tied", "duplicate", cwd=tmp_path)
    assert_same(
        dict(sorted(load_file(tmp_path / "out.safetensors").items())),
        dict(sorted(load(TIED).items())),
    )
    assert "lm_head.weight" not in metadata(tmp_path / "out.safetensors")


@pytest.mark.parametrize("dtype", ["bf16", "f16", "float64", "torch.bfloat16"])
def test_dtype_casts_floating_tensors_as_torch_does(dtype, tmp_path):
    done = ckptconv("convert", DP, "out.pt", "--dtype", dtype, cwd=tmp_path)
    target = {"bf16": torch.bfloat16, "f16": torch.float16, "float64": torch.float64}.get(
        dtype, torch.bfloat16
    )
    expected = {
        key: value.to(target) if value.is_floating_point() else value
        for key, value in bare(load(DP), "module").items()
    }
    assert_same(load_here(tmp_path / "out.pt"), expected)
    assert f"float32 → {str(target).removeprefix('torch.')}" in line(done, "dtype")


def test_values_that_a_cast_makes_infinite_are_counted(saved, tmp_path):
    saved({"fc.weight": torch.tensor([1.0, 1e30, -1e30, float("inf")])})
    done = ckptconv("convert", "in.pt", "out.pt", "--dtype", "f16", cwd=tmp_path)
    assert line(done, "warning").startswith(
        "fc.weight: 2 values beyond the range of float16 became infinite"
    )
    document = ckptconv(
        "convert", "in.pt", "out.safetensors", "--dtype", "f16", "--json", cwd=tmp_path
    ).json()
    assert document["overflowed"] == {"fc.weight": 2}


def test_values_that_a_cast_clips_are_counted_and_told_by_a_batch_too(saved, tmp_path):
    saved({"fc.weight": torch.tensor([1.0, 1e6, -465.0, float("inf"), float("nan")])})
    done = ckptconv("convert", "in.pt", "out.pt", "--dtype", "f8_e4m3", cwd=tmp_path)
    told = "fc.weight: 3 values beyond the range of float8_e4m3fn became 448"
    assert line(done, "warning").startswith(told)
    found = load_here(tmp_path / "out.pt")["fc.weight"].float()
    assert found[1:4].tolist() == [448.0, -448.0, 448.0]
    done = ckptconv(
        "batch", "in.pt", "--out-dir", "o", "--to", "safetensors", "--dtype", "f8_e4m3", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert told in done.out


# ---------------------------------------------------------------------------------- unknown objects


def test_objects_with_a_plain_form_are_rewritten_and_listed(tmp_path):
    done = ckptconv("convert", NAMESPACE, "out.pt", cwd=tmp_path)
    found = load_here(tmp_path / "out.pt")
    expected = torch.load(NAMESPACE, map_location="cpu", weights_only=False)
    plain = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(expected["args"]).items()
    }
    assert found["args"] == plain
    assert type(found["best_acc"]) is float
    assert found["best_acc"] == float(expected["best_acc"])
    assert "argparse.Namespace" in line(done, "rewritten")


def test_an_object_without_a_plain_form_is_refused_dropped_or_kept(saved, tmp_path):
    saved({"state_dict": {"fc.weight": W}, "ratio": ChainMap({"a": 1})})
    error = assert_one_error(run("convert", "in.pt", "out.pt", cwd=tmp_path))
    assert error.startswith("error: in.pt: ratio: collections.ChainMap ")
    assert all(option in error for option in ("--unknown drop", "--unknown keep", "--only"))
    assert names(tmp_path) == ["in.pt"]

    done = ckptconv("convert", "in.pt", "dropped.pt", "--unknown", "drop", cwd=tmp_path)
    assert load_here(tmp_path / "dropped.pt")["ratio"] is None
    assert line(done, "skipped").startswith("ratio: ")

    ckptconv("convert", "in.pt", "kept.pt", "--unknown", "keep", cwd=tmp_path)
    assert torch.load(tmp_path / "kept.pt", weights_only=False)["ratio"] == ChainMap({"a": 1})


# ------------------------------------------------------------------------------------------ devices


def test_the_default_device_is_the_cpu(tmp_path):
    done = ckptconv("convert", TRAIN, "out.pt", cwd=tmp_path)
    assert tags(TRAIN) == {"cpu", "cuda:3"}
    assert tags(tmp_path / "out.pt") == {"cpu"}
    assert "cuda:3 → cpu" in done.err


@pytest.mark.parametrize("tag", ["cuda:1", "cuda", "mps", "xpu:2", "npu:0", "hpu"])
def test_any_device_can_be_written_without_having_it(tag, tmp_path):
    ckptconv("convert", TRAIN, "out.pt", "--device", tag, cwd=tmp_path)
    assert tags(tmp_path / "out.pt") == {tag}


def test_device_keep_keeps_every_tag(tmp_path):
    ckptconv("convert", TRAIN, "out.pt", "--device", "keep", cwd=tmp_path)
    assert tags(tmp_path / "out.pt") == {"cpu", "cuda:3"}


def test_device_auto_is_the_best_device_of_this_host(tmp_path):
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    document = ckptconv("devices", "--json", cwd=tmp_path, env=hidden).json()
    ckptconv("convert", TRAIN, "out.pt", "--device", "auto", cwd=tmp_path, env=hidden)
    assert tags(tmp_path / "out.pt") == {document["auto"]}


def test_map_location_maps_one_tag_and_keeps_the_others(tmp_path):
    done = ckptconv("convert", TRAIN, "out.pt", "--map-location", "cuda:3=cuda:0", cwd=tmp_path)
    assert tags(tmp_path / "out.pt") == {"cpu", "cuda:0"}
    assert "cuda:3 → cuda:0" in done.err


def test_map_location_goes_before_device(tmp_path):
    maps = ("--map-location", "cuda:3=cuda:0", "--map-location", "cuda:9=cuda:8")
    ckptconv("convert", TRAIN, "out.pt", *maps, "--device", "mps", cwd=tmp_path)
    assert tags(tmp_path / "out.pt") == {"cuda:0", "mps"}


def test_two_targets_for_one_tag_are_a_usage_error(tmp_path):
    maps = ("--map-location", "cuda:3=cuda:0", "--map-location", "cuda:3=cpu")
    error = assert_one_error(run("convert", TRAIN, "out.pt", *maps, cwd=tmp_path), code=2)
    assert "cuda:3" in error


def test_safetensors_records_the_device(tmp_path):
    ckptconv("convert", DDP, "out.safetensors", "--device", "cuda:1", cwd=tmp_path)
    assert metadata(tmp_path / "out.safetensors") == {"format": "pt", "device": "cuda:1"}
    ckptconv("convert", "out.safetensors", "back.pt", "--device", "keep", cwd=tmp_path)
    assert tags(tmp_path / "back.pt") == {"cuda:1"}


def test_devices_shows_the_host(tmp_path):
    done = ckptconv("devices", cwd=tmp_path)
    assert "--device auto would choose" in done.out
    assert "CUDA_VISIBLE_DEVICES" in done.out
    document = ckptconv("devices", "--json", cwd=tmp_path).json()
    assert {
        "gpus",
        "cuda_visible_devices",
        "torch",
        "cuda_devices",
        "mps",
        "xpu_devices",
        "auto",
        "notes",
    } <= set(document)
    assert document["torch"] == torch.__version__
    assert document["auto"] in done.out


# ------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".tar", ".PT"])
def test_the_name_of_the_output_says_torch(suffix, tmp_path):
    ckptconv("convert", DDP, f"out{suffix}", cwd=tmp_path)
    assert zipfile.is_zipfile(tmp_path / f"out{suffix}")


def test_to_says_the_format_of_a_name_that_says_none(tmp_path):
    ckptconv("convert", DDP, "out", "--to", "safetensors", cwd=tmp_path)
    assert set(load_file(tmp_path / "out")) == set(bare(load(DDP), "module"))
    ckptconv("convert", DDP, "model", "--to", "torch", cwd=tmp_path)
    assert set(load_here(tmp_path / "model")) == set(bare(load(DDP), "module"))


def test_a_name_that_says_no_format_is_an_error(tmp_path):
    for name in ("out", "out.onnx"):
        assert "--to torch or --to safetensors (or dcp, universal, npz)" in assert_one_error(
            run("convert", DDP, name, cwd=tmp_path), code=2
        )
    assert names(tmp_path) == []


def test_safetensors_becomes_torch(tmp_path):
    save_file(
        {"b": W, "a": W + 1}, tmp_path / "in.safetensors", metadata={"format": "pt", "author": "me"}
    )
    ckptconv("convert", "in.safetensors", "out.pt", "--add-prefix", "module.", cwd=tmp_path)
    found = load_here(tmp_path / "out.pt")
    assert_same(dict(sorted(found.items())), {"module.a": W + 1, "module.b": W})
    ckptconv("convert", "in.safetensors", "out.safetensors", cwd=tmp_path)
    assert metadata(tmp_path / "out.safetensors")["author"] == "me"


def test_what_safetensors_cannot_hold_is_refused_by_name(saved, tmp_path):
    saved({"a": W, "s": torch.empty(2, dtype=torch.bits8)})
    error = assert_one_error(run("convert", "in.pt", "out.safetensors", cwd=tmp_path))
    assert error.startswith("error: in.pt: ")
    assert names(tmp_path) == ["in.pt"]


# ------------------------------------------------------------------------------ outputs on the disk


def test_an_output_that_exists_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "out.pt").write_bytes(b"precious")
    assert "--force" in assert_one_error(run("convert", DDP, "out.pt", cwd=tmp_path))
    assert (tmp_path / "out.pt").read_bytes() == b"precious"
    assert names(tmp_path) == ["out.pt"]


@pytest.mark.parametrize("command", ["convert", "strip-module"])
def test_force_replaces_the_output(command, tmp_path):
    (tmp_path / "out.pt").write_bytes(b"old")
    ckptconv(command, DDP, "out.pt", "--force", cwd=tmp_path)
    assert_same(load_here(tmp_path / "out.pt"), bare(load(DDP), "module"))
    assert names(tmp_path) == ["out.pt"]


def test_the_input_can_be_the_output_with_force(tmp_path):
    shutil.copy(DDP, tmp_path / "model.pt")
    assert "exists" in assert_one_error(run("convert", "model.pt", "model.pt", cwd=tmp_path))
    assert (tmp_path / "model.pt").read_bytes() == DDP.read_bytes()
    done = ckptconv("convert", "model.pt", "model.pt", "--force", "--verify", cwd=tmp_path)
    assert line(done, "verified").startswith(f"{len(load(DDP))} tensors")
    assert_same(load_here(tmp_path / "model.pt"), bare(load(DDP), "module"))
    assert names(tmp_path) == ["model.pt"]


def test_dry_run_says_what_it_would_write_and_writes_nothing(tmp_path):
    done = ckptconv("convert", TRAIN, "out.safetensors", "--dry-run", cwd=tmp_path)
    assert done.lines[0].startswith("would write out.safetensors")
    assert names(tmp_path) == []
    planned = ckptconv("convert", TRAIN, "out.safetensors", "-n", "--json", cwd=tmp_path).json()
    assert planned["dry_run"] is True
    assert names(tmp_path) == []
    written = ckptconv("convert", TRAIN, "out.safetensors", "--json", cwd=tmp_path).json()
    assert written["dry_run"] is False
    assert {key: written[key] for key in planned if key != "dry_run"} == {
        key: value for key, value in planned.items() if key != "dry_run"
    }
    assert planned["output"]["bytes"] == (tmp_path / "out.safetensors").stat().st_size


def test_dry_run_says_why_the_output_would_be_refused(tmp_path):
    (tmp_path / "out.pt").write_bytes(b"good")
    done = run("strip-module", DDP, "out.pt", "--dry-run", cwd=tmp_path)
    assert (
        done.exit == 1
        and "keys" in done.err
        and done.err.splitlines()[-1].startswith("error: out.pt: exists; add --force")
    )
    document = run("strip-module", DDP, "out.pt", "--dry-run", "--json", cwd=tmp_path)
    assert (
        document.exit == 1
        and document.json()["error"]["what"] == "exists"
        and document.json()["output"]["bytes"] > 0
    )
    assert run("strip-module", DDP, "out.pt", "--dry-run", "--force", cwd=tmp_path).exit == 0
    missing = run("strip-module", DDP, "new folder/out.pt", "--dry-run", cwd=tmp_path)
    assert missing.exit == 1 and missing.err.splitlines()[-1].endswith(
        "its folder does not exist; mkdir -p 'new folder'"
    )
    assert (tmp_path / "out.pt").read_bytes() == b"good"


def test_dry_run_fails_where_the_conversion_would(saved, tmp_path):
    saved({"module.a.weight": W, "a.weight": W + 1})
    assert_one_error(run("strip-module", "in.pt", "out.pt", "--dry-run", cwd=tmp_path))


def test_quiet_prints_nothing_but_errors(tmp_path):
    for option in ("--quiet", "-q"):
        done = ckptconv("convert", DDP, "out.pt", option, "--force", cwd=tmp_path)
        assert done.out == done.err == ""
    done = ckptconv("convert", DDP, "other.pt", "--quiet", "--dry-run", cwd=tmp_path)
    assert done.out == done.err == ""
    assert "exists" in assert_one_error(run("convert", DDP, "out.pt", "--quiet", cwd=tmp_path))


@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
def test_verify_reads_every_tensor_back(output, tmp_path):
    document = ckptconv(
        "convert", DP, output, "--verify", "--dtype", "bf16", "--json", cwd=tmp_path
    ).json()
    assert document["verified"] == len(load(DP))
    assert ckptconv("convert", DP, f"b{output}", "--json", cwd=tmp_path).json()["verified"] is None


def test_no_fsync_writes_the_same_bytes(tmp_path):
    ckptconv("convert", TRAIN, "synced.pt", cwd=tmp_path)
    ckptconv("convert", TRAIN, "unsynced.pt", "--no-fsync", cwd=tmp_path)
    assert (tmp_path / "synced.pt").read_bytes() == (tmp_path / "unsynced.pt").read_bytes()


@pytest.mark.parametrize(
    ("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)]
)
def test_a_new_output_gets_the_permissions_of_the_umask(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        ckptconv("convert", DDP, "out.pt", cwd=tmp_path)
        ckptconv("convert", DDP, "out.safetensors", "--force", cwd=tmp_path)
    finally:
        os.umask(before)
    assert [
        (tmp_path / name).stat().st_mode & 0o7777 for name in ("out.pt", "out.safetensors")
    ] == [mode, mode]


def test_a_replaced_output_keeps_its_permissions(tmp_path):
    (tmp_path / "out.pt").write_bytes(b"old")
    (tmp_path / "out.pt").chmod(0o606)
    ckptconv("convert", DDP, "out.pt", "--force", cwd=tmp_path)
    assert (tmp_path / "out.pt").stat().st_mode & 0o7777 == 0o606


def test_a_linked_output_is_written_where_the_link_points(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real.pt").write_bytes(b"old")
    (tmp_path / "link.pt").symlink_to("disk/real.pt")
    assert_one_error(run("convert", DDP, "link.pt", cwd=tmp_path))
    assert (tmp_path / "disk" / "real.pt").read_bytes() == b"old"
    ckptconv("convert", DDP, "link.pt", "--force", cwd=tmp_path)
    assert (tmp_path / "link.pt").is_symlink()
    assert_same(load_here(tmp_path / "disk" / "real.pt"), bare(load(DDP), "module"))
    assert names(tmp_path / "disk") == ["real.pt"]


def test_a_dangling_link_is_filled(tmp_path):
    (tmp_path / "link.pt").symlink_to("new.pt")
    ckptconv("convert", DDP, "link.pt", cwd=tmp_path)
    assert (tmp_path / "link.pt").is_symlink()
    assert names(tmp_path) == ["link.pt", "new.pt"]


OUTPUTS_THAT_CANNOT_BE = {
    "in no folder": ("nowhere/out.pt", "its folder does not exist"),
    "in no folder with a line break": ("no\nwhere/out.pt", "its folder does not exist"),
    "under a file": ("file/out.pt", "is inside a file"),
    "a device": ("/dev/null", "device"),
    "a pipe": ("pipe", "pipe"),
    "a name that is too long": ("n" * 300 + ".pt", "too long"),
    "a loop of links": ("loop.pt", "loop.pt"),
    "in a loop of links": ("loop.pt/out.pt", "loop.pt"),
}


@pytest.mark.parametrize("what", OUTPUTS_THAT_CANNOT_BE)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(what, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    output, said = OUTPUTS_THAT_CANNOT_BE[what]
    for force in ((), ("--force",)):
        assert said in assert_one_error(
            run("convert", DDP, output, "--to", "torch", *force, cwd=tmp_path, limit=20)
        )
    assert names(tmp_path) == before


def test_a_folder_inside_a_file_is_refused_as_such(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    said = assert_one_error(run("convert", DDP, "file/out", "--to", "dcp", cwd=tmp_path))
    assert "is inside a file, but must be inside a folder; name another folder" in said


@pytest.mark.parametrize(
    "name", ["字" * 84 + ".pt", "n" * 252 + ".pt", "é" * 100 + ".safetensors"], ids=["3", "1", "2"]
)
def test_the_longest_names_can_be_written(name, tmp_path):
    assert len(name.encode()) <= 255
    ckptconv("convert", DDP, name, cwd=tmp_path)
    assert names(tmp_path) == [name]


# --------------------------------------------------------------------------- failures leave nothing


@pytest.fixture
def rotten(tmp_path) -> Path:
    """A file of 8 MB in the middle of which a bit of a tensor is wrong."""
    torch.save(
        {f"module.{index}.weight": torch.full((1 << 18,), float(index)) for index in range(8)},
        tmp_path / "in.pt",
    )
    whole = bytearray((tmp_path / "in.pt").read_bytes())
    whole[whole.index(struct.pack("<f", 4.0) * 100) + (1 << 19)] ^= 1
    (tmp_path / "in.pt").write_bytes(whole)
    return tmp_path / "in.pt"


@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
@pytest.mark.parametrize("options", [(), ("--dtype", "f16"), ("--verify",)])
def test_damage_in_the_middle_leaves_no_output(output, options, rotten, tmp_path):
    error = assert_one_error(run("convert", rotten, output, *options, cwd=tmp_path))
    assert "in.pt: in/data/" in error
    assert "CRC-32" in error
    assert names(tmp_path) == ["in.pt"]


def test_damage_leaves_the_old_output(rotten, tmp_path):
    (tmp_path / "out.pt").write_bytes(b"precious")
    assert_one_error(run("convert", rotten, "out.pt", "--force", cwd=tmp_path))
    assert (tmp_path / "out.pt").read_bytes() == b"precious"
    before = rotten.read_bytes()
    assert_one_error(run("convert", rotten, rotten, "--force", cwd=tmp_path))
    assert rotten.read_bytes() == before
    assert names(tmp_path) == ["in.pt", "out.pt"]


def test_an_output_larger_than_the_disk_is_refused_at_once(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    (tmp_path / "in.safetensors").write_bytes(b"")
    size = (free + (1 << 40)) // 4 * 4
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    ).encode()
    with (tmp_path / "in.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    done = run("convert", "in.safetensors", "out.safetensors", cwd=tmp_path, limit=20)
    assert "the disk has" in assert_one_error(done)
    assert done.seconds < 10
    assert names(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
@pytest.mark.parametrize("nbytes", [100, 3 << 20])
def test_a_file_that_may_not_be_so_large_leaves_nothing(nbytes, output, saved, tmp_path):
    saved({f"layer.{index}.weight": torch.full((1 << 18,), float(index)) for index in range(8)})
    error = assert_one_error(
        run(
            "convert", "in.pt", output, "--no-fsync", cwd=tmp_path, rlimits={"RLIMIT_FSIZE": nbytes}
        )
    )
    assert "it exceeds the largest file size of this process (ulimit -f)" in error
    assert names(tmp_path) == ["in.pt"]


def test_inflated_records_leave_nothing_in_the_temporary_folder(saved, tmp_path):
    saved({"module.fc.weight": torch.arange(1 << 16)})
    (tmp_path / "tmp").mkdir()
    deflated = zipfile.ZipFile(tmp_path / "deflated.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "in.pt") as stored, deflated:
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
    for output in ("out.pt", "out.safetensors"):
        ckptconv(
            "convert", "deflated.pt", output, cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")}
        )
    assert_same(load_here(tmp_path / "out.pt"), {"fc.weight": torch.arange(1 << 16)})
    assert names(tmp_path / "tmp") == []


@pytest.mark.trust
@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
def test_memory_does_not_grow_with_the_checkpoint(output, tmp_path):
    with torch.serialization.skip_data():
        torch.save(
            {f"{index}.weight": torch.empty(1 << 24) for index in range(2)}, tmp_path / "in.pt"
        )
    done = run_process("convert", "in.pt", output, "--no-fsync", cwd=tmp_path)
    assert (tmp_path / output).stat().st_size >= 1 << 27
    assert done.rss - idle_rss() < 60_000_000


def as_in_the_foreground() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, these tests among it; a child
    would go on ignoring it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
def test_a_signal_in_the_middle_leaves_nothing(number, code, output, tmp_path):
    if shutil.disk_usage(tmp_path).free < 8 << 30:
        pytest.skip("the disk has less than 8 GiB left for a long conversion")
    # a sparse file: no bytes are written, as many are read as if they were
    with torch.serialization.skip_data():
        torch.save({"w": torch.empty(3 << 30, dtype=torch.uint8)}, tmp_path / "in.pt")
    command = [*PROGRAM, "convert", "in.pt", output, "--no-fsync"]
    child = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        preexec_fn=as_in_the_foreground,
    )
    try:
        deadline = time.monotonic() + 30
        while not any(path.stat().st_size > 1 << 22 for path in tmp_path.glob(f".{output}*/*")):
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        child.send_signal(number)
        _, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == code
    assert b"Traceback" not in err
    assert err.strip().count(b"\n") == 0  # at most one line, on a line of its own behind the ^C
    assert names(tmp_path) == ["in.pt"]


# ---------------------------------------------------------------------------------- what is printed

NASTY = "a\x1b[31m\nOK\r\x07\u202e.weight"
ESCAPED = NASTY.encode("unicode_escape").decode()


def assert_clean(text: str) -> None:
    assert text.replace("\n", "").isprintable(), ascii(text)


def test_control_characters_in_keys_are_escaped_everywhere(saved, tmp_path):
    saved({f"module.{NASTY}": W, f"module.b{NASTY}": W, "module.c": W[0]})
    runs = [
        ckptconv("convert", "in.pt", "out.pt", cwd=tmp_path),
        ckptconv("convert", "in.pt", "other.pt", "--dry-run", cwd=tmp_path),
        ckptconv("convert", "in.pt", "out.safetensors", "--exclude", "a*", cwd=tmp_path),
        ckptconv("inspect", "in.pt", cwd=tmp_path),
        ckptconv("inspect", "in.pt", "--depth", "5", cwd=tmp_path),
        run("convert", "in.pt", "new.pt", "--rename", f"a{NASTY[1:]}=c", cwd=tmp_path),
        run("convert", "in.pt", "new.pt", "--only", NASTY, cwd=tmp_path),
    ]
    assert [done.exit for done in runs] == [0, 0, 0, 0, 0, 1, 1]
    for done in runs:
        assert_clean(done.out + done.err)
    assert ESCAPED in runs[0].err
    assert ESCAPED.removesuffix(".weight") in runs[4].out
    assert ESCAPED in assert_one_error(runs[5])


def test_json_escapes_control_characters_and_gives_them_back(saved, tmp_path):
    saved({f"module.{NASTY}": W})
    for arguments in (("convert", "in.pt", "out.pt"), ("inspect", "in.pt", "--depth", "9")):
        done = ckptconv(*arguments, "--json", cwd=tmp_path)
        assert_clean(done.out)
        assert done.err == ""
    module, wrapped = NASTY.removesuffix(".weight"), done.json()["parts"][0]
    assert (wrapped["name"], wrapped["parts"][0]["name"]) == ("module", module)
    converted = ckptconv("convert", "in.pt", "out.pt", "--force", "--json", cwd=tmp_path).json()
    assert converted["state_dicts"][0]["example"] == [f"module.{NASTY}", NASTY]


def test_control_characters_in_objects_tags_and_metadata_are_escaped(saved, tmp_path):
    save_file(
        {"w": W},
        tmp_path / "in.safetensors",
        metadata={"format": "pt", f"k{NASTY}": f"v{NASTY}", "device": f"cuda{NASTY}"},
    )
    saved({"state_dict": {"fc.weight": W}, NASTY: ChainMap({"a": 1}), "note": NASTY})
    runs = [
        ckptconv("inspect", "in.safetensors", cwd=tmp_path),
        ckptconv("convert", "in.safetensors", "out.pt", cwd=tmp_path),
        ckptconv("convert", "in.safetensors", "kept.pt", "--device", "keep", cwd=tmp_path),
        ckptconv("inspect", "in.pt", cwd=tmp_path),
        run("convert", "in.pt", "new.pt", cwd=tmp_path),
        ckptconv("convert", "in.pt", "new.pt", "--unknown", "drop", cwd=tmp_path),
    ]
    for done in runs:
        assert_clean(done.out + done.err)
    assert ESCAPED in assert_one_error(runs[4])


def test_outputs_that_are_not_terminals_get_no_colors(tmp_path):
    for arguments in (("inspect", TRAIN), ("devices",), ("convert", TRAIN, "out.pt"), ("--help",)):
        done = ckptconv(*arguments, cwd=tmp_path, env={"TERM": "xterm-256color"})
        assert "\x1b" not in done.out + done.err


@pytest.mark.parametrize(
    "arguments",
    [("inspect", TRAIN), ("inspect", "missing.pt"), ("inspect",), ("convert", TRAIN, "out.pt")],
)
@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_colors_unless_they_are_not_wanted(arguments, no_color, tmp_path):
    env = {"TERM": "xterm-256color", "NO_COLOR": no_color}
    _, shown = run_on_terminal(*arguments, cwd=tmp_path, columns=80, env=env)
    assert shown and ("\x1b" in shown) is not bool(no_color)


@pytest.mark.parametrize(
    ("encoding", "arguments"),
    crossed(
        ["latin-1", "cp1252", "ascii", "cp437"],
        [("inspect", "in.pt", "--depth", "4"), ("convert", "in.pt", "out.pt"), ("--help",)],
    ),
)
def test_a_terminal_without_unicode_is_no_error(encoding, arguments, saved, tmp_path):
    saved({"module.gew\u00e4cht.\u91cd\u307f": W})
    done = subprocess.run(
        [*PROGRAM, *arguments],
        cwd=tmp_path,
        env=environment(PYTHONIOENCODING=encoding),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # click takes ASCII for UTF-8
    shown = (done.stdout + done.stderr).decode("utf-8" if encoding == "ascii" else encoding)
    # arrows and lines have plain forms
    assert "\\u21" not in shown and "\\u25" not in shown, shown
    if encoding.startswith("cp") and arguments[0] != "--help":
        assert "-> out.pt" in shown if arguments[0] == "convert" else r"\u91cd\u307f" in shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [("inspect", TRAIN), ("inspect", TRAIN, "--json"), ("devices", "--json"), ("--help",)],
)
def test_an_output_that_takes_nothing_is_one_line(arguments, tmp_path):
    with Path("/dev/full").open("w") as full:
        code, _, err = run_bytes(*arguments, cwd=tmp_path, stdout=full.fileno())
    assert code != 0
    assert "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("closed", some(2, [">&-", "2>&-", "<&- >&- 2>&-", ">&- 2>&-"]))
def test_closed_streams_are_no_traceback_and_no_checkpoint_gets_their_numbers(closed, tmp_path):
    def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = f"{shlex.join([*PROGRAM, *map(str, arguments)])} {closed}"
        return subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )

    done = shell("convert", TRAIN, "out.pt")
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
    assert ckptconv("diff", TRAIN, "out.pt", "--keys", "strip", "--quiet", cwd=tmp_path).exit == 0
    done = shell("inspect", TRAIN)
    assert done.returncode == (2 if ">&-" in closed.split() else 0), (
        "what cannot be printed is an error"
    )
    assert done.stderr == (
        "error: cannot print the result: Bad file descriptor\n" if closed == ">&-" else ""
    )


def test_a_file_that_nobody_expected_to_fail_is_named(tmp_path):
    fails = "def fail(*_, **__): raise PermissionError(13, 'Permission denied', 'a\\x1bfile')"
    program = (
        f"import ckptconv.cli.main as program\n{fails}\nprogram.cli.main = fail\nprogram.main()"
    )
    command = [sys.executable, "-c", program, "inspect"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "error: a\\x1bfile: Permission denied\n")


@pytest.mark.parametrize("arguments", [("convert", "", "out.pt"), ("convert", TRAIN, ""), ("scan",
    ""), ("diff", TRAIN, ""),
                                       ("inspect", ""), ("doctor", TRAIN, "--like",
                                           "")])  # fmt: skip
def test_an_empty_name_is_not_the_current_folder(arguments, tmp_path):
    shutil.copy(TRAIN, tmp_path / "pytorch_model.bin")
    assert "it is empty, so it does not name a file" in assert_one_error(
        run(*arguments, cwd=tmp_path), code=2
    )


def test_a_name_like_an_option_can_be_fixed(tmp_path):
    shutil.copy(DDP, tmp_path / "-q.pt")
    fix = json.loads(run("doctor", "--json", "--", "-q.pt", cwd=tmp_path).out)["findings"][0][
        "command"
    ]
    assert shlex.split(fix)[2:] == ["./-q.pt", "./-q-portable.pt"]
    ckptconv(*shlex.split(fix)[1:], cwd=tmp_path)
    ckptconv("doctor", "--", "-q-portable.pt", cwd=tmp_path)
    (tmp_path / "-z.pt").write_bytes(gzip.compress(DDP.read_bytes()))
    fix = json.loads(run("doctor", "--json", "--", "-z.pt", cwd=tmp_path).out)["findings"][0]
    assert shlex.split(fix["command"])[2:] == ["./-z.pt", "./-z-portable.pt"]
    ckptconv(*shlex.split(fix["command"])[1:], cwd=tmp_path)
    ckptconv("doctor", "--", "-z-portable.pt", cwd=tmp_path)
    assert "ckptconv convert ./-q.pt OUT.pt" in ckptconv("inspect", "--", "-q.pt", cwd=tmp_path).out


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    command = shlex.join([*PROGRAM, "inspect", str(TRAIN), "--depth", "9", "--json"])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} | head -c 1"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("{", "")


# ---------------------------------------------------------------------------------------- documents


def test_the_document_of_a_conversion_holds_the_facts(tmp_path):
    done = ckptconv("convert", TRAIN, "out.pt", "--json", cwd=tmp_path)
    assert done.err == ""
    document = done.json()
    assert document["source"] == {
        "path": str(TRAIN),
        "format": "torch zip",
        "bytes": TRAIN.stat().st_size,
    }
    assert document["output"] == {
        "path": "out.pt",
        "format": "torch",
        "bytes": (tmp_path / "out.pt").stat().st_size,
    }
    (found,) = document["state_dicts"]
    assert found["path"] == "state_dict"
    assert found["wrappers"] == ["module"]
    assert found["keys"] == found["renamed"] == len(load(TRAIN)["state_dict"])
    assert found["example"][0] == f"module.{found['example'][1]}"
    moved = {(item["before"], item["after"]): item["storages"] for item in document["locations"]}
    assert set(moved) == {("cuda:3", "cpu"), ("cpu", "cpu")}
    assert moved["cpu", "cpu"] == 6
    for name in ("casts", "tied", "skipped", "rewritten", "notes", "overflowed"):
        assert not document[name], name
    assert document["seconds"] >= 0


def test_strip_module_and_add_module_give_documents_too(tmp_path):
    for command in ("strip-module", "add-module"):
        document = ckptconv(command, TIED, f"{command}.safetensors", "--json", cwd=tmp_path).json()
        prefix = "module." if command == "add-module" else ""
        assert document["tied"] == {f"{prefix}lm_head.weight": f"{prefix}embed.weight"}


def test_an_error_gives_a_document_and_a_line(tmp_path):
    (tmp_path / "out.pt").write_bytes(b"")
    done = run("convert", DDP, "out.pt", "--json", cwd=tmp_path)
    assert done.exit == 1
    error = done.json()["error"]
    assert error["kind"] == "OutputRefused"
    assert error["path"] == "out.pt"
    assert error["what"] == "exists"
    assert "--force" in error["hint"]
    assert done.lines == [f"error: {error['message']}"]


PORTABLE = {"criterion.pt", "regression.pt", "rnn_classifier.pt", "tied.pt"}


@pytest.mark.parametrize("name", ALL)
def test_inspect_tells_what_is_in_a_sample_and_how_to_fix_it(name, tmp_path):
    done = ckptconv("inspect", SAMPLES / name, cwd=tmp_path)
    assert done.err == ""
    document = ckptconv("inspect", SAMPLES / name, "--json", cwd=tmp_path).json()
    assert document["path"] == str(SAMPLES / name)
    assert document["format"] == "torch zip"
    assert document["bytes"] == (SAMPLES / name).stat().st_size
    assert set(document["locations"]) == tags(SAMPLES / name)
    assert document["portable"] is (name in PORTABLE)
    said, _, fix = document["verdict"].partition(". Fix: ")
    assert done.out.splitlines()[-2 if fix else -1] == said
    if name in PORTABLE:
        return
    assert done.out.splitlines()[-1] == f"Fix: {fix}"
    command = shlex.split(fix)
    assert command[0] == "ckptconv"
    ckptconv(*command[1:], cwd=tmp_path)
    assert ckptconv("inspect", command[-1], "--json", cwd=tmp_path).json()["portable"] is True
    load_here(tmp_path / command[-1])


def test_inspect_counts_tensors_dtypes_and_objects(tmp_path):
    document = ckptconv("inspect", NAMESPACE, "--json", cwd=tmp_path).json()
    objects = {item["path"]: item["object"] for item in document["odd_objects"]}
    assert objects["args"] == "argparse.Namespace"
    assert all(item["plain_form"] for item in document["odd_objects"])
    fp16 = ckptconv("inspect", SAMPLES / "fp16.pt", "--json", cwd=tmp_path).json()
    assert fp16["tensors"] == len(load(SAMPLES / "fp16.pt"))
    assert set(fp16["dtypes"]) == {"float16", "int64"}
    assert fp16["dtypes"]["int64"] == 1


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_inspect_shows_as_many_levels_as_asked_for(depth, tmp_path):
    document = ckptconv("inspect", TRAIN, "--depth", str(depth), "--json", cwd=tmp_path).json()

    def levels(parts: list) -> int:
        return 1 + max(levels(part["parts"]) for part in parts) if parts else 0

    assert levels(document["parts"]) <= depth + 1
    if depth == 0:
        assert levels(document["parts"]) <= 1


def test_inspect_leaves_the_file_alone(tmp_path):
    shutil.copy(TRAIN, tmp_path / "in.pt")
    (tmp_path / "in.pt").chmod(0o400)
    before = (tmp_path / "in.pt").stat()
    ckptconv("inspect", "in.pt", cwd=tmp_path)
    ckptconv("convert", "in.pt", "out.pt", cwd=tmp_path)
    after = (tmp_path / "in.pt").stat()
    assert (before.st_mtime_ns, before.st_size, before.st_ino) == (
        after.st_mtime_ns,
        after.st_size,
        after.st_ino,
    )
    assert (tmp_path / "in.pt").read_bytes() == TRAIN.read_bytes()


# ------------------------------------------------------------------------------ help and completion

OPTIONS = [
    *(
        "--device",
        "--map-location",
        "--to",
        "--dtype",
        "--only",
        "--include",
        "--exclude",
        "--save-mapping",
        "--tied",
        "--unknown",
    ),
    *("--force", "--dry-run", "--verify", "--no-fsync", "--json", "--quiet"),
]
COMMANDS = {
    "batch": [
        "--out-dir",
        "--jobs",
        "--engine",
        "--address",
        "--share",
        "--ledger",
        "--retry-failed",
        "--on-error",
        "--status",
        "--html",
        "--dtype",
        "--max-shard-size",
        "--verify",
        "--dry-run",
    ],
    "cleanup": ["--abort", "--older-than", "--allow-hosts", "--unpinned", "--limit", "--json"],
    "convert": [
        *OPTIONS,
        "--keys",
        "--strip-prefix",
        "--rename",
        "--add-prefix",
        "--regex",
        "--preset",
        "--rules",
        "--reverse",
    ],
    "manifest": ["-o", "--only", "--tag", "--force", "--limit", "--json"],
    "verify": ["--files", "--public-key", "--only", "--all", "--limit", "--json"],
    "recover": ["--to", "--force", "--limit", "--json"],
    "strip-module": OPTIONS,
    "add-module": OPTIONS,
    "inspect": ["--depth", "--portable", "--json"],
    "report": [
        "-o",
        "--values",
        "--against",
        "--only",
        "--only-b",
        "--tag",
        "--tag-b",
        "--force",
        "--json",
    ],
    "devices": ["--export", "--count", "--min-free", "--shell", "--json"],
    "help": ["TOPIC"],
    "doctor": ["--like", "--model", "--device", "--values", "--strict", "--size", "--json"],
    "diff": [
        "--keys",
        "--strip-prefix",
        "--tag",
        "--tag-b",
        "--atol",
        "--rtol",
        "--equal-nan",
        "--whole",
        "--only",
        "--strict-device",
        "--json",
    ],
    "scan": ["--strict", "--json", "--quiet"],
    "ls": ["GLOB", "--long", "--sort", "--tag", "--json"],
    "stats": ["--only", "--include", "--sort", "--top", "--histogram", "--json"],
    "show": ["INDICES", "--npy", "--npz", "--force", "--json"],
    "merge": [*OPTIONS, "--prefix"],
    "average": [*OPTIONS, "--weights", "--integers"],
    "merge-lora": [*OPTIONS, "--scale"],
    "delta": [
        *("NEW", "--encoding", "--checksum", "--version", "--base-version", "--only-new"),
        *("--tag-new", "--force", "--no-fsync", "--json", "--quiet"),
    ],
    "apply": ["DELTA...", "--to", "--max-shard-size", "--with-files", "--only", *OPTIONS[-6:]],
    "edit": [
        "--metadata",
        "--metadata-from",
        "--remove-metadata",
        "--device",
        "--keys",
        "--rename",
        "--strip-prefix",
        "--rules",
        "--save-mapping",
        "--rewrite",
        "--dry-run",
        "--verify",
        "--no-fsync",
        "--json",
        "--quiet",
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_and_gives_examples(command, tmp_path):
    done = ckptconv(command, "--help", cwd=tmp_path)
    assert done.err == ""
    assert all(option in done.out for option in COMMANDS[command])
    assert f"ckptconv {command}" in done.out.partition("Examples:")[2]
    assert ckptconv(command, "-h", cwd=tmp_path).out == done.out


def test_help_names_every_command(tmp_path):
    done = ckptconv("--help", cwd=tmp_path)
    sections = done.out.partition("Convert:\n")[2].partition("Options:\n")[0]
    listed = re.findall(r"^  ([a-z-]+)  +[A-Z]", sections, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def completing(words: str, count: int, tmp_path: Path) -> list[str]:
    """What bash would offer; the program under its own name."""
    script = Path(sysconfig.get_path("scripts")) / "ckptconv"
    command = (
        [str(script)]
        if script.exists()
        else [
            sys.executable,
            "-c",
            "import sys; sys.argv = ['ckptconv']; import ckptconv.__main__ as program; "
            "program.main()",
        ]
    )
    variables = {
        "_CKPTCONV_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(count),
    }
    done = started(cwd=tmp_path, env=variables, command=command)
    return [offer.partition(",")[2] for offer in done.out.splitlines()]


def test_completion_offers_commands_and_options(tmp_path):
    assert completing("ckptconv str", 1, tmp_path) == ["strip-module"]
    assert set(completing("ckptconv ", 1, tmp_path)) == set(COMMANDS)
    assert completing("ckptconv convert --no", 2, tmp_path) == ["--no-fsync"]
    assert completing("ckptconv convert --to s", 3, tmp_path) == ["safetensors"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(shell, tmp_path):
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("click asks bash for its version")
    script = Path(sysconfig.get_path("scripts")) / "ckptconv"
    if not script.exists():
        pytest.skip("the console script is not installed here")
    done = started(
        cwd=tmp_path, env={"_CKPTCONV_COMPLETE": f"{shell}_source"}, command=[str(script)]
    )
    assert f"_CKPTCONV_COMPLETE={shell}_complete" in done.out


# --------------------------------------------------------------------------------- torch is a guest

BLOCKER = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch must not be imported here")
sys.meta_path.insert(0, NoTorch())
"""


@pytest.fixture
def without_torch(tmp_path_factory) -> dict[str, str]:
    """Variables under which importing torch raises."""
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    variables = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=environment(**variables),
        capture_output=True,
        check=False,
    )
    assert b"torch must not be imported here" in done.stderr
    return variables


def test_files_are_converted_and_inspected_without_torch(without_torch, tmp_path):
    for arguments in (
        ("convert", TRAIN, "out.pt", "--dtype", "bf16", "--verify"),
        ("convert", TRAIN, "out.safetensors", "--device", "cuda:1", "--verify"),
        ("strip-module", DDP, "stripped.pt"),
        ("add-module", "out.safetensors", "wrapped.pt"),
        ("inspect", TRAIN),
        ("inspect", "out.safetensors", "--json"),
    ):
        started(*arguments, cwd=tmp_path, env=without_torch)
    assert_same(load_here(tmp_path / "stripped.pt"), bare(load(DDP), "module"))


def test_devices_works_without_torch(without_torch, tmp_path):
    document = started("devices", "--json", cwd=tmp_path, env=without_torch).json()
    assert document["torch"] is None


def modules_after(code: str) -> set[str]:
    listing = (
        f"{code}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", listing],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_the_package_costs_nothing():
    assert (
        modules_after("import ckptconv")
        & {"torch", "numpy", "click", "rich", "safetensors", "ml_dtypes"}
        == set()
    )


def test_importing_the_library_imports_neither_torch_nor_a_terminal():
    names_ = (
        "convert_checkpoint, open_checkpoint, plan_conversion, load_portable, load_into, "
        "save_portable"
    )
    assert modules_after(f"from ckptconv import {names_}") & {"torch", "click", "rich"} == set()


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_small_file_is_converted_without_numpy(ending, tmp_path):
    made = tmp_path / f"out.{ending}"
    job = f"from ckptconv import Job\nJob({str(DDP)!r}, {str(made)!r}).run()"
    assert modules_after(job) & {"torch", "numpy"} == set()
    assert made.exists()


@pytest.mark.parametrize("named", ["folder", "folder/", "new/", "new.d/"])
def test_a_folder_or_a_slash_at_the_end_means_a_folder(named, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "hf").mkdir()
    shutil.copy(DDP, tmp_path / "hf" / "pytorch_model.bin")
    (tmp_path / "hf" / "config.json").write_text("{}")
    done = ckptconv("convert", "hf", named, cwd=tmp_path)
    assert "config.json of hf not copied; --with-files" in done.err
    assert names(tmp_path / named) == ["model.safetensors"]
    found = load_file(tmp_path / named / "model.safetensors")
    assert_same(dict(sorted(found.items())), dict(sorted(bare(load(DDP), "module").items())))
    refused = run("convert", DDP, named, cwd=tmp_path)
    assert refused.exit == 1 and "model.safetensors: exists" in refused.err
    (tmp_path / named / ".metadata").write_bytes(b"")
    refused = run("convert", DDP, named, "--force", cwd=tmp_path)
    assert refused.exit == 1 and "is a DCP folder" in refused.err


def test_an_option_without_its_value_is_a_wrong_usage():
    """The value of none may be left out: of a filter that would be all there is."""
    count, context = 0, click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        valued = [one for one in command.params if isinstance(one, click.Option) and one.nargs]
        for option in (one.opts[-1] for one in valued if not (one.is_flag or one.count)):
            count += 1
            with pytest.raises(click.BadOptionUsage, match="requires an argument"):
                click.Command.make_parser(command, context).parse_args([option])
            given, _, _ = click.Command.make_parser(command, context).parse_args([option, "-1"])
            assert "-1" in str(given), (name, option)
    assert count > 150


@pytest.mark.parametrize(
    ("command", "address"),
    crossed(["convert", "strip-module", "add-module"], ["s3://bucket/x.pt", "gs://"]),
)
def test_one_address_alone_lacks_an_output(command, address, tmp_path):
    done = run(command, address, cwd=tmp_path)
    assert done.exit == 2 and "OUT is missing" in done.err and "Traceback" not in done.err
