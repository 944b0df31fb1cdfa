"""One checkpoint whose output files are made by workers: the same bytes, or an error and
nothing.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckptconv import (
    CheckpointError,
    Job,
    MalformedCheckpoint,
    Options,
    OutputRefused,
    execute_plan,
    open_checkpoint,
    plan_conversion,
)
from ckptconv.batch.choosing import engine_of
from ckptconv.batch.engines import Serial
from ckptconv.batch.own_code import code_version
from ckptconv.batch.processes import Processes
from ckptconv.batch.sharing import share_out_on
from ckptconv.io.places import place_of
from ckptconv.tensors.packed import NotPacked, check_same, packed
from helpers.lost_workers import always_killing_share_of, killing_share_of
from helpers.paths import PRODUCED

SIZE = 60_000


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {f"module.l{n}.w": torch.randn(100, 60 + n, generator=generator) for n in range(12)}
    made["module.ids"] = torch.arange(5000)
    made["module.tied"] = made["module.l3.w"]
    made["module.row"] = made["module.l5.w"][7:30]
    made["module.turned"] = made["module.l6.w"].t()
    made["module.flag"] = torch.tensor([True, False])
    made["module.empty"] = torch.zeros(0, 4)
    return made


def make_zip(path: Path) -> Path:
    torch.save(tensors(), path / "a.pt")
    return path / "a.pt"


def make_legacy(path: Path) -> Path:
    torch.save(tensors(), path / "a.pt", _use_new_zipfile_serialization=False)
    return path / "a.pt"


def make_safetensors(path: Path) -> Path:
    made = {name: value.clone().contiguous() for name, value in tensors().items()}
    save_file(made, path / "a.safetensors")
    return path / "a.safetensors"


def make_dcp(path: Path) -> Path:
    dcp.save({"model": tensors()}, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def make_deflated(path: Path) -> Path:
    np.savez_compressed(path / "a.npz", **{name: np.ones((300, 40)) for name in "abcd"})
    return path / "a.npz"


def make_shards(path: Path) -> Path:
    Job(make_zip(path), path / "shards", Options(max_shard_size=99_000, to="torch")).run()
    return path / "shards"


SOURCES = {
    "zip": make_zip,
    "legacy": make_legacy,
    "safetensors": make_safetensors,
    "DCP": make_dcp,
    "deflated npz": make_deflated,
    "Hugging Face": make_shards,
}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shared(source: Path, output: Path, options: Options, engine=None, **given):
    with open_checkpoint(source) as checkpoint:
        plan = plan_conversion(checkpoint, output, options)
        return execute_plan(plan, share_out=share_out_on(engine or Serial()), **given)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_shares_are_the_files_that_one_process_makes(source, to, dtype, tmp_path):
    path = SOURCES[source](tmp_path)
    options = Options(to=to, max_shard_size=SIZE, dtype=dtype, device="cuda:1")
    alone = Job(path, tmp_path / "alone", options).run()
    result = shared(path, tmp_path / "shared", options, verify=True)
    assert len(alone.plan.files) >= 2
    assert files(tmp_path / "alone") == files(tmp_path / "shared")
    assert result.nbytes == alone.nbytes and result.verified == sum(
        len(file.part.tensors) for file in result.plan.files
    )


@pytest.mark.trust
@pytest.mark.parametrize("source", sorted(PRODUCED.glob("*")), ids=lambda path: path.name)
def test_what_frameworks_made_is_shared_out_too(source, tmp_path):
    options = Options(to="safetensors", max_shard_size="200kB")
    try:
        Job(source, tmp_path / "alone", options).run()
    except CheckpointError as error:
        with pytest.raises(type(error)):
            shared(source, tmp_path / "shared", options)
        return
    shared(source, tmp_path / "shared", options)
    assert files(tmp_path / "alone") == files(tmp_path / "shared")


def test_processes_make_shares(tmp_path):
    source = make_zip(tmp_path)
    options = Options(max_shard_size=SIZE, to="safetensors")
    Job(source, tmp_path / "alone", options).run()
    shared(source, tmp_path / "shared", options, Processes(2))
    assert files(tmp_path / "alone") == files(tmp_path / "shared")


def test_what_the_values_are_is_told_as_by_one_process(tmp_path):
    made = {f"a{n}": torch.full((9000,), 1e30) for n in range(4)} | {"b": torch.zeros(9000)}
    torch.save(made, tmp_path / "a.pt")
    options = Options(max_shard_size=SIZE, to="safetensors", dtype="f16")
    alone = Job(tmp_path / "a.pt", tmp_path / "alone", options).run()
    found = shared(tmp_path / "a.pt", tmp_path / "shared", options)
    assert found.overflowed == alone.overflowed == {f"a{n}": 9000 for n in range(4)}


def damaged(path: Path) -> None:
    """One byte of the values of a tensor is another one."""
    with zipfile.ZipFile(path) as archive:
        info = next(one for one in archive.infolist() if one.filename.endswith("data/4"))
    raw = bytearray(path.read_bytes())
    raw[info.header_offset + 3000] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("engine", [Serial, lambda: Processes(2)])
def test_damage_is_told_and_nothing_is_left(engine, tmp_path):
    source = make_zip(tmp_path)
    damaged(source)
    with pytest.raises(MalformedCheckpoint, match=r"checksum|CRC"):
        shared(source, tmp_path / "out", Options(max_shard_size=SIZE, to="safetensors"), engine())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


def test_a_worker_that_is_lost_has_its_share_made_again(tmp_path, monkeypatch):
    source = make_zip(tmp_path)
    options = Options(max_shard_size=SIZE, to="safetensors")
    Job(source, tmp_path / "alone", options).run()
    monkeypatch.setattr("ckptconv.batch.sharing.FIRST", 0.01)
    monkeypatch.setattr("ckptconv.convert.shares.share_of", killing_share_of)
    shared(source, tmp_path / "shared", options, Processes(2))
    assert (tmp_path / "shared.tried").exists()
    assert files(tmp_path / "alone") == files(tmp_path / "shared")


@pytest.mark.trust
def test_a_share_that_nobody_can_make_is_told(tmp_path, monkeypatch):
    source = make_zip(tmp_path)
    monkeypatch.setattr("ckptconv.batch.sharing.FIRST", 0.001)
    monkeypatch.setattr("ckptconv.convert.shares.share_of", always_killing_share_of)
    options = Options(max_shard_size=SIZE, to="safetensors")
    with pytest.raises(CheckpointError, match=r"its worker was lost .*SIGKILL.* 3 times"):
        shared(source, tmp_path / "out", options, Processes(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


def test_a_source_that_is_another_file_by_then_is_refused(tmp_path):
    source = make_zip(tmp_path)
    with open_checkpoint(source) as checkpoint:
        plan = plan_conversion(
            checkpoint, tmp_path / "out", Options(max_shard_size=SIZE, to="torch")
        )
        torch.save(tensors(), tmp_path / "other.pt")
        (tmp_path / "other.pt").replace(source)
        with pytest.raises(CheckpointError, match="is not the file that the conversion"):
            execute_plan(plan, share_out=share_out_on(Serial()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


def test_a_worker_with_other_code_makes_nothing(tmp_path, monkeypatch):
    source = make_zip(tmp_path)
    monkeypatch.setattr("ckptconv.batch.sharing.code_version", iter(["1", "2"]).__next__)
    here = re.escape(f"has ckptconv {code_version()}, but 1 planned the conversion")
    with pytest.raises(CheckpointError, match=here):
        shared(source, tmp_path / "out", Options(max_shard_size=SIZE, to="torch"))


def test_a_place_that_workers_cannot_see_is_refused(tmp_path):
    pytest.importorskip("fsspec")
    with pytest.raises(OutputRefused, match="workers cannot make its files"):
        shared(make_zip(tmp_path), "memory://shares/out", Options(max_shard_size=SIZE, to="torch"))


def test_tensors_go_through_pickle_and_keep_what_they_share(tmp_path):
    source = make_zip(tmp_path)
    with open_checkpoint(source) as checkpoint:
        refs = [ref for _, ref in checkpoint.tensors()]
        again = pickle.loads(pickle.dumps(packed(refs)))
        opened = again.opened(lambda place: check_same(place_of(place.name).open(), place))
        for one, other in zip(refs, opened, strict=True):
            assert (one.dtype, one.shape, one.stride) == (other.dtype, other.shape, other.stride)
        assert len({id(ref.storage) for ref in refs}) == len({id(ref.storage) for ref in opened})
        for ref in opened:
            ref.storage.source.close()


def test_what_only_this_process_can_read_is_not_packed(tmp_path):
    refs = []
    with open_checkpoint(make_zip(tmp_path)) as checkpoint:
        refs = [ref for _, ref in checkpoint.tensors()]

        class Own(type(refs[0].storage.source)):  # type: ignore[misc]
            def comes_from(self, offset):
                return self, offset

        refs[0].storage.source.__class__ = Own
        with pytest.raises(NotPacked):
            packed(refs[:1])


def test_any_executor_makes_shares(tmp_path):
    source = make_zip(tmp_path)
    options = Options(max_shard_size=SIZE, to="safetensors")
    Job(source, tmp_path / "alone", options).run()
    with ThreadPoolExecutor(3) as executor:
        shared(source, tmp_path / "shared", options, engine_of(executor, None))
    assert files(tmp_path / "alone") == files(tmp_path / "shared")
