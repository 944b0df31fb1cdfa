"""The options of a conversion: their words, their defaults and how the command line shows them.

A new option is one field here, what it means in `Options`, and its use: `convert_checkpoint`, the
commands and the lines of manifests have it then.
"""

# ruff: noqa: RUF009 (`_word` makes a field)

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckptconv.formats.target_format import Target
from ckptconv.support.choices import UNKNOWN, Words

if TYPE_CHECKING:
    from ckptconv.keys.key_map import KeyRules
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


def _word(default: Any, told: str, metavar: str | None = None, choices: Sequence[str] = ()) -> Any:
    """A field with its default, and what ``--help`` tells of it."""
    return field(default=default, metadata={"help": told, "metavar": metavar, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OptionWords:
    """The options of a conversion as they are written; `Options` says what they mean."""

    to: Target | None = _word(
        None,
        "Output format, if OUT's name does not say (OUT may be - for standard output); dcp: a "
        "folder that FSDP training resumes from; npz: a numpy archive.",
        choices=get_args(Target),
    )
    keys: Literal["strip", "keep"] | KeyRules = _word(
        "strip",
        "Strip the prefixes of DDP, torch.compile, FSDP and activation checkpointing first, or "
        "keep them.",
        choices=("strip", "keep"),
    )
    rules: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | tuple[str, str]] = _word(
        (),
        "Apply the rules in a .json, .toml or .yaml file, or a mapping from --save-mapping.",
        "FILE",
    )
    reverse: bool = _word(False, "Undo the mapping that --rules names.")
    preset: Words = _word(
        (),
        f"Remove what a framework added to the keys: {', '.join(PRESETS)}.",
        "NAME",
        choices=PRESETS,
    )
    strip_prefix: Words = _word((), "Remove this from every key that starts with it.", "PREFIX")
    rename: Words = _word((), "Rename a key, or a prefix of keys.", "OLD=NEW")
    regex: Words = _word(
        (),
        "Replace what this Python regex matches in the keys (\\1 is its first group).",
        "PATTERN=>REPLACEMENT",
    )
    add_prefix: Words = _word((), "Add this to the start of every key.", "PREFIX")
    include: Words = _word((), "Keep only keys that match at this point of the rules.", "GLOB")
    exclude: Words = _word((), "Leave out keys that match at this point of the rules.", "GLOB")
    like: str | os.PathLike[str] | None = _word(
        None,
        "Fit the keys to those of another checkpoint, an index, or a text file with one key per "
        "line.",
        "OTHER",
    )
    model: str | None = _word(
        None,
        "Fit the keys to the model that this callable builds. Imports code.",
        "PACKAGE.MODULE:CALLABLE",
    )
    drop_unexpected: bool = _word(
        False, "With --like or --model: leave out the keys that the target does not have."
    )
    device: str | None = _word(
        None, "The device tag to write: cpu (default), cuda:1, mps, ..., keep, auto.", "TAG"
    )
    map_location: Mapping[str, str] | None = _word(
        None, "Change one device tag, such as cuda:3=cuda:0.", "OLD=NEW"
    )
    dtype: str | None = _word(
        None,
        "Cast floating tensors: f32, f16, bf16, f64, f8_e4m3, f8_e5m2, or torch's names (float16, "
        "half).",
        "DTYPE",
    )
    keep_dtype: Words = _word(
        (),
        "With --dtype: leave the tensors whose keys match as they are, such as '*norm*'. "
        "Repeatable.",
        "GLOB",
    )
    cast: Words = _word(
        (),
        "Cast the tensors whose keys match, such as 'lm_head.*=f32'. Repeatable.",
        "GLOB=DTYPE",
    )
    drop: Words = _word(
        (), "Leave out a part of the checkpoint: optimizer, 'callbacks.*'. Repeatable.", "PATH"
    )
    metadata: Words | Mapping[str, str] = _word(
        (), "Add a metadata entry to a safetensors output. Repeatable.", "NAME=VALUE"
    )
    metadata_from: str | os.PathLike[str] | None = _word(
        None, "Add the metadata entries that a JSON file holds.", "FILE"
    )
    max_shard_size: int | str | None = _word(
        None,
        "Split the state dict into shards of at most this size, such as 5GB, with an index.",
        "SIZE",
    )
    with_files: bool = _word(
        False,
        "Make OUT a folder, and copy the config, the tokenizer and the like that lie beside IN "
        "into it. Never code.",
    )
    only: str | None = _word(
        None,
        "Convert one part: state_dict, ema, or . for the tensors at the root.",
        "PATH",
    )
    tied: Tied = _word(
        "alias",
        "If a tensor has several names, write it to safetensors once, under the first (or the one "
        "that PATTERN matches), or once for each.",
        "alias|duplicate|PATTERN",
    )
    unknown: Unknown = _word(
        "refuse",
        "What to do with objects that weights_only=True refuses and that have no plain form, and "
        "with tensors outside the state dict of a whole module.",
        choices=UNKNOWN,
    )
    save_mapping: str | os.PathLike[str] | None = _word(
        None, "Save which key became which, so that --rules FILE --reverse can undo it.", "FILE"
    )
