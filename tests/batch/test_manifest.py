"""Manifests, and what lies below folders: which jobs there are, and what is wrong with them."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckptconv import BatchRefused, Job, Options, convert_checkpoint, load_portable
from ckptconv.batch.checks import check_jobs
from ckptconv.batch.finding import Passed, find_checkpoints, jobs_below
from ckptconv.batch.identity import real_names, stamps
from ckptconv.batch.manifest import job_of, manifest_line, read_manifest
from ckptconv.io.places import place_of
from ckptconv.support.errors import CheckpointError, MissingFile, OptionRefused
from helpers.paths import SAMPLES

COMMON = Job("in", "out", Options(dtype="f16"), verify=True)


def test_a_line_says_what_differs_from_the_command(tmp_path):
    (tmp_path / "m.jsonl").write_text(
        '{"source": "a.pt", "output": "a.safetensors"}\n'
        "\n"
        "# a comment\n"
        '{"source": ["r0.pt", "r1.pt"], "output": "b.pt", "max-shard-size": "5GB", "dtype": null,'
        ' "rename": ["a.=b."], "verify": false, "no-fsync": true, "tag": "5"}\n'
    )
    found = read_manifest(tmp_path / "m.jsonl", COMMON)
    assert found.names == ("m.jsonl:1", "m.jsonl:4")
    first, second = found.jobs
    assert first == Job("a.pt", "a.safetensors", Options(dtype="f16"), verify=True)
    assert second == Job(
        ["r0.pt", "r1.pt"],
        "b.pt",
        Options(max_shard_size="5GB", rename=["a.=b."]),
        tag="5",
        fsync=False,
    )


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_a_manifest_without_a_job_is_refused(text, tmp_path):
    (tmp_path / "m.jsonl").write_text(text)
    with pytest.raises(BatchRefused, match=r"m\.jsonl: does not name a job"):
        read_manifest(tmp_path / "m.jsonl", COMMON)


@pytest.mark.parametrize(("name", "count"), [("a.pt", 1), ("A.SAFETENSORS", 1), ("_SUCCESS", 0)])
def test_a_checkpoint_without_bytes_is_a_job_that_fails(name, count, tmp_path):
    (tmp_path / name).touch()
    assert len(find_checkpoints(place_of(tmp_path)).checkpoints) == count


def test_all_that_is_wrong_is_told_with_its_line(tmp_path):
    bad = [
        "nonsense",
        "[1]",
        '{"source": "a.pt"}',
        '{"output": "a.pt"}',
        '{"source": "", "output": "b"}',
        '{"source": [], "output": "b"}',
        '{"source": "a", "output": 7}',
        '{"source": "a", "output": "b", "dtpye": "bf16"}',
        '{"source": "a", "output": "b", "dtype": "bf17"}',
        '{"source": "a", "output": "b", "force": "yes"}',
        '{"source": "a", "output": "b", "with_files": 1}',
        '{"source": "a", "output": "b", "output": "c"}',
        '{"source": "a", "output": "b", "max-shard-size": "1", "max_shard_size": "2"}',
        '{"source": "a", "output": "b", "to": "onnx"}',
        '{"source": "a\\u0000", "output": "b"}',
        '{"source": ["a", "c\\u0000"], "output": "b"}',
        '{"source": "a", "output": "b\\ud800"}',
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(bad))
    with pytest.raises(BatchRefused) as raised:
        read_manifest(tmp_path / "m.jsonl", COMMON)
    problems = raised.value.problems
    assert [line.partition(": ")[0] for line in problems] == [
        f"m.jsonl:{number}" for number in range(1, len(bad) + 1)
    ]
    assert "did you mean dtype?" in problems[7] and "bf17" in problems[8]
    assert "zero byte" in problems[-3] and "zero byte" in problems[-2]
    assert "half a character" in problems[-1]
    assert "true or false" in problems[9] and "true or false" in problems[10]
    with pytest.raises(MissingFile):
        read_manifest(tmp_path / "none.jsonl", COMMON)


def test_a_job_becomes_a_line_and_a_job_again():
    options = Options(
        to="safetensors", keys="keep", rename=["a=b"], include="x.*", dtype="bf16", reverse=False,
        metadata={"a": "b"}, map_location={"cuda:0": "cpu"}, max_shard_size=5000, with_files=True,
        rules=[("regex", "a=>b")], device="cuda:1", only="ema", tied="duplicate", unknown="drop",
        cast=["x=f32"], keep_dtype="n*", drop="optimizer", strip_prefix=("m.",), preset="ddp",
    )  # fmt: skip
    job = Job(["a", "b"], "c", options, tag="t", force=True, verify=True)
    line = json.loads(json.dumps(manifest_line(job)))
    again = job_of(line, Job("in", "out"))
    assert (again.source, again.output, again.tag) == (["a", "b"], "c", "t")
    assert again.force and again.verify
    for item in fields(Options):
        one, other = getattr(job.options, item.name), getattr(again.options, item.name)
        assert _listed(one) == _listed(other), item.name


def _listed(value):
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


# ----------------------------------------------------------------------------------------- finding


@pytest.fixture
def runs(tmp_path):
    runs = tmp_path / "runs"
    (runs / "a/deep").mkdir(parents=True)
    (runs / "hf").mkdir()
    (runs / "dcp").mkdir()
    tensors = {"w": torch.ones(3)}
    torch.save(tensors, runs / "a/x.pt")
    torch.save(tensors, runs / "a/deep/legacy.bin")
    torch.save({"state": {}}, runs / "a/optimizer.pt")
    torch.save(tensors, runs / "a/old.pt", _use_new_zipfile_serialization=False)
    np.savez(runs / "a/arrays.npz", w=np.ones(3))
    save_file(tensors, runs / "flat.safetensors")
    for number in (1, 2):
        save_file(
            {f"w{number}": torch.ones(2)}, runs / f"hf/model-0000{number}-of-00002.safetensors"
        )
    weight_map = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    (runs / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (runs / "hf/config.json").write_text("{}")
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=runs / "dcp/step-5", no_dist=True)
    (runs / "notes.txt").write_text("hello")
    (runs / "table.bin").write_bytes(b"nothing known" * 100)
    (runs / "damaged.pt").write_bytes((runs / "a/x.pt").read_bytes()[:-200])
    import zipfile

    with zipfile.ZipFile(runs / "photos.zip", "w") as archive:
        archive.writestr("a.jpg", b"x")
    (runs / ".hidden").mkdir()
    torch.save(tensors, runs / ".hidden/x.pt")
    return runs


def test_every_checkpoint_below_a_folder_is_found_and_a_folder_of_shards_is_one(runs):
    found = find_checkpoints(place_of(runs))
    assert [str(below) for _, below in found.checkpoints] == [
        "damaged.pt", "flat.safetensors", "a/arrays.npz", "a/old.pt", "a/x.pt",
        "a/deep/legacy.bin", "dcp/step-5", "hf",
    ]  # fmt: skip
    passed = {Path(item.path).name: item.reason for item in found.passed}
    assert set(passed) == {"table.bin", "photos.zip", "optimizer.pt"}
    assert "beside the weights" in passed["optimizer.pt"]


@pytest.fixture
def models(tmp_path):
    """A tree of models' folders, of files that are none, and of a model in modules."""
    tensors = {"a": torch.ones(8), "b": torch.zeros(8)}
    for name in ("m1", "m2", "m3", "plain", "st", "st/2_Dense"):
        (tmp_path / "in" / name).mkdir(parents=True)
        if name != "plain":
            (tmp_path / "in" / name / "config.json").write_text("{}")
    made = tmp_path / "in"
    torch.save(tensors, made / "m1/pytorch_model.bin")
    torch.save({"a": torch.ones(2)}, made / "m2/pytorch_model.bin")
    save_file(tensors, made / "m2/model.safetensors")
    convert_checkpoint(made / "m1/pytorch_model.bin", made / "m3", max_shard_size=32)
    torch.save(tensors, made / "plain/pytorch_model.bin")
    (made / "plain/readme.txt").write_text("of no model")
    (made / "m1/README.md").write_text("of a model")
    for name in ("st", "st/2_Dense"):
        save_file(tensors, made / name / "model.safetensors")
    (made / "st/modules.json").write_text('[{"path": ""}, {"path": "2_Dense"}]')
    return made


