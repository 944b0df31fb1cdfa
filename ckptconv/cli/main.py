"""The command line: parse, call, render. What it does is in the library; what it says is in the
reports.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptconv import __version__
from ckptconv.support.errors import CheckpointError, OutputRefused, printable
from ckptconv.support.rows import Row
from ckptconv.support.signals import missed_stop, stop_in_good_order

if TYPE_CHECKING:
    from ckptconv.convert.options import Request
    from ckptconv.convert.plan import ConversionPlan
    from ckptconv.devices.gpu_choice import Shell
    from ckptconv.doctor.findings import Diagnosis
    from ckptconv.inspect.surveys import Surveyed
    from ckptconv.scan.files import Scan
from ckptconv.cli.completion import (
    offer_devices,
    offer_parts_of_a,
    offer_parts_of_b,
    offer_steps_of_a,
    offer_steps_of_b,
)
from ckptconv.cli.options import (
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
from ckptconv.cli.progress_display import COMPARING, COPYING, READING, SCANNING, progress_shown
from ckptconv.cli.terminal import (
    Unprinted,
    colors,
    copy_to_stdout,
    errors_shown,
    fail,
    fill_closed_streams,
    is_json_asked,
    print_ending_json,
    print_headline,
    print_json,
    print_lines,
    print_rows,
    print_summary,
    print_table,
    show_error,
    show_page,
    spooled,
    stop,
    stop_unprinted,
    take_any_text,
    terminal_width,
)


class Program(click.Group):
    """A group of commands whose answer must arrive: one that is not printed is an error, and not
    the answer.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                # here, for the interpreter's own flush would come too late to tell
                sys.stdout.flush()
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
ckptconv help lists the pages of the documentation, and shows them.
Shell completion: eval "$(_CKPTCONV_COMPLETE=bash_source ckptconv)"
(or zsh_source, fish_source)""",
)
@click.version_option(__version__, prog_name="ckptconv", message="%(prog)s %(version)s")
def cli() -> None:
    """Make a PyTorch checkpoint open anywhere.

    ckptconv takes a checkpoint that was saved on any device and under any wrapper, and writes a
    torch or safetensors file that a CPU-only host can load, with the keys that the model has. It
    executes nothing in the file.
    """


@cli.command(
    cls=RuleCommand,
    short_help="Convert a checkpoint to a torch or safetensors file.",
    epilog="""\b
Examples:
  ckptconv convert in.pt out.safetensors
  ckptconv convert in.pt out.pt --device cuda:1
  ckptconv convert in.safetensors out.pt --add-prefix module.
  ckptconv convert in.pt out.safetensors --dtype bf16 --include 'model.*' \
--exclude '*.num_batches_tracked'
  ckptconv convert in.pt out.pt --strip-prefix model. \
--regex 'blocks\\.(\\d+)=>layers.\\1' --save-mapping map.json
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
    help="Fit the keys to those of another checkpoint, an index, or a text file with one key per "
    "line.",
)
@click.option(
    "--model",
    metavar="PACKAGE.MODULE:CALLABLE",
    help="Fit the keys to the model that this callable builds. Imports code.",
)
@click.option(
    "--drop-unexpected",
    is_flag=True,
    help="With --like or --model: leave out the keys that the target does not have.",
)
def convert(keys: str, **given: Any) -> None:
    """Convert checkpoint IN to OUT, in the format that the name of OUT says.

    By default, the prefixes of wrappers are stripped from the keys, and the tensors are tagged for
    the CPU. Several INs are the files of all ranks of one checkpoint. Key rules apply in the order
    in which you give them, and before --like or --model.
    """
    if given["like"] and given["model"]:
        raise click.UsageError("--like and --model are both given, but the keys can fit only one")
    if given["drop_unexpected"] and not (given["like"] or given["model"]):
        raise click.UsageError("--drop-unexpected needs --like or --model")
    _convert(given, keys)


