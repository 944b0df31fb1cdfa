"""The script that writes the hostile files which lie outside of the repository, as a module."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from helpers.program import ROOT

GENERATOR = (
    Path(os.environ.get("CKPTCONV_BADCASES", ROOT.parent / "shared" / "badcases")) / "badcases.py"
)
"""Where it is, if it is here."""


def load_generator() -> ModuleType:
    """The generator as a module; nothing is written beside it."""
    spec = importlib.util.spec_from_file_location("badcases", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module
