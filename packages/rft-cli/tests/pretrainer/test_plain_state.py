"""States go to JSON and tensors and come back the same; code is refused."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from rft_cli.pretrainer.plain_state import joined, random_state, restore_random, split
from rft_core.errors import CheckpointError


def test_a_state_comes_back_with_its_kinds() -> None:
    state = {0: {"step": torch.tensor(3.0), "betas": (0.9, 0.95)}, "groups": [{"lr": math.inf, "x": None, "on": True}]}
    plain, tensors = split(state, "optimizer")
    back = joined(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert back == state
    assert list(tensors) == ["optimizer.0.step"]
    assert isinstance(back[0]["betas"], tuple)


def test_a_function_in_a_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"scheduler\.rule is a function"):
        split({"rule": lambda step: step}, "scheduler")


def test_generators_repeat_what_they_drew() -> None:
    state = joined(*split(random_state(), "random"))
    drawn = random.random(), torch.rand(2).tolist()
    restore_random(state)
    assert (random.random(), torch.rand(2).tolist()) == drawn
