"""What can go wrong, as one small tree of exceptions with one wording.

Every message reads ``{path}: {where}: {what}; {hint}`` and is a single printable line: text that
came out of a file is escaped before it gets in. Raising is done where the fact is known; this
module only holds the words' shape. Options are written as on the command line, and said in the
words of who called.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol

from ckptconv.support.settings import set_within

_LONGEST_NAME = 200


def printable(text: object, limit: int = _LONGEST_NAME) -> str:
    """`text` as one safe line: unprintable characters escaped, cut after `limit` characters."""
    if not isinstance(text, str):
        text = str(text)
    if len(text) > limit:
        text = text[:limit] + "…"
    if text.isprintable():  # nearly all: what follows takes a call for each character
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


_ON_COMMAND_LINE: ContextVar[bool] = ContextVar("called from the command line", default=False)
is_on_command_line = _ON_COMMAND_LINE.get


def on_command_line(told: bool = True) -> AbstractContextManager[object]:
    """Within the block, options are named as on the command line, else as in Python."""
    return set_within(_ON_COMMAND_LINE, told)


def worded(text: str) -> str:
    """A text that names options as on the command line, in the words of who called.

    >>> with on_command_line(False):
    ...     worded("--force replaces it, --only PATH takes one part; leave --dtype out")
    'force=True replaces it, only=PATH takes one part; leave dtype out'
    """
    return text if is_on_command_line() else re.sub(_OPTION, _in_python, text)


# A command to copy stays as it is. What follows an option is its value, but for words of prose.
_OPTION = (
    r"ckptconv [a-z-]+ (?:[A-Z]|--)[^;]*"
    r"|(?P<leave>leave |without )?--(?P<name>[a-z]+(?:-[a-z]+)*)(?![\w-])"
    r"(?:[ =](?P<value>'[^']*'|(?!(?:SENTENCE)\b)[^\s,;()]+))?".replace(
        "SENTENCE",
        "and|at|changes|does|for|is|it|keeps|leaves?|lists?|looks|makes?|matches|names?|only|or|out"
        "|replaces?|says|sends|so|takes?|the|to|undoes|where|which|without|writes?",
    )
)
_FLAG = """
    force verify dequantize drop-unexpected with-files with-training reverse ignore-dtype
    retry-failed
"""
_VALUED = """
    only only-b tag to keys dtype device unknown exclude include rename strip-prefix add-prefix
    preset rules like model cast map-location keep-dtype drop metadata tied max-shard-size ledger
    save-mapping integers prefix address engine jobs regex scheme scale manifest public-key version
    base-version optimizer order-from encoding checksum only-new tag-new
"""
_FLAGS = frozenset(_FLAG.split())
_OPTIONS = _FLAGS.union(_VALUED.split())
# what is an option of the command line alone
_NOT_OPTIONS = {
    "limit": "ckptconv.limits({})",
    "unpinned": "ckptconv.limits(unpinned=True)",
    "allow-hosts": "CKPTCONV_ALLOW_HOSTS={}",
    "json": "the fit of this error",
}


def _in_python(found: re.Match[str]) -> str:
    """An option as Python has it; what is not an option of ours stays as it is."""
    name, value = found["name"], found["value"]
    if name in _NOT_OPTIONS:
        return _NOT_OPTIONS[name].format(value)
    if name not in _OPTIONS:
        return found[0]
    word, before = name.replace("-", "_"), found["leave"] or ""
    if name in _FLAGS:
        if not before:
            word = f"{word}=True"
        return " ".join(filter(None, (f"{before}{word}", value)))
    if not value:
        return f"{before}{word}"
    if not (value.isupper() and value.isalpha()):  # else it stands for a value, as PATH does
        value = '"' + value.strip("'") + '"'
    return f"{before}{word}={value}"


ErrorCode = Literal["", "checksum", "cut-off", "compressed", "dangerous", "text"]
"""What a program asks of an error beyond its class: the bytes differ from their checksum, the end
of an archive is missing, a whole file is compressed, an object must not be loaded, it is a text.
"""


class CheckpointError(Exception):
    """The base of all errors: a problem with a checkpoint, a request or this host.

    Attributes: `what` is wrong, `path` of the file (or None), `where` in it (a key, a record, a
    header field, or None) and the `hint`: the command or option that helps (or None). All are plain
    text as it was found; `str()` gives the escaped line. `code` is an `ErrorCode`, mostly empty.
    """

    def __init__(
        self,
        what: str,
        *,
        path: object = None,
        where: object = None,
        hint: str | None = None,
        code: ErrorCode = "",
    ) -> None:
        super().__init__(what)
        self.code: ErrorCode = code
        self.what, self.hint = what, hint
        self.path: str | None = None
        self.where: str | None = None
        self.at(path=path, where=where)

    def at(self, *, path: object = None, where: object = None) -> CheckpointError:
        """Fill in the path or place that a lower layer could not know; what is known stays."""
        if self.path is None and path is not None:
            self.path = str(path)
        if self.where is None and where is not None:
            self.where = str(where)
        return self

    def __str__(self) -> str:
        place = [printable(part) for part in (self.path, self.where) if part]
        line = ": ".join([*place, printable(worded(self.what), 2000)])
        if not self.hint:
            return line
        return f"{line}; {printable(worded(self.hint), 2000)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Callable[..., CheckpointError], tuple[Any, ...], dict[str, Any]]:
        """An error is made again of what it says: not all take the arguments of `BaseException`."""
        builtin = {
            name: value for name in _OF_BUILTINS if (value := getattr(self, name, None)) is not None
        }
        return _made_again, (type(self), self.args), {**self.__dict__, **builtin}


# what `OSError` and `ImportError` keep outside of `__dict__`
_OF_BUILTINS = ("errno", "strerror", "filename", "name", "path")


@contextmanager
def errors_at(*, path: object = None, where: object = None) -> Iterator[None]:
    """Within the block, an error that does not know its path or place is told with these."""
    try:
        yield
    except CheckpointError as error:
        raise error.at(path=path, where=where) from error.__cause__


def _made_again(kind: type[CheckpointError], args: tuple[Any, ...]) -> CheckpointError:
    """An error of a pickle or a copy, as yet without its attributes."""
    made = kind.__new__(kind)
    made.args = args
    return made


_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "can't start new thread")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came of, is that this process gets no more memory.

    A library that cannot be mapped is an `ImportError`, and a thread without a stack a
    `RuntimeError`, each with the system's words in it.
    """
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, (ImportError, RuntimeError)):
            said = str(error).lower()
            if any(words in said for words in _NO_MEMORY):
                return True
        error = error.__cause__ or error.__context__
    return False


