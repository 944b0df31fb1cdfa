"""Legacy files (`torch.save` before 1.6): `torch.load` sees in the output what it sees in the
source.
"""

from __future__ import annotations

import io
import os
import random
import struct
import subprocess
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file

from ckptconv import (
    CheckpointError,
    convert_checkpoint,
    diff_checkpoints,
    load_portable,
    open_checkpoint,
    plan_conversion,
    scan_checkpoint,
)
from ckptconv.io.files import FileSource
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.tensors.stream import iter_chunks
from helpers import old_torch, oracle, trees
from helpers.examples import examples, some
from helpers.old_torch import (
    Bytestring,
    Made,
    Name,
    Persistent,
    blob,
    legacy,
    pickled,
    storage,
    write,
)
from helpers.program import idle_rss, run_process

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
KEEP: dict[str, Any] = {"keys": "keep", "fsync": False, "force": True}

REBUILD = Name("torch._utils", "_rebuild_tensor")
REBUILD_V2 = Name("torch._utils", "_rebuild_tensor_v2")
ORDERED_DICT = Name("collections", "OrderedDict")
FLOATS = struct.pack("<8f", *range(8))


def save(tree: Any, path: Path) -> Path:
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    return path


def _is_loaded(dtype: torch.dtype) -> bool:
    file = io.BytesIO()
    torch.save(
        trees.make(dtype, torch.zeros(16, dtype=torch.uint8), 0, (1,), (1,)),
        file,
        _use_new_zipfile_serialization=False,
    )
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except AttributeError:
        return False
    return True


TYPED = [dtype for dtype in trees.DTYPES if _is_loaded(dtype)]
"""The dtypes that torch loads from a legacy file: those with a storage class."""


def vector(
    key: str = "0", numel: int = 8, view: Any = None, offset: int = 0, size: int = 4
) -> Made:
    """A float tensor as torch 0.3 pickled it."""
    return Made(REBUILD, (storage("FloatStorage", key, "cpu", numel, view), offset, (size,), (1,)))


def assert_same(source: Path, output: Path) -> None:
    """torch sees the same tree in both, after what compaction may do."""
    assert oracle.flatten(oracle.load(output)) == oracle.compacted(oracle.load(source))
    assert oracle.overlaps(oracle.load(output)) == oracle.overlaps(oracle.load(source))


def converted(source: Path, **options: Any) -> Path:
    output = source.with_name("output.pt")
    convert_checkpoint(source, output, verify=True, **{**KEEP, **options})
    return output


# -------------------------------------------------------------------------------- what torch writes


@given(trees.trees(TYPED))
@settings(max_examples=examples(100), deadline=None)
def test_a_tree_is_written_as_it_was(drawn):
    with tempfile.TemporaryDirectory() as folder:
        source = save(drawn.tree, Path(folder) / "old.pt")
        assert_same(source, converted(source))


@given(trees.state_dicts(TYPED))
@settings(max_examples=examples(50), deadline=None)
def test_a_state_dict_is_loaded_as_torch_loads_it(drawn):
    with tempfile.TemporaryDirectory() as folder:
        source = save(drawn.tree, Path(folder) / "old.pt")
        for mmap in (True, False):
            found = load_portable(source, keys="keep", mmap=mmap)
            assert oracle.flatten(found) == oracle.flatten(oracle.load(source))


@pytest.mark.parametrize("name", [r"torsh.FloatStorage", r"torch.BloatStorage"])
def test_a_storage_of_a_class_that_torch_does_not_have_is_refused(name, tmp_path):
    path = tmp_path / "in.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    forged = name.replace(".", "\n").encode()
    path.write_bytes(path.read_bytes().replace(b"torch\nFloatStorage", forged))
    with pytest.raises(CheckpointError, match=f"has the unknown storage class {name}"):
        load_portable(path)


