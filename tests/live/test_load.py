"""Live tensors: what `load_portable` gives, `load_into` fits and `save_portable` writes is what
torch itself would.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import os
import random
import sys
import tempfile
import zipfile
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from ckptconv import (
    Progress,
    best_device,
    convert_checkpoint,
    load_into,
    load_portable,
    save_portable,
)
from ckptconv.convert.words import OptionWords, TensorWords
from ckptconv.support.errors import (
    AmbiguousStateDict,
    CheckpointError,
    DeviceUnavailable,
    KeyConflict,
    KeyMismatch,
    MalformedCheckpoint,
    OptionRefused,
    OutputRefused,
    RefusedObject,
    UnsupportedCheckpoint,
)
from helpers import oracle, trees
from helpers.examples import examples
from helpers.paths import SAMPLES

thorough = settings(max_examples=examples(150), deadline=None)
quick = settings(max_examples=examples(40), deadline=None)
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
SAMPLES = sorted(path.name for path in SAMPLES.glob("*.pt"))
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA")


def same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(oracle.flatten(found), oracle.flatten(expected), strict=True):
        assert ours == theirs
    assert oracle.overlaps(found) == oracle.overlaps(expected)


def saved(tree: Any, folder: Path, tag: str = "cpu") -> Path:
    with oracle.tagged(lambda storage: tag):
        torch.save(tree, folder / "saved.pt")
    return folder / "saved.pt"


# ------------------------------------------------------------------------------------ load_portable


@given(trees.trees(), st.booleans())
@thorough
def test_a_whole_tree_is_what_torch_loads(drawn, mmap):
    with tempfile.TemporaryDirectory() as folder:
        path = saved(drawn.tree, Path(folder))
        same(load_portable(path, whole=True, keys="keep", mmap=mmap), oracle.load(path))


@given(trees.state_dicts(plain=True), st.booleans(), st.booleans())
@thorough
def test_the_state_dict_comes_under_bare_keys(drawn, inside, mmap):
    tree = (
        {"epoch": 3, "state_dict": drawn.tree, "optimizer": {"state": {}, "param_groups": []}}
        if inside
        else drawn.tree
    )
    with tempfile.TemporaryDirectory() as folder:
        path = saved(tree, Path(folder), "cuda:3")
        source = oracle.load(path)["state_dict"] if inside else oracle.load(path)
        same(load_portable(path, mmap=mmap), oracle.bare_state_dict(source))
        same(load_portable(path, keys="keep", only="state_dict" if inside else None), source)
        whole = load_portable(path, whole=True, mmap=mmap)
        same(whole["state_dict"] if inside else whole, oracle.bare_state_dict(source))


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_load_on_any_host(samples, name, mmap):
    source = oracle.load(samples / name, weights_only=False)
    key = next((key for key in ("state_dict", "model_state_dict") if key in source), None)
    expected = oracle.bare_state_dict(source[key] if key else source)
    loaded = load_portable(samples / name, mmap=mmap)
    assert type(loaded) is OrderedDict
    same(loaded, expected)
    whole = load_portable(samples / name, whole=True, keys="keep", mmap=mmap)
    if name == "namespace_train.pt":
        plain = {**vars(source["args"]), "output": str(source["args"].output)}
        source = {**source, "args": plain, "best_acc": source["best_acc"].item()}
    same(whole, source)


def test_a_plain_dict_becomes_an_ordered_one(tmp_path):
    loaded = load_portable(saved({"module.b": torch.ones(1), "module.a": torch.zeros(1)}, tmp_path))
    assert type(loaded) is OrderedDict and list(loaded) == ["b", "a"]


def test_other_files_formats_load_the_same(tmp_path, samples):
    convert_checkpoint(samples / "tied.pt", tmp_path / "tied.safetensors")
    loaded, theirs = load_portable(tmp_path / "tied.safetensors"), oracle.load(samples / "tied.pt")
    assert {key: oracle.value_bytes(value) for key, value in loaded.items()} == {
        key: oracle.value_bytes(value) for key, value in theirs.items()
    }
    assert loaded["lm_head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    deflated = oracle.rezipped(
        samples / "ddp_cuda3.pt", tmp_path / "deflated.pt", compression=zipfile.ZIP_DEFLATED
    )
    for mmap in (True, False):
        same(load_portable(deflated, keys="keep", mmap=mmap), oracle.load(samples / "ddp_cuda3.pt"))


@pytest.mark.parametrize("mmap", [True, False])
def test_a_big_endian_file_loads_as_its_values(tmp_path, mmap):
    words = {
        "f32": torch.randn(5),
        "i64": torch.arange(4)[1:],
        "c64": torch.randn(3, dtype=torch.complex64),
        "u8": torch.ones(3).byte(),
    }
    saved(words, tmp_path)
    sizes = {f"data/{number}": size for number, size in enumerate((4, 8, 4, 1))}

    def swap(name: str, stored: bytes) -> bytes:
        record = name.partition("/")[2]
        size = sizes.get(record, 1)
        swapped = b"".join(stored[at : at + size][::-1] for at in range(0, len(stored), size))
        return b"big" if record == "byteorder" else swapped

    path = oracle.rezipped(tmp_path / "saved.pt", tmp_path / "big.pt", payload=swap)
    same(load_portable(path, mmap=mmap), OrderedDict(words))
    same(oracle.load(path), words)


def test_special_tensors_load_as_torch_loads_them(tmp_path):
    weights = torch.arange(6.0).reshape(2, 3)
    marked = torch.arange(4.0)
    marked.note = "kept"
    base = torch.arange(16, dtype=torch.uint8)
    tree = {
        "sparse": weights.to_sparse(),
        "csr": weights.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
        "quantized": torch.quantize_per_tensor(weights, 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(
            weights, torch.ones(2), torch.zeros(2), 0, torch.quint8
        ),
        "parameter": nn.Parameter(weights),
        "frozen": nn.Parameter(weights.clone(), requires_grad=False),
        "buffer": nn.Buffer(torch.ones(2)),
        "marked": marked,
        "storage": torch.ones(3).storage(),
        "u16": base.view(torch.uint16),
        "fp8": base.view(torch.float8_e5m2),
        "layout": torch.sparse_coo,
    }
    path = saved(tree, tmp_path)
    for mmap in (True, False):
        same(load_portable(path, whole=True, mmap=mmap), torch.load(path, weights_only=False))


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_negated_tensors_are_cast_as_torch_casts_them(dtype, mmap, tmp_path):
    """torch itself cannot negate 8-bit floats, so none of these may have the neg bit."""
    whole = torch._neg_view(torch.randn(4, 3))
    tree = {"columns": whole.t(), "rows": whole[1:], "plain": whole.resolve_neg()}
    torch.save(tree, tmp_path / "in.pt")
    found = load_portable(tmp_path / "in.pt", dtype=dtype, mmap=mmap)
    for key, value in tree.items():
        assert torch.equal(found[key].float(), value.to(dtype).float()), key


def test_deeply_nested_containers_load(tmp_path):
    deep: Any = torch.ones(1)
    for _ in range(120):
        deep = {"in": [deep]}
    path = saved(deep, tmp_path)
    same(load_portable(path, whole=True), oracle.load(path))
    save_portable(deep, tmp_path / "ours.pt")
    same(oracle.load(tmp_path / "ours.pt"), deep)


def test_unknown_objects_are_refused_dropped_or_kept_symbolically(tmp_path):
    path = saved({"w.a": torch.ones(1), "x": random.Random(0), "deque": [print]}, tmp_path)
    with pytest.raises(
        RefusedObject, match=r"x: random\.Random .*weights_only|deque\.0: builtins\.print"
    ):
        load_portable(path, whole=True)
    assert load_portable(path, whole=True, unknown="drop")["deque"] == [None]
    kept = load_portable(path, whole=True, unknown="keep")
    assert "Random" in repr(kept["x"]) and not callable(kept["deque"][0])
    assert load_portable(
        saved({"model": {"a.b": torch.ones(1)}, "x": range(3)}, tmp_path)
    ).keys() == {"a.b"}


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("import os; os.environ['CKPTCONV_BOMB'] = 'exploded'",)


def test_nothing_in_a_file_is_executed(tmp_path):
    tree = {"w.a": torch.ones(1)}
    path = saved({**tree, "bomb": Bomb(), "print": print}, tmp_path)
    for unknown in ("drop", "keep"):
        load_portable(path, whole=True, unknown=unknown)
    assert "CKPTCONV_BOMB" not in os.environ


def test_several_state_dicts_need_only(tmp_path):
    path = saved(
        {"model": {"fc.w": torch.ones(2)}, "ema": {"module.fc.w": torch.zeros(2)}}, tmp_path
    )
    with pytest.raises(AmbiguousStateDict, match="--only model or --only ema"):
        load_portable(path)
    assert load_portable(path, only="ema")["fc.w"].sum() == 0
    same(load_portable(path, only="ema", whole=True), {"fc.w": torch.zeros(2)})
    with pytest.raises(AmbiguousStateDict, match="nothing at"):
        load_portable(path, only="net")


class _OddDevice:
    def __reduce__(self) -> Any:
        return torch.device, ("nonsense",)


def test_what_torch_cannot_make_is_refused_in_its_words(tmp_path):
    torch.save({"device": _OddDevice()}, tmp_path / "a.pt")
    with pytest.raises(RuntimeError, match="at start of device string: nonsense"):
        torch.load(tmp_path / "a.pt")
    with pytest.raises(RefusedObject, match="at start of device string: nonsense"):
        load_portable(tmp_path / "a.pt", whole=True)


def test_rules_that_leave_no_key_are_refused(tmp_path):
    torch.save({"a.w": torch.ones(1), "a.b": torch.ones(1)}, tmp_path / "model.pt")
    for whole in (False, True):
        with pytest.raises(KeyConflict, match=r"no key is left after --exclude 'a\.\*'"):
            load_portable(tmp_path / "model.pt", exclude="a.*", whole=whole)


def test_keys_that_become_one_are_refused(tmp_path):
    path = saved({"a": torch.ones(1), "_orig_mod.a": torch.ones(1)}, tmp_path)
    with pytest.raises(KeyConflict, match="both become 'a'"):
        load_portable(path)
    assert list(load_portable(path, keys="keep")) == ["a", "_orig_mod.a"]


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"<html>", b"\x80\x02}q\x00.", b"PK\3\4 and no more"]
)
def test_what_is_no_checkpoint_says_so(content, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        load_portable(tmp_path / "x.pt")
    with pytest.raises(UnsupportedCheckpoint, match="no such file"):
        load_portable(tmp_path / "y.pt")


# ----------------------------------------------------------------------------------- mapped or read


def test_mapped_tensors_can_be_changed_without_changing_the_file(tmp_path):
    path = saved({"a": torch.ones(5)}, tmp_path)
    before = path.read_bytes()
    load_portable(path)["a"].add_(1)
    assert path.read_bytes() == before


def test_mapped_tensors_outlive_a_replaced_file_and_their_siblings(tmp_path):
    path = saved({"a": torch.ones(50_000), "b": torch.full((50_000,), 2.0)}, tmp_path)
    kept = load_portable(path)["b"]
    gc.collect()
    save_portable({"a": torch.zeros(3)}, path, force=True)
    assert kept.sum() == 100_000
    path.unlink()
    assert kept.mean() == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts /proc/self/fd")
@pytest.mark.parametrize("mmap", [True, False])
def test_no_file_stays_open(samples, tmp_path, mmap):
    deflated = oracle.rezipped(
        samples / "dp_cuda0.pt", tmp_path / "deflated.pt", compression=zipfile.ZIP_DEFLATED
    )
    convert_checkpoint(samples / "dp_cuda0.pt", tmp_path / "a.safetensors")
    paths = [samples / "dp_cuda0.pt", deflated, tmp_path / "a.safetensors"]
    kept = [load_portable(path, mmap=mmap) for path in paths]
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept += [load_portable(path, mmap=mmap) for path in paths for _ in range(5)]
    with pytest.raises(CheckpointError):
        load_portable(samples / "README.md")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_is_read_at_once_is_checked_against_the_checksums(tmp_path):
    path = saved({"a": torch.ones(500), "b": torch.ones(10)}, tmp_path)
    raw = bytearray(path.read_bytes())
    raw[oracle.payload_offsets(path)["saved/data/0"] + 7] ^= 1
    path.write_bytes(raw)
    with pytest.raises(MalformedCheckpoint, match=r"data/0: .*CRC-32"):
        load_portable(path, mmap=False)
    assert load_portable(path).keys() == {"a", "b"}


W = torch.tensor([1.0, 2, 3, 4])


def dcp_folder(folder: Path) -> Path:
    dcp.save({"w": W}, checkpoint_id=folder / "d", no_dist=True)
    return folder / "d" / "__0_0.distcp"


def misaligned(folder: Path) -> Path:
    """A torch archive as another writer makes it: its records lie where they come to lie."""
    with zipfile.ZipFile(saved({"w": W}, folder)) as plain:
        tree = plain.read("saved/data.pkl")
    for name in ("x", "xx", "xxx", "xxxx"):
        with zipfile.ZipFile(folder / "in.pt", "w") as archive:
            archive.writestr(f"{name}/data.pkl", tree)
            archive.writestr(f"{name}/data/0", W.numpy().tobytes())
        if oracle.payload_offsets(folder / "in.pt")[f"{name}/data/0"] % 4:
            break
    return folder / "in.pt"


def big_endian(folder: Path) -> Path:
    np.savez(folder / "in.npz", w=W.numpy().astype(">f4"))
    return folder / "in.npz"


def zip_in_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "in.zip", "w") as archive:
        archive.write(saved({"w": W}, folder), "policy.pth")
    return folder / "in.zip"


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("make", [dcp_folder, misaligned, big_endian, zip_in_zip])
def test_what_cannot_be_mapped_is_checked_too(make, mmap, tmp_path):
    damaged = make(tmp_path)
    path = damaged.parent if damaged.name.endswith(".distcp") else damaged
    only = "policy.pth" if make is zip_in_zip else None
    seen: list[Progress] = []
    loaded = load_portable(path, only=only, keys="keep", mmap=mmap, on_progress=seen.append)
    assert torch.equal(loaded["w"], W)
    nbytes = 32 if make is big_endian else 16  # what is turned around is checked before it is read
    assert [(item.done, item.total) for item in seen] == [(0, nbytes), (nbytes, nbytes)]
    values = W.numpy().astype(">f4" if make is big_endian else "<f4").tobytes()
    raw = damaged.read_bytes()
    assert raw.count(values) == 1
    damaged.write_bytes(raw.replace(values, values[:4] + b"\x40\x50" + values[6:]))
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        load_portable(path, only=only, keys="keep", mmap=mmap)


# ------------------------------------------------------------------------------------- map_location


def test_map_location_as_string_device_and_auto(samples):
    for where in ("cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)):
        same(
            load_portable(samples / "ddp_cuda3.pt", where, keys="keep"),
            oracle.load(samples / "ddp_cuda3.pt"),
        )
    loaded = load_portable(samples / "ddp_cuda3.pt", "auto")
    assert {str(tensor.device) for tensor in loaded.values()} == {best_device()}


def test_map_location_as_dict_maps_exact_tags(tmp_path):
    path = saved({"a": torch.ones(2)}, tmp_path, "cuda:99")
    same(load_portable(path, {"cuda:99": "cpu"}), OrderedDict(a=torch.ones(2)))
    with pytest.raises(DeviceUnavailable):
        load_portable(path, {"cuda": "cpu", "cuda:0": "cpu", "cuda:9": "cpu"})
    assert (
        load_portable(saved({"a": torch.ones(2)}, tmp_path), {"cuda:3": "cuda:0"})["a"].sum() == 2
    )


def test_map_location_as_a_callable_is_asked_as_torch_asks(tmp_path):
    base = torch.arange(8.0)
    tree = {
        "a": base[:3],
        "b": base[3:],
        "c": torch.ones(2),
        "d": torch.ones(4, dtype=torch.uint16),
    }
    path = saved(tree, tmp_path, "cuda:3")
    asked: dict[str, list[Any]] = {"ours": [], "theirs": []}

    def to_cpu(name: str) -> Any:
        def call(storage: Any, tag: str) -> Any:
            asked[name].append(
                (type(storage), storage.nbytes(), bytes(storage), str(storage.device), tag)
            )
            return storage.clone()

        return call

    found = load_portable(path, to_cpu("ours"))
    same(dict(found), torch.load(path, map_location=to_cpu("theirs")))
    assert asked["ours"] == asked["theirs"] and len(asked["ours"]) == 3
    plain = saved(tree, tmp_path)
    same(dict(load_portable(plain, lambda storage, tag: None)), tree)


def test_a_callable_that_gives_a_device_is_told_what_to_give(samples):
    with pytest.raises(OptionRefused, match=r"gave 'cpu', which is not a storage; return the"):
        load_portable(samples / "ddp_cuda3.pt", lambda storage, tag: "cpu")


@without_cuda
def test_a_callable_that_declines_leaves_the_tag(samples):
    with pytest.raises(DeviceUnavailable, match="cuda:3"):
        load_portable(samples / "ddp_cuda3.pt", lambda storage, tag: None)


@without_cuda
@pytest.mark.parametrize(
    "where", [None, "cuda:0", "cuda", torch.device("cuda:1"), {"cuda:3": "cuda:1"}], ids=repr
)
def test_a_device_that_is_not_here_says_what_to_do(samples, where):
    with pytest.raises(DeviceUnavailable, match=r"ddp_cuda3\.pt.*ask for cpu, or auto"):
        load_portable(samples / "ddp_cuda3.pt", where)


def test_following_the_tags_works_where_they_are_cpu(samples):
    same(
        load_portable(samples / "compiled.pt", None, keys="keep"),
        oracle.load(samples / "compiled.pt"),
    )


@pytest.mark.parametrize("where", ["meta", "disk", "cuda:x", "", 0, 1.5, b"cpu"])
def test_what_is_no_location_is_refused(samples, where):
    with pytest.raises(DeviceUnavailable):
        load_portable(samples / "compiled.pt", where)


# ---------------------------------------------------------------------------------------- load_into


class Net(nn.Module):
    """The model of the samples dp_cuda0, compiled, ddp_compiled and fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)])
        self.norm = nn.BatchNorm1d(4)


