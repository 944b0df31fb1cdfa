"""The options that several commands have, and what they ask of the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from ckptconv.cli.completion import (
    offer_devices,
    offer_dtypes,
    offer_map_locations,
    offer_parts,
    offer_steps,
)
from ckptconv.formats.target_format import Target
from ckptconv.io.location import Location
from ckptconv.support import platforms
from ckptconv.support.addresses import address_in
from ckptconv.support.errors import CheckpointError, printable

if TYPE_CHECKING:
    from ckptconv.convert.options import Request
    from ckptconv.keys.key_map import KeyRules
    from ckptconv.tree.fitted_keys import KeyTarget

F = TypeVar("F", bound=Callable[..., Any])


class _FileName(click.Path):
    """A path that is not empty: an unset variable of a shell is not the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty, so it does not name a file", param, ctx)
        if address_in(value) is not None:
            from ckptconv.io.places import place_of

            platforms.share_memory_between_threads()
            # one place for all that the command asks of it; an error comes when it is used
            with suppress(CheckpointError):
                return place_of(value)
            return value
        return super().convert(value, param, ctx)


class _SourceName(_FileName):
    """A path to read, or ``-`` for standard input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-" and ctx is not None and not ctx.resilient_parsing:
            return _standard_input()
        return super().convert(value, param, ctx)


def _standard_input() -> Location:
    from ckptconv.cli.terminal import is_silent
    from ckptconv.io.standard_input import StandardInput

    def tell(folder: str) -> None:
        if not is_silent(sys.argv[1:]):
            what = f"standard input is a pipe: it is copied to {printable(folder)} first"
            click.echo(f"{what} (TMPDIR chooses another folder)", err=True)

    return StandardInput(tell)


class _OutputName(_FileName):
    """A path to write to, or ``-`` for standard output; a file of that name is ``./-``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-" and ctx is not None:
            ctx.meta[TO_STDOUT] = True
        return super().convert(value, param, ctx)


class _NewFileName(_FileName):
    """A path to write to, which is never standard output."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail("it does not name a file; write ./- for a file of that name", param, ctx)
        return super().convert(value, param, ctx)


TO_STDOUT = "ckptconv.stdout"
FILE = _SourceName(path_type=Path)
OUTPUT = _OutputName(path_type=Path)
NEW_FILE = _NewFileName(path_type=Path)
RULE_WORDS = ("strip-prefix", "add-prefix", "rename", "regex", "include", "exclude", "preset")
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
"""The names of `key_map.RULE_WORDS` and `presets.PRESETS`, here so that a usage error or --help
need not import them.
"""


class FileCommand(click.Command):
    """A command whose files are known while a shell completes the value of an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing and args and args[-1].startswith("-"):
            # it lacks its value, which would be an error that keeps the files from being seen
            args = args[:-1]
        return super().parse_args(ctx, args)


