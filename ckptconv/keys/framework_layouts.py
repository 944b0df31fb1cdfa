"""The layouts of programs other than transformers, as tensor rules: to that of Hugging Face and
back.

A layout is a table. Its rows say which tensor is which, in the names of the program and in those
that the model has on the Hub, and what is done to it on the way to the Hub. The way back is the
same table, read from the right. Where the numbers of heads are needed, they come from the config
beside the checkpoint or stand behind the name of the preset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptconv.keys.rules import Rule, Step
from ckptconv.keys.tensor_rules import Operation, TensorRule, matched
from ckptconv.support.errors import KeyConflict, printable

Operations = tuple[Operation, ...]


class Heads(NamedTuple):
    """How many heads there are of queries, and of keys and values."""

    queries: int
    keys: int


class Row(NamedTuple):
    """Which tensors are which: patterns of `theirs`, and of the Hub; none of these: dropped there,
    and not made on the way back. `there` are the operations on the way to the Hub, `back` those of
    the other way; `older` are further names that `theirs` had.
    """

    theirs: tuple[str, ...]
    hub: tuple[str, ...]
    there: Operations = ()
    back: Operations = ()
    older: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """A table of rows, and the `source` of its facts.

    `rows` makes it for numbers of heads, which it does not look at unless it `needs_heads`.
    `is_whole`: all keys of a checkpoint are in it; another one is an error. `one_way` says why
    there is no way back, if there is none.
    """

    source: str
    rows: Callable[[Heads], Iterable[Row]]
    needs_heads: bool = False
    is_whole: bool = True
    one_way: str = ""


def layout_rules(name: str, heads: Heads | None, *, back: bool) -> tuple[Rule, ...]:
    """The rules of the layout `name`, to the Hub or `back`."""
    layout = LAYOUTS[name]
    rows = list(layout.rows(heads or Heads(1, 1)))
    rules = [rule for row in rows for rule in (_rules_back(row) if back else _rules_there(row))]
    if back and layout.is_whole:
        rules.append(TensorRule.of(_ROPE_FREQS, (), ["drop"], optional=True))
    if not layout.is_whole:
        return tuple(rules)
    return (InLayout(name, tuple(rules), is_back=back), *rules)


def _rules_there(row: Row) -> Iterator[TensorRule]:
    if not row.hub:
        yield TensorRule.of(row.theirs, (), ["drop"], optional=True)
        return
    yield TensorRule(row.theirs, row.hub, row.there, optional=True)
    for name in row.older:
        yield TensorRule((name,), row.hub, row.there, optional=True)


def _rules_back(row: Row) -> Iterator[TensorRule]:
    if row.hub:
        yield TensorRule(row.hub, row.theirs, row.back, optional=True)


@dataclass(frozen=True, slots=True)
class InLayout(Rule):
    """Refuses keys that no rule of a layout is for: they would stay, unnoticed, as they are."""

    layout: str
    rules: tuple[TensorRule, ...]
    is_back: bool

    @property
    def words(self) -> str:
        return f"--preset {'to-' * self.is_back}{self.layout}"

    def step(self, keys: Sequence[str]) -> Step:
        sources = [source for rule in self.rules for source in rule.sources]
        for key in keys:
            if not any(matched(source, key) is not None for source in sources):
                whose = "Hugging Face's" if self.is_back else "its"
                what = f"{self.words} does not know this key; it is none of {whose} names"
                hint = f"leave it out: --exclude '{printable(key)}', before the preset"
                raise KeyConflict(what, where=key, hint=hint)
        return lambda key: key

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return (self.words,)  # it does nothing by itself


# ------------------------------------------------------------------------------------------- rows


def _same(*pairs: tuple[str, str]) -> Iterator[Row]:
    """Tensors that only have other names."""
    for theirs, hub in pairs:
        yield Row((theirs,), (hub,))


def _roped(theirs: str, hub: str, heads: int, *older: str) -> Row:
    """Rows of q or k, in pairs there and in halves on the Hub."""
    there, back = Operation.of("rope", heads), Operation.of("unrope", heads)
    return Row((theirs,), (hub,), (there,), (back,), older)


def _stacked(theirs: str, hub: str, *older: str) -> Row:
    """Experts in one tensor there, and one by one (``{e}``) on the Hub."""
    there, back = Operation.of("unstack", 0, over="e"), Operation.of("stack", 0, over="e")
    return Row((theirs,), (hub,), (there,), (back,), older)


def _fused_one_after_another(theirs: str, hub: Sequence[str], heads: Heads) -> Row:
    """Rows of all heads of q, of k, of v."""
    counts = [heads.queries, heads.keys, heads.keys]
    return Row(
        (theirs,),
        tuple(hub),
        (
            Operation.of("unflatten", 0, sizes=[sum(counts), -1]),
            Operation.of("split", 0, sizes=counts),
            Operation.of("flatten", dims=[0, 1]),
        ),
        (Operation.of("concat", 0),),
    )


def _fused_by_group(theirs: str, hub: Sequence[str], heads: Heads) -> Row:
    """For each head of k and v the rows of its heads of q, then its own of k, of v."""
    each, rest = divmod(heads.queries, heads.keys)
    if rest:
        what = f"{heads.queries} heads cannot be in {heads.keys} groups"
        raise KeyConflict(what, hint="write HEADS,GROUPS")
    return Row(
        (theirs,),
        tuple(hub),
        (
            Operation.of("unflatten", 0, sizes=[heads.keys, each + 2, -1]),
            Operation.of("split", 1, sizes=[each, 1, 1]),
            Operation.of("flatten", dims=[0, 2]),
        ),
        (
            Operation.of("unflatten", 0, sizes=[heads.keys, each, -1], on=[0]),
            Operation.of("unflatten", 0, sizes=[heads.keys, 1, -1], on=[1, 2]),
            Operation.of("concat", 1),
            Operation.of("flatten", dims=[0, 2]),
        ),
    )


def _qkv(
    make: Callable[[str, Sequence[str], Heads], Row], theirs: str, hub: str, heads: Heads
) -> Iterator[Row]:
    """Weights and biases of a fused module; `hub` is what stands before the names of its parts."""
    for kind in ("weight", "bias"):
        yield make(f"{theirs}.{kind}", [f"{hub}{name}.{kind}" for name in _QKV], heads)


_QKV = ("q_proj", "k_proj", "v_proj")
_HUB = "model.layers.{n}."
_HUB_ATTENTION, _HUB_MLP = f"{_HUB}self_attn.", f"{_HUB}mlp."
_ENDS_OF_HUB = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_ROPE_FREQS = "model.layers.{n}.self_attn.rotary_emb.inv_freq"


def _meta_like(
    heads: Heads, attention: str, names: tuple[str, str, str], older: str | None = None
) -> Iterator[Row]:
    """A llama in Meta's names; `attention` is what stands before ``wq``, `names` are those of the
    embedding, of the last norm and of the head.
    """
    yield from _same(*zip(names, _ENDS_OF_HUB, strict=True))
    for ours, hub, count in (("wq", "q_proj", heads.queries), ("wk", "k_proj", heads.keys)):
        others = () if older is None else (f"{older}{ours}.weight",)
        yield _roped(f"{attention}{ours}.weight", f"{_HUB_ATTENTION}{hub}.weight", count, *others)
    others = () if older is None else (f"{older}wv.weight",)
    yield Row((f"{attention}wv.weight",), (f"{_HUB_ATTENTION}v_proj.weight",), older=others)
    yield from _same(
        ("layers.{n}.attention.wo.weight", f"{_HUB_ATTENTION}o_proj.weight"),
        *_FEED_FORWARD,
    )


_FEED_FORWARD = (
    ("layers.{n}.feed_forward.w1.weight", f"{_HUB_MLP}gate_proj.weight"),
    ("layers.{n}.feed_forward.w2.weight", f"{_HUB_MLP}down_proj.weight"),
    ("layers.{n}.feed_forward.w3.weight", f"{_HUB_MLP}up_proj.weight"),
    ("layers.{n}.attention_norm.weight", f"{_HUB}input_layernorm.weight"),
    ("layers.{n}.ffn_norm.weight", f"{_HUB}post_attention_layernorm.weight"),
)


def _meta_llama(heads: Heads) -> Iterator[Row]:
    names = ("tok_embeddings.weight", "norm.weight", "output.weight")
    yield from _meta_like(heads, "layers.{n}.attention.", names)
    yield Row(("rope.freqs",), ())


# -------------------------------------------------------------------------------------- torchtitan

_TITAN_ATTENTION = "layers.{n}.attention.qkv_linear."
_TITAN_NAMES = ("tok_embeddings.weight", "norm.weight", "lm_head.weight")


def _torchtitan_llama3(heads: Heads) -> Iterator[Row]:
    rows = _meta_like(heads, _TITAN_ATTENTION, _TITAN_NAMES, "layers.{n}.attention.")
    for row in rows:
        yield row._replace(older=("output.weight",)) if row.hub == ("lm_head.weight",) else row


def _torchtitan_experts() -> Iterator[Row]:
    for ours, hub in (("w1_EFD", "gate_proj"), ("w2_EDF", "down_proj"), ("w3_EFD", "up_proj")):
        yield _stacked(
            f"layers.{{n}}.moe.routed_experts.inner_experts.{ours}",
            f"{_HUB_MLP}experts.{{e}}.{hub}.weight",
            f"layers.{{n}}.moe.experts.{ours[:2]}",
        )
    yield from _same(("layers.{n}.moe.router.gate.weight", f"{_HUB_MLP}gate.weight"))


def _torchtitan_qwen3(_: Heads) -> Iterator[Row]:
    yield from _same(*zip(_TITAN_NAMES, _ENDS_OF_HUB, strict=True))
    for ours, hub in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj")):
        yield Row(
            (f"{_TITAN_ATTENTION}{ours}.weight",),
            (f"{_HUB_ATTENTION}{hub}.weight",),
            older=(f"layers.{{n}}.attention.{ours}.weight",),
        )
    yield from _same(
        ("layers.{n}.attention.wo.weight", f"{_HUB_ATTENTION}o_proj.weight"),
        ("layers.{n}.attention.q_norm.weight", f"{_HUB_ATTENTION}q_norm.weight"),
        ("layers.{n}.attention.k_norm.weight", f"{_HUB_ATTENTION}k_norm.weight"),
        *_FEED_FORWARD,
    )
    yield from _torchtitan_experts()


def _torchtitan_deepseek(_: Heads) -> Iterator[Row]:
    yield from _same(*zip(_TITAN_NAMES, _ENDS_OF_HUB, strict=True))
    for ours, hub in (
        ("wq", "q_proj"),
        ("wq_a", "q_a_proj"),
        ("q_norm", "q_a_layernorm"),
        ("wq_b", "q_b_proj"),
        ("wkv_a", "kv_a_proj_with_mqa"),
        ("kv_norm", "kv_a_layernorm"),
        ("wkv_b", "kv_b_proj"),
        ("wo", "o_proj"),
    ):
        yield from _same((f"layers.{{n}}.attention.{ours}.weight", f"{_HUB_ATTENTION}{hub}.weight"))
    for ours, hub in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        yield from _same(
            (
                f"layers.{{n}}.moe.shared_experts.{ours}.weight",
                f"{_HUB_MLP}shared_experts.{hub}.weight",
            )
        )
    yield Row(
        ("layers.{n}.moe.expert_bias_E",),
        (f"{_HUB_MLP}gate.e_score_correction_bias",),
        older=("layers.{n}.moe.expert_bias",),
    )
    yield from _same(*_FEED_FORWARD)
    yield from _torchtitan_experts()


# --------------------------------------------------------------------------------------- torchtune


def _torchtune_ends() -> Iterator[Row]:
    names = ("tok_embeddings.weight", "norm.scale", "output.weight")
    yield from _same(*zip(names, _ENDS_OF_HUB, strict=True))
    yield from _same(
        ("layers.{n}.attn.output_proj.weight", f"{_HUB_ATTENTION}o_proj.weight"),
        ("layers.{n}.mlp.w1.weight", f"{_HUB_MLP}gate_proj.weight"),
        ("layers.{n}.mlp.w2.weight", f"{_HUB_MLP}down_proj.weight"),
        ("layers.{n}.mlp.w3.weight", f"{_HUB_MLP}up_proj.weight"),
        ("layers.{n}.sa_norm.scale", f"{_HUB}input_layernorm.weight"),
        ("layers.{n}.mlp_norm.scale", f"{_HUB}post_attention_layernorm.weight"),
    )


def _torchtune_llama(heads: Heads) -> Iterator[Row]:
    yield from _torchtune_ends()
    for name, count in (("q_proj", heads.queries), ("k_proj", heads.keys)):
        yield _roped(f"layers.{{n}}.attn.{name}.weight", f"{_HUB_ATTENTION}{name}.weight", count)
    yield from _same(("layers.{n}.attn.v_proj.weight", f"{_HUB_ATTENTION}v_proj.weight"))


def _torchtune_qwen(_: Heads) -> Iterator[Row]:
    yield from _torchtune_ends()
    for name in _QKV:
        for kind in ("weight", "bias"):
            yield from _same((f"layers.{{n}}.attn.{name}.{kind}", f"{_HUB_ATTENTION}{name}.{kind}"))
    for name in ("q_norm", "k_norm"):
        yield from _same((f"layers.{{n}}.attn.{name}.scale", f"{_HUB_ATTENTION}{name}.weight"))


# ------------------------------------------------------------------------------------------ litgpt


def _litgpt(heads: Heads) -> Iterator[Row]:
    names = ("transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight")
    yield from _same(*zip(names, _ENDS_OF_HUB, strict=True))
    fused = "transformer.h.{n}.attn.qkv"
    yield from _qkv(_fused_one_after_another, fused, _HUB_ATTENTION, heads)
    yield from _same(
        ("transformer.h.{n}.attn.proj.weight", f"{_HUB_ATTENTION}o_proj.weight"),
        ("transformer.h.{n}.attn.norm_q.weight", f"{_HUB_ATTENTION}q_norm.weight"),
        ("transformer.h.{n}.attn.norm_k.weight", f"{_HUB_ATTENTION}k_norm.weight"),
        ("transformer.h.{n}.norm_1.weight", f"{_HUB}input_layernorm.weight"),
        ("transformer.h.{n}.norm_2.weight", f"{_HUB}post_attention_layernorm.weight"),
    )


def _litgpt_llama(heads: Heads) -> Iterator[Row]:
    yield from _litgpt(heads)
    for ours, hub in _LITGPT_MLP:
        yield from _same((f"transformer.h.{{n}}.mlp.{ours}.weight", f"{_HUB_MLP}{hub}.weight"))


_LITGPT_MLP = (("fc_1", "gate_proj"), ("fc_2", "up_proj"), ("proj", "down_proj"))


def _litgpt_qwen3_moe(heads: Heads) -> Iterator[Row]:
    yield from _litgpt(heads)
    for ours, hub in _LITGPT_MLP:
        name = f"{_HUB_MLP}experts.{{e}}.{hub}.weight"
        yield from _same((f"transformer.h.{{n}}.mlp.experts.{{e}}.{ours}.weight", name))
    yield from _same(("transformer.h.{n}.mlp.gate.weight", f"{_HUB_MLP}gate.weight"))


def _litgpt_mixtral(heads: Heads) -> Iterator[Row]:
    yield from _litgpt(heads)
    for ours, hub in (("fc_1", "w1"), ("fc_2", "w3"), ("proj", "w2")):
        name = f"{_HUB}block_sparse_moe.experts.{{e}}.{hub}.weight"
        yield from _same((f"transformer.h.{{n}}.mlp.experts.{{e}}.{ours}.weight", name))
    gate = f"{_HUB}block_sparse_moe.gate.weight"
    yield from _same(("transformer.h.{n}.mlp.gate.weight", gate))


# ----------------------------------------------------------------------- parts of a layer, and MLX


def _gpt_neox(heads: Heads) -> Iterator[Row]:
    one_each = Heads(heads.queries, heads.queries)
    yield from _qkv(_fused_by_group, "**.query_key_value", "**.", one_each)


def _megatron_qkv(heads: Heads) -> Iterator[Row]:
    yield from _qkv(_fused_by_group, "**.linear_qkv", "**.", heads)


def _phi3(heads: Heads) -> Iterator[Row]:
    yield from _qkv(_fused_one_after_another, "**.qkv_proj", "**.", heads)
    yield Row(
        ("**.gate_up_proj.weight",),
        ("**.gate_proj.weight", "**.up_proj.weight"),
        (Operation.of("split", 0),),
        (Operation.of("concat", 0),),
    )


def _mlx_moe(_: Heads) -> Iterator[Row]:
    for name, of_mixtral in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        yield _stacked(f"**.mlp.switch_mlp.{name}.weight", f"**.mlp.experts.{{e}}.{name}.weight")
        yield _stacked(
            f"**.block_sparse_moe.switch_mlp.{name}.weight",
            f"**.block_sparse_moe.experts.{{e}}.{of_mixtral}.weight",
        )


# -------------------------------------------------------------------------------------------- GGUF


def _gguf(ends: bool = True) -> Iterator[Row]:
    yield from _same(("token_embd.weight", "model.embed_tokens.weight"))
    yield from _same(("output.weight", "lm_head.weight"))
    yield Row(("rope_freqs.weight",), ())
    for ours, hub in (
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ):
        yield from _same((f"blk.{{n}}.{ours}.weight", f"{_HUB}{hub}.weight"))
    if ends:
        yield from _same(
            ("output_norm.weight", "model.norm.weight"),
            ("blk.{n}.attn_norm.weight", f"{_HUB}input_layernorm.weight"),
            ("blk.{n}.ffn_norm.weight", f"{_HUB}post_attention_layernorm.weight"),
        )


def _gguf_llama(heads: Heads) -> Iterator[Row]:
    yield from _gguf()
    for ours, hub, count in (
        ("attn_q", "q_proj", heads.queries),
        ("attn_k", "k_proj", heads.keys),
    ):
        yield _roped(f"blk.{{n}}.{ours}.weight", f"{_HUB_ATTENTION}{hub}.weight", count)


def _gguf_qwen2(_: Heads) -> Iterator[Row]:
    yield from _gguf()
    for ours, hub in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        yield from _same((f"blk.{{n}}.{ours}.weight", f"{_HUB_ATTENTION}{hub}.weight"))
    for ours, hub in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")):
        yield from _same((f"blk.{{n}}.{ours}.bias", f"{_HUB_ATTENTION}{hub}.bias"))


def _gguf_gemma(heads: Heads) -> Iterator[Row]:
    yield from _gguf_gemmas()
    yield _one_less("blk.{n}.ffn_norm", f"{_HUB}post_attention_layernorm")


def _gguf_gemma2(heads: Heads) -> Iterator[Row]:
    yield from _gguf_gemmas()
    for ours, hub in (
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ):
        yield _one_less(f"blk.{{n}}.{ours}", f"{_HUB}{hub}")


def _gguf_gemma3(heads: Heads) -> Iterator[Row]:
    yield from _gguf_gemma2(heads)
    for ours, hub in (("attn_q_norm", "q_norm"), ("attn_k_norm", "k_norm")):
        yield _one_less(f"blk.{{n}}.{ours}", f"{_HUB_ATTENTION}{hub}")


def _gguf_gemmas() -> Iterator[Row]:
    """What all gemmas have: q and k in the order of the Hub, the norms that they begin with."""
    yield from _gguf(ends=False)
    for ours, hub in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        yield from _same((f"blk.{{n}}.{ours}.weight", f"{_HUB_ATTENTION}{hub}.weight"))
    yield _one_less("output_norm", "model.norm")
    yield _one_less("blk.{n}.attn_norm", f"{_HUB}input_layernorm")


def _one_less(theirs: str, hub: str) -> Row:
    """A norm that llama.cpp multiplies by as it is, and a gemma of transformers by 1 more."""
    return Row((f"{theirs}.weight",), (f"{hub}.weight",), (Operation.of("add", -1),))


# ------------------------------------------------------------------------------------- all layouts

_GEMMA = "llama.cpp conversion/gemma.py, gguf-py 0.19 tensor_mapping.py (MIT)"
_OF_GEMMA = "1 is subtracted from its norms, which rounds some, and GGUF is not written"

LAYOUTS: Mapping[str, Layout] = {
    "meta-llama": Layout(
        "transformers models/llama/convert_llama_weights_to_hf.py (Apache-2.0)", _meta_llama, True
    ),
    "torchtitan-llama3": Layout(
        "torchtitan b5bcd76 models/llama3/state_dict_adapter.py (BSD-3)", _torchtitan_llama3, True
    ),
    "torchtitan-qwen3": Layout(
        "torchtitan b5bcd76 models/qwen3/state_dict_adapter.py (BSD-3)", _torchtitan_qwen3
    ),
    "torchtitan-deepseek-v3": Layout(
        "torchtitan b5bcd76 models/deepseek_v3/state_dict_adapter.py (BSD-3)", _torchtitan_deepseek
    ),
    "torchtune-llama": Layout(
        "torchtune bd2a0fc models/convert_weights.py (BSD-3)", _torchtune_llama, True
    ),
    "torchtune-qwen": Layout(
        "torchtune bd2a0fc models/qwen2, models/qwen3 _convert_weights.py (BSD-3)", _torchtune_qwen
    ),
    "litgpt-llama": Layout(
        "litgpt 2685705 scripts/convert_hf_checkpoint.py (Apache-2.0)", _litgpt_llama, True
    ),
    "litgpt-mixtral": Layout(
        "litgpt 2685705 scripts/convert_hf_checkpoint.py (Apache-2.0)", _litgpt_mixtral, True
    ),
    "litgpt-qwen3-moe": Layout(
        "litgpt 2685705 scripts/convert_hf_checkpoint.py (Apache-2.0)", _litgpt_qwen3_moe, True
    ),
    "gpt-neox": Layout(
        "transformers models/gpt_neox/modeling_gpt_neox.py (Apache-2.0)", _gpt_neox, True, False
    ),
    "megatron-qkv": Layout(
        "Megatron-Bridge 067f987 merge_qkv_weights (Apache-2.0)", _megatron_qkv, True, False
    ),
    "phi3": Layout("transformers models/phi3/modeling_phi3.py (Apache-2.0)", _phi3, True, False),
    "mlx-moe": Layout(
        "mlx-lm d78bf58 models/mixtral.py, models/qwen3_moe.py (MIT)", _mlx_moe, False, False
    ),
    "gguf-llama": Layout(
        "transformers modeling_gguf_pytorch_utils.py (Apache-2.0), gguf-py 0.19 (MIT)",
        _gguf_llama,
        True,
    ),
    "gguf-qwen2": Layout("gguf-py 0.19 tensor_mapping.py (MIT)", _gguf_qwen2),
    "gguf-gemma": Layout(_GEMMA, _gguf_gemma, one_way=_OF_GEMMA),
    "gguf-gemma2": Layout(_GEMMA, _gguf_gemma2, one_way=_OF_GEMMA),
    "gguf-gemma3": Layout(_GEMMA, _gguf_gemma3, one_way=_OF_GEMMA),
}
"""The layouts by the names of their presets, which go to the Hub; ``to-NAME`` goes back, but of
those that are `one_way`.
"""
