"""Deltas made: what changed from one version of a model to the next, tensor by tensor."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import PurePath
from typing import Any

from ckptconv.convert.delta_pairs import Pair, matched
from ckptconv.convert.write import Tally, write_layout
from ckptconv.formats.deltas import (
    BASE_CHECKSUMS,
    BASE_TIED,
    INDEX,
    SHARD,
    ZSTD,
    version_named,
    version_of,
)
from ckptconv.formats.folders.alone import DELTA_ENCODING
from ckptconv.formats.hf_names import earlier_files, refuse_dcp_folder
from ckptconv.formats.registry import open_certain
from ckptconv.formats.target_format import Layout, one_item, target_named
from ckptconv.io.commit import ShardNames
from ckptconv.io.destination import Destination
from ckptconv.io.files import one_run, refuse_changed
from ckptconv.io.guarded import check_places
from ckptconv.io.inflate import Deflating, Spool, require_zstd
from ckptconv.io.location import Location
from ckptconv.io.outputs import file_output
from ckptconv.io.places import Named, Place, is_same_place, place_of, places_of
from ckptconv.io.source import CHUNK
from ckptconv.support.addresses import UrlPath
from ckptconv.support.arrays import Array, np
from ckptconv.support.choices import (
    refuse_no_callback,
    refuse_no_flag,
    refuse_no_path,
    refuse_no_text,
    refuse_other,
    spelling_checked,
)
from ckptconv.support.errors import OptionRefused, OutputRefused, RefusedObject, printable
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.report import Fields, Row, note_rows, short_repr
from ckptconv.support.text import count_text, seconds_text, size_text
from ckptconv.tensors.ahead import read_soon
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import UINT8
from ckptconv.tensors.element_pairs import aligned
from ckptconv.tensors.fold import noted
from ckptconv.tensors.patched import ALGORITHMS, ENCODINGS, MOST_PLACES, Algorithm, Encoding, digest
from ckptconv.tensors.refs import Storage, TensorRef, whole_storage


@dataclass(frozen=True, slots=True, repr=False)
class DeltaResult:
    """What became of a delta: the folder `path`, the `version` that it makes of `base_version`, how
    it says changes (`encoding`, `checksum`), how many of the `tensors` it changes (`changed`), its
    size in bytes (`nbytes`) and that of the tensors (`whole_nbytes`), seconds.
    """

    path: PurePath
    version: int
    base_version: int
    encoding: Encoding
    checksum: Algorithm
    tensors: int
    changed: int
    nbytes: int
    whole_nbytes: int
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def __repr__(self) -> str:
        told = (
            f"{self.base_version} → {self.version}",
            f"{self.changed:,} of {count_text(self.tensors, 'tensor')} changed",
            f"{size_text(self.nbytes)} of {size_text(self.whole_nbytes)}",
            f"{self.seconds:.2f} s",
        )
        return short_repr("DeltaResult", self.path.name, *told)


@one_run()
@spelling_checked
def delta_checkpoints(
    base: Named,
    new: Named,
    output: Place,
    *,
    encoding: Encoding = "xor",
    checksum: Algorithm = "xxh3-128",
    version: int | None = None,
    base_version: int | None = None,
    only: str | None = None,
    only_new: str | None = None,
    tag: str | None = None,
    tag_new: str | None = None,
    force: bool = False,
    fsync: bool = True,
    on_progress: OnProgress | None = None,
) -> DeltaResult:
    """Write what changed from the checkpoint `base` to `new` into the folder `output`, as RL
    trainers do (slime, miles) and engines apply it (sglang, `apply_deltas`).

    Both must have the same tensors, of the same dtypes and shapes: a delta says nothing else.
    Wrappers before the keys of `new` are stripped where it has other keys than `base`. ``xor`` is
    small, ``overwrite`` can be applied twice; `checksum` is that of each tensor's new bytes
    (slime's default, which needs xxhash as blake3 needs its package; ``adler32`` needs none).
    `version` is the one that the name of the folder says (``weight_v000003``), else the one after
    `base_version`; that is what `base` says, else the one before. `only` and `tag` choose in both,
    `only_new` and `tag_new` in `new`. Raises `CheckpointError`: `KeyMismatch` for tensors that do
    not fit, `MissingDependency` without zstd (Python 3.14, or the extra ``delta``).

    >>> delta_checkpoints("base", "step_10", "weight_v000001")  # doctest: +SKIP
    """
    begin = time.perf_counter()
    refuse_no_path(output=output)
    refuse_no_text(only=only, only_new=only_new, tag=tag, tag_new=tag_new)
    refuse_no_flag(force=force, fsync=fsync)
    refuse_no_callback(on_progress)
    refuse_other("encoding", encoding, ENCODINGS)
    refuse_other("checksum", checksum, ALGORITHMS)
    require_zstd()
    digest(checksum)  # its package is missed now, not in the middle
    place = place_of(output)
    if any(is_same_place(place.path, one.path) for one in (*places_of(base), *places_of(new))):
        what = "is BASE or NEW itself, and would be taken for a delta from then on"
        raise OutputRefused(what, path=place.path, hint="name another folder")
    refuse_dcp_folder(place)
    before, after = _versions(place, base, version, base_version)
    with (
        open_certain(base, tag=tag) as first,
        open_certain(new, tag=tag if tag_new is None else tag_new) as second,
        closing(Spool()) as spool,
    ):
        sources = (*first.sources, *second.sources)
        check_places(sources)
        pairs, notes = matched(first, second, only, only if only_new is None else only_new)
        changes = _Changes(encoding, checksum, spool, Checksums())
        changes.find(pairs, on_progress)
        files = _files(changes, before, after)
        with _destination(place, files, force=force, fsync=fsync) as destination:
            _draft(files, destination, on_progress)
            refuse_changed(sources)
            destination.commit()
    return DeltaResult(
        path=place.path,
        version=after,
        base_version=before,
        encoding=encoding,
        checksum=checksum,
        tensors=len(pairs),
        changed=len(changes.frames),
        nbytes=sum(layout.nbytes for _, layout in files),
        whole_nbytes=sum(pair.old.nbytes for pair in pairs),
        notes=notes,
        seconds=time.perf_counter() - begin,
    )


def _versions(
    output: Location, base: Named, version: int | None, base_version: int | None
) -> tuple[int, int]:
    """The version of the base, and the one that is made of it."""
    for name, given in (("version", version), ("base_version", base_version)):
        # of 18 digits at most, as they are read
        if given is not None and (type(given) is not int or not 0 <= given < 10**18):
            raise OptionRefused(f"{name}={given!r:.50} is not the number of a version")
    before, after = base_version, version
    places = places_of(base)
    if before is None and len(places) == 1:
        before = version_of(places[0])
    if after is None:
        after = version_named(output.absolute.name)
    if after is None:
        after = 1 + (before or 0)
    if before is None:
        before = max(0, after - 1)
    if after <= before:
        what = f"version {after} does not come after version {before}, which is the base"
        raise OptionRefused(what, hint="give --version and --base-version")
    return before, after


# ----------------------------------------------------------------------------------- what changed


class _Changes:
    """The changes of tensors, found one after the other: the frames of those that changed, the
    checksums of all before and of these after, the other names of those that have some.
    """

    def __init__(
        self, encoding: Encoding, algorithm: Algorithm, spool: Spool, checksums: Checksums
    ) -> None:
        self.encoding, self.algorithm = encoding, algorithm
        self.frames: dict[str, TensorRef] = {}
        self.before: dict[str, str] = {}
        self.tied: dict[str, str] = {}
        self.after: dict[str, str] = {}
        self._spool, self._checksums = spool, checksums

    def find(self, pairs: list[Pair], on_progress: OnProgress | None) -> None:
        """Find those of all pairs."""
        meter = Meter("read", sum(pair.old.nbytes for pair in pairs), on_progress)
        with read_soon([pair.old for pair in pairs], [pair.new for pair in pairs]):
            for pair in pairs:
                self._add(pair, meter)
            self._checksums.finish()
        meter.finish()

    def _add(self, pair: Pair, meter: Meter) -> None:
        before, after = digest(self.algorithm), digest(self.algorithm)

        def bytes_of_both() -> Iterator[tuple[Array, Array]]:
            for old, new in _side_by_side(pair, self._checksums):
                before.update(old)
                after.update(new)
                yield old, new
                meter.add(len(old))

        size = pair.old.nbytes
        if self.encoding == "xor":
            pieces = _xored(bytes_of_both(), size)
        elif size > MOST_PLACES:
            what = f"has {size} bytes, of which overwrite can say only the first {MOST_PLACES}"
            raise RefusedObject(what, where=pair.key, hint="use --encoding xor")
        else:
            pieces = _overwritten(bytes_of_both(), lambda: _side_by_side(pair, None))
        source, start = self._spool.append(pieces)
        self.before[pair.key] = before.hexdigest()
        self.tied |= dict.fromkeys(pair.others, pair.key)
        nbytes = source.size - start
        if nbytes:
            frame = Storage(source, start, nbytes, "cpu", pair.key, UINT8)
            self.frames[pair.key] = whole_storage(frame, 0, nbytes)
            self.after[pair.key] = after.hexdigest()


def _side_by_side(pair: Pair, checksums: Checksums | None) -> Iterator[tuple[Array, Array]]:
    """The bytes of both, in order."""
    old, new = (
        (np.frombuffer(chunk, np.uint8) for chunk in noted(ref, checksums))
        for ref in (pair.old, pair.new)
    )
    return aligned(old, new, CHUNK)


def _xored(pairs: Iterable[tuple[Array, Array]], size: int) -> Iterator[bytes]:
    """The frame of new XOR old; nothing where all is equal."""
    frame: Deflating | None = None
    equal = 0
    for old, new in pairs:
        changed = np.bitwise_xor(old, new)
        if frame is None and not changed.any():
            equal += len(changed)  # a tensor that did not change makes no frame at all
            continue
        if frame is None:
            frame = Deflating(size)
            for at in range(0, equal, CHUNK):
                yield frame.compress(bytes(min(CHUNK, equal - at)))
        yield frame.compress(changed)
    if frame is not None:
        yield frame.flush()


def _overwritten(pairs: Iterable[tuple[Array, Array]], again: Any) -> Iterator[bytes]:
    """The frame of places and new bytes; nothing where all is equal. How many they are comes first,
    then all places, so `again` gives the bytes of both twice more.
    """
    count = sum(int(np.count_nonzero(old != new)) for old, new in pairs)
    if not count:
        return
    frame = Deflating(4 + 5 * count)  # for each, four bytes of its place and the new byte
    yield frame.compress(count.to_bytes(4, "little"))
    at = 0
    for old, new in again():
        yield frame.compress((np.flatnonzero(old != new) + at).astype("<u4"))
        at += len(old)
    for old, new in again():
        yield frame.compress(new[old != new])
    yield frame.flush()


# -------------------------------------------------------------------------------- what is written


def _files(changes: _Changes, before: int, after: int) -> list[tuple[str, Layout]]:
    """The files of a delta, the index last."""
    metadata: dict[str, Any] = {
        "version": f"{after:06d}",
        "base_version": f"{before:06d}",
        DELTA_ENCODING: changes.encoding,
        "compression_format": ZSTD,
        "checksum_format": changes.algorithm,
        BASE_CHECKSUMS: changes.before,
    }
    if changes.tied:
        metadata[BASE_TIED] = changes.tied
    index = one_item("index", _index(metadata, dict.fromkeys(changes.frames, SHARD)))
    if not changes.frames:  # then there is no shard either
        return [(INDEX, index)]
    tensors = [(key, ref, UINT8) for key, ref in changes.frames.items()]
    shard = target_named("safetensors").lay_out(tensors, changes.after, str)
    return [(SHARD, shard), (INDEX, index)]


def _index(metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> bytes:
    return json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()


def _moved(raw: bytes, folder: str) -> bytes:
    """The index of the same files in another folder, beside it."""
    told = json.loads(raw)
    weight_map = {key: f"{folder}/{name}" for key, name in told["weight_map"].items()}
    return _index(told["metadata"], weight_map)


def _destination(
    place: Location, files: list[tuple[str, Layout]], *, force: bool, fsync: bool
) -> Destination:
    *shards, (index, laid_out) = files
    raw = laid_out.items[0].values
    assert isinstance(raw, bytes)
    named = place.child("model.safetensors")
    names = ShardNames(
        shards=[name for name, _ in shards],
        index=index,
        earlier=lambda: [path.name for path in earlier_files(named.path, others=True)],
        moved_index=lambda folder: _moved(raw, folder),
    )
    size = sum(layout.nbytes for _, layout in files)
    return file_output(named, names, in_folder=True, force=force, fsync=fsync, size=size)


def _draft(
    files: list[tuple[str, Layout]], output: Destination, on_progress: OnProgress | None
) -> None:
    written = Meter("write", sum(layout.nbytes for _, layout in files), on_progress)
    for name, layout in files:
        before = written.done

        def tell(position: int, before: int = before) -> None:
            written.at(before + position)

        with output.draft(name, layout.nbytes, tell) as draft:
            write_layout(layout, draft.stream, Tally(), Checksums())
            draft.commit()
        written.at(before + layout.nbytes)
        # what is sent to another machine is not a file here, which the library could read
        path = draft.place.local()
        if name == SHARD and path is not None and not isinstance(output.path, UrlPath):
            named = output.path.parent / name
            target_named("safetensors").check_written(path, named, len(layout.items))
    written.finish()


# --------------------------------------------------------------------------------- text and JSON


def delta_headline(result: DeltaResult) -> str:
    """The line that says what a delta is."""
    of = f"of {size_text(result.whole_nbytes)}"
    seconds = seconds_text(result.seconds)
    return f"{printable(result.path)}: {size_text(result.nbytes)} {of}, done in {seconds}"


def delta_lines(result: DeltaResult) -> Iterator[Row]:
    """What a delta holds, as rows."""
    yield Row("version", f"{result.base_version} → {result.version}")
    whole = count_text(result.tensors, "tensor")
    yield Row("tensors", f"{result.changed:,} of {whole} changed")
    yield Row("layout", f"{result.encoding}, zstd, {result.checksum}")
    yield from note_rows(result.notes)


DELTA = Fields(
    "path version base_version encoding checksum tensors changed bytes=nbytes "
    "whole_bytes=whole_nbytes notes seconds",
    seconds=lambda seconds: round(seconds, 6),
)
"""The document of a delta."""
