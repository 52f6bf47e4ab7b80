"""What a person chooses about a run: data, batches, rewards, the algorithm, evaluation, records.

Groups that several commands share are base classes, so that a command offers only settings that
have an effect in it. Metadata keys of a field, read by the command line: `minimum`, `maximum`
(inclusive), `above` (exclusive), `bare` (the value of the flag given without one). No torch is
imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PolicyLoss = Literal[
    "ppo",
    "dual_clip",
    "gspo",
    "gspo_token",
    "gmpo",
    "cispo",
    "sapo",
    "cpgd",
    "reinforce",
    "importance_weighted",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "kimi",
]
OffPolicyCorrection = Literal["off", "tis", "seq-tis", "mis", "icepop", "seq-mis", "geo-mis"]
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
class ConformanceDataSettings(GenerateDataSettings):
    """The prompts that engines continue; without any, a few short texts that are built in."""

    max_samples: int = field(default=16, metadata={"minimum": 0})
    """Prompts used; 0 = all."""

    n_samples_per_prompt: int = field(default=4, metadata={"minimum": 1})
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

    reward: str = ""
    """A reward's name, or a function of your own as file.py:function; empty = exact, or none beside a reward model or
    a judge."""

    reward_workers: int = field(default=1, metadata={"minimum": 1})
    """Processes that compute rewards."""

    reward_timeout: float = field(default=10.0, metadata={"above": 0.0})
    """Seconds one response may take to judge; beyond it the reward has failed and is not a 0."""

    reward_weights: str = ""
    """Weights of a reward's parts, as correctness=0.9,format=0.1; empty = the reward's own sum."""


@dataclass(frozen=True, kw_only=True)
class RlRewardSettings(RewardSettings):
    """What judges a response, and the control experiment."""

    shuffle_rewards: bool = False
    """Control: the rewards change places within each group, so that they carry no information."""


@dataclass(frozen=True, kw_only=True)
class SurrogateSettings:
    """What is minimised token by token. What is left out is that of the published algorithm."""

    policy_loss: PolicyLoss | None = None
    """The surrogate."""

    use_gspo: bool = False
    """The same as `policy_loss` gspo."""

    use_gmpo: bool = False
    """The same as `policy_loss` gmpo."""

    use_cpg_loss: bool = False
    """The same as `policy_loss` cpgd."""

    eps_clip: float | None = field(default=None, metadata={"above": 0.0, "below": 1.0})
    """How far below 1 the probability ratio may go (in log space for gmpo, in probability for dppo)."""

    eps_clip_high: float | None = field(default=None, metadata={"above": 0.0})
    """How far above 1 it may go; left out beside a given eps_clip: as that."""

    dual_clip: float | None = field(default=None, metadata={"above": 1.0})
    """Second bound of the loss where the advantage is negative (with `policy_loss` dual_clip)."""

    loss_agg_mode: LossAggregation | None = None
    """How per-token losses are averaged over tokens and sequences; -norm divides by generate_max_len."""

    high_entropy_token_ratio: float = field(default=0.0, metadata={"minimum": 0.0, "below": 1.0})
    """Share of tokens, those of highest entropy over the batch, that the surrogate learns from; 0 = all."""

    entropy_coef: float | None = field(default=None, metadata={"minimum": 0.0})
    """Weight of the entropy bonus in the loss; 0 = none."""

    entropy_target: float | None = field(default=None, metadata={"minimum": 0.0})
    """Entropy in nats a token towards which the weight of the bonus is moved (with `entropy_coef`)."""


@dataclass(frozen=True, kw_only=True)
class DivergenceSettings:
    """Distance from the reference policy, and between the engine's policy and the trainer's."""

    kl_estimator: KlEstimator | None = None
    """Estimator of the divergence from the reference policy."""

    init_kl_coef: float | None = field(default=None, metadata={"minimum": 0.0})
    """Weight of that divergence (of the drift, for an algorithm that has one); 0 = no reference policy is loaded."""

    use_kl_loss: bool | None = None
    """Put the divergence into the loss; no = into the reward."""

    kl_target: float | None = field(default=None, metadata={"above": 0.0})
    """Divergence in nats a token towards which its weight is moved; none = the weight is constant."""

    kl_horizon: int = field(default=10_000, metadata={"minimum": 1})
    """Samples over which that weight can double or so (with `kl_target`)."""

    max_logprob_gap: float = field(default=0.1, metadata={"minimum": 0.0})
    """Mean distance of the engine's log-probs from the trainer's, in nats a token, that stops the run; 0 = no limit."""

    off_policy_correction: OffPolicyCorrection | None = None
    """Weights for the distance between the engine's log-probs and the trainer's at the start of a step."""

    off_policy_cap: float = field(default=2.0, metadata={"minimum": 1.0})
    """Largest weight (with tis and seq-tis)."""

    off_policy_low: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Ratios below it get weight 0 (with mis, seq-mis and geo-mis)."""

    off_policy_high: float | None = field(default=None, metadata={"minimum": 1.0})
    """Ratios above it get weight 0 (with mis, seq-mis and geo-mis)."""

    off_policy_delta: float | None = field(default=None, metadata={"minimum": 0.0})
    """Sequences of negative advantage whose log-prob fell by more nats a token are left out; none = none are."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings(DivergenceSettings, SurrogateSettings):
    """How rewards become an update of the policy. What is left out is that of the published algorithm."""

    advantage_estimator: str = "group_norm"
    """The published algorithm, whole (rft-train check prints it), or one of your own as file.py:Class."""

    gamma: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Discount of later rewards, a token (gae, reinforce, reinforce++)."""

    lambd: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Lambda of generalised advantage estimation (gae)."""

    pass_k: int | None = field(default=None, metadata={"minimum": 1})
    """Draws of which one must be right (pass_at_k)."""

    advantages_norm: bool | None = None
    """Shift and scale advantages to mean 0 and deviation 1 over all tokens of the step."""

    advantage_clip: float = field(default=0.0, metadata={"minimum": 0.0})
    """Largest absolute advantage; 0 = no bound."""

    reward_running_norm: bool = False
    """Divide scores by their running deviation over the run."""

    reward_running_norm_minus_mean: bool = False
    """Subtract their running mean too; turns `reward_running_norm` on."""

    reward_clip: float = field(default=0.0, metadata={"minimum": 0.0})
    """Largest absolute score, after the group's comparison and the running scale; 0 = no bound."""

    overlong_buffer: bool | None = None
    """Penalise responses that come near the longest that is allowed."""

    overlong_buffer_len: int | None = field(default=None, metadata={"minimum": 1})
    """Tokens before that length in which the penalty grows; none = a fifth of it."""

    overlong_buffer_penalty_factor: float = field(default=1.0, metadata={"above": 0.0})
    """Penalty at that length, in units of reward."""

    length_penalty: bool = False
    """Within a group, prefer short right responses and penalise long ones."""

    mask_truncated_completions: bool = False
    """Learn nothing from responses that were cut off."""

    dynamic_sampling: bool | None = None
    """Replace groups whose responses all have the same reward by sampling more prompts."""

    dynamic_sampling_rounds: int = field(default=10, metadata={"minimum": 1})
    """How often a step may sample more prompts (with `dynamic_sampling`)."""

    filter_groups: bool = False
    """Leave groups whose responses all have the same reward out of the denominators too."""


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The critic, which gae needs."""

    critic_pretrain: str = ""
    """Model that the critic starts from; empty = as the policy."""

    critic_learning_rate: float = field(default=9e-6, metadata={"above": 0.0})
    """Peak learning rate of the critic."""

    value_clip: float = field(default=0.2, metadata={"minimum": 0.0})
    """How far a value may move from that at the start of the step before its loss stops to follow; 0 = no bound."""

    value_head_prefix: str = "score"
    """Name of the value head's weights in the critic's files."""

    save_value_network: bool = False
    """Write the critic as a Hugging Face directory into every checkpoint (its state is there in any case)."""

    freezing_actor_steps: int = field(default=-1, metadata={"minimum": -1})
    """Steps at the start in which only the critic is trained; -1 or 0 = none."""


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
