"""The profile of a model over its depth: std and abs-max of each kind of tensor, layer by layer.

Layers repeat: `layers.0.w`, `layers.1.w`, … are one series, `layers.#.w`. The first number in a
name counts the depth; further ones are folded into the same series where all tensors of a layer are
alike in dtype and shape (experts, say): then the middle std and the largest abs-max are drawn. Each
series is a picture of its own, as SVG.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from statistics import median

from ckptconv.pages.columns import shown_name
from ckptconv.pages.facts import PageFacts, PageTensor
from ckptconv.pages.html import filled
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.text import count_text, number_text

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d{1,6}(?=\.|$)")
_SERIES, _POINTS = 48, 400  # that are drawn
_SHOWN = 12  # series that are seen at once
_WIDTH, _HEIGHT = 230, 74


class Point(NamedTuple):
    """The figures of the tensors at one depth, where known."""

    depth: int
    std: float | None
    abs_max: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """The tensors of one folded name, at a few hundred depths at most."""

    name: str
    nbytes: int
    points: tuple[Point, ...]
    each: int = 1  # tensors of a depth, at most


def folded(tensors: Sequence[PageTensor]) -> list[Series]:
    """The series of two depths and more, the largest in bytes first."""
    made = []
    for name, layers in _layers(tensors, 0).items():
        parts = {name: layers}
        if any(len({(one.dtype, one.shape) for one in items}) > 1 for items in layers.values()):
            parts = _layers([one for items in layers.values() for one in items], 1)
        made += [_series(part, found) for part, found in parts.items() if len(found) > 1]
    return sorted(made, key=lambda item: (-item.nbytes, item.name))


def _layers(tensors: Sequence[PageTensor], numbers: int) -> dict[str, dict[int, list[PageTensor]]]:
    """The tensors by their names with the first `numbers` numbers folded (0: all), and by depth."""
    found: dict[str, dict[int, list[PageTensor]]] = {}
    for item in tensors:
        number = _NUMBER.search(item.name)
        if number is None or item.statistics is None:
            continue
        layers = found.setdefault(_NUMBER.sub("#", item.name, count=numbers), {})
        layers.setdefault(int(number[0]), []).append(item)
    return found


def _series(name: str, layers: dict[int, list[PageTensor]]) -> Series:
    depths = sorted(layers)
    step = -(-len(depths) // _POINTS)
    kept = sorted({*depths[::step], depths[-1]})
    return Series(
        name,
        sum(item.nbytes for items in layers.values() for item in items),
        tuple(_point(depth, layers[depth]) for depth in kept),
        max(map(len, layers.values())),
    )


def _point(depth: int, items: list[PageTensor]) -> Point:
    """The middle std and the largest abs-max."""
    known = [item.statistics for item in items if item.statistics is not None]
    std = [one.std for one in known if one.std is not None]
    largest = [float(one.abs_max) for one in known if one.abs_max is not None]
    return Point(depth, median(std) if std else None, max(largest, default=None))


def profile_section(facts: PageFacts) -> str:
    """The section of the page; nothing where there are no statistics or no layers."""
    sides = [folded(file.tensors) for file in facts.files]
    named = [{one.name: one for one in side} for side in sides]
    names = list(dict.fromkeys(one.name for side in sides for one in side))
    if not names:
        return ""
    drawn = [_figure(name, [side.get(name) for side in named]) for name in names[:_SERIES]]
    more = ""
    hidden = "".join(drawn[_SHOWN:])
    if hidden:
        smaller = count_text(len(drawn) - _SHOWN, "smaller one")
        more = f'<details class="more"><summary>{smaller}</summary>\n<div class="profiles">\n'
        more += f"{hidden}</div></details>\n"
    if len(names) > _SERIES:
        more += f'<p class="note">and {len(names) - _SERIES:,} that are not drawn</p>\n'
    kind = "; A thin, B wide" if len(sides) > 1 else ""
    return filled("profile.html", sides=kind, figures="".join(drawn[:_SHOWN]), more=more)


def _figure(name: str, sides: Sequence[Series | None]) -> str:
    """The picture of a series, of one checkpoint or of two."""
    there = [one for one in sides if one is not None]
    frame = _PictureBounds.around([point for one in there for point in one.points])
    lines = ""
    for side, one in reversed([*enumerate(sides)]):
        if one is not None:
            kind = " of-b" if side else ""
            lines += _line(f"line-std{kind}", [(at.depth, at.std) for at in one.points], frame)
            lines += _line(f"line-max{kind}", [(at.depth, at.abs_max) for at in one.points], frame)
    shown = escape(shown_name(name))
    each = max(one.each for one in there)
    if each > 1:
        shown += f"</bdi> (middle std, largest abs-max of {each:,})<bdi>"
    if not lines:
        lines = f'<text class="axis" x="{_WIDTH / 2:g}" y="36" text-anchor="middle">all zero</text>'
    std, largest = zip(*map(_ends, there), strict=True)
    told = f"std {std[0]}"
    if there[0].points[0].std is None and there[0].points[-1].std is None:
        told = f"abs-max {largest[0]}"
    stds = "; ".join(f"std {ends}" for ends in std)
    about = f"{escape(shown_name(name))}: {stds}, abs-max {'; '.join(largest)}"
    return filled(
        "figure.html",
        shown=shown,
        about=about,
        lines=lines,
        told=told,
        first=str(frame.first),
        last=str(frame.last),
        width=str(_WIDTH),
        height=str(_HEIGHT),
        middle=f"{_WIDTH / 2:g}",
    )


def _ends(one: Series) -> tuple[str, str]:
    """std and abs-max at both ends of a series."""
    (_, *first), (_, *last) = one.points[0], one.points[-1]
    std, largest = (
        f"{number_text(ours)} → {number_text(theirs)}"
        for ours, theirs in zip(first, last, strict=True)
    )
    return std, largest


@dataclass(frozen=True, slots=True)
class _PictureBounds:
    """The depths and the logarithms that a picture reaches from and to."""

    first: int
    last: int
    low: float
    high: float

    @classmethod
    def around(cls, points: Sequence[Point]) -> _PictureBounds:
        logs = [math.log10(value) for _, *values in points for value in values if value]
        low, high = min(logs, default=0.0), max(logs, default=0.0)
        if high - low < 0.2:  # what is nearly flat is drawn so, and not as noise of full height
            low, high = low - 0.1, high + 0.1
        depths = [point.depth for point in points]
        return cls(min(depths), max(depths), low, high)

    def point(self, depth: int, value: float) -> tuple[float, float]:
        across = (depth - self.first) / (self.last - self.first)
        up = (math.log10(value) - self.low) / (self.high - self.low)
        return 2 + across * (_WIDTH - 4), 56 - 50 * up


def _line(kind: str, values: Sequence[tuple[int, float | None]], frame: _PictureBounds) -> str:
    """A line through the values that have a logarithm."""
    points = [frame.point(depth, value) for depth, value in values if value]
    if not points:
        return ""
    if len(points) == 1:
        return f'<circle class="{kind}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2"/>'
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{joined}"/>'
