"""The commands that write a checkpoint: convert, strip-module, add-module, merge, average and
merge-lora.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptconv.cli import terminal
from ckptconv.cli.asked import engine_of_words, is_for_stdout, options_of, refuse_missing
from ckptconv.cli.commands import command, option
from ckptconv.cli.options import (
    engine_options,
    fitting_options,
    key_options,
    output_options,
    output_options_of,
)
from ckptconv.cli.progress_display import COPYING, progress_shown
from ckptconv.io.files import refuse_inputs
from ckptconv.support.errors import OutputRefused, printable
from ckptconv.support.report import error_document

if TYPE_CHECKING:
    from ckptconv.convert.options import Options, Request
    from ckptconv.convert.plan import ConversionPlan


@command(
    """
  ckptconv convert in.pt out.safetensors
  ckptconv convert in.pt out.pt --device cuda:1
  ckptconv convert in.safetensors out.pt --add-prefix module.
  ckptconv convert in.pt out.safetensors --dtype bf16 --include 'model.*' \
--exclude '*.num_batches_tracked'
  ckptconv convert in.pt out.pt --strip-prefix model. \
--regex 'blocks\\.(\\d+)=>layers.\\1' --save-mapping map.json
  ckptconv convert out.pt back.pt --rules map.json --reverse
  ckptconv convert train.pt ema.safetensors --only ema
  ckptconv convert in.pt out.pt --like other.safetensors
  ckptconv convert in.pt out.safetensors --model my_package.models:build
  ckptconv convert rank0.pt rank1.pt out.safetensors
  ckptconv convert in.pt dcp_folder --to dcp
  ckptconv convert dcp_1TB hf --max-shard-size 5GB --engine ray
  ckptconv convert in.pt - --to safetensors | ssh host 'cat > out.safetensors'
  ckptconv convert in.pt in.pt --force --verify

Exit code: 0 written, 1 failed, and nothing is left behind, 2 wrong usage.""",
)
@key_options("strip")
@output_options
@fitting_options
@engine_options
def convert(keys: str, **given: Any) -> None:
    """Convert checkpoint IN to OUT, in the format that the name of OUT says. A folder that is
    there, or a new one named with a slash at its end, gets safetensors in it.

    By default, the prefixes of wrappers are stripped from the keys, and the tensors are tagged for
    the CPU. Several INs are the files of all ranks of one checkpoint. Key rules may be repeated,
    and apply in order, before --like or --model.
    """
    if given["like"] and given["model"]:
        raise click.UsageError("--like and --model are both given, but the keys can fit only one")
    if given["drop_unexpected"] and not (given["like"] or given["model"]):
        raise click.UsageError("--drop-unexpected needs --like or --model")
    is_shared = given["jobs"] is not None or given["engine"] is not None
    if is_shared and given["max_shard_size"] is None:
        raise click.UsageError(
            "--jobs and --engine share out the files of an output: add --max-shard-size"
        )
    if given["address"] is not None and given["engine"] != "ray":
        raise click.UsageError("--address needs --engine ray")
    _convert(given, keys, is_shared=is_shared)


@command(
    """
  ckptconv strip-module in.pt out.pt
  ckptconv strip-module in.pt out.safetensors --dtype f16
  ckptconv strip-module in.pt in.pt --force

Exit code: 0 written, 1 failed, and nothing is left behind, 2 wrong usage.""",
)
@output_options
def strip_module(**given: Any) -> None:
    """Strip `module.` (DataParallel, DDP) from every key of IN that starts with it, and write OUT
    for the CPU.
    """
    _convert(given, "module")


@command(
    """
  ckptconv add-module in.pt out.pt
  ckptconv add-module in.safetensors out.pt --device cuda:0

Exit code: 0 written, 1 failed, and nothing is left behind, 2 wrong usage.""",
)
@output_options
def add_module(**given: Any) -> None:
    """Put `module.` (DataParallel, DDP) before the keys of IN, unless all have it, and write OUT
    for the CPU. Values beside the weights that are not tensors (`epoch`) keep their names.
    """
    _convert(given, "add-module")


def _convert(given: dict[str, Any], wrappers: str, *, is_shared: bool = False) -> None:
    def planned(output: Path, options: Options, request: Request) -> Any:
        from ckptconv.convert.job import Job
        from ckptconv.convert.planner import key_target_of

        with redirect_stdout(sys.stderr):  # a model that is built may print
            request = replace(request, fit_to=key_target_of(options))
        job = Job(given["sources"], output, request, tag=given["tag"], force=given["force"])
        refused = refused_by(partial(job.check_output, request))
        if refused is not None and not given["dry_run"]:
            raise refused  # before the source is opened, which may take long
        return job.planned(request), lambda: refused

    make_output(given, wrappers, planned, is_shared=is_shared)


@command(
    """
  ckptconv merge backbone.pt head.pt model.safetensors
  ckptconv merge backbone.pt head.pt model.safetensors --prefix head.pt=head.
  ckptconv merge encoder.pt decoder.pt both.pt --prefix encoder.pt=encoder. \
