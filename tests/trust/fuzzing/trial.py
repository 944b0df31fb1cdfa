"""One file given to the library in every way a user would, and what was wrong with the answer.

Right answers are a result, or a `CheckpointError` of one printable line that names the file. Wrong
are any other exception, more than `SECONDS` of CPU time or `MEMORY` bytes for one step, a file left
behind or changed, a name of the file imported or a program started, and an output that does not
open or differs from its source.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ckptconv import (
    CheckpointError,
    diagnose,
    diff_checkpoints,
    open_checkpoint,
    plan_conversion,
    read_key_rules,
    scan_checkpoint,
)
from ckptconv.convert import report
from ckptconv.convert.execute import execute_plan
from ckptconv.convert.key_targets import key_target
from ckptconv.convert.planner import ConversionPlan, Options, Request
from ckptconv.diff import report as verdicts
from ckptconv.doctor import report as diagnosis_report
from ckptconv.inspect import report as inspection_report
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.keys.key_map import KEEP, KeyRules
from ckptconv.scan import files as scan_report
from ckptconv.support.report import Row
from fuzzing.inputs import GOOD, Kind, Trial

T = TypeVar("T")
SECONDS = 2.0
"""CPU time of one step; patterns in key rules may take 10 s (`limits.regex_seconds`)."""
MEMORY = 200_000_000
LARGEST_OUTPUT = 8 << 20
"""Bytes of an output that is written; a larger one is planned only (a tensor may claim a GiB before
it is questioned).
"""


class Find(NamedTuple):
    """Something wrong: what sort of thing, at which step, in words, and where in ckptconv (with the
    traceback, if any).
    """

    kind: str
    step: str
    what: str
    where: str = ""
    trace: str = ""

    @property
    def signature(self) -> str:
        """Equal for two finds that probably are one."""
        return f"{self.kind} {self.where or self.step + ' ' + self.what[:60]}"


@dataclass
class Verdict:
    """What became of a trial: the outputs that were written and found right, and what was wrong."""

    accepted: int = 0
    refused: int = 0
    finds: list[Find] = field(default_factory=list)


class _TooSlow(BaseException):
    """The CPU time of a step has run out."""


def _stop(*_: object) -> None:
    raise _TooSlow


Oracle = Callable[[Path, Path], "str | None"]
"""Says what is wrong with an output (second) of a source (first), as torch sees both; None for
nothing.
"""


def run(trial: Trial, folder: Path, oracle: Oracle | None = None) -> Verdict:
    """Try the files in the empty `folder` (best in memory), which is emptied again."""
    watch = _Watch(folder, oracle)
    source, out, scratch = folder / "in", folder / "out", folder / "tmp"
    before, tempfile.tempdir = tempfile.tempdir, str(scratch)
    _STRANGE.clear()
    try:
        _lay(trial, source)
        out.mkdir()
        scratch.mkdir()
        original = fingerprint(source)
        TRIALS[trial.kind](
            watch, [source / name if name != "." else source for name in trial.named], out
        )
        if fingerprint(source) != original:
            watch.note("input changed", "all", "the files given are not what they were")
        watch.check_left("all", scratch)
        watch.check_payload()
    finally:
        tempfile.tempdir = before
        for item in list(folder.iterdir()):
            shutil.rmtree(item, ignore_errors=True)
    return watch.verdict


def _lay(trial: Trial, source: Path) -> None:
    source.mkdir()
    for name, content in trial.files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def fingerprint(folder: Path) -> dict[str, str]:
    """The files of a folder by name, with their hashes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


# -------------------------------------------------------------------------------------------- steps