@pytest.mark.parametrize("given, files", [
    ({"to": "safetensors"}, {
        "m1/model.safetensors", "m2/model.safetensors", "m3/model.safetensors",
        "plain/pytorch_model.safetensors", "st/model.safetensors", "st/2_Dense/model.safetensors",
    }),
    ({"to": "safetensors", "with_files": True}, {
        "m1/model.safetensors", "m1/config.json", "m1/README.md", "m2/model.safetensors",
        "m2/config.json", "m3/model.safetensors", "m3/config.json",
        "plain/pytorch_model/model.safetensors", "st/model.safetensors", "st/config.json",
        "st/modules.json", "st/2_Dense/model.safetensors", "st/2_Dense/config.json",
    }),
    ({"to": "torch", "with_files": True}, {
        "m1/pytorch_model.bin", "m1/config.json", "m1/README.md", "m2/pytorch_model.bin",
        "m2/config.json", "m3/pytorch_model.bin", "m3/config.json",
        "plain/pytorch_model/pytorch_model.bin", "st/pytorch_model.bin", "st/config.json",
        "st/modules.json", "st/2_Dense/model.safetensors", "st/2_Dense/config.json",
    }),
])  # fmt: skip
def test_the_folder_of_a_model_is_one_checkpoint_and_stays_one(given, files, models, tmp_path):
    passed: list[Passed] = []
    jobs = jobs_below([place_of(models)], place_of(tmp_path / "out"), Job("in", "out",
                      Options(**given)), passed)  # fmt: skip
    check_jobs(jobs)
    assert [(Path(item.path).name, item.reason) for item in passed] == [
        ("pytorch_model.bin", "are weights that its library does not read")
    ]
    for job in jobs:
        Path(job.output).parent.mkdir(parents=True, exist_ok=True)
        job.run()
    made = {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path / "out").as_posix() for path in made} == files
    assert load_portable(tmp_path / "out/m2")["a"].tolist() == [1.0] * 8


