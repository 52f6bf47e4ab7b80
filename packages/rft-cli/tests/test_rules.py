"""What must hold between settings, and what is said of settings without effect."""

from __future__ import annotations

import pytest

from rft_cli.config.errors import SettingsError
from rft_cli.config.resolve import resolve


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--n_samples_per_prompt", "1"], "batch.group_of_one"),
        (["--temperature", "0"], "sampling.greedy"),
        (["--use_kl_loss"], "kl.no_weight"),
        (["--engine_tp_size", "2"], "engine.native_one_device"),
        (["--engine_mem_util", "0.5"], "engine.native_no_reserve"),
        (["--max_len", "512"], "length.no_room"),
    ],
)
def test_a_combination_that_cannot_run_is_refused_with_values_and_origins(argv: list[str], code: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--pretrain", "m", *argv])
    problem = caught.value.problem
    assert problem.code == code
    assert argv[0].removeprefix("--") in problem.what
    assert "command line" in problem.where
    fixed = [word for word in problem.do.split("(")[0].split() if word]
    resolve("rl", ["--pretrain", "m", *([] if code == "engine.native_no_reserve" else argv), *fixed])


def test_the_example_of_the_guides_batch_rule_is_accepted() -> None:
    argv = ["--train_batch_size", "256", "--rollout_batch_size", "64", "--n_samples_per_prompt", "8"]
    assert resolve("rl", ["--pretrain", "m", *argv]).settings.batch.train_batch_size == 256


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--kl_estimator", "k2"], "kl_estimator"),
        (["--wandb_org", "us"], "wandb_org"),
        (["--chunk_size", "64"], "chunk_size"),
        (["--ckpt_path", "runs/a"], "ckpt_path"),
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
