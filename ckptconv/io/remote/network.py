"""How other machines are reached: by which library, through which proxy, and whose certificates are
trusted. The last two are the same for every library.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import ssl
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ckptconv.io.files import FileSource, read_whole
from ckptconv.support import platforms
from ckptconv.support.errors import CheckpointError, UnsupportedCheckpoint
from ckptconv.support.records import NamedTuple

EXTRA = "pip install 'obstore>=0.11' 'botocore>=1.36' 'urllib3>=2.2.1'"


def needed(name: str, address: str) -> Any:
    """A library of the extra, or `UnsupportedCheckpoint` that says how to install it."""
    try:
        if name == "obstore":
            import obstore.store

            return obstore
        if name == "urllib3":
            import urllib3

            return urllib3
        if name == "botocore":
            import botocore.session

            return botocore
        import fsspec

        return fsspec
    except ImportError:
        if name == "fsspec":
            what = "is not on this machine, and reading it needs fsspec"
            raise UnsupportedCheckpoint(what, path=address, hint="pip install fsspec") from None
        raise UnsupportedCheckpoint(
            "is not on this machine, and reading it needs obstore, botocore and urllib3",
            path=address,
            hint=EXTRA,
        ) from None


def is_set(name: str) -> bool:
    """Whether a variable of the environment says yes."""
    return os.environ.get(name, "").lower() in ("1", "on", "true", "yes")


BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""What names the file, or the folder, of the certificates that are trusted."""

_ONE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL).findall


class Trusted(NamedTuple):
    """Certificates that somebody names: as PEM, and the file or folder that they are from."""

    pem: bytes
    path: Path


def certificates(*, of_profile: str | None = None, is_aws: bool = False) -> Trusted | None:
    """The certificates that somebody names; None where nobody does. AWS has a variable of its own,
    and `of_profile` is what a profile of it names.
    """
    named = [(name, os.environ.get(name)) for name in BUNDLES]
    if is_aws:
        own = ("AWS_CA_BUNDLE", os.environ.get("AWS_CA_BUNDLE"))
        named = [own, ("ca_bundle", of_profile), *named]
    for name, path in named:
        if path:
            found = Path(path).expanduser()
            return Trusted(_read(found, name), found)
    return None


def _read(path: Path, name: str) -> bytes:
    hint = f"{name} names it, as the file or folder of certificates"
    try:
        files = [path]
        if path.is_dir():
            files = [file for file in sorted(path.iterdir()) if file.is_file()]
        texts = [read_whole(FileSource(file), "text_bytes") for file in files]
        # a bundle and the single files beside it (/etc/ssl/certs) name the same ones
        found = b"\n".join(dict.fromkeys(one for text in texts for one in _ONE(text)))
        if not found:
            raise ValueError(path)
        tls_of(found)
    except CheckpointError as error:
        what = error.what
    except (ValueError, OSError):
        what = "holds no certificates that can be read"
    else:
        return found
    raise UnsupportedCheckpoint(what, path=path, hint=hint)


@lru_cache(maxsize=4)
def tls_of(pem: bytes) -> ssl.SSLContext:
    """What trusts these certificates alone; they are parsed once."""
    return ssl.create_default_context(cadata=pem.decode("ascii"))


@lru_cache(maxsize=4)
def as_file(found: Trusted) -> str:
    """A file of certificates, for who takes nothing else; one made here ends with this process."""
    if found.path.is_file():
        return str(found.path)
    return platforms.file_of_process(found.pem, ".pem")


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for an address; NO_PROXY lists hosts, with a port or
    without, domains, networks, and ``*`` for all.
    """
    found = urlsplit(url)
    host = (found.hostname or "").lower()
    proxies = getproxies()
    name = next((name for name in (found.scheme, "all") if proxies.get(name)), None)
    if name is None:
        return None
    port = found.port or {"http": 80, "https": 443}.get(found.scheme, 0)
    if proxy_bypass(f"{bracketed(host)}:{port}") or _is_excepted(host, proxies.get("no", "")):
        return None
    proxy = proxies[name]
    # as curl reads it: HTTP_PROXY=host:3128
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    hint = "name an http:// proxy, or set NO_PROXY"
    try:
        at = urlsplit(proxy)
        is_whole = bool(at.hostname) and at.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        what = f"cannot be asked for: {name.upper()}_PROXY is not the address of a proxy"
        raise UnsupportedCheckpoint(what, hint=hint)
    if at.scheme not in ("http", "https"):
        what = f"a proxy of the kind {at.scheme}:// is not used"
        raise UnsupportedCheckpoint(what, hint=hint)
    return proxy


def bracketed(host: str) -> str:
    """A host as it stands in an address; that of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _is_excepted(host: str, listed: str) -> bool:
    """Whether NO_PROXY lists all, a domain with a star, or a network that an address is in."""
    entries = [entry.strip().lower() for entry in listed.split(",")]
    if "*" in entries or any(host.endswith(one[1:]) for one in entries if one.startswith("*.")):
        return True
    with contextlib.suppress(ValueError):  # a name is in no network
        ip = ipaddress.ip_address(host)
        for entry in entries:
            with contextlib.suppress(ValueError):  # an entry may be a name
                if "/" in entry and ip in ipaddress.ip_network(entry, strict=False):
                    return True
    return False
