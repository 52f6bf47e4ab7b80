"""What a person chooses about a run: data, batches, rewards, the algorithm, evaluation, records.

Groups that several commands share are base classes, so that a command offers only settings that
have an effect in it. Metadata keys of a field, read by the command line: `minimum`, `maximum`
(inclusive), `above` (exclusive), `bare` (the value of the flag given without one). No torch is
imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AdvantageEstimator = Literal["group_norm", "grpo"]
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class PromptTextSettings:
    """How a row of data becomes a prompt."""

    input_key: str = "input"
    """Column that holds the prompt (text, or a list of chat messages)."""

    input_template: str = ""
    """Text around the prompt, with {} where the prompt goes; empty = the prompt as it is."""

    apply_chat_template: bool = False
    """Render the prompt with the tokenizer's chat template."""

    system_prompt: str = ""
    """System message put before the prompt (with `apply_chat_template`); empty = none."""


@dataclass(frozen=True, kw_only=True)
class HeldOutSettings(PromptTextSettings):
    """The held-out rows."""

    eval_data: str = ""
    """Held-out data: a .jsonl, .json, .csv or .parquet file, a pattern, or a directory."""

    eval_split: str = "test"
    """Split of `eval_data` to use, where it has splits."""

    max_eval_samples: int = field(default=500, metadata={"minimum": 0})
    """Held-out rows used; 0 = all."""


@dataclass(frozen=True, kw_only=True)
class EvalDataSettings(HeldOutSettings):
    """The held-out rows, with their answers."""

    label_key: str = "label"
    """Column that holds the answer a reward compares with."""


@dataclass(frozen=True, kw_only=True)
class TrainRowsSettings:
    """The rows to train on, and how they are read."""

    prompt_data: str = ""
    """Training data: a file, a pattern or a directory; several joined by commas."""

    prompt_data_probs: str = ""
    """Shares of the several `prompt_data`, joined by commas; empty = by their sizes."""

    prompt_split: str = "train"
    """Split of `prompt_data` to use, where it has splits."""

    max_samples: int = field(default=0, metadata={"minimum": 0})
    """Training rows used; 0 = all."""

    num_workers: int = field(default=0, metadata={"minimum": 0})
    """Threads that render and tokenize rows; 0 = the main thread."""

    prefetch_factor: int = field(default=2, metadata={"minimum": 1})
    """Batches each of these threads prepares ahead (with `num_workers`)."""

    dataloader_pin_memory: bool = False
    """Put prepared batches into page-locked memory (faster copies to a GPU)."""


@dataclass(frozen=True, kw_only=True)
class DataSettings(EvalDataSettings, TrainRowsSettings):
    """Prompts to train on and to evaluate on."""


@dataclass(frozen=True, kw_only=True)
class SftDataSettings(HeldOutSettings, TrainRowsSettings):
    """Demonstrations to train on and to evaluate on."""

    output_key: str = "output"
    """Column that holds the response to learn."""

    held_out_rows: int = field(default=0, metadata={"minimum": 0})
    """Training rows, chosen by the seed, that are kept out of training and give the held-out loss; 0 = none."""


@dataclass(frozen=True, kw_only=True)
class BuildDataSettings:
    """The texts that a tokenizer is learned from."""

    texts: str
    """Files of texts, joined by commas: .txt as it is, or a file of rows with `text_keys`."""

    text_keys: str = "text"
    """Columns of the rows that hold texts, joined by commas."""


