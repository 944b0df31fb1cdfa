"""Real servers of objects, started on free ports of this host and stopped by their process.

They are installed in an environment of their own (`make servers`); what is not there skips with a
reason, which ``CKPTCONV_REQUIRE_SERVERS=1`` does not accept for SeaweedFS and moto. `raw_objects`
looks at their objects without ckptconv.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("CKPTCONV_SERVERS", ROOT / ".venv-servers"))
KEY, SECRET = "test-access-key", "test-secret-key-8f2c"
"""What the servers of S3 accept; the secret must not be found in anything that is printed."""
_PATIENCE = 60.0  # seconds until a server answers


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: where, and the environment in which ckptconv finds it.

    `scheme` is what its URLs begin with, `bucket` the bucket (or container) that is there from the
    beginning, `options` what obstore's store of that scheme takes by keyword.
    """

    name: str
    endpoint: str
    environment: Mapping[str, str]
    scheme: str = "s3"
    bucket: str = "bucket"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The URL of its bucket, without a slash at the end."""
        return f"{self.scheme}://{self.bucket}"


class NotHere(Exception):
    """A server that is not installed, or does not start."""


def program(name: str) -> str:
    """A program of the servers' environment, or of this host."""
    for pattern in ("bin", "azurite/node_modules/.bin", "lib/python*/site-packages/*/vendor/*/bin"):
        for found in HOME.glob(f"{pattern}/{name}*"):
            if found.name in (name, f"{name}-linux-amd64"):
                return str(found)
    if (installed := shutil.which(name)) is not None:
        return installed
    raise NotHere(f"{name} is not installed (make servers)")


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _ending_with_us(command: list[str]) -> list[str]:
    """The command, told to stop when this process is killed, where the system can do that."""
    setpriv = shutil.which("setpriv")
    return command if setpriv is None else [setpriv, "--pdeathsig", "TERM", *command]


@contextmanager
def running(command: list[str], folder: Path, answers: Callable[[], bool]) -> Iterator[None]:
    """A server process within the block, once it answers."""
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            _ending_with_us(command), cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            begin = time.monotonic()
            while not answers():
                if process.poll() is not None or time.monotonic() - begin > _PATIENCE:
                    told = (folder / "server.log").read_text(errors="replace")[-400:]
                    raise NotHere(f"{command[0]} does not start: {told}")
                time.sleep(0.2)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(2)  # its files are thrown away: none has to be closed well
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def s3_client(server: Server) -> Any:
    """The client by which tests look at a server of S3 without ckptconv."""
    return _s3_client_of(server.endpoint)


@functools.cache
def _s3_client_of(endpoint: str) -> Any:
    """Made once: it takes a fifth of a second of the processor, and a test needs it many times."""
    from botocore.config import Config
    from botocore.session import Session

    return Session().create_client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        config=Config(
            s3={"addressing_style": "path"},
            retries={"max_attempts": 2},
            response_checksum_validation="when_required",  # those of copies in moto are wrong
        ),
    )


def _s3(name: str, port: int, bucket: str) -> Server:
    endpoint = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }
    options = {
        "endpoint": endpoint,
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
        "virtual_hosted_style_request": False,
        "client_options": {"allow_http": True},
    }
    return Server(name, endpoint, environment, bucket=bucket, options=options)


def _has_bucket(server: Server, bucket: str) -> Callable[[], bool]:
    """Whether a server takes an object by now."""

    def answers() -> bool:
        client = s3_client(server)
        try:
            if bucket not in [item["Name"] for item in client.list_buckets().get("Buckets", [])]:
                client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key="first", Body=b"x")
        except Exception:
            return False
        client.delete_object(Bucket=bucket, Key="first")
        return True

    return answers


_WEED = ("-s3", "-master", "-volume", "-filer")


