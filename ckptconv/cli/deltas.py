"""The commands about changes from one version of a model to the next: delta and apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ckptconv.cli import terminal
from ckptconv.cli.commands import command, option
from ckptconv.cli.completion import offer_parts, offer_steps
from ckptconv.cli.converting import make_of_several
from ckptconv.cli.options import (
    FILE,
    FORCE,
    JSON,
    LIMIT,
    NO_FSYNC,
    OUTPUT,
    QUIET,
    TAG,
    applying_options,
    run_options,
)
from ckptconv.cli.progress_display import DIFFING, progress_shown

_NUMBER = click.IntRange(0)


@command(
    """
  ckptconv delta base/ step_100/ weight_v000001
  ckptconv delta step_100/ step_200/ weight_v000002 --encoding overwrite
  ckptconv delta base.safetensors train.pt weight_v000001 --only-new model --checksum adler32
  ckptconv delta s3://runs/base s3://runs/step_100 s3://runs/weight_v000001

Exit code: 0 written, 1 failed, and nothing is left behind, 2 wrong usage.""",
)
@click.argument("base", metavar="BASE", type=FILE)
@click.argument("new", metavar="NEW", type=FILE)
@click.argument("output", metavar="OUT", type=OUTPUT)
@option(
    "--encoding",
    "New bytes XOR old ones, which is small; or the places and the new bytes, which may be applied "
    "twice.",
    ("xor", "overwrite"),
    default="xor",
)
@option(
    "--checksum",
    "The checksum of each tensor: xxh3-128 and blake3 need their packages.",
    ("xxh3-128", "blake3", "adler32"),
    default="xxh3-128",
)
@option(
    "--version N",
    "The version that it makes (default: what the name of OUT says, else the one after the base).",
    _NUMBER,
)
@option(
    "--base-version N",
    "The version that it changes (default: what BASE says, else the one before).",
    _NUMBER,
)
@option(
    "--only PATH",
    "The part to compare in both: state_dict, ema, ...",
    section="Parts",
    shell_complete=offer_parts,
)
@option("--only-new PATH", "The part to compare in NEW, where it is another.", section="Parts")
@TAG
@option(
    "--tag-new STEP",
    "The same in NEW, where it is another.",
    section="Parts",
    shell_complete=offer_steps,
)
@LIMIT
@FORCE
@NO_FSYNC
@JSON
@QUIET
def delta(**given: Any) -> None:
    """Write what changed from BASE to NEW into the folder OUT, for engines that pull weights.

    The layout is that of slime and miles, which sglang applies: of each tensor that changed a zstd
    frame, and the checksum of its new bytes. BASE and NEW may be in any containers, and have the
    same tensors. ckptconv apply makes NEW again.
    """
    from ckptconv.convert.deltas import DELTA, delta_checkpoints, delta_headline, delta_lines

    as_json, quiet, fsync = given.pop("as_json"), given.pop("quiet"), not given.pop("no_fsync")
    shown = progress_shown(DIFFING, silent=quiet or as_json)
    with terminal.errors_shown(as_json), shown as on_progress:
        result = delta_checkpoints(**given, fsync=fsync, on_progress=on_progress)
    if as_json:
        terminal.print_json(DELTA.of(result))
    elif not quiet:
        terminal.print_summary(delta_headline(result), delta_lines(result))


@command(
    """
  ckptconv apply base/ weight_v000001 new.safetensors
  ckptconv apply base/ weight_v000001 weight_v000002 new/ --with-files
  ckptconv apply base/ updates/ new/ --max-shard-size 5GB
  ckptconv apply hf://org/model s3://runs/weight_v000001 new/

Exit code: 0 written, 1 failed, and nothing is left behind, 2 wrong usage.""",
    name="apply",
)
@click.argument("sources", metavar="BASE DELTA...", type=FILE, nargs=-1)
@click.argument("output", metavar="OUT", type=OUTPUT, required=False)
@applying_options
@run_options
def apply(**given: Any) -> None:
    """Apply the changes of each DELTA, in their order, to the BASE that the first was made from.

    A DELTA is a folder that ckptconv delta, slime or miles wrote, or a folder of such versions.
    Each tensor is held against its checksums before OUT is put in place.
    """
    from ckptconv.convert.applying import applied_plan

    def plan_of(sources: Sequence[Any], *others: Any, force: bool) -> Any:
        base, *deltas = sources
        return applied_plan(base, deltas, *others, tag=given["tag"], force=force)

    too_few = "there is no delta; name BASE, one DELTA or more, then OUT"
    make_of_several(given, "keep", plan_of, too_few)
