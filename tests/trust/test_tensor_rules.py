"""Random tensor rules, very many: what torch makes of the same tensors, forwards and back, from
torch files to torch and safetensors files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from helpers.random_rules import Drawn, drawn_rules, forth_and_back

pytestmark = pytest.mark.trust


@settings(max_examples=10_000, deadline=None, suppress_health_check=HealthCheck)
@given(drawn_rules(most=3), st.sampled_from(["torch", "safetensors"]))
def test_ten_thousand_random_rules_make_what_torch_makes(drawn: Drawn, to: str):
    with tempfile.TemporaryDirectory() as folder:
        forth_and_back(drawn, Path(folder), to)
