"""Lengths of the learning rate in tokens: what they are in steps, and which leave a run no peak."""

from __future__ import annotations

import pytest

from rft.build.shared_parts import learning_rate_schedule
from rft.pretraining.rate_lengths import RateLengths, in_steps, rate_lengths
from rft_core.errors import OptionsError
from rft_dist.settings import AdamSettings, Schedule
from rft_trainer.settings.pretraining import PretrainTrainingSettings


def lengths(*, schedule: Schedule = "wsd", num_steps: int = 10, warmup: int = 0, decay: int = 0) -> RateLengths:
    chosen = PretrainTrainingSettings(lr_warmup_tokens=warmup, lr_decay_tokens=decay)
    return rate_lengths(chosen, schedule, 100, num_steps)


def test_tokens_are_whole_steps_rounded_up() -> None:
    assert lengths() == RateLengths()
    assert lengths(warmup=300, decay=301) == RateLengths(3, 4)
    assert lengths(warmup=1, decay=301, schedule="cosine") == RateLengths(1, None)


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_a_run_has_the_rates_of_the_same_lengths_in_steps(schedule: Schedule) -> None:
    adam = AdamSettings(lr_schedule=schedule, lr_decay_ratio=0.9)
    found = in_steps(adam, lengths(warmup=250, decay=390, schedule=schedule), 10)
    expected = AdamSettings(
        lr_schedule=schedule, lr_warmup_steps=3, lr_decay_ratio=0.4 if schedule == "wsd" else adam.lr_decay_ratio
    )
    rates = [learning_rate_schedule(each, 1.0, 10) for each in (found, expected)]
    assert [rates[0](step) for step in range(10)] == [rates[1](step) for step in range(10)]
    assert in_steps(adam, RateLengths(), 10) is adam


def test_a_fall_of_any_length_is_that_number_of_steps() -> None:
    for num_steps in (7, 49, 1000, 99_991):
        for steps in range(1, num_steps, max(1, num_steps // 50)):
            share = in_steps(AdamSettings(), RateLengths(decay_steps=steps), num_steps).lr_decay_ratio
            assert round(share * num_steps) == steps


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ((901, 0), "--lr_warmup_tokens 900"),
        ((0, 5000), "--lr_decay_tokens 900"),
        ((500, 500), "--lr_warmup_tokens 400 --lr_decay_tokens 400"),
    ],
)
def test_a_run_without_a_step_at_its_peak_is_refused(given: tuple[int, int], remedy: str) -> None:
    with pytest.raises(OptionsError, match="the run has 1,000 tokens") as caught:
        lengths(warmup=given[0], decay=given[1])
    assert caught.value.problem.code == "pretrain.rate_length"
    assert caught.value.problem.do == remedy
    longest = int(remedy.split()[1])
    lengths(warmup=longest if given[0] else 0, decay=longest if given[1] else 0)


def test_a_run_of_one_step_has_no_room_for_a_rise() -> None:
    with pytest.raises(OptionsError) as caught:
        lengths(warmup=1, num_steps=1)
    assert caught.value.problem.do == "leave lr_warmup_tokens out"
