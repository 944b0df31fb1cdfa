"""Repositories of the Hugging Face Hub, read by ranges; `hub_output` writes them.

An address is written as huggingface_hub writes it (`utils/_hf_uris.py`):
``hf://[models/|datasets/|spaces/]OWNER/NAME[@REVISION][/PATH]``; a slash in a revision is written
as ``%2F``, but for ``refs/pr/N`` and ``refs/convert/NAME``. Files come from the Hub's ``resolve``
endpoint, which redirects large ones to another host, and lists of files from its ``tree`` endpoint.
The first answer names the commit of the revision; all later requests are for that commit.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urljoin

from ckptconv.io.files import FileSource, read_whole
from ckptconv.io.remote.causes import LIES, Headers, is_strong, refusal, seen
from ckptconv.io.remote.network import is_set, needed
from ckptconv.io.remote.store import (
    NOTHING,
    FolderListing,
    ObjectBytes,
    Seen,
    Store,
    StoreError,
    split,
)
from ckptconv.io.remote.web import WebStore
from ckptconv.support.addresses import shown
from ckptconv.support.errors import CheckpointError, UnsupportedCheckpoint
from ckptconv.support.records import dataclass

if TYPE_CHECKING:
    from ckptconv.io.remote.wire import Answer, Wire

_ENDPOINT = "https://huggingface.co"
_KINDS = ("models", "datasets", "spaces")
_REFS = re.compile(r"refs/(?:convert/[\w.-]+|pr/\d+)(?=/|$)").match  # these have a slash
_NAME = re.compile(r"[\w][\w.-]*", re.ASCII).fullmatch
IS_COMMIT = re.compile(r"[0-9a-f]{40}").fullmatch
_PAGE_OF = re.compile(
    r"https?://(?P<host>[^/?#]+)/(?P<kind>(?:datasets|spaces)/)?(?P<name>[\w.-]+/[\w.-]+)"
    r"/(?:blob|resolve|raw|tree)/(?P<revision>[^/?#]+)(?:/(?P<path>[^?#]*))?(?:[?#].*)?",
    re.ASCII | re.DOTALL,
).fullmatch
_NEXT = re.compile(r'<([^<>]*)>\s*;[^,]*\brel\s*=\s*"?next\b').search  # of Link

_PAGE = 8 << 20  # bytes of one page of a list; the Hub's have 1000 entries of 300 bytes
_PAGES = 1000  # of one list: a million files, and no more, for a server may name pages without end

_SHA256 = re.compile(r"[0-9a-f]{64}").fullmatch


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository as the user named it. `root` is its address as it was written."""

    root: str
    kind: str
    name: str
    revision: str

    @property
    def files(self) -> str:
        """The path of its files on the Hub."""
        return self.name if self.kind == "models" else f"{self.kind}/{self.name}"


def parsed(address: str) -> tuple[Repository, str]:
    """The repository of an address, and the path in it.

    >>> parsed("hf://datasets/org/name@v1/a/b.pt")[1]
    'a/b.pt'
    """
    scheme, _, rest = address.partition("://")
    kind, written = "models", ""
    first, _, more = rest.partition("/")
    if first in _KINDS:
        kind, written, rest = first, f"{first}/", more
    elif first == "buckets":
        raise UnsupportedCheckpoint("is a bucket, which is not read", path=address)
    owner, _, more = rest.strip("/").partition("/")
    name, _, key = more.partition("/")
    name, at, revision = name.partition("@")
    if at:
        rest = more.partition("@")[2]
        found = _REFS(rest)
        revision = found[0] if found else rest.partition("/")[0]
        key = rest[len(revision) :].removeprefix("/")
    if not _NAME(owner) or not _NAME(name) or (at and not revision):
        hint = "write it as hf://OWNER/NAME[@REVISION][/PATH]"
        raise UnsupportedCheckpoint("names no repository", path=address, hint=hint)
    root = f"{scheme.lower()}://{written}{owner}/{name}{at}{revision}/"
    return Repository(root, kind, f"{owner}/{name}", unquote(revision) or "main"), key


def hub_address(address: str) -> str | None:
    """The ``hf://`` address of what a page or a link of the Hub shows; None for another address.

    >>> hub_address("https://huggingface.co/org/name/blob/main/a%20b.pt?download=true")
    'hf://org/name@main/a b.pt'
    """
    found = _PAGE_OF(address)
    if found is None or found["host"].lower() not in _hosts():
        return None
    path = unquote(found["path"] or "")
    kind, name, revision = found["kind"] or "", found["name"], found["revision"]
    return f"hf://{kind}{name}@{revision}/{path}"


def _hosts() -> tuple[str, ...]:
    """The hosts, as they are written, of the Hub that is in use."""
    host = endpoint().lower().partition("://")[2]
    if endpoint() != _ENDPOINT:
        return (host,)
    return host, "www.huggingface.co", "hf.co"


