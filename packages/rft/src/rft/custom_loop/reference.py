"""The reference policy of a loop: the weights that its training began with, which are never trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rft.custom_loop.settings import LoopSettings
from rft.parallel.parallelize import ParallelModel, held_dtype, is_sharded, parallelize
from rft.parallel.shardable import ShardablePolicy
from rft.process.machine import Machine
from rft_dist.strategies.registry import choose_strategy
from rft_models.lora.adapters import BaseModelView
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_reference
from rft_models.policy.load_for_training import head_chunk_size
from rft_models.policy.load_on_meta import load_reference_on_meta
from rft_trainer.scoring.logprobs import LogprobScorer


def reference_scorer(
    settings: LoopSettings, machine: Machine, parallel: ParallelModel[CausalPolicy]
) -> Callable[[float], LogprobScorer]:
    """Return a function from a temperature to the scorer under the reference policy."""
    policy: Any
    if parallel.model.adapters is not None:
        # the adapters are turned off for its forward, so no second model is loaded
        policy, data, collective = BaseModelView(parallel.model), parallel.data, parallel.collective_forward
    else:
        load = load_reference_on_meta if settings.strategy.meta_init else load_reference
        # on a resume as well: the reference stays the start of the training, whatever the policy has become
        policy = load(
            settings.model.pretrain,
            dtype=held_dtype(settings.strategy, bf16=settings.model.bf16),
            device=machine.device,
            flash_attn=settings.model.flash_attn,
            head_chunk_size=head_chunk_size(settings.model),
        )
        strategy = choose_strategy(settings.strategy).reference(settings.strategy)
        data = parallelize(ShardablePolicy(policy), strategy, None, machine).data
        collective = is_sharded(settings.strategy)

    def scorer(temperature: float) -> LogprobScorer:
        return LogprobScorer(
            policy,
            data,
            max_sequences=settings.batch.micro_rollout_batch_size,
            max_tokens=settings.batch.max_tokens_per_micro_batch,
            temperature=temperature,
            device=machine.device,
            collective_forward=collective,
        )

    return scorer
