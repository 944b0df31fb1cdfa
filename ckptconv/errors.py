"""What can go wrong, as one small tree of exceptions with one wording.

Every message reads ``{path}: {where}: {what}; {hint}`` and is a single printable line: text that came out of a file is
escaped before it gets in. Raising is done where the fact is known; this module only holds the words' shape.
"""

from __future__ import annotations

import sys

_LONGEST_NAME = 200


def printable(text: object, limit: int = _LONGEST_NAME) -> str:
    """`text` as one safe line: control and other unprintable characters escaped, cut after `limit` characters."""
    raw = text if isinstance(text, str) else str(text)
    cut = raw if len(raw) <= limit else raw[:limit] + "…"
    if cut.isprintable():
        return cut
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


class CheckpointError(Exception):
    """Something about a checkpoint, a request or this host that stops the work.

    Attributes: `what` is wrong, `path` of the file (or None), `where` in it (a key, a record, a header field, or
    None) and the `hint`: the command or option that helps (or None). All are plain text as it was found; `str()` gives
    the escaped line.
    """

    def __init__(self, what: str, *, path: object = None, where: object = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.path = None if path is None else str(path)
        self.where = None if where is None else str(where)
        self.hint = hint

    def at(self, *, path: object = None, where: object = None) -> CheckpointError:
        """Fill in the path or the place, where a lower layer could not know it; what is known already stays."""
        if self.path is None and path is not None:
            self.path = str(path)
        if self.where is None and where is not None:
            self.where = str(where)
        return self

    def __str__(self) -> str:
        place = [printable(part) for part in (self.path, self.where) if part]
        line = ": ".join([*place, printable(self.what, 2000)])
        return f"{line}; {printable(self.hint, 2000)}" if self.hint else line


class MalformedCheckpoint(CheckpointError):
    """The bytes contradict themselves or their format: truncated, corrupt, or made to deceive."""


class UnsupportedCheckpoint(CheckpointError):
    """The file is something else than a checkpoint, or of a kind that is not read yet."""


class IncompleteCheckpoint(UnsupportedCheckpoint):
    """One rank's file of a checkpoint whose tensors are split over several, without the others."""


class LimitExceeded(CheckpointError):
    """A size, count or depth is beyond what any sensible checkpoint has.

    Attributes: the name of the `limit` (a field of `bounds.Limits`), its value `allowed` where it was exceeded, and the value
    `needed` that would have done (None where that is not known). The hint says how to raise it (`raising`: in words of its
    own), after the `advice` of what else would help.
    """

    def __init__(
        self,
        what: str,
        *,
        limit: str,
        allowed: float,
        needed: float | None = None,
        raising: str | None = None,
        path: object = None,
        where: object = None,
        advice: str | None = None,
    ) -> None:
        self.limit, self.allowed, self.needed = limit, allowed, needed
        enough = 2 * allowed if needed is None else needed
        if raising is None:
            raising = (
                f"if the file is right, raise the limit: --limit {limit}={enough} (ckptconv.limits({limit}={enough}) in code)"
            )
        hint = f"{advice}; {raising}" if advice else raising
        super().__init__(f"{what}, beyond the limit {limit}={allowed}", path=path, where=where, hint=hint)


def too_deep(what: str, *, path: object = None) -> LimitExceeded:
    """The refusal of what nests deeper than Python itself can follow."""
    allowed = sys.getrecursionlimit()
    raising = f"the limit is Python's own: sys.setrecursionlimit({10 * allowed}) raises it"
    return LimitExceeded(what, limit="sys.getrecursionlimit()", allowed=allowed, raising=raising, path=path)


class RefusedObject(CheckpointError):
    """The tree holds something that the output cannot hold, or that `weights_only=True` would refuse."""


class KeyConflict(CheckpointError):
    """Key rules that cannot be applied: two keys become one, or a key is no key."""


class AmbiguousStateDict(CheckpointError):
    """No state dict was found, or several and the choice is the user's."""


class KeyMismatch(CheckpointError):
    """The checkpoint's keys or shapes are not those of the model, or of what else they were to fit.

    `fit` is the `key_fitting.Fit` that tells of every key, where there is one.
    """

    def __init__(
        self, what: str, *, path: object = None, where: object = None, hint: str | None = None, fit: object = None
    ) -> None:
        super().__init__(what, path=path, where=where, hint=hint)
        self.fit = fit


class OptionRefused(CheckpointError, ValueError):
    """An option of the library that is none of its choices, empty, or of another type; the hint names the choices."""


class DeviceUnavailable(CheckpointError):
    """A location tag that is no device, or a device that this host does not have."""


class OutputRefused(CheckpointError):
    """The output cannot or must not be written where it was asked for."""


class VerificationFailed(CheckpointError):
    """The output, read back, differs from its source."""
