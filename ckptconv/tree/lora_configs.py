"""What is written beside the matrices of LoRA for peft and diffusers: ranks, and how products are
scaled.

peft's ``adapter_config.json`` has one rank and one alpha, and patterns for modules with others.
diffusers keeps the same fields in the metadata of its file, with the component
before each. Facts: peft 0.21 (utils/other.py, `get_pattern_key`), diffusers 0.42
(loaders/lora_base.py, `_pack_dict_with_prefix`; loaders/peft.py), both Apache-2.0.

And the two matrices for a weight whose rows are those of several modules: taken apart into those of
the modules, and put together. No value changes, and neither does a product. Rows of a product need
the rows of ``up`` and all of ``down``. Where each module has columns of its own in ``up``, and
zeros in all others, its rank is theirs: so are modules put together here, one block each, as
sd-scripts (networks/lora_flux.py, Apache-2.0) does with `split_qkv`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ckptconv.io.source import MemorySource
from ckptconv.support.arrays import Array
from ckptconv.support.errors import KeyMismatch, RefusedObject
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import FLOAT32, FLOAT64, DType
from ckptconv.tensors.layouts import Move, are_alike
from ckptconv.tensors.refs import Piece, Shape, Storage, TensorRef, box_of, whole_view
from ckptconv.tensors.stream import read_box
from ckptconv.tree.lora_deltas import rows

_MOST_BYTES = 1 << 30
_NOWHERE = PurePath("made here")


class Factors(NamedTuple):
    """The matrices of a product: (rows, rank) and (rank, columns)."""

    up: TensorRef
    down: TensorRef


def taken_apart(factors: Factors, sizes: Sequence[int]) -> list[Factors | None]:
    """The matrices of modules that have so many rows each; None for a module of which nothing but
    zeros is there, where others have blocks of their own.
    """
    up, down = factors
    rank = down.shape[0]
    own = [rows(up, sum(sizes[:at]), size) for at, size in enumerate(sizes)]
    # by their bytes: -0.0 is used too, for no value may change
    used = [_bytes(ref).reshape(*ref.shape[:2], -1).max(axis=(0, 2)) for ref in own]
    blocks = _equal_blocks(used, rank) or _blocks_one_after_another(used, rank)
    made: list[Factors | None] = []
    for ref, (first, count) in zip(own, blocks or [(0, rank)] * len(sizes), strict=True):
        if not count:
            made.append(None)
        elif count == rank:
            made.append(Factors(ref, down))
        else:
            own_columns = box_of(ref, (0, first), (ref.shape[0], count))
            made.append(Factors(own_columns, rows(down, first, count)))
    return made


def _bytes(ref: TensorRef) -> Array:
    """The bytes of a matrix, which are read at once: those of adapters are small. A file may call a
    few bytes a huge matrix, seen many times.
    """
    if ref.nbytes > _MOST_BYTES:
        what = f"is {list(ref.shape)}, which is more than a matrix of an adapter has"
        raise RefusedObject(what, where=ref.storage.name)
    for storage in dict.fromkeys(piece.storage for piece in ref.pieces):
        Checksums().read(storage)
    return read_box(ref, (0,) * len(ref.shape), ref.shape).view("u1")


def _equal_blocks(used: Sequence[Array], rank: int) -> list[tuple[int, int]] | None:
    """The columns of each module, where all have as many and no others are used."""
    if rank % len(used):
        return None
    count = rank // len(used)
    blocks = [(at * count, count) for at in range(len(used))]
    for (first, _), columns in zip(blocks, used, strict=True):
        if columns[:first].any() or columns[first + count :].any():
            return None
    return blocks


def _blocks_one_after_another(used: Sequence[Array], rank: int) -> list[tuple[int, int]] | None:
    """The columns of each module, where those that are used stand one after another and are all."""
    blocks, at = [], 0
    for columns in used:
        numbers = columns.nonzero()[0].tolist()
        if numbers and numbers[0] != at:
            return None
        end = max(numbers, default=at - 1) + 1
        blocks.append((at, end - at))
        at = end
    if at != rank:
        return None
    return blocks


def put_together(parts: Sequence[Factors | None], sizes: Sequence[int], where: str) -> Factors:
    """The matrices of a weight whose rows are those of modules, with so many rows each; None for
    one to which nothing is added. `where` is a key, for messages.
    """
    there = [part for part in parts if part is not None]
    for part, size in zip(parts, sizes, strict=True):
        if part is not None and part.up.shape[0] != size:
            what = f"has {part.up.shape[0]} rows where the base has {size}"
            raise KeyMismatch(what, where=where)
    first = there[0]
    if len({(part.up.dtype, part.down.dtype, part.down.shape[1:]) for part in there}) > 1:
        what = "differs in type or columns from what it is put together with"
        raise KeyMismatch(what, where=where, hint="give all one --dtype in a conversion before")
    downs = [part.down for part in there]
    if len(there) == len(parts) and are_alike(downs):
        return Factors(_stacked([part.up for part in there]), first.down)
    rank = sum(down.shape[0] for down in downs)
    return Factors(_stacked([*_rows_of_blocks(parts, sizes, rank)]), _stacked(downs))


def _rows_of_blocks(
    parts: Sequence[Factors | None], sizes: Sequence[int], rank: int
) -> Iterator[TensorRef]:
    """The rows of each module: its block, and zeros in the columns of all others."""
    first = next(part.up for part in parts if part is not None)
    at = 0
    for part, size in zip(parts, sizes, strict=True):
        own = zeros(first, (size, 0))
        if part is not None:
            own = part.up
        rest = rank - at - own.shape[1]
        columns = (zeros(first, (size, at)), own, zeros(first, (size, rest)))
        yield _stacked([ref for ref in columns if ref.shape[1]], dim=1)
        at += own.shape[1]


def zeros(like: TensorRef, shape: Shape) -> TensorRef:
    """A tensor of zeros of the type of another one: one zero, seen many times."""
    storage = in_memory(bytes(like.dtype.itemsize), like.dtype, like.location)
    shape = (*shape, *like.shape[len(shape) :])
    piece = Piece(storage, 0, shape, (0,) * len(shape), (0,) * len(shape))
    return like._replace(shape=shape, stride=piece.stride, pieces=(piece,))


def in_memory(raw: bytes, dtype: DType, location: str) -> Storage:
    """A storage of bytes that were made here."""
    return Storage(MemorySource(raw, _NOWHERE), 0, len(raw), location, "made here", dtype)


def _stacked(refs: Sequence[TensorRef], dim: int = 0) -> TensorRef:
    """Tensors one after another along a dimension."""
    [made] = Move("concat", ((dim,), tuple(ref.shape[dim] for ref in refs))).on(refs)
    return made


class Scaled(NamedTuple):
    """A module with its rank and alpha, and whether it has a magnitude (DoRA) and a bias. `start`
    is what stands before its `name` in keys; `key` is one of them, for messages.
    """

    start: str
    name: str
    rank: int
    alpha: float
    has_magnitude: bool
    has_bias: bool
    key: str


def of_peft(given: Mapping[str, Any], modules: Sequence[Scaled], others: Collection[str]) -> bytes:
    """The text of ``adapter_config.json``: that of the adapter, where it had one, with what is said
    of `modules`. `others` are the modules of the base to which nothing is added, those included
    that have no weights of their own: peft takes a name for any of them.
    """
    targets = _targets([each.name for each in modules], others)
    told = {**_DEFAULTS, **given, **_fields(modules), "target_modules": targets}
    # indented and sorted, as peft writes it
    return (json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


_DEFAULTS: Mapping[str, Any] = {
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "task_type": None,
}


def of_diffusers(modules: Sequence[Scaled]) -> str:
    """The text of ``lora_adapter_metadata``: the fields of each component, its name before them."""
    told: dict[str, Any] = {}
    for start in dict.fromkeys(each.start for each in modules):
        own = [each for each in modules if each.start == start]
        # transformers 5 has no text_model in the paths of CLIP, and the ends of paths fit both
        names = [each.name.removeprefix(_TEXT_MODEL) for each in own]
        fields = {**_fields(own), "target_modules": names}
        told |= {f"{start}{name}": value for name, value in fields.items()}
    return json.dumps(told, indent=2, sort_keys=True)


def _fields(modules: Sequence[Scaled]) -> dict[str, Any]:
    rank = _most(each.rank for each in modules)
    alpha = _most(_plain(each.alpha) for each in modules)
    without = next((each for each in modules if not each.has_magnitude), None)
    if without is not None and any(each.has_magnitude for each in modules):
        what = "has no magnitude (DoRA), which others have, and the config has it for all or none"
        raise RefusedObject(what, where=without.key)
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {_only(each.name): each.rank for each in modules if each.rank != rank},
        "alpha_pattern": {
            _only(each.name): _plain(each.alpha) for each in modules if each.alpha != alpha
        },
        "use_rslora": False,
        "use_dora": without is None,
        "lora_bias": any(each.has_bias for each in modules),
    }


def _most(values: Any) -> Any:
    return Counter(values).most_common(1)[0][0]


def _plain(alpha: float) -> float:
    """An alpha as peft's configs have it: 16, and not 16.0."""
    return int(alpha) if alpha == int(alpha) else alpha


