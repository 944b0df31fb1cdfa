"""Manifests of all kinds, told apart by their content.

- ckptconv's own text, or the document of ``ckptconv manifest --json``;
- lines of ``sha256sum``, also in its BSD form;
- the pointer of a file in git LFS, which the Hub stores its large files by:
  ``version https://git-lfs.github.com/spec/v1``, ``oid sha256:…``, ``size …``
  (git-lfs/docs/spec.md);
- what the Hub's API says of a repository: ``/api/models/ORG/NAME?blobs=true``, whose ``siblings``
  have ``lfs.sha256``, or ``/api/models/ORG/NAME/tree/main?recursive=true``, whose files have
  ``lfs.oid``; small files have the name that git has for them;
- ``model.sig`` of OpenSSF model signing (OMS 1.0): a sigstore bundle with a DSSE envelope around an
  in-toto statement, whose predicate lists files by digest (model-signing 1.1.1). Nobody says here
  whether its signature is good.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from ckptconv.io.location import Location, read_small
from ckptconv.proof.manifest import (
    FileDigest,
    Manifest,
    file_in,
    hexadecimal,
    is_own,
    plain_path,
    read_own,
    tensor_in,
)
from ckptconv.support.errors import UnsupportedCheckpoint, malformed
from ckptconv.support.json_text import refuse_crowded, value_at


def read_manifest(place: Location) -> Manifest:
    """The manifest at a place; `MalformedCheckpoint` for one that is damaged or forged,
    `UnsupportedCheckpoint` for anything else.
    """
    raw, path = read_small(place, "text_bytes"), place.path
    # names of files may be any bytes, so this decodes whatever there is
    text = raw.decode("utf-8", "surrogateescape")
    if is_own(text):
        return read_own(text, path)
    if text.startswith(_POINTER):
        return _pointer(text, path)
    if text.lstrip()[:1] in ("{", "["):
        return _document(raw, text, path)
    if _IS_LIST.match(text):
        return _list(text, path)
    what = "is not a manifest: neither lines of sha256sum, nor a list of the Hub, nor a model.sig"
    raise UnsupportedCheckpoint(what, path=path, hint="ckptconv manifest PATH makes one")


_IS_LIST = re.compile(r"(?:#.*\n|\r?\n)*\\?(?:[0-9a-fA-F]{64} [ *]|SHA256 \()")


def _list(text: str, path: PurePath) -> Manifest:
    """Lines of sha256sum; comments are passed over, as it does."""
    files = [
        file_in(line, path, f"line {number}")
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and not line.startswith("#")
    ]
    return Manifest(tuple(files), kind="sha256sum list")


# -------------------------------------------------------------------------------------- the Hub

_POINTER = "version https://git-lfs.github.com/spec/v1\n"
_OID = re.compile(r"^oid sha256:(.*)$", re.M)


def _pointer(text: str, path: PurePath) -> Manifest:
    found = _OID.findall(text) or [""]
    digest = hexadecimal(found[0].strip(), 64, path, "oid")
    return Manifest((FileDigest("", digest),), kind="LFS pointer")


def _document(raw: bytes, text: str, path: PurePath) -> Manifest:
    refuse_crowded(raw, path, None)
    try:
        found, end = value_at(text, len(text) - len(text.lstrip()))
        if text[end:].strip():
            raise ValueError("something follows it")
    except (ValueError, RecursionError) as error:
        raise malformed(f"is not valid JSON ({error})", path=path, where="text") from None
    if isinstance(found, list):
        return _of_hub(found, "path", path)
    for name, read in _READERS.items():
        if name in found:
            return read(found, path)
    what = "is a JSON text that tells of no files"
    raise UnsupportedCheckpoint(what, path=path, hint="ckptconv manifest PATH makes a manifest")


def _own_document(found: dict[str, Any], path: PurePath) -> Manifest:
    """What ``ckptconv manifest --json`` prints."""
    tensors, files, is_folder = (found.get(name) for name in ("tensors", "files", "is_folder"))
    if not (isinstance(tensors, list) and isinstance(files, list) and type(is_folder) is bool):
        raise malformed("does not tell files, tensors and is_folder", path=path, where="manifest")
    made = []
    for number, file in enumerate(files, 1):
        where, told = f"file {number}", _fields(file)
        digest = hexadecimal(told.get("sha256"), 64, path, where)
        made.append(FileDigest(plain_path(told.get("name"), path, where), digest))
    listed = [tensor_in(each, path, f"tensor {number}") for number, each in enumerate(tensors, 1)]
    return Manifest(tuple(made), tuple(listed), is_whole=is_folder)


def _fields(value: object) -> dict[str, Any]:
    """A JSON object; of anything else there are no fields, which whoever asks for one then says."""
    return value if isinstance(value, dict) else {}


def _model_info(found: dict[str, Any], path: PurePath) -> Manifest:
    siblings = found["siblings"]
    if not isinstance(siblings, list):
        raise malformed("is not a list", path=path, where="siblings")
    return _of_hub(siblings, "rfilename", path)


def _of_hub(entries: list[Any], named: str, path: PurePath) -> Manifest:
    files = [*_hub_files(entries, named, path)]
    if not files:
        what = "lists files without their hashes"
        hint = "ask the Hub for /api/models/ORG/NAME?blobs=true"
        raise UnsupportedCheckpoint(what, path=path, hint=hint)
    return Manifest(tuple(files), kind="list of the Hub")


def _hub_files(entries: list[Any], named: str, path: PurePath) -> Iterator[FileDigest]:
    """The files of which a hash is told: that of the bytes in LFS, or that of git."""
    for number, entry in enumerate(entries, 1):
        where = f"file {number}"
        if not isinstance(entry, dict) or named not in entry:
            raise malformed(f"has no {named}", path=path, where=where)
        if entry.get("type") == "directory":
            continue
        name, lfs = plain_path(entry[named], path, where), entry.get("lfs")
        git = entry.get("blobId", entry.get("oid"))
        if isinstance(lfs, dict):
            digest = hexadecimal(lfs.get("sha256", lfs.get("oid")), 64, path, name)
            yield FileDigest(name, digest)
        elif git is not None:
            yield FileDigest(name, hexadecimal(git, 40, path, name), "git-blob-sha1")


# --------------------------------------------------------------------------- OpenSSF model signing


_PREDICATE = "https://model_signing/signature/v1.0"


def _signature(found: dict[str, Any], path: PurePath) -> Manifest:
    """The files that a signed statement lists. What is signed is the payload, all of it, so nothing
    else of the bundle is looked at.
    """
    statement = _statement(found, path)
    if statement.get("predicateType") != _PREDICATE:
        what = f"its predicate is of the type {statement.get('predicateType')!r:.200}"
        hint = f"only {_PREDICATE} is known"
        raise UnsupportedCheckpoint(what, path=path, where="dsseEnvelope", hint=hint)
    predicate = _fields(statement.get("predicate"))
    resources, how = predicate.get("resources"), _fields(predicate.get("serialization"))
    if how.get("method") != "files":
        what = f"its files were hashed by the method {how.get('method')!r:.100}"
        hint = "only whole files are compared: sign it without shards"
        raise UnsupportedCheckpoint(what, path=path, where="serialization", hint=hint)
    if not isinstance(resources, list) or not resources:
        raise malformed("lists no files", path=path, where="resources")
    ignored = how.get("ignore_paths", [])
    if not isinstance(ignored, list) or any(type(one) is not str for one in ignored):
        raise malformed("is not a list of paths", path=path, where="ignore_paths")
    files = [_resource(each, path, f"resource {at}") for at, each in enumerate(resources, 1)]
    return Manifest(tuple(files), None, "OMS signature", is_whole=True, ignored=tuple(ignored))


def _statement(found: dict[str, Any], path: PurePath) -> dict[str, Any]:
    payload = _fields(found["dsseEnvelope"]).get("payload", "")
    try:
        raw = base64.b64decode(payload, validate=True)
        refuse_crowded(raw, path, "payload")
        statement, _ = value_at(raw.decode(), 0)
    except (TypeError, ValueError, RecursionError):  # TypeError: the payload is not a text
        raise malformed("is not a statement in base64", path=path, where="payload") from None
    if not isinstance(statement, dict):
        raise malformed("is not a JSON object", path=path, where="payload")
    return statement


def _resource(resource: Any, path: PurePath, where: str) -> FileDigest:
    told = _fields(resource)
    if told.get("algorithm") != "sha256":
        what = f"is hashed by {told.get('algorithm')!r:.100}"
        raise UnsupportedCheckpoint(what, path=path, where=where, hint="only sha256 is compared")
    name = plain_path(told.get("name"), path, where)
    return FileDigest(name, hexadecimal(told.get("digest"), 64, path, name))


# by the name that only such a document has
_READERS: dict[str, Callable[[dict[str, Any], PurePath], Manifest]] = {
    "dsseEnvelope": _signature,
    "siblings": _model_info,
    "tensors": _own_document,
}
