"""Outputs in stores, of which nothing is found before all of it, whatever request fails."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from ckptconv.io.commit import ShardNames
from ckptconv.io.outputs import check_place_free, file_output, folder_output
from ckptconv.io.remote import patience, uploads
from ckptconv.io.remote.causes import Forbidden
from ckptconv.io.remote.output import RemoteOutput
from ckptconv.io.remote.store import StoreError
from ckptconv.io.remote.uploads import hidden_key, key_of_hidden, part_size
from ckptconv.support.errors import CheckpointError, OutputRefused
from ckptconv.support.limits import limits
from helpers.conformance import DestinationConformance, pattern
from helpers.memory_store import MemoryStore, memory_place


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Parts that a test can have many of, and no long waits."""
    monkeypatch.setattr(uploads, "PART", 1 << 20)
    monkeypatch.setattr(patience, "FIRST", 0.001)
    monkeypatch.setattr(uploads, "_ABORTING", 0.05)
    with limits(remote_seconds=0.05):
        yield


STORES: dict[str, MemoryStore] = {}


def store_of(room) -> MemoryStore:
    return STORES.setdefault(str(room), MemoryStore(room.name))


def hidden_or_open(store: MemoryStore) -> list[str]:
    return [key for key in store.objects if key_of_hidden(key)] + list(store.uploads)


class InStore(DestinationConformance):
    READ_BACK = False

    def found(self, room):
        found = store_of(room).objects.items()
        return {key[4:]: raw for key, raw in found if not key_of_hidden(key)}

    def everything(self, room):
        found = store_of(room)
        return {key.removeprefix("run/"): None for key in (*found.objects, *found.uploads)}

    def test_a_committed_draft_can_be_read_back(self, tmp_path):
        if self.READ_BACK:
            super().test_a_committed_draft_can_be_read_back(tmp_path)

    def test_more_than_there_is_room_for_is_refused_before_any_work(self, tmp_path):
        """A store has room."""


class TestObject(InStore):
    def destination(self, room, *, force=False, size=0):
        place = memory_place(store_of(room), "run/out.bin")
        return RemoteOutput(place, force=force, read_back=self.READ_BACK)


class TestObjectReadBack(TestObject):
    READ_BACK = True


INDEX = "m.bin.index.json"


def shard_names(store: MemoryStore, count: int, *, has_index: bool = True) -> ShardNames:
    def earlier() -> list[str]:
        names = [key[4:] for key in store.objects if key.startswith("run/")]
        return sorted(name for name in names if name in ("m.bin", INDEX) or name[:2] == "m-")

    return ShardNames(
        shards=[f"m-{number}.bin" for number in range(count)] if has_index else ["m.bin"],
        index=INDEX if has_index else None,
        earlier=earlier,
        moved_index=lambda moved: json.dumps(moved).encode(),
        claimed=[INDEX],
    )


class TestSet(InStore):
    NAMES = ("m-0.bin", "m-1.bin", "m-2.bin", INDEX)

    def destination(self, room, *, force=False, size=0):
        store = store_of(room)
        place = memory_place(store, "run/m.bin")
        files = shard_names(store, len(self.NAMES) - 1)
        return RemoteOutput(place, force=force, read_back=self.READ_BACK, files=files)


class SetWithCompanions(TestSet):
    """A tokenizer, which is there by now, and a new card in a folder beside the index."""

    NAMES = ("m-0.bin", "tokenizer.json", "cards/card.md", INDEX)

    def destination(self, room, *, force=False, size=0):
        store = store_of(room)
        files = replace(shard_names(store, 1), companions=("tokenizer.json", "cards/card.md"))
        return RemoteOutput(memory_place(store, "run/m.bin"), force=force, files=files)


class TestSetReadBack(TestSet):
    READ_BACK = True


class TestSetOfOneFile(InStore):
    NAMES = ("m.bin",)

    def destination(self, room, *, force=False, size=0):
        store = store_of(room)
        files = shard_names(store, 1, has_index=False)
        return RemoteOutput(memory_place(store, "run/m.bin"), force=force, files=files)


