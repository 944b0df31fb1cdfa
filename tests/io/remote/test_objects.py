"""Object stores without a server: what their errors mean, and who is told what when answers are
lost.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ckptconv.io.location import Location
from ckptconv.io.places import place_of
from ckptconv.io.remote import causes, patience, place, uploads
from ckptconv.io.remote.causes import Forbidden, meant, told_by_obstore
from ckptconv.io.remote.objects import ObjectStoreOf, parts_of
from ckptconv.io.remote.output import RemoteOutput
from ckptconv.io.remote.place import RemotePlace, Site
from ckptconv.io.remote.s3 import S3Store, s3_store
from ckptconv.io.remote.store import StoreError, Unfinished
from ckptconv.io.remote.uploads import key_of_hidden
from ckptconv.io.source import Source
from ckptconv.support.errors import OutputRefused, UnsupportedCheckpoint
from ckptconv.support.limits import limits
from helpers.conformance import (
    BYTES,
    DestinationConformance,
    LocationConformance,
    SourceConformance,
    pattern,
)
from helpers.http_server import Fault, HttpServer

obstore = pytest.importorskip("obstore")
from obstore.exceptions import GenericError, PermissionDeniedError, UnauthenticatedError  # noqa: E402
from obstore.store import MemoryStore  # noqa: E402

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(uploads, "PART", 1 << 20)
    monkeypatch.setattr(patience, "FIRST", 0.001)
    with limits(remote_seconds=2):
        yield


# ------------------------------------------------------------------ obstore, with a store in memory


class InMemory(ObjectStoreOf):
    """A bucket that obstore keeps in memory."""

    def __init__(self, bucket: str) -> None:
        self._memory = MemoryStore()
        super().__init__("az", "az", bucket)

    def _opened(self, tries: int) -> Any:
        return self._memory

    def put_object(self, key: str, content: bytes) -> None:
        obstore.put(self._memory, key, content)

    def content(self) -> dict[str, bytes]:
        found = [meta["path"] for page in obstore.list(self._memory) for meta in page]
        return {path: bytes(obstore.get(self._memory, path).bytes()) for path in found}


STORES: dict[str, InMemory] = {}


def store_of(room: Path) -> InMemory:
    return STORES.setdefault(str(room), InMemory(room.name))


def place_in(room: Path, key: str) -> RemotePlace:
    return RemotePlace(Site(store_of(room)), key)


class TestSource(SourceConformance):
    def source(self, room: Path, content: bytes) -> Source:
        self.key = f"run/a b{next(_numbers)}.bin"
        store_of(room).put_object(self.key, content)
        return self.again(room, content)

    def again(self, room: Path, content: bytes) -> Source:
        return place_in(room, self.key).open()

    def change(self, room: Path) -> None:
        store_of(room).put_object(self.key, BYTES[::-1])

    # the tag pins every request, so nothing is asked after the last one
    def test_a_change_while_it_is_read_is_told(self, tmp_path):
        source = self.source(tmp_path, BYTES * 40)
        self.change(tmp_path)
        with pytest.raises(Exception, match="was changed while it was read"):
            source.read(200_000, 150_000)


class TestLocation(LocationConformance):
    def home(self, room: Path) -> Location:
        return place_in(room, "")

    def write(self, place: Location, content: bytes) -> None:
        assert isinstance(place, RemotePlace)
        place.site.store.put_object(place.key, content)  # type: ignore[attr-defined]
        place.site._heads.clear()  # a command would not look twice
        place.site._listings.clear()

    def test_it_is_a_value(self, there):
        """A store in memory is not another process's."""


class Written(DestinationConformance):
    READ_BACK = False

    def destination(self, room, *, force=False, size=0):
        return RemoteOutput(place_in(room, "out.bin"), force=force, read_back=self.READ_BACK)

    def everything(self, room):
        return store_of(room).content()

    def found(self, room):
        return {name: raw for name, raw in self.everything(room).items() if name[0] != "."}

    def test_more_than_there_is_room_for_is_refused_before_any_work(self, tmp_path):
        """A store has room."""


class TestWritten(Written):
    def test_a_committed_draft_can_be_read_back(self, tmp_path):
        """It was not asked for."""


