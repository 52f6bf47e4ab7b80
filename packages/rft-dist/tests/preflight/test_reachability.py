"""Each rank listens for the one before it and connects to the next; gloo's own address is looked at."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from rft_dist.launch.environment import RankInfo, ranks_from_environment
from rft_dist.preflight import reachability
from rft_dist.preflight.process_checks import free_port
from rft_dist.preflight.reachability import gloo_problem, own_address, unreachable_next


def place(rank: int, world_size: int, master: str = "127.0.0.1") -> RankInfo:
    meet = {"MASTER_ADDR": master, "MASTER_PORT": "29500"}
    return ranks_from_environment({**meet, "RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"})


@dataclass
class Store:
    """A store that tells which keys were written, looked for and read, in their order."""

    rows: dict[str, str]
    meanwhile: Callable[[str], None] = lambda key: None
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def set(self, key: str, value: str, /) -> None:
        self.calls.append(("set", key))
        self.rows[key] = value

    def get(self, key: str, /) -> bytes:
        self.calls.append(("get", key))
        return self.rows[key].encode()

    def check(self, keys: list[str], /) -> bool:
        self.calls += [("check", key) for key in keys]
        self.meanwhile(*keys)
        return all(key in self.rows for key in keys)


@pytest.mark.parametrize("master", ["127.0.0.1", "::1"])
def test_a_rank_listens_at_its_own_address_until_the_one_before_has_connected(master: str) -> None:
    connected: list[str] = []

    def meanwhile(key: str) -> None:
        if key == "connected/0":
            address, port = store.rows["listens/1"].split()
            assert int(port) > 1023
            with socket.create_connection((address, int(port))) as client:
                connected.append(client.getpeername()[0])
            if ":" not in address:  # every address that begins with 127 is this machine
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.2", int(port)))

    with socket.create_server((master, 0), family=socket.AF_INET6 if ":" in master else socket.AF_INET) as following:
        port = following.getsockname()[1]
        store = Store({"listens/2": f"{master} {port}", "connected/0": ""}, meanwhile)
        assert unreachable_next(store, place(1, 4, master), seconds=5.0) == ()
        following.settimeout(5.0)
        following.accept()[0].close()
    assert connected == [master]
    assert store.calls == [
        ("set", "listens/1"),
        ("check", "listens/2"),
        ("get", "listens/2"),
        ("set", "connected/1"),
        ("check", "connected/0"),
    ]


def test_the_last_rank_connects_to_the_first_and_a_closed_port_is_a_problem() -> None:
    port = free_port()
    store = Store({"listens/0": f"127.0.0.1 {port}", "connected/1": ""})
    [problem] = unreachable_next(store, place(2, 3), seconds=5.0)
    assert f"rank 0 at 127.0.0.1:{port}" in problem
    assert "Connection refused" in problem
    assert ("set", "connected/2") in store.calls


def test_a_connection_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    def connect(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        limits.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    [problem] = unreachable_next(Store({"listens/0": "127.0.0.1 9", "connected/0": ""}), place(1, 2), seconds=5.0)
    assert limits == [reachability.REACH_SECONDS]
    assert "None" not in problem


def test_a_rank_that_does_not_come_is_left_to_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)

    def sleep(seconds: float) -> None:
        clock.now += 0.25

    monkeypatch.setattr(reachability, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    store = Store({})
    assert unreachable_next(store, place(0, 2), seconds=0.5) == ()
    listens, connected = [("check", "listens/1")], [("check", "connected/1")]
    # at 0, 0.25, 0.5 and 0.75 seconds, of which the last is past the limit
    assert store.calls == [("set", "listens/0"), *listens * 4, ("set", "connected/0"), *connected * 4]


def test_the_own_address_is_the_one_from_which_the_master_is_reached() -> None:
    assert own_address(place(0, 2)) == "127.0.0.1"
    assert own_address(place(0, 2, "::1")) == "::1"


@pytest.mark.parametrize(
    ("num_nodes", "interface", "own", "name_points_to", "told"),
    [
        (2, "", "10.0.0.2", "127.0.1.1", "127.0.1.1"),
        (3, "", "10.0.0.2", None, "no address"),
        (2, "", "10.0.0.2", "10.0.0.2", ""),
        (1, "", "10.0.0.2", "127.0.1.1", ""),
        (2, "eth0", "10.0.0.2", "127.0.1.1", ""),
        (2, "", "127.0.0.1", "127.0.1.1", ""),
        (2, "", "::1", "127.0.1.1", ""),
    ],
)
def test_gloo_is_a_problem_where_the_machines_name_points_to_itself_and_others_have_to_get_there(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, interface: str, own: str, name_points_to: str | None, told: str
) -> None:
    def address_of(name: str) -> str:
        assert name == "worker"
        if name_points_to is None:
            raise socket.gaierror
        return name_points_to

    monkeypatch.setattr(reachability, "own_address", lambda ranks: own)
    monkeypatch.setattr(socket, "gethostname", lambda: "worker")
    monkeypatch.setattr(socket, "gethostbyname", address_of)
    problem = gloo_problem(place(0, 2), num_nodes, {"GLOO_SOCKET_IFNAME": interface})
    assert bool(problem) == bool(told)
    assert told in problem
