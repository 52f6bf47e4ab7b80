"""Control environments with uninformative answers: success in them does not come from the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rft_core.keyed_random import derive_key, integers
from rft_trainer.environments.calculator import Calculator
from rft_trainer.environments.guess_number import HINTS, GuessNumber
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt, Message


class NoisyCalculator(Calculator):
    """Calculator control that answers calls with random four-digit numbers; the reward is unchanged."""

    def reset(self, prompt: EnvironmentPrompt, key: int) -> Sequence[Message | str]:
        """Begin an episode as the calculator does, with the key of the noise."""
        self._key, self._count = key, 0
        return super().reset(prompt, key)

    def step(self, turn: AssistantTurn) -> Answer:
        """Return one random number a call, or the reward of a turn without calls."""
        answer = super().step(turn)
        self._count += 1
        # by turn, so that a replayed episode meets the same noise
        drawn = integers(derive_key(self._key, "noise", self._count), max(len(answer.messages), 1), 1_000, 10_000)
        return replace(answer, messages=[str(number) for number in drawn.tolist()[: len(answer.messages)]])


class NoisyHints(GuessNumber):
    """Guessing game control with random hints; the right number still wins."""

    def reset(self, prompt: EnvironmentPrompt, key: int) -> Sequence[Message | str]:
        """Begin an episode as the guessing game does, with the key of the noise."""
        self._key, self._count = key, 0
        return super().reset(prompt, key)

    def step(self, turn: AssistantTurn) -> Answer:
        """Answer a guess: reward and end, or a random hint."""
        answer = super().step(turn)
        self._count += 1
        coin = int(integers(derive_key(self._key, "noise", self._count), 1, 0, 2))
        return replace(answer, messages=[HINTS[coin] if m in HINTS else m for m in answer.messages])