@dataclass(frozen=True, kw_only=True)
class GenerateDataSettings(PromptTextSettings):
    """What to answer, and where the answers go."""

    prompt: str = ""
    """One prompt given as text; empty = the rows of `prompt_data`."""

    prompt_data: str = ""
    """Prompts to answer: a file, a pattern or a directory."""

    prompt_split: str = "train"
    """Split of `prompt_data` to use, where it has splits."""

    max_samples: int = field(default=0, metadata={"minimum": 0})
    """Prompts answered; 0 = all."""

    n_samples_per_prompt: int = field(default=1, metadata={"minimum": 1})
    """Completions drawn for each prompt."""


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How much is sampled and trained on in a step, and how the work is cut (the cut changes no result)."""

    rollout_batch_size: int = field(default=64, metadata={"minimum": 1})
    """Prompts sampled at a time, over all ranks."""

    n_samples_per_prompt: int = field(default=8, metadata={"minimum": 1})
    """Responses drawn for each prompt: the group that an advantage is relative to."""

    train_batch_size: int = field(default=512, metadata={"minimum": 1})
    """Responses in one optimizer step, over all ranks."""

    micro_train_batch_size: int = field(default=8, metadata={"minimum": 1})
    """Responses in one forward and backward pass of a rank."""

    micro_rollout_batch_size: int = field(default=8, metadata={"minimum": 1})
    """Responses in one forward pass for log-probabilities without gradient."""

    max_tokens_per_micro_batch: int = field(default=0, metadata={"minimum": 0})
    """Cap on the tokens of one forward pass; 0 = only the two sizes above count."""

    packing_samples: bool = False
    """Fill each forward pass up to its cap on tokens instead of counting sequences. The step is the same."""

    max_epochs: int = field(default=1, metadata={"minimum": 1})
    """Passes over each batch of rollouts."""

    num_episodes: int = field(default=1, metadata={"minimum": 1})
    """Passes over all prompts."""

    max_steps: int = field(default=0, metadata={"minimum": 0})
    """Steps (one or more rollouts and their updates) after which the run ends; 0 = when the episodes end."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """What judges a response."""

    reward: str = "exact"
    """A reward's name, or a function of your own as file.py:function."""

    reward_workers: int = field(default=1, metadata={"minimum": 1})
    """Processes that compute rewards."""

    reward_timeout: float = field(default=10.0, metadata={"above": 0.0})
    """Seconds one response may take to judge; beyond it the reward has failed and is not a 0."""


@dataclass(frozen=True, kw_only=True)
class RlRewardSettings(RewardSettings):
    """What judges a response, and the control experiment."""

    shuffle_rewards: bool = False
    """Control: the rewards change places within each group, so that they carry no information."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """How rewards become an update of the policy."""

    advantage_estimator: AdvantageEstimator = "group_norm"
    """The published algorithm, whole; grpo is another name of group_norm."""

    eps_clip: float = field(default=0.2, metadata={"above": 0.0, "below": 1.0})
    """The probability ratio is clipped below at 1 - eps_clip."""

    eps_clip_high: float | None = field(default=None, metadata={"above": 0.0})
    """The probability ratio is clipped above at 1 + eps_clip_high; none = as eps_clip."""

    loss_agg_mode: LossAggregation = "seq-mean-token-mean"
    """How per-token losses are averaged over tokens and sequences; -norm divides by generate_max_len."""

    kl_estimator: KlEstimator = "k3"
    """Estimator of the divergence from the reference policy."""

    init_kl_coef: float = field(default=0.0, metadata={"minimum": 0.0})
    """Weight of that divergence; 0 = no reference policy is loaded."""

    use_kl_loss: bool = False
    """Put the divergence into the loss; off = into the reward."""

    entropy_coef: float = field(default=0.0, metadata={"minimum": 0.0})
    """Weight of the entropy bonus in the loss; 0 = none."""

    filter_groups: bool = False
    """Leave groups whose responses all have the same reward out of the denominators too."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """When the held-out rows are scored."""

    eval_steps: int = field(default=-1, metadata={"minimum": -1})
    """Steps between evaluations, beside those at the start and the end; -1 = once an episode (epoch); 0 = never."""


@dataclass(frozen=True, kw_only=True)
class SeedSettings:
    """What makes a command repeatable and explainable."""

    seed: int = field(default=42, metadata={"minimum": 0})
    """Start of every random draw: the same seed gives the same run."""

    debug: bool = False
    """Report collectives, kernels and native crashes in detail (slower)."""


@dataclass(frozen=True, kw_only=True)
class RunSettings(SeedSettings):
    """What a run is called and what it reports."""

    run_name: str = ""
    """Name of the run; empty = <recipe>-<date>-<word>."""

    log_interval: int = field(default=1, metadata={"minimum": 1})
    """Steps between printed lines."""

    max_refused_steps: int = field(default=3, metadata={"minimum": 0})
    """Updates in a row that may be refused for non-finite gradients before the run stops."""

    use_wandb: str = field(default="", metadata={"bare": "rft"})
    """Project of Weights & Biases to report to; bare = rft; empty = none. The key is read from WANDB_API_KEY."""

    wandb_org: str = ""
    """Team or user of Weights & Biases that owns the project."""

    wandb_group: str = ""
    """Group of runs of Weights & Biases."""

    wandb_run_name: str = ""
    """Name of the run at Weights & Biases; empty = the run's own."""

    use_tensorboard: str = field(default="", metadata={"bare": "tensorboard"})
    """Directory of TensorBoard event files; bare = tensorboard; empty = none."""

    use_trackio: str = field(default="", metadata={"bare": "rft"})
    """Project of trackio to report to; bare = rft; empty = none."""


