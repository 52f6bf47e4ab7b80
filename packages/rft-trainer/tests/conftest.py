"""One thread a test process, and the runs that several tests of asynchronous rollouts share importable by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rft_trainer.records.scores import RewardItem

sys.path.insert(0, str(Path(__file__).parent / "async_rollouts"))
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
