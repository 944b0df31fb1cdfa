"""The commands that put right what is there: edit changes a file in its place, recover saves the
whole tensors of a damaged one, cleanup removes what a killed upload left in a store.
"""

from __future__ import annotations

import sys
from datetime import datetime, timedelta, timezone
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptconv.cli import terminal
from ckptconv.cli.asked import key_rules
from ckptconv.cli.commands import command, option
from ckptconv.cli.completion import offer_devices
from ckptconv.cli.options import (
    FILE,
    FORCE,
    JSON,
    LIMIT,
    NEW_FILE,
    NO_FSYNC,
    QUIET,
    key_options,
    recovery_options,
)
from ckptconv.cli.progress_display import COPYING, progress_shown
from ckptconv.io.places import place_of
from ckptconv.support.addresses import UrlPath
from ckptconv.support.errors import CheckpointError, UnsupportedCheckpoint, printable
from ckptconv.support.report import Row
from ckptconv.support.text import count_text, size_text

if TYPE_CHECKING:
    from ckptconv.io.remote.store import Store, Unfinished


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
    "--rewrite", "Write a whole new file and replace the old one in one step.", section="Safety"
)
@LIMIT
@option("-n --dry-run", "Write nothing; say what would be changed.", section="Safety")
@option("--verify", "Have the safetensors library read what was written.", section="Safety")
@NO_FSYNC
@JSON
@QUIET
def edit(source: Path, **given: Any) -> None:
    """Change the names of tensors in the safetensors file FILE, and its metadata, in place.

    Only the header is written if the new one fits, so the size of the file does not matter;
    otherwise a whole new file replaces the old one. After a kill, the old file or the new one is
    there. If the kill came in the middle of the write, ckptconv refuses the file, and this command
    restores its old header; without options, it does nothing else.
    """
    from ckptconv.convert import header_edits as report
    from ckptconv.convert.edit import edit_header, given_strings

    as_json, dry_run, quiet = (given.pop(name) for name in ("as_json", "dry_run", "quiet"))
    with terminal.errors_shown(as_json, usage=True):
        asked = report.HeaderEdit(
            key_rules(given),
            given_strings(given["metadata"], given["metadata_from"], given["device"]),
            given["remove_metadata"],
        )
    shown = progress_shown(COPYING, silent=quiet or as_json)
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
        terminal.print_json({"dry_run": dry_run, **report.EDIT.of(result)})
    elif not quiet:
        terminal.print_summary(
            report.edit_headline(result, dry_run=dry_run), report.edit_lines(result)
        )


@command(
    """
  ckptconv recover cut_off.pt saved.pt
  ckptconv recover half_downloaded.safetensors saved.safetensors
  ckptconv recover train.pt model.safetensors --only state_dict
  ckptconv recover damaged.pt saved.pt --json | jq .lost

Exit code: 0 everything was there, 1 something is lost (or all, and nothing is written), \
2 wrong usage.""",
)
@click.argument("source", metavar="FILE", type=FILE)
@click.argument("output", metavar="OUT", type=NEW_FILE)
@recovery_options
@LIMIT
@FORCE
@JSON
@QUIET
def recover(source: Path, output: Path, as_json: bool, quiet: bool, **given: Any) -> None:
    """Write the tensors of a damaged FILE that are whole to OUT, and name those that are lost: of a
    zip archive that lost its directory or its end, of an older torch file that was cut short, of a
    safetensors file whose data end early.

    A tensor is whole if all its bytes are there and have the checksum that a zip file declares.
    Names and device tags stay as they are.
    """
    from ckptconv.convert import recover as recovering

    shown = progress_shown(COPYING, silent=as_json or quiet)
    with terminal.errors_shown(as_json), shown as on_progress:
        found = recovering.recover_checkpoint(source, output, **given, on_progress=on_progress)
    if as_json:
        terminal.print_json(recovering.RECOVERY.of(found))
    elif not quiet:
        terminal.print_verdict(recovering.recovery_headline(found), good=found.is_complete)
        terminal.print_lines(recovering.recovery_rows(found))
    sys.exit(int(not found.is_complete))


