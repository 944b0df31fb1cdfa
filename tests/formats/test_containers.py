"""Containers: each format says itself what its container can hold, and nobody asks for its name."""

from __future__ import annotations

import io
import pickle
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest
import torch

from ckptconv import formats, inspect_checkpoint, open_checkpoint
from ckptconv.formats.containers import named, scanned_first
from ckptconv.support.errors import UnsupportedCheckpoint
from ckptconv.tree.checkpoint import UNKNOWN, Container
from helpers.house import MODULES, package_of

CONTAINERS = {
    f"{module}.{name}": value
    for module in MODULES
    if package_of(module) == "formats"
    for name, value in vars(import_module(f"ckptconv.{module}")).items()
    if isinstance(value, Container) and value is not UNKNOWN
}


def test_no_two_containers_are_called_alike_but_for_megatrons_dcp():
    names = [value.name for value in {id(value): value for value in CONTAINERS.values()}.values()]
    assert sorted({name for name in names if names.count(name) > 1}) == ["DCP"]
    assert len(names) >= 12


@pytest.mark.parametrize("what", CONTAINERS)
def test_who_opens_a_container_is_known_and_what_only_torch_can_say_is_torchs(what):
    found = CONTAINERS[what]
    assert found.by
    assert not found.weights_only or (found.by == "torch.load" and not found.torch_says)
    assert not found.is_usual or not found.why_not


def test_a_checkpoint_has_a_format_as_text_and_facts_go_through_pickles(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    with open_checkpoint(tmp_path / "in.pt") as opened:
        assert opened.format == "torch zip" and type(opened.format) is str
        assert opened.opening.by == "torch.load" and opened.opening.anywhere
        facts = inspect_checkpoint(opened)
    again = pickle.loads(pickle.dumps(facts))
    assert (again.format, again.opening) == (facts.format, facts.opening)


def test_a_format_that_another_thread_is_importing_is_waited_for(tmp_path, monkeypatch):
    """`convert_checkpoint` was an AttributeError when several threads began with it."""
    for name in ("entered", "go_on"):
        monkeypatch.setattr(threading, name, threading.Event(), raising=False)
    lines = ["import threading", "threading.entered.set()", "threading.go_on.wait(9)", "SLOW = 7"]
    (tmp_path / "slow.py").write_text("\n".join(lines))
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(named, "slow.SLOW")]
        threading.entered.wait(9)
        found.append(pool.submit(named, "slow.SLOW"))
        threading.Timer(0.02, threading.go_on.set).start()
        assert [item.result() for item in found] == [7, 7]


def test_the_end_record_of_an_archive_is_fetched_however_long_its_comment_is():
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("data.pkl", bytes(100_000))
        archive.comment = b"c" * 0xFFFF
    raw = made.getvalue()
    ((first, nbytes),) = scanned_first(b"", len(raw))
    assert (first, first + nbytes) == (raw.rindex(b"PK\5\6"), len(raw))


@pytest.mark.parametrize(("count", "shown"), [(40, "x" * 40), (41, "x" * 40 + "…")])
def test_a_text_is_told_by_how_it_begins(count, shown, tmp_path):
    (tmp_path / "a.pt").write_text("x" * count)
    with pytest.raises(UnsupportedCheckpoint, match=rf"it begins: {shown}\)"):
        open_checkpoint(tmp_path / "a.pt")
