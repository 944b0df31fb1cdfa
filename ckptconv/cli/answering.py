"""The commands whose exit code is an answer: inspect, doctor, diff, scan."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptconv.cli import terminal
from ckptconv.cli.asked import comparison
from ckptconv.cli.commands import command, option
from ckptconv.cli.completion import (
    offer_devices,
    offer_parts,
    offer_parts_of_b,
    offer_steps,
    offer_steps_of_b,
)
from ckptconv.cli.options import (
    ANSWER_ALONE,
    DEQUANTIZE,
    FILE,
    JSON,
    LIMIT,
    NEW_FILE,
    TAG,
    choice_options,
    key_options,
)
from ckptconv.cli.progress_display import COMPARING, READING, SCANNING, progress_shown
from ckptconv.support.errors import CheckpointError, printable
from ckptconv.support.report import LISTED, Row, error_document, note_rows

if TYPE_CHECKING:
    from ckptconv.diff.report import Difference
    from ckptconv.doctor.report import Diagnosis
    from ckptconv.inspect.facts import Surveyed
    from ckptconv.scan.files import Scan


@command(
    """
  ckptconv inspect in.pt
  ckptconv inspect in.safetensors --depth 4
  ckptconv inspect in.pt --json | jq .portable
  ckptconv inspect --portable *.safetensors *.pt

Exit code: 0 shown, 1 one cannot be opened (with --portable: or is not portable), \
2 wrong usage.""",
)
@click.argument("sources", metavar="IN...", type=FILE, nargs=-1, required=True)
@option("--depth N", "How many levels of the tree to show.", click.IntRange(0, 50), default=2)
@option("--portable", "Exit with 1 if a checkpoint is not portable.")
@TAG
@LIMIT
@JSON
def inspect(
    sources: tuple[Path, ...], depth: int, portable: bool, tag: str | None, as_json: bool
) -> None:
    """Show what is in checkpoint IN, where it was saved, and what does not load. The bytes of the
    tensors are not read.

    A checkpoint is portable if its own library opens it on any host: torch.load(weights_only=True),
    safetensors, numpy.load, transformers or torch.distributed.checkpoint. Several INs are shown as
    a table, or as one checkpoint if they are the files of all its ranks.
    """
    from ckptconv.inspect import report
    from ckptconv.inspect.facts import Unread, survey

    with terminal.errors_shown(as_json):
        items = list(survey(sources, depth, tag, in_table=not as_json))
        if len(items) == 1 and isinstance(items[0], Unread):
            raise items[0].error
    if as_json and len(items) > 1:
        terminal.print_json(report.survey_document(items))
    elif len(items) > 1:
        terminal.print_table(report.survey_lines(items, terminal.width()))
    elif not isinstance(items[0], Unread):
        _show_inspection(items[0], as_json)
    if any(isinstance(item, Unread) for item in items):
        sys.exit(1)
    sys.exit(int(portable and not all(map(report.is_portable, items))))


def _show_inspection(item: Surveyed, as_json: bool) -> None:
    from ckptconv.inspect import report

    if as_json:
        terminal.print_json(report.inspection_document(item.found, item.fix))
        return
    fg = "green" if item.found.portable else "yellow"
    said, fix = report.verdict_and_command(item.found, item.fix)
    terminal.print_headline(printable(", ".join(map(str, item.paths))))
    terminal.print_lines(report.inspection_lines(item.found))
    tree = report.tree_lines(item.found.root, terminal.width() - 2)
    terminal.print_table(tree, indent="  ")
    terminal.print_headline(said, fg=fg, bold=None)
    if fix:
        terminal.print_headline(f"Fix: {fix}", fg=fg, bold=None, is_command=True)


@command(
    """
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
@option(
    "--like OTHER",
    "Check the keys against this checkpoint, index or list of keys.",
    FILE,
    section="Keys",
)
@option(
    "--model PACKAGE.MODULE:CALLABLE",
    "Check the keys against the model that this callable builds. Imports code.",
    section="Keys",
)
@option(
    "--device DEVICE",
    "Where you want the tensors: cpu (default), cuda:0, mps, ..., auto.",
    shell_complete=offer_devices,
    section="Values",
)
@option("--values", "Read the tensors too, to find damage, NaN and infinite values.")
@option("--strict", "Exit with 1 for warnings too, such as NaN with --values.")
@option("--size", "Also say what a smaller dtype would save.")
@TAG
@LIMIT
@JSON
def doctor(sources: tuple[Path, ...], as_json: bool, strict: bool, **given: Any) -> None:
    """Say why checkpoint IN does not load on this host, or would not work as expected, and which
    command fixes it. Several INs are several checkpoints, or one if they are the files of all its
    ranks.

    A checkpoint loads here if its own library opens it: torch.load(weights_only=True), safetensors,
    numpy.load, transformers or torch.distributed.checkpoint.
    """
    from ckptconv.doctor import report
    from ckptconv.doctor.diagnose import diagnose_all

    if given["like"] and given["model"]:
        raise click.UsageError("--like and --model are both given, but the keys can fit only one")
    shown = progress_shown(READING, silent=as_json)
    # a model that is built may print
    with terminal.errors_shown(as_json, code=2), redirect_stdout(sys.stderr), shown as on_progress:
        diagnoses = diagnose_all(sources, **given, on_progress=on_progress)
        if len(diagnoses) == 1 and isinstance(diagnoses[0], CheckpointError):
            raise diagnoses[0]
    if as_json:
        terminal.print_json(report.diagnoses_document(diagnoses))
    else:
        for item in diagnoses:
            _show_diagnosis(item, strict, given["values"])
        if len(diagnoses) > 1:
            click.echo(report.diagnoses_headline(diagnoses, strict=strict))
    sys.exit(report.exit_code(diagnoses, strict=strict))


