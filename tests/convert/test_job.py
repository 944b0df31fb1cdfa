"""Jobs: a conversion as data, which runs in this process and in others alike."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from ckptconv import (
    Checkpoint,
    CheckpointError,
    KeyRules,
    Options,
    OutputRefused,
    limits,
    open_checkpoint,
    plan_conversion,
)
from ckptconv.convert.job import Job
from ckptconv.convert.planner import request_of
from ckptconv.pickles.nodes import Dict, mapping_pairs
from ckptconv.support.errors import OptionRefused
from helpers.paths import SAMPLES

SOURCE = SAMPLES / "ddp_cuda3.pt"


def test_a_job_in_another_process_writes_the_same_bytes(tmp_path):
    options = Options(dtype="f16", keys=KeyRules("module"), exclude="*.num_batches_tracked")
    job = Job(str(SOURCE), tmp_path / "there.safetensors", options, verify=True, fsync=False)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        there = pool.submit(job.run).result()
    here = Job(SOURCE, tmp_path / "here.safetensors", options, verify=True, fsync=False).run()
    written = (tmp_path / "here.safetensors").read_bytes()
    assert (tmp_path / "there.safetensors").read_bytes() == written
    assert there.verified == here.verified == 8
    assert there.plan.casts == here.plan.casts and there.plan.output == job.output


def test_a_job_is_equal_to_itself_after_a_pickle(tmp_path):
    with limits(depth=7):
        job = Job(SOURCE, tmp_path / "out.pt", Options(rename="a.=b."), tag="5", force=True)
    again = pickle.loads(pickle.dumps(job))
    assert again == job and again.limits.depth == 7
    usual = Job(SOURCE, tmp_path / "out.pt").limits
    assert pickle.loads(pickle.dumps(usual)) is usual


def test_equal_options_are_asked_again_where_a_file_or_a_list_of_theirs_changed(tmp_path):
    rules, words, found = tmp_path / "rules.json", ["*.weight"], []
    by_file, by_list = Options(rules=str(rules)), Options(exclude=words)
    for number, key in enumerate(("weight", "bias")):
        rules.write_text(json.dumps([{"exclude": [f"*.{key}"]}]))
        words[:] = [f"*.{key}"]
        for name, options in (("file", by_file), ("list", by_list)):
            output = tmp_path / f"{name}{number}.safetensors"
            Job(SOURCE, output, options, fsync=False).run()
            found.append(any(name.endswith(f".{key}") for name in load_file(output)))
    assert found == [False] * 4


def test_the_limits_of_a_job_are_those_under_which_it_was_made(tmp_path):
    with limits(nodes=10):
        job = Job(SOURCE, tmp_path / "out.pt")
    with pytest.raises(CheckpointError, match="limit nodes=10"):
        job.run()
    assert list(tmp_path.iterdir()) == []
    assert Job(SOURCE, tmp_path / "out.pt", fsync=False).run().plan.to == "torch"


def test_a_job_whose_output_is_there_is_refused_before_its_source_is_opened(tmp_path):
    (tmp_path / "out.pt").write_bytes(b"mine")
    with pytest.raises(OutputRefused, match="exists"):
        Job(tmp_path / "missing.pt", tmp_path / "out.pt").run()
    (tmp_path / "map.json").write_bytes(b"mine too")
    mapped = Options(save_mapping=tmp_path / "map.json")
    with pytest.raises(OutputRefused, match=r"map\.json"):
        Job(SOURCE, tmp_path / "new.pt", mapped).run()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["map.json", "out.pt"]


def without_classifier(checkpoint: Checkpoint) -> Checkpoint:
    """An edit that leaves one layer out of a state dict."""
    node = checkpoint.state_dict().node
    pairs = [pair for pair in mapping_pairs(node) or () if "classifier" not in pair[0]]
    return replace(checkpoint, root=Dict(pairs))


def test_an_edit_changes_what_is_planned_and_not_what_is_open(tmp_path):
    request = replace(request_of(Options()), edits=(without_classifier,))
    job = pickle.loads(pickle.dumps(Job(SOURCE, tmp_path / "out.pt", request, fsync=False)))
    job.run()
    with open_checkpoint(SOURCE) as source, open_checkpoint(tmp_path / "out.pt") as output:
        before = [key.removeprefix("module.") for key in source.state_dict().keys]
        assert list(output.state_dict().keys) == [key for key in before if "classifier" not in key]
        assert len(output.state_dict().keys) < len(before)


@pytest.mark.parametrize(
    ("checkpoint", "options", "words"),
    [
        ("in.pt", None, "checkpoint='in.pt' is not a Checkpoint"),
        (None, {"to": "torch"}, "options={'to': 'torch'} is not Options"),
        (None, "torch", "options='torch' is not Options"),
    ],
)
def test_a_plan_is_of_an_open_checkpoint_by_options(checkpoint, options, words, tmp_path):
    with open_checkpoint(SOURCE) as opened, pytest.raises(OptionRefused, match=re.escape(words)):
        plan_conversion(checkpoint or opened, tmp_path / "out.pt", options)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keep_dtype": "norm.*"}, "--keep-dtype changes nothing without --dtype"),
        ({"metadata": {"a=b": "c"}}, "metadata={'a=b': 'c'} is not a dict of texts without ="),
        ({"metadata": {"step": 3}}, "metadata={'step': 3} is not a dict of texts without ="),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant_are_refused(given, words):
    with pytest.raises(OptionRefused, match=re.escape(words)):
        request_of(Options(**given))


@pytest.mark.parametrize(
    "odd",
    [
        {"output": None}, {"output": b"out.pt"}, {"output": ""}, {"options": None},
        {"options": {"to": "torch"}}, {"limits": None}, {"force": "no"}, {"fsync": 1},
        {"verify": "no"}, {"source": None}, {"source": 3}, {"tag": 5},
    ],
    ids=str,
)  # fmt: skip
def test_odd_values_are_refused_in_words(odd, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    (tmp_path / "out.pt").write_text("mine")
    given = {"source": tmp_path / "in.pt", "output": tmp_path / "out.pt", **odd}
    with pytest.raises(OptionRefused, match=re.escape(f"={next(iter(odd.values()))!r} is not ")):
        Job(**{"force": True, **given}).run()
    assert (tmp_path / "out.pt").read_text() == "mine"
