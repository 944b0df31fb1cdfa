"""Checkpoints that other people wrote: what they hold, by a manifest made with torch itself,
survives every conversion.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import pickle
import zipfile
from collections import Counter
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import safetensors.torch
import torch

from ckptconv import CheckpointError, KeyRules, convert_checkpoint, load_portable, open_checkpoint
from ckptconv.inspect import report as inspection_report
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.tensors.stream import iter_chunks
from helpers import oracle
from helpers.examples import some

_MANIFEST = oracle.corpus_folder() / "manifest.json"
ENTRIES = json.loads(_MANIFEST.read_text()) if _MANIFEST.is_file() else []
READ_CONTAINERS = ("zip", "safetensors", "legacy", "zip-of-checkpoints", "torchscript-zip")
READ = [entry for entry in ENTRIES if entry["container"] in READ_CONTAINERS]
HAND_MADE = [entry for entry in ENTRIES if entry["container"] == "tar"]
FOLDERS = [entry for entry in ENTRIES if entry["container"] == "dcp"]
KEEP = {"keys": "keep", "fsync": False, "verify": True}

pytestmark = pytest.mark.corpus
Facts = tuple[str, tuple[int, ...], str]


def each(entries: list[Any]) -> pytest.MarkDecorator:
    """Runs a test for each entry; where the folder is not here, one test skips and says so."""
    absent = [pytest.param({"file": "", "container": ""}, id="absent")]
    return pytest.mark.parametrize(
        "entry", entries or absent, ids=lambda entry: entry["file"] or "absent"
    )


@pytest.fixture
def source(entry, corpus) -> Path:
    return corpus / "files" / entry["file"]


def facts(tensor: torch.Tensor) -> Facts:
    digest = hashlib.sha256(oracle.value_bytes(tensor)).hexdigest()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest


def promised(entry: dict[str, Any], prefix: str = "", instead: str = "") -> dict[str, Facts]:
    """What the manifest lists under `prefix`, by the path with `instead` in its place."""
    return {
        instead + found["at"].removeprefix(prefix): (
            found["dtype"],
            tuple(found["shape"]),
            found["sha256"],
        )
        for found in entry["tensors"]
        if found["at"].startswith(prefix)
    }


def promised_state_dict(entry: dict[str, Any], path: str) -> dict[str, Facts]:
    """What the manifest lists of the state dict at `path`; of a whole module, what its state dict
    holds of it.
    """
    listed = promised(entry, f".{path}." if path else ".")
    if not any(WHOLE & set(name.split(".")) for name in listed):
        return listed
    saved = {
        name: found
        for name, found in listed.items()
        if name.split(".")[-2:-1] and name.split(".")[-2] in WHOLE
    }
    # a Parameter of before torch 0.4 is a call
    bare = {name: name.removesuffix("[0]").split(".") for name in saved}
    return {
        ".".join(part for part in bare[name] if part not in (*WHOLE, "_modules")): saved[name]
        for name in saved
    }


WHOLE = {"_parameters", "_buffers"}


class Anything:
    """Stands for any class or function that a pickle names: takes all that is done to it and does
    nothing.
    """

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
    """Reads a data.pkl without importing what it names, and records the tensors it rebuilds."""

    def __init__(
        self, file: IO[bytes], archive: zipfile.ZipFile | None = None, root: str = ""
    ) -> None:
        super().__init__(file)
        self.archive, self.root, self.found = archive, root, set[Facts]()
        self.arrays: list[np.ndarray] = []

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if name == "_reconstruct":
            return self.array
        if module == "_codecs":
            return codecs.encode
        if module == "torch._utils" and name.startswith("_rebuild_tensor"):
            return self.rebuild
        if module.startswith("torch") and (
            name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        return Anything

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "module":
            return pid[1]
        return pid[1], self.archive.read(f"{self.root}data/{pid[2]}") if self.archive else b""

    def array(self, *args: Any) -> np.ndarray:
        self.arrays.append(np.ndarray.__reduce__(np.empty(0))[0](*args))
        return self.arrays[-1]

    def rebuild(
        self, storage: tuple[Any, bytes], offset: int, shape: Any, stride: Any, *rest: Any
    ) -> None:
        if self.archive is None:
            return
        values = (
            torch.frombuffer(bytearray(storage[1]), dtype=torch.uint8)
            if storage[1]
            else torch.empty(0, dtype=torch.uint8)
        )
        dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage[0].dtype
        self.found.add(
            facts(torch.empty(0, dtype=dtype).set_(values.untyped_storage(), offset, shape, stride))
        )


def record(path: Path) -> Recorder:
    """What the pickle of a zip file, or of a legacy one, names (legacy: without its tensors)."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            recorder = Recorder(
                io.BytesIO(archive.read(pickled)), archive, pickled.removesuffix("data.pkl")
            )
            recorder.load()
            return recorder
    with path.open("rb") as file:
        for _ in range(3):  # magic number, protocol, system
            Recorder(file).load()
        recorder = Recorder(file)
        recorder.load()
        return recorder


def recorded(path: Path) -> set[Facts]:
    return record(path).found


def arrays(path: Path) -> set[Facts]:
    """The numpy arrays of numbers in a file, as the tensors that torch makes of them."""
    return {
        facts(torch.from_numpy(array))
        for array in record(path).arrays
        if array.dtype.kind in "biufc"
    }


