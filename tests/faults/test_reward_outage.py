"""A reward server goes away in mid-run: it is waited for, or the run saves, ends and continues, with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.test_kill import newest_step
from support.away_server import REFUSALS, AwayServer
from support.compare import differences, read_rows
from support.references import SAVED_AFTER_SIGNAL, References
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

OUTAGE = 69
STEPS = ("--max_steps", "2", "--save_steps", "50", "--save_minutes", "0")


@pytest.fixture(scope="module")
def rewards() -> Iterator[AwayServer]:
    server = AwayServer()
    yield server
    server.close()


def words(rewards: AwayServer, wait: float, *more: str) -> tuple[str, ...]:
    # requests are counted, so that none is made to look at the server a second time
    given = ("--remote_rm_url", rewards.url, "--reward_wait", f"{wait}", "--reward_random")
    return (*STEPS, "--eval_steps", "0", *given, *more)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_server_that_is_away_for_some_requests_changes_no_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path, rewards: AwayServer, refusal: str
) -> None:
    rewards.come_back()
    given = words(rewards, 20.0)
    reference = references.run("rl", *given)
    rewards.go_away(2, 3, refusal)
    ended = server.must_finish(*task.words("rl", runs / "run", *given))
    assert rewards.refused == 3
    assert ended.output.count("is away since") == 1, ended.output
    assert "answers again" in ended.output
    assert differences(reference, runs / "run") == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_server_that_stays_away_ends_the_run_saved_and_it_resumes_to_the_same_bits(
    server: ForkServer, task: TinyTask, references: References, runs: Path, rewards: AwayServer, num_ranks: int
) -> None:
    rewards.come_back()
    given = words(rewards, 0.3)
    reference = references.run("rl", *given, num_ranks=num_ranks)
    # a try at the start and one share of a step for each rank, and the evaluation before the first step
    rewards.go_away(3 * num_ranks)
    ended = server.run(*task.words("rl", runs / "run", *given), num_ranks=num_ranks)
    assert (ended.code, *ended.other_codes) == (OUTAGE,) * num_ranks, ended.output[-3000:]
    assert newest_step(runs / "run") == 1
    assert rewards.url in ended.output
    assert "HTTP 503" in ended.output
    rewards.come_back()
    server.must_finish("resume", str(runs / "run"), num_ranks=num_ranks)
    assert differences(reference, runs / "run") == []


@pytest.mark.parametrize(("name", "answered", "step"), [("before", 1, 0), ("step 1", 3, 1), ("after", 5, 2)])
def test_an_evaluation_that_lacks_its_server_is_owed_and_made_after_the_resume(
    server: ForkServer,
    task: TinyTask,
    references: References,
    runs: Path,
    rewards: AwayServer,
    *,
    name: str,
    answered: int,
    step: int,
) -> None:
    rewards.come_back()
    given = (*words(rewards, 0.3), "--eval_steps", "1")
    reference = references.run("rl", *given)
    rewards.go_away(answered)  # the start, the evaluation before the first step, the first step, its evaluation, ...
    ended = server.run(*task.words("rl", runs / "run", *given))
    assert ended.code == OUTAGE, ended.output[-3000:]
    assert newest_step(runs / "run") == step
    rewards.come_back()
    server.must_finish("resume", str(runs / "run"))
    assert differences(reference, runs / "run") == []
    assert [row["name"] for row in read_rows(runs / "run" / "evals.jsonl")].count(name) == 1


def test_a_signal_ends_the_wait_and_the_run_is_saved(
    server: ForkServer, task: TinyTask, references: References, runs: Path, rewards: AwayServer
) -> None:
    rewards.come_back()
    given = words(rewards, 300.0)
    reference = references.run("rl", *given)
    rewards.go_away(3)
    child = server.start(*task.words("rl", runs / "run", *given))
    assert rewards.was_refused.wait(60.0)
    child.send(signal.SIGTERM)
    ended = child.wait()
    assert ended.code == SAVED_AFTER_SIGNAL, ended.output[-3000:]
    assert newest_step(runs / "run") == 1
    rewards.come_back()
    server.must_finish("resume", str(runs / "run"))
    assert differences(reference, runs / "run") == []


def test_responses_may_go_on_without_a_reward_and_are_counted(
    server: ForkServer, task: TinyTask, runs: Path, rewards: AwayServer
) -> None:
    rewards.come_back()
    given = (*words(rewards, 0.0), "--on_reward_outage", "unscored", "--max_unscored_share", "1")
    rewards.go_away(2, 1)
    server.must_finish(*task.words("rl", runs / "run", *given))
    shares = [row.get("reward/status_outage", 0.0) for row in read_rows(runs / "run" / "metrics.jsonl")]
    assert shares == [1.0, 0.0]
    rewards.go_away(2)
    ended = server.run(*task.words("rl", runs / "strict", *given, "--max_unscored_share", "0.5"))
    assert ended.code == 8, ended.output[-3000:]
    assert "HTTP 503" in ended.output, "the cause of the first response without a reward"
