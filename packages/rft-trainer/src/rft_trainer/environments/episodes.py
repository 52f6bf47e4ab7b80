"""Episodes and their runners: built-in environments in this process, those of users in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rft_trainer.environments.protocol import (
    Answer,
    AssistantTurn,
    Environment,
    EnvironmentPrompt,
    as_answer,
    as_messages,
)
from rft_trainer.records.scores import RewardStatus


@dataclass(slots=True)
class Episode:
    """One episode: the state of a conversation on the environment's side."""

    number: int
    """Unique among a runner's episodes; later ones have larger numbers, since older ones are dropped by number."""
    prompt: EnvironmentPrompt
    key: int
    turns: list[AssistantTurn] = field(default_factory=list[AssistantTurn])
    """All turns of the policy; the last one is to be answered now."""
    seconds: float = 0.0
    """Seconds spent by the environment so far."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of an environment: messages with status ok, or the reason why there are none."""

    status: RewardStatus
    answer: Answer | None = None
    seconds: float = 0.0
    detail: str = ""
    """What went wrong, with file:line where there is one; empty where the status is ok."""


class EpisodeRunner(Protocol):
    """Runner of episodes; the order of its replies is that of the episodes."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools, for the chat template."""
        ...

    def reset(self, episodes: Sequence[Episode], oldest: int | None = None) -> list[Reply]:
        """Begin episodes; the messages of an answer open the conversation.

        Episodes with numbers below `oldest` (None: the first of this call) are forgotten, however they ended.
        """
        ...

    def step(self, episodes: Sequence[Episode]) -> list[Reply]:
        """Answer the last turn of each episode."""
        ...

    def close(self) -> None:
        """Stop the runner's processes, if it has any."""
        ...


def oldest_kept(episodes: Sequence[Episode], oldest: int | None) -> int:
    """Return the number below which episodes are dropped when these are begun."""
    return min((episode.number for episode in episodes), default=0) if oldest is None else oldest


class BuiltinEpisodes:
    """Runner of this package's environments in this process: they are bounded and cannot hang."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._open: dict[int, Environment] = {}
        self.tools: Sequence[Mapping[str, Any]] = tuple(getattr(make, "tools", ()))

    def reset(self, episodes: Sequence[Episode], oldest: int | None = None) -> list[Reply]:
        """Begin episodes in new environments, as `EpisodeRunner.reset`."""
        first = oldest_kept(episodes, oldest)
        self._open = {number: kept for number, kept in self._open.items() if number >= first}
        return [self._reset(episode) for episode in episodes]

    def step(self, episodes: Sequence[Episode]) -> list[Reply]:
        """Answer the last turn of each episode, as `EpisodeRunner.step`."""
        return [self._step(episode) for episode in episodes]

    def close(self) -> None:
        """Drop all open episodes."""
        self._open.clear()

    def _reset(self, episode: Episode) -> Reply:
        environment = self._open[episode.number] = self._make()
        opening = as_messages(environment.reset(episode.prompt, episode.key), "user")
        return Reply(RewardStatus.OK, Answer(opening))

    def _step(self, episode: Episode) -> Reply:
        started = time.perf_counter()
        answer = as_answer(self._open[episode.number].step(episode.turns[-1]), episode.turns[-1])
        if answer.done:
            del self._open[episode.number]
        return Reply(RewardStatus.OK, answer, time.perf_counter() - started)
