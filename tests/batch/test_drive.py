"""Batches: what is done is not done again, what failed says why, what passes is tried again."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import (
    BatchRefused,
    Job,
    KeyRules,
    OptionRefused,
    Options,
    OutputRefused,
    convert_many,
)
from ckptconv.batch import drive
from ckptconv.batch.identity import fingerprint
from ckptconv.batch.receipts import receipt_of
from ckptconv.convert.execute import ConversionResult
from ckptconv.io.appended import AppendedLines
from ckptconv.io.files import one_run
from ckptconv.support import platforms
from ckptconv.support.errors import RemoteFailure
from ckptconv.support.progress import OnProgress
from helpers.engine_conformance import checkpoint
from helpers.lost_workers import AlwaysKillingJob
from helpers.program import run


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(drive, "FIRST", 0.001)


@pytest.fixture
def room(tmp_path):
    for number in range(4):
        checkpoint(tmp_path / f"{number}.pt", number)
    return tmp_path


def jobs_in(room: Path, count: int = 4, **options: object) -> list[Job]:
    return [
        Job(room / f"{number}.pt", room / f"out/{number}.safetensors", Options(**options))
        for number in range(count)
    ]


def ran(jobs: list[Job], **given: object) -> list[tuple[str, bool]]:
    """What became of jobs, in their order: state, and whether in an earlier run."""
    found = {receipt.output: receipt for receipt in convert_many(jobs, **given)}
    return [(found[str(job.output)].state, found[str(job.output)].earlier) for job in jobs]


def made(room: Path) -> dict[str, tuple[int, int]]:
    """The outputs, by what changes when they are written again."""
    stats = {path.name: path.stat() for path in sorted((room / "out").glob("*.safetensors"))}
    return {name: (found.st_ino, found.st_mtime_ns) for name, found in stats.items()}


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


DONE, EARLIER = ("done", False), ("done", True)


# ------------------------------------------------------------------------------------------- resume


def test_what_is_done_is_not_done_again(room):
    report = room / "r.jsonl"
    assert ran(jobs_in(room), ledger=report) == [DONE] * 4
    before = made(room)
    assert ran(jobs_in(room), ledger=report) == [EARLIER] * 4
    assert made(room) == before
    assert ran(jobs_in(room)) == [("failed", False)] * 4  # without a report, they are in the way
    assert made(room) == before


def test_a_report_tells_each_step(room):
    report = room / "r.jsonl"
    ran(jobs_in(room, 2), ledger=report)
    told = lines(report)
    assert (told[0]["batch"], told[0]["jobs"], told[0]["engine"]) == (1, 2, "serial")
    assert [line.get("state") for line in told[1:]] == ["started", "started", "done", "done"]
    assert told[3]["source"] == [str(room / "0.pt")] and told[3]["tensors"] == 2
    assert told[3]["nbytes"] == (room / "out/0.safetensors").stat().st_size


@pytest.mark.parametrize("option", ["rules", "like", "metadata_from", "order_from"])
def test_a_file_that_an_option_names_is_part_of_what_a_job_is(option, tmp_path):
    named = tmp_path / "named"
    named.write_text("one")
    job = Job("in.pt", "out.pt", options=Options(**{option: str(named)}))
    before = fingerprint(job)
    assert fingerprint(job) == before
    named.write_text("other")
    assert fingerprint(job) != before


@pytest.mark.parametrize("what", ["source", "options", "output", "gone", "rules"])
def test_what_has_changed_is_done_again(what, room):
    report, options = room / "r.jsonl", {}
    (room / "rules.toml").write_text('[[rules]]\nrename = {"a." = "c."}\n')
    if what == "rules":
        options = {"rules": str(room / "rules.toml")}
    assert ran(jobs_in(room, **options), ledger=report) == [DONE] * 4
    if what == "source":
        checkpoint(room / "1.pt", 99)
    elif what == "rules":
        (room / "rules.toml").write_text('[[rules]]\nrename = {"a." = "dd."}\n')
    elif what == "output":
        os.utime(room / "out/1.safetensors")
    elif what == "gone":
        (room / "out/1.safetensors").unlink()
    else:
        options = {"dtype": "bf16"}
    before = made(room)
    found = ran(jobs_in(room, **options), ledger=report)
    after = made(room)
    written = {name for name in after if before.get(name) != after[name]}
    if what in ("options", "rules"):
        assert found == [DONE] * 4 and written == {*after}
    else:
        assert found == [EARLIER, DONE, EARLIER, EARLIER]
        assert written == (set() if what == "output" else {"1.safetensors"})
    if what == "source":
        expected = torch.load(room / "1.pt")
        assert torch.equal(
            load_file(room / "out/1.safetensors")["a.weight"], expected["module.a.weight"]
        )


def test_an_output_that_somebody_else_made_is_not_replaced(room):
    report = room / "r.jsonl"
    ran(jobs_in(room), ledger=report)
    theirs = b"something else"
    (room / "out/2.safetensors").write_bytes(theirs)
    receipts = list(convert_many(jobs_in(room, dtype="bf16"), ledger=report))
    assert [receipt.state for receipt in receipts] == ["done", "done", "failed", "done"]
    assert receipts[2].error.kind == "OutputRefused" and "exists" in receipts[2].error.message
    assert (room / "out/2.safetensors").read_bytes() == theirs
    again = [replace(job, force=True) for job in jobs_in(room, dtype="bf16")]
    assert ran(again, ledger=report, retry_failed=True) == [EARLIER, EARLIER, DONE, EARLIER]


def test_what_was_begun_and_is_whole_is_found_so(room):
    """The driver was killed when the output had its name and the report did not say so yet."""
    report = room / "r.jsonl"
    ran(jobs_in(room), ledger=report)
    before = made(room)
    kept = [line for line in report.read_text().splitlines() if '"done"' not in line]
    report.write_text("\n".join([*kept, '{"key": "/torn', ""]))
    receipts = list(convert_many(jobs_in(room), ledger=report))
    assert [(one.state, one.earlier, one.found) for one in receipts] == [("done", False, True)] * 4
    assert made(room) == before
    assert ran(jobs_in(room), ledger=report) == [EARLIER] * 4


def test_what_is_made_anew_and_was_begun_replaces_what_was_made_before(room):
    """The options changed, and the driver was killed before the new output was there."""
    report = room / "r.jsonl"
    ran(jobs_in(room), ledger=report)
    with report.open("a") as file:
        for number in range(4):
            key = str((room / f"out/{number}.safetensors").absolute())
            file.write(json.dumps({"state": "started", "key": key}) + "\n")
    with one_run():  # as the command is: the outputs that are looked at are no inputs of it
        assert ran(jobs_in(room, dtype="bf16"), ledger=report) == [DONE] * 4
    assert load_file(room / "out/0.safetensors")["a.weight"].dtype is torch.bfloat16


def test_what_was_begun_and_is_something_else_is_not_replaced(room):
    report = room / "r.jsonl"
    ran(jobs_in(room), ledger=report)
    kept = [line for line in report.read_text().splitlines() if '"done"' not in line]
    report.write_text("\n".join([*kept, ""]))
    raw = bytearray((room / "out/3.safetensors").read_bytes())
    raw[-1] ^= 1  # one bit of the last tensor
    (room / "out/3.safetensors").write_bytes(raw)
    receipts = list(convert_many(jobs_in(room), ledger=report))
    assert [one.state for one in receipts] == ["done", "done", "done", "failed"]
    assert (room / "out/3.safetensors").read_bytes() == raw


def test_a_set_of_which_only_shards_have_their_names_is_made_whole(room):
    tensors = {f"w{number}": torch.randn(100, 100) for number in range(6)}
    torch.save(tensors, room / "big.pt")
    job = Job(room / "big.pt", room / "out/model.safetensors", Options(max_shard_size=90_000))
    report = room / "r.jsonl"
    (whole,) = convert_many([job], ledger=report)
    assert len(whole.made) == 4  # three shards and the index
    expected = {path.name: path.read_bytes() for path in (room / "out").iterdir()}
    for name in ("model.safetensors.index.json", "model-00002-of-00003.safetensors"):
        (room / "out" / name).unlink()
    report.write_text("\n".join(report.read_text().splitlines()[:2]) + "\n")
    (again,) = convert_many([job], ledger=report)
    assert (again.state, again.error) == ("done", None)
    assert {path.name: path.read_bytes() for path in (room / "out").iterdir()} == expected


def test_verify_is_asked_of_what_was_not_verified(room):
    report = room / "r.jsonl"
    ran(jobs_in(room), ledger=report)
    before = made(room)
    verified = [replace(job, verify=True) for job in jobs_in(room)]
    receipts = list(convert_many(verified, ledger=report))
    assert [(one.earlier, one.found, one.verified) for one in receipts] == [(False, True, 2)] * 4
    assert made(room) == before
    assert ran(verified, ledger=report) == [EARLIER] * 4


# ---------------------------------------------------------------------------------------- failures


def test_what_failed_is_told_again_and_tried_again_only_when_asked(room):
    report = room / "r.jsonl"
    (room / "1.pt").write_bytes(b"nothing")
    expected = [DONE, ("failed", False), DONE, DONE]
    assert ran(jobs_in(room), ledger=report) == expected
    assert ran(jobs_in(room), ledger=report) == [EARLIER, ("failed", True), EARLIER, EARLIER]
    (first,) = [one for one in convert_many(jobs_in(room), ledger=report) if one.error]
    assert first.error.kind == "UnsupportedCheckpoint" and "1.pt" in first.error.message
    again = ran(jobs_in(room), ledger=report, retry_failed=True)
    assert again == [EARLIER, ("failed", False), EARLIER, EARLIER]
    checkpoint(room / "1.pt", 1)  # now it is another one
    assert ran(jobs_in(room), ledger=report) == [EARLIER, DONE, EARLIER, EARLIER]


@pytest.mark.parametrize("retry_failed", [True, False])
def test_what_was_made_before_a_failure_is_replaced(retry_failed, room):
    """The trainer was writing the file when the second run read it."""
    report = room / "r.jsonl"
    ran(jobs_in(room), ledger=report)
    expected = checkpoint(room / "1.pt", 7)
    raw = (room / "1.pt").read_bytes()
    (room / "1.pt").write_bytes(raw[:-100])
    assert ran(jobs_in(room), ledger=report) == [EARLIER, ("failed", False), EARLIER, EARLIER]
    (room / "1.pt").write_bytes(raw)
    given = {"ledger": report, "retry_failed": retry_failed}
    assert ran(jobs_in(room), **given) == [EARLIER, DONE, EARLIER, EARLIER]
    found = load_file(room / "out/1.safetensors")
    assert torch.equal(found["a.weight"], expected["a.weight"])


def test_of_many_failures_the_first_are_told_and_the_others_counted(tmp_path):
    names = [f"{number}.pt" for number in range(23)]
    for name in names:
        (tmp_path / name).write_bytes(b"nothing")
    asked = ("--out-dir", "out", "--to", "safetensors", "--engine", "serial")
    told = run("batch", *names, *asked, cwd=tmp_path).lines
    failed = [line[10:] for line in told if line.startswith("  failed  ")]
    assert [line.partition(": ")[0] for line in failed[:-1]] == names[:20]
    assert failed[-1] == "3 more; the ledger has them"


def test_a_batch_stops_at_a_failure_where_that_is_asked(room):
    report = room / "r.jsonl"
    (room / "1.pt").write_bytes(b"nothing")
    receipts = list(convert_many(jobs_in(room), ledger=report, on_error="stop"))
    assert [one.state for one in receipts] == ["done", "failed"]
    assert list(made(room)) == ["0.safetensors"]
    assert ran(jobs_in(room), ledger=report) == [EARLIER, ("failed", True), DONE, DONE]


@dataclass(frozen=True, slots=True)
class FlakyJob(Job):
    """A job that fails, in passing, until the files `source`.1 … `source`.N are there."""

    times: int = 2

    def run(self, on_progress: OnProgress | None = None) -> ConversionResult:
        for number in range(1, self.times + 1):
            if not (tried := Path(f"{self.source}.{number}")).exists():
                tried.touch()
                raise RemoteFailure("the server is busy", passing=True, path=self.source)
        return Job.run(self, on_progress)


class Ending:
    """A function of keys that is shown as any other of its kind."""

    def __init__(self, end: str) -> None:
        self.end = end

    def __call__(self, key: str) -> str:
        return key + self.end

    def __repr__(self) -> str:
        return "Ending"


def test_another_function_of_keys_is_another_rule(room):
    for end in "ab":
        options = Options(keys=Ending(end))
        job = Job(room / "0.pt", room / "o.safetensors", options)
        (receipt,) = convert_many([job], ledger=room / "ledger.jsonl")
        assert receipt.state == "done" and not receipt.earlier
        assert all(key.endswith(end) for key in load_file(room / "o.safetensors"))
    (receipt,) = convert_many([job], ledger=room / "ledger.jsonl")
    assert receipt.earlier  # it is the same


def test_a_function_with_fields_may_have_other_code(room):
    """As in a script that was changed, and is run again."""

    def told(order: int) -> str:
        @dataclass(frozen=True)
        class Named:
            end: str = "a"

            def __call__(self, key: str) -> str:
                return "".join((key, self.end)[::order])

        return fingerprint(Job(room / "0.pt", room / "o.pt", Options(keys=Named())))

    assert told(1) != told(-1)


def test_a_job_that_no_other_process_can_be_told_of_says_so(room):
    job = Job(room / "0.pt", room / "o.safetensors", Options(keys=lambda key: key))
    with pytest.raises(OptionRefused, match=r"cannot be sent to another process.*lambda"):
        list(convert_many([job], executor="processes", workers=1))
    assert not (room / "o.safetensors").exists()


def test_another_config_beside_a_file_is_another_source_of_rules_that_read_it(room):
    save_file({"q": torch.arange(8.0)}, room / "q.safetensors")
    rule = {"from": "q", "to": "q", "operations": [{"rope": "num_attention_heads"}]}
    job = Job(room / "q.safetensors", room / "o.safetensors", Options(rules=[rule]))
    made = []
    for heads in (1, None, 2):
        if heads is not None:
            (room / "config.json").write_text(f'{{"num_attention_heads": {heads}}}')
        (receipt,) = convert_many([job], ledger=room / "ledger.jsonl")
        assert receipt.state == "done" and receipt.earlier is (heads is None)
        made.append(load_file(room / "o.safetensors")["q"].tolist())
    # the pairs of each head, the first of all of them before the second
    assert made[0] == made[1] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert made[2] == [0, 2, 1, 3, 4, 6, 5, 7]


def test_another_shard_of_what_keys_are_fitted_to_is_another_option(room):
    """The index that the option names may be as it was."""
    torch.save({"a.w": torch.ones(2), "b.w": torch.ones(3)}, room / "s.pt")
    (room / "like").mkdir()
    index = room / "like" / "model.safetensors.index.json"
    shard = "model-00001-of-00001.safetensors"
    index.write_text(json.dumps({"weight_map": {"x.w": shard, "y.w": shard}}))
    made = []
    for sizes, is_earlier in (((2, 3), False), ((2, 3), True), ((3, 2), False)):
        if not is_earlier:
            x, y = map(torch.zeros, sizes)
            save_file({"x.w": x, "y.w": y}, index.parent / shard)
        job = Job(room / "s.pt", room / "o.pt", Options(like=index))
        (receipt,) = convert_many([job], ledger=room / "ledger.jsonl")
        assert (receipt.state, receipt.earlier) == ("done", is_earlier)
        made.append({key: len(value) for key, value in torch.load(room / "o.pt").items()})
    assert made == [{"x.w": 2, "y.w": 3}, {"x.w": 2, "y.w": 3}, {"y.w": 2, "x.w": 3}]


@pytest.mark.parametrize(("times", "state"), [(2, "done"), (3, "failed")])
def test_what_may_pass_is_tried_again(times, state, room):
    told = []
    job = FlakyJob(room / "0.pt", room / "out/0.safetensors", times=times)
    (receipt,) = convert_many([job], on_event=lambda event: told.append(event.what))
    assert (receipt.state, receipt.tries) == (state, 3)
    assert told == ["started", "again"] * 2 + ["started"]
    assert (receipt.error is not None) is (state == "failed")


def test_a_poison_file_fails_alone(room):
    jobs = jobs_in(room)
    jobs[1] = AlwaysKillingJob(room / "1.pt", room / "out/1.safetensors")
    report = room / "r.jsonl"
    found = {
        receipt.output: receipt
        for receipt in convert_many(jobs, executor="processes", workers=2, ledger=report)
    }
    states = [found[str(job.output)].state for job in jobs]
    assert states == ["done", "failed", "done", "done"]
    error = found[str(jobs[1].output)].error
    assert error.kind == "WorkerLost" and "SIGKILL" in error.message and "3 times" in error.message


# ------------------------------------------------------------------------------ what is found first


def test_jobs_in_each_others_way_are_all_told_before_anything_is_written(room):
    folder = room / "shards"
    folder.mkdir()
    checkpoint(folder / "a.pt")
    jobs = [
        Job(room / "0.pt", room / "out/0.safetensors"),
        Job(room / "1.pt", room / "out" / ".." / "out" / "0.safetensors"),
        Job(folder, room / "out/f.safetensors"),
        Job(room / "2.pt", folder / "b.safetensors"),
        Job(room / "3.pt", room / "0.pt"),
        Job(room / "missing.pt", room / "out/m.safetensors"),
        Job(room / "2.pt", room / "2.pt"),
        Job(room / "3.pt", room / "3.pt", force=True),
    ]
    with pytest.raises(BatchRefused) as raised:
        convert_many(jobs, ledger=room / "r.jsonl")
    problems = raised.value.problems
    assert [problem.partition(":")[0] for problem in problems] == [
        "job 2", "job 4", "job 5", "job 7", "job 6",
    ]  # fmt: skip
    for problem, words in zip(
        problems,
        [
            "has the output of job 1",
            "lies in the source of job 3",
            "is the source of job 1",
            "its output is its source",
            "its source is missing",
        ],
        strict=True,
    ):
        assert words in problem
    assert "5 problems" in str(raised.value) and "and 2 more" in str(raised.value)
    assert not (room / "out").exists() and not (room / "r.jsonl").exists()


def test_what_is_not_a_job_is_refused(room):
    for jobs in (["a.pt"], [("a.pt", "b.pt")]):
        with pytest.raises(OptionRefused, match="is not a Job"):
            convert_many(jobs)  # type: ignore[arg-type]
    with pytest.raises(OptionRefused, match="tries=0"):
        convert_many([], tries=0)
    with pytest.raises(OptionRefused, match="continue or stop"):
        convert_many([], on_error="go on")  # type: ignore[arg-type]
    assert list(convert_many([])) == []


# --------------------------------------------------------------------------------------- the report


def test_of_two_drivers_with_one_report_the_second_is_told(room, monkeypatch):
    monkeypatch.setattr("ckptconv.io.appended._PATIENCE", 0.1)
    report = room / "r.jsonl"
    first = convert_many(jobs_in(room), ledger=report)
    next(first)
    what = "is the ledger of a batch that runs now; wait for it, or name another with --ledger$"
    with pytest.raises(OutputRefused, match=what):
        next(convert_many(jobs_in(room), ledger=report))
    first.close()
    assert ran(jobs_in(room), ledger=report)[0] == EARLIER


def test_a_ledger_that_fails_when_it_is_opened_is_given_back(room, monkeypatch):
    report = room / "r.jsonl"
    report.write_bytes(b"cut off")

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(platforms, "read_at", fails)
        with pytest.raises(OutputRefused, match="cannot be written: Input/output error"):
            AppendedLines(report)
    monkeypatch.setattr("ckptconv.io.appended._PATIENCE", 0.1)
    with contextlib.closing(AppendedLines(report)) as lines:
        lines.append(["whole"], sync=False)
    assert report.read_bytes() == b"cut off\nwhole\n"


def test_a_driver_that_was_killed_keeps_the_next_from_its_report_only_while_its_workers_live(room):
    report = room / "r.jsonl"
    first = convert_many(jobs_in(room), executor="processes", workers=1, ledger=report)
    next(first)
    done = threading.Event()

    def later() -> None:
        time.sleep(0.5)
        first_over.append(time.monotonic())
        first.close()
        done.set()

    first_over: list[float] = []
    thread = threading.Thread(target=later)
    thread.start()
    receipts = list(convert_many(jobs_in(room), ledger=report))
    thread.join()
    assert done.is_set() and len(receipts) == 4 and receipts[0].earlier


@pytest.mark.parametrize("text", ["model,size\n", "[1]\n", '{"a": 1}\n{"state": "done"}\n'])
def test_a_file_that_is_not_a_report_is_not_written_to(text, room):
    (room / "mine.csv").write_text(text)
    with pytest.raises(Exception, match="is not a batch ledger"):
        list(convert_many(jobs_in(room), ledger=room / "mine.csv"))
    assert (room / "mine.csv").read_text() == text


def test_a_torn_or_forged_line_is_passed_over(room):
    report = room / "r.jsonl"
    ran(jobs_in(room), ledger=report)
    with report.open("a") as file:
        key = json.dumps(str(room / "out/0.safetensors"))
        file.write(f'{{"key": {key}, "state": "done", "source": 7, "output": "x"}}\n')
        file.write(f'{{"key": {key}, "state": "failed", "sour')
    assert ran(jobs_in(room), ledger=report) == [EARLIER] * 4
    assert report.read_text().endswith("\n")
    assert ran(jobs_in(room), ledger=report) == [EARLIER] * 4


# ------------------------------------------------------------------------- what is part of a job


def states(jobs: list[Job], room: Path, **given: object) -> list[tuple[str, bool]]:
    found = list(convert_many(jobs, ledger=room / "r.jsonl", **given))
    return [(receipt.state, receipt.earlier) for receipt in found]


def test_a_foreign_checkpoint_in_the_folder_of_a_set_stays_when_it_is_tried_again(room):
    """What lies beside it is what would be written, but the checkpoint is somebody's own."""
    for name in ("src", "out"):
        (room / name).mkdir()
        (room / name / "config.json").write_text("{}")
    tensors = {f"{number}.w": torch.ones(8) for number in range(3)}
    save_file(tensors, room / "src/model.safetensors")
    save_file({"mine": torch.ones(2)}, room / "out/model.safetensors")
    options = Options(to="safetensors", with_files=True, max_shard_size=40)
    jobs = [Job(room / "src/model.safetensors", room / "out", options)]
    assert states(jobs, room) == [("failed", False)]
    assert states(jobs, room, retry_failed=True) == [("failed", False)]
    assert [*load_file(room / "out/model.safetensors")] == ["mine"]


