"""The command that fixes a checkpoint: which conversion, where to, would it work, what is lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path, PurePath
from shlex import quote
from typing import Any

from ckptconv.convert.options import Options, Request
from ckptconv.convert.plan import ConversionPlan
from ckptconv.convert.planner import plan_trial
from ckptconv.objects.threats import DO_NOT_LOAD
from ckptconv.pickles.nodes import Call
from ckptconv.support.addresses import UrlPath
from ckptconv.support.errors import AmbiguousStateDict, CheckpointError, RefusedObject
from ckptconv.support.records import dataclass
from ckptconv.support.text import STANDARD_INPUT, as_argument, count_text
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.fitted_keys import KeyTarget
from ckptconv.tree.settling import Unknown
from ckptconv.tree.walk import tensors_of


@dataclass(frozen=True, slots=True)
class Fix:
    """A conversion that fixes: options of `ckptconv convert`, None where the default will do.

    `suffix` is that of the output's name, which decides its format; empty for a folder, whose
    format `to` says.
    """

    suffix: str | None = None
    to: str | None = None
    tag: str | None = None
    device: str | None = None
    only: str | None = None
    strip_prefix: str | None = None
    preset: str | None = None
    dtype: str | None = None
    like: str | None = None
    model: str | None = None
    tied: str | None = None
    unknown: Unknown | None = None
    drop_unexpected: bool | None = None
    dequantize: bool | None = None
    with_files: bool | None = None

    @property
    def ending(self) -> str:
        """How the name of the output ends."""
        return ".pt" if self.suffix is None else self.suffix

    def with_(self, other: Fix) -> Fix:
        """Both: what the other one asks for goes before what this one does."""
        return replace(self, **other.given())

    def given(self) -> dict[str, Any]:
        """What is asked for, by its name, in the order of a command line."""
        named = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in named if value is not None}

    def options(self, target: KeyTarget | None) -> Request:
        """The conversion as the library has it; `target` is what `like` or `model` name."""
        words = self.given()
        fit_to = None
        if target and (self.like or self.model):
            fit_to = replace(target, drop_unexpected=bool(self.drop_unexpected))
        for name in ("suffix", "tag"):  # those of the output's name, and of the opened source
            words.pop(name, None)
        return Options(**words).request(fit_to)

    def arguments(self) -> list[str]:
        """The same as words of a command line."""
        words: list[str] = []
        for name, value in self.given().items():
            if name != "suffix" and value is not False:
                words.append(f"--{name.replace('_', '-')}")
                words += [] if value is True else [value]
        return words


@dataclass(frozen=True, slots=True)
class Prescription:
    """A conversion that works; `lost` says what its output lacks because it has no plain form."""

    fix: Fix
    lost: tuple[str, ...] = ()


def workable(
    fix: Fix, checkpoint: Checkpoint, target: KeyTarget | None = None
) -> Prescription | CheckpointError:
    """The fix, without objects that have no plain form if need be; or why it would not work."""
    try:
        plan = plan_trial(checkpoint, f"OUT{fix.ending}", fix.options(target))
    except RefusedObject as error:
        return error if fix.unknown == "drop" else _dropping(fix, checkpoint, target, error)
    except CheckpointError as error:
        return error
    lost = _lost(plan, checkpoint) if fix.unknown == "drop" else []
    if sum(count for _, count in lost) >= max(1, sum(1 for _ in plan.made_of.tensors())):
        return AmbiguousStateDict("most of its tensors would be lost", path=checkpoint.path)
    return Prescription(fix, tuple(text for text, _ in lost))


def _dropping(
    fix: Fix, checkpoint: Checkpoint, target: KeyTarget | None, refused: RefusedObject
) -> Prescription | CheckpointError:
    """The fix that drops what was refused; where that takes tensors along, the refusal."""
    found = workable(replace(fix, unknown="drop"), checkpoint, target)
    if not isinstance(found, AmbiguousStateDict):
        return found
    hint = DO_NOT_LOAD if refused.code == "dangerous" else _ELSEWHERE
    what = f"{refused.what}, and its tensors are lost without it"
    return RefusedObject(what, path=refused.path, where=refused.where, hint=hint)


_ELSEWHERE = (
    "load it where its classes are and save its state_dict(), or keep it as it is with --unknown "
    "keep"
)


def _lost(plan: ConversionPlan, checkpoint: Checkpoint) -> list[tuple[str, int]]:
    """What was dropped, in words, and how many tensors: objects, and what is beside state dicts."""
    unsaved = {id(stray.node) for stray in checkpoint.module_strays if stray.is_refused}
    found = []
    for item in plan.skipped:
        if item.is_dropped or id(item.node) in unsaved:
            count = sum(1 for _ in tensors_of(item.node))
            what = [item.node.name] if type(item.node) is Call else []
            if count:
                what.append(count_text(count, "tensor"))
            about = f" ({', '.join(what)})" if what else ""
            found.append((f"{item.path or 'the root'}{about}", count))
    return found


def command(fix: Fix, paths: Sequence[PurePath], output: PurePath | None = None) -> str:
    """The command line, ready for a POSIX shell; without an `output` it gets a free name."""
    made = output or output_beside(paths[0], fix.ending)
    return " ".join(
        map(quote, ("ckptconv", "convert", *map(as_argument, (*paths, made)), *fix.arguments()))
    )


def output_beside(path: PurePath, suffix: str, taken: Collection[PurePath] = ()) -> Path:
    """A free name beside `path`, not `taken`: ``model-portable.pt``, ``model-portable-2.pt``, … For
    a checkpoint that is elsewhere it is one of the working folder.
    """
    given = Path(path.name) if isinstance(path, UrlPath) else Path(path)
    given = Path("model") if str(path) == STANDARD_INPUT else given
    given = given if given.name else given.absolute()
    stem = given.name.removesuffix(".index.json")
    stem = stem if given.is_dir() else Path(stem).stem
    names = (
        f"{stem}-portable{number}{suffix}" for number in ("", *(f"-{n}" for n in range(2, 1000)))
    )
    places = (given.parent / name for name in names)
    return next(place for place in places if not place.exists() and place not in taken)
