"""The command that changes a file in its place: edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ckptconv.cli import terminal
from ckptconv.cli.asked import key_rules
from ckptconv.cli.commands import command, option
from ckptconv.cli.completion import offer_devices
from ckptconv.cli.options import FILE, JSON, LIMIT, NEW_FILE, key_options
from ckptconv.cli.progress_display import COPYING, progress_shown


@command(
    """
  ckptconv edit model.safetensors --metadata license=mit
  ckptconv edit model.safetensors --metadata format=pt --rename old.=new.
  ckptconv edit model.safetensors --remove-metadata author --dry-run
  ckptconv edit model.safetensors --strip-prefix module. --save-mapping map.json
  ckptconv edit model.safetensors

Exit code: 0 edited, or nothing to change, 1 failed, and the file is unchanged, \
2 wrong usage.""",
)
@click.argument("source", metavar="FILE", type=FILE)
@option(
    "--metadata NAME=VALUE",
    "Set a metadata entry. Repeatable.",
    multiple=True,
    section="Output",
)
@option(
    "--metadata-from FILE",
    "Set the metadata entries that a JSON file holds.",
    FILE,
    section="Output",
)
@option(
    "--remove-metadata NAME",
    "Remove a metadata entry. Repeatable.",
    multiple=True,
    section="Output",
)
@option(
    "--device DEVICE",
    "Set the device tag of the tensors: cpu, cuda:1, mps, ...",
    shell_complete=offer_devices,
    section="Values",
)
@key_options("keep")
@option(
    "--save-mapping FILE",
    "Save which name became which, so that --rules FILE --reverse can undo it.",
    NEW_FILE,
    section="Keys",
)
@option(
    "--rewrite",
    "Write a whole new file and replace the old one in one step.",
    section="Safety",
)
@LIMIT
@option("-n --dry-run", "Write nothing; say what would be changed.", section="Safety")
@option("--verify", "Have the safetensors library read what was written.", section="Safety")
@option("--no-fsync", "Do not wait until the disk has it (fsync).", section="Safety")
@JSON
@option("-q --quiet", "Print only errors.", section="General")
def edit(source: Path, keys: str, **given: Any) -> None:
    """Change the names of tensors in the safetensors file FILE, and its metadata, in place.

    Only the header is written if the new one fits, so the size of the file does not matter;
    otherwise a whole new file replaces the old one. After a kill, the old file or the new one is
    there. If the kill came in the middle of the write, ckptconv refuses the file, and this command
    restores its old header; without options, it does nothing else.
    """
    from ckptconv.convert import report
    from ckptconv.convert.edit import edit_header, given_strings
    from ckptconv.convert.header_edits import HeaderEdit

    as_json, dry_run = given["as_json"], given["dry_run"]
    with terminal.errors_shown(as_json, usage=True):
        asked = HeaderEdit(
            key_rules(keys, reverse=given["reverse"]),
            given_strings(given["metadata"], given["metadata_from"], given["device"]),
            given["remove_metadata"],
        )
    silent = given["quiet"] or as_json
    shown = progress_shown(COPYING, silent=silent)
    with terminal.errors_shown(as_json), shown as on_progress:
        result = edit_header(
            source,
            asked,
            save_mapping=given["save_mapping"],
            rewrite=given["rewrite"],
            dry_run=dry_run,
            fsync=not given["no_fsync"],
            verify=given["verify"],
            on_progress=on_progress,
        )
    if as_json:
        terminal.print_json(report.edit_document(result, dry_run=dry_run))
    elif not given["quiet"]:
        terminal.print_summary(
            report.edit_headline(result, dry_run=dry_run), report.edit_lines(result)
        )
