"""The containers that are read, as a table: how the first bytes of a file tell each, and which
function opens it, whose module is imported when a file looks so; and what else a file may be.

What lies inside a file (a record of an archive, a stream in a pickle) is opened by `open_source`
too, a few files deep. The total size to which the archives of one checkpoint inflate is compared
with the size of its files.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptconv.io.files import FilePool, noting_files
from ckptconv.io.location import Location
from ckptconv.io.source import Range, Source
from ckptconv.support.errors import ErrorCode, LimitExceeded, UnsupportedCheckpoint
from ckptconv.support.limits import in_force
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.settings import set_within

if TYPE_CHECKING:
    from ckptconv.formats.zip_archive import Record
    from ckptconv.io.inflate import Kind
    from ckptconv.tree.checkpoint import Checkpoint

HEAD = 512
"""Bytes by which a file is recognized."""


class NotForetold(Exception):
    """An index does not tell enough, or something is wrong: what it tells of must be opened."""


def named(path: str) -> Any:
    """What ``module.name`` is in this package; the module is imported now."""
    module, _, name = path.rpartition(".")
    # `sys.modules` would be quicker, and has modules that another thread has half imported
    return getattr(import_module(f"ckptconv.formats.{module}"), name)


# -------------------------------------------------------------------------------- what heads tell


def is_zip(head: bytes) -> bool:
    """Whether a file that starts with `head` (4 bytes are enough) is a zip archive."""
    return head[:4] == b"PK\3\4"


def is_gguf(head: bytes) -> bool:
    """Whether a file that starts with `head` (4 bytes are enough) is one of llama.cpp."""
    return head[:4] == b"GGUF"


def is_tar(head: bytes) -> bool:
    """Whether a file that starts with `head` (262 bytes are enough) is a tar archive."""
    return head[257:262] == b"ustar"


_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER
_PICKLED_MAGIC = partial(
    re.match,
    rb"\x80[\2-\5](?:\x95.{8})?\x8a\x0a%s\.|L%dL\n\."
    % (re.escape(_MAGIC_NUMBER.to_bytes(10, "little")), _MAGIC_NUMBER),
    flags=re.DOTALL,
    # protocols 4 and 5, which a user may choose, put the number into a frame, 0 and 1 write digits
)


def is_torch_legacy(head: bytes) -> bool:
    """Whether a file's `head` (32 bytes are enough) begins with the pickled magic number."""
    return _PICKLED_MAGIC(head) is not None


def is_safetensors(head: bytes) -> bool:
    """Whether a file that starts with `head` (some hundred bytes) is meant to be safetensors: JSON
    behind 8 bytes.

    A header length is never eight bytes of text, as the beginning of a JSON file would be.
    """
    return head[8:].lstrip().startswith(b"{") and not all(
        32 <= byte < 127 or byte in b"\t\r\n" for byte in head[:8]
    )


# Protocols 0 and 1 have no mark of their own: a dict, a list or an object as python's picklers
# begin them.
_PICKLE = partial(
    re.match,
    rb"\x80[\0-\5]|\((?:dp|lp)\d+\n|[}\]]q\0|c[A-Za-z_][\w.]*\n[A-Za-z_]\w*\n(?:p\d+\n|[()q])",
)


def is_raw_pickle(head: bytes) -> bool:
    """Whether `head` (some hundred bytes) begins a pickle, by its protocol or its first opcodes."""
    return _PICKLE(head) is not None


def packer_of(head: bytes) -> Any:
    """The module that unpacks a file which begins so; None where there is none: a Python may be
    built without the one or the other.
    """
    for row in STRANGERS:
        if row.packer and head.startswith(row.magic):
            with contextlib.suppress(ImportError):
                return import_module(row.packer)
    return None


# ---------------------------------------------------------------------------------- what is read

FirstReads = Callable[[bytes, int], "tuple[int, int]"]
"""From which byte to which opening a file reads beyond its head, by that head and its size."""

_TAIL = 64 << 10  # bytes in which the directory of an archive of some hundred records lies


