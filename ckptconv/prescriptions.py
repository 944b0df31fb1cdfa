"""The command that mends a checkpoint: which conversion, where to, and whether it would work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from ckptconv.checkpoint import Checkpoint
from ckptconv.devices import tag_map
from ckptconv.dtypes import floating_dtype
from ckptconv.errors import CheckpointError, RefusedObject
from ckptconv.fitted_keys import KeyTarget
from ckptconv.keys import KeyRules
from ckptconv.planning import plan_conversion
from ckptconv.plans import Request
from ckptconv.settling import Unknown
from ckptconv.wording import as_argument


@dataclass(frozen=True, slots=True)
class Mend:
    """A conversion that mends: options of `ckptconv convert`, None where the default will do.

    `suffix` is that of the output's name, which decides its format.
    """

    suffix: str | None = None
    device: str | None = None
    only: str | None = None
    strip_prefix: str | None = None
    dtype: str | None = None
    unknown: Unknown = "refuse"
    like: str | None = None
    model: str | None = None
    drop_unexpected: bool | None = None
    tag: str | None = None

    def with_(self, other: Mend) -> Mend:
        """Both: what the other one asks for goes before what this one does."""
        given = {name: value for name in self.__slots__ if (value := getattr(other, name)) is not None}
        if other.unknown == "refuse":
            given["unknown"] = self.unknown
        return replace(self, **given)

    def options(self, target: KeyTarget | None) -> Request:
        """The conversion as the library has it; `target` is what `like` or `model` name."""
        keys = KeyRules(strip_prefixes=(self.strip_prefix,) if self.strip_prefix else ())
        dtype = floating_dtype(self.dtype) if self.dtype else None
        fit_to = replace(target, drop_unexpected=bool(self.drop_unexpected)) if target and (self.like or self.model) else None
        return Request(keys=keys, tags=tag_map(self.device), dtype=dtype, only=self.only, unknown=self.unknown, fit_to=fit_to)

    def arguments(self) -> list[str]:
        """The same as words of a command line."""
        named = (
            ("--tag", self.tag),
            ("--device", self.device),
            ("--only", self.only),
            ("--strip-prefix", self.strip_prefix),
            ("--dtype", self.dtype),
            ("--like", self.like),
            ("--model", self.model),
            ("--unknown", None if self.unknown == "refuse" else self.unknown),
        )
        words = [word for name, value in named if value is not None for word in (name, value)]
        return words + ["--drop-unexpected"] * bool(self.drop_unexpected)


def workable(mend: Mend, checkpoint: Checkpoint, target: KeyTarget | None = None) -> Mend | CheckpointError:
    """The mend, with objects dropped that have no plain form if there is no other way; or why it would not work."""
    try:
        plan_conversion(checkpoint, f"OUT{mend.suffix or '.pt'}", mend.options(target))
    except RefusedObject as error:
        return error if mend.unknown == "drop" else workable(replace(mend, unknown="drop"), checkpoint, target)
    except CheckpointError as error:
        return error
    return mend


def command(mend: Mend, paths: Sequence[Path]) -> str:
    """The command line, ready for a POSIX shell."""
    files = map(as_argument, (*paths, output_beside(paths[0], mend.suffix or ".pt")))
    return " ".join(map(quote, ("ckptconv", "convert", *files, *mend.arguments())))


def output_beside(path: Path, suffix: str) -> Path:
    """A name beside `path` that is free: ``model-portable.pt``, else ``model-portable-2.pt``, …"""
    given = path if path.name else path.absolute()
    stem = given.name.removesuffix(".index.json")
    stem = stem if given.is_dir() else Path(stem).stem
    names = (f"{stem}-portable{number}{suffix}" for number in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(found for name in names if not (found := given.parent / name).exists())
