"""Rendezvous of the ranks, and a report of the missing ones where it fails.

Each rank writes its presence into a TCP key-value store that rank 0 (or torchrun) serves, then
waits for the others. So a wait that fails names the absent ranks instead of a timeout, two
processes with one rank are told apart, and unequal world sizes are noticed before any collective.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rft_core.errors import PeerError
from rft_core.fault_points import declare, fault_point
from rft_dist.launch.environment import SPAWNED, START_TIMEOUT, RankInfo

_CONNECT = declare("launch.store.connect", "before this rank opens the store at which the ranks meet")
_PRESENT = declare("launch.store.present", "this rank has announced itself to the others")

_LOG = logging.getLogger(__name__)
_REPORT_EVERY_SECONDS = 10.0
_OFTEN = 6
"""So many times; afterwards that many times as seldom."""


def this_process(info: RankInfo) -> str:
    """Rank, machine and process as messages name them."""
    return f"rank {info.rank} (node {info.node_rank}, {socket.gethostname()}, pid {os.getpid()})"


def meet(info: RankInfo, seconds: float, environment: Mapping[str, str]) -> Store:
    """The store with all of `info.world_size` ranks present.

    Raises PeerError after `seconds` naming the missing ranks, at once for a rank that two
    processes claim or for ranks that were told different world sizes.
    """
    store = _connect(info, seconds, environment)
    try:
        _announce(store, info)
        fault_point(_PRESENT)
        _wait_for_all(store, info, seconds, environment)
    except RuntimeError as error:  # torch.distributed.DistError and its kinds
        raise PeerError(
            code="launch.store_lost",
            what=f"{this_process(info)} lost the store at {info.master_addr}:{info.master_port} before all had arrived",
            where=f"{info.origins['master_addr']}, {info.origins['master_port']}",
            why=_first_line(error),
            do="read the first error of rank 0, which serves the store",
        ) from error
    return store


def _connect(info: RankInfo, seconds: float, environment: Mapping[str, str]) -> Store:
    fault_point(_CONNECT)
    serves = serves_store(info, environment)
    start = time.monotonic()
    if not serves:
        _wait_for_master(info, seconds)
    # the search for the master has used up a part of the time
    left = max(1.0, seconds - (time.monotonic() - start))
    listener = _listener(info, environment) if serves else None
    store = _open(info, seconds if serves else left, serves=serves, listener=listener)
    return PrefixStore(_prefix(environment), store)


def _listener(info: RankInfo, environment: Mapping[str, str]) -> int | None:
    """Return a socket that listens at the master's address alone, as a number that the store closes.

    The store has no authentication: who reaches it can end the run. Where no rank comes from outside, nobody else is
    let in from there. None: torch listens at every address, because the name may be another one for other machines, or
    the address is not this machine's (behind a service or a translation of addresses).
    """
    is_local = environment.get("LOCAL_WORLD_SIZE") == str(info.world_size)
    if not (is_local or info.master_addr == "localhost" or _is_address(info.master_addr)):
        return None
    places: list[Any] = []
    with contextlib.suppress(OSError):
        places = socket.getaddrinfo(info.master_addr, info.master_port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, place in places:
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(_BACKLOG)
        except OSError:  # also where this very process serves the port already, which torch knows
            listener.close()
            continue
        return listener.detach()
    return None


_BACKLOG = 2048


def _is_address(text: str) -> bool:
    """Return whether a host is given by its address, which is the same on every machine."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _open(info: RankInfo, seconds: float, *, serves: bool, listener: int | None = None) -> TCPStore:
    """The store at the master's address. A client of torch waits without a limit for whatever listens there."""
    opened: list[TCPStore] = []
    refused: list[RuntimeError] = []

    def attempt() -> None:
        limit = timedelta(seconds=seconds)
        endpoint = (info.master_addr, info.master_port, info.world_size)
        try:
            given: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener}
            opened.append(TCPStore(*endpoint, serves, limit, wait_for_workers=False, multi_tenant=True, **given))
        except RuntimeError as error:  # torch.distributed.DistError and its kinds
            refused.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    start = time.monotonic()
    thread.start()
    while thread.is_alive() and time.monotonic() - start < seconds:
        thread.join(min(_REPORT_EVERY_SECONDS, seconds))
        if thread.is_alive():
            address = f"{info.master_addr}:{info.master_port}"
            _LOG.warning("%s is connected to %s and gets no answer: %s", this_process(info), address, _NO_STORE)
    if opened:
        return opened[0]
    raise _unreachable(info, seconds, _first_line(refused[0]) if refused else _NO_STORE)


