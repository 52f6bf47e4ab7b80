"""Batch sizes: prompts, samples and sequences of a step. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Batch sizes of sampling and training, and the split into micro-batches (which changes no result)."""

    rollout_batch_size: int = field(default=64, metadata={"minimum": 1})
    """Prompts sampled in one rollout, over all ranks."""

    n_samples_per_prompt: int = field(default=8, metadata={"minimum": 1})
    """Responses sampled for each prompt; they form the group within which advantages are computed."""

    train_batch_size: int = field(default=512, metadata={"minimum": 1})
    """Responses in one optimizer step, over all ranks."""

    micro_train_batch_size: int = field(default=8, metadata={"minimum": 1})
    """Responses in one forward and backward pass of a rank."""

    micro_rollout_batch_size: int = field(default=8, metadata={"minimum": 1})
    """Responses in one forward pass for log-probabilities without gradient."""

    max_tokens_per_micro_batch: int = field(default=0, metadata={"minimum": 0})
    """Maximum number of tokens in one forward pass; 0 = only the two sizes above limit it."""

    packing_samples: bool = False
    """Fill each forward pass up to its maximum number of tokens instead of counting sequences. The result of the step
    is the same."""

    max_epochs: int = field(default=1, metadata={"minimum": 1})
    """Passes over each batch of rollouts."""

    num_episodes: int = field(default=1, metadata={"minimum": 1})
    """Passes over all prompts."""

    max_steps: int = field(default=0, metadata={"minimum": 0})
    """Steps (one or more rollouts and their updates) after which the run ends; 0 = it ends with the episodes."""
