"""Which contradictions and idle settings each command tells, all of them and no more."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rft.config.errors import SettingsError
from rft.config.schema import schema
from rft_cli.config.resolve import resolve
from rft_cli.records.discovery import with_settings

NeededWords = Callable[..., list[str]]

Refused = list[tuple[str, str]]


def refused(command: str, words: str) -> Refused:
    """The code of every problem, with the names that it says the origins of."""
    try:
        resolve(command, ["--pretrain", "m", *words.split()])
    except SettingsError as error:
        return [(problem.code, " ".join(re.findall(r"(\w+): ", problem.where))) for problem in error.problems]
    return []


def idle(command: str, words: str) -> str:
    """The names of the settings that are told to have no effect."""
    notes = resolve(command, ["--pretrain", "m", *words.split()]).notes
    assert all(" has no effect: " in note for note in notes)
    return " ".join(note.partition(" = ")[0] for note in notes)


NOISE = ("sft.noise_and_dropout", "neftune_noise_alpha lora_dropout")


@pytest.mark.parametrize(
    ("command", "words", "problems"),
    [
        ("rl", "--temperature 0", [("sampling.greedy", "temperature")]),
        ("rl", "--temperature 0.1", []),
        (
            "pretrain",
            "--lr_warmup_tokens 9 --lr_warmup_steps 0 --lr_warmup_ratio 0.5",
            [("pretrain.two_lengths", "lr_warmup_tokens lr_warmup_steps lr_warmup_ratio")],
        ),
        (
            "pretrain",
            "--lr_schedule wsd --lr_decay_tokens 9 --lr_decay_ratio 0.5",
            [("pretrain.two_lengths", "lr_decay_tokens lr_decay_ratio")],
        ),
        ("pretrain", "--lr_warmup_tokens 9 --lr_schedule wsd --lr_decay_tokens 9", []),
        ("generate", "--temperature 0", []),
        ("rl", "--pretrain_data t --ptx_coef 0", [("ptx.no_weight", "pretrain_data ptx_coef")]),
        (
            "rl",
            "--pretrain_data t --pretrain_text_key text --pretrain_output_key answer",
            [("ptx.two_forms", "pretrain_text_key pretrain_output_key")],
        ),
        ("rl", "--use_kl_loss --init_kl_coef 0", [("kl.no_weight", "use_kl_loss init_kl_coef")]),
        ("rl", "--use_kl_loss --init_kl_coef 0.1", []),
        ("rl", "--no-use_kl_loss --init_kl_coef 0", []),
        ("rl", "--init_kl_coef 0", []),
        ("rl", "--max_len 512 --prompt_max_len 512", [("length.no_room", "max_len prompt_max_len")]),
        ("rl", "--max_len 513 --prompt_max_len 512", []),
        ("rl", "--teacher_kl_coef 2", [("teacher.none", "teacher_kl_coef teacher_pretrain")]),
        ("rl", "--teacher_pretrain t --teacher_kl_coef 2", []),
        ("rl", "--teacher_pretrain t --eval_data e", [("teacher.no_reward", "eval_data reward")]),
        ("rl", "--teacher_pretrain t --eval_data e --reward exact", []),
        ("rl", "--teacher_pretrain t --filter_groups", [("teacher.equal_groups", "filter_groups teacher_pretrain")]),
        (
            "rl",
            "--teacher_pretrain t --advantage_estimator dapo",
            [("teacher.equal_groups", "dynamic_sampling teacher_pretrain")],
        ),
        ("rl", "--load_checkpoint", []),
        ("rl", "--ckpt_weights_only", [("checkpoint.no_path", "ckpt_weights_only ckpt_path")]),
        ("sft", "--ckpt_partial model", [("checkpoint.no_path", "ckpt_partial ckpt_path")]),
        ("rl", "--ckpt_weights_only --ckpt_path a", []),
        ("rm", "--patience 2", [("rm.no_held_out", "patience held_out_rows")]),
        ("rm", "--patience 2 --held_out_rows 9", []),
        ("rm", "--loss_type hps --margin 0.1", [("rm.no_margin", "margin loss_type")]),
        ("rm", "--loss_type logexp --tie_margin 0.1", [("rm.no_margin", "tie_margin loss_type")]),
        ("rm", "--loss_type hps --center_rewards_coefficient 0.1", []),
        ("rm", "--margin 0.1 --tie_margin 0.1 --margin_key m", []),
        ("rm", "--heads_types a,b --outcome_key right", [("rm.two_outcomes", "heads_types outcome_key")]),
        ("rm", "--heads_types a --outcome_key right", []),
        ("rm", "--ckpt_weights_only --ckpt_path a", [("rm.checkpoint_weights", "ckpt_weights_only")]),
        ("rm", "--sp_size 2", [("rm.strategy", "sp_size")]),
        ("rm", "--tp_size 2", [("rm.strategy", "tp_size")]),
        ("rm", "--meta_init --fsdp", [("rm.meta_init", "meta_init")]),
        ("rm", "--fsdp", []),
        ("rm", "--lora_rank 4 --fsdp", []),
        ("rm", "--lora_rank 4 --enable_ema", [("rm.averaged_adapters", "lora_rank enable_ema")]),
        (
            "rl",
            "--load_checkpoint --ckpt_weights_only",
            [("checkpoint.two_ways", "load_checkpoint ckpt_weights_only")],
        ),
        (
            "sft",
            "--ckpt_weights_only --ckpt_partial model --ckpt_path a",
            [("checkpoint.two_ways", "ckpt_weights_only ckpt_partial")],
        ),
        (
            "sft",
            "--freeze_prefix a --train_only_tokens_from 0",
            [("freezing.two_ways", "freeze_prefix train_only_tokens_from")],
        ),
        ("rl", "--system_prompt a", [("prompt.system_without_chat", "system_prompt apply_chat_template")]),
        ("rl", "--system_prompt a --apply_chat_template", []),
        ("sft", "--patience 2", [("sft.no_held_out", "patience held_out_rows")]),
        ("sft", "--target_loss 0.5", [("sft.no_held_out", "target_loss held_out_rows")]),
        ("sft", "--label_smoothing 0.1 --tp_size 2", [("sft.vocabulary_terms_tp", "label_smoothing tp_size")]),
        ("sft", "--z_loss_coef 0.1 --aux_loss_coef 0.1", [("sft.vocabulary_terms_moe", "z_loss_coef aux_loss_coef")]),
        ("sft", "--neftune_noise_alpha 5 --lora_rank 2 --lora_dropout 0.1", [NOISE]),
        ("sft", "--neftune_noise_alpha 5 --lora_rank 2 --label_smoothing 0.1", []),
        ("sft", "--patience 2 --held_out_rows 5", []),
        ("sft", "--target_loss 0.5 --eval_data x", []),
        ("sft", "--lora_rank 8 --lora_dropout 0.1 --fsdp", [("adapters.dropout_blocks", "lora_dropout fsdp")]),
        ("sft", "--fp16 --bf16", [("strategy.two_types", "fp16 bf16")]),
        ("rl", "--judge_url http://a", [("reward.judge_model", "judge_url judge_model")]),
        ("eval", "--judge_url http://a", [("reward.judge_model", "judge_url judge_model")]),
        ("rl", "--environment nowhere", [("environment.unknown", "environment")]),
        ("generate", "--prompt a --prompt_data b --image c", [("images.of_rows", "image prompt_data")]),
    ],
)
def test_each_command_refuses_what_contradicts_itself_and_no_more(command: str, words: str, problems: Refused) -> None:
    assert refused(command, words) == problems


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        ("--engine_tp_size 2 --engine_mem_util 0.5 --engine_fp8", []),
        ("--engines native,vllm --engine_tp_size 2", []),
        ("--engines native,hf --engine_tp_size 1", []),
        ("--engines native --engine_tp_size 2", [("conformance.no_effect", "engine_tp_size engines")]),
        (
            "--engines native,hf --engine_mem_util 0.5 --engine_fp8",
            [("conformance.no_effect", "engine_mem_util engines"), ("conformance.no_effect", "engine_fp8 engines")],
        ),
        ("--engines nativ --engine_tp_size 2", [("conformance.unknown_engine", "engines")]),
    ],
)
def test_a_comparison_refuses_what_none_of_its_engines_takes(words: str, problems: Refused) -> None:
    assert refused("conformance", words) == problems


@pytest.mark.parametrize(("engines", "near"), [("vlm", "vllm"), ("native,hff", "hf"), ("qqqqqq", "native")])
def test_an_unknown_engine_is_refused_with_the_nearest(engines: str, near: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("conformance", ["--pretrain", "m", "--engines", engines])
    assert caught.value.problem.do == f"--engines {near}"


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("--use_gspo --loss_agg_mode token-mean", "loss_agg_mode: command line"),
        (
            "--policy_loss gmpo --advantage_estimator dapo",
            "loss_agg_mode: default, advantage_estimator: command line, policy_loss: command line",
        ),
        (
            "--use_gmpo --advantage_estimator dapo",
            "loss_agg_mode: default, advantage_estimator: command line, use_gmpo: command line",
        ),
        ("--use_gspo --policy_loss ppo", "policy_loss: command line, use_gspo: command line"),
        ("--advantage_estimator grop", "advantage_estimator: command line"),
        ("--advantage_estimator nowhere.py:Mine", "advantage_estimator: command line"),
    ],
)
def test_a_problem_of_the_algorithm_says_where_the_choice_was_made(words: str, where: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--pretrain", "m", *words.split()])
    assert caught.value.problem.where == where


ALWAYS, CRITIC = "--init_kl_coef 0 ", "critic_pretrain critic_learning_rate value_clip value_head_prefix"
OF_CRITIC = "--critic_pretrain c --critic_learning_rate 0.5 --value_clip 0.1 --value_head_prefix v"


@pytest.mark.parametrize(
    ("words", "names", "acting"),
    [
        ("--lora_alpha 3 --target_modules q", "lora_alpha target_modules", "--lora_rank 8"),
        ("--chunk_size 64", "chunk_size", "--fused_linear_logprob"),
        ("--gradient_checkpointing_every 2", "gradient_checkpointing_every", "--gradient_checkpointing"),
        ("--first_token_temperature 2", "first_token_temperature", "--use_fire"),
        ("--kl_horizon 5", "kl_horizon", "--kl_target 0.1 --init_kl_coef 0.1"),
        ("--off_policy_cap 3", "off_policy_cap", "--off_policy_correction tis"),
        ("--off_policy_cap 3", "off_policy_cap", "--off_policy_correction seq-tis"),
        ("--off_policy_cap 3 --off_policy_correction icepop", "off_policy_cap", "--off_policy_correction tis"),
        ("--no-dynamic_sampling --dynamic_sampling_rounds 3", "dynamic_sampling_rounds", "--dynamic_sampling"),
        ("--no-overlong_buffer --overlong_buffer_len 5", "overlong_buffer_len", "--overlong_buffer"),
        (
            "--no-overlong_buffer --overlong_buffer_penalty_factor 0.5",
            "overlong_buffer_penalty_factor",
            "--overlong_buffer",
        ),
        ("--num_workers 0 --prefetch_factor 4", "prefetch_factor", "--num_workers 1"),
        ("--wandb_org a --wandb_group b", "wandb_org wandb_group", "--use_wandb"),
        ("--wandb_run_name c", "wandb_run_name", "--use_wandb"),
        ("--no-save_trajectories --rollout_log_interval 7", "rollout_log_interval", "--save_trajectories"),
        ("--zpg 2 --overlap_comm", "zpg overlap_comm", "--zero_stage 3"),
        ("--shard_size 2 --fsdp_cpu_offload", "shard_size fsdp_cpu_offload", "--fsdp"),
        ("--ema_decay 0.5", "ema_decay", "--enable_ema"),
        ("--async_deterministic", "async_deterministic", "--max_staleness 1"),
        ("--max_staleness 1 --max_logprob_gap 0.5", "max_logprob_gap", "--max_staleness 0"),
        ("--lr_schedule constant --min_lr_ratio 0.3", "min_lr_ratio", "--lr_schedule linear"),
        ("--amp_dtype fp16", "amp_dtype", "--amp"),
        ("--lr_decay_ratio 0.3", "lr_decay_ratio", "--lr_schedule wsd"),
        ("--ckpt_path a", "ckpt_path", "--load_checkpoint"),
        ("--ckpt_path a", "ckpt_path", "--ckpt_weights_only"),
        (f"{ALWAYS} --kl_estimator k2", "kl_estimator", "--init_kl_coef 0.1"),
        (f"{ALWAYS} --micro_rollout_batch_size 3", "micro_rollout_batch_size", "--init_kl_coef 0.1"),
        (f"{ALWAYS} --micro_rollout_batch_size 3", "micro_rollout_batch_size", "--advantage_estimator ppo"),
        (f"{ALWAYS} --micro_rollout_batch_size 3", "micro_rollout_batch_size", "--off_policy_correction tis"),
        (OF_CRITIC, CRITIC, "--advantage_estimator ppo"),
        (
            "--save_value_network --freezing_actor_steps 4",
            "save_value_network freezing_actor_steps",
            "--advantage_estimator ppo",
        ),
        ("--max_turns 3", "max_turns", "--environment calculator --apply_chat_template"),
        ("--mixed_mm_data --max_pixels 9", "mixed_mm_data max_pixels", "--images_key image"),
        ("--reward_batch_tokens 9", "reward_batch_tokens", "--reward_pretrain a"),
        ("--judge_model a", "judge_model", "--judge_url http://a"),
    ],
)
def test_a_setting_is_idle_exactly_until_another_is_on(words: str, names: str, acting: str) -> None:
    assert idle("rl", words) == names
    assert idle("rl", f"{words} {acting}") == ""


@pytest.mark.parametrize("words", ["--dynamic_sampling_rounds 3", "--overlong_buffer_len 5", "--max_logprob_gap 0.5"])
def test_a_part_that_the_algorithm_may_bring_itself_makes_nothing_idle(words: str) -> None:
    assert idle("rl", words) == ""


def test_rows_to_hold_out_and_a_smallest_improvement_may_be_idle_in_supervised_training() -> None:
    assert idle("sft", "--held_out_rows 5") == ""
    assert idle("sft", "--held_out_rows 5 --eval_data x") == "held_out_rows"
    assert idle("sft", "--min_improvement 0.2") == "min_improvement"
    assert idle("sft", "--min_improvement 0.2 --patience 2 --held_out_rows 5") == ""


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_an_interval_of_evaluations_is_idle_without_held_out_rows(command: str) -> None:
    assert idle(command, "--eval_steps 5") == "eval_steps"
    assert idle(command, "--eval_steps 5 --eval_data x") == ""
    assert idle(command, "--eval_steps 0") == idle(command, "--eval_steps -1") == ""
    if command == "sft":
        assert idle(command, "--eval_steps 5 --held_out_rows 2") == ""


@pytest.mark.parametrize("command", [name for name in with_settings() if "pretrain" in schema(name)])
def test_a_default_that_a_file_repeats_is_never_called_idle(
    command: str, tmp_path: Path, needed_words: NeededWords
) -> None:
    stored = tmp_path / "config.yaml"
    stored.write_text(resolve(command, needed_words(command, "--pretrain", "m")).config_yaml)
    again = resolve(command, ["--config", str(stored)])
    assert {origin.kind for origin in again.origins.values()} == {"file"}
    assert again.notes == ()


def test_a_note_says_where_patience_waits_for_no_evaluation() -> None:
    words = ["--pretrain", "m", "--prompt_data", "rows.jsonl", "--patience", "2", "--held_out_rows", "9"]
    assert not [note for note in resolve("sft", words).notes if "patience" in note]
    [note] = [note for note in resolve("sft", [*words, "--eval_steps", "0"]).notes if "patience" in note]
    assert "no evaluation is made while the run goes on" in note