def _header_of_safetensors(head: bytes, size: int) -> tuple[int, int]:
    end = 8 + int.from_bytes(head[:8], "little")
    if end > min(size, 8 + in_force().safetensors_header_bytes):
        return 0, 0  # refused before it is read
    return 0, end


class Format(NamedTuple):
    """A container in one file: whether a file's first bytes are its, and what opens it, as
    ``module.function``.

    `suffixes` are the ends of names that such files have in the folders of training. `is_certain`:
    a file that begins so is a checkpoint, and nothing else begins so. `first_reads` tells what can
    be fetched for many files at once.
    """

    matches: Callable[[bytes], bool]
    opened_by: str
    suffixes: tuple[str, ...] = ()
    is_certain: bool = False
    first_reads: FirstReads | None = None


FORMATS: tuple[Format, ...] = (
    Format(
        is_zip,
        "zip_kinds.open_zip",
        (".pt", ".pth", ".bin", ".ckpt", ".th", ".zip"),
        first_reads=lambda _, size: (size - _TAIL, size),
    ),
    Format(is_torch_legacy, "torch_legacy.open_torch_legacy", is_certain=True),
    Format(is_gguf, "gguf.open_gguf", (".gguf",), is_certain=True),
    Format(is_tar, "torch_tar.open_torch_tar", (".tar", ".nemo")),
    Format(
        is_safetensors,
        "safetensors.open_safetensors",
        (".safetensors",),
        is_certain=True,
        first_reads=_header_of_safetensors,
    ),
    Format(is_raw_pickle, "raw_pickle.open_raw_pickle", (".pkl", ".pickle")),
    Format(lambda head: packer_of(head) is not None, "packed.open_packed"),
)
"""The containers that are read, in the order in which they are tried."""

SUFFIXES = tuple(suffix for row in FORMATS for suffix in row.suffixes)
"""The ends of names of files that may be checkpoints."""

_DEPTH: ContextVar[int] = ContextVar("files around the one that is opened", default=0)


def open_source(source: Source) -> Checkpoint:
    """Open what a source holds; on failure the caller closes it."""
    depth = _DEPTH.get()
    most = in_force().files_in_files
    if depth > most:
        what = f"holds more than {most} files within files"
        raise LimitExceeded(what, limit="files_in_files", allowed=most, path=source.path)
    head = source.read(0, min(HEAD, source.size))
    row = _format_of(head)
    if row is None:
        raise stranger(source, head)
    with set_within(_DEPTH, depth + 1):
        found: Checkpoint = named(row.opened_by)(source)
    return found


def _format_of(head: bytes) -> Format | None:
    return next((row for row in FORMATS if row.matches(head)), None)


def open_file(place: Location, pool: FilePool | None = None) -> Checkpoint:
    """Open a checkpoint of one file, or of one of a pool; its sources are closed if that fails."""
    source = place.open(pool)
    with closed_on_error(source):
        return open_source(source)


