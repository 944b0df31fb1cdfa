"""Writes the layouts of transformers as data: `ckptconv/keys/transformers_mapping.json`.

    python tools/transformers_mapping.py ckptconv/keys/transformers_mapping.json

Run it in an environment with torch and the release of transformers that is wanted; it needs no
network and no weights. What it writes, one entry to a line:

- `version`: that of transformers.
- `entries`: the rules of a model type, or of a class, in their order. A rule has the patterns
  `from` and `to`; `back` has both the other way round, where these are not just exchanged; `ops`
  are the operations on the tensors, `kind` a rule that is not just a rename.
- `aliases`: what has the rules of another entry.
- `classes`: for a class of models that holds others, its `base_model_prefix` and each of these:
  the path of the module, its class, where its config stands in that of the whole (with dots), and
  its model type in the default config. Rules of a module apply below it only.
- `kept`: for a class, the names of version 5 (``{}`` is a number) that its own rules would change
  again into names that it does not have. transformers leaves these alone, for it has the model.
- `bases`: the class that ``AutoModel`` makes of a model type, where that class has an entry.
- `types`: all other model types, which have no rules of their own.

The patterns are those that transformers compiles: what it edits when it turns a rule around (no
``^``, no look-around, groups) is done by its own code, here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

_LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layer",
    "n_layers",
    "depth",
)
_LAYERS = (4, 2, None)  # DeepSeek-V3 begins with 3 that have no experts
_SECONDS = 60  # for one model on the meta device; a few build thousands of modules


def rule_data(transform: Any) -> dict[str, Any]:
    """One rule of transformers, as data."""
    transform = deepcopy(transform)  # aliases share it, and to turn it around changes its patterns
    told: dict[str, Any] = {}
    kind = type(transform).__name__
    if kind not in ("WeightRenaming", "WeightConverter"):
        told["kind"] = kind
    if kind == "PrefixChange":
        told["adds"] = transform.prefix_to_add is not None
    if hasattr(transform, "offset"):
        told["offset"] = transform.offset
    told["from"], told["to"] = list(transform.source_patterns), list(transform.target_patterns)
    back = transform.reverse_transform()
    turned = [list(back.source_patterns), list(back.target_patterns)]
    if turned != [told["to"], told["from"]]:
        told["back"] = turned
    if hasattr(transform, "operations"):
        told["ops"] = [operation_data(item) for item in transform.operations]
    return told


def operation_data(operation: Any) -> list[Any]:
    """The name of an operation and its arguments, but for those that are not set."""
    given = vars(operation).items()
    told = {name: value for name, value in given if value is not None and value is not False}
    return [type(operation).__name__, told]


def entries() -> tuple[dict[str, list[Any]], dict[str, str]]:
    """The rules of all entries that are not those of another one, and the others."""
    from transformers import conversion_mapping

    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    rules = {name: [rule_data(item) for item in given] for name, given in mapping.items()}
    named = conversion_mapping._MODEL_TO_CONVERSION_PATTERN
    # an entry of its own comes before an alias
    aliases = {name: base for name, base in named.items() if rules[name] == rules[base]}
    return {name: given for name, given in rules.items() if name not in aliases}, aliases


# ------------------------------------------------------------------------------------------ classes


def model_classes() -> Iterator[tuple[str, str]]:
    """The model types, each with the names of the classes that transformers lists for it."""
    from transformers.models.auto import configuration_auto, modeling_auto

    listed: dict[str, dict[str, None]] = {}
    for name in sorted(vars(modeling_auto)):
        if name.endswith("_MAPPING_NAMES") and name.startswith("MODEL"):
            for model_type, given in getattr(modeling_auto, name).items():
                names = given if isinstance(given, (tuple, list)) else (given,)
                listed.setdefault(model_type, {}).update(dict.fromkeys(names))
    done = set()
    for model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        for name in listed.get(model_type, ()):
            if name not in done:
                done.add(name)
                yield model_type, name


def built(model_type: str, name: str) -> Any:
    """A model of the class, on the meta device, by the default config with few layers; with all of
    them where its config does not let there be few.
    """
    import torch
    import transformers

    made = getattr(transformers, name)
    for layers in _LAYERS:
        config = transformers.CONFIG_MAPPING[model_type]()
        if layers is not None:
            shrink(config, layers)
        signal.alarm(_SECONDS)
        try:
            with torch.device("meta"):
                return made(config)
        except Exception as error:
            failed = error
        finally:
            signal.alarm(0)
    raise failed


def shrink(config: Any, layers: int) -> None:
    for name, value in list(vars(config).items()):
        if name in _LAYER_COUNTS and isinstance(value, int) and value > layers:
            setattr(config, name, layers)
        elif name.endswith("config") and hasattr(value, "model_type"):
            shrink(value, layers)


def config_paths(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, config
    for name, value in vars(config).items():
        if hasattr(value, "model_type"):
            yield from config_paths(value, f"{path}.{name}".lstrip("."))


def class_data(model: Any) -> list[Any]:
    """The prefix of a model's base, and the models in it, itself the first of them."""
    from transformers.modeling_utils import PreTrainedModel

    paths = list(config_paths(model.config))
    parts = []
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            config = module.config
            at = [path for path, item in paths if item is config]
            # some classes copy the config of what they hold
            at += [path for path, item in paths if item.model_type == config.model_type]
            parts.append([name, type(module).__name__, (at or [None])[0], config.model_type])
    return [model.base_model_prefix, parts]