_NO_STORE = "what listens there is not the ranks' store (another program has the port), or rank 0 is stopped"


def _wait_for_master(info: RankInfo, seconds: float) -> None:
    """Return once something listens at the master's address; meanwhile say why not, about every ten seconds.

    torch would try for as long, and say nothing.
    """
    start = time.monotonic()
    next_report = start + _REPORT_EVERY_SECONDS
    while True:
        reason = _obstacle(info)
        now = time.monotonic()
        if not reason:
            return
        if now - start >= seconds:
            raise _unreachable(info, seconds, reason)
        if now >= next_report:
            address = f"{info.master_addr}:{info.master_port}"
            left = f"for at most {seconds - (now - start):.0f} s more ({START_TIMEOUT})"
            waits = f"{this_process(info)} waits for rank 0 at {address} ({now - start:.0f} s so far), {left}"
            _LOG.warning("%s: %s", waits, reason)
            next_report = now + _pause(now - start)
        time.sleep(0.1)


def _obstacle(info: RankInfo) -> str:
    """Why nothing can be reached at the master's address now; empty where something listens."""
    try:
        with socket.create_connection((info.master_addr, info.master_port), timeout=_PROBE_SECONDS):
            return ""
    except socket.gaierror as error:
        return f"the name {info.master_addr} has no address ({error.strerror})"
    except TimeoutError:
        return "no answer: the address is wrong, or a firewall drops what is sent there"
    except ConnectionRefusedError:
        return "refused: the machine answers, and nothing listens at this port (yet)"
    except OSError as error:
        return error.strerror or type(error).__name__


_PROBE_SECONDS = 3.0


def serves_store(info: RankInfo, environment: Mapping[str, str]) -> bool:
    """Return whether this process serves the store: rank 0, unless torchrun does."""
    return info.rank == 0 and not _agent_serves(environment)


