"""What the program says: what is missing, where a file is, what was left out, how long it took, and
why it stopped.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptconv import (
    CheckpointError,
    convert_checkpoint,
    diagnose,
    diff_checkpoints,
    limits,
    load_portable,
    open_checkpoint,
)
from ckptconv import save_portable as save
from ckptconv import scan_checkpoint as scan
from ckptconv.io import stream as outputs
from ckptconv.io.remote.network import EXTRA
from ckptconv.support.addresses import address_in, how_to_get
from ckptconv.tensors.dtypes import floating_dtype
from helpers.examples import ALL
from helpers.program import SAMPLES, assert_one_error, run, run_bytes, run_on_terminal

TRAIN = SAMPLES / "ddp_cuda3_train.pt"
W = torch.arange(4.0)


@pytest.fixture
def room(tmp_path: Path) -> Path:
    torch.save({"a.weight": W, "a.bias": W + 1, "b.weight": W + 2}, tmp_path / "a.pt")
    return tmp_path


def said(room: Path, *arguments: object, code: int) -> str:
    return assert_one_error(run(*arguments, cwd=room), code=code)


# ---------------------------------------------------------------------------------- what is missing


@pytest.mark.parametrize(
    ("command", "example"),
    [("convert", "a.safetensors"), ("strip-module", "a-bare.pt"), ("add-module", "a-ddp.pt")],
)
def test_a_missing_out_is_named_with_an_example(command, example, room):
    error = said(room, command, "a.pt", code=2)
    assert (
        f"OUT is missing: name the file that a.pt is to become, e.g. ckptconv {command} a.pt "
        f"{example};" in error
    )
    assert "IN and OUT are missing" in said(room, command, code=2)
    assert run(command, "a.pt", example, cwd=room).exit == 0, "the example works"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("apply", "there is no delta; name BASE, one DELTA or more, then OUT"),
        ("merge", "there is only one checkpoint; name two or more, then OUT"),
        ("average", "there is only one checkpoint; name two or more, then OUT"),
    ],
)
def test_of_a_command_that_takes_several_no_example_of_one_is_offered(command, told, room):
    for words in (["a.pt"], ["a.pt", "b.pt"]):
        assert told in said(room, command, *words, code=2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("convert a.pt b.pt --jobs 2", "share out the files of an output: add --max-shard-size"),
        ("convert a.pt b.pt --address x", "--address needs --engine ray"),
        ("average a.pt a.pt b.pt --tag x", "name the folders of the steps"),
        ("average a.pt a.pt b.pt --weights 1,x", "1,x are not numbers, such as"),
        ("merge a.pt a.pt b.pt --prefix x", "--prefix x is not IN=PREFIX"),
        ("merge a.pt a.pt b.pt --prefix =x", "--prefix =x is not IN=PREFIX"),
        ("manifest a.pt --force", "--force needs -o"),
        ("stats a.pt --histogram a* --include b*", "both choose tensors; leave one of them out"),
        ("report a.pt -o b.html --only-b x", "--only-b needs --against"),
        ("report a.pt -o b.html --tag-b x", "--tag-b needs --against"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(words, told, room):
    assert told in said(room, *words.split(), code=2)
    assert [item.name for item in room.iterdir()] == ["a.pt"]


def test_what_is_given_by_an_option_elsewhere_is_told(room):
    for word in ("-o", "--output"):
        told = f"{word} is not an option: name OUT last, without one"
        assert told in said(room, "convert", "a.pt", word, "b.pt", code=2)
    assert "name OUT" not in said(room, "ls", "a.pt", "-o", "b.txt", code=2)
    assert "TENSOR is missing" in said(room, "show", "a.pt", code=2)


def test_a_tag_that_no_storage_has_is_told(room):
    for output in ("b.pt", "b.safetensors"):
        done = run("convert", "a.pt", output, "--map-location", "cuda:3=cuda:0", cwd=room)
        told = "note    no storage has the tag cuda:3 of --map-location; they have cpu"
        assert done.exit == 0 and told in done.err
    done = run("convert", "a.pt", "c.pt", "--map-location", "cpu=cuda:0", cwd=room)
    assert done.exit == 0 and "no storage" not in done.err


def test_random_states_that_leave_the_cpu_are_told(tmp_path):
    states = {"cuda": [torch.zeros(16, dtype=torch.uint8)], "rng_state": torch.get_rng_state()}
    with pytest.raises(TypeError, match="ByteTensor"):
        torch.set_rng_state(states["rng_state"].to("meta"))
    torch.save({"model": {"a.w": torch.ones(16, dtype=torch.uint8)}, **states}, tmp_path / "a.pt")
    told = "note    cuda.0, rng_state: torch takes states of random generators from the CPU alone"
    for words in (["--device", "cuda:1"], ["--map-location", "cpu=mps"]):
        assert told in run("convert", "a.pt", "b.pt", "--force", *words, cwd=tmp_path).err
    for words in ([], ["--device", "cuda:1", "--only", "model"]):
        done = run("convert", "a.pt", "b.pt", "--force", *words, cwd=tmp_path)
        assert done.exit == 0 and "random" not in done.err


def test_layers_of_one_size_are_one_line(tmp_path):
    layers = [torch.nn.Linear(4, 4) for _ in range(50)]
    layers[20] = torch.nn.Linear(4, 5)
    torch.save(torch.nn.Sequential(*layers).state_dict(), tmp_path / "a.pt")
    shown = run("inspect", "a.pt", "--depth", "1", cwd=tmp_path).out
    tree = [" ".join(line.split()[1:]) for line in shown.splitlines() if "─" in line]
    assert tree == [
        "0 … 19 1.6 kB 20 of 80 B, each 2 tensors", "20 100 B 2 tensors",
        "21 … 49 2.3 kB 29 of 80 B, each 2 tensors",
    ]  # fmt: skip
    below = run("inspect", "a.pt", cwd=tmp_path).out
    assert below.count("weight") == below.count("bias") == 3
    unlike = {"layers.0.a": torch.zeros(2, 8), "layers.1.b": torch.zeros(4, 4)}
    torch.save(unlike, tmp_path / "a.pt")
    shown = run("inspect", "a.pt", cwd=tmp_path).out
    assert "2 of 64 B, each 1 tensor" in shown and "alike" not in shown


def test_the_parts_of_a_state_dict_are_its_keys(tmp_path):
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "a.pt")
    assert said(tmp_path, "convert", "a.pt", "b.pt", "--only", "model", code=1).endswith(
        "there is nothing at 'model'; it holds: weight, bias"
    )


def test_an_example_is_offered_only_for_what_looks_like_a_file(room):
    assert "e.g." not in said(room, "convert", "folder", code=2)
    assert "e.g. ckptconv convert 'a b.safetensors' 'a b.pt'" in said(
        room, "convert", "a b.safetensors", code=2
    )


# ------------------------------------------------------------------------- places on other machines


NOBODY = "http://127.0.0.1:9"
"""An address of this host at which nobody listens."""
UNREACHED = {
    "AWS_ACCESS_KEY_ID": "k",
    "AWS_SECRET_ACCESS_KEY": "very-secret",
    "AWS_ENDPOINT_URL": NOBODY,
    "HF_ENDPOINT": NOBODY,
}
QUICK = ("--limit", "remote_seconds=0.1")


@pytest.mark.parametrize(
    "address", [f"{NOBODY}/models/a.pt", "s3://bucket/a.pt", "hf://owner/name/model.safetensors"]
)
def test_a_place_that_is_not_reached_is_told_in_one_line(address, room):
    for code, arguments in (
        (1, ("inspect", address)),
        (1, ("convert", address, "out.pt")),
        (1, ("convert", "a.pt", "out.pt", "--like", address)),
        (2, ("diff", "a.pt", address)),
        (2, ("scan", address)),
        (2, ("doctor", address)),
    ):
        done = run(*arguments, *QUICK, cwd=room, env=UNREACHED)
        assert done.exit == code and done.err.count("error: ") == 1
        line = next(line for line in done.err.splitlines() if line.startswith("error: "))
        assert line.startswith(f"error: {address}: ") and "very-secret" not in done.err + done.out
    document = run("inspect", address, "--json", *QUICK, cwd=room, env=UNREACHED).json()
    assert document["error"]["path"] == address
    assert document["error"]["kind"] == "RemoteFailure"
    assert document["network"]["requests"] >= 1
    assert sorted(item.name for item in room.iterdir()) == ["a.pt"]


def test_an_address_of_this_machine_is_told_to_be_a_path(room):
    error = said(room, "inspect", "file:///tmp/a.pt", code=1)
    assert "file:///tmp/a.pt: is an address of this machine; leave out file://" in error


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("s3://", "s3://: names no bucket; write it as s3://BUCKET/KEY"),
        ("gs://", "gs://: names no bucket; write it as gs://BUCKET/KEY"),
        ("https://", "https://: names no host; write it as https://HOST/PATH"),
        ("hf://", "hf://: names no repository; write it as hf://OWNER/NAME[@REVISION][/PATH]"),
        ("foo://x", "foo://x: is an address of a kind that is not known (foo://)"),
    ],
)
def test_an_address_that_names_nothing_is_told_as_an_address(address, told):
    with pytest.raises(CheckpointError, match=f"^{re.escape(told)}"):
        open_checkpoint(address)


@pytest.mark.parametrize("address", ["https://host/a.pt", "s3://bucket/a.pt", "hf://owner/name"])
def test_without_the_extra_one_line_says_what_to_install(address, room):
    blocked = "import sys\nfor name in ('obstore', 'urllib3', 'botocore'): sys.modules[name] = None"
    done = run("inspect", address, cwd=room, before=blocked)
    line = assert_one_error(done)
    assert line.endswith(f"needs obstore, botocore and urllib3; {EXTRA}")


@pytest.mark.property
@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("s3://KEY:very-secret@bucket/x.pt", "s3://***@bucket/x.pt"),
        ("s3://KEY:very-se/cret@bucket/x.pt", "s3://***@bucket/x.pt"),
        ("s3:/KEY:very-secret@bucket/x.pt", "s3://***@bucket/x.pt"),
        ("gs://very-secret@bucket/x.pt", "gs://***@bucket/x.pt"),
        ("hf://user:very-secret@x/y", "hf://***@x/y"),
        ("abfss://KEY:very-secret@one.dfs.core.windows.net/x.pt",
            "abfss://***@one.dfs.core.windows.net/x.pt"),
    ],
)  # fmt: skip
def test_a_key_in_an_address_is_refused_before_it_is_sent_and_never_shown(address, told, room):
    """Nobody answers here: who asked would be told so."""
    (room / "jobs.jsonl").write_text(json.dumps({"source": address, "output": "b.pt"}))
    commands = (
        ("inspect", address), ("scan", address), ("doctor", address), ("diff", "a.pt", address),
        ("convert", address, "b.pt"), ("convert", "a.pt", address), ("stats", address),
        ("convert", "a.pt", "b.pt", "--like", address), ("cleanup", address),
        ("convert", "a.pt", "b.pt", "--save-mapping", address), ("merge", "a.pt", address, "b.pt"),
        ("batch", address, "--out-dir", "o", "--to", "torch"), ("batch", "jobs.jsonl"),
        ("batch", "a.pt", "--out-dir", address, "--to", "torch"),
        ("report", address, "-o", "r.html"),
    )  # fmt: skip
    # each command with two of the addresses, and all with all in `make trust`
    for words in commands if ALL else commands[len(address) % 3 :: 3]:
        done = run(*words, cwd=room, env=UNREACHED)
        assert f"{told}: holds a name or a key" in done.err, words
        assert "cret" not in done.err + done.out, words
        document = run(*words, *["--json"] * (words[0] != "cleanup"), cwd=room, env=UNREACHED)
        assert "cret" not in document.out + document.err, words
    with pytest.raises(CheckpointError, match="holds a name or a key") as raised:
        open_checkpoint(address)
    assert raised.value.path == told


MISSING = {
    1: ["inspect none.pt", "convert none.pt b.pt", "convert a.pt b.pt --like none.pt",
        "convert a.pt b.pt --rules none.json", "convert a.pt b.safetensors --metadata-from none",
        "merge a.pt none.pt b.pt", "average a.pt none.pt b.pt", "stats none.pt", "show none.pt a",
        "report none.pt -o b.html", "edit none.safetensors --rename a=b"],
    2: ["doctor none.pt", "diff a.pt none.pt", "scan none.pt", "doctor a.pt --like none.pt",
        "batch none.pt --out-dir o --to torch", "batch none.jsonl"],
}  # fmt: skip


@pytest.mark.parametrize("code", MISSING)
def test_a_missing_file_is_no_answer_and_no_wrong_usage(code, room):
    for command in MISSING[code]:
        done = run(*command.split(), cwd=room)
        assert done.exit == code and "no such file" in done.err, command
        assert "--help" not in done.err, command


@pytest.mark.parametrize("option", [(), ("--save-mapping", "s3://bucket/map.json")])
def test_nothing_is_written_where_nobody_answers(option, room):
    output = "out.pt" if option else "s3://bucket/out.pt"
    done = run("convert", "a.pt", output, *option, *QUICK, cwd=room, env=UNREACHED)
    assert done.exit == 1 and "s3://bucket/" in done.err and "does not answer" in done.err
    assert sorted(item.name for item in room.iterdir()) == ["a.pt"]


def test_what_is_only_read_is_not_written(room):
    output = f"{NOBODY}/out.pt"
    done = run("convert", "a.pt", output, *QUICK, cwd=room, env=UNREACHED)
    assert f"{output}: can be read, but not written; write a file here" in assert_one_error(done)


@pytest.mark.parametrize("make", [str, Path])
def test_the_library_tells_addresses_from_paths_too(make, room, monkeypatch):
    monkeypatch.chdir(room)
    for name, value in UNREACHED.items():
        monkeypatch.setenv(name, value)
    address = make("s3://bucket/a.pt")
    calls = [
        lambda: open_checkpoint(address),
        lambda: load_portable(address),
        lambda: convert_checkpoint(address, "out.pt"),
        lambda: convert_checkpoint("a.pt", address),
        lambda: convert_checkpoint("a.pt", "out.pt", like=address),
        lambda: convert_checkpoint("a.pt", "out.pt", save_mapping=address),
        lambda: diff_checkpoints("a.pt", address),
        lambda: diagnose(address),
        lambda: scan(address),
        lambda: save({"w": W}, address),
    ]
    for call in calls:
        with (
            limits(remote_seconds=0.1),
            pytest.raises(CheckpointError, match=r"^s3://bucket/a\.pt: .*S3 does not answer"),
        ):
            call()


def test_a_file_that_is_called_like_an_address_is_read(room, monkeypatch):
    monkeypatch.chdir(room)
    Path("s3:/bucket").mkdir(parents=True)
    Path("a.pt").rename("s3:/bucket/a.pt")
    assert address_in("s3://bucket/a.pt") is None and address_in("C:/models/a.pt") is None
    with open_checkpoint("s3://bucket/a.pt") as checkpoint:
        assert len(dict(checkpoint.tensors())) == 3


def test_a_command_that_is_offered_is_quoted():
    assert how_to_get("https://h/a b$(id).pt") == "get it first: curl -LO 'https://h/a b$(id).pt'"


# --------------------------------------------------------------------------------- what is left out


@pytest.mark.parametrize("more", [("--dry-run",), ()])
@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
def test_what_globs_leave_out_is_counted_by_glob(output, more, room):
    done = run(
        "convert",
        "a.pt",
        output,
        "--include",
        "a.*",
        "--include",
        "c.*",
        "--exclude",
        "*.bias",
        *more,
        cwd=room,
    )
    assert done.exit == 1, "a glob that meets no key is an error still"
    done = run(
        "convert", "a.pt", output, "--include", "a.*", "--exclude", "*.bias", *more, cwd=room
    )
    lines = [line.strip() for line in done.lines]
    assert "left out  1 of 3 keys matched --exclude '*.bias': a.bias" in lines
    assert "left out  1 of 3 keys did not match --include 'a.*': b.weight" in lines


def test_of_many_keys_that_are_left_out_a_few_are_shown(tmp_path):
    torch.save({f"layer.{index}.weight": W for index in range(40)}, tmp_path / "in.pt")
    done = run("convert", "in.pt", "out.pt", "--exclude", "layer.1*", "-n", cwd=tmp_path)
    counted = (
        "left out  11 of 40 keys matched --exclude 'layer.1*': e.g. layer.1.weight, "
        "layer.10.weight, …"
    )
    assert counted in [line.strip() for line in done.lines]


def test_what_a_comparison_leaves_out_is_counted(room):
    done = run("diff", "a.pt", "a.pt", "--exclude", "*.bias", cwd=room)
    assert done.exit == 0
    assert "1 of 3 keys of A matched --exclude '*.bias', and so were not compared" in done.out
    assert "1 of 3 keys of B matched" in done.out


def test_add_module_leaves_what_is_beside_the_weights(tmp_path):
    tree = {
        "weight": W,
        "a.weight": W,
        "epoch": 3,
        "args": {"lr": 0.1},
        "_extra_state": {"x": 1},
        "step": torch.tensor(4),
    }
    torch.save(tree, tmp_path / "in.pt")
    assert run("add-module", "in.pt", "out.pt", cwd=tmp_path).exit == 0
    kept = [
        "module.weight",
        "module.a.weight",
        "epoch",
        "args",
        "module._extra_state",
        "module.step",
    ]
    assert list(torch.load(tmp_path / "out.pt")) == kept
    assert run("strip-module", "out.pt", "back.pt", cwd=tmp_path).exit == 0
    assert list(torch.load(tmp_path / "back.pt")) == list(tree)
    assert run("diff", "in.pt", "back.pt", "--whole", cwd=tmp_path).exit == 0


def test_shards_are_named_as_they_are(tmp_path):
    torch.save({f"w{index}": torch.zeros(100) for index in range(4)}, tmp_path / "in.pt")
    done = run("convert", "in.pt", "shards", "--max-shard-size", "900", cwd=tmp_path)
    assert f"→ shards{os.sep} (2 shards and their index, safetensors, " in done.lines[0]
    named = {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert {path.name for path in (tmp_path / "shards").iterdir()} == named
    assert set(re.findall(r"\S+\.(?:safetensors|json)\b(?:\.index\.json)?", done.err)) <= named
    done = run("convert", "in.pt", "all", "--max-shard-size", "9MB", cwd=tmp_path)
    assert f"→ all{os.sep}model.safetensors (safetensors, " in done.lines[0]
    assert (tmp_path / "all" / "model.safetensors").is_file()


def test_a_module_that_is_kept_is_named_without_the_way_it_is_pickled(tmp_path):
    torch.save(
        {"model": torch.nn.Sequential(torch.nn.Linear(2, 2)), "ns": Namespace(a=1)},
        tmp_path / "in.pt",
    )
    done = run("convert", "in.pt", "out.pt", "--unknown", "keep", "-n", cwd=tmp_path)
    assert "2 keys in the module model.0, none renamed" in done.err
    assert "<state>" not in done.err


# -------------------------------------------------------------------------------------- comparisons


def test_only_of_a_part_that_b_lacks_offers_only_b(tmp_path):
    torch.save({"netG": {"a.w": W, "b.w": W}, "netD": {"a.w": W}}, tmp_path / "gan.pt")
    torch.save({"a.w": W, "b.w": W}, tmp_path / "g.pt")
    for more in ((), ("--whole",)):
        assert "--only-b PATH names the part of B" in said(
            tmp_path, "diff", "gan.pt", "g.pt", "--only", "netG", *more, code=2
        )
        assert (
            run(
                "diff", "gan.pt", "g.pt", "--only", "netG", "--only-b", "", *more, cwd=tmp_path
            ).exit
            == 0
        )
    assert "--only-b" not in said(tmp_path, "diff", "g.pt", "gan.pt", "--only", "netG", code=2)


@pytest.mark.parametrize("arguments", [("--whole",), ()])
def test_numbers_and_texts_of_numbers_are_shown_apart(arguments, tmp_path):
    torch.save({"w": W, "l": {0: 1, "x": 2, True: 3}}, tmp_path / "a.pt")
    torch.save({"w": W, "l": {"0": 1, "x": 2, "True": 3}}, tmp_path / "b.pt")
    done = run("diff", "a.pt", "b.pt", *arguments, cwd=tmp_path)
    lines = {
        tuple(part.strip() for part in line.split("only in"))
        for line in done.out.splitlines()
        if "only in" in line
    }
    assert lines == {("l.0", "A"), ("l.True (bool)", "A"), ("l.'0'", "B"), ("l.'True'", "B")}


def test_one_note_tells_of_averaged_weights(tmp_path):
    tree = {
        "meta": {"mmengine_version": "0.10"},
        "state_dict": {"a.w": W},
        "ema_state_dict": {"module.a.w": W},
    }
    torch.save(tree, tmp_path / "in.pt")
    notes = convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors").plan.notes
    taken = (
        "state_dict is taken, where MMEngine has the averaged weights, not ema_state_dict "
        "(--only PATH takes another)"
    )
    assert notes == (taken,)


# ----------------------------------------------------------------------------- what stops an output


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EDQUOT, "the disk quota"),
        (errno.EROFS, "mounted read-only"),
        (errno.ENAMETOOLONG, "name is too long"),
        (errno.EACCES, "may not write there"),
        (errno.ELOOP, "lead in a circle"),
        (errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_each_error_of_the_system_has_its_own_words(number, words, room, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(outputs.FileSink, "write", fail)
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        convert_checkpoint(room / "a.pt", room / "out.pt")
    assert words in str(caught.value)
    assert number == errno.ENOSPC or "full" not in str(caught.value)
    assert [item.name for item in room.iterdir()] == ["a.pt"]


def test_a_link_to_nowhere_is_told_with_where_it_leads(room):
    (room / "out.pt").symlink_to(room / "gone" / "x.pt")
    (room / "folder").symlink_to("gone")
    for output in ("out.pt", "folder/x.pt", "folder/deeper/x.pt"):
        error = said(room, "convert", "a.pt", output, code=1)
        assert (
            "link" in error
            and "gone" in error
            and "does not exist" in error
            and "mkdir" not in error
        )
    assert "the link folder to gone" in said(
        room, "convert", "a.pt", "folder/x", "--to", "dcp", code=1
    )
    (room / "free.pt").symlink_to("here.pt")
    assert run("convert", "a.pt", "free.pt", cwd=room).exit == 0 and (room / "here.pt").is_file()
    assert "mkdir -p missing" in said(room, "convert", "a.pt", "missing/x.pt", code=1)


def test_links_in_a_circle_are_told(room):
    (room / "one.pt").symlink_to("two.pt")
    (room / "two.pt").symlink_to("one.pt")
    assert "lead in a circle" in said(room, "convert", "a.pt", "one.pt", code=1)


# ------------------------------------------------------------------------------------------ answers

ANSWERS = [
    ("diff", "a.pt", "a.pt"),
    ("diff", "a.pt", "b.pt"),
    ("inspect", "a.pt"),
    ("doctor", "a.pt"),
    ("scan", "a.pt"),
]


def piped(room: Path, arguments: tuple[str, ...], stdout: int) -> tuple[int, str]:
    code, _, err = run_bytes(*arguments, cwd=room, stdout=stdout)
    return code, err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("json", [(), ("--json",)])
@pytest.mark.parametrize("arguments", ANSWERS)
def test_an_answer_that_cannot_be_printed_is_not_the_answer(arguments, json, room):
    torch.save({"a.weight": W}, room / "b.pt")
    with Path("/dev/full").open("w") as full:
        assert piped(room, (*arguments, *json), full.fileno()) == (
            2,
            "error: cannot print the result: No space left on device\n",
        )


@pytest.mark.parametrize("arguments", [*ANSWERS, ("convert", "a.pt", "out.pt", "--json")])
def test_a_reader_that_has_left_is_no_answer_and_no_noise(arguments, room):
    torch.save({"a.weight": W}, room / "b.pt")
    reading, writing = os.pipe()
    os.close(reading)
    code, err = piped(room, arguments, writing)
    os.close(writing)
    assert (code, err) == (1 if arguments[0] == "convert" else 2, "")


def test_what_prints_nothing_answers_whoever_listens(room):
    torch.save({"a.weight": W}, room / "b.pt")
    reading, writing = os.pipe()
    os.close(reading)
    assert piped(room, ("diff", "a.pt", "b.pt", "--quiet"), writing) == (1, "")
    os.close(writing)


# ---------------------------------------------------------------------------------------- terminals


def on_terminal(room: Path, columns: int, *arguments: str, **variables: str) -> str:
    """What a terminal of so many columns is given."""
    return run_on_terminal(*arguments, cwd=room, columns=columns, env=variables)[1]


COMMANDS = [
    ("convert", str(TRAIN), "out.safetensors", "--verify", "--force"),
    ("convert", str(TRAIN), "out.pt", "-n", "--exclude", "*.bias"),
    ("diff", str(TRAIN), "a.pt"),
    ("convert", "file:///bucket/a/long/way/to/a.pt", "out.pt"),
]


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize(
    "arguments", COMMANDS, ids=lambda arguments: " ".join(map(str, arguments[0:1]))
)
def test_texts_are_broken_under_their_column(arguments, columns, room):
    shown = on_terminal(room, columns, *arguments)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain != shown, "colours"
    for line in plain.splitlines():
        assert len(line) <= columns or " " not in line.strip(), line
    assert (
        on_terminal(room, columns, *arguments[:2], *arguments[2:], NO_COLOR="1").count("\x1b") == 0
    )


def test_further_lines_stand_under_the_text_and_not_under_its_label(room):
    plain = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(room, 60, *COMMANDS[0]))
    lines = plain.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("  skipped"))
    column = lines[first].index("epoch")
    assert lines[first + 1][:column].strip() == "" and lines[first + 1][column] != " "
    error = on_terminal(room, 60, *COMMANDS[3], NO_COLOR="1").splitlines()
    assert error[0].startswith("error: file://") and all(
        line.startswith("       ") for line in error[1:]
    )


def test_nothing_is_broken_where_no_terminal_shows_it(room):
    done = run(*COMMANDS[0], cwd=room, env={"COLUMNS": "40"})
    assert (
        all(re.match(r"  \w+ +\S|\S", line) for line in done.lines)
        and max(map(len, done.lines)) > 80
    )


@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_of_commands_is_not_cut(columns, room):
    shown = on_terminal(room, columns, "--help")
    assert "..." not in shown.partition("Commands:")[2]
    rows = shown.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert all(re.match(r"  [a-z]", row) for row in rows), "one line each"


# ------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        *((text, "bfloat16") for text in ("bf16", "bfloat16", "torch.bfloat16", "BF16")),
        *((text, "float16") for text in ("f16", "fp16", "half", "float16", "torch.half")),
        *((text, "float32") for text in ("f32", "fp32", "float", "torch.float32")),
        *((text, "float64") for text in ("f64", "double", "float64")),
        ("f8_e4m3", "float8_e4m3fn"),
    ],
)
def test_dtypes_have_the_names_that_people_use(alias, name):
    assert floating_dtype(alias).name == name


def test_another_dtype_is_told_all_that_there_are(room):
    error = said(room, "convert", "a.pt", "b.pt", "--dtype", "int8", code=2)
    assert (
        "choose f32, f16, bf16, f64, f8_e4m3 or f8_e5m2; torch's names work too (float64, float32, "
        "float16, bfloat16" in error
    )


@pytest.mark.parametrize("command", [("convert", "-", "out.npz"), ("inspect", "-")])
def test_a_dash_is_standard_input_and_not_a_file_of_that_name(command, room):
    raw = (room / "a.pt").read_bytes()
    done = run(*command, cwd=room, stdin=raw)
    assert done.exit == 0 and "standard input" in done.out + done.err
    done = run("inspect", "-", cwd=room, stdin=b"")
    assert "standard input: is empty (0 bytes)" in done.err.splitlines()[-1]
    (room / "-").write_bytes(b"x" * 100)
    assert "standard input" not in run("inspect", "./-", cwd=room).err


def test_one_array_is_told_how_it_becomes_an_archive(tmp_path):
    np.save(tmp_path / "one.npy", np.ones(3))
    error = assert_one_error(run("inspect", "one.npy", cwd=tmp_path))
    assert "numpy.savez makes an archive of it" in error
    np.savez(tmp_path / "one.npz", a=np.load(tmp_path / "one.npy"))
    assert run("inspect", "one.npz", cwd=tmp_path).exit == 0


def test_a_key_that_stands_twice_is_not_said_to_be_of_two_types(tmp_path):
    torch.save({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "in.pt")
    with zipfile.ZipFile(tmp_path / "in.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "twice.pt", "w") as archive:
        for name, content in records.items():
            twice = content.replace(b"X\x01\0\0\0b", b"X\x01\0\0\0a")
            archive.writestr(name, twice if name.endswith("data.pkl") else content)
    assert len(torch.load(tmp_path / "twice.pt")) == 1
    error = assert_one_error(run("convert", "twice.pt", "out.pt", cwd=tmp_path))
    assert "two keys read as 'a'" in error and "types" not in error


def test_the_formats_and_libraries_that_are_named_are_all(tmp_path):
    for command in ("inspect", "doctor"):
        assert "numpy.load" in run(command, "--help", cwd=tmp_path).out
    for given in ((), ("--to", "dcp")):
        error = assert_one_error(
            run("convert", SAMPLES / "tied.pt", "-", *given, cwd=tmp_path), code=2
        )
        assert "add --to torch, --to safetensors or --to npz" in error
