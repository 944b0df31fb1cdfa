"""Is it safe to load? Judges files and folders by the worst name in them; executes nothing. What
came out of a file is escaped where it is shown.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from ckptconv.formats.containers import named, open_file, scanned_first
from ckptconv.formats.zip_directory import joined_archives
from ckptconv.io.location import Location
from ckptconv.io.open_files import Readable
from ckptconv.io.places import LocalPlace, Place, place_of
from ckptconv.io.source import CHUNK, RangeSource, Source, WrappedSource
from ckptconv.objects.threats import LEVELS, Level
from ckptconv.scan.pickles import Room, Sighting, Stream
from ckptconv.scan.scanner import Scanner, is_inert
from ckptconv.support.choices import refuse_no_path, spelling_checked
from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.support.limits import Limits, in_force, limits
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.report import LISTED, Fields, Row, html_table, short_repr
from ckptconv.support.settings import collector_paused
from ckptconv.support.text import count_text

__all__ = ["Scan", "ScannedFile", "Sighting", "scan_checkpoint"]


@dataclass(frozen=True, slots=True, repr=False)
class ScannedFile:
    """What was found in a file: its `kind`, how many `pickles`, nested ones included."""

    path: str
    kind: str
    pickles: int
    findings: tuple[Sighting, ...]

    @property
    def level(self) -> Level:
        """The worst of its findings; plain where there is none."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="plain")

    def __repr__(self) -> str:
        pickles = count_text(self.pickles, "pickle")
        return short_repr("ScannedFile", Path(self.path).name, self.kind, self.level, pickles)


@dataclass(frozen=True, slots=True, repr=False)
class Scan:
    """The result of a scan, file by file."""

    path: str
    files: tuple[ScannedFile, ...]

    @property
    def level(self) -> Level:
        """The worst of its files."""
        return max((file.level for file in self.files), key=LEVELS.index, default="plain")

    @property
    def dangerous(self) -> tuple[Sighting, ...]:
        """Everything that is dangerous."""
        every = (finding for file in self.files for finding in file.findings)
        return tuple(finding for finding in every if finding.level == "dangerous")

    def __bool__(self) -> bool:
        """Raises `TypeError`: a result that is always true would be taken for a safe file."""
        raise TypeError("a Scan is neither true nor false: write .level or .dangerous")

    def __repr__(self) -> str:
        name, found = Path(self.path).name or self.path, len(self.dangerous)
        dangerous = f"{found:,} dangerous" if found else None
        files = count_text(len(self.files), "file")
        return short_repr("Scan", name, self.level, files, dangerous)

    def _repr_html_(self) -> str:
        every = ((file.path, one) for file in self.files for one in file.findings)
        odd = (
            (path, one.level, one.name, one.reason) for path, one in every if one.level != "plain"
        )
        return html_table(f"{self.path}: {self.level}", odd)


@spelling_checked
def scan_checkpoint(source: Place | Readable, *, on_progress: OnProgress | None = None) -> Scan:
    """Scan a file, or all files in a folder and its subfolders.

    Links to folders are not followed, which is a finding, as is what cannot be read of the things
    in a folder; raises `CheckpointError` where `source` itself cannot be. `on_progress` is called
    with a `Progress`, about once a MiB, for the files all together.
    """
    if not hasattr(source, "read"):
        refuse_no_path(source=source)
    root = place_of(source)
    if not root.is_folder():
        return Scan(str(root), (_scan_file(root, Meter("read", _size(root), on_progress)),))
    closed: list[ScannedFile] = []

    def note(error: OSError) -> None:
        what = f"cannot be listed: {error.strerror}"
        if error.filename == str(root):
            raise UnsupportedCheckpoint(what, path=root) from error
        closed.append(_unread(error.filename, what))

    listed = list(_listed(root, note))
    root.foresee(listed, scanned_first)
    read = Meter("read", sum(map(_size, listed)) if on_progress else 0, on_progress)
    files = [_scan_listed(item, read) for item in listed]
    return Scan(str(root), (*files, *closed))


def _size(place: Location) -> int:
    """The size of a file that will be scanned; 0 for what will not be."""
    try:
        path = place.local()
        if path is None:
            with closing(place.open()) as source:
                return source.size
        found = path.stat()
    except (CheckpointError, OSError, ValueError):
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


