"""A port that is given by its number is listened on in few places; after a kill every other one is the system's choice.

Such a port may be held when a run starts again, and each of the places says so by name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from architecture.source_tree import Module, Sources, Violation, planted, real_sources, require_needed

NUMBERED = {
    "rft_dist.preflight.process_checks": "asks whether the port at which ranks meet is free, and names who holds it",
    "rft_dist.launch.rendezvous": "serves the store at which ranks meet",
    "rft.doctor.network": "asks whether the port at which ranks would meet is free",
    "rft.serving.listening": "listens for every server: rewards, recommendations and the dashboard",
}


def numbered_ports(module: Module) -> Iterator[Violation]:
    """Places that bind a socket to another port than 0, by which the system chooses a free one."""
    for node in module.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if node.func.attr not in ("bind", "create_server"):
            continue
        place = node.args[0]
        port = place.elts[1] if isinstance(place, ast.Tuple) and len(place.elts) > 1 else place
        if not (isinstance(port, ast.Constant) and port.value == 0):
            yield Violation(module.name, node.lineno, f"listens at {ast.unparse(port)}")


def found_in(sources: Sources) -> list[Violation]:
    """Every such place of these modules."""
    return [violation for module in sources.values() for violation in numbered_ports(module)]


def test_ports_are_chosen_by_the_system_but_for_those_that_ranks_and_clients_are_told() -> None:
    found = found_in(real_sources())
    assert [str(violation) for violation in found if violation.module not in NUMBERED] == []
    require_needed(NUMBERED, {violation.module for violation in found})


def test_a_port_with_a_number_is_found() -> None:
    texts = {"a__b": "s.bind(('', 8000))", "a__c": "create_server(('', port))\nsocket.create_server(('', 0))"}
    texts |= {"a__d": "s.bind(place)", "a__e": "socket.create_server((host, port))", "a__f": "call.bind()"}
    found = [str(violation) for violation in found_in(planted(**texts))]
    assert found == ["a.b:1 listens at 8000", "a.d:1 listens at place", "a.e:1 listens at port"]
