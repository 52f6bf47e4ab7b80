"""Rule that runs in processes that are killed when a response takes too long: patterns, parsers, schemas.

A pattern such as `(a+)+$` can take time that grows exponentially with the text. Such a response has the status timeout;
the others keep their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rft_trainer.records.scores import FailureKind, RewardItem, RewardStatus, Score
from rft_trainer.rewards.rules.table import RuleContext
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.pool import Job, Outcome, WorkerPool

_MEMORY_BYTES = 1 << 30

Payload = Callable[[RewardItem], Mapping[str, object] | None]
"""What the judgement of a response needs, as JSON; None where its label cannot be read."""


class PooledReward:
    """Reward of a rule's `judge`, one job a response with a deadline of its own."""

    def __init__(self, rule: str, payload: Payload, context: RuleContext) -> None:
        """Create the pool; no process is started before there is a response.

        Args:
            rule: module of this room with a function `judge` of a payload, which returns its parts by name; the part
                "reward" is the value.
            payload: makes the payload of a response.
            context: number of processes and the seconds that one response may take.
        """
        self._payload, self._timeout = payload, context.timeout
        limits = ProcessLimits(address_bytes=_MEMORY_BYTES)
        self._pool = WorkerPool(f"rule:{rule}", num_workers=context.num_workers, limits=limits)

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        payloads = [self._payload(item) for item in items]
        jobs = [Job(payload, self._timeout) for payload in payloads if payload is not None]
        outcomes = iter(self._pool.run(jobs))
        return [
            _without_label(item) if payload is None else _score(next(outcomes))
            for item, payload in zip(items, payloads, strict=True)
        ]

    def close(self) -> None:
        """Stop the processes of the pool."""
        self._pool.close()


def _without_label(item: RewardItem) -> Score:
    return Score(None, RewardStatus.UNPARSABLE, detail=f"{item.prompt_id} has no label that can be read")


def _score(outcome: Outcome) -> Score:
    if outcome.status is not RewardStatus.OK:
        return Score(None, outcome.status, detail=outcome.detail, failure=outcome.failure)
    if not isinstance(outcome.result, dict):
        return Score(None, RewardStatus.FAILED, detail="the rule gave no parts", failure=FailureKind.NOT_A_NUMBER)
    parts: dict[str, Any] = dict(outcome.result)
    return Score(parts.pop("reward"), breakdown=parts)
