"""What became of one job, as a value and as a line of a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from math import isfinite
from typing import Any, Literal

from ckptconv.support.errors import (
    OUT_OF_MEMORY,
    CheckpointError,
    RemoteFailure,
    is_out_of_memory,
    printable,
    worded,
)
from ckptconv.support.records import dataclass, given_fields
from ckptconv.support.report import short_repr
from ckptconv.support.text import size_text

State = Literal["done", "failed"]

Stamps = Mapping[str, list[Any]]
"""Files by their names, each with what tells it from others and from what it was."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed: the class of the error, its line and hint.

    `passing`: another try, later, may succeed.
    """

    kind: str
    message: str
    hint: str | None = None
    passing: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Receipt:
    """What became of one job.

    `source` are the names that were given, `output` the one that was to be written. `fingerprint`
    stands for the source's identity, the options and the rules of conversion; `made` for the files
    that were written, and `read` for those that were read and lie outside of `source`. `seconds`
    are those of the last try, `tries` counts them. `source_nbytes` and `nbytes` are the sizes of
    what was read and written, in bytes; `format` is the source's and `to` the output's; `tensors`
    counts those written. `verified` counts the tensors that were read back (None: not asked for).
    `found`: the output was there already, byte for byte. `earlier`: it was done in an earlier run.
    `worker` is the host and the process that ran it, `network` what went over the network for it
    (None: nothing). `error` is there when `state` is ``failed``.
    """

    source: tuple[str, ...]
    output: str
    state: State
    fingerprint: str = ""
    seconds: float = 0.0
    tries: int = 1
    source_nbytes: int = 0
    nbytes: int = 0
    tensors: int = 0
    format: str = ""
    to: str = ""
    notes: tuple[str, ...] = ()
    verified: int | None = None
    found: bool = False
    worker: str = ""
    network: Mapping[str, int] | None = None
    made: Stamps | None = None
    read: Stamps | None = None
    error: Failure | None = None
    earlier: bool = False

    def __repr__(self) -> str:
        told = "done" if self.error is None else f"failed: {self.error.message}"
        size = size_text(self.nbytes) if self.nbytes else None
        return short_repr("Receipt", f"{', '.join(self.source)} → {self.output}", told, size)

    def line(self) -> dict[str, Any]:
        """The receipt as JSON values, without what is as usual."""
        given = given_fields(self)
        found = {name: value for name, value in given.items() if name not in _UNTOLD}
        found["source"] = list(self.source)
        found["seconds"] = round(self.seconds, 6)
        if self.error is not None:
            found["error"] = asdict(self.error)
        return found


# it is true of the run that reads the line, not of the job
_UNTOLD = ("earlier",)


_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("fingerprint", "format", "to", "worker"), (str,)),
    **dict.fromkeys(("tries", "source_nbytes", "nbytes", "tensors"), (int,)),
    **dict.fromkeys(("network", "made", "read"), (dict, type(None))),
    "seconds": (int, float),
    "verified": (int, type(None)),
    "found": (bool,),
}
"""What a line of a ledger may say, beside what every one has to."""


def _is_kind(value: Any, kinds: tuple[type, ...]) -> bool:
    # `type`, for True is an int to isinstance; and the JSON of Python may hold NaN, of which no sum
    # can be made
    return type(value) in kinds and not (type(value) is float and not isfinite(value))


def receipt_of(line: Mapping[str, Any]) -> Receipt:
    """The receipt that a line of a ledger tells of; `ValueError` for what is not one."""
    known = {item.name for item in fields(Receipt)} - set(_UNTOLD)
    told = {name: value for name, value in line.items() if name in known}
    source, notes = told.get("source"), told.get("notes", [])
    if not (
        isinstance(source, list)
        and all(type(name) is str for name in source)
        and type(told.get("output")) is str
        and told.get("state") in ("done", "failed")
        and isinstance(notes, list)
        and all(_is_kind(told[name], kinds) for name, kinds in _KINDS.items() if name in told)
    ):
        raise ValueError("not a receipt")
    if (error := told.get("error")) is not None:
        if not isinstance(error, dict):
            raise ValueError("not a receipt")
        told["error"] = failure_of(error)
    return Receipt(**{**told, "source": tuple(source), "notes": tuple(map(str, notes))})


def failure_of(told: Mapping[str, Any]) -> Failure:
    """A failure out of JSON values."""
    kind, message = str(told.get("kind", "")), str(told.get("message", ""))
    hint = None if told.get("hint") is None else str(told["hint"])
    return Failure(kind, message, hint, told.get("passing") is True)


def failed_by(error: BaseException) -> Failure:
    """The failure that an error is; of one that is not ours, its class and its text."""
    if isinstance(error, CheckpointError):
        passing = isinstance(error, RemoteFailure) and error.passing
        hint = None if error.hint is None else worded(error.hint)
        return Failure(type(error).__name__, str(error), hint, passing)
    if is_out_of_memory(error):
        return Failure("MemoryError", OUT_OF_MEMORY)
    return Failure(type(error).__name__, printable(f"{type(error).__name__}: {error}", 2000))
