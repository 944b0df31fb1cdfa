"""Recognizes addresses of other machines.

What is secret in an address is known here, and nowhere else.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from shlex import quote

# C:/ is a drive; ab:/ is a folder, and s3:// an address that names nothing
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?:/+|(?=[^/]))(.*)", re.DOTALL).fullmatch
_WEB = ("http", "https")
# schemes whose credentials no address holds: they are the environment's
_NAMED_ELSEWHERE = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "hf")
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
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)


def address_in(path: object) -> str | None:
    """The address that `path` is, as it was typed; None for the path of a file here.

    A `pathlib.Path` has made one slash of two, which is put right. What is here under that very
    name is a file.

    >>> address_in("https://host/a.pt"), address_in("C:/a.pt"), address_in("a:b.pt")
    ('https://host/a.pt', None, None)
    """
    if not isinstance(path, (str, os.PathLike)):
        return None
    text = os.fspath(path)
    if not isinstance(text, str) or ":/" not in text:  # nearly all that is named
        return None
    found = _ADDRESS(text)
    if found is None or os.path.lexists(text):
        return None
    if "://" in text:
        return text
    return f"{found[1]}://{found[2]}"


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
    if scheme.lower() in _WEB:
        return f"{scheme}://{server}{slash}{path}"
    return f"{scheme}://{user.partition(':')[0]}{at}{server}{slash}{path}"


def how_to_get(address: str) -> str:
    """The command that brings a file of the web, or of the Hugging Face Hub, here.

    >>> how_to_get("hf://org/name@v1/a b.pt")[:76]
    "get it first: huggingface-cli download org/name 'a b.pt' --revision v1 (newe"
    """
    scheme, _, rest = address.partition("://")
    if scheme != "hf":
        return f"get it first: curl -LO {quote(address)}"
    owner, _, more = rest.removeprefix("models/").partition("/")
    name, _, file = more.partition("/")
    name, _, revision = name.partition("@")
    wanted = [quote(word) for word in (f"{owner}/{name}", file) if word]
    if revision:
        wanted += ["--revision", quote(revision)]
    return (
        f"get it first: huggingface-cli download {' '.join(wanted)} (newer: hf download), "
        "which prints where it is"
    )
