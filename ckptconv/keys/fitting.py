"""Fitting: the renaming under which the keys and the shapes of one state dict are those of another.

Works on names and shapes alone. Looked for, in this order: the same keys; the same but for wrappers
(see `key_map`); one prefix changed on every key; then an assignment of keys to keys, which must be
the only one there is. What each key becomes is either known or an error: nothing here prefers one
of two possible assignments.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from ckptconv.keys.fits import SAME_KEYS, WRAPPERS, Candidates, Fit, Misshapen, Shape, Shapes, Ties
from ckptconv.keys.key_map import STRIP, map_keys
from ckptconv.keys.presets import PRESETS, Preset
from ckptconv.keys.rules import without_segments
from ckptconv.support.errors import KeyConflict, OptionRefused
from ckptconv.support.limits import refuse_beyond

# -------------------------------------------------------------------------------------------- names


Names = Mapping[str, str]  # a key without its wrappers or its prefix → the key
Graph = Mapping[str, Sequence[str]]  # target key → the source keys that may be meant for it


def same_names(source: Shapes, target: Shapes) -> Iterator[tuple[str, bool, Names, Names]]:
    """The ways to read the keys of both sides: its name, whether it leaves no doubt, both names."""
    yield SAME_KEYS, True, {key: key for key in source}, {key: key for key in target}
    sources, targets = bare_names(source), bare_names(target)
    yield WRAPPERS, True, sources, targets
    heads = _head(sources), _head(targets)
    if any(heads):
        yield _prefix_text(*heads), False, _cut(sources, heads[0]), _cut(targets, heads[1])
    voted = _voted_prefixes(sources, targets)
    if voted not in (None, heads):
        old, new = voted or ("", "")
        yield _prefix_text(old, new), False, _cut(sources, old), _cut(targets, new)


def bare_names(keys: Iterable[str]) -> Names:
    """The keys by their names without wrappers; as they are, where two would become one."""
    keys = list(keys)
    try:
        return dict(zip(map(str, map_keys(keys, STRIP).new), keys, strict=True))
    except KeyConflict:
        return {key: key for key in keys}


def _head(names: Names) -> str:
    """The segments, with their dots, that all names start with; each keeps its last one."""
    first, last = min(names, default=""), max(names, default="")
    differ = (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: first.rfind(".", 0, next(differ, min(len(first), len(last)))) + 1]


def _cut(names: Names, head: str) -> Names:
    """The names with `head` cut off those that start with it, where that leaves them distinct."""
    cut = {name.removeprefix(head): key for name, key in names.items()}
    return cut if len(cut) == len(names) else names


def _prefix_text(old: str, new: str) -> str:
    return f"prefix '{old}' → '{new}'"


def _voted_prefixes(sources: Names, targets: Names) -> tuple[str, str] | None:
    """The prefix to cut off one side's names that makes most equal; None without a winner."""
    votes: Counter[tuple[str, str]] = Counter()
    longer = _endings(sources)
    votes.update((name[: -len(end)], "") for end in targets for name in longer.get(end, ()))
    longer = _endings(targets)
    votes.update(("", name[: -len(end)]) for end in sources for name in longer.get(end, ()))
    (best, count), (_, second) = [*votes.most_common(2), (("", ""), 0), (("", ""), 0)][:2]
    return best if count > second else None


def suffixes(name: str) -> Iterator[str]:
    """The proper suffixes of whole segments, the longest first.

    >>> list(suffixes("a.b.c"))
    ['b.c', 'c']
    """
    at = name.find(".")
    while at >= 0:
        yield name[at + 1 :]
        at = name.find(".", at + 1)


def _endings(names: Collection[str]) -> Mapping[str, list[str]]:
    """The names by each of their proper suffixes."""
    refuse_endless(names)
    ending = defaultdict(list)
    for name in names:
        for suffix in suffixes(name):
            ending[suffix].append(name)
    return ending


def refuse_endless(names: Collection[str]) -> None:
    """Raise `LimitExceeded` if the suffixes of all names take more memory than any model's."""
    length = sum(len(name) * name.count(".") for name in names) // 2
    what = f"its keys are too long to be fitted: their suffixes have {length} characters"
    refuse_beyond("names", length, what)


