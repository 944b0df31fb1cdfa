"""Where the project, its tests and their data lie."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"
SAMPLES = ROOT / "sample_ckpts"
CORPUS = Path(os.environ.get("CKPTCONV_CORPUS") or ROOT.parent / "shared" / "corpus")
"""The folder of checkpoints that other people wrote; PRODUCED is that of the frameworks."""

PRODUCED = CORPUS.parent / "produced"
NUMBERS = CORPUS.parent / "numbers"
"""Quantised files, rules, adapters and deltas, made by the frameworks, with what they become."""
