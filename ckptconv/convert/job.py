"""A conversion as data: what is converted, where to and how; it is planned where it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import field

from ckptconv.convert.execute import ConversionResult, execute_plan
from ckptconv.convert.options import Options, Request
from ckptconv.convert.plan import ConversionPlan
from ckptconv.convert.planner import plan_conversion, request_of
from ckptconv.convert.targets import check_place
from ckptconv.formats.registry import Named, open_certain
from ckptconv.io.files import one_run
from ckptconv.io.location import Location
from ckptconv.io.outputs import check_place_free
from ckptconv.io.places import Output, place_of
from ckptconv.support.choices import (
    refuse_no_flag,
    refuse_no_output,
    refuse_no_paths,
    refuse_no_text,
)
from ckptconv.support.errors import OptionRefused
from ckptconv.support.limits import Limits, held, in_force
from ckptconv.support.progress import OnProgress
from ckptconv.support.records import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion. It holds no open file, so it can be pickled and run in another process.

    `source` is a file, a folder, or the files of all ranks; `tag` picks a step of a folder of
    several. `options` are the words of the command line, or the `Request` that they stand for.
    Files that the words name (rules, other checkpoints) are read where the job runs. `force`,
    `fsync` and `verify` are as in `convert_checkpoint`. `limits` are those under which all of it
    happens (by default those in force where the job is made). Raises `CheckpointError` for values
    that are none.
    """

    source: Named
    output: Output
    options: Options | Request = field(default_factory=Options)
    tag: str | None = None
    force: bool = False
    fsync: bool = True
    verify: bool = False
    limits: Limits = field(default_factory=in_force)

    def __post_init__(self) -> None:
        # a place is what a name was found to be: a batch makes each job once more with it
        if not isinstance(self.source, Location):
            refuse_no_paths("source", self.source)
        if not isinstance(self.output, Location):
            refuse_no_output(self.output)
        refuse_no_text(tag=self.tag)
        refuse_no_flag(force=self.force, fsync=self.fsync, verify=self.verify)
        kinds = (("options", (Options, Request)), ("limits", (Limits,)))
        for name, wanted in kinds:
            given = getattr(self, name)
            if not isinstance(given, wanted):
                raise OptionRefused(
                    f"{name}={given!r:.100} is not {wanted[0].__name__}",
                    hint=f"leave it out, or give ckptconv.{wanted[0].__name__}(...)",
                )

    def request(self) -> Request:
        """What the options stand for."""
        return self.options if isinstance(self.options, Request) else request_of(self.options)

    def check_output(self, request: Request) -> None:
        """Raise `OutputRefused` where the output, or a file that tells of it, may not be made."""
        check_place(self.output, request, force=self.force)
        for named in (request.save_mapping, request.manifest):
            if named is not None:
                check_place_free(place_of(named), is_folder=False, force=self.force)

    @contextlib.contextmanager
    def planned(self, request: Request) -> Iterator[ConversionPlan]:
        """The plan of the conversion; the source is open within the block."""
        with (
            held(self.limits),
            open_certain(
                self.source,
                tag=self.tag,
                whole_modules=True,
                with_training=request.with_training,
            ) as checkpoint,
        ):
            yield plan_conversion(checkpoint, self.output, request)

    def run(self, on_progress: OnProgress | None = None) -> ConversionResult:
        """Convert; raises `CheckpointError`, and leaves nothing behind then."""
        begin = time.perf_counter()
        with held(self.limits), one_run():
            request = self.request()
            self.check_output(request)
            with self.planned(request) as plan:
                result = execute_plan(
                    plan,
                    force=self.force,
                    fsync=self.fsync,
                    verify=self.verify,
                    on_progress=on_progress,
                )
                return result.since(begin)
