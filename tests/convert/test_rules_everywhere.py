"""Tensor rules behind `--dequantize`, and over codes, in every command and function that takes
them: what torch makes of the values, and of the codes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptconv import (
    Dequantize,
    KeyRules,
    RefusedObject,
    RenameKeys,
    average_checkpoints,
    load_portable,
    merge_checkpoints,
    open_checkpoint,
    stats_checkpoint,
)
from helpers.program import assert_one_error, run

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from helpers.random_rules import assert_same  # noqa: E402

Tensors = dict[str, Any]
RULES = [
    {"from": "e.{e}.weight", "to": "e.all", "operations": ["stack 0"]},
    {"from": "e.all", "to": ["e.up", "e.gate"], "operations": ["split 1"]},
]
CONFIG = {"torch_dtype": "bfloat16", "quantization_config": {
    "quant_method": "fp8", "weight_block_size": [2, 2]}}  # fmt: skip


def _codes(seed: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    tensors: Tensors = {"norm": torch.rand(6, generator=made).bfloat16()}
    for at in range(3):
        key = f"e.{at}.weight"
        tensors[key] = torch.randn(4, 6, generator=made).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = torch.rand(2, 3, generator=made) + 0.5
    return tensors


def _stacked(tensors: Tensors, ending: str = "") -> tuple[Any, Any]:
    return torch.stack([tensors[f"e.{at}.weight{ending}"] for at in range(3)]).chunk(2, 1)


def _laid_out(tensors: Tensors) -> Tensors:
    """The codes and their scales, as the rules make them."""
    made = {"norm": tensors["norm"]}
    for ending in ("", "_scale_inv"):
        made[f"e.up{ending}"], made[f"e.gate{ending}"] = _stacked(tensors, ending)
    return made


def _values(tensors: Tensors, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """The values, as the rules make them."""
    made = _laid_out(tensors)
    for key in ("e.up", "e.gate"):
        wide = made.pop(f"{key}_scale_inv").repeat_interleave(2, 1).repeat_interleave(2, 2)
        made[key] = (made[key].float() * wide).to(dtype)
    return made


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two quantised models, `a` and `b`, and the rules."""
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        save_file(_codes(seed), tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    save_file(_values(_codes(0)), tmp_path / "values.safetensors")
    save_file(
        {k: t.contiguous() for k, t in _laid_out(_codes(0)).items()}, tmp_path / "codes.pt.st"
    )
    return tmp_path


SAID = ("--rules", "rules.json")


def _run(folder: Path, *arguments: str) -> str:
    done = run(*arguments, cwd=folder)
    assert done.exit == 0, done.err
    return done.out


def test_batch(folder):
    for option, make in (((), _laid_out), (("--dequantize",), _values)):
        out = f"out{len(option)}"
        arguments = ("a", "b", "--out-dir", out, "--to", "torch", *SAID, *option, "--jobs", "1")
        _run(folder, "batch", *arguments)
        made = sorted((folder / out).rglob("*.bin"))
        for seed, path in enumerate(made):
            assert_same(load_portable(path), make(_codes(seed)))
        assert len(made) == 2


def _edits(*, dequantize: bool) -> list[Any]:
    return [Dequantize()] * dequantize + [RenameKeys(KeyRules.of(RULES))]


def test_average(folder):
    sources, out = [folder / "a", folder / "b"], folder / "mean.pt"
    with pytest.raises(RefusedObject, match="holds float8_e4m3fn codes that need their scale"):
        average_checkpoints(sources, out, edits=_edits(dequantize=False))
    average_checkpoints(sources, out, edits=_edits(dequantize=True), verify=True)
    one, other = (_values(_codes(seed), torch.float32) for seed in range(2))  # rounded once
    mean = {key: ((t.double() + other[key].double()) / 2).bfloat16() for key, t in one.items()}
    assert_same(load_portable(out), mean)


@pytest.mark.parametrize("dequantize", [False, True])
def test_merge(folder, dequantize):
    sources, out = {folder / "a": "one.", folder / "b": "other."}, folder / "both.pt"
    edits = _edits(dequantize=dequantize)
    merge_checkpoints([*sources], out, prefix=sources, edits=edits, verify=True)
    make = _values if dequantize else _laid_out
    expected = {
        prefix + key: t
        for seed, prefix in enumerate(sources.values())
        for key, t in make(_codes(seed)).items()
    }
    assert_same(load_portable(out), expected)


def test_diff(folder):
    _run(folder, "diff", "a", "values.safetensors", *SAID, "--dequantize")
    _run(folder, "diff", "a", "codes.pt.st", *SAID)
    done = run("diff", "b", "values.safetensors", *SAID, "--dequantize", cwd=folder)
    assert done.exit == 1 and "e.gate" in done.out


def test_edits_of_readers(folder):
    """Statistics and values: `stats` and `show` have no rules, their functions have."""
    values = _values(_codes(0))
    edits = _edits(dequantize=True)
    found = stats_checkpoint(folder / "a", edits=edits)
    rows = {row.name: row for row in found.tensors}
    assert rows.keys() == values.keys()
    for key, t in values.items():
        figures = rows[key].statistics
        assert figures.mean == pytest.approx(t.double().mean().item(), rel=1e-12)
        assert (figures.minimum, figures.maximum) == (t.min().item(), t.max().item())
    with open_checkpoint(folder / "a", edits=edits) as opened:
        for key, t in values.items():
            assert torch.equal(opened[key].torch(), t)
    with open_checkpoint(folder / "a", edits=edits[1:]) as opened:
        scale = opened["e.up_scale_inv"].numpy()
        assert torch.equal(torch.from_numpy(scale), _laid_out(_codes(0))["e.up_scale_inv"])


def test_edit_in_place_names_the_conversion(folder):
    before = load_file(folder / "a" / "model.safetensors")
    done = run("edit", "a/model.safetensors", *SAID, cwd=folder)
    assert "and these rules make other tensors; apply them with: ckptconv convert" in (
        assert_one_error(done)
    )
    assert_same(load_file(folder / "a" / "model.safetensors"), before)