def test_outputs_lie_below_the_folder_as_their_sources_do(runs, tmp_path):
    out = place_of(runs / "portable")
    common = Job("in", "out", Options(to="safetensors"))
    jobs = jobs_below([place_of(runs)], out, common, [])
    outputs = {str(Path(job.output).relative_to(runs / "portable")) for job in jobs}
    assert outputs == {
        "damaged.safetensors", "flat.safetensors", "a/arrays.safetensors", "a/old.safetensors",
        "a/x.safetensors", "a/deep/legacy.safetensors", "dcp/step-5.safetensors",
        "hf/model.safetensors",
    }  # fmt: skip
    torch.save({"w": torch.ones(3)}, tmp_path / "runs/x.y.pt")
    sharded = Job("in", "out", Options(to="torch", max_shard_size="1MB"))
    jobs = jobs_below([place_of(runs), place_of(SAMPLES / "tied.pt")], out, sharded, [])
    outputs = [str(Path(job.output).relative_to(runs / "portable")) for job in jobs]
    assert {"runs/hf", "runs/a/x", "runs/x.y", "tied"} <= set(outputs)


def test_outputs_that_are_there_are_not_taken_for_sources(runs):
    common = Job("in", "out", Options(to="safetensors"))
    out = place_of(runs / "portable")
    before = jobs_below([place_of(runs)], out, common, [])
    (runs / "portable").mkdir()
    save_file({"w": torch.ones(3)}, runs / "portable/flat.safetensors")
    assert jobs_below([place_of(runs)], out, common, []) == before


def test_what_a_folder_needs_is_said(runs):
    with pytest.raises(OptionRefused, match="--to is missing"):
        jobs_below([place_of(runs)], place_of("out"), Job("in", "out"), [])
    with pytest.raises(BatchRefused, match="no such file"):
        jobs_below([place_of("none")], place_of("out"), Job("i", "o", Options(to="torch")), [])


def test_a_value_that_is_none_is_refused_by_the_words_of_the_options():
    for words in ({"dtype": 7}, {"unknown": "both"}, {"rename": "nothing"}):
        with pytest.raises(CheckpointError):
            job_of({"source": "a", "output": "b", **words}, Job("i", "o"))