class RuleCommand(FileCommand):
    """A command that knows the order in which its key rules were given, of whichever options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        values = {
            name: iter(texts)
            for name, texts in given.items()
            if _word(name) in (*RULE_WORDS, "rules")
        }
        ctx.meta["ckptconv.rules"] = [
            (_word(param.name or ""), next(values[param.name or ""]))
            for param in order
            if param.name in values
        ]
        return super().parse_args(ctx, args)


def _word(name: str) -> str:
    """An option as it is written, by the name of its parameter."""
    return name.replace("_", "-")


def choice_options(command: F) -> F:
    """The options that choose among keys, which every command that writes has."""
    return _with_options(command, [
        click.option("--include", metavar="GLOB", multiple=True,
                     help="Keep only keys that match at this point of the rules."),
        click.option("--exclude", metavar="GLOB", multiple=True,
                     help="Leave out keys that match at this point of the rules."),
    ])  # fmt: skip


def key_options(default: str) -> Callable[[F], F]:
    """The options of key rules, which apply in the order in which they are given (the command must
    be a `RuleCommand`).
    """
    return lambda command: _with_options(command, [
        click.option("--keys", type=click.Choice(["strip", "keep"]), default=default,
            show_default=True,
                     help="Strip the prefixes of DDP, torch.compile, FSDP and activation "
                          "checkpointing first, or keep them."),
        click.option("--strip-prefix", metavar="PREFIX", multiple=True, help="Remove this from "
                                                                             "every key that "
                                                                             "starts with it."),
        click.option("--add-prefix", metavar="PREFIX", multiple=True, help="Add this to the start "
                                                                           "of every key."),
        click.option("--rename", metavar="OLD=NEW", multiple=True, help="Rename a key, or a "
                                                                        "prefix of keys."),
        click.option("--regex", metavar="PATTERN=>REPLACEMENT", multiple=True,
                     help="Replace what this Python regex matches in the keys (\\1 is its first "
                          "group)."),
        click.option("--preset", metavar="NAME", type=click.Choice(PRESETS), multiple=True,
                     help=f"Remove what a framework added to the keys: {', '.join(PRESETS)}."),
        click.option("--rules", metavar="FILE", multiple=True, type=FILE,
                     help="Apply the rules in a .json, .toml or .yaml file, or a mapping from "
                          "--save-mapping."),
        click.option("--reverse", is_flag=True, help="Undo the mapping that --rules names."),
    ])  # fmt: skip


def _with_options(command: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        command = option(command)
    return command


TAG = click.option(
    "--tag",
    metavar="TAG",
    shell_complete=offer_steps,
    help="The step or variant to read, if IN is a folder of several: step-500, 500, fp16.",
)


def _limits_set(ctx: click.Context, _: click.Parameter, given: Sequence[str]) -> None:
    """Set the limits that the command runs under."""
    if given:
        from ckptconv.support.limits import limits

        try:
            ctx.with_resource(limits(**dict(map(_limit, given))))
        except (CheckpointError, TypeError, ValueError) as error:
            raise click.UsageError(str(error)) from None


def _limit(text: str) -> tuple[str, float]:
    """The name and the value of a limit: a count, a size such as 4GiB, or seconds."""
    from ckptconv.formats.hf_names import parse_size
    from ckptconv.support.limits import DEFAULTS

    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--limit is NAME=VALUE, not {text}")
    try:
        if type(getattr(DEFAULTS, name, 0)) is float:
            return name, float(value)
        return name, int(value) if value.isascii() and value.isdigit() else parse_size(value)
    except (CheckpointError, ValueError):
        raise ValueError(
            f"--limit {text}: its value is not a number or a size such as 4GiB"
        ) from None


def _hosts_allowed(ctx: click.Context, _: click.Parameter, given: Sequence[str]) -> None:
    """Allow the hosts while the command runs."""
    if given:
        from ckptconv.io.remote.hosts import allowing_hosts

        ctx.with_resource(allowing_hosts(",".join(given)))


_LIMIT = click.option(
    "--limit",
    metavar="NAME=VALUE",
    multiple=True,
    expose_value=False,
    is_eager=True,
    callback=_limits_set,
    help="Raise a limit that an error named, such as pickle_bytes=4GiB.",
)
_ALLOW_HOSTS = click.option(
    "--allow-hosts",
    metavar="HOST,...",
    multiple=True,
    expose_value=False,
    is_eager=True,
    callback=_hosts_allowed,
    help="Hosts of this network that a web server may redirect to, such as store.lan:9000.",
)


def LIMIT(command: F) -> F:
    """What every command that reads may be allowed."""
    return _LIMIT(_ALLOW_HOSTS(command))


def output_options(command: F) -> F:
    """The arguments and options that every command has that writes one checkpoint."""
    return _with_options(command, [
        # `refuse_missing` says what is missing
        click.argument("sources", metavar="IN...", type=FILE, nargs=-1),
        click.argument("output", metavar="OUT", type=OUTPUT, required=False),
        *_conversion_options(),
        click.option("--save-mapping", metavar="FILE", type=NEW_FILE,
                     help="Save which key became which, so that --rules FILE --reverse can undo "
                          "it."),
        *_run_options(),
    ])  # fmt: skip


def conversion_options(command: F) -> F:
    """The options of what becomes of each checkpoint of many."""
    return _with_options(command, _conversion_options())


def run_options(command: F) -> F:
    """The options of how outputs are made, and what is printed of them."""
    return _with_options(command, _run_options())


def fitting_options(command: F) -> F:
    """The options of what the keys are fitted to."""
    return _with_options(command, [
        click.option("--like", metavar="OTHER", type=FILE,
                     help="Fit the keys to those of another checkpoint, an index, or a text file "
                          "with one key per line."),
        click.option("--model", metavar="PACKAGE.MODULE:CALLABLE",
                     help="Fit the keys to the model that this callable builds. Imports code."),
        click.option("--drop-unexpected", is_flag=True,
                     help="With --like or --model: leave out the keys that the target does not "
                          "have."),
    ])  # fmt: skip


def engine_options(command: F) -> F:
    """The options of who does the work."""
    return _with_options(command, [
        click.option("--jobs", metavar="N", type=click.IntRange(min=1),
                     help="Workers at a time (default: one for each core)."),
        click.option("--engine", type=click.Choice(["serial", "processes", "ray"]),
                     help="Who works (default: processes, or serial with --jobs 1)."),
        click.option("--address", metavar="ADDRESS",
                     help="With --engine ray: the cluster; auto finds it."),
    ])  # fmt: skip


def engine_of_words(given: dict[str, Any], count: int) -> Any:
    """The engine that the command line asks for, for so many pieces of work."""
    from ckptconv.batch.choosing import engine_of
    from ckptconv.support.errors import OptionRefused

    named = given["engine"]
    if named is None:
        named = "serial" if given["jobs"] == 1 or count < 2 else "processes"
    if given["address"] is not None and named != "ray":
        raise OptionRefused("--address needs --engine ray")
    if named == "ray":
        from ckptconv.batch.on_ray import OnRay

        return OnRay(given["jobs"], given["address"])
    return engine_of(named, given["jobs"])


def _conversion_options() -> list[Callable[[F], F]]:
    """What becomes of a checkpoint."""
    return [
        click.option("--device", metavar="TAG", shell_complete=offer_devices,
                     help="The device tag to write: cpu (default), cuda:1, mps, ..., keep, auto."),
        click.option("--map-location", metavar="OLD=NEW", multiple=True,
            shell_complete=offer_map_locations,
                     help="Change one device tag, such as cuda:3=cuda:0."),
        click.option("--to", type=click.Choice(get_args(Target)),
                     help="Output format, if OUT's name does not say (OUT may be - for standard "
                          "output); dcp: a folder that FSDP training resumes from; npz: an "
                          "archive of numpy."),
        click.option("--dtype", metavar="DTYPE", shell_complete=offer_dtypes,
                     help="Cast floating tensors: f32, f16, bf16, f64, f8_e4m3, f8_e5m2, or "
                          "torch's names (float16, half)."),
        click.option("--keep-dtype", metavar="GLOB", multiple=True,
                     help="With --dtype: leave the tensors whose keys match as they are, such as "
                          "'*norm*'. Repeatable."),
        click.option("--cast", metavar="GLOB=DTYPE", multiple=True,
                     help="Cast the tensors whose keys match, such as 'lm_head.*=f32'. "
                          "Repeatable."),
        click.option("--drop", metavar="PATH", multiple=True, shell_complete=offer_parts,
                     help="Leave out a part of the checkpoint: optimizer, 'callbacks.*'. "
                          "Repeatable."),
        click.option("--metadata", metavar="NAME=VALUE", multiple=True,
                     help="Put a string beside the tensors of a safetensors output. Repeatable."),
        click.option("--metadata-from", metavar="FILE", type=FILE,
                     help="Put the strings of a JSON object beside them."),
        click.option("--max-shard-size", metavar="SIZE",
                     help="Split the state dict into shards of at most this size, such as 5GB, "
                          "with an index."),
        click.option("--with-files", is_flag=True,
                     help="Make OUT a folder, and copy the config, the tokenizer and the like that "
                          "lie beside IN into it. Never code."),
        click.option("--only", metavar="PATH", shell_complete=offer_parts,
                     help="Convert one part: state_dict, ema, or . for the tensors at the root."),
        TAG,
        LIMIT,
        choice_options,
        click.option("--tied", type=click.Choice(["alias", "duplicate"]), default="alias",
            show_default=True,
                     help="If a tensor has several names, write it to safetensors once, or once "
                          "for each."),
        click.option("--unknown", type=click.Choice(["refuse", "drop", "keep"]), default="refuse",
            show_default=True,
                     help="What to do with objects that weights_only=True refuses and that have "
                          "no plain form, "
                          "and with tensors outside the state dict of a whole module."),
    ]  # fmt: skip


def _run_options() -> list[Callable[[F], F]]:
    """How the output is made, and what is printed of it."""
    return [
        click.option("-f", "--force", is_flag=True,
            help="Replace OUT if it exists. OUT may be IN."),
        click.option("-n", "--dry-run", is_flag=True, help="Write nothing; say what would be "
                                                           "written."),
        click.option("--verify", is_flag=True,
                     help="Read the output back and compare every tensor with IN before OUT is "
                          "put in place."),
        click.option("--no-fsync", is_flag=True, help="Do not wait for the disk. The replacement "
                                                      "of OUT stays atomic."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
        click.option("-q", "--quiet", is_flag=True, help="Print only errors."),
    ]  # fmt: skip


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
    command, name = click.get_current_context().info_name, printable(output)
    example = quote(str(_plausible(output, str(command))))
    offer = (
        f", e.g. ckptconv {command} {quote(name)} {example}"
        if name.isprintable() and output.suffix
        else ""
    )
    raise click.UsageError(f"OUT is missing: name the file that {name} is to become{offer}")


def _plausible(source: Path, command: str) -> Path:
    """A name for what becomes of `source`: in the other format, or in the same one where the keys
    are all that changes.
    """
    if command == "convert":
        return source.with_suffix(".pt" if source.suffix == ".safetensors" else ".safetensors")
    return source.with_name(
        f"{source.stem}-{'ddp' if command == 'add-module' else 'bare'}{source.suffix}"
    )


_NOT_FOR_STDOUT = (
    ("as_json", "--json"),
    ("max_shard_size", "--max-shard-size"),
    ("with_files", "--with-files"),
)


def is_for_stdout(given: dict[str, Any]) -> bool:
    """Whether the output is to go to standard output; `UsageError` where it cannot."""
    if TO_STDOUT not in click.get_current_context().meta:
        return False
    for option, word in _NOT_FOR_STDOUT:
        if given[option]:
            raise click.UsageError(
                f"OUT is -, standard output, which cannot be used with {word}; write ./- for a "
                "file named -"
            )
    if given["to"] is None or _is_folder(given["to"]):
        raise click.UsageError(
            "OUT is -, standard output: add --to torch, --to safetensors or --to npz; write ./- "
            "for a file named -"
        )
    if not given["dry_run"] and sys.stdout.isatty():
        raise click.UsageError(
            "OUT is -, and standard output is a terminal; send it to a file or a program: > FILE"
        )
    return True


def _is_folder(to: str) -> bool:
    from ckptconv.formats.outputs import target_named

    return target_named(to).is_folder


def key_rules(wrappers: Any, *, reverse: bool = False) -> KeyRules:
    """The rules of the command that runs, in their order; `CheckpointError` for what is not a rule
    or no file of rules.
    """
    from ckptconv.keys.key_map import KeyRules
    from ckptconv.keys.rule_files import read_rules

    rules: list[Any] = []
    given = click.get_current_context().meta.get("ckptconv.rules", [])
    for word, text in given:
        rules += read_rules(text, reverse=reverse) if word == "rules" else [(word, text)]
    if reverse and all(word != "rules" for word, _ in given):
        raise CheckpointError(
            "--reverse undoes a mapping, but there is none", hint="name it with --rules FILE"
        )
    return KeyRules.of(rules, wrappers)


def comparison(given: dict[str, Any]) -> dict[str, Any]:
    """What `diff_checkpoints` is asked by the command line."""
    from ckptconv.keys.key_map import KEEP
    from ckptconv.tensors.element_pairs import Tolerance

    keys = key_rules(given["keys"], reverse=given["reverse"])
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
    try:
        tolerance = (
            Tolerance(given["atol"] or 0.0, given["rtol"] or 0.0, given["equal_nan"])
            if loose
            else None
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    taken = ("only", "only_b", "tag", "tag_b", "whole", "ignore_dtype", "strict_device")
    return {"keys": keys, "tolerance": tolerance, **{name: given[name] for name in taken}}


def options_of(given: dict[str, Any], wrappers: str) -> Request:
    """The conversion that the command line asks for; a senseless value is a usage error."""
    from ckptconv.convert.casts import read_casts
    from ckptconv.convert.given_metadata import read_metadata
    from ckptconv.convert.options import Request, edits_of
    from ckptconv.devices.mapping import tag_map
    from ckptconv.formats.hf_names import parse_size
    from ckptconv.tensors.dtypes import floating_dtype

    keys = key_rules(wrappers, reverse=given.get("reverse", False))
    tags = tag_map(given["device"], given["map_location"])
    dtype = floating_dtype(given["dtype"]) if given["dtype"] is not None else None
    limit = parse_size(given["max_shard_size"]) if given["max_shard_size"] is not None else None
    taken = ("to", "only", "tied", "unknown", "save_mapping", "with_files")
    return Request(
        keys=keys,
        tags=tags,
        dtype=dtype,
        max_shard_size=limit,
        edits=edits_of(given["drop"]),
        keep_dtype=tuple(given["keep_dtype"]),
        cast=read_casts(given["cast"]),
        metadata=read_metadata(given["metadata"], given["metadata_from"]),
        **{name: given[name] for name in taken},
    )


def key_target_of(given: dict[str, Any]) -> KeyTarget | None:
    """What the keys are to be fitted to; only `convert` has the options."""
    from ckptconv.convert.key_targets import key_target

    return key_target(
        given.get("like"), given.get("model"), drop_unexpected=given.get("drop_unexpected", False)
    )
