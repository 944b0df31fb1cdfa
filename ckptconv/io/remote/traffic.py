"""What went over the network: counted once, told by progress, reports and JSON."""

from __future__ import annotations

import threading
from operator import add, attrgetter, sub

from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text, size_text


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went over the network: requests and how many of them were tries of one that had failed,
    bytes of bodies that were received and sent.
    """

    requests: int = 0
    retries: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        """What was added after `earlier`."""
        return Traffic(*map(sub, _COUNTS(self), _COUNTS(earlier)))

    def __bool__(self) -> bool:
        return self.requests > 0

    def __str__(self) -> str:
        told = [count_text(self.requests, "request"), f"{size_text(self.bytes_read)} read"]
        if self.bytes_written:
            told.append(f"{size_text(self.bytes_written)} written")
        if self.retries:
            told.append(f"{self.retries:,} tried again")
        return ", ".join(told)


_COUNTS = attrgetter(*Traffic.__slots__)
_LOCK = threading.Lock()
_counted = Traffic()


def traffic() -> Traffic:
    """All of this process until now."""
    return _counted


def count(
    *, requests: int = 0, retries: int = 0, bytes_read: int = 0, bytes_written: int = 0
) -> None:
    """Add to what is counted; any thread may."""
    global _counted
    with _LOCK:
        more = (requests, retries, bytes_read, bytes_written)
        _counted = Traffic(*map(add, _COUNTS(_counted), more))