@cli.command(
    "strip-module",
    cls=RuleCommand,
    short_help="Strip `module.` (DataParallel, DDP) from the keys.",
    epilog="""\b
Examples:
  ckptconv strip-module in.pt out.pt
  ckptconv strip-module in.pt out.safetensors --dtype f16
  ckptconv strip-module in.pt in.pt --force""",
)
@output_options
def strip_module(**given: Any) -> None:
    """Strip `module.` (DataParallel, DDP) from every key of IN that starts with it, and write OUT
    for the CPU.
    """
    _convert(given, "module")


@cli.command(
    "add-module",
    cls=RuleCommand,
    short_help="Add `module.` (DataParallel, DDP) to the keys.",
    epilog="""\b
Examples:
  ckptconv add-module in.pt out.pt
  ckptconv add-module in.safetensors out.pt --device cuda:0""",
)
@output_options
def add_module(**given: Any) -> None:
    """Put `module.` (DataParallel, DDP) before the keys of IN, unless all have it, and write OUT
    for the CPU. What stands beside the weights and is not a tensor (`epoch`) keeps its name.
    """
    _convert(given, "add-module")


@cli.command(
    cls=FileCommand,
    short_help="Show what is in a checkpoint.",
    epilog="""\b
Examples:
  ckptconv inspect in.pt
  ckptconv inspect in.safetensors --depth 4
  ckptconv inspect in.pt --json | jq .portable
  ckptconv inspect --portable *.safetensors *.pt

Exit code: 0 looked at, 1 one cannot be opened (with --portable: or is not portable), \
2 wrong usage.""",
)
@click.argument("sources", metavar="IN...", type=FILE, nargs=-1, required=True)
@click.option(
    "--depth",
    type=click.IntRange(0, 50),
    default=2,
    show_default=True,
    help="How many levels of the tree to show.",
)
@click.option("--portable", is_flag=True, help="Exit with 1 if a checkpoint is not portable.")
@TAG
@LIMIT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def inspect(
    sources: tuple[Path, ...], depth: int, portable: bool, tag: str | None, as_json: bool
) -> None:
    """Show what is in checkpoint IN, where it was saved, and what does not load. The bytes of the
    tensors are not read.

    Portable is what its own library opens on any host: torch.load(weights_only=True), safetensors,
    transformers or torch.distributed.checkpoint. Several INs are a table, or one checkpoint where
    they are the files of all its ranks.
    """
    from ckptconv.inspect import survey_report
    from ckptconv.inspect.surveys import Unread, survey

    with errors_shown(as_json):
        items = list(survey(sources, depth, tag))
        if len(items) == 1 and isinstance(items[0], Unread):
            raise items[0].error
    if as_json and len(items) > 1:
        print_json(survey_report.survey_document(items))
    elif len(items) > 1:
        print_table(survey_report.survey_lines(items, terminal_width()))
    elif not isinstance(items[0], Unread):
        _show_inspection(items[0], as_json)
    unread = any(isinstance(item, Unread) for item in items)
    sys.exit(1 if unread or (portable and not all(map(survey_report.is_portable, items))) else 0)


def _show_inspection(item: Surveyed, as_json: bool) -> None:
    from ckptconv.inspect import report

    if as_json:
        print_json(report.inspection_document(item.found, item.fix))
        return
    portable, text = report.verdict(item.found, item.fix)
    click.secho(printable(", ".join(map(str, item.paths))), bold=True)
    print_lines(report.inspection_lines(item.found))
    for line in report.tree_lines(item.found.root):
        click.echo(f"  {line}")
    click.secho(text, fg="green" if portable else "yellow")


