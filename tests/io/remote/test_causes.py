"""Why a server is not reached, told in the same words whoever asks: urllib3, obstore, botocore."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from ckptconv import CheckpointError, convert_checkpoint
from ckptconv.io.places import place_of
from ckptconv.io.remote.causes import not_connected
from ckptconv.support.limits import limits
from helpers.certificates import certificate, serving
from helpers.paths import SAMPLES
from helpers.scripted_server import Web

WHO = {"https": "127.0.0.1", "s3": "S3", "s3 writing": "S3"}
each = pytest.mark.parametrize("asker", WHO)


@pytest.fixture(autouse=True)
def _somebody(monkeypatch, tmp_path):
    for name in (*os.environ,):
        if name.upper().endswith(("_PROXY", "_BUNDLE")) or name.startswith("SSL_CERT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "MARKED")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def ask(monkeypatch, tmp_path) -> Callable[[str, str], str]:
    """Ask a server, and tell how that ends."""

    def asked(asker: str, server: str) -> str:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
        with limits(remote_seconds=60), pytest.raises(CheckpointError) as raised:
            if asker == "s3 writing":
                convert_checkpoint(SAMPLES / "tied.pt", "s3://bucket/a.safetensors", force=True)
            else:
                address = f"{server}/a.pt" if asker == "https" else "s3://bucket/a.pt"
                with closing(place_of(address).open()) as source:
                    source.read(0, 1)
        chain, error = "", raised.value
        while error is not None:
            chain, error = f"{chain} {error!r} {error}", error.__cause__ or error.__context__
        assert "MARKED" not in chain
        said = str(raised.value).removeprefix(f"{raised.value.path}: ")
        return said.removeprefix("cannot be written: ").removesuffix("; nothing was left behind")

    return asked


@contextmanager
def safe(folder: Path, name: str = "127.0.0.1", years: tuple[int, int] = (2020, 2040)):
    """A server that speaks TLS, the file of its certificate, and its address."""
    file = certificate(folder, name, years=years)
    with Web(context=serving(file)) as web:
        yield f"{file}.crt", f"https://127.0.0.1:{web.port}"


CERTIFICATES = {
    "has a certificate that has expired": ("127.0.0.1", (2020, 2021)),
    "has a certificate that is not valid yet": ("127.0.0.1", (2038, 2039)),
    "has a certificate for another host": ("other.example", (2020, 2040)),
}


@each
@pytest.mark.parametrize("says", CERTIFICATES)
def test_what_is_wrong_with_a_certificate(asker, says, ask, tmp_path, monkeypatch):
    name, years = CERTIFICATES[says]
    with safe(tmp_path, name, years) as (trusted, address):
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
        assert ask(asker, address).startswith(f"{WHO[asker]} {says}")


@each
def test_a_certificate_that_nobody_trusts(asker, ask, tmp_path):
    with safe(tmp_path) as (_, address):
        says = "has a certificate that this machine does not trust; SSL_CERT_FILE names"
        assert ask(asker, address).startswith(f"{WHO[asker]} {says}")


@pytest.mark.skipif(sys.version_info < (3, 13), reason="older Pythons do not look")
def test_an_authority_whose_use_is_not_said(ask, tmp_path, monkeypatch):
    file = certificate(tmp_path, "127.0.0.1", usage="")
    with Web(context=serving(file)) as web:
        monkeypatch.setenv("SSL_CERT_FILE", f"{file}.crt")
        assert "breaks a rule of RFC 5280" in ask("https", f"https://127.0.0.1:{web.port}")


def test_what_openssl_says_of_rules_is_told():
    error = ssl.SSLCertVerificationError()
    error.verify_code = 92  # X509_V_ERR_CA_CERT_MISSING_KEY_USAGE
    assert "breaks a rule of RFC 5280" in str(not_connected(error, "127.0.0.1"))


@each
@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_whose_certificates_are_trusted(asker, variable, is_folder, ask, tmp_path, monkeypatch):
    if variable == "AWS_CA_BUNDLE" and asker == "https":
        return
    (tmp_path / "certs").mkdir()
    with safe(tmp_path / "certs") as (trusted, address):
        monkeypatch.setenv(variable, str(Path(trusted).parent) if is_folder else trusted)
        assert "certificate" not in ask(asker, address)


@each
def test_a_server_that_does_not_speak_tls(asker, ask):
    with Web() as web:
        said = ask(asker, f"https://127.0.0.1:{web.port}")
    assert said == f"{WHO[asker]} does not speak TLS there; write http:// if that is meant"


@each
def test_a_server_that_speaks_nothing_else(asker, ask, tmp_path):
    with safe(tmp_path) as (_, address):
        said = ask(asker, address.replace("https:", "http:"))
    assert said == f"{WHO[asker]} closed the connection; if it speaks TLS, write https://"


@each
def test_nobody_is_there(asker, ask):
    with Web() as gone:
        pass
    said = ask(asker, f"http://127.0.0.1:{gone.port}")
    assert said == f"{WHO[asker]} does not answer; check the address and the network"


@contextmanager
def proxy(answer: bytes) -> Iterator[str]:
    """A proxy that answers every request so."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                made, _ = server.accept()
                made.recv(4096)
                made.sendall(answer)
                made.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@each
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_wants_a_password(asker, scheme, ask, monkeypatch):
    with proxy(b"HTTP/1.1 407 Who\r\nContent-Length: 6\r\n\r\nMARKED") as address:
        monkeypatch.setenv(f"{scheme.upper()}_PROXY", address)
        said = ask(asker, f"{scheme}://127.0.0.1:9")
    assert "the proxy asks for a password (status 407); write it into HTTPS_PROXY" in said


@each
@pytest.mark.parametrize("listed", ["*", "127.0.0.1:{port}", "127.0.0.0/8", "a,127.0.0.1"])
def test_who_is_asked_without_a_proxy(asker, listed, ask, monkeypatch):
    with Web() as web, proxy(b"HTTP/1.1 407 Who\r\nContent-Length: 0\r\n\r\n") as address:
        monkeypatch.setenv("HTTP_PROXY", address)
        monkeypatch.setenv("NO_PROXY", listed.format(port=web.port))
        said = ask(asker, web.url.rstrip("/"))
    assert "proxy" not in said and "does not answer" not in said


@each
@pytest.mark.parametrize("given", ["http://", "http://a:b@", "http://[::1", "http://h:port"])
def test_a_proxy_that_is_no_address_is_blamed_itself(asker, given, ask, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", given)
    said = ask(asker, "http://127.0.0.1:9")
    assert "HTTP_PROXY is not the address of a proxy" in said


@each
def test_a_bundle_that_is_wrong_is_named(asker, ask, tmp_path, monkeypatch):
    (tmp_path / "empty.pem").write_text("nothing")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "empty.pem"))
    said = ask(asker, "https://127.0.0.1:9")
    assert said.startswith("holds no certificates that can be read; REQUESTS_CA_BUNDLE names it")
