"""What a GPU saved opens on a host without one, and what is tagged for a GPU lands on it.

The samples and the other tests write the tags of CUDA devices; here CUDA itself saves and loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptconv import load_into, load_portable, save_portable
from helpers.program import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]

_HOST = """
import sys, torch
assert not torch.cuda.is_available()
kind, path = sys.argv[1:3]
if kind == "script":
    loaded = torch.jit.load(path)
    print(loaded(torch.ones(2, 4)).tolist())
else:
    loaded = torch.load(path, weights_only=True)
    found = {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}
    print({value.device.type for value in found.values()})
    torch.save(found, sys.argv[3])
"""


def on_a_host_without_gpu(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What torch prints there of a file: of the kind ``script`` its answer, else where its tensors
    are, which are saved to the last argument.
    """
    return subprocess.run(
        [sys.executable, "-c", _HOST, *map(str, arguments)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def net(device: str = "cuda:0") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(device).eval()


def wrapped(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model, device_ids=[0])


def all_kinds(device: str) -> dict[str, torch.Tensor]:
    """Tensors of each kind of element, and views that share storages."""
    torch.manual_seed(1)
    long = torch.randn(6, 4, device=device)
    kinds = {
        str(dtype).partition(".")[2]: torch.randn(3, 5, device=device).to(dtype)
        for dtype in (
            torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
            torch.int64, torch.uint8, torch.bool, torch.complex64,
        )
    }  # fmt: skip
    return {
        **kinds,
        "tied": long,
        "view": long[1:3, ::2],
        "turned": long.t(),
        "conj": kinds["complex64"].conj(),
        "empty": torch.empty(0, 3, device=device),
        "one": torch.tensor(1.5, device=device),
    }


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        mine, theirs = (item.resolve_conj().contiguous().cpu() for item in (found[key], value))
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, key
        assert mine.flatten().view(torch.uint8).equal(theirs.flatten().view(torch.uint8)), key


@pytest.mark.parametrize("zipped", [True, False])
def test_data_parallel_weights_open_on_a_host_without_gpu(zipped, tmp_path):
    model = net()
    torch.save(
        wrapped(model).state_dict(), tmp_path / "in.pt", _use_new_zipfile_serialization=zipped
    )
    refused = on_a_host_without_gpu("values", tmp_path / "in.pt", tmp_path / "x.pt")
    assert "Attempting to deserialize object on a CUDA device" in refused.stderr
    done = run("strip-module", "in.pt", "out.pt", cwd=tmp_path)
    assert done.exit == 0 and "cuda:0 → cpu" in done.out + done.err, done
    opened = on_a_host_without_gpu("values", tmp_path / "out.pt", tmp_path / "again.pt")
    assert opened.stdout == "{'cpu'}\n", opened.stderr
    same(torch.load(tmp_path / "again.pt"), model.state_dict())


@pytest.mark.parametrize("zipped", [True, False])
def test_every_kind_of_tensor_comes_from_the_gpu_and_goes_back(zipped, tmp_path):
    values = all_kinds("cuda:0")
    torch.save(values, tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
    assert run("convert", "in.pt", "cpu.pt", cwd=tmp_path).exit == 0
    opened = on_a_host_without_gpu("values", tmp_path / "cpu.pt", tmp_path / "again.pt")
    assert opened.stdout == "{'cpu'}\n", opened.stderr
    same(torch.load(tmp_path / "again.pt"), values)
    assert run("convert", "cpu.pt", "gpu.pt", "--device", "cuda:0", cwd=tmp_path).exit == 0
    back = torch.load(tmp_path / "gpu.pt", weights_only=True)
    assert {str(value.device) for value in back.values()} == {"cuda:0"}
    same(back, values)
    assert back["tied"].data_ptr() == back["turned"].data_ptr()


def test_live_tensors_are_loaded_to_the_gpu_and_saved_from_it(tmp_path):
    values = {key: item.contiguous().clone() for key, item in all_kinds("cuda:0").items()}
    for name in ("out.pt", "out.safetensors"):
        save_portable(values, tmp_path / name)
        for place in ("cuda", "cuda:0", torch.device("cuda", 0), "auto"):
            found = load_portable(tmp_path / name, map_location=place)
            assert {str(item.device) for item in found.values()} == {"cuda:0"}, place
            same(found, values)
    same(load_file(tmp_path / "out.safetensors", device="cuda:0"), values)


def test_a_model_on_the_gpu_takes_weights_from_the_cpu_and_stays_there(tmp_path):
    source = net("cpu")
    torch.save({f"module.{key}": item for key, item in source.state_dict().items()}, tmp_path / "a")
    model = net()
    for value in model.state_dict().values():
        value.zero_()
    assert load_into(model, tmp_path / "a").fits
    assert {str(item.device) for item in model.state_dict().values()} == {"cuda:0"}
    same(model.state_dict(), source.state_dict())
    whole = nn.Sequential(*net())
    assert load_into(wrapped(whole), tmp_path / "a").fits
    same(whole.state_dict(), source.state_dict())


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path):
    """Also with Adam's steps on the GPU (`capturable`), and the states of random numbers, which
    torch keeps on the CPU.
    """

    def step(model, optimizer):
        model.train()(torch.ones(5, 4, device="cuda:0")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def started():
        model = net()
        return model, torch.optim.Adam(model.parameters(), capturable=True)

    model, optimizer = started()
    step(model, optimizer)
    kept = {
        "model": wrapped(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.cuda.get_rng_state_all(),
    }
    torch.save(kept, tmp_path / "in.pt")
    assert run("strip-module", "in.pt", "cpu.pt", cwd=tmp_path).exit == 0
    tags = ("--map-location", "cuda:0=cuda")
    assert run("strip-module", "in.pt", "gpu.pt", *tags, cwd=tmp_path).exit == 0
    drawn = torch.randn(3, device="cuda:0")
    step(model, optimizer)
    for name in ("cpu.pt", "gpu.pt"):
        again = torch.load(tmp_path / name, weights_only=True)
        other, resumed = started()
        other.load_state_dict(again["model"])
        resumed.load_state_dict(again["optimizer"])
        assert all(state["step"].is_cuda for state in resumed.state.values())
        torch.cuda.set_rng_state_all(again["random"])
        assert torch.randn(3, device="cuda:0").equal(drawn)
        step(other, resumed)
        same(other.state_dict(), model.state_dict())


def test_a_torchscript_archive_runs_on_a_host_without_gpu(tmp_path):
    model = net()
    torch.jit.trace(model, torch.ones(2, 4, device="cuda:0")).save(tmp_path / "in.pt")
    weights = {key: value.cpu() for key, value in model.state_dict().items()}
    assert run("convert", "in.pt", "out.safetensors", cwd=tmp_path).exit == 0
    same(load_portable(tmp_path / "out.safetensors"), weights)
    same(load_portable(tmp_path / "in.pt", map_location="cuda:0"), weights)


def test_a_whole_module_gives_its_weights_and_runs_nothing(tmp_path):
    model = wrapped(net())
    torch.save(model, tmp_path / "in.pt")
    assert run("convert", "in.pt", "out.pt", cwd=tmp_path).exit == 0
    opened = on_a_host_without_gpu("values", tmp_path / "out.pt", tmp_path / "again.pt")
    assert opened.stdout == "{'cpu'}\n", opened.stderr
    same(torch.load(tmp_path / "again.pt"), model.module.state_dict())


@pytest.fixture
def mesh(tmp_path: Path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


def test_dtensors_of_a_mesh_of_gpus_are_whole_tensors(mesh, tmp_path):
    values = net().state_dict()
    parted = {
        key: distribute_tensor(value, mesh, [Shard(0)]) if value.ndim else value
        for key, value in values.items()
    }
    dcp.save(parted, checkpoint_id=tmp_path / "folder")
    torch.save(parted, tmp_path / "in.pt")
    for source in ("folder", "in.pt"):
        target = f"{source}.out.pt"
        assert run("convert", source, target, cwd=tmp_path).exit == 0
        opened = on_a_host_without_gpu("values", tmp_path / target, tmp_path / "again.pt")
        assert opened.stdout == "{'cpu'}\n", opened.stderr
        same(torch.load(tmp_path / "again.pt"), values)


def test_doctor_knows_which_gpus_are_here(tmp_path):
    count = torch.cuda.device_count()
    torch.save(net().state_dict(), tmp_path / "here.pt")
    assert run("doctor", "here.pt", cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": "0"}).exit == 0
    away = run("convert", "here.pt", "away.pt", "--device", f"cuda:{count}", cwd=tmp_path)
    assert away.exit == 0
    told = run("doctor", "away.pt", cwd=tmp_path)
    assert told.exit == 1 and f"cuda:{count}" in told.out, told
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(tmp_path / "away.pt")
