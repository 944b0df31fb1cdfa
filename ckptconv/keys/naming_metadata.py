"""Metadata of safetensors that name tensors, and say how their codes are read: they follow every
new name, or the change is refused.

Known are torchao's (``tensor_names``, a JSON list, and for each tensor ``M.weight`` an entry
``{_type, _data, _tensor_data_names}`` about the tensors ``M._weight_NAME``; source:
torchao/prototype/safetensors) and ComfyUI's (``_quantization_metadata``: the ``layers`` M of the
tensors ``M.weight…``, some without the prefix of the tensors; source: ComfyUI, comfy/utils.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ckptconv.support.errors import KeyConflict, RefusedObject
from ckptconv.support.text import some_text

TORCHAO = "tensor_names"
COMFYUI = "_quantization_metadata"
_PREFIXES = ("", "model.diffusion_model.")  # of the tensors, where the layers lack it

NewNames = Mapping[str, "str | None"]
"""The new name of each tensor; None where it is left out."""


def naming_entries(metadata: Mapping[str, str]) -> dict[str, str]:
    """The entries that say how the codes of tensors are read."""
    torchao = _torchao(metadata)
    names: list[str] = []
    if any("_tensor_data_names" in entry for entry in torchao.values()):
        names += [TORCHAO, *torchao]
    if _layers(metadata):
        names.append(COMFYUI)
    return {name: metadata[name] for name in names}


def refuse_without(metadata: Mapping[str, str], output: str) -> None:
    """Raise `RefusedObject` for an `output` of codes without the metadata to read them by."""
    names = list(naming_entries(metadata))
    if names:
        what = f"is metadata by which codes are read, and {output} has no place for it"
        hint = "write safetensors (--to safetensors), which keeps it"
        raise RefusedObject(what, where=names[0], hint=hint)


def followed(metadata: Mapping[str, str], names: NewNames) -> dict[str, str]:
    """The metadata as they speak of the tensors under their new names. Raises `RefusedObject` where
    the new names are not of the form by which the codes are found.
    """
    # before anything is parsed: metadata of a form that is not known stay as they are
    if all(old == new for old, new in names.items()):
        return dict(metadata)
    torchao = {name: _new_name(name, entry, names) for name, entry in _torchao(metadata).items()}
    after: dict[str, str] = {}
    for name, value in metadata.items():
        new = torchao.get(name, name)
        if new in after:
            raise KeyConflict("a metadata entry has this name already", where=new)
        if new is not None:
            after[new] = value
    if torchao:
        after[TORCHAO] = json.dumps([name for name in torchao.values() if name is not None])
    layers = _layers(metadata)
    if layers:
        moved = ((_new_layer(layer, names), entry) for layer, entry in layers.items())
        whole = json.loads(metadata[COMFYUI])
        whole["layers"] = {layer: entry for layer, entry in moved if layer is not None}
        after[COMFYUI] = json.dumps(whole)
    return after


def _torchao(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The entries of torchao by the names of their tensors; none where they are not of its form."""
    names = _parsed(metadata.get(TORCHAO), list)
    if not all(type(name) is str for name in names):
        return {}
    entries = {name: _parsed(metadata.get(name), dict) for name in names}
    return entries if all("_type" in entry for entry in entries.values()) else {}


def _layers(metadata: Mapping[str, str]) -> dict[str, Any]:
    layers: dict[str, Any] = _of_kind(_parsed(metadata.get(COMFYUI), dict).get("layers"), dict)
    return layers


def _parsed(text: str | None, kind: type) -> Any:
    """The JSON of a text, or an empty one where it is not of that kind."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return kind()
    return _of_kind(found, kind)


def _of_kind(value: object, kind: type) -> Any:
    return value if type(value) is kind else kind()


def _new_name(name: str, entry: Mapping[str, Any], names: NewNames) -> str | None:
    """The new name of one of torchao's tensors, by those of the tensors that hold it."""
    parts = entry.get("_tensor_data_names")
    if type(parts) is not list:
        return names.get(name, name)
    module, _, own = name.rpartition(".")
    prefix = f"{module}._{own}_"
    new = _new_prefix(name, prefix, [f"{prefix}{part}" for part in parts], names)
    if new is None:
        return None
    form = re.fullmatch(r"(.+)\._([^.]+)_", new, re.DOTALL)
    if form is None:
        raise _refusal(name, [f"{new}{part}" for part in parts])
    return f"{form[1]}.{form[2]}"


def _new_layer(layer: str, names: NewNames) -> str | None:
    for before in _PREFIXES:
        prefix = f"{before}{layer}."
        parts = [f"{prefix}{part}" for part in _LAYER_PARTS if f"{prefix}{part}" in names]
        if parts:
            new = _new_prefix(layer, prefix, parts, names)
            if new is None:
                return None
            if not new.endswith("."):
                raise _refusal(layer, [f"{new}weight"])
            return new.removeprefix(before).removesuffix(".")
    return layer


_LAYER_PARTS = ("weight", "weight_scale", "weight_scale_2", "pre_quant_scale")


def _new_prefix(name: str, prefix: str, parts: list[str], names: NewNames) -> str | None:
    """What now stands before all the tensors `parts`, which began with `prefix`; None where all of
    them were left out. Parts in other files stay as they are.
    """
    new = {part: names[part] for part in parts if part in names}
    if not new:
        return prefix
    if all(key is None for key in new.values()):
        return None
    found = set()
    for part, key in new.items():
        ending = part.removeprefix(prefix)
        is_of_form = key is not None and key.endswith(ending)
        found.add(str(key).removesuffix(ending) if is_of_form else None)
    if len(found) > 1 or None in found:
        raise _refusal(name, [key or "none" for key in new.values()])
    return found.pop()


def _refusal(name: str, new: list[str]) -> RefusedObject:
    what = "its metadata say how its codes are read, by the names of its tensors, and the new names"
    hint = "give all of them another prefix, or keep their names"
    return RefusedObject(f"{what} {some_text(new)} are not of their form", where=name, hint=hint)
