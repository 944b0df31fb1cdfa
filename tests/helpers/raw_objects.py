"""The objects of a real server, put and looked at without ckptconv and without obstore: by botocore
for S3, by the JSON API for Google's, by signed REST for Azure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from helpers.servers import Server, azure_request, s3_client


def make_bucket(server: Server, name: str) -> None:
    """Make a bucket, which may be there."""
    if server.scheme == "s3":
        client = s3_client(server)
        if name not in [bucket["Name"] for bucket in client.list_buckets().get("Buckets", [])]:
            client.create_bucket(Bucket=name)
    elif server.scheme == "gs":
        _gcs(server, "POST", "/storage/v1/b", json.dumps({"name": name}).encode(), good=(200, 409))
    else:
        _azure(server, "PUT", f"{name}?restype=container", good=(201, 409))


def put_object(server: Server, key: str, content: bytes, bucket: str = "") -> None:
    """Put an object, in place of one that is there."""
    bucket = bucket or server.bucket
    if server.scheme == "s3":
        s3_client(server).put_object(Bucket=bucket, Key=key, Body=content)
    elif server.scheme == "gs":
        where = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(key, safe='')}"
        _gcs(server, "POST", where, content)
    else:
        headers = {"x-ms-blob-type": "BlockBlob", "Content-Type": "application/octet-stream"}
        _azure(server, "PUT", f"{bucket}/{quote(key)}", content, headers, good=(201,))


def get_object(server: Server, key: str, bucket: str = "") -> bytes:
    """An object as a whole; KeyError where there is none."""
    bucket = bucket or server.bucket
    if server.scheme == "s3":
        client = s3_client(server)
        try:
            answer = client.get_object(Bucket=bucket, Key=key)
        except client.exceptions.NoSuchKey:
            raise KeyError(key) from None
        return bytes(answer["Body"].read())
    if server.scheme == "gs":
        where = f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media"
        answer = _gcs(server, "GET", where, good=(200, 404))
    else:
        answer = _azure(server, "GET", f"{bucket}/{quote(key)}", good=(200, 404))
    if answer.status == 404:
        raise KeyError(key)
    return bytes(answer.data)


def object_keys(server: Server, prefix: str = "", bucket: str = "") -> list[str]:
    """The keys of all objects, in order."""
    bucket = bucket or server.bucket
    if server.scheme == "s3":
        pages = s3_client(server).get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=bucket, Prefix=prefix)
        return sorted(item["Key"] for page in found for item in page.get("Contents", []))
    if server.scheme == "gs":
        where = f"/storage/v1/b/{bucket}/o?prefix={quote(prefix, safe='')}"
        listed = json.loads(_gcs(server, "GET", where).data)
        return sorted(item["name"] for item in listed.get("items", []))
    where = f"{bucket}?restype=container&comp=list&prefix={quote(prefix, safe='')}"
    tree = ElementTree.fromstring(_azure(server, "GET", where).data.decode("utf-8-sig"))
    return sorted(name.text or "" for name in tree.iter("Name"))


def delete_object(server: Server, key: str, bucket: str = "") -> None:
    """Delete an object that is there."""
    bucket = bucket or server.bucket
    if server.scheme == "s3":
        s3_client(server).delete_object(Bucket=bucket, Key=key)
    elif server.scheme == "gs":
        where = f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}"
        _gcs(server, "DELETE", where, good=(200, 204))
    else:
        _azure(server, "DELETE", f"{bucket}/{quote(key)}", good=(202,))


def open_uploads(server: Server, prefix: str = "", bucket: str = "") -> list[tuple[str, str]]:
    """What was begun and neither ended nor aborted: the key and the id of each multipart upload of
    S3; of Azure, the blobs of which only blocks are there, without an id.
    """
    bucket = bucket or server.bucket
    if server.scheme == "s3":
        client = s3_client(server)
        pages = client.get_paginator("list_multipart_uploads")
        try:
            found = list(pages.paginate(Bucket=bucket, Prefix=prefix))
        except client.exceptions.NoSuchUpload:  # what rclone says where there was never one
            return []
        return sorted(
            (item["Key"], item["UploadId"]) for page in found for item in page.get("Uploads", [])
        )
    if server.scheme == "gs":
        return []  # fake-gcs-server has none
    where = f"{bucket}?restype=container&comp=list&include=uncommittedblobs"
    tree = ElementTree.fromstring(_azure(server, "GET", where).data.decode("utf-8-sig"))
    names = {name.text or "" for name in tree.iter("Name")}
    begun = names - set(object_keys(server, bucket=bucket))
    return sorted((name, "") for name in begun if name.startswith(prefix))


def _gcs(
    server: Server, method: str, where: str, body: bytes = b"", good: tuple[int, ...] = (200,)
) -> Any:
    import urllib3

    headers = {"Content-Type": "application/octet-stream"} if body else {}
    answer = urllib3.request(
        method, server.endpoint + where, body=body or None, headers=headers, retries=False
    )
    assert answer.status in good, (method, where, answer.status, answer.data[:300])
    return answer


def _azure(
    server: Server,
    method: str,
    where: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    good: tuple[int, ...] = (200,),
) -> Any:
    answer = azure_request(server, method, where, body=body, headers=dict(headers or {}))
    code = re.search(rb"<Code>(\w+)", answer.data)
    assert answer.status in good, (method, where, answer.status, code and code[1])
    return answer
