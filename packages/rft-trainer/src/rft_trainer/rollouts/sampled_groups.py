"""Completions that a policy sampled for a list of prompts, and the batch that they become with advantages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.records.rollouts import Rollout, RolloutGroup, TrainingSample
from rft_trainer.scoring.samples import build_samples, flat_rollouts


@dataclass(frozen=True, slots=True)
class SampledGroups:
    """Groups of completions, one a prompt, in the order of the prompts; the same on every rank.

    N counts completions, group after group: the order of every flat list of them.

    Example::

        sampled = policy.sample(["1+1=", "2+2="], n=4)
        rewards_N = torch.tensor([score(text) for texts in sampled.texts for text in texts])
        batch = sampled.batch(group_norm(rewards_N, sampled.group_ids))
    """

    groups: tuple[RolloutGroup, ...]
    temperature: float
    """That they were drawn at: the log-probs of the batch are those of this temperature."""

    @property
    def completions(self) -> list[Rollout]:
        """All N completions: `completion_ids`, `behaviour_logprobs`, `response_text`, `finish_reason`, ..."""
        return [rollout for _, rollout in flat_rollouts(self.groups)]

    @property
    def texts(self) -> list[list[str]]:
        """Texts of the completions without special tokens: one list a prompt."""
        return [[rollout.response_text for rollout in group.rollouts] for group in self.groups]

    @property
    def group_ids(self) -> Tensor:
        """[N] int64: the number of each completion's prompt."""
        sizes = torch.tensor([len(group.rollouts) for group in self.groups], dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(self.groups)), sizes)

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.groups)

    def __iter__(self) -> Iterator[RolloutGroup]:
        return iter(self.groups)

    def batch(self, advantages: Tensor | Sequence[float] | Sequence[Sequence[float]]) -> TrainingBatch:
        """Return the completions as a batch to train on.

        Its `old_logprobs` are those that the engine sampled with; `TrainingBatch.with_logprobs` replaces them.

        Args:
            advantages: [N], or one list a prompt like `texts`: one finite number a completion.

        Raises:
            OptionsError: another number of advantages, one that is not finite, or samples of temperature 0.
        """
        if self.temperature == 0.0:
            raise _refused(
                "sampled.greedy",
                "the completions were drawn at temperature 0",
                "a distribution at temperature 0 has no gradient: its most likely token has probability 1",
                "policy.sample(prompts, temperature=1.0)",
            )
        numbers = _flat(advantages)
        completions = self.completions
        if len(numbers) != len(completions):
            raise _refused(
                "sampled.advantages",
                f"{len(numbers)} advantages for {len(completions)} completions",
                "every completion has one advantage, group after group",
                "sampled.batch(group_norm(rewards, sampled.group_ids))",
            )
        bad = next((index for index, number in enumerate(numbers) if not math.isfinite(number)), None)
        if bad is not None:
            raise _refused(
                "sampled.advantage_not_finite",
                f"advantage {bad} of {len(numbers)} is {numbers[bad]}",
                "it would make every weight NaN; a completion without a reward has no advantage",
                "leave its prompt out, or give the completion an advantage of 0",
            )
        behaviour = [rollout.behaviour_logprobs for rollout in completions]
        samples: list[TrainingSample] = build_samples(self.groups, numbers, behaviour, [])
        return TrainingBatch.of(samples, temperature=self.temperature)


def _flat(advantages: Any) -> list[float]:
    if isinstance(advantages, Tensor):
        return [float(number) for number in advantages.detach().cpu().flatten().tolist()]
    rows = list(advantages)
    if rows and all(isinstance(row, Sequence | Tensor) for row in rows):
        return [float(number) for row in rows for number in row]
    return [float(number) for number in rows]


def _refused(code: str, what: str, why: str, do: str) -> OptionsError:
    return OptionsError(code=code, what=what, where="sampled.batch", why=why, state="no weight was changed", do=do)
