"""Every setting of the training commands and of `conformance` has an effect that can be seen, or is refused.

For each setting one row: a value that is not the default, and where its effect is seen when two commands that differ
in nothing else are compared. A setting without a row fails. What `rft-train check` shows is seen there, in this process
and without a run; a run is started for what only a run has.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reward_bench import RewardServers, reward_places
from support.tracker_doubles import install_trackers
from support.vision_task import make_vision_task

from rft.config.schema import schema
from rft_models.families import patches
from rft_trainer.rewards.exact import ExactReward

BENCH = "{bench}"
EARLIER = "{earlier}"
SIGNALS = f"--reward {BENCH}/reward.py:few_signals"
SPLITS = f"--prompt_data {BENCH}/splits --eval_data {BENCH}/splits"
BOTH = f"--prompt_data {BENCH}/train.jsonl,{BENCH}/other.jsonl"
LORA = "--lora_rank 4"
STORE = f"--data_store_path {BENCH}/store"
PTX = f"--pretrain_data {BENCH}/train.jsonl"
DEMONSTRATIONS = f"{BENCH}/train.jsonl,{BENCH}/other.jsonl"
WATCH = (  # one run for all five: each is seen by its own name
    "--watchdog_seconds 600 --watchdog_first_seconds 600 --watchdog_collective_seconds 60 --heartbeat_seconds 20 "
    "--fingerprint_steps 0"
)
AGAIN = "--gradient_checkpointing"
DEEP = "--pretrain {deep}"
KL = "--init_kl_coef 0.5"
PPO = "--advantage_estimator gae --critic_learning_rate 0.01"
FIRE = "--use_fire --first_token_temperature 2"
ASKED = r"--judge_template {judge.txt} --judge_pattern (\d) --judge_max_new_tokens 8 --max_unscored_share 1"
CODE = f"--reward code --max_unscored_share 1 --prompt_data {BENCH}/coded.jsonl --eval_data="
BUSY = "--remote_rm_url {server}/busy --reward_wait 0"
FAR = "--max_epochs 4 --actor_learning_rate 0.05"
MANY = "--rollout_batch_size 2"
CHAT = "--apply_chat_template --reward= --generate_max_len 80"
TALK = f"{CHAT} --environment {BENCH}/environment.py:Talker"
SLOW = f"{CHAT} --max_steps 1 --environment {BENCH}/environment.py:Slow"
LOOK = "--pretrain {seeing}/model --prompt_data {seeing}/front.jsonl --eval_data={seeing}/front.jsonl"
SEE = f"{LOOK} --images_key image"


@dataclass(frozen=True, slots=True)
class Row:
    """A value of a setting, and where it shows beside the same run without it."""

    words: str
    seen: str
    """plan or example (of `check`), rollouts, metrics, evals, weights, files, printed, calls, or refused:<code of the
    problem>."""
    given: str = ""
    """Flags of both runs."""


IMAGES = {
    "images_key": Row("--images_key image", "weights", LOOK),
    "limit_mm_image_per_prompt": Row("--limit_mm_image_per_prompt 0", "refused:data.too_many_images", SEE),
    "mixed_mm_data": Row("--mixed_mm_data", "code", f"{SEE} --prompt_data {{seeing}}/mixed.jsonl"),
    "max_pixels": Row("--max_pixels 64", "plan", SEE),
    "min_pixels": Row("--min_pixels 1024", "plan", SEE),
    "shuffle_images": Row("--shuffle_images", "weights", SEE),
}

SHARED = IMAGES | {
    "bf16": Row("--bf16", "weights"),
    "model_code": Row(f"--model_code {BENCH}/code.py", "weights"),
    "gradient_checkpointing": Row("--gradient_checkpointing", "calls:layer forwards"),
    "gradient_checkpointing_mode": Row("--gradient_checkpointing_mode selective", "calls:kept in part", AGAIN),
    "gradient_checkpointing_every": Row("--gradient_checkpointing_every 2", "calls:layer forwards", f"{AGAIN} {DEEP}"),
    "flash_attn": Row("--flash_attn", "plan"),
    "freeze_prefix": Row("--freeze_prefix model.layers", "weights"),
    "lora_rank": Row("--lora_rank 4", "files"),
    "lora_alpha": Row("--lora_alpha 64", "weights", LORA),
    "target_modules": Row("--target_modules q_proj,v_proj", "weights", LORA),
    "lora_type": Row("--lora_type dora", "weights", LORA),
    "load_in_4bit": Row("--load_in_4bit", "refused:adapters.4bit_device", LORA),
    "train_only_tokens_from": Row("--train_only_tokens_from 20", "weights"),
    "aux_loss_coef": Row("--aux_loss_coef 1.0", "weights", "--pretrain {experts}"),
    "fused_linear_logprob": Row("--fused_linear_logprob", "calls:head rows"),
    "chunk_size": Row("--chunk_size 16", "calls:head rows", "--fused_linear_logprob"),
    "prompt_data": Row(f"--prompt_data {BENCH}/other.jsonl", "plan"),
    "prompt_data_probs": Row("--prompt_data_probs 0.9,0.1", "weights", BOTH),
    "prompt_split": Row("--prompt_split test", "example", SPLITS),
    "max_samples": Row("--max_samples 3", "plan"),
    "num_workers": Row("--num_workers 2", "calls:threads"),
    "prefetch_factor": Row("--prefetch_factor 5", "calls:chunks ahead", "--num_workers 2"),
    "dataloader_pin_memory": Row("--dataloader_pin_memory", "calls:pinned"),
    "data_store": Row("--data_store on", "plan", STORE),
    "data_store_path": Row(f"--data_store_path {BENCH}/other_store", "plan", f"--data_store on {STORE}"),
    "data_store_workers": Row("--data_store_workers 3", "calls:store workers", f"--data_store on {STORE}"),
    "data_store_max_gb": Row("--data_store_max_gb 3", "calls:store gigabytes", f"--data_store on {STORE}"),
    "input_key": Row("--input_key question", "example"),
    "input_template": Row("--input_template q{}", "example"),
    "apply_chat_template": Row("--apply_chat_template", "example"),
    "system_prompt": Row("--system_prompt add", "example", "--apply_chat_template"),
    "eval_data": Row(f"--eval_data {BENCH}/other.jsonl", "evals"),
    "eval_input_key": Row("--eval_input_key question", "evals"),
    "eval_split": Row("--eval_split train", "evals", SPLITS),
    "max_eval_samples": Row("--max_eval_samples 2", "evals"),
    "train_batch_size": Row("--train_batch_size 3", "weights"),
    "micro_train_batch_size": Row("--micro_train_batch_size 2", "metrics:policy/micro_batches"),
    "max_tokens_per_micro_batch": Row("--max_tokens_per_micro_batch 24", "metrics:policy/micro_batches"),
    "packing_samples": Row("--packing_samples", "calls:micro-batches", "--micro_train_batch_size 3"),
    "max_epochs": Row("--max_epochs 1", "printed", "--max_steps 0"),
    "max_steps": Row("--max_steps 2", "metrics:step"),
    "lr_warmup_ratio": Row("--lr_warmup_ratio 0.9", "metrics:policy/learning_rate"),
    "lr_warmup_steps": Row("--lr_warmup_steps 2", "metrics:policy/learning_rate"),
    "lr_schedule": Row("--lr_schedule linear", "metrics:policy/learning_rate"),
    "lr_decay_ratio": Row("--lr_decay_ratio 0.9", "metrics:policy/learning_rate", "--lr_schedule wsd"),
    "min_lr_ratio": Row("--min_lr_ratio 0.5", "metrics:policy/learning_rate", "--lr_schedule linear"),
    "optimizer": Row("--optimizer muon", "weights"),
    "adam_betas": Row("--adam_betas 0.5 0.6", "weights"),
    "adam_epsilon": Row("--adam_epsilon 0.01", "weights"),
    "l2": Row("--l2 0.5", "weights"),
    "lr_factors": Row("--lr_factors model.layers=0.5", "weights"),
    "l2_factors": Row("--l2_factors model.embed_tokens=1", "weights", "--l2 0.5"),
    "max_norm": Row("--max_norm 0.000001", "weights"),
    "eval_steps": Row("--eval_steps 1", "evals"),
    "save_path": Row("--save_path elsewhere", "where"),
    "fallback_save_path": Row("--fallback_save_path second", "files"),
    "save_steps": Row("--save_steps 1", "files", "--max_ckpt_num 9"),
    "save_interval": Row("--save_interval 0", "files", "--max_steps 0 --max_ckpt_num 9"),
    "save_minutes": Row("--save_minutes 0.000001", "files", "--max_ckpt_num 9"),
    "save_model_only": Row("--save_model_only", "files"),
    "load_checkpoint": Row("--load_checkpoint", "metrics:step", f"--ckpt_path {EARLIER}"),
    "ckpt_path": Row(
        f"--ckpt_path {EARLIER}/checkpoints/step_1", "metrics:step", f"--load_checkpoint --ckpt_path {EARLIER}"
    ),
    "ckpt_weights_only": Row("--ckpt_weights_only", "weights", f"--ckpt_path {EARLIER}"),
    "ckpt_partial": Row("--ckpt_partial model.layers", "weights", f"--ckpt_path {EARLIER}"),
    "accept_changes": Row("--accept_changes tokenizer", "refused:identity.nothing_continued"),
    "async_save": Row("--no-async_save", "calls:saves beside"),
    "max_ckpt_num": Row("--max_ckpt_num 1", "files"),
    "max_ckpt_mem": Row("--max_ckpt_mem 1", "files", "--save_steps 1 --max_ckpt_num 9"),
    "watchdog_seconds": Row(WATCH, "calls:watch:watchdog_seconds"),
    "watchdog_first_seconds": Row(WATCH, "calls:watch:watchdog_first_seconds"),
    "watchdog_collective_seconds": Row(WATCH, "calls:watch:watchdog_collective_seconds"),
    "heartbeat_seconds": Row(WATCH, "calls:watch:heartbeat_seconds"),
    "fingerprint_steps": Row(WATCH, "calls:watch:fingerprint_steps"),
    "seed": Row("--seed 7", "weights"),
    "debug": Row("--debug", "plan"),
    "fsdp": Row("--fsdp", "files"),
    "shard_size": Row("--shard_size 1", "plan", "--fsdp"),
    "fsdp_cpu_offload": Row("--fsdp_cpu_offload", "plan", "--fsdp"),
    "zero_stage": Row("--zero_stage 2", "files"),
    "zpg": Row("--zpg 2", "plan"),
    "overlap_comm": Row("--overlap_comm", "plan"),
    "sp_size": Row("--sp_size 2", "code"),
    "sp_mode": Row("--sp_mode ring", "refused:strategy.sp_mode"),
    "tp_size": Row("--tp_size 2", "code"),
    "ep_size": Row("--ep_size 2", "code", "--pretrain {experts}"),
    "adam_offload": Row("--adam_offload", "plan"),
    "use_mp_opt": Row("--use_mp_opt", "weights"),
    "fp16": Row("--fp16", "metrics:policy/loss_scale"),
    "amp": Row("--amp --amp_dtype bf16", "weights"),
    "amp_dtype": Row("--amp_dtype fp16", "weights", "--amp"),
    "compile": Row("--compile on", "calls:compiled"),
    "meta_init": Row("--meta_init", "plan", "--fsdp"),
    "enable_ema": Row("--enable_ema", "plan"),
    "ema_decay": Row("--ema_decay 0.5", "plan", "--enable_ema"),
    "nproc": Row("--nproc 2", "calls:ranks"),
    "restarts": Row("--restarts 2", "calls:restarts"),
    "run_name": Row("--run_name mine", "where"),
    "log_interval": Row("--log_interval 2", "printed"),
    "max_refused_steps": Row("--max_refused_steps 0", "metrics:step", "--max_norm 0 {explode}"),
    "max_rows_set_aside": Row("--max_rows_set_aside 3", "calls:rows set aside"),
    "max_rollbacks": Row("--max_rollbacks 1", "calls:rollbacks"),
    "max_norm_spike": Row("--max_norm_spike 9", "calls:norm spike"),
    "weight_check_steps": Row("--weight_check_steps 1", "calls:weight checks"),
    "profile": Row("--profile 1", "calls:profiled"),
    "on_alarm": Row("--on_alarm stop", "calls:on alarm"),
    "use_wandb": Row("--use_wandb ours", "calls:wandb"),
    "wandb_org": Row("--wandb_org us", "calls:wandb", "--use_wandb ours"),
    "wandb_group": Row("--wandb_group some", "calls:wandb", "--use_wandb ours"),
    "wandb_run_name": Row("--wandb_run_name first", "calls:wandb", "--use_wandb ours"),
    "use_tensorboard": Row("--use_tensorboard events", "calls:tensorboard"),
    "use_trackio": Row("--use_trackio ours", "calls:trackio"),
    "use_mlflow": Row("--use_mlflow ours", "calls:mlflow"),
}

RL = SHARED | {
    "ep_size": Row("--ep_size 2", "refused:strategy.ep_command"),
    "lora_dropout": Row("--lora_dropout 0.5", "refused:adapters.dropout_rl", LORA),
    "pretrain": Row("--pretrain {second}", "rollouts"),
    "device": Row("--device cuda", "device"),
    "label_key": Row("--label_key more", "example"),
    "eval_label_key": Row("--eval_label_key absent", "refused:data.missing_field"),
    "eval_n": Row("--eval_n 2", "evals", "--eval_temperature 1"),
    "eval_k": Row("--eval_k 2", "evals", "--eval_n 4 --eval_temperature 1"),
    "eval_pick": Row("--eval_pick reward", "evals", "--eval_n 4 --eval_temperature 1"),
    "keep_best": Row("--keep_best", "evals"),
    "pretrain_data": Row(f"--pretrain_data {BENCH}/train.jsonl", "weights"),
    "pretrain_data_probs": Row("--pretrain_data_probs 0.9,0.1", "weights", f"--pretrain_data {DEMONSTRATIONS}"),
    "pretrain_split": Row("--pretrain_split test", "weights", f"--pretrain_data {BENCH}/splits"),
    "pretrain_input_key": Row("--pretrain_input_key question", "weights", PTX),
    "pretrain_output_key": Row("--pretrain_output_key more", "weights", PTX),
    "pretrain_text_key": Row("--pretrain_text_key input", "weights", PTX),
    "ptx_coef": Row("--ptx_coef 1", "weights", PTX),
    "eval_temperature": Row("--eval_temperature 1", "evals"),
    "eval_beams": Row("--eval_beams 2", "refused:constraint.beams_alone"),
    "eval_metrics": Row("--eval_metrics none", "refused:task.unknown"),
    "reward": Row("--reward exact", "rollouts"),
    "reward_workers": Row("--reward_workers 2", "calls:scorers"),
    "reward_timeout": Row("--reward_timeout 0.01", "code", f"--reward {BENCH}/reward.py:slow"),
    "reward_memory": Row("--reward_memory 0.1", "code", f"--reward {BENCH}/reward.py:large"),
    "code_seconds": Row("--code_seconds 3", "calls:code limits", CODE),
    "code_memory": Row("--code_memory 0.25", "calls:code limits", CODE),
    "reward_variables": Row("--reward_variables A_*", "rollouts", f"--reward {BENCH}/reward.py:counts_secrets"),
    "reward_routes": Row("--reward_routes *=math", "plan"),
    "reward_source_key": Row("--reward_source_key more", "refused:reward.no_route", "--reward_routes train=exact"),
    "number_tolerance": Row("--number_tolerance 100", "plan", "--reward numeric"),
    "number_relative_tolerance": Row("--number_relative_tolerance 1", "plan", "--reward numeric"),
    "fuzzy_measure": Row("--fuzzy_measure ratio", "plan", "--reward fuzzy"),
    "choice_options_key": Row("--choice_options_key more", "plan", "--reward choice"),
    "format_tags": Row("--format_tags plan", "plan", "--reward format"),
    "response_pattern": Row("--response_pattern .", "refused:reward.no_rule"),
    "response_pattern_match": Row("--response_pattern_match full", "plan", "--reward regex --response_pattern 1"),
    "length_range": Row("--length_range 1 9", "refused:reward.no_rule"),
    "length_slack": Row("--length_slack 9", "plan", "--reward length --length_range 1 9"),
    "length_unit": Row("--length_unit characters", "plan", "--reward length --length_range 1 9"),
    "response_language": Row("--response_language de", "refused:reward.no_rule"),
    "json_schema": Row(f"--json_schema {BENCH}/absent.json", "refused:reward.schema", "--reward json_schema"),
    "reward_random": Row("--reward_random", "example", f"--reward {BENCH}/reward.py:by_position"),
    "shuffle_rewards": Row("--shuffle_rewards", "weights"),
    "max_refused_steps": Row("--max_refused_steps 0", "code", "--init_kl_coef 1e39 --use_kl_loss"),
    "save_interval": Row("--save_interval 0", "files", "--max_steps 0 --num_episodes 2 --max_ckpt_num 9"),
    "advantage_estimator": Row("--advantage_estimator cpgd", "weights"),
    "policy_loss": Row("--policy_loss sapo", "weights", "--max_epochs 3"),
    "use_gspo": Row("--use_gspo", "weights", "--max_epochs 3"),
    "use_gmpo": Row("--use_gmpo", "weights", "--max_epochs 3"),
    "use_cpg_loss": Row("--use_cpg_loss", "weights", "--max_epochs 3"),
    "eps_clip": Row("--eps_clip 0.01", "weights", "--max_epochs 3"),
    "eps_clip_high": Row("--eps_clip_high 0.01", "weights", "--max_epochs 3"),
    "dual_clip": Row("--dual_clip 1.0001", "weights", f"--policy_loss dual_clip --eps_clip 0.01 {FAR}"),
    "loss_agg_mode": Row("--loss_agg_mode token-mean", "weights"),
    "high_entropy_token_ratio": Row("--high_entropy_token_ratio 0.2", "weights"),
    "kl_estimator": Row("--kl_estimator k2", "weights", f"{KL} --use_kl_loss"),
    "init_kl_coef": Row("--init_kl_coef 0.5", "weights"),
    "use_kl_loss": Row("--no-use_kl_loss", "weights", KL),
    "kl_target": Row("--kl_target 0.000001", "metrics:kl/coefficient", KL),
    "kl_horizon": Row("--kl_horizon 10", "metrics:kl/coefficient", f"{KL} --kl_target 0.000001"),
    "max_logprob_gap": Row("--max_logprob_gap 1e-12", "code"),
    "off_policy_correction": Row("--off_policy_correction tis", "metrics:mismatch/correction"),
    "off_policy_cap": Row("--off_policy_cap 1.0", "weights", "--off_policy_correction tis --use_fire"),
    "off_policy_low": Row("--off_policy_low 1.0", "weights", f"--off_policy_correction mis {FIRE}"),
    "off_policy_high": Row("--off_policy_high 1.0", "weights", f"--off_policy_correction mis {FIRE}"),
    "off_policy_limit": Row("--off_policy_limit 0.01", "weights", f"--off_policy_correction m2po {FIRE}"),
    "off_policy_veto": Row("--off_policy_veto 1.0", "weights", FIRE),
    "off_policy_normalize": Row("--off_policy_normalize", "weights", f"--off_policy_correction tis {FIRE}"),
    "off_policy_delta": Row("--off_policy_delta 0.0", "weights", "--max_epochs 3"),
    "entropy_coef": Row("--entropy_coef 0.1", "weights"),
    "entropy_target": Row("--entropy_target 9", "weights", "--entropy_coef 0.1"),
    "gamma": Row("--gamma 0.5", "weights", "--advantage_estimator reinforce"),
    "lambd": Row("--lambd 0.5", "weights", PPO),
    "lambd_value": Row("--lambd_value 0.5", "weights", PPO),
    "length_alpha": Row("--length_alpha 1.0", "weights", PPO),
    "pass_k": Row(
        "--pass_k 2", "weights", f"--advantage_estimator pass_at_k --reward {BENCH}/reward.py:first_is_right"
    ),
    "advantages_norm": Row("--advantages_norm", "weights"),
    "advantage_clip": Row("--advantage_clip 0.1", "weights"),
    "reward_running_norm": Row("--reward_running_norm", "weights", "--advantage_estimator reinforce"),
    "reward_running_norm_minus_mean": Row(
        "--reward_running_norm_minus_mean", "weights", "--advantage_estimator reinforce --reward_running_norm"
    ),
    "reward_clip": Row("--reward_clip 0.1", "weights"),
    "reward_weights": Row("--reward_weights digits=2", "metrics:reward/mean"),
    "reward_pretrain": Row("--reward_pretrain {rm}", "rollouts"),
    "reward_offload": Row("--reward_offload phase", "plan", "--reward_pretrain {rm}"),
    "reward_batch_tokens": Row("--reward_batch_tokens 1", "calls:layer forwards", "--reward_pretrain {rm}"),
    "remote_rm_url": Row("--remote_rm_url {server}/score", "rollouts"),
    "remote_rm_timeout": Row("--remote_rm_timeout 0.05", "code", "--remote_rm_url {server}/slow"),
    "remote_rm_batch_size": Row("--remote_rm_batch_size 1", "rollouts", "--remote_rm_url {server}/count"),
    "remote_rm_concurrency": Row("--remote_rm_concurrency 2", "plan", "--remote_rm_url {server}/score"),
    "remote_rm_retries": Row("--remote_rm_retries 0", "code", "--remote_rm_url {server}/shaky --reward_wait 0"),
    "reward_wait": Row("--reward_wait 0", "code", "--remote_rm_url {server}/busy"),
    "on_reward_outage": Row("--on_reward_outage unscored", "code", f"{BUSY} --max_unscored_share 1"),
    "judge_pretrain": Row("--judge_pretrain {second}", "rollouts", ASKED),
    "judge_url": Row("--judge_url {server}/v1", "rollouts", "--judge_model m"),
    "judge_model": Row("--judge_model other", "rollouts", "{judge}"),
    "judge_template": Row("--judge_template {judge.txt}", "rollouts", "{judge}"),
    "task_instruction": Row("--task_instruction 777", "rollouts", "{judge}"),
    "judge_pattern": Row(r"--judge_pattern k(\d+)", "rollouts", "{judge}"),
    "judge_range": Row("--judge_range 0 20", "rollouts", "{judge}"),
    "judge_max_new_tokens": Row("--judge_max_new_tokens 9", "rollouts", "{judge}"),
    "environment": Row("--environment guess-number", "rollouts", CHAT),
    "environment_workers": Row("--environment_workers 2", "calls:scorers", TALK),
    "environment_memory": Row("--environment_memory 0.1", "code", f"{CHAT} --environment {BENCH}/environment.py:Large"),
    "environment_variables": Row(
        "--environment_variables A_*", "rollouts", f"{CHAT} --environment {BENCH}/environment.py:Secrets"
    ),
    "max_turns": Row("--max_turns 1", "rollouts", TALK),
    "turn_max_len": Row("--turn_max_len 2", "rollouts", TALK),
    "tool_timeout": Row("--tool_timeout 0.02", "code", SLOW),
    "rollout_timeout": Row("--rollout_timeout 0.02", "code", SLOW),
    "tool_call_pattern": Row("--tool_call_pattern (?P<arguments>[a-c]+)", "rollouts", TALK),
    "turn_gamma": Row("--turn_gamma 0.1", "weights", f"{TALK} {PPO}"),
    "overlong_buffer": Row("--overlong_buffer", "metrics:reward/overlong_penalty"),
    "overlong_buffer_len": Row("--overlong_buffer_len 4", "metrics:reward/overlong_penalty", "--overlong_buffer"),
    "overlong_buffer_penalty_factor": Row(
        "--overlong_buffer_penalty_factor 0.5",
        "metrics:reward/overlong_penalty",
        "--overlong_buffer --overlong_buffer_len 4",
    ),
    "length_penalty": Row("--length_penalty", "metrics:reward/length_term"),
    "mask_truncated_completions": Row("--mask_truncated_completions", "weights"),
    "dynamic_sampling": Row("--dynamic_sampling", "metrics:data/samples", SIGNALS),
    "dynamic_sampling_rounds": Row(
        "--dynamic_sampling_rounds 1", "metrics:data/samples", f"--dynamic_sampling {SIGNALS} {MANY}"
    ),
    "filter_groups": Row("--filter_groups", "metrics:policy/gradient_norm", SIGNALS),
    "teacher_pretrain": Row("--teacher_pretrain {second}", "metrics:kl/teacher"),
    "teacher_kl_coef": Row("--teacher_kl_coef 0.5", "weights", "--teacher_pretrain {second}"),
    "critic_pretrain": Row("--critic_pretrain {second}", "metrics:critic/loss", PPO),
    "critic_learning_rate": Row("--critic_learning_rate 0.1", "metrics:critic/loss", PPO),
    "value_clip": Row("--value_clip 0.0001", "metrics:critic/clip_fraction", f"{PPO} --max_epochs 3"),
    "value_head_prefix": Row("--value_head_prefix v_head", "critic", f"{PPO} --save_value_network"),
    "save_value_network": Row("--save_value_network", "files", PPO),
    "freezing_actor_steps": Row("--freezing_actor_steps 1", "metrics:policy/updates", PPO),
    "use_fire": Row("--use_fire", "rollouts"),
    "first_token_temperature": Row("--first_token_temperature 0.1", "rollouts", "--use_fire"),
    "rollout_batch_size": Row("--rollout_batch_size 3", "rollouts"),
    "n_samples_per_prompt": Row("--n_samples_per_prompt 5", "rollouts"),
    "micro_rollout_batch_size": Row("--micro_rollout_batch_size 1", "calls:annotations", KL),
    "max_epochs": Row("--max_epochs 2", "weights"),
    "num_episodes": Row("--num_episodes 2", "metrics:step", "--max_steps 0"),
    "temperature": Row("--temperature 0.5", "rollouts"),
    "top_p": Row("--top_p 0.5", "rollouts"),
    "top_k": Row("--top_k 3", "rollouts"),
    "min_p": Row("--min_p 0.4", "rollouts"),
    "prompt_max_len": Row("--prompt_max_len 7", "refused:eval.prompt_too_long"),
    "generate_max_len": Row("--generate_max_len 3", "rollouts"),
    "max_len": Row("--max_len 12", "rollouts", "--prompt_max_len 8"),
    # what it does to responses: tests/additions/test_task.py, which installs a task
    "constraint": Row("--constraint digits", "refused:task.unknown"),
    # what they do within a constraint: tests/additions/test_constrained_task.py
    "group_source": Row("--group_source beams", "refused:constraint.beams_alone"),
    "constraint_logprobs": Row(
        "--constraint_logprobs allowed", "refused:constraint.cut", "--constraint digits --top_k 3"
    ),
    "engine_type": Row("--engine_type hf", "plan"),
    "engine_tp_size": Row("--engine_tp_size 2", "refused:engine.native_one_device"),
    "engine_mem_util": Row("--engine_mem_util 0.5", "refused:engine.native_no_reserve"),
    "engine_fp8": Row("--engine_fp8", "refused:engine.native_no_fp8"),
    "engine_max_rows": Row("--engine_max_rows 3", "calls:decoded rows"),
    "engine_enforce_eager": Row("--engine_enforce_eager", "plan"),
    "enable_engine_sleep": Row("--disable_engine_sleep", "calls:sleeps"),
    "engine_replicas": Row("--engine_replicas 2", "plan"),
    "max_staleness": Row("--max_staleness 1", "plan"),
    "async_deterministic": Row("--async_deterministic", "plan", "--max_staleness 1"),
    "actor_learning_rate": Row("--actor_learning_rate 2e-2", "weights"),
    "save_trajectories": Row("--no-save_trajectories", "files", "--rollout_log_interval 1"),
    "num_trajectories_to_save": Row("--num_trajectories_to_save 2", "rollouts"),
    "rollout_log_interval": Row("--rollout_log_interval 2", "files"),
    "token_records": Row("--token_records off", "files", "--rollout_log_interval 1"),
    "token_records_mib": Row("--token_records_mib 0", "files", "--rollout_log_interval 1"),
    "max_unscored_share": Row("--max_unscored_share 1", "code", f"--reward {BENCH}/reward.py:sometimes"),
}

SFT = SHARED | {
    "lora_dropout": Row("--lora_dropout 0.5", "weights", LORA),
    "pretrain": Row("--pretrain {second}", "weights"),
    "device": Row("--device cuda", "device"),
    "packing_samples": Row(
        "--packing_samples", "calls:micro-batches", "--train_batch_size 6 --micro_train_batch_size 4"
    ),
    "output_key": Row("--output_key more", "example"),
    "eval_output_key": Row("--eval_output_key more", "evals"),
    "learning_rate": Row("--learning_rate 2e-2", "weights"),
    "max_len": Row("--max_len 10", "plan"),
    "label_smoothing": Row("--label_smoothing 0.1", "weights"),
    "z_loss_coef": Row("--z_loss_coef 0.1", "metrics:sft/z_loss"),
    "router_z_loss_coef": Row("--router_z_loss_coef 1.0", "weights", "--pretrain {experts}"),
    "balance_bias_rate": Row("--balance_bias_rate 0.01", "refused:router.no_bias", "--pretrain {experts}"),
    "balance_bias_rate_end": Row(
        "--balance_bias_rate_end 0.005", "refused:router.no_bias", "--pretrain {experts} --balance_bias_rate 0.01"
    ),
    "neftune_noise_alpha": Row("--neftune_noise_alpha 5", "weights"),
    "weight_key": Row("--weight_key weight", "weights", f"--prompt_data {BENCH}/weighed.jsonl"),
    "train_on_turns": Row(
        "--train_on_turns last", "example", f"--prompt_data {BENCH}/talk.jsonl --eval_data= --apply_chat_template"
    ),
    "roles_to_train": Row(
        "--roles_to_train user,assistant",
        "example",
        f"--prompt_data {BENCH}/talk.jsonl --eval_data= --apply_chat_template",
    ),
    "held_out_rows": Row("--held_out_rows 2", "evals", "--eval_data="),
    "min_improvement": Row("--min_improvement 100", "metrics:step", "--max_steps 9 --eval_steps 1 --patience 2"),
    "target_loss": Row("--target_loss 100", "metrics:step", "--max_steps 9 --eval_steps 1"),
    "patience": Row("--patience 1", "metrics:step", "--max_steps 9 --eval_steps 1 --learning_rate 1"),
}

KTO = "--loss_type kto"
DPO = SHARED | {
    "ep_size": Row("--ep_size 2", "refused:strategy.ep_command"),
    "lora_dropout": Row("--lora_dropout 0.5", "weights", LORA),
    "pretrain": Row("--pretrain {second}", "weights"),
    "device": Row("--device cuda", "device"),
    "packing_samples": Row(
        "--packing_samples", "calls:micro-batches", "--seed 1 --train_batch_size 6 --micro_train_batch_size 3"
    ),
    "max_tokens_per_micro_batch": Row("--max_tokens_per_micro_batch 30", "metrics:policy/micro_batches"),
    "chosen_key": Row("--chosen_key more", "example"),
    "rejected_key": Row("--rejected_key more", "weights"),
    "weight_key": Row("--weight_key label", "weights"),
    "completion_key": Row("--completion_key nothing", "refused:data.missing_field", f"{KTO} --chosen_key none"),
    "label_key": Row("--label_key good", "refused:data.missing_field", f"{KTO} --chosen_key none"),
    "held_out_rows": Row("--held_out_rows 2", "evals", "--eval_data="),
    "loss_type": Row("--loss_type hinge", "weights"),
    "loss_weights": Row("--loss_weights sigmoid=1,bco_pair=1", "weights"),
    "reference_pretrain": Row("--reference_pretrain {second}", "weights"),
    "margin_key": Row("--margin_key label", "weights"),
    "beta": Row("--beta 0.7", "weights"),
    "label_smoothing": Row("--label_smoothing 0.2", "weights"),
    "reference_free": Row("--reference_free", "files"),
    "f_divergence": Row("--f_divergence jensen_shannon", "weights"),
    "f_alpha": Row("--f_alpha 0.9", "weights", "--f_divergence alpha"),
    "simpo_gamma": Row("--simpo_gamma 2", "metrics:dpo/loss", "--loss_type simpo"),
    "cpo_alpha": Row("--cpo_alpha 0.1", "weights", "--loss_type cpo"),
    "discopop_tau": Row("--discopop_tau 2", "weights", "--loss_type discopop"),
    "desirable_weight": Row("--desirable_weight 2", "metrics:dpo/loss", KTO),
    "undesirable_weight": Row("--undesirable_weight 2", "metrics:dpo/loss", KTO),
    "ld_alpha": Row("--ld_alpha 0.1", "weights"),
    "use_weighting": Row("--use_weighting", "metrics:dpo/loss"),
    "rpo_alpha": Row("--rpo_alpha 1", "weights"),
    "learning_rate": Row("--learning_rate 2e-2", "weights"),
    "max_len": Row("--max_len 11", "plan"),
    "min_improvement": Row("--min_improvement 100", "metrics:step", "--max_steps 9 --eval_steps 1 --patience 2"),
    "target_loss": Row("--target_loss 100", "metrics:step", "--max_steps 9 --eval_steps 1"),
    "patience": Row("--patience 1", "metrics:step", "--max_steps 5 --eval_steps 1 --learning_rate 100"),
}

CONFORMANCE = {
    "pretrain": Row("--pretrain {second}", "plan"),
    "bf16": Row("--bf16", "plan"),
    "model_code": Row(f"--model_code {BENCH}/code.py", "plan"),
    "device": Row("--device cuda", "device"),
    "input_key": Row("--input_key question", "plan"),
    "input_template": Row("--input_template q{}", "plan"),
    "apply_chat_template": Row("--apply_chat_template", "plan"),
    "system_prompt": Row("--system_prompt add", "plan", "--apply_chat_template"),
    "prompt": Row("--prompt 1+1=", "refused:generate.one_source"),
    "prompt_data": Row(f"--prompt_data {BENCH}/other.jsonl", "plan"),
    "prompt_split": Row("--prompt_split test", "plan", f"--prompt_data {BENCH}/splits"),
    "max_samples": Row("--max_samples 3", "plan"),
    "n_samples_per_prompt": Row("--n_samples_per_prompt 3", "plan"),
    "prompt_max_len": Row("--prompt_max_len 3", "refused:generate.prompt_too_long"),
    "generate_max_len": Row("--generate_max_len 3", "plan"),
    "engine_tp_size": Row("--engine_tp_size 2", "refused:conformance.no_effect"),
    "engine_mem_util": Row("--engine_mem_util 0.5", "refused:conformance.no_effect"),
    "engine_fp8": Row("--engine_fp8", "refused:conformance.no_effect"),
    "engine_max_rows": Row("--engine_max_rows 3", "calls:decoded rows"),
    "engines": Row("--engines native,hf", "plan"),
    "output": Row("--output all.json", "files"),
    "seed": Row("--seed 7", "plan"),
    "debug": Row("--debug", "variables", "--output all.json"),
}

NOT_OF_PAIRS = [
    "freeze_prefix",
    "load_in_4bit",
    "train_only_tokens_from",
    "aux_loss_coef",
    "fused_linear_logprob",
    "chunk_size",
    "input_template",
    "apply_chat_template",
    "system_prompt",
    "eval_input_key",
]
COLUMNS = "--chosen_key output --rejected_key more"
RM = {name: row for name, row in SHARED.items() if name not in NOT_OF_PAIRS} | {
    "pretrain": Row("--pretrain {second}", "weights"),
    "device": Row("--device cuda", "device"),
    "heads_types": Row("--heads_types better", "plan"),
    "heads_weights": Row("--heads_weights 1,2", "refused:rm.head_weights"),
    "pooling_method": Row("--pooling_method attn", "plan"),
    "probing_layer": Row("--probing_layer 1", "plan"),
    "scale_for_train": Row("--scale_for_train", "metrics:rm/loss"),
    "prompt_data": Row(f"--prompt_data {BENCH}/other.jsonl", "plan", COLUMNS),
    "prompt_data_probs": Row(
        "--prompt_data_probs 0.9,0.1", "weights", f"--prompt_data {BENCH}/pairs.jsonl,{BENCH}/heldpairs.jsonl"
    ),
    "prompt_split": Row("--prompt_split test", "example", f"{SPLITS} {COLUMNS}"),
    "eval_data": Row(f"--eval_data {BENCH}/pairs.jsonl", "evals"),
    "eval_split": Row("--eval_split train", "evals", f"{SPLITS} {COLUMNS}"),
    "chosen_key": Row("--chosen_key question", "example"),
    "rejected_key": Row("--rejected_key question", "weights"),
    "outcome_key": Row("--outcome_key right", "weights"),
    "margin_key": Row("--margin_key margin", "weights"),
    "weight_key": Row("--weight_key weight", "weights"),
    "held_out_rows": Row("--held_out_rows 2", "evals", "--eval_data="),
    "loss_type": Row("--loss_type hps", "plan"),
    "completions_key": Row("--completions_key steps", "refused:rm.no_steps"),
    "labels_key": Row("--labels_key marks", "refused:rm.no_steps"),
    "step_separator": Row("--step_separator ;", "refused:rm.no_steps"),
    "step_reduction": Row("--step_reduction product", "refused:rm.no_steps"),
    "train_on_last_step_only": Row("--train_on_last_step_only", "refused:rm.no_steps"),
    "margin": Row("--margin 0.5", "weights"),
    "tie_margin": Row("--tie_margin 0.5", "weights"),
    "center_rewards_coefficient": Row("--center_rewards_coefficient 1", "weights"),
    "learning_rate": Row("--learning_rate 2e-2", "weights"),
    "max_len": Row("--max_len 8", "refused:data.pairs_too_long"),
    "packing_samples": Row(
        "--packing_samples", "calls:micro-batches", "--train_batch_size 8 --micro_train_batch_size 2"
    ),
    "max_tokens_per_micro_batch": Row("--max_tokens_per_micro_batch 120", "metrics:policy/micro_batches"),
    "min_improvement": Row(
        "--min_improvement 100",
        "metrics:step",
        f"--max_steps 9 --eval_steps 1 --patience 2 --eval_data {BENCH}/pairs.jsonl",
    ),
    "patience": Row("--patience 1", "metrics:step", "--max_epochs 9 --max_steps 9 --eval_steps 1 --learning_rate 9"),
    "model_code": Row("--model_code absent.py", "code"),
    "sp_size": Row("--sp_size 2", "refused:rm.strategy"),
    "tp_size": Row("--tp_size 2", "refused:rm.strategy"),
    "ep_size": Row("--ep_size 2", "refused:rm.strategy"),
    "ckpt_weights_only": Row("--ckpt_weights_only", "refused:rm.checkpoint_weights", f"--ckpt_path {EARLIER}"),
    "ckpt_partial": Row("--ckpt_partial model.layers", "refused:rm.checkpoint_weights", f"--ckpt_path {EARLIER}"),
    "meta_init": Row("--meta_init", "refused:rm.meta_init", "--fsdp"),
}

NEW = "--pretrain= --tokenizer char --hidden_size 16 --num_layers 1 --num_heads 2 --max_seq_len 32"
TEXTS = f"--prompt_data {BENCH}/texts.jsonl,{BENCH}/heldtexts.jsonl"
NOT_OF_TEXTS = [
    *IMAGES,
    "data_store",
    "num_workers",
    "prefetch_factor",
    "input_key",
    "input_template",
    "apply_chat_template",
    "system_prompt",
    "eval_input_key",
]
PRETRAIN = {name: row for name, row in SHARED.items() if name not in NOT_OF_TEXTS} | {
    "pretrain": Row("--pretrain {second}", "weights"),
    "device": Row("--device cuda", "device"),
    "tokenizer": Row("--tokenizer byte", "plan", NEW),
    "tokenizer_size": Row("--tokenizer_size 260", "plan", f"{NEW} --tokenizer bpe --prompt_data {BENCH}/words.txt"),
    "depth": Row("--depth 1", "plan", "--pretrain= --tokenizer char"),
    "family": Row("--family llama", "plan", NEW),
    "router_z_loss_coef": Row("--router_z_loss_coef 1.0", "weights", "--pretrain {experts}"),
    "balance_bias_rate": Row("--balance_bias_rate 0.01", "refused:router.no_bias", "--pretrain {experts}"),
    "balance_bias_rate_end": Row(
        "--balance_bias_rate_end 0.005", "refused:router.no_bias", "--pretrain {experts} --balance_bias_rate 0.01"
    ),
    "hidden_size": Row("--hidden_size 32", "plan", NEW),
    "num_layers": Row("--num_layers 2", "plan", NEW),
    "num_heads": Row("--num_heads 4", "weights", NEW),
    "num_kv_heads": Row("--num_kv_heads 1", "plan", NEW),
    "ffn_hidden_size": Row("--ffn_hidden_size 8", "plan", NEW),
    "max_seq_len": Row("--max_seq_len 8", "refused:pretrain.window", NEW),
    "vocab_size": Row("--vocab_size 90", "plan", NEW),
    "tie_embeddings": Row("--no-tie_embeddings", "plan", NEW),
    "init_std": Row("--init_std 0.1", "weights", NEW),
    "use_glu": Row("--no-use_glu", "plan", NEW),
    "dropout": Row("--dropout 0.5", "weights", NEW),
    "use_moe": Row("--use_moe", "plan", NEW),
    "num_experts": Row("--num_experts 4", "plan", f"{NEW} --use_moe"),
    "top_k": Row("--top_k 1", "weights", f"{NEW} --use_moe --ffn_hidden_size 16"),
    "shared_experts": Row("--shared_experts 1", "plan", f"{NEW} --use_moe"),
    "packing_samples": Row("--no-packing_samples", "plan"),
    "lora_dropout": Row("--lora_dropout 0.5", "weights", LORA),
    "prompt_data": Row(f"--prompt_data {BENCH}/heldtexts.jsonl", "plan"),
    "prompt_data_probs": Row("--prompt_data_probs 0.9,0.1", "weights", TEXTS),
    "prompt_split": Row(
        "--prompt_split test",
        "weights",
        f"--prompt_data {BENCH}/splits --eval_data={BENCH}/train.jsonl --text_key input",
    ),
    "text_key": Row("--text_key words", "refused:data.no_text"),
    "text_separator": Row("--text_separator +", "plan", f"--prompt_data {BENCH}/texts.txt"),
    "mask_documents": Row("--no-mask_documents", "weights"),
    "max_samples": Row("--max_samples 3", "plan"),
    "eval_data": Row(f"--eval_data {BENCH}/texts.jsonl", "evals"),
    "eval_split": Row(
        "--eval_split train", "evals", f"--eval_data {BENCH}/splits --text_key input --prompt_data {BENCH}/train.jsonl"
    ),
    "held_out_share": Row("--held_out_share 0.2", "plan", "--eval_data="),
    "data_store_path": Row(f"--data_store_path {BENCH}/other_tokens", "plan"),
    "data_store_workers": Row("--data_store_workers 3", "calls:text workers", f"--data_store_path {BENCH}/more_tokens"),
    "data_store_max_gb": Row("--data_store_max_gb 3", "calls:text gigabytes", f"--data_store_path {BENCH}/such_tokens"),
    "sample_texts": Row("--sample_texts 1", "rollouts"),
    "keep_best": Row("--keep_best", "refused:pretrain.no_held_out", "--eval_data="),
    "fit_memory": Row("--fit_memory off", "refused:pretrain.unused_limit", "--memory_limit_gb 8"),
    "memory_limit_gb": Row("--memory_limit_gb 1", "plan"),
    "sample_tokens": Row("--sample_tokens 2", "rollouts"),
    "learning_rate": Row("--learning_rate 2e-2", "weights"),
    "train_tokens": Row("--train_tokens 50", "metrics:step"),
    "train_batch_tokens": Row("--train_batch_tokens 60", "refused:pretrain.two_batches"),
    "lr_warmup_tokens": Row("--lr_warmup_tokens 50", "metrics:policy/learning_rate", "--lr_warmup_ratio 0.03"),
    "lr_decay_tokens": Row("--lr_decay_tokens 50", "metrics:policy/learning_rate", "--lr_schedule wsd"),
    "max_len": Row("--max_len 11", "plan"),
    "z_loss_coef": Row("--z_loss_coef 1", "weights"),
    "max_tokens_per_micro_batch": Row("--max_tokens_per_micro_batch 24", "metrics:policy/micro_batches"),
    "min_improvement": Row("--min_improvement 100", "metrics:step", "--max_steps 9 --eval_steps 1 --patience 2"),
    "target_loss": Row("--target_loss 100", "metrics:step", "--max_steps 9 --eval_steps 1"),
    "patience": Row("--patience 1", "metrics:step", "--max_steps 5 --eval_steps 1 --learning_rate 1"),
}

TABLES = {"rl": RL, "sft": SFT, "pretrain": PRETRAIN, "dpo": DPO, "rm": RM, "conformance": CONFORMANCE}


def _case(command: str, name: str) -> Any:
    """The case of a setting; for `pretrain`, `dpo` and `rm` a row that `sft` has too is one of tier 3."""
    again = command in ("pretrain", "dpo", "rm") and TABLES[command][name] == SFT.get(name)
    return pytest.param(command, name, marks=[pytest.mark.night] if again else [])


CASES = [_case(command, name) for command, table in TABLES.items() for name in table]


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run left behind; times, paths and the settings themselves are not in it."""

    code: int
    problem: str
    where: str
    plan: list[str]
    example: list[str]
    """A row as the model sees it, as `check` shows it."""
    printed: list[str]
    weights: str
    critic: list[str]
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    rollouts: dict[str, str]
    files: list[str]
    device: str
    calls: dict[str, Any]
    variables: list[str]
    """Of the environment, as a comparison of engines reports them."""

    def part(self, name: str) -> Any:
        """What a row compares."""
        kind, _, detail = name.partition(":")
        value = getattr(self, kind)
        if kind == "metrics" and detail:
            return [row.get(detail) for row in value]
        for key in filter(None, detail.split(":")):
            value = value[key]
        return value


