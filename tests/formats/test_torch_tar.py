"""Tar checkpoints (torch before 0.1.11): today's torch still loads them, and sees in the output
what it sees in the source.
"""

from __future__ import annotations

import io
import random
import struct
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckptconv import CheckpointError, convert_checkpoint, limits, load_portable, open_checkpoint
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.inspect.report import verdict
from ckptconv.io.files import FileSource
from ckptconv.support.errors import (
    LimitExceeded,
    MalformedCheckpoint,
    RefusedObject,
    UnsupportedCheckpoint,
)
from ckptconv.tensors.stream import iter_chunks
from helpers import oracle, trees
from helpers.examples import examples, some
from helpers.old_torch import (
    Made,
    Name,
    Persistent,
    pickled,
    tar,
    tar_checkpoint,
    tar_storages,
    tar_tensors,
    write,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FLOATS = struct.pack("<8f", *range(8))
DOUBLES = struct.pack("<2d", 0.5, -2)
STORAGES = tar_storages(
    [(11, "cpu", "FloatStorage", FLOATS, 8), (12, "cuda:0", "cuda.DoubleStorage", DOUBLES, 2)],
    ((13, 11, 2, 4),),
)
TENSORS = tar_tensors(
    [
        (21, 11, "FloatTensor", (2, 4), (4, 1), 0),
        (22, 13, "FloatTensor", (2, 2), (1, 2), 0),
        (23, 12, "cuda.DoubleTensor", (2,), (1,), 0),
    ]
)
TREE = {
    "state_dict": {"all": Persistent(21), "view": Persistent(22), "w": Persistent(23)},
    "epoch": 3,
    "tied": Persistent(21),
}
GOOD = tar_checkpoint(STORAGES, TENSORS, TREE)


def seen_by_torch(path: Path) -> Any:
    """torch reads tar files only where it may execute them; these are ours."""
    return oracle.load(path, weights_only=False)


def without_storages(rows: list[oracle.Row]) -> list[oracle.Row]:
    """The rows without the numbers of the storages: today's torch gives each view one of its own
    over the same memory.
    """
    return [
        row._replace(value=row.value._replace(storage=None))
        if isinstance(row.value, oracle.Tensor)
        else row
        for row in rows
    ]


def test_torch_sees_the_same_tree_in_the_output(tmp_path):
    source = write(tmp_path / "old.pt", GOOD)
    convert_checkpoint(source, tmp_path / "new.pt", keys="keep", fsync=False, verify=True)
    found = oracle.load(tmp_path / "new.pt")
    assert without_storages(oracle.flatten(found)) == without_storages(
        oracle.compacted(seen_by_torch(source))
    )
    assert found["state_dict"]["view"].data_ptr() == found["state_dict"]["all"].data_ptr() + 8
    assert seen_by_torch(source)["state_dict"]["view"].tolist() == [[2, 4], [3, 5]]


CLASSES = {"Float": torch.float32, "Double": torch.float64, "Half": torch.float16,
    "Long": torch.int64, "Int": torch.int32,
           "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8}  # fmt: skip


@st.composite
def checkpoints(draw: st.DrawFn) -> bytes:
    """A tar checkpoint of storages of any class, views of them and of views, and tensors over all
    of these.
    """
    storages, views, tensors = [], [], []
    homes: dict[int, tuple[str, int]] = {}
    for key in range(1, draw(st.integers(2, 4))):
        cls, numel = draw(st.sampled_from(list(CLASSES))), draw(st.integers(0, 12))
        values = (
            trees.random_bytes(key, numel * CLASSES[cls].itemsize, torch.uint8).numpy().tobytes()
        )
        storages.append(
            (key, draw(st.sampled_from(["cpu", "cuda:1"])), f"{cls}Storage", values, numel)
        )
        homes[key] = cls, numel
    for key in range(11, draw(st.integers(11, 14))):
        root = draw(st.sampled_from(list(homes)))
        start = draw(st.integers(0, homes[root][1]))
        size = draw(st.integers(0, homes[root][1] - start))
        views.append((key, root, start, size))
        homes[key] = homes[root][0], size
    for key, (home, (cls, numel)) in enumerate(homes.items(), 21):
        offset = draw(st.integers(0, numel))
        rows = draw(st.integers(0, numel - offset))
        shape, stride = draw(
            st.sampled_from([((rows,), (1,)), ((rows, 2), (1, 0)), ((2, rows), (0, 1))])
        )
        tensors.append((key, home, f"{cls}Tensor", shape, stride, offset))
    tree = {f"w{key}": Persistent(key) for key, *_ in tensors}
    return tar_checkpoint(tar_storages(storages, tuple(views)), tar_tensors(tensors), tree)


@given(checkpoints())
@settings(max_examples=examples(100), deadline=None)
def test_any_storages_views_and_tensors_are_seen_as_torch_sees_them(content):
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder) / "old.pt", content)
        expected = seen_by_torch(source)
        convert_checkpoint(source, Path(folder) / "new.pt", keys="keep", fsync=False)
        for found in (
            oracle.load(Path(folder) / "new.pt"),
            load_portable(source, keys="keep", map_location="cpu"),
        ):
            assert list(found) == list(expected)
            for key, tensor in expected.items():
                assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
                assert oracle.stored_bytes(found[key]) == oracle.stored_bytes(tensor)


def test_safetensors_and_live_tensors_have_the_values(tmp_path):
    source = write(tmp_path / "old.pt", GOOD)
    expected = seen_by_torch(source)["state_dict"]
    convert_checkpoint(
        source, tmp_path / "new.safetensors", only="state_dict", fsync=False, verify=True
    )
    for found in (
        load_file(tmp_path / "new.safetensors"),
        load_portable(source, only="state_dict"),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_tags_types_and_sharing_are_known(tmp_path):
    with open_checkpoint(write(tmp_path / "old.pt", GOOD)) as checkpoint:
        refs = dict(checkpoint.tensors())
        assert checkpoint.format == "torch tar"
        assert {key: (ref.dtype.name, ref.location) for key, ref in refs.items()} == {
            "state_dict.all": ("float32", "cpu"),
            "state_dict.view": ("float32", "cpu"),
            "state_dict.w": ("float64", "cuda:0"),
        }
        assert refs["state_dict.all"].storage is refs["state_dict.view"].storage
        tree = dict(checkpoint.root.pairs)
        assert tree["tied"] is refs["state_dict.all"]


def test_bare_storages_and_digits_as_ids_are_read(tmp_path):
    source = write(
        tmp_path / "old.pt",
        tar_checkpoint(STORAGES, TENSORS, {"s": Persistent(11), "w": Persistent("22")}),
    )
    convert_checkpoint(source, tmp_path / "new.pt", keys="keep", fsync=False)
    found, expected = oracle.load(tmp_path / "new.pt"), seen_by_torch(source)
    assert list(found["s"]) == list(expected["s"]) == list(range(8))
    assert torch.equal(found["w"], expected["w"])


def test_a_bare_view_of_a_storage_is_loaded_and_shares_it(tmp_path):
    tree = {"view": Persistent(13), "whole": Persistent(11), "w": Persistent(22)}
    source = write(tmp_path / "old.pt", tar_checkpoint(STORAGES, TENSORS, tree))
    found, expected = load_portable(source, keys="keep"), seen_by_torch(source)
    assert list(found["view"]) == list(expected["view"]) == [2, 3, 4, 5]
    assert list(found["whole"]) == list(expected["whole"]) == list(range(8))
    assert found["view"].data_ptr() == found["w"].data_ptr() == found["whole"].data_ptr() + 8
    with pytest.raises(RefusedObject, match="as a part"):
        convert_checkpoint(source, tmp_path / "new.pt", fsync=False)


def test_a_module_with_its_source_text_is_a_state_dict(tmp_path):
    empty = Made(Name("collections", "OrderedDict"))
    parts = {"_parameters": {"w": Persistent(22)}, "_buffers": empty, "_modules": empty}
    cls = Persistent((Name("my.models", "Net"), "net.py", "class Net: ..."))
    source = write(
        tmp_path / "old.pt", tar_checkpoint(STORAGES, TENSORS, Made(cls, (), parts, new=True))
    )
    assert load_portable(source)["w"].tolist() == [[2, 4], [3, 5]]


def test_a_tensor_without_dimensions_had_no_elements(tmp_path):
    tensors = tar_tensors([(21, None, "LongTensor", (), (), 0), (22, 11, "FloatTensor", (), (), 5)])
    source = write(
        tmp_path / "old.pt",
        tar_checkpoint(STORAGES, tensors, {"none": Persistent(21), "one": Persistent(22)}),
    )
    found = load_portable(source, keys="keep")
    assert found["none"].shape == (0,) and found["none"].dtype == torch.int64
    assert found["one"] == 5, "as today's torch reads it"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_dialect_of_tar_is_read(form, tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, content in (
            ("storages", STORAGES),
            ("tensors", TENSORS),
            ("pickle", pickled(TREE)),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    source = write(tmp_path / "old.pt", out.getvalue())
    found = load_portable(source, only="state_dict")
    assert {key: value.tolist() for key, value in found.items()} == {
        key: value.tolist() for key, value in seen_by_torch(source)["state_dict"].items()
    }


def test_no_payload_is_read_when_opening(tmp_path, monkeypatch):
    numel = 1 << 22
    storages = tar_storages([(11, "cpu", "FloatStorage", bytes(4 * numel), numel)])
    tensors = tar_tensors([(21, 11, "FloatTensor", (numel,), (1,), 0)])
    source = write(tmp_path / "old.pt", tar_checkpoint(storages, tensors, {"w": Persistent(21)}))
    asked = []
    read_into = FileSource.read_into
    monkeypatch.setattr(
        FileSource,
        "read_into",
        lambda self, at, view: asked.append(len(view)) or read_into(self, at, view),
    )
    with open_checkpoint(source) as checkpoint:
        assert [ref.numel for _, ref in checkpoint.tensors()] == [numel]
    assert sum(asked) < 2 << 20


def test_inspecting_says_that_torch_does_not_open_it(tmp_path):
    with open_checkpoint(
        write(tmp_path / "old.pt", tar_checkpoint(STORAGES, TENSORS, {"w": Persistent(21)}))
    ) as checkpoint:
        good, line = verdict(inspect_checkpoint(checkpoint))
    assert not good and "torch tar" in line
    with pytest.raises(RuntimeError, match="Cannot use"):
        oracle.load(tmp_path / "old.pt")


# ------------------------------------------------------------------------------- broken and hostile

NAMES = ("sys_info", "pickle", "tensors", "storages")

MANY_DIMENSIONS = pickled(1) + pickled((21, 11, 0)) + struct.pack("<i", 1 << 30) + bytes(20)


def with_member(**changed: bytes) -> bytes:
    contents = {
        "sys_info": pickled({}),
        "pickle": pickled(TREE),
        "tensors": TENSORS,
        "storages": STORAGES,
        **changed,
    }
    return tar([(name, contents[name]) for name in NAMES])


def one_storage(*views: Any, numel: int = 8, key: Any = 11, **given: Any) -> bytes:
    return with_member(
        storages=tar_storages([(key, "cpu", "FloatStorage", FLOATS, numel)], views, **given)
    )


def one_tensor(home: Any, shape: Any, stride: Any, offset: int = 0, **given: Any) -> bytes:
    return with_member(
        tensors=tar_tensors([(21, home, "FloatTensor", shape, stride, offset)], **given)
    )


def link(kind: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("storages")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    return out.getvalue()[:512] + GOOD


def changed_at(at: int, byte: bytes) -> bytes:
    return GOOD[:at] + byte + GOOD[at + 1 :]


BROKEN = {
    "a storage longer than its member": (one_storage(numel=1 << 40), "bytes are left"),
    "a negative storage": (one_storage(numel=-8), "claims -8 elements"),
    "too many storages": (one_storage(count=1 << 62), "more entries than"),
    "one storage too many": (one_storage(count=2), "."),
    "a negative number of storages": (one_storage(count=-1), "more entries than"),
    "a view that is not a tuple": (one_storage(5), "a view is not a tuple"),
    "views that are not a list": (
        with_member(storages=tar_storages([(11, "cpu", "FloatStorage", FLOATS, 8)], {})),
        "its views are not a list",
    ),
    "a tag that is not text": (
        with_member(storages=tar_storages([(11, 5, "FloatStorage", FLOATS, 8)])),
        "its location tag is not text",
    ),
    **{
        f"a pax header whose length is {length}": (
            GOOD.replace(b"23 mtime=", length.encode() + b" mtime=", 1),
            "is not a list of keys and values",
        )
        for length in ("x8", "99", "00")
    },
    "a view of nothing": (one_storage((13, 99, 0, 1)), "a view of a storage that does not exist"),
    "a view beyond its root": (one_storage((13, 11, 5, 4)), "a view of it is not inside it"),
    "a key twice": (one_storage((11, 11, 0, 1)), "occurs twice"),
    "a key that is a tuple": (one_storage(key=(1, 2)), "a key is not an address"),
    "bytes behind the views": (one_storage(tail=b"\0"), "1 bytes follow"),
    "a giant number of dimensions": (with_member(tensors=MANY_DIMENSIONS), "dimensions"),
    "a tensor beyond its storage": (one_tensor(11, (9,), (1,)), "needs 36 bytes"),
    "a negative size": (one_tensor(11, (-1,), (1,)), "something other than sizes"),
    "a negative stride": (one_tensor(11, (2,), (-1,)), "something other than sizes"),
    "a negative offset": (one_tensor(11, (1,), (1,), -1), "storage_offset"),
    "a tensor of no storage": (one_tensor(99, (1,), (1,)), "a storage that does not exist"),
    "a tensor beyond a view": (one_tensor(13, (5,), (1,)), "beyond the view"),
    "an id of nothing": (
        with_member(pickle=pickled(Persistent(99))),
        "a tensor that does not exist",
    ),
    "an id that is a list": (with_member(pickle=pickled(Persistent([21]))), "not an address"),
    "two trees": (with_member(pickle=pickled(TREE) + pickled(TREE)), "bytes follow"),
    "a member twice": (
        tar([(name, STORAGES) for name in ("storages", "tensors", "pickle", "storages")]),
        "twice",
    ),
    "a symbolic link": (link(tarfile.SYMTYPE), "is a link or a device"),
    "a hard link": (link(tarfile.LNKTYPE), "is a link or a device"),
    "a device": (link(tarfile.CHRTYPE), "is a link or a device"),
    "a wrong checksum": (changed_at(0, b"S"), "checksum"),
    "a size that is not a number": (changed_at(124, b"x"), "holds an invalid number"),
    "an end in a member": (GOOD[: GOOD.rindex(b"storages") + 600], "beyond the end of the file"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_with_the_reason(what, tmp_path):
    content, said = BROKEN[what]
    source = write(tmp_path / "old.pt", content)
    with pytest.raises((MalformedCheckpoint, LimitExceeded), match=said) as caught:
        open_checkpoint(source)
    assert caught.value.path == str(source) and caught.value.where


def test_other_tar_files_are_named(tmp_path):
    for content in (
        tar([("README", b"hello")]),
        tar([(f"part{index}", b"") for index in range(300)]),
    ):
        with pytest.raises(UnsupportedCheckpoint, match=r"is a tar file .*unpack it"):
            open_checkpoint(write(tmp_path / "other.tar", content))


def test_the_folder_of_many_ranks_in_a_tar_is_read_and_the_limit_of_members_is_named(tmp_path):
    """As in NeMo's files; torch writes a file of each tensor here."""
    from torch.distributed import checkpoint as dcp

    state = {f"w{number}": torch.randn(2) for number in range(300)}
    folder = tmp_path / "made" / "model_weights"
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    path = tmp_path / "model.nemo"
    with tarfile.open(path, "w") as archive:
        archive.add(folder.parent, arcname=".")
    found = load_portable(path)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    told = "more than 200 members, beyond the limit zip_members=200; unpack it and name what is"
    with limits(zip_members=200), pytest.raises(LimitExceeded, match=told):
        load_portable(path)


def test_a_pax_header_may_carry_the_size(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in (
            ("storages", STORAGES),
            ("tensors", TENSORS),
            ("pickle", pickled(TREE)),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = (
                len(content),
                {"size": str(len(content)), "comment": "x" * 200},
            )
            archive.addfile(member, io.BytesIO(content))
    assert load_portable(write(tmp_path / "old.pt", out.getvalue()), only="state_dict")[
        "w"
    ].tolist() == [0.5, -2]


def test_a_file_cut_anywhere_is_refused(tmp_path):
    end = GOOD.rindex(STORAGES) + len(STORAGES)
    for length in [*range(0, end, 37), end - 1]:
        with pytest.raises(CheckpointError):
            open_checkpoint(write(tmp_path / "cut.pt", GOOD[:length]))


@pytest.mark.parametrize("seed", some(2, range(4)))
def test_a_damaged_file_is_read_or_refused(seed, tmp_path):
    chance = random.Random(seed)
    contents = {"pickle": pickled(TREE), "tensors": TENSORS, "storages": STORAGES}
    for _ in range(300):
        name = chance.choice(list(contents))
        changed = bytearray(contents[name])
        changed[chance.randrange(len(changed))] = chance.randrange(256)
        path = write(tmp_path / "damaged.pt", with_member(**{name: bytes(changed)}))
        try:
            with open_checkpoint(path) as checkpoint:
                for _, ref in checkpoint.tensors():
                    assert sum(map(len, iter_chunks(ref))) == ref.nbytes
        except CheckpointError as error:
            assert str(path) in str(error)
