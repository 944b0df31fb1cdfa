"""The tensors of Megatron core: whole ones, of a model that was not split or whose ranks are joined
(`formats.folders.megatron_ranks`).
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.keys.layout_rows import (
    ENDS_OF_HUB,
    HUB,
    HUB_ATTENTION,
    HUB_MLP,
    Heads,
    Row,
    fused_by_group,
    fused_qkv,
    same,
)
from ckptconv.keys.tensor_rules import Operation

_LAYER = "decoder.layers.{n}."
_ATTENTION, _MLP = f"{_LAYER}self_attention.", f"{_LAYER}mlp."
_ENDS = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)

PLAIN_SWIGLU = {"swiglu": (True,), "apply_layernorm_1p": (False,), "rotary_interleaved": (False,)}
"""The arguments of Megatron-LM with which tensors are what they are on the Hub: the first matrix
of an MLP has a gate, norms are not less by 1, the values of heads are rotated in halves.
"""


def megatron_qkv(heads: Heads) -> Iterator[Row]:
    """The fused q, k and v alone, wherever they are."""
    yield from fused_qkv(fused_by_group, "**.linear_qkv", "**.", heads)


def megatron_llama(heads: Heads) -> Iterator[Row]:
    """Llama, with a gated MLP."""
    yield from _around_mlp(heads)
    yield _norm(f"{_MLP}linear_fc1.layer_norm_weight", "post_attention", "pre_mlp")
    yield _gated(f"{_MLP}linear_fc1.weight", HUB_MLP, ("gate_proj", "up_proj"))
    yield from same((f"{_MLP}linear_fc2.weight", f"{HUB_MLP}down_proj.weight"))


def megatron_qwen3_moe(heads: Heads) -> Iterator[Row]:
    """Qwen3 with experts."""
    yield from _around_mlp(heads)
    yield from _experts(HUB_MLP, ("gate_proj", "up_proj"), "down_proj")


def megatron_mixtral(heads: Heads) -> Iterator[Row]:
    """Mixtral, whose experts have w1, w2 and w3."""
    yield from _around_mlp(heads)
    yield from _experts(f"{HUB}block_sparse_moe.", ("w1", "w3"), "w2")


def _around_mlp(heads: Heads) -> Iterator[Row]:
    yield from same(*zip(_ENDS, ENDS_OF_HUB, strict=True))
    yield from fused_qkv(fused_by_group, f"{_ATTENTION}linear_qkv", HUB_ATTENTION, heads)
    yield _norm(f"{_ATTENTION}linear_qkv.layer_norm_weight", "input", "input")
    yield from same(
        (f"{_ATTENTION}linear_proj.weight", f"{HUB_ATTENTION}o_proj.weight"),
        (f"{_ATTENTION}q_layernorm.weight", f"{HUB_ATTENTION}q_norm.weight"),
        (f"{_ATTENTION}k_layernorm.weight", f"{HUB_ATTENTION}k_norm.weight"),
    )
    yield Row(("**._extra_state",), ())  # Transformer Engine's, of fp8


def _norm(theirs: str, hub: str, local: str) -> Row:
    """A norm that Transformer Engine has in the module behind it, and Megatron itself before it."""
    older = (f"{_LAYER}{local}_layernorm.weight",)
    return Row((theirs,), (f"{HUB}{hub}_layernorm.weight",), older=older)


def _gated(theirs: str, hub: str, names: tuple[str, str], *older: str) -> Row:
    """The gate above the rest, in one matrix."""
    there, back = (Operation.of("split", 0),), (Operation.of("concat", 0),)
    return Row((theirs,), tuple(f"{hub}{name}.weight" for name in names), there, back, older)


def _experts(hub: str, gated: tuple[str, str], down: str) -> Iterator[Row]:
    """Experts of grouped matrices, which are numbered behind ``weight``, or each a module."""
    yield from same(
        (f"{_LAYER}pre_mlp_layernorm.weight", f"{HUB}post_attention_layernorm.weight"),
        (f"{_MLP}router.weight", f"{hub}gate.weight"),
    )
    grouped, single = f"{_MLP}experts.", f"{_MLP}experts.local_experts.{{e}}."
    yield _gated(
        f"{grouped}linear_fc1.weight{{e}}",
        f"{hub}experts.{{e}}.",
        gated,
        f"{single}linear_fc1.weight",
    )
    yield Row(
        (f"{grouped}linear_fc2.weight{{e}}",),
        (f"{hub}experts.{{e}}.{down}.weight",),
        older=(f"{single}linear_fc2.weight",),
    )
