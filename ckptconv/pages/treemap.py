"""The map of a checkpoint by bytes, as SVG: what a page shows where no script runs, and on paper.

The parts of names between dots are groups, as boxes in boxes; the boxes of one group are as large
as their bytes, in the layout of Bruls, Huizing and van Wijk (Squarified treemaps, 2000). The script
of the page draws the same map again in the size of the window, with zoom and other colours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from html import escape

from ckptconv.pages.facts import PageTensor
from ckptconv.support.records import dataclass
from ckptconv.support.text import size_text

Box = tuple[float, float, float, float]
"""Left, top, width, height."""

WIDTH, HEIGHT = 1200, 504
_HEAD, _GAP = 17, 1  # pixels: the heading of a group, what is between two boxes
_LETTER = 6.3  # pixels
_OPENED = 900  # square pixels that a group needs to show what is in it
_LEAST = 25  # square pixels; smaller boxes are one (the script, which zooms, draws them from 10 on)
_OTHER = 8  # the last of the colours of the style sheet
_DIGITS = re.compile(r"\d+")


@dataclass(slots=True)
class Node:
    """A part of names, and the tensors that end in it."""

    label: str = ""
    nbytes: int = 0
    inner: dict[str, Node] = field(default_factory=dict)
    own: list[int] = field(default_factory=list)

    def tensors(self) -> Iterator[int]:
        """All that are in it."""
        waiting = [self]  # not by recursion: a name may have any number of dots
        while waiting:
            node = waiting.pop()
            yield from node.own
            waiting.extend(node.inner.values())


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of the map: what is in it (of several `rest` parts, where they are too small for boxes
    of their own), and whether it is a group with boxes in it.
    """

    box: Box
    label: str
    nbytes: int
    tensors: tuple[int, ...]
    depth: int
    is_group: bool
    is_rest: bool = False


def tree_of(names: Sequence[str], sizes: Sequence[int]) -> Node:
    """The groups that names with dots make."""
    root = Node(nbytes=sum(sizes))
    for at, (name, size) in enumerate(zip(names, sizes, strict=True)):
        node = root
        for label in name.split("."):
            following = node.inner.get(label)
            if following is None:
                following = node.inner[label] = Node(label)
            node = following
            node.nbytes += size
        node.own.append(at)
    return root


def squarified(weights: Sequence[float], box: Box) -> list[Box]:
    """Boxes for weights in falling order, which fill a box and are as square as may be."""
    x, y, w, h = box
    made: list[Box] = []
    total, at = sum(weights), 0
    while at < len(weights) and total > 0 and w > 0 and h > 0:
        short, scale = min(w, h), w * h / total
        end, taken = _strip(weights, at, short, scale)
        thick = max(w, h) if end == len(weights) else taken * scale / short
        along = 0.0
        for weight in weights[at:end]:
            long = weight / taken * short
            made.append((x, y + along, thick, long) if w >= h else (x + along, y, long, thick))
            along += long
        if w >= h:
            x, w = x + thick, w - thick
        else:
            y, h = y + thick, h - thick
        total -= taken
        at = end
    return made


def _strip(weights: Sequence[float], at: int, short: float, scale: float) -> tuple[int, float]:
    """The end of the strip that begins with a weight, while its boxes get squarer; its weight."""
    taken, end, worst = 0.0, at, float("inf")
    while end < len(weights):
        thick = (taken + weights[end]) * scale / short
        ratio = max(weights[at] * scale / (thick * thick), thick * thick / (weights[end] * scale))
        if ratio > worst:
            break
        worst, taken, end = ratio, taken + weights[end], end + 1
    return end, taken


def cells_of(names: Sequence[str], sizes: Sequence[int]) -> list[Cell]:
    """The boxes of the map, each group before what is in it."""
    return list(_filled(tree_of(names, sizes), (0, 0, WIDTH, HEIGHT), 0, sizes))


