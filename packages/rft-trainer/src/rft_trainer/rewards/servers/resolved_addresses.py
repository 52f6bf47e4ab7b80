"""The machine to which a name of a URL led, looked at when the connection stands and before anything is sent.

Whoever answers for a name decides where it leads, and may change that between a request and its redirect. What is typed
as an address, or as localhost, is meant as it is: reward servers are often in a private network.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

Address = IPv4Address | IPv6Address

_METADATA = frozenset(map(ip_address, ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16")))
"""Where clouds give the credentials of a machine to whoever asks from it."""


def address_of(peer: object) -> Address | None:
    """Return the address in what `getpeername` gave; None for a socket without one."""
    if not isinstance(peer, tuple) or not peer:
        return None
    found = ip_address(str(peer[0]).partition("%")[0])
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found


def fault_of(name: str, found: Address, first: Address | None = None) -> str:
    """Return why nothing is sent to an address; empty where it is taken.

    Args:
        name: host of the URL.
        found: address that it led to.
        first: the one of the same request before it was redirected.
    """
    if first is not None and first.is_global and not found.is_global:
        return f"{name} led to {first}, and for the redirect to {found}, which is no address of the internet"
    if _is_typed(name):
        return ""
    if found in _METADATA or found.is_link_local or found.is_multicast or found.is_unspecified:
        return f"{name} leads to {found}, which is no address of a server"
    return ""


def _is_typed(name: str) -> bool:
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
