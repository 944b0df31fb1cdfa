"""What a manifest says, and the text that it is.

One text serves two readers. `sha256sum -c` takes the lines of files and passes over those that
begin with ``#`` (GNU coreutils, and shasum of macOS); lines of tensors are JSON behind a ``#``::

    # ckptconv manifest 1: 2 tensors, 1 file
    # {"name": "fc.bias", "dtype": "float32", "shape": [2], "sha256": "…"}
    # {"name": "fc.weight", "dtype": "float32", "shape": [2, 3], "sha256": "…"}
    5891b5…  model.safetensors

The counts of the first line tell a manifest that was cut short. Tensors and files are sorted by
name: the same checkpoint has the same manifest, however it was made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Literal

from ckptconv.support.errors import MalformedCheckpoint, malformed, printable
from ckptconv.support.json_text import value_at
from ckptconv.support.records import dataclass
from ckptconv.support.report import Fields, short_repr
from ckptconv.support.text import count_text

Kind = Literal["manifest", "sha256sum list", "list of the Hub", "LFS pointer", "OMS signature"]
"""What a manifest is called, by who writes such ones."""

Algorithm = Literal["sha256", "git-blob-sha1"]


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file by its path in the folder of the checkpoint, with slashes (empty: whatever file it is
    held against), and the hexadecimal digest of its bytes.

    ``git-blob-sha1`` is how git names a file: SHA-1 of ``blob SIZE``, a zero byte and the bytes.
    """

    name: str
    digest: str
    algorithm: Algorithm = "sha256"


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A tensor by its name, and the hexadecimal SHA-256 of its values.

    The bytes are those of the values in C order, little-endian, as docs/proof.md says for each
    type. `shape` counts elements; `recipe` is what else tells the values, where they are codes or
    parts: a scale, a size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    recipe: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Manifest:
    """The digests of the files of a checkpoint, and of its tensors (None: it tells of files alone).

    `is_whole`: what is in the folder beside these files, and those that are `ignored`, does not
    belong there.
    """

    files: tuple[FileDigest, ...]
    tensors: tuple[TensorDigest, ...] | None = None
    kind: Kind = "manifest"
    is_whole: bool = False
    ignored: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return short_repr("Manifest", self.kind, counts_text(self))

    def text(self) -> str:
        """The manifest as the text that `ckptconv manifest` writes."""
        return "".join(f"{line}\n" for line in _lines(self))


def counts_text(manifest: Manifest) -> str:
    """How much a manifest tells of."""
    files = count_text(len(manifest.files), "file")
    if manifest.tensors is None:
        return files
    return f"{count_text(len(manifest.tensors), 'tensor')}, {files}"


def manifest_of(
    files: Iterable[FileDigest], tensors: Iterable[TensorDigest], *, is_whole: bool
) -> Manifest:
    """A manifest of ckptconv's own kind."""
    by_name = sorted(tensors, key=lambda each: (each.name, each.sha256))
    sorted_files = sorted(files, key=lambda each: each.name)
    return Manifest(tuple(sorted_files), tuple(by_name), is_whole=is_whole)


# -------------------------------------------------------------------------------------- written

_HEAD = "# ckptconv manifest 1: "
_FOLDER = " (a folder)"


def _lines(manifest: Manifest) -> Iterator[str]:
    # the first line tells how many lines there have to be: a text that was cut is not a shorter one
    yield _HEAD + counts_text(manifest) + (_FOLDER if manifest.is_whole else "")
    for tensor in manifest.tensors or ():
        yield f"# {json.dumps(tensor_document(tensor))}"
    for file in manifest.files:
        yield _file_line(file)


def tensor_document(tensor: TensorDigest) -> dict[str, Any]:
    """A tensor as JSON values."""
    told: dict[str, Any] = {"name": tensor.name, "dtype": tensor.dtype}
    told["shape"] = list(tensor.shape)
    told["sha256"] = tensor.sha256
    if tensor.recipe is not None:
        told["recipe"] = dict(tensor.recipe)
    return told


def _file_line(file: FileDigest) -> str:
    """As sha256sum writes it: a backslash in front says that line breaks are escaped."""
    escaped = file.name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    line = f"{file.digest}  {escaped}"
    return line if escaped == file.name else f"\\{line}"


MANIFEST = Fields(
    "is_folder=is_whole files tensors",
    files=Fields("name sha256=digest"),
    tensors=lambda tensors: [tensor_document(each) for each in tensors],
)
"""The document of a manifest, which `ckptconv verify` reads too."""


def manifest_headline(path: object, made: Manifest) -> str:
    """The line that says what was written."""
    return f"{printable(path)}: {counts_text(made)}"


# ----------------------------------------------------------------------------------------- read


