"""The command line: parse, call, render. What it does is in the library; what it says is in the reports."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptconv import __version__
from ckptconv.errors import CheckpointError, OutputRefused, printable
from ckptconv.signals import stop_in_good_order

if TYPE_CHECKING:
    from ckptconv.plans import ConversionPlan, Options
from ckptconv.cli_options import (
    FILE,
    LIMIT,
    TAG,
    FileCommand,
    RuleCommand,
    choice_options,
    comparison,
    is_for_stdout,
    key_options,
    key_target_of,
    options_of,
    output_options,
    refuse_missing,
)
from ckptconv.completion import offer_devices, offer_parts_of_a, offer_parts_of_b, offer_steps_of_a, offer_steps_of_b
from ckptconv.progress_display import COMPARING, COPYING, READING, SCANNING, progress_shown
from ckptconv.terminal import (
    Unprinted,
    colors,
    copy_to_stdout,
    errors_shown,
    fail,
    fill_closed_streams,
    print_headline,
    print_json,
    print_lines,
    print_rows,
    print_summary,
    show_error,
    spooled,
    stop_unprinted,
)


class Program(click.Group):
    """A group of commands whose answer must arrive: one that is not printed is an error, and not the answer."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # here, for the interpreter's own flush would come too late to tell
        except (Unprinted, OSError) as error:
            if isinstance(error, OSError) and error.filename is not None:
                raise
            stop_unprinted(error, 2 if ctx.invoked_subcommand in _ANSWERING else 1)


_ANSWERING = ("inspect", "doctor", "diff", "scan")
"""Commands whose exit code 1 is an answer."""


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
Examples:
  ckptconv strip-module ddp_cuda3.pt model.pt      DDP on cuda:3 → bare, CPU
  ckptconv convert train.pt model.safetensors      the model's state dict
  ckptconv convert model.pt b.pt --device cuda:1   tagged for cuda:1
  ckptconv inspect train.pt                        what is in it
  ckptconv doctor train.pt                         why it would not load here
  ckptconv diff train.pt model.pt --keys strip     what differs, to the bit
  ckptconv scan downloads/                         whether it is safe to load
\b
Shell completion: eval "$(_CKPTCONV_COMPLETE=bash_source ckptconv)"
(or zsh_source, fish_source)""",
)
@click.version_option(__version__, prog_name="ckptconv", message="%(prog)s %(version)s")
def cli() -> None:
    """Make a PyTorch checkpoint, saved anywhere, open anywhere: on a CPU-only host, under the keys that the model has,
    as a torch or a safetensors file, tagged for the device of your choice. Nothing in the file is executed."""


@cli.command(
    cls=RuleCommand,
    short_help="Convert to torch or safetensors: bare keys, for the CPU.",
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
  ckptconv convert in.pt - --to safetensors | ssh host 'cat > out.safetensors'
  ckptconv convert in.pt in.pt --force --verify""",
)
@output_options
@key_options("strip")
@click.option(
    "--like",
    metavar="OTHER",
    type=FILE,
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
    short_help="Strip `module.` (DataParallel, DDP) off the keys.",
    epilog="""\b
Examples:
  ckptconv strip-module in.pt out.pt
  ckptconv strip-module in.pt out.safetensors --dtype f16
  ckptconv strip-module in.pt in.pt --force""",
)
@output_options
def strip_module(**given: Any) -> None:
    """Strip `module.` (DataParallel, DDP) wherever a key of IN starts with it, and write OUT for the CPU."""
    _convert(given, "module")


@cli.command(
    "add-module",
    cls=RuleCommand,
    short_help="Put `module.` (DataParallel, DDP) before the keys.",
    epilog="""\b
Examples:
  ckptconv add-module in.pt out.pt
  ckptconv add-module in.safetensors out.pt --device cuda:0""",
)
@output_options
def add_module(**given: Any) -> None:
    """Put `module.` (DataParallel, DDP) before the keys of IN, unless all have it, and write OUT for the CPU. What stands
    beside the weights and is no tensor (`epoch`) keeps its name."""
    _convert(given, "add-module")


