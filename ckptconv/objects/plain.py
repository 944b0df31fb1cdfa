"""Symbolic objects that have an exact plain form, which every reader of the output accepts.

What `torch.load(weights_only=True)` refuses is mostly harmless: numbers and arrays of numpy,
namespaces, dicts of another name, paths. Each such call is rewritten as the number, tensor, dict or
text that it stands for; anything else has no plain form. Nothing is executed. Sources: the
`__reduce__` forms of numpy, argparse, types, collections and pathlib.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path

from ckptconv.io.source import MemorySource
from ckptconv.objects import training
from ckptconv.objects.known_names import COPIES
from ckptconv.objects.training import Form
from ckptconv.pickles.nodes import ABSENT, DICT, ORDERED_DICT, SET, Call, Dict, Global, Node
from ckptconv.support.limits import in_force
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.refs import Storage, TensorRef, contiguous_stride, view_of

_NO_DICT = partial(re.match, r"builtins\.|torch\.\w+\Z")
_DICT_CLASSES = ("AttributeDict", "EasyDict", "Munch", "AttrDict", "ConfigDict")  # of any package


def plain_form(call: Call) -> Node:
    """The plain value that `call` stands for, or the call itself when it has none."""
    name, state = _class_of(call), call.state
    form = _FORMS.get(name)
    if form is None:
        return _as_dict(call, name, state)
    return form.make(call, state) if _is_all_read(call, form.reads) else call


def _is_all_read(call: Call, reads: str) -> bool:
    """Whether the form looks at all that was given to the call, appended, set or made its state."""
    has_args = bool(call.args)
    if call.name == _RECONSTRUCTOR:  # of the class, its base and what the base is made of
        is_bare = _names(call.args[1:2]) == ["builtins.object"] and call.args[2:] == (None,)
        if "args" in reads or not is_bare:
            return False
        has_args = False
    has_state = call.state not in (ABSENT, None)
    there = {"args": has_args, "items": call.items, "pairs": call.pairs, "state": has_state}
    return call.kwargs is None and all(part in reads for part in there if there[part])


def _names(nodes: Sequence[Node]) -> list[str]:
    return [node.path for node in nodes if type(node) is Global]


def _class_of(call: Call) -> str:
    """The class of the object that the call makes, behind protocol 1's `copyreg._reconstructor`."""
    if call.name == _RECONSTRUCTOR and call.args and type(call.args[0]) is Global:
        return call.args[0].path
    return call.name


def _as_dict(call: Call, name: str, state: Node) -> Node:
    """A subclass of dict: made empty, filled with pairs, and with no state but its own items."""
    given = _base_pairs(call)
    known = name.rpartition(".")[2] in _DICT_CLASSES
    if _NO_DICT(name) or call.items or call.kwargs is not None or given is None:
        return call
    if not (call.pairs or given or known):
        return call
    pairs = [*given, *call.pairs]
    values = {key: value for key, value in pairs if type(key) is str}
    extra = _pairs_of_state(state)
    if extra is None or not all(
        type(key) is str and key in values and _is_same(value, values[key]) for key, value in extra
    ):
        return call
    return Dict(pairs)


def _is_same(first: Node, second: Node) -> bool:
    """Whether two nodes are one object, or plain values that cannot be told apart."""
    are_plain = type(first) is type(second) and type(first) in _PLAIN
    # a NaN is not equal to itself
    return first is second or (are_plain and (first == second or first != first))


_PLAIN = (str, bytes, int, float, bool)


def _base_pairs(call: Call) -> list[tuple[Node, Node]] | None:
    """The pairs that the constructor was given; None when it was given something else."""
    if not call.args:
        return []
    if call.name != _RECONSTRUCTOR or len(call.args) != 3 or type(call.args[2]) is not Dict:
        return None
    names = _names(call.args[:2])
    # an OrderedDict is not filled by filling the dict that it is
    if len(names) < 2 or names[0] == ORDERED_DICT.path or names[1] != DICT.path:
        return None
    return call.args[2].pairs


_RECONSTRUCTOR = "copyreg._reconstructor"


def _namespace(call: Call, state: Node) -> Node:
    pairs = _pairs_of_state(state)
    return call if pairs is None else Dict(pairs)


def _pairs_of_state(state: Node) -> list[tuple[Node, Node]] | None:
    """The attributes in the state of an object, none if it has no state; None for another state."""
    if type(state) is Dict:
        return state.pairs
    return [] if state in (ABSENT, None) else None


def _plain_dict(call: Call, _: Node) -> Node:
    known = call.name == "collections.defaultdict"  # its factory
    return call if len(call.args) > known else Dict([*call.pairs])


def _deque(call: Call, _: Node) -> Node:
    """A deque: what it was made of and what was appended, the last of it if it has a length."""
    given, most = (*call.args, None, None)[:2] if call.args else ((), None)
    if type(given) not in (list, tuple) or len(call.args) > 2:
        return call
    if most is not None and (type(most) is not int or most < 0):
        return call
    every = [*given, *call.items]
    return every if most is None else every[max(0, len(every) - most) :]


