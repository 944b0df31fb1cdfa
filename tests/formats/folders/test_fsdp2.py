"""Models that `fully_shard` has sharded over processes: their state dicts, full or sharded, fit the
plain model, which then computes the same, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptconv import convert_checkpoint, diagnose, load_into
from ckptconv.support.errors import KeyMismatch
from helpers.examples import crossed
from helpers.worlds import FSDP2, Small

each_wrapping = pytest.mark.parametrize("wrapping", FSDP2)
KINDS = ["full", "gathered", "ranks", "dcp"]
each_kind = pytest.mark.parametrize("kind", KINDS)


def saved(worlds: Path, wrapping: str, kind: str) -> Path | list[Path]:
    """What was saved of a model: the full state dict, the gathered one, both ranks' files, or a DCP
    folder.
    """
    if kind == "ranks":
        return [worlds / f"fsdp2_{wrapping}.{rank}.pt" for rank in (0, 1)]
    return worlds / (f"fsdp2_{wrapping}" if kind == "dcp" else f"fsdp2_{wrapping}.{kind}.pt")


def plain(seed: int = 9) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Small().eval()


def assert_computes_the_same(model: torch.nn.Module, worlds: Path, wrapping: str) -> None:
    forward = torch.load(worlds / f"fsdp2_{wrapping}.forward.pt", weights_only=True)
    assert not torch.equal(plain()(forward["input"]), forward["output"])
    assert torch.equal(model(forward["input"]), forward["output"])


@pytest.mark.parametrize(("wrapping", "kind", "target"), crossed(FSDP2, KINDS, ["model", "like"]))
def test_its_checkpoint_is_fitted_to_the_plain_model(target, wrapping, kind, worlds, tmp_path):
    torch.save(plain(4).state_dict(), tmp_path / "other.pt")
    fit_to = (
        {"model": "helpers.worlds:Small"} if target == "model" else {"like": tmp_path / "other.pt"}
    )
    source = saved(worlds, wrapping, kind)
    convert_checkpoint(
        source, tmp_path / "out.pt", only="model" if kind == "dcp" else None, keys="keep", **fit_to
    )
    model = plain()
    model.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True), strict=True)
    assert_computes_the_same(model, worlds, wrapping)
    if kind != "dcp":
        model = plain()
        assert load_into(model, source).fits
        assert_computes_the_same(model, worlds, wrapping)


@each_wrapping
def test_a_plain_checkpoint_is_fitted_to_a_sharded_one(wrapping, worlds, tmp_path):
    torch.save(plain(4).state_dict(), tmp_path / "plain.pt")
    convert_checkpoint(
        tmp_path / "plain.pt", tmp_path / "out.pt", like=saved(worlds, wrapping, "gathered")
    )
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(found) == list(torch.load(saved(worlds, wrapping, "gathered"), weights_only=True))
    assert all(
        torch.equal(a, b)
        for a, b in zip(found.values(), plain(4).state_dict().values(), strict=True)
    )


@each_kind
def test_a_key_that_is_missing_is_named(kind, worlds, tmp_path):
    more = {**plain().state_dict(), "extra.weight": torch.ones(7)}
    torch.save(more, tmp_path / "more.pt")
    only = "model" if kind == "dcp" else None
    with pytest.raises(KeyMismatch) as caught:
        convert_checkpoint(
            saved(worlds, "compiled", kind),
            tmp_path / "out.pt",
            only=only,
            like=tmp_path / "more.pt",
        )
    assert caught.value.fit.missing == ("extra.weight",) and not caught.value.fit.unexpected


def test_doctor_joins_the_ranks_of_a_model(worlds):
    codes = {finding.code: finding for finding in diagnose(worlds / "fsdp2_compiled.0.pt").findings}
    assert "fsdp2_compiled.1.pt" in codes["lone-rank"].command