--prefix decoder.pt=decoder.

Exit code: 0 written, 1 failed, and nothing is left behind, 2 wrong usage.""",
)
@output_options
@option(
    "--prefix IN=PREFIX",
    "Put PREFIX before the keys of this IN. Repeatable.",
    multiple=True,
    section="Keys",
)
def merge(prefix: tuple[str, ...], **given: Any) -> None:
    """Combine the state dicts of several checkpoints IN into one OUT, in the given order.

    The prefixes of wrappers are stripped first. A key that two of them have is an error.
    """
    from ckptconv.convert.combining import merged_plan

    named: dict[str, str] = {}
    for word in prefix:
        name, equals, text = word.rpartition("=")
        if not equals or not name:
            raise click.UsageError(f"--prefix {printable(word)} is not IN=PREFIX")
        if name in named:
            raise click.UsageError(f"--prefix names {printable(name)} twice")
        named[name] = text
    _combine(given, partial(merged_plan, prefix=named))


@command(
    """
  ckptconv average epoch_8.pt epoch_9.pt epoch_10.pt swa.pt
  ckptconv average epoch_8.pt epoch_9.pt epoch_10.pt swa.pt --weights 1,1,2
  ckptconv average a.pt b.pt mean.safetensors --integers last

Exit code: 0 written, 1 failed, and nothing is left behind, 2 wrong usage.""",
)
@output_options
@option(
    "--weights NUMBERS",
    "One positive number for each IN: 1,1,2 (default: equal).",
    section="Values",
)
@option(
    "--integers",
    "Integers and bools have no mean: they must be the same in all, or are those of one.",
    ["same", "first", "last"],
    default="same",
    section="Values",
)
def average(weights: str | None, integers: Any, **given: Any) -> None:
    """Write the weighted mean of the state dicts of several checkpoints IN to OUT.

    The sum is kept in float64 and cast to the dtype of the tensors. All must have the same keys,
    dtypes and shapes.
    """
    from ckptconv.convert.averaging import averaged_plan

    numbers = None if weights is None else _numbers(weights, "--weights", "1,1,2")
    _combine(given, partial(averaged_plan, weights=numbers, integers=integers))


@command(
    """
  ckptconv merge-lora llama/ my-adapter/ merged/ --with-files
  ckptconv merge-lora base.safetensors style.safetensors merged.safetensors --scale 0.8
  ckptconv merge-lora llama/ one/ two/ merged.safetensors --scale 0.7,0.3
  ckptconv merge-lora llama-fp8/ my-adapter/ merged.safetensors --dequantize