@cli.command(
    cls=FileCommand,
    short_help="Say why a file does not load, and how to fix it.",
    epilog="""\b
Examples:
  ckptconv doctor in.pt
  ckptconv doctor in.pt --values --strict
  ckptconv doctor in.pt --like other.safetensors
  ckptconv doctor in.pt --model my_package.models:build
  ckptconv doctor in.pt --device cuda:0
  ckptconv doctor *.pt
  ckptconv doctor in.pt --json | jq -r '.findings[].command'

Exit code: 0 all load here, 1 one does not (with --strict: or has a warning), \
2 cannot tell: no such file, model or
device.""",
)
@click.argument("sources", metavar="IN...", type=FILE, nargs=-1, required=True)
@click.option(
    "--like",
    metavar="OTHER",
    type=FILE,
    help="Check the keys against this checkpoint, index or list of keys.",
)
@click.option(
    "--model",
    metavar="PACKAGE.MODULE:CALLABLE",
    help="Check the keys against the model that this callable builds. Imports code.",
)
@click.option(
    "--device",
    metavar="TAG",
    shell_complete=offer_devices,
    help="Where you want the tensors: cpu (default), cuda:0, mps, ..., auto.",
)
@click.option(
    "--values", is_flag=True, help="Read the tensors too, to find damage, NaN and infinite values."
)
@click.option(
    "--strict", is_flag=True, help="Exit with 1 for warnings too, such as NaN with --values."
)
@click.option("--size", is_flag=True, help="Also say what a smaller dtype would save.")
@TAG
@LIMIT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def doctor(sources: tuple[Path, ...], as_json: bool, strict: bool, **given: Any) -> None:
    """Say why checkpoint IN does not load on this host, or would disappoint, and which command
    fixes it. Several INs are several checkpoints, or one where they are the files of all its ranks.

    It loads here when its own library opens it: torch.load(weights_only=True), safetensors,
    transformers or torch.distributed.checkpoint.
    """
    from ckptconv.doctor import report
    from ckptconv.doctor.diagnose import diagnose_all

    if given["like"] and given["model"]:
        raise click.UsageError("--like and --model are both given, but the keys can fit only one")
    shown = progress_shown(READING, silent=as_json)
    # a model that is built may print
    with errors_shown(as_json, code=2), redirect_stdout(sys.stderr), shown as on_progress:
        found = diagnose_all(sources, **given, on_progress=on_progress)
        if len(found) == 1 and isinstance(found[0], CheckpointError):
            raise found[0]
    if as_json:
        print_json(report.diagnoses_document(found))
    else:
        for item in found:
            _show_diagnosis(item, strict)
        if len(found) > 1:
            click.echo(report.diagnoses_headline(found, strict=strict))
    sys.exit(report.exit_code(found, strict=strict))


def _show_diagnosis(found: Diagnosis | CheckpointError, strict: bool) -> None:
    from ckptconv.doctor import report

    if isinstance(found, CheckpointError):
        show_error(str(found))
        return
    click.secho(printable(", ".join(found.paths)), bold=True)
    print_lines(report.finding_lines(found.findings))
    color = "red" if not found.loads else "yellow" if strict and found.warns else "green"
    click.secho(report.diagnosis_headline(found, strict=strict), fg=color)


