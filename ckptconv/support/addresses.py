"""Recognizes addresses of other machines, and says how to get the file from there.

What is secret in an address is known here, and nowhere else.
"""

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
_WEB = ("http", "https")
_NAMED_ELSEWHERE = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "hf")
"""Schemes whose credentials no address holds: they are the environment's."""
_HOST = re.compile(r"(?:[^/]*@)?(?:\[[^\]/]*\]|[^/:@]*)(?::\d*)?").fullmatch


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


def holds_credentials(address: str) -> bool:
    """Whether an address of a service that takes none holds a name or a key before its bucket.

    >>> [holds_credentials(f"s3://{text}/a") for text in ("b", "KEY:SECRET@b", "KEY:SEC/RET@b")]
    [False, True, True]
    """
    scheme, _, rest = address.partition("://")
    bucket = rest.partition("/")[0]
    if scheme.lower() not in _NAMED_ELSEWHERE or bucket.startswith("arn:"):
        return False
    # Azure's buckets are CONTAINER@ACCOUNT
    return ":" in bucket or ("@" in bucket and not scheme.lower().startswith(("az", "abfs")))


def shown(address: str) -> str:
    """An address without what may be secret in it.

    >>> shown("https://me:secret@host/a.pt?signature=secret#x"), shown("sftp://me:secret@host/a.pt")
    ('https://host/a.pt', 'sftp://me@host/a.pt')
    >>> shown("s3://KEY:SEC/RET@bucket/a.pt"), shown("hf://user:secret@org/name")
    ('s3://***@bucket/a.pt', 'hf://***@org/name')
    """
    scheme, _, rest = address.partition("://")
    if scheme.lower() in _WEB:
        rest = rest.partition("#")[0].partition("?")[0]
    host, slash, path = rest.partition("/")
    # a password may hold a slash, and so end behind what looks like the host
    if holds_credentials(address) or ("@" in path and not _HOST(host)):
        return f"{scheme}://***@{rest.rpartition('@')[2]}"
    user, at, server = host.rpartition("@")
    named = "" if scheme.lower() in _WEB else f"{user.partition(':')[0]}{at}"
    return f"{scheme}://{named}{server}{slash}{path}"


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
