"""Files of one model, one after the other: the plan of one, made again for the next."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptconv import Job, Options, convert_many
from ckptconv.convert import alike
from ckptconv.convert import job as jobs_of_conversions


def state_dict(number: int) -> dict[str, torch.Tensor]:
    """Tensors of several types and strides, tied, empty, views of one storage."""
    torch.manual_seed(number)
    grid = torch.randn(4, 6)
    grid[0, 0] = 1e30 if number == 2 else 1.0
    return {
        "module.grid": grid,
        "module.tied": grid,
        "module.across": torch.randn(3, 5).t(),
        "module.row": torch.randn(2, 9)[1],
        "module.half": torch.randn(7).to(torch.bfloat16),
        "module.count": torch.tensor(number),
        "module.is_on": torch.tensor([True, number % 2 == 0]),
        "module.none": torch.empty(0, 3),
    }


@pytest.fixture
def opened(monkeypatch):
    """The sources that were opened and planned as any other."""
    found = []
    usual = jobs_of_conversions.open_certain

    def noted(source, **told):
        found.append(source.name)
        return usual(source, **told)

    monkeypatch.setattr(jobs_of_conversions, "open_certain", noted)
    return found


def told(receipt) -> object:
    """What became of a job, but for its time, its process and its file's inode."""
    made = None if receipt.made is None else {name: at[0][2] for name, at in receipt.made.items()}
    return replace(receipt, seconds=0.0, worker="", made=made)


def converted(folder: Path, names: list[str], *, together: bool, **options) -> list[object]:
    """The receipts of a batch of files, or of a batch for each."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    (folder / "out/claimed.safetensors.index.json").write_text("{}")
    jobs = [
        Job(
            folder / name,
            folder / "out" / f"{Path(name).stem}.safetensors",
            Options(**options),
            fsync=False,
        )
        for name in names
    ]
    batches = [jobs] if together else [[job] for job in jobs]
    return [told(one) for batch in batches for one in convert_many(batch)]


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "out").iterdir())}


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "f16"}, {"only": "model"}, {"tied": "duplicate"}]
)
def test_each_has_its_own_values(tmp_path, opened, options):
    names = [f"{number}.pt" for number in (1, 2, 10)]
    for number, name in enumerate(names):
        tensors = state_dict(number)
        torch.save({"model": tensors} if "only" in options else tensors, tmp_path / name)
    apart = converted(tmp_path, names, together=False, **options)
    made = outputs(tmp_path)
    opened.clear()
    assert converted(tmp_path, names, together=True, **options) == apart
    assert outputs(tmp_path) == made
    assert opened == names[:1]
    infinite = ["became infinite" in str(one.notes) for one in apart]
    assert infinite == [False, False, "dtype" in options]
    for number, name in enumerate(names):
        wanted, found = (
            state_dict(number),
            load_file(tmp_path / f"out/{Path(name).stem}.safetensors"),
        )
        for key, tensor in wanted.items():
            if key != "module.tied" or "tied" in options:
                to = torch.float16 if "dtype" in options and tensor.is_floating_point() else None
                assert torch.equal(found[key.removeprefix("module.")], tensor.to(to))


def test_other_outputs_of_named_tensors_are_alike_too(tmp_path, opened):
    for number in range(3):
        torch.save({"a": torch.full((2,), float(number))}, tmp_path / f"{number}.pt")
    jobs = [Job(tmp_path / f"{n}.pt", tmp_path / f"{n}.npz", fsync=False) for n in range(3)]
    assert [one.error for one in convert_many(jobs)] == [None] * 3
    assert opened == ["0.pt"]
    import numpy

    assert [numpy.load(tmp_path / f"{n}.npz")["a"].tolist() for n in range(3)] == [
        [float(n)] * 2 for n in range(3)
    ]


# ------------------------------------------------------------------------- what is not of the model


def rewritten(path: Path, change) -> None:
    """The archive with its records changed: by name, their bytes, and how they are stored."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in change(records).items():
            archive.writestr(name, raw)


def record(suffix: str, raw: bytes | None):
    """A change of the record that ends so: its bytes, or none of it."""

    def change(records):
        name = next(iter(records)).partition("/")[0] + suffix
        changed = {**records, name: raw}
        return {name: raw for name, raw in changed.items() if raw is not None}

    return lambda path: rewritten(path, change)


def damaged(what: bytes, by: int = 0):
    """One bit of the first such bytes is another."""

    def damage(path):
        raw = bytearray(path.read_bytes())
        raw[raw.index(what) + by] ^= 1
        path.write_bytes(raw)

    return damage


def deflated(path):
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in records.items():
            archive.writestr(name, raw)


def without_checksums(path):
    raw = path.read_bytes()
    for info in zipfile.ZipFile(path).infolist():
        raw = raw.replace(info.CRC.to_bytes(4, "little"), bytes(4)) if info.CRC else raw
    path.write_bytes(raw)


