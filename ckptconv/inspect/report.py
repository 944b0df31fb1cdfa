"""The facts about a checkpoint as text and JSON; all that came out of a file is escaped here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptconv.inspect.facts import is_bloated
from ckptconv.inspect.inspection import Inspection, Part
from ckptconv.io.places import path_of
from ckptconv.support.errors import CheckpointError, printable
from ckptconv.support.rows import Row
from ckptconv.support.text import SHOWN, count_text, part_text, quoted, size_text, some_text

if TYPE_CHECKING:
    from ckptconv.convert.prescriptions import Prescription


def inspection_lines(found: Inspection) -> Iterator[Row]:
    """The facts about a checkpoint above its tree, as rows."""
    yield Row(
        "format",
        f"{found.format}, {size_text(found.nbytes)}, {count_text(found.tensors, 'tensor')}",
    )
    if found.producer:
        yield Row("written by", printable(found.producer))
    yield Row("saved on", _counts(found.locations, "storage") or "no device: it holds no tensors")
    if found.dtypes:
        yield Row("dtypes", _counts(found.dtypes, "tensor"))
    yield from _key_lines(found)
    if is_bloated(found):
        yield _bloat_line(found)
    yield from _object_lines(found)
    for name, value in list(found.metadata.items())[:SHOWN]:
        yield Row("metadata", f"{printable(name)} = {printable(value, 80)}")
    for note in found.notes:
        yield Row("note", printable(note), "warning")


def _key_lines(found: Inspection) -> Iterator[Row]:
    if found.training_state:
        yield Row("keys", f"none: it holds only {found.training_state} state, no weights")
    if found.root.sort == "tensor":
        yield Row("keys", "none: a bare tensor, not a state dict")
    for path, wrappers in list(found.state_dicts.items())[:_COUNTED]:
        text = (
            f"carry the wrapper '{printable('.'.join(wrappers))}.'"
            if wrappers
            else "are bare, without a wrapper"
        )
        yield Row("keys", f"those of {part_text(path)} {text}" if path else text)
        if prefix := found.offered.get(path):
            yield Row(
                "prefix",
                f"all of them start with {printable(prefix)}; --strip-prefix {quoted(prefix)} "
                "removes it",
            )
    if len(found.state_dicts) > _COUNTED:
        yield Row("keys", f"and those of {len(found.state_dicts) - _COUNTED:,} more")


def _bloat_line(found: Inspection) -> Row:
    used, stored = size_text(found.used), size_text(found.stored)
    dead = (
        f", and the pickle does not refer to {size_text(found.dead)} of the file"
        if found.dead
        else ""
    )
    return Row(
        "bloat", f"tensors use {used} of {stored} of storages{dead}; converting drops the rest"
    )


def _object_lines(found: Inspection) -> Iterator[Row]:
    for odd in found.odd_objects[:SHOWN]:
        plain = "has a plain form" if odd.has_plain_form else "has no plain form"
        yield Row(
            "object",
            f"{printable(odd.path) or 'the root'}: {printable(odd.name)}, refused by "
            f"weights_only=True; {plain}",
        )
    if len(found.odd_objects) > SHOWN:
        yield Row("object", f"and {len(found.odd_objects) - SHOWN:,} more")


def _counts(counted: Any, noun: str) -> str:
    ordered = sorted(counted.items(), key=lambda item: -item[1])
    shown = ", ".join(
        f"{printable(name)} ({count_text(count, noun)})" for name, count in ordered[:_COUNTED]
    )
    return f"{shown} and {len(ordered) - _COUNTED:,} more" if len(ordered) > _COUNTED else shown


_COUNTED = 20  # devices, dtypes and state dicts that are listed; --json lists all


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


def verdict(
    found: Inspection, fix: Prescription | CheckpointError | None = None
) -> tuple[bool, str]:
    """Whether the checkpoint's own library opens it on any host, and a bare model takes its keys,
    in one line.

    `fix` is the conversion that makes it so, where one was looked for, or why none does.
    """
    reasons = [reason.what for reason in found.reasons]
    if not reasons:
        return True, f"opens anywhere as it is ({found.opening.by})"
    return False, f"will not open everywhere: {'; '.join(reasons)}{_fix_text(found, fix)}"


def _fix_text(found: Inspection, fix: Prescription | CheckpointError | None) -> str:
    if fix is None:
        return ""
    if isinstance(fix, CheckpointError):
        return f". No conversion fixes it: {fix}"
    from ckptconv.convert.prescriptions import command

    lost = f". The fix leaves out {some_text(list(fix.lost))}" if fix.lost else ""
    files = [path_of(path) for path in found.named or (found.path,)]
    return f"{lost}. Fix: {printable(command(fix.fix, files, Path('OUT.pt')), 20_000)}"


def inspection_document(
    found: Inspection, fix: Prescription | CheckpointError | None = None
) -> dict[str, Any]:
    """The facts about a checkpoint as JSON values."""
    portable, text = verdict(found, fix)
    return {
        "path": found.path,
        "format": found.format,
        "bytes": found.nbytes,
        "tensors": found.tensors,
        "stored_bytes": found.stored,
        "dead_bytes": found.dead,
        "used_bytes": found.used,
        "locations": dict(found.locations),
        "dtypes": dict(found.dtypes),
        "state_dicts": [
            {"path": path, "wrappers": list(names)} for path, names in found.state_dicts.items()
        ],
        "producer": found.producer,
        "offered_prefixes": dict(found.offered),
        "odd_objects": [
            {"path": odd.path, "object": odd.name, "plain_form": odd.has_plain_form}
            for odd in found.odd_objects
        ],
        "metadata": dict(found.metadata),
        "notes": list(found.notes),
        "parts": [_part_document(part) for part in found.root.parts],
        "portable": portable,
        "reasons": [{"code": reason.code, "what": reason.what} for reason in found.reasons],
        "opened_by": found.opening.by,
        "verdict": text,
    }


def _part_document(part: Part) -> dict[str, Any]:
    tensor = part.tensor
    return {
        "name": part.name,
        "kind": part.sort,
        "length": part.length,
        "value": part.value,
        "shared": part.shared,
        "dtype": None if tensor is None else tensor.dtype,
        "shape": None if tensor is None else list(tensor.shape),
        "device": None if tensor is None else tensor.device,
        "tensors": part.tensors,
        "bytes": part.nbytes,
        "parts": [_part_document(inner) for inner in part.parts],
    }