Exit code: 0 written, 1 failed, and nothing is left behind, 2 wrong usage.""",
)
@output_options_of("BASE ADAPTER...")
@option(
    "--scale NUMBERS",
    "Multiply what is added: one number, or one for each ADAPTER: 0.7,0.3 (default: 1).",
    section="Values",
)
def merge_lora(scale: str | None, **given: Any) -> None:
    """Add what LoRA adapters say to the weights of BASE, and write OUT.

    ADAPTER is a folder of peft, or a file of peft, kohya, diffusers or ComfyUI. A part of it that
    finds no tensor in BASE is an error. Values are those of peft's merge_and_unload.
    """
    from ckptconv.convert.applying import lora_plan

    numbers = [1.0] if scale is None else _numbers(scale, "--scale", "0.8 or 0.7,0.3")
    # one number is for all adapters, however many there are
    strengths = numbers if len(numbers) > 1 else numbers[0]

    def plan_of(sources: Sequence[Any], *others: Any, force: bool) -> Any:
        base, *adapters = sources
        tag = given["tag"]
        return lora_plan(base, adapters, *others, scale=strengths, tag=tag, force=force)

    too_few = "there is no adapter; name BASE, one ADAPTER or more, then OUT"
    make_of_several(given, "strip", plan_of, too_few)


def _numbers(words: str, name: str, example: str) -> list[float]:
    try:
        return [float(number) for number in words.split(",")]
    except ValueError:
        what = f"{name} {printable(words)} are not numbers, such as {example}"
        raise click.UsageError(what) from None


def _combine(given: dict[str, Any], plan_of: Callable[..., Any]) -> None:
    if given["tag"] is not None:
        raise click.UsageError("--tag picks a step of one folder; name the folders of the steps")
    too_few = "there is only one checkpoint; name two or more, then OUT"
    make_of_several(given, "keep", plan_of, too_few)


def make_of_several(
    given: dict[str, Any], wrappers: str, plan_of: Callable[..., Any], too_few: str
) -> None:
    """As `make_output`, of two INs or more: `plan_of` is given these, the place of the output, the
    request, and `force`.
    """

    def planned(output: Path, _: Options, request: Request) -> Any:
        from ckptconv.convert.targets import check_place

        check = partial(check_place, output, request, force=given["force"])
        # a dry run tells apart that the output exists
        force = given["force"] or given["dry_run"]
        plan = plan_of(given["sources"], output, request, force=force)
        return plan, lambda: refused_by(check)

    if given["output"] is None:
        refuse_missing(given)
    if len(given["sources"]) < 2:
        raise click.UsageError(too_few)
    make_output(given, wrappers, planned)


def make_output(
    given: dict[str, Any], wrappers: str, planned: Any, *, is_shared: bool = False
) -> None:
    """Plan an output, and write it or show what would be written; `is_shared`: by workers, a file
    each.

    `planned` gives the plan, open within a block, and what says there why the output is refused.
    """
    begin = time.perf_counter()
    refuse_missing(given)
    spool = terminal.spooled() if is_for_stdout(given) else nullcontext(given["output"])
    with terminal.errors_shown(given["as_json"], usage=True):
        options = options_of(given, wrappers)
        request = options.request(None)
        if not is_for_stdout(given):
            from ckptconv.convert.targets import check_target

            check_target(given["output"], request)
    with terminal.errors_shown(given["as_json"]), spool as output:
        given["output"] = output
        opened, refusal = planned(output, options, request)
        with opened as plan:
            _keep(plan)
            if not given["dry_run"]:
                _execute(plan, given, begin, is_shared=is_shared)
                return
            refused = refusal()
    _show_plan(plan, given, refused)


def _keep(plan: ConversionPlan) -> None:
    """Have a plan stay in memory until the process ends, as it does with this command: to free a
    million tensors one by one would take 0.4 s. A cycle is freed by the collector alone, which the
    program has switched off.
    """
    cycle: list[Any] = [plan]
    cycle.append(cycle)


def refused_by(check: Callable[[], None]) -> OutputRefused | None:
    """Why an output could not be written, as far as it can be told before all are known."""
    try:
        check()
    except OutputRefused as error:
        return error
    return None


def _show_plan(plan: ConversionPlan, given: dict[str, Any], refused: OutputRefused | None) -> None:
    """What would be done; a `refused` output too, with the exit code of the conversion."""
    from ckptconv.convert import report

    if given["as_json"]:
        document = {"dry_run": True, **report.PLAN.of(plan)}
        if refused is not None:
            document |= error_document(refused, 1)
        terminal.print_json(document)
    elif not given["quiet"]:
        terminal.print_summary(
            report.plan_headline(_as_named(plan, given)), report.plan_lines(plan)
        )
        terminal.print_rows(report.keys_table(plan))
    if refused is not None:
        terminal.fail(str(refused), 1)


def _execute(
    plan: ConversionPlan, given: dict[str, Any], begin: float, *, is_shared: bool = False
) -> None:
    """Carry a plan out, and say what was done since `begin`.

    `is_shared`: by workers, a file each.
    """
    from ckptconv.convert import report
    from ckptconv.convert.execute import execute_plan, hand_over_plan

    share_out = None
    if is_shared:
        from ckptconv.batch.sharing import share_out_on

        share_out = share_out_on(engine_of_words(given, len(plan.files)))
    wanted = {"force": given["force"], "fsync": not given["no_fsync"], "verify": given["verify"]}
    with progress_shown(COPYING, silent=given["quiet"] or given["as_json"]) as on_progress:
        if is_for_stdout(given):
            refuse_inputs([Path("/dev/stdout")])  # `>>` of the shell may append to the source
            result = hand_over_plan(
                plan, terminal.copy_to_stdout, **wanted, on_progress=on_progress
            )
        else:
            with redirect_stdout(sys.stderr):  # of an engine that has words of its own
                result = execute_plan(plan, **wanted, on_progress=on_progress, share_out=share_out)
    result = result.since(begin)
    if given["as_json"]:
        terminal.print_json({"dry_run": False, **report.result_document(result)})
    elif not given["quiet"]:
        named = replace(result, plan=_as_named(plan, given))
        terminal.print_summary(report.result_headline(named), report.result_lines(named))


def _as_named(plan: ConversionPlan, given: dict[str, Any]) -> ConversionPlan:
    """The plan under the name that its output has for the user."""
    return replace(plan, output=Path("standard output")) if is_for_stdout(given) else plan
