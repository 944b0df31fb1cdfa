"""Outputs in a store appear whole or not at all, whichever request fails: every one is tried."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Mapping

import numpy
import pytest
from safetensors.numpy import load, save_file

from ckptconv import CheckpointError, OutputRefused, convert_checkpoint
from ckptconv.io.commit import ShardNames
from ckptconv.io.remote import uploads
from ckptconv.io.remote.output import RemoteOutput
from ckptconv.io.remote.uploads import key_of_hidden
from ckptconv.support.limits import limits
from helpers.conformance import DestinationConformance, pattern
from helpers.examples import crossed, some
from helpers.memory_bucket import Bucket, S3InMemory, bucket, bucket_place  # noqa: F401

INDEX = "m.bin.index.json"


def unhidden(content: Mapping[str, bytes]) -> dict[str, bytes]:
    """The objects that a reader would take for what they are called."""
    return {key: data for key, data in content.items() if key_of_hidden(key) is None}


class InMemory(DestinationConformance):
    NAMES: tuple[str, ...] = ("out.bin",)
    READ_BACK = False

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket):  # noqa: F811
        self.bucket = bucket

    def destination(self, room, *, force=False, size=0):
        place = bucket_place(self.bucket, "run 7/out.bin")
        return RemoteOutput(place, force=force, read_back=self.READ_BACK)

    def everything(self, room):
        objects = {key.removeprefix("run 7/"): raw for key, raw in self.bucket.content.items()}
        return objects | {f"{key} (unfinished)": b"" for key in self.bucket.left}

    def found(self, room):
        return unhidden({key.removeprefix("run 7/"): v for key, v in self.bucket.content.items()})

    def test_a_committed_draft_can_be_read_back(self, tmp_path):
        if not self.READ_BACK:
            pytest.skip("it is not read before it is committed")
        super().test_a_committed_draft_can_be_read_back(tmp_path)

    def test_more_than_there_is_room_for_is_refused_before_any_work(self, tmp_path):
        """A store does not tell how much room it has."""


class TestObject(InMemory):
    pass


class TestObjectReadBack(InMemory):
    READ_BACK = True


class TestSet(InMemory):
    NAMES = ("m-0.bin", "m-1.bin", INDEX)

    def destination(self, room, *, force=False, size=0):
        def earlier() -> list[str]:
            inside = [key.removeprefix("run 7/") for key in self.bucket.content]
            return [name for name in inside if name.startswith("m") and name.endswith("n")]

        files = ShardNames(
            shards=list(self.NAMES[:-1]),
            index=INDEX,
            earlier=earlier,
            moved_index=lambda moved: json.dumps(moved).encode(),
            claimed=[INDEX],
        )
        place = bucket_place(self.bucket, "run 7/m.bin")
        return RemoteOutput(place, force=force, read_back=self.READ_BACK, files=files)


class TestSetReadBack(TestSet):
    READ_BACK = True


# ---------------------------------------------------------------------- every request of a command

TENSORS = {
    f"layer.{n}": numpy.frombuffer(pattern(90_000 + n)[: 80_000 + 4 * n], "f4") for n in range(4)
}
OLD = {"layer.0": numpy.zeros(30_000, "f4"), "layer.9": numpy.ones(30_000, "f4")}


@pytest.fixture
def checkpoint(tmp_path):
    save_file(TENSORS, tmp_path / "new.safetensors")
    save_file(OLD, tmp_path / "old.safetensors")
    return tmp_path


KINDS = {
    "file": {},
    "file, verified": {"verify": True},
    "set, verified": {"max_shard_size": 100_000, "verify": True},
    "set": {"max_shard_size": 100_000},
}
WRITTEN = some(2, [pytest.param(options, id=name) for name, options in KINDS.items()])


def converted(source, **options) -> None:
    convert_checkpoint(source, "s3://memory/run/model.safetensors", **options)


def tensors(content: Mapping[str, bytes]) -> dict[str, bytes] | None:
    """The tensors that a reader finds, through an index where there is one; None without any.

    It fails where an index names what is not there.
    """
    index = content.get("run/model.safetensors.index.json")
    names = ["model.safetensors"]
    if index is not None:
        names = sorted(set(json.loads(index)["weight_map"].values()))
        weights = json.loads(index)["weight_map"]
    elif "run/model.safetensors" not in content:
        return None
    found = {}
    for name in names:
        found |= {key: value.tobytes() for key, value in load(content[f"run/{name}"]).items()}
    assert index is None or set(found) == set(weights)
    return found


def bytes_of(arrays: Mapping[str, numpy.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def each_request(bucket: Bucket, kind: str) -> Iterator[int]:  # noqa: F811
    """The numbers of requests, until there are no more: each is to fail in the way `kind`, once."""
    for number in itertools.count(1):
        hit = []

        def fault(at, name, key, number=number, hit=hit):
            if at != number:
                return None
            hit.append(name)
            return kind

        bucket.objects.clear()
        bucket.begun.clear()
        bucket.fault = lambda at, name, key: None
        yield_fault(bucket, fault)
        yield number
        if not hit:
            return


def yield_fault(bucket: Bucket, fault) -> None:  # noqa: F811
    bucket.later = fault  # type: ignore[attr-defined]


def begin(bucket: Bucket) -> dict[str, bytes]:  # noqa: F811
    """From now on requests are counted, and fail; what was there before them."""
    bucket.asked.clear()
    bucket.fault = bucket.later  # type: ignore[attr-defined]
    return bucket.content


def remove_told(bucket: Bucket, error: CheckpointError) -> bool:  # noqa: F811
    """Where an error tells of hidden objects beside an output in place, do what it advises."""
    if "is in place, but hidden objects" not in error.what:
        return False
    store = S3InMemory(bucket)
    (left,) = store.unfinished("run/")
    store.abort(left)
    return True


def assert_nothing_hidden(bucket: Bucket, number: int, kind: str) -> None:  # noqa: F811
    """Nothing is left but an upload without bytes, whose id was in the answer that was lost."""
    assert unhidden(bucket.content) == bucket.content, (number, bucket.asked)
    if kind == "lost" and bucket.asked[number - 1 :][:1] and bucket.asked[number - 1][0] == "begin":
        assert [begun.parts for begun in bucket.begun.values()] == [{}]
        (left,) = S3InMemory(bucket).unfinished("run/")
        assert left.nbytes == 0
        S3InMemory(bucket).abort(left)
    assert bucket.left == [], (number, bucket.asked)


@pytest.mark.parametrize(("written", "kind"), crossed(KINDS, ["passing", "lost"]))
def test_a_request_that_fails_in_passing_is_made_again(written, kind, checkpoint, bucket):  # noqa: F811
    options = KINDS[written]
    for number in each_request(bucket, kind):
        begin(bucket)
        converted(checkpoint / "new.safetensors", **options)
        assert tensors(bucket.content) == bytes_of(TENSORS), (number, bucket.asked)
        assert_nothing_hidden(bucket, number, kind)
    assert number > 5


@pytest.mark.parametrize(("written", "kind"), crossed(KINDS, ["lost", "passing"]))
def test_it_is_made_again_where_something_is_replaced(written, kind, checkpoint, bucket):  # noqa: F811
    options = KINDS[written]
    for number in each_request(bucket, kind):
        converted(checkpoint / "old.safetensors", **options)
        begin(bucket)
        converted(checkpoint / "new.safetensors", force=True, **options)
        assert tensors(bucket.content) == bytes_of(TENSORS), (number, bucket.asked)
        assert_nothing_hidden(bucket, number, kind)


@pytest.mark.parametrize("options", WRITTEN)
def test_a_request_that_is_refused_leaves_nothing(options, checkpoint, bucket):  # noqa: F811
    for number in each_request(bucket, "final"):
        begin(bucket)
        try:
            converted(checkpoint / "new.safetensors", **options)
        except CheckpointError as error:
            remove_told(bucket, error)
        told = (number, bucket.asked)
        assert bucket.left == [] and unhidden(bucket.content) == bucket.content, told
        found = tensors(bucket.content)
        assert found == bytes_of(TENSORS) or bucket.content == {}, told
    assert number > 5


@pytest.mark.parametrize("options", WRITTEN)
def test_a_request_that_is_refused_leaves_what_was_there_or_no_index(
    options,
    checkpoint,
    bucket,  # noqa: F811
):
    without = 0
    for number in each_request(bucket, "final"):
        converted(checkpoint / "old.safetensors", **options)
        before = begin(bucket)
        is_refused = False
        try:
            converted(checkpoint / "new.safetensors", force=True, **options)
        except CheckpointError as error:
            is_refused = not remove_told(bucket, error)
        told = (number, bucket.asked)
        assert bucket.left == [] and unhidden(bucket.content) == bucket.content, told
        found = tensors(bucket.content)
        if bucket.content == before:
            assert is_refused, told
        elif found is None:
            without += 1
            assert is_refused and "max_shard_size" in options, told
        else:
            assert found == bytes_of(TENSORS), told
    assert without == 0 or "max_shard_size" in options


# ----------------------------------------------------------- others, Ctrl-C, and what a kill leaves


@pytest.mark.parametrize("options", WRITTEN)
def test_of_two_writers_one_wins_and_the_other_leaves_nothing(options, checkpoint, bucket):  # noqa: F811
    """The second one is done when the first is about to let its object appear."""
    ended: list[str] = []
    content = {"a": TENSORS, "b": {f"other.{n}": array for n, array in enumerate(TENSORS.values())}}
    save_file(content["b"], checkpoint / "b.safetensors")
    save_file(content["a"], checkpoint / "a.safetensors")
    started = threading.Event()

    def first(number, name, key):
        is_other = threading.current_thread() is other
        if name in ("complete", "copy") and not is_other and not started.is_set():
            started.set()
            other.start()
            other.join(30)

    def write(name):
        try:
            converted(checkpoint / f"{name}.safetensors", **options)
            ended.append(name)
        except CheckpointError as error:
            assert "exists" in error.what
            ended.append(f"not {name}")

    other = threading.Thread(target=write, args=("b",), name="other")
    bucket.seen = first
    write("a")
    assert started.is_set() and sorted(ended) in (["a", "not b"], ["b", "not a"]), ended
    (won,) = [name for name in ended if len(name) == 1]
    assert tensors(bucket.content) == bytes_of(content[won])
    assert bucket.left == [] and unhidden(bucket.content) == bucket.content


class Stopped(KeyboardInterrupt):
    """Ctrl-C."""


@pytest.mark.parametrize("options", WRITTEN)
def test_ctrl_c_leaves_nothing(options, checkpoint, bucket, monkeypatch):  # noqa: F811
    """It comes with the first, the second… stretch that is copied, as progress tells it."""
    stopped = 0
    for number in itertools.count():
        bucket.objects.clear()
        calls = itertools.count()

        def on_progress(*_, number=number, calls=calls):
            if next(calls) == number:
                raise Stopped

        try:
            converted(checkpoint / "new.safetensors", on_progress=on_progress, **options)
        except Stopped:
            stopped += 1
            assert bucket.left == [] and bucket.content == {}, bucket.asked
        else:
            break
    assert stopped >= 1


@pytest.mark.parametrize("options", WRITTEN)
def test_a_kill_leaves_what_is_found_and_nothing_else(options, checkpoint, bucket):  # noqa: F811
    """The process is gone after each request in turn: nothing more that it asks for is done."""
    found = set()
    for number in itertools.count(1):
        bucket.objects.clear()
        bucket.begun.clear()
        bucket.asked.clear()
        bucket.is_dead = False

        def seen(at, name, key, number=number):
            bucket.is_dead = bucket.is_dead or at >= number

        bucket.seen = seen
        is_whole = True
        try:
            converted(checkpoint / "new.safetensors", **options)
        except CheckpointError:
            is_whole = False
        bucket.is_dead, bucket.seen = False, lambda number, name, key: None
        there = set(unhidden(bucket.content))
        index = "run/model.safetensors.index.json"
        assert tensors(bucket.content) in (None, bytes_of(TENSORS)), (number, bucket.asked)
        if index not in there and "run/model.safetensors" not in there:
            # shards whose index is missing are no checkpoint; --force replaces them
            assert all("-of-" in key for key in there), there
        store = S3InMemory(bucket)
        for left in store.unfinished("run/model"):
            found.add(key_of_hidden(left.key) or left.key)
            store.abort(left)
        assert bucket.left == [] and unhidden(bucket.content) == bucket.content, bucket.asked
        converted(checkpoint / "new.safetensors", force=True, **options)
        assert tensors(bucket.content) == bytes_of(TENSORS)
        if is_whole:
            break
    assert found


@pytest.mark.parametrize(("written", "force"), crossed(KINDS, [True, False]))
def test_a_network_that_is_gone_leaves_no_mixture(written, force, checkpoint, bucket, monkeypatch):  # noqa: F811
    """Each request in turn is the last one that is done, and its answer gets lost."""
    options = KINDS[written]
    monkeypatch.setattr(uploads, "_ABORTING", 0.01)
    for number in itertools.count(1):
        bucket.objects.clear()
        bucket.begun.clear()
        bucket.fault = lambda at, name, key: None
        if force:
            converted(checkpoint / "old.safetensors", **options)
        bucket.asked.clear()

        def fault(at, name, key, number=number):
            return None if at < number else "lost" if at == number else "passing"

        bucket.fault = fault
        try:
            with limits(remote_seconds=0.01):
                converted(checkpoint / "new.safetensors", force=force, **options)
        except CheckpointError as error:
            has_begun = any(name in ("begin", "put") for name, _ in bucket.asked)
            if isinstance(error, OutputRefused):
                assert ("nothing was left behind" in str(error)) is not has_begun
        else:
            break
        whole = [None, bytes_of(TENSORS), *([bytes_of(OLD)] if force else [])]
        assert tensors(bucket.content) in whole, (number, bucket.asked)
        bucket.fault = lambda at, name, key: None
        store = S3InMemory(bucket)
        for left in store.unfinished("run/model"):
            store.abort(left)
        assert bucket.left == [] and unhidden(bucket.content) == bucket.content, bucket.asked
    assert number > 5
