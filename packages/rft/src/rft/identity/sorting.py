"""Sorting of settings by how they count in the identity of a run. No torch is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


DECIDES = _names("""
    actor_learning_rate adam_betas adam_epsilon advantage_clip advantages_norm amp amp_dtype apply_chat_template
    async_deterministic aux_loss_coef balance_bias_rate balance_bias_rate_end beta bf16
    center_rewards_coefficient choice_options_key
    chosen_key ckpt_partial ckpt_weights_only code_memory code_seconds completion_key completions_key constraint
    constraint_logprobs cpo_alpha critic_learning_rate desirable_weight discopop_tau dropout dual_clip
    dynamic_sampling dynamic_sampling_rounds ema_decay enable_ema engine_fp8 engine_type entropy_coef entropy_target
    eps_clip eps_clip_high eval_beams eval_input_key eval_label_key eval_n eval_output_key eval_split eval_steps
    eval_temperature f_alpha f_divergence family ffn_hidden_size filter_groups first_token_temperature format_tags
    fp16 freeze_prefix freezing_actor_steps fuzzy_measure gamma generate_max_len group_source heads_types
    heads_weights held_out_rows held_out_share hidden_size high_entropy_token_ratio images_key init_kl_coef init_std
    input_key input_template judge_max_new_tokens judge_model judge_pattern judge_range judge_url kl_estimator
    kl_horizon kl_target l2 l2_factors label_key label_smoothing labels_key lambd lambd_value ld_alpha learning_rate
    length_alpha length_penalty length_range length_slack length_unit limit_mm_image_per_prompt load_in_4bit
    lora_alpha lora_dropout lora_rank lora_type loss_agg_mode loss_type loss_weights lr_decay_ratio lr_decay_tokens
    lr_factors lr_schedule lr_warmup_ratio lr_warmup_steps lr_warmup_tokens margin margin_key mask_documents
    mask_truncated_completions max_epochs max_eval_samples max_len max_logprob_gap max_norm max_norm_spike
    max_pixels max_rows_set_aside max_samples max_seq_len max_staleness max_steps max_turns min_improvement
    min_lr_ratio min_p min_pixels mixed_mm_data n_samples_per_prompt neftune_noise_alpha num_episodes num_experts
    num_heads num_kv_heads num_layers number_relative_tolerance number_tolerance off_policy_cap
    off_policy_correction off_policy_delta off_policy_high off_policy_limit off_policy_low off_policy_normalize
    off_policy_veto on_reward_outage optimizer outcome_key output_key overlong_buffer overlong_buffer_len
    overlong_buffer_penalty_factor pass_k patience policy_loss pooling_method pretrain_data_probs pretrain_input_key
    pretrain_output_key pretrain_split pretrain_text_key probing_layer prompt_data_probs prompt_max_len prompt_split
    ptx_coef reference_free rejected_key remote_rm_url response_language response_pattern response_pattern_match
    reward_clip reward_routes reward_running_norm reward_running_norm_minus_mean reward_source_key reward_timeout
    reward_weights roles_to_train rollout_batch_size rollout_timeout router_z_loss_coef rpo_alpha scale_for_train
    seed shared_experts shuffle_images shuffle_rewards simpo_gamma step_reduction step_separator system_prompt
    target_loss target_modules task_instruction teacher_kl_coef temperature text_key text_separator tie_embeddings
    tie_margin tokenizer tokenizer_size tool_call_pattern tool_timeout top_k top_p train_batch_size
    train_batch_tokens train_on_last_step_only train_on_turns train_only_tokens_from train_tokens turn_gamma
    turn_max_len undesirable_weight use_cpg_loss use_fire use_glu use_gmpo use_gspo use_kl_loss use_moe use_mp_opt
    use_weighting value_clip value_head_prefix vocab_size weight_key z_loss_coef
""")
"""Another value gives another result: it is changed by a flag of a resume, or knowingly."""

CONTENT = _names("""
    advantage_estimator ckpt_path critic_pretrain environment eval_data json_schema judge_pretrain judge_template
    model_code pretrain pretrain_data prompt_data reference_pretrain reward reward_pretrain teacher_pretrain
