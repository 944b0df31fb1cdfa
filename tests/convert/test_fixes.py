"""Every command that doctor or inspect prints works, and what it makes passes; what it loses is
said. Over real files.
"""

from __future__ import annotations

import shlex
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptconv import CheckpointError, diagnose, open_checkpoint
from ckptconv.convert.fixes import Fix, Prescription, surely_works, workable
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.inspect.report import verdict
from helpers import oracle
from helpers.program import run

CORPUS = oracle.corpus_folder()
UNREAD = ("README.md", "torchtitan")


def real_files() -> list[Path]:
    folders = (CORPUS / "files", CORPUS.parent / "produced")
    found = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    return [
        path for path in found if path.name not in UNREAD and not path.name.endswith("_dtensor.pt")
    ]


class Holder(torch.nn.Module):
    """A module with a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = torch.nn.Linear(2, 2), torch.ones(3)


class Odd:
    """An object that has no plain form."""


def saved(folder: Path, tree: object) -> Path:
    torch.save(tree, folder / "made.pt")
    return folder / "made.pt"


def quantized_module() -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(
            torch.nn.Sequential(torch.nn.Linear(8, 8)), {torch.nn.Linear}
        )


W = {"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}
MADE: dict[str, Callable[[], object]] = {
    "a quantized module": quantized_module,
    "a quantized state dict": lambda: quantized_module().state_dict(),
    "a module with more tensors": Holder,
    "an odd object": lambda: {"model": W, "extra": Odd()},
    "tensors at the root and an average": lambda: {**W, "ema": W},
    "an average as a list": lambda: {"model": W, "ema": {"shadow": list(W.values())}},
    "numpy only": lambda: {"fc.weight": np.ones((2, 2))},
    "several state dicts of DDP": lambda: {
        name: {f"module.{key}": value for key, value in W.items()} for name in ("G", "D")
    },
}


def check(path: Path, folder: Path) -> list[str]:
    """Run all that is printed about a file; the commands."""
    ran = []
    for finding in diagnose(path, size=True).findings:
        if finding.command is None:
            assert finding.severity == "info" or finding.advice, f"a dead end: {finding}"
            continue
        assert ("--unknown drop" in finding.command) <= bool(finding.advice), (
            f"what it loses is not said: {finding}"
        )
        if finding.command not in ran:
            made = obey(finding.command, folder)
            ran.append(finding.command)
            after = diagnose(made, size=finding.code == "all-fp32")
            assert after.loads and finding.code not in {other.code for other in after.findings}, (
                finding
            )
    shown = run("inspect", path, cwd=folder)
    assert shown.exit == (1 if diagnose(path).format is None else 0)
    if "Fix: " in shown.out:
        made = obey(shown.out.partition("Fix: ")[2], folder)
        with open_checkpoint(made) as opened:
            assert verdict(inspect_checkpoint(opened))[0]
    return ran


def obey(command: str, folder: Path) -> Path:
    words = shlex.split(command)
    assert words[0] == "ckptconv"
    done = run(*words[1:], cwd=folder)
    assert done.exit == 0, f"{command}\n{done.err}"
    files = [folder / word for word in words[2:] if "-portable" in word or word == "OUT.pt"]
    assert len(files) == 1, command
    return files[0]


@pytest.mark.corpus
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=[pytest.mark.trust] * bool(number % 8))
        for number, path in enumerate(real_files())
    ],
)
def test_every_command_about_a_real_file_works(path, tmp_path):
    copy = tmp_path / path.name
    (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
    check(copy, tmp_path)


@pytest.mark.parametrize("what", MADE)
def test_every_command_about_a_made_file_works(what, tmp_path):
    check(saved(tmp_path, MADE[what]()), tmp_path)


def test_the_outputs_of_one_diagnosis_have_names_of_their_own(tmp_path):
    ran = check(saved(tmp_path, MADE["tensors at the root and an average"]()), tmp_path)
    names = [Path(shlex.split(command)[3]).name for command in ran]
    assert names == ["made-portable.pt", "made-portable-2.pt", "made-portable-3.pt"]


def test_a_dead_end_is_none_and_says_what_to_do(tmp_path):
    path = saved(tmp_path, quantized_module())
    for finding in diagnose(path).findings:
        assert finding.command is None and "save its state_dict()" in finding.advice
    shown = run("inspect", path, cwd=tmp_path)
    assert "No conversion fixes it" in shown.out and "unknown drop" not in shown.out


def test_what_a_fix_would_lose_is_named(tmp_path):
    with open_checkpoint(saved(tmp_path, Holder())) as opened:
        assert workable(Fix(), opened).lost == ("scale (1 tensor)",)
    shown = run("inspect", "made.pt", cwd=tmp_path).out
    assert "leaves out scale (1 tensor)\nFix: " in shown
    assert (
        "loses   left out, without a plain form: scale (1 tensor)"
        in run("doctor", "made.pt", cwd=tmp_path).out
    )


def test_an_object_that_holds_most_of_the_tensors_is_not_dropped(tmp_path):
    odd = Odd()
    odd.weights = {"a": torch.ones(2), "b": torch.ones(2)}
    path = saved(tmp_path, {"odd": odd, "mean": torch.ones(1)})
    with open_checkpoint(path) as opened:
        assert inspect_checkpoint(opened).reasons
        assert "its tensors are lost without it" in str(workable(Fix(), opened))


SEGMENT = st.sampled_from(["module", "_orig_mod", "a", "weight", "", "step", "_checkpoint"])
KEY = st.one_of(st.just(0), st.lists(SEGMENT, min_size=1, max_size=4).map(".".join))
VALUE = st.sampled_from(
    [
        torch.ones(2),
        torch.ones(2, 2).T,
        torch.ones(2, dtype=torch.int8),
        torch.nn.Parameter(torch.ones(2)),
        3,
        {"module.b": torch.ones(2)},
    ]
)


VERSIONS = st.sampled_from([{"version": 1}, {}, 1, {"version": Odd()}, {"version": Odd}])


def with_metadata(pairs: dict, modules: object, **others: object) -> OrderedDict:
    """A state dict as modules give it: an OrderedDict with an attribute, or more."""
    made = OrderedDict(pairs)
    vars(made).update(_metadata=modules, **others)
    return made


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lead=st.sampled_from(["", "module.", "module.module."]),
    pairs=st.dictionaries(KEY, VALUE, min_size=1, max_size=4),
    plain=st.booleans(),
    modules=st.none() | st.dictionaries(st.sampled_from(["", "module", "module.a", 0]), VERSIONS),
)
def test_what_surely_works_does(tmp_path, lead, pairs, plain, modules):
    tree = {
        f"{lead}{key}" if lead else key: torch.ones(2) if plain else value
        for key, value in pairs.items()
    }
    if modules is not None:
        tree = with_metadata(tree, modules)
    with open_checkpoint(saved(tmp_path, tree)) as checkpoint:
        if surely_works(checkpoint):
            assert workable(Fix(), checkpoint) == Prescription(Fix())


@pytest.mark.parametrize(
    ("tree", "is_sure"),
    [
        ({f"module.{key}": value for key, value in W.items()}, True),
        (W, True),
        ({"module.fc.weight": torch.ones(2), "fc.weight": torch.ones(2)}, True),
        ({"module.fc.weight": torch.ones(2), "module._orig_mod.fc.weight": torch.ones(2)}, False),
        ({"model": W}, False),
        ({**W, "step": 3}, False),
        ({"fc.weight": torch.ones(2, dtype=torch.int8)}, False),
        ({}, False),
        ({"module.\ud800": torch.ones(2)}, False),
        (OrderedDict(W), True),
        (torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2))).state_dict(), True),
        (with_metadata(W, OrderedDict({"": {"version": 1}})), True),
        (with_metadata(W, with_metadata({}, {})), False),
        (with_metadata(W, {}, step=3), False),
        (with_metadata(W, {"": 1}), False),
        (with_metadata(W, {"": {"version": Odd()}}), False),
        (with_metadata(W, {0: {"version": 1}}), False),
    ],
)
def test_what_surely_works(tmp_path, tree, is_sure):
    with open_checkpoint(saved(tmp_path, tree)) as checkpoint:
        assert surely_works(checkpoint) is is_sure


def test_what_surely_works_does_in_real_files():
    sure = 0
    for path in real_files():
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError:
            continue
        with checkpoint:
            if surely_works(checkpoint):
                sure += 1
                assert workable(Fix(), checkpoint) == Prescription(Fix()), path
    assert sure
