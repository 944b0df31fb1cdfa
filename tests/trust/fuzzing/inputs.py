"""What the fuzzer gives to the library: files, and which of them are named to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["checkpoint", "quantised", "rules", "like"]
"""A checkpoint, one of quantised weights, a file of key rules, or what keys are fitted to."""

GOOD = "good.pt"
"""What rules and fittings are applied to lies beside them, and is never mutated."""


@dataclass(frozen=True)
class Trial:
    """Files by their path in a folder, and which of them are named to the program (``.``: the
    folder itself).
    """

    files: dict[str, bytes]
    named: tuple[str, ...] = (".",)
    kind: Kind = "checkpoint"

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.files.values()))


@dataclass(frozen=True)
class Seed:
    """A good input to start from."""

    name: str
    trial: Trial

    @property
    def target(self) -> str:
        """The group under which it is counted: the first word of its name."""
        return self.name.partition(":")[0]


def of_file(name: str, content: bytes, file: str) -> Seed:
    """A seed of one checkpoint file."""
    return Seed(name, Trial({file: content}, (file,)))