@contextmanager
def seaweedfs(folder: Path, bucket: str = "bucket") -> Iterator[Server]:
    """SeaweedFS, a server of S3.

    Every port is given, and what would listen on a port of its own choice (Iceberg, Lance) is off:
    else a second SeaweedFS on this host ends at once.
    """
    ports = {f"{name}.{kind}": free_port() for name in _WEED for kind in ("port", "port.grpc")}
    server = _s3("seaweedfs", ports["-s3.port"], bucket)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    command = [
        program("weed"), "server", "-dir=data", "-s3", "-s3.config=s3.json", "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1", "-master.volumeSizeLimitMB=256", "-volume.max=200",
        "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-volume.preStopSeconds=0",
        *(f"{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    try:
        with running(command, folder, _has_bucket(server, bucket)):
            yield server
    finally:  # it leaves its sockets there
        for port in ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


@contextmanager
def moto(folder: Path, bucket: str = "bucket") -> Iterator[Server]:
    """moto, a second opinion about S3."""
    port = free_port()
    server = _s3("moto", port, bucket)
    command = [program("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with running(command, folder, _has_bucket(server, bucket)):
        yield server


@contextmanager
def rclone(folder: Path, bucket: str = "bucket") -> Iterator[Server]:
    """`rclone serve s3`, which answers a range with 200 and does not heed conditions."""
    port = free_port()
    server = _s3("rclone", port, bucket)
    (folder / "data").mkdir()
    command = [
        program("rclone"), "serve", "s3", "--config", str(folder / "rclone.conf"), "--auth-key",
        f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port}", "--cache-dir", str(folder / "cache"),
        "data",
    ]  # fmt: skip
    (folder / "rclone.conf").touch()
    with running(command, folder, _has_bucket(server, bucket)):
        yield server


def _answers_http(url: str) -> Callable[[], bool]:
    def answers() -> bool:
        import urllib3

        try:
            urllib3.request("GET", url, timeout=1.0, retries=False)
        except urllib3.exceptions.HTTPError:
            return False
        return True

    return answers


@contextmanager
def fake_gcs(folder: Path, bucket: str = "bucket") -> Iterator[Server]:
    """fake-gcs-server, a server of Google Cloud Storage that is read from: of the XML API, by which
    obstore writes, it has no writing.
    """
    import urllib3

    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [
        program("fake-gcs-server"), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1",
        "-port", str(port), "-public-host", f"127.0.0.1:{port}", "-external-url", endpoint,
    ]  # fmt: skip
    with running(command, folder, _answers_http(endpoint)):
        body = json.dumps({"name": bucket})
        urllib3.request("POST", f"{endpoint}/storage/v1/b", body=body)
        account = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": ""}
        account |= {"private_key": "", "private_key_id": ""}
        options = {
            "service_account_key": json.dumps(account),
            "client_options": {"allow_http": True},
        }
        environment = {"STORAGE_EMULATOR_HOST": endpoint}
        yield Server("fake-gcs-server", endpoint, environment, "gs", bucket, options)


_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The key of the emulator's account, which its documentation prints."""


@contextmanager
def azurite(folder: Path, container: str = "bucket") -> Iterator[Server]:
    """azurite, Microsoft's emulator of Azure Blob Storage."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [
        program("azurite-blob"), "--blobHost", "127.0.0.1", "--blobPort", str(port),
        "--inMemoryPersistence", "--skipApiVersionCheck", "--silent",
    ]  # fmt: skip
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
        "AZURE_STORAGE_ACCOUNT_KEY": _AZURITE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"{endpoint}/devstoreaccount1",
    }
    options = {
        "account_name": "devstoreaccount1",
        "account_key": _AZURITE_KEY,
        "endpoint": f"{endpoint}/devstoreaccount1",
        "client_options": {"allow_http": True},
    }
    server = Server("azurite", endpoint, environment, "az", container, options)
    with running(command, folder, _answers_http(endpoint)):
        azure_request(server, "PUT", f"{container}?restype=container")
        yield server


def azure_request(server: Server, method: str, path: str, **options: Any) -> Any:
    """One request to azurite, signed as Azure wants it, without ckptconv."""
    import base64
    import hashlib
    import hmac
    from email.utils import formatdate
    from urllib.parse import parse_qsl, urlsplit

    import urllib3

    body = options.pop("body", b"")
    url = f"{server.endpoint}/devstoreaccount1/{path}"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    headers |= options.pop("headers", {})
    named = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers) if name[:5] == "x-ms-")
    asked = sorted(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    query = "".join(f"\n{name}:{value}" for name, value in asked)
    length = str(len(body)) if body else ""
    resource = f"/devstoreaccount1{urlsplit(url).path}{query}"
    kind = headers.get("Content-Type", "")
    text = f"{method}\n\n\n{length}\n\n{kind}\n\n\n\n\n\n\n{named}{resource}"
    key = base64.b64decode(_AZURITE_KEY)
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    headers["Authorization"] = f"SharedKey devstoreaccount1:{signature}"
    # a connection that lay idle may be closed by then
    retries = 2 if method == "GET" else False
    return urllib3.request(
        method, url, headers=headers, body=body or None, retries=retries, redirect=False
    )


KINDS = {
    "seaweedfs": seaweedfs,
    "moto": moto,
    "rclone": rclone,
    "fake-gcs-server": fake_gcs,
    "azurite": azurite,
}
REQUIRED = ("seaweedfs", "moto")


@pytest.fixture(scope="session")
def servers(tmp_path_factory) -> Iterator[Callable[[str], Server]]:
    """The real servers by name, each started when it is first asked for, and stopped at the end:
    ``servers("seaweedfs")``. One that is not here skips the test.
    """
    started: dict[str, Server | NotHere] = {}
    with ExitStack() as stack:

        def server(name: str) -> Server:
            if name not in started:
                try:
                    folder = tmp_path_factory.mktemp(name)
                    started[name] = stack.enter_context(KINDS[name](folder))
                except NotHere as reason:
                    started[name] = reason
            found = started[name]
            if isinstance(found, Server):
                return found
            if name in REQUIRED and os.environ.get("CKPTCONV_REQUIRE_SERVERS") == "1":
                pytest.fail(str(found))
            pytest.skip(str(found))

        yield server


if __name__ == "__main__":  # a server to try things with: its environment, until it is interrupted
    import tempfile

    with tempfile.TemporaryDirectory() as made, KINDS[sys.argv[1]](Path(made)) as started:
        for variable, value in started.environment.items():
            print(f"export {variable}={value}")
        sys.stdout.flush()
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
