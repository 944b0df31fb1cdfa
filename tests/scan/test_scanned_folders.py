"""Scanning the files of DCP folders: sound ones are plain, and a metadata that leads into the bytes
of a tensor is followed.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from ckptconv import scan_checkpoint
from ckptconv.formats.zip_directory import joined_archives
from ckptconv.io.files import FileSource
from helpers import oracle
from helpers.paths import DATA
from helpers.program import run

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")


def saved(folder: Path, state: dict) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def shards() -> list[Path]:
    corpus = oracle.corpus_folder()
    folders = (corpus, corpus.parent / "produced", DATA)
    return [
        path for folder in folders if folder.is_dir() for path in sorted(folder.rglob("*.distcp"))
    ]


@pytest.mark.parametrize("path", shards(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_files_of_real_dcp_folders_are_plain(path):
    assert scan_checkpoint(path).level == "plain"
    assert scan_checkpoint(path.parent).level == "plain"


def test_values_that_look_like_pickles_in_a_sound_dcp_folder_are_plain(tmp_path):
    state = {
        "random": torch.randn(1_000_000, generator=torch.Generator().manual_seed(1)),
        "negative zeros": torch.full((1_000_000,), -0.0, dtype=torch.bfloat16),
        "beginnings": torch.frombuffer(
            bytearray(b"\x80\2\x82\1.PK\5\6PK\3\4" * 500), dtype=torch.uint8
        ),
        "epoch": 3,
    }
    scan = scan_checkpoint(saved(tmp_path / "sound", state))
    assert scan.level == "plain"
    assert {Path(file.path).name: file.kind for file in scan.files}["__0_0.distcp"] == "4 zips"
    assert run("scan", "sound", "--strict", cwd=tmp_path).exit == 0


def led_astray(folder: Path, inner: bytes, *, times: int = 1) -> Path:
    """A DCP folder whose metadata places `epoch` at bytes within the tensor `w`."""
    values = bytearray(b"\0" * 999 + inner + b"\0" * 999)
    saved(folder, {"w": torch.frombuffer(values, dtype=torch.uint8), "epoch": 3, "step": 4})
    raw = (folder / "__0_0.distcp").read_bytes()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "epoch":
            place = replace(info, offset=raw.index(inner), length=len(inner))
            metadata.storage_data[index] = (
                place if times == 1 else replace(info, offset=0, length=len(raw) - 9)
            )
        elif index.fqn == "step" and times > 1:
            metadata.storage_data[index] = replace(info, offset=1, length=len(raw) - 9)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def calling(target: str) -> bytes:
    text = target.encode()
    return b"\x80\2cos\nmkdir\nX" + struct.pack("<I", len(text)) + text + b"\x85R."


def zipped(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


class Mkdir:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (Path(self.path),)


@pytest.mark.parametrize("form", ["a pickle", "an archive"])
def test_an_item_that_lies_within_a_tensor_is_looked_into(form, tmp_path):
    mark = tmp_path / "mark"
    inner = calling(str(mark)) if form == "a pickle" else zipped(Mkdir(str(mark)))
    folder = led_astray(tmp_path / "astray", inner)
    assert scan_checkpoint(folder / "__0_0.distcp").level == "plain"
    assert scan_checkpoint(folder).level == "dangerous" and not mark.exists()
    assert run("scan", "astray", cwd=tmp_path).exit == 1
    wanted = {"w": torch.zeros(1998 + len(inner), dtype=torch.uint8), "epoch": 0}
    # it is not a checkpoint, but it has run
    with warnings.catch_warnings(), contextlib.suppress(dcp.CheckpointException):
        warnings.simplefilter("ignore")
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    assert mark.exists(), "the folder does what it should"


def test_items_over_each_other_are_not_plain(tmp_path):
    assert scan_checkpoint(led_astray(tmp_path / "astray", b"N." * 9, times=2)).level == "unknown"


def test_a_metadata_whose_files_are_not_there_is_not_plain(tmp_path):
    folder = saved(tmp_path / "part", {"w": torch.zeros(3)})
    (folder / "__0_0.distcp").unlink()
    assert scan_checkpoint(folder).level == "unknown"


def test_archives_that_do_not_fill_a_file_are_none(tmp_path):
    one, two = zipped({"a": 1}), zipped({"b": torch.ones(3)})
    for content, count in (
        (one + two, 2),
        (one + two + b"x", 0),
        (one + b"x" + two, 0),
        (one[:-1] + two, 0),
        (one, 1),
    ):
        (tmp_path / "joined").write_bytes(content)
        with contextlib.closing(FileSource(tmp_path / "joined")) as source:
            assert len(joined_archives(source)) == count


def test_what_stands_between_archives_is_still_searched(tmp_path):
    path = tmp_path / "between.distcp"
    path.write_bytes(zipped({"a": 1}) + calling("mark") + zipped({"b": 2}))
    assert scan_checkpoint(path).level == "dangerous"
    path.write_bytes(zipped({"a": 1}) + zipped(Mkdir("mark")) + zipped({"b": 2}))
    assert scan_checkpoint(path).level == "dangerous"
