"""The parallel parts of a Llama as Meta gives it away, ``consolidated.00.pth`` and so on, joined.

All parts have the same keys. Of each matrix a part holds the rows of some heads or of some of the
hidden units, or the columns of these; norms are whole in each. The embedding is cut into columns
in Llama 1 and 2 and into rows in Llama 3: the norms tell which, for they are as wide as the model.
Source: llama/model.py and llama3's (ColumnParallelLinear, RowParallelLinear, ParallelEmbedding,
VocabParallelEmbedding); transformers models/llama/convert_llama_weights_to_hf.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from ckptconv.formats.folders.alone import SPLIT
from ckptconv.formats.folders.ranks import Copies
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import IncompleteCheckpoint, UnsupportedCheckpoint, printable
from ckptconv.support.progress import Meter
from ckptconv.tensors.assembly import assembled
from ckptconv.tensors.comparison import compare_bytes
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.walk import tensor_of

_ROWS = re.compile(
    r"layers\.\d+\.(?:attention\.w[qkv]|feed_forward\.w[13])\.weight|output\.weight"
).fullmatch
_COLUMNS = re.compile(r"layers\.\d+\.(?:attention\.wo|feed_forward\.w2)\.weight").fullmatch
_WHOLE = re.compile(
    r"layers\.\d+\.(?:attention|ffn)_norm\.weight|norm\.weight|rope\.freqs"
).fullmatch
_EMBEDDING, _NORM = "tok_embeddings.weight", "norm.weight"
_QUERIES = re.compile(r"layers\.\d+\.attention\.wq\.weight").fullmatch


def joined_slices(parts: Sequence[tuple[PurePath, Mapping[str, Node]]]) -> dict[str, Node]:
    """The tensors of all parts, each given with its path and its tensors by key, in the order of
    their numbers.

    Raises `UnsupportedCheckpoint` for a key that a Llama does not have, or that is not in all of
    them, `IncompleteCheckpoint` where parts lack, and `MalformedCheckpoint` where one is the copy
    of another.
    """
    path, first = parts[0]
    made: dict[str, Node] = {}
    for other, held in parts[1:]:
        odd = first.keys() ^ held.keys()
        if odd:
            what = f"is in one of {printable(path.name)} and {printable(other.name)} only"
            raise UnsupportedCheckpoint(what, where=min(odd))
    norm = first.get(_NORM)
    width = None if norm is None else tensor_of(norm)
    if width is None or len(width.shape) != 1:
        what = "are parallel parts of one model, and not those of a Llama: norm.weight is not there"
        raise UnsupportedCheckpoint(what, hint=SPLIT)
    for key in first:
        refs = [ref for _, held in parts if (ref := tensor_of(held[key])) is not None]
        if len(refs) != len(parts):
            raise UnsupportedCheckpoint("is not a tensor in each of the parts", where=key)
        made[key] = _joined(key, refs, width.shape[0])
    copies = Copies()
    for path, held in parts:
        cut = ((key, tensor_of(value)) for key, value in held.items() if not _WHOLE(key))
        copies.refuse(path, ((key, ref) for key, ref in cut if ref is not None))
    return made


def _joined(key: str, refs: Sequence[TensorRef], width: int) -> TensorRef:
    if _WHOLE(key):
        pairs = [(refs[0], ref) for ref in refs[1:]]
        if any(ref.shape != refs[0].shape for ref in refs) or (
            compare_bytes(pairs, Meter("read", 0, None)).differing
        ):
            what = "differs between the parts, and is whole in each of them"
            raise UnsupportedCheckpoint(what, where=key)
        return refs[0]
    axis = _axis(key, refs[0], width, len(refs))
    shape = list(refs[0].shape)
    if any(list(ref.shape) != shape for ref in refs):
        raise UnsupportedCheckpoint("has another shape in another part", where=key)
    step = shape[axis]
    shape[axis] *= len(refs)
    if _QUERIES(key) and shape[0] != width:  # all heads together are as wide as the model
        what = f"has {shape[0]} rows in {len(refs)} parts, of {width}"
        raise IncompleteCheckpoint(what, where=key, hint="fetch all parts: consolidated.*.pth")
    starts = [(step * at, 0) if axis == 0 else (0, step * at) for at in range(len(refs))]
    return assembled(refs[0].dtype, tuple(shape), list(zip(starts, refs, strict=True)))


def _axis(key: str, ref: TensorRef, width: int, count: int) -> int:
    """The dimension along which a tensor was cut; the other one is as wide as the model."""
    axis = None
    if len(ref.shape) == 2:
        rows, columns = ref.shape
        if _ROWS(key) and columns == width:
            axis = 0
        elif _COLUMNS(key) and rows == width:
            axis = 1
        elif key == _EMBEDDING and columns in (width, width // count):
            axis = 0 if columns == width else 1
    if axis is None:
        what = "is in all parts, and is not a tensor of a Llama as Meta splits it"
        raise UnsupportedCheckpoint(
            what, where=key, hint="join them with the program that split it"
        )
    return axis
