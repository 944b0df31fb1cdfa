"""The configuration of a model beside its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ckptconv.io.location import Location, read_small
from ckptconv.io.places import place_of
from ckptconv.pickles.nodes import Call, Node, mapping_pairs
from ckptconv.support.errors import CheckpointError
from ckptconv.support.json_text import read_object
from ckptconv.tree.checkpoint import Checkpoint


def config_beside(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The model's ``config.json`` beside a checkpoint, or ``params.json`` of Meta's; of a GGUF file
    and of Megatron-LM what it says itself, by the names of a config. Empty where there is none.
    """
    found = _of_gguf(checkpoint.metadata)
    if found is None:
        found = _of_megatron(training_arguments(checkpoint.root))
    if found is not None:
        return found
    home = home_of(checkpoint)
    if home is None:
        return {}
    return json_in(home, "config.json") or json_in(home, "params.json")


def _of_gguf(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """The architecture and the numbers of heads in the metadata of a GGUF file; None for another
    file.

    Without one of their own keys and values have as many as queries. Source: docs/gguf.md of ggml.
    """
    architecture = metadata.get(_ARCHITECTURE)
    if architecture is None:
        return None
    told: dict[str, Any] = {_ARCHITECTURE: architecture}
    for name, ours in (("head_count", _HEADS), ("head_count_kv", _KV_HEADS)):
        text = metadata.get(f"{architecture}.attention.{name}")
        if text is not None:
            told[ours] = int(text) if text.isdecimal() else text
    return told


_ARCHITECTURE = "general.architecture"
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
_OF_VALUES = ("swiglu", "apply_layernorm_1p", "rotary_interleaved")
"""What Megatron-LM's arguments say of the values of a model, not of its size."""


def training_arguments(root: Node) -> Mapping[str, Any]:
    """The arguments of the training that Megatron-LM keeps in a checkpoint, by name: a pickled
    Namespace, read as data. Empty where there are none.
    """
    args = next((value for key, value in mapping_pairs(root) or () if key == "args"), None)
    known = mapping_pairs(args.state if type(args) is Call else args) or ()
    return {key: value for key, value in known if type(key) is str}


def _of_megatron(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """The numbers of heads in the arguments of Megatron-LM, and what they say of the values; None
    for another program's.

    Groups count where there are some. Source: megatron/training/arguments.py.
    """
    if not {_HEADS, "tensor_model_parallel_size"} <= args.keys():
        return None
    is_grouped = args.get("group_query_attention") is True
    told = {name: args[name] for name in _OF_VALUES if args.get(name) is not None}
    groups = args.get("num_query_groups") if is_grouped else None
    return {**told, _HEADS: args[_HEADS], _KV_HEADS: groups}


def home_of(checkpoint: Checkpoint) -> Location | None:
    """The folder in which a checkpoint lies."""
    paths = [checkpoint.path, *(source.path for source in checkpoint.sources[:1])]
    for path in paths:
        with suppress(CheckpointError, OSError):
            place = place_of(path)
            if place.is_folder():
                return place
            if place.is_file():
                return place.absolute.parent
    return None


def json_in(home: Location, name: str) -> dict[str, Any]:
    """A JSON object in a folder; empty where there is none. Raises `CheckpointError` for a file
    that is not one: what it says might decide.
    """
    place = home.child(name)
    if not place.is_file():
        return {}
    return read_object(read_small(place, "index_bytes"), place.path, name, of_python=True)
