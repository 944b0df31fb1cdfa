"""The command line: parse, call, render. What it does is in the library; what it says is in `report`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckptconv import __version__
from ckptconv.errors import CheckpointError, printable

if TYPE_CHECKING:
    from ckptconv.fitted_keys import KeyTarget
    from ckptconv.keys import KeyRules
    from ckptconv.planning import ConversionPlan, Options

F = TypeVar("F", bound=Callable[..., Any])
_PROGRESS_FROM = 100_000_000  # bytes; a smaller copy is done before a bar is read
_FILE = click.Path(path_type=Path)
_RULE_WORDS = ("strip-prefix", "add-prefix", "rename", "regex", "include", "exclude", "preset")
_PRESETS = ("ddp", "compile", "fsdp", "checkpoint-wrapper", "lightning", "peft", "swa", "timm-ema", "mmengine", "ema-pytorch")
"""The names of `keys.RULE_WORDS` and `key_rules.PRESETS`, here so that a usage error or --help need not import them."""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
Examples:
  ckptconv strip-module ddp_cuda3.pt model.pt        a DDP file from cuda:3 → bare keys, CPU
  ckptconv convert train.pt model.safetensors        the state dict of a training checkpoint
  ckptconv convert model.pt gpu.pt --device cuda:1   tagged for cuda:1, written without one
  ckptconv inspect train.pt                          what is in it, and what will not load
  ckptconv diff train.pt model.pt --keys strip       what differs, to the bit
  ckptconv scan downloads/                           whether it is safe to load
\b
Shell completion: eval "$(_CKPTCONV_COMPLETE=bash_source ckptconv)"   (zsh_source, fish_source)""",
)
@click.version_option(__version__, prog_name="ckptconv", message="%(prog)s %(version)s")
def cli() -> None:
    """Make a PyTorch checkpoint, saved anywhere, open anywhere: on a CPU-only host, under the keys that the model has,
    as a torch or a safetensors file, tagged for the device of your choice. Nothing in the file is executed."""