# ------------------------------------------------------------------------------- what may go wrong


KINDS = {
    "object": TestObject,
    "object read back": TestObjectReadBack,
    "set": TestSet,
    "set read back": TestSetReadBack,
}


def failing(at: int, kind: str = "final"):
    """A request that fails for good."""

    def fail(name: str, number: int) -> None:
        if number == at and name != "drop":
            raise StoreError(kind, "S3 fails (status 500)")

    return fail


@pytest.mark.parametrize("size", [1000, (5 << 20) + 17], ids=["one part", "six parts"])
@pytest.mark.parametrize("name", KINDS)
def test_whatever_request_fails_nothing_is_left(name, size, tmp_path):
    kind = KINDS[name]()
    content = kind.content(1, size)
    kind.put(tmp_path / "all", content)
    requests = len(store_of(tmp_path / "all").asked)
    assert requests >= (3 if size == 1000 else 8)
    for at in range(requests):
        room = tmp_path / str(at)
        store = store_of(room)
        store.before = failing(at)
        with pytest.raises(OutputRefused, match="S3 fails") as raised:
            kind.put(room, content)
        assert raised.value.path.startswith(f"test://{at}/run/")
        assert kind.everything(room) == {}, (at, store.asked)


@pytest.mark.parametrize("name", ["object", "object read back"])
def test_whatever_request_fails_what_was_there_stays(name, tmp_path):
    kind = KINDS[name]()
    old, new = kind.content(1), kind.content(2, 3 << 20)
    kind.put(tmp_path, old)
    store = store_of(tmp_path)
    before = len(store.asked)
    kind.put(tmp_path, new, force=True)
    requests = len(store.asked) - before
    kind.put(tmp_path, old, force=True)
    for at in range(requests):
        store.before = failing(len(store.asked) + at)
        with pytest.raises(OutputRefused, match="S3 fails"):
            kind.put(tmp_path, new, force=True)
        store.before = lambda name, number: None
        assert kind.found(tmp_path) == old
        assert hidden_or_open(store) == []


@pytest.mark.parametrize("name", KINDS)
def test_a_request_that_fails_once_is_tried_again(name, tmp_path):
    kind = KINDS[name]()
    content = kind.content(1, 3 << 20)
    failed: set[str] = set()

    def fail_once(name: str, number: int) -> None:
        if name not in failed:
            failed.add(name)
            raise StoreError("passing", "S3 does not answer")

    store_of(tmp_path).before = fail_once
    with limits(remote_seconds=5):
        kind.put(tmp_path, content)
    assert kind.found(tmp_path) == content and {"part", "complete"} <= failed
    assert hidden_or_open(store_of(tmp_path)) == []


def test_parts_are_sent_by_several_threads_and_few_at_a_time(tmp_path):
    store, now, most = store_of(tmp_path), [0], [0]
    lock, all_here = threading.Lock(), threading.Event()

    def enter(name: str, number: int) -> None:
        if name == "part":
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
                if now[0] == 4:
                    all_here.set()
            assert all_here.wait(10)

    def leave(name: str, number: int) -> None:
        if name == "part":
            with lock:
                now[0] -= 1

    store.before, store.after = enter, leave
    kind = TestObject()
    content = {"out.bin": pattern(12 << 20)}
    kind.put(tmp_path, content)
    assert kind.found(tmp_path) == content
    assert most[0] == 4


def test_what_waits_in_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "HELD", patience.Budget(2000))
    kind = TestSet()
    content = kind.content(1, 900)
    kind.put(tmp_path, content)
    asked = store_of(tmp_path).asked
    assert (asked.count("put"), asked.count("begin")) == (2, 2)
    assert kind.found(tmp_path) == content
    assert uploads.HELD.left == 2000


def test_the_index_comes_last(tmp_path):
    kind, store, put = TestSet(), store_of(tmp_path), []
    store.after = lambda name, number: put.append(sorted(store.objects)) if name == "put" else None
    kind.put(tmp_path, kind.content(1))
    assert [len(keys) for keys in put] == [1, 2, 3, 4]
    assert all(f"run/{INDEX}" not in keys for keys in put[:3])


