"""A program of a user: the whole public API, as somebody writes it who knows torch. `make lint` has
mypy hold it against the types (strict), and a test runs it.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import ckptconv
from ckptconv import (
    Checkpoint,
    CheckpointError,
    ConversionResult,
    Difference,
    Drop,
    Job,
    KeyRules,
    LazyTensor,
    Options,
    Progress,
    RenameKeys,
    Tolerance,
    average,
    average_checkpoints,
    best_device,
    convert_checkpoint,
    convert_many,
    diagnose,
    diagnose_checkpoint,
    diff_checkpoints,
    edit,
    edit_checkpoint,
    execute_plan,
    fit_keys,
    inspect_checkpoint,
    limits,
    load_into,
    load_portable,
    merge,
    merge_checkpoints,
    open_checkpoint,
    plan_conversion,
    read_key_rules,
    report,
    report_checkpoint,
    save_portable,
    scan_checkpoint,
    stats,
    stats_checkpoint,
)


def bare(key: str) -> str | None:
    """The name of a key without its wrapper; None leaves it out."""
    return None if key.endswith("num_batches_tracked") else key.removeprefix("module.")


def the_model(checkpoint: Checkpoint) -> Checkpoint:
    """An edit of a user's own."""
    return replace(checkpoint, notes=(*checkpoint.notes, "looked at"))


def opened(path: Path) -> tuple[int, float]:
    """An open checkpoint as a mapping: slices, numpy, torch, statistics."""
    with open_checkpoint(path, edits=[Drop("*.num_batches_tracked"), the_model]) as checkpoint:
        names = list(checkpoint)
        tensor: LazyTensor = checkpoint[names[0]]
        first = tensor[0:1].numpy()
        live: torch.Tensor = tensor.torch(torch.device("cpu"))
        assert tensor.dtype == live.dtype and tensor.shape == tuple(live.shape)
        assert np.array_equal(np.asarray(tensor)[0:1], first)
        assert "nothing" not in checkpoint and checkpoint.get("nothing") is None
        mean = tensor.stats().statistics.mean
        assert mean is not None
        sizes = {name: item.nbytes for name, item in checkpoint.items()}
        return sum(sizes.values()), mean


def loaded(path: Path) -> OrderedDict[str, torch.Tensor]:
    """Live tensors, by what torch calls things and by what ckptconv calls them."""
    half = load_portable(path, torch.device("cpu"), dtype=torch.bfloat16, keep_dtype="*.bias")
    named = load_portable(path, "cpu", dtype="bf16", keep_dtype=["*.bias"])
    assert half.keys() == named.keys()
    chosen = load_portable(
        path,
        dtype=np.float16,
        cast={"head.*": np.dtype("f8")},
        rename={"features.": "body."},
        regex=[(r"^classifier\.", "head.")],
        include="*.weight",
        edits=[Drop("*.num_batches_tracked")],
    )
    assert all(key.startswith(("body.", "head.")) for key in chosen)
    everything = load_portable(path, whole=True)
    assert everything is not None
    load_portable(path, keys=bare, map_location={"cuda:3": "cpu"})
    return half


def in_memory(path: Path) -> bytes:
    """Files that are open, and bytes that are nowhere on a disk."""
    buffer = io.BytesIO()
    with path.open("rb") as file:
        result: ConversionResult = convert_checkpoint(
            file,
            buffer,
            to="safetensors",
            dtype=torch.float16,
            device=torch.device("cuda:0"),
            metadata={"license": "mit"},
        )
    assert result.nbytes == len(buffer.getvalue())
    buffer.seek(0)
    tensors = load_portable(buffer)
    again = io.BytesIO()
    save_portable(tensors, again, to="safetensors", dtype=torch.float32, metadata={"by": "me"})
    again.seek(0)
    assert scan_checkpoint(again).level == "plain"
    assert inspect_checkpoint(again).tensors == len(tensors)
    assert {item.name for item in stats_checkpoint(again).tensors} == tensors.keys()
    return again.getvalue()


def compared(path: Path) -> Difference:
    """Differences, exact and with a tolerance."""
    found = diff_checkpoints(path, str(path), tolerance=Tolerance(rtol=1e-3), ignore_dtype=True)
    with path.open("rb") as file:
        assert diff_checkpoints(file, path, keys="keep").same
    return found


def converted(path: Path, folder: Path) -> Iterator[str]:
    """Plans, jobs, and what is told of them."""
    seen: list[Progress] = []
    tags = {"cuda:3": torch.device("cpu")}
    options = Options(rename={"features.": "f."}, dtype=torch.bfloat16, map_location=tags)
    with open_checkpoint(path) as checkpoint:
        plan = plan_conversion(checkpoint, folder / "planned.safetensors", options)
        execute_plan(plan, force=True, on_progress=seen.append)
    assert seen[-1].done == seen[-1].total
    rules = KeyRules.of([("rename", "features.=f."), ("exclude", "*.bias")])
    convert_checkpoint(path, folder / "ruled.pt", keys=rules, save_mapping=folder / "map.json")
    with open_checkpoint(path, edits=[RenameKeys(read_key_rules(folder / "map.json"))]) as renamed:
        assert len(renamed.state_dict().keys) > 0
    jobs = [Job(path, folder / "a.safetensors", options), Job(path, folder / "second.pt")]
    for receipt in convert_many(jobs):
        yield receipt.state


def combined(path: Path, folder: Path) -> None:
    """Several as one, from lists and generators; headers in their place; pages."""
    out = folder / "both.safetensors"
    average_checkpoints((path for _ in range(2)), folder / "mean.pt", weights=(n for n in (1, 2)))
    average([path, path], folder / "mean2.pt", dtype=torch.float16)
    save_portable({"b.w": torch.ones(2)}, folder / "b.pt")
    merge_checkpoints([path, folder / "b.pt"], out, device=torch.device("cpu"))
    merge([path, folder / "b.pt"], folder / "both.pt")
    edit_checkpoint(out, metadata={"license": "mit"}, rename={"b.": "c."})
    assert edit(out, device=torch.device("cuda:1")).in_place
    assert report_checkpoint(path, folder / "page.html").same is None
    assert report(path, folder / "page2.html", against=path).same
    assert diagnose_checkpoint(path, device=torch.device("cpu")).format == diagnose(path).format
    assert len(stats(path).tensors) > 0


def fitted(path: Path) -> None:
    """A model of a user's own."""
    tensors = load_portable(path)
    model = torch.nn.Linear(2, 3)
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    assert fit_keys(shapes, shapes).fits
    try:
        load_into(model, path)
    except CheckpointError as error:
        assert error.what and error.hint is not None
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert load_into(model, buffer).fits


def main(path: Path, folder: Path) -> None:
    """All of it, of one checkpoint."""
    with limits(nodes=100_000) as inside:
        assert inside.nodes == 100_000
        nbytes, _ = opened(path)
    assert nbytes > 0 and ckptconv.__version__ and best_device()
    assert len(loaded(path)) > 0 and len(in_memory(path)) > 0
    assert compared(path).same
    assert [*converted(path, folder)] == ["done", "done"]
    combined(path, folder)
    fitted(path)