class RuleCommand(click.Command):
    """A command that knows in which order its key rules were given, whichever options they are of."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        values = {name: iter(texts) for name, texts in given.items() if _word(name) in (*_RULE_WORDS, "rules")}
        ctx.meta["ckptconv.rules"] = [
            (_word(param.name or ""), next(values[param.name or ""])) for param in order if param.name in values
        ]
        return super().parse_args(ctx, args)


def _word(name: str) -> str:
    """An option as it is written, by the name of its parameter."""
    return name.replace("_", "-")


def _choice_options(command: F) -> F:
    """The options that choose among keys, which every command that writes has."""
    return _with_options(command, [
        click.option("--include", metavar="GLOB", multiple=True, help="Keep only keys that match, as they are by then."),
        click.option("--exclude", metavar="GLOB", multiple=True, help="Leave out keys that match, as they are by then."),
    ])  # fmt: skip


def key_options(default: str) -> Callable[[F], F]:
    """The options of key rules, which apply in the order in which they are given (the command must be a `RuleCommand`)."""
    return lambda command: _with_options(command, [
        click.option("--keys", type=click.Choice(["strip", "keep"]), default=default, show_default=True,
                     help="Strip the wrapper prefixes of DDP, torch.compile, FSDP and checkpointing first, or keep them."),
        click.option("--strip-prefix", metavar="PREFIX", multiple=True, help="Cut this off every key that starts with it."),
        click.option("--add-prefix", metavar="PREFIX", multiple=True, help="Put this before every key."),
        click.option("--rename", metavar="OLD=NEW", multiple=True, help="Rename a key or a literal prefix of keys."),
        click.option("--regex", metavar="PATTERN=>REPLACEMENT", multiple=True,
                     help="Replace what a Python regex matches in keys (\\1 is its first group)."),
        click.option("--preset", type=click.Choice(_PRESETS), multiple=True,
                     help="Take off what a framework put around the keys."),
        click.option("--rules", metavar="FILE", multiple=True, type=_FILE,
                     help="Key rules from a .json, .toml or .yaml file, or a mapping that --save-mapping wrote."),
        click.option("--reverse", is_flag=True, help="Undo the mapping that --rules names."),
    ])  # fmt: skip


def _with_options(command: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        command = option(command)
    return command


_TAG = click.option("--tag", metavar="TAG", help="The step to read, where IN is a folder of several, e.g. global_step500.")


def _output_options(command: F) -> F:
    """The arguments and options that every writing command has."""
    options = [
        click.argument("sources", metavar="IN...", type=_FILE, nargs=-1, required=True),
        click.argument("output", metavar="OUT", type=_FILE),
        click.option("--device", metavar="TAG", help="Location tag to write: cpu (default), cuda:1, mps, ..., keep, auto."),
        click.option("--map-location", metavar="OLD=NEW", multiple=True, help="Map one location tag, e.g. cuda:3=cuda:0."),
        click.option("--to", type=click.Choice(["torch", "safetensors", "dcp"]),
                     help="Output format, if OUT's name does not say; dcp: a folder that FSDP training resumes from."),
        click.option("--dtype", metavar="DTYPE", help="Cast floating tensors: f32, f16, bf16, f64, f8_e4m3, f8_e5m2."),
        click.option("--max-shard-size", metavar="SIZE", help="Split the state dict into shards, e.g. of 5GB, and an index."),
        click.option("--only", metavar="PATH", help="Convert one part of the checkpoint, e.g. state_dict or ema."),
        _TAG,
        _choice_options,
        click.option("--save-mapping", metavar="FILE", type=_FILE,
                     help="Write which key became which to a JSON file, which --rules FILE --reverse undoes."),
        click.option("--tied", type=click.Choice(["alias", "duplicate"]), default="alias", show_default=True,
                     help="Names of one tensor in safetensors: one copy and aliases, or a copy each."),
        click.option("--unknown", type=click.Choice(["refuse", "drop", "keep"]), default="refuse", show_default=True,
                     help="Objects in a torch output that weights_only=True refuses and that have no plain form."),
        click.option("-f", "--force", is_flag=True, help="Replace OUT if it exists (OUT may be IN)."),
        click.option("-n", "--dry-run", is_flag=True, help="Say what would be written, and write nothing."),
        click.option("--verify", is_flag=True, help="Read the output back and compare every tensor before it is put in place."),
        click.option("--no-fsync", is_flag=True, help="Do not wait for the disk; the rename stays atomic."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
        click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
    ]  # fmt: skip
    return _with_options(command, options)


@cli.command(
    cls=RuleCommand,
    epilog="""\b
Examples:
  ckptconv convert in.pt out.safetensors
  ckptconv convert in.pt out.pt --device cuda:1
  ckptconv convert in.safetensors out.pt --add-prefix module.
  ckptconv convert in.pt out.safetensors --dtype bf16 --include 'model.*' --exclude '*.num_batches_tracked'
  ckptconv convert in.pt out.pt --strip-prefix model. --regex 'blocks\\.(\\d+)=>layers.\\1' --save-mapping map.json
  ckptconv convert out.pt back.pt --rules map.json --reverse
  ckptconv convert train.pt ema.safetensors --only ema
  ckptconv convert in.pt out.pt --like other.safetensors
  ckptconv convert in.pt out.safetensors --model my_package.models:build
  ckptconv convert rank0.pt rank1.pt out.safetensors
  ckptconv convert in.pt dcp_folder --to dcp
  ckptconv convert in.pt in.pt --force --verify""",
)
@_output_options
@key_options("strip")
@click.option(
    "--like",
    metavar="OTHER",
    type=_FILE,
    help="Fit the keys to those of another checkpoint, of an index, or of a text of one key per line.",
)
@click.option(
    "--model",
    metavar="PACKAGE.MODULE:CALLABLE",
    help="Fit the keys to the model that this builds; the only option that imports code.",
)
@click.option("--drop-unexpected", is_flag=True, help="With --like or --model: leave out keys that it does not have.")
def convert(keys: str, **given: Any) -> None:
    """Convert checkpoint IN to OUT: keys normalised, tagged for the CPU, in the format that OUT's name says. Several INs are
    the files of all ranks of one checkpoint. Key rules apply in the order in which they are given, before --like or --model."""
    if given["like"] and given["model"]:
        raise click.UsageError("--like and --model are both given, and the keys can fit one only")
    if given["drop_unexpected"] and not (given["like"] or given["model"]):
        raise click.UsageError("--drop-unexpected needs --like or --model")
    _convert(given, keys)


@cli.command(
    "strip-module",
    cls=RuleCommand,
    epilog="""\b
