"""Findings on what ranks need to meet: variables and their origins, the port, addresses, machines that are named."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from rft.installation.facts import MachineFact
from rft_core.errors import PreflightError
from rft_core.secrets import holds_secret
from rft_dist.launch.environment import environment_report, ranks_from_environment
from rft_dist.preflight.process_checks import check_start, holder_of

_DEFAULT_PORT = 29500
_SECONDS = 3.0

Connect = Callable[[str, int], str]
"""(host, port) -> why it cannot be reached; empty where it can."""


def connect(host: str, port: int) -> str:
    """Return why a port of a machine cannot be reached from here; empty where something answers there."""
    try:
        with socket.create_connection((host, port), timeout=_SECONDS):
            return ""
    except TimeoutError:
        return "no answer, as behind a firewall"
    except OSError as error:
        return error.strerror or str(error)


def variables(environment: Mapping[str, str]) -> list[MachineFact]:
    """Return findings on the environment's variables for ranks: what each does and who set it, and contradictions."""
    findings = [
        MachineFact(name, "(hidden)" if holds_secret(name, value) else value, "ok", effect)
        for name, value, effect in environment_report(environment)
    ]
    try:
        check_start(ranks_from_environment(environment), environment)
    except PreflightError as error:
        problem = error.problem
        findings.append(MachineFact(problem.where, problem.what, "problem", problem.why, problem.do))
    if not findings:
        findings.append(MachineFact("variables of ranks", "none is set: one process, or as many as --nproc asks for"))
    return findings


def port(environment: Mapping[str, str]) -> list[MachineFact]:
    """Return a finding on the port at which the first rank would listen, unless this process is one of a launcher's."""
    if environment.get("RANK"):
        return []
    text = environment.get("MASTER_PORT", "")
    number = int(text) if text.isdecimal() and 0 < int(text) < 1 << 16 else _DEFAULT_PORT
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", number))
        except OSError:
            why = f"held by {holder_of(number)}; torchrun would wait there in vain"
            return [
                MachineFact(
                    f"port {number}", "taken", "note", why, "another --master_port, or --nproc, which finds one"
                )
            ]
    return [MachineFact(f"port {number}", "free")]


def own_name(resolve: Callable[[str], str] = socket.gethostbyname, name: str = "") -> MachineFact:
    """Return a finding on the address that this machine's own name has, at which gloo listens."""
    name = name or socket.gethostname()
    do = "for several machines: export GLOO_SOCKET_IFNAME"
    try:
        address = resolve(name)
    except OSError:
        why = "gloo listens at the address of the machine's own name"
        return MachineFact("own name", f"{name} has no address", "note", why, do)
    if address.startswith("127."):
        why = "other machines cannot reach gloo there; one machine alone works"
        return MachineFact("own name", f"{name} is {address}", "note", why, do)
    return MachineFact("own name", f"{name} is {address}")


def machines(addresses: str, reach: Connect = connect) -> list[MachineFact]:
    """Return a finding on each `host:port` of a list that is joined by commas: whether it can be reached from here."""
    findings: list[MachineFact] = []
    for text in filter(None, (part.strip() for part in addresses.split(","))):
        host, _, number = text.rpartition(":")
        if not host or not number.isdecimal():
            findings.append(
                MachineFact(text, "no address", "problem", "an address is host:port", "--reach node2:29500")
            )
            continue
        reason = reach(host.strip("[]"), int(number))
        if reason:
            do = f"let something listen there (python -m http.server {number}), and open the firewall between the two"
            findings.append(MachineFact(text, "cannot be reached", "problem", reason, do))
        else:
            findings.append(MachineFact(text, "reached"))
    return findings
