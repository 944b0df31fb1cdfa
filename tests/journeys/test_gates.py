"""The gates of docs/pipelines.md, run as they stand there: sound models pass all of them, and each
bad one is stopped.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers import oracle
from helpers.program import ROOT, run

SECTIONS = ("A gate before deployment", "A gate for files from elsewhere")
LOOK = "inspect --portable"
VALUES = "doctor --values --strict"
LIKE = "doctor --like"
SCAN = "scan --strict"
GATES = {LOOK, VALUES, LIKE, SCAN}


def gates() -> dict[str, list[str]]:
    """The commands of the gates, by their options: the words of each, with the file to be judged
    called IN.
    """
    page = (ROOT / "docs" / "pipelines.md").read_text()
    found = {}
    for title in SECTIONS:
        section = re.search(
            rf"^## {re.escape(title)}\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE
        )
        assert section is not None, f"docs/pipelines.md has no section '{title}'"
        for block in re.findall(r"^```sh\n(.*?)^```", section[1], re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                words = shlex.split(line.partition("&&")[0])
                name = " ".join([words[1], *(word for word in words[2:] if word.startswith("--"))])
                if name in GATES:
                    judged = [
                        word
                        for word in words[2:]
                        if word in ("model.safetensors", "ddp_cuda3_train.pt")
                    ]
                    assert len(judged) == 1, f"which file is judged? {line}"
                    found[name] = ["IN" if word == judged[0] else word for word in words[1:]]
    return found


def weights() -> OrderedDict[str, torch.Tensor]:
    torch.manual_seed(0)
    return OrderedDict(
        (f"fc{i}.{name}", torch.randn(8, 8)) for i in range(2) for name in ("weight", "bias")
    )


def saved(folder: Path, tree: Any, name: str = "model.pt") -> Path:
    torch.save(tree, folder / name)
    return folder / name


def as_safetensors(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def sharded(folder: Path) -> Path:
    whole = as_safetensors(folder, weights())
    run(
        "convert",
        whole,
        folder / "shards",
        "--to",
        "safetensors",
        "--max-shard-size",
        "600",
        cwd=folder,
    )
    assert len(list((folder / "shards").glob("*.safetensors"))) > 1
    return folder / "shards"


def dcp(folder: Path) -> Path:
    import torch.distributed.checkpoint as writer

    writer.save(dict(weights()), checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def mapped(
    change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]],
) -> OrderedDict[str, torch.Tensor]:
    return OrderedDict(change(key, value.clone()) for key, value in weights().items())


def with_value(value: float) -> OrderedDict[str, torch.Tensor]:
    state = mapped(lambda key, tensor: (key, tensor))
    state["fc0.weight"][0, 0] = value
    return state


GOOD: dict[str, Callable[[Path], Path]] = {
    "a state dict": lambda at: saved(at, weights()),
    "of before torch 1.6": lambda at: legacy(at),
    "safetensors": lambda at: as_safetensors(at, weights()),
    "shards": sharded,
    "DCP": dcp,
    "a training checkpoint": lambda at: saved(
        at, {"model": weights(), "optimizer": optimizer(), "epoch": 3}
    ),
}


def legacy(folder: Path) -> Path:
    torch.save(weights(), folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def optimizer() -> dict[str, Any]:
    return {
        "state": {0: {"exp_avg": torch.ones(8, 8)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }


def on_cuda(folder: Path) -> Path:
    with oracle.tagged(lambda _: "cuda:3"):
        return saved(folder, weights())


def flipped(folder: Path) -> Path:
    path = saved(folder, weights())
    raw = bytearray(path.read_bytes())
    raw[raw.index(weights()["fc0.weight"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(raw)
    return path


def cut(folder: Path) -> Path:
    path = saved(folder, weights())
    path.write_bytes(path.read_bytes()[:-100])
    return path


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo pwned",)


BAD: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "tags of CUDA": (on_cuda, {LOOK, VALUES, LIKE}),
    "keys of DDP": (
        lambda at: saved(at, mapped(lambda key, value: (f"module.{key}", value))),
        {LOOK, VALUES, LIKE},
    ),
    "a whole module": (lambda at: saved(at, torch.nn.Linear(2, 2)), {LOOK, VALUES, LIKE}),
    "cut off": (cut, {LOOK, VALUES, LIKE, SCAN}),
    "a flipped bit": (flipped, {VALUES}),
    "NaN": (lambda at: as_safetensors(at, with_value(float("nan"))), {VALUES}),
    "infinity": (lambda at: as_safetensors(at, with_value(float("inf"))), {VALUES}),
    "a malicious pickle": (lambda at: saved(at, {**weights(), "x": Evil()}), GATES),
    "other keys": (
        lambda at: saved(at, mapped(lambda key, value: (key.replace("fc1", "head"), value[:3]))),
        {LIKE},
    ),
    "a key is missing": (lambda at: saved(at, OrderedDict(list(weights().items())[1:])), {LIKE}),
    "a web page": (lambda at: page(at), {LOOK, VALUES, LIKE}),
}
"""What is bad, how it is made, and which gates stop it."""


def page(folder: Path) -> Path:
    (folder / "model.pt").write_text("<!DOCTYPE html><html>log in</html>")
    return folder / "model.pt"


def passed(name: str, path: Path, folder: Path) -> bool:
    saved(folder, weights(), "gpu0.pt")
    words = [str(path) if word == "IN" else word for word in gates()[name]]
    done = run(*words, cwd=folder, env={"CUDA_VISIBLE_DEVICES": ""})
    assert "Traceback" not in done.err
    return done.exit == 0


def test_the_page_has_all_gates():
    assert gates().keys() == GATES


@pytest.mark.parametrize("what", GOOD)
def test_a_sound_model_passes_every_gate(what, tmp_path):
    path = GOOD[what](tmp_path)
    assert [name for name in gates() if not passed(name, path, tmp_path)] == []


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_stopped(what, tmp_path):
    make, stops = BAD[what]
    path = make(tmp_path)
    assert {name for name in gates() if not passed(name, path, tmp_path)} == stops


def test_one_bad_file_of_several_stops_the_gate(tmp_path):
    good, bad = saved(tmp_path, weights(), "good.pt"), on_cuda(tmp_path)
    for command in (("inspect", "--portable"), ("doctor",)):
        assert run(*command, good, good, cwd=tmp_path).exit == 0
        assert run(*command, good, bad, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}).exit == 1
    shutil.copy(good, tmp_path / "copy.pt")
    assert run("inspect", good, bad, cwd=tmp_path).exit == 0, "only --portable asks"
