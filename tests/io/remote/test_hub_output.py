"""Outputs in repositories of the Hub, made by huggingface_hub against a stand-in of its endpoints;
no test has met the Hub itself.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load, save

from ckptconv import convert_checkpoint
from ckptconv.io.outputs import file_output
from ckptconv.io.remote.place import remote_place
from ckptconv.support.errors import CheckpointError, MissingDependency, OutputRefused
from ckptconv.support.limits import limits
from helpers.conformance import DestinationConformance
from helpers.program import run
from helpers.written_hub import WrittenHub

NAME = "models/org/name"
WEIGHTS = {"layer.weight": np.arange(5000, dtype="<f4"), "layer.bias": np.ones(3, "<f2")}
HUBS: dict[str, WrittenHub] = {}


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    """A repository with one commit, for the user of a token. The xet protocol has no stand-in."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with WrittenHub() as served, limits(remote_seconds=2):
        for name, value in environment(served, tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
        monkeypatch.setattr("tempfile.tempdir", None)
        (tmp_path / "tmp").mkdir()
        served.commit(NAME, {".gitattributes": b"*.safetensors filter=lfs"})
        HUBS[str(tmp_path)] = served
        yield served
        del HUBS[str(tmp_path)]
        assert list((tmp_path / "tmp").iterdir()) == []


def environment(hub: WrittenHub, folder) -> dict[str, str]:
    own = {"HF_ENDPOINT": hub.web.url, "HF_TOKEN": hub.token, "HF_HOME": str(folder / "home")}
    return {**own, "HF_HUB_DISABLE_XET": "1", "TMPDIR": str(folder / "tmp")}


def files(hub: WrittenHub, revision: str = "main", name: str = NAME) -> dict[str, bytes]:
    found = dict(hub.commits[hub.revisions[name][revision]])
    found.pop(".gitattributes", None)
    return found


def source(folder, tensors=WEIGHTS):
    path = folder / "in.safetensors"
    path.write_bytes(save(tensors))
    return path


class TestOneFile(DestinationConformance):
    READ_BACK = True

    def destination(self, room, *, force=False, size=0):
        place = remote_place("hf://org/name/out.bin")
        return file_output(place, force=force, fsync=True, size=size, read_back=self.READ_BACK)

    def found(self, room):
        return files(HUBS[str(room)])

    everything = found


class TestSentAtOnce(TestOneFile):
    READ_BACK = False

    def test_a_committed_draft_can_be_read_back(self):
        """It is on its way."""


# --------------------------------------------------------------------------------- conversions


def test_a_folder_of_a_model_is_one_commit(hub, tmp_path):
    source(tmp_path).rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "modeling_x.py").write_text("import os")
    done = run("convert", "model.safetensors", "hf://org/name", "--with-files", cwd=tmp_path,
               env=environment(hub, tmp_path))  # fmt: skip
    assert done.exit == 0, done.err
    assert hub.summaries == ["Upload model.safetensors with ckptconv"]
    assert set(files(hub)) == {"model.safetensors", "config.json"}
    found = load(files(hub)["model.safetensors"])
    assert all(np.array_equal(found[key], WEIGHTS[key]) for key in WEIGHTS)


def test_a_delta_is_one_commit_named_after_its_folder(hub, tmp_path):
    new = {**WEIGHTS, "layer.bias": np.full(3, 2, "<f2")}
    (tmp_path / "new.safetensors").write_bytes(save(new))
    source(tmp_path)
    done = run("delta", "in.safetensors", "new.safetensors", "hf://org/name/all/weight_v000001",
               cwd=tmp_path, env=environment(hub, tmp_path))  # fmt: skip
    assert done.exit == 0, done.err
    assert hub.summaries == ["Upload all/weight_v000001 with ckptconv"]
    done = run("apply", "in.safetensors", "hf://org/name/all/weight_v000001", "out.safetensors",
               cwd=tmp_path, env=environment(hub, tmp_path))  # fmt: skip
    assert done.exit == 0, done.err
    found = load((tmp_path / "out.safetensors").read_bytes())
    assert all(np.array_equal(found[key], new[key]) for key in new)


