"""Bytes fetched ahead are the right ones, whoever asks for them in whatever order, and not many."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.io.remote import readahead
from ckptconv.io.remote.readahead import FarSource, Readahead, reading_ahead
from ckptconv.support.errors import MalformedCheckpoint
from helpers.conformance import pattern

SIZE = 4000
BLOCK, WINDOW, GAP = 100, 350, 10


@pytest.fixture(autouse=True, scope="module")
def _small():
    """Blocks of few bytes, so that there are many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readahead, "BLOCK", BLOCK)
        patch.setattr(readahead, "WINDOW", WINDOW)
        patch.setattr(readahead, "_GAP", GAP)
        yield


class Far(FarSource):
    """Bytes of which each fetch is noted; one that covers `bad` fails."""

    def __init__(self, shift: int = 0, *, bad: int | None = None) -> None:
        self.path, self.size = PurePosixPath("far"), SIZE
        self.bytes = pattern(SIZE + shift)[shift:]
        self.fetches: list[tuple[int, int]] = []
        self.bad, self.wait = bad, 0.0
        self._lock = threading.Lock()

    def fetch(self, first: int, nbytes: int) -> memoryview:
        with self._lock:
            self.fetches.append((first, nbytes))
        time.sleep(self.wait)
        if self.bad is not None and first <= self.bad < first + nbytes:
            raise MalformedCheckpoint("the server sent nonsense", path=self.path)
        return memoryview(self.bytes)[first : first + nbytes]

    def read_into(self, offset: int, view: memoryview) -> None:
        if self.ahead is None or not self.ahead.fill(self, offset, view):
            view[:] = self.fetch(offset, len(view))

    def read(self, offset: int, nbytes: int) -> bytes:
        view = bytearray(nbytes)
        self.read_into(offset, memoryview(view))
        return bytes(view)

    def check_unchanged(self) -> None: ...
    def close(self) -> None: ...
    def fingerprint(self):
        return ("far", SIZE)


RUNS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, SIZE - 400), st.integers(0, 400)), max_size=25
)


@given(RUNS)
def test_blocks_cover_the_runs_and_small_gaps(runs):
    sources = Far(), Far(5)
    plan = Readahead([(sources[number], first, nbytes) for number, first, nbytes in runs])
    for number, source in enumerate(sources):
        wanted = {at for of, first, n in runs if of == number for at in range(first, first + n)}
        blocks = sorted(
            (block.first, block.last) for block in plan._blocks if block.source is source
        )
        covered = [at for first, last in blocks for at in range(first, last)]
        assert len(covered) == len(set(covered)) and wanted <= set(covered)
        assert all(0 < last - first <= BLOCK for first, last in blocks)
        length = 0
        for at in covered:
            length = 0 if at in wanted else length + 1
            assert length <= GAP


