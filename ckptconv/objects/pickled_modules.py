"""Modules as the state dict that `torch.nn.Module.state_dict` gives: names, order, and what of a
pickled module is saved.

Which attributes are parameters, buffers and children differs between pickled modules, whose state
is read here, and TorchScript, which tells them by `Parts`. Source of the names: `torch.nn.Module`
(torch/nn/modules/module.py).

A quantized layer of bitsandbytes keeps its scales in attributes of its weight, and writes them into
the state dict itself: of 8 bits ``SCB`` and ``weight_format``; of 4 bits ``weight.absmax``,
``weight.quant_map``, their nested twins, and the rest as JSON text in a uint8 tensor. Source:
`_save_to_state_dict` in bitsandbytes/nn/modules.py and `QuantState.as_dict` in
bitsandbytes/functional.py, 0.41 to 0.50.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ckptconv.io.source import MemorySource
from ckptconv.objects.encodings import PARAMETERS, holds_tensors
from ckptconv.objects.torch_read import plain_sizes
from ckptconv.pickles.nodes import ORDERED_DICT, Call, Dict, Global, Node, mapping_pairs
from ckptconv.support.errors import LimitExceeded
from ckptconv.support.limits import Limits, in_force
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.checksums import check_storage
from ckptconv.tensors.dtypes import BY_NAME, UINT8
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, view_of
from ckptconv.tensors.stream import iter_chunks

_MODULES = "bitsandbytes.nn.modules."
_FOUR_BITS = tuple(f"{_MODULES}{name}" for name in ("Linear4bit", "LinearFP4", "LinearNF4"))
_EIGHT_BITS = f"{_MODULES}Linear8bitLt"
_NOWHERE = Path("the quantization state of a layer")


class Saved(NamedTuple):
    """What a layer saves beside its parameters; `used` are tensors that stand in it as numbers."""

    tensors: list[tuple[str, Node]]
    used: tuple[TensorRef, ...] = ()


def saved_beside(
    layer: str, state: Mapping[str, Node], parameters: Mapping[str, Node]
) -> Saved | None:
    """What a layer of this class saves beside its parameters; None where that is not known."""
    weight = parameters.get("weight")
    held = fields(weight.state) if type(weight) is TensorObject else {}
    if layer == _EIGHT_BITS:
        return _eight_bits(held, fields(state.get("state")))
    if layer in _FOUR_BITS:
        return _four_bits(held.get("quant_state"))
    return None


def fields(state: Node) -> dict[str, Node]:
    """The attributes in the state of an object, or of the call that makes one, if there are any."""
    if type(state) is Call:
        state = state.state
    # (attributes, slots): the state of an object whose class has __slots__
    if type(state) is tuple and state:
        state = state[0]
    if type(state) is not Dict:
        return {}
    return {name: value for name, value in state.pairs if type(name) is str}


def _eight_bits(weight: Mapping[str, Node], state: Mapping[str, Node]) -> Saved | None:
    scales = weight.get("SCB")
    if scales is None:
        scales = state.get("SCB")
    is_plain = state.get("has_fp16_weights")
    if type(is_plain) is not bool or type(scales) not in (TensorRef, type(None)):
        return None
    # not quantised yet: that is done when the layer is first moved to a GPU
    if is_plain or scales is None:
        return Saved([])
    # 0: by rows, in LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING of bitsandbytes
    return Saved([("SCB", scales), ("weight_format", _bytes_tensor(b"\0", ()))])


def _four_bits(node: Node) -> Saved | None:
    if node is None:
        return Saved([])
    found = fields(node)
    shape = plain_sizes(found.get("shape"))
    kind, inner = found.get("quant_type"), fields(found.get("state2"))
    tensors = [("absmax", found.get("absmax")), ("quant_map", found.get("code"))]
    plain = {
        "quant_type": kind,
        "blocksize": found.get("blocksize"),
        "dtype": _dtype(found),
        "shape": None if shape is None else list(shape),
    }
    used: tuple[TensorRef, ...] = ()
    if found.get("nested") is True:
        offset, code = found.get("offset"), inner.get("code")
        tensors.append(("nested_absmax", inner.get("absmax")))
        tensors.append(("nested_quant_map", _cloned(code)))
        plain |= {"nested_blocksize": inner.get("blocksize"), "nested_dtype": _dtype(inner)}
        plain["nested_offset"] = _number(offset)
        used = tuple(ref for ref in (offset, code) if type(ref) is TensorRef)
    # in the order of the kernels of a CPU, of which the file tells nothing
    is_packed_for_cpu = found.get("packing_format_for_cpu", False) is not False
    if kind not in ("fp4", "nf4") or is_packed_for_cpu:
        return None
    kinds = {type(value) for value in plain.values()}
    if {type(ref) for _, ref in tensors} != {TensorRef} or not kinds <= _JSON:
        return None
    packed = json.dumps(plain).encode()
    tensors.append((f"quant_state.bitsandbytes__{kind}", _bytes_tensor(packed, (len(packed),))))
    return Saved([(f"weight.{name}", ref) for name, ref in tensors], used)


_JSON = {str, int, float, list}
_SMALL = 1 << 12  # bytes of a storage that holds one number


def _dtype(found: Mapping[str, Node]) -> str | None:
    match found.get("dtype"):
        case Global(module="torch", name=name) if name in BY_NAME:
            return name
    return None


def _number(ref: Node) -> float | None:
    """The one value of a float32 tensor; its storage is checked, for no output will hold it."""
    if type(ref) is not TensorRef or ref.dtype.name != "float32" or ref.numel != 1:
        return None
    storages = [piece.storage for piece in ref.pieces]
    if any(storage.nbytes > _SMALL for storage in storages):
        return None
    for storage in storages:
        check_storage(storage)
    number: float = struct.unpack("<f", b"".join(map(bytes, iter_chunks(ref))))[0]
    return number


def _cloned(ref: Node) -> Node:
    """A tensor that shares no memory, as the layer saves the map that all layers have in common."""
    if type(ref) is not TensorRef:
        return ref
    pieces = tuple(piece._replace(storage=piece.storage._replace()) for piece in ref.pieces)
    return ref._replace(pieces=pieces)


def _bytes_tensor(values: bytes, shape: tuple[int, ...]) -> TensorRef:
    source = MemorySource(values, _NOWHERE)
    storage = Storage(source, 0, len(values), "cpu", "a quantization state", UINT8)
    return view_of(storage, UINT8, 0, shape, (1,) * len(shape))


# ------------------------------------------------------------------------------------------ modules


NamedNodes = list[tuple[str, Node]]


class Parts(NamedTuple):
    """What a module itself holds: named parameters, saved buffers, in order, and its children."""

    tensors: NamedNodes
    children: list[tuple[str, Call]]


def state_dict_of(module: Call, parts_of: Callable[[Call], Parts]) -> Call:
    """The OrderedDict that `module.state_dict()` would give: a module's own tensors, then those of
    each of its children.

    Tensors are detached, as they are there. Raises `LimitExceeded` when modules nest too deeply,
    hold themselves, or are shared so often that their names would not end.
    """
    pairs: list[tuple[Node, Node]] = []
    work: list[tuple[str, Call, int]] = [("", module, 0)]
    known: dict[int, Parts] = {}  # a shared module is walked wherever it stands, and asked once
    count = written = 0
    most = in_force()
    while work:
        prefix, current, depth = work.pop()
        parts = known.get(id(current))
        if parts is None:
            parts = known[id(current)] = parts_of(current)
        count += 1
        written += len(prefix) * (len(parts.tensors) + len(parts.children))
        if depth > most.depth or count > most.modules or written > most.names:
            raise _too_many(prefix, depth, count, most)
        pairs += [(prefix + name, detached(value)) for name, value in parts.tensors]
        work += [(f"{prefix}{name}.", child, depth + 1) for name, child in reversed(parts.children)]
    made = Call(ORDERED_DICT, ())
    made.pairs = pairs
    return made


def _too_many(prefix: str, depth: int, count: int, most: Limits) -> LimitExceeded:
    limit = "names"
    if depth > most.depth:
        limit = "depth"
    elif count > most.modules:
        limit = "modules"
    what = "a module contains itself, or too many modules"
    return LimitExceeded(what, limit=limit, allowed=getattr(most, limit), where=prefix[:60] + "…")


def detached(value: Node) -> Node:
    """What a state dict has for a parameter or buffer: no gradient, no Parameter; others stay."""
    if type(value) is TensorObject and value.cls is None:
        value = value.tensor
    if type(value) is TensorRef and value.requires_grad:
        return value._replace(requires_grad=False)
    if type(value) is Call and value.name in PARAMETERS and value.args:
        return value.args[0]
    return value


# ---------------------------------------------------------------------------------- pickled modules

_PARTS = ("_parameters", "_buffers", "_modules")
_NOT_SAVED = "_non_persistent_buffers_set"
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")


def is_module(node: Node) -> bool:
    """Whether a node is a module: an object of any class with parameters, buffers and children. One
    whose parts are not plain dicts is an object like any other.
    """
    if type(node) is not Call or type(node.state) is not Dict:
        return False
    parts = {key: value for key, value in node.state.pairs if type(key) is str and key in _PARTS}
    are_plain = all(part is None or mapping_pairs(part) is not None for part in parts.values())
    return are_plain and len(parts) == len(_PARTS)


def saved_tensors(module: Call) -> NamedNodes:
    """What `state_dict()` gives of a module itself: parameters, persistent buffers, and what is
    known of its class.

    A child that is not a module by its pickled form, but holds tensors, is given too, with a dot
    behind its name: whoever writes the state dict has to say that it does not fit in.
    """
    beside = saved_by_class(module) or Saved([])
    own = [(name, value) for _, name, value, is_saved in own_tensors(module) if is_saved]
    others = [(name, child) for name, child in _children(module) if not is_module(child)]
    odd = [(f"{name}.", child) for name, child in others if holds_tensors(child)]
    return own + beside.tensors + odd


def own_tensors(module: Call) -> Iterator[tuple[str, str, Node, bool]]:
    """The parameters and buffers of a module: kind, name, value, if they are in its state dict."""
    state = fields(module)
    skipped = _names_in(state.get(_NOT_SAVED))
    for kind in _PARTS[:2]:
        for name, value in mapping_pairs(state[kind]) or ():
            if type(name) is str and value is not None:
                yield kind, name, value, not (kind == "_buffers" and name in skipped)


def child_modules(module: Call) -> list[tuple[str, Call]]:
    """The children of a module, by name."""
    return [(name, child) for name, child in _children(module) if is_module(child)]


def _children(module: Call) -> NamedNodes:
    pairs = mapping_pairs(fields(module)["_modules"]) or ()
    return [(name, child) for name, child in pairs if type(name) is str]


def other_attributes(module: Call) -> NamedNodes:
    """What a module holds besides parameters, buffers and children."""
    return [(name, value) for name, value in fields(module).items() if name not in _PARTS]


def saving_hooks(module: Call) -> Iterator[Node]:
    """The functions that change what the module saves."""
    state = fields(module)
    for name in _HOOKS:
        for _, hook in mapping_pairs(state.get(name)) or ():
            yield hook


def saved_by_class(module: Call) -> Saved | None:
    """What a module's class is known to save beside parameters and buffers; None: not known."""
    own = own_tensors(module)
    parameters = {name: value for kind, name, value, _ in own if kind == "_parameters"}
    return saved_beside(module.name, fields(module), parameters) if parameters else None


def _names_in(node: Node) -> set[str]:
    match node:
        case Call(name="builtins.set", args=(given, *_)) if type(given) in (list, tuple):
            return {name for name in given if type(name) is str}
    return set()
