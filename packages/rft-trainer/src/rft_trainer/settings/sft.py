"""Supervised fine-tuning: epochs, learning rate, loss. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SequenceTrainingSettings:
    """Epochs, batch sizes and early stopping of training on sequences."""

    learning_rate: float = field(default=1e-5, metadata={"above": 0.0})
    """Peak learning rate."""

    max_epochs: int = field(default=3, metadata={"minimum": 1})
    """Passes over the training rows."""

    max_steps: int = field(default=0, metadata={"minimum": 0})
    """Optimizer steps after which the run ends; 0 = it ends with the epochs."""

    train_batch_size: int = field(default=32, metadata={"minimum": 1})
    """Sequences in one optimizer step, over all ranks."""

    micro_train_batch_size: int = field(default=8, metadata={"minimum": 1})
    """Sequences in one forward and backward pass of a rank."""

    max_tokens_per_micro_batch: int = field(default=0, metadata={"minimum": 0})
    """Maximum number of tokens in one forward pass; 0 = only the size above limits it."""

    packing_samples: bool = False
    """Fill each forward pass up to its maximum number of tokens instead of counting sequences. The result of the step
    is the same."""

    max_len: int | None = field(default=None, metadata={"minimum": 2})
    """Maximum length of a sequence, in tokens; longer rows are refused and counted; none = what the model can take."""

    patience: int = field(default=0, metadata={"minimum": 0})
    """Evaluations without a better held-out loss after which the run ends, with the best weights; 0 = never early."""

    min_improvement: float = field(default=0.0, metadata={"minimum": 0.0})
    """Fall of the held-out loss, in nats a token, that counts as better (with `patience`)."""

    target_loss: float = field(default=0.0, metadata={"minimum": 0.0})
    """Held-out loss, in nats a token, at which the run ends; 0 = at none."""


@dataclass(frozen=True, kw_only=True)
class SftTrainingSettings(SequenceTrainingSettings):
    """Epochs, batch sizes, loss and early stopping of supervised fine-tuning."""

    label_smoothing: float = field(default=0.0, metadata={"minimum": 0.0, "below": 1.0})
    """Share e of each target that the whole vocabulary has: the loss of a token is -(1 - e) log p(token) - e times the
    mean of log p over the vocabulary."""

    z_loss_coef: float = field(default=0.0, metadata={"minimum": 0.0})
    """Weight of (log Z)^2 of each learned token in the loss, Z the sum of exp(logit); PaLM has 1e-4."""

    neftune_noise_alpha: float = field(default=0.0, metadata={"minimum": 0.0})
    """Noise on the embeddings while training: uniform in +- alpha / sqrt(tokens of the sample x width); 0 = none."""
