"""A bucket of S3 in the memory of this process, whose requests fail where a test wants it.

`S3InMemory` is the store of S3 with a client that speaks to such a bucket: what ckptconv asks for,
and what it makes of the answers, is its own code.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import botocore.exceptions
import pytest

from ckptconv.io.remote import patience
from ckptconv.io.remote.causes import Forbidden
from ckptconv.io.remote.place import RemotePlace, Site
from ckptconv.io.remote.s3 import S3Store
from ckptconv.io.remote.store import FolderListing, ObjectBytes, Seen, Store, StoreError, Upload

Fault = Callable[[int, str, str], str | None]
"""Of a request, by its number (from 1), its name and its key: None, or how it fails.

final: it is refused; passing: it is not done, and another try would be; lost: it is done, and the
answer does not arrive; late: it is done, and the answer says that it failed for good.
"""


@dataclass
class Object:
    """What lies under a key."""

    data: bytes
    tag: str
    marks: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Begun:
    """An upload in the making."""

    key: str
    marks: Mapping[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


class Bucket:
    """Objects and unfinished uploads. `asked` are the requests; `fault` says which of them fail."""

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self.objects: dict[str, Object] = {}
        self.begun: dict[str, Begun] = {}
        self.asked: list[tuple[str, str]] = []
        self.fault: Fault = lambda number, name, key: None
        self.seen: Callable[[int, str, str], None] = lambda number, name, key: None
        self.is_dead = False
        self._lock = threading.RLock()
        self._tags = itertools.count(1)
        self.ids = itertools.count(1)
        for key, data in (objects or {}).items():
            self.put(key, data)

    def put(self, key: str, data: bytes, marks: Mapping[str, str] | None = None) -> None:
        """Have an object there."""
        self.objects[key] = Object(data, f'"{next(self._tags)}"', marks or {})

    @property
    def content(self) -> dict[str, bytes]:
        """The objects by their keys."""
        return {key: item.data for key, item in sorted(self.objects.items())}

    @property
    def left(self) -> list[str]:
        """The keys of what was begun and neither ended nor aborted."""
        return sorted(begun.key for begun in self.begun.values())

    def answer(self, name: str, key: str, work: Callable[[], Any]) -> Any:
        """Do what is asked for, or fail."""
        with self._lock:
            if self.is_dead:
                raise refusal(403, "AccessDenied")
            self.asked.append((name, key))
            number = len(self.asked)
            fault = self.fault(number, name, key)
        self.seen(number, name, key)
        if fault == "final":
            raise refusal(400, "InvalidArgument")
        if fault == "passing":
            raise refusal(503, "SlowDown")
        with self._lock:
            done = work()
        if fault == "lost":
            raise botocore.exceptions.ReadTimeoutError(endpoint_url="memory")
        if fault == "late":
            raise refusal(400, "InvalidArgument")
        return done


def refusal(status: int, code: str) -> botocore.exceptions.ClientError:
    """What the client of S3 raises."""
    about = {"HTTPStatusCode": status, "HTTPHeaders": {}}
    answer = {"Error": {"Code": code}, "ResponseMetadata": about}
    return botocore.exceptions.ClientError(answer, "Operation")


class Client:
    """The operations of botocore's client that ckptconv uses."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def head_object(self, Bucket: str, Key: str) -> Any:
        def work() -> Any:
            found = self._found(Key, 404, "404")
            return {"Metadata": found.marks, "ContentLength": len(found.data), "ETag": found.tag}

        return self._bucket.answer("head", Key, work)

    def put_object(
        self, Bucket: str, Key: str, Body: bytes, Metadata: Any = None, **options: Any
    ) -> Any:
        body = bytes(Body)

        def work() -> Any:
            self._check(Key, options)
            self._bucket.put(Key, body, Metadata)

        return self._bucket.answer("put", Key, work)

    def delete_object(self, Bucket: str, Key: str) -> Any:
        return self._bucket.answer("delete", Key, lambda: self._bucket.objects.pop(Key, None))

    def copy_object(self, Bucket: str, Key: str, CopySource: Any, **options: Any) -> Any:
        def work() -> Any:
            found = self._found(CopySource["Key"])
            self._check(Key, options)
            self._bucket.put(Key, found.data, found.marks)

        return self._bucket.answer("copy", Key, work)

    def create_multipart_upload(
        self, Bucket: str, Key: str, Metadata: Any = None, **options: Any
    ) -> Any:
        def work() -> Any:
            name = f"upload-{next(self._bucket.ids)}"
            self._bucket.begun[name] = Begun(Key, Metadata or {})
            return {"UploadId": name}

        return self._bucket.answer("begin", Key, work)

    def upload_part(
        self, Bucket: str, Key: str, UploadId: str, PartNumber: int, Body: Any, **options: Any
    ) -> Any:
        return self._part(Key, UploadId, PartNumber, lambda: bytes(Body))

    def upload_part_copy(
        self, Bucket: str, Key: str, UploadId: str, PartNumber: int, **options: Any
    ) -> Any:
        first, last = map(int, options["CopySourceRange"].removeprefix("bytes=").split("-"))

        def data() -> bytes:
            return self._found(options["CopySource"]["Key"]).data[first : last + 1]

        return {"CopyPartResult": self._part(Key, UploadId, PartNumber, data)}

    def _part(self, key: str, upload: str, number: int, data: Callable[[], bytes]) -> Any:
        def work() -> Any:
            self._upload(upload).parts[number] = data()
            return {"ETag": f'"part {number}"'}

        return self._bucket.answer("part", key, work)

    def complete_multipart_upload(
        self, Bucket: str, Key: str, UploadId: str, MultipartUpload: Any, **options: Any
    ) -> Any:
        def work() -> Any:
            begun = self._upload(UploadId)
            self._check(Key, options)
            numbers = [part["PartNumber"] for part in MultipartUpload["Parts"]]
            assert numbers == sorted(begun.parts), "all parts are named, in their order"
            self._bucket.put(Key, b"".join(begun.parts[at] for at in numbers), begun.marks)
            del self._bucket.begun[UploadId]

        return self._bucket.answer("complete", Key, work)

    def abort_multipart_upload(self, Bucket: str, Key: str, UploadId: str) -> Any:
        def work() -> None:
            self._upload(UploadId)
            del self._bucket.begun[UploadId]

        return self._bucket.answer("abort", Key, work)

    def get_paginator(self, operation: str) -> Any:
        bucket, upload_of = self._bucket, self._upload

        class Pages:
            def paginate(self, **options: Any) -> Iterator[Any]:
                if operation == "list_parts":
                    begun = upload_of(options["UploadId"])
                    parts = [{"Size": len(data)} for data in begun.parts.values()]
                    yield {"Parts": parts}
                    return
                begun_at = datetime(2026, 1, 1, tzinfo=timezone.utc)
                for name, item in [*bucket.begun.items()]:
                    if item.key.startswith(options["Prefix"]):
                        found = {"Key": item.key, "UploadId": name, "Initiated": begun_at}
                        yield {"Uploads": [found]}

        return Pages()

    def _found(self, key: str, status: int = 404, code: str = "NoSuchKey") -> Object:
        if key not in self._bucket.objects:
            raise refusal(status, code)
        return self._bucket.objects[key]

    def _upload(self, name: str) -> Begun:
        if name not in self._bucket.begun:
            raise refusal(404, "NoSuchUpload")
        return self._bucket.begun[name]

    def _check(self, key: str, options: Mapping[str, Any]) -> None:
        if options.get("IfNoneMatch") == "*" and key in self._bucket.objects:
            raise refusal(412, "PreconditionFailed")


