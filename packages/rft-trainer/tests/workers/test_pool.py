"""Faults of a scoring process: each becomes a status of its own job, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from calls import call_payload

from rft_core.errors import ServiceError
from rft_trainer.records.scores import RewardStatus
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.pool import Job, WorkerPool

WriteReward = Callable[[str], Path]

FAULTS = """
import ctypes, os, signal, sys, threading, time

def reward_fn(responses, labels):
    [response] = responses
    if response == "loop":
        while True:
            pass
    if response == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if response == "exit":
        os._exit(3)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "memory":
        block = []
        while True:
            block.append(bytearray(1 << 24))
    if response == "flood":
        for _ in range(2000):
            print("x" * 1000)
        sys.stderr.write("y" * 1000000)
    if response == "raise":
        raise RuntimeError("no good")
    if response == "deadlock":
        lock = threading.Lock(); lock.acquire(); lock.acquire()
    if response == "fork":
        if os.fork() == 0:
            time.sleep(1000)
        while True:
            pass
    if response == "input":
        input()
    if response == "regex":
        import re
        re.match(r"(a+)+b", "a" * 60)
    return [float(os.getpid())]
"""


def job(response: str, seconds: float = 0.5) -> Job:
    return Job(call_payload(response), seconds)


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    members: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, process_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(process_group) == group and state != "Z":
                members.append(int(entry.name))
    return members


@pytest.mark.parametrize(
    ("response", "status", "detail"),
    [
        ("loop", RewardStatus.TIMEOUT, "no answer within 0.5 s"),
        ("ignore", RewardStatus.TIMEOUT, "no answer within 0.5 s"),
        ("deadlock", RewardStatus.TIMEOUT, "no answer within 0.5 s"),
        ("regex", RewardStatus.TIMEOUT, "no answer within 0.5 s"),
        ("fork", RewardStatus.TIMEOUT, "no answer within 0.5 s"),
        ("exit", RewardStatus.CRASHED, "ended with exit code 3"),
        ("segfault", RewardStatus.CRASHED, "was killed by SIGSEGV"),
        ("raise", RewardStatus.FAILED, "RuntimeError: no good"),
        ("input", RewardStatus.FAILED, "EOFError"),
    ],
)
def test_a_fault_becomes_a_status_of_its_job_alone(
    write_reward: WriteReward, response: str, status: RewardStatus, detail: str
):
    with WorkerPool(f"file:{write_reward(FAULTS)}:reward_fn", num_workers=1) as pool:
        before, broken, after = pool.run([job("fine", 20), job(response), job("fine", 20)])
        assert (broken.status, broken.result) == (status, None)
        assert detail in broken.detail
        assert before.status is after.status is RewardStatus.OK
        assert before.result != after.result, "another process took over"
        assert len(pool.process_ids) == 1
        [old_group] = before.result  # type: ignore[misc]
        assert group_members(int(old_group)) == []


def test_running_out_of_memory_is_a_status(write_reward: WriteReward):
    task = f"file:{write_reward(FAULTS)}:reward_fn"
    with WorkerPool(task, num_workers=1, limits=ProcessLimits(address_bytes=512 << 20)) as pool:
        broken, after = pool.run([job("memory", 20), job("fine", 20)])
    assert (broken.status, broken.result) == (RewardStatus.FAILED, None)
    assert "MemoryError" in broken.detail
    assert after.status is RewardStatus.OK


def test_an_answer_that_hid_how_much_memory_it_took_is_not_trusted(write_reward: WriteReward):
    source = "def reward_fn(responses, labels):\n    len(bytearray(b'x') * (300 << 20))\n    return [0.0]\n"
    with WorkerPool(
        f"file:{write_reward(source)}:reward_fn", num_workers=1, limits=ProcessLimits(address_bytes=1 << 30)
    ) as pool:
        [outcome] = pool.run([job("", 20)])
    assert (outcome.status, outcome.result) == (RewardStatus.FAILED, None)
    assert "MemoryError: scoring took" in outcome.detail


def test_a_flood_of_output_does_not_block(write_reward: WriteReward):
    with WorkerPool(f"file:{write_reward(FAULTS)}:reward_fn", num_workers=1) as pool:
        [outcome] = pool.run([job("flood", 20)])
    assert outcome.status is RewardStatus.OK


def test_large_requests_and_replies_pass_through_the_pipes(write_reward: WriteReward):
    source = "def reward_fn(responses, labels):\n    return [float(len(r)) for r in responses]\n"
    responses = ["\u00e9\n" * n for n in range(3000)]
    with WorkerPool(f"file:{write_reward(source)}:reward_fn", num_workers=1) as pool:
        [outcome] = pool.run([Job(call_payload(*responses), 30)])
    assert outcome.result == [2.0 * n for n in range(3000)]


def test_outcomes_keep_the_order_of_jobs_over_several_processes(write_reward: WriteReward):
    source = (
        "import time\n"
        "def reward_fn(responses, labels):\n"
        "    time.sleep(0.02 * (int(responses[0]) % 3))\n"
        "    return [float(responses[0])]\n"
    )
    with WorkerPool(f"file:{write_reward(source)}:reward_fn", num_workers=3) as pool:
        outcomes = pool.run([job(str(n), 20) for n in range(30)])
        assert len(pool.process_ids) == 3
    assert [outcome.result for outcome in outcomes] == [[float(n)] for n in range(30)]


def test_closing_leaves_no_process(write_reward: WriteReward):
    pool = WorkerPool(f"file:{write_reward(FAULTS)}:reward_fn", num_workers=2)
    pool.run([job("fine", 20), job("fine", 20)])
    groups = pool.process_ids
    assert len(groups) == 2
    pool.close()
    assert pool.process_ids == []
    assert all(group_members(group) == [] for group in groups)


@pytest.mark.parametrize("response", ["fine", "loop"])
def test_a_process_ends_after_the_one_that_started_it_was_killed(
    write_reward: WriteReward, tmp_path: Path, response: str
):
    program = (
        "import signal\n"
        "from rft_trainer.workers.pool import Job, WorkerPool\n"
        f"pool = WorkerPool('file:{write_reward(FAULTS)}:reward_fn', num_workers=1)\n"
        "pool.start()\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(pool.process_ids[0]))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        f"pool.run([Job({call_payload(response)!r}, 1.0)])\n"
        "signal.pause()\n"
    )
    child = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert child.returncode == -signal.SIGALRM, "killed before it could close anything"
    group = int((tmp_path / "pid").read_text())
    for _ in range(400):
        if not group_members(group):
            break
        time.sleep(0.05)
    assert group_members(group) == []


def test_a_process_that_is_killed_from_outside_is_replaced(write_reward: WriteReward):
    with WorkerPool(f"file:{write_reward(FAULTS)}:reward_fn", num_workers=1) as pool:
        pool.start()
        [process] = pool.process_ids
        os.kill(process, signal.SIGKILL)
        while group_members(process):
            time.sleep(0.01)
        [outcome] = pool.run([job("fine", 20)])
    assert outcome.status is RewardStatus.OK
    assert outcome.result != [float(process)]


def test_a_process_that_has_grown_is_replaced_without_losing_a_job(write_reward: WriteReward):
    source = (
        "import os\n"
        "kept = []\n"
        "def reward_fn(responses, labels):\n"
        "    kept.append(bytearray(b'x') * (50 << 20))\n"
        "    return [float(os.getpid())]\n"
    )
    with WorkerPool(
        f"file:{write_reward(source)}:reward_fn", num_workers=1, limits=ProcessLimits(address_bytes=512 << 20)
    ) as pool:
        outcomes = pool.run([job("", 20) for _ in range(12)])
    assert [outcome.status for outcome in outcomes] == [RewardStatus.OK] * 12
    assert len({str(outcome.result) for outcome in outcomes}) > 1


def test_a_task_that_ends_its_process_while_loading_stops_after_three_attempts(write_reward: WriteReward):
    path = write_reward("import os\nprint('about to go', flush=True)\nos._exit(7)\n")
    with (
        WorkerPool(f"file:{path}:reward_fn", num_workers=1) as pool,
        pytest.raises(ServiceError, match=r"ended with exit code 7, 3 times in a row") as caught,
    ):
        pool.start()
    assert caught.value.problem.code == "reward.process_start"
    assert "about to go" in caught.value.problem.where


def test_scoring_processes_import_no_torch(write_reward: WriteReward):
    source = (
        "import sys\n"
        "def reward_fn(responses, labels):\n"
        "    return [float(any(m in sys.modules for m in ('torch', 'numpy', 'sympy')))]\n"
    )
    with WorkerPool(f"file:{write_reward(source)}:reward_fn", num_workers=1) as pool:
        [outcome] = pool.run([job("", 20)])
    assert outcome.result == [0.0]


def test_no_jobs_start_no_process():
    with WorkerPool("math", num_workers=2) as pool:
        assert pool.run([]) == []
        assert pool.process_ids == []


def test_memory_that_runs_out_is_told_with_its_limit_and_other_responses_are_scored(write_reward: WriteReward) -> None:
    source = (
        "def reward_fn(responses, labels):\n    return [float(len(bytearray(int(text) << 20))) for text in responses]\n"
    )
    task = f"file:{write_reward(source)}:reward_fn"
    with WorkerPool(task, num_workers=1, limits=ProcessLimits(data_bytes=256 << 20)) as pool:
        broken, after = pool.run([job("400", 20), job("10", 20)])
    assert broken.status is RewardStatus.FAILED
    assert "0.25 GiB: --reward_memory" in broken.detail
    assert after.result == [10.0 * 2**20]


def test_user_code_sees_the_secrets_that_it_is_shown_and_what_it_misses_is_told(
    write_reward: WriteReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOWN_TOKEN", "shown-4711")
    monkeypatch.setenv("OTHER_API_KEY", "other-4711")
    monkeypatch.setenv("PLAIN_SETTING", "12")
    source = (
        "import os\n"
        "def reward_fn(responses, labels):\n"
        "    return [float(os.environ[responses[0]].rpartition('-')[2])]\n"
    )
    task = f"file:{write_reward(source)}:reward_fn"
    with WorkerPool(task, num_workers=1, limits=ProcessLimits(variables=("SHOWN_*",))) as pool:
        plain, shown, missed = pool.run([job(name, 20) for name in ("PLAIN_SETTING", "SHOWN_TOKEN", "OTHER_API_KEY")])
    assert (plain.result, shown.result) == ([12.0], [4711.0])
    assert missed.status is RewardStatus.FAILED
    assert "--reward_variables OTHER_API_KEY" in missed.detail


@pytest.mark.parametrize("way", ["raise RuntimeError(dict(os.environ))", "print(dict(os.environ)); os._exit(3)"])
def test_what_user_code_says_of_its_environment_holds_no_secret(
    write_reward: WriteReward, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("SHOWN_TOKEN", "shown-4711-abc")
    source = f"import os\ndef reward_fn(responses, labels):\n    {way}\n"
    task = f"file:{write_reward(source)}:reward_fn"
    with WorkerPool(task, num_workers=1, limits=ProcessLimits(variables=("*",))) as pool:
        [outcome] = pool.run([job("", 20)])
    assert outcome.detail
    assert "shown-4711-abc" not in outcome.detail
