"""Several paths: one table of several checkpoints, the files of ranks as one, errors as rows, and
exit codes.
"""

from __future__ import annotations

import re
import shutil
import unicodedata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckptconv.cli import terminal
from ckptconv.cli.main import cli
from helpers import oracle
from helpers.program import run

WIDTHS = (60, 80, 120)
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def saved(folder: Path, name: str, tree: object) -> str:
    torch.save(tree, folder / name)
    return name


@pytest.fixture
def files(tmp_path):
    """Good and bad ones, with names that a table has to make room for."""
    wide = "a name of many words, " + "漢字" * 20 + ".pt"
    with oracle.tagged(lambda _: "cuda:3"):
        saved(tmp_path, "cuda.pt", {"w": torch.ones(2)})
    types = (torch.float32, torch.float16, torch.int32, torch.uint8)
    saved(
        tmp_path,
        "good.pt",
        {f"w{number}": torch.ones(2, dtype=dtype) for number, dtype in enumerate(types)},
    )
    saved(tmp_path, "ddp.pt", {"module.fc.weight": torch.ones(2)})
    saved(tmp_path, wide, {"w": torch.ones(2)})
    saved(tmp_path, "k" * 150, {"w": torch.ones(2)})
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:-100])
    (tmp_path / "page.pt").write_text("<!DOCTYPE html><html></html>")
    return ["good.pt", "cuda.pt", "ddp.pt", wide, "k" * 150, "cut.pt", "page.pt"]


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


