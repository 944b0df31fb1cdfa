"""The documents of `--json`: one each time, strict JSON, and exactly the fields that docs/json.md
names.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from ckptconv import Job, convert_many
from ckptconv.batch.totals import TOTALS, Totals
from ckptconv.cli.main import cli
from ckptconv.devices.gpu_choice import GpuChoice
from ckptconv.devices.host import Gpu, Host
from ckptconv.devices.report import CHOICE, host_document
from ckptconv.io.remote.place import RemotePlace, Site
from ckptconv.io.remote.store import Unfinished
from ckptconv.support.json_text import json_pieces
from helpers.folder_store import FolderStore
from helpers.http_server import HttpServer
from helpers.program import ROOT, SAMPLES, Finished, environment, run

PAGE = (ROOT / "docs/json.md").read_text(encoding="utf-8")


def strict(text: str) -> dict[str, Any]:
    """The one document in a text; what is not a strict JSON, or stands twice in an object, is an
    error.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), pairs
        return dict(pairs)

    assert text.isascii() and text.endswith("}\n")
    made = json.loads(text, parse_constant=refuse, object_pairs_hook=distinct)
    json.dumps(made, ensure_ascii=False).encode()  # no half of a character
    assert next(iter(made)) == "schema" and made["schema"] == 1
    return made


def written(document: dict[str, Any]) -> dict[str, Any]:
    return strict("".join(json_pieces(document)) + "\n")


# -------------------------------------------------------------------------- the page and the fields


def rows(section: str) -> dict[str, tuple[str, ...]]:
    """The fields of a section of the page with their types."""
    body = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return {
        path: tuple(types.split(" or "))
        for path, types in re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", body, re.MULTILINE)
    }