_TEXT_MODEL = "text_model."


def _only(name: str) -> str:
    """The pattern of one module, which peft takes for the end of a path if it may be one."""
    if name.startswith(_TEXT_MODEL):
        return re.escape(name.removeprefix(_TEXT_MODEL))
    return f"^{re.escape(name)}"


def _targets(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Names by which peft finds just these modules: last words that no other module ends in."""
    ends = {name.rpartition(".")[2] for name in names}
    if ends & {other.rpartition(".")[2] for other in others}:
        return sorted(names)
    return sorted(ends)


def with_those_around(modules: Iterable[str]) -> set[str]:
    """Modules, and those that they are in."""
    found = set()
    for module in modules:
        path = module
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return found


def alpha_for(scale: float, rank: int, key: str) -> float:
    """The alpha that gives just this scale at a rank."""
    near = scale * rank  # rounded, so that a neighbour may be the one
    for alpha in (near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf)):
        if alpha / rank == scale:
            return alpha
    raise RefusedObject(f"is scaled by {scale!r}, which no alpha gives at rank {rank}", where=key)


def alpha_tensor(alpha: float, like: TensorRef) -> TensorRef:
    """A tensor of one number: of the type of another tensor, if that has it, or of a finer one."""
    for dtype in (like.dtype, FLOAT32, FLOAT64):
        raw = _exact(alpha, dtype)
        if raw is not None:
            return whole_view(in_memory(raw, dtype, like.location), dtype, ())
    raise AssertionError("a double has all doubles")


_FORMATS = {"float16": "<e", "bfloat16": "<f", "float32": "<f", "float64": "<d"}


def _exact(number: float, dtype: DType) -> bytes | None:
    """The bytes of a number in a type; None where it is not one of its numbers."""
    form = _FORMATS.get(dtype.name)
    if form is None:
        return None
    try:
        raw = struct.pack(form, number)
    except OverflowError:  # it is beyond the largest
        return None
    if struct.unpack(form, raw)[0] != number:
        return None
    if dtype.name == "bfloat16":  # the upper half of a float32
        lower, raw = raw[:2], raw[2:]
        if lower != b"\0\0":
            return None
    return raw
