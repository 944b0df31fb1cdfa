"""Options of the library that are misspelt, empty or of another type: errors that name the choices,
and nothing is done.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptconv
from ckptconv import CheckpointError, KeyRules
from ckptconv.convert.options import Options
from ckptconv.convert.words import TensorWords
from ckptconv.support.errors import OptionRefused, on_command_line
from ckptconv.support.text import parse_size
from helpers.program import SAMPLES, assert_one_error, run

DDP = SAMPLES / "ddp_cuda3.pt"


@pytest.fixture
def room(tmp_path, monkeypatch) -> Path:
    """A folder with a checkpoint in it that could be meant by an empty path; the current one."""
    shutil.copy(DDP, tmp_path / "in.pt")
    shutil.copy(DDP, tmp_path / "model.bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(**options: Any) -> Callable[[], Any]:
    return lambda: ckptconv.convert_checkpoint("in.pt", "out.safetensors", **options)


def load(**options: Any) -> Callable[[], Any]:
    return lambda: ckptconv.load_portable("in.pt", **options)


def save(**options: Any) -> Callable[[], Any]:
    return lambda: ckptconv.save_portable({"w": torch.zeros(1)}, "out.pt", **options)


def into(**options: Any) -> Callable[[], Any]:
    return lambda: ckptconv.load_into(nn.Linear(1, 1), "in.pt", **options)


def diff(**options: Any) -> Callable[[], Any]:
    return lambda: ckptconv.diff_checkpoints("in.pt", "in.pt", **options)


def diagnose(**options: Any) -> Callable[[], Any]:
    return lambda: ckptconv.diagnose("in.pt", **options)


TO = "is not a format; choose torch, safetensors, dcp, universal or npz"
STRIP = "is not a choice; choose strip or keep, or give KeyRules or a function"
SIZE = "is not a size; write it as '5GB' or '500MB', or give a number of bytes"
UNKNOWN = "is not a choice; choose refuse, drop or keep"
FLAG = "is not a choice; choose True or False"
NAME = "is not a name; leave it out"
DTYPE = "is not a floating dtype; choose f32"
PATH = "is not a path; name a file or a folder"


def cases() -> list[tuple[str, Callable[[], Any]]]:
    """What the error says, and the call."""
    made: list[tuple[str, Callable[[], Any]]] = []

    def add(call: Callable[..., Callable[[], Any]], option: str, says: str, *given: Any) -> None:
        made.extend((f"{option}={one!r} {says}", call(**{option: one})) for one in given)

    def options(**given: Any) -> Callable[[], Any]:
        return lambda: Options(**given)

    def rules(**given: Any) -> Callable[[], Any]:
        return lambda: KeyRules(**given)

    for call in (convert, save, options):
        add(call, "to", TO, "Safetensors", "", 3, b"torch", ["torch"])
    for call in (convert, save, load, diff):
        add(call, "keys", STRIP, "Strip", "", "module", None, 3)
    add(options, "keys", STRIP, "Strip", 3)
    for call in (convert, options):
        add(call, "tied", NAME, "", 1)
        made.append(("tied='' is not a name; leave it out", call(tied=None)))
        add(call, "max_shard_size", SIZE, 0, -5, True, 1.5)
        add(call, "only", NAME, "", 3)
    says = "is not alias or duplicate, and matches no name of a tied tensor"
    made.append((f"in.pt: tied='Alias' {says}", convert(tied="Alias", to="safetensors")))
    add(convert, "max_shard_size", SIZE, "", "0", "-5", "five", "5XB", b"5GB")
    for call in (convert, options, load):
        add(call, "unknown", UNKNOWN, "Drop", "", None, 0)
    for call in (load, into, diff):
        add(call, "only", NAME, "", 3)
    for call in (convert, load, into, diff, diagnose):
        add(call, "tag", NAME, "", 3)
    for call in (convert, save):
        add(call, "dtype", NAME, "", 16)
        add(call, "force", FLAG, "no", "", 1, None)
        add(call, "fsync", FLAG, "no", 0)
    for call in (convert, save, diagnose):
        add(call, "device", NAME, "", 3)
    add(convert, "verify", FLAG, "yes")
    add(convert, "drop_unexpected", FLAG, "no")
    add(convert, "save_mapping", PATH, "", 3)
    add(convert, "map_location", "is not a dict of tags", "cpu", {"cuda": 0}, 3)
    for call in (convert, diagnose):
        add(call, "like", PATH, "", 3)
        add(call, "model", NAME, "", 3)
    add(load, "whole", FLAG, "no", 1)
    add(load, "mmap", FLAG, "no")
    add(into, "strict", FLAG, "no")
    add(into, "assign", FLAG, None)
    add(diff, "whole", FLAG, "no")
    add(diff, "strict_device", FLAG, "no")
    add(diff, "ignore_dtype", FLAG, "no")
    add(diff, "tolerance", "is not a tolerance", 0.1, "loose")
    add(diagnose, "values", FLAG, "no")
    add(
        rules,
        "wrappers",
        "is not a choice; choose strip, module, add-module or keep",
        "Strip",
        "",
        None,
        3,
    )
    add(rules, "strip_prefixes", "is not a list of texts", "module.", [3], None)
    add(rules, "include", "is not a list of texts", "*.weight")
    add(rules, "exclude", "is not a list of texts", "*.bias")
    add(rules, "renames", "is not a list of pairs", "a=b", ["ab=c"], [("a", "b", "c")])
    add(rules, "add_prefix", NAME, 3)
    add(rules, "rules", "is not a tuple of rules", "module.", [("strip-prefix", "a")])
    for empty in ("", 3, b"in.pt", None):
        for name, function in (
            ("source", ckptconv.open_checkpoint), ("source", ckptconv.load_portable),
            ("source", ckptconv.scan_checkpoint),
            ("source", ckptconv.diagnose), ("path", ckptconv.read_key_rules),
            ("source", lambda path: ckptconv.load_into(nn.Linear(1, 1), path)),
            ("output", lambda path: ckptconv.save_portable({"w": torch.zeros(1)}, path)),
            ("source", lambda path: ckptconv.convert_checkpoint(path, "out.pt")),
            ("source", lambda path: ckptconv.convert_checkpoint(["in.pt", path], "out.pt")),
            ("output", lambda path: ckptconv.convert_checkpoint("in.pt", path)),
            ("source", lambda path: ckptconv.diff_checkpoints("in.pt", path)),
        ):  # fmt: skip
            made.append(
                (f"{name}={empty!r} {PATH}", lambda function=function, empty=empty: function(empty))
            )
    return made


@pytest.mark.parametrize(
    ("says", "call"), cases(), ids=lambda part: part if isinstance(part, str) else ""
)
def test_what_is_no_choice_is_refused_by_an_error_that_names_the_choices(says, call, room):
    before = sorted(room.iterdir())
    with on_command_line(False), pytest.raises(OptionRefused) as caught:
        call()
    assert str(caught.value).startswith(says), str(caught.value)
    assert isinstance(caught.value, CheckpointError) and isinstance(caught.value, ValueError)
    assert sorted(room.iterdir()) == before


def test_a_misspelt_dtype_names_the_dtypes(room):
    for call in (convert, save):
        with pytest.raises(
            CheckpointError, match=r"'flaot32' is not a floating dtype; choose f32, f16"
        ):
            call(dtype="flaot32")()


def test_what_is_a_choice_is_taken(room):
    made = Path("a.safetensors")
    ckptconv.convert_checkpoint(
        Path("in.pt"), made, to="safetensors", keys="keep", tied="duplicate", unknown="drop"
    )
    ckptconv.convert_checkpoint(
        ["in.pt"],
        "b.pt",
        max_shard_size="1GB",
        map_location={"cuda:3": "cpu"},
        dtype="F32",
        tag=None,
    )
    ckptconv.convert_checkpoint(
        "in.pt",
        "c.pt",
        keys=KeyRules("module", strip_prefixes=["features."], renames=[["a", "b"]][:0]),
    )
    assert ckptconv.diff_checkpoints("in.pt", "a.safetensors", keys="keep").same
    assert ckptconv.diff_checkpoints("in.pt", "b.pt", keys="strip").same


@pytest.mark.parametrize(
    "options",
    [
        ("--max-shard-size", ""),
        ("--max-shard-size", "0"),
        ("--max-shard-size", "-5"),
        ("--dtype", ""),
        ("--only", ""),
        ("--device", ""),
    ],
    ids=" ".join,
)
def test_an_empty_option_of_the_command_line_is_an_error(options, room):
    done = run("convert", "in.pt", "out.safetensors", *options, cwd=room)
    assert_one_error(done, code=done.exit)
    assert done.exit in (1, 2)
    assert not (room / "out.safetensors").exists()


def test_the_name_that_an_option_had_once_still_means_it(room):
    assert ckptconv.stats("in.pt", match="*bias") == ckptconv.stats("in.pt", include="*bias")
    with pytest.raises(ckptconv.UnknownOption, match="match is now called include, and both"):
        ckptconv.stats("in.pt", match="*bias", include="*weight")
    with pytest.raises(ckptconv.UnknownOption, match="did you mean include"):
        ckptconv.stats("in.pt", includ="*bias")


CALLS: dict[str, dict[str, Any]] = {
    "load_portable": {"source": DDP},
    "load_into": {"model": nn.Linear(1, 1), "source": DDP},
    "save_portable": {"state_dict": {"w": torch.zeros(1)}, "output": "o.pt"},
    "convert_checkpoint": {"source": DDP, "output": "o.pt"},
    "merge_checkpoints": {"sources": [DDP, DDP], "output": "o.pt"},
    "average_checkpoints": {"sources": [DDP, DDP], "output": "o.pt"},
    "edit_checkpoint": {"path": "e.safetensors"},
    "open_checkpoint": {"source": DDP},
    "inspect_checkpoint": {"source": DDP},
    "scan_checkpoint": {"source": DDP},
    "stats_checkpoint": {"source": DDP},
    "diff_checkpoints": {"a": DDP, "b": DDP},
    "diagnose_checkpoint": {"source": DDP},
    "report_checkpoint": {"source": DDP, "output": "o.html"},
    "convert_many": {"jobs": []},
    "Options": {},
    "Tolerance": {},
    "Dequantize": {},
    "Job": {"source": DDP, "output": "o.pt"},
    "fit_keys": {"source": {"w": (1,)}, "target": {"w": (1,)}},
}
"""The functions and what they need."""
NAMED_OTHERWISE = {
    ("save_portable", "state_dict"),  # by the type of what it holds
    ("diff_checkpoints", "a"), ("diff_checkpoints", "b"),  # as sources
    ("report_checkpoint", "against"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_whatever_is_no_argument_is_refused_by_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function: Callable[..., Any] = getattr(ckptconv, name)
    parameters = inspect.signature(function).parameters.values()
    asked = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    if name == "load_portable":
        asked += TensorWords.__annotations__
    for option in asked:
        with pytest.raises(CheckpointError) as raised:
            result = function(**{**CALLS[name], option: object()})
            if name == "convert_many":
                list(result)
        told = str(raised.value)
        assert option in told or (name, option) in NAMED_OTHERWISE, (option, told)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 GiB", 3 << 29), ("200mb", 2 * 10**8), ("7", 7), ("3KB", 3000)],
)
def test_sizes_are_decimal(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5 apples", "1e9"])
def test_other_sizes_are_refused(text):
    with pytest.raises(CheckpointError, match="is not a size; write it as 5GB"):
        parse_size(text)
