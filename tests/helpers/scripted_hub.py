"""The endpoints of the Hugging Face Hub that are read from, and the host of its large files, both
in this process.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from urllib.parse import parse_qs, quote, unquote, urlsplit

from helpers.http_server import Content, HttpServer, content_tag
from helpers.scripted_server import Asked, Web

_LARGE = 10_000  # bytes from which a file lies on the other host
_EXPANDED = 50  # entries of a page of a tree that tells of commits too


def sha_of(content: Content) -> str:
    """The SHA-256 of a file, or what stands for it where it is too large to compute."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha256(content_tag(content).encode()).hexdigest()


def _entry(path: str, content: Content, is_expanded: bool) -> dict[str, object]:
    """What a tree says of a file."""
    said: dict[str, object] = {"type": "file", "oid": "f" * 40, "size": len(content), "path": path}
    if len(content) >= _LARGE:
        said["lfs"] = {"oid": sha_of(content), "size": len(content), "pointerSize": 134}
    if is_expanded:
        date = "2024-05-01T12:00:00.000Z"
        said["lastCommit"] = {"id": "c" * 40, "title": "A commit", "date": date}
    return said


@dataclass
class Hub:
    """Repositories by kind and name (``models/org/name``), each the commits of its revisions;
    commits hold files by path.

    `private` are the names of those that need the token, `gated` those that need more. With
    `small_elsewhere`, small files are moved to another path of the Hub. Where `far` is an
    `HttpServer`, its faults befall the large files (``/`` and their SHA-256).
    """

    revisions: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[str, dict[str, Content]] = field(default_factory=dict)
    token: str = "hf_geheim"
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    page: int = 1000
    small_elsewhere: bool = False
    web: Web = field(default_factory=Web)
    far: Web = field(default_factory=lambda: Web(host="localhost"))

    def __enter__(self) -> Hub:
        with ExitStack() as stack:
            stack.enter_context(self.web)
            stack.enter_context(self.far)
            self.web.fallback, self.far.fallback = self._answer, self._answer_far
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    @property
    def asked(self) -> int:
        """How many requests were made."""
        return len(self.web.asked) + len(self.far.asked)

    def commit(self, name: str, files: Mapping[str, Content], revision: str = "main") -> str:
        """Have files at a revision; the commit."""
        said = json.dumps([name, len(self.commits), sorted(files)]).encode()
        commit = hashlib.sha1(said).hexdigest()
        self.commits[commit] = dict(files)
        if isinstance(self.far, HttpServer):
            self.far.objects |= {f"/{sha_of(content)}": content for content in files.values()}
        self.revisions.setdefault(name, {})[revision] = commit
        return commit

    def _refuse(self, asked: Asked, status: int, code: str, **headers: object) -> None:
        asked.say(status, b'{"error": "no"}', X_Error_Code=code, **headers)

    def _found(self, asked: Asked, name: str, revision: str) -> str | None:
        """The commit of a revision, where this user may see it."""
        said = asked.headers.get("Authorization")
        if said is not None and said != f"Bearer {self.token}":
            message = "Invalid credentials in Authorization header"
            asked.say(401, X_Error_Message=message)
        elif name not in self.revisions or (name in self.private and said is None):
            self._refuse(asked, 404 if said else 401, "RepoNotFound")
        elif name in self.gated:
            self._refuse(asked, 403 if said else 401, "GatedRepo")
        else:
            commits = {**self.revisions[name], **{commit: commit for commit in self.commits}}
            if revision in commits:
                return commits[revision]
            self._refuse(asked, 404, "RevisionNotFound")
        return None

    def _answer(self, asked: Asked) -> None:
        url = urlsplit(asked.path)
        kind = r"(?:(models|datasets|spaces)/)"
        file = re.fullmatch(rf"/{kind}?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path)
        kept = re.fullmatch(r"/api/resolve-cache/[a-z]+/[^/]+/[^/]+/([^/]+)/(.+)", url.path)
        api = re.fullmatch(rf"/api/{kind}([^/]+/[^/]+)/(tree|revision)/([^/]+)(?:/(.+))?", url.path)
        if file is not None:
            name = f"{file[1] or 'models'}/{file[2]}"
            commit = self._found(asked, name, unquote(file[3]))
            if commit is not None:
                self._resolve(asked, commit, unquote(file[4]))
        elif kept is not None:
            content = self.commits[kept[1]][unquote(kept[2])]
            asked.serve(content, ETag=f'"{sha_of(content)}"', X_Repo_Commit=kept[1])
        elif api is not None:
            name = f"{api[1]}/{api[2]}"
            commit = self._found(asked, name, unquote(api[4]))
            if commit is not None and api[3] == "revision":
                asked.say(200, json.dumps({"id": api[2], "sha": commit}).encode())
            elif commit is not None:
                self._tree(asked, commit, unquote(api[5] or ""), parse_qs(url.query))
        else:
            asked.say(404)

    def _resolve(self, asked: Asked, commit: str, path: str) -> None:
        content = self.commits[commit].get(path)
        if content is None:
            return self._refuse(asked, 404, "EntryNotFound", X_Repo_Commit=commit)
        tag = f'"{sha_of(content)}"'
        if len(content) < _LARGE and self.small_elsewhere:
            name = asked.path.partition("/resolve/")[0][1:]
            kind = "models/" if name.count("/") == 1 else ""
            where = f"/api/resolve-cache/{kind}{name}/{commit}/{quote(path, safe='')}"
            return asked.move(where, 307, X_Repo_Commit=commit)
        if len(content) < _LARGE:
            return asked.serve(content, ETag=tag, X_Repo_Commit=commit)
        return asked.move(
            f"{self.far.url}/{tag.strip(chr(34))}?Signature=geheim",
            X_Repo_Commit=commit,
            X_Linked_Size=len(content),
            X_Linked_ETag=tag,
        )

    def _answer_far(self, asked: Asked) -> None:
        for files in self.commits.values():
            for content in files.values():
                if asked.path.startswith(f"/{sha_of(content)}?Signature="):
                    return asked.serve(content, ETag='"of the far host"')
        return asked.say(403)

    def _tree(self, asked: Asked, commit: str, folder: str, query: dict[str, list[str]]) -> None:
        inner = f"{folder}/" if folder else ""
        files = {
            path: content
            for path, content in sorted(self.commits[commit].items())
            if path.startswith(inner)
        }
        if not files and folder:
            return self._refuse(asked, 404, "EntryNotFound")
        entries = []
        is_recursive = query.get("recursive") == ["true"]
        is_expanded = query.get("expand") == ["true"]
        seen: set[str] = set()
        for path, content in files.items():
            names = path[len(inner) :].split("/")
            for depth in range(1, len(names) if is_recursive else min(2, len(names))):
                above = inner + "/".join(names[:depth])
                if above not in seen:
                    seen.add(above)
                    entries.append({"type": "directory", "oid": "d" * 40, "size": 0, "path": above})
            if is_recursive or len(names) == 1:
                entries.append(_entry(path, content, is_expanded))
        begin = int(query.get("cursor", ["0"])[0])
        end = begin + (min(self.page, _EXPANDED) if is_expanded else self.page)
        link = None
        if end < len(entries):
            said = f"recursive={str(is_recursive).lower()}" + ("&expand=true" * is_expanded)
            where = f"{self.web.url}{urlsplit(asked.path).path}?{said}&cursor={end}"
            link = f'<{where}>; rel="next"'
        body = json.dumps(entries[begin:end]).encode()
        return asked.say(200, body, **({} if link is None else {"Link": link}))
