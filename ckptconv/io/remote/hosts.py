"""Which hosts a server may send us to: none of a network that it should know nothing of.

A redirect that leads from the internet to this machine, to a machine of its network or to the
metadata service of a cloud is how a stranger's server reads what only we can reach.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import IntEnum

from ckptconv.support.settings import set_within

VARIABLE = "CKPTCONV_ALLOW_HOSTS"

_given: ContextVar[str] = ContextVar("allowed_hosts", default="")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are the address of IPv4


class Reach(IntEnum):
    """From how far an address is reached; a server may send us to no nearer one than its own."""

    EVERYWHERE = 0
    NETWORK = 1
    MACHINE = 2
    NOWHERE = 3
    """Link-local, where clouds have their metadata, and what is not an address of one machine."""


def reach_of(address: str) -> Reach:
    """From how far an IP address is reached.

    >>> [reach_of(text).name for text in ("8.8.8.8", "10.0.0.1", "127.0.0.1", "169.254.169.254")]
    ['EVERYWHERE', 'NETWORK', 'MACHINE', 'NOWHERE']
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip.sixtofour is not None:
            ip = ip.sixtofour
        elif ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if ip.is_loopback:
        return Reach.MACHINE
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        return Reach.NOWHERE
    return Reach.EVERYWHERE if ip.is_global else Reach.NETWORK


def reach_of_host(host: str) -> Reach:
    """The same of a host as it is written; of one with a name, as if it were on the internet."""
    if host.rstrip(".").lower() == "localhost" or host.lower().endswith(".localhost"):
        return Reach.MACHINE
    try:
        return reach_of(host)
    except ValueError:
        return Reach.EVERYWHERE


def is_allowed(host: str, port: int, given: str) -> bool:
    """Whether any server may send us to a host: `given` are ``host``, ``host:port``, ``*.domain``
    or ``*`` for all, with commas between them.

    >>> hosts = "10.0.0.7, store.lan:9000, *.corp.lan"
    >>> [is_allowed(*at, hosts) for at in (("10.0.0.7", 80), ("store.lan", 80), ("a.corp.lan", 1))]
    [True, False, True]
    """
    host = host.lower().strip("[]")
    written = (host, f"{host}:{port}", f"[{host}]", f"[{host}]:{port}", "*")
    parents = (f"*{host[at:]}" for at, letter in enumerate(host) if letter == "." and at)
    names = {name.strip().lower() for name in given.split(",") if name.strip()}
    return not names.isdisjoint((*written, *parents))


def hosts_given() -> str:
    """What the environment and the caller allow, as text: `allowing_hosts` takes it elsewhere."""
    return ",".join(filter(None, (os.environ.get(VARIABLE, ""), _given.get())))


def allowing_hosts(text: str) -> AbstractContextManager[object]:
    """Within the block, these hosts are allowed too."""
    return set_within(_given, ",".join((_given.get(), text)))
