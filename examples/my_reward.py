"""A reward of your own: `rft-train rl --reward examples/my_reward.py:reward_fn`.

The function gets all responses to one prompt at a time, in processes of its own. It returns one number a
response; None says that a response could not be scored, which is not the same as 0. Arguments are given by
name: finish_reasons, prompts or any column of the rows; docs/rewards.md has them all.
"""

from __future__ import annotations


def reward_fn(responses: list[str], labels: list[str]) -> list[float]:
    """1 for the right answer, less a tenth of a point for each character that is not needed."""
    return [
        float(label in response) - 0.1 * max(0, len(response.strip()) - len(label))
        for response, label in zip(responses, labels, strict=True)
    ]


def finished_only(responses: list[str], labels: list[str], *, finish_reasons: list[str]) -> list[float | None]:
    """As `reward_fn`, and no score for a response that was cut off at the limit."""
    scores = reward_fn(responses, labels)
    return [score if reason == "stop" else None for score, reason in zip(scores, finish_reasons, strict=True)]
