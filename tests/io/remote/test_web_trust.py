"""What web servers are told, and where they may send us."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from ckptconv.io.remote.hosts import Reach, allowing_hosts, is_allowed, reach_of, reach_of_host
from ckptconv.io.remote.place import remote_place
from ckptconv.support.errors import (
    CheckpointError,
    RemoteFailure,
    UnsupportedCheckpoint,
)
from ckptconv.support.limits import limits
from helpers.certificates import certificate, serving
from helpers.conformance import pattern
from helpers.program import run
from helpers.scripted_server import Web

SIZE = 600_000
CONTENT = pattern(SIZE)
SECRET = "geheim"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Failing requests are tried again for a short while."""
    monkeypatch.setattr("ckptconv.io.remote.patience.FIRST", 0.005)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "CKPTCONV_ALLOW_HOSTS"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with limits(remote_seconds=20):
        yield


@pytest.fixture
def web():
    with Web(files={"a.bin": CONTENT}) as served:
        yield served


@pytest.fixture
def other():
    with Web(files={"a.bin": CONTENT}) as served:
        yield served


def read(address: str, first: int = 200_000, nbytes: int = 150_000) -> bytes:
    """Bytes of a file, the first request being for others."""
    with closing(remote_place(address).open()) as source:
        return source.read(first, nbytes)


def refused(
    address: str, kind: type[CheckpointError] = RemoteFailure, *, seconds: float = 0.1
) -> str:
    """The line by which reading ends."""
    with limits(remote_seconds=seconds), pytest.raises(kind) as raised:
        read(address)
    line = str(raised.value)
    assert "\n" not in line
    return line.removeprefix(f"{raised.value.path}: ")


# ---------------------------------------------------------------------------------------- redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_and_the_last_address_is_kept(status, web, other):
    web.ways["moved"] = lambda asked: asked.move(other.at("a.bin"), status)
    assert read(web.at("moved")) == CONTENT[200_000:350_000]
    assert [path for path, _ in web.asked] == ["/moved"]
    assert [path for path, _ in other.asked] == ["/a.bin", "/a.bin"]
    assert "If-Match" in other.asked[1][1]


def test_relative_redirects_are_followed(web):
    web.files["in/ä b.bin"] = CONTENT
    web.files["in/%C3%A4%20b.bin"] = CONTENT
    web.ways["in/moved"] = lambda asked: asked.move("%C3%A4%20b.bin?x=1")
    assert read(web.at("in/moved")) == CONTENT[200_000:350_000]
    assert web.asked[-1][0] == "/in/%C3%A4%20b.bin?x=1"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 416, 500])
def test_an_address_that_expired_is_asked_for_again(status, web, other):
    addresses = iter(("first", "second", "third"))
    web.ways["moved"] = lambda asked: asked.move(f"{other.url}/a.bin?{next(addresses)}")
    with closing(remote_place(web.at("moved")).open()) as source:
        other.ways["a.bin"] = lambda asked: (
            asked.serve(CONTENT) if asked.path.endswith("second") else asked.say(status)
        )
        assert source.read(200_000, 150_000) == CONTENT[200_000:350_000]
        assert len(web.asked) == 2


def test_an_address_for_one_range_is_not_kept(web, other):
    """As some hosts of the Hub's files sign them: ``403 Auth failed: invalid range``."""

    def moved(asked):
        first, last = asked.range
        asked.move(f"{other.url}/a.bin?{first}-{last}")

    def strict(asked):
        first, last = asked.range
        is_signed = asked.path.endswith(f"?{first}-{last}")
        asked.serve(CONTENT) if is_signed else asked.say(403)

    web.ways["moved"], other.ways["a.bin"] = moved, strict
    with closing(remote_place(web.at("moved")).open()) as source:
        for first in range(200_000, 600_000, 50_000):
            assert source._get(first, 40_000).data == CONTENT[first : first + 40_000]
    assert len(web.asked) == 9 and len(other.asked) == 9 + 2


def test_redirects_in_circles_and_without_end_are_told(web, other):
    web.ways["a"] = lambda asked: asked.move(f"{other.url}/b")
    other.ways["b"] = lambda asked: asked.move(f"{web.url}/a")
    assert refused(web.at("a")) == "the server redirects in a circle"
    web.fallback = lambda asked: asked.move(f"{asked.path}x")
    assert refused(web.at("x")) == "the server redirects more than 5 times"
    assert len(web.asked) == 1 + 6