OUT_OF_MEMORY = "out of memory: this process may take no more of it"
"""What is said of such an error, wherever it ends a piece of work."""


class CheckpointWarning(UserWarning):
    """What a call decided for its caller where a framework's own rule decides: which of two models
    was taken, what was left out. `warnings.simplefilter("error", CheckpointWarning)` makes it an
    error.
    """


_UNWARNED: ContextVar[bool] = ContextVar("notes are told elsewhere", default=False)


def unwarned() -> AbstractContextManager[object]:
    """Within the block, `warn` says nothing: somebody tells the notes. (To have Python ignore a
    category changes its filters for all threads, and takes longer than to read a small pickle.)
    """
    return set_within(_UNWARNED, True)


def warn(notes: Iterable[str]) -> None:
    """Each of `notes` as a `CheckpointWarning` of the code that called ckptconv.

    It is shown once for each line of that code, as Python's filters do by default.
    """
    notes = list(notes)
    if not notes or _UNWARNED.get():
        return
    frame, level = sys._getframe(1), 2
    ours = ("ckptconv", "contextlib")  # a block of ours is entered by the other
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    for note in notes:
        warnings.warn(printable(worded(note), 2000), CheckpointWarning, stacklevel=level)


class MalformedCheckpoint(CheckpointError):
    """The bytes contradict themselves or their format: truncated, corrupt, or made to deceive."""


def malformed(what: str, path: Any = None, where: object = None) -> MalformedCheckpoint:
    """The error for a file that is damaged, as far as its bytes tell."""
    hint = "the file is damaged, cut off or forged"
    return MalformedCheckpoint(what, path=path, where=where, hint=hint)


class UnsupportedCheckpoint(CheckpointError):
    """The file is not a checkpoint, or it is of a kind that ckptconv cannot read."""


class MissingFile(UnsupportedCheckpoint, FileNotFoundError):
    """The file does not exist; `errno` and `filename` are those of `FileNotFoundError`."""


class UnreadableFile(UnsupportedCheckpoint, PermissionError):
    """This user may not read the file; `errno` and `filename` are those of `PermissionError`."""


class IsFolder(UnsupportedCheckpoint, IsADirectoryError):
    """The path is a folder, not a file; `errno` and `filename` are those of `IsADirectoryError`."""


# numbers of `OSError`s that are errors of their own: which, what is said, and the hint
_KINDS: dict[int, tuple[type[UnsupportedCheckpoint], str, str | None]] = {
    errno.ENOENT: (MissingFile, "no such file", "check the path"),
    errno.EACCES: (UnreadableFile, f"cannot be opened: {os.strerror(errno.EACCES)}", None),
    errno.EPERM: (UnreadableFile, f"cannot be opened: {os.strerror(errno.EPERM)}", None),
    errno.EISDIR: (IsFolder, "is a folder, not a file", None),
}


