"""The loss of each stage and the largest micro-batch that its settings allow, for a step that is traced.

The samples have as many learned tokens as can be, and no two begin alike: rows that share prompts, or learn less, take
less memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from rft.build.algorithm import algorithm_record
from rft_algos.algorithms.preference import PreferenceLoss, weighted_losses
from rft_algos.algorithms.published import Sft
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.reward_model.head import new_head
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.spec import RewardSpec
from rft_trainer.loops.sft import TokenLikelihood
from rft_trainer.records.pairs import FIRST_IS_BETTER, PairLabel
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.update.optimizer_step import MicroBatchLoss
from rft_trainer.update.pair_loss import PairLoss, PairScoreObjective
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective
from rft_trainer.update.preference_objective import LabelledObjective, PairObjective
from rft_trainer.update.supervised_loss import SupervisedLoss


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """Size of a micro-batch."""

    num_units: int
    """Samples, or pairs of them."""
    unit_tokens: int
    vocab: int


class TracedStage(Protocol):
    """A stage as a step of it is traced."""

    def loss(self, settings: Any, policy: CausalPolicy, fused: CausalPolicy | None) -> MicroBatchLoss:
        """Return the loss of a micro-batch; `fused` is the policy where its head may make gradients in the forward."""
        ...

    def samples(self, settings: Any, values: Mapping[str, Any], shape: MicroBatchShape) -> list[TrainingSample]:
        """Return a micro-batch of this size."""
        ...


class SftStage:
    """Rows of which every token but the first is learned."""

    def loss(self, settings: Any, policy: CausalPolicy, fused: CausalPolicy | None) -> MicroBatchLoss:
        """Return the likelihood, or the loss with terms over the vocabulary."""
        chosen = settings.training
        smoothing, z_loss = getattr(chosen, "label_smoothing", 0.0), getattr(chosen, "z_loss_coef", 0.0)
        if smoothing or z_loss:
            return SupervisedLoss(policy, Sft(label_smoothing=smoothing, z_loss_coef=z_loss))
        return PolicyLoss(policy, TokenLikelihood(), fused=fused)

    def samples(self, settings: Any, values: Mapping[str, Any], shape: MicroBatchShape) -> list[TrainingSample]:
        """Return rows without prompts."""
        return [_sample(shape, number, shape.unit_tokens, 1) for number in range(shape.num_units)]


class DpoStage:
    """Pairs of responses, or labelled ones, without prompts."""

    def loss(self, settings: Any, policy: CausalPolicy, fused: CausalPolicy | None) -> MicroBatchLoss:
        """Return the loss that the settings choose."""
        config = preference_loss(settings.loss)
        objective = LabelledObjective(config) if config.is_labelled else PairObjective(config)
        return PolicyLoss(policy, objective)

    def samples(self, settings: Any, values: Mapping[str, Any], shape: MicroBatchShape) -> list[TrainingSample]:
        """Return both responses of every pair, with log-probs of a reference."""
        if preference_loss(settings.loss).is_labelled:
            length = shape.unit_tokens
            return [_sample(shape, n, length, 1, reference=True) for n in range(shape.num_units)]
        margin = (0.0,) if settings.data.margin_key else ()
        return [
            _sample(
                shape, 2 * number + side, shape.unit_tokens // 2, 1,
                reference=True, unit=str(number), sequence_numbers=margin,
            )
            for number in range(shape.num_units)
            for side in range(2)
        ]  # fmt: skip


class RlStage:
    """Rollouts whose responses are as long as they may be."""

    def loss(self, settings: Any, policy: CausalPolicy, fused: CausalPolicy | None) -> MicroBatchLoss:
        """Return the policy loss of the algorithm."""
        objective = PolicyObjective(algorithm_record(settings))
        return PolicyLoss(policy, objective, temperature=settings.sampling.temperature, fused=fused)

    def samples(self, settings: Any, values: Mapping[str, Any], shape: MicroBatchShape) -> list[TrainingSample]:
        """Return rollouts with the log-probs that the loss may read."""
        length = shape.unit_tokens
        prompt = length - min(values["generate_max_len"], length - 1)
        reference = algorithm_record(settings).needs_reference
        return [
            _sample(shape, number, length, prompt, sampled=True, reference=reference)
            for number in range(shape.num_units)
        ]


class RmStage:
    """Pairs of texts that share nothing, and a head for scores on the decoder."""

    def loss(self, settings: Any, policy: CausalPolicy, fused: CausalPolicy | None) -> MicroBatchLoss:
        """Return the loss of pairs of a reward model on the policy's decoder."""
        decoder = policy.backbone.decoder
        head = new_head(RewardSpec(), decoder.config.get_text_config(decoder=True).hidden_size, seed=0)
        model = RewardModel(decoder, head, None, packed=policy.packed, where=policy.where)
        model.train()
        return PairLoss(model, PairScoreObjective())

    def samples(self, settings: Any, values: Mapping[str, Any], shape: MicroBatchShape) -> list[TrainingSample]:
        """Return both texts of every pair, the first of them better."""
        label = PairLabel((FIRST_IS_BETTER,), 0.0, 1.0).as_numbers()
        return [
            _sample(shape, 2 * number + side, shape.unit_tokens // 2, 0, unit=str(number), sequence_numbers=label)
            for number in range(shape.num_units)
            for side in range(2)
        ]


SFT: TracedStage = SftStage()
DPO: TracedStage = DpoStage()
RL: TracedStage = RlStage()
RM: TracedStage = RmStage()


def preference_loss(settings: Any) -> PreferenceLoss:
    """Return the loss of preferences that the settings choose."""
    values: dict[str, Any] = {field.name: getattr(settings, field.name) for field in fields(PreferenceLoss)}
    values["loss_weights"] = weighted_losses(settings.loss_weights)
    return PreferenceLoss(**values)


def _sample(
    shape: MicroBatchShape, number: int, length: int, prompt: int, *, sampled: bool = False, reference: bool = False,
    **more: Any,
) -> TrainingSample:  # fmt: skip
    logprobs = (-1.0,) * (length - prompt)
    return TrainingSample(
        f"traced {number}",
        tuple((number + place) % shape.vocab for place in range(length)),
        prompt,
        1.0,
        behaviour_logprobs=logprobs if sampled else (),
        old_logprobs=logprobs if sampled else (),
        reference_logprobs=logprobs if reference else (),
        **more,
    )
