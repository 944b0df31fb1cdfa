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
from dataclasses import replace
from itertools import islice

from ckptconv.formats.npz import holds_numbers
from ckptconv.formats.safetensors import is_safetensors
from ckptconv.formats.strangers import STRANGERS
from ckptconv.formats.torch_tar import is_tar
from ckptconv.formats.zip_archive import is_zip
from ckptconv.io.source import MemorySource, Source
from ckptconv.scan.archives import ArchiveScanner
from ckptconv.scan.findings import Sighting
from ckptconv.scan.heads import (
    LZMA,
    is_tar_header,
    is_zlib,
    may_be_json,
    numpy_end,
    text_kind,
)
from ckptconv.scan.script_code import (
    FLATBUFFER,
)
from ckptconv.support.limits import in_force
from ckptconv.support.text import count_text

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
        if is_tar(head) or is_tar_header(head):
            self._tar(source, where, depth)
            return "tar"
        if head[4:8] == FLATBUFFER:
            self._flatbuffer(source, where)
        array = array or holds_numbers(head)
        count = self._pickles(source, numpy_end(head), where, depth, array=array)
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
        if may_be_json(head):
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
        elif is_zlib(head) or LZMA(head):
            self._odd(
                where,
                "looks compressed by zlib or lzma, as joblib does it: what is in it was not "
                "looked at",
            )
        return text_kind(head) or "no pickle"

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