@pytest.mark.parametrize("what", ["changed", "new", "gone"])
def test_files_that_go_with_a_model_are_part_of_the_job(what, room):
    (room / "src").mkdir()
    save_file({"w": torch.ones(2)}, room / "src/model.safetensors")
    (room / "src/config.json").write_text("1")
    options = Options(to="safetensors", with_files=True)
    jobs = [Job(room / "src/model.safetensors", room / "made", options)]
    assert states(jobs, room) == [DONE] and states(jobs, room) == [EARLIER]
    if what == "changed":
        (room / "src/config.json").write_text("22")
    elif what == "new":
        (room / "src/tokenizer.json").write_text("3")
    else:
        (room / "made/config.json").unlink()
    assert states(jobs, room) == [DONE] and states(jobs, room) == [EARLIER]
    for name in ("config.json", "tokenizer.json"):
        before, after = room / "src" / name, room / "made" / name
        assert before.exists() == after.exists()
        assert not before.exists() or before.read_text() == after.read_text()


def test_the_shards_of_an_index_are_part_of_the_job(room):
    (room / "s").mkdir()
    shard, index = room / "s/m-00001-of-00001.safetensors", room / "s/m.safetensors.index.json"
    save_file({"w": torch.ones(2)}, shard)
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"w": shard.name}}))
    jobs = [Job(index, room / "o.safetensors")]
    assert states(jobs, room) == [DONE] and states(jobs, room) == [EARLIER]
    save_file({"w": torch.zeros(2)}, shard)
    assert states(jobs, room) == [DONE]
    assert load_file(room / "o.safetensors")["w"].tolist() == [0, 0]


