"""Starts and ends of scoring processes: how many there are, which deaths count, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from calls import call_payload

from rft_core.errors import DataError, OptionsError, ServiceError
from rft_trainer.records.scores import RewardStatus
from rft_trainer.workers.pool import Job, WorkerPool

WriteReward = Callable[[str], Path]

FINE = "import os\ndef reward_fn(responses, labels):\n    return [float(os.getpid())]\n"


def job(response: str = "fine", seconds: float = 30.0) -> Job:
    return Job(call_payload(response), seconds)


def started(directory: Path) -> int:
    """How many processes have begun to load a file that notes each of them."""
    return len((directory / "starts").read_text())


def noting(directory: Path, rest: str) -> str:
    """Source that notes each start in `directory`, knows its number, and goes on with `rest`."""
    path = str(directory / "starts")
    return f"import os\nopen({path!r}, 'a').write('x')\nnumber = os.path.getsize({path!r})\n{rest}"


def test_processes_are_as_many_as_there_is_work_for_and_end_with_the_pool(write_reward: WriteReward) -> None:
    pool = WorkerPool(f"file:{write_reward(FINE)}:reward_fn", num_workers=3)
    assert pool.process_ids == []
    with pool as entered:
        assert entered is pool
        pool.start()
        assert len(pool.process_ids) == 1, "one is enough to see that the task loads"
        first = pool.process_ids
        [outcome] = pool.run([job()])
        assert [outcome.result] == [[float(first[0])]]
        assert pool.process_ids == first
    assert pool.process_ids == []
    [outcome] = pool.run([job()])  # a pool that was closed starts afresh
    assert outcome.status is RewardStatus.OK
    assert len(pool.process_ids) == 1
    pool.close()


def test_an_idle_process_that_dies_during_a_job_takes_no_outcome_away(write_reward: WriteReward) -> None:
    source = (
        "import os, signal, time\n"
        "def reward_fn(responses, labels):\n"
        "    for other in map(int, responses[0].split()):\n"
        "        if other != os.getpid():\n"
        "            os.kill(other, signal.SIGKILL)\n"
        "            while os.path.exists(f'/proc/{other}'):\n"  # until the pool has taken notice of it
        "                time.sleep(0.01)\n"
        "    return [0.5]\n"
    )
    with WorkerPool(f"file:{write_reward(source)}:reward_fn", num_workers=2) as pool:
        pool.run([job(""), job("")])
        before = pool.process_ids
        [outcome] = pool.run([job(" ".join(map(str, before)))])
        assert (outcome.status, outcome.result) == (RewardStatus.OK, [0.5])
        assert len(pool.process_ids) == 2
        assert len(set(pool.process_ids) & set(before)) == 1, "another has taken the place of the dead one"


def test_only_starts_that_fail_in_a_row_are_given_up(write_reward: WriteReward, tmp_path: Path) -> None:
    source = noting(
        tmp_path,
        "if number % 3: os._exit(1)\n"
        "def reward_fn(responses, labels):\n"
        "    return [1.0] if responses == ['fine'] else os._exit(2)\n",
    )
    with WorkerPool(f"file:{write_reward(source)}:reward_fn", num_workers=1) as pool:
        outcomes = pool.run([job(), job("end"), job()])
    assert [outcome.status for outcome in outcomes] == [RewardStatus.OK, RewardStatus.CRASHED, RewardStatus.OK]
    assert started(tmp_path) == 6


def test_three_starts_are_tried_and_three_again_at_the_next_call(write_reward: WriteReward, tmp_path: Path) -> None:
    with WorkerPool(f"file:{write_reward(noting(tmp_path, 'os._exit(7)'))}:reward_fn", num_workers=1) as pool:
        for expected in (3, 6):
            with pytest.raises(ServiceError) as caught:
                pool.run([job()])
            assert caught.value.problem.code == "reward.process_start"
            assert started(tmp_path) == expected


def test_a_process_that_is_not_ready_in_time_is_a_failed_start() -> None:
    with WorkerPool("math", num_workers=1, start_seconds=0.0) as pool, pytest.raises(ServiceError) as caught:
        pool.start()
    assert caught.value.problem.code == "reward.process_start"
    assert "was not ready after 0 s" in caught.value.problem.what


@pytest.mark.parametrize(
    ("kind", "source", "error", "code"),
    [
        ("file", "missing = 1\n", OptionsError, "reward.function_missing"),
        ("file", "\nraise KeyError('x')\n", DataError, "reward.import"),
        ("environment", "\nraise KeyError('x')\n", DataError, "environment.import"),
    ],
)
def test_a_task_that_does_not_load_is_told_at_once_and_leaves_no_process(
    write_reward: WriteReward, kind: str, source: str, error: type[OptionsError | DataError], code: str
) -> None:
    path = write_reward(source)
    with WorkerPool(f"{kind}:{path}:reward_fn", num_workers=1) as pool:
        with pytest.raises(error) as caught:
            pool.start()
        assert caught.value.problem.code == code
        if code.endswith("import"):
            assert caught.value.problem.where == f"{path}:2"
        assert pool.process_ids == []


def test_what_a_job_raised_is_told_with_its_line_and_what_a_process_wrote_last(write_reward: WriteReward) -> None:
    source = (
        "import os\n"
        "def reward_fn(responses, labels):\n"
        "    if responses == ['raise']: raise KeyError('x')\n"
        "    if responses == ['write']: print('first\\n' + 'x' * 600, flush=True)\n"
        "    os._exit(3)\n"
    )
    path = write_reward(source)
    with WorkerPool(f"file:{path}:reward_fn", num_workers=1) as pool:
        raised, wrote, silent = pool.run([job("raise"), job("write"), job("silent")])
    assert (raised.status, raised.location) == (RewardStatus.FAILED, f"{path}:3")
    assert (wrote.status, silent.status) == (RewardStatus.CRASHED, RewardStatus.CRASHED)
    assert wrote.detail == f"{silent.detail}; its last output: {'x' * 500}"
    assert silent.detail.endswith("exit code 3")


def test_lines_that_are_no_answer_to_the_job_are_passed_over(write_reward: WriteReward) -> None:
    source = (
        "import os, sys\n"
        "def reward_fn(responses, labels):\n"
        "    for line in (b'noise', b'[1]', b'{\"id\": 77, \"result\": [9.0]}'):\n"
        "        os.write(int(sys.argv[5]), line + b'\\n')\n"
        "    return [0.5]\n"
    )
    with WorkerPool(f"file:{write_reward(source)}:reward_fn", num_workers=1) as pool:
        outcomes = pool.run([job(), job()])
    assert [outcome.result for outcome in outcomes] == [[0.5], [0.5]]