@cli.command(
    cls=FileCommand,
    short_help="Show what is in it, and what will not load and why.",
    epilog="""\b
Examples:
  ckptconv inspect in.pt
  ckptconv inspect in.safetensors --depth 4
  ckptconv inspect in.pt --json | jq .portable""",
)
@click.argument("sources", metavar="IN...", type=FILE, nargs=-1, required=True)
@click.option("--depth", type=click.IntRange(0, 50), default=2, show_default=True, help="Levels of the tree to show.")
@TAG
@LIMIT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def inspect(sources: tuple[Path, ...], depth: int, tag: str | None, as_json: bool) -> None:
    """Show what is in checkpoint IN, where it was saved, and what will not load and why. Reads no tensor's bytes."""
    from dataclasses import replace

    from ckptconv import inspection_report as report
    from ckptconv.formats.detect import open_checkpoint
    from ckptconv.inspection import inspect_checkpoint

    with errors_shown(as_json), open_checkpoint(sources, tag=tag) as checkpoint:
        found = inspect_checkpoint(checkpoint, depth)
    if len(sources) > 1:
        found = replace(found, named=tuple(map(str, sources)))
    if as_json:
        print_json(report.inspection_document(found))
        return
    portable, text = report.verdict(found)
    click.secho(printable(", ".join(map(str, sources))), bold=True)
    print_lines(report.inspection_lines(found))
    for line in report.tree_lines(found.root):
        click.echo(f"  {line}")
    click.secho(text, fg="green" if portable else "yellow")


