"""Threads that cast ranges of a tensor, and threads that write files side by side: torch, and the
same conversion in one thread, are what they are held against.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
import tracemalloc
from contextvars import ContextVar
from functools import partial
from itertools import count, permutations
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptconv.convert.execute as execute_module
import ckptconv.convert.write as write_module
import ckptconv.tensors.compute_ahead as cast_module
import ckptconv.tensors.computed as computed_module
import ckptconv.tensors.stream as stream_module
from ckptconv import (
    CheckpointError,
    MalformedCheckpoint,
    OutputRefused,
    convert_checkpoint,
)
from ckptconv.convert.lanes import Unwanted, side_by_side
from ckptconv.io.files import FileSource
from ckptconv.support import platforms
from helpers.oracle import stored_bytes

THREADS = 3


@pytest.fixture
def threaded(monkeypatch):
    """Threads for all that may have them, whatever its size and the machine; what is yielded sets
    how many.
    """

    def use(threads: int) -> None:
        monkeypatch.setattr(execute_module, "THREADS", threads)

    monkeypatch.setattr(execute_module, "_WORTH_LANES", 0)
    monkeypatch.setattr(write_module, "_WORTH_THREADS", 0)
    monkeypatch.setattr(cast_module, "_STEPS", 2)
    monkeypatch.setattr(cast_module, "_STEP", 40 << 10)
    use(THREADS)
    return use


def tensors() -> dict[str, torch.Tensor]:
    """Large and small ones, with values that overflow, one in a longer storage, one strided."""
    torch.manual_seed(1)
    wide = torch.randn(300, 301)
    wide[7, 7], wide[100, 3] = 1e6, float("nan")
    return {
        "a.weight": wide,
        "a.bias": torch.randn(7),
        "b.half": torch.randn(70_001).half(),
        "b.part": torch.randn(90_000)[1000:],
        "b.strided": torch.randn(200, 300).t(),
        "b.steps": torch.arange(1000),
        "c.double": torch.randn(40_000, dtype=torch.float64) * 1e5,
        "c.mask": torch.tensor([True, False] * 500),
        "d.weight": torch.randn(500, 200) * 1e5,
    }


@pytest.fixture
def model(tmp_path):
    torch.save(tensors(), tmp_path / "m.pt")
    return tmp_path / "m.pt"


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def callers(monkeypatch, name: str) -> set[str]:
    """The names of the threads that call a function of `platforms`, as they are met."""
    names: set[str] = set()
    call = getattr(platforms, name)

    def noted(*given: object) -> object:
        names.add(threading.current_thread().name.partition("_")[0])
        return call(*given)

    monkeypatch.setattr(platforms, name, noted)
    return names


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


# ------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
def test_transposes_by_threads_are_those_of_torch(dtype, threaded, tmp_path, monkeypatch):
    """In parts of many sizes, larger than a step, of spans and strips and tiles that are small."""
    small = {"_SMALL": 64, "A_READ": 64, "_SPAN": 1 << 12, "_IN_CACHE": 16}
    numbers = [
        (stream_module, {**small, "_TILE": 8, "_TILES": 3 * 64 * dtype.itemsize}),
        (computed_module, {"_STRIP": 1 << 14, "_KEPT": 1 << 15, "_STEP": 500}),
        (cast_module, {"_STEP": 2000, "_ROOM": 1 << 14}),
        (write_module, {"SMALL": 0}),
    ]
    for module, each in numbers:
        for name, number in each.items():
            monkeypatch.setattr(module, name, number)
    shapes = [(60, 91), (128, 64), (3, 70, 50), (40, 5, 30), (3, 4, 21, 34)]
    raw = torch.randint(256, (40_000 * dtype.itemsize,), dtype=torch.uint8)
    wanted = [(shape, order) for shape in shapes for order in permutations(range(len(shape)))]
    made, rules = {}, []
    for index, (shape, order) in enumerate(wanted):
        first = raw[: prod(shape) * dtype.itemsize]
        made[f"t.{index}"] = first.view(dtype).reshape(shape).clone()
        change = {"permute": list(order)}
        rules.append({"from": f"t.{index}", "to": f"o.{index}", "operations": [change]})
    save_file(made, tmp_path / "m.safetensors")
    convert_checkpoint(tmp_path / "m.safetensors", tmp_path / "o.safetensors", rules=rules)
    found = load_file(tmp_path / "o.safetensors")
    for index, (_, order) in enumerate(wanted):
        expected = made[f"t.{index}"].permute(order).contiguous()
        assert found[f"o.{index}"].shape == expected.shape
        assert stored_bytes(found[f"o.{index}"]) == stored_bytes(expected), (order, expected.shape)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64", None])
@pytest.mark.parametrize("name", ["o.pt", "o.safetensors", "o.npz"])
def test_one_file_is_what_one_thread_writes(name, dtype, model, threaded, monkeypatch):
    if dtype == "bf16" and name == "o.npz":
        pytest.skip("numpy has no bfloat16")
    made, told = [], []
    for threads in (1, THREADS):
        threaded(threads)
        names = callers(monkeypatch, "write_at")
        output = model.parent / str(threads) / name
        output.parent.mkdir()
        result = convert_checkpoint(
            model, output, dtype=dtype, verify=True, on_progress=told.append
        )
        made.append((hashes(output.parent), result.overflowed))
        assert ("ckptconv-computer" in names) == (threads > 1 and dtype is not None)
    assert made[0] == made[1]
    assert (made[0][1] != {}) == (dtype == "f16")
    for phase in ("write", "verify"):
        done = [progress.done for progress in told if progress.phase == phase]
        assert done.count(0) == 2 and sorted(done[: len(done) // 2]) == done[: len(done) // 2]


def test_torch_finds_its_own_casts(model, threaded):
    convert_checkpoint(model, model.with_name("o.safetensors"), dtype="bf16")
    found = load_file(model.with_name("o.safetensors"))
    for key, tensor in tensors().items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(found[key].nan_to_num(), wanted.nan_to_num()), key


@pytest.mark.parametrize("options", [{}, {"dtype": "f16"}, {"dtype": "bf16", "to": "torch"}])
def test_shards_are_what_one_thread_writes(options, model, threaded, monkeypatch):
    made, told = [], []
    for threads in (1, THREADS):
        threaded(threads)
        names = callers(monkeypatch, "create_file")
        output = model.parent / str(threads)
        result = convert_checkpoint(
            model, output, max_shard_size="100KB", verify=True, on_progress=told.append, **options
        )
        assert len(result.plan.files) > THREADS
        assert ("ckptconv-lane" in names) == (threads > 1)
        assert {"open", "write", "verify", "sync"} == set(result.phases)
        assert sum(result.phases.values()) <= result.seconds
        made.append(
            (hashes(output), result.verified, dict(result.overflowed), [*result.overflowed])
        )
    assert made[0] == made[1]
    whole = [progress for progress in told if progress.done == progress.total]
    assert sum(progress.phase == "write" for progress in whole) == 2


def test_progress_is_told_by_the_thread_that_called(model, threaded):
    names = set()
    convert_checkpoint(
        model, model.parent / "o", max_shard_size="100KB", verify=True,
        on_progress=lambda _: names.add(threading.current_thread()),
    )  # fmt: skip
    assert names == {threading.current_thread()}


@pytest.mark.parametrize("lacked", ["source", "system"])
def test_what_is_not_for_threads_is_written_by_one(lacked, model, threaded, monkeypatch):
    names = callers(monkeypatch, "write_at")
    if lacked == "source":
        monkeypatch.setattr(FileSource, "is_for_threads", lambda self: False)
    else:
        monkeypatch.setattr(platforms, "CAN_WRITE_AT", False)
    convert_checkpoint(model, model.with_name("o.safetensors"), dtype="bf16", verify=True)
    assert names == set()


# ---------------------------------------------------------------------------------------- failures


def damaged(model: Path, *keys: str) -> None:
    """Change a byte of each of the tensors of these keys."""
    raw = bytearray(model.read_bytes())
    for key in keys:
        values = tensors()[key].contiguous().view(torch.uint8).numpy().tobytes()
        raw[raw.index(values[-4000:]) + 3996] ^= 1
    model.write_bytes(raw)


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"max_shard_size": "100KB"}])
def test_of_two_damaged_tensors_the_first_is_named(options, model, threaded):
    damaged(model, "a.weight", "d.weight")
    before, said = left(model.parent), []
    for threads in (1, THREADS, THREADS, THREADS):
        threaded(threads)
        with pytest.raises(MalformedCheckpoint, match="CRC-32") as raised:
            convert_checkpoint(model, model.parent / "o", to="safetensors", **options)
        said.append(str(raised.value))
        assert left(model.parent) == before
    assert len(set(said)) == 1 and "data/0" in said[0]


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"max_shard_size": "100KB"}])
def test_damage_in_a_storage_that_is_copied_in_part_is_found(options, model, threaded):
    damaged(model, "b.part")
    for threads in (1, THREADS):
        threaded(threads)
        with pytest.raises(MalformedCheckpoint, match="data/3: its bytes have the CRC-32"):
            convert_checkpoint(model, model.parent / "o", to="safetensors", **options)


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"max_shard_size": "100KB"}])
def test_a_disk_that_fills_in_a_thread_leaves_nothing(options, model, threaded, monkeypatch):
    before, numbers = left(model.parent), count()

    def failing(*given):
        if next(numbers) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.02)
        return write(*given)

    name = "write_at" if "dtype" in options else "create_file"
    write = getattr(platforms, name)
    monkeypatch.setattr(platforms, name, failing)
    with pytest.raises(OutputRefused, match="the disk is full"):
        convert_checkpoint(model, model.parent / "o", to="safetensors", **options)
    assert next(numbers) > 5 and left(model.parent) == before
    assert ours() == []


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"max_shard_size": "100KB"}])
def test_an_interrupt_leaves_nothing(options, model, threaded):
    before = left(model.parent)
    for moment in range(3):
        numbers = count()

        def interrupted(_, numbers=numbers, moment=moment):
            if next(numbers) == moment:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(
                model, model.parent / "o", to="safetensors", on_progress=interrupted, **options
            )
        assert left(model.parent) == before and ours() == []


def ours() -> list[str]:
    """The threads of ckptconv that still run, but for those that fetch, which stay."""
    names = [each.name for each in threading.enumerate()]
    return [name for name in names if name.startswith("ckptconv-") and name != "ckptconv-fetcher"]


@pytest.mark.trust
@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"max_shard_size": "20MB"}])
def test_memory_is_bounded(options, tmp_path):
    """At the sizes that are really used: 4 threads, whatever this machine has."""
    torch.save({f"{n}": torch.zeros(5_000_000) for n in range(8)}, tmp_path / "m.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute_module, "THREADS", 4)
        tracemalloc.start()
        convert_checkpoint(tmp_path / "m.pt", tmp_path / "o", to="safetensors", **options)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 40e6


# ------------------------------------------------------------------------------------------- lanes


def test_results_come_in_order_and_each_runs_once():
    ran = []

    def work(number, say):
        ran.append(number)
        return number * number

    for lanes in (1, 2, 50):
        ran.clear()
        works = [partial(work, number) for number in range(20)]
        assert side_by_side(works, lanes) == [number * number for number in range(20)]
        assert sorted(ran) == [*range(20)]
    assert side_by_side([], 3) == []


def test_the_error_of_the_first_work_is_raised_and_those_behind_are_told_to_stop():
    failed, stopped = threading.Event(), threading.Event()

    def early(say):
        assert failed.wait(10)
        say(lambda: None)
        raise CheckpointError("of the first")

    def late(say):
        failed.set()
        raise CheckpointError("of the second")

    def endless(say):
        try:
            while True:
                say(lambda: None)
        except Unwanted:
            stopped.set()
            raise

    with pytest.raises(CheckpointError, match="of the first"):
        side_by_side([early, late, endless, lambda say: pytest.fail("was begun")], 3)
    assert stopped.is_set() and ours() == []


def test_what_a_work_says_is_done_by_the_caller_whose_errors_stop_all():
    def endless(say):
        while True:
            say(partial(said.append, threading.current_thread()))
            say(lambda: names.append(threading.current_thread().name))
            say(partial(next, numbers))

    said, names, numbers = [], [], iter(range(10))
    with pytest.raises(StopIteration):
        side_by_side([endless] * 3, 3)
    assert set(names) == {threading.current_thread().name}
    assert threading.current_thread() not in said and ours() == []


LIMIT = ContextVar("limit", default=0)


def test_works_see_the_settings_of_the_caller():
    token = LIMIT.set(7)
    try:
        assert side_by_side([lambda say: LIMIT.get()] * 3, 2) == [7, 7, 7]
    finally:
        LIMIT.reset(token)
