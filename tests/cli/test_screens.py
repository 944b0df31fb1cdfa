"""What the screens of a small checkpoint look like, to the letter: in terminals of 60 and 120
columns, and piped. Whoever changes a screen looks at it, and takes it over here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from unicodedata import east_asian_width

import pytest
import torch
from click import unstyle
from safetensors.torch import save_file

from ckptconv.support.table import Table
from helpers.program import run, run_on_terminal

SCREENS = Path(__file__).resolve().parents[1] / "data" / "screens.json"
COMMANDS = (
    "ls a.safetensors",
    "ls a.safetensors embed.weight *.1.norm --long",
    "inspect a.safetensors",
    "inspect a.safetensors b.safetensors",
    "diff a.safetensors b.safetensors",
    "stats b.safetensors --top 5 --sort name",
)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Two models of eleven layers: one value, a NaN, a dtype, a shape and a key differ."""
    folder = tmp_path_factory.mktemp("screens")
    model = {"embed.weight": torch.arange(32.0).reshape(8, 4) / 32}
    for layer in range(11):
        model[f"layers.{layer}.attention.q_proj.weight"] = torch.eye(4) + layer
        model[f"layers.{layer}.norm"] = torch.ones(4, dtype=torch.bfloat16)
    save_file(model, folder / "a.safetensors")
    other = {key: value.clone() for key, value in model.items()}
    other["layers.2.attention.q_proj.weight"][0, 1] = 2.25
    other["layers.10.attention.q_proj.weight"][3, 3] = float("nan")
    other["layers.3.norm"] = other["layers.3.norm"].float()
    other["layers.4.norm"] = torch.ones(5, dtype=torch.bfloat16)
    other["head.weight"] = other.pop("embed.weight")
    save_file(other, folder / "b.safetensors")
    return folder


def shown(command: str, width: int | None, room: Path) -> list[str]:
    """The lines of a command on a terminal of so many columns (None: piped)."""
    words = command.split()
    if width is None:
        return run(*words, cwd=room).out.splitlines()
    return unstyle(run_on_terminal(*words, cwd=room, columns=width)[1]).splitlines()


@pytest.mark.parametrize("width", [60, 120, None])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_screen_is_as_it_was_looked_at(command, width, room):
    expected = json.loads(SCREENS.read_text("utf-8"))[f"{command} | {width}"]
    assert shown(command, width, room) == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_piped_does_not_depend_on_the_terminal(command, room):
    piped = run(*command.split(), cwd=room, env={"COLUMNS": "40", "TERM": "dumb"}).out
    assert piped.splitlines() == shown(command, None, room)


def test_colors_are_forced_and_forbidden(room):
    words = "diff", "a.safetensors", "b.safetensors"
    plain = run(*words, cwd=room).out
    forced = run(*words, cwd=room, env={"FORCE_COLOR": "1"}).out
    assert "\x1b[" in forced and unstyle(forced) == plain
    both = {"FORCE_COLOR": "1", "NO_COLOR": "1"}
    assert run(*words, cwd=room, env=both).out == plain


def test_more_than_20_of_a_kind_are_counted_and_all_shows_them(tmp_path):
    names = [f"w{number}" for number in range(25)]
    for name, value in (("a", 1.0), ("b", 2.0)):
        tensors = {key: torch.full((2,), value * (at + 1)) for at, key in enumerate(names)}
        save_file({**tensors, name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    words = "diff", "a.safetensors", "b.safetensors"
    lines = run(*words, cwd=tmp_path).out.splitlines()
    assert lines[-1] == "  and 5 more with other values; --all shows all"
    assert sum(" of 2 " in line for line in lines) == 20
    every = run(*words, "--all", cwd=tmp_path).out
    assert all(f"  {name} " in every for name in [*names, "a", "b"]) and "more" not in every


@pytest.mark.parametrize("width", range(24, 60, 7))
def test_a_table_leaves_columns_out_and_cuts_names_to_fit(width):
    rows = [("layers.0.重み.weight" * 2, "1.5", "kept"), ("b", "-12.25", "kept")]
    table = Table(("name", "figure", "word"), rows, ("name", "word"), ("word", "figure"))
    head, first, second, *rest = [row.text for row in table.lines(width)]
    for line in (head, first, second):
        assert sum(2 if east_asian_width(char) in "WF" else 1 for char in line) <= max(width, 24)
    assert first.startswith(rows[0][0]) or re.match(r"layers.*….*weight", first)
    assert ("word" in head) == (not rest) or "no room for" in rest[0]
