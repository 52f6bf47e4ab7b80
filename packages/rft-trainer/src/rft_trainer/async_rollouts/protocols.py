"""Protocols of the rollout queue: the engine and the samples that it requires.

`rft_trainer.testing.async_engine` has a double of the engine; `async_rollouts.single_turn` has single-turn samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_trainer.protocols import Engine
from rft_trainer.records.rollouts import Prompt, Rollout


class DrawnTokens(Protocol):
    """New tokens of one sample; the three sequences have one entry a token, and are empty where it was not reached."""

    @property
    def request(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def log_kept_mass(self) -> Sequence[float]: ...
    @property
    def finish_reason(self) -> str:
        """Finish reason: stop, length, or interrupted (the sample continues with another call)."""
        ...

    @property
    def weight_version(self) -> int: ...


class AsyncEngine(Engine, Protocol):
    """Engines that run beside the trainer with their own copy of the weights.

    `publish` belongs to the trainer's thread, everything else to one thread at a time.
    """

    @property
    def weight_version(self) -> int:
        """Weight version that the engine samples with."""
        ...

    def publish(self, version: int) -> None:
        """Snapshot the current weights as `version` without interrupting running generation.

        All ranks call it at the same point of a step: for sharded weights it is a collective operation.
        """
        ...

    def serve(self, version: int) -> None:
        """Serve a published version from the next draw on; no older version is requested again."""
        ...

    def draw(
        self,
        prefixes: Sequence[Sequence[int]],
        keys: Sequence[int],
        starts: Sequence[int],
        budgets: Sequence[int],
        options: SamplingOptions,
        *,
        media: Sequence[object | None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[DrawnTokens]:
        """Yield results as samples end, in any order; soon after `stop()` is true, the unfinished rest as it is.

        A prefix is a prompt with the `starts` tokens that were drawn already; a sample's budget replaces
        `options.max_new_tokens`; `media` are the images of each, None
        where it has none; None: no prompt has any.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """Return the engine's metrics since the last call."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """Request for the next tokens of one sample."""

    prefix: tuple[int, ...]
    key: int
    start: int
    """Tokens at the end of the prefix that were drawn under this key."""
    budget: int
    """Tokens that it may still have."""


class PartialRollout(Protocol):
    """One sample in progress. The queue calls these under its lock, so none of them waits or computes for long."""

    @property
    def needs_generation(self) -> bool:
        """Return whether an engine can continue the sample now."""
        ...

    @property
    def awaits_environment(self) -> bool:
        """Return whether it waits for `RolloutType.answer`; a single response never does."""
        ...

    @property
    def worker_index(self) -> int:
        """Index of the answering thread that it belongs to."""
        ...

    @property
    def is_complete(self) -> bool:
        """Return whether it is complete: no tokens and no answers are outstanding."""
        ...

    def request(self, prompt: Prompt) -> DrawRequest:
        """Return the request for its next tokens, if an engine can continue it."""
        ...

    def add(self, drawn: DrawnTokens) -> None:
        """Append new tokens of its last request."""
        ...

    def state(self) -> dict[str, Any]:
        """Return plain JSON with all sampled tokens; `spans` are its (weight version, number of tokens)."""
        ...


class RolloutType(Protocol):
    """Type of the samples: single responses, or conversations."""

    answers: int
    """Threads that call `answer`, each for the samples of one worker; 0 = samples need no answers."""

    def begin(self, prompt: Prompt, keys: Sequence[int]) -> list[PartialRollout]:
        """Create the samples of one prompt, without tokens; called under the lock."""
        ...

    def restore(self, prompt: Prompt, keys: Sequence[int], states: Sequence[Mapping[str, Any]]) -> list[PartialRollout]:
        """Restore samples from `PartialRollout.state()` after JSON; called under the lock."""
        ...

    def answer(self, drafts: Sequence[PartialRollout]) -> Callable[[], None]:
        """Answer waiting samples of one worker, outside of the lock; the result records the answers under it."""
        ...

    def rollouts(self, groups: Sequence[tuple[Prompt, Sequence[PartialRollout]]]) -> list[list[Rollout]]:
        """Return whole samples with their rewards, group after group; called in the scoring thread."""
        ...
