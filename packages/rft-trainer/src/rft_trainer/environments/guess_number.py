"""Guessing game environment: a number to be guessed, with "higher" and "lower" as hints."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rft_core.keyed_random import integers
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt, Message

HINTS = ("lower", "higher")
_LOWEST, _HIGHEST = 1, 7
"""The range of a prompt that names none."""
_NUMBER = re.compile(r"\d{1,6}")
_RANGE = re.compile(r"(\d{1,6}) to (\d{1,6})")


class GuessNumber:
    """Environment that rewards the right guess with 1 and ends; a wrong guess gets a hint.

    The number is the label, or drawn by the key from the range that the prompt names ("from 23 to 29").
    """

    def reset(self, prompt: EnvironmentPrompt, key: int) -> Sequence[Message | str]:
        """Begin an episode: choose the number to be guessed."""
        label = prompt.label or ""
        named = _RANGE.search(prompt.text)
        low, high = (int(named[1]), int(named[2])) if named else (_LOWEST, _HIGHEST)
        self._number = int(label) if label.isdecimal() else int(integers(key, 1, low, max(low, high) + 1))
        return ()

    def step(self, turn: AssistantTurn) -> Answer:
        """Answer a guess: reward and end, "higher", "lower", or "no number"."""
        said = _NUMBER.findall(turn.text)
        if not said:
            return Answer(messages=["no number"])
        if int(said[-1]) == self._number:
            return Answer(reward=1.0, done=True, parts={"correctness": 1.0})
        return Answer(messages=[HINTS[int(said[-1]) < self._number]])
