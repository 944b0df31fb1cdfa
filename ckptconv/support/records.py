"""Records that are made 100,000 at a time."""

from __future__ import annotations

made = tuple.__new__
"""Makes a NamedTuple of a tuple of all its fields in half the time of its constructor, for what
there are 100,000 of.
"""
