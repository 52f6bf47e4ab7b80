"""What must hold between settings, and what is said of settings without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.build.algorithm import algorithm_record, algorithm_type
from rft.config.errors import SettingsError
from rft.settings import RlSettings
from rft_algos.algorithms import components
from rft_algos.algorithms.published import Cpgd, Dapo, DrGrpo, Grpo, PolicyAlgorithm, Ppo
from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--n_samples_per_prompt", "1"], "batch.group_of_one"),
        (["--temperature", "0"], "sampling.greedy"),
        (["--use_kl_loss", "--init_kl_coef", "0"], "kl.no_weight"),
        (["--engine_tp_size", "2", "--engine_type", "native"], "engine.native_one_device"),
        (["--max_len", "512"], "length.no_room"),
        (["--system_prompt", "add"], "prompt.system_without_chat"),
        (["--zpg", "2", "--zero_stage", "2"], "strategy.zpg_stage"),
        (["--overlap_comm", "--zero_stage", "1"], "strategy.overlap_stage"),
    ],
)
def test_a_combination_that_cannot_run_is_refused_with_values_and_origins(argv: list[str], code: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--pretrain", "m", *argv])
    problem = caught.value.problem
    assert problem.code == code
    assert argv[0].removeprefix("--") in problem.what
    assert "command line" in problem.where
    resolve("rl", ["--pretrain", "m", *argv, *problem.do.split()])


@pytest.mark.parametrize("words", ["--engine_mem_util 0.5", "--engine_tp_size 2", "--engine_fp8"])
def test_a_setting_of_vllm_is_refused_only_where_auto_cannot_become_vllm(words: str) -> None:
    # which engine auto is depends on the machine, which is asked later
    resolve("rl", ["--pretrain", "m", *words.split()])
    with pytest.raises(SettingsError):
        resolve("rl", ["--pretrain", "m", "--engine_type", "native", *words.split()])


@pytest.mark.parametrize("command", ["rl", "sft", "eval", "generate"])
def test_a_system_prompt_that_nothing_renders_is_refused_by_every_command(command: str) -> None:
    words = ["--pretrain", "m", "--system_prompt", "add"]
    with pytest.raises(SettingsError) as caught:
        resolve(command, words)
    assert caught.value.problem.code == "prompt.system_without_chat"
    resolve(command, [*words, "--apply_chat_template"])


def test_the_example_of_the_guides_batch_rule_is_accepted() -> None:
    argv = ["--train_batch_size", "256", "--rollout_batch_size", "64", "--n_samples_per_prompt", "8"]
    assert resolve("rl", ["--pretrain", "m", *argv]).settings.batch.train_batch_size == 256


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--kl_estimator", "k2", "--init_kl_coef", "0"], "kl_estimator"),
        (["--value_clip", "0.1"], "value_clip"),
        (["--wandb_org", "us"], "wandb_org"),
        (["--chunk_size", "64"], "chunk_size"),
        (["--ckpt_path", "runs/a"], "ckpt_path"),
        (["--zpg", "2"], "zpg"),
        (["--no-save_trajectories", "--num_trajectories_to_save", "3"], "num_trajectories_to_save"),
    ],
)
def test_a_setting_without_effect_is_told_and_not_passed_over(argv: list[str], name: str) -> None:
    (note,) = resolve("rl", ["--pretrain", "m", *argv]).notes
    assert note.startswith(name)
    assert "has no effect" in note


def test_nothing_is_told_of_defaults_or_of_settings_that_act() -> None:
    assert resolve("rl", ["--pretrain", "m"]).notes == ()
    assert resolve("rl", ["--pretrain", "m", "--kl_estimator", "k2", "--init_kl_coef", "0.1"]).notes == ()


def test_greedy_decoding_is_fine_where_nothing_is_trained() -> None:
    assert resolve("eval", ["--pretrain", "m", "--temperature", "0"]).values["temperature"] == 0.0


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--use_gspo", "--policy_loss", "ppo"], "algorithm.two_surrogates"),
        (["--use_gspo", "--use_gmpo"], "algorithm.two_surrogates"),
        (["--use_gspo", "--loss_agg_mode", "token-mean"], "algorithm.sequence_loss"),
        (["--policy_loss", "gmpo", "--advantage_estimator", "dapo"], "algorithm.sequence_loss"),
        (["--policy_loss", "sapo", "--eps_clip", "0.1"], "algorithm.foreign_flag"),
        (["--dual_clip", "3"], "algorithm.foreign_flag"),
        (["--lambd", "0.9"], "algorithm.foreign_flag"),
        (["--gamma", "0.9", "--advantage_estimator", "rloo"], "algorithm.foreign_flag"),
        (["--pass_k", "2"], "algorithm.foreign_flag"),
        (["--off_policy_low", "0.5"], "algorithm.foreign_flag"),
        (["--kl_target", "0.01", "--init_kl_coef", "0"], "kl.no_controller"),
        (["--kl_target", "0.01", "--advantage_estimator", "dapo"], "kl.no_controller"),
        (["--entropy_target", "1"], "entropy.no_weight"),
        (["--advantage_estimator", "nowhere.py:Mine"], "algorithm.file_missing"),
        (["--advantage_estimator", "grop"], "algorithm.unknown"),
    ],
)
def test_flags_that_disagree_are_refused_with_the_reason(argv: list[str], code: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--pretrain", "m", *argv])
    problem = caught.value.problem
    assert problem.code == code
    assert "command line" in problem.where
    assert problem.why
    assert problem.do


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [("import math\n\nmath.nothing\n", 3, "AttributeError"), ("x = 1\ndef broken(:\n", 2, "SyntaxError")],
)
def test_an_algorithm_file_that_raises_is_named_with_its_line(tmp_path: Path, text: str, line: int, error: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(OptionsError) as caught:
        algorithm_type(f"{path}:Mine")
    problem = caught.value.problem
    assert problem.code == "algorithm.file_fails"
    assert problem.where.startswith(f"{path}:{line} ")
    assert error in problem.what


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], Grpo()),
        (["--eps_clip", "0.1"], Grpo(surrogate=components.PpoClip(low=0.1, high=0.1))),
        (["--eps_clip_high", "0.3"], Grpo(surrogate=components.PpoClip(low=0.2, high=0.3))),
        (["--init_kl_coef", "0"], Grpo(kl_coef=0.0, kl_place="none")),
        (["--no-use_kl_loss"], Grpo(kl_place="reward")),
        (["--use_gspo"], Grpo(surrogate=components.Gspo())),
        (["--policy_loss", "dppo_kl"], Grpo(surrogate=components.Dppo(divergence="kl"))),
        (["--loss_agg_mode", "seq-mean-token-sum-norm"], Grpo(aggregation="fixed_length", max_tokens=1024)),
        (["--advantage_estimator", "dr_grpo", "--generate_max_len", "64"], DrGrpo(max_tokens=64)),
        (["--advantage_estimator", "CPGD", "--init_kl_coef", "0.5"], Cpgd(drift_coef=0.5)),
        (["--advantage_estimator", "dapo", "--no-dynamic_sampling"], Dapo(dynamic_sampling=False)),
        (["--advantage_estimator", "dapo", "--no-overlong_buffer"], Dapo(overlong_buffer_share=0.0)),
        (["--advantage_estimator", "dapo", "--init_kl_coef", "0.1"], Dapo(kl_coef=0.1, kl_place="reward")),
        (["--advantage_estimator", "ppo", "--lambd", "0.9"], Ppo(advantage=components.Gae(lambd=0.9))),
        (["--overlong_buffer"], Grpo(overlong_buffer_share=0.2)),
        (["--off_policy_correction", "icepop"], Grpo(correction=components.TokenMis())),
        (
            ["--off_policy_correction", "tis", "--off_policy_cap", "3"],
            Grpo(correction=components.TokenTis(cap=3.0)),
        ),
        (["--use_fire"], Grpo(correction=components.TokenTis())),
        (["--use_fire", "--off_policy_correction", "off"], Grpo()),
        (["--high_entropy_token_ratio", "0.2"], Grpo(high_entropy_fraction=0.2)),
        (["--advantages_norm", "--advantage_clip", "2"], Grpo(normalise_advantages=True, advantage_clip=2.0)),
    ],
)
def test_flags_change_parts_of_the_published_algorithm(argv: list[str], expected: PolicyAlgorithm) -> None:
    settings = resolve("rl", ["--pretrain", "m", *argv]).settings
    assert isinstance(settings, RlSettings)
    assert algorithm_record(settings) == expected
