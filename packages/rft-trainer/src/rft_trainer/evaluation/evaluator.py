"""Held-out evaluation: greedy answers (by default), one or several a prompt, scored by the same reward."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, astuple, dataclass, field, replace
from statistics import fmean
from typing import Any

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.statistics import best_of_k_estimate, pass_at_k_estimate
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
    whether the reward is 1. Of several samples a prompt has the mean reward and the share of correct ones, over the
    samples that have a reward.
    """

    rewards: tuple[float | None, ...]
    correct: tuple[float | None, ...]
    """True or False of a single response, a share of several."""
    num_truncated: int
    mean_tokens: float
    turns: TurnCounts = field(default_factory=TurnCounts)
    """Turns and tool calls of all conversations; none without an environment."""
    why_unscored: str = ""
    """The first response without a reward, and why it has none; empty where every one has a reward."""
    task_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of installed tasks by name."""
    num_samples: int = 1
    """Responses to each prompt."""
    num_unscored: int = 0
    """Responses without a reward."""
    at_k: Mapping[str, float] = field(default_factory=dict[str, float])
    """pass@k and best@k of several samples, by name."""

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
        several = {"eval/samples": self.num_samples} if self.num_samples > 1 else {}
        return {
            "eval/accuracy": self.accuracy,
            "eval/reward": self.mean_reward,
            "eval/n": len(self.rewards),
            **several,
            "eval/unscored": self.num_unscored,
            "eval/truncated": self.num_truncated,
            "eval/mean_tokens": self.mean_tokens,
            **{f"eval/{name}": value for name, value in self.at_k.items()},
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
    num_samples: int = 1
    """Responses sampled for each prompt."""
    keys: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        # by index alone: every evaluation of a run asks with the same keys, and can be paired with the others
        self.keys = [_keys(self.seed, index, self.num_samples) for index in range(len(self.prompts))]

    def __call__(self) -> EvaluationResult:
        """Evaluate all prompts and return the result."""
        return self.with_rollouts()[0]

    def with_rollouts(self) -> tuple[EvaluationResult, list[list[Rollout]]]:
        """Evaluate all prompts; return the result, and the rollouts that this rank produced, a list for each prompt.

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
        rows = [[_row(rollout) for rollout in group] for group in scored]
        if world_size > 1:
            parts = [json.loads(part) for part in self.collectives.gather_bytes(json.dumps(rows).encode())]
            for part in parts:
                if isinstance(part, dict):
                    raise OutageError(**part)
            # back to the order of the prompts, which were dealt out in turn
            rows = [parts[i % world_size][i // world_size] for i in range(len(self.prompts))]
        result = _result(rows, self.num_samples)
        if self.metrics is not None:
            flat = [(row, prompt.label) for group, prompt in zip(rows, self.prompts, strict=True) for row in group]
            found = self.metrics([row[6] for row, _ in flat], [label for _, label in flat], [row[0] for row, _ in flat])
            result = replace(result, task_metrics=found)
        # all ranks have the same result: one of them says so
        if result.why_unscored and rank == 0:
            num, why = len(rows) * self.num_samples, result.why_unscored
            _LOG.warning("%d of %d held-out answers have no reward; first: %s", result.num_unscored, num, why)
        return result, [list(group) for group in scored]

    def _draw(self, prompts: Sequence[Prompt], keys: Sequence[Sequence[int]]) -> list[list[Rollout]]:
        if self.conversations is not None:
            return self.conversations.sample(prompts, keys, self.sampling)
        return sample_responses(self.engine, self.decoder, prompts, keys, self.sampling)


def _keys(seed: int, index: int, num_samples: int) -> list[int]:
    """Return a key for each sample; the first is that of a single response, whatever the number."""
    return [derive_key(seed, "evaluation", index, *([sample] if sample else [])) for sample in range(num_samples)]


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


def _result(rows: Sequence[Sequence[Sequence[Any]]], num_samples: int) -> EvaluationResult:
    """Sum up the rows of all responses, a list for each prompt."""
    flat = [row for group in rows for row in group]
    rewards = [[float(row[0]) for row in group if row[0] is not None] for group in rows]
    correct = [[bool(row[1]) for row in group if row[1] is not None] for group in rows]
    return EvaluationResult(
        rewards=tuple(fmean(scores) if scores else None for scores in rewards),
        correct=tuple(_share(group) if group else None for group in correct),
        num_truncated=sum(bool(row[2]) for row in flat),
        mean_tokens=sum(int(row[3]) for row in flat) / len(flat) if flat else float("nan"),
        turns=total(TurnCounts(*row[4]) for row in flat),
        why_unscored=next((str(row[5]) for row in flat if row[0] is None), ""),
        num_samples=num_samples,
        num_unscored=sum(row[0] is None for row in flat),
        at_k=_at_k(rewards, correct, num_samples),
    )


def _share(correct: Sequence[bool]) -> float:
    return correct[0] if len(correct) == 1 else fmean(correct)


def _at_k(rewards: Sequence[Sequence[float]], correct: Sequence[Sequence[bool]], num_samples: int) -> dict[str, float]:
    """Return pass@k and best@k for the powers of two up to the number of samples, and that number.

    A prompt with fewer than k scored samples says nothing of k, and is not in their mean.
    """
    powers = [1 << power for power in range(1, num_samples.bit_length()) if 1 << power < num_samples]
    found: dict[str, float] = {}
    for k in [*powers, num_samples] if num_samples > 1 else []:
        passed = [pass_at_k_estimate(sum(group), len(group), k=k) for group in correct if len(group) >= k]
        best = [best_of_k_estimate(group, k=k) for group in rewards if len(group) >= k]
        found |= {f"pass@{k}": fmean(passed)} if passed else {}
        found |= {f"best@{k}": fmean(best)} if best else {}
    return found
