"""The profile of a model over its depth: std and abs-max of each kind of tensor, layer by layer.

Layers repeat: `layers.0.w`, `layers.1.w`, … are one series, `layers.#.w`. The first number in a
name counts the depth; further ones (experts, say) are folded into the same series, of which the
middle std and the largest abs-max are drawn. Each series is a picture of its own, as SVG.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from ckptconv.pages.columns import shown_name
from ckptconv.pages.facts import FileFacts, PageFacts, PageTensor
from ckptconv.support.text import count_text
from ckptconv.values.report import number_text

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d{1,6}(?=\.|$)")
_SERIES, _POINTS = 48, 400  # that are drawn
_WIDTH, _HEIGHT = 230, 74


@dataclass(frozen=True, slots=True)
class Series:
    """The tensors of one folded name: the depths, and std and abs-max at each (None: no numbers)."""

    name: str
    nbytes: int
    depths: tuple[int, ...]
    std: tuple[float | None, ...]
    abs_max: tuple[float | None, ...]


def folded(tensors: Sequence[PageTensor]) -> list[Series]:
    """The series of two depths and more, the largest in bytes first."""
    found: dict[str, dict[int, list[PageTensor]]] = {}
    for item in tensors:
        if item.statistics is None or (number := _NUMBER.search(item.name)) is None:
            continue
        layers = found.setdefault(_NUMBER.sub("#", item.name), {})
        layers.setdefault(int(number[0]), []).append(item)
    made = [_series(name, layers) for name, layers in found.items() if len(layers) > 1]
    return sorted(made, key=lambda item: (-item.nbytes, item.name))


def _series(name: str, layers: dict[int, list[PageTensor]]) -> Series:
    depths = sorted(layers)
    return Series(
        name,
        sum(item.nbytes for items in layers.values() for item in items),
        tuple(depths),
        tuple(_middle(layers[depth]) for depth in depths),
        tuple(_largest(layers[depth]) for depth in depths),
    )


def _middle(items: list[PageTensor]) -> float | None:
    known = [
        one.std for item in items if (one := item.statistics) is not None and one.std is not None
    ]
    return median(known) if known else None


def _largest(items: list[PageTensor]) -> float | None:
    known = [
        float(one.abs_max)
        for item in items
        if (one := item.statistics) is not None and one.abs_max is not None
    ]
    return max(known, default=None)


def profile_section(facts: PageFacts) -> Iterator[str]:
    """The section of the page; nothing where there are no statistics or no layers."""
    for side, file in zip("AB", facts.files, strict=False):
        yield from _section(file, f" of {side}" if facts.difference is not None else "")


def _section(file: FileFacts, of: str) -> Iterator[str]:
    series = folded(file.tensors)
    if not series:
        return
    yield (
        f'<section><div class="bar"><h2>Profile over depth{of}</h2>'
        f'<span class="note">{_KEY}<i>log scale</i></span></div>\n<div class="profiles">\n'
    )
    for one in series[:_SERIES]:
        yield _figure(one)
    yield "</div>\n"
    if len(series) > _SERIES:
        yield f'<p class="note">and {len(series) - _SERIES:,} smaller ones</p>\n'
    yield "</section>\n"


_KEY = (
    '<svg class="key" viewBox="0 0 26 8" aria-hidden="true"><line class="line-std" x1="0" x2="26" '
    'y1="4" y2="4" stroke-width="2"/></svg>std &nbsp; '
    '<svg class="key" viewBox="0 0 26 8" aria-hidden="true"><line class="line-max" x1="0" x2="26" '
    'y1="4" y2="4" stroke-width="2"/></svg>abs-max, '
)


def _figure(one: Series) -> str:
    name = escape(shown_name(one.name))
    drawn = _thinned(one)
    known = [value for value in (*drawn.std, *drawn.abs_max) if value]
    low, high = (math.log10(min(known)), math.log10(max(known))) if known else (0.0, 0.0)
    if high - low < 0.2:
        low, high = low - 0.1, high + 0.1
    lines = "".join(
        _line(kind, drawn.depths, values, low, high)
        for kind, values in (("std", drawn.std), ("max", drawn.abs_max))
    )
    about = f"{one.name}: std {_ends(one.std)}, abs-max {_ends(one.abs_max)}"
    return (
        f"<figure><figcaption><bdi>{name}</bdi></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(shown_name(about))}">'
        f'<line class="base" x1="0" x2="{_WIDTH}" y1="60" y2="60"/>{lines}'
        f'<text class="axis" x="0" y="72">{one.depths[0]}</text>'
        f'<text class="axis" x="{_WIDTH}" y="72" text-anchor="end">{one.depths[-1]}</text>'
        f'<text class="axis" x="{_WIDTH / 2:g}" y="72" text-anchor="middle">'
        f"std {_ends(one.std)}</text></svg></figure>\n"
    )


def _ends(values: Sequence[float | None]) -> str:
    """The first and the last of some figures."""
    return f"{number_text(values[0])} … {number_text(values[-1])}"


def _thinned(one: Series) -> Series:
    """At most so many points, the last among them."""
    step = -(-len(one.depths) // _POINTS)
    keep = sorted({*range(0, len(one.depths), step), len(one.depths) - 1})
    return Series(
        one.name,
        one.nbytes,
        tuple(one.depths[at] for at in keep),
        tuple(one.std[at] for at in keep),
        tuple(one.abs_max[at] for at in keep),
    )


def _line(
    kind: str, depths: Sequence[int], values: Sequence[float | None], low: float, high: float
) -> str:
    """A line through the values that have a logarithm."""
    first, last = depths[0], depths[-1]
    points = [
        (
            (depth - first) / (last - first) * (_WIDTH - 4) + 2,
            56 - (math.log10(value) - low) / (high - low) * 50,
        )
        for depth, value in zip(depths, values, strict=True)
        if value
    ]
    if len(points) == 1:
        return f'<circle class="line-{kind}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2"/>'
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="line-{kind}" points="{joined}"/>' if points else ""
