"""Archives in a source: zip and tar, their records and code, and what lies in broken ones."""

from __future__ import annotations

import re

from ckptconv.formats.joined_archives import joined_archives
from ckptconv.formats.torch_tar import is_tar
from ckptconv.formats.zip_archive import Record, is_zip, read_directory
from ckptconv.io.source import CHUNK, SMALL, MemorySource, RangeSource, Source
from ckptconv.pickles.tracer import trace_pickle
from ckptconv.scan.findings import Sighting
from ckptconv.scan.heads import (
    BLOCK,
    is_tar_header,
    may_be_json,
    numpy_end,
)
from ckptconv.scan.inflating import inflated_head
from ckptconv.scan.pickles import PickleScanner
from ckptconv.scan.script_code import (
    Called,
    judged_bytecode,
    judged_code,
    judged_flatbuffer,
    old_code_records,
    script_records,
)
from ckptconv.support.errors import CheckpointError
from ckptconv.support.limits import in_force

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
            start &= -BLOCK
            window = source.read(start, min(CHUNK, source.size - start))
            for at in range(0, len(window), BLOCK):
                if is_tar_header(window[at : at + BLOCK]):
                    self._pickles(source, start + at + BLOCK, where, depth)
            start = source.data_from(start + CHUNK)
        self._sweep(source, where, depth)

    def _deflated(self, source: Source, offset: int, stored: int, where: str, depth: int) -> None:
        """Look into a deflated record; one that begins as nothing known is not inflated."""
        head = inflated_head(source, offset, stored, _HEAD)
        trace = trace_pickle(MemorySource(head, source.path), numpy_end(head))
        is_followed = trace.end or trace.cut or trace.stopped or trace.names or trace.alarms
        if not (is_followed or is_zip(head) or is_tar(head) or may_be_json(head)):
            self._room.followed += _LOOK
            return
        is_pickle = not (is_zip(head) or is_tar(head) or may_be_json(head))
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