@cli.command(
    short_help="Show the devices of this host, or choose GPUs.",
    epilog="""\b
Examples:
  ckptconv devices
  CUDA_VISIBLE_DEVICES=1 ckptconv devices --json
  eval "$(ckptconv devices --export)"
  ckptconv devices --export --count 2 --min-free 8GB

Exit code of --export: 0 done, or nothing to print because this host has no GPUs; \
1 too few GPUs qualify.""",
)
@click.option(
    "--export",
    is_flag=True,
    help="Print a line that sets CUDA_VISIBLE_DEVICES: the GPUs with the most free memory first.",
)
@click.option(
    "--count", metavar="N", type=click.IntRange(1), help="With --export: choose this many GPUs."
)
@click.option(
    "--min-free",
    metavar="SIZE",
    help="With --export: only GPUs with this much free memory, such as 8GB.",
)
@click.option(
    "--shell",
    type=click.Choice(["sh", "fish", "powershell", "cmd"]),
    help="With --export: for this shell (default: sh).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def devices(export: bool, as_json: bool, **given: Any) -> None:
    """Show the devices of this host with their free memory, or choose the GPUs that a program
    should see.

    CUDA_VISIBLE_DEVICES hides and reorders GPUs, so both numbers are shown.
    """
    if export:
        _export_gpus(as_json, **given)
        return
    if unused := [name for name, value in given.items() if value is not None]:
        raise click.UsageError(f"--{unused[0].replace('_', '-')} needs --export")
    from ckptconv.devices import report
    from ckptconv.devices.host import best_device, survey_host

    with errors_shown(as_json):
        host, best = survey_host(ask_torch=True), best_device()
    if as_json:
        print_json(report.host_document(host, best))
        return
    print_lines([*report.host_lines(host), Row("auto", f"--device auto would choose {best}")])


def _export_gpus(
    as_json: bool, count: int | None, min_free: str | None, shell: Shell | None
) -> None:
    """What a shell evaluates goes to stdout, all else to stderr."""
    from ckptconv.devices import report
    from ckptconv.devices.gpu_choice import choose_gpus, settings
    from ckptconv.formats.hf_names import parse_size

    if as_json and shell:
        raise click.UsageError(
            "--json and --shell are both given, but only one of them can be printed"
        )
    with errors_shown(as_json, code=2):
        size = None if min_free is None else parse_size(min_free)
    with errors_shown(as_json):
        choice = choose_gpus(min_free=size, count=count)
    if as_json:
        print_json(report.choice_document(choice))
        return
    for note in choice.notes:
        click.echo(f"note: {printable(note)}", err=True)
    for line in settings(choice, shell or "sh"):
        click.echo(line)


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
    "--only",
    metavar="PATH",
    shell_complete=offer_parts_of_a,
    help="Compare one part of both, such as state_dict or ema.",
)
@click.option(
    "--only-b",
    metavar="PATH",
    shell_complete=offer_parts_of_b,
    help="The part of B, if it has another path there ('' means all of B).",
)
@click.option(
    "--tag",
    metavar="TAG",
    shell_complete=offer_steps_of_a,
    help="The step or variant to read, if A is a folder of several: step-500, fp16.",
)
@click.option("--tag-b", metavar="TAG", shell_complete=offer_steps_of_b, help="The same for B.")
@click.option(
    "--whole", is_flag=True, help="Compare everything in the files: optimizers and numbers too."
)
@click.option(
    "--atol",
    metavar="NUMBER",
    type=click.FloatRange(min=0),
    help="Absolute tolerance: |a - b| <= atol + rtol * |b|.",
)
@click.option("--rtol", metavar="NUMBER", type=click.FloatRange(min=0), help="Relative tolerance.")
@click.option("--equal-nan", is_flag=True, help="With a tolerance: NaN equals NaN.")
@click.option(
    "--ignore-dtype", is_flag=True, help="Compare tensors of different dtypes by their values."
)
@click.option("--strict-device", is_flag=True, help="Count different device tags as a difference.")
@LIMIT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; only the exit code answers.")
def diff(a: Path, b: Path, as_json: bool, quiet: bool, **given: Any) -> None:
    """Compare the state dicts of checkpoints A and B, which may have different formats.

    Keys, dtypes, shapes and device tags are compared, and the values bit for bit, unless you give a
    tolerance. Key rules apply to the keys of A."""
    from ckptconv.diff import report as verdicts
    from ckptconv.diff.checkpoints import diff_checkpoints

    with (
        errors_shown(as_json, code=2),
        progress_shown(COMPARING, silent=as_json or quiet) as on_progress,
    ):
        found = diff_checkpoints(a, b, **comparison(given), on_progress=on_progress)
    if as_json:
        print_json(verdicts.difference_document(found))
    elif not quiet:
        print_headline(verdicts.difference_headline(found), fg="green" if found.same else "yellow")
        print_lines(verdicts.difference_lines(found))
    sys.exit(2 if found.damaged else 0 if found.same else 1)


