"""Ranks of Megatron-LM joined: a whole model is cut here as Megatron's parallel layers cut it, each
tensor by what it is, and has to come back.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from ckptconv import KeyRules, convert_checkpoint, load_portable, open_checkpoint
from ckptconv.support.errors import (
    CheckpointError,
    IncompleteCheckpoint,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
)
from helpers import oracle
from helpers.paths import DATA

Tensors = dict[str, torch.Tensor]
HIDDEN, HEADS, GROUPS, SIZE, FFN, VOCABULARY, LAYERS = 32, 8, 4, 4, 48, 64, 4


# ------------------------------------------------------- what Megatron's layers leave to each rank


def same(whole: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    return whole


def column(whole: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """ColumnParallelLinear and VocabParallelEmbedding: rows of the weight."""
    rows = whole.shape[0] // count
    return whole[rank * rows : (rank + 1) * rows]


def row(whole: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """RowParallelLinear: columns of the weight."""
    columns = whole.shape[1] // count
    return whole[:, rank * columns : (rank + 1) * columns]


def gated(whole: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """The first matrix of a gated MLP: a rank has its rows of the gate above those of the rest."""
    units = whole.shape[0] // 2
    return torch.cat([column(half, rank, count) for half in (whole[:units], whole[units:])])


class Cut(NamedTuple):
    whole: torch.Tensor
    by: Callable[[torch.Tensor, int, int], torch.Tensor]


def random(by: Callable[..., torch.Tensor], *shape: int) -> Cut:
    return Cut(torch.randn(shape), by)


QKV = (HEADS + 2 * GROUPS) * SIZE


def mlp(name: str, glu: bool) -> dict[str, Cut]:
    units = 2 * FFN if glu else FFN
    return {
        f"{name}linear_fc1.weight": random(gated if glu else column, units, HIDDEN),
        f"{name}linear_fc1.bias": random(gated if glu else column, units),
        f"{name}linear_fc2.weight": random(row, HIDDEN, FFN),
        f"{name}linear_fc2.bias": random(same, HIDDEN),
    }


def dense(glu: bool) -> dict[str, Cut]:
    return {"mlp.linear_fc1.layer_norm_weight": random(same, HIDDEN), **mlp("mlp.", glu)}


def sparse(glu: bool) -> dict[str, Cut]:
    layer = {"pre_mlp_layernorm.weight": random(same, HIDDEN),
             "mlp.router.weight": random(same, 3, HIDDEN)}  # fmt: skip
    for expert in range(3):
        layer |= mlp(f"mlp.experts.local_experts.{expert}.", glu)
    return layer | mlp("mlp.shared_experts.", glu)


def grouped(glu: bool) -> dict[str, Cut]:
    """Experts of Transformer Engine's grouped matrices."""
    layer = {"pre_mlp_layernorm.weight": random(same, HIDDEN),
             "mlp.router.weight": random(same, 3, HIDDEN),
             "mlp.router.expert_bias": random(same, 3)}  # fmt: skip
    for expert in range(3):
        single = mlp("mlp.experts.", glu)
        layer |= {f"{name}{expert}": each for name, each in single.items() if "weight" in name}
    return layer


def model(
    of_layer: Callable[[bool], dict[str, Cut]] = dense, glu: bool = True, tied: bool = False
) -> dict[str, Cut]:
    """A whole model in the names of Megatron core."""
    made = {"embedding.word_embeddings.weight": random(column, VOCABULARY, HIDDEN)}
    for at in range(LAYERS):
        layer = {
            "self_attention.linear_qkv.layer_norm_weight": random(same, HIDDEN),
            "self_attention.linear_qkv.weight": random(column, QKV, HIDDEN),
            "self_attention.linear_qkv.bias": random(column, QKV),
            "self_attention.q_layernorm.weight": random(same, SIZE),
            "self_attention.linear_proj.weight": random(row, HIDDEN, HEADS * SIZE),
            "self_attention.linear_proj.bias": random(same, HIDDEN),
        } | of_layer(glu)
        made |= {f"decoder.layers.{at}.{name}": each for name, each in layer.items()}
    made["decoder.final_layernorm.weight"] = random(same, HIDDEN)
    if not tied:
        made["output_layer.weight"] = random(column, VOCABULARY, HIDDEN)
    return made


