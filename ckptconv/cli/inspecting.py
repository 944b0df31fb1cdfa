"""The commands that look at one checkpoint: inspect, doctor."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptconv.cli.completion import offer_devices
from ckptconv.cli.options import FILE, JSON, LIMIT, TAG, FileCommand, option
from ckptconv.cli.progress_display import READING, progress_shown
from ckptconv.cli.terminal import (
    errors_shown,
    print_json,
    print_lines,
    print_table,
    show_error,
    terminal_width,
)
from ckptconv.support.errors import CheckpointError, printable

if TYPE_CHECKING:
    from ckptconv.doctor.report import Diagnosis
    from ckptconv.inspect.facts import Surveyed


@click.command(
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
@option("--depth", "How many levels of the tree to show.", click.IntRange(0, 50), default=2)
@option("--portable", "Exit with 1 if a checkpoint is not portable.")
@TAG
@LIMIT
@JSON
def inspect(
    sources: tuple[Path, ...], depth: int, portable: bool, tag: str | None, as_json: bool
) -> None:
    """Show what is in checkpoint IN, where it was saved, and what does not load. The bytes of the
    tensors are not read.

    Portable is what its own library opens on any host: torch.load(weights_only=True), safetensors,
    numpy.load, transformers or torch.distributed.checkpoint. Several INs are a table, or one
    checkpoint where they are the files of all its ranks.
    """
    from ckptconv.inspect import report
    from ckptconv.inspect.facts import Unread, survey

    with errors_shown(as_json):
        items = list(survey(sources, depth, tag, in_table=not as_json))
        if len(items) == 1 and isinstance(items[0], Unread):
            raise items[0].error
    if as_json and len(items) > 1:
        print_json(report.survey_document(items))
    elif len(items) > 1:
        print_table(report.survey_lines(items, terminal_width()))
    elif not isinstance(items[0], Unread):
        _show_inspection(items[0], as_json)
    unread = any(isinstance(item, Unread) for item in items)
    sys.exit(1 if unread or (portable and not all(map(report.is_portable, items))) else 0)


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


@click.command(
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
@option("--like OTHER", "Check the keys against this checkpoint, index or list of keys.", FILE)
@option(
    "--model PACKAGE.MODULE:CALLABLE",
    "Check the keys against the model that this callable builds. Imports code.",
)
@option(
    "--device TAG",
    "Where you want the tensors: cpu (default), cuda:0, mps, ..., auto.",
    shell_complete=offer_devices,
)
@option("--values", "Read the tensors too, to find damage, NaN and infinite values.")
@option("--strict", "Exit with 1 for warnings too, such as NaN with --values.")
@option("--size", "Also say what a smaller dtype would save.")
@TAG
@LIMIT
@JSON
def doctor(sources: tuple[Path, ...], as_json: bool, strict: bool, **given: Any) -> None:
    """Say why checkpoint IN does not load on this host, or would disappoint, and which command
    fixes it. Several INs are several checkpoints, or one where they are the files of all its ranks.

    It loads here when its own library opens it: torch.load(weights_only=True), safetensors,
    numpy.load, transformers or torch.distributed.checkpoint.
    """
    from ckptconv.doctor import report
    from ckptconv.doctor.diagnose import diagnose_all

    if given["like"] and given["model"]:
        raise click.UsageError("--like and --model are both given, but the keys can fit only one")
    shown = progress_shown(READING, silent=as_json)
    # a model that is built may print
    with errors_shown(as_json, code=2), redirect_stdout(sys.stderr), shown as on_progress:
        diagnoses = diagnose_all(sources, **given, on_progress=on_progress)
        if len(diagnoses) == 1 and isinstance(diagnoses[0], CheckpointError):
            raise diagnoses[0]
    if as_json:
        print_json(report.diagnoses_document(diagnoses))
    else:
        for item in diagnoses:
            _show_diagnosis(item, strict, given["values"])
        if len(diagnoses) > 1:
            click.echo(report.diagnoses_headline(diagnoses, strict=strict))
    sys.exit(report.exit_code(diagnoses, strict=strict))


def _show_diagnosis(diagnosis: Diagnosis | CheckpointError, strict: bool, values: bool) -> None:
    from ckptconv.doctor import report

    if isinstance(diagnosis, CheckpointError):
        show_error(str(diagnosis))
        return
    click.secho(printable(", ".join(diagnosis.paths)), bold=True)
    print_lines(report.finding_lines(diagnosis.findings))
    color = "green"
    if not diagnosis.loads:
        color = "red"
    elif strict and diagnosis.warns:
        color = "yellow"
    click.secho(report.diagnosis_headline(diagnosis, strict=strict, values=values), fg=color)