def endpoint() -> str:
    """The address of the Hub in use."""
    return shown(os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")


def hub_store(address: str) -> tuple[Store, str]:
    """The repository and revision of an address, and the path in it."""
    repository, key = parsed(address)
    if is_set("HF_HUB_OFFLINE"):
        raise UnsupportedCheckpoint(
            "is on the Hub, and HF_HUB_OFFLINE is set", path=address, hint="unset it"
        )
    needed("urllib3", address)
    return HubStore(repository), key


class HubStore(WebStore):
    """The files of one repository, of one commit. Keys are paths as they are."""

    can_list = True
    commits = True

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self._endpoint = endpoint()
        self._has_token = False
        super().__init__(repository.root)
        self._commit = repository.revision if IS_COMMIT(repository.revision) else None
        self._is_asked = self._commit is not None
        self._committing, self._listing = threading.Lock(), threading.Lock()
        self._linked: dict[str, Seen] = {}
        self._tree: dict[str, FolderListing] | None = None

    def _connected(self, root: str) -> Wire:
        from ckptconv.io.remote.wire import Credential, Wire, origin_of

        try:
            origin = origin_of(self._endpoint)
        except ValueError:
            origin = ("", "", 0)
        if origin[0] not in ("http", "https") or not origin[1]:
            raise UnsupportedCheckpoint("needs HF_ENDPOINT to be an http address", path=root)
        self._origin = origin
        token = hub_token()
        self._has_token = token is not None
        return Wire(None if token is None else Credential(origin, f"Bearer {token}"))

    # ----------------------------------------------------------------------------------- reading

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        if not self._is_asked:
            # one request finds out what commit the others are for
            with self._committing:
                if not self._is_asked:
                    return super().get(key, first, nbytes, pinned)
        return super().get(key, first, nbytes, pinned)

    def url(self, key: str) -> str:
        revision = quote(self._commit or self.repository.revision, safe="")
        return f"{self._endpoint}/{self.repository.files}/resolve/{revision}/{quote(key)}"

    def noted(self, key: str, answer: Answer) -> None:
        """What the Hub itself says, before it sends us elsewhere: the commit, what the file is."""
        own = [headers for url, headers in answer.hops if self._is_own(url)]
        told = [*own]
        if self._is_own(answer.target.url):
            told.append(answer.headers)
        for headers in told:
            commit = headers.get("X-Repo-Commit", "").strip()
            if self._commit is None and IS_COMMIT(commit):
                self._commit = commit
        self._is_asked = self._is_asked or self._commit is not None or answer.status < 300
        for headers in own:
            size, tag = headers.get("X-Linked-Size", ""), headers.get("X-Linked-ETag", "").strip()
            if size.isascii() and size.isdigit() and is_strong(tag):
                # git LFS and the Hub name the bytes of a large file by their SHA-256
                digest = _SHA256(tag.strip('"').lower())
                sha256 = digest and digest[0]
                self._linked[key] = Seen(int(size), tag, is_pinned=True, sha256=sha256)

    def _is_own(self, url: str) -> bool:
        from ckptconv.io.remote.wire import origin_of

        return origin_of(url) == self._origin

    def seen(self, key: str, size: int, headers: Headers) -> Seen:
        linked = self._linked.get(key)
        if linked is None:
            return seen(size, headers)
        if linked.size != size:
            what = f"has {size} bytes where it lies, and {linked.size} for the Hub"
            raise StoreError("passing", what, tries=LIES)
        return linked

    def refused(self, key: str, status: int, headers: Headers) -> StoreError:
        code = headers.get("X-Error-Code", "")
        name = self.repository.name
        page = f"{self._endpoint}/{self.repository.files}"
        if code == "EntryNotFound":
            return StoreError("missing", hint="check the address")
        if code == "RevisionNotFound":
            what = f"{name} has no revision {self.repository.revision}"
            return StoreError("final", what, hint="check the address")
        if code == "GatedRepo":
            what = f"{name} is open only to users who accept its conditions"
            hint = f"accept them at {page}, then set HF_TOKEN"
            if self._has_token:
                hint = f"accept them at {page}, as the user of the token"
            return StoreError("denied", what, hint=hint)
        if "Access to this resource is disabled" in headers.get("X-Error-Message", ""):
            return StoreError("denied", f"the Hub has disabled {name}")
        if status == 401 and self._has_token and "Invalid" in headers.get("X-Error-Message", ""):
            hint = "check HF_TOKEN, or log in again: hf auth login"
            return StoreError("denied", "the Hub does not accept the token", hint=hint)
        if code == "RepoNotFound" or status == 401:
            hint = "check its name; for a private one set HF_TOKEN, or log in: hf auth login"
            if self._has_token:
                hint = "check its name, and whether the token may read it"
            return StoreError("denied", f"the Hub shows no repository {name}", hint=hint)
        hints = {403: "check what the token may read"} if self._has_token else {}
        return refusal(status, headers, hints)

    # ----------------------------------------------------------------------------------- listing

    def list(self, prefix: str) -> FolderListing:
        """One request for all of a repository; a folder at a time where one answer is too short."""
        commit = self.commit()
        with self._listing:
            if self._tree is None:
                entries, more = self._entries(f"{self._api('tree')}/{commit}?recursive=true")
                self._tree = _folders(entries, "") if more is None else {}
        if self._tree:
            return self._tree.get(prefix, NOTHING)
        inner = quote(prefix.rstrip("/"), safe="")
        url: str | None = f"{self._api('tree')}/{commit}/{inner}".rstrip("/") + "?recursive=false"
        found: list[Any] = []
        for _ in range(_PAGES):
            if url is None:
                return _folders(found, prefix)[prefix]
            entries, url = self._entries(url)
            found += entries
        raise StoreError("final", f"the Hub lists more than {len(found)} files")

    def commit(self) -> str:
        """The commit of the revision, as it is when it is first asked for."""
        with self._committing:
            if self._commit is None:
                revision = quote(self.repository.revision, safe="")
                told, _ = self._asked(f"{self._api('revision')}/{revision}?expand=sha")
                commit = told.get("sha") if isinstance(told, dict) else None
                if not isinstance(commit, str) or not IS_COMMIT(commit):
                    raise StoreError("passing", "the Hub does not report the commit", tries=LIES)
                self._commit = commit
            return self._commit

    def _api(self, what: str) -> str:
        return f"{self._endpoint}/api/{self.repository.kind}/{self.repository.name}/{what}"

    def _entries(self, url: str) -> tuple[Sequence[Any], str | None]:
        """One page of a list, and the address of the next one."""
        try:
            told, headers = self._asked(url)
        except StoreError as error:
            if error.kind == "missing":
                return [], None
            raise
        if not isinstance(told, list):
            raise StoreError("passing", "the Hub sends no list of files", tries=LIES)
        found = _NEXT(headers.get("Link", ""))
        if found is None:
            return told, None
        following = urljoin(url, found[1])
        try:
            is_own = self._is_own(following)
        except ValueError:
            is_own = False
        if not is_own:
            raise StoreError("final", "the Hub names another host for the rest of its list")
        return told, following

    def _asked(self, url: str) -> tuple[Any, Headers]:
        from ckptconv.io.remote.wire import Target

        with self._wire.asked(Target(url), {}, 1 << 20) as answer:
            if answer.status != 200:
                raise self.refused("", answer.status, answer.headers)
            text = answer.read(_PAGE + 1)
            headers = answer.headers
        if len(text) > _PAGE:
            raise StoreError("final", "the Hub sends too long a list")
        try:
            return json.loads(text), headers
        except (ValueError, RecursionError):
            raise StoreError("passing", "the Hub sends no JSON", tries=LIES) from None

    # ------------------------------------------------------------------------------------- names

    def address(self, key: str) -> str:
        return self.locate(key)

    def written(self, name: str) -> str:
        return name

    def spoken(self, name: str) -> str:
        return name


def _folders(entries: Sequence[Any], prefix: str) -> dict[str, FolderListing]:
    """What lies in each folder, of a list of paths."""
    files: defaultdict[str, dict[str, Seen]] = defaultdict(dict, {prefix: {}})
    folders: defaultdict[str, set[str]] = defaultdict(set)
    for entry in entries:
        match entry:
            case {"path": str() as path} if path.startswith(prefix) and _is_plain(path):
                folder, name = split(path)
            case _:
                continue
        match entry:
            case {"type": "directory"}:
                folders[folder].add(name)
                files.setdefault(f"{path}/", {})
            case {"size": int() as size, "oid": str() as tag} if size >= 0:
                files[folder][name] = Seen(size, tag)
            case _:
                files[folder][name] = Seen(0)
    for folder in {*files, *folders}:  # a list of files may leave folders out
        while folder not in ("", prefix):
            folder, inner = split(folder)
            folders[folder].add(inner)
    return {at: FolderListing(files[at], frozenset(folders[at])) for at in {*files, *folders}}


def _is_plain(path: str) -> bool:
    """Whether every part of a path is the name of a file or folder."""
    return all(name not in ("", ".", "..") for name in path.split("/"))


# -------------------------------------------------------------------------------------- the token


def hub_token() -> str | None:
    """The token that requests to the Hub may bear, from where the Hub's own library keeps it; None
    without one. It is never shown.

    The variables and their order are those of huggingface_hub (`utils/_auth.py`, `constants.py`).
    """
    if is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    named = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    return _clean(named) or _token_in(_token_file())


def _token_file() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or f"{home}/token"))


def _token_in(file: Path) -> str | None:
    try:
        source = FileSource(file.expanduser())
        return _clean(read_whole(source, "small_record_bytes").decode("utf-8"))
    except (CheckpointError, OSError, RuntimeError, UnicodeDecodeError):
        return None  # RuntimeError: nobody knows a home


def _clean(text: str) -> str | None:
    """The token, if it can stand in a header."""
    text = text.strip()
    return text if text and text.isascii() and text.isprintable() else None
