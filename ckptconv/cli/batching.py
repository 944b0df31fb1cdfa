"""The command for many conversions: batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckptconv.cli import terminal
from ckptconv.cli.asked import engine_of_words, options_of
from ckptconv.cli.commands import command, option
from ckptconv.cli.options import (
    FILE,
    NEW_FILE,
    conversion_options,
    engine_options,
    fitting_options,
    key_options,
    run_options,
)
from ckptconv.io.places import local_path, place_of
from ckptconv.support.errors import (
    BatchRefused,
    MissingFile,
    OptionRefused,
    OutputRefused,
    printable,
)
from ckptconv.support.report import Row, error_document
from ckptconv.support.text import count_text

if TYPE_CHECKING:
    from ckptconv.batch.checks import Checked
    from ckptconv.batch.finding import Passed
    from ckptconv.batch.manifest import ListedJobs
    from ckptconv.batch.receipts import Receipt
    from ckptconv.convert.job import Job
    from ckptconv.io.location import Location

_REPORT = "ckptconv-batch"


@command(
    """
  ckptconv batch runs/ --out-dir portable/ --to safetensors --dtype bf16
  ckptconv batch manifest.jsonl --jobs 8 --ledger ledger.jsonl
  ckptconv batch manifest.jsonl --share 3/16
  ckptconv batch manifest.jsonl --retry-failed
  ckptconv batch --status ledger.jsonl

A line of a manifest: {"source": "a.pt", "output": "a.safetensors", "dtype": "bf16"}

Exit code: 0 all done, 1 some failed or left, 2 wrong usage, or jobs in each other's way.""",
)
@click.argument("paths", metavar="PATH...", type=FILE, nargs=-1)
@option(
    "--out-dir DIR",
    "The folder for the outputs; each keeps its relative path below DIR.",
    NEW_FILE,
    section="Output",
)
@engine_options
@option(
    "--share I/N",
    "Run only share I of N of the jobs; I starts at 1.",
    section="Many",
    once="--shard",
)
@option(
    "--ledger FILE",
    "The file that records what is done; a batch that is run again resumes from it.",
    NEW_FILE,
    section="Many",
    once="--report",
)
@option("--retry-failed", "Try again what failed in an earlier run.", section="Many")
@option(
    "--on-error",
    "After a failure, continue with the other jobs or start no more.",
    ["continue", "stop"],
    default="continue",
    section="Many",
)
@option("--status", "PATHs are ledgers: show their progress.", section="Many")
@option(
    "--html FILE", "Write an HTML page with the outcome of each job.", NEW_FILE, section="Output"
)
@key_options("strip")
@conversion_options
@fitting_options
@run_options
def batch(paths: tuple[Any, ...], keys: str, **given: Any) -> None:
    """Convert every checkpoint below folders, or the jobs of a manifest (.jsonl).

    Finished jobs are not repeated: if the command was stopped or killed, run it again. The options
    of the command apply to every line of a manifest that does not set them itself.
    """
    from ckptconv.batch.checks import check_apart, check_jobs
    from ckptconv.io.outputs import check_place_free

    as_json = given["as_json"]
    if not paths:
        raise click.UsageError("PATH is missing: name a folder of checkpoints, or a manifest")
    if given["status"]:
        with terminal.errors_shown(as_json), problems_shown(as_json):
            _show_status(paths, given)
        return
    with terminal.errors_shown(as_json, usage=True, code=2):
        common = _common(given, keys)
        share, part = _share(given["share"])
    passed: list[Passed] = []
    with terminal.errors_shown(as_json, code=2), problems_shown(as_json):
        ledger_of = partial(_ledger_of, paths, given, part)
        listed = _listed(paths, given["out_dir"], common, passed, ledger_of)
        ledger = ledger_of()
        jobs, refused = listed.jobs[share], None
        checked: Sequence[Checked] = ()
        try:
            # all of them, not those of this share: another share may write the same file
            checked = check_jobs(listed.jobs, listed.names)
        except BatchRefused as error:
            if not given["dry_run"]:
                raise
            refused = error
        if given["dry_run"]:
            _show_jobs(jobs, passed, refused, as_json=as_json)
            return
        pages = _pages(given)
        manifests = [] if given["out_dir"] is not None else list(map(place_of, paths))
        check_apart(checked, [*manifests, place_of(ledger)], pages)
        for page in pages:
            check_place_free(page, is_folder=False, force=given["force"])
    _tell_passed(passed, silent=as_json or given["quiet"])
    _run(jobs, ledger, given)