def _show_diagnosis(diagnosis: Diagnosis | CheckpointError, strict: bool, values: bool) -> None:
    from ckptconv.doctor import report

    if isinstance(diagnosis, CheckpointError):
        terminal.show_error(str(diagnosis))
        return
    terminal.print_headline(printable(", ".join(diagnosis.paths)))
    terminal.print_lines([*report.finding_lines(diagnosis.findings), *note_rows(diagnosis.notes)])
    color = "green"
    if not diagnosis.loads:
        color = "red"
    elif strict and diagnosis.warns:
        color = "yellow"
    headline = report.diagnosis_headline(diagnosis, strict=strict, values=values)
    terminal.print_headline(headline, fg=color, bold=None)


@command(
    """
  ckptconv diff model.pt model.safetensors
  ckptconv diff ddp_cuda3.pt model.pt --keys strip
  ckptconv diff epoch1.pt epoch2.pt --atol 1e-6 --rtol 1e-5
  ckptconv diff model.pt model_bf16.safetensors --ignore-dtype --rtol 0.01
  ckptconv diff zero3_run/ model.safetensors --tag global_step500
  ckptconv diff old.pt new.pt --whole --json
  ckptconv diff epoch1.pt epoch2.pt --html diff.html

Exit code: 0 same, 1 different, 2 wrong usage, or a file that is damaged or cannot be compared.""",
)
@click.argument("a", metavar="A", type=FILE)
@click.argument("b", metavar="B", type=FILE)
@key_options("keep")
@choice_options
@option(
    "--only PATH",
    "Compare one part of both, such as state_dict or ema.",
    shell_complete=offer_parts,
    section="Parts",
)
@option(
    "--only-b PATH",
    "The part of B, if it has another path there ('' means all of B).",
    shell_complete=offer_parts_of_b,
    section="Parts",
)
@option(
    "--tag STEP",
    "The step or variant to read, if A is a folder of several: step-500, fp16.",
    shell_complete=offer_steps,
    section="Parts",
)
@option("--tag-b STEP", "The same for B.", shell_complete=offer_steps_of_b, section="Parts")
@option("--whole", "Compare everything in the files: optimizers and numbers too.", section="Parts")
@option(
    "--atol NUMBER",
    "Absolute tolerance: |a - b| <= atol + rtol * |b|.",
    click.FloatRange(min=0),
    section="Values",
)
@option("--rtol NUMBER", "Relative tolerance.", click.FloatRange(min=0), section="Values")
@option("--equal-nan", "With a tolerance: NaN equals NaN.", section="Values")
@option("--ignore-dtype", "Compare tensors of different dtypes by their values.", section="Values")
@DEQUANTIZE
@option("--strict-device", "Count different device tags as a difference.", section="Values")
@option("--all", "Show all keys that differ, not the first 20 of a kind.", section="Output")
@option(
    "--html FILE", "Also write a page to look at (ckptconv report).", NEW_FILE, section="Output"
)
@option("-f --force", "With --html: replace a file that exists.", section="Safety")
@LIMIT
@JSON
@ANSWER_ALONE
def diff(
    a: Path, b: Path, html: Path | None, force: bool, as_json: bool, quiet: bool, **given: Any
) -> None:
    """Compare the state dicts of checkpoints A and B, which may have different formats.

    Keys, dtypes, shapes and device tags are compared, and the values bit for bit, unless you give a
    tolerance. Key rules apply to the keys of A; globs, and --keys strip without other
    rules, to both.

    Each key that differs is a line, the worst first. rel L2 is ||a - b|| / ||b||.
    """
    from ckptconv.diff import report

    most = None if given.pop("all") else LISTED
    if force and html is None:
        raise click.UsageError("--force needs --html")
    shown = progress_shown(COMPARING, silent=as_json or quiet)
    with terminal.errors_shown(as_json, code=2), shown as on_progress:
        difference = _difference(a, b, html, force, **comparison(given), on_progress=on_progress)
    if as_json:
        terminal.print_json(report.DIFFERENCE.of(difference))
    elif not quiet:
        terminal.print_verdict(report.difference_headline(difference), good=difference.same)
        table = report.difference_table(difference, most=most)
        terminal.print_table(table.lines(terminal.width() - 2), indent="  ")
        terminal.print_lines(report.difference_rows(difference))
        if html is not None:
            terminal.print_lines([Row("page", printable(html))])
    if difference.damaged:
        sys.exit(2)
    sys.exit(int(not difference.same))


