"""What `verify` finds, and how that is shown: as text and JSON. What came out of a file is escaped
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ckptconv.proof.manifest import Kind
from ckptconv.support.errors import printable
from ckptconv.support.records import dataclass
from ckptconv.support.report import LISTED, Fields, Row, listed, note_rows, short_repr
from ckptconv.support.text import count_text

What = Literal["values", "bytes", "dtype", "shape", "recipe", "missing", "unexpected", "unreadable"]
"""What is wrong: other values (of a tensor) or bytes (of a file), another dtype, shape or recipe;
it is in the manifest and not there, there and not in the manifest, or cannot be read.
"""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor (or a file, with `is_file`) that is not what the manifest says, and how it is not.
    `detail` is what the checkpoint has and what the manifest says, where that is short.
    """

    name: str
    what: What
    detail: str = ""
    is_file: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """What became of the checkpoint `path` held against the `manifest`, a file of that `kind`.

    So many `tensors` and `files` were compared; None: none, for they were not to be, or the
    manifest does not tell of any. `signature`: ``good``, by model-signing; ``unverified``; empty
    where the manifest has none.
    """

    path: str
    manifest: str
    kind: Kind
    tensors: int | None
    files: int | None
    mismatches: tuple[Mismatch, ...]
    signature: Literal["", "good", "unverified"] = ""
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether all that was compared is what the manifest says."""
        return not self.mismatches

    def __bool__(self) -> bool:
        """Raises `TypeError`: a result that is always true would be taken for a proof."""
        raise TypeError("a Verification is neither true nor false: write .same")

    def __repr__(self) -> str:
        verdict = "same" if self.same else f"{len(self.mismatches):,} differ"
        return short_repr("Verification", self.path, verdict, *_compared(self))


# -------------------------------------------------------------------------------- text and JSON

VERIFICATION = Fields(
    "path manifest kind same tensors files mismatches signature notes",
    mismatches=Fields("name is_file what detail"),
)
"""The document of a verification."""


def verification_headline(found: Verification) -> str:
    """The line that says whether a checkpoint is what the manifest says."""
    of = f"{printable(found.path)}, {printable(found.manifest)} ({found.kind})"
    told = f"{of}; {' and '.join(_compared(found))} compared"
    if found.same:
        return f"same: {told}"
    files = sum(each.is_file for each in found.mismatches)
    counts = (len(found.mismatches) - files, "tensor"), (files, "file")
    wrong = " and ".join(count_text(count, noun) for count, noun in counts if count)
    return f"differs: {told}; {wrong} wrong"


def _compared(found: Verification) -> list[str]:
    """How many were compared, of those that were to be."""
    counts = ((found.tensors, "tensor"), (found.files, "file"))
    return [count_text(count, noun) for count, noun in counts if count is not None]


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
    if most is None:
        most = len(found.mismatches)
    for what, said in _SAID.items():
        texts = [_text(each) for each in found.mismatches if each.what == what]
        yield from listed(said, texts, "error", most=most)
    if found.signature == "unverified":
        what = "was NOT verified, only the digests that it signs were compared; --public-key KEY"
        yield Row("signature", f"{what} or model_signing verify it", "warning")
    elif found.signature:
        yield Row("signature", "good, says model-signing", "good")
    yield from note_rows(found.notes)


def _text(each: Mismatch) -> str:
    name = printable(each.name, 500) or "the root"
    return f"{name}: {printable(each.detail)}" if each.detail else name
