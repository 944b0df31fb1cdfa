"""Whatever text a file carries, a terminal, a pipe and a JSON reader get it escaped, in one line,
and not without end.

A nasty text is put at every place where a container can carry one; every command shows every such
file.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckptconv
from ckptconv.support.errors import CheckpointError, printable
from helpers import old_torch, oracle
from helpers.paths import DATA, TESTS
from helpers.program import SAMPLES, environment

NASTY = (
    "\x1b[45m\x1b]0;owned\x07\x9b7m\x00\x08\x7f \u202egnp.exe\u2066 \u200b\ufeff\u2028\x85\n"
    "FORGED: all is well\r\nFORGED again [red]x[/red][link=http://a]b[/link] {0} %s \\ ' \" `id` "
    "$(id)"
)
SHORT = "\x1b[45m\nFORGED\u202e[red]"
HALF = NASTY + "\ud800"  # half a character, which no UTF-8 holds
LONG = "k" * 1_000_000
W = torch.arange(4.0)
SHOWN_BY_CLICK = re.compile(r"\x1b\[(?:0|1|31|32|33|36)m")

MAKERS: dict[str, Callable[[Path], Path]] = {}
"""Names of files, each with what writes it into a folder."""


def maker(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    MAKERS[make.__name__] = make
    return make


def saved(folder: Path, name: str, tree: Any, **options: Any) -> Path:
    torch.save(tree, folder / name, **options)
    return folder / name


def tree_of(text: str) -> dict[str, Any]:
    """A training checkpoint with `text` in all its keys and values."""
    made = OrderedDict(
        {f"module.{text}.weight": W, f"module.{text}.bias": W, f"module.{text}\t": W + 1}
    )
    made._metadata = OrderedDict({"": {"version": 1}, text: {"version": text}})
    return {
        "state_dict": made,
        text: {text: [text, {text: W}]},
        "optimizer": {"state": {text: W}, "param_groups": [text]},
    }


@maker
def torch_zip(folder: Path) -> Path:
    return saved(folder, "zip.pt", tree_of(NASTY))


@maker
def half_characters(folder: Path) -> Path:
    return saved(folder, "half.pt", tree_of(HALF))


@maker
def long_texts(folder: Path) -> Path:
    return saved(folder, "long.pt", {**tree_of("x"), LONG: {LONG: W}, "model": {LONG: W}})


@maker
def flat_long_keys(folder: Path) -> Path:
    return saved(folder, "flat_long.pt", {f"{LONG}.{index}\x1b": W + index for index in range(3)})


@maker
def flat(folder: Path) -> Path:
    return saved(folder, "flat.pt", {f"{NASTY}.w": W, NASTY: W + 1})


@maker
def torch_legacy(folder: Path) -> Path:
    return saved(folder, "legacy.pt", tree_of(NASTY), _use_new_zipfile_serialization=False)


@maker
def location_tags(folder: Path) -> Path:
    with oracle.tagged(lambda _: NASTY):
        return saved(folder, "tags.pt", {"w": W})


@maker
def many_tags(folder: Path) -> Path:
    tags = iter(f"{SHORT}:{index}" for index in range(3000))
    with oracle.tagged(lambda _: next(tags)):
        return saved(folder, "many_tags.pt", {f"w{index}": torch.zeros(1) for index in range(3000)})


@maker
def lightning(folder: Path) -> Path:
    tree = {
        "state_dict": {f"{SHORT}.{name}": W for name in "ab"},
        "pytorch-lightning_version": NASTY,
    }
    return saved(folder, "lightning.ckpt", tree)


@maker
def several_state_dicts(folder: Path) -> Path:
    return saved(
        folder, "several.pt", {f"{SHORT}{name}$(id)": {"a.w": W, "b.w": W} for name in "ab"}
    )


class Named:
    """An object that pickles as a call of whatever name."""

    def __init__(self, module: str, name: str, *args: Any) -> None:
        self.module, self.name, self.args = module, name, args


def named_pickle(tree: Any, protocol: int = 4) -> bytes:
    def save_named(pickler: pickle._Pickler, thing: Named) -> None:
        pickler.save(thing.module)
        pickler.save(thing.name)
        pickler.write(pickle.STACK_GLOBAL)
        pickler.save(thing.args)
        pickler.write(pickle.REDUCE)

    out = io.BytesIO()
    writer = pickle._Pickler(out, protocol)
    writer.dispatch = {**pickle._Pickler.dispatch, Named: save_named}
    writer.dump(tree)
    return out.getvalue()


@maker
def class_names(folder: Path) -> Path:
    """A torch file whose pickle makes objects of classes with such names."""
    saved(folder, "plain.pt", {"w": W})
    tree = {
        "w": Named(SHORT, NASTY, SHORT),
        NASTY: Named(NASTY, LONG),
        "x": Named("os", f"system{SHORT}", NASTY),
    }
    return with_record(folder, "classes.pt", "data.pkl", named_pickle(tree))


def with_record(folder: Path, name: str, record: str, content: bytes) -> Path:
    """The file plain.pt with other content in one record."""
    payload = lambda path, data: content if path.endswith(f"/{record}") else data  # noqa: E731
    return oracle.rezipped(folder / "plain.pt", folder / name, payload=payload)


@maker
def bare_pickle(folder: Path) -> Path:
    (folder / "bare.pkl").write_bytes(named_pickle({NASTY: Named(NASTY, NASTY, NASTY), HALF: HALF}))
    return folder / "bare.pkl"


@maker
def bare_pickle_of_tensors(folder: Path) -> Path:
    (folder / "tensors.pkl").write_bytes(pickle.dumps({NASTY: W, "state": {HALF: W + 1}}))
    return folder / "tensors.pkl"


@maker
def storage_keys(folder: Path) -> Path:
    tree = {"w": old_torch.storage("FloatStorage", NASTY, SHORT, 4)}
    return old_torch.write(
        folder / "storage_keys.pt",
        old_torch.legacy(tree, ("another",), old_torch.blob(4, bytes(16))),
    )


@maker
def root_folder(folder: Path) -> Path:
    saved(folder, "plain.pt", {"w": W})
    return oracle.rezipped(
        folder / "plain.pt",
        folder / "root.pt",
        name=lambda name: name.replace("plain/", f"{SHORT}/"),
    )


@maker
def other_records(folder: Path) -> Path:
    """An archive with a record that belongs to nothing, under a name of printable markup and of the
    greatest length.
    """
    shutil.copy(saved(folder, "plain.pt", {"w": W}), folder / "records.pt")
    with zipfile.ZipFile(folder / "records.pt", "a") as archive:
        archive.writestr(f"plain/[red]$(id){'x' * 60_000}", b"what")
    return folder / "records.pt"


@maker
def record_contents(folder: Path) -> Path:
    saved(folder, "plain.pt", {"w": W})
    return with_record(folder, "version.pt", "version", SHORT.encode())


@maker
def zip_members(folder: Path) -> Path:
    saved(folder, "plain.pt", {NASTY: W})
    with zipfile.ZipFile(folder / "members.zip", "w") as archive:
        archive.write(folder / "plain.pt", "[red]policy.pth")
        archive.writestr("[link=http://a]$(id)", b"nothing")
    return folder / "members.zip"


@maker
def tar_members(folder: Path) -> Path:
    return old_torch.write(
        folder / "members.tar", old_torch.tar([(NASTY.replace("\x00", ""), b"x"), (SHORT, b"y")])
    )


@maker
def tar_tags(folder: Path) -> Path:
    storages = old_torch.tar_storages([(1, NASTY, "FloatStorage", bytes(16), 4)])
    tensors = old_torch.tar_tensors([(2, 1, "FloatTensor", (4,), (1,), 0)])
    return old_torch.write(
        folder / "tags.tar",
        old_torch.tar_checkpoint(storages, tensors, {NASTY: old_torch.Persistent(2)}),
    )


def safetensors_of(path: Path, header: dict[str, Any]) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    return path


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@maker
def safetensors_texts(folder: Path) -> Path:
    metadata = {"format": "pt", NASTY: NASTY, "device": "cpu", "long": LONG}
    return safetensors_of(folder / "texts.safetensors", {"__metadata__": metadata, NASTY: ENTRY})


@maker
def safetensors_half(folder: Path) -> Path:
    return safetensors_of(folder / "half.safetensors", {HALF: ENTRY})


@maker
def safetensors_dtype(folder: Path) -> Path:
    return safetensors_of(folder / "dtype.safetensors", {NASTY: {**ENTRY, "dtype": NASTY}})


@maker
def safetensors_device(folder: Path) -> Path:
    return safetensors_of(
        folder / "device.safetensors", {"__metadata__": {"device": NASTY}, "w": ENTRY}
    )


@maker
def safetensors_twice(folder: Path) -> Path:
    name = json.dumps(NASTY).encode()
    raw = b"{" + name + b":" + json.dumps(ENTRY).encode() + b"," + name + b":{}}"
    (folder / "twice.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    return folder / "twice.safetensors"


def index_of(folder: Path, name: str, weight_map: dict[str, Any]) -> Path:
    (folder / name).mkdir()
    safetensors_of(folder / name / "a.safetensors", {NASTY: ENTRY})
    index = folder / name / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {NASTY: NASTY}, "weight_map": weight_map}))
    return index


@maker
def index_keys(folder: Path) -> Path:
    return index_of(folder, "index_keys", {NASTY: "a.safetensors"})


@maker
def index_lacks_a_key(folder: Path) -> Path:
    return index_of(folder, "index_lacks", {f"{NASTY}x": "a.safetensors", HALF: "a.safetensors"})


@maker
def index_names_a_shard(folder: Path) -> Path:
    return index_of(folder, "index_names", {"w": NASTY})


@maker
def index_names_no_shard(folder: Path) -> Path:
    return index_of(folder, "index_other", {"w": {NASTY: HALF}})


@maker
def index_leads_out(folder: Path) -> Path:
    return index_of(folder, "index_out", {NASTY: "../../etc/[red]passwd"})


@maker
def dcp_keys(folder: Path) -> Path:
    dcp.save(
        {NASTY: W, "n": {SHORT: W + 1}, "o": NASTY}, checkpoint_id=folder / "dcp", no_dist=True
    )
    return folder / "dcp"


@maker
def dcp_file_names(folder: Path) -> Path:
    dcp.save({NASTY: W}, checkpoint_id=folder / "dcp_names", no_dist=True)
    rename_item(folder / "dcp_names", NASTY.encode())
    return folder / "dcp_names"


def rename_item(folder: Path, name: bytes) -> None:
    """Give the one item of a DCP folder another file name, in the one frame of its metadata."""
    metadata = folder / ".metadata"
    raw, given, new = (
        metadata.read_bytes(),
        b"\x8c\x0c__0_0.distcp",
        b"X" + len(name).to_bytes(4, "little") + name,
    )
    assert raw.count(given) == 1 and raw.count(b"\x95") == 1 and raw[2] == 0x95
    framed = (int.from_bytes(raw[3:11], "little") + len(new) - len(given)).to_bytes(8, "little")
    metadata.write_bytes((raw[:3] + framed + raw[11:]).replace(given, new))


@maker
def deepspeed_tag(folder: Path) -> Path:
    shutil.copytree(DATA / "deepspeed" / "stage2", folder / "ds")
    (folder / "ds" / "latest").write_text(NASTY)
    return folder / "ds"


@maker
def torchscript(folder: Path) -> Path:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), folder / "script0.pt")
    swap = lambda _, data: data.replace(b"__torch__.torch.nn", b"__torch__.\x1b[45m\nFO")  # noqa: E731
    return oracle.rezipped(folder / "script0.pt", folder / "script.pt", payload=swap)


@maker
def text_file(folder: Path) -> Path:
    (folder / "page.html").write_text(f"<html>{NASTY}</html>")
    return folder / "page.html"


@maker
def file_name(folder: Path) -> Path:
    name = f"{SHORT}\x9b\udcff.pt"  # of bytes that are not UTF-8
    return Path(shutil.copy(SAMPLES / "ddp_cuda3_train.pt", folder / name))


@maker
def folder_of_names(folder: Path) -> Path:
    inner = folder / f"{SHORT}folder"
    inner.mkdir()
    for name in (f"{SHORT}a.pt", "b\udcff.pt"):
        shutil.copy(SAMPLES / "tied.pt", inner / name)
    (inner / f"{SHORT}c.pkl").write_bytes(named_pickle([Named("os", "system", NASTY)]))
    return inner


@maker
def key_rules(folder: Path) -> Path:
    (folder / "rules.json").write_text(json.dumps({"rules": [{NASTY: NASTY}]}))
    (folder / "keys.txt").write_text("[red]a\n\u202eb\n" + LONG)
    return Path(shutil.copy(SAMPLES / "ddp_cuda3.pt", folder / "rules_in.pt"))


def commands(path: Path, out: Path) -> list[list[str]]:
    """What is shown of a file: by every command, as text; `{json}` where it can be a document."""
    name = str(path)
    shown = [
        ["convert", name, f"{out}.safetensors", "--dry-run"],
        [
            "convert",
            name,
            f"{out}.safetensors",
            "--force",
            "--verify",
            "--save-mapping",
            f"{out}.json",
        ],
        ["convert", name, f"{out}.pt", "--force", "--unknown", "drop", "--device", "keep"],
        ["add-module", name, f"{out}.pt", "--dry-run"],
        ["inspect", name, "--depth", "4"],
        ["doctor", name, "--values"],
        ["diff", name, str(SAMPLES / "ddp_cuda3_train.pt"), "--whole"],
        ["diff", str(SAMPLES / "tied.pt"), name],
        ["scan", name],
    ]
    if path.name == "rules_in.pt":
        rules, keys = (str(path.with_name(other)) for other in ("rules.json", "keys.txt"))
        shown += [
            ["convert", name, f"{out}.pt", "--dry-run", "--rules", rules],
            ["convert", name, f"{out}.pt", "--dry-run", "--like", keys],
            ["convert", name, f"{out}.pt", "--dry-run", "--only", NASTY.replace("\0", "")],
            ["convert", name, f"{out}.pt", "--dry-run", "--strip-prefix", NASTY.replace("\0", "")],
            ["convert", name, f"{out}.pt", "--dry-run", "--regex", f"({SHORT}=>{SHORT}"],
            ["convert", name, f"{out}.pt", "--dry-run", "--device", SHORT],
            ["convert", name, f"{out}.pt", "--dtype", SHORT],
            ["inspect", f"{name}{SHORT}"],
            ["inspect", f"--{SHORT}"],
            [f"{SHORT}"],
        ]
    return shown


Shown = dict[str, list[dict[str, Any]]]
"""For each file what commands have shown, as `shown.py` tells it."""


def shown(folder: Path, files: slice, *, all_ways: bool) -> Shown:
    """Every command on some of the files: on a terminal, into pipes and as JSON, or by turns in one
    of these ways.
    """
    asked: list[dict[str, Any]] = []
    makers = dict(list(MAKERS.items())[files])
    for turn, (name, make) in enumerate(makers.items()):
        for arguments in commands(make(folder), folder / f"out_{name}"):
            turn += 1
            ways = ("terminal", "pipe") if all_ways else ("terminal" if turn % 2 else "pipe",)
            asked += [{"of": name, "on": on, "arguments": arguments} for on in ways]
            has_document = (
                arguments[0] != "add-module"
                and not arguments[-1].startswith("--\x1b")
                and len(arguments) > 1
            )
            if has_document and (all_ways or turn % 3 == 0):
                asked.append({"of": name, "on": "pipe", "arguments": [*arguments, "--json"]})
    (folder / "commands.json").write_text(json.dumps(asked))
    driver = [sys.executable, str(TESTS / "helpers" / "shown.py"), "commands.json", "shown.json"]
    subprocess.run(
        driver, cwd=folder, env=environment(COLUMNS="200", TERM="dumb"), check=True, timeout=900
    )
    found: Shown = {name: [] for name in makers}
    for item in json.loads((folder / "shown.json").read_text()):
        found[item["of"]].append(item)
    return found


def refuse_raw(item: dict[str, Any], text: str) -> None:
    """Fail when a text holds anything that a terminal takes for a command, or a line that a file
    has forged.
    """
    assert "Traceback" not in text, (item["arguments"], text)
    for line in text.split("\n"):
        assert line.isprintable(), (item["arguments"], line[:3000])
        assert not line.startswith("FORGED"), (item["arguments"], line[:3000])
    assert len(text) < 100_000, (item["arguments"], len(text))


def refuse_text(item: dict[str, Any]) -> None:
    """Fail unless what a command has shown is plain text."""
    assert item["code"] in (0, 1, 2), item
    out, err = (item[stream].encode("latin-1").decode("utf-8") for stream in ("out", "err"))
    if item["on"] == "terminal":
        out = SHOWN_BY_CLICK.sub("", out.replace("\r\n", "\n"))
    refuse_raw(item, out)
    refuse_raw(item, err)


def refuse_document(item: dict[str, Any]) -> None:
    """Fail unless what a command has shown is one JSON document in ASCII."""
    assert item["out"].isascii() and item["out"].strip() and "\x1b" not in item["out"], item
    assert isinstance(json.loads(item["out"], parse_constant=pytest.fail), dict)
    refuse_raw(item, item["err"].encode("latin-1").decode("utf-8"))


READ = """
    torch_zip half_characters long_texts flat_long_keys flat torch_legacy location_tags many_tags
    lightning several_state_dicts class_names bare_pickle_of_tensors other_records zip_members
    tar_tags safetensors_texts safetensors_device index_keys dcp_keys file_name key_rules
