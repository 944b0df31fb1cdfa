"""Sizes, counts and lists of names in words, the same wherever they are shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePath

from ckptconv.support.addresses import UrlPath
from ckptconv.support.errors import CheckpointError, printable

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
SHOWN = 5
"""Items of a list that are named; the rest is counted."""


def size_text(nbytes: float) -> str:
    """A size in decimal units, as disks and shard limits count.

    >>> size_text(0), size_text(1999), size_text(2_147_483_648)
    ('0 B', '2.0 kB', '2.1 GB')
    """
    if nbytes < 999.5:
        return f"{nbytes:.0f} B"
    unit = 0
    while nbytes >= 999.5 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1000, unit + 1
    return f"{nbytes:.1f} {_UNITS[unit]}"


def parse_size(text: str) -> int:
    """The bytes that a size in words is; `CheckpointError` when it is none.

    >>> parse_size("5GB"), parse_size("500 MB"), parse_size("1.5KiB"), parse_size("1000")
    (5000000000, 500000000, 1536, 1000)
    """
    found = _SIZE(text.strip().upper())
    if found is None or (size := int(float(found[1]) * _FACTORS[found[2] or ""])) <= 0:
        raise CheckpointError(f"'{text}' is not a size", hint="write it as 5GB or 500MB")
    return size


_FACTORS = {"": 1}
for _power, _letter in enumerate("KMGT", 1):
    _FACTORS |= {_letter: 1000**_power, f"{_letter}I": 1024**_power}
_SIZE = partial(re.fullmatch, r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?")


def count_text(count: int, noun: str) -> str:
    """A count with its noun.

    >>> count_text(1, "tensor"), count_text(1200, "key"), count_text(2, "dict of 3")
    ('1 tensor', '1,200 keys', '2 dict of 3s')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def agreeing(count: int, verb: str) -> str:
    """The verb of so many things.

    >>> agreeing(1, "share"), agreeing(2, "share"), agreeing(1, "are"), agreeing(1, "have")
    ('shares', 'share', 'is', 'has')
    """
    return verb if count != 1 else _OF_ONE.get(verb, f"{verb}s")


_OF_ONE = {"are": "is", "have": "has", "do": "does"}


def number_text(value: float | int | None) -> str:
    """A figure of four digits in at most ten characters; a dash where there is none.

    >>> number_text(0.123456), number_text(-3), number_text(1e-30), number_text(None)
    ('0.1235', '-3', '1e-30', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10**7:
        return str(value)
    return f"{float(value):.4g}"


def starred(key: str) -> str:
    """A key with a star for each number between its names: those of all layers read the same.

    >>> starred("layers.10.experts.2.w1.weight"), starred("fc1.weight")
    ('layers.*.experts.*.w1.weight', 'fc1.weight')
    """
    return _NUMBERS.sub("*", printable(key))


_NUMBERS = re.compile(r"(?<=[._])\d+(?=[._])")


MOST_WAYS = 1 << 14
"""The most ways to try a pattern that a file brings: 32 layers and 7 modules in it are 224."""


def most_ways(pattern: str) -> int:
    """In how many ways a regular expression may be tried at most, but for what has no bound: the
    product of its alternatives, of 2 for each ``?`` and of the counts of each ``{m,n}``.

    >>> most_ways("layers.(?:0|1|2).(q|k)_proj")
    6
    >>> most_ways(r"a?\\|[|?]{2,4}")
    6
    """
    plain = re.sub(r"\\.|\[[^\]]*\]", "x", pattern)
    ways = 1 << len(re.findall(r"(?<![(*+?}])\?", plain))
    for segment in re.split(r"[()]", plain):
        ways *= 1 + segment.count("|")
    for least, most in re.findall(r"\{(\d*),(\d+)\}", plain):
        ways *= max(1, 1 + int(most) - int(least or 0))
    return ways


def natural_key(name: str) -> tuple[list[tuple[str, int, str]], str]:
    """What sorts names so that the numbers in them count as numbers.

    >>> sorted(["layers.10.b", "layers.2.b", "layers.b"], key=natural_key)
    ['layers.2.b', 'layers.10.b', 'layers.b']
    """
    parts = []
    for found in _PARTS.finditer(name):
        digits = found["digits"].lstrip("0")
        parts.append((found["text"], len(digits), digits))  # not `int`, which has a longest one
    return parts, name


_PARTS = re.compile(r"(?P<text>[^0-9]*)(?P<digits>[0-9]*)")


def seconds_text(seconds: float) -> str:
    """A span of time in the two units that matter.

    >>> tuple(map(seconds_text, (0.0123, 1.26, 3, 12.4, 125, 7260)))
    ('0.01 s', '1.3 s', '3 s', '12 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds < 59.5:
        digits = 2
        if seconds >= 9.95 or seconds == int(seconds) > 0:
            digits = 0
        elif seconds >= 0.995:
            digits = 1
        return f"{max(seconds, 0.01):.{digits}f} s"  # nothing takes no time
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


STANDARD_INPUT = "standard input"
"""How what is piped in is called."""


def as_argument(path: object) -> str:
    """A path as an argument that is not taken for an option.

    >>> as_argument("model.pt"), as_argument("-model.pt")
    ('model.pt', './-model.pt')
    """
    text = str(path)
    if text == STANDARD_INPUT and not Path(STANDARD_INPUT).exists():
        return "-"
    return f"./{text}" if text.startswith("-") else text


def quoted(name: str) -> str:
    """A name as a word of a command for a shell, escaped where it cannot be shown."""
    from shlex import quote

    return quote(printable(name))


def part_text(path: str) -> str:
    """The path of a state dict as prose has it, escaped; `--only` has a dot for the tensors that
    stand in a dict itself.

    >>> part_text(""), part_text("."), part_text("model"), part_text("model.")
    ('the root', 'the root', 'model', 'model itself')
    """
    bare = printable(path.removesuffix("."))
    if not bare:
        return "the root"
    if path.endswith("."):
        return f"{bare} itself"
    return bare


def of_part(path: str) -> str:
    """What is said behind a noun of the part that it is in; nothing for the root."""
    return f" of {part_text(path)}" if path else ""


def look_hint(path: PurePath, command: str = "inspect") -> str:
    """The command that shows what a checkpoint holds; only a file has one of its own."""
    command = f"ckptconv {command}"
    if isinstance(path, UrlPath) or Path(path).exists():
        command = f"{command} {quoted(as_argument(path))}"
    return f"see what it holds with: {command}"


def first_few(names: Sequence[str], most: int, spoken: Callable[[str], str] = printable) -> str:
    """The first `most` names from a file, each as it is `spoken`; a mark tells if there are more.

    >>> first_few(["a", "b"], 2), first_few(["a", "b", "c"], 2)
    ('a, b', 'a, b, …')
    """
    shown = ", ".join(map(spoken, names[:most]))
    return f"{shown}, …" if len(names) > most else shown


def first_few_in_short(names: Sequence[str], most: int) -> str:
    """As `first_few`, but all that is shown is cut at the length of one name."""
    shown = printable(", ".join(names[:most]))
    return f"{shown}, …" if len(names) > most else shown


def some_text(names: list[str]) -> str:
    """The first of some names from a file, escaped, and how many more there are."""
    shown = ", ".join(printable(name) or "the root" for name in names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN:,} more" if len(names) > SHOWN else shown