Examples:
  ckptconv strip-module in.pt out.pt
  ckptconv strip-module in.pt out.safetensors --dtype f16
  ckptconv strip-module in.pt in.pt --force""",
)
@_output_options
def strip_module(**given: Any) -> None:
    """Strip `module.` (DataParallel, DDP) wherever a key of IN starts with it, and write OUT for the CPU."""
    _convert(given, "module")


@cli.command(
    "add-module",
    cls=RuleCommand,
    epilog="""\b
Examples:
  ckptconv add-module in.pt out.pt
  ckptconv add-module in.safetensors out.pt --device cuda:0""",
)
@_output_options
def add_module(**given: Any) -> None:
    """Put `module.` (DataParallel, DDP) before every key of IN that lacks it altogether, and write OUT for the CPU."""
    _convert(given, "add-module")


@cli.command(
    epilog="""\b
Examples:
  ckptconv inspect in.pt
  ckptconv inspect in.safetensors --depth 4
  ckptconv inspect in.pt --json | jq .portable"""
)
@click.argument("sources", metavar="IN...", type=_FILE, nargs=-1, required=True)
@click.option("--depth", type=click.IntRange(0, 50), default=2, show_default=True, help="Levels of the tree to show.")
@_TAG
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def inspect(sources: tuple[Path, ...], depth: int, tag: str | None, as_json: bool) -> None:
    """Show what is in checkpoint IN, where it was saved, and what will not load and why. Reads no tensor's bytes."""
    from dataclasses import replace

    from ckptconv import report
    from ckptconv.formats.detect import open_checkpoint
    from ckptconv.inspection import inspect_checkpoint

    with _errors(as_json), open_checkpoint(sources, tag=tag) as checkpoint:
        found = inspect_checkpoint(checkpoint, depth)
    if len(sources) > 1:
        found = replace(found, named=tuple(map(str, sources)))
    if as_json:
        _print_json(report.inspection_document(found))
        return
    portable, text = report.verdict(found)
    click.secho(printable(", ".join(map(str, sources))), bold=True)
    _print_lines(report.inspection_lines(found))
    for line in report.tree_lines(found.root):
        click.echo(f"  {line}")
    click.secho(text, fg="green" if portable else "yellow")