def test_no_index_names_a_mixture_and_shards_of_an_earlier_set_are_removed(tmp_path):
    three, two, store = TestSet(), TestSet(), store_of(tmp_path)
    two.NAMES = ("m-0.bin", "m-1.bin", INDEX)
    old = three.content(1)
    three.put(tmp_path, old)
    mixed = []

    def look(name: str, number: int) -> None:
        if name == "put" and f"run/{INDEX}" in store.objects:
            mixed.append(store.objects["run/m-0.bin"] != old["m-0.bin"])

    store.before = look
    new = two.content(2)
    two.put(tmp_path, new, force=True)
    assert two.found(tmp_path) == new
    assert not any(mixed)


def test_a_set_that_could_not_be_replaced_as_a_whole_says_so(tmp_path):
    kind, store = TestSet(), store_of(tmp_path)
    kind.put(tmp_path, kind.content(1))
    puts = []

    def fail(name: str, number: int) -> None:
        if name == "put":
            puts.append(number)
            if len(puts) == 2:
                raise StoreError("final", "S3 fails")

    store.before = fail
    with pytest.raises(OutputRefused, match=r"m-0.bin is replaced by now; run the command again"):
        kind.put(tmp_path, kind.content(2), force=True)
    assert INDEX not in kind.found(tmp_path)
    assert hidden_or_open(store) == []


def put_companions(tmp_path, fails: str = "") -> list[str]:
    """Put a set over an earlier tokenizer; the puts in their order, of which that of `fails`
    fails.
    """
    kind, store, put = SetWithCompanions(), store_of(tmp_path), []
    store.objects["run/tokenizer.json"] = b"earlier"

    def note(key: str, content: bytes, *, create: bool) -> None:
        put.append(key.removeprefix("run/"))
        if put[-1] == fails:
            raise StoreError("final", "S3 fails")
        MemoryStore.put(store, key, content, create=create)

    store.put = note  # type: ignore[method-assign]
    kind.put(tmp_path, kind.content(1), force=True)
    return put


def test_companions_that_are_new_come_before_the_shards_and_the_others_after_the_index(tmp_path):
    assert put_companions(tmp_path) == ["cards/card.md", "m-0.bin", INDEX, "tokenizer.json"]


def test_a_companion_that_cannot_be_replaced_leaves_the_set_in_place(tmp_path):
    what = r"is in place, but tokenizer.json of the earlier one cannot be replaced: S3 fails"
    with pytest.raises(OutputRefused, match=what):
        put_companions(tmp_path, "tokenizer.json")
    found = store_of(tmp_path).objects
    assert set(found) == {f"run/{name}" for name in SetWithCompanions.NAMES}
    assert found["run/tokenizer.json"] == b"earlier"


def test_an_index_that_cannot_be_put_takes_new_companions_back(tmp_path):
    with pytest.raises(OutputRefused, match="S3 fails"):
        put_companions(tmp_path, INDEX)
    assert store_of(tmp_path).objects == {"run/tokenizer.json": b"earlier"}


@pytest.mark.parametrize("name", KINDS)
def test_of_two_writers_one_wins_and_the_other_is_told(name, tmp_path):
    kind = KINDS[name]()
    first, second = kind.content(1, 2 << 20), kind.content(2, 2 << 20)
    with (
        pytest.raises(OutputRefused, match="exists now; another process wrote it"),
        kind.destination(tmp_path) as one,
        kind.destination(tmp_path) as two,
    ):
        kind.write(one, first)
        kind.write(two, second)
        one.commit()
        two.commit()
    assert kind.found(tmp_path) == first
    assert hidden_or_open(store_of(tmp_path)) == []


def test_a_writer_who_comes_in_between_shards_wins(tmp_path):
    """The names were free when they were looked at: the condition of each put decides."""
    kind, store = TestSet(), store_of(tmp_path)

    def intrude(name: str, number: int) -> None:
        if name == "put":
            store.objects.setdefault("run/m-1.bin", b"theirs")

    store.before = intrude
    with pytest.raises(OutputRefused, match=r"m-1.bin: exists now"):
        kind.put(tmp_path, kind.content(1))
    assert store.objects == {"run/m-1.bin": b"theirs"}


