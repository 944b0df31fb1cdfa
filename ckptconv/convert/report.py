"""Conversions as text and JSON; everything that came out of a file is escaped here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from ckptconv.convert.execute import ConversionResult
from ckptconv.convert.plan import ConversionPlan
from ckptconv.support.errors import printable
from ckptconv.support.progress import Phase
from ckptconv.support.rows import Row
from ckptconv.support.text import count_text, first_few, seconds_text, size_text, some_text
from ckptconv.tree.settling import Skipped

_TAGS = 20  # device tags, and kinds of objects left out, that are listed; --json lists all


def plan_lines(plan: ConversionPlan) -> Iterator[Row]:
    """What a plan changes, as rows."""
    yield from _key_lines(plan)
    yield from _tensor_lines(plan)
    yield from _file_lines(plan)
    yield from _left_out_lines(plan)
    yield from _object_lines(plan)
    yield from _companion_lines(plan)
    if plan.mapping is not None:
        yield Row(
            "mapping",
            f"{printable(plan.mapping.path)}; --rules {printable(plan.mapping.path)} --reverse "
            "undoes it",
        )
    for note in plan.notes:
        yield Row("note", printable(note), "warning")


def _key_lines(plan: ConversionPlan) -> Iterator[Row]:
    for renamed in plan.state_dicts:
        yield Row("keys", _keys_text(plan, renamed))
        if renamed.shared and not plan.tied:
            verb = "shares" if renamed.shared == 1 else "share"
            then = ", as before" if plan.target.shares_storages else "; each has its own copy now"
            yield Row(
                "shared", f"{count_text(renamed.shared, 'key')} {verb} the storage of another{then}"
            )


def _tensor_lines(plan: ConversionPlan) -> Iterator[Row]:
    for (before, after), count in list(plan.locations.items())[:_TAGS]:
        change = (
            f"{printable(before)} → {printable(after)}"
            if before != after
            else f"{printable(before)}, as before"
        )
        yield Row("device", f"{change} ({count_text(count, 'storage')})")
    if len(plan.locations) > _TAGS:
        yield Row("device", f"and {len(plan.locations) - _TAGS:,} more")
    for (before, after), count in plan.casts.items():
        yield Row("dtype", f"{before} → {after} ({count_text(count, 'tensor')})")


def _file_lines(plan: ConversionPlan) -> Iterator[Row]:
    if plan.index is not None:
        largest = size_text(max(file.layout.nbytes for file in plan.files))
        first = printable(plan.files[0].path.name)
        yield Row(
            "shards",
            f"{first} and so on, {len(plan.files):,} in all, the largest {largest}; "
            f"{printable(plan.index.path.name)}",
        )
    if plan.tied:
        name, kept = next(iter(plan.tied.items()))
        yield Row(
            "tied",
            f"{count_text(len(plan.tied), 'name')} kept as aliases: {printable(name)} = "
            f"{printable(kept)}",
        )


def _companion_lines(plan: ConversionPlan) -> Iterator[Row]:
    """The files that come along, and those that do not."""
    if copied := plan.beside.copied:
        size = size_text(sum(item.nbytes for item in copied))
        yield Row("files", f"{some_text([item.name for item in copied])} copied ({size})")
    reasons: dict[str, list[str]] = {}
    for item in plan.beside.left:
        reasons.setdefault(item.reason, []).append(item.name)
    for reason, names in reasons.items():
        yield Row("not copied", f"{some_text(names)}: {reason}")


def _object_lines(plan: ConversionPlan) -> Iterator[Row]:
    """What is skipped because an output cannot hold it, and what gets its plain form."""
    reasons = _by_reason(item for item in plan.skipped if not item.by_rule)
    for reason, paths in list(reasons.items())[:_TAGS]:
        yield Row("skipped", f"{some_text(paths)}: {printable(reason)}")
    if len(reasons) > _TAGS:
        yield Row("skipped", f"and {len(reasons) - _TAGS:,} more kinds")
    if plan.rewritten:
        named = [
            f"{item.path} ({', '.join(filter(None, (item.name, item.how)))})"
            for item in plan.rewritten
        ]
        yield Row("rewritten", some_text(named) + " in plain form")


def _keys_text(plan: ConversionPlan, renamed: Any) -> str:
    where = f" in {_place_text(renamed.path)}" if renamed.path and plan.target.holds_trees else ""
    if not renamed.changed:
        return f"{count_text(renamed.written, 'key')}{where}, none renamed"
    old, new = renamed.changed[0]
    return (
        f"{len(renamed.changed):,} of {count_text(renamed.written, 'key')}{where} renamed, "
        f"e.g. {printable(old)} → {printable(new)}"
    )


def _place_text(path: str) -> str:
    """The place of a state dict; of one within a module that is kept whole, the module: how it is
    pickled is left out.
    """
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
    for reason, paths in list(reasons.items())[:_TAGS]:
        some = first_few(paths, _EXAMPLES)
        eg = "e.g. " if len(paths) > _EXAMPLES else ""
        yield Row(
            "left out",
            f"{len(paths):,} of {count_text(whole, 'key')} {printable(reason, 500)}: {eg}{some}",
        )
    if len(reasons) > _TAGS:
        yield Row("left out", f"and {sum(map(len, list(reasons.values())[_TAGS:])):,} more")


_EXAMPLES = 2


def _by_reason(skipped: Iterable[Skipped]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for item in skipped:
        reasons.setdefault(item.reason, []).append(item.seen or item.path)
    return reasons


def plan_headline(plan: ConversionPlan) -> str:
    """The line that says what a plan would do."""
    size = "of a size that torch decides" if plan.target.is_folder else size_text(plan.nbytes)
    return f"would write {_output_text(plan, size)}, source {size_text(plan.source_nbytes)}"


_ROWS = 40


def keys_table(plan: ConversionPlan) -> Iterator[str]:
    """The keys that change, old → new, one line each (40 at most), and how many do not change.

    Nothing of a state dict whose keys all stay as they are: its row says so.
    """
    for item in plan.state_dicts:
        rows = [*item.changed, *((old, "(left out)") for old in item.left_out)]
        where = f" of {_place_text(item.path)}" if item.path else ""
        shown = [
            (printable(old), printable(new))
            for old, new in (rows if len(rows) <= _ROWS else rows[: _ROWS - 1])
        ]
        width = max((len(old) for old, _ in shown), default=0)
        if not rows:
            continue
        yield f"keys{where}:"
        yield from (f"  {old.ljust(width)}  → {new}" for old, new in shown)
        if len(rows) > len(shown):
            yield f"  … {len(rows) - len(shown):,} more (--json lists all)"
        if left := item.count - len(rows):
            yield f"{count_text(left, 'key')}{where} untouched"


_RATED_FROM = 10_000_000  # bytes; what is smaller is done before its rate means something
_WORTH_TELLING = 0.1  # seconds


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
    """How long it took, and what of it was spent on other things than writing.

    A rate where there was much to write.
    """
    times = {
        phase: seconds for phase, seconds in result.phases.items() if seconds >= _WORTH_TELLING
    }
    wrote, rate = times.pop("write", 0.0), ""
    if wrote and result.plan.nbytes >= _RATED_FROM:
        rate = f" at {size_text(result.plan.nbytes / wrote)}/s"
    others = [
        f"{seconds_text(times[phase])} {words}" for phase, words in _SPENT.items() if phase in times
    ]
    if not others:
        return f"written in {seconds_text(result.seconds)}{rate}"
    first = [f"{seconds_text(wrote)} writing{rate}"] if wrote else []
    return f"done in {seconds_text(result.seconds)}: {', '.join([*first, *others])}"


_SPENT: dict[Phase, str] = {"verify": "verifying", "sync": "waiting for the disk"}


def result_lines(result: ConversionResult) -> Iterator[Row]:
    """What a conversion changed and found, as rows."""
    yield from plan_lines(result.plan)
    for path, count in result.overflowed.items():
        yield Row(
            "warning",
            f"{printable(path)}: {count_text(count, 'finite value')} became infinite in the cast",
            "warning",
        )
    for path, count in result.odd_bools.items():
        yield Row(
            "warning",
            f"{printable(path)}: {count_text(count, 'bool')} neither 0 nor 1, kept as stored",
            "warning",
        )
    if result.verified is not None:
        casts = ", ".join(dict.fromkeys(after for _, after in result.plan.casts))
        after = f" after the cast to {casts}" if casts else ""
        read = f"{count_text(result.verified, 'tensor')} read back"
        if copied := result.plan.beside.copied:
            read = f"{count_text(result.verified, 'tensor')} and {len(copied)} files read back"
        yield Row("verified", f"{read}, equal to the source{after}; {_named_text(result)}")


def _named_text(result: ConversionResult) -> str:
    if result.named is None:
        kind = printable(result.plan.source_format)
        return (
            f"whether the reader saw everything in the source is not checked a second way ({kind})"
        )
    return f"nothing {'else ' if result.plan.skipped else ''}that the source names is missing"


def plan_document(plan: ConversionPlan) -> dict[str, Any]:
    """A plan as JSON values."""
    return {
        "source": {
            "path": str(plan.source),
            "format": plan.source_format,
            "bytes": plan.source_nbytes,
        },
        "output": {
            "path": str(plan.output),
            "format": plan.to,
            "bytes": None if plan.target.is_folder else plan.nbytes,
            **_shards_document(plan),
        },
        "state_dicts": [
            {
                "path": item.path,
                "wrappers": list(item.wrappers),
                "keys": item.count,
                "renamed": len(item.changed),
                "example": list(item.changed[0]) if item.changed else None,
            }
            for item in plan.state_dicts
        ],
        "locations": [
            {"before": before, "after": after, "storages": count}
            for (before, after), count in plan.locations.items()
        ],
        "casts": [
            {"before": before, "after": after, "tensors": count}
            for (before, after), count in plan.casts.items()
        ],
        "keys": _keys_document(plan),
        "tied": dict(plan.tied),
        "mapping": None if plan.mapping is None else str(plan.mapping.path),
        "files": [
            {"path": str(plan.folder / item.name), "bytes": item.nbytes}
            for item in plan.beside.copied
        ],
        "files_not_copied": [
            {"path": item.name, "reason": item.reason} for item in plan.beside.left
        ],
        "skipped": [{"path": item.path, "reason": item.reason} for item in plan.skipped],
        "rewritten": [
            {"path": item.path, "object": item.name, "how": item.how} for item in plan.rewritten
        ],
        "notes": list(plan.notes),
    }


def _shards_document(plan: ConversionPlan) -> dict[str, Any]:
    if plan.index is None:
        return {}
    shards = [{"path": str(file.path), "bytes": file.layout.nbytes} for file in plan.files]
    return {"index": str(plan.index.path), "shards": shards}


def _keys_document(plan: ConversionPlan) -> list[dict[str, Any]]:
    """What becomes of all keys, as JSON values."""
    return [
        {
            "path": item.path,
            "renamed": [list(pair) for pair in item.changed],
            "left_out": list(item.left_out),
            "filled": [list(pair) for pair in item.filled],
            "untouched": item.count - len(item.changed) - len(item.left_out),
        }
        for item in plan.state_dicts
    ]


def result_document(result: ConversionResult) -> dict[str, Any]:
    """A finished conversion as JSON values."""
    planned = plan_document(result.plan)
    return {
        **planned,
        "output": {**planned["output"], "bytes": result.nbytes},
        "seconds": round(result.seconds, 6),
        "phases": {phase: round(seconds, 6) for phase, seconds in result.phases.items()},
        "verified": result.verified,
        "named": result.named,
        "overflowed": dict(result.overflowed),
        "odd_bools": dict(result.odd_bools),
    }
