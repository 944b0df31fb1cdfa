"""Hugging Face folders read and written: indexes, shards, and what must not be believed of them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import CheckpointError, KeyRules, convert_checkpoint, load_portable, open_checkpoint
from ckptconv.convert import report
from ckptconv.convert.plan import ConversionPlan
from ckptconv.formats.hf_names import index_text
from ckptconv.support.errors import OutputRefused, VerificationFailed
from helpers import oracle
from helpers.program import PROGRAM, run_process

KEEP: dict[str, Any] = {"keys": "keep", "fsync": False}
INDEX = "model.safetensors.index.json"


def produced(name: str) -> Path:
    """A checkpoint that a real framework wrote."""
    path = oracle.corpus_folder().parent / "produced" / name
    if not path.exists():
        pytest.skip("the folder of checkpoints made by frameworks is not here (CKPTCONV_CORPUS)")
    return path


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shared = torch.randn(64)
    return {
        "z.first": torch.randn(3, 5),
        "a.half": torch.randn(40).to(torch.bfloat16),
        "tied.one": shared,
        "big": torch.randn(30, 10),
        "tied.two": shared,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7),
    }


def saved(folder: Path) -> Path:
    path = folder / "source.pt"
    torch.save(tensors(), path)
    return path


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        assert oracle.value_bytes(found[key]) == oracle.value_bytes(tensor), key


def index_of(folder: Path, name: str = INDEX) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


# ------------------------------------------------------------------------------------------ reading


def test_a_folder_of_transformers_opens_by_folder_and_by_index(tmp_path):
    folder = produced("hf_sharded")
    expected: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        expected |= load_file(shard)
    order = index_of(folder)["weight_map"]
    for path in (folder, folder / INDEX):
        assert_same(load_portable(path), {key: expected[key] for key in order})
        convert_checkpoint(path, tmp_path / "one.safetensors", force=True, verify=True, fsync=False)
        assert load_file(tmp_path / "one.safetensors").keys() == expected.keys()
        assert_same(
            dict(sorted(load_file(tmp_path / "one.safetensors").items())),
            dict(sorted(expected.items())),
        )


def test_torch_shards_open(tmp_path):
    state_dict = tensors()
    halves = [dict(list(state_dict.items())[:3]), dict(list(state_dict.items())[3:])]
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        torch.save(half, tmp_path / name)
    where = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    assert_same(load_portable(tmp_path, keys="keep"), state_dict)


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"w.y": "b.bin"}, r"w\.y.*is not in b\.bin, where the index puts it"),
        ({"u.x": "b.bin"}, r"u\.x.*is not in b\.bin, where the index puts it"),
        ({"w.y": None}, r"w\.y.*is in a\.bin but not in the index"),
        ({"v.x": ["b.bin"]}, "is not a plain file name"),
        ({"v.x": None, "t.x": "c.bin"}, r"t\.x.*is in two shards, c\.bin and c\.bin"),
    ],
    ids=["elsewhere", "nowhere", "untold", "no name", "twice"],
)
def test_an_index_that_does_not_say_what_its_shards_hold_is_refused(changed, what, tmp_path):
    torch.save({"w.x": torch.ones(2), "w.y": torch.ones(2)}, tmp_path / "a.bin")
    torch.save({"v.x": torch.ones(2)}, tmp_path / "b.bin")
    torch.save({"t.x": torch.ones(2), b"t.x": torch.zeros(2)}, tmp_path / "c.bin")
    where = {"w.x": "a.bin", "w.y": "a.bin", "v.x": "b.bin", **changed}
    weight_map = {key: name for key, name in where.items() if name is not None}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=what):
        open_checkpoint(index)


def test_a_shard_that_its_index_does_not_name_is_told_of(tmp_path):
    names = [f"pytorch_model-0000{n}-of-00003.bin" for n in (1, 2, 3)]
    for name in names:
        torch.save({name: torch.ones(1)}, tmp_path / name)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {names[0]: names[0], names[2]: names[2]}}))
    for place in (tmp_path, index):
        with open_checkpoint(place) as opened:
            assert opened.notes == (
                f"the index does not name 1 shard of its set, not read: {names[1]}",
            )
    index.write_text(json.dumps({"weight_map": {name: name for name in names}}))
    with open_checkpoint(index) as opened:
        assert opened.notes == ()


def test_a_folder_with_one_file_of_weights_is_that_file():
    assert_same(
        load_portable(produced("peft"), keys="keep"),
        load_file(produced("peft") / "adapter_model.safetensors"),
    )


def test_the_library_s_cache_may_link_to_its_blobs(tmp_path):
    repository = tmp_path / "models--x"
    snapshot, blobs = repository / "snapshots" / "0f", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    source = produced("hf_sharded")
    for item in source.iterdir():
        shutil.copy(item, blobs / f"b{item.name}")
        (snapshot / item.name).symlink_to(Path("../../blobs") / f"b{item.name}")
    assert_same(load_portable(snapshot), load_portable(source))


def put(folder: Path, name: str, value: float) -> None:
    """Weights under one of the usual names, with one shard where it is an index."""
    stem, _, variant = name.partition(".index.")
    file = folder / (f"{value:.0f}-{stem}" if variant else stem)
    weights = {"w": torch.full((3,), value)}
    if stem.endswith(".bin"):
        torch.save(weights, file)
    else:
        save_file(weights, file, {"format": "pt"})
    if stem != name:
        (folder / name).write_bytes(index_text([("w", file.name)], 12))


ORDERS = {
    "transformers": (
        "model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json",
    ),
    "a variant": (
        "model.fp16.safetensors", "model.safetensors.index.fp16.json", "pytorch_model.fp16.bin",
        "pytorch_model.bin.index.fp16.json",
    ),
    "diffusers": tuple(
        f"diffusion_pytorch_{name}"
        for name in (INDEX, "model.safetensors", "model.bin", "model.bin.index.json")
    ),
    "peft": ("adapter_model.safetensors", "adapter_model.bin"),
}  # fmt: skip
"""The names that each library looks for, in its order."""
PAIRS = [
    (library, pair)
    for library, order in ORDERS.items()
    for pair in itertools.combinations(order, 2)
]


@pytest.mark.parametrize(("library", "pair"), PAIRS)
def test_of_two_sets_of_weights_that_is_read_which_the_library_takes(library, pair, tmp_path):
    for value, name in enumerate(pair):
        put(tmp_path, name, value)
    assert load_portable(tmp_path)["w"].tolist() == [0.0] * 3


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="make families has it")
@pytest.mark.parametrize("pair", [pair for library, pair in PAIRS if library == "transformers"])
def test_transformers_takes_the_same_one(pair, tmp_path):
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=5, n_positions=3))
    model.config.save_pretrained(tmp_path)
    for value, name in reversed([*enumerate(pair)]):
        torch.nn.init.constant_(model.ln_f.bias, value)
        weights, file = model.state_dict(), tmp_path / name.partition(".index.")[0]
        if name.endswith(".json"):
            file = tmp_path / f"{value}-{file.name}"
            (tmp_path / name).write_bytes(index_text([(key, file.name) for key in weights], 12))
        if file.suffix == ".bin":
            torch.save(weights, file)
        else:
            save_file(weights, file, {"format": "pt"})
    taken = GPT2Model.from_pretrained(tmp_path).ln_f.bias
    assert torch.equal(load_portable(tmp_path)["ln_f.bias"], taken.detach())
    assert taken[0] == 0


STALE = [
    ("model", "pytorch_model"), ("model.fp16", "pytorch_model.fp16"),
    ("adapter_model", "adapter_model"), ("diffusion_pytorch_model", "diffusion_pytorch_model"),
]  # fmt: skip


@pytest.mark.parametrize("stem, other", STALE)
@pytest.mark.parametrize("size", [40, "5GB"])
@pytest.mark.parametrize("before", [40, "5GB"])
def test_a_folder_is_not_left_with_weights_that_are_read_before_the_new_ones(
    stem, other, size, before, tmp_path
):
    """A set of another format that a library takes first: refused, or replaced with the rest."""
    out, new = tmp_path / "out", tmp_path / "in" / f"{stem}.safetensors"
    for value, file in ((0.0, tmp_path / "old" / new.name), (1.0, new)):
        file.parent.mkdir()
        save_file({"w": torch.full((8,), value), "v": torch.full((8,), value)}, file)
    convert_checkpoint(tmp_path / "old" / new.name, out, max_shard_size=before)
    old = {path.name for path in out.iterdir()}
    with pytest.raises(OutputRefused, match="exists; add --force"):
        convert_checkpoint(new, out, to="torch", max_shard_size=size)
    assert {path.name for path in out.iterdir()} == old
    (out / "consolidated.safetensors").write_bytes(b"of another library")
    convert_checkpoint(new, out, to="torch", max_shard_size=size, force=True, verify=True)
    left = {path.name for path in out.iterdir()} - {"consolidated.safetensors"}
    assert not left & old and all(name.startswith(other.partition(".")[0]) for name in left)
    (out / "consolidated.safetensors").unlink()
    assert load_portable(out)["w"].tolist() == [1.0] * 8
    with pytest.raises(OutputRefused, match="exists; add --force"):
        convert_checkpoint(tmp_path / "old" / new.name, out, max_shard_size=size)
    convert_checkpoint(out, out, max_shard_size=size)  # but beside what it is made of
    assert left < {path.name for path in out.iterdir()}


def test_one_tensor_of_two_names_is_verified_in_a_set_of_one_shard(tmp_path):
    shared = torch.ones(3)
    torch.save({"a": shared, "b": shared}, tmp_path / "in.pt")
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "o.bin", max_shard_size="5GB", verify=True)
    assert torch.load(tmp_path / "o.bin")["b"].equal(shared)


def test_verify_opens_the_folder_as_its_readers_do(tmp_path, monkeypatch):
    """It finds by itself that others read older weights, here where nobody looks for these."""
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    out = tmp_path / "out"
    out.mkdir()
    put(out, "model.safetensors", 0)
    monkeypatch.setattr(ConversionPlan, "earlier", lambda plan: [])
    with pytest.raises(VerificationFailed, match=r"opens its folder reads model\.safetensors"):
        convert_checkpoint(tmp_path / "in.pt", out, to="torch", max_shard_size="5GB", verify=True)


def test_two_indexes_must_be_told_apart(tmp_path):
    for name in ("a.safetensors.index.json", "b.safetensors.index.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"holds 2 indexes: a\.safetensors.*b\.safetensors.*name the index"
    ):
        open_checkpoint(tmp_path)


def test_a_folder_of_files_without_an_index_names_them(tmp_path):
    for name in ("x-00001-of-00002", "y"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"is a folder of 2 files without an index; .*parts: x-00001-of-00002\.safetensors, y",
    ):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is a folder without a checkpoint"):
        empty = tmp_path / "empty"
        empty.mkdir()
        open_checkpoint(empty)


def test_a_folder_around_checkpoints_names_them(tmp_path):
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    (tmp_path / "logs").mkdir()
    (tmp_path / "random_states_0.pkl").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"holds 2 checkpoints .* --tag: checkpoint-500, checkpoint-1000$"
    ):
        open_checkpoint(tmp_path)


def test_a_folder_of_accelerate_is_its_model_and_its_training_state():
    folder = produced("acc_state")
    with open_checkpoint(folder) as checkpoint:
        assert [found.path for found in checkpoint.state_dicts()] == ["model"]
        assert checkpoint.format == "accelerate folder"
    assert_same(load_portable(folder), load_file(folder / "model.safetensors"))
    optimizer = load_portable(folder, whole=True, only="optimizer")
    theirs = torch.load(folder / "optimizer.bin")
    assert oracle.flatten(optimizer) == oracle.flatten(theirs)


# ------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize(
    ("to", "stem", "suffix"),
    [("safetensors", "model", ".safetensors"), ("torch", "pytorch_model", ".bin")],
)
def test_a_folder_of_shards_has_the_libraries_names_and_comes_back_whole(
    to, stem, suffix, tmp_path
):
    folder = tmp_path / "shards"
    result = convert_checkpoint(
        saved(tmp_path), folder, to=to, max_shard_size="400B", tied="duplicate", verify=True, **KEEP
    )
    index = index_of(folder, f"{stem}{suffix}.index.json")
    count = len(set(index["weight_map"].values()))
    assert count > 2 and result.verified == len(tensors())
    names = {f"{stem}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)}
    assert {item.name for item in folder.iterdir()} == names | {f"{stem}{suffix}.index.json"}
    assert list(index["weight_map"]) == list(tensors())
    nbytes = sum(tensor.nbytes for tensor in tensors().values())
    assert index["metadata"]["total_size"] == nbytes
    load = load_file if to == "safetensors" else torch.load
    for name in names:
        held = load(folder / name)
        assert set(held) == {key for key, shard in index["weight_map"].items() if shard == name}
        alone = set(held) in ({"big"}, {"tied.one", "tied.two"})  # too large by themselves
        assert alone or sum(tensor.nbytes for tensor in held.values()) <= 400
    assert index["weight_map"]["tied.one"] == index["weight_map"]["tied.two"]
    assert_same(load_portable(folder, keys="keep"), tensors())


def test_shards_are_named_after_a_file_and_aliases_survive(tmp_path):
    convert_checkpoint(saved(tmp_path), tmp_path / "net.safetensors", max_shard_size=400, **KEEP)
    index = index_of(tmp_path, "net.safetensors.index.json")
    assert "tied.two" not in index["weight_map"]
    found = load_portable(tmp_path / "net.safetensors.index.json", keys="keep")
    assert found["tied.two"].data_ptr() == found["tied.one"].data_ptr()
    assert_same({key: found[key] for key in tensors()}, tensors())


def test_what_fits_one_file_needs_no_index(tmp_path):
    convert_checkpoint(saved(tmp_path), tmp_path / "out", max_shard_size="5GB", **KEEP)
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    convert_checkpoint(saved(tmp_path), tmp_path / "one.bin", max_shard_size="5GB", **KEEP)
    assert_same(torch.load(tmp_path / "one.bin"), tensors())


def test_rules_casts_and_tags_reach_every_shard(tmp_path):
    convert_checkpoint(
        saved(tmp_path), tmp_path / "net.bin", max_shard_size=400, dtype="f16", device="cuda:1",
        keys=KeyRules(add_prefix="module."), fsync=False,
    )  # fmt: skip
    shards = sorted(tmp_path.glob("net-*.bin"))
    for shard in shards:
        assert set(oracle.tags(shard)) == {"cuda:1"}
    assert all(key.startswith("module.") for key in load_portable(shards, keys="keep"))
    found = load_portable(tmp_path / "net.bin.index.json")
    assert {key: value.dtype for key, value in found.items()} == {
        key: torch.float16 if value.is_floating_point() else value.dtype
        for key, value in tensors().items()
    }


def test_an_existing_set_is_replaced_only_when_told_and_nothing_is_left_of_a_failure(tmp_path):
    source, folder = saved(tmp_path), tmp_path / "out"
    convert_checkpoint(source, folder, max_shard_size=400, **KEEP)
    before = {item.name: item.read_bytes() for item in folder.iterdir()}
    with pytest.raises(CheckpointError, match="exists; add --force"):
        convert_checkpoint(source, folder, max_shard_size=400, **KEEP)
    assert {item.name: item.read_bytes() for item in folder.iterdir()} == before
    convert_checkpoint(source, folder, max_shard_size=400, force=True, **KEEP)
    assert {item.name: item.read_bytes() for item in folder.iterdir()} == before
    raw = bytearray(source.read_bytes())
    raw[raw.index(tensors()["big"].numpy().tobytes()) + 5] ^= 1
    (tmp_path / "damaged.pt").write_bytes(raw)
    with pytest.raises(CheckpointError, match="CRC-32"):
        convert_checkpoint(tmp_path / "damaged.pt", tmp_path / "new", max_shard_size=400, **KEEP)
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match="CRC-32"):
        convert_checkpoint(tmp_path / "damaged.pt", folder, max_shard_size=400, force=True, **KEEP)
    assert {item.name: item.read_bytes() for item in folder.iterdir()} == before


@pytest.mark.parametrize(("before", "after"), [(400, "5GB"), ("5GB", 400), (400, 900)])
def test_nothing_of_an_earlier_set_is_found_in_the_place_of_a_new_one(before, after, tmp_path):
    """transformers takes the one file, ckptconv the index; neither may be of the old weights."""
    old = tmp_path / "old.pt"
    torch.save({key: torch.zeros_like(value) for key, value in tensors().items()}, old)
    folder, fresh = tmp_path / "out", tmp_path / "fresh"
    convert_checkpoint(old, folder, max_shard_size=before, **KEEP)
    (folder / "config.json").write_text("{}")
    untouched = {item.name: item.read_bytes() for item in folder.iterdir()}
    with pytest.raises(CheckpointError, match="exists; add --force"):
        convert_checkpoint(saved(tmp_path), folder, max_shard_size=after, **KEEP)
    assert {item.name: item.read_bytes() for item in folder.iterdir()} == untouched
    convert_checkpoint(saved(tmp_path), folder, max_shard_size=after, force=True, **KEEP)
    convert_checkpoint(saved(tmp_path), fresh, max_shard_size=after, **KEEP)
    assert {item.name for item in folder.iterdir()} == {item.name for item in fresh.iterdir()} | {
        "config.json"
    }
    for key, tensor in load_portable(folder, keys="keep").items():
        assert oracle.value_bytes(tensor) == oracle.value_bytes(tensors()[key]), key


def test_a_set_may_be_cut_anew_in_its_own_folder(tmp_path):
    folder = tmp_path / "out"
    convert_checkpoint(saved(tmp_path), folder, max_shard_size=400, tied="duplicate", **KEEP)
    convert_checkpoint(
        folder, folder, max_shard_size=900, tied="duplicate", force=True, verify=True, **KEEP
    )
    assert {item.name for item in folder.iterdir()} == {
        *index_of(folder)["weight_map"].values(),
        INDEX,
    }
    assert_same(load_portable(folder, keys="keep"), tensors())


def test_a_set_that_cannot_be_put_in_place_leaves_nothing(tmp_path, monkeypatch):
    source, folder = saved(tmp_path), tmp_path / "out"
    folder.mkdir()
    link = os.link

    def taken(temporary: Path, target: Path) -> None:
        if "-00001-" in target.name:  # the last shard to be put in place
            target.write_text("another process's")
        link(temporary, target)

    monkeypatch.setattr("os.link", taken)
    with pytest.raises(CheckpointError, match="exists now"):
        convert_checkpoint(source, folder, max_shard_size=400, **KEEP)
    (other,) = folder.iterdir()
    assert other.read_text() == "another process's"


def test_more_shards_than_files_may_be_open(tmp_path):
    resource = pytest.importorskip("resource")
    state_dict = {f"w{index:03}": torch.full((4,), float(index)) for index in range(200)}
    torch.save(state_dict, tmp_path / "in.pt")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = len(list(Path("/dev/fd").iterdir())) if Path("/dev/fd").is_dir() else 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (is_open + 100, hard))
    try:
        convert_checkpoint(
            tmp_path / "in.pt", tmp_path / "out", max_shard_size=16, verify=True, **KEEP
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(set(index_of(tmp_path / "out")["weight_map"].values())) == 200
    for number, shard in enumerate(sorted((tmp_path / "out").glob("*.safetensors"))):
        assert_same(load_file(shard), {f"w{number:03}": state_dict[f"w{number:03}"]})


def test_views_of_one_storage_are_split_where_they_get_their_own_bytes(tmp_path):
    flat = torch.arange(1000.0)
    state_dict = {f"w{index}": flat[index * 100 : (index + 1) * 100] for index in range(10)}
    torch.save({**state_dict, "again": state_dict["w3"]}, tmp_path / "in.pt")
    convert_checkpoint(
        tmp_path / "in.pt",
        tmp_path / "net.safetensors",
        max_shard_size=1000,
        tied="duplicate",
        **KEEP,
    )
    where = index_of(tmp_path, "net.safetensors.index.json")["weight_map"]
    assert where["again"] == where["w3"] and len(set(where.values())) == 6
    found = load_portable(tmp_path / "net.safetensors.index.json", keys="keep")
    assert_same(found, {**state_dict, "again": state_dict["w3"]})
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "net.bin", max_shard_size=1000, **KEEP)
    assert torch.load(tmp_path / "net.bin")["w9"].untyped_storage().nbytes() == flat.nbytes


@pytest.mark.parametrize("output", ["file", "file/net.safetensors", "file/folder"])
def test_a_file_is_not_taken_for_a_folder(output, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is inside a file, but must be inside a folder"):
        convert_checkpoint(saved(tmp_path), tmp_path / output, max_shard_size=400, **KEEP)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("output", ["missing/net.safetensors", "missing/folder"])
def test_the_folder_around_a_set_must_be_there(output, tmp_path):
    with pytest.raises(CheckpointError, match=r"its folder does not exist; mkdir -p .*missing"):
        convert_checkpoint(saved(tmp_path), tmp_path / output, max_shard_size=400, **KEEP)


@pytest.mark.parametrize("output", ["folder", "folder.pt"])
def test_a_dcp_folder_is_not_split_by_size(output, tmp_path):
    with pytest.raises(CheckpointError, match="a DCP folder is not split by size"):
        convert_checkpoint(saved(tmp_path), tmp_path / output, to="dcp", max_shard_size=400, **KEEP)


def test_the_summary_and_the_json_name_the_shards(tmp_path):
    result = convert_checkpoint(saved(tmp_path), tmp_path / "out", max_shard_size=400, **KEEP)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    document = report.PLAN.of(result.plan)["output"]
    assert document["index"] == str(tmp_path / "out" / INDEX)
    assert document["shards"] == [
        {"path": str(path), "bytes": path.stat().st_size} for path in shards
    ]
    line = next(row.text for row in report.plan_lines(result.plan) if row.label == "shards")
    assert f"{len(shards)} in all, the largest " in line and line.endswith(INDEX)


# ---------------------------------------------------------------------------- metadata of the index


def with_metadata(folder: Path, metadata: Any) -> Path:
    """A folder of shards whose index has this metadata."""
    convert_checkpoint(
        saved(folder), folder / "in", max_shard_size="400B", tied="duplicate", **KEEP
    )
    index = index_of(folder / "in")
    (folder / "in" / INDEX).write_text(json.dumps({**index, "metadata": metadata}))
    return folder / "in"


def test_other_metadata_of_an_index_stays_when_shards_are_written_again(tmp_path):
    told = {"total_parameters": 439, "total_size": 3, "made_by": ["é", {"x": None}]}
    source = with_metadata(tmp_path, told)
    convert_checkpoint(source, tmp_path / "again", max_shard_size="1KB", tied="duplicate", **KEEP)
    nbytes = sum(tensor.nbytes for tensor in tensors().values())
    assert index_of(tmp_path / "again")["metadata"] == {**told, "total_size": nbytes}
    convert_checkpoint(source, source, max_shard_size="1KB", tied="duplicate", force=True, **KEEP)
    assert index_of(source)["metadata"] == {**told, "total_size": nbytes}


def test_the_number_of_parameters_goes_where_a_tensor_is_left_out(tmp_path):
    source = with_metadata(tmp_path, {"total_parameters": 439, "made_by": "hand"})
    rules = KeyRules(exclude=("big",))
    convert_checkpoint(
        source, tmp_path / "again", max_shard_size="200B", keys=rules, tied="duplicate", fsync=False
    )
    metadata = index_of(tmp_path / "again")["metadata"]
    assert metadata.keys() == {"made_by", "total_size"}


@pytest.mark.parametrize("metadata", [None, [], 7, "text"])
def test_an_index_whose_metadata_is_no_object_opens_as_before(metadata, tmp_path):
    source = with_metadata(tmp_path, metadata)
    convert_checkpoint(source, tmp_path / "again", max_shard_size="1KB", tied="duplicate", **KEEP)
    assert index_of(tmp_path / "again")["metadata"].keys() == {"total_size"}


@pytest.mark.parametrize("odd", ['"\\ud800"', "1e999"])
def test_metadata_that_is_no_json_when_written_is_refused(odd, tmp_path):
    source = with_metadata(tmp_path, {"odd": "HERE"})
    (source / INDEX).write_text((source / INDEX).read_text().replace('"HERE"', odd))
    with pytest.raises(CheckpointError, match="index: cannot be written as JSON"):
        convert_checkpoint(source, tmp_path / "again", max_shard_size="1KB", **KEEP)
    assert not (tmp_path / "again").exists()


def test_the_count_of_parameters_that_transformers_wrote_is_kept(tmp_path):
    source = produced("hf_sharded")
    convert_checkpoint(source, tmp_path / "again", max_shard_size="30KB", **KEEP)
    before, after = index_of(source)["metadata"], index_of(tmp_path / "again")["metadata"]
    assert (
        after["total_parameters"] == before["total_parameters"]
        and after["total_size"] == before["total_size"]
    )


def test_more_shards_than_a_process_may_open_are_read(tmp_path):
    tensors = {f"w{number:03}": torch.full((2,), float(number)) for number in range(420)}
    (tmp_path / "in").mkdir()
    names = {key: f"model-{number:05}-of-00420.safetensors" for number, key in enumerate(tensors)}
    for key, name in names.items():
        save_file({key: tensors[key]}, tmp_path / "in" / name)
    index = {"metadata": {"total_size": 8 * 420}, "weight_map": names}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    command = ("/bin/sh", "-c", 'ulimit -n 300 && exec "$@"', "sh", *PROGRAM)
    done = run_process(
        "convert", tmp_path / "in", "out.safetensors", "--verify", cwd=tmp_path, command=command
    )
    assert done.exit == 0, done.err
    assert oracle.value_rows(load_file(tmp_path / "out.safetensors")) == oracle.value_rows(tensors)


@pytest.mark.parametrize("keys", [(), ("a",), ("a", 'q"\\\n\x00', "层.weight", "\u2028", "{}")])
def test_the_index_is_what_json_writes(keys):
    weight_map = dict.fromkeys(keys, "model-00001-of-00002.safetensors")
    document = {"metadata": {"n": {"{}": []}, "total_size": 7}, "weight_map": weight_map}
    expected = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    assert index_text(weight_map.items(), 7, {"n": {"{}": []}}) == expected.encode()


@pytest.mark.trust
@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell to lower the limit")
@pytest.mark.parametrize("allowed", [64, 16])
def test_more_shards_than_the_process_may_open(allowed, tmp_path):
    source, shards = tmp_path / "in.pt", tmp_path / "shards"
    torch.save({f"{number}.w": torch.randn(8, 8) for number in range(100)}, source)
    convert_checkpoint(source, shards, to="safetensors", max_shard_size=256, fsync=False)
    limited = ("sh", "-c", f'ulimit -n {allowed}; exec "$@"', "sh", *PROGRAM)
    done = run_process("convert", shards, "out.pt", cwd=tmp_path, command=limited)
    assert done.exit == 0, done.err
    assert_same(torch.load(tmp_path / "out.pt"), torch.load(source))
    compared = run_process("diff", shards, "in.pt", cwd=tmp_path, command=limited)
    assert compared.exit == 0, compared.err
