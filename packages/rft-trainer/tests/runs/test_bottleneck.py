"""What bounds the speed of a run, from the times in its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rft_trainer.metrics.phase_timer import Phase, PhaseTimer
from rft_trainer.runs.bottleneck import STEPS, WARM_UP, MicroBatch, grown_phase, micro_batch_of, speed_verdict


def rows_of(
    seconds: Mapping[Phase, float], more: Mapping[str, Any] | None = None, *, number: int = STEPS
) -> list[dict[str, Any]]:
    """Rows of steps whose phases take so long by a clock that the test moves, with 1 ms outside of all."""
    now = 0.0
    timer = PhaseTimer(clock=lambda: now)
    rows: list[dict[str, Any]] = []
    for step in range(1, number + 1):
        for phase, spent in seconds.items():
            with timer.phase(phase):
                now += spent
        now += 0.001
        rows.append({"step": step, **timer.step(num_samples=8, num_tokens=64), **(more or {})})
    return rows


@pytest.mark.parametrize(("command", "remedy"), [("sft", "--num_workers"), ("pretrain", "--data_store_path")])
def test_a_loader_of_50_ms_before_a_step_of_10_ms_is_data_bound(command: str, remedy: str) -> None:
    bound = speed_verdict(rows_of({Phase.DATA: 0.05, Phase.TRAIN: 0.01}), command)
    assert bound is not None
    assert bound.code == "data_bound"
    assert "82%" in bound.what  # 50 of 61 ms
    assert remedy in bound.do


@pytest.mark.parametrize(
    ("seconds", "code"),
    [
        ({Phase.TRAIN: 0.1}, "compute_bound"),
        ({Phase.TRAIN: 0.1, Phase.DATA: 0.009}, "compute_bound"),
        ({Phase.TRAIN: 0.1, Phase.DATA: 0.06, Phase.EVAL: 0.4}, "data_bound"),
        ({Phase.TRAIN: 0.1, Phase.EVAL: 0.02, Phase.SAVE: 0.03}, "save_bound"),
        ({Phase.TRAIN: 0.1, Phase.EVAL: 0.03, Phase.SAVE: 0.02}, "eval_bound"),
        ({Phase.TRAIN: 0.001}, "other_bound"),
        ({Phase.TRAIN: 0.1, Phase.ROLLOUT: 0.2}, "rollout_bound"),
        ({Phase.TRAIN: 0.1, Phase.ROLLOUT: 0.09}, "compute_bound"),
        ({Phase.TRAIN: 0.1, Phase.ROLLOUT: 0.05, Phase.REWARD: 0.2}, "reward_bound"),
        ({Phase.TRAIN: 0.1, Phase.SYNC: 0.03}, "sync_bound"),
    ],
)
def test_what_takes_the_time_is_named(seconds: Mapping[Phase, float], code: str) -> None:
    bound = speed_verdict(rows_of(seconds), "rl")
    assert bound is not None
    assert bound.code == code
    assert bound.do


@pytest.mark.parametrize(
    ("phase", "what", "remedy"),
    [
        (Phase.REWARD, "scoring took 0.1 -> 0.4 s of a step", "--reward_workers"),
        (Phase.ROLLOUT, "sampling took 0.2 -> 0.5 s of a step", "time/engine_limit"),
        (Phase.DATA, "waiting for data took 0 -> 0.3 s of a step", "--num_workers"),
        (Phase.TRAIN, "forward, backward and optimizer took 0.5 -> 0.8 s of a step", "another program"),
    ],
)
def test_the_phase_that_grew_is_named_and_not_the_largest(phase: Phase, what: str, remedy: str) -> None:
    seconds = {Phase.ROLLOUT: 0.2, Phase.REWARD: 0.1, Phase.TRAIN: 0.5}
    later = seconds | {phase: seconds.get(phase, 0.0) + 0.3, Phase.SAVE: 9.0}
    grown = grown_phase(rows_of(seconds), rows_of(later), "rl")
    assert grown is not None
    assert grown.what == what
    assert remedy in grown.do
    assert grown_phase(rows_of(later), rows_of(seconds), "rl") is None


def test_few_steps_say_nothing_and_the_first_ones_do_not_count() -> None:
    slow = rows_of({Phase.DATA: 10.0, Phase.TRAIN: 0.1}, number=WARM_UP)
    fast = rows_of({Phase.TRAIN: 0.1}, number=STEPS - WARM_UP)
    assert speed_verdict([*slow, *fast[:-1]]) is None
    bound = speed_verdict([*slow, *fast])
    assert bound is not None
    assert bound.code == "compute_bound"


def test_a_gpu_that_is_used_little_is_told_of_larger_micro_batches_and_a_busy_one_is_not() -> None:
    found = [speed_verdict(rows_of({Phase.TRAIN: 0.1}, {"time/mfu": use})) for use in (0.1, 0.5)]
    assert [bound is not None and "--micro_train_batch_size" in bound.do for bound in found] == [True, False]


def test_sampling_names_the_limit_of_the_engine_and_samples_ahead_where_it_does_not_already() -> None:
    times = {Phase.ROLLOUT: 0.9, Phase.TRAIN: 0.1}
    bound = speed_verdict(rows_of(times, {"time/engine_limit": "tail"}), "rl")
    assert bound is not None
    assert "limited by tail" in bound.what
    assert "--max_staleness 1" in bound.do
    ahead = speed_verdict(rows_of(times, {"time/groups_ahead": 4}), "rl")
    assert ahead is not None
    assert "--max_staleness" not in ahead.do


def test_rows_without_times_say_nothing() -> None:
    assert speed_verdict([{"step": step, "time/step": None} for step in range(100)]) is None


def little_used(
    held: float, peak: float, room: float, *, size: int = 2, batches: int = 8, updates: int = 1, more: Any = None
) -> str:
    """The remedy for a GPU that is used little, with so many GiB and micro-batches of so many samples."""
    memory = {"held": held, "peak": peak, "room": room}
    seen = {f"memory/{name}_device_mib": 1024 * value for name, value in memory.items()}
    rows = rows_of({Phase.TRAIN: 0.1}, {"time/mfu": 0.1, "policy/micro_batches": batches, **seen, **(more or {})})
    rows = [{**row, "policy/total_updates": updates * row["step"]} for row in rows]
    bound = speed_verdict(rows, "sft", MicroBatch("micro_train_batch_size", size))
    assert bound is not None
    assert bound.code == "compute_bound"
    return bound.do


def test_the_size_of_a_micro_batch_that_memory_allows_is_told() -> None:
    # 90 % of 80 GiB are 72; 48 GiB above what is held hold 4 times the 12 that a micro-batch of 2 takes
    assert little_used(24, 36, 80) == (
        "--micro_train_batch_size 8: the largest step took 36.0 of 80.0 GiB, 12.0 of it with the micro-batch"
    )
    # 72 = 24 + 2.4 x 20
    assert little_used(24, 44, 80, size=10).startswith("--micro_train_batch_size 24:")


def test_no_size_is_told_that_is_not_sure_to_fit_or_does_nothing() -> None:
    assert "no larger micro-batch is sure to fit" in little_used(24, 60, 80)
    assert little_used(24, 36, 80, batches=3).startswith("--micro_train_batch_size 6:"), "one takes the whole update"
    assert little_used(24, 36, 80, batches=8, updates=4).startswith("--micro_train_batch_size 4:")
    assert little_used(24, 36, 80, batches=1).startswith("a larger --train_batch_size")
    assert "did not fit" in little_used(24, 36, 80, more={"policy/micro_batch_halvings": 1.0})
    assert "did not fit" in little_used(24, 24, 80)


def test_the_setting_of_the_micro_batches_is_the_one_that_holds() -> None:
    assert micro_batch_of({"micro_train_batch_size": 4}) == MicroBatch("micro_train_batch_size", 4)
    both = {"micro_train_batch_size": 4, "max_tokens_per_micro_batch": 4096}
    assert micro_batch_of(both) == MicroBatch("max_tokens_per_micro_batch", 4096)
    assert micro_batch_of({"max_tokens_per_micro_batch": None}) is None
    low = rows_of({Phase.TRAIN: 0.1}, {"time/mfu": 0.1})
    unknown = speed_verdict(low, "sft", MicroBatch("max_tokens_per_micro_batch", 4096))
    assert unknown is not None
    assert unknown.do == "--max_tokens_per_micro_batch twice as large, where memory is left"
