"""The hidden folder that the outputs of a batch are made in, one after the other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptconv import Job, Options, OutputRefused, convert_many
from ckptconv.io.hidden_folders import KeptFolder
from helpers.engine_conformance import checkpoint
from helpers.lost_workers import LeavingJob


@pytest.fixture
def room(tmp_path):
    checkpoint(tmp_path / "a.pt")
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    return tmp_path


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def convert(room: Path, name: str) -> None:
    Job(room / "a.pt", room / name, fsync=False).run()


def test_outputs_of_one_folder_are_made_in_one(room):
    kept = KeptFolder()
    with kept.used():
        convert(room, "x/1.pt")
        (first,) = hidden(room / "x")
        assert first.startswith(".ckptconv-batch.") and first.endswith(".ckptconv-tmp")
        assert list((room / "x" / first).iterdir()) == []
        convert(room, "x/2.pt")
        assert hidden(room / "x") == [first]
        convert(room, "y/1.pt")
        assert hidden(room / "x") == [] and len(hidden(room / "y")) == 1
    convert(room, "x/3.pt")  # outside of the block it has one of its own
    assert hidden(room / "x") == []
    kept.close()
    kept.close()
    assert hidden(room / "y") == []
    names = {path.name for path in (room / "x").iterdir()}
    assert names == {"1.pt", "2.pt", "3.pt"}


def test_a_mapping_in_another_folder_is_made_beside_it(room):
    jobs = [
        Job(room / "a.pt", room / f"x/{n}.pt", Options(save_mapping=room / f"y/{n}.json"))
        for n in range(3)
    ]
    assert [one.error for one in convert_many(jobs)] == [None] * 3
    assert sorted(path.name for path in (room / "y").iterdir()) == ["0.json", "1.json", "2.json"]
    assert sorted(path.name for path in (room / "x").iterdir()) == ["0.pt", "1.pt", "2.pt"]


def test_what_fails_leaves_it_empty(room):
    kept = KeptFolder()
    with kept.used():
        convert(room, "x/1.pt")
        with pytest.raises(OutputRefused, match="exists"):
            convert(room, "x/1.pt")
        (room / "a.pt").write_bytes((room / "a.pt").read_bytes()[:-30] + bytes(30))
        with pytest.raises(Exception, match=r"a\.pt"):
            convert(room, "x/2.pt")
        (folder,) = hidden(room / "x")
        assert list((room / "x" / folder).iterdir()) == []
    kept.close()


def test_one_that_is_gone_is_made_again(room):
    kept = KeptFolder()
    with kept.used():
        convert(room, "x/1.pt")
        shutil.rmtree(room / "x")
        (room / "x").mkdir()
        convert(room, "x/1.pt")
        assert (room / "x/1.pt").exists()
    kept.close()
    assert hidden(room / "x") == []


def test_what_a_killed_worker_left_is_removed_by_the_next_run_though_nothing_is_left_to_do(room):
    jobs = [Job(room / "a.pt", room / "x/1.pt")]
    report = room / "r.jsonl"
    assert [one.state for one in convert_many(jobs, ledger=report)] == ["done"]
    (room / "x/.ckptconv-batch.0123abcd.ckptconv-tmp").mkdir()
    (room / "x/.ckptconv-batch.0123abcd.ckptconv-tmp/2.pt").write_bytes(b"half")
    assert [one.earlier for one in convert_many(jobs, ledger=report)] == [True]
    assert hidden(room / "x") == []


def test_what_a_worker_left_that_was_lost_in_this_run_is_removed(room, monkeypatch):
    monkeypatch.setattr("ckptconv.batch.drive.FIRST", 0.01)
    jobs = [LeavingJob(room / "a.pt", room / "x/1.pt"), Job(room / "a.pt", room / "y/1.pt")]
    receipts = list(convert_many(jobs, executor="processes", workers=1))
    assert sorted(one.tries for one in receipts) == [1, 2]
    assert hidden(room / "x") == hidden(room / "y") == []


def test_a_folder_that_another_process_holds_stays(room):
    kept, other = KeptFolder(), KeptFolder()
    with kept.used():
        convert(room, "x/1.pt")
    with other.used():
        convert(room, "x/2.pt")
    assert len(hidden(room / "x")) == 2
    kept.close()
    other.close()
    assert hidden(room / "x") == []