@pytest.mark.parametrize(
    "where", ["file:///etc/passwd", "ftp://127.0.0.1/a", "gopher://127.0.0.1:1/a", "data:,a"]
)
def test_redirects_to_other_schemes_are_not_followed(where, web):
    web.ways["a"] = lambda asked: asked.move(where)
    scheme = where.partition(":")[0]
    assert refused(web.at("a")) == f"the server redirects to {scheme}://, which is not followed"


def public(monkeypatch, *hosts: Web) -> None:
    """Have servers of this process look as if they were on the internet."""
    ports = {host.port for host in hosts}
    monkeypatch.setattr(
        "ckptconv.io.remote.wire.reach_of_peer",
        lambda made: (
            Reach.EVERYWHERE if made.getpeername()[1] in ports else reach_of(made.getpeername()[0])
        ),
    )


def test_the_internet_does_not_lead_into_a_network(web, other, monkeypatch):
    public(monkeypatch, web)
    web.ways["a"] = lambda asked: asked.move(f"{other.url}/a.bin?secret={SECRET}")
    line = refused(web.at("a"))
    assert line == (
        "the server redirects to 127.0.0.1, which lies in a network of its own; if that is right: "
        "--allow-hosts 127.0.0.1"
    )
    assert other.asked == []


def test_a_name_does_not_lead_into_a_network_either(web, other, monkeypatch):
    """What counts is the address to which the connection leads, whatever names say."""
    public(monkeypatch, web)
    real = socket.getaddrinfo

    def deceiving(host, *rest, **options):
        return real("127.0.0.1" if host == "innocent.example" else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", deceiving)
    web.ways["a"] = lambda asked: asked.move(f"http://innocent.example:{other.port}/a.bin")
    assert "redirects to innocent.example, which lies in a network" in refused(web.at("a"))
    assert other.asked == []
    with allowing_hosts("innocent.example"):
        assert read(web.at("a")) == CONTENT[200_000:350_000]


@pytest.mark.parametrize("allowed", ["127.0.0.1", "x.example,127.0.0.1:{port}", "*"])
def test_hosts_that_are_allowed_are_gone_to(allowed, web, other, monkeypatch):
    public(monkeypatch, web)
    web.ways["a"] = lambda asked: asked.move(f"{other.url}/a.bin")
    monkeypatch.setenv("CKPTCONV_ALLOW_HOSTS", allowed.format(port=other.port))
    assert read(web.at("a")) == CONTENT[200_000:350_000]
    monkeypatch.setenv("CKPTCONV_ALLOW_HOSTS", f"127.0.0.1:{web.port}")
    assert "lies in a network" in refused(web.at("a"))


def test_nothing_leads_to_the_metadata_of_a_cloud(web):
    for where in ("http://169.254.169.254/latest", "http://[fe80::1]/", "http://0.0.0.0:1/"):
        web.ways["a"] = lambda asked, where=where: asked.move(where)
        assert "which lies in a network of its own" in refused(web.at("a"))


def test_how_near_addresses_are():
    known = {
        "93.184.216.34": Reach.EVERYWHERE, "2606:4700::1111": Reach.EVERYWHERE,
        "10.1.2.3": Reach.NETWORK, "172.16.0.1": Reach.NETWORK, "192.168.1.1": Reach.NETWORK,
        "100.64.0.1": Reach.NETWORK, "fd00::1": Reach.NETWORK,
        "127.0.0.1": Reach.MACHINE, "127.9.9.9": Reach.MACHINE, "::1": Reach.MACHINE,
        "169.254.169.254": Reach.NOWHERE, "fe80::1%eth0": Reach.NOWHERE, "0.0.0.0": Reach.NOWHERE,
        "224.0.0.1": Reach.NOWHERE, "::": Reach.NOWHERE,
        "::ffff:10.0.0.1": Reach.NETWORK, "::ffff:127.0.0.1": Reach.MACHINE,
        "64:ff9b::7f00:1": Reach.MACHINE, "2002:7f00:1::": Reach.MACHINE,
    }  # fmt: skip
    assert {text: reach_of(text) for text in known} == known
    assert reach_of_host("LocalHost.") is Reach.MACHINE is reach_of_host("a.localhost")
    assert reach_of_host("example.org") is Reach.EVERYWHERE
    assert not is_allowed("a", 80, "") and not is_allowed("b.a", 80, "a")
    assert is_allowed("::1", 80, "[::1]:80") and not is_allowed("a.b", 1, "*.a.b")


# --------------------------------------------------------------------------------------- secrets


def authorized(web: Web) -> list[str | None]:
    """What the requests said of who asks."""
    return [headers.get("Authorization") for _, headers in web.asked]


def test_a_password_is_told_to_its_host_only(web, other):
    web.ways["here"] = lambda asked: asked.move("/a.bin")
    web.ways["there"] = lambda asked: asked.move(
        f"http://you:{SECRET}@127.0.0.1:{other.port}/a.bin"
    )
    other.ways["back"] = lambda asked: asked.move(f"{web.url}/a.bin")
    said = "Basic " + base64.b64encode(b"me:p:w/ \xc3\xa4").decode()
    netloc = f"me:p%3Aw%2F%20%C3%A4@127.0.0.1:{web.port}"
    assert read(f"http://{netloc}/here") == CONTENT[200_000:350_000]
    assert set(authorized(web)) == {said}
    web.asked.clear()
    assert read(f"http://{netloc}/there") == CONTENT[200_000:350_000]
    assert authorized(web) == [said] and authorized(other) == [None, None]


def shown_by(place) -> list[str]:
    """Every text by which a place may be shown."""
    with limits(remote_seconds=0.1):
        return _shown_by(remote_place(place.site.store.address(place.key)))


def _shown_by(place) -> list[str]:
    error = None
    try:
        with closing(place.open()) as source:
            texts = [repr(source), str(source.path), repr(source.fingerprint())]
    except CheckpointError as raised:
        error, texts = raised, []
    return [
        str(place), repr(place), place.name, place.stem, str(place.parent), repr(place.path),
        repr(place.site), repr(place.site.store), repr(place.fingerprint() if not error else ""),
        *texts, str(error), repr(error), repr(getattr(error, "__cause__", None)),
    ]  # fmt: skip


class Records(logging.Handler):
    """What is logged, by anybody, at any level."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    handler, root = Records(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler.texts
    root.setLevel(before)
    root.removeHandler(handler)


def test_passwords_and_signatures_are_not_shown_but_sent(web, logged):
    address = f"http://me:{SECRET}@127.0.0.1:{web.port}/a.bin?X-Amz-Signature={SECRET}#{SECRET}"
    place = remote_place(address)
    assert str(place) == web.at("a.bin") and place.name == "a.bin"
    assert not [text for text in shown_by(place) if SECRET in text]
    assert SECRET not in "\n".join(logged)
    assert {path for path, _ in web.asked} == {f"/a.bin?X-Amz-Signature={SECRET}"}
    again = pickle.loads(pickle.dumps(place))
    assert again == place and hash(again) == hash(place)
    with closing(again.open()) as source:
        assert source.read(200_000, 10) == CONTENT[200_000:200_010]
    assert web.asked[-1][0].endswith(f"?X-Amz-Signature={SECRET}")
    assert authorized(web)[-1] == authorized(web)[0] is not None
    web.asked.clear()
    place.beside("b.bin").exists()
    assert [path for path, _ in web.asked] == ["/b.bin"]


def test_places_of_other_secrets_are_other_places(web):
    one, two = (remote_place(f"{web.url}/download?id={number}") for number in (1, 2))
    assert one != two and str(one) == str(two)


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 418, 500, 200])
def test_no_error_shows_a_secret(status, web, tmp_path):
    web.ways["a.bin"] = lambda asked: asked.say(
        status, CONTENT, Location=f"http://169.254.169.254/{SECRET}?{SECRET}", X_Error=SECRET
    )
    address = f"http://me:{SECRET}@127.0.0.1:{web.port}/a.bin?sig={SECRET}"
    assert not [text for text in shown_by(remote_place(address)) if SECRET in text]
    if status in (302, 401):
        for options in ((), ("--json",)):
            ran = run("inspect", address, *options, cwd=tmp_path)
            assert SECRET not in ran.out + ran.err and ran.exit


def test_no_error_of_a_connection_shows_a_secret():
    for address in (
        f"http://me:{SECRET}@127.0.0.1:1/a?{SECRET}",
        f"http://me:{SECRET}@nowhere.invalid/a?{SECRET}",
        f"http://me:{SECRET}@[::1/a?{SECRET}",
        f"http://me:{SECRET}@/a?{SECRET}",
        f"https://me:{SECRET}@127.0.0.1:1/a?{SECRET}",
    ):
        with limits(remote_seconds=0.1), pytest.raises(CheckpointError) as raised:
            read(address)
        assert SECRET not in f"{raised.value} {raised.value!r} {raised.value.path}"
        assert raised.value.__cause__ is None


# ------------------------------------------------------------------------------- TLS and proxies


@pytest.fixture(scope="session")
def certificates(made_once):
    """Certificates that vouch for themselves."""
    return made_once(
        "certificates",
        lambda folder: [certificate(folder, name) for name in ("127.0.0.1", "other.example")],
    )


def test_a_certificate_that_is_trusted(certificates, monkeypatch):
    file = certificates / "127.0.0.1.pem"
    with Web(files={"a.bin": CONTENT}, context=serving(file)) as web:
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            with monkeypatch.context() as changed:
                changed.setenv(name, f"{file}.crt")
                assert read(web.at("a.bin")) == CONTENT[200_000:350_000]
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificates / "nothing.pem"))
        says = r"nothing\.pem: no such file; REQUESTS_CA_BUNDLE"
        with pytest.raises(UnsupportedCheckpoint, match=says):
            read(web.at("a.bin"))


def test_a_certificate_that_does_not_fit_is_told_and_never_tried_again(certificates, monkeypatch):
    for name, reason in (
        ("127.0.0.1", "has a certificate that this machine does not trust; SSL_CERT_FILE"),
        ("other.example", "has a certificate for another host; check the address"),
    ):
        file = certificates / f"{name}.pem"
        if name != "127.0.0.1":
            monkeypatch.setenv("SSL_CERT_FILE", f"{file}.crt")
        with Web(files={"a.bin": CONTENT}, context=serving(file)) as web:
            line = refused(web.at("a.bin"), seconds=60)
            assert line.startswith(f"127.0.0.1 {reason}")
            assert web.asked == [] and "tried" not in line


def test_encryption_is_not_given_up(certificates, web, monkeypatch):
    file = certificates / "127.0.0.1.pem"
    monkeypatch.setenv("SSL_CERT_FILE", f"{file}.crt")
    with Web(context=serving(file)) as safe:
        safe.ways["a"] = lambda asked: asked.move(web.at("a.bin"))
        assert refused(safe.at("a")) == (
            "the server redirects to 127.0.0.1 without encryption, which is not followed"
        )
    assert web.asked == []


def test_a_server_that_does_not_speak_tls_is_told(web):
    address = web.at("a.bin").replace("http:", "https:")
    assert refused(address) == "127.0.0.1 does not speak TLS there; write http:// if that is meant"


def test_a_proxy_is_used_where_the_environment_names_one(web, monkeypatch):
    def forward(asked):
        assert asked.path.startswith("http://far.example/")
        asked.serve(CONTENT)

    with Web(fallback=forward) as proxy:
        monkeypatch.setenv("http_proxy", f"http://me:{SECRET}@127.0.0.1:{proxy.port}")
        assert read("http://far.example/a.bin") == CONTENT[200_000:350_000]
        said = "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()
        assert {headers["Proxy-Authorization"] for _, headers in proxy.asked} == {said}
        for exception in ("127.0.0.1", "127.0.0.0/8", "localhost,127.0.0.1"):
            monkeypatch.setenv("no_proxy", exception)
            assert read(web.at("a.bin")) == CONTENT[200_000:350_000]
    line = refused("http://far.example/a.bin", seconds=10)  # the tries end it, not the time
    told = "far.example cannot be reached: the proxy does not answer; see HTTPS_PROXY and NO_PROXY"
    assert line == told and SECRET not in line
    monkeypatch.setenv("http_proxy", f"socks5://me:{SECRET}@127.0.0.1:1")
    says = "a proxy of the kind socks5:// is not used; name an http:// proxy, or set NO_PROXY"
    with pytest.raises(UnsupportedCheckpoint, match=says):
        read("http://far.example/a.bin")


def test_what_comes_from_a_proxy_may_not_lead_into_a_network(monkeypatch):
    with Web(fallback=lambda asked: asked.move("http://127.0.0.1:80/a")) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert "which lies in a network of its own" in refused("http://far.example/a.bin")
        assert len(proxy.asked) == 1


def test_json_of_a_command_shows_no_secret(web, tmp_path):
    import numpy as np
    from safetensors.numpy import save

    web.files["model.safetensors"] = save({"w": np.zeros(3, np.float32)})
    address = f"http://me:{SECRET}@127.0.0.1:{web.port}/model.safetensors?sig={SECRET}"
    ran = run("inspect", address, "--json", cwd=tmp_path)
    assert ran.exit == 0, ran.err
    assert SECRET not in ran.out + ran.err
    assert web.at("model.safetensors") in json.dumps(ran.json())
