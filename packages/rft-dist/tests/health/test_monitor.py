"""Ranks over gloo, one of them at fault: the others name it and end, whatever it did and wherever.

`watched_ranks.py` forks the ranks. The long matrices (reliability D1 and D2) carry the marker `full`, and only
they look at the clock.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("watched_ranks.py")
QUICK = {"watchdog_seconds": 2.5, "watchdog_first_seconds": 2.5, "watchdog_collective_seconds": 4.0}
SECONDS_TO_NAME = 10.0
KILLED, PEER = -9, 9


@dataclass(frozen=True, slots=True)
class Ended:
    """How the ranks of one run ended."""

    codes: list[int]
    said: list[str]
    """What each rank printed."""
    error: dict[str, Any]
    """error.json of the run; empty where there is none."""
    page: str
    """logs/stopped.txt of the run."""
    seconds: float
    """From the fault to the page, or to the end of the first other rank."""


Launch = Callable[..., Ended]


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    """Runs ranks with a fault, and reads what they left."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    questions, answers = server.stdin, server.stdout
    assert questions is not None
    assert answers is not None
    assert json.loads(answers.readline()) == {"ready": True}
    root = Path(tempfile.mkdtemp())

    def run(world_size: int, settings: dict[str, float] | None = None, **more: Any) -> Ended:
        folder = Path(tempfile.mkdtemp(dir=root))
        (folder / "run" / "logs").mkdir(parents=True)
        options = {name: more.pop(name) for name in ("remote", "always", "beat") if name in more}
        request = {"folder": str(folder), "world_size": world_size, "fault": more, "beat": 0.25, **options}
        questions.write(json.dumps(request | {"settings": QUICK | (settings or {})}) + "\n")
        questions.flush()
        answers.readline()
        return read(folder, json.loads(answers.readline())["codes"])

    yield run
    questions.close()
    server.wait(timeout=30)
    answers.close()


def read(folder: Path, codes: list[int]) -> Ended:
    """What a run left in its folder."""
    said = [(folder / f"rank_{rank}.txt").read_text() for rank in range(len(codes))]
    error, page = folder / "run/error.json", folder / "run/logs/stopped.txt"
    faults = [float(file.read_text()) for file in folder.glob("fault_*")]
    told = [file.stat().st_mtime for file in (error, page) if file.exists()]
    seconds = max(told) - min(faults) if faults and told else 0.0
    found = json.loads(error.read_text()) if error.exists() else {}
    return Ended(codes, said, found, page.read_text() if page.exists() else "", seconds)


def at(do: str, place: str, rank: int, step: int = 2, **more: Any) -> dict[str, Any]:
    """A fault of one rank."""
    return {"do": do, "place": place, "ranks": [rank], "step": step, **more}


def named_by_survivors(found: Ended, rank: int, kind: str) -> None:
    """Every rank that could still speak names this one, with its process, and ends with the code for peers."""
    assert found.error["kind"] == kind, found.error
    assert found.error["rank"] == rank
    for other, code in enumerate(found.codes):
        if other != rank:
            assert code == PEER, f"rank {other} ended with {code}: {found.said[other][-2000:]}"
            assert f"rank {rank} (" in found.said[other]
            assert "pid" in found.said[other]


def test_ranks_without_a_fault_end_in_order_and_leave_nothing(launch: Launch) -> None:
    found = launch(4)
    assert found.codes == [0, 0, 0, 0]
    assert found.said == [""] * 4
    assert not found.error
    assert not found.page


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_by_the_others(launch: Launch, rank: int) -> None:
    found = launch(4 if rank else 2, **at("SIGKILL", "rollout", rank))
    assert found.codes[rank] == KILLED
    named_by_survivors(found, rank, "gone")
    assert "its process ended without an error message" in found.page


def test_a_stopped_rank_is_named_with_the_collective_that_it_did_not_reach(launch: Launch) -> None:
    found = launch(4, **at("SIGSTOP", "sum", 2, step=3))
    named_by_survivors(found, 2, "stopped")
    assert "did not reach collective #11 sum [3, 4] float32 at health/watched_ranks.py" in found.page
    assert "in which ranks 0, 1, 3 wait" in found.page
    assert "watched_ranks.py" in found.page.partition("rank 2 was last at")[2]


def test_a_rank_of_another_machine_that_falls_silent_is_named(launch: Launch) -> None:
    found = launch(2, {"heartbeat_seconds": 1.5}, remote=[1], **at("SIGSTOP", "max", 1))
    named_by_survivors(found, 1, "silent")
    assert "has sent no heartbeat for" in found.page


def test_the_rank_that_serves_the_store_is_named_by_those_whom_it_no_longer_answers(launch: Launch) -> None:
    found = launch(2, {"heartbeat_seconds": 1.5}, remote=[1], **at("SIGSTOP", "train", 0))
    assert found.codes[1] == PEER
    assert found.error["rank"] == 0
    assert found.error["kind"] in ("silent", "store")


def test_the_first_failure_is_shown_by_all_with_its_place_and_keeps_its_exit_code(launch: Launch) -> None:
    found = launch(4, **at("raise", "data", 3))
    assert found.codes == [PEER, PEER, PEER, 4]
    named_by_survivors(found, 3, "failure")
    error = found.error["error"]
    assert (error["step"], error["phase"], error["code"], error["type"]) == (2, "data", "data.planted", "DataError")
    assert "watched_ranks.py" in error["at"]
    assert any("row 7 is cut off" in line for line in error["traceback"])
    for rank in range(3):
        assert "failed at step 2, phase data: row 7 is cut off" in found.said[rank]
    assert "error  row 7 is cut off" in found.said[3]


