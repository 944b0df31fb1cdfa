"""How the files beside a checkpoint say that its weights are quantised: ``config.json``, itself or
in a part of it, ``hf_quant_config.json`` (ModelOpt), ``quantize_config.json`` (GPTQ, before its
settings went into ``config.json``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any

from ckptconv.io.location import Location
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint, printable
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.schemes.base import QUANTIZATION_KEYS, Facts, known_dtype
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.model_config import home_of, json_in


def facts_beside(checkpoint: Checkpoint, scheme: str | None = None) -> Facts:
    """What the configuration beside a checkpoint says of how it is quantised; the first that says
    something, of these that agree.

    Raises `MalformedCheckpoint` where two contradict each other in what is read of them.
    """
    home = home_of(checkpoint)
    if home is None:
        return Facts(metadata=checkpoint.metadata, scheme=scheme)
    model = json_in(home, "config.json")
    said = [*_in_config(model), *_in_other_files(home)]
    for one, other in combinations(said, 2):
        _refuse_contradiction(home, one, other)
    config = said[0].with_method() if said else {}
    return Facts(config, checkpoint.metadata, scheme, _dtype(model))


def method_in(folder: Location) -> str:
    """The ``quant_method`` of a folder's ``config.json``; empty where nothing is quantised."""
    with suppress(CheckpointError, OSError):
        said = next(_in_config(json_in(folder, "config.json")), None)
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


_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "vision_config")


def _in_config(model: Mapping[str, Any]) -> Iterator[_Said]:
    """The quantization that a model's config names, itself or in a part of it; that of MLX has
    another name, and stands there a second time under the usual one, without a method.
    """
    parts = {"": model, **{f"{name}.": model.get(name) for name in _PARTS}}
    for name in QUANTIZATION_KEYS:
        for at, part in parts.items():
            found = part.get(name) if isinstance(part, dict) else None
            if isinstance(part, dict) and isinstance(found, dict) and found:
                is_mlx = isinstance(part.get("quantization"), dict)
                yield _Said(f"{at}{name} of config.json", found, "mlx" if is_mlx else "")


def _in_other_files(home: Location) -> Iterator[_Said]:
    found = json_in(home, "hf_quant_config.json").get("quantization")
    if isinstance(found, dict):
        yield _Said("hf_quant_config.json", found, "modelopt")
    found = json_in(home, "quantize_config.json")
    if found:
        yield _Said("quantize_config.json", found, "gptq")


_READ = ("bits", "group_size", "desc_act", "mode", "version", "weight_block_size", "config_groups")
"""The settings that say how codes are read."""


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
    return {name: _spelt(value) for name, value in found.items()}


def _spelt(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _dtype(model: Mapping[str, Any]) -> DType | None:
    for part in (model, *map(model.get, _PARTS)):
        for name in ("torch_dtype", "dtype"):
            if isinstance(part, dict) and (found := known_dtype(part.get(name))) is not None:
                return found
    return None