class _Watch:
    """Runs steps within their limits and notes what is wrong with them."""

    def __init__(self, folder: Path, oracle: Oracle | None) -> None:
        self.verdict = Verdict()
        self.oracle = oracle
        self._folder = folder

    def note(self, kind: str, step: str, what: str, error: BaseException | None = None) -> None:
        where, trace = ("", "") if error is None else _placed(error)
        self.verdict.finds.append(Find(kind, step, what, where, trace))

    def step(
        self, name: str, work: Callable[[], T], *, seconds: float = SECONDS, refusing: bool = True
    ) -> T | None:
        """What `work` gives; None when it refused or was wrong. Not `refusing`: a refusal is wrong
        too.
        """
        peak = _Peak()
        begin = time.process_time()
        try:
            with _cpu_limit(seconds):
                return work()
        except CheckpointError as error:
            self.verdict.refused += 1
            self._judge_refusal(name, error)
            if not refusing:
                self.note("refused late", name, str(error), error)
        except _TooSlow as error:
            self.note("slow", name, f"more than {seconds} s of CPU time", error)
        except Exception as error:
            self.note(type(error).__name__, name, str(error)[:300], error)
        finally:
            if (spent := time.process_time() - begin) > seconds and not any(
                find.kind == "slow" for find in self.verdict.finds
            ):
                self.note("slow", name, f"{spent:.1f} s of CPU time")
            if (grown := peak.grown()) > MEMORY:
                self.note("memory", name, f"grew by {grown / 1e6:.0f} MB")
        return None

    def _judge_refusal(self, name: str, error: CheckpointError) -> None:
        line = str(error)
        if not line.isprintable() or len(line) > 5000 or " object at 0x" in line:
            self.note("error line", name, repr(line[:300]), error)
        if str(self._folder) not in line:
            self.note("error without file", name, line[:300], error)

    def check_lines(self, name: str, lines: Sequence[Row]) -> None:
        for row in lines:
            if not row.text.isprintable() or " object at 0x" in row.text:
                self.note("unprintable", name, repr(row.text[:300]))

    def check_left(self, name: str, out: Path) -> None:
        """After a refusal nothing may lie in the folder of outputs."""
        if left := [path.name for path in out.iterdir()]:
            self.note("left behind", name, ", ".join(left)[:300])

    def check_payload(self) -> None:
        if "fuzzing.payload" in sys.modules:
            self.note("executed", "all", "a module that the file names was imported")
            del sys.modules["fuzzing.payload"]
        for event in _STRANGE:
            self.note("executed", "all", event)
        _STRANGE.clear()


def _placed(error: BaseException) -> tuple[str, str]:
    """Where in ckptconv an exception was raised (its deepest frame there), and the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/ckptconv/" in frame.filename]
    place = f"{Path(inside[-1].filename).name}:{inside[-1].name}" if inside else ""
    return place, "".join(traceback.format_exception(error, limit=-40))


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Peak:
    """The growth of the peak of resident memory; where the peak cannot be reset (no Linux), nothing
    is measured.
    """

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status_kb("VmRSS")
        except OSError:
            self._before = None

    def grown(self) -> int:
        return 0 if self._before is None else (_status_kb("VmHWM") - self._before) * 1024


def _status_kb(field_: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field_ + ":"))


def limit_address_space(nbytes: int = 8 << 30) -> None:
    """Let an allocation of gigabytes fail in this process; that is a `MemoryError`, and a find."""
    with contextlib.suppress(ValueError, OSError):  # not every system has it
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


_STRANGE: list[str] = []
_NEVER = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen",
    "socket.connect",
          "pickle.find_class", "ctypes.dlopen", "code.__new__", "marshal.loads")  # fmt: skip


def forbid_execution(work: Path) -> None:
    """From now on, note every program that is started, every pickle that is loaded, every file
    written outside of `work`.
    """
    root = str(work)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_NEVER) and not _is_ours(arguments) and not _is_import():
            _STRANGE.append(f"{event} {arguments!r}"[:300])
        elif (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            path = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else ""
            inside = path.startswith((root, "/proc/", "/dev/null"))
            if path and not inside and not _is_import():  # which keeps the bytecode
                _STRANGE.append(f"writes {path}"[:300])

    sys.addaudithook(hook)


def _is_ours(arguments: tuple[Any, ...]) -> bool:
    """Whether this starts the program that lists the host's GPUs, or the one that asks torch."""
    return arguments[0] == "nvidia-smi" or any(
        "fuzzing.torch_oracle" in str(argument) for argument in arguments
    )


