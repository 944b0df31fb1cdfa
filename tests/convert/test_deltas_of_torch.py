"""Deltas of files that torch wrote, and to stores: what numpy cannot save."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import (
    KeyConflict,
    MalformedCheckpoint,
    OutputRefused,
    RefusedObject,
    apply_deltas,
    convert_checkpoint,
    delta_checkpoints,
    load_portable,
)
from helpers import zero
from helpers.deltas import INDEX, SHARD, apply_delta, header_of, tensors_in
from helpers.examples import some
from helpers.memory_bucket import bucket  # noqa: F401
from helpers.program import PROGRAM, run, run_process


def trained(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shared = torch.randn(40, 30)
    return {
        "embed.weight": shared,
        "head.weight": shared,
        "turned": torch.randn(300, 50).t(),
        "part": torch.randn(9, 900)[2:5, ::3],
        "half": torch.randn(700).bfloat16(),
        "phase": torch.randn(33, dtype=torch.complex64).conj(),
    }


@pytest.fixture
def room(tmp_path):
    for seed, name in enumerate(("base", "new")):
        torch.save(trained(seed), tmp_path / f"{name}.pt")
        wrapped = {f"module.{key}": value for key, value in trained(seed).items()}
        training = {"model": wrapped, "optimizer": {"step": 3}, "epoch": seed}
        torch.save(training, tmp_path / f"{name}_training.pt")
        resolved = {key: value.resolve_conj().contiguous() for key, value in trained(seed).items()}
        del resolved["head.weight"]
        save_file(resolved, tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_what_torch_saved_takes_changes_and_stays_tied(encoding, room):
    made = delta_checkpoints(
        room / "base.pt", room / "new_training.pt", room / "d", encoding=encoding
    )
    assert made.tensors == made.changed == 5
    old, new = (tensors_in(room / f"{name}.safetensors") for name in ("base", "new"))
    assert apply_delta(old, room / "d") == new
    apply_deltas(room / "base.pt", room / "d", room / "out.pt", verify=True)
    found = torch.load(room / "out.pt", weights_only=True)
    assert [*found] == [*trained(1)]
    assert all(torch.equal(found[key], value) for key, value in trained(1).items())
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    apply_deltas(room / "base.safetensors", room / "d", room / "out.safetensors")
    loaded = load_file(room / "out.safetensors")
    assert all(torch.equal(loaded[key], trained(1)[key]) for key in loaded)


def test_the_rest_of_a_checkpoint_stays_as_it_is_and_a_note_says_so(room):
    torch.save({"model": trained(0), "epoch": 0}, room / "train.pt")
    delta_checkpoints(room / "base.pt", room / "new.pt", room / "d")
    made = apply_deltas(room / "train.pt", room / "d", room / "out.pt")
    found = torch.load(room / "out.pt", weights_only=True)
    assert torch.equal(found["model"]["half"], trained(1)["half"]) and found["epoch"] == 0
    assert "only model is changed, nothing else of BASE" in made.plan.notes


@pytest.mark.parametrize("which", ["base.pt", "new.pt"])
def test_a_flipped_byte_is_found(which, room):
    delta_checkpoints(room / "base.pt", room / "new.pt", room / "d")
    raw = bytearray((room / which).read_bytes())
    at = raw.find(
        trained(0 if which == "base.pt" else 1)["half"].view(torch.uint8).numpy().tobytes()
    )
    raw[at + 100] ^= 4
    (room / which).write_bytes(raw)
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        delta_checkpoints(room / "base.pt", room / "new.pt", room / "e")
    if which == "base.pt":
        with pytest.raises(MalformedCheckpoint, match="half: its bytes in BASE have"):
            apply_deltas(room / "base.pt", room / "d", room / "out.pt")
    assert not (room / "e").exists() and not (room / "out.pt").exists()


def test_names_that_part_are_refused(room):
    apart = trained(1)
    apart["head.weight"] = apart["head.weight"] + 1
    torch.save(apart, room / "new.pt")
    with pytest.raises(KeyConflict, match=r"head\.weight: is the same tensor as embed\.weight"):
        delta_checkpoints(room / "base.pt", room / "new.pt", room / "d")


def test_a_base_that_ties_what_the_delta_knows_apart_is_refused(room):
    apart = trained(0) | {"head.weight": torch.zeros(40, 30)}
    torch.save(apart, room / "apart.pt")
    torch.save(apart | {"half": trained(1)["half"]}, room / "new.pt")
    delta_checkpoints(room / "apart.pt", room / "new.pt", room / "d")
    with pytest.raises(KeyConflict, match=r"head\.weight: is the same tensor as embed"):
        apply_deltas(room / "base.pt", room / "d", room / "out.pt")
    assert not (room / "out.pt").exists()
    apply_deltas(room / "apart.pt", room / "d", room / "out.pt")
    found = torch.load(room / "out.pt", weights_only=True)
    assert torch.equal(found["half"], trained(1)["half"]) and not found["head.weight"].any()


def test_tied_tensors_of_modules_are_verified_and_stay_tied(tmp_path):
    """A state dict of a module has a tensor for each name, of one storage."""
    for step in range(2):
        layers = [torch.nn.Linear(3, 3) for _ in range(4)]
        for layer in layers:
            layer.weight, layer.bias = layers[0].weight, layers[1].bias
            torch.nn.init.constant_(layer.weight, step)
            torch.nn.init.constant_(layer.bias, 7)
        torch.save(torch.nn.Sequential(*layers).state_dict(), tmp_path / f"{step}.pt")
    delta_checkpoints(tmp_path / "0.pt", tmp_path / "1.pt", tmp_path / "d")
    apply_deltas(tmp_path / "0.pt", tmp_path / "d", tmp_path / "out.pt", verify=True)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert len(found) == 8 and all((found[f"{at}.weight"] == 1).all() for at in range(4))
    assert len({value.data_ptr() for value in found.values()}) == 2


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_version_may_tie_what_the_base_holds_twice(encoding, room):
    """A delta of tied tensors names one of them, as engines do, which look for what is stored."""
    plain = {key: value.resolve_conj().contiguous() for key, value in trained(0).items()}
    save_file(plain | {"head.weight": torch.zeros(40, 30)}, room / "apart.safetensors")
    versions = [room / name for name in ("apart.safetensors", "base.pt", "new.pt")]
    deltas = [room / "one", room / "two"]
    for number, delta in enumerate(deltas):
        old, new = versions[number : number + 2]
        delta_checkpoints(old, new, delta, encoding=encoding, base_version=number)
    assert "head.weight" not in tensors_in(deltas[1])
    apply_deltas(versions[0], deltas, room / "out.safetensors")
    found = load_file(room / "out.safetensors")
    assert found.keys() == trained(1).keys()
    assert all(torch.equal(found[key], value) for key, value in trained(1).items())


def test_a_name_that_no_file_can_hold_is_refused(room):
    torch.save({"\ud800": torch.zeros(3)}, room / "base.pt")
    torch.save({"\ud800": torch.ones(3)}, room / "new.pt")
    with pytest.raises(KeyConflict, match="half a character"):
        delta_checkpoints(room / "base.pt", room / "new.pt", room / "d")
    assert not (room / "d").exists()


@pytest.mark.parametrize(
    ("odd", "hint"),
    [
        (torch.eye(3).to_sparse(), "publish NEW as a whole"),  # safetensors has only its parts
        (np.arange(3.0), "convert both to safetensors first"),
    ],
    ids=["sparse", "array"],
)
def test_what_is_no_plain_tensor_is_refused(odd, hint, room):
    torch.save(trained(0) | {"odd": odd}, room / "base.pt")
    torch.save(trained(1) | {"odd": odd}, room / "new.pt")
    with pytest.raises(RefusedObject, match=f"odd: is not a plain tensor.*; {hint}"):
        delta_checkpoints(room / "base.pt", room / "new.pt", room / "d")
    if isinstance(odd, np.ndarray):  # then the hint is right
        plain = [room / f"{name}_plain.safetensors" for name in ("base", "new")]
        for source, output in zip((room / "base.pt", room / "new.pt"), plain, strict=True):
            convert_checkpoint(source, output)
        assert delta_checkpoints(*plain, room / "d").tensors == 6


def test_a_delta_goes_to_a_store_and_comes_from_it(room, bucket):  # noqa: F811
    delta_checkpoints(room / "base.pt", room / "new.pt", "s3://memory/run/weight_v000007")
    assert sorted(bucket.content) == [f"run/weight_v000007/{name}" for name in (SHARD, INDEX)]
    (room / "d").mkdir()
    for name in (SHARD, INDEX):
        (room / "d" / name).write_bytes(bucket.content[f"run/weight_v000007/{name}"])
    old, new = (tensors_in(room / f"{name}.safetensors") for name in ("base", "new"))
    assert apply_delta(old, room / "d") == new
    bucket.put("base/model.safetensors", (room / "base.safetensors").read_bytes())
    apply_deltas(
        "s3://memory/base/model.safetensors",
        ["s3://memory/run/"],
        "s3://memory/out/model.safetensors",
    )
    (room / "out.safetensors").write_bytes(bucket.content["out/model.safetensors"])
    assert tensors_in(room / "out.safetensors") == new
    assert bucket.left == []


@pytest.mark.skipif(not shutil.which("prlimit"), reason="prlimit is not installed")
@pytest.mark.parametrize("space", some(2, [110, 135, 125, 160]))
def test_too_little_memory_is_one_line(space, tmp_path):
    values = torch.randn(3_000_000)
    save_file({"w": values}, tmp_path / "base.safetensors")
    save_file({"w": values.where(values > -2, 0)}, tmp_path / "new.safetensors")
    delta_checkpoints(tmp_path / "base.safetensors", tmp_path / "new.safetensors", tmp_path / "d")
    limited = ("prlimit", f"--as={space * 1000 * 1000}", *PROGRAM)
    for words in (("delta", "base", "new.safetensors", "e"), ("apply", "base", "d", "out.npz")):
        named = [word.replace("base", "base.safetensors") for word in words]
        ended = run_process(*named, "-q", cwd=tmp_path, command=limited)
        if ended.exit:
            # CPython may print that a buffer was exported, where not even a view could be made
            *before, error = ended.lines
            assert error.startswith("error: ") and "out of memory" in error
            assert all("exported buffers" in line for line in before), ended.err
        assert (tmp_path / named[-1]).exists() is not bool(ended.exit)
        assert sorted(path.name for path in tmp_path.glob(".*")) == []


@pytest.mark.trust
def test_memory_does_not_grow_with_the_tensors(tmp_path):
    peaks = []
    for count in (4, 40):
        rng = np.random.default_rng(0)
        tensors = {
            f"{at}.w": torch.from_numpy(rng.standard_normal(1 << 18, np.float32))
            for at in range(count)
        }
        save_file(tensors, tmp_path / "base.safetensors")
        save_file(
            {key: value.where(value > -2, 0) for key, value in tensors.items()},
            tmp_path / "new.safetensors",
        )
        words = ("--force", "--no-fsync", "-q")
        made = run(
            "delta",
            "base.safetensors",
            "new.safetensors",
            "d",
            "--encoding",
            "overwrite",
            *words,
            cwd=tmp_path,
            alone=True,
        )
        apply = ("apply", "base.safetensors", "d", "out.safetensors", *words)
        done = run(*apply, cwd=tmp_path, alone=True)
        assert (made.exit, done.exit) == (0, 0), made.err + done.err
        peaks.append((made.rss, done.rss))
    header, _ = header_of(tmp_path / "out.safetensors")
    assert len(header) == 41
    assert all(later - first < 12 << 20 for first, later in zip(*peaks, strict=True)), peaks


@pytest.mark.parametrize("force", [False, True])
def test_a_delta_is_not_put_into_a_dcp_folder(force, tmp_path):
    for value, name in enumerate(("base.pt", "new.pt")):
        torch.save({"w": torch.full((40,), float(value))}, tmp_path / name)
    convert_checkpoint(tmp_path / "base.pt", tmp_path / "dcp", to="dcp")
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputRefused, match="dcp: is a DCP folder, whose readers would not take"):
        delta_checkpoints(tmp_path / "base.pt", tmp_path / "new.pt", tmp_path / "dcp", force=force)
    assert sorted(tmp_path.rglob("*")) == there


def test_a_folder_of_another_spelling_is_the_same(tmp_path, monkeypatch):
    """As on a disk that takes BASE for base, where a path without links has either spelling."""
    for seed, each in enumerate(("base", "new")):
        zero.write(tmp_path / each, 2, 2, [{"w": torch.full((40,), seed + 1.5)}])
    (tmp_path / "BASE").symlink_to("base")
    monkeypatch.setattr(Path, "resolve", lambda path: path)
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputRefused, match="BASE: is BASE or NEW itself, and would be taken"):
        delta_checkpoints(tmp_path / "base", tmp_path / "new", tmp_path / "BASE", force=True)
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize("name", ["base", "new"])
def test_a_delta_is_not_put_into_the_folder_of_another_checkpoint(name, tmp_path):
    """Which would be read as a delta then: nothing in it has the name of one of its files."""
    for seed, each in enumerate(("base", "new")):
        zero.write(tmp_path / each, 2, 2, [{"w": torch.full((40,), seed + 1.5)}])
    before, there = load_portable(tmp_path / name), sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputRefused, match=f"{name}: is BASE or NEW itself, and would be taken"):
        delta_checkpoints(tmp_path / "base", tmp_path / "new", tmp_path / name, force=True)
    assert sorted(tmp_path.rglob("*")) == there
    assert torch.equal(load_portable(tmp_path / name)["w"], before["w"])
