"""Manifests and what became of them, as text and JSON; all that came out of a file is escaped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptconv.proof.manifest import Manifest, counts_text, tensor_document
from ckptconv.proof.verify import Mismatch, Verification
from ckptconv.support.errors import printable
from ckptconv.support.report import LISTED, Fields, Row, listed, note_rows
from ckptconv.support.text import count_text

MANIFEST = Fields(
    "is_folder=is_whole files tensors",
    files=Fields("name sha256=digest"),
    tensors=lambda tensors: [tensor_document(each) for each in tensors],
)
"""The document of a manifest, which `ckptconv verify` reads too."""


def manifest_headline(path: object, made: Manifest) -> str:
    """The line that says what was written."""
    return f"{printable(path)}: {counts_text(made)}"


VERIFICATION = Fields(
    "path manifest kind same tensors files mismatches signature notes",
    mismatches=Fields("name is_file what detail"),
)
"""The document of a verification."""


def verification_headline(found: Verification) -> str:
    """The line that says whether a checkpoint is what the manifest says."""
    counts = ((found.tensors, "tensor"), (found.files, "file"))
    told = " and ".join(count_text(count, noun) for count, noun in counts if count is not None)
    verdict = "same" if found.same else "differs"
    of = f"{printable(found.manifest)} ({found.kind})"
    wrong = "" if found.same else f"; {_wrong_text(found)}"
    return f"{verdict}: {printable(found.path)}, {of}; {told} compared{wrong}"


def _wrong_text(found: Verification) -> str:
    files = sum(each.is_file for each in found.mismatches)
    counts = (len(found.mismatches) - files, "tensor"), (files, "file")
    return " and ".join(count_text(count, noun) for count, noun in counts if count) + " wrong"


_SAID = {
    "values": "other values",
    "bytes": "other bytes",
    "dtype": "dtype",
    "shape": "shape",
    "recipe": "read otherwise",
    "missing": "missing",
    "unexpected": "not in the manifest",
    "unreadable": "cannot be read",
}


def verification_rows(found: Verification, *, most: int | None = LISTED) -> Iterator[Row]:
    """What is wrong, a line each, at most so many of a kind."""
    for what, said in _SAID.items():
        texts = [_text(each) for each in found.mismatches if each.what == what]
        yield from listed(said, texts, "error", most=len(texts) if most is None else most)
    if found.signature == "unverified":
        what = "was NOT verified, only the digests that it signs were compared; --public-key KEY"
        yield Row("signature", f"{what} or model_signing verify it", "warning")
    elif found.signature:
        yield Row("signature", "good, says model-signing", "good")
    yield from note_rows(found.notes)


def _text(each: Mismatch) -> str:
    name = printable(each.name, 500) or "the root"
    return f"{name}: {printable(each.detail)}" if each.detail else name


def manifest_document(made: Manifest) -> dict[str, Any]:
    """A manifest as a JSON object."""
    return MANIFEST.of(made)