def _difference(a: Path, b: Path, html: Path | None, force: bool, **given: Any) -> Difference:
    """The differences, of which a page is written where one is asked for."""
    if html is None:
        from ckptconv.diff.checkpoints import diff_checkpoints

        return diff_checkpoints(a, b, **given)
    from ckptconv.pages.make import report_difference

    return report_difference(a, b, html, force=force, **given)[1]


@command(
    """
  ckptconv scan downloaded.pt
  ckptconv scan models/ --strict
  ckptconv scan a.pkl b.zip --json

Exit code: 0 nothing dangerous, 1 something dangerous (with --strict: or unknown), \
2 a path cannot be read.
Unknown: names that ordinary checkpoints do not have, and files that cannot be searched: \
gzip, bzip2, xz, 7z, ...""",
)
@click.argument("paths", metavar="PATH...", type=FILE, nargs=-1, required=True)
@option("--strict", "Exit with 1 also if something is unknown.")
@LIMIT
@JSON
@ANSWER_ALONE
def scan(paths: tuple[Path, ...], strict: bool, as_json: bool, quiet: bool) -> None:
    """Say whether the files and folders at PATH are safe to load.

    Every global that a pickle names is plain, unknown or dangerous. Archives, and pickles inside
    pickles, are searched too. Nothing is executed.
    """
    from ckptconv.scan import files as report

    scans: list[Scan] = []
    errors: list[CheckpointError] = []
    for path in paths:
        try:
            with progress_shown(SCANNING, silent=as_json or quiet) as on_progress:
                item = report.scan_checkpoint(path, on_progress=on_progress)
        except CheckpointError as error:
            errors.append(error)
            continue
        scans.append(item)
        # at once: a scan of many files takes long, and what it found so far may be enough
        if not (as_json or quiet):
            color = {"plain": "green", "unknown": "yellow", "dangerous": "red"}[item.level]
            terminal.print_headline(report.scan_headline(item), fg=color)
            terminal.print_lines(report.scan_lines(item))
    levels = [*(item.level for item in scans), *("unread" for _ in errors)]
    if as_json:
        failed = [error_document(error, 2)["error"] for error in errors]
        document = {"scans": list(map(report.SCAN.of, scans)), "errors": failed}
        # the first one also where all commands have theirs
        terminal.print_json(document | dict(zip(["error"], failed, strict=False)))
    elif len(levels) > 1 and not quiet:
        click.echo(report.scans_headline(levels))
    for unread in errors:
        terminal.show_error(str(unread))
    if errors:
        sys.exit(2)
    sys.exit(int("dangerous" in levels or (strict and "unknown" in levels)))