def compiled_part(model: Net) -> Net:
    model.norm = torch.compile(model.norm)
    return model


WRAPPERS = {
    "bare": lambda model: model,
    "DataParallel": nn.DataParallel,
    "compiled": torch.compile,
    "DataParallel of compiled": lambda model: nn.DataParallel(torch.compile(model)),
    "compiled DataParallel": lambda model: torch.compile(nn.DataParallel(model)),
    "a compiled part": compiled_part,
}
wrappers = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())


@wrappers
@pytest.mark.parametrize(
    "name", ["dp_cuda0.pt", "compiled.pt", "ddp_compiled.pt", "fp16.pt", "namespace_train.pt"]
)
def test_any_wrapping_of_the_file_loads_into_any_wrapping_of_the_model(samples, name, wrap):
    model = wrap(Net())
    result = load_into(model, samples / name)
    assert result.fits
    source = oracle.load(samples / name, weights_only=False)
    expected = oracle.bare_state_dict(source.get("state_dict", source))
    found = oracle.bare_state_dict(model.state_dict())
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key].to(found[key].dtype)) for key in found)


@wrappers
def test_safetensors_load_into_any_wrapping(samples, tmp_path, wrap):
    convert_checkpoint(samples / "dp_cuda0.pt", tmp_path / "a.safetensors")
    model = wrap(Net())
    assert load_into(model, tmp_path / "a.safetensors").fits
    found = oracle.bare_state_dict(model.state_dict())
    assert all(
        torch.equal(found[key], value)
        for key, value in safetensors.torch.load_file(tmp_path / "a.safetensors").items()
    )


