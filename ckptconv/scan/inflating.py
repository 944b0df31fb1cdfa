"""How much work a file may make: what it inflates to, and what was followed for nothing."""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass

from ckptconv.io.source import CHUNK, Source
from ckptconv.scan.heads import BLOCK
from ckptconv.support.limits import in_force


@dataclass(slots=True)
class Room:
    """How much more work a file of `size` bytes may make.

    That is what it has inflated to, and what was followed for nothing.

    Records of a broken archive may lie in each other, and pickles may seem to begin anywhere: of a
    small file that is made to, each look would take as long as the last.
    """

    size: int
    inflated: int = 0
    inflated_pickles: int = 0
    followed: int = 0
    is_used_up: bool = False

    def inflate(
        self, source: Source, offset: int, stored: int, *, pickle: bool
    ) -> tuple[bytes, bool]:
        """What a deflated run inflates to, as far as there is room; and whether there is more."""
        most = in_force()
        free = most.pickle_free if pickle else most.inflated_free
        left = max(free, most.pickle_ratio * self.size) - (
            self.inflated_pickles if pickle else self.inflated
        )
        limit = min(most.pickle_bytes, max(free, most.pickle_ratio * stored), left)
        inflated = inflated_head(source, offset, stored, limit) if limit > 0 else b""
        if pickle:
            self.inflated_pickles += len(inflated)
        else:
            self.inflated += len(inflated)
        return inflated, len(inflated) >= limit

    @property
    def is_searched(self) -> bool:
        """Whether so much was followed for nothing that the search ends."""
        return self.followed > max(in_force().scanned_in_vain, self.size // _PART_IN_VAIN)


_PART_IN_VAIN = 64  # random bytes that seem to be a pickle break after a few


def inflated_head(source: Source, offset: int, stored: int, limit: int) -> bytes:
    """At most the first `limit` bytes of a deflated run, as far as it inflates."""
    inflater = zlib.decompressobj(-15)
    made = bytearray()
    with contextlib.suppress(zlib.error):
        step = min(CHUNK, max(limit, BLOCK))
        for start in range(0, stored, step):
            piece = source.read(offset + start, min(step, stored - start))
            made += inflater.decompress(piece, limit - len(made))
            if inflater.eof or len(made) >= limit:
                break
    return bytes(made)