def test_shards_and_index_are_one_commit_and_replace_an_earlier_set(hub, tmp_path):
    tensors = {f"layer.{number}.weight": np.full(1000, number, "<f4") for number in range(9)}
    convert_checkpoint(
        source(tmp_path, tensors), "hf://org/name/", max_shard_size="8KB", verify=True
    )
    assert len(hub.summaries) == 1
    index = json.loads(files(hub)["model.safetensors.index.json"])
    assert len(index["weight_map"]) == 9 and set(files(hub)) == {
        *index["weight_map"].values(), "model.safetensors.index.json"
    }  # fmt: skip
    found = {key: load(files(hub)[name])[key] for key, name in index["weight_map"].items()}
    assert all(np.array_equal(found[key], tensors[key]) for key in tensors)
    with pytest.raises(OutputRefused, match="exists; add --force"):
        convert_checkpoint(source(tmp_path), "hf://org/name/")
    convert_checkpoint(source(tmp_path), "hf://org/name/", force=True)
    assert set(files(hub)) == {"model.safetensors"} and len(hub.summaries) == 2


def test_it_goes_to_a_pull_request(hub, tmp_path):
    hub.commit(NAME, {"README.md": b"#"}, "refs/pr/1")
    convert_checkpoint(source(tmp_path), "hf://org/name@refs/pr/1/sub/model.safetensors")
    assert set(files(hub, "refs/pr/1")) == {"README.md", "sub/model.safetensors"}
    assert files(hub) == {}


def test_what_the_hub_has_is_not_sent_again(hub, tmp_path):
    hub.refusal = 403
    with pytest.raises(OutputRefused, match="the token may not write there"):
        convert_checkpoint(source(tmp_path), "hf://org/name/")
    assert len(hub.uploads) == 1 and files(hub) == {}
    hub.refusal = None
    convert_checkpoint(source(tmp_path), "hf://org/name/")
    assert len(hub.uploads) == 1 and set(files(hub)) == {"model.safetensors"}


def test_a_commit_of_another_is_never_lost(hub, tmp_path):
    other = b"of somebody else"

    def interfere():
        hub.before_commit = None
        hub.commit(NAME, {"model.safetensors": other})

    hub.before_commit = interfere
    with pytest.raises(OutputRefused, match="somebody else committed") as raised:
        convert_checkpoint(source(tmp_path), "hf://org/name/")
    assert "run the command again" in str(raised.value)
    assert files(hub) == {"model.safetensors": other}
    with pytest.raises(OutputRefused, match="exists"):
        convert_checkpoint(source(tmp_path), "hf://org/name/")


def test_what_a_gitignore_leaves_out_is_not_called_done(hub, tmp_path):
    hub.ignored = ("*.safetensors",)
    with pytest.raises(OutputRefused, match=r"model\.safetensors is not in the commit"):
        convert_checkpoint(source(tmp_path), "hf://org/name/")


def test_a_repository_that_is_not_there_is_refused_before_any_work(hub, tmp_path):
    with pytest.raises(CheckpointError, match="the Hub shows no repository org/other"):
        convert_checkpoint(source(tmp_path), "hf://org/other/")
    assert hub.uploads == []


def test_a_commit_is_not_written_to(hub, tmp_path):
    commit = hub.revisions[NAME]["main"]
    with pytest.raises(OutputRefused, match=r"names a commit.*name a branch"):
        convert_checkpoint(source(tmp_path), f"hf://org/name@{commit}/m.safetensors")
    assert hub.uploads == [] and hub.summaries == []


def test_without_a_token_nothing_is_made(hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OutputRefused, match="needs a token that may write; log in: hf auth login"):
        convert_checkpoint(source(tmp_path), "hf://org/name/m.safetensors")
    assert hub.uploads == []


def test_without_the_library_it_says_what_to_install(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match="pip install 'huggingface_hub"):
        convert_checkpoint(source(tmp_path), "hf://org/name/")


def test_the_token_is_shown_nowhere(hub, tmp_path):
    hub.refusal = 500
    env = environment(hub, tmp_path)
    done = run("convert", source(tmp_path), "hf://org/name/m.pt", cwd=tmp_path, env=env)
    assert done.exit == 1 and done.lines[0].startswith("error: hf://org/name/m.pt: ")
    assert hub.token not in done.err and "no commits today" in done.err


def test_the_manifest_of_an_output_tells_what_was_sent(tmp_path, hub):
    manifest = tmp_path / "m.sha256"
    convert_checkpoint(source(tmp_path), "hf://org/name/model.safetensors", manifest=manifest)
    sent = files(hub)["model.safetensors"]
    last = manifest.read_text().splitlines()[-1]
    assert last == f"{hashlib.sha256(sent).hexdigest()}  model.safetensors"
    weight = hashlib.sha256(WEIGHTS["layer.weight"].tobytes()).hexdigest()
    assert f'"name": "layer.weight", "dtype": "float32", "shape": [5000], "sha256": "{weight}"' in (
        manifest.read_text()
    )
