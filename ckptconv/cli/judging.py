"""The commands whose exit code is the answer: diff, scan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptconv.cli.completion import (
    offer_parts_of_a,
    offer_parts_of_b,
    offer_steps_of_a,
    offer_steps_of_b,
)
from ckptconv.cli.options import (
    FILE,
    JSON,
    LIMIT,
    NEW_FILE,
    RuleCommand,
    choice_options,
    comparison,
    key_options,
    option,
)
from ckptconv.cli.progress_display import COMPARING, SCANNING, progress_shown
from ckptconv.cli.terminal import errors_shown, print_headline, print_json, print_lines, show_error
from ckptconv.support.errors import CheckpointError, printable
from ckptconv.support.report import Row, error_document

if TYPE_CHECKING:
    from ckptconv.diff.report import Difference
    from ckptconv.scan.files import Scan


@click.command(
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
  ckptconv diff epoch1.pt epoch2.pt --html diff.html

Exit code: 0 same, 1 different, 2 wrong usage, or a file that is damaged or cannot be compared.""",
)
@click.argument("a", metavar="A", type=FILE)
@click.argument("b", metavar="B", type=FILE)
@choice_options
@key_options("keep")
@option(
    "--only PATH",
    "Compare one part of both, such as state_dict or ema.",
    shell_complete=offer_parts_of_a,
)
@option(
    "--only-b PATH",
    "The part of B, if it has another path there ('' means all of B).",
    shell_complete=offer_parts_of_b,
)
@option(
    "--tag TAG",
    "The step or variant to read, if A is a folder of several: step-500, fp16.",
    shell_complete=offer_steps_of_a,
)
@option("--tag-b TAG", "The same for B.", shell_complete=offer_steps_of_b)
@option("--whole", "Compare everything in the files: optimizers and numbers too.")
@option(
    "--atol NUMBER", "Absolute tolerance: |a - b| <= atol + rtol * |b|.", click.FloatRange(min=0)
)
@option("--rtol NUMBER", "Relative tolerance.", click.FloatRange(min=0))
@option("--equal-nan", "With a tolerance: NaN equals NaN.")
@option("--ignore-dtype", "Compare tensors of different dtypes by their values.")
@option("--strict-device", "Count different device tags as a difference.")
@option("--html FILE", "Also write a page to look at (ckptconv report).", NEW_FILE)
@option("-f --force", "With --html: replace a file that exists.")
@LIMIT
@JSON
@option("-q --quiet", "Print nothing; only the exit code answers.")
def diff(
    a: Path,
    b: Path,
    html: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Compare the state dicts of checkpoints A and B, which may have different formats.

    Keys, dtypes, shapes and device tags are compared, and the values bit for bit, unless you give a
    tolerance. Key rules apply to the keys of A."""
    from ckptconv.diff import report as verdicts

    if force and html is None:
        raise click.UsageError("--force needs --html")
    with (
        errors_shown(as_json, code=2),
        progress_shown(COMPARING, silent=as_json or quiet) as on_progress,
    ):
        difference = _difference(a, b, html, force, **comparison(given), on_progress=on_progress)
    if as_json:
        print_json(verdicts.DIFFERENCE.of(difference))
    elif not quiet:
        print_headline(
            verdicts.difference_headline(difference), fg="green" if difference.same else "yellow"
        )
        print_lines(verdicts.difference_lines(difference))
        if html is not None:
            print_lines([Row("page", printable(html))])
    if difference.damaged:
        sys.exit(2)
    sys.exit(0 if difference.same else 1)


def _difference(a: Path, b: Path, html: Path | None, force: bool, **given: Any) -> Difference:
    """The differences, of which a page is written where one is asked for."""
    if html is None:
        from ckptconv.diff.checkpoints import diff_checkpoints

        return diff_checkpoints(a, b, **given)
    from ckptconv.pages.make import report_difference

    return report_difference(a, b, html, force=force, **given)[1]


@click.command(
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
@option("--strict", "Exit with 1 also if something is unknown.")
@LIMIT
@JSON
@option("-q --quiet", "Print nothing; only the exit code answers.")
def scan(paths: tuple[Path, ...], strict: bool, as_json: bool, quiet: bool) -> None:
    """Say whether the files and folders at PATH are safe to load.

    Every global that a pickle names is plain, unknown or dangerous. Archives, and pickles inside
    pickles, are searched too. Nothing is executed.
    """
    from ckptconv.scan import report as scan_report
    from ckptconv.scan.files import scan_checkpoint

    scans: list[Scan | CheckpointError] = []
    for path in paths:
        try:
            with progress_shown(SCANNING, silent=as_json or quiet) as on_progress:
                item = scan_checkpoint(path, on_progress=on_progress)
        except CheckpointError as error:
            scans.append(error)
            continue
        scans.append(item)
        if not (as_json or quiet):
            color = {"plain": "green", "unknown": "yellow", "dangerous": "red"}[item.level]
            click.secho(scan_report.scan_headline(item), fg=color, bold=True)
            print_lines(scan_report.scan_lines(item))
    errors = [item for item in scans if isinstance(item, CheckpointError)]
    levels = ["unread" if isinstance(item, CheckpointError) else item.level for item in scans]
    if as_json:
        failed = [error_document(error, 2)["error"] for error in errors]
        first = {"error": failed[0]} if failed else {}
        print_json(
            {
                "scans": [
                    scan_report.SCAN.of(item)
                    for item in scans
                    if not isinstance(item, CheckpointError)
                ],
                "errors": failed,
                **first,
            }
        )
    elif len(scans) > 1 and not quiet:
        click.echo(scan_report.scans_headline(levels))
    for unread in errors:
        show_error(str(unread))
    refused = {"dangerous", "unknown"} if strict else {"dangerous"}
    if errors:
        sys.exit(2)
    sys.exit(1 if refused.intersection(levels) else 0)
