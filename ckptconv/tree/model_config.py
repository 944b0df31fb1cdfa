"""The configuration of a model beside its checkpoint, and what it says of quantised weights: in
``config.json``, itself or in a part of it, in ``hf_quant_config.json`` (ModelOpt), and in
``quantize_config.json`` (GPTQ, before its settings went into ``config.json``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any

from ckptconv.io.location import Location, read_small
from ckptconv.io.places import place_of
from ckptconv.pickles.nodes import Call, Node, entries, mapping_pairs
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint, printable
from ckptconv.support.json_text import read_object
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.schemes.base import QUANTIZATION_KEYS, Facts, known_dtype
from ckptconv.tree.checkpoint import Checkpoint

CONFIGS = _MODEL, _META, _MODELOPT, _GPTQ = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
)
"""All that is read here."""


def config_beside(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The model's ``config.json`` beside a checkpoint, or ``params.json`` of Meta's; of a GGUF file
    and of Megatron-LM what it says itself, by the names of a config. Empty where there is none.
    """
    found = _of_gguf(checkpoint.metadata) or _of_megatron(training_arguments(checkpoint.root))
    if found is not None:
        return found
    home = home_of(checkpoint)
    if home is None:
        return {}
    return json_in(home, _MODEL) or json_in(home, _META)


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
            # int() takes no more than 4300 digits
            told[ours] = int(text) if text.isdecimal() and len(text) < 20 else text
    return told


_ARCHITECTURE = "general.architecture"
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
# What Megatron-LM's arguments say of the values of a model, not of its size
_OF_VALUES = ("swiglu", "apply_layernorm_1p", "rotary_interleaved", "attention_output_gate")


def training_arguments(root: Node) -> Mapping[str, Any]:
    """The arguments of the training that Megatron-LM keeps in a checkpoint, by name: a pickled
    Namespace, read as data. Empty where there are none.
    """
    args = next((value for key, value in mapping_pairs(root) or () if key == "args"), None)
    return entries(args.state if type(args) is Call else args)


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
        # what several checkpoints make together, or was never in a file, lies nowhere
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


# ---------------------------------------------------------------------- how weights are quantised


def facts_beside(checkpoint: Checkpoint, scheme: str | None = None) -> Facts:
    """What the configuration beside a checkpoint says of how it is quantised; the first that says
    something, of these that agree.

    Raises `MalformedCheckpoint` where two contradict each other in what is read of them.
    """
    home = home_of(checkpoint)
    if home is None:
        return Facts(metadata=checkpoint.metadata, scheme=scheme)
    model = json_in(home, _MODEL)
    said = [*_in_config(model), *_in_other_files(home)]
    for one, other in combinations(said, 2):
        _refuse_contradiction(home, one, other)
    config = next((one.with_method() for one in said), {})
    return Facts(config, checkpoint.metadata, scheme, _dtype(model))


def method_in(folder: Location) -> str:
    """The ``quant_method`` of a folder's ``config.json``; empty where nothing is quantised."""
    with suppress(CheckpointError, OSError):
        said = next(_in_config(json_in(folder, _MODEL)), None)
        if said is not None:
            return printable(said.with_method().get("quant_method") or "no method is named", 40)
    return ""


class _Said(NamedTuple):
    """What stands at a place about quantisation; `method` where it names none itself."""

    place: str
    config: Mapping[str, Any]
    method: str = ""

    def with_method(self) -> Mapping[str, Any]:
        return {"quant_method": self.method, **self.config} if self.method else self.config


# multimodal models have the config of each of their models in a part
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "vision_config")


def _in_config(model: Mapping[str, Any]) -> Iterator[_Said]:
    """The quantization that a model's config names, itself or in a part of it; that of MLX has
    another name, and stands there a second time under the usual one, without a method.
    """
    parts = {"": model, **{f"{name}.": model.get(name) for name in _PARTS}}
    told = {at: part for at, part in parts.items() if isinstance(part, Mapping)}
    for name in QUANTIZATION_KEYS:
        for at, part in told.items():
            found = part.get(name)
            if isinstance(found, dict) and found:
                is_mlx = isinstance(part.get("quantization"), dict)
                yield _Said(f"{at}{name} of config.json", found, "mlx" if is_mlx else "")


def _in_other_files(home: Location) -> Iterator[_Said]:
    found = json_in(home, _MODELOPT).get("quantization")
    if isinstance(found, dict):
        yield _Said(_MODELOPT, found, "modelopt")
    found = json_in(home, _GPTQ)
    if found:
        yield _Said(_GPTQ, found, "gptq")


# The settings that say how codes are read
_READ = ("bits", "group_size", "desc_act", "mode", "version", "weight_block_size", "config_groups")


def _refuse_contradiction(home: Location, one: _Said, other: _Said) -> None:
    theirs = _settings(other)
    for name, mine in _settings(one).items():
        yours = theirs.get(name)
        if mine is not None and yours is not None and yours != mine:
            raise MalformedCheckpoint(
                f"{one.place} says {name} {mine!r:.60}, and {other.place} says {yours!r:.60}",
                path=home.path,
                hint="correct what is wrong, or take it away",
            )


def _settings(said: _Said) -> dict[str, Any]:
    """What is read of a configuration, as far as it says it; GPTQ without a version is the first.
    ``quantize_config.json`` names no method, and stands beside other methods too.
    """
    config = said.with_method()
    found = {name: config[name] for name in _READ if config.get(name) is not None}
    method = config.get("quant_method")
    if method == "gptq" and "bits" in found:
        version = config.get("checkpoint_format") or config.get("format") or "gptq"
        found["checkpoint_format"] = version
    if said.method != "gptq" or "quant_method" in said.config:
        found["quant_method"] = method
    # programs write GPTQ and gptq
    words = {name: value.lower() for name, value in found.items() if isinstance(value, str)}
    return found | words


def _dtype(model: Mapping[str, Any]) -> DType | None:
    for part in (model, *map(model.get, _PARTS)):
        for name in ("torch_dtype", "dtype"):
            if isinstance(part, dict) and (found := known_dtype(part.get(name))) is not None:
                return found
    return None