@contextlib.contextmanager
def closed_on_error(opened: Any) -> Iterator[None]:
    """Close what is open where the block fails, and only then."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


@contextlib.contextmanager
def all_open(
    around: Location, places: Sequence[Location], pool: FilePool | None
) -> Iterator[list[Checkpoint]]:
    """Checkpoints of one file each, asked for at once; they stay open, unless the block fails."""
    around.foresee(places, first_reads)
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(open_file(place, pool)) for place in places]
        opened.pop_all()


def first_reads(head: bytes, size: int) -> list[Range]:
    """The runs of bytes beyond its `head` that opening a file of `size` bytes will read."""
    row = _format_of(head)
    if row is None or row.first_reads is None:
        return []
    return _beyond(head, *row.first_reads(head, size))


_END = 22 + 0xFFFF  # bytes in which the end record of an archive lies


def scanned_first(head: bytes, size: int) -> list[Range]:
    """The same of `scan`, which also looks for an archive at the end of any file."""
    return _beyond(head, size - _END, size)


def _beyond(head: bytes, first: int, end: int) -> list[Range]:
    first = max(len(head), first)
    return [(first, end - first)] if first < end else []


def kind_of_head(head: bytes) -> bool | None:
    """Whether the first bytes of a file are those of a checkpoint; None where that cannot be told
    without opening it: pickles and archives hold other things too.
    """
    rows = [row for row in FORMATS if row.matches(head)]
    if not rows or any(row.is_certain for row in rows):
        return bool(rows)
    name_end = 30 + int.from_bytes(head[26:28], "little")  # in the first local header
    if is_zip(head) and head[30:name_end].endswith(_FIRST_RECORDS):
        return True
    return None


# How the first record of an archive is called that torch or numpy wrote
_FIRST_RECORDS = (b"/data.pkl", b".npy")


# ------------------------------------------------------------------------------ what is inflated

# A record by itself is held against its own deflated bytes (`io.inflate.InflatedSource`); many
# small ones, in one archive or in archives within archives, are a bomb too.


@dataclass(slots=True)
class _Opening:
    """What is being opened: the size of its files, each counted once, and what was claimed."""

    size: int = 0
    claimed: Counter[Kind] = field(default_factory=Counter)
    files: set[tuple[int, int]] = field(default_factory=set)

    def note(self, found: os.stat_result) -> None:
        """Count a file that is opened."""
        identity = (found.st_dev, found.st_ino)
        if identity not in self.files:
            self.files.add(identity)
            self.size += found.st_size


_OPENING: ContextVar[_Opening | None] = ContextVar("checkpoint being opened", default=None)


@contextlib.contextmanager
def counted_together() -> Iterator[None]:
    """Within the block, all that is opened is one checkpoint; a block in it counts with it."""
    if _OPENING.get() is not None:
        yield
        return
    opening = _Opening()
    with set_within(_OPENING, opening), noting_files(opening.note):
        yield


def claim_records(source: Source, records: Iterable[Record]) -> None:
    """Count the deflated records of an archive; `LimitExceeded` when they and those before inflate
    to too much.

    One that is a bomb by itself is not counted, for it is refused where it is used, by its name.
    """
    from ckptconv.io.inflate import is_bomb  # most checkpoints are not deflated

    claimed = sum(
        item.size for item in records if item.deflated and not is_bomb(item.stored, item.size)
    )
    if claimed:
        _claim(source, claimed, "records", "inflated")


def claim_pickle(source: Source, size: int) -> None:
    """Count a deflated text or pickle that is read; `LimitExceeded` if all so far are too much."""
    _claim(source, size, "pickles and texts", "pickle")


def _claim(source: Source, size: int, called: str, kind: Kind) -> None:
    from ckptconv.io.inflate import IS_BOMB, refuse_bomb

    opening = _OPENING.get() or _Opening(source.size)
    opening.claimed[kind] += size
    whole, claimed = opening.size, opening.claimed[kind]
    what = f"its deflated {called} claim to inflate from {whole} to {claimed} bytes in total"
    refuse_bomb(whole, claimed, what, kind, path=source.path, advice=IS_BOMB)


# --------------------------------------------------------------------------------- what is not


class Stranger(NamedTuple):
    """What a file is that starts with `magic` at byte `at`, and what its owner can do; of a packed
    one also the `packer`, the module of Python that unpacks it.
    """

    at: int
    magic: bytes
    what: str
    hint: str | None = None
    is_packed: bool = False
    packer: str = ""


STRANGERS: tuple[Stranger, ...] = (
    Stranger(0, b"version https://git-lfs", "is a git-LFS pointer, not the file itself",
        "run: git lfs pull"),
    Stranger(0, b"\x1f\x8b\x08", "is gzip-compressed", "unpack it first: gunzip", True,
        "gzip"),
    Stranger(0, b"BZh", "is bzip2-compressed", "unpack it first: bunzip2", True, "bz2"),
    Stranger(0, b"\xfd7zXZ\0", "is xz-compressed", "unpack it first: unxz", True, "lzma"),
    Stranger(0, b"\x04\x22\x4d\x18", "is lz4-compressed", "unpack it first: unlz4", True),
    Stranger(0, b"\x28\xb5\x2f\xfd", "is zstd-compressed", "unpack it first: unzstd", True,
        "compression.zstd"),
    Stranger(0, b"7z\xbc\xaf\x27\x1c", "is a 7z archive", "unpack it first", True),
    Stranger(0, b"Rar!", "is a rar archive", "unpack it first", True),
    Stranger(0, b"PK\5\6", "is an empty zip archive"),
    Stranger(0, b"\x89HDF\r\n\x1a\n", "is an HDF5 file (Keras), not a PyTorch checkpoint"),
    Stranger(0, b"\x93NUMPY", "is a numpy array file, not a PyTorch checkpoint",
        "numpy.savez makes an archive of it, which is read: np.savez('a.npz', a=np.load('a.npy'))"),
    Stranger(4, b"TFL3", "is a TensorFlow Lite model, not a PyTorch checkpoint"),
    Stranger(0, b"model_checkpoint_path:", "is the list of a TensorFlow checkpoint, not a PyTorch "
                                           "checkpoint"),
    Stranger(0, b"\x08\x01\x12", "is a TensorFlow SavedModel, not a PyTorch checkpoint"),
    Stranger(0, b"\x08", "looks like an ONNX or other protobuf model, not a PyTorch checkpoint"),
)  # fmt: skip
"""What people meet under a checkpoint's name; the first that matches is named in the error."""

