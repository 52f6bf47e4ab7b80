"""The number of steps and updates of an RL run, which its learning rate follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft.build.algorithm import algorithm_record
from rft.build.rl_data import RlData, rl_data, step_rules
from rft.settings import RlSettings
from rft_models.settings import ModelSettings
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.settings.batches import BatchSettings
from rft_trainer.settings.data import DataSettings


def settings_of(path: Path, **batch: int) -> RlSettings:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(10)))
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "train_batch_size": 4} | batch
    return RlSettings(
        model=ModelSettings(pretrain="m"), data=DataSettings(prompt_data=str(file)), batch=BatchSettings(**sizes)
    )


def data_of(path: Path, **batch: int) -> RlData:
    return rl_data(settings_of(path, **batch), HfTokenizer(build_character_tokenizer("0123456789+= ")), 1)


@pytest.mark.parametrize(
    ("batch", "num_steps", "num_updates"),
    [
        # rollouts of 8, 8 and 4 samples an episode: updates of 4, so 2, 2 and 1
        ({}, 3, 5),
        ({"max_epochs": 3}, 3, 15),
        ({"num_episodes": 2}, 6, 10),
        ({"max_steps": 2}, 2, 4),
        ({"max_steps": 2, "max_epochs": 3}, 2, 12),
        ({"max_steps": 4, "num_episodes": 2, "max_epochs": 2}, 4, 16),
        ({"max_steps": 99}, 3, 5),
    ],
)
def test_a_run_that_max_steps_ends_counts_the_updates_that_it_takes(
    batch: dict[str, int], num_steps: int, num_updates: int, tmp_path: Path
) -> None:
    data = data_of(tmp_path, **batch)
    assert (data.num_steps, data.num_updates) == (num_steps, num_updates)


def test_the_rules_of_a_step_follow_the_settings(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, max_epochs=2, train_batch_size=8)
    record = algorithm_record(settings)
    data = rl_data(settings, HfTokenizer(build_character_tokenizer("0123456789+= ")), 1)
    rules = step_rules(settings, data, record)
    assert (rules.prompts_per_rollout, rules.train_batch_size, rules.epochs_per_step) == (4, 8, 2)
    assert (rules.rollouts_per_step, rules.smallest_group) == (1, 2)
