"""Who wrote a checkpoint is told by its content; parts are chosen by name; prefixes are offered and
not stripped unasked.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv import CheckpointError, convert_checkpoint, load_portable, open_checkpoint
from ckptconv.convert.options import Options
from ckptconv.convert.planner import plan_conversion
from ckptconv.inspect.facts import inspect_checkpoint
from helpers import oracle
from helpers.oracle import optimizer_state as optimizer

WEIGHTS = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.zeros(2)}
EMA = {key: value + 1 for key, value in WEIGHTS.items()}


# The forms that the frameworks' own saving code gives a checkpoint (their sources are named in
# producers.py).
WRITTEN = {
    "timm": {"epoch": 3, "arch": "resnet18", "state_dict": WEIGHTS, "optimizer": optimizer(),
        "version": 2,
             "args": Namespace(lr=0.1), "state_dict_ema": EMA, "metric": 71.2},
    "MMEngine 0.10.4": {"meta": {"epoch": 1, "mmengine_version": "0.10.4"}, "state_dict": WEIGHTS,
                        "message_hub": {}, "optimizer": optimizer(), "ema_state_dict": EMA},
    "fvcore (detectron2)": {"model": WEIGHTS, "optimizer": optimizer(),
        "scheduler": {"last_epoch": 5}, "iteration": 5},
    "nanoGPT": {"model": WEIGHTS, "optimizer": optimizer(), "model_args": {"n_layer": 2},
        "iter_num": 7,
                "best_val_loss": torch.tensor(1.5), "config": {}},
    "Megatron-LM 3.0": {"args": Namespace(tp=1), "checkpoint_version": 3.0, "iteration": 9,
                        "model": {"language_model": WEIGHTS}},
}  # fmt: skip


def saved(tree: Any, folder: Path) -> Path:
    torch.save(tree, folder / "in.pt")
    return folder / "in.pt"


@pytest.mark.parametrize("name", WRITTEN)
def test_the_framework_is_told_and_its_state_dict_is_found(name, tmp_path):
    source = saved(WRITTEN[name], tmp_path)
    with open_checkpoint(source) as checkpoint:
        found = inspect_checkpoint(checkpoint)
    assert found.producer == name
    only = next(path for path in found.state_dicts if "ema" not in path)
    loaded = load_portable(source, only=only)
    assert {key: value.tolist() for key, value in loaded.items()} == {
        key: value.tolist() for key, value in WEIGHTS.items()
    }
    assert "optimizer" not in found.state_dicts


def test_ema_is_chosen_by_one_name_whatever_the_framework_calls_it(tmp_path):
    source = saved(WRITTEN["timm"], tmp_path)
    loaded = load_portable(source, only="ema")
    assert {key: value.tolist() for key, value in loaded.items()} == {
        key: value.tolist() for key, value in EMA.items()
    }
    convert_checkpoint(source, tmp_path / "ema.pt", only="ema", fsync=False)
    assert torch.load(tmp_path / "ema.pt").keys() == EMA.keys()


def test_nothing_is_said_of_a_plain_state_dict(tmp_path):
    with open_checkpoint(saved(OrderedDict(WEIGHTS), tmp_path)) as checkpoint:
        found = inspect_checkpoint(checkpoint)
    assert found.producer is None and found.offered == {}


def produced(name: str) -> Path:
    path = oracle.corpus_folder().parent / "produced" / name
    if not path.exists():
        pytest.skip("the folder of checkpoints made by frameworks is not here (CKPTCONV_CORPUS)")
    return path


@pytest.mark.parametrize(
    ("name", "producer", "offered"),
    [
        ("lightning.ckpt", "PyTorch Lightning 2.6.6", {"state_dict": "model."}),
        ("peft", "peft (LoRA adapter)", {"": "base_model.model."}),
    ],
)
def test_real_files_of_frameworks_tell_who_wrote_them(name, producer, offered, tmp_path):
    with open_checkpoint(produced(name)) as checkpoint:
        found = inspect_checkpoint(checkpoint)
        assert found.producer == producer and found.offered == offered
        ((path, prefix),) = offered.items()
        plan = plan_conversion(checkpoint, tmp_path / "out.safetensors", Options())
    offers = [note for note in plan.notes if f"--strip-prefix {prefix} removes it" in note]
    assert len(offers) == (name != "peft"), "peft does not find the keys of an adapter without it"
    assert all(key.startswith(prefix) for key in load_portable(produced(name), only=path or None))


@pytest.mark.parametrize("only", [None, "model"])
def test_all_that_stands_beside_the_state_dict_at_any_depth_is_listed(only, tmp_path):
    """A model may be dicts in dicts; what is not taken must be told."""
    encoder = {f"layers.{index}.weight": torch.ones(2) for index in range(3)}
    inner = {"tokenizer": {"size": 4}, "encoder": encoder, "loss": torch.ones(1)}
    tree = {"model": {"language_model": inner, "size": 1}, "checkpoint_version": 3.0, "args": None}
    torch.save(tree, tmp_path / "in.pt")
    result = convert_checkpoint(
        tmp_path / "in.pt", tmp_path / "out.safetensors", only=only, fsync=False
    )
    beside = ["model.language_model.tokenizer", "model.language_model.loss", "model.size"]
    around = ["checkpoint_version", "args"] if only is None else []
    assert [item.path for item in result.plan.skipped] == beside + around


def test_what_stands_beside_a_state_dict_in_a_tuple_is_listed(tmp_path):
    torch.save(({"a.weight": torch.ones(2)}, 7, {"lr": torch.ones(1)}), tmp_path / "in.pt")
    result = convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors", fsync=False)
    assert [item.path for item in result.plan.skipped] == ["1", "2"]


def test_a_model_in_nested_parts_is_not_taken_for_its_largest_part(tmp_path):
    """Megatron's single-rank form: `model.language_model` holds embedding, encoder and output
    layer, each a dict.
    """
    parts = {"embedding": {"weight": torch.ones(2)}, "encoder": {"layers.0.weight": torch.ones(3)}}
    source = saved({"model": {"language_model": parts}, "iteration": 1}, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"taking its state dict .*encoder would leave out 1 other tensor"
    ):
        load_portable(source)
    assert list(load_portable(source, only="model.language_model.encoder")) == ["layers.0.weight"]
    convert_checkpoint(source, tmp_path / "out.pt", fsync=False)
    assert torch.load(tmp_path / "out.pt")["model"]["language_model"]["embedding"][
        "weight"
    ].tolist() == [1, 1]
