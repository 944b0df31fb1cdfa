"""The command about the devices of this host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptconv.cli import terminal
from ckptconv.cli.commands import command, option
from ckptconv.cli.options import JSON
from ckptconv.support.errors import printable
from ckptconv.support.report import Row

if TYPE_CHECKING:
    from ckptconv.devices.gpu_choice import Shell


@command(
    """
  ckptconv devices
  CUDA_VISIBLE_DEVICES=1 ckptconv devices --json
  eval "$(ckptconv devices --export)"
  ckptconv devices --export --count 2 --min-free 8GB

Exit code of --export: 0 done, or nothing to print because this host has no GPUs; \
1 too few GPUs qualify.""",
)
@option(
    "--export",
    "Print a line that sets CUDA_VISIBLE_DEVICES: the GPUs with the most free memory first.",
)
@option("--count N", "With --export: choose this many GPUs.", click.IntRange(1))
@option("--min-free SIZE", "With --export: only GPUs with this much free memory, such as 8GB.")
@option(
    "--shell", "With --export: for this shell (default: sh).", ["sh", "fish", "powershell", "cmd"]
)
@JSON
def devices(export: bool, as_json: bool, **given: Any) -> None:
    """Show the devices of this host with their free memory, or choose the GPUs that a program
    should see.

    CUDA_VISIBLE_DEVICES hides and reorders GPUs, so both numbers are shown.
    """
    if export:
        _export_gpus(as_json, **given)
        return
    unused = [name for name, value in given.items() if value is not None]
    if unused:
        raise click.UsageError(f"--{unused[0].replace('_', '-')} needs --export")
    from ckptconv.devices import report
    from ckptconv.devices.host import best_device, survey_host

    with terminal.errors_shown(as_json):
        host, best = survey_host(ask_torch=True), best_device()
    if as_json:
        terminal.print_json(report.host_document(host, best))
        return
    terminal.print_lines(
        [*report.host_lines(host), Row("auto", f"--device auto would choose {best}")]
    )


def _export_gpus(
    as_json: bool, count: int | None, min_free: str | None, shell: Shell | None
) -> None:
    """What a shell evaluates goes to stdout, all else to stderr."""
    from ckptconv.devices import report
    from ckptconv.devices.gpu_choice import choose_gpus, settings
    from ckptconv.support.text import parse_size

    if as_json and shell:
        raise click.UsageError(
            "--json and --shell are both given, but only one of them can be printed"
        )
    with terminal.errors_shown(as_json, code=2):  # what is not a size is wrong usage
        size = None if min_free is None else parse_size(min_free)
    with terminal.errors_shown(as_json):
        choice = choose_gpus(min_free=size, count=count)
    if as_json:
        terminal.print_json(report.CHOICE.of(choice))
        return
    for note in choice.notes:
        click.echo(f"note: {printable(note)}", err=True)
    for line in settings(choice, shell or "sh"):
        click.echo(line)
