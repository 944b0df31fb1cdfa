"""Checks the library's options: one wording for all that are misspelt, empty or of a wrong type."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, get_args

from ckptconv.support.arrays import np
from ckptconv.support.errors import (
    CheckpointError,
    OptionRefused,
    UnknownOption,
    is_on_command_line,
    printable,
)
from ckptconv.support.text import parse_size

F = TypeVar("F", bound=Callable[..., Any])

KEYS = ("strip", "keep")
WRAPPERS = ("strip", "module", "add-module", "keep")
UNKNOWN = ("refuse", "drop", "keep")
OptimizerForm: TypeAlias = Literal["names", "numbers", "flat", "torchtitan", "megatron"]
"""The forms of an optimizer state that can be asked for; `tree.optimizer_forms` makes them."""
OPTIMIZER_FORMS = get_args(OptimizerForm)
NOUNS = {"to": "a format"}
"""What an option is, where that is more than a choice."""


def refuse_other(option: str, given: object, choices: Sequence[str], *, further: str = "") -> None:
    """Raise `OptionRefused` unless `given` is one of the words, or None where the option may be
    left out.

    `further` says what else may be given.

    >>> refuse_other("keys", "both", KEYS)
    Traceback (most recent call last):
    ckptconv.support.errors.OptionRefused: keys='both' is not a choice; choose strip or keep
    """
    if type(given) is not str or given not in choices:
        what = f"{option}={given!r:.100} is not {NOUNS.get(option, 'a choice')}"
        hint = f"choose {', '.join(choices[:-1])} or {choices[-1]}{further}"
        raise OptionRefused(what, hint=hint)


def refuse_no_keys(given: object) -> None:
    """Raise `OptionRefused` unless `keys` is one of its words; a caller tells of made rules."""
    refuse_other("keys", given, KEYS, further=", or give KeyRules or a function")


class HasName(Protocol):
    """A type of numpy, or of a `LazyTensor`."""

    @property
    def name(self) -> str: ...


class TorchDType(Protocol):
    """A `torch.dtype`, by what it has."""

    @property
    def is_floating_point(self) -> bool: ...


class TorchDevice(Protocol):
    """A `torch.device`, by what it has."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


DTypeName: TypeAlias = str | TorchDType | HasName | type[Any]
"""An element type: its name, or that of torch, of numpy (ml_dtypes too), of a `LazyTensor`."""
DeviceName: TypeAlias = str | TorchDevice


def plain_name(value: Any) -> Any:
    """The name of a `torch.dtype`, a `torch.device`, a type of numpy or of a `LazyTensor`, found
    without importing torch or numpy; anything else as it is.
    """
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    # `np` waits where another thread is just importing it
    has_numpy = "numpy" in sys.modules
    if has_numpy and isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value).name
    if kind.__name__ == "DType" or (has_numpy and isinstance(value, np.dtype)):
        return value.name
    return value


def _refusing(is_right: Callable[[Any], bool], what: str, hint: str) -> Callable[..., None]:
    """A function that raises `OptionRefused` for the first of its options that is not right."""

    def refuse(**given: object) -> None:
        for option, value in given.items():
            if not is_right(value):
                form = _FORMS.get(option, "…")
                raise OptionRefused(
                    f"{option}={value!r:.100} {what}", hint=hint.format(option=option, form=form)
                )

    return refuse


_FORMS = {"rename": "OLD=NEW", "regex": "PATTERN=>REPLACEMENT"}


def _are_texts(value: Any, least: int) -> bool:
    return all(type(text) is str and len(text) >= least for text in value)


refuse_no_text = _refusing(
    lambda text: text is None or (type(text) is str and text != ""),
    "is not a name",
    "leave it out, or give a text that is not empty",
)
"""Raises `OptionRefused` unless each option is None or a text that is not empty."""

refuse_no_flag = _refusing(
    lambda flag: type(flag) is bool, "is not a choice", "choose True or False"
)
"""Raises `OptionRefused` unless each option is True or False: "no" counts as true in Python."""

refuse_no_texts = _refusing(
    lambda texts: (
        isinstance(texts, Sequence) and not isinstance(texts, (str, bytes)) and _are_texts(texts, 0)
    ),
    "is not a list of texts",
    "write it as {option}=['…']",
)
"""Raises `OptionRefused` unless each option is a list of texts: a text is not its letters."""

refuse_no_words = _refusing(
    lambda words: isinstance(words, (str, list, tuple)) and _are_texts(listed(words), 1),
    "is not a text",
    "write it as {option}='{form}' or {option}=['{form}', '{form}']",
)
"""Raises `OptionRefused` unless each option is a text that is not empty, or a list of such."""


def size_of(option: str, given: object) -> int | None:
    """The bytes of a size, a number or a text such as ``5GB``; None where none is given.
    `OptionRefused`: it is not a size.
    """
    if isinstance(given, str):
        with contextlib.suppress(CheckpointError):
            return parse_size(given)
    elif given is None:
        return None
    elif type(given) is int and given > 0:
        return given
    name = f"{option}="
    if isinstance(given, str) and is_on_command_line():
        name = f"--{option.replace('_', '-')} "
    hint = "write it as '5GB' or '500MB', or give a number of bytes"
    raise OptionRefused(f"{name}{given!r:.100} is not a size", hint=hint)


def refuse_no_size(**given: object) -> None:
    """Raise `OptionRefused` unless each option is None or a size."""
    for option, size in given.items():
        size_of(option, size)


