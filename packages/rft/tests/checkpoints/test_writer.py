"""When a run is saved, as its flags say it: after steps, episodes and minutes."""

from __future__ import annotations

import torch

from rft.checkpoints.writer import save_schedule
from rft_dist.settings import CheckpointSettings
from rft_trainer.runs.checkpointing import Progress, Saver
from rft_trainer.testing.bigram import BigramPolicy, MemoryWriter, OneRank


class NoState:
    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        return {}


def saver_of(settings: CheckpointSettings, now: list[float]) -> Saver:
    return Saver(
        MemoryWriter(),
        BigramPolicy(4),
        NoState(),  # type: ignore[arg-type]
        {"progress": Progress()},
        OneRank(),
        schedule=save_schedule(settings),
        before_save=lambda: None,
        clock=lambda: now[0],
    )


def test_minutes_are_minutes() -> None:
    now = [0.0]
    saver = saver_of(CheckpointSettings(save_minutes=2.0), now)
    seconds = [1.0, 2.0, 60.0, 119.9, 120.0]
    due: list[bool] = []
    for now[0] in seconds:
        due.append(saver.due(1, ended_episode=None))
    assert due == [False, False, False, False, True]


def test_a_schedule_that_is_off_is_never_due() -> None:
    now = [0.0]
    saver = saver_of(CheckpointSettings(save_minutes=0.0, save_steps=-1, save_interval=0), now)
    now[0] = 1e9
    assert not any(saver.due(step, ended_episode=step) for step in range(1, 5))


def test_steps_and_episodes_are_those_of_the_flags() -> None:
    saver = saver_of(CheckpointSettings(save_minutes=0.0, save_steps=3, save_interval=2), [0.0])
    assert [step for step in range(1, 8) if saver.due(step, ended_episode=None)] == [3, 6]
    assert [episode for episode in range(1, 6) if saver.due(1, ended_episode=episode)] == [2, 4]
