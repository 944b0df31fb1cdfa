"""The options of a conversion: their words, their defaults and how the command line shows them.

A new option is one field here, what it means in `Options`, and its use: `convert_checkpoint`, the
commands and the lines of manifests have it then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

from ckptconv.formats.target_format import Target
from ckptconv.support.choices import (
    OPTIMIZER_FORMS,
    UNKNOWN,
    DeviceName,
    DTypeName,
    OptimizerForm,
    Pairs,
    Words,
)
from ckptconv.support.records import dataclass

if TYPE_CHECKING:
    from ckptconv.keys.key_map import Keys
    from ckptconv.tree.settling import Unknown

Tied = str
"""``alias``, ``duplicate``, or a pattern of the name of a tied tensor that stays."""

PRESETS = (
    "ddp",
    "compile",
    "fsdp",
    "checkpoint-wrapper",
    "lightning",
    "peft",
    "swa",
    "timm-ema",
    "mmengine",
    "ema-pytorch",
)
"""The names of `presets.PRESETS`, here so that a usage error or --help need not import them."""


Section = Literal["Keys", "Values", "Parts", "Output", "Safety", "Many", "General"]
"""The sections of ``--help``, in their order."""

RULES = ("preset", "strip_prefix", "rename", "regex", "add_prefix", "include", "exclude")
"""The options that are key rules, in the order in which they apply."""


_Rule: TypeAlias = "str | os.PathLike[str] | tuple[str, str] | Mapping[str, Any]"
"""A file of rules, a rule as (option, value), or a tensor rule as it is written in a file."""


class TensorWords(TypedDict, total=False):
    """Those of `OptionWords` that say which tensors are wanted, their names and their type."""

    rules: str | os.PathLike[str] | Sequence[_Rule]
    reverse: bool
    preset: Words
    strip_prefix: Words
    rename: Pairs
    regex: Pairs
    add_prefix: Words
    include: Words
    exclude: Words
    dtype: DTypeName | None
    keep_dtype: Words
    cast: Words | Mapping[str, DTypeName]
    dequantize: bool
    scheme: str | None
    drop: Words


def _word(
    section: Section, default: Any, told: str, metavar: str = "", choices: Sequence[str] = ()
) -> Any:
    """A field with its default, and what ``--help`` tells of it, in its section."""
    told_of = {"section": section, "help": told, "metavar": metavar, "choices": choices}
    return field(default=default, metadata=told_of)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OptionWords:
    """The options of a conversion as they are written; `Options` says what they mean."""

    to: Target | None = _word(
        "Output",
        None,
        "Output format, if OUT's name does not say (- is standard output). Training resumes from "
        "dcp (FSDP) and universal (DeepSpeed).",
        choices=get_args(Target),
    )
    keys: Keys = _word(
        "Keys",
        "strip",
        "Strip the prefixes of DDP, torch.compile, FSDP and activation checkpointing first, or "
        "keep them.",
        choices=("strip", "keep"),
    )
    rules: str | os.PathLike[str] | Sequence[_Rule] = _word(
        "Keys",
        (),
        "Apply the rules in a .json, .toml or .yaml file, or a mapping from --save-mapping.",
        "FILE",
    )
    reverse: bool = _word("Keys", False, "Undo the mapping that --rules names.")
    preset: Words = _word(
        "Keys",
        (),
        f"Remove what a framework added to the keys: {', '.join(PRESETS)}; or give the tensors "
        "another program's layout: transformers-v5, transformers-original, and those of ckptconv "
        "help layouts; lora-peft, lora-kohya, lora-diffusers or lora-comfyui name an adapter anew.",
        "NAME",
    )
    strip_prefix: Words = _word(
        "Keys", (), "Remove this from every key that starts with it.", "PREFIX"
    )
    rename: Pairs = _word("Keys", (), "Rename a key, or a prefix of keys.", "OLD=NEW")
    regex: Pairs = _word(
        "Keys",
        (),
        "Replace what this Python regex matches in the keys (\\1 is its first group).",
        "PATTERN=>REPLACEMENT",
    )
    add_prefix: Words = _word("Keys", (), "Add this to the start of every key.", "PREFIX")
    include: Words = _word(
        "Keys", (), "Keep only keys that match at this point of the rules.", "GLOB"
    )
    exclude: Words = _word(
        "Keys", (), "Leave out keys that match at this point of the rules.", "GLOB"
    )
    like: str | os.PathLike[str] | None = _word(
        "Keys",
        None,
        "Fit the keys to those of another checkpoint, an index, or a text file with one key per "
        "line.",
        "OTHER",
    )
    model: str | None = _word(
        "Keys",
        None,
        "Fit the keys to the model that this callable builds. Imports code.",
        "PACKAGE.MODULE:CALLABLE",
    )
    drop_unexpected: bool = _word(
        "Keys", False, "With --like or --model: leave out the keys that the target does not have."
    )
    device: DeviceName | None = _word(
        "Values",
        None,
        "The device tag to write: cpu (default), cuda:1, mps, ..., keep, auto.",
        "DEVICE",
    )
    map_location: Mapping[str, DeviceName] | None = _word(
        "Values", None, "Change one device tag, such as cuda:3=cuda:0. Repeatable.", "OLD=NEW"
    )
    dtype: DTypeName | None = _word(
        "Values",
        None,
        "Cast floating tensors: f32, f16, bf16, f64, f8_e4m3, f8_e5m2, or torch's names (float16, "
        "half).",
        "DTYPE",
    )
    keep_dtype: Words = _word(
        "Values",
        (),
        "With --dtype: leave the tensors whose keys match as they are, such as '*norm*'. "
        "Repeatable.",
        "GLOB",
    )
    cast: Words | Mapping[str, DTypeName] = _word(
        "Values",
        (),
        "Cast the tensors whose keys match, such as 'lm_head.*=f32'. Repeatable.",
        "GLOB=DTYPE",
    )
    dequantize: bool = _word(
        "Values",
        False,
        "Make values of quantised weights (fp8, int8, GPTQ, AWQ, bitsandbytes, MXFP4, NVFP4, ...); "
        "--dtype is their type.",
    )
    scheme: str | None = _word(
        "Values",
        None,
        "With --dequantize: how the weights are quantised, where nothing in IN says it.",
        "SCHEME",
    )
    drop: Words = _word(
        "Parts",
        (),
        "Leave out a part of the checkpoint: optimizer, 'callbacks.*'. Repeatable.",
        "PATH",
    )
    optimizer: OptimizerForm | None = _word(
        "Parts",
        None,
        "The form of optimizer states: by the names of parameters, as FSDP2; by numbers, as "
        "torch.optim; flat, as for dcp.load; that of torchtitan or of megatron.",
        choices=OPTIMIZER_FORMS,
    )
    order_from: str | os.PathLike[str] | None = _word(
        "Parts",
        None,
        "With --optimizer: a torch file whose keys, or a text whose lines, have the order of "
        "model.parameters(). --model tells it too.",
        "OTHER",
    )
    metadata: Words | Mapping[str, str] = _word(
        "Output",
        (),
        "Add a metadata entry to a safetensors output. Repeatable.",
        "NAME=VALUE",
    )
    metadata_from: str | os.PathLike[str] | None = _word(
        "Output", None, "Add the metadata entries that a JSON file holds.", "FILE"
    )
    max_shard_size: int | str | None = _word(
        "Output",
        None,
        "Split the state dict into shards of at most this size, such as 5GB, with an index.",
        "SIZE",
    )
    with_files: bool = _word(
        "Output",
        False,
        "Make OUT a folder, and copy the config, the tokenizer and the like that lie beside IN "
        "into it. Never code.",
    )
    with_training: bool = _word(
        "Parts",
        False,
        "Take the optimizer, the scheduler and the like too, which training saved in files of "
        "their own beside the weights.",
    )
    only: str | None = _word(
        "Parts",
        None,
        "Convert one part: state_dict, ema, or . for the tensors at the root.",
        "PATH",
    )
    tied: Tied = _word(
        "Output",
        "alias",
        "If a tensor has several names, write it to safetensors once, under the first (or the one "
        "that PATTERN matches), or once for each.",
        "alias|duplicate|PATTERN",
    )
    unknown: Unknown = _word(
        "Safety",
        "refuse",
        "What to do with objects that weights_only=True refuses and that have no plain form, and "
        "with tensors outside the state dict of a whole module.",
        choices=UNKNOWN,
    )
    save_mapping: str | os.PathLike[str] | None = _word(
        "Keys",
        None,
        "Save which key became which, so that --rules FILE --reverse can undo it.",
        "FILE",
    )
    manifest: str | os.PathLike[str] | None = _word(
        "Output",
        None,
        "Also write the SHA-256 of each file and each tensor of OUT, for ckptconv verify.",
        "FILE",
    )


FILES_WRITTEN = ("save_mapping", "manifest")
"""The options that name files which tell of one output."""

FILES_READ = tuple(
    item.name
    for item in fields(OptionWords)
    if "PathLike" in str(item.type) and item.name not in FILES_WRITTEN
)
"""The options that may name files which a conversion reads: what is in them is part of what it is
asked to do, so a batch does a job again when one of them has changed.
"""