@cli.command(
    cls=FileCommand,
    short_help="Say why it would not load here, and what mends it.",
    epilog="""\b
Examples:
  ckptconv doctor in.pt
  ckptconv doctor in.pt --values
  ckptconv doctor in.pt --like other.safetensors
  ckptconv doctor in.pt --model my_package.models:build
  ckptconv doctor in.pt --device cuda:0
  ckptconv doctor in.pt --json | jq -r '.findings[].command'""",
)
@click.argument("sources", metavar="IN...", type=FILE, nargs=-1, required=True)
@click.option("--like", metavar="OTHER", type=FILE, help="Should load where this checkpoint, index or list of keys fits.")
@click.option("--model", metavar="PACKAGE.MODULE:CALLABLE", help="Should load into the model that this builds (imports code).")
@click.option(
    "--device",
    metavar="TAG",
    shell_complete=offer_devices,
    help="Where the tensors are wanted: cpu (default), cuda:0, mps, ..., auto.",
)
@click.option("--values", is_flag=True, help="Read the tensors too: damaged records, values that are NaN or infinite.")
@TAG
@LIMIT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def doctor(sources: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Say why checkpoint IN would not load on this host, or would disappoint, and the command that mends it.

    Exits with 0 when torch.load(weights_only=True) or the safetensors library loads it here, with 1 when not, with 2 when
    that cannot be said: no such file, model or device."""
    from ckptconv import diagnosis_report as report
    from ckptconv.diagnosis import diagnose

    if given["like"] and given["model"]:
        raise click.UsageError("--like and --model are both given, and the keys can fit one only")
    shown = progress_shown(READING, silent=as_json)
    with errors_shown(as_json, code=2), redirect_stdout(sys.stderr), shown as on_progress:  # a model that is built may print
        found = diagnose(sources, **given, on_progress=on_progress)
    if as_json:
        print_json(report.diagnosis_document(found))
    else:
        click.secho(printable(", ".join(map(str, sources))), bold=True)
        print_lines(report.finding_lines(found.findings))
        click.secho(report.diagnosis_headline(found), fg="green" if found.loads else "red")
    sys.exit(0 if found.loads else 1)


@cli.command(
    short_help="Show this host's devices and their free memory.",
    epilog="""\b\nExamples:\n  ckptconv devices\n  CUDA_VISIBLE_DEVICES=1 ckptconv devices --json""",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def devices(as_json: bool) -> None:
    """Show the devices of this host, physical and visible (CUDA_VISIBLE_DEVICES), with their free memory."""
    from ckptconv import host_report as report
    from ckptconv.devices import best_device, survey_host

    with errors_shown(as_json):
        host, best = survey_host(ask_torch=True), best_device()
    if as_json:
        print_json(report.host_document(host, best))
        return
    print_lines([*report.host_lines(host), ("auto", f"--device auto would choose {best}")])


@cli.command(
    cls=RuleCommand,
    short_help="Compare two checkpoints of any formats, to the bit.",
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
@click.argument("a", metavar="A", type=FILE)
@click.argument("b", metavar="B", type=FILE)
@choice_options
@key_options("keep")
@click.option(
    "--only", metavar="PATH", shell_complete=offer_parts_of_a, help="Compare one part of both, e.g. state_dict or ema."
)
@click.option(
    "--only-b",
    metavar="PATH",
    shell_complete=offer_parts_of_b,
    help="The part of B, where it has another path ('' is all of it).",
)
@click.option(
    "--tag",
    metavar="TAG",
    shell_complete=offer_steps_of_a,
    help="The step or variant of A to read, where A is a folder of several, e.g. step-500.",
)
@click.option(
    "--tag-b", metavar="TAG", shell_complete=offer_steps_of_b,
    help="The step or variant of B, likewise.",
)  # fmt: skip
@click.option("--whole", is_flag=True, help="Compare everything in the files, by path: optimizers, numbers, names too.")
@click.option(
    "--atol", metavar="NUMBER", type=click.FloatRange(min=0), help="Values may be so far apart, |a - b| <= atol + rtol * |b|."
)
@click.option("--rtol", metavar="NUMBER", type=click.FloatRange(min=0), help="Or so far in proportion to B's.")
@click.option("--equal-nan", is_flag=True, help="With a tolerance: NaN equals NaN.")
@click.option("--ignore-dtype", is_flag=True, help="Compare the values of tensors of different dtypes as numbers.")
@click.option("--strict-device", is_flag=True, help="Another device tag is a difference too.")
@LIMIT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code says it.")
def diff(a: Path, b: Path, as_json: bool, quiet: bool, **given: Any) -> None:
    """Compare checkpoints A and B, of whatever formats: keys, dtypes, shapes, device tags and values, which must be the same
    bit for bit unless a tolerance is given. The one state dict of each is compared; key rules apply to A's keys."""
    from ckptconv import verdicts
    from ckptconv.diffing import diff_checkpoints

    with errors_shown(as_json, code=2), progress_shown(COMPARING, silent=as_json or quiet) as on_progress:
        found = diff_checkpoints(a, b, **comparison(given), on_progress=on_progress)
    if as_json:
        print_json(verdicts.difference_document(found))
    elif not quiet:
        print_headline(verdicts.difference_headline(found), fg="green" if found.same else "yellow")
        print_lines(verdicts.difference_lines(found))
    sys.exit(2 if found.damaged else 0 if found.same else 1)


@cli.command(
    short_help="Say whether it is safe to load. Nothing is executed.",
    epilog="""\b
Examples:
  ckptconv scan downloaded.pt
  ckptconv scan models/ --strict
  ckptconv scan a.pkl b.zip --json

Exit code: 0 nothing dangerous, 1 something dangerous (with --strict: or unknown), 2 a path cannot be read.
Unknown are names that are no part of ordinary checkpoints, and what cannot be looked into: gzip, bzip2, xz, 7z, ...""",
)
@click.argument("paths", metavar="PATH...", type=FILE, nargs=-1, required=True)
@click.option("--strict", is_flag=True, help="Exit with 1 for all that is not known to be plain, too.")
@LIMIT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code says it.")
def scan(paths: tuple[Path, ...], strict: bool, as_json: bool, quiet: bool) -> None:
    """Say whether it is safe to load PATH, files or folders: each global that a pickle names is plain, unknown or dangerous.
    Archives, and pickles within pickles, are looked into. Nothing is executed."""
    from ckptconv import verdicts
    from ckptconv.report import error_document
    from ckptconv.scanning import scan_checkpoint

    found, errors = [], []
    for path in paths:
        try:
            with progress_shown(SCANNING, silent=as_json or quiet) as on_progress:
                found.append(item := scan_checkpoint(path, on_progress=on_progress))
        except CheckpointError as error:
            errors.append(error)
            continue
        if not (as_json or quiet):
            color = {"plain": "green", "unknown": "yellow", "dangerous": "red"}[item.level]
            click.secho(verdicts.scan_headline(item), fg=color, bold=True)
            print_lines(verdicts.scan_lines(item))
    if as_json:
        print_json({"scans": [verdicts.scan_document(item) for item in found], **(error_document(errors[0]) if errors else {})})
    for unread in errors:
        show_error(str(unread))
    refused = ("dangerous", "unknown") if strict else ("dangerous",)
    sys.exit(2 if errors else 1 if any(item.level in refused for item in found) else 0)


def _convert(given: dict[str, Any], wrappers: str) -> None:
    from ckptconv.choices import refuse_no_output
    from ckptconv.formats.detect import open_checkpoint
    from ckptconv.planning import plan_conversion
    from ckptconv.plans import keeps_modules

    refuse_missing(given)
    spool = spooled() if is_for_stdout(given) else nullcontext(given["output"])
    with errors_shown(given["as_json"], usage=True):
        options = options_of(given, wrappers)
    with errors_shown(given["as_json"]), spool as output:
        refuse_no_output(**{name: path for name in ("output", "save_mapping") if (path := given[name]) is not None})
        given["output"] = output
        with redirect_stdout(sys.stderr):  # a model that is built may print
            options = replace(options, fit_to=key_target_of(given))
        refused = _refused_output(given, options)
        if refused is not None and not given["dry_run"]:
            raise refused
        whole = keeps_modules(output, options)
        with open_checkpoint(given["sources"], tag=given["tag"], whole_modules=whole) as checkpoint:
            plan = plan_conversion(checkpoint, output, options)
            if not given["dry_run"]:
                _execute(plan, given)
                return
    _show_plan(plan, given, refused)


def _refused_output(given: dict[str, Any], options: Options) -> OutputRefused | None:
    """Why an output could not be written, as far as it can be told before all are known; shards are looked at when they are."""
    from ckptconv.outputs import check_folder, check_output

    try:
        if options.max_shard_size is None:
            (check_folder if given["to"] == "dcp" else check_output)(given["output"], force=given["force"])
        if given["save_mapping"] is not None:
            check_output(given["save_mapping"], force=given["force"])
    except OutputRefused as error:
        return error
    return None


def _show_plan(plan: ConversionPlan, given: dict[str, Any], refused: OutputRefused | None) -> None:
    """What would be done; where the output is `refused`, that too, and the exit code is the conversion's."""
    from ckptconv import report

    if given["as_json"]:
        error = {} if refused is None else report.error_document(refused)
        print_json({"dry_run": True, **report.plan_document(plan), **error})
    elif not given["quiet"]:
        print_summary(report.plan_headline(_as_named(plan, given)), report.plan_lines(plan))
        print_rows(report.keys_table(plan), err=True)
    if refused is not None:
        fail(str(refused), 1)


def _execute(plan: ConversionPlan, given: dict[str, Any]) -> None:
    from ckptconv import report
    from ckptconv.convert import execute_plan, hand_over_plan

    wanted = {"force": given["force"], "fsync": not given["no_fsync"], "verify": given["verify"]}
    with progress_shown(COPYING, silent=given["quiet"] or given["as_json"]) as on_progress:
        if is_for_stdout(given):
            result = hand_over_plan(plan, copy_to_stdout, **wanted, on_progress=on_progress)
        else:
            result = execute_plan(plan, **wanted, on_progress=on_progress)
    if given["as_json"]:
        print_json({"dry_run": False, **report.result_document(result)})
    elif not given["quiet"]:
        named = replace(result, plan=_as_named(plan, given))
        print_summary(report.result_headline(named), report.result_lines(named))


def _as_named(plan: ConversionPlan, given: dict[str, Any]) -> ConversionPlan:
    """The plan under the name that its output has for the user."""
    return replace(plan, output=Path("standard output")) if is_for_stdout(given) else plan


def main() -> None:
    """The program: one line per error, exit codes 0 (done), 1 (refused or failed), 2 (usage), 130 and 143 (stopped)."""
    import gc

    gc.disable()  # one command and the process ends: a tree of a million nodes is no garbage, and looking costs a tenth
    stop_in_good_order()
    fill_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal may lack the characters
    try:
        cli.main(_arguments(), prog_name="ckptconv", standalone_mode=False, color=colors())
        sys.stdout.flush()
    except click.UsageError as error:
        program = error.ctx.command_path if error.ctx else "ckptconv"
        fail(f"{printable(error.format_message(), 2000).rstrip('.')}; see {program} --help", 2)
    except click.ClickException as error:
        fail(printable(error.format_message(), 2000), 1)
    except (KeyboardInterrupt, click.Abort):
        fail("interrupted; nothing unfinished was left behind", 130)
    except OSError as error:
        if error.filename is None:
            stop_unprinted(error, 1)
        fail(f"{printable(str(error.filename))}: {error.strerror}", 1)


def _arguments() -> list[str]:
    """The command line; without any the help is shown, and that is a usage error."""
    if len(sys.argv) > 1 or "_CKPTCONV_COMPLETE" in os.environ:
        return sys.argv[1:]
    with click.Context(cli, info_name="ckptconv") as context:
        click.echo(cli.get_help(context), err=True)
    sys.exit(2)
