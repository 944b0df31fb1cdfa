"""The values of a state dict as the named tensors of a safetensors file: encoded, skipped, or
refused under their key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

from ckptconv.objects.composites import Check, is_composite, parts_check
from ckptconv.objects.encodings import PARAMETERS, Recipe, flat, holds_tensors, written_form
from ckptconv.objects.known_names import VALUELESS
from ckptconv.objects.plain import spoken_name
from ckptconv.objects.torch_read import is_tensor_call
from ckptconv.pickles.nodes import Call, Dict, Global, Node
from ckptconv.support.errors import KeyConflict, RefusedObject, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import first_few_in_short
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import TensorObject, TensorRef, lacking
from ckptconv.tree.settling import Rewritten, Skipped


@dataclass(frozen=True, slots=True)
class Flattened:
    """The named tensors of a state dict for safetensors, the recipes of encoded ones, and what was
    not a tensor before.

    `checks` read the indices of encoded tensors, which must be right before anything is written.
    `components` are the names of what encoded tensors are taken apart into.
    """

    keys: tuple[str, ...]
    refs: tuple[TensorRef, ...]
    recipes: Mapping[str, Recipe]
    rewritten: tuple[Rewritten, ...]
    checks: tuple[Check, ...] = ()
    components: frozenset[str] = frozenset()

    def tensors(self) -> Iterator[tuple[str, TensorRef]]:
        """The tensors with their names; no pairs are kept, for there may be a million."""
        return zip(self.keys, self.refs, strict=True)


def flatten(
    keys: Sequence[str | None],
    values: Sequence[Node],
    skipped: list[Skipped],
    *,
    encode: bool,
    output: str,
) -> Flattened:
    """The values under these keys (None: left out) as named tensors; what is not a tensor goes to
    `skipped`.

    With `encode`, tensors that safetensors has no form for are taken apart; `output` is what
    messages call what they are for.
    """
    if _are_all_plain(keys, values):
        return Flattened(tuple(keys), tuple(values), {}, ())
    tensors: dict[str, TensorRef] = {}
    recipes: dict[str, Recipe] = {}
    components: set[str] = set()
    rewritten, checks = [], []
    known: dict[int, Node] = {}  # one tensor for each array, so that its names are known to be tied
    for key, value in zip(keys, values, strict=True):
        if key is None:
            continue
        is_new = key not in tensors and key not in recipes
        if type(value) is TensorRef and value.dtype.safetensors is not None and is_new:
            tensors[key] = value
            continue
        made = flat(key, known.get(id(value), value), encode=encode)
        holds_more = (made is None or type(value) is TensorObject) and holds_tensors(value)
        # what `get_extra_state` gives: recipes and histories, for training
        is_extra = key.rpartition(".")[2] == "_extra_state"
        if holds_more and (is_tensor_call(value) or not is_extra):
            raise _refused_value(key, value, output)
        if made is None:
            more = ", an extra state that holds tensors" if holds_more else ""
            skipped.append(Skipped(key, f"not a tensor but {_kind(value)}{more}", value))
            continue
        inner = value
        if type(value) is Call and value.name in PARAMETERS:
            inner = value.args[0]
        if type(inner) is Call and is_composite(inner):
            checks.append(parts_check(inner, key))
        if type(value) is TensorObject and _holds_something(value.state):
            what = "attributes of a tensor, not a tensor of the state dict"
            skipped.append(Skipped(f"{key}.<state>", what, value.state))
        if made.was is not None:
            rewritten.append(Rewritten(key, made.was))
            known[id(value)] = made.tensors[0][1]
        names = [*(name for name, _ in made.tensors), *made.recipes]
        taken = next((name for name in names if name in tensors or name in recipes), None)
        if taken:
            what = f"is both a key and a component of the encoding of another ({printable(key)})"
            raise KeyConflict(what, where=taken, hint="use --rename")
        tensors.update(made.tensors)
        if made.recipes:
            recipes.update(made.recipes)
            components.update(name for name, _ in made.tensors)
    told = recipes, tuple(rewritten), tuple(checks), frozenset(components)
    return Flattened(tuple(tensors), tuple(tensors.values()), *told)


def _are_all_plain(keys: Sequence[str | None], values: Sequence[Node]) -> TypeGuard[Sequence[str]]:
    """Whether all are kept, and are tensors as safetensors has them: so it is nearly always, and
    there may be a million.
    """
    if {*map(type, values)} != {TensorRef} or any(
        dtype.safetensors is None for dtype in {ref.dtype for ref in values}
    ):
        return False
    names = {*keys}
    return len(names) == len(keys) and None not in names


def _holds_something(state: Node) -> bool:
    """Whether a tensor object's state says anything: a dict or pair of dicts, not empty."""
    parts = state if type(state) is tuple else (state,)
    return any(part.pairs if type(part) is Dict else part is not None for part in parts)


def encoding_notes(flattened: Flattened) -> Iterator[str]:
    """Tell of the tensors that are encoded."""
    if flattened.recipes:
        names = first_few_in_short([*flattened.recipes], 3)
        why = "because safetensors does not have such tensors"
        yield f"stored in parts, {why}; ckptconv restores them: {names}"


def refuse_split(flattened: Flattened) -> None:
    """Raise `RefusedObject` if a tensor is encoded: its components may not lie in several files."""
    for key in flattened.recipes:
        what = "safetensors holds it only in parts, which cannot be split over shards"
        hint = f"leave --max-shard-size out, {_TORCH}, or leave it out with --exclude"
        raise RefusedObject(what, where=key, hint=hint)


def refuse_unholdable(key: str, ref: TensorRef, dtype: DType) -> None:
    """Raise `RefusedObject` if safetensors has no dtype for a tensor written as `dtype`."""
    if ref.dtype.safetensors == "F4" and not ref.shape:  # half a byte
        what = f"safetensors has no scalars of {ref.dtype.name}"
        raise RefusedObject(what, where=key, hint=_OR_OUT)
    if dtype.safetensors is None and written_form(ref.dtype, ref.shape) is None:
        raise lacking("safetensors", ref.dtype, key, _OR_OUT)


_TORCH = "write a torch file (--to torch)"
_OR_OUT = f"{_TORCH}, or leave it out (--exclude)"


def _refused_value(key: str, value: Node, output: str) -> RefusedObject:
    """What to say of a tensor, or of a value with some, that an output would lose."""
    hint = _OR_OUT
    if is_tensor_call(value):
        what = f"is a tensor that {output} cannot hold ({_tensor_class(value)})"
        if value.name in VALUELESS:
            what = f"is a tensor without values ({value.name}): there is nothing to convert"
            hint = "save it on a host that has its values, or leave it out (--exclude)"
        elif _tensor_class(value).startswith("torchao."):
            hint = "make values of it (--dequantize), or leave it out (--exclude)"
    elif type(value) is TensorObject:
        what = f"is a tensor with attributes that hold tensors, which {output} cannot hold"
    else:
        what = f"is {_kind(value)} with tensors in it (packed weights), which {output} would lose"
    return RefusedObject(what, where=key, hint=hint)


def _kind(value: Node) -> str:
    if type(value) is Call:
        return printable(spoken_name(value, value.name))
    if value is None:
        return "None"
    name = {Dict: "dict", Global: "class"}.get(type(value), type(value).__name__)
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _tensor_class(value: Call) -> str:
    """What kind of tensor a call rebuilds: the class of a subclass, or the function."""
    match value.args:
        case (_, Global(path=path), *_) if "_rebuild_from_type" in value.name:
            return printable(path)
    return printable(value.name)