@cli.command(
    epilog="""\b
Examples:
  ckptconv doctor in.pt
  ckptconv doctor in.pt --values
  ckptconv doctor in.pt --like other.safetensors
  ckptconv doctor in.pt --model my_package.models:build
  ckptconv doctor in.pt --device cuda:0
  ckptconv doctor in.pt --json | jq -r '.findings[].command'"""
)
@click.argument("sources", metavar="IN...", type=_FILE, nargs=-1, required=True)
@click.option("--like", metavar="OTHER", type=_FILE, help="Should load where this checkpoint, index or list of keys fits.")
@click.option("--model", metavar="PACKAGE.MODULE:CALLABLE", help="Should load into the model that this builds (imports code).")
@click.option("--device", metavar="TAG", help="Where the tensors are wanted: cpu (default), cuda:0, mps, ..., auto.")
@click.option("--values", is_flag=True, help="Read the tensors too: damaged records, values that are NaN or infinite.")
@_TAG
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def doctor(sources: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Say why checkpoint IN would not load on this host, or would disappoint, and the command that mends it.

    Exits with 0 when torch.load(weights_only=True) or the safetensors library loads it here, with 1 when not."""
    from ckptconv import report
    from ckptconv.diagnosis import diagnose

    if given["like"] and given["model"]:
        raise click.UsageError("--like and --model are both given, and the keys can fit one only")
    with _errors(as_json):
        found = diagnose(sources, **given)
    if as_json:
        _print_json(report.diagnosis_document(found))
    else:
        click.secho(printable(", ".join(map(str, sources))), bold=True)
        for finding in found.findings:
            _print_lines(report.finding_lines(finding))
        click.secho(report.diagnosis_headline(found), fg="green" if found.loads else "red")
    sys.exit(0 if found.loads else 1)


@cli.command(epilog="""\b\nExamples:\n  ckptconv devices\n  CUDA_VISIBLE_DEVICES=1 ckptconv devices --json""")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def devices(as_json: bool) -> None:
    """Show the devices of this host, physical and visible (CUDA_VISIBLE_DEVICES), with their free memory."""
    from ckptconv import report
    from ckptconv.devices import best_device, survey_host

    with _errors(as_json):
        host, best = survey_host(ask_torch=True), best_device()
    if as_json:
        _print_json(report.host_document(host, best))
        return
    _print_lines([*report.host_lines(host), ("auto", f"--device auto would choose {best}")])


@cli.command(
    cls=RuleCommand,
    epilog="""\b
Examples:
  ckptconv diff model.pt model.safetensors
  ckptconv diff ddp_cuda3.pt model.pt --keys strip
  ckptconv diff epoch1.pt epoch2.pt --atol 1e-6 --rtol 1e-5
  ckptconv diff model.pt model_bf16.safetensors --ignore-dtype --rtol 0.01
  ckptconv diff zero3_run/ model.safetensors --tag global_step500
  ckptconv diff old.pt new.pt --whole --json

Exit code: 0 same, 1 different, 2 wrong usage, or a file that is damaged or cannot be compared.""",
)
@click.argument("a", metavar="A", type=_FILE)
@click.argument("b", metavar="B", type=_FILE)
@_choice_options
@key_options("keep")
@click.option("--only", metavar="PATH", help="Compare one part of both, e.g. state_dict or ema.")
@click.option("--only-b", metavar="PATH", help="The part of B, where it has another path ('' is all of it).")
@click.option("--tag", metavar="TAG", help="The step of A to read, where A is a folder of several, e.g. global_step500.")
@click.option("--tag-b", metavar="TAG", help="The step of B, likewise.")
@click.option("--whole", is_flag=True, help="Compare everything in the files, by path: optimizers, numbers, names too.")
@click.option("--atol", type=click.FloatRange(min=0), help="Values may be so far apart, |a - b| <= atol + rtol * |b|.")
@click.option("--rtol", type=click.FloatRange(min=0), help="Or so far in proportion to B's.")
@click.option("--equal-nan", is_flag=True, help="With a tolerance: NaN equals NaN.")
@click.option("--ignore-dtype", is_flag=True, help="Compare the values of tensors of different dtypes as numbers.")
@click.option("--strict-device", is_flag=True, help="Another device tag is a difference too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code says it.")
def diff(a: Path, b: Path, as_json: bool, quiet: bool, **given: Any) -> None:
    """Compare checkpoints A and B, of whatever formats: keys, dtypes, shapes, device tags and values, which must be the same
    bit for bit unless a tolerance is given. The one state dict of each is compared; key rules apply to A's keys."""
    from ckptconv import verdicts
    from ckptconv.diffing import diff_checkpoints

    with _errors(as_json, code=2):
        found = diff_checkpoints(a, b, **_comparison(given))
    if as_json:
        _print_json(verdicts.difference_document(found))
    elif not quiet:
        click.secho(verdicts.difference_headline(found), fg="green" if found.same else "yellow", bold=True)
        _print_lines(verdicts.difference_lines(found))
    sys.exit(2 if found.damaged else 0 if found.same else 1)


@cli.command(
    epilog="""\b
Examples:
  ckptconv scan downloaded.pt
  ckptconv scan models/ --strict
  ckptconv scan a.pkl b.zip --json

Exit code: 0 nothing dangerous, 1 something dangerous (with --strict: or unknown), 2 a path cannot be read."""
)
@click.argument("paths", metavar="PATH...", type=_FILE, nargs=-1, required=True)
@click.option("--strict", is_flag=True, help="Exit with 1 for names that are not known to be plain, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code says it.")
def scan(paths: tuple[Path, ...], strict: bool, as_json: bool, quiet: bool) -> None:
    """Say whether it is safe to load PATH, files or folders: each global that a pickle names is plain, unknown or dangerous.
    Archives, and pickles within pickles, are looked into. Nothing is executed."""
    from ckptconv import verdicts
    from ckptconv.scanning import scan_checkpoint

    with _errors(as_json, code=2):
        found = [scan_checkpoint(path) for path in paths]
    if as_json:
        _print_json({"scans": [verdicts.scan_document(item) for item in found]})
    for item in () if as_json or quiet else found:
        color = {"plain": "green", "unknown": "yellow", "dangerous": "red"}[item.level]
        click.secho(verdicts.scan_headline(item), fg=color, bold=True)
        _print_lines(verdicts.scan_lines(item))
    refused = ("dangerous", "unknown") if strict else ("dangerous",)
    sys.exit(1 if any(item.level in refused for item in found) else 0)


# ------------------------------------------------------------------------------------------------------- calling, rendering


def key_rules(wrappers: Any, *, reverse: bool = False) -> KeyRules:
    """The rules of the command that runs, in their order; `CheckpointError` for what is no rule or no file of rules."""
    from ckptconv.keys import KeyRules
    from ckptconv.rule_files import read_rules

    rules: list[Any] = []
    given = click.get_current_context().meta.get("ckptconv.rules", [])
    for word, text in given:
        rules += read_rules(text, reverse=reverse) if word == "rules" else [(word, text)]
    if reverse and all(word != "rules" for word, _ in given):
        raise CheckpointError("--reverse undoes a mapping, and there is none", hint="name it with --rules FILE")
    return KeyRules.of(rules, wrappers)


def _comparison(given: dict[str, Any]) -> dict[str, Any]:
    """What `diff_checkpoints` is asked by the command line."""
    from ckptconv.comparison import Tolerance
    from ckptconv.keys import KEEP

    keys = key_rules(given["keys"], reverse=given["reverse"])
    loose = given["atol"] is not None or given["rtol"] is not None
    if given["equal_nan"] and not loose:
        raise click.UsageError("--equal-nan goes with --atol or --rtol; without them equal bits are equal, NaN included")
    if given["whole"] and keys != KEEP:
        raise click.UsageError("--whole compares by path; key rules go without it")
    tolerance = Tolerance(given["atol"] or 0.0, given["rtol"] or 0.0, given["equal_nan"]) if loose else None
    taken = ("only", "only_b", "tag", "tag_b", "whole", "ignore_dtype", "strict_device")
    return {"keys": keys, "tolerance": tolerance, **{name: given[name] for name in taken}}


def _convert(given: dict[str, Any], wrappers: str) -> None:
    from ckptconv.formats.detect import open_checkpoint
    from ckptconv.outputs import check_folder, check_output
    from ckptconv.planning import keeps_modules, plan_conversion

    output = given["output"]
    with _errors(given["as_json"], usage=True):
        options = _options(given, wrappers)
    with _errors(given["as_json"]):
        options = replace(options, fit_to=_key_target(given))
        if not given["dry_run"] and options.max_shard_size is None:
            (check_folder if given["to"] == "dcp" else check_output)(output, force=given["force"])
        whole = keeps_modules(output, options)
        if not given["dry_run"] and given["save_mapping"] is not None:
            check_output(given["save_mapping"], force=given["force"])
        with open_checkpoint(given["sources"], tag=given["tag"], whole_modules=whole) as checkpoint:
            plan = plan_conversion(checkpoint, output, options)
            (_show_plan if given["dry_run"] else _execute)(plan, given)


def _options(given: dict[str, Any], wrappers: str) -> Options:
    """The conversion that the command line asks for; a value that cannot be meant is a usage error."""
    from ckptconv.devices import tag_map
    from ckptconv.dtypes import floating_dtype
    from ckptconv.planning import Options
    from ckptconv.sharding import parse_size

    keys = key_rules(wrappers, reverse=given.get("reverse", False))
    tags = tag_map(given["device"], given["map_location"])
    dtype = floating_dtype(given["dtype"]) if given["dtype"] else None
    limit = parse_size(given["max_shard_size"]) if given["max_shard_size"] else None
    return Options(given["to"], keys, tags, dtype, given["only"], given["tied"], given["unknown"], limit, given["save_mapping"])


def _key_target(given: dict[str, Any]) -> KeyTarget | None:
    """What the keys are to be fitted to; only `convert` has the options."""
    from ckptconv.key_targets import key_target

    return key_target(given.get("like"), given.get("model"), drop_unexpected=given.get("drop_unexpected", False))


def _show_plan(plan: ConversionPlan, given: dict[str, Any]) -> None:
    from ckptconv import report

    if given["as_json"]:
        _print_json({"dry_run": True, **report.plan_document(plan)})
    elif not given["quiet"]:
        _print_summary(report.plan_headline(plan), report.plan_lines(plan))
        for line in report.keys_table(plan):
            click.echo(f"  {line}", err=True)


def _execute(plan: ConversionPlan, given: dict[str, Any]) -> None:
    from ckptconv import report
    from ckptconv.convert import execute_plan

    with _progress(plan, silent=given["quiet"] or given["as_json"]) as on_progress:
        result = execute_plan(
            plan,
            force=given["force"],
            fsync=not given["no_fsync"],
            verify=given["verify"],
            on_progress=on_progress,
        )
    if given["as_json"]:
        _print_json({"dry_run": False, **report.result_document(result)})
    elif not given["quiet"]:
        _print_summary(report.result_headline(result), report.result_lines(result))


@contextmanager
def _progress(plan: ConversionPlan, *, silent: bool) -> Iterator[Callable[[int], None] | None]:
    """A bar with rate and time left on stderr, for long copies on a terminal only."""
    if silent or plan.nbytes < _PROGRESS_FROM or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(plan.output.name, 40), total=plan.nbytes)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _errors(as_json: bool, usage: bool = False, code: int = 1) -> Iterator[None]:
    """Turn a checkpoint error into one line on stderr (and a JSON document where one was asked for) and an exit code: `code`,
    or 2 where the command line is at fault."""
    try:
        yield
    except CheckpointError as error:
        from ckptconv import report

        if as_json:
            _print_json(report.error_document(error))
        _fail(f"{error}; see ckptconv convert --help" if usage else str(error), 2 if usage else code)


