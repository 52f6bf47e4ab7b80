"""What the same thing is called elsewhere: the one mapping behind docs/coming-from-trl-verl-openrlhf.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Concept:
    """One idea and its names; an empty name means that the place has none."""

    meaning: str
    flag: str
    """Our setting, without dashes."""
    code: str
    """Our name in Python."""
    trl: str
    verl: str
    openrlhf: str


CONCEPTS = (
    Concept(
        "the model to start from",
        "pretrain",
        "load_policy",
        "`model`",
        "`actor_rollout_ref.model.path`",
        "`--pretrain`",
    ),
    Concept(
        "the data to train on", "prompt_data", "Prompt", "`train_dataset`", "`data.train_files`", "`--prompt_data`"
    ),
    Concept(
        "what judges a response",
        "reward",
        "Reward",
        "`reward_funcs`",
        "`custom_reward_function.path`",
        "`--remote_rm_url`",
    ),
    Concept(
        "prompts sampled at a time",
        "rollout_batch_size",
        "prompts_per_rollout",
        "follows from the others",
        "`data.train_batch_size`",
        "`--rollout_batch_size`",
    ),
    Concept(
        "responses for each prompt",
        "n_samples_per_prompt",
        "group_size",
        "`num_generations`",
        "`actor_rollout_ref.rollout.n`",
        "`--n_samples_per_prompt`",
    ),
    Concept(
        "responses in one optimizer step",
        "train_batch_size",
        "train_batch_size",
        "`per_device_train_batch_size` x devices x `gradient_accumulation_steps`",
        "`ppo_mini_batch_size` (prompts)",
        "`--train_batch_size`",
    ),
    Concept(
        "passes over a batch of rollouts",
        "max_epochs",
        "epochs_per_step",
        "`num_iterations`",
        "`ppo_epochs`",
        "`--max_epochs`",
    ),
    Concept(
        "passes over all prompts",
        "num_episodes",
        "epoch",
        "`num_train_epochs`",
        "`trainer.total_epochs`",
        "`--num_episodes`",
    ),
    Concept(
        "responses in one forward pass",
        "micro_train_batch_size",
        "MicroBatching",
        "`per_device_train_batch_size`",
        "`ppo_micro_batch_size_per_gpu`",
        "`--micro_train_batch_size`",
    ),
    Concept(
        "tokens in one forward pass",
        "max_tokens_per_micro_batch",
        "MicroBatching",
        "",
        "`ppo_max_token_len_per_gpu`",
        "",
    ),
    Concept(
        "longest response",
        "generate_max_len",
        "max_new_tokens",
        "`max_completion_length`",
        "`data.max_response_length`",
        "`--generate_max_len`",
    ),
    Concept("longest prompt", "prompt_max_len", "prompt_max_len", "", "`data.max_prompt_length`", "`--prompt_max_len`"),
    Concept("one sampled answer", "", "Completion", "completion", "response", "response"),
    Concept("answer with its reward and status", "", "Rollout", "completion", "trajectory", "experience"),
    Concept("the rollouts of one prompt", "", "RolloutGroup", "group", "`uid` group", "group"),
    Concept(
        "mask of the tokens that are trained", "", "loss_mask", "`completion_mask`", "`response_mask`", "`action_mask`"
    ),
    Concept(
        "log-probs of the policy being trained", "", "logprobs", "`per_token_logps`", "`log_prob`", "`action_log_probs`"
    ),
    Concept(
        "log-probs of the policy that sampled",
        "",
        "behaviour_logprobs",
        "`old_per_token_logps`",
        "`rollout_log_probs`",
        "`rollout_log_probs`",
    ),
    Concept(
        "log-probs of the fixed policy",
        "",
        "reference_logprobs",
        "`ref_per_token_logps`",
        "`ref_log_prob`",
        "`base_action_log_probs`",
    ),
    Concept("log of the probability ratio", "", "log_ratio", "`log_ratio`", "`negative_approx_kl`", "`log_ratio`"),
    Concept("clip range below 1", "eps_clip", "clip_low", "`epsilon`", "`clip_ratio_low`", "`--eps_clip_low_high`"),
    Concept(
        "clip range above 1",
        "eps_clip_high",
        "clip_high",
        "`epsilon_high`",
        "`clip_ratio_high`",
        "`--eps_clip_low_high`",
    ),
    Concept("weight of the divergence", "init_kl_coef", "kl_coef", "`beta`", "`kl_loss_coef`", "`--init_kl_coef`"),
    Concept("the divergence in the loss", "use_kl_loss", "kl_place", "always", "`use_kl_loss`", "`--use_kl_loss`"),
    Concept("its estimator", "kl_estimator", "kl_estimator", "k3", "`kl_loss_type`", "`--kl_estimator`"),
    Concept("how a mean over tokens is taken", "loss_agg_mode", "aggregation", "`loss_type`", "`loss_agg_mode`", ""),
    Concept(
        "groups without a signal left out",
        "filter_groups",
        "filter_groups",
        "",
        "`filter_groups.enable`",
        "`--dynamic_filtering`",
    ),
    Concept(
        "how often to score held-out rows",
        "eval_steps",
        "eval_every",
        "`eval_steps`",
        "`trainer.test_freq`",
        "`--eval_steps`",
    ),
    Concept(
        "samples a held-out row",
        "eval_n",
        "eval_n",
        "",
        "`rollout.val_kwargs.n`",
        "`--eval_n_samples_per_prompt`",
    ),
    Concept(
        "temperature of evaluations",
        "eval_temperature",
        "",
        "",
        "`rollout.val_kwargs.temperature`",
        "`--eval_temperature`",
    ),
    Concept("checkpoints without training state", "save_model_only", "save_model_only", "`save_only_model`", "", ""),
    Concept("the best checkpoint is kept", "keep_best", "keep_best", "`load_best_model_at_end`", "", ""),
    Concept(
        "peak learning rate",
        "actor_learning_rate",
        "actor_learning_rate",
        "`learning_rate`",
        "`actor.optim.lr`",
        "`--actor_learning_rate`",
    ),
    Concept("largest gradient norm", "max_norm", "max_norm", "`max_grad_norm`", "`actor.grad_clip`", "`--max_norm`"),
)