@wrappers
def test_what_does_not_fit_is_refused_and_the_model_stays(tmp_path, wrap):
    source = nn.DataParallel(Net()).state_dict()
    del source["module.linears.0.bias"]
    source["module.extra.weight"] = torch.ones(2)
    source["module.linears.1.weight"] = torch.ones(3, 3)
    path = saved(source, tmp_path)
    model = wrap(Net())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        KeyMismatch,
        match=r"1 missing .*linears\.0\.bias.*extra\.weight.*linears\.1\.weight is \[3, 3\], the "
        r"model has \[16, 16\]",
    ):
        load_into(model, path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    result = load_into(model, path, strict=False)
    names = dict(zip(oracle.bare_keys(list(before)), before, strict=True))
    assert result.missing_keys == (names["linears.0.bias"],) and result.unexpected_keys == (
        "extra.weight",
    )
    assert [(one.key, one.model, one.checkpoint) for one in result.mismatched] == [
        (names["linears.1.weight"], (16, 16), (3, 3))
    ]
    after = model.state_dict()
    for key, value in source.items():
        bare = key.removeprefix("module.")
        if bare in names and bare != "linears.1.weight":
            assert torch.equal(after[names[bare]], value)
    for bare in ("linears.0.bias", "linears.1.weight"):
        assert torch.equal(after[names[bare]], before[names[bare]])


@wrappers
def test_a_lost_counter_is_missing_because_metadata_says_that_there_was_one(tmp_path, wrap):
    """BatchNorm makes a counter of its own for files older than the counter; `_metadata` tells
    which files are.
    """
    source = nn.DataParallel(Net()).state_dict()
    del source["module.norm.num_batches_tracked"]
    with pytest.raises(KeyMismatch, match="num_batches_tracked"):
        load_into(wrap(Net()), saved(source, tmp_path))


@wrappers
def test_a_file_older_than_the_counter_loads_as_torch_loads_it(tmp_path, wrap):
    source = {
        key: value
        for key, value in Net().state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    Net().load_state_dict(source, strict=True)
    model = wrap(Net())
    assert load_into(model, saved(source, tmp_path)).missing_keys == ()
    assert torch.equal(
        oracle.bare_state_dict(model.state_dict())["linears.0.bias"], source["linears.0.bias"]
    )


def test_old_names_that_a_module_still_understands_load_as_torch_loads_them(tmp_path):
    old = nn.utils.weight_norm(nn.Linear(3, 2)) if hasattr(nn.utils, "weight_norm") else None
    if old is None:
        pytest.skip("this torch no longer has the old weight_norm")
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    model.load_state_dict(old.state_dict(), strict=True)
    fresh = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    assert load_into(fresh, saved(old.state_dict(), tmp_path)).fits
    assert torch.equal(fresh.weight, model.weight)


def test_lazy_modules_take_their_shapes_from_the_file(tmp_path):
    source = nn.Linear(5, 3)
    model = nn.LazyLinear(3)
    assert load_into(model, saved(source.state_dict(), tmp_path)).fits
    assert torch.equal(model.weight, source.weight)


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel, torch.compile])
def test_extra_state_is_carried(tmp_path, wrap):
    source = WithExtra()
    source.seen = 7
    path = saved(nn.DataParallel(source).state_dict(), tmp_path)
    model = WithExtra()
    assert load_into(wrap(model), path).fits
    assert model.seen == 7 and torch.equal(model.fc.weight, source.fc.weight)


