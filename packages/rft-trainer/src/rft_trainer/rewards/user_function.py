"""Reward from a function in the user's file, run in processes that can be killed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.images import sources_of
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.pool import Job, Outcome, WorkerPool


class FileReward:
    """Reward that calls `function(responses, labels)` of a file once a prompt, with all its responses.

    What it prints is kept out of the terminal and shown in the `detail` of a crash. It may keep
    state in its module, but each of the processes has its own, and a killed one starts over.
    """

    def __init__(
        self,
        path: str | Path,
        function: str,
        *,
        num_workers: int = 1,
        timeout: float = 10.0,
        limits: ProcessLimits | None = None,
        kind: str = "file",
    ) -> None:
        """Load the file and check the function.

        Args:
            path: a Python file.
            function: its name; see `user_file` for the signature.
            num_workers: processes, each of which imports the file.
            timeout: seconds allowed for each response of a call.
            limits: memory of each process, and the secrets that it sees.
            kind: "file", or "installed" where `path` is the name of an installed module.

        Raises:
            OptionsError: no such file or function, or a signature that cannot be called.
            DataError: the file raises while it is imported.
        """
        self._timeout = timeout
        self._pool = WorkerPool(f"{kind}:{path}:{function}", num_workers=num_workers, limits=limits)
        self._pool.start()

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        calls = [list(call) for _, call in groupby(items, key=lambda item: item.prompt_id)]
        # the deadline grows with the responses, since they are scored in one call
        outcomes = self._pool.run([Job(payload(call), self._timeout * len(call)) for call in calls])
        return [score for call, outcome in zip(calls, outcomes, strict=True) for score in _scores(outcome, len(call))]

    def close(self) -> None:
        """Stop the worker processes."""
        self._pool.close()


def payload(items: Sequence[RewardItem]) -> dict[str, object]:
    """Build the payload of a `user_file` handler: all responses to one prompt, whose images they share."""
    return {
        "responses": [item.response_text for item in items],
        "labels": [item.label for item in items],
        "prompts": [item.prompt_text for item in items],
        "prompt_ids": [item.prompt_id for item in items],
        "finish_reasons": [item.finish_reason for item in items],
        "num_tokens": [item.num_tokens for item in items],
        "images": sources_of(items[0]),
    }


def _scores(outcome: Outcome, num_items: int) -> list[Score]:
    """Convert the result of one call to scores; a text in place of a number is the reason why it is missing."""
    if outcome.status is not RewardStatus.OK:
        return [Score(None, outcome.status, detail=outcome.detail)] * num_items
    assert isinstance(outcome.result, list)
    assert len(outcome.result) == num_items
    return [score(value) for value in outcome.result]


def score(value: Any) -> Score:
    """Convert a `user_file` handler's value for one response to a score."""
    if isinstance(value, dict):
        steps = tuple((int(end), float(number)) for end, number in value["steps"])
        return Score(value["reward"], breakdown=value["parts"], steps=steps)
    return Score(value) if isinstance(value, float) else Score(None, RewardStatus.FAILED, detail=str(value))
