"""Certificates of servers in this process, made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path, name: str, *, days: int = 30) -> Path:
    """A certificate for `name` (an address or a host) that vouches for itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    file = folder / f"{name}.pem"
    kind = "IP" if name[0].isdigit() else "DNS"
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-nodes", "-keyout", file, "-out", f"{file}.crt", "-days", str(days)),
        *("-subj", f"/CN={name}", "-addext", f"subjectAltName={kind}:{name}"),
    ]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    return file


def serving(file: Path) -> ssl.SSLContext:
    """What a server with that certificate needs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context