def seen(path: Path) -> set[Facts]:
    """What `open_checkpoint` finds in a file, in whole modules too."""
    with open_checkpoint(path, whole_modules=True) as checkpoint:
        return {
            (
                ref.dtype.name,
                ref.shape,
                hashlib.sha256(b"".join(map(bytes, iter_chunks(ref)))).hexdigest(),
            )
            for _, ref in checkpoint.tensors()
        }


def test_the_corpus_is_here(corpus):
    assert len(READ) + len(HAND_MADE) + len(FOLDERS) == len(ENTRIES) == 30


@each(some(9, READ))
def test_what_inspect_calls_portable_is_what_the_library_itself_opens(entry, source):
    """A file of GPU tensors or with a refused object it cannot open; wrapped keys and TorchScript
    it would, to no avail.
    """
    with open_checkpoint(source) as checkpoint:
        portable, verdict = inspection_report.verdict(inspect_checkpoint(checkpoint))
    try:
        safetensors.torch.load_file(source) if entry["container"] == "safetensors" else torch.load(
            source, weights_only=True
        )
    except (pickle.UnpicklingError, RuntimeError):
        assert not portable, verdict
    else:
        assert portable or "its keys carry a wrapper" in verdict, verdict


@each(READ)
def test_every_tensor_survives_a_faithful_conversion(entry, source, tmp_path):
    output = tmp_path / "out.pt"
    expected = set(promised(entry).values())
    assert seen(source) == expected
    result = convert_checkpoint(source, output, unknown="keep", **KEEP)
    assert result.verified and seen(output) == expected == recorded(output)
    if entry["container"] == "zip":
        assert recorded(source) == expected, "the oracle itself"


@each(some(6, [entry for entry in READ if entry["opens_weights_only"]]))
def test_what_torch_opens_is_the_same_tree_again(entry, source, tmp_path):
    convert_checkpoint(source, tmp_path / "out.pt", **KEEP)
    found = oracle.flatten(oracle.load(tmp_path / "out.pt"))
    expected = (
        safetensors.torch.load_file(source)
        if source.suffix == ".safetensors"
        else oracle.load(source)
    )
    assert len(found) == len(oracle.flatten(expected))
    if source.suffix != ".safetensors":
        assert found == oracle.compacted(expected)
    assert set(oracle.tags(tmp_path / "out.pt")) == {"cpu"}


@each(some(8, READ))
def test_what_is_written_by_default_opens_with_weights_only(entry, source, tmp_path):
    try:
        convert_checkpoint(source, tmp_path / "out.pt", fsync=False)
    except CheckpointError as error:
        assert not entry["opens_weights_only"] and "weights_only" in str(error)
        convert_checkpoint(source, tmp_path / "out.pt", fsync=False, unknown="drop")
    left = {facts(tensor) for tensor in oracle.tensors(oracle.load(tmp_path / "out.pt"))}
    whole = entry["container"] in ("safetensors", "zip-of-checkpoints")
    assert left and left <= set(promised(entry).values()) | (set() if whole else arrays(source))


@each(some(10, READ))
def test_every_state_dict_becomes_safetensors(entry, source, tmp_path):
    with open_checkpoint(source) as checkpoint:
        paths = [found.path for found in checkpoint.state_dicts()]
    assert paths or entry["structure"].startswith(("single tensor", "tuple of", "list of"))
    for number, path in enumerate(paths):
        output = tmp_path / f"{number}.safetensors"
        expected = promised_state_dict(entry, path)
        convert_checkpoint(source, output, only=path or None, tied="duplicate", **KEEP)
        assert {
            key: facts(tensor) for key, tensor in safetensors.torch.load_file(output).items()
        } == expected
        loaded = load_portable(source, only=path or None, keys="keep")
        assert {
            key: facts(value) for key, value in loaded.items() if isinstance(value, torch.Tensor)
        } == expected


@each([entry for entry in READ if entry["structure"].startswith("state_dict")])
def test_prefixes_are_added_and_stripped_again(entry, source, tmp_path):
    convert_checkpoint(source, tmp_path / "module.pt", keys=KeyRules("add-module"), fsync=False)
    wrapped = load_portable(tmp_path / "module.pt", keys="keep")
    assert {key: facts(value) for key, value in wrapped.items()} == promised(entry, ".", "module.")
    assert {
        key: facts(value) for key, value in load_portable(tmp_path / "module.pt").items()
    } == promised(entry, ".")


@each(HAND_MADE)
def test_a_tar_file_that_torch_did_not_write_is_told(source, tmp_path):
    with pytest.raises(CheckpointError, match="it has no member 'tensors'"):
        open_checkpoint(source)
    with pytest.raises(CheckpointError, match="it has no member 'tensors'"):
        convert_checkpoint(source, tmp_path / "out.pt")


@each(FOLDERS)
def test_the_tensors_of_a_folder_survive_both_conversions(entry, source, tmp_path):
    expected = promised(entry, ".")
    assert seen(source) == set(expected.values())
    convert_checkpoint(source, tmp_path / "out.pt", **KEEP)
    assert seen(tmp_path / "out.pt") == set(expected.values())
    convert_checkpoint(source, tmp_path / "out.safetensors", only="model", **KEEP)
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert {f"model.{key}": facts(tensor) for key, tensor in found.items()} == expected


@each(some(9, [entry for entry in READ if entry["locations"]]))
def test_every_storage_has_its_tag(entry, source):
    with open_checkpoint(source, whole_modules=True) as checkpoint:
        storages = {
            id(piece.storage): piece.storage
            for _, ref in checkpoint.tensors()
            for piece in ref.pieces
        }
    assert Counter(storage.location for storage in storages.values()) == entry["locations"]
