"""Names of settings in other trainers, and the setting that has their meaning here.

A name stands here where the value means the same, so that the answer can be followed to the letter.
"""

from __future__ import annotations

import re

_NAMES = """
accelerator: device
clip_range clip_ratio clip_ratio_low cliprange epsilon: eps_clip
clip_ratio_high epsilon_high: eps_clip_high
dataloader_num_workers: num_workers
data data_path dataset dataset_name dataset_path: prompt_data eval_data
train_data_path train_dataset train_file train_files: prompt_data
prompt_data: eval_data
corpus text text_file: prompt_data
eval_samples_per_prompt val_n: eval_n
val_temperature: eval_temperature
eval_dataset eval_file test_data test_file val_data val_file val_files validation_file: eval_data
dataset_split train_split: prompt_split
default_local_dir logdir out_dir output: save_path
epochs num_epochs num_train_epochs total_epochs n_epochs: num_episodes max_epochs
experiment_name name: run_name
gpu_memory_utilization mem_fraction_static vllm_gpu_memory_utilization: engine_mem_util
grad_clip gradient_clip gradient_clipping: max_norm
group_size n n_samples num_generations num_return_sequences num_samples samples_per_prompt: n_samples_per_prompt eval_n
beta kl_beta kl_coef kl_loss_coef: init_kl_coef
kl_loss_type: kl_estimator
answer_key answer_column answers_key ground_truth_key label_column target_key: label_key
input_column prompt_column prompt_key prompts_key question_key: input_key
response_column response_key completion_key: output_key
lora_r: lora_rank
lora_target lora_target_modules: target_modules
actor_learning_rate actor_lr learning_rate lr: actor_learning_rate learning_rate
critic_lr: critic_learning_rate
lr_scheduler lr_scheduler_type scheduler: lr_schedule
warmup_ratio: lr_warmup_ratio
num_warmup_steps: lr_warmup_steps
max_completion_length max_response_length response_length: generate_max_len
cutoff_len max_length max_model_len max_seq_len max_seq_length: max_len
max_prompt_length prompt_length: prompt_max_len
model_name actor: pretrain
num_iterations ppo_epochs: max_epochs
max_train_steps num_steps total_training_steps total_steps: max_steps
gpus n_gpus ngpus num_gpus num_processes n_gpus_per_node: nproc
ppo_micro_batch_size_per_gpu: micro_train_batch_size
reward_fn reward_func reward_funcs reward_function: reward
reward_model reward_model_path rm_path: reward_pretrain
reward_url rm_url: remote_rm_url
save_freq: save_steps
save_total_limit keep_checkpoints max_actor_ckpt_to_keep: max_ckpt_num
save_only_model save_weights_only: save_model_only
save_best: keep_best
system: system_prompt
tensor_model_parallel_size tensor_parallel_size: engine_tp_size tp_size
expert_model_parallel_size expert_parallel_size: ep_size
test_freq: eval_steps
project project_name wandb: use_wandb
dynamic_filtering: filter_groups
flash_attention flash_attention_2: flash_attn
sequence_parallel sequence_parallel_size: sp_size
random_seed: seed
weight_decay: l2
zero: zero_stage
d_model hidden_dim hidden_size n_embd: hidden
n_layer n_layers num_hidden_layers num_layers: layers
n_head n_heads num_attention_heads num_heads: heads
"""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    name: tuple(settings.split())
    for names, _, settings in (line.partition(":") for line in _NAMES.strip().splitlines())
    for name in names.split()
}
"""Name elsewhere -> settings here, of which the first that the command has is meant."""

_PATHS = {
    "algorithm.adv_estimator": "advantage_estimator",
    "actor.optim.lr": "actor_learning_rate",
    "critic.optim.lr": "critic_learning_rate",
    "data.train_batch_size": "rollout_batch_size",
    "actor_rollout_ref.model.path": "pretrain",
    "critic.model.path": "critic_pretrain",
    "reward_model.model.path": "reward_pretrain",
    "custom_reward_function.path": "reward",
    "optim.weight_decay": "l2",
    "val_kwargs.n": "eval_n",
    "val_kwargs.temperature": "eval_temperature",
}
"""Ends of dotted paths whose last part alone says too little."""

_ASSIGNMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def named_elsewhere(name: str) -> tuple[str, ...]:
    """Return the settings that a name of another trainer can stand for; a dotted path by its end."""
    for path, setting in _PATHS.items():
        if name == path or name.endswith(f".{path}"):
            return (setting,)
    last = name.rpartition(".")[2].replace("-", "_")
    return (*OTHER_NAMES.get(last, ()), last)


def assignment(word: str) -> tuple[str, str] | None:
    """Return (name, value) of a word such as `trainer.total_epochs=3`, in which other programs take settings."""
    match = _ASSIGNMENT.fullmatch(word)
    return (match[1], match[2]) if match else None
