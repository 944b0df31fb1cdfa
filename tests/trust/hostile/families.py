"""All cases of our own, family by family."""

from __future__ import annotations

from hostile import (
    execution,
    exhaustion,
    folders,
    ggufs,
    headers,
    meaning,
    names,
    old_containers,
    options,
    ranks,
    scripts,
    zips,
)
from hostile.cases import Case, Family

FAMILIES: tuple[Family, ...] = (
    execution.FAMILY,
    exhaustion.FAMILY,
    meaning.FAMILY,
    zips.FAMILY,
    headers.FAMILY,
    ggufs.FAMILY,
    old_containers.FAMILY,
    scripts.FAMILY,
    names.FAMILY,
    *folders.FAMILIES,
    ranks.FAMILY,
    options.FAMILY,
)
NEIGHBOURS: list[Case] = [case for family in FAMILIES for case in family.cases]
