"""The layouts of programs other than transformers, as tensor rules: to that of Hugging Face and
back.

A layout is a table. Its rows say which tensor is which, in the names of the program and in those
that the model has on the Hub, and what is done to it on the way to the Hub. The way back is the
same table, read from the right. Where the numbers of heads are needed, they come from the config
beside the checkpoint or stand behind the name of the preset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from ckptconv.keys.gguf_layouts import (
    GEMMA_FACTS,
    NO_WAY_BACK,
    gguf_gemma,
    gguf_gemma2,
    gguf_gemma3,
    gguf_llama,
    gguf_qwen2,
)
from ckptconv.keys.layout_rows import (
    ENDS_OF_HUB,
    HUB,
    HUB_ATTENTION,
    HUB_MLP,
    QKV,
    Heads,
    Row,
    fused_by_group,
    fused_one_after_another,
    fused_qkv,
    roped,
    same,
    stacked,
)
from ckptconv.keys.megatron_layouts import (
    PLAIN_SWIGLU,
    megatron_llama,
    megatron_mixtral,
    megatron_qkv,
    megatron_qwen3_moe,
)
from ckptconv.keys.rules import Rule, Step
from ckptconv.keys.tensor_rules import Operation, TensorRule, matched
from ckptconv.support.errors import KeyConflict, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import first_few, some_text


@dataclass(frozen=True, slots=True)
class Layout:
    """A table of rows, and the `source` of its facts.

    `rows` makes it for numbers of heads, which it does not look at unless it `needs_heads`.
    `is_whole`: all keys of a checkpoint are in it; another one is an error. `one_way` says why
    there is no way back, if there is none. `only` has what the config of the model may say, where
    it says anything: of another model some keys are the same, and the values laid out otherwise.
    """

    source: str
    rows: Callable[[Heads], Iterable[Row]]
    needs_heads: bool = False
    is_whole: bool = True
    one_way: str = ""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


def refuse_other_model(words: str, name: str, config: Mapping[str, Any]) -> None:
    """Raise `KeyConflict` where the config is that of a model for which the layout `name` is not;
    `words` are those of the preset.
    """
    for key, allowed in LAYOUTS[name].only.items():
        told = config.get(key)
        if told is not None and told not in allowed:
            what = f"{words} is for {key} {some_text(list(map(str, allowed)))}"
            hint = f"take the preset for this model: {first_few(_presets_for(key, told), 4)}"
            if not _presets_for(key, told):
                hint = "there is no preset for this model; write the rules in a file (--rules)"
            raise KeyConflict(f"{what}, and the model says {printable(told)}", hint=hint)


def _presets_for(key: str, told: object) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if told in layout.only.get(key, ())]


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
                if self._makes(key):
                    what = f"{self.words} makes such names, and this key has one already"
                    hint = self._other_way
                raise KeyConflict(what, where=key, hint=hint)
        return lambda key: key

    def _makes(self, key: str) -> bool:
        targets = (target for rule in self.rules for target in rule.targets)
        return any(matched(target, key) is not None for target in targets)

    @property
    def _other_way(self) -> str:
        if not self.is_back and LAYOUTS[self.layout].one_way:
            return "leave the preset out"
        other = self.layout if self.is_back else f"to-{self.layout}"
        return f"leave the preset out, or go the other way: --preset {other}"

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return (self.words,)  # it does nothing by itself


_ROPE_FREQS = "model.layers.{n}.self_attn.rotary_emb.inv_freq"

# ------------------------------------------------------------------------------------------- Meta


def _meta_like(
    heads: Heads, attention: str, names: tuple[str, str, str], older: str | None = None
) -> Iterator[Row]:
    """A llama in Meta's names; `attention` is what stands before ``wq``, `names` are those of the
    embedding, of the last norm and of the head.
    """
    yield from same(*zip(names, ENDS_OF_HUB, strict=True))
    for ours, hub, count in (("wq", "q_proj", heads.queries), ("wk", "k_proj", heads.keys)):
        others = () if older is None else (f"{older}{ours}.weight",)
        yield roped(f"{attention}{ours}.weight", f"{HUB_ATTENTION}{hub}.weight", count, *others)
    others = () if older is None else (f"{older}wv.weight",)
    yield Row((f"{attention}wv.weight",), (f"{HUB_ATTENTION}v_proj.weight",), older=others)
    yield from same(
        ("layers.{n}.attention.wo.weight", f"{HUB_ATTENTION}o_proj.weight"),
        *_FEED_FORWARD,
    )


_FEED_FORWARD = (
    ("layers.{n}.feed_forward.w1.weight", f"{HUB_MLP}gate_proj.weight"),
    ("layers.{n}.feed_forward.w2.weight", f"{HUB_MLP}down_proj.weight"),
    ("layers.{n}.feed_forward.w3.weight", f"{HUB_MLP}up_proj.weight"),
    ("layers.{n}.attention_norm.weight", f"{HUB}input_layernorm.weight"),
    ("layers.{n}.ffn_norm.weight", f"{HUB}post_attention_layernorm.weight"),
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
        yield stacked(
            f"layers.{{n}}.moe.routed_experts.inner_experts.{ours}",
            f"{HUB_MLP}experts.{{e}}.{hub}.weight",
            f"layers.{{n}}.moe.experts.{ours[:2]}",
        )
    yield from same(("layers.{n}.moe.router.gate.weight", f"{HUB_MLP}gate.weight"))


def _torchtitan_qwen3(_: Heads) -> Iterator[Row]:
    yield from same(*zip(_TITAN_NAMES, ENDS_OF_HUB, strict=True))
    for ours, hub in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj")):
        yield Row(
            (f"{_TITAN_ATTENTION}{ours}.weight",),
            (f"{HUB_ATTENTION}{hub}.weight",),
            older=(f"layers.{{n}}.attention.{ours}.weight",),
        )
    yield from same(
        ("layers.{n}.attention.wo.weight", f"{HUB_ATTENTION}o_proj.weight"),
        ("layers.{n}.attention.q_norm.weight", f"{HUB_ATTENTION}q_norm.weight"),
        ("layers.{n}.attention.k_norm.weight", f"{HUB_ATTENTION}k_norm.weight"),
        *_FEED_FORWARD,
    )
    yield from _torchtitan_experts()


def _torchtitan_deepseek(_: Heads) -> Iterator[Row]:
    yield from same(*zip(_TITAN_NAMES, ENDS_OF_HUB, strict=True))
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
        yield from same((f"layers.{{n}}.attention.{ours}.weight", f"{HUB_ATTENTION}{hub}.weight"))
    for ours, hub in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        yield from same(
            (
                f"layers.{{n}}.moe.shared_experts.{ours}.weight",
                f"{HUB_MLP}shared_experts.{hub}.weight",
            )
        )
    yield Row(
        ("layers.{n}.moe.expert_bias_E",),
        (f"{HUB_MLP}gate.e_score_correction_bias",),
        older=("layers.{n}.moe.expert_bias",),
    )
    yield from same(*_FEED_FORWARD)
    yield from _torchtitan_experts()


# --------------------------------------------------------------------------------------- torchtune


def _torchtune_ends() -> Iterator[Row]:
    names = ("tok_embeddings.weight", "norm.scale", "output.weight")
    yield from same(*zip(names, ENDS_OF_HUB, strict=True))
    yield from same(
        ("layers.{n}.attn.output_proj.weight", f"{HUB_ATTENTION}o_proj.weight"),
        ("layers.{n}.mlp.w1.weight", f"{HUB_MLP}gate_proj.weight"),
        ("layers.{n}.mlp.w2.weight", f"{HUB_MLP}down_proj.weight"),
        ("layers.{n}.mlp.w3.weight", f"{HUB_MLP}up_proj.weight"),
        ("layers.{n}.sa_norm.scale", f"{HUB}input_layernorm.weight"),
        ("layers.{n}.mlp_norm.scale", f"{HUB}post_attention_layernorm.weight"),
    )


def _torchtune_llama(heads: Heads) -> Iterator[Row]:
    yield from _torchtune_ends()
    for name, count in (("q_proj", heads.queries), ("k_proj", heads.keys)):
        yield roped(f"layers.{{n}}.attn.{name}.weight", f"{HUB_ATTENTION}{name}.weight", count)
    yield from same(("layers.{n}.attn.v_proj.weight", f"{HUB_ATTENTION}v_proj.weight"))


def _torchtune_qwen(_: Heads) -> Iterator[Row]:
    yield from _torchtune_ends()
    for name in QKV:
        for kind in ("weight", "bias"):
            yield from same((f"layers.{{n}}.attn.{name}.{kind}", f"{HUB_ATTENTION}{name}.{kind}"))
    for name in ("q_norm", "k_norm"):
        yield from same((f"layers.{{n}}.attn.{name}.scale", f"{HUB_ATTENTION}{name}.weight"))


# ------------------------------------------------------------------------------------------ litgpt


def _litgpt(heads: Heads) -> Iterator[Row]:
    names = ("transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight")
    yield from same(*zip(names, ENDS_OF_HUB, strict=True))
    fused = "transformer.h.{n}.attn.qkv"
    yield from fused_qkv(fused_one_after_another, fused, HUB_ATTENTION, heads)
    yield from same(
        ("transformer.h.{n}.attn.proj.weight", f"{HUB_ATTENTION}o_proj.weight"),
        ("transformer.h.{n}.attn.norm_q.weight", f"{HUB_ATTENTION}q_norm.weight"),
        ("transformer.h.{n}.attn.norm_k.weight", f"{HUB_ATTENTION}k_norm.weight"),
        ("transformer.h.{n}.norm_1.weight", f"{HUB}input_layernorm.weight"),
        ("transformer.h.{n}.norm_2.weight", f"{HUB}post_attention_layernorm.weight"),
    )


def _litgpt_llama(heads: Heads) -> Iterator[Row]:
    yield from _litgpt(heads)
    for ours, hub in _LITGPT_MLP:
        yield from same((f"transformer.h.{{n}}.mlp.{ours}.weight", f"{HUB_MLP}{hub}.weight"))


_LITGPT_MLP = (("fc_1", "gate_proj"), ("fc_2", "up_proj"), ("proj", "down_proj"))


def _litgpt_qwen3_moe(heads: Heads) -> Iterator[Row]:
    yield from _litgpt(heads)
    for ours, hub in _LITGPT_MLP:
        name = f"{HUB_MLP}experts.{{e}}.{hub}.weight"
        yield from same((f"transformer.h.{{n}}.mlp.experts.{{e}}.{ours}.weight", name))
    yield from same(("transformer.h.{n}.mlp.gate.weight", f"{HUB_MLP}gate.weight"))


def _litgpt_mixtral(heads: Heads) -> Iterator[Row]:
    yield from _litgpt(heads)
    for ours, hub in (("fc_1", "w1"), ("fc_2", "w3"), ("proj", "w2")):
        name = f"{HUB}block_sparse_moe.experts.{{e}}.{hub}.weight"
        yield from same((f"transformer.h.{{n}}.mlp.experts.{{e}}.{ours}.weight", name))
    gate = f"{HUB}block_sparse_moe.gate.weight"
    yield from same(("transformer.h.{n}.mlp.gate.weight", gate))


# ----------------------------------------------------------------------- parts of a layer, and MLX


def _gpt_neox(heads: Heads) -> Iterator[Row]:
    one_each = Heads(heads.queries, heads.queries)
    yield from fused_qkv(fused_by_group, "**.query_key_value", "**.", one_each)


def _phi3(heads: Heads) -> Iterator[Row]:
    yield from fused_qkv(fused_one_after_another, "**.qkv_proj", "**.", heads)
    yield Row(
        ("**.gate_up_proj.weight",),
        ("**.gate_proj.weight", "**.up_proj.weight"),
        (Operation.of("split", 0),),
        (Operation.of("concat", 0),),
    )


def _mlx_moe(_: Heads) -> Iterator[Row]:
    for name, of_mixtral in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        yield stacked(f"**.mlp.switch_mlp.{name}.weight", f"**.mlp.experts.{{e}}.{name}.weight")
        yield stacked(
            f"**.block_sparse_moe.switch_mlp.{name}.weight",
            f"**.block_sparse_moe.experts.{{e}}.{of_mixtral}.weight",
        )


# ------------------------------------------------------------------------------------- all layouts

LAYOUTS: Mapping[str, Layout] = {
    "meta-llama": Layout(
        "transformers models/llama/convert_llama_weights_to_hf.py (Apache-2.0)", _meta_llama, True
    ),
    "torchtitan-llama3": Layout(
        "torchtitan b5bcd76 models/llama3/state_dict_adapter.py (BSD-3)", _torchtitan_llama3, True
    ),
    "torchtitan-qwen3": Layout(
        "torchtitan b5bcd76 models/qwen3/state_dict_adapter.py (BSD-3)",
        _torchtitan_qwen3,
        only={"model_type": ("qwen3", "qwen3_moe")},
    ),
    "torchtitan-deepseek-v3": Layout(
        "torchtitan b5bcd76 models/deepseek_v3/state_dict_adapter.py (BSD-3)", _torchtitan_deepseek
    ),
    "torchtune-llama": Layout(
        "torchtune bd2a0fc models/convert_weights.py (BSD-3)", _torchtune_llama, True
    ),
    "torchtune-qwen": Layout(
        "torchtune bd2a0fc models/qwen2, models/qwen3 _convert_weights.py (BSD-3)",
        _torchtune_qwen,
        only={"model_type": ("qwen2", "qwen3")},
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
        "Megatron-Bridge 067f987 merge_qkv_weights (Apache-2.0)", megatron_qkv, True, False
    ),
    "megatron-llama": Layout(
        "Megatron-Bridge models/llama/llama_bridge.py (Apache-2.0)",
        megatron_llama,
        True,
        only=PLAIN_SWIGLU,
    ),
    "megatron-mixtral": Layout(
        "Megatron-LM d98e8a64 tools/checkpoint/loader_mixtral_hf.py (BSD-3)",
        megatron_mixtral,
        True,
        only=PLAIN_SWIGLU,
    ),
    "megatron-qwen3-moe": Layout(
        "Megatron-Bridge models/qwen/qwen3_moe_bridge.py (Apache-2.0)",
        megatron_qwen3_moe,
        True,
        only=PLAIN_SWIGLU,
    ),
    "phi3": Layout("transformers models/phi3/modeling_phi3.py (Apache-2.0)", _phi3, True, False),
    "mlx-moe": Layout(
        "mlx-lm d78bf58 models/mixtral.py, models/qwen3_moe.py (MIT)", _mlx_moe, False, False
    ),
    "gguf-llama": Layout(
        "transformers modeling_gguf_pytorch_utils.py (Apache-2.0), gguf-py 0.19 (MIT)",
        gguf_llama,
        True,
        only={"general.architecture": ("llama",), "model_type": ("llama", "mistral")},
    ),
    "gguf-qwen2": Layout(
        "gguf-py 0.19 tensor_mapping.py (MIT)",
        gguf_qwen2,
        only={"general.architecture": ("qwen2",), "model_type": ("qwen2",)},
    ),
    "gguf-gemma": Layout(
        GEMMA_FACTS, gguf_gemma, one_way=NO_WAY_BACK, only={"general.architecture": ("gemma",)}
    ),
    "gguf-gemma2": Layout(
        GEMMA_FACTS, gguf_gemma2, one_way=NO_WAY_BACK, only={"general.architecture": ("gemma2",)}
    ),
    "gguf-gemma3": Layout(
        GEMMA_FACTS, gguf_gemma3, one_way=NO_WAY_BACK, only={"general.architecture": ("gemma3",)}
    ),
}
"""The layouts by the names of their presets, which go to the Hub; ``to-NAME`` goes back, but of
those that are `one_way`.
"""
