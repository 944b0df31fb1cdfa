"""State-dict values as the named tensors that safetensors can hold, and back: exact, by a recipe in
the metadata.

A strided tensor stays under its key. One that safetensors has no form for is taken apart into
components under ``key.…``, and the metadata entry ``ckptconv.encodings`` holds a JSON object from
key to recipe:

| encoding | components | recipe |
|---|---|---|
| ``complex`` | ``key.real_imag``: the parts side by side in one more dimension of 2 | ``dtype`` |
| ``sparse`` (COO) | ``key.indices``, ``key.values`` | ``layout``, ``size``, ``coalesced`` |
| ``sparse`` (CSR, CSC, BSR, BSC) | ``key.compressed_indices``, ``key.plain_indices``, | |
| | ``key.values`` | ``layout``, ``size`` |
| ``quantized`` | ``key.integers``; by channel also ``key.scales``, | ``dtype``, ``scheme``, |
| | ``key.zero_points`` | ``scale``, ``zero_point``, ``axis`` |
| ``nested`` | ``key.buffer``, ``key.sizes``, ``key.strides``, ``key.offsets`` | |

A component that safetensors cannot hold itself (complex values of a sparse tensor) has a recipe of
its own. Source of the forms: the rebuild functions in torch/_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from ckptconv.objects.plain import is_array, spoken_name, tensor_form
from ckptconv.objects.torch_read import Window, is_tensor_call, plain_sizes
from ckptconv.pickles.nodes import ORDERED_DICT, Call, Dict, Global, Node, PersistentId, children
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.dtypes import BY_NAME, UINT8, DType
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, contiguous_stride, view_of

ENCODINGS = "ckptconv.encodings"
"""The name of the metadata entry with the recipes."""

Recipe = dict[str, Any]
Components = tuple[tuple[str, TensorRef], ...]


class FlatValue(NamedTuple):
    """A value as named tensors, recipes to put it together; `was`: what became a tensor."""

    tensors: Components
    recipes: dict[str, Recipe]
    was: str | None = None


def flat(key: str, value: Node, *, encode: bool = True) -> FlatValue | None:
    """The named tensors of a state dict's value; None where it is not a tensor, or one without an
    exact encoding.

    Without `encode`, tensors that safetensors has no form for have none, but for complex ones,
    which stay as they are.
    """
    ref, was = value, None
    if type(value) is TensorObject:
        ref = value.tensor
    elif type(value) is not TensorRef:
        ref = tensor_form(value)
        if ref is not None:
            was = spoken_name(value, value.name)
    if ref is not None and encode and ref.dtype.name in _REALS:
        recipe: Recipe = {"encoding": "complex", "dtype": ref.dtype.name}
        return FlatValue(((f"{key}.real_imag", ref),), {key: recipe}, was)
    if ref is not None:
        return FlatValue(((key, ref),), {}, was)
    if not encode or type(value) is not Call:
        return None
    if value.name in PARAMETERS and value.args:
        return flat(key, value.args[0])
    made = _ENCODERS.get(value.name, _not_encoded)(value.args)
    return None if made is None else _nested_flat(key, *made)


def _nested_flat(key: str, components: Components, recipe: Recipe) -> FlatValue:
    inner = [found for name, ref in components if (found := flat(f"{key}.{name}", ref)) is not None]
    recipes = {name: inside for found in inner for name, inside in found.recipes.items()}
    return FlatValue(
        tuple(pair for found in inner for pair in found.tensors), {**recipes, key: recipe}
    )


def recipes_text(recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """The metadata entry that holds these recipes; none where there are no recipes."""
    if not recipes:
        return {}
    import json

    # a header is UTF-8: names of other scripts stay as short as they are
    return {ENCODINGS: json.dumps(recipes, separators=(",", ":"), ensure_ascii=False)}


def written_form(dtype: DType, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """The safetensors dtype and shape of a complex tensor of an encoding; None for others."""
    if dtype.name not in _REALS:
        return None
    return BY_NAME[_REALS[dtype.name]].safetensors or "", (*shape, 2)


LEAVES = (TensorRef, TensorObject, Storage, Window)
_HOLDERS = frozenset((*LEAVES, Call, Dict, list, tuple, PersistentId))


def holds_tensors(value: Node) -> bool:
    """Whether a tensor, a storage or an array of numbers is somewhere in a value. A tensor itself
    holds what its state does.
    """
    # a value may stand in several places, and in itself
    seen: set[int] = set()
    work = [value.state if type(value) is TensorObject else value]
    while work:
        node = work.pop()
        if type(node) not in _HOLDERS or id(node) in seen:
            continue
        if type(node) in LEAVES or is_tensor_call(node) or is_array(node):
            return True
        seen.add(id(node))
        work += [child for _, child in children(node) if type(child) in _HOLDERS]
    return False


_REALS = {"complex128": "float64", "complex32": "float16"}
PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_UTILS = "torch._utils"
_Encoded = tuple[Components, Recipe] | None

# ----------------------------------------------------------------------------------------- encoding


def _sparse(args: tuple[Node, ...]) -> _Encoded:
    match args:
        case (Call(args=(str() as layout, *_)), tuple() as given) if layout in _SPARSE:
            names = _SPARSE[layout]
        case _:
            return None
    refs, rest = given[: len(names)], given[len(names) :]
    if not 1 <= len(rest) <= 2 or any(type(ref) is not TensorRef for ref in refs):
        return None
    size = plain_sizes(rest[0])
    if size is None:
        return None
    recipe: Recipe = {"encoding": "sparse", "layout": layout, "size": list(size)}
    if len(rest) == 2:
        recipe["coalesced"] = rest[1] is True
    return tuple(zip(names, refs, strict=True)), recipe


_COMPRESSED = ("compressed_indices", "plain_indices", "values")
_SPARSE = {
    "torch.sparse_coo": ("indices", "values"),
    **{f"torch.sparse_{kind}": _COMPRESSED for kind in ("csr", "csc", "bsr", "bsc")},
}


def _not_encoded(args: tuple[Node, ...]) -> _Encoded:
    return None


def _quantized(args: tuple[Node, ...]) -> _Encoded:
    match args:
        case (Storage(dtype=DType() as dtype) as storage, offset, shape, stride, params, *_) if (
            dtype.name in _INTEGERS
        ):
            integer = BY_NAME[_INTEGERS[dtype.name]]
            return _by_scheme(view_of(storage, integer, offset, shape, stride), dtype, params)
    return None


def _by_scheme(integers: TensorRef, dtype: DType, params: Node) -> _Encoded:
    """The components of a quantized tensor by its parameters: one scale, or those of channels."""
    recipe: Recipe = {"encoding": "quantized", "dtype": dtype.name}
    match params:
        case tuple((Global(name="per_tensor_affine" as scheme), float() as scale, number)) if (
            type(number) is int
        ):
            recipe |= {"scheme": scheme, "scale": scale, "zero_point": number}
            return (("integers", integers),), recipe
        case tuple(
            (Global(name=scheme), TensorRef() as scales, TensorRef() as zero_points, axis)
        ) if scheme in _BY_CHANNEL and type(axis) is int:
            recipe |= {"scheme": scheme, "axis": axis}
            named = (("scales", scales), ("zero_points", zero_points))
            return (("integers", integers), *named), recipe
    return None


def packed_codes(
    value: Node, bits: Mapping[str, int]
) -> tuple[Components, Recipe, tuple[int, ...]] | None:
    """The bytes of a quantized tensor of less than a byte an element (``integers``), what it is
    quantized by, and its shape; None for anything else, and for a view of a part.

    `bits` are those of an element of each type.
    """
    while type(value) is Call and value.name in PARAMETERS and value.args:
        value = value.args[0]
    if type(value) is not Call or value.name != f"{_UTILS}._rebuild_qtensor":
        return None
    match value.args:
        case (Storage(dtype=DType() as dtype) as storage, 0, shape, stride, params, *_):
            sizes = plain_sizes(shape)
        case _:
            return None
    # elements share bytes, so only all of them in C order are whole bytes
    if dtype.name not in bits or sizes is None or stride != contiguous_stride(sizes):
        return None
    codes = view_of(storage, UINT8, 0, (-(-prod(sizes) * bits[dtype.name] // 8),), (1,))
    found = _by_scheme(codes, dtype, params)
    return None if found is None else (*found, sizes)


# What lies in the storage of a quantized tensor
_INTEGERS = {"quint8": "uint8", "qint8": "int8", "qint32": "int32"}
_BY_CHANNEL = ("per_channel_affine", "per_channel_affine_float_qparams")


def _nested(args: tuple[Node, ...]) -> _Encoded:
    if len(args) != len(_NESTED) or any(type(ref) is not TensorRef for ref in args):
        return None
    return tuple(zip(_NESTED, args, strict=True)), {"encoding": "nested"}


_NESTED = ("buffer", "sizes", "strides", "offsets")
_ENCODERS: dict[str, Callable[[tuple[Node, ...]], _Encoded]] = {
    f"{_UTILS}._rebuild_sparse_tensor": _sparse,
    f"{_UTILS}._rebuild_qtensor": _quantized,
    f"{_UTILS}._rebuild_nested_tensor": _nested,
}

# ----------------------------------------------------------------------------------------- decoding


def restore(tensors: Mapping[str, TensorRef], text: str) -> dict[str, Node]:
    """The values of a state dict, the components among `tensors` put together by the recipes in
    `text`.

    A value stands where its first component stood. A key without any component is passed over:
    another program left it out. Raises `MalformedCheckpoint` when the recipes are none, or do not
    fit the tensors.
    """
    values: dict[str, Node] = dict(tensors)
    places = {name: at for at, name in enumerate(tensors)}
    for key, recipe in _recipes(text).items():
        names = _component_names(key, recipe)
        there = [name for name in names if name in values]
        if not there:
            continue
        if len(there) < len(names) or key in values:
            what = "the components of its encoding are incomplete"
            raise MalformedCheckpoint(f"{what}, or the tensor itself is there too", where=key)
        try:
            value = _DECODERS[recipe["encoding"]](recipe, [values.pop(name) for name in names])
        # recipes are text of a file: whatever a decoder trips over in one is the same error
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = "its components do not fit the recipe of its encoding"
            raise MalformedCheckpoint(what, where=key) from error
        values[key] = value
        places[key] = places[names[0]]
    # the order of a state dict tells what an optimizer numbers
    return {key: values[key] for key in sorted(values, key=places.__getitem__)}


def _recipes(text: str) -> dict[str, Recipe]:
    import json

    try:
        recipes = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCheckpoint("is not JSON", where=ENCODINGS) from error
    if type(recipes) is not dict or any(type(recipe) is not dict for recipe in recipes.values()):
        raise MalformedCheckpoint("holds something other than recipes", where=ENCODINGS)
    return recipes


def _component_names(key: str, recipe: Recipe) -> list[str]:
    names: tuple[str, ...]
    match recipe:
        case {"encoding": "sparse", "layout": str() as layout} if layout in _SPARSE:
            names = _SPARSE[layout]
        case {"encoding": "quantized", "scheme": scheme} if scheme in _BY_CHANNEL:
            names = ("integers", "scales", "zero_points")
        case {"encoding": "quantized"}:
            names = ("integers",)
        case {"encoding": "complex"}:
            names = ("real_imag",)
        case {"encoding": "nested"}:
            names = _NESTED
        case _:
            what = "its encoding is unknown"
            raise MalformedCheckpoint(what, where=key, hint="a newer ckptconv may read it")
    return [f"{key}.{name}" for name in names]


def _complex(recipe: Recipe, parts: list[Any]) -> Node:
    part: TensorRef = parts[0]
    if part.dtype.name != _REALS[recipe["dtype"]] or part.shape[-1] != 2:
        raise ValueError
    dtype, shape = BY_NAME[recipe["dtype"]], part.shape[:-1]
    return view_of(part.storage._replace(dtype=dtype), dtype, 0, shape, contiguous_stride(shape))


def _sparse_again(recipe: Recipe, parts: list[Any]) -> Node:
    size = _checked_ints(recipe["size"])
    layout = Call(Global("torch.serialization", "_get_layout"), (recipe["layout"],))
    given = (*parts, Call(Global("torch", "Size"), (size,)))
    if recipe["layout"] == "torch.sparse_coo":
        indices, values = parts
        if len(indices.shape) != 2 or indices.shape[0] + len(values.shape) - 1 != len(size):
            raise ValueError
        given = (*given, recipe["coalesced"] is True)
    return Call(Global(_UTILS, "_rebuild_sparse_tensor"), (layout, given))


def _checked_ints(given: Any) -> tuple[int, ...]:
    size = plain_sizes(given)
    # torch.Size holds int64, and raises an OverflowError for more
    if size is None or any(not 0 <= number < 1 << 63 for number in size):
        raise ValueError
    return size


def _quantized_again(recipe: Recipe, parts: list[Any]) -> Node:
    integers: TensorRef = parts[0]
    if integers.dtype.name != _INTEGERS[recipe["dtype"]]:
        raise ValueError
    params: tuple[Node, ...] = (Global("torch", recipe["scheme"]),)
    if len(parts) > 1:
        axis = recipe["axis"]
        if type(axis) is not int or not 0 <= axis < len(integers.shape):
            raise ValueError
        params += (parts[1], parts[2], axis)
    else:
        if recipe["scheme"] != "per_tensor_affine" or type(recipe["zero_point"]) is not int:
            raise ValueError
        params += (float(recipe["scale"]), recipe["zero_point"])
    storage = integers.storage._replace(dtype=BY_NAME[recipe["dtype"]])
    args = (storage, 0, integers.shape, integers.stride, params, False, Call(ORDERED_DICT, ()))
    return Call(Global(_UTILS, "_rebuild_qtensor"), args)


_DECODERS: dict[str, Callable[[Recipe, list[Any]], Node]] = {
    "complex": _complex,
    "sparse": _sparse_again,
    "quantized": _quantized_again,
    "nested": lambda _, parts: Call(Global(_UTILS, "_rebuild_nested_tensor"), tuple(parts)),
}