def by_suffix(sources: Names, targets: Names) -> Graph:
    """Target name → the source names that are it but for a prefix, which either may have more."""
    longer = _endings(sources)
    return {
        name: [*longer.get(name, ()), *(end for end in (name, *suffixes(name)) if end in sources)]
        for name in targets
    }


def by_insertion(sources: Names, targets: Names) -> Graph:
    """Target name → the source names that are it but for segments that only the one side knows,
    wherever they stand. Numbers are not such segments: a layer is not another one.
    """
    source_segments = {segment for name in sources for segment in name.split(".")}
    target_segments = {segment for name in targets for segment in name.split(".")}
    shorten_source = _without(source_segments - target_segments)
    shorten_target = _without(target_segments - source_segments)
    shortened = defaultdict(list)
    for name in sources:
        shortened[shorten_source(name)].append(name)
    graph = {}
    for name in targets:
        short = shorten_target(name)
        olds = shortened.get(short, [])
        graph[name] = olds if short == name else [old for old in olds if old == short]
    return graph


def _without(segments: set[str]) -> Callable[[str], str]:
    inserted = {segment for segment in segments if not segment.isdigit()}
    return lambda name: without_segments(name, inserted)


# ------------------------------------------------------------------------------------------ fitting


_NEAREST = 3  # candidates that are named for one key
_NEAREST_FOR = 1000  # missing keys for which candidates are looked for
_Pairs = Mapping[str, str]  # target key → source key


def fit_keys(source: Shapes, target: Shapes, ties: Ties = ()) -> Fit:
    """Find the renaming that makes the keys and shapes of `source` match those of `target`.

    `ties` are the keys of the target that are names of one tensor: such a key may be absent from
    the source, as it is where one name of tied weights was saved, if another name of its tensor is
    there and no key is left that could be meant for it.

    What is found is complete where `covers` says so, and then the only possibility; otherwise the
    `Fit` tells what stands in the way, seen from the renaming under which most keys fit. The order
    of the keys does not matter. Raises `LimitExceeded` when the keys are too long to be compared.

    >>> fit_keys({"model.fc.weight": (2, 3)}, {"module.fc.weight": (2, 3)}).renames
    {'model.fc.weight': 'module.fc.weight'}
    >>> fit = fit_keys({"a.w": (2,), "b.w": (2,)}, {"c.w": (2,), "d.x": (2,)})
    >>> [item.key for item in fit.ambiguous]
    ['c.w']
    >>> target = {"embed.w": (2,), "head.w": (2,)}
    >>> fit_keys({"embed.w": (2,)}, target, [("embed.w", "head.w")]).filled
    {'head.w': 'embed.w'}
    """
    for name, shapes in (("source", source), ("target", target)):
        if not isinstance(shapes, Mapping):
            raise OptionRefused(f"{name}={shapes!r:.100} is not a dict of shapes by keys")
    if not isinstance(ties, Iterable):
        raise OptionRefused(f"ties={ties!r:.100} is not a list of groups of keys")
    fit = _fit_ties(source, target, ties)
    if fit.fits:
        return fit
    return replace(fit, preset=_preset(source, target, ties))


def _preset(source: Shapes, target: Shapes, ties: Ties) -> str:
    """The framework's rules that leave out what stands in the way (a counter of averages, say)."""
    for name in PRESETS:
        preset = Preset(name)
        if preset.leaves_out and not preset.idle([*source]):
            step = preset.step([*source])
            kept = [(after, shape) for key, shape in source.items() if (after := step(key))]
            new = dict(kept)
            if len(new) == len(kept) and _fit_ties(new, target, ties).fits:
                return name
    return ""


def _fit_ties(source: Shapes, target: Shapes, ties: Ties) -> Fit:
    """As `fit_keys`, by the keys and their ties alone."""
    fit = _fit_all(source, target)
    if fit.covers:
        return fit
    absent = _absent_names(fit, source, target, ties)
    if not absent:
        return fit
    again = _fit_all(source, {key: shape for key, shape in target.items() if key not in absent})
    olds = {key: old for old, key in again.renames.items()}
    filled = {
        key: olds[name]
        for key, names in absent.items()
        if (name := next((one for one in names if one in olds), None))
    }
    if not filled:  # without the absent names, the others met none of their tensors
        return fit
    unmet = {*again.missing, *absent} - filled.keys()
    return replace(again, missing=tuple(key for key in target if key in unmet), filled=filled)


