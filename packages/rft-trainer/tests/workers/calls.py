"""Payloads of calls of a reward function."""

from __future__ import annotations

from typing import Any

from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.user_function import payload
from rft_trainer.workers.reward_arguments import Binding

BOTH = {"responses": "responses", "labels": "labels"}


def call_payload(*responses: str, label: Any = None, sources: dict[str, str] = BOTH, **binding: Any) -> dict[str, Any]:
    """Return the payload of a call with responses to one prompt; `binding` are fields of a `Binding`."""
    columns = {"level": 2, "tags": ["x"]}
    items = [RewardItem("train:0", "?", text, label, "stop", 1, columns=columns) for text in responses]
    return payload(items, Binding(sources, **({"one_at_a_time": False, "takes_rest": False} | binding)))
