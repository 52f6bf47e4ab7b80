"""The row of a step, the rollouts that are shown of it, and what goes to the sinks, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_core.exact_records import exact_bytes, exact_value
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.step_report import Reporter, gather_rows, rollout_metrics, rollout_row, rollout_rows
from rft_trainer.scoring.samples import sample_name

NO_DROPS: Any = SimpleNamespace(reasons={})


def rollout(
    index: int, reward: float | None, num: int = 2, status: RewardStatus = RewardStatus.OK, **more: Any
) -> Rollout:
    finish = more.pop("finish_reason", "stop")
    logprobs = tuple(-0.5 * (n + 1) for n in range(num))
    ids, mass = tuple(range(5, 5 + num)), (0.0,) * num
    return Rollout("p", index, ids, logprobs, mass, finish, 3, f"answer {index}", reward, status, **more)


def group(number: int, *rollouts: Rollout, epoch: int = 0) -> RolloutGroup:
    return RolloutGroup(Prompt(f"p{number}", (1, 2), f"text {number}", "7", "s"), epoch, number, rollouts)


def test_rewards_lengths_and_signal_of_a_step() -> None:
    groups = [
        group(0, rollout(0, 1.0, 2), rollout(1, 0.0, 4, finish_reason="length")),
        group(1, rollout(0, 0.5, 3), rollout(1, 0.5, 7), epoch=2),
    ]
    found = rollout_metrics(groups, NO_DROPS)
    assert (found["reward/mean"], found["reward/min"], found["reward/max"]) == (0.5, 0.0, 1.0)
    assert found["reward/groups_with_signal"] == 0.5
    assert (found["completion/length_mean"], found["completion/length_max"]) == (4.0, 7)
    assert found["completion/truncated_share"] == 0.25
    assert (found["data/prompts"], found["data/samples"], found["data/epoch"]) == (2, 4, 2)
    assert not [name for name in found if name.startswith(("drop/", "reward/status"))]


def test_parts_statuses_and_reasons_are_counted_where_there_are_some() -> None:
    groups = [
        group(
            0,
            rollout(0, 1.0, breakdown={"format": 1.0, "length": 0.5}),
            rollout(1, 0.5, breakdown={"format": 0.0}),
            rollout(2, None, status=RewardStatus.FAILED),
            rollout(3, None, status=RewardStatus.FAILED, failure="exception"),
        )
    ]
    dropped: Any = SimpleNamespace(reasons={"too_long": 3, "equal": 1})
    found = rollout_metrics(groups, dropped)
    assert (found["reward/format"], found["reward/length"], found["reward/mean"]) == (0.5, 0.5, 0.75)
    assert found[f"reward/status_{RewardStatus.FAILED}"] == 0.5
    counts = {name: value for name, value in found.items() if name.startswith("reward/unscored")}
    assert counts == {"reward/unscored": 0.5, "reward/unscored_exception": 1, "reward/unscored_failed": 1}
    assert not [name for name in rollout_metrics([group(0, rollout(0, 1.0))], dropped) if "unscored" in name]
    assert (found["drop/too_long"], found["drop/equal"]) == (3, 1)


def test_a_part_called_as_a_metric_leaves_the_metric_alone() -> None:
    parts = {"mean": 7.0, "max": 8.0, "status_failed": 9.0, "score_clipped": 10.0, "meanness": 11.0}
    failed = rollout(1, None, status=RewardStatus.FAILED)
    metrics = rollout_metrics([group(0, rollout(0, 0.5, breakdown=parts), failed)], NO_DROPS)
    assert (metrics["reward/mean"], metrics["reward/max"], metrics["reward/status_failed"]) == (0.5, 0.5, 0.5)
    assert [metrics[f"reward/part_{name}"] for name in list(parts)[:4]] == [7.0, 8.0, 9.0, 10.0]
    assert metrics["reward/meanness"] == 11.0


def test_without_a_reward_its_figures_are_no_numbers() -> None:
    found = rollout_metrics([group(0, rollout(0, None, status=RewardStatus.FAILED))], NO_DROPS)
    assert all(math.isnan(found[name]) for name in ("reward/mean", "reward/min", "reward/max"))  # type: ignore[arg-type]
    assert found["reward/groups_with_signal"] == 0.0


def test_a_row_says_all_of_a_rollout() -> None:
    one = group(0, rollout(1, 0.25, 2, breakdown={"a": 1.0}))
    row = rollout_row(one.prompt, one.rollouts[0])
    expected = {
        "prompt_id": "p0",
        "sample": 1,
        "prompt": "text 0",
        "response": "answer 1",
        "label": "7",
        "reward": 0.25,
        "status": str(RewardStatus.OK),
        "breakdown": {"a": 1.0},
        "finish_reason": "stop",
        "num_tokens": 2,
        "mean_logprob": -0.75,
    }
    assert expected.items() <= row.items()
    assert not {"failure", "detail"} & set(row)
    late = rollout(0, None, 0, RewardStatus.TIMEOUT, detail="no answer")
    assert rollout_row(one.prompt, late).items() >= {"failure": "timeout", "detail": "no answer"}.items()
    assert rollout_row(one.prompt, rollout(0, 0.0, 0))["mean_logprob"] is None


@pytest.mark.parametrize(
    ("limit", "shown"),
    [(4, ["p0", "p3"]), (6, ["p0", "p2", "p4"]), (3, ["p0", "p3"]), (1, ["p0"]), (12, [f"p{n}" for n in range(6)])],
)
def test_shown_groups_are_whole_and_spread_over_the_step(limit: int, shown: list[str]) -> None:
    groups = [group(number, rollout(0, 1.0), rollout(1, 0.0)) for number in range(6)]
    rows = rollout_rows(groups, limit)
    assert len(rows) == min(limit, 12)
    assert list(dict.fromkeys(row["prompt_id"] for row in rows)) == shown


def test_a_row_has_the_advantage_of_its_sample_and_none_where_it_was_not_trained_on() -> None:
    one = group(0, rollout(0, 1.0), rollout(1, 0.0))
    trained = {sample_name(one, one.rollouts[0]): 0.5}
    assert [row["advantage"] for row in rollout_rows([one], 4, trained)] == [0.5, None]
    assert "advantage" not in rollout_rows([one], 4)[0]


def test_the_largest_group_says_how_many_are_shown_and_no_group_shows_nothing() -> None:
    small, large = group(0, rollout(0, 1.0)), group(1, *(rollout(index, 1.0) for index in range(4)))
    assert [row["prompt_id"] for row in rollout_rows([small, large], 4)] == ["p0"]
    assert rollout_rows([], 4) == []


class Sink:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def step(self, record: Any) -> None:
        self.rows.append(record)

    def evaluation(self, record: Any) -> None:
        self.rows.append(record)

    def samples(self, step: int, rows: Any) -> None:
        self.rows.append((step, [row["prompt_id"] for row in rows]))


class Timer:
    def step(self, *, num_samples: int, num_tokens: int) -> dict[str, float]:
        return {"time/step": 2.0, "seen": num_samples + num_tokens}


def reporter(tmp_path: Path, now: list[float], *, rank: int = 0, **options: Any) -> tuple[Reporter, Sink, RunDirectory]:
    directory, sink = RunDirectory(tmp_path / "run"), Sink()
    directory.rollouts_directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"num_steps": 10, "rollout_every": 2, "rollouts_kept": 4} | options
    ranks: Any = SimpleNamespace(rank=rank)
    made = Reporter(directory, [sink], ranks, clock=lambda: now[0], **settings)  # type: ignore[list-item]
    return made, sink, directory


def test_a_step_is_a_row_with_its_times_and_what_is_left(tmp_path: Path) -> None:
    now = [100.0]
    report, sink, _ = reporter(tmp_path, now, seconds_before=20.0)
    progress = Progress(step=4, updates=9, tokens=5)
    now[0] = 140.0
    report.step({"loss": 0.5}, progress, Timer(), num_tokens=7, num_samples=3)  # type: ignore[arg-type]
    [row] = sink.rows
    assert (row["step"], row["num_steps"], row["loss"]) == (4, 10, 0.5)
    assert (row["data/tokens"], row["policy/total_updates"], row["seen"], row["time/step"]) == (12, 9, 10, 2.0)
    assert (row["time/elapsed"], row["time/left"]) == (60.0, 60.0 / 4 * 6)
    assert 10 < row["memory/peak_rss_mib"] < 10**6
    assert (progress.tokens, progress.seconds) == (12, 60.0)
    other, silent, _ = reporter(tmp_path, now, rank=1)
    now[0] = 150.0
    other.step({}, progress, Timer(), num_tokens=1, num_samples=1)  # type: ignore[arg-type]
    assert silent.rows == []
    assert (progress.tokens, progress.seconds) == (13, 10.0), "every rank counts"


def test_an_evaluation_is_a_row_with_its_lists(tmp_path: Path) -> None:
    now = [0.0]
    report, sink, _ = reporter(tmp_path, now)
    progress = Progress(step=4)
    now[0] = 3.0
    report.evaluation("after", {"eval/accuracy": 0.5}, progress, rewards=[1.0])
    assert sink.rows == [
        {"step": 4, "name": "after", "eval/accuracy": 0.5, "time/elapsed": 3.0, "rewards": [1.0]},
    ]
    assert progress.seconds == 3.0
    other, silent, _ = reporter(tmp_path, now, rank=1)
    other.evaluation("after", {}, progress)
    assert silent.rows == []


@pytest.mark.parametrize(
    ("step", "every", "rank", "written"),
    [
        (4, 2, 0, True),
        (3, 2, 0, False),
        (1, 9, 0, True),
        (1, 0, 0, False),
        (4, 0, 0, False),
        (4, 2, 1, False),
    ],
)
def test_rollouts_are_written_by_the_first_rank_at_the_first_step_and_every_so_many_steps(
    tmp_path: Path, step: int, every: int, rank: int, written: bool
) -> None:
    report, _, directory = reporter(tmp_path, [0.0], rank=rank, rollout_every=every, rollouts_kept=3)
    groups = [group(number, rollout(0, 1.0), rollout(1, 0.0)) for number in range(4)]
    report.rollouts(groups, Progress(step=step))
    file = directory.rollout_file(step)
    assert file.exists() == written
    if written:
        assert [json.loads(line)["prompt_id"] for line in file.read_text().splitlines()] == ["p0", "p0", "p2"]


def test_sinks_get_the_rows_of_the_rollouts_that_are_written(tmp_path: Path) -> None:
    report, sink, _ = reporter(tmp_path, [0.0], rollout_every=2, rollouts_kept=2)
    for step in (2, 3):
        report.rollouts([group(0, rollout(0, 1.0), rollout(1, 0.0))], Progress(step=step))
    assert sink.rows == [(2, ["p0", "p0"])]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_rows_of_all_ranks_come_in_the_order_of_the_data(num_ranks: int) -> None:
    rows = [[{"prompt": prompt, "sample": sample} for sample in range(2)] for prompt in range(5)]
    shares = [rows[rank::num_ranks] for rank in range(num_ranks)]
    sent = [exact_bytes(share) for share in shares]
    for share in shares:
        collectives: Any = SimpleNamespace(
            gather_bytes=lambda own, share=share: sent if exact_value(own) == share else []
        )
        assert gather_rows(collectives, share) == [row for prompt in rows for row in prompt]


def test_rollouts_that_cannot_be_written_end_no_run(tmp_path: Path) -> None:
    report, _, directory = reporter(tmp_path, [0.0])
    directory.rollouts_directory.rmdir()
    directory.rollouts_directory.symlink_to(tmp_path / "a disk that is not there")
    report.rollouts([group(0, rollout(0, 1.0), rollout(1, 0.0))], Progress(step=2))
    assert directory.optional.lost == {"rollouts/": 2}


def test_different_responses_are_counted() -> None:
    groups = [group(0, rollout(0, 1.0), rollout(1, 0.0)), group(1, rollout(0, 1.0), rollout(1, 0.0))]
    assert rollout_metrics(groups, NO_DROPS)["completion/distinct"] == 2