def test_a_crash_of_the_rank_that_serves_the_store_reaches_the_others(launch: Launch) -> None:
    found = launch(2, **at("crash", "train", 0, step=3))
    assert found.codes == [1, PEER]
    assert found.error["error"]["type"] == "ValueError"
    assert "rank 0 (" in found.said[1]
    assert "ValueError: planted crash" in found.said[1]


def test_a_rank_that_computes_too_long_is_named_with_its_phase_and_only_then(launch: Launch) -> None:
    patient = launch(2, {"watchdog_seconds": 30.0}, **at("sleep", "rollout", 1, seconds=1.5))
    assert patient.codes == [0, 0]
    found = launch(2, **at("sleep", "rollout", 1))
    assert found.codes == [PEER, PEER]
    named_by_survivors(found, 1, "late")
    assert "has been in phase rollout of step 2" in found.page
    assert "--watchdog_seconds" in found.page


def test_a_collective_that_one_rank_leaves_out_is_named_with_both_lines(launch: Launch) -> None:
    found = launch(2, **at("skip", "sum", 1))
    assert found.codes == [PEER, PEER]
    assert found.error["kind"] == "mismatch"
    assert "(largest)" in found.error["where"]
    assert "(gradient)" in found.error["where"]


def test_unequal_shapes_are_named_before_they_are_added(launch: Launch) -> None:
    found = launch(4, **at("shape", "sum", 2))
    assert found.codes == [PEER] * 4
    assert "rank 2 is in collective #7 sum [5, 4]" in found.error["what"]
    assert "rank 0 in #7 sum [3, 4]" in found.error["what"]


def test_a_rank_that_has_left_while_others_wait_is_named(launch: Launch) -> None:
    found = launch(2, **at("leave", "between", 1))
    assert found.codes == [PEER, 0]
    assert found.error["kind"] == "left"
    assert "did not reach collective #9 gather" in found.page


FAULTS = ("SIGSTOP", "SIGKILL", "exit", "raise", "crash", "sleep", "spin")
PLACES = ("data", "rollout", "train", "sum", "max", "between")
MISMATCHES = (
    *(("skip", place) for place in ("gather", "sum", "max")),
    *(("other", place) for place in ("gather", "sum", "max")),
    *(("shape", place) for place in ("sum", "max")),
    *(("dtype", "sum"), ("integer", "max"), ("flat", "sum"), ("swap", "update"), ("extra", "update")),
)


@pytest.mark.night
@pytest.mark.timeout(1800)
def test_every_fault_at_random_points_is_named_within_ten_seconds(launch: Launch) -> None:
    """D1: 60 cases with the heartbeat of production; the limit of a phase is what a sleeping rank is judged by."""
    draw = random.Random(1)
    limits = {"watchdog_seconds": 5.0, "watchdog_first_seconds": 5.0}
    kinds = {"SIGSTOP": "stopped", "SIGKILL": "gone", "exit": "gone", "raise": "failure", "crash": "failure"}
    slowest = 0.0
    for number in range(60):
        do, world_size = FAULTS[number % len(FAULTS)], (2, 4)[number // 7 % 2]
        rank, place = draw.randrange(world_size), draw.choice(PLACES)
        step = draw.randint(1, 3 if place == "between" else 4)  # after the last exchange nobody waits
        remote = [rank] if do == "SIGSTOP" and number % 2 and rank else []
        found = launch(world_size, limits, beat=1.0, remote=remote, **at(do, place, rank, step=step))
        case = f"case {number}: {do} at {place} of step {step}, rank {rank} of {world_size}, remote {remote}"
        print(f"{case}: {found.error.get('kind')} after {found.seconds:.1f} s, codes {found.codes}")
        assert found.error, f"{case}\n{found.said}"
        named_by_survivors(found, rank, "silent" if remote else kinds.get(do, "late"))
        assert found.seconds < SECONDS_TO_NAME, case
        slowest = max(slowest, found.seconds)
    print(f"60 of 60 named, the slowest after {slowest:.1f} s")


@pytest.mark.night
@pytest.mark.timeout(1800)
def test_every_mismatch_is_named_with_both_lines(launch: Launch) -> None:
    """D2: 13 kinds, on each of two ranks, one of three and two of four, in the first steps and with --debug later."""
    places = ((2, 0), (2, 1), (3, 1), (4, 0), (4, 2))
    cases = [(kind, place, *where) for where in places for kind, place in MISMATCHES]
    assert len(cases) >= 60
    draw = random.Random(2)
    for number, (kind, place, world_size, rank) in enumerate(cases):
        step = draw.randint(1, 4)
        fault = at(kind, place, rank, step=step)
        patient = {"fingerprint_steps": 3, "watchdog_seconds": 30.0, "watchdog_first_seconds": 30.0}
        found = launch(world_size, patient, always=step > 3, **fault)
        case = f"case {number}: {kind} at {place} of step {step}, rank {rank} of {world_size}: {found.error}"
        print(case[:300])
        assert found.error.get("kind") in ("mismatch", "left"), case
        assert all(code in (PEER, 0) for code in found.codes), f"{case} {found.codes}"
        if found.error["kind"] == "mismatch":
            assert found.error["where"].count("health/watched_ranks.py:") == 2, case
            assert set(found.codes) == {PEER}, f"{case} {found.codes}"
    print(f"{len(cases)} of {len(cases)} named")