@dataclass(slots=True)
class Spies:
    """What cannot be read from files: counted where the work is done."""

    counts: Counter[str] = field(default_factory=Counter)
    values: dict[str, Any] = field(default_factory=dict)

    def calls(self) -> dict[str, Any]:
        """All of it by name."""
        names = ("layer forwards", "kept in part", "annotations", "scorers", "sleeps", "threads", "saves beside")
        found = {name: self.counts[name] for name in names}
        keys = (
            "head rows",
            "chunks ahead",
            "store workers",
            "text workers",
            "store gigabytes",
            "text gigabytes",
            "pinned",
            "decoded rows",
            "micro-batches",
            "wandb",
            "tensorboard",
            "trackio",
            "mlflow",
            "watch",
            "ranks",
            "restarts",
            "rows set aside",
            "rollbacks",
            "code limits",
            "norm spike",
            "weight checks",
            "on alarm",
            "compiled",
            "profiled",
        )
        return found | {key: self.values.get(key) for key in keys}

    def counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted."""

        def counted(*arguments: Any, **options: Any) -> Any:
            self.counts[name] += 1
            return function(*arguments, **options)

        return counted

    def micro_batch(self, samples: Any, options: dict[str, Any]) -> None:
        """One forward and backward pass."""
        self.keep("pinned", options.get("pin_memory", False))
        self.values.setdefault("micro-batches", []).append([sample.sample_id for sample in samples])

    def keep(self, name: str, value: Any) -> None:
        """The largest value (or the last that cannot be compared)."""
        known = self.values.get(name)
        self.values[name] = max(known, value) if isinstance(known, int) and isinstance(value, int) else value


def install(spies: Spies, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    """Watch the places where settings that leave no trace in files act."""
    from rft import run_lifecycle
    from rft.checkpoints import writer
    from rft.parallel import compiled, step_guards
    from rft.process import launching, monitored
    from rft.tokenizing import pretraining_windows, row_store
    from rft_dist.checkpoints.async_writer import BackgroundSaves
    from rft_dist.launch.spawn import Ended
    from rft_engine.native.engine import NativeEngine
    from rft_models.layers import gradient_checkpointing as recomputing
    from rft_models.logprobs import output_head
    from rft_trainer.data import prefetch
    from rft_trainer.rewards.unit_tests import code
    from rft_trainer.scoring import logprobs
    from rft_trainer.sinks.profile import requested
    from rft_trainer.update import optimizer_step
    from rft_trainer.workers import pool

    def before_forward(module: torch.nn.Module, *_: Any) -> None:
        spies.counts["layer forwards"] += type(module).__name__.endswith("DecoderLayer")

    stack.callback(torch.nn.modules.module.register_module_forward_pre_hook(before_forward).remove)
    partly = (recomputing, "create_selective_checkpoint_contexts", "kept in part")
    for module, name, told in ((logprobs, "pack", "annotations"), (pool, "ScoringProcess", "scorers"), partly):
        patch.setattr(module, name, spies.counting(told, getattr(module, name)))
    patch.setattr(patches, "_PATCHES", {})  # what a run registers, the next one does not have
    patch.setattr(faulthandler, "enable", lambda: None)  # what is written here goes to no file
    patch.setattr(NativeEngine, "sleep", spies.counting("sleeps", NativeEngine.sleep))
    patch.setattr(writer, "GIGABYTE", 20_000)  # one checkpoint of the small model is larger

    def start_ranks(_: object, count: int, **__: object) -> Ended:
        spies.keep("ranks", count)  # what they do is seen in tests/cli/test_nproc.py
        return Ended(0, None, (0,) * count, ())

    patch.setattr(launching, "spawn_ranks", start_ranks)

    def restart(_: object, restarts: int, kept_bytes: object) -> int:
        spies.keep("restarts", restarts)  # what they do is seen in tests/cli/test_supervised_runs.py
        return 0

    patch.setattr(launching, "supervise", restart)

    def cage(*, limits: Any, **_: Any) -> ExactReward:
        # what the sandbox does with them is seen in tests/system/test_sandbox.py
        spies.keep("code limits", (limits.cpu_seconds, limits.memory_bytes))
        return ExactReward()

    patch.setattr(code, "CodeReward", cage)

    def watch(owner: Any, name: str, look: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            look(*arguments, **options)
            return original(*arguments, **options)

        patch.setattr(owner, name, watched)

    for way in ("linear_logprobs", "linear_loss"):
        watch(output_head, way, lambda *_, chunk_size=None, **__: spies.keep("head rows", chunk_size))
    watch(monitored, "start_watch", lambda _, watched, **__: spies.keep("watch", asdict(watched.settings)))
    # what they do with a fault is seen in tests/invariants/test_guarded_steps.py and tests/faults/test_bad_rows.py
    watch(step_guards, "NumericGuard", lambda **made: spies.keep("rows set aside", made["max_rows"]))
    watch(step_guards, "NumericGuard", lambda **made: spies.keep("norm spike", made["spike_factor"]))
    watch(run_lifecycle, "going_back", lambda training, started, limit: spies.keep("rollbacks", limit))
    # what it does is seen in packages/rft-models/tests/layers/test_compiled_blocks.py
    patch.setattr(compiled, "CompiledBlocks", lambda blocks: spies.keep("compiled", len(blocks)))
    # what it records is seen in tests/invariants/test_profiled_runs.py
    watch(requested, "ProfileSink", lambda steps, **_: spies.keep("profiled", str(steps)))
    # what it does is seen in tests/faults/test_alarms.py
    watch(run_lifecycle, "FindingSink", lambda run, command, on_alarm, *_: spies.keep("on alarm", on_alarm))
    watch(step_guards, "WeightCheck", lambda **made: spies.keep("weight checks", made["every"]))
    watch(optimizer_step, "pack", lambda samples, *_, **options: spies.micro_batch(samples, options))
    watch(NativeEngine, "_take_cache", lambda self, rows, length: spies.keep("decoded rows", rows))
    watch(BackgroundSaves, "begin", lambda *_, **__: spies.counts.update(["saves beside"]))
    watch(prefetch, "ThreadPoolExecutor", lambda count, **_: spies.counts.update(threads=count))
    watch(prefetch.Prefetcher, "_fill", lambda self, pool: spies.keep("chunks ahead", self._max_pending))
    watch(pretraining_windows, "BuildWorkers", lambda command, job, number, *_: spies.keep("text workers", number))
    watch(pretraining_windows, "tokens_within", lambda root, most, build: spies.keep("text gigabytes", most))
    watch(row_store, "within", lambda root, directory, most, *_: spies.keep("store gigabytes", most))
    watch(row_store, "BuildWorkers", lambda command, job, number, *_: spies.keep("store workers", number))
    install_trackers(spies.keep, patch)


class Walker:
    """Runs the program on the bench; the same words are run once."""

    def __init__(self, bench: Any, base_words: dict[str, list[str]], root: Path, call: Callable[..., Any]) -> None:
        self._bench, self._base_words, self._root, self._call = bench, base_words, root, call
        self._known: dict[tuple[str, str, bool], Observed] = {}
        self._second = self._second_model()
        self._seeing: Path | None = None
        self._earlier: dict[str, Path] = {}
        self._servers = RewardServers()
        self._rewards = reward_places(bench.model, root, self._servers)

    def close(self) -> None:
        """End what answers."""
        self._servers.close()

    def __call__(self, command: str, words: str, seen: str = "") -> Observed:
        """Run a command, or look at it with `check` where that shows what is to be seen."""
        looks = seen in ("plan", "example") and command != "conformance"
        if (command, words, looks) not in self._known:
            observe = self._look if looks else self._run
            self._known[command, words, looks] = observe(command, self._filled(command, words))
        return self._known[command, words, looks]

    def _filled(self, command: str, words: str) -> list[str]:
        rate = "actor_learning_rate" if command == "rl" else "learning_rate"
        places = {
            BENCH: str(self._bench.root),
            "{second}": str(self._second),
            "{deep}": str(self._bench.deep),
            "{experts}": str(self._bench.experts),
            "{explode}": f"--{rate} 1e30 --max_steps 9",
        }
        if EARLIER in words:
            places[EARLIER] = str(self._earlier_run(command))
        if "{seeing}" in words:
            self._seeing = self._seeing or make_vision_task(self._root / "seeing").root
            places["{seeing}"] = str(self._seeing)
        for place, text in (places | self._rewards).items():
            words = words.replace(place, text)
        return words.split()

    def _earlier_run(self, command: str) -> Path:
        if command not in self._earlier:
            path = self._root / f"earlier-{command}"
            words = ["--max_steps", "2", "--save_steps", "1", "--save_path", str(path)]
            assert self._call(command, *self._base_words[command], *words).code == 0
            self._earlier[command] = path
        return self._earlier[command]

    def _second_model(self) -> Path:
        path = self._root / "second"
        shutil.copytree(self._bench.model, path)
        tensors = importlib.import_module("safetensors.torch")
        weights = tensors.load_file(path / "model.safetensors")
        tensors.save_file(
            {name: value.flip(0) for name, value in weights.items()}, path / "model.safetensors", {"format": "pt"}
        )
        return path

    def _look(self, command: str, words: list[str]) -> Observed:
        folder = Path(tempfile.mkdtemp(dir=self._root))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(patches, "_PATCHES", {})
            patch.setattr(faulthandler, "enable", lambda: None)
            outcome = self._call("check", command, *self._base_words[command], *words, "--json_errors")
        observed = observe(folder, outcome, {})
        # behind the settings, which show every flag: what follows from them, then the row
        _, title, rest = outcome.out.partition("\ndata  ")
        plan, _, example = (title + rest).partition("\n\n")
        shutil.rmtree(folder)
        return replace(observed, plan=plan.splitlines(), example=example.splitlines()[:-1])

    def _run(self, command: str, words: list[str]) -> Observed:
        folder = Path(tempfile.mkdtemp(dir=self._root))
        spies = Spies()
        with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            install(spies, patch, stack)
            kept = ["--rollout_log_interval", "1"] if command == "rl" else []
            here = [] if "--run_name" in words or command == "conformance" else ["--save_path", "run"]
            outcome = self._call(command, *self._base_words[command], *kept, *here, *words, "--json_errors")
        observed = observe(folder, outcome, spies.calls())
        shutil.rmtree(folder)
        return observed


def observe(folder: Path, outcome: Any, calls: dict[str, Any]) -> Observed:
    """Read everything that the run left."""
    homes = [file.parent for file in folder.rglob("config.yaml")]
    home = homes[0] if homes else folder
    before, _, after = outcome.out.partition("\nstart ")
    problem = outcome.problem["code"] if outcome.err.startswith("{") else ""
    models = sorted(home.glob("checkpoints/step_*/model/model.safetensors"))
    files = (
        str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and not path.name.startswith("bundle")
    )
    environment = json.loads((home / "env.json").read_text()) if (home / "env.json").is_file() else {}
    return Observed(
        code=outcome.code,
        problem=problem,
        where=str(home.relative_to(folder)),
        plan=before.splitlines(),
        example=[],
        printed=[line.split("loss=")[0].split("reward=")[0] for line in after.splitlines() if line.startswith("step ")],
        weights=hashlib.sha256(models[-1].read_bytes()).hexdigest() if models else "",
        critic=critic_tensors(home),
        metrics=[without_times(row) for row in lines(home / "metrics.jsonl")],
        evals=[without_times(row) for row in lines(home / "evals.jsonl")],
        rollouts={path.name: path.read_text() for path in sorted(home.glob("rollouts/*.jsonl"))},
        files=sorted(files),
        device=str(environment.get("device")),
        calls=calls,
        variables=reported_variables(folder / "all.json"),
    )


def reported_variables(path: Path) -> list[str]:
    """The names, where the file is there."""
    if not path.is_file():
        return []
    return [name for name, *_ in json.loads(path.read_text())["environment"]["variables"]]


def critic_tensors(home: Path) -> list[str]:
    """The names of the critic's tensors, where it was saved."""
    files = sorted(home.glob("checkpoints/step_*/model/critic/*.safetensors"))
    if not files:
        return []
    safetensors = importlib.import_module("safetensors")
    with safetensors.safe_open(files[-1], "pt") as opened:
        return sorted(opened.keys())


def lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, none where it is absent."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """What two equal runs have in common."""
    return {name: value for name, value in row.items() if not name.startswith(("time/", "memory/"))}


@pytest.fixture(scope="session")
def walker(
    bench: Any, base_words: dict[str, list[str]], memory_root: Path, call: Callable[..., Any]
) -> Iterator[Walker]:
    """One for all rows, so that runs which serve several rows are run once."""
    root = memory_root / "walk"
    root.mkdir()
    walk = Walker(bench, base_words, root, call)
    yield walk
    walk.close()
    shutil.rmtree(root)


@pytest.mark.parametrize("command", TABLES)
def test_every_setting_has_a_row(command: str) -> None:
    assert set(TABLES[command]) == set(schema(command))


@pytest.mark.parametrize("command", TABLES)
def test_equal_words_give_equal_runs(command: str, walker: Walker) -> None:
    first, second = walker(command, ""), walker(command, " ")
    assert first.code == second.code == 0
    for part in ("plan", "printed", "weights", "metrics", "evals", "rollouts", "files"):
        assert first.part(part) == second.part(part), part


@pytest.mark.parametrize(("command", "name"), CASES, ids=lambda value: value)
def test_a_setting_acts_or_is_refused(command: str, name: str, walker: Walker) -> None:
    row = TABLES[command][name]
    changed = walker(command, f"{row.given} {row.words}", row.seen)
    kind, _, detail = row.seen.partition(":")
    if kind == "refused":
        assert (changed.code in (2, 4), changed.problem) == (True, detail)
        assert not changed.files, "a refused run leaves nothing"
    elif kind == "device" and not torch.cuda.is_available():
        assert (changed.code, changed.problem) == (3, "device.no_cuda")
    else:
        plain = walker(command, row.given, row.seen)
        assert plain.part(row.seen) != changed.part(row.seen)
        assert kind == "code" or name == "max_refused_steps" or plain.code == changed.code == 0, changed.problem
