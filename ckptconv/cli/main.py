"""The command line: parse, call, render.

What it does is in the library; what it says is in the reports.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

import click

from ckptconv import __version__
from ckptconv.cli import terminal
from ckptconv.io.files import one_run
from ckptconv.support.errors import (
    OUT_OF_MEMORY,
    CheckpointWarning,
    is_out_of_memory,
    on_command_line,
    printable,
)
from ckptconv.support.report import Row
from ckptconv.support.signals import missed_stop, stop_in_good_order

COMMANDS = {
    "convert": "converting",
    "strip-module": "converting",
    "add-module": "converting",
    "inspect": "answering",
    "doctor": "answering",
    "devices": "host_devices",
    "diff": "answering",
    "scan": "answering",
    "stats": "viewing",
    "report": "viewing",
    "show": "viewing",
    "merge": "converting",
    "average": "converting",
    "edit": "editing",
    "cleanup": "cleaning",
    "batch": "batching",
}
"""The commands, and the module of `ckptconv.cli` that has each, under the command's name."""


class Program(click.Group):
    """A group of commands whose answer must arrive: one that is not printed is an error.

    A command's module is imported when the command is asked for.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*COMMANDS, *self.commands])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"ckptconv.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        terminal.begin_traffic()
        try:
            try:
                with on_command_line():
                    return super().invoke(ctx)
            finally:
                if not terminal.is_asked(*terminal.SILENT):
                    terminal.tell_traffic()
                # here, for the interpreter's own flush would come too late to tell
                sys.stdout.flush()
        except (terminal.Unprinted, OSError) as error:
            if isinstance(error, OSError) and error.filename is not None:
                raise
            terminal.stop_unprinted(
                error, 2 if COMMANDS.get(str(ctx.invoked_subcommand)) == "answering" else 1
            )


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
        terminal.print_lines(Row(name, text) for name, text in help_pages.topics().items())
        click.echo(
            "Commands are listed by ckptconv --help; ckptconv help COMMAND shows the options of "
            "one."
        )
    elif (command := cli.get_command(ctx, topic)) is not None:
        with click.Context(command, info_name=topic, parent=ctx.parent) as context:
            click.echo(command.get_help(context))
    elif (text := help_pages.page_text(topic)) is not None:
        terminal.show_page(text)
    else:
        near = help_pages.near_matches(topic, cli.list_commands(ctx))
        meant = f"did you mean {' or '.join(near)}" if near else "ckptconv help lists the topics"
        terminal.fail(f"there is no help on '{printable(topic)}'; {meant}", 2)


def _help_names(ctx: click.Context, start: str) -> list[str]:
    from ckptconv.cli.help_pages import topics

    return [name for name in [*topics(), *cli.list_commands(ctx)] if name.startswith(start)]


def main() -> None:
    """The program: one line per error, and exit codes.

    They are 0 (done), 1 (refused or failed), 2 (usage), 130 and 143 (stopped).
    """
    import gc

    # one command and the process ends: a tree of a million nodes is not garbage, and looking costs
    # a tenth
    gc.disable()
    stop_in_good_order()
    terminal.fill_closed_streams()
    terminal.take_any_text()
    try:
        with one_run(), warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # notes say the same
            cli.main(
                _arguments(), prog_name="ckptconv", standalone_mode=False, color=terminal.colors()
            )
        sys.stdout.flush()
        _stop_if_missed()
    except click.UsageError as error:
        program = error.ctx.command_path if error.ctx else "ckptconv"
        what = printable(error.format_message(), 2000).rstrip(".")
        terminal.stop("UsageError", what, 2, hint=f"see {program} --help")
    except click.ClickException as error:
        terminal.stop(type(error).__name__, printable(error.format_message(), 2000), 1)
    except (KeyboardInterrupt, click.Abort):
        terminal.stop("Interrupted", _INTERRUPTED, 130)
    except SystemExit as stopped:
        if not stopped.code:
            _stop_if_missed()
        if stopped.code in (129, 143):  # SIGHUP, SIGTERM
            what = "stopped by a signal; no unfinished file was left behind"
            terminal.print_ending_json("Interrupted", what, int(stopped.code))
        raise
    except OSError as error:
        _stop_without_memory(error)
        if error.filename is None:
            terminal.stop_unprinted(error, 1)
        terminal.stop(
            type(error).__name__, f"{printable(str(error.filename))}: {error.strerror}", 1
        )
    except Exception as error:
        # until 3.11, Python makes a RuntimeError of a stop that comes while a class is made
        if isinstance(error.__cause__, (KeyboardInterrupt, SystemExit)):
            _stop_if_missed(_INTERRUPTED)
        _stop_without_memory(error)
        # a defect: its traceback is shown, and who reads the document learns of it too
        what = printable(str(error) or "an unexpected error", 2000)
        terminal.print_ending_json(type(error).__name__, what, 1)
        raise


_INTERRUPTED = "interrupted; no unfinished file was left behind"
_TOO_LATE = "stopped by a signal, but too late: the command had come to its end"


def _stop_without_memory(error: BaseException) -> None:
    if is_out_of_memory(error):
        terminal.stop("MemoryError", OUT_OF_MEMORY, 1, hint="no unfinished file was left behind")


def _stop_if_missed(what: str = _TOO_LATE) -> None:
    if (code := missed_stop()) is not None:
        terminal.stop("Interrupted", what, code)


def _arguments() -> list[str]:
    """The command line; without any the help is shown, and that is a usage error."""
    if len(sys.argv) > 1 or "_CKPTCONV_COMPLETE" in os.environ:
        return sys.argv[1:]
    with click.Context(cli, info_name="ckptconv") as context:
        click.echo(cli.get_help(context), err=True)
    sys.exit(2)
