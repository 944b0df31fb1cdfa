"""Meta's parallel parts of a Llama, cut here as its own layers cut them, are joined."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptconv import convert_checkpoint, load_portable
from ckptconv.support.errors import CheckpointError

DIM, HIDDEN, VOCAB, HEADS, GROUPS = 16, 24, 20, 4, 2


def llama() -> dict[str, torch.Tensor]:
    shapes = {
        "tok_embeddings.weight": (VOCAB, DIM),
        "norm.weight": (DIM,),
        "output.weight": (VOCAB, DIM),
        "layers.0.attention.wq.weight": (DIM, DIM),
        "layers.0.attention.wk.weight": (DIM // 2, DIM),
        "layers.0.attention.wv.weight": (DIM // 2, DIM),
        "layers.0.attention.wo.weight": (DIM, DIM),
        "layers.0.feed_forward.w1.weight": (HIDDEN, DIM),
        "layers.0.feed_forward.w2.weight": (DIM, HIDDEN),
        "layers.0.feed_forward.w3.weight": (HIDDEN, DIM),
        "layers.0.attention_norm.weight": (DIM,),
        "layers.0.ffn_norm.weight": (DIM,),
        "rope.freqs": (2,),
        "layers.0.attention.inner_attention.rope.freqs": (2,),  # of Llama 1
    }
    return {key: torch.randn(shape) for key, shape in shapes.items()}


def split(model: dict[str, torch.Tensor], folder: Path, count: int, embedding: int) -> None:
    folder.mkdir()
    for at in range(count):
        part = {}
        for key, value in model.items():
            axis = 1 if key.endswith(("wo.weight", "w2.weight")) else 0
            axis = embedding if key == "tok_embeddings.weight" else axis
            whole = value.ndim == 1
            part[key] = value if whole else value.chunk(count, axis)[at].contiguous()
        torch.save(part, folder / f"consolidated.{at:02}.pth")


@pytest.mark.parametrize("embedding", [0, 1])
@pytest.mark.parametrize("count", [2, 4])
def test_slices_become_the_whole_tensors(count, embedding, tmp_path):
    model = llama()
    split(model, tmp_path / "in", count, embedding)
    found = load_portable(tmp_path / "in")
    assert {*found} == {*model}
    assert all(torch.equal(found[key], value) for key, value in model.items())


def test_slices_become_a_model_of_the_hub(tmp_path):
    model = llama()
    split(model, tmp_path / "in", 2, 1)
    (tmp_path / "in" / "params.json").write_text(
        json.dumps({"dim": DIM, "n_heads": HEADS, "n_kv_heads": GROUPS})
    )
    convert_checkpoint(
        tmp_path / "in", tmp_path / "out.safetensors", preset="meta-llama", verify=True
    )
    found = load_file(tmp_path / "out.safetensors")
    key = "layers.0.attention.wk.weight"
    pairs = model[key].unflatten(0, (GROUPS, -1, 2))
    halves = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).flatten(0, 1)
    assert torch.equal(found["model.layers.0.self_attn.k_proj.weight"], halves)
    assert torch.equal(found["model.embed_tokens.weight"], model["tok_embeddings.weight"])
    assert not any("freq" in key for key in found)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda part: part.pop("output.weight"), "output.weight: is in one of"),
        (lambda part: part.update({"adapter": torch.ones(2, 2)}), "adapter: is in one of"),
        (
            lambda part: part.update({"output.weight": [1]}),
            "output.weight: is not a tensor in each",
        ),
        (lambda part: part["norm.weight"].add_(1), "norm.weight: differs between the parts"),
        (
            lambda part: part.update({"output.weight": torch.ones(3, DIM)}),
            "output.weight: has another shape in another part",
        ),
    ],
)
def test_parts_that_do_not_fit_are_an_error(spoil, message, tmp_path):
    split(llama(), tmp_path / "in", 2, 1)
    path = tmp_path / "in" / "consolidated.01.pth"
    part = torch.load(path)
    spoil(part)
    torch.save(part, path)
    with pytest.raises(CheckpointError, match=message):
        load_portable(tmp_path / "in")


def test_a_part_that_is_missing_is_an_error(tmp_path):
    split(llama(), tmp_path / "in", 4, 0)
    (tmp_path / "in" / "consolidated.03.pth").unlink()
    with pytest.raises(CheckpointError, match=r"wq.weight: has 12 rows in 3 parts, of 16"):
        load_portable(tmp_path / "in")


def test_keys_of_another_model_in_all_parts_are_an_error(tmp_path):
    split(llama() | {"layers.0.moe.weight": torch.ones(4, 4)}, tmp_path / "in", 2, 0)
    with pytest.raises(CheckpointError, match=r"moe.weight: is in all parts, and is not a tensor"):
        load_portable(tmp_path / "in")
