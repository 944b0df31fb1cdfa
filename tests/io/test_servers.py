"""The servers that other tests rely on do what is said of them."""

from __future__ import annotations

import time

import pytest

from helpers import raw_objects
from helpers.conformance import pattern
from helpers.servers import KINDS, REQUIRED, NotHere, Server, running

CONTENT = pattern(100_000)


def obstore_of(server: Server):
    """The bucket of a server as obstore sees it."""
    store = pytest.importorskip("obstore.store")
    kinds = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
    return kinds[server.scheme](server.bucket, **server.options)


@pytest.mark.servers
@pytest.mark.parametrize("name", KINDS)
def test_a_server_keeps_objects(name, servers):
    server = servers(name)
    key = "a b/é%2F.bin"
    raw_objects.put_object(server, key, CONTENT)
    raw_objects.put_object(server, "other", b"x")
    assert raw_objects.get_object(server, key) == CONTENT
    assert raw_objects.object_keys(server, "a b/") == [key]
    assert raw_objects.open_uploads(server, "a b/") == []
    raw_objects.delete_object(server, key)
    left = raw_objects.object_keys(server)  # other tests may have put some there
    assert "other" in left and key not in left
    with pytest.raises(KeyError):
        raw_objects.get_object(server, key)


@pytest.mark.servers
@pytest.mark.parametrize("name", KINDS)
def test_a_server_gives_ranges_to_a_second_client(name, servers):
    server = servers(name)
    raw_objects.put_object(server, "ranges", CONTENT)
    store = obstore_of(server)
    if name == "rclone":  # it says 200, of the right bytes
        with pytest.raises(Exception, match="non-partial"):
            store.get_range("ranges", start=5, length=10)
    else:
        assert bytes(store.get_range("ranges", start=5, length=10)) == CONTENT[5:15]
    assert store.head("ranges")["size"] == len(CONTENT)


@pytest.mark.servers
@pytest.mark.parametrize("name", KINDS)
def test_a_bucket_is_made_once_or_twice(name, servers):
    server = servers(name)
    for _ in range(2):
        raw_objects.make_bucket(server, "another")
    raw_objects.put_object(server, "k", b"v", "another")
    assert raw_objects.object_keys(server, bucket="another") == ["k"]


@pytest.mark.servers
@pytest.mark.parametrize("name", [name for name in KINDS if name != "fake-gcs-server"])
def test_uploads_that_were_begun_are_seen(name, servers):
    server = servers(name)
    key = "begun/here"
    raw_objects.put_object(server, "begun/whole", b"x")
    if server.scheme == "s3":
        from helpers.servers import s3_client

        s3_client(server).create_multipart_upload(Bucket=server.bucket, Key=key)
    else:
        where = f"{server.bucket}/{key}?comp=block&blockid=AAAA"
        raw_objects.azure_request(server, "PUT", where, body=b"x", headers={"Content-Type": "a/b"})
    assert [found for found, _ in raw_objects.open_uploads(server, "begun/")] == [key]
    assert raw_objects.open_uploads(server, "not/") == []
    assert key not in raw_objects.object_keys(server)


@pytest.mark.servers
@pytest.mark.parametrize("name", REQUIRED)
def test_a_part_is_put_on_a_condition(name, servers):
    """What ckptconv's outputs rely on: an upload is not completed where there is an object."""
    from botocore.exceptions import ClientError

    from helpers.servers import s3_client

    server = servers(name)
    client, where = s3_client(server), {"Bucket": server.bucket, "Key": "once"}
    raw_objects.put_object(server, "once", b"first")
    upload = {**where, "UploadId": client.create_multipart_upload(**where)["UploadId"]}
    tag = client.upload_part(**upload, PartNumber=1, Body=b"second")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.complete_multipart_upload(**upload, MultipartUpload=parts, IfNoneMatch="*")
    assert ("once", upload["UploadId"]) in raw_objects.open_uploads(server)
    client.abort_multipart_upload(**upload)
    assert raw_objects.open_uploads(server, "once") == []
    assert raw_objects.get_object(server, "once") == b"first"


def test_a_server_that_does_not_start_is_told_of_and_not_left_running(tmp_path):
    begin = time.monotonic()
    with (
        pytest.raises(NotHere, match="does not start: no port"),
        running(["sh", "-c", "echo no port; exit 3"], tmp_path, lambda: False),
    ):
        pass
    assert time.monotonic() - begin < 5