class _CountedSource(WrappedSource):
    """A file whose every MiB counts once, when first looked at: a scan goes back and forth."""

    def __init__(self, inner: Source, read: Meter) -> None:
        super().__init__(inner)
        self._read = read
        self._met = bytearray(-(-self.size // CHUNK))
        self._counted = 0

    def read_into(self, offset: int, view: memoryview) -> None:
        super().read_into(offset, view)
        self._note(offset, len(view))

    def read(self, offset: int, nbytes: int) -> bytes:
        found = super().read(offset, nbytes)
        self._note(offset, nbytes)
        return found

    def count_rest(self) -> None:
        """The scan is over: what it had no need of is done too."""
        self._read.add(self.size - self._counted)

    def _note(self, offset: int, nbytes: int) -> None:
        for block in range(offset // CHUNK, -(-(offset + nbytes) // CHUNK)):
            if block < len(self._met) and not self._met[block]:
                self._met[block] = 1
                count = min(CHUNK, self.size - block * CHUNK)
                self._counted += count
                self._read.add(count)


def _listed(home: Location, note: Callable[[OSError], None]) -> Iterator[Location]:
    """The files of a folder and of those in it, and links to further folders."""
    folder = home.local()
    if folder is None:
        yield from _listed_elsewhere(home)
        return
    for base, folders, names in os.walk(folder, onerror=note):
        folders.sort()  # in place: it is also the order in which os.walk goes on
        links = [name for name in folders if Path(base, name).is_symlink()]
        yield from (LocalPlace(Path(base, name)) for name in sorted([*names, *links]))


def _listed_elsewhere(folder: Location) -> Iterator[Location]:
    """The same where there are no links, by names."""
    inside = folder.list()
    kinds = [item.kind() for item in inside]
    yield from (item for item, kind in zip(inside, kinds, strict=True) if kind == "file")
    for item, kind in zip(inside, kinds, strict=True):
        if kind == "folder":
            yield from _listed_elsewhere(item)


def _unread(path: str, why: str) -> ScannedFile:
    return ScannedFile(path, "unread", 0, (Sighting("", "", "unknown", why, 0),))


def _scan_listed(place: Location, read: Meter) -> ScannedFile:
    if place.is_folder():
        what = "is a link to a folder, which was not followed; name it to scan it"
        return _unread(str(place), what)
    try:
        return _scan_file(place, read, in_folder=True)
    except CheckpointError as error:
        return _unread(str(place), error.what)


def _scan_file(place: Location, read: Meter, *, in_folder: bool = False) -> ScannedFile:
    try:
        source = _CountedSource(place.open(), read)
    except ValueError as error:
        raise UnsupportedCheckpoint("is not a file name", path=place) from error
    scanner = Scanner(Room(source.size))
    with closing(source):
        kind = scanner.scan(Stream(source))
    source.count_rest()
    found = dict.fromkeys(scanner.findings)
    classes = {finding.name.rpartition(".")[2] for finding in found}
    # items of a DCP folder, one pickle after another: not a checkpoint
    is_joined = kind.endswith((" zips", " pickles"))
    if in_folder and place.name.endswith(".metadata") and classes & _METADATA:
        found = dict.fromkeys(_items(place)) | found
    elif scanner.pickles and not is_joined and all(finding.level == "plain" for finding in found):
        found |= dict.fromkeys(_malformed(place))
    findings = sorted(found, key=lambda finding: -LEVELS.index(finding.level))
    return ScannedFile(str(place), kind, scanner.pickles, tuple(findings))


def _malformed(path: Location) -> Iterator[Sighting]:
    """Why a conversion refuses a file of plain names: it can be read in two ways, one scanned."""
    most = in_force()
    nodes = min(most.nodes, _OPENED.nodes)
    pickle_bytes = min(most.pickle_bytes, _OPENED.pickle_bytes)
    try:
        with limits(nodes=nodes, pickle_bytes=pickle_bytes), collector_paused(), open_file(path):
            return
    except MalformedCheckpoint as error:
        yield Sighting(error.where or "", "", "unknown", f"malformed: {error.what}", 0)
    except (CheckpointError, OSError, ValueError):
        return  # not a checkpoint, or too large to be opened just for this


# scanning takes little memory whatever a pickle holds; opening does not
_OPENED = Limits(nodes=1_000_000, pickle_bytes=1 << 26)


# -------------------------------------------------------------------------------- items of a folder

_METADATA = frozenset(("Metadata", "MCoreMetadata"))


def _items(path: Location) -> tuple[Sighting, ...]:
    """What was found in the items that the metadata of a DCP folder place where no file or archive
    begins.

    An item that is not a tensor is unpickled, wherever the metadata says that it lies. Source:
    `DefaultLoadPlanner.load_bytes`.
    """
    try:
        return tuple(_item_findings(path))
    except CheckpointError as error:
        what = error.what
    except ValueError:
        what = "has an impossible file name"
    return (Sighting("", "", "unknown", f"{what}, so its items were not looked at", 0),)


def _item_findings(place: Location) -> Iterator[Sighting]:
    with closing(place.open()) as source:
        items = named("folders.dcp_metadata.read_metadata")(source).items.values()
    places: dict[str, set[tuple[int, int]]] = {}
    for item in items:
        places.setdefault(item.relative_path, set()).add((item.offset, item.length))
    for name, wanted in places.items():
        with closing(place.beside(name).open()) as source:
            yield from _range_findings(source, name, wanted - {(0, source.size)})


def _range_findings(source: Source, name: str, wanted: set[tuple[int, int]]) -> Iterator[Sighting]:
    """What lies in ranges of a file that are not archives; those are looked into with the file."""
    if not wanted:
        return
    scanner = Scanner(Room(source.size))
    ranges = sorted(wanted - set(joined_archives(source)))
    # else a small file could make any amount of work
    if sum(length for _, length in ranges) > source.size:
        what = "places items on top of each other; none of them was looked at"
        yield Sighting(name, "", "unknown", what, 0)
        return
    for offset, length in ranges:
        scanner.scan(Stream(RangeSource(source, offset, length), f"{name}/byte {offset}"))
    yield from (finding for finding in scanner.findings if finding.level != "plain")


# ------------------------------------------------------------------------------------ text and JSON


def scan_headline(scan: Scan) -> str:
    """The line that says how safe a path is."""
    pickles = count_text(sum(file.pickles for file in scan.files), "pickle")
    if not scan.files:
        return f"{printable(scan.path)}: a folder without files"
    said = f"{_SAID[scan.level]} ({count_text(len(scan.files), 'file')}, {pickles})"
    kind = scan.files[0].kind
    if len(scan.files) == 1 and not scan.files[0].findings and is_inert(kind):
        said = f"not a checkpoint ({kind}); nothing in it can run when it is loaded"
    return f"{printable(scan.path)}: {said}"


_SAID = {
    "plain": "holds only what ordinary checkpoints hold",
    "unknown": "nothing dangerous was found, but some of it is unknown",
    "dangerous": "DANGEROUS: do not load",
}


def scans_headline(levels: Sequence[str]) -> str:
    """How several paths were judged; ``unread`` is what could not be."""
    counted = Counter(levels)
    order = ("dangerous", "unknown", "plain", "unread")
    said = ", ".join(f"{counted[level]} {level}" for level in order if counted[level])
    return f"{count_text(len(levels), 'path')}: {said}"


def scan_lines(scan: Scan) -> Iterator[Row]:
    """What was found, as rows, file by file; plain names are left out."""
    for file in scan.files:
        odd = [finding for finding in file.findings if finding.level != "plain"]
        yield from (Row(one.level, _finding_text(scan, file, one)) for one in odd[:LISTED])
        if len(odd) > LISTED:
            yield Row(odd[LISTED].level, f"{printable(file.path)}: and {len(odd) - LISTED:,} more")


def _finding_text(scan: Scan, file: ScannedFile, finding: Sighting) -> str:
    place = [finding.where, finding.name]
    if len(scan.files) > 1:
        place.insert(0, file.path)
    return ": ".join([*(printable(part) for part in place if part), printable(finding.reason, 500)])


SCAN = Fields(
    "path level files",
    files=Fields(
        "path kind level pickles findings", findings=Fields("level name where byte=at reason")
    ),
)
"""The document of a scan, plain names included."""
