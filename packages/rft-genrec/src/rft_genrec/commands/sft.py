"""Record of the command `rft-train genrec sft`."""

from __future__ import annotations

from rft.config.command_record import Command, TrainingRecord

SFT = Command(
    name="genrec-sft",
    two_words=True,
    summary="train a model to write the semantic ID of the next item",
    extends="sft",
    settings="rft_genrec.settings.sft:GenrecSftSettings",
    rules="rft_genrec.settings.rules:sft_rules",
    notes="rft_genrec.settings.rules:sft_notes",
    makes="prompt_data eval_data",
    essential="""
catalogue sid_index_path tasks rows max_history template
pretrain freeze_llm hidden_size num_layers num_heads dropout bf16 device gradient_checkpointing lora_rank
prompt_data_probs max_samples learning_rate max_epochs max_steps train_batch_size micro_train_batch_size
packing_samples max_len lr_schedule lr_warmup_ratio patience max_eval_samples held_out_rows
fsdp zero_stage eval_steps save_path save_steps load_checkpoint nproc seed run_name log_interval use_wandb
use_tensorboard
""",
    training=TrainingRecord(
        purpose="train it to write the semantic ID of the next item",
        train="rft_genrec.training.sft:train",
        check="rft_genrec.training.sft:check",
        prepare="rft_genrec.training.sft:with_inputs",
        next_commands="rft_genrec.training.next_steps:after_sft",
    ),
)
