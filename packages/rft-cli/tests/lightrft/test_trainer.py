"""LightRFT's names as settings: the same checks and errors as on the command line, before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.errors import SettingsError
from rft_cli.config.resolve import resolve
from rft_cli.lightrft import keywords as lightrft_keywords
from rft_cli.lightrft.trainer import SPMDPPOTrainer
from rft_core.errors import OptionsError

MODEL = {"pretrain": "MODEL"}


def reward_fn(responses: list[str], labels: list[str]) -> list[float]:
    """Any."""
    return [1.0] * len(responses)


def test_keywords_are_the_settings_of_the_command() -> None:
    keywords = {
        "pretrain": Path("MODEL"),
        "prompt_data": "train.jsonl",
        "advantage_estimator": "group_norm",
        "n_samples_per_prompt": 4,
        "actor_learning_rate": 1e-6,
        "adam_betas": (0.9, 0.98),
        "bf16": True,
        "save_trajectories": False,
        "max_len": None,
        "use_kl_loss": None,
        "disable_engine_sleep": True,
        "logging_steps": 5,
        "use_wandb": True,
        "use_tensorboard": False,
    }
    words = "--pretrain MODEL --prompt_data train.jsonl --advantage_estimator group_norm --n_samples_per_prompt 4 "
    words += "--actor_learning_rate 1e-6 --adam_betas 0.9 0.98 --bf16 --no-save_trajectories --max_len none "
    words += "--use_kl_loss none --disable_engine_sleep --logging_steps 5 --use_wandb"
    by_keyword, by_flag = lightrft_keywords.resolved(keywords), resolve("rl", words.split())
    assert by_keyword.settings == by_flag.settings
    assert by_keyword.values["enable_engine_sleep"] is False
    assert by_keyword.values["use_wandb"] == "rft"
    assert {str(by_keyword.origins[name]) for name in ("bf16", "log_interval")} == {"keyword argument"}
    assert "bf16: true" in by_keyword.config_yaml
    assert resolve("rl", lightrft_keywords.command_words(keywords)).settings == by_flag.settings


def test_files_of_settings_come_before_keywords(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 3\nrollout_batch_size: 16\n")
    (tmp_path / "b.yaml").write_text("rollout_batch_size: 32\n")
    one = lightrft_keywords.resolved({**MODEL, "config": tmp_path / "a.yaml", "seed": 5})
    assert (one.settings.run.seed, one.settings.batch.rollout_batch_size) == (5, 16)
    both = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    two = lightrft_keywords.resolved({**MODEL, "config": both})
    assert (two.settings.run.seed, two.settings.batch.rollout_batch_size) == (3, 32)
    assert lightrft_keywords.command_words({"config": both}) == ["--config", both[0], "--config", both[1]]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"n_sample_per_prompt": 8}, ["--n_sample_per_prompt", "8"]),
        ({"advantage_estimatr": "group_norm"}, ["--advantage_estimatr", "group_norm"]),
        ({"grad_accum_dtype": 2}, ["--grad_accum_dtype", "2"]),
        ({"engine_type": "tgi"}, ["--engine_type", "tgi"]),
        ({"rollout_batch_size": 0}, ["--rollout_batch_size", "0"]),
        ({"bf16": "maybe"}, ["--bf16", "maybe"]),
        ({"temperature": 0.0}, ["--temperature", "0.0"]),
        ({"learning_rate": 1e-6}, ["--learning_rate", "1e-06"]),
    ],
)
def test_errors_are_those_of_the_command_line(keywords: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingsError) as by_flag:
        resolve("rl", ["--pretrain", "MODEL", *words])
    with pytest.raises(SettingsError) as by_keyword:
        SPMDPPOTrainer(**MODEL, **keywords)
    told, expected = by_keyword.value.problem, by_flag.value.problem
    assert told.code == expected.code
    for name in ("what", "why"):
        assert getattr(told, name) == getattr(expected, name).replace("--", "") or told.code == "option.refused"
    assert "keyword argument" in told.where


def test_an_unknown_keyword_says_the_nearest_as_python_writes_it() -> None:
    with pytest.raises(SettingsError) as caught:
        SPMDPPOTrainer(**MODEL, n_sample_per_prompt=8)
    assert caught.value.problem.code == "option.unknown"
    assert caught.value.problem.what.endswith(" n_sample_per_prompt")
    assert caught.value.problem.do == "n_samples_per_prompt=8"
    with pytest.raises(SettingsError) as caught:
        SPMDPPOTrainer(**MODEL, advantage_estimatr="rloo")
    assert caught.value.problem.do == "advantage_estimator='rloo'"
    with pytest.raises(SettingsError) as caught:
        SPMDPPOTrainer(**MODEL, bf61=True)
    assert caught.value.problem.do == "bf16=True"


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        SPMDPPOTrainer(n_sample_per_prompt=8, rollout_batch_size=0)
    assert [problem.code for problem in caught.value.problems] == ["option.unknown", "option.value", "option.missing"]


def test_none_is_refused_where_a_setting_cannot_be_none() -> None:
    with pytest.raises(SettingsError) as caught:
        SPMDPPOTrainer(**MODEL, eval_data=None)
    assert caught.value.problem.code == "option.value"


@pytest.mark.parametrize("given", [((object(), object()), {}), ((), {"strategy": object(), "actor": None})])
def test_built_objects_are_refused_with_what_to_use(given: tuple[tuple[object, ...], dict[str, object]]) -> None:
    positional, keywords = given
    with pytest.raises(OptionsError) as caught:
        SPMDPPOTrainer(*positional, **keywords)
    assert caught.value.problem.code == "lightrft.object"
    assert "pretrain=" in caught.value.problem.do


def test_a_reward_function_is_checked_at_once_and_is_the_only_reward() -> None:
    with pytest.raises(OptionsError) as caught:
        SPMDPPOTrainer(**MODEL, reward_fn=lambda prompts: 1.0)
    assert caught.value.problem.code == "reward.signature"
    with pytest.raises(OptionsError) as caught:
        SPMDPPOTrainer(**MODEL, reward_fn=reward_fn, reward="math")
    assert caught.value.problem.code == "lightrft.two_rewards"
    assert "reward = 'math' and reward_fn = reward_fn" in caught.value.problem.what


def test_nothing_is_built_or_written_by_the_constructor(tmp_path: Path) -> None:
    trainer = SPMDPPOTrainer(pretrain=tmp_path / "absent", prompt_data="absent.jsonl", reward_fn=reward_fn)
    trainer.close()
    assert list(tmp_path.iterdir()) == []


def test_the_names_of_the_guide_are_there() -> None:
    import rft_cli.lightrft.trainer as api

    assert set(api.__all__) >= {"SPMDPPOTrainer", "TrajectorySaver", "register_patch"}
    assert all(hasattr(api, name) for name in api.__all__)
    for name in ("fit", "ppo_train", "strategy", "actor", "compute_advantages"):
        assert hasattr(SPMDPPOTrainer, name)