class TestWrittenReadBack(Written):
    READ_BACK = True


@pytest.mark.parametrize("size", [1000, 3 << 20], ids=["one request", "parts"])
def test_of_two_writers_by_obstore_one_wins(size, tmp_path):
    kind = TestWritten()
    first, second = kind.content(1, size), kind.content(2, size)
    with (
        pytest.raises(OutputRefused, match="exists now"),
        kind.destination(tmp_path) as one,
        kind.destination(tmp_path) as two,
    ):
        kind.write(one, first)
        kind.write(two, second)
        two.commit()
        one.commit()
    assert kind.everything(tmp_path) == second


@pytest.mark.parametrize("size", [1000, 3 << 20], ids=["one request", "parts"])
@pytest.mark.parametrize("operation", ["put", "copy", "delete"])
def test_an_answer_that_is_lost_is_not_taken_for_another_writer(
    operation, size, tmp_path, monkeypatch
):
    kind, lost, real = TestWritten(), [], getattr(obstore, operation)

    def lose(*given: Any, **options: Any) -> Any:
        done = real(*given, **options)
        if not lost:
            lost.append(operation)
            raise GenericError("error sending request")
        return done

    monkeypatch.setattr(obstore, operation, lose)
    kind.put(tmp_path, content := kind.content(1, size))
    assert kind.everything(tmp_path) == content
    assert lost or (operation != "put") == (size == 1000)


def test_what_obstore_left_is_listed_and_removed():
    store = InMemory("left")
    for key in ("run/.a.pt.0badcafe.ckptconv-part", "run/in/.b.pt.0badcafe.ckptconv-part", "run/a"):
        store.put_object(key, b"1234")
    found = store.unfinished("run/")
    assert sorted((item.key, item.nbytes) for item in found) == [
        ("run/.a.pt.0badcafe.ckptconv-part", 4),
        ("run/in/.b.pt.0badcafe.ckptconv-part", 4),
    ]
    assert [item.key for item in store.unfinished("run/a")] == ["run/.a.pt.0badcafe.ckptconv-part"]
    assert store.unfinished("other/") == []
    for item in found:
        assert item.begun
        store.abort(item)
    assert set(store.content()) == {"run/a"}


# --------------------------------------------------------------------- S3, with a service in memory


class Service(S3Store):
    """S3 as its writing sees it. `lost` names operations whose first answer does not arrive;
    a service that is `blind` heeds no condition.
    """

    def __init__(self) -> None:
        self.root, self.service, self.bucket = "s3://bucket/", "s3", "bucket"
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.uploads: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = {}
        self.lost: list[str] = []
        self.is_blind = False
        self._lock = threading.Lock()

    def get(self, key, first, nbytes, pinned):
        if key not in self.objects:
            raise StoreError("missing", "no such file")
        from ckptconv.io.remote.store import ObjectBytes, Seen

        content = self.objects[key][0]
        return ObjectBytes(
            content[first : first + nbytes], Seen(len(content), str(hash(content)), True)
        )

    def list(self, prefix):
        from ckptconv.io.remote.store import FolderListing

        return FolderListing({}, frozenset())

    def asked(self, operation: str, **options: Any) -> Any:
        with self._lock:
            answer = getattr(self, f"_{operation}")(**options)
            if operation in self.lost:
                self.lost.remove(operation)
                raise StoreError("passing", "S3 does not answer")
        return answer

    def _head_object(self, Key):
        if Key not in self.objects:
            raise meant("s3", "", 404)
        content, metadata = self.objects[Key]
        return {"Metadata": metadata, "ContentLength": len(content)}

    def _new(self, key, content, metadata, IfNoneMatch=None):
        if IfNoneMatch == "*" and key in self.objects and not self.is_blind:
            raise meant("s3", "PreconditionFailed", 412)
        self.objects[key] = content, metadata

    def _put_object(self, Key, Body, Metadata, ChecksumCRC32, **condition):
        assert ChecksumCRC32
        self._new(Key, bytes(Body), Metadata, **condition)

    def _create_multipart_upload(self, Key, Metadata, **options):
        number = f"id{next(_numbers)}"
        self.uploads[number] = Key, Metadata, {}
        return {"UploadId": number}

    def _upload_part(self, Key, UploadId, PartNumber, Body, ChecksumCRC32):
        self.uploads[UploadId][2][PartNumber] = bytes(Body)
        return {"ETag": f"tag{PartNumber}"}

    def _upload_part_copy(self, Key, UploadId, PartNumber, CopySource, CopySourceRange):
        first, last = map(int, CopySourceRange.removeprefix("bytes=").split("-"))
        content = self.objects[CopySource["Key"]][0][first : last + 1]
        return {"CopyPartResult": self._upload_part(Key, UploadId, PartNumber, content, "")}

    def _complete_multipart_upload(self, Key, UploadId, MultipartUpload, **condition):
        if UploadId not in self.uploads:
            raise meant("s3", "NoSuchUpload", 404)
        key, metadata, parts = self.uploads[UploadId]
        numbers = [part["PartNumber"] for part in MultipartUpload["Parts"]]
        assert numbers == sorted(parts)
        self._new(key, b"".join(parts[number] for number in numbers), metadata, **condition)
        del self.uploads[UploadId]

    def _abort_multipart_upload(self, Key, UploadId):
        if self.uploads.pop(UploadId, None) is None:
            raise meant("s3", "NoSuchUpload", 404)

    def _copy_object(self, Key, CopySource, **condition):
        self._new(Key, *self.objects[CopySource["Key"]], **condition)

    def _delete_object(self, Key):
        self.objects.pop(Key, None)