def is_own(text: str) -> bool:
    """Whether a text is a manifest that ckptconv wrote."""
    return text.startswith(_HEAD)


_COUNTS = re.compile(r"([0-9,]{1,20}) tensors?, ([0-9,]{1,20}) files?(?: \(a folder\))?")


def read_own(text: str, path: PurePath) -> Manifest:
    """The manifest in a text of ckptconv's own; `MalformedCheckpoint` where it is damaged."""
    head, _, rest = text.partition("\n")
    counts = _COUNTS.fullmatch(head[len(_HEAD) :])
    if counts is None:
        hint = "a newer ckptconv may read it"
        raise MalformedCheckpoint("has a first line of another kind", path=path, hint=hint)
    if not text.endswith("\n"):
        raise MalformedCheckpoint("ends in the middle of a line", path=path, hint="it is cut off")
    tensors, files = [], []
    for number, line in enumerate(rest.split("\n"), 2):
        where = f"line {number}"
        if line.startswith("#"):
            tensors.append(_tensor(line[1:], path, where))
        elif line:
            files.append(file_in(line, path, where))
    wanted = [int(count.replace(",", "")) for count in counts.groups()]
    if wanted != [len(tensors), len(files)]:
        what = f"has {count_text(len(tensors), 'tensor')} and {count_text(len(files), 'file')}"
        hint = "it is cut off, or was changed by hand"
        raise MalformedCheckpoint(f"{what}, not those of its first line", path=path, hint=hint)
    return Manifest(tuple(files), tuple(tensors), is_whole=head.endswith(_FOLDER))


_TENSOR = {"name": str, "dtype": str, "shape": list, "sha256": str}


def _tensor(text: str, path: PurePath, where: str) -> TensorDigest:
    try:
        found, _ = value_at(text, len(text) - len(text.lstrip(" ")))
    except (ValueError, RecursionError) as error:
        raise malformed(f"is not valid JSON ({error})", path=path, where=where) from None
    return tensor_in(found, path, where)


def tensor_in(found: Any, path: PurePath, where: str) -> TensorDigest:
    """A tensor out of its JSON values."""
    if not isinstance(found, dict) or not found.keys() <= {*_TENSOR, "recipe"}:
        raise malformed("does not tell of a tensor", path=path, where=where)
    if any(type(found.get(name)) is not kind for name, kind in _TENSOR.items()):
        raise malformed("does not tell name, dtype, shape and sha256", path=path, where=where)
    # `type`, for JSON's true is an int to `isinstance`
    if any(type(size) is not int or size < 0 for size in found["shape"]):
        raise malformed("its shape holds something other than sizes", path=path, where=where)
    recipe = found.get("recipe")
    if not (recipe is None or isinstance(recipe, dict)):
        raise malformed("its recipe is not an object", path=path, where=where)
    digest = hexadecimal(found["sha256"], 64, path, where)
    return TensorDigest(found["name"], found["dtype"], tuple(found["shape"]), digest, recipe)


def hexadecimal(text: object, length: int, path: PurePath, where: str) -> str:
    """A digest in lower case; `MalformedCheckpoint` for anything else."""
    if not isinstance(text, str) or not re.fullmatch(f"[0-9a-fA-F]{{{length}}}", text):
        raise malformed(f"is not {length} hexadecimal digits", path=path, where=where)
    return text.lower()


_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
_BSD_LINE = re.compile(r"(\\?)SHA256 \((.+)\) = ([0-9a-fA-F]{64})", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"\\": "\\", "n": "\n", "r": "\r"}


def file_in(line: str, path: PurePath, where: str) -> FileDigest:
    """The file that a line of sha256sum tells of, in either of its two forms."""
    line = line.removesuffix("\r")
    found = _LINE.fullmatch(line)
    if found:
        mark, digest, name = found.groups()
    elif found := _BSD_LINE.fullmatch(line):
        mark, name, digest = found.groups()
    else:
        what = "is not a line of sha256sum: a digest, two spaces, a name"
        raise malformed(what, path=path, where=where)
    if mark:
        name = _ESCAPE.sub(lambda escape: _ESCAPES.get(escape[1], escape[0]), name)
    return FileDigest(plain_path(name, path, where), digest.lower())


def plain_path(name: object, path: PurePath, where: str) -> str:
    """The name of a file in a folder, which leads nowhere else; a list may come from anybody."""
    if not isinstance(name, str) or "\0" in name:
        raise malformed("does not name a file", path=path, where=where)
    # `find . -type f | xargs sha256sum` writes ./name
    parts = [part for part in name.split("/") if part != "."]
    if not all(parts) or ".." in parts:
        what = f"names {name!r:.200}, which is not a path within the folder"
        raise malformed(what, path=path, where=where)
    return "/".join(parts)
