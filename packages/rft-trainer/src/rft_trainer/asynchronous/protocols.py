"""What the queue needs of an engine, as the queue sees it; `rft_trainer.asynchronous.testing` has a double."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from rft_trainer.protocols import Engine


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
        """Keep the policy's present weights as `version`, without a word to what is being drawn."""
        ...

    def serve(self, version: int) -> None:
        """Draw with a published version from now on; none below it is asked for again."""
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
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[DrawnTokens]:
        """Results as samples end, in any order; soon after `stop()` is true those that are left, as far as they are.

        A prefix is a prompt with the `starts` tokens that were drawn already.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """Metrics since they were asked last."""
        ...

    def close(self) -> None: ...
