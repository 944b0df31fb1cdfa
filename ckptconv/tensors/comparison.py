"""Two tensors compared: byte for byte where they lie, or number by number within a tolerance.

What lies in one order in both files is compared as it lies, through two buffers of 1 MiB; anything
else is gathered block by block. Of storages whose records declare a checksum it is worked out on
the way, or from another read of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from functools import partial
from typing import Any

from ckptconv.io.crc import crc32
from ckptconv.io.source import CHUNK, SMALL
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.support.progress import Meter
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.compute_ahead import THREADS
from ckptconv.tensors.element_pairs import aligned, words_of
from ckptconv.tensors.refs import Storage, TensorRef
from ckptconv.tensors.stream import verbatim_runs

# Bytes of one tensor, or of several, that a thread compares before it takes the next.
_BATCH = 16 << 20

Pair = tuple[TensorRef, TensorRef]


class PairSpan(NamedTuple):
    """The same bytes of one pair of tensors, in both storages; `pair` is the number of the pair."""

    pair: int
    first: Storage
    first_at: int
    second: Storage
    second_at: int
    nbytes: int

    @property
    def has_crc(self) -> bool:
        """Whether a checksum is declared that these bytes go into."""
        return self.first.has_crc or self.second.has_crc


# -------------------------------------------------------------------------------------------- bytes


@dataclass(slots=True)
class ComparedBytes:
    """What comparing bytes gave: the pairs that differ, and the checksums of equal spans. `unread`
    are pairs that were compared otherwise, so that nothing is known of their checksums.
    """

    differing: set[int] = field(default_factory=set)
    equal: list[tuple[PairSpan, int]] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)

    def add(self, other: ComparedBytes) -> None:
        """Take in what another part of the work gave."""
        self.differing |= other.differing
        self.equal += other.equal


def compare_bytes(pairs: Sequence[Pair], meter: Meter) -> ComparedBytes:
    """Which pairs are not the same bit for bit; both of a pair have one dtype and shape. `meter`
    counts the bytes of one of each pair, until a difference is found in it.
    """
    compared = ComparedBytes()
    threaded: list[PairSpan] = []
    for number, (first, second) in enumerate(pairs):
        spans = _spans(number, first, second)
        if spans is None:
            compared.unread.add(number)
            if not _streams_equal(first, second, meter):
                compared.differing.add(number)
        elif all(_may_be_threaded(span) for span in spans):
            threaded += spans
        else:
            compared.add(_compared_alone(spans, meter))
    compared.add(_compared_by_threads(threaded, meter))
    return compared


def damaged_storages(compared: ComparedBytes, read: Iterable[Pair], meter: Meter) -> list[str]:
    """What is to be said of storages whose bytes have not the CRC-32 that their records declare.

    Those of the pairs in `read` are read for it, which `meter` counts pair by pair; of the others
    the checksums that were `compared` are put together.
    """
    checksums = Checksums()
    damage: list[str] = []
    for pair in read:
        for storage in (piece.storage for ref in pair for piece in ref.pieces):
            _noting(damage, partial(checksums.read, storage))
        meter.add(pair[0].nbytes)
    for span, crc in compared.equal:
        for storage, at in ((span.first, span.first_at), (span.second, span.second_at)):
            _noting(damage, partial(checksums.copied, storage, at, span.nbytes, crc))
    while _noting(damage, checksums.finish):  # goes on behind the one that it compared
        pass
    return list(dict.fromkeys(damage))


def _noting(damage: list[str], check: Callable[[], None]) -> bool:
    """Whether a check found damage, which is noted."""
    try:
        check()
    except MalformedCheckpoint as error:
        damage.append(str(error))
        return True
    return False


def _spans(number: int, first: TensorRef, second: TensorRef) -> list[PairSpan] | None:
    """Where the bytes of both lie in one order; None where they must be gathered."""
    # in one order that is not that of C, too: two transposed or channels-last tensors
    if _lie_alike(first, second):
        (begin, end), (other, _) = first.byte_span(), second.byte_span()
        one, two = first.storage, second.storage
        return [PairSpan(number, one, begin, two, other, end - begin)]
    ours, theirs = verbatim_runs(first), verbatim_runs(second)
    if ours is None or theirs is None:
        return None
    return list(_common_runs(number, ours, theirs))


def _lie_alike(first: TensorRef, second: TensorRef) -> bool:
    """Whether both are views without holes, and their elements lie in the very same order."""
    if not (first.is_view and second.is_view) or (first.conj, first.neg) != (
        second.conj,
        second.neg,
    ):
        return False
    same_order = first.storage.big_endian == second.storage.big_endian
    return same_order and first.stride == second.stride and first.is_dense()


def _common_runs(number: int, ours: list[Any], theirs: list[Any]) -> Iterator[PairSpan]:
    """The runs of both, cut wherever either of them ends."""
    left, right = list(reversed(ours)), list(reversed(theirs))
    while left and right:
        (storage, at, nbytes), (other, other_at, other_nbytes) = left.pop(), right.pop()
        count = min(nbytes, other_nbytes)
        if count:
            yield PairSpan(number, storage, at, other, other_at, count)
        if nbytes > count:
            left.append((storage, at + count, nbytes - count))
        if other_nbytes > count:
            right.append((other, other_at + count, other_nbytes - count))


def _may_be_threaded(span: PairSpan) -> bool:
    """Whether several threads may read both: files of a pool and inflated records are for one."""
    return (
        span.nbytes > SMALL
        and span.first.source.is_for_threads()
        and span.second.source.is_for_threads()
    )


def _compared_alone(spans: Sequence[PairSpan], meter: Meter) -> ComparedBytes:
    compared = ComparedBytes()
    for batch in _batches(spans):
        compared.add(_compared(batch))
        meter.add(sum(span.nbytes for span in batch))
    return compared


def _compared_by_threads(spans: Sequence[PairSpan], meter: Meter) -> ComparedBytes:
    batches = list(_batches(spans))
    if len(batches) < 2:
        return _compared_alone(spans, meter)
    from concurrent.futures import ThreadPoolExecutor

    compared = ComparedBytes()
    with ThreadPoolExecutor(THREADS, "ckptconv-comparer") as pool:
        for batch, one in zip(batches, pool.map(_compared, batches), strict=True):
            compared.add(one)
            meter.add(sum(span.nbytes for span in batch))
    return compared


def _batches(spans: Iterable[PairSpan]) -> Iterator[list[PairSpan]]:
    """The spans in lists of about `_BATCH` bytes; longer ones are cut."""
    batch: list[PairSpan] = []
    room = _BATCH
    for span in spans:
        for start in range(0, span.nbytes, _BATCH):
            nbytes = min(_BATCH, span.nbytes - start)
            batch.append(
                span._replace(
                    first_at=span.first_at + start, second_at=span.second_at + start, nbytes=nbytes
                )
            )
            room -= nbytes
            if room <= 0:
                yield batch
                batch, room = [], _BATCH
    if batch:
        yield batch


def _compared(spans: Iterable[PairSpan]) -> ComparedBytes:
    """The pairs of which one of these spans differs, and the checksums of the equal spans."""
    compared = ComparedBytes()
    buffers = bytearray(CHUNK), bytearray(CHUNK)
    for span in spans:
        if span.pair in compared.differing:
            continue
        crc = _equal_crc(span, buffers)
        if crc is None:
            compared.differing.add(span.pair)
        elif span.has_crc:
            compared.equal.append((span, crc))
    return compared


def _equal_crc(span: PairSpan, buffers: tuple[bytearray, bytearray]) -> int | None:
    """None where the bytes differ; else their CRC-32, as far as one is declared."""
    first, second = span.first.offset + span.first_at, span.second.offset + span.second_at
    if span.nbytes <= SMALL:
        content = span.first.source.read(first, span.nbytes)
        if content != span.second.source.read(second, span.nbytes):
            return None
        # a sum that nobody declares is not worth its time
        return crc32(content, 0) if span.has_crc else 0
    crc, has_crc = 0, span.has_crc
    for start in range(0, span.nbytes, CHUNK):
        nbytes = min(CHUNK, span.nbytes - start)
        # Whole bytearrays are compared by memcmp; memoryviews would be compared item by item.
        one, two = buffers if nbytes == CHUNK else (bytearray(nbytes), bytearray(nbytes))
        span.first.source.read_into(first + start, memoryview(one))
        span.second.source.read_into(second + start, memoryview(two))
        if one != two:
            return None
        if has_crc:
            crc = crc32(one, crc)
    return crc


def _streams_equal(first: TensorRef, second: TensorRef, meter: Meter) -> bool:
    for one, two in aligned(words_of(first), words_of(second)):
        if not bool((one == two).all()):
            return False
        meter.add(one.nbytes)
    return True