def kept_names(model: Any) -> list[str]:
    """The names of a model that loading would change into names that it does not have."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renames = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
    own, kept = set(model.state_dict()), {}
    for key in sorted(own):
        name, _ = rename_source_key(key, renames, converters)
        if name != key:
            if name in own:
                print(f"shifts: {type(model).__name__}: {key} -> {name}", file=sys.stderr)
            else:
                kept[re.sub(r"(?<![^.])\d+(?![^.])", "{}", key)] = None
    return list(kept)


def is_simple(told: list[Any], rules: dict[str, Any], aliases: dict[str, str]) -> bool:
    """Whether the rules of a class are those of its model type, and always are."""
    named = {**rules, **aliases}
    (_, own, _, _), *inner = told[1]
    return own not in named and not any(path != "" or name in named for _, name, path, _ in inner)


def bases(rules: dict[str, Any], aliases: dict[str, str]) -> dict[str, str]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    named = {**rules, **aliases}
    return {
        model_type: name
        for model_type, name in MODEL_MAPPING_NAMES.items()
        if isinstance(name, str) and name in named
    }


def model_types() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def written(told: dict[str, Any]) -> str:
    """JSON with one entry to a line, so that two releases can be compared line by line."""

    def short(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    lines = []
    for name, value in told.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"{short(key)}:{short(item)}" for key, item in value.items())
            lines.append(f"{short(name)}:{{\n{inner}\n}}")
        else:
            lines.append(f"{short(name)}:{short(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took more than {_SECONDS} s")


def main(path: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _too_long)
    rules, aliases = entries()
    found: dict[str, Any] = {}
    kept: dict[str, list[str]] = {}
    for model_type, name in model_classes():
        try:
            model = built(model_type, name)
        except Exception as error:  # a library that is not here, a config that has no defaults
            print(f"left out: {name}: {type(error).__name__}: {error}"[:150], file=sys.stderr)
            continue
        found[name] = class_data(model)
        if names := kept_names(model):
            kept[name] = names
    types = {
        told[1][0][3]
        for name, told in found.items()
        if name in kept or not is_simple(told, rules, aliases)
    }
    # of a type all classes, or none: then the type alone decides
    classes = {name: told for name, told in found.items() if told[1][0][3] in types}
    source = "huggingface/transformers (Apache-2.0), by tools/transformers_mapping.py"
    told = {"source": source, "version": transformers.__version__, "entries": rules}
    told |= {"aliases": aliases, "classes": classes, "kept": kept}
    told["bases"] = bases(rules, aliases)
    told["types"] = [name for name in model_types() if name not in rules and name not in aliases]
    with open(path, "w", encoding="utf-8") as file:
        file.write(written(told))


if __name__ == "__main__":
    main(sys.argv[1])
