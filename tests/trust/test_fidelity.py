"""Nothing is lost on the way round: torch → safetensors → torch → sharded → torch, for every
checkpoint that is at hand.

The first file of the chain is what ckptconv makes of a source; torch alone says what is in the
first, in the last and in the source, where it opens that. `diff` is asked for the same.
"""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

from ckptconv import (
    CheckpointError,
    KeyRules,
    convert_checkpoint,
    diff_checkpoints,
    open_checkpoint,
)
from ckptconv.support.errors import RefusedObject
from helpers import oracle, trees
from helpers.examples import examples
from helpers.program import SAMPLES, run

KEEP = {"keys": KeyRules(wrappers="keep"), "fsync": False}
CORPUS = oracle.corpus_folder()
_MANIFEST = CORPUS / "manifest.json"
ENTRIES = (
    [CORPUS / "files" / entry["file"] for entry in json.loads(_MANIFEST.read_text())]
    if _MANIFEST.is_file()
    else []
)
PRODUCED = CORPUS.parent / "produced"
FRAMEWORKS = sorted(PRODUCED.iterdir()) if PRODUCED.is_dir() else []
TRAVELLED = sorted(path for path in SAMPLES.glob("*.pt"))
HELD = [*sorted(safetensors.torch._SIZE, key=str), torch.complex128]
"""The types that safetensors holds, and one that is taken apart for it; the others are refused, as
other tests say.
"""
# two values in a byte, both of which count in a safetensors shape; a scalar has none
HALF_BYTES = torch.float4_e2m1fn_x2
SHARD = 4096  # bytes; most files of the chain become several shards


def chain(source: Path, folder: Path, only: str | None) -> list[Path]:
    """The five files of the chain for the state dict at `only`."""
    steps = [folder / name for name in ("1.pt", "2.safetensors", "3.pt", "4.safetensors", "5.pt")]
    convert_checkpoint(source, steps[0], only=only, device="cpu", unknown="drop", **KEEP)
    convert_checkpoint(steps[0], steps[1], only=_only(steps[0]), **KEEP)
    convert_checkpoint(steps[1], steps[2], **KEEP)
    encoded = "ckptconv.encodings" in oracle.safetensors_header(steps[1])[0].get("__metadata__", {})
    # those stay in one file
    convert_checkpoint(steps[2], steps[3], max_shard_size=1 << 40 if encoded else SHARD, **KEEP)
    index = folder / "4.safetensors.index.json"
    steps[3] = index if index.exists() else steps[3]
    convert_checkpoint(steps[3], steps[4], **KEEP)
    return steps


def _only(path: Path) -> str | None:
    """The path of the one state dict of a file whose root may hold more than it."""
    with open_checkpoint(path) as opened:
        found = opened.state_dicts()
        return found[0].path or None if len(found) == 1 else None


def tensors_of(root: Any) -> dict[str, torch.Tensor]:
    """The tensors of a state dict by key; what is not a tensor has no place in safetensors.

    A bare tensor is called so, those of a list by their numbers."""
    if isinstance(root, torch.Tensor):
        return {"tensor": root}
    if isinstance(root, (list, tuple)):
        root = dict(enumerate(root))
    return {
        key if isinstance(key, str) else str(key): value
        for key, value in root.items()
        if isinstance(value, torch.Tensor)
    }


def rows(tensors: dict[str, torch.Tensor]) -> list[tuple[Any, Any]]:
    """Every tensor by its key: dtype, shape and bytes of its values, NaNs and zeros as they are;
    layouts apart.
    """
    resolved = {key: oracle.resolved(tensor.detach()) for key, tensor in tensors.items()}
    return sorted(oracle.value_rows(resolved), key=lambda row: row[0])


