"""Jobs on a real Ray cluster of two nodes on this machine: `make ray`."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptconv import (
    Job,
    Options,
    convert_many,
    execute_plan,
    open_checkpoint,
    plan_conversion,
)
from ckptconv.batch.engines import Engine
from ckptconv.batch.on_ray import OnRay
from ckptconv.batch.sharing import share_out_on
from ckptconv.convert.shares import Share, share_of
from helpers.engine_conformance import WorkerConformance, checkpoint
from helpers.lost_workers import KillingJob

pytestmark = pytest.mark.ray
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

if os.environ.get("CKPTCONV_REQUIRE_RAY"):
    import ray
else:
    ray = pytest.importorskip("ray")

import torch  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

HERE = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def cluster():
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    # the workers unpickle the jobs of the tests, and so import their modules
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    ray.init(
        address=found.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def second(cluster):
    """A node beside the head, gone after the test."""
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield node
    if node in cluster.list_all_nodes():
        cluster.remove_node(node, allow_graceful=True)


@pytest.mark.usefixtures("second")
class TestRay(WorkerConformance):
    def engine(self) -> Engine:
        return OnRay()


def made_right(path: Path, expected: dict[str, torch.Tensor]) -> bool:
    made = load_file(path)
    return sorted(made) == sorted(expected) and all(
        torch.equal(made[name], tensor) for name, tensor in expected.items()
    )


def killing(cluster, node, room: Path) -> threading.Event:
    """Kill a node as soon as it is in the middle of something; the event is set then."""
    killed = threading.Event()

    def kill() -> None:
        begun = time.monotonic()
        while not list(room.glob(f"*.on.{node.node_id}")) and time.monotonic() - begun < 60:
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)
        killed.set()

    threading.Thread(target=kill, daemon=True).start()
    return killed


@dataclass(frozen=True, slots=True)
class LeisurelyJob(Job):
    """A job that takes two seconds, and says on which node by the file `source`.on.NODE."""

    def run(self, on_progress=None):
        node = ray.get_runtime_context().get_node_id()
        Path(f"{self.source}.on.{node}").touch()
        time.sleep(2)
        return Job.run(self, on_progress)


def test_a_node_that_is_killed_in_the_middle_loses_nothing(cluster, second, tmp_path):
    expected = {number: checkpoint(tmp_path / f"{number}.pt", number) for number in range(12)}
    jobs = [
        LeisurelyJob(tmp_path / f"{number}.pt", tmp_path / f"out/{number}.safetensors")
        for number in expected
    ]
    events = []
    report = tmp_path / "r.jsonl"
    killed = killing(cluster, second, tmp_path)
    receipts = list(
        convert_many(
            jobs, executor="ray", ledger=report, on_event=lambda event: events.append(event.what)
        )
    )
    assert killed.wait(1)
    assert [receipt.state for receipt in receipts] == ["done"] * 12
    assert all(
        made_right(tmp_path / f"out/{number}.safetensors", tensors)
        for number, tensors in expected.items()
    )
    assert "again" in events
    assert [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []
    again = list(convert_many(jobs, executor="ray", ledger=report))
    assert all(receipt.earlier for receipt in again)


@pytest.mark.usefixtures("second")
def test_a_poison_file_fails_alone(cluster, tmp_path):
    for number in range(4):
        checkpoint(tmp_path / f"{number}.pt", number)
    jobs = [Job(tmp_path / f"{n}.pt", tmp_path / f"out/{n}.safetensors") for n in range(4)]
    jobs[2] = KillingJob(tmp_path / "2.pt", tmp_path / "out/2.safetensors")
    found = {one.output: one for one in convert_many(jobs, executor="ray", tries=1)}
    assert [found[str(job.output)].state for job in jobs] == ["done", "done", "failed", "done"]
    assert found[str(jobs[2].output)].error.kind == "WorkerLost"


@pytest.mark.usefixtures("second")
def test_workers_read_from_a_store_and_write_to_it(cluster, servers, tmp_path, monkeypatch):
    pytest.importorskip("obstore")
    from ckptconv.io.places import place_of
    from helpers.servers import s3_client

    server = servers("seaweedfs")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    expected = {number: checkpoint(tmp_path / f"{number}.pt", number) for number in range(4)}
    client = s3_client(server)
    for number in expected:
        raw = (tmp_path / f"{number}.pt").read_bytes()
        client.put_object(Bucket=server.bucket, Key=f"ray/{number}.pt", Body=raw)
    base = f"s3://{server.bucket}/ray"
    ray_env = {"env_vars": dict(server.environment)}
    jobs = [Job(f"{base}/{number}.pt", f"{base}/{number}.safetensors") for number in expected]
    engine = OnRay(runtime_env=ray_env)
    receipts = list(convert_many(jobs, executor=engine, ledger=tmp_path / "r.jsonl"))
    assert [receipt.error for receipt in receipts] == [None] * 4
    assert all(receipt.network["requests"] > 0 for receipt in receipts)
    for number, tensors in expected.items():
        place = place_of(f"{base}/{number}.safetensors")
        source = place.open()
        (tmp_path / f"{number}.safetensors").write_bytes(source.read(0, source.size))
        source.close()
        assert made_right(tmp_path / f"{number}.safetensors", tensors)
    again = list(convert_many(jobs, executor=OnRay(), ledger=tmp_path / "r.jsonl"))
    assert all(receipt.earlier for receipt in again)


@dataclass(frozen=True, slots=True, repr=False)
class LeisurelyShare(Share):
    """A share that takes two seconds, and says on which node by the file `shown`.on.NODE."""

    def make(self):
        node = ray.get_runtime_context().get_node_id()
        room = Path(self.shown).parent.parent
        Path(room / f"{self.number}.on.{node}").touch()
        time.sleep(2)
        return Share.make(self)


def leisurely(*given, **more):
    share = share_of(*given, **more)
    return LeisurelyShare(*[getattr(share, name) for name in Share.__slots__])


def test_a_node_that_is_killed_while_it_makes_files_of_one_checkpoint(
    cluster, second, tmp_path, monkeypatch
):
    made = {f"w{number}": torch.randn(100, 50) for number in range(12)}
    torch.save(made, tmp_path / "a.pt")
    options = Options(max_shard_size=21_000, to="safetensors")
    Job(tmp_path / "a.pt", tmp_path / "alone", options).run()
    monkeypatch.setattr("ckptconv.convert.shares.share_of", leisurely)
    killed = killing(cluster, second, tmp_path)
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        plan = plan_conversion(checkpoint, tmp_path / "shared", options)
        execute_plan(plan, share_out=share_out_on(OnRay()))
    assert killed.wait(1)
    there, alone = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("shared", "alone")
    )
    assert len(alone) == 13 and there == alone
    nodes = {path.name.partition(".on.")[2] for path in tmp_path.glob("*.on.*")}
    assert len(nodes) == 2