def stages(whole: dict[str, Cut], pipeline: int, virtual: int, tied: bool) -> list[list[Any]]:
    """The chunks of each stage: those with the first layers of all ranks first."""
    chunks: list[dict[str, Cut]] = [{} for _ in range(pipeline * virtual)]
    each = LAYERS // len(chunks)
    for key, cut in whole.items():
        parts = key.split(".")
        if "layers" in parts:
            number = int(parts[2])
            parts[2] = str(number % each)
            chunks[number // each][".".join(parts)] = cut
        else:
            chunks[0 if key.startswith("embedding") else -1][key] = cut
    if tied and len(chunks) > 1:
        chunks[-1]["output_layer.weight"] = whole["embedding.word_embeddings.weight"]
    return [chunks[stage::pipeline] for stage in range(pipeline)]


def save(
    folder: Path,
    whole: dict[str, Cut],
    tensor: int,
    pipeline: int = 1,
    *,
    virtual: int = 1,
    tied: bool = False,
    nested: Callable[[Tensors], Any] = dict,
    **args: Any,
) -> Path:
    """Its ranks as Megatron-LM saves them with ``--ckpt-format torch``."""
    told = {
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
        "num_layers": LAYERS, "num_attention_heads": HEADS, "num_query_groups": GROUPS,
        "group_query_attention": True, "swiglu": True, "params_dtype": torch.float32,
        "untie_embeddings_and_output_weights": not tied,
    }  # fmt: skip
    for stage, chunks in enumerate(stages(whole, pipeline, virtual, tied)):
        for rank in range(tensor):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
            place = folder / name / "model_optim_rng.pt"
            place.parent.mkdir(parents=True, exist_ok=True)
            saved_by = {"rank": rank + 3 * tensor * stage}  # of three that are data-parallel
            tree: dict[str, Any] = {
                "args": Namespace(**{**told, **saved_by, **args}),
                "checkpoint_version": 3.0, "iteration": 5,
                "optimizer": {"state": torch.randn(3)}, "rng_state": [torch.randn(2)],
            }  # fmt: skip
            for at, chunk in enumerate(chunks):
                own = {key: cut.by(cut.whole, rank, tensor).clone() for key, cut in chunk.items()}
                if tensor * pipeline > 1:
                    own["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.randn(rank + 1)
                tree["model" if virtual == 1 else f"model{at}"] = nested(own)
            torch.save(tree, place)
    return folder


def check(folder: Path, whole: dict[str, Cut], out: Path) -> None:
    convert_checkpoint(folder, out, only="model", verify=True)
    found = load_file(out)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], cut.whole) for key, cut in whole.items())


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_ranks_become_the_model_that_was_cut(tensor, pipeline, tmp_path):
    whole = model()
    check(
        save(tmp_path / "iter_0000005", whole, tensor, pipeline), whole, tmp_path / "o.safetensors"
    )


def test_ranks_that_megatron_core_cut_become_the_model_in_one_rank():
    """An MLP, experts and shared experts, tied, 2 × 2 ranks (tests/data/make_megatron_ranks.py)."""
    whole = oracle.load(DATA / "megatron_ranks.whole.pt")
    found = load_portable(DATA / "megatron_ranks", only="model")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], value) for key, value in whole.items())


@pytest.mark.parametrize("of_layer", [dense, sparse, grouped])
@pytest.mark.parametrize("glu", [True, False])
def test_each_kind_of_layer(of_layer, glu, tmp_path):
    whole = model(of_layer, glu)
    check(save(tmp_path / "in", whole, 2, swiglu=glu), whole, tmp_path / "out.safetensors")


@pytest.mark.parametrize("pipeline", [1, 2])
def test_the_first_chunks_of_all_ranks_of_a_virtual_pipeline_come_first(pipeline, tmp_path):
    whole = model()
    folder = save(tmp_path / "in", whole, 2, pipeline, virtual=2)
    check(folder, whole, tmp_path / "out.safetensors")


def test_the_copy_of_a_tied_embedding_is_left_out_and_told(tmp_path):
    whole = model(tied=True)
    folder = save(tmp_path / "in", whole, 2, 2, tied=True)
    check(folder, whole, tmp_path / "out.safetensors")
    with open_checkpoint(folder) as opened:
        told = " ".join(opened.notes)
    assert "output_layer.weight of the last stage is a copy of embedding.word" in told
    assert "_extra_state of modules, how each rank scales fp8, is left out" in told
    assert "what each rank has for itself is left out: optimizer, rng_state" in told


