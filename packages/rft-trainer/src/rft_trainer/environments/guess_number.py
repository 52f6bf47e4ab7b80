"""A number to be guessed, with "higher" and "lower" on the way."""

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
    """1 for the number itself, which ends the episode; else a hint.

    The number is the label, or drawn by the key from the range that the prompt names ("from 23 to 29").
    """

    def reset(self, prompt: EnvironmentPrompt, key: int) -> Sequence[Message | str]:
        """Think of a number."""
        label = prompt.label or ""
        named = _RANGE.search(prompt.text)
        low, high = (int(named[1]), int(named[2])) if named else (_LOWEST, _HIGHEST)
        self._number = int(label) if label.isdecimal() else int(integers(key, 1, low, max(low, high) + 1))
        return ()

    def step(self, turn: AssistantTurn) -> Answer:
        """Right, higher, lower, or that no number was said."""
        said = _NUMBER.findall(turn.text)
        if not said:
            return Answer(messages=["no number"])
        if int(said[-1]) == self._number:
            return Answer(reward=1.0, done=True, parts={"correctness": 1.0})
        return Answer(messages=[HINTS[int(said[-1]) < self._number]])