def test_a_stop_does_not_wait_for_parts_that_do_not_get_through(tmp_path):
    kind, store = TestObject(), store_of(tmp_path)
    is_sent, stuck = threading.Event(), threading.Event()

    def wait(name: str, number: int) -> None:
        if name == "part":
            is_sent.set()
            assert stuck.wait(20)

    store.before = wait
    begin = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        kind.destination(tmp_path) as output,
        output.draft("out.bin", 10 << 20) as draft,
    ):
        draft.stream.write(pattern(8 << 20))
        assert is_sent.wait(10)
        raise KeyboardInterrupt
    assert time.monotonic() - begin < 10
    assert store.asked.count("drop") == 1
    assert store.uploads == store.objects == {}
    stuck.set()
    while store.asked.count("drop") < 2:  # what arrived afterwards is dropped too
        time.sleep(0.01)
        assert time.monotonic() - begin < 20


def test_a_user_who_may_write_and_not_read_writes(tmp_path):
    kind, store = TestObject(), store_of(tmp_path)

    def forbid(name: str, number: int) -> None:
        if name in ("get", "list"):
            raise Forbidden("denied", "S3 does not allow it")

    store.before = forbid
    kind.put(tmp_path, kind.content(1))
    assert kind.found(tmp_path) == kind.content(1)
    with pytest.raises(OutputRefused, match="exists now"):
        kind.put(tmp_path, kind.content(2))


# -------------------------------------------------------------------------------- what is refused


def test_a_place_is_checked_before_any_work():
    store = MemoryStore()
    store.objects = {"run/a": b"1", "there": b"2"}
    check = partial(check_place_free, is_folder=False, force=False)
    check(memory_place(store, "new"))
    for key, force, what in (
        ("run", False, "test://memory/run: is a folder; name a file to write"),
        ("run", True, "test://memory/run: is a folder; name a file to write"),
        ("other/", False, "is a folder; name a file to write"),
        ("", True, "is a folder; name a file to write"),
        ("there", False, "test://memory/there: exists; add --force to replace it"),
    ):
        with pytest.raises(OutputRefused, match=what):
            check_place_free(memory_place(store, key), is_folder=False, force=force)
    check_place_free(memory_place(store, "there"), is_folder=False, force=True)
    with pytest.raises(OutputRefused, match="is a folder that torch makes, on this machine only"):
        check_place_free(memory_place(store, "dcp"), is_folder=True, force=False)


def test_a_folder_is_made_on_this_machine_only():
    place = memory_place(MemoryStore(), "dcp")
    with pytest.raises(CheckpointError, match="on this machine only"):
        folder_output(place, force=False, fsync=False, size=0)


def test_a_store_that_is_only_read_is_refused():
    store = MemoryStore()
    store.can_write = False
    with pytest.raises(OutputRefused, match="can be read, but not written"):
        file_output(memory_place(store, "a"), force=False, fsync=False, size=0)
    with pytest.raises(OutputRefused, match="can be read, but not written"):
        files = shard_names(store, 2)
        place = memory_place(store, "m.bin")
        file_output(place, files, in_folder=False, force=False, fsync=False, size=0)


def test_hidden_keys_say_what_they_were_to_become():
    for key in ("model.pt", "a/b/model.pt", "a/.b.c"):
        hidden = hidden_key(key)
        assert hidden != hidden_key(key) and key_of_hidden(hidden) == key
        assert hidden.rpartition("/")[0] == key.rpartition("/")[0]
    for key in (
        "model.pt",
        "a/.model.pt",
        ".ckptconv-part",
        "a/.x.ckptconv-part",
        "x.1.ckptconv-part",
    ):
        assert key_of_hidden(key) is None


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 80 << 30, 5 << 40])
def test_an_object_has_at_most_ten_thousand_parts(size, monkeypatch):
    monkeypatch.undo()
    assert size / part_size(size) <= 10_000
    assert part_size(size) >= 5 << 20