def _fail(message: str, code: int) -> None:
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(message, err=True)
    sys.exit(code)


def _print_json(document: dict[str, Any]) -> None:
    import json

    click.echo(json.dumps(document, indent=2))


def _print_summary(headline: str, lines: Any) -> None:
    click.secho(headline, bold=True, err=True)
    _print_lines(lines, err=True)


def _print_lines(lines: Any, err: bool = False) -> None:
    lines = list(lines)
    width = max((len(label) for label, _ in lines), default=0)
    for label, text in lines:
        color = "yellow" if label in ("warning", "note") else "red" if label in ("error", "damaged") else "cyan"
        click.echo("  " + click.style(label.ljust(width), fg=color) + "  " + text, err=err)


def main() -> None:
    """The program: one line per error, exit codes 0 (done), 1 (refused or failed), 2 (usage), 130 and 143 (stopped)."""
    import gc
    import signal

    gc.disable()  # one command and the process ends: a tree of a million nodes is no garbage, and looking costs a tenth
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal may lack the characters
    try:
        cli.main(_arguments(), prog_name="ckptconv", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        program = error.ctx.command_path if error.ctx else "ckptconv"
        _fail(f"{printable(error.format_message(), 2000).rstrip('.')}; see {program} --help", 2)
    except click.ClickException as error:
        _fail(printable(error.format_message(), 2000), 1)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted; nothing was left behind", 130)
    except OSError as error:
        click.echo(f"error: cannot print the result: {error.strerror}", err=True)
        os._exit(1)  # the interpreter's own last flush would fail once more


def _arguments() -> list[str]:
    """The command line; without any the help is shown, and that is a usage error."""
    if len(sys.argv) > 1 or "_CKPTCONV_COMPLETE" in os.environ:
        return sys.argv[1:]
    with click.Context(cli, info_name="ckptconv") as context:
        click.echo(cli.get_help(context), err=True)
    sys.exit(2)