@given(RUNS, st.randoms(use_true_random=False), st.integers(1, 4))
def test_every_run_in_any_order_by_several_threads(runs, chance: random.Random, nthreads):
    sources = Far(), Far(5)
    waiting = list(runs)
    if chance.random() < 0.5:
        chance.shuffle(waiting)
    wrong: list[object] = []

    def work() -> None:
        while waiting:
            try:
                number, first, nbytes = waiting.pop(0)
            except IndexError:
                return
            held = bytearray(nbytes)
            sources[number].read_into(first, memoryview(held))
            if held != sources[number].bytes[first : first + nbytes]:
                wrong.append((number, first, nbytes))

    with reading_ahead([(sources[number], first, nbytes) for number, first, nbytes in runs]):
        threads = [threading.Thread(target=work) for _ in range(nthreads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert wrong == [] and sources[0].ahead is None


@given(RUNS)
def test_in_the_order_of_the_plan_few_bytes_are_held(runs):
    source = Far()
    plan = Readahead([(source, first, nbytes) for _, first, nbytes in runs])
    for _, first, nbytes in runs:
        view = bytearray(nbytes)
        if nbytes:
            assert plan.fill(source, first, memoryview(view))
        assert view == source.bytes[first : first + nbytes]
        assert plan._held <= 3 * WINDOW + nbytes + 2 * BLOCK
    assert plan._held == 0
    plan.close()


def test_what_is_planned_again_much_later_is_not_held_until_then():
    source = Far()
    plan = Readahead([(source, 0, SIZE), (source, 0, SIZE)])
    for at in [*range(0, SIZE, 50)] * 2:
        view = bytearray(50)
        assert plan.fill(source, at, memoryview(view)) and view == source.bytes[at : at + 50]
        assert plan._held <= 3 * WINDOW + BLOCK
    assert plan._held == 0
    assert len(source.fetches) <= 2 * SIZE // BLOCK


def test_no_more_is_fetched_ahead_than_the_window():
    source = Far()
    plan = Readahead([(source, 0, SIZE)])
    plan.fill(source, 0, memoryview(bytearray(10)))
    time.sleep(0.1)
    assert sum(nbytes for _, nbytes in source.fetches) <= WINDOW
    for at in range(10, SIZE, 10):
        plan.fill(source, at, memoryview(bytearray(10)))
        assert plan._held <= WINDOW
        assert sum(nbytes for _, nbytes in source.fetches) <= at + 10 + WINDOW
    assert plan._held == 0 and len(source.fetches) == SIZE // BLOCK


def test_what_is_passed_over_is_let_go_of():
    """Runs that nobody reads do not hold up what comes after them for long."""
    source = Far()
    plan = Readahead([(source, at, 5) for at in range(0, SIZE, 20)])  # a block each
    for at in range(SIZE - 2000, SIZE, 20):
        view = bytearray(5)
        assert plan.fill(source, at, memoryview(view)) and view == source.bytes[at : at + 5]
    assert plan._held <= WINDOW
    assert not plan.fill(source, 0, memoryview(bytearray(5)))  # who wants it then, fetches it


@pytest.mark.parametrize("bad", [0, 150, 399])
def test_a_fetch_that_fails_is_raised_at_its_reader_and_nothing_hangs(bad):
    source = Far(bad=bad)
    with reading_ahead([(source, 0, 400)]):
        for at in range(0, 400, BLOCK):
            view = bytearray(BLOCK)
            if at <= bad < at + BLOCK:
                for _ in range(2):
                    with pytest.raises(MalformedCheckpoint, match="nonsense"):
                        source.read_into(at, memoryview(view))
            else:
                source.read_into(at, memoryview(view))
                assert view == source.bytes[at : at + BLOCK]


def test_a_failure_does_not_keep_what_comes_later_from_being_fetched():
    source = Far(bad=50)
    plan = Readahead([(source, 0, SIZE)])
    with pytest.raises(MalformedCheckpoint):
        plan.fill(source, 0, memoryview(bytearray(BLOCK)))
    for at in range(BLOCK, SIZE, BLOCK):
        assert plan.fill(source, at, memoryview(bytearray(BLOCK)))


def test_what_is_not_planned_is_not_filled_and_a_plan_that_is_over_fetches_nothing():
    source, other = Far(), Far()
    plan = Readahead([(source, 100, 100), (source, 300, 50)])
    assert not plan.fill(other, 100, memoryview(bytearray(10)))
    assert not plan.fill(source, 90, memoryview(bytearray(20)))
    assert not plan.fill(source, 190, memoryview(bytearray(150)))
    assert source.fetches == []
    assert plan.fill(source, 100, memoryview(bytearray(100)))
    assert not plan.fill(source, 100, memoryview(bytearray(10)))  # it is used up
    plan.close()
    assert not plan.fill(source, 300, memoryview(bytearray(50)))


def test_what_is_planned_twice_is_fetched_once():
    source = Far()
    with reading_ahead([(source, 0, 90), (source, 200, 50), (source, 10, 50)]):
        for first, nbytes in ((0, 90), (200, 50), (10, 50)):
            view = bytearray(nbytes)
            source.read_into(first, memoryview(view))
            assert view == source.bytes[first : first + nbytes]
    assert sorted(source.fetches) == [(0, 90), (200, 50)]


def test_a_plan_within_a_plan_changes_nothing():
    source = Far()
    with reading_ahead([(source, 0, 90)]):
        outer = source.ahead
        with reading_ahead([(source, 200, 50)]):
            assert source.ahead is outer
        assert source.ahead is outer
    assert source.ahead is None


def test_a_run_over_blocks_that_were_planned_far_apart_is_filled_as_a_whole():
    source = Far()
    between = [(source, at, 5) for at in range(300, 3700, 20)]
    plan = Readahead([(source, 100, 100), *between, (source, 0, 100)])
    view = bytearray(200)
    assert plan.fill(source, 0, memoryview(view)) and view == source.bytes[:200]


def test_who_waits_for_what_is_let_go_reads_it_himself(monkeypatch):
    waiting: list[Future[memoryview]] = []

    def never(task) -> Future[memoryview]:
        waiting.append(Future())
        return waiting[-1]

    monkeypatch.setattr(readahead, "fetched", never)
    source = Far()
    plan = Readahead([(source, 0, 90)])
    threading.Timer(0.1, plan.close).start()
    assert not plan.fill(source, 0, memoryview(bytearray(90)))
    assert [future.cancelled() for future in waiting] == [True]
