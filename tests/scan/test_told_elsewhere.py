"""What other commands say of a file that `scan` calls dangerous: never how to keep it."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile

import pytest

from ckptconv import load_portable, scan_checkpoint
from ckptconv.support.errors import CheckpointError
from helpers.examples import some
from helpers.program import run

torch = pytest.importorskip("torch")

DROPPED = b"cposix\nsystem\nX\x04\0\0\0true\x85R0"
"""A call whose result the stream drops again, so that no tree shows it."""
FOUND = b"cjinja2.utils\nimport_string\nX\x09\0\0\0os.system\x85R"


class Runs:
    """Pickled as a call of `os.system`."""

    def __reduce__(self):
        return os.system, ("true",)


class Method:
    """Pickled as old protocols name a method: by `getattr`."""

    def __reduce__(self):
        return getattr, (pickle.Unpickler, "load")


def saved(value: object, path, *, first: bytes = b"", old: bytes = b"", new: bytes = b"") -> None:
    """A torch file, its pickle with `first` in front, or with one part replaced by another."""
    stream = io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as read, zipfile.ZipFile(path, "w") as write:
        for name in read.namelist():
            content = read.read(name)
            if name.endswith("data.pkl"):
                content = content[:2] + first + content[2:].replace(old, new)
            write.writestr(name, content)


WEIGHTS = {"state_dict": {"w": torch.ones(3)}}
FILES = {
    "an object": ({**WEIGHTS, "x": Runs()}, {}, "system"),
    "a call that is dropped": (WEIGHTS, {"first": DROPPED}, "system"),
    "a method": ({**WEIGHTS, "x": Method()}, {}, "Unpickler"),
    "a function by its name": ({**WEIGHTS, "x": 7}, {"old": b"K\7", "new": FOUND}, "import_string"),
    "a call of what a call gives": (
        {**WEIGHTS, "x": 7},
        {"old": b"K\7", "new": b"cmine\nmake\n)R)R"},
        "what another call gives",
    ),
    "a call of what a call gives, that is dropped": (
        WEIGHTS,
        {"first": b"cmine\nmake\n)R)R0"},
        "what another call gives",
    ),
    "an object of the class that a call gives": (
        {**WEIGHTS, "x": 7},
        {"old": b"K\7", "new": b"ccopyreg\n__newobj__\ncmine\nmake\n)R\x85R"},
        "what another call gives",
    ),
    "a rebuilding that calls something else": (
        {**WEIGHTS, "x": 7},
        {
            "old": b"K\7",
            "new": b"ctorch._tensor\n_rebuild_from_type_v2\n(cmine\nmake\ncmine\nThing\n)NtR",
        },
        "does not rebuild a tensor",
    ),
    "the state of an unknown object": (
        {**WEIGHTS, "x": 7},
        {"first": DROPPED, "old": b"K\7", "new": b"cmine\nThing\n)R"},
        "system",
    ),
}


@pytest.fixture(params=some(4, FILES))
def dangerous(request, tmp_path):
    value, changed, name = FILES[request.param]
    saved(value, tmp_path / "in.pt", **changed)
    assert scan_checkpoint(tmp_path / "in.pt").level == "dangerous"
    return tmp_path, name


def test_each_command_says_that_a_file_is_dangerous_and_never_to_keep_it(dangerous):
    folder, name = dangerous
    for words in (
        ("inspect", "in.pt"),
        ("doctor", "in.pt"),
        ("convert", "in.pt", "out.safetensors"),
        ("convert", "in.pt", "out.pt"),
        ("convert", "in.pt", "all.pt", "--unknown", "drop"),
    ):
        done = run(*words, cwd=folder)
        shown = done.out + done.err
        assert "do not load it" in shown, words
        assert name in shown or done.exit == 1, words
        assert "--unknown keep" not in shown, words
    assert json.loads(run("inspect", "in.pt", "--json", cwd=folder).out)["portable"] is False
    assert "dangerous: " in run("convert", "in.pt", "b.safetensors", "--json", cwd=folder).out


def test_an_error_of_loading_does_not_advise_to_keep_it(dangerous):
    try:
        load_portable(dangerous[0] / "in.pt", whole=True)
    except CheckpointError as error:
        assert "do not load it" in str(error) and "keep" not in str(error)
        assert error.code == "dangerous"


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (FOUND, "names jinja2.utils.import_string"),
        (b"cmine\nmake\n)R)R", "what another call gives"),
        (b"cmine\nmake\n)R)\x81", "what another call gives"),
        (b"cbuiltins\ngetattr\nctorch\nSize\nX\5\0\0\0Inner\x86R)\x81", "torch.Size.Inner"),
    ],
)
def test_a_file_that_does_not_open_is_dangerous_too(tmp_path, pickled, said):
    (tmp_path / "in.pkl").write_bytes(b"\x80\2" + pickled + b".")
    done = run("inspect", "in.pkl", cwd=tmp_path)
    assert done.exit == 1 and "without tensors" in done.err
    assert said in done.err and "do not load it" in done.err


def test_nothing_of_the_sort_is_said_of_ordinary_files(tmp_path):
    model = torch.nn.TransformerEncoderLayer(4, 2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"model": model, "sizes": {"a": torch.Size([1])}}, tmp_path / "in.pt")
        torch.save(
            {"f": torch.optim.lr_scheduler.OneCycleLR._annealing_cos, **WEIGHTS},
            tmp_path / "m.pt",
            pickle_protocol=2,
        )
    for name in ("in.pt", "m.pt"):
        assert "dangerous" not in run("inspect", name, cwd=tmp_path).out
