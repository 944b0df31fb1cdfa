"""Which keys of a checkpoint may stand for which of a target, by their names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ckptconv.keys.fits import SAME_KEYS, WRAPPERS, Shapes
from ckptconv.keys.key_map import STRIP, map_keys
from ckptconv.keys.rules import without_segments
from ckptconv.support.errors import KeyConflict
from ckptconv.support.limits import refuse_beyond

Names = Mapping[str, str]  # a key without its wrappers or its prefix → the key
Graph = Mapping[str, Sequence[str]]  # target key → the source keys that may be meant for it


def same_names(source: Shapes, target: Shapes) -> Iterator[tuple[str, bool, Names, Names]]:
    """The ways to read the keys of both sides: its name, whether it leaves no doubt, both names."""
    yield SAME_KEYS, True, {key: key for key in source}, {key: key for key in target}
    sources, targets = _bare(source), _bare(target)
    yield WRAPPERS, True, sources, targets
    heads = _head(sources), _head(targets)
    if any(heads):
        yield _prefix_text(*heads), False, _cut(sources, heads[0]), _cut(targets, heads[1])
    if (voted := _voted_prefixes(sources, targets)) not in (None, heads):
        old, new = voted or ("", "")
        yield _prefix_text(old, new), False, _cut(sources, old), _cut(targets, new)


def _bare(keys: Iterable[str]) -> Names:
    """The keys by their names without wrappers; as they are, where two would become one."""
    keys = list(keys)
    try:
        return dict(zip(map(str, map_keys(keys, STRIP).new), keys, strict=True))
    except KeyConflict:
        return {key: key for key in keys}


def _head(names: Names) -> str:
    """The segments, with their dots, that all names start with; each keeps its last one."""
    first, last = (min(names), max(names)) if names else ("", "")
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
    wherever they stand.

    Numbers are not such segments: a layer is not another one.
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
