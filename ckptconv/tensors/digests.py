"""The checksums of tensors in a delta: of all its bytes, as hexadecimal digits in lower case."""

from __future__ import annotations

import zlib
from typing import Any, Literal, Protocol, get_args

from ckptconv.support.errors import MissingDependency

Algorithm = Literal["xxh3-128", "blake3", "adler32"]
"""Those of slime and miles, under their names; the first is their default."""

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

DIGITS = {"xxh3-128": 32, "blake3": 64, "adler32": 8}


class Digest(Protocol):
    """The checksum of the bytes so far."""

    def update(self, data: Any, /) -> object:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """It, in hexadecimal digits."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def digest(algorithm: Algorithm) -> Digest:
    """A checksum of no bytes yet; `MissingDependency` where its package is not there."""
    if algorithm == "adler32":
        return _Adler32()
    try:
        if algorithm == "blake3":
            import blake3

            return blake3.blake3()
        import xxhash

        return xxhash.xxh3_128()
    except ImportError:
        package = "blake3" if algorithm == "blake3" else "xxhash"
        what = f"the checksum {algorithm} needs the package {package}"
        hint = f"pip install {package}; adler32 needs none"
        raise MissingDependency(what, hint=hint) from None
