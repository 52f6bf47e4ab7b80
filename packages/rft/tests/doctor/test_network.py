"""Findings on what ranks need to meet."""

import socket

import pytest

from rft.doctor.network import connect, machines, own_name, port, variables

HAND_SET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}


def test_variables_are_listed_with_who_set_them_and_what_they_do() -> None:
    (none,) = variables({})
    assert none.verdict == "ok"
    findings = {f.subject: f for f in variables(HAND_SET)}
    assert findings["RANK"].value == "1"
    assert "set by" in findings["RANK"].why


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "0"},
        {**HAND_SET, "RANK": "7"},
        {**HAND_SET, "GLOO_SOCKET_IFNAME": "eth77"},
        {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"},
    ],
)
def test_variables_that_a_start_would_refuse_are_a_problem(wrong: dict[str, str]) -> None:
    problems = [f for f in variables(wrong) if f.verdict == "problem"]
    assert len(problems) == 1
    assert problems[0].do


def test_a_port_that_is_taken_is_noted_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        (taken,) = port({"MASTER_PORT": str(number)})
        assert connect("127.0.0.1", number) == ""
    assert (taken.verdict, taken.value) == ("note", "taken")
    assert "pid" in taken.why
    assert connect("127.0.0.1", number) == "Connection refused"
    assert port(HAND_SET) == []


def unknown(name: str) -> str:
    raise socket.gaierror


def test_a_machine_whose_name_is_its_loopback_is_noted() -> None:
    assert own_name(lambda name: "10.0.0.1", "node1").verdict == "ok"
    assert own_name(lambda name: "127.0.1.1", "node1").verdict == "note"
    assert own_name(unknown, "node1").value == "node1 has no address"


def test_machines_that_are_named_must_be_reached() -> None:
    asked: list[tuple[str, int]] = []

    def reach(host: str, number: int) -> str:
        asked.append((host, number))
        return "" if host == "node1" else "no answer, as behind a firewall"

    findings = machines("node1:29500, node2:29501,[fe80::1]:5,nonsense", reach)
    assert [f.verdict for f in findings] == ["ok", "problem", "problem", "problem"]
    assert asked == [("node1", 29500), ("node2", 29501), ("fe80::1", 5)]
    assert machines("") == []
