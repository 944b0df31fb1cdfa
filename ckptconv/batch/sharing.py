"""One checkpoint made by many: the files of its output are shares that an engine has made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptconv.batch.drive import FIRST, LONGEST
from ckptconv.batch.engines import Engine
from ckptconv.batch.own_code import code_version, other_code
from ckptconv.convert.shares import MadeShare, Share, ShareOut
from ckptconv.io.remote.hosts import allowing_hosts, hosts_given
from ckptconv.support.errors import (
    OUT_OF_MEMORY,
    CheckpointError,
    RemoteFailure,
    is_out_of_memory,
)
from ckptconv.support.records import dataclass


@dataclass(frozen=True, slots=True)
class ShareTask:
    """A share that a worker makes: how often it was tried before, hosts and code as in `Task`."""

    share: Share
    tries: int = 0
    hosts: str = ""
    code: str = ""

    @property
    def number(self) -> int:
        """That of the share."""
        return self.share.number

    def run(self) -> MadeShare | CheckpointError:
        """Make the share; what went wrong is given."""
        if self.code not in ("", code_version()):
            return other_code(f"{self.code} planned the conversion")
        try:
            with allowing_hosts(self.hosts):
                return self.share.make()
        except CheckpointError as error:
            return error
        except Exception as error:
            if is_out_of_memory(error):
                return CheckpointError(OUT_OF_MEMORY, path=self.share.shown)
            raise

    def memory(self) -> int:
        """That of the share."""
        return self.share.memory()


def share_out_on(engine: Engine, tries: int = 3) -> ShareOut:
    """Has shares made by an engine; one whose worker is lost, or which the network kept from being
    made, is tried so many times in all.
    """

    def share_out(shares: Sequence[Share]) -> Iterator[MadeShare]:
        hosts, code = hosts_given(), code_version()
        waiting = deque(ShareTask(share, 0, hosts, code) for share in shares)
        running: dict[int, ShareTask] = {}
        with engine:
            while waiting or running:
                while waiting and len(running) < engine.slots:
                    task = waiting.popleft()
                    running[task.number] = task
                    engine.start(task)
                for ended in engine.ended(None):
                    task = running.pop(ended.number)
                    if isinstance(ended.given, MadeShare):
                        yield ended.given
                    else:
                        waiting.append(_again(task, ended.given, ended.lost, tries))

    return share_out


def _again(task: ShareTask, error: CheckpointError | None, lost: str, tries: int) -> ShareTask:
    """The task to be tried once more; raises what went wrong where that is of no use."""
    if error is None:
        what = f"was not made: its worker was lost ({lost}), {task.tries + 1} times"
        error = RemoteFailure(what, path=task.share.shown, passing=True)
    passing = isinstance(error, RemoteFailure) and error.passing
    if not passing or task.tries + 1 >= tries:
        raise error
    time.sleep(min(LONGEST, FIRST * 2**task.tries))
    return replace(task, tries=task.tries + 1)