def _agent_serves(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun serves the store, for as long as its ranks live."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def another_client(info: RankInfo, environment: Mapping[str, str]) -> Store:
    """A connection of its own to the store at which the ranks have met.

    A client answers one call at a time, and a call that waits keeps the others out.
    """
    return PrefixStore(_prefix(environment), _open(info, _CLIENT_SECONDS, serves=False))


_CLIENT_SECONDS = 60.0


class _Meetings:
    """The groups of ranks of this process, the same on every rank of a program."""

    left = 0
    """How many it has left."""
    places: ClassVar[set[tuple[str, int]]] = set()
    """Where the ranks have met: address and port."""


def met(info: RankInfo) -> None:
    """Note where the ranks have met."""
    _Meetings.places.add((info.master_addr, info.master_port))


def meeting_ended() -> None:
    """Note that this process has left its group: its next meeting is another one."""
    _Meetings.left += 1


def refuse_another(info: RankInfo, environment: Mapping[str, str]) -> None:
    """Refuse a second meeting at a store that a rank served: it closed with the first, and others may still see it."""
    is_known = (info.master_addr, info.master_port) in _Meetings.places
    if not (_Meetings.left and is_known) or _agent_serves(environment):
        return
    raise PeerError(
        code="launch.met_before",
        what=f"{this_process(info)} has left its group, and is to meet the other ranks again",
        where=f"{info.origins['master_addr']}, {info.origins['master_port']}",
        why="rank 0 serves the store at which ranks meet, for one run; torchrun serves it for all runs of a script",
        state="what was trained before is saved",
        do=f"torchrun --nproc_per_node={info.world_size} SCRIPT",
    )


def _prefix(environment: Mapping[str, str]) -> str:
    """Keys of one meeting: a restart under torchrun, and the next run of a script, find the store of those before."""
    attempt = f"rft/attempt_{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return f"{attempt}/meeting_{_Meetings.left}" if _Meetings.left and _agent_serves(environment) else attempt


def _unreachable(info: RankInfo, seconds: float, reason: str) -> PeerError:
    address = f"{info.master_addr}:{info.master_port}"
    listens = info.rank == 0
    return PeerError(
        code="launch.cannot_listen" if listens else "launch.cannot_reach_master",
        what=f"{this_process(info)} cannot {'listen at' if listens else 'reach'} {address} within {seconds:g} s",
        where=f"{info.origins['master_addr']}, {info.origins['master_port']}",
        why=reason,
        do=f"export MASTER_PORT={info.master_port + 1 if info.master_port < 65535 else 29500}"
        if listens
        else f"start rank 0 on {info.master_addr} with MASTER_PORT={info.master_port}",
    )


def _announce(store: Store, info: RankInfo) -> None:
    # `add` is one step of the store: of two processes with one rank exactly one gets 1
    if store.add(f"claims/{info.rank}", 1) > 1:
        holder = store.get(f"present/{info.rank}").decode() if store.check([f"present/{info.rank}"]) else "another one"
        raise PeerError(
            code="launch.duplicate_rank",
            what=f"RANK = {info.rank} is claimed by two processes: {this_process(info)} and {holder}",
            where=info.origins["rank"],
            why="every process of a run has a rank of its own",
            do=f"give each of the {info.world_size} processes its own RANK from 0 to {info.world_size - 1}",
        )
    store.set(f"world_size/{info.rank}", str(info.world_size))
    # last: whoever sees this rank present reads its world size at once
    store.set(f"present/{info.rank}", this_process(info))


def _pause(waited: float) -> float:
    """Seconds until the next report of a wait."""
    return _REPORT_EVERY_SECONDS * (1 if waited < _OFTEN * _REPORT_EVERY_SECONDS else _OFTEN)


def _wait_for_all(store: Store, info: RankInfo, seconds: float, environment: Mapping[str, str]) -> None:
    """Return once all are there; meanwhile the lowest rank that is says who is not, and the others log it."""
    start = time.monotonic()
    next_report = start + _REPORT_EVERY_SECONDS
    missing = list(range(info.world_size))
    while True:
        arrived = [rank for rank in missing if store.check([f"present/{rank}"])]
        for rank in arrived:
            _compare_world_size(info, rank, int(store.get(f"world_size/{rank}")))
        missing = [rank for rank in missing if rank not in arrived]
        if not missing:
            return
        now = time.monotonic()
        if now - start > seconds:
            raise _incomplete(info, missing, seconds)
        if now >= next_report:
            speaks = info.rank == min(set(range(info.world_size)) - set(missing))
            message = _waiting(info, missing, now - start, seconds, environment)
            _LOG.log(logging.WARNING if speaks else logging.INFO, "%s", message)
            next_report = now + _pause(now - start)
        time.sleep(0.02)


def _waiting(info: RankInfo, missing: list[int], waited: float, seconds: float, environment: Mapping[str, str]) -> str:
    """Who is missing, where and how long they are waited for, and what to look at."""
    address = f"{info.master_addr}:{info.master_port}"
    outputs = f" (RUN/logs/output_rank_{missing[0]}.log)" if environment.get(SPAWNED) else ""
    left = f"for at most {max(0.0, seconds - waited):.0f} s more ({START_TIMEOUT})"
    return (
        f"waiting for {len(missing)} of {info.world_size} ranks at {address} ({waited:.0f} s so far): "
        f"missing {_some(missing)}; {left}. Check that their processes run, what they print{outputs}, "
        f"that they have {_variables(info)}, and that their machines can reach {address}"
    )


def _variables(info: RankInfo) -> str:
    """Return the variables that every process of the run needs, as assignments."""
    return f"MASTER_ADDR={info.master_addr} MASTER_PORT={info.master_port} WORLD_SIZE={info.world_size}"


def _incomplete(info: RankInfo, missing: list[int], seconds: float) -> PeerError:
    present = [rank for rank in range(info.world_size) if rank not in set(missing)]
    return PeerError(
        code="launch.rendezvous_incomplete",
        what=f"rendezvous incomplete after {seconds:g} s: present {_some(present)}, missing {_some(missing)}",
        where=f"{this_process(info)} at {info.master_addr}:{info.master_port}",
        why=f"{info.world_size} processes, as {info.origins['world_size']} says, must arrive within this time; "
        "the missing ones are not running, have another address, or cannot reach this one",
        do=f"start the missing ranks with {_variables(info)}; if they only come later, export {START_TIMEOUT}="
        f"{max(2 * seconds, 1200):g} for all",
    )


def _compare_world_size(info: RankInfo, rank: int, claimed: int) -> None:
    if claimed == info.world_size:
        return
    raise PeerError(
        code="launch.world_size_differs",
        what=f"WORLD_SIZE = {info.world_size} on rank {info.rank}, {claimed} on rank {rank}",
        where=info.origins["world_size"],
        why="all processes of a run need the same number",
        do=f"export WORLD_SIZE={max(info.world_size, claimed)} for every process",
    )


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or ["no reason was given"])[0][:300]


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
