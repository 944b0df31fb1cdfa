"""Hostile and broken files beside those that the generator writes: other members of its families,
and families of our own.

Each room holds one family as its ``CASES``; `families` has them all. `forked` runs commands on
them, `table` writes the page about them, `figures` says what they cost.
"""
