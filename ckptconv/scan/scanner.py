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
import zlib
from dataclasses import replace
from itertools import islice

from ckptconv.formats.containers import STRANGERS, is_safetensors, is_tar, is_zip
from ckptconv.formats.npz import holds_numbers
from ckptconv.formats.zip_archive import Record, read_directory
from ckptconv.formats.zip_directory import joined_archives
from ckptconv.io.source import CHUNK, SMALL, MemorySource, RangeSource, Source
from ckptconv.pickles.tracer import trace_pickle
from ckptconv.scan.pickles import PickleScanner, Sighting, inflated_head
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
    """Whether a member of a tar file begins so; `tarfile` knows it by its checksum alone.

    That is the sum of the 512 bytes, those of the checksum itself taken as spaces.
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


def _may_be_script(source: Source) -> bool:
    """Whether an archive without a usable directory may be TorchScript to torch.

    It is one if it has the names of TorchScript, and an end that torch may find.

    Names are compared as miniz does, without case. A file without an end, cut off while it was
    copied, torch does not open.
    """
    names = ends = False
    start = source.data_from(0)
    while start < source.size and not (names and ends):
        window = source.read(start, min(CHUNK + 16, source.size - start))
        names = names or _SCRIPT_RECORD(window) is not None
        ends = ends or _DIRECTORY_END in window
        start = source.data_from(start + CHUNK)
    return names and ends


class ArchiveScanner(PickleScanner):
    """Looks into the records of archives, wherever they lie."""

    def _zip(self, source: Source, where: str, depth: int) -> str:
        try:
            records = read_directory(source)
        except CheckpointError as error:
            if len(parts := joined_archives(source)) > 1:
                for start, size in parts:
                    self.scan(
                        RangeSource(source, start, size),
                        f"{where}/byte {start}".strip("/"),
                        depth + 1,
                    )
                return f"{len(parts)} zips"
            self._odd(
                where,
                f"its directory was not followed ({error.what}); what is stored or deflated in it "
                "was searched",
            )
            if _may_be_script(source):
                what = (
                    "seems to be a TorchScript archive; torch may use its directory and run code "
                    "that was not judged"
                )
                self.findings.append(Sighting(where, "", "dangerous", what, 0))
            self._sweep(source, where, depth)
            return "zip without a usable directory"
        source.foresee([(record.offset, min(record.size, SMALL)) for record in records.values()])
        for name, record in records.items():
            inside = f"{where}/{name}" if where else name
            if record.deflated:
                self._deflated(source, record.offset, record.stored, inside, depth)
            else:
                array = _STORAGE(name) is not None
                self.scan(
                    RangeSource(source, record.offset, record.size), inside, depth + 1, array=array
                )
        self._scripts(source, records, where)
        return "zip"

    def _scripts(self, source: Source, records: dict[str, Record], where: str) -> None:
        """Judge the code of a TorchScript archive, and the bytecode of one for mobiles."""
        for name in (kinds := script_records(records)):
            inside = f"{where}/{name}".strip("/")
            text = self._whole(source, records[name], inside)
            if kinds[name] != "model":
                self._note_called(
                    inside,
                    judged_bytecode(text) if kinds[name] == "bytecode" else judged_code(text),
                )
                continue
            try:
                keys = old_code_records(text, name, records, source.path)
            except CheckpointError as error:
                self._odd(inside, f"{error.what}, so which records are code is not known")
                continue
            for key in keys:
                code = f"{where}/{key}".strip("/")
                self._note_called(code, judged_code(self._whole(source, records[key], code)))

    def _flatbuffer(self, source: Source, where: str) -> None:
        most = in_force().text_bytes
        self._odd(
            where,
            "is a flatbuffer module for mobile devices; of its code, only what is known to be "
            "dangerous is reported",
        )
        self._note_called(where, judged_flatbuffer(source.read(0, min(source.size, most))))
        if source.size > most:
            self._odd(
                where,
                f"is a flatbuffer of more than {most} bytes; the rest was not looked at",
                most,
            )

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
            self._odd(
                where,
                f"is code of more than {len(raw)} bytes; the rest was not looked at",
                len(raw),
            )
        return raw

    def _tar(self, source: Source, where: str, depth: int) -> None:
        """Look into the members of a tar file, wherever a header lies; sweep it for patterns."""
        self._pickles(source, 0, where, depth)
        start = source.data_from(0)
        while start < source.size:
            start &= -_BLOCK
            window = source.read(start, min(CHUNK, source.size - start))
            for at in range(0, len(window), _BLOCK):
                if _is_tar_header(window[at : at + _BLOCK]):
                    self._pickles(source, start + at + _BLOCK, where, depth)
            start = source.data_from(start + CHUNK)
        self._sweep(source, where, depth)

    def _deflated(self, source: Source, offset: int, stored: int, where: str, depth: int) -> None:
        """Look into a deflated record; one that begins as nothing known is not inflated."""
        head = inflated_head(source, offset, stored, _HEAD)
        trace = trace_pickle(MemorySource(head, source.path), _numpy_end(head))
        is_followed = trace.end or trace.cut or trace.stopped or trace.names or trace.alarms
        if not (is_followed or is_zip(head) or is_tar(head) or _may_be_json(head)):
            self._room.followed += _LOOK
            return
        is_pickle = not (is_zip(head) or is_tar(head) or _may_be_json(head))
        inflated, cut = self._room.inflate(source, offset, stored, pickle=is_pickle)
        if inflated:
            self.scan(
                MemorySource(inflated, source.path),
                where,
                depth + 1,
                array=_STORAGE(where) is not None,
            )
        if cut and (inflated or not self._room.is_used_up):
            more = f"--limit pickle_ratio={2 * in_force().pickle_ratio} looks further"
            self._odd(
                where,
                f"inflates to more than {len(inflated)} bytes; the rest was not looked at ({more})",
            )
        self._room.is_used_up |= not inflated

    def _sweep(self, source: Source, where: str, depth: int) -> None:
        """Look at every place of a source where a pickle, or a record of an archive, may begin."""
        done = 0
        start = source.data_from(0)
        while start < source.size:
            window = source.read(start, min(CHUNK + 512, source.size - start))
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
                    self._odd(where, f"{what} ({more})", at)
                    return
                look = self._local_record if likely[0][:2] == b"PK" else self._uncertain
                done = max(done, look(source, at, where, depth))
            start = source.data_from(start + CHUNK)

    def _uncertain(self, source: Source, at: int, where: str, depth: int) -> int:
        """Follow what may be a pickle.

        Gives the byte behind it, or 0 if what lies in it must be looked at too.
        """
        self._room.followed += _LOOK
        return self._pickle(source, at, where, depth, certain=False)

    def _local_record(self, source: Source, at: int, where: str, depth: int) -> int:
        """Look into a record by its local header alone; the byte behind the pickle in it, or 0."""
        header = source.read(at, min(30, source.size - at))
        if len(header) < 30:
            return 0
        offset = (
            at
            + 30
            + int.from_bytes(header[26:28], "little")
            + int.from_bytes(header[28:30], "little")
        )
        if offset >= source.size:
            return 0
        if header[8:10] == b"\0\0":
            return self._uncertain(source, offset, where, depth)
        self._deflated(source, offset, source.size - offset, f"{where}/byte {at}".strip("/"), depth)
        return 0


# ------------------------------------------------------------------------------------------- files

_TAIL = 22 + 0xFFFF  # bytes in which the end record of a zip archive lies
_SERIALIZED = re.compile(
    rb'"%s"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")'
    % b"".join(rb"(?:%c|\\u00(?i:%02x))" % (byte, byte) for byte in b":serialized:"),
    re.DOTALL,
)
"""The pickles in the JSON of stable-baselines3 (common/save_util.py).