"""
"""Files that are read; the others are refused, and what is said of them is an error."""


def refuse_shown(found: Shown, figure: Callable[..., None]) -> None:
    for name, items in found.items():
        for item in items:
            (refuse_document if "--json" in item["arguments"] else refuse_text)(item)
            figure("commands that showed nasty texts")
        inspected = next(item["code"] for item in items if item["arguments"][0] == "inspect")
        assert inspected == (0 if name in READ.split() else 1), name


def test_no_text_of_a_file_reaches_a_terminal_or_a_reader_of_json_raw(tmp_path, figure):
    found = shown(tmp_path, slice(0, None, 9), all_ways=False)
    for items in found.values():
        assert {item["on"] for item in items} == {"terminal", "pipe"}
        assert any("--json" in item["arguments"] for item in items)
    refuse_shown(found, figure)


@pytest.mark.trust
@pytest.mark.parametrize("quarter", range(4))
def test_no_text_of_any_file_reaches_anything_raw_in_any_way(quarter, tmp_path, figure):
    refuse_shown(shown(tmp_path, slice(quarter, None, 4), all_ways=True), figure)


@pytest.mark.parametrize(
    "text", [NASTY, HALF, LONG, SHORT * 1000, "\u0600\u00ad\U000e0041\u180e\ufff9"]
)
def test_what_is_printable_is_one_short_line_of_printable_characters(text):
    shown = printable(text)
    assert shown.isprintable() and shown.encode() and len(shown) < 2500
    error = CheckpointError(text, path=text, where=text, hint=text)
    assert str(error).isprintable() and len(str(error)) < 50_000
    assert repr(error).isprintable()


# ---------------------------------------------------------------------------------- names and links


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "{absolute}",
        "link.safetensors",
        "out/a",
    ],
)
def test_no_name_of_an_index_leads_outside_of_its_folder(name, tmp_path):
    outside = safetensors_of(tmp_path / "outside.safetensors", {"w": ENTRY})
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "out").symlink_to(tmp_path)
    safetensors_of(tmp_path / "a", {"w": ENTRY})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name.format(absolute=outside)}}))
    with pytest.raises(CheckpointError, match=r"not a plain file name|leads out of the folder"):
        ckptconv.open_checkpoint(index)


@pytest.mark.parametrize("name", ["../../x.distcp", "/tmp/x.distcp", "linked.distcp"])
def test_no_name_in_the_metadata_of_a_dcp_folder_leads_outside(name, tmp_path):
    folder = tmp_path / "dcp"
    dcp.save({"w": W}, checkpoint_id=folder, no_dist=True)
    (folder / "linked.distcp").symlink_to(
        shutil.move(folder / "__0_0.distcp", tmp_path / "x.distcp")
    )
    rename_item(folder, name.encode())
    with pytest.raises(CheckpointError, match=r"not a plain relative path|link out of the folder"):
        ckptconv.open_checkpoint(folder)


def accelerate_folder(folder: Path) -> str:
    ckptconv.save_portable({"w": W}, folder / "model.safetensors")
    saved(folder, "random_states_0.pkl", {"seed": W})
    saved(folder, "optimizer.bin", {"state": {0: W}, "param_groups": []})
    return "optimizer.bin"


def rank_files(folder: Path) -> str:
    metadata = {"DCP_VERSION": "1", "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0]}})}
    safetensors_of(
        folder / "shard-00001-model-00001-of-00001.safetensors",
        {"__metadata__": metadata, "w": ENTRY},
    )
    return "shard-00001-model-00001-of-00001.safetensors"


@pytest.mark.parametrize("make", [accelerate_folder, rank_files])
def test_no_file_of_a_folder_is_a_link_that_leads_outside(make, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    name = make(folder)
    with ckptconv.open_checkpoint(folder) as checkpoint:
        assert any(torch.Size(ref.shape) == W.shape for _, ref in checkpoint.tensors())
    inner = folder / "moved"
    inner.mkdir()
    shutil.move(folder / name, inner / name)
    (folder / name).symlink_to(inner / name)
    ckptconv.open_checkpoint(folder).close()  # a link within the folder is followed
    shutil.move(inner / name, tmp_path / name)
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match="is a link that leads out of the folder"):
        ckptconv.open_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["../x/data.pkl", "/x/data.pkl", "x\\data.pkl", f"{SHORT}/data.pkl"]
)
def test_no_record_of_an_archive_has_a_name_that_leads_out(name, tmp_path):
    saved(tmp_path, "in.pt", {"w": W})
    bad = oracle.rezipped(
        tmp_path / "in.pt",
        tmp_path / "bad.pt",
        name=lambda old: name if old.endswith("data.pkl") else old,
    )
    with pytest.raises(
        CheckpointError, match=r"not a plain relative path|control character in its name"
    ):
        ckptconv.open_checkpoint(bad)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["bad.pt", "in.pt"]


@pytest.mark.parametrize("to", ["out.pt", "out.safetensors", "shards", "dcp"])
def test_keys_never_become_names_of_files(to, tmp_path):
    saved(tmp_path, "in.pt", {"../../escaped": W, "/tmp/escaped": W + 1, "a/b": W + 2})
    more = {"shards": {"max_shard_size": 16}, "dcp": {"to": "dcp"}}.get(to, {})
    ckptconv.convert_checkpoint(tmp_path / "in.pt", tmp_path / to, **more)
    names = [item.name for item in tmp_path.rglob("*")]
    assert not any("escaped" in name for name in names) and "b" not in names
    assert not Path("/tmp/escaped").exists() and not (tmp_path.parent.parent / "escaped").exists()
