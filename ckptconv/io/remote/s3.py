"""S3: read by obstore; written by botocore, which can complete an upload on a condition and list
what others left unfinished.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from ckptconv.io.crc import crc32
from ckptconv.io.remote.credentials import endpoint_of, profile_session
from ckptconv.io.remote.missing import needed
from ckptconv.io.remote.objects import ObjectStoreOf, parts_of
from ckptconv.io.remote.store import TRIES, Failing, StoreError, Unfinished, Upload
from ckptconv.io.remote.uploads import PartsUpload, key_of_hidden

T = TypeVar("T")

_LARGEST_COPY = 5 << 30  # bytes that one request copies


def s3_store(address: str) -> tuple[S3Store, str]:
    """The bucket of an address, and the key in it."""
    scheme, bucket, key = parts_of(address)
    return S3Store("s3", scheme, bucket), key


class S3Store(ObjectStoreOf):
    """The objects of one bucket of S3."""

    can_write = True

    @cached_property
    def client(self) -> Any:
        """The client that writes."""
        needed("botocore", self.root)
        from botocore.config import Config

        endpoint = endpoint_of("s3")
        config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=10,
            read_timeout=120,
            max_pool_connections=16,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={
                "addressing_style": "path" if endpoint else "auto",
                "payload_signing_enabled": False,
            },
        )
        return profile_session().create_client("s3", endpoint_url=endpoint, config=config)

    def begin(self, key: str, size: int) -> Upload:
        return _S3Upload(self.client, self.bucket, key, size)

    def move(self, old: str, new: str, *, create: bool) -> None:
        copy_source = {"Bucket": self.bucket, "Key": old}
        size = self._asked(self.client.head_object, Key=old)["ContentLength"]
        if create:
            _refuse_existing(self.client, self.bucket, new)
        condition = {"IfNoneMatch": "*"} if create else {}
        if size <= _LARGEST_COPY:
            self._asked(self.client.copy_object, Key=new, CopySource=copy_source, **condition)
        else:
            self._copy_parts(copy_source, new, size, condition)
        self.remove(old)

    def _copy_parts(
        self, copy_source: dict[str, str], new: str, size: int, condition: dict[str, str]
    ) -> None:
        upload = self._asked(self.client.create_multipart_upload, Key=new)["UploadId"]
        of = {"Key": new, "UploadId": upload}
        try:
            parts = []
            for number, first in enumerate(range(0, size, _LARGEST_COPY), 1):
                last = min(size, first + _LARGEST_COPY) - 1
                done = self._asked(
                    self.client.upload_part_copy,
                    **of,
                    PartNumber=number,
                    CopySource=copy_source,
                    CopySourceRange=f"bytes={first}-{last}",
                )
                parts.append({"PartNumber": number, "ETag": done["CopyPartResult"]["ETag"]})
            complete = self.client.complete_multipart_upload
            self._asked(complete, **of, MultipartUpload={"Parts": parts}, **condition)
        except BaseException:
            self._asked(self.client.abort_multipart_upload, **of)
            raise

    def remove(self, key: str) -> None:
        self._asked(self.client.delete_object, Key=key)

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        pages = self.client.get_paginator("list_multipart_uploads")
        found = []
        for page in _answered(lambda: list(pages.paginate(Bucket=self.bucket, Prefix=prefix))):
            for item in page.get("Uploads", []):
                begun = item["Initiated"].isoformat() if "Initiated" in item else ""
                size = self._size_of(item["Key"], item["UploadId"])
                found.append(Unfinished(item["Key"], item["UploadId"], begun, size))
        return [*found, *self._hidden(prefix)]

    def _size_of(self, key: str, upload: str) -> int | None:
        pages = self.client.get_paginator("list_parts")
        try:
            listed = list(pages.paginate(Bucket=self.bucket, Key=key, UploadId=upload))
        except Exception:
            return None
        return sum(int(part["Size"]) for page in listed for part in page.get("Parts", []))

    def _hidden(self, prefix: str) -> list[Unfinished]:
        pages = self.client.get_paginator("list_objects_v2")
        return [
            Unfinished(item["Key"], "", item["LastModified"].isoformat(), item["Size"])
            for page in _answered(lambda: list(pages.paginate(Bucket=self.bucket, Prefix=prefix)))
            for item in page.get("Contents", [])
            if key_of_hidden(item["Key"]) is not None
        ]

    def abort(self, left: Unfinished) -> None:
        if left.id:
            self._asked(self.client.abort_multipart_upload, Key=left.key, UploadId=left.id)
        else:
            self.remove(left.key)

    def _asked(self, operation: Callable[..., Any], **options: Any) -> Any:
        return _answered(lambda: operation(Bucket=self.bucket, **options))


class _S3Upload(PartsUpload):
    def __init__(self, client: Any, bucket: str, key: str, size: int) -> None:
        super().__init__(size)
        self._client = client
        self._of: dict[str, Any] = {"Bucket": bucket, "Key": key}

    def _begin(self) -> None:
        create = self._client.create_multipart_upload
        found = _answered(lambda: create(**self._of, ChecksumAlgorithm="CRC32"))
        self._of["UploadId"] = found["UploadId"]

    def _send(self, number: int, data: bytearray) -> dict[str, Any]:
        checksum = _checksum(data)
        done = _answered(
            lambda: self._client.upload_part(
                **self._of, PartNumber=number, Body=data, ChecksumCRC32=checksum
            )
        )
        return {"PartNumber": number, "ETag": done["ETag"], "ChecksumCRC32": checksum}

    def _complete(self, parts: list[Any], *, create: bool) -> None:
        if create:
            _refuse_existing(self._client, self._of["Bucket"], self._of["Key"])
        condition = {"IfNoneMatch": "*"} if create else {}
        _answered(
            lambda: self._client.complete_multipart_upload(
                **self._of, MultipartUpload={"Parts": parts}, **condition
            )
        )

    def _put(self, data: bytearray, *, create: bool) -> None:
        if create:
            _refuse_existing(self._client, self._of["Bucket"], self._of["Key"])
        condition = {"IfNoneMatch": "*"} if create else {}
        checksum = _checksum(data)
        _answered(
            lambda: self._client.put_object(
                **self._of, Body=data, ChecksumCRC32=checksum, **condition
            )
        )

    def _drop(self) -> None:
        _answered(lambda: self._client.abort_multipart_upload(**self._of))


def _checksum(data: bytearray) -> str:
    return base64.b64encode(crc32(data).to_bytes(4, "big")).decode()


def _refuse_existing(client: Any, bucket: str, key: str) -> None:
    """Raise `StoreError` where there is an object: not every server knows the condition."""
    try:
        _answered(lambda: client.head_object(Bucket=bucket, Key=key))
    except StoreError as error:
        if error.kind != "missing":
            raise
        return
    raise StoreError("exists", "exists")


_KINDS: dict[str, Failing] = {
    "NoSuchBucket": "missing", "NoSuchKey": "missing", "NoSuchUpload": "missing", "404": "missing",
    "AccessDenied": "denied", "403": "denied", "InvalidAccessKeyId": "denied",
    "SignatureDoesNotMatch": "denied", "ExpiredToken": "denied", "InvalidToken": "denied",
    "PreconditionFailed": "exists", "ConditionalRequestConflict": "exists", "412": "exists",
    "SlowDown": "passing", "RequestTimeout": "passing", "Throttling": "passing",
    "BadDigest": "passing", "InternalError": "passing", "ServiceUnavailable": "passing",
}  # fmt: skip


def _answered(request: Callable[[], T]) -> T:
    """What a request gives; its errors as those of a store, in words without secrets."""
    import botocore.exceptions as errors

    try:
        return request()
    except errors.ClientError as error:
        raise _refused(error.response) from None
    except (errors.NoCredentialsError, errors.PartialCredentialsError):
        hint = "see: ckptconv help remote (credentials)"
        raise StoreError("denied", "S3 needs credentials, and none were found", hint=hint) from None
    except errors.EndpointConnectionError:
        hint = "check the address and the network"
        raise StoreError("passing", "S3 does not answer", hint=hint, tries=TRIES) from None
    except errors.HTTPClientError as error:
        raise StoreError("passing", f"S3 does not answer ({type(error).__name__})") from None
    except errors.BotoCoreError as error:
        raise StoreError("final", f"S3 cannot be asked ({type(error).__name__})") from None


def _refused(response: Any) -> StoreError:
    code = str(response.get("Error", {}).get("Code", ""))
    about = response.get("ResponseMetadata", {})
    status = int(about.get("HTTPStatusCode") or 0)
    wait = about.get("HTTPHeaders", {}).get("retry-after", "")
    kind = _KINDS.get(code) or ("passing" if status >= 500 or status in (408, 429) else "final")
    said = f"S3 answers {code or f'with status {status}'}"
    hint = "see: ckptconv help remote (credentials)" if kind == "denied" else None
    return StoreError(kind, said, hint=hint, wait=float(wait) if wait.isdigit() else None)