def _path(separator: str) -> Callable[[Call, Node], Node]:
    """A path, whose first part is its root where it has one."""

    def form(call: Call, _: Node) -> Node:
        parts = call.args
        if not all(type(part) is str for part in parts):
            return call
        if parts and parts[0].endswith(separator):
            return parts[0] + separator.join(parts[1:])
        return separator.join(parts) or "."

    return form


# -------------------------------------------------------------------------------------------- numpy

# numpy's codes, and struct's: a number is read without numpy
_NUMBERS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q",
            "u1": "B", "u2": "H", "u4": "I", "u8": "Q", "c8": "2f", "c16": "2d"}  # fmt: skip
_MOMENTS = {"M8": "numpy.datetime64", "m8": "numpy.timedelta64"}
_COMPLEX = Global("builtins", "complex")
# torch's names of the types that numpy calls by a letter and the size in bytes
_ELEMENTS = {
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{
        f"{sign[0]}{size}": f"{sign}{8 * size}" for sign in ("int", "uint") for size in (1, 2, 4, 8)
    },
    "b1": "bool",
    "c8": "complex64",
    "c16": "complex128",
}
_SCALAR = "numpy._core.multiarray.scalar"
_ARRAY_CLASSES = ("numpy.ndarray", "numpy.memmap")
_NOWHERE = Path("an array in the pickle")


def tensor_form(node: Node) -> TensorRef | None:
    """The tensor that a numpy array or number stands for, or a device tensor made of an array; None
    for anything else.

    A number is a tensor without dimensions. The values are those of the array, of its dtype and
    byte order, and lie in memory, where the pickle brought them.
    """
    if type(node) is not Call or type(node.func) is not Global:
        return None
    if node.name == _SCALAR and len(node.args) == 2:
        return _tensor(node.args[1], node.args[0], (), fortran=False)
    if node.name not in _TENSORS:
        return None
    plain = _FORMS[node.name].make(node, node.state)
    return plain if type(plain) is TensorRef else None


def spoken_name(node: Node, name: str) -> str:
    """How messages call an object of a class or function: an array by its dtype."""
    if type(node) is Call and name == _SCALAR and node.args:
        code, _ = _element(node.args[0]) or (name, False)
        return _MOMENTS.get(code, name)
    if type(node) is not Call or name not in _ARRAYS:
        return name
    inside = list(node.args)
    if type(node.state) is tuple:
        inside += node.state
    dtypes = [part for part in inside if type(part) is Call and part.name == "numpy.dtype"]
    if dtypes and (element := _element(dtypes[0])):
        return f"numpy array of {_ELEMENTS.get(element[0], element[0])}"
    return "numpy array"


def is_array(node: Node) -> bool:
    """Whether a node is a numpy array whose values a tensor can hold."""
    return type(node) is Call and node.name in _ARRAYS and tensor_form(node) is not None


def _number(call: Call, _: Node) -> Node:
    """`numpy.core.multiarray.scalar(dtype, bytes)` as a Python number, widened exactly."""
    if len(call.args) != 2:
        return call
    element, raw = _element(call.args[0]), _raw_bytes(call.args[1])
    if element is None or raw is None:
        return call
    if element[0] in _MOMENTS:
        return training.moment(call.args[0], raw) or call
    code = _NUMBERS.get(element[0])
    if code is None or len(raw) != struct.calcsize(code):
        return call
    parts = struct.unpack((">" if element[1] else "<") + code, raw)
    if len(parts) == 2:
        return Call(_COMPLEX, parts)
    return parts[0]


def _array(call: Call, state: Node) -> Node:
    """An array: `_reconstruct(class, …)`, state (version, shape, dtype, is_fortran, bytes)."""
    if not call.args or type(call.args[0]) is not Global or call.args[0].path not in _ARRAY_CLASSES:
        return call
    if type(state) is not tuple or len(state) != 5:
        return call
    _, shape, dtype, fortran, raw = state
    return _tensor(raw, dtype, shape, fortran=bool(fortran)) or call


def _buffer(call: Call, state: Node) -> Node:
    """An array in protocol 5: `_frombuffer(bytes, dtype, shape, order)`."""
    if len(call.args) != 4 or state is not ABSENT or call.args[3] not in ("C", "F"):
        return call
    raw, dtype, shape, order = call.args
    return _tensor(raw, dtype, shape, fortran=order == "F") or call


def _tensor(raw: Node, dtype: Node, shape: Node, *, fortran: bool) -> TensorRef | None:
    """The tensor of an array's bytes; None where they are not `shape` numbers of a torch type."""
    data, element = _raw_bytes(raw), _element(dtype)
    if data is None or element is None or element[0] not in _ELEMENTS or type(shape) is not tuple:
        return None
    kind = BY_NAME[_ELEMENTS[element[0]]]
    if any(type(size) is not int or size < 0 for size in shape):
        return None
    # the limit first: the product of a million sizes takes long
    if len(shape) > in_force().dimensions or prod(shape) * kind.itemsize != len(data):
        return None
    source = MemorySource(data, _NOWHERE)
    storage = Storage(source, 0, len(data), "cpu", "a numpy array", kind, None, element[1])
    stride = contiguous_stride(shape[::-1])[::-1] if fortran else contiguous_stride(shape)
    return view_of(storage, kind, 0, shape, stride)