def test_all_of_a_request_and_of_rules_is_part_of_the_job(room):
    def with_rules(last: str) -> Options:
        many = [("add-prefix", f"{number}.") for number in range(20)]  # repr shows ten
        return Options(keys=KeyRules.of([*many, ("add-prefix", last)], "keep"))

    for first, second in (
        (Options(dtype="bf16").request(None), Options(dtype="f64").request(None)),
        (with_rules("a."), with_rules("b.")),
    ):
        (room / "o.safetensors").unlink(missing_ok=True)
        (room / "r.jsonl").unlink(missing_ok=True)
        jobs = [Job(room / "0.pt", room / "o.safetensors", options) for options in (first, second)]
        assert states(jobs[:1], room) == [DONE] and states(jobs[:1], room) == [EARLIER]
        assert states(jobs[1:], room) == [DONE]


@pytest.mark.parametrize(
    "odd",
    [
        {"source": "a.pt"}, {"source": [3]}, {"output": None}, {"state": "lost"}, {"notes": "text"},
        {"tries": True}, {"nbytes": 1.5}, {"seconds": float("nan")}, {"error": "text"},
    ],
    ids=str,
)  # fmt: skip
def test_a_line_that_tells_of_no_job_is_not_a_receipt(odd):
    line = {"source": ["a.pt"], "output": "b.pt", "state": "done", "nbytes": 3, "seconds": 0.5}
    found = receipt_of(line)
    assert (found.source, found.output, found.nbytes, found.seconds) == (("a.pt",), "b.pt", 3, 0.5)
    with pytest.raises(ValueError, match="not a receipt"):
        receipt_of({**line, **odd})


def test_an_output_below_a_file_is_the_failure_of_its_job(room):
    (room / "file").write_text("mine")
    jobs = jobs_in(room, 2)
    below = replace(jobs[0], output=room / "file" / "out.pt")
    failed, done = convert_many([below, jobs[1]])
    assert failed.error.message.endswith("its folder cannot be made: File exists")
    assert done.error is None and (room / "file").read_text() == "mine"
