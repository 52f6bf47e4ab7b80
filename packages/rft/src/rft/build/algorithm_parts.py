"""Parts that an algorithm needs: advantage estimator, old-policy scorer, critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.build.lora import adapt_critic
from rft.build.shared_parts import make_tracer
from rft.checkpoints.writer import ResumePoint
from rft.parallel.parallelize import ParallelModel, parallelize
from rft.parallel.shardable import ShardableCritic, WrappedCritic
from rft.process.machine import Machine
from rft.reward_names import weights_of
from rft.settings import RlSettings
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.schedules.controllers import AdaptiveKl, EntropyTarget
from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_dist.strategies.dtensor_shards import ShardedWeights
from rft_dist.strategies.registry import choose_strategy
from rft_models.critic.causal_critic import CausalCritic, load_critic
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load_for_training import checkpointing_of
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.batches.units import MicroBatching
from rft_trainer.loops.rl import CriticTrainer, OldPolicyScorer
from rft_trainer.protocols import Collectives
from rft_trainer.runs.checkpointing import StatefulTensors
from rft_trainer.scoring.advantages import AdvantageEstimator, ComputeAdvantages, RewardShapingConfig
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.update.critic import ValueAnnotator, ValueLoss, ValueObjective
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import Updater


def score_rules(settings: RlSettings, record: PolicyAlgorithm, longest_response: int) -> RewardShapingConfig:
    """Return the shaping of rewards that the settings add to the algorithm.

    Raises:
        OptionsError: weights of parts that are no NAME=NUMBER.
    """
    chosen = settings.algorithm
    buffer = 0
    if record.overlong_buffer_share > 0:
        buffer = chosen.overlong_buffer_len or max(1, round(record.overlong_buffer_share * longest_response))
    if buffer > longest_response:
        raise OptionsError(
            code="reward.overlong_buffer",
            what=f"overlong_buffer_len = {buffer}, the longest response has {longest_response} tokens",
            where="--overlong_buffer_len",
            why="the penalty grows over the last tokens of the longest response",
            do=f"--overlong_buffer_len {max(1, longest_response // 5)}",
        )
    return RewardShapingConfig(
        longest_response=longest_response,
        overlong_buffer=buffer,
        overlong_factor=chosen.overlong_buffer_penalty_factor,
        length_penalty=chosen.length_penalty,
        mask_truncated=chosen.mask_truncated_completions,
        running_norm=chosen.reward_running_norm or chosen.reward_running_norm_minus_mean,
        minus_mean=chosen.reward_running_norm_minus_mean,
        clip=chosen.reward_clip,
        component_weights=weights_of(settings.reward),
    )


def credit_assigner(
    settings: RlSettings,
    record: PolicyAlgorithm,
    longest_response: int,
    compute_advantages: ComputeAdvantages | None = None,
) -> AdvantageEstimator:
    """Make the estimator of every token's advantage, with the controllers that it keeps between steps."""
    chosen = settings.algorithm
    # an objective has a drift or a KL term; the controller moves the one that is there
    coefficient = record.drift_coef if record.drift_coef > 0 else record.kl_coef
    kl = None
    if chosen.kl_target is not None:
        kl = AdaptiveKl(coefficient=coefficient, target=chosen.kl_target, horizon=chosen.kl_horizon)
    entropy = None
    if chosen.entropy_target is not None:
        entropy = EntropyTarget(coefficient=record.entropy_coef, target=chosen.entropy_target)
    return AdvantageEstimator(
        record,
        score_rules(settings, record, longest_response),
        seed=settings.run.seed,
        kl_controller=kl,
        entropy_controller=entropy,
        compute_advantages=compute_advantages,
        teacher_coef=settings.teacher.teacher_kl_coef,
    )


def annotator(
    settings: RlSettings,
    machine: Machine,
    policy: CausalPolicy,
    ranks: Collectives | None = None,
    *,
    collective_forward: bool = False,
) -> LogprobScorer:
    """Log-probabilities of responses under a policy, without gradient; `ranks` share them out (None: all ranks)."""
    return LogprobScorer(
        policy,
        ranks or machine.collectives,
        max_sequences=settings.batch.micro_rollout_batch_size,
        max_tokens=settings.batch.max_tokens_per_micro_batch,
        temperature=settings.sampling.temperature,
        device=machine.device,
        collective_forward=collective_forward,
    )


