"""Ten ways in which ranks do not find one another: each is named, and while it lasts it is told."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rft_core.errors import PeerError, PreflightError
from rft_dist.launch import rendezvous
from rft_dist.launch.environment import RankInfo, ranks_from_environment, start_seconds
from rft_dist.launch.process_group import meet_ranks

ANOTHER = """
import sys
from rft_dist.launch.environment import ranks_from_environment
from rft_dist.launch.rendezvous import meet
names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
try:
    meet(ranks_from_environment(dict(zip(names, sys.argv[1:5]))), float(sys.argv[5]), {})
except Exception as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What is told every ten seconds is told after a moment."""
    monkeypatch.setattr(rendezvous, "_REPORT_EVERY_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "_PROBE_SECONDS", 0.3)
    caplog.set_level(logging.INFO, logger="rft_dist")


def info(rank: int, world_size: int, port: int, address: str = "127.0.0.1") -> RankInfo:
    """As four variables by hand give it."""
    values = {"MASTER_ADDR": address, "MASTER_PORT": f"{port}", "RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
    return ranks_from_environment(values)


def has_ipv6() -> bool:
    """Whether this machine can be reached by IPv6 at all."""
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::1", 0))
    except OSError:
        return False
    return True


def refused(place: RankInfo, seconds: float = 1.0, environment: dict[str, str] | None = None) -> str:
    """What the error says, with its reason; it comes soon after `seconds`."""
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        rendezvous.meet(place, seconds, environment or {})
    assert time.monotonic() - started < seconds + 10
    return f"{caught.value.problem.what} | {caught.value.problem.why}"


class Joining(threading.Thread):
    """A rank that tries to meet the others in a thread of its own."""

    def __init__(
        self, place: RankInfo, seconds: float = 5.0, after: float = 0.0, environment: dict[str, str] | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.place, self.seconds, self.after, self.environment = place, seconds, after, environment or {}
        self.told = ""
        self.store: object = None
        self.start()

    def run(self) -> None:
        time.sleep(self.after)
        try:
            self.store = rendezvous.meet(self.place, self.seconds, self.environment)
        except PeerError as error:
            self.told = error.problem.what


@pytest.fixture
def full_queue() -> Iterator[int]:
    """A port at which connections are neither taken nor refused, as behind a firewall that drops them."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield port


def test_a_missing_rank_is_told_while_the_others_wait_and_named_at_the_end(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    told = refused(info(0, 3, free_port))
    assert "present 0, missing 1, 2" in told
    assert (
        f"waiting for 2 of 3 ranks at 127.0.0.1:{free_port} (0 s so far): missing 1, 2; for at most 1 s" in caplog.text
    )
    assert f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port} WORLD_SIZE=3" in caplog.text
    assert "output_rank" not in caplog.text, "no rank of this run writes there"


