"""Controls: environments whose answers say nothing. Who still succeeds here did not need to listen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rft_core.keyed_random import derive_key, integers
from rft_trainer.environments.calculator import Calculator
from rft_trainer.environments.guess_number import HINTS, GuessNumber
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt, Message


class NoisyCalculator(Calculator):
    """Calls are answered with any number of four digits; the verdict is as ever."""

    def reset(self, prompt: EnvironmentPrompt, key: int) -> Sequence[Message | str]:
        """As the calculator's."""
        self._key, self._count = key, 0
        return super().reset(prompt, key)

    def step(self, turn: AssistantTurn) -> Answer:
        """As many numbers as there are calls, or the verdict."""
        answer = super().step(turn)
        self._count += 1
        drawn = integers(derive_key(self._key, "noise", self._count), max(len(answer.messages), 1), 1_000, 10_000)
        return replace(answer, messages=[str(number) for number in drawn.tolist()[: len(answer.messages)]])


class NoisyHints(GuessNumber):
    """Higher or lower by a coin; the number itself still wins."""

    def reset(self, prompt: EnvironmentPrompt, key: int) -> Sequence[Message | str]:
        """As the guessing game's."""
        self._key, self._count = key, 0
        return super().reset(prompt, key)

    def step(self, turn: AssistantTurn) -> Answer:
        """Won, or a hint that says nothing."""
        answer = super().step(turn)
        self._count += 1
        coin = int(integers(derive_key(self._key, "noise", self._count), 1, 0, 2))
        return replace(answer, messages=[HINTS[coin] if m in HINTS else m for m in answer.messages])