def joined(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_fits_and_loses_nothing(width, color, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "width", lambda **_: width)
    done = CliRunner().invoke(cli, ["inspect", *files], color=color)
    assert done.exit_code == 1, "two cannot be opened"
    assert (COLOR.search(done.output) is not None) == color
    plain = COLOR.sub("", done.output)
    assert max(map(columns, plain.splitlines())) <= width
    for told in (
        *files,
        "needs cuda:3",
        "its keys carry a wrapper",
        "is a web page, not a checkpoint",
        "has no end record",
    ):
        assert joined(told) in joined(plain), told
    assert plain.splitlines()[-1] == "3 of 7 portable"


def test_a_table_has_a_column_for_each_fact_where_it_fits(files, tmp_path):
    done = run("inspect", "good.pt", "cuda.pt", cwd=tmp_path)
    head, good, cuda, why, count = done.out.splitlines()
    assert head.split() == ["name", "format", "size", "tensors", "dtypes", "devices", "portable"]
    assert good.split()[-2:] == ["cpu", "yes"] and "+1" in good
    assert cuda.split()[-2:] == ["cuda:3", "no"]
    assert (why, count) == ("  not portable: needs cuda:3", "1 of 2 portable")
    assert done.exit == 0
    types = (torch.float32, torch.float32, torch.float16, torch.int32)
    saved(tmp_path, "three.pt", {str(at): torch.ones(2, dtype=one) for at, one in enumerate(types)})
    three = run("inspect", "three.pt", "cuda.pt", cwd=tmp_path).out.splitlines()[1]
    assert "  4  float32, float16, int32  " in three and "+" not in three


def test_several_are_one_document_with_errors_as_items(files, tmp_path):
    done = run("inspect", "good.pt", "cut.pt", "--json", cwd=tmp_path)
    good, cut = done.json()["checkpoints"]
    assert done.exit == 1
    assert (good["path"], good["portable"], good["opened_by"]) == ("good.pt", True, "torch.load")
    assert cut["path"] == "cut.pt" and cut["error"]["kind"] == "MalformedCheckpoint"
    done = run("doctor", "good.pt", "page.pt", "none.pt", "--json", cwd=tmp_path)
    good, page, none = done.json()["checkpoints"]
    assert (good["loads"], page["loads"], "error" in none, done.exit) == (True, False, True, 2)
    assert "checkpoints" not in run("doctor", "good.pt", "--json", cwd=tmp_path).json()


def test_two_good_files_are_two_checkpoints(files, tmp_path):
    shutil.copy(tmp_path / "good.pt", tmp_path / "copy.pt")
    done = run("doctor", "good.pt", "copy.pt", cwd=tmp_path)
    assert (done.exit, done.err) == (0, "")
    assert done.out.splitlines() == [
        "good.pt",
        "loads here; tensors not read (--values reads them)",
        "copy.pt",
        "loads here; tensors not read (--values reads them)",
        "2 of 2 load here",
    ]


@pytest.mark.parametrize(
    "names, code", [(["good.pt"], 0), (["good.pt", "page.pt"], 1), (["page.pt", "none.pt"], 2)]
)
def test_the_worst_decides_the_exit_code_of_doctor(names, code, files, tmp_path):
    assert run("doctor", *names, cwd=tmp_path).exit == code


def test_strict_counts_warnings(tmp_path):
    saved(tmp_path, "nan.pt", {"w": torch.tensor([float("nan")])})
    assert run("doctor", "nan.pt", "--values", cwd=tmp_path).exit == 0
    done = run("doctor", "nan.pt", "--values", "--strict", cwd=tmp_path)
    assert done.exit == 1
    assert done.out.splitlines()[-1] == "loads here, with 1 warning, which fails with --strict"
    assert run("doctor", "nan.pt", "--strict", cwd=tmp_path).exit == 0, "no value was read"


def test_the_files_of_all_ranks_are_one_checkpoint(produced, tmp_path):
    ranks = [produced / f"rank{number}_dtensor.pt" for number in (0, 1)]
    assert run("inspect", *ranks, "--json", cwd=tmp_path).json()["format"] == "torch zip, 2 ranks"
    assert run("doctor", *ranks, "--json", cwd=tmp_path).json()["format"] == "torch zip, 2 ranks"


def test_a_rank_beside_another_file_is_not_guessed_at(produced, tmp_path):
    saved(tmp_path, "good.pt", {"w": torch.ones(2)})
    rank = produced / "rank0_dtensor.pt"
    first, second = run("inspect", rank, "good.pt", "--json", cwd=tmp_path).json()["checkpoints"]
    assert first["error"]["kind"] == "IncompleteCheckpoint" and second["portable"]
    done = run("doctor", rank, "good.pt", cwd=tmp_path)
    assert "lone-rank" in done.out and "1 of 2 load here" in done.out


def test_a_scan_of_several_counts_them(tmp_path):
    saved(tmp_path, "good.pt", {"w": torch.ones(2)})
    done = run("scan", "good.pt", "none.pt", cwd=tmp_path)
    assert done.out.splitlines()[-1] == "2 paths: 1 plain, 1 unread"
    document = run("scan", "good.pt", "none.pt", "--json", cwd=tmp_path).json()
    assert [item["path"] for item in document["scans"]] == ["good.pt"]
    assert [item["path"] for item in document["errors"]] == ["none.pt"]


NOT_CHECKPOINTS = {
    "web page": b"<!DOCTYPE html><html>log in</html>",
    "JSON text": b'{"error": "not found"}',
    "text": b"not found\n",
    "git-LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "empty file": b"",
}


@pytest.mark.parametrize("kind", NOT_CHECKPOINTS)
def test_scan_says_what_is_not_a_checkpoint(kind, tmp_path):
    (tmp_path / "model.pt").write_bytes(NOT_CHECKPOINTS[kind])
    done = run("scan", "model.pt", "--strict", cwd=tmp_path)
    assert (done.exit, done.out) == (
        0,
        f"model.pt: not a checkpoint ({kind}); nothing in it can run when it is loaded\n",
    )


def test_a_text_that_is_a_pickle_is_one(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"cos\nsystem\n(S'echo'\ntR.")
    done = run("scan", "model.pt", cwd=tmp_path)
    assert done.exit == 1 and "os.system" in done.out


TOLD = {
    b"<html>": "web page",
    b'{"error": "Repository not found"}': "Repository not found",
    b"Not Found": "it begins: Not Found",
    bytes(99): "which program wrote it",
}


@pytest.mark.parametrize("content, told", TOLD.items(), ids=TOLD.values())
def test_what_cannot_be_opened_says_what_it_looks_like_and_what_to_do(content, told, tmp_path):
    (tmp_path / "model.pt").write_bytes(content)
    done = run("inspect", "model.pt", cwd=tmp_path)
    assert done.exit == 1 and told in done.err and "; " in done.err


def test_the_parts_of_a_list_and_of_an_optimizer_are_told(tmp_path):
    w = {"fc.weight": torch.ones(2)}
    saved(tmp_path, "list.pt", {"model": w, "ema": {"decay": 0.9, "shadow": [torch.ones(2)]}})
    saved(tmp_path, "none.pt", {"model": w, "ema": None})
    saved(tmp_path, "number.pt", {"model": w, "ema": 0.999})
    saved(
        tmp_path,
        "adam.pt",
        {"optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}},
    )
    for name, only, told in (
        ("list.pt", ("--only", "ema"), "choose one: --only ema.shadow"),
        (
            "none.pt",
            ("--only", "ema"),
            "ema: is None, and holds no tensors; see what it holds with: ckptconv inspect none.pt",
        ),
        ("number.pt", ("--only", "ema"), "ema: is 0.999"),
        ("adam.pt", (), "holds only an optimizer's state: no weights; write a .pt"),
    ):
        done = run("convert", name, "out.safetensors", *only, cwd=tmp_path)
        assert done.exit == 1 and told in done.err
    assert (
        run("convert", "list.pt", "out.safetensors", "--only", "ema.shadow", cwd=tmp_path).exit == 0
    )
    assert "no weights" in run("inspect", "adam.pt", cwd=tmp_path).out
