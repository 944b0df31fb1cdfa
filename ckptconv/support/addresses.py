"""Recognizes addresses of other machines, and says how to get the file from there."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from shlex import quote

# C:/ is a drive
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?=[^/])(.*)", re.DOTALL).fullmatch
_HUB = re.compile(
    r"(?:[^/@]+@)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+/[^/]+)/(?:blob|resolve|raw)/([^/]+)/([^?#]+)"
).match
_TOOLS = {
    "s3": "aws s3 cp {address} .",
    "gs": "gcloud storage cp {address} .",
    "gcs": "gcloud storage cp {address} .",
    "az": "azcopy copy {address} .",
    "abfs": "azcopy copy {address} .",
    "hdfs": "hdfs dfs -get {address} .",
    "http": "curl -LO {address}",
    "https": "curl -LO {address}",
    "ftp": "curl -O {address}",
}

_SENDERS = {
    "s3": "aws s3 cp",
    "gs": "gcloud storage cp",
    "gcs": "gcloud storage cp",
    "hf": "huggingface-cli upload",
}


class UrlPath(PurePosixPath):
    """How a file elsewhere is called in errors and results: its address, without what is secret in
    it. No function of the system opens it.

    >>> path = UrlPath("s3://bucket/run/model.pt")
    >>> str(path), path.name, str(path.parent / "a.json")
    ('s3://bucket/run/model.pt', 'model.pt', 's3://bucket/run/a.json')
    """

    __slots__ = ()

    def __str__(self) -> str:
        scheme, colon, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}" if colon else scheme

    def __fspath__(self) -> str:
        return str(self)


def address_in(path: object) -> str | None:
    """The address that `path` is, as it was typed; None for the path of a file here.

    A `pathlib.Path` has made one slash of two, which is put right. What is here under that very
    name is a file.

    >>> address_in("https://host/a.pt"), address_in("C:/a.pt"), address_in("a:b.pt")
    ('https://host/a.pt', None, None)
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    found = _ADDRESS(text) if isinstance(text, str) else None
    if found is None or os.path.lexists(text):
        return None
    return text if "://" in text else f"{found[1]}://{found[2]}"


def how_to_get(address: str) -> str:
    """The command that brings the file at `address` here."""
    scheme, _, rest = address.partition("://")
    if scheme.lower() == "file":
        return f"leave out {scheme}://"
    if hub := _on_hub(scheme.lower(), rest):
        repository, file, options = hub
        named = f"{quote(repository)} {quote(file)}".strip() if file else quote(repository)
        return (
            f"get it first: huggingface-cli download {named}{options} (newer: hf download), "
            "which prints where it is"
        )
    command = _TOOLS.get(scheme.lower(), "")
    return (
        f"get it first: {command.format(address=quote(address))}"
        if command
        else "copy it to this machine first"
    )


def how_to_send(address: str) -> str:
    """What to do where an output was to go to `address`."""
    scheme = address.partition("://")[0].lower()
    if scheme == "file":
        return f"leave out {scheme}://"
    tool = {
        "s3": "aws s3 cp",
        "gs": "gcloud storage cp",
        "gcs": "gcloud storage cp",
        "hf": "huggingface-cli upload",
    }.get(scheme)
    return "write a file here, and upload it" + (f": {tool} …" if tool else "")


def _on_hub(scheme: str, rest: str) -> tuple[str, str, str] | None:
    """Repository, file and further options of an address at Hugging Face; None of any other."""
    if scheme == "hf":
        owner, _, more = rest.removeprefix("models/").partition("/")
        name, _, file = more.partition("/")
        name, _, revision = name.partition("@")
        return f"{owner}/{name}", file, f" --revision {quote(revision)}" if revision else ""
    if scheme in ("http", "https") and (found := _HUB(rest)) is not None:
        revision = "" if found[2] == "main" else f" --revision {quote(found[2])}"
        return found[1], found[3], revision
    return None
