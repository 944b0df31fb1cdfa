"""The commands that make one checkpoint of several: merge, average."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptconv.cli.converting import execute, refused_output, show_plan
from ckptconv.cli.options import (
    RuleCommand,
    is_for_stdout,
    option,
    options_of,
    output_options,
    refuse_missing,
)
from ckptconv.cli.terminal import errors_shown, spooled
from ckptconv.support.errors import printable

if TYPE_CHECKING:
    from ckptconv.convert.plan import ConversionPlan


@click.command(
    cls=RuleCommand,
    short_help="Put the state dicts of several checkpoints into one.",
    epilog="""\b
Examples:
  ckptconv merge backbone.pt head.pt model.safetensors
  ckptconv merge backbone.pt head.pt model.safetensors --prefix head.pt=head.
  ckptconv merge encoder.pt decoder.pt both.pt --prefix encoder.pt=encoder. \
--prefix decoder.pt=decoder.

Exit code: 0 written, 1 it cannot be, and nothing is left behind, 2 wrong usage.""",
)
@output_options
@option("--prefix IN=PREFIX", "Put PREFIX before the keys of this IN. Repeatable.", multiple=True)
def merge(prefix: tuple[str, ...], **given: Any) -> None:
    """Put the state dicts of several checkpoints IN into one, OUT, in their order.

    The prefixes of wrappers are stripped first. A key that two of them have is an error.
    """
    from ckptconv.convert.combining import merged_plan

    named: dict[str, str] = {}
    for word in prefix:
        name, equals, text = word.rpartition("=")
        if not equals or not name:
            raise click.UsageError(f"--prefix {printable(word)} is not IN=PREFIX")
        named[name] = text
    _combine(
        given,
        lambda output, request: merged_plan(
            given["sources"], output, request, prefix=named, only=given["only"], force=_free(given)
        ),
    )


@click.command(
    cls=RuleCommand,
    short_help="Write the mean of several checkpoints of one model.",
    epilog="""\b
Examples:
  ckptconv average epoch_8.pt epoch_9.pt epoch_10.pt swa.pt
  ckptconv average epoch_8.pt epoch_9.pt epoch_10.pt swa.pt --weights 1,1,2
  ckptconv average a.pt b.pt mean.safetensors --integers last

Exit code: 0 written, 1 it cannot be, and nothing is left behind, 2 wrong usage.""",
)
@output_options
@option("--weights NUMBERS", "One positive number for each IN: 1,1,2 (default: equal).")
@option(
    "--integers",
    "Integers and bools have no mean: they must be the same in all, or are those of one.",
    ["same", "first", "last"],
    default="same",
)
def average(weights: str | None, integers: Any, **given: Any) -> None:
    """Write the weighted mean of the state dicts of several checkpoints IN to OUT.

    The sum is kept in float64 and cast to the dtype of the tensors. All must have the same keys,
    dtypes and shapes.
    """
    from ckptconv.convert.combining import averaged_plan

    numbers = None
    if weights is not None:
        try:
            numbers = [float(number) for number in weights.split(",")]
        except ValueError:
            raise click.UsageError(
                f"--weights {printable(weights)} are not numbers, such as 1,1,2"
            ) from None
    _combine(
        given,
        lambda output, request: averaged_plan(
            given["sources"],
            output,
            request,
            weights=numbers,
            integers=integers,
            only=given["only"],
            force=_free(given),
        ),
    )


def _free(given: dict[str, Any]) -> bool:
    """Whether it does not matter that the output exists: for a dry run it is told apart."""
    return bool(given["force"] or given["dry_run"])


def _combine(given: dict[str, Any], planned: Any) -> None:
    """Plan, and execute or show it, as `convert` does."""
    from dataclasses import replace

    from ckptconv.convert.targets import check_place

    begin = time.perf_counter()
    refuse_missing(given)
    if len(given["sources"]) < 2:
        raise click.UsageError("there is only one checkpoint; name two or more, then OUT")
    if given["tag"] is not None:
        raise click.UsageError("--tag picks a step of one folder; name the folders of the steps")
    spool: AbstractContextManager[Path] = (
        spooled() if is_for_stdout(given) else nullcontext(given["output"])
    )
    with errors_shown(given["as_json"], usage=True):
        request = replace(options_of(given, "keep").request(None), only=None)
    with errors_shown(given["as_json"]), spool as output:
        given["output"] = output
        making: AbstractContextManager[ConversionPlan] = planned(output, request)
        with making as plan:
            if not given["dry_run"]:
                execute(plan, given, begin)
                return
            refused = refused_output(lambda: check_place(output, request, force=given["force"]))
        show_plan(plan, given, refused)