def old_policy(
    settings: RlSettings,
    record: PolicyAlgorithm,
    machine: Machine,
    policy: CausalPolicy,
    parallel: ParallelModel[CausalPolicy],
) -> OldPolicyScorer | None:
    """Make the scorer under the policy at the start of a step, unless the engine's log-probs are used."""
    if not (record.needs_old_logprobs or record.needs_old_entropy):
        return None
    annotate = annotator(settings, machine, policy, parallel.data, collective_forward=parallel.collective_forward)
    return OldPolicyScorer(annotate, record.needs_old_logprobs, record.needs_old_entropy)


@dataclass(frozen=True, slots=True)
class PolicyWithCritic:
    """Model directory of a checkpoint in which the critic is saved beside the policy."""

    policy: CausalPolicy
    critic: CausalCritic

    def save_pretrained(self, directory: Path) -> None:
        """The policy in `directory`, the critic in `directory`/critic, both complete."""
        self.policy.save_pretrained(directory)
        self.critic.save_pretrained(directory / "critic")

    def snapshot(self, copy: Callable[[str, Tensor], Tensor]) -> Callable[[Path], None]:
        """`save_pretrained` of the weights as they are now, copied by `copy`."""
        write_policy = self.policy.snapshot(copy)
        # the prefix keeps the copies apart: both models may have tensors of one name
        write_critic = self.critic.snapshot(lambda name, tensor: copy(f"critic/{name}", tensor))

        def write(directory: Path) -> None:
            write_policy(directory)
            write_critic(directory / "critic")

        return write

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of policy and critic, the critic's as "critic.NAME"."""
        yield from self.policy.named_parameters()
        yield from ((f"critic.{name}", parameter) for name, parameter in self.critic.named_parameters())

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the policy's token log-probabilities."""
        return self.policy.token_logprobs(tokens, **options)


@dataclass(frozen=True, slots=True)
class BuiltCritic:
    """The critic with its optimizer, and the parts of it that a checkpoint holds."""

    critic: CausalCritic
    parallel: ParallelModel[WrappedCritic]
    part: CriticTrainer

    @property
    def tensor_parts(self) -> dict[str, StatefulTensors]:
        """Tensors of the critic in a checkpoint: weights and optimizer state, by component."""
        return {"critic": self.parallel.weights, "critic_optimizer": self.parallel.optimizer}


def build_critic(
    settings: RlSettings,
    machine: Machine,
    record: PolicyAlgorithm,
    tokenizer: HfTokenizer,
    restored: ResumePoint | None,
    micro_batching: MicroBatching,
    learning_rate: Callable[[int], float],
    guards: Mapping[str, NumericGuard],
) -> BuiltCritic | None:
    """The critic that the algorithm needs, if it needs one; with `restored`, exactly where that checkpoint was."""
    if not record.advantage.needs_values:
        return None
    chosen, batch = settings.critic, settings.batch
    critic = load_critic(
        chosen.critic_pretrain or settings.model.pretrain,
        head_prefix=chosen.value_head_prefix,
        seed=settings.run.seed,
        dtype=torch.bfloat16 if settings.model.bf16 else torch.float32,
        device=machine.device,
        gradient_checkpointing=checkpointing_of(settings.model),
        flash_attn=settings.model.flash_attn,
        tokenizer=None if chosen.critic_pretrain else tokenizer,
    ).train()
    adapt_critic(critic, settings.adapter, seed=settings.run.seed)
    if restored is not None:
        # before it is sharded: an optimizer may copy the weights that it finds
        restored.checkpoint.load("critic", ShardedWeights(critic.named_parameters, machine.ranks.rank))
    # the variant for critics: every rank computes whole sequences with whole matrices
    strategy = choose_strategy(settings.strategy).critic(settings.strategy)
    parallel = parallelize(
        ShardableCritic(critic), strategy, settings.optimizer, machine, restored, component="critic_optimizer"
    )
    part = CriticTrainer(
        ValueAnnotator(
            parallel.model,
            machine.collectives,
            max_sequences=batch.micro_rollout_batch_size,
            max_tokens=batch.max_tokens_per_micro_batch,
            device=machine.device,
            collective_forward=parallel.collective_forward,
        ),
        Updater(
            ValueLoss(parallel.model, ValueObjective(clip=chosen.value_clip or None, aggregation="token_mean")),
            parallel.optimizer,
            machine.collectives,
            micro_batching=micro_batching,
            learning_rate=learning_rate,
            guard=guards["critic"],
            trace=make_tracer(parallel, machine),
            device=machine.device,
            pin_memory=settings.data.dataloader_pin_memory,
            collective_forward=parallel.collective_forward,
            sample=parallel.sample,
        ),
    )
    return BuiltCritic(critic, parallel, part)
