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
from ckptconv.formats.folders.ranks import Copies, are_equal, end_to_end
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import IncompleteCheckpoint, UnsupportedCheckpoint, printable
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.walk import tensor_of

# Rows of ColumnParallelLinear, columns of RowParallelLinear: torch has the outputs in rows
_ROWS = re.compile(
    r"layers\.\d+\.(?:attention\.w[qkv]|feed_forward\.w[13])\.weight|output\.weight"
).fullmatch
_COLUMNS = re.compile(r"layers\.\d+\.(?:attention\.wo|feed_forward\.w2)\.weight").fullmatch
_WHOLE = re.compile(
    r"layers\.\d+\.(?:attention|ffn)_norm\.weight|norm\.weight"
    r"|(?:layers\.\d+\.attention\.inner_attention\.)?rope\.freqs"  # in each layer of Llama 1
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
    norm = tensor_of(first.get(_NORM))
    if norm is None or len(norm.shape) != 1:
        what = "are parallel parts of one model, and not those of a Llama: norm.weight is not there"
        raise UnsupportedCheckpoint(what, hint=SPLIT)
    for key in first:
        refs = [ref for _, held in parts if (ref := tensor_of(held[key])) is not None]
        if len(refs) != len(parts):
            raise UnsupportedCheckpoint("is not a tensor in each of the parts", where=key)
        made[key] = _joined(key, refs, norm.shape[0])
    copies = Copies()
    for path, held in parts:
        cut = ((key, tensor_of(value)) for key, value in held.items() if not _WHOLE(key))
        copies.refuse(path, ((key, ref) for key, ref in cut if ref is not None))
    return made


def _joined(key: str, refs: Sequence[TensorRef], width: int) -> TensorRef:
    if _WHOLE(key):
        if not all(are_equal(refs[0], ref) for ref in refs[1:]):
            what = "differs between the parts, and is whole in each of them"
            raise UnsupportedCheckpoint(what, where=key)
        return refs[0]
    axis = _axis(key, refs[0], width, len(refs))
    if any(ref.shape != refs[0].shape for ref in refs):
        raise UnsupportedCheckpoint("has another shape in another part", where=key)
    rows = len(refs) * refs[0].shape[0]
    if _QUERIES(key) and rows != width:  # all heads together are as wide as the model
        what = f"has {rows} rows in {len(refs)} parts, of {width}"
        raise IncompleteCheckpoint(what, where=key, hint="fetch all parts: consolidated.*.pth")
    return end_to_end(refs, axis)


def _axis(key: str, ref: TensorRef, width: int, count: int) -> int:
    """The dimension along which a tensor was cut; the other one is as wide as the model."""
    if len(ref.shape) == 2:
        rows, columns = ref.shape
        is_embedding = key == _EMBEDDING
        if columns == width and (is_embedding or _ROWS(key)):
            return 0
        if (rows == width and _COLUMNS(key)) or (columns == width // count and is_embedding):
            return 1
    what = "is in all parts, and is not a tensor of a Llama as Meta splits it"
    raise UnsupportedCheckpoint(what, where=key, hint="join them with the program that split it")
