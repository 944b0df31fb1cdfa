"""The conversion of a checkpoint in one call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import ParamSpec

from ckptconv.convert.execute import ConversionResult
from ckptconv.convert.job import Job
from ckptconv.convert.options import Options
from ckptconv.formats.registry import Named
from ckptconv.io.places import Output
from ckptconv.support.choices import spelling_checked
from ckptconv.support.progress import OnProgress
from ckptconv.support.records import dataclass

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, repr=False)
class _Call(Options):
    """The arguments of `convert_checkpoint`."""

    source: Named
    output: Output
    _: KW_ONLY
    tag: str | None = None
    force: bool = False
    fsync: bool = True
    verify: bool = False
    on_progress: OnProgress | None = None


def _takes(
    call: Callable[P, _Call],
) -> Callable[[Callable[[_Call], ConversionResult]], Callable[P, ConversionResult]]:
    """Give a function the arguments of `call`, under its own name: editors and type checkers see
    each option, and nobody lists them a second time.
    """

    def of(function: Callable[[_Call], ConversionResult]) -> Callable[P, ConversionResult]:
        @functools.wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> ConversionResult:
            return function(call(*args, **given))

        gives = inspect.signature(function).return_annotation
        shown = inspect.signature(call).replace(return_annotation=gives)
        called.__signature__ = shown  # type: ignore[attr-defined]
        return called

    return of


_Call.__init__.__name__ = _Call.__init__.__qualname__ = "convert_checkpoint"  # as errors name it
_Call.__init__ = spelling_checked(_Call.__init__)  # type: ignore[method-assign]


@_takes(_Call)
def convert_checkpoint(call: _Call) -> ConversionResult:
    """Convert the checkpoint `source` into the file `output`, without importing torch (except for
    `to="dcp"`, a folder).

    `source` is a file, the folder of a checkpoint of many files, or a sequence of the files of all
    ranks; `tag` picks a step where it is a folder of several. `Options` says what all the others
    mean, from `to` to `manifest`; a sharded output is named after `output` or, in a folder, as
    Hugging Face libraries do. The output is written to a temporary sibling and renamed; an existing
    one is replaced only with `force`, and without `fsync` the disk is not waited for. `verify`
    counts what the source names, reads the output back and compares every tensor first.
    `on_progress` is called with a `Progress` (bytes), about once a MiB. Raises `CheckpointError`.

    >>> convert_checkpoint("in.pt", "out.safetensors", device="cuda:1")  # doctest: +SKIP
    """
    job = Job(
        call.source,
        call.output,
        call,
        tag=call.tag,
        force=call.force,
        fsync=call.fsync,
        verify=call.verify,
    )
    return job.run(call.on_progress)
