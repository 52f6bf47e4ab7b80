"""Training of reward models: pairs to read, loss, epochs. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rft_trainer.settings.data import HeldOutRowsSettings, StoredRowsSettings

PairLossType = Literal["sigmoid", "hps", "logexp"]
RewardLossType = Literal["sigmoid", "hps", "logexp", "steps"]


@dataclass(frozen=True, kw_only=True)
class PairColumnSettings:
    """The columns of a pair of responses."""

    input_key: str = "input"
    """Column that holds the prompt (text, or a list of chat messages); by default also any that the conventions of
    preference data name, or what both responses begin with."""

    chosen_key: str = "chosen"
    """Column that holds the better response."""

    rejected_key: str = "rejected"
    """Column that holds the worse response."""

    outcome_key: str = ""
    """Column that says which response is the better: chosen or A, rejected or B, tie or C; empty = chosen is."""


@dataclass(frozen=True, kw_only=True)
class StepColumnSettings:
    """The columns of a response whose steps are labelled, under TRL's names."""

    completions_key: str = "completions"
    """Column that holds the steps of a response, a list of texts (of a step reward model)."""

    labels_key: str = "labels"
    """Column that holds a label a step: true or 1 good, false or 0 bad, between them the probability that it is good,
    null nobody has said (of a step reward model)."""


@dataclass(frozen=True, kw_only=True)
class RmTestDataSettings(PairColumnSettings, StepColumnSettings, HeldOutRowsSettings):
    """The pairs, or the labelled steps, that a reward model is tested on."""

    eval_data: str = field(default="", metadata={"aliases": ("pairs",)})
    """Pairs, or rows of labelled steps, to score: a file, a pattern, a directory, or
    ORG/NAME[:CONFIG[:SPLIT]][@REVISION]; empty = a few sums. --pairs is the same flag."""

    max_eval_samples: int = field(default=0, metadata={"minimum": 0})
    """Number of pairs, or rows, to use; 0 = all."""


@dataclass(frozen=True, kw_only=True)
class AgreementSettings:
    """The model that a reward model is compared with."""

    agree_with: str = ""
    """Another reward model: how often both prefer the same response; empty = none."""


@dataclass(frozen=True, kw_only=True)
class PairDataSettings(PairColumnSettings, StepColumnSettings, HeldOutRowsSettings, StoredRowsSettings):
    """Pairs of responses, or responses with labelled steps, to train on and to evaluate on."""

    margin_key: str = ""
    """Column of numbers: by how much the better response should score above the worse; empty = `margin` for all."""

    weight_key: str = ""
    """Column of numbers: the weight of the pair, or of the row's steps, in the loss; empty = 1 for all."""

    held_out_rows: int = field(default=0, metadata={"minimum": 0})
    """Training pairs, or rows of steps, chosen by the seed, that are kept out of training and evaluated; 0 = none."""


@dataclass(frozen=True, kw_only=True)
class RewardTrainingSettings:
    """Loss, epochs, batch sizes and early stopping of a reward model."""

    loss_type: RewardLossType = "sigmoid"
    """Loss of a pair: sigmoid = Bradley-Terry, -log sigmoid(better - worse - margin); hps = cross-entropy over both
    scores; logexp = log(1 + exp(worse - better)). Without a margin all three are the same function. steps = a step
    (process) reward model: cross-entropy of every labelled step of a response."""

    train_on_last_step_only: bool = False
    """Learn from the label of the last step of each response alone (with `loss_type` steps); held-out rows are
    evaluated on all of theirs."""

    margin: float = field(default=0.0, metadata={"minimum": 0.0})
    """By how much the better response should score above the worse (`loss_type` sigmoid); `margin_key` reads it from
    the rows."""

    tie_margin: float = field(default=0.0, metadata={"minimum": 0.0})
    """Difference of scores that is hardly noticed (Rao-Kupper): pairs that were judged equal are learned with it, and
    it is added to every margin; 0 = a tie is an error."""

    center_rewards_coefficient: float = field(default=0.0, metadata={"minimum": 0.0})
    """Weight of the penalty (sum of both scores)^2, which keeps scores around 0; 0.01 is usual, 0 = none."""

    learning_rate: float = field(default=1e-5, metadata={"above": 0.0})
    """Peak learning rate."""

    max_epochs: int = field(default=1, metadata={"minimum": 1})
    """Passes over the training rows; a reward model overfits soon after the first."""

    max_steps: int = field(default=0, metadata={"minimum": 0})
    """Optimizer steps after which the run ends; 0 = it ends with the epochs."""

    train_batch_size: int = field(default=32, metadata={"minimum": 1})
    """Pairs (of `loss_type` steps: responses) in one optimizer step, over all ranks."""

    micro_train_batch_size: int = field(default=8, metadata={"minimum": 1})
    """Pairs (of `loss_type` steps: responses) in one forward and backward pass of a rank."""

    max_tokens_per_micro_batch: int = field(default=0, metadata={"minimum": 0})
    """Maximum number of tokens in one forward pass; 0 = only the size above limits it."""

    packing_samples: bool = False
    """Fill each forward pass up to its maximum number of tokens instead of counting pairs. The result of the step is
    the same."""

    max_len: int | None = field(default=None, metadata={"minimum": 2})
    """Maximum length of a prompt with a response, in tokens; longer pairs are left out and counted; none = what the
    model can take."""

    patience: int = field(default=0, metadata={"minimum": 0})
    """Evaluations without a better held-out loss after which the run ends, with the best weights; 0 = never early."""

    min_improvement: float = field(default=0.0, metadata={"minimum": 0.0})
    """Fall of the held-out loss that counts as better (with `patience`)."""
