"""Runs jobs as tasks of a Ray cluster.

A job is a task of Ray with the memory that it needs asked for. Ray itself tries nothing again: the
driver does, which knows what may be there already. A lost node, a worker out of memory and a task
that cannot be placed are all a lost worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from ckptconv.batch.engines import Ended, Engine, Work, run_work
from ckptconv.support.errors import CheckpointError, MissingDependency

_HELD = 2
"""Tasks for each core of the cluster that are with Ray: more only wait there, out of our reach."""


class OnRay(Engine):
    """Runs tasks on the Ray cluster that this process is connected to, or on a new one here.

    `workers` bounds the tasks that Ray has at a time; None: twice as many as the cluster has cores.
    `address` is the cluster's where this process is connected to none (None: `RAY_ADDRESS`, else a
    new one on this host). `runtime_env` is Ray's: variables with credentials, packages.
    """

    name = "ray"

    def __init__(
        self,
        workers: int | None = None,
        address: str | None = None,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        self._ray = _ray()
        if not self._ray.is_initialized():
            with _told():
                self._ray.init(address=address, log_to_driver=False)
        cores = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self.slots = workers or _HELD * cores
        self._remote = self._ray.remote(run_work)
        self._environment = runtime_env
        self._running: dict[Any, int] = {}

    def start(self, work: Work) -> None:
        asked = self._remote.options(
            num_cpus=1,
            memory=work.memory(),
            max_retries=0,
            name=f"ckptconv-{work.number}",
            runtime_env=self._environment,
        )
        self._running[asked.remote(work)] = work.number

    def ended(self, seconds: float | None) -> Sequence[Ended]:
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        return [self._end(reference) for reference in done]

    def _end(self, reference: Any) -> Ended:
        number = self._running.pop(reference)
        try:
            return Ended(number, self._ray.get(reference))
        except Exception as error:  # of Ray: ours are in the receipt
            text = str(error).strip().partition("\n")[0]
            return Ended(number, None, f"{type(error).__name__}: {text}"[:500])

    def close(self) -> None:
        for reference in self._running:
            with contextlib.suppress(Exception):
                self._ray.cancel(reference, force=False)
        if self._running:
            with contextlib.suppress(Exception):
                self._ray.wait(list(self._running), num_returns=len(self._running), timeout=10)
        self._running.clear()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            "the engine ray needs the package ray, which is not installed",
            hint="python -m pip install 'ray>=2.9'",
        ) from error
    return ray


@contextlib.contextmanager
def _told() -> Any:
    """Errors of Ray as ours."""
    try:
        yield
    except (ConnectionError, ValueError, RuntimeError) as error:
        text = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"the Ray cluster cannot be reached: {text}",
            hint="start one with ray start --head, or name it with --address",
        ) from error