def ties(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    """The groups of keys that name one and the same view; what safetensors takes apart is not tied
    again.
    """
    groups: dict[Any, set[str]] = {}
    for key, tensor in tensors.items():
        if (
            tensor.layout is torch.strided
            and tensor.dtype in HELD[:-1]
            and not tensor.is_nested
            and tensor.numel()
        ):
            place = (
                tensor.data_ptr(),
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                tensor.is_conj(),
                tensor.is_neg(),
            )
            groups.setdefault(place, set()).add(key)
    return {frozenset(keys) for keys in groups.values() if len(keys) > 1}


def part(root: Any, path: str | None) -> Any:
    """What hangs at the dotted path of a tree."""
    for label in path.split(".") if path else ():
        root = root[label] if isinstance(root, dict) else root[int(label)]
    return root


def loaded(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def assert_nothing_is_lost(source: Path, folder: Path, only: str | None) -> int:
    """Go round, and compare; the number of tensors that did."""
    steps = chain(source, folder, only)
    whole = part(loaded(steps[0]), _only(steps[0]))
    first, last = tensors_of(whole), tensors_of(loaded(steps[-1]))
    assert rows(first) == rows(last)
    assert ties(first) == ties(last)
    for before, after in pairwise(steps[1:]):
        assert diff_checkpoints(before, after).same
    found = diff_checkpoints(steps[0], steps[-1], only=_only(steps[0]))
    others = [key for key in map(str, whole) if key not in first] if isinstance(whole, dict) else []
    assert sorted(found.only_a) == sorted(others)
    assert found.same is not bool(found.only_a)
    assert not (found.only_b or found.dtypes or found.shapes or found.values or found.others)
    assert found.tensors >= len(first)  # of a sparse tensor its indices and values count
    return len(first)


def state_dicts_of(source: Path) -> list[str | None]:
    with open_checkpoint(source) as checkpoint:
        return [found.path or None for found in checkpoint.state_dicts()] or [None]


def go_round(source: Path, folder: Path) -> int:
    """Every state dict of a source goes round."""
    count = 0
    for index, only in enumerate(state_dicts_of(source)):
        (folder / str(index)).mkdir()
        count += assert_nothing_is_lost(source, folder / str(index), only)
    assert count
    return count


def known_to_torch(source: Path) -> Any:
    """What torch finds in a source; None where it does not open it."""
    try:
        return loaded(source)
    except Exception:
        return None


# ------------------------------------------------------------------------------------- a quick part


@pytest.mark.parametrize("path", TRAVELLED, ids=lambda path: path.name)
def test_a_sample_goes_round(path, tmp_path, figure):
    figure("tensors that went round", go_round(path, tmp_path))


def test_what_torch_finds_in_a_sample_is_at_the_end_of_the_chain(tmp_path):
    seen = 0
    for path in TRAVELLED:
        if (root := known_to_torch(path)) is None:
            continue
        for index, only in enumerate(state_dicts_of(path)):
            (folder := tmp_path / f"{path.stem}{index}").mkdir()
            steps = chain(path, folder, only)
            assert rows(tensors_of(part(root, only))) == rows(tensors_of(loaded(steps[-1]))), path
            assert ties(tensors_of(part(root, only))) == ties(tensors_of(loaded(steps[-1]))), path
            seen += 1
    assert seen >= 8


def test_the_program_says_so(tmp_path):
    steps = chain(SAMPLES / "tied.pt", tmp_path, state_dicts_of(SAMPLES / "tied.pt")[0])
    done = run("diff", steps[0], steps[-1], cwd=tmp_path)
    assert done.exit == 0 and done.out.startswith("same: ")
    bits = torch.load(steps[-1], weights_only=True)
    first = next(iter(bits))
    bits[first] = bits[first].clone()
    bits[first].view(torch.uint8).view(-1)[0] ^= 1
    torch.save(bits, steps[-1])
    assert run("diff", steps[0], steps[-1], cwd=tmp_path).exit == 1


def floats() -> torch.Tensor:
    """NaNs with payloads, both zeros, subnormals and infinities."""
    words = [0x7FC00001, 0x7F800001, -0x3EDCBB, 0, -(1 << 31), 1, 0x7F800000, 0x00800000]
    return torch.tensor(words, dtype=torch.int32).view(torch.float32)


def halves() -> torch.Tensor:
    return torch.tensor([0x7E01, 0x7C01, -0x8000, 0, 1, -1], dtype=torch.int16)


def odd_bits() -> dict[str, torch.Tensor]:
    """Such values in all widths, laid out in all ways that every container of torch holds."""
    made = {
        "f32": floats(),
        "f32.columns": floats().reshape(2, 4).t(),
        "f32.steps": floats()[::2],
        "f32.expanded": floats()[:1].expand(3),
        "c64": floats().view(torch.complex64),
        "c64.conj": floats().view(torch.complex64).conj(),
        "f32.neg": torch._neg_view(floats()),
        "f64": torch.tensor([0x7FF0000000000001, -(1 << 63), 1], dtype=torch.int64).view(
            torch.float64
        ),
        "f16": halves().view(torch.float16),
        "bf16": halves().view(torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "c128": torch.tensor([complex(-0.0, float("nan"))], dtype=torch.complex128),
        "sparse": torch.eye(3).to_sparse(),
    }
    return made | {
        "tied": made["f32"],
        "tied.too": made["f32"][:],
        "tied.columns": made["f32.columns"],
    }


def newer_bits() -> dict[str, torch.Tensor]:
    """Types that torch learned later, which no legacy file holds."""
    eights = torch.arange(256, dtype=torch.uint8)
    return {
        "f8_e4m3": eights.clone().view(torch.float8_e4m3fn),
        "f8_e5m2": eights.clone().view(torch.float8_e5m2),
        "u16": halves().view(torch.uint16),
        "u64": torch.tensor([-1, 0], dtype=torch.int64).view(torch.uint64),
    }


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_every_bit_of_odd_values_goes_round(legacy, tmp_path):
    tree = odd_bits() | ({} if legacy else newer_bits())
    torch.save(tree, tmp_path / "in.pt", _use_new_zipfile_serialization=not legacy)
    assert_nothing_is_lost(tmp_path / "in.pt", tmp_path, None)
    last = loaded(tmp_path / "5.pt")
    assert rows(last) == rows(tree)
    assert ties(last) == {
        frozenset(("f32", "tied", "tied.too")),
        frozenset(("f32.columns", "tied.columns")),
    }


def any_state_dict(drawn: trees.Drawn, key: str | None = None) -> None:
    """A drawn state dict, by itself or at `key` of a training checkpoint, goes round; scalars of
    half bytes are refused.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        beside = {"epoch": 3, "optimizer": {"state": {}, "param_groups": []}}
        torch.save({key: drawn.tree, **beside} if key else drawn.tree, folder / "in.pt")
        if any(
            value.dtype is HALF_BYTES and not value.shape
            for value in tensors_of(drawn.tree).values()
        ):
            with pytest.raises(RefusedObject, match="no scalars of float4_e2m1fn_x2"):
                chain(folder / "in.pt", folder, key)
            assert sorted(path.name for path in folder.iterdir()) == ["1.pt", "in.pt"]
            return
        assert_nothing_is_lost(folder / "in.pt", folder, key)
        assert rows(tensors_of(part(loaded(folder / "in.pt"), key))) == rows(
            tensors_of(loaded(folder / "5.pt"))
        )


QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(trees.state_dicts(HELD, plain=True))
def test_any_state_dict_goes_round(drawn):
    any_state_dict(drawn)


# ------------------------------------------------------------------------------------ the long part


@pytest.mark.trust
@settings(QUICK, max_examples=examples(1000))
@given(trees.state_dicts(HELD, plain=True))
def test_any_of_a_thousand_state_dicts_goes_round(drawn):
    any_state_dict(drawn)


@pytest.mark.trust
@settings(QUICK, max_examples=examples(200))
@given(trees.state_dicts(HELD, plain=True))
def test_any_part_of_a_training_checkpoint_goes_round(drawn):
    any_state_dict(drawn, "model")


def each(paths: list[Path]) -> pytest.MarkDecorator:
    absent = [pytest.param(Path(), id="absent")]
    return pytest.mark.parametrize(
        "path", [pytest.param(path, id=path.name) for path in paths] or absent
    )


REFUSED = {
    "tracel-ai__burn__tar_multi_dtype.tar": "not one of torch",
    "torchao_int8.pt": "a tensor of which torchao.quantization.Int8Tensor is a part",
    "torchtitan": "choose one with --tag: new, old",
}
"""What is not a checkpoint, tensors whose values only their class knows, and a folder of two
checkpoints.
"""


def go_round_or_be_refused(path: Path, folder: Path) -> int:
    if path.name not in REFUSED:
        return go_round(path, folder)
    with pytest.raises(CheckpointError, match=REFUSED[path.name]):
        go_round(path, folder)
    return 0


@pytest.mark.trust
@pytest.mark.corpus
@each(ENTRIES)
def test_what_other_people_wrote_goes_round(path, corpus, tmp_path, figure):
    figure("tensors that went round", go_round_or_be_refused(path, tmp_path))


RANKS = "rank0_dtensor.pt", "rank1_dtensor.pt"


@pytest.mark.trust
@pytest.mark.corpus
@each([path for path in FRAMEWORKS if path.name not in (*RANKS, "README.md")])
def test_what_a_framework_wrote_goes_round(path, produced, tmp_path, figure):
    figure("tensors that went round", go_round_or_be_refused(path, tmp_path))


@pytest.mark.trust
@pytest.mark.corpus
def test_the_files_of_two_ranks_go_round(produced, tmp_path, figure):
    convert_checkpoint([produced / name for name in RANKS], tmp_path / "joined.pt", **KEEP)
    figure("tensors that went round", go_round(tmp_path / "joined.pt", tmp_path))