Its `load` gives them to cloudpickle.

Any character of a JSON text may be escaped, and `base64.b64decode` passes over what is not base64.
"""


class Scanner(ArchiveScanner):
    """What has been found in one file so far."""

    def scan(self, source: Source, where: str, depth: int, *, array: bool = False) -> str:
        """Look into a source for whatever it is; says what that is.

        An `array` is one that nothing unpickles: of many thousands some read as pickles by chance,
        so only what names a global counts.
        """
        if depth > (most := in_force().scanned_depth):
            self._odd(
                where,
                f"streams are nested more than {most} deep; deeper ones were not looked at"
                f" (--limit scanned_depth={2 * most} looks further)",
            )
            return "unknown"
        head = source.read(0, min(512, source.size))
        if is_zip(head):
            return self._zip(source, where, depth)
        if is_tar(head) or _is_tar_header(head):
            self._tar(source, where, depth)
            return "tar"
        if head[4:8] == FLATBUFFER:
            self._flatbuffer(source, where)
        array = array or holds_numbers(head)
        count = self._pickles(source, _numpy_end(head), where, depth, array=array)
        if not depth and b"PK\5\6" in source.read(
            max(0, source.size - _TAIL), min(_TAIL, source.size)
        ):
            self._sweep(source, where, depth)
            return "zip behind other bytes"
        if count:
            return "pickle" if count == 1 else f"{count} pickles"
        return self._no_pickle(source, head, where, depth)

    def _no_pickle(self, source: Source, head: bytes, where: str, depth: int) -> str:
        if is_safetensors(head):
            return "safetensors"
        if _may_be_json(head):
            self._json(source, where, depth)
        packed = next(
            (
                item
                for item in STRANGERS
                if item.is_packed and head[item.at :].startswith(item.magic)
            ),
            None,
        )
        if packed is not None:
            self._odd(where, f"{packed.what}: what is in it was not looked at")
        elif _is_zlib(head) or _LZMA(head):
            self._odd(
                where,
                "looks compressed by zlib or lzma, as joblib does it: what is in it was not "
                "looked at",
            )
        return _text_kind(head) or "no pickle"

    def _json(self, source: Source, where: str, depth: int) -> None:
        """Look into the pickles in a text of stable-baselines3.

        Functions in them are byte code, of which nothing is known.
        """
        limits = in_force()
        most = limits.text_bytes
        texts = (match[1] for match in _SERIALIZED.finditer(source.read(0, min(source.size, most))))
        pickles = list(dict.fromkeys(islice(texts, limits.scanned_pickles)))
        if source.size > most:
            self._odd(
                where, f"is a text of more than {most} bytes; the rest was not looked at", most
            )
        if next(texts, None) is not None:
            self._more_pickles(where, "stand in one text")
        if pickles:
            count = count_text(len(pickles), "pickle")
            self._odd(
                where,
                f"{count} as base64 text, which stable-baselines3 executes when it loads the file",
            )
        inner = Scanner(self._room)
        for number, encoded in enumerate(pickles):
            with contextlib.suppress(binascii.Error):
                raw = base64.b64decode(_unescaped(encoded))
                inner.scan(
                    MemorySource(raw, source.path), f"{where}<serialized {number}>", depth + 1
                )
        self.pickles += inner.pickles
        self.findings += [_as_function(finding) for finding in inner.findings]


def _as_function(finding: Sighting) -> Sighting:
    """A name of cloudpickle, if it writes functions with it: unknown.

    What they do stands in their byte code.
    """
    if not finding.name.startswith("cloudpickle."):
        return finding
    return replace(finding, level="unknown", reason="makes functions from byte code in the pickle")


def _unescaped(text: bytes) -> bytes:
    """A JSON text in its quotes, as it is meant; as it stands, where it is none."""
    with contextlib.suppress(ValueError):
        return str(json.loads(text, strict=False)).encode(errors="replace")
    return text
