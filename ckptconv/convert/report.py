"""Conversions as text and JSON; everything that came out of a file is escaped here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ckptconv.convert.notes import is_codes
from ckptconv.support.errors import printable
from ckptconv.support.progress import Phase
from ckptconv.support.report import LISTED, Fields, Row, listed, note_rows
from ckptconv.support.text import (
    agreeing,
    count_text,
    first_few,
    seconds_text,
    size_text,
    some_text,
    starred,
)

if TYPE_CHECKING:
    from ckptconv.convert.execute import ConversionResult
    from ckptconv.convert.plan import ConversionPlan, PlannedFile
    from ckptconv.keys.rules import Rule
    from ckptconv.tree.renaming import RenamedKeys
    from ckptconv.tree.reshaping import MadeKeys
    from ckptconv.tree.settling import Rewritten, Skipped


def plan_lines(plan: ConversionPlan) -> Iterator[Row]:
    """What a plan changes, as rows."""
    yield from _key_lines(plan)
    for renamed in plan.state_dicts:
        if renamed.made:
            yield _made_row(renamed)
    yield from _tensor_lines(plan)
    if plan.index is not None:
        yield _shards_row(plan, plan.index)
    if plan.tied:
        yield _tied_row(plan.tied)
    if plan.skipped:
        yield from _left_out_lines(plan)
        yield from _skipped_lines(plan)
    if plan.rewritten:
        yield _rewritten_row(plan.rewritten)
    if plan.beside.copied or plan.beside.left:
        yield from _companion_lines(plan)
    if plan.mapping is not None:
        name = printable(plan.mapping.path)
        yield Row("mapping", f"{name}; --rules {name} --reverse undoes it")
    if plan.manifest is not None:
        yield Row("manifest", f"{printable(plan.manifest)}; ckptconv verify reads it")
    yield from note_rows(plan.notes)


def _key_lines(plan: ConversionPlan) -> Iterator[Row]:
    for renamed in plan.state_dicts:
        yield Row("keys", _keys_text(plan, renamed))
        if renamed.shared and not plan.tied:
            keys = f"{count_text(renamed.shared, 'key')} {agreeing(renamed.shared, 'share')}"
            then = ", as before" if plan.target.shares_storages else "; each has its own copy now"
            yield Row("shared", f"{keys} the storage of another{then}")


def _made_row(renamed: RenamedKeys) -> Row:
    """What tensor rules make of a state dict."""
    sources = len(renamed.consumed)
    targets = sum(len(item.targets) for item in renamed.made)
    example = _made_text(renamed.made[:1])
    if not sources:
        return Row("tensors", f"made: {example}")
    keys = f"{count_text(sources, 'key')} {agreeing(sources, 'become')}"
    return Row("tensors", f"{keys} {targets:,}, e.g. {example}")


def _made_text(uses: Sequence[MadeKeys]) -> str:
    """What uses of one rule make: so many tensors of so many, as the rule names them."""
    first = uses[0]
    before, after = (sum(item.counts[side] for item in uses) for side in (0, 1))
    how = getattr(first.rule, "operations_text", "")
    ours, theirs = _patterns(first.rule)
    if first.goes_along:
        how, ours = "as their codes", []
    if not ours:
        ours, theirs = (
            list(dict.fromkeys(starred(key) for item in uses for key in keys(item)))
            for keys in (attrgetter("sources"), attrgetter("targets"))
        )
    made = f"{after:,} × {first_few(theirs, 2)} ({first.first[1]})"
    if not before:
        return made
    told = f"{before:,} × {first_few(ours, 2)} ({first.first[0]}) → {made}"
    return f"{told}: {how}" if how else told


def _patterns(rule: Rule) -> tuple[list[str], list[str]]:
    """The sources and targets of a rule as somebody wrote them; none of a regular expression and
    of a mapping, of which the keys themselves are easier to read.
    """
    from ckptconv.keys.tensor_rules import TensorRule

    if not isinstance(rule, TensorRule):
        return [], []
    return [source for source in rule.sources if isinstance(source, str)], list(rule.targets)


def _tensor_lines(plan: ConversionPlan) -> Iterator[Row]:
    tags = []
    for (before, after), count in plan.locations.items():
        change = f" → {printable(after)}"
        if before == after:
            change = ", as before"
        tags.append(f"{printable(before)}{change} ({count_text(count, 'storage')})")
    yield from listed("device", tags)
    for (before, after), count in plan.casts.items():
        yield Row("dtype", f"{before} → {after} ({count_text(count, 'tensor')})")


def _shards_row(plan: ConversionPlan, index: PlannedFile) -> Row:
    largest = size_text(max(file.layout.nbytes for file in plan.files))
    first = printable(plan.files[0].path.name)
    return Row(
        "shards",
        f"{first} and so on, {len(plan.files):,} in all, the largest {largest}; "
        f"{printable(index.path.name)}",
    )


def _tied_row(tied: Mapping[str, str]) -> Row:
    pairs = [f"{name} = {kept}" for name, kept in tied.items()]
    return Row(
        "tied",
        f"{count_text(len(tied), 'name')} kept in the metadata alone: {some_text(pairs)}; "
        "load_file does not return such names, safetensors.torch.load_model, transformers and "
        "load_portable do (--tied duplicate writes them)",
    )


def _companion_lines(plan: ConversionPlan) -> Iterator[Row]:
    """The files that come along, and those that do not."""
    made = [item for item in plan.beside.copied if item.place is None]
    copied = [item for item in plan.beside.copied if item.place is not None]
    for items, what in ((copied, "copied"), (made, "made")):
        if items:
            size = size_text(sum(item.nbytes for item in items))
            yield Row("files", f"{some_text([item.name for item in items])} {what} ({size})")
    reasons: dict[str, list[str]] = {}
    for item in plan.beside.left:
        reasons.setdefault(item.reason, []).append(item.name)
    for reason, names in reasons.items():
        yield Row("not copied", f"{some_text(names)}: {reason}")


def _skipped_lines(plan: ConversionPlan) -> Iterator[Row]:
    """What is skipped because an output cannot hold it."""
    reasons = _by_reason(item for item in plan.skipped if not item.by_rule)
    for reason, paths in list(reasons.items())[:LISTED]:
        yield Row("skipped", f"{some_text(paths)}: {printable(reason)}")
    if len(reasons) > LISTED:
        yield Row("skipped", f"and {len(reasons) - LISTED:,} more kinds")


def _rewritten_row(rewritten: Iterable[Rewritten]) -> Row:
    """What gets its plain form."""
    named = [
        f"{item.path} ({', '.join(filter(None, (item.name, item.how)))})" for item in rewritten
    ]
    return Row("rewritten", some_text(named) + " in plain form")


def _keys_text(plan: ConversionPlan, renamed: Any) -> str:
    where = ""
    if renamed.path and plan.target.holds_trees:
        where = f" in {_place_text(renamed.path)}"
    written = f"{count_text(renamed.written, 'key')}{where}"
    if not renamed.changed and renamed.made:
        # the next row tells of what is made
        untouched = renamed.written - sum(len(item.targets) for item in renamed.made)
        return f"{written}, {untouched:,} as before" if untouched > 0 else written
    if not renamed.changed:
        return f"{written}, none renamed"
    old, new = renamed.changed[0]
    return (
        f"{len(renamed.changed):,} of {written} renamed, e.g. {printable(old)} → {printable(new)}"
    )


def _place_text(path: str) -> str:
    """The place of a state dict; of one in a module kept whole, that of the module."""
    if path == ".":
        return "the root"
    if _STATE not in path.split("."):
        return printable(path)
    names = [
        name
        for name in path.split(".")
        if name not in (_STATE, "_modules", "_parameters", "_buffers")
    ]
    return f"the module {printable('.'.join(names))}".rstrip()


_STATE = "<state>"


def _left_out_lines(plan: ConversionPlan) -> Iterator[Row]:
    """How many keys each rule left out, of how many."""
    whole = sum(item.count for item in plan.state_dicts)
    reasons = _by_reason(item for item in plan.skipped if item.by_rule)
    for reason, paths in list(reasons.items())[:LISTED]:
        some = first_few(paths, _EXAMPLES)
        eg = "e.g. " if len(paths) > _EXAMPLES else ""
        yield Row(
            "left out",
            f"{len(paths):,} of {count_text(whole, 'key')} {printable(reason, 500)}: {eg}{some}",
        )
    if len(reasons) > LISTED:
        yield Row("left out", f"and {sum(map(len, list(reasons.values())[LISTED:])):,} more")


_EXAMPLES = 2


def _by_reason(skipped: Iterable[Skipped]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for item in skipped:
        reasons.setdefault(item.reason, []).append(item.seen or item.path)
    return reasons


def plan_headline(plan: ConversionPlan) -> str:
    """The line that says what a plan would do."""
    size = size_text(plan.nbytes)
    if plan.target.is_made_by_torch:
        size = "of a size that torch decides"
    return f"would write {_output_text(plan, size)}, source {size_text(plan.source_nbytes)}"


_ROWS = 40


def keys_table(plan: ConversionPlan) -> Iterator[str]:
    """The keys that change, old → new, one line each (40 at most), and how many do not change.
    Nothing of a state dict whose keys all stay as they are: its row says so.
    """
    for item in plan.state_dicts:
        rows = [*item.changed, *((old, "(left out)") for old in item.left_out)]
        where = f" of {_place_text(item.path)}" if item.path else ""
        most = _ROWS
        if len(rows) > _ROWS:  # the last line counts the others
            most -= 1
        shown = [(printable(old), printable(new)) for old, new in rows[:most]]
        width = max((len(old) for old, _ in shown), default=0)
        if item.made:
            yield f"tensors{where}:"
            yield from (f"  {_made_text(uses)}" for uses in _by_rule(item.made))
        if not rows and not item.made:
            continue
        if rows:
            yield f"keys{where}:"
        yield from (f"  {old.ljust(width)}  → {new}" for old, new in shown)
        if len(rows) > len(shown):
            yield f"  … {len(rows) - len(shown):,} more (--json lists all)"
        if item.untouched:
            yield f"{count_text(item.untouched, 'key')}{where} untouched"


def _by_rule(made: Iterable[MadeKeys]) -> Iterable[list[MadeKeys]]:
    """The uses of each rule for tensors of one shape, in the order of the rules."""
    found: dict[tuple[int, tuple[str, str]], list[MadeKeys]] = {}
    for item in made:
        found.setdefault((id(item.rule), item.first), []).append(item)
    return found.values()


_RATED_FROM = 10_000_000  # bytes; what is smaller is done before its rate means something
_WORTH_TELLING = 1.0  # seconds; a process takes tenths to import what it needs


def result_headline(result: ConversionResult) -> str:
    """The line that says what was done."""
    plan = result.plan
    return (
        f"{printable(plan.source)} ({plan.source_format}, {size_text(plan.source_nbytes)}) → "
        f"{_output_text(plan, size_text(result.nbytes))}, {_time_text(result)}"
    )


def _output_text(plan: ConversionPlan, size: str) -> str:
    """What is written: one file, or a folder or row of shards."""
    if plan.index is None:
        slash = os.sep if plan.target.is_folder else ""
        return f"{printable(plan.output)}{slash} ({plan.to}, {size})"
    shards = f"{count_text(len(plan.files), 'shard')} and their index"
    if plan.in_folder:
        return f"{printable(plan.output.parent)}{os.sep} ({shards}, {plan.to}, {size})"
    return f"{printable(plan.index.path)} ({shards}, {plan.to}, {size})"


def _time_text(result: ConversionResult) -> str:
    """How long it took, and what went to other things than writing; a rate where it was much."""
    wrote, rate = result.phases.get("write", 0.0), ""
    if wrote >= _WORTH_TELLING and result.plan.nbytes >= _RATED_FROM:
        rate = f" at {size_text(result.plan.nbytes / wrote)}/s"
    others = []
    for phase, words in _SPENT.items():
        seconds = result.phases.get(phase, 0.0)
        if seconds >= _WORTH_TELLING:
            others.append(f"{seconds_text(seconds)} {words}")
    if not others:
        return f"written in {seconds_text(result.seconds)}{rate}"
    if wrote >= _WORTH_TELLING:
        others.insert(0, f"{seconds_text(wrote)} writing{rate}")
    return f"done in {seconds_text(result.seconds)}: {', '.join(others)}"


_SPENT: dict[Phase, str] = {
    "open": "opening",
    "verify": "verifying",
    "sync": "waiting for the disk",
}


def result_lines(result: ConversionResult) -> Iterator[Row]:
    """What a conversion changed and found, as rows."""
    yield from plan_lines(result.plan)
    for path, what in result.odd_values():
        yield Row("warning", f"{printable(path)}: {what}", "warning")
    if result.verified is not None:
        read = f"{count_text(result.verified, 'tensor')} read back"
        copied = result.plan.beside.copied
        if copied:
            files = count_text(len(copied), "file")
            read = f"{count_text(result.verified, 'tensor')} and {files} read back"
        yield Row("verified", f"{read}, {_equal_text(result.plan)}; {_named_text(result)}")


def _equal_text(plan: ConversionPlan) -> str:
    """What was read back is equal to the source, or to what was to be made of it."""
    casts = ", ".join(dict.fromkeys(after for before, after in plan.casts if not is_codes(before)))
    if any(is_codes(before) for before, _ in plan.casts):
        told = "equal to the source, dequantised"
        return f"{told} and cast to {casts}" if casts else told
    return f"equal to the source after the cast to {casts}" if casts else "equal to the source"


def _named_text(result: ConversionResult) -> str:
    if result.named is None:
        kind = printable(result.plan.source_format)
        return (
            f"whether the reader saw everything in the source is not checked a second way ({kind})"
        )
    reads = result.plan.reads
    if result.plan.skipped or reads is None or reads.checkpoint.dropped:
        return "nothing else that the source names is missing"
    return "nothing that the source names is missing"


# ------------------------------------------------------------------------------------------- JSON


def _output(plan: ConversionPlan) -> dict[str, Any]:
    output = {"path": str(plan.output), "format": plan.to, "bytes": plan.nbytes}
    if plan.target.is_made_by_torch:
        output["bytes"] = None
    if plan.index is not None:
        output |= _SHARDS.of(plan)
    return output


_SHARDS = Fields("index=index.path shards=files", shards=Fields("path bytes=layout.nbytes"))


def _changed(noun: str) -> Callable[[Mapping[tuple[str, str], int]], list[dict[str, Any]]]:
    """How the counts of what was one thing before, and is another after, are documented."""
    return lambda counts: [
        {"before": before, "after": after, noun: count} for (before, after), count in counts.items()
    ]


PLAN = Fields(
    "source=. output=. state_dicts locations casts keys=state_dicts tied mapping manifest files=. "
    "files_not_copied=beside.left skipped rewritten notes",
    source=Fields("path=source format=source_format bytes=source_nbytes"),
    output=_output,
    state_dicts=Fields(
        "path wrappers keys=count renamed=changed example=changed",
        renamed=len,
        example=lambda changed: list(changed[0]) if changed else None,
    ),
    locations=_changed("storages"),
    casts=_changed("tensors"),
    keys=Fields(
        "path renamed=changed left_out filled made untouched",
        made=Fields("rule=rule.words sources targets"),
    ),
    mapping=lambda mapping: None if mapping is None else str(mapping.path),
    files=lambda plan: [
        {"path": str(plan.folder / item.name), "bytes": item.nbytes} for item in plan.beside.copied
    ],
    files_not_copied=Fields("path=name reason"),
    skipped=Fields("path reason"),
    rewritten=Fields("path object=name how"),
)
"""The document of a plan."""


_RESULT = Fields(
    "seconds phases verified named overflowed odd_bools",
    seconds=lambda seconds: round(seconds, 6),
    phases=lambda phases: {phase: round(seconds, 6) for phase, seconds in phases.items()},
)


def result_document(result: ConversionResult) -> dict[str, Any]:
    """A finished conversion as JSON values."""
    document = PLAN.of(result.plan)
    # of what torch made, which no plan can tell
    document["output"]["bytes"] = result.nbytes
    return {**document, **_RESULT.of(result)}