def _filled(node: Node, box: Box, depth: int, sizes: Sequence[int]) -> Iterator[Cell]:
    _, _, w, h = box
    parts = [part for part in _parts(node, sizes) if part[1].nbytes > 0]
    least = _LEAST * sum(part.nbytes for _, part in parts) / max(w * h, 1)
    shown = next((at for at, (_, part) in enumerate(parts) if part.nbytes < least), len(parts))
    if shown >= len(parts) - 1:  # a box for one part would be no larger than that part
        shown = len(parts)
    weighed: list[tuple[str, Node | None, int]] = [
        (label, part, part.nbytes) for label, part in parts[:shown]
    ]
    rest = [part for _, part in parts[shown:]]
    if rest:
        weighed.append((f"{len(rest):,} more", None, sum(part.nbytes for part in rest)))
    weighed.sort(key=lambda item: -item[2])
    boxes = squarified([nbytes for _, _, nbytes in weighed], box)
    # fewer boxes where there is no width left for them
    for (label, part, nbytes), inner in zip(weighed, boxes, strict=False):
        x, y, w, h = inner
        inside = tuple(at for one in (rest if part is None else [part]) for at in one.tensors())
        is_group = part is not None and (bool(part.inner) or len(part.own) > 1)
        opens = is_group and w * h > _OPENED and w > 14 and h > 14
        yield Cell(inner, label, nbytes, inside, depth, opens, is_rest=part is None)
        if part is not None and opens:
            head = _heading(w, h)
            yield from _filled(part, (x + 2, y + head, w - 4, h - head - 2), depth + 1, sizes)


def _heading(width: float, height: float) -> int:
    return _HEAD if width > 46 and height > 40 else 2


def _parts(node: Node, sizes: Sequence[int]) -> list[tuple[str, Node]]:
    """The parts of a node, the largest first; labels that lead to one part only are one label."""
    made = [(node.label, Node(node.label, sizes[at], own=[at])) for at in node.own]
    for child in node.inner.values():
        at, label = child, child.label
        while len(at.inner) == 1 and not at.own:
            [at] = at.inner.values()
            label += f".{at.label}"
        made.append((label, at))
    return sorted(made, key=lambda part: (-part[1].nbytes, in_order(part[0])))


def in_order(text: str) -> str:
    """A text by which names sort as their numbers do.

    >>> sorted(["l.10", "l.9"], key=in_order)
    ['l.9', 'l.10']
    """
    return _DIGITS.sub(lambda digits: digits[0].rjust(8, "0"), text)


# ---------------------------------------------------------------------------------------------- SVG


def map_svg(names: Sequence[str], tensors: Sequence[PageTensor]) -> str:
    """The map as SVG, coloured by dtype; `names` are those that are shown."""
    sizes = [item.nbytes if item.same_as is None else 0 for item in tensors]
    by_dtype: Counter[str] = Counter()
    for item, size in zip(tensors, sizes, strict=True):
        by_dtype[item.dtype] += size
    colors = {dtype: at for at, (dtype, _) in enumerate(by_dtype.most_common())}
    drawn = []
    for cell in cells_of(names, sizes):
        color = 0
        if not cell.is_group:
            kinds: Counter[str] = Counter()
            for at in cell.tensors:
                kinds[tensors[at].dtype] += sizes[at]
            color = colors[kinds.most_common(1)[0][0]]
        drawn.append(_drawn(cell, f"c{min(color, _OTHER)}"))
    return (
        f'<svg class="map" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Map of the '
        f'tensors by bytes, coloured by dtype">{"".join(drawn)}</svg>'
    )


def _drawn(cell: Cell, color: str) -> str:
    x, y, w, h = cell.box
    kind, tint = color, f"on-{color}"
    if cell.is_rest:
        kind = f"{color} rest"
    if cell.is_group:
        kind, tint = f"group d{min(cell.depth, 3)}", "onGroup"
    box = (
        f'<rect class="{kind}" x="{x + _GAP / 2:.1f}" y="{y + _GAP / 2:.1f}" '
        f'width="{max(w - _GAP, 0.3):.1f}" height="{max(h - _GAP, 0.3):.1f}"/>'
    )
    room = int((w - 8) / _LETTER)
    fits = _heading(w, h) == _HEAD if cell.is_group else h > 15
    if not fits or room < 3:
        return box
    label = cell.label if len(cell.label) <= room else f"{cell.label[: room - 1]}…"
    text = f'<text class="label {tint}" x="{x + 5:.1f}" y="{y + 13:.1f}">{escape(label)}</text>'
    size = size_text(cell.nbytes)
    if not cell.is_group and h > 34 and len(size) <= room:
        text += f'<text class="label small {tint}" x="{x + 5:.1f}" y="{y + 27:.1f}">{size}</text>'
    return box + text
