"""The names of llama.cpp in GGUF files, and what its converter did to the tensors."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.keys.layout_rows import HUB, HUB_ATTENTION, Heads, Row, roped, same
from ckptconv.keys.tensor_rules import Operation

GEMMA_FACTS = "llama.cpp conversion/gemma.py, gguf-py 0.19 tensor_mapping.py (MIT)"
NO_WAY_BACK = "1 is subtracted from its norms, which rounds some, and GGUF is not written"


def _gguf(ends: bool = True) -> Iterator[Row]:
    yield from same(("token_embd.weight", "model.embed_tokens.weight"))
    yield from same(("output.weight", "lm_head.weight"))
    yield Row(("rope_freqs.weight",), ())
    for ours, hub in (
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ):
        yield from same((f"blk.{{n}}.{ours}.weight", f"{HUB}{hub}.weight"))
    if ends:
        yield from same(
            ("output_norm.weight", "model.norm.weight"),
            ("blk.{n}.attn_norm.weight", f"{HUB}input_layernorm.weight"),
            ("blk.{n}.ffn_norm.weight", f"{HUB}post_attention_layernorm.weight"),
        )


def gguf_llama(heads: Heads) -> Iterator[Row]:
    """Llama, whose q and k llama.cpp permutes for its rotation."""
    yield from _gguf()
    for ours, hub, count in (
        ("attn_q", "q_proj", heads.queries),
        ("attn_k", "k_proj", heads.keys),
    ):
        yield roped(f"blk.{{n}}.{ours}.weight", f"{HUB_ATTENTION}{hub}.weight", count)


def gguf_qwen2(_: Heads) -> Iterator[Row]:
    """Qwen2: q and k as they are, with biases."""
    yield from _gguf()
    for ours, hub in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        yield from same((f"blk.{{n}}.{ours}.weight", f"{HUB_ATTENTION}{hub}.weight"))
    for ours, hub in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")):
        yield from same((f"blk.{{n}}.{ours}.bias", f"{HUB_ATTENTION}{hub}.bias"))


def gguf_gemma(heads: Heads) -> Iterator[Row]:
    """Gemma: two norms in each layer."""
    yield from _gguf_gemmas()
    yield _one_less("blk.{n}.ffn_norm", f"{HUB}post_attention_layernorm")


def gguf_gemma2(heads: Heads) -> Iterator[Row]:
    """Gemma 2: four norms in each layer."""
    yield from _gguf_gemmas()
    for ours, hub in (
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ):
        yield _one_less(f"blk.{{n}}.{ours}", f"{HUB}{hub}")


def gguf_gemma3(heads: Heads) -> Iterator[Row]:
    """Gemma 3: those of Gemma 2, and norms of q and k."""
    yield from gguf_gemma2(heads)
    for ours, hub in (("attn_q_norm", "q_norm"), ("attn_k_norm", "k_norm")):
        yield _one_less(f"blk.{{n}}.{ours}", f"{HUB_ATTENTION}{hub}")


def _gguf_gemmas() -> Iterator[Row]:
    """What all gemmas have: q and k in the order of the Hub, the norms that they begin with."""
    yield from _gguf(ends=False)
    for ours, hub in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        yield from same((f"blk.{{n}}.{ours}.weight", f"{HUB_ATTENTION}{hub}.weight"))
    yield _one_less("output_norm", "model.norm")
    yield _one_less("blk.{n}.attn_norm", f"{HUB}input_layernorm")


def _one_less(theirs: str, hub: str) -> Row:
    """A norm that llama.cpp multiplies by as it is, and a gemma of transformers by 1 more."""
    return Row((f"{theirs}.weight",), (f"{hub}.weight",), (Operation.of("add", -1),))
