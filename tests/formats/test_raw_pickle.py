"""Bare pickles: `pickle.load` sees the same tensors that ckptconv finds, without executing
anything.
"""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ckptconv import CheckpointError, convert_checkpoint, load_portable, open_checkpoint
from ckptconv.formats.containers import is_raw_pickle
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint, UnsupportedCheckpoint
from ckptconv.tensors.stream import iter_chunks
from helpers import oracle
from helpers.examples import some
from helpers.old_torch import Bytestring, Made, Name, pickled, write

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def tree() -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.randn(2, 3))
    state_dict = OrderedDict(
        {
            "module.w": parameter.data,
            "module.t": torch.arange(6).reshape(2, 3).t(),
            "module.e": torch.ones(0),
        }
    )
    return {
        "state_dict": state_dict,
        "p": parameter,
        "again": parameter,
        "epoch": 3,
        "text": "é",
        "half": torch.ones(3).half(),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_is_read_to_the_same_tree(protocol, tmp_path):
    content = pickle.dumps(tree(), protocol)
    source = write(tmp_path / "model.pkl", content)
    convert_checkpoint(source, tmp_path / "new.pt", keys="keep", fsync=False, verify=True)
    expected = pickle.loads(content)
    assert oracle.flatten(oracle.load(tmp_path / "new.pt")) == oracle.compacted(expected)
    convert_checkpoint(
        source, tmp_path / "new.safetensors", only="state_dict", fsync=False, verify=True
    )
    found = load_file(tmp_path / "new.safetensors")
    assert {key: value.tolist() for key, value in found.items()} == {
        key.removeprefix("module."): value.tolist() for key, value in expected["state_dict"].items()
    }


def test_a_pickled_module_is_its_state_dict(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    found = load_portable(write(tmp_path / "model.pkl", pickle.dumps(model)), keys="keep")
    expected = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_one_tensor_alone_and_a_list_are_read(tmp_path):
    for value in (torch.ones(3), [torch.ones(3), torch.zeros(2)]):
        with open_checkpoint(write(tmp_path / "model.pkl", pickle.dumps(value))) as checkpoint:
            assert checkpoint.format == "pickle"
            assert len(list(checkpoint.tensors())) == (len(value) if isinstance(value, list) else 1)


def test_a_python_2_pickle_holds_its_streams_in_byte_strings(tmp_path):
    nested = io.BytesIO()
    torch.save(torch.arange(3.0).storage(), nested, _use_new_zipfile_serialization=False)
    storage = Made(Name("torch.storage", "_load_from_bytes"), (Bytestring(nested.getvalue()),))
    tensor = Made(Name("torch._utils", "_rebuild_tensor"), (storage, 1, (2,), (1,)))
    source = write(tmp_path / "model.pkl", pickled({Bytestring(b"w"): tensor}))
    assert load_portable(source)["w"].tolist() == [1, 2]


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "value", [{"w": [1.0, 2.0]}, [1, 2, 3], "text", None, 5, OrderedDict(a=1)], ids=str
)
def test_a_pickle_without_tensors_is_named(value, tmp_path):
    for protocol in (2, 4):
        with pytest.raises(UnsupportedCheckpoint, match=r"is a bare pickle .* without tensors"):
            open_checkpoint(write(tmp_path / "model.pkl", pickle.dumps(value, protocol)))


def test_a_pickle_taken_out_of_an_archive_is_told(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        content = archive.read("model/data.pkl")
    with pytest.raises(
        MalformedCheckpoint, match=r"which is not in this file; .*data\.pkl of a zip"
    ):
        open_checkpoint(write(tmp_path / "data.pkl", content))


def test_several_pickles_in_one_file_are_refused(tmp_path):
    with pytest.raises(MalformedCheckpoint, match="bytes follow the end of the pickle"):
        open_checkpoint(write(tmp_path / "model.pkl", pickle.dumps(tree()) * 2))


def nested(depth: int) -> bytes:
    """A pickle with a torch stream inside, itself a pickle with a stream inside, and so on."""
    content = pickle.dumps({"w": torch.ones(1)})
    for _ in range(depth):
        content = pickled(Made(Name("torch.storage", "_load_from_bytes"), (Bytestring(content),)))
    return content


def test_a_stream_that_is_something_else_is_refused_wherever_the_pickle_lies(tmp_path):
    content = pickled([Made(Name("torch.storage", "_load_from_bytes"), (Bytestring(b"Rar!"),))])
    with pytest.raises(MalformedCheckpoint, match="a stream in it is a rar archive"):
        open_checkpoint(write(tmp_path / "model.pkl", content))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("good.pkl", pickle.dumps(torch.ones(1)))
        archive.writestr("bad.pkl", content)
    with pytest.raises(MalformedCheckpoint, match=r"all\.zip: bad\.pkl: pickle: a stream in it"):
        open_checkpoint(tmp_path / "all.zip")


def test_streams_within_streams_have_an_end(tmp_path):
    with open_checkpoint(write(tmp_path / "model.pkl", nested(2))) as checkpoint:
        assert len(list(checkpoint.tensors())) == 1
    with pytest.raises(LimitExceeded, match="files within files"):
        open_checkpoint(write(tmp_path / "model.pkl", nested(3)))


class Payload:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("CKPTCONV_PWNED"),)


def test_nothing_in_a_pickle_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inner = io.BytesIO()
    torch.save([Payload(), torch.ones(1)], inner, _use_new_zipfile_serialization=False)
    stream = Made(Name("torch.storage", "_load_from_bytes"), (Bytestring(inner.getvalue()),))
    source = write(tmp_path / "model.pkl", pickled({"w": stream}))
    with pytest.raises(CheckpointError, match="weights_only"):
        convert_checkpoint(source, tmp_path / "new.pt", fsync=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pkl"]


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_cut_at_any_byte_is_refused(protocol, tmp_path):
    whole = pickle.dumps({"w": torch.ones(1)}, protocol)
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            open_checkpoint(write(tmp_path / "cut.pkl", whole[:length]))


@pytest.mark.parametrize("seed", some(2, range(4)))
def test_a_damaged_pickle_is_read_or_refused(seed, tmp_path):
    chance = random.Random(seed)
    whole = pickle.dumps(
        {"w": torch.ones(2), "v": [torch.nn.Parameter(torch.ones(1))]}, chance.randrange(6)
    )
    for _ in range(200):
        changed = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            with open_checkpoint(write(tmp_path / "damaged.pkl", bytes(changed))) as checkpoint:
                for _, ref in checkpoint.tensors():
                    assert sum(map(len, iter_chunks(ref))) == ref.nbytes
        except CheckpointError as error:
            assert "damaged.pkl" in str(error)


# ---------------------------------------------------------------------------------- told by content

PICKLED = [
    {"w": 1},
    OrderedDict(w=1),
    [torch.ones(1)],
    torch.ones(1),
    np.ones(2),
    torch.nn.Linear(1, 1),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", PICKLED, ids=lambda value: type(value).__name__)
def test_pickles_of_every_protocol_are_told_by_their_first_bytes(value, protocol):
    assert is_raw_pickle(pickle.dumps(value, protocol)[:512])


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x80",
        b"\x80\x06",
        b"comment\nline two\n",
        b"(draft)\n",
        b"{}",
        b"c\n",
        b"class Net:\n    pass\n",
        b"}q",
    ],
)
def test_other_files_are_not_taken_for_pickles(head):
    assert not is_raw_pickle(head)
