"""LoRA adapters merged into a checkpoint, as a conversion."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.convert.execute import ConversionResult, execute_plan
from ckptconv.convert.options import Options, Request
from ckptconv.convert.plan import ConversionPlan
from ckptconv.convert.planner import plan_conversion, request_of
from ckptconv.convert.targets import check_place
from ckptconv.formats.registry import open_certain
from ckptconv.io.files import one_run
from ckptconv.io.guarded import check_places
from ckptconv.io.open_files import Readable, is_open_file
from ckptconv.io.places import Output, Place
from ckptconv.support.choices import (
    refuse_no_callback,
    refuse_no_flag,
    refuse_no_output,
    refuse_no_text,
)
from ckptconv.support.errors import OptionRefused
from ckptconv.support.progress import OnProgress
from ckptconv.tree.edits import Edit, refuse_no_edits
from ckptconv.tree.merging_lora import MergeLora


@one_run()
def merge_lora_checkpoint(
    base: Place | Readable,
    adapters: Place | Readable | Sequence[Place | Readable],
    output: Output,
    *,
    scale: float | Sequence[float] = 1.0,
    tag: str | None = None,
    edits: Sequence[Edit] = (),
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> ConversionResult:
    """Add what LoRA adapters say to the weights of their base, and write the result.

    `adapters` is one or several of them: files, or folders with ``adapter_config.json``; `scale`
    multiplies what is added (one number for all, or one for each). `tag` and `edits` are for the
    base, which is edited first; the other options are those of `Options`. `MergeLora` says what is
    computed. Raises `CheckpointError`; a part of an adapter that finds no tensor in the base is an
    error, and nothing is written.

    >>> merge_lora_checkpoint("llama", "my-adapter", "merged", scale=0.8,
    ...                       max_shard_size="5GB", with_files=True)  # doctest: +SKIP
    """
    begin = time.perf_counter()
    refuse_no_flag(force=force, fsync=fsync, verify=verify)
    refuse_no_callback(on_progress)
    refuse_no_text(tag=tag)
    request = request_of(Options(**options))
    with lora_plan(
        base, adapters, output, request, scale=scale, tag=tag, force=force, edits=edits
    ) as plan:
        result = execute_plan(
            plan, force=force, fsync=fsync, verify=verify, on_progress=on_progress
        )
        return result.since(begin)


@contextlib.contextmanager
def lora_plan(
    base: Place | Readable,
    adapters: Place | Readable | Iterable[Place | Readable],
    output: Output,
    request: Request,
    *,
    scale: float | Sequence[float],
    tag: str | None,
    force: bool,
    edits: Sequence[Edit] = (),
) -> Iterator[ConversionPlan]:
    """The plan of merging adapters into a base; the files are open within the block."""
    refuse_no_output(output)
    refuse_no_edits(edits)
    check_place(output, request, force=force)
    is_one = is_open_file(adapters) or not isinstance(adapters, (list, tuple))
    named: Sequence[Any] = [adapters] if is_one else [*adapters]  # type: ignore[misc]
    if not named:
        raise OptionRefused("there is no adapter", hint="name one or more")
    with contextlib.ExitStack() as leaving:
        checkpoint = leaving.enter_context(open_certain(base, tag=tag, whole_modules=True))
        opened = [leaving.enter_context(open_certain(each)) for each in named]
        for each in opened:
            check_places(each.sources)
        merge = MergeLora(opened, scale, request.only)
        wanted = replace(request, edits=(*edits, *request.edits, merge))
        yield plan_conversion(checkpoint, output, wanted)
