"""What the command line asks of the library, in its types: options, rules, an engine."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import PurePath
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from ckptconv.cli.commands import GIVEN
from ckptconv.cli.options import TO_STDOUT
from ckptconv.convert.words import RULES, OptionWords
from ckptconv.formats.target_format import target_named
from ckptconv.io.location import Location
from ckptconv.support.choices import KEYS
from ckptconv.support.errors import OptionRefused, printable

if TYPE_CHECKING:
    from ckptconv.convert.options import Options
    from ckptconv.keys.key_map import KeyRules
    from ckptconv.tree.checkpoint import Edit


def engine_of_words(given: dict[str, Any], count: int) -> Any:
    """The engine that the command line asks for, for so many pieces of work."""
    from ckptconv.batch.choosing import engine_of

    named = given["engine"]
    if named is None:
        # for one piece of work other processes would only take their time to begin
        named = "serial" if given["jobs"] == 1 or count < 2 else "processes"
    if given["address"] is not None and named != "ray":
        raise OptionRefused("--address needs --engine ray")
    if named == "ray":
        from ckptconv.batch.on_ray import OnRay

        return OnRay(given["jobs"], given["address"])
    return engine_of(named, given["jobs"])


def refuse_missing(given: dict[str, Any]) -> None:
    """Say which of IN and OUT is missing: of one word alone it is OUT, for somebody has a file and
    wants another.
    """
    sources, output = given["sources"], given["output"]
    if sources and output is not None:
        return
    if output is None:
        raise click.UsageError(
            "IN and OUT are missing: name a checkpoint, and the file that it is to become"
        )
    path = output.path if isinstance(output, Location) else output
    command, name, offer = click.get_current_context().info_name, printable(path), ""
    if isinstance(path, PurePath) and path.suffix:  # not an address that names nothing
        example = quote(str(_plausible(path, str(command))))
        offer = f", e.g. ckptconv {command} {quote(name)} {example}"
    raise click.UsageError(f"OUT is missing: name the file that {name} is to become{offer}")


def _plausible(source: PurePath, command: str) -> PurePath:
    """A name for what becomes of `source`: in the other format, or in the same one where the keys
    are all that changes.
    """
    if command == "convert":
        return source.with_suffix(".pt" if source.suffix == ".safetensors" else ".safetensors")
    kind = "ddp" if command == "add-module" else "bare"
    return source.with_name(f"{source.stem}-{kind}{source.suffix}")


_NOT_FOR_STDOUT = (
    ("as_json", "--json"),
    ("max_shard_size", "--max-shard-size"),
    ("with_files", "--with-files"),
    ("manifest", "--manifest"),
)


def is_for_stdout(given: dict[str, Any]) -> bool:
    """Whether the output is to go to standard output; `UsageError` where it cannot."""
    if TO_STDOUT not in click.get_current_context().meta:
        return False
    for option, word in _NOT_FOR_STDOUT:
        if given.get(option):  # apply has no --manifest
            raise click.UsageError(
                f"OUT is -, standard output, which cannot be used with {word}; write ./- for a "
                "file named -"
            )
    if given["to"] is None or target_named(given["to"]).is_folder:
        raise click.UsageError(
            "OUT is -, standard output: add --to torch, --to safetensors or --to npz; write ./- "
            "for a file named -"
        )
    if not given["dry_run"] and sys.stdout.isatty():
        raise click.UsageError(
            "OUT is -, and standard output is a terminal; send it to a file or a program: > FILE"
        )
    return True


def key_rules(given: dict[str, Any]) -> KeyRules:
    """The rules of the command that runs, in their order; `CheckpointError` for what is not a rule
    or not a file of rules.
    """
    return options_of({"reverse": given["reverse"]}, given["keys"]).request(None).keys


def to_look_through(dequantize: bool, *, if_quantized: bool = False) -> tuple[Edit, ...]:
    """The edits of what is only looked at."""
    if not dequantize:
        return ()
    from ckptconv.tree.dequantizing import Dequantize  # seldom needed

    return (Dequantize(if_quantized=if_quantized),)


def comparison(given: dict[str, Any]) -> dict[str, Any]:
    """What `diff_checkpoints` is asked by the command line."""
    from ckptconv.keys.key_map import KEEP
    from ckptconv.tensors.element_pairs import Tolerance

    keys = key_rules(given)
    loose = given["atol"] is not None or given["rtol"] is not None
    if given["equal_nan"] and not loose:
        raise click.UsageError(
            "--equal-nan needs --atol or --rtol; without them, equal bits are equal, NaN included"
        )
    if given["whole"] and keys != KEEP:
        raise click.UsageError(
            "--whole compares everything by its path, so it takes no key rules; leave one of them "
            "out"
        )
    tolerance = None
    try:
        if loose:
            tolerance = Tolerance(given["atol"] or 0.0, given["rtol"] or 0.0, given["equal_nan"])
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    taken = ("only", "only_b", "tag", "tag_b", "whole", "ignore_dtype", "strict_device")
    # of a model and what was made of it, only one may be quantised
    edits = to_look_through(given["dequantize"], if_quantized=True)
    made = {"keys": keys, "tolerance": tolerance, "edits": edits}
    return made | {name: given[name] for name in taken}


def options_of(given: dict[str, Any], keys: Any, *, are_sent: bool = False) -> Options:
    """What the command line asks for; `CheckpointError` for a senseless value.

    `are_sent`: other processes read the files that are named, so these are texts.
    """
    from ckptconv.convert.options import Options
    from ckptconv.devices.mapping import read_tag_pairs
    from ckptconv.keys.key_map import KeyRules

    def named(file: Any) -> Any:
        return str(file) if are_sent and file is not None else file

    apart = {"keys", "map_location", "rules", *RULES}
    words = {
        item.name: named(given[item.name]) if "PathLike" in str(item.type) else given[item.name]
        for item in fields(OptionWords)
        if item.name in given and item.name not in apart
    }
    rules = [
        named(text) if word == "rules" else (word, text)
        for word, text in click.get_current_context().meta.get(GIVEN, [])
    ]
    return Options(
        keys=keys if keys in KEYS else KeyRules(keys),
        rules=tuple(rules),
        map_location=read_tag_pairs(given.get("map_location", ())) or None,
        **words,
    )
