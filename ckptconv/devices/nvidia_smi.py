"""Runs nvidia-smi and reads its answer: GPUs, remarks, or why there is no list; `host` interprets
them.

It numbers GPUs by PCI bus. Memory is in MiB, or a word in brackets: ``[N/A]`` where CPU and GPU
share it, ``[Insufficient Permissions]`` on a partitioned GPU, ``[Unknown Error]`` and the like on
one that is broken (tests/data/nvidia-smi has all).
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from ckptconv.support.records import dataclass

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

SECONDS = 5.0
_GPUS = ("--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
# drivers before 450 know no such field
_MODES = ("--query-gpu=index,mig.mode.current", "--format=csv,noheader")
_SIZE = re.compile(r"([0-9]+)(?: MiB)?").fullmatch
_PARTITIONED = re.compile(r"^([0-9]+), *Enabled\b", re.MULTILINE).findall
_UNTOLD = frozenset({"[N/A]", "N/A", "[Not Supported]", "[Insufficient Permissions]"})
_WARNED = 14  # "infoROM is corrupted": the list before it is whole


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, sizes in bytes, None where unknown; `logical` is None if hidden, `physical` if only
    torch sees it.

    `trouble` is what a broken one says instead of its memory; `partitioned` is MIG mode, where it
    was asked.
    """

    logical: int | None
    physical: int | None
    name: str
    uuid: str | None
    total: int | None
    free: int | None
    trouble: str | None = None
    partitioned: bool = False


@dataclass(frozen=True, slots=True)
class SmiAnswer:
    """All GPUs, as yet without `logical` indices, and other lines as `remarks`; `problem` says why
    the GPUs are not all (None: they are). Without nvidia-smi the answer is empty.
    """

    gpus: tuple[Gpu, ...] = ()
    remarks: tuple[str, ...] = ()
    problem: str | None = None


def ask_gpus(*, partitions: bool = False, seconds: float | None = None) -> SmiAnswer:
    """What nvidia-smi says; for `partitions` too, it runs twice at once. Raises nothing."""
    import subprocess

    limit = SECONDS if seconds is None else seconds
    running: list[subprocess.Popen[str]] = []
    try:
        running.append(_start(_GPUS))
        if partitions:
            running.append(_start(_MODES))
        (code, out), *others = _ends(running, limit)
    except FileNotFoundError:
        return SmiAnswer()
    except subprocess.TimeoutExpired:
        return SmiAnswer(problem=f"nvidia-smi did not answer: it timed out after {limit:g} seconds")
    except (OSError, subprocess.SubprocessError) as error:
        return SmiAnswer(problem=f"nvidia-smi did not answer: {error}")
    finally:
        for process in running:  # without waiting: one that hangs in the driver does not even die
            if process.poll() is None:
                process.kill()
    enabled = frozenset(
        int(index) for ended, text in others if ended == 0 for index in _PARTITIONED(text)
    )
    return _read(code, out, enabled)


def _start(query: Sequence[str]) -> subprocess.Popen[str]:
    import subprocess

    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.Popen(
        ("nvidia-smi", *query),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env=environment,
    )  # fmt: skip


def _ends(running: Sequence[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str]]:
    """The exit code of each, and what it printed; `seconds` are for all together."""
    deadline = time.monotonic() + seconds
    printed = [
        process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0] for process in running
    ]
    return [(process.returncode, out) for process, out in zip(running, printed, strict=True)]


def _read(code: int, out: str, partitioned: frozenset[int]) -> SmiAnswer:
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    listed = [line for line in lines if line.count(",") >= 4]
    gpus = [_gpu(line, partitioned) for line in listed]
    remarks = tuple(line for line in lines if line not in listed)
    problem = None
    has_none = any("No devices were found" in remark for remark in remarks)
    if code != 0 and not (code == _WARNED and listed):
        if not has_none:
            reason = next(iter(remarks), "no reason given")
            problem = f"nvidia-smi failed (exit {code}): {reason}"
    elif None in gpus:
        problem = f"nvidia-smi could not be understood: {listed[gpus.index(None)]}"
    elif lines and not gpus and not has_none:
        problem = f"nvidia-smi could not be understood: {lines[0]}"
    return SmiAnswer(tuple(gpu for gpu in gpus if gpu), remarks, problem)


def _gpu(line: str, partitioned: frozenset[int]) -> Gpu | None:
    """One line of the list; a name may have commas."""
    index, uuid, *name, total, free = (field.strip() for field in line.split(","))
    if not (index.isascii() and index.isdecimal()):
        return None
    odd = [size for size in (total, free) if not _SIZE(size) and size not in _UNTOLD]
    number, trouble = int(index), next(iter(odd), None)
    told = _bytes(total), _bytes(free), trouble, number in partitioned
    return Gpu(None, number, ",".join(name), uuid, *told)


def _bytes(size: str) -> int | None:
    found = _SIZE(size)
    return None if found is None else int(found[1]) << 20
