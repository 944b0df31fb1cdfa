"""Checkpoints that other people wrote: what they hold, by a manifest made with torch itself, survives every conversion."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import oracle
import pytest
import safetensors.torch
import torch

from ckptconv import CheckpointError, KeyRules, convert_checkpoint, load_portable, open_checkpoint
from ckptconv.tensors import iter_chunks

_MANIFEST = oracle.corpus_folder() / "manifest.json"
ENTRIES = json.loads(_MANIFEST.read_text()) if _MANIFEST.is_file() else []
READ_CONTAINERS = ("zip", "safetensors", "legacy", "zip-of-checkpoints", "dcp")
READ = [entry for entry in ENTRIES if entry["container"] in READ_CONTAINERS]
HAND_MADE = [entry for entry in ENTRIES if entry["container"] == "tar"]
UNREAD = [entry for entry in ENTRIES if entry not in READ and entry not in HAND_MADE]
KEEP = {"keys": "keep", "fsync": False, "verify": True}

pytestmark = pytest.mark.corpus
Facts = tuple[str, tuple[int, ...], str]


def each(entries: list[dict[str, Any]]) -> pytest.MarkDecorator:
    """Runs a test for each entry; where the folder is not here, one test skips and says so."""
    absent = [pytest.param({"file": "", "container": ""}, id="absent")]
    return pytest.mark.parametrize("entry", [pytest.param(entry, id=entry["file"]) for entry in entries] or absent)


@pytest.fixture
def source(entry, corpus) -> Path:
    return corpus / "files" / entry["file"]


def facts(tensor: torch.Tensor) -> Facts:
    digest = hashlib.sha256(oracle.value_bytes(tensor)).hexdigest()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest


def promised(entry: dict[str, Any], prefix: str = "", instead: str = "") -> dict[str, Facts]:
    """What the manifest lists under `prefix`, by the path with `instead` in its place."""
    return {
        instead + name_of(found["at"]).removeprefix(prefix): (found["dtype"], tuple(found["shape"]), found["sha256"])
        for found in entry["tensors"]
        if name_of(found["at"]).startswith(prefix)
    }


def name_of(at: str) -> str:
    """Where a tensor hangs: that of a whole module under its name in the state dict."""
    return re.sub(r"_(modules|parameters|buffers)\.", "", at).removesuffix("[0]") if "_modules." in at else at


class Anything:
    """Stands for any class or function that a pickle names: takes all that is done to it and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Anything:
        made = object.__new__(cls)
        made.given = [args]
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.given.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.given.append((key, value))

    def append(self, value: Any) -> None:
        self.given.append(value)

    def extend(self, values: Any) -> None:
        self.given.append(values)


