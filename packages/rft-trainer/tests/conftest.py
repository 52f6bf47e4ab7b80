"""One thread a test process, and what the tests of a room share importable by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rft_trainer.records.scores import RewardItem

for folder in ("async_rollouts", "data/token_shards", "workers"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
torch.set_num_threads(1)

MakeItem = Callable[..., RewardItem]
WriteReward = Callable[[str], Path]


@pytest.fixture
def make_item() -> MakeItem:
    def make(
        response: str, label: str | None = "18", *, prompt: str = "?", prompt_id: str = "p", finish_reason: str = "stop"
    ) -> RewardItem:
        return RewardItem(prompt_id, prompt, response, label, finish_reason, num_tokens=len(response))

    return make


@pytest.fixture
def write_reward(tmp_path: Path) -> WriteReward:
    def write(source: str) -> Path:
        path = tmp_path / "my_reward.py"
        path.write_text(source)
        return path

    return write
