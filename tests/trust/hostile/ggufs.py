"""GGUF files whose headers lie."""

from __future__ import annotations

import re
from collections.abc import Callable

from helpers import gguf_files as made
from hostile.cases import Family, Tree

FAMILY = Family("GGUF headers")


def content(name: str) -> Callable[[], bytes | Tree]:
    return lambda: made.LYING[name][0]


for what in made.LYING:
    slug = re.sub(r"\W+", "_", what)
    FAMILY.add(f"gguf_{slug}.gguf", "reject", what, content(what))
FAMILY.add(
    "gguf_one_text.gguf",
    "reject",
    "a text of 80 MB",
    lambda: made.gguf(metadata=[made.entry("a.b", made.TEXT, made.text(b"x" * 80_000_000))]),
)
FAMILY.add(
    "gguf_many_texts.gguf",
    "reject",
    "an array of 8 million empty texts and one of 2**63 bytes",
    lambda: made.gguf(
        metadata=[made.array("a.b", made.TEXT, 8_000_001, bytes(64_000_000) + made.HUGE)]
    ),
)
FAMILY.add(
    "gguf_set",
    "reject",
    "a set whose second file says that it is the first",
    lambda: {
        f"m-0000{at}-of-00002.gguf": made.gguf(made.tensor(f"w{at}"), metadata=made.split(0, 2, 2))
        for at in (1, 2)
    },
)