def _absent_names(fit: Fit, source: Shapes, target: Shapes, ties: Ties) -> dict[str, Sequence[str]]:
    """Missing names of tied tensors, with all names of each, that nothing in the source fits."""
    met = set(fit.renames.values())
    doubtful = {item.key for item in fit.ambiguous}
    for item in fit.nearest:
        if any(_alike(source[old], target[item.key]) for old in item.source_keys):
            doubtful.add(item.key)
    missing = set(fit.missing) - doubtful
    return {
        key: names for names in ties if not met.isdisjoint(names) for key in names if key in missing
    }


def _fit_all(source: Shapes, target: Shapes) -> Fit:
    """The renaming that meets each key of the target with one of the source, or why not."""
    attempts: list[tuple[str, _Pairs]] = []
    bases: list[tuple[Names, Names]] = []
    for how, exact, sources, targets in same_names(source, target):
        pairs = {key: sources[name] for name, key in targets.items() if name in sources}
        # where all names are met, other shapes are not a reason to doubt the names
        is_clear = exact or len(source) == len(target) or not _covers(pairs, source, target)
        if is_clear and len(pairs) == len(target):
            return _fit(how, pairs, source, target)
        attempts.append((how, pairs))
        bases.append((sources, targets))
    return _assigned(source, target, attempts, bases[1:])


def _alike(one: Shape, other: Shape) -> bool:
    return one is None or other is None or one == other


# ----------------------------------------------------------------------------- assigning key to key


def _assigned(
    source: Shapes,
    target: Shapes,
    attempts: list[tuple[str, _Pairs]],
    bases: Sequence[tuple[Names, Names]],
) -> Fit:
    """The only assignment of keys that wrappers and one prefix do not explain, or why none is."""
    sources, targets = bases[0]
    graph = _keys_of(by_suffix(sources, targets), sources, targets, source, target)
    forced = _forced(graph)
    contested = {key: olds for key, olds in graph.items() if len(olds) > 1 and key not in forced}
    attempts.append(("prefixes, key by key", forced))
    for names in bases:
        inserted = _keys_of(by_insertion(*names), *names, source, target)
        attempts.append(("segments within the keys", _forced(inserted)))
    attempts[2:] = [
        (how, {key: old for key, old in pairs.items() if key not in contested})
        for how, pairs in attempts[2:]
    ]
    tried = attempts[2:]
    if len(source) == len(target):
        tried = [*tried, ("suffix and shape", _mutual(sources, targets, source, target))]
    whole = [(how, pairs) for how, pairs in tried if _covers(pairs, source, target)]
    if whole and all(pairs == whole[0][1] for _, pairs in whole):
        return _fit(*whole[0], source, target)
    for key in target:  # there may be several assignments, each of them all there is of its kind
        olds = dict.fromkeys(pairs[key] for _, pairs in whole)
        if len(olds) > 1:
            contested[key] = [*olds]
    left = [item for item in attempts if item not in whole]
    how, pairs = max(
        left, key=lambda item: sum(_alike(source[old], target[key]) for key, old in item[1].items())
    )
    return _fit(how, pairs, source, target, contested)


def _covers(pairs: _Pairs, source: Shapes, target: Shapes) -> bool:
    return len(pairs) == len(target) and all(
        _alike(source[old], target[key]) for key, old in pairs.items()
    )


def _keys_of(graph: Graph, sources: Names, targets: Names, source: Shapes, target: Shapes) -> Graph:
    """A graph of names as one of keys, of those pairs whose shapes are alike."""
    return {
        (key := targets[name]): [
            sources[old] for old in olds if _alike(source[sources[old]], target[key])
        ]
        for name, olds in graph.items()
    }