class Inner(nn.Module):
    """A model whose own part is called ``module``; all of its keys begin with it."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        if head:
            self.head = nn.Linear(2, 2)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("source", ["bare", "DataParallel", "compiled"])
@pytest.mark.parametrize("target", ["bare", "DataParallel", "compiled"])
def test_a_model_with_a_part_called_module_loads(tmp_path, head, source, target):
    values = Inner(head)
    path = saved(WRAPPERS[source](values).state_dict(), tmp_path)
    model = Inner(head)
    assert load_into(WRAPPERS[target](model), path).fits
    assert torch.equal(model.module.weight, values.module.weight)


@pytest.mark.parametrize(
    "value, assign, what",
    [
        (torch.eye(2).to_sparse(), False, r"weight: is torch\.sparse_coo, the model's is torch\."),
        (torch.quantize_per_tensor(torch.eye(2), 1, 0, torch.qint8), False, "weight: is quantized"),
        ([[1.0, 0.0], [0.0, 1.0]], False, "weight: is of Python's type list"),
        (2.5, True, "weight: is of Python's type float"),
        (torch.arange(4).reshape(2, 2), True, r"weight: is of torch\.int64, .* requires grad"),
    ],
)
def test_what_torch_does_not_take_is_refused_and_the_model_stays(value, assign, what, tmp_path):
    """torch raises only after it has loaded the others."""
    torch.save({"bias": torch.full((2,), 7.0), "weight": value}, tmp_path / "in.pt")
    model = nn.Linear(2, 2)
    before = {key: kept.clone() for key, kept in model.state_dict().items()}
    with pytest.raises(RefusedObject, match=what):
        load_into(model, tmp_path / "in.pt", assign=assign)
    assert all(torch.equal(kept, before[key]) for key, kept in model.state_dict().items())


@pytest.mark.parametrize("made, what", [("expanded", "one value"), ("inference", "inference mode")])
def test_a_tensor_that_torch_does_not_write_to_is_refused_and_the_model_stays(made, what, tmp_path):
    model = nn.Linear(2, 2)
    before = model.bias.clone()
    with torch.inference_mode(made == "inference"):
        model.register_buffer("fixed", torch.zeros(1).expand(2))
        if made == "inference":
            model.fixed = torch.zeros(2)
    torch.save({**model.state_dict(), "bias": torch.full((2,), 7.0)}, tmp_path / "in.pt")
    with pytest.raises(RefusedObject, match=f"fixed: .*{what}.*assign=True"):
        load_into(model, tmp_path / "in.pt")
    assert torch.equal(model.bias, before)
    assert load_into(model, tmp_path / "in.pt", assign=True).fits


@pytest.mark.parametrize("is_zip", [True, False])
def test_the_default_device_of_torch_is_not_asked(is_zip, tmp_path):
    """Sparse tensors went there, and so what is not mapped could not be filled."""
    values = {"w": torch.rand(3), "s": torch.eye(3).to_sparse(), "o": {"step": torch.tensor(3.0)}}
    torch.save(values, tmp_path / "in.pt", _use_new_zipfile_serialization=is_zip)
    torch.save({"w": values["w"]}, tmp_path / "dense.pt")
    with torch.device("meta"):
        loaded = load_portable(tmp_path / "in.pt", whole=True)
        convert_checkpoint(tmp_path / "dense.pt", tmp_path / "dcp", to="dcp")
    assert torch.equal(loaded["w"], values["w"])
    assert torch.equal(loaded["s"].to_dense(), torch.eye(3))
    assert loaded["o"]["step"] == 3
    assert torch.equal(load_portable(tmp_path / "dcp")["w"], values["w"])


@pytest.mark.parametrize("prefix", ["model.", "net.encoder.", "module.model.", "model._orig_mod."])
def test_one_other_prefix_is_fitted_both_ways(tmp_path, prefix):
    source = Net().state_dict()
    path = saved(OrderedDict((prefix + key, value) for key, value in source.items()), tmp_path)
    model = Net()
    assert load_into(model, path).fits
    assert torch.equal(model.linears[2].weight, source["linears.2.weight"])
    holder = nn.Module()
    holder.net = nn.Module()
    holder.net.encoder = Net()
    assert load_into(holder, saved(source, tmp_path)).fits
    assert torch.equal(holder.net.encoder.linears[2].weight, source["linears.2.weight"])


def test_tied_weights_stay_tied(samples):
    model = nn.Module()
    model.embed, model.norm, model.lm_head = (
        nn.Embedding(32, 16),
        nn.LayerNorm(16),
        nn.Linear(16, 32, bias=False),
    )
    model.lm_head.weight = model.embed.weight
    assert load_into(model, samples / "tied.pt").fits
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, oracle.load(samples / "tied.pt")["embed.weight"])


def test_assigning_takes_the_tensors_of_the_file(samples):
    model = Net()
    assert load_into(model, samples / "fp16.pt", assign=True).fits
    assert model.linears[0].weight.dtype is torch.float16 and isinstance(
        model.linears[0].weight, nn.Parameter
    )
    copied = Net()
    load_into(copied, samples / "fp16.pt")
    assert copied.linears[0].weight.dtype is torch.float32


def test_a_part_is_chosen_with_only(tmp_path):
    first, second = Net(), Net()
    path = saved(
        {"model": first.state_dict(), "ema": nn.DataParallel(second).state_dict()}, tmp_path
    )
    model = Net()
    with pytest.raises(AmbiguousStateDict):
        load_into(model, path)
    load_into(model, path, only="ema")
    assert torch.equal(model.linears[0].weight, second.linears[0].weight)


# ------------------------------------------------------------------------------------ save_portable


@given(trees.trees())
@thorough
def test_a_saved_tree_is_what_torch_would_have_saved(drawn):
    with tempfile.TemporaryDirectory() as folder:
        theirs = oracle.load(saved(drawn.tree, Path(folder)))
        save_portable(drawn.tree, Path(folder) / "ours.pt", keys="keep", fsync=False)
        found = oracle.load(Path(folder) / "ours.pt")
        for one, other in zip(oracle.flatten(found), oracle.compacted(theirs), strict=True):
            assert one == other
        assert oracle.overlaps(found) == oracle.overlaps(theirs)


@given(trees.state_dicts(plain=True))
@quick
def test_a_saved_state_dict_has_bare_keys_and_the_asked_tag(drawn):
    with tempfile.TemporaryDirectory() as folder:
        save_portable(drawn.tree, Path(folder) / "ours.pt", device="cuda:7", fsync=False)
        assert set(oracle.tags(Path(folder) / "ours.pt")) == {"cuda:7"}
        source = oracle.load(saved(oracle.bare_state_dict(drawn.tree), Path(folder)))
        found = oracle.load(Path(folder) / "ours.pt")
        for one, other in zip(oracle.flatten(found), oracle.compacted(source), strict=True):
            assert one == other
        same(load_portable(Path(folder) / "ours.pt", keys="keep"), found)


def test_a_training_checkpoint_is_saved_whole(tmp_path):
    model = nn.DataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters())
    loss = sum(parameter.square().sum() for parameter in model.parameters())
    loss.backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    tree = {
        "epoch": np.int64(3),
        "best": np.float32(0.5),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "names": defaultdict(list, {"a": [1]}),
    }
    save_portable(tree, tmp_path / "ours.pt")
    found = oracle.load(tmp_path / "ours.pt")
    same(found["model"], oracle.bare_state_dict(tree["model"]))
    same(found["optimizer"], tree["optimizer"])
    assert (found["epoch"], found["best"], found["names"]) == (3, 0.5, {"a": [1]})
    assert load_into(Net(), tmp_path / "ours.pt").fits


def test_views_of_other_dtypes_may_share_a_storage(tmp_path):
    base = torch.arange(8.0)
    tree = {
        "floats": base,
        "integers": base.view(torch.int32),
        "bytes": base.view(torch.uint8)[4:9],
    }
    with pytest.raises(RuntimeError):
        torch.save(tree, tmp_path / "theirs.pt")
    save_portable(tree, tmp_path / "ours.pt")
    same(oracle.load(tmp_path / "ours.pt"), tree)


def test_bytes_of_every_value_are_kept_apart(tmp_path):
    tree = {
        "w": torch.ones(1),
        "all": [bytes([number]) for number in range(256)],
        b"key": b"",
        b"other": bytearray(b"x"),
    }
    save_portable(tree, tmp_path / "ours.pt")
    same(oracle.load(tmp_path / "ours.pt"), tree)


Point = namedtuple("Point", "x y")


REFUSED = {
    "range": lambda: range(3),
    "function": lambda: print,
    "object": object,
    "module": lambda: nn.Linear(1, 1),
    "path": lambda: Path("a"),
    "array": lambda: np.ones(2),
    "meta": lambda: torch.ones(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)]),
    "frozen set": lambda: frozenset([object()]),
    "an integer for which weights_only lacks the opcode": lambda: 1 << 3000,
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_saved_portably_is_refused_with_its_place(make, tmp_path):
    with pytest.raises(RefusedObject, match=r"deep\.1: "):
        save_portable({"w": torch.ones(2), "deep": ["x", make()]}, tmp_path / "ours.pt")
    assert list(tmp_path.iterdir()) == []


def test_who_gives_a_model_is_told_of_its_state_dict(tmp_path):
    with pytest.raises(
        RefusedObject, match=r"Linear cannot .*; save what its state_dict\(\) gives"
    ):
        save_portable(nn.Linear(1, 1), tmp_path / "ours.pt")


def test_named_tuples_become_tuples(tmp_path):
    save_portable({"w": torch.ones(1), "point": Point(1, torch.ones(2))}, tmp_path / "ours.pt")
    same(oracle.load(tmp_path / "ours.pt")["point"], (1, torch.ones(2)))


def test_an_existing_file_is_replaced_only_with_force(tmp_path):
    save_portable({"a": torch.ones(1)}, tmp_path / "ours.pt")
    with pytest.raises(OutputRefused, match="exists"):
        save_portable({"a": torch.zeros(1)}, tmp_path / "ours.pt")
    assert load_portable(tmp_path / "ours.pt")["a"] == 1
    save_portable({"a": torch.zeros(1)}, tmp_path / "ours.pt", force=True)
    assert load_portable(tmp_path / "ours.pt")["a"] == 0


def test_a_loaded_file_can_be_saved_over_itself(tmp_path):
    path = tmp_path / "ours.pt"
    save_portable({"a": torch.arange(100_000)}, path)
    loaded = load_portable(path)
    save_portable(loaded, path, force=True)
    assert torch.equal(load_portable(path)["a"], torch.arange(100_000)) and torch.equal(
        loaded["a"], torch.arange(100_000)
    )


def test_a_cast_and_a_format_can_be_asked_for(tmp_path):
    state_dict = {"module.a": torch.tensor([1e38, 1.0]), "module.n": torch.tensor(3)}
    result = save_portable(state_dict, tmp_path / "ours", dtype="f16", to="safetensors")
    found = safetensors.torch.load_file(tmp_path / "ours")
    assert found["a"].dtype is torch.float16 and found["n"].dtype is torch.int64
    assert dict(result.overflowed) == {"a": 1}


def test_what_grad_and_graph_surround_is_saved_as_its_values(tmp_path):
    leaf = torch.ones(3, requires_grad=True)
    tree = {"leaf": leaf, "result": leaf * 2, "detached": leaf.detach(), "inference": torch.ones(2)}
    save_portable(tree, tmp_path / "ours.pt")
    found = oracle.load(tmp_path / "ours.pt")
    assert (
        found["result"].requires_grad
        and found["result"].is_leaf
        and found["result"].tolist() == [2, 2, 2]
    )
    assert found["leaf"].data_ptr() == found["detached"].data_ptr()


def test_a_damaged_mapped_tensor_is_found_when_it_is_verified(tmp_path):
    """torch says where a tensor's bytes lie; one of them is flipped."""
    tree = {"a": torch.arange(64.0), "b": torch.ones(3)}
    path = tmp_path / "a.pt"
    torch.save(tree, path)
    seen: list[Progress] = []
    assert load_portable(path, verify=True, on_progress=seen.append)["b"].tolist() == [1, 1, 1]
    assert (seen[-1].done, seen[-1].total) == (64 * 4 + 12, 64 * 4 + 12)
    data = bytearray(path.read_bytes())
    data[data.find(tree["a"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    assert torch.equal(load_portable(path)["b"], tree["b"])  # mapped: nothing is read ahead
    assert not torch.equal(load_portable(path)["a"], tree["a"])
    for how in ({"verify": True}, {"mmap": False}):
        with pytest.raises(MalformedCheckpoint, match="CRC-32"):
            load_portable(path, **how)


# ------------------------------------------------------------------- the words of a conversion


def of_words() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    weight = torch.randn(6, 4)
    return {
        "net.weight": weight, "net.tied": weight, "net.turned": weight.t(), "net.row": weight[2],
        "net.norm": torch.randn(4), "net.count": torch.arange(3), "head.bias": torch.randn(4),
        "head.scale": nn.Parameter(torch.randn(4)), "head.wide": torch.tensor(
            [1e300, 1e5, 70000, 448.1, 464, -1e6, torch.nan, torch.inf, 1e-8, 1.0000001],
            dtype=torch.float64,
        ),
    }  # fmt: skip


WORDS: dict[str, dict[str, Any]] = {
    "torch's type": {"dtype": torch.bfloat16},
    "its name": {"dtype": "bf16"},
    "numpy's type": {"dtype": np.float16},
    "a dtype of numpy": {"dtype": np.dtype("f2")},
    "a type of ml_dtypes": {"dtype": ml_dtypes.float8_e4m3fn},
    "all but some": {"dtype": torch.float16, "keep_dtype": ["*.norm", "head.*"]},
    "some": {"cast": {"head.*": torch.float64, "*.norm": "bf16"}},
    "a dict of names": {"rename": {"net.": "model.", "head.bias": "b=c"}},
    "pairs of names": {"rename": [("net.", "model."), "head.=h."]},
    "patterns": {"regex": {r"^(\w+)\.(\w+)$": r"\2.\1"}},
    "a choice": {"include": "net.*", "exclude": ["*.count", "*.norm"]},
    "prefixes": {"strip_prefix": "net.", "add_prefix": "model."},
    "a part left out": {"drop": "head.bias"},
    "a function": {"keys": lambda key: None if key.endswith("count") else key.upper()},
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_the_words_of_a_conversion_load_what_it_writes(words, whole, tmp_path):
    torch.save(of_words(), tmp_path / "m.pt")
    convert_checkpoint(tmp_path / "m.pt", tmp_path / "o.pt", **words)
    expected = oracle.load(tmp_path / "o.pt")
    loaded = load_portable(tmp_path / "m.pt", whole=whole, **words)
    assert [*loaded] == [*expected] and loaded.keys() != () and len(loaded) > 3
    for key, value in expected.items():
        same(loaded[key], value)
        assert loaded[key].dtype is value.dtype and loaded[key].stride() == value.stride()
        assert loaded[key].requires_grad == value.requires_grad and type(loaded[key]) is type(value)
    storages = {key: value.untyped_storage().data_ptr() for key, value in loaded.items()}
    shared = {key: value.untyped_storage().data_ptr() for key, value in expected.items()}
    for one in loaded:
        for other in loaded:
            assert (storages[one] == storages[other]) == (shared[one] == shared[other])


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32])
def test_dequantised_weights_are_those_that_a_conversion_writes(dtype, tmp_path):
    found = {
        "net.w.weight": torch.randn(256, 128).to(torch.float8_e4m3fn),
        "net.w.weight_scale_inv": torch.rand(2, 1) + 0.5, "net.b": torch.randn(3),
    }  # fmt: skip
    torch.save(found, tmp_path / "m.pt")
    words: dict[str, Any] = {"dequantize": True, "dtype": dtype, "strip_prefix": "net."}
    convert_checkpoint(tmp_path / "m.pt", tmp_path / "o.pt", **words)
    loaded, expected = load_portable(tmp_path / "m.pt", **words), oracle.load(tmp_path / "o.pt")
    assert [*loaded] == ["w.weight", "b"]
    same(dict(loaded), dict(expected))


def test_the_words_of_a_load_are_those_of_options():
    known = {item.name: item.type for item in dataclasses.fields(OptionWords)}
    for name, kind in TensorWords.__annotations__.items():
        assert known[name] == kind.__forward_arg__


def test_a_word_of_no_load_is_refused(tmp_path):
    torch.save(of_words(), tmp_path / "m.pt")
    for match, words in (
        ("unknown option 'dtpe'; did you mean dtype", {"dtpe": "bf16"}),
        ("unknown option 'to'", {"to": "torch"}),
        ("rename=3 is not OLD=NEW", {"rename": 3}),
        ("regex=.* is not PATTERN=>REPLACEMENT", {"regex": {"": "x"}}),
        ("is not a floating dtype", {"dtype": torch.int8}),
        ("is not a floating dtype", {"cast": {"*": np.int64}}),
        ("gave 3, which is not a key", {"keys": lambda key: 3}),
        ("both become 'x'", {"keys": lambda key: "x"}),
        ("matches no key", {"rename": {"none": "x"}}),
        ("matches no floating tensor", {"cast": {"none": "f16"}}),
    ):
        with pytest.raises(CheckpointError, match=match):
            load_portable(tmp_path / "m.pt", **words)


def test_codes_are_not_cast_away_from_their_scales(tmp_path):
    found = {
        "w": torch.ones(128, 128).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1),
        "b": torch.ones(3),
    }  # fmt: skip
    torch.save(found, tmp_path / "m.pt")
    with pytest.raises(RefusedObject) as raised:
        convert_checkpoint(tmp_path / "m.pt", tmp_path / "o.pt", dtype="bf16")
    with pytest.raises(RefusedObject) as again:
        load_portable(tmp_path / "m.pt", dtype="bf16")
    assert (again.value.what, again.value.where) == (raised.value.what, raised.value.where)


OF_PARTS = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
    "channels": lambda x: torch.quantize_per_channel(
        x, torch.rand(4) + 0.1, torch.arange(4), 0, torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to", ["torch", "safetensors", "npz"])
@pytest.mark.parametrize("make", OF_PARTS.values(), ids=OF_PARTS)
def test_what_is_saved_is_what_a_conversion_makes_of_it(make, to, tmp_path):
    found = {"w": make(torch.randn(4, 6)), "x": torch.ones(2)}
    torch.save(found, tmp_path / "m.pt")
    told = []
    for save in (
        lambda output: save_portable(found, output, to=to),
        lambda output: convert_checkpoint(tmp_path / "m.pt", output, to=to),
    ):
        buffer = io.BytesIO()
        try:
            save(buffer)
        except RefusedObject as error:
            told.append((error.what, error.where, error.hint))
        else:
            told.append(buffer.getvalue())
    assert told[0] == told[1]
    if to == "torch":
        same(torch.load(io.BytesIO(told[0]))["w"], found["w"])


def test_what_is_saved_has_metadata_and_shards(tmp_path):
    found = {"a": torch.ones(300), "b": torch.ones(300)}
    save_portable(
        found, f"{tmp_path}/folder/", metadata={"license": "mit"}, max_shard_size="1500",
        to="safetensors",
    )  # fmt: skip
    names = sorted(path.name for path in (tmp_path / "folder").glob("*.safetensors"))
    assert len(names) == 2
    for name in names:
        with safe_open(tmp_path / "folder" / name, "pt") as theirs:
            assert theirs.metadata()["license"] == "mit"
    same(dict(load_portable(tmp_path / "folder")), found)
