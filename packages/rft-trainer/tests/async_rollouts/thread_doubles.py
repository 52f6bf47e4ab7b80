"""Doubles for tests of one thread of a queue at a time: a condition that never waits, groups, samples, an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_trainer.async_rollouts.partial_rollout import PartialGroup, PartialSample
from rft_trainer.async_rollouts.protocols import DrawnTokens, DrawRequest, PartialRollout
from rft_trainer.async_rollouts.shared_state import SharedState
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.scores import RewardStatus
from rft_trainer.testing.async_engine import FakeDrawn


class Steps(threading.Condition):
    """A condition on which every wait is the next of `events`; the waits after them find `last`."""

    def __init__(self, *events: Callable[[], object], last: Callable[[], object]) -> None:
        super().__init__()
        self._events, self._last = list(events), last
        self.waits: list[float | None] = []
        self.notified = 0

    def wait(self, timeout: float | None = None) -> bool:
        super().notify(0)  # an error without the lock, as a wait would be
        self.waits.append(timeout)
        (self._events.pop(0) if self._events else self._last)()
        return True

    def notify_all(self) -> None:
        self.notified += 1
        super().notify_all()


def a_board(*events: Callable[[], object]) -> tuple[SharedState, Steps]:
    """Shared state whose waits are these events; the wait after them closes it."""
    board = SharedState(20.0)

    def end() -> None:
        board.is_closing = True

    board.changed = steps = Steps(*events, last=end)
    return board, steps


def a_prompt(number: int, *, media: Any = None) -> Prompt:
    return Prompt(f"p:{number}", (10 + number, 20 + number), f"text {number}", str(number), "p", media=media)


def a_group(
    number: int, *drafts: PartialRollout, batch: int = 1, version: int = 0, epoch: int = 0, media: Any = None
) -> PartialGroup:
    entry = LedgerEntry(epoch, number, number)
    return PartialGroup(entry, a_prompt(number, media=media), list(drafts), batch, version)


def drawn(request: int, ids: Sequence[int], reason: str = "stop", version: int = 0) -> FakeDrawn:
    return FakeDrawn(request, tuple(ids), (-0.5,) * len(ids), (0.0,) * len(ids), reason, version)


def ended(key: int, *ids: int, version: int = 0) -> PartialSample:
    """A sample that has these tokens and has stopped."""
    sample = PartialSample(key, 9)
    sample.add(drawn(0, ids or (1,), version=version))
    return sample


@dataclass(slots=True)
class Asking:
    """A sample that waits for an environment, until it is answered; then it is drawn on, or complete."""

    worker_index: int = 0
    stage: str = "asks"
    key: int = 7

    @property
    def needs_generation(self) -> bool:
        return self.stage == "draws"

    @property
    def awaits_environment(self) -> bool:
        return self.stage == "asks"

    @property
    def is_complete(self) -> bool:
        return self.stage == "complete"

    def request(self, prompt: Prompt) -> DrawRequest:
        return DrawRequest(prompt.token_ids, self.key, 0, 5)

    def add(self, drawn: DrawnTokens) -> None:
        self.stage = "asks" if drawn.finish_reason != "interrupted" else "draws"

    def state(self) -> dict[str, Any]:
        return {"stage": self.stage, "spans": []}


class Kind:
    """A type of samples that notes its calls; `answered` is the stage that an answer leaves a sample in."""

    answers = 1

    def __init__(self, *answered: str) -> None:
        self._answered = list(answered)
        self.scored: list[list[str]] = []
        self.asked: list[list[PartialRollout]] = []

    def begin(self, prompt: Prompt, keys: Sequence[int]) -> list[PartialRollout]:
        raise NotImplementedError

    def restore(self, prompt: Prompt, keys: Sequence[int], states: Sequence[Mapping[str, Any]]) -> list[PartialRollout]:
        raise NotImplementedError

    def answer(self, drafts: Sequence[PartialRollout]) -> Callable[[], None]:
        self.asked.append(list(drafts))

        def put() -> None:
            for draft in drafts:
                assert isinstance(draft, Asking)
                draft.stage = self._answered.pop(0)

        return put

    def rollouts(self, groups: Sequence[tuple[Prompt, Sequence[PartialRollout]]]) -> list[list[Rollout]]:
        self.scored.append([prompt.prompt_id for prompt, _ in groups])
        return [
            [
                Rollout(prompt.prompt_id, index, (1,), (0.0,), (0.0,), "stop", 0, "", 1.0, RewardStatus.OK)
                for index, _ in enumerate(drafts)
            ]
            for prompt, drafts in groups
        ]


Script = Callable[[Callable[[], bool]], Iterator[DrawnTokens]]


@dataclass(slots=True)
class ScriptedEngine:
    """An engine that notes what it is asked; every draw is the next script, which is given the predicate of the end."""

    scripts: list[Script] = field(default_factory=list[Script])
    weight_version: int = 0
    log: list[Any] = field(default_factory=list[Any])
    asked: tuple[Any, ...] = ()

    def serve(self, version: int) -> None:
        self.log.append(("serve", version))
        self.weight_version = version

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
        self.log.append(("draw", list(keys)))
        self.asked = (list(prefixes), list(starts), list(budgets), options, media)
        assert stop is not None
        yield from self.scripts.pop(0)(stop)