SHARDED = Options(to="safetensors", max_shard_size=300)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (("m", SHARDED), ("m/model.safetensors", Options()), "has the output of"),
        (("m", SHARDED), ("m/model.safetensors", SHARDED), "has the output of"),
        (("m", SHARDED), ("m/model-00001-of-00004.safetensors", Options()), "like a shard of"),
        (
            ("s.safetensors", SHARDED),
            ("s.safetensors.index.json", Options(to="torch")),
            "like a shard of",
        ),
        (("d", Options(to="dcp")), ("d/x/b.pt", Options()), "lies in the output of"),
        (("d", Options(to="dcp")), ("b.pt", Options(save_mapping="d/m")), "lies in the output of"),
        (("a.pt", Options(save_mapping="m")), ("b.pt", Options(save_mapping="m")), "the output of"),
        (("a.pt", Options()), ("b.pt", Options(save_mapping="in.pt")), "mapping is the source of"),
        (("in", Options(to="dcp")), ("b.pt", Options()), None),
        (("m", SHARDED), ("m/other.safetensors", Options()), None),
        (("m", SHARDED), ("m/model.pt", SHARDED), None),
    ],
)
def test_outputs_that_meet_in_one_place_are_told(first, second, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "in.pt")
    jobs = [Job("in.pt", output, options, force=True) for output, options in (first, second)]
    if why is None:
        check_jobs(jobs)
        return
    with pytest.raises(BatchRefused, match=why):
        check_jobs(jobs)


def test_a_source_in_the_folder_that_an_output_replaces_is_told(tmp_path):
    (tmp_path / "d").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "d/in.pt")
    with pytest.raises(BatchRefused, match="its source lies in the output of"):
        check_jobs([Job(tmp_path / "d/in.pt", tmp_path / "d", Options(to="dcp"), force=True)])


def test_two_jobs_with_one_name_and_one_output_are_two(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    jobs = [Job(tmp_path / "in.pt", tmp_path / "out.pt")] * 2
    with pytest.raises(BatchRefused, match="has the output of"):
        check_jobs(jobs, ["m.jsonl:1", "m.jsonl:1"])


def test_the_blobs_of_a_cache_are_not_converted_beside_their_snapshots(tmp_path):
    model = tmp_path / "hub/models--x"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots/abc").mkdir(parents=True)
    save_file({"w": torch.ones(3)}, model / "blobs/deadbeef")
    (model / "snapshots/abc/model.safetensors").symlink_to("../../blobs/deadbeef")
    found = find_checkpoints(place_of(tmp_path / "hub"))
    assert [str(below) for _, below in found.checkpoints] == [
        "models--x/snapshots/abc/model.safetensors"
    ]
    assert [item.path for item in found.passed] == [str(model / "blobs")]


def test_links_are_followed_for_many_places_as_for_one(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.pt").touch()
    (tmp_path / "to").symlink_to("real")
    (tmp_path / "real" / "other.pt").symlink_to("../to/a.pt")
    (tmp_path / "real" / "gone.pt").symlink_to("nowhere.pt")
    monkeypatch.chdir(tmp_path / "real")
    real = real_names()
    files = ["a.pt", "./a.pt", "../to/a.pt", "other.pt", "../to/other.pt", "gone.pt", "new.pt"]
    folders = [".", "..", "../to", "../to/..", "../to/.", "/", "../to/../to"]
    for path in (*files, *folders, tmp_path / "to" / "a.pt"):
        for _ in range(2):
            assert real(place_of(path)) == os.path.realpath(path)


def test_what_is_passed_over_is_told_with_its_reason(tmp_path):
    model = tmp_path / "model"
    torch.save({f"{at}.weight": torch.ones(300) for at in range(3)}, tmp_path / "all.pt")
    convert_checkpoint(tmp_path / "all.pt", model, to="safetensors", max_shard_size=1500)
    (tmp_path / "all.pt").rename(model / "all.pt")
    (tmp_path / "again").symlink_to(model)
    found = find_checkpoints(place_of(tmp_path))
    assert [str(item.path) for item, _ in found.checkpoints] == [str(model)]
    assert {
        Passed(str(tmp_path / "again"), "is a link to a folder"),
        Passed(str(model / "all.pt"), "lies in the folder of a checkpoint, but is not part of it"),
    } <= {*found.passed}


def test_links_to_the_folder_that_they_lie_in_are_not_followed(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b").write_bytes(b"b")
    (tmp_path / "same").symlink_to("in")
    for name in ("one", "two", "in/three"):  # each doubles the ways at every step
        (tmp_path / name).symlink_to(tmp_path)
    found = stamps(place_of(tmp_path))
    assert found is not None and [item[0] for item in found] == ["a", "in/b", "same/b"]


def test_what_a_write_has_for_a_while_does_not_tell_a_folder_from_the_same_one(tmp_path):
    for path in ("a", "x-old", ".git/b", ".a.0badcafe.ckptconv-part", ".in.0.ckptconv-tmp/c"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    assert [name for name, *_ in stamps(place_of(tmp_path))] == [".git/b", "a", "x-old"]
