"""Judgements of a process as scores, in the order of the responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.rules import pooled
from rft_trainer.rewards.rules.pooled import PooledReward
from rft_trainer.rewards.rules.table import RuleContext
from rft_trainer.workers.pool import Job, Outcome

MakeItem = Callable[..., RewardItem]


class Pool:
    made: tuple[Any, ...] = ()

    def __init__(self, task: str, *, num_workers: int, limits: Any) -> None:
        Pool.made = task, num_workers, limits.address_bytes

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        return [_outcome(job) for job in jobs]

    def close(self) -> None:
        Pool.made = ()


def _outcome(job: Job) -> Outcome:
    text = job.payload["response"]
    if text == "late":
        return Outcome(RewardStatus.TIMEOUT, detail=f"{job.seconds}")
    return Outcome(RewardStatus.OK, {"reward": 0.5, "a": 1.0} if text == "fine" else 3)


def test_every_response_has_its_own_score_or_status(make_item: MakeItem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled, "WorkerPool", Pool)
    reward = PooledReward(
        "own", lambda item: {"response": item.response_text} if item.label else None, RuleContext(3, 4.0)
    )
    assert Pool.made == ("rule:own", 3, 1 << 30)
    fine, none, late, odd = reward([make_item("fine"), make_item("fine", None), make_item("late"), make_item("odd")])
    assert (fine.value, fine.breakdown) == (0.5, {"a": 1.0})
    assert (none.value, none.status) == (None, RewardStatus.UNPARSABLE)
    assert (late.status, late.detail) == (RewardStatus.TIMEOUT, "4.0")
    assert odd.status is RewardStatus.FAILED
    reward.close()
    assert Pool.made == ()