def not_opened(
    error: OSError | int, path: object, what: str | None = None, hint: str | None = None
) -> UnsupportedCheckpoint:
    """The error for a file that cannot be opened, by the `OSError` or its number; an `OSError` too
    where it has a class.

    `what` and `hint` say more than the number does.

    >>> error = not_opened(errno.ENOENT, "in.pt")
    >>> isinstance(error, FileNotFoundError), str(error)
    (True, 'in.pt: no such file; check the path')
    """
    number = (error.errno or 0) if isinstance(error, OSError) else error
    if number not in _KINDS:
        return UnsupportedCheckpoint(f"cannot be opened: {os.strerror(number)}", path=path)
    kind, said, advice = _KINDS[number]
    made = kind(what or said, path=path, hint=hint or advice)
    assert isinstance(made, OSError)
    made.errno, made.strerror, made.filename = number, os.strerror(number), str(path)
    return made


class RemoteFailure(UnsupportedCheckpoint):
    """A request to another machine failed. `passing`: another try, later, may succeed."""

    def __init__(self, what: str, *, passing: bool = False, **told: Any) -> None:
        super().__init__(what, **told)
        self.passing = passing


class IncompleteCheckpoint(UnsupportedCheckpoint):
    """The file of one rank without the others; the tensors are split over the files of all."""


def or_recover(advice: str, path: object) -> str:
    """The advice about a damaged file that has whole tensors all the same.

    The files of a DCP folder are not recovered: alone, they do not name their tensors.
    """
    if str(path).endswith(".distcp"):
        return advice
    return f"{advice}, or save the tensors that are whole: ckptconv recover IN OUT"


class LimitExceeded(CheckpointError):
    """A size, count or depth is beyond what any sensible checkpoint has.

    Attributes: the name of the `limit` (a field of `limits.Limits`), its value `allowed` where it
    was exceeded, and the value `needed` that would have done (None where that is not known). The
    hint says how to raise it (`raising`: in words of its own), after the `advice` of what else
    would help.
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
        if raising is None:
            enough = 2 * allowed if needed is None else needed
            raising = f"if the file is right, raise the limit: --limit {limit}={enough}"
        super().__init__(
            f"{what}, beyond the limit {limit}={allowed}",
            path=path,
            where=where,
            hint="; ".join(filter(None, (advice, raising))),
        )


def too_deep(what: str, *, path: object = None) -> LimitExceeded:
    """The refusal of what nests deeper than Python itself can follow."""
    allowed = sys.getrecursionlimit()
    raising = f"the limit is Python's own: sys.setrecursionlimit({10 * allowed}) raises it"
    return LimitExceeded(
        what, limit="sys.getrecursionlimit()", allowed=allowed, raising=raising, path=path
    )


class RefusedObject(CheckpointError):
    """The tree holds what the output cannot hold, or what `weights_only=True` would refuse."""


class KeyConflict(CheckpointError):
    """Key rules that cannot be applied: two keys become one, or a key is not a key."""


class AmbiguousStateDict(CheckpointError):
    """No state dict was found, or several and the choice is the user's."""


class MissingTensor(AmbiguousStateDict, KeyError):
    """No tensor has this name, or several have; `in` and `get` answer, as with `KeyError`."""


class KeyMismatch(CheckpointError):
    """The keys or shapes of the checkpoint do not fit those of the model or of another target.

    `fit` is the `keys.fits.Fit` that tells of every key, where there is one.
    """

    def __init__(self, what: str, *, fit: _Documented | None = None, **told: Any) -> None:
        super().__init__(what, **told)
        self.fit = fit


class _Documented(Protocol):
    """What can be told as JSON values."""

    def document(self) -> dict[str, Any]: ...


class OptionRefused(CheckpointError, ValueError):
    """An option of the library is not one of its choices, is empty, or has the wrong type.

    The hint lists the choices.
    """


class UnknownOption(OptionRefused, TypeError):
    """A name that is not an option; the message suggests the nearest one."""


class BatchRefused(OptionRefused):
    """Jobs that cannot be run as they are; `problems` has a line for each that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count, shown = len(problems), [printable(line, 1000) for line in problems[:_FEW]]
        if count > _FEW:
            shown.append(f"and {count - _FEW:,} more")
        noun = "problem" if count == 1 else "problems"
        super().__init__(f"{count:,} {noun}: {'; '.join(shown)}", hint="nothing was written")


_FEW = 3  # problems in one line


class MissingDependency(CheckpointError, ImportError):
    """A package is not installed, or cannot be imported; the hint is how to install it."""


class DeviceUnavailable(CheckpointError):
    """A location tag that is not a device, or a device that this host does not have."""


class OutputRefused(CheckpointError):
    """The output cannot be written at this path, or must not be."""


class VerificationFailed(CheckpointError):
    """The output, read back, differs from its source."""
