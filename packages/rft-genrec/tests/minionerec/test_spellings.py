"""MiniOneRec's parameters as settings."""

from pathlib import Path
from typing import Any

import pytest

from rft.config.errors import SettingsError
from rft.config.merged_sources import defaults, validated
from rft.config.origins import GivenSetting
from rft.resolved import Origin, Resolved
from rft_genrec.minionerec.spellings import rl, sft


def resolved(command: str, **given: str) -> Resolved[Any]:
    """Settings of a command of the library that takes these names too."""
    merged = defaults(command)
    merged.spellings = {"sft": sft, "rl": rl}[command]()
    base = {"prompt_data": "rows.jsonl", "reward": "exact"} if command == "rl" else {"prompt_data": "rows.jsonl"}
    names = given if {"base_model", "model_path"} & set(given) else {"pretrain": "model", **given}
    for name, text in {**base, **names}.items():
        merged.add(GivenSetting(f"--{name}", name, (text,), Origin("command line")))
    return validated(merged)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher placed this process."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("command", "name", "text", "setting", "value"),
    [
        ("sft", "base_model", "m", "pretrain", "m"),
        ("sft", "sample", "-1", "max_samples", 0),
        ("sft", "sample", "7", "max_samples", 7),
        ("sft", "batch_size", "64", "train_batch_size", 64),
        ("sft", "micro_batch_size", "4", "micro_train_batch_size", 4),
        ("sft", "per_device_train_batch_size", "4", "micro_train_batch_size", 4),
        ("sft", "num_epochs", "2", "max_epochs", 2),
        ("sft", "cutoff_len", "512", "max_len", 512),
        ("sft", "max_grad_norm", "0.3", "max_norm", 0.3),
        ("sft", "output_dir", "out", "save_path", "out"),
        ("sft", "wandb_project", "p", "use_wandb", "p"),
        ("sft", "offload_optimizer_device", "none", "adam_offload", False),
        ("sft", "offload_param_device", "none", "fsdp_cpu_offload", False),
        ("sft", "train_from_scratch", "False", "pretrain", "model"),
        ("sft", "resume_from_checkpoint", "none", "load_checkpoint", False),
        ("sft", "resume_from_checkpoint", "runs/a", "ckpt_path", "runs/a"),
        ("sft", "resume_from_checkpoint", "runs/a", "load_checkpoint", True),
        ("rl", "model_path", "m", "pretrain", "m"),
        ("rl", "num_train_epochs", "2", "num_episodes", 2),
        ("rl", "learning_rate", "1e-5", "actor_learning_rate", 1e-5),
        ("rl", "num_generations", "16", "n_samples_per_prompt", 16),
        ("rl", "beta", "0.001", "init_kl_coef", 0.001),
        ("rl", "dapo", "true", "loss_agg_mode", "token-mean"),
        ("rl", "dapo", "False", "loss_agg_mode", None),
        ("rl", "mask_all_zero", "true", "filter_groups", True),
        ("rl", "add_gt", "False", "n_samples_per_prompt", 8),
    ],
)
def test_a_parameter_becomes_a_setting(command: str, name: str, text: str, setting: str, value: object) -> None:
    assert resolved(command, **{name: text}).values[setting] == value


@pytest.mark.parametrize(
    ("command", "given", "code"),
    [
        ("sft", {"train_file": "x.csv"}, "option.refused"),
        ("sft", {"category": "Books"}, "option.refused"),
        ("sft", {"train_from_scratch": "true"}, "option.refused"),
        ("sft", {"offload_param_device": "cpu"}, "option.refused"),
        ("sft", {"offload_optimizer_device": "nvme", "zero_stage": "2"}, "option.refused"),
        ("sft", {"offload_optimizer_device": "cpu"}, "genrec.idle_offload"),
        ("sft", {"gradient_accumulation_steps": "2", "train_batch_size": "9"}, "genrec.accumulation"),
        ("sft", {"deepspeed_config": "absent.yaml"}, "deepspeed.file"),
        ("rl", {"add_gt": "true"}, "option.refused"),
        ("rl", {"sync_ref_model": "True"}, "option.refused"),
        ("rl", {"ada_path": "x.pkl"}, "option.refused"),
        ("rl", {"reward_type": "click"}, "option.refused"),
        ("rl", {"eval_step": "0.0999"}, "option.refused"),
    ],
)
def test_a_parameter_without_a_meaning_or_an_effect_is_refused(command: str, given: dict[str, str], code: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolved(command, **given)
    assert [problem.code for problem in caught.value.problems] == [code]
    assert caught.value.problems[0].do


def test_accumulation_gives_the_batch_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"per_device_train_batch_size": "4", "gradient_accumulation_steps": "2"}
    assert resolved("sft", **given).values["train_batch_size"] == 8
    assert resolved("sft", **given, nproc="2").values["train_batch_size"] == 16
    assert resolved("sft", **given, train_batch_size="8").values["train_batch_size"] == 8
    monkeypatch.setenv("WORLD_SIZE", "8")
    run = resolved("sft", **given)
    assert run.values["train_batch_size"] == 64
    assert any("4 x 2 x 8 ranks = 64" in note for note in run.notes)


def test_a_file_of_accelerate_gives_several_settings(tmp_path: Path) -> None:
    file = tmp_path / "zero2_opt.yaml"
    file.write_text(
        "mixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 2\n  offload_optimizer_device: cpu\n"
        "  gradient_accumulation_steps: 2\n  reduce_scatter: true\n"
    )
    run = resolved("sft", deepspeed_config=str(file), micro_train_batch_size="2")
    names = ("bf16", "zero_stage", "adam_offload", "train_batch_size")
    assert [run.values[name] for name in names] == [True, 2, True, 4]
    assert any("reduce_scatter = true" in note for note in run.notes)


def test_the_reward_and_the_group_have_words_of_their_own() -> None:
    """These settings are of `genrec rl` alone."""
    table = rl()
    for name, value, expected in (("reward_type", "ranking", "rule,ranking"), ("beam_search", True, "beams")):
        option = GivenSetting(f"--{name}", name, (str(value),), Origin("command line"))
        (meant,) = table.translate(option, value).options
        assert meant.texts == (expected,)
