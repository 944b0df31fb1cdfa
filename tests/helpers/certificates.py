"""Certificates of servers in this process, made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def certificate(
    folder: Path, name: str, *, years: tuple[int, int] = (2020, 2040), usage: str = "keyCertSign"
) -> Path:
    """A certificate for `name` (an address or a host) and its key, from the first of the `years` to
    the second; the file beside it that ends in ``.crt`` is that of the authority, for that `usage`.
    """
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    file, authority = folder / f"{name}.pem", folder / f"{name}.pem.crt"
    key, request = folder / f"{name}.key", folder / f"{name}.csr"
    kind = "IP" if name[0].isdigit() else "DNS"
    (folder / "index.txt").write_text("")
    (folder / "ca.conf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={folder}/index.txt\nnew_certs_dir={folder}\n"
        "default_md=sha256\npolicy=p\nrand_serial=yes\n[p]\ncommonName=supplied\n"
        f"[e]\nbasicConstraints=CA:FALSE\nsubjectAltName={kind}:{name}\n"
        "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    )
    new = ("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for_it = ("-addext", f"keyUsage={usage}") if usage else ()
    own = ("-x509", "-days", 900, "-subj", "/CN=authority", *for_it)
    _run(*new, *own, "-keyout", key, "-out", authority)
    _run(*new, "-new", "-keyout", file, "-out", request, "-subj", f"/CN={name}")
    _run(
        *("openssl", "ca", "-batch", "-notext", "-config", folder / "ca.conf", "-extensions", "e"),
        *("-startdate", f"{years[0]}0101000000Z", "-enddate", f"{years[1]}0101000000Z"),
        *("-cert", authority, "-keyfile", key, "-in", request, "-out", folder / "made"),
    )
    file.write_text(file.read_text() + (folder / "made").read_text())
    return file


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def serving(file: Path) -> ssl.SSLContext:
    """What a server with that certificate needs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context
