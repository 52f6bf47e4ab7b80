"""The watch of a run that goes on, and the replay of one that has ended, say the same; so do recorded runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rft_trainer.health.watch import Alarm, HealthWatch, replay, replayed

RECORDED = Path(__file__).parent / "recorded"
NAMED = {
    "learning_rate_x100": "step_too_large",
    "learning_rate_0": "no_learning_rate",
    "KL_x100": "divergence_holds",
    "shuffled_rewards": "noisy_reward",
    "constant_reward": "constant_reward",
    "sign-flipped_advantage": "advantage_sign",
    "stale_engine": "engine_gap",
    "wrong_mask": "wrong_mask",
    "wrong_EOS": "never_ends",
    "frozen_weights": "frozen_weights",
    "duplicated_batch": "repeated_batch",
    "leaked_labels": "held_out_gap",
}


def recorded(name: str) -> list[Alarm]:
    record = json.loads((RECORDED / f"{name}.json").read_text())
    assert len(record["metrics"]) == 30
    return replay(record["metrics"], record["evaluations"], "rl")


@pytest.mark.parametrize("name", NAMED)
def test_the_rows_of_a_run_with_a_planted_fault_name_it(name: str) -> None:
    """Recorded from the runs of tests/faults/test_pathologies.py."""
    assert NAMED[name] in [alarm.name for alarm in recorded(name)]


TWO_RANKS = ["clean_of_two_ranks_0", "clean_of_two_ranks_2"]
"""Of a machine whose two cores other programs kept busy, so that now one rank was the slower one and now the other."""


@pytest.mark.parametrize("name", ["clean_0", "clean_1", "clean_with_a_divergence_0", *TWO_RANKS])
def test_the_rows_of_a_run_that_trains_have_no_alarm(name: str) -> None:
    found = recorded(name)
    assert [alarm for alarm in found if alarm.level == "alarm"] == []
    assert len(found) <= 1


@pytest.mark.parametrize("name", TWO_RANKS)
def test_ranks_of_a_run_that_trains_are_not_slow_and_one_that_is_twice_as_slow_is_told(name: str) -> None:
    rows = json.loads((RECORDED / f"{name}.json").read_text())["metrics"]
    assert max(row["time/slowest_rank_ratio"] for row in rows) > 1.5, "single steps are above the threshold"
    assert "straggler" not in [alarm.name for alarm in replay(rows)]
    slow = [
        row | {"time/slowest_rank": 1, "time/slowest_rank_ratio": 2.0, "time/step": row["time/step"] + 0.2}
        for row in rows
    ]
    assert "straggler" in [alarm.name for alarm in replay(slow)]


def bad_rows(count: int) -> list[dict[str, Any]]:
    return [{"step": step, "completion/truncated_share": 1.0, "policy/kl": math.nan} for step in range(1, count + 1)]


def test_a_watch_speaks_once_and_as_a_replay_does() -> None:
    watch = HealthWatch("rl")
    said = [(row["step"], [alarm.name for alarm in watch.step(row)]) for row in bad_rows(12)]
    assert [(step, names) for step, names in said if names] == [(5, ["never_ends"]), (10, ["truncation"])]
    # what JSON has in the place of a number that is not finite
    written = [row | {"policy/kl": None} for row in bad_rows(12)]
    assert replay(written) == watch.alarms


def test_what_was_said_before_a_resume_is_not_said_again() -> None:
    watch = replayed(HealthWatch(), bad_rows(6))
    later = [alarm.name for row in bad_rows(12)[6:] for alarm in watch.step(row)]
    assert later == ["truncation"]


def test_an_alarm_is_plain_json_with_the_value_and_the_setting() -> None:
    (alarm,) = replay(bad_rows(5))
    assert json.loads(json.dumps(alarm.as_record())) == {
        "name": "never_ends",
        "level": "alarm",
        "step": 5,
        "value": 1.0,
        "what": "100% of the responses were cut at the limit in the last 5 steps: hardly one ends by itself",
        "do": alarm.do,
        "setting": "generate_max_len",
    }


def test_lines_that_are_no_row_are_passed_over() -> None:
    assert replay([{"completion/truncated_share": 1.0}] * 9 + bad_rows(4), [{"eval/reward": 1.0}]) == []
