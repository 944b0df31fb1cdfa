"""An object as a source: few requests, all of one version."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.io.remote.source import HEAD, RemoteSource
from ckptconv.io.remote.store import ObjectBytes, Seen
from ckptconv.io.source import SMALL
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint
from helpers.conformance import pattern

CONTENT = pattern(3 << 20)
WINDOW = 64 << 10  # what a small read fetches


class Object:
    """Bytes that a source gets, by requests that are noted."""

    def __init__(self, content: bytes = CONTENT, *, is_pinned: bool = True) -> None:
        self.content, self.tag, self.is_pinned = content, "one", is_pinned
        self.asked: list[tuple[int, int]] = []

    @property
    def seen(self) -> Seen:
        return Seen(len(self.content), self.tag, self.is_pinned)

    def get(self, first: int, nbytes: int) -> ObjectBytes:
        self.asked.append((first, nbytes))
        return ObjectBytes(self.content[first : first + nbytes], self.seen)

    def source(self, *windows: tuple[int, int]) -> RemoteSource:
        known = [(first, self.content[first : first + nbytes]) for first, nbytes in windows]
        return RemoteSource(self.get, PurePosixPath("far"), self.seen, known)

    def change(self) -> None:
        self.content, self.tag = self.content[::-1], "two"


RANGES = st.lists(
    st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 1 << 19) | st.integers(0, SMALL)).map(
        lambda drawn: (drawn[0], min(drawn[1], len(CONTENT) - drawn[0]))
    ),
    max_size=12,
)


@given(RANGES, st.sampled_from(["read", "read_many", "stream", "foresee", "begin_many"]))
def test_whatever_is_read_however_is_what_is_there(ranges, way):
    object = Object()
    source = object.source((0, HEAD))
    expected = [CONTENT[offset : offset + nbytes] for offset, nbytes in ranges]
    if way == "read_many":
        assert source.read_many(ranges) == expected
    elif way == "begin_many":
        begun = [source.begin_many(ranges), source.begin_many(ranges[::-1])]
        assert begun[0]() == expected and begun[1]() == expected[::-1]
    elif way == "stream":
        assert b"".join(map(bytes, source.stream(ranges))) == b"".join(expected)
    else:
        if way == "foresee":
            source.foresee([(offset, min(nbytes, SMALL)) for offset, nbytes in ranges])
        assert [source.read(offset, nbytes) for offset, nbytes in ranges] == expected


@given(RANGES)
def test_near_ranges_share_a_request_and_far_ones_do_not(ranges):
    object = Object()
    source = object.source()
    source.read_many(ranges)
    wanted = sum(nbytes for _, nbytes in ranges)
    asked = sum(nbytes for _, nbytes in object.asked)
    assert len(object.asked) <= len(ranges)
    # before a small run, up to eight times as much as it has
    between = sum(max(256 << 10, 8 * nbytes) for _, nbytes in sorted(ranges)[1:])
    assert asked <= wanted + between


def test_what_was_fetched_with_the_first_request_is_not_asked_for_again():
    object = Object()
    source = object.source((0, HEAD))
    for at in range(0, HEAD, 1000):
        source.read(at, min(1000, HEAD - at))
    assert object.asked == []
    source.read(0, 0)
    source.read(len(CONTENT), 0)
    assert object.asked == []


def test_small_reads_in_a_row_cost_one_request():
    object = Object()
    source = object.source((0, HEAD))
    for at in range(1 << 20, (1 << 20) + WINDOW, SMALL):
        source.read(at, SMALL)
    assert len(object.asked) == 1


def test_small_reads_near_the_end_cost_one_request_in_any_order():
    object = Object()
    source = object.source((0, HEAD))
    for back in (22, 60_000, 1_000, WINDOW, 5):
        assert source.read(len(CONTENT) - back, 5) == CONTENT[-back:][:5]
    assert object.asked == [(len(CONTENT) - WINDOW, WINDOW)]


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize(
    "read",
    [
        lambda source: source.read(2 << 20, 100),
        lambda source: source.read(2 << 20, 1 << 19),
        lambda source: source.read_into(2 << 20, memoryview(bytearray(1 << 19))),
        lambda source: source.read_many([(0, 10), (2 << 20, 10)]),
        lambda source: source.begin_many([(2 << 20, 10)])(),
        lambda source: source.begin_into(2 << 20, memoryview(bytearray(10))).wait(),
        lambda source: list(source.stream([(2 << 20, 10)])),
        lambda source: list(source.stream([(0, 3 << 20)])),
    ],
)
def test_an_object_that_changes_is_never_a_mixture(read, is_pinned):
    object = Object(is_pinned=is_pinned)
    source = object.source((0, HEAD))
    assert source.read(0, 10) == CONTENT[:10]
    object.change()
    with pytest.raises(MalformedCheckpoint, match="was changed while it was read"):
        read(source)


def test_who_cannot_pin_asks_at_the_end():
    for is_pinned, asked in ((True, 0), (False, 1)):
        object = Object(is_pinned=is_pinned)
        source = object.source((0, HEAD))
        source.check_unchanged()
        assert len(object.asked) == asked
    object.change()
    with pytest.raises(MalformedCheckpoint, match="was changed"):
        source.check_unchanged()


@pytest.mark.parametrize("nbytes", [50, 1 << 19])
def test_a_body_that_is_too_short_is_an_error(nbytes):
    object = Object()
    source = object.source()
    get = object.get
    source._get = lambda first, n: ObjectBytes(get(first, n).data[:-1], object.seen)
    with pytest.raises(MalformedCheckpoint, match="the server sent"):
        source.read(0, nbytes)


def test_what_is_closed_is_not_read():
    source = Object().source((0, HEAD))
    source.close()
    with pytest.raises(CheckpointError, match="was closed before it was read"):
        source.read(0, 10)


def test_what_is_kept_of_small_reads_is_bounded():
    object = Object(pattern(40 << 20))
    source = object.source((0, HEAD))
    for at in range(0, 40 << 20, HEAD):
        source.read(at, 10)
    assert sum(map(len, source._windows.values())) <= 8 << 20
