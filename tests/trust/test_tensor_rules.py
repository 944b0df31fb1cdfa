"""Random tensor rules, very many: what torch makes of the same tensors, forwards and back, from
torch files to torch and safetensors files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("torch")

from helpers.examples import examples
from helpers.random_rules import Drawn, drawn_rules, forth_and_back

pytestmark = pytest.mark.trust


@pytest.mark.parametrize("to", ["torch", "safetensors"])
@settings(max_examples=examples(5_000), deadline=None, suppress_health_check=HealthCheck)
@given(drawn=drawn_rules(most=3))
def test_ten_thousand_random_rules_make_what_torch_makes(drawn: Drawn, to: str):
    with tempfile.TemporaryDirectory() as folder:
        forth_and_back(drawn, Path(folder), to)
