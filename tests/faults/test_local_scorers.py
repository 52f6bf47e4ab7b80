"""S4: scoring processes that loop, take all memory, crash, block, flood or fork; drawn faults among sound jobs."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from support.fault_counts import counted

from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.user_function import payload
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.pool import Job, WorkerPool
from rft_trainer.workers.reward_arguments import Binding

SOURCE = """
import ctypes, os, signal, subprocess, sys, threading, time

def loop():
    while True:
        pass

def memory():
    block = bytearray(8 << 30)
    for place in range(0, len(block), 4096):
        block[place] = 1

def segfault():
    ctypes.string_at(0)

def exit():
    os._exit(0)

def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def tower():
    10 ** 10 ** 9

def regex():
    import re
    re.match(r"(a+)+b", "a" * 60)

def flood():
    while True:
        print("x" * 10000)

def ignore():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)

def fork():
    for _ in range(3):
        if os.fork() == 0:
            time.sleep(1000)
    loop()

def reward_fn(responses, labels):
    [response] = responses
    if response in globals():
        globals()[response]()
    return [float(response)]
"""
LATE, DEAD, RAISED = RewardStatus.TIMEOUT, RewardStatus.CRASHED, RewardStatus.FAILED
FAULTS = {
    **{"loop": LATE, "memory": RAISED, "segfault": DEAD, "exit": DEAD, "deadlock": LATE, "tower": LATE},
    **{"regex": LATE, "flood": LATE, "ignore": LATE, "fork": LATE},
}
"""What each of them is to the job that meets it."""
SECONDS = 0.5
NUM_WORKERS = 2


def job(response: str, seconds: float) -> Job:
    binding = Binding({"responses": "responses", "labels": "labels"}, one_at_a_time=False, takes_rest=False)
    return Job(payload([RewardItem("train:0", "?", response, None, "stop", 1)], binding), seconds)


def descendants(marker: str) -> list[int]:
    """Living processes with the marker in their environment."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if marker.encode() in environment and state != "Z":
                found.append(int(entry.name))
    return found


@counted(len(FAULTS), 2000)
def test_s4_a_scorer_that_does_not_end_or_dies(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status of its own job, in time; jobs beside it keep their scores, and no process is left or missing."""
    marker = f"RFT_S4={os.getpid()}-{number}"
    monkeypatch.setenv(*marker.split("="))
    (tmp_path / "scorer.py").write_text(SOURCE)
    ends, longest, kinds = Counter[str](), 0.0, list(FAULTS)
    limits = ProcessLimits(data_bytes=1 << 30)
    with WorkerPool(f"file:{tmp_path / 'scorer.py'}:reward_fn", num_workers=NUM_WORKERS, limits=limits) as pool:
        pool.run([job("0", 60), job("1", 60)])
        for start in range(0, number, len(kinds)):
            rng = Random(f"s4 {start}")
            asked = [kinds[n % len(kinds)] for n in range(start, min(number, start + len(kinds)))]
            asked += [str(rng.randrange(100)) for _ in range(5)]
            rng.shuffle(asked)
            began = time.monotonic()
            outcomes = pool.run([job(one, SECONDS if FAULTS.get(one) is LATE else 30.0) for one in asked])
            longest = max(longest, time.monotonic() - began)
            for one, outcome in zip(asked, outcomes, strict=True):
                if one in FAULTS:
                    assert (outcome.status, outcome.result) == (FAULTS[one], None), (start, one, outcome)
                    ends[one] += 1
                else:
                    assert (outcome.status, outcome.result) == (RewardStatus.OK, [float(one)]), (start, one, outcome)
                    ends["sound"] += 1
            assert len(pool.process_ids) == NUM_WORKERS
            # replacements that are still being started are children of the pool too, and nothing else is
            assert {os.getpgid(pid) for pid in descendants(marker)} <= set(pool.process_ids), start
    assert descendants(marker) == []
    print(f"\nS4: {number}, {dict(ends)}; {len(kinds)} faults and 5 sound jobs took at most {longest:.1f} s")


@counted(300, 100_000)
def test_s4_sound_scores_one_after_the_other(tmp_path: Path, number: int) -> None:
    """No job hangs, and every score is that of its response."""
    (tmp_path / "scorer.py").write_text(SOURCE)
    with WorkerPool(f"file:{tmp_path / 'scorer.py'}:reward_fn", num_workers=NUM_WORKERS) as pool:
        for start in range(0, number, 1000):
            asked = range(start, min(number, start + 1000))
            outcomes = pool.run([job(str(n), 60.0) for n in asked])
            assert [outcome.result for outcome in outcomes] == [[float(n)] for n in asked]
    print(f"\nS4: {number} sound scores, none late")
