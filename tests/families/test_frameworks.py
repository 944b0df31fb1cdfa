"""What real frameworks leave behind, converted: the tensors are the same bit for bit, a fresh model
loads them strictly and computes the same, and the framework's own loader opens the result.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ckptconv import CheckpointError, KeyRules, load_into, load_portable
from ckptconv.support.errors import KeyMismatch
from helpers import families
from helpers.frameworks import CASES, Case, Saved, Weights, row
from helpers.program import ROOT, Finished, run

pytestmark = [pytest.mark.families, pytest.mark.filterwarnings("ignore")]


def without_version(line: str) -> str:
    """A row of the table, whose versions are those of the day on which it was written."""
    return re.sub(r"^(\| \S+) \S+", r"\1", line)


PAGE = [
    without_version(line) for line in (ROOT / "docs/frameworks.md").read_text("utf-8").splitlines()
]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module", autouse=True)
def processes():
    with families.one_process():
        yield


def converted(made: Saved, out: str | Path, *words: str) -> Finished:
    options = [word for name, value in made.options.items() for word in (f"--{name}", value)]
    done = run("convert", made.source, out, *options, *words, "--verify", cwd=Path(out).parent)
    assert done.exit == 0, done.err
    return done


def read(path: Path) -> Weights:
    """What is in a safetensors file, with the names that share a tensor."""
    with safe_open(path, "pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        aliases = (file.metadata() or {}).items()
        return found | {name: found[kept] for name, kept in aliases if kept in found}


def assert_same(found: Weights, expected: Weights) -> None:
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def assert_computes(model: torch.nn.Module, made: Saved) -> None:
    """The results are the same, but for the order of sums: it changes with the place in memory."""
    torch.testing.assert_close(made.forward(model), made.logits, rtol=1e-6, atol=1e-6)


def test_the_table_has_no_row_without_a_run():
    head = next(at for at, line in enumerate(PAGE) if line.startswith("|--"))
    rows = [line.split(" | ")[1] for line in PAGE[head + 1 :] if line.startswith("| ")]
    assert rows == [case.saves for case in CASES]


@each_case
def test_the_weights_of_a_framework_are_converted_and_loaded(case: Case, tmp_path):
    made = case.make(tmp_path)
    assert without_version(row(case, made)) in PAGE
    fresh = made.build()
    assert not torch.equal(made.forward(fresh), made.logits)
    _assert_asked(made, tmp_path)
    if made.refused is None and made.weights:
        _assert_loaded(made, tmp_path)
    if made.reopen is not None:
        out = tmp_path / "reopened" / made.into
        out.parent.mkdir()
        end = "/" if made.into.endswith("/") else ""
        converted(made, f"{out}{end}", *made.into_options)
        assert_computes(made.reopen(out), made)


def _assert_loaded(made: Saved, folder: Path) -> None:
    """As safetensors, by `load_portable` and by `load_into`."""
    out, fresh = folder / "out.safetensors", made.build()
    converted(made, out)
    found = read(out)
    assert_same(found, made.weights)
    rules = [item for item in made.options.items() if item[0] in ("preset", "exclude")]
    if rules or made.mismatch is None:
        told = fresh.load_state_dict(found, strict=not made.tied)
        if made.tied:
            assert (tuple(told.missing_keys), told.unexpected_keys) == (made.tied, [])
        assert_computes(fresh, made)

    picked = dict(item for item in made.options.items() if item not in rules)
    keys = KeyRules.of(rules) if rules else "strip"
    assert_same(dict(load_portable(made.source, keys=keys, **picked)), made.weights)

    live = made.build()
    if made.mismatch is not None:
        with pytest.raises(KeyMismatch, match=made.mismatch):
            load_into(live, made.source, **picked)
    else:
        assert load_into(live, made.source, **picked).fits
        assert_computes(live, made)


def _assert_asked(made: Saved, folder: Path) -> None:
    """Without the words that a case needs, an error names them; where it needs none, nothing is
    asked.
    """
    done = run("convert", made.source, "asked.safetensors", cwd=folder)
    said = made.asked or made.refused
    if said is None:
        assert done.exit == 0, done.err
        return
    assert done.exit == 1 and re.search(said, done.err), done.err
    if made.asked:
        with pytest.raises(CheckpointError, match=said):
            load_portable(made.source)
