"""Record of the command `rft-train genrec rl`."""

from __future__ import annotations

from rft.config.command_record import Command, Measure, TrainingRecord

RL = Command(
    name="genrec-rl",
    two_words=True,
    summary="train a recommender on rewards of the items that it recommends",
    extends="rl",
    settings="rft_genrec.settings.rl:GenrecRlSettings",
    rules="rft_genrec.settings.rl_rules:rl_rules",
    notes="rft_genrec.settings.rl_rules:rl_notes",
    makes="prompt_data eval_data",
    essential="""
catalogue sid_index_path pretrain genrec_reward item_embeddings bf16 device gradient_checkpointing lora_rank
max_samples max_eval_samples advantage_estimator policy_loss eps_clip loss_agg_mode init_kl_coef
rollout_batch_size n_samples_per_prompt train_batch_size micro_train_batch_size num_episodes max_steps temperature
engine_type actor_learning_rate lr_schedule lr_warmup_ratio
fsdp zero_stage eval_steps eval_beams save_path save_steps load_checkpoint nproc seed run_name log_interval use_wandb
use_tensorboard
""",
    training=TrainingRecord(
        purpose="train it on rewards of the items that it recommends",
        train="rft_genrec.training.rl:train",
        check="rft_genrec.training.rl:check",
        prepare="rft_genrec.training.rl:with_inputs",
        next_commands="rft_genrec.training.next_steps:after_rl",
        held_out=Measure(name="hr@1", is_share=True),
    ),
)