def written(service: Service, content: bytes, *, force: bool = False, read_back: bool = False):
    place = RemotePlace(Site(service), "run/a.pt")
    with RemoteOutput(place, force=force, read_back=read_back) as output:
        with output.draft("a.pt", len(content)) as draft:
            draft.stream.write(content)
            draft.commit()
        output.commit()


WAYS = pytest.mark.parametrize(
    ("size", "read_back"),
    [(1000, False), (1000, True), (3 << 20, False), (3 << 20, True)],
    ids=["small", "small, read back", "parts", "parts, read back"],
)
OPERATIONS = (
    "head_object", "put_object", "create_multipart_upload", "upload_part", "upload_part_copy",
    "complete_multipart_upload", "copy_object", "delete_object",
)  # fmt: skip


@WAYS
@pytest.mark.parametrize("copied", [1 << 30, 1 << 20], ids=["copied at once", "copied in parts"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_answer_of_s3_that_is_lost_is_not_taken_for_another_writer(
    operation, copied, size, read_back, monkeypatch
):
    from ckptconv.io.remote import s3

    monkeypatch.setattr(s3, "_COPIED", copied)
    service = Service()
    service.lost = [operation]
    content = pattern(size)
    written(service, content, read_back=read_back)
    assert {key: raw for key, (raw, _) in service.objects.items()} == {"run/a.pt": content}
    if operation != "create_multipart_upload":  # whose id nobody knows then: for `cleanup`
        assert service.uploads == {}


@WAYS
@pytest.mark.parametrize("is_blind", [False, True], ids=["heeds conditions", "heeds none"])
def test_an_object_that_is_there_is_not_replaced(is_blind, size, read_back):
    service = Service()
    service.is_blind = is_blind
    place = RemotePlace(Site(service), "run/a.pt")
    with (
        pytest.raises(OutputRefused, match="exists now"),
        RemoteOutput(place, force=False, read_back=read_back) as output,
    ):
        with output.draft("a.pt", size) as draft:
            draft.stream.write(pattern(size))
            draft.commit()
        service.objects["run/a.pt"] = b"theirs", {}
        output.commit()
    assert service.objects == {"run/a.pt": (b"theirs", {})} and service.uploads == {}
    written(service, pattern(size), force=True, read_back=read_back)
    assert service.objects["run/a.pt"][0] == pattern(size) and len(service.objects) == 1


def test_an_upload_that_somebody_aborts_is_not_there(tmp_path):
    """`cleanup` takes that for done; a writer is told."""
    service = Service()
    with pytest.raises(StoreError) as raised:
        service.abort(Unfinished("run/a.pt", "gone"))
    assert raised.value.kind == "missing"
    with (
        pytest.raises(OutputRefused, match="it was aborted; nothing was left behind"),
        RemoteOutput(RemotePlace(Site(service), "run/a.pt"), force=False) as output,
    ):
        with output.draft("a.pt", 3 << 20) as draft:
            draft.stream.write(pattern(3 << 20))
            draft.commit()
        service.uploads.clear()
        output.commit()
    assert service.objects == {}


def test_a_copy_that_fails_leaves_the_object_that_was_there(monkeypatch):
    from ckptconv.io.remote import s3

    monkeypatch.setattr(s3, "_COPIED", 1 << 20)
    service = Service()
    written(service, b"old")

    def refuse(**options: Any) -> None:
        raise meant("s3", "AccessDenied", 403)

    monkeypatch.setattr(service, "_upload_part_copy", refuse)
    with pytest.raises(OutputRefused, match="S3 does not allow it"):
        written(service, pattern(3 << 20), force=True, read_back=True)
    assert [raw for raw, _ in service.objects.values()] == [b"old"] and service.uploads == {}


# ------------------------------------------------------------------------------------------- errors


def body(code: str, more: str = "") -> str:
    return (
        "Generic S3 error: Error performing GET https://host/MARKED?sig=MARKED in 1ms - Server "
        f"returned non-2xx status code: 403 Forbidden: <Error><Code>{code}</Code>{more}</Error>"
    )


@pytest.mark.parametrize(
    ("text", "kind", "what"),
    [
        (body("NoSuchBucket"), "final", "S3 has no such bucket; check the address"),
        (body("NoSuchKey"), "missing", "no such file; check the address"),
        (body("SignatureDoesNotMatch"), "denied", "S3 does not accept the signature"),
        (body("InvalidAccessKeyId"), "denied", "S3 does not know the access key"),
        (body("ExpiredToken"), "denied", "S3 says that the credentials have expired; get new ones"),
        (body("RequestTimeTooSkewed"), "denied", "the clock of this machine is wrong"),
        (body("AccessDenied"), "denied", "S3 does not allow it; see: ckptconv help remote"),
        (body("InvalidObjectState"), "final", "S3 keeps it in an archive; restore it first"),
        (body("SlowDown"), "passing", "S3 asks for fewer requests"),
        (body("RequestTimeout"), "passing", "S3 received too little data for too long"),
        (
            body("AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"),
            "final",
            "S3 has the bucket in the region eu-west-1; set AWS_REGION=eu-west-1",
        ),
        ("Received redirect without LOCATION, MARKED", "final", "another region; set AWS_REGION"),
        ("status code: 503 Slow: MARKED", "passing", "S3 answers with status 503"),
        ("status code: 500 Internal: MARKED", "passing", "S3 answers with status 500"),
        ("status code: 429 Many: MARKED", "passing", "S3 answers with status 429"),
        ("status code: 400 Bad: MARKED", "final", "S3 answers with status 400"),
        ("HTTP error: error decoding response body", "passing", "S3 does not answer"),
        ("sending request: kind: Connect", "passing", "S3 does not answer; check the address"),
        ("HTTP error: builder error", "final", "the address of the service is wrong"),
        ("invalid peer certificate: UnknownIssuer", "final", "a certificate that this machine"),
        ("Received non-partial response when range requested", "final", "with the whole file"),
        (
            "Generic GCS error: Error performing token request: Error performing GET MARKED: "
            "status code: 403 Forbidden",
            "denied",
            "S3 needs credentials",
        ),
        (
            "Generic S3 error: Error performing GET http://h/certificate/kind: Connect in 2ms",
            "passing",
            "S3 does not answer",
        ),
    ],
)  # fmt: skip
def test_errors_say_what_to_do_and_nothing_secret(text, kind, what):
    told = told_by_obstore(GenericError(text), "s3")
    line = "; ".join(part for part in (told.what, told.hint) if part)
    assert told.kind == kind and what in line
    assert "MARKED" not in line and "\n" not in line


def test_an_empty_object_is_opened_though_the_answer_that_says_so_is_lost_once(
    tmp_path, monkeypatch
):
    store_of(tmp_path).put_object("a", b"")
    asked: list[str] = []
    real_head = obstore.head

    def head(store: Any, key: str) -> Any:
        asked.append(key)
        if len(asked) == 1:
            raise GenericError("error sending request: connection reset")
        return real_head(store, key)

    def get(*_: Any, **__: Any) -> Any:
        raise GenericError("Server returned non-2xx status code: 416 Range Not Satisfiable: ")

    monkeypatch.setattr(obstore, "head", head)
    monkeypatch.setattr(obstore, "get", get)
    source = place_in(tmp_path, "a").open()
    assert source.size == 0 and len(asked) == 2
    source.close()


def test_other_errors_of_obstore():
    told = told_by_obstore(UnauthenticatedError("External AWS credential provider: MARKED"), "s3")
    assert (told.kind, told.what) == ("denied", "S3 needs credentials, and those found fail")
    told = told_by_obstore(FileNotFoundError("credentials/token request.pt not found"), "s3")
    assert told.kind == "missing"
    assert isinstance(told_by_obstore(PermissionDeniedError("MARKED"), "gs"), Forbidden)
    told = told_by_obstore(FileNotFoundError("MARKED"), "az")
    assert (told.kind, told.what) == ("missing", "no such file")
    told = told_by_obstore(ValueError("Could not parse path: MARKED"), "az")
    assert (told.kind, told.what) == (
        "final",
        "Azure holds a key that its client cannot name (an empty part, a control character)",
    )
    assert told_by_obstore(GenericError("error sending request: dns error"), "gs").tries


def test_every_code_has_a_meaning_that_fits_its_service():
    for code, (kind, what, _) in causes._MEANINGS.items():
        told = meant("gs", code, 400)
        assert told.kind == kind
        assert (
            told.what == what if kind == "missing" else told.what == f"Google Cloud Storage {what}"
        )
    assert meant("s3", "", 403).kind == "denied" and isinstance(meant("s3", "", 403), Forbidden)
    assert not isinstance(meant("s3", "ExpiredToken", 400), Forbidden)
    assert meant("s3", "SlowDown", 503, wait=3.0).wait == 3.0


@pytest.mark.parametrize("kind", ["short", "reset"])
def test_an_answer_that_breaks_off_is_read_on_from_there(kind, monkeypatch):
    content = BYTES * 40
    with HttpServer({"/bucket/a.bin": content}) as server:
        server.faults["*"] = [Fault(kind, times=None, at=20_000)]
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "k")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        with closing(place_of("s3://bucket/a.bin").open()) as source:
            assert source.read(0, len(content)) == content
        assert kind == "reset" or server.sent == len(content)  # a reset may lose what was sent


@pytest.mark.parametrize("address", ["s3://", "gs:///key", "az://"])
def test_an_address_without_a_bucket_is_refused(address):
    with pytest.raises(UnsupportedCheckpoint, match="names no bucket"):
        parts_of(address)


def test_addresses(monkeypatch):
    assert parts_of("S3://bucket/a/b c.pt") == ("s3", "bucket", "a/b c.pt")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store, key = s3_store("s3a://bucket/a b.pt")
    assert store.locate(key) == "s3a://bucket/a b.pt" and key == "a b.pt"
    assert key_of_hidden(key) is None and uploads.is_left("x/.y.01234567.ckptconv-part", "x/y")


@pytest.mark.parametrize("start", ["s3://bucket/", "gs://bucket/", "az://bucket/"])
@pytest.mark.parametrize(
    ("key", "odd"),
    [
        ("a//b", "an empty part"),
        ("/b", "an empty part"),
        ("a\nb", "a control character"),
        ("a/../b", "a part that is . or .."),
        ("./b", "a part that is . or .."),
    ],
)
def test_a_key_that_the_client_would_make_another_one_of_is_refused(start, key, odd):
    with pytest.raises(UnsupportedCheckpoint, match=f"has {odd}.* in its key"):
        place._nameable(start + key)
    kept: list[str] = []
    with contextlib.suppress(Exception):
        store = MemoryStore()
        store.put(key, b"")
        kept = [item["path"] for item in store.list().collect()]
    assert kept != [key]
    for good in ("a/b", "a..b/.c", "a/b/"):
        assert place._nameable(start + good) == start + good
