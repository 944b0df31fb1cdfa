"""What an edit makes of the header of a safetensors file: other names, other strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.formats.safetensors import RESERVED, aliases_in
from ckptconv.keys.key_map import KEEP, KeyRules, map_keys, refuse_idle
from ckptconv.keys.naming_metadata import followed
from ckptconv.objects.encodings import ENCODINGS
from ckptconv.support.errors import KeyConflict, OptionRefused, RefusedObject, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import some_text
from ckptconv.tree.reshaping import flat_parts, makes_tensors


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
    names = _renamed([*tensors, *aliases], asked.rules)
    if ENCODINGS in before and any(old != new for old, new in names.items()):
        raise RefusedObject(
            "its metadata says by their names how tensors are put together",
            where=ENCODINGS,
            hint="rename them with: ckptconv convert IN OUT",
        )
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
    if found != wanted:
        odd = next(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
        raise KeyConflict(
            f"the metadata entry {printable(odd)} = {printable(after.get(odd, ''))} would read "
            + ("as a second name of that tensor" if odd in found else "as a text, not as a tensor"),
            where=odd,
            hint="choose other names, or write each name with: ckptconv convert IN OUT "
            "--tied duplicate",
        )
    return ChangedHeader(
        {**({RESERVED: after} if after else {}), **new_tensors},
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
            raise KeyConflict(
                f"the metadata entry {printable(name)} is a second name of the tensor "
                f"{printable(aliases[name])}",
                where=name,
                hint="an edit does not take it away",
            )
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
                hint=f"it has {some_text(others)}" if others else "it has none",
            )
    kept = {name: value for name, value in before.items() if name not in asked.remove}
    return {**kept, **given}
