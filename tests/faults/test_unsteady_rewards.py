"""F16, S2: a reward that does not repeat itself, and one that mixes up its responses, are named in the first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.away_server import AwayServer
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

SHORT = ("--max_steps", "1", "--eval_steps", "0", "--eval_data", "")
SOURCE = """
import random

def unsteady(responses, labels):
    return [random.random() for _ in responses]

def steady(responses, labels):
    return [float(label in response) for response, label in zip(responses, labels)]
"""


@pytest.mark.parametrize(
    ("function", "more", "told"),
    [("unsteady", (), 1), ("unsteady", ("--reward_random",), 0), ("steady", (), 0)],
    ids=["unsteady", "declared", "steady"],
)
def test_a_run_names_a_reward_that_does_not_repeat_itself_and_goes_on(
    server: ForkServer, task: TinyTask, runs: Path, function: str, more: tuple[str, ...], told: int
) -> None:
    file = runs / "rewards.py"
    file.write_text(SOURCE)
    words = task.words("rl", runs / "run", *SHORT, "--reward", f"{file}:{function}", *more)
    ended = server.must_finish(*words)
    assert ended.output.count("does not repeat itself") == told, ended.output[-3000:]
    assert ended.output.count("--reward_random where it is meant to be random") == told


class Shuffling(AwayServer):
    """Gives the right number of rewards, those of the first responses at the end."""

    def scores(self, texts: list[str]) -> list[float]:
        """By place."""
        return [float(place) for place in range(len(texts))]


@pytest.fixture
def shuffling() -> Iterator[Shuffling]:
    server = Shuffling()
    yield server
    server.close()


def test_a_server_that_mixes_up_its_rewards_is_named_with_both_values(
    server: ForkServer, task: TinyTask, runs: Path, shuffling: Shuffling
) -> None:
    shuffling.come_back()
    ended = server.must_finish(*task.words("rl", runs / "run", *SHORT, "--remote_rm_url", shuffling.url))
    assert ended.output.count("depends on the order of the responses") == 1, ended.output[-3000:]