@cli.command(
    short_help="Say whether a file is safe to load.",
    epilog="""\b
Examples:
  ckptconv scan downloaded.pt
  ckptconv scan models/ --strict
  ckptconv scan a.pkl b.zip --json

Exit code: 0 nothing dangerous, 1 something dangerous (with --strict: or unknown), \
2 a path cannot be read.
Unknown: names that ordinary checkpoints do not have, and files that cannot be searched: \
gzip, bzip2, xz, 7z, ...""",
)
@click.argument("paths", metavar="PATH...", type=FILE, nargs=-1, required=True)
@click.option("--strict", is_flag=True, help="Exit with 1 also if something is unknown.")
@LIMIT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; only the exit code answers.")
def scan(paths: tuple[Path, ...], strict: bool, as_json: bool, quiet: bool) -> None:
    """Say whether the files and folders at PATH are safe to load.

    Every global that a pickle names is plain, unknown or dangerous. Archives, and pickles inside
    pickles, are searched too. Nothing is executed.
    """
    from ckptconv.convert.error_document import error_document
    from ckptconv.scan import report as scan_report
    from ckptconv.scan.files import scan_checkpoint

    found: list[Scan | CheckpointError] = []
    for path in paths:
        try:
            with progress_shown(SCANNING, silent=as_json or quiet) as on_progress:
                item = scan_checkpoint(path, on_progress=on_progress)
        except CheckpointError as error:
            found.append(error)
            continue
        found.append(item)
        if not (as_json or quiet):
            color = {"plain": "green", "unknown": "yellow", "dangerous": "red"}[item.level]
            click.secho(scan_report.scan_headline(item), fg=color, bold=True)
            print_lines(scan_report.scan_lines(item))
    errors = [item for item in found if isinstance(item, CheckpointError)]
    levels = ["unread" if isinstance(item, CheckpointError) else item.level for item in found]
    if as_json:
        failed = [error_document(error, 2)["error"] for error in errors]
        first = {"error": failed[0]} if failed else {}
        print_json(
            {
                "scans": [
                    scan_report.scan_document(item)
                    for item in found
                    if not isinstance(item, CheckpointError)
                ],
                "errors": failed,
                **first,
            }
        )
    elif len(found) > 1 and not quiet:
        click.echo(scan_report.scans_headline(levels))
    for unread in errors:
        show_error(str(unread))
    refused = {"dangerous", "unknown"} if strict else {"dangerous"}
    sys.exit(2 if errors else 1 if refused.intersection(levels) else 0)


@cli.command(
    "help",
    short_help="Show a page of the documentation.",
    epilog="""\b\nExamples:\n  ckptconv help\n  ckptconv help pipelines\n  ckptconv help convert""",
)
@click.argument(
    "topic", required=False, shell_complete=lambda ctx, _, start: _help_names(ctx, start)
)
@click.pass_context
def show_help(ctx: click.Context, topic: str | None) -> None:
    """Show a page of the documentation or the help of a command. Without TOPIC, list the pages."""
    from ckptconv.cli import help_pages

    if topic is None:
        click.echo("Pages (ckptconv help TOPIC):")
        print_lines(Row(name, text) for name, text in help_pages.topics().items())
        click.echo(
            "Commands are listed by ckptconv --help; ckptconv help COMMAND shows the options of "
            "one."
        )
    elif topic in cli.commands:
        with click.Context(cli.commands[topic], info_name=topic, parent=ctx.parent) as context:
            click.echo(cli.commands[topic].get_help(context))
    elif (text := help_pages.page_text(topic)) is not None:
        show_page(text)
    else:
        near = help_pages.near_matches(topic, list(cli.commands))
        meant = f"did you mean {' or '.join(near)}" if near else "ckptconv help lists the topics"
        fail(f"there is no help on '{printable(topic)}'; {meant}", 2)


def _help_names(ctx: click.Context, start: str) -> list[str]:
    from ckptconv.cli.help_pages import topics

    return [name for name in [*topics(), *cli.commands] if name.startswith(start)]


def _convert(given: dict[str, Any], wrappers: str) -> None:
    from ckptconv.convert.planner import plan_conversion
    from ckptconv.convert.targets import keeps_modules
    from ckptconv.formats.registry import open_checkpoint
    from ckptconv.support.choices import refuse_no_output

    refuse_missing(given)
    spool = spooled() if is_for_stdout(given) else nullcontext(given["output"])
    with errors_shown(given["as_json"], usage=True):
        options = options_of(given, wrappers)
    with errors_shown(given["as_json"]), spool as output:
        refuse_no_output(
            **{
                name: path
                for name in ("output", "save_mapping")
                if (path := given[name]) is not None
            }
        )
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


