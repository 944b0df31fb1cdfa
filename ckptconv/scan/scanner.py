"""What the streams in one source name, judged: nothing in them is executed.

Every source is looked into, whatever it is called: pickles that follow each other, the records of
zip archives, the members of tar files, pickles and archives that pickles hold as bytes, and the
pickles that stable-baselines3 writes as base64 text. A pickle that breaks is followed up to there,
which is what an unpickler would have executed.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from ckptconv.formats.containers import STRANGERS, is_safetensors, is_tar, is_zip
from ckptconv.formats.npz import holds_numbers
from ckptconv.formats.zip_archive import Record, read_directory
from ckptconv.formats.zip_directory import joined_archives
from ckptconv.io.source import CHUNK, SMALL, MemorySource, Source
from ckptconv.pickles.tracer import trace_pickle
from ckptconv.scan.pickles import PickleScanner, Sighting, Stream, inflated_head
from ckptconv.scan.script_code import (
    FLATBUFFER,
    Called,
    judged_bytecode,
    judged_code,
    judged_flatbuffer,
    old_code_records,
    script_records,
)
from ckptconv.support.errors import CheckpointError
from ckptconv.support.limits import in_force
from ckptconv.support.text import count_text

# ------------------------------------------------- what a source is that `formats` does not know

_BLOCK = 512  # bytes of a tar header, and of what the parts of a tar file are multiples of
# the older container of lzma, which has no magic of its own
_LZMA = re.compile(rb"\x5d\0\0..\xff{8}", re.DOTALL).match
_NUMPY = b"\x93NUMPY"


def _is_tar_header(block: bytes) -> bool:
    """Whether a member of a tar file begins so; `tarfile` knows it by its checksum alone. That is
    the sum of the 512 bytes, those of the checksum itself taken as spaces.
    """
    field = block[148:156].strip(b" \0")
    if len(block) < _BLOCK or not field.isdigit() or b"8" in field or b"9" in field:
        return False
    return int(field, 8) == sum(block) - sum(block[148:156]) + 8 * 0x20


def _may_be_json(head: bytes) -> bool:
    """Whether a text that begins so may be a JSON object; blanks may stand before it."""
    return head.lstrip(b" \t\r\n")[:1] in (b"{", b"")


def _text_kind(head: bytes) -> str | None:
    """What a file is that begins so and in which no pickle was found; None for what is not text."""
    if not head:
        return "empty file"
    if any(byte < 32 and byte not in b"\t\n\r" for byte in head):
        return None
    text = head.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "git-LFS pointer"
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "web page"
    return "JSON text" if text[:1] in (b"{", b"[") else "text"


_INERT = frozenset(("empty file", "git-LFS pointer", "web page", "JSON text", "text"))


def is_inert(kind: str) -> bool:
    """Whether a file of this kind, without findings, is not a checkpoint: nothing in it can run."""
    return kind in _INERT


def _is_zlib(head: bytes) -> bool:
    """Whether it begins as a zlib stream (RFC 1950) with a window of 32 KiB, and inflates."""
    if len(head) < 8 or head[0] != 0x78 or head[1] & 0x20 or int.from_bytes(head[:2], "big") % 31:
        return False
    with contextlib.suppress(zlib.error):
        return bool(zlib.decompressobj().decompress(head, 512))
    return False


def _numpy_end(head: bytes) -> int:
    """The byte at which the pickle of a numpy file of objects begins; 0 for any other file."""
    if not head.startswith(_NUMPY) or len(head) < 12:
        return 0
    width = 2 if head[6] == 1 else 4
    return 8 + width + int.from_bytes(head[8 : 8 + width], "little")


# ----------------------------------------------------------------------------------------- archives

_HEAD = 512  # bytes of a deflated record by which it is seen whether to inflate it
_LIKELY = re.compile(rb"\x80[\0-\5]|[ci][A-Za-z_][\w.]{0,100}\n[A-Za-z_][\w.]{0,100}\n|PK\x03\x04")
_STORAGE = re.compile(r"(?:^|/)data/\d+$").search  # the names of torch's storages
_LOOK = 64  # bytes for which a look in vain counts at least
_SCRIPT_RECORD = re.compile(rb"constants\.pkl|bytecode\.pkl|model\.json", re.IGNORECASE).search
_DIRECTORY_END = b"PK\5\6"


def _windows(source: Source, more: int, *, align: int = 1) -> Iterator[tuple[int, bytes]]:
    """The bytes of a source, by places, holes left out: a chunk and so many bytes `more` each."""
    start = source.data_from(0)
    while start < source.size:
        start -= start % align
        yield start, source.read(start, min(CHUNK + more, source.size - start))
        start = source.data_from(start + CHUNK)


def _may_be_script(source: Source) -> bool:
    """Whether an archive without a usable directory may be TorchScript to torch.

    It is one if it has the names of TorchScript, and an end that torch may find.

    Names are compared as miniz does, without case. A file without an end, cut off while it was
    copied, torch does not open.
    """
    names = ends = False
    for _, window in _windows(source, 16):
        names = names or _SCRIPT_RECORD(window) is not None
        ends = ends or _DIRECTORY_END in window
        if names and ends:
            return True
    return False


_JUDGES = {"bytecode": judged_bytecode, "text": judged_code}


class ArchiveScanner(PickleScanner):
    """Looks into the records of archives, wherever they lie."""

    def _zip(self, stream: Stream) -> str:
        source, where = stream.source, stream.where
        try:
            records = read_directory(source)
        except CheckpointError as error:
            parts = joined_archives(source)
            if len(parts) > 1:
                for start, size in parts:
                    self.scan(stream.part(start, size, stream.named(f"byte {start}")))
                return f"{len(parts)} zips"
            what = "what is stored or deflated in it was searched"
            self._odd(where, f"its directory was not followed ({error.what}); {what}")
            if _may_be_script(source):
                what = (
                    "seems to be a TorchScript archive; torch may use its directory and run code "
                    "that was not judged"
                )
                self.findings.append(Sighting(where, "", "dangerous", what, 0))
            self._sweep(stream)
            return "zip without a usable directory"
        source.foresee([(record.offset, min(record.size, SMALL)) for record in records.values()])
        for name, record in records.items():
            inside, array = stream.named(name), _STORAGE(name) is not None
            if record.deflated:
                self._deflated(stream, record.offset, record.stored, inside)
            else:
                self.scan(stream.part(record.offset, record.size, inside, array=array))
        self._scripts(stream, records)
        return "zip"

    def _scripts(self, stream: Stream, records: dict[str, Record]) -> None:
        """Judge the code of a TorchScript archive, and the bytecode of one for mobiles."""
        for name, kind in script_records(records).items():
            inside = stream.named(name)
            text = self._whole(stream.source, records[name], inside)
            if kind != "model":
                self._note_called(inside, _JUDGES[kind](text))
                continue
            try:
                keys = old_code_records(text, name, records, stream.source.path)
            except CheckpointError as error:
                self._odd(inside, f"{error.what}, so which records are code is not known")
                continue
            for key in keys:
                code = stream.named(key)
                self._note_called(code, judged_code(self._whole(stream.source, records[key], code)))

    def _flatbuffer(self, stream: Stream) -> None:
        source, where, most = stream.source, stream.where, in_force().text_bytes
        what = "of its code, only what is known to be dangerous is reported"
        self._odd(where, f"is a flatbuffer module for mobile devices; {what}")
        self._note_called(where, judged_flatbuffer(source.read(0, min(source.size, most))))
        if source.size > most:
            what = f"is a flatbuffer of more than {most} bytes; the rest was not looked at"
            self._odd(where, what, most)

    def _note_called(self, where: str, called: list[Called]) -> None:
        self.findings += [Sighting(where, name, *verdict, at) for name, verdict, at in called]

    def _whole(self, source: Source, record: Record, where: str) -> bytes:
        """The bytes of a record, as far as the limit of texts goes."""
        most = in_force().text_bytes
        if record.deflated:
            raw, cut = self._room.inflate(source, record.offset, record.stored, pickle=False)
        else:
            raw, cut = source.read(record.offset, min(record.size, most)), record.size > most
        if cut:
            what = f"is code of more than {len(raw)} bytes; the rest was not looked at"
            self._odd(where, what, len(raw))
        return raw

    def _tar(self, stream: Stream) -> None:
        """Look into the members of a tar file, wherever a header lies; sweep it for patterns."""
        self._pickles(stream, 0)
        for start, window in _windows(stream.source, 0, align=_BLOCK):
            for at in range(0, len(window), _BLOCK):
                if _is_tar_header(window[at : at + _BLOCK]):
                    self._pickles(stream, start + at + _BLOCK)
        self._sweep(stream)

    def _deflated(self, stream: Stream, offset: int, stored: int, where: str) -> None:
        """Look into a deflated record; one that begins as nothing known is not inflated."""
        source = stream.source
        head = inflated_head(source, offset, stored, _HEAD)
        trace = trace_pickle(MemorySource(head, source.path), _numpy_end(head))
        is_followed = trace.end or trace.cut or trace.stopped or trace.names or trace.alarms
        is_other = is_zip(head) or is_tar(head) or _may_be_json(head)
        if not (is_followed or is_other):
            self._room.followed += _LOOK
            return
        inflated, cut = self._room.inflate(source, offset, stored, pickle=not is_other)
        if inflated:
            self.scan(stream.made(inflated, where, array=_STORAGE(where) is not None))
        if cut and (inflated or not self._room.is_used_up):
            what = f"inflates to more than {len(inflated)} bytes; the rest was not looked at"
            more = f"--limit pickle_ratio={2 * in_force().pickle_ratio} looks further"
            self._odd(where, f"{what} ({more})")
        self._room.is_used_up |= not inflated

    def _sweep(self, stream: Stream) -> None:
        """Look at every place of a source where a pickle, or a record of an archive, may begin."""
        done = 0
        for start, window in _windows(stream.source, 512):
            for likely in _LIKELY.finditer(window):
                at = start + likely.start()
                if at < done or likely.start() >= CHUNK:
                    continue
                if self._room.is_searched:
                    more = f"--limit scanned_in_vain={2 * self._room.followed} looks further"
                    what = (
                        "holds too many places where a pickle seems to start; the rest was not "
                        "looked at"
                    )
                    self._odd(stream.where, f"{what} ({more})", at)
                    return
                look = self._local_record if likely[0][:2] == b"PK" else self._uncertain
                done = max(done, look(stream, at))

    def _uncertain(self, stream: Stream, at: int) -> int:
        """Follow what may be a pickle; the byte behind it, or 0 to look at what is in it too."""
        self._room.followed += _LOOK
        return self._pickle(stream, at, certain=False)

    def _local_record(self, stream: Stream, at: int) -> int:
        """Look into a record by its local header alone; the byte behind the pickle in it, or 0."""
        source = stream.source
        header = source.read(at, min(30, source.size - at))
        if len(header) < 30:
            return 0
        offset = at + 30 + sum(struct.unpack("<HH", header[26:30]))
        if offset >= source.size:
            return 0
        if header[8:10] == b"\0\0":
            return self._uncertain(stream, offset)
        self._deflated(stream, offset, source.size - offset, stream.named(f"byte {at}"))
        return 0


# ------------------------------------------------------------------------------------------- files

_TAIL = 22 + 0xFFFF  # bytes in which the end record of a zip archive lies
# The pickles in the JSON of stable-baselines3 (common/save_util.py). Its `load` gives them to
# cloudpickle. Any character of a JSON text may be escaped, and `base64.b64decode` passes over
# what is not base64.
_SERIALIZED = re.compile(
    rb'"%s"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")'
    % b"".join(rb"(?:%c|\\u00(?i:%02x))" % (byte, byte) for byte in b":serialized:"),
    re.DOTALL,
)


class Scanner(ArchiveScanner):
    """What has been found in one file so far."""

    def scan(self, stream: Stream) -> str:
        """Look into a stream for whatever it is; says what that is."""
        source, where = stream.source, stream.where
        if stream.depth > (most := in_force().scanned_depth):
            what = f"streams are nested more than {most} deep; deeper ones were not looked at"
            self._odd(where, f"{what} (--limit scanned_depth={2 * most} looks further)")
            return "unknown"
        head = source.read(0, min(512, source.size))
        array = stream.array or holds_numbers(head)
        # what lies in an archive, or behind one, is not an array: all alarms count there
        stream = stream._replace(array=False)
        if is_zip(head):
            return self._zip(stream)
        if is_tar(head) or _is_tar_header(head):
            self._tar(stream)
            return "tar"
        if head[4:8] == FLATBUFFER:
            self._flatbuffer(stream)
        count = self._pickles(stream._replace(array=array), _numpy_end(head))
        tail = min(_TAIL, source.size)
        if not stream.depth and b"PK\5\6" in source.read(source.size - tail, tail):
            self._sweep(stream)
            return "zip behind other bytes"
        if count:
            return "pickle" if count == 1 else f"{count} pickles"
        return self._no_pickle(stream, head)

    def _no_pickle(self, stream: Stream, head: bytes) -> str:
        if is_safetensors(head):
            return "safetensors"
        if _may_be_json(head):
            self._json(stream)
        packed = (
            one for one in STRANGERS if one.is_packed and head[one.at :].startswith(one.magic)
        )
        stranger = next(packed, None)
        if stranger is not None:
            self._odd(stream.where, f"{stranger.what}: what is in it was not looked at")
        elif _is_zlib(head) or _LZMA(head):
            what = "looks compressed by zlib or lzma, as joblib does it"
            self._odd(stream.where, f"{what}: what is in it was not looked at")
        return _text_kind(head) or "no pickle"

    def _json(self, stream: Stream) -> None:
        """Look into the pickles in a text of stable-baselines3. Functions in them are byte code, of
        which nothing is known.
        """
        source, where, limits = stream.source, stream.where, in_force()
        most = limits.text_bytes
        texts = (match[1] for match in _SERIALIZED.finditer(source.read(0, min(source.size, most))))
        pickles = list(dict.fromkeys(islice(texts, limits.scanned_pickles)))
        if source.size > most:
            what = f"is a text of more than {most} bytes; the rest was not looked at"
            self._odd(where, what, most)
        if next(texts, None) is not None:
            self._more_pickles(where, "stand in one text")
        if pickles:
            what = "as base64 text, which stable-baselines3 executes when it loads the file"
            self._odd(where, f"{count_text(len(pickles), 'pickle')} {what}")
        inner = Scanner(self._room)
        for number, encoded in enumerate(pickles):
            with contextlib.suppress(binascii.Error):
                raw = base64.b64decode(_unescaped(encoded))
                inner.scan(stream.made(raw, f"{where}<serialized {number}>"))
        self.pickles += inner.pickles
        self.findings += [_as_function(finding) for finding in inner.findings]


def _as_function(finding: Sighting) -> Sighting:
    """A name by which cloudpickle writes functions: unknown, as what they do is byte code."""
    if not finding.name.startswith("cloudpickle."):
        return finding
    return replace(finding, level="unknown", reason="makes functions from byte code in the pickle")


def _unescaped(text: bytes) -> bytes:
    """A JSON text in its quotes, as it is meant; as it stands, where it is none."""
    with contextlib.suppress(ValueError):
        return str(json.loads(text, strict=False)).encode(errors="replace")
    return text