def _pages(given: dict[str, Any]) -> list[Location]:
    return [] if given["html"] is None else [place_of(given["html"])]


@contextmanager
def problems_shown(as_json: bool) -> Iterator[None]:
    """Jobs that cannot be run as they are: a line on stderr for each that is wrong, exit code 2."""
    try:
        yield
    except BatchRefused as error:
        if as_json:
            terminal.print_json(_problems(error))
        _fail_with(error)


def _problems(refused: BatchRefused) -> dict[str, Any]:
    return {**error_document(refused, 2), "problems": list(refused.problems)}


def _fail_with(refused: BatchRefused) -> NoReturn:
    """A line for each problem, and exit code 2."""
    for problem in refused.problems:
        terminal.show_error(printable(problem, 2000))
    terminal.fail(f"{count_text(len(refused.problems), 'problem')}; nothing was written", 2)


def _common(given: dict[str, Any], keys: str) -> Job:
    """A job with what is common to all; its source and output are to be filled in."""
    from ckptconv.convert.job import Job

    options = options_of(given, keys, are_sent=True)
    return Job(
        "in", "out", options, tag=given["tag"], force=given["force"],
        fsync=not given["no_fsync"], verify=given["verify"],
    )  # fmt: skip


def _share(text: str | None) -> tuple[slice, str]:
    """The jobs that are the share ``I/N``, and what the name of its ledger has."""
    if text is None:
        return slice(None), ""
    number, _, of = text.partition("/")
    if number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of):
        return slice(int(number) - 1, None, int(of)), f".{int(number)}-of-{int(of)}"
    raise OptionRefused(
        f"--share {printable(text)} is not I/N", hint="write it as 3/16, counting from 1"
    )


def _listed(
    paths: tuple[Any, ...],
    out_dir: Path | None,
    common: Job,
    passed: list[Passed],
    ledger_of: Callable[[], Path],
) -> ListedJobs:
    """The jobs that the paths say: lines of manifests, or what lies below folders."""
    from ckptconv.batch.finding import jobs_below
    from ckptconv.batch.ledger import read_ledger
    from ckptconv.batch.manifest import ListedJobs, read_manifest

    manifests = [path for path in paths if str(path).endswith(".jsonl")]
    for path in paths:
        if path not in manifests and _is_text_of_jobs(place_of(path)):
            what = "holds JSON lines, and a manifest's name ends in .jsonl"
            raise OptionRefused(what, path=path, hint="rename it")
    if manifests and len(manifests) < len(paths):
        raise OptionRefused("some PATHs are manifests and some are not", hint="name one kind")
    if manifests:
        if out_dir is not None:
            what = "--out-dir is given, but a manifest says where each output goes"
            raise OptionRefused(what, hint="leave it out")
        here = "is a manifest, which is read on this machine"
        read = [read_manifest(local_path(place_of(path), here), common) for path in manifests]
        return ListedJobs(
            tuple(job for one in read for job in one.jobs),
            tuple(name for one in read for name in one.names),
        )
    if out_dir is None:
        raise OptionRefused(
            "--out-dir is missing", hint="say where the outputs go: --out-dir portable/"
        )
    roots = [place_of(path) for path in paths]
    jobs = jobs_below(
        roots, place_of(out_dir), common, passed, lambda: read_ledger(ledger_of()).outputs
    )
    return ListedJobs(tuple(jobs), tuple(str(job.source) for job in jobs))


def _is_text_of_jobs(place: Location) -> bool:
    """Whether a file of this host begins like the line of a manifest."""
    if place.local() is None or not place.is_file():
        return False
    with closing(place.open()) as source:
        head = source.read(0, min(source.size, 512)).lstrip()
    return head.startswith(b"{") and b'"source"' in head


def _ledger_of(paths: tuple[Any, ...], given: dict[str, Any], part: str) -> Path:
    """The ledger: the one that is named, else one beside the outputs or the manifest."""
    if given["ledger"] is not None:
        return local_path(place_of(given["ledger"]), "a ledger is a file of this machine")
    if given["out_dir"] is None:
        first = Path(paths[0])
        return first.with_name(f"{first.name.removesuffix('.jsonl')}{part}.report.jsonl")
    what = "there is no place for the ledger: name one with --ledger"
    folder = local_path(place_of(given["out_dir"]), what)
    if not given["dry_run"]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"the folder of the outputs cannot be made: {error.strerror}"
            raise OutputRefused(what, path=folder, hint="name another --out-dir") from error
    return folder / f"{_REPORT}{part}.jsonl"


