"""The facts about a checkpoint as text and JSON, and several in one table that fits a terminal of
any width; all that came out of a file is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptconv.inspect.facts import Surveyed, Unread, is_bloated, tree_of
from ckptconv.inspect.inspection import Inspection, Part, Quantized
from ckptconv.io.places import path_of
from ckptconv.support.errors import CheckpointError, printable
from ckptconv.support.report import (
    LISTED,
    Fields,
    Level,
    Row,
    error_document,
    html_table,
    listed,
    note_rows,
)
from ckptconv.support.table import Table, wrapped
from ckptconv.support.text import (
    SHOWN,
    count_text,
    of_part,
    part_text,
    quoted,
    size_text,
    some_text,
)
from ckptconv.tree.labels import LORA_OF_PEFT

if TYPE_CHECKING:
    from ckptconv.convert.fixes import Prescription
    from ckptconv.tree.checkpoint import Checkpoint


def inspection_lines(found: Inspection) -> Iterator[Row]:
    """The facts about a checkpoint above its tree, as rows."""
    tensors = count_text(found.tensors, "tensor")
    yield Row("format", f"{found.format}, {size_text(found.nbytes)}, {tensors}")
    if found.opening.is_delta:
        yield from note_rows(found.notes)
        yield from _metadata_lines(found)
        return
    if found.producer:
        yield Row("written by", printable(found.producer))
    yield Row("saved on", _counts(found.locations, "storage") or "no device: it holds no tensors")
    if found.dtypes:
        yield Row("dtypes", _counts(found.dtypes, "tensor"))
    for item in found.quantized[:LISTED]:
        yield Row("quantised", _quantized_text(item))
    for path, count in list(found.parameters.items())[:LISTED]:
        keys = f"{count_text(found.keys[path], 'key')}{of_part(path)}"
        yield Row("parameters", f"{count:,} in {keys}")
    yield from _key_lines(found)
    if is_bloated(found):
        yield _bloat_line(found)
    yield from _object_lines(found)
    yield from _metadata_lines(found)
    yield from note_rows(found.notes)


def _metadata_lines(found: Inspection) -> Iterator[Row]:
    for name, value in list(found.metadata.items())[:SHOWN]:
        yield Row("metadata", f"{printable(name)} = {printable(value, 80)}")


def _quantized_text(item: Quantized) -> str:
    if item.scheme is None:
        return f"in a way that --dequantize cannot read: {printable(item.problem)}"
    sizes = f"{size_text(item.stored)} → {size_text(item.values)} as {item.dtype}"
    return f"{printable(item.scheme)}: {count_text(item.weights, 'weight')}, {sizes}"


def _key_lines(found: Inspection) -> Iterator[Row]:
    if found.training_state:
        yield Row("keys", f"none: it holds only {found.training_state} state, no weights")
    if found.root.sort == "tensor":
        yield Row("keys", "none: a bare tensor, not a state dict")
    for path, wrappers in list(found.state_dicts.items())[:LISTED]:
        text = "are bare, without a wrapper"
        if wrappers:
            text = f"carry the wrapper '{printable('.'.join(wrappers))}.'"
        if path:
            text = f"those of {part_text(path)} {text}"
        yield Row("keys", text)
        prefix = found.offered.get(path)
        if prefix and found.producer != LORA_OF_PEFT:
            removed = f"--strip-prefix {quoted(prefix)} removes it"
            yield Row("prefix", f"all of them start with {printable(prefix)}; {removed}")
    if len(found.state_dicts) > LISTED:
        yield Row("keys", f"and those of {len(found.state_dicts) - LISTED:,} more")


def _bloat_line(found: Inspection) -> Row:
    used, stored = size_text(found.used), size_text(found.stored)
    dead = ""
    if found.dead:
        dead = f", and the pickle does not refer to {size_text(found.dead)} of the file"
    text = f"tensors use {used} of {stored} of storages{dead}; converting drops the rest"
    return Row("bloat", text)


def _object_lines(found: Inspection) -> Iterator[Row]:
    objects = [
        f"{printable(odd.path) or 'the root'}: {printable(odd.name)}, refused by "
        f"weights_only=True; has {'a' if odd.has_plain_form else 'no'} plain form"
        for odd in found.odd_objects
    ]
    yield from listed("object", objects, most=SHOWN)


def _counts(counted: Any, noun: str) -> str:
    ordered = sorted(counted.items(), key=lambda item: -item[1])
    shown = ", ".join(
        f"{printable(name)} ({count_text(count, noun)})" for name, count in ordered[:LISTED]
    )
    if len(ordered) > LISTED:
        shown += f" and {len(ordered) - LISTED:,} more"
    return shown


def tree_lines(part: Part, width: int, limit: int = 40) -> Iterator[Row]:
    """The parts as a tree in lines of at most `width` columns, as rows without labels; numbered
    siblings that are alike are one line, and of more than `limit` lines the middle is left out.
    """
    branches = Table(
        ("name", "size", "what"), [*_branches(part.parts, "", limit)], ("name", "what")
    )
    return branches.lines(width, has_head=False)


def tree_html(checkpoint: Checkpoint) -> str:
    """The tree of an open checkpoint as an HTML table; its files are not looked at."""
    title = f"{checkpoint.path}: {checkpoint.format}, {size_text(checkpoint.nbytes)}"
    rows = [*_branches(tree_of(checkpoint).parts, "", LISTED)]
    notes = [("note", printable(note, 200)) for note in checkpoint.notes]
    return html_table(title, [*rows, *notes], most=_TREE_LINES, cells=_TREE_CELLS)


_TREE_LINES = 100  # in a notebook
_TREE_CELLS = ' style="text-align: left; white-space: pre"'


def _branches(parts: tuple[Part, ...], indent: str, limit: int) -> Iterator[tuple[str, ...]]:
    shown = _alike(parts)
    hidden = shown[limit - 2 : -1] if len(shown) > limit else []
    if hidden:
        shown[limit - 2 : -1] = [[]]
    for at, run in enumerate(shown, 1):
        branch, below = "├─ ", "│  "
        if at == len(shown):
            branch, below = "└─ ", "   "
        if not run:
            yield (f"{indent}{branch}… {sum(map(len, hidden)):,} more",)
            continue
        part, name, what = run[0], printable(run[0].name), _part_text(run[0])
        if len(run) > 1:
            # what is in them is not shown to the end, and may have other names and shapes
            like = f"of {size_text(part.nbytes)}" if part.tensors else "alike"
            name, what = f"{name} … {printable(run[-1].name)}", f"{len(run):,} {like}, each {what}"
        size = size_text(len(run) * part.nbytes) if part.tensors else ""
        yield indent + branch + name, size, what
        yield from _branches(part.parts, indent + below, limit)


_WHAT = attrgetter(*[name for name in Part.__match_args__ if name != "name"])


def _alike(parts: tuple[Part, ...]) -> list[list[Part]]:
    """Runs of numbered parts that are alike but for their names, as far as they are shown, such as
    the layers of a model; any other part is one alone.
    """
    alike = groupby(parts, lambda part: _WHAT(part) if part.name.isdecimal() else id(part))
    return [list(run) for _, run in alike]


def _part_text(part: Part) -> str:
    count = count_text(part.tensors, "tensor")
    if part.kind == "module":
        return count
    if not part.tensors or (part.tensors == 1 and not part.parts):
        return printable(part.kind)
    return f"{printable(part.kind)}, {count}"


_Fix: TypeAlias = "Prescription | CheckpointError | None"
"""The conversion that makes a checkpoint portable, where one was looked for, or why none does."""


def verdict(found: Inspection, fix: _Fix = None) -> tuple[bool, str]:
    """Whether its own library opens it on any host, and a bare model takes its keys, in a line."""
    said, command = verdict_and_command(found, fix)
    if command:
        said = f"{said}. Fix: {command}"
    return found.portable, said


def verdict_and_command(found: Inspection, fix: _Fix) -> tuple[str, str]:
    """The verdict in words, and the command that makes the checkpoint portable (empty: none)."""
    reasons = "; ".join(reason.what for reason in found.reasons)
    if not reasons:
        return f"opens anywhere as it is ({found.opening.by})", ""
    said = f"will not open everywhere: {reasons}"
    if fix is None:
        return said, ""
    if isinstance(fix, CheckpointError):
        return f"{said}. No conversion fixes it: {fix}", ""
    from ckptconv.convert.fixes import command

    if fix.lost:
        said += f". The fix leaves out {some_text(list(fix.lost))}"
    files = [path_of(path) for path in found.named or (found.path,)]
    # long: a command that is cut cannot be pasted
    return said, printable(command(fix.fix, files, Path("OUT.pt")), 20_000)


# ------------------------------------------------------------------------- several checkpoints

_HEAD = ("name", "format", "size", "tensors", "dtypes", "devices", "portable")
_TEXTS = ("name", "format", "dtypes", "devices", "portable")
_LEAVING = ("dtypes", "format", "tensors", "devices")
_NAMED = 3  # dtypes and devices that are named; the rest is counted


def is_portable(item: Surveyed | Unread) -> bool:
    """Whether it could be opened, and its own library opens it on any host."""
    return isinstance(item, Surveyed) and item.found.portable


def survey_lines(items: Sequence[Surveyed | Unread], width: int) -> Iterator[Row]:
    """A table of checkpoints in lines of at most `width` columns, as rows without labels; below
    each what is to be said of it.
    """
    table = Table(_HEAD, [*map(_cells_of, items)], _TEXTS, _LEAVING)
    yield from table.lines(width, has_cuts=False, below=lambda at: _below(items[at], width))
    portable = sum(map(is_portable, items))
    level: Level = "good" if portable == len(items) else "warning"
    yield Row("", f"{portable} of {len(items)} portable", level)


def _cells_of(item: Surveyed | Unread) -> tuple[str, ...]:
    name = ", ".join(printable(path) for path in item.paths)
    if isinstance(item, Unread):
        return (name, *("-" for _ in _HEAD[1:]))
    found, portable = item.found, "yes" if is_portable(item) else "no"
    facts = (found.format, size_text(found.nbytes), f"{found.tensors:,}")
    return (name, *facts, _some(found.dtypes), _some(found.locations), portable)


def _some(counted: Mapping[str, int]) -> str:
    names = sorted(counted, key=lambda name: -counted[name])
    shown = ", ".join(printable(name, 30) for name in names[:_NAMED]) or "-"
    if len(names) > _NAMED:
        shown += f" +{len(names) - _NAMED}"
    return shown


def _below(item: Surveyed | Unread, width: int) -> Iterator[Row]:
    """Why it is not portable, who opens it if that is not usual, or why it could not be opened."""
    level: Level = "good"
    if isinstance(item, Unread):
        error, level = item.error, "error"
        where = f"{printable(error.where)}: " if error.where else ""
        hint = f"; {printable(error.hint, 2000)}" if error.hint else ""
        text = f"error: {where}{printable(error.what, 2000)}{hint}"
    elif reasons := item.found.reasons:
        text = f"not portable: {'; '.join(reason.what for reason in reasons)}"
        level = "warning"
    elif item.found.opening.is_usual:
        return
    else:
        text = f"portable ({item.found.opening.by})"
    yield from (Row("", line, level) for line in wrapped(text, width, "  "))


# ------------------------------------------------------------------------------------------- JSON

_PART: Fields = Fields(
    "name kind=sort length value shared dtype=tensor shape=tensor device=tensor tensors "
    "bytes=nbytes parts",
    dtype=lambda tensor: tensor and tensor.dtype,
    shape=lambda tensor: tensor and list(tensor.shape),
    device=lambda tensor: tensor and tensor.device,
    parts=lambda parts: _PART.of_all(parts),
)
_INSPECTION = Fields(
    "path format bytes=nbytes tensors stored_bytes=stored dead_bytes=dead used_bytes=used "
    "locations dtypes quantized state_dicts=weights producer offered_prefixes=offered "
    "odd_objects metadata notes parts=root.parts portable reasons opened_by=opening.by",
    state_dicts=lambda weights: [
        {
            "path": path,
            "wrappers": list(names),
            "keys": weights.keys[path],
            "parameters": weights.parameters[path],
        }
        for path, names in weights.state_dicts.items()
    ],
    odd_objects=Fields("path object=name plain_form=has_plain_form"),
    quantized=Fields("scheme weights stored_bytes=stored value_bytes=values dtype problem"),
    parts=_PART,
    reasons=Fields("code what"),
)


def inspection_document(
    found: Inspection, fix: Prescription | CheckpointError | None = None
) -> dict[str, Any]:
    """The facts about a checkpoint as JSON values."""
    return {**_INSPECTION.of(found), "verdict": verdict(found, fix)[1]}


def survey_document(items: Sequence[Surveyed | Unread]) -> dict[str, Any]:
    """Several checkpoints as JSON values, errors as items among them."""
    told = []
    for item in items:
        if isinstance(item, Unread):
            told.append({"path": str(item.paths[0]), **error_document(item.error, 1)})
        else:
            told.append(inspection_document(item.found, item.fix))
    return {"checkpoints": told}
