"""What the queue needs of an engine and of samples, as the queue sees them.

`rft_trainer.testing.async_engine` has a double of the engine; `single_responses` has the plain kind of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rft_trainer.protocols import Engine
from rft_trainer.records.rollouts import Prompt, Rollout


class DrawnTokens(Protocol):
    """New tokens of one sample; the three sequences have one entry a token, none where it had no turn."""

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
        """stop, length, or interrupted: the sample goes on with another call."""
        ...

    @property
    def weight_version(self) -> int: ...


class AheadEngine(Engine, Protocol):
    """Engines beside the trainer, with weights of their own.

    `publish` belongs to the trainer's thread, everything else to one thread at a time.
    """

    @property
    def weight_version(self) -> int:
        """Version that is drawn with."""
        ...

    def publish(self, version: int) -> None:
        """Keep the policy's present weights as `version`, without a word to what is being drawn.

        All ranks call it at the same place of a step: where weights lie in blocks it is an exchange.
        """
        ...

    def serve(self, version: int) -> None:
        """Draw with a published version from the next draw on; none below it is asked for again."""
        ...

    def draw(
        self,
        prefixes: Sequence[Sequence[int]],
        keys: Sequence[int],
        starts: Sequence[int],
        budgets: Sequence[int],
        *,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        min_new_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        first_token_temperature: float | None = None,
        media: Sequence[object | None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[DrawnTokens]:
        """Results as samples end, in any order; soon after `stop()` is true those that are left, as far as they are.

        A prefix is a prompt with the `starts` tokens that were drawn already; `media` are the images of each, None
        where it has none; None: no prompt has any.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """Metrics since they were asked last."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """What an engine is asked to draw next of a sample."""

    prefix: tuple[int, ...]
    key: int
    start: int
    """Tokens at the end of the prefix that were drawn under this key."""
    budget: int
    """Tokens that it may still have."""


class PartialRollout(Protocol):
    """One sample on its way. The queue calls these under its lock, so none of them waits or computes for long."""

    @property
    def can_draw(self) -> bool:
        """Whether an engine can draw on now."""
        ...

    @property
    def can_ask(self) -> bool:
        """Whether it waits for `RolloutType.answer`; a single response never does."""
        ...

    @property
    def lane(self) -> int:
        """Which of the answering threads it belongs to."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether nothing more is drawn or asked of it."""
        ...

    def request(self, prompt: Prompt) -> DrawRequest:
        """What is drawn next, where it can be drawn on."""
        ...

    def add(self, drawn: DrawnTokens) -> None:
        """Take new tokens of its last request in."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain JSON with all that was drawn; `spans` are its (weight version, number of tokens)."""
        ...


class RolloutType(Protocol):
    """What samples are: single responses, or conversations."""

    answers: int
    """Threads that call `answer`, each for the samples of one lane; 0 = samples ask nothing between their turns."""

    def begin(self, prompt: Prompt, keys: Sequence[int]) -> list[PartialRollout]:
        """The samples of one prompt, with nothing drawn; under the lock."""
        ...

    def restore(self, prompt: Prompt, keys: Sequence[int], states: Sequence[Mapping[str, Any]]) -> list[PartialRollout]:
        """From `PartialRollout.state()` after JSON; under the lock."""
        ...

    def answer(self, drafts: Sequence[PartialRollout]) -> Callable[[], None]:
        """Answer samples of one lane that ask, outside of the lock; the result puts the answers in, under it."""
        ...

    def rollouts(self, groups: Sequence[tuple[Prompt, Sequence[PartialRollout]]]) -> list[list[Rollout]]:
        """Whole samples with their rewards, group after group; in the scoring thread."""
        ...