def saved(tensors, **how):
    return lambda path: torch.save(tensors, path, **how)


def renamed(name):
    return lambda path: path.rename(path.with_name(name))


WHOLE = torch.arange(24.0).reshape(4, 6)
OTHERS = {
    "the same": lambda path: None,
    "rewritten": lambda path: rewritten(path, lambda records: records),
    "in another folder": lambda path: rewritten(
        path, lambda records: {f"x/{name.partition('/')[2]}": raw for name, raw in records.items()}
    ),
    "two folders": lambda path: rewritten(
        path,
        lambda records: {
            **records,
            **{f"x/{name.partition('/')[2]}": raw for name, raw in records.items()},
        },
    ),
    "a damaged value": damaged(WHOLE.numpy().tobytes()[:32], 30),
    "a damaged pickle": damaged(b"module.grid"),
    "a damaged header": damaged(b"/data/0", 6),
    "a damaged header of what is not read": damaged(b"/.data/serialization_id", 6),
    "a damaged directory": lambda path: path.write_bytes(path.read_bytes()[:-10] + bytes(10)),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "behind other bytes": lambda path: path.write_bytes(b"#!/bin/sh\n" + path.read_bytes()),
    "big-endian": record("/byteorder", b"big"),
    "an odd byte order": record("/byteorder", b"huge"),
    "an odd version": record("/version", b"x"),
    "another version": record("/version", b"2\n"),
    "no version": record("/version", None),
    "no byte order": record("/byteorder", None),
    "no storage": record("/data/0", None),
    "a short storage": record("/data/0", b"1234"),
    "a record more": record("/more", b"1"),
    "code": record("/constants.pkl", b"\x80\x02).}"),
    "deflated": deflated,
    "no checksums": without_checksums,
    "of another shape": saved({**state_dict(1), "module.grid": torch.ones(6, 4)}),
    "with another key": saved({**state_dict(1), "module.more": torch.ones(1)}),
    "of another type": saved({**state_dict(1), "module.half": torch.ones(7).half()}),
    "of before 1.6": saved(state_dict(1), _use_new_zipfile_serialization=False),
    "a text": lambda path: path.write_text("not a checkpoint"),
    "a rank by its name": renamed("layer_00-model_states.pt"),
    "a part by its name": renamed("pytorch_model-00001-of-00002.bin"),
    "of Megatron by its name": renamed("model_rng.pt"),
    "of DCP by its name": renamed("__0_0.distcp"),
    "an index by its name": renamed("model.safetensors.index.json"),
    "beside an index": renamed("claimed.pt"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_file_is_as_by_itself(tmp_path, other):
    """Between two of a model: the same outputs, receipts, notes and errors."""
    for number in range(4):
        torch.save(
            {**state_dict(number), "module.grid": WHOLE + number % 2}, tmp_path / f"{number}.pt"
        )
    OTHERS[other](tmp_path / "2.pt")
    names = sorted(
        path.name
        for path in tmp_path.iterdir()
        if path.suffix in (".pt", ".bin", ".json", ".distcp")
    )
    names = ["0.pt", "1.pt", *(name for name in names if name[0] not in "013"), "3.pt"]
    assert len(names) == 4
    apart = converted(tmp_path, names, together=False)
    made = outputs(tmp_path)
    assert converted(tmp_path, names, together=True) == apart
    assert outputs(tmp_path) == made


def test_nothing_is_kept_of_files_that_are_all_others(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(alike, "_MISSES", 2)
    kept = []
    usual = alike._model_of
    monkeypatch.setattr(alike, "_model_of", lambda *given: kept.append(1) or usual(*given))
    for number in range(6):
        torch.save({"a": torch.ones(number + 1)}, tmp_path / f"{number}.pt")
    names = [f"{number}.pt" for number in range(6)]
    converted(tmp_path, names, together=True)
    assert opened == names and len(kept) == 2


def test_a_model_of_very_many_tensors_is_not_kept(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(alike, "_MOST", 2)
    for number in range(2):
        torch.save({key: torch.ones(1) for key in "abc"}, tmp_path / f"{number}.pt")
    converted(tmp_path, ["0.pt", "1.pt"], together=True)
    assert opened == ["0.pt", "1.pt"]


def test_options_that_read_files_are_read_for_each(tmp_path, opened):
    (tmp_path / "rules.json").write_text('[{"rename": {"a": "b"}}]')
    for number in range(2):
        torch.save({"a": torch.ones(1)}, tmp_path / f"{number}.pt")
    given = {"rules": [tmp_path / "rules.json"]}
    receipts = converted(tmp_path, ["0.pt", "1.pt"], together=True, **given)
    assert [one.error for one in receipts] == [None] * 2
    assert opened == ["0.pt", "1.pt"]