def _is_import() -> bool:
    """Whether this happens because ckptconv imports a module of its own or of a library."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# ------------------------------------------------------------------------------------------- trials


def _named(paths: Sequence[Path]) -> Any:
    return paths[0] if len(paths) == 1 else list(paths)


def _try_checkpoint(watch: _Watch, paths: Sequence[Path], out: Path) -> None:
    """All looks, and two of the conversions; one where the file does not even open (which ones
    depends on its size alone).
    """
    opens = watch.step("inspect", lambda: _inspect(watch, paths))
    watch.step("doctor", lambda: _diagnose(watch, paths))
    watch.step("scan", lambda: _scan(watch, paths[0]))
    nbytes = sum(path.stat().st_size for path in paths[0].parent.rglob("*"))
    chosen = random.Random(nbytes).sample(list(CONVERSIONS.items()), 2 if opens else 1)
    if watch.oracle is not None and "keep" not in (name for name, _ in chosen):
        # the one whose tensors torch must see as they were
        chosen[0] = ("keep", CONVERSIONS["keep"])
    for name, how in chosen:
        _convert(watch, paths, out, name, how)


CONVERSIONS: dict[str, tuple[str, Options]] = {
    "torch": ("out.pt", Options()),
    "safetensors": ("out.safetensors", Options()),
    "keep": ("out.pt", Options(keys=KEEP, unknown="keep")),
    "drop": ("out.pt", Options(unknown="drop")),
    "shards": ("out.safetensors", Options(max_shard_size=64, tied="duplicate")),
}


def _inspect(watch: _Watch, paths: Sequence[Path]) -> bool:
    with open_checkpoint(_named(paths)) as checkpoint:
        found = inspect_checkpoint(checkpoint, depth=3)
    watch.check_lines(
        "inspect",
        [
            *inspection_report.inspection_lines(found),
            *inspection_report.tree_lines(found.root, 1000),
        ],
    )
    inspection_report.verdict(found)
    _as_json(inspection_report.inspection_document(found))
    return True


def _diagnose(watch: _Watch, paths: Sequence[Path]) -> None:
    found = diagnose(_named(paths), values=True)
    watch.check_lines("doctor", list(diagnosis_report.finding_lines(found.findings)))
    _as_json(diagnosis_report.diagnoses_document([found]))


def _scan(watch: _Watch, path: Path) -> None:
    found = scan_checkpoint(path)
    watch.check_lines("scan", list(scan_report.scan_lines(found)))
    _as_json(scan_report.SCAN.of(found))


def _as_json(document: Any) -> None:
    json.dumps(document, indent=2).encode()


def _convert(
    watch: _Watch, paths: Sequence[Path], out: Path, name: str, how: tuple[str, Options]
) -> None:
    output = out / how[0]
    plan = watch.step(f"convert {name}", lambda: _converted(watch, paths, output, how[1]))
    written = [path for path in out.iterdir() if path.name.startswith("out")]
    if plan is None:
        watch.check_left(f"convert {name}", out)
    elif written:
        watch.verdict.accepted += 1
        read_back = output if output in written else out / f"{output.name}.index.json"
        watch.step(
            f"read back {name}",
            lambda: _read_back(watch, paths, read_back, name, how[1], plan),
            refusing=False,
        )
        if (
            name == "keep"
            and len(paths) == 1
            and watch.oracle
            and (wrong := watch.oracle(paths[0], output))
        ):
            watch.note("torch sees another", name, wrong)
    _judge_output(watch, name, out, plan)


def _judge_output(watch: _Watch, name: str, out: Path, plan: ConversionPlan | None) -> None:
    """Nothing but the output lies there; then it goes, but for what torch is to see."""
    expected = (
        set()
        if plan is None
        else {file.path.name for file in plan.files}
        | ({plan.index.path.name} if plan.index else set())
    )
    if strays := [path.name for path in out.iterdir() if path.name not in expected]:
        watch.note("left behind", f"convert {name}", ", ".join(strays)[:300])
    for path in out.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _converted(
    watch: _Watch, paths: Sequence[Path], output: Path, options: Options
) -> ConversionPlan:
    with open_checkpoint(_named(paths), whole_modules=options.unknown == "keep") as checkpoint:
        plan = plan_conversion(checkpoint, output, options)
        watch.check_lines("plan", [*report.plan_lines(plan), Row("", report.plan_headline(plan))])
        _as_json(report.PLAN.of(plan))
        if plan.nbytes <= LARGEST_OUTPUT:
            result = execute_plan(plan, fsync=False, verify=True)
            watch.check_lines("result", list(report.result_lines(result)))
            _as_json(report.result_document(result))
        return plan


def _read_back(
    watch: _Watch,
    paths: Sequence[Path],
    output: Path,
    name: str,
    options: Options,
    plan: ConversionPlan,
) -> None:
    """The output opens, and is its source but for what was announced; a source of several state
    dicts is only opened.
    """
    with open_checkpoint(output, whole_modules=options.unknown == "keep") as checkpoint:
        inspect_checkpoint(checkpoint)
    try:
        found = diff_checkpoints(_named(paths), output, keys=options.keys)
    except CheckpointError:
        return
    shown = [*verdicts.difference_table(found).lines(1000), *verdicts.difference_rows(found)]
    watch.check_lines("diff", shown)
    _as_json(verdicts.DIFFERENCE.of(found))
    if (
        not found.same
        and not plan.skipped
        and (plan.to == "safetensors" or _chosen(paths) == _chosen([output]))
    ):
        lines = " | ".join(f"{row.label}: {row.text}" for row in shown)
        watch.note("differs", f"read back {name}", lines)


def _chosen(paths: Sequence[Path]) -> str:
    """The place of the state dict that is compared; arrays that became tensors can make it another
    one in the output.
    """
    with open_checkpoint(_named(paths)) as checkpoint:
        return checkpoint.state_dict().path


def _try_quantised(watch: _Watch, paths: Sequence[Path], out: Path) -> None:
    """Looked at, and dequantised in two ways; a plain statement of the formats says the values."""
    from fuzzing.plain_weights import other_value

    watch.step("inspect", lambda: _inspect(watch, paths))
    watch.step("doctor", lambda: _diagnose(watch, paths))
    for name, how in DEQUANTISED.items():
        output = out / how[0]
        step = f"dequantise {name}"
        plan = watch.step(
            step, lambda how=how, output=output: _converted(watch, paths, output, how[1])
        )
        if plan is None:
            watch.check_left(step, out)
        elif output.exists():
            watch.verdict.accepted += 1
            folder = paths[0] if paths[0].is_dir() else paths[0].parent
            if name == "float32" and (wrong := other_value(folder, output)):
                watch.note("other value", step, wrong)
        _judge_output(watch, step, out, plan)


DEQUANTISED: dict[str, tuple[str, Options]] = {
    "float32": ("out.safetensors", Options(dequantize=True, dtype="f32")),
    "torch": ("out.pt", Options(dequantize=True)),
}


def _try_rules(watch: _Watch, paths: Sequence[Path], out: Path) -> None:
    """The rules are read, as they are and turned around, and applied to a good checkpoint."""
    for reverse in (False, True):
        rules = watch.step(
            "rules", lambda reverse=reverse: read_key_rules(paths[0], reverse=reverse), seconds=12
        )
        if isinstance(rules, KeyRules):
            _convert_good(watch, paths[0].parent / GOOD, out, Options(keys=rules))


def _try_like(watch: _Watch, paths: Sequence[Path], out: Path) -> None:
    target = watch.step("like", lambda: key_target(paths[0], None))
    if target is not None:
        _convert_good(watch, paths[0].parent / GOOD, out, Request(fit_to=target))
    watch.step("doctor --like", lambda: diagnose(paths[0].parent / GOOD, like=paths[0]))


def _convert_good(watch: _Watch, good: Path, out: Path, options: Options) -> None:
    def work() -> None:
        with open_checkpoint(good) as checkpoint:
            plan = plan_conversion(checkpoint, out / "out.pt", options)
            watch.check_lines(
                "plan",
                [*report.plan_lines(plan), *(Row("", line) for line in report.keys_table(plan))],
            )
            execute_plan(plan, fsync=False, verify=True)

    try:
        watch.step("convert", work, seconds=12)
    finally:
        if (out / "out.pt").exists():
            watch.verdict.accepted += 1
            (out / "out.pt").unlink()
        watch.check_left("convert", out)


TRIALS: dict[Kind, Callable[[_Watch, Sequence[Path], Path], None]] = {
    "checkpoint": _try_checkpoint,
    "quantised": _try_quantised,
    "rules": _try_rules,
    "like": _try_like,
}

__all__ = ["Find", "Verdict", "forbid_execution", "limit_address_space", "run"]