def _refused_output(given: dict[str, Any], options: Request) -> OutputRefused | None:
    """Why an output could not be written, as far as it can be told before all are known; shards are
    looked at when they are.
    """
    from ckptconv.convert.targets import check_place
    from ckptconv.io.destination import check_output

    try:
        if options.max_shard_size is None:
            check_place(given["output"], given["to"], force=given["force"])
        if given["save_mapping"] is not None:
            check_output(given["save_mapping"], force=given["force"])
    except OutputRefused as error:
        return error
    return None


def _show_plan(plan: ConversionPlan, given: dict[str, Any], refused: OutputRefused | None) -> None:
    """What would be done; where the output is `refused`, that too, and the exit code is the
    conversion's.
    """
    from ckptconv.convert import report
    from ckptconv.convert.error_document import error_document

    if given["as_json"]:
        error = {} if refused is None else error_document(refused, 1)
        print_json({"dry_run": True, **report.plan_document(plan), **error})
    elif not given["quiet"]:
        print_summary(report.plan_headline(_as_named(plan, given)), report.plan_lines(plan))
        print_rows(report.keys_table(plan), err=True)
    if refused is not None:
        fail(str(refused), 1)


def _execute(plan: ConversionPlan, given: dict[str, Any]) -> None:
    from ckptconv.convert import report
    from ckptconv.convert.execute import execute_plan, hand_over_plan

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
    """The program: one line per error, exit codes 0 (done), 1 (refused or failed), 2 (usage), 130
    and 143 (stopped).
    """
    import gc

    # one command and the process ends: a tree of a million nodes is not garbage, and looking costs
    # a tenth
    gc.disable()
    stop_in_good_order()
    fill_closed_streams()
    take_any_text()
    as_json = is_json_asked(sys.argv[1:])
    try:
        cli.main(_arguments(), prog_name="ckptconv", standalone_mode=False, color=colors())
        sys.stdout.flush()
        _stop_if_missed(as_json)
    except click.UsageError as error:
        program = error.ctx.command_path if error.ctx else "ckptconv"
        what = printable(error.format_message(), 2000).rstrip(".")
        stop("UsageError", what, 2, as_json=as_json, hint=f"see {program} --help")
    except click.ClickException as error:
        stop(type(error).__name__, printable(error.format_message(), 2000), 1, as_json=as_json)
    except (KeyboardInterrupt, click.Abort):
        stop("Interrupted", "interrupted; no unfinished file was left behind", 130, as_json=as_json)
    except SystemExit as stopped:
        if not stopped.code:
            _stop_if_missed(as_json)
        if as_json and stopped.code in (129, 143):  # SIGHUP, SIGTERM
            print_ending_json(
                "Interrupted",
                "stopped by a signal; no unfinished file was left behind",
                int(stopped.code),
            )
        raise
    except OSError as error:
        if error.filename is None:
            stop_unprinted(error, 1)
        stop(
            type(error).__name__,
            f"{printable(str(error.filename))}: {error.strerror}",
            1,
            as_json=as_json,
        )
    except (
        Exception
    ) as error:  # a defect: its traceback is shown, and who reads the document learns of it too
        if as_json:
            print_ending_json(
                type(error).__name__, printable(str(error) or "an unexpected error", 2000), 1
            )
        raise


def _stop_if_missed(as_json: bool) -> None:
    if (code := missed_stop()) is not None:
        stop(
            "Interrupted",
            "stopped by a signal, but too late: the command had come to its end",
            code,
            as_json=as_json,
        )


def _arguments() -> list[str]:
    """The command line; without any the help is shown, and that is a usage error."""
    if len(sys.argv) > 1 or "_CKPTCONV_COMPLETE" in os.environ:
        return sys.argv[1:]
    with click.Context(cli, info_name="ckptconv") as context:
        click.echo(cli.get_help(context), err=True)
    sys.exit(2)
