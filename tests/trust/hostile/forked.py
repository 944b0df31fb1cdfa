"""The program in a process of its own for every command, without starting Python for each.

It is forked from one that has the whole program imported, and torch for doctor: so a command takes
some milliseconds, and its memory is that above an idle program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.paths import ROOT
from helpers.program import NEEDED, TORCH, Finished, close_servers, forks_of


class Server:
    """`run` is that of `helpers.program`, with a folder for temporary files."""

    def __init__(self) -> None:
        self.idle_rss = self.run("--version", cwd=ROOT).rss
        """The peak memory of a child that does nothing."""

    def run(
        self, *arguments: object, cwd: Path, tmp: Path | None = None, limit: int = 300
    ) -> Finished:
        """Run a command in `cwd`, with `tmp` for temporary files; it is killed after `limit`
        seconds by the clock.
        """
        env = {} if tmp is None else {"TMPDIR": str(tmp)}
        forks = forks_of(*(TORCH if arguments[0] == "doctor" else NEEDED))
        return forks.run(*arguments, cwd=cwd, env=env, limit=limit, alone=True)


@contextmanager
def server() -> Iterator[Server]:
    """For a script: pytest ends what is forked from."""
    try:
        yield Server()
    finally:
        close_servers()