def _forced(graph: Graph) -> _Pairs:
    """The pairs without an alternative.

    A key with one candidate takes it, which may leave others with one.

    Where a graph has exactly one assignment of all keys, this finds it, for then there always is a
    key with one candidate.
    """
    rivals = defaultdict(list)
    for key, olds in graph.items():
        for old in olds:
            rivals[old].append(key)
    left = {key: len(olds) for key, olds in graph.items()}
    pairs: dict[str, str] = {}
    taken: set[str] = set()
    forced = [key for key, count in left.items() if count == 1]
    while forced:
        claims = defaultdict(list)
        for key in forced:
            claims[next(old for old in graph[key] if old not in taken)].append(key)
        taken.update(claims)
        forced = []
        for old, keys in claims.items():
            if len(keys) == 1:
                pairs[keys[0]] = old
            for rival in rivals[old]:
                left[rival] -= 1
                if left[rival] == 1:
                    forced.append(rival)
        forced = [key for key in forced if left[key] == 1]
    return pairs


def _mutual(sources: Names, targets: Names, source: Shapes, target: Shapes) -> _Pairs:
    """Target key → source key, where each ends most like the other, of all keys of its shape."""
    shapes = [
        {name: shape for name, key in names.items() if (shape := side[key]) is not None}
        for names, side in ((sources, source), (targets, target))
    ]
    back, there = _closest(*shapes), _closest(*reversed(shapes))
    return {targets[name]: sources[old] for name, old in there.items() if back.get(old) == name}


def _closest(
    names: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]
) -> Mapping[str, str]:
    """Name → the one of `others` that shares its shape and, alone, the most segments at its end."""
    holders: dict[tuple[str, tuple[int, ...]], str | None] = {}
    for other, shape in others.items():
        for end in (other, *suffixes(other)):
            holders[end, shape] = None if (end, shape) in holders else other
    closest = {}
    for name, shape in names.items():
        ends = ((end, shape) for end in (name, *suffixes(name)))
        only = next((holders[end] for end in ends if end in holders), None)
        if only is not None:
            closest[name] = only
    return closest


# ----------------------------------------------------------------------------------- what was found


def _fit(
    how: str, pairs: _Pairs, source: Shapes, target: Shapes, contested: Graph | None = None
) -> Fit:
    """The result for target keys and the source keys that have their names."""
    met = [(key, pairs[key], source[pairs[key]], target[key]) for key in target if key in pairs]
    wrong = tuple(Misshapen(*item) for item in met if not _alike(*item[2:]))
    used = set(pairs.values())
    refused = {item.key for item in wrong}
    unexpected = tuple(key for key in source if key not in used)
    missing = tuple(key for key in target if key not in pairs)
    nearest = list(_nearest(missing, unexpected, source, target))
    several = {key: tuple(olds) for key, olds in (contested or {}).items() if key not in pairs}
    several = {**{item.key: item.source_keys for item, equal in nearest if equal}, **several}
    return Fit(
        how=how,
        renames={old: key for key, old in pairs.items() if key not in refused},
        missing=missing,
        unexpected=unexpected,
        mismatched=wrong,
        ambiguous=tuple(Candidates(key, several[key]) for key in missing if key in several),
        nearest=tuple(item for item, _ in nearest),
    )


def _nearest(
    missing: Sequence[str], unexpected: Sequence[str], source: Shapes, target: Shapes
) -> Iterator[tuple[Candidates, bool]]:
    """For missing keys the left-over ones that end most like them; if several of one shape do."""
    if not missing or not unexpected:
        return
    refuse_endless(missing[:_NEAREST_FOR])
    refuse_endless(unexpected)
    holders = defaultdict(list)
    for old in unexpected:
        for end in (old, *suffixes(old)):
            holders[end].append(old)
    for key in missing[:_NEAREST_FOR]:
        ranks = [holders[end] for end in (key, *suffixes(key)) if end in holders]
        alike = next(filter(None, (_first_alike(olds, source, target[key]) for olds in ranks)), [])
        named = dict.fromkeys([*alike, *(old for olds in ranks for old in islice(olds, _NEAREST))])
        if named:
            yield Candidates(key, tuple(islice(named, _NEAREST))), len(alike) > 1


def _first_alike(olds: Iterable[str], source: Shapes, shape: Shape) -> list[str]:
    return list(islice((old for old in olds if _alike(source[old], shape)), _NEAREST))