def _element(dtype: Node) -> tuple[str, bool] | None:
    """numpy's code for an element's type, whether it is big-endian; None for structures."""
    match dtype:
        case Call(name="numpy.dtype", args=(str() as code, *_), state=state):
            return code, type(state) is tuple and state[1:2] == (">",)
    return None


def _copied(call: Call, _: Node) -> Node:
    """A tensor that pickles as a copy, `_rebuild_…(values, dtype, device, requires_grad)`."""
    match call.args:
        case (values, Global(name=name), (str() as device) | Call(args=(str() as device, *_)), _):
            dtype = BY_NAME.get(name)
        case _:
            return call
    ref = values if type(values) is TensorRef else tensor_form(values)
    if ref is None or dtype is None:
        return call
    # a cast tells what the values were: numpy has no bfloat16, which is pickled as float32
    is_castable = ref.dtype.is_floating and dtype.is_floating
    if dtype is not ref.dtype and not (is_castable and ref.storage.source.is_in_memory()):
        return call
    storage, offset, stride = ref.storage._replace(location=device), ref.storage_offset, ref.stride
    if dtype is not ref.dtype:
        from ckptconv.tensors.computed import iter_cast_chunks  # what computes, for few objects

        data = b"".join(bytes(chunk) for chunk in iter_cast_chunks(ref, dtype, [0]))
        storage = Storage(MemorySource(data, _NOWHERE), 0, len(data), device, storage.name, dtype)
        offset, stride = 0, contiguous_stride(ref.shape)
    return view_of(storage, dtype, offset, ref.shape, stride, requires_grad=call.args[3] is True)


def _raw_bytes(node: Node) -> bytes | None:
    """The bytes of numbers; python 2's may have been read as text, if they happened to be UTF-8."""
    match node:
        case Call(name="builtins.bytearray", args=(given,)):
            node = given
    if type(node) is str:
        return node.encode()
    return node if type(node) is bytes else None


_LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
# DeepSpeed's loss scalers, with the names of their attributes (0.19.8)
_SCALERS = {
    "LossScaler": frozenset({"cur_scale", "dynamic"}),
    "DynamicLossScaler": frozenset({
        "cur_scale", "dynamic", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window",
        "min_scale", "delayed_shift", "cur_hysteresis", "consecutive_hysteresis",
        "raise_error_at_min_scale", "dtype",
    }),
}  # fmt: skip


def loss_scaler(numbers: Node) -> Call | None:
    """The loss scaler of DeepSpeed that has `numbers` for its plain form; None where they are not
    all that an object of its classes has.
    """
    said = {key: value for key, value in _pairs_of_state(numbers) or () if type(key) is str}
    dtype = said.get("dtype")
    is_type = type(dtype) is Global and dtype.module == "torch" and dtype.name in BY_NAME
    plain = [value for key, value in said.items() if key != "dtype"]
    if not all(type(value) in (bool, int, float) for value in plain) or ("dtype" in said) > is_type:
        return None
    name = "DynamicLossScaler" if said.get("dynamic") is True else "LossScaler"
    if said.keys() != _SCALERS[name]:
        return None
    made = Call(Global(_LOSS_SCALERS, name), (), new=True)
    made.state = Dict(list(said.items()))
    return made


_FORMS: dict[str, Form] = {
    **training.FORMS,
    "argparse.Namespace": Form(_namespace, "state"),
    "types.SimpleNamespace": Form(_namespace, "state"),
    **{f"{_LOSS_SCALERS}.{name}": Form(_namespace, "state") for name in _SCALERS},
    "builtins.dict": Form(_plain_dict, "args pairs"),
    "collections.defaultdict": Form(_plain_dict, "args pairs"),
    "collections.deque": Form(_deque, "args items"),
    "builtins.frozenset": Form(lambda call, _: Call(SET, call.args)),
    _SCALAR: Form(_number),
    "numpy._core.multiarray._reconstruct": Form(_array, "args state"),
    "numpy._core.numeric._frombuffer": Form(_buffer),
    **dict.fromkeys(COPIES, Form(_copied)),
    **{
        f"pathlib{module}.{pure}{system}Path": Form(_path(separator))
        for module in ("", "._local")
        for pure in ("", "Pure")
        for system, separator in (("Posix", "/"), ("Windows", "\\"))
    },
}
HOW = {
    **{name: form.how for name, form in _FORMS.items()},
    "numpy.datetime64": "as ISO text",
    "numpy.timedelta64": "as text",
}
"""What the plain form of an object says of it, and what it does not."""
_ARRAYS = frozenset(name for name, form in _FORMS.items() if form.make in (_array, _buffer))
_TENSORS = _ARRAYS | COPIES
