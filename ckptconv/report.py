"""Results as text for people and as JSON for pipelines; everything that came out of a file is escaped here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptconv.convert import ConversionResult
from ckptconv.devices import Gpu, Host
from ckptconv.errors import CheckpointError, KeyMismatch, printable
from ckptconv.findings import Diagnosis, Finding
from ckptconv.inspection import OPENED_BY_TORCH, Inspection, Part, is_bloated
from ckptconv.key_fitting import Fit
from ckptconv.planning import ConversionPlan
from ckptconv.settling import Skipped

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SHOWN = 5


def size_text(nbytes: float) -> str:
    """A size in decimal units, as disks and shard limits count.

    >>> size_text(0), size_text(1999), size_text(2_147_483_648)
    ('0 B', '2.0 kB', '2.1 GB')
    """
    unit = 0
    while nbytes >= 999.5 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1000, unit + 1
    return f"{nbytes:.0f} B" if unit == 0 else f"{nbytes:.1f} {_UNITS[unit]}"


def count_text(count: int, noun: str) -> str:
    """A count with its noun.

    >>> count_text(1, "tensor"), count_text(1200, "key"), count_text(2, "dict of 3")
    ('1 tensor', '1,200 keys', '2 dict of 3s')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# ---------------------------------------------------------------------------------------------------------- conversions


def plan_lines(plan: ConversionPlan) -> Iterator[tuple[str, str]]:
    """What a plan changes, as (label, text) lines."""
    for renamed in plan.state_dicts:
        yield "keys", _keys_text(plan, renamed)
        if renamed.shared and not plan.tied:
            verb = "shares" if renamed.shared == 1 else "share"
            then = ", as before" if plan.to == "torch" else "; each has its own copy now"
            yield "shared", f"{count_text(renamed.shared, 'key')} {verb} the storage of another{then}"
    for (before, after), count in plan.locations.items():
        change = f"{printable(before)} → {printable(after)}" if before != after else f"{printable(before)}, as before"
        yield "device", f"{change} ({count_text(count, 'storage')})"
    for (before, after), count in plan.casts.items():
        yield "dtype", f"{before} → {after} ({count_text(count, 'tensor')})"
    if plan.tied:
        name, kept = next(iter(plan.tied.items()))
        yield "tied", f"{count_text(len(plan.tied), 'name')} kept as alias: {printable(name)} = {printable(kept)}"
    for reason, paths in _by_reason(plan.skipped).items():
        yield "skipped", f"{_some(paths)}: {printable(reason)}"
    if plan.rewritten:
        yield "rewritten", _some([f"{item.path} ({item.name})" for item in plan.rewritten]) + " in plain form"
    if plan.mapping is not None:
        yield "mapping", f"{printable(plan.mapping.path)}; --rules {printable(plan.mapping.path)} --reverse undoes it"
    for note in plan.notes:
        yield "note", printable(note)


def _keys_text(plan: ConversionPlan, renamed: Any) -> str:
    where = f" in {printable(renamed.path)}" if renamed.path and plan.to != "safetensors" else ""
    if not renamed.changed:
        return f"{count_text(renamed.count, 'key')}{where}, none renamed"
    old, new = renamed.changed[0]
    return (
        f"{len(renamed.changed):,} of {count_text(renamed.count, 'key')}{where} renamed, "
        f"e.g. {printable(old)} → {printable(new)}"
    )


