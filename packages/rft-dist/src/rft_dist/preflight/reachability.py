"""Reachability of the machines at ports that the system chooses, as gloo and NCCL will use.

The ranks met at one port of one machine; a firewall that lets that port through may still close all others,
and then the first collective hangs. No torch is imported here.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Protocol

from rft_dist.launch.environment import RankInfo

REACH_SECONDS = 3.0


class KeyValueStore(Protocol):
    """The part of torch's store interface that is used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def unreachable_next(store: KeyValueStore, ranks: RankInfo, *, seconds: float) -> tuple[str, ...]:
    """Return the next rank's problem if it is unreachable: every rank listens, and connects to the next; else empty.

    Waits at most `seconds` for the others; a rank that does not come is left to who compares the ranks.
    """
    following, before = (ranks.rank + 1) % ranks.world_size, (ranks.rank - 1) % ranks.world_size
    address = own_address(ranks)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen()
        store.set(f"listens/{ranks.rank}", f"{address} {listener.getsockname()[1]}")
        problem = ""
        if _came(store, f"listens/{following}", seconds):
            problem = _connect(following, *store.get(f"listens/{following}").decode().split())
        store.set(f"connected/{ranks.rank}", "")
        _came(store, f"connected/{before}", seconds)  # the one before needs this listener until then
    return (problem,) if problem else ()


def own_address(ranks: RankInfo) -> str:
    """The address from which this machine reaches the master; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(ranks.master_addr, ranks.master_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def gloo_problem(ranks: RankInfo, num_nodes: int, values: Mapping[str, str]) -> str:
    """Gloo listens where the machine's own name points, unless told otherwise: other machines must get there.

    Empty where they do, and where the ranks met at a loopback address: then all are on this machine.
    """
    if num_nodes < 2 or values.get("GLOO_SOCKET_IFNAME") or own_address(ranks) in ("127.0.0.1", "::1"):
        return ""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if not (address.startswith("127.") or address == "no address"):
        return ""
    return f"gloo would listen at {address} ({name}), which other machines cannot reach: set GLOO_SOCKET_IFNAME"


def _connect(rank: int, address: str, port: str) -> str:
    try:
        with socket.create_connection((address, int(port)), timeout=REACH_SECONDS):
            return ""
    except OSError as error:
        reason = "no answer, as behind a firewall" if isinstance(error, TimeoutError) else error.strerror
        return f"rank {rank} at {address}:{port} cannot be reached from here: {reason}"


def _came(store: KeyValueStore, key: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