@command(
    """
  ckptconv cleanup s3://bucket/models/
  ckptconv cleanup s3://bucket/models/ --older-than 24 --abort

Exit code: 0 done, or nothing found, 1 failed, 2 wrong usage.""",
)
@click.argument("url", metavar="URL", type=FILE)
@option("--abort", "Abort them. Without it they are only listed.")
@option(
    "--older-than HOURS",
    "Only uploads that are at least this many hours old: younger ones may still be in progress.",
    click.FloatRange(min=0),
)
@LIMIT
@JSON
def cleanup(url: Any, abort: bool, older_than: float | None, as_json: bool) -> None:
    """List the unfinished uploads whose keys begin with URL, and hidden objects that ckptconv made
    there; with --abort, remove them.

    A conversion that fails or is stopped aborts its uploads itself. One that is killed cannot, and
    stores keep the parts, and charge for them. On S3, uploads of other programs are listed too:
    they look the same.
    """
    if older_than is not None and isnan(older_than):  # click's range takes it
        raise click.UsageError("--older-than nan is not a number of hours")
    with terminal.errors_shown(as_json):
        store, found = _found(url, older_than)
        if abort:
            _abort(store, found)
    if as_json:
        listed = [
            {"path": store.root + item.key, "begun": item.begun, "bytes": item.nbytes}
            for item in found
        ]
        terminal.print_json({"uploads": listed, "aborted": abort})
        return
    headline = "no unfinished uploads"
    if found:
        done = "aborted" if abort else "found; add --abort to remove them"
        headline = f"{count_text(len(found), 'unfinished upload')} {done}"
    terminal.print_headline(headline)
    terminal.print_lines(_row(item, store.root) for item in found)


def _row(item: Unfinished, root: str) -> Row:
    told = printable(root + item.key)
    if item.nbytes is not None:
        told = f"{told}, {size_text(item.nbytes)}"
    return Row(item.begun[:16].replace("T", " ") or "unknown", told)


def _found(url: Any, older_than: float | None) -> tuple[Store, list[Unfinished]]:
    """The store, and what is unfinished in it."""
    from ckptconv.io.remote.patience import asked
    from ckptconv.io.remote.place import RemotePlace, told
    from ckptconv.io.remote.store import StoreError

    place = place_of(url)
    if not isinstance(place, RemotePlace):
        hint = (
            "on this machine a killed conversion leaves only a hidden folder, which the next "
            "conversion to the same place removes"
        )
        raise UnsupportedCheckpoint("is not in a store", path=place.path, hint=hint)
    store = place.site.store
    if not store.can_write:
        raise UnsupportedCheckpoint("can be read, but not written", path=place.path)
    try:
        found = list(asked(lambda: store.unfinished(place.key)))
    except StoreError as error:
        raise told(error, place.path) from None
    if older_than is not None:
        now, hour = datetime.now(timezone.utc), timedelta(hours=1)
        # not the date so long ago, which for many hours there is none
        found = [item for item in found if (now - _begun(item)) / hour >= older_than]
    return store, found


def _begun(item: Unfinished) -> datetime:
    """When an upload was begun; one of which nobody knows it is not called old: it may be one that
    goes on.
    """
    try:
        begun = datetime.fromisoformat(item.begun)
    except ValueError:
        begun = datetime.max
    return begun if begun.tzinfo is not None else begun.replace(tzinfo=timezone.utc)


def _abort(store: Store, found: list[Unfinished]) -> None:
    from ckptconv.io.remote.patience import asked
    from ckptconv.io.remote.place import told
    from ckptconv.io.remote.store import StoreError

    # all are tried: stores charge for each that stays
    failed: list[CheckpointError] = []
    for item in found:
        try:
            asked(partial(store.abort, item))
        except StoreError as error:
            if error.kind != "missing":  # another process was quicker
                failed.append(told(error, UrlPath(store.locate(item.key))))
    if failed:
        raise failed[0]
