"""What an edit is asked to make of the header of a safetensors file (other names, other strings),
the header that it becomes, and what is told of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptconv.formats.safetensors import RESERVED, aliases_in
from ckptconv.keys.key_map import KEEP, KeyRules, map_keys, refuse_idle
from ckptconv.keys.naming_metadata import followed
from ckptconv.objects.encodings import ENCODINGS
from ckptconv.support.errors import KeyConflict, OptionRefused, RefusedObject, printable
from ckptconv.support.records import dataclass
from ckptconv.support.report import Fields, Row, listed, short_repr
from ckptconv.support.text import count_text, seconds_text, size_text, some_text
from ckptconv.tree.made_by_rules import flat_parts, makes_tensors


@dataclass(frozen=True, slots=True)
class HeaderEdit:
    """What an edit is asked to do: `rules` for the names of tensors, (name, value) pairs of
    `metadata` to set, names of it to `remove`.
    """

    rules: KeyRules = KEEP
    metadata: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChangedHeader:
    """The new header, and what is new in it: `names` has the new name of each old one, second names
    of tensors too; `metadata` the entries that were set, `removed` those that are gone.
    """

    header: Mapping[str, Any]
    names: Mapping[str, str]
    metadata: tuple[tuple[str, str], ...]
    removed: tuple[str, ...]

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """The (old, new) pairs that differ."""
        return tuple((old, new) for old, new in self.names.items() if old != new)

    @property
    def is_change(self) -> bool:
        """Whether anything differs."""
        return bool(self.renamed or self.metadata or self.removed)


def changed_header(header: Mapping[str, Any], asked: HeaderEdit) -> ChangedHeader:
    """The header after the edit; its entries are valid (`open_safetensors`).

    Raises `KeyConflict` where two names become one, or a string would read as a second name of a
    tensor; `OptionRefused` for what an edit does not do.
    """
    before: dict[str, str] = header.get(RESERVED) or {}
    tensors = [name for name in header if name != RESERVED]
    aliases = aliases_in(before, tensors)
    # second names too: whoever reads the file meets them as names like the others
    names = _renamed([*tensors, *aliases], asked.rules)
    if ENCODINGS in before and any(old != new for old, new in names.items()):
        what = "its metadata says by their names how tensors are put together"
        hint = "rename them with: ckptconv convert IN OUT"
        raise RefusedObject(what, where=ENCODINGS, hint=hint)
    renamed: dict[str, str] = {}
    for name, value in followed(before, names).items():
        new, text = (names[name], names[value]) if name in aliases else (name, value)
        if new in renamed:
            raise KeyConflict("a metadata entry has this name already", where=new)
        renamed[new] = text
    wanted = {names[alias]: names[kept] for alias, kept in aliases.items()}
    after = _with_strings(renamed, asked, wanted)
    new_tensors = {names[name]: header[name] for name in tensors}
    found = aliases_in(after, new_tensors)
    # whatever names and strings are now, a reader has to find the same second names in them
    if found != wanted:
        odd = next(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
        reads = "as a second name of that tensor" if odd in found else "as a text, not as a tensor"
        entry = f"{printable(odd)} = {printable(after.get(odd, ''))}"
        raise KeyConflict(
            f"the metadata entry {entry} would read {reads}",
            where=odd,
            hint="choose other names, or write each name with: ckptconv convert IN OUT "
            "--tied duplicate",
        )
    if after:
        # first, as the safetensors library writes it
        new_tensors = {RESERVED: after, **new_tensors}
    return ChangedHeader(
        new_tensors,
        names,
        tuple((name, value) for name, value in asked.metadata if renamed.get(name) != value),
        tuple(name for name in asked.remove if name in renamed),
    )


def _renamed(names: list[str], rules: KeyRules) -> dict[str, str]:
    if any(makes_tensors(part) for rule in rules.rules for part in flat_parts(rule)):
        raise OptionRefused(
            "an edit changes names, and these rules make other tensors",
            hint="apply them with: ckptconv convert IN OUT",
        )
    keys = map_keys(names, rules)
    refuse_idle([keys], rules)
    new = [name for name in keys.new if name is not None]
    if len(new) != len(names) or keys.filled:
        raise OptionRefused(
            "an edit leaves out no tensors, and these rules do",
            hint="leave them out with: ckptconv convert IN OUT",
        )
    if RESERVED in new:
        raise KeyConflict("a tensor cannot be named __metadata__ in safetensors", where=RESERVED)
    return dict(zip(names, new, strict=True))


def _with_strings(
    before: Mapping[str, str], asked: HeaderEdit, aliases: Mapping[str, str]
) -> dict[str, str]:
    """The strings after the edit, of which those in `aliases` are second names of tensors."""
    given = dict(asked.metadata)
    for name in (*given, *asked.remove):
        if name in aliases:
            tensor = printable(aliases[name])
            what = f"the metadata entry {printable(name)} is a second name of the tensor {tensor}"
            raise KeyConflict(what, where=name, hint="an edit does not take it away")
    for name in asked.remove:
        if name == ENCODINGS:
            raise OptionRefused(
                f"the metadata entry {name} says how tensors are put together, and stays"
            )
        if name in given:
            raise OptionRefused(f"the metadata entry {printable(name)} is both set and removed")
        if name not in before:
            others = sorted(other for other in before if other not in aliases)
            raise OptionRefused(
                f"it has no metadata entry {printable(name)}",
                hint=f"it has {some_text(others) or 'none'}",
            )
    kept = {name: value for name, value in before.items() if name not in asked.remove}
    return {**kept, **given}


# ------------------------------------------------------------------------- what became of an edit


@dataclass(frozen=True, slots=True, repr=False)
class EditResult:
    """What an edit changed, or would change in a dry run.

    `renamed` are (old, new) pairs of names; `metadata` the entries that were set, `removed` the
    names of those that are gone. `in_place` says whether only the header was written (None: there
    was nothing to write). `undone`: an edit that was interrupted was undone first. `nbytes` is the
    size of the file, `grown` the bytes that it has more than before, `tensors` how many it has,
    `verified` how many of them were looked at again (None: not asked for).
    """

    path: Path
    nbytes: int
    tensors: int
    renamed: tuple[tuple[str, str], ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    removed: tuple[str, ...] = ()
    in_place: bool | None = None
    undone: bool = False
    mapping: Path | None = None
    verified: int | None = None
    seconds: float = 0.0
    grown: int = 0

    def __repr__(self) -> str:
        counts = ((len(self.renamed), "name"), (len(self.metadata) + len(self.removed), "string"))
        told = [f"{count_text(count, noun)} changed" for count, noun in counts if count]
        if self.in_place:
            told.append("header in place")
        return short_repr("EditResult", self.path.name, *told, f"{self.seconds:.2f} s")


_LONGEST = 200  # characters of one that are shown


def edit_headline(result: EditResult, *, dry_run: bool) -> str:
    """The line that says what was done, or would be."""
    file = f"{printable(result.path)} ({size_text(result.nbytes)})"
    if result.in_place is None:
        return f"{file}: {'as it was before the edit' if result.undone else 'nothing to change'}"
    is_done, took = "is", f", in {seconds_text(result.seconds)}"
    if dry_run:
        is_done, took = "would be", ""
    how = f"only the header {is_done} written"
    if not result.in_place:
        how = f"the whole file {is_done} written again"
    return f"{file}: {how}{took}"


def edit_lines(result: EditResult) -> Iterator[Row]:
    """What an edit changed, as rows."""
    if result.undone:
        yield Row("undone", "an edit that was interrupted in the middle of a write", "warning")
    if result.renamed:
        old, new = result.renamed[0]
        yield Row(
            "keys",
            f"{count_text(len(result.renamed), 'name')} changed, e.g. {printable(old)} → "
            f"{printable(new)}",
        )
    strings = [
        *(f"{printable(name)} = {printable(value, _LONGEST)}" for name, value in result.metadata),
        *(f"{printable(name)} is removed" for name in result.removed),
    ]
    yield from listed("metadata", strings)
    if result.mapping is not None and result.renamed:
        name = printable(result.mapping)
        yield Row("mapping", f"{name}; --rules {name} --reverse undoes it")
    if result.in_place is False and result.grown > 0:
        yield Row("note", f"its header has {size_text(result.grown)} more, so that later edits fit")
    if result.verified is not None:
        yield Row("verified", f"{count_text(result.verified, 'tensor')}", "good")


EDIT = Fields(
    "path format=. bytes=nbytes grown_bytes=grown tensors in_place renamed metadata removed undone "
    "mapping verified seconds",
    format=lambda _: "safetensors",
    renamed=dict,
    metadata=dict,
    seconds=lambda seconds: round(seconds, 6),
)
"""The document of an edit."""