class Recorder(pickle.Unpickler):
    """Reads a data.pkl without importing what it names, and records the tensors that it rebuilds."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        super().__init__(io.BytesIO(archive.read(pickled)))
        self.archive, self.root, self.found = archive, pickled.removesuffix("data.pkl"), set[Facts]()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name.startswith("_rebuild_tensor"):
            return self.rebuild
        if module.startswith("torch") and (name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        return Anything

    def persistent_load(self, pid: Any) -> tuple[Any, bytes]:
        return pid[1], self.archive.read(f"{self.root}data/{pid[2]}")

    def rebuild(self, storage: tuple[Any, bytes], offset: int, shape: Any, stride: Any, *rest: Any) -> None:
        values = torch.frombuffer(bytearray(storage[1]), dtype=torch.uint8) if storage[1] else torch.empty(0, dtype=torch.uint8)
        dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage[0].dtype
        self.found.add(facts(torch.empty(0, dtype=dtype).set_(values.untyped_storage(), offset, shape, stride)))


def recorded(path: Path) -> set[Facts]:
    with zipfile.ZipFile(path) as archive:
        recorder = Recorder(archive)
        recorder.load()
    return recorder.found


def seen(path: Path) -> set[Facts]:
    """What `open_checkpoint` finds in a file."""
    with open_checkpoint(path) as checkpoint:
        return {
            (ref.dtype.name, ref.shape, hashlib.sha256(b"".join(map(bytes, iter_chunks(ref)))).hexdigest())
            for _, ref in checkpoint.tensors()
        }


def test_the_corpus_is_here(corpus):
    assert len(READ) > 20 and len(HAND_MADE) == 1


@each(READ)
def test_every_tensor_survives_a_faithful_conversion(entry, source, tmp_path):
    output = tmp_path / "out.pt"
    expected = set(promised(entry).values())
    assert seen(source) == expected
    result = convert_checkpoint(source, output, unknown="keep", **KEEP)
    assert result.verified and seen(output) == expected == recorded(output)
    if entry["container"] == "zip":
        assert recorded(source) == expected, "the oracle itself"


@each([entry for entry in READ if entry["opens_weights_only"]])
def test_what_torch_opens_is_the_same_tree_again(entry, source, tmp_path):
    convert_checkpoint(source, tmp_path / "out.pt", **KEEP)
    found = oracle.flatten(oracle.load(tmp_path / "out.pt"))
    expected = safetensors.torch.load_file(source) if source.suffix == ".safetensors" else oracle.load(source)
    assert len(found) == len(oracle.flatten(expected))
    if source.suffix != ".safetensors":
        assert found == oracle.compacted(expected)
    assert set(oracle.tags(tmp_path / "out.pt")) == {"cpu"}


@each(READ)
def test_what_is_written_by_default_opens_with_weights_only(entry, source, tmp_path):
    try:
        convert_checkpoint(source, tmp_path / "out.pt", fsync=False)
    except CheckpointError as error:
        assert not entry["opens_weights_only"] and "weights_only" in str(error)
        if entry["structure"].startswith("object of") or "models.yolo" in entry["structure"]:
            with pytest.raises(CheckpointError, match="no tensors"):  # all of them hang on the one unknown object
                convert_checkpoint(source, tmp_path / "out.pt", fsync=False, unknown="drop")
            return
        convert_checkpoint(source, tmp_path / "out.pt", fsync=False, unknown="drop")
    left = {facts(tensor) for tensor in oracle.tensors(oracle.load(tmp_path / "out.pt"))}
    assert left <= set(promised(entry).values())


@each(READ)
def test_every_state_dict_becomes_safetensors(entry, source, tmp_path):
    with open_checkpoint(source) as checkpoint:
        paths = [found.path for found in checkpoint.state_dicts()]
    without = ("object of", "single tensor", "tuple of", "list of")
    assert paths or entry["structure"].startswith(without) or "models.yolo" in entry["structure"]
    for number, path in enumerate(paths[:12]):  # a pickled module has one for each of its parts
        output = tmp_path / f"{number}.safetensors"
        expected = promised(entry, ".".join(["", *(part for part in path.split(".") if part not in ("", "<state>")), ""]))
        convert_checkpoint(source, output, only=path or None, tied="duplicate", **KEEP)
        assert {key: facts(tensor) for key, tensor in safetensors.torch.load_file(output).items()} == expected
        loaded = load_portable(source, only=path or None, keys="keep")
        assert {key: facts(value) for key, value in loaded.items() if isinstance(value, torch.Tensor)} == expected


@each([entry for entry in READ if entry["structure"].startswith("state_dict")])
def test_prefixes_are_added_and_stripped_again(entry, source, tmp_path):
    convert_checkpoint(source, tmp_path / "module.pt", keys=KeyRules("add-module"), fsync=False)
    wrapped = load_portable(tmp_path / "module.pt", keys="keep")
    assert {key: facts(value) for key, value in wrapped.items()} == promised(entry, ".", "module.")
    assert {key: facts(value) for key, value in load_portable(tmp_path / "module.pt").items()} == promised(entry, ".")


@each(HAND_MADE)
def test_a_tar_file_that_torch_did_not_write_is_told(source, tmp_path):
    with pytest.raises(CheckpointError, match="it has no member 'tensors'"):
        open_checkpoint(source)
    with pytest.raises(CheckpointError, match="it has no member 'tensors'"):
        convert_checkpoint(source, tmp_path / "out.pt")


@each(UNREAD)
def test_what_is_not_read_yet_says_so(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"not (yet read|read yet)"):
        open_checkpoint(source)
    with pytest.raises(CheckpointError, match=r"not (yet read|read yet)"):
        convert_checkpoint(source, tmp_path / "out.pt")


@each([entry for entry in READ if entry["locations"]])
def test_every_storage_has_its_tag(entry, source):
    with open_checkpoint(source, whole_modules=True) as checkpoint:
        storages = {id(piece.storage): piece.storage for _, ref in checkpoint.tensors() for piece in ref.pieces}
    assert Counter(storage.location for storage in storages.values()) == entry["locations"]