# The names of the files of a TensorFlow checkpoint's values, one behind another, unmarked
_TENSORFLOW_SHARD = partial(re.fullmatch, r".+\.data-\d{5}-of-\d{5}")

# tensorflow/core/lib/io/format.h: kTableMagicNumber
_TABLE_END = (0xDB4775248B80FB57).to_bytes(8, "little")


def stranger(source: Source, head: bytes) -> UnsupportedCheckpoint:
    """The error that says what a file is that begins with `head`, and what to do."""
    what, hint, code = _what_else(source, head)
    return UnsupportedCheckpoint(what, path=source.path, hint=hint, code=code)


def _what_else(source: Source, head: bytes) -> tuple[str, str | None, ErrorCode]:
    if not head:
        return "is empty (0 bytes)", "fetch or save it again", ""
    has_its_name = _TENSORFLOW_SHARD(source.path.name) is not None
    known = next((item for item in STRANGERS if head[item.at :].startswith(item.magic)), None)
    # one byte tells little: the values of a shard of TensorFlow may begin with it too
    if known is not None and not (has_its_name and len(known.magic) == 1):
        return known.what, known.hint, "compressed" if known.is_packed else ""
    if source.read(max(0, source.size - 8), min(8, source.size)) == _TABLE_END:
        return "is the index of a TensorFlow checkpoint, not a PyTorch checkpoint", None, ""
    if has_its_name:
        return "is a part of a TensorFlow checkpoint, not a PyTorch checkpoint", None, ""
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        hint = "the download failed or needs a login; fetch it again"
        return "is a web page, not a checkpoint", hint, ""
    if all(byte >= 32 or byte in b"\t\n\r" for byte in head):
        kind = "a JSON text" if text.startswith((b"{", b"[")) else "a text file"
        return f"is {kind}, not a checkpoint ({_beginning(head)})", _TEXT_HINT, "text"
    return "is not a checkpoint of a known kind", _UNKNOWN_HINT, ""


def _beginning(head: bytes) -> str:
    """The first words of a text, which often say what went wrong where it was fetched."""
    line = " ".join(head.decode("latin-1").split())
    return f"it begins: {line[:_SHOWN_OF_TEXT]}" + ("…" if len(line) > _SHOWN_OF_TEXT else "")


_SHOWN_OF_TEXT = 40
_TEXT_HINT = (
    "if it was downloaded, an error was saved in its place: fetch it again; otherwise name the "
    "file with the weights"
)
_UNKNOWN_HINT = (
    "check that it is complete and unpacked, and which program wrote it; docs/containers.md "
    "lists what is read"
)
