"""The command line: parse, call, render.

What it does is in the library; what it says is in the reports.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
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
from ckptconv.support.signals import held_back, missed_stop, stop_in_good_order

COMMANDS = {
    "Convert": {
        "convert": ("converting", "Convert a checkpoint to a torch or safetensors file."),
        "merge": ("converting", "Put the state dicts of several checkpoints into one."),
        "average": ("converting", "Write the mean of several checkpoints of one model."),
        "merge-lora": ("converting", "Merge LoRA adapters into the weights of their base."),
        "delta": ("deltas", "Write what changed from one version of a model to the next."),
        "apply": ("deltas", "Apply such changes to the version that they were made from."),
    },
    "Look": {
        "inspect": ("answering", "Show what is in a checkpoint."),
        "ls": ("viewing", "List the tensors of a checkpoint, one line each."),
        "show": ("viewing", "Show the values of a tensor, or write them to a numpy file."),
        "stats": ("viewing", "Show statistics of the tensors of a checkpoint."),
        "report": ("viewing", "Write a page about a checkpoint, to look at in a browser."),
    },
    "Check": {
        "doctor": ("answering", "Say why a file does not load, and how to fix it."),
        "diff": ("answering", "Compare two checkpoints of any formats, to the bit."),
        "scan": ("answering", "Say whether a file is safe to load."),
        "manifest": ("proving", "Write the SHA-256 of the files and of each tensor."),
        "verify": ("proving", "Hold a checkpoint against a manifest."),
    },
    "Fix": {
        "strip-module": ("converting", "Strip `module.` (DataParallel, DDP) from the keys."),
        "add-module": ("converting", "Add `module.` (DataParallel, DDP) to the keys."),
        "edit": ("fixing", "Change names and metadata of a safetensors file in place."),
        "recover": ("fixing", "Save the whole tensors of a damaged file."),
        "cleanup": ("fixing", "List and abort uploads that a killed process left."),
    },
    "Many": {
        "batch": ("batching", "Convert many checkpoints; resume where an earlier run stopped."),
    },
    "This program": {
        "devices": ("host_devices", "Show the devices of this host, or choose GPUs."),
        "help": ("help_pages", "Show a page of the documentation."),
    },
}
"""The commands in the sections of ``--help``: the module of `ckptconv.cli` that has each, under the
command's name, and the line that is told of it.
"""
_ROWS = {name: row for rows in COMMANDS.values() for name, row in rows.items()}

MEANT = {
    "add-module": "wrap prefix ddp",
    "apply": "patch pull update apply-delta",
    "average": "mean avg soup swa ema",
    "batch": "many all",
    "cleanup": "clean abort gc",
    "convert": "export save to safetensors torch cast quantize shard split",
    "delta": "xor incremental changes make-delta",
    "devices": "gpu gpus cuda device nvidia-smi",
    "diff": "compare cmp equal same",
    "doctor": "check diagnose why fix load validate",
    "edit": "rename metadata set",
    "help": "man docs doc",
    "inspect": "info describe summary keys header tree look open view",
    "manifest": "hash sha256 sha256sum checksum digest fingerprint",
    "ls": "list tensors names shapes ll dir",
    "merge": "join combine concat cat-shards consolidate",
    "merge-lora": "lora adapter peft bake fuse-lora",
    "recover": "rescue repair salvage restore undelete broken corrupt truncated",
    "report": "html page browser",
    "scan": "safe security audit pickle virus malware",
    "show": "print cat dump values tensor get read",
    "stats": "statistics min max nan histogram",
    "strip-module": "strip unwrap remove-module",
    "verify": "prove attest signature check-hash",
}
"""Words that people try for the commands."""


class Program(click.Group):
    """A group of commands whose answer must arrive: one that is not printed is an error.

    A command's module is imported when the command is asked for.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_ROWS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ROWS:
            return None
        module, told = _ROWS[cmd_name]
        found = importlib.import_module(f"ckptconv.cli.{module}")
        command: click.Command = getattr(found, cmd_name.replace("-", "_"))
        command.short_help = told
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _ROWS and not (args[0].startswith("-") or ctx.resilient_parsing):
            ctx.fail(f"{printable(args[0]) or repr(args[0])} is not a command{_nearest(args[0])}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ckptconv.cli.commands import write_sections

        rows = {
            section: [(name, told) for name, (_, told) in commands.items()]
            for section, commands in COMMANDS.items()
        }
        own = [param.get_help_record(ctx) for param in self.get_params(ctx)]
        write_sections(formatter, rows | {"Options": [row for row in own if row is not None]})

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
                raise  # of a file, not of standard output
            # exit code 1 is an answer of the commands in `answering`, so none is 2, as in diff(1)
            module, _ = _ROWS.get(str(ctx.invoked_subcommand), ("", ""))
            terminal.stop_unprinted(error, 2 if module == "answering" else 1)


def _nearest(typed: str) -> str:
    """The command that was meant by another word, by one that is nearly right, or by a file."""
    import difflib
    from shlex import quote

    if os.path.exists(typed):  # noqa: PTH110 (a name that no file can have is none)
        return f"; ckptconv inspect {quote(printable(typed))} shows what is in a file"
    word = typed.lower().replace("_", "-")
    meant = [name for name, words in MEANT.items() if word in words.split()]
    return _meant(meant or difflib.get_close_matches(word, _ROWS, 3, 0.65))


def _meant(near: Sequence[str] | None) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""


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
@click.version_option(
    __version__, "-V", "--version", prog_name="ckptconv", message="%(prog)s %(version)s"
)
def cli() -> None:
    """Make a PyTorch checkpoint open anywhere.

    ckptconv takes a checkpoint that was saved on any device and under any wrapper, and writes a
    torch or safetensors file that a CPU-only host can load, with the keys that the model has. It
    executes nothing in the file.
    """


def main() -> None:
    """The program: one line per error, and exit codes.

    They are 0 (done), 1 (refused or failed), 2 (usage), 130 and 143 (stopped).
    """
    try:
        stop_in_good_order()  # first: a signal from here on leaves nothing behind
        with held_back():  # until there are streams on which it can be told
            terminal.fill_closed_streams()
            terminal.take_any_text()
        with one_run(), warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # notes say the same
            colors = terminal.colors()
            # not standalone: click would tell of errors in its own words, and without a document
            cli.main(_arguments(), prog_name="ckptconv", standalone_mode=False, color=colors)
        sys.stdout.flush()
        _stop_if_missed()
    except BaseException as error:
        _stop_for(error)
        raise


def _usage_text(error: click.UsageError) -> str:
    """What is wrong with a command line; click's words of an option change with its versions."""
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    what = f"{error.option_name} is not an option"
    params = [] if error.ctx is None else error.ctx.command.params
    if error.option_name in ("-o", "--output", "--out") and "output" in {p.name for p in params}:
        return f"{what}: name OUT last, without one"
    return f"{what}{_meant(error.possibilities)}"


_INTERRUPTED = "interrupted; no unfinished file was left behind"
_TOO_LATE = "stopped by a signal, but too late: the command had come to its end"


def _stop_for(error: BaseException) -> None:
    """End the program in one line, for an error that has one; else it is for Python to raise."""
    kind = type(error).__name__
    if isinstance(error, SystemExit):
        if not error.code:
            _stop_if_missed()
        if error.code in (129, 143):  # SIGHUP, SIGTERM
            what = "stopped by a signal; no unfinished file was left behind"
            terminal.print_ending_json("Interrupted", what, int(error.code))
        return
    if isinstance(error, click.UsageError):
        program = error.ctx.command_path if error.ctx else "ckptconv"
        what = printable(_usage_text(error), 2000).rstrip(".?")
        terminal.stop(kind, what, 2, hint=f"see {program} --help")
    if isinstance(error, click.ClickException):
        terminal.stop(kind, printable(error.format_message(), 2000), 1)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        terminal.stop("Interrupted", _INTERRUPTED, 130)
    # until 3.11, Python makes a RuntimeError of a stop that comes while a class is made
    if isinstance(error.__cause__, (KeyboardInterrupt, SystemExit)):
        _stop_if_missed(_INTERRUPTED)
    if is_out_of_memory(error):
        terminal.stop("MemoryError", OUT_OF_MEMORY, 1, hint="no unfinished file was left behind")
    if isinstance(error, OSError):
        if error.filename is None:
            terminal.stop_unprinted(error, 1)
        terminal.stop(kind, f"{printable(str(error.filename))}: {error.strerror}", 1)
    # a defect: its traceback is shown, and who reads the document learns of it too
    terminal.print_ending_json(kind, printable(str(error) or "an unexpected error", 2000), 1)


def _stop_if_missed(what: str = _TOO_LATE) -> None:
    code = missed_stop()
    if code is not None:
        terminal.stop("Interrupted", what, code)


def _arguments() -> list[str]:
    """The command line; without any the help is shown, and that is a usage error."""
    if len(sys.argv) > 1 or "_CKPTCONV_COMPLETE" in os.environ:
        return sys.argv[1:]
    with cli.make_context("ckptconv", [], resilient_parsing=True) as context:
        click.echo(cli.get_help(context), err=True)
    sys.exit(2)