def test_safetensors_has_the_values(tmp_path):
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.arange(12).reshape(3, 4).t(),
        "c": torch.ones(2, dtype=torch.bfloat16),
    }
    convert_checkpoint(
        save(tensors, tmp_path / "old.bin"), tmp_path / "new.safetensors", fsync=False, verify=True
    )
    found = load_file(tmp_path / "new.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], value) for key, value in tensors.items())


def test_tags_are_kept_mapped_or_replaced(tmp_path):
    with oracle.tagged(lambda _: "cuda:3"):
        source = save({"module.w": torch.ones(4)}, tmp_path / "old.pt")
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.format == "torch legacy"
        assert [ref.location for _, ref in checkpoint.tensors()] == ["cuda:3"]
    assert oracle.tags(converted(source)) == ["cpu"]
    assert oracle.tags(converted(source, device="keep")) == ["cuda:3"]
    assert list(oracle.load(converted(source, keys="strip"))) == ["w"]


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_any_protocol_of_the_pickles_inside_is_read(protocol, tmp_path):
    tree = {"w": torch.arange(5.0), "epoch": 3, "text": "é", "bytes": b"\xff\0"}
    torch.save(
        tree, tmp_path / "old.pt", _use_new_zipfile_serialization=False, pickle_protocol=protocol
    )
    source = tmp_path / "old.pt"
    assert oracle.flatten(oracle.load(converted(source))) == oracle.flatten(
        oracle.load(source, weights_only=False)
    )


@pytest.mark.parametrize("is_legacy", [True, False])
def test_protocol_0_is_refused_by_name_as_torch_refuses_it(is_legacy, tmp_path):
    path = tmp_path / "in.pt"
    torch.save(
        {"w": torch.ones(2)}, path, _use_new_zipfile_serialization=not is_legacy, pickle_protocol=0
    )
    with pytest.raises(AssertionError, match="must be a tuple"):
        torch.load(path, weights_only=False)
    with pytest.raises(MalformedCheckpoint, match=r"protocol 0.*save it again"):
        open_checkpoint(path)


def test_the_pickles_of_protocol_1_are_scanned_and_compared(tmp_path):
    for name, tree in (
        ("in.pt", {"w": torch.ones(2)}),
        ("bad.pt", {"w": torch.ones(2), "x": subprocess.run}),
    ):
        torch.save(tree, tmp_path / name, _use_new_zipfile_serialization=False, pickle_protocol=1)
    assert scan_checkpoint(tmp_path / "in.pt").level == "plain"
    assert scan_checkpoint(tmp_path / "bad.pt").level == "dangerous"
    torch.save({"w": torch.ones(2)}, tmp_path / "new.pt")
    assert diff_checkpoints(tmp_path / "in.pt", tmp_path / "new.pt").tensors == 1


def test_parameters_and_bare_storages_survive(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(3))
    source = save(
        {"p": parameter, "frozen": torch.nn.Parameter(torch.ones(2), False), "again": [parameter]},
        tmp_path / "old.pt",
    )
    assert_same(source, converted(source))
    values = torch.arange(3.0)
    source = save({"w": values, "s": values.storage()}, tmp_path / "old.pt")
    assert_same(source, converted(source))


@pytest.mark.parametrize("dtype", [dtype for dtype in trees.DTYPES if dtype not in TYPED], ids=str)
def test_dtypes_that_torch_itself_cannot_load_again_are_read(dtype, tmp_path):
    """Their storages are untyped, which the legacy reader of torch 2.13 stumbles over."""
    tensor = trees.make(dtype, trees.random_bytes(1, 64, dtype), 1, (2,), (2,))
    source = save({"w": tensor}, tmp_path / "old.pt")
    with pytest.raises(AttributeError):
        oracle.load(source)
    found = oracle.load(converted(source))["w"]
    assert found.dtype == dtype
    assert oracle.stored_bytes(found) == oracle.stored_bytes(tensor)


def test_whole_modules_are_their_state_dicts(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    source = save({"model": model}, tmp_path / "old.pt")
    found, expected = load_portable(source, keys="keep"), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_pickles_longer_than_the_first_window_are_read(tmp_path):
    name = "x" * 600
    tree = {f"{name}.{index}.weight": torch.full((1,), float(index)) for index in range(4000)}
    source = save(tree, tmp_path / "old.pt")
    assert source.stat().st_size > 5 << 19
    found = load_portable(source, keys="keep")
    assert list(found) == list(tree)
    assert torch.equal(torch.cat(list(found.values())), torch.arange(4000.0))


# --------------------------------------------------------------------------- what older torch wrote


def test_views_of_storages_keep_sharing_with_it(tmp_path):
    tree = {
        "all": Made(REBUILD, (storage("FloatStorage", "7", "cpu", 8), 0, (8,), (1,))),
        "view": vector("7", view=("8", 2, 5), offset=1),
        "same": Made(
            REBUILD, (storage("FloatStorage", "7", "cpu", 8, ("9", 0, 8)), 0, (2, 4), (4, 1))
        ),
    }
    source = write(tmp_path / "old.pt", legacy(tree, ("7",), blob(8, FLOATS)))
    assert oracle.load(source)["view"].tolist() == [3, 4, 5, 6]
    output = oracle.load(converted(source))
    assert {key: value.flatten().tolist() for key, value in output.items()} == {
        key: value.flatten().tolist() for key, value in oracle.load(source).items()
    }
    assert len({value.untyped_storage().data_ptr() for value in output.values()}) == 1


@pytest.mark.parametrize(
    "view", [("8", 5, 4), ("8", -1, 2), ("8", 0, 9), ("8", 0), 5, ("8", 0, 1.0)]
)
def test_a_view_outside_of_its_storage_is_refused(view, tmp_path):
    source = write(
        tmp_path / "old.pt", legacy({"w": vector(view=view, size=1)}, ("0",), blob(8, FLOATS))
    )
    with pytest.raises(MalformedCheckpoint, match="view of it"):
        open_checkpoint(source)


def test_a_tensor_beyond_its_view_is_refused_as_torch_refuses_it(tmp_path):
    source = write(
        tmp_path / "old.pt",
        legacy({"w": vector(view=("8", 2, 3), size=4)}, ("0",), blob(8, FLOATS)),
    )
    with pytest.raises(MalformedCheckpoint, match="beyond the view"):
        open_checkpoint(source)
    with pytest.raises(RuntimeError):
        oracle.load(source)


def test_python_2_pickles_are_read(tmp_path):
    tree = Made(
        ORDERED_DICT,
        ([[Bytestring(b"module.w"), vector(Bytestring(b"0"))], [Bytestring(b"caf\xc3\xa9"), 2]],),
    )
    source = write(tmp_path / "old.pt", legacy(tree, [Bytestring(b"0")], blob(8, FLOATS)))
    assert_same(source, converted(source))
    assert list(load_portable(source, keys="keep")) == ["module.w", "café"]


@pytest.mark.parametrize("size", [(2, 3), Made(Name("torch", "Size"), ((2, 3),))])
@pytest.mark.parametrize("cls", ["FloatTensor", "cuda.FloatTensor"])
def test_tensors_made_by_their_state_are_read(cls, size, tmp_path):
    module, _, name = f"torch.{cls}".rpartition(".")
    kind, tag = cls.replace("Tensor", "Storage"), "cuda:0" if "cuda" in cls else "cpu"
    tensor = Made(Name(module, name), (), (storage(kind, "0", tag, 8), 1, size, (3, 1)))
    tree = Made(ORDERED_DICT, ([["w", tensor], ["tied", tensor], ["epoch", 3]],))
    source = write(tmp_path / "old.pt", legacy({"state_dict": tree}, ("0",), blob(8, FLOATS)))
    output = oracle.load(converted(source))["state_dict"]
    assert output["w"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert output["tied"] is output["w"]
    if cls == "FloatTensor":
        assert_same(source, converted(source))


PARAMETER = Name("torch.nn.parameter", "Parameter")
DATA = Made(
    Name("torch", "FloatTensor"), (), (storage("FloatStorage", "0", "cpu", 8), 1, (3,), (1,))
)
PARAMETERS = {
    "over a tensor": (Made(PARAMETER, (vector(),)), True),
    "frozen": (Made(PARAMETER, (vector(), False)), False),
    "state behind": (Made(PARAMETER, (vector(),), (False, False, Made(ORDERED_DICT))), False),
    "state of a tensor by state": (
        Made(PARAMETER, (DATA,), (True, False, Made(ORDERED_DICT))),
        True,
    ),
    "all in the state": (
        Made(PARAMETER, (), (vector(), None, Made(ORDERED_DICT), True, False), new=True),
        True,
    ),
    "a variable": (
        Made(Name("torch.autograd.variable", "Variable"), (vector(),), (True, False, None)),
        True,
    ),
}


@pytest.mark.parametrize("form", PARAMETERS)
def test_parameters_of_old_torch_are_read(form, tmp_path):
    parameter, requires_grad = PARAMETERS[form]
    source = write(
        tmp_path / "old.pt", legacy({"w": parameter, "again": [parameter]}, ("0",), blob(8, FLOATS))
    )
    output = oracle.load(converted(source))
    assert output["w"] is output["again"][0]
    assert output["w"].tolist() == ([1, 2, 3] if "by state" in form else [0, 1, 2, 3])
    assert output["w"].requires_grad == requires_grad
    assert isinstance(output["w"], torch.nn.Parameter) == (form != "a variable")


def test_a_state_that_reaches_beyond_its_storage_is_refused(tmp_path):
    tensor = Made(
        Name("torch", "FloatTensor"), (), (storage("FloatStorage", "0", "cpu", 8), 1, (8,), (1,))
    )
    with pytest.raises(MalformedCheckpoint, match="needs 36 bytes"):
        open_checkpoint(write(tmp_path / "old.pt", legacy([tensor], ("0",), blob(8, FLOATS))))


def test_a_module_saved_with_its_source_text_is_a_state_dict(tmp_path):
    cls = Persistent(
        ("module", Name("my.models", "Net"), "/home/me/net.py", "class Net(nn.Module): ...")
    )
    empty = Made(ORDERED_DICT)
    inner = {
        "_parameters": Made(ORDERED_DICT, ([["w", Made(PARAMETER, (vector(),))]],)),
        "_buffers": empty,
        "_modules": empty,
    }
    source = write(
        tmp_path / "old.pt", legacy(Made(cls, (), inner, new=True), ("0",), blob(8, FLOATS))
    )
    assert load_portable(source)["w"].tolist() == [0, 1, 2, 3]
    with open_checkpoint(source) as checkpoint:
        assert "my.models.Net" in checkpoint.notes[0]


def test_the_payload_is_little_endian_whatever_the_host_was(tmp_path):
    """torch swaps when it writes, and ignores what the file says of its host."""
    tree = {"w": vector()}
    source = write(
        tmp_path / "old.pt", legacy(tree, ("0",), blob(8, FLOATS), system={"little_endian": False})
    )
    assert oracle.load(source)["w"].tolist() == [0, 1, 2, 3]
    assert_same(source, converted(source))


# ------------------------------------------------------------------------------- broken and hostile

GOOD = legacy({"w": vector()}, ("0",), blob(8, FLOATS))
BROKEN = {
    "more elements": (
        legacy({"w": vector()}, ("0",), blob(9, FLOATS)),
        "has 9 elements where the pickle says 8",
    ),
    "a huge count": (
        legacy({"w": vector()}, ("0",), blob(1 << 61, FLOATS)),
        "elements where the pickle says 8",
    ),
    "a negative count": (legacy({"w": vector()}, ("0",), blob(-1, FLOATS)), "has -1 elements"),
    "a larger claim": (
        legacy({"w": vector(numel=9)}, ("0",), blob(9, FLOATS)),
        "lie beyond the end of the file",
    ),
    "a giant claim": (
        legacy({"w": vector(numel=1 << 58)}, ("0",), blob(8, FLOATS)),
        "lie beyond the end of the file",
    ),
    "a claim that no one can print": (
        legacy({"w": vector(numel=10**5000)}, ("0",)),
        "names and sizes",
    ),
    "no storage": (legacy({"w": vector()}), "names a storage that the file does not hold"),
    "another storage": (
        legacy({"w": vector()}, ("1",), blob(8, FLOATS)),
        "the tree does not name it",
    ),
    "a storage twice": (
        legacy({"w": vector()}, ("0", "0"), blob(8, FLOATS) * 2),
        "names a storage twice",
    ),
    "keys that are a text": (
        legacy({"w": vector()}, "0", blob(8, FLOATS)),
        "is not a list of texts",
    ),
    "keys that are numbers": (
        legacy({"w": vector()}, (0,), blob(8, FLOATS)),
        "is not a list of texts",
    ),
    "another protocol": (
        legacy({"w": vector()}, ("0",), blob(8, FLOATS), protocol=1000),
        "a protocol other than 1001",
    ),
    "bytes behind": (GOOD + b"\0", "1 bytes follow the last storage"),
    "another file behind": (GOOD + GOOD, "a second checkpoint was saved into the same file"),
    "an unknown id": (legacy(Persistent(("tensor", 1, 2, 3, 4))), "not that of a storage"),
    "an id that is not a tuple": (legacy(Persistent("0")), "not that of a storage"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_with_the_reason(what, tmp_path):
    content, said = BROKEN[what]
    source = write(tmp_path / "old.pt", content)
    with (
        pytest.raises(MalformedCheckpoint, match=said) as caught,
        open_checkpoint(source) as opened,
    ):
        plan_conversion(opened, tmp_path / "out.pt")
    assert caught.value.path == str(source) and caught.value.where


def test_a_file_cut_at_any_byte_is_refused(tmp_path):
    whole = save(
        {"w": torch.ones(3), "v": torch.ones(2, dtype=torch.int64)}, tmp_path / "whole.pt"
    ).read_bytes()
    for length in range(len(whole)):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(write(tmp_path / "cut.pt", whole[:length]))
        assert caught.value.path == str(tmp_path / "cut.pt")


@pytest.mark.parametrize("seed", some(2, range(4)))
def test_a_damaged_file_is_read_or_refused(seed, tmp_path):
    chance = random.Random(seed)
    tree = {"w": torch.ones(3), "v": [torch.ones(2), torch.nn.Parameter(torch.ones(1))]}
    whole = save(tree, tmp_path / "old.pt").read_bytes()
    assert_only_our_errors(tmp_path, whole, chance)


def assert_only_our_errors(
    folder: Path, whole: bytes, chance: random.Random, first: int = 0
) -> None:
    """Files that are `whole` but for some bytes from `first` on are opened and read, or refused by
    an error of ours.
    """
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(first, len(changed))] = chance.choice(
                [chance.randrange(256), *b"Q.bRt(]}cN\x81"]
            )
        path = write(folder / "damaged.pt", bytes(changed))
        try:
            with open_checkpoint(path) as checkpoint:
                for _, ref in checkpoint.tensors():
                    assert sum(map(len, iter_chunks(ref))) == ref.nbytes
        except CheckpointError as error:
            assert str(path) in str(error)


# -------------------------------------------------------------------------------- size and laziness


@pytest.fixture
def sparse(tmp_path) -> Path:
    """A legacy file of 300 MB, nearly all of it a hole."""
    numel = 75_000_000
    tree = {"big": vector(numel=numel, size=numel), "small": vector("1", size=8)}
    head = legacy(tree, ("0", "1"))
    with (tmp_path / "old.pt").open("wb") as file:
        file.write(head + struct.pack("<q", numel))
        file.seek(4 * numel, os.SEEK_CUR)
        file.write(blob(8, FLOATS))
    return tmp_path / "old.pt"


@pytest.mark.trust
def test_a_large_file_is_converted_in_little_memory(sparse, tmp_path):
    done = run_process("convert", sparse, "out.safetensors", "--no-fsync", cwd=tmp_path)
    assert done.exit == 0, done.err
    assert done.rss - idle_rss() < 60_000_000
    found = load_file(tmp_path / "out.safetensors")
    assert found["small"].tolist() == list(range(8))
    assert found["big"].shape == (75_000_000,) and not found["big"].count_nonzero()


def test_no_payload_is_read_when_opening(sparse, monkeypatch):
    asked = []
    original = FileSource.read
    monkeypatch.setattr(
        FileSource,
        "read",
        lambda self, at, size: asked.append((at, size)) or original(self, at, size),
    )
    monkeypatch.setattr(
        FileSource,
        "read_into",
        lambda self, at, view: asked.append((at, len(view))) or real(self, at, view),
    )
    with open_checkpoint(sparse) as checkpoint:
        assert len(list(checkpoint.tensors())) == 2
    assert sum(size for _, size in asked) < 3 << 20


real = FileSource.read_into


def test_a_legacy_stream_is_what_a_nested_storage_is(tmp_path):
    buffer = io.BytesIO()
    torch.save(torch.arange(3.0).untyped_storage(), buffer, _use_new_zipfile_serialization=False)
    source = write(tmp_path / "storage.pt", buffer.getvalue())
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.root.nbytes == 12


def test_an_ordered_dict_with_attributes_keeps_them(tmp_path):
    tree = OrderedDict(w=torch.ones(2))
    tree._metadata = OrderedDict({"": {"version": 1}})
    source = save(tree, tmp_path / "old.pt")
    assert_same(source, converted(source))
    assert old_torch.MAGIC == torch.serialization.MAGIC_NUMBER
    assert pickled(old_torch.MAGIC) == source.read_bytes()[:15]
