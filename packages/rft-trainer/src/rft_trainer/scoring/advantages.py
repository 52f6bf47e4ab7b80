"""Advantage estimation: reward shaping for length, the algorithm's advantages, and state kept between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rft_algos import objectives
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.losses import kl
from rft_algos.losses.distillation import reverse_kl_reward
from rft_algos.objectives import AdvantageOutput, Coefficients, Metrics, RolloutBatch
from rft_algos.packed.packed_ids import packed_segment_ids
from rft_algos.rewards import shaping
from rft_algos.rewards.shaping import RunningMoments
from rft_algos.schedules.controllers import AdaptiveKl, EntropyTarget
from rft_core.keyed_random import derive_key
from rft_trainer.records.flat_numbers import flat_tensor
from rft_trainer.records.rollouts import Rollout, RolloutGroup, TrainingSample
from rft_trainer.scoring.samples import build_samples, flat_rewards, flat_rollouts

ComputeAdvantages = Callable[[RolloutBatch], Tensor]
"""A person's own advantages: all rollouts of the step -> [N] for sequences or [T] for tokens."""

Rows = Sequence[tuple[float, ...]]
"""One tuple a rollout, one number a response token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShapingConfig:
    """Reward shaping besides the algorithm: lengths are in tokens, penalties in units of reward."""

    longest_response: int
    overlong_buffer: int = 0
    overlong_factor: float = 1.0
    length_penalty: bool = False
    mask_truncated: bool = False
    running_norm: bool = False
    minus_mean: bool = False
    clip: float = 0.0
    component_weights: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class PolicyScores:
    """Scores from the trainer's forward passes over a step's rollouts; a field is empty where it was not requested."""

    old: Rows
    behaviour: Rows
    reference: Rows = ()
    values: Rows = ()
    entropy: Rows = ()
    teacher: Rows = ()


class AdvantageEstimator:
    """Estimator of token advantages and weights; keeps the running scale and the controlled coefficients."""

    def __init__(
        self,
        record: PolicyAlgorithm,
        rules: RewardShapingConfig,
        *,
        seed: int,
        kl_controller: AdaptiveKl | None = None,
        entropy_controller: EntropyTarget | None = None,
        compute_advantages: ComputeAdvantages | None = None,
        teacher_coef: float = 0.0,
    ) -> None:
        self._record = record
        self._teacher_coef = teacher_coef
        self._rules = rules
        self._seed = seed
        self._kl = kl_controller
        self._entropy = entropy_controller
        self._compute = compute_advantages
        self._running = RunningMoments() if rules.running_norm else None

    def coefficients(self) -> Coefficients:
        """Return the current coefficients of the loss terms besides the surrogate."""
        record = self._record
        controlled = None if self._kl is None else self._kl.coefficient
        # the controller has one coefficient: of the drift term where the algorithm has one, else of the KL term
        drifts = record.drift_coef > 0
        return Coefficients(
            kl=record.kl_coef if controlled is None or drifts else controlled,
            drift=controlled if controlled is not None and drifts else record.drift_coef,
            entropy=record.entropy_coef if self._entropy is None else self._entropy.coefficient,
        )

    def control(self, metrics: Mapping[str, object], num_samples: int) -> dict[str, object]:
        """Update the controlled coefficients from the step's metrics; return them by metric name."""
        coefficients: dict[str, object] = {}
        # each controller follows the term that it controls: the drift from the step's start, or the KL to the reference
        measured = metrics.get("policy/kl" if self._record.drift_coef > 0 else "kl/rollout")
        # no measurement where no sample was left to train on: the coefficient stays
        if self._kl is not None and isinstance(measured, float):
            self._kl = self._kl.updated(measured, num_samples)
            coefficients["kl/coefficient"] = self._kl.coefficient
        entropy = metrics.get("policy/entropy")
        if self._entropy is not None and isinstance(entropy, float):
            self._entropy = self._entropy.updated(entropy)
            coefficients["policy/entropy_coefficient"] = self._entropy.coefficient
        return coefficients

    def __call__(
        self, groups: Sequence[RolloutGroup], annotations: PolicyScores, *, step: int
    ) -> tuple[list[TrainingSample], Metrics]:
        """Build samples in `flat_rollouts` order, and metrics as (total, count), the same on every rank."""
        batch, metrics = self._batch(groups, annotations)
        # by step and not from a stream: a resumed run draws the same numbers
        key = derive_key(self._seed, "credit", step)
        credit = objectives.compute_advantages(self._record, batch, score=self._compute, key=key, **self._scale())
        self._running = credit.running
        metrics |= _effective_shares(credit.metrics)
        metrics |= self._pull(batch, credit)
        if annotations.teacher:
            credit = self._distilled(credit, batch, annotations.teacher, metrics)
        return _samples(groups, annotations, batch, self._without_truncated(groups, batch, credit)), {
            **metrics,
            **credit.metrics,
        }

    def _distilled(
        self, credit: AdvantageOutput, batch: RolloutBatch, teacher: Rows, metrics: Metrics
    ) -> AdvantageOutput:
        """Add what the teacher says of each token, in nats and of no later token, to its advantage.

        Less the mean over the tokens of all other responses of the step: it does not depend on the token, so that the
        gradient stays the same in expectation, and takes away most of its variance while the teacher is far away.
        """
        rewards_T = reverse_kl_reward(batch.old_logprobs_T, _flat(teacher), batch.loss_mask_T)
        metrics["kl/teacher"] = -rewards_T.sum(), batch.loss_mask_T.sum().to(torch.float64)
        # after the normalisation of the algorithm, which would take away how far the teacher is
        centred_T = torch.where(batch.loss_mask_T, rewards_T - _mean_of_others(rewards_T, batch), 0.0)
        return replace(credit, advantages_T=credit.advantages_T + self._teacher_coef * centred_T)

    def _pull(self, batch: RolloutBatch, credit: AdvantageOutput) -> Metrics:
        """Return how strong the divergence's term is beside the rewards, where there is one.

        In the loss: coefficient x mean |log pi - log ref| over the mean size of the advantages, both a token. In the
        reward: standard deviations within groups of coefficient x sum (log pi - log ref), and of the rewards.
        """
        coefficient = self.coefficients().kl
        if batch.reference_logprobs_T is None or self._record.kl_place == "none" or coefficient <= 0:
            return {}
        ratios_T = torch.where(batch.loss_mask_T, batch.old_logprobs_T - batch.reference_logprobs_T, 0.0).double()
        if self._record.kl_place == "loss":
            pull, size = ratios_T.abs().sum(), credit.advantages_T[batch.loss_mask_T].abs().sum()
        else:
            spent_N = torch.zeros_like(batch.rewards_N, dtype=torch.float64).index_add(0, batch.segment_ids_T, ratios_T)
            pull, size = _deviation(spent_N, batch.group_ids_N), _deviation(batch.rewards_N.double(), batch.group_ids_N)
        return {"kl/pull": (coefficient * pull, size.double())} if float(size) > 0 else {}

    def own_advantages(self, batch: RolloutBatch) -> Tensor:
        """Return the algorithm's own advantages [T], before the batch is normalised or clipped."""
        return objectives.algorithm_advantages(self._record, batch, **self._scale()).advantages_T

    def _scale(self) -> dict[str, Any]:
        return {
            "running": self._running,
            "minus_mean": self._rules.minus_mean,
            "score_clip": self._rules.clip,
            "kl_coef": self.coefficients().kl,
        }

    def state(self) -> dict[str, Any]:
        """Return the running scale and the coefficients as plain JSON."""
        running = self._running
        return {
            "kl_coefficient": None if self._kl is None else self._kl.coefficient,
            "entropy_coefficient": None if self._entropy is None else self._entropy.coefficient,
            "running": None if running is None else [running.count, running.mean, running.m2],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state()` returned."""
        if self._kl is not None and state["kl_coefficient"] is not None:
            self._kl = replace(self._kl, coefficient=float(state["kl_coefficient"]))
        if self._entropy is not None and state["entropy_coefficient"] is not None:
            self._entropy = replace(self._entropy, coefficient=float(state["entropy_coefficient"]))
        if self._running is not None and state["running"] is not None:
            count, mean, m2 = state["running"]
            self._running = RunningMoments(int(count), float(mean), float(m2))

    def _batch(self, groups: Sequence[RolloutGroup], scores: PolicyScores) -> tuple[RolloutBatch, Metrics]:
        rollouts = [rollout for _, rollout in flat_rollouts(groups)]
        lengths_N = torch.tensor([rollout.num_sampled for rollout in rollouts])
        spans_N = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])
        loss_mask_T = _loss_mask(rollouts)
        rewards_N, group_ids_N = flat_rewards(groups)
        components_NK, weights_K = self._components(rollouts)
        # weighted before any shaping: penalties are added to the sum and not to a part
        if self._rules.component_weights is not None and components_NK is not None and weights_K is not None:
            rewards_N = components_NK @ weights_K
        # from the raw rewards, which shaping below moves away from 1
        correct_N = torch.tensor([is_correct(rollout) for rollout in rollouts])
        shaped_N, metrics = self._shaped(rewards_N, correct_N, group_ids_N, lengths_N)
        steps_T, step_mask_T = _steps(rollouts, shaped_N) if self._record.advantage.needs_steps else (None, None)
        greedy = [group.baseline_reward for group, _ in flat_rollouts(groups)]
        batch = RolloutBatch(
            rewards_N=shaped_N,
            group_ids_N=group_ids_N,
            loss_mask_T=loss_mask_T,
            segment_ids_T=packed_segment_ids(spans_N),
            old_logprobs_T=_flat(scores.old),
            behaviour_logprobs_T=_flat(scores.behaviour),
            reference_logprobs_T=_flat(scores.reference) if scores.reference else None,
            entropy_T=_flat(scores.entropy) if scores.entropy else None,
            values_T=_flat(scores.values) if scores.values else None,
            greedy_rewards_N=torch.tensor(greedy, dtype=torch.float64) if self._record.advantage.needs_greedy else None,
            components_NK=components_NK if self._record.advantage.needs_components else None,
            component_weights_K=weights_K if self._record.advantage.needs_components else None,
            step_rewards_T=steps_T,
            step_mask_T=step_mask_T,
            turn_rewards_T=_turn_rewards(rollouts),
        )
        if batch.reference_logprobs_T is not None:
            # over sampled tokens alone: those of observations are no choice of the policy
            spent_T = kl.k3(batch.old_logprobs_T - batch.reference_logprobs_T)[loss_mask_T]
            metrics["kl/rollout"] = spent_T.sum(), torch.tensor(float(len(spent_T)))
        return batch, metrics

    def _components(self, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return reward components [N, K] and their weights [K] (1 where none are given), K in the order of names."""
        weights = self._rules.component_weights
        if weights is None and not self._record.advantage.needs_components:
            return None, None
        # sorted, so that columns have one order on every rank and in every run
        names = sorted(weights if weights is not None else _whole_parts({n for r in rollouts for n in r.breakdown}))
        if not names:  # a reward without parts is one part
            rewards_N1 = torch.tensor([[rollout.reward] for rollout in rollouts], dtype=torch.float64)
            return rewards_N1, torch.ones(1, dtype=torch.float64)
        factors = [1.0 if weights is None else weights[name] for name in names]
        # a part that a response lacks counts 0, as it does in the weighted reward
        rows = [[r.breakdown.get(name, 0.0) for name in names] for r in rollouts]
        return torch.tensor(rows, dtype=torch.float64), torch.tensor(factors, dtype=torch.float64)

    def _shaped(
        self, rewards_N: Tensor, correct_N: Tensor, group_ids_N: Tensor, lengths_N: Tensor
    ) -> tuple[Tensor, Metrics]:
        rules, metrics = self._rules, Metrics()
        number = torch.tensor(float(len(rewards_N)))
        if rules.overlong_buffer:
            penalty_N = shaping.soft_overlong_penalty(
                lengths_N,
                max_length=rules.longest_response,
                buffer=rules.overlong_buffer,
                factor=rules.overlong_factor,
            )
            metrics["reward/overlong_penalty"] = penalty_N.sum(), number
            rewards_N = rewards_N + penalty_N
        if rules.length_penalty:
            penalty_N = shaping.kimi_length_reward(correct_N, lengths_N, group_ids_N)
            metrics["reward/length_term"] = penalty_N.sum(), number
            rewards_N = rewards_N + penalty_N
        return rewards_N, metrics

    def _without_truncated(
        self, groups: Sequence[RolloutGroup], batch: RolloutBatch, credit: AdvantageOutput
    ) -> AdvantageOutput:
        """Set the weights of truncated responses to 0; they stay in the denominators and in their groups."""
        if not self._rules.mask_truncated:
            return credit
        # a weight of 0 and not a smaller batch: leaving them out would make every other token count more
        complete = [rollout.finish_reason != "length" for _, rollout in flat_rollouts(groups)]
        complete_T = torch.tensor(complete, dtype=torch.float64)[batch.segment_ids_T]
        weights_T = complete_T if credit.weights_T is None else credit.weights_T * complete_T
        return AdvantageOutput(
            credit.advantages_T, credit.returns_T, weights_T, credit.selected_T, credit.running, credit.metrics
        )


def _deviation(values_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Return the root of the summed squared distances of values from the means of their groups."""
    counts_G = torch.bincount(group_ids_N).double()
    means_G = torch.zeros_like(counts_G).index_add(0, group_ids_N, values_N) / counts_G.clamp(min=1)
    return (values_N - means_G[group_ids_N]).square().sum().sqrt()


def _whole_parts(names: set[str]) -> set[str]:
    """Return the parts of a reward without those of a part (NAME/PART beside NAME), which would count twice."""
    return {name for name in names if name.rpartition("/")[0] not in names}


def parse_component_weights(text: str) -> dict[str, float] | None:
    """Parse `correctness=0.9,format=0.1`; None for an empty text, ValueError where a part is no NAME=NUMBER."""
    if not text:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    return {name.strip(): float(number) for name, _, number in pairs}


def _effective_shares(metrics: Metrics) -> Metrics:
    """Compute the effective share of tokens and of sequences: mean(weight)^2 / mean(weight^2), in (0, 1].

    Absent where there are none, as in a step whose responses are all empty.
    """
    shares = Metrics()
    for kind, name in (("weight", "token"), ("sequence_weight", "sequence")):
        if f"mismatch/{kind}" in metrics:
            (first, count), (second, _) = metrics[f"mismatch/{kind}"], metrics[f"mismatch/{kind}_square"]
            if float(second * count) > 0:
                shares[f"mismatch/effective_{name}_share"] = first.square() / (second * count), torch.ones(())
    return shares


def is_correct(rollout: Rollout) -> bool:
    """Return whether a response is correct: its "correctness" component, or else its reward, is at least 1.

    Beside other rewards a rule's correctness is called NAME/correctness; the first one counts.
    """
    if rollout.reward is None:
        return False
    named = (value for name, value in rollout.breakdown.items() if name.endswith("/correctness"))
    return bool(rollout.breakdown.get("correctness", next(named, rollout.reward)) >= 1.0)


def _mean_of_others(values_T: Tensor, batch: RolloutBatch) -> Tensor:
    """[T] mean over the loss tokens of all responses but the token's own; 0 where there are none."""
    wanted_T = batch.loss_mask_T.to(values_T.dtype)
    own_N, count_N = (
        values_T.new_zeros(len(batch.rewards_N)).index_add_(0, batch.segment_ids_T, added_T)
        for added_T in (values_T * wanted_T, wanted_T)
    )
    means_N = (own_N.sum() - own_N) / (count_N.sum() - count_N).clamp(min=1)
    return means_N[batch.segment_ids_T]


def _loss_mask(rollouts: Sequence[Rollout]) -> Tensor:
    """Return [T] bool, true at the tokens that the policy sampled."""
    masks = [rollout.loss_mask for rollout in rollouts]
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    if not any(masks):
        return torch.ones(sum(lengths), dtype=torch.bool)
    return flat_tensor((mask or (True,) * length for mask, length in zip(masks, lengths, strict=True)), torch.bool)


def _turn_rewards(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Return [T] the rewards of turns at their last tokens; None without conversations."""
    if not any(rollout.turns for rollout in rollouts):
        return None
    earned = [dict(rollout.steps) for rollout in rollouts]
    rows = zip(rollouts, earned, strict=True)
    values = (reward_at.get(index, 0.0) for r, reward_at in rows for index in range(len(r.completion_ids)))
    return torch.tensor(list(values), dtype=torch.float64)


def _flat(rows: Rows) -> Tensor:
    return flat_tensor(rows, torch.float64)


def _steps(rollouts: Sequence[Rollout], rewards_N: Tensor) -> tuple[Tensor, Tensor]:
    """Place step rewards at the tokens that end them.

    A rollout without steps has one: its reward, at the last token that the policy sampled, and none where there is no
    such token.
    """
    values: list[float] = []
    marks: list[bool] = []
    for rollout, reward in zip(rollouts, rewards_N.tolist(), strict=True):
        steps: dict[int, float] = dict(rollout.steps) or _outcome_step(rollout, reward)
        values += [steps.get(index, 0.0) for index in range(len(rollout.completion_ids))]
        marks += [index in steps for index in range(len(rollout.completion_ids))]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(marks, dtype=torch.bool)


def _outcome_step(rollout: Rollout, reward: float) -> dict[int, float]:
    """Return the reward at the last token that the policy sampled, by its index; empty where it sampled none."""
    # a conversation may end with an observation
    mask = rollout.loss_mask or (True,) * len(rollout.completion_ids)
    sampled = [index for index, is_sampled in enumerate(mask) if is_sampled]
    return {sampled[-1]: reward} if sampled else {}


def _samples(
    groups: Sequence[RolloutGroup], scores: PolicyScores, batch: RolloutBatch, credit: AdvantageOutput
) -> list[TrainingSample]:
    lengths = [len(rollout.completion_ids) for _, rollout in flat_rollouts(groups)]

    def rows(values_T: Tensor | None) -> Sequence[tuple[Any, ...]]:
        return [] if values_T is None else [tuple(row.tolist()) for row in values_T.split(lengths)]

    first_N, constant_N = _one_number(credit.advantages_T, batch.segment_ids_T, batch.loss_mask_T, len(lengths))
    # one number in place of a tuple where all loss tokens have the same, as for outcome rewards
    token_advantages = [
        () if same else tuple(row.tolist())
        for row, same in zip(credit.advantages_T.split(lengths), constant_N.tolist(), strict=True)
    ]
    return build_samples(
        groups,
        first_N.tolist(),
        scores.old,
        scores.reference,
        token_advantages=token_advantages,
        old_values=scores.values,
        returns=rows(credit.returns_T),
        token_weights=rows(credit.weights_T),
        selected=rows(credit.selected_T),
    )


def _one_number(values_T: Tensor, segment_ids_T: Tensor, mask_T: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
    """Return [N] the first value of each segment under the mask (0 without one), and [N] whether all others equal it.

    NaN differs from itself; a segment of one value or none has no others.
    """
    index_L = mask_T.nonzero()[:, 0]
    segment_L, num_values = segment_ids_T[index_L], values_T.shape[0]
    first_N = torch.full((num_segments,), num_values).scatter_reduce_(0, segment_L, index_L, "amin")
    # a number behind the values for segments that have none
    value_N = torch.cat([values_T, values_T.new_zeros(1)])[first_N]
    differs_L = values_T[index_L] != value_N[segment_L]
    count_N = torch.bincount(segment_L, minlength=num_segments)
    return value_N, (count_N <= 1) | (torch.bincount(segment_L[differs_L], minlength=num_segments) == 0)
