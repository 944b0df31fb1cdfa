"""`ckptconv batch`, as a user runs it: what it says, its exit codes, what it does again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptconv import convert_checkpoint
from helpers.program import SAMPLES, run, run_process


@pytest.fixture
def room(tmp_path):
    (tmp_path / "runs/b").mkdir(parents=True)
    shutil.copy(SAMPLES / "ddp_cuda3.pt", tmp_path / "runs/a.pt")
    shutil.copy(SAMPLES / "tied.pt", tmp_path / "runs/b/tied.pt")
    return tmp_path


WORDS = ("batch", "runs", "--out-dir", "out", "--to", "safetensors")


@pytest.mark.parametrize(
    ("start", "how"),
    [
        (run, ("--jobs", "1")),
        (run_process, ("--jobs", "2")),  # with workers of its own
        (run, ("--engine", "serial")),
    ],
)
def test_a_folder_is_converted_and_not_again(start, how, room):
    done = start(*WORDS, *how, cwd=room)
    assert (done.exit, done.out) == (0, ""), done.err
    assert "2 of 2 done" in done.err and "ledger  out/ckptconv-batch.jsonl" in done.err
    assert re.search(r"^\[2/2\] done    runs/\S+ → out/\S+ \(.* s\)$", done.err, re.M)
    expected = {name.removeprefix("module."): tensor for name, tensor in
                torch.load(room / "runs/a.pt", map_location="cpu").items()}  # fmt: skip
    made = load_file(room / "out/a.safetensors")
    assert sorted(made) == sorted(expected)
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    again = run(*WORDS, *how, cwd=room)
    assert again.exit == 0 and "2 of 2 done, 2 in an earlier run" in again.err
    assert "[" not in again.err


def test_failures_are_told_and_counted(room):
    (room / "runs/bad.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    done = run(*WORDS, "--jobs", "1", cwd=room)
    assert done.exit == 1 and "2 of 3 done, 1 failed" in done.err
    assert done.err.count("runs/bad.pt: ") == 1
    status = run("batch", "--status", "out/ckptconv-batch.jsonl", cwd=room)
    assert status.exit == 1 and "2 of 3 done, 1 failed" in status.out and "bad.pt" in status.out
    quiet = run(*WORDS, "--jobs", "1", "-q", cwd=room)
    assert quiet.exit == 1 and "bad.pt" in quiet.err
    shutil.copy(SAMPLES / "fp16.pt", room / "runs/bad.pt")
    assert run(*WORDS, "--jobs", "1", "-q", cwd=room).exit == 0


def test_options_of_the_command_hold_for_all_and_those_of_a_line_for_one(room):
    (room / "m.jsonl").write_text(
        '{"source": "runs/a.pt", "output": "x/one.safetensors"}\n'
        '{"source": "runs/a.pt", "output": "x/two.safetensors", "dtype": "f64", "keys": "keep"}\n'
    )
    words = ("batch", "m.jsonl", "--dtype", "bf16", "--exclude", "*.num_batches_tracked",
             "--add-prefix", "n.", "--jobs", "1")  # fmt: skip
    assert run(*words, cwd=room).exit == 0
    one, two = (load_file(room / f"x/{name}.safetensors") for name in ("one", "two"))
    assert {str(tensor.dtype) for tensor in one.values()} == {"torch.bfloat16"}
    assert {str(tensor.dtype) for tensor in two.values()} == {"torch.float64"}
    assert all(name.startswith("n.") and "module" not in name for name in one)
    assert all(name.startswith("n.module.") for name in two)
    assert (room / "m.report.jsonl").exists()


def test_a_line_sets_one_kind_of_rule_itself_and_the_others_are_those_of_the_command(room):
    (room / "rules.json").write_text('[{"exclude": "*.num_batches_tracked"}]')
    lines = [{}, {"add-prefix": "m."}, {"rules": "rules.json"}, {"rules": [["add-prefix", "m."]]}]
    own = [{"source": "runs/a.pt", "output": f"x/{at}.pt", **line} for at, line in enumerate(lines)]
    (room / "m.jsonl").write_text("\n".join(map(json.dumps, own)))
    words = ("--exclude", "*.weight", "--add-prefix", "n.", "--jobs", "1")
    assert run("batch", "m.jsonl", *words, cwd=room).exit == 0
    bare = [
        key.removeprefix("module.") for key in torch.load(room / "runs/a.pt", map_location="cpu")
    ]
    kept = [key for key in bare if not key.endswith(".weight")]
    no_count = [key for key in kept if not key.endswith(".num_batches_tracked")]
    expected = [("n.", kept), ("m.", kept), ("n.", no_count), ("m.", kept)]
    for at, (prefix, keys) in enumerate(expected):
        assert list(torch.load(room / f"x/{at}.pt")) == [prefix + key for key in keys], at


def test_shares_are_all_of_it_once(room):
    lines = [{"source": "runs/a.pt", "output": f"o/{number}.pt"} for number in range(7)]
    (room / "m.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    counts = []
    for number in (1, 2, 3):
        assert run("batch", "m.jsonl", "--share", f"{number}/3", "-q", "--jobs", "1",
                   cwd=room).exit == 0  # fmt: skip
        counts.append(len(list((room / "o").iterdir())))
    assert counts == [3, 5, 7]
    reports = [f"m.{number}-of-3.report.jsonl" for number in (1, 2, 3)]
    assert "7 of 7 done" in run("batch", "--status", *reports, cwd=room).out


def test_checkpoints_of_one_name_are_named_after_their_whole_names(room):
    shutil.copy(SAMPLES / "tied.pt", room / "runs/a.bin")
    run("convert", "runs/a.pt", "runs/b.safetensors", cwd=room)
    shutil.copy(SAMPLES / "tied.pt", room / "runs/b.pt")
    assert run(*WORDS, cwd=room).exit == 0
    assert sorted(path.name for path in (room / "out").rglob("*.safetensors")) == [
        "a.bin.safetensors", "a.pt.safetensors", "b.pt.safetensors", "b.safetensors",
        "tied.safetensors",
    ]  # fmt: skip


def test_what_is_wrong_is_told_before_anything_is_written(room):
    lines = [
        {"source": "runs/a.pt", "output": "out/y.pt"},
        {"source": "runs/a.pt", "output": "out/y.pt/z.pt"},
        {"source": "runs/a.pt", "output": "out/y.pt"},
    ]
    (room / "m.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = run("batch", "m.jsonl", cwd=room)
    assert done.exit == 2 and not (room / "out").exists()
    assert "m.jsonl:2: its output lies in the output of m.jsonl:" in done.err
    assert "m.jsonl:3: has the output of m.jsonl:1: out/y.pt" in done.err
    assert "2 problems; nothing was written" in done.err
    dry = run("batch", "m.jsonl", "--dry-run", "--json", cwd=room)
    assert dry.exit == 2
    assert len(json.loads(dry.out)["jobs_planned"]) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gone", "lost", "--out-dir", "out"), ["gone: no such", "lost: no such"]),
        (("runs", "--out-dir", "m.jsons/out", "--to", "torch"), ["outputs cannot be made: Not a"]),
        (("m.jsons", "--out-dir", "out", "--to", "torch"), ["name ends in .jsonl; rename it"]),
    ],
)
def test_words_that_cannot_be_meant_so_are_refused_by_name(words, said, room):
    (room / "m.jsons").write_text('{"source": "runs/a.pt", "output": "out/y.pt"}\n')
    done = run("batch", *words, cwd=room)
    assert done.exit == 2 and not (room / "out").exists()
    assert all(text in done.err for text in said), done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("batch",), "PATH is missing"),
        (("batch", "runs"), "--out-dir is missing"),
        (("batch", "runs", "--out-dir", "o"), "--to is missing"),
        (("batch", "m.jsonl", "--out-dir", "o"), "says where each output goes"),
        (("batch", "m.jsonl", "runs"), "some PATHs are manifests"),
        (("batch", "m.jsonl", "--share", "0/3"), "is not I/N"),
        (("batch", "m.jsonl", "--address", "auto"), "--address needs --engine ray"),
        (("batch", "m.jsonl", "--dtype", "int3"), "int3"),
        (("batch", "none.jsonl"), "no such file"),
        (("batch", "s3://b/m.jsonl"), "s3://b/m.jsonl: is a manifest, which is read on this"),
        (("batch", "none", "--out-dir", "o", "--to", "torch"), "no such file"),
        (("batch", "--status", "none"), "no such file"),
        (("batch", "--status", "runs/a.pt"), "is not a batch ledger"),
    ],
)
def test_wrong_usage_is_told(words, said, room):
    (room / "m.jsonl").write_text('{"source": "runs/a.pt", "output": "o.pt"}\n')
    done = run(*words, cwd=room)
    assert done.exit in (1, 2) and said in done.err, done.err
    assert not (room / "o").exists() and not (room / "o.pt").exists()


def test_a_page_tells_of_all_and_runs_nothing(room):
    (room / "runs/<b>&.pt").write_bytes(b"nothing")
    (room / "runs/<i>.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    done = run(*WORDS, "--jobs", "1", "--html", "batch.html", cwd=room)
    page = (room / "batch.html").read_text("utf-8")
    assert done.exit == 1 and "&lt;i&gt;.pt" in page and "<i>.pt" not in page
    assert "default-src 'none'" in page and "<script" not in page and "http" not in page.replace(
        "http-equiv", "")  # fmt: skip
    assert page.count("<tr>") == 1 + 3 and "MalformedCheckpoint" in page
    assert run("batch", "--status", "out/ckptconv-batch.jsonl", "--html", "batch.html",
               cwd=room).exit == 1  # fmt: skip
    again = run("batch", "--status", "out/ckptconv-batch.jsonl", "--html", "batch.html", cwd=room)
    assert "exists" in again.err


def test_what_is_passed_over_is_said(room):
    (room / "runs/table.bin").write_bytes(b"nothing known" * 50)
    torch.save({"state": {}}, room / "runs/optimizer.pt")
    torch.save(torch.nn.CrossEntropyLoss().state_dict(), room / "runs/criterion.pt")
    done = run(*WORDS, "--jobs", "1", cwd=room)
    assert done.exit == 0 and "3 files passed over" in done.err
    assert re.search(r"runs/optimizer.pt +was saved by training beside the weights", done.err)
    assert re.search(r"runs/criterion.pt +is the state of a loss, without tensors", done.err)


def test_ctrl_c_stops_at_once_and_the_next_run_goes_on(room):
    import os
    import signal
    import subprocess
    import sys
    import time

    from helpers.program import environment

    torch.save({f"w{n}": torch.zeros(1 << 20) for n in range(15)}, room / "big.pt")
    lines = [{"source": "big.pt", "output": f"o/{number}.safetensors", "dtype": "bf16"}
             for number in range(16)]  # fmt: skip
    (room / "m.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = [sys.executable, "-m", "ckptconv", "batch", "m.jsonl", "--jobs", "2", "--no-fsync"]
    batch = subprocess.Popen(words, cwd=room, env=environment(), stderr=subprocess.PIPE, text=True)
    begun = time.monotonic()
    while not any((room / "o").glob("*.safetensors")):
        assert time.monotonic() - begun < 60
        time.sleep(0.01)
    os.kill(batch.pid, signal.SIGINT)
    said = batch.communicate(timeout=60)[1]
    assert batch.returncode == 130, said
    assert "Traceback" not in said
    assert [path.name for path in (room / "o").glob(".*")] == []
    whole = {path: path.stat().st_mtime_ns for path in (room / "o").iterdir()}
    assert 0 < len(whole) < 16
    done = run(*words[3:], cwd=room)
    assert done.exit == 0 and "16 of 16 done" in done.err
    assert whole == {path: path.stat().st_mtime_ns for path in whole}


def test_a_report_has_no_place_in_a_store(room):
    done = run("batch", "runs", "--out-dir", "s3://bucket/x", "--to", "torch", cwd=room)
    assert done.exit == 2 and "--ledger" in done.err
    assert Path(room / "runs/a.pt").exists()


def test_a_page_that_is_there_is_told_before_anything_is_converted(room):
    (room / "batch.html").write_text("mine")
    done = run(*WORDS, "--engine", "serial", "--html", "batch.html", cwd=room)
    assert done.exit == 2 and "batch.html: exists" in done.err
    assert not (room / "out/a.safetensors").exists()


def test_a_name_with_a_dot_becomes_a_folder_of_shards(room):
    shutil.copy(SAMPLES / "tied.pt", room / "runs/llama-3.1-8b.pt")
    for out, words in (("one", ("--max-shard-size", "1kB")), ("two", ("--with-files",))):
        done = run("batch", "runs", "--out-dir", out, "--to", "safetensors", "--engine", "serial",
                   *words, cwd=room)  # fmt: skip
        assert done.exit == 0, done.err
        made = {path.name for path in (room / out / "llama-3.1-8b").iterdir()}
        assert made & {"model.safetensors.index.json", "model.safetensors"}, made


def test_folders_are_known_by_their_names_from_within(room):
    (room / "in").mkdir()
    done = run("batch", "..", ".", "--out-dir", "../../in/out", "--to", "safetensors", "--engine",
               "serial", "-q", cwd=room / "runs/b")  # fmt: skip
    assert done.exit == 0, done.err
    found = sorted(str(path.relative_to(room)) for path in room.rglob("*.safetensors"))
    assert found == [
        "in/out/b/tied.safetensors",
        "in/out/runs/a.safetensors",
        "in/out/runs/b/tied.safetensors",
    ]


def test_outputs_are_not_taken_for_sources_by_another_name(room):
    words = ("batch", "runs", "--out-dir", "runs/b/../made", "--to", "safetensors")
    assert run(*words, "--engine", "serial", cwd=room).exit == 0
    again = run(*words, "--engine", "serial", cwd=room)
    assert again.exit == 0 and "2 of 2 done, 2 in an earlier run" in again.err


@pytest.mark.parametrize("out", ["runs", ".", "runs/b/.."])
@pytest.mark.parametrize("more", [(), ("--max-shard-size", "1kB")], ids=["files", "sets"])
def test_outputs_beside_their_sources_are_not_sources_of_the_next_run(more, out, room):
    shutil.move(room / "runs/a.pt", room / "runs/a.bin")  # the set of it is a folder
    shutil.move(room / "runs/b/tied.pt", room / "runs/b/tied.bin")
    words = ("batch", "runs", "--out-dir", out, "--to", "safetensors", *more)
    assert run(*words, "--engine", "serial", cwd=room).exit == 0
    before = {path for path in room.rglob("*") if path.is_file()}
    again = run(*words, "--engine", "serial", cwd=room)
    assert (again.exit, "2 of 2 done, 2 in an earlier run" in again.err) == (0, True), again.err
    assert {path for path in room.rglob("*") if path.is_file()} == before
    told = again.err.count("is an output of this batch")
    assert told == (0 if out == "." else 2)


def test_a_report_whose_first_line_was_cut_off_is_gone_on_with(room):
    (room / "out").mkdir()
    for begun in ('{"batch": 1, "jo', '{"ba', ""):
        (room / "out/ckptconv-batch.jsonl").write_text(begun)
        assert run(*WORDS, "--engine", "serial", "--force", cwd=room).exit == 0


@pytest.mark.parametrize(
    "told",
    ['"nbytes": "x"', '"seconds": "a"', '"seconds": NaN', '"made": 5', '"read": 1', '"tries": {}'],
)
def test_lines_of_a_report_that_say_nonsense_are_passed_over(told, room):
    key = json.dumps(str(room / "out/a.safetensors"))
    (room / "r.jsonl").write_text(
        '{"batch": 1, "jobs": -1, "time": 1e999}\n'
        f'{{"key": {key}, "state": "done", "source": ["a"], "output": "b", {told}}}\n'
    )
    status = run("batch", "--status", "r.jsonl", "--html", "p.html", cwd=room)
    assert status.exit == 1 and "0 done" in status.out, status.err
    done = run(*WORDS, "--engine", "serial", "--ledger", "r.jsonl", cwd=room)
    assert done.exit == 0 and "2 of 2 done" in done.err, done.err


def test_a_failure_is_told_with_its_source_once(room):
    (room / "runs/new\nline.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    done = run(*WORDS, "--engine", "serial", cwd=room)
    assert done.exit == 1 and "new\\nline.pt: runs" not in done.err


def test_a_status_is_that_of_the_jobs_of_the_last_run(room):
    """Outputs that an earlier manifest named do not stand for those that are left."""
    names = [f"o/{number}.pt" for number in range(6)]
    lines = [json.dumps({"source": "runs/a.pt", "output": name}) for name in names]
    words = ("batch", "m.jsonl", "--ledger", "r.jsonl", "--engine", "serial", "-q")
    (room / "m.jsonl").write_text("\n".join(lines[:4]))
    assert run(*words, cwd=room).exit == 0
    assert run("batch", "--status", "r.jsonl", cwd=room).exit == 0
    (room / "m.jsonl").write_text("\n".join(lines[3:]))
    assert run(*words, cwd=room).exit == 0
    report = (room / "r.jsonl").read_text().splitlines(keepends=True)
    begun = [number for number, line in enumerate(report) if '"batch"' in line][1]
    (room / "r.jsonl").write_text("".join(report[: begun + 3]))  # it was killed with two begun
    status = run("batch", "--status", "r.jsonl", cwd=room)
    assert status.exit == 1 and "1 of 3 done, 2 left" in status.out
    assert run(*words, cwd=room).exit == 0
    assert run("batch", "--status", "r.jsonl", cwd=room).out.startswith("3 of 3 done")


def test_what_is_begun_again_is_not_done(room):
    assert run(*WORDS, "--engine", "serial", "-q", cwd=room).exit == 0
    report = room / "out/ckptconv-batch.jsonl"
    key = json.dumps(str(room / "out/a.safetensors"))
    report.write_text(report.read_text() + f'{{"state": "started", "key": {key}}}\n')
    status = run("batch", "--status", str(report), cwd=room)
    assert status.exit == 1 and "1 of 2 done, 1 left" in status.out


@pytest.mark.parametrize("option", ["--html", "--ledger"])
@pytest.mark.parametrize("name", ["m.jsonl", "runs/a.pt", "o/a.safetensors"])
def test_a_page_and_a_report_do_not_take_the_place_of_what_is_converted(option, name, room):
    (room / "o").mkdir()
    (room / "m.jsonl").write_text('{"source": "runs/a.pt", "output": "o/a.safetensors"}')
    done = run("batch", "m.jsonl", option, name, "--force", "--engine", "serial", cwd=room)
    assert done.exit == 2 and f"{name}: is named twice" in done.err


@pytest.mark.parametrize("word", ["--rules", "--metadata-from", "--like"])
@pytest.mark.parametrize("page", ["read.json", "./runs/../read.json", "link.json"])
def test_a_page_does_not_take_the_place_of_what_the_jobs_read_beside_their_sources(
    word, page, room
):
    before = '{"note": "kept"}'
    (room / "read.json").write_text(before)
    (room / "link.json").symlink_to("read.json")
    words = ("batch", "runs", "--out-dir", "o", "--to", "safetensors", word, "read.json")
    done = run(*words, "--html", page, "--force", cwd=room)
    assert done.exit == 2 and "read.json: is named twice" in done.err.replace("link", "read")
    assert (room / "read.json").read_text() == before


@pytest.mark.parametrize("source", ["hf", "hf/model.safetensors.index.json"])
@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json"])
def test_no_page_and_no_job_takes_the_place_of_a_file_of_a_set(source, name, room):
    torch.save({"a": torch.ones(8), "b": torch.ones(8)}, room / "in.pt")
    convert_checkpoint(room / "in.pt", room / "hf", to="safetensors", max_shard_size=40)
    before = (room / "hf" / "model-00001-of-00002.safetensors").read_bytes()
    (room / "m.jsonl").write_text(json.dumps({"source": source, "output": "o.pt"}))
    page = f"hf/{name}"
    if source == "hf" or name.startswith("model"):
        done = run("batch", "m.jsonl", "--html", page, "--force", cwd=room)
        assert done.exit == 2 and "name another file" in done.err
    other = json.dumps({"source": "runs/a.pt", "output": page, "to": "safetensors"})
    with (room / "m.jsonl").open("a") as manifest:
        manifest.write(f"\n{other}\n")
    if name.startswith("model"):
        done = run("batch", "m.jsonl", "--force", cwd=room)
        assert done.exit == 2 and "the source of m.jsonl:1" in done.err, done.err
    assert (room / "hf" / "model-00001-of-00002.safetensors").read_bytes() == before


def test_no_job_writes_what_another_one_reads(room):
    (room / "rules.toml").write_text("rules = []")
    jobs = [
        {"source": "runs/a.pt", "output": "rules.toml", "to": "safetensors"},
        {"source": "runs/a.pt", "output": "b.safetensors", "rules": "rules.toml"},
    ]
    (room / "m.jsonl").write_text("".join(f"{json.dumps(job)}\n" for job in jobs))
    done = run("batch", "m.jsonl", "--force", cwd=room)
    assert done.exit == 2 and "m.jsonl:1: writes what m.jsonl:2 reads" in done.err
    assert (room / "rules.toml").read_text() == "rules = []"


def test_a_page_of_reports_does_not_take_the_place_of_one(room):
    assert run(*WORDS, "--engine", "serial", "-q", cwd=room).exit == 0
    report = room / "out/ckptconv-batch.jsonl"
    before = report.read_text()
    done = run("batch", "--status", str(report), "--html", str(report), "--force", cwd=room)
    assert done.exit == 2 and "is named twice" in done.err
    assert report.read_text() == before
    assert (room / "runs/a.pt").read_bytes() == (SAMPLES / "ddp_cuda3.pt").read_bytes()
    assert not (room / "o/a.safetensors").exists()


def test_a_failure_that_is_of_another_file_is_told_with_its_source(room):
    line = {"source": "runs/a.pt", "output": "o/a.safetensors", "like": "none.safetensors"}
    (room / "m.jsonl").write_text(json.dumps(line))
    done = run("batch", "m.jsonl", "--engine", "serial", cwd=room)
    assert done.exit == 1 and "[1/1] failed  runs/a.pt: none.safetensors: no such" in done.err


def test_a_tag_that_is_sent_to_two_places_is_refused_as_in_convert(room):
    twice = ("--map-location", "cuda:3=cpu", "--map-location", "cuda:3=cuda:1")
    done = run("batch", "runs", "--out-dir", "out", "--to", "torch", *twice, cwd=room)
    assert done.exit == run("convert", "runs/a.pt", "out.pt", *twice, cwd=room).exit == 2
    assert "sends cuda:3 to both cpu and cuda:1; keep one" in done.err
    assert not (room / "out").exists()
