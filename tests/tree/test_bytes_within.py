"""A checkpoint that lies as bytes in a tree is never left out in silence."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from ckptconv import AmbiguousStateDict, convert_checkpoint, load_portable

WEIGHTS = {"w": torch.ones(2)}


def stream(**options: bool) -> bytes:
    file = io.BytesIO()
    torch.save(WEIGHTS, file, **options)
    return file.getvalue()


class Net:
    """As skorch pickles itself: the module in bytes of its state, an array beside it."""

    def __getstate__(self) -> dict[str, object]:
        return {"classes_inferred_": np.arange(3), "__cuda_dependent_attributes__": stream()}


HOLDERS: dict[str, tuple[Callable[[], object], str]] = {
    "skorch": (Net, r"<state>\.__cuda_dependent_attributes__"),
    "a zip": (lambda: {"model": WEIGHTS, "worker": stream()}, "worker"),
    "an older file": (
        lambda: {"model": WEIGHTS, "a": [stream(_use_new_zipfile_serialization=False)]},
        r"a\.0",
    ),
    "a pickle": (lambda: {"model": WEIGHTS, "a": pickle.dumps(WEIGHTS)}, "a"),
    "a pickle of arrays": (lambda: {"model": WEIGHTS, "a": pickle.dumps(np.ones(3))}, "a"),
    "safetensors": (lambda: {"model": WEIGHTS, "a": save(WEIGHTS)}, "a"),
    "a file in memory": (lambda: {"model": WEIGHTS, "a": io.BytesIO(stream())}, "a.*"),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_checkpoint_in_bytes_is_named_where_it_would_be_left_out(kind, tmp_path):
    make, where = HOLDERS[kind]
    torch.save(make(), tmp_path / "a.pt")
    for take in (
        lambda: convert_checkpoint(tmp_path / "a.pt", tmp_path / "a.safetensors"),
        lambda: load_portable(tmp_path / "a.pt"),
    ):
        with pytest.raises(AmbiguousStateDict, match=rf"{where}: is a checkpoint in bytes.*--only"):
            take()
    if kind != "skorch":
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "a.safetensors", only="model")
        assert load_file(tmp_path / "a.safetensors")["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "beside",
    [
        {"rng_state": pickle.dumps(np.random.RandomState(0).get_state())},
        {"settings": pickle.dumps({"lr": 1})},
        {"text": b"\x80 euro"},
        {"model.a": np.frombuffer(b"PK\3\4" * 4, np.uint8)},
    ],
)
def test_bytes_that_hold_no_weights_are_not_asked_about(beside, tmp_path):
    torch.save({**WEIGHTS, **beside}, tmp_path / "a.pt")
    assert "w" in load_portable(tmp_path / "a.pt")
