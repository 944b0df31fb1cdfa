"""The rows of which the layout of a program is a table: which tensor is which, in the names of the
program and in those of the Hub, and what is done to it on the way there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ckptconv.keys.tensor_rules import Operation
from ckptconv.support.errors import KeyConflict

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


def same(*pairs: tuple[str, str]) -> Iterator[Row]:
    """Tensors that only have other names."""
    for theirs, hub in pairs:
        yield Row((theirs,), (hub,))


def roped(theirs: str, hub: str, heads: int, *older: str) -> Row:
    """Rows of q or k, in pairs there and in halves on the Hub."""
    there, back = Operation.of("rope", heads), Operation.of("unrope", heads)
    return Row((theirs,), (hub,), (there,), (back,), older)


def stacked(theirs: str, hub: str, *older: str) -> Row:
    """Experts in one tensor there, and one by one (``{e}``) on the Hub."""
    there, back = Operation.of("unstack", 0, over="e"), Operation.of("stack", 0, over="e")
    return Row((theirs,), (hub,), (there,), (back,), older)


def fused_one_after_another(theirs: str, hub: Sequence[str], heads: Heads) -> Row:
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


def fused_by_group(theirs: str, hub: Sequence[str], heads: Heads) -> Row:
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


def fused_qkv(
    make: Callable[[str, Sequence[str], Heads], Row], theirs: str, hub: str, heads: Heads
) -> Iterator[Row]:
    """Weights and biases of a fused module; `hub` is what stands before the names of its parts."""
    for kind in ("weight", "bias"):
        yield make(f"{theirs}.{kind}", [f"{hub}{name}.{kind}" for name in QKV], heads)


QKV = ("q_proj", "k_proj", "v_proj")
HUB = "model.layers.{n}."
HUB_ATTENTION, HUB_MLP = f"{HUB}self_attn.", f"{HUB}mlp."
ENDS_OF_HUB = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