def kinds(value: Any) -> set[str]:
    """The words of the page for a JSON value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    plain = {
        float: {"number"},
        str: {"text"},
        type(None): {"null"},
        list: {"list"},
        dict: {"object", "map"},
    }
    return plain[type(value)]


def fields(value: Any, path: str, known: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Any]]:
    """Every field of a document by its path on the page; parts of parts are named like parts."""
    if isinstance(value, dict):
        for name, inner in value.items():
            here = (
                f"{path}.*" if "map" in known.get(path, ()) else f"{path}.{name}" if path else name
            )
            yield here, inner
            yield from fields(inner, here, known)
    elif isinstance(value, list):
        here = "parts[]" if path == "parts[].parts" else f"{path}[]"
        for inner in value:
            if not isinstance(inner, dict):
                yield here, inner
            yield from fields(inner, here, known)


def hold(section: str, documents: list[dict[str, Any]], *, fit: bool = False) -> None:
    """Hold documents against a section of the page and that of errors, in both directions; few
    commands tell of a `fit`.
    """
    errors = {
        path: types for path, types in rows("errors").items() if fit or not path.startswith("fit")
    }
    known = {**rows("Every document"), **rows(section), **errors}
    met = set()
    for one in documents:
        for path, value in fields(one, "", known):
            assert path in known, f"{path} = {value!r:.100} is not on the page"
            assert kinds(value) & set(known[path]), (
                f"{path} = {value!r:.100} is none of {known[path]}"
            )
            met.add(path)
    assert met == set(known), f"on the page, but not printed: {sorted(set(known) - met)}"


def document(*arguments: object, cwd: Path, code: int = 0) -> dict[str, Any]:
    done = run(*arguments, "--json", cwd=cwd)
    assert done.exit == code, done.err
    return strict(done.out)


@pytest.fixture
def room(tmp_path) -> Path:
    for sample in SAMPLES.glob("*.pt"):
        shutil.copy(sample, tmp_path)
    large = torch.full((3,), 1e10)
    state_dict = {
        "fc.weight": large,
        "fc.bias": torch.ones(1),
        "flag": torch.frombuffer(bytearray([0, 1, 7]), dtype=torch.bool),
    }
    torch.save(
        {"state_dict": state_dict, "lr": float("nan"), "args": Namespace(a=1)}, tmp_path / "rich.pt"
    )
    return tmp_path


def test_inspect_prints_what_the_page_says(room):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2, 2)}, room / "w.safetensors", {"origin": "here"})
    one = torch.ones(2)
    shared = [one]
    torch.save({"a": shared, "b": shared, "state_dict": {"w": one}}, room / "shared.pt")
    keys = {"model.fc.weight": one, "model.fc.bias": one}
    lightning = {
        "pytorch-lightning_version": "2.0",
        "state_dict": keys,
        "epoch": 1,
        "global_step": 1,
        "hyper_parameters": {},
    }
    torch.save(lightning, room / "lightning.pt")
    folder = room / "run" / "checkpoint-5"
    folder.mkdir(parents=True)
    shutil.copy(room / "ddp_cuda3.pt", folder / "pytorch_model.bin")
    codes = {"q.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "q.weight_scale": one[:1]}
    save_file(codes, room / "fp8.safetensors")
    torch.save({"qweight": one.int(), "scales": one}, room / "odd.pt")  # codes of nobody
    names = (
        *("ddp_cuda3_train.pt", "rich.pt", "w.safetensors", "shared.pt", "lightning.pt", "run"),
        *("fp8.safetensors", "odd.pt"),
    )
    found = [document("inspect", name, "--depth", "3", cwd=room) for name in names]
    hold("inspect", [*found, document("inspect", "no.pt", cwd=room, code=1)])
    assert found[1]["parts"][1]["value"] == "nan"


@pytest.mark.parametrize("command, code", [("inspect", 1), ("doctor", 2)])
def test_several_checkpoints_are_a_list_with_errors_among_them(command, code, room):
    found = document(command, "tied.pt", "no.pt", "fp16.pt", cwd=room, code=code)
    assert set(found) == {"schema", "checkpoints"}
    known = {path for path in rows(command) if "." not in path and "[" not in path}
    first, missing, last = found["checkpoints"]
    assert set(first) == set(last) == known
    assert set(missing) == {"path", "error"} and missing["error"]["exit_code"] == code
    assert [Path(item["path"]).name for item in found["checkpoints"]] == [
        "tied.pt",
        "no.pt",
        "fp16.pt",
    ]


def test_the_facts_about_tensors_are_those_that_torch_has(room):
    found = document("inspect", "ddp_cuda3.pt", "--depth", "9", cwd=room)

    def tensors(parts: list[dict[str, Any]], base: str) -> Iterator[tuple[str, Any]]:
        for part in parts:
            path = f"{base}.{part['name']}" if base else part["name"]
            if part["kind"] == "tensor":
                yield path, (part["dtype"], part["shape"], part["bytes"], part["device"])
            yield from tensors(part["parts"], path)

    saved = torch.load(room / "ddp_cuda3.pt", map_location="cpu", weights_only=True)
    expected = {
        key: (str(value.dtype).removeprefix("torch."), list(value.shape), value.nbytes, "cuda:3")
        for key, value in saved.items()
    }
    assert dict(tensors(found["parts"], "")) == expected


def test_convert_prints_what_the_page_says(room):
    tied = {"embed.weight": torch.ones(2, 2)}
    torch.save(tied, room / "one_name.pt")
    (room / "hf").mkdir()
    torch.save(tied, room / "hf" / "pytorch_model.bin")
    (room / "hf" / "config.json").write_text("{}")
    (room / "hf" / "model.py").write_text("")
    torch.save({**tied, "extra.scale": torch.ones(7)}, room / "one_more.pt")
    torch.save({**tied, "head.weight": tied["embed.weight"]}, room / "two_names.pt")
    torch.save(
        {"fc.weight": torch.ones(3, 3), "fc.bias": torch.ones(1), "a.x": torch.ones(1)},
        room / "other.pt",
    )
    torch.save(
        {"p.x": torch.ones(3), "q.x": torch.ones(3), "s.weight": torch.ones(2)}, room / "several.pt"
    )
    torch.save(
        {
            "c.x": torch.ones(3),
            "d.x": torch.ones(3),
            "r.weight": torch.ones(5),
            "s.weight": torch.ones(4),
        },
        room / "like.pt",
    )
    turned = {"from": "fc.weight", "to": "fc.turned", "operations": [{"transpose": [0, -1]}]}
    (room / "turned.json").write_text(json.dumps([turned]))
    found = [
        document(
            "convert",
            "ddp_cuda3_train.pt",
            "shards",
            "--max-shard-size",
            "1kB",
            "--dry-run",
            cwd=room,
        ),
        document(
            "convert",
            "rich.pt",
            "rich16.pt",
            "--dtype",
            "f16",
            "--verify",
            "--save-mapping",
            "map.json",
            cwd=room,
        ),
        document(
            "convert",
            "ddp_cuda3.pt",
            "a.safetensors",
            "--exclude",
            "*.bias",
            "--rename",
            "features.=f.",
            cwd=room,
        ),
        document("convert", "rich.pt", "turned.pt", "--rules", "turned.json", cwd=room),
        document("convert", "hf", "hf_out", "--with-files", cwd=room),
        document("convert", "two_names.pt", "tied.safetensors", cwd=room),
        document("convert", "namespace_train.pt", "plain.pt", cwd=room),
        document("convert", "one_name.pt", "filled.pt", "--like", "two_names.pt", cwd=room),
        document("convert", "rich.pt", "no.safetensors", "--like", "other.pt", cwd=room, code=1),
        document("convert", "several.pt", "no.safetensors", "--like", "like.pt", cwd=room, code=1),
        document(
            "convert", "one_more.pt", "no.safetensors", "--like", "two_names.pt", cwd=room, code=1
        ),
        document("convert", "rich.pt", "rich.pt", "--dry-run", cwd=room, code=1),
    ]
    assert found[1]["overflowed"] == {"state_dict.fc.weight": 3} and found[1]["odd_bools"] == {
        "state_dict.flag": 1
    }
    assert found[-1]["dry_run"] is True and found[-1]["error"]["exit_code"] == 1
    hold("convert, strip-module, add-module, merge, average, merge-lora, apply", found, fit=True)


def test_delta_prints_what_the_page_says(room):
    torch.save({"fc.weight": torch.ones(3), "epoch": 1}, room / "old.pt")
    torch.save({"fc.weight": torch.zeros(3), "epoch": 2}, room / "new.pt")
    torch.save({"fc.bias": torch.zeros(3)}, room / "other.pt")
    found = [
        document("delta", "old.pt", "new.pt", "weight_v000003", cwd=room),
        document("delta", "old.pt", "other.pt", "weight_v000004", cwd=room, code=1),
    ]
    assert (found[0]["version"], found[0]["base_version"], found[0]["changed"]) == (3, 2, 1)
    hold("delta", found)


def test_what_went_over_the_network_is_in_every_document(room):
    with HttpServer({"/a.pt": (SAMPLES / "ddp_cuda3_train.pt").read_bytes()}) as server:
        for code, words in (
            (0, ("stats", f"{server.url}/a.pt", "--only", "state_dict")),
            (0, ("convert", f"{server.url}/a.pt", "net.pt")),
            (1, ("inspect", f"{server.url}/none.pt")),
        ):
            found = strict(run(*words, "--json", cwd=room).out)
            told = {path for path, _ in fields({"network": found["network"]}, "", {})}
            assert told == set(rows("network")), words
            assert ("error" in found) == bool(code)
            assert found["network"]["requests"] >= 1
    assert "network" not in strict(run("inspect", SAMPLES / "tied.pt", "--json", cwd=room).out)


def test_cleanup_prints_what_the_page_says(room, monkeypatch):
    class Left(FolderStore):
        can_write = True

        def unfinished(self, prefix):
            begun = "2026-01-02T03:04:05+00:00"
            return [
                Unfinished("a/model.pt", "id", begun, 10),
                Unfinished("a/b.pt", "id", "", None),
            ]

        def abort(self, left):
            aborted.append(left.key)

    aborted: list[str] = []
    place = RemotePlace(Site(Left(room)), "a/")
    monkeypatch.setattr("ckptconv.cli.fixing.place_of", lambda _: place)
    found = []
    for words in ((), ("--older-than", "1"), ("--abort",)):
        done = CliRunner().invoke(cli, ["cleanup", str(room), *words, "--json"])
        assert done.exit_code == 0
        found.append(strict(done.stdout))
        assert found[-1].pop("network")["requests"] >= 1
    assert [len(item["uploads"]) for item in found] == [2, 1, 2], "nobody knows how old one is"
    assert aborted == ["a/model.pt", "a/b.pt"]
    found.append(document("cleanup", room, cwd=room, code=1))
    hold("cleanup", found)
    text = CliRunner().invoke(cli, ["cleanup", str(room)]).stdout
    assert "2 unfinished uploads found; add --abort" in text and "a/model.pt, 10 B" in text


def test_batch_prints_what_the_page_says(room, monkeypatch):
    (room / "in").mkdir()
    for name in ("tied.pt", "ddp_cuda3.pt"):
        shutil.copy(SAMPLES / name, room / "in" / name)
    (room / "in/bad.pt").write_bytes(b"PK\x03\x04" + bytes(99))
    (room / "in/table.bin").write_bytes(b"nothing known" * 9)
    words = ("batch", room / "in", "--out-dir", room / "out", "--to", "safetensors", "--jobs", 1)
    found = [document(*words, "--dtype", "bf16", "--rename", "a=b", "--dry-run", cwd=room)]
    assert len(found[0]["jobs_planned"]) == 3 and len(found[0]["passed_over"]) == 1
    found.append(document(*words, cwd=room, code=1))
    assert (found[1]["done"], found[1]["failed"], found[1]["left"]) == (2, 1, 0)
    report = room / "out/ckptconv-batch.jsonl"
    kept = [line for line in report.read_text().splitlines() if "tied" not in line]
    report.write_text("\n".join([*kept, '{"state": "started", "key": "KEY"}', ""]).replace(
        "KEY", str(room / "out/tied.safetensors")))  # fmt: skip
    found.append(document("batch", "--status", report, cwd=room, code=1))
    assert len(found[2]["running"]) == 1
    found.append(document(*words, "--retry-failed", "--verify", cwd=room, code=1))
    assert found[3]["receipts"][-1]["found"] or found[3]["receipts"][1]["found"]
    (room / "m.jsonl").write_text('{"source": "none.pt", "output": "x.pt"}\n')
    found.append(document("batch", "m.jsonl", cwd=room, code=2))
    assert len(found[4]["problems"]) == 1
    with HttpServer({"/a.pt": (SAMPLES / "tied.pt").read_bytes()}) as server:
        (receipt,) = convert_many([Job(f"{server.url}/a.pt", room / "far.safetensors")])
    totals = Totals(1)
    read = {"rules.toml": [["", 1, 2, 3]]}
    totals.add(replace(receipt, tries=2, notes=("a note",), read=read))
    found.append(written({"reports": [], **TOTALS.of(totals)}))
    (room / "in/config.json").write_text("{}")
    (room / "n.jsonl").write_text(
        '{"source": "in/tied.pt", "output": "model", "to": "safetensors", "with_files": true}\n'
    )
    found.append(document("batch", "n.jsonl", cwd=room))
    assert [Path(name).name for name in found[-1]["receipts"][0]["read"]] == ["config.json"]
    hold("batch", found)


def test_edit_prints_what_the_page_says(room):
    from safetensors.torch import save_file

    save_file({"old.a": torch.ones(2), "b": torch.ones(3)}, room / "m.safetensors")
    words = ("--rename", "old.=n.", "--metadata", "license=mit", "--save-mapping", "names.json")
    found = [
        document("edit", "m.safetensors", *words, "--verify", cwd=room),
        document("edit", "m.safetensors", "--remove-metadata", "license", "-n", cwd=room),
        document("edit", "m.safetensors", "--keys", "strip", cwd=room),
        document("edit", "m.safetensors", "--rename", "no.=n.", cwd=room, code=1),
    ]
    assert [item["in_place"] for item in found[:3]] == [False, True, None]
    hold("edit", found)


def beside_another(room: Path) -> str:
    """A folder with a file that is not read."""
    (room / "two").mkdir()
    save_file({"w": torch.ones(2)}, room / "two" / "model.safetensors")
    shutil.copy(room / "two" / "model.safetensors", room / "two" / "other.bin")
    return "two"


def test_doctor_prints_what_the_page_says(room):
    (room / "damaged.pt").write_bytes((room / "rich.pt").read_bytes()[:500])
    found = [document("doctor", name, cwd=room, code=1) for name in ("ddp_cuda3.pt", "damaged.pt")]
    found.append(document("doctor", beside_another(room), cwd=room))
    hold("doctor", [*found, document("doctor", "no.pt", cwd=room, code=2)])


def test_diff_prints_what_the_page_says(room):
    first = {
        "w": torch.tensor([1.0, float("inf")]),
        "s": torch.ones(2),
        "i": torch.ones(2),
        "a": torch.ones(1),
        "n": 1,
    }
    second = {
        "w": torch.tensor([3.0, 1.0]),
        "s": torch.ones(3),
        "i": torch.ones(2).half(),
        "b": torch.ones(1),
        "n": torch.ones(1),
    }
    torch.save(first, room / "a.pt")
    torch.save({**second, "flag": torch.ones(1)}, room / "b.pt")
    torch.save({"w": torch.tensor([1.0, 2.0])}, room / "c.pt")
    raw = bytearray((room / "c.pt").read_bytes())
    raw[raw.index(torch.tensor([1.0, 2.0]).numpy().tobytes())] ^= 1
    (room / "d.pt").write_bytes(raw)
    found = [
        document("diff", "a.pt", "b.pt", "--atol", "0.1", cwd=room, code=1),
        document("diff", "c.pt", "d.pt", cwd=room, code=2),
        document("diff", "ddp_cuda3.pt", "dp_cuda0.pt", cwd=room, code=1),
        document("diff", "ddp_cuda3.pt", "regression.pt", cwd=room, code=1),
        document("diff", "no.pt", "a.pt", cwd=room, code=2),
    ]
    run("strip-module", "ddp_cuda3.pt", "bare.pt", cwd=room)
    found.append(document("diff", "ddp_cuda3.pt", "bare.pt", cwd=room, code=1))
    found.append(document("diff", "ddp_cuda3.pt", "bare.pt", "--keys", "strip", cwd=room))
    hold("diff", found)
    (shape,) = [item for item in found[0]["shapes"] if item["key"] == "s"]
    assert (shape["a"], shape["b"]) == ([2], [3])
    (value,) = found[1]["values"]
    assert value["a"] == 1.0 and isinstance(value["b"], float)


def test_scan_prints_what_the_page_says(room):
    class Bad:
        def __reduce__(self):
            return os.system, ("true",)

    (room / "bad.pkl").write_bytes(pickle.dumps(Bad()))
    found = document("scan", "bad.pkl", "no.pt", "ddp_cuda3.pt", "none.pt", cwd=room, code=2)
    assert [item["path"] for item in found["scans"]] == ["bad.pkl", "ddp_cuda3.pt"]
    assert [item["path"] for item in found["errors"]] == ["no.pt", "none.pt"] and found[
        "error"
    ] == found["errors"][0]
    hold("scan", [found, document("scan", "bad.pkl", cwd=room, code=1)])


def test_devices_prints_what_the_page_says(room):
    gpus = (Gpu(0, 1, "H100", "GPU-1", 80, 79), Gpu(None, 0, "H100", None, None, None))
    made = written(host_document(Host(gpus, "1", "2.13", 1, False, 0, ("odd",)), "cuda:0"))
    hold(
        "devices",
        [made, document("devices", cwd=room), document("devices", "--bad", cwd=room, code=2)],
    )


def test_devices_export_prints_what_the_page_says(room):
    gpu = Gpu(0, 1, "H100", "GPU-1", 80, 79)
    made = written(CHOICE.of(GpuChoice((gpu,), "GPU-1", ("odd",))))
    none = run("devices", "--export", "--json", cwd=room, env={"PATH": str(room)})
    hold(
        "devices --export",
        [made, strict(none.out), document("devices", "--export", "--bad", cwd=room, code=2)],
    )


def test_the_page_names_every_command():
    from ckptconv.cli.main import cli

    sections = {
        name for head in re.findall(r"^## (.*)$", PAGE, re.MULTILINE) for name in head.split(", ")
    }
    with_json = {
        name
        for name in cli.list_commands(click.Context(cli))
        if (command := cli.get_command(click.Context(cli), name)) is not None
        and any("--json" in param.opts for param in command.params)
    }
    assert sections == {"Every document", "network", "errors", "devices --export", *with_json}


@pytest.mark.parametrize(
    ("field", "package", "made"),
    [
        ("reasons[].code", "inspect", r'(?:Reason|Refusal)\(\s*"([a-z-]+)"'),
        ("findings[].code", "doctor", r'\b(?:error|warning|info)\(\s*"([a-z0-9-]+)"'),
    ],
)
def test_the_page_has_every_code(field, package, made):
    files = (ROOT / "ckptconv" / package).glob("*.py")
    text = "\n".join(file.read_text("utf-8") for file in files)
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| `{field}` ")]
    told = set(re.findall(r"`([a-z0-9-]+)`", row.split("|")[3])) - {"inspect"}
    assert set(re.findall(made, text)) <= told
    assert [code for code in told if f'"{code}"' not in text] == []


# -------------------------------------------------------------------------------- one document each

WRONG = [
    ("inspect",), ("inspect", "x.pt", "--depth", "many"), ("convert", "ddp_cuda3.pt"),
    ("convert", "a", "b", "--bad"),
    ("nonsense",),
    ("convert", "ddp_cuda3.pt", "o.pt", "--dtype", "f17"),
    ("convert", "ddp_cuda3.pt", "o.pt", "--rename", "x"),
    ("doctor", "a", "--like", "b", "--model", "c"), ("diff", "a", "b", "--atol", "-1"), ("scan",),
    ("devices", "--bad"),
    ("inspect", "ddp_cuda3.pt", "--limit", "nothing=3"),
    ("diff", "ddp_cuda3.pt", "ddp_cuda3.pt", "--equal-nan"), ("",),
]  # fmt: skip


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_command_line_that_cannot_be_meant_is_a_document_too(arguments, room):
    done = run(*arguments, "--json", cwd=room)
    error = strict(done.out)["error"]
    assert done.exit == error["exit_code"] == 2
    assert (
        done.err == "error: "
        f"{error['message']}"
        f"{'' if '; see ' in error['message'] else '; see ckptconv convert --help'}\n"
    )


def test_json_as_a_value_behind_two_dashes_is_not_the_option(room):
    done = run("inspect", "--", "--json", cwd=room)
    assert done.exit == 1 and done.out == "" and done.err.startswith("error: --json: no such file")


def test_odd_bytes_and_halves_of_characters_stay_apart(room):
    name = os.fsdecode(b"odd\xff.pt")
    key = "half\ud800"
    torch.save(
        {key: torch.ones(1), "half\\ud800": torch.ones(2), "\U0001f600": torch.ones(3)}, room / name
    )
    found = document("inspect", name, cwd=room)
    assert found["path"] == "odd\\udcff.pt"
    assert [part["name"] for part in found["parts"]] == ["half\\ud800", "half\\ud800", "\U0001f600"]
    assert written({"names": {key: 1, "half\\ud800": 2}})["names"] == {
        "half\\ud800": 1,
        "half\\ud800#2": 2,
    }


def test_an_interrupted_run_is_a_document_too(room):
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        done = stopped(["diff", "rich.pt", "rich.pt", "--json"], room, number)
        found = strict(done.out)
        assert (
            done.exit == code
            and found["error"]["kind"] == "Interrupted"
            and found["error"]["exit_code"] == code
        )


def stopped(arguments: list[str], room: Path, number: int) -> Finished:
    """A run that gets a signal when its work has begun, which takes a minute."""
    slow = (
        "import sys, time; from ckptconv.diff import checkpoints as diffing; from "
        "ckptconv.cli.main import main; "
        + (
            "diffing.open_certain = lambda *_, **__: (print('begun', file=sys.stderr, "
            "flush=True), time.sleep(60)); "
            "sys.argv = ['ckptconv', *sys.argv[1:]]; main()"
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, *arguments], cwd=room, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None and process.stderr.readline() == "begun\n"
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return Finished(process.returncode, out, err, 0.0, 0)


def test_a_defect_is_a_document_too(room):
    code = (
        "import sys; from ckptconv.scan import files as scanning; from ckptconv.cli.main import "
        "main; "
        + (
            "scanning.scan_checkpoint = lambda *_, **__: 1 / 0; sys.argv = ['ckptconv', 'scan', "
            "'rich.pt', '--json']; main()"
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=room,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        strict(done.stdout)["error"]["kind"] == "ZeroDivisionError"
        and done.returncode == 1
        and "Traceback" in done.stderr
    )


def test_stats_prints_what_the_page_says(room):
    odd = {"w": torch.tensor([1.0, float("nan")]), "e": torch.zeros(0), "s": torch.ones(())}
    plain = torch.randn(4, 2)
    odd["q"] = torch.quantize_per_channel(
        plain, torch.ones(4), torch.ones(4), 0, dtype=torch.quint4x2
    )
    torch.save(odd, room / "odd.pt")
    header = b'{"six":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}    '
    (room / "six.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    found = [
        document("stats", "six.safetensors", cwd=room),
        document("stats", "odd.pt", "--histogram", "*", "--top", "3", cwd=room),
        document("stats", "ddp_cuda3.pt", cwd=room),
        document("stats", beside_another(room), cwd=room),
        document("stats", "no.pt", cwd=room, code=1),
    ]
    hold("stats", found)


def test_ls_prints_what_the_page_says(room):
    plain = torch.randn(4, 2)
    part = torch.quantize_per_tensor(plain, 0.9, 1, torch.quint2x4)[1:]
    torch.save({"w": plain, "again": plain, "t": plain.t(), "part": part}, room / "views.pt")
    np.savez_compressed(room / "small.npz", w=np.ones(3))
    found = [
        document("ls", "views.pt", cwd=room),
        document("ls", "views.pt", "*", "--long", cwd=room),
        document("ls", "small.npz", "--long", cwd=room),
        document("ls", beside_another(room), cwd=room),
        document("ls", "views.pt", "none", cwd=room, code=1),
    ]
    assert found[2]["tensors"][0]["extent"] is None, "it is compressed"
    hold("ls", found)


def test_manifest_verify_and_recover_print_what_the_page_says(room):
    codes = torch._make_per_tensor_quantized_tensor(torch.arange(4, dtype=torch.uint8), 0.5, 3)
    torch.save({"w": torch.ones(3), "q": codes}, room / "codes.pt")
    torch.save({"in": {"w": torch.ones(3), "q": codes}}, room / "other.pt")
    made = document("manifest", "codes.pt", cwd=room)
    (room / "codes.json").write_text(json.dumps(made))
    hold("manifest", [made, document("manifest", "no.pt", cwd=room, code=1)])
    found = [
        document("verify", "codes.pt", "codes.json", cwd=room),
        document("verify", "codes.pt", "codes.json", "--files", cwd=room),
        document("verify", "other.pt", "codes.json", cwd=room, code=1),
        document("verify", "other.pt", "other.pt", cwd=room, code=1),
    ]
    hold("verify", found)
    whole = (room / "codes.pt").read_bytes()
    (room / "cut.pt").write_bytes(whole[: whole.index(b"data/1")])
    shutil.copy(room / "codes.pt", room / "more.pt")
    with zipfile.ZipFile(room / "more.pt", "a") as archive:
        archive.writestr("codes/more", b"of something else")
    found = [
        document("recover", SAMPLES / "ddp_cuda3_train.pt", "a.safetensors", cwd=room),
        document("recover", "more.pt", "c.pt", cwd=room),
        document("recover", "cut.pt", "b.pt", cwd=room, code=1),
        document("recover", "cut.pt", "b.pt", cwd=room, code=1),
    ]
    assert found[2]["lost"] and "exists" in found[3]["error"]["what"]
    hold("recover", found)


def test_show_prints_what_the_page_says(room):
    values = {
        "w": torch.tensor([1.5, float("nan")]),
        "b": torch.tensor(True),
        "c": torch.ones(1) * 1j,
    }
    torch.save(values, room / "v.pt")
    found = [
        document("show", "v.pt", "w", cwd=room),
        document("show", "v.pt", "b", cwd=room),
        document("show", "v.pt", "c", cwd=room),
        document("show", "v.pt", "w", "[:1]", "--npy", "w.npy", cwd=room),
        document("show", "v.pt", "none", cwd=room, code=1),
    ]
    assert [item["tensors"][0]["values"] for item in found[:4]] == [
        [1.5, "nan"], True, [[0.0, 1.0]], None,
    ]  # fmt: skip
    torch.save({"w": torch.zeros(1).expand(2_000_000)}, room / "large.pt")
    assert "too many" in document("show", "large.pt", "w", cwd=room, code=1)["error"]["message"]
    hold("show", found)


def test_report_prints_what_the_page_says(room):
    found = [
        document("report", "ddp_cuda3.pt", "-o", "one.html", cwd=room),
        document("report", "ddp_cuda3.pt", "-o", "two.html", "--against", "fp16.pt", cwd=room),
        document("report", "no.pt", "-o", "three.html", cwd=room, code=1),
    ]
    hold("report", found)
    assert found[0]["bytes"] == (room / "one.html").stat().st_size