def _show_jobs(
    jobs: Sequence[Job], passed: list[Passed], refused: BatchRefused | None, *, as_json: bool
) -> None:
    """What would be done; with exit code 2 where it could not be."""
    from ckptconv.batch.identity import names_of
    from ckptconv.batch.manifest import manifest_line

    if as_json:
        document: dict[str, Any] = {
            "dry_run": True,
            "jobs_planned": [json.dumps(manifest_line(job)) for job in jobs],
            "passed_over": [{"path": item.path, "reason": item.reason} for item in passed],
        }
        if refused is not None:
            document |= _problems(refused)
        terminal.print_json(document)
    else:
        terminal.print_headline(f"{count_text(len(jobs), 'conversion')} would be done", err=True)
        named = ((job.output, ", ".join(map(printable, names_of(job)))) for job in jobs)
        terminal.print_lines((Row(printable(name), f"from {of}") for name, of in named), err=True)
        _tell_passed(passed, silent=False)
    if refused is not None:
        _fail_with(refused)


_PASSED_SHOWN = 10


def _tell_passed(passed: list[Passed], *, silent: bool) -> None:
    if silent or not passed:
        return
    terminal.print_headline(f"{count_text(len(passed), 'file')} passed over", err=True)
    shown = [Row(printable(item.path), item.reason) for item in passed[:_PASSED_SHOWN]]
    more = len(passed) - _PASSED_SHOWN
    if more > 0:
        shown.append(Row("…", f"and {more:,} more; --dry-run --json lists all"))
    terminal.print_lines(shown, err=True)


def _run(jobs: Sequence[Job], ledger: Path, given: dict[str, Any]) -> None:
    from ckptconv.batch.drive import Wanted, receipts_of
    from ckptconv.batch.totals import Totals
    from ckptconv.cli.progress_display import batch_shown

    totals = Totals(len(jobs))
    silent = given["quiet"] or given["as_json"]
    shown = batch_shown(totals, silent=silent)
    # an engine has words of its own: Ray tells of nodes that die
    with terminal.errors_shown(given["as_json"]), shown as display, redirect_stdout(sys.stderr):
        engine = engine_of_words(given, len(jobs))
        display.workers = engine.workers
        wanted = Wanted(given["retry_failed"], given["on_error"], on_event=display.event)
        ended: list[Receipt] = []
        for receipt in receipts_of(jobs, engine, wanted, ledger):
            totals.add(receipt)
            display.ended(receipt)
            if receipt.error is not None or not receipt.earlier:
                ended.append(receipt)
    if silent or len(ended) > _SEEN:
        ended.clear()
    _show_totals(totals, [ledger], given, told=ended)


# lines of a batch that stand above its end: what failed in more of them is said once more
_SEEN = 20


def _show_status(paths: tuple[Any, ...], given: dict[str, Any]) -> None:
    """What ledgers say."""
    from ckptconv.batch.checks import check_apart
    from ckptconv.batch.totals import totals_of

    check_apart((), [*map(place_of, dict.fromkeys(paths))], _pages(given))
    ledgers = [local_path(place_of(path), "a ledger is a file of this machine") for path in paths]
    for path in ledgers:
        if not path.exists():
            raise MissingFile("no such file", path=path, hint="check the path")
    _show_totals(totals_of(ledgers), ledgers, given)


def _show_totals(
    totals: Any, ledgers: list[Path], given: dict[str, Any], told: Sequence[Receipt] = ()
) -> None:
    """The end of a batch, or how far it is: a table, a page, the exit code. Of what was `told`
    before, failures are not said again.
    """
    from ckptconv.batch.totals import TOTALS, totals_headline, totals_lines

    if given["as_json"]:
        terminal.print_json({"reports": list(map(str, ledgers)), **TOTALS.of(totals)})
    elif not given["quiet"] or totals.failed:
        terminal.print_headline(totals_headline(totals), err=not given["status"])
        terminal.print_lines(totals_lines(totals, ledgers, told), err=not given["status"])
    if given["html"] is not None:
        from ckptconv.pages.batch_page import write_batch_page

        with terminal.errors_shown(as_json=False):  # a document has been printed
            write_batch_page(totals, given["html"], force=given["force"])
    if not totals.is_all_done:
        sys.exit(1)
