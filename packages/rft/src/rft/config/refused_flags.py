"""Flags and values that LightRFT and its guides name and this version does not have: why, and what to use.

A command line written for LightRFT is answered name by name. Every name here is known; what is in
the settings of a command is never looked up here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_NOT_YET = "not in this version"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a name or a value cannot be used, and the one thing to do instead."""

    reason: str
    do: str


def _rows(reason: str, do: str, *names: str) -> dict[str, Refusal]:
    return {name: Refusal(reason, do) for name in names}


_OUT = "leave it out"

REFUSED_FLAGS: dict[str, Refusal] = {
    # memory and ranks
    **_rows("DeepSpeed is configured by the stage alone", "--zero_stage N", "deepspeed", "deepspeed_config"),
    **_rows("weights are float32, or bfloat16", "--bf16 (for float32 leave it out)", "dtype", "torch_dtype"),
    **_rows("float32 is what weights are without --bf16", _OUT, "fp32"),
    **_rows("the attention kernel is chosen by what can run", "--flash_attn (or leave it out)", "attn_implementation"),
    **_rows("the output head has a fused path of its own", "--fused_linear_logprob", "use_liger_kernel"),
    **_rows("adapters are trained where they have a rank", "--lora_rank N", "use_peft", "use_lora", "peft"),
    **_rows("it has another name here", "--optimizer adamw, or --optimizer muon", "optim"),
    **_rows("it has another name here", "--shard_size N", "initial_model_shard_size"),
    **_rows("the vision tower is laid out over ranks as the rest of the model is", _OUT, "no_shard_vit"),
    **_rows("gradients are summed in float32 in any case", _OUT, "grad_accum_dtype"),
    **_rows("the rank is read from the environment (LOCAL_RANK)", "torchrun --nproc_per_node=N ...", "local_rank"),
    **_rows(
        "a flag of the launcher, which stands before the program",
        "torchrun --nnodes N --nproc_per_node N -m rft_cli.main rl ...",
        "nnodes",
        "nproc_per_node",
        "node_rank",
        "master_addr",
        "master_port",
    ),
    **_rows("the model is loaded straight onto its device", "--device cuda", "actor_init_on_gpu"),
    **_rows(
        "the form without reentrance is always used", "--gradient_checkpointing", "gradient_checkpointing_use_reentrant"
    ),
    # supervised fine-tuning
    **_rows(
        "responses alone are learned, and of conversations the turns of the assistant",
        f"{_OUT} (--roles_to_train names other roles)",
        "assistant_only_loss",
        "completion_only_loss",
    ),
    **_rows("turns of other roles are learned by name", "--roles_to_train user,assistant", "train_on_inputs"),
    **_rows("turns of other roles are learned by name", "--roles_to_train user,assistant", "train_on_prompt"),
    **_rows("the turns that are learned are named", "--train_on_turns last", "mask_history"),
    # images, audio, video
    **_rows(f"{_NOT_YET}: prompts are text and images, not videos", _OUT, "limit_mm_video_per_prompt", "fps"),
    **_rows("rows are text alone unless a column of images is named", "leave --images_key out", "text_only"),
    # engines
    **_rows(
        "a reward model takes one forward and needs no engine; a language model that judges has one",
        "--reward_pretrain DIR, or --judge_pretrain DIR",
        "rm_use_engine",
        "rm_engine_cudagraph",
    ),
    **_rows("it has another name here", "--engine_type vllm", "use_vllm"),
    **_rows("it has another name here", "--engine_type native", "engine"),
    **_rows("it has another name here", "--engine_tp_size N", "vllm_tensor_parallel_size"),
    **_rows("it is a setting of recommendation", "rft-train genrec sft", "sid_index_path", "item_meta_path"),
    # the algorithm
    **_rows("it has another name here", "--advantage_estimator NAME", "algorithm", "adv_estimator"),
    **_rows("advantages are normalised by another flag", "--advantages_norm", "normalize_advantages"),
    **_rows(
        "values are in the unit of the rewards; its scale in LightRFT is fixed at 1",
        "--reward_running_norm",
        "normalize_reward_for_critic",
    ),
    **_rows("a response has one reward unless the reward function gives steps", _OUT, "use_sequence_rewards"),
    **_rows(
        "rollouts are written with their tokens' mean log-prob, without marks",
        "--save_trajectories",
        "mark_high_entropy_tokens",
    ),
    # rewards and reward models
    **_rows(
        "in dpo it has another name here; in rl the reference is the policy before its first step",
        "--reference_pretrain DIR",
        "ref_model",
        "ref_pretrain",
        "reference_model",
    ),
    # data
    **_rows("the tokenizer is that of the model's directory", _OUT, "tokenizer", "tokenizer_path", "tokenizer_name"),
    **_rows("the template is that of the model's directory", "--apply_chat_template", "chat_template", "template"),
    **_rows("rewards compare with one column", "--label_key NAME", "reference_key"),
    **_rows("training data has one name in all commands", "--prompt_data PATH", "train_data"),
    **_rows(f"{_NOT_YET}: one system prompt for all rows", "--system_prompt TEXT", "system_prompt_path"),
    **_rows(
        "data is read from files, and from directories that save_to_disk wrote",
        "--prompt_data PATH",
        "use_ms",
        "data_root",
    ),
    **_rows("tokenizers are always the fast ones", _OUT, "disable_fast_tokenizer"),
    **_rows(
        f"{_NOT_YET}: evaluation reads any file of prompts and answers", "--eval_data PATH", "benchmarks", "benchmark"
    ),
    # saving and reporting
    **_rows(
        "a tracker has a flag of its own",
        "--use_wandb or --use_tensorboard or --use_trackio or --use_mlflow",
        "report_to",
    ),
    **_rows(
        "a run ends with its last weights (sft: --patience ends it with the best); the best are kept as a checkpoint",
        "--keep_best",
        "load_best_model_at_end",
        "metric_for_best_model",
    ),
    **_rows("nothing is uploaded", "rft-train export RUN DIR", "push_to_hub", "hub_model_id"),
    **_rows("a run's directory is never overwritten", "--save_path DIR", "overwrite_output_dir"),
    **_rows("a run is continued by a command", "rft-train resume RUN", "resume", "resume_from_checkpoint"),
    **_rows("a command is looked over by another one", "rft-train check rl ...", "dry_run"),
    **_rows("saves and evaluations come every so many steps", "--save_steps N", "save_strategy"),
    **_rows("saves and evaluations come every so many steps", "--eval_steps N", "eval_strategy", "evaluation_strategy"),
    **_rows("every checkpoint holds a complete Hugging Face directory", _OUT, "save_hf_ckpt", "disable_ds_ckpt"),
    **_rows("checkpoints are written where they stay", "--save_path DIR", "ckpt_path_local"),
    **_rows("figures go to the run's directory", "--save_path DIR", "log_dir"),
    **_rows("lengths are in every step's metrics", "--log_interval 1", "plot_every"),
    **_rows("rollouts are written as they are", "--save_trajectories", "trajectory_analysis"),
    **_rows("a summary of every step's rollouts is in its metrics", "--log_interval 1", "print_replay_buffer_stats"),
    **_rows("the project is the value of another flag", "--use_wandb PROJECT", "wandb_project"),
    **_rows("log-probabilities take the path that was measured fastest", _OUT, "disable_logprobs_flashattn"),
    **_rows(
        "checkpoints hold a complete Hugging Face directory and need no conversion",
        "--pretrain RUN/checkpoints/step_N/model",
        "checkpoint_dir",
        "hf_base",
        "hf_checkpoint",
        "tag",
        "model_type",
        "exclude_frozen",
    ),
    **_rows("settings are read from a file by another flag", "--config FILE", "config_file"),
    # names of the guides' tools and of other trainers
    **_rows(
        "which tokens are new is said by the id of the first; their rows alone are then trained, under every strategy",
        "--train_only_tokens_from N",
        "freeze_LLM",
    ),
    **_rows("the model has one name in all commands", "--pretrain PATH", "model_path", "model_name_or_path", "model"),
    **_rows(
        "the length of a response has one name in all commands", "--generate_max_len N", "max_tokens", "max_new_tokens"
    ),
    **_rows("it has another name here", "--lr_warmup_steps N", "warmup_steps"),
    **_rows("no code of a model directory is run", "--model_code FILE.py", "trust_remote_code"),
    **_rows("with held-out rows it is done, without them not", _OUT, "val_before_train", "eval_on_start"),
    **_rows("a file of settings has one name", "--config FILE", "config_name", "config_path", "config_file"),
    **_rows("where answers go has one name", "--output FILE (eval, generate), --save_path DIR (rl, sft)", "output_dir"),
    **_rows("it has another name here", "--engine_max_rows N", "batch_size", "batch"),
    **_rows("it has another name here", "--max_norm N", "max_grad_norm"),
    **_rows(
        "it has another name here", "--micro_train_batch_size N", "micro_batch_size", "per_device_train_batch_size"
    ),
    **_rows(
        "it follows from two others", "--train_batch_size N --micro_train_batch_size N", "gradient_accumulation_steps"
    ),
}

_TYPES = {"bfloat16": "--bf16", "bf16": "--bf16", "float32": _OUT, "fp32": _OUT}
_BY_VALUE = {
    **{(name, value): do for name in ("dtype", "torch_dtype") for value, do in _TYPES.items()},
    **{("report_to", tracker): f"--use_{tracker}" for tracker in ("wandb", "tensorboard", "trackio", "mlflow")},
    ("report_to", "none"): _OUT,
}
"""What to do instead of a refused name with this value."""
_OTHERS_LOSSES = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo")


def refusal_of(name: str, texts: Sequence[str] = ()) -> Refusal | None:
    """Return why a name, with the value given to it, cannot be used; None for a name that is not known."""
    refusal, value = REFUSED_FLAGS.get(name), texts[0].lower() if texts else ""
    # in TRL it chooses the algorithm's loss; in LightRFT it is a setting of reward models
    if name == "loss_type" and value in _OTHERS_LOSSES:
        return Refusal("the algorithm is chosen as a whole", f"--advantage_estimator {value}")
    if refusal and (name, value) in _BY_VALUE:
        return Refusal(refusal.reason, _BY_VALUE[name, value])
    return refusal
