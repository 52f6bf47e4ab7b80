"""Held-out evaluation: greedy answers (by default), scored by the same reward, each prompt exactly once."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, astuple, dataclass, field, replace
from typing import Any

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OutageError
from rft_core.keyed_random import derive_key
from rft_trainer.evaluation.task_metrics import TaskMetrics
from rft_trainer.protocols import Collectives, Engine, ResponseDecoder
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.turns import TurnCounts, total, turn_counts
from rft_trainer.rollouts.collector import RewardFunction, sample_responses, score_rollouts
from rft_trainer.rollouts.multi_turn import Conversations
from rft_trainer.scoring.advantages import is_correct
from rft_trainer.update.nonfinite_checks import refuse_non_finite_shares

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of one evaluation: one number a prompt, in their order; unscored prompts are in no mean.

    `correct` is whether the reward's "correctness" component is 1 where it has one, else
    whether the reward is 1.
    """

    rewards: tuple[float | None, ...]
    correct: tuple[bool | None, ...]
    num_truncated: int
    mean_tokens: float
    turns: TurnCounts = field(default_factory=TurnCounts)
    """Turns and tool calls of all conversations; none without an environment."""
    why_unscored: str = ""
    """The first prompt without a reward, and why it has none; empty where every prompt has one."""
    task_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of installed tasks by name."""

    @property
    def num_scored(self) -> int:
        """Number of prompts that have a reward."""
        return sum(reward is not None for reward in self.rewards)

    @property
    def mean_reward(self) -> float:
        """Mean over the scored prompts; nan when there is none."""
        scored = [reward for reward in self.rewards if reward is not None]
        return sum(scored) / len(scored) if scored else float("nan")

    @property
    def accuracy(self) -> float:
        """Share of the scored prompts that are right; nan when there is none."""
        scored = [correct for correct in self.correct if correct is not None]
        return sum(scored) / len(scored) if scored else float("nan")

    def as_record(self) -> dict[str, object]:
        """Return the metrics as a row of `evals.jsonl`."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/reward": self.mean_reward,
            "eval/n": len(self.rewards),
            "eval/unscored": len(self.rewards) - self.num_scored,
            "eval/truncated": self.num_truncated,
            "eval/mean_tokens": self.mean_tokens,
            **{f"eval/{name}": value for name, value in self.turns.shares().items()},
            **{f"eval/{name}": value for name, value in self.task_metrics.items()},
        }


@dataclass(slots=True)
class Evaluator:
    """Evaluator on all held-out prompts; ranks share the work and all get the full result."""

    engine: Engine
    decoder: ResponseDecoder
    reward: RewardFunction
    collectives: Collectives
    prompts: Sequence[Prompt]
    """The held-out prompts, in order."""
    _: KW_ONLY
    sampling: SamplingOptions
    seed: int = 0
    conversations: Conversations | None = None
    metrics: TaskMetrics | None = None
    """What installed tasks compute of the answers."""
    keys: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        # by index alone: every evaluation of a run asks with the same keys, and can be paired with the others
        self.keys = [[derive_key(self.seed, "evaluation", index)] for index in range(len(self.prompts))]

    def __call__(self) -> EvaluationResult:
        """Evaluate all prompts and return the result."""
        return self.with_rollouts()[0]

    def with_rollouts(self) -> tuple[EvaluationResult, list[Rollout]]:
        """Evaluate all prompts; return the result, and the rollouts that this rank produced.

        Raises:
            OutageError: the reward server of a rank is away, on all ranks.
            DataError: the metrics of a task are none.
        """
        rank, world_size = self.collectives.rank, self.collectives.world_size
        # keys go with the prompts: which rank answers one changes none of its tokens
        mine = self.prompts[rank::world_size]
        sampled = self._draw(mine, self.keys[rank::world_size])
        # before the rewards: a model with NaN in its weights still answers, and would look like a poor one
        back = "go back to an earlier checkpoint of the run"
        refuse_non_finite_shares(sampled, self.collectives, during="evaluation", do=back)
        try:
            scored = sampled if self.conversations is not None else score_rollouts(self.reward, mine, sampled)
        except OutageError as outage:
            if world_size > 1:  # the other ranks wait in the exchange of the rows
                self.collectives.gather_bytes(json.dumps(asdict(outage.problem)).encode())
            raise
        rollouts = [group[0] for group in scored]
        rows = [_row(rollout) for rollout in rollouts]
        if world_size > 1:
            parts = [json.loads(part) for part in self.collectives.gather_bytes(json.dumps(rows).encode())]
            for part in parts:
                if isinstance(part, dict):
                    raise OutageError(**part)
            # back to the order of the prompts, which were dealt out in turn
            rows = [parts[i % world_size][i // world_size] for i in range(len(self.prompts))]
        result = _result(rows)
        if self.metrics is not None:
            labels = [prompt.label for prompt in self.prompts]
            found = self.metrics([row[6] for row in rows], labels, result.rewards)
            result = replace(result, task_metrics=found)
        # all ranks have the same result: one of them says so
        if result.why_unscored and rank == 0:
            missing = len(rows) - result.num_scored
            _LOG.warning("%d of %d held-out answers have no reward; first: %s", missing, len(rows), result.why_unscored)
        return result, rollouts

    def _draw(self, prompts: Sequence[Prompt], keys: Sequence[Sequence[int]]) -> list[list[Rollout]]:
        if self.conversations is not None:
            return self.conversations.sample(prompts, keys, self.sampling)
        return sample_responses(self.engine, self.decoder, prompts, keys, self.sampling)


def _row(rollout: Rollout) -> list[Any]:
    reward = rollout.reward
    correct = None if reward is None else is_correct(rollout)
    counts = astuple(turn_counts(rollout.turns))
    reason = f"{rollout.prompt_id} ({rollout.status}): {rollout.detail}"
    return [
        reward,
        correct,
        rollout.finish_reason == "length",
        rollout.num_sampled,
        counts,
        reason,
        rollout.response_text,
    ]


def _result(rows: Sequence[Sequence[Any]]) -> EvaluationResult:
    return EvaluationResult(
        rewards=tuple(None if row[0] is None else float(row[0]) for row in rows),
        correct=tuple(None if row[1] is None else bool(row[1]) for row in rows),
        num_truncated=sum(bool(row[2]) for row in rows),
        mean_tokens=sum(int(row[3]) for row in rows) / len(rows) if rows else float("nan"),
        turns=total(TurnCounts(*row[4]) for row in rows),
        why_unscored=next((str(row[5]) for row in rows if row[0] is None), ""),
    )
