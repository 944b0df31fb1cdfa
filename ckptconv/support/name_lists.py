"""Lists of names that lie beside a module as a text: what is plain, dangerous, or computes.

They are data: long, sorted out by somebody else (Python, torch, numpy), and read as they stand.
"""

from __future__ import annotations

from pathlib import Path


def names_beside(module_file: str) -> dict[str, list[str]]:
    """The sections of the text that has the name of a module, each with its names in order.

    A line in brackets begins a section, one behind a ``#`` says something about it. Words that end
    in a colon are what the names behind them stand in: ``torch.nn: Linear`` is ``torch.nn.Linear``.
    """
    sections: dict[str, list[str]] = {}
    names: list[str] = []
    prefix = ""
    for line in Path(module_file).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            names = sections[line.strip("[]")] = []
            prefix = ""
        elif not line.startswith("#"):
            for word in line.split():
                if word.endswith(":"):
                    prefix = word.replace(":", ".")
                else:
                    names.append(prefix + word)
    return sections
