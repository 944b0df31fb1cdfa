"""Tensor rules in conversions: real pairs of layouts both ways, random rules against what torch
makes, and every kind of misfit with its message.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from ckptconv import KeyRules, convert_checkpoint, load_portable
from helpers.examples import examples

torch = pytest.importorskip("torch")

from helpers.random_rules import Drawn, drawn_rules  # noqa: E402


def _bits(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype).copy_(t).reshape(-1).view(torch.uint8)


def _same(found, expected) -> None:
    assert {*found} == {*expected}
    for key, t in expected.items():
        assert found[key].dtype == t.dtype and found[key].shape == t.shape, key
        assert torch.equal(_bits(found[key]), _bits(t)), key


def forth_and_back(drawn: Drawn, folder, to: str = "torch") -> None:
    """What rules make is what torch makes, and the mapping gives what there was before."""
    saved, made, back, mapping = (folder / name for name in ("a.pt", "b", "c.pt", "map.json"))
    torch.save(drawn.before, saved)
    rules = KeyRules("keep", rules=tuple(drawn.rules))
    options = {"force": True, "fsync": False}
    convert_checkpoint(saved, made, to=to, keys=rules, save_mapping=mapping, **options)
    _same(load_portable(made), drawn.after)
    _same(load_portable(saved, keys=rules), drawn.after)
    convert_checkpoint(made, back, rules=mapping, reverse=True, verify=True, **options)
    before = torch.load(back, weights_only=True)
    assert list(before) == list(drawn.before)
    _same(before, drawn.before)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=HealthCheck)
@given(drawn_rules())
def test_random_rules_make_what_torch_makes_and_are_undone(tmp_path_factory, drawn):
    forth_and_back(drawn, tmp_path_factory.mktemp("rules"))
