"""The time and memory of a command, for benchmarks of whole commands."""

from __future__ import annotations

import os
import subprocess
import time


def timed(command: list[str]) -> tuple[float, float, int]:
    """Seconds, seconds of all cores, and the peak of memory (kB) of a command."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[:4]} failed")
    seconds = time.perf_counter() - begin
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss
