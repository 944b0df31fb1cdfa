"""The files beside a model that come along; their bytes are held against hashlib."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv import (
    CheckpointError,
    LimitExceeded,
    MalformedCheckpoint,
    OptionRefused,
    Options,
    OutputRefused,
    VerificationFailed,
    convert_checkpoint,
    open_checkpoint,
)
from ckptconv.convert import companions as beside
from ckptconv.convert.execute import execute_plan
from ckptconv.convert.planner import plan_conversion
from ckptconv.io import staging
from helpers import oracle
from helpers.crash_scenes import contents, hidden
from helpers.program import run

QUICKLY: dict[str, Any] = {"fsync": False, "with_files": True}
TAKEN = {
    "config.json": b'{"torch_dtype": "float32"}\n',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{" * 3_000_000,  # not JSON, and larger than the buffers
    "tokenizer.model": bytes(range(256)),
    "qwen.tiktoken": b"AA== 0\n",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/rag.jinja": b"{{ documents }}",
    "LICENSE": b"Apache\n",
    "README.md": b"",
}
LEFT = {
    "modeling_custom.py": "code",
    "LICENSE.py": "code",
    "convert.sh": "code",
    "optimizer.pt": "weights, or the state of a training",
    "tf_model.h5": "weights, or the state of a training",
    "pytorch_model.bin.index.json": "a shard index",
    "notes.txt": "not a name of a model's companion files",
    "config.json.bak": "not a name of a model's companion files",
    "additional_chat_templates/evil.py": "code",
    "additional_chat_templates/README.md": "not a name of a model's companion files",
}


def digests(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()}


def weights() -> dict[str, torch.Tensor]:
    return {f"layer{at}.weight": torch.arange(200.0) + at for at in range(3)}


@pytest.fixture
def room(tmp_path) -> Path:
    """A folder of a model with all kinds of files beside it."""
    model = tmp_path / "hf"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "onnx").mkdir()
    torch.save(weights(), model / "pytorch_model.bin")
    for name, raw in (TAKEN | dict.fromkeys(LEFT, b"?")).items():
        (model / name).write_bytes(raw)
    return tmp_path


def weights_in(folder: Path) -> dict[str, str]:
    """The hashes of the files in a folder that are not the companions of a model."""
    return {name: digest for name, digest in contents(folder).items() if name not in TAKEN}


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 900}, {"to": "torch"}, {"to": "dcp"}])
def test_the_files_come_along_byte_for_byte(room, options):
    if options.get("to") != "dcp":  # an empty folder may be there
        (room / "out").mkdir()
    result = convert_checkpoint(room / "hf", room / "out", verify=True, **QUICKLY, **options)
    found = contents(room / "out")
    assert {name: found.get(name) for name in TAKEN} == digests(TAKEN)
    assert not set(LEFT) & set(found) and not hidden(room)
    with open_checkpoint(room / "out") as checkpoint:
        assert len(list(checkpoint.tensors())) == 3
    sizes = sum(path.stat().st_size for path in (room / "out").rglob("*") if path.is_file())
    assert result.nbytes == sizes
    left = {item.name: item.reason for item in result.plan.beside.left}
    assert left == LEFT | {"onnx": "a folder"}


def test_the_folder_has_one_file_of_weights_where_no_size_is_given(room):
    done = run("convert", "hf", "out", "--with-files", "--verify", cwd=room)
    assert done.exit == 0, done.err
    assert [*weights_in(room / "out")] == ["model.safetensors"]
    assert load_file(room / "out" / "model.safetensors").keys() == weights().keys()
    assert "not copied  LICENSE.py, additional_chat_templates/evil.py, convert.sh, " in done.err
    assert "modeling_custom.py: code" in done.err
    assert "3 tensors and 9 files read back, equal to the source" in done.err


def test_beside_a_file_the_folder_of_the_file_is_meant(room):
    convert_checkpoint(room / "hf" / "pytorch_model.bin", room / "out", **QUICKLY)
    assert {**contents(room / "out")}.items() >= digests(TAKEN).items()


@pytest.mark.parametrize("source", ["hf", "hf/pytorch_model.bin"])
def test_the_checkpoint_itself_is_not_among_what_is_not_copied(room, source):
    done = run("convert", source, "out", "--with-files", "-n", "--json", cwd=room)
    told = {item["path"] for item in json.loads(done.out)["files_not_copied"]}
    assert told == {*LEFT, "onnx"}


def test_nor_are_the_files_of_a_checkpoint_of_many(room):
    convert_checkpoint(room / "hf", room / "dcp", to="dcp", **QUICKLY)
    done = run("convert", "dcp", "out", "--with-files", "--json", cwd=room)
    found = json.loads(done.out)
    assert {item["path"] for item in found["files"]} == {str(Path("out", name)) for name in TAKEN}
    assert {item["path"] for item in found["files_not_copied"]} <= {".metadata"}


def test_of_several_checkpoints_the_first_has_the_files(room):
    shutil.copytree(room / "hf", room / "other")
    (room / "other" / "config.json").write_text("other")
    ckptconv.average([room / "hf", room / "other"], room / "out", **QUICKLY)
    assert (room / "out" / "config.json").read_bytes() == TAKEN["config.json"]


# ------------------------------------------------------------------------------------- what is told


def test_a_dry_run_lists_them_and_writes_nothing(room):
    done = run("convert", "hf", "out", "--with-files", "--dry-run", "--json", cwd=room)
    found = json.loads(done.out)
    told = {item["path"]: item["bytes"] for item in found["files"]}
    assert told == {str(Path("out", name)): len(raw) for name, raw in TAKEN.items()}
    reasons = {item["path"]: item["reason"] for item in found["files_not_copied"]}
    assert reasons == LEFT | {"onnx": "a folder"}
    assert not (room / "out").exists()
    shown = run("convert", "hf", "out", "--with-files", "-n", cwd=room)
    assert "files       LICENSE, README.md, additional_chat_templates/rag.jinja, " in shown.err


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b'{"torch_dtype": "float32"}', b'{"torch_dtype": "bfloat16"}'),
        (
            b'{"a": 1e-05,\n "text": {"dtype" : "torch.float16"}}\n',
            b'{"a": 1e-05,\n "text": {"dtype" : "torch.bfloat16"}}\n',
        ),
        (b'{"torch_dtype": "bfloat16"}', None),
        (b'{"torch_dtype": 32}', None),
        (rb'{"a": "\"dtype\": \"float32\""}', None),
        (b"{", None),
        (b"[]", None),
    ],
)
def test_a_config_says_the_dtype_that_the_weights_have_now(room, config, says):
    (room / "hf" / "config.json").write_bytes(config)
    result = convert_checkpoint(room / "hf", room / "out", dtype="bf16", verify=True, **QUICKLY)
    told = [note for note in result.plan.notes if "config.json" in note]
    assert told == (["config.json of the copy says dtype bfloat16"] if says else [])
    assert (room / "out" / "config.json").read_bytes() == (says or config)
    assert (room / "hf" / "config.json").read_bytes() == config


def test_a_config_stays_where_only_some_weights_become_another_dtype(room):
    result = convert_checkpoint(room / "hf", room / "out", cast="layer0.weight=bf16", **QUICKLY)
    assert (room / "out" / "config.json").read_bytes() == TAKEN["config.json"]
    told = "config.json stays as it is and says dtype float32, but tensors are cast to bfloat16"
    assert told in result.plan.notes


def test_a_model_of_several_modules_is_whole_or_refused(room):
    hf = room / "hf"
    (hf / "modules.json").write_text(
        json.dumps([{"idx": at, "path": path} for at, path in enumerate(("", "1_Pooling", "2_D"))])
    )
    for name in ("1_Pooling", "2_D"):
        (hf / name).mkdir()
        (hf / name / "config.json").write_text(name)
    convert_checkpoint(hf, room / "configs", **QUICKLY)
    assert (room / "configs" / "1_Pooling" / "config.json").read_text() == "1_Pooling"
    torch.save({"linear.weight": torch.ones(2)}, hf / "2_D" / "pytorch_model.bin")
    (hf / "2_D" / "code.py").write_text("")
    for words in (("convert", "hf", "out.pt"), ("average", "hf", "hf", "out.pt")):
        done = run(*words, cwd=room)
        assert done.exit == 1 and "2_D hold weights too; copy all with --with-files" in done.err
    with pytest.raises(CheckpointError, match="2_D hold weights too"):
        ckptconv.load_portable(hf)
    convert_checkpoint(hf, room / "out", verify=True, **QUICKLY)
    assert oracle.load(room / "out" / "2_D" / "pytorch_model.bin").keys() == {"linear.weight"}
    assert not (room / "out" / "2_D" / "code.py").exists()
    assert run("convert", "hf/pytorch_model.bin", "one.pt", cwd=room).exit == 0


def test_a_folder_without_such_files_is_told(tmp_path):
    (tmp_path / "bare").mkdir()
    torch.save(weights(), tmp_path / "bare" / "model.pt")
    result = convert_checkpoint(tmp_path / "bare" / "model.pt", tmp_path / "out", **QUICKLY)
    assert "bare has no config, tokenizer or the like to copy" in result.plan.notes


@pytest.mark.parametrize("name", ["adapter_model.bin", "diffusion_pytorch_model.bin"])
def test_a_name_that_its_program_would_not_find_is_told(room, name):
    (room / "hf" / "pytorch_model.bin").rename(room / "hf" / name)
    (room / "hf" / "pytorch_model.bin.index.json").unlink()
    (room / "out").mkdir()
    (room / "named").mkdir()
    given = room / "out" / "model.safetensors"
    result = convert_checkpoint(room / "hf" / name, given, **QUICKLY)
    wanted = name.replace(".bin", ".safetensors")
    assert result.plan.notes[-1].endswith(
        f"looks for {wanted}, but the output is model.safetensors"
    )
    convert_checkpoint(room / "hf" / name, room / "named" / wanted, **QUICKLY)
    convert_checkpoint(room / "hf", room / "same", **QUICKLY)
    assert contents(room / "named") == contents(room / "same")
    assert (room / "same" / wanted).is_file() and (room / "same" / "config.json").is_file()


def test_a_plan_can_be_pickled_with_them(room):
    with open_checkpoint(room / "hf") as checkpoint:
        plan = plan_conversion(checkpoint, room / "out", Options(with_files=True))
        again = pickle.loads(pickle.dumps(plan))
        assert [item.name for item in again.beside.copied] == sorted(TAKEN)
        assert again.beside.left == plan.beside.left


# --------------------------------------------------------------------------- what is never followed


def test_links_that_stay_in_the_folder_are_followed_and_others_are_not(room):
    secret = room / "secret"
    secret.write_text("secret")
    hf = room / "hf"
    (hf / "vocab.json").symlink_to(secret)
    (hf / "merges.txt").symlink_to("../secret")
    (hf / "vocab.txt").symlink_to("nowhere")
    (hf / "spiece.model").symlink_to("tokenizer.model")
    (hf / "added_tokens.json").symlink_to("added_tokens.json")
    (hf / "special_tokens_map.json").mkdir()
    os.mkfifo(hf / "preprocessor_config.json")
    result = convert_checkpoint(hf, room / "out", **QUICKLY)
    left = {item.name: item.reason for item in result.plan.beside.left if item.name not in LEFT}
    assert left == {
        "onnx": "a folder", "special_tokens_map.json": "a folder",
        "vocab.json": "a link that leads out of the folder",
        "merges.txt": "a link that leads out of the folder",
        "vocab.txt": "a broken link", "added_tokens.json": "a broken link",
        "preprocessor_config.json": "a pipe, socket or device",
    }  # fmt: skip
    copied = room / "out" / "spiece.model"
    assert copied.read_bytes() == TAKEN["tokenizer.model"] and not copied.is_symlink()


def test_the_links_of_a_cache_become_files(room):
    """Snapshots of the Hugging Face cache consist of links to its blobs."""
    repository = room / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in (room / "hf").iterdir():
        if path.is_file():
            shutil.move(path, repository / "blobs" / f"blob-{path.name}")
            (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    (snapshot / "vocab.txt").symlink_to("../../refs")
    (repository / "refs").write_text("elsewhere in the cache")
    result = convert_checkpoint(snapshot, room / "out", **QUICKLY)
    flat = {name: raw for name, raw in TAKEN.items() if "/" not in name}
    found = contents(room / "out")
    assert {name: found.get(name) for name in flat} == digests(flat)
    assert not any(path.is_symlink() for path in (room / "out").iterdir())
    assert "vocab.txt" in {item.name for item in result.plan.beside.left}


def test_a_file_that_is_too_large_is_refused(room):
    with ckptconv.limits(companion_bytes=2_999_999), pytest.raises(LimitExceeded) as raised:
        convert_checkpoint(room / "hf", room / "out", **QUICKLY)
    assert "tokenizer.json: has 3000000 bytes" in str(raised.value)
    assert not (room / "out").exists()


def test_a_folder_that_links_elsewhere_is_not_looked_into(room):
    shutil.move(room / "hf" / "additional_chat_templates", room / "elsewhere")
    (room / "hf" / "additional_chat_templates").symlink_to(room / "elsewhere")
    result = convert_checkpoint(room / "hf", room / "out", **QUICKLY)
    assert not (room / "out" / "additional_chat_templates").exists()
    assert {"additional_chat_templates"} <= {item.name for item in result.plan.beside.left}


# ----------------------------------------------------------------------------- where they may stand


@pytest.mark.parametrize("name", ["config.json", "additional_chat_templates/rag.jinja"])
def test_a_file_that_is_there_stays_without_force(room, name):
    there = room / "out" / name
    there.parent.mkdir(parents=True)
    there.write_text("mine")
    before = contents(room / "out")
    done = run("convert", "hf", "out", "--with-files", cwd=room)
    assert done.exit == 1 and f"{Path('out', name)}: exists; add --force" in done.err
    assert contents(room / "out") == before and not hidden(room)
    for size in (900, 1 << 30, 900):  # each replaces what the one before wrote
        convert_checkpoint(room / "hf", room / "out", force=True, max_shard_size=size, **QUICKLY)
        assert contents(room / "out").items() >= digests(TAKEN).items()
        assert not hidden(room)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("out.safetensors",), "is the name of a file, but --with-files"),
        (("out", "--to", "npz"), "a numpy archive does not stand in a folder of a model"),
        (("-", "--to", "torch"), "which cannot be used with --with-files"),
    ],
)
def test_an_output_that_is_not_a_folder_is_refused(room, arguments, says):
    done = run("convert", "hf", *arguments, "--with-files", cwd=room)
    assert done.exit in (1, 2) and says in done.err
    assert sorted(path.name for path in room.iterdir()) == ["hf"]


def test_in_the_folder_of_the_source_the_files_stay(room):
    before = contents(room / "hf")
    result = convert_checkpoint(room / "hf", room / "hf", dtype="bf16", **QUICKLY)
    after = contents(room / "hf")
    assert result.plan.notes[-2].startswith("config.json stays as it is and says dtype float32")
    assert after.pop("model.safetensors") and after == before
    assert result.plan.beside.copied == () and "stay as they are" in result.plan.notes[-1]


def test_a_mapping_may_not_have_the_name_of_one(room):
    (room / "out").mkdir()
    with pytest.raises(OutputRefused, match="source or the output"):
        convert_checkpoint(
            room / "hf", room / "out", save_mapping=room / "out" / "config.json", **QUICKLY
        )


def test_the_option_is_a_flag():
    with pytest.raises(OptionRefused, match="with_files"):
        Options(with_files="yes")


# ----------------------------------------------------------------------------------- all or nothing


def test_a_file_that_changes_meanwhile_is_refused(room):
    with open_checkpoint(room / "hf") as checkpoint:
        plan = plan_conversion(checkpoint, room / "out", Options(with_files=True))
        (room / "hf" / "config.json").write_text("another")
        with pytest.raises(MalformedCheckpoint, match=r"config\.json: was changed"):
            execute_plan(plan, fsync=False)
    assert sorted(path.name for path in room.iterdir()) == ["hf"]


def test_verify_reads_the_copies_back(room, monkeypatch):
    copy = beside.copy_companion

    def damaged(item, output, on_progress, *, verify):
        draft = output.draft

        class Broken:
            @staticmethod
            def draft(*arguments):
                made = draft(*arguments)
                settle = made.commit

                def commit():
                    settle()
                    path = made.place.path
                    path.write_bytes(path.read_bytes()[:-1] + b"!")

                made.commit = commit
                return made

        copy(item, Broken if item.name == "tokenizer.json" else output, on_progress, verify=verify)

    monkeypatch.setattr("ckptconv.convert.companions.copy_companion", damaged)
    with pytest.raises(VerificationFailed, match=r"tokenizer\.json: its copy differs"):
        convert_checkpoint(room / "hf", room / "out", verify=True, **QUICKLY)
    assert sorted(path.name for path in room.iterdir()) == ["hf"]


@pytest.mark.parametrize("sharded", [False, True])
def test_what_fails_before_the_checkpoint_is_in_place_takes_them_back(room, monkeypatch, sharded):
    (room / "out").mkdir()
    (room / "out" / "mine").write_text("mine")
    before, name = contents(room / "out"), staging._name

    def fails(made, target):
        if target.name in ("model.safetensors", "model.safetensors.index.json"):
            raise OSError(5, "Input/output error")
        name(made, target)

    monkeypatch.setattr(staging, "_name", fails)
    more = {"max_shard_size": 900} if sharded else {}
    with pytest.raises(CheckpointError, match="nothing was left behind"):
        convert_checkpoint(room / "hf", room / "out", **QUICKLY, **more)
    assert contents(room / "out") == before and not hidden(room)
    assert [path.name for path in (room / "out").iterdir()] == ["mine"]


def test_what_fails_after_the_checkpoint_is_in_place_keeps_them(room, monkeypatch):
    (room / "out").mkdir()
    (room / "out" / "config.json").write_text("old")
    convert_checkpoint(room / "hf", room / "out", force=True, max_shard_size=900, **QUICKLY)
    (room / "out" / "config.json").write_text("old")
    replace = staging._replace

    def fails(made, target):
        if target.name == "config.json":
            raise OSError(5, "Input/output error")
        replace(made, target)

    (room / "out" / "LICENSE").unlink()
    monkeypatch.setattr(staging, "_replace", fails)
    with pytest.raises(OutputRefused, match=r"is in place, but config\.json of the earlier one"):
        convert_checkpoint(room / "hf", room / "out", force=True, max_shard_size=900, **QUICKLY)
    found = contents(room / "out")
    assert found["LICENSE"] == digests(TAKEN)["LICENSE"]
    assert (room / "out" / "config.json").read_text() == "old" and not hidden(room)


# ------------------------------------------------------------------- a config that is not true


def quantized(folder: Path) -> Path:
    """A model of fp8, and the config that says so."""
    folder.mkdir()
    codes = torch.ones(2, 2).to(torch.float8_e4m3fn)
    save_file({"w.weight": codes, "w.weight_scale": torch.ones(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    return folder


def test_a_config_that_calls_values_codes_is_told_of(tmp_path):
    model = quantized(tmp_path / "model")
    note = "config.json beside the output says that its weights are quantised (fp8)"

    def notes(output: Path, **options: Any) -> str:
        source = model / "model.safetensors"
        made = convert_checkpoint(source, output, dequantize=True, **options)
        return " ".join(made.plan.notes)

    assert note in notes(model / "plain.safetensors")
    (model / "plain.safetensors").unlink()
    assert note not in notes(tmp_path / "plain.safetensors")
    assert note not in notes(tmp_path / "plain", to="safetensors", with_files=True)
    shutil.copytree(model, tmp_path / "other")
    assert note in notes(tmp_path / "other" / "plain.safetensors")
    assert note in notes(model / "model.safetensors", force=True)
    with pytest.raises(OptionRefused, match="and all its tensors are values already"):
        notes(tmp_path / "again.safetensors")