class S3InMemory(S3Store):
    """The store of S3 over a bucket in memory; parts have `part` bytes."""

    def __init__(self, bucket: Bucket, *, part: int = 64 << 10) -> None:
        self.root, self.service, self.bucket = "s3://memory/", "s3", "memory"
        self.memory, self._part = bucket, part
        self.__dict__["client"] = Client(bucket)
        self._obstore, self._store = _Listed(bucket), None  # type: ignore[assignment]

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        def work() -> ObjectBytes:
            found = self.memory.objects.get(key)
            if found is None:
                raise StoreError("missing", "no such file")
            seen = Seen(len(found.data), found.tag, is_pinned=True)
            if pinned is not None and pinned != seen:
                raise StoreError("changed", "was changed while it was read")
            return ObjectBytes(found.data[first : first + nbytes], seen)

        return self._asked_for("get", key, work)

    def list(self, prefix: str) -> FolderListing:
        def work() -> FolderListing:
            inside = {
                key[len(prefix) :]: Seen(len(item.data), item.tag, is_pinned=True)
                for key, item in self.memory.objects.items()
                if key.startswith(prefix) and key != prefix
            }
            folders = {name.partition("/")[0] for name in inside if "/" in name}
            files = {name: seen for name, seen in inside.items() if "/" not in name}
            return FolderListing(files, frozenset(folders))

        return self._asked_for("list", prefix, work)

    def _asked_for(self, name: str, key: str, work: Callable[[], Any]) -> Any:
        try:
            return self.memory.answer(name, key, work)
        except botocore.exceptions.ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status == 403:
                raise Forbidden("denied", "S3 does not allow it") from None
            raise StoreError("passing" if status == 503 else "final", "S3 fails") from None
        except botocore.exceptions.ReadTimeoutError:
            raise StoreError("passing", "S3 does not answer") from None

    def begin(self, key: str, size: int) -> Upload:
        upload = super().begin(key, size)
        upload._part = self._part  # type: ignore[attr-defined]
        return upload


class _Listed:
    """What obstore lists of a bucket: objects under any key that lies in a folder."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def list(self, _: object, folder: str | None) -> list[list[Mapping[str, Any]]]:
        prefix = f"{folder}/" if folder else ""
        when = datetime(2026, 1, 1, tzinfo=timezone.utc)
        found = {key: it for key, it in self._bucket.objects.items() if key.startswith(prefix)}
        return [
            [
                {"path": key, "size": len(item.data), "last_modified": when, "e_tag": item.tag}
                for key, item in found.items()
            ]
        ]


def bucket_place(bucket: Bucket, key: str, *, part: int = 64 << 10) -> RemotePlace:
    """What is called `key` in a bucket, of which nothing is known yet."""
    return RemotePlace(Site(S3InMemory(bucket, part=part)), key)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket, which is what ``s3://memory/…`` means; nobody waits before another try."""
    made = Bucket()

    def store_of(address: str) -> tuple[Store, str]:
        scheme, _, rest = address.partition("://")
        assert (scheme, rest.partition("/")[0]) == ("s3", "memory")
        return S3InMemory(made), rest.partition("/")[2]

    monkeypatch.setattr("ckptconv.io.remote.place.store_of", store_of)
    monkeypatch.setattr(patience, "FIRST", 0.0)
    return made