def test_the_lowest_rank_that_is_there_speaks_and_the_others_log(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = [Joining(info(rank, 3, free_port), 1.5) for rank in (0, 1)]
    for each in first:
        each.join()
    assert "present 0, 1, missing 2" in first[0].told
    assert "present 0, 1, missing 2" in first[1].told or "lost the store" in first[1].told, "rank 0 has ended first"
    levels = {record.levelname for record in caplog.records if "waiting for 1 of 3 ranks" in record.getMessage()}
    assert levels == {"WARNING", "INFO"}


def test_a_long_wait_is_told_often_and_then_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_REPORT_EVERY_SECONDS", 10.0)
    told, waited = list[float](), 10.0
    while waited < 600.0:
        told.append(waited)
        waited += rendezvous._pause(waited)
    assert told == [10, 20, 30, 40, 50, 60, 120, 180, 240, 300, 360, 420, 480, 540]


def test_ranks_that_one_command_started_are_looked_for_in_their_outputs(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    refused(info(0, 2, free_port), environment={"RFT_NPROC": "2"})
    assert "RUN/logs/output_rank_1.log" in caplog.text


def test_the_wait_for_the_start_has_a_variable_of_its_own() -> None:
    assert start_seconds({}) == 600.0
    assert start_seconds({"NCCL_TIMEOUT": "30"}) == 30.0
    assert start_seconds({"NCCL_TIMEOUT": "30", "RFT_START_TIMEOUT": "5"}) == 5.0
    with pytest.raises(PreflightError, match="RFT_START_TIMEOUT = 'soon'") as caught:
        start_seconds({"RFT_START_TIMEOUT": "soon"})
    assert caught.value.problem.code == "launch.bad_value"


def test_a_duplicate_rank_is_refused_at_once(free_port: int) -> None:
    first = [Joining(info(rank, 3, free_port), 2.0) for rank in (0, 1)]
    time.sleep(0.5)
    assert "RANK = 1 is claimed by two processes" in refused(info(1, 3, free_port))
    for each in first:
        each.join()


def test_a_port_where_nothing_listens_is_told_as_refused(free_port: int, caplog: pytest.LogCaptureFixture) -> None:
    assert "refused: the machine answers, and nothing listens" in refused(info(1, 2, free_port))
    assert f"waits for rank 0 at 127.0.0.1:{free_port} (" in caplog.text


def test_a_port_of_another_program_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert "what listens there is not the ranks' store" in refused(info(1, 2, other.getsockname()[1]))
    assert "gets no answer" in caplog.text


def test_an_address_that_swallows_everything_is_told(full_queue: int, caplog: pytest.LogCaptureFixture) -> None:
    assert "no answer: the address is wrong, or a firewall" in refused(info(1, 2, full_queue))
    assert "no answer" in caplog.text


def test_two_masters_of_one_address_are_told(free_port: int) -> None:
    words = ["127.0.0.1", f"{free_port}", "0", "2"]
    first = subprocess.Popen([sys.executable, "-c", ANOTHER, *words, "60"], stdout=subprocess.PIPE)
    try:
        until = time.monotonic() + 60
        while rendezvous._obstacle(info(1, 2, free_port)) and time.monotonic() < until:
            time.sleep(0.1)
        assert f"cannot listen at 127.0.0.1:{free_port}" in refused(info(0, 2, free_port))
    finally:
        first.kill()
        first.communicate()


def test_unequal_world_sizes_are_told_by_both(free_port: int) -> None:
    other = Joining(info(0, 2, free_port), 2.0)
    told = refused(info(1, 3, free_port))
    other.join()
    # rank 0 serves the store, and may have left with the same finding before rank 1 could read of it
    assert "WORLD_SIZE = 3 on rank 1, 2 on rank 0" in told or "lost the store" in told
    assert "WORLD_SIZE = 2 on rank 0, 3 on rank 1" in other.told


def test_an_address_of_ipv6_works_and_a_name_without_an_address_is_told(free_port: int) -> None:
    here = "::1" if has_ipv6() else "127.0.0.1"
    ranks = [Joining(info(rank, 2, free_port, here)) for rank in range(2)]
    for each in ranks:
        each.join()
        assert each.store is not None, each.told
    assert "no-such-host.invalid has no address" in refused(info(1, 2, free_port, "no-such-host.invalid"))


def test_a_store_that_an_earlier_run_left_is_told_as_claimed(free_port: int) -> None:
    earlier = [Joining(info(rank, 2, free_port)) for rank in range(2)]
    for each in earlier:
        each.join()
    assert "RANK = 1 is claimed by two processes" in refused(info(1, 2, free_port))
    assert all(each.store is not None for each in earlier)


def test_a_restart_under_torchrun_does_not_see_the_keys_of_the_attempt_before(free_port: int) -> None:
    earlier = [Joining(info(rank, 2, free_port)) for rank in range(2)]
    for each in earlier:
        each.join()
    again = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert "missing 0" in refused(info(1, 2, free_port), environment=again)


def test_a_rank_that_comes_late_is_told_as_missing_and_then_taken_in(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    late = Joining(info(1, 2, free_port), after=1.0)
    assert rendezvous.meet(info(0, 2, free_port), 10.0, {}) is not None
    late.join()
    assert late.store is not None
    assert "waiting for 1 of 2 ranks" in caplog.text
    assert "missing 1;" in caplog.text


@pytest.mark.night
def test_fifty_faults_are_told_within_fifteen_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full_queue: int
) -> None:
    """D3, with the intervals of production, all at once; what is told names the address, so that none hides another."""
    monkeypatch.setattr(rendezvous, "_REPORT_EVERY_SECONDS", 10.0)
    monkeypatch.setattr(rendezvous, "_PROBE_SECONDS", 3.0)
    with ExitStack() as held:

        def port(listens: bool) -> int:
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            if listens:
                listener.listen()
            return listener.getsockname()[1]

        cases = [(info(1, 2 + number, port(False)), "refused") for number in range(12)]
        cases += [(info(1, 2, port(True)), "gets no answer") for _ in range(10)]
        cases += [(info(1, 2, full_queue), "no answer: the address is wrong")]
        cases += [(info(1, 2, 29500, f"no-such-host-{number}.invalid"), "has no address") for number in range(7)]
        # ranks that never come: rank 0 serves the store and tells who is missing
        with ExitStack() as free:
            listeners = [free.enter_context(socket.socket()) for _ in range(20)]
            for listener in listeners:
                listener.bind(("127.0.0.1", 0))
            spare = [listener.getsockname()[1] for listener in listeners]
        missing = [info(0, 2 + number, spare[number]) for number in range(10)]
        cases += [(place, f"waiting for {place.world_size - 1} of {place.world_size} ranks") for place in missing]
        started = time.monotonic()
        threads = [Joining(place, 40.0) for place, _ in cases]
        # ranks that disagree, and ranks that are there twice: an error at once, on those that find it
        unequal = [(info(0, 2, spare[n]), info(1, 3, spare[n]), "WORLD_SIZE = ") for n in range(10, 15)]
        twice = [(info(0, 3, spare[n]), info(0, 3, spare[n]), "cannot listen at") for n in range(15, 20)]
        pairs = [
            (word, Joining(first, 12.0), Joining(second, 12.0, after=1.0)) for first, second, word in unequal + twice
        ]
        time.sleep(15.0 - (time.monotonic() - started))
        told = [record.getMessage() for record in caplog.records]
        for place, word in cases:
            address = f"{place.master_addr}:{place.master_port}"
            assert any(address in line and word in line for line in told), f"{address} {word}: {told}"
        for word, *two in pairs:
            assert any(word in one.told for one in two), f"{word}: {[one.told for one in two]}"
        assert len(cases) + len(pairs) == 50
        print(f"{len(cases) + len(pairs)} of {len(cases) + len(pairs)} told within 15 s")
    for thread in threads:
        thread.join(timeout=0.1)


@pytest.mark.parametrize(
    ("address", "environment", "is_open"),
    [
        ("127.0.0.1", {}, False),
        ("localhost", {}, False),
        (socket.gethostname(), {"LOCAL_WORLD_SIZE": "2"}, False),
        (socket.gethostname(), {"LOCAL_WORLD_SIZE": "1"}, True),
    ],
)
def test_a_store_listens_at_the_address_of_the_master_alone_where_no_rank_comes_from_outside(
    free_port: int, address: str, environment: dict[str, str], is_open: bool
) -> None:
    ranks = [Joining(info(rank, 2, free_port, address), environment=environment) for rank in range(2)]
    for rank in ranks:
        rank.join()
        assert rank.store is not None, rank.told
    outside = "127.0.0.2"  # every address of 127/8 is this machine's, and none but the master's is meant
    if is_open:
        socket.create_connection((outside, free_port), 1.0).close()
        return
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((outside, free_port), 1.0)


def test_the_next_run_of_a_script_meets_anew_where_torchrun_serves_the_store(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = [Joining(info(rank, 2, free_port)) for rank in range(2)]
    for each in earlier:
        each.join()
    monkeypatch.setattr(rendezvous._Meetings, "left", 0)  # pyright: ignore[reportPrivateUsage]
    rendezvous.meeting_ended()
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert "missing 0" in refused(info(1, 2, free_port), environment=agent), "the keys of the first meeting"
    rendezvous.met(info(1, 2, free_port))
    with pytest.raises(PeerError, match="is to meet the other ranks again"):
        meet_ranks(info(1, 2, free_port), {})
