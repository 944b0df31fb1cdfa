"""The endpoints of the Hugging Face Hub that are written to, as huggingface_hub uses them: which
files go to Git LFS, the LFS batch, uploads, and commits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any
from urllib.parse import unquote, urlsplit

from helpers.scripted_hub import Hub
from helpers.scripted_server import Asked


@dataclass
class WrittenHub(Hub):
    """A Hub that takes commits. `large` are the patterns of its ``.gitattributes``, `ignored` those
    of its ``.gitignore``; `uploads` are the objects that it got, each as often as it was sent.

    Commits are refused with the status `refusal`, where there is one; `before_commit` is called
    before each.
    """

    large: tuple[str, ...] = ("*.safetensors", "*.bin", "*.pt")
    ignored: tuple[str, ...] = ()
    uploads: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    summaries: list[str] = field(default_factory=list)
    refusal: int | None = None
    before_commit: Any = None

    def _answer(self, asked: Asked) -> None:
        path = urlsplit(asked.path).path
        kind = r"(models|datasets|spaces)"
        api = re.fullmatch(rf"/api/{kind}/([^/]+/[^/]+)/(preupload|commit)/([^/]+)", path)
        batch = re.fullmatch(r"/(?:(datasets|spaces)/)?(.+)\.git/info/lfs/objects/batch", path)
        if path == "/api/validate-yaml":
            asked.body()
            asked.say(200, b'{"errors": [], "warnings": []}')
        elif batch is not None:
            self._batch(asked)
        elif api is not None:
            body = asked.body()
            name = f"{api[1]}/{api[2]}"
            parent = self._found(asked, name, unquote(api[4]))
            if parent is None:
                return
            if asked.headers.get("Authorization") is None:
                self._refuse(asked, 401, "RepoNotFound")
            elif api[3] == "preupload":
                self._modes(asked, json.loads(body))
            else:
                self._commit(asked, name, unquote(api[4]), parent, body)
        else:
            super()._answer(asked)

    def _modes(self, asked: Asked, told: dict[str, Any]) -> None:
        files = []
        for file in told["files"]:
            is_large = any(fnmatch(file["path"], one) for one in self.large)
            is_ignored = any(fnmatch(file["path"], one) for one in self.ignored)
            mode = "lfs" if is_large else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": is_ignored})
        asked.say(200, json.dumps({"files": files}).encode())

    def _batch(self, asked: Asked) -> None:
        told = []
        for item in json.loads(asked.body())["objects"]:
            if item["oid"] not in self.objects:
                where = {"href": f"{self.far.url}/upload/{item['oid']}"}
                item = {**item, "actions": {"upload": where}}
            told.append(item)
        asked.say(200, json.dumps({"transfer": "basic", "objects": told}).encode())

    def _answer_far(self, asked: Asked) -> None:
        if asked.command != "PUT":
            return super()._answer_far(asked)
        oid = asked.path.removeprefix("/upload/")
        content = asked.body()
        if hashlib.sha256(content).hexdigest() != oid:
            return asked.say(400)
        self.uploads.append(oid)
        self.objects[oid] = content
        return asked.say(200)

    def _commit(self, asked: Asked, name: str, revision: str, parent: str, body: bytes) -> None:
        if self.before_commit is not None:
            self.before_commit()
            parent = self.revisions[name][revision]
        if self.refusal is not None:
            return asked.say(self.refusal, b'{"error": "no commits today"}')
        files = dict(self.commits[parent])
        for line in map(json.loads, body.splitlines()):
            key, value = line["key"], line["value"]
            if key == "header":
                if value.get("parentCommit") not in (None, parent):
                    return asked.say(412, b'{"error": "A commit has happened since"}')
                self.summaries.append(value["summary"])
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            else:
                assert key == "deletedFile"
                del files[value["path"]]
        commit = self.commit(name, files, revision)
        where = f"{self.web.url}/{name}/commit/{commit}"
        said = {"success": True, "commitOid": commit, "commitUrl": where}
        return asked.say(200, json.dumps(said).encode())