def _by_reason(skipped: tuple[Skipped, ...]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for item in skipped:
        reasons.setdefault(item.reason, []).append(item.path)
    return reasons


def _some(names: list[str]) -> str:
    shown = ", ".join(printable(name) or "the root" for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else shown


def plan_headline(plan: ConversionPlan) -> str:
    """The line that says what a plan would do."""
    return f"would write {printable(plan.output)}: {plan.to}, {size_text(plan.nbytes)} (source {size_text(plan.source_nbytes)})"


_ROWS = 40


def keys_table(plan: ConversionPlan) -> Iterator[str]:
    """The keys that change, old → new, one line each, and how many do not; of more than 40 the rest is counted."""
    for item in plan.state_dicts:
        rows = [*item.changed, *((old, "(left out)") for old in item.left_out)]
        where = f" of {printable(item.path)}" if item.path else ""
        shown = [(printable(old), printable(new)) for old, new in (rows if len(rows) <= _ROWS else rows[: _ROWS - 1])]
        width = max((len(old) for old, _ in shown), default=0)
        if rows:
            yield f"keys{where}:"
        yield from (f"  {old.ljust(width)}  → {new}" for old, new in shown)
        if len(rows) > len(shown):
            yield f"  … {len(rows) - len(shown):,} more (--json lists all)"
        yield f"{count_text(item.count - len(rows), 'key')}{where} untouched"


def result_headline(result: ConversionResult) -> str:
    """The line that says what was done."""
    plan = result.plan
    rate = f", {size_text(plan.nbytes / result.seconds)}/s" if result.seconds > 0.05 else ""
    return (
        f"{printable(plan.source)} ({plan.source_format}, {size_text(plan.source_nbytes)}) → "
        f"{printable(plan.output)} ({plan.to}, {size_text(plan.nbytes)}), written in {result.seconds:.2f} s{rate}"
    )


def result_lines(result: ConversionResult) -> Iterator[tuple[str, str]]:
    """What a conversion changed and found, as (label, text) lines."""
    yield from plan_lines(result.plan)
    for path, count in result.overflowed.items():
        yield "warning", f"{printable(path)}: {count_text(count, 'finite value')} became infinite in the cast"
    for path, count in result.odd_bools.items():
        yield "warning", f"{printable(path)}: {count_text(count, 'bool')} neither 0 nor 1, kept as stored"
    if result.verified is not None:
        yield "verified", f"{count_text(result.verified, 'tensor')} read back, equal to the source"


def plan_document(plan: ConversionPlan) -> dict[str, Any]:
    """A plan as JSON values."""
    return {
        "source": {"path": str(plan.source), "format": plan.source_format, "bytes": plan.source_nbytes},
        "output": {"path": str(plan.output), "format": plan.to, "bytes": plan.nbytes},
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
            {"before": before, "after": after, "storages": count} for (before, after), count in plan.locations.items()
        ],
        "casts": [{"before": before, "after": after, "tensors": count} for (before, after), count in plan.casts.items()],
        "keys": _keys_document(plan),
        "tied": dict(plan.tied),
        "mapping": None if plan.mapping is None else str(plan.mapping.path),
        "skipped": [{"path": item.path, "reason": item.reason} for item in plan.skipped],
        "rewritten": [{"path": item.path, "object": item.name} for item in plan.rewritten],
        "notes": list(plan.notes),
    }


def _keys_document(plan: ConversionPlan) -> list[dict[str, Any]]:
    """What becomes of all keys, as JSON values."""
    return [
        {
            "path": item.path,
            "renamed": [list(pair) for pair in item.changed],
            "left_out": list(item.left_out),
            "untouched": item.count - len(item.changed) - len(item.left_out),
        }
        for item in plan.state_dicts
    ]


def result_document(result: ConversionResult) -> dict[str, Any]:
    """A finished conversion as JSON values."""
    return {
        **plan_document(result.plan),
        "seconds": round(result.seconds, 6),
        "verified": result.verified,
        "overflowed": dict(result.overflowed),
        "odd_bools": dict(result.odd_bools),
    }


def error_document(error: CheckpointError) -> dict[str, Any]:
    """An error as JSON values."""
    return {
        "error": {
            "kind": type(error).__name__,
            "message": str(error),
            "path": error.path,
            "where": error.where,
            "what": error.what,
            "hint": error.hint,
        },
        **({"fit": fit_document(error.fit)} if isinstance(error, KeyMismatch) and isinstance(error.fit, Fit) else {}),
    }


def fit_document(fit: Fit) -> dict[str, Any]:
    """What became of each key of a fit, as JSON values."""
    return {
        "how": fit.how,
        "fits": fit.fits,
        "covers": fit.covers,
        "renames": dict(fit.renames),
        "missing": list(fit.missing),
        "unexpected": list(fit.unexpected),
        "mismatched": [
            {"key": item.key, "source_key": item.source_key, "source": item.source, "target": item.target}
            for item in fit.mismatched
        ],
        "ambiguous": {item.key: list(item.source_keys) for item in fit.ambiguous},
        "nearest": {item.key: list(item.source_keys) for item in fit.nearest},
    }


# ----------------------------------------------------------------------------------------------------------- inspection


def inspection_lines(found: Inspection) -> Iterator[tuple[str, str]]:
    """The facts about a checkpoint above its tree, as (label, text) lines."""
    yield "format", f"{found.format}, {size_text(found.nbytes)}, {count_text(found.tensors, 'tensor')}"
    if found.producer:
        yield "written by", printable(found.producer)
    yield "saved on", _counts(found.locations, "storage") or "no device: it holds no tensors"
    if found.dtypes:
        yield "dtypes", _counts(found.dtypes, "tensor")
    for path, wrappers in found.state_dicts.items():
        text = f"carry the wrapper {'.'.join(wrappers)}." if wrappers else "are bare, without a wrapper"
        yield "keys", f"those of {printable(path)} {text}" if path else text
        if prefix := found.offered.get(path):
            yield "prefix", f"all of them start with {prefix}; --strip-prefix {prefix} takes it off"
    if is_bloated(found):
        used, stored = size_text(found.used), size_text(found.stored)
        yield "bloat", f"tensors use {used} of storages of {stored}; converting drops the rest"
    for odd in found.odd_objects[:_SHOWN]:
        plain = "has a plain form" if odd.has_plain_form else "has no plain form"
        yield "object", f"{printable(odd.path) or 'the root'}: {printable(odd.name)}, refused by weights_only=True; {plain}"
    if len(found.odd_objects) > _SHOWN:
        yield "object", f"and {len(found.odd_objects) - _SHOWN:,} more"
    for name, value in list(found.metadata.items())[:_SHOWN]:
        yield "metadata", f"{printable(name)} = {printable(value, 80)}"
    for note in found.notes:
        yield "note", printable(note)


def _counts(counted: Any, noun: str) -> str:
    ordered = sorted(counted.items(), key=lambda item: -item[1])
    return ", ".join(f"{printable(name)} ({count_text(count, noun)})" for name, count in ordered)


def tree_lines(part: Part, limit: int = 40) -> Iterator[str]:
    """The parts as a tree, one line each; of more than `limit` siblings the middle is left out."""
    yield from _branches(part.parts, "", limit)


def _branches(parts: tuple[Part, ...], indent: str, limit: int) -> Iterator[str]:
    shown = list(parts) if len(parts) <= limit else [*parts[: limit - 2], None, parts[-1]]
    width = max((len(printable(part.name)) for part in shown if part), default=0)
    for index, part in enumerate(shown):
        last = index == len(shown) - 1
        stem = f"{indent}{'└─' if last else '├─'} "
        if part is None:
            yield f"{stem}… {len(parts) - limit + 1:,} more"
            continue
        name = printable(part.name).ljust(min(width, 40))
        yield f"{stem}{name}  {_part_text(part)}"
        yield from _branches(part.parts, indent + ("   " if last else "│  "), limit)


def _part_text(part: Part) -> str:
    size = f"{size_text(part.nbytes) if part.tensors else '':>9}"
    count = count_text(part.tensors, "tensor")
    if part.kind == "module":
        return f"{size}  {count}"
    one = part.tensors == 1 and not part.parts
    return f"{size}  {printable(part.kind)}" + (f", {count}" if part.tensors and not one else "")


def verdict(found: Inspection) -> tuple[bool, str]:
    """Whether plain `torch.load` and `load_state_dict` will do on a CPU-only host, in one line with the remedy."""
    reasons = []
    elsewhere = [name for name in found.locations if name != "cpu"]
    if elsewhere:
        reasons.append(f"needs {', '.join(map(printable, elsewhere))}")
    if found.odd_objects:
        reasons.append("holds objects that weights_only=True refuses")
    if found.format not in OPENED_BY_TORCH:
        reasons.append(f"is a {found.format}, which torch.load(weights_only=True) does not read")
    if any(found.state_dicts.values()):
        reasons.append("its keys carry a wrapper")
    if not reasons:
        return True, "opens anywhere as it is"
    hopeless = any(not odd.has_plain_form for odd in found.odd_objects)
    command = f"ckptconv convert {_quoted(found.path)} OUT.pt" + (" --unknown drop" if hopeless else "")
    return False, f"will not open everywhere: {'; '.join(reasons)}. Mend it: {command}"


def _quoted(path: str) -> str:
    from shlex import quote

    return quote(printable(path))


def inspection_document(found: Inspection) -> dict[str, Any]:
    """The facts about a checkpoint as JSON values."""
    portable, text = verdict(found)
    return {
        "path": found.path,
        "format": found.format,
        "bytes": found.nbytes,
        "tensors": found.tensors,
        "stored_bytes": found.stored,
        "used_bytes": found.used,
        "locations": dict(found.locations),
        "dtypes": dict(found.dtypes),
        "state_dicts": [{"path": path, "wrappers": list(names)} for path, names in found.state_dicts.items()],
        "producer": found.producer,
        "offered_prefixes": dict(found.offered),
        "odd_objects": [{"path": odd.path, "object": odd.name, "plain_form": odd.has_plain_form} for odd in found.odd_objects],
        "metadata": dict(found.metadata),
        "notes": list(found.notes),
        "parts": [_part_document(part) for part in found.root.parts],
        "portable": portable,
        "verdict": text,
    }


def _part_document(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "kind": part.kind,
        "tensors": part.tensors,
        "bytes": part.nbytes,
        "parts": [_part_document(inner) for inner in part.parts],
    }


# ------------------------------------------------------------------------------------------------------------ diagnosis


def diagnosis_headline(found: Diagnosis) -> str:
    """Whether a checkpoint loads here, in one line."""
    counts = {word: sum(finding.severity == word for finding in found.findings) for word in ("error", "warning")}
    if found.loads:
        return "loads here" + (f", with {count_text(counts['warning'], 'warning')}" if counts["warning"] else "")
    return f"will not load here: {count_text(counts['error'], 'error')}"


def finding_lines(finding: Finding) -> Iterator[tuple[str, str]]:
    """What one finding says, as (label, text) lines; the first label is its severity."""
    yield finding.severity, f"{finding.code}: {printable(finding.cause, 2000)}"
    yield "effect", printable(finding.effect, 2000)
    if finding.command:
        yield "mend", printable(finding.command, 20_000)
    elif finding.advice:
        yield "advice", printable(finding.advice, 2000)


def diagnosis_document(found: Diagnosis) -> dict[str, Any]:
    """A diagnosis as JSON values."""
    return {
        "path": found.path,
        "format": found.format,
        "loads": found.loads,
        "findings": [
            {
                "severity": finding.severity,
                "code": finding.code,
                "cause": finding.cause,
                "effect": finding.effect,
                "command": finding.command,
                "advice": finding.advice,
            }
            for finding in found.findings
        ],
    }


# -------------------------------------------------------------------------------------------------------------- devices


def host_lines(host: Host) -> Iterator[tuple[str, str]]:
    """What a host has, as (label, text) lines."""
    for gpu in host.gpus:
        yield _gpu_name(gpu), _gpu_text(gpu)
    if host.mps:
        yield "mps", "Apple GPU"
    for index in range(host.xpu):
        yield f"xpu:{index}", "Intel GPU"
    yield "cpu", "always here"
    shown = "not set: every GPU is visible" if host.visible is None else repr(host.visible)
    yield "CUDA_VISIBLE_DEVICES", shown
    yield "torch", f"{host.torch}, sees {count_text(host.cuda, 'CUDA device')}" if host.torch else "not installed here"
    for note in host.notes:
        yield "note", printable(note)


def _gpu_name(gpu: Gpu) -> str:
    return "hidden" if gpu.logical is None else f"cuda:{gpu.logical}"


def _gpu_text(gpu: Gpu) -> str:
    parts = [printable(gpu.name)]
    if gpu.physical is not None:
        parts.append(f"physical {gpu.physical}")
    if gpu.free is not None and gpu.total is not None:
        parts.append(f"{size_text(gpu.free)} free of {size_text(gpu.total)}")
    return ", ".join(parts)


def host_document(host: Host, best: str) -> dict[str, Any]:
    """What a host has as JSON values; `best` is what `--device auto` would choose."""
    return {
        "gpus": [
            {
                "device": None if gpu.logical is None else f"cuda:{gpu.logical}",
                "physical": gpu.physical,
                "name": gpu.name,
                "uuid": gpu.uuid,
                "total_bytes": gpu.total,
                "free_bytes": gpu.free,
            }
            for gpu in host.gpus
        ],
        "cuda_visible_devices": host.visible,
        "torch": host.torch,
        "cuda_devices": host.cuda,
        "mps": host.mps,
        "xpu_devices": host.xpu,
        "auto": best,
        "notes": list(host.notes),
    }