def test_a_tied_embedding_that_differs_from_its_copy_is_an_error(tmp_path):
    folder = save(tmp_path / "in", model(tied=True), 2, 2, tied=True)
    changed(folder / "mp_rank_01_001", "output_layer.weight")
    with pytest.raises(MalformedCheckpoint, match=r"output_layer\.weight.*differs from embedding"):
        open_checkpoint(folder)


def legacy(tensors: Tensors) -> dict[str, Any]:
    """The names of before Megatron core, in dicts of dicts."""
    names = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_qkv.": "self_attention.query_key_value.",
        "self_attention.linear_proj.": "self_attention.dense.",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
        "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    }
    encoder: Tensors = {}
    parts: dict[str, Any] = {"encoder": encoder}
    for key, value in tensors.items():
        for old, new in names.items():
            key = key.replace(old, new)
        if key.startswith("decoder."):
            encoder[key.removeprefix("decoder.")] = value
        elif key.startswith("embedding."):
            parts["embedding"] = {"word_embeddings": {"weight": value}}
        else:
            parts["output_layer"] = {"weight": value}
    return {"language_model": parts}


def test_the_names_and_nested_dicts_of_before_megatron_core(tmp_path):
    whole = model()
    folder = save(tmp_path / "in", whole, 4, 2, nested=legacy)
    convert_checkpoint(folder, tmp_path / "out.safetensors", only="model", verify=True)
    found = load_file(tmp_path / "out.safetensors")
    wanted = legacy({key: cut.whole for key, cut in whole.items()})["language_model"]
    assert len(found) == len(whole)
    for key, value in wanted["encoder"].items():
        assert torch.equal(found[f"language_model.encoder.{key}"], value)
    head = "language_model.output_layer.weight"
    assert torch.equal(found[head], whole["output_layer.weight"].whole)


@pytest.mark.parametrize("tensor", [2, 8])
def test_q_k_and_v_of_joined_ranks_are_split_by_the_heads_that_the_arguments_say(tensor, tmp_path):
    """Also where a group is cut between ranks: there are 4 groups."""
    whole = model()
    folder = save(tmp_path / "in", whole, tensor)
    keys = KeyRules.of([("preset", "megatron-qkv")])
    found = load_portable(folder, only="model", keys=keys)
    name = "decoder.layers.3.self_attention."
    groups = whole[f"{name}linear_qkv.weight"].whole.reshape(GROUPS, -1, SIZE, HIDDEN)
    heads = HEADS // GROUPS
    for part, of_group in (("q", groups[:, :heads]), ("k", groups[:, -2]), ("v", groups[:, -1])):
        assert torch.equal(found[f"{name}{part}_proj.weight"], of_group.reshape(-1, HIDDEN))


# ------------------------------------------------------------------------------ what does not fit


def changed(rank: Path, key: str | None, **top: Any) -> None:
    file = rank / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    if key is not None:
        tree["model"][key] = tree["model"].get(key, torch.zeros(2)) + 1
    torch.save({**tree, **top}, file)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("decoder.final_layernorm.weight", "final_layernorm.weight: differs between the ranks"),
        ("decoder.layers.0.mlp.linear_fc2.bias", "linear_fc2.bias: differs between the ranks"),
        ("decoder.layers.0.adapter.weight", "adapter.weight: is in only one of the tensor-par"),
    ],
)
def test_what_ranks_do_not_agree_on_is_an_error(key, message, tmp_path):
    folder = save(tmp_path / "in", model(), 2)
    changed(folder / "mp_rank_01", key)
    with pytest.raises(MalformedCheckpoint, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (["mp_rank_01"], "fc1.weight: has another shape in another rank"),
        (["mp_rank_00", "mp_rank_01"], "fc1.weight: has 3 rows, and .*fc2.weight does not have as"),
    ],
)
def test_rows_that_do_not_fit_are_an_error(ranks, message, tmp_path):
    folder = save(tmp_path / "in", model(), 2)
    for rank in ranks:
        file = folder / rank / "model_optim_rng.pt"
        tree = torch.load(file, weights_only=False)
        tree["model"]["decoder.layers.0.mlp.linear_fc1.weight"] = torch.ones(3, HIDDEN)
        torch.save(tree, file)
    with pytest.raises(MalformedCheckpoint, match=message):
        open_checkpoint(folder)


def test_what_two_stages_have_differently_is_an_error(tmp_path):
    folder = save(tmp_path / "in", model(), 1, 2)
    changed(folder / "mp_rank_00_000", "decoder.final_layernorm.weight")
    with pytest.raises(MalformedCheckpoint, match=r"final_layernorm\.weight: is in two stages"):
        open_checkpoint(folder)


