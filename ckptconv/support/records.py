"""Records: those that are made 100,000 at a time, and what they say that is not as usual."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

made = tuple.__new__
"""Makes a NamedTuple of a tuple of all its fields in half the time of its constructor, for what
there are 100,000 of.
"""


def given_fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as by default, in their order."""
    told = ((item.name, getattr(record, item.name), item.default) for item in fields(record))
    return {name: value for name, value, default in told if value != default}