def refuse_no_path(**given: object) -> None:
    """Raise `OptionRefused` unless each option names a file or a folder: an unset variable is not
    the current folder. Addresses of other machines name files too.
    """
    for option, path in given.items():
        if hasattr(path, "read"):
            what, hint = f"{option}: an open file is not a path", "give the name of the file"
            raise OptionRefused(what, hint=hint)
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        odd = ""
        if text:
            try:
                if b"\0" not in os.fsencode(text):
                    continue
                odd = "holds a zero byte, so it "
            except UnicodeEncodeError:  # as no name is that a system gave
                odd = "holds half a character (a lone surrogate), so it "
        what = f"{option}={path!r:.100} {odd}is not a path"
        raise OptionRefused(what, hint="name a file or a folder")


def refuse_no_paths(option: str, given: object) -> None:
    """The same of one path or of several; a file that is open for reading is as good as one."""
    is_one = isinstance(given, (str, bytes, os.PathLike)) or hasattr(given, "read")
    if is_one or not isinstance(given, Iterable):
        given = (given,)
    for path in given:
        if not hasattr(path, "read"):
            refuse_no_path(**{option: path})


def refuse_no_output(output: object) -> None:
    """Raise `OptionRefused` unless `output` names a file or a folder, or is an open file."""
    if not hasattr(output, "write"):
        refuse_no_path(output=output)


def refuse_no_callback(on_progress: object) -> None:
    """Raise `OptionRefused` unless `on_progress` is None or can be called."""
    if on_progress is not None and not callable(on_progress):
        raise OptionRefused(
            f"on_progress={on_progress!r:.100} cannot be called",
            hint="give a function of one Progress",
        )


def refuse_no_tags(given: object) -> None:
    """Raise `OptionRefused` unless `map_location` is None or maps texts to texts."""
    if given is None or (
        isinstance(given, Mapping)
        and all(type(plain_name(tag)) is str for pair in given.items() for tag in pair)
    ):
        return
    hint = "give a dict of tags, {'cuda:3': 'cuda:0'}, or device= for all"
    raise OptionRefused(f"map_location={given!r:.100} is not a dict of tags", hint=hint)


def one_or_several(given: Any) -> list[Any]:
    """What was given as one or as several; an open file is one, though it gives its lines."""
    return [*given] if isinstance(given, (list, tuple)) else [given]


Words = str | Sequence[str]
"""One text or several."""
Pairs = str | Mapping[str, str] | Sequence[str | tuple[str, str]]
"""Olds and news: as a dict, as pairs, or as texts that say both."""


def paired(option: str, given: Any) -> tuple[str | tuple[str, str], ...]:
    """Olds and news, each a text or a pair of texts; `OptionRefused` for anything else."""
    items = given
    if isinstance(given, Mapping):
        items = list(given.items())
    elif isinstance(given, str):
        items = [given]
    if isinstance(items, (list, tuple)):
        found = tuple(tuple(item) if isinstance(item, (list, tuple)) else item for item in items)
        if all(is_pair(item) or (type(item) is str and item) for item in found):
            return found
    form = _FORMS[option]
    raise OptionRefused(
        f"{option}={given!r:.100} is not {form}",
        hint=f"write it as {option}='{form}', as a list of them, or as a dict of old and new",
    )


def is_pair(item: object) -> bool:
    """Whether it is two texts, the first of which is not empty."""
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and all(type(text) is str for text in item)
        and item[0] != ""
    )


def listed(words: Words) -> tuple[str, ...]:
    """One text or several, as several."""
    return (words,) if isinstance(words, str) else tuple(words)


def spelling_checked(function: F, words: Sequence[str] = ()) -> F:
    """The function, which tells a caller who misspells one of its options, or of the `words` that
    it takes too, which one is nearest.

    >>> @spelling_checked
    ... def convert(source, *, dtype=None): ...
    >>> convert("in.pt", dtyp="bf16")
    Traceback (most recent call last):
    ckptconv.support.errors.UnknownOption: unknown option 'dtyp'; did you mean dtype?
    """
    code = function.__code__  # quicker than inspect.signature, which would have to be imported
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    options = (*(name for name in names if name != "self"), *words)
    once = {name: now for name, now in _ONCE if now in options and name not in options}

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        for name in once.keys() & given.keys():
            if once[name] in given:
                raise UnknownOption(f"{name} is now called {once[name]}, and both are given")
            given[once[name]] = given.pop(name)
        for name in given:
            if name not in options:
                raise unknown_option(name, options)
        for item in args[code.co_argcount :]:
            if type(item).__name__ == "Options":
                hint = "plan_conversion takes them; here each option has its name: dtype='bf16'"
                raise UnknownOption(f"{function.__name__} does not take Options", hint=hint)
        refuse_no_callback(given.get("on_progress"))
        return function(*args, **given)

    return cast(F, checked)


# the names that options had once, which still do, and those that they have now
_ONCE = (
    ("match", "include"),
    ("only_against", "only_b"),
    ("tag_against", "tag_b"),
    ("path", "output"),
    ("path", "source"),
    ("report", "ledger"),
)


def unknown_option(name: str, options: Sequence[str]) -> UnknownOption:
    """The error for a name that is none of the `options`."""
    from difflib import get_close_matches

    if name in _OF_TOLERANCE and "tolerance" in options:
        return UnknownOption(
            f"unknown option '{name}'", hint=f"write tolerance=Tolerance({name}=…)"
        )
    near = get_close_matches(name.lower(), options, 3, 0.65)
    hint = f"there are {', '.join(options)}"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    return UnknownOption(f"unknown option '{printable(name)}'", hint=hint)


_OF_TOLERANCE = ("atol", "rtol", "equal_nan")
