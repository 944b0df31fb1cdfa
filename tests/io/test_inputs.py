"""No output of a run takes the place of a file that the run reads, `--force` or not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from ckptconv import CheckpointError, convert_checkpoint, load_portable, merge, report
from helpers.memory_bucket import Bucket, bucket  # noqa: F401
from helpers.program import run


@pytest.fixture
def room(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tree = {"a.w": torch.randn(8, 8), "b.w": torch.randn(8, 8), "c.w": torch.randn(8, 8)}
    torch.save(tree, tmp_path / "in.pt")
    torch.save(tree, tmp_path / "like.pt")
    (tmp_path / "strings.json").write_text('{"by": "us"}')
    for name in ("hf", "like"):
        convert_checkpoint(
            tmp_path / "in.pt", tmp_path / name, to="safetensors", max_shard_size=300
        )
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "dcp", to="dcp")
    (tmp_path / "single").mkdir()
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "single" / ONE)
    weight_map = {"weight_map": dict.fromkeys(tree, ONE)}
    (tmp_path / "single" / INDEX).write_text(json.dumps(weight_map))
    (tmp_path / "keys.txt").write_text("a.w\nb.w\nc.w\n")
    (tmp_path / "rules.json").write_text(json.dumps([{"rename": "a=d"}]))
    (tmp_path / "strings.in").write_text('{"by": "us"}')
    (tmp_path / "link.pt").symlink_to("in.pt")
    return tmp_path


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


REASONS = (
    "is read by this run, so it cannot be one of its outputs",
    "is one of the input files, and the others need it",
    "is the source or the output",
    "which is read by this run; name another folder",
    "its name says a text",
    "lies in a source",
    "would be taken for the checkpoint in its folder, which is read here; name another folder",
)
SHARD, INDEX = "model-00001-of-00003.safetensors", "model.safetensors.index.json"
ONE = "model-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    "words",
    [
        f"report hf -o hf/{SHARD}",
        f"report hf -o hf/{INDEX}",
        "report in.pt -o link.pt",
        f"diff hf in.pt --html hf/{SHARD}",
        "diff in.pt like.pt --html like.pt",
        "convert in.pt out.pt --like like.pt --save-mapping like.pt",
        f"convert in.pt out.pt --like like --save-mapping like/{SHARD}",
        f"convert in.pt out.pt --like like --save-mapping like/{INDEX}",
        "convert in.pt out.pt --like keys.txt --save-mapping keys.txt",
        "convert in.pt out.pt --rules rules.json --save-mapping rules.json",
        "convert in.pt rules.json --rules rules.json --to torch",
        "convert in.pt x.safetensors --metadata-from strings.json --save-mapping strings.json",
        "convert in.pt strings.in --metadata-from strings.in --to safetensors",
        "convert in.pt like.pt --like like.pt",
        "convert in.pt dcp --to dcp --like dcp",
        f"convert hf hf/{INDEX} --to torch",
        f"convert hf hf/{SHARD}",
        "convert in.pt like --like like --to safetensors --max-shard-size 300",
        "convert in.pt like --like like --to safetensors --max-shard-size 600",
        "convert in.pt like/ --like like --to safetensors",
        f"convert single single/{ONE} --add-prefix x.",
        f"convert single/{INDEX} single/{ONE} --add-prefix x.",
        "convert dcp dcp/__0_0.distcp --to torch",
        "merge in.pt like.pt like.pt --prefix like.pt=x.",
        "average in.pt like.pt in.pt",
        "average hf like.pt hf/model.safetensors",
        f"average like.pt hf/{INDEX} hf/pytorch_model.bin",
        "merge in.pt hf hf/model.safetensors --prefix hf=x.",
        "show in.pt a.w --npy in.pt",
        "batch hf --out-dir out --to torch --html hf/" + INDEX,
    ],
)
def test_what_a_run_reads_is_never_its_output(words, room):
    before = hashes(room)
    done = run(*words.split(), "--force", cwd=room)
    assert done.exit != 0
    assert any(reason in done.err for reason in REASONS), done.err
    after = hashes(room)
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize(
    "words",
    [
        "convert in.pt in.pt",
        "convert hf hf --max-shard-size 300 --to safetensors",
        "convert single single/ --to safetensors",
    ],
)
def test_a_checkpoint_may_be_replaced_by_what_it_becomes(words, room):
    source = words.split()[1]
    done = run(*words.split(), "--dtype", "bf16", "--force", cwd=room)
    assert done.exit == 0, done.err
    assert load_portable(room / source)["a.w"].dtype == torch.bfloat16


@pytest.mark.parametrize("command", ["convert", "merge", "average", "merge-lora", "apply"])
def test_help_says_when_an_output_may_be_its_source(command, room):
    told = " ".join(run(command, "--help", cwd=room).out.split())
    assert "Replace OUT if it exists. OUT may be IN if one file is all that is read." in told
    done = run(command, "in.pt", *["like.pt"] * (command != "convert"), "in.pt", "-f", cwd=room)
    assert (done.exit == 0) == (command == "convert")


def test_files_of_a_folder_may_become_its_checkpoint(room):
    (room / "epochs").mkdir()
    for name in ("in.pt", "like.pt"):
        (room / name).rename(room / "epochs" / name)
    done = run("average", "epochs/in.pt", "epochs/like.pt", "epochs/model.safetensors", cwd=room)
    assert done.exit == 0, done.err


def test_a_run_of_the_library_refuses_the_same(room):
    before, one, like = hashes(room), room / "in.pt", room / "like.pt"
    for attempt in (
        lambda: convert_checkpoint(one, like, like=like, force=True),
        lambda: merge([one, like], like, prefix={one: "x."}, force=True),
        lambda: report(room / "hf", room / "hf" / SHARD, force=True),
    ):
        with pytest.raises(CheckpointError):
            attempt()
    assert hashes(room) == before


def test_what_an_earlier_run_read_may_be_written(room):
    load_portable(room / "like.pt")
    convert_checkpoint(room / "like.pt", room / "other.pt")
    convert_checkpoint(room / "in.pt", room / "like.pt", dtype="bf16", force=True)
    assert load_portable(room / "like.pt")["a.w"].dtype == torch.bfloat16


@pytest.fixture
def store(room: Path, bucket: Bucket) -> Bucket:  # noqa: F811
    for path in room.rglob("*"):
        if path.is_file():
            bucket.put(str(path.relative_to(room)), path.read_bytes())
    return bucket


AT = "s3://memory"


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: convert_checkpoint(
            f"{AT}/in.pt", f"{AT}/like.pt", like=f"{AT}/like.pt", force=True
        ),
        lambda: convert_checkpoint(
            f"{AT}/in.pt",
            f"{AT}/o.pt",
            like=f"{AT}/keys.txt",
            save_mapping=f"{AT}/keys.txt",
            force=True,
        ),
        lambda: convert_checkpoint(
            f"{AT}/in.pt", f"{AT}/like/", like=f"{AT}/like", to="safetensors", force=True
        ),
        lambda: convert_checkpoint(f"{AT}/hf", f"{AT}/hf/{SHARD}", force=True),
        lambda: convert_checkpoint(
            f"{AT}/single", f"{AT}/single/{ONE}", add_prefix="x.", force=True
        ),
        lambda: convert_checkpoint(f"{AT}/dcp", f"{AT}/dcp/__0_0.distcp", to="torch", force=True),
        lambda: report(f"{AT}/hf", f"{AT}/hf/{SHARD}", force=True),
        lambda: report(f"{AT}/hf", f"{AT}/hf/{INDEX}", force=True),
        lambda: report(f"{AT}/in.pt", f"{AT}/like.pt", against=f"{AT}/like.pt", force=True),
    ],
)
def test_what_a_run_reads_in_a_store_is_never_its_output(attempt, store):
    before = store.content
    with pytest.raises(CheckpointError) as raised:
        attempt()
    assert any(reason in str(raised.value) for reason in REASONS)
    assert store.content == before


def test_an_object_may_be_replaced_by_what_it_becomes(store):
    convert_checkpoint(f"{AT}/in.pt", f"{AT}/in.pt", dtype="bf16", force=True)
    convert_checkpoint(
        f"{AT}/hf", f"{AT}/hf/", to="safetensors", max_shard_size=300, dtype="bf16", force=True
    )
    for name in ("in.pt", "hf"):
        assert load_portable(f"{AT}/{name}")["a.w"].dtype == torch.bfloat16
