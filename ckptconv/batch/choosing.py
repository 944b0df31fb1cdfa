"""The engine that a name or an executor stands for."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any, Literal

from ckptconv.batch.engines import Engine, OnExecutor, Serial
from ckptconv.support.errors import OptionRefused
from ckptconv.support.platforms import cores

EngineName = Literal["serial", "processes", "ray"]
EngineNamed = EngineName | Executor | Engine


def engine_of(named: EngineNamed, workers: int | None) -> Engine:
    """The engine that is meant; `OptionRefused` for what is none."""
    if workers is not None and (type(workers) is not int or workers < 1):
        raise OptionRefused(
            f"workers={workers!r:.100} is not a number of workers", hint="give 1 or more"
        )
    if isinstance(named, Engine):
        return named
    if isinstance(named, Executor):
        return OnExecutor(named, workers or _workers_of(named))
    if named == "serial":
        return Serial()
    if named == "processes":
        from ckptconv.batch.processes import Processes

        return Processes(workers or cores())
    if named == "ray":
        from ckptconv.batch.on_ray import OnRay

        return OnRay(workers)
    raise OptionRefused(
        f"executor={named!r:.100} is not an engine",
        hint="choose serial, processes or ray, or give a concurrent.futures.Executor",
    )


def _workers_of(executor: Any) -> int:
    """How many tasks an executor runs at a time, where it says so."""
    found = getattr(executor, "_max_workers", None)
    return found if type(found) is int and found > 0 else cores()
