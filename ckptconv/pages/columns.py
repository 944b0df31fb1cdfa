"""The tensors of a page as compact JSON: columns, of which the page's script makes rows.

Names begin as the one before does: `keep` counts the characters (of UTF-16, as a browser counts),
and `word` is the number of the rest among `words`. Numbers of which many differ are packed: the
leading bits of a float64, six to a letter of `_LETTERS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, TypeVar

from ckptconv.pages.facts import STATES, FileFacts, KeyPair, PageFacts, PageTensor
from ckptconv.support.arrays import Array, np
from ckptconv.support.errors import printable
from ckptconv.tensors.statistics import Statistics
from ckptconv.values.collect import QUANTILES

T = TypeVar("T")

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_"
_FIGURE, _QUANTILE = 5, 4  # letters: 18 and 12 bits of the mantissa
_LONGEST_NAME = 240  # characters that are shown
_FINE, _COARSE, _MANY = 40, 20, 20_000  # bins of a histogram, and from how many tensors few
_EXACT = 1 << 18  # integers from here on are not exact when packed


def data_text(facts: PageFacts) -> str:
    """The data of the page as JSON that may stand within a script element."""
    is_large = sum(len(file.tensors) for file in facts.files) > _MANY
    bins = _COARSE if is_large else _FINE
    document: dict[str, Any] = {
        "states": list(STATES),
        "quantiles": list(QUANTILES),
        "files": [_file(file, bins) for file in facts.files],
        "pairs": None,
    }
    if facts.difference is not None:
        document["pairs"] = _pairs(facts.pairs)
    # JSON.parse of a browser knows no NaN: an error here is better than a page that stays empty
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    # within a script element, what means something to HTML would end it or begin a comment
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shown_name(name: str) -> str:
    """A name as one safe line; of a long one the middle is left out, for ends tell names apart."""
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME // 2]}…{name[-_LONGEST_NAME // 2 :]}"
    return printable(name, 2 * _LONGEST_NAME) or "the root"


def _file(file: FileFacts, bins: int) -> dict[str, Any]:
    tensors = file.tensors
    kinds = [(item.dtype, item.shape, item.numel, item.nbytes) for item in tensors]
    known_kinds, kind_of = _numbered(kinds)
    devices, device_of = _numbered([item.device for item in tensors])
    made: dict[str, Any] = {
        "names": _names([shown_name(item.name) for item in tensors]),
        "kinds": known_kinds,
        "kind": kind_of,
        "devices": [printable(device) for device in devices],
        "device": device_of,
        "same": {
            str(at): item.same_as for at, item in enumerate(tensors) if item.same_as is not None
        },
        "shared": [[item.nbytes, item.used, list(item.tensors)] for item in file.shared],
    }
    if any(item.statistics for item in tensors):
        made["values"] = _values(tensors, bins)
    return made


def _numbered(values: Sequence[T]) -> tuple[list[T], list[int]]:
    """The different values, and of each value the number that its like has among them."""
    numbers: dict[T, int] = {}
    places = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), places


def _names(names: Sequence[str]) -> dict[str, Any]:
    keeps, rests = [], []
    before = ""
    for name in names:
        keep = len(os.path.commonprefix([name, before]))  # noqa: RUF071 (by characters is right)
        # a browser counts a character beyond the first plane as two
        keeps.append(keep + sum(letter > "\uffff" for letter in name[:keep]))
        rests.append(name[keep:])
        before = name
    words, places = _numbered(rests)
    return {"words": words, "keep": keeps, "word": places}


def _values(tensors: Sequence[PageTensor], bins: int) -> dict[str, Any]:
    """The statistics as columns; the numbers of those without any are NaN."""
    known = [item.statistics or Statistics(0) for item in tensors]
    figures = [
        [_number(value) for value in (one.minimum, one.maximum, one.mean, one.std)] for one in known
    ]
    quantiles = [one.quantiles(QUANTILES) or [float("nan")] * len(QUANTILES) for one in known]
    return {
        "figures": packed(np.array(figures), _FIGURE),
        "quantiles": packed(np.array(quantiles), _QUANTILE),
        "bins": bins,
        "histograms": "".join(_bars(one.histogram(bins), bins) for one in known),
        "zeros": [one.zeros for one in known],
        "nan": {str(at): one.nan for at, one in enumerate(known) if one.nan},
        "infinite": {str(at): one.infinite for at, one in enumerate(known) if one.infinite},
        "exact": {
            str(at): [str(one.minimum), str(one.maximum)]
            for at, one in enumerate(known)
            if isinstance(one.minimum, int) and (one.abs_max or 0) >= _EXACT
        },
        "magnitudes": [at for at, one in enumerate(known) if one.of_magnitudes],
        "none": [at for at, item in enumerate(tensors) if item.statistics is None],
    }


def _number(value: float | int | None) -> float:
    return float("nan") if value is None else float(value)


def _bars(counts: Sequence[int] | None, bins: int) -> str:
    """A histogram as one letter for each bin, the highest the last of the letters."""
    most = max(counts or [0])
    if not counts or not most:
        return "0" * bins
    return "".join(_LETTERS[-(-63 * count // most)] for count in counts)


def packed(numbers: Array, letters: int) -> str:
    """float64 numbers, each as so many letters of six leading bits; NaN is one of its patterns."""
    numbers = np.where(np.isnan(numbers), np.nan, numbers)
    bits = numbers.astype("<f8").ravel().view("<u8")
    unused = 64 - 6 * letters
    # to the nearest; the largest numbers, which would become infinite, are cut instead
    rounded = bits + np.uint64(1 << (unused - 1))
    overflows = ~np.isfinite((rounded >> np.uint64(unused) << np.uint64(unused)).view("<f8"))
    codes = np.where(overflows, bits, rounded) >> np.uint64(unused)
    table = np.frombuffer(_LETTERS.encode(), np.uint8)
    columns = [
        table[(codes >> np.uint64(6 * place) & np.uint64(63)).astype(np.int64)]
        for place in reversed(range(letters))
    ]
    return np.stack(columns, axis=-1).tobytes().decode()


def _pairs(pairs: Sequence[KeyPair]) -> dict[str, Any]:
    far = [pair.deviation for pair in pairs if pair.deviation is not None]
    measures = [_number(value) for one in far for value in (one.rel_l2, one.cosine, one.max_abs)]
    return {
        "a": _steps([pair.a for pair in pairs]),
        "b": _steps([pair.b for pair in pairs]),
        "state": [STATES.index(pair.state) for pair in pairs],
        "differing": [at for at, pair in enumerate(pairs) if pair.deviation is not None],
        "measures": packed(np.array(measures), _FIGURE),
        "counts": [[one.count, one.numel, one.nans] for one in far],
    }


def _steps(places: Sequence[int | None]) -> list[int | None]:
    """Places as the distance from the one that is expected next, for most are as expected."""
    made: list[int | None] = []
    expected = 0
    for place in places:
        if place is None:
            made.append(None)
            continue
        made.append(place - expected)
        expected = place + 1
    return made
