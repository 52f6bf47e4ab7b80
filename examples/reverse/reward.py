"""Rewards of the two tasks: `--reward examples/reverse/reward.py:reverse` and `...:sort`.

Each scores one response and looks at its prompt alone: no right answer is needed, only a way to check one.
"""

from __future__ import annotations


def reverse(response: str, prompt: str) -> float:
    """1 where the response is the prompt's word backwards."""
    word = prompt.removeprefix("reverse: ").strip()
    return float(response.strip() == word[::-1])


def sort(response: str, prompt: str) -> float:
    """1 where the response has the prompt's numbers in rising order."""
    numbers = prompt.removeprefix("sort: ").split()
    return float(response.split() == sorted(numbers, key=int))
