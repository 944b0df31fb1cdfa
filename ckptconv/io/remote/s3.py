"""S3: read by obstore; written by botocore, which can complete an upload on a condition and list
what others left unfinished.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from ckptconv.io.crc import crc32
from ckptconv.io.remote.causes import (
    CREDENTIALS,
    NAMES,
    Forbidden,
    credentials_failed,
    meant,
    not_connected,
)
from ckptconv.io.remote.credentials import (
    certificates_of_aws,
    endpoint_of,
    is_anonymous,
    profile_session,
    region_of,
    usual_endpoint,
)
from ckptconv.io.remote.network import as_file, needed, proxy_for
from ckptconv.io.remote.objects import ObjectStoreOf, parts_of
from ckptconv.io.remote.store import StoreError, Unfinished, Upload, unless_missing
from ckptconv.io.remote.uploads import PartsUpload, key_of_hidden

T = TypeVar("T")

_COPIED = 1 << 30  # bytes that one request copies; S3 takes up to 5 GiB
_MARK = "ckptconv-upload"
_GONE = ("missing", "final")


def s3_store(address: str) -> tuple[S3Store, str]:
    """The bucket of an address, and the key in it."""
    scheme, bucket, key = parts_of(address)
    return S3Store("s3", scheme, bucket), key


class S3Store(ObjectStoreOf):
    """The objects of one bucket of S3."""

    @cached_property
    def client(self) -> Any:
        """The client that writes."""
        needed("botocore", self.root)
        import botocore
        from botocore.config import Config

        endpoint = endpoint_of("s3")
        region = region_of(self.bucket, endpoint)
        at = usual_endpoint("s3", self.bucket, endpoint, region)
        proxy, trusted = proxy_for(at), certificates_of_aws()
        config = Config(
            signature_version=botocore.UNSIGNED if is_anonymous() else None,
            # `patiently` tries again, and each part has a checksum of its own
            retries={"total_max_attempts": 1},
            connect_timeout=10,
            read_timeout=120,
            max_pool_connections=16,
            # the default since 1.36 adds a checksum that other servers than AWS may refuse
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            user_agent_extra="ckptconv",
            proxies={at.partition(":")[0]: proxy},
            s3={
                "addressing_style": "path" if endpoint else "auto",
                # no SHA-256 beside the CRC-32 of each part; without TLS botocore makes one still
                "payload_signing_enabled": False,
            },
        )
        return profile_session().create_client(
            "s3",
            endpoint_url=endpoint,
            config=config,
            region_name=region,
            verify=as_file(trusted) if trusted and at.startswith("https:") else None,
        )

    def begin(self, key: str, size: int) -> Upload:
        return _S3Upload(self, key, size)

    def asked(self, operation: str, **options: Any) -> Any:
        """What the bucket answers to an operation of the client."""
        return _answered(lambda: getattr(self.client, operation)(Bucket=self.bucket, **options))

    def made(self, operation: str, key: str, mark: str, *, create: bool, **options: Any) -> None:
        """Have an object appear at `key`, marked with `mark`; with `create` where there is none.

        Not every server knows the condition, so it is asked for the object first. Where the answer
        to an earlier try was lost, the object is there: with its mark.
        """
        if create:
            found = self.mark_of(key)
            if found is not None:
                return _refuse_other(found, mark)
            options["IfNoneMatch"] = "*"
        try:
            self.asked(operation, Key=key, **options)
        except StoreError as error:
            # an upload that was completed by a try before this one is not known any more
            is_gone = operation == "complete_multipart_upload" and error.kind in _GONE
            if error.kind != "changed" and not is_gone:
                raise
            found = self.mark_of(key)
            if found is None or (is_gone and found != mark):
                raise
            _refuse_other(found, mark)

    def mark_of(self, key: str) -> str | None:
        """The mark of the object that is there, empty where it has none; None without an object, or
        where this user may not know.
        """
        with unless_missing(), contextlib.suppress(Forbidden):
            return str(self.asked("head_object", Key=key).get("Metadata", {}).get(_MARK, ""))
        return None

    def move(self, old: str, new: str, *, create: bool) -> None:
        found = self.asked("head_object", Key=old)
        mark, size = found.get("Metadata", {}).get(_MARK, ""), found["ContentLength"]
        source = {"Bucket": self.bucket, "Key": old}
        if size <= _COPIED:
            self.made("copy_object", new, mark, create=create, CopySource=source)
        else:
            self._copy_parts(source, new, size, mark, create=create)

    def _copy_parts(
        self, source: dict[str, str], new: str, size: int, mark: str, *, create: bool
    ) -> None:
        begun = self.asked("create_multipart_upload", Key=new, Metadata={_MARK: mark})
        of = {"UploadId": begun["UploadId"]}
        try:
            parts = []
            for number, first in enumerate(range(0, size, _COPIED), 1):
                done = self.asked(
                    "upload_part_copy",
                    **of,
                    Key=new,
                    PartNumber=number,
                    CopySource=source,
                    CopySourceRange=f"bytes={first}-{min(size, first + _COPIED) - 1}",
                )
                parts.append({"PartNumber": number, "ETag": done["CopyPartResult"]["ETag"]})
            complete = "complete_multipart_upload"
            self.made(complete, new, mark, create=create, **of, MultipartUpload={"Parts": parts})
        except BaseException:  # S3 would keep the parts, and charge for them
            self.asked("abort_multipart_upload", Key=new, **of)
            raise

    def remove(self, key: str) -> None:
        self.asked("delete_object", Key=key)

    # ------------------------------------------------------------------------- what others left

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        found = []
        folder = prefix[: prefix.rfind("/") + 1]
        for page in self._pages("list_multipart_uploads", Prefix=folder):
            for item in page.get("Uploads", []):
                key, upload = item["Key"], item["UploadId"]
                if key.startswith(prefix) or (key_of_hidden(key) or "").startswith(prefix):
                    begun = item["Initiated"].isoformat() if "Initiated" in item else ""
                    found.append(Unfinished(key, upload, begun, self._size_of(key, upload)))
        return [*found, *super().unfinished(prefix)]

    def _size_of(self, key: str, upload: str) -> int | None:
        try:
            listed = self._pages("list_parts", Key=key, UploadId=upload)
        except StoreError:  # it is gone by now, or this user may not know
            return None
        return sum(int(part["Size"]) for page in listed for part in page.get("Parts", []))

    def _pages(self, operation: str, **options: Any) -> list[Any]:
        pages = self.client.get_paginator(operation)
        return _answered(lambda: list(pages.paginate(Bucket=self.bucket, **options)))

    def abort(self, left: Unfinished) -> None:
        if left.id:
            self.asked("abort_multipart_upload", Key=left.key, UploadId=left.id)
        else:
            self.remove(left.key)


def _refuse_other(found: str, mark: str) -> None:
    """Raise `StoreError` for an object whose mark is not `mark`: somebody else put it there."""
    if not mark or found != mark:
        raise StoreError("exists")


class _S3Upload(PartsUpload):
    def __init__(self, store: S3Store, key: str, size: int) -> None:
        super().__init__(size)
        self._store, self._key = store, key
        self._id = ""

    def _begin(self) -> None:
        begun = self._store.asked(
            "create_multipart_upload",
            Key=self._key,
            ChecksumAlgorithm="CRC32",
            Metadata={_MARK: self._mark},
        )
        self._id = begun["UploadId"]

    def _send(self, number: int, data: bytearray) -> dict[str, Any]:
        checksum = _checksum(data)
        done = self._store.asked(
            "upload_part",
            Key=self._key,
            UploadId=self._id,
            PartNumber=number,
            Body=data,
            ChecksumCRC32=checksum,
        )
        return {"PartNumber": number, "ETag": done["ETag"], "ChecksumCRC32": checksum}

    def _complete(self, parts: list[Any], *, create: bool) -> None:
        self._store.made(
            "complete_multipart_upload",
            self._key,
            self._mark,
            create=create,
            UploadId=self._id,
            MultipartUpload={"Parts": parts},
        )

    def _put(self, data: bytearray, *, create: bool) -> None:
        self._store.made(
            "put_object",
            self._key,
            self._mark,
            create=create,
            Body=data,
            ChecksumCRC32=_checksum(data),
            Metadata={_MARK: self._mark},
        )

    def _drop(self) -> None:
        try:
            self._store.asked("abort_multipart_upload", Key=self._key, UploadId=self._id)
        except StoreError as error:
            if error.kind == "passing":
                raise


def _checksum(data: bytearray) -> str:
    return base64.b64encode(crc32(data).to_bytes(4, "big")).decode()


def _answered(request: Callable[[], T]) -> T:
    """What a request gives; its errors as those of a store, in words without secrets."""
    import botocore.exceptions as errors

    who = NAMES["s3"]
    try:
        return request()
    except errors.ClientError as error:
        raise _refused(error.response) from None
    except errors.NoCredentialsError:
        what = f"{who} needs credentials, and there are none"
        raise StoreError("denied", what, hint=CREDENTIALS) from None
    except (
        errors.PartialCredentialsError,
        errors.CredentialRetrievalError,
        errors.SSOError,
    ) as error:
        what, hint = credentials_failed(error)
        raise StoreError("denied", f"{who} cannot be asked: {what}", hint=hint) from None
    except (errors.HTTPClientError, errors.ConnectionError) as error:
        raise not_connected(error, who) from None
    except errors.BotoCoreError as error:
        raise StoreError("final", f"{who} cannot be asked ({type(error).__name__})") from None


def _refused(response: Any) -> StoreError:
    error, about = response.get("Error", {}), response.get("ResponseMetadata", {})
    headers = about.get("HTTPHeaders", {})
    code, wait = str(error.get("Code", "")), headers.get("retry-after", "")
    if code.isdigit():  # botocore makes one of the status where there is none
        code = ""
    return meant(
        "s3",
        code,
        int(about.get("HTTPStatusCode") or 0),
        region=error.get("Region") or headers.get("x-amz-bucket-region"),
        wait=float(wait) if wait.isdigit() else None,
    )