def test_a_tensor_that_is_not_known_is_refused_where_it_may_be_cut(tmp_path):
    folder = save(tmp_path / "in", model(), 2)
    for rank in ("mp_rank_00", "mp_rank_01"):
        changed(folder / rank, "decoder.layers.0.mlp.experts.weight1")
    with pytest.raises(UnsupportedCheckpoint, match=r"experts\.weight1.*is not known how Megatron"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("args", "kind", "message"),
    [
        ({"expert_model_parallel_size": 2}, UnsupportedCheckpoint, "experts are split over 2"),
        ({"expert_tensor_parallel_size": 1}, UnsupportedCheckpoint, "otherwise than the rest"),
        ({"tensor_model_parallel_size": None}, UnsupportedCheckpoint, "do not say over how many"),
        ({"tensor_model_parallel_size": 1 << 40}, CheckpointError, "ranks"),
        ({"tensor_model_parallel_size": 3}, IncompleteCheckpoint, "1 are missing: mp_rank_02"),
        ({"tensor_model_parallel_size": 1}, UnsupportedCheckpoint, "there are others: mp_rank_01"),
        ({"num_layers": 6}, IncompleteCheckpoint, "there are 4 layers, and the .* say 6"),
        ({"moe_mlp_glu_interleave_size": 2}, UnsupportedCheckpoint, "gate between the rest"),
    ],
)
def test_arguments_that_do_not_fit_are_told(args, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        open_checkpoint(save(tmp_path / "in", model(), 2, **args))


def test_swiglu_without_a_gate_is_an_error(tmp_path):
    with pytest.raises(MalformedCheckpoint, match=r"linear_fc1\.weight: has no gate"):
        open_checkpoint(save(tmp_path / "in", model(glu=False), 2, swiglu=True))


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"checkpoint_version": 0}, r"is of a checkpoint_version before 2\.0"),
        ({"iteration": 7}, "is of the iteration 7, and mp_rank_00 of 5|and mp_rank_00 of 7"),
    ],
)
def test_ranks_of_other_versions_and_steps_are_refused(top, message, tmp_path):
    folder = save(tmp_path / "in", model(), 2)
    changed(folder / "mp_rank_00", None, **top)
    with pytest.raises((MalformedCheckpoint, UnsupportedCheckpoint), match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("one", "other"), [("mp_rank_00_000", "mp_rank_01_000"), ("mp_rank_00_001", "mp_rank_01_001")]
)
@pytest.mark.parametrize("args", [{}, {"rank": 0}])
def test_ranks_that_were_exchanged_are_refused_where_they_say_who_saved_them(
    one, other, args, tmp_path
):
    folder = save(tmp_path / "in", model(), 2, 2, **args)
    before = load_portable(folder)
    (folder / one).rename(folder / "kept")
    (folder / other).rename(folder / one)
    (folder / "kept").rename(folder / other)
    if args:  # nothing tells
        assert load_portable(folder).keys() == before.keys()
        return
    with pytest.raises(MalformedCheckpoint, match=r"was saved by rank \d, and .*: they were exch"):
        load_portable(folder)


def test_a_stage_without_a_layer_is_incomplete(tmp_path):
    folder = save(tmp_path / "in", model(), 1, 2)
    file = folder / "mp_rank_00_001" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    first = "decoder.layers.0."
    tree["model"] = {key: v for key, v in tree["model"].items() if not key.startswith(first)}
    torch.save(tree, file)
    with pytest.raises(IncompleteCheckpoint, match=r"decoder\.layers\.1.*one stage .* lacks"):
        open_checkpoint(folder)


def test_a_dict_in_itself_is_refused(tmp_path):
    folder = save(tmp_path / "in", model(), 2)
    for rank in ("mp_rank_00", "mp_rank_01"):
        file = folder / rank / "model_optim_rng.pt"
        tree = torch.load(file, weights_only=False)
        tree["model"]["again"] = tree["model"]
        torch.save(tree, file)
    with pytest.raises(UnsupportedCheckpoint, match="again: is neither a tensor nor a dict"):
        open_checkpoint(folder)


def test_rows_that_pad_the_vocabulary_are_told_and_kept(tmp_path):
    folder = save(tmp_path / "in", model(), 2, vocab_size=50)
    with open_checkpoint(folder) as opened:
        assert "64 rows, those that pad the vocabulary of 50 too" in " ".join(opened.notes)
