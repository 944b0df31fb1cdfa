"""The command that removes what a killed upload left in a store."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckptconv.cli import terminal
from ckptconv.cli.commands import command, option
from ckptconv.cli.options import FILE, JSON, LIMIT
from ckptconv.io.places import place_of
from ckptconv.support.addresses import UrlPath
from ckptconv.support.errors import CheckpointError, UnsupportedCheckpoint, printable
from ckptconv.support.report import Row
from ckptconv.support.text import count_text, size_text

if TYPE_CHECKING:
    from ckptconv.io.remote.store import Store, Unfinished


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
    what = count_text(len(found), "unfinished upload")
    done = "aborted" if abort else "found; add --abort to remove them"
    terminal.print_headline(f"{what} {done}" if found else "no unfinished uploads")
    rows = []
    for item in found:
        size = "" if item.nbytes is None else f", {size_text(item.nbytes)}"
        begun = item.begun[:16].replace("T", " ") or "unknown"
        rows.append(Row(begun, f"{printable(store.root + item.key)}{size}"))
    terminal.print_lines(rows)


def _found(url: Any, older_than: float | None) -> tuple[Store, list[Unfinished]]:
    """The store, and what is unfinished in it."""
    from ckptconv.io.remote.patience import asked
    from ckptconv.io.remote.place import RemotePlace, told
    from ckptconv.io.remote.store import StoreError

    place = place_of(url)
    if not isinstance(place, RemotePlace):
        hint = "on this machine a killed conversion leaves only a hidden folder, which "
        hint += "the next conversion to the same place removes"
        raise UnsupportedCheckpoint("is not in a store", path=place.path, hint=hint)
    store = place.site.store
    if not store.can_write:
        raise UnsupportedCheckpoint("can be read, but not written", path=place.path)
    try:
        found = list(asked(lambda: store.unfinished(place.key)))
    except StoreError as error:
        raise told(error, place.path) from None
    if older_than is not None:
        latest = datetime.now(timezone.utc) - timedelta(hours=older_than)
        found = [item for item in found if _begun(item) <= latest]
    return store, found


def _begun(item: Unfinished) -> datetime:
    """When an upload was begun; one of which nobody knows it is not called old."""
    try:
        begun = datetime.fromisoformat(item.begun)
    except ValueError:
        return datetime.max.replace(tzinfo=timezone.utc)
    return begun if begun.tzinfo is not None else begun.replace(tzinfo=timezone.utc)


def _abort(store: Store, found: list[Unfinished]) -> None:
    from ckptconv.io.remote.patience import asked
    from ckptconv.io.remote.place import told
    from ckptconv.io.remote.store import StoreError

    failed: list[CheckpointError] = []
    for item in found:
        try:
            asked(partial(store.abort, item))
        except StoreError as error:
            if error.kind != "missing":  # another process was quicker
                failed.append(told(error, UrlPath(store.locate(item.key))))
    if failed:
        raise failed[0]
