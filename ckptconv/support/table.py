"""A table of texts as lines for a terminal of any width and as HTML for a notebook, and texts that
are broken into lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ckptconv.support.records import dataclass
from ckptconv.support.report import Level, Row, html_table

GAP = 2  # columns between two cells
_NARROWEST = 24  # columns of a name
_NAMES = 40  # columns that names have before other cells are shown


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells below a `head`; the first cell of a row is its name.

    `texts` are the columns whose cells begin at the left; in the others, numbers end at the right.
    Where there is no room, the columns `leaving` are left out, the first of them first; then names
    are cut in the middle, and at last the columns `leaving_last` go. The last cell of a row that is
    shorter than the head may run on below the columns that it does not have. `levels` are those of
    the rows (none: all plain).
    """

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    texts: Collection[str]
    leaving: tuple[str, ...] = ()
    leaving_last: tuple[str, ...] = ()
    levels: Sequence[Level] = ()

    def lines(
        self,
        width: int,
        *,
        has_head: bool = True,
        has_cuts: bool = True,
        below: Callable[[int], Iterable[Row]] = lambda _: (),
    ) -> Iterator[Row]:
        """The table in lines of at most `width` columns, as rows without labels.

        Without `has_cuts` a name that is too long has lines of its own. `below` are the lines that
        follow those of a row, by its number.
        """
        widths = self._widths()
        shown = self._fitting(widths, width)
        room = max(width - sum(widths[at] + GAP for at in shown[1:]), _NARROWEST)
        widths[0] = min(widths[0], room)
        lefts = [name in self.texts for name in self.head]
        if has_head and self.rows:
            yield Row("", _aligned(self.head, shown, widths, lefts), "heading")
        levels = self.levels or ["plain"] * len(self.rows)
        for number, (row, level) in enumerate(zip(self.rows, levels, strict=True)):
            name = row[0]
            if has_cuts and len(row) > 1:
                name = cut(name, room)
            elif columns(name) > room and len(row) > 1:
                yield from (Row("", line, level) for line in wrapped(name, width))
                name = ""
            line = _aligned((name, *row[1:]), shown, widths, lefts)
            if has_cuts:
                line = shortened(line, width)
            yield Row("", line, level)
            yield from below(number)
        lacking = [name for at, name in enumerate(self.head) if at not in shown]
        if lacking:
            text = f"no room for {', '.join(lacking)}: widen the terminal, or use --json"
            yield from (Row("", line) for line in wrapped(text, width))

    def html(self, title: object) -> str:
        """The table for a notebook, of at most 20 rows."""
        return html_table(title, self.rows, head=self.head)

    def _widths(self) -> list[int]:
        """The columns that the cells take, of each row those in front of one that runs on."""
        full = len(self.head)
        widths = [*map(columns, self.head)]
        for row in self.rows:
            if len(row) != full:
                row = row[:-1]
            for at, cell in enumerate(row):
                widths[at] = max(widths[at], columns(cell))
        return widths

    def _fitting(self, widths: Sequence[int], width: int) -> list[int]:
        """The numbers of the columns that there is room for."""
        shown = [*range(len(self.head))]
        needed = sum(size + GAP for size in widths[1:])
        for columns_left, names in ((self.leaving, _NAMES), (self.leaving_last, _NARROWEST)):
            for name in columns_left:
                if needed + min(widths[0], names) <= width:
                    break
                at = self.head.index(name)
                shown.remove(at)
                needed -= widths[at] + GAP
        return shown


def _aligned(
    row: Sequence[str], shown: Sequence[int], widths: Sequence[int], lefts: Sequence[bool]
) -> str:
    cells = []
    for at in shown:
        if at >= len(row):
            break
        room = " " * (widths[at] - columns(row[at]))
        cells.append(row[at] + room if lefts[at] else room + row[at])
    return (" " * GAP).join(cells).rstrip()


# --------------------------------------------------------------------------- texts in few columns


def columns(text: str) -> int:
    """The columns that a terminal needs for a text: two for a wide character (Unicode annex 11).

    >>> columns("weight"), columns("重み")
    (6, 4)
    """
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    wide = sum(east_asian_width(char) in "WF" for char in text if not combining(char))
    return wide + sum(not combining(char) for char in text)


def _start(text: str, width: int) -> int:
    """How many characters of a text stand in so many columns."""
    if text.isascii():
        return width
    # each start is measured anew, but only of short texts that are not ASCII
    return next(count for count in range(len(text), -1, -1) if columns(text[:count]) <= width)


def cut(name: str, width: int) -> str:
    """A name in at most so many columns, its end kept, for ends tell names apart.

    >>> cut("model.layers.0.attention.weight", 16)
    'model…ion.weight'
    """
    if columns(name) <= width:
        return name
    first = width // 3
    rest = _start(name[::-1], width - first - 1)
    return f"{name[: _start(name, first)]}…{name[len(name) - rest :]}"


def shortened(text: str, width: int) -> str:
    """A text in at most so many columns, its start kept."""
    if columns(text) <= width:
        return text
    return f"{text[: _start(text, width - 1)]}…"


_FEWEST = 10  # columns of a text, however far to the right it begins


def wrapped(text: str, width: int, indent: str = "", first: str | None = None) -> Iterator[str]:
    """Lines of at most `width` columns behind `indent`, the first one behind `first` (None: the
    same); a word that is longer is broken.
    """
    before, line = first, ""
    if before is None:
        before = indent
    for word in text.split(" "):
        room = max(width - len(before), _FEWEST)
        if line and columns(line) + 1 + columns(word) > room:
            yield before + line
            line, before = "", indent
            room = max(width - len(before), _FEWEST)
        line = f"{line} {word}" if line else word
        while columns(line) > room:
            fit = max(1, _start(line, room))
            yield before + line[:fit]
            line, before = line[fit:], indent
            room = max(width - len(before), _FEWEST)
    if line:
        yield before + line