@dataclass(frozen=True, kw_only=True)
class RlRunSettings(RunSettings):
    """What a run is called, what it reports, and when it gives up."""

    save_trajectories: bool = True
    """Write prompts, responses and rewards to rollouts/step_N.jsonl."""

    num_trajectories_to_save: int = field(default=10, metadata={"minimum": 1})
    """Responses written for a step (with `save_trajectories`)."""

    rollout_log_interval: int = field(default=10, metadata={"minimum": 1})
    """Steps between two such files (with `save_trajectories`)."""

    max_unscored_share: float = field(default=0.1, metadata={"minimum": 0.0, "maximum": 1.0})
    """Share of a step's rewards that may fail before the run stops."""


@dataclass(frozen=True, kw_only=True)
class SftTrainingSettings:
    """How long and in what batches demonstrations are learned."""

    learning_rate: float = field(default=1e-5, metadata={"above": 0.0})
    """Peak learning rate."""

    max_epochs: int = field(default=3, metadata={"minimum": 1})
    """Passes over the training rows."""

    max_steps: int = field(default=0, metadata={"minimum": 0})
    """Optimizer steps after which the run ends; 0 = when the epochs end."""

    train_batch_size: int = field(default=32, metadata={"minimum": 1})
    """Sequences in one optimizer step, over all ranks."""

    micro_train_batch_size: int = field(default=8, metadata={"minimum": 1})
    """Sequences in one forward and backward pass of a rank."""

    max_tokens_per_micro_batch: int = field(default=0, metadata={"minimum": 0})
    """Cap on the tokens of one forward pass; 0 = only the size above counts."""

    packing_samples: bool = False
    """Fill each forward pass up to its cap on tokens instead of counting sequences. The step is the same."""

    max_len: int | None = field(default=None, metadata={"minimum": 2})
    """Longest sequence, in tokens; longer rows are refused and counted; none = what the model can take."""

    patience: int = field(default=0, metadata={"minimum": 0})
    """Evaluations without a better held-out loss after which the run ends, with the best weights; 0 = never early."""

    min_improvement: float = field(default=0.0, metadata={"minimum": 0.0})
    """Fall of the held-out loss, in nats a token, that counts as better (with `patience`)."""

    target_loss: float = field(default=0.0, metadata={"minimum": 0.0})
    """Held-out loss, in nats a token, at which the run ends; 0 = at none."""


@dataclass(frozen=True, kw_only=True)
class OutputSettings(SeedSettings):
    """Where the answers of a command that trains nothing go."""

    output: str = ""
    """File for one JSON line per completion; empty = only the summary is printed."""
