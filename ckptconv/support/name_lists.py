"""Data that lie beside a module: lists of names (what is plain, dangerous, or computes) and tables
of layouts as a text, rules as JSON.

They are long, sorted out by somebody else (Python, torch, numpy), and read as they stand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def data_beside(module_file: str, name: str) -> dict[str, Any]:
    """The JSON object in the file of this name in the folder of a module."""
    import json

    text = Path(module_file).with_name(name).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def lines_beside(module_file: str) -> list[str]:
    """The lines of the text that has the name of a module, but empty ones and remarks."""
    lines = Path(module_file).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def names_beside(module_file: str) -> dict[str, list[str]]:
    """The sections of the text that has the name of a module, each with its names in order.

    A line in brackets begins a section, one behind a ``#`` says something about it. Words that end
    in a colon are what the names behind them stand in: ``torch.nn: Linear`` is ``torch.nn.Linear``.
    """
    sections: dict[str, list[str]] = {}
    names: list[str] = []
    prefix = ""
    for line in lines_beside(module_file):
        if line.startswith("["):
            names = sections[line.strip("[]")] = []
            prefix = ""
            continue
        for word in line.split():
            if word.endswith(":"):
                prefix = word.replace(":", ".")
            else:
                names.append(prefix + word)
    return sections
