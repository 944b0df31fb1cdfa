"""Work whose worker is killed, or takes long. Workers import this module, and it imports neither
torch nor pytest: that would cost each of them two seconds of a processor.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptconv.convert.execute import ConversionResult
from ckptconv.convert.job import Job
from ckptconv.convert.shares import MadeShare, Share, share_of
from ckptconv.support.progress import OnProgress


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_once(tried: Path) -> None:
    """Kill this process, unless the file `tried` is there; it is from now on."""
    if not tried.exists():
        tried.touch()
        _kill()


@dataclass(frozen=True, slots=True)
class KillingJob(Job):
    """A job whose worker is killed before it, until the file `source`.tried is there."""

    def run(self, on_progress: OnProgress | None = None) -> ConversionResult:
        _kill_once(Path(f"{self.source}.tried"))
        return Job.run(self, on_progress)


@dataclass(frozen=True, slots=True)
class LeavingJob(Job):
    """A job whose worker is killed after it, until the file `source`.tried is there."""

    def run(self, on_progress: OnProgress | None = None) -> ConversionResult:
        made = Job.run(self, on_progress)
        _kill_once(Path(f"{self.source}.tried"))
        return made


@dataclass(frozen=True, slots=True)
class AlwaysKillingJob(Job):
    """A job that ends its worker whenever it is tried."""

    def run(self, on_progress: OnProgress | None = None) -> ConversionResult:
        _kill()
        raise AssertionError


@dataclass(frozen=True, slots=True)
class SlowJob(Job):
    """A job that takes a minute, and says by the file `source`.begun that it has begun, and by
    `source`.ended that it was let out of it.
    """

    def run(self, on_progress: OnProgress | None = None) -> ConversionResult:
        Path(f"{self.source}.begun").touch()
        try:
            for _ in range(600):  # what cancels may have to wait until Python does something
                time.sleep(0.1)
        finally:
            Path(f"{self.source}.ended").touch()
        return Job.run(self, on_progress)


@dataclass(frozen=True, slots=True, repr=False)
class KillingShare(Share):
    """A share whose worker is killed when its file is written, the first time."""

    def make(self) -> MadeShare:
        made = Share.make(self)
        _kill_once(Path(self.shown).parent.with_name("shared.tried"))
        return made


@dataclass(frozen=True, slots=True, repr=False)
class AlwaysKillingShare(Share):
    """A share that ends its worker."""

    def make(self) -> MadeShare:
        _kill()
        raise AssertionError


def killing_share_of(*given: Any, **more: Any) -> Share:
    """As `shares.share_of`, whose first share loses its worker once."""
    share = share_of(*given, **more)
    return KillingShare(*_fields(share)) if share.number == 1 else share


def always_killing_share_of(*given: Any, **more: Any) -> Share:
    """As `shares.share_of`, whose every share loses its worker."""
    return AlwaysKillingShare(*_fields(share_of(*given, **more)))


def _fields(share: Share) -> list[Any]:
    return [getattr(share, name) for name in Share.__slots__]