""")
"""They name files or code: what these hold is compared, not where they lie."""

FREE = _names("""
    adam_offload async_save chunk_size compile data_store data_store_max_gb data_store_path data_store_workers
    dataloader_pin_memory debug depth device enable_engine_sleep engine_enforce_eager engine_max_rows engine_mem_util
    engine_replicas engine_tp_size environment_memory environment_variables environment_workers ep_size eval_k
    eval_metrics eval_pick fallback_save_path fingerprint_steps fit_memory flash_attn fsdp fsdp_cpu_offload
    fused_linear_logprob gradient_checkpointing gradient_checkpointing_every gradient_checkpointing_mode
    heartbeat_seconds keep_best log_interval max_ckpt_mem max_ckpt_num max_refused_steps max_rollbacks
    max_tokens_per_micro_batch max_unscored_share memory_limit_gb meta_init micro_rollout_batch_size
    micro_train_batch_size nproc num_trajectories_to_save num_workers on_alarm overlap_comm packing_samples
    prefetch_factor profile remote_rm_batch_size remote_rm_concurrency remote_rm_retries remote_rm_timeout restarts
    reward_batch_tokens reward_memory reward_offload reward_random reward_variables reward_wait reward_workers
    rollout_log_interval run_name sample_texts sample_tokens save_interval save_minutes save_model_only save_steps
    save_trajectories save_value_network shard_size sp_mode sp_size token_records token_records_mib tp_size use_mlflow
    use_tensorboard use_trackio use_wandb wandb_group wandb_org wandb_run_name watchdog_collective_seconds
    watchdog_first_seconds watchdog_seconds weight_check_steps zero_stage zpg
""")
"""They change speed, memory, reports or the limits at which a run stops: free at every resume, and recorded."""

OF_ONE_START = _names("accept_changes load_checkpoint save_path")
"""They belong to one start of the program and are no part of a run's record."""


def decides(name: str) -> bool:
    """Return whether the value of a setting decides the result; one that no list names does, to be safe."""
    return name not in CONTENT and name not in FREE and name not in OF_ONE_START


def is_recorded(name: str) -> bool:
    """Return whether the record of a run holds the setting."""
    return name not in OF_ONE_START


@dataclass(frozen=True, slots=True)
class Fixed:
    """A setting that the state in a checkpoint follows from."""

    why: str
    differs: Callable[[Any, Any], bool] = lambda before, after: before != after
    """Whether a run cannot go from the first value to the second."""
    from_weights: bool = True
    """Whether a new run may take over the weights under the other value."""


def _is_turned(before: Any, after: Any) -> bool:
    """Return whether one of the two is on and the other off."""
    return bool(before) != bool(after)


_HEAD = "the head in the checkpoint is another one"
_TRAINED = "the optimizer's state in the checkpoint is that of other parameters"
FIXED: Mapping[str, Fixed] = {
    "seed": Fixed("the order of the prompts, of which a part is trained already, follows from the seed"),
    "max_staleness": Fixed(
        "rollouts that run ahead are part of a checkpoint, and a run that waits for each step has none of them",
        _is_turned,
    ),
    "lora_rank": Fixed(_TRAINED, from_weights=False),
    "lora_type": Fixed(_TRAINED, from_weights=False),
    "target_modules": Fixed(_TRAINED, from_weights=False),
    "freeze_prefix": Fixed(_TRAINED),
    "train_only_tokens_from": Fixed(_TRAINED),
    "pooling_method": Fixed(_HEAD),
    "probing_layer": Fixed(_HEAD),
    "scale_for_train": Fixed(_HEAD),
    "heads_types": Fixed(_HEAD),
    "enable_ema": Fixed("the average begins with the first step of a run", _is_turned),
}
"""Settings that no resume can change, by name."""

_DECODER = Fixed(
    "the weights and moments in the checkpoint are those of the decoder that it describes", from_weights=False
)
FIXED_OF: Mapping[str, Mapping[str, Fixed]] = {
    "pretrain": dict.fromkeys(
        _names("""
            dropout family ffn_hidden_size hidden_size init_std max_seq_len num_experts num_heads num_kv_heads
            num_layers shared_experts tie_embeddings tokenizer tokenizer_size top_k use_glu use_moe vocab_size
        """),
        _DECODER,
    )
}
"""The same of one command alone, in which a name may mean another thing than elsewhere."""


def fixed_setting(command: str, name: str) -> Fixed | None:
    """Return why no resume of the command can change the setting; None where it may."""
    return FIXED.get(name) or FIXED_OF.get(command, {}).get(name)
